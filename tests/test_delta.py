"""Deltas of weights: exact after many updates, small, and verified."""

import io
import os
import random
import tracemalloc

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from test_hub import opened, until

from remote import delta, wire

__all__ = ["opened"]  # a fixture

rng = np.random.default_rng(0)


def rebuilt(tmp_path, base, deltas, after):
    """The bytes rebuilt from the base and the deltas."""
    (tmp_path / "base").write_bytes(base)
    sink = io.BytesIO()
    for _ in delta.rebuild(tmp_path / "base", deltas, wire.manifest("x", after), sink):
        pass
    return sink.getvalue()


def changed(data, seed, share=0.01):
    """Weights after an update: this share of the words changes by 1."""
    words = np.frombuffer(data, "<u2").copy()
    words[np.random.default_rng(seed).integers(100, len(words), int(share * len(words)))] += 1
    return words.tobytes()


def test_a_delta_by_hand():
    """The second of five words goes from 7 to 8, the last from 0 to 65535."""
    before = np.array([3, 7, 9, 1, 0], "<u2")
    after = np.array([3, 8, 9, 1, 65535], "<u2")
    data = delta.encode_block(before, after)
    assert delta.zlib.decompress(data) == bytes([0b01001000, 1, 0, 255, 255])
    delta.add_block(before, data)
    assert (before == after).all()


