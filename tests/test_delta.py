"""Deltas of weights: exact after a thousand updates, small, and verified."""

import os
import random
import tracemalloc

import numpy as np
import pytest
import test_hub
import torch
from safetensors.torch import load, save
from test_hub import opened_objects, until

from remote import account, delta, link, wire
from remote.sampler import SamplerFlags

rng = np.random.default_rng(0)


@pytest.fixture
def opened(tmp_path):
    yield from opened_objects(tmp_path)


def rebuilt(tmp_path, base, deltas, after):
    """The bytes rebuilt from the base and the deltas."""
    (tmp_path / "base").write_bytes(base)
    sink = bytearray(len(after))
    for _ in delta.rebuild(tmp_path / "base", deltas, wire.manifest("x", after), sink):
        pass
    return bytes(sink)


def test_a_delta_by_hand():
    """The second of five words goes from 7 to 8, the last from 0 to 65535."""
    before = np.array([3, 7, 9, 1, 0], "<u2").tobytes()
    after = np.array([3, 8, 9, 1, 65535], "<u2").tobytes()
    data = delta.encode_block(np.frombuffer(before, "<u2"), np.frombuffer(after, "<u2"))
    n, gaps, values = delta.HEAD.unpack_from(data)
    at = delta.HEAD.size
    assert n == 2 and delta.zlib.decompress(data[at : at + gaps]) == bytes([1, 2])
    assert delta.zlib.decompress(data[at + gaps :]) == bytes([1, 0, 255, 255]) and len(data) == at + gaps + values


@pytest.mark.parametrize("at", [[], [0], [254], [255], [256], [0, 255, 511, 512], [5, 100_000], [99_999]])
def test_gaps_of_any_length(at):
    packed = delta.encode_gaps(np.array(at, np.int64))
    assert delta.decode_gaps(packed, len(at), 100_001).tolist() == at


