"""What models take of the memory.

recompute   activations inside a layer are computed again for the backward pass, not kept (--gradient_checkpointing)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class MemoryFlags:
    """Memory of the learner (model/memory.py)"""

    gradient_checkpointing: bool = False
    """Keep a layer's input alone, and compute what is inside it again for the backward pass: a third more time, a
    tenth of the memory. One response is never cut over ranks: the longest one must fit a rank beside its shards."""


# ---------------------------------------------------------------------------------------------------------------------
# Activations
# ---------------------------------------------------------------------------------------------------------------------


def recompute(model) -> None:
    """From here on each decoder layer of the model keeps its input for the backward pass, and nothing else.

    In the place of transformers' own, which asks for a model in training mode and drops the keys and values of a
    prompt that several responses share."""
    for i, layer in enumerate(model.base_model.layers):
        layer.forward = functools.partial(forward_again, layer.forward, i)


def forward_again(forward, i: int, *args, past_key_values=None, **more):
    """The forward of layer i, which runs a second time in the backward pass, if there will be one.

    Keys and values go in and come out as tensors: a second run must find the cache as the first one did."""
    if not torch.is_grad_enabled():
        return forward(*args, past_key_values=past_key_values, **more)
    how = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is drawn: dropout is off
    if past_key_values is None:
        return checkpoint(forward, *args, **how, **more)
    layer = past_key_values.layers[i]
    known = (layer.keys, layer.values) if layer.is_initialized else ()

    def run(known, *args):
        one = filled(type(layer)(), *known)
        return forward(*args, past_key_values=one, **more), one.keys, one.values

    out, *new = checkpoint(run, known, *args, **how)
    if not known:  # a prompt; behind the responses nothing comes that would read theirs
        filled(layer, *new)
    return out


def filled(layer, *keys_and_values):
    """A layer of a cache with these keys and values (B, heads, tokens, size), if there are any."""
    if keys_and_values:
        layer.lazy_initialization(*keys_and_values)
        layer.keys, layer.values = keys_and_values
    return layer
