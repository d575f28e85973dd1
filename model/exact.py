"""Bitwise equal sampler and learner: log p_inf = log p_ref with a difference of exactly 0
(--exact).

A floating-point sum depends on its order, and libraries choose the order by the shapes of their
inputs. The sampler decodes one token per row with a KV cache; the learner processes whole responses
in different batches. With equal weights their log-probabilities differ by 1e-5 in float32 and by up
to 0.15 in bfloat16. This file fixes the order of each sum for all shapes. Sampler and learner run
the same functions on a CPU with float32 weights, and with bfloat16 both run under autocast.

    operation                         order depends on      fixed by
    linear layers, head               rows of the batch     `product`: ROWS rows at a time, padded
    q k, sum over a head's entries    number of queries     torch's attention, one query and PAIR
                                                                heads at a time
    p v and softmax, sums over keys   number of keys        `room`: padding to fixed numbers of keys;
                                                                padded keys add exactly 0
    p v, with a padded prompt         place of the padding  `Seen`: puts the keys in order first
    norms, embedding, rotary angles   nothing: per token    unchanged
    softmax and truncation of logits  nothing: same length  both sides cut them to the vocabulary
    silu (no sum, but the ends of a   place in the tensor   `quotient`: an exp without special ends,
      tensor are rounded differently)                       correctly rounded sums and quotients
    int8 products                     nothing: integers     unchanged (quant.py)
    w4a16 products                    rows of the batch     `product`
    temperature (no sum)              method of division    times 1 / temperature in float32
    gathered weights (FSDP2)          nothing, but 16 bits  layers are gathered in float32
                                      would round them      (memory.travels_in)

Longer rows and a longer cache therefore change nothing. A token's index among the ROWS rows of a
product must not matter either. This is true of the libraries used here, and is checked: each update
on fresh rollouts computes the largest difference over its tokens, and the run stops if it is not 0
(`check_zero`). The bits may depend on the machine and its number of threads, which sampler and
learner share. Gradients are the ordinary ones and depend on shapes.

Source: He et al., Defeating Nondeterminism in LLM Inference (2025), who write kernels with a fixed
order of sums."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.nn.functional import silu as torch_silu
from transformers.cache_utils import DynamicLayer

import quant
from config import PrecisionFlags, RolloutFlags, RunFlags
from machinery.checkpoint.models import read_config
from machinery.flags import need
from model.head import Head
from model.head import product as plain_product
from sampling import Sampling

# Tokens in one product with a weight. AVX2's kernel takes six rows at a time and rounds remaining
# rows differently (the last two of 32). 96 rows leave no remainder for one, two or four threads.
ROWS = 96
AT_ONCE = 128  # queries in one call of attention
# the number of keys is a multiple of this: different code would sum a remainder
KEYS = 16
# query heads of one key head at a time. On AVX2 sums over more than 128 keys depend on the number of
# keys from four heads on; an odd number aligns the threads' buffers differently, which changes sums
PAIR = 2
# number of keys that torch's kernel processes at a time; if more than half of this number remain,
# the kernel's split of the sum depends on the number of keys
WHOLE = 512
# added to the score of a key that a query does not see; finite, because a query may see no key
UNSEEN = -1e30

# tested families, which consist of the operations in the table
FAMILIES = ("granite", "llama", "mistral", "qwen2", "qwen3")


# -- Products and layers


def product(x, weight):
    """x W^T (M, N) in float32 (or float64) from x (M, K) and W (N, K), ROWS rows at a time,
    zero-padded."""
    if x.dtype == torch.bfloat16:
        x, weight = x.float(), weight.float()
    padded = longer(x, -len(x) % ROWS)
    out = x.new_empty(len(padded), len(weight))
    for rows, products in zip(padded.split(ROWS), out.split(ROWS), strict=True):
        torch.mm(rows, weight.t(), out=products)
    return out[: len(x)]


def rounded_product(x, weight):
    """`product` in the dtype of x."""
    return product(x, weight).to(x.dtype)


def longer(x, more: int):
    """x (..., K, D) padded with `more` rows of zeros to (..., K + more, D); no copy if more = 0."""
    return pad(x, (0, 0, 0, more)) if more else x


def taken(x, places):
    """The entries (B, H, n, D) of x (B, H, K, D) at the positions `places` (B, n)."""
    return x.take_along_dim(places[:, None, :, None], 2)


class Multiply(torch.autograd.Function):
    """x W^T of x (M, K) and W (N, K), in the dtype of x: `product` with an ordinary gradient."""

    @staticmethod
    def forward(ctx, x, weight, rounded):
        """rounded: W in the dtype of x."""
        ctx.save_for_backward(x, weight)
        return rounded_product(x, rounded)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        dx = g @ weight.to(g.dtype) if ctx.needs_input_grad[0] else None
        dw = (g.t() @ x).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None


class WithGradientOf(torch.autograd.Function):
    """exact(*inputs), with the gradient of ordinary(*inputs), the same function with a different
    order of sums."""

    @staticmethod
    def forward(ctx, exact, ordinary, *inputs):
        ctx.ordinary = ordinary
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    def backward(ctx, g):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.ordinary(*inputs)
        return None, None, *torch.autograd.grad(out, inputs, g.to(out.dtype))


class ExactLinear(nn.Linear):
    """A linear layer by `product`, under autocast in the autocast dtype. `apply` replaces nn.Linear
    by it.

    Its parameters are the same objects, with the same names, as in the replaced layer."""

    # for a frozen weight: (version of the weight, the weight in the dtype of the products)
    cached: tuple[Any, torch.Tensor] | None = None

    @classmethod
    def from_linear(cls, layer: nn.Linear) -> ExactLinear:
        exact = cls(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            device="meta",
        )
        exact.weight, exact.bias = layer.weight, layer.bias
        return exact.train(layer.training)

    def rounded(self, dtype: torch.dtype):
        """The weight rounded to `dtype`. A frozen rounded weight is stored in float32, the dtype of
        the products."""
        if self.weight.requires_grad:
            return self.weight.detach().to(dtype)
        version = (self.weight._version, self.weight.data_ptr(), dtype)
        if self.cached is None or self.cached[0] != version:
            self.cached = version, self.weight.to(dtype).float()
        return self.cached[1]

    def forward(self, x):
        device = x.device.type
        dtype = (
            torch.get_autocast_dtype(device)
            if torch.is_autocast_enabled(device)
            else x.dtype
        )
        with torch.autocast(device, enabled=False):
            flat, weight = x.reshape(-1, x.shape[-1]).to(dtype), self.rounded(dtype)
            y = Multiply.apply(flat, self.weight, weight)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(dtype)


def quotient(x):
    z = x.float()
    below = z.neg().exp_().add_(1.0)
    return torch.div(z, below, out=below).to(x.dtype)


class SiLU(nn.Module):
    """x / (1 + exp(-x))."""

    def forward(self, x):
        return WithGradientOf.apply(quotient, torch_silu, x)


# -- Attention


def room(n: int) -> int:
    """Padded number of keys, chosen so that a row's sums do not depend on longer rows of the
    batch."""
    remainder = n % WHOLE
    return (
        n
        - remainder
        + (WHOLE if remainder > WHOLE // 2 else remainder + -remainder % KEYS)
    )


class Seen(NamedTuple):
    """The keys that the queries of a forward pass see, for all its layers."""

    mask: torch.Tensor  # (B, 1, Q, K) bool
    # (B, 1, Q, room(K)) bias of the scores of the keys in `order`: 0 or UNSEEN
    added: torch.Tensor
    # (B, room(K)) permutation of the keys, with the keys that no query sees last; None: identity
    order: torch.Tensor | None

    @classmethod
    def of(cls, mask) -> Seen:
        """The keys of a mask. The last query sees all keys except padding."""
        K = mask.shape[3]
        padded, order = pad(mask, (0, room(K) - K)), None
        absent = ~padded[:, 0, -1]  # (B, room(K))
        if (absent[:, :-1] & ~absent[:, 1:]).any():  # padding precedes a key
            order = absent.byte().argsort(dim=1, stable=True)
            padded = padded.gather(3, order[:, None, None].expand_as(padded))
            order = order.clamp_max(K - 1)
        return cls(mask, UNSEEN * (~padded).float(), order)

    def in_order(self, x):
        """Keys or values (B, H, K, D) -> (B, H, room(K), D) in float32, permuted by `order` and
        padded with masked entries."""
        x = x.float()
        return (
            longer(x, room(x.shape[2]) - x.shape[2])
            if self.order is None
            else taken(x, self.order)
        )


def seen(**how) -> Seen:
    """The attention_mask of all layers, by transformers' interface for masks."""
    from transformers.masking_utils import sdpa_mask

    return Seen.of(sdpa_mask(**{**how, "allow_is_causal_skip": False}))


