"""Checkpoints at update boundaries: whole, atomic, and enough to go on as if nothing had happened.

    OUT/checkpoints/step_000050/policy/      Hugging Face folder, ready for eval.py or vLLM
                                actor/       the same, with two models
                                learner.pt   optimizers, counters, controllers (kappa, lambda_distill)
                                rank0.pt     that rank's source, pending groups with their ref columns, RNG states

Everything is written beside its final name and renamed once, so a checkpoint exists whole or not at all.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from rollout import Response, Rollout
from sampling import Sampling


def save(
    run: Path, step: int, learner, source, pending: list, controllers: dict, tokenizer, configs: dict, keep: int
) -> Path:
    """Write the checkpoint of `step` updates. pending: minibatches of groups not trained on yet. Collective."""
    comm, final = learner.comm, run / "checkpoints" / f"step_{step:06d}"
    scratch = final.with_name(final.name + ".writing")
    if comm.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    comm.barrier()
    state = learner.state_dict()
    for name in learner.names:
        tensors = {k: v.cpu() for k, v in learner.named_tensors(name)}
        if comm.rank == 0:
            save_model(configs[name], tensors, tokenizer, scratch / name)
    if comm.rank == 0:
        torch.save(
            {"step": step, "world": comm.size, "learner": state, "controllers": controllers}, scratch / "learner.pt"
        )
    torch.save(
        {"source": source.state_dict(), "pending": [pack(m) for m in pending], "rng": rng_state()},
        scratch / f"rank{comm.rank}.pt",
    )
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(scratch, final)
        for old in sorted((run / "checkpoints").glob("step_??????"))[:-keep]:
            shutil.rmtree(old)
    comm.barrier()
    return final


def save_model(config, tensors: dict, tokenizer, folder: Path) -> None:
    """A Hugging Face folder from a config and whole tensors; tied heads are written once."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config)
    shell.save_pretrained(folder, state_dict=dict(tensors))
    tokenizer.save_pretrained(folder)


def newest(run: Path) -> Path | None:
    """The newest whole checkpoint of a run; None if it was killed before its first."""
    return max((run / "checkpoints").glob("step_??????"), default=None)


def load(folder: Path, learner, source) -> tuple[int, list, dict]:
    """Bring learner (its weights were loaded from the folder already) and source back; (step, pending, controllers)."""
    comm = learner.comm
    shared = torch.load(folder / "learner.pt", weights_only=True)
    if shared["world"] != comm.size:
        raise ValueError(
            f"--resume: {folder} was written by {shared['world']} rank(s) and this run has {comm.size}; use as many"
        )
    mine = torch.load(folder / f"rank{comm.rank}.pt", weights_only=True)
    learner.load_state_dict(shared["learner"])
    source.load_state_dict(mine["source"])
    set_rng_state(mine["rng"])
    return shared["step"], [unpack(m) for m in mine["pending"]], shared["controllers"]


def rng_state() -> dict:
    kind, keys, pos, has_gauss, cached = np.random.get_state()
    version, inner, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), pos, has_gauss, cached],
        "python": [version, list(inner), gauss],
    }


def set_rng_state(state: dict) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, pos, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), pos, has_gauss, cached))
    random.setstate((state["python"][0], tuple(state["python"][1]), state["python"][2]))


def pack(groups: list[Rollout]) -> dict:
    """Groups as plain containers of tensors, strings and numbers: what a checkpoint holds (no pickled classes)."""
    t = lambda x: x if x is None else torch.from_numpy(np.ascontiguousarray(x))
    return {
        "groups": [
            {
                **{
                    f.name: getattr(g, f.name)
                    for f in fields(g)
                    if f.name not in ("prompt_ids", "sampling", "responses", "ref")
                },
                "prompt_ids": t(g.prompt_ids),
                "sampling": vars(g.sampling).copy(),
                "ref": {k: [t(x) for x in v] for k, v in g.ref.items()},
                "responses": [
                    {k: t(v) if isinstance(v, np.ndarray) else v for k, v in vars(r).items()} for r in g.responses
                ],
            }
            for g in groups
        ]
    }


def unpack(packed: dict) -> list[Rollout]:
    """The inverse of pack."""
    n = lambda x: x.numpy() if isinstance(x, torch.Tensor) else x
    return [
        Rollout(
            **{
                **g,
                "uid": tuple(g["uid"]),
                "prompt_ids": n(g["prompt_ids"]),
                "sampling": Sampling(**g["sampling"]),
                "ref": {k: [n(x) for x in v] for k, v in g["ref"].items()},
                "responses": [Response(**{k: n(v) for k, v in r.items()}) for r in g["responses"]],
            }
        )
        for g in packed["groups"]
    ]
