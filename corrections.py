"""Corrections: a weight and a keep-mask for each token or response that a different policy sampled.

    loss = - reduce( keep * sg(weight) * surrogate )          this file computes weight and keep

    log_r = log p_ref - log p_inf        inf: the policy that sampled; ref: the learner before the first
                                         update on this rollout batch
    r = exp(log_r)                       per token, (B, T)
    R = exp(sum_t log_r)                 per response, (B, 1)
    R_t = exp(sum_{s<=t} log_r_s)        per prefix of a response, (B, T)

Log-ratios are clamped to +- `clamp` (`--log_ratio_clamp`, 20) before exp, sequence sums after
summing.

Each correction is a pure function of tensors and numbers, and a row in CORRECTIONS. Arguments are
passed by parameter name (`call`): the batch's log_r, mask, adv, ..., or the flag with this name.
The flags is_cap, rs_low and rs_high take the function's defaults. `python objectives.py` prints the
first paragraph of each docstring. OBRS, Jackpot's correction, is in obrs.py."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import obrs
from config import RANGES, Config, LossFlags, ObjectiveFlags
from machinery.flags import choice, need, number
from sampling import Sampling

CLAMP = obrs.CLAMP
KPOP_EDGE = 1e-6  # probabilities are clamped to [edge, 1 - edge]

# -- Ratios from log-ratios (B, T): per token, or one number per response (B, 1)


def token_ratio(log_r, clamp=CLAMP):
    """r = exp(log_r), (B, T)."""
    return log_r.clamp(-clamp, clamp).exp()


def seq_ratio(log_r, mask, clamp=CLAMP):
    """R = exp(sum_t log_r), (B, 1)."""
    return token_ratio(seq_sum(log_r, mask), clamp)


def prefix_ratio(log_r, mask, clamp=CLAMP):
    """R_t = exp(sum_{s<=t} log_r_s), (B, T): the ratio of the tokens up to and including t."""
    return token_ratio((log_r * mask).cumsum(1), clamp)


def geo_ratio(log_r, mask, clamp=CLAMP):
    """exp(mean_t log_r) = R^(1/T), (B, 1): the geometric mean of the token ratios."""
    return token_ratio(seq_mean(log_r, mask), clamp)


def token_k2(log_r, clamp=CLAMP):
    """(log r)^2 / 2, (B, T): each token's term in the k2 estimate of KL(inf || ref). Schulman."""
    return log_r.clamp(-clamp, clamp) ** 2 / 2


def token_m2(log_r, clamp=CLAMP):
    """(log r)^2, (B, T)."""
    return 2 * token_k2(log_r, clamp)


def token_k3(log_r, clamp=CLAMP):
    """r - 1 - log r >= 0, (B, T): each token's term in the k3 estimate of KL(inf || ref)."""
    x = log_r.clamp(-clamp, clamp).double()  # near 0 the two terms cancel to x^2 / 2
    return (torch.expm1(x) - x).to(log_r.dtype)


def seq_sum(x, mask):
    """Sum over a response's tokens, (B, 1)."""
    return (x * mask).sum(1, keepdim=True)


def seq_mean(x, mask):
    """Mean over a response's tokens, (B, 1); 0 for an empty response."""
    return seq_sum(x, mask) / mask.sum(1, keepdim=True).clamp_min(1)


def seq_max(x, mask):
    """Maximum over a response's tokens of nonnegative values, (B, 1); 0 for an empty response."""
    return x.masked_fill(~mask, 0.0).amax(1, keepdim=True)


def seq_min(x, mask):
    """Minimum over a response's tokens, (B, 1); infinite for an empty response."""
    return x.masked_fill(~mask, math.inf).amin(1, keepdim=True)


def inside(x, low, high):
    """1 where low <= x <= high, else 0."""
    return ((x >= low) & (x <= high)).to(x.dtype)


# -- Corrections: -> (weight, keep), each (B, T) or (B, 1), without gradient.


def none(log_r):
    """weight 1, keep all: the mismatch is ignored. GRPO, PPO."""
    return torch.ones_like(log_r), torch.ones_like(log_r)


def vanilla_is(log_r, clamp=CLAMP):
    """weight r, unbounded. AReaL."""
    weight = token_ratio(log_r, clamp)
    return weight, torch.ones_like(weight)


