"""The forward pass of the learner: policy and actor as one module.

`PolicyAndActor.forward` computes hidden states and then applies the heads in chunks, inside the
module that DDP or FSDP2 wraps. Under FSDP2 a head's weight is only a shard outside of this forward
pass, so policy and actor are in one module, which also computes distillation and the exact Z from
both distributions. Linear layers may be replaced in place: `PolicyAndActor.policy` is an ordinary
transformers model.

A new statistic of one model is a field of TokenStats, a flag of Needs and its formula in
`OneModelRows.stats`; of two models, in `TwoModelRows.__call__`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import nn

import corrections
import quant
from batching import Batch
from config import Config
from machinery.flags import need
from model import attention, exact, lora  # noqa: F401  attention: imported for its side effects
from model.head import CUT, ChunkedHead, Head, chunk_rows, memory_of
from sampling import cut

# log-probability of a sampled token that the learner's truncation removes: log 1e-30
FLOOR = -69.0


@dataclass
class TokenStats:
    """Statistics of each response token from one forward pass. logp, actor_logp and distill_loss
    carry gradient, and so does the entropy if Needs.entropy_gradient is set."""

    logp: torch.Tensor  # (B, T)    log p_new(token)
    entropy: torch.Tensor | None = None  # (B, T)    nats
    support_logp: torch.Tensor | None = None  # (B, T, S) log p_new on batch.support_ids
    # (B, T)    sum outside S of min(p_K, p_new / lambda)
    tail: torch.Tensor | None = None
    actor_logp: torch.Tensor | None = None  # (B, T)
    actor_entropy: torch.Tensor | None = None  # (B, T)
    distill_loss: torch.Tensor | None = None  # (B, T)    gradient only to the actor
    # (B, T)    exact Z of p_inf := actor, p_tgt := policy
    z: torch.Tensor | None = None
    # (B, T)    KL(policy || actor), whole vocabulary, no gradient
    kl: torch.Tensor | None = None
    # (B, T)    KL(policy || accepted distribution)
    kl_after: torch.Tensor | None = None
    sum_p2: torch.Tensor | None = None  # (B, T)    sum over the vocabulary of p_new^2
    top_ids: torch.Tensor | None = None  # (B, T, K) the policy's top-K tokens
    top_logp: torch.Tensor | None = None  # (B, T, K)
    top_actor_logp: torch.Tensor | None = None  # (B, T, K) log p_actor on top_ids
    # (B, T)    log-probability under the starting policy
    logp_start: torch.Tensor | None = None
    # (B, T)    share of layers routed as in the engine
    routed_alike: torch.Tensor | None = None

    def known(self) -> dict[str, torch.Tensor]:
        """The statistics that were computed, by name."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) is not None
        }

    def detach(self) -> TokenStats:
        return TokenStats(**{name: x.detach() for name, x in self.known().items()})


@dataclass(frozen=True)
class Needs:
    """Outputs of a forward pass, in addition to the log-probabilities of sampled tokens."""

    entropy: bool = False
    support: bool = False  # support_logp
    tail: bool = False  # with `support`: the second term of the bound on Z
    exact_z: bool = False  # z, kl_after (two models)
    distill: bool = False
    topk: int = 0  # top_ids, top_logp; top_actor_logp (two models)
    lam: float = 1.0
    entropy_gradient: bool = False  # with `entropy`: the entropy carries gradient
    start: bool = False  # logp_start
    sum_p2: bool = False


