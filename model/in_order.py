"""The key-value cache of an exact sampler (exact.py): a row's keys in order, whatever padding its prompt had."""

import torch
from transformers.cache_utils import DynamicLayer

from model.exact import KEYS, longer


class InOrder(DynamicLayer):
    """A sampler's cache of one layer: the keys of a row stand from its first place on, a new one behind the last.

    There is room for whole blocks, so a step neither copies the other keys nor puts them in order."""

    def __init__(self, layer, lengths):
        """layer: of transformers, keys and values (B, H, P, D) that are padded on the left; lengths (B,): of rows."""
        super().__init__()
        P = layer.keys.shape[2]
        places = torch.arange(P + KEYS - P % KEYS, device=lengths.device) + (P - lengths)[:, None]
        places = places.clamp_max(P - 1)[:, None, :, None]
        keys, values = layer.keys, layer.values
        self.keys = keys.gather(2, places.expand(-1, keys.shape[1], -1, keys.shape[3]))
        self.values = values.gather(2, places.expand(-1, values.shape[1], -1, values.shape[3]))
        self.lengths = lengths
        self.is_initialized = True

    def update(self, key, value, *_, **__):
        """Write a new token's, (B, H, 1, D); all keys and values, those without a token behind them."""
        if self.is_full():
            self.keys, self.values = longer(self.keys, KEYS), longer(self.values, KEYS)
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        self.keys[rows, :, self.lengths] = key[:, :, 0].to(self.keys.dtype)
        self.values[rows, :, self.lengths] = value[:, :, 0].to(self.values.dtype)
        self.lengths = self.lengths + 1
        return self.keys, self.values

    def is_full(self) -> bool:
        return bool(self.lengths.max() == self.keys.shape[2])

    def mask(self):
        """(B, places) bool: what the next token sees, itself included."""
        return torch.arange(self.get_mask_sizes(1)[0], device=self.lengths.device) <= self.lengths[:, None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2] + KEYS * self.is_full(), 0

    def get_seq_length(self) -> int:
        """As if it were full: no key stands behind a token for transformers, and `mask` says what is seen."""
        return self.get_mask_sizes(1)[0]

    def batch_select_indices(self, rows) -> None:
        self.keys, self.values, self.lengths = self.keys[rows], self.values[rows], self.lengths[rows]


def in_order(cache, lengths):
    """Put the keys of a cache of prompts, padded on the left, in order; the cache. lengths (B,): of the prompts."""
    cache.layers = [InOrder(layer, lengths) for layer in cache.layers]
    return cache
