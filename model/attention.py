"""Two changes of transformers: grouped-query attention on a CPU without copies of keys and values,
and no search for rows of several sequences.

If there is a mask, transformers repeats keys and values for every query head, because torch's GPU
kernels require it. The CPU kernel does not, and gives the same bits without the copies, forward and
backward. Masks are common: rollouts have padded prompts, and responses may share a prompt."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from transformers import masking_utils
from transformers.integrations import sdpa_attention

transformers_says = sdpa_attention.use_gqa_in_sdpa


def reads_groups(attention_mask, key, value) -> bool:
    """Whether torch's kernel supports grouped queries for keys and values (B, heads, tokens, size).

    On a GPU in float32 the only kernel that supports grouped queries stores all scores, so the
    function returns False there; on a CPU it returns True."""
    if key.device.type == "cpu":
        return True
    is_float32 = key.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    return not is_float32 and transformers_says(attention_mask, key, value)


@contextmanager
def grouped(on: bool):
    """Context in which keys and values are read in groups (`on`), or repeated as in transformers,
    for a comparison with programs that repeat them."""
    before = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = reads_groups if on else transformers_says
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = before


sdpa_attention.use_gqa_in_sdpa = reads_groups
# None: no row holds several sequences. transformers would search the positions for them, and every
# forward pass would wait for the GPU.
masking_utils.find_packed_sequence_indices = lambda positions: None
