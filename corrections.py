"""Corrections: what a token or a response may teach, when another policy sampled it.

    loss = - reduce( keep * sg(weight) * surrogate )          weight and keep come from here

The formulas are pure functions of (B, T) tensors and numbers: copy one into another framework and it works there.
Below them each has one row in a table, which says where its arguments come from. A new correction is a function
and a row; so is a new statistic to reject by. OBRS, Jackpot's correction, has a file of its own (obrs.py); GEPO's
group expectation, a base of the ratio, stands between the formulas and the table.

    log_r = log p_ref - log p_inf        inf: the policy that sampled; ref: the learner's at the start of this step
    r = exp(log_r)                       per token, (B, T)
    R = exp(sum_t log_r)                 per response, (B, 1)
    R_t = exp(sum_{s<=t} log_r_s)        per prefix of a response, (B, T)

Log-ratios are clamped to +- `clamp` (`--log_ratio_clamp`, 20) before exp, sequence sums after summing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import obrs
from flags import UserError, choice, need
from sampling import Sampling

CLAMP = obrs.CLAMP


# ---------------------------------------------------------------------------------------------------------------------
# Ratios from log-ratios (B, T): per token, or one number a response (B, 1)
# ---------------------------------------------------------------------------------------------------------------------


def token_ratio(log_r, clamp=CLAMP):
    """r = exp(log_r), (B, T)."""
    return log_r.clamp(-clamp, clamp).exp()


def seq_ratio(log_r, mask, clamp=CLAMP):
    """R = exp(sum_t log_r), (B, 1)."""
    return token_ratio(seq_sum(log_r, mask), clamp)


def prefix_ratio(log_r, mask, clamp=CLAMP):
    """R_t = exp(sum_{s<=t} log_r_s), (B, T): a response's ratio up to each token, that token with it."""
    return token_ratio((log_r * mask).cumsum(1), clamp)


def geo_ratio(log_r, mask, clamp=CLAMP):
    """exp(mean_t log_r) = R^(1/T), (B, 1): the same whatever the length."""
    return token_ratio(seq_mean(log_r, mask), clamp)


def token_k3(log_r, clamp=CLAMP):
    """r - 1 - log r >= 0, (B, T): each token's share of the k3 estimate of KL(inf || ref)."""
    x = log_r.clamp(-clamp, clamp).double()  # near 0 the two terms cancel: x^2 / 2 is left
    return (torch.expm1(x) - x).to(log_r.dtype)


def seq_mean_k3(log_r, mask, clamp=CLAMP):
    """The mean of token_k3 over a response, (B, 1)."""
    return seq_mean(token_k3(log_r, clamp), mask)


def seq_sum(x, mask):
    """Sum over a response's tokens, (B, 1)."""
    return (x * mask).sum(1, keepdim=True)


def seq_mean(x, mask):
    """Mean over a response's tokens, (B, 1); 0 for an empty response."""
    return seq_sum(x, mask) / mask.sum(1, keepdim=True).clamp_min(1)