def tis(log_r, is_cap=2.0, is_floor=0.0, clamp=CLAMP):
    """weight min(r, C), C = 2: truncated importance sampling. TIS; verl, TRL, slime, SkyRL,
    OpenRLHF, NeMo-RL."""
    weight = token_ratio(log_r, clamp).clamp(is_floor, is_cap)
    return weight, torch.ones_like(weight)


def icepop(log_r, rs_low=0.5, rs_high=5.0, clamp=CLAMP):
    """weight r, tokens outside low <= r <= high dropped. Jackpot section 2.2 (IceProp); verl,
    slime, SkyRL."""
    r = token_ratio(log_r, clamp)
    return r, inside(r, rs_low, rs_high)


def kpop(log_r, logp_inf, rs_low=0.0, rs_high=0.1, clamp=CLAMP):
    """weight r, tokens with max(D(p, q), D(q, p)) outside [low, high] dropped; D: binary KL (this
    token or not), p of the learner, q of the sampler. KPop (Ring); verl, AReaL, prime-rl."""
    q = logp_inf.exp().clamp(KPOP_EDGE, 1 - KPOP_EDGE)
    p = (logp_inf + log_r).exp().clamp(KPOP_EDGE, 1 - KPOP_EDGE)
    this, other = (p / q).log(), ((1 - p) / (1 - q)).log()
    forward = p * this + (1 - p) * other
    backward = -q * this - (1 - q) * other
    r = token_ratio(log_r, clamp)
    return r, inside(torch.maximum(forward, backward), rs_low, rs_high)


def areal_drop(log_r, is_cap=5.0, clamp=CLAMP):
    """weight r, tokens with r > C dropped. TRL's token_mask. According to the TIS post, AReaL drops
    the whole response: --objective=is --reject=seq_max:0:5."""
    r = token_ratio(log_r, clamp)
    return r, (r <= is_cap).to(r.dtype)


def z_tis(log_r, z, obrs_c1, lam=1.0, clamp=CLAMP):
    """weight Z min(r, c1 / Z): OBRS in expectation. Ours; the control for OBRS's mask."""
    weight = (z * token_ratio(log_r, clamp)).clamp_max(obrs_c1)
    return weight, torch.ones_like(weight), obrs.acceptance(log_r, 0.0, lam, clamp)


def seq_is(log_r, mask, clamp=CLAMP):
    """weight R, unbounded. Praxis."""
    weight = seq_ratio(log_r, mask, clamp)
    return weight, torch.ones_like(weight)


def seq_tis(log_r, mask, is_cap=4.0, is_floor=0.0, clamp=CLAMP):
    """weight min(R, C), C = 4. Praxis Seq-TIS; verl, TRL, slime, SkyRL."""
    weight = seq_ratio(log_r, mask, clamp).clamp(is_floor, is_cap)
    return weight, torch.ones_like(weight)


def seq_mis(log_r, mask, rs_low=0.0, rs_high=4.0, clamp=CLAMP):
    """weight R, responses outside low <= R <= high dropped. Praxis section 6; verl, TRL."""
    weight = seq_ratio(log_r, mask, clamp)
    return weight, inside(weight, rs_low, rs_high)


def prefix_tis(log_r, mask, is_cap=1.0, is_floor=0.0, clamp=CLAMP):
    """weight min(R_t, C), C = 1: truncated per-decision importance sampling.

    Without a cap, E_inf[R_t X_t] = E_ref[X_t] for every X_t that the first t tokens determine: the
    prefix up to t is reweighted to ref. Later tokens affect the term only through the advantage
    and keep the sampler's distribution. The weight has t factors, R has T, so the weight has less
    variance. The unbounded form is CTPO's ratio, arXiv 2605.07331. As in tis, the cap bounds the
    effect of one response on a batch."""
    weight = prefix_ratio(log_r, mask, clamp).clamp(is_floor, is_cap)
    return weight, torch.ones_like(weight)


def retrace(log_r, mask, clamp=CLAMP):
    """weight prod_{s<=t} min(r_s, 1): the traces of Retrace(1), including the ratio of token t."""
    weight = prefix_ratio(log_r.clamp_max(0), mask, clamp)
    return weight, torch.ones_like(weight)


