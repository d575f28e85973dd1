"""The papers' formulas: plain floats, loops over responses, tokens and the vocabulary, derivatives by hand.

No import of the repository or of a tensor library. `step` takes all responses of one optimizer step and the flags'
values; it returns the loss and its derivative in every log-probability. test_oracle.py compares it with the
repository. Names are the papers': r = p_ref / p_inf of a token, R of a response, Z, kappa, lambda.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

INF = math.inf
WITH_Z = ("obrs", "z_tis")


@dataclass
class Token:
    """A sampled token, and the distributions over the vocabulary at its position."""

    id: int
    on: bool  # whether it has a gradient
    u: float  # OBRS's draw
    inf: list[float]  # the engine's
    ref: list[float]  # the policy at the start of the step
    new: list[float]  # the policy now
    actor_ref: list[float]
    actor: list[float]
    start: list[float]  # the frozen model from the start of the run


@dataclass
class Response:
    group: int
    reward: float
    tokens: list[Token]
    temperature: float = 1.0

    @property
    def on(self) -> list[Token]:
        return [token for token in self.tokens if token.on]


@dataclass
class Result:
    """The loss; its derivative in log p_new, log p_actor, distillation loss and entropy of each token that is on."""

    loss: float
    size: float  # sum of the absolute values of the loss's terms
    weighed: list[list[tuple[float, float]]]  # (weight, keep) of each token
    policy: list[list[float]]
    actor: list[list[float]]
    distill: list[list[float]]
    entropy: list[list[float]]


@dataclass
class Bounds:
    """Bounds of a correction: weights in [floor, cap], kept if low <= . <= high."""

    cap: float = INF
    floor: float = 0.0
    low: float = 0.0
    high: float = INF


def clamp(x: float, c: float) -> float:
    return max(-c, min(c, x))


def log_ratio(token: Token, over: str, under: str) -> float:
    return math.log(getattr(token, over)[token.id]) - math.log(getattr(token, under)[token.id])


def mean(xs: list[float]) -> float:
    return sum(xs) / len(xs)


# -- The step ---------------------------------------------------------------------------------------------------------


def step(responses: list[Response], cfg, kappa: float | None, distill_lambda: float) -> Result:
    """kappa: from the last update; distill_lambda: from the controller."""
    adv = advantages(responses, cfg)
    lam = lambda_of(responses, cfg)
    kappa = kappa_of(responses, cfg, lam, kappa)
    weighed = [weights_of(r, a, cfg, lam, kappa) for r, a in zip(responses, adv, strict=True)]
    most = largest_kept(responses, cfg)
    for i, (r, a) in enumerate(zip(responses, adv, strict=True)):
        weighed[i] = [(w, k * also) for (w, k), also in zip(weighed[i], rejections(r, a, cfg, most), strict=True)]
    keep = [[k for _, k in row] for row in weighed]
    share = shares(responses, cfg)
    share_kept = shares_of_kept(keep, responses, cfg) if cfg.loss_denominator == "kept" else share
    terms, policy, entropies = [], [], []
    for i, r in enumerate(responses):
        values, slopes, together = surrogate(r, responses, adv[i], cfg)
        gate = 0.0 if cfg.positive_only and adv[i] <= 0 else 1.0
        scale = [-share_kept[i] * k * w * gate for w, k in weighed[i]]
        terms += [s * v for s, v in zip(scale, values, strict=True)]
        # with one ratio a response, every token's value depends on every token
        factors = [sum(scale)] * len(scale) if together else scale
        slopes = [f * d for f, d in zip(factors, slopes, strict=True)]
        drift, pull = cppo(r, responses, share[i], cfg)
        terms.append(drift)
        to_start, back = kl_to_start(r, responses, [share_kept[i] * k * w for w, k in weighed[i]], cfg)
        terms += to_start
        policy.append([a + b + c for a, b, c in zip(slopes, pull, back, strict=True)])
        terms += [-share[i] * cfg.entropy_coef * entropy(token.new) for token in r.on]
        entropies.append([-share[i] * cfg.entropy_coef] * len(r.on))
    result = Result(0.0, 0.0, weighed, policy, [[] for _ in responses], [[] for _ in responses], entropies)
    if cfg.actor != "none":
        terms += actors_part(result, responses, adv, share, distill_lambda, cfg)
    return replace(result, loss=sum(terms), size=sum(map(abs, terms)))


def advantages(responses: list[Response], cfg) -> list[float]:
    """The advantage of each response within its group; a group of equal rewards has 0."""
    out, earned = [], [r.reward for r in responses]
    if cfg.advantage == "given":
        return earned
    for r, reward in zip(responses, earned, strict=True):
        rewards = [x for x, other in zip(earned, responses, strict=True) if other.group == r.group]
        G, m = len(rewards), mean(rewards)
        if max(rewards) == min(rewards):
            out.append(0.0)
        elif cfg.advantage == "grpo":
            std = math.sqrt(sum((x - m) ** 2 for x in rewards) / (G - 1))
            out.append((reward - m) / (std + 1e-6))
        elif cfg.advantage == "maxrl":
            out.append((reward - m) / m if m > 0 else 0.0)
        elif cfg.advantage == "rloo":  # minus the mean of the remaining responses
            out.append(reward - (sum(rewards) - reward) / (G - 1))
        else:
            out.append(reward - m)
    return out


# -- Reductions: the factor of each token's value ---------------------------------------------------------------------


def shares(responses: list[Response], cfg) -> list[float]:
    """Proposed: every token that is on counts, and every response with such a token."""
    tokens = sum(len(r.on) for r in responses)
    sequences = sum(len(r.on) > 0 for r in responses)
    return [one_share(len(r.on), tokens, sequences, cfg) for r in responses]


def shares_of_kept(keep: list[list[float]], responses: list[Response], cfg) -> list[float]:
    """Kept: rejected tokens do not count; an expected mask counts with its expectation."""
    kept = [sum(row) for row in keep]
    tokens = sum(kept)
    sequences = sum(k > 0 for k in kept)
    return [one_share(k, tokens, sequences, cfg) if k > 0 else 0.0 for k in kept]


def one_share(n: float, tokens: float, sequences: float, cfg) -> float:
    if n == 0:
        return 0.0
    if cfg.reduction == "token-mean":
        return 1 / tokens
    if cfg.reduction == "seq-mean-token-mean":
        return 1 / sequences / n
    return 1 / sequences / cfg.max_tokens


# -- Corrections: (weight, keep) of each token that is on -------------------------------------------------------------


def weights_of(r: Response, advantage: float, cfg, lam: float, kappa: float) -> list[tuple[float, float]]:
    """The policy's correction, before --reject."""
    if cfg.correction in WITH_Z:
        out = [obrs(token, cfg, lam, kappa) for token in r.on]
    else:
        bounds = Bounds(floor=cfg.is_floor)
        flags = {"cap": cfg.is_cap, "low": cfg.rs_low, "high": cfg.rs_high}
        bounds = replace(bounds, **{name: value for name, value in flags.items() if value is not None})
        out = correct(cfg.correction, r, cfg.correction_target, bounds, cfg.log_ratio_clamp, advantage)
    return out


