"""Agreement of learner and engine before the first update."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batching import Batch
from config import Config, RolloutFlags
from machinery.flags import UserError
from model import Needs
from model.streamed import nudged
from sampling import Sampling

AGREES = 1e-3  # smallest tolerance of mean |p_learner - p_engine|, for every dtype
LIMIT = 5.0  # tolerance, in multiples of the noise floor


@dataclass(frozen=True)
class Agreement:
    """Distances between learner and engine with the same weights: means over sampled tokens."""

    gap: float  # |p_learner - p_engine|
    # |p_learner - p_nudged|: each module's output perturbed by the rounding error
    floor: float


def agreement(learner, batch: Batch) -> Agreement:
    """Compare learner and engine on a batch sampled with the same weights. Collective."""
    part = batch.select(range(min(len(batch), 16)))
    model = getattr(learner.models, learner.names[-1])

    def probabilities() -> torch.Tensor:
        stats = learner.score(part, Needs())
        return (stats.actor_logp if learner.has_actor else stats.logp).exp().double()

    def distance(p, q) -> float:
        total, n = learner.comm.sum(
            [((p - q).abs() * part.mask).sum(), part.mask.sum()]
        )
        return total / n if n else 0.0

    learner_p, engine = probabilities(), part.logp_inf.exp().double()
    rounding = max(
        torch.finfo(getattr(torch, dtype)).eps
        for dtype in (learner.cfg.dtype, learner.cfg.rollout_dtype)
    )
    with nudged(model, rounding / 2):
        floor = distance(learner_p, probabilities())
    return Agreement(distance(learner_p, engine), floor)


def check_agreement(cfg: RolloutFlags, found: Agreement) -> str:
    """A warning, or "". UserError if, with the same weights, engine and learner compute different
    policies.

    The check detects a soft cap, scale, bias or temperature of the logits on only one side. If
    --learner_quant is neither aligned nor the engine's format, or --kv_cache_dtype is not auto, a
    larger difference is expected and gets the warning."""
    limit = max(AGREES, LIMIT * found.floor)
    if found.gap <= limit:
        return ""
    aligned = cfg.learner_quant in ("aligned", cfg.rollout_quant)
    gap = (
        f"on the first rollouts, with the same weights, |p_learner - p_engine| is {found.gap:.3g} on average "
        f"and rounding explains at most {limit:.2g}"
    )
    if not aligned or cfg.kv_cache_dtype != "auto":
        return f"{gap}: the mismatch of --rollout_quant={cfg.rollout_quant} --kv_cache_dtype={cfg.kv_cache_dtype}"
    raise UserError(
        f"learner and engine compute different policies: {gap}; check whether the model (config.json) or the "
        "engine caps, scales or shifts the logits; --check_sync=False trains without this check"
    )


def expects_agreement(cfg: Config) -> bool:
    """Whether engine and learner should compute the same policy: same weights and distribution."""
    fresh = cfg.samplers == "local" and cfg.delay == "none"
    same = cfg.logprobs_mode == "processed" and (
        cfg.keep_sampling_mask == "replay" or not Sampling.of(cfg).truncates
    )
    return cfg.check_sync and fresh and same
