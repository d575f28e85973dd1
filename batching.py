"""From ragged groups to padded tensors: the one place where anything is padded.

A batch is B responses, each laid out as prompt then response then padding, so that causal attention needs no mask:
padding lies behind everything that could look at it. Quantities of response tokens are (B, T); position t of a row is its
t-th response token, whatever the length of its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

import objectives
from rollout import Rollout, uniforms


@dataclass
class Batch:
    """B responses of whole or partial groups. None: not known (yet)."""

    ids: torch.Tensor  # (B, S) int64     prompt + response, padded on the right with 0
    prompt_len: torch.Tensor  # (B,) int64
    length: torch.Tensor  # (B,) int64       response tokens
    group: torch.Tensor  # (B,) int64       index of the group inside this rank's batch
    reward: torch.Tensor  # (B,) float32
    adv: torch.Tensor  # (B, 1) float32   advantage: the same for every token of a response
    sampling: torch.Tensor  # (B, 4) float32   the law that the learner scores: temperature, top_p, top_k, min_p
    staleness: torch.Tensor  # (B, 2) float32   age of the sampling weights: in updates, in seconds
    tokens: torch.Tensor  # (B, T) int64     response tokens
    mask: torch.Tensor  # (B, T) bool      tokens that may controllers a gradient
    logp_inf: torch.Tensor  # (B, T) float32   as the engine sampled them
    u: torch.Tensor  # (B, T) float64   mask uniforms, a pure function of (seed, uid, response, position)
    support_ids: torch.Tensor  # (B, T, 1 + K (+ K)) the set S: sampled token, engine's top-K (, learner's own top-K)
    support_logp: torch.Tensor  # the same shape: log p_inf there, -inf for a token already listed
    p_kth: torch.Tensor  # (B, T) float32   the engine's K-th probability: no token outside S has more
    kept: list | None = None  # B pairs (offsets, ids) of the rollout's kept sets
    # from the learner's pass at the start of this step's updates (the `ref` columns)
    logp_ref: torch.Tensor | None = None  # (B, T)
    support_logp_ref: torch.Tensor | None = None  # (B, T, ...) policy at S
    tail_ref: torch.Tensor | None = None  # (B, T)    sum outside S of min(p_K, p_ref / lambda)
    actor_logp_ref: torch.Tensor | None = None  # (B, T)
    z_ref: torch.Tensor | None = None  # (B, T)    exact Z over the vocabulary (two models)
    kl_ref: torch.Tensor | None = None  # (B, T)    KL(p_ref || p_actor), full vocabulary
    kl_after: torch.Tensor | None = None  # (B, T)    KL(p_ref || law of the accepted tokens)

    def __len__(self) -> int:
        return len(self.length)

    @property
    def exists(self) -> torch.Tensor:
        """(B, T) bool: real response tokens, whether or not they controllers a gradient."""
        return torch.arange(self.tokens.shape[1], device=self.length.device)[None] < self.length[:, None]

    def select(self, rows) -> "Batch":
        """The rows given, trimmed to their longest."""
        rows = torch.as_tensor(rows, dtype=torch.long, device=self.length.device)
        T, S = max(1, int(self.length[rows].max())), int((self.prompt_len + self.length)[rows].max())
        out = {}
        for f in fields(self):
            x = getattr(self, f.name)
            if isinstance(x, torch.Tensor):
                x = x[rows]
                x = x[:, :S] if f.name == "ids" else x[:, :T] if f.name in _TOKEN else x
            elif f.name == "kept" and x is not None:
                x = [x[i] for i in rows.tolist()]
            out[f.name] = x
        return Batch(**out)

    def to(self, device) -> "Batch":
        return replace(
            self, **{f.name: x.to(device) for f in fields(self) if isinstance(x := getattr(self, f.name), torch.Tensor)}
        )


_TOKEN = {
    "tokens",
    "mask",
    "logp_inf",
    "u",
    "support_ids",
    "support_logp",
    "p_kth",
    "logp_ref",
    "support_logp_ref",
    "tail_ref",
    "actor_logp_ref",
    "z_ref",
    "kl_ref",
    "kl_after",
}


def collate(groups: list[Rollout], cfg, version: int = 0, now: float = 0.0) -> Batch:
    """Pad whole groups into one batch; adds advantages (by group) and mask uniforms, and brings the ref columns along."""
    items = [(g, i) for g in groups for i in range(len(g.responses))]
    flat = [g.responses[i] for g, i in items]
    B, T = len(flat), max(1, *(len(r.tokens) for r in flat))
    K = flat[0].topk_ids.shape[1]
    plen = np.array([len(g.prompt_ids) for g, _ in items])
    length = np.array([len(r.tokens) for r in flat])
    ids = np.zeros((B, int((plen + length).max())), np.int64)
    tokens, mask = np.zeros((B, T), np.int64), np.zeros((B, T), bool)
    logp, u = np.zeros((B, T), np.float32), np.ones((B, T))
    support_ids, support_logp = np.zeros((B, T, 1 + K), np.int64), np.full((B, T, 1 + K), -np.inf, np.float32)
    p_kth = np.zeros((B, T), np.float32)
    for b, ((g, i), r) in enumerate(zip(items, flat)):
        P, L = plen[b], length[b]
        ids[b, :P], ids[b, P : P + L], tokens[b, :L] = g.prompt_ids, r.tokens, r.tokens
        mask[b, :L], logp[b, :L] = r.loss_mask, r.logp_inf
        u[b, :L] = uniforms(L, "mask", cfg.seed, g.uid, i)
        support_ids[b, :L, 0], support_ids[b, :L, 1:] = r.tokens, r.topk_ids
        support_logp[b, :L, 1:] = r.topk_logp
        support_logp[b, :L, 0] = np.where(
            (r.topk_ids == r.tokens[:, None]).any(1), -np.inf, r.logp_inf
        )  # once, not twice
        p_kth[b, :L] = np.exp(r.topk_logp[:, -1]) if K else 1.0
    replay = cfg.keep_sampling_mask == "replay" and any(g.sampling.truncates for g in groups)
    missing = next((g for g, r in zip((g for g, _ in items), flat) if replay and r.allowed_ids is None), None)
    if missing is not None:
        raise ValueError(
            f"--keep_sampling_mask=replay: group {missing.uid} has no kept sets (sampled by {missing.model} without them); "
            "record them, or choose recompute or off"
        )
    rewards = [torch.tensor([r.reward for r in g.responses]) for g in groups]
    adv = torch.cat([objectives.ADVANTAGES[cfg.advantage](r) for r in rewards])
    batch = Batch(
        ids=torch.from_numpy(ids),
        prompt_len=torch.from_numpy(plen),
        length=torch.from_numpy(length),
        group=torch.tensor([k for k, g in enumerate(groups) for _ in g.responses]),
        reward=torch.cat(rewards),
        adv=adv[:, None],
        sampling=torch.tensor([scored(g.sampling, cfg.keep_sampling_mask) for g, _ in items]),
        staleness=torch.tensor([[version - g.version, max(0.0, now - g.t_published)] for g, _ in items]),
        tokens=torch.from_numpy(tokens),
        mask=torch.from_numpy(mask),
        logp_inf=torch.from_numpy(logp),
        u=torch.from_numpy(u),
        support_ids=torch.from_numpy(support_ids),
        support_logp=torch.from_numpy(support_logp),
        p_kth=torch.from_numpy(p_kth),
        kept=[(r.allowed_offsets, r.allowed_ids) for r in flat] if replay else None,
    )
    for name in groups[0].ref:
        rows = [x for g in groups for x in g.ref[name]]
        column = np.zeros((B, T) + rows[0].shape[1:], rows[0].dtype)
        if name == "support_logp":
            column.fill(-np.inf)
        for b, x in enumerate(rows):
            column[b, : len(x)] = x
        setattr(batch, name, torch.from_numpy(column))
    return batch


def scored(sampling, keep_sampling_mask: str) -> list[float]:
    """The learner's own law of a group: its temperature always, its rule of truncation only where it is recomputed (sampling.py)."""
    rule = [sampling.top_p, sampling.top_k, sampling.min_p] if keep_sampling_mask == "recompute" else [1.0, 0.0, 0.0]
    return [sampling.temperature, *rule]


