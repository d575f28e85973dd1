"""KV caches of HFEngine: an ordered cache for exact sampling (exact.py), and an 8-bit cache."""

import torch
from transformers.cache_utils import Cache, DynamicLayer

import quant
from model.exact import longer, room, taken


class InOrder(DynamicLayer):
    """The KV cache of one layer in which each row starts at position 0 and new keys are appended to
    it.

    It has exact.room positions and stores 16-bit numbers as float32, the dtype of the products. A
    decoding step therefore neither copies nor reorders the previous keys."""

    def __init__(self, layer, lengths):
        """layer: a transformers cache layer with keys and values (B, H, P, D), padded on the left;
        lengths (B,): number of tokens of each row."""
        super().__init__()
        P = layer.keys.shape[2]
        places = torch.arange(room(P), device=lengths.device) + (P - lengths)[:, None]
        self.keys, self.values = (
            taken(x.float(), places.clamp_max(P - 1)) for x in (layer.keys, layer.values)
        )
        self.lengths = lengths
        self.longest = P  # length of the longest row
        self.is_initialized = True

    def update(self, key, value, *_, **__):
        """Append the key and value (B, H, 1, D) of a new token; returns all keys and values, with
        unused positions at the end of a row."""
        self.keys, self.values = (
            longer(x, self.room() - x.shape[2]) for x in (self.keys, self.values)
        )
        B, H, K, _ = self.keys.shape
        rows = (
            K * torch.arange(B * H, device=self.lengths.device).view(B, H) + self.lengths[:, None]
        )
        for x, new in ((self.keys, key), (self.values, value)):
            x.view(B * H * K, -1).index_copy_(0, rows.flatten(), new.float().flatten(0, 2))
        self.lengths = self.lengths + 1
        self.longest += 1
        return self.keys, self.values

    def room(self) -> int:
        """Number of positions of a row, with one more token."""
        return room(self.longest + 1)

    def mask(self):
        """(B, positions) bool: positions that the next token attends to, itself included."""
        return torch.arange(self.room(), device=self.lengths.device) <= self.lengths[:, None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.room(), 0

    def get_seq_length(self) -> int:
        """The number of positions: transformers must not mask any; `mask` has the visible ones."""
        return self.room()

    def reorder_cache(self, rows) -> None:
        self.keys, self.values, self.lengths = (
            x.index_select(0, rows) for x in (self.keys, self.values, self.lengths)
        )


class EightBits(DynamicLayer):
    """A KV cache of one layer, rounded to int8 (--kv_cache_dtype=int8):

    s round(x / s),  s = max |x| / 127 over the entries of a token's head."""

    def update(self, key, value, *more, **named):
        rounded = [
            quant.dequantize(*quant.quantize(x.float(), 127.0, torch.int8), x.dtype)
            for x in (key, value)
        ]
        return super().update(*rounded, *more, **named)


def in_eight_bits() -> Cache:
    """An empty cache of EightBits layers."""
    return Cache(layer_class_to_replicate=EightBits)


def in_order(cache, lengths):
    """Convert a cache of left-padded prompts to InOrder layers in place; returns it. lengths (B,):
    tokens of each prompt."""
    cache.layers = [InOrder(layer, lengths) for layer in cache.layers]
    return cache
