"""Metrics: one row per metric.

    python metrics.py          # print name and meaning of all metrics

A row has a name, a formula and a meaning. A formula returns a value for each token (B, T), for each
response (B,), or None if the run does not have the metric. Means are over tokens that may carry a
gradient and over responses with such a token (`reward` and `cut`: also over responses that
--mask_cut leaves out of the loss). `Derived` rows are formulas of means over the whole step
(machinery/measure.py sums them). verl's names under `rollout_corr/` have verl's meaning (three
differences: results/conformance.md). Names that begin with _ are not logged; `Derived` rows use
them."""

from __future__ import annotations

import math
import textwrap

from config import Config
from machinery.flags import run_command
from machinery.measure import Derived, Max, Mean, Sums, View, ess, k3
from model import FLOOR

# -- The rows


def low_probability(v):
    """Mask of tokens with p_ref < 1e-3."""
    return v.ref < math.log(1e-3)


def moved(v):
    """Mask of tokens with p_new / p_ref outside [1/2, 2]."""
    return (v.new.logp - v.ref).abs() > math.log(2)


def between(low, high):
    """Tokens with low < p_ref <= high."""
    return lambda v: v.tokens & (v.ref.exp() > low) & (v.ref.exp() <= high)


MISMATCH = [
    Mean(
        "rollout_corr/ratio_mean",
        lambda v: v.r,
        "mean of r = p_ref / p_inf; 1 if both are the same policy",
    ),
    Mean(
        "rollout_corr/kl",
        lambda v: -v.log_r,
        "mean(log p_inf - log p_ref), nats a token: the k1 estimate of KL(inf || ref), samples from inf; negative "
        "only by chance",
    ),
    Mean(
        "rollout_corr/k3_kl",
        lambda v: k3(v.log_r, v.clamp),
        "mean(r - log r - 1) >= 0: the same KL with less variance",
    ),
    Mean("_r2", lambda v: v.r * v.r),
    Derived("rollout_corr/chi2_token", lambda m: m["_r2"] - 1, "mean(r^2) - 1"),
    Mean("_R", lambda v: v.R),
    Mean("_R2", lambda v: v.R * v.R),
    Derived(
        "rollout_corr/chi2_seq",
        lambda m: m["_R2"] - 1,
        "mean(R^2) - 1, R = exp(clamp(sum log r, +-clamp))",
    ),
    Mean(
        "rollout_corr/mean_mismatch",
        lambda v: v.gap.sum(1) / v.n,
        "|p_inf - p_ref|: mean over a response, mean over responses (TIS)",
    ),
    Mean(
        "rollout_corr/max_mismatch",
        lambda v: v.gap.amax(1),
        "|p_inf - p_ref|: maximum over a response, mean over responses (TIS)",
    ),
    Max(
        "rollout_corr/largest_mismatch",
        lambda v: v.gap.amax(1),
        "|p_inf - p_ref|: maximum over the batch (TIS Figures 1 to 3)",
    ),
    Mean(
        "rollout_corr/mismatch_above_half",
        lambda v: v.gap.amax(1) > 0.5,
        "share of responses with any token of |p_inf - p_ref| > 0.5 (TIS Figures 7 and 8)",
    ),
    Mean(
        "rollout_corr/cut_fraction",
        lambda v: v.ref <= FLOOR if v.recomputes else None,
        "share of sampled tokens that the learner's truncation cuts (--keep_sampling_mask=recompute); their "
        "p_ref is e^-69",
    ),
    Max(
        "rollout_corr/largest_gap",
        lambda v: v.log_r.abs(),
        "largest |log r| of the step",
    ),
]