def retrace_seq(log_r, mask, clamp=CLAMP):
    """weight min(R, 1) prod_{s<=t} min(r_s, 1): less than 1 if the token, an earlier token or the
    whole response is less likely under ref than under inf. Ours.

    Of 80 weights in results/worth.md, no nonnegative one that ignores the advantage beats
    retrace_seq by two standard errors."""
    weight, keep = retrace(log_r, mask, clamp)
    return weight * seq_ratio(log_r, mask, clamp).clamp_max(1), keep


def vespo(log_r, mask, adv, positive=(2.0, 3.0), negative=(3.0, 2.0), clamp=CLAMP):
    """weight R^k exp(lambda (1 - R)), 1 at R = 1 and highest at R = k / lambda. VESPO, arXiv
    2602.10693.

    positive, negative: (k, lambda) for A >= 0 and for A < 0. The formula and these numbers are
    TRL's (GRPOTrainer.get_gamma_weights), with R = p_new / p_inf (`--correction_target=new`)."""
    seq_log_r = seq_sum(log_r, mask).clamp(-clamp, clamp)
    k, lam = (
        torch.where(adv >= 0, a, b) for a, b in zip(positive, negative, strict=True)
    )
    weight = (k * seq_log_r + lam * (1 - seq_log_r.exp())).exp()
    return weight, torch.ones_like(weight)


def geo_rs(log_r, mask, rs_low=0.999, rs_high=1.001, clamp=CLAMP):
    """weight 1, responses outside low <= exp(mean log r) <= high dropped. Praxis; verl, SkyRL."""
    keep = inside(geo_ratio(log_r, mask, clamp), rs_low, rs_high)
    return torch.ones_like(keep), keep


def geo_rs_seq_tis(
    log_r, mask, is_cap=4.0, rs_low=0.999, rs_high=1.001, is_floor=0.0, clamp=CLAMP
):
    """weight min(R, C), responses outside low <= exp(mean log r) <= high dropped. Praxis; verl."""
    weight, _ = seq_tis(log_r, mask, is_cap, is_floor, clamp)
    _, keep = geo_rs(log_r, mask, rs_low, rs_high, clamp)
    return weight, keep


def tbpo_mismatch(log_r, mask, is_cap=2.0, is_floor=0.0, clamp=CLAMP):
    """weight exp(mean log r), clamped to [1/C, C], C = 2. QaRL section 3.2; AReaL's sequence ratio.

    is_floor: lower bound that replaces 1/C."""
    m = geo_ratio(log_r, mask, clamp).clamp(is_floor or 1 / is_cap, is_cap)
    return m, torch.ones_like(m)


# -- GEPO (HeteroRL, Eq. 9 to 15), `--ratio_base=group`: gspo's p divided by the group's
# expectation of q, because p / q diverges if a delayed sampler's q of a response is close to 0.
# p and q are length-normalised, one number per response:
#
#     p = exp(mean_t log p_new),  q = exp(mean_t log p_inf)
#     E = sum_group q^2 / sum_group q               Eq. 11, an estimate of E_q[q^2] / E_q[q]
#     w = p / E                                     Eq. 12
#     w = p / (e sg(p) + (1 - e) E)      Eq. 15, defensive mixing, e = clip(c Var_group q, 0, 0.99)
#
# E is computed once per step from whole groups (objectives.prepare_group), so micro-batches do not
# change E. E and w are computed in log space, so extreme probabilities stay finite.
#
# Theorem 1: Var(p/q) - Var(p/E_q[q]) >= exp(KL(p||q)) - const for plain probabilities, neither
# length-normalised nor estimated. Its first term has Var(p/q) + 1 = sum p^2/q >= exp KL. If p and
# q are close, the group expectation can be the worse weight.


def group_expectation(log_q, group, c: float):
    """(log E, e) of each response's group, both (B,): Eq. 11 and 15, with the population variance.

    log_q: (B,), mean log p_inf, -inf for a response without tokens; group: (B,) ids. log E is 0
    for a group without tokens."""
    same = (group[:, None] == group[None, :]) & (log_q > -math.inf)[None, :]
    sums = [torch.where(same, k * log_q, -math.inf).logsumexp(1) for k in (1, 2)]
    q, n = log_q.exp(), same.sum(1).clamp_min(1)
    mean = (same * q).sum(1) / n
    variance = (same * (q[None, :] - mean[:, None]) ** 2).sum(1) / n
    return (sums[1] - sums[0]).nan_to_num(0.0), (c * variance).clamp(0.0, 0.99)


