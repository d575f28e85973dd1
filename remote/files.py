"""The learner's end of a shared folder: HeteroRL's `Model_Sync_Path` and `Rollout_Sync_Path`, section 4.2.

`FilesHub` has the face of hub.Hub; files_link.py is the sampler's end. Every file appears whole, by a rename:

    welcome                       what to sample, and the learner's session
    clock.0                       what time it is at rank 0, written every other second
    models/v000012.safetensors    weights
    models/newest                 the Offer of the newest weights
    rollouts/SAMPLER/INC-N        a group behind its SHA-256; the sampler deletes it when it is held
    got/SAMPLER                   which of its groups are fetched
    held/SAMPLER                  which of its groups are held
    samplers/SAMPLER              the sampler's last Hello
    grants/SAMPLER                how many groups it may make, with --admission=pace

With several ranks a sampler SAMPLER.R has a stream for each rank R. The learner touches `welcome` as long as it is
there. Both ends wait out a full disk.

Whoever may write into the folder may write anything. Names follow account.py's rule, the name inside a message is that
of its file, and only regular files are read, up to a bound: no link, folder, pipe or device. What goes wrong with one
stream is booked to that stream. Clocks of other hosts are not believed (clock.py): a group arrives when the learner
sees it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections import Counter, deque
from itertools import islice
from pathlib import Path
from typing import Literal

from remote import wire
from remote.account import (
    Account,
    Arrived,
    OddFileError,
    Seen,
    believe,
    is_sampler,
    is_stream,
    name_of_file,
    read_regular,
    retain_weights,
    sampler_of,
    split,
    verified,
    write_atomically,
)
from remote.grants import Ask, Grants
from remote.groups import Limits
from remote.guard import MOST_ENTRIES, Names, Room
from remote.weights import manifest_of, mapped

BEAT = 2.0  # seconds between two signs of life
PATIENCE = 20.0  # seconds until a file that should be there is lost: listings of a folder on another host lag behind
SILENT = 60.0  # seconds after which a sampler that writes no hello is granted nothing more
ASKED_EVERY = 0.25  # seconds between two looks at what samplers ask for
MOST_STREAMS = 1024  # that a rank looks at
MOST_FILES = 1 << 16  # of a stream that are looked at
MOST_HELLO = 1 << 20  # bytes
MANY = 1 << 14  # groups handed over and not held: a report of more is not believed


def read_message(path: Path, kind, most: int = wire.MOST):
    """A message of this kind in a file. WireError: there is none; OSError: no such file."""
    try:
        message = wire.decode(read_regular(path, most))
    except OddFileError as e:
        raise wire.WireError(str(e)) from None
    wire.need(isinstance(message, kind), f"{path.name}: a message of another kind")
    return message


def clock_file(rank: int) -> str:
    """Where a rank says what time it is."""
    return f"clock.{rank}"


class FilesHub:
    """Everything is done by the calls of the training loop, but for its sign of life, which a thread gives.

    counts, reports, broken: as in hub.Hub."""

    def __init__(self, folder: str, welcome: wire.Welcome, limits: Limits, log, rank: int = 0, ranks: int = 1):
        for name in ("models", "rollouts", "held", "got", "samplers", "grants"):
            (Path(folder) / name).mkdir(parents=True, exist_ok=True)
        self.folder = Path(folder).resolve()
        self.address = str(folder)
        self.welcome = welcome
        self.limits = limits
        self.log = log
        self.rank = rank
        self.ranks = ranks
        self.broken = ""
        self.counts: Counter = Counter()
        self.reports: dict[tuple[str, int], int] = {}
        self.names = Names({})  # there are no keys: names belong to nobody
        self.entries: Counter = Counter()  # sampler -> what it has left in the account
        self.refused: set[str] = set()  # streams of another protocol
        self.muted: set[str] = set()  # streams that a fault of ours was booked to
        self.got = Account()  # groups that were fetched, or that will not come
        self.held_before = Account()  # groups that a checkpoint accounts for
        self.absent: dict[str, float] = {}  # groups that should be there and are not -> missed since when
        self.room = Room(limits.room)  # of groups fetched and not freed
        self.grants: Grants | None = None  # with --admission=pace
        self.asked = 0.0  # when it was looked what samplers ask for
        self.spoke: dict[str, tuple[float, float]] = {}  # stream -> (sent, by its last hello; when that was noticed)
        self.turns = 0
        self.is_open = False
        self.closed = threading.Event()
        self.beat = 0.0  # when the learner gave its last sign of life
        self.published: list[Path] = []  # weights of this session, in order
        self.unwritten: dict[Path, bytes] = {}  # messages that found no room on the disk
        self.unpublished: tuple[Path, wire.Offer] | None = None  # the newest weights, as long as they are not out

    @property
    def size(self) -> int:
        return self.room.size

    def open(self, held: Account) -> None:
        """Let samplers in. held: what the checkpoint accounts for."""
        self.held_before = held
        for key in held:
            self.entries[self.names.owner(key[0])] += held.entries(key)
        for kind in ("got", "grants"):  # of an earlier session: nothing is fetched or granted in this one
            for stream in self._streams(kind):
                self._guarded(stream, (self.folder / kind / stream).unlink)
        self.is_open = True
        self._tell_time()
        if self.rank == 0:
            self._write(self.folder / "welcome", self.welcome)
            threading.Thread(target=self._stay_alive, daemon=True).start()

    def broadcast(self, version: int, path: Path, published: float, change: bytes | None = None) -> None:
        """Offer these weights to all samplers, whole: they are read where they lie."""
        if self.rank == 0:
            offer = wire.Offer(manifest_of(path), version, published)
            self.unpublished = (path, offer)
            self._write_waiting()

    def plan(self, next_version: int, unused: int) -> None:
        """With --admission=pace: the learner takes its next batch at this version, and has so many groups for it."""
        if self.grants is None:
            return
        later = next_version != self.grants.next_version  # the training loop does not come back before its update
        self.grants.plan(next_version, unused)
        if self.is_open and (later or time.monotonic() - self.asked > ASKED_EVERY):
            self.asked = time.monotonic()
            self._grant()

    def _grant(self) -> None:
        """Tell samplers that ask what they may make."""
        streams = self._streams("samplers")
        self.spoke = {stream: self.spoke[stream] for stream in streams if stream in self.spoke}
        for stream in streams:
            self._guarded(stream, self._read_ask, stream)
        for stream, granted in self.grants.give().items():
            self._write(self.folder / "grants" / stream, wire.Grant(*granted))

    def held(self, names: list[str]) -> None:
        """A checkpoint accounts for these groups: their samplers may forget them."""
        for name in names:
            self.held_before.add(name)
        for stream in {sampler_of(name) for name in names}:
            self._guarded(stream, self._write_held, stream)

    def _write_held(self, stream: str) -> None:
        listed = [name for name in self._names(stream) if self.held_before.has(name)]
        self._write(self.folder / "held" / stream, wire.Held(listed))

    def drain(self) -> list[Arrived]:
        """What has come since the last call, in order of arrival."""
        out: list[Arrived] = []
        if time.monotonic() - self.beat > BEAT:
            self.beat = time.monotonic()
            self._write_waiting()
            self._touch_welcome()
            self._tell_time()
            for stream in self._streams("samplers"):
                self._guarded(stream, self._read_report, stream)
            self._book_absent(out)
        self._fetch(out)
        return out

    def free(self, name: str, nbytes: int) -> None:
        """The training loop is done with a group of so many bytes: there is room again."""
        self.room.give(self.names.owner(sampler_of(name)), nbytes)

    def charge(self, name: str) -> None:
        """A group was fetched in vain: its sampler has a bounded number of those."""
        self.entries[self.names.owner(sampler_of(name))] += 1

    def close(self) -> None:
        self.closed.set()

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self, path: Path, message: wire.Message) -> None:
        """Write a message; where the disk is full, later."""
        self.unwritten[path] = wire.encode(message)
        self._write_waiting()

    def _write_waiting(self) -> None:
        """Write what found no room so far: messages, some of which make room, then the newest weights."""
        for path, data in list(self.unwritten.items()):
            try:
                write_atomically(path, data)
                del self.unwritten[path]
            except OSError as e:
                self.log.warning("%s: %s; tried again soon", path, e.strerror)
        if self.unpublished is None:
            return
        path, offer = self.unpublished
        copy = self.folder / "models" / path.name
        try:
            write_atomically(copy, mapped(path))
            write_atomically(self.folder / "models" / "newest", wire.encode(offer))
            self.published = retain_weights(copy, self.published)
            self.unpublished = None
        except OSError as e:
            self.log.warning("%s: %s; tried again soon", copy, e.strerror)

    def _tell_time(self) -> None:
        self._write(self.folder / clock_file(self.rank), wire.Got([], clock=time.time()))

    def _stay_alive(self) -> None:
        """Touch `welcome` as long as the learner is there, whatever it does: an update or an evaluation may be long."""
        while not self.closed.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self.folder / "welcome", follow_symlinks=False)

    def _touch_welcome(self) -> None:
        """The learner's sign of life. Whatever else has come to lie there gives way."""
        if self.rank > 0:
            return
        path = self.folder / "welcome"
        try:
            here = path.lstat()
            whole = stat.S_ISREG(here.st_mode) and here.st_size == len(wire.encode(self.welcome))
            if whole:
                os.utime(path, follow_symlinks=False)
        except OSError:
            whole = False
        if not whole:
            self._write(path, self.welcome)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _guarded(self, stream: str, work, *args):
        """Do something for one stream; what goes wrong is that stream's, and the others go on. Returns None then."""
        try:
            return work(*args)
        except OSError as e:  # a folder on another host is away for a while; what was read stays read
            if e.errno != errno.ENOENT:
                self.log.warning("stream %s: %s; tried again soon", stream, e.strerror)
        except wire.WireError as e:
            self.counts["malformed"] += 1
            self.log.warning("stream %s: %s", stream, e)
        except Exception as e:
            self.counts["faults"] += 1
            self.muted.add(stream)
            self.log.error("a fault in what stream %s holds, which is left out from now on: %r", stream, e)
        return None

    def _streams(self, kind: str) -> list[str]:
        """The streams of this rank in one of the folders: folders of groups, or files with a message."""
        streams = []
        try:
            with os.scandir(self.folder / kind) as entries:
                for entry in entries:
                    good = entry.is_dir if kind == "rollouts" else entry.is_file
                    if self._is_mine(entry.name) and good(follow_symlinks=False):
                        streams.append(entry.name)
                    if len(streams) >= MOST_STREAMS:
                        self.log.warning("more than %d streams: the others are not looked at", MOST_STREAMS)
                        break
        except OSError as e:
            self.log.warning("%s: %s; tried again soon", self.folder / kind, e.strerror)
        return sorted(set(streams) - self.muted)

    def _is_mine(self, stream: str) -> bool:
        if self.ranks == 1:
            return is_sampler(stream)
        return is_stream(stream) and stream.endswith(f".{self.rank}")

    def _names(self, stream: str) -> list[str]:
        """The groups that lie in a stream's folder, oldest first; files of another form are not groups."""
        names = []
        try:
            with os.scandir(self.folder / "rollouts" / stream) as entries:
                for entry in islice(entries, MOST_FILES):
                    name = name_of_file(stream, entry.name)
                    if name is not None and entry.is_file(follow_symlinks=False):
                        names.append(name)
        except (FileNotFoundError, NotADirectoryError):  # not yet, or no more
            return []
        return sorted(names, key=split)

    def _new(self, stream: str) -> deque[str]:
        """The groups of a stream that are to be read. Those that a checkpoint holds are not, and it is told so."""
        new = [name for name in self._names(stream) if not self.got.has(name)]
        held = [name for name in new if self.held_before.has(name)]
        for name in held:
            self.counts["duplicate"] += 1
            self.got.add(name, self.held_before)
        if held:
            self.held(held)
        return deque(name for name in new if not self.held_before.has(name))

    def _fetch(self, out: list[Arrived]) -> None:
        """Read the groups that are new, one of each stream in turn, as far as there is room, and say which were
        fetched. Another stream is the first each time."""
        streams = self._streams("rollouts")
        self.turns += 1
        first = self.turns % max(1, len(streams))
        new = {stream: self._guarded(stream, self._new, stream) for stream in streams[first:] + streams[:first]}
        new = {stream: names for stream, names in new.items() if names}
        fetched = set()
        while new:
            for stream, names in list(new.items()):
                arrived = self._guarded(stream, self._read_group, stream, names.popleft())
                if arrived:
                    out.append(arrived)
                    fetched.add(stream)
                if not names or arrived is False or stream in self.muted:
                    del new[stream]
        for stream in fetched:
            self._guarded(stream, self._write_got, stream)

    def _write_got(self, stream: str) -> None:
        listed = [name for name in self._names(stream) if self.got.has(name)]
        self._write(self.folder / "got" / stream, wire.Got(listed))

    def _read_group(self, stream: str, name: str) -> Arrived | Literal[False]:
        """The group, or its fate; False where there is no room for it, or for anything of this stream."""
        owner = self.names.owner(stream)
        if self.entries[owner] >= MOST_ENTRIES:
            self.log.warning("stream %s has had too many lives or bad groups: not read", stream)
            return False
        (_, incarnation), n = split(name)
        path = self.folder / "rollouts" / stream / f"{incarnation}-{n}"
        nbytes = path.lstat().st_size - 32  # behind its digest
        fate, data = "", b""
        if nbytes > self.limits.nbytes:
            self.log.warning("%s is too big for a group", path)
            fate = "refused"
        elif not self.room.take(owner, max(0, nbytes)):
            return False
        else:
            fate, data = self._read(path, nbytes)
            if fate:
                self.room.give(owner, max(0, nbytes))
            else:
                self.counts["received"] += 1
                self.counts["bytes_in"] += nbytes
        self.entries[owner] += max(bool(fate), self.got.add(name, self.held_before))
        return Arrived(name, time.time(), data=data, fate=fate)

    def _read(self, path: Path, nbytes: int) -> tuple[str, bytes]:
        """(fate, bytes) of a group of so many bytes."""
        try:
            data = verified(read_regular(path, nbytes + 32))
        except OddFileError:
            data = None
        if data is None or len(data) != nbytes:
            self.log.warning("%s is damaged", path)
            return "corrupt", b""
        return "", data

    def _read_ask(self, stream: str) -> None:
        """What a sampler would make, as long as it is there."""
        hello = read_message(self.folder / "samplers" / stream, wire.Hello, MOST_HELLO)
        now = time.monotonic()
        if stream not in self.spoke or self.spoke[stream][0] != hello.sent:
            self.spoke[stream] = (hello.sent, now)
        if now - self.spoke[stream][1] > SILENT:
            self.grants.gone(stream)
        elif hello.sampler == stream and hello.protocol == wire.PROTOCOL:
            granted = self.grants.ask(stream, Ask.of(hello))
            grant = self.folder / "grants" / stream
            if granted > hello.handed and not grant.exists():  # somebody has removed it
                self._write(grant, wire.Grant(hello.incarnation, granted))

    def _read_report(self, stream: str) -> None:
        """How many groups a sampler has handed over."""
        hello = read_message(self.folder / "samplers" / stream, wire.Hello, MOST_HELLO)
        if wire.protocol_mismatch(learner=wire.PROTOCOL, sampler=hello.protocol):
            if stream not in self.refused:
                self.refused.add(stream)
                self.log.warning("sampler %s refused: it speaks protocol %d", stream, hello.protocol)
            return
        wire.need(hello.sampler == stream, f"a hello of {wire.printable(hello.sampler, 100)}, under another's name")
        key = (stream, hello.incarnation)
        begin = max(self._begin(key), self.got.get(key, Seen()).upto)
        wire.need(hello.handed - begin <= MANY, f"it says it has handed over {hello.handed} groups; {begin} have come")
        believe(self.reports, key, hello.handed, lambda key: key in self.got or key in self.held_before)

    def _begin(self, key: tuple[str, int]) -> int:
        """All groups of this incarnation below this number are held."""
        return self.held_before.get(key, Seen()).upto

    def _book_absent(self, out: list[Arrived]) -> None:
        """Groups that were handed over and are not in the folder, are lost when they stay away for a while."""
        before, self.absent = self.absent, {}
        for key, handed in list(self.reports.items()):
            for name in self._guarded(key[0], self._absent_of, key, handed) or []:
                self.absent[name] = before.get(name, time.monotonic())
                if time.monotonic() - self.absent[name] > PATIENCE:
                    self.log.warning("%s is gone", self.folder / "rollouts" / name)
                    self.entries[self.names.owner(key[0])] += max(1, self.got.add(name, self.held_before))
                    out.append(Arrived(name, time.time(), fate="lost"))

    def _absent_of(self, key: tuple[str, int], handed: int) -> list[str]:
        """The groups of one incarnation that it has handed over, that are not accounted for, and not in the folder."""
        sampler, incarnation = key
        begin = self._begin(key)
        if self.entries[self.names.owner(sampler)] >= MOST_ENTRIES:
            return []
        names = [f"{sampler}/{incarnation}/{n}" for n in range(begin, min(handed, begin + MANY))]
        due = {name for name in names if not self.held_before.has(name) and not self.got.has(name)}
        if not due:
            return []
        return sorted(due.difference(self._names(sampler)), key=split)