def correct(name: str, r: Response, over: str, bounds: Bounds, c: float, A: float) -> list[tuple[float, float]]:
    """over: the policy in the numerator above inf."""
    logs = [log_ratio(token, over, "inf") for token in r.on]
    if not logs:
        return []
    if name in ("none", "is", "tis", "icepop", "areal_drop"):
        return [by_token(name, math.exp(clamp(x, c)), bounds) for x in logs]
    if name == "kpop":
        return [binary_kl(token, over, x, bounds, c) for token, x in zip(r.on, logs, strict=True)]
    if name == "prefix_tis":
        prefixes = [math.exp(clamp(sum(logs[: t + 1]), c)) for t in range(len(logs))]
        return [(min(max(x, bounds.floor), bounds.cap), 1.0) for x in prefixes]
    if name in ("retrace", "retrace_seq"):
        whole = min(math.exp(clamp(sum(logs), c)), 1.0) if name == "retrace_seq" else 1.0
        traces = [math.exp(clamp(sum(min(x, 0.0) for x in logs[: t + 1]), c)) for t in range(len(logs))]
        return [(trace * whole, 1.0) for trace in traces]
    R, geo = math.exp(clamp(sum(logs), c)), math.exp(clamp(mean(logs), c))
    if name == "vespo":
        k, lam = (2.0, 3.0) if A >= 0 else (3.0, 2.0)
        return [(R**k * math.exp(lam * (1 - R)), 1.0)] * len(logs)
    return [by_response(name, R, geo, bounds)] * len(logs)


