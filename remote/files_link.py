"""The sampler's end over a shared folder, with the interface of link.Link (see files.py)."""

from __future__ import annotations

import re
import time
from pathlib import Path

from remote import wire
from remote.account import Spool, read_regular, write_atomically
from remote.files import BEAT, read_message
from remote.link import Connection

WEIGHTS = re.compile(r"v[0-9]{6,18}\.safetensors")


class FilesLink(Connection):
    """A thread that polls the folder, as link.Link polls its socket. The spool is the shared folder
    itself."""

    def __init__(self, folder: str, flags, spool: Spool):
        super().__init__(folder, flags, spool)
        self.folder = Path(folder).resolve()
        self.touched = 0  # time when the learner last touched `welcome`, by the folder's clock
        self.start()

    def run(self) -> None:
        while not self.stopping and not self.error:
            now = time.monotonic()
            # a bad file does not stop the reading of other files
            for work in (
                self._read_welcome,
                self._read_receipt,
                self._say_hello,
                self._read_newest,
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
        self.on_receipt(read_message(self.folder / "receipts" / self.spool.sampler, wire.Receipt))

    def _read_newest(self, now: float) -> None:
        offer = read_message(self.folder / "models" / "newest", wire.Offer)
        wire.need(WEIGHTS.fullmatch(offer.of.name), "newest: not an offer of weights")
        path = self.folder / "models" / offer.of.name
        weights = wire.ReceivedWeights(offer.version, offer.published, path)
        if self.newest != weights:
            whole = wire.manifest(path.name, read_regular(path, offer.of.nbytes))
            wire.need(whole == offer.of, f"{path.name}: damaged")
            self.newest = weights

    def _say_hello(self, now: float) -> None:
        if now - self.beat > BEAT:
            self.beat = now
            path = self.folder / "samplers" / self.spool.sampler
            write_atomically(path, wire.encode(self.hello()))
