"""The learner's end over a shared folder: HeteroRL's `Model_Sync_Path` and `Rollout_Sync_Path`,
section 4.2.

`FilesHub` has the interface of hub.Hub; files_link.py is the sampler's end. Every file is written
whole and then renamed into place:

    welcome                       the work, and the learner's session
    models/v000012.safetensors    weights, written by weights.Store
    models/newest                 the Offer of the newest weights
    rollouts/SAMPLER/INC-N        a group after its SHA-256, deleted by the sampler once it is held
    got/SAMPLER                   the sampler's groups that are fetched
    held/SAMPLER                  the sampler's groups that are held
    samplers/SAMPLER              the sampler's last Hello

With several ranks a sampler SAMPLER.R has a stream for each rank R. A running learner touches
`welcome` regularly. While a disk is full, groups and messages wait. Names follow account.py's rule, the name
inside a message must be the name of its file, and only regular files up to a maximum size are read:
no link, folder, pipe or device. A group's arrival is the moment when the learner sees it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from itertools import islice
from pathlib import Path

from remote import wire
from remote.account import (
    Account,
    Arrived,
    Intake,
    OddFileError,
    is_sampler,
    is_stream,
    name_of_file,
    read_regular,
    sampler_of,
    split,
    verified,
    write_atomically,
)
from remote.groups import Limits
from remote.weights import manifest_of

BEAT = 2.0  # seconds between two signs of life
MOST_FILES = 1 << 16  # most files of a folder that are read


def read_message(path: Path, kind):
    """Read a message of this kind from a file. WireError: a different or a damaged message;
    OSError: no such file."""
    try:
        message = wire.decode(read_regular(path, wire.MOST))
    except OddFileError as e:
        raise wire.WireError(str(e)) from None
    wire.need(isinstance(message, kind), f"{path.name}: a message of a different kind")
    return message


class FilesHub(Intake):
    """The methods that the training loop calls do all work, except for the sign of life, which has
    its own thread."""

    def __init__(
        self, folder: str, welcome: wire.Welcome, limits: Limits, log, rank: int = 0, ranks: int = 1
    ):
        super().__init__(limits.room, log)
        for name in ("models", "rollouts", "held", "got", "samplers"):
            (Path(folder) / name).mkdir(parents=True, exist_ok=True)
        self.folder = Path(folder).resolve()
        self.address = str(folder)
        self.welcome = welcome
        self.limits = limits
        self.rank = rank
        self.ranks = ranks
        self.closed = threading.Event()
        self.beat = 0.0  # time of the learner's last sign of life
        self.unwritten: dict[Path, bytes] = {}  # messages that wait for room on the disk

    def open(self, held: Account) -> None:
        super().open(held)
        for stream in self._streams("got"):  # from an earlier session: nothing is fetched yet
            self._guarded(stream, (self.folder / "got" / stream).unlink)
        for stream in self._streams("rollouts"):
            self._guarded(stream, self._write_held, stream)
        if self.rank == 0:
            self._write(self.folder / "welcome", self.welcome)
            threading.Thread(target=self._stay_alive, daemon=True).start()

    def broadcast(
        self, version: int, path: Path, published: float, change: bytes | None = None
    ) -> None:
        """Offer these weights to all samplers, which read them in the folder."""
        if self.rank == 0:
            offer = wire.Offer(manifest_of(path), version, published)
            self._write(self.folder / "models" / "newest", offer)

    def held(self, names: list[str]) -> None:
        """Report that a checkpoint accounts for these groups: their samplers may delete them."""
        for name in names:
            self.held_names.add(name)
        for stream in {sampler_of(name) for name in names}:
            self._guarded(stream, self._write_held, stream)

    def drain(self) -> list[Arrived]:
        """The groups that have arrived since the last call, in order of arrival."""
        out: list[Arrived] = []
        if time.monotonic() - self.beat > BEAT:
            self.beat = time.monotonic()
            self._write_waiting()
            for stream in self._streams("samplers"):
                self._guarded(stream, self._read_report, stream)
        self._fetch(out)
        return out

    def close(self) -> None:
        self.closed.set()

    # -- writing

    def _write(self, path: Path, message: wire.Message) -> None:
        """Write a message, or retry later if the disk is full."""
        self.unwritten[path] = wire.encode(message)
        self._write_waiting()

    def _write_waiting(self) -> None:
        """Write all messages that still wait for room."""
        for path, data in list(self.unwritten.items()):
            try:
                write_atomically(path, data)
                del self.unwritten[path]
            except OSError as e:
                self.log.warning("%s: %s; another try follows", path, e.strerror)

    def _write_held(self, stream: str) -> None:
        listed = [name for name in self._names(stream) if self.held_names.has(name)]
        self._write(self.folder / "held" / stream, wire.Held(listed))

    def _write_got(self, stream: str) -> None:
        listed = [name for name in self._names(stream) if self.got.has(name)]
        self._write(self.folder / "got" / stream, wire.Got(listed))

    def _stay_alive(self) -> None:
        """Touch `welcome` while the learner runs, because an update or an evaluation may take
        long; write the file again if it is missing."""
        path = self.folder / "welcome"
        while not self.closed.wait(BEAT):
            with contextlib.suppress(OSError):
                if os.path.lexists(path):
                    os.utime(path, follow_symlinks=False)
                else:
                    write_atomically(path, wire.encode(self.welcome))

    # -- reading

    def _guarded(self, stream: str, work, *args):
        """Do some work for one stream, so that a fault in its files does not stop the other
        streams. None: the work failed."""
        try:
            return work(*args)
        except FileNotFoundError:  # replaced while it was read
            pass
        except OSError as e:  # a remote folder is unavailable for a while
            self.log.warning("stream %s: %s; another try follows", stream, e.strerror)
        except wire.WireError as e:
            self.counts["malformed"] += 1
            self.log.warning("stream %s: %s", stream, e)
        except Exception as e:  # a fault in this code, which does not end the run
            self.counts["faults"] += 1
            self.log.error("a fault in stream %s: %r", stream, e)
        return None

    def _streams(self, kind: str) -> list[str]:
        """The streams of this rank in one of the folders: subfolders with groups, or files with a
        message."""
        streams = []
        try:
            with os.scandir(self.folder / kind) as entries:
                for entry in islice(entries, MOST_FILES):
                    good = entry.is_dir if kind == "rollouts" else entry.is_file
                    if self._is_ours(entry.name) and good(follow_symlinks=False):
                        streams.append(entry.name)
        except OSError as e:
            self.log.warning("%s: %s; another try follows", self.folder / kind, e.strerror)
        return sorted(streams)

    def _is_ours(self, stream: str) -> bool:
        if self.ranks == 1:
            return is_sampler(stream)
        return is_stream(stream) and stream.endswith(f".{self.rank}")

    def _names(self, stream: str) -> list[str]:
        """The groups in a stream's folder, oldest first; files with other names are ignored."""
        names = []
        try:
            with os.scandir(self.folder / "rollouts" / stream) as entries:
                for entry in islice(entries, MOST_FILES):
                    name = name_of_file(stream, entry.name)
                    if name is not None and entry.is_file(follow_symlinks=False):
                        names.append(name)
        except (FileNotFoundError, NotADirectoryError):  # not there yet, or deleted
            return []
        return sorted(names, key=split)

    def _fetch(self, out: list[Arrived]) -> None:
        """Read new groups while there is room, and list the fetched groups."""
        for stream in self._streams("rollouts"):
            before = len(out)
            for name in self._guarded(stream, self._names, stream) or []:
                if self.got.has(name):
                    continue
                if arrived := self._guarded(stream, self._read_group, name):
                    self.got.add(name)
                    out.append(arrived)
            if len(out) > before:
                self._guarded(stream, self._write_got, stream)

    def _read_group(self, name: str) -> Arrived | None:
        """The group, or its fate; None if there is no room for it."""
        (stream, incarnation), n = split(name)
        path = self.folder / "rollouts" / stream / f"{incarnation}-{n}"
        nbytes = max(0, path.lstat().st_size - 32)  # without the digest
        if nbytes > self.limits.nbytes:
            self.log.warning("%s is too big for a group", path)
            return Arrived(name, time.time(), fate="refused")
        if not self.take_room(nbytes):
            return None
        data = None
        try:
            data = verified(read_regular(path, nbytes + 32))
        except OddFileError:
            pass
        finally:
            if data is None:
                self.free(nbytes)
        if data is None:
            self.log.warning("%s is damaged", path)
            return Arrived(name, time.time(), fate="corrupt")
        self.counts["received"] += 1
        self.counts["bytes_in"] += nbytes
        return Arrived(name, time.time(), data=data)

    def _read_report(self, stream: str) -> None:
        """Read how many groups a sampler has handed over."""
        hello = read_message(self.folder / "samplers" / stream, wire.Hello)
        wire.need(
            hello.sampler == stream,
            f"a hello of {wire.printable(hello.sampler, 100)}, under the name of a different sampler",
        )
        self.report((stream, hello.incarnation), hello.handed)
