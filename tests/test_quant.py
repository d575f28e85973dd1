"""Formats, the aligned layer and its straight-through gradient, low-bit engines and checkpoints."""

import hashlib
import json
import multiprocessing
import os
import re
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import standins
import torch
import torch.distributed as dist
from conftest import make_cfg, make_groups, tiny_model
from safetensors.torch import load_file, save_file

import batching
import objectives
import quant
from learner import Comm, Learner
from machinery.flags import UserError
from machinery.run import check_models
from model import Needs, lowbit
from model.engines import HFEngine
from quant import LowBitLinear, dequantize, format_of, product, quantize
from rollout import Sampling, as_groups
from sync import SyncError, WeightCheck

FORMATS = ["int8", "fp8", "w4a16", "w3a16", "w2a16"]
NOT_WHOLE = ".*q_proj has rows of 32, not a multiple of the group"


def error_bound(x, fmt, s):
    """The largest rounding error of each entry, as stated in quant.py."""
    if fmt.dtype == torch.int8:
        return (s / 2).repeat_interleave(x.shape[1] // s.shape[1], 1) * (1 + 1e-5)
    return torch.maximum(x.abs() / 16, s / 1024) * (1 + 1e-5)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["normal", "outlier", "zero rows", "tiny", "huge"])
def test_round_trip_stays_within_the_stated_error(name, kind):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(16, 64, generator=g)
    x = {
        "normal": x,
        "outlier": x.index_put((torch.tensor([3]), torch.tensor([5])), torch.tensor(1e4)),
        "zero rows": x * (torch.arange(16) % 2)[:, None],
        "tiny": x * 1e-20,
        "huge": x * 1e20,
    }[kind]
    fmt = format_of(name, 32)
    q, s = quantize(x, fmt.qmax, fmt.dtype, fmt.group)
    back = dequantize(q, s)
    assert q.dtype == fmt.dtype and s.shape == (16, 2 if fmt.group else 1)
    assert (s > 0).all() and q.float().abs().max() <= fmt.qmax
    assert ((back - x).abs() <= error_bound(x, fmt, s)).all() and torch.equal(back[x == 0], x[x == 0])
    again, s2 = quantize(back, fmt.qmax, fmt.dtype, fmt.group)  # values on the grid are unchanged
    assert torch.allclose(dequantize(again, s2), back, rtol=1e-5, atol=0) and torch.equal(q.float(), again.float())
    assert torch.equal(quantize(-x, fmt.qmax, fmt.dtype, fmt.group)[0].float(), -q.float())


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("shape", [(1, 32, 8), (5, 64, 48), (40, 192, 64)])
def test_the_product_is_that_of_the_dequantized_matrices(name, shape):
    M, K, N = shape
    g, fmt = torch.Generator().manual_seed(1), format_of(name)
    x, w = torch.randn(M, K, generator=g) * 3, torch.randn(N, K, generator=g)
    qx, sx = quantize(x, fmt.activation_qmax, fmt.dtype)
    qw, sw = quantize(w, fmt.qmax, fmt.dtype)
    want = dequantize(qx, sx).double() @ dequantize(qw, sw).double().t()
    assert torch.allclose(product(qx, sx, qw, sw).double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
    rough = x.double() @ w.double().t()
    assert (product(qx, sx, qw, sw) - rough).abs().mean() < 0.06 * rough.abs().mean()


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_straight_through(name):
    """y = x^ W^T; dx = g W^, dW = g^T x^, db = sum g: the gradients of a plain layer with x^ and W^."""
    torch.manual_seed(0)
    fmt, plain = format_of(name, 32), torch.nn.Linear(64, 24)
    layer = LowBitLinear.from_linear(torch.nn.Linear(64, 24), fmt)
    layer.load_state_dict(plain.state_dict())
    x, up = torch.randn(3, 5, 64, requires_grad=True), torch.randn(3, 5, 24)
    y = layer(x)
    (y * up).sum().backward()
    with torch.no_grad():
        plain.weight.copy_(dequantize(*layer.quantized_weight()))
    rounded = x.detach().reshape(-1, 64)
    if fmt.activations:
        rounded = dequantize(*quantize(rounded, fmt.activation_qmax, fmt.dtype))
    rounded = rounded.reshape(3, 5, 64).requires_grad_()
    want = plain(rounded)
    (want * up).sum().backward()
    assert torch.allclose(y, want, atol=1e-5) and torch.allclose(x.grad, rounded.grad, atol=1e-5)
    assert torch.allclose(layer.weight.grad, plain.weight.grad, atol=1e-4)
    assert torch.allclose(layer.bias.grad, plain.bias.grad, atol=1e-5)
    in_full_precision = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert not torch.allclose(y, in_full_precision, atol=1e-4)  # the layer is quantized


def test_low_bit_weights_follow_the_master():
    layer = LowBitLinear.from_linear(torch.nn.Linear(8, 4), format_of("int8"))
    first = layer.quantized_weight()
    assert layer.quantized_weight() is first  # cached
    with torch.no_grad():
        layer.weight.mul_(2.0)
    second = layer.quantized_weight()
    assert torch.allclose(second[1], 2 * first[1]) and second[0] is not first[0]
    layer.cache_quantized = False
    third = layer.quantized_weight()
    assert third is not second and torch.equal(third[0], second[0])


@pytest.mark.parametrize("bias", [True, False])
def test_align_changes_only_the_product_of_a_layer(bias):
    """Parameters, their order and their names are the same, for every position of the layer; no random draw."""
    first = torch.nn.Linear(8, 8, bias=bias)
    second_place = torch.nn.Sequential(torch.nn.ReLU(), first)
    model = torch.nn.ModuleDict({"a": first, "b": second_place, "c": torch.nn.ReLU()})
    model.get_output_embeddings = lambda: None
    model.eval()
    parameters = list(model.named_parameters(remove_duplicate=False))
    names, modules = list(model.state_dict()), [name for name, _ in model.named_modules()]
    generator = torch.get_rng_state()
    quant.align(model, format_of("int8"))
    assert torch.equal(torch.get_rng_state(), generator)
    assert isinstance(model["a"], LowBitLinear) and model["b"][1] is model["a"] and not model["a"].training
    after = list(model.named_parameters(remove_duplicate=False))
    assert [name for name, _ in after] == [name for name, _ in parameters]
    assert all(p is q for (_, p), (_, q) in zip(after, parameters, strict=True))
    assert list(model.state_dict()) == names and [name for name, _ in model.named_modules()] == modules


def test_layers_that_are_quantized(folders):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders / "untied")
    names = {n.split(".")[-1] for n in quant.quantized_linears(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    with pytest.raises(ValueError, match=f"--quant_group=48: {NOT_WHOLE}"):
        quant.align(model, format_of("w4a16", 48))
    assert quant.align(model, None) is model and not any(isinstance(m, LowBitLinear) for m in model.modules())
    quant.align(model, format_of("w4a16", 32))
    assert sum(isinstance(m, LowBitLinear) for m in model.modules()) == 7 and type(model.lm_head) is torch.nn.Linear


def test_formats_that_cannot_run_are_refused_before_a_model_loads(folders, tmp_path, monkeypatch):
    untied, small = str(folders / "untied"), str(tmp_path)
    shape = json.loads((folders / "actor" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**shape, "hidden_size": 16}))

    def check(actor=None, **flags):
        check_models(make_cfg(**flags), untied, actor)

    with pytest.raises(ValueError, match=f"--quant_group=48: {NOT_WHOLE}"):
        check(rollout_quant="w4a16", quant_group=48)
    with pytest.raises(ValueError, match="--quant_group=24: "):
        check(learner_quant="w2a16", quant_group=24)
    with pytest.raises(ValueError, match="has rows of 16"):  # with an actor, the actor is quantized
        check(small, rollout_quant="w4a16", quant_group=32)
    for fmt in ("int8", "fp8", "w4a16"):
        check(rollout_quant=fmt, quant_group=16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(ValueError, match="--rollout_quant=fp8: needs compute capability 8.9; use int8"):
        check(rollout_quant="fp8")
    with pytest.raises(ValueError, match="--quant_group=16: vLLM's int4 kernels support only groups of 32, 64 and 128"):
        check(rollout_quant="w4a16", quant_group=16, rollout="vllm", rollout_dtype="bfloat16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check(rollout_quant="fp8")
    for fmt in ("int8", "fp8", "w4a16"):
        formats = dict(rollout_quant=fmt, quant_group=32)
        with pytest.raises(
            ValueError, match=f"--rollout_quant={fmt}: on a GPU .* in 16 bits with this format; add --rollout_dtype=bf"
        ):
            check(rollout="vllm", rollout_dtype="float32", **formats)
        check(rollout="vllm", rollout_dtype="bfloat16", **formats)
        check(rollout="hf", rollout_dtype="float32", **formats)
        remote = dict(samplers=str(tmp_path))
        check(rollout="vllm", rollout_dtype="float32", **formats, **remote)


@pytest.mark.parametrize("flags", [{"rollout_quant": "int8"}, {"learner_quant": "fp8"}, {"optimizer": "muon"}], ids=str)
def test_experts_of_an_unknown_kind_are_refused(tmp_path, flags):
    """GPT-OSS transposes its experts' matrices and adds biases to them."""
    from transformers import GptOssConfig

    GptOssConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    ).save_pretrained(tmp_path)
    flag = "--optimizer=muon" if "optimizer" in flags else "--rollout_quant, --learner_quant"
    with pytest.raises(
        UserError, match=f"{flag}: model.layers.0.mlp.experts.gate_up_proj holds the weights of several"
    ):
        check_models(make_cfg(**flags), str(tmp_path), None)
    check_models(make_cfg(), str(tmp_path), None)


def test_scales_are_rounded_like_a_cast():
    """Numbers midway between two bfloat16 numbers are rounded to even."""
    s = torch.cat(
        [torch.rand(1000, generator=torch.Generator().manual_seed(0)), 1 + torch.arange(8) / 256, torch.ones(1)]
    )
    assert torch.equal(quant.in_bfloat16(s), s.bfloat16().float())


def test_routers_stay_in_high_precision():
    """Also a matrix in a submodule of the router (Gemma 4, HunYuan); vLLM ignores the same names."""
    names = ("a.mlp.gate_proj", "a.mlp.gate", "a.router.proj", "a.mlp.gate.wg", "a.mlp.shared_expert_gate", "a.gates.x")
    linears = [(name, torch.nn.Linear(32, 32)) for name in names]
    model = SimpleNamespace(named_modules=lambda: iter(linears), get_output_embeddings=lambda: None)
    low = ["a.mlp.gate_proj", "a.gates.x"]
    assert list(quant.quantized_linears(model)) == low
    ignored = [rule.removeprefix("re:") for rule in lowbit.engine_config(format_of("int8"))["ignore"][1:]]
    assert [name for name in names if not any(re.match(rule, name) for rule in ignored)] == low


def test_weights_are_halved_if_int8_products_saturate():
    half = replace(format_of("int8"), qmax=63.0)
    linear = LowBitLinear.from_linear(torch.nn.Linear(8, 4), half)
    q, _ = linear.quantized_weight()
    assert int(q.abs().max()) == 63
    x = torch.randn(5, 8)
    want = dequantize(*quantize(x, 127.0, torch.int8)) @ dequantize(*linear.quantized_weight()).t() + linear.bias
    assert torch.allclose(linear(x), want, atol=1e-5)


def test_scales_of_int4_equal_vllms_on_a_gpu(monkeypatch):
    """vLLM's kernels multiply bfloat16 numbers: exact int4 times a scale rounded to bfloat16."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    assert format_of("w4a16", 32).scales == torch.float32
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fmt = format_of("w4a16", 32)
    q, s = fmt.quantize(x)
    in_kernel = q.bfloat16().reshape(16, 2, 32) * s.bfloat16()[..., None]
    assert torch.equal(in_kernel.reshape(16, 64), dequantize(q, s, torch.bfloat16))
    assert not torch.equal(s, format_of("w4a16", 32).quantize(x * 1.001)[1]) and s.dtype == torch.float32
    assert torch.equal(s, (x.reshape(16, 2, 32).abs().amax(-1) / 7).bfloat16().float())
    assert ((dequantize(q, s) - x).abs() <= error_bound(x, fmt, s)).all()


@pytest.mark.slow
def test_the_compiled_functions_are_the_same_functions():
    """Compiled for this processor; scales rounded to bfloat16 stay rounded."""
    x = torch.randn(40, 192, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    for fmt in (format_of("fp8"), replace(format_of("w4a16", 32), scales=torch.bfloat16)):
        settings = (fmt.qmax, fmt.dtype, fmt.group, fmt.scales)
        q, s = quantize.compiled()(x, *settings)
        want_q, want_s = quantize(x, *settings)
        assert torch.equal(q.float(), want_q.float()) and torch.equal(s, want_s)
        assert torch.equal(dequantize.compiled()(q, s, torch.bfloat16), dequantize(q, s, torch.bfloat16))


@pytest.mark.parametrize("shape", [(1, 32, 16), (7, 32, 8), (5, 72, 40), (40, 192, 64), (5, 4112, 24)])
def test_fp8_reaches_its_gpu_kernel_in_multiples_of_16(shape, monkeypatch):
    """A stand-in for the kernel: rows of a, columns of b, a scale for each."""
    M, K, N = shape

    def kernel(a, b, scale_a, scale_b, out_dtype, use_fast_accum):
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0 and b.stride(0) == 1 and a.is_contiguous()
        assert a.shape[1] <= 4096 or len(a) > 256  # fewer rows fail on a Hopper
        assert scale_a.shape == (len(a), 1) and scale_b.shape == (1, b.shape[1])
        return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", kernel)
    g, fmt = torch.Generator().manual_seed(1), format_of("fp8")
    qx, sx = fmt.quantize(torch.randn(M, K, generator=g) * 3)
    qw, sw = fmt.quantize(torch.randn(N, K, generator=g))
    want = (dequantize(qx, sx).double() @ dequantize(qw, sw).double().t()).bfloat16()
    got = quant.fp8_mm(qx, sx, qw, sw)
    assert got.shape == (M, N) and torch.allclose(got.float(), want.float(), rtol=2**-7, atol=1e-4)


def test_int8_range_of_this_machine(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    for flags, qmax in (("avx2 sse", 63.0), ("avx2 avx_vnni", 127.0), ("avx512_vnni", 127.0), ("amx_int8", 127.0)):
        monkeypatch.setattr(quant.Path, "read_text", lambda self, flags=flags: flags)
        quant.int8_qmax.cache_clear()
        assert quant.int8_qmax() == qmax
    monkeypatch.undo()
    quant.int8_qmax.cache_clear()


# ---------------------------------------------------------------------------------------------------------------------
# Engine and learner together
# ---------------------------------------------------------------------------------------------------------------------


def moved(model, seed: int, size: float = 0.02):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g), alpha=size)
    return model


@pytest.fixture(scope="session", params=["int8", "fp8", "w4a16"])
def quantized(request, vllm_engines):
    """Real vLLM in a low-bit format, and the format."""
    fmt = format_of(request.param, 32)
    return vllm_engines(fmt=fmt), fmt


def learners(fmt_name, *kinds):
    for kind in kinds:
        cfg = make_cfg(objective="tis", rollout_quant=fmt_name, learner_quant=kind, quant_group=32)
        yield Learner(tiny_model(1), None, cfg, Comm())


def mismatch(engine, learner) -> float:
    """Mean |p_inf - p_ref| over the tokens of 16 groups that the engine samples."""
    prompts = [np.array([5 + i, 3, 100 + i], np.int32) for i in range(16)]
    seeds = [list(range(9 * i, 9 * i + 8)) for i in range(16)]
    responses = engine.generate(prompts, seeds, Sampling(max_tokens=12), 0, [1])
    b = batching.collate(as_groups("q", prompts, responses, Sampling()), learner.cfg)
    gap = (learner.score(b, Needs()).logp.exp() - b.logp_inf.exp()).abs()[b.mask]
    return float(gap.mean())


def test_aligned_learners_have_a_tenth_of_the_mismatch(quantized):
    """Compared with a learner in full precision, before and after weight syncs that change weights."""
    engine, fmt = quantized
    aligned, plain = learners(fmt.name, "aligned", "none")
    check = WeightCheck(aligned.models.policy.config, np.arange(2, 14), fmt)
    for version in range(3):
        for learner in (aligned, plain):
            moved(learner.models.policy, version)
        synced = check.load(engine, version, aligned.published("policy", engine.packed))
        assert (synced.changed > 0.5 or version == 0) and synced.nbytes > 0
        of_aligned, of_plain = mismatch(engine, aligned), mismatch(engine, plain)
        assert of_aligned < of_plain / 10 and of_plain > 1e-4, (fmt.name, version, of_aligned, of_plain)


@pytest.mark.parametrize("name", ["int8", "fp8", "w4a16"])
def test_the_tensors_of_the_forward_are_the_ones_published(name):
    (learner,) = learners(name, "aligned")
    policy = learner.models.policy
    policy(torch.arange(2, 9)[None])
    sent = dict(learner.published("policy", True))
    for n, m in quant.quantized_linears(policy).items():
        if name == "w4a16":
            from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

            q = unpack_from_int32(sent[f"{n}.weight_packed"], 4, m.weight.shape)
            assert torch.equal(q, m.cached[0])
        else:
            assert sent[f"{n}.weight"] is m.cached[0]  # the same object: no second quantization
        assert sent[f"{n}.weight_scale"] is m.cached[1]
    assert sent["lm_head.weight"].dtype == torch.float32 and "model.embed_tokens.weight" in sent
    exact = dict(learner.published("policy", False))
    for n, m in quant.quantized_linears(policy).items():
        assert torch.equal(exact[f"{n}.weight"], dequantize(*m.quantized_weight()))


def test_remote_samplers_get_full_weights_unless_low_bits_are_sent():
    """Samplers quantize on their own: a sampler in full precision must not get rounded weights."""
    (learner,) = learners("w4a16", "aligned")
    learner.cfg = replace(learner.cfg, samplers="x")
    plain, packed = dict(learner.published("policy", False)), dict(learner.published("policy", True))
    for n, m in quant.quantized_linears(learner.models.policy).items():
        assert torch.equal(plain[f"{n}.weight"], m.weight) and f"{n}.weight_packed" in packed


def test_a_learner_in_a_different_format_publishes_the_engines_format():
    """An int8 learner and a w4a16 engine: published weights have sixteen levels, rounded from the master weights."""
    (learner,) = learners("int8", "aligned")
    policy, other = learner.models.policy, format_of("w4a16", 32)
    sent = dict(quant.for_engine(policy.state_dict().items(), policy, other, False))
    for n, m in quant.quantized_linears(policy).items():
        q, s = quantize(m.weight.detach(), other.qmax, other.dtype, other.group)
        assert torch.equal(sent[f"{n}.weight"], dequantize(q, s))


@pytest.mark.parametrize("name", ["int8", "fp8", "w4a16", "w2a16"])
def test_the_plain_engine_in_low_bits(name, folders):
    """The plain sampler with the published tensors equals the aligned learner."""
    (learner,) = learners(name, "aligned")
    engine = HFEngine(str(folders / "actor"), fmt=format_of(name, 32))
    assert mismatch(engine, learner) < 1e-3  # before any weights are published
    moved(learner.models.policy, 3)
    engine.load(learner.published("policy", engine.packed))
    ids = torch.arange(2, 14)
    with torch.no_grad():
        logp = learner.models.policy(ids[None]).logits[0, :-1].log_softmax(-1)
    want = logp.gather(1, ids[1:, None])[:, 0].numpy()
    assert np.allclose(engine.logprobs(ids[None].numpy())[0], want, atol=0 if engine.packed else 1e-5)
    assert mismatch(engine, learner) < 1e-3


def in_files(folder):
    """All tensors of a model folder."""
    files = sorted(Path(folder).glob("*.safetensors"))
    tensors = [load_file(file) for file in files]
    index = Path(folder) / "model.safetensors.index.json"
    if len(files) > 1:
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map == {name: file.name for file, part in zip(files, tensors, strict=True) for name in part}
    assert index.exists() == (len(files) > 1)
    return {name: x for part in tensors for name, x in part.items()}


@pytest.mark.parametrize(
    "family, name, packed",
    [("qwen2", "int8", True), ("qwen3", "w4a16", True), ("qwen3_moe", "fp8", False), ("gemma2", "w4a16", False)],
)
@pytest.mark.parametrize("names", ["its own", "older"])
def test_a_checkpoint_in_low_bits_equals_the_quantized_model(family, name, packed, names, tmp_path, monkeypatch):
    """Tied and untied heads, experts, several files; also names that only transformers can read."""
    fmt = format_of(name, 16)
    whole = standins.model(family)
    standins.save(whole, tmp_path / "model")
    if names == "older":
        file = tmp_path / "model" / "model.safetensors"
        save_file({n.removeprefix("model."): x for n, x in load_file(file).items()}, file, metadata={"format": "pt"})
    monkeypatch.setattr(lowbit, "PART", 1 << 14)
    got = in_files(lowbit.quantized_checkpoint(str(tmp_path / "model"), fmt, str(tmp_path / "out"), packed))
    wanted = dict(
        quant.by_expert(
            quant.for_engine(whole.float().state_dict().items(), whole, fmt, packed), quant.expert_parameters(whole)
        )
    )
    if whole.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    assert got.keys() == wanted.keys()
    for key, x in wanted.items():
        assert got[key].dtype == x.dtype and torch.equal(got[key].float(), x.float()), key
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("quantization_config" in config) == packed


def test_a_checkpoint_in_low_bits_is_made_in_parts(tmp_path, monkeypatch):
    model = tiny_model(0, layers=6, hidden=512)
    model.save_pretrained(tmp_path / "model")
    nbytes = 0
    for layer in quant.quantized_linears(model).values():
        nbytes += layer.weight.nbytes
    del model
    monkeypatch.setattr(lowbit, "PART", 1 << 20)
    most, alive = [0], weakref.WeakSet()
    make = quant.quantize

    def quantize_and_count(x, *more):
        alive.add(x)
        most[0] = max(most[0], sum(t.nbytes for t in alive))
        return make(x, *more)

    monkeypatch.setattr(quant, "quantize", quantize_and_count)
    lowbit.quantized_checkpoint(str(tmp_path / "model"), format_of("int8"), str(tmp_path / "out"))
    assert most[0] < nbytes / 6


def start_folder_of_rank(rank: int, local: int, folder: str, meet: str, results) -> None:
    """A process of the test below: send the start folder, whether this rank wrote it, and the digest of its weights."""
    os.environ["LOCAL_RANK"] = str(local)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=3)
    path, directory = lowbit.quantized_for_a_node(folder, format_of("int8"), True)
    results.put(
        (rank, path, directory is not None, hashlib.sha256((Path(path) / "model.safetensors").read_bytes()).hexdigest())
    )
    dist.barrier()  # the writer deletes the folder at the end
    dist.destroy_process_group()


def test_ranks_of_a_node_start_from_one_folder(tmp_path):
    """Three ranks on two nodes: two folders with the same weights, each written once."""
    standins.save(standins.model("qwen2"), tmp_path / "model")
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    ranks = []
    for rank, local in enumerate((0, 1, 0)):
        args = (rank, local, str(tmp_path / "model"), str(tmp_path / "meet"), results)
        ranks.append(spawn.Process(target=start_folder_of_rank, args=args, daemon=True))
        ranks[-1].start()
    for process in ranks:
        process.join(200)
    assert [process.exitcode for process in ranks] == [0, 0, 0]
    paths, wrote, digests = zip(*(rest for _, *rest in sorted(results.get() for _ in ranks)), strict=True)
    assert paths[0] == paths[1] != paths[2] and wrote == (True, False, True) and len(set(digests)) == 1
    assert not any(Path(path).exists() for path in paths)
    alone, directory = lowbit.quantized_for_a_node(str(tmp_path / "model"), format_of("int8"), True)
    assert alone == directory.name and (Path(alone) / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["int8", "fp8", "w4a16", "w2a16"])
def test_vllm_starts_in_low_bits(name, vllm_engines):
    """The engine samples in its format before the first publication."""
    engine = vllm_engines(fmt=format_of(name, 32), seed=1)
    aligned, plain = learners(name, "aligned", "none")
    assert mismatch(engine, aligned) < mismatch(engine, plain) / 10


def test_a_quantized_engine_with_old_weights_is_found(quantized):
    engine, fmt = quantized
    (learner,) = learners(fmt.name, "aligned")
    check = WeightCheck(learner.models.policy.config, np.arange(2, 14), fmt)
    check.load(engine, 0, learner.published("policy", engine.packed))
    moved(learner.models.policy, 1, 0.2)
    real, engine.load = engine.load, lambda tensors: [None for _ in tensors]
    try:
        with pytest.raises(SyncError, match="the engine still holds the bytes of version 0"):
            check.load(engine, 1, learner.published("policy", engine.packed))
    finally:
        engine.load = real


def test_training_follows_the_low_bit_loss():
    """Updates of an aligned learner change its low-bit forward: no stale cached tensor is used."""
    (learner,) = learners("int8", "aligned")
    cfg, policy = learner.cfg, learner.models.policy
    b = batching.collate(make_groups(), cfg)
    before = learner.score(b, Needs()).logp
    first = {n: m.quantized_weight()[0].clone() for n, m in quant.quantized_linears(policy).items()}
    for _ in range(3):
        learner.cfg = replace(cfg, lr=1e-2)
        learner.update(b, objectives.prepare(b, learner.comm, cfg, {}))
    assert (learner.score(b, Needs()).logp - before)[b.mask].abs().max() > 1e-3
    assert all(not torch.equal(m.quantized_weight()[0], first[n]) for n, m in quant.quantized_linears(policy).items())
    tiny_model(1).load_state_dict(policy.state_dict())  # the names of a plain model
    (again,) = learners("int8", "aligned")
    again.models.policy.load_state_dict(policy.state_dict())
    assert torch.equal(again.score(b, Needs()).logp, learner.score(b, Needs()).logp)


def test_only_the_sampling_model_is_aligned():
    cfg = make_cfg(objective="jackpot", actor="base:actor", rollout_quant="int8", learner_quant="aligned")
    learner = Learner(tiny_model(0), tiny_model(1), cfg, Comm())
    assert {type(m) for m in quant.quantized_linears(learner.models.actor).values()} == {LowBitLinear}
    assert {type(m) for m in quant.quantized_linears(learner.models.policy).values()} == {torch.nn.Linear}
    b = batching.collate(make_groups(), cfg)
    out = learner.update(b, objectives.prepare(b, learner.comm, cfg, {}))
    assert out["stepped"] and out["actor/grad_norm"] > 0


def test_the_engine_holds_the_learners_bits(vllm_engines):
    """fp8: vLLM's fused weights and scales (q, k, v and gate, up) are bit-identical to the learner's forward."""
    engine = vllm_engines(fmt=format_of("fp8"))
    (learner,) = learners("fp8", "aligned")
    moved(learner.models.policy, 5)
    engine.load(learner.published("policy", True))
    low = {n: m.quantized_weight() for n, m in quant.quantized_linears(learner.models.policy).items()}
    block = "model.layers.0."
    parts = {
        "self_attn.qkv_proj": [f"self_attn.{x}_proj" for x in "qkv"],
        "self_attn.o_proj": ["self_attn.o_proj"],
        "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down_proj": ["mlp.down_proj"],
    }

    def quantized_layers(model):
        layers = {n: m for n, m in model.named_modules() if n.removeprefix(block) in parts}
        return {n: (m.weight.detach().clone(), m.weight_scale.detach().clone()) for n, m in layers.items()}

    (in_vllm,) = engine.llm.apply_model(quantized_layers)
    assert len(in_vllm) == 4
    for name, (weight, scale) in in_vllm.items():
        joined = [low[block + part] for part in parts[name.removeprefix(block)]]
        q = torch.cat([q for q, _ in joined])
        s = torch.cat([s for _, s in joined])
        assert weight.dtype == q.dtype == torch.float8_e4m3fn
        bits = [w.contiguous().view(torch.uint8) for w in (weight, weight.t())]
        assert any(torch.equal(b, q.view(torch.uint8)) for b in bits), name
        assert torch.equal(scale.flatten(), s.flatten()), name
