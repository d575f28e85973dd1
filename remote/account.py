"""The account of every group: handed over by a sampler, held by the learner. HeteroRL, section 4.2.

A group's name is STREAM/INCARNATION/N: an incarnation is one life of a sampler's process, N counts
its groups, and a stream is the sampler's name, with several ranks SAMPLER.R. Every such name is
read by one rule (`split`), wherever it comes from: a message, a file, a checkpoint. The sampler
writes a group into its `Spool`, a file that appears whole behind its digest; from then on it is
accounted for. It stays there until the learner says that a checkpoint holds it. A damaged file is
replaced by an empty one that says so, and the learner books the group as lost. The learner's side
is an `Account`, a set of names that stays small: a checkpoint carries it, and a group that is in it
is turned away when it comes again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import threading
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

VERSIONS = (
    2  # weights that can be fetched: a sampler may finish fetching the ones before the newest
)
MOST_GROUP = 1 << 30  # bytes of a file in a spool

# ---------------------------------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------------------------------

SAMPLER = "[A-Za-z0-9_-]{1,64}"
NUMBER = "(?:0|[1-9][0-9]{0,17})"
STREAM = rf"{SAMPLER}(?:\.{NUMBER})?"
GROUP = re.compile(f"({STREAM})/({NUMBER})/({NUMBER})")
FILE = re.compile(f"({NUMBER})-({NUMBER})")  # of a group, in its stream's folder


def is_sampler(name: str) -> bool:
    return re.fullmatch(SAMPLER, name) is not None


def is_stream(name: str) -> bool:
    """Whether this can be a sampler's name, with or without the number of a rank."""
    return re.fullmatch(STREAM, name) is not None


def without_rank(stream: str) -> str:
    """The sampler of a stream."""
    return stream.partition(".")[0]


def rank_of(stream: str) -> int:
    """The learner's rank that a stream is for."""
    return int(stream.partition(".")[2] or 0)


def split(name: str) -> tuple[tuple[str, int], int]:
    """((stream, incarnation), n) of a group's name. ValueError: not such a name."""
    match = GROUP.fullmatch(name)
    if match is None:
        raise ValueError(f"{name[:100]!r} is no name of a group")
    return (match[1], int(match[2])), int(match[3])


def sampler_of(name: str) -> str:
    """The stream in a group's name. ValueError: not such a name."""
    return split(name)[0][0]


def is_of(stream: str, name: str) -> bool:
    """Whether this may be the name of one of a stream's groups. It may come from anybody."""
    match = GROUP.fullmatch(name)
    return match is not None and match[1] == stream


def name_of_file(stream: str, file: str) -> str | None:
    """The name of the group in a stream's file; None: the file is no group's."""
    match = FILE.fullmatch(file)
    return None if match is None else f"{stream}/{match[1]}/{match[2]}"


# ---------------------------------------------------------------------------------------------------------------------
# The learner's side: sets of names
# ---------------------------------------------------------------------------------------------------------------------


class Received:
    """A set of sequence numbers that is nearly 0, 1, 2, ...: all below `upto`, and some beyond."""

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

    def __len__(self) -> int:
        return self.upto + len(self.beyond)


class Account(dict):
    """(sampler, incarnation) -> Received."""

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
    """A group for the training loop: its bytes, or the fate of a group that will not come."""

    name: str
    when: float  # seconds since the epoch
    data: bytes = b""
    fate: str = ""  # source.py lists them; empty: undecided, look at the data


