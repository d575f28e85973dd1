"""Objectives: every loss in this repository is one correction times one surrogate, reduced once.

    loss = - reduce( keep * sg(weight) * surrogate )

  correction  a detached weight and a keep-mask per token, from three laws: `inf`, the one that sampled (engine, actor,
              precision, staleness, sampling), `ref`, the policy at the start of this step's updates, `new`, the policy now;
  surrogate   how `new` moves on the advantage inside its trust region;
  reduction   what the sum is divided by: one denominator over all ranks and micro-batching.

Everything here is a pure function of (B, T) tensors. All log-ratios are clamped to +-`--log_ratio_clamp` (20) before exp (sequence
sums after summing); r = p_ref / p_inf throughout. `prepare` runs once per optimizer step, over all ranks, before any backward; `loss`
is then called for each micro-batch; `finish` hands what must be remembered (kappa, the distillation loop) to the next step.

Jackpot's four lines: `obrs.correction` (a, keep, rho), `ppo` below, and the two lines of `loss` that multiply them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

import gepo
import obrs
from sampling import Sampling

CLAMP = obrs.CLAMP


# ---------------------------------------------------------------------------------------------------------------------
# Advantages: rewards (G,) of one group -> (G,). A group of equal rewards has advantage 0.
# ---------------------------------------------------------------------------------------------------------------------


def grpo(reward):
    """(R - mean) / (std + 1e-6), sample standard deviation. GRPO."""
    return grpo_no_std(reward) / (reward.std() + 1e-6) if len(reward) > 1 else torch.zeros_like(reward)


def grpo_no_std(reward):
    """R - mean. Dr.GRPO, GEPO."""
    return torch.zeros_like(reward) if (reward == reward[0]).all() else reward - reward.mean()


def rloo(reward):
    """R minus the mean of the others = G / (G - 1) (R - mean)."""
    return grpo_no_std(reward) * (len(reward) / max(1, len(reward) - 1))


ADVANTAGES = {"grpo": grpo, "grpo_no_std": grpo_no_std, "rloo": rloo}


# ---------------------------------------------------------------------------------------------------------------------
# Small helpers
# ---------------------------------------------------------------------------------------------------------------------


def ratio(logp, logq, clamp=CLAMP):
    """p / q from log-probabilities, log-ratio clamped to +-clamp."""
    return (logp - logq).clamp(-clamp, clamp).exp()


def seq_sum(x, mask):
    """Sum over a response's tokens, (B, 1)."""
    return (x * mask).sum(1, keepdim=True)


def seq_mean(x, mask):
    """Mean over a response's tokens, (B, 1); 0 for an empty response."""
    return seq_sum(x, mask) / mask.sum(1, keepdim=True).clamp_min(1)


# ---------------------------------------------------------------------------------------------------------------------
# The three ratios of ref over inf: (batch, cfg) -> r (B, T), or one number a response (B, 1)
# ---------------------------------------------------------------------------------------------------------------------


def token_ratio(batch, cfg):
    """r, (B, T)."""
    return ratio(batch.logp_ref, batch.logp_inf, cfg.log_ratio_clamp)


def seq_ratio(batch, cfg):
    """R = exp(clamp(sum_t log r)), (B, 1)."""
    return ratio(seq_sum(batch.logp_ref - batch.logp_inf, batch.mask), 0.0, cfg.log_ratio_clamp)


def geo_ratio(batch, cfg):
    """exp(mean_t log r), (B, 1): R^(1/T), the same whatever the length."""
    return ratio(seq_mean(batch.logp_ref - batch.logp_inf, batch.mask), 0.0, cfg.log_ratio_clamp)


# ---------------------------------------------------------------------------------------------------------------------
# Corrections: (new, batch, stats, cfg) -> (weight, keep, logs), (B, T) or (B, 1), no gradient
# ---------------------------------------------------------------------------------------------------------------------


def none(new, batch, stats, cfg):
    """weight 1, keep all."""
    return _all(torch.ones_like(batch.logp_inf))


