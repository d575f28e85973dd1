"""Metrics: one row per metric.

    python metrics.py          # print name and meaning of all metrics

A row has a name, a domain (tokens or responses), a formula and a meaning. `Derived` rows are
formulas of means over the whole step (machinery/measure.py sums them). Names under `rollout_corr/`
have verl's meaning (three differences: results/conformance.md). Names that begin with _ are not
logged; `Derived` rows use them."""

from __future__ import annotations

import math
import re
import textwrap

import corrections
from config import LossFlags
from machinery.flags import print_page, run_command
from machinery.measure import Derived, Max, Mean, Means, Sums, View, k3
from model import FLOOR
from sampling import Sampling

RARE = [1e-3, 1e-1, 1.0]


# ---------------------------------------------------------------------------------------------------------------------
# The rows
# ---------------------------------------------------------------------------------------------------------------------


def tokens(v):
    return v.tokens


def responses(v):
    return v.responses


def weighted(v):
    """The items that have a weight: tokens, or responses if R is the weight."""
    return v.responses if v.by_response else v.tokens


def tokens_where(condition):
    """Tokens for which condition(view) is true."""
    return lambda v: v.tokens & condition(v)


def rare(low, high):
    """Tokens with low < p_ref <= high."""
    return lambda v: v.tokens & (v.ref > log_edge(low)) & (v.ref <= log_edge(high))


def log_edge(p: float) -> float:
    return math.log(p) + 1e-6 if p > 0 else -math.inf


def moved(v):
    """Mask of tokens with p_new / p_ref outside [1/2, 2]."""
    return (v.new.logp - v.ref).abs() > math.log(2)


MISMATCH = [
    Mean(
        "rollout_corr/ratio_mean",
        tokens,
        lambda v: v.r,
        "mean of r = p_ref / p_inf; 1 if both are the same policy",
    ),
    Mean(
        "rollout_corr/kl",
        tokens,
        lambda v: -v.log_r,
        "mean(log p_inf - log p_ref), nats a token: the k1 estimate of KL(inf || ref), samples from inf; negative "
        "only by chance",
    ),
    Mean(
        "rollout_corr/k3_kl",
        tokens,
        lambda v: k3(v.log_r, v.clamp),
        "mean(r - log r - 1) >= 0: the same KL with less variance",
    ),
    Mean("_r2", tokens, lambda v: v.r * v.r),
    Derived("rollout_corr/chi2_token", lambda m: m["_r2"] - 1, "mean(r^2) - 1"),
    Mean("_R", responses, lambda v: v.R),
    Mean("_R2", responses, lambda v: v.R * v.R),
    Derived(
        "rollout_corr/chi2_seq",
        lambda m: m["_R2"] - 1,
        "mean(R^2) - 1, R = exp(clamp(sum log r, +-clamp))",
    ),
    Mean(
        "rollout_corr/mean_mismatch",
        responses,
        lambda v: v.gap.sum(1) / v.n,
        "|p_inf - p_ref|: mean over a response, mean over responses (TIS)",
    ),
    Mean(
        "rollout_corr/max_mismatch",
        responses,
        lambda v: v.gap.amax(1),
        "|p_inf - p_ref|: maximum over a response, mean over responses (TIS)",
    ),
    Max(
        "rollout_corr/largest_mismatch",
        responses,
        lambda v: v.gap.amax(1),
        "|p_inf - p_ref|: maximum over the batch (TIS Figures 1 to 3)",
    ),
    Mean(
        "rollout_corr/mismatch_above_half",
        responses,
        lambda v: v.gap.amax(1) > 0.5,
        "share of responses with any token of |p_inf - p_ref| > 0.5 (TIS Figures 7 and 8)",
    ),
    Mean(
        "rollout_corr/ppl_ratio",
        responses,
        lambda v: (((v.inf - v.ref) * v.tokens).sum(1) / v.n).clamp(-v.clamp, v.clamp).exp(),
        "mean over responses of exp(mean log p_inf - mean log p_ref)",
    ),
    Mean(
        "rollout_corr/cut_fraction",
        tokens,
        lambda v: v.ref <= FLOOR,
        "share of sampled tokens that the learner's truncation cuts (--keep_sampling_mask=recompute); their "
        "p_ref is e^-69",
        when=lambda v: v.cfg.keep_sampling_mask == "recompute" and Sampling.of(v.cfg).truncates,
    ),
    Max("rollout_corr/largest_gap", tokens, lambda v: v.log_r.abs(), "largest |log r| of the step"),
]

