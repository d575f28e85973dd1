"""Better corrections? Weights of many forms on the same responses, weighed with worth.py; and the best there can be.

    python results/search.py            # measure what is missing (40 minutes), then write results/search.md, search.png

A sampler's tokens are measured once: log r, advantage, and how each log-probability moves along g and along random
directions (worth.py). Every candidate is then a function of log r, and its worth a weighted sum. Samplers: `actor`
(another model, configs/study.toml), `w2a16` (two bits, configs/lowbit.toml), `stale` and `stale-11` (the policy of 125
updates ago; two runs of other seeds made the later one), and `long` (another model, configs/long.toml), whose base
models take an hour to make and which is not measured unless it is named: --samplers=actor,w2a16,stale,stale-11,long.

The best weight that is a function of one quantity x (R, a prefix's R_t, r), by bins of x: let m_k be the mean of the
gradient of what falls into bin k, a_k = <m_k, g>, and D_kl the noise of bins k and l. A weight w has

    kappa^2 = s / (s + w' (M + D) w),   s = (w a)^2 / |g|^2,   M_kl = <m_k, m_l> - a_k a_l / |g|^2

so the best one has the largest (w a)^2 / (w' (M + D) w): w* = (M + D)^-1 a, up to its scale, which kappa does not see.
Of the weights of one form, those that rise with x, say, isotonic.py finds the best. Weights are fitted on one half of
the batches and weighed on the other.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import sweep
from isotonic import ANY, FORMS, HILL, RISING, best_weight

import checkpoint
import worth
from flags import choice, need
from measure import FOLDS, Reference, Seen, estimate, jackknife, replicates, with_errors

TOKENS = sweep.ROOT / "out" / "search"
LATER = ["--config=configs/study.toml", "--objective=grpo", "--actor=none", "--steps=125"]
SEEDS = {"stale": 10, "stale-11": 11}  # of the run that made the later policy
STALE = ["--config=configs/study.toml", "--actor=none", "--stale=base:policy", "--noise_batches=12"]  # and --model
SAMPLERS = {
    "actor": ["--config=configs/study.toml", "--noise_batches=12"],
    "stale": STALE,
    "stale-11": STALE,
    "long": ["--config=configs/long.toml", "--batches=32", "--reference=64", "--noise_batches=8"],
    "w2a16": ["--config=configs/lowbit.toml", "--rollout_quant=w2a16", "--noise_batches=12"],
}
CLAMP = 20.0


@dataclass
class Tokens:
    """n batches of B responses of up to T tokens; F folds of g, K random directions."""

    log_r: np.ndarray  # (n, B, T), 0 where nothing is trained on
    mask: np.ndarray  # (n, B, T) bool
    plain: np.ndarray  # (n, B, T) advantage / tokens of the batch: the coefficients without a correction
    reward: np.ndarray  # (n, B)
    group: np.ndarray  # (n, B)
    along: np.ndarray  # (n, B, T, F)
    random: np.ndarray  # (m, B, T, K), of the first m batches
    gram: np.ndarray
    squares: np.ndarray
    overlap: np.ndarray
    each: int

    @property
    def reference(self) -> Reference:
        return Reference([], self.gram, self.squares, int(self.each), self.overlap)

    @property
    def groups(self) -> int:
        return int(self.group.max()) + 1


def tokens_of(name: str) -> Tokens:
    """The measured tokens of a sampler, from the disk or made now."""
    path = TOKENS / f"{name}.npz"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name("unfinished.npz")
        np.savez(scratch, **measure(name))
        scratch.rename(path)
    return Tokens(**np.load(path))


def later_policy(seed: int) -> str:
    """The folder of the policy after 125 updates on responses of its own; trained if it is not there."""
    out = TOKENS / f"later-{seed}"
    if not checkpoint.folders(str(out)):
        argv = [*LATER, f"--seed={seed}", f"--out={out}", "--overwrite"]
        subprocess.run([sys.executable, "train.py", *argv], cwd=sweep.ROOT, check=True)
    return str(checkpoint.newest(str(out)) / "policy")


def measure(name: str) -> dict[str, np.ndarray]:
    argv = [*SAMPLERS[name], "--rows=none"]
    if name in SEEDS:
        argv.append(f"--model={later_policy(SEEDS[name])}")
    m = worth.Measurement(*worth.parse(argv))
    reference = m.references()[worth.EVERYTHING]
    found = []
    for s in m.slopes({worth.EVERYTHING: reference}):
        b = s.batches["none"]
        found.append(
            {
                "log_r": (b.log_r * b.mask).numpy(),
                "mask": b.mask.numpy(),
                "plain": (b.adv * b.mask / b.mask.sum()).numpy(),
                "reward": b.reward.numpy(),
                "group": b.group.numpy(),
                "along": np.stack([x.numpy() for x in s.along[worth.EVERYTHING]], -1).astype(np.float32),
                "random": None if s.random is None else np.stack([x.numpy() for x in s.random], -1).astype(np.float32),
            }
        )
    m.sampler.close()
    T = max(x["mask"].shape[1] for x in found)
    out = {key: np.stack([widen(x[key], T) for x in found if x[key] is not None]) for key in found[0]}
    return out | {
        "gram": reference.gram,
        "squares": reference.squares,
        "overlap": reference.overlap,
        "each": np.array(reference.batches),
    }


def widen(x: np.ndarray, T: int) -> np.ndarray:
    """(B, t, ...) -> (B, T, ...), padded with 0; (B,) as it is."""
    return x if x.ndim == 1 else np.pad(x, [(0, 0), (0, T - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


# ---------------------------------------------------------------------------------------------------------------------
# Candidates: Tokens -> weight, broadcast over (n, B, T)
# ---------------------------------------------------------------------------------------------------------------------


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


def seen(t: Tokens, w: np.ndarray, batches=slice(None)) -> Seen:
    """What worth.py sees of a weight."""
    c = w * t.plain
    along = np.einsum("nbt,nbtf->nf", c[batches], t.along[batches])
    noise = []
    for b in range(len(t.random))[batches]:
        shares = np.einsum("bt,btk->bk", c[b], t.random[b])
        noise.append(np.stack([np.bincount(t.group[b], x, t.groups) for x in shares.T], 1))
    return Seen(list(along), noise)


def weigh(t: Tokens, w: np.ndarray, batches=slice(None)) -> dict[str, float]:
    return with_errors(seen(t, w, batches), t.reference, t.groups)


# ---------------------------------------------------------------------------------------------------------------------
# The best weight that is a function of one quantity
# ---------------------------------------------------------------------------------------------------------------------

BINS = 10
SIDES = (0.0, 0.3, 0.6, 0.9, 0.98, 1.02, 1.1, 2.0, math.inf)  # of r
QUANTITIES = {"R": total_log, "R_t": prefix_log, "r": lambda t: t.log_r}


def edges_of(t: Tokens, quantity: str) -> np.ndarray:
    """Where its bins end: as many tokens in each; but most tokens have r near 1, so the bins of r are SIDES."""
    if quantity == "r":
        return np.log(SIDES[1:-1])
    x = np.broadcast_to(QUANTITIES[quantity](t), t.log_r.shape)
    return np.unique(np.quantile(x[t.mask], np.linspace(0, 1, BINS + 1)[1:-1]))


def bin_of(t: Tokens, quantity: str, edges: np.ndarray) -> np.ndarray:
    """(n, B, T): the bin of each token."""
    return np.searchsorted(edges, np.broadcast_to(QUANTITIES[quantity](t), t.log_r.shape))


def moments(t: Tokens, quantity: str, edges: np.ndarray, batches) -> tuple[np.ndarray, np.ndarray]:
    """(M + D, a) of a quantity's bins, from these batches."""
    bins = bin_of(t, quantity, edges)
    each = [seen(t, bins == k, batches) for k in range(len(edges) + 1)]
    a = np.array([np.mean(s.along) for s in each])
    shares = np.stack([np.concatenate(s.noise) for s in each])  # (bins, groups, K)
    mean = shares.mean(1)
    spread = shares - mean[:, None]
    n = shares.shape[1]
    covariance = t.groups * np.einsum("kgv,lgv->kl", spread, spread) / (n - 1) / shares.shape[2]
    along_g = np.outer(a, t.overlap.mean(1)) / t.reference.square(range(FOLDS))
    elsewhere = t.groups * mean - along_g
    M = elsewhere @ elsewhere.T / shares.shape[2] - covariance * t.groups / n
    return M + covariance, a