def vanilla_is(new, batch, stats, cfg):
    """r = p_ref / p_inf, unbounded. AReaL's F(x) = x."""
    return _all(token_ratio(batch, cfg))


def tis(new, batch, stats, cfg):
    """min(r, C). Truncated importance sampling; C = 2."""
    return _all(_capped(token_ratio(batch, cfg), cfg))


def icepop(new, batch, stats, cfg):
    """r where lo <= r <= hi, token dropped elsewhere. Jackpot section 2.2 (IceProp)."""
    return _inside(token_ratio(batch, cfg), cfg)


def areal_drop(new, batch, stats, cfg):
    """r, tokens with r > C dropped. TIS text on AReaL."""
    r = token_ratio(batch, cfg)
    return r, (r <= cfg.is_cap).to(r.dtype), {}


def z_tis(new, batch, stats, cfg):
    """Z min(r, c1 / Z): OBRS in expectation, without its mask; the control for it (obrs.py, 'what it is, exactly')."""
    z, z_low, z_high = obrs.token_z((batch.support_logp_ref, batch.tail_ref, batch.z_ref), batch, stats, cfg)
    r = token_ratio(batch, cfg)
    w = (z * r).clamp_max(cfg.obrs_c1)
    return (
        w,
        torch.ones_like(w),
        obrs.obrs_logs(
            obrs.acceptance(batch.logp_ref, batch.logp_inf, stats["lam"], cfg.log_ratio_clamp), z, z_low, z_high
        ),
    )


def seq_is(new, batch, stats, cfg):
    """R. Praxis."""
    return _all(seq_ratio(batch, cfg))


def seq_tis(new, batch, stats, cfg):
    """min(R, C), C = 4. Praxis Seq-TIS."""
    return _all(_capped(seq_ratio(batch, cfg), cfg))


def seq_mis(new, batch, stats, cfg):
    """R for responses with lo <= R <= hi, the others dropped. Praxis section 6."""
    return _inside(seq_ratio(batch, cfg), cfg)


def geo_rs(new, batch, stats, cfg):
    """1 for responses with lo <= exp(mean log r) <= hi, the others dropped. Praxis."""
    _, keep, _ = _inside(geo_ratio(batch, cfg), cfg)
    return torch.ones_like(keep), keep, {}


def geo_rs_seq_tis(new, batch, stats, cfg):
    """min(R, C) on the responses that geo_rs keeps. Praxis."""
    return _capped(seq_ratio(batch, cfg), cfg), _inside(geo_ratio(batch, cfg), cfg)[1], {}


def tbpo_mismatch(new, batch, stats, cfg):
    """exp(mean log r) capped two-sided to [1/C, C], C = 2; with `--tbpo_cap=mask` responses outside are dropped instead. QaRL section 3.2."""
    m, low = geo_ratio(batch, cfg), cfg.is_floor or 1 / cfg.is_cap
    if cfg.tbpo_cap == "mask":
        return m, ((m >= low) & (m <= cfg.is_cap)).to(m.dtype), {}
    return _all(m.clamp(low, cfg.is_cap))


def tis_adjusted(new, batch, stats, cfg):
    """min(p_new / p_inf, C) under the ratio p_new / sg(p_new): PPO's inner clip is short-circuited on purpose. Jackpot 10.1."""
    return _all(_capped(ratio(new.logp.detach(), batch.logp_inf, cfg.log_ratio_clamp), cfg))


def obrs_correction(new, batch, stats, cfg):
    """OBRS, target ref or new (obrs.py). jackpot_adjusted is the same with target new and no p_ref / p_tgt."""
    if cfg.obrs_target == "ref":
        logp_tgt, target = batch.logp_ref, (batch.support_logp_ref, batch.tail_ref, batch.z_ref)
    else:
        logp_tgt, target = new.logp.detach(), (new.support_logp, new.tail, new.z)
    return obrs.correction(logp_tgt, target, batch, stats, cfg)


def _all(weight):
    return weight, torch.ones_like(weight), {}


