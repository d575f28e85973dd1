"""The transport over a shared folder, both ends: hub.Hub's face for the learner, link.Link's for a sampler. HeteroRL's `Model_Sync_Path` and `Rollout_Sync_Path`.

Every file appears whole, by a rename:

    welcome                      what to sample, and the learner's session
    models/v000012.safetensors   weights;  models/newest: their Offer
    rollouts/SAMPLER/INC-N       a group behind its SHA-256; the sampler deletes it when it is held
    held/SAMPLER                 which of them are held, got/SAMPLER: which are fetched;  samplers/SAMPLER: the sampler's last Hello

With several ranks a sampler SAMPLER.R has a stream for each rank R.
"""
from __future__ import annotations

import queue
import time
from collections import Counter
from pathlib import Path

import wire
from account import Account, Spool, opened, place, split
from hub import KEPT_VERSIONS


class FilesHub:
    """The learner's end, called by the training loop."""

    def __init__(self, folder: str, welcome: wire.Welcome, limits: wire.Limits, log, rank: int = 0, world: int = 1):
        self.folder, self.welcome, self.limits, self.log, self.rank, self.world = Path(folder), welcome, limits, log, rank, world
        self.counts, self.reports, self.got, self.held_before, self.address, self.broken = Counter(), {}, Account(), Account(), str(folder), ""
        for name in ("models", "rollouts", "held", "got", "samplers"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def open(self, held: Account) -> None:
        self.held_before = held
        for path in self._streams("got"):                  # of an earlier session: nothing is fetched in this one
            path.unlink()
        if self.rank == 0:
            place(self.folder / "welcome", wire.encode(self.welcome))

    def broadcast(self, version: int, path: Path, published: float) -> None:
        if self.rank:
            return
        data = path.read_bytes()
        place(self.folder / "models" / path.name, data)
        place(self.folder / "models" / "newest", wire.encode(wire.Offer(wire.manifest(path.name, data), version, published)))
        for old in sorted((self.folder / "models").glob("v*.safetensors"))[:-KEPT_VERSIONS]:
            old.unlink()

    def held(self, names: list[str]) -> None:
        for name in names:
            self.held_before.add(name)
        for sampler in {split(name)[0][0] for name in names}:
            place(self.folder / "held" / sampler, wire.encode(wire.Held([n for n in self._names(sampler) if self.held_before.has(n)])))

    def _streams(self, kind: str) -> list[Path]:
        return sorted((self.folder / kind).glob("*" if self.world == 1 else f"*.{self.rank}"))

    def _names(self, sampler: str) -> list[str]:
        return [f"{sampler}/{'/'.join(p.name.split('-'))}" for p in (self.folder / "rollouts" / sampler).glob("*-*") if "." not in p.name]

    def take(self) -> list[tuple[str, bytes, float]]:
        out = []
        for report in (self.folder / "samplers").glob("*"):
            try:
                m = wire.decode(report.read_bytes())
                self.reports[m.sampler, m.incarnation] = (m.handed, m.lost)
            except (OSError, wire.WireError):              # being written
                continue
        for folder in self._streams("rollouts"):
            before = len(out)
            for name in sorted(self._names(folder.name), key=lambda n: split(n)):
                if self.got.has(name):
                    continue
                if self.held_before.has(name):             # in the checkpoint already
                    self.counts["duplicate"] += 1
                    self.got.add(name)
                    self.held([name])
                    continue
                path = folder / "-".join(name.split("/")[1:])
                if path.stat().st_size > self.limits.nbytes + 32:
                    data = None
                else:
                    data = opened(path.read_bytes())
                self.got.add(name)
                if data is None:
                    self.counts["corrupt"] += 1
                    self.log.warning("%s is damaged or too big", path)
                    self.held([name])
                    continue
                self.counts["received"] += 1
                self.counts["bytes_in"] += len(data)
                out.append((name, data, path.stat().st_mtime))
            if len(out) > before:
                place(self.folder / "got" / folder.name, wire.encode(wire.Got([n for n in self._names(folder.name) if self.got.has(n)])))
        return sorted(out, key=lambda item: item[2])       # in order of arrival

    def free(self, nbytes: int) -> None:
        pass

    def close(self) -> None:
        pass


class FilesLink:
    """A sampler's end, called between two batches. The spool is the folder itself."""

    def __init__(self, folder: str, streams: list[str], flags, spool: Spool):
        self.folder, self.streams, self.flags, self.spool = Path(folder), streams, flags, spool
        self.newest, self.error, self.session, self.welcome, self.got = None, "", "", queue.Queue(), dict.fromkeys(streams, 0)
        self.look()

    def behind(self) -> int:
        return sum(len(self.spool.waiting[s]) - min(len(self.spool.waiting[s]), self.got[s]) for s in self.streams)

    def look(self) -> None:
        try:
            m = wire.decode((self.folder / "welcome").read_bytes())
            if m.protocol != wire.PROTOCOL:
                self.error = f"the learner speaks protocol {m.protocol} and this sampler {wire.PROTOCOL}: bring both to one revision"
            if m.session != self.session:
                self.session = m.session
                self.welcome.put(m)
        except (FileNotFoundError, wire.WireError):
            return
        for stream in self.streams:
            place(self.folder / "samplers" / stream, wire.encode(wire.Hello(wire.PROTOCOL, stream, self.spool.incarnation, self.session, self.spool.handed[stream], self.spool.lost[stream])))
            try:
                self.spool.forget(wire.decode((self.folder / "held" / stream).read_bytes()).names)
            except (FileNotFoundError, wire.WireError):
                pass
            try:
                got = set(wire.decode((self.folder / "got" / stream).read_bytes()).names)
                self.got[stream] = len(got.intersection(self.spool.waiting[stream]))
            except (FileNotFoundError, wire.WireError):
                self.got[stream] = 0
        try:
            offer = wire.decode((self.folder / "models" / "newest").read_bytes())
        except (FileNotFoundError, wire.WireError):
            return
        path = self.folder / "models" / offer.of.name
        if self.newest != (offer.version, offer.published, path) and path.is_file() and wire.manifest(offer.of.name, path.read_bytes()) == offer.of:
            self.newest = (offer.version, offer.published, path)

    def close(self) -> None:
        pass


def shared_world(folder: Path, flags) -> int:
    """Ranks of the learner, once it is there."""
    start = said = time.monotonic()
    while not (folder / "welcome").is_file():
        if time.monotonic() - start > flags.give_up:
            raise ValueError(f"--connect={flags.connect}: no learner there for {flags.give_up:.0f} s; start it with --samplers=files --sync_path={folder}")
        if time.monotonic() - said > 30:
            said = time.monotonic()
            print(f"no learner at {folder} yet, waiting (at most {flags.give_up:.0f} s, --give_up)", flush=True)
        time.sleep(0.05)
    return wire.decode((folder / "welcome").read_bytes()).run["world"]
