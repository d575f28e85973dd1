"""A group of rollouts as bytes, and the learner's checks of received groups. HeteroRL, section 4.2.

A group is one safetensors file: arrays over all N tokens of its G responses, end to end, and
everything else as JSON in the file's metadata (`GroupHead`).

    prompt_ids    int32 [P]            tokens, loss_mask, logp_inf    int32, bool, float32 [N]
    lengths       int32 [G]            topk_ids, topk_logp            int32, float32 [N, K]
    rewards       float64 [G]          allowed_ids, allowed_sizes     int32 [sum of sizes], [N]
                                       routed                         int16 [N + G (P - 1), layers, k]

allowed_ids and allowed_sizes exist with truncated sampling only. They hold, one after the other,
the sets of tokens from which the tokens were drawn. routed exists with --router_replay only. A
sampler may send anything: `decode_group` returns a Rollout that fits the run and that an engine can
have sampled, or raises WireError with the reason. An accepted group must not stop the learner."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import msgspec
import numpy as np
from safetensors.numpy import load, save

from remote.account import is_sampler
from remote.wire import Number, Seconds, Text, WireError, need, printable
from rollout import LEAST_LOGP, Response, Rollout
from sampling import Sampling
from tasks.turns import PER_TOKEN

SHAPES = {  # array -> type, dimensions
    "prompt_ids": (np.int32, 1),
    "lengths": (np.int32, 1),
    "rewards": (np.float64, 1),
    "tokens": (np.int32, 1),
    "loss_mask": (np.bool_, 1),
    "logp_inf": (np.float32, 1),
    "topk_ids": (np.int32, 2),
    "topk_logp": (np.float32, 2),
    "allowed_ids": (np.int32, 1),
    "allowed_sizes": (np.int32, 1),
    "routed": (np.int16, 3),
}
MOST_REWARD = 1e6  # rewards are squared in float32


@dataclass(frozen=True)
class Limits:
    """The sizes that the learner accepts. A larger group is refused before anything is
    allocated."""

    group_size: int
    max_tokens: int
    max_prompt: int
    vocab: int
    topk: int
    max_allowed: int  # tokens of a set of allowed tokens; 0: no sets are recorded
    # layers with experts, experts per token, number of experts; 0: not recorded
    routed: tuple[int, int, int] = (0, 0, 0)
    # most bytes of groups that the learner holds or has asked for
    room: int = 256 << 20

    @property
    def nbytes(self) -> int:
        """The largest size of one group."""
        layers, k, _ = self.routed
        token = 4 + 1 + 4 + 8 * self.topk + 4 + 4 * self.max_allowed + 2 * layers * k
        prompts = self.max_prompt * (4 + self.group_size * 2 * layers * k)
        return self.group_size * (self.max_tokens * token + 64) + prompts + (1 << 16)


class GroupHead(msgspec.Struct, frozen=True):
    """Everything in a group except its arrays. Decoding checks the sizes and ranges."""

    uid: tuple[Text, Number, Number]
    prompt_id: Annotated[str, msgspec.Meta(max_length=1024)]
    sampling: dict
    model: Text
    precision: Text
    version: Number
    digest: Text
    t_published: Seconds
    t_start: Seconds
    t_end: Seconds
    finish: list[Literal["stop", "length"]]  # of each response


OF_GROUP = [
    name for name in GroupHead.__struct_fields__ if name not in ("sampling", "finish")
]


def name_of(uid) -> str:
    """The group's name, SAMPLER/INCARNATION/N."""
    return f"{uid[0]}/{uid[1]}/{uid[2]}"