def _capped(r, cfg):
    return r.clamp(cfg.is_floor, cfg.is_cap)


def _inside(r, cfg):
    return r, ((r >= cfg.rs_low) & (r <= cfg.rs_high)).to(r.dtype), {}


CORRECTIONS = {
    "none": none,
    "is": vanilla_is,
    "tis": tis,
    "icepop": icepop,
    "areal_drop": areal_drop,
    "z_tis": z_tis,
    "seq_is": seq_is,
    "seq_tis": seq_tis,
    "seq_mis": seq_mis,
    "geo_rs": geo_rs,
    "geo_rs_seq_tis": geo_rs_seq_tis,
    "tbpo_mismatch": tbpo_mismatch,
    "tis_adjusted": tis_adjusted,
    "obrs": obrs_correction,
    "jackpot_adjusted": obrs_correction,
}
USES_Z = {"obrs", "jackpot_adjusted", "z_tis"}
SEQUENCE = {"seq_is", "seq_tis", "seq_mis", "geo_rs_seq_tis"}  # corrections whose C caps R, not r
DROPS = {"icepop", "areal_drop", "seq_mis", "geo_rs", "geo_rs_seq_tis", "obrs", "jackpot_adjusted"}
REJECTING = {"icepop", "seq_mis", "geo_rs", "geo_rs_seq_tis"}  # those that read rs_low and rs_high
# defaults of the bounds a correction reads: cap C, and lo <= . <= hi
BOUNDS = {
    "tis": dict(is_cap=2.0),
    "areal_drop": dict(is_cap=5.0),
    "icepop": dict(rs_low=0.5, rs_high=5.0),
    "seq_tis": dict(is_cap=4.0),
    "seq_mis": dict(rs_low=0.0, rs_high=4.0),
    "geo_rs": dict(rs_low=0.9, rs_high=1.1),
    "geo_rs_seq_tis": dict(is_cap=4.0, rs_low=0.9, rs_high=1.1),
    "tbpo_mismatch": dict(is_cap=2.0),
    "tis_adjusted": dict(is_cap=2.0),
}
# `--reject` drops tokens or whole responses by one of the ratios, on top of a correction that only weighs
REJECTS = {"token": token_ratio, "sequence": seq_ratio, "geo": geo_ratio}
REJECT_BOUNDS = {
    "token": dict(rs_low=0.5, rs_high=5.0),
    "sequence": dict(rs_low=0.0, rs_high=4.0),
    "geo": dict(rs_low=0.9, rs_high=1.1),
}


def apply_correction(new, batch, stats, cfg):
    """The correction's (weight, keep, logs), and on top of it what `--reject` and `--veto` drop.

    reject: token, sequence or geo, kept where lo <= ratio <= hi. veto: a response with one r below it is dropped whole."""
    weight, keep, logs = CORRECTIONS[cfg.correction](new, batch, stats, cfg)
    if cfg.reject != "none":
        keep = keep * _inside(REJECTS[cfg.reject](batch, cfg), cfg)[1]
    if cfg.veto > 0:
        keep = keep * ~((token_ratio(batch, cfg) < cfg.veto) & batch.mask).any(1, keepdim=True)
    return weight, keep, logs


def can_drop(cfg) -> bool:
    """Whether any token can be rejected."""
    masks = cfg.correction == "tbpo_mismatch" and cfg.tbpo_cap == "mask"
    return cfg.correction in DROPS or masks or cfg.reject != "none" or cfg.veto > 0


def actor_is_sampler(cfg) -> bool:
    """Whether the learner's actor is the law that sampled, up to the engine's arithmetic: not where groups may come from older weights, where the
    engine and the learner round differently, or where it samples from a cut law that the learner scores whole."""
    late = cfg.samplers != "local" or (cfg.delay != "none" and cfg.max_staleness != 0)
    rounded = cfg.learner_quant not in ("aligned", cfg.rollout_quant)
    cut = Sampling.of(cfg).truncates and cfg.keep_sampling_mask == "off"
    return not (late or rounded or cut)


