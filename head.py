"""The language-model head, in chunks: the (B, T, V) logits never exist whole.

At 2,048 tokens and a vocabulary of 151,936, one copy of the logits is 1.2 GB in float32 and a naive loss keeps five.
Here the hidden states of the response tokens, packed to (N, H), meet the head's weight (V, H) a chunk at a time; each
chunk yields everything that is ever wanted of the whole distribution and is thrown away. Backward computes each chunk's
logits again, turns them in place into their own gradient, and adds hidden and weight gradients up in place: one more
product than the naive way (4 instead of 3), and no memory that grows with N times V.

`ChunkedHead` knows nothing of losses: `rows` (model.py) says what to compute from a chunk's logits and what their
gradient is.
"""

from __future__ import annotations

import torch

CHUNK_ELEMENTS = 1 << 25  # logits in flight: 128 MiB in float32


class ChunkedHead(torch.autograd.Function):
    """The outputs of `rows` on the logits of all N tokens, as a tuple in the order of `rows.outputs`.

    Arguments: rows, chunk (tokens per chunk), hidden_1 (N, H1), weight_1 (V, H1), and hidden_2, weight_2 of a second
    model. `rows` has

        outputs, differentiable        names of its outputs; the first `differentiable` of them carry gradient
        rows(logits, at)               [logits (n, V) of each model], slice of tokens -> {name: (n, ...)}
        rows.backward(logits, at, g)   the same and [gradient (n, 1) of each differentiable output, or None]
                                       -> [gradient (n, V) of each model's logits, or None]

    `rows` takes the logits out of the list it is given, so that they can be freed as soon as they are used."""

    @staticmethod
    def forward(ctx, rows, chunk, *heads):
        hidden, weight = heads[::2], cast_weights(heads)
        N = len(hidden[0])
        outs = None
        for at in chunks(max(N, 1), chunk, N):  # no token at all: empty outputs
            got = rows([logits_of(h[at], w) for h, w in zip(hidden, weight, strict=True)], at)
            if outs is None:
                outs = {name: got[name].new_empty((N,) + got[name].shape[1:]) for name in rows.outputs}
            for name in rows.outputs:
                outs[name][at] = got[name]
        ctx.rows, ctx.chunk = rows, chunk
        ctx.save_for_backward(*heads)
        ctx.set_materialize_grads(False)
        outs = tuple(outs.values())
        ctx.mark_non_differentiable(*outs[rows.differentiable :])
        return outs

    @staticmethod
    def backward(ctx, *grads):
        heads, rows = ctx.saved_tensors, ctx.rows
        hidden, weight = heads[::2], cast_weights(heads)
        grads = grads[: rows.differentiable]
        d_heads = [torch.zeros_like(x) if n else None for x, n in zip(heads, ctx.needs_input_grad[2:], strict=True)]
        N = len(hidden[0])
        for at in chunks(N, ctx.chunk, N):
            logits = [logits_of(h[at], w) for h, w in zip(hidden, weight, strict=True)]
            d_logits = rows.backward(logits, at, [None if g is None else g[at, None] for g in grads])
            del logits
            for m in range(len(d_logits)):
                if d_logits[m] is not None:
                    dz = d_logits[m].to(hidden[m].dtype)
                    accumulate(d_heads[2 * m], d_heads[2 * m + 1], dz, hidden[m], weight[m], at)
                d_logits[m] = dz = None  # freed before the next chunk's logits are made
        return None, None, *d_heads


def accumulate(d_hidden, d_weight, dz, hidden, weight, at) -> None:
    """Add one chunk's logit gradients dz (n, V) to d_hidden (N, H) and d_weight (V, H), where they are wanted."""
    if d_hidden is not None:
        d_hidden[at] = dz @ weight
    if d_weight is not None and d_weight.dtype == dz.dtype:
        d_weight.addmm_(dz.t(), hidden[at])  # in place: no second (V, H) tensor
    elif d_weight is not None:
        d_weight += dz.t() @ hidden[at]


def logits_of(hidden, weight):
    """(n, V) logits in float32 (or float64), never rounded to the 8 bits of bfloat16's mantissa."""
    if hidden.dtype not in (torch.bfloat16, torch.float16):
        return hidden @ weight.t()
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden.float() @ weight.t().float()


def cast_weights(heads) -> list[torch.Tensor]:
    """The weights of (hidden, weight, hidden, weight, ...) in the type of their hidden states."""
    return [w.to(h.dtype) for h, w in zip(heads[::2], heads[1::2], strict=True)]


def chunks(total: int, size: int, end: int) -> list[slice]:
    """Slices of `size` tokens that cover 0 .. total, cut off at `end`."""
    return [slice(start, min(start + size, end)) for start in range(0, total, size)]


def chunk_rows(V: int) -> int:
    """Tokens per chunk for a vocabulary of V."""
    return max(16, CHUNK_ELEMENTS // V)
