"""Weight syncs: healthy engines raise no alarm in any format, and planted faults are found at the first sync."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from conftest import tiny_model
from tools.sync_faults import CASES, FAULTS, FORMATS, IDS, Rig

import quant
import sync
from model import streamed
from model.engines import HFEngine
from model.streamed import StreamedModel
from sampling import Sampling
from sync import SyncError, WeightCheck, checksum, rolled, totals, wrap

# -- Checksums --------------------------------------------------------------------------------------------------------


def by_hand(x: torch.Tensor, width: int) -> int:
    """The checksum of the module's docstring in Python integers."""
    raw = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(raw[i : i + width], "little", signed=True) for i in range(0, len(raw), width)]
    return wrap(sum(w * (wrap(w * sync.K) >> 29) for w in words))


@pytest.mark.parametrize(
    "dtype, shape, width",
    [(torch.float32, (3, 4), 8), (torch.bfloat16, (3, 5), 2), (torch.bfloat16, (3, 6), 4), (torch.int8, (2, 8), 8)]
    + [(torch.float32, (5,), 4), (torch.int64, (3,), 8), (torch.float32, (), 4), (torch.int8, (3, 7), 1)],
)
def test_a_checksum_by_hand(dtype, shape, width, monkeypatch):
    x = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    assert int(checksum(x)) == by_hand(x, width)
    monkeypatch.setitem(sync.CHUNK, "cpu", 2)  # in pieces
    assert int(checksum(x)) == by_hand(x, width)


def test_a_checksum_depends_on_every_bit_and_not_on_row_order():
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    base, seen = int(checksum(x)), set()
    for byte in range(x.numel() * 4):
        for bit in (1, 128):
            other = x.clone()
            other.reshape(-1).view(torch.uint8)[byte] ^= bit
            seen.add(int(checksum(other)))
    assert base not in seen and len(seen) == x.numel() * 8
    assert int(checksum(x[[3, 1, 0, 5, 4, 2]])) == base
    assert int(checksum(torch.cat([x, torch.zeros(2, 8)]))) == base
    assert wrap(int(checksum(x[:2])) + int(checksum(x[2:]))) == base
    assert int(checksum(x.t())) == base  # the view of a kernel that multiplies by the transpose
    assert int(checksum(x, torch.bfloat16)) == int(checksum(x.bfloat16())) != base


def test_rolled_tensors_have_the_same_checksums_and_different_rows():
    g = torch.Generator().manual_seed(3)
    tensors = [torch.randn(4, 6, generator=g), torch.randn(5, generator=g), torch.randn(2, 3, 4, generator=g)]
    tensors += [torch.randn(4, 6, generator=g).to(torch.float8_e4m3fn), torch.tensor([4, 6])]
    for (_, x), y in zip(rolled(enumerate(tensors)), tensors, strict=True):
        assert int(checksum(x)) == int(checksum(y)) and x.dtype == y.dtype
        assert torch.equal(x.float(), y.float()) == (y.dtype == torch.int64)


def test_checksums_of_fused_and_sharded_tensors():
    q, k, v = 11, 7, 5
    assert totals([q, k, v], 1) == {23}
    assert {23, 2 * 23, q + 2 * (k + v)} <= totals([q, k, v], 2)  # divided, replicated, keys and values replicated


def test_engine_names_are_matched_with_published_names():
    published = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"]
    published += ["model.norm.weight", "model.layers.0.mlp.experts.gate_up_proj"]
    held = ["language_model.model.layers.0.self_attn.qk_proj.weight", "language_model.model.norm.weight"]
    held += ["language_model.model.layers.0.mlp.experts.routed_experts.w13_weight", "rotary.cache"]
    fused = {"qk_proj": ["q_proj", "k_proj"], "w13_weight": ["gate_up_proj"]}
    parts = sync.parts_of(held, published, fused)
    assert parts == {held[0]: published[:2], held[1]: published[2:3], held[2]: published[3:]}


# -- Healthy engines, planted faults ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_healthy_engines_raise_no_alarm(fmt):
    rig = Rig(fmt, seed=3)
    first = rig.sync()
    assert first.error < 5 * first.floor and np.isnan(first.changed)
    for _ in range(10):
        rig.step(1e-6)
        synced = rig.sync()
        assert 0 < synced.changed <= 1 and np.isnan(synced.error)
    assert rig.sync().changed == 0