OF_R = "for level sequence the value is R = exp(sum log r), without a cap, of ref even if the target is new"
WEIGHTS = [
    Mean("_w", tokens, lambda v: v.weight),
    Mean("_w2", tokens, lambda v: v.weight**2),
    Mean("_wk", tokens, lambda v: v.applied),
    Mean("_wk2", tokens, lambda v: v.applied**2),
    Max("_neg_min", weighted, lambda v: -(v.sum_log_r.exp() if v.by_response else v.weight)),
    Derived(
        "rollout_corr/rollout_is_mean",
        lambda m: m["_w"],
        "mean weight of a token after caps; 1 without correction; drops count as 0 for icepop, kpop, areal_drop and "
        "seq_mis; includes OBRS's expected mask, not a drawn mask; for --ratio_base=inf or group it includes the "
        "unclipped ratio",
    ),
    Derived(
        "rollout_corr/rollout_is_min", lambda m: -m["_neg_min"], f"minimum of this weight; {OF_R}"
    ),
    Max(
        "rollout_corr/rollout_is_max",
        weighted,
        lambda v: v.R if v.by_response else v.weight,
        f"maximum of this weight; {OF_R}",
    ),
    Derived(
        "rollout_corr/rollout_is_std",
        lambda m: math.sqrt(max(0.0, m["_w2"] - m["_w"] ** 2)),
        "standard deviation of this weight",
    ),
    Derived(
        "rollout_corr/rollout_is_eff_sample_size",
        lambda m: m.ess("_wk", "_wk2"),
        "(sum w)^2 / (n sum w^2) of weight x keep; 1: all tokens count equally",
    ),
    Derived(
        "weight_var", lambda m: max(0.0, m["_wk2"] - m["_wk"] ** 2), "variance of weight x keep"
    ),
    Mean(
        "rollout_corr/rollout_is_ratio_fraction_high",
        weighted,
        lambda v: v.ratio > v.edges[1],
        "share of tokens with r > C, or of responses with R > C for level sequence; C: --is_cap, or --rs_high if there "
        "is no cap, of a correction with a level (corrections.Correction), else 2 (r) or 4 (R)",
    ),
    Mean(
        "rollout_corr/rollout_is_ratio_fraction_low",
        weighted,
        lambda v: v.ratio < v.edges[0],
        "the same share below 1/C, or below --rs_low if C is --rs_high",
    ),
    Derived(
        "rollout_corr/seq_eff_sample_size",
        lambda m: m.ess("_R", "_R2"),
        "effective sample size of R over responses; misleading if seq_clamped_fraction is high: all responses at the "
        "clamp have weight e^20 or e^-20, and equal weights give 1",
    ),
    Mean(
        "rollout_corr/seq_clamped_fraction",
        responses,
        lambda v: v.sum_log_r.abs() >= v.clamp,
        "share of responses with |sum log r| at the clamp",
    ),
    Derived(
        "rollout_corr/seq_false_ess",
        lambda m: float(m["rollout_corr/seq_clamped_fraction"] > 0.5),
        "1 if more than half of the responses are at the clamp, which makes "
        "seq_eff_sample_size meaningless; the run warns once",
    ),
    Derived(
        "rollout_corr/t_max",
        lambda m: m["_clamp"] / m["rollout_corr/kl"] if m["rollout_corr/kl"] > 0 else math.inf,
        "clamp / KL: the response length at which sequence weights reach the clamp (Praxis, section 4)",
    ),
    Mean("_keep", tokens, lambda v: v.keep),
    Derived(
        "rollout_corr/rollout_rs_masked_fraction",
        lambda m: 1.0 - m["_keep"],
        "share of tokens rejected",
    ),
    Mean(
        "rollout_corr/rollout_rs_seq_masked_fraction",
        responses,
        lambda v: ((v.keep == 0) & v.tokens).any(1),
        "share of responses with a rejected token (verl's definition)",
    ),
]