def inside(x, low, high):
    """1 where low <= x <= high, else 0."""
    return ((x >= low) & (x <= high)).to(x.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Corrections: -> (weight, keep), each (B, T) or (B, 1). None of them carries gradient.
# ---------------------------------------------------------------------------------------------------------------------


def none(log_r):
    """weight 1, keep all."""
    return torch.ones_like(log_r), torch.ones_like(log_r)


def vanilla_is(log_r, clamp=CLAMP):
    """weight r, unbounded. AReaL's F(x) = x."""
    weight = token_ratio(log_r, clamp)
    return weight, torch.ones_like(weight)


def tis(log_r, cap, floor=0.0, clamp=CLAMP):
    """weight min(r, C): truncated importance sampling; C = 2. TIS."""
    weight = token_ratio(log_r, clamp).clamp(floor, cap)
    return weight, torch.ones_like(weight)


def icepop(log_r, low, high, clamp=CLAMP):
    """weight r, tokens outside low <= r <= high dropped. Jackpot section 2.2 (IceProp)."""
    r = token_ratio(log_r, clamp)
    return r, inside(r, low, high)


def areal_drop(log_r, cap, clamp=CLAMP):
    """weight r, tokens with r > C dropped. TIS text on AReaL."""
    r = token_ratio(log_r, clamp)
    return r, (r <= cap).to(r.dtype)


def z_tis(log_r, z, c1, clamp=CLAMP):
    """weight Z min(r, c1 / Z): OBRS in expectation, without its mask; the control for it (obrs.py)."""
    weight = (z * token_ratio(log_r, clamp)).clamp_max(c1)
    return weight, torch.ones_like(weight)


def seq_is(log_r, mask, clamp=CLAMP):
    """weight R. Praxis."""
    weight = seq_ratio(log_r, mask, clamp)
    return weight, torch.ones_like(weight)


def seq_tis(log_r, mask, cap, floor=0.0, clamp=CLAMP):
    """weight min(R, C), C = 4. Praxis Seq-TIS."""
    weight = seq_ratio(log_r, mask, clamp).clamp(floor, cap)
    return weight, torch.ones_like(weight)


def seq_mis(log_r, mask, low, high, clamp=CLAMP):
    """weight R, responses outside low <= R <= high dropped. Praxis section 6."""
    weight = seq_ratio(log_r, mask, clamp)
    return weight, inside(weight, low, high)


def prefix_tis(log_r, mask, cap, floor=0.0, clamp=CLAMP):
    """weight min(R_t, C), C = 1: truncated per-decision importance sampling.

    Without a cap E_inf[R_t X_t] = E_ref[X_t] for whatever X_t the first t tokens decide: what led to a token and the
    token are weighed as ref has them. What follows it decides the advantage alone and stays the sampler's, so the
    weight has t factors where R has all of them, and its variance less. The unbounded form is CTPO's ratio, arXiv
    2605.07331; the cap is that of tis, and it bounds what one response can do to a batch."""
    weight = prefix_ratio(log_r, mask, clamp).clamp(floor, cap)
    return weight, torch.ones_like(weight)


def retrace(log_r, mask, clamp=CLAMP):
    """weight prod_{s<=t} min(r_s, 1): the traces of Retrace(1), with the token's own ratio."""
    weight = prefix_ratio(log_r.clamp_max(0), mask, clamp)
    return weight, torch.ones_like(weight)


def retrace_seq(log_r, mask, clamp=CLAMP):
    """weight prod_{s<=t} min(r_s, 1) min(R, 1): what ref would not have said teaches little, whole or from there on.

    Of some sixty weights that are never negative no other beat it by more than its error, whoever sampled:
    results/search.md."""
    weight, keep = retrace(log_r, mask, clamp)
    return weight * seq_ratio(log_r, mask, clamp).clamp_max(1), keep


def geo_rs(log_r, mask, low, high, clamp=CLAMP):
    """weight 1, responses outside low <= exp(mean log r) <= high dropped. Praxis."""
    keep = inside(geo_ratio(log_r, mask, clamp), low, high)
    return torch.ones_like(keep), keep


def geo_rs_seq_tis(log_r, mask, cap, low, high, floor=0.0, clamp=CLAMP):
    """weight min(R, C) on the responses that geo_rs keeps. Praxis."""
    weight, _ = seq_tis(log_r, mask, cap, floor, clamp)
    _, keep = geo_rs(log_r, mask, low, high, clamp)
    return weight, keep


def tbpo_mismatch(log_r, mask, cap, floor=0.0, drop=False, clamp=CLAMP):
    """weight exp(mean log r), capped two-sided to [1/C, C], C = 2. QaRL section 3.2.

    drop: responses outside are dropped instead. floor: another lower bound than 1/C."""
    m, low = geo_ratio(log_r, mask, clamp), floor or 1 / cap
    if drop:
        return m, inside(m, low, cap)
    return m.clamp(low, cap), torch.ones_like(m)


# ---------------------------------------------------------------------------------------------------------------------
# GEPO's group expectation (the HeteroRL text, Eq. 9 to 15): another base of gspo's ratio, `--ratio_base=group`
#
# A delayed sampler's q may give a response a probability close to 0; then p / q explodes. GEPO divides by what q
# gives the group on average. p and q are length-normalised, one number a response:
#
#     p = exp(mean_t log p_new),  q = exp(mean_t log p_inf)
#     E = sum_group q^2 / sum_group q               Eq. 11, `weighted`: an estimate of E_q[q^2] / E_q[q]
#       = mean_group q                              `mean`: unbiased for E_q[q], which Eq. 11 is not
#     w = p / E                                     Eq. 12
#     w = p / (e sg(p) + (1 - e) E)                 Eq. 15, defensive mixing, e = clip(c Var_group q, 0, 0.99)
#
# The group is a prompt's, by its id, and E is made once a step from whole groups (objectives.prepare_group), so no
# micro-batch can split it. Everything stays in log space: extreme probabilities are finite.
#
# Theorem 1 says Var(p/q) - Var(p/E_q[q]) >= exp(KL(p||q)) - C for plain probabilities, neither length-normalised
# nor estimated. Its first half is Var(p/q) + 1 = sum p^2/q >= exp KL; where p and q are close the group's
# expectation may well be the worse weight. `python results/theorem1.py` draws both variances, exactly.
# ---------------------------------------------------------------------------------------------------------------------


def log_group_mean(mean_logp_inf, group, how: str = "weighted"):
    """log E of each response's group, (B,). Eq. 11, or the plain mean.

    mean_logp_inf: (B,), -inf for a response without tokens; group: (B,) ids. A group without any token has 0."""
    log_q = mean_logp_inf
    if how == "mean":
        count = torch.where(log_q == -math.inf, -math.inf, 0.0).to(log_q)
        log_mean = log_group_sum(log_q, group) - log_group_sum(count, group)
    else:
        log_mean = log_group_sum(2 * log_q, group) - log_group_sum(log_q, group)
    return log_mean.nan_to_num(0.0)


def log_group_sum(x, group):
    """log sum exp(x) over each response's group: x (B,) -> (B,)."""
    same = group[:, None] == group[None, :]
    return torch.where(same, x[None, :], -math.inf).logsumexp(1)


def group_mixing(mean_logp_inf, group, c: float):
    """e = clip(c Var q, 0, 0.99), (B,): population variance of q in the response's group. Eq. 15."""
    same = (group[:, None] == group[None, :]) & (mean_logp_inf > -math.inf)[None, :]
    q, n = mean_logp_inf.exp(), same.sum(1).clamp_min(1)
    mean = (same * q).sum(1) / n
    variance = (same * (q[None, :] - mean[:, None]) ** 2).sum(1) / n
    return (c * variance).clamp(0.0, 0.99)


def group_log_base(mean_logp_new, log_group_mean, mixing):
    """log of what p is divided by: log (e p + (1 - e) E), each (B, 1), no gradient. Eq. 15; with e = 0 Eq. 12."""
    return torch.logaddexp(mixing.log() + mean_logp_new, torch.log1p(-mixing) + log_group_mean)


def cppo_kl(logp_new, logp_inf, how: str, clamp: float):
    """exp(d) - d - 1 a token, (B, T), with gradient.

    official: d = log p_inf - log p_new, as the released code has it; under samples of inf its mean is chi2 - KL,
    no KL. k3: d = log p_new - log p_inf, whose mean is KL(inf || new)."""
    d = logp_inf - logp_new if how == "official" else logp_new - logp_inf
    d = d.clamp(-clamp, clamp)
    return d.exp() - d - 1


# ---------------------------------------------------------------------------------------------------------------------
# One row a correction: where its arguments come from, and what else the repository must know of it
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Correction:
    """apply: (new, batch, stats, cfg) -> (weight, keep), and for OBRS (weight, keep, what to log)."""

    apply: Callable
    bounds: dict = field(default_factory=dict)  # the flags that bound it, with their defaults: cap C, low <= . <= high
    drops: bool = False  # it rejects tokens or responses
    caps: str = ""  # what its C caps: "token" (r), "sequence" (R)
    band: str = ""  # what its --rs_low and --rs_high bound, where that is its weight: "token" or "sequence"
    obrs: bool = False  # it needs Z


def apply_obrs(new, batch, stats, cfg):
    """OBRS on one micro-batch: its target, that target's Z, then `obrs.correction`."""
    target = obrs.target_of(new, batch, cfg.obrs_target)
    z = obrs.token_z(target, batch.support_logp, stats.lam, stats.kappa, cfg.obrs_z)
    moves = cfg.obrs_target == "new" and cfg.correction != "jackpot_adjusted"  # else p_ref / p_tgt is 1, or left out
    weight, keep, accept = obrs.correction(
        target.logp,
        batch.logp_inf,
        batch.logp_ref if moves else None,
        z.used,
        batch.mask_uniforms,
        lam=stats.lam,
        c1=cfg.obrs_c1,
        c2=cfg.obrs_c2,
        expected=cfg.obrs_mask == "expected",
        mode=cfg.obrs_mode,
        clamp=cfg.log_ratio_clamp,
    )
    return weight, keep, obrs.obrs_logs(accept, z)


def apply_z_tis(new, batch, stats, cfg):
    """z_tis with the Z of OBRS, target ref."""
    z = obrs.token_z(obrs.target_of(new, batch, "ref"), batch.support_logp, stats.lam, stats.kappa, cfg.obrs_z)
    weight, keep = z_tis(batch.log_r, z.used, cfg.obrs_c1, cfg.log_ratio_clamp)
    accept = obrs.acceptance(batch.logp_ref, batch.logp_inf, stats.lam, cfg.log_ratio_clamp)
    return weight, keep, obrs.obrs_logs(accept, z)


CORRECTIONS = {
    "none": Correction(lambda new, b, stats, cfg: none(b.log_r)),
    "is": Correction(lambda new, b, stats, cfg: vanilla_is(b.log_r, cfg.log_ratio_clamp)),
    "tis": Correction(
        lambda new, b, stats, cfg: tis(b.log_r, cfg.is_cap, cfg.is_floor, cfg.log_ratio_clamp),
        bounds={"is_cap": 2.0},
        caps="token",
    ),
    # the same on p_new / p_inf, under the ratio p_new / sg(p_new): PPO's inner clip never acts. Jackpot 10.1
    "tis_adjusted": Correction(
        lambda new, b, stats, cfg: tis(new.logp.detach() - b.logp_inf, cfg.is_cap, cfg.is_floor, cfg.log_ratio_clamp),
        bounds={"is_cap": 2.0},
        caps="token",
    ),
    "icepop": Correction(
        lambda new, b, stats, cfg: icepop(b.log_r, cfg.rs_low, cfg.rs_high, cfg.log_ratio_clamp),
        bounds={"rs_low": 0.5, "rs_high": 5.0},
        band="token",
        drops=True,
    ),
    "areal_drop": Correction(
        lambda new, b, stats, cfg: areal_drop(b.log_r, cfg.is_cap, cfg.log_ratio_clamp),
        bounds={"is_cap": 5.0},
        caps="token",
        drops=True,
    ),
    "seq_is": Correction(lambda new, b, stats, cfg: seq_is(b.log_r, b.mask, cfg.log_ratio_clamp)),
    "seq_tis": Correction(
        lambda new, b, stats, cfg: seq_tis(b.log_r, b.mask, cfg.is_cap, cfg.is_floor, cfg.log_ratio_clamp),
        bounds={"is_cap": 4.0},
        caps="sequence",
    ),
    "prefix_tis": Correction(
        lambda new, b, stats, cfg: prefix_tis(b.log_r, b.mask, cfg.is_cap, cfg.is_floor, cfg.log_ratio_clamp),
        bounds={"is_cap": 1.0},
    ),
    "retrace": Correction(lambda new, b, stats, cfg: retrace(b.log_r, b.mask, cfg.log_ratio_clamp)),
    "retrace_seq": Correction(lambda new, b, stats, cfg: retrace_seq(b.log_r, b.mask, cfg.log_ratio_clamp)),
    "seq_mis": Correction(
        lambda new, b, stats, cfg: seq_mis(b.log_r, b.mask, cfg.rs_low, cfg.rs_high, cfg.log_ratio_clamp),
        bounds={"rs_low": 0.0, "rs_high": 4.0},
        band="sequence",
        drops=True,
    ),
    "geo_rs": Correction(
        lambda new, b, stats, cfg: geo_rs(b.log_r, b.mask, cfg.rs_low, cfg.rs_high, cfg.log_ratio_clamp),
        bounds={"rs_low": 0.9, "rs_high": 1.1},
        drops=True,
    ),
    "geo_rs_seq_tis": Correction(
        lambda new, b, stats, cfg: geo_rs_seq_tis(
            b.log_r, b.mask, cfg.is_cap, cfg.rs_low, cfg.rs_high, cfg.is_floor, cfg.log_ratio_clamp
        ),
        bounds={"is_cap": 4.0, "rs_low": 0.9, "rs_high": 1.1},
        caps="sequence",
        drops=True,
    ),
    "tbpo_mismatch": Correction(
        lambda new, b, stats, cfg: tbpo_mismatch(
            b.log_r, b.mask, cfg.is_cap, cfg.is_floor, cfg.tbpo_cap == "mask", cfg.log_ratio_clamp
        ),
        bounds={"is_cap": 2.0},
    ),
    "z_tis": Correction(apply_z_tis, obrs=True),
    "obrs": Correction(apply_obrs, drops=True, obrs=True),
    "jackpot_adjusted": Correction(apply_obrs, drops=True, obrs=True),
}
USES_Z = {name for name, row in CORRECTIONS.items() if row.obrs}


@dataclass(frozen=True)
class Rejection:
    """--reject: keep what has low <= statistic <= high. statistic: (log_r, mask, clamp) -> (B, T) or (B, 1)."""

    statistic: Callable
    bounds: dict


REJECTIONS = {
    "token": Rejection(lambda log_r, mask, clamp: token_ratio(log_r, clamp), {"rs_low": 0.5, "rs_high": 5.0}),
    "sequence": Rejection(seq_ratio, {"rs_low": 0.0, "rs_high": 4.0}),
    "geo": Rejection(geo_ratio, {"rs_low": 0.9, "rs_high": 1.1}),
    "token_k3": Rejection(lambda log_r, mask, clamp: token_k3(log_r, clamp), {"rs_low": 0.0, "rs_high": 0.1}),
    "seq_mean_k3": Rejection(seq_mean_k3, {"rs_low": 0.0, "rs_high": 0.1}),
}


def apply_correction(new, batch, stats, cfg):
    """(weight, keep, what to log) of the correction, and on top of it what `--reject` and `--veto` drop.

    reject_of: "negative" drops tokens of negative advantage alone: to push down what the policy would hardly say any
    more teaches it little, and moves it much. veto: a response in which one token has r below it is dropped whole."""
    weight, keep, *logs = CORRECTIONS[cfg.correction].apply(new, batch, stats, cfg)
    if cfg.reject != "none":
        statistic = REJECTIONS[cfg.reject].statistic(batch.log_r, batch.mask, cfg.log_ratio_clamp)
        kept = inside(statistic, cfg.rs_low, cfg.rs_high)
        keep = keep * (kept if cfg.reject_of == "all" else torch.where(batch.adv < 0, kept, 1.0))
    if cfg.veto > 0:
        low = (token_ratio(batch.log_r, cfg.log_ratio_clamp) < cfg.veto) & batch.mask
        keep = keep * ~low.any(1, keepdim=True)
    return weight, keep, logs[0] if logs else {}


def can_drop(cfg) -> bool:
    """Whether any token can be rejected."""
    masks = cfg.correction == "tbpo_mismatch" and cfg.tbpo_cap == "mask"
    return CORRECTIONS[cfg.correction].drops or masks or cfg.reject != "none" or cfg.veto > 0


def actor_is_sampler(cfg) -> bool:
    """Whether the learner's actor is the policy that sampled, up to the engine's arithmetic.

    Not where groups may come from older weights, where engine and learner round differently, or where the engine
    samples from a truncated distribution that the learner scores whole."""
    late = cfg.samplers != "local" or (cfg.delay != "none" and cfg.max_staleness != 0)
    rounded = cfg.learner_quant not in ("aligned", cfg.rollout_quant)
    cut = Sampling.of(cfg).truncates and cfg.keep_sampling_mask == "off"
    return not (late or rounded or cut)


def exact_z_known(cfg) -> bool:
    """Whether the learner sees both whole distributions of OBRS: two models, target ref, and no budget."""
    return cfg.actor != "none" and cfg.obrs_target == "ref" and not cfg.obrs_accept_rate and actor_is_sampler(cfg)


# ---------------------------------------------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------------------------------------------


def default_bounds(cfg) -> dict:
    """Defaults of the bounds that the chosen correction and rejection read."""
    rows = (CORRECTIONS.get(cfg.correction), REJECTIONS.get(cfg.reject))
    return {name: value for row in rows if row for name, value in row.bounds.items()}


def check(cfg) -> None:
    """UserError, one sentence: flags of corrections that contradict each other."""
    choice("correction", cfg.correction, list(CORRECTIONS))
    choice("actor_correction", cfg.actor_correction, [c for c in CORRECTIONS if c not in USES_Z | {"tis_adjusted"}])
    choice("reject", cfg.reject, ["none", *REJECTIONS])
    need(cfg.log_ratio_clamp > 0, f"--log_ratio_clamp={cfg.log_ratio_clamp}: must be above 0")
    check_caps(cfg)
    check_rejection(cfg)
    check_obrs(cfg)
    need(
        cfg.correction not in ("tis_adjusted", "jackpot_adjusted") or cfg.ratio_base == "new",
        f"--correction={cfg.correction} carries p_new / p_inf itself: it needs --ratio_base=new, not {cfg.ratio_base}",
    )
    need(
        cfg.correction != "tis_adjusted" or cfg.loss_denominator != "kept" or not can_drop(cfg),
        "--loss_denominator=kept must know what is dropped before the update, and --correction=tis_adjusted is known "
        "within it; use proposed",
    )


def check_caps(cfg) -> None:
    """The cap C of a weight, and its floor."""
    bounds = CORRECTIONS[cfg.correction].bounds
    for name in ("is_cap", "actor_is_cap"):
        value = getattr(cfg, name)
        need(value is None or value > 0, f"--{name}={value}: a cap of weights, above 0")
    if cfg.is_cap is not None and "is_cap" not in bounds:
        instead = "leave it out"
        if cfg.correction in USES_Z:
            instead = "use --obrs_c1"
        elif "rs_high" in bounds:
            instead = "use --rs_low and --rs_high"
        raise UserError(f"--is_cap={cfg.is_cap}: --correction={cfg.correction} has no cap C; {instead}")
    has_floor = "is_cap" in bounds and cfg.correction != "areal_drop"
    has = "has one" if has_floor else "has none"
    need(
        cfg.is_floor >= 0 and (cfg.is_floor == 0 or (has_floor and cfg.is_floor < cfg.is_cap)),
        f"--is_floor={cfg.is_floor}: a lower bound of a capped weight, below --is_cap={cfg.is_cap}; "
        f"--correction={cfg.correction} {has}",
    )
    need(
        cfg.correction != "tbpo_mismatch" or max(1.0, cfg.is_floor) < cfg.is_cap,
        f"--is_cap={cfg.is_cap}: tbpo_mismatch caps two-sided to [1/C, C], so C must be above 1",
    )


def check_rejection(cfg) -> None:
    """What --reject, --rs_low, --rs_high and --veto drop."""
    rejects = "rs_low" in CORRECTIONS[cfg.correction].bounds
    need(
        not (rejects and cfg.reject != "none"),
        f"--reject={cfg.reject}: --correction={cfg.correction} already rejects by --rs_low and --rs_high; "
        "use --correction=is, or --reject=none",
    )
    need(
        cfg.rs_low is None or cfg.rs_high is None or cfg.rs_low < cfg.rs_high,
        f"--rs_low={cfg.rs_low} --rs_high={cfg.rs_high}: the bounds are crossed; rs_low must be below rs_high",
    )
    need(
        (cfg.rs_low is None and cfg.rs_high is None) or rejects or cfg.reject != "none",
        f"--rs_low={cfg.rs_low} --rs_high={cfg.rs_high}: nothing is rejected by bounds here; name what to bound with "
        f"--reject={', '.join(REJECTIONS)}",
    )
    need(
        cfg.reject_of == "all" or cfg.reject != "none",
        f"--reject_of={cfg.reject_of}: nothing is rejected; add --reject={', '.join(REJECTIONS)}, or leave it out",
    )
    need(0 <= cfg.veto < 1, f"--veto={cfg.veto}: a ratio in [0, 1), such as 1e-4; 0 is off")


def check_obrs(cfg) -> None:
    """OBRS: its numbers, and what must be known before the update."""
    z, new = cfg.correction in USES_Z, cfg.obrs_target == "new"
    need(cfg.obrs_c1 > 0, f"--obrs_c1={cfg.obrs_c1}: must be above 0")
    need(cfg.obrs_c2 >= 1, f"--obrs_c2={cfg.obrs_c2}: caps p_ref / p_tgt, so at least 1")
    need(cfg.obrs_lambda > 0, f"--obrs_lambda={cfg.obrs_lambda}: lambda must be above 0 (1 is the usual value)")
    need(
        cfg.obrs_accept_rate is None or 0 < cfg.obrs_accept_rate <= 1,
        f"--obrs_accept_rate={cfg.obrs_accept_rate}: a budget lies in (0, 1]; leave it out to use --obrs_lambda",
    )
    need(
        cfg.correction != "jackpot_adjusted" or new,
        "--correction=jackpot_adjusted: its target is the policy now; use --obrs_target=new",
    )
    need(
        cfg.obrs_z != "exact" or exact_z_known(cfg),
        "--obrs_z=exact: the whole vocabulary is known only with an --actor, --obrs_target=ref, no --obrs_accept_rate, "
        "and samplers that are the learner's actor (no --delay, --samplers=local, low bits aligned, kept sets "
        "replayed); use bracket",
    )
    need(
        not (z and new and cfg.loss_denominator == "kept") or cfg.kappa == "exact",
        "--loss_denominator=kept with --obrs_target=new must know the mask before the update: add --kappa=exact",
    )
    need(
        not (z and new and cfg.obrs_accept_rate) or cfg.kappa == "exact",
        "--obrs_accept_rate with --obrs_target=new must know the policy before the update: add --kappa=exact",
    )
    need(
        cfg.correction != "z_tis" or not new, "--correction=z_tis is a control for target ref; leave --obrs_target=ref"
    )
    need(
        cfg.kappa != "exact" or new,
        "--kappa=exact is for --obrs_target=new; with target ref kappa always comes from the ref pass",
    )
