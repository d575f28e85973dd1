"""Metrics: how far apart the laws are, what the correction did about it, and where it is all written down.

`observe` looks at one micro-batch and adds to running sums; `Sums.reduce` adds those over micro-batches and ranks, so that
every number is a mean over the whole step, never "the last micro-batch". Names follow verl's `rollout_corr/*`.

  rollout_corr/ratio_mean    mean of r = p_ref / p_inf, 1 where both are one law
  rollout_corr/kl            mean(log p_inf - log p_ref): k1 estimate of KL(inf || ref), samples from inf; negative by chance alone
  rollout_corr/k3_kl         mean(r - log r - 1) >= 0, the same KL with less variance;  r = p_ref / p_inf
  rollout_corr/chi2_token    mean(r^2) - 1;  chi2_seq: the same of R = exp(clamp(sum log r, +-clamp))
  rollout_corr/rollout_is_*  mean, min, max, std of the weight applied to each token (after caps; 1 without correction; OBRS's expected
                             mask is part of it, a draw is not; with ratio_base inf or group times the unclipped ratio)
  rollout_corr/rollout_is_eff_sample_size    (sum w)^2 / (n sum w^2) of weight x keep: 1 is "all tokens count alike"
  rollout_corr/rollout_is_ratio_fraction_high, _low    share of tokens with r > C, r < 1/C (C = --is_cap of a token weight, else 2)
  rollout_corr/seq_eff_sample_size   the same of R over responses. Read it beside seq_clamped_fraction: responses at the
                             clamp all weigh e^20 or e^-20, so a fully clamped batch shows a *false* ESS of 1
  rollout_corr/seq_false_ess 1 where more than half of the responses stand at the clamp: that ESS says nothing; said aloud once
  rollout_corr/t_max         clamp / KL: the response length at which sequence weights hit the clamp (Praxis, section 4)
  rollout_corr/low_weight_fraction   share of responses with R < 1/C (C = --is_cap of a sequence weight, else 4)
  rollout_corr/rollout_rs_masked_fraction, _seq_masked_fraction   tokens rejected; responses with no token left
  rollout_corr/reward_weighted   sum min(R, C) reward / sum min(R, C): what the learner itself would earn; `reward` is the sampler's, and
                             the two part where the laws do (TIS text, "biased reward")
  rollout_corr/mean_mismatch, max_mismatch   |p_inf - p_ref|, mean and maximum over a response, mean over responses (TIS)
  rollout_corr/ppl_ratio     mean over responses of exp(mean log p_inf - mean log p_ref)
  rollout_corr/seq_weight/N  mean R of responses of N/2 < length <= N tokens (16: up to 16); low_weight/N: their low-weight fraction
  error/low_prob_pos, _neg   sampled tokens with p_ref < 1e-3, share of those with A > 0 and with A < 0 ("error tokens", QaRL Fig. 4c)
  error/repetition           share of a response's 4-grams that it has said before, mean over responses
  error/ratio_out/P          tokens with p_new / p_ref outside [1/2, 2], share of those with p_ref <= P and above the next smaller P (QaRL Fig. 5b)
  rollout_corr/cut_fraction  sampled tokens that the learner's own law cuts (--keep_sampling_mask=recompute): they stand at e^-69
  ppo_kl                     mean(log p_ref - log p_new), k1. Warning: it estimates KL(ref || new) under samples of ref, but these are
                             samples of inf, so where the two differ it goes negative and means nothing (TIS text)
  ppo_kl_weighted            the same weighted by min(r, C): the estimate under ref
  ppo_k3_kl                  mean(p_new / p_ref - 1 - log(p_new / p_ref)): never negative, and biased just as well: a sign is no proof
  cppo_kl                    what --cppo_beta weighs: exp(d) - d - 1 between inf and new (gepo.py)
  clip_fraction              tokens whose surrogate is clipped; _high: of those with A > 0, _low: with A < 0
  weight_var                 variance of weight x keep
  weighted_advantage         mean over tokens of weight x keep x A; with --advantage_error_every also fresh_advantage, the mean A of
                             fresh samples of the policy under the same baselines, and advantage_error, their distance
  obrs/*                     accept_rate, z (as used), z_exact (two models), z_low, z_high, bracket_width, kappa (where Z is bracketed), lambda;
                             kl_ref, kl_after = KL(p_tgt || p_inf), KL(p_tgt || accepted law) over the vocabulary where the learner
                             knows both laws; `_partial`: over S alone
  distill_kl, actor/*        KL(policy || actor) a token over the whole vocabulary; the actor's loss, entropy, gradient norm, and the
                             distillation loss as chosen by flags; actor/engine_gap: |p_inf - p_omega,ref|, engine against learner
  staleness/*                age of the sampling weights, in updates and in seconds
  sync/*                     error, distance, proved: the probe of the last weight sync (sync.py); MiB moved
  delay/*, remote/*          the virtual clock and what its bounds drop (delay.py); the account of remote groups (remote.py)
  grad_norm, lr, response_length, distill_lambda, *_s   norm before clipping; as applied; tokens; as the closed loop has it; seconds by stage
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from sampling import Sampling
from head import FLOOR
from objectives import SEQUENCE

BUCKETS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]


class Sums:
    """Running (sum, count) pairs and maxima, on the device until `reduce`."""

    def __init__(self):
        self.pairs, self.tops = {}, {}

    def add(self, name, x, where):
        """Adds x over the true entries of `where` (same shape): one more share of the mean called `name`."""
        x = x.double() * where
        old = self.pairs.get(name, (0.0, 0.0))
        self.pairs[name] = (old[0] + x.sum(), old[1] + where.sum())

    def top(self, name, x, where):
        """Adds to the maximum called `name`."""
        value = x.double().masked_fill(~where, -math.inf).amax()
        self.tops[name] = torch.maximum(self.tops[name], value) if name in self.tops else value

    def reduce(self, comm) -> dict[str, float]:
        """All means and maxima over ranks, and what is derived from them."""
        names, tops = list(self.pairs), list(self.tops)
        flat = comm.sum([v for n in names for v in self.pairs[n]])
        s = {n: (flat[2 * i], flat[2 * i + 1]) for i, n in enumerate(names)}
        m = {n: a / b if b else 0.0 for n, (a, b) in s.items()}
        m.update(zip(tops, comm.max([self.tops[n] for n in tops]) if tops else []))
        return derive(m, s)


def observe(sums: Sums, new, batch, stats, logs, cfg) -> None:
    """Add one micro-batch. new: TokenStats, detached; batch: with ref columns; logs: from objectives.loss."""
    mask, inf, ref = batch.mask, batch.logp_inf, batch.logp_ref
    has = mask.any(1)
    n = mask.sum(1).clamp_min(1)
    log_r = ref - inf
    clamp = cfg.log_ratio_clamp
    r = log_r.clamp(-clamp, clamp).exp()
    log_r = log_r.masked_fill(~mask, 0.0)
    applied = logs["weight"] * logs["keep"]
    weight = (
        applied if cfg.correction in ("obrs", "jackpot_adjusted") and cfg.obrs_mask == "expected" else logs["weight"]
    )
    if cfg.keep_sampling_mask == "recompute" and Sampling.of(cfg).truncates:
        sums.add("rollout_corr/cut_fraction", ref <= FLOOR, mask)
    C = cfg.is_cap if cfg.is_cap and cfg.correction in ("tis", "areal_drop", "tis_adjusted") else 2.0
    C_seq = cfg.is_cap if cfg.is_cap and cfg.correction in SEQUENCE else 4.0
    clipped = logs["clipped"]
    for name, x in (
        ("rollout_corr/kl", -log_r),
        ("rollout_corr/k3_kl", r - log_r - 1),
        ("r2", r * r),
        ("w", weight),
        ("w2", weight**2),
        ("wk", applied),
        ("wk2", applied**2),
        ("rollout_corr/rollout_is_ratio_fraction_high", r > C),
        ("rollout_corr/rollout_is_ratio_fraction_low", r < 1 / C),
        ("rollout_corr/ratio_mean", r),
        ("weighted_advantage", applied * batch.adv),
        ("keep", logs["keep"]),
        ("clip_fraction", clipped),
        ("clip_fraction_high", clipped & (batch.adv > 0)),
        ("clip_fraction_low", clipped & (batch.adv < 0)),
        ("ppo_kl", ref - new.logp),
        ("ppo_kl_weighted", r.clamp_max(C) * (ref - new.logp)),
        ("ppo_k3_kl", (new.logp - ref).clamp(-clamp, clamp).exp() - 1 - (new.logp - ref)),
        ("entropy", new.entropy),
    ):
        sums.add(name, x, mask)
    if "cppo_kl" in logs:
        sums.add("cppo_kl", logs["cppo_kl"], mask)
    sums.top("rollout_corr/rollout_is_max", weight, mask)
    sums.top("neg_min", -weight, mask)
    total = log_r.sum(1)
    R = total.clamp(-clamp, clamp).exp()
    gap = (inf.exp() - ref.exp()).abs() * mask
    low = (R < 1 / C_seq).double()
    capped = R.clamp_max(C_seq)
    for name, x in (
        ("R", R),
        ("capped", capped),
        ("capped_reward", capped * batch.reward),
        ("R2", R * R),
        ("rollout_corr/seq_clamped_fraction", total.abs() >= clamp),
        ("rollout_corr/low_weight_fraction", low),
        ("rollout_corr/mean_mismatch", gap.sum(1) / n),
        ("rollout_corr/max_mismatch", gap.amax(1)),
        ("rollout_corr/ppl_ratio", (((inf - ref) * mask).sum(1) / n).clamp(-clamp, clamp).exp()),
        ("rollout_corr/rollout_rs_seq_masked_fraction", (logs["keep"] * mask).sum(1) == 0),
        ("reward", batch.reward),
        ("response_length", batch.length),
        ("advantage_abs", batch.adv[:, 0].abs()),
        ("staleness/mean_updates", batch.staleness[:, 0]),
        ("staleness/mean_seconds", batch.staleness[:, 1]),
    ):
        sums.add(name, x, has)
    error = ref < math.log(1e-3)
    sums.add("error/low_prob_pos", error, mask & (batch.adv > 0))
    sums.add("error/low_prob_neg", error, mask & (batch.adv < 0))
    sums.add("error/repetition", repetition(batch.tokens, batch.exists), has & (batch.length >= 4))
    moved, below = (new.logp - ref).abs() > math.log(2), -math.inf
    for p in (1e-3, 1e-1, 1.0):
        sums.add(f"error/ratio_out/{p:g}", moved, mask & (ref > below) & (ref <= math.log(p) + 1e-6))
        below = math.log(p) + 1e-6
    sums.top("staleness/max_updates", batch.staleness[:, 0], has)
    sums.top("staleness/max_seconds", batch.staleness[:, 1], has)
    below = 0
    for edge in BUCKETS:
        inside = has & (batch.length > below) & (batch.length <= edge)
        sums.add(f"rollout_corr/seq_weight/{edge}", R, inside)
        sums.add(f"rollout_corr/low_weight/{edge}", low, inside)
        below = edge
    if "z" in logs:
        for name in ("accept", "z", "z_low", "z_high"):
            if name in logs:
                sums.add({"accept": "obrs/accept_rate"}.get(name, f"obrs/{name}"), logs[name], mask)
        s_tgt = batch.support_logp_ref if cfg.obrs_target == "ref" else new.support_logp
        whole = (
            {"obrs/kl_ref": batch.kl_ref, "obrs/kl_after": batch.kl_after, "obrs/z_exact": batch.z_ref}
            if cfg.obrs_target == "ref"
            else {}
        )
        for name, x in whole.items():
            if x is not None:
                sums.add(name, x, mask)
        if whole.get("obrs/kl_after") is None:
            on = batch.support_logp.isfinite()
            gap = (s_tgt - batch.support_logp.masked_fill(~on, 0.0)).masked_fill(~on, 0.0)
            p = s_tgt.exp()
            sums.add("obrs/kl_before_partial", (p * gap).sum(-1), mask)
            after = logs["z"].clamp_min(1e-30).log()[..., None] + gap.clamp_min(math.log(stats["lam"]))
            sums.add("obrs/kl_after_partial", (p * after * on).sum(-1), mask)
    if new.actor_logp is not None:
        sums.add("actor/entropy", new.actor_entropy, mask)
        sums.add("actor/loss", logs["actor_loss"], mask)
        sums.add("actor/engine_gap", (batch.actor_logp_ref.exp() - inf.exp()).abs(), mask)
        sums.add("distill_kl", new.kl_full, mask)
        sums.add("actor/distill_loss", new.kl, mask)
    for name, x in (*((k, stats[k]) for k in ("kappa", "lam", "distill")), ("clamp", clamp)):  # the same on every rank
        sums.pairs[name] = (x, 1.0)


def repetition(tokens, exists, n: int = 4):
    """Share of a response's n-grams that stand earlier in it too, (B,): 1 - distinct / all; 0 for one shorter than n."""
    if tokens.shape[1] < n:
        return tokens.new_zeros(len(tokens), dtype=torch.double)
    grams, whole = tokens.unfold(1, n, 1), exists.unfold(1, n, 1).all(-1)
    key = torch.zeros_like(grams[..., 0])
    for i in range(n):  # a hash: collisions of 64 bits are not worth a thought
        key = key * 1_000_003 + grams[..., i] + 1
    key = torch.where(
        whole, key, torch.arange(key.shape[1], device=key.device) - 2**62
    )  # what does not exist is all distinct
    first = key.sort(1).values
    repeats = (first[:, 1:] == first[:, :-1]).sum(1)
    return repeats / whole.sum(1).clamp_min(1).double()


