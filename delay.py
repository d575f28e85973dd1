"""Delayed samplers in one process, on a virtual clock: HeteroRL, section 4.1. Exact, and
reproducible bit for bit.

Each of `--delay_samplers` samplers has a separate model version. A sampler draws a delay D, samples
with its current version until D seconds have passed, then loads the newest broadcast version and
draws a new delay. As in the paper, D is the total network latency. Samplers never idle, and the
learner trains on groups in order of arrival.

The clock is virtual: an update takes `--step_seconds` and sampling takes no time, so delays
translate to model versions:

    time of version v  =  v step_seconds (+ the time that the learner waited for groups)
    D                  <= max_staleness step_seconds        (--max_staleness=0: synchronous)

The distributions of D between lo and hi seconds are fitted so that
P(D < lo) = P(D > hi) = (1 - mass) / 2 = a, and then clipped to [lo, hi]:

    lognormal     mu = log sqrt(lo hi), sigma = log(hi / lo) / (2 z), z the normal quantile of 1 - a
    weibull       k = log(log a / log(1 - a)) / log(hi / lo), log scale = log hi - log(-log a) / k
    exponential   rate = -log a / hi: one parameter, so only P(D > hi) = a is satisfied
    constant      hi

A group is sampled when the learner takes it, with the weights that its sampler had when the group
was made. This is exact because samples are a pure function of weights and seeds (rollout.py).
Groups dropped by a bound are never computed. Old versions stay on disk as long as a sampler, a
waiting group or a checkpoint needs them."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from config import Config
from machinery.checkpoint.tensors import read_tensors, write_tensors
from machinery.flags import UserError, need
from machinery.ranks import from_all
from rollout import Rollout, uniforms
from source import LocalSource

MASS = 0.995  # share of the fitted distribution between the shortest and the longest delay


@dataclass(frozen=True)
class DelayDistribution:
    """A distribution of delays in seconds; formulas at the top of the file."""

    kind: str
    low: float
    high: float

    def fit(self) -> dict[str, float]:
        """The parameters that satisfy the two quantile conditions."""
        a = (1 - MASS) / 2
        span = math.log(self.high / self.low)
        if self.kind == "lognormal":
            return {
                "mu": math.log(self.low * self.high) / 2,
                "sigma": span / (2 * NormalDist().inv_cdf(1 - a)),
            }
        if self.kind == "weibull":
            k = math.log(math.log(a) / math.log1p(-a)) / span
            return {"k": k, "log_scale": math.log(self.high) - math.log(-math.log(a)) / k}
        if self.kind == "exponential":
            return {"rate": -math.log(a) / self.high}
        return {}

    def quantile(self, u: float) -> float:
        """The u-quantile of the delay, 0 < u < 1, clipped to [low, high]."""
        fitted = self.fit()
        if self.kind == "lognormal":
            log_delay = fitted["mu"] + fitted["sigma"] * NormalDist().inv_cdf(u)
        elif self.kind == "weibull":
            log_delay = fitted["log_scale"] + math.log(-math.log1p(-u)) / fitted["k"]
        elif self.kind == "exponential":
            log_delay = math.log(-math.log1p(-u) / fitted["rate"])
        else:
            return self.high
        if log_delay <= math.log(self.low):
            return self.low
        if log_delay >= math.log(self.high):
            return self.high
        return math.exp(log_delay)


@dataclass
class SimulatedSampler:
    """A simulated sampler."""

    version: int  # of its current weights
    until: float  # virtual seconds: when it loads the next version
    draws: int  # delays drawn so far
    groups: int = 0  # groups made so far


class Ticket(NamedTuple):
    """A group that a sampler has made and the learner has not taken yet."""

    number: int  # index of the group in this source
    version: int  # of the sampling weights
    made_at: float  # virtual seconds


class DelaySource(LocalSource):
    """A LocalSource with one engine that simulates `cfg.delay_samplers` delayed samplers.

    store: the folder of old versions, which the first rank writes. Every rank runs the same clock
    with the same draws."""

    def __init__(self, *args, cfg: Config, store: Path, **more):
        super().__init__(*args, **more)
        self.cfg = cfg
        self.store = Path(store)
        self.distribution = DelayDistribution(cfg.delay, cfg.delay_min, cfg.delay_max)
        self.longest = (
            math.inf if cfg.max_staleness is None else cfg.max_staleness * cfg.step_seconds
        )
        self.samplers: list[SimulatedSampler] = []
        # version -> virtual time, for the versions still on disk
        self.broadcast: dict[int, float] = {}
        self.tickets: list[Ticket] = []
        self.made = 0.0  # fraction of a group, carried to the next call
        self.waited = 0.0  # virtual seconds that the learner has waited for groups
        self.dropped = Counter()  # groups dropped by "staleness" and by "window"
        self.pinned = [set(), set()]  # versions that the last two checkpoints need

    def now(self, learner_version: int) -> float:
        """The virtual time in seconds."""
        return learner_version * self.cfg.step_seconds + self.waited

    # -- weights

    def publish(self, version: int, named_tensors) -> None:
        """Broadcast the weights: store them for the samplers, every `--sync_every` updates.
        Collective. If no broadcast is due, no rank reads the tensors (reading is collective)."""
        if self.broadcast and version - max(self.broadcast) < self.cfg.sync_every:
            return
        if self.rank == 0:
            write_tensors(self.path(version), named_tensors)
        else:  # reading is collective: every rank must read every tensor equally often
            deque(named_tensors, maxlen=0)
        self.broadcast[version] = self.now(version)
        if not self.samplers:
            self.samplers = [
                SimulatedSampler(version, self.delay(i, 0), 1)
                for i in range(self.cfg.delay_samplers)
            ]
        # Reload before deleting old versions: samplers whose delays ended since the last broadcast
        # load old versions.
        self.reload(self.now(version))
        needed = self.needed().union(*self.pinned)
        # With --dynamic_sampling ranks take unequal numbers of groups, so ranks need different old
        # versions. `from_all` is also a barrier, after which the new file is complete.
        everywhere = set().union(*from_all(needed))
        for old in set(self.broadcast) - everywhere:
            del self.broadcast[old]
            if self.rank == 0:
                self.path(old).unlink(missing_ok=True)

    def needed(self) -> set[int]:
        """The versions that must stay on disk: the newest, the samplers', the waiting groups'."""
        held = {sampler.version for sampler in self.samplers}
        waiting = {ticket.version for ticket in self.tickets}
        return {*sorted(self.broadcast)[-1:]} | held | waiting

    def path(self, version: int) -> Path:
        return self.store / f"v{version:06d}.safetensors"

    # -- the clock

    def delay(self, sampler: int, draw: int) -> float:
        """Delay number `draw` of a sampler, virtual seconds: a pure function of the run's seed."""
        u = float(uniforms(1, "delay", self.cfg.seed, sampler, draw)[0])
        return min(self.distribution.quantile(max(u, 2.0**-53)), self.longest)

    def reload(self, now: float) -> None:
        """Advance samplers to `now`: after each delay, load the newest version and draw a delay."""
        for i, sampler in enumerate(self.samplers):
            while sampler.until <= now:
                delay = self.delay(i, sampler.draws)
                loaded_at = now if delay == 0 else sampler.until
                sampler.version = max(v for v, t in self.broadcast.items() if t <= loaded_at)
                sampler.until = loaded_at + delay
                sampler.draws += 1
                if delay == 0:  # a further delay of 0 would end at the same time: endless loop
                    break

    def make(self, n_groups: int, learner_version: int, share: float = 1.0) -> None:
        """Advance samplers to the current time and let them make sampler_rate * n_groups * share
        groups, each by the sampler with the fewest. Then drop groups that are too old."""
        now = self.now(learner_version)
        self.reload(now)
        self.made += self.cfg.sampler_rate * n_groups * share
        while self.made >= 1:
            self.made -= 1
            sampler = min(self.samplers, key=lambda sampler: sampler.groups)
            self.tickets.append(Ticket(self.sequence, sampler.version, now))
            self.sequence += 1
            sampler.groups += 1
        self.tickets = [
            ticket for ticket in self.tickets if self.still_wanted(ticket, learner_version, now)
        ]

    def still_wanted(self, ticket: Ticket, learner_version: int, now: float) -> bool:
        """Whether the group is within both age bounds; otherwise count it as dropped."""
        most = self.cfg.max_staleness
        if most is not None and learner_version - ticket.version > most:
            self.dropped["staleness"] += 1
        elif now - ticket.made_at > self.cfg.window_seconds:
            self.dropped["window"] += 1
        else:
            return True
        return False

    def next(self, n_groups: int, learner_version: int, stop=()) -> list[Rollout]:
        """The next n groups in order of arrival; the clock advances by whole steps to wait."""
        groups = self.with_spread(
            n_groups, lambda n: self.sample_tickets(self.take(n, learner_version))
        )
        self.engine.sleep()
        return groups

    def take(self, n_groups: int, learner_version: int) -> list[Ticket]:
        """The next n tickets; the clock advances until there are n tickets."""
        self.make(n_groups, learner_version)
        while len(self.tickets) < n_groups:
            self.waited += self.cfg.step_seconds
            # the share of a rollout batch that is made while one update runs
            self.make(n_groups, learner_version, self.cfg.train_batch / self.cfg.rollout_batch)
        taken, self.tickets = self.tickets[:n_groups], self.tickets[n_groups:]
        return taken

    def sample_tickets(self, taken: list[Ticket]) -> list[Rollout]:
        """Sample the groups of these tickets, each with the version of its ticket."""
        groups: dict[int, Rollout] = {}
        for version in sorted({ticket.version for ticket in taken}):
            if version != self.version:
                self.load(version, read_tensors(self.path(version)))
            self.published = self.broadcast[version]
            numbers = [t.number for t in taken if t.version == version]
            groups.update(zip(numbers, self.sample(numbers), strict=True))
        return [groups[ticket.number] for ticket in taken]

    def lend(self, named_tensors):
        """The engine with these weights loaded; the next rollout reloads its version."""
        self.version = -1
        return super().lend(named_tensors)

    # -- metrics and checkpoints

    def metrics(self, summed=Counter) -> dict[str, float]:
        """LocalSource's metrics, and waiting time, versions, waiting groups and dropped groups."""
        counts = summed({**self.dropped, "waiting": len(self.tickets)})
        return {
            **super().metrics(summed),
            "delay/clock": self.waited,
            "delay/waiting": float(counts["waiting"]),
            "delay/versions": float(len(self.needed())),
            "delay/dropped_staleness": float(counts["staleness"]),
            "delay/dropped_window": float(counts["window"]),
        }

    def state_dict(self) -> dict:
        self.pinned = [self.pinned[1], self.needed()]
        return {
            **super().state_dict(),
            "samplers": [dict(vars(sampler)) for sampler in self.samplers],
            "tickets": [list(ticket) for ticket in self.tickets],
            "broadcast": dict(self.broadcast),
            "made": self.made,
            "waited": self.waited,
            "dropped": dict(self.dropped),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore a checkpoint's state. UserError: a version that a sampler or a waiting group
        needs is not on disk."""
        super().load_state_dict(state)
        self.samplers = [SimulatedSampler(**sampler) for sampler in state["samplers"]]
        self.tickets = [Ticket(*ticket) for ticket in state["tickets"]]
        self.broadcast = state["broadcast"]
        self.made = state["made"]
        self.waited = state["waited"]
        self.dropped = Counter(state["dropped"])
        self.pinned = [set(), self.needed()]
        for version in sorted(self.needed()):
            if not self.path(version).is_file():
                raise UserError(
                    f"--resume: {self.path(version)} is missing, and a delayed sampler still uses this version; "
                    "start a new run in a different --out"
                )


def check(cfg: Config) -> None:
    """Raise UserError, one sentence, if flags of delays contradict each other."""
    need(
        0 < cfg.delay_min <= cfg.delay_max < math.inf,
        f"--delay_min={cfg.delay_min} --delay_max={cfg.delay_max}: "
        "the shortest delay must be above 0 and not above the longest",
    )
    need(
        cfg.delay not in ("lognormal", "weibull") or cfg.delay_min < cfg.delay_max,
        f"--delay={cfg.delay}: two quantiles need --delay_min below --delay_max; use --delay=constant",
    )
    most = cfg.max_staleness
    if most is not None and most < 0:
        raise UserError(
            f"--max_staleness={most}: a number of updates, 0 or more; leave it out for no bound"
        )
    if most is not None and cfg.sync_every - 1 > most:
        raise UserError(
            f"--max_staleness={most}: with --sync_every={cfg.sync_every} even the newest weights are "
            f"up to {cfg.sync_every - 1} updates old; broadcast more often"
        )
    unbounded = most is None and math.isinf(cfg.window_seconds)
    if cfg.delay != "none" and unbounded and cfg.sampler_rate > 1:
        raise UserError(
            f"--sampler_rate={cfg.sampler_rate}: samplers produce more groups than training consumes; bound their "
            "age with --max_staleness or --window_seconds"
        )
    if cfg.delay != "none" and not math.isinf(cfg.window_seconds):
        # number of steps within the window
        steps = 1 + int(cfg.window_seconds * (1 - 1e-9) / cfg.step_seconds)
        if cfg.sampler_rate * (1 + (steps - 1) * cfg.train_batch / cfg.rollout_batch) < 1:
            raise UserError(
                f"--window_seconds={cfg.window_seconds}: at --sampler_rate={cfg.sampler_rate} groups are always "
                "dropped before there are enough groups for an update; widen the window, or raise the rate"
            )
    remote = cfg.samplers != "local"
    if cfg.delay == "none" and not remote and (cfg.sync_every > 1 or cfg.max_staleness is not None):
        raise UserError(
            f"--max_staleness={cfg.max_staleness} --sync_every={cfg.sync_every}: there are no delayed samplers; "
            "name a distribution with --delay, or an address or a folder with --samplers"
        )
    if cfg.delay != "none" and remote:
        raise UserError(
            f"--delay={cfg.delay} simulates samplers inside this process, and --samplers={cfg.samplers} has real "
            "samplers; leave out one of the two flags"
        )


def check_remote(cfg: Config) -> None:
    """Raise UserError, one sentence, if flags of remote samplers contradict each other."""
    need(cfg.samplers.strip(), "--samplers is empty: write local, tcp://HOST:PORT or a folder")
    is_local = "://" not in cfg.samplers or cfg.samplers.startswith("tcp://127.0.0.1:")
    need(
        is_local or cfg.keys != "none",
        f"--samplers={cfg.samplers}: samplers on other hosts need --keys (python -m remote.keys OUT --samplers=N "
        "makes them), or listen on tcp://127.0.0.1:PORT",
    )