def binary_kl(token: Token, over: str, x: float, bounds: Bounds, c: float) -> tuple[float, float]:
    """KPop: the larger of both KLs of (this token, the rest)."""
    p, q = getattr(token, over)[token.id], token.inf[token.id]
    both = [sum(a * math.log(a / b) for a, b in ((s, t), (1 - s, 1 - t))) for s, t in ((p, q), (q, p))]
    return math.exp(clamp(x, c)), inside(max(both), bounds.low, bounds.high)


def by_token(name: str, ratio: float, bounds: Bounds) -> tuple[float, float]:
    if name == "none":
        return 1.0, 1.0
    if name == "tis":
        return min(max(ratio, bounds.floor), bounds.cap), 1.0
    if name == "icepop":
        return ratio, inside(ratio, bounds.low, bounds.high)
    return ratio, inside(ratio, 0.0, bounds.cap if name == "areal_drop" else INF)


def by_response(name: str, R: float, geo: float, bounds: Bounds) -> tuple[float, float]:
    if name == "tbpo_mismatch":
        return min(max(geo, bounds.floor or 1 / bounds.cap), bounds.cap), 1.0
    if name == "seq_mis":
        return R, inside(R, bounds.low, bounds.high)
    keep = inside(geo, bounds.low, bounds.high) if name.startswith("geo_rs") else 1.0
    capped = min(max(R, bounds.floor), bounds.cap)
    return {"seq_is": R, "seq_tis": capped, "geo_rs": 1.0, "geo_rs_seq_tis": capped}[name], keep


def inside(x: float, low: float, high: float) -> float:
    return 1.0 if low <= x <= high else 0.0


def largest_kept(responses: list[Response], cfg) -> float:
    """M2PO: the largest squared log-ratio after the largest are removed until their mean is within the bound."""
    c = cfg.log_ratio_clamp
    squares = sorted(clamp(log_ratio(token, "ref", "inf"), c) ** 2 for r in responses for token in r.on)
    while len(squares) > 1 and cfg.reject == "token_m2" and mean(squares) > cfg.rs_high:
        squares.pop()
    return squares[-1] if squares else INF


