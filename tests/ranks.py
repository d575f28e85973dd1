"""Run under torchrun by test_learner: each of two ranks trains on its share; rank 0 saves the gradients."""

import os
import sys
from datetime import timedelta
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist
from conftest import make_cfg, make_groups, tiny_model
from torch.distributed.tensor import DTensor, distribute_tensor

import batching
import objectives
from learner import Comm, Learner

f64 = torch.float64
LOW_BITS = {"rollout_quant": "w4a16", "learner_quant": "aligned", "quant_group": 32}
RANK_CASES = [
    ({"objective": "jackpot"}, f64),
    ({"objective": "jackpot", "obrs_accept_rate": 0.8, "loss_denominator": "kept"}, f64),
    ({"objective": "mis_gspo"}, f64),
    ({"objective": "gepo", "gepo_defence": 4.0, "cppo_beta": 0.5}, f64),
    ({"objective": "jackpot", "actor": "base:actor"}, f64),
    ({"objective": "tis", "actor": "base:actor"}, torch.float32),
    ({"objective": "tbpo", "optimizer": "muon", **LOW_BITS}, torch.float32),
]


def rank_groups():
    return make_groups(4, seed=11, prompt=(3, 12))


def make_learner(cfg, dtype=f64, comm=None):
    """A learner of the tiny policy, and of the tiny actor where there is one."""
    actor = tiny_model(1, dtype=dtype) if cfg.actor != "none" else None
    return Learner(tiny_model(0, layers=2, dtype=dtype), actor, cfg, comm or Comm())


def move(learner) -> None:
    """Move every weight a little, always in the same way: after a ref pass, so that ratios are not 1."""
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in learner.models.parameters():
            noise = torch.randn(p.shape, generator=g, dtype=f64).to(p.dtype)
            if isinstance(p, DTensor):
                noise = distribute_tensor(noise, p.device_mesh, p.placements)
            p.add_(noise, alpha=0.01)


def hold_back_the_step(learner):
    """Make updates leave their gradients behind instead of stepping; returns the step that was held back."""
    step = learner._step
    learner._step = lambda loss, all_rejected: {"grad_norm": 0.0}
    return step


def run_case(case, dtype, budget: int, parallel: str, comm) -> dict:
    """One update on this rank's half of the groups: gradients, metrics, and the optimizer's state taken round."""
    cfg = make_cfg(**case, train_batch=16, rollout_batch=16, micro_tokens=budget, parallel=parallel)
    learner = make_learner(cfg, dtype, comm)
    groups = rank_groups()[2 * comm.rank : 2 * comm.rank + 2]
    columns = learner.ref_columns(batching.collate(groups, cfg), cfg.obrs_lambda)
    batching.write_ref_columns(groups, columns)
    move(learner)
    batch = batching.collate(groups, cfg)
    stats = objectives.prepare(batch, comm, cfg, {})
    shared = {share for *_, share in learner._micro(batch)}
    step = hold_back_the_step(learner)
    logged = learner.update(batch, stats)
    grads = {name: whole(p.grad).clone() for name, p in learner.models.named_parameters()}
    step(0.0)
    return {
        "grads": grads,
        "logged": logged,
        "shared": shared,
        "roundtrip": survives(learner, comm),
        "names": sorted(name for name, _ in learner.named_tensors("policy")),
    }


def survives(learner, comm) -> bool:
    """Whether the optimizer's state, loaded from rank 0's, is the same afterwards."""
    state = learner.state_dict()
    box = [state]
    dist.broadcast_object_list(box, src=0)
    learner.load_state_dict(box[0])
    before, after = leaves(state), leaves(learner.state_dict())
    if len(before) <= 10 and comm.rank == 0:  # the other ranks may hold less
        return False
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def leaves(x) -> list:
    """Every tensor inside dicts, lists and tuples."""
    if isinstance(x, torch.Tensor):
        return [x]
    found = []
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, (list, tuple)):
        for value in x:
            found += leaves(value)
    return found


def main(parallel: str, out: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=150))
    comm, results = Comm(), []
    for i, (case, dtype) in enumerate(RANK_CASES):
        budget = (1, 45)[comm.rank] if i == 1 else (20, 60)[comm.rank]  # prompts are shared in every case but one
        results.append(run_case(case, dtype, budget, parallel, comm))
    if comm.rank == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter and abort it


if __name__ == "__main__":
    main(*sys.argv[1:])