# ---------------------------------------------------------------------------------------------------------------------
# Surrogates: (logp, base, adv, mask, cfg) -> (value to maximise (B, T), clipped (B, T) bool)
# ---------------------------------------------------------------------------------------------------------------------


def reinforce(logp, base, adv, mask, cfg):
    """log p_new A."""
    return logp * adv, torch.zeros_like(mask)


def ppo(logp, base, adv, mask, cfg):
    """min(r A, clip(r, 1 - lo, 1 + hi) A), r = p_new / p_base; dual clip: at least c A where A < 0. PPO, GRPO, DAPO."""
    return _clipped(ratio(logp, base, cfg.log_ratio_clamp), adv, cfg)


def gspo(logp, base, adv, mask, cfg):
    """PPO on s = exp(mean_t log r), one ratio a response. GSPO, GEPO Eq. 7."""
    s = ratio(seq_mean(logp - base, mask), 0.0, cfg.log_ratio_clamp)
    value, clipped = _clipped(s, adv, cfg)
    return value.expand_as(logp), clipped.expand_as(mask)


def tbpo(logp, base, adv, mask, cfg):
    """clip(s) A, s = exp(mean_t log r), no PPO min: outside its band a response has no gradient at all. QaRL section 3.2.

    A >= 0: s <= 1 + hi (4e-4); A < 0: 1 - lo <= s <= 1 + `--tbpo_neg_high` (3e-4, 7e-4): error tokens come in clusters and throw s far up."""
    s = ratio(seq_mean(logp - base, mask), 0.0, cfg.log_ratio_clamp)
    if not cfg.clip:
        return (s * adv).expand_as(logp), torch.zeros_like(mask)
    low = torch.where(adv >= 0, s.new_tensor(-math.inf), s.new_tensor(1 - cfg.clip_low))
    high = torch.where(adv >= 0, s.new_tensor(1 + cfg.clip_high), s.new_tensor(1 + cfg.tbpo_neg_high))
    band = torch.minimum(torch.maximum(s, low), high)
    inside = (s >= low) & (s <= high)
    return (torch.where(inside, s, band.detach()) * adv).expand_as(logp), (~inside).expand_as(mask)


def sapo(logp, base, adv, mask, cfg):
    """(4 / tau) sigmoid(tau (r - 1)) A, tau 1.0 where A > 0, else 1.05. QaRL D.4, arXiv 2511.20347."""
    tau = torch.where(adv > 0, logp.new_tensor(1.0), logp.new_tensor(1.05))
    return 4.0 / tau * torch.sigmoid(tau * (ratio(logp, base, cfg.log_ratio_clamp) - 1.0)) * adv, torch.zeros_like(mask)


def cispo(logp, base, adv, mask, cfg):
    """sg(clip(r, 1 - lo, 1 + hi)) A log p_new: the clip bounds the weight and never stops the gradient. MiniMax-M1."""
    r = ratio(logp, base, cfg.log_ratio_clamp).detach()
    kept = r.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) if cfg.clip else r
    return kept * adv * logp, kept != r


def _clipped(r, adv, cfg):
    if not cfg.clip:
        return r * adv, torch.zeros_like(r, dtype=torch.bool)
    plain, cut = r * adv, r.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * adv
    value = torch.minimum(plain, cut)
    clipped = cut < plain
    if cfg.dual_clip > 0:  # A < 0 and r huge: the objective stops at c A
        floor = cfg.dual_clip * adv
        clipped = clipped | ((adv < 0) & (value < floor))
        value = torch.where(adv < 0, torch.maximum(value, floor), value)
    return value, clipped


SURROGATES = {"reinforce": reinforce, "ppo": ppo, "gspo": gspo, "tbpo": tbpo, "sapo": sapo, "cispo": cispo}
CLIP = (0.2, 0.28)  # eps_low, eps_high where nothing else is said
CLIPS = {"gspo": (3e-4, 4e-4), "tbpo": (3e-4, 4e-4)}  # a length-normalised ratio never reaches 0.2


