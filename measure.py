"""How a metric is measured: what its formula may use of a micro-batch, and sums over micro-batches and ranks.

`View` shows a formula one micro-batch. `Mean`, `Max` and `Derived` are the kinds of rows that metrics.py is made of.
`Sums` adds a row's values up over micro-batches, `Sums.reduce` over ranks: every number is a mean over the whole step,
never "the last micro-batch".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

import corrections

# ---------------------------------------------------------------------------------------------------------------------
# What a formula may use: one micro-batch, seen once
# ---------------------------------------------------------------------------------------------------------------------


class View:
    """One micro-batch as the formulas see it. Token quantities are (B, T), response quantities (B,)."""

    def __init__(self, new, batch, stats, logs, cfg):
        self.new, self.batch = new, batch
        self.stats, self.logs = stats, logs
        self.cfg = cfg
        self.inf, self.ref = batch.logp_inf, batch.logp_ref
        self.adv = batch.adv
        row = corrections.CORRECTIONS[cfg.correction]
        self.C = cfg.is_cap if row.caps == "token" else 2.0  # where "large" and "small" weights begin
        self.C_seq = cfg.is_cap if row.caps == "sequence" else 4.0
        self.by_response = cfg.correction in ("seq_is", "seq_tis", "seq_mis", "geo_rs_seq_tis")  # one weight a response
        C = self.C_seq if self.by_response else self.C
        self.edges = (cfg.rs_low, cfg.rs_high) if row.band else (1 / C, C)
        self.clamp = cfg.log_ratio_clamp
        # what a row is a mean over
        self.tokens = batch.mask  # tokens that may carry a gradient
        self.responses = batch.mask.any(1)  # responses with such a token
        # tokens
        self.log_r = batch.log_r.masked_fill(~batch.mask, 0.0)
        self.r = batch.log_r.clamp(-self.clamp, self.clamp).exp()
        self.gap = (self.inf.exp() - self.ref.exp()).abs() * batch.mask  # |p_inf - p_ref|
        self.weight, self.keep = logs["weight"], logs["keep"]
        self.clipped = logs["clipped"]
        self.applied = self.weight * self.keep
        expected = cfg.correction in ("obrs", "jackpot_adjusted") and cfg.obrs_mask == "expected"
        if expected or cfg.correction in ("icepop", "areal_drop", "seq_mis"):
            self.weight = (
                self.applied
            )  # a weight that is 0 outside its bounds; OBRS's expected mask, but not a drawn one
        # responses
        self.n = batch.mask.sum(1).clamp_min(1)
        self.sum_log_r = self.log_r.sum(1)
        self.R = self.sum_log_r.clamp(-self.clamp, self.clamp).exp()
        self.ratio = self.sum_log_r.exp() if self.by_response else self.r  # not clamped, as verl's

    # -- OBRS

    @property
    def has_z(self) -> bool:
        return "z" in self.logs

    @property
    def sees_both(self) -> bool:
        """Whether the ref pass saw policy and actor whole."""
        return self.has_z and self.cfg.obrs_target == "ref" and self.batch.kl_after_ref is not None

    def sees_part(self) -> bool:
        return self.has_z and not self.sees_both

    @functools.cached_property
    def support(self):
        """(p_tgt, log p_tgt - log p_inf, which entries count), each (B, T, S)."""
        logp_tgt = self.batch.support_logp_ref if self.cfg.obrs_target == "ref" else self.new.support_logp
        on = self.batch.support_logp.isfinite()
        gap = (logp_tgt - self.batch.support_logp.masked_fill(~on, 0.0)).masked_fill(~on, 0.0)
        return logp_tgt.exp(), gap, on

    def kl_before_partial(self):
        p, gap, _ = self.support
        return (p * gap).sum(-1)

    def kl_after_partial(self):
        p, gap, on = self.support
        after = self.logs["z"].clamp_min(1e-30).log()[..., None] + gap.clamp_min(math.log(self.stats.lam))
        return (p * after * on).sum(-1)


def k3(log_r, clamp):
    """r - 1 - log r, r = exp of the clamped log r; in float64, for near 0 only log_r^2 / 2 is left of it."""
    log_r = log_r.double()
    return torch.expm1(log_r.clamp(-clamp, clamp)) - log_r


def repetition(tokens, exists, n: int = 4):
    """Share of a response's n-grams that stand earlier in it too, (B,): 1 - distinct / all; 0 if it is shorter
    than n."""
    if tokens.shape[1] < n:
        return tokens.new_zeros(len(tokens), dtype=torch.double)
    grams, whole = tokens.unfold(1, n, 1), exists.unfold(1, n, 1).all(-1)
    key = torch.zeros_like(grams[..., 0])
    for i in range(n):  # a 64-bit hash of each n-gram; a collision would only count one repetition too many
        key = key * 1_000_003 + grams[..., i] + 1
    nowhere = torch.arange(key.shape[1], device=key.device) - 2**62  # n-grams that do not exist are all distinct
    ordered = torch.where(whole, key, nowhere).sort(1).values
    repeats = (ordered[:, 1:] == ordered[:, :-1]).sum(1)
    return repeats / whole.sum(1).clamp_min(1).double()


# ---------------------------------------------------------------------------------------------------------------------
# The kinds of rows
# ---------------------------------------------------------------------------------------------------------------------


def always(_) -> bool:
    return True


@dataclass(frozen=True)
class Mean:
    """The mean of formula(view) over the true entries of over(view); `when` says where it exists."""

    name: str
    over: Callable
    formula: Callable
    meaning: str = ""
    when: Callable = always


class Max(Mean):
    """The same for the maximum."""


@dataclass(frozen=True)
class Quantile:
    """The q-th quantile of formula(view) over the true entries of over(view)."""

    name: str
    over: Callable
    formula: Callable
    q: float
    meaning: str = ""
    when: Callable = always


@dataclass(frozen=True)
class Derived:
    """A formula of the step's means: formula(m), m[name] the mean, m.sum(name), m.count(name)."""

    name: str
    formula: Callable
    meaning: str = ""
    when: Callable = always


