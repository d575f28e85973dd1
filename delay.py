"""Delayed samplers in one process, on a virtual clock: HeteroRL, section 4.1. Exact, and
reproducible (bit for bit on a CPU).

Each of `--delay_samplers` samplers has a separate model version. A sampler draws a delay D, samples
with its current version until D seconds have passed, then loads the newest broadcast version and
draws a new delay. As in the paper, D is the total network latency. The samplers make as many groups
as the learner needs, and the learner trains on them immediately.

The clock is virtual: an update takes `--step_seconds` and sampling takes no time, so delays
translate to model versions:

    time of version v  =  v step_seconds
    D                  <= max_staleness step_seconds        (--max_staleness=0: synchronous)

A sampler with weights older than `--max_staleness` (between rare broadcasts) loads the newest.

The distributions of D between lo and hi seconds are fitted so that
P(D < lo) = P(D > hi) = (1 - MASS) / 2 = a, and then clipped to [lo, hi]:

    lognormal     mu = log sqrt(lo hi), sigma = log(hi / lo) / (2 z), z the normal quantile of 1 - a
    weibull       k = log(log a / log(1 - a)) / log(hi / lo), log scale = log hi - log(-log a) / k
    exponential   rate = -log a / hi: one parameter, so only P(D > hi) = a is satisfied
    constant      hi

One engine samples for all: it loads the version of each group's sampler. This is exact because
samples are a pure function of weights and seeds (rollout.py)."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from config import Config
from machinery.checkpoint.tensors import read_tensors, write_tensors
from machinery.flags import need
from machinery.ranks import from_all
from rollout import Rollout, uniforms
from source import LocalSource

# share of the fitted distribution between the shortest and the longest delay
MASS = 0.995


def delay_quantile(kind: str, low: float, high: float, u: float) -> float:
    """The u-quantile, 0 < u < 1, of the delay in seconds, clipped to [low, high]; formulas at the
    top of the file."""
    a = (1 - MASS) / 2
    if kind == "lognormal":
        sigma = math.log(high / low) / (2 * NormalDist().inv_cdf(1 - a))
        log_delay = math.log(low * high) / 2 + sigma * NormalDist().inv_cdf(u)
    elif kind == "weibull":
        k = math.log(math.log(a) / math.log1p(-a)) / math.log(high / low)
        log_scale = math.log(high) - math.log(-math.log(a)) / k
        log_delay = log_scale + math.log(-math.log1p(-u)) / k
    elif kind == "exponential":
        log_delay = math.log(high * math.log1p(-u) / math.log(a))
    else:
        return high
    return min(max(math.exp(log_delay), low), high)


@dataclass
class SimulatedSampler:
    """A simulated sampler."""

    version: int  # of its current weights
    until: float  # virtual seconds: when the sampler loads the newest version
    draws: int  # delays drawn so far


class DelaySource(LocalSource):
    """A LocalSource with one engine that simulates `cfg.delay_samplers` delayed samplers.

    store: the folder of old versions, which the first rank writes. Every rank runs the same clock
    with the same draws."""

    def __init__(self, *args, cfg: Config, store: Path, **more):
        super().__init__(*args, **more)
        self.cfg = cfg
        self.store = Path(store)
        self.oldest = math.inf if cfg.max_staleness is None else cfg.max_staleness
        self.samplers: list[SimulatedSampler] = []
        self.broadcast: set[int] = set()  # the versions on disk
        self.pinned = [set(), set()]  # versions that the last two checkpoints need

    def now(self, learner_version: int) -> float:
        """The virtual time in seconds."""
        return learner_version * self.cfg.step_seconds

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
        self.broadcast.add(version)
        if not self.samplers:
            self.samplers = [
                SimulatedSampler(version, self.delay(i, 0), 1)
                for i in range(self.cfg.delay_samplers)
            ]
        # Reload before deleting old versions: samplers whose delays ended since the last broadcast
        # load old versions.
        self.reload(version)
        # a barrier: the new file is complete
        needed = set().union(*from_all(self.needed()), *self.pinned)
        for old in self.broadcast - needed:
            if self.rank == 0:
                self.path(old).unlink(missing_ok=True)
        self.broadcast &= needed

    def needed(self) -> set[int]:
        """The versions that must stay on disk: the newest and the samplers'."""
        return {max(self.broadcast)} | {sampler.version for sampler in self.samplers}

    def path(self, version: int) -> Path:
        return self.store / f"v{version:06d}.safetensors"

    # -- the clock

    def delay(self, sampler: int, draw: int) -> float:
        """Delay number `draw` of a sampler, virtual seconds: a pure function of the run's seed."""
        u = float(uniforms(1, "delay", self.cfg.seed, sampler, draw)[0])
        cfg = self.cfg
        delay = delay_quantile(
            cfg.delay, cfg.delay_min, cfg.delay_max, max(u, 2.0**-53)
        )
        return min(delay, self.oldest * cfg.step_seconds)

    def reload(self, learner_version: int) -> None:
        """Advance samplers to the learner's time: after each delay, load the newest version and
        draw a delay."""
        now = self.now(learner_version)
        for i, sampler in enumerate(self.samplers):
            while self.oldest > 0 and sampler.until <= now:
                sampler.version = max(
                    v for v in self.broadcast if self.now(v) <= sampler.until
                )
                sampler.until += self.delay(i, sampler.draws)
                sampler.draws += 1
            if learner_version - sampler.version > self.oldest:
                sampler.version = max(self.broadcast)

    def next(self, n_groups: int, learner_version: int, stop=()) -> list[Rollout]:
        """The next n groups, with the weights that the samplers have now."""
        self.reload(learner_version)
        return super().next(n_groups, learner_version)

    def sampler_of(self, number: int) -> SimulatedSampler:
        """The sampler of this source's group with this number: samplers take turns over the groups
        of all ranks. The ranks of one engine use the same sampler."""
        turn = self.identify(number)[0] // self.engine.tp
        return self.samplers[turn % len(self.samplers)]

    def sample_next(self, n_groups: int) -> list[Rollout]:
        """The next n groups."""
        numbers = range(self.sequence, self.sequence + n_groups)
        self.sequence += n_groups
        # number of a group -> version of the sampling weights
        made_with = {number: self.sampler_of(number).version for number in numbers}
        groups: dict[int, Rollout] = {}
        for version in sorted(set(made_with.values())):
            if version != self.version:
                self.load(version, read_tensors(self.path(version)))
            self.published = self.now(version)
            numbers = [number for number, used in made_with.items() if used == version]
            groups.update(zip(numbers, self.sample(numbers), strict=True))
        return [groups[number] for number in made_with]

    def lend(self, named_tensors):
        """The engine with these weights loaded; the next rollout reloads its version."""
        self.version = -1
        return super().lend(named_tensors)

    # -- metrics and checkpoints

    def metrics(self, summed=Counter) -> dict[str, float]:
        """LocalSource's metrics, and the number of `needed` versions."""
        return {**super().metrics(summed), "delay/versions": float(len(self.needed()))}

    def state_dict(self) -> dict:
        self.pinned = [self.pinned[1], self.needed()]
        return {
            **super().state_dict(),
            "samplers": [dict(vars(sampler)) for sampler in self.samplers],
            "broadcast": sorted(self.broadcast),
        }

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.samplers = [SimulatedSampler(**sampler) for sampler in state["samplers"]]
        self.broadcast = set(state["broadcast"])
        self.pinned = [set(), self.needed()]


