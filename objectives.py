"""Objectives: a loss is one correction times one surrogate, reduced once.

    loss = - reduce( keep * sg(weight) * surrogate )

    correction   a detached weight and a keep-mask per token (corrections.py, obrs.py)
    surrogate    objective that is maximised, with a trust region
    reduction    denominator of the sum, the same for all ranks and micro-batches

Policies: `inf` sampled; it can differ from the learner in engine, actor, precision, staleness or
sampling settings. `ref` is the learner before the first update on this rollout batch, `new` is the
learner now.

Presets are in presets.py, advantages in batching.py. `python objectives.py` prints all names with
formula and source. `prepare` runs once per optimizer step, over all ranks, before any backward
pass, `loss` for each micro-batch, `update_controllers` after the step.

Jackpot: `obrs.correction` computes a, keep, w and rho; `ppo` is the surrogate; `loss` multiplies.
"""

from __future__ import annotations

import functools
import inspect
import math
import textwrap
from dataclasses import dataclass, fields, replace

import torch

import corrections
import obrs
from batching import optimal_token_baseline
from config import Config, LossFlags, ObjectiveFlags
from corrections import (
    CLAMP,
    CORRECTIONS,
    USES_Z,
    apply_correction,
    call,
    can_drop,
    geo_ratio,
    seq_mean,
    token_ratio,
)
from machinery.flags import choice, need, run_command
from presets import DEFAULTS, FRAMEWORKS, PAPERS

# -- Surrogates: -> (value to maximise (B, T), clipped (B, T) bool, ratio (B, T) or None)
#
# log_ratio: log p_new - log p_base, (B, T), with gradient; adv (B, 1) or (B, T); low, high: the
# trust region of the ratio is [1 - low, 1 + high] (gmpo bounds log s, dppo a divergence, drpo
# p_new - p_base); infinite: no bound.


def reinforce(logp, adv):
    """A log p_new. REINFORCE."""
    return logp * adv, torch.zeros_like(logp, dtype=torch.bool), None


def ppo(log_ratio, adv, low=0.2, high=0.28, dual_clip=0.0, clamp=CLAMP):
    """min(s A, clip(s, 1 - low, 1 + high) A), s = p_new / p_base. PPO, GRPO, DAPO.

    dual_clip: lower bound dual_clip A of the value if A < 0; 0: off."""
    s = token_ratio(log_ratio, clamp)
    value, clipped = clip_surrogate(s, adv, low, high, dual_clip)
    return value, clipped, s


def gspo(log_ratio, mask, adv, low=3e-4, high=4e-4, dual_clip=0.0, clamp=CLAMP):
    """PPO on g = exp(mean_t log s), one ratio per response. GSPO (GEPO Eq. 7); GEPO Eq. 12 with
    --ratio_base=group."""
    g = geo_ratio(log_ratio, mask, clamp)
    value, clipped = clip_surrogate(g, adv, low, high, dual_clip)
    return value.expand_as(log_ratio), clipped.expand_as(mask), g.expand_as(log_ratio)


def tbpo(log_ratio, mask, adv, low=3e-4, high=4e-4, tbpo_neg_high=7e-4, clamp=CLAMP):
    """clip(g) A, g = exp(mean_t log s), without PPO's min: a response outside the band has no
    gradient. QaRL 3.2.

    Band: g <= 1 + high if A >= 0; 1 - low <= g <= 1 + tbpo_neg_high if A < 0: clusters of tokens of
    low probability would make g large."""
    g = geo_ratio(log_ratio, mask, clamp)
    lowest = torch.where(adv >= 0, g.new_full((), -math.inf), g.new_full((), 1 - low))
    highest = torch.where(
        adv >= 0, g.new_full((), 1 + high), g.new_full((), 1 + tbpo_neg_high)
    )
    band = torch.minimum(torch.maximum(g, lowest), highest)
    in_band = (g >= lowest) & (g <= highest)
    value = torch.where(in_band, g, band.detach()) * adv
    return (
        value.expand_as(log_ratio),
        (~in_band).expand_as(mask),
        g.expand_as(log_ratio),
    )


