"""Sampling settings: temperature, min-p, top-k and top-p, and the set of tokens that they allow.

An engine does not sample from softmax(logits). It samples from

    q(x) = softmax(logits / temperature), truncated to a set of allowed tokens and renormalised.

If the learner scores a different distribution, importance ratios differ from 1 even with equal
weights: with top_p = 0.8 and full-vocabulary scoring, the mean of p_ref / p_inf is 0.8 to 1.
`--keep_sampling_mask` has three options:

    off         the learner scores the whole vocabulary: biased
    recompute   the learner truncates its own logits by the same rule: correct while both sets
                agree; a token that only the rollout allows has probability 0 under the learner
                (its log-probability is set to -69: model.FLOOR)
    replay      the learner uses the rollout's set of allowed tokens at each position
                (keep-sampling-mask in DeepSeek-V3.2)

Sets of allowed tokens are stored as ragged lists (offsets, ids), never as a (B, T, V) mask.
Source: Mismatch Praxis, section 2."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from config import Config, RolloutFlags, SamplingFlags
from machinery.flags import need

KEPT_MAX = 256  # largest recorded set of allowed tokens if only top_p or min_p truncate


@dataclass(frozen=True)
class Sampling:
    """Transforms of logits before sampling: temperature, then min_p, top_k, top_p; by default none."""

    temperature: float = 1.0
    # the smallest set of most likely tokens with at least this total probability
    top_p: float = 1.0
    top_k: int = 0  # the k most likely tokens; 0: all
    # tokens with at least this share of the largest token probability
    min_p: float = 0.0
    max_tokens: int = 32  # maximum response length
    seed: int = 0

    @classmethod
    def of(cls, cfg: SamplingFlags) -> Sampling:
        """The settings of the flags."""
        top_k = max(0, cfg.top_k)  # vLLM's -1 also means all
        return cls(
            cfg.temperature, cfg.top_p, top_k, cfg.min_p, cfg.max_tokens, cfg.seed
        )

    @classmethod
    def of_policy(cls, cfg: SamplingFlags) -> Sampling:
        """Settings of the learner's distribution; truncated unless --keep_sampling_mask=off."""
        law = cls.of(cfg)
        full = replace(law, top_p=1.0, top_k=0, min_p=0.0)
        return full if cfg.keep_sampling_mask == "off" else law

    @property
    def truncates(self) -> bool:
        """Whether tokens can be excluded."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def max_allowed(cfg: RolloutFlags, vocabulary: int) -> int:
    """Size limit of the recorded set of allowed tokens at one position; 0 if sets are not recorded.

    Tokens tied with the k-th are kept. Ties are rare among float32 logits and frequent among
    rounded logits, so the limit is above top_k."""
    if cfg.keep_sampling_mask != "replay" or not Sampling.of(cfg).truncates:
        return 0
    if cfg.top_k <= 0:
        return min(vocabulary, KEPT_MAX)
    exact_logits = cfg.rollout_dtype == "float32" or cfg.lm_head_fp32
    ties = 4 if exact_logits else 12 + cfg.top_k // 2
    return min(vocabulary, cfg.top_k + ties)


def cut(logits, top_p=1.0, top_k=0, min_p=0.0):
    """Mask of tokens that truncated sampling excludes: (n, V) bool.

    logits (n, V) are already divided by the temperature; the settings are numbers, or (n, 1)
    tensors. The order is vLLM's: min_p on the whole distribution, then top_k, then top_p on the
    rest. Tokens tied with the k-th are kept (vLLM's GPU kernel keeps k tokens), and so is the most
    likely token."""
    z, order = logits.sort(-1, descending=True)
    p = z.softmax(-1)
    V = z.shape[1]
    gone = p < min_p * p[:, :1]
    k = torch.as_tensor(top_k, device=z.device).long().expand(len(z), 1)
    # index of the k-th token in descending order
    last = torch.where(k > 0, k.clamp(max=V), V) - 1
    gone |= z < z.gather(1, last)
    p = p.masked_fill(gone, 0.0)
    p = p / p.sum(-1, keepdim=True)
    # more likely tokens already have this total probability
    gone |= p.cumsum(-1) - p >= top_p
    return torch.zeros_like(gone).scatter_(1, order, gone)


def allowed_sets(
    ids: np.ndarray, logp: np.ndarray, sampled: np.ndarray, max_allowed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sets of allowed tokens from the K most likely tokens at n positions: (offsets int64 [n + 1],
    ids int32).

    ids, logp [n, K]: excluded tokens have log-probability -inf. sampled [n]: sampled tokens.
    UserError if a set has more than K tokens: all K tokens are allowed but their total probability
    is below 1, or the sampled token is not among the allowed tokens."""
    finite = np.isfinite(logp)
    full = logp[finite.all(1)].astype(np.float64)
    complete = np.exp(full).sum(1).min(initial=1.0) >= 1 - 1e-4
    need(
        complete and ((ids == sampled[:, None]) & finite).any(1).all(),
        f"truncated sampling allows more than {max_allowed} tokens: bound the number with --top_k; if --top_k is "
        "set, the cause is ties of rounded logits, and --lm_head_fp32=True has fewer ties",
    )
    offsets = np.concatenate([[0], finite.sum(1).cumsum()]).astype(np.int64)
    return offsets, ids[finite].astype(np.int32)


def truncate(z, sampling: Sampling):
    """Set scaled logits z (n, V) of excluded tokens to -inf, in place, and return them."""
    if sampling.truncates:
        z.masked_fill_(
            cut(z, sampling.top_p, sampling.top_k, sampling.min_p), -torch.inf
        )
    return z


def pick(logp, u):
    """Draw one token per row by inversion: the first token with a cumulative probability above u.

    logp (n, V) float32; u (n, 1) float64 in [0, 1). Returns token ids, (n, 1) int64."""
    cdf = logp.double().exp_().cumsum_(-1)
    token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)
    return token.clamp_(max=logp.shape[1] - 1)


def check(cfg: SamplingFlags) -> None:
    """Raise UserError, one sentence, if sampling flags are invalid."""
    need(
        0 < cfg.top_p <= 1,
        f"--top_p={cfg.top_p}: must be in (0, 1]; 1 keeps all tokens",
    )
    need(
        cfg.top_k >= -1,
        f"--top_k={cfg.top_k}: must be at least -1; 0 or -1 keeps all tokens",
    )
    need(
        0 <= cfg.min_p < 1,
        f"--min_p={cfg.min_p}: must be in [0, 1); 0 keeps all tokens",
    )
    replays = Sampling.of(cfg).truncates and cfg.keep_sampling_mask == "replay"
    need(
        not replays or cfg.logprobs_mode == "processed",
        "--logprobs_mode=raw: raw log-probabilities do not show which tokens were removed, so no allowed sets exist "
        "to replay; use processed, or --keep_sampling_mask=off",
    )


def check_kl(cfg: Config) -> None:
    """Raise UserError if a KL of the loss would be between two distributions that are truncated
    separately."""
    recomputes = Sampling.of(cfg).truncates and cfg.keep_sampling_mask == "recompute"
    need(
        not (cfg.actor != "none" or cfg.kl_coef or cfg.cppo_beta) or not recomputes,
        "--keep_sampling_mask=recompute with an --actor, --kl_coef or --cppo_beta: the KL between two truncated "
        "distributions is infinite; use replay",
    )