WEIGHTS = [
    Mean("_wk", lambda v: v.applied),
    Mean("_wk2", lambda v: v.applied**2),
    Derived(
        "rollout_corr/rollout_is_eff_sample_size",
        lambda m: ess(m["_wk"], m["_wk2"]),
        "(sum w)^2 / (n sum w^2) of weight x keep; 1: all tokens count equally; for --ratio_base=inf or group the "
        "weight includes the unclipped ratio",
    ),
    Derived(
        "weight_var",
        lambda m: max(0.0, m["_wk2"] - m["_wk"] ** 2),
        "variance of weight x keep",
    ),
    Derived(
        "rollout_corr/seq_eff_sample_size",
        lambda m: ess(m["_R"], m["_R2"]),
        "relative effective sample size (ESS / N) of R over responses; misleading if seq_clamped_fraction is high: all "
        "responses at the clamp have weight e^20 or e^-20, and equal weights give 1",
    ),
    Mean(
        "rollout_corr/seq_clamped_fraction",
        lambda v: v.sum_log_r.abs() >= v.clamp,
        "share of responses with |sum log r| at the clamp; above 0.5 seq_eff_sample_size is meaningless, and the run "
        "warns once",
    ),
    Mean("_keep", lambda v: v.keep),
    Derived(
        "rollout_corr/rollout_rs_masked_fraction",
        lambda m: 1.0 - m["_keep"],
        "share of tokens rejected; with --obrs_mask=expected, 1 - the mean of the expected mask",
    ),
    Mean(
        "rollout_corr/rollout_rs_seq_masked_fraction",
        lambda v: ((v.keep == 0) & v.tokens).any(1),
        "share of responses with a rejected token (verl's definition)",
    ),
]

REWARDS = [
    Mean(
        "reward", lambda v: v.batch.reward, "reward of the sampler", lambda v: v.sampled
    ),
    Mean("_capped", lambda v: v.R.clamp_max(v.C)),
    Mean("_capped_reward", lambda v: v.R.clamp_max(v.C) * v.batch.reward),
    Derived(
        "rollout_corr/reward_weighted",
        lambda m: m["_capped_reward"] / m["_capped"] if m["_capped"] > 0 else 0.0,
        "sum min(R, C) reward / sum min(R, C): estimate of the learner's reward; `reward` is the sampler's "
        "(TIS text, 'biased reward'); C: --is_cap of seq_tis and geo_rs_seq_tis, else 4",
    ),
    Max("_best", lambda v: v.batch.reward, over=lambda v: v.sampled),
    Derived(
        "no_reward",
        lambda m: float(m["_best"] == m["reward"] == 0),
        "1 if every reward is 0; the run warns once",
    ),
    Mean("response_length", lambda v: v.n, "sampled tokens"),
    Mean(
        "cut",
        lambda v: v.batch.cut,
        "share of responses truncated at --max_tokens; above 0.5 the run warns once",
        lambda v: v.sampled,
    ),
    Mean(
        "advantage_abs",
        lambda v: v.adv[:, 0].abs(),
        "mean |A| over responses (otb: first tokens only)",
    ),
    Mean("entropy", lambda v: v.new.entropy, "of the policy, nats"),
    Mean(
        "router/agreement",
        lambda v: v.new.routed_alike,
        "share of tokens and layers in which the learner's router chooses the engine's experts (--router_replay)",
    ),
    Mean(
        "staleness/mean_updates",
        lambda v: v.batch.staleness,
        "age of the sampling weights, in updates",
    ),
    Max(
        "staleness/max_updates",
        lambda v: v.batch.staleness,
        "largest age of the sampling weights, in updates",
    ),
]

