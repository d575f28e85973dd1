"""Corrections: what a token or a response may teach, when another policy sampled it.

    loss = - reduce( keep * sg(weight) * surrogate )          weight and keep come from here

The formulas are pure functions of (B, T) tensors and numbers (corrections/formulas.py). Here each has one row in a
table, which says where its arguments come from. A new correction is a function and a row; so is a new statistic to
reject by. OBRS, Jackpot's correction, has a file of its own (obrs.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

import obrs
from corrections.formulas import (  # noqa: F401 (also for those who import this package alone)
    CLAMP,
    areal_drop,
    cppo_kl,
    geo_ratio,
    geo_rs,
    geo_rs_seq_tis,
    group_log_base,
    group_mixing,
    icepop,
    inside,
    log_group_mean,
    loglinear_ref,
    none,
    prefix_tis,
    retrace,
    retrace_seq,
    seq_is,
    seq_max,
    seq_mean,
    seq_mis,
    seq_ratio,
    seq_sum,
    seq_tis,
    tbpo_mismatch,
    tis,
    token_k2,
    token_k3,
    token_ratio,
    vanilla_is,
    vespo,
    z_tis,
)
from flags import UserError, choice, need
from sampling import Sampling

# ---------------------------------------------------------------------------------------------------------------------
# One row a correction: where its arguments come from, and what else the repository must know of it
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Correction:
    """apply: (new, batch, stats, cfg) -> (weight, keep), and for OBRS (weight, keep, what to log)."""

    apply: Callable
    bounds: dict = field(default_factory=dict)  # the flags that bound it, with their defaults: cap C, low <= . <= high
    drops: bool = False  # it rejects tokens or responses
    caps: str = ""  # what --is_cap caps: "token" (r) or "sequence" (R); metrics count what lies above it
    band: str = ""  # the same of --rs_low and --rs_high, where they bound the weight itself
    needs_z: bool = False  # the sum over the vocabulary of OBRS (obrs.py)
    plain: bool = False  # all weights are 1
    of_response: bool = False  # its weight is a function of R itself, not of its T-th root
    cuts: bool = False  # metrics count what it drops as a weight of 0 (measure.py)


def apply_obrs(new, batch, stats, cfg):
    """OBRS on one micro-batch: its target, that target's Z, then `obrs.correction`."""
    target = obrs.target_of(new, batch, cfg.obrs_target)
    z = obrs.token_z(target, batch.support_logp, stats.lam, stats.kappa, cfg.obrs_z)
    # p_ref / p_tgt undoes the surrogate's p_new / p_ref, and only that
    moves = cfg.obrs_target == "new" and cfg.ratio_base == "ref" and cfg.surrogate != "reinforce"
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
    "none": Correction(lambda new, b, stats, cfg: none(b.log_r), plain=True),
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
        cuts=True,
    ),
    "areal_drop": Correction(
        lambda new, b, stats, cfg: areal_drop(b.log_r, cfg.is_cap, cfg.log_ratio_clamp),
        bounds={"is_cap": 5.0},
        caps="token",
        drops=True,
        cuts=True,
    ),
    "seq_is": Correction(lambda new, b, stats, cfg: seq_is(b.log_r, b.mask, cfg.log_ratio_clamp), of_response=True),
    "seq_tis": Correction(
        lambda new, b, stats, cfg: seq_tis(b.log_r, b.mask, cfg.is_cap, cfg.is_floor, cfg.log_ratio_clamp),
        bounds={"is_cap": 4.0},
        caps="sequence",
        of_response=True,
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
        of_response=True,
        cuts=True,
    ),
    "geo_rs": Correction(
        lambda new, b, stats, cfg: geo_rs(b.log_r, b.mask, cfg.rs_low, cfg.rs_high, cfg.log_ratio_clamp),
        bounds={"rs_low": 0.9, "rs_high": 1.1},
        drops=True,
        plain=True,
    ),
    "geo_rs_seq_tis": Correction(
        lambda new, b, stats, cfg: geo_rs_seq_tis(
            b.log_r, b.mask, cfg.is_cap, cfg.rs_low, cfg.rs_high, cfg.is_floor, cfg.log_ratio_clamp
        ),
        bounds={"is_cap": 4.0, "rs_low": 0.9, "rs_high": 1.1},
        caps="sequence",
        drops=True,
        of_response=True,
    ),
    "tbpo_mismatch": Correction(
        lambda new, b, stats, cfg: tbpo_mismatch(
            b.log_r, b.mask, cfg.is_cap, cfg.is_floor, cfg.tbpo_cap == "mask", cfg.log_ratio_clamp
        ),
        bounds={"is_cap": 2.0},
    ),
    "vespo": Correction(
        lambda new, b, stats, cfg: vespo(b.log_r, b.mask, b.adv, clamp=cfg.log_ratio_clamp), of_response=True
    ),
    "z_tis": Correction(apply_z_tis, needs_z=True),
    "obrs": Correction(apply_obrs, drops=True, needs_z=True),
    "jackpot_adjusted": Correction(apply_obrs, drops=True, needs_z=True),
}
USES_Z = {name for name, row in CORRECTIONS.items() if row.needs_z}