# ---------------------------------------------------------------------------------------------------------------------
# Adding up
# ---------------------------------------------------------------------------------------------------------------------


class Sums:
    """Running (sum, count) pairs, maxima and kept values, on the device until `reduce`."""

    MOST = 1 << 16  # values kept of a micro-batch

    def __init__(self):
        self.pairs, self.tops, self.values = {}, {}, {}

    def add(self, name, x, where):
        """Adds x over the true entries of `where` (same shape): one more share of the mean called `name`."""
        x = x.double() * where
        total, count = self.pairs.get(name, (0.0, 0.0))
        self.pairs[name] = (total + x.sum(), count + where.sum())

    def top(self, name, x, where):
        """Adds to the maximum called `name`."""
        value = x.double().masked_fill(~where, -math.inf).amax()
        self.tops[name] = torch.maximum(self.tops[name], value) if name in self.tops else value

    def keep(self, name, x, where, q):
        """Keep values for the q-th quantile called `name`: those where `where` is true, or evenly some of them."""
        x = x[where]
        self.values.setdefault(name, (q, []))[1].append(x[:: 1 + len(x) // self.MOST])

    def constant(self, name, value):
        """A number that is the same in every micro-batch and on every rank."""
        self.pairs[name] = (value, 1.0)

    def reduce(self, comm) -> Means:
        """All means and maxima over ranks."""
        flat = comm.sum([v for pair in self.pairs.values() for v in pair])
        means = Means(zip(self.pairs, zip(flat[::2], flat[1::2], strict=True), strict=True))
        for name, (q, parts) in self.values.items():
            ordered = comm.cat(torch.cat(parts)).sort().values
            means[name] = float(ordered[min(len(ordered) - 1, int(q * len(ordered)))]) if len(ordered) else 0.0
        if self.tops:
            means.update(zip(self.tops, comm.max(self.tops.values()), strict=True))
        return means


class Means(dict):
    """name -> mean or maximum over the whole step."""

    def __init__(self, pairs):
        self.pairs = dict(pairs)
        super().__init__({name: total / n if n else 0.0 for name, (total, n) in self.pairs.items()})

    def sum(self, name) -> float:
        return self.pairs[name][0]

    def count(self, name) -> float:
        return self.pairs[name][1]

    def ess(self, first, second) -> float:
        """Effective sample size over the number of samples, from the means of w and w^2."""
        return self[first] ** 2 / self[second] if self[second] > 0 else 0.0