def rejections(r: Response, advantage: float, cfg, most: float) -> list[float]:
    """The keep of --reject for each token."""
    c = cfg.log_ratio_clamp
    logs = [log_ratio(token, cfg.correction_target, "inf") for token in r.on]
    if not logs:
        return []
    k2 = [clamp(x, c) ** 2 / 2 for x in logs]
    k3 = [math.exp(clamp(x, c)) - 1 - clamp(x, c) for x in logs]
    n = len(logs)
    statistics = {
        "token": [math.exp(clamp(x, c)) for x in logs],
        "sequence": [math.exp(clamp(sum(logs), c))] * n,
        "geo": [math.exp(clamp(mean(logs), c))] * n,
        "token_k3": k3,
        "token_m2": [clamp(x, c) ** 2 for x in logs],
        "seq_mean_k3": [mean(k3)] * n,
        "token_k2": k2,
        "seq_sum_k2": [sum(k2)] * n,
        "seq_mean_k2": [mean(k2)] * n,
        "seq_max_k2": [max(k2)] * n,
        "seq_sum_k3": [sum(k3)] * n,
        "seq_max_k3": [max(k3)] * n,
        "seq_max": [max(math.exp(clamp(x, c)) for x in logs)] * n,
        "seq_min": [min(math.exp(clamp(x, c)) for x in logs)] * n,
        "seq_max_kl": [largest_kl(r, cfg)] * n if "seq_max_kl" in cfg.reject else [],
    }
    keep = [1.0] * n
    if cfg.reject == "none" or (cfg.reject_of == "negative" and advantage >= 0):
        return keep
    for part in cfg.reject.split(","):
        name, *bounds = part.split(":")
        low, high = map(float, bounds or (cfg.rs_low, cfg.rs_high))
        high = most if name == "token_m2" else high
        keep = [k * inside(x, low, high) for k, x in zip(keep, statistics[name], strict=True)]
    return keep


def largest_kl(r: Response, cfg) -> float:
    """TRM: the largest KL(inf || policy) of a response's tokens, over the support and the rest as one token."""
    kls = []
    for token in r.on:
        p, policy = support(token, cfg), getattr(token, cfg.correction_target)
        rest = 1 - sum(p.values()), 1 - sum(policy[x] for x in p)
        pairs = [(p[x], policy[x]) for x in p] + [rest] * (rest[0] > 1e-9)
        kls.append(sum(a * math.log(a / b) for a, b in pairs))
    return max(kls)


# -- OBRS -------------------------------------------------------------------------------------------------------------


def target(cfg) -> str:
    return "ref" if cfg.correction == "z_tis" else cfg.obrs_target


def acceptance(token: Token, policy: str, lam: float, c: float) -> float:
    """a = min(1, p_tgt / (lambda p_inf))."""
    return min(1.0, math.exp(clamp(log_ratio(token, policy, "inf"), c)) / lam)


def obrs(token: Token, cfg, lam: float, kappa: float) -> tuple[float, float]:
    """w = Z max(lambda, p_tgt / p_inf); rho = min(w, c1) min(p_ref / p_tgt, c2); Mask ~ Bernoulli(a)."""
    c, policy = cfg.log_ratio_clamp, target(cfg)
    ratio = math.exp(clamp(log_ratio(token, policy, "inf"), c))
    Z = z_of(token, cfg, lam, kappa)
    if cfg.correction == "z_tis":
        return Z * min(ratio, cfg.obrs_c1 / Z), 1.0
    a = acceptance(token, policy, lam, c)
    mask = a if cfg.obrs_mask == "expected" else float(token.u < a)
    rho = min(Z * max(lam, ratio), cfg.obrs_c1)
    if cfg.ratio_base == "ref" and cfg.surrogate != "reinforce":  # the surrogate multiplies by p_new / p_ref
        rho *= min(math.exp(clamp(log_ratio(token, "ref", policy), c)), cfg.obrs_c2)
    if cfg.obrs_mode == "mask":
        return 1.0, mask
    if cfg.obrs_mode == "reweight":
        return rho, 1.0
    return rho, mask


def largest(distribution: list[float], k: int) -> list[int]:
    return sorted(range(len(distribution)), key=lambda x: -distribution[x])[:k]


def support(token: Token, cfg) -> dict[int, float]:
    """S -> p_inf there: the engine's top-K and the sampled token; OBRS with an actor and target new: also the policy's
    top-K."""
    p = {x: token.inf[x] for x in [*largest(token.inf, cfg.obrs_topk), token.id]}
    if cfg.correction == "obrs" and cfg.actor != "none" and cfg.obrs_target == "new":
        p = {x: token.actor_ref[x] for x in largest(token.ref, cfg.obrs_topk)} | p
    return p