def encode_group(group: Rollout) -> bytes:
    """A group as a safetensors file."""
    responses = group.responses
    head = GroupHead(
        **{name: getattr(group, name) for name in OF_GROUP},
        sampling=vars(group.sampling),
        finish=[r.finish_reason for r in responses],
    )
    arrays = {
        "prompt_ids": group.prompt_ids,
        "lengths": np.array([len(r.tokens) for r in responses], np.int32),
        "rewards": np.array([r.reward for r in responses]),
    }
    for name in PER_TOKEN:
        arrays[name] = np.concatenate([getattr(r, name) for r in responses])
    if responses[0].allowed_ids is not None:
        sizes = [np.diff(r.allowed_offsets) for r in responses]
        arrays["allowed_ids"] = np.concatenate([r.allowed_ids for r in responses])
        arrays["allowed_sizes"] = np.concatenate(sizes).astype(np.int32)
    if responses[0].routed is not None:
        arrays["routed"] = np.concatenate([r.routed for r in responses])
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return save(arrays, metadata={"head": msgspec.json.encode(head).decode()})


def decode_group(data: bytes, limits: Limits) -> Rollout:
    """The inverse of encode_group. Raise WireError with the reason if types, shapes, sizes, token
    ids or log-probabilities are wrong."""
    try:
        arrays = load(data)
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size])["__metadata__"]
        head = msgspec.json.decode(metadata["head"], type=GroupHead)
        sampling = msgspec.convert(head.sampling, Sampling)
    except (
        Exception
    ) as e:  # three decoders, each with its own errors, RecursionError among them
        raise WireError(f"not a group: {printable(e)}") from None
    check_head(head)
    try:
        check_shapes(head, arrays, limits)
        check_values(arrays, limits)
        check_allowed(arrays, limits)
    except WireError as e:
        raise WireError(f"group {name_of(head.uid)}: {e}") from None
    return Rollout(
        **{name: getattr(head, name) for name in OF_GROUP},
        prompt_ids=arrays["prompt_ids"],
        sampling=sampling,
        responses=split_responses(head, arrays),
    )


def check_head(head: GroupHead) -> None:
    """Raise WireError unless every name and setting outside the arrays is possible."""
    sampler = head.uid[0]
    need(
        is_sampler(sampler),
        f"not a group: {printable(sampler, 100)!r} is not a sampler's name",
    )
    for name in ("prompt_id", "model", "precision", "digest"):
        text = getattr(head, name)
        need(
            text.isprintable(),
            f"{name_of(head.uid)}: its {name} is {printable(text, 100)!r}",
        )
    known = {f.name for f in fields(Sampling)}
    has_known = (
        set(head.sampling) <= known and abs(head.sampling.get("seed", 0)) < 10**18
    )
    need(has_known, f"{name_of(head.uid)}: sampled with unknown settings")


def check_shapes(head: GroupHead, arrays: dict, limits: Limits) -> None:
    """Raise WireError unless these are the expected arrays, with consistent sizes."""
    expected = set(SHAPES)
    if not limits.max_allowed:
        expected -= {"allowed_ids", "allowed_sizes"}
    if not limits.routed[0]:
        expected.remove("routed")
    need(set(arrays) == expected, f"arrays {printable(sorted(arrays))}")
    for name, x in arrays.items():
        fits = (x.dtype, x.ndim) == SHAPES[name]
        need(fits, f"{name} is {x.dtype} with {x.ndim} dimensions")
    lengths = arrays["lengths"]
    G = limits.group_size
    fits = len(lengths) == len(arrays["rewards"]) == len(head.finish) == G
    need(fits, f"{len(lengths)} responses instead of {G}")
    prompt = len(arrays["prompt_ids"])
    least, most = lengths.min(), lengths.max()
    fits = 1 <= least <= most <= limits.max_tokens and 1 <= prompt <= limits.max_prompt
    need(fits, f"lengths from {least} to {most} after a prompt of {prompt}")
    N = int(lengths.sum(dtype=np.int64))
    need(all(len(arrays[name]) == N for name in PER_TOKEN), "arrays of unequal length")
    fits = arrays["topk_ids"].shape == arrays["topk_logp"].shape == (N, limits.topk)
    need(fits, f"top-K of {arrays['topk_ids'].shape[1]} instead of {limits.topk}")
    if limits.routed[0]:
        fits = arrays["routed"].shape == (N + G * (prompt - 1), *limits.routed[:2])
        need(fits, f"experts of shape {arrays['routed'].shape}")