def sapo(log_ratio, adv, clamp=CLAMP):
    """(4 / tau) sigmoid(tau (s - 1)) A, tau = 1.0 if A > 0, else 1.05. QaRL D.4, arXiv
    2511.20347."""
    s = token_ratio(log_ratio, clamp)
    tau = torch.where(
        adv > 0, log_ratio.new_full((), 1.0), log_ratio.new_full((), 1.05)
    )
    value = 4.0 / tau * torch.sigmoid(tau * (s - 1.0)) * adv
    return value, torch.zeros_like(value, dtype=torch.bool), s


def gmpo(log_ratio, mask, adv, low=0.4, high=0.4, clamp=CLAMP):
    """exp(mean_t x_t) A, x = min(log s, high) if A >= 0, max(log s, -low) if A < 0. GMPO, arXiv
    2507.20673; verl's geo_mean.

    exp(mean_t x_t) is the geometric mean of PPO's clipped ratios, with bounds on log s. The
    returned ratio g is the geometric mean of the unclipped ratios."""
    bounded = torch.where(
        adv >= 0, log_ratio.clamp_max(high), log_ratio.clamp_min(-low)
    )
    g, value = geo_ratio(log_ratio, mask, clamp), geo_ratio(bounded, mask, clamp) * adv
    return value.expand_as(log_ratio), bounded != log_ratio, g.expand_as(log_ratio)


def dppo(logp, base, adv, low=0.2, high=0.2, divergence="tv", clamp=CLAMP):
    """s A, but 0 if the gap |p_new - p_base| (or the KL) exceeds the bound and A increases the gap.

    Nonzero terms: p_new <= p_base or gap <= high if A >= 0; p_new >= p_base or gap <= low if A < 0.
    gap: tv, |p_new - p_base|; kl, p log(p / p_new) + (1 - p) log((1 - p) / (1 - p_new)), p =
    p_base, the binary KL (this token or not). DPPO, arXiv 2602.04879, Eq. 13, 14 as SkyRL cites
    them; tv with --ratio_base=inf is the mask of prime-rl's default loss."""
    s = token_ratio(logp - base, clamp)
    p, p_new = base.exp(), logp.detach().exp()
    if divergence == "kl":
        gap = (
            p * (base - logp.detach())
            + (1 - p) * ((1 - p + 1e-8) / (1 - p_new + 1e-8)).log()
        )
    else:
        gap = (p_new - p).abs()
    outside = torch.where(
        adv >= 0, (p_new > p) & (gap > high), (p_new < p) & (gap > low)
    )
    return torch.where(outside, 0.0, s * adv), outside, s


def drpo(logp, base, adv, high=12.5, clamp=CLAMP):
    """s A - |A| p_base (s - 1)^2 / (2 high): dppo_tv with a smooth bound. DRPO, arXiv 2606.09821,
    Eq. 8, with --ratio_base=inf.

    Its gradient in log p_new is s (A - |A| (p_new - p_base) / high): 0 at the bound; beyond the
    bound it points back to p_base. A probability changes by at most 1, so the paper's 12.5 changes
    weights by at most 8 %."""
    s = token_ratio(logp - base, clamp)
    p = base.exp()
    outside = (torch.sign(adv) * (logp.detach().exp() - p)) > high
    return s * adv - adv.abs() * p * (s - 1).square() / (2 * high), outside, s


def cispo(log_ratio, logp, adv, low=0.2, high=0.28, clamp=CLAMP):
    """sg(clip(s, 1 - low, 1 + high)) A log p_new: clipped tokens keep a gradient. MiniMax-M1."""
    s = token_ratio(log_ratio, clamp).detach()
    bounded = s.clamp(1 - low, 1 + high)
    return bounded * adv * logp, bounded != s, s


def clip_surrogate(s, adv, low, high, dual_clip=0.0):
    """(PPO's clipped value, mask of clipped entries), both of the shape of s."""
    plain = s * adv
    cut = s.clamp(1 - low, 1 + high) * adv
    value = torch.minimum(plain, cut)
    clipped = cut < plain
    if dual_clip > 0:
        floor = dual_clip * adv
        clipped = clipped | ((adv < 0) & (value < floor))
        value = torch.where(adv < 0, torch.maximum(value, floor), value)
    return value, clipped


# one row per surrogate; arguments are passed by parameter name (corrections.call), low and high
# from --clip_low and --clip_high, with defaults from CLIPS
SURROGATES = {
    "reinforce": reinforce,
    "ppo": ppo,
    "gspo": gspo,
    "tbpo": tbpo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo_tv": dppo,
    "dppo_kl": functools.partial(dppo, divergence="kl"),
    "drpo": drpo,
    "cispo": cispo,
}