REWARDS = [
    Mean("reward", responses, lambda v: v.batch.reward, "reward of the sampler"),
    Mean("_capped", responses, lambda v: v.R.clamp_max(v.C_seq)),
    Mean("_capped_reward", responses, lambda v: v.R.clamp_max(v.C_seq) * v.batch.reward),
    Derived(
        "rollout_corr/reward_weighted",
        lambda m: m["_capped_reward"] / m["_capped"] if m["_capped"] > 0 else 0.0,
        "sum min(R, C) reward / sum min(R, C): estimate of the learner's reward; `reward` is the sampler's "
        "(TIS text, 'biased reward')",
    ),
    Max("_best", responses, lambda v: v.batch.reward),
    Derived(
        "no_reward",
        lambda m: float(m["_best"] == m["reward"] == 0),
        "1 if every reward is 0; the run warns once",
    ),
    Mean(
        "spread",
        responses,
        lambda v: v.batch.spread,
        "share of responses in groups with different rewards",
    ),
    Mean("response_length", responses, lambda v: v.n, "sampled tokens"),
    Mean("cut", responses, lambda v: v.batch.cut, "share of responses truncated at --max_tokens"),
    Derived(
        "mostly_cut",
        lambda m: float(m["cut"] > 0.5),
        "1 if more than half of the responses are truncated; the run warns once",
    ),
    Mean("advantage_abs", responses, lambda v: v.adv[:, 0].abs(), "mean |A| over responses"),
    Mean("entropy", tokens, lambda v: v.new.entropy, "of the policy, nats"),
    Mean(
        "router/agreement",
        tokens,
        lambda v: v.new.routed_alike,
        "share of tokens and layers in which the learner's router chooses the engine's experts (--router_replay)",
        when=lambda v: v.new.routed_alike is not None,
    ),
    Mean(
        "staleness/mean_updates",
        responses,
        lambda v: v.batch.staleness[:, 0],
        "age of the sampling weights, in updates",
    ),
    Mean(
        "staleness/mean_seconds",
        responses,
        lambda v: v.batch.staleness[:, 1],
        "age of the sampling weights, in seconds",
    ),
    Max(
        "staleness/max_updates",
        responses,
        lambda v: v.batch.staleness[:, 0],
        "largest age of the sampling weights, in updates",
    ),
]


RATIO_OUT = (
    "share of tokens with p_new / p_ref outside [1/2, 2], among tokens with p_ref <= N and above the next smaller N "
    "(QaRL Fig. 5b)"
)
UPDATE = [
    Mean("clip_fraction", tokens, lambda v: v.clipped, "share of tokens with a clipped surrogate"),
    Mean(
        "clip_fraction_high",
        tokens,
        lambda v: v.clipped & (v.adv > 0),
        "share of tokens with a clipped surrogate and A > 0",
    ),
    Mean(
        "clip_fraction_low",
        tokens,
        lambda v: v.clipped & (v.adv < 0),
        "share of tokens with a clipped surrogate and A < 0",
    ),
    Mean(
        "ppo_kl",
        tokens,
        lambda v: v.ref - v.new.logp,
        "mean(log p_ref - log p_new), k1. It estimates KL(ref || new) under samples of ref, but these are samples of "
        "inf: if ref and inf differ, it can be negative and means nothing (TIS text)",
    ),
    Mean(
        "ppo_kl_weighted",
        tokens,
        lambda v: v.r.clamp_max(v.C) * (v.ref - v.new.logp),
        "ppo_kl with each token weighted by min(r, C): the estimate under ref",
    ),
    Mean(
        "start_kl",
        tokens,
        lambda v: v.new.logp - v.batch.logp_start,
        "mean(log p_new - log p_start), k1: drift from the run's start model, with --kl_coef; it estimates KL(new || "
        "start) if the samples are from the policy",
        when=lambda v: v.batch.logp_start is not None,
    ),
    Mean(
        "cppo_kl",
        tokens,
        lambda v: v.logs["cppo_kl"],
        "KL between inf and new that --cppo_beta weighs (corrections.py)",
        when=lambda v: "cppo_kl" in v.logs,
    ),
    Mean(
        "error/low_prob_pos",
        tokens_where(lambda v: v.adv > 0),
        lambda v: v.ref < math.log(1e-3),
        "share of tokens with A > 0 that have p_ref < 1e-3 ('error tokens', QaRL Fig. 4c)",
    ),
    Mean(
        "error/low_prob_neg",
        tokens_where(lambda v: v.adv < 0),
        lambda v: v.ref < math.log(1e-3),
        "the same share of tokens with A < 0",
    ),
    *(
        Mean(f"error/ratio_out/{p:g}", rare(low, p), moved, RATIO_OUT)
        for low, p in zip([0, *RARE], RARE, strict=False)
    ),
]