def attention(module, query, key, value, attention_mask: Seen, scaling: float, **_):
    """(softmax(scaling Q K^T) V (B, Q, heads, D), None), by transformers' interface for attention.

    query (B, heads, Q, D); key and value (B, heads of keys, K, D)."""
    device = query.device.type
    dtype = (
        torch.get_autocast_dtype(device)
        if torch.is_autocast_enabled(device)
        else value.dtype
    )
    exact = functools.partial(exact_attention, attention_mask, scaling, dtype)

    def ordinary(*inputs):
        """The same in float32 by torch, for the gradient."""
        query, key, value = (x.float() for x in inputs)
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask.mask,
            scale=scaling,
            enable_gqa=True,
        )

    with torch.autocast(device, enabled=False):
        out = WithGradientOf.apply(exact, ordinary, query, key, value)
    return out.transpose(1, 2).contiguous(), None


def exact_attention(seen: Seen, scaling: float, dtype: torch.dtype, query, key, value):
    """Attention (B, heads, Q, D) in `dtype`, query by query in a fixed order of sums."""
    B, heads, Q, D = query.shape
    H, K = key.shape[1:3]
    shared = heads // H  # query heads per key head
    pairs = -(-shared // PAIR)
    # key, value (B H, 1, room(K), D); query (B H, Q, pairs PAIR, D)
    key, value = (seen.in_order(x).flatten(0, 1)[:, None] for x in (key, value))
    query = query.float().reshape(B * H, shared, Q, D).transpose(1, 2)
    query = pad(query, (0, 0, 0, pairs * PAIR - shared))
    added = seen.added[:, :, :, None, None]  # (B, 1, Q, 1, 1, room(K))
    outs, last = [], 0
    for chunk, mask in zip(
        query.split(AT_ONCE, 1), added.split(AT_ONCE, 2), strict=True
    ):
        n_queries = chunk.shape[1]
        last += n_queries  # end of these queries
        n = min(key.shape[2], room(K - Q + last))  # these queries see no later key
        mask = (
            mask[..., :n]
            .expand(B, H, n_queries, pairs, PAIR, n)
            .reshape(B * H, -1, PAIR, n)
        )
        chunk = chunk.reshape(B * H, -1, PAIR, D)
        keys, values = (
            x[:, :, :n].expand(-1, chunk.shape[1], -1, -1) for x in (key, value)
        )
        out = scaled_dot_product_attention(chunk, keys, values, mask, scale=scaling)
        outs.append(out.reshape(B * H, n_queries, -1, D)[:, :, :shared])
    return torch.cat(outs, 1).transpose(1, 2).reshape(B, heads, Q, D).to(dtype)


# -- The sampler's cache


class InOrder(DynamicLayer):
    """The KV cache of one layer in which each row starts at position 0 and new keys are appended to
    it.

    It has `room` positions and stores 16-bit numbers as float32, the dtype of the products. A
    decoding step therefore neither copies nor reorders the previous keys."""

    def __init__(self, layer, lengths):
        """layer: a transformers cache layer with keys and values (B, H, P, D), padded on the left;
        lengths (B,): number of tokens of each row."""
        super().__init__()
        P = layer.keys.shape[2]
        places = torch.arange(room(P), device=lengths.device) + (P - lengths)[:, None]
        self.keys, self.values = (
            taken(x.float(), places.clamp_max(P - 1))
            for x in (layer.keys, layer.values)
        )
        self.lengths = lengths
        self.longest = P  # length of the longest row
        self.is_initialized = True

    def update(self, key, value, *_, **__):
        """Append the key and value (B, H, 1, D) of a new token; returns all keys and values, with
        unused positions at the end of a row."""
        self.keys, self.values = (
            longer(x, self.get_seq_length() - x.shape[2])
            for x in (self.keys, self.values)
        )
        B, H, K, _ = self.keys.shape
        first = K * torch.arange(B * H, device=self.lengths.device).view(B, H)
        rows = first + self.lengths[:, None]
        for x, new in ((self.keys, key), (self.values, value)):
            x.view(B * H * K, -1).index_copy_(
                0, rows.flatten(), new.float().flatten(0, 2)
            )
        self.lengths = self.lengths + 1
        self.longest += 1
        return self.keys, self.values

    def mask(self):
        """(B, positions) bool: positions that the next token attends to, itself included."""
        place = torch.arange(self.get_seq_length(), device=self.lengths.device)
        return place <= self.lengths[:, None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        """Number of positions of a row, with one more token: transformers must not mask any; `mask`
        has the visible ones."""
        return room(self.longest + 1)

    def reorder_cache(self, rows) -> None:
        self.keys, self.values, self.lengths = (
            x.index_select(0, rows) for x in (self.keys, self.values, self.lengths)
        )


# -- Supported models and flags


def apply(model):
    """Install the functions above in a model, also in its low-bit layers (call quant.align
    earlier)."""
    # seconds to load
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, quant.LowBitLinear):
                child.multiply = rounded_product
            elif isinstance(child, nn.Linear):
                setattr(parent, name, ExactLinear.from_linear(child))
            elif type(child).__name__ in ("SiLU", "SiLUActivation"):
                setattr(parent, name, SiLU())
    ALL_ATTENTION_FUNCTIONS.register("exact", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("exact", seen)
    model.set_attn_implementation("exact")


def product_of(layer):
    """The function that multiplies hidden states with the weight of this output embedding."""
    return product if isinstance(layer, ExactLinear) else plain_product


def as_sampler(model, dtype: str, head_fp32: bool, vocabulary: int | None):
    """Change an engine's float32 model so that it computes logits exactly as the learner
    (PolicyAndActor), in the compute type `dtype`."""
    apply(model.requires_grad_(False))
    head, layer = (
        Head.of(model.config, vocabulary, product),
        model.get_output_embeddings(),
    )
    compute = getattr(torch, dtype)

    def forward(input_ids, logits_to_keep=0, **more):
        """Logits (B, S, V) in float32 of the last `logits_to_keep` positions (0: all)."""
        cache = more.get("past_key_values")
        if cache is not None:
            more["attention_mask"] = cache.layers[0].mask()
        with torch.autocast(input_ids.device.type, compute, enabled=dtype != "float32"):
            out = model.base_model(input_ids=input_ids, **more)
        hidden = out.last_hidden_state[:, -logits_to_keep:]
        hidden = hidden.to(torch.float32 if head_fp32 else compute)
        logits = head.logits(
            hidden.flatten(0, 1), layer.rounded(hidden.dtype), layer.bias
        )
        logits = logits.unflatten(0, hidden.shape[:2])
        return SimpleNamespace(logits=logits, past_key_values=out.past_key_values)

    model.forward = forward


def check(cfg: RolloutFlags) -> None:
    """Raise UserError if engine and learner cannot be bitwise equal with these flags."""
    if not cfg.exact:
        return
    need(
        not torch.cuda.is_available(),
        "--exact: works only on a CPU; leave it out on a GPU",
    )
    local = getattr(cfg, "samplers", "local") == "local"
    need(
        cfg.rollout == "hf" and local,
        "--exact: vLLM and remote samplers compute their sums in different orders; use --rollout=hf "
        "--samplers=local, or leave it out",
    )
    dtype = getattr(cfg, "dtype", cfg.rollout_dtype)
    need(
        cfg.rollout_dtype == dtype != "float16",
        f"--exact: --rollout_dtype={cfg.rollout_dtype} and --dtype={dtype} must be the same, float32 or bfloat16",
    )
    same = cfg.learner_quant in ("aligned", cfg.rollout_quant)
    need(
        same and cfg.rollout_quant != "fp8",
        f"--exact: --rollout_quant={cfg.rollout_quant} and --learner_quant={cfg.learner_quant} must be the same, and "
        "not fp8; align the learner with --learner_quant=aligned",
    )
    need(
        getattr(cfg, "lora_rank", 0) == 0,
        "--exact: adapters are merged for the engine, in a different order of sums; leave out --exact or --lora_rank",
    )
    scored = cfg.keep_sampling_mask != "off" or not Sampling.of(cfg).truncates
    need(
        scored and cfg.logprobs_mode == "processed",
        f"--exact: with --keep_sampling_mask={cfg.keep_sampling_mask} and --logprobs_mode={cfg.logprobs_mode} the "
        "learner scores a distribution that differs from the sampled distribution; use replay and processed",
    )


def check_model(cfg: PrecisionFlags, policy: str, actor: str | None) -> None:
    """Raise UserError unless the sampling model has only operations that this file supports.
    policy, actor: folders."""
    if not cfg.exact:
        return
    flag = "actor" if actor else "model"
    config = read_config(actor or policy)
    known, act = ", ".join(FAMILIES), getattr(config, "hidden_act", "another")
    need(
        config.model_type in FAMILIES and act == "silu",
        f"--exact: the sums of a model of the family {config.model_type} with {act} (--{flag}) are not known here, "
        f"only the sums of {known} with silu; leave out --exact",
    )
    window = getattr(config, "sliding_window", None)
    slides = window and getattr(config, "use_sliding_window", True)
    need(
        not slides,
        f"--exact: the model of --{flag} has sliding windows; leave out --exact",
    )


def check_zero(cfg: RunFlags, logged: dict) -> None:
    """Raise UserError if a token's log-probabilities in engine and learner differed in an update on
    fresh rollouts."""
    gap = logged[
        "rollout_corr/largest_gap" if cfg.actor == "none" else "actor/largest_gap"
    ]
    need(
        gap <= 0 or logged["staleness/max_updates"] > 0,
        f"--exact: on fresh rollouts log p_inf and log p_ref differ by {gap:.3g}; the matrix products of this "
        "machine depend on more than model/exact.py controls; leave out --exact, and report the machine",
    )
