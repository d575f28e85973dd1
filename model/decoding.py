"""Buffers of HFEngine for the responses of a batch during decoding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from machinery.flags import UserError
from rollout import Response
from sampling import set_too_large


class Records:
    """Records of N responses of at most T tokens, written during decoding."""

    def __init__(self, N: int, T: int, topk: int, device):
        self.T, self.topk = T, topk
        self.tokens = torch.zeros(N, T, dtype=torch.int32, device=device)
        self.logp = torch.zeros(N, T, device=device)
        self.top_ids = torch.zeros(N, T, topk, dtype=torch.int32, device=device)
        self.top_logp = torch.zeros(N, T, topk, device=device)
        self.length = torch.full((N,), T, device=device)  # T also for an unfinished response
        self.allowed: list[np.ndarray] = []  # per step int64 [3, n]: response, position, token id

    def write(self, which, t: int, token, logp) -> None:
        """Record token t of the responses `which` (n,): token (n, 1), log-probabilities (n, V)."""
        self.tokens[which, t] = token[:, 0].int()
        self.logp[which, t] = logp.gather(1, token)[:, 0]
        if self.topk:
            self.top_logp[which, t], best = logp.topk(self.topk, -1)
            self.top_ids[which, t] = best.int()

    def write_allowed(self, which, t: int, gone) -> None:
        """Record the tokens allowed at position t: the complement of `gone`, (n, V) bool."""
        row, ids = (~gone).nonzero(as_tuple=True)
        columns = torch.stack([which[row], torch.full_like(row, t), ids])
        self.allowed.append(columns.cpu().numpy())

    def end(self, which, t: int, stops):
        """Record that responses with `stops` (n,) end with token t; returns the mask of unfinished
        responses, (n,) bool.

        A finished row may stay in the cache for a while; tokens after its end are ignored."""
        ended = stops & (self.length[which] == self.T)
        self.length[which[ended]] = t + 1
        return self.length[which] == self.T

    def responses(self, stop_ids, max_allowed: int) -> list[Response]:
        """All responses, each cut to its length. Raises UserError if a set of allowed tokens is too
        large."""
        tokens, logp = self.tokens.cpu().numpy(), self.logp.cpu().numpy()
        top_ids, top_logp = self.top_ids.cpu().numpy(), self.top_logp.cpu().numpy()
        responses = []
        for i, L in enumerate(self.length.tolist()):
            response = Response(
                tokens=tokens[i, :L].copy(),
                loss_mask=np.ones(L, bool),
                logp_inf=logp[i, :L].copy(),
                topk_ids=top_ids[i, :L].copy(),
                topk_logp=top_logp[i, :L].copy(),
                finish_reason="stop" if int(tokens[i, L - 1]) in stop_ids else "length",
            )
            responses.append(response)
        if max_allowed:
            self._give_allowed(responses, max_allowed)
        return responses

    def _give_allowed(self, responses: list[Response], max_allowed: int) -> None:
        """Set the allowed tokens of each response."""
        allowed = np.concatenate(self.allowed, 1)
        place = allowed[0] * self.T + allowed[1]  # response and position as one number
        sizes = np.bincount(place, minlength=len(responses) * self.T).reshape(-1, self.T)
        # positions before the end of a response
        used = np.arange(self.T) < np.array([len(r.tokens) for r in responses])[:, None]
        if sizes[used].max() > max_allowed:
            raise UserError(set_too_large(max_allowed))
        ids = allowed[2, np.lexsort((allowed[2], place))].astype(np.int32)
        starts = np.concatenate([[0], sizes.sum(1).cumsum()])
        for i, r in enumerate(responses):
            ends = sizes[i, : len(r.tokens)].cumsum()
            r.allowed_offsets = np.concatenate([[0], ends]).astype(np.int64)
            r.allowed_ids = ids[starts[i] : starts[i] + r.allowed_offsets[-1]]


@dataclass
class Rows:
    """The n responses that are still being decoded, in the order of the cache's rows."""

    index: torch.Tensor  # (n,) int64: indices among all N responses
    position: torch.Tensor  # (n,) int64: position of the next token
    mask: torch.Tensor | None  # (n, tokens in the cache): attention mask; None without padding
    cache: Any  # a transformers cache

    def shrink(self, going) -> None:
        """Drop the rows outside the mask `going`, (n,) bool, from the cache and from this
        object."""
        rows = going.nonzero()[:, 0]
        self.cache.batch_select_indices(rows)
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