def group_log_base(mean_logp_new, log_group_mean, mixing):
    """log of GEPO's denominator, log (e p + (1 - e) E), (B, 1), no gradient. Eq. 15; Eq. 12 if
    e = 0."""
    return torch.logaddexp(
        mixing.log() + mean_logp_new, torch.log1p(-mixing) + log_group_mean
    )


def cppo_kl(logp_new, logp_inf, how: str, clamp: float):
    """CPPO's KL between new and inf, (B, T), with gradient, d = log p_inf - log p_new.

    official: exp(d) - d - 1, as in the released code; its mean under inf is chi2 - KL, not a KL.
    k2: d^2 / 2 approximates the KL; prime-rl uses it, with --cppo_beta=0.002."""
    d = logp_inf - logp_new
    return d * d / 2 if how == "k2" else token_k3(d, clamp)


@dataclass(frozen=True)
class Correction:
    """A correction: its function, and the properties that other files use.

    function: (...) -> (weight, keep), or (weight, keep, accepted) if needs_z; arguments are passed
    by parameter name (`call`)."""

    function: Callable
    drops: bool = False  # the correction rejects tokens or responses
    # the correction needs OBRS's Z, a sum over the vocabulary (obrs.py)
    needs_z: bool = False
    plain: bool = False  # all weights are 1

    @functools.cached_property
    def bounds(self) -> dict[str, float]:
        """The flags that bound the weights or masks, with their defaults."""
        parameters = inspect.signature(self.function).parameters
        return {
            n: parameters[n].default
            for n in ("is_cap", "rs_low", "rs_high")
            if n in parameters
        }


def call(function, cfg: LossFlags, /, **known):
    """Call `function`; a parameter takes known[name], else the flag cfg.name, else its default."""
    values = {}
    for name in inspect.signature(function).parameters:
        if name in known:
            values[name] = known[name]
        elif hasattr(cfg, name):
            values[name] = getattr(cfg, name)
    return function(**values)


CORRECTIONS = {
    "none": Correction(none, plain=True),
    "is": Correction(vanilla_is),
    "tis": Correction(tis),
    "icepop": Correction(icepop, drops=True),
    "kpop": Correction(kpop, drops=True),
    "areal_drop": Correction(areal_drop, drops=True),
    "seq_is": Correction(seq_is),
    "seq_tis": Correction(seq_tis),
    "prefix_tis": Correction(prefix_tis),
    "retrace": Correction(retrace),
    "retrace_seq": Correction(retrace_seq),
    "seq_mis": Correction(seq_mis, drops=True),
    "geo_rs": Correction(geo_rs, drops=True, plain=True),
    "geo_rs_seq_tis": Correction(geo_rs_seq_tis, drops=True),
    "tbpo_mismatch": Correction(tbpo_mismatch),
    "vespo": Correction(vespo),
    "z_tis": Correction(z_tis, needs_z=True),
    "obrs": Correction(obrs.correction, drops=True, needs_z=True),
}
USES_Z = {name for name, row in CORRECTIONS.items() if row.needs_z}


@dataclass(frozen=True)
class Rejection:
    """--reject: keep tokens or responses with low <= statistic <= high.

    statistic: function of log_r, mask, clamp or the support, by parameter name -> (B, T) or (B, 1).
    of_batch: high bounds the statistic's mean over the kept tokens of the batch (`largest_kept`).
    needs_support: the statistic needs the engine's top-K."""

    statistic: Callable
    low: float = 0.0
    high: float = 0.1
    of_batch: bool = False
    needs_support: bool = False

    @property
    def bounds(self) -> dict[str, float]:
        """The default bounds, by flag."""
        return {"rs_low": self.low, "rs_high": self.high}


def largest_kept(x, bound: float) -> float:
    """The largest x_(k) with mean(x_(1), ..., x_(k)) <= bound, or the smallest x; x: (N,), sorted
    here. M2PO, arXiv 2510.01161: drop the largest (log r)^2 until the mean is small enough."""
    ordered = x.double().sort().values
    mean = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=x.device)
    # running means of ascending numbers do not decrease
    kept = max(int((mean <= bound).sum()), 1)
    return float(ordered[kept - 1]) if len(ordered) else math.inf


