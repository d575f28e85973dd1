"""Both ends of the transport over a shared folder: HeteroRL's `Model_Sync_Path` and `Rollout_Sync_Path`, section 4.2.

`FilesHub` has the face of hub.Hub, `FilesLink` that of link.Link. Every file appears whole, by a rename:

    welcome                       what to sample, and the learner's session
    models/v000012.safetensors    weights
    models/newest                 the Offer of the newest weights
    rollouts/SAMPLER/INC-N        a group behind its SHA-256; the sampler deletes it when it is held
    got/SAMPLER                   which of its groups are fetched
    held/SAMPLER                  which of its groups are held
    samplers/SAMPLER              the sampler's last Hello

With several ranks a sampler SAMPLER.R has a stream for each rank R. The learner touches `welcome` as long as it is
there. Both ends wait out a full disk.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter
from pathlib import Path

from flags import UserError
from remote import wire
from remote.account import (
    Account,
    Arrived,
    Seen,
    Spool,
    retain_weights,
    sampler_of,
    split,
    verified,
    write_atomically,
)
from remote.groups import Limits

BEAT = 2.0  # seconds between two signs of life
PATIENCE = 20.0  # seconds until a file that should be there is lost: listings of a folder on another host lag behind
PRINT_EVERY = 30.0  # seconds between two lines on the screen about a learner that is not there


# ---------------------------------------------------------------------------------------------------------------------
# The learner's end
# ---------------------------------------------------------------------------------------------------------------------


class FilesHub:
    """Everything is done by the calls of the training loop; there is no thread.

    counts, reports, broken: as in hub.Hub."""

    def __init__(self, folder: str, welcome: wire.Welcome, limits: Limits, log, rank: int = 0, ranks: int = 1):
        self.folder = Path(folder)
        self.address = str(folder)
        self.welcome = welcome
        self.limits = limits
        self.log = log
        self.rank = rank
        self.ranks = ranks
        self.broken = ""
        self.counts: Counter = Counter()
        self.reports: dict[tuple[str, int], int] = {}
        self.refused: set[str] = set()  # samplers of another protocol
        self.got = Account()  # groups that were fetched, or that will not come
        self.held_before = Account()  # groups that a checkpoint accounts for
        self.absent: dict[str, float] = {}  # groups that should be there and are not -> missed since when
        self.size = 0  # bytes of groups fetched and not freed
        self.beat = 0.0  # when the learner gave its last sign of life
        self.published: list[Path] = []  # weights of this session, in order
        self.unwritten: dict[Path, bytes] = {}  # messages that found no room on the disk
        self.unpublished: tuple[Path, wire.Offer] | None = None  # the newest weights, as long as they are not out
        for name in ("models", "rollouts", "held", "got", "samplers"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def open(self, held: Account) -> None:
        """Let samplers in. held: what the checkpoint accounts for."""
        self.held_before = held
        for path in self._streams("got"):  # of an earlier session: nothing is fetched in this one
            path.unlink()
        if self.rank == 0:
            self._write(self.folder / "welcome", self.welcome)

    def broadcast(self, version: int, path: Path, published: float) -> None:
        """Offer these weights to all samplers."""
        if self.rank == 0:
            offer = wire.Offer(wire.manifest(path.name, path.read_bytes()), version, published)
            self.unpublished = (path, offer)
            self._write_waiting()

    def held(self, names: list[str]) -> None:
        """A checkpoint accounts for these groups: their samplers may forget them."""
        for name in names:
            self.held_before.add(name)
        for sampler in {sampler_of(name) for name in names}:
            listed = [name for name in self._names(sampler) if self.held_before.has(name)]
            self._write(self.folder / "held" / sampler, wire.Held(listed))

    def drain(self) -> list[Arrived]:
        """What has come since the last call, in order of arrival."""
        out: list[Arrived] = []
        try:
            if time.monotonic() - self.beat > BEAT:
                self.beat = time.monotonic()
                self._write_waiting()
                self._touch_welcome()
                self._read_reports()
                self._book_absent(out)
            for stream in self._streams("rollouts"):
                self._fetch(stream, out)
        except OSError as e:  # a folder on another host is away for a while; what was read stays read
            self.log.warning("%s: %s; tried again soon", self.folder, e.strerror)
        return sorted(out, key=lambda arrived: arrived.when)

    def free(self, nbytes: int) -> None:
        """The training loop is done with a group of so many bytes: there is room again."""
        self.size -= nbytes

    def close(self) -> None:
        pass

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self, path: Path, message: wire.Message) -> None:
        """Write a message; where the disk is full, later."""
        self.unwritten[path] = wire.encode(message)
        self._write_waiting()

    def _write_waiting(self) -> None:
        """Write what found no room so far: messages, some of which make room, then the newest weights."""
        try:
            for path, data in list(self.unwritten.items()):
                write_atomically(path, data)
                del self.unwritten[path]
            if self.unpublished is not None:
                path, offer = self.unpublished
                copy = self.folder / "models" / path.name
                write_atomically(copy, path.read_bytes())
                write_atomically(self.folder / "models" / "newest", wire.encode(offer))
                self.published = retain_weights(copy, self.published)
                self.unpublished = None
        except OSError as e:
            self.log.warning("%s: %s; tried again soon", self.folder, e.strerror)

    def _touch_welcome(self) -> None:
        if self.rank == 0 and (self.folder / "welcome").exists():
            os.utime(self.folder / "welcome")

    # -- reading -------------------------------------------------------------------------------------------------------

    def _streams(self, kind: str) -> list[Path]:
        """The entries of this rank in one of the folders."""
        pattern = "*" if self.ranks == 1 else f"*.{self.rank}"
        return sorted((self.folder / kind).glob(pattern))

    def _names(self, stream: str) -> list[str]:
        """The groups that lie in a stream's folder, oldest first; files of another form are not groups."""
        names = []
        for path in (self.folder / "rollouts" / stream).glob("*-*"):
            parts = path.name.split("-")
            if len(parts) == 2 and parts[0].isdigit() and parts[1].isdigit():
                names.append(f"{stream}/{parts[0]}/{parts[1]}")
        return sorted(names, key=split)

    def _fetch(self, stream: Path, out: list[Arrived]) -> None:
        """Read the groups of one stream that are new, as far as there is room, and say that they were fetched."""
        new = [name for name in self._names(stream.name) if not self.got.has(name)]
        held = [name for name in new if self.held_before.has(name)]
        for name in held:
            self.counts["duplicate"] += 1
            self.got.add(name)
        if held:
            self.held(held)
        fetched = False
        for name in new:
            if name in held:
                continue
            arrived = self._read_group(name, stream / "-".join(name.split("/")[1:]))
            if arrived is None:
                break
            self.got.add(name)
            out.append(arrived)
            fetched = True
        if fetched:
            listed = [name for name in self._names(stream.name) if self.got.has(name)]
            self._write(self.folder / "got" / stream.name, wire.Got(listed))

    def _read_group(self, name: str, path: Path) -> Arrived | None:
        """The group, or its fate; None where there is no room for it."""
        info = path.stat()
        nbytes = info.st_size - 32  # behind its digest
        if nbytes > self.limits.nbytes:
            self.log.warning("%s is too big for a group", path)
            return Arrived(name, info.st_mtime, fate="refused")
        if self.size and self.size + nbytes > self.limits.room:
            return None
        data = verified(path.read_bytes())
        if data is None:
            self.log.warning("%s is damaged", path)
            return Arrived(name, info.st_mtime, fate="corrupt")
        self.size += len(data)
        self.counts["received"] += 1
        self.counts["bytes_in"] += len(data)
        return Arrived(name, info.st_mtime, data=data)

    def _read_reports(self) -> None:
        """Read how many groups each sampler has handed over."""
        for path in self._streams("samplers"):
            try:
                hello = wire.decode(path.read_bytes())
            except (FileNotFoundError, wire.WireError):  # being written
                continue
            if wire.protocol_mismatch(learner=wire.PROTOCOL, sampler=hello.protocol):
                if hello.sampler not in self.refused:
                    self.refused.add(hello.sampler)
                    self.log.warning("sampler %s refused: it speaks protocol %d", hello.sampler, hello.protocol)
                continue
            key = (hello.sampler, hello.incarnation)
            self.reports[key] = max(self.reports.get(key, 0), hello.handed)

    def _book_absent(self, out: list[Arrived]) -> None:
        """Groups that were handed over and are not in the folder, are lost when they stay away for a while."""
        before, self.absent = self.absent, {}
        for key, handed in self.reports.items():
            for name in self._absent_of(key, handed):
                self.absent[name] = before.get(name, time.monotonic())
                if time.monotonic() - self.absent[name] > PATIENCE:
                    self.log.warning("%s is gone", self.folder / "rollouts" / name)
                    self.got.add(name)
                    out.append(Arrived(name, time.time(), fate="lost"))

    def _absent_of(self, key: tuple[str, int], handed: int) -> list[str]:
        """The groups of one incarnation that it has handed over, that are not accounted for, and not in the folder."""
        sampler, incarnation = key
        begin = self.held_before.get(key, Seen()).upto  # all below are held
        names = [f"{sampler}/{incarnation}/{n}" for n in range(begin, handed)]
        due = {name for name in names if not self.held_before.has(name) and not self.got.has(name)}
        if not due:
            return []
        return sorted(due.difference(self._names(sampler)), key=split)


