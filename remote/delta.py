"""The words that differ between two sets of weights: lossless and small. HeteroRL, section 4.2.

At the learning rates of RL an update moves most weights by less than half a unit in the last place
of bfloat16, so few of the published numbers change. Two safetensors files of the same tensors
differ only in these entries. So a delta compares files as two-byte words, for any tensor type
(as bytes if the size is odd). In each block of BLOCK bytes:

    changed    n words                                                uint32, then the sizes of the next two
    gaps       unchanged words before each changed word: 255 means "255, and continue", packed by zlib
    values     new - old, modulo 2^16: n words, packed by zlib; after a small update nearly all of them are 1 or -1

The inverse adds the values, so the new file is the old file with exactly these words replaced. A
chain of deltas leads from one version to a later version. It is applied block by block (`rebuild`),
and each resulting leaf is compared with the manifest of the whole weights, as if it had come over
the wire. So a delta need not be trusted. A delta that does not fit raises a WireError before
anything beyond its block is allocated. A chain that exceeds 1 / WORTH of the size of the weights is
not sent."""

from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np

from remote import wire

BLOCK = 16 * wire.LEAF  # bytes
HEAD = struct.Struct("<III")  # head of a block: words changed, bytes of gaps, bytes of values
MOST_CHAIN = 16  # most deltas in a chain
WORTH = 2  # deltas above 1 / WORTH of the weights are not sent: both ends hold them in memory


def word_of(nbytes: int) -> np.dtype:
    return np.dtype("<u2" if nbytes % 2 == 0 else "u1")


def encode(before, after) -> bytes | None:
    """The delta from one file's bytes to another file's. None: it is too large, or the sizes
    differ."""
    before, after = memoryview(before), memoryview(after)
    if len(before) != len(after):
        return None
    word = word_of(len(after))
    parts = []
    size = 0
    for start in range(0, len(after), BLOCK):
        old = np.frombuffer(before[start : start + BLOCK], word)
        new = np.frombuffer(after[start : start + BLOCK], word)
        part = encode_block(old, new)
        size += len(part)
        if size > len(after) // WORTH:
            return None
        parts.append(part)
    return b"".join(parts)


def encode_block(old: np.ndarray, new: np.ndarray) -> bytes:
    at = np.flatnonzero(old != new)
    values = zlib.compress((new[at] - old[at]).tobytes(), 1)
    gaps = zlib.compress(encode_gaps(at), 1)
    return HEAD.pack(len(at), len(gaps), len(values)) + gaps + values