def summed(m) -> str | None:
    """Name of the sum over the support that kappa scales, Z_low or Z_approx; None if Z is exact."""
    return next((name for name in ("obrs/z_low", "obrs/z_approx") if name in m), None)


def logged(key):
    """{formula, when} of a value that the correction logs under this name."""
    return {"formula": lambda v: v.logs[key], "when": lambda v: key in v.logs}


OBRS = [
    Mean("obrs/accept_rate", tokens, meaning="acceptance", **logged("accept")),
    Mean("obrs/z", tokens, meaning="Z as used", **logged("z")),
    Mean("obrs/z_low", tokens, meaning="lower bound of Z, if Z is bracketed", **logged("z_low")),
    Mean("obrs/z_high", tokens, meaning="upper bound of Z, if Z is bracketed", **logged("z_high")),
    Mean(
        "obrs/z_approx",
        tokens,
        meaning="the sum over the union of both top-K (--obrs_z=approx)",
        **logged("z_approx"),
    ),
    Derived("obrs/lambda", lambda m: m["_lam"], "lambda as used", when=lambda m: "obrs/z" in m),
    Derived("obrs/kappa", lambda m: m["_kappa"], "scale of Z_low or Z_approx", summed),
    Derived(
        "z_sum",
        lambda m: m.sum(summed(m)),
        "sum from which kappa is computed: of Z_low or Z_approx",
        summed,
    ),
    Derived(
        "accept_sum",
        lambda m: m.sum("obrs/accept_rate"),
        "sum from which kappa is computed: of the acceptance",
        summed,
    ),
    Mean(
        "obrs/kl_before",
        tokens,
        lambda v: v.batch.kl_ref,
        "KL(p_tgt || p_inf) over the vocabulary, if the learner knows both",
        when=lambda v: (
            v.to_ref and v.batch.kl_ref is not None and corrections.actor_is_sampler(v.cfg)
        ),
    ),
    Mean(
        "obrs/kl_after",
        tokens,
        lambda v: v.batch.kl_after_ref,
        "KL(p_tgt || distribution of the accepted tokens) over the vocabulary, if the learner knows both",
        when=lambda v: v.to_ref and v.batch.kl_after_ref is not None,
    ),
]


def has_actor(v) -> bool:
    return v.new.actor_logp is not None


ACTOR = [
    Mean(
        "distill_kl",
        tokens,
        lambda v: v.new.kl,
        "KL(policy || actor), nats a token, whole vocabulary",
        has_actor,
    ),
    Mean(
        "actor/distill_loss",
        tokens,
        lambda v: v.new.distill_loss,
        "distillation loss, as chosen by the flags",
        has_actor,
    ),
    Mean("actor/loss", tokens, lambda v: v.logs["actor_loss"], "loss of the actor", has_actor),
    Mean(
        "actor/entropy",
        tokens,
        lambda v: v.new.actor_entropy,
        "entropy of the actor, nats",
        has_actor,
    ),
    Mean(
        "actor/engine_gap",
        tokens,
        lambda v: (v.batch.actor_logp_ref.exp() - v.inf.exp()).abs(),
        "|p_inf - p_actor,ref|: engine against learner",
        has_actor,
    ),
    Max(
        "actor/largest_gap",
        tokens,
        lambda v: (v.batch.actor_logp_ref - v.inf).abs(),
        "largest |log p_inf - log p_actor,ref| of the step",
        has_actor,
    ),
    Derived(
        "distill_lambda",
        lambda m: m["_distill"],
        "weight of the distillation, as set by the closed loop",
        when=lambda m: "actor/loss" in m,
    ),
]
COUNTS = [
    Derived("tokens", lambda m: m.count("_w"), "tokens of the step that may carry a gradient")
]

