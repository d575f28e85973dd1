"""The head: from hidden states to logits as the model makes them, in chunks, so that they never
exist whole.

At 2,048 tokens and a vocabulary of 151,936, one copy of the logits is 1.2 GB in float32 and a naive
loss keeps five. Here the hidden states of the response tokens, packed to (N, H), meet the head's
weight (V, H) a chunk at a time; each chunk yields everything that is ever wanted of the whole
distribution and is thrown away. Backward computes each chunk's logits again, turns them in place
into their own gradient, and adds hidden and weight gradients up in place: one more product than the
naive way (4 instead of 3), and no memory that grows with N times V.

    Head          scale, bias and soft cap of a model's logits
    ChunkedHead   the statistics of __init__.py on all tokens' logits, chunk by chunk, with their gradient
    score         log-probabilities of whole sequences, without gradient
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Logits in flight: 128 MiB in float32, and 512 MiB where a few large products beat many small ones
CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 27}
# torch adds a product of 16-bit matrices to a float32 one in place (2.8 and later, on a GPU)
MIXED_ADDMM = hasattr(torch.ops.aten.addmm, "dtype_out")
CUT = -1e30  # logit of a token that cannot be sampled: finite, so that 0 log 0 stays 0


# ---------------------------------------------------------------------------------------------------------------------
# How a model makes logits
# ---------------------------------------------------------------------------------------------------------------------


def product(hidden, weight):
    """h W^T (n, V) in float32 (or float64), never rounded to the 8 bits of bfloat16's mantissa."""
    if hidden.dtype not in (torch.bfloat16, torch.float16):
        return hidden @ weight.t()
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden.float() @ weight.t().float()


@dataclass(frozen=True)
class Head:
    """How a model makes logits (n, V) of hidden states h (n, H), with its head's weight W (V, H)
    and bias b (V,):

        z = scale (h W^T + b), and then, where there is a cap, cap tanh(z / cap)

    A model that does anything else is found by the learner (`Learner.check_heads`). width: rows of
    a weight beyond the token ids that there are stay outside. multiply: `product`, or another order
    of its sums (exact.py)."""

    scale: float = 1.0  # Granite, Cohere
    cap: float | None = None  # Gemma-2
    width: int | None = None  # rows of the weight that are read; None: all
    multiply: Callable = product

    @classmethod
    def of(cls, config, width: int | None = None, multiply: Callable = product) -> Head:
        """The head that a model's config names."""
        config = config.get_text_config()
        scale = (getattr(config, "logit_scale", None) or 1.0) / getattr(
            config, "logits_scaling", 1.0
        )
        return cls(scale, getattr(config, "final_logit_softcapping", None), width, multiply)

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
        """The same in float32, whatever the type of a model's output embedding `layer` and of its
        hidden states."""
        bias = getattr(layer, "bias", None)
        return self.logits(
            hidden.float(), layer.weight.float(), None if bias is None else bias.float()
        )

    def slope(self, z):
        """d logits / d (h W^T + b) from the logits: (n, width) where there is a cap, else a number;
        None: 1."""
        if not self.cap:
            return None if self.scale == 1 else self.scale
        return (z / self.cap).square_().neg_().add_(1.0).clamp_min_(0.0).mul_(self.scale)


# ---------------------------------------------------------------------------------------------------------------------
# In chunks: the (B, T, V) logits never exist whole
# ---------------------------------------------------------------------------------------------------------------------


