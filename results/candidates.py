"""The weights that search.py compares: each a function of a sampler's tokens (search.Tokens), broadcast over (n, B, T).

Batches n, responses B, tokens T. r is a token's ratio, R_t the product of the first t ratios, R that of all.
"""

from __future__ import annotations

import numpy as np

CLAMP = 20.0  # of a sum of log r


def power(x, alpha=1.0):
    return np.exp(alpha * np.clip(x, -CLAMP, CLAMP))


def token(t):
    return power(t.log_r)


def prefix_log(t):
    return t.log_r.cumsum(2)


def prefix(t):
    return power(prefix_log(t))


def total_log(t):
    return t.log_r.sum(2, keepdims=True)


def whole(t):
    return power(total_log(t))


def retrace(t):
    """prod_{s<=t} min(r_s, 1)."""
    return power(np.minimum(t.log_r, 0).cumsum(2))


def v_trace(t):
    """min(r_t, 1) prod_{s<t} min(r_s, 1) is Retrace's; V-trace lets the token's own weight go to 2."""
    before = np.minimum(t.log_r, 0).cumsum(2) - np.minimum(t.log_r, 0)
    return power(before) * np.minimum(token(t), 2)


def minpro(t):
    """r_t times the smallest ratio before it (MinPRO, arXiv 2601.22718, as its abstract has it), capped at 2."""
    least = np.minimum.accumulate(np.where(t.mask, t.log_r, np.inf), 2)
    before = np.concatenate([np.zeros_like(least[:, :, :1]), least[:, :, :-1]], 2)
    return np.minimum(power(np.where(np.isfinite(before), before, 0.0) + t.log_r), 2)


def ctpo(t, low=0.025, high=0.05):
    """R_t; on the side where PPO would stop, its clip in log space at -low sqrt(t) and high sqrt(t) (CTPO-LA)."""
    at, x = np.sqrt(t.mask.cumsum(2).clip(1)), prefix_log(t)
    stopped = ((t.plain > 0) & (x > high * at)) | ((t.plain < 0) & (x < -low * at))
    return prefix(t) * ~stopped


def segments(t, n: int, cap=1.0):
    """min(product of r since the segment of n tokens began, C)."""
    x = prefix_log(t)
    first = np.arange(x.shape[2]) // n * n
    start = np.concatenate([np.zeros_like(x[:, :, :1]), x], 2)[:, :, first]
    return np.minimum(power(x - start), cap)


def window(t, n: int, cap=1.0):
    """min(product of the last n ratios, C)."""
    x = prefix_log(t)
    before = np.concatenate([np.zeros_like(x[:, :, :n]), x[:, :, :-n]], 2) if n < x.shape[2] else 0.0
    return np.minimum(power(x - before), cap)


def suffix(t, cap=1.0):
    """min(prod_{s>=t} r_s, C): what follows, and not what came before."""
    return np.minimum(power(total_log(t) - prefix_log(t) + t.log_r), cap)


def clipped(t, x, low: float, high: float):
    """1 where PPO's clip leaves a token its push: x <= 1 + high where it is to rise, x >= 1 - low where to fall."""
    return 1.0 * np.where(t.plain > 0, x <= 1 + high, x >= 1 - low)


def geo(t):
    """exp(mean log r), GSPO's ratio."""
    return power(total_log(t) / t.mask.sum(2, keepdims=True).clip(1))


def spare(t, least=0.9):
    """0 for a token that is to fall and has r below `least`."""
    return clipped(t, token(t), 1 - least, np.inf)


def normalised(t, w):
    """w over its mean in the group: self-normalised weights."""
    w = np.broadcast_to(w, t.log_r.shape)
    per = (w * t.mask).sum(2) / t.mask.sum(2).clip(1)
    out = np.empty_like(w)
    for b in range(len(w)):
        mean = np.bincount(t.group[b], per[b]) / np.bincount(t.group[b])
        out[b] = w[b] / mean[t.group[b]].clip(1e-6)[:, None]
    return out


def drawn(p):
    """A mask: 1 with probability p, drawn once and by itself for each of p's entries, as training would."""
    return 1.0 * (np.random.default_rng(0).random(p.shape) < p)