# ---------------------------------------------------------------------------------------------------------------------
# A sampler's end
# ---------------------------------------------------------------------------------------------------------------------


class FilesLink(threading.Thread):
    """A thread that looks into the folder, as link.Link listens to its sockets. The spool is the folder itself."""

    def __init__(self, folder: str, streams: list[str], flags, spool: Spool):
        super().__init__(daemon=True, name="link")
        self.folder = Path(folder)
        self.streams = streams
        self.flags = flags
        self.spool = spool
        self.welcome: queue.Queue[wire.Welcome] = queue.Queue()
        self.newest: wire.Weights | None = None
        self.error = ""
        self.stopping = False
        self.session = ""
        self.got = dict.fromkeys(streams, 0)  # groups fetched by the learner and not held yet
        self.touched = 0  # when the learner touched `welcome` last, by its clock
        self.heard = time.monotonic()  # the same, when it was noticed
        self.beat = 0.0
        self.start()

    def behind(self, stream: str) -> int:
        """Groups that the learner has not fetched, as link.Link.behind."""
        return max(0, len(self.spool.waiting[stream]) - self.got[stream])

    def close(self) -> None:
        self.stopping = True
        self.join(timeout=5)

    def run(self) -> None:
        before = time.monotonic()
        while not self.stopping and not self.error:
            now = time.monotonic()
            away = now - before
            before = now
            if away > self.flags.patience:  # this process was suspended; do not count that time against the learner
                self.heard += away
            self._turn_if_there(now)
            if now - self.heard > self.flags.give_up:
                self.error = (
                    f"no sign of life from a learner in {self.folder} for {self.flags.give_up:.0f} s: is it up? "
                    "A group that was handed over waits in the folder"
                )
            time.sleep(0.05)

    def _turn_if_there(self, now: float) -> None:
        try:
            self.turn(now)
        except (FileNotFoundError, wire.WireError):
            pass  # replaced while it was read: the next turn finds what replaced it
        except OSError as e:
            if e.errno is not None:
                print(f"{self.folder}: {e.strerror}; trying again", flush=True)
                time.sleep(1.0)

    def turn(self, now: float) -> None:
        self._read_welcome(now)
        if self.error:
            return
        for stream in self.streams:
            self._read_fetched(stream)
        self._read_newest()
        if now - self.beat > BEAT:
            self.beat = now
            for stream in self.streams:
                self._write_hello(stream)

    def _read_welcome(self, now: float) -> None:
        path = self.folder / "welcome"
        touched = path.stat().st_mtime_ns
        if touched == self.touched:
            return
        self.touched = touched
        self.heard = now
        welcome = wire.decode(path.read_bytes())
        self.error = wire.protocol_mismatch(learner=welcome.protocol, sampler=wire.PROTOCOL)
        if not self.error and welcome.session != self.session:
            self.session = welcome.session
            self.welcome.put(welcome)

    def _read_fetched(self, stream: str) -> None:
        """Which groups the learner holds, and which it has fetched."""
        held, got = self.folder / "held" / stream, self.folder / "got" / stream
        if held.is_file():
            self.spool.forget(wire.decode(held.read_bytes()).names)
        names = set(wire.decode(got.read_bytes()).names) if got.is_file() else set()
        with self.spool.lock:
            self.got[stream] = sum(name in names for name in self.spool.waiting[stream])

    def _read_newest(self) -> None:
        newest = self.folder / "models" / "newest"
        if not newest.is_file():
            return
        offer = wire.decode(newest.read_bytes())
        path = self.folder / "models" / offer.of.name
        weights = wire.Weights(offer.version, offer.published, path)
        if offer.of.nbytes > self.flags.most_weights * 2**30:
            self.error = (
                f"--most_weights={self.flags.most_weights}: "
                f"the learner's weights have {offer.of.nbytes / 2**30:.1f} GiB"
            )
        elif self.newest != weights and wire.manifest(offer.of.name, path.read_bytes()) == offer.of:
            self.newest = weights

    def _write_hello(self, stream: str) -> None:
        hello = wire.Hello(
            protocol=wire.PROTOCOL,
            sampler=stream,
            incarnation=self.spool.incarnation,
            session=self.session,
            handed=self.spool.handed[stream],
            lost=self.spool.lost[stream],
        )
        write_atomically(self.folder / "samplers" / stream, wire.encode(hello))


def wait_for_ranks(folder: Path, flags) -> int:
    """The number of the learner's ranks, once it is there. UserError after --give_up seconds without one."""
    start = time.monotonic()
    printed = start
    while not (folder / "welcome").is_file():
        now = time.monotonic()
        if now - start > flags.give_up:
            raise UserError(
                f"--connect={flags.connect}: no learner there for {flags.give_up:.0f} s; "
                f"start it with --samplers=files --sync_path={folder}"
            )
        if now - printed > PRINT_EVERY:
            printed = now
            print(f"no learner at {folder} yet, waiting (at most {flags.give_up:.0f} s, --give_up)", flush=True)
        time.sleep(0.05)
    return wire.decode((folder / "welcome").read_bytes()).run["world"]