class ChunkedHead(torch.autograd.Function):
    """The outputs of `rows` on the logits of all N tokens, as a tuple in the order of
    `rows.outputs`.

    Arguments: rows, chunk (tokens per chunk), heads (a Head for each model), casts (each model's
    weight in the type of its hidden states, or None: cast here), hidden_1 (N, H1), weight_1
    (V, H1), bias_1 (V,) or None, and hidden_2, weight_2, bias_2 of a second model. `rows` has

        outputs, differentiable        names of its outputs; the first `differentiable` of them carry gradient
        rows(logits, at)               [logits (n, V) of each model], slice of tokens -> {name: (n, ...)}
        rows.backward(logits, at, g)   the same and [gradient (n, 1) of each differentiable output, or None]
                                       -> [gradient (n, V) of each model's logits, or None]

    `rows` takes the logits out of the list it is given, so that they can be freed as soon as they
    are used."""

    @staticmethod
    def forward(ctx, rows, chunk, heads, casts, *tensors):
        models = in_threes(tensors, casts)
        N = len(tensors[0])
        outs = None
        for at in chunks(max(N, 1), chunk, N):  # no token at all: empty outputs
            got = rows(
                [head.logits(h[at], w, b) for head, (h, w, b) in zip(heads, models, strict=True)],
                at,
            )
            if outs is None:
                outs = {
                    name: got[name].new_empty((N,) + got[name].shape[1:]) for name in rows.outputs
                }
            for name in rows.outputs:
                outs[name][at] = got[name]
        ctx.rows, ctx.chunk, ctx.heads, ctx.casts = rows, chunk, heads, casts
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        outs = tuple(outs.values())
        ctx.mark_non_differentiable(*outs[rows.differentiable :])
        return outs

    @staticmethod
    def backward(ctx, *grads):
        tensors, rows, heads = ctx.saved_tensors, ctx.rows, ctx.heads
        models = in_threes(tensors, ctx.casts)
        grads = grads[: rows.differentiable]
        d_tensors = [
            torch.zeros_like(x) if n else None
            for x, n in zip(tensors, ctx.needs_input_grad[4:], strict=True)
        ]
        N = len(tensors[0])
        for at in chunks(N, ctx.chunk, N):
            logits = [
                head.logits(h[at], w, b) for head, (h, w, b) in zip(heads, models, strict=True)
            ]
            slopes = [head.slope(z) for head, z in zip(heads, logits, strict=True)]
            d_logits = rows.backward(
                logits, at, [None if g is None else g[at, None] for g in grads]
            )
            del logits
            for m, (hidden, weight, _) in enumerate(models):
                if d_logits[m] is not None:
                    dz = d_logits[m] if slopes[m] is None else d_logits[m].mul_(slopes[m])
                    dz = dz.to(hidden.dtype)
                    accumulate(d_tensors[3 * m : 3 * m + 3], dz, hidden, weight, at)
                d_logits[m] = slopes[m] = dz = None  # freed before the next chunk's logits are made
        return None, None, None, None, *d_tensors


def score(head: Head, layer, hidden, ids):
    """log p(ids[t] | ids[:t]) for t >= 1, (R, L - 1) in float32, by a model's output embedding
    `layer` on the hidden states (R, L, H) of the sequences ids (R, L)."""
    # the last of a row is cut off below
    flat, following = (
        hidden.flatten(0, 1),
        ids.roll(-1, 1).flatten()[:, None],
    )
    out = flat.new_empty(len(flat), dtype=torch.float32)
    for at in chunks(len(flat), chunk_rows(len(layer.weight)), len(flat)):
        z = head.of_layer(layer, flat[at])
        chosen, most = z.gather(1, following[at]), z.amax(1, keepdim=True)
        total = z.sub_(most).exp_().sum(1, keepdim=True).log_().add_(most)  # z.logsumexp, in place
        out[at] = (chosen - total)[:, 0]
        del z  # before the next one is made
    return out.view(ids.shape)[:, :-1]


def accumulate(d_model, dz, hidden, weight, at) -> None:
    """Add one chunk's logit gradients dz (n, width) to d_model: hidden's (N, H), weight's (V, H)
    and bias's (V,), where they are wanted."""
    d_hidden, d_weight, d_bias = d_model
    read = slice(dz.shape[1])  # rows of the weight
    if d_hidden is not None:
        d_hidden[at] = dz @ weight[read]
    if d_weight is not None and d_weight.dtype == dz.dtype:
        d_weight[read].addmm_(dz.t(), hidden[at])  # in place: no second (V, H) tensor
    elif d_weight is not None and dz.is_cuda and MIXED_ADDMM:
        into = d_weight[read]
        torch.addmm(into, dz.t(), hidden[at], out_dtype=d_weight.dtype, out=into)
    elif d_weight is not None:
        d_weight[read] += dz.t() @ hidden[at]
    if d_bias is not None:
        d_bias[read] += dz.sum(0)


def in_threes(tensors, casts) -> list[tuple]:
    """(hidden, weight, bias) of each model, its weight in the type of its hidden states."""
    threes = zip(tensors[::3], tensors[1::3], tensors[2::3], casts, strict=True)
    return [(h, w.to(h.dtype) if cast is None else cast, b) for h, w, b, cast in threes]


def chunks(total: int, size: int, end: int) -> list[slice]:
    """Slices of `size` tokens that cover 0 .. total, cut off at `end`."""
    return [slice(start, min(start + size, end)) for start in range(0, total, size)]


def chunk_rows(V: int, device: str = "cpu") -> int:
    """Tokens per chunk for a vocabulary of V on a type of device."""
    return max(16, CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cpu"]) // V)


def rows_at_once(config, length: int) -> int:
    """How many sequences of this length a model reads at once where its whole logits are made."""
    return max(1, chunk_rows(config.get_text_config().vocab_size) // length)
