"""The head: statistics of logits, computed in chunks so that the whole logits never exist.

At 2,048 tokens and a vocabulary of 151,936, one copy of the logits takes 1.2 GB in float32, and a
naive loss keeps five copies. Here the hidden states of the response tokens, packed to (N, H), are
multiplied with the head's weight (V, H) one chunk at a time. All statistics of the distribution are
computed from a chunk before it is freed. Backward recomputes each chunk's logits, overwrites them
with their gradient, and accumulates the gradients of hidden states and weight in place. This takes
one more product than the naive way (4 instead of 3), and no memory grows with N times V."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from machinery.flags import need

# Bytes of a chunk's logits in float32: on a GPU 1/64 of its memory between these bounds, because
# few large products are faster there; on a CPU LEAST_CHUNK
LEAST_CHUNK, MOST_CHUNK = 256 << 20, 1 << 30
CUT = -1e30  # logit of a token that cannot be sampled; finite, so that 0 log 0 is 0


def product(hidden, weight):
    """h W^T (n, V) in float32 (or float64); 16-bit inputs are summed and returned in float32."""
    if hidden.dtype not in (torch.bfloat16, torch.float16):
        return hidden @ weight.t()
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    with bfloat16_products(hidden.dtype == torch.bfloat16):
        return hidden.float() @ weight.t().float()


@contextmanager
def bfloat16_products(enabled: bool):
    """On a CPU, multiply float32 matrices as bfloat16 with float32 sums.

    Exact for bfloat16 values in float32, and twice as fast on processors with bfloat16 instructions;
    others ignore it."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "bf16" if enabled else before
    try:
        yield
    finally:
        settings.fp32_precision = before


@dataclass(frozen=True)
class Head:
    """The function from hidden states h (n, H) to logits (n, V), with weight W (V, H) and bias b:

        z = scale (h W^T + b), and with a cap z = cap tanh(z / cap)

    `check_head` rejects models with a different function. multiply: `product`, or the same
    product with a fixed order of sums (exact.py)."""

    scale: float = 1.0  # Granite, Cohere
    cap: float | None = None  # Gemma-2
    # number of weight rows that are token ids, not padding; None: all
    width: int | None = None
    multiply: Callable = product

    @classmethod
    def of(cls, config, width: int | None = None, multiply: Callable = product) -> Head:
        """The head that a model's config describes."""
        scale = (getattr(config, "logit_scale", None) or 1.0) / getattr(
            config, "logits_scaling", 1.0
        )
        return cls(
            scale, getattr(config, "final_logit_softcapping", None), width, multiply
        )

    def logits(self, hidden, weight, bias=None):
        """Logits (n, width) in float32, or float64."""
        z = self.multiply(hidden, weight[: self.width])
        if bias is not None:
            z += bias[: self.width]
        if self.scale != 1:
            z *= self.scale
        if self.cap:
            z = z.div_(self.cap).tanh_().mul_(self.cap)
        return z

    def of_layer(self, layer, hidden):
        """Logits in float32 from a model's output embedding `layer` and hidden states of any
        dtype."""
        bias = getattr(layer, "bias", None)
        return self.logits(
            hidden.float(), layer.weight.float(), None if bias is None else bias.float()
        )

    def slope(self, z):
        """d logits / d (h W^T + b), from the logits: (n, width) with a cap, else a number; None for
        1."""
        if not self.cap:
            return None if self.scale == 1 else self.scale
        return (
            (z / self.cap).square_().neg_().add_(1.0).clamp_min_(0.0).mul_(self.scale)
        )


