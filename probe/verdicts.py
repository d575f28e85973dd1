"""Verdicts: does the variance of a correction's weights stay small at these lengths? Each rule
returns (viable, why).

These are rules of thumb about variance: effective sample size, kept share, the clamp. Except for
the text on states they ignore bias, and a high-variance weight can still train better than a
low-variance weight: worth.py measures both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import corrections
from probe.gaps import ess, exists


@dataclass
class Evidence:
    """Inputs of the verdicts. Every log-ratio is clamped to +-clamp before exp."""

    token_ratio: np.ndarray  # (N,) r of each token of all responses
    seq_ratio: np.ndarray  # (B,) R of each response
    geo_ratio: np.ndarray  # (B,) R^(1/T)
    prefix_ratio: np.ndarray  # (N,) R_t = prod_{s<=t} r_s
    before_ratio: np.ndarray  # (N,) R_t without the token itself: the ratio of its state
    traces: np.ndarray  # (N,) prod_{s<=t} min(r_s, 1)
    seq_of_token: np.ndarray  # (N,) R of the token's response
    length: np.ndarray  # (B,) T
    clamped: float  # share of the responses with log R at the clamp
    kl: float  # KL(inf || ref), nats a token
    clamp: float

    @classmethod
    def of(cls, log_r, length, kl: float, clamp: float) -> Evidence:
        """The evidence in log r (B, T), 0 after the end of a response, and the lengths (B,)."""
        valid = exists(log_r, length)
        total = log_r.sum(1)
        prefix = log_r.cumsum(1)
        traces = np.minimum(log_r, 0).cumsum(1)

        def exp(x):
            return np.exp(x.clip(-clamp, clamp))

        return cls(
            token_ratio=exp(log_r)[valid],
            prefix_ratio=exp(prefix)[valid],
            before_ratio=exp(prefix - log_r)[valid],
            traces=exp(traces)[valid],
            seq_of_token=np.repeat(exp(total), length),
            seq_ratio=exp(total),
            geo_ratio=exp(total / length),
            length=length,
            clamped=float((np.abs(total) >= clamp).mean()),
            kl=kl,
            clamp=clamp,
        )

    @property
    def biased(self) -> bool:
        """Whether the mean of r differs from 1 by more than 0.005 and by more than noise. If so,
        the learner scores a distribution that was not sampled from, and weights cannot correct
        this."""
        off = abs(self.token_ratio.mean() - 1)
        return off > 0.005 and off > 4 * self.token_ratio.std() / math.sqrt(len(self.token_ratio))

    @property
    def longest(self) -> int:
        """The 95 % quantile of the response length, in tokens."""
        return int(np.quantile(self.length, 0.95))

    @property
    def sequence_weights_fit(self) -> bool:
        """Whether the weights of whole responses stay below the clamp."""
        return self.longest * self.kl < self.clamp and self.clamped < 0.01

    def states(self) -> str:
        """The text on the error that token weights do not correct: the share of the sampler's
        states, sum min(inf, ref), that the learner would visit as often."""
        shared = np.minimum(self.before_ratio, 1).mean()
        return f"states keep the sampler's distribution ({100 * shared:.0f} % shared with the learner's)"

    def reach(self) -> str:
        """The text on the distance of the longest responses from the clamp."""
        product = self.longest * self.kl
        return f"longest x KL = {self.longest} x {self.kl:.2g} = {product:.2g}, and the clamp is {self.clamp:g}"


def bound(correction: str, flag: str) -> float:
    """The default of --is_cap, --rs_low or --rs_high for a correction."""
    return corrections.CORRECTIONS[correction].bounds[flag]


def judge_none(x: Evidence):
    """Judge no correction: viable if the KL of a whole response is below 0.1 nats."""
    T = float(x.length.mean())
    apart = T * x.kl
    why = f"the distributions of a whole response are {apart:.2g} nats apart (KL x {T:.0f} tokens)"
    return apart < 0.1, why


def judge_jackpot(x: Evidence):
    """Viable if more than 80 % of the tokens are accepted, by min(1, r)."""
    accepted = np.minimum(1, x.token_ratio).mean()
    why = f"{100 * accepted:.1f} % of the tokens would be accepted; {x.states()}"
    return accepted > 0.8 and not x.biased, why


def judge_geo_rs(x: Evidence):
    """Viable if more than half of the responses are kept."""
    low, high = bound("geo_rs", "rs_low"), bound("geo_rs", "rs_high")
    keep = (x.geo_ratio >= low) & (x.geo_ratio <= high)
    nine_in_ten = f"[{np.quantile(x.geo_ratio, 0.05):.4g}, {np.quantile(x.geo_ratio, 0.95):.4g}]"
    why = f"keeps {100 * keep.mean():.0f} % at [{low:g}, {high:g}]; 90 % of the ratios are in {nine_in_ten}"
    return keep.mean() > 0.5, why


def even(weights: Callable, name: str, whole: bool = False, more: Callable | None = None):
    """A rule for weights(x): viable if their ESS is above 1/2 and at most half of them are clamped.
    Equal weights have ESS 1, even if all of them are clamped.

    name: of the weights. whole: R must stay below the clamp. more: a further text of x."""

    def judge(x: Evidence):
        weight = weights(x)
        share = ess(weight)
        clamped = (x.clamped if whole else (weight <= math.exp(-x.clamp)).mean()) > 0.5
        why = f"ESS of {name} is {share:.2f}"
        why += " but misleading: the weights are clamped" if clamped else ""
        why += f"; {more(x)}" if more else ""
        fits = x.sequence_weights_fit if whole else not clamped
        return share > 0.5 and fits and not x.biased, why

    return judge


TIS, SEQ_TIS = bound("tis", "is_cap"), bound("seq_tis", "is_cap")
PREFIX_TIS, SEQ_MIS = bound("prefix_tis", "is_cap"), bound("seq_mis", "rs_high")
REACH = {"whole": True, "more": Evidence.reach}
VERDICTS = {
    "none": judge_none,
    "tis": even(lambda x: x.token_ratio.clip(max=TIS), f"min(r, {TIS:g})", more=Evidence.states),
    "jackpot": judge_jackpot,
    "seq_is": even(lambda x: x.seq_ratio, "R", **REACH),
    "seq_tis": even(lambda x: x.seq_ratio.clip(max=SEQ_TIS), f"min(R, {SEQ_TIS:g})", **REACH),
    "seq_tis, C = 1": even(lambda x: x.seq_ratio.clip(max=1), "min(R, 1)"),
    "prefix_tis": even(lambda x: x.prefix_ratio.clip(max=PREFIX_TIS), f"min(R_t, {PREFIX_TIS:g})"),
    "retrace_seq": even(
        lambda x: x.traces * x.seq_of_token.clip(max=1), "prod min(r_s, 1) min(R, 1)"
    ),
    # the ESS with weight 0 for dropped responses is at most the kept share
    "seq_mis": even(
        lambda x: x.seq_ratio * (x.seq_ratio <= SEQ_MIS), f"R, 0 if R > {SEQ_MIS:g},", **REACH
    ),
    "geo_rs": judge_geo_rs,
}


def uneven(log_r, length, kl: float, clamp: float) -> list[str]:
    """Names of the corrections that are not viable on these log-ratios (B, T)."""
    if not len(length):
        return []
    x = Evidence.of(log_r, length, kl, clamp)
    return [name for name, judge in VERDICTS.items() if not judge(x)[0]]


def judged(x: Evidence, floor: list[dict]) -> list[dict]:
    """One row for each correction: its name, whether it is viable at these lengths, and why. floor:
    rows of `floor.floors`; a correction that is not viable under rounding alone is not viable."""
    rows = []
    for name, judge in VERDICTS.items():
        viable, why = judge(x)
        rounding = [row["name"] for row in floor if name in row["uneven"]]
        if rounding:
            viable = False
            why += f"; rounding alone makes them uneven ({'; '.join(rounding)})"
        if x.biased and name != "none":
            why += f"; but the mean of r is {x.token_ratio.mean():.3f}, not 1: the learner's distribution differs "
            why += "from the sampled distribution (--keep_sampling_mask, --logprobs_mode, --temperature)"
        rows.append({"correction": name, "viable": bool(viable), "why": why})
    return rows