UPDATE = [
    Mean(
        "clip_fraction", lambda v: v.clipped, "share of tokens with a clipped surrogate"
    ),
    Mean(
        "ppo_kl",
        lambda v: v.ref - v.new.logp,
        "mean(log p_ref - log p_new), k1. It estimates KL(ref || new) under samples of ref, but these are samples of "
        "inf: if ref and inf differ, it can be negative and means nothing (TIS text)",
    ),
    Mean(
        "start_kl",
        lambda v: (
            None if v.batch.logp_start is None else v.new.logp - v.batch.logp_start
        ),
        "mean(log p_new - log p_start), k1: drift from the run's start model, with --kl_coef; it estimates KL(new || "
        "start) if the samples are from the policy",
    ),
    Mean(
        "error/low_prob_pos",
        low_probability,
        "share of tokens with A > 0 that have p_ref < 1e-3 ('error tokens', QaRL Fig. 4c)",
        over=lambda v: v.tokens & (v.adv > 0),
    ),
    Mean(
        "error/low_prob_neg",
        low_probability,
        "the same share of tokens with A < 0",
        over=lambda v: v.tokens & (v.adv < 0),
    ),
    *(
        Mean(
            f"error/ratio_out/{high:g}",
            moved,
            f"share of tokens with p_new / p_ref outside [1/2, 2], among {low:g} < p_ref <= {high:g} (QaRL Fig. 5b)",
            over=between(low, high if high < 1 else math.inf),
        )
        for low, high in ((0, 1e-3), (1e-3, 0.1), (0.1, 1))
    ),
]

OBRS = [
    Mean(
        "obrs/accept_rate",
        lambda v: v.logs.get("accept"),
        "mean of OBRS's keep, before --reject; with --obrs_mode=reweight and for z_tis, mean of a",
    ),
    Mean("obrs/z", lambda v: v.logs.get("z"), "Z as used"),
    Mean(
        "obrs/z_low",
        lambda v: v.logs.get("z_low"),
        "lower bound of Z, if Z is bracketed",
    ),
    Mean(
        "obrs/z_high",
        lambda v: v.logs.get("z_high"),
        "upper bound of Z, if Z is bracketed",
    ),
    Mean(
        "obrs/z_approx",
        lambda v: v.logs.get("z_approx"),
        "the sum over the union of both top-K (--obrs_z=approx)",
    ),
    Derived(
        "obrs/lambda",
        lambda m: m.get("_lam"),
        "lambda as used (--obrs_accept_rate)",
    ),
    Derived(
        "obrs/kappa",
        lambda m: m["_kappa"] if {"obrs/z_low", "obrs/z_approx"} & m.keys() else None,
        "scale of Z_low or Z_approx",
    ),
    Mean(
        "obrs/kl_after",
        lambda v: v.batch.kl_after_ref if v.to_ref else None,
        "KL(p_tgt || distribution of the accepted tokens) over the vocabulary, if the learner knows both",
    ),
]

ACTOR = [
    Mean(
        "distill_kl",
        lambda v: v.new.kl,
        "KL(policy || actor), nats a token, whole vocabulary",
    ),
    Mean("actor/loss", lambda v: v.logs.get("actor_loss"), "loss of the actor"),
    Mean("actor/entropy", lambda v: v.new.actor_entropy, "entropy of the actor, nats"),
    Mean(
        "actor/engine_gap",
        lambda v: (
            None if v.actor_ref is None else (v.inf.exp() - v.actor_ref.exp()).abs()
        ),
        "|p_inf - p_actor,ref|: engine against learner",
    ),
    Max(
        "actor/largest_gap",
        lambda v: None if v.actor_ref is None else (v.inf - v.actor_ref).abs(),
        "largest |log p_inf - log p_actor,ref| of the step",
    ),
    Derived(
        "distill_lambda",
        lambda m: m["_distill"] if "actor/loss" in m else None,
        "weight of the distillation loss; constant without --distill_kl_target",
    ),
]