def check(cfg: Config) -> None:
    """Raise UserError, one sentence, if flags of delayed or remote samplers contradict each other."""
    shortest = cfg.delay_max if cfg.delay == "constant" else cfg.delay_min
    need(
        0 < shortest <= cfg.delay_max < math.inf,
        f"--delay_min={cfg.delay_min} --delay_max={cfg.delay_max}: "
        "the shortest delay must be above 0 and not above the longest",
    )
    need(
        cfg.delay not in ("lognormal", "weibull") or cfg.delay_min < cfg.delay_max,
        f"--delay={cfg.delay}: two quantiles need --delay_min below --delay_max; use --delay=constant",
    )
    most = cfg.max_staleness
    need(
        most is None or cfg.sync_every - 1 <= most,
        f"--max_staleness={most}: with --sync_every={cfg.sync_every} even the newest weights are "
        f"up to {cfg.sync_every - 1} updates old; broadcast more often",
    )
    delayed = cfg.delay != "none"
    remote = cfg.samplers != "local"
    need(
        delayed or remote or (cfg.sync_every <= 1 and most is None),
        f"--max_staleness={most} --sync_every={cfg.sync_every}: there are no delayed samplers; "
        "name a distribution with --delay, or an address or a folder with --samplers",
    )
    need(
        not (delayed and remote),
        f"--delay={cfg.delay} simulates samplers inside this process, and --samplers={cfg.samplers} has real "
        "samplers; leave out one of the two flags",
    )
    need(
        cfg.samplers.strip(),
        "--samplers is empty: write local, tcp://HOST:PORT or a folder",
    )
    is_local = "://" not in cfg.samplers or cfg.samplers.startswith("tcp://127.0.0.1:")
    need(
        is_local or cfg.keys != "none",
        f"--samplers={cfg.samplers}: samplers on other hosts need --keys (python -m remote.keys OUT --samplers=N "
        "makes them), or listen on tcp://127.0.0.1:PORT",
    )
