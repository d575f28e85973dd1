"""Batching: pad ragged groups into tensors, and split batches into micro-batches.

A batch is B rows of prompt, response and padding, in this order, so that causal attention needs no
mask: no prompt or response token attends to padding. Quantities of response tokens are (B, T);
position t is the t-th response token, independent of the prompt length.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from config import Config
from rollout import Rollout, uniforms


@dataclass(frozen=True)
class Facts:
    """Values of a batch that a forward pass reads on the host or uses as indices. `Batch.to` computes
    them on the CPU: computed in the forward pass, they would wait for the GPU to finish earlier micro-batches."""

    at: torch.Tensor  # (N,) int64   flat positions in (B, T) of the response tokens
    # (B,) int64   number of the row's group, in the order of the rows
    group: torch.Tensor
    first: torch.Tensor  # (G,) int64   first row of each group
    longest_prompt: int
    has_temperature: bool  # whether a temperature is not 1
    has_rule: bool  # whether the learner truncates by its own rule (recompute)

    @classmethod
    def of(cls, batch: Batch, device) -> Facts:
        size = batch.group.unique_consecutive(return_counts=True)[1]
        groups = torch.arange(len(size), device=size.device)
        rule = batch.sampling[:, 1:]
        return cls(
            batch.exists.flatten().nonzero()[:, 0].to(device),
            groups.repeat_interleave(size).to(device),
            (size.cumsum(0) - size).to(device),
            int(batch.prompt_len.max()),
            bool((batch.sampling[:, 0] != 1).any()),
            bool((rule != rule.new_tensor([1.0, 0.0, 0.0])).any()),
        )


@dataclass
class Batch:
    """B responses of whole or partial groups. None: not computed."""

    ids: torch.Tensor  # (B, S) int64 prompt + response, padded on the right with 0
    prompt_len: torch.Tensor  # (B,) int64
    length: torch.Tensor  # (B,) int64 response tokens
    group: torch.Tensor  # (B,) int64 index of the group inside this rank's batch
    reward: torch.Tensor  # (B,) float32
    cut: torch.Tensor  # (B,) bool truncated at --max_tokens
    # (B, 1) float32 advantage of all tokens of a response; otb: (B, T)
    adv: torch.Tensor
    # (B, 4) float32 the learner's temperature, top_p, top_k, min_p
    sampling: torch.Tensor
    staleness: torch.Tensor  # (B,) float32 age of the sampling weights, in updates
    tokens: torch.Tensor  # (B, T) int64 response tokens
    mask: torch.Tensor  # (B, T) bool tokens that may carry a gradient
    logp_inf: torch.Tensor  # (B, T) float32 computed by the engine while sampling
    # (B, T) float64 OBRS's draws, a function of (seed, uid, response, position)
    mask_uniforms: torch.Tensor
    # (B, T, 1 + K (+ K)) sampled token, engine's top-K (, policy's top-K)
    support_ids: torch.Tensor
    # same shape: log p_inf of support_ids, -inf for duplicates
    support_logp: torch.Tensor
    # (B, T) float32 the engine's K-th probability, a bound on p_inf outside the support
    p_kth: torch.Tensor
    # (B, S, layers, k) int16: experts of each token that the engine processed, else -1
    routed: torch.Tensor | None = None
    # B pairs (offsets, ids): the tokens that truncated sampling allowed
    allowed: list | None = None

    # ref columns: results of the ref pass before the updates on this rollout batch (names of
    # model.TokenStats + "_ref")
    logp_ref: torch.Tensor | None = None  # (B, T)
    support_logp_ref: torch.Tensor | None = None  # (B, T, ...) policy on the support
    # (B, T) sum outside the support of min(p_K, p_ref / lambda)
    tail_ref: torch.Tensor | None = None
    actor_logp_ref: torch.Tensor | None = None  # (B, T)
    z_ref: torch.Tensor | None = None  # (B, T) exact Z over the vocabulary (two models)
    sum_p2_ref: torch.Tensor | None = None  # (B, T) sum over the vocabulary of p_ref^2
    # (B, T) KL(p_ref || distribution of the accepted tokens)
    kl_after_ref: torch.Tensor | None = None
    # (B, T) log-probability under the frozen model that the run started from
    logp_start: torch.Tensor | None = None
    facts: Facts | None = None

    def __len__(self) -> int:
        return len(self.length)

    @property
    def log_r(self) -> torch.Tensor:
        """log p_ref - log p_inf, (B, T)."""
        return self.logp_ref - self.logp_inf

    @property
    def exists(self) -> torch.Tensor:
        """(B, T) bool: response tokens, with or without gradient; False on padding."""
        place = torch.arange(self.tokens.shape[1], device=self.length.device)
        return place[None] < self.length[:, None]

    def select(self, rows) -> Batch:
        """A batch of these rows, trimmed to the longest row."""
        rows = torch.as_tensor(rows, dtype=torch.long, device=self.length.device)
        T = max(1, int(self.length[rows].max()))
        S = int((self.prompt_len + self.length)[rows].max())
        out = {}
        for name, x in self.tensors().items():
            x = x[rows]
            if name in ("ids", "routed"):
                x = x[:, :S]
            elif name not in PER_RESPONSE:
                x = x[:, :T]
            out[name] = x
        if self.allowed is not None:
            out["allowed"] = [self.allowed[i] for i in rows.tolist()]
        return Batch(**out)

    def to(self, device) -> Batch:
        tensors = {name: x.to(device) for name, x in self.tensors().items()}
        return replace(self, facts=Facts.of(self, device), **tensors)

    @property
    def known(self) -> Facts:
        return self.facts or Facts.of(self, self.length.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f.name: x
            for f in fields(self)
            if isinstance(x := getattr(self, f.name), torch.Tensor)
        }


PER_RESPONSE = {
    "prompt_len",
    "length",
    "group",
    "reward",
    "cut",
    "sampling",
    "staleness",
}


# -- Advantages: rewards (G,) of one group -> (G,). A group of equal rewards has advantage 0


def grpo(reward):
    """(reward - mean) / (std + 1e-6), sample standard deviation. GRPO."""
    if len(reward) == 1:
        return torch.zeros_like(reward)
    return grpo_no_std(reward) / (reward.std() + 1e-6)


def grpo_no_std(reward):
    """reward - mean. Dr.GRPO, GEPO."""
    if (reward == reward[0]).all():
        return torch.zeros_like(reward)
    return reward - reward.mean()


def rloo(reward):
    """reward - mean of the group's remaining rewards = G / (G - 1) (reward - mean)."""
    return grpo_no_std(reward) * (len(reward) / max(1, len(reward) - 1))


