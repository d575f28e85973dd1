"""Rollouts: a group of responses to one prompt, with the log-probabilities of the distribution that
sampled them.

The group is the unit of everything that follows: transport, staleness, accounting, advantage. A
`Rollout` is one group, without padding (batching.collate pads), sampled by one model at one weight
version with one set of sampling settings. Its log-probabilities are p_inf, as the engine computed
them, and every correction in corrections.py starts from them.

Sources of groups are in source.py, engines in model/engines.py. All random draws are keyed
(`uniforms`, `request_seed`), so they do not depend on ranks, batches or the order of calls."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from sampling import Sampling


@dataclass
class Response:
    """One response of a group: L tokens, the end-of-sequence token among them if it was sampled."""

    tokens: np.ndarray  # int32 [L]
    loss_mask: np.ndarray  # bool [L]: tokens that may carry a gradient
    logp_inf: np.ndarray  # float32 [L]: of each token, under the distribution that sampled it
    topk_ids: np.ndarray  # int32 [L, K]: the K most likely tokens there
    topk_logp: np.ndarray  # float32 [L, K]: their log-probabilities, in falling order
    finish_reason: str  # "stop" or "length"
    # The tokens that truncated sampling allowed: token t is one of allowed_ids[offsets[t] :
    # offsets[t + 1]]. None where they were not recorded, or where the whole vocabulary was allowed.
    allowed_offsets: np.ndarray | None = None  # int64 [L + 1]
    allowed_ids: np.ndarray | None = None  # int32
    # The experts that the engine chose for each token that it read: of the prompt, and of all here
    # but the last.
    routed: np.ndarray | None = None  # int16 [P + L - 1, layers, k]
    reward: float = 0.0


@dataclass
class Rollout:
    """One group: G responses to one prompt by one model at one weight version."""

    uid: tuple[str, int, int]  # sampler, incarnation, sequence number: never given twice
    prompt_id: str
    prompt_ids: np.ndarray  # int32 [P]
    sampling: Sampling
    model: str  # the model that sampled: "policy" or "actor"
    precision: str  # of the sampling engine, e.g. "float32"
    version: int  # how many learner updates made the weights that sampled
    digest: str  # of those weights, as the engine received them
    t_start: float  # start and end of sampling, in seconds since the epoch by the learner's clock
    t_end: float
    responses: list[Response] = field(default_factory=list)
    # Columns of the ref pass (batching.write_ref_columns): name -> one array for each response.
    ref: dict[str, list[np.ndarray]] = field(default_factory=dict)
    t_published: float = 0.0  # when the learner published the weights, in seconds by its own clock


def as_groups(
    key: str, prompts, responses, sampling: Sampling, precision: str = "float32"
) -> list[Rollout]:
    """Responses that an engine sampled outside a run, as groups at version 0; responses[i] belong
    to prompts[i].

    key: part of their uids that distinguishes them from other groups."""
    about = dict(
        sampling=sampling,
        model="policy",
        precision=precision,
        version=0,
        digest="",
        t_start=0.0,
        t_end=0.0,
    )
    groups = []
    for i, (prompt, rows) in enumerate(zip(prompts, responses, strict=True)):
        groups.append(
            Rollout((key, 0, i), prompt_id=str(i), prompt_ids=prompt, responses=rows, **about)
        )
    return groups


def generator(*key) -> np.random.Generator:
    """A counter-based generator (Philox) of numbers that depend on `key` and on their position
    alone.

    It is keyed by a hash of `key`: strings, integers and tuples of them. No rank, no batch and no
    order of calls enters."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def uniforms(n: int, *key) -> np.ndarray:
    """n uniform numbers in [0, 1), float64 [n], of the generator of `key`."""
    return generator(*key).random(n)


def probe_ids(context: int, vocabulary: int) -> np.ndarray:
    """Fixed pseudo-random sequences (R, L), some 512 tokens, on which two forwards of one model are
    compared."""
    length = min(128, context - 1)
    rows = max(4, 512 // length)
    return (uniforms(rows * length, "probe") * vocabulary).astype(np.int64).reshape(rows, length)


def request_seed(*key) -> int:
    """A seed of 63 bits for one response: a hash of `key`, as in `uniforms`."""
    return (
        int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1
    )