def z_low_of(token: Token, policy: str, lam: float, cfg) -> float:
    p = support(token, cfg)
    return sum(min(p[x], getattr(token, policy)[x] / lam) for x in p)


def z_of(token: Token, cfg, lam: float, kappa: float) -> float:
    distribution = getattr(token, target(cfg))
    V = range(len(distribution))
    if cfg.obrs_z == "exact":
        return sum(min(token.actor_ref[x], distribution[x] / lam) for x in V)
    p = support(token, cfg)
    low = z_low_of(token, target(cfg), lam, cfg)
    room = max(0.0, 1 - sum(p.values()))
    if not cfg.obrs_accept_rate:  # a budget's lambda is known only after the pass that would sum the tail
        p_kth = token.inf[largest(token.inf, cfg.obrs_topk)[-1]]
        room = min(room, sum(min(p_kth, distribution[x] / lam) for x in V if x not in p))
    return min(max(kappa * low, low), low + room)


def lambda_of(responses: list[Response], cfg) -> float:
    """One lambda an update: with a budget that of mean min(1, r / lambda) = rate, by bisection; rate 1: the smallest
    r."""
    if not cfg.obrs_accept_rate or cfg.correction not in WITH_Z:
        return cfg.obrs_lambda
    ratios = [math.exp(clamp(log_ratio(x, "ref", "inf"), cfg.log_ratio_clamp)) for r in responses for x in r.on]
    if cfg.obrs_accept_rate == 1:
        return min(ratios)
    low, high = math.log(min(ratios)), math.log(sum(ratios) / cfg.obrs_accept_rate)
    for _ in range(200):
        middle = (low + high) / 2
        accepted = mean([min(1.0, r / math.exp(middle)) for r in ratios])
        low, high = (middle, high) if accepted > cfg.obrs_accept_rate else (low, middle)
    return math.exp(middle)


def kappa_of(responses: list[Response], cfg, lam: float, kappa: float | None) -> float:
    """One kappa an update, over all tokens that are on."""
    if cfg.correction not in WITH_Z or cfg.obrs_z == "exact":
        return 1.0
    if kappa is not None and cfg.obrs_target == "new":
        return kappa
    tokens = [token for r in responses for token in r.on]
    a = [acceptance(token, "ref", lam, cfg.log_ratio_clamp) for token in tokens]
    if cfg.obrs_mask == "bernoulli":
        a = [float(token.u < x) for token, x in zip(tokens, a, strict=True)]
    return mean(a) / mean([z_low_of(token, "ref", lam, cfg) for token in tokens])


# -- Surrogates: values and derivatives of each token that is on ------------------------------------------------------