def of_response(estimate, aggregate):
    """Statistic of responses, (B, 1): the tokens' estimates, aggregated (sum, mean, max or min)."""
    return lambda log_r, mask, clamp: aggregate(estimate(log_r, clamp), mask)


def seq_max_kl(mask, support_logp, support_logp_ref):
    """The largest KL(inf || ref) of a response's tokens, (B, 1), over the tokens of the support and
    one token for all others. TRM, arXiv 2512.23075, bounds the KL over the whole vocabulary, which
    is at least this KL.

    support_logp: (B, T, S) log p_inf, -inf for entries to ignore; support_logp_ref: log p_ref."""
    on = support_logp.isfinite()
    p, p_ref = support_logp.exp(), support_logp_ref.exp() * on
    terms = torch.where(on, p * (support_logp - support_logp_ref), 0.0)
    outside = (1 - p.sum(-1)).clamp_min(1e-8)
    outside_ref = (1 - p_ref.sum(-1)).clamp_min(1e-8)
    kl = terms.sum(-1) + outside * (outside.log() - outside_ref.log())
    return seq_max(kl.clamp_min(0.0), mask)


# k2 and k3 estimate KL(inf || ref) and are nonnegative: their default lower bound is 0. The names
# of the k2 and k3 statistics are verl's; verl's token_k1, seq_sum_k1 and seq_mean_k1 are token,
# sequence and geo here
REJECTIONS = {
    "token": Rejection(token_ratio, 0.5, 5.0),
    "sequence": Rejection(seq_ratio, 0.0, 4.0),
    "geo": Rejection(geo_ratio, 0.9, 1.1),
    "seq_max": Rejection(of_response(token_ratio, seq_max), 0.0, 100.0),
    "seq_min": Rejection(of_response(token_ratio, seq_min), 1e-4, math.inf),
    "token_k2": Rejection(token_k2),
    "token_k3": Rejection(token_k3),
    "token_m2": Rejection(token_m2, 0.0, 0.04, of_batch=True),
    "seq_sum_k2": Rejection(of_response(token_k2, seq_sum)),
    "seq_sum_k3": Rejection(of_response(token_k3, seq_sum)),
    "seq_mean_k2": Rejection(of_response(token_k2, seq_mean)),
    "seq_mean_k3": Rejection(of_response(token_k3, seq_mean)),
    "seq_max_k2": Rejection(of_response(token_k2, seq_max)),
    "seq_max_k3": Rejection(of_response(token_k3, seq_max)),
    "seq_max_kl": Rejection(seq_max_kl, needs_support=True),
}


def rejections(cfg: ObjectiveFlags) -> list[tuple[Rejection, float, float]]:
    """(row of REJECTIONS, low, high) of each statistic in --reject.

    A single name has the bounds --rs_low and --rs_high. In a list, as in verl, each statistic has
    separate bounds: NAME:LOW:HIGH, or NAME with its default bounds. UserError: a statistic is
    unknown or its bounds are invalid."""
    if cfg.reject == "none":
        return []
    if cfg.reject in REJECTIONS:
        return [(REJECTIONS[cfg.reject], cfg.rs_low, cfg.rs_high)]
    parsed = []
    for part in cfg.reject.split(","):
        name, *numbers = part.split(":")
        choice("reject", name, list(REJECTIONS))
        row = REJECTIONS[name]
        bounds = [number(text) for text in numbers] or [*row.bounds.values()]
        need(
            len(bounds) == 2 and not any(map(math.isnan, bounds)),
            f"--reject={cfg.reject}: {part} is not a statistic with two bounds; write {name}:LOW:HIGH, such as "
            f"{name}:{row.bounds['rs_low']:g}:{row.bounds['rs_high']:g}",
        )
        low, high = bounds
        need(
            0 <= low < high and high >= RANGES["rs_high"][0],
            f"--reject={cfg.reject}: the bounds of {part} are crossed or too small; the first must be below the second",
        )
        parsed.append((row, low, high))
    return parsed


