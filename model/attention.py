"""Attention of grouped queries on a CPU: several heads of queries read one head of keys and values.

transformers copies keys and values for every head that reads them, wherever there is a mask:
torch's GPU kernels ask for it. Its CPU kernel does not, and computes the same bits without the
copies, forward and backward. A rollout has a mask at every token, as prompts are padded, and so
have responses behind a prompt that they share."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from transformers.integrations import sdpa_attention

transformers_says = sdpa_attention.use_gqa_in_sdpa


def reads_groups(attention_mask, key, value) -> bool:
    """Whether torch's kernel reads keys and values (B, heads, tokens, size) in groups by itself.

    In float32 no kernel of a GPU does that keeps less than all scores."""
    if key.device.type == "cpu":
        return True
    is_float32 = key.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    return not is_float32 and transformers_says(attention_mask, key, value)


@contextmanager
def grouped(on: bool):
    """In here keys and values are read in groups, or copied as transformers does: for a comparison
    with other programs, which copy."""
    before = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = reads_groups if on else transformers_says
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = before


sdpa_attention.use_gqa_in_sdpa = reads_groups
