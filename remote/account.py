"""The account of every group: handed over by a sampler, held by the learner. HeteroRL, section 4.2.

A group's name is SAMPLER/INCARNATION/N. An incarnation is one life of a sampler's process, and N
counts its groups. The sampler writes a group into its `Spool`, as a file that starts with its
digest and appears whole. From then on the group is accounted for. The file stays until the learner
says that a checkpoint holds the group. A damaged file is replaced by an empty `.lost` file, and the
learner books the group as lost. The learner's side is a set of names. A checkpoint stores this set,
and a group with a name in the set is rejected if it arrives again."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from remote.wire import need, verified, with_digest

# sets of weights in a folder: a sampler may finish reading the previous sets
VERSIONS = 3
MOST_GROUP = 1 << 30  # most bytes of a file in a spool

SAMPLER = "[A-Za-z0-9_-]{1,64}"
NUMBER = "(?:0|[1-9][0-9]{0,17})"
GROUP = re.compile(f"({SAMPLER})/({NUMBER})/({NUMBER})")


def is_sampler(name: str) -> bool:
    return re.fullmatch(SAMPLER, name) is not None


def split(name: str) -> tuple[str, int, int]:
    """(sampler, incarnation, n) of a group's name. Raise WireError for any other text."""
    match = GROUP.fullmatch(name)
    need(match, f"{name[:100]!r} is not the name of a group")
    return match[1], int(match[2]), int(match[3])


def is_of(sampler: str, name: str) -> bool:
    """Whether this is a name of a sampler's group. The name may come from an untrusted peer."""
    return name.startswith(f"{sampler}/") and GROUP.fullmatch(name) is not None


def names_of_files(sampler: str, files: Iterable[str]) -> list[str]:
    """The names of the groups among a sampler's files, oldest first; other files are ignored."""
    names = (f"{sampler}/{file.replace('-', '/')}" for file in files)
    return sorted((name for name in names if GROUP.fullmatch(name)), key=split)


@dataclass
class Arrived:
    """A group for the training loop: its bytes, or the fate of a group that will not arrive."""

    name: str
    data: bytes = b""
    fate: str = ""  # listed in remote/source.py; empty: undecided, the data decides
    # time of arrival, seconds since the epoch
    when: float = field(default_factory=time.time)


class Intake:
    """The learner's account, the same for both transports. Ranks other than the first have an
    Intake without a transport, which brings no groups.

    limits: groups.Limits. counts: groups and messages, by kind. reports: groups that each
    (sampler, incarnation) says it has handed over. got: groups that have arrived or will not
    arrive; held: the part of them that a checkpoint accounts for. broken: the error that ended the
    transport."""

    address = ""

    def __init__(self, limits, log):
        self.limits = limits
        self.log = log
        self.counts: Counter = Counter()
        self.reports: dict[tuple[str, int], int] = {}
        self.got: set[str] = set()
        self.held: set[str] = set()
        self.size = 0  # bytes of groups that have arrived or are asked for
        self.lock = threading.Lock()
        self.is_open = False
        self.broken = ""

    def open(self) -> None:
        """Accept samplers."""
        self.got = set(self.held)
        self.is_open = True

    def broadcast(self, offer, path: Path, change: bytes | None) -> None:
        """Offer weights to all samplers. change: the delta from the previous weights, or None."""

    def hold(self, names: list[str]) -> None:
        """Record that a checkpoint accounts for these groups: their samplers may delete them."""
        self.held.update(names)

    def drain(self) -> list[Arrived]:
        """The groups that have arrived since the last call, in order of arrival."""
        return []

    def close(self) -> None:
        """Release the transport."""

    def report(self, sampler: str, incarnation: int, handed: int) -> None:
        """Record how many groups an incarnation has handed over."""
        key = sampler, incarnation
        self.reports[key] = max(self.reports.get(key, 0), handed)

    def take_room(self, nbytes: int) -> bool:
        """Reserve room for a group; False if there is not enough. A group that exceeds the whole
        room is accepted when no other group takes room."""
        with self.lock:
            fits = not self.size or self.size + nbytes <= self.limits.room
            self.size += nbytes * fits
        return fits

    def free(self, nbytes: int) -> None:
        """Release the room of a group."""
        with self.lock:
            self.size -= nbytes


class Spool:
    """Groups that were handed over: files FOLDER/INCARNATION-N, each after its digest.
    INCARNATION-N.lost replaces a damaged file."""

    def __init__(self, folder: Path, sampler: str, incarnation: int):
        self.folder = folder
        self.sampler = sampler
        self.incarnation = incarnation
        self.lock = threading.Lock()
        self.handed = 0  # number of groups of this incarnation
        # the groups that an earlier process left
        folder.mkdir(parents=True, exist_ok=True)
        files = os.listdir(folder)
        lost = [file.removesuffix(".lost") for file in files if file.endswith(".lost")]
        self.lost = names_of_files(sampler, lost)
        self.waiting = deque(names_of_files(sampler, files))  # oldest first

    def path(self, name: str) -> Path:
        _, incarnation, n = split(name)
        return self.folder / f"{incarnation}-{n}"

    def lost_path(self, name: str) -> Path:
        return self.path(name).with_suffix(".lost")

    def hand_over(self, name: str, data: bytes) -> None:
        """Hand over a group: from here on it is accounted for. OSError: the disk is full, and the
        group is not handed over."""
        # A killed process leaves the file whole. A power failure may damage it, and the digest
        # detects this.
        write_atomically(self.path(name), with_digest(data), flush=False)
        with self.lock:
            self.handed += 1
            self.waiting.append(name)

    def read(self, name: str) -> bytes | None:
        """The bytes of a waiting group. None if they are missing or damaged: the group is lost from
        here on."""
        try:
            return verified(read_regular(self.path(name), MOST_GROUP))
        except (FileNotFoundError, ValueError):
            self.lost_path(name).touch()
            self.path(name).unlink(missing_ok=True)
            with self.lock:
                self.waiting.remove(name)
                self.lost.append(name)
            return None

    def forget(self, names: Iterable[str]) -> None:
        """Delete groups that the learner holds or has booked as lost; ignore other names."""
        with self.lock:
            known = {*self.waiting, *self.lost}.intersection(names)
            self.waiting = deque(name for name in self.waiting if name not in known)
            self.lost = [name for name in self.lost if name not in known]
        for name in known:
            self.path(name).unlink(missing_ok=True)
            self.lost_path(name).unlink(missing_ok=True)


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a file. Other users may write into its folder, so links are not followed and
    pipes are not read. WireError: not a regular file of at most `most` bytes. OSError: no file."""
    about = path.lstat()
    valid = stat.S_ISREG(about.st_mode) and about.st_size <= most
    need(valid, f"{path.name}: not a regular file of at most {most} bytes")
    return path.read_bytes()


def write_atomically(path: Path, data: bytes, flush: bool = True) -> None:
    """Write a file whole or not at all. flush: so that it survives a power failure."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(scratch, "wb") as f:
            f.write(data)
            if flush:
                f.flush()
                os.fsync(f.fileno())
        os.replace(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def retain_weights(path: Path, published: list[Path]) -> list[Path]:
    """The newest weights, at most VERSIONS, with `path` last. All other weights in its folder are
    deleted, those of a discarded history too, whatever their numbers."""
    newest = [*(p for p in published if p != path), path][-VERSIONS:]
    for old in path.parent.glob("v*.safetensors"):
        if old not in newest:
            with contextlib.suppress(OSError):  # owned by a different user
                old.unlink()
    return newest
