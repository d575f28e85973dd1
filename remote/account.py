"""The account of every group: handed over by a sampler, held by the learner. HeteroRL, section 4.2.

A group's name is STREAM/INCARNATION/N. An incarnation is one life of a sampler's process, and N
counts its groups. A stream is the sampler's name; with several ranks it is SAMPLER.R. One rule
(`split`) reads every such name, from a message, a file or a checkpoint. The sampler writes a group
into its `Spool`, as a file that starts with its digest and appears whole. From then on the group is
accounted for. The file stays until the learner says that a checkpoint holds the group. A damaged
file is replaced by an empty `.lost` file, and the learner books the group as lost. The learner's
side is an `Account`, a compact set of names. A checkpoint stores it, and a group in the account is
rejected when it comes again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import threading
from collections import Counter, deque
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

VERSIONS = 2  # sets of weights that can be fetched: a sampler may finish fetching the previous set
MOST_GROUP = 1 << 30  # most bytes of a file in a spool

# ---------------------------------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------------------------------

SAMPLER = "[A-Za-z0-9_-]{1,64}"
NUMBER = "(?:0|[1-9][0-9]{0,17})"
STREAM = rf"{SAMPLER}(?:\.{NUMBER})?"
GROUP = re.compile(f"({STREAM})/({NUMBER})/({NUMBER})")
FILE = re.compile(f"({NUMBER})-({NUMBER})")  # a group's file, in the folder of its stream


def is_sampler(name: str) -> bool:
    return re.fullmatch(SAMPLER, name) is not None


def is_stream(name: str) -> bool:
    """Whether this is a valid sampler's name, with or without the number of a rank."""
    return re.fullmatch(STREAM, name) is not None


def split(name: str) -> tuple[tuple[str, int], int]:
    """((stream, incarnation), n) of a group's name. Raise ValueError for any other text."""
    match = GROUP.fullmatch(name)
    if match is None:
        raise ValueError(f"{name[:100]!r} is not the name of a group")
    return (match[1], int(match[2])), int(match[3])


def sampler_of(name: str) -> str:
    """The stream in a group's name. Raise ValueError for any other text."""
    return split(name)[0][0]


def is_of(stream: str, name: str) -> bool:
    """Whether this is a name of a group in a stream. The name may come from an untrusted peer."""
    match = GROUP.fullmatch(name)
    return match is not None and match[1] == stream


def name_of_file(stream: str, file: str) -> str | None:
    """The name of the group in a stream's file; None if the file is not a group."""
    match = FILE.fullmatch(file)
    return None if match is None else f"{stream}/{match[1]}/{match[2]}"


# ---------------------------------------------------------------------------------------------------------------------
# The learner's side: sets of names
# ---------------------------------------------------------------------------------------------------------------------


class Received:
    """A set of sequence numbers that is nearly 0, 1, 2, ...: all below `upto`, and some above
    it."""

    def __init__(self, upto: int = 0, beyond=()):
        self.upto = upto
        self.beyond = set(beyond)

    def __contains__(self, n: int) -> bool:
        return n < self.upto or n in self.beyond

    def add(self, n: int) -> None:
        if n >= self.upto:
            self.beyond.add(n)
        while self.upto in self.beyond:
            self.beyond.remove(self.upto)
            self.upto += 1


class Account(dict):
    """The received groups: (sampler, incarnation) -> Received."""

    def has(self, name: str) -> bool:
        key, n = split(name)
        return key in self and n in self[key]

    def add(self, name: str) -> None:
        key, n = split(name)
        self.setdefault(key, Received()).add(n)

    def state(self) -> list:
        return [[*key, seen.upto, sorted(seen.beyond)] for key, seen in sorted(self.items())]

    @classmethod
    def of(cls, state: list) -> Account:
        return cls(
            {
                (sampler, incarnation): Received(upto, beyond)
                for sampler, incarnation, upto, beyond in state
            }
        )


@dataclass
class Arrived:
    """A group for the training loop: its bytes, or the fate of a group that will not arrive."""

    name: str
    when: float  # seconds since the epoch
    data: bytes = b""
    fate: str = ""  # listed in source.py; empty: undecided, the data decides


class Intake:
    """The learner's account of one rank, the same for both transports.

    counts: groups and messages, by kind. reports: groups that each (stream, incarnation) says it
    has handed over. got: groups that have arrived or will not arrive; held: the part of them that a
    checkpoint accounts for. broken: the error that ended the transport."""

    def __init__(self, room: int, log):
        self.log = log
        self.counts: Counter = Counter()
        self.reports: dict[tuple[str, int], int] = {}
        self.got = Account()
        self.held_names = Account()
        self.room = room  # most bytes of groups that have arrived or are asked for
        self.size = 0  # bytes of groups that have arrived or are asked for
        self.lock = threading.Lock()
        self.is_open = False
        self.broken = ""

    def open(self, held: Account) -> None:
        """Accept samplers. held: the groups that the checkpoint accounts for."""
        self.held_names = held
        self.got = deepcopy(held)
        self.is_open = True

    def report(self, key: tuple[str, int], handed: int) -> None:
        """Record how many groups an incarnation has handed over."""
        self.reports[key] = max(self.reports.get(key, 0), handed)

    def take_room(self, nbytes: int) -> bool:
        """Reserve room for a group; False if there is not enough. A group that exceeds the whole
        room is accepted when no other group takes room."""
        with self.lock:
            fits = not self.size or self.size + nbytes <= self.room
            self.size += nbytes * fits
        return fits

    def free(self, nbytes: int) -> None:
        """Release the room of a group."""
        with self.lock:
            self.size -= nbytes