def surrogate(r: Response, responses: list[Response], A: float, cfg):
    """(values, derivatives, whether a response has one ratio: then the derivatives are of the response's value)."""
    low, high, top = (cfg.clip_low, cfg.clip_high, cfg.tbpo_neg_high) if cfg.clip else (INF, INF, INF)
    tokens, c = r.on, cfg.log_ratio_clamp
    n = len(tokens)
    if not n:
        return [], [], False
    logs = [math.log(token.new[token.id]) - log_base(token, r, responses, cfg) for token in tokens]
    if cfg.surrogate in ("gspo", "tbpo"):
        x = mean(logs)
        s, ds = math.exp(clamp(x, c)), math.exp(x) if abs(x) < c else 0.0
        if cfg.surrogate == "gspo":
            value, slope = clipped(s, ds, A, low, high, cfg.dual_clip)
        else:
            edges = (-INF, 1 + high) if A >= 0 else (1 - low, 1 + top)
            value = min(max(s, edges[0]), edges[1]) * A
            slope = ds * A if edges[0] <= s <= edges[1] else 0.0
        return [value] * n, [slope / n] * n, True
    if cfg.surrogate == "gmpo":
        bounded = [min(x, high) if A >= 0 else max(x, -low) for x in logs]
        s = math.exp(clamp(mean(bounded), c))
        free = abs(mean(bounded)) < c
        return [s * A] * n, [s * A / n if free and y == x else 0.0 for x, y in zip(logs, bounded, strict=True)], True
    pairs = []
    for token, x in zip(tokens, logs, strict=True):
        logp, ratio, d = math.log(token.new[token.id]), math.exp(clamp(x, c)), math.exp(x) if abs(x) < c else 0.0
        if cfg.surrogate == "reinforce":
            pairs.append((logp * A, A))
        elif cfg.surrogate == "cispo":
            bounded = min(max(ratio, 1 - low), 1 + high)
            pairs.append((bounded * A * logp, bounded * A))
        elif cfg.surrogate.startswith("dppo"):
            open_ = 1.0 if may_move(logp, logp - x, A, low, high, cfg.surrogate) else 0.0
            pairs.append((open_ * ratio * A, open_ * d * A))
        elif cfg.surrogate == "drpo":
            q, delta = math.exp(logp - x), high
            value = ratio * A - abs(A) * q * (ratio - 1) ** 2 / (2 * delta)
            pairs.append((value, d * (A - abs(A) * q * (ratio - 1) / delta)))
        elif cfg.surrogate == "sapo":
            tau = 1.0 if A > 0 else 1.05
            gate = 1 / (1 + math.exp(min(700.0, -tau * (ratio - 1))))
            pairs.append((4 / tau * gate * A, 4 * gate * (1 - gate) * d * A))
        else:
            pairs.append(clipped(ratio, d, A, low, high, cfg.dual_clip))
    return [v for v, _ in pairs], [d for _, d in pairs], False


def may_move(logp: float, base: float, A: float, low: float, high: float, name: str) -> bool:
    """DPPO: whether p_new is within its bound of p_base, or moves back to it."""
    p, q = math.exp(logp), math.exp(base)
    far = abs(p - q) if name == "dppo_tv" else q * (base - logp) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return (p <= q or far <= high) if A >= 0 else (p >= q or far <= low)


def clipped(ratio: float, d: float, A: float, low: float, high: float, dual: float) -> tuple[float, float]:
    """min(r A, clip(r) A), and at least dual A for A < 0. d: derivative of r."""
    if low == high == INF:
        return ratio * A, d * A
    plain, cut = ratio * A, min(max(ratio, 1 - low), 1 + high) * A
    value, slope = (plain, d * A) if plain <= cut else (cut, 0.0)
    if dual and A < 0 and value < dual * A:
        return dual * A, 0.0
    return value, slope


def log_base(token: Token, r: Response, responses: list[Response], cfg) -> float:
    """log of p_new's denominator."""
    if cfg.ratio_base != "group":
        return math.log(getattr(token, cfg.ratio_base)[token.id])
    q = [geometric(other, "inf") for other in responses if other.group == r.group and other.on]
    E = sum(x * x for x in q) / sum(q)
    variance = mean([(x - mean(q)) ** 2 for x in q])
    e = min(max(cfg.gepo_defence * variance, 0.0), 0.99)
    return math.log(e * geometric(r, "new") + (1 - e) * E)


def geometric(r: Response, policy: str) -> float:
    """exp(mean log p)."""
    return math.exp(mean([math.log(getattr(token, policy)[token.id]) for token in r.on]))


def cppo(r: Response, responses: list[Response], of_token: float, cfg) -> tuple[float, list[float]]:
    """beta times this response's part of the mean over sequences of mean over tokens of e^d - d - 1, and its slopes.
    k2: d^2 / 2, and the chosen reduction, with this share of each token."""
    of_mean = 1 / sum(len(other.on) > 0 for other in responses) / max(1, len(r.on))
    total, slopes = 0.0, []
    for token in r.on:
        x = -log_ratio(token, "new", "inf")
        d = clamp(x, cfg.log_ratio_clamp)
        if cfg.cppo_kl == "k2":
            share, value, slope = of_token, x * x / 2, -x
        else:
            share, value, slope = of_mean, math.exp(d) - d - 1, 1 - math.exp(d) if d == x else 0.0
        total += cfg.cppo_beta * share * value
        slopes.append(cfg.cppo_beta * share * slope)
    return total, slopes