def surrogate_of(logp, base, adv, mask, cfg: LossFlags):
    """(value to maximise, clip mask, ratio) of --surrogate. base: log p_base, (B, T)."""
    bounds = {"low": cfg.clip_low, "high": cfg.clip_high}
    if not cfg.clip:
        bounds = dict.fromkeys(("low", "high", "tbpo_neg_high"), math.inf)
    return call(
        SURROGATES[cfg.surrogate],
        cfg,
        logp=logp,
        base=base,
        log_ratio=logp - base,
        adv=adv,
        mask=mask,
        clamp=cfg.log_ratio_clamp,
        **bounds,
    )


DISTILL_GAIN = 0.1  # closed loop: largest change of log(distill_lambda) in one update
DISTILL_LAMBDA_MAX = 100.0  # closed loop: upper bound of distill_lambda
CLIP = (0.2, 0.28)  # default eps_low, eps_high
CLIPS = {"gspo": (3e-4, 4e-4), "tbpo": (3e-4, 4e-4)}  # of a length-normalised ratio
# bounds of log s (gmpo), a divergence (dppo) and p_new - p_base (drpo)
CLIPS |= {
    "gmpo": (0.4, 0.4),
    "dppo_tv": (0.2, 0.2),
    "dppo_kl": (0.05, 0.05),
    "drpo": (12.5, 12.5),
}


def unregularised(cfg: Config):
    """The flags with kl_coef and entropy_coef at 0: worth.py scores corrections without them."""
    return replace(cfg, kl_coef=0.0, entropy_coef=0.0)


# -- Once per optimizer step, before any backward


@dataclass
class StepStats:
    """Statistics of all tokens of an optimizer step, over all ranks, before the first backward
    pass."""

    tokens: float  # tokens that may carry a gradient
    sequences: float  # responses with at least one such token
    lam: float  # OBRS's lambda: --obrs_lambda, or solved for --obrs_accept_rate
    kappa: float  # scale of Z_low or Z_approx
    distill_lambda: float  # weight of the distillation loss
    # (B, 1) proposed denominator / kept denominator
    kept_factor: torch.Tensor | None = None
    # (B, 1) GEPO's log E of each response's group
    log_group_mean: torch.Tensor | None = None
    mixing: torch.Tensor | None = None  # (B, 1) GEPO's e
    # largest statistic that a rejection over the batch keeps
    largest_kept: float = math.inf

    def select(self, rows) -> StepStats:
        """The statistics for a micro-batch of these rows."""
        per_response = ("kept_factor", "log_group_mean", "mixing")
        chosen = {
            k: getattr(self, k)[rows]
            for k in per_response
            if getattr(self, k) is not None
        }
        return replace(self, **chosen)


def needs_ref_pass(cfg: Config, controllers: dict, updates: int) -> bool:
    """Whether this rollout batch needs a ref pass before its first update.

    With one update per batch, `ref` is the policy of this update, so the update's forward pass
    replaces the ref pass, unless a statistic over all ranks is needed before the first backward
    pass: kappa, a budget's lambda, the kept denominator, a bound over the batch, a baseline over
    the group. With an actor or --obrs_z=approx, OBRS without exact Z always has a ref pass, because
    the pass may add the policy's top-K to the support."""
    kept = cfg.loss_denominator == "kept" and can_drop(cfg)
    otb = cfg.advantage == "otb"
    budget = cfg.correction in USES_Z and cfg.obrs_accept_rate
    if (
        updates > 1
        or kept
        or otb
        or budget
        or corrections.batch_rejection(cfg) is not None
    ):
        return True
    if cfg.correction not in USES_Z or cfg.obrs_z == "exact":
        return False
    own_topk = cfg.actor != "none" or cfg.obrs_z == "approx"
    return cfg.obrs_target == "ref" or controllers.get("kappa") is None or own_topk