def weighted_baseline(t, w):
    """w, with the group's baseline as the policy would have it: sum w R / sum w (w: one a response)."""
    w = np.broadcast_to(w, t.log_r.shape)
    out = np.zeros_like(w)
    for b in range(len(w)):
        v, group = w[b, :, 0], t.group[b]
        mean = (np.bincount(group, v * t.reward[b]) / np.bincount(group, v).clip(1e-9))[group]
        plain = (np.bincount(group, t.reward[b]) / np.bincount(group))[group]
        old = t.reward[b] - plain
        factor = np.divide(t.reward[b] - mean, old, out=np.zeros_like(old, dtype=float), where=old != 0)
        out[b] = w[b] * factor[:, None]
    return out


CANDIDATES = {
    "none": lambda t: np.ones_like(t.log_r),
    "r": token,
    "min(r, 1)": lambda t: np.minimum(token(t), 1),
    "min(r, 2) (TIS)": lambda t: np.minimum(token(t), 2),
    "r in [0.5, 5] (IcePop)": lambda t: token(t) * ((token(t) >= 0.5) & (token(t) <= 5)),
    "sqrt r, at most 2": lambda t: np.minimum(power(t.log_r, 0.5), 2),
    "R": whole,
    "min(R, 4)": lambda t: np.minimum(whole(t), 4),
    "min(R, 2)": lambda t: np.minimum(whole(t), 2),
    "min(R, 1)": lambda t: np.minimum(whole(t), 1),
    "min(R, 0.5)": lambda t: np.minimum(whole(t), 0.5),
    "min(R, 0.25)": lambda t: np.minimum(whole(t), 0.25),
    "R where R <= 1": lambda t: whole(t) * (whole(t) <= 1),
    "R where R <= 4 (seq MIS)": lambda t: whole(t) * (whole(t) <= 4),
    "min(sqrt R, 1)": lambda t: np.minimum(power(total_log(t), 0.5), 1),
    "min(R^2, 1)": lambda t: np.minimum(power(total_log(t), 2.0), 1),
    "min(R, 1 / R)": lambda t: np.minimum(whole(t), 1 / whole(t)),
    "min(R^2, 1 / R)": lambda t: np.minimum(power(total_log(t), 2.0), 1 / whole(t)),
    "min(R, 1 / sqrt R)": lambda t: np.minimum(whole(t), power(total_log(t), -0.5)),
    "1 where 0.5 <= R <= 2": lambda t: 1.0 * ((whole(t) >= 0.5) & (whole(t) <= 2)),
    "min(R, 1) where 0.5 <= R": lambda t: np.minimum(whole(t), 1) * (whole(t) >= 0.5),
    **{f"min(R, 1) - {c}": lambda t, c=c: np.minimum(whole(t), 1) - c for c in (0.1, 0.2, 0.3)},
    "min(R, 2) - 0.3": lambda t: np.minimum(whole(t), 2) - 0.3,
    "R / (1 + R)": lambda t: whole(t) / (1 + whole(t)),
    "R_t (CTPO's ratio)": prefix,
    "min(R_t, 4)": lambda t: np.minimum(prefix(t), 4),
    "min(R_t, 2)": lambda t: np.minimum(prefix(t), 2),
    "min(R_t, 1) (prefix_tis)": lambda t: np.minimum(prefix(t), 1),
    "min(R_t, 0.5)": lambda t: np.minimum(prefix(t), 0.5),
    "min(R_t, 0.25)": lambda t: np.minimum(prefix(t), 0.25),
    "R_t where R_t <= 1": lambda t: prefix(t) * (prefix(t) <= 1),
    "R_t where R_t <= 2": lambda t: prefix(t) * (prefix(t) <= 2),
    "min(R_t, 1), at least 0.1": lambda t: np.clip(prefix(t), 0.1, 1),
    "min(sqrt R_t, 1)": lambda t: np.minimum(power(prefix_log(t), 0.5), 1),
    "min(R_t^2, 1)": lambda t: np.minimum(power(prefix_log(t), 2.0), 1),
    "R_t / (1 + R_t)": lambda t: prefix(t) / (1 + prefix(t)),
    "R_t, clip of sqrt(t) (CTPO-LA)": ctpo,
    "prod min(r, 1) (Retrace)": retrace,
    "prod min(r, 1), own r to 2 (V-trace)": v_trace,
    "r_t min of r before (MinPRO)": minpro,
    "suffix: min(prod_{s>=t}, 1)": suffix,
    "min(R_t, 1) min(R, 1)": lambda t: np.minimum(prefix(t), 1) * np.minimum(whole(t), 1),
    "min(R_t, 1) min(R, 1 / R)": lambda t: np.minimum(prefix(t), 1) * np.minimum(whole(t), 1 / whole(t)),
    "min(R_t, 1) min(sqrt R, 1)": lambda t: np.minimum(prefix(t), 1) * np.minimum(power(total_log(t), 0.5), 1),
    "min(R_t, 1 / R_t)": lambda t: np.minimum(prefix(t), 1 / prefix(t)),
    "min(R_t, 1) times min(suffix, 1)": lambda t: np.minimum(prefix(t), 1) * suffix(t),
    "Retrace times min(R, 1) (retrace_seq)": lambda t: retrace(t) * np.minimum(whole(t), 1),
    "smallest min(R_s, 1) so far": lambda t: power(np.minimum.accumulate(np.minimum(prefix_log(t), 0), 2)),
    "smallest min(R_s, 1) of all": lambda t: power(np.minimum(prefix_log(t), 0).min(2, keepdims=True)),
    "sqrt of min(R_t, 1) min(R, 1)": lambda t: np.sqrt(np.minimum(prefix(t), 1) * np.minimum(whole(t), 1)),
    **{f"segments of {n}, min(., 1)": lambda t, n=n: segments(t, n) for n in (4, 8, 16, 32)},
    **{f"last {n}, min(., 1)": lambda t, n=n: window(t, n) for n in (2, 4, 8, 16, 32)},
    "r, PPO's clip of 0.2": lambda t: token(t) * clipped(t, token(t), 0.2, 0.2),
    "exp(mean log r) (GSPO)": geo,
    "exp(mean log r), clip of 0.2": lambda t: geo(t) * clipped(t, geo(t), 0.2, 0.2),
    "exp(mean log r), clip of 0.01": lambda t: geo(t) * clipped(t, geo(t), 0.01, 0.01),
    "1, spare": spare,
    "min(R, 1), spare": lambda t: np.minimum(whole(t), 1) * spare(t),
    "min(R_t, 1), spare": lambda t: np.minimum(prefix(t), 1) * spare(t),
    "retrace_seq, spare (spare)": lambda t: retrace(t) * np.minimum(whole(t), 1) * spare(t),
    "retrace_seq, spare below 0.5": lambda t: retrace(t) * np.minimum(whole(t), 1) * spare(t, 0.5),
    "retrace_seq, r >= 0.9": lambda t: retrace(t) * np.minimum(whole(t), 1) * (token(t) >= 0.9),
    "1, A < 0 only where exp(mean log r) >= 0.95": lambda t: clipped(t, geo(t), 0.05, np.inf),
    "min(R, 1), A > 0": lambda t: np.minimum(whole(t), 1) * (t.plain > 0),
    "min(R, 1) over its group's mean": lambda t: normalised(t, np.minimum(whole(t), 1)),
    "min(R_t, 1) over its group's mean": lambda t: normalised(t, np.minimum(prefix(t), 1)),
    "min(R, 1), baseline of the policy": lambda t: weighted_baseline(t, np.minimum(whole(t), 1)),
    "R, baseline of the policy": lambda t: weighted_baseline(t, whole(t)),
}
DRAWN = {  # label of the expected mask -> of the drawn one
    "min(r, 1)": "drawn, min(r, 1) (OBRS's mask)",
    "min(R_t, 1) (prefix_tis)": "drawn, min(R_t, 1) (OBRS on prefixes)",
    "min(R, 1)": "drawn, min(R, 1) (OBRS on responses)",
}
CANDIDATES |= {after: lambda t, p=CANDIDATES[before]: drawn(p(t)) for before, after in DRAWN.items()}