def split(batch: Batch, budget: int, share: bool) -> tuple[list[list[int]], int]:
    """Rows of micro-batches of at most `budget` tokens (a row on its own may have more), longest first; and the tokens of all.

    Padding counts: n rows make n times their longest prompt + response. With `share` the rows of a group stand together and
    their prompt is read once: n times the longest response, and the longest prompt once a group."""
    P, L, group = (x.tolist() for x in (batch.prompt_len, batch.length, batch.group))
    own = L if share else [p + n for p, n in zip(P, L)]
    longest = dict(sorted(zip(group, own)))  # of each group: the last of its pairs stays
    order = sorted(range(len(own)), key=lambda r: (-longest[group[r]], group[r], -own[r]) if share else -own[r])
    size = lambda rows, width, prompt, groups: rows * width + share * len(groups) * prompt
    parts, state, tokens = [], None, 0
    for r in order:
        grown = state and (state[0] + 1, max(state[1], own[r]), max(state[2], P[r]), state[3] | {group[r]})
        if state is None or size(*grown) > budget:
            parts.append([])
            tokens += size(*state) if state else 0
            grown = (1, own[r], P[r], {group[r]})
        parts[-1].append(r)
        state = grown
    return [sorted(rows) for rows in parts], tokens + size(*state)


def write_ref(groups: list[Rollout], columns: dict[str, torch.Tensor]) -> None:
    """Store the learner's ref pass with the groups, ragged again. columns: name -> (B, T, ...) in collate's order."""
    b = 0
    host = {name: x.cpu().numpy() for name, x in columns.items()}
    for g in groups:
        n = len(g.responses)
        g.ref = {
            name: [x[b + i, : len(r.tokens)].copy() for i, r in enumerate(g.responses)] for name, x in host.items()
        }
        b += n
