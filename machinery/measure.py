"""Measurement of metrics: the inputs of their formulas, and sums over micro-batches and ranks.

`View` holds one micro-batch for the formulas. `Mean`, `Max` and `Derived` are the row
types of metrics.py. `Sums` accumulates rows over micro-batches, and `Sums.reduce` over ranks, so
each metric covers the whole update and not only the last micro-batch. The last section has the
estimators that worth.py applies to its dot products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from config import Config
from sampling import Sampling

# -- Inputs of formulas: one micro-batch


class View:
    """Inputs of the formulas for one micro-batch. Token quantities are (B, T), response quantities
    (B,)."""

    def __init__(self, new, batch, logs, cfg: Config):
        self.new, self.batch, self.logs = new, batch, logs
        self.inf, self.ref, self.adv = batch.logp_inf, batch.logp_ref, batch.adv
        self.actor_ref = batch.actor_logp_ref  # None without an actor
        # cap of R in rollout_corr/reward_weighted
        self.C = cfg.is_cap if cfg.correction in ("seq_tis", "geo_rs_seq_tis") else 4.0
        self.clamp = cfg.log_ratio_clamp
        # domains of means
        self.tokens = batch.mask  # tokens that may carry a gradient
        self.responses = batch.mask.any(1)  # responses with such a token
        # these, and the responses that --mask_cut leaves out of the loss
        self.sampled = self.responses | batch.cut if cfg.mask_cut else self.responses
        # tokens
        self.log_r = batch.log_r.masked_fill(~batch.mask, 0.0)
        # float64: squares of weights at the clamp overflow in float32
        self.r = batch.log_r.double().clamp(-self.clamp, self.clamp).exp()
        # |p_inf - p_ref|
        self.gap = (self.inf.exp() - self.ref.exp()).abs() * batch.mask
        self.keep, self.clipped = logs["keep"], logs["clipped"]
        self.applied = logs["weight"].double() * self.keep
        # responses
        self.n = batch.mask.sum(1).clamp_min(1)
        self.sum_log_r = self.log_r.sum(1)
        self.R = self.sum_log_r.double().clamp(-self.clamp, self.clamp).exp()
        # OBRS to the ref policy
        self.to_ref = "z" in logs and cfg.obrs_target == "ref"
        # the learner truncates its own distribution
        truncates = Sampling.of(cfg).truncates
        self.recomputes = cfg.keep_sampling_mask == "recompute" and truncates


def k3(log_r, clamp):
    """r - 1 - log r with r = exp of the clamped log r. In float64, because the terms cancel down to
    log_r^2 / 2 near 0."""
    log_r = log_r.double()
    return torch.expm1(log_r.clamp(-clamp, clamp)) - log_r


# -- Row types


@dataclass(frozen=True)
class Mean:
    """The mean of formula(view) over tokens (B, T) or responses (B,), by its shape, or over the
    true entries of over(view). A formula that returns None is not measured."""

    name: str
    formula: Callable
    meaning: str = ""
    over: Callable | None = None


class Max(Mean):
    """The maximum of formula(view) over the entries that `Mean` would average."""


@dataclass(frozen=True)
class Derived:
    """A formula of the update's means: formula(m) reads m[name]; None: omitted."""

    name: str
    formula: Callable
    meaning: str = ""


# -- Sums over micro-batches and ranks


class Sums:
    """Running (sum, count) pairs and maxima, on the device until `reduce`."""

    def __init__(self):
        self.pairs, self.tops = {}, {}

    def add(self, name, x, where):
        """Add x over the true entries of `where` (same shape) to the mean called `name`."""
        x = x.double() * where
        total, count = self.pairs.get(name, (0.0, 0.0))
        self.pairs[name] = (total + x.sum(), count + where.sum())

    def top(self, name, x, where):
        """Update the maximum called `name`."""
        value = x.double().masked_fill(~where, -math.inf).amax()
        self.tops[name] = (
            torch.maximum(self.tops[name], value) if name in self.tops else value
        )

    def constant(self, name, value):
        """Set a number that is the same in every micro-batch and on every rank."""
        self.pairs[name] = (value, 1.0)

    def reduce(self, comm) -> dict[str, float]:
        """name -> mean or maximum over the whole update and all ranks. A mean over no entries is 0;
        if its name starts with error/, it is left out."""
        flat = comm.sum([v for pair in self.pairs.values() for v in pair])
        out = {}
        for name, total, n in zip(self.pairs, flat[::2], flat[1::2], strict=True):
            if n or not name.startswith("error/"):
                out[name] = total / n if n else 0.0
        if self.tops:
            out.update(zip(self.tops, comm.max(self.tops.values()), strict=True))
        return out


def ess(mean: float, mean_square: float) -> float:
    """Effective sample size over the number of samples, from the means of w and w^2."""
    return mean**2 / mean_square if mean_square > 0 else 0.0


# -- Worth of a response: estimators for worth.py, with standard errors

# folds of the on-policy batches, and of the jackknife over groups and over directions
FOLDS = 4


