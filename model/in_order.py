"""Key-value caches of the plain sampler: one in order, of an exact sampler (exact.py), and one in 8
bits."""

import torch
from transformers.cache_utils import Cache, DynamicLayer

import quant
from model.exact import longer, room, taken


class InOrder(DynamicLayer):
    """A sampler's cache of one layer: the keys of a row stand from its first place on, a new one
    behind the last.

    There is room for as many keys as exact.room says, and numbers of 16 bits are kept as they are
    multiplied, in float32. So a step neither copies the other keys nor puts them in order."""

    def __init__(self, layer, lengths):
        """layer: of transformers, keys and values (B, H, P, D) that are padded on the left; lengths
        (B,): of rows."""
        super().__init__()
        P = layer.keys.shape[2]
        places = torch.arange(room(P), device=lengths.device) + (P - lengths)[:, None]
        self.keys, self.values = (
            taken(x.float(), places.clamp_max(P - 1)) for x in (layer.keys, layer.values)
        )
        self.lengths = lengths
        self.longest = P  # no row is longer
        self.is_initialized = True

    def update(self, key, value, *_, **__):
        """Write a new token's, (B, H, 1, D); all keys and values, those without a token behind
        them."""
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
        """Places of a row, with one more token."""
        return room(self.longest + 1)

    def mask(self):
        """(B, places) bool: positions that the next token attends to, itself included."""
        return torch.arange(self.room(), device=self.lengths.device) <= self.lengths[:, None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.room(), 0

    def get_seq_length(self) -> int:
        """Full length: for transformers no key comes after a token; `mask` has the visible ones."""
        return self.room()

    def batch_select_indices(self, rows) -> None:
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
    """An empty cache of such layers."""
    return Cache(layer_class_to_replicate=EightBits)


def in_order(cache, lengths):
    """Put the keys of a cache of prompts, padded on the left, in order; the cache. lengths (B,): of
    the prompts."""
    cache.layers = [InOrder(layer, lengths) for layer in cache.layers]
    return cache
