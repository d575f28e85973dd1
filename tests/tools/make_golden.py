"""Writes batches.jsonl and values.jsonl: the results of each named correction from its formula, in plain floats.

    python tests/tools/make_golden.py

The command imports no file of this repository and no tensor library, so that frameworks can be compared with the same
files (tests/tools/conform.py). A batch is a list of responses. A response has log-probabilities by three policies, for
its tokens and for the vocabulary at each place, a draw and a mask for each token, an advantage, a group, and the age of
the weights that sampled it, in updates. A value is one line a case: weights, masks, loss, derivatives of the loss in
log p_new of each token with mask 1, and metrics."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

CLAMP = 20.0  # log-ratios before exp
INF = math.inf
HERE = Path(__file__).resolve().parent.parent / "golden"

# ---------------------------------------------------------------------------------------------------------------------
# Batches: all numbers are different
# ---------------------------------------------------------------------------------------------------------------------

# a response: group, advantage, mask, spread of log r, mean of log r over tokens with mask 1
NEAR = [
    (0, 0.83, "111", 0.0004, 0.0003),
    (0, -0.71, "1", 0.0, 0.0002),
    (1, 1.27, "10111", 0.05, -0.0006),
    (1, -0.34, "1101", 0.2, 0.004),
    (1, 0.52, "", 0.0, 0.0),
    (2, -1.31, "0000", 0.3, 0.0),
    (2, 0.0, "11", 0.5, 0.6),
    (2, 0.46, "0111", 0.7, -0.4),
    (2, -0.93, "11111", 0.9, 0.3),
]
FAR = [
    (0, 0.77, "1110", 1.5, 0.2),
    (0, -0.58, "111", 1.1, -0.3),
    (1, -1.12, "1", 0.0, 1.7),
    (1, 0.39, "101", 0.6, -1.2),
    (1, -0.21, "11", 2.0, -0.1),
    (2, 1.46, "", 0.0, 0.0),
    (2, -0.64, "110", 0.3, -0.7),
    (2, 0.95, "1101", 9.0, 4.0),
]
# log r where one statistic of two is inside its bounds and the other is not
MIDDLE = [
    (0, 0.61, "1", 0.0, 0.309),
    (0, -0.47, "1", 0.0, 0.43),
    (1, 1.09, "1", 0.0, 0.6),
    (1, -0.88, "1110", 0.3, 0.01),
    (1, 0.27, "11", 0.008, 0.05),
    (2, -1.02, "1111", 0.2, -0.001),
    (2, 0.36, "111", 0.008, 0.19),
    (2, -0.15, "1011", 0.4, 0.1),
]
BEYOND = {(7, 0): 26.0, (4, 1): -24.0}  # log p_ref - log p_inf of two tokens of FAR


def make_batch(rows: list, beyond: dict, seed: int) -> list[dict]:
    rng = random.Random(seed)
    batch = [make_response(rng, *row, {t: x for (j, t), x in beyond.items() if j == i}) for i, row in enumerate(rows)]
    batch = [{**response, "age": i % 4} for i, response in enumerate(batch)]
    return [with_vocabulary(rng, response) for response in batch]


def with_vocabulary(rng, response: dict) -> dict:
    """Add a draw and the log-probabilities of four words at each place, by each policy. The first word is the sampled
    word."""
    words = {policy: [[logp, *others(rng, logp)] for logp in response[policy]] for policy in ("inf", "ref", "new")}
    return {**response, "words": words, "draws": [rng.random() for _ in response["mask"]]}


def others(rng, logp: float) -> list[float]:
    parts = [rng.uniform(0.2, 1.0) for _ in range(3)]
    return [math.log(-math.expm1(logp) * part / math.fsum(parts)) for part in parts]


def make_response(rng, group: int, adv: float, mask: str, spread: float, middle: float, beyond: dict) -> dict:
    gaps = [rng.gauss(0, spread) if spread else 0.0 for _ in mask]
    on = [t for t, flag in enumerate(mask) if flag == "1"]
    average = sum(gaps[t] for t in on) / max(1, len(on))
    gaps = [beyond.get(t, gap - average + middle) for t, gap in enumerate(gaps)]
    ref = [-rng.uniform(0.05, 3.0) for _ in mask]
    ref = [min(logp, gap - rng.uniform(0.02, 0.3)) for logp, gap in zip(ref, gaps, strict=True)]  # log p_inf below 0
    inf = [logp - gap for logp, gap in zip(ref, gaps, strict=True)]
    drift = 0.0002 if spread < 0.01 else 0.25  # if ref is near inf, new is near ref
    new = [min(-0.01 - 0.001 * rng.random(), logp + rng.gauss(0, drift)) for logp in ref]
    return {"group": group, "adv": adv, "mask": mask, "inf": inf, "ref": ref, "new": new}


# ---------------------------------------------------------------------------------------------------------------------
# Weights: log-ratios of tokens with mask 1 -> (weight, whether the token is kept) of each token
# ---------------------------------------------------------------------------------------------------------------------


def bounded_exp(x: float) -> float:
    return math.exp(max(-CLAMP, min(CLAMP, x)))


def within(x: float, low: float, high: float) -> bool:
    return low <= x <= high


def weights(rule: str, xs: list[float], adv: float, cap: float, floor: float, low: float, high: float) -> list:
    """cap, floor: bounds of weights; low, high: bounds of kept tokens."""
    n, r = len(xs), [bounded_exp(x) for x in xs]
    if rule == "one":
        return [(1.0, True)] * n
    if rule in ("r", "r kept inside"):
        return [(x, rule == "r" or within(x, low, high)) for x in r]
    if rule == "min(r, C)":
        return [(min(max(x, floor), cap), True) for x in r]
    if rule == "min(R_t, C)":
        return [(min(bounded_exp(math.fsum(xs[: t + 1])), cap), True) for t in range(n)]
    if rule.startswith("traces"):
        traces = [bounded_exp(math.fsum(min(x, 0.0) for x in xs[: t + 1])) for t in range(n)]
        whole = min(1.0, bounded_exp(math.fsum(xs))) if rule == "traces min(R, 1)" else 1.0
        return [(trace * whole, True) for trace in traces]
    R, g = bounded_exp(math.fsum(xs)), bounded_exp(math.fsum(xs) / max(1, n))
    if rule == "soft":
        k, lam = (2.0, 3.0) if adv >= 0 else (3.0, 2.0)
        return [(R**k * math.exp(lam * (1 - R)), True)] * n
    return [
        {
            "R": (R, True),
            "min(R, C)": (min(R, cap), True),
            "R kept inside": (R, within(R, low, high)),
            "one, g inside": (1.0, within(g, low, high)),
            "min(R, C), g inside": (min(R, cap), within(g, low, high)),
            "g in [1/C, C]": (min(max(g, 1 / cap), cap), True),
            "g kept inside": (g, within(g, low, high)),
        }[rule]
    ] * n


def two_events(xs: list[float], inf: list[float], low: float, high: float) -> list:
    """r of tokens. A token is kept if both KLs of the event "this token" are inside the bounds."""
    rows = []
    for x, logq in zip(xs, inf, strict=True):
        p, q = math.exp(logq + x), math.exp(logq)
        kls = [a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p))]
        rows.append((bounded_exp(x), within(max(kls), low, high)))
    return rows


def budgeted(rule: str, response: dict, over: str, cap: float) -> list:
    """Weights and draws of rejection under a budget of lambda = 1, from sums over the vocabulary: Z min(r, C / Z) of
    every token, or min(Z max(r, 1), C) of tokens that are accepted with probability min(r, 1)."""
    rows = []
    for t, flag in enumerate(response["mask"]):
        if flag == "0":
            continue
        z = 0.0
        for target, sampled in zip(response["words"][over][t], response["words"]["inf"][t], strict=True):
            z += min(math.exp(target), math.exp(sampled))
        r = bounded_exp(response[over][t] - response["inf"][t])
        if rule == "Z min(r, C / Z)":
            rows.append((z * min(r, cap / z), True))
            continue
        weight = min(z * max(r, 1.0), cap)
        if rule == "accepted, towards ref":  # the target moves away from ref
            weight *= min(bounded_exp(response["ref"][t] - response[over][t]), 1.3)
        rows.append((weight, response["draws"][t] < min(r, 1.0)))
    return rows


def statistic(rule: str, xs: list[float]) -> list[float]:
    """The statistic of a rejection, for each token."""
    n, r = len(xs), [bounded_exp(x) for x in xs]
    clamped = [max(-CLAMP, min(CLAMP, x)) for x in xs]
    k2 = [x * x / 2 for x in clamped]
    k3 = [math.expm1(x) - x for x in clamped]
    whole = {
        "R": lambda: bounded_exp(math.fsum(xs)),
        "g": lambda: bounded_exp(math.fsum(xs) / n),
        "max r": lambda: max(r),
        "sum k2": lambda: math.fsum(k2),
        "sum k3": lambda: math.fsum(k3),
        "mean k2": lambda: math.fsum(k2) / n,
        "mean k3": lambda: math.fsum(k3) / n,
        "max k2": lambda: max(k2),
        "max k3": lambda: max(k3),
    }
    if not n:
        return []
    square = [x * x for x in clamped]
    return {"r": r, "k2": k2, "k3": k3, "square": square}[rule] if rule not in whole else [whole[rule]()] * n


# ---------------------------------------------------------------------------------------------------------------------
# Surrogates: (values, derivatives in log p_new) of a response's tokens with mask 1
# ---------------------------------------------------------------------------------------------------------------------


def slope_of_exp(x: float) -> float:
    return math.exp(x) if abs(x) <= CLAMP else 0.0


def surrogate(rule: str, new: list[float], base: list[float], A: float, low: float, high: float, dual: float):
    """If a response has one ratio, a value depends on every token. The derivatives are then derivatives of the mean of
    the values, and the caller multiplies by the sum of the weights."""
    xs = [p - q for p, q in zip(new, base, strict=True)]
    n = len(xs)
    if rule == "log p":
        return [A * p for p in new], [A] * n
    if rule in ("sequence clip", "sequence band", "geometric"):
        return one_ratio(rule, xs, A, low, high)
    pairs = [by_token(rule, x, p, q, A, (low, high, dual)) for x, p, q in zip(xs, new, base, strict=True)]
    return [value for value, _ in pairs], [slope for _, slope in pairs]


def one_ratio(rule: str, xs: list[float], A: float, low: float, high: float):
    n = len(xs)
    if not n:
        return [], []
    free = [True] * n
    if rule == "geometric":
        cut = [min(x, high) if A >= 0 else max(x, -low) for x in xs]
        free = [x == y for x, y in zip(xs, cut, strict=True)]
        xs = cut
    s = bounded_exp(math.fsum(xs) / n)
    value, slope = s * A, slope_of_exp(math.fsum(xs) / n) * A
    if rule == "sequence clip":
        value, slope = min((value, slope), (min(max(s, 1 - low), 1 + high) * A, 0.0), key=lambda pair: pair[0])
    if rule == "sequence band":
        edges = (-INF, 1 + high) if A >= 0 else (1 - low, 1 + 7e-4)
        if not within(s, *edges):
            value, slope = min(max(s, edges[0]), edges[1]) * A, 0.0
    return [value] * n, [slope / n * on for on in free]


def by_token(rule: str, x: float, logp: float, logq: float, A: float, bounds) -> tuple[float, float]:
    low, high, dual = bounds
    r, d = bounded_exp(x), slope_of_exp(x)
    p, q = math.exp(logp), math.exp(logq)
    if rule == "clip":
        best = min((r * A, d * A), (min(max(r, 1 - low), 1 + high) * A, 0.0), key=lambda pair: pair[0])
        return (dual * A, 0.0) if dual and A < 0 and best[0] < dual * A else best
    if rule == "weighted log p":
        c = min(max(r, 1 - low), 1 + high)
        return c * A * logp, c * A
    if rule == "sigmoid":
        tau = 1.0 if A > 0 else 1.05
        gate = 1 / (1 + math.exp(max(-700.0, min(700.0, -tau * (r - 1)))))
        return 4 / tau * gate * A, 4 * gate * (1 - gate) * d * A
    gap = abs(p - q) if rule == "gap" else q * (logq - logp) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    stopped = gap > high and p > q if A >= 0 else gap > low and p < q
    return (0.0, 0.0) if stopped else (r * A, d * A)


# ---------------------------------------------------------------------------------------------------------------------
# A case on a batch
# ---------------------------------------------------------------------------------------------------------------------

PLAIN = dict(weight="one", over="ref", cap=INF, floor=0.0, low=0.0, high=INF, budget="")
PLAIN |= dict(statistic="", stat_low=0.0, stat_high=INF, negative=False, veto=0.0, more=(), normalize=False)
PLAIN |= dict(second_moment=INF)
PLAIN |= dict(
    surrogate="clip",
    base="ref",
    clip=(0.2, 0.28),
    dual=0.0,
    reduction="token-mean",
    kept=False,
    pull=0.0,
    between=False,
)


def tokens_of(response: dict, policy: str) -> list[float]:
    return [x for x, on in zip(response[policy], response["mask"], strict=True) if on == "1"]


def evaluate(batch: list[dict], case: dict) -> dict:
    c = PLAIN | case
    if c["between"]:
        batch = [{**r, "ref": between(r)} for r in batch]
    logs = [[a - b for a, b in zip(tokens_of(r, c["over"]), tokens_of(r, "inf"), strict=True)] for r in batch]
    bounds = (c["cap"], c["floor"], c["low"], c["high"])
    if c["weight"] == "r, both KLs inside":
        weighed = [two_events(xs, tokens_of(r, "inf"), c["low"], c["high"]) for xs, r in zip(logs, batch, strict=True)]
    elif c["budget"]:
        weighed = [budgeted(c["budget"], r, c["over"], c["cap"]) for r in batch]
    else:
        weighed = [weights(c["weight"], xs, r["adv"], *bounds) for xs, r in zip(logs, batch, strict=True)]
    divide = mean_weight(weighed, c) if c["normalize"] else 1.0
    w = [[x / divide for x, _ in row] for row in weighed]
    keep = [[on for _, on in row] for row in weighed]
    if c["second_moment"] < INF:
        c["statistic"], c["stat_high"] = (
            "square",
            square_kept([max(-CLAMP, min(CLAMP, x)) for xs in logs for x in xs], c["second_moment"]),
        )
    for i, (xs, r) in enumerate(zip(logs, batch, strict=True)):
        keep[i] = rejected(keep[i], xs, r["adv"], c)
    bases = bases_of(batch, c["base"])
    share = shares(batch, keep, c)
    loss, grad = 0.0, []
    for i, r in enumerate(batch):
        args = (tokens_of(r, "new"), bases[i], r["adv"], *c["clip"], c["dual"])
        values, slopes = surrogate(c["surrogate"], *args)
        scale = [-share[i] * x * on for x, on in zip(w[i], keep[i], strict=True)]
        loss += math.fsum(s * v for s, v in zip(scale, values, strict=True))
        shared = c["surrogate"] in ("sequence clip", "sequence band", "geometric")
        factors = [math.fsum(scale)] * len(scale) if shared else scale
        grad.append([f * s for f, s in zip(factors, slopes, strict=True)])
        if c["pull"]:
            apart = [p - q for p, q in zip(tokens_of(r, "new"), tokens_of(r, "inf"), strict=True)]
            loss += math.fsum(share[i] * c["pull"] * x * x for x in apart)
            grad[i] = [g + share[i] * c["pull"] * 2 * x for g, x in zip(grad[i], apart, strict=True)]
    masks = ["".join("01"[on] for on in row) for row in keep]
    return {"weight": w, "keep": masks, "loss": loss, "grad": grad, "metrics": metrics(w, keep)}


def between(r: dict) -> list[float]:
    """log p_ref between log p_inf and log p_new, at the last update but one; of fresh tokens log p_new."""
    a = (r["age"] - 1) / r["age"] if r["age"] else 1.0
    return [(1 - a) * q + a * p for q, p in zip(r["inf"], r["new"], strict=True)]


def square_kept(logs: list[float], bound: float) -> float:
    """M2PO: the largest square that is left if the largest are removed until the mean is at most the bound."""
    squares = sorted(x * x for x in logs)
    while len(squares) > 1 and math.fsum(squares) / len(squares) > bound:
        squares.pop()
    return squares[-1]


def rejected(keep: list[bool], xs: list[float], adv: float, c: dict) -> list[bool]:
    for rule, low, high in [(c["statistic"], c["stat_low"], c["stat_high"]), *c["more"]]:
        if rule and not (c["negative"] and adv >= 0):
            values = statistic(rule, xs)
            keep = [on and within(x, low, high) for on, x in zip(keep, values, strict=True)]
    vetoed = any(bounded_exp(x) < c["veto"] for x in xs)
    return [on and not vetoed for on in keep]


def mean_weight(weighed: list, c: dict) -> float:
    """Mean over tokens, or over responses if a response has one weight. A weight outside its bounds counts as 0."""
    one_each = c["weight"] in ("R", "min(R, C)", "R kept inside", "soft")
    applied = [w * on for row in weighed for w, on in (row[:1] if one_each else row)]
    return math.fsum(applied) / len(applied)


def bases_of(batch: list[dict], base: str) -> list[list[float]]:
    """log of the divisor of p_new. group: log(sum q^2 / sum q) over the group, q = exp(mean log p_inf)."""
    if base != "group":
        return [tokens_of(r, base) for r in batch]
    mean = [math.fsum(tokens_of(r, "inf")) / max(1, len(tokens_of(r, "inf"))) for r in batch]
    out = []
    for r in batch:
        q = [math.exp(m) for m, o in zip(mean, batch, strict=True) if o["group"] == r["group"] and "1" in o["mask"]]
        out.append([math.log(math.fsum(x * x for x in q) / math.fsum(q))] * len(tokens_of(r, "inf")))
    return out


def shares(batch: list[dict], keep: list[list[bool]], c: dict) -> list[float]:
    """The factor of each token's value. c["kept"]: the denominator counts kept tokens instead of proposed tokens."""
    counts = [sum(row) if c["kept"] else len(row) for row in keep]
    tokens, responses = sum(counts), sum(n > 0 for n in counts)
    if c["reduction"] == "token-mean":
        return [1 / tokens if n else 0.0 for n in counts]
    if c["reduction"] == "seq-mean-token-mean":
        return [1 / responses / n if n else 0.0 for n in counts]
    return [1 / responses / 9 if n else 0.0 for n in counts]  # --max_tokens=9