SECTIONS = {
    "How far sampler and learner are apart": MISMATCH,
    "Weights and rejection": WEIGHTS,
    "Rewards, lengths, age": REWARDS,
    "The update": UPDATE,
    "OBRS": OBRS,
    "The actor": ACTOR,
    "Counts": COUNTS,
}
ROWS = [row for rows in SECTIONS.values() for row in rows]
# metrics computed in other files: name -> meaning
ELSEWHERE = {
    "loss": "the reduced loss",
    "grad_norm": "of the policy, before clipping; actor/grad_norm",
    "lr": "as applied; actor/lr",
    "stepped": "0 if a non-finite loss or gradient skipped the update",
    "loss_scale": "loss scale of --dtype=float16 after the update",
    "skipped_steps": "updates skipped so far because of a non-finite loss or gradient",
    "rejected_steps": "updates so far in which every token was rejected; the run warns once",
    "eval/policy_pass@1": "held-out pass@1, with eval/policy_se; eval/actor_*",
    "sync/changed": "share of the published tensors that changed since the previous sync (sync.py)",
    "sync/error": "rms(log p_engine - log p_published) at the engine's start, nats; sync/floor: explained by rounding",
    "sync/MiB": "size of the published tensors",
    "grade/timeouts": "answers that could not be graded within 5 seconds (they earn 0)",
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
    "delay/clock": "virtual seconds the learner had to wait (delay.py); delay/waiting, versions, dropped_*",
    "remote/trained": "counts of remote groups, a column for each outcome (remote/source.py); remote/*",
    "rollout_s": "seconds by stage: rollout_s, grade_s (after all decoding), ref_s, update_s, sync_s, eval_s, save_s",
    "time_s": "when the line was written, seconds since the epoch",
    "speed/rollout_tokens": "tokens per second of one rank; speed/update_tokens, peak, memory_GiB (machinery/speed.py)",
}


# ---------------------------------------------------------------------------------------------------------------------
# Measured
# ---------------------------------------------------------------------------------------------------------------------


def observe(sums: Sums, new, batch, stats, logs, cfg: LossFlags) -> None:
    """Add one micro-batch. new: TokenStats, detached; batch: with ref columns; logs: from
    objectives.joint_loss."""
    view = View(new, batch, logs, cfg)
    for row in ROWS:
        if isinstance(row, Mean) and row.when(view):
            add = sums.top if isinstance(row, Max) else sums.add
            add(row.name, row.formula(view), row.over(view))
    constants = {
        "_kappa": stats.kappa,
        "_lam": stats.lam,
        "_distill": stats.distill_lambda,
        "_clamp": view.clamp,
    }
    for name, value in constants.items():
        sums.constant(name, value)


def derive(m: Means) -> dict[str, float]:
    """The logged metrics: means, maxima and `Derived` rows. error/* are omitted if the batch has no
    token or response in their domain."""
    empty = {name for name in m.pairs if name.startswith("error/") and m.count(name) == 0}
    out = {
        name: value for name, value in m.items() if not name.startswith("_") and name not in empty
    }
    for row in ROWS:
        if isinstance(row, Derived) and row.when(m):
            out[row.name] = row.formula(m)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def page() -> str:
    """Names and meanings of all metrics; a family (error/ratio_out/0.1, ...) has one line."""
    lines = []
    for title, rows in SECTIONS.items():
        named = {re.sub(r"/[0-9.]+$", "/N", row.name): row.meaning for row in rows if row.meaning}
        lines += ["", title, *entries(named)]
    return "\n".join([*lines, "", "Logged by other files", *entries(ELSEWHERE)]).strip()


def entries(named: dict[str, str]) -> list[str]:
    out = []
    for name, meaning in named.items():
        out += textwrap.wrap(
            f"{name:46s}{meaning}", 118, initial_indent="  ", subsequent_indent=" " * 48
        )
    return out


if __name__ == "__main__":
    run_command(lambda: print_page("metrics.py", page))
