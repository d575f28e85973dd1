"""Checkpoints at update boundaries: whole, atomic, and enough to go on as if nothing had happened.

    OUT/checkpoints/step_000050/policy/      Hugging Face folder, ready for eval.py or vLLM
                                actor/       the same, with two models
                                policy_adapter/, actor_adapter/
                                             with LoRA: adapters in peft's format (model/lora.py)
                                learner.pt   optimizers, counters, controllers
                                             (kappa, lambda_distill)
                                rank0.pt     that rank's source, pending groups with their ref
                                             columns, states of the random number generators
                                digests.json SHA-256 of every file

Everything is written beside its final name, onto the disk, and renamed once: a checkpoint exists whole or not at
all. One that was damaged later is found by its digests, and the one before it is taken.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from checkpoint.models import (
    check_rows,
    check_weights,
    from_hub,
    load_model,
    one_sentence,
    read_config,
    read_tokenizer,
    save_model,
    text_folder,
    vocabulary_size,
)
from checkpoint.state import pack, renamed, rng_state, same_rng_state, set_rng_state, unpack
from checkpoint.tensors import read_tensors, write_tensors
from flags import UserError, need
from rollout import Rollout

__all__ = ["check_rows", "check_weights", "from_hub", "load_model", "one_sentence", "read_config", "read_tensors"]
__all__ += ["read_tokenizer", "same_rng_state", "save_model", "text_folder", "vocabulary_size", "write_tensors"]

FORMAT = 3  # 2 with digests


# ---------------------------------------------------------------------------------------------------------------------
# Save and load
# ---------------------------------------------------------------------------------------------------------------------


def save(run, step: int, learner, source, pending: list[list[Rollout]], controllers: dict) -> Path:
    """Write the checkpoint of `step` updates, delete all but the newest `--keep`; returns its folder.

    Collective. run: a run.Run, of which cfg, configs and tokenizer are read. pending: the minibatches of groups that
    are not trained on yet. UserError: it could not be written there; the sentence says where it is instead."""
    shared = {
        "format": FORMAT,
        "step": step,
        "n_ranks": learner.comm.size,
        "learner": learner.state_dict(),
        "controllers": controllers,
    }
    own = {"source": source.state_dict(), "pending": [pack(groups) for groups in pending], "rng": rng_state()}
    checkpoints = Path(run.cfg.out) / "checkpoints"
    final = checkpoints / f"step_{step:06d}"
    why = write(final, run, learner, shared, own)
    if why:
        spare = Path(tempfile.gettempdir()) / f"{run.folder.resolve().name}-{final.name}"
        saved_there = not write(spare, run, learner, shared, own)
        raise UserError(not_written(final, why, spare if saved_there else None))
    if learner.comm.rank == 0:
        for old in folders(run.cfg.out)[: -run.cfg.keep]:
            shutil.rmtree(old)
    learner.comm.barrier()
    return final


def write(final: Path, run, learner, shared: dict, own: dict) -> str:
    """Write one checkpoint, whole or not at all. Why it could not be written, on every rank; "" where it was.

    Collective: a rank that cannot write goes on with the others to the end."""
    comm, first = learner.comm, learner.comm.rank == 0
    scratch = final.with_name(final.name + ".writing")
    attempt = Attempt()
    if first:
        attempt(shutil.rmtree, scratch, ignore_errors=True)
        attempt(scratch.mkdir, parents=True)
    comm.barrier()
    for name in learner.names:
        adapter = learner.adapter(name)
        if adapter is not None and first:
            attempt(adapter.save, scratch / f"{name}_adapter", getattr(run, name))
        if adapter is not None and run.cfg.lora_save == "adapter":
            continue
        tensors = {k: v.cpu() for k, v in learner.named_tensors(name)}
        if first:
            attempt(save_model, run.configs[name], tensors, run.tokenizer, scratch / name, getattr(run, name))
    if first:
        attempt(save_tensors, shared, scratch / "learner.pt")
    attempt(save_tensors, own, scratch / f"rank{comm.rank}.pt")
    failed = comm.any(attempt.error)  # every rank has written its part
    if first and not failed:
        attempt(seal, scratch)
        attempt(shutil.rmtree, final, ignore_errors=True)
        attempt(os.replace, scratch, final)
        attempt(flush, final.parent)
    failed = comm.any(attempt.error)
    if first and failed:
        shutil.rmtree(scratch, ignore_errors=True)
    return (attempt.why or "another rank could not write") if failed else ""


class Attempt:
    """Runs one write after the other until one fails."""

    def __init__(self):
        self.error: Exception | None = None

    def __call__(self, do, *args, **more) -> None:
        if self.error is None:
            try:
                do(*args, **more)
            except Exception as e:  # a full disk is an OSError, or whatever torch and safetensors make of it
                self.error = e

    @property
    def why(self) -> str:
        if isinstance(self.error, OSError) and self.error.strerror:
            return self.error.strerror
        return str(self.error).partition("\n")[0] if self.error else ""


def not_written(final: Path, why: str, spare: Path | None) -> str:
    """The sentence for a checkpoint that could not be written where it should be."""
    run = final.parent.parent
    if spare is None:
        mend = f"make room there and go on from the checkpoint before with --resume --out={run}"
    else:
        mend = f"it is whole in {spare}: make room, move it to {final}, and go on with --resume --out={run}"
    return f"{final}: the checkpoint could not be written ({why}); {mend}"


def load(folder: Path, learner, source) -> tuple[int, list[list[Rollout]], dict]:
    """Bring learner and source back; returns (step, pending, controllers) as `save` took them.

    The learner's weights were loaded from the folder already. UserError: `shared_by_ranks`'s."""
    shared = shared_by_ranks(folder, learner.comm.size)
    own = torch.load(folder / f"rank{learner.comm.rank}.pt", weights_only=True)
    learner.load_state_dict(shared["learner"])
    source.load_state_dict(own["source"])
    set_rng_state(own["rng"])
    return shared["step"], [unpack(packed) for packed in own["pending"]], shared["controllers"]


def shared_by_ranks(folder: Path, n_ranks: int, mmap: bool = False) -> dict:
    """What is in learner.pt. mmap: tensors stay on the disk, for a look at the rest.

    UserError: the checkpoint has another number of ranks, or a format of the future."""
    shared = renamed(torch.load(folder / "learner.pt", weights_only=True, mmap=mmap))
    if shared.get("format", 1) > FORMAT:
        raise UserError(
            f"--resume: {folder} has checkpoint format {shared['format']}, and this revision reads up to {FORMAT}; "
            "resume with the revision that wrote it"
        )
    if shared["n_ranks"] != n_ranks:
        raise UserError(
            f"--resume: {folder} was written by {shared['n_ranks']} rank(s) and this run has {n_ranks}; use as many"
        )
    return shared


# ---------------------------------------------------------------------------------------------------------------------
# Whole on the disk, and found to be whole
# ---------------------------------------------------------------------------------------------------------------------


def save_tensors(state: dict, path: Path) -> None:
    with open(path, "wb") as f:
        torch.save(state, f)


def flush(path: Path) -> None:
    """Onto the disk: a loss of power does not undo it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(folder: Path) -> None:
    """Write digests.json, and everything onto the disk."""
    digests = {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / "digests.json").write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
    for path in (*folder.rglob("*"), folder):
        flush(path)


