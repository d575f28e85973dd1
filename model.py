"""Policy and actor as one module: the only way to a model.

`PolicyAndActor.forward` reads hidden states, then meets the chunked head (head.py), inside the module that DDP or FSDP2 wraps. Under
FSDP2 a head's weight read outside that forward is one rank's shard, so policy and actor live in one module, and what needs
both laws at once (distillation, the exact Z) happens in there too. `Needs` says what a forward has to yield, `TokenStats` is what it
yielded. Linear layers may be replaced in place: `PolicyAndActor.policy` is an ordinary transformers model.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields

import torch
from torch import nn

import head
import objectives
from batching import Batch


@dataclass
class TokenStats:
    """What one forward says of each response token. logp, actor_logp and kl controllers gradient; None: not asked for."""

    logp: torch.Tensor  # (B, T)    log p_new(token)
    entropy: torch.Tensor | None = None  # (B, T)    nats
    support_logp: torch.Tensor | None = None  # (B, T, S) log p_new on batch.support_ids
    tail: torch.Tensor | None = None  # (B, T)    sum outside S of min(p_K, p_new / lambda)
    actor_logp: torch.Tensor | None = None  # (B, T)
    actor_entropy: torch.Tensor | None = None  # (B, T)
    kl: torch.Tensor | None = None  # (B, T)    distillation loss, gradient to the actor alone
    z: torch.Tensor | None = None  # (B, T)    exact Z of p_inf := actor, p_tgt := policy
    kl_full: torch.Tensor | None = None  # (B, T)    KL(policy || actor), whole vocabulary, no gradient
    kl_after: torch.Tensor | None = None  # (B, T)    KL(policy || law of the accepted tokens)
    top_ids: torch.Tensor | None = None  # (B, T, K) the policy's own top-K
    top_logp: torch.Tensor | None = None  # (B, T, K)
    top_actor_logp: torch.Tensor | None = None  # (B, T, K) the actor's log-probabilities there

    def detach(self) -> "TokenStats":
        return TokenStats(
            **{f.name: None if (x := getattr(self, f.name)) is None else x.detach() for f in fields(self)}
        )


@dataclass(frozen=True)
class Needs:
    """What a forward has to yield beyond the sampled tokens' log-probabilities."""

    entropy: bool = False
    s: bool = False  # support_logp, and with `tail` the second bound of Z
    tail: bool = False
    pair: bool = False  # z, kl_after (two models)
    distill: str = "none"  # "none" | "forward" | "reverse"
    distill_topk: int = 0
    topk: int = 0  # top_ids, top_actor_logp (two models)
    lam: float = 1.0


