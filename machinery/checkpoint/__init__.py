"""Checkpoints between updates: atomic, and sufficient to resume without any difference.

    OUT/checkpoints/step_000050/policy/      Hugging Face folder in the learner's --dtype, for eval.py or vLLM
                                actor/       the same for the actor, if there is one
                                policy_adapter/
                                             with LoRA: adapters in peft's format (model/lora.py)
                                shards/      trained weights, optimizer states (shards.py)
                                learner.pt   counters, controllers (kappa, lambda_distill)
                                rank0.pt     source of this rank, its pending groups with their ref columns

A checkpoint is written under a temporary name that is renamed at the end: it is complete or absent."""

from __future__ import annotations

import codecs
import copyreg
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import torch

from machinery.checkpoint.models import folders, newest, save_model  # noqa: F401
from machinery.checkpoint.shards import read_shards, whole, write_shards
from machinery.flags import UserError, need, shortened
from rollout import Response, Rollout
from sampling import Sampling

FORMAT = 5  # a checkpoint of a different format is rejected


def save(
    run, step: int, learner, source, pending: list[list[Rollout]], controllers: dict
) -> Path:
    """Write the checkpoint after `step` updates, delete all but the newest `--keep` checkpoints,
    and return its folder.

    Collective. run: machinery.run.Run. pending: minibatches of groups that wait for their update. Raises
    UserError if the checkpoint could not be written."""
    cfg, rank = run.cfg, learner.comm.rank
    shared = {
        "format": FORMAT,
        "step": step,
        "n_ranks": learner.comm.size,
        "learner": learner.state_dict(),
        "controllers": controllers,
    }
    rank_state = {"source": source.state_dict(), "pending": pending}
    final = Path(cfg.out) / "checkpoints" / f"step_{step:06d}"
    scratch = final.with_name(final.name + ".writing")
    try:
        write(scratch, run, learner, shared, rank_state)
    except Exception as e:  # torch and safetensors replace the OSError of a full disk
        shutil.rmtree(scratch, ignore_errors=True)
        why = str(e).partition("\n")[0]
        raise UserError(
            f"{final}: the checkpoint could not be written ({why}); free disk space there, and continue from the "
            f"previous checkpoint with --resume --out={cfg.out}"
        ) from None
    if rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(scratch, final)
        flush(final.parent)
        # old checkpoints, and those of killed saves, are deleted last, so that a kill leaves one
        for old in (
            *folders(cfg.out)[: -cfg.keep],
            *final.parent.glob("step_*.writing"),
        ):
            if old.is_symlink():
                old.unlink()
            else:
                # leftovers are deleted next time
                shutil.rmtree(old, ignore_errors=True)
    learner.comm.barrier()
    return final


def write(folder: Path, run, learner, shared: dict, rank_state: dict) -> None:
    """Write the files of a checkpoint, and force them to disk. Collective."""
    rank = learner.comm.rank
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    learner.comm.barrier()
    tensors = {}
    for name in learner.names:
        tensors |= learner.trained(name)
    write_shards(tensors, folder / "shards")
    for name in learner.names:
        if rank == 0 or learner.sharded:  # DDP: each rank has the whole model
            # collective
            gathered = learner.named_tensors(name, lambda _, x: whole(x).cpu())
        origin = getattr(run, name)
        if rank == 0:
            save_model(
                run.configs[name],
                gathered,
                getattr(torch, run.cfg.dtype),
                run.tokenizer,
                folder / name,
                origin,
            )
        elif learner.sharded:
            for _ in gathered:
                pass
        learner.write_adapter(name, folder / f"{name}_adapter", origin)
    if rank == 0:
        torch.save(shared, folder / "learner.pt")
    torch.save(rank_state, folder / f"rank{rank}.pt", pickle_module=ByTensor)
    learner.comm.barrier()
    for path in (*folder.rglob("*"), folder):
        flush(path)
    learner.comm.barrier()


def load(folder: Path, learner, source) -> tuple[int, list[list[Rollout]], dict]:
    """Restore learner and source, on any number of ranks. Returns (step, pending, controllers), the
    arguments of `save`.

    Raises UserError if the checkpoint has a different FORMAT."""
    rank, n_ranks = learner.comm.rank, learner.comm.size
    shared = shared_by_ranks(folder)
    learner.load_state_dict(shared["learner"])
    read_shards(learner, folder / "shards")
    if shared["n_ranks"] == n_ranks:
        rank_state = read(folder, f"rank{rank}.pt")
    else:
        states = [read(folder, f"rank{i}.pt") for i in range(shared["n_ranks"])]
        rank_state = {
            "source": source.dealt([state["source"] for state in states]),
            "pending": dealt([state["pending"] for state in states], rank, n_ranks),
        }
    source.load_state_dict(rank_state["source"])
    return shared["step"], rank_state["pending"], shared["controllers"]


def dealt(pending: list[list[list]], rank: int, n_ranks: int) -> list[list[Rollout]]:
    """This rank's groups of each pending minibatch, for a resume with a different number of ranks.

    pending: the minibatches of each previous rank. Group i of rank r of N ranks is group i N + r of
    the minibatch, the order in which sources distribute problems. A minibatch therefore keeps its
    groups for any number of ranks."""
    minibatches = []
    for parts in zip(*pending, strict=True):
        groups = [group for turn in zip(*parts, strict=True) for group in turn]
        minibatches.append(groups[rank::n_ranks])
    return minibatches


def array(x: torch.Tensor) -> np.ndarray:
    return x.numpy()


class ByTensor:
    """A pickle module for torch.save that writes arrays as tensors, without copies in memory."""

    class Pickler(pickle.Pickler):
        dispatch_table = copyreg.dispatch_table | {
            np.ndarray: lambda x: (
                array,
                (torch.from_numpy(np.require(x, requirements="CW")),),
            )
        }


# What rank*.pt may contain. A checkpoint of someone else can hold any pickle, but runs no code
CLASSES = [Rollout, Response, Sampling, np.ndarray, np.dtype, bytes, codecs.encode]
CLASSES += [
    array,
    np._core.multiarray._reconstruct,
    *{type(np.dtype(x)) for x in np.sctypeDict.values()},
]


def read(folder: Path, name: str) -> dict:
    """The contents of a file of a checkpoint. Raises UserError if it cannot be read."""
    try:
        with torch.serialization.safe_globals(CLASSES):
            return torch.load(folder / name, weights_only=True)
    except Exception as e:  # of many types
        raise UserError(
            f"--resume: {folder} is damaged ({name}: {shortened(e)}); delete it and resume from an earlier "
            "checkpoint, or start a new run with --overwrite"
        ) from None


def shared_by_ranks(folder: Path) -> dict:
    """The contents of learner.pt. Raises UserError if it cannot be read, or if the checkpoint has a
    different FORMAT."""
    shared = read(folder, "learner.pt")
    need(
        shared.get("format") == FORMAT,
        f"--resume: {folder} has checkpoint format {shared.get('format', 1)}, and this revision reads {FORMAT}; "
        "resume with the revision that wrote it, or start a new run in a different --out",
    )
    return shared


def flush(path: Path) -> None:
    """Force a file or folder to disk, so that it survives a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