# what is chosen among while training (auto.Chooser): the caps of --is_cap=auto, beside the correction's default ...
CAPS = (0.5, 1.0, 2.0, 4.0, 8.0)
# ... and for --correction=auto: name -> (a correction that needs nothing but r, its cap)
CHOICES = {
    "none": ("none", None),
    "tis_2": ("tis", 2.0),
    "icepop": ("icepop", None),
    "seq_tis_1": ("seq_tis", 1.0),
    "seq_tis_4": ("seq_tis", 4.0),
    "prefix_tis_1": ("prefix_tis", 1.0),
    "retrace_seq": ("retrace_seq", None),
    "seq_mis": ("seq_mis", None),
}


def is_probed(cfg) -> bool:
    """Whether training measures what a response is worth (auto.py)."""
    return "auto" in (cfg.is_cap, cfg.correction) or cfg.distill_worth_target > 0


def candidates(cfg) -> dict:
    """name -> configuration: those that auto chooses among, the first in force until it has; without auto cfg alone.

    UserError, one sentence: auto cannot choose here."""
    if cfg.correction == "auto":
        check_correction_auto(cfg)
        unbounded = {"rs_low": None, "rs_high": None}
        return {
            name: replace(cfg, **{**unbounded, **CORRECTIONS[c].bounds, "correction": c, "is_cap": cap})
            for name, (c, cap) in CHOICES.items()
        }
    if cfg.is_cap == "auto":
        choice("correction", cfg.correction, list(CORRECTIONS))
        check_has_cap(cfg)
        default = CORRECTIONS[cfg.correction].bounds["is_cap"]
        above = max(cfg.is_floor, 1.0 if cfg.correction == "tbpo_mismatch" else 0.0)
        tried = dict.fromkeys([default, *CAPS])
        caps = [cap for cap in tried if cap > above]
        need(caps, f"--is_floor={cfg.is_floor}: --is_cap=auto tries caps up to {max(tried):g}; lower the floor")
        return {f"{cap:g}": replace(cfg, is_cap=cap) for cap in caps}
    return {"": cfg}


def capped_responses(cfg) -> dict:
    """The flags that put min(R, 1) in the place of the correction, and of its own masks. What --reject and --veto drop
    they go on dropping."""
    changed = {"correction": "seq_tis", "is_cap": 1.0, "is_floor": 0.0}
    if cfg.reject not in REJECTIONS:  # the bounds were the correction's
        changed |= {"rs_low": None, "rs_high": None}
    return changed


@dataclass(frozen=True)
class Rejection:
    """--reject: keep what has low <= statistic <= high. statistic: (log_r, mask, clamp) -> (B, T) or (B, 1)."""

    statistic: Callable
    bounds: dict


def over_response(of_token, aggregate):
    """A statistic: tokens' k2 or k3, summed, averaged or their largest over a response."""
    return lambda log_r, mask, clamp: aggregate(of_token(log_r, clamp), mask)