def prepare(batch, comm, cfg: LossFlags, controllers: dict) -> StepStats:
    """The statistics of one optimizer step over all ranks. With --advantage=otb it also replaces
    the batch's advantages.

    batch: this rank's share of the step; comm.sum and comm.cat reduce over ranks; controllers:
    state of earlier steps (`update_controllers`)."""
    lengths = batch.mask.sum(1)
    tokens, sequences = comm.sum([batch.mask.sum(), (lengths > 0).sum()])
    stats = StepStats(
        tokens=max(tokens, 1.0),
        sequences=max(sequences, 1.0),
        lam=cfg.obrs_lambda,
        kappa=1.0,
        distill_lambda=controllers.get("distill", cfg.distill_lambda),
    )
    if cfg.ratio_base == "group":
        prepare_group(stats, batch, cfg)
    if cfg.correction in USES_Z:
        prepare_obrs(stats, batch, comm, cfg, controllers)
    if of_batch := corrections.batch_rejection(cfg):
        row, bound = of_batch
        values = row.statistic(batch.log_r, cfg.log_ratio_clamp)[batch.mask]
        stats.largest_kept = corrections.largest_kept(comm.cat(values), bound)
    if cfg.advantage == "otb":
        weight, keep, _ = apply_correction(None, batch, stats, cfg)
        if cfg.ratio_base == "inf":
            weight = weight * token_ratio(batch.log_r, cfg.log_ratio_clamp)
        batch.adv = optimal_token_baseline(
            batch.reward,
            batch.group,
            batch.logp_ref,
            batch.sum_p2_ref,
            batch.mask & (keep > 0),
            (weight * keep).expand_as(batch.logp_ref),
        ).to(batch.reward)
    if cfg.loss_denominator == "kept" and can_drop(cfg):
        prepare_kept(stats, batch, comm, cfg)
    return stats


def prepare_group(stats: StepStats, batch, cfg: ObjectiveFlags) -> None:
    """Compute GEPO's group expectation and mixing coefficient, from whole groups."""
    log_q = seq_mean(batch.logp_inf.double(), batch.mask)[:, 0]
    log_q = log_q.masked_fill(batch.mask.sum(1) == 0, -math.inf)
    log_mean, mixing = corrections.group_expectation(
        log_q, batch.group, cfg.gepo_defence
    )
    stats.log_group_mean, stats.mixing = log_mean[:, None], mixing[:, None]


def prepare_obrs(
    stats: StepStats, batch, comm, cfg: LossFlags, controllers: dict
) -> None:
    """Compute lambda for a budget; compute kappa, or take the previous update's kappa."""
    if cfg.obrs_accept_rate:
        ratios = token_ratio(batch.log_r, cfg.log_ratio_clamp)[batch.mask]
        stats.lam = obrs.solve_lambda(comm.cat(ratios), cfg.obrs_accept_rate)
    if cfg.obrs_z == "exact":
        return
    stats.kappa = controllers.get("kappa")
    if stats.kappa is None or cfg.obrs_target == "ref":
        accepted = obrs.acceptance(
            batch.logp_ref, batch.logp_inf, stats.lam, cfg.log_ratio_clamp
        )
        if cfg.obrs_mask == "bernoulli":
            accepted = (batch.mask_uniforms < accepted).to(accepted.dtype)
        summed, _ = obrs.z_bracket(
            batch.support_logp, batch.support_logp_ref, stats.lam
        )
        sums = comm.sum([x[batch.mask].sum() for x in (accepted, summed)])
        stats.kappa = obrs.kappa_from(*(x / stats.tokens for x in sums))


def prepare_kept(stats: StepStats, batch, comm, cfg: LossFlags) -> None:
    """Compute kept_factor, which replaces the denominator of proposed tokens by the denominator of
    kept tokens (`--loss_denominator=kept`)."""
    _, keep, _ = apply_correction(None, batch, stats, cfg)
    lengths = batch.mask.sum(1)
    kept = (keep.expand_as(batch.logp_inf) * batch.mask).sum(1)
    kept_tokens, kept_sequences = comm.sum([kept.sum(), (kept > 0).sum()])
    factor = torch.ones_like(lengths, dtype=torch.float64)
    if cfg.reduction == "token-mean":
        factor *= stats.tokens / kept_tokens if kept_tokens else 0.0
    else:
        factor *= stats.sequences / kept_sequences if kept_sequences else 0.0
    if cfg.reduction == "seq-mean-token-mean":
        factor *= torch.where(kept > 0, lengths / kept.double().clamp_min(1e-9), 0.0)
    stats.kept_factor = factor[:, None]


# -- For every micro-batch


def with_ref(new, batch):
    """The batch with ref columns. A batch without a ref pass uses this forward pass, detached, as
    ref."""
    if batch.logp_ref is not None:
        return batch
    return replace(batch, **columns_of(new.detach()))