def encode_gaps(at: np.ndarray) -> bytes:
    """Encode ascending positions as the numbers of words before each: floor(gap / 255) times 255,
    then the remainder."""
    gaps = np.diff(at, prepend=-1) - 1
    ends = np.cumsum(gaps // 255 + 1)
    out = np.full(ends[-1] if len(ends) else 0, 255, np.uint8)
    out[ends - 1] = gaps % 255
    return out.tobytes()


def decode_gaps(packed: bytes, n: int, words: int) -> np.ndarray:
    """The inverse of encode_gaps. Raise WireError unless these are n ascending positions below
    `words`."""
    gaps = np.frombuffer(packed, np.uint8)
    is_end = gaps != 255
    wire.need(
        is_end.sum() == n and (n == 0 or is_end[-1]),
        "a delta with a different number of gaps than announced",
    )
    at = np.cumsum(gaps, dtype=np.int64)[is_end] + np.arange(n)
    wire.need(n == 0 or at[-1] < words, "a delta with a position outside the weights")
    return at


def unpack(packed, most: int) -> bytes:
    """Unpack zlib data into at most `most` + 1 bytes. Raise WireError if there are more."""
    inflate = zlib.decompressobj()
    try:
        out = inflate.decompress(packed, most + 1)
    except zlib.error as e:
        raise wire.WireError(f"a delta that cannot be unpacked ({e})") from None
    wire.need(inflate.eof, "a delta of more bytes than announced")
    return out


class Delta:
    """A received delta, cut into its blocks. WireError: it does not fit weights of `nbytes`
    bytes."""

    def __init__(self, data, nbytes: int):
        data = memoryview(data)
        self.blocks = []  # (words changed, gaps, values)
        at = 0
        for _ in range(0, nbytes, BLOCK):
            wire.need(at + HEAD.size <= len(data), "a delta that ends too early")
            n, gaps, values = HEAD.unpack_from(data, at)
            at += HEAD.size
            wire.need(at + gaps + values <= len(data), "a delta that ends too early")
            self.blocks.append((n, data[at : at + gaps], data[at + gaps : at + gaps + values]))
            at += gaps + values
        wire.need(at == len(data), "a delta with data after its end")

    def add_to(self, words: np.ndarray, block: int) -> None:
        """Replace the old words of a block by the new words."""
        n, gaps, values = self.blocks[block]
        wire.need(n <= len(words), "a delta with more changes than there are weights")
        at = decode_gaps(unpack(gaps, n + len(words) // 255 + 1), n, len(words))
        change = unpack(values, n * words.itemsize)
        wire.need(
            len(change) == n * words.itemsize,
            "a delta with a different number of values than announced",
        )
        words[at] += np.frombuffer(change, words.dtype)


def rebuild(base: Path, deltas: list, of: wire.Manifest, sink):
    """Write the weights `of` into the sink, from the file `base` and a chain of deltas. A generator
    that yields after each block, so that its caller can do other work.

    WireError: the result is not these weights; the leaves that were written are valid. OSError: no
    such file, or no room."""
    chain = [Delta(data, of.nbytes) for data in deltas]
    word = word_of(of.nbytes)
    wire.need(base.is_file(), "a delta for weights that are no longer stored")
    with open(base, "rb", buffering=0) as file:
        for block, start in enumerate(range(0, of.nbytes, BLOCK)):
            data = bytearray(file.read(BLOCK))
            wire.need(
                len(data) == min(BLOCK, of.nbytes - start),
                "a delta for weights of a different size",
            )
            words = np.frombuffer(data, word)
            for delta in chain:
                delta.add_to(words, block)
            write_if_good(data, start, of, sink)
            yield


def write_if_good(data: bytearray, start: int, of: wire.Manifest, sink) -> None:
    """Write the leaves of a block. Raise WireError if a leaf differs from the manifest."""
    view = memoryview(data)
    for begin in range(0, len(data), wire.LEAF):
        leaf = view[begin : begin + wire.LEAF]
        good = hashlib.sha256(leaf).digest() == of.leaves[(start + begin) // wire.LEAF]
        wire.need(good, "a delta that gives different weights")
        sink[start + begin : start + begin + len(leaf)] = leaf


def chain_from(root: str, offer: wire.Offer) -> list[wire.Manifest]:
    """The deltas of an offer that lead from the weights with this root to the offered weights; an
    empty list if there are none.

    WireError: the deltas are as large as the weights."""
    bases = [step.base for step in offer.deltas]
    if root not in bases:
        return []
    chain = [step.of for step in offer.deltas[bases.index(root) :]]
    for of in chain:
        of.check(offer.of.nbytes)
    small = sum(of.nbytes for of in chain) <= offer.of.nbytes // WORTH
    wire.need(small, "deltas that are as large as the weights")
    return chain


class Chain:
    """The learner's side: the deltas that lead to the newest weights, as far back as their total
    size is worth sending."""

    def __init__(self):
        self.root = ""  # of the newest weights
        self.steps: list[tuple[wire.Step, bytes]] = []

    def add(self, of: wire.Manifest, change: bytes | None) -> None:
        """Add new weights, and the delta from the previous weights. None: there is no delta, and
        the chain starts over."""
        if change is None or not self.root:
            self.steps = []
        else:
            name = f"{Path(of.name).stem}.delta"
            self.steps.append((wire.Step(self.root, wire.manifest(name, change)), change))
        while (
            len(self.steps) > MOST_CHAIN
            or sum(len(data) for _, data in self.steps) > of.nbytes // WORTH
        ):
            del self.steps[0]
        self.root = of.root
