"""Checkpoints between updates: atomic, and sufficient to resume without any difference.

    OUT/checkpoints/step_000050/policy/      Hugging Face folder in the model's own precision, for eval.py or vLLM
                                actor/       the same for the actor, if there is one
                                policy_adapter/, actor_adapter/
                                             with LoRA: adapters in peft's format (model/lora.py)
                                shards/      trained weights, optimizer states (shards.py)
                                learner.pt   counters, controllers (kappa, lambda_distill)
                                rank0.pt     source of this rank, its pending groups with their ref
                                             columns, states of its random number generators
                                digests.json SHA-256 of every file

The state is copied to the host between two updates (Snapshot). A thread writes the copy while the
run continues (Saving), under a temporary name that is renamed at the end: a checkpoint is complete
or absent. If a digest shows later damage, the previous checkpoint is used."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import torch

from config import Config
from machinery.checkpoint.models import (
    Export,
    check_angles,
    check_family,
    check_rows,
    check_weights,
    from_hub,
    load_model,
    one_sentence,
    own_dtype,
    read_config,
    read_tokenizer,
    save_model,
    stamps,
    text_folder,
    vocabulary_size,
    write_zeros,
)
from machinery.checkpoint.shards import (
    Copies,
    from_all,
    read_shards,
    saving_group,
    whole,
    write_shards,
)
from machinery.checkpoint.state import dealt, new_rng_state, pack, rng_state, set_rng_state, unpack
from machinery.checkpoint.tensors import Layout, Published, read_tensors
from machinery.flags import UserError, need, read_json, read_text
from rollout import Rollout

__all__ = [
    "Layout",
    "Published",
    "check_angles",
    "check_family",
    "check_rows",
    "check_weights",
    "from_hub",
    "load_model",
    "one_sentence",
    "read_config",
    "read_tensors",
    "own_dtype",
    "read_tokenizer",
]
__all__ += ["save_model", "stamps", "text_folder", "vocabulary_size", "write_zeros"]

FORMAT = 4  # a checkpoint of a different format is rejected


# ---------------------------------------------------------------------------------------------------------------------
# Save and load
# ---------------------------------------------------------------------------------------------------------------------


def save(run, step: int, learner, source, pending: list[list[Rollout]], controllers: dict) -> Path:
    """Write the checkpoint after `step` updates, delete all but the newest `--keep` checkpoints,
    and return its folder.

    Collective. run: a run.Run. pending: minibatches of groups that wait for their update. Raises
    UserError, which names the place of a copy, if the checkpoint could not be written."""
    return Saving(Snapshot(run, step, learner, source, pending, controllers)).wait()


class Saving:
    """A checkpoint that a thread writes while the run continues. Old checkpoints are deleted last,
    so that a kill leaves one."""

    def __init__(self, snapshot: Snapshot):
        self.error: BaseException | None = None
        self.final = snapshot.final
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.thread = threading.Thread(target=self._write, args=(snapshot, gpu), daemon=True)
        self.thread.start()

    def _write(self, snapshot: Snapshot, gpu: int | None) -> None:
        try:
            if gpu is not None:
                # a new thread starts on device 0, which belongs to a different rank
                torch.cuda.set_device(gpu)
            write(snapshot)
        except BaseException as e:  # noqa: B036  `wait` raises it in the run's own thread
            self.error = e

    def goes_on(self) -> bool:
        return self.thread.is_alive()

    def wait(self) -> Path:
        """Wait for the thread, and return the checkpoint's folder. Raises UserError if the
        checkpoint could not be written there."""
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.final


class Snapshot:
    """The content of a checkpoint, as private copies on the host.

    Collective. Adapters are whole; weights and optimizer states are this rank's shards. If every
    rank has all of them (DDP), each rank copies a share, and the first rank also copies the model
    for the Hugging Face folder."""

    def __init__(
        self, run, step: int, learner, source, pending: list[list[Rollout]], controllers: dict
    ):
        self.run = run
        self.final = Path(run.cfg.out) / "checkpoints" / f"step_{step:06d}"
        self.rank = learner.comm.rank
        self.group = saving_group()
        shared = {
            "format": FORMAT,
            "step": step,
            "n_ranks": learner.comm.size,
            "learner": learner.state_dict(),
            "controllers": controllers,
        }
        rank_state = {
            "source": source.state_dict(),
            "pending": [pack(groups) for groups in pending],
            "rng": rng_state(),
        }
        self.shared = in_bytes(shared)
        self.own = in_bytes(rank_state)
        self.trained = {}
        self.exports: dict[str, Export] = {}
        self.adapters = {}
        copies = Copies(self.group)
        replicated = learner.comm.size > 1 and not learner.sharded  # DDP: each rank has all
        for name in learner.names:
            trained = learner.trained(name)
            names = list(trained)[self.rank :: learner.comm.size] if replicated else trained
            self.trained |= {key: copies(trained[key]) for key in names}
            adapter = learner.adapter(name)
            if adapter is not None:
                self.adapters[name] = adapter
            if self.rank == 0 or not replicated:
                self.exports[name] = self._export(name, learner, copies)

    def _export(self, name: str, learner, copies: Copies) -> Export:
        tensors = {key: copies(x) for key, x in learner.model_state(name).items()}
        stream = functools.partial(learner.stream, name, tensors)
        config = copy.deepcopy(self.run.configs[name])
        config.get_text_config().tie_word_embeddings = getattr(
            learner.models, name
        ).config.tie_word_embeddings
        return Export(config, stream, self.run.tokenizer, getattr(self.run, name))


def write(snapshot: Snapshot) -> Path:
    """Write a snapshot to its folder, and delete old checkpoints. If writing fails, write it to the
    temporary folder instead.

    Collective. Raises UserError if the checkpoint is not in its folder."""
    cfg, final = snapshot.run.cfg, snapshot.final
    why = write_at(final, snapshot)
    if why:
        # a name that no other run uses
        run = "-".join(snapshot.run.folder.resolve().parts[1:])[-200:]
        spare = Path(tempfile.gettempdir()) / f"{run}-{final.name}"
        saved_there = not write_at(spare, snapshot)
        raise UserError(not_written(final, why, spare if saved_there else None))
    if snapshot.rank == 0:
        for old in folders(cfg.out)[: -cfg.keep]:
            if old.is_symlink():
                old.unlink()
            else:
                shutil.rmtree(old, ignore_errors=True)  # leftovers are deleted next time
    from_all(None, snapshot.group)  # wait for all ranks
    return final


def write_at(final: Path, snapshot: Snapshot) -> str:
    """Write one checkpoint atomically. Returns on every rank the reason of a failure, or "" if the
    checkpoint was written. Collective."""
    rank, group = snapshot.rank, snapshot.group
    scratch = final.with_name(final.name + ".writing")
    attempt = Attempt(group)
    if snapshot.rank == 0:
        attempt(shutil.rmtree, scratch, ignore_errors=True)
        attempt(scratch.mkdir, parents=True)
    if attempt.failed():
        return attempt.why
    attempt(write_shards, snapshot.trained, scratch / "shards", group)
    for name, export in snapshot.exports.items():
        tensors = export.stream(whole)
        if rank == 0:
            attempt(export.write, scratch / name, tensors)
        for _ in tensors:  # gathering is collective, even if the first rank cannot write
            pass
    if rank == 0:
        for name, adapter in snapshot.adapters.items():
            attempt(adapter.save, scratch / f"{name}_adapter", getattr(snapshot.run, name))
        attempt((scratch / "learner.pt").write_bytes, snapshot.shared)
    attempt((scratch / f"rank{rank}.pt").write_bytes, snapshot.own)
    digests = from_all(attempt(digests_of, scratch, rank), group)
    if not attempt.failed() and rank == 0:
        attempt(seal, scratch, digests)
        attempt(shutil.rmtree, final, ignore_errors=True)
        attempt(os.replace, scratch, final)
        attempt(flush, final.parent)
    failed = attempt.failed()
    if rank == 0 and failed:
        shutil.rmtree(scratch, ignore_errors=True)
    return attempt.why if failed else ""


class Attempt:
    """Runner of a sequence of writes: after the first failure it skips the rest."""

    def __init__(self, group):
        self.group = group
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
        return any(from_all(self.error is not None, self.group))

    @property
    def why(self) -> str:
        if isinstance(self.error, OSError) and self.error.strerror:
            return self.error.strerror
        return str(self.error).partition("\n")[0] if self.error else "another rank could not write"


def not_written(final: Path, why: str, spare: Path | None) -> str:
    """The error message for a checkpoint that could not be written to its folder."""
    run = final.parent.parent
    if spare is None:
        fix = f"free disk space there, and continue from the previous checkpoint with --resume --out={run}"
    else:
        fix = f"it is complete in {spare}: free disk space, move it to {final}, and continue with --resume --out={run}"
    return f"{final}: the checkpoint could not be written ({why}); {fix}"


def load(folder: Path, learner, source) -> tuple[int, list[list[Rollout]], dict]:
    """Restore learner and source, on any number of ranks. Returns (step, pending, controllers), the
    arguments of `save`.

    Raises UserError if a different revision wrote the checkpoint."""
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
            "rng": states[rank]["rng"]
            if rank < len(states)
            else new_rng_state(learner.cfg.seed, rank),
        }
    source.load_state_dict(rank_state["source"])
    set_rng_state(rank_state["rng"])
    return (
        shared["step"],
        [unpack(packed) for packed in rank_state["pending"]],
        shared["controllers"],
    )


def shared_by_ranks(folder: Path, mmap: bool = False) -> dict:
    """The contents of learner.pt. mmap: tensors stay on disk. Raises UserError if a different
    revision wrote the checkpoint."""
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


def in_bytes(state: dict) -> bytes:
    """A state serialized by torch.save, independent of later changes."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


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
        f"--resume: {folder} was written by {before} rank(s) and this run has {comm.size}; each rank has separate "
        "samplers, delayed or remote, and groups of samplers cannot be redistributed: use the same number of ranks",
    )
    return folder


def check_none_lost(out: str) -> None:
    """Raise UserError if a run without a checkpoint has logged updates after its first save."""
    fix = "copy it from a backup, or start a new run in a different --out"
    save_every = read_json(Path(out) / "config.json", fix)["config"]["save_every"]
    metrics = Path(out) / "metrics.jsonl"
    text = read_text(metrics) if metrics.is_file() else ""
    updates = sum('"step": -1' not in line for line in text.splitlines())
    unfinished = any((Path(out) / "checkpoints").glob("step_*.writing"))
    need(
        unfinished or not 0 < save_every < updates,
        f"--resume: {out} has metrics of {updates} updates but no checkpoint, though a checkpoint was saved every "
        f"{save_every} updates; restore {out}/checkpoints, or start a new run in a different --out",
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
