"""Checkpoints between updates: atomic, and sufficient to resume without any difference.

    OUT/checkpoints/step_000050/policy/      Hugging Face folder in the model's own precision, for eval.py or vLLM
                                actor/       the same for the actor, if there is one
                                policy_adapter/, actor_adapter/
                                             with LoRA: adapters in peft's format (model/lora.py)
                                shards/      trained weights, optimizer states (shards.py)
                                learner.pt   counters, controllers (kappa, lambda_distill)
                                rank0.pt     source of this rank, its pending groups with their ref columns
                                digests.json SHA-256 of every file

A checkpoint is written under a temporary name that is renamed at the end: it is complete or absent.
If a digest shows later damage, the previous checkpoint is used."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import torch

from config import Config
from machinery.checkpoint.models import save_model
from machinery.checkpoint.shards import read_shards, whole, write_shards
from machinery.checkpoint.state import dealt, pack, unpack
from machinery.flags import need
from machinery.ranks import from_all
from rollout import Rollout

FORMAT = 4  # a checkpoint of a different format is rejected
SAVED = "saved.txt"  # empty file of a run folder: a checkpoint was written


# ---------------------------------------------------------------------------------------------------------------------
# Save and load
# ---------------------------------------------------------------------------------------------------------------------


def save(run, step: int, learner, source, pending: list[list[Rollout]], controllers: dict) -> Path:
    """Write the checkpoint after `step` updates, delete all but the newest `--keep` checkpoints,
    and return its folder.

    Collective. run: a run.Run. pending: minibatches of groups that wait for their update. Raises
    UserError if the checkpoint could not be written."""
    cfg, rank = run.cfg, learner.comm.rank
    shared = {
        "format": FORMAT,
        "step": step,
        "n_ranks": learner.comm.size,
        "learner": learner.state_dict(),
        "controllers": controllers,
    }
    rank_state = {"source": source.state_dict(), "pending": [pack(groups) for groups in pending]}
    final = Path(cfg.out) / "checkpoints" / f"step_{step:06d}"
    why = write_at(final, run, learner, shared, rank_state)
    need(
        not why,
        f"{final}: the checkpoint could not be written ({why}); free disk space there, and continue from the "
        f"previous checkpoint with --resume --out={cfg.out}",
    )
    if rank == 0:  # old checkpoints are deleted last, so that a kill leaves one
        with suppress(OSError):  # a full disk
            (Path(cfg.out) / SAVED).touch()
        for old in folders(cfg.out)[: -cfg.keep]:
            if old.is_symlink():
                old.unlink()
            else:
                shutil.rmtree(old, ignore_errors=True)  # leftovers are deleted next time
    learner.comm.barrier()
    return final


def write_at(final: Path, run, learner, shared: dict, rank_state: dict) -> str:
    """Write one checkpoint atomically. Returns on every rank the reason of a failure, or "" if the
    checkpoint was written. Collective."""
    rank = learner.comm.rank
    scratch = final.with_name(final.name + ".writing")
    attempt = Attempt()
    if rank == 0:
        attempt(shutil.rmtree, scratch, ignore_errors=True)
        attempt(scratch.mkdir, parents=True)
    if attempt.failed():
        return attempt.why
    attempt(write_shards, own_share(learner), scratch / "shards")
    for name in learner.names:
        write_adapter = learner.adapter_writer(name)
        if rank == 0 or learner.sharded:  # DDP: each rank has the whole model
            gathered = learner.named_tensors(name, lambda x: whole(x).cpu())  # collective
            tensors = {key: x for key, x in gathered if rank == 0}
            if rank == 0:
                origin = getattr(run, name)
                attempt(
                    save_model, run.configs[name], tensors, run.tokenizer, scratch / name, origin
                )
        if rank == 0 and write_adapter is not None:
            attempt(write_adapter, scratch / f"{name}_adapter", getattr(run, name))
    if rank == 0:
        attempt(torch.save, shared, scratch / "learner.pt")
    attempt(torch.save, rank_state, scratch / f"rank{rank}.pt")
    digests = from_all(attempt(digests_of, scratch, rank))
    if not attempt.failed() and rank == 0:
        attempt(seal, scratch, digests)
        attempt(shutil.rmtree, final, ignore_errors=True)
        attempt(os.replace, scratch, final)
        attempt(flush, final.parent)
    failed = attempt.failed()
    if rank == 0 and failed:
        shutil.rmtree(scratch, ignore_errors=True)
    return attempt.why if failed else ""


def own_share(learner) -> dict[str, torch.Tensor]:
    """The trained weights and optimizer states that this rank writes: its shards, or a share of the
    tensors if every rank has all of them (DDP)."""
    tensors = {}
    for name in learner.names:
        trained = learner.trained(name)
        n = 1 if learner.sharded else learner.comm.size
        names = list(trained)[learner.comm.rank % n :: n]
        tensors |= {key: trained[key] for key in names}
    return tensors


class Attempt:
    """Runner of a sequence of writes: after the first failure it skips the rest."""

    def __init__(self):
        self.error: Exception | None = None

    def __call__(self, do, *args, **more):
        if self.error is not None:
            return None
        try:
            return do(*args, **more)
        except Exception as e:  # torch and safetensors replace the OSError of a full disk
            self.error = e

    def failed(self) -> bool:
        """Whether a write failed on any rank. Collective."""
        return any(from_all(self.error is not None))

    @property
    def why(self) -> str:
        if isinstance(self.error, OSError) and self.error.strerror:
            return self.error.strerror
        return str(self.error).partition("\n")[0] if self.error else "another rank could not write"


def load(folder: Path, learner, source) -> tuple[int, list[list[Rollout]], dict]:
    """Restore learner and source, on any number of ranks. Returns (step, pending, controllers), the
    arguments of `save`.

    Raises UserError if the checkpoint has a different FORMAT."""
    rank, n_ranks = learner.comm.rank, learner.comm.size
    shared = shared_by_ranks(folder)
    learner.load_state_dict(shared["learner"])
    read_shards(learner, folder / "shards")
    if shared["n_ranks"] == n_ranks:
        rank_state = torch.load(folder / f"rank{rank}.pt", weights_only=True)
    else:
        paths = [folder / f"rank{i}.pt" for i in range(shared["n_ranks"])]
        states = [torch.load(path, weights_only=True, mmap=True) for path in paths]
        rank_state = {
            "source": source.dealt([state["source"] for state in states]),
            "pending": dealt([state["pending"] for state in states], rank, n_ranks),
        }
    source.load_state_dict(rank_state["source"])
    pending = [unpack(packed) for packed in rank_state["pending"]]
    return shared["step"], pending, shared["controllers"]


def shared_by_ranks(folder: Path, mmap: bool = False) -> dict:
    """The contents of learner.pt. mmap: tensors stay on disk. Raises UserError if the
    checkpoint has a different FORMAT."""
    shared = torch.load(folder / "learner.pt", weights_only=True, mmap=mmap)
    need(
        shared.get("format") == FORMAT,
        f"--resume: {folder} has checkpoint format {shared.get('format', 1)}, and this revision reads {FORMAT}; "
        "resume with the revision that wrote it, or start a new run in a different --out",
    )
    return shared


# ---------------------------------------------------------------------------------------------------------------------
# Durable writes, and digests that detect damage
# ---------------------------------------------------------------------------------------------------------------------


def flush(path: Path) -> None:
    """Force a file or folder to disk (fsync), so that it survives a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digests_of(folder: Path, rank: int) -> dict[str, str]:
    """Force the files that this rank has written to disk; returns file -> digest."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and writer_of(path) == rank:
            flush(path)
            digests[str(path.relative_to(folder))] = digest(path)
    return digests


def writer_of(path: Path) -> int:
    """The rank that writes this file of a checkpoint, from the file's name."""
    match = re.fullmatch(r"rank(\d+)\.pt|__(\d+)_\d+\.distcp", path.name)
    return int(match[1] or match[2]) if match else 0


