"""Agreement of learner and engine before the first update, and of model/head.py with a model's own
head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import batching
from batching import Batch
from config import Config, RolloutFlags
from machinery.flags import UserError, need
from model import Needs
from model.head import rows_at_once
from model.streamed import nudged
from sampling import Sampling

# tolerance per dtype: mean |difference in log p| between two head implementations
HEADS = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}
AGREES = 1e-3  # smallest tolerance of mean |p_learner - p_engine|, for every dtype
LIMIT = 5.0  # tolerance, in multiples of the noise floor


@dataclass(frozen=True)
class Agreement:
    """Distances between learner and engine with the same weights: means over sampled tokens."""

    gap: float  # |p_learner - p_engine|
    floor: float  # |p_learner - p_nudged|: each module's output perturbed by the rounding error


def agreement(learner, batch: Batch) -> Agreement:
    """Compare learner and engine on a batch sampled with the same weights. Collective."""
    part = batch.select(range(min(len(batch), 16)))
    model = getattr(learner.models, learner.names[-1])

    def probabilities() -> torch.Tensor:
        stats = learner.score(part, Needs())
        return (stats.actor_logp if learner.has_actor else stats.logp).exp().double()

    def distance(p, q) -> float:
        total, n = learner.comm.sum([((p - q).abs() * part.mask).sum(), part.mask.sum()])
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
    aligned = cfg.learner_quant in ("aligned", cfg.rollout_quant)
    gap = (
        f"on the first rollouts, with the same weights, |p_learner - p_engine| is {found.gap:.3g} on average "
        f"and rounding explains at most {limit:.2g}"
    )
    if not found.gap <= limit:
        if not aligned or cfg.kv_cache_dtype != "auto":
            return f"{gap}: the mismatch of --rollout_quant={cfg.rollout_quant} --kv_cache_dtype={cfg.kv_cache_dtype}"
        raise UserError(
            f"learner and engine compute different policies: {gap}; check whether the model (config.json) or the "
            "engine caps, scales or shifts the logits; --check_sync=False trains without this check"
        )
    return ""


def expects_agreement(cfg: Config) -> bool:
    """Whether engine and learner should compute the same policy: same weights and distribution."""
    fresh = cfg.samplers == "local" and cfg.delay == "none"
    same = cfg.logprobs_mode == "processed" and (
        cfg.keep_sampling_mask == "replay" or not Sampling.of(cfg).truncates
    )
    return cfg.check_sync and fresh and same


def check_heads(learner, ids: np.ndarray) -> None:
    """Raise UserError, one sentence, if model/head.py computes different logits than the
    model's own head. Collective.

    The comparison is in full precision, since it tests the function and not the rounding. ids:
    token ids (R, L)."""
    longest = min(
        rows_at_once(getattr(learner.models, name).config, ids.shape[1]) for name in learner.names
    )
    batches = [
        batching.of_rows(ids[i : i + longest], learner.cfg) for i in range(0, len(ids), longest)
    ]
    ours = [learner.score_in_full_precision(batch, Needs()) for batch in batches]
    expected_stats = [
        learner.score_in_full_precision(batch, Needs(own_head=True)) for batch in batches
    ]
    for name, key in zip(learner.names, ("logp", "actor_logp"), strict=False):
        config = getattr(learner.models, name).config
        logp, expected = (
            torch.cat([getattr(stats, key) for stats in stats_list])
            for stats_list in (ours, expected_stats)
        )
        gap = float((logp - expected).abs().mean())
        need(
            gap <= HEADS.get(str(expected.dtype).removeprefix("torch."), 1e-3),
            f"--{name if name == 'actor' else 'model'}: models of the family {config.model_type} apply an "
            f"operation to their logits that model/head.py lacks (log-probabilities differ by {gap:.3g} from the "
            "model's); choose a different model, or add the operation to head.Head",
        )
