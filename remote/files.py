"""Both ends over a shared folder: HeteroRL's `Model_Sync_Path` and `Rollout_Sync_Path`, section 4.2.

`FilesHub`, the learner's end, has the interface of hub.Hub; `FilesLink`, the sampler's end, has that
of link.Link. Every file is written whole and then renamed into place:

    welcome                       the Welcome: the run's description, and the learner's session
    models/v000012.safetensors    weights, written by weights.Store
    models/newest                 the Offer of the newest weights
    rollouts/SAMPLER/INC-N        a group after its SHA-256, deleted by the sampler once it is held
    receipts/SAMPLER              the Receipt of the sampler's groups that are fetched, and held
    samplers/SAMPLER              the sampler's last Hello

A running learner touches `welcome` regularly. While a disk is full, groups and messages wait. Names
follow account.py's rule, the name inside a message must be the name of its file, and only regular
files up to a maximum size are read: no link, folder, pipe or device. A group's arrival is the
moment when the learner sees it."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

from remote import wire
from remote.account import (
    Arrived,
    Intake,
    Spool,
    is_sampler,
    names_of_files,
    read_regular,
    split,
    write_atomically,
)
from remote.groups import Limits
from remote.link import Connection

BEAT = 2.0  # seconds between two signs of life
WEIGHTS = re.compile(r"v[0-9]{6,18}\.safetensors")


def read_message(path: Path, kind):
    """Read a message of this kind from a file. WireError: a different or a damaged message;
    OSError: no such file."""
    message = wire.decode(read_regular(path, wire.MOST))
    wire.need(isinstance(message, kind), f"{path.name}: a message of a different kind")
    return message


class FilesHub(Intake):
    """The methods that the training loop calls do all work, except for the sign of life, which has
    its own thread."""

    def __init__(self, folder: str, welcome: wire.Welcome, limits: Limits, log):
        super().__init__(limits, log)
        for name in ("models", "rollouts", "receipts", "samplers"):
            (Path(folder) / name).mkdir(parents=True, exist_ok=True)
        self.folder = Path(folder).resolve()
        self.address = str(folder)
        self.welcome = welcome
        self.closed = threading.Event()
        self.beat = 0.0  # time of the learner's last sign of life
        self.last = ""  # the sampler of the last group that was read
        # messages that wait for room on the disk
        self.unwritten: dict[Path, bytes] = {}

    def open(self) -> None:
        super().open()
        # also replaces an earlier session's receipts
        for sampler in self._samplers("rollouts"):
            self._write_receipt(sampler)
        self._write(self.folder / "welcome", self.welcome)
        threading.Thread(target=self._stay_alive, daemon=True).start()

    def broadcast(self, offer: wire.Offer, path: Path, change: bytes | None) -> None:
        self._write(self.folder / "models" / "newest", offer)

    def hold(self, names: list[str]) -> None:
        super().hold(names)
        for sampler in {split(name)[0] for name in names}:
            self._write_receipt(sampler)

    def drain(self) -> list[Arrived]:
        if time.monotonic() - self.beat > BEAT:
            self.beat = time.monotonic()
            self._write_waiting()
            for sampler in self._samplers("samplers"):
                with self._guarded(sampler):
                    hello = read_message(self.folder / "samplers" / sampler, wire.Hello)
                    fault = f"a hello of {hello.sampler}, under the name of a different sampler"
                    wire.need(hello.sampler == sampler, fault)
                    self.report(sampler, hello.incarnation, hello.handed)
        return self._fetch()

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

    def _write_receipt(self, sampler: str) -> None:
        with self._guarded(sampler):
            got = [name for name in self._names(sampler) if name in self.got]
            held = [name for name in got if name in self.held]
            self._write(self.folder / "receipts" / sampler, wire.Receipt(got, held))

    def _stay_alive(self) -> None:
        """Touch `welcome` while the learner runs: an update or an evaluation may take long."""
        while not self.closed.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self.folder / "welcome", follow_symlinks=False)

    # -- reading

    @contextmanager
    def _guarded(self, sampler: str) -> Iterator[None]:
        """Log an exception in the work for one sampler, so that a fault in its files does not stop
        the other samplers."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):  # replaced while it was read
            pass
        except OSError as e:  # a remote folder is unavailable for a while
            self.log.warning("sampler %s: %s; another try follows", sampler, e.strerror)
        except ValueError as e:
            self.counts["malformed"] += 1
            self.log.warning("sampler %s: %s", sampler, e)
        except Exception as e:  # a fault in this code, which does not end the run
            self.counts["faults"] += 1
            self.log.error("a fault in the files of sampler %s: %r", sampler, e)

    def _samplers(self, kind: str) -> list[str]:
        """The samplers with groups ("rollouts") or with a message ("samplers")."""
        with self._guarded(kind):
            return sorted(filter(is_sampler, os.listdir(self.folder / kind)))
        return []

    def _names(self, sampler: str) -> list[str]:
        """The groups in a sampler's folder, oldest first."""
        return names_of_files(sampler, os.listdir(self.folder / "rollouts" / sampler))

    def _fetch(self) -> list[Arrived]:
        """Read new groups while there is room, and list the fetched groups. Samplers take turns, also
        from call to call, so that all have the same share of the room."""
        out = []
        samplers = self._samplers("rollouts")
        samplers.sort(key=lambda sampler: (sampler <= self.last, sampler))
        for turn in zip_longest(*map(self._new, samplers)):
            for name in filter(None, turn):
                sampler = split(name)[0]
                with self._guarded(sampler):
                    if arrived := self._read_group(name):
                        self.got.add(name)
                        self.last = sampler
                        out.append(arrived)
        for sampler in sorted({split(arrived.name)[0] for arrived in out}):
            self._write_receipt(sampler)
        return out

    def _new(self, sampler: str) -> list[str]:
        """A sampler's groups that are not fetched yet, oldest first."""
        with self._guarded(sampler):
            return [name for name in self._names(sampler) if name not in self.got]
        return []

    def _read_group(self, name: str) -> Arrived | None:
        """The group, or its fate; None if there is no room for it."""
        sampler, incarnation, n = split(name)
        path = self.folder / "rollouts" / sampler / f"{incarnation}-{n}"
        nbytes = max(0, path.lstat().st_size - 32)  # without the digest
        if nbytes > self.limits.nbytes:
            self.log.warning("%s is too big for a group", path)
            return Arrived(name, fate="refused")
        if not self.take_room(nbytes):
            return None
        data = b""
        try:
            data = wire.verified(read_regular(path, nbytes + 32))
        except ValueError:
            self.log.warning("%s is damaged", path)
            return Arrived(name, fate="corrupt")
        finally:
            if not data:
                self.free(nbytes)
        self.counts["received"] += 1
        self.counts["bytes_in"] += nbytes
        return Arrived(name, data)


