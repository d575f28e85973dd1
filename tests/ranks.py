"""Run by test_learner through tests/torchrun.py: each of two ranks trains on its share; rank 0 saves the gradients."""

import importlib.util
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import numpy as np
import torch
import torch.distributed as dist
from conftest import logprobs, make_cfg, make_groups, tiny_model
from torch.distributed.tensor import DTensor, distribute_tensor
from torchrun import as_rank

import batching
import objectives
from learner import Learner
from machinery.checkpoint import shards
from machinery.ranks import Comm
from model import lora

f64 = torch.float64
LOW_BITS = {"rollout_quant": "w4a16", "learner_quant": "aligned", "quant_group": 32}
PROBE = np.arange(40).reshape(4, 10) * 7 % 250  # token ids
KEPT = {"loss_denominator": "kept", "reduction": "seq-mean-token-mean"}
# (flags, precision, how the ranks' shares are uneven)
EVEN = [
    ({"objective": "jackpot", "actor": "base:actor"}, f64, ""),
    ({"objective": "jackpot", "obrs_accept_rate": 0.8, "loss_denominator": "kept"}, f64, ""),
    ({"objective": "gepo", "gepo_defence": 4.0, "cppo_beta": 0.5}, f64, ""),
    ({"objective": "tbpo", "optimizer": "muon", **LOW_BITS}, torch.float32, ""),
    ({"objective": "tis", "kl_coef": 0.3, "entropy_coef": 0.1}, f64, ""),
    ({"objective": "tis", "dtype": "float16"}, torch.float32, ""),
]
if importlib.util.find_spec("peft"):  # an optional package
    EVEN.append(({"objective": "tis", "lora_rank": 3, "kl_coef": 0.3}, f64, ""))
UNEVEN = [
    ({"objective": "jackpot", "obrs_accept_rate": 0.7, **KEPT}, f64, "empty"),
    ({"objective": "jackpot", "obrs_target": "new"}, f64, "masked"),
    ({"objective": "jackpot", "obrs_target": "new", "actor": "base:actor", "distill_kl_target": 0.05}, f64, "masked"),
    ({"objective": "seq_mis", "rs_high": 0.01, "reject": "seq_min:1e-8:inf", **KEPT}, f64, "poor"),
    ({"objective": "geo_rs", "rs_low": 1e-6, "rs_high": 0.05, "loss_denominator": "kept"}, f64, "short"),
    ({"objective": "jackpot", "obrs_mask": "expected", **KEPT}, f64, "all masked"),
]
RANK_CASES = {"ddp": [*EVEN, *UNEVEN], "fsdp": EVEN}


def rank_groups(odd: str = ""):
    """Two groups for rank 0, then two for rank 1. odd: how the second rank's groups are uneven, or all groups."""
    groups = make_groups(4, seed=11, prompt=(3, 12))
    for group in groups if odd.startswith("all") else groups[2:]:
        for r in group.responses:
            if "masked" in odd:
                r.loss_mask = r.loss_mask & False
            elif "poor" in odd:
                r.reward = 0.0
            n = {"empty": 0, "short": 1}.get(odd, len(r.tokens))
            for name in ("tokens", "loss_mask", "logp_inf", "topk_ids", "topk_logp"):
                setattr(r, name, getattr(r, name)[:n])
    return groups


def make_learner(cfg, dtype=f64, comm=None):
    """A learner of the tiny policy, and of the tiny actor if there is one."""
    actor = tiny_model(1, dtype=dtype) if cfg.actor != "none" else None
    start = tiny_model(3, dtype=dtype) if cfg.kl_coef else None
    policy = tiny_model(0, layers=2, dtype=dtype)
    if cfg.lora_rank:
        start = None
        lora.attach(policy, cfg)
    return Learner(policy, actor, cfg, comm or Comm(), start=start)


def move(learner) -> None:
    """Change every weight slightly, deterministically: after a ref pass ratios are not 1."""
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in learner.models.parameters():
            noise = torch.randn(p.shape, generator=g, dtype=f64).to(p.device, p.dtype)
            if isinstance(p, DTensor):
                noise = distribute_tensor(noise, p.device_mesh, p.placements)
            p.add_(noise, alpha=0.01)