def maxrl(reward):
    """(reward - mean) / mean, of nonnegative rewards: larger for harder problems. MaxRL (arXiv
    2602.02710), prime-rl."""
    mean = reward.mean()
    return grpo_no_std(reward) / mean if mean > 0 else torch.zeros_like(reward)


ADVANTAGES = {"grpo": grpo, "grpo_no_std": grpo_no_std, "rloo": rloo, "maxrl": maxrl}
ADVANTAGES |= {"otb": grpo_no_std}  # until `objectives.prepare` has the probabilities


def optimal_token_baseline(reward, group, logp, sum_p2, mask, weight):
    """reward - B_t, (B, T), with the baseline B_t of a token that minimises the gradient's
    variance. OTB, arXiv 2602.07078; verl.

        B_t = sum_i reward_i W_it / sum_i W_it   over the responses i of the group with a token t
        W_it = sum_{j<=t} w_ij^2 (1 - 2 p_ij + sum_v p_ij(v)^2)

    The bracket is the squared norm of d log p_ij / d logits. reward, group: (B,); logp, sum_p2,
    mask and weight (the importance weight w): (B, T). Equal rewards of a group give exactly 0. If only one
    response of a group has a token t, its advantage at t is 0; verl sets the baseline to 0 instead."""
    lowest = reward.new_zeros(int(group.max()) + 1)
    lowest = lowest.scatter_reduce(0, group, reward, "amin", include_self=False)
    # a common shift of all rewards changes no advantage
    reward = (reward - lowest[group])[:, None]
    squared_norm = (1 - 2 * logp.exp() + sum_p2).clamp_min(0)
    energy = torch.where(mask, weight.square() * squared_norm, 0).cumsum(1) * mask
    totals = energy.new_zeros(2, len(lowest), energy.shape[1])
    totals.index_add_(1, group, torch.stack([energy * reward, energy]))
    weighted, total = totals[:, group]
    return torch.where(mask, reward - weighted / total.clamp_min(1e-30), 0)


# -- Padding