REJECTIONS = {
    "token": Rejection(lambda log_r, mask, clamp: token_ratio(log_r, clamp), {"rs_low": 0.5, "rs_high": 5.0}),
    "sequence": Rejection(seq_ratio, {"rs_low": 0.0, "rs_high": 4.0}),
    "geo": Rejection(geo_ratio, {"rs_low": 0.9, "rs_high": 1.1}),
    "seq_max": Rejection(
        lambda log_r, mask, clamp: seq_max(token_ratio(log_r, clamp), mask), {"rs_low": 0.0, "rs_high": 100.0}
    ),
    # divergences of inf from ref, never negative: one upper bound. verl's names and defaults
    "token_k2": Rejection(lambda log_r, mask, clamp: token_k2(log_r, clamp), {"rs_low": 0.0, "rs_high": 0.1}),
    "token_k3": Rejection(lambda log_r, mask, clamp: token_k3(log_r, clamp), {"rs_low": 0.0, "rs_high": 0.1}),
}
for level, aggregate in {"seq_sum": seq_sum, "seq_mean": seq_mean, "seq_max": seq_max}.items():
    for estimator, of_token in {"k2": token_k2, "k3": token_k3}.items():
        REJECTIONS[f"{level}_{estimator}"] = Rejection(
            over_response(of_token, aggregate), {"rs_low": 0.0, "rs_high": 0.1}
        )


def rejections(cfg) -> list[tuple[Rejection, float, float]]:
    """(statistic, lowest, highest) of each that --reject names.

    One name alone has the bounds --rs_low and --rs_high. In a list, as in verl's, each has its own: NAME:LOW:HIGH, or
    NAME with its default bounds. UserError: no such statistic, or no such bounds."""
    if cfg.reject == "none":
        return []
    if cfg.reject in REJECTIONS:
        return [(REJECTIONS[cfg.reject], cfg.rs_low, cfg.rs_high)]
    found = []
    for part in cfg.reject.split(","):
        name, *numbers = part.split(":")
        choice("reject", name, list(REJECTIONS))
        row = REJECTIONS[name]
        try:
            low, high = [float(number) for number in numbers] or row.bounds.values()
        except ValueError:
            raise UserError(
                f"--reject={cfg.reject}: {part} is no statistic with its bounds; write {name}:LOW:HIGH, such as "
                f"{name}:{row.bounds['rs_low']:g}:{row.bounds['rs_high']:g}"
            ) from None
        need(low < high, f"--reject={cfg.reject}: the bounds of {part} are crossed; the first must be below the second")
        found.append((row, low, high))
    return found


def apply_correction(new, batch, stats, cfg):
    """(weight, keep, what to log) of the correction, and on top of it what `--reject` and `--veto` drop.

    correction_target: "new" has p_new above p_inf, in weights and statistics, instead of p_ref.
    reject_of: "negative" drops tokens of negative advantage alone: to push down what the policy would hardly say any
    more teaches it little, and moves it much. veto: a response in which one token has r below it is dropped whole."""
    if cfg.correction_target == "new":
        batch = replace(batch, logp_ref=new.logp.detach())
    weight, keep, *logs = CORRECTIONS[cfg.correction].apply(new, batch, stats, cfg)
    weight = weight / stats.weight_mean
    for row, low, high in rejections(cfg):
        kept = inside(row.statistic(batch.log_r, batch.mask, cfg.log_ratio_clamp), low, high)
        keep = keep * (kept if cfg.reject_of == "all" else torch.where(batch.adv < 0, kept, 1.0))
    if cfg.veto > 0:
        low = (token_ratio(batch.log_r, cfg.log_ratio_clamp) < cfg.veto) & batch.mask
        keep = keep * ~low.any(1, keepdim=True)
    return weight, keep, logs[0] if logs else {}


def can_drop(cfg) -> bool:
    """Whether any token can be rejected."""
    masks = cfg.correction == "tbpo_mismatch" and cfg.tbpo_cap == "mask"
    return CORRECTIONS[cfg.correction].drops or masks or cfg.reject != "none" or cfg.veto > 0


def sees_new(cfg) -> bool:
    """Whether weights or masks depend on the policy as it is in the update, so that nobody knows them before."""
    z_new = cfg.correction in USES_Z and cfg.obrs_target == "new" and cfg.kappa != "exact"
    of_new = cfg.correction_target == "new" or cfg.ref_from == "loglinear"
    return cfg.correction == "tis_adjusted" or of_new or z_new


def mean_weight(batch, comm, stats, cfg, fresh) -> float:
    """The mean of keep * weight over all ranks: over tokens, or responses where a response has one weight.

    As verl has it: before --reject and --veto, which do not change the mean."""
    weight, keep, *_ = CORRECTIONS[cfg.correction].apply(fresh, batch, stats, cfg)
    applied = weight * keep
    counted = batch.mask if applied.shape == batch.mask.shape else batch.mask.any(1, keepdim=True)
    total, count = comm.sum([applied[counted].sum(), counted.sum()])
    return total / count if total > 0 else 1.0