def derive(m: dict, s: dict) -> dict[str, float]:
    """Standard deviations, effective sample sizes and bounds from the means, then only public names."""
    ess = lambda a, b: m[a] ** 2 / m[b] if m[b] > 0 else 0.0
    out = {
        k: v
        for k, v in m.items()
        if "/" in k
        or k
        in (
            "clip_fraction",
            "clip_fraction_low",
            "clip_fraction_high",
            "ppo_kl",
            "ppo_kl_weighted",
            "ppo_k3_kl",
            "cppo_kl",
            "entropy",
            "reward",
            "weighted_advantage",
            "response_length",
            "advantage_abs",
            "distill_kl",
        )
    }
    kl = m["rollout_corr/kl"]
    out.update(
        {
            "rollout_corr/chi2_token": m["r2"] - 1,
            "rollout_corr/chi2_seq": m["R2"] - 1,
            "rollout_corr/rollout_is_mean": m["w"],
            "rollout_corr/rollout_is_min": -m["neg_min"],
            "rollout_corr/rollout_is_std": math.sqrt(max(0.0, m["w2"] - m["w"] ** 2)),
            "rollout_corr/rollout_is_eff_sample_size": ess("wk", "wk2"),
            "rollout_corr/seq_eff_sample_size": ess("R", "R2"),
            "rollout_corr/rollout_rs_masked_fraction": 1.0 - m["keep"],
            "weight_var": max(0.0, m["wk2"] - m["wk"] ** 2),
            "rollout_corr/reward_weighted": m["capped_reward"] / m["capped"] if m["capped"] > 0 else 0.0,
            "rollout_corr/seq_false_ess": float(m["rollout_corr/seq_clamped_fraction"] > 0.5),
            "rollout_corr/t_max": m["clamp"] / kl if kl > 0 else math.inf,
            "tokens": s["w"][1],
        }
    )
    if "obrs/z" in m:
        out["obrs/lambda"] = m["lam"]
    if "obrs/z_low" in m:
        out.update(
            {
                "obrs/kappa": m["kappa"],
                "obrs/z_low_over_z": m["obrs/z_low"] / max(m["obrs/z"], 1e-30),
                "obrs/bracket_width": m["obrs/z_high"] - m["obrs/z_low"],
            }
        )
        out.update(z_low_sum=s["obrs/z_low"][0], accept_sum=s["obrs/accept_rate"][0])
    if "actor/loss" in m:
        out["distill_lambda"] = m["distill"]
    return {
        k: v
        for k, v in out.items()
        if not (k.startswith(("rollout_corr/seq_weight", "rollout_corr/low_weight/")) and s[k][1] == 0)
    }


