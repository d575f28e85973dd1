"""Sampling transforms: temperature, min-p, top-k, top-p, and the set of tokens they keep.

An engine does not sample from softmax(logits). It samples from

    q(x) = softmax(logits / temperature), cut to a kept set, renormalised

and unless the learner scores that same law, its ratios compare two different things even when the weights are equal: with
top_p = 0.8 and no mask the mean of p_ref / p_inf is about 0.9. Three worlds (`--keep_sampling_mask`):

    off         the learner scores the whole vocabulary: biased
    recompute   the learner cuts its own logits by the same rule: right while both agree, but a token that one of them
                keeps and the other does not has probability 0 there
    replay      the learner takes the rollout's own kept set, token by token (keep-sampling-mask of DeepSeek-V3.2)

Kept sets travel as ragged lists (offsets, ids), never as a (B, T, V) mask. Source: Mismatch Praxis, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Sampling:
    """The law on top of the model: logits / temperature, then min_p, top_k, top_p (none by default)."""

    temperature: float = 1.0
    top_p: float = 1.0  # the smallest set of most likely tokens with at least this mass
    top_k: int = 0  # the k most likely; 0: all
    min_p: float = 0.0  # tokens with at least this share of the most likely one's probability
    max_tokens: int = 32
    seed: int = 0

    @classmethod
    def of(cls, cfg) -> Sampling:
        """The sampling that the flags ask for."""
        return cls(cfg.temperature, cfg.top_p, cfg.top_k, cfg.min_p, cfg.max_tokens, cfg.seed)

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def check(cfg) -> None:
    """ValueError, one sentence: what cannot be sampled."""

    def need(ok, sentence):
        if not ok:
            raise ValueError(sentence)

    need(cfg.temperature > 0, f"--temperature={cfg.temperature}: must be above 0")
    need(0 < cfg.top_p <= 1, f"--top_p={cfg.top_p}: a probability mass in (0, 1]; 1 keeps all tokens")
    need(cfg.top_k >= 0, f"--top_k={cfg.top_k}: must be 0 (all tokens) or more")
    need(0 <= cfg.min_p < 1, f"--min_p={cfg.min_p}: a share in [0, 1); 0 keeps all tokens")
    need(
        not Sampling.of(cfg).truncates or cfg.logprobs_mode == "processed" or cfg.keep_sampling_mask != "replay",
        "--logprobs_mode=raw: raw log-probabilities do not show which tokens were cut, so there are no kept sets to replay; use processed, or --keep_sampling_mask=off",
    )


def max_allowed(cfg, vocabulary: int) -> int:
    """How many tokens a recorded kept set may have: 0 where none is recorded. Ties with the k-th token add to top_k, few
    among float32 logits, more among rounded ones."""
    if cfg.keep_sampling_mask != "replay" or not Sampling.of(cfg).truncates:
        return 0
    ties = 4 if cfg.rollout_dtype == "float32" or cfg.lm_head_fp32 else 12
    return min(vocabulary, cfg.top_k + ties if cfg.top_k else cfg.kept_max)


def cut(logits, top_p=1.0, top_k=0, min_p=0.0):
    """(n, V) bool: the tokens that are cut. logits: scaled by the temperature already; the others: numbers or (n, 1) tensors.

    In vLLM's order: min_p on the whole law, then top_k, then top_p on what is left; ties with the k-th token stay, and the most
    likely token always stays."""
    s, order = logits.sort(-1, descending=True)
    p = s.softmax(-1)
    gone = p < min_p * p[:, :1]
    V = s.shape[1]
    k = torch.as_tensor(top_k, device=s.device).long().expand(len(s), 1)
    gone |= s < s.gather(1, torch.where(k > 0, k.clamp(max=V), V) - 1)
    p = p.masked_fill(gone, 0.0)
    p = p / p.sum(-1, keepdim=True)
    gone |= p.cumsum(-1) - p >= top_p  # the tokens above already have that mass
    gone[:, 0] = False
    return torch.zeros_like(gone).scatter_(1, order, gone)


def ragged(kept: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(offsets int64 [L+1], ids int32) of a kept set given as kept bool [L, K] over token ids [L, K]."""
    return np.concatenate([[0], kept.sum(1).cumsum()]).astype(np.int64), ids[kept].astype(np.int32)