def actor_is_sampler(cfg) -> bool:
    """Whether the learner's actor is the policy that sampled, up to the engine's arithmetic.

    Not where groups may come from older weights, where the engine rounds weights or its cache otherwise, where it has
    noise, or where it samples from a truncated distribution that the learner scores whole. That its arithmetic may
    have 16 bits (--rollout_dtype) is passed over."""
    late = cfg.samplers != "local" or (cfg.delay != "none" and cfg.max_staleness != 0)
    rounded = cfg.learner_quant not in ("aligned", cfg.rollout_quant) or cfg.kv_cache_dtype != "auto"
    cut = Sampling.of(cfg).truncates and cfg.keep_sampling_mask == "off"
    return not (late or rounded or cut or cfg.rollout_noise)


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


def still_read(axes: dict, cfg) -> dict:
    """An objective's axes without what belongs to a correction, a rejection or a surrogate of its own that the flags
    have replaced."""
    rows = {"correction": CORRECTIONS.get(axes.get("correction")), "reject": REJECTIONS.get(axes.get("reject"))}
    own = {axis: set(row.bounds) if row else set() for axis, row in rows.items()}
    own["surrogate"] = {"clip_low", "clip_high"}
    if cfg.reject == "none":
        own["reject"].add("reject_of")
    gone = set()
    for axis, names in own.items():
        if getattr(cfg, axis) not in (None, axes.get(axis)):
            gone |= names
    return {name: value for name, value in axes.items() if name not in gone}


def check(cfg) -> None:
    """UserError, one sentence: flags of corrections that contradict each other."""
    choice("correction", cfg.correction, [*CORRECTIONS, "auto"])
    choice("actor_correction", cfg.actor_correction, [c for c in CORRECTIONS if c not in USES_Z | {"tis_adjusted"}])
    rejections(cfg)
    need(cfg.log_ratio_clamp > 0, f"--log_ratio_clamp={cfg.log_ratio_clamp}: must be above 0")
    check_caps(cfg)
    check_rejection(cfg)
    check_obrs(cfg)
    need(
        cfg.correction not in ("tis_adjusted", "jackpot_adjusted") or cfg.ratio_base == "new",
        f"--correction={cfg.correction} carries p_new / p_inf itself: it needs --ratio_base=new, not {cfg.ratio_base}",
    )
    check_target(cfg)


def check_target(cfg) -> None:
    """Which policy stands above inf, and what must be known before the update."""
    of_new = cfg.correction_target == "new"
    need(
        not of_new or cfg.correction not in USES_Z,
        f"--correction_target=new: --correction={cfg.correction} has a target of its own; use --obrs_target",
    )
    plain = CORRECTIONS[cfg.correction].plain or cfg.surrogate == "reinforce"
    need(
        not of_new or plain or cfg.ratio_base == "new" or cfg.allow_double_correction,
        f"--correction_target=new: weights p_new / p_inf stand in place of the ratio; use --surrogate=reinforce or "
        f"--ratio_base=new, not {cfg.ratio_base}",
    )
    within = f"--correction={cfg.correction}" if cfg.ref_from == "pass" else f"--ref_from={cfg.ref_from}"
    within = "--correction_target=new" if of_new else within
    late = cfg.correction not in USES_Z and sees_new(cfg)  # OBRS has sentences of its own
    need(
        not late or cfg.loss_denominator != "kept" or not can_drop(cfg),
        f"--loss_denominator=kept must know what is dropped before the update, and {within} is known within it; "
        "use proposed",
    )
    need(
        not (cfg.normalize_weights and cfg.loss_denominator == "kept" and CORRECTIONS[cfg.correction].drops),
        f"--loss_denominator=kept: --normalize_weights already divides by what --correction={cfg.correction} keeps; "
        "use proposed",
    )
    need(
        not cfg.normalize_weights or not sees_new(cfg),
        f"--normalize_weights must know all weights before the update, and {within} is known within it; leave it out",
    )


def check_caps(cfg) -> None:
    """The cap C of a weight, and its floor."""
    bounds = CORRECTIONS[cfg.correction].bounds
    for name in ("is_cap", "actor_is_cap"):
        value = getattr(cfg, name)
        need(value is None or value > 0, f"--{name}={value}: a cap of weights, above 0")
    check_has_cap(cfg)
    check_actor_cap(cfg)
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


