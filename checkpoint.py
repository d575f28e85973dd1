"""Checkpoints at update boundaries: whole, atomic, and enough to go on as if nothing had happened.

    OUT/checkpoints/step_000050/policy/      Hugging Face folder, ready for eval.py or vLLM
                                actor/       the same, with two models
                                learner.pt   optimizers, counters, controllers
                                             (kappa, lambda_distill)
                                rank0.pt     that rank's source, pending groups with their ref
                                             columns, states of the random number generators

Everything is written beside its final name and renamed once: a checkpoint exists whole or not at all.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import torch

from rollout import Response, Rollout
from sampling import Sampling

FORMAT = 2
# Format 1, which has no "format" key, differs from format 2 by these names alone: theirs -> ours.
RENAMED = {
    # of learner.pt
    "carry": "controllers",
    "world": "n_ranks",
    # of a response
    "kept_offsets": "allowed_offsets",
    "kept_ids": "allowed_ids",
    # of the ref columns
    "s_ids": "support_ids",
    "s_logp": "support_logp",
    "s_logp_ref": "support_logp_ref",
    "logp_actor_ref": "actor_logp_ref",
    "kl_before": "kl_ref",
    "kl_after": "kl_after_ref",
}


def renamed(state: dict) -> dict:
    """The same values under the names of format 2."""
    return {RENAMED.get(name, name): value for name, value in state.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Save and load
# ---------------------------------------------------------------------------------------------------------------------


def save(run, step: int, learner, source, pending: list[list[Rollout]], controllers: dict) -> Path:
    """Write the checkpoint of `step` updates, delete all but the newest `--keep`; returns its folder.

    Collective. run: a run.Run, of which cfg, configs and tokenizer are read. pending: the minibatches
    of groups that are not trained on yet."""
    comm = learner.comm
    checkpoints = Path(run.cfg.out) / "checkpoints"
    final = checkpoints / f"step_{step:06d}"
    scratch = final.with_name(final.name + ".writing")
    if comm.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    comm.barrier()
    shared = {
        "format": FORMAT,
        "step": step,
        "n_ranks": comm.size,
        "learner": learner.state_dict(),
        "controllers": controllers,
    }
    for name in learner.names:
        tensors = {k: v.cpu() for k, v in learner.named_tensors(name)}
        if comm.rank == 0:
            save_model(run.configs[name], tensors, run.tokenizer, scratch / name)
    if comm.rank == 0:
        torch.save(shared, scratch / "learner.pt")
    own = {"source": source.state_dict(), "pending": [pack(groups) for groups in pending], "rng": rng_state()}
    torch.save(own, scratch / f"rank{comm.rank}.pt")
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(scratch, final)
        for old in sorted(checkpoints.glob("step_??????"))[: -run.cfg.keep]:
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


def newest(out: Path) -> Path | None:
    """The newest whole checkpoint of the run folder `out`; None if the run was killed before its first."""
    return max((out / "checkpoints").glob("step_??????"), default=None)


def load(folder: Path, learner, source) -> tuple[int, list[list[Rollout]], dict]:
    """Bring learner and source back; returns (step, pending, controllers) as `save` took them.

    The learner's weights were loaded from the folder already. ValueError, one sentence, if the
    checkpoint has another number of ranks or a format of the future."""
    comm = learner.comm
    shared = renamed(torch.load(folder / "learner.pt", weights_only=True))
    if shared.get("format", 1) > FORMAT:
        raise ValueError(
            f"--resume: {folder} has checkpoint format {shared['format']}, and this revision reads up to {FORMAT}; "
            "resume with the revision that wrote it"
        )
    if shared["n_ranks"] != comm.size:
        raise ValueError(
            f"--resume: {folder} was written by {shared['n_ranks']} rank(s) and this run has {comm.size}; use as many"
        )
    own = torch.load(folder / f"rank{comm.rank}.pt", weights_only=True)
    learner.load_state_dict(shared["learner"])
    source.load_state_dict(own["source"])
    set_rng_state(own["rng"])
    return shared["step"], [unpack(packed) for packed in own["pending"]], shared["controllers"]


# ---------------------------------------------------------------------------------------------------------------------
# States of the random number generators
# ---------------------------------------------------------------------------------------------------------------------


def rng_state() -> dict:
    """The generators of torch, CUDA, numpy and Python, as plain containers."""
    kind, keys, *rest = np.random.get_state()
    python = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
        "python": [python[0], list(python[1]), python[2]],
    }


def set_rng_state(state: dict) -> None:
    """The inverse of rng_state."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    python = state["python"]
    random.setstate((python[0], tuple(python[1]), python[2]))


# ---------------------------------------------------------------------------------------------------------------------
# Pending groups
# ---------------------------------------------------------------------------------------------------------------------


def pack(groups: list[Rollout]) -> dict:
    """Groups as containers of tensors, strings and numbers: a checkpoint holds no pickled classes."""
    packed = []
    for group in groups:
        state = {
            **vars(group),
            "sampling": dict(vars(group.sampling)),
            "responses": [dict(vars(response)) for response in group.responses],
        }
        packed.append(converted(state, np.ndarray, lambda x: torch.from_numpy(np.ascontiguousarray(x))))
    return {"groups": packed}


def unpack(packed: dict) -> list[Rollout]:
    """The inverse of pack, for both formats."""
    groups = []
    for tensors in packed["groups"]:
        state = converted(tensors, torch.Tensor, torch.Tensor.numpy)
        state["uid"] = tuple(state["uid"])
        state["sampling"] = Sampling(**state["sampling"])
        state["responses"] = [Response(**renamed(response)) for response in state["responses"]]
        state["ref"] = renamed(state["ref"])
        groups.append(Rollout(**state))
    return groups


def converted(x, kind: type, convert):
    """x with `convert` applied to every value of the type `kind`, inside dicts and lists too."""
    if isinstance(x, kind):
        return convert(x)
    if isinstance(x, dict):
        return {name: converted(value, kind, convert) for name, value in x.items()}
    if isinstance(x, list):
        return [converted(value, kind, convert) for value in x]
    return x
