"""Statistics of the probe's (B, T) arrays: gaps and weights by length."""

from __future__ import annotations

import numpy as np

from model import FLOOR

EDGES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]  # tokens


def exists(x, length) -> np.ndarray:
    """(B, T) bool, T as in x (B, T): the positions that hold a token."""
    return np.arange(x.shape[1])[None] < length[:, None]


def ess(w) -> float:
    """Effective sample size over the number of samples: (sum w)^2 / (n sum w^2)."""
    w = np.asarray(w, np.float64)
    if len(w) == 0 or (w**2).sum() == 0:
        return 0.0
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def distances(logp, other, length) -> dict[str, float]:
    """Distances of two sides on the same tokens. logp, other: log-probabilities (B, T); the first
    `length` (B,) of each row count. The keys are the keys of a row of the noise floor. All values
    are 0 if the two sides are equal."""
    on = exists(logp, length)
    log_r = np.where(on, other - logp, 0.0)
    gap = np.where(on, np.abs(np.exp(other) - np.exp(logp)), 0.0)
    tokens = max(1, int(on.sum()))
    return {
        "max": float(gap.max(1, initial=0.0).mean()),
        "mean": float((gap.sum(1) / np.maximum(length, 1)).mean()),
        "dp": float(gap.sum() / tokens),  # over tokens, as in the ladder
        "k1": abs(float(log_r.sum() / tokens)),
        "kl": float(k3(log_r).sum() / tokens),
        "ratio": abs(float(np.expm1(log_r).sum() / tokens)),  # mean of r, minus 1
        "cut": float(
            (((logp <= FLOOR) != (other <= FLOOR)) & on).sum() / tokens
        ),  # by one side only
        "chi2": float((np.expm1(log_r) ** 2).sum() / tokens),  # E r^2 - 1 if E r = 1
        "chi2_seq": float((np.expm1(log_r.sum(1)) ** 2).mean()),
        "log_R": float(np.abs(log_r.sum(1)).max(initial=0.0)),  # largest |log R| of a response
        "rms": float(np.sqrt((log_r**2).sum() / tokens)),
        "tokens": int(on.sum()),
    }


def k3(log_r):
    """r - 1 - log r of each token, never below 0. Its mean over the engine's samples is KL(inf ||
    ref)."""
    return np.expm1(log_r) - log_r


def by_prefix(log_r, length, clamp: float) -> list[dict]:
    """R for responses cut off after t tokens, over all responses of at least t tokens: ESS,
    low-weight and clamped share."""
    total = log_r.cumsum(1)  # log R after t tokens
    ends = {t for t in EDGES if t < length.max()} | {int(np.quantile(length, 0.9))}
    rows = []
    for t in sorted(ends):
        reach = length >= t
        log_weight = total[reach, t - 1]
        R = np.exp(log_weight.clip(-clamp, clamp))
        row = {
            "tokens": t,
            "responses": int(reach.sum()),
            "ess": ess(R),
            "low_weight": float((R < 0.25).mean()),
            "clamped": float((np.abs(log_weight) >= clamp).mean()),
            "mean_log_weight": float(log_weight.mean()),
        }
        rows.append(row)
    return rows


def by_length(gap, length, log_r) -> list[dict]:
    """Largest and mean gap of a response, in up to eight buckets of length with about equally many
    responses."""
    largest = gap.max(1)
    mean = gap.sum(1) / length
    edges = np.unique(np.quantile(length, np.linspace(0, 1, 9)[1:], method="lower")).tolist()
    below = int(length.min()) - 1
    rows = []
    for edge in edges:
        inside = (length > below) & (length <= edge)
        if not inside.any():
            continue
        row = {
            "from": below + 1,
            "mean_length": float(length[inside].mean()),
            "to": int(edge),
            "responses": int(inside.sum()),
            "max_mismatch": float(largest[inside].mean()),
            "mean_mismatch": float(mean[inside].mean()),
            "kl": float(-log_r[inside].sum() / length[inside].sum()),
        }
        rows.append(row)
        below = edge
    return rows


def by_turn(gap, log_r, turn, length) -> list[dict]:
    """KL, mean and largest gap of the sampled tokens of each turn; an empty list if there is one
    turn. All arguments are (B, T), except length (B,)."""
    on = exists(gap, length)
    rows = []
    for n in range(int(turn.max(initial=0)) + 1):
        inside = on & (turn == n)
        row = {
            "turn": n + 1,
            "tokens": int(inside.sum()),
            "kl": float(k3(log_r[inside]).mean()),
            "mean_mismatch": float(gap[inside].mean()),
            "largest_mismatch": float(gap[inside].max()),
        }
        rows.append(row)
    return rows if len(rows) > 1 else []
