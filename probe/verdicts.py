"""Verdicts: does the variance of a correction's weights stay small at these lengths?

The weights are those of corrections.py with their default caps and bounds. `none` is judged by KL
times length, and `jackpot` by its acceptance rate, without its weights. These are rules of thumb
about variance: effective sample size, kept share, the clamp. They ignore bias, and a high-variance
weight can still train better than a low-variance weight: worth.py measures both."""

from __future__ import annotations

import math

import numpy as np
import torch

import corrections
from probe.gaps import ess, exists

JUDGED = ("none", "tis", "jackpot", "seq_is", "seq_tis", "seq_tis, C = 1", "prefix_tis")
JUDGED += ("retrace_seq", "seq_mis", "geo_rs")


def weights(name: str, log_r, length, clamp: float) -> tuple[np.ndarray, np.ndarray]:
    """(weight, keep) of a correction for each token (N,) or response (B,), from log r (B, T)."""
    correction, _, cap = name.partition(", C = ")
    on = exists(log_r, length)
    known = {
        "log_r": torch.from_numpy(log_r),
        "mask": torch.from_numpy(on),
        "clamp": clamp,
    }
    known |= {"is_cap": float(cap)} if cap else {}
    weight, keep = corrections.call(
        corrections.CORRECTIONS[correction].function, None, **known
    )
    return tuple(
        x[on] if x.shape == on.shape else x[:, 0]
        for x in (weight.numpy(), keep.numpy())
    )


def judge(name: str, log_r, length, kl: float, clamp: float) -> tuple[bool, str]:
    """(viable, why) of a correction. log_r (B, T), 0 after the end of a response; kl: KL(inf ||
    ref), nats a token."""
    log_token = log_r[exists(log_r, length)].clip(-clamp, clamp)
    if name == "none":
        T = float(length.mean())
        why = f"the distributions of a whole response are {T * kl:.2g} nats apart (KL x {T:.0f} tokens)"
        return T * kl < 0.1, why
    if name == "jackpot":  # lambda = 1
        accepted = np.exp(np.minimum(log_token, 0)).mean()
        viable, why = (
            accepted > 0.8,
            f"{100 * accepted:.1f} % of the tokens would be accepted",
        )
    else:
        weight, keep = weights(name, log_r, length, clamp)
        share = ess(weight * keep)  # at most the kept share
        clamped = (np.abs(np.log(weight)) > clamp - 1e-6).mean()
        row = corrections.CORRECTIONS[name.partition(",")[0]]
        viable, why = (
            share > 0.5 and clamped < 0.01,
            f"the ESS of its weights is {share:.2f}",
        )
        if clamped >= 0.01:  # equal weights have ESS 1, even if all of them are clamped
            why += f" but misleading: {100 * clamped:.0f} % of them are at the clamp"
        if row.drops:
            why += f"; {100 * keep.mean():.0f} % are kept"
        if name.startswith("seq_"):
            longest = int(np.quantile(length, 0.95))
            viable = viable and longest * kl < clamp
            product = f"{longest} x {kl:.2g} = {longest * kl:.2g}"
            why += f"; 95 % quantile of the length x KL = {product}, and the clamp is {clamp:g}"
    r = np.exp(log_token)
    off = abs(r.mean() - 1)
    if off > 0.005 and off > 4 * r.std() / math.sqrt(len(r)):  # more than noise
        viable = False
        why += f"; but the mean of r is {r.mean():.3f}, not 1: the engine does not record the distribution "
        why += "that it samples, or the learner normalises over other tokens "
        why += "(--keep_sampling_mask, --logprobs_mode, --temperature)"
    return bool(viable), why


def uneven(log_r, length, kl: float, clamp: float) -> list[str]:
    """Names of the corrections that are not viable on these log-ratios (B, T)."""
    return [name for name in JUDGED if not judge(name, log_r, length, kl, clamp)[0]]


def judged(log_r, length, kl: float, clamp: float, floor: list[dict]) -> list[dict]:
    """One row for each correction: its name, whether it is viable at these lengths, and why. floor:
    rows of `floor.floors`; a correction that is not viable under rounding alone is not viable."""
    rows = []
    for name in JUDGED:
        viable, why = judge(name, log_r, length, kl, clamp)
        rounding = [row["name"] for row in floor if name in row["uneven"]]
        if rounding:
            viable = False
            why += f"; rounding alone gives the weights a high variance ({'; '.join(rounding)})"
        rows.append({"correction": name, "viable": viable, "why": why})
    return rows