def check_has_cap(cfg) -> None:
    bounds = CORRECTIONS[cfg.correction].bounds
    if cfg.is_cap is not None and "is_cap" not in bounds:
        instead = "leave it out"
        if cfg.correction in USES_Z:
            instead = "use --obrs_c1"
        elif "rs_high" in bounds:
            instead = "use --rs_low and --rs_high"
        raise UserError(f"--is_cap={cfg.is_cap}: --correction={cfg.correction} has no cap C; {instead}")


def check_actor_cap(cfg) -> None:
    """The cap of the weights with which the actor learns."""
    cap, of = cfg.actor_is_cap, cfg.actor_correction
    need(
        cap is None or "is_cap" in CORRECTIONS[of].bounds,
        f"--actor_is_cap={cap}: --actor_correction={of} has no cap C; leave it out",
    )
    need(
        cap is None or of != "tbpo_mismatch" or cap > 1,
        f"--actor_is_cap={cap}: tbpo_mismatch caps two-sided to [1/C, C], so C must be above 1",
    )


def check_correction_auto(cfg) -> None:
    """What --correction=auto leaves no room for."""
    own = "--correction=auto chooses among corrections with bounds of their own; leave it out"
    for name, usual in {"reject": "none", "is_cap": None, "is_floor": 0, "rs_low": None, "rs_high": None}.items():
        need(getattr(cfg, name) == usual, f"--{name}={getattr(cfg, name)}: {own}")
    need(
        cfg.ratio_base not in ("inf", "group") or cfg.allow_double_correction,
        f"--ratio_base={cfg.ratio_base} already corrects for the mismatch: leave --correction=auto out",
    )
    need(
        cfg.loss_denominator == "proposed",
        f"--loss_denominator={cfg.loss_denominator} must know what is dropped before --correction=auto has chosen; use "
        "proposed",
    )


def check_rejection(cfg) -> None:
    """What --reject, --rs_low, --rs_high and --veto drop."""
    rejects = "rs_low" in CORRECTIONS[cfg.correction].bounds
    need(
        not (rejects and cfg.reject in REJECTIONS),
        f"--reject={cfg.reject}: --correction={cfg.correction} already rejects by --rs_low and --rs_high; give the "
        f"statistic bounds of its own, --reject={cfg.reject}:LOW:HIGH, or use --reject=none",
    )
    need(
        cfg.rs_low is None or cfg.rs_high is None or cfg.rs_low < cfg.rs_high,
        f"--rs_low={cfg.rs_low} --rs_high={cfg.rs_high}: the bounds are crossed; rs_low must be below rs_high",
    )
    need(
        (cfg.rs_low is None and cfg.rs_high is None) or rejects or cfg.reject in REJECTIONS,
        f"--rs_low={cfg.rs_low} --rs_high={cfg.rs_high}: nothing is rejected by bounds here; name what to bound with "
        f"--reject={', '.join(REJECTIONS)} (in a list of several each has bounds of its own, token:0.5:5)",
    )
    need(
        cfg.reject_of == "all" or cfg.reject != "none",
        f"--reject_of={cfg.reject_of}: nothing is rejected; add --reject={', '.join(REJECTIONS)}, or leave it out",
    )
    need(0 <= cfg.veto < 1, f"--veto={cfg.veto}: a ratio in [0, 1), such as 1e-4; 0 is off")
    need(
        cfg.veto == 0 or cfg.veto > math.exp(-cfg.log_ratio_clamp),
        f"--veto={cfg.veto}: no ratio is below exp(-{cfg.log_ratio_clamp:g}); raise --log_ratio_clamp, or the veto",
    )


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
        cfg.obrs_accept_rate is None or cfg.obrs_lambda == 1,
        f"--obrs_lambda={cfg.obrs_lambda}: --obrs_accept_rate={cfg.obrs_accept_rate} chooses lambda; leave one out",
    )
    need(
        cfg.correction != "jackpot_adjusted" or new,
        "--correction=jackpot_adjusted: its target is the policy now; use --obrs_target=new",
    )
    need(
        cfg.obrs_z != "exact" or exact_z_known(cfg),
        "--obrs_z=exact: the whole vocabulary is known only with an --actor, --obrs_target=ref, no --obrs_accept_rate, "
        "and samplers that are the learner's actor (no --delay, --samplers=local, low bits aligned, no noise, "
        "kept sets replayed, --kv_cache_dtype=auto); use bracket",
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