def columns_of(new) -> dict:
    """The statistics of a forward pass that a batch stores, by column name."""
    return {REF[name]: value for name, value in new.known().items() if name in REF}


# statistic of a forward pass -> column of a batch
REF = {
    name: f"{name}_ref"
    for name in (
        "logp",
        "support_logp",
        "tail",
        "actor_logp",
        "z",
        "kl_after",
        "sum_p2",
    )
}
REF |= {"logp_start": "logp_start"}


def loss(new, batch, stats: StepStats, cfg: Config):
    """(unreduced loss (B, T) of one model, logs): - keep sg(weight) (surrogate - kl_coef sg(ratio)
    KL) - entropy_coef entropy + cppo_beta KL(new, inf).

    The KL term has the surrogate's mask, weight and ratio (the ratio without its clip). So the KL
    term and the surrogate weight contexts equally, and the KL is an expectation over tokens of
    p_new, if keep weight ratio = p_new / p_inf. The entropy is a property of the
    whole distribution, not of the sampled token, and has no weight. CPPO's KL has no weight either;
    with --cppo_kl=official it is averaged as in seq-mean-token-mean under every --reduction.

    new: TokenStats of this forward pass, with gradient; batch: the micro-batch, ref columns
    optional (`with_ref`); stats: from `prepare`."""
    batch = with_ref(new, batch)
    base = log_ratio_base(new, batch, stats, cfg)
    weight, keep, logs = apply_correction(new, batch, stats, cfg)
    weight, keep = weight.detach().expand_as(base), keep.detach().expand_as(base)
    adv = batch.adv.to(base.dtype)
    surrogate, clipped, ratio = surrogate_of(new.logp, base, adv, batch.mask, cfg)
    if cfg.positive_only:
        surrogate = surrogate * (batch.adv > 0)
    unreduced = -keep * weight * surrogate
    if cfg.kl_coef:
        on_new = keep * weight * (1.0 if ratio is None else ratio.detach())
        # k2: the mean of its gradient over tokens of p_new is the gradient of KL(new || start);
        # Schulman's k3 would have the gradient of KL(start || new), and k1 one of mean zero
        x = batch.logp_start - new.logp
        unreduced = unreduced + cfg.kl_coef * on_new * (x * x / 2)
    if stats.kept_factor is not None:
        unreduced = unreduced * stats.kept_factor.to(unreduced)
    if cfg.entropy_coef:
        unreduced = unreduced - cfg.entropy_coef * new.entropy
    if cfg.cppo_beta:
        sampler_kl = corrections.cppo_kl(
            new.logp, batch.logp_inf, cfg.cppo_kl, cfg.log_ratio_clamp
        )
        scale = 1.0
        if cfg.cppo_kl != "k2":
            scale = per_response_scale(batch.mask, stats, cfg, sampler_kl.dtype)
        unreduced = unreduced + cfg.cppo_beta * sampler_kl * scale
    # the surrogate's ratio is the importance weight here, so log it as `weight`
    if cfg.ratio_base in ("inf", "group"):
        weight = weight * ratio.detach()
    logs = {"weight": weight, "keep": keep, "clipped": clipped, **logs}
    return unreduced.masked_fill(~batch.mask, 0.0), logs


def log_ratio_base(new, batch, stats: StepStats, cfg: ObjectiveFlags):
    """log of the denominator of the surrogate's ratio, (B, T): p_ref, p_inf, p_new, or the group
    expectation."""
    if cfg.ratio_base == "ref":
        return batch.logp_ref
    if cfg.ratio_base == "inf":
        return batch.logp_inf
    if cfg.ratio_base == "new":
        return new.logp.detach()
    mean_logp = seq_mean(new.logp.detach(), batch.mask)
    log_mean, mixing = stats.log_group_mean.to(mean_logp), stats.mixing.to(mean_logp)
    return corrections.group_log_base(mean_logp, log_mean, mixing).expand_as(new.logp)