def check_values(arrays: dict, limits: Limits) -> None:
    """Raise WireError unless an engine and a grader can have made every number in the arrays."""
    for name in ("prompt_ids", "tokens", "topk_ids", "allowed_ids"):
        x = arrays.get(name, np.zeros(0))
        inside = x.size == 0 or 0 <= x.min() <= x.max() < limits.vocab
        need(inside, f"{name} outside the vocabulary of {limits.vocab}")
    routed = arrays.get("routed", np.zeros(0))
    inside = routed.size == 0 or 0 <= routed.min() <= routed.max() < limits.routed[2]
    need(inside, "experts that the model does not have")
    loss_mask = arrays["loss_mask"]
    need(
        loss_mask.view(np.uint8).max() <= 1,
        "a loss mask that is neither true nor false",
    )
    need(loss_mask.any(), "a loss mask without any token")
    logp_inf, rewards = arrays["logp_inf"], arrays["rewards"]
    # both false for NaN
    possible = logp_inf.min() >= LEAST_LOGP and logp_inf.max() < 1e-3
    need(possible, f"log-probabilities that are NaN, below {LEAST_LOGP:g} or above 0")
    need(np.isfinite(rewards).all(), "a reward that is NaN or infinite")
    need(np.abs(rewards).max() <= MOST_REWARD, f"a reward beyond {MOST_REWARD:g}")
    # [N, K], -inf for truncated tokens
    ids, logp = arrays["topk_ids"], arrays["topk_logp"]
    need((logp < 1e-3).all(), "top-K log-probabilities that are NaN or above 0")
    need(
        (logp[:, 1:] <= logp[:, :-1]).all(),
        "top-K log-probabilities that are not sorted",
    )
    sums = np.exp(logp.astype(np.float64)).sum(1)
    need((sums < 1.01).all(), "top-K probabilities that sum to more than 1")
    need(
        (np.diff(np.sort(ids, 1), axis=1) > 0).all(),
        "a token that occurs twice among the top K",
    )


def check_allowed(arrays: dict, limits: Limits) -> None:
    """Raise WireError unless the sets of allowed tokens have consistent sizes and contain the
    sampled tokens."""
    if limits.max_allowed:
        sizes = arrays["allowed_sizes"]
        fits = (
            len(sizes) == len(arrays["tokens"])
            and 1 <= sizes.min() <= sizes.max() <= limits.max_allowed
            and sizes.sum(dtype=np.int64) == len(arrays["allowed_ids"])
        )
        need(fits, "sets of allowed tokens with wrong sizes")
        begins = np.cumsum(sizes, dtype=np.int64) - sizes
        sampled = np.repeat(arrays["tokens"], sizes) == arrays["allowed_ids"]
        contained = np.logical_or.reduceat(sampled, begins).all()
        need(contained, "a token that is not in its set of allowed tokens")


def split_responses(head: GroupHead, arrays: dict) -> list[Response]:
    """The responses in the arrays over all tokens."""
    responses = []
    ends = np.cumsum(arrays["lengths"])
    if "allowed_ids" in arrays:
        # the start of each token's set; the last entry is the end of all sets
        offsets = np.concatenate(
            [[0], np.cumsum(arrays["allowed_sizes"], dtype=np.int64)]
        )
    for i, end in enumerate(ends):
        start = end - arrays["lengths"][i]
        response = Response(
            **{name: arrays[name][start:end] for name in PER_TOKEN},
            finish_reason=head.finish[i],
            reward=float(arrays["rewards"][i]),
        )
        if "allowed_ids" in arrays:
            response.allowed_offsets = offsets[start : end + 1] - offsets[start]
            response.allowed_ids = arrays["allowed_ids"][offsets[start] : offsets[end]]
        # also has entries of the prompt, before those of each response
        if "routed" in arrays:
            prompt = len(arrays["prompt_ids"]) - 1
            response.routed = arrays["routed"][
                start + i * prompt : end + (i + 1) * prompt
            ]
        responses.append(response)
    return responses