def kl_to_start(r: Response, responses: list[Response], scale: list[float], cfg) -> tuple[list[float], list[float]]:
    """(terms, slopes) of the KL in the loss: each token's estimate times share, weight and mask (`scale`) and the
    surrogate's unclipped ratio."""
    if not cfg.kl_coef or not r.on:
        return [], [0.0] * len(r.on)
    terms, slopes = [], []
    logs = [math.log(token.new[token.id]) - log_base(token, r, responses, cfg) for token in r.on]
    if cfg.surrogate in ("gspo", "tbpo", "gmpo"):
        logs = [mean(logs)] * len(logs)
    for token, x, part in zip(r.on, logs, scale, strict=True):
        ratio = 1.0 if cfg.surrogate == "reinforce" else math.exp(clamp(x, cfg.log_ratio_clamp))
        away = log_ratio(token, "new", "start")
        terms.append(part * ratio * cfg.kl_coef * away**2 / 2)
        slopes.append(part * ratio * cfg.kl_coef * away)
    return terms, slopes


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p)


# -- The actor: PPO and distillation ----------------------------------------------------------------------------------


def actors_part(result: Result, responses: list[Response], adv, share, distill_lambda: float, cfg) -> list[float]:
    """The terms of -J_PPO(actor), weight F(p_actor,ref / p_inf), and of lambda_distill KL; derivatives into result."""
    terms = []
    unlike_ppo = ("gspo", "tbpo", "gmpo", "dppo_tv", "dppo_kl", "drpo")
    low, high = (0.2, 0.28) if cfg.surrogate in unlike_ppo else (cfg.clip_low, cfg.clip_high)
    for i, r in enumerate(responses):
        weighed = correct("tis", r, "actor_ref", Bounds(cap=2.0), cfg.log_ratio_clamp, adv[i])
        for token, (w, k) in zip(r.on, weighed, strict=True):
            x = log_ratio(token, "actor", "actor_ref")
            ratio = math.exp(clamp(x, cfg.log_ratio_clamp))
            d = math.exp(x) if abs(x) < cfg.log_ratio_clamp else 0.0
            value, slope = clipped(ratio, d, adv[i], low, high, 0.0)
            terms.append(-share[i] * k * w * value)
            result.actor[i].append(-share[i] * k * w * slope)
            terms.append(share[i] * distill_lambda * kl(token.new, token.actor))
            result.distill[i].append(share[i] * distill_lambda)
    return terms


def kl(p: list[float], q: list[float]) -> float:
    """KL(policy || actor)."""
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))


# -- Derivatives in logits --------------------------------------------------------------------------------------------


def policy_logits(token: Token, g: float, g_entropy: float, temperature: float) -> list[float]:
    """d logp(token) / d logit = (onehot - p) / temperature; d H / d logit = -p (log p + H) / temperature."""
    H = entropy(token.new)
    bonus = [-g_entropy * p * (math.log(p) + H) for p in token.new]
    return [(g * ((x == token.id) - p) + bonus[x]) / temperature for x, p in enumerate(token.new)]


def actor_logits(token: Token, g: float, g_distill: float, temperature: float) -> list[float]:
    """Gradients of PPO and distillation in the actor's logits: by the chain rule, one logit at a time."""
    q, p = token.actor, token.new
    slopes = [-a / b for a, b in zip(p, q, strict=True)]
    average = sum(b * a for b, a in zip(slopes, q, strict=True))  # d q_y / d logit_x = q_y ((x == y) - q_x)
    out = []
    for x in range(len(q)):
        out.append((g * ((x == token.id) - q[x]) + g_distill * q[x] * (slopes[x] - average)) / temperature)
    return out
