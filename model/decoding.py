"""Responses from tables of decoded tokens, for both engines; buffers of HFEngine during decoding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from rollout import Response
from sampling import allowed_sets


def responses_of(
    ids, logp, ends, finish_reasons, topk: int, max_allowed: int
) -> list[Response]:
    """The responses in a table with a row [sampled, top-1 .. top-K] for each token, one response
    after the other: ids int32, logp float32 [n, K + 1].

    ends: the number of rows up to the end of each response. UserError: max_allowed > 0, and a set
    of allowed tokens has more than K tokens."""
    if max_allowed:
        offsets, allowed_ids = allowed_sets(
            ids[:, 1:], logp[:, 1:], ids[:, 0], max_allowed
        )
    responses = []
    for start, end, finish_reason in zip(
        [0, *ends[:-1]], ends, finish_reasons, strict=True
    ):
        response = Response(
            tokens=ids[start:end, 0].copy(),
            loss_mask=np.ones(end - start, bool),
            logp_inf=logp[start:end, 0].copy(),
            topk_ids=ids[start:end, 1 : topk + 1].copy(),
            topk_logp=logp[start:end, 1 : topk + 1].copy(),
            finish_reason=finish_reason,
        )
        if max_allowed:
            response.allowed_offsets = offsets[start : end + 1] - offsets[start]
            response.allowed_ids = allowed_ids[offsets[start] : offsets[end]].copy()
        responses.append(response)
    return responses


class Records:
    """Records of N responses of at most T tokens, written during decoding: the sampled and the K
    most likely tokens, and their log-probabilities."""

    def __init__(self, N: int, T: int, K: int, device):
        self.ids = torch.zeros(N, T, K + 1, dtype=torch.int32, device=device)
        self.logp = torch.zeros(N, T, K + 1, device=device)
        # T also for an unfinished response
        self.length = torch.full((N,), T, device=device)

    def write(self, which, t: int, token, logp) -> None:
        """Record token t of the responses `which` (n,): token (n, 1), log-probabilities (n, V)."""
        top_logp, best = logp.topk(self.ids.shape[2] - 1, -1)
        self.ids[which, t] = torch.cat([token, best], 1).int()
        self.logp[which, t] = torch.cat([logp.gather(1, token), top_logp], 1)

    def end(self, which, t: int, stops):
        """Record that responses with `stops` (n,) end with token t; returns the mask of unfinished
        responses, (n,) bool.

        A finished row may stay in the cache for a while; tokens after its end are ignored."""
        ended = stops & (self.length[which] == self.ids.shape[1])
        self.length[which[ended]] = t + 1
        return self.length[which] == self.ids.shape[1]

    def responses(self, stop_ids, topk: int, max_allowed: int) -> list[Response]:
        """All responses, each cut to its length; see `responses_of`."""
        lengths = self.length.cpu().numpy()
        ends = lengths.cumsum()
        used = np.arange(self.ids.shape[1]) < lengths[:, None]  # (N, T)
        ids, logp = self.ids.cpu().numpy()[used], self.logp.cpu().numpy()[used]
        reasons = [
            "stop" if last in stop_ids else "length"
            for last in ids[ends - 1, 0].tolist()
        ]
        return responses_of(ids, logp, ends, reasons, topk, max_allowed)


@dataclass
class Rows:
    """The n responses that are still being decoded, in the order of the cache's rows."""

    index: torch.Tensor  # (n,) int64: indices among all N responses
    position: torch.Tensor  # (n,) int64: position of the next token
    # (n, tokens in the cache): attention mask; None without padding
    mask: torch.Tensor | None
    cache: Any  # a transformers cache

    def shrink(self, going) -> None:
        """Drop the rows outside the mask `going`, (n,) bool, from the cache and from this
        object."""
        rows = going.nonzero()[:, 0]
        self.cache.reorder_cache(rows)
        self.index = self.index[rows]
        self.position = self.position[rows]
        if self.mask is not None:
            self.mask = self.mask[rows]


def grouped(responses, seeds: list[list[int]]) -> list[list[Response]]:
    """A flat list of responses split into groups, one group for each list of seeds."""
    responses = iter(responses)
    return [list(islice(responses, len(group))) for group in seeds]


def give_routed(responses, groups, prompts, routed) -> None:
    """Set the experts of each response (Response.routed), for its prompt and all but its last
    token.

    routed: first (_, experts (prompts, P, layers, k)) of all prompts, padded on the left; then for
    each decoding step (indices (n,) of unfinished responses, their experts (n, 1, layers, k))."""
    (_, of_prompts), *steps = routed
    tokens = np.full((len(responses), len(steps), *of_prompts.shape[2:]), -1, np.int16)
    for t, (row_ids, experts) in enumerate(steps):
        tokens[row_ids.cpu().numpy(), t] = experts[:, 0]
    rows = iter(tokens)
    for prompt, group, experts in zip(prompts, groups, of_prompts, strict=True):
        for r in group:
            r.routed = np.concatenate(
                [experts[len(experts) - len(prompt) :], next(rows)[: len(r.tokens) - 1]]
            )