@pytest.mark.parametrize("size", [2, 3, 100_000, 100_001, delta.BLOCK, 2 * delta.BLOCK + 3 * wire.LEAF + 7])
def test_any_change_is_rebuilt(size, tmp_path):
    before = rng.integers(0, 256, size, dtype=np.uint8)
    after = before.copy()
    after[rng.integers(0, size, max(1, size // 300))] += 1
    after[-1] ^= 255
    data = delta.encode(before, after)
    if size < 1000:
        assert data is None  # a delta would not be smaller
    else:
        assert len(data) < size / 10 and rebuilt(tmp_path, before.tobytes(), [data], after) == after.tobytes()


def test_unprofitable_deltas_and_unchanged_weights():
    a, b = os.urandom(100_000), os.urandom(100_000)
    assert delta.encode(a, b) is None and delta.encode(a, a + b"xx") is None
    assert len(delta.encode(a, a)) < 40


def test_bit_identical_after_a_thousand_updates(tmp_path):
    """float32 master weights change by a relative 1e-6 in a thousand updates and are published in bfloat16. The file is
    rebuilt from the first file and the deltas, and contains the published tensors."""
    torch.manual_seed(0)
    masters = {"a": torch.randn(40, 300) * 0.02, "b.bias": torch.ones(300), "c": torch.randn(7, 11)}

    def publish():
        return save({k: x.bfloat16() for k, x in masters.items()})

    here = published = publish()
    sizes = []
    for _ in range(1000):
        for x in masters.values():
            x += 1e-6 * x.abs() * torch.randn(x.shape).sign() + 1e-6 * torch.randn(x.shape)
        before, published = published, publish()
        data = delta.encode(before, published)
        sizes.append(len(data))
        here = rebuilt(tmp_path, here, [data], published)
    assert here == published and np.mean(sizes) < len(here) / 20
    for name, tensor in load(here).items():
        assert torch.equal(tensor, masters[name].bfloat16())


def test_damaged_deltas_are_refused(tmp_path):
    """Every damaged delta gives a WireError or the leaves of the manifest, in bounded memory."""
    r = random.Random(0)
    before = rng.integers(0, 256, 70_000, dtype=np.uint8)
    after = before.copy()
    after[rng.integers(0, 70_000, 500)] += 1
    good = delta.encode(before, after)
    bomb = delta.zlib.compress(bytes(1 << 26))
    n, gaps, values = delta.HEAD.unpack_from(good)
    cases = [b"", good[:-1], good + b"x", good[:11]]
    cases += [delta.HEAD.pack(n, len(bomb), values) + bomb + good[12 + gaps :]]
    cases += [delta.HEAD.pack(n, gaps, len(bomb)) + good[12 : 12 + gaps] + bomb]
    cases += [delta.HEAD.pack(2**32 - 1, len(bomb), values) + bomb + good[12 + gaps :]]
    cases += [delta.encode(before, before)]  # a valid delta of different weights
    cases += [delta.HEAD.pack(m, gaps, values) + good[12:] for m in (0, n - 1, n + 1, 2**32 - 1)]
    last = delta.zlib.compress(delta.encode_gaps(np.array([35_000])))
    one = delta.zlib.compress(b"\x01\x00")
    cases += [delta.HEAD.pack(1, len(last), len(one)) + last + one]  # beyond the end
    for _ in range(300):
        cases.append(bytearray(good))
        for _ in range(r.randrange(1, 4)):
            cases[-1][r.randrange(len(good))] = r.randrange(256)
    refused = 0
    tracemalloc.start()
    for case in cases:
        try:
            assert rebuilt(tmp_path, before.tobytes(), [bytes(case)], after) == after.tobytes()
        except wire.WireError as e:
            refused += "a delta" in str(e)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (
        refused >= len(cases) - 5 and peak < 2 * delta.BLOCK
    )  # except bytes that were overwritten with the same value
    with pytest.raises(wire.WireError, match="of a different size"):
        rebuilt(tmp_path, before.tobytes()[:-2], [good], after)
    (tmp_path / "base").unlink()
    with pytest.raises(wire.WireError, match="weights that are no longer stored"):
        next(delta.rebuild(tmp_path / "base", [good], wire.manifest("x", after), bytearray(len(after))))


def test_the_chain_is_as_long_as_it_saves_bytes():
    chain = delta.Chain()
    for v in range(30):
        chain.add(wire.manifest(f"v{v}.safetensors", b"%100d" % v), bytes(10))
    assert len(chain.steps) == 5 and [step.of.name for step, _ in chain.steps] == [f"v{v}.delta" for v in range(25, 30)]
    roots = [wire.manifest("x", b"%100d" % v).root for v in range(24, 30)]
    assert [step.base for step, _ in chain.steps] == roots[:5] and chain.root == roots[5]
    offer = wire.Offer(wire.manifest("v29", b"%100d" % 29), 29, 0.0, [step for step, _ in chain.steps])
    assert [of.name for of in delta.chain_from(roots[2], offer)] == ["v27.delta", "v28.delta", "v29.delta"]
    assert delta.chain_from("", offer) == delta.chain_from(roots[5], offer) == []
    small = wire.Offer(wire.manifest("v29", b"%30d" % 29), 29, 0.0, offer.deltas)
    with pytest.raises(wire.WireError, match="as large as the weights"):
        delta.chain_from(roots[1], small)
    chain.add(wire.manifest("v30", b"x"), None)
    assert chain.steps == []


def changed(data, seed):
    """Weights after an update: one word in a hundred changes by 1."""
    words = np.frombuffer(data, "<u2").copy()
    words[np.random.default_rng(seed).integers(100, len(words), len(words) // 100)] += 1
    return words.tobytes()


def broadcast(h, folder, version, data, before=None):
    path = folder / f"v{version:06d}.safetensors"
    path.write_bytes(data)
    h.broadcast(version, path, float(version), delta.encode(before, data) if before else None)


def test_only_changes_are_sent(opened, tmp_path, capsys):
    """A sampler connected for each version, a sampler that missed versions, a new sampler, a wrong delta."""
    h, weights = opened.hub(), [os.urandom(3 * wire.LEAF + 100)]
    for seed in range(6):
        weights.append(changed(weights[-1], seed))
    (tmp_path / "learner").mkdir()
    spool = account.Spool(tmp_path / "spool", ["box"], 1)
    end = opened.add(link.Link([h.address], ["box"], SamplerFlags(), spool, tmp_path / "spool", None))

    def here(version):
        assert until(lambda: end.newest is not None and end.newest.version == version)
        assert (
            end.newest.path.read_bytes() == weights[version]
            and end.lines["box"].fetcher.root == wire.manifest("", weights[version]).root
        )
        sent, h.counts["bytes_out"] = h.counts["bytes_out"], 0
        return sent

    broadcast(h, tmp_path / "learner", 0, weights[0])
    assert here(0) == len(weights[0])
    broadcast(h, tmp_path / "learner", 1, weights[1], weights[0])
    one = here(1)
    assert one == len(delta.encode(weights[0], weights[1])) < len(weights[0]) / 20
    fetcher = end.lines["box"].fetcher
    turn = fetcher.turn
    fetcher.turn = lambda: None  # busy for a while
    for version in (2, 3, 4):
        broadcast(h, tmp_path / "learner", version, weights[version], weights[version - 1])
    assert until(lambda: getattr(fetcher.wanted, "version", None) == 4)
    fetcher.turn = turn
    assert 2 * one < here(4) < 4 * one  # three deltas in a row
    late = opened.add(
        link.Link(
            [h.address], ["late"], SamplerFlags(), account.Spool(tmp_path / "l", ["late"], 1), tmp_path / "l", None
        )
    )
    assert until(lambda: late.newest is not None and late.newest.path.read_bytes() == weights[4])
    h.counts["bytes_out"] = 0
    (tmp_path / "l" / "v000004.safetensors").unlink()  # the base was deleted

    lie = delta.encode(weights[0], weights[1])
    path = tmp_path / "learner" / "v000005.safetensors"
    path.write_bytes(weights[5])
    h.broadcast(5, path, 5.0, lie)
    assert here(5) >= len(weights[5])
    printed = capsys.readouterr().out
    assert "a delta that gives different weights; its weights are fetched in full" in printed
    assert until(lambda: late.newest.version == 5 and late.newest.path.read_bytes() == weights[5])
    h.counts["bytes_out"] = 0
    broadcast(h, tmp_path / "learner", 6, weights[6], weights[5])
    assert here(6) < 4 * one  # the next update is a delta again


def test_a_learner_publishes_deltas(opened, tmp_path):
    """Only if the store makes deltas; the first weights after a start are complete."""
    for with_deltas in (True, False):
        s = test_hub.source(tmp_path / str(with_deltas), with_deltas=with_deltas, sync_every=1)
        heard: list = []
        s.hub.broadcast = lambda version, path, published, change, heard=heard: heard.append(change)
        x = torch.randn(5000)
        for v in range(3):
            s.publish(v, {"a": x + 0.5 * v * (torch.arange(5000) % 100 == 0)}.items())
        assert [change is not None for change in heard] == [False, with_deltas, with_deltas]