class PolicyAndActor(nn.Module):
    """Policy and optional actor as one module: (batch, needs) -> the fields of TokenStats as a
    dict, which DDP and FSDP2 expect. With `share` a prompt is processed once for all its responses
    in the batch, not once for each response.

    vocabulary: number of token ids; later embedding rows are padding and are not scored. None: no
    padding. replay: the learner's copy of the rollout model sends each token to the experts in
    batch.routed. start: the frozen starting policy for --kl_coef; None with LoRA, because the
    policy without its adapters is the starting policy."""

    def __init__(
        self,
        policy,
        actor=None,
        autocast: torch.dtype | None = None,
        head_fp32: bool = False,
        vocabulary: int | None = None,
        replay: bool = False,
        start=None,
    ):
        super().__init__()
        self.policy, self.actor = policy, actor
        self.start = start
        self.autocast, self.head_fp32 = autocast, head_fp32
        self.vocabulary = vocabulary
        self.casts: dict | None = None  # head weights in 16 bits, inside `casts_kept`
        # bytes of GPU memory that set the head's chunk size; None: of the weights' device
        self.gpu_memory: int | None = None
        sampling = (policy, start) if actor is None else (actor,)
        self.routing = Routing(*sampling).__enter__() if replay else None

    @property
    def can_share(self) -> bool:
        """Whether responses can share their prompt's keys and values: full attention in every
        layer, and no replayed routing."""
        return self.routing is None and all(
            has_full_attention(m.config) for m in self.children()
        )

    def forward(
        self, batch: Batch, needs: Needs, share: bool = False
    ) -> dict[str, torch.Tensor]:
        B, T = batch.tokens.shape
        at = batch.known.at  # (N,) flat positions in (B, T) of the tokens
        replays = self.routing is not None and batch.routed is not None
        if replays:
            self.routing.given = batch.routed[:, :-1].flatten(0, 1)
        kind, models = OneModelRows, [self.policy]
        if self.actor is not None:
            kind, models = TwoModelRows, [self.policy, self.actor]
        rows = kind(Scored.of(batch, at), needs, *support_of(batch, at))
        outs = self._through_heads(models, rows, batch, at, share)
        if replays:
            outs["routed_alike"] = self.routing.alike()[places(batch, at)]
        if needs.start:
            outs["logp_start"] = self._logp_start(batch, at, share)
        row_and_column = (at // T, at % T)
        return {
            name: x.new_zeros((B, T) + x.shape[1:]).index_put(row_and_column, x)
            for name, x in outs.items()
        }

    def _logp_start(self, batch, at, share: bool):
        """log p_start(token), without gradient. With LoRA p_start is the policy with its adapters
        switched off."""
        frozen = self.policy if self.start is None else self.start
        with torch.no_grad(), lora.switched_off(frozen):
            rows = OneModelRows(Scored.of(batch, at), Needs())
            return self._through_heads([frozen], rows, batch, at, share)["logp"]

    def _through_heads(
        self, models, rows, batch, at, share: bool
    ) -> dict[str, torch.Tensor]:
        """The outputs of `rows` for the tokens at the flat positions `at` in (B, T), by name,
        computed from the models' logits in chunks."""
        layers = [lm.get_output_embeddings() for lm in models]
        # the models' paddings may differ
        width = min(len(layer.weight) for layer in layers)
        width = min(width, self.vocabulary or width)
        heads = [
            Head.of(lm.config, width, exact.product_of(layer))
            for lm, layer in zip(models, layers, strict=True)
        ]
        tensors, casts = [], []
        for lm, layer in zip(models, layers, strict=True):
            hidden = self._hidden(lm, batch, at, share)
            tensors += [hidden, layer.weight, getattr(layer, "bias", None)]
            casts.append(self._cast(layer.weight, hidden.dtype))
        gpu = self.gpu_memory
        gpu = memory_of(layers[0].weight.device) if gpu is None else gpu
        chunk = chunk_rows(width, gpu)
        outs = ChunkedHead.apply(rows, chunk, heads, casts, *tensors)
        return dict(zip(rows.outputs, outs, strict=True))

    @contextlib.contextmanager
    def casts_kept(self):
        """Cast weights to the compute type once inside this context, not in every forward pass (on a
        GPU with --gradient_checkpointing only the heads'). The weights must not change inside."""
        self.casts = {}
        try:  # autocast keeps its cache until its outermost scope ends
            with torch.autocast(next(self.parameters()).device.type, enabled=False):
                yield
        finally:
            self.casts = None

    def _cast(self, weight, dtype: torch.dtype):
        """A head's weight cast to `dtype`; None: ChunkedHead casts it."""
        if self.casts is None or weight.dtype == dtype:
            return None
        if weight not in self.casts:
            self.casts[weight] = weight.detach().to(dtype)
        return self.casts[weight]

    def _hidden(self, lm, batch, at, share):
        """Hidden states (N, H) that predict the tokens at the flat positions `at` in (B, T)."""
        read = read_shared if share else read_rows
        with torch.autocast(
            at.device.type, self.autocast, enabled=self.autocast is not None
        ):
            hidden = read(lm.base_model, batch, at)
        # the head multiplies in the compute type, or in float32 with head_fp32
        if self.autocast:
            hidden = hidden.to(torch.float32 if self.head_fp32 else self.autocast)
        return hidden

    def end_replay(self) -> None:
        """Let routers choose experts themselves again. Called after the backward pass."""
        if self.routing is not None:
            self.routing.given = None


def has_full_attention(config) -> bool:
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    return layers == {"full_attention"} and not getattr(config, "sliding_window", None)


def read_rows(model, batch, at):
    """Hidden states (N, H) one position before each token; every row contains its prompt."""
    hidden = model(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)[places(batch, at)]


def places(batch, at):
    """Flat positions (N,) in (B, S - 1) of the hidden states that predict the tokens at `at` in
    (B, T).

    The last of the S positions predicts no token."""
    T = batch.tokens.shape[1]
    row, t = at // T, at % T
    return row * (batch.ids.shape[1] - 1) + batch.prompt_len[row] + t - 1


def read_shared(model, batch, at):
    """The hidden states of `read_rows`, with each group's prompt processed once: responses attend
    to the keys and values of their group's prompt.

    Gradients flow through these keys and values. The backward pass of index_select adds gradients
    in a fixed order; the backward pass of x[group] does not."""
    T = batch.tokens.shape[1]
    known = batch.known
    group, P, n = known.group, known.longest_prompt, max(T - 1, 1)
    place = torch.arange(P + n, device=at.device)
    # after a shorter prompt: token ids that no response attends to
    prompts = model(input_ids=batch.ids[known.first, :P], use_cache=True)
    for layer in prompts.past_key_values.layers:
        layer.keys, layer.values = (
            x.index_select(0, group) for x in (layer.keys, layer.values)
        )
    last = prompts.last_hidden_state.flatten(0, 1).index_select(
        0, group * P + batch.prompt_len - 1
    )
    visible = (place < batch.prompt_len[:, None]) | (place >= P)
    suffix_out = model(
        input_ids=batch.tokens[:, :n],
        past_key_values=prompts.past_key_values,
        attention_mask=visible.long(),
        use_cache=True,
        position_ids=batch.prompt_len[:, None] + place[:n],
    ).last_hidden_state
    hidden = torch.cat([last[:, None], suffix_out], 1)[:, :T]
    return hidden.flatten(0, 1).index_select(0, at)


# -- Mixtures of experts: the choices of the routers


class Routing:
    """Context in which the experts chosen by a model's routers are recorded, or replaced by given
    experts (--router_replay).

    With --router_replay a token goes to the engine's experts. The model's own router still computes
    the weights of these experts, so that the router learns:

        w_e = p_e / sum of p over the chosen experts,  p = softmax(router logits)

    without the division for models that do not normalize. Source: R3, arXiv 2510.11370."""

    def __init__(self, model, start=None):
        """start: a second model whose tokens go to the same given experts; --kl_coef's start model."""
        self.routers = routers_of(model)
        self.of_start = [] if start is None else routers_of(start)
        # (n, layers, k) experts of the tokens in input order; -1: unknown
        self.given: torch.Tensor | None = None
        # for each layer (n, k): the model's own choice
        self.chosen: list[torch.Tensor | None] = [None] * len(self.routers)
        self.hooks = []

    def __enter__(self) -> Routing:
        for routers in (self.routers, self.of_start):
            for layer, router in enumerate(routers):
                route = functools.partial(self._route, layer)
                self.hooks.append(router.register_forward_hook(route))
        return self

    def __exit__(self, *exception) -> None:
        for hook in self.hooks:
            hook.remove()

    def _route(self, layer: int, router, inputs, output):
        """Forward hook of a router: record its experts, and replace them by the given experts."""
        logits, weights, chosen = output
        self.chosen[layer] = chosen
        if self.given is None:
            return output
        given = self.given[:, layer].to(chosen.dtype)
        experts = torch.where(given >= 0, given, chosen)
        return (
            logits,
            expert_weights(router, logits, experts).to(weights.dtype),
            experts,
        )

    def alike(self):
        """(n,): share of layers in which the router itself chooses the given experts."""
        given = self.given.sort(-1).values  # the order of experts does not matter
        chosen = torch.stack(self.chosen, 1).sort(-1).values
        return (chosen == given).all(-1).float().mean(-1)


# families that weigh experts as in `expert_weights`
REPLAYED = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


def expert_weights(router, logits, experts):
    """Weights (n, k) in float32 of the experts (n, k), from a router's logits (n, E)."""
    p = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
    return p / p.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else p


def routers_of(model) -> list[nn.Module]:
    """The routers of a mixture of experts, in the order of its layers: hidden states -> (logits,
    weights, experts)."""
    routers = []
    for name in quant.experts_of(model):
        block = model.get_submodule(name.rpartition(".")[0])
        routers += [
            router
            for kind, router in block.named_children()
            if kind in ("gate", "router")
        ]
    return routers


def routing_of(folder: str) -> tuple[int, int, int]:
    """(number of layers with experts, experts per token, experts per layer) of a model folder."""
    routers = routers_of(quant.empty_model(folder))
    return (
        (len(routers), routers[0].top_k, len(routers[0].weight))
        if routers
        else (0, 0, 0)
    )


def check_replay(model) -> None:
    """Raise UserError if --router_replay does not support this family of models."""
    family = model.config.model_type
    need(
        family in REPLAYED,
        f"--router_replay: models of the family {family} have no experts, or weigh them in an unknown way; leave it "
        f"out, or use one of {', '.join(REPLAYED)}",
    )
    need(
        len(routers_of(model)) == model.config.num_hidden_layers,
        "--router_replay: this model has layers without experts, which vLLM counts and the learner does not; leave it "
        "out",
    )


def needs_of_ref_pass(cfg: Config, has_actor: bool) -> Needs:
    """Outputs of the ref pass. The actor gives Z only if it sampled with these weights."""
    uses_z = cfg.correction in corrections.USES_Z
    sums = uses_z and cfg.obrs_z != "exact"  # Z from sums over the support
    sampler_known = has_actor and corrections.actor_is_sampler(cfg)
    wider = cfg.obrs_z == "approx" or (sampler_known and cfg.obrs_target == "new")
    return Needs(
        support=sums or corrections.rejects_by_support(cfg),
        tail=sums and cfg.obrs_z == "bracket" and not cfg.obrs_accept_rate,
        exact_z=sampler_known
        and uses_z
        and cfg.obrs_target == "ref"
        and not cfg.obrs_accept_rate,
        lam=cfg.obrs_lambda,
        topk=cfg.obrs_topk if sums and wider else 0,
        start=cfg.kl_coef > 0,
        sum_p2=cfg.advantage == "otb",
    )


def needs_of_update(cfg: Config, has_actor: bool, has_ref: bool) -> Needs:
    """Outputs of the training pass. Without a ref pass it also computes the ref statistics
    (objectives.with_ref)."""
    uses_z = cfg.correction in corrections.USES_Z
    # Z from sums over the support
    sums = (
        uses_z and cfg.obrs_z != "exact" and (cfg.obrs_target == "new" or not has_ref)
    )
    rejects = corrections.rejects_by_support(cfg)
    rejects = rejects and (cfg.correction_target == "new" or not has_ref)
    return Needs(
        entropy=True,
        entropy_gradient=cfg.entropy_coef > 0,
        start=cfg.kl_coef > 0 and not has_ref,
        support=sums or rejects,
        tail=sums and cfg.obrs_z == "bracket" and not cfg.obrs_accept_rate,
        exact_z=has_actor
        and uses_z
        and not has_ref
        and corrections.actor_is_sampler(cfg),
        lam=cfg.obrs_lambda,
        distill=has_actor,
    )


# -- From logits to statistics, one chunk of N packed tokens at a time


@dataclass
class Scored:
    """The sampled tokens, and the temperature and truncation of the distribution that scores
    them."""

    target: torch.Tensor  # (N,)
    inv_temperature: torch.Tensor | None  # (N, 1); None: 1
    # top_p, top_k, min_p, each (N, 1): truncate the learner's logits (sampling.cut)
    rule: list[torch.Tensor] | None
    # (offsets (N + 1,), ids): allowed tokens recorded in the rollout
    allowed: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def of(cls, batch: Batch, at) -> Scored:
        """The tokens at the flat positions `at` of a batch."""
        row = at // batch.tokens.shape[1]
        temperature, *rule = batch.sampling[row].unsqueeze(-1).unbind(1)
        known = batch.known
        allowed = None
        if batch.allowed is not None:
            sizes = np.concatenate([np.diff(offsets) for offsets, _ in batch.allowed])
            offsets = np.concatenate([[0], sizes.cumsum()])
            ids = np.concatenate([ids for _, ids in batch.allowed]).astype(np.int64)
            allowed = tuple(torch.from_numpy(x).to(at.device) for x in (offsets, ids))
        return cls(
            target=batch.tokens.flatten()[at],
            inv_temperature=1.0 / temperature if known.has_temperature else None,
            rule=rule if known.has_rule else None,
            allowed=allowed,
        )

    @property
    def cuts(self) -> bool:
        return self.allowed is not None or self.rule is not None

    def by_temperature(self, x, at):
        """x (n, V) divided by the temperature, in place."""
        return x if self.inv_temperature is None else x.mul_(self.inv_temperature[at])

    def transform(self, z, at):
        """Logits (n, V) of the scoring distribution: divided by the temperature, and truncated."""
        if self.inv_temperature is not None:
            z = z * self.inv_temperature[at]
        if self.rule is not None:
            z = z.masked_fill(cut(z, *(x[at] for x in self.rule)), CUT)
        if self.allowed is not None:
            # ragged: token n allows ids[offsets[n]:offsets[n + 1]]
            offsets, ids = self.allowed
            first, last = int(offsets[at.start]), int(offsets[at.stop])
            sizes = offsets[at.start : at.stop + 1].diff()
            row = torch.repeat_interleave(
                torch.arange(at.stop - at.start, device=z.device), sizes
            )
            gone = torch.ones_like(z, dtype=torch.bool)
            gone[row, ids[first:last]] = False
            z = z.masked_fill(gone, CUT)
        return z


def support_of(batch: Batch, at):
    """(ids (N, S), validity (N, S), p_K (N,)) of the OBRS support."""
    # a duplicate of a token has log-probability -inf, so that the token counts once
    on = batch.support_logp.flatten(0, 1)[at].isfinite()
    return batch.support_ids.flatten(0, 1)[at], on, batch.p_kth.flatten()[at]


class OneModelRows:
    """Statistics of one model: logp, and on request entropy, support_logp, tail, sum_p2 and
    its top-K.

    `tail` is the second term of the certified bound on Z: the sum over tokens outside S of
    min(p_K, p / lambda). With p = softmax(z / temperature) and g the gradient of the loss with respect to logp,
    dz = g (onehot(target) - p) / temperature."""

    def __init__(
        self,
        scored: Scored,
        needs: Needs,
        support_ids=None,
        support_on=None,
        p_kth=None,
    ):
        self.scored, self.needs = scored, needs
        self.support_ids = support_ids
        self.support_on = support_on
        self.p_kth = p_kth
        self.differentiable = (
            ("logp", "entropy") if needs.entropy_gradient else ("logp",)
        )

    def __call__(self, logits, at) -> dict:
        return self.stats(self.log_softmax(logits.pop(), at), at)

    def backward(self, logits, at, grads):
        if self.needs.entropy_gradient:
            return [self.pull_both(self.log_softmax(logits.pop(), at), at, grads)]
        p = self.scored.transform(logits.pop(), at).softmax(-1)
        return [self.pull(p, at, grads.get("logp"))]

    def log_softmax(self, z, at):
        return self.scored.transform(z, at).log_softmax(-1)

    def pull(self, p, at, g):
        """The gradient of the logits, g (onehot - p), for a gradient g (n, 1) of logp; overwrites
        p."""
        if g is None:
            return None
        target, g = self.scored.target[at, None], g.to(p.dtype)
        if self.scored.cuts:
            # a sampled token outside the truncation has the constant log-probability FLOOR
            g = g * (p.gather(1, target) > 0)
        return self.scored.by_temperature(p.mul_(-g).scatter_add_(1, target, g), at)

    def pull_both(self, logp, at, grads):
        """The gradient of the logits for the gradients of logp and of the entropy H, if given.

        dH / dz = - p (log p + H) / temperature."""
        if "entropy" not in grads:
            return self.pull(logp.exp_(), at, grads.get("logp"))
        p = logp.exp()
        H = -torch.linalg.vecdot(p, logp)[:, None]
        dz = self.scored.by_temperature(
            logp.add_(H).mul_(p).mul_(-grads["entropy"].to(p.dtype)), at
        )
        d_logp = self.pull(p, at, grads.get("logp"))
        return dz if d_logp is None else dz.add_(d_logp)

    def stats(self, logp, at) -> dict:
        """The outputs, computed from log-probabilities (n, V)."""
        out = {"logp": logp.gather(1, self.scored.target[at, None])[:, 0]}
        needs = self.needs
        p = logp.exp() if needs.entropy or needs.tail or needs.sum_p2 else None
        if needs.entropy:
            out["entropy"] = -torch.linalg.vecdot(p, logp)
        if needs.sum_p2:
            out["sum_p2"] = torch.linalg.vecdot(p, p)
        if needs.support:
            out["support_logp"] = logp.gather(1, self.support_ids[at])
        if needs.topk:
            out["top_logp"], out["top_ids"] = logp.topk(needs.topk, -1)
        if needs.tail:
            p_kth = self.p_kth[at, None].to(p.dtype)
            inside = torch.minimum(out["support_logp"].exp() / needs.lam, p_kth)
            of_support = inside.mul_(self.support_on[at]).sum(-1)
            of_all = torch.minimum(p.div_(needs.lam), p_kth, out=p).sum(-1)
            out["tail"] = (of_all - of_support).clamp_min_(0.0)
        if self.scored.cuts:
            for name in {"logp", "support_logp"} & set(out):
                out[name] = out[name].clamp_min(FLOOR)
        return out


class TwoModelRows:
    """Statistics of policy (p) and actor (q) together. Always: logp, actor_logp, KL(policy ||
    actor). On request: distill_loss (gradient only to the actor); entropy, support_logp, tail,
    sum_p2 and top-K of the policy; the actor's entropy, and its log-probabilities on the policy's
    top-K; the exact Z and KL(policy || accepted distribution).

    distill_loss is KL(sg p || q), Jackpot Eq. 7: dz = g (q - p)."""

    def __init__(self, scored: Scored, needs: Needs, *support):
        self.policy = OneModelRows(scored, needs, *support)
        self.actor = OneModelRows(scored, Needs(entropy=needs.entropy))
        self.needs = needs
        self.differentiable = (
            *self.policy.differentiable,
            "actor_logp",
            "distill_loss",
        )

    def __call__(self, logits, at) -> dict:
        logq, logp = self.log_softmax(logits, at)
        out = {}
        p, gap = logp.exp(), logp - logq
        out["kl"] = torch.linalg.vecdot(p, gap)
        if self.needs.distill:
            out["distill_loss"] = out["kl"].clone()
        if self.needs.exact_z:
            log_lam = math.log(self.needs.lam)
            out["z"] = torch.minimum(logq, logp - log_lam).exp().sum(-1)
            after = torch.linalg.vecdot(p, gap.clamp_min_(log_lam))
            out["kl_after"] = out["z"].clamp_min(1e-30).log() + after
        out |= self.policy.stats(logp, at)
        if self.needs.topk:
            out["top_actor_logp"] = logq.gather(1, out["top_ids"])
        out |= {f"actor_{name}": x for name, x in self.actor.stats(logq, at).items()}
        return out

    def backward(self, logits, at, grads):
        logq, logp = self.log_softmax(logits, at)
        q, dz = logq.exp(), None
        if "distill_loss" in grads:
            dz = (q - logp.exp()).mul_(grads["distill_loss"])
            dz = self.actor.scored.by_temperature(dz, at)
        d_actor = self.actor.pull(q, at, grads.get("actor_logp"))
        if d_actor is not None:
            dz = d_actor if dz is None else dz.add_(d_actor)
        return [self.policy.pull_both(logp, at, grads), dz]

    def log_softmax(self, logits, at):
        """(log q, log p), each (n, V); pops both logits from the list, the actor's first."""
        return self.actor.log_softmax(logits.pop(), at), self.policy.log_softmax(
            logits.pop(), at
        )