class FilesLink(Connection):
    """A thread that polls the folder, as link.Link polls its socket. The spool is the shared folder
    itself."""

    def __init__(self, folder: str, flags, spool: Spool):
        super().__init__(folder, flags, spool)
        self.folder = Path(folder).resolve()
        # time when a learner last touched `welcome`, by the folder's clock; it may have ended
        welcome = self.folder / "welcome"
        self.touched = welcome.stat().st_mtime_ns if welcome.exists() else 0
        self.start()

    def run(self) -> None:
        while not self.stopping and not self.error:
            now = time.monotonic()
            # a bad file does not stop the reading of other files
            for work in (
                self._read_welcome,
                self._read_receipt,
                self._say_hello,
                self._read_offer,
            ):
                try:
                    work(now)
                except (FileNotFoundError, wire.WireError):
                    pass  # replaced while it was read: the next turn reads the new one
                except OSError as e:
                    print(f"{self.folder}: {e.strerror}; trying again", flush=True)
                    time.sleep(1.0)
            self.check_silence(now)
            time.sleep(0.05)

    def _read_welcome(self, now: float) -> None:
        path = self.folder / "welcome"
        touched = path.stat().st_mtime_ns
        if touched == self.touched:
            return
        welcome = read_message(path, wire.Welcome)
        self.touched = touched
        self.heard = now
        if self.welcome is None or welcome.session != self.welcome.session:
            self.on_welcome(welcome)

    def _read_receipt(self, now: float) -> None:
        """Read which groups the learner holds, and which it has fetched."""
        self.on_receipt(
            read_message(self.folder / "receipts" / self.spool.sampler, wire.Receipt)
        )

    def _read_offer(self, now: float) -> None:
        offer = read_message(self.folder / "models" / "newest", wire.Offer)
        wire.need(WEIGHTS.fullmatch(offer.of.name), "newest: not an offer of weights")
        path = self.folder / "models" / offer.of.name
        weights = wire.ReceivedWeights(offer.version, offer.published, path)
        if self.newest != weights:
            manifest = wire.manifest(path.name, read_regular(path, offer.of.nbytes))
            wire.need(manifest == offer.of, f"{path.name}: damaged")
            self.newest = weights

    def _say_hello(self, now: float) -> None:
        if now - self.beat > BEAT:
            self.beat = now
            path = self.folder / "samplers" / self.spool.sampler
            write_atomically(path, wire.encode(self.hello()))
