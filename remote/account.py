"""The account of every group: what a sampler has handed over, and what the learner holds. HeteroRL, section 4.2.

A group's name is SAMPLER/INCARNATION/N: an incarnation is one life of a sampler's process, N counts its groups. The sampler writes a group into its
`Spool`, a file that appears whole behind its digest; from then on it is accounted for. It stays there until the learner says that a checkpoint
holds it. A file that was damaged leaves an empty one behind that says so, and the learner books the group as lost. The learner's side is an
`Account`, a set of names that stays small: a checkpoint carries it, and what is in it is turned away.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from pathlib import Path


class Seen:
    """A set of sequence numbers that is nearly 0, 1, 2, ...: all below `upto`, and some beyond."""

    def __init__(self, upto: int = 0, beyond=()):
        self.upto, self.beyond = upto, set(beyond)

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
    def of(cls, state: list) -> "Account":
        return cls({(sampler, incarnation): Seen(upto, beyond) for sampler, incarnation, upto, beyond in state})


def split(name: str) -> tuple[tuple[str, int], int]:
    sampler, incarnation, n = name.rsplit("/", 2)
    return (sampler, int(incarnation)), int(n)


def write_atomically(path: Path, data: bytes, flush: bool = True) -> None:
    """Write a file whole or not at all. flush: onto the disk, so that a host that loses power keeps it too."""
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
    """What was with_digest; None if it is damaged."""
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


class Spool:
    """Files STREAM/INC-N, with_digest, each a group that was handed over; STREAM/INC-N.lost in place of one that was damaged."""

    def __init__(self, folder: Path, streams: list[str], incarnation: int):
        self.folder, self.incarnation, self.lock = folder, incarnation, threading.Lock()
        self.handed = dict.fromkeys(streams, 0)
        self.lost: dict[str, list[str]] = {}  # names
        self.waiting: dict[str, deque] = {}  # names, oldest first
        for s in streams:
            (folder / s).mkdir(parents=True, exist_ok=True)
            for scratch in (folder / s).glob(".*"):  # cut off in the middle: never handed over
                scratch.unlink()
            old = sorted(
                (f"{s}/{'/'.join(p.name.split('-'))}" for p in (folder / s).glob("*-*")),
                key=lambda n: split(n.removesuffix(".lost")),
            )
            self.waiting[s] = deque(n for n in old if not n.endswith(".lost"))
            self.lost[s] = [n.removesuffix(".lost") for n in old if n.endswith(".lost")]

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def path(self, name: str) -> Path:
        (stream, incarnation), n = split(name)
        return self.folder / stream / f"{incarnation}-{n}"

    def hand_over(self, stream: str, name: str, data: bytes) -> None:
        write_atomically(
            self.path(name), with_digest(data), flush=False
        )  # a killed process leaves it whole; a host that loses power may not, and then its digest says so
        with self.lock:
            self.handed[stream] += 1
            self.waiting[stream].append(name)

    def read(self, name: str) -> bytes | None:
        """The group's bytes; None if they are gone or damaged, which is written down."""
        path, stream = self.path(name), split(name)[0][0]
        data = verified(path.read_bytes()) if path.is_file() else None
        if data is None and name in self.waiting[stream]:
            path.with_name(f"{path.name}.lost").touch()
            path.unlink(missing_ok=True)
            with self.lock:
                self.waiting[stream].remove(name)
                self.lost[stream].append(name)
        return data

    def forget(self, names) -> None:
        """The learner holds these, or has booked them as lost."""
        for name in names:
            stream, path = split(name)[0][0], self.path(name)
            with self.lock:
                for kept in (self.waiting[stream], self.lost[stream]):
                    if name in kept:
                        kept.remove(name)
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.lost").unlink(missing_ok=True)