def joint_loss(new, batch, stats: StepStats, cfg: Config):
    """Unreduced loss and logs of all models. One model: `loss`. Two models: `loss` of the policy -
    J_PPO(actor) + lambda_distill KL(policy || actor); Jackpot Eq. 8 if the correction is OBRS.

    The actor's loss is standard PPO on the same trajectories with weight
    min(p_actor,ref / p_inf, 2), without OBRS (Eq. 6)."""
    batch = with_ref(new, batch)
    value, logs = loss(new, batch, stats, cfg)
    if new.actor_logp is None:
        return value, logs
    as_actor = replace(batch, logp_ref=batch.actor_logp_ref)
    of_actor = replace(stats, kept_factor=None)
    actor_loss, _ = loss(
        replace(new, logp=new.actor_logp), as_actor, of_actor, actor_config(cfg)
    )
    distill = new.distill_loss.masked_fill(~batch.mask, 0.0)
    value = value + actor_loss
    if stats.distill_lambda != 0:
        value = value + stats.distill_lambda * distill
    return value, {**logs, "actor_loss": actor_loss.detach()}


def actor_config(cfg: Config):
    """The actor's objective: PPO with weight F, a capped ratio p_actor,ref / p_inf (Jackpot Eq. 6).

    Reduction and log-ratio clamp are the policy's. The clip bounds are --clip_low and
    --clip_high, also with --clip=False, unless the policy's surrogate is in CLIPS. The advantages
    are the batch's."""
    low, high = CLIP if cfg.surrogate in CLIPS else (cfg.clip_low, cfg.clip_high)
    # all other flags of the objective have their defaults
    flags = {flag.name: flag.default for flag in fields(ObjectiveFlags)}
    flags |= DEFAULTS | PAPERS["tis"]
    flags |= {
        "is_cap": CORRECTIONS["tis"].bounds["is_cap"],
        "clip_low": low,
        "clip_high": high,
    }
    flags |= {"reduction": cfg.reduction, "log_ratio_clamp": cfg.log_ratio_clamp}
    return replace(cfg, **flags)


def reduce(unreduced, mask, stats: StepStats, cfg: Config):
    """This micro-batch's share of the loss; the shares of all micro-batches and ranks sum to the
    loss. Names are verl's.

    token-mean               sum / tokens
    seq-mean-token-mean      mean over responses of their token mean
    seq-mean-token-sum-norm  mean over responses of sum / max_tokens"""
    if cfg.reduction == "token-mean":
        return unreduced.sum() / stats.tokens
    per_token = cfg.max_tokens
    if cfg.reduction == "seq-mean-token-mean":
        per_token = mask.sum(1, keepdim=True).clamp_min(1)
    return (unreduced / per_token).sum() / stats.sequences


def per_response_scale(mask, stats: StepStats, cfg: Config, dtype):
    """(B, 1): factor that converts the chosen reduction into seq-mean-token-mean."""
    share = mask.sum(1, keepdim=True).clamp_min(1).to(dtype)
    if cfg.reduction == "token-mean":
        return stats.tokens / (stats.sequences * share)
    return 1.0 if cfg.reduction == "seq-mean-token-mean" else cfg.max_tokens / share


def update_controllers(controllers: dict, logged: dict, cfg: LossFlags) -> None:
    """Update the state for the next step: kappa, used with --obrs_target=new, and lambda_distill of
    the closed loop.

    Closed loop (proposed in Jackpot's Limitations): lambda_distill <- lambda_distill
    exp(DISTILL_GAIN e), e = clip((KL - target) / target, -1, 1), so that one step changes
    lambda_distill by a factor of at most exp(DISTILL_GAIN)."""
    # do not update the controllers from a skipped step
    if not logged.get("stepped", True):
        return
    if cfg.correction in USES_Z and cfg.obrs_z != "exact":
        z = logged["obrs/z_approx" if cfg.obrs_z == "approx" else "obrs/z_low"]
        if z > 0:
            controllers["kappa"] = obrs.kappa_from(logged["obrs/accept_rate"], z)
    kl, target = logged.get("distill_kl", math.nan), cfg.distill_kl_target
    if target > 0 and math.isfinite(kl):
        factor = math.exp(DISTILL_GAIN * max(-1.0, min(1.0, (kl - target) / target)))
        now = controllers.get("distill", cfg.distill_lambda) * factor
        controllers["distill"] = min(max(now, 1e-4), DISTILL_LAMBDA_MAX)


def default_bounds(cfg: ObjectiveFlags) -> dict:
    """Defaults that depend on other flags: caps, bounds and clips."""
    low, high = CLIPS.get(cfg.surrogate, CLIP)
    chosen = (CORRECTIONS.get(cfg.correction), corrections.REJECTIONS.get(cfg.reject))
    bounds = {
        name: value for row in chosen if row for name, value in row.bounds.items()
    }
    return {**bounds, "clip_low": low, "clip_high": high}


