"""Ranks of test_placement, started by tests/torchrun.py: two ranks are one vLLM engine, and rank 0 saves the samples
of both.

tensor_parallel.py FOLDER OTHER OUT    the first model, and the model with the weights to load"""

import os
import pickle
import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist
from conftest import make_cfg
from torchrun import as_rank

from delay import DelaySource
from machinery.checkpoint.models import load_model
from model.engines import VLLMEngine
from sampling import Sampling
from sync import WeightCheck
from tasks.arith import Arithmetic, arithmetic_tokenizer


def work(rank: int) -> tuple[list, list]:
    """(prompts, seeds) of this rank: the ranks have different numbers of prompts, of different lengths."""
    prompts = [[5, 6, 7], [9, 10], [11, 12, 13, 14]]
    seeds = [[1, 2], [3], [4, 5]]
    return (prompts[:1], seeds[:1]) if rank else (prompts[1:], seeds[1:])


def tokens(groups) -> list:
    return [[(r.tokens.tolist(), r.logp_inf.tolist(), r.topk_ids.tolist()) for r in group] for group in groups]


def delayed(engine, models: list, rank: int, store: Path) -> list:
    """This rank's groups of four updates by delayed samplers on one engine. Versions alternate between the weights of
    two models."""
    cfg = make_cfg(delay="lognormal", delay_min=5.0, delay_max=40.0, step_seconds=10.0, delay_samplers=3)
    check = WeightCheck(models[0].config, [[5, 6, 7, 8, 9, 10, 11, 12]])
    sampling = Sampling(max_tokens=8, temperature=0.8, seed=3)
    settings = dict(group_size=2, topk=3, model="policy", check=check, stop_ids=[1], rank=rank, n_ranks=2)
    tools = (engine, Arithmetic(), arithmetic_tokenizer(), sampling)
    source = DelaySource(*tools, **settings, cfg=cfg, store=store)
    groups = []
    for version in range(4):
        source.publish(version, models[version % 2].state_dict().items())
        groups += source.next(4, version)
    return [(g.version, g.prompt_ids.tolist(), tokens([g.responses])[0]) for g in groups]


def shared() -> set[str]:
    """The names of shared memory on this host, without names of different runs."""
    names = {path.name for path in Path("/dev/shm").iterdir() if "cpushm" in path.name}
    prefix = f"run{os.getppid()}-"
    return {name for name in names if prefix in name or not re.search(r"run\d+-", name)}


def main(folder: str, other: str, out: str) -> None:
    rank = dist.get_rank()
    before = shared()
    engine = VLLMEngine(folder, max_len=64, max_logprobs=5, tp=2, memory_gib=0.05)
    dist.barrier()
    if shared() - before:
        raise SystemExit(f"shared memory that a killed run would leave behind: {shared() - before}")
    sampling = Sampling(max_tokens=8, temperature=0.8)
    results = {"first": tokens(engine.generate(*work(rank), sampling, 3, [1]))}
    models = [load_model(path) for path in (folder, other)]
    engine.load(models[1].state_dict().items())
    results["loaded"] = tokens(engine.generate(*work(rank), sampling, 3, [1]))
    ids = torch.arange(24).reshape(2, 12).numpy() * 7 % 250
    results["logprobs"] = engine.logprobs(ids).tolist()
    here = ([], []) if rank else ([[3]], [[1]])
    results["nothing"] = len(engine.generate(*here, sampling, 3, [1]))
    results["any"] = [engine.any_rank(rank == 0), engine.any_rank(rank == 1), engine.any_rank(False)]
    results["delayed"] = delayed(engine, models, rank, Path(f"{out}.versions"))
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, results)
    if rank == 0:
        Path(out).write_bytes(pickle.dumps(of_ranks))


if __name__ == "__main__":
    as_rank(main)
