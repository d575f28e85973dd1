"""Ranks of test_memory under torchrun, which read model folders into shards.

shards.py values FOLDERS OUT    rank 0 saves the gathered tensors of each model
shards.py peak FOLDER OUT       each rank saves the memory that reading one model takes, in MiB"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist
from conftest import make_cfg
from torch.distributed.tensor import DTensor
from torchrun import as_rank

from learner import Learner
from machinery.ranks import Comm
from model import lora, memory


def learner_of(folder: str, comm, **changes):
    cfg = make_cfg(objective="tis", parallel="fsdp", train_batch=16, rollout_batch=16, **changes)
    policy = memory.unread(folder)
    return Learner(lora.attach(policy, cfg) if cfg.lora_rank else policy, None, cfg, comm)


def whole(learner) -> dict:
    """All tensors of the policy, gathered."""
    state = learner.models.policy.state_dict()
    assert all(isinstance(x, DTensor) for x in state.values())
    return {name: x.full_tensor() for name, x in state.items()}


def values(folders: str, out: str, comm) -> None:
    tensors = {}
    for folder in folders.split(","):
        tensors[folder] = whole(learner_of(folder, comm))
    adapted = learner_of(folders.split(",")[0], comm, lora_rank=3)
    tensors["adapters"] = {name: x for name, x in whole(adapted).items() if lora.is_adapters(name)}
    tensors["fingerprint"] = lora.fingerprint(adapted.models.policy)
    if comm.rank == 0:
        torch.save(tensors, out)


def high_water() -> float:
    """The most memory of this process so far, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def peak(folder: str, out: str, comm) -> None:
    learner_of(str(Path(folder).parent / "small"), comm)  # loads everything that is loaded on first use
    before = high_water()
    learner_of(folder, comm)
    peaks = [None] * comm.size
    dist.all_gather_object(peaks, high_water() - before)
    if comm.rank == 0:
        Path(out).write_text(json.dumps(peaks))


def main(task: str, *args: str) -> None:
    {"values": values, "peak": peak}[task](*args, Comm())


if __name__ == "__main__":
    as_rank(main)