def collate(groups: list[Rollout], cfg: Config, version: int = 0) -> Batch:
    """Pad whole groups into one batch, with advantages, mask uniforms and the groups' ref columns.

    version: the learner's, to compute staleness."""
    pairs = [(group, response) for group in groups for response in group.responses]
    responses = [response for _, response in pairs]
    T = max(1, *(len(response.tokens) for response in responses))
    K = responses[0].topk_ids.shape[1]
    rewards = [
        torch.tensor([response.reward for response in group.responses])
        for group in groups
    ]
    advantages = [ADVANTAGES[cfg.advantage](reward) for reward in rewards]
    draws = [
        uniforms(len(response.tokens), "mask", cfg.seed, group.uid, i)
        for group in groups
        for i, response in enumerate(group.responses)
    ]
    kth = [
        np.exp(response.topk_logp[:, -1])
        if K
        else np.ones(len(response.tokens), np.float32)
        for response in responses
    ]
    ids = pad(
        [
            np.concatenate([group.prompt_ids, response.tokens])
            for group, response in pairs
        ],
        dtype=np.int64,
    )
    routed = allowed = None
    if cfg.router_replay:
        routed = pad(
            [response.routed for response in responses],
            ids.shape[1],
            fill=-1,
            dtype=np.int16,
        )
    if cfg.keep_sampling_mask == "replay" and any(
        group.sampling.truncates for group in groups
    ):
        allowed = [
            (response.allowed_offsets, response.allowed_ids) for response in responses
        ]
    batch = Batch(
        ids=ids,
        prompt_len=torch.tensor([len(group.prompt_ids) for group, _ in pairs]),
        length=torch.tensor([len(response.tokens) for response in responses]),
        group=torch.tensor(
            [index for index, group in enumerate(groups) for _ in group.responses]
        ),
        reward=torch.cat(rewards),
        cut=torch.tensor(
            [response.finish_reason == "length" for response in responses]
        ),
        adv=torch.cat(advantages)[:, None],
        sampling=torch.tensor(
            [scored_with(group.sampling, cfg.keep_sampling_mask) for group, _ in pairs]
        ),
        staleness=torch.tensor([float(version - group.version) for group, _ in pairs]),
        tokens=pad([response.tokens for response in responses], T, dtype=np.int64),
        mask=pad([response.loss_mask for response in responses], T, fill=False),
        logp_inf=pad([response.logp_inf for response in responses], T),
        mask_uniforms=pad(draws, T, fill=1.0, dtype=np.float64),
        support_ids=pad(
            [
                np.column_stack([response.tokens, response.topk_ids])
                for response in responses
            ],
            T,
            dtype=np.int64,
        ),
        support_logp=pad(
            [support_logp(response) for response in responses], T, fill=-np.inf
        ),
        p_kth=pad(kth, T),
        routed=routed,
        allowed=allowed,
    )
    if cfg.mask_cut:
        batch.mask &= ~batch.cut[:, None]
    for name in groups[0].ref:
        columns = [column for group in groups for column in group.ref[name]]
        fill = -np.inf if name == "support_logp" else 0
        setattr(batch, name, pad(columns, T, fill, dtype=columns[0].dtype))
    return batch


def pad(rows: list[np.ndarray], T: int = 0, fill=0.0, dtype=None) -> torch.Tensor:
    """Pad B arrays (length, ...) at the end to (B, T, ...); T = 0: the longest length. dtype:
    default float32, or bool if `fill` is."""
    T = T or max(len(row) for row in rows)
    dtype = dtype or (np.bool_ if isinstance(fill, bool) else np.float32)
    out = np.full((len(rows), T) + rows[0].shape[1:], fill, dtype)
    for b, row in enumerate(rows):
        out[b, : len(row)] = row
    return torch.from_numpy(out)


def support_logp(response) -> np.ndarray:
    """log p_inf on a response's support (L, 1 + K); -inf in column 0 if the sampled token is also in the top-K."""
    listed = (response.topk_ids == response.tokens[:, None]).any(1)
    return np.column_stack(
        [np.where(listed, -np.inf, response.logp_inf), response.topk_logp]
    )


def scored_with(sampling, keep_sampling_mask: str) -> list[float]:
    """The learner's temperature, top_p, top_k and min_p for a group; no truncation unless
    --keep_sampling_mask=recompute."""
    if keep_sampling_mask == "recompute":
        return [sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p]
    return [sampling.temperature, 1.0, 0.0, 0.0]


# -- Micro-batches


def micro_batches(
    batch: Batch, budget: int, share: bool
) -> tuple[list[list[int]], int]:
    """(rows of each micro-batch, longest first; total number of tokens).

    A micro-batch has at most `budget` tokens, or one row. Padding counts: n rows cost n times the
    longest sum of prompt and response. With `share` the rows of a group are adjacent and their prompt is
    processed once: n times the longest response, plus the longest prompt once per group, plus a
    sixteenth of it for each row's copy of its keys and values."""
    prompt, response, group = (
        x.tolist() for x in (batch.prompt_len, batch.length, batch.group)
    )
    width = (
        response if share else [p + n for p, n in zip(prompt, response, strict=True)]
    )

    def cost(rows: list[int]) -> int:
        tokens = len(rows) * max(width[row] for row in rows)
        if share:
            longest = max(prompt[row] for row in rows)
            tokens += len({group[row] for row in rows}) * longest
            tokens += len(rows) * longest // 16
        return tokens

    parts: list[list[int]] = []
    order = sorted(range(len(width)), key=lambda row: -width[row])
    if share:  # whole groups, by decreasing longest width
        longest = {group[row]: width[row] for row in reversed(order)}
        order.sort(key=lambda row: (-longest[group[row]], group[row]))
    for row in order:
        if parts and cost([*parts[-1], row]) <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [sorted(rows) for rows in parts], sum(map(cost, parts))


# -- The ref pass


def write_ref_columns(groups: list[Rollout], columns: dict[str, torch.Tensor]) -> None:
    """Store the results of the ref pass with the groups, without padding. columns: name -> (B, T,
    ...) in the order of `collate`."""
    host = {name: x.cpu().numpy() for name, x in columns.items()}
    first = 0  # row of the group's first response
    for group in groups:
        rows = list(enumerate(group.responses, first))
        group.ref = {
            name: [x[row, : len(response.tokens)].copy() for row, response in rows]
            for name, x in host.items()
        }
        first += len(group.responses)
