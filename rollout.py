"""Rollouts: groups of responses to one prompt, with the log-probabilities of the sampling
distribution.

The group is the unit of transport, staleness, accounting and advantages. A `Rollout` is one group,
without padding (batching.collate pads), sampled by one model at one weight version with one set of
sampling settings. Its log-probabilities are log p_inf as the engine computed them; all corrections
in corrections.py use them.

Sources of groups are in source.py, engines in model/engines.py. All random draws are keyed
(`uniforms`, `request_seed`), so they do not depend on ranks, batches or the order of calls."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from sampling import Sampling

LEAST_LOGP = -200.0  # no engine draws a token of probability exp(-200)


@dataclass
class Response:
    """One response of a group: L tokens, including the end-of-sequence token if it was sampled."""

    tokens: np.ndarray  # int32 [L]
    loss_mask: np.ndarray  # bool [L]: tokens that may carry a gradient
    logp_inf: np.ndarray  # float32 [L]: log-probability under the sampling distribution
    topk_ids: np.ndarray  # int32 [L, K]: the K most likely tokens at each position
    # float32 [L, K]: log-probabilities of topk_ids, in descending order
    topk_logp: np.ndarray
    finish_reason: str  # "stop" or "length"
    # The tokens that truncated sampling allowed at position t: allowed_ids[offsets[t] : offsets[t +
    # 1]]. None if they were not recorded, or if the whole vocabulary was allowed.
    allowed_offsets: np.ndarray | None = None  # int64 [L + 1]
    allowed_ids: np.ndarray | None = None  # int32
    # The experts that the engine chose for each input token: the prompt, and all tokens of the
    # response but the last.
    routed: np.ndarray | None = None  # int16 [P + L - 1, layers, k]
    reward: float = 0.0


@dataclass
class Rollout:
    """One group: G responses to one prompt by one model at one weight version."""

    # sampler, incarnation (one life of its process), sequence number: unique
    uid: tuple[str, int, int]
    prompt_id: str
    prompt_ids: np.ndarray  # int32 [P]
    sampling: Sampling
    version: int  # of the sampling weights: number of learner updates
    digest: str  # of the sampling weights, as the engine received them
    model: str = "policy"  # the model that sampled: "policy" or "actor"
    precision: str = "float32"  # of the sampling engine
    # start and end of sampling, seconds since the epoch, sampler's clock
    t_start: float = 0.0
    t_end: float = 0.0
    responses: list[Response] = field(default_factory=list)
    # Columns of the ref pass (batching.write_ref_columns): name -> one array per response.
    ref: dict[str, list[np.ndarray]] = field(default_factory=dict)
    # publication time of the weights, seconds by the learner's clock
    t_published: float = 0.0


def as_groups(
    key: str, prompts, responses, sampling: Sampling, precision: str = "float32"
) -> list[Rollout]:
    """Convert responses sampled outside a run to groups at version 0; responses[i] belong to
    prompts[i].

    key: part of the uids that distinguishes these groups from all other groups."""
    return [
        Rollout(
            uid=(key, 0, i),
            prompt_id=str(i),
            prompt_ids=prompt,
            sampling=sampling,
            version=0,
            digest="",
            precision=precision,
            responses=rows,
        )
        for i, (prompt, rows) in enumerate(zip(prompts, responses, strict=True))
    ]


def generator(*key) -> np.random.Generator:
    """A counter-based generator (Philox), keyed by a hash of `key` (strings, integers, tuples).

    Its numbers depend only on `key` and position, not on rank, batch or the order of calls."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def uniforms(n: int, *key) -> np.ndarray:
    """n uniform numbers in [0, 1), float64 [n], from the generator of `key`."""
    return generator(*key).random(n)


def probe_ids(context: int, vocabulary: int) -> np.ndarray:
    """Fixed pseudo-random sequences (R, L), about 512 tokens in total, to compare two forward passes."""
    length = min(128, context - 1)
    rows = max(4, 512 // length)
    ids = uniforms(rows * length, "probe") * vocabulary
    return ids.astype(np.int64).reshape(rows, length)


def request_seed(*key) -> int:
    """A 63-bit seed for one response: a hash of `key`."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