@pytest.mark.parametrize("name, fmt", CASES)
def test_planted_faults_are_found_at_the_first_sync(name, fmt):
    """In steps of 1e-8."""
    rig = Rig(fmt)
    rig.sync()
    message = rig.first_sync_after(FAULTS[name], 1e-8)
    assert "--check_sync=False" in message and message.startswith(f"version {rig.version}: the engine ")
    part = {"one matrix skipped": "layers.1.mlp.down_proj", "one norm skipped": "layers.0.input_layernorm"}.get(name)
    assert part is None or part in message
    assert ("still holds the bytes of version 0" in message) == (name != "a scale left at 1")


@pytest.mark.parametrize("fmt", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["never loaded", "one layer left old"])
def test_a_loader_that_replaces_nothing_is_found_at_the_first_sync(name, fmt):
    """The first sync loads different weights first, on trial."""
    rig = Rig(fmt)
    rig.spoil(FAULTS[name])
    with pytest.raises(SyncError, match="that the test weights"):
        rig.sync()


def test_the_limit_of_the_log_probability_error_is_five_floors(monkeypatch):
    """An error of 3 floors in log-probabilities passes; 8 floors, NaN, or the spread of log p is refused."""
    rig, logprobs = Rig("bfloat16"), HFEngine.logprobs
    floor = rig.sync().floor
    cache = Rig("bfloat16")
    cache.engine.kv_cache = "fp8"  # floor 0.41; the limit is the spread of log p, 1.6
    for error, fails in ((1.2, False), (1.8, True)):
        cache.check.engine = None
        monkeypatch.setattr(HFEngine, "logprobs", lambda self, ids, error=error: logprobs(self, ids) + error)
        with pytest.raises(SyncError) if fails else nullcontext():
            cache.sync()
    monkeypatch.setattr(HFEngine, "logprobs", lambda self, ids: logprobs(self, ids) + 3 * floor)
    assert 2 * floor < Rig("bfloat16").sync().error < 5 * floor
    for floors, words in ((8.0, "nats away .*rounding"), (np.nan, "are nan nats")):
        monkeypatch.setattr(HFEngine, "logprobs", lambda self, ids, by=floors * floor: logprobs(self, ids) + by)
        with pytest.raises(SyncError, match=words):
            Rig("bfloat16").sync()


def test_an_engine_with_the_right_bytes_and_a_wrong_function_is_found(monkeypatch):
    """Two exchanged tensors."""
    rig = Rig("float32")
    load = rig.engine.load
    a, b = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))

    def exchanged(stream):
        tensors = dict(stream)
        load({**tensors, a: tensors[b], b: tensors[a]}.items())

    monkeypatch.setattr(rig.engine, "load", exchanged)
    with pytest.raises(SyncError, match="nats away from the values .*rounding explains"):
        rig.sync()


def test_a_new_engine_or_a_new_layout_is_compared_again():
    rig = Rig("float32")
    assert rig.sync().error >= 0
    assert np.isnan(rig.sync().error)
    rig.engine = HFEngine(rig.folder.name)
    assert rig.sync().error >= 0
    reversed_tensors = list(rig.published().items())[::-1]
    assert rig.check.load(rig.engine, 1, reversed_tensors).error >= 0
    assert np.isnan(rig.check.load(rig.engine, 1, reversed_tensors).error)


def test_tensors_that_cannot_be_read_back_are_named(monkeypatch, capsys):
    """An engine may store a function of a tensor; the remaining tensors are compared."""
    rig = Rig("float32")
    held = rig.engine.held

    def transformed():
        sums, packed = held()
        known, dtype = sums["model.norm.weight"]
        return {**sums, "model.norm.weight": (known + 1, dtype)}, packed

    monkeypatch.setattr(rig.engine, "held", transformed)
    rig.sync()
    assert "the bytes of 1 tensors, such as model.norm.weight, cannot be read back" in capsys.readouterr().err
    assert "down_proj" in rig.first_sync_after(FAULTS["one matrix skipped"], 1e-3)


def test_a_tensor_that_is_not_published_is_an_error(folders):
    partial = {k: v for k, v in tiny_model(7).state_dict().items() if k != "lm_head.weight"}
    check = WeightCheck(tiny_model(7).config, IDS)
    with pytest.raises(SyncError, match="lm_head.weight was not published; publish the complete state dict"):
        check.load(HFEngine(str(folders / "actor")), 1, partial.items())