HALVES = (slice(0, None, 2), slice(1, None, 2))


def held_out(t: Tokens, quantity: str) -> dict[str, tuple[np.ndarray, list]]:
    """form -> the best weight of it, each half of the batches under what the other half gave; and both fits by bins."""
    edges = edges_of(t, quantity)
    bins = bin_of(t, quantity, edges)
    found = [moments(t, quantity, edges, half) for half in HALVES]
    out = {}
    for form in FORMS:
        fits = [best_weight(Q, a, form) for Q, a in found]
        w = np.empty_like(t.log_r)
        for half, values in zip(reversed(HALVES), fits, strict=True):
            w[half] = values[bins[half]]
        out[form] = w, fits
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Drawn masks
# ---------------------------------------------------------------------------------------------------------------------


def draws_noise(t: Tokens, p: np.ndarray) -> float:
    """What drawing a mask adds to `noise`: the sum of p (1 - p) |its share of g_c|^2 over all that is drawn by itself,
    a token where p is (n, B, T), a response where it is (n, B, 1); over |g|^2."""
    shares = t.plain[: len(t.random), ..., None] * t.random
    if p.shape[2] == 1:
        shares = shares.sum(2, keepdims=True)
    p = p[: len(t.random), ..., None]
    return float((p * (1 - p) * shares**2).sum((1, 2)).mean() / t.reference.square(range(FOLDS)))


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def paired(t: Tokens, a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """log of worth under a over worth under b, and its error: noise that both share falls out."""
    both = [seen(t, w) for w in (a, b)]
    both = [(np.array(s.along), np.concatenate(s.noise)) for s in both]

    def log_ratio(keep):
        over, under = (estimate(*s, t.reference, t.groups, keep)["worth"] for s in both)
        return math.log(max(over, 1e-9) / max(under, 1e-9))

    along, noise = both[0]
    kinds = replicates(len(along), *noise.shape)
    (ratio,), *left_out = [[log_ratio(keep) for keep in kind] for kind in kinds]
    return ratio, jackknife(left_out)


def over(t: Tokens, a: np.ndarray, b: np.ndarray) -> str:
    """Worth under a over worth under b, and how many errors it is from 1; "-" where one of them is worth nothing."""
    ratio, error = paired(t, a, b)
    return "-" if abs(ratio) > 5 else f"{math.exp(ratio):.2f} ({ratio / max(error, 1e-9):+.1f})"


BESIDE = {"min(R, 1)": "min(R, 1)", "retrace_seq": "Retrace times min(R, 1) (retrace_seq)"}


@dataclass(frozen=True)
class SearchFlags:
    """A search"""

    draw: bool = False
    """Measure nothing: write the page from what is there."""
    samplers: str = "actor,w2a16,stale,stale-11"
    """Which samplers, with commas; also: long."""


def numbers(x: dict) -> list[str]:
    worth_ = f"{x['worth']:.3f} +- {x['worth_se']:.3f}"
    return [worth_, *(sweep.number(x[key]) for key in ("kappa", "cosine", "scale", "bias", "noise"))]


HEAD = ["weight", "worth", "kappa", "cosine", "scale", "bias", "noise", *(f"over {name}" for name in BESIDE)]


def about(t: Tokens) -> str:
    """The sampler in numbers."""
    n, B = t.reward.shape
    kl = (token(t) - 1 - t.log_r)[t.mask].mean()
    noise = weigh(t, np.ones_like(t.log_r))["noise_on"]
    return (
        f"{n} batches of {B} responses of {t.mask.sum() / n / B:.1f} tokens; {len(t.random)} of these batches along "
        f"random directions.\nReward {t.reward.mean():.2f}, KL(inf || ref) {kl:.2g} a token, R < 0.5 for "
        f"{100 * (whole(t) < 0.5).mean():.0f} % of responses.\nNoise of an on-policy batch over |g|^2: {noise:.2f}.\n"
    )


def table(t: Tokens) -> str:
    """Every candidate, best first, beside those of BESIDE."""
    rows = []
    others = [CANDIDATES[label](t) for label in BESIDE.values()]
    for label, weight in CANDIDATES.items():
        w = weight(t)
        x = weigh(t, w)
        rows.append((x["worth"], [label, *numbers(x), *(over(t, w, other) for other in others)]))
    return sweep.markdown(HEAD, [row for _, row in sorted(rows, key=lambda row: -row[0])])


Fits = dict[str, dict[str, tuple[np.ndarray, list]]]  # quantity -> form -> held_out's


def best_functions(t: Tokens, fits: Fits) -> str:
    """The best function of each quantity, form by form: over the rising one, over that of R, and its worth on the very
    batches that it is fitted on."""
    rows = []
    for quantity, forms in fits.items():
        edges = edges_of(t, quantity)
        Q, a = moments(t, quantity, edges, slice(None))
        for form, (w, _) in forms.items():
            fitted = weigh(t, best_weight(Q, a, form)[bin_of(t, quantity, edges)])
            beside = [over(t, w, forms[RISING][0]), over(t, w, fits["R"][form][0])]
            rows.append([quantity, form, *numbers(weigh(t, w)), *beside, f"{fitted['worth']:.3f}"])
    more = ["over rising", "over that of R", "worth on what it is fitted on"]
    return sweep.markdown(["function of", "form", *HEAD[1:7], *more], rows)


NAMED = {  # label -> what it is a function of; R stands beside what is none of one quantity
    "r": "r",
    "min(r, 1)": "r",
    "min(r, 2) (TIS)": "r",
    "r in [0.5, 5] (IcePop)": "r",
    "R_t (CTPO's ratio)": "R_t",
    "min(R_t, 1) (prefix_tis)": "R_t",
    "R": "R",
    "min(R, 1)": "R",
    "min(R, 2)": "R",
    "min(R, 4)": "R",
    "R where R <= 4 (seq MIS)": "R",
    "min(R, 1) - 0.2": "R",
    "none": "R",
    "exp(mean log r), clip of 0.2": "R",
    "prod min(r, 1) (Retrace)": "R",
    "r_t min of r before (MinPRO)": "R",
    "Retrace times min(R, 1) (retrace_seq)": "R",
    "retrace_seq, spare (spare)": "R",
}


def distances(t: Tokens, fits: Fits) -> str:
    """Named corrections: their worth over that of the best function of a quantity, of each form."""
    rows = []
    for label, quantity in NAMED.items():
        w = CANDIDATES[label](t)
        beside = [over(t, w, fits[quantity][form][0]) for form in FORMS]
        rows.append([label, quantity, f"{weigh(t, w)['worth']:.3f}", *beside])
    return sweep.markdown(["weight", "function of", "worth", *FORMS], rows)


def draws(t: Tokens) -> str:
    """Drawn masks beside their expectations; and beside the noise that theory says the draw adds."""
    rows = []
    for before, after in DRAWN.items():
        p, mask = CANDIDATES[before](t), CANDIDATES[after](t)
        expected, found, added = weigh(t, p), weigh(t, mask), draws_noise(t, p)
        wrong = expected["bias"] + expected["noise"]
        worths = [
            f"{expected['worth']:.3f}",
            f"{found['worth']:.3f}",
            over(t, mask, p),
            f"{wrong / (wrong + added):.2f}",
        ]
        noise = [f"{expected['noise']:.3g}", f"{added:.3g}", f"{found['noise']:.3g} +- {found['noise_se']:.2g}"]
        rows.append([before, *worths, *noise])
    head = ["mask", "worth, expected", "worth, drawn", "drawn over expected", "by theory"]
    return sweep.markdown([*head, "noise, expected", "the draw adds, by theory", "noise, drawn"], rows)


def by_ratio(t: Tokens) -> str:
    """Responses by R: how far along g one goes, and how large its gradient is, both over |g| of the batch."""
    total = t.log_r.sum(2)
    m, B = len(t.random), total.shape[1]
    square = t.reference.square(range(FOLDS))
    along = np.einsum("nbt,nbtf->nbf", t.plain, t.along).mean(2) * B / square
    size = (np.einsum("nbt,nbtk->nbk", t.plain[:m], t.random) ** 2).mean(2) * B**2 / square
    edges = np.quantile(total, np.linspace(0, 1, BINS + 1))
    rows = []
    for low, high in zip(edges, edges[1:], strict=False):
        here = (total >= low) & (total <= high)
        error = along[here].std() / math.sqrt(here.sum())
        cells = [f"{along[here].mean():.2f} +- {error:.2f}", f"{math.sqrt(size[here[:m]].mean()):.0f}"]
        rows.append([f"{math.exp(low):.2g} to {math.exp(high):.2g}", *cells, f"{t.reward[here].mean():.2f}"])
    return sweep.markdown(["R", "along g", "size", "reward"], rows)


def by_sign(t: Tokens) -> str:
    """Tokens by r, those of positive and those of negative advantage: how far along g all of them together go."""
    square = t.reference.square(range(FOLDS))
    r, rows = token(t), []
    for low, high in zip(SIDES, SIDES[1:], strict=False):
        cells = []
        for sign in (1, -1):
            here = (r >= low) & (r < high) & t.mask & (np.sign(t.plain) == sign)
            along = np.einsum("nbt,nbtf->n", here * t.plain, t.along) / FOLDS / square
            error = along.std(ddof=1) / math.sqrt(len(along))
            cells += [f"{100 * here.sum() / t.mask.sum():.2f}", f"{along.mean():+.2f} +- {error:.2f}"]
        rows.append([f"{low:g} to {high:g}", *cells])
    return sweep.markdown(["r", "A > 0: % of tokens", "along g", "A < 0: % of tokens", "along g"], rows)


OTHERS = sweep.RESULTS / "worth" / "stale-64.json"  # made by worth.py, whose flags it holds


def on_others() -> str:
    """Named objectives where weights of 64 updates ago sample for those of update 128: no form was found on these."""
    record = json.loads(OTHERS.read_text(encoding="utf-8"))
    rows = sorted(record["rows"].items(), key=lambda item: -item[1]["worth"])
    return sweep.markdown(HEAD[:7], [[name, *numbers(x)] for name, x in rows])


def draw(measured: dict[str, Tokens], fits: dict[str, Fits]) -> None:
    """The best functions of R by bins, of two halves of the data, beside min(R, 1)."""
    plt = sweep.pyplot()
    fig, axes = plt.subplots(1, len(measured), figsize=(3.8 * len(measured), 3.6), layout="constrained", squeeze=False)
    for ax, (name, t) in zip(axes[0], measured.items(), strict=True):
        total = np.broadcast_to(total_log(t), t.log_r.shape)[t.mask]
        for form, colour in zip((ANY, RISING, HILL), (sweep.STRONG, *sweep.COLOURS), strict=False):
            for half, style in enumerate(("o-", "s:")):
                w = fits[name]["R"][form][1][half]
                middles = np.quantile(total, (np.arange(len(w)) + 0.5) / len(w))
                largest = max(w.max(), 1e-12)
                ax.plot(middles, w / largest, style, c=colour, ms=3, lw=1.2, label=f"{form}, half {half + 1}")
        x = np.linspace(*np.quantile(total, [0.03, 0.97]), 100)
        ax.plot(x, np.minimum(np.exp(x), 1), "k--", lw=1, label="min(R, 1)")
        ax.set(title=name, xlabel="log R")
        ax.grid(alpha=0.3)
    axes[0, 0].set_ylabel("weight, over its largest")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    sweep.save(fig, sweep.RESULTS / "search.png")


BEST_TITLE = "The best function of one quantity, each half of the batches under what the other half gave:"
NAMED_TITLE = "Worth over that of the best function of a quantity, by its form; in brackets, errors from 1:"
DRAWN_TITLE = "Masks drawn with these probabilities, once for each token or response, beside their expectations:"


def study(flags):
    measured = {}
    for name in flags.samplers.split(","):
        choice("samplers", name, list(SAMPLERS))
        if not flags.draw or (TOKENS / f"{name}.npz").is_file():
            measured[name] = tokens_of(name)
    need(measured, "--draw: nothing is measured; run it once without --draw")
    parts, fits = [], {}
    for name, t in measured.items():
        fits[name] = {q: held_out(t, q) for q in QUANTITIES}
        parts.append(f"## {name}\n\n{about(t)}\n{table(t)}")
        parts.append(f"{BEST_TITLE}\n\n{best_functions(t, fits[name])}")
        parts.append(f"{NAMED_TITLE}\n\n{distances(t, fits[name])}")
        parts.append(f"{DRAWN_TITLE}\n\n{draws(t)}")
        parts.append(f"Gradients G of responses by R, no weight: <G, g> / g^2, and size over g's:\n\n{by_ratio(t)}")
        parts.append(f"The same for all tokens of a kind together, by r and the sign of A:\n\n{by_sign(t)}")
    sweep.page("search", *parts, f"## stale by 64 updates: other tokens\n\n{on_others()}")
    draw(measured, fits)


if __name__ == "__main__":
    sweep.main(study, __doc__, SearchFlags)