# ---------------------------------------------------------------------------------------------------------------------
# Where metrics go
# ---------------------------------------------------------------------------------------------------------------------

# what is said aloud, once a run, when a metric is above 0
WARNINGS = {
    "rollout_corr/seq_false_ess": "more than half of the responses stand at the clamp of --log_ratio_clamp: their weights are equal because they are cut, and an "
    "effective sample size near 1 is false; sequence weights correct nothing at this length (rollout_corr/t_max)",
    "rejected_steps": "every token of an update was rejected: the policy did not move; widen --rs_low and --rs_high, or look at rollout_corr/kl "
    "(rejected_steps counts such updates)",
}


class Log:
    """metrics.jsonl, and TensorBoard and wandb by flag. One line an update; times end in `_s` or `_seconds` and nothing else does."""

    def __init__(self, run: Path, cfg, step: int):
        self.path = run / "metrics.jsonl"
        truncate(self.path, step or -1)  # from the start: the evaluation before training (step -1) too
        self.file = open(self.path, "a", encoding="utf-8")
        self.board = self.wandb = None
        self.said = set()
        if cfg.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(run / "tensorboard"), purge_step=step)
        if cfg.wandb:
            import wandb

            self.wandb = wandb.init(
                project=cfg.wandb, name=run.name, dir=str(run), config=vars(cfg), id=run.name, resume="allow"
            )

    def write(self, step: int, values: dict) -> None:
        self.file.write(json.dumps({"step": step, **{k: clean(v) for k, v in values.items()}}) + "\n")
        self.file.flush()
        for name in WARNINGS.keys() - self.said:
            if values.get(name, 0) > 0:
                self.said.add(name)
                tqdm.write(f"warning: update {step + 1}: {WARNINGS[name]}", file=sys.stderr)
        numbers = {k: v for k, v in values.items() if isinstance(v, (int, float)) and math.isfinite(v)}
        if self.board:
            for k, v in numbers.items():
                self.board.add_scalar(k, v, step + 1)  # updates done: neither likes the -1 of before training
        if self.wandb:
            self.wandb.log(numbers, step=step + 1)

    def close(self) -> None:
        self.file.close()
        if self.board:
            self.board.close()
        if self.wandb:
            self.wandb.finish()


def clean(v):
    """JSON has no infinity: it is written as null."""
    return None if isinstance(v, float) and not math.isfinite(v) else v


def truncate(path: Path, step: int) -> None:
    """Keep the lines of updates before `step`: what a resumed run has not done again must not stand there twice."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break  # a line cut short by a kill: everything after it is later
        if row["step"] < step:
            kept.append(line)
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(scratch, path)


def read(run: Path | str) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the folder of a run (it holds metrics.jsonl)")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