def check_head(flag: str, config) -> None:
    """Raise UserError if a model computes its logits by a different function than `Head`.

    config: the transformers config of --model or --actor (`flag`). A model without layers, with
    random weights and 64 token ids, has the same function from hidden states to logits."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 0, 64, None
    if getattr(config, "layer_types", None):
        config.layer_types = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for p in model.parameters():
            p.normal_()
        ids = torch.arange(config.vocab_size)[None]
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = Head.of(config).of_layer(model.get_output_embeddings(), hidden[0])
        expected = model(input_ids=ids, use_cache=False).logits[0]
    gap = float((logits - expected).abs().max() / expected.std())
    need(
        gap < 1e-4,
        f"--{flag}: models of the family {config.model_type} apply an operation to their logits that model/head.py "
        f"lacks (logits differ by {gap:.3g} of their deviation); choose a different model, or add the operation to "
        "head.Head",
    )


class ChunkedHead(torch.autograd.Function):
    """The outputs of `rows` on the logits of all N tokens, as a tuple; their names are written to
    `rows.outputs`.

    Arguments: rows, chunk (tokens per chunk), heads (a Head for each model), casts (each model's
    weight in the type of its hidden states, or None: cast here), hidden_1 (N, H1), weight_1
    (V, H1), bias_1 (V,) or None, and hidden_2, weight_2, bias_2 of a second model. `rows` has

        differentiable                 names of the outputs that carry gradient
        rows(logits, at)               [logits (n, V) of each model], slice of tokens
                                       -> {name: (n, ...)}
        rows.backward(logits, at, g)   logits, slice, {name: gradient (n, 1) of this output}
                                       -> [gradient (n, V) of each model's logits, or None]

    `rows` pops the logits from the list, so that they are freed as soon as
    they are used."""

    @staticmethod
    def forward(ctx, rows, chunk, heads, casts, *tensors):
        models = models_of(heads, tensors, casts)
        N = len(tensors[0])
        outs = {}
        for at in chunks(N, chunk):
            logits = [head.logits(h[at], w, b) for head, h, w, b in models]
            for name, x in rows(logits, at).items():
                if name not in outs:
                    outs[name] = x.new_empty((N,) + x.shape[1:])
                outs[name][at] = x
        rows.outputs = tuple(outs)
        ctx.rows, ctx.chunk, ctx.heads, ctx.casts = rows, chunk, heads, casts
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        constant = outs.keys() - set(rows.differentiable)
        ctx.mark_non_differentiable(*(outs[name] for name in constant))
        return tuple(outs.values())

    @staticmethod
    def backward(ctx, *grads):
        tensors, rows = ctx.saved_tensors, ctx.rows
        models = models_of(ctx.heads, tensors, ctx.casts)
        grads = {
            name: g
            for name, g in zip(rows.outputs, grads, strict=True)
            if g is not None
        }
        d_tensors = [
            torch.zeros_like(x) if n else None
            for x, n in zip(tensors, ctx.needs_input_grad[4:], strict=True)
        ]
        for at in chunks(len(tensors[0]), ctx.chunk):
            logits = [head.logits(h[at], w, b) for head, h, w, b in models]
            slopes = [head.slope(z) for head, z in zip(ctx.heads, logits, strict=True)]
            d_logits = rows.backward(
                logits, at, {name: g[at, None] for name, g in grads.items()}
            )
            del logits
            for m, (_, hidden, weight, _) in enumerate(models):
                if d_logits[m] is not None:
                    dz = (
                        d_logits[m]
                        if slopes[m] is None
                        else d_logits[m].mul_(slopes[m])
                    )
                    dz = dz.to(hidden.dtype)
                    accumulate(d_tensors[3 * m : 3 * m + 3], dz, hidden, weight, at)
                # freed before the next chunk's logits are made
                d_logits[m] = slopes[m] = dz = None
        return None, None, None, None, *d_tensors


def score(head: Head, layer, hidden, ids):
    """log p(ids[t] | ids[:t]) for t >= 1, (R, L - 1) in float32, from a model's output embedding
    `layer` and the hidden states (R, L, H) of the sequences ids (R, L)."""
    flat = hidden.flatten(0, 1)
    # the last position of a row is removed below
    following = ids.roll(-1, 1).flatten()[:, None]
    out = flat.new_empty(len(flat), dtype=torch.float32)
    for at in chunks(len(flat), chunk_rows(len(layer.weight))):
        z = head.of_layer(layer, flat[at])
        chosen, most = z.gather(1, following[at]), z.amax(1, keepdim=True)
        # z.logsumexp, in place
        total = z.sub_(most).exp_().sum(1, keepdim=True).log_().add_(most)
        out[at] = (chosen - total)[:, 0]
        del z  # free it before the next chunk's logits are computed
    return out.view(ids.shape)[:, :-1]


def accumulate(d_model, dz, hidden, weight, at) -> None:
    """Add one chunk's logit gradients dz (n, width) to d_model, the gradients of hidden (N, H),
    weight (V, H) and bias (V,), each of which may be None."""
    d_hidden, d_weight, d_bias = d_model
    read = slice(dz.shape[1])  # the weight's rows that are token ids
    if d_hidden is not None:
        d_hidden[at] = dz @ weight[read]
    if d_weight is not None and d_weight.dtype == dz.dtype:
        d_weight[read].addmm_(dz.t(), hidden[at])  # in place: no second (V, H) tensor
    elif d_weight is not None and dz.is_cuda:
        # float32 += a product of 16-bit matrices, in place
        into = d_weight[read]
        torch.addmm(into, dz.t(), hidden[at], out_dtype=d_weight.dtype, out=into)
    elif d_weight is not None:
        d_weight[read] += dz.t() @ hidden[at]
    if d_bias is not None:
        d_bias[read] += dz.sum(0)


def models_of(heads, tensors, casts) -> list[tuple]:
    """(head, hidden, weight, bias) of each model, with the weight in the dtype of the hidden
    states."""
    models = zip(heads, tensors[::3], tensors[1::3], tensors[2::3], casts, strict=True)
    return [
        (head, h, w.to(h.dtype) if cast is None else cast, b)
        for head, h, w, b, cast in models
    ]


def chunks(N: int, size: int) -> list[slice]:
    """Slices of at most `size` tokens that cover N tokens; an empty one for N = 0."""
    return [slice(start, min(start + size, N)) for start in range(0, max(N, 1), size)]


def memory_of(device) -> int:
    """Bytes of memory of a GPU; 0 for a CPU."""
    device = torch.device(device)
    return (
        torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else 0
    )


def chunk_rows(V: int, memory: int = 0) -> int:
    """Tokens per chunk for a vocabulary of V. memory: bytes of the GPU; 0: a CPU."""
    return max(16, min(max(memory // 64, LEAST_CHUNK), MOST_CHUNK) // (4 * V))


def rows_at_once(config, length: int) -> int:
    """Number of sequences of this length for which a model computes whole logits at once."""
    return max(1, chunk_rows(config.vocab_size) // length)
