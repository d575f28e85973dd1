"""The account of every group: what a sampler has handed over, and what the learner holds. HeteroRL, section 4.2.

A group's name is SAMPLER/INCARNATION/N: an incarnation is one life of a sampler's process, N counts its groups. The
sampler writes a group into its `Spool`, a file that appears whole behind its digest; from then on it is accounted for.
It stays there until the learner says that a checkpoint holds it. A damaged file is replaced by an empty one that says
so, and the learner books the group as lost. The learner's side is an `Account`, a set of names that stays small: a
checkpoint carries it, and a group that is in it is turned away when it comes again.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

VERSIONS = 2  # weights that can be fetched: a sampler may finish fetching the ones before the newest


# ---------------------------------------------------------------------------------------------------------------------
# The learner's side: sets of names
# ---------------------------------------------------------------------------------------------------------------------


class Seen:
    """A set of sequence numbers that is nearly 0, 1, 2, ...: all below `upto`, and some beyond."""

    def __init__(self, upto: int = 0, beyond=()):
        self.upto = upto
        self.beyond = set(beyond)

    def __contains__(self, n: int) -> bool:
        return n < self.upto or n in self.beyond

    def add(self, n: int) -> None:
        self.beyond.add(n)
        while self.upto in self.beyond:
            self.beyond.remove(self.upto)
            self.upto += 1

    def __len__(self) -> int:
        return self.upto + len(self.beyond)


class Account(dict):
    """(sampler, incarnation) -> Seen."""

    def has(self, name: str) -> bool:
        key, n = split(name)
        return key in self and n in self[key]

    def add(self, name: str) -> None:
        key, n = split(name)
        self.setdefault(key, Seen()).add(n)

    def state(self) -> list:
        return [[*key, seen.upto, sorted(seen.beyond)] for key, seen in sorted(self.items())]

    @classmethod
    def of(cls, state: list) -> Account:
        return cls({(sampler, incarnation): Seen(upto, beyond) for sampler, incarnation, upto, beyond in state})


def split(name: str) -> tuple[tuple[str, int], int]:
    """((sampler, incarnation), n) of a group's name. ValueError: not such a name."""
    sampler, incarnation, n = name.rsplit("/", 2)
    return (sampler, int(incarnation)), int(n)


def sampler_of(name: str) -> str:
    """The sampler in a group's name; with several ranks SAMPLER.R, a stream for each. ValueError: not such a name."""
    return split(name)[0][0]


@dataclass
class Arrived:
    """What a hub hands to the training loop: a group's bytes, or the fate of a group that will not come."""

    name: str
    when: float  # seconds since the epoch
    data: bytes = b""
    fate: str = ""  # source.py lists them; empty: undecided, look at the data


# ---------------------------------------------------------------------------------------------------------------------
# The sampler's side: files
# ---------------------------------------------------------------------------------------------------------------------


class Spool:
    """Groups that were handed over: files STREAM/INCARNATION-N, each behind its digest.

    STREAM/INCARNATION-N.lost stands in place of one that was damaged. With several ranks a sampler has a stream for
    each rank."""

    def __init__(self, folder: Path, streams: list[str], incarnation: int):
        self.folder = folder
        self.incarnation = incarnation
        self.lock = threading.Lock()
        self.handed = dict.fromkeys(streams, 0)  # groups of this incarnation
        self.lost: dict[str, list[str]] = {}  # names
        self.waiting: dict[str, deque] = {}  # names, oldest first
        for stream in streams:
            (folder / stream).mkdir(parents=True, exist_ok=True)
            for scratch in (folder / stream).glob(".*"):  # cut off in the middle: never handed over
                scratch.unlink()
            files = [path.name for path in (folder / stream).glob("*-*")]
            lost = [self._name(stream, file.removesuffix(".lost")) for file in files if file.endswith(".lost")]
            waiting = [self._name(stream, file) for file in files if not file.endswith(".lost")]
            self.lost[stream] = sorted(lost, key=split)
            self.waiting[stream] = deque(sorted(waiting, key=split))

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    @staticmethod
    def _name(stream: str, file: str) -> str:
        return f"{stream}/{file.replace('-', '/')}"

    def path(self, name: str) -> Path:
        (stream, incarnation), n = split(name)
        return self.folder / stream / f"{incarnation}-{n}"

    def lost_path(self, name: str) -> Path:
        path = self.path(name)
        return path.with_name(f"{path.name}.lost")

    def hand_over(self, stream: str, name: str, data: bytes) -> None:
        """From here on the group is accounted for. OSError: the disk is full, and it is not."""
        # A killed process leaves the file whole. A host that loses power may not, and then the digest says so.
        write_atomically(self.path(name), with_digest(data), flush=False)
        with self.lock:
            self.handed[stream] += 1
            self.waiting[stream].append(name)

    def read(self, name: str) -> bytes | None:
        """The group's bytes. None if they are gone or damaged: then the group is lost from here on."""
        path, stream = self.path(name), sampler_of(name)
        data = verified(path.read_bytes()) if path.is_file() else None
        if data is None and name in self.waiting[stream]:
            self.lost_path(name).touch()
            path.unlink(missing_ok=True)
            with self.lock:
                self.waiting[stream].remove(name)
                self.lost[stream].append(name)
        return data

    def forget(self, names) -> None:
        """The learner holds these groups, or has booked them as lost."""
        for name in names:
            stream = sampler_of(name)
            with self.lock:
                for listed in (self.waiting[stream], self.lost[stream]):
                    if name in listed:
                        listed.remove(name)
            self.path(name).unlink(missing_ok=True)
            self.lost_path(name).unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# Files that are whole or not there
# ---------------------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, data: bytes, flush: bool = True) -> None:
    """Write a file whole or not at all. flush: onto the disk, so that it survives a loss of power too."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(scratch, "wb") as f:
            f.write(data)
            if flush:
                f.flush()
                os.fsync(f.fileno())
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def with_digest(data: bytes) -> bytes:
    """A file's bytes behind their digest."""
    return hashlib.sha256(data).digest() + data


def verified(data: bytes) -> bytes | None:
    """The inverse of with_digest; None if the bytes are damaged."""
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def retain_weights(path: Path, published: list[Path]) -> list[Path]:
    """The weights published last, `path` the newest of them; all others in its folder are deleted.

    Those of an undone history are deleted too, whatever their numbers."""
    newest = [*(p for p in published if p != path), path][-VERSIONS:]
    for old in path.parent.glob("v*.safetensors"):
        if old not in newest:
            old.unlink()
    return newest