SECTIONS = {
    "How far sampler and learner are apart": MISMATCH,
    "Weights and rejection": WEIGHTS,
    "Rewards, lengths, age": REWARDS,
    "The update": UPDATE,
    "OBRS": OBRS,
    "The actor": ACTOR,
}
ROWS = [row for rows in SECTIONS.values() for row in rows]
# metrics computed in other files: name -> meaning
ELSEWHERE = {
    "loss": "the reduced loss",
    "grad_norm": "norm of the policy's gradient before clipping; actor/grad_norm: of the actor's",
    "lr": "the policy's learning rate in this update; actor/lr: the actor's",
    "stepped": "0 if a non-finite loss or gradient skipped the update",
    "loss_scale": "loss scale of --dtype=float16 after the update",
    "step": "updates before this one, so update 20 has 19; -1: the evaluation before training",
    "skipped_steps": "updates skipped so far because of a non-finite loss or gradient",
    "rejected_steps": (
        "updates so far in which every token was rejected; 0 with --entropy_coef or --cppo_beta; the run warns once"
    ),
    "eval/policy_pass@1": "held-out pass@1, with eval/policy_se; eval/actor_*",
    "sync/changed": "share of the published tensors that changed since the previous sync (sync.py)",
    "sync/error": "rms(log p_engine - log p_published) at the engine's start, nats; sync/floor: its noise floor",
    "sync/MiB": "size of the published tensors",
    "grade/timeouts": "parts of --reward that took over 5 s of processor time on an answer, which earns 0 for them",
    "grade/failures": "answers on which a reward function raised an exception (they earn 0 for it)",
    "grade/unboxed": "share of responses without a complete \\boxed{}",
    "grade/inexact": (
        "share of responses that `math` accepts with a different last number, among problems with a plain number as "
        "gold answer; warning above 0.2"
    ),
    "poisoned": (
        "responses left out of the loss: log p_inf of a sampled token is NaN, above 1e-3 or below -200, or log p_inf "
        "of a top-K token is NaN or above 1e-3"
    ),
    "reward/NAME": "mean of each part of --reward, unweighted, if there are several (tasks/rewards.py)",
    "dynamic_sampling/dropped": "groups with equal rewards, replaced by other prompts",
    "delay/versions": "number of weight versions: the newest broadcast and those of the delayed samplers (delay.py)",
    "remote/trained": "remote groups trained on; remote/*: other outcomes, traffic, waiting time (remote/source.py)",
    "rollout_s": "seconds by stage: rollout_s, grade_s (after all decoding), ref_s, update_s, sync_s, eval_s, save_s",
    "time_s": "when the line was written, seconds since the epoch",
    "speed/rollout_tokens": "tokens per second of one rank; speed/update_tokens, peak, memory_GiB (machinery/speed.py)",
}


# -- Measured


def observe(sums: Sums, new, batch, stats, logs, cfg: Config) -> None:
    """Add one micro-batch. new: TokenStats, detached; batch: with ref columns; logs: from
    objectives.joint_loss."""
    view = View(new, batch, logs, cfg)
    for row in ROWS:
        if isinstance(row, Mean) and (x := row.formula(view)) is not None:
            by_shape = view.tokens if x.ndim == 2 else view.responses
            add = sums.top if isinstance(row, Max) else sums.add
            add(row.name, x, row.over(view) if row.over else by_shape)
    sums.constant("_kappa", stats.kappa)
    if cfg.obrs_accept_rate and "z" in logs:
        sums.constant("_lam", stats.lam)
    sums.constant("_distill", stats.distill_lambda)


def derive(m: dict[str, float]) -> dict[str, float]:
    """The logged metrics: the means and maxima of `Sums.reduce`, and `Derived` rows."""
    out = {name: value for name, value in m.items() if not name.startswith("_")}
    derived = {row.name: row.formula(m) for row in ROWS if isinstance(row, Derived)}
    return out | {name: value for name, value in derived.items() if value is not None}


# -- The page


def page() -> str:
    """Names and meanings of all metrics."""
    wrapper = textwrap.TextWrapper(118, initial_indent="  ", subsequent_indent=" " * 48)
    rows_of = {
        title: [(r.name, r.meaning) for r in rows] for title, rows in SECTIONS.items()
    }
    lines = []
    for title, rows in {**rows_of, "Logged by other files": ELSEWHERE.items()}.items():
        lines += ["", title]
        for name, meaning in filter(all, rows):  # rows without a meaning are not logged
            lines += wrapper.wrap(f"{name:46s}{meaning}")
    return "\n".join(lines).strip()


if __name__ == "__main__":
    run_command(lambda: print(page()))