# ---------------------------------------------------------------------------------------------------------------------
# The sampler's side: files
# ---------------------------------------------------------------------------------------------------------------------


class Spool:
    """Groups that were handed over: files STREAM/INCARNATION-N, each after its digest.

    STREAM/INCARNATION-N.lost replaces a damaged file. With several ranks a sampler has one stream
    for each rank."""

    def __init__(self, folder: Path, streams: list[str], incarnation: int):
        self.folder = folder
        self.incarnation = incarnation
        self.lock = threading.Lock()
        self.handed: dict[str, int] = {}  # number of groups of this incarnation
        self.lost: dict[str, list[str]] = {}  # names
        self.waiting: dict[str, deque] = {}  # names, oldest first
        for stream in streams:
            self._read_folder(stream)

    def _read_folder(self, stream: str) -> None:
        """Read the groups that an earlier process left."""
        folder = self.folder / stream
        folder.mkdir(parents=True, exist_ok=True)
        for scratch in folder.glob(".*"):  # interrupted while it was written: never handed over
            with contextlib.suppress(OSError):  # owned by a different user
                scratch.unlink()
        files = os.listdir(folder)
        lost = [
            name_of_file(stream, file.removesuffix(".lost"))
            for file in files
            if file.endswith(".lost")
        ]
        waiting = [name_of_file(stream, file) for file in files]
        self.handed[stream] = 0
        self.lost[stream] = sorted(filter(None, lost), key=split)
        self.waiting[stream] = deque(sorted(filter(None, waiting), key=split))

    def path(self, name: str) -> Path:
        (stream, incarnation), n = split(name)
        return self.folder / stream / f"{incarnation}-{n}"

    def lost_path(self, name: str) -> Path:
        path = self.path(name)
        return path.with_name(f"{path.name}.lost")

    def hand_over(self, stream: str, name: str, data: bytes) -> None:
        """Hand over a group: from here on it is accounted for. OSError: the disk is full, and the
        group is not handed over."""
        # A killed process leaves the file whole. A power failure may damage it, and the digest
        # detects this.
        write_atomically(self.path(name), with_digest(data), flush=False)
        with self.lock:
            self.handed[stream] += 1
            self.waiting[stream].append(name)

    def read(self, name: str) -> bytes | None:
        """The group's bytes. None if they are missing or damaged: the group is lost from here
        on."""
        path, stream = self.path(name), sampler_of(name)
        try:
            data = verified(read_regular(path, MOST_GROUP))
        except (FileNotFoundError, OddFileError):
            data = None
        if data is None and name in self.waiting[stream]:
            self.lost_path(name).touch()
            path.unlink(missing_ok=True)
            with self.lock:
                self.waiting[stream].remove(name)
                self.lost[stream].append(name)
        return data

    def forget(self, names) -> None:
        """Delete groups that the learner holds or has booked as lost."""
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


class OddFileError(ValueError):
    """The path is a link, a folder, a pipe or a device, or the file is too large."""


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a file. Other users may write into its folder, so links are not followed and
    pipes are not read. OddFileError: not a regular file of at most `most` bytes. OSError: no
    file."""
    about = path.lstat()
    if not stat.S_ISREG(about.st_mode):
        raise OddFileError(f"{path.name}: not a regular file")
    if about.st_size > most:
        raise OddFileError(f"{path.name}: more than {most} bytes")
    return path.read_bytes()


def write_atomically(path: Path, data: bytes, flush: bool = True) -> None:
    """Write a file whole or not at all. flush: write it to the disk, so that it survives a power
    failure."""
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


def with_digest(data: bytes) -> bytes:
    """A file's bytes, preceded by their digest."""
    return hashlib.sha256(data).digest() + data


def verified(data: bytes) -> bytes | None:
    """The inverse of with_digest; None if the bytes are damaged."""
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def retain_weights(path: Path, published: list[Path], most: int = VERSIONS) -> list[Path]:
    """The newest weights, at most `most`, with `path` last; all other weights in its folder are
    deleted.

    Weights of a discarded history are deleted too, whatever their numbers."""
    newest = [*(p for p in published if p != path), path][-most:]
    for old in path.parent.glob("v*.safetensors"):
        if old not in newest:
            with contextlib.suppress(OSError):  # owned by a different user
                old.unlink()
    return newest
