"""The sampler's end over a shared folder, with the interface of link.Link (see files.py)."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from pathlib import Path

from machinery.flags import UserError
from remote import wire
from remote.account import OddFileError, Spool, read_regular, write_atomically
from remote.files import BEAT, read_message

PRINT_EVERY = 30.0  # seconds between two printed lines about a missing learner
WEIGHTS = re.compile(r"v[0-9]{6,18}\.safetensors")


class FilesLink(threading.Thread):
    """A thread that polls the folder, as link.Link polls its sockets. The spool is the shared
    folder itself."""

    def __init__(self, folder: str, streams: list[str], flags, spool: Spool):
        super().__init__(daemon=True, name="link")
        self.folder = Path(folder).resolve()
        self.streams = streams
        self.flags = flags
        self.spool = spool
        self.welcome: queue.Queue[wire.Welcome] = queue.Queue()
        self.newest: wire.ReceivedWeights | None = None
        self.error = ""
        self.stopping = False
        self.session = ""
        self.got = dict.fromkeys(streams, 0)  # groups fetched by the learner and not held yet
        self.touched = 0  # time when the learner last touched `welcome`, by the folder's clock
        self.heard = time.monotonic()  # the own time when this was noticed
        self.beat = 0.0
        self.start()

    def behind(self, stream: str) -> int:
        """The number of groups that the learner has not fetched, as in link.Link.behind."""
        return max(0, len(self.spool.waiting[stream]) - self.got[stream])

    def close(self) -> None:
        self.stopping = True
        self.join(timeout=5)

    def run(self) -> None:
        while not self.stopping and not self.error:
            now = time.monotonic()
            self._turn_if_there(now)
            if now - self.heard > self.flags.give_up:
                self.error = (
                    f"no message from a learner in {self.folder} for {self.flags.give_up:.0f} s: check that the "
                    "learner runs. Groups that were handed over stay in the folder"
                )
            time.sleep(0.05)

    def _turn_if_there(self, now: float) -> None:
        """Do one turn. A bad file does not stop the thread or the reading of other files."""
        for work in (self._read_welcome, self._read_fetched, self._write_hellos, self._read_newest):
            try:
                work(now)
            except (FileNotFoundError, wire.WireError):
                pass  # replaced while it was read: the next turn reads the new one
            except OSError as e:
                print(f"{self.folder}: {e.strerror}; trying again", flush=True)
                time.sleep(1.0)
            if self.error:
                return

    def _read_welcome(self, now: float) -> None:
        path = self.folder / "welcome"
        touched = path.stat().st_mtime_ns
        if touched == self.touched:
            return
        welcome = read_message(path, wire.Welcome)
        self.touched = touched
        self.heard = now
        if welcome.session != self.session:
            self.session = welcome.session
            self.welcome.put(welcome)

    def _read_fetched(self, now: float) -> None:
        """Read which groups the learner holds, and which it has fetched."""
        for stream in self.streams:
            held, got = self.folder / "held" / stream, self.folder / "got" / stream
            with self.spool.lock:
                known = set(self.spool.waiting[stream])
            if held.exists():
                self.spool.forget(known.intersection(read_message(held, wire.Held).names))
            names = set(read_message(got, wire.Got).names) if got.exists() else set()
            with self.spool.lock:
                self.got[stream] = sum(name in names for name in self.spool.waiting[stream])

    def _read_newest(self, now: float) -> None:
        newest = self.folder / "models" / "newest"
        if not newest.exists():
            return
        offer = read_message(newest, wire.Offer)
        offer.of.check(wire.MOST_WEIGHTS)
        wire.need(
            WEIGHTS.fullmatch(offer.of.name) and offer.version >= 0,
            "newest: not an offer of weights",
        )
        weights = wire.ReceivedWeights(
            offer.version, offer.published, self.folder / "models" / offer.of.name
        )
        if self.newest != weights and self._are_whole(weights.path, offer.of):
            self.newest = weights

    def _are_whole(self, path: Path, of: wire.Manifest) -> bool:
        try:
            return wire.manifest(of.name, read_regular(path, of.nbytes)) == of
        except OddFileError:
            return False

    def _write_hellos(self, now: float) -> None:
        if now - self.beat <= BEAT:
            return
        self.beat = now
        for stream in self.streams:
            handed = self.spool.handed[stream]
            hello = wire.Hello(stream, self.spool.incarnation, self.session, handed)
            write_atomically(self.folder / "samplers" / stream, wire.encode(hello))


def wait_for_ranks(folder: Path, flags) -> int:
    """The number of the learner's ranks; waits for the learner. Raise UserError after --give_up
    seconds without a learner."""
    start = printed = time.monotonic()
    while time.monotonic() - start <= flags.give_up:
        with contextlib.suppress(OSError, wire.WireError):
            return read_message(folder / "welcome", wire.Welcome).run.world
        if time.monotonic() - printed > PRINT_EVERY:
            printed = time.monotonic()
            print(
                f"no learner at {folder} yet, waiting (at most {flags.give_up:.0f} s, --give_up)",
                flush=True,
            )
        time.sleep(0.05)
    raise UserError(
        f"--connect={flags.connect}: no learner in this folder for {flags.give_up:.0f} s; start the learner with "
        f"--samplers={folder}"
    )