def weight_and_mask(new, batch, stats, cfg: LossFlags):
    """(weight, keep, logs) of --correction for one micro-batch."""
    row = CORRECTIONS[cfg.correction]
    of_obrs, logs = {}, {}
    if row.needs_z:
        logp_tgt, *sums = obrs.target_of(new, batch, cfg.obrs_target)
        logs = obrs.token_z(
            batch.support_logp, *sums, stats.lam, stats.kappa, cfg.obrs_z
        )
        of_obrs = {
            "z": logs["z"],
            "lam": stats.lam,
            "u": batch.mask_uniforms,
            "logp_tgt": logp_tgt,
        }
        # p_ref / p_tgt is needed only if the surrogate has the ratio p_new / p_ref
        moves = (
            cfg.obrs_target == "new"
            and cfg.ratio_base == "ref"
            and cfg.surrogate != "reinforce"
        )
        of_obrs["logp_ref"] = batch.logp_ref if moves else None
    weight, keep, *accepted = call(
        row.function,
        cfg,
        log_r=batch.log_r,
        logp_inf=batch.logp_inf,
        mask=batch.mask,
        adv=batch.adv,
        clamp=cfg.log_ratio_clamp,
        **of_obrs,
    )
    return weight, keep, {"accept": accepted[0], **logs} if accepted else {}


def apply_correction(new, batch, stats, cfg: LossFlags):
    """(weight, keep, logs) of the correction, combined with the drops of `--reject`.

    correction_target "new": ratios are p_new / p_inf instead of p_ref / p_inf. reject_of
    "negative": drop only tokens with negative advantage. With a lower bound of r these are tokens
    that the learner already makes less likely than the sampler: a further decrease has little
    benefit and changes the policy a lot."""
    if cfg.correction_target == "new":
        batch = replace(
            batch, logp_ref=new.logp.detach(), support_logp_ref=new.support_logp
        )
    weight, keep, logs = weight_and_mask(new, batch, stats, cfg)
    for row, low, high in rejections(cfg):
        high = stats.largest_kept if row.of_batch else high
        statistic = call(
            row.statistic,
            cfg,
            log_r=batch.log_r,
            mask=batch.mask,
            clamp=cfg.log_ratio_clamp,
            support_logp=batch.support_logp,
            support_logp_ref=batch.support_logp_ref,
        )
        kept = inside(statistic, low, high)
        if cfg.reject_of != "all":
            kept = torch.where(batch.adv < 0, kept, 1.0)
        keep = keep * kept
    return weight, keep, logs


def batch_rejection(cfg: ObjectiveFlags) -> tuple[Rejection, float] | None:
    """(row of REJECTIONS, bound of the mean) of the rejection over the batch; None without one."""
    return next(((row, high) for row, _, high in rejections(cfg) if row.of_batch), None)


def rejects_by_support(cfg: ObjectiveFlags) -> bool:
    """Whether a rejection needs the engine's top-K and the policy's probabilities of these
    tokens."""
    return any(row.needs_support for row, _, _ in rejections(cfg))


def topk_of(cfg: LossFlags) -> int:
    """Number of the engine's largest log-probabilities that are recorded with each token."""
    uses_z = cfg.correction in USES_Z and cfg.obrs_z != "exact"
    return cfg.obrs_topk if uses_z or rejects_by_support(cfg) else 0


def can_drop(cfg: ObjectiveFlags) -> bool:
    """Whether any token can be rejected."""
    return CORRECTIONS[cfg.correction].drops or cfg.reject != "none"


def actor_is_sampler(cfg: Config) -> bool:
    """Whether the actor's distribution equals the sampler's up to numerical noise.

    False if groups can come from older weights, if the engine rounds weights that the learner does
    not round (to 16 bits, or to low bits), or its KV cache, if the engine samples from a truncated
    distribution and the learner scores the full vocabulary, or if the engine records
    log-probabilities of a different temperature."""
    late = cfg.samplers != "local" or (cfg.delay != "none" and cfg.max_staleness != 0)
    rounded = (
        cfg.learner_quant not in ("aligned", cfg.rollout_quant)
        or cfg.rollout_dtype not in ("float32", cfg.dtype)
        or cfg.kv_cache_dtype != "auto"
    )
    cut = Sampling.of(cfg).truncates and cfg.keep_sampling_mask == "off"
    raw = cfg.logprobs_mode == "raw" and cfg.temperature != 1
    return not (late or rounded or cut or raw)


