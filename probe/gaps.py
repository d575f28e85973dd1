"""Statistics of two sides' log-probabilities (B, T) of the same tokens: inf sampled, ref learns. The
first `length` (B,) of each row count."""

from __future__ import annotations

import math

import numpy as np
import torch

from model import FLOOR

# tokens
EDGES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]


def exists(x, length) -> np.ndarray:
    """(B, T) bool, T as in x (B, T): the positions that hold a token."""
    return np.arange(x.shape[1])[None] < length[:, None]


def without_replies(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Values of the sampled tokens only, (B, T): moved to the front of each row, followed by 0."""
    order = torch.argsort(~mask, dim=1, stable=True)
    return (x * mask).gather(1, order)


def ess(w) -> float:
    """Effective sample size over the number of samples: (sum w)^2 / (n sum w^2)."""
    w = np.asarray(w, np.float64)
    if len(w) == 0 or (w**2).sum() == 0:
        return 0.0
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def k3(log_r, clamp: float = math.inf):
    """r - 1 - log r of each token, never below 0. Its mean over the engine's samples is KL(inf ||
    ref)."""
    return np.expm1(log_r.clip(-clamp, clamp)) - log_r


def distances(inf, ref, on) -> dict[str, float]:
    """Distances of two sides on the same tokens, those with on (B, T); responses without such
    tokens do not count. All values are 0 if the two sides are equal."""
    inf, ref, on = (x[on.any(1)] for x in (inf, ref, on))
    log_r = np.where(on, ref - inf, 0.0)
    gap = np.where(on, np.abs(np.exp(ref) - np.exp(inf)), 0.0)
    tokens, responses = max(1, int(on.sum())), max(1, len(on))
    return {
        "max": float(gap.max(1, initial=0.0).sum() / responses),
        "mean": float((gap.sum(1) / on.sum(1)).sum() / responses),
        "dp": float(gap.sum() / tokens),  # over tokens, as in the ladder
        "k1": abs(float(log_r.sum() / tokens)),
        "kl": float(k3(log_r).sum() / tokens),
        "ratio": abs(float(np.expm1(log_r).sum() / tokens)),  # mean of r, minus 1
        # by one side only
        "cut": float((((inf <= FLOOR) != (ref <= FLOOR)) & on).sum() / tokens),
        "chi2": float((np.expm1(log_r) ** 2).sum() / tokens),  # E r^2 - 1 if E r = 1
        "chi2_seq": float((np.expm1(log_r.sum(1)) ** 2).sum() / responses),
        "rms": float(np.sqrt((log_r**2).sum() / tokens)),
        "tokens": int(on.sum()),
    }


def overview(inf, ref, length, clamp: float, group=None) -> dict:
    """The numbers and tables of a report that need only the two sides, clamped as in training.
    r = p_ref / p_inf of a token, R of a response. group (B,): the problem of each response, for
    standard errors; default: a different problem for each."""
    on = exists(inf, length)
    group = np.arange(len(on)) if group is None else group
    log_r = np.where(on, ref - inf, 0.0)
    gap = np.where(on, np.abs(np.exp(ref) - np.exp(inf)), 0.0)
    total = log_r.sum(1)
    r, R = np.exp(log_r[on].clip(-clamp, clamp)), np.exp(total.clip(-clamp, clamp))
    by_token = np.where(on, k3(log_r, clamp), 0.0)
    k1 = 0.0 - float(log_r[on].mean())  # not -0.0
    k3_kl = float(by_token.sum() / on.sum())
    error = by_token.sum(1) - k3_kl * on.sum(1)
    # k3 is too small if tokens were cut; k1 alone can be negative
    kl, chi2, share = max(k1, k3_kl), float((r**2).mean() - 1), ess(r)
    return {
        "kl": kl,  # KL(inf || ref), nats a token: the larger of the two estimates
        "k1_kl": k1,  # mean of -log r
        "k3_kl": k3_kl,  # mean of r - 1 - log r
        "kl_error": float(np.linalg.norm(np.bincount(group, error)) / on.sum()),
        # near 1 if the engine records its sampling distribution, and the learner's probabilities of
        # the tokens that the engine can draw sum to 1
        "ratio_mean": float(r.mean()),
        "chi2_token": chi2,  # mean of r^2, minus 1
        "chi2_seq": float((R**2).mean() - 1),
        "token_ess": share,
        "seq_ess": ess(R),
        # share of responses at the clamp
        "seq_clamped": float((np.abs(total) >= clamp).mean()),
        # |p_inf - p_ref|: mean and largest of a response, mean over responses; largest of all
        "mean_mismatch": float((gap.sum(1) / length).mean()),
        "max_mismatch": float(gap.max(1).mean()),
        "largest_mismatch": float(gap.max()),
        "above_half": float((gap.max(1) > 0.5).mean()),  # share of the responses
        "clamp": clamp,
        "t_max": clamp / kl if kl > 0 else math.inf,
        # number of tokens that halves the ESS of R
        "t_half": -math.log(2) / math.log(share) if share < 1 else math.inf,
        "by_length": by_length(inf, ref, length),
        "by_prefix": by_prefix(log_r, length, clamp),
    }


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
        }
        rows.append(row)
    return rows


def by_length(inf, ref, length) -> list[dict]:
    """`distances` in up to eight buckets of length with about equally many responses."""
    on, rows, below = exists(inf, length), [], int(length.min()) - 1
    for edge in np.unique(
        np.quantile(length, np.linspace(0, 1, 9)[1:], method="lower")
    ).tolist():
        inside = (length > below) & (length <= edge)
        row = {"from": below + 1, "to": int(edge), "responses": int(inside.sum())}
        row["mean_length"] = float(length[inside].mean())
        rows.append(row | distances(inf, ref, on & inside[:, None]))
        below = int(edge)
    return rows


def by_turn(inf, ref, turn, length) -> list[dict]:
    """`distances` of the tokens of each turn (B, T); an empty list if there is one turn."""
    on = exists(inf, length)
    last = int(turn.max(initial=0))
    turns = range(last + 1) if last else ()
    return [{"turn": n + 1} | distances(inf, ref, on & (turn == n)) for n in turns]