# ---------------------------------------------------------------------------------------------------------------------
# Objectives: presets over the two axes
# ---------------------------------------------------------------------------------------------------------------------

OBJECTIVES = {
    "none": dict(correction="none", surrogate="ppo"),  # no correction: the mismatch is ignored
    "grpo": dict(correction="none", surrogate="ppo"),
    "reinforce": dict(correction="none", surrogate="reinforce"),
    "is": dict(correction="is", surrogate="ppo"),
    "tis": dict(correction="tis", surrogate="ppo"),
    "icepop": dict(correction="icepop", surrogate="ppo"),
    "areal_drop": dict(correction="areal_drop", surrogate="ppo"),
    "z_tis": dict(correction="z_tis", surrogate="ppo"),
    "seq_is": dict(correction="seq_is", surrogate="ppo"),
    "seq_tis": dict(correction="seq_tis", surrogate="ppo"),
    "seq_mis": dict(correction="seq_mis", surrogate="ppo"),
    "mis_gspo": dict(correction="seq_mis", surrogate="gspo", reduction="seq-mean-token-mean"),
    "geo_rs": dict(correction="geo_rs", surrogate="ppo"),
    "geo_rs_seq_tis": dict(correction="geo_rs_seq_tis", surrogate="ppo"),
    "ppo_is": dict(correction="none", surrogate="ppo", ratio_base="inf"),
    "tis_adjusted": dict(correction="tis_adjusted", surrogate="ppo", ratio_base="new"),
    "jackpot": dict(correction="obrs", surrogate="ppo"),
    "jackpot_adjusted": dict(correction="jackpot_adjusted", surrogate="ppo", ratio_base="new", obrs_target="new"),
    "gspo": dict(correction="none", surrogate="gspo", reduction="seq-mean-token-mean"),
    "gepo": dict(
        correction="none",
        surrogate="gspo",
        ratio_base="group",
        reduction="seq-mean-token-mean",
        advantage="grpo_no_std",
        clip_low=0.2,
        clip_high=0.2,
    ),
    "tbpo": dict(correction="tbpo_mismatch", surrogate="tbpo", reduction="seq-mean-token-mean"),
    "sapo": dict(correction="none", surrogate="sapo"),
    "cispo": dict(correction="none", surrogate="cispo"),
}
# the same under the names and with the defaults of other frameworks
ALIASES = {
    "decoupled_token_is": OBJECTIVES["tis"],  # verl
    "decoupled_seq_is": dict(OBJECTIVES["seq_tis"], is_cap=2.0),
    "decoupled_seq_is_rs": dict(OBJECTIVES["seq_tis"], is_cap=2.0, reject="sequence", rs_low=0.5, rs_high=2.0),
    "decoupled_geo_rs": dict(OBJECTIVES["geo_rs"], rs_low=0.999, rs_high=1.001),
    "bypass_ppo_clip": OBJECTIVES["ppo_is"],
    "token_truncate": dict(OBJECTIVES["tis"], is_cap=3.0),  # TRL
    "token_mask": dict(OBJECTIVES["areal_drop"], is_cap=3.0),
    "sequence_truncate": dict(OBJECTIVES["seq_tis"], is_cap=3.0),
    "sequence_mask": dict(OBJECTIVES["seq_mis"], rs_high=3.0),
    "dr_grpo": dict(OBJECTIVES["grpo"], advantage="grpo_no_std", reduction="seq-mean-token-sum-norm"),
    "dapo": dict(OBJECTIVES["grpo"], reduction="token-mean", clip_high=0.28),
    "seq_mask_tis": dict(OBJECTIVES["is"], reject="geo", rs_low=0.5, rs_high=5.0),  # OpenRLHF, NeMo-RL
}
OBJECTIVES |= ALIASES


# ---------------------------------------------------------------------------------------------------------------------
# Once per optimizer step, before any backward
# ---------------------------------------------------------------------------------------------------------------------