@pytest.mark.parametrize("size", [100_000, (5 << 20) + 7])
def test_any_change_is_rebuilt(size, tmp_path, monkeypatch):
    """In blocks of 2 MiB. There is no delta larger than half of the weights, or between different sizes."""
    monkeypatch.setattr(delta, "BLOCK", 2 << 20)
    before = rng.integers(0, 256, size, dtype=np.uint8)
    after = before.copy()
    after[rng.integers(0, size, size // 300)] += 1
    after[-1] ^= 255
    data = delta.encode(before, after)
    assert len(data) < size / 10 and rebuilt(tmp_path, before.tobytes(), [data], after) == after.tobytes()
    for other in (os.urandom(size), os.urandom(size + 2)):
        assert delta.encode(before, other) is None
    assert delta.encode(before[:2], after[-2:]) is None


def test_bit_identical_after_many_updates(tmp_path):
    """float32 master weights change by a relative 1e-6 in each of 200 updates and are published in bfloat16. The file
    is rebuilt from the first file and the deltas, and contains the published tensors."""
    torch.manual_seed(0)
    x = torch.randn(40, 300) * 0.02
    here = published = save({"x": x.bfloat16()})
    sizes = []
    for _ in range(200):
        x += 1e-6 * x.abs() * torch.randn(x.shape).sign() + 1e-6 * torch.randn(x.shape)
        before, published = published, save({"x": x.bfloat16()})
        data = delta.encode(before, published)
        sizes.append(len(data))
        here = rebuilt(tmp_path, here, [data], published)
    assert here == published and np.mean(sizes) < len(here) / 20
    assert torch.equal(load(here)["x"], x.bfloat16())


def test_damaged_deltas_are_refused(tmp_path):
    """Every damaged delta gives a WireError, in bounded memory."""
    r = random.Random(0)
    before = rng.bytes(70_000)
    after = changed(before, 0)
    good = delta.encode(before, after)
    (block,) = msgspec.msgpack.decode(good)
    bits = -(-len(before) // 16)
    raw = delta.zlib.decompress(block)
    pack, zip_ = msgspec.msgpack.encode, delta.zlib.compress
    cases = [b"", good[:-1], good + b"x", pack([]), pack([block] * 2), pack([3]), pack([zip_(bytes(1 << 26))])]
    cases += [pack([block[:-1]]), pack([zip_(raw[:-2])]), pack([zip_(raw + b"xx")]), pack([zip_(raw[: bits - 1])])]
    cases += [delta.encode(before, before)]
    for _ in range(100):
        cases.append(bytearray(good))
        for _ in range(r.randrange(1, 4)):
            cases[-1][r.randrange(len(good))] ^= r.randrange(1, 256)
    tracemalloc.start()
    for case in cases:
        with pytest.raises(wire.WireError, match="a delta"):
            rebuilt(tmp_path, before, [bytes(case)], after)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * delta.BLOCK
    with pytest.raises(wire.WireError, match="of a different size"):
        rebuilt(tmp_path, before[:-2], [good], after)
    (tmp_path / "base").unlink()
    with pytest.raises(wire.WireError, match="weights that are no longer stored"):
        next(delta.rebuild(tmp_path / "base", [good], wire.manifest("x", after), bytearray(len(after))))


def test_the_chain_is_as_long_as_it_saves_bytes():
    chain = delta.Chain()
    for v in range(30):
        chain.add(wire.manifest(f"v{v}.safetensors", b"%100d" % v), bytes(10))
    assert [step.of.name for step, _ in chain.steps] == [f"v{v}.delta" for v in range(25, 30)]
    roots = [wire.manifest("x", b"%100d" % v).digest for v in range(24, 30)]
    assert [step.base for step, _ in chain.steps] == roots[:5] and chain.digest == roots[5]
    offer = wire.Offer(wire.manifest("v29", b"%100d" % 29), 29, 0.0, [step for step, _ in chain.steps])
    assert [of.name for of in delta.chain_from(roots[2], offer)] == ["v27.delta", "v28.delta", "v29.delta"]
    assert delta.chain_from("", offer) == delta.chain_from(roots[5], offer) == []
    small = wire.Offer(wire.manifest("v29", b"%30d" % 29), 29, 0.0, offer.deltas)
    with pytest.raises(wire.WireError, match="exceed 1/2 of the weights"):
        delta.chain_from(roots[1], small)
    chain.add(wire.manifest("v30", b"x"), None)
    assert chain.steps == []


def test_only_changes_are_sent(opened, tmp_path, capsys):
    """A sampler connected for each version, a sampler that missed versions, a new sampler, a wrong delta."""
    h, weights = opened.hub(), [os.urandom((3 << 20) + 100)]
    for seed in range(6):
        weights.append(changed(weights[-1], seed))
    for folder in ("learner", "early", "late"):
        (tmp_path / folder).mkdir()

    def broadcast(version, change=None):
        path = tmp_path / "learner" / f"v{version:06d}.safetensors"
        path.write_bytes(weights[version])
        h.broadcast(wire.Offer(wire.manifest(path.name, weights[version]), version, float(version)), path, change)

    def step(version):
        return delta.encode(weights[version - 1], weights[version])

    def sent_to(end, version):
        """The number of bytes that the hub has sent when this sampler has the version."""
        assert until(lambda: end.newest is not None and end.newest.version == version)
        assert end.newest.path.read_bytes() == weights[version]
        sent, h.counts["bytes_out"] = h.counts["bytes_out"], 0
        return sent

    end = opened.link(h, tmp_path / "early")
    broadcast(0)
    assert sent_to(end, 0) == len(weights[0])
    broadcast(1, step(1))
    one = sent_to(end, 1)
    assert one == len(step(1)) < len(weights[0]) / 20
    fetch, end._continue_fetch = end._continue_fetch, lambda: None  # busy for a while
    for version in (2, 3, 4):
        broadcast(version, step(version))
    assert until(lambda: getattr(end.wanted, "version", None) == 4)
    end._continue_fetch = fetch
    assert 2 * one < sent_to(end, 4) < 4 * one  # three deltas in a row
    late = opened.link(h, tmp_path / "late", "late")
    sent_to(late, 4)
    (tmp_path / "late" / "v000004.safetensors").unlink()  # the base was deleted
    broadcast(5, step(1))  # a delta of different weights
    assert sent_to(end, 5) >= len(weights[5])
    assert "a delta that gives different weights; its weights are fetched in full" in capsys.readouterr().out
    sent_to(late, 5)
    broadcast(6, step(6))
    assert sent_to(end, 6) < 4 * one  # the next update is a delta again
