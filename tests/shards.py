"""Ranks of test_memory, started by tests/torchrun.py, which read model folders into shards.

shards.py FOLDERS OUT    rank 1 saves the gathered tensors of each model"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
from conftest import make_cfg
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
    policy = learner.models.policy
    buffers = dict(policy.named_buffers())
    return {name: x if name in buffers else x.full_tensor() for name, x in policy.state_dict().items()}


def values(folders: str, out: str, comm) -> None:
    tensors = {}
    for folder in folders.split(","):
        tensors[folder] = whole(learner_of(folder, comm))
    adapted = learner_of(folders.split(",")[0], comm, lora_rank=3)
    tensors["adapters"] = {name: x for name, x in whole(adapted).items() if lora.is_adapters(name)}
    if comm.rank == 1:
        torch.save(tensors, out)


def main(folders: str, out: str) -> None:
    values(folders, out, Comm())


if __name__ == "__main__":
    as_rank(main)