def passes_needed(cfg, controllers: dict, updates: int) -> set[str]:
    """Which extra learner passes this rollout batch needs: {"ref"}, {"ref", "fresh"} or none.

    With one update per batch `ref` is the policy of that very update, so its forward pass serves as the ref pass, unless
    something must be known of all ranks before the first backward: kappa, a budget's lambda, the kept denominator."""
    z = cfg.correction in USES_Z
    need = set()
    if updates > 1 or (cfg.loss_denominator == "kept" and can_drop(cfg)) or (z and cfg.obrs_accept_rate):
        need.add("ref")
    if (
        z
        and cfg.obrs_z != "exact"
        and (cfg.obrs_target == "ref" or controllers.get("kappa") is None or cfg.actor != "none")
    ):
        need.add("ref")  # target new with an actor: S also takes the policy's own top-K
    if z and cfg.kappa == "exact" and cfg.obrs_target == "new":
        need |= {"ref", "fresh"}
    return need


def prepare(batch, comm, cfg, controllers: dict, fresh=None) -> dict:
    """Statistics of one optimizer step over all ranks: denominators, lambda, kappa, lambda_distill.

    batch: this rank's share of the step; comm.sum / comm.cat reduce over ranks; fresh: TokenStats of the policy as it is
    now, for `--kappa=exact`. Returns plain numbers, except PER_RESPONSE (B, 1)."""
    mask, lengths = batch.mask, batch.mask.sum(1)
    tokens, sequences = comm.sum([mask.sum(), (lengths > 0).sum()])
    stats = {
        "tokens": max(tokens, 1.0),
        "sequences": max(sequences, 1.0),
        "lam": cfg.obrs_lambda,
        "kappa": 1.0,
        "kept_factor": None,
        "log_e": None,
        "defence": None,
        "distill": controllers.get("distill", cfg.distill_lambda),
    }
    if cfg.ratio_base == "group":
        logq = seq_mean(batch.logp_inf.double(), mask).masked_fill((lengths == 0)[:, None], -math.inf)[:, 0]
        stats["log_e"] = gepo.log_group_mean(logq, batch.group, cfg.gepo_expectation)[:, None]
        stats["defence"] = gepo.mixing(logq, batch.group, cfg.gepo_defence)[:, None]
    if cfg.correction in USES_Z:
        logp_tgt, support_logp = batch.logp_ref, batch.support_logp_ref
        if fresh is not None:
            logp_tgt, support_logp = fresh.logp, fresh.support_logp
        if cfg.obrs_accept_rate:
            stats["lam"] = obrs.solve_lambda(
                comm.cat(ratio(logp_tgt, batch.logp_inf, cfg.log_ratio_clamp)[mask]), cfg.obrs_accept_rate
            )
        if cfg.obrs_z != "exact":
            kappa = controllers.get("kappa")
            if kappa is None or fresh is not None or cfg.obrs_target == "ref":
                a = obrs.acceptance(logp_tgt, batch.logp_inf, stats["lam"], cfg.log_ratio_clamp)
                accepted = a if cfg.obrs_mask == "expected" else (batch.u < a).to(a.dtype)
                z_low, _ = obrs.z_bracket(batch.support_logp, support_logp, stats["lam"])
                kappa = obrs.kappa_from(*comm.sum([accepted[mask].sum(), mask.sum(), z_low[mask].sum()]))
            stats["kappa"] = kappa
    if cfg.loss_denominator == "kept" and can_drop(cfg):
        _, keep, _ = apply_correction(fresh, batch, stats, cfg)
        keep = keep.expand_as(batch.logp_inf) * mask
        kept = keep.sum(1)
        kept_tokens, kept_sequences = comm.sum([kept.sum(), (kept > 0).sum()])
        if cfg.reduction == "token-mean":
            stats["kept_factor"] = mask.new_full(
                (len(mask), 1), stats["tokens"] / kept_tokens if kept_tokens else 0.0, dtype=torch.float64
            )
        elif cfg.reduction == "seq-mean-token-mean":
            per_row = torch.where(kept > 0, lengths / kept.double().clamp_min(1e-9), 0.0)
            stats["kept_factor"] = (per_row * (stats["sequences"] / kept_sequences if kept_sequences else 0.0))[:, None]
        else:
            stats["kept_factor"] = mask.new_full(
                (len(mask), 1), stats["sequences"] / kept_sequences if kept_sequences else 0.0, dtype=torch.float64
            )
    return stats


