"""Run under torchrun by test_learner: each of two ranks trains on its share; rank 0 saves the gradients."""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist
from conftest import make_cfg, make_groups, tiny_model

import batching
import objectives
from learner import Comm, Learner

RANK_CASES = [
    (dict(objective="jackpot"), torch.float64),
    (dict(objective="jackpot", obrs_accept_rate=0.8, loss_denominator="kept"), torch.float64),
    (dict(objective="mis_gspo"), torch.float64),
    (dict(objective="gepo", gepo_defence=4.0, cppo_beta=0.5), torch.float64),
    (dict(objective="jackpot", actor="base:actor"), torch.float64),
    (dict(objective="tis", actor="base:actor"), torch.float32),
    (
        dict(objective="tbpo", rollout_quant="w4a16", learner_quant="aligned", quant_group=32, optimizer="muon"),
        torch.float32,
    ),
]


def rank_groups():
    return make_groups(4, seed=11, prompt=(3, 12))


def main(parallel, out):
    dist.init_process_group("gloo")
    comm, results = Comm(), []
    for i, (case, dtype) in enumerate(RANK_CASES):
        tokens = ((20, 60), (1, 45))[i == 1][comm.rank]  # prompts are shared in every case but one
        cfg = make_cfg(**case, train_batch=16, rollout_batch=16, micro_tokens=tokens, parallel=parallel)
        learner = Learner(
            tiny_model(0, layers=2, dtype=dtype), tiny_model(1, dtype=dtype) if cfg.actor != "none" else None, cfg, comm
        )
        groups = rank_groups()[2 * comm.rank : 2 * comm.rank + 2]
        batching.write_ref(groups, learner.ref_columns(batching.collate(groups, cfg), cfg.obrs_lambda))
        g = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in learner.models.parameters():
                noise = torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype)
                if hasattr(p, "device_mesh"):
                    from torch.distributed.tensor import distribute_tensor

                    noise = distribute_tensor(noise, p.device_mesh, p.placements)
                p.add_(noise, alpha=0.01)
        b = batching.collate(groups, cfg)
        stats = objectives.prepare(b, comm, cfg, {})
        shared = {s for *_, s in learner._micro(b)}
        step, learner._step = learner._step, lambda loss, nothing: {"grad_norm": 0.0}
        logged = learner.update(b, stats)
        whole = lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x
        grads = {n: whole(p.grad).clone() for n, p in learner.models.named_parameters()}
        step(0.0)  # and the optimizer's state survives a round trip
        state = learner.state_dict()
        box = [state]
        dist.broadcast_object_list(box, src=0)
        learner.load_state_dict(box[0])
        again = learner.state_dict()
        same = [torch.equal(a, b) for a, b in zip(leaves(state), leaves(again))]
        results.append(
            {
                "grads": grads,
                "logged": logged,
                "shared": shared,
                "roundtrip": all(same) and (len(same) > 10 or comm.rank > 0),
                "names": sorted(n for n, _ in learner.named_tensors("policy")),
            }
        )
    if comm.rank == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter and abort it


def leaves(x):
    if isinstance(x, torch.Tensor):
        return [x]
    return [
        t for v in (x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else []) for t in leaves(v)
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