def exact_z_known(cfg: Config) -> bool:
    """Whether the learner can compute Z exactly: two models, target ref, no budget, and an actor
    that is the sampler."""
    of_ref = cfg.obrs_target == "ref" and not cfg.obrs_accept_rate
    return cfg.actor != "none" and of_ref and actor_is_sampler(cfg)


def still_read(axes: dict, cfg: ObjectiveFlags) -> dict:
    """The preset's values, minus bounds of a correction, rejection or surrogate that another flag
    overrides. axes: the preset."""
    other = {name for name in axes if getattr(cfg, name) not in (None, axes[name])}
    gone = {"clip_low", "clip_high"} if "surrogate" in other else set()
    for axis, rows in (("correction", CORRECTIONS), ("reject", REJECTIONS)):
        if axis in other and axes[axis] in rows:
            gone |= set(rows[axes[axis]].bounds)
    if cfg.reject == "none":
        gone.add("reject_of")
    return {name: value for name, value in axes.items() if name not in gone}


# the corrections that `dead_weights` warns about
OF_RESPONSES = (
    "seq_is",
    "seq_tis",
    "seq_mis",
    "geo_rs_seq_tis",
    "vespo",
    "prefix_tis",
    "retrace_seq",
)


def dead_weights(cfg: Config, logged: dict[str, float]) -> str:
    """A warning if more than nine tenths of the tokens are rejected, if response weights have an
    effective sample size below 2 responses or 1/16 of them, or if most are at the clamp; else "".
    logged: metrics of an update."""
    rejected = logged["rollout_corr/rollout_rs_masked_fraction"]
    kl = logged["rollout_corr/kl"]
    if rejected > 0.9:
        return (
            f"{100 * rejected:.3g} % of the tokens are rejected (KL {kl:.2g} a token): few tokens determine the "
            "update, or none; use token weights (--objective=tis)"
        )
    # clamped weights are equal, so their ESS is near 1 and means nothing
    clamped = logged["rollout_corr/seq_clamped_fraction"] > 0.5
    share = 0.0 if clamped else logged["rollout_corr/seq_eff_sample_size"]
    if cfg.correction not in OF_RESPONSES or share >= max(1 / 16, 2 / cfg.train_batch):
        return ""
    low = f"the response weights have a relative effective sample size of {share:.2g}"
    state = "most response weights are at the clamp" if clamped else low
    return (
        f"--correction={cfg.correction}: {state} (KL {kl:.2g} a token over {logged['response_length']:.0f} tokens): "
        "few responses determine the update; use token weights (--objective=tis) or OBRS (--objective=jackpot)"
    )


def check(cfg: Config) -> None:
    """Raise UserError, one sentence, if flags of corrections contradict each other."""
    choice("correction", cfg.correction, list(CORRECTIONS))
    rejections(cfg)
    check_bounds(cfg)
    need(
        cfg.obrs_c2 >= 1,
        f"--obrs_c2={cfg.obrs_c2}: caps p_ref / p_tgt, so it must be at least 1",
    )
    need(
        cfg.obrs_accept_rate is None or cfg.obrs_lambda == 1,
        f"--obrs_lambda={cfg.obrs_lambda}: --obrs_accept_rate={cfg.obrs_accept_rate} chooses lambda; leave "
        "out one of the two flags",
    )
    need(
        cfg.obrs_z != "exact" or exact_z_known(cfg),
        "--obrs_z=exact: Z can be computed exactly only with an --actor, --obrs_target=ref, no "
        "--obrs_accept_rate, and samplers identical to the learner's actor (no --delay, --samplers=local, the same "
        "quantization, --keep_sampling_mask=replay, --kv_cache_dtype=auto); use bracket",
    )
    need(
        cfg.correction != "z_tis" or cfg.obrs_target == "ref",
        "--correction=z_tis is a control for target ref; leave --obrs_target=ref",
    )
    check_target(cfg)


