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
from pathlib import Path

import numpy as np
import torch

import batch


def save(
    run: Path, step: int, learner, source, pending: list, carry: dict, tokenizer, configs: dict, keep: int
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
        torch.save({"step": step, "world": comm.world, "learner": state, "carry": carry}, scratch / "learner.pt")
    torch.save(
        {"source": source.state_dict(), "pending": [batch.pack(m) for m in pending], "rng": rng_state()},
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
    """Bring learner (its weights were loaded from the folder already) and source back; (step, pending, carry)."""
    comm = learner.comm
    shared = torch.load(folder / "learner.pt", weights_only=True)
    if shared["world"] != comm.world:
        raise ValueError(
            f"--resume: {folder} was written by {shared['world']} rank(s) and this run has {comm.world}; use as many"
        )
    mine = torch.load(folder / f"rank{comm.rank}.pt", weights_only=True)
    learner.load_state_dict(shared["learner"])
    source.load_state_dict(mine["source"])
    set_rng_state(mine["rng"])
    return shared["step"], [batch.unpack(m) for m in mine["pending"]], shared["carry"]


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
