"""The words that differ between two sets of weights: lossless and small. HeteroRL, section 4.2.

At the learning rates of RL an update moves most weights by less than half a unit in the last place
of bfloat16, so few of the published numbers change. Two safetensors files of the same tensors
differ only in the changed numbers. So a delta compares files as two-byte words, for any tensor type
(as bytes if the size is odd). For each block of BLOCK bytes it has, packed by zlib,

    changed    one bit for each word
    values     new - old, modulo 2^16, of each changed word; after a small update nearly all of them are 1 or -1

The inverse adds the values, so the new file is the old file with exactly these words replaced. A
chain of deltas leads from one version to a later version. It is applied block by block (`rebuild`),
and the result is compared with the SHA-256 of the whole weights. So a delta need not be trusted. A
delta that does not fit raises a WireError before anything beyond its block is allocated. A chain
that exceeds 1 / WORTH of the size of the weights is not sent."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import msgspec
import numpy as np

from remote import wire

BLOCK = 16 << 20  # bytes
MOST_CHAIN = 16  # most deltas in a chain
# deltas above 1 / WORTH of the weights are not sent: both ends hold them in memory
WORTH = 2


def word_of(nbytes: int) -> np.dtype:
    return np.dtype("<u2" if nbytes % 2 == 0 else "u1")


def encode(before, after) -> bytes | None:
    """The delta from one file's bytes to another file's. None: it is too large, or the sizes
    differ."""
    before, after = memoryview(before), memoryview(after)
    if len(before) != len(after):
        return None
    word = word_of(len(after))
    blocks = []
    for start in range(0, len(after), BLOCK):
        old = np.frombuffer(before[start : start + BLOCK], word)
        new = np.frombuffer(after[start : start + BLOCK], word)
        blocks.append(encode_block(old, new))
    data = msgspec.msgpack.encode(blocks)
    return data if len(data) <= len(after) // WORTH else None


def encode_block(old: np.ndarray, new: np.ndarray) -> bytes:
    changed = old != new
    at = np.flatnonzero(changed)  # twice as fast as a mask
    values = new[at] - old[at]
    return zlib.compress(np.packbits(changed).tobytes() + values.tobytes(), 1)


def add_block(words: np.ndarray, packed: bytes) -> None:
    """Replace the old words of a block by the new words. Raise WireError if the delta does not
    fit."""
    bits = -(-len(words) // 8)  # bytes of `changed`
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(packed, bits + words.nbytes + 1)
    except zlib.error as e:
        raise wire.WireError(f"a delta that cannot be unpacked ({e})") from None
    changed = np.unpackbits(
        np.frombuffer(data[:bits], np.uint8), count=len(words)
    ).view(bool)
    values = data[bits:]
    fits = inflate.eof and len(values) == changed.sum() * words.itemsize
    wire.need(fits, "a delta that does not fit the weights")
    words[changed] += np.frombuffer(values, words.dtype)


def rebuild(base: Path, deltas: list[bytes], of: wire.Manifest, sink):
    """Write the weights `of` into the sink, from the file `base` and a chain of deltas. A generator
    that yields after each block, so that its caller can do other work.

    WireError: the result is not these weights. OSError: no such file, or no room."""
    n_blocks = -(-of.nbytes // BLOCK)
    try:
        chain = [msgspec.msgpack.decode(data, type=list[bytes]) for data in deltas]
    except Exception as e:  # as in wire.decode
        raise wire.WireError(
            f"a delta that cannot be read: {wire.printable(e)}"
        ) from None
    wire.need(
        all(len(blocks) == n_blocks for blocks in chain), "a delta of a different size"
    )
    wire.need(base.is_file(), "a delta for weights that are no longer stored")
    wire.need(
        base.stat().st_size == of.nbytes, "a delta for weights of a different size"
    )
    word, digest = word_of(of.nbytes), hashlib.sha256()
    with open(base, "rb", buffering=0) as file:
        for i in range(n_blocks):
            data = bytearray(file.read(BLOCK))
            words = np.frombuffer(data, word)
            for blocks in chain:
                add_block(words, blocks[i])
            digest.update(data)
            sink.write(data)
            yield
    wire.need(digest.hexdigest() == of.digest, "a delta that gives different weights")


def chain_from(digest: str, offer: wire.Offer) -> list[wire.Manifest]:
    """The deltas of an offer that lead from the weights with this digest to the offered weights; an
    empty list if there are none.

    WireError: the deltas together exceed 1 / WORTH of the weights."""
    bases = [step.base for step in offer.deltas]
    if digest not in bases:
        return []
    chain = [step.of for step in offer.deltas[bases.index(digest) :]]
    small = sum(of.nbytes for of in chain) <= offer.of.nbytes // WORTH
    wire.need(small, f"deltas that together exceed 1/{WORTH} of the weights")
    return chain


class Chain:
    """The learner's side: the deltas that lead to the newest weights, as far back as their total
    size is worth sending."""

    def __init__(self):
        self.digest = ""  # of the newest weights
        self.steps: list[tuple[wire.Step, bytes]] = []

    def add(self, of: wire.Manifest, change: bytes | None) -> None:
        """Add new weights, and the delta from the previous weights. None: there is no delta, and
        the chain starts over."""
        if change is None or not self.digest:
            self.steps = []
        else:
            name = f"{Path(of.name).stem}.delta"
            self.steps.append(
                (wire.Step(self.digest, wire.manifest(name, change)), change)
            )
        most = of.nbytes // WORTH
        while (
            len(self.steps) > MOST_CHAIN
            or sum(len(data) for _, data in self.steps) > most
        ):
            del self.steps[0]
        self.digest = of.digest