def check_target(cfg: LossFlags) -> None:
    """Check --correction_target, and that weights and masks are known before the update if a flag
    needs them."""
    of_new = cfg.correction_target == "new"
    uses_z = cfg.correction in USES_Z
    need(
        not (of_new and uses_z),
        f"--correction_target=new: --correction={cfg.correction} needs ref; leave the flag out (obrs: "
        "use --obrs_target=new)",
    )
    plain = CORRECTIONS[cfg.correction].plain or cfg.surrogate == "reinforce"
    need(
        not of_new or plain or cfg.ratio_base == "new",
        "--correction_target=new: weights p_new / p_inf replace the ratio; use --surrogate=reinforce or "
        f"--ratio_base=new, not {cfg.ratio_base}",
    )
    late = of_new or (uses_z and cfg.obrs_target == "new")
    early = {
        "loss_denominator=kept": cfg.loss_denominator == "kept" and can_drop(cfg),
        "advantage=otb": cfg.advantage == "otb",
        f"obrs_accept_rate={cfg.obrs_accept_rate}": uses_z
        and cfg.obrs_accept_rate is not None,
    }
    for flag, chosen in early.items():
        need(
            not (late and chosen),
            f"--{flag}: needs weights and masks before the update starts, but --correction_target=new and "
            "--obrs_target=new compute them during it; leave this flag out",
        )


def check_bounds(cfg: ObjectiveFlags) -> None:
    """Check --is_cap, --is_floor, --reject, --rs_low and --rs_high."""
    bounds = CORRECTIONS[cfg.correction].bounds
    need(
        cfg.is_cap is None or "is_cap" in bounds,
        f"--is_cap={cfg.is_cap}: --correction={cfg.correction} has no cap C; leave it out (OBRS has --obrs_c1, "
        "rejections have --rs_low and --rs_high)",
    )
    has_floor = (
        "is_floor" in inspect.signature(CORRECTIONS[cfg.correction].function).parameters
    )
    below = f"must be 0, or below --is_cap={cfg.is_cap}"
    never = f"must be 0, because --correction={cfg.correction} has no lower bound"
    need(
        cfg.is_floor == 0 or (has_floor and cfg.is_floor < (cfg.is_cap or math.inf)),
        f"--is_floor={cfg.is_floor}: {below if has_floor else never}",
    )
    need(
        cfg.correction != "tbpo_mismatch" or max(1.0, cfg.is_floor) < cfg.is_cap,
        f"--is_cap={cfg.is_cap}: tbpo_mismatch clamps to [1/C, C], so C must be above 1",
    )
    rejects = "rs_low" in bounds
    need(
        not (rejects and cfg.reject in REJECTIONS),
        f"--reject={cfg.reject}: --correction={cfg.correction} already rejects by --rs_low and --rs_high; give the "
        f"statistic separate bounds, --reject={cfg.reject}:LOW:HIGH, or use --reject=none",
    )
    need(
        cfg.rs_low is None or cfg.rs_high is None or cfg.rs_low < cfg.rs_high,
        f"--rs_low={cfg.rs_low} --rs_high={cfg.rs_high}: the bounds are crossed; rs_low must be below rs_high",
    )
    need(
        (cfg.rs_low is None and cfg.rs_high is None)
        or rejects
        or cfg.reject in REJECTIONS,
        f"--rs_low={cfg.rs_low} --rs_high={cfg.rs_high}: no statistic uses these bounds; add --reject=NAME, one of "
        f"{', '.join(REJECTIONS)}; or give each statistic its bounds: --reject=token:0.5:5,geo:0.9:1.1",
    )
    need(
        batch_rejection(cfg) is None or cfg.reject_of == "all",
        f"--reject={cfg.reject} --reject_of={cfg.reject_of}: token_m2 bounds the mean over all tokens that are kept; "
        "leave --reject_of out",
    )
    need(
        batch_rejection(cfg) is None or cfg.correction_target == "ref",
        f"--reject={cfg.reject}: token_m2 needs all ratios before the update starts; use --correction_target=ref",
    )
    need(
        cfg.advantage != "otb"
        or (cfg.reject_of == "all" and cfg.correction != "vespo"),
        "--advantage=otb: --reject_of=negative and --correction=vespo need the signs of the advantages before otb "
        "computes them; use a different --advantage",
    )
    need(
        cfg.reject_of == "all" or cfg.reject != "none",
        f"--reject_of={cfg.reject_of}: --reject is none; add --reject=NAME, one of "
        f"{', '.join(REJECTIONS)}; or leave --reject_of out",
    )