def relative(a: dict, b: dict) -> float:
    """|a - b| / |a| over all parameters together."""
    assert a.keys() == b.keys()
    difference = sum(float((a[n].cpu() - b[n].cpu()).double().square().sum()) for n in a)
    return (difference / sum(float(x.double().square().sum()) for x in a.values())) ** 0.5


def hold_back_the_step(learner):
    """Replace the learner's step by a no-op, so updates keep their gradients; return the real step."""
    step = learner.step
    learner.step = lambda *args: {"grad_norm": 0.0}
    return step


def one_update(cfg, learner, groups) -> tuple[dict, dict, dict]:
    """(gradients, metrics, controllers for the next update) of one update after a ref pass, without a step."""
    batching.write_ref_columns(groups, learner.ref_columns(batching.collate(groups, cfg)))
    move(learner)
    batch, controllers = batching.collate(groups, cfg), {}
    stats = objectives.prepare(batch, learner.comm, cfg, controllers)
    hold_back_the_step(learner)
    logged = learner.backward(batch, stats)
    objectives.update_controllers(controllers, logged, cfg)
    grads = {name: whole(p.grad).clone() for name, p in learner.models.named_parameters() if p.requires_grad}
    return grads, logged, controllers


def run_case(case, dtype, odd: str, budget: int, memory: dict, comm, folder: Path) -> dict:
    """One update on this rank's half of the groups: its results, and whether a checkpoint restores the learner.

    memory: flags for memory that change no number."""
    cfg = make_cfg(**case, train_batch=16, rollout_batch=16, micro_tokens=budget, **memory)
    learner = make_learner(cfg, dtype, comm)
    step = learner.step
    probed = {name: torch.from_numpy(logprobs(learner, name, PROBE)) for name in learner.names}
    groups = rank_groups(odd)[2 * comm.rank : 2 * comm.rank + 2]
    grads, logged, controllers = one_update(cfg, learner, groups)
    shards_of_gradient = [local(p.grad) for p in learner.models.parameters() if p.requires_grad]
    square = learner.dot(shards_of_gradient, shards_of_gradient)
    shared = {share for *_, share in learner._micro(batching.collate(groups, cfg))}
    results = [None] * comm.size
    dist.all_gather_object(results, (logged, controllers))
    if not odd:
        step({"loss": 0.0, "rollout_corr/rollout_rs_masked_fraction": 0.0})
        gradients = [p.grad for p in learner.models.parameters() if p.requires_grad]
        assert learner.sharded or not any(g is None or g.any() for g in gradients)  # zeros in DDP's buckets
    return {
        "grads": grads,
        "square": square,
        "probed": probed,
        "logged": results,
        "shared": shared,
        "roundtrip": bool(odd) or survives(learner, comm, folder),
        "names": sorted(name for name, _ in learner.named_tensors("policy")),
    }


def survives(learner, comm, folder: Path) -> bool:
    """Whether weights and optimizers are restored from the ranks' shards after they were overwritten."""
    before = {key: x.clone() for name in learner.names for key, x in learner.trained(name).items()}
    shards.write_shards(before, folder)
    states = len(before) - sum(p.requires_grad for p in learner.models.parameters())
    for name in learner.names:
        for x in learner.trained(name).values():
            x.fill_(7.0)
    shards.read_shards(learner, folder)
    after = {key: x for name in learner.names for key, x in learner.trained(name).items()}
    same = before.keys() == after.keys() and states > 10
    return same and all(torch.equal(local(x), local(after[key])) for key, x in before.items())


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def main(parallel: str, out: str) -> None:
    comm, results = Comm(), []
    for i, (case, dtype, odd) in enumerate(RANK_CASES[parallel]):
        budget = (1, 45)[comm.rank] if i == 1 else (20, 60)[comm.rank]  # prompts are shared in every case but one
        memory = {"parallel": parallel, "gradient_checkpointing": i % 3 != 1}
        results.append(run_case(case, dtype, odd, budget, memory, comm, Path(f"{out}.{i}")))
    if comm.rank == 0:
        torch.save(results, out)


if __name__ == "__main__":
    as_rank(main)