PER_RESPONSE = ("kept_factor", "log_e", "defence")


def micro_stats(stats: dict, rows) -> dict:
    """The statistics as seen by a micro-batch made of `rows` of the batch given to prepare."""
    return {**stats, **{k: stats[k][rows] for k in PER_RESPONSE if stats.get(k) is not None}}


# ---------------------------------------------------------------------------------------------------------------------
# For every micro-batch
# ---------------------------------------------------------------------------------------------------------------------


def with_ref(new, batch):
    """A batch without a ref pass takes `ref` from this very forward: same weights, so the same law, detached."""
    if batch.logp_ref is not None:
        return batch
    return replace(
        batch,
        logp_ref=new.logp.detach(),
        support_logp_ref=new.support_logp,
        tail_ref=new.tail,
        z_ref=new.z,
        actor_logp_ref=None if new.actor_logp is None else new.actor_logp.detach(),
        kl_ref=new.kl_full,
        kl_after=new.kl_after,
    )


def loss(new, batch, stats: dict, cfg):
    """The unreduced loss (B, T) of one model and what it saw: - keep sg(weight) surrogate.

    new: TokenStats of this forward, with gradient; batch: with ref columns; stats: from prepare."""
    batch = with_ref(new, batch)
    base = log_ratio_base(new, batch, stats, cfg)
    weight, keep, logs = apply_correction(new, batch, stats, cfg)
    weight, keep = weight.detach().expand_as(base), keep.detach().expand_as(base)
    surrogate, clipped = SURROGATES[cfg.surrogate](new.logp, base, batch.adv.to(base.dtype), batch.mask, cfg)
    if cfg.positive_only:
        surrogate = surrogate * (batch.adv > 0)
    value = -keep * weight * surrogate
    if stats["kept_factor"] is not None:
        value = value * stats["kept_factor"].to(value)
    if cfg.cppo_beta:
        drift = gepo.cppo_kl(new.logp, batch.logp_inf, cfg.cppo_kl, cfg.log_ratio_clamp)
        value, logs = (
            value + cfg.cppo_beta * drift * per_response_scale(batch.mask, stats, cfg),
            {**logs, "cppo_kl": drift.detach()},
        )
    if cfg.ratio_base in ("inf", "group"):  # the ratio itself is the weight: say so in the metrics
        gap = new.logp.detach() - base
        weight = weight * ratio(
            seq_mean(gap, batch.mask).expand_as(gap) if cfg.surrogate in ("gspo", "tbpo") else gap,
            0.0,
            cfg.log_ratio_clamp,
        )
    return value.masked_fill(~batch.mask, 0.0), {"weight": weight, "keep": keep, "clipped": clipped, **logs}


def log_ratio_base(new, batch, stats: dict, cfg):
    """log of what the surrogate's ratio divides by, (B, T): p_ref, p_inf, p_new itself, or the group's expectation (gepo.py)."""
    if cfg.ratio_base != "group":
        return {"ref": batch.logp_ref, "inf": batch.logp_inf, "new": new.logp.detach()}[cfg.ratio_base]
    logp, log_e, e = seq_mean(new.logp.detach(), batch.mask), stats["log_e"].to(new.logp), stats["defence"].to(new.logp)
    return gepo.log_base(logp, log_e, e).expand_as(new.logp)


