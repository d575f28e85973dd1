"""Delayed samplers in one process, on a virtual clock: HeteroRL, section 4.1. Exact, and reproducible bit for bit.

`--delay_samplers` samplers each hold a model version of their own. A sampler draws a delay D, goes on sampling with the model it has
until D seconds have passed, loads the newest one broadcast by then, and draws again: the whole latency of a network sits in D, as in the text.
It never idles, and the learner trains on what arrives, in order of arrival.

The clock is virtual: an update takes `--step_seconds`, sampling takes none, so delays become model versions:

    time of version v  =  v step_seconds (+ whatever the learner had to wait)
    D                  <= max_staleness step_seconds                                   --max_staleness: 0 is the synchronous loop

Laws of D between lo and hi seconds, fitted so that P(D < lo) = P(D > hi) = (1 - mass) / 2 = a, then clipped to [lo, hi]:

    lognormal     mu = log sqrt(lo hi), sigma = log(hi / lo) / (2 z), z the normal quantile of 1 - a
    weibull       k = log(log a / log(1 - a)) / log(hi / lo), log scale = log hi - log(-log a) / k
    exponential   rate = -log a / hi: one parameter, so P(D > hi) = a alone is met
    constant      hi

A group is sampled when the learner takes it, with the weights its sampler had when it was made: a sample is a pure function of weights and seeds
(rollout.py), so nothing is computed that a bound then drops. Old versions stay on disk as long as a sampler, a waiting group or a checkpoint needs them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import sync
from rollout import LocalSource, Rollout, uniforms


@dataclass(frozen=True)
class DelayDistribution:
    """A law of delays in seconds, by its quantile function; see above."""

    kind: str
    low: float
    high: float
    mass: float

    def fit(self) -> dict[str, float]:
        """The parameters that meet the two quantiles."""
        a, span = (1 - self.mass) / 2, math.log(self.high / self.low)
        if self.kind == "lognormal":
            return {"mu": math.log(self.low * self.high) / 2, "sigma": span / (2 * NormalDist().inv_cdf(1 - a))}
        if self.kind == "weibull":
            k = math.log(math.log(a) / math.log1p(-a)) / span
            return {"k": k, "log_scale": math.log(self.high) - math.log(-math.log(a)) / k}
        return {"rate": -math.log(a) / self.high} if self.kind == "exponential" else {}

    def quantile(self, u: float) -> float:
        """The delay below which a share u lies, 0 < u < 1, clipped to [low, high]."""
        p = self.fit()
        if self.kind == "lognormal":
            x = p["mu"] + p["sigma"] * NormalDist().inv_cdf(u)
        elif self.kind == "weibull":
            x = p["log_scale"] + math.log(-math.log1p(-u)) / p["k"]
        else:
            x = math.log(-math.log1p(-u) / p["rate"]) if self.kind == "exponential" else math.inf
        return self.low if x <= math.log(self.low) else self.high if x >= math.log(self.high) else math.exp(x)


def check(flags) -> None:
    """ValueError: one sentence, if `flags` (of train.py or of a remote sampler) name no law."""
    if not 0 < flags.delay_min <= flags.delay_max < math.inf:
        raise ValueError(
            f"--delay_min={flags.delay_min} --delay_max={flags.delay_max}: the shortest delay must be above 0 and not above the longest"
        )
    if flags.delay in ("lognormal", "weibull") and flags.delay_min == flags.delay_max:
        raise ValueError(
            f"--delay={flags.delay}: two quantiles need --delay_min below --delay_max; use --delay=constant"
        )
    if not 0 < flags.delay_mass < 1:
        raise ValueError(
            f"--delay_mass={flags.delay_mass}: the share of delays between --delay_min and --delay_max lies inside (0, 1)"
        )


class DelaySource(LocalSource):
    """A LocalSource whose engine plays `cfg.delay_samplers` delayed samplers in turn. Every rank runs the same clock with the same draws.

    store: folder of old versions. A ticket is a group that a sampler has made and nobody has looked at: [number, version, time]."""

    def __init__(self, *args, cfg, store: Path, **more):
        super().__init__(*args, **more)
        self.cfg, self.store = cfg, Path(store)
        self.law = DelayDistribution(cfg.delay, cfg.delay_min, cfg.delay_max, cfg.delay_mass)
        self.cap = math.inf if cfg.max_staleness is None else cfg.max_staleness * cfg.step_seconds
        self.samplers: list[dict] = []  # version held, until when, delays drawn so far
        self.broadcast: dict[int, float] = {}  # version -> virtual time, of versions still on disk
        self.tickets: list[list] = []
        self.made, self.waited = 0.0, 0.0
        self.dropped, self.pinned = Counter(), [set(), set()]

    def now(self, learner_version: int) -> float:
        return learner_version * self.cfg.step_seconds + self.waited

    # -- weights -------------------------------------------------------------------------------------------------------

    def publish(self, version: int, named_tensors) -> None:
        """Broadcast: put the weights where samplers will find them, every `--sync_every` updates."""
        tensors = dict(named_tensors)  # collective: every rank must ask for them
        if self.broadcast and version - max(self.broadcast) < self.cfg.sync_every:
            return
        sync.write_tensors(self.path(version), tensors, f".rank{self.rank}")
        self.broadcast[version] = self.now(version)
        if not self.samplers:
            self.samplers = [
                {"version": version, "until": self.delay(i, 0), "draws": 1} for i in range(self.cfg.delay_samplers)
            ]
        self.reload(self.now(version))  # before the versions go that a sampler loaded on the way here
        needed = self.needed().union(*self.pinned)
        for old in set(self.broadcast) - needed:
            del self.broadcast[old]
            if self.rank == 0:  # other ranks are done with it: this update was theirs too
                self.path(old).unlink(missing_ok=True)

    def needed(self) -> set[int]:
        return (
            {max(self.broadcast)} | {s["version"] for s in self.samplers} | {version for _, version, _ in self.tickets}
        )

    def path(self, version: int) -> Path:
        return self.store / f"v{version:06d}.safetensors"

    # -- the clock -----------------------------------------------------------------------------------------------------

    def delay(self, sampler: int, draw: int) -> float:
        u = float(uniforms(1, "delay", self.cfg.seed, sampler, draw)[0])
        return min(self.law.quantile(max(u, 2.0**-53)), self.cap)

    def reload(self, now: float) -> None:
        """Every sampler whose delay is over loads the newest version broadcast by then, as often as it is over until now."""
        for i, s in enumerate(self.samplers):
            while s["until"] <= now:
                d = self.delay(i, s["draws"])
                at = now if d == 0 else s["until"]
                s.update(
                    version=max(v for v, t in self.broadcast.items() if t <= at), until=at + d, draws=s["draws"] + 1
                )
                if d == 0:
                    break

    def make(self, n_groups: int, learner_version: int) -> None:
        """Samplers make `--sampler_rate` groups for each that the learner wants, in turn; what is too old is dropped, and counted."""
        now = self.now(learner_version)
        self.reload(now)
        self.made += self.cfg.sampler_rate * n_groups
        while self.made >= 1:
            self.made -= 1
            sampler = self.samplers[self.sequence % len(self.samplers)]
            self.tickets.append([self.sequence, sampler["version"], now])
            self.sequence += 1
        fresh = []
        for ticket in self.tickets:
            late = self.cfg.max_staleness is not None and learner_version - ticket[1] > self.cfg.max_staleness
            old = now - ticket[2] > self.cfg.window_seconds
            self.dropped["staleness"] += late
            self.dropped["window"] += old and not late
            fresh += [] if late or old else [ticket]
        self.tickets = fresh

    def next(self, n_groups: int, learner_version: int, stop=()) -> list[Rollout]:
        """The next n groups in order of arrival; the clock moves on by whole steps until there are so many."""
        self.make(n_groups, learner_version)
        while len(self.tickets) < n_groups:
            self.waited += self.cfg.step_seconds
            self.make(n_groups, learner_version)
        taken, self.tickets = self.tickets[:n_groups], self.tickets[n_groups:]
        out = {}
        for version in sorted({version for _, version, _ in taken}):
            if version != self.version:
                self.load(version, sync.read_tensors(self.path(version)).items())
            self.published = self.broadcast[version]
            numbers = [number for number, v, _ in taken if v == version]
            out.update(zip(numbers, self.sample(numbers)))
        return [out[number] for number, _, _ in taken]

    # -- what is said and kept -----------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        return {
            **super().metrics(),
            "delay/clock": self.waited,
            "delay/waiting": float(len(self.tickets)),
            "delay/versions": float(len(self.needed())),
            "delay/dropped_staleness": float(self.dropped["staleness"]),
            "delay/dropped_window": float(self.dropped["window"]),
        }

    def state_dict(self) -> dict:
        self.pinned = [self.pinned[1], self.needed() if self.broadcast else set()]
        return {
            **super().state_dict(),
            "samplers": [dict(s) for s in self.samplers],
            "tickets": [list(t) for t in self.tickets],
            "broadcast": dict(self.broadcast),
            "made": self.made,
            "waited": self.waited,
            "dropped": dict(self.dropped),
        }

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.samplers, self.tickets, self.broadcast = state["samplers"], state["tickets"], state["broadcast"]
        self.made, self.waited, self.dropped = state["made"], state["waited"], Counter(state["dropped"])
        self.pinned = [set(), self.needed() if self.broadcast else set()]
        missing = [v for v in sorted(self.needed()) if not self.path(v).is_file()] if self.broadcast else []
        if missing:
            raise ValueError(
                f"--resume: {self.path(missing[0])} is gone, and a delayed sampler still holds that version; start anew in another --out"
            )