@dataclass
class Reference:
    """The on-policy gradient, as FOLDS independent means."""

    means: list[list[torch.Tensor]]  # mean gradient of the batches of each fold
    gram: np.ndarray  # (FOLDS, FOLDS) <mean, mean>
    squares: np.ndarray  # (FOLDS,) mean |g_b|^2 over the batches of each fold
    batches: int  # number of batches in each fold
    overlap: np.ndarray  # (directions, FOLDS) <random direction, mean>

    def square(self, folds) -> float:
        """Unbiased estimate of |g|^2 from these folds."""
        gram = self.gram[np.ix_(folds, folds)]
        return (gram.sum() - np.trace(gram)) / (len(folds) * (len(folds) - 1))

    def halves(self) -> list[float]:
        """|g|^2 from each half of the folds, divided by |g|^2 from all folds; both are about 1."""
        halves = np.split(np.arange(FOLDS), 2)
        return [self.square(half) / self.square(range(FOLDS)) for half in halves]

    def is_found(self) -> bool:
        """Whether the estimate of |g|^2 is above 0 with all folds and without each single fold."""
        all_but = [[i for i in range(FOLDS) if i != f] for f in range(FOLDS)]
        return min(map(self.square, [range(FOLDS), *all_but])) > 0


@dataclass
class RowSamples:
    """Measurements of one configuration: projections of its gradient."""

    along: list = field(default_factory=list)  # per batch (FOLDS,): <g_c, mean of g>
    # per batch (groups, directions): <contribution of a group to g_c, direction>
    noise: list = field(default_factory=list)


def estimate(
    along, noise, reference: Reference, groups: int, keep=None
) -> dict[str, float]:
    """scale, bias, noise, noise_on, cosine of the mean, expected cosine of a batch, and worth, as
    worth.py defines them.

    along: (batches, FOLDS); noise: (groups, directions); groups: number of groups in a batch. keep:
    indices to use (`replicates`)."""
    batches, rows, folds, directions = (
        keep or next(replicates(len(along), *noise.shape))[0]
    )
    square = reference.square(folds)
    n = len(folds) * reference.batches
    spread = (
        reference.squares[folds].mean() - reference.gram[np.ix_(folds, folds)].mean()
    )
    noise_on = spread * n / (n - 1)
    by_batch = along[np.ix_(batches, folds)].mean(1) / square
    scale = by_batch.mean()
    # noise subtracted
    scale_squared = max(scale**2 - by_batch.var(ddof=1) / len(batches), 0.0)
    shares = noise[np.ix_(rows, directions)]
    # variance of a batch along each direction
    variance = groups * shares.var(0, ddof=1)
    overlap = reference.overlap[np.ix_(directions, folds)].mean(1)
    elsewhere = groups * shares.mean(0) - scale * overlap
    # expected square of the noise in `elsewhere`
    of_means = variance * groups / len(rows) + scale_squared * noise_on / n
    bias = max((elsewhere**2 - of_means).mean(), 0.0) / square
    noise_of_batch = variance.mean() / square
    noise_on = noise_on / square
    length = math.copysign(math.sqrt(scale_squared), scale)
    total = scale_squared + bias + noise_of_batch
    return {
        "worth": scale_squared * noise_on / (bias + noise_of_batch)
        if length > 0
        else 0.0,
        "batch_cosine": length / math.sqrt(total) if total else 0.0,
        "cosine": length / math.sqrt(scale_squared + bias) if length else 0.0,
        "scale": scale,
        "bias": bias,
        "noise": noise_of_batch,
        "noise_on": noise_on,
    }


def replicates(batches: int, groups: int, directions: int) -> Iterator[list[tuple]]:
    """Yield lists of index sets (batches, groups, folds, directions): first all indices, then the
    jackknife over each of the four.

    Sampler batches and folds of g are left out one by one, groups and directions in FOLDS parts."""
    B, G, F, K = map(np.arange, (batches, groups, FOLDS, directions))
    yield [(B, G, F, K)]
    yield [(B[b != B], G, F, K) for b in B]
    yield [(B, G[f != G % FOLDS], F, K) for f in F]
    yield [(B, G, F[f != F], K) for f in F]
    yield [(B, G, F, K[f != K % FOLDS]) for f in F]


def jackknife(values: list[list[float]]) -> float:
    """The jackknife standard error of a number, from its values on `replicates`."""
    variance = 0.0
    for x in map(np.array, values):
        variance += (len(x) - 1) / len(x) * ((x - x.mean()) ** 2).sum()
    return math.sqrt(variance)


def with_errors(
    seen: RowSamples, reference: Reference, groups: int
) -> dict[str, float]:
    """The results of `estimate`, with their jackknife standard errors as NAME_se."""
    along, noise = np.array(seen.along), np.concatenate(seen.noise)
    kinds = replicates(len(along), *noise.shape)
    (out,), *left_out = [
        [estimate(along, noise, reference, groups, keep) for keep in kind]
        for kind in kinds
    ]
    errors = {
        f"{name}_se": jackknife([[x[name] for x in kind] for kind in left_out])
        for name in out
    }
    return out | errors