def joint_loss(new, batch, stats: dict, cfg):
    """Jackpot Eq. 8, two models: -J_OBRS(theta) - J_PPO(omega) + lambda_distill KL; one model: `loss` alone.

    omega's own loss is standard PPO on the same trajectories with weight F(p_omega,ref / p_inf) and no OBRS (Eq. 6)."""
    batch = with_ref(new, batch)
    value, logs = loss(new, batch, stats, cfg)
    if new.actor_logp is None:
        return value, logs
    actor = replace(new, logp=new.actor_logp)
    as_actor = replace(batch, logp_ref=batch.actor_logp_ref)
    own, _ = loss(actor, as_actor, {**stats, "kept_factor": None}, actor_config(cfg))
    distill = new.kl.masked_fill(~batch.mask, 0.0)
    total = value + own if stats["distill"] == 0 else value + own + stats["distill"] * distill
    return total, {**logs, "actor_loss": own.detach(), "distill": distill.detach()}


def actor_config(cfg):
    """The actor's own objective: standard PPO with weight F = `--actor_correction` (Eq. 6), whatever the policy's is."""
    bounds = BOUNDS.get(cfg.actor_correction, {})
    low, high = CLIP if cfg.surrogate in CLIPS else (cfg.clip_low, cfg.clip_high)
    return replace(
        cfg,
        clip_low=low,
        clip_high=high,
        clip=True,
        dual_clip=0.0,
        positive_only=False,
        cppo_beta=0.0,
        correction=cfg.actor_correction,
        surrogate="ppo",
        ratio_base="ref",
        loss_denominator="proposed",
        reject="none",
        veto=0.0,
        is_floor=0.0,
        is_cap=cfg.actor_is_cap or bounds.get("is_cap"),
        rs_low=bounds.get("rs_low"),
        rs_high=bounds.get("rs_high"),
    )


def reduce(unreduced, mask, stats: dict, cfg):
    """This micro-batch's share of the loss: the shares of all micro-batches and ranks add up to it. Names are verl's.

    token-mean: sum / tokens. seq-mean-token-mean: mean over responses of their token mean.
    seq-mean-token-sum-norm: mean over responses of sum / max_tokens."""
    if cfg.reduction == "token-mean":
        return unreduced.sum() / stats["tokens"]
    per_token = mask.sum(1, keepdim=True).clamp_min(1) if cfg.reduction == "seq-mean-token-mean" else cfg.max_tokens
    return (unreduced / per_token).sum() / stats["sequences"]


def per_response_scale(mask, stats: dict, cfg):
    """(B, 1): what turns the chosen reduction into the mean over responses of their token mean."""
    share = mask.sum(1, keepdim=True).clamp_min(1)
    if cfg.reduction == "token-mean":
        return stats["tokens"] / (stats["sequences"] * share)
    return 1.0 if cfg.reduction == "seq-mean-token-mean" else cfg.max_tokens / share


# ---------------------------------------------------------------------------------------------------------------------
# After the step
# ---------------------------------------------------------------------------------------------------------------------


def update_controllers(controllers: dict, logged: dict, cfg) -> None:
    """Remember what the next step needs: kappa of target new, and lambda_distill of the closed loop.

    Closed loop (Jackpot's Limitations ask for it): lambda_distill <- lambda_distill exp(gain * e), with
    e = clip((KL - target) / target, -1, 1), so that one step changes it by at most exp(gain)."""
    if not logged.get("stepped", True):  # a skipped step teaches nothing
        return
    if cfg.correction in USES_Z and cfg.obrs_z != "exact" and logged["z_low_sum"] > 0:
        controllers["kappa"] = obrs.kappa_from(logged["accept_sum"], logged["tokens"], logged["z_low_sum"])
    if cfg.distill_kl_target > 0 and math.isfinite(logged.get("distill_kl", math.nan)):
        error = max(-1.0, min(1.0, (logged["distill_kl"] - cfg.distill_kl_target) / cfg.distill_kl_target))
        now = controllers.get("distill", cfg.distill_lambda) * math.exp(cfg.distill_gain * error)
        controllers["distill"] = min(max(now, 1e-4), cfg.distill_lambda_max)
