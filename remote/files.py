"""The transport over a shared folder, both ends: hub.Hub's face for the learner, link.Link's for a sampler. HeteroRL's `Model_Sync_Path` and `Rollout_Sync_Path`.

Every file appears whole, by a rename:

    welcome                      what to sample, and the learner's session
    models/v000012.safetensors   weights;  models/newest: their Offer
    rollouts/SAMPLER/INC-N       a group behind its SHA-256; the sampler deletes it when it is held
    held/SAMPLER                 which of them are held, got/SAMPLER: which are fetched;  samplers/SAMPLER: the sampler's last Hello

With several ranks a sampler SAMPLER.R has a stream for each rank R. The learner touches `welcome` while it is there. A full disk is waited out on both ends.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter
from pathlib import Path

from remote import wire
from remote.account import Account, Spool, split, verified, write_atomically
from remote.hub import ROOM, retain

BEAT = 2.0  # seconds between two signs of life
PATIENCE = 20.0  # seconds until a file that should be there is lost: listings of a folder on another host lag behind


class FilesHub:
    """The learner's end, called by the training loop."""

    def __init__(
        self,
        folder: str,
        welcome: wire.Welcome,
        limits: wire.Limits,
        log,
        rank: int = 0,
        world: int = 1,
        room: int = ROOM,
    ):
        self.folder, self.welcome, self.limits, self.log, self.rank, self.world, self.room = (
            Path(folder),
            welcome,
            limits,
            log,
            rank,
            world,
            room,
        )
        self.counts, self.reports, self.got, self.held_before, self.address, self.broken = (
            Counter(),
            {},
            Account(),
            Account(),
            str(folder),
            "",
        )
        self.models: list[Path] = []  # published in this session, in order
        self.size, self.beat, self.unsaid = (
            0,
            0.0,
            {},
        )  # bytes taken and not freed; last sign of life; files that found no room on the disk
        self.fresh, self.strange, self.absent = (
            None,
            set(),
            {},
        )  # weights that are not out yet; samplers refused; names -> missed since when
        for name in ("models", "rollouts", "held", "got", "samplers"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def _say(self, path: Path, message) -> None:
        """Write a message; where the disk is full, later."""
        self.unsaid[path] = wire.encode(message)
        self._catch_up()

    def _catch_up(self) -> None:
        """What found no room on the disk, once more: messages (some of which make room), then the newest weights."""
        try:
            for path, data in list(self.unsaid.items()):
                write_atomically(path, data)
                del self.unsaid[path]
            if self.fresh is not None:
                path, offer = self.fresh
                write_atomically(out := self.folder / "models" / path.name, path.read_bytes())
                write_atomically(self.folder / "models" / "newest", wire.encode(offer))
                self.models, self.fresh = retain(out, self.models), None
        except OSError as e:
            self.log.warning("%s: %s; tried again soon", self.folder, e.strerror)

    def open(self, held: Account) -> None:
        self.held_before = held
        for path in self._streams("got"):  # of an earlier session: nothing is fetched in this one
            path.unlink()
        if self.rank == 0:
            self._say(self.folder / "welcome", self.welcome)

    def broadcast(self, version: int, path: Path, published: float) -> None:
        if self.rank == 0:
            self.fresh = (path, wire.Offer(wire.manifest(path.name, path.read_bytes()), version, published))
            self._catch_up()

    def held(self, names: list[str]) -> None:
        for name in names:
            self.held_before.add(name)
        for sampler in {split(name)[0][0] for name in names}:
            self._say(
                self.folder / "held" / sampler, wire.Held([n for n in self._names(sampler) if self.held_before.has(n)])
            )

    def _streams(self, kind: str) -> list[Path]:
        return sorted((self.folder / kind).glob("*" if self.world == 1 else f"*.{self.rank}"))

    def _names(self, sampler: str) -> list[str]:
        files = (p.name.split("-") for p in (self.folder / "rollouts" / sampler).glob("*-*"))
        return sorted(
            (f"{sampler}/{a}/{b}" for a, b in (x for x in files if len(x) == 2) if a.isdigit() and b.isdigit()),
            key=split,
        )

    def take(self) -> list[tuple[str, bytes | str, float]]:
        out: list = []
        try:
            if time.monotonic() - self.beat > BEAT:
                self.beat = time.monotonic()
                self._catch_up()
                self._listen(out)
            for stream in self._streams("rollouts"):
                self._take(stream, out)
        except OSError as e:  # a folder on another host is away for a while; what was read is kept
            self.log.warning("%s: %s; tried again soon", self.folder, e.strerror)
        return sorted(out, key=lambda item: item[2])  # in order of arrival

    def _take(self, stream: Path, out: list) -> None:
        new = [name for name in self._names(stream.name) if not self.got.has(name)]
        done = [name for name in new if self.held_before.has(name)]  # in the checkpoint already
        for name in done:
            self.counts["duplicate"] += 1
            self.got.add(name)
        if done:
            self.held(done)
        before = len(out)
        for name in new:
            if name not in done:
                if (item := self._read(name, stream / "-".join(name.split("/")[1:]))) is None:
                    break  # no room for more
                self.got.add(name)
                out.append(item)
        if len(out) > before:
            self._say(
                self.folder / "got" / stream.name, wire.Got([n for n in self._names(stream.name) if self.got.has(n)])
            )

    def _listen(self, out: list) -> None:
        """Say that the learner is here; hear what samplers have handed over. What stays away for a while is lost."""
        if self.rank == 0 and (self.folder / "welcome").exists():
            os.utime(self.folder / "welcome")
        for report in self._streams("samplers"):
            try:
                m = wire.decode(report.read_bytes())
            except (FileNotFoundError, wire.WireError):  # being written
                continue
            if m.protocol != wire.PROTOCOL:
                if m.sampler not in self.strange:
                    self.strange.add(m.sampler)
                    self.log.warning("sampler %s refused: it speaks protocol %d", m.sampler, m.protocol)
                continue
            key = (m.sampler, m.incarnation)
            self.reports[key] = max(self.reports.get(key, 0), m.handed)
        before, self.absent = self.absent, {}
        for key, handed in self.reports.items():
            names = (
                f"{key[0]}/{key[1]}/{n}"
                for n in range(self.held_before[key].upto if key in self.held_before else 0, handed)
            )
            if due := {name for name in names if not self.held_before.has(name) and not self.got.has(name)}:
                for name in sorted(due.difference(self._names(key[0])), key=split):
                    self.absent[name] = before.get(name, time.monotonic())
                    if time.monotonic() - self.absent[name] > PATIENCE:
                        self.log.warning("%s is gone", self.folder / "rollouts" / name)
                        self.got.add(name)
                        out.append((name, "lost", time.time()))

    def _read(self, name: str, path: Path) -> tuple[str, bytes | str, float] | None:
        info = path.stat()
        nbytes = info.st_size - 32  # behind its digest
        if nbytes > self.limits.nbytes:
            self.log.warning("%s is too big for a group", path)
            return name, "refused", info.st_mtime
        if self.size and self.size + nbytes > self.room:
            return None
        data = verified(path.read_bytes())
        if data is None:
            self.log.warning("%s is damaged", path)
            return name, "corrupt", info.st_mtime
        self.size += len(data)
        self.counts["received"] += 1
        self.counts["bytes_in"] += len(data)
        return name, data, info.st_mtime

    def free(self, nbytes: int) -> None:
        self.size -= nbytes

    def close(self) -> None:
        pass


class FilesLink(threading.Thread):
    """A sampler's end: a thread that looks into the folder, as link.Link listens to its sockets. The spool is the folder itself."""

    def __init__(self, folder: str, streams: list[str], flags, spool: Spool):
        super().__init__(daemon=True, name="link")
        self.folder, self.streams, self.flags, self.spool = Path(folder), streams, flags, spool
        self.newest, self.error, self.stopping = None, "", False
        self.session, self.welcome, self.got = "", queue.Queue(), dict.fromkeys(streams, 0)
        self.heard, self.mark, self.beat = time.monotonic(), 0, 0.0
        self.start()

    def run(self) -> None:
        before = time.monotonic()
        while not self.stopping and not self.error:
            now = time.monotonic()
            if now - before > self.flags.patience:  # this process was stopped: that is nobody's silence
                self.heard += now - before
            before = now
            try:
                self.turn(now)
            except OSError as e:
                if e.errno is None or isinstance(e, FileNotFoundError):
                    pass  # replaced while it was read: the next turn finds what replaced it
                else:
                    print(f"{self.folder}: {e.strerror}; trying again", flush=True)
                    time.sleep(1.0)
            except wire.WireError:
                pass
            if now - self.heard > self.flags.give_up:
                self.error = f"no sign of life from a learner in {self.folder} for {self.flags.give_up:.0f} s: is it up? A group that was handed over waits in the folder"
            time.sleep(0.05)

    def behind(self, stream: str) -> int:
        """As link.Link.behind."""
        return max(0, len(self.spool.waiting[stream]) - self.got[stream])

    def turn(self, now: float) -> None:
        path = self.folder / "welcome"
        if (mark := path.stat().st_mtime_ns) != self.mark:
            self.mark, self.heard = mark, now
            m = wire.decode(path.read_bytes())
            if m.protocol != wire.PROTOCOL:
                self.error = f"the learner speaks protocol {m.protocol} and this sampler {wire.PROTOCOL}: bring both to one revision"
                return
            if m.session != self.session:
                self.session = m.session
                self.welcome.put(m)
        for stream in self.streams:
            if (path := self.folder / "held" / stream).is_file():
                self.spool.forget(wire.decode(path.read_bytes()).names)
            got = set(wire.decode(path.read_bytes()).names) if (path := self.folder / "got" / stream).is_file() else ()
            with self.spool.lock:
                self.got[stream] = sum(name in got for name in self.spool.waiting[stream])
        if (path := self.folder / "models" / "newest").is_file():
            offer = wire.decode(path.read_bytes())
            path = self.folder / "models" / offer.of.name
            if offer.of.nbytes > self.flags.most_weights * 2**30:
                self.error = f"--most_weights={self.flags.most_weights}: the learner's weights have {offer.of.nbytes / 2**30:.1f} GiB"
            elif (
                self.newest != (offer.version, offer.published, path)
                and wire.manifest(offer.of.name, path.read_bytes()) == offer.of
            ):
                self.newest = (offer.version, offer.published, path)
        if now - self.beat > BEAT:
            self.beat = now
            for stream in self.streams:
                write_atomically(
                    self.folder / "samplers" / stream,
                    wire.encode(
                        wire.Hello(
                            wire.PROTOCOL,
                            stream,
                            self.spool.incarnation,
                            self.session,
                            self.spool.handed[stream],
                            self.spool.lost[stream],
                        )
                    ),
                )

    def close(self) -> None:
        self.stopping = True
        self.join(timeout=5)


def shared_world(folder: Path, flags) -> int:
    """Ranks of the learner, once it is there."""
    start = said = time.monotonic()
    while not (folder / "welcome").is_file():
        if time.monotonic() - start > flags.give_up:
            raise ValueError(
                f"--connect={flags.connect}: no learner there for {flags.give_up:.0f} s; start it with --samplers=files --sync_path={folder}"
            )
        if time.monotonic() - said > 30:
            said = time.monotonic()
            print(f"no learner at {folder} yet, waiting (at most {flags.give_up:.0f} s, --give_up)", flush=True)
        time.sleep(0.05)
    return wire.decode((folder / "welcome").read_bytes()).run["world"]