def check(cfg: Config) -> None:
    """Raise UserError, one sentence, if flags of the objective contradict each other."""
    choice("surrogate", cfg.surrogate, list(SURROGATES))
    corrections.check(cfg)
    base = f"--ratio_base={cfg.ratio_base}"
    need(
        cfg.ratio_base not in ("inf", "group") or cfg.correction == "none",
        f"{base} already corrects for the mismatch: use --correction=none instead of {cfg.correction}",
    )
    need(
        cfg.ratio_base != "group" or cfg.surrogate in ("gspo", "tbpo"),
        f"{base} divides the length-normalised probability of a response: it needs --surrogate=gspo or tbpo, "
        f"not {cfg.surrogate}",
    )
    need(
        cfg.gepo_defence == 0 or cfg.ratio_base == "group",
        f"--gepo_defence={cfg.gepo_defence}: mixes into the group's expectation; it needs --ratio_base=group",
    )
    need(
        cfg.ratio_base == "ref" or cfg.surrogate != "reinforce",
        f"{base}: --surrogate=reinforce has no ratio; use --surrogate=ppo",
    )
    need(
        cfg.dual_clip == 0
        or (cfg.dual_clip > 1 and cfg.clip and cfg.surrogate in ("ppo", "gspo")),
        f"--dual_clip={cfg.dual_clip}: needs a value above 1 (3 is usual), --clip=True and --surrogate=ppo or gspo",
    )
    if cfg.distill_kl_target > 0:
        need(
            0 < cfg.distill_lambda <= DISTILL_LAMBDA_MAX,
            f"--distill_lambda={cfg.distill_lambda}: --distill_kl_target starts from it; give a value above 0, at most "
            f"{DISTILL_LAMBDA_MAX:g}",
        )
        need(
            cfg.actor != "none",
            "--distill_kl_target: there is no actor to distil; name one with --actor",
        )


def catalogue() -> str:
    """All names with the first paragraphs of their docstrings, and the axes of each --objective."""
    lines = [
        "loss = - reduce( keep * sg(weight) * surrogate )",
        "r = p_ref / p_inf of a token, R of a response, R_t of its first t tokens; A: advantage;",
        "inf sampled, ref is the learner before the first update on a rollout batch;",
        "p_base: the policy of --ratio_base",
        "",
        "--correction: weight and keep-mask",
    ]
    for name, row in CORRECTIONS.items():
        bounds = "".join(f" --{flag}={value:g}" for flag, value in row.bounds.items())
        lines.append(entry(name, row.function, bounds))
    lines += [
        "",
        "--reject: drops tokens or responses with a statistic outside [--rs_low, --rs_high]",
        "  token: r; sequence: R; geo: exp(mean log r); seq_max, seq_min: largest and smallest r;",
        "  k2: (log r)^2 / 2; k3: r - 1 - log r; seq_sum_, seq_mean_, seq_max_: over a response;",
        "  seq_max_kl: largest KL(inf || ref) of a token; token_m2: (log r)^2; the largest",
        "  are dropped until the mean of the rest is at most --rs_high",
    ]
    lines += [
        f"  {name:17} --rs_low={row.low:g} --rs_high={row.high:g}"
        for name, row in corrections.REJECTIONS.items()
    ]
    lines += ["", "--surrogate: the value that the policy maximises"]
    lines += [entry(name, function) for name, function in SURROGATES.items()]
    for title, rows in {"papers, and ours": PAPERS, **FRAMEWORKS}.items():
        lines += ["", f"--objective: {title}"]
        for name, axes in rows.items():
            lines.append(
                f"  {name:27} "
                + "  ".join(f"{axis}={value}" for axis, value in axes.items())
            )
    return "\n".join(lines)


def entry(name: str, function, bounds: str = "") -> str:
    """A name and the first paragraph of its function's docstring."""
    function = getattr(function, "func", function)  # of a partial
    text = " ".join(inspect.getdoc(function).split("\n\n")[0].split()) + bounds
    return textwrap.fill(
        text, 100, initial_indent=f"  {name:17} ", subsequent_indent=" " * 20
    )


if __name__ == "__main__":
    run_command(lambda: print(catalogue()))