def metrics(w: list[list[float]], keep: list[list[bool]]) -> dict:
    """Effective sample size of weight x keep over tokens; shares of tokens, and of responses with a token, rejected."""
    applied = [x * on for row, mask in zip(w, keep, strict=True) for x, on in zip(row, mask, strict=True)]
    squares = math.fsum(x * x for x in applied)
    tokens = [on for row in keep for on in row]
    responses = [row for row in keep if row]
    return {
        "rollout_is_eff_sample_size": math.fsum(applied) ** 2 / len(applied) / squares if squares else 0.0,
        "rollout_rs_masked_fraction": 1 - sum(tokens) / len(tokens),
        "rollout_rs_seq_masked_fraction": sum(not all(row) for row in responses) / len(responses),
    }


def mismatch(batch: list[dict]) -> dict:
    """The divergence of ref from inf, over tokens and over responses."""
    logs = [[a - b for a, b in zip(tokens_of(r, "ref"), tokens_of(r, "inf"), strict=True)] for r in batch]
    xs = [x for row in logs for x in row]
    R = [bounded_exp(math.fsum(row)) for row in logs if row]
    k3 = [bounded_exp(x) - 1 - x for x in xs]
    return {
        "kl": -math.fsum(xs) / len(xs),
        "k3_kl": math.fsum(k3) / len(xs),
        "chi2_token": math.fsum(bounded_exp(x) ** 2 for x in xs) / len(xs) - 1,
        "chi2_seq": math.fsum(x * x for x in R) / len(R) - 1,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Cases: flags of train.py -> settings in this file
# ---------------------------------------------------------------------------------------------------------------------

SEQ = "seq-mean-token-mean"
NARROW = dict(statistic="g", stat_low=0.999, stat_high=1.001)
SMALL = dict(statistic="mean k3", stat_high=0.01)
ON_NEW = dict(over="new", surrogate="log p")
DIVIDED = dict(over="new", base="inf")  # verl's bypass mode with PPO's clip rejects by p_new / p_inf
CASES = {
    "none": {},
    "grpo": {},
    "reinforce": dict(surrogate="log p"),
    "is": dict(weight="r"),
    "tis": dict(weight="min(r, C)", cap=2.0),
    "icepop": dict(weight="r kept inside", low=0.5, high=5.0),
    "kpop": dict(weight="r, both KLs inside", high=0.1),
    "areal_drop": dict(weight="r kept inside", high=5.0),
    "seq_is": dict(weight="R"),
    "seq_tis": dict(weight="min(R, C)", cap=4.0),
    "prefix_tis": dict(weight="min(R_t, C)", cap=1.0),
    "z_tis": dict(budget="Z min(r, C / Z)", cap=3.0),
    "jackpot": dict(budget="accepted", cap=3.0),
    "jackpot_adjusted": dict(budget="accepted", cap=3.0, over="new", base="new"),
    "retrace": dict(weight="traces"),
    "retrace_seq": dict(weight="traces min(R, 1)"),
    "spare": dict(weight="traces min(R, 1)", statistic="r", stat_low=0.9, negative=True),
    "seq_mis": dict(weight="R kept inside", high=4.0),
    "mis_gspo": dict(weight="R kept inside", high=4.0, surrogate="sequence clip", clip=(3e-4, 4e-4), reduction=SEQ),
    "geo_rs": NARROW,
    "geo_rs_seq_tis": dict(weight="min(R, C), g inside", cap=4.0, low=0.999, high=1.001),
    "ppo_is": dict(base="inf"),
    "tis_adjusted": dict(weight="min(r, C)", cap=2.0, over="new", base="new"),
    "gspo": dict(surrogate="sequence clip", clip=(3e-4, 4e-4), reduction=SEQ),
    "gepo": dict(surrogate="sequence clip", base="group", clip=(0.2, 0.2), reduction=SEQ),
    "tbpo": dict(weight="g in [1/C, C]", cap=2.0, surrogate="sequence band", clip=(3e-4, 4e-4), reduction=SEQ),
    "sapo": dict(surrogate="sigmoid", reduction=SEQ),
    "cispo": dict(surrogate="weighted log p"),
    "gmpo": dict(surrogate="geometric", clip=(0.4, 0.4), reduction=SEQ),
    "dppo_tv": dict(surrogate="gap", base="inf", clip=(0.2, 0.2)),
    "dppo_kl": dict(surrogate="binary kl", base="inf", clip=(0.05, 0.05)),
    "prime_rl": dict(surrogate="gap", base="inf", clip=(0.2, 0.2), pull=0.001),
    "vespo": dict(weight="soft", **ON_NEW),
    "opsm": dict(over="new", statistic="g", stat_low=math.exp(-1e-4), negative=True),
    # verl
    "decoupled_token_is": dict(weight="min(r, C)", cap=2.0),
    "decoupled_seq_is": dict(weight="min(R, C)", cap=2.0),
    "decoupled_token_icepop": dict(weight="r kept inside", low=0.5, high=5.0),
    "decoupled_seq_is_rs": dict(weight="min(R, C)", cap=2.0, statistic="R", stat_low=0.5, stat_high=2.0),
    "decoupled_geo_rs": NARROW,
    "decoupled_geo_rs_seq_tis": dict(weight="min(R, C)", cap=2.0, **NARROW),
    "decoupled_geo_rs_token_tis": dict(weight="min(r, C)", cap=2.0, **NARROW),
    "decoupled_k3_rs": SMALL,
    "decoupled_k3_rs_seq_tis": dict(weight="min(R, C)", cap=2.0, **SMALL),
    "decoupled_k3_rs_token_tis": dict(weight="min(r, C)", cap=2.0, **SMALL),
    "bypass_ppo_clip": dict(base="inf"),
    "bypass_ppo_clip_geo_rs": DIVIDED | NARROW,
    "bypass_ppo_clip_k3_rs": DIVIDED | SMALL,
    "bypass_pg_is": dict(weight="min(R, C)", cap=2.0, **ON_NEW),
    "bypass_pg_token_icepop": dict(weight="r kept inside", low=0.5, high=5.0, **ON_NEW),
    "bypass_pg_geo_rs": ON_NEW | NARROW,
    "bypass_pg_geo_rs_seq_tis": dict(weight="min(R, C)", cap=2.0, **ON_NEW, **NARROW),
    "bypass_pg_geo_rs_token_tis": dict(weight="min(r, C)", cap=2.0, **ON_NEW, **NARROW),
    "disabled": {},
    # TRL, SkyRL, OpenRLHF, slime, AReaL
    "token_truncate": dict(weight="min(r, C)", cap=3.0),
    "token_mask": dict(weight="r kept inside", high=3.0),
    "sequence_truncate": dict(weight="min(R, C)", cap=3.0),
    "sequence_mask": dict(weight="R kept inside", high=3.0),
    "dr_grpo": dict(reduction="sum over 9"),
    "dapo": {},
    "skyrl_geo_mask": dict(weight="one, g inside", low=0.99, high=1.01),
    "skyrl_product_mask": dict(statistic="R", stat_low=0.5, stat_high=2.0),
    "skyrl_token_mask": dict(statistic="r", stat_low=0.5, stat_high=2.0),
    "skyrl_outlier_mask": dict(statistic="max r", stat_high=100.0, veto=1e-4),
    "seq_mask_tis": dict(weight="r", statistic="g", stat_low=0.5, stat_high=5.0),
    "slime_tis": dict(weight="min(r, C)", cap=2.0, clip=(0.2, 0.2), reduction=SEQ),
    "slime_icepop": dict(weight="r kept inside", high=2.0, clip=(0.2, 0.2), reduction=SEQ),
    "areal_decoupled": dict(weight="r", clip=(0.2, 0.2)),
    "areal_token_mask": dict(weight="r kept inside", high=5.0, clip=(0.2, 0.2)),
}
# presets with additional flags
TIS, SEQUENCE = dict(weight="min(r, C)", cap=2.0), dict(weight="min(R, C)", cap=4.0)
CASES |= {
    "m2po": dict(second_moment=0.04),
    "tis --normalize_weights=True": TIS | dict(normalize=True),
    "icepop --normalize_weights=True": dict(weight="r kept inside", low=0.5, high=5.0, normalize=True),
    "seq_tis --normalize_weights=True": SEQUENCE | dict(normalize=True),
    "seq_mis --normalize_weights=True": dict(weight="R kept inside", high=4.0, normalize=True),
    "tis --is_floor=0.7": TIS | dict(floor=0.7),
    "tis --reject=seq_min:0.4:inf": TIS | dict(veto=0.4),
    "tis --dual_clip=1.3": TIS | dict(dual=1.3),
    "z_tis --obrs_c1=0.7": dict(budget="Z min(r, C / Z)", cap=0.7),
    "jackpot --obrs_c1=0.7": dict(budget="accepted", cap=0.7),
    "jackpot --obrs_target=new": dict(budget="accepted, towards ref", cap=3.0, over="new"),
    "is --reject=token:0.5:2,seq_max_k2:0:0.4,geo:0.8:1.25": dict(
        weight="r",
        **dict(statistic="r", stat_low=0.5, stat_high=2.0),
        more=[("max k2", 0.0, 0.4), ("g", 0.8, 1.25)],
    ),
    "icepop --ref_from=loglinear": dict(weight="r kept inside", low=0.5, high=5.0, between=True),
    "cispo --clip_low=1.0": dict(surrogate="weighted log p", clip=(1.0, 0.28)),
    "decoupled_seq_is_rs --loss_denominator=kept": dict(
        weight="min(R, C)", cap=2.0, statistic="R", stat_low=0.5, stat_high=2.0, kept=True
    ),
    "icepop --rs_high=3.0 --reject=geo:0.8:1.25 --normalize_weights=True": dict(
        **dict(weight="r kept inside", low=0.5, high=3.0, normalize=True),
        **dict(statistic="g", stat_low=0.8, stat_high=1.25),
    ),
    "icepop --loss_denominator=kept": dict(weight="r kept inside", low=0.5, high=5.0, kept=True),
    f"seq_mis --loss_denominator=kept --reduction={SEQ}": dict(
        weight="R kept inside", high=4.0, kept=True, reduction=SEQ
    ),
}
STATISTICS = {"token": ("r", 0.6, 1.5), "sequence": ("R", 0.4, 1.9), "geo": ("g", 0.8, 1.2), "seq_max": ("max r", 0, 2)}
STATISTICS |= {"token_k2": ("k2", 0, 0.05), "seq_sum_k2": ("sum k2", 0, 0.2), "seq_mean_k2": ("mean k2", 0, 0.1)}
STATISTICS |= {"seq_max_k2": ("max k2", 0, 0.1), "token_k3": ("k3", 0, 0.05), "seq_sum_k3": ("sum k3", 0, 0.2)}
STATISTICS |= {"seq_mean_k3": ("mean k3", 0, 0.1), "seq_max_k3": ("max k3", 0, 0.1)}
for name, (rule, low, high) in STATISTICS.items():
    flags = f"is --reject={name} --rs_low={low} --rs_high={high}"
    CASES[flags] = dict(weight="r", statistic=rule, stat_low=low, stat_high=high)


def main() -> None:
    batches = {
        "near": make_batch(NEAR, {}, 5),
        "far": make_batch(FAR, BEYOND, 11),
        "middle": make_batch(MIDDLE, {}, 17),
    }
    lines = [
        json.dumps({"batch": name, "responses": rows, "mismatch": mismatch(rows)}) for name, rows in batches.items()
    ]
    (HERE / "batches.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    values = []
    for name, rows in batches.items():
        values += [json.dumps({"case": key, "batch": name, **evaluate(rows, case)}) for key, case in CASES.items()]
    (HERE / "values.jsonl").write_text("\n".join(values) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