def digest(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def damage(folder: Path, part: str = "") -> str:
    """What is wrong with a checkpoint, or with one model's folder in it; "" where nothing is."""
    if not (folder / "digests.json").is_file():
        return damage_without_digests(folder)
    try:
        digests = json.loads((folder / "digests.json").read_text(encoding="utf-8"))
        for name, known in digests.items():
            if not name.startswith(part):
                continue
            if not (folder / name).is_file():
                return f"{name} is missing"
            if digest(folder / name) != known:
                return f"{name} has other bytes than were written"
    except (OSError, ValueError, AttributeError) as e:
        return f"digests.json cannot be read ({e})"
    return ""


def damage_without_digests(folder: Path) -> str:
    """The same for checkpoints of formats 1 and 2, which carry none: they can be read, or they cannot."""
    if not (folder / "learner.pt").is_file():
        return "learner.pt is missing"
    try:
        shared = torch.load(folder / "learner.pt", weights_only=True, mmap=True)
        ranks = range(renamed(shared)["n_ranks"])
        for path in (folder / f"rank{rank}.pt" for rank in ranks):
            torch.load(path, weights_only=True, mmap=True)
    except Exception as e:  # whatever a file that is cut short makes of torch.load
        return f"it cannot be read ({type(e).__name__})"
    return "digests.json is missing" if shared.get("format", 1) > 2 else ""


def folders(out: Path | str) -> list[Path]:
    """The folders of a run's checkpoints, oldest first; one that is being written is not among them."""
    found = (Path(out) / "checkpoints").glob("step_*")
    named = [path for path in found if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step_")))


def newest(out: Path | str, part: str = "") -> Path | None:
    """The newest whole checkpoint of the run folder `out`; None if the run was killed before its first.

    part: only this model's folder matters. Damaged ones are named on the screen and left out. UserError: all are."""
    found = folders(out)
    damaged = []
    for folder in reversed(found):
        wrong = damage(folder, part)
        if not wrong:
            for said in damaged:
                print(f"warning: {said}; the checkpoint before it is taken", file=sys.stderr)
            return folder
        damaged.append(f"{folder} is damaged ({wrong})")
    mend = "start anew with --overwrite, or in another --out"
    need(not found, f"{out}: no checkpoint there is whole; {mend} (the newest: {''.join(damaged[:1])})")
    return None


def set_aside(out: Path | str, chosen: Path | None) -> None:
    """Rename the checkpoints after the chosen one, which were damaged, so that none is taken for the newest."""
    found = folders(out)
    for folder in found[found.index(chosen) + 1 :] if chosen else []:
        aside = folder.with_name(folder.name + ".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