class Intake:
    """The learner's account of one rank, which both transports keep in the same way.

    counts: groups and messages, by kind. reports: groups that each (stream, incarnation) says it
    has handed over. got: groups that are here, or that will not come; held: those of them that a
    checkpoint accounts for. broken: the error that ended the transport."""

    def __init__(self, room: int, log):
        self.log = log
        self.counts: Counter = Counter()
        self.reports: dict[tuple[str, int], int] = {}
        self.got = Account()
        self.held_names = Account()
        self.room = room  # bytes of groups that may be here or asked for
        self.size = 0  # bytes of groups that are
        self.lock = threading.Lock()
        self.is_open = False
        self.broken = ""

    def open(self, held: Account) -> None:
        """Let samplers in. held: the groups that the checkpoint accounts for."""
        self.held_names = held
        self.got = Account.of(held.state())
        self.is_open = True

    def report(self, key: tuple[str, int], handed: int) -> None:
        """Note how many groups an incarnation has handed over."""
        self.reports[key] = max(self.reports.get(key, 0), handed)

    def take_room(self, nbytes: int) -> bool:
        """Take room for a group, if there is any. A group that is bigger than all the room is taken
        alone."""
        with self.lock:
            fits = not self.size or self.size + nbytes <= self.room
            self.size += nbytes * fits
        return fits

    def free(self, nbytes: int) -> None:
        """Give the room of a group back."""
        with self.lock:
            self.size -= nbytes


# ---------------------------------------------------------------------------------------------------------------------
# The sampler's side: files
# ---------------------------------------------------------------------------------------------------------------------


class Spool:
    """Groups that were handed over: files STREAM/INCARNATION-N, each after its digest.

    STREAM/INCARNATION-N.lost stands in place of one that was damaged. With several ranks a sampler
    has a stream for each rank."""

    def __init__(self, folder: Path, streams: list[str], incarnation: int):
        self.folder = folder
        self.incarnation = incarnation
        self.lock = threading.Lock()
        self.handed: dict[str, int] = {}  # groups of this incarnation
        self.lost: dict[str, list[str]] = {}  # names
        self.waiting: dict[str, deque] = {}  # names, oldest first
        for stream in streams:
            self._read_folder(stream)

    def _read_folder(self, stream: str) -> None:
        """Go on with the groups that an earlier life has left."""
        folder = self.folder / stream
        folder.mkdir(parents=True, exist_ok=True)
        for scratch in folder.glob(".*"):  # cut off in the middle: never handed over
            with contextlib.suppress(OSError):  # not ours
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

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def path(self, name: str) -> Path:
        (stream, incarnation), n = split(name)
        return self.folder / stream / f"{incarnation}-{n}"

    def lost_path(self, name: str) -> Path:
        path = self.path(name)
        return path.with_name(f"{path.name}.lost")

    def hand_over(self, stream: str, name: str, data: bytes) -> None:
        """From here on the group is accounted for. OSError: the disk is full, and it is not."""
        # A killed process leaves the file whole. A host that loses power may not, and then the
        # digest says so.
        write_atomically(self.path(name), with_digest(data), flush=False)
        with self.lock:
            self.handed[stream] += 1
            self.waiting[stream].append(name)

    def read(self, name: str) -> bytes | None:
        """The group's bytes. None if they are gone or damaged: then the group is lost from here
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


class OddFileError(ValueError):
    """A link, a folder, a pipe, a device, or more bytes than there may be."""


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a file. Others may write into its folder, so no link is followed and no pipe
    waited for. OddFileError: no regular file of at most `most` bytes; OSError: no file."""
    about = path.lstat()
    if not stat.S_ISREG(about.st_mode):
        raise OddFileError(f"{path.name}: not a regular file")
    if about.st_size > most:
        raise OddFileError(f"{path.name}: more than {most} bytes")
    return path.read_bytes()


def write_atomically(path: Path, data: bytes, flush: bool = True) -> None:
    """Write a file whole or not at all. flush: onto the disk, so that it survives a loss of power
    too."""
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
    """A file's bytes after their digest."""
    return hashlib.sha256(data).digest() + data


def verified(data: bytes) -> bytes | None:
    """The inverse of with_digest; None if the bytes are damaged."""
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def retain_weights(path: Path, published: list[Path], most: int = VERSIONS) -> list[Path]:
    """The weights published last, `path` the newest of at most `most`; all others in its folder are
    deleted.

    Those of an undone history are deleted too, whatever their numbers."""
    newest = [*(p for p in published if p != path), path][-most:]
    for old in path.parent.glob("v*.safetensors"):
        if old not in newest:
            with contextlib.suppress(OSError):  # not ours
                old.unlink()
    return newest