class PolicyAndActor(nn.Module):
    """Policy and optional actor as one module: (batch, want) -> the fields of TokenStats, as the dict that wrappers expect.

    With `share` a prompt is read once for all its responses in the batch, not once for each."""

    def __init__(self, policy, actor=None, autocast: torch.dtype | None = None, head_fp32: bool = False):
        super().__init__()
        self.policy, self.actor, self.autocast, self.head_fp32 = policy, actor, autocast, head_fp32

    @property
    def can_share(self) -> bool:
        """Whether the models see nothing but keys and values of a prompt: full attention in every layer."""
        models = [m for m in (self.policy, self.actor) if m is not None]
        return all(
            set(getattr(m.config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
            and not getattr(m.config, "sliding_window", None)
            for m in models
        )

    def forward(self, batch: Batch, want: Needs, share: bool = False):
        B, T = batch.tokens.shape
        at = batch.exists.flatten().nonzero()[:, 0]  # (N,) places in (B, T) that are tokens
        row, t = at // T, at % T
        target = batch.tokens.flatten()[at]
        temperature, *rule = batch.sampling[row].unsqueeze(-1).unbind(1)  # (N, 1) each
        inv_t = 1.0 / temperature if bool((temperature != 1).any()) else None
        rule = rule if bool((batch.sampling[:, 1:] != batch.sampling.new_tensor([1.0, 0.0, 0.0])).any()) else None
        kept = None
        if batch.kept is not None:
            sizes = torch.cat([torch.as_tensor(o).diff() for o, _ in batch.kept]).to(at.device)
            allowed_ids = torch.cat([torch.as_tensor(i, dtype=torch.long) for _, i in batch.kept]).to(at.device)
            kept = (torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), allowed_ids)
        support_ids = batch.support_ids.flatten(0, 1)[at] if want.s else None
        s_on = batch.support_logp.flatten(0, 1)[at].isfinite() if want.s else None
        p_kth = batch.p_kth.flatten()[at] if want.tail else None
        law = lambda **k: head.OneModelRows(target, inv_t, kept=kept, rule=rule, entropy=want.entropy, **k)
        rows = law(ids=support_ids, s_on=s_on, p_kth=p_kth, lam=want.lam)
        heads = [*self._hidden(self.policy, batch, at, share)]
        two = self.actor is not None
        if two:
            rows = head.TwoModelRows(rows, law(), want.distill, want.distill_topk, want.lam, want.pair, want.topk)
            heads += self._hidden(self.actor, batch, at, share)
        out = head.ChunkedHead.apply(rows, head.chunk_rows(heads[1].shape[0]), *heads)

        def back(x, on=True):  # (N, ...) -> (B, T, ...)
            if not on:
                return None
            return x.new_zeros((B, T) + x.shape[1:]).index_put((row, t), x)

        if not two:
            out = (out[0], None, None, *out[1:]) + (None,) * 7
        (
            logp,
            actor_logp,
            kl,
            entropy,
            support_logp,
            tail,
            actor_entropy,
            z,
            full,
            after,
            top_ids,
            top_logp,
            top_actor,
        ) = out
        return dict(
            logp=back(logp),
            entropy=back(entropy, want.entropy),
            support_logp=back(support_logp, want.s),
            tail=back(tail, want.tail),
            actor_logp=back(actor_logp, two),
            actor_entropy=back(actor_entropy, two and want.entropy),
            kl=back(kl, two and want.distill != "none"),
            z=back(z, two and want.pair),
            kl_full=back(full, two),
            kl_after=back(after, two and want.pair),
            top_ids=back(top_ids, two and want.topk),
            top_logp=back(top_logp, two and want.topk),
            top_actor_logp=back(top_actor, two and want.topk),
        )

    def _hidden(self, lm, batch, at, share):
        """Hidden states that predict the tokens at the places `at` in (B, T): (N, H); and the head's weight (V, H)."""
        scope = torch.autocast(at.device.type, self.autocast) if self.autocast else contextlib.nullcontext()
        with scope:
            hidden = (self._read_shared if share else self._read)(lm.base_model, batch, at)
        if self.autocast:  # the head's product: bfloat16 factors with a float32 sum, or float32
            hidden = hidden.to(torch.float32 if self.head_fp32 else self.autocast)
        return hidden, lm.get_output_embeddings().weight

    @staticmethod
    def _read(model, batch, at):
        ids, T = batch.ids[:, :-1], batch.tokens.shape[1]  # nothing is predicted from the last token
        row, t = at // T, at % T
        hidden = model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1)[row * ids.shape[1] + batch.prompt_len[row] + t - 1]  # one place before its token

    @staticmethod
    def _read_shared(model, batch, at):
        """Each group's prompt first, then every response on top of its group's keys and values; gradients flow through them."""
        T = batch.tokens.shape[1]
        _, group, rows = batch.group.unique_consecutive(return_inverse=True, return_counts=True)  # (B,), (G,)
        first = rows.cumsum(0) - rows  # a group's first row
        plen = batch.prompt_len[first]
        P, n = int(plen.max()), max(T - 1, 1)
        place = torch.arange(P + n, device=at.device)
        prompts = model(
            input_ids=batch.ids[first, :P], use_cache=True
        )  # behind a shorter prompt: ids that no response sees
        prompts.past_key_values.batch_select_indices(group)
        before = prompts.last_hidden_state[torch.arange(len(plen), device=at.device), plen - 1][group]  # (B, H)
        seen = (place < batch.prompt_len[:, None]) | (place >= P)
        rest = model(
            input_ids=batch.tokens[:, :n],
            past_key_values=prompts.past_key_values,
            attention_mask=seen.long(),
            use_cache=True,
            position_ids=batch.prompt_len[:, None] + place[:n],
        ).last_hidden_state
        return torch.cat([before[:, None], rest], 1)[:, :T].flatten(0, 1)[at]


def needs_of_ref_pass(cfg, two: bool, lam: float) -> Needs:
    """What the ref pass must yield under this configuration. An actor that is not the law that sampled can say nothing of it."""
    two = two and objectives.actor_is_sampler(cfg)
    z = cfg.correction in objectives.USES_Z
    bracket = z and cfg.obrs_z != "exact"
    return Needs(
        s=bracket,
        tail=bracket and not cfg.obrs_accept_rate,
        pair=two and z and cfg.obrs_target == "ref" and not cfg.obrs_accept_rate,
        lam=lam,
        topk=cfg.obrs_topk if two and bracket and cfg.obrs_target == "new" else 0,
    )


def needs_of_update(cfg, two: bool, lam: float, has_ref: bool) -> Needs:
    """What the training pass must yield; without a ref pass it also plays its part (objectives.with_ref)."""
    z = cfg.correction in objectives.USES_Z
    bracket = z and cfg.obrs_z != "exact" and (cfg.obrs_target == "new" or not has_ref)
    return Needs(
        entropy=True,
        s=bracket,
        tail=bracket and not cfg.obrs_accept_rate,
        pair=two and z and not has_ref and objectives.actor_is_sampler(cfg),
        lam=lam,
        distill=cfg.distill_direction if two else "none",
        distill_topk=cfg.distill_topk,
    )


def needs_of_exact_kappa(cfg) -> Needs:
    """What the extra forward of `--kappa=exact` must yield: the policy at S as it is now."""
    return Needs(s=True, tail=not cfg.obrs_accept_rate, lam=cfg.obrs_lambda)
