"""How many more groups samplers may make: --admission=pace with samplers on other machines. HeteroRL, section 4.2.

Samplers that make what they like make more than is used, and what is too old is thrown away: long groups rather than
short ones, for they take longer. Here a sampler makes a group only where the learner has granted it, and each granted
group is used within the bound however long it takes, so what is trained on is what is made. A grant is the name of a
group: the next k of an incarnation. A sampler asks for it with the version v of the weights that it has. With n groups
a batch of u updates, S = --max_staleness, e = --sync_every, and the next batch taken at version L,

    batches that come before it must be used    d = floor((S - (L - v)) / u)
    some groups can all be used in time  where  i < n (1 + d_i)         i = 0, 1, ...: the most urgent group first
    a group is granted                   where  d >= w,  and fewer than n (1 + w) groups are granted or here and unused
                                                w = floor((S - e + 1) / 2 u), half of the bound, in batches

Whatever is granted can be used in time then: the next n (1 + w) places are those of batches 0 to w. The learner keeps
it so (`may_take`): it takes groups of the oldest weights first, and waits for a granted group rather than give a
younger one its place, where otherwise some would come too late. --window_seconds is not looked at: it drops as ever.

Whoever is granted something may die, or be hostile. A grant lapses when its sampler is silent or begins a new life, or
after --grant_seconds: its place is free again, and nobody waits for it. Its owner is then granted nothing for as long
as it held it, and twice as long with each lapse more; FORGIVE groups that came in time make one lapse undone. Nobody
holds more than its share as long as others ask. A group that nobody was granted, from a spool of before say, is taken
like any other.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import NamedTuple

from remote.account import sampler_of

FORGIVE = 64  # groups that came in time for each lapse that is forgotten
MOST_DOUBLINGS = 10
MOST_ASKS = 1024  # streams that are remembered as asking
MOST_OWNERS = 4096  # with lapses


class Ask(NamedTuple):
    """What a sampler would like: so many groups beyond those that it has handed over."""

    incarnation: int
    handed: int
    wants: int
    version: int  # of the weights that it would make them with

    @classmethod
    def of(cls, hello) -> Ask:
        return cls(hello.incarnation, hello.handed, hello.wants, hello.version)


class Open(NamedTuple):
    """A group that was granted and has not come."""

    version: int
    since: float


class Grants:
    """Grants of one rank. The hub calls ask, gone and give, from its thread; the training loop all else.

    cfg: train.py's flags. ranks: of the learner. room: groups that are here at the same time, at most, unless a batch
    has more. owner: who answers for a stream (guard.Names)."""

    def __init__(self, cfg, ranks: int, room: int, owner):
        self.owner = owner
        self.bound = cfg.max_staleness
        self.updates = cfg.rollout_batch // cfg.train_batch  # of a batch
        self.groups = cfg.rollout_batch // (cfg.group_size * ranks)  # of a batch
        self.wait = (self.bound - cfg.sync_every + 1) // (2 * self.updates)  # batches that a group waits, at most
        self.places = min(self.groups * (1 + self.wait), max(self.groups, room))
        self.seconds = cfg.grant_seconds
        self.lock = threading.Lock()
        self.open: dict[str, Open] = {}
        self.asks: dict[str, Ask] = {}  # stream -> ask; who has waited longest stands first
        self.granted: dict[str, tuple[int, int]] = {}  # stream -> (incarnation, groups granted of it)
        self.next_version = 0  # of the learner when it takes the next batch
        self.unused = 0  # groups that are here
        self.newest = 0  # version that is published
        self.lapses: Counter = Counter()  # owner -> lapses that are not forgotten
        self.in_time: Counter = Counter()  # owner with lapses -> groups that came in time since
        self.paused: dict[str, float] = {}  # owner -> until when it is granted nothing
        self.lapsed = 0  # grants, ever

    def batches_left(self, version: int, at: int) -> int:
        """d: batches that may be taken, from version `at` on, before a group of this version must be used."""
        return (self.bound - (at - version)) // self.updates

    # -- called by the hub ---------------------------------------------------------------------------------------------

    def ask(self, stream: str, ask: Ask) -> int:
        """Remember what a sampler asks for. The groups of this life that it was granted so far."""
        with self.lock:
            incarnation, granted = self.granted.get(stream, (ask.incarnation, 0))
            if ask.incarnation < incarnation:  # an earlier life's message
                return 0
            if ask.incarnation > incarnation:
                self._lapse([name for name in self.open if sampler_of(name) == stream], time.monotonic())
                granted = 0
            self.granted[stream] = (ask.incarnation, granted)
            while len(self.granted) > MOST_ASKS:
                self._forget(next(iter(self.granted)))
            if ask.wants and ask.handed >= granted:  # else it has not begun what it was granted
                self.asks[stream] = ask
            else:
                self.asks.pop(stream, None)
            return granted

    def gone(self, stream: str) -> None:
        """This sampler says nothing any more."""
        with self.lock:
            self._forget(stream)

    def _forget(self, stream: str) -> None:
        self.asks.pop(stream, None)
        self.granted.pop(stream, None)
        self._lapse([name for name in self.open if sampler_of(name) == stream], time.monotonic())

    def give(self) -> dict[str, tuple[int, int]]:
        """Grant what may be granted now: stream -> (incarnation, groups of it that are granted)."""
        given = {}
        now = time.monotonic()
        with self.lock:
            holders = Counter(self.owner(sampler_of(name)) for name in self.open)
            share = -(-self.places // max(1, len({*holders, *map(self.owner, self.asks)})))
            for stream, ask in list(self.asks.items()):
                owner = self.owner(stream)
                n = min(ask.wants, share - holders[owner], self.places - len(self.open) - self.unused)
                if n > 0 and self._may_begin(owner, ask, now):
                    del self.asks[stream]
                    holders[owner] += n
                    given[stream] = self._grant(stream, ask, n, now)
        return given

    def _may_begin(self, owner: str, ask: Ask, now: float) -> bool:
        """Whether this owner's groups are wanted, and would be young enough."""
        version = min(ask.version, self.newest)
        return self.paused.get(owner, 0.0) <= now and self.batches_left(version, self.next_version) >= self.wait

    def _grant(self, stream: str, ask: Ask, n: int, now: float) -> tuple[int, int]:
        first = max(ask.handed, self.granted[stream][1])
        for i in range(first, first + n):
            self.open[f"{stream}/{ask.incarnation}/{i}"] = Open(min(ask.version, self.newest), now)
        self.granted[stream] = (ask.incarnation, first + n)
        return self.granted[stream]

    # -- called by the training loop -----------------------------------------------------------------------------------

    def plan(self, next_version: int, unused: int) -> None:
        """The next batch is taken at this version, and so many groups are here for it or for later ones."""
        with self.lock:
            self.next_version = next_version
            self.unused = unused

    def came(self, name: str, here: bool) -> None:
        """This group is here, and not used yet; or its fate is decided."""
        with self.lock:
            self.unused += here  # until the next `plan`: nothing may be granted in between
            if self.open.pop(name, None) is None:
                return
            owner = self.owner(sampler_of(name))
            if self.lapses[owner]:
                self.in_time[owner] += 1
                if self.in_time[owner] >= FORGIVE:
                    self.in_time[owner] = 0
                    self.lapses[owner] -= 1

    def may_take(self, versions: list[int], at: int, free: int) -> bool:
        """Whether the learner may take the first of the groups that are here, or has to wait for granted ones.

        versions: of their weights, ascending. at: the learner's version. free: places that are left in the batch."""
        with self.lock:
            granted = [grant.version for grant in self.open.values()]
        if not granted:
            return True
        without = self._in_time(versions[1:] + granted, at, free - 1)
        return without or not self._in_time(versions + granted, at, free)  # some will be late either way: do not wait

    def _in_time(self, versions: list[int], at: int, free: int) -> bool:
        """Whether groups of these versions can all be used in time."""
        left = sorted(self.batches_left(version, at) for version in versions)
        return all(i < free + self.groups * d for i, d in enumerate(left))

    def expire(self) -> None:
        """Grants that were not used for too long lapse."""
        now = time.monotonic()
        with self.lock:
            self._lapse([name for name, grant in self.open.items() if now - grant.since > self.seconds], now)

    def forgive(self, away: float) -> None:
        """This process was suspended; do not count that time against the samplers."""
        with self.lock:
            self.open = {name: Open(grant.version, grant.since + away) for name, grant in self.open.items()}

    def _lapse(self, names: list[str], now: float) -> None:
        held: dict[str, float] = {}  # owner -> seconds
        for name in names:
            owner = self.owner(sampler_of(name))
            held[owner] = max(held.get(owner, 0.0), now - self.open.pop(name).since)
            self.lapsed += 1
        for owner, seconds in held.items():
            self.paused[owner] = now + seconds * 2 ** min(self.lapses[owner], MOST_DOUBLINGS)
            self.lapses[owner] += 1
            self.in_time[owner] = 0
        for owner in list(self.lapses)[:-MOST_OWNERS]:
            del self.lapses[owner], self.in_time[owner], self.paused[owner]