def seal(folder: Path, digests: list[dict]) -> None:
    """Write digests.json from the digests of each rank, and flush the folders."""
    joined = {name: known for part in digests if part for name, known in part.items()}
    text = json.dumps(dict(sorted(joined.items())), indent=1)
    (folder / "digests.json").write_text(text + "\n", encoding="utf-8")
    for path in (
        folder / "digests.json",
        *(path for path in folder.rglob("*") if path.is_dir()),
        folder,
    ):
        flush(path)


def digest(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def damage(folder: Path, part: str = "") -> str:
    """A description of the damage of a checkpoint, or of the files below `part`; "" if intact."""
    if not (folder / "digests.json").is_file():
        return "digests.json is missing"
    try:
        digests = json.loads((folder / "digests.json").read_text(encoding="utf-8"))
        for name, known in digests.items():
            if not name.startswith(part):
                continue
            if not (folder / name).is_file():
                return f"{name} is missing"
            if digest(folder / name) != known:
                return f"{name} has changed since it was written"
    except (OSError, ValueError, AttributeError) as e:
        return f"digests.json cannot be read ({e})"
    return ""


def folders(out: Path | str) -> list[Path]:
    """The folders of a run's complete checkpoints, oldest first."""
    steps = (Path(out) / "checkpoints").glob("step_*")
    named = [path for path in steps if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step_")))


def newest(out: Path | str, part: str = "") -> Path | None:
    """The newest intact checkpoint of the run folder `out`; None if there is no checkpoint.

    part: check only this model's folder. Damaged checkpoints are skipped with a warning. Raises
    UserError if all are damaged."""
    steps = folders(out)
    damaged = []
    for folder in reversed(steps):
        wrong = damage(folder, part)
        if not wrong:
            for sentence in damaged:
                print(f"warning: {sentence}; the previous checkpoint is used", file=sys.stderr)
            return folder
        damaged.append(f"{folder} is damaged ({wrong})")
    fix = "start a new run with --overwrite, or in a different --out"
    need(
        not steps,
        f"{out}: all checkpoints are damaged; {fix} (the newest: {''.join(damaged[:1])})",
    )
    return None


def to_resume(cfg: Config, comm) -> Path | None:
    """The checkpoint to resume from, the same on every rank; None if the run was killed before its
    first.

    Raises UserError if checkpoints were deleted, or if the checkpoint cannot be redistributed to
    this number of ranks."""
    chosen = newest(cfg.out) if comm.rank == 0 else None  # it reads all bytes
    number = int(comm.max([int(chosen.name[5:]) if chosen else -1])[0])
    if number < 0:
        if comm.rank == 0:
            check_none_lost(cfg.out)
        return None
    folder = Path(cfg.out) / "checkpoints" / f"step_{number:06d}"
    before = shared_by_ranks(folder, mmap=True)["n_ranks"]
    need(
        before == comm.size or (cfg.delay == "none" and cfg.samplers == "local"),
        f"--resume: {folder} was written by {before} rank(s) and this run has {comm.size}; groups of delayed or "
        "remote samplers cannot be redistributed: use the same number of ranks",
    )
    return folder


def check_none_lost(out: str) -> None:
    """Raise UserError if a run has saved a checkpoint and now has none."""
    need(
        not (Path(out) / SAVED).exists(),
        f"--resume: {out} has no checkpoint, though the run saved one; restore {out}/checkpoints, start again with "
        "--overwrite, or start a new run in a different --out",
    )
    print(
        f"{out}: no checkpoint was written before the run stopped; the run starts from the first update"
    )


def set_aside(out: Path | str, chosen: Path | None) -> None:
    """Rename the damaged checkpoints after the chosen one, so that they are not found again, and
    remove the files of an interrupted save."""
    for unfinished in (Path(out) / "checkpoints").glob("step_*.writing"):
        shutil.rmtree(unfinished, ignore_errors=True)
    steps = folders(out)
    for folder in steps[steps.index(chosen) + 1 :] if chosen else []:
        aside = folder.with_name(folder.name + ".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