def test_faults_of_vllm_are_found(vllm_engine, monkeypatch):
    """Healthy, a stale matrix in a fused module, a stale single matrix, stale norms, never loaded."""
    model = tiny_model(1)
    check, load = WeightCheck(model.config, IDS), vllm_engine.load

    def step(size):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + size * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))

    for version in range(3):
        check.load(vllm_engine, version, model.state_dict().items())
        step(1e-6)
    for part in ("layers.0.self_attn.k_proj", "layers.0.mlp.down_proj", "norm", ""):
        check.load(vllm_engine, 4, model.state_dict().items())
        old = {name: x.clone() for name, x in model.state_dict().items()}
        step(1e-4)
        with monkeypatch.context() as patch:
            stale = ((n, old[n] if part in n else x) for n, x in model.state_dict().items())
            patch.setattr(vllm_engine, "load", lambda stream, stale=stale: (list(stream), load(stale)))
            with pytest.raises(SyncError, match="the engine (still )?holds"):
                check.load(vllm_engine, 5, model.state_dict().items())


def test_prefixes_of_old_weights_are_never_used(tmp_path, vllm_engines):
    """Even if vLLM keeps its prefix cache: cache keys contain the number of loads."""
    model = tiny_model(1)
    model.config.max_position_embeddings = 256
    model.save_pretrained(tmp_path)
    engine = vllm_engines(folder=str(tmp_path), max_len=200)
    engine.llm.reset_prefix_cache = lambda *args, **more: True
    ids = np.random.default_rng(0).integers(2, 256, (2, 150))  # a block of vLLM's cache has 128
    check = WeightCheck(model.config, ids)
    for version in range(3):
        check.load(engine, version, model.state_dict().items())
        groups = engine.generate(list(ids), [[0], [1]], Sampling(max_tokens=8), 0, [])
        for prompt, (response,) in zip(ids, groups, strict=True):
            row = np.concatenate([prompt, response.tokens])[None]
            expected = StreamedModel(model.config).logprobs(model.state_dict().items(), row)[0, len(prompt) - 1 :]
            assert np.allclose(response.logp_inf, expected, atol=1e-4)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(version)))


# -- Forward pass of the published tensors ----------------------------------------------------------------------------


def test_a_streamed_model_uses_only_the_published_tensors():
    model = StreamedModel(tiny_model(1).config)
    a, b = tiny_model(1), tiny_model(7)
    of_a = model.logprobs(a.state_dict().items(), IDS)
    one = {**a.state_dict(), "lm_head.weight": b.state_dict()["lm_head.weight"]}  # differs from the embedding
    assert np.abs(model.logprobs(one.items(), IDS) - of_a).max() > 0.1
    assert all(p.device.type == "meta" for p in model.model.parameters())


@pytest.mark.parametrize("name, packed", [("int8", True), ("fp8", True), ("w4a16", True), ("w4a16", False)])
def test_a_streamed_model_reads_low_bits_in_every_form(name, packed):
    fmt, lm = quant.format_of(name, 32), tiny_model(1)
    tensors = quant.for_engine(lm.state_dict().items(), lm, fmt, packed)
    engine = HFEngine(tiny_model(1), fmt=fmt)
    assert np.allclose(StreamedModel(lm.config, fmt).logprobs(tensors, IDS), engine.logprobs(IDS), atol=1e-5)


def test_nudge_changes_the_second_half_of_the_rows():
    lm, model = tiny_model(1), StreamedModel(tiny_model(1).config)
    plain, two = model.logprobs(lm.state_dict().items(), IDS), np.concatenate([IDS, IDS])
    near, far = (model.logprobs(lm.state_dict().items(), two, nudge=nudge) for nudge in (1e-3, 1e-2))
    assert np.allclose(near[:16], plain, atol=1e-5)
    assert 5 < np.median(np.abs(far[16:] - plain)) / np.median(np.abs(near[16:] - plain)) < 20


def test_a_streamed_model_does_not_change_the_configuration():
    """transformers writes the dtype of a new model into its configuration, and checkpoints read it there."""
    config = tiny_model(0).config
    config.dtype = torch.bfloat16
    StreamedModel(config)
    assert config.dtype == torch.bfloat16


def test_a_stream_is_read_once_in_any_order_in_little_memory(monkeypatch):
    a = tiny_model(1, layers=4)
    model, state, held = StreamedModel(a.config), a.state_dict(), []
    take = streamed.TensorStream.take

    def watched(self, name):
        held.append(sum(x.numel() for x in self.waiting.values()))
        return take(self, name)

    monkeypatch.setattr(streamed.TensorStream, "take", watched)
    forwards = model.logprobs(iter(state.items()), IDS)
    largest = max(x.numel() for x in state.values())
    assert max(held) <= 2 * largest < sum(x.numel() for x in state.values()) / 2
    assert np.array_equal(forwards, model.logprobs(iter(list(state.items())[::-1]), IDS))
