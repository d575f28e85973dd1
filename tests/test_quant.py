"""Formats, the aligned layer and its straight-through gradient, low-bit engines and checkpoints."""

import re
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import standins
import torch
from conftest import make_cfg, tiny_model
from transformers import AutoModelForCausalLM

import batching
import quant
from learner import Learner
from machinery.flags import UserError
from machinery.ranks import Comm
from machinery.run import check_models
from model import Needs
from model.engines import HFEngine
from model.in_vllm import converted_once, engine_config, import_vllm
from quant import LowBitLinear, dequantize, format_of, quantize
from rollout import Sampling, as_groups
from sync import SyncError, WeightCheck

FORMATS = ["int8", "fp8", "w4a16", "w2a16"]


def error_bound(x, fmt, s):
    """The largest rounding error of each entry, as stated in quant.py."""
    if fmt.dtype == torch.int8:
        return (s / 2).repeat_interleave(x.shape[1] // s.shape[1], 1) * (1 + 1e-5)
    return torch.maximum(x.abs() / 16, s / 1024) * (1 + 1e-5)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["normal", "outlier", "zero rows", "tiny", "huge"])
def test_round_trip_stays_within_the_stated_error(name, kind):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    x = {
        "normal": x,
        "outlier": x.index_put((torch.tensor([3]), torch.tensor([5])), torch.tensor(1e4)),
        "zero rows": x * (torch.arange(16) % 2)[:, None],
        "tiny": x * 1e-20,
        "huge": x * 1e20,
    }[kind]
    fmt = format_of(name, 32)
    q, s = fmt.quantize(x)
    back = dequantize(q, s)
    assert q.dtype == fmt.dtype and s.shape == (16, 2 if fmt.group else 1)
    assert (s > 0).all() and q.float().abs().max() <= fmt.qmax
    assert ((back - x).abs() <= error_bound(x, fmt, s)).all() and torch.equal(back[x == 0], x[x == 0])
    again, _ = fmt.quantize(back)  # values on the grid are unchanged
    assert torch.equal(q.float(), again.float())
    assert torch.equal(fmt.quantize(-x)[0].float(), -q.float())


@pytest.mark.parametrize("fmt", [*(format_of(name, 32) for name in FORMATS), replace(format_of("int8"), qmax=63.0)])
def test_gradients_are_straight_through(fmt):
    """y = x^ W^T; dx = g W^, dW = g^T x^, db = sum g: a plain layer's with x^ and W^. Also for int8 weights of +-63."""
    plain, layer = torch.nn.Linear(64, 24), LowBitLinear.from_linear(torch.nn.Linear(64, 24), fmt)
    layer.load_state_dict(plain.state_dict())
    x, up = torch.randn(3, 5, 64, requires_grad=True), torch.randn(3, 5, 24)
    y = layer(x)
    (y * up).sum().backward()
    assert not torch.allclose(y, plain(x), atol=1e-4)  # the layer is quantized
    assert float(layer.quantized()[0].float().abs().max()) == fmt.qmax
    with torch.no_grad():
        plain.weight.copy_(dequantize(*layer.quantized()))
    rounded = x.detach()
    if fmt.activations:
        rounded = dequantize(*quantize(rounded, 127.0 if fmt.name == "int8" else 448.0, fmt.dtype))
    rounded.requires_grad_()
    want = plain(rounded)
    (want * up).sum().backward()
    assert torch.allclose(y, want, atol=1e-5) and torch.allclose(x.grad, rounded.grad, atol=1e-5)
    assert torch.allclose(layer.weight.grad, plain.weight.grad, atol=1e-4)
    assert torch.allclose(layer.bias.grad, plain.bias.grad, atol=1e-5)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_vllms_kernels_compute_the_aligned_layer(name, monkeypatch):
    """A stand-in for vLLM on a GPU, with its layouts. float32, and sizes that 16 does not divide: in plain torch."""
    fmt, multiplied = format_of(name), []

    def cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype, bias):
        assert a.stride(1) == b.stride(0) == 1 and scale_a.is_contiguous() and scale_b.is_contiguous()
        assert scale_a.shape == (len(a), 1) and scale_b.numel() == b.shape[1] and out_dtype == torch.bfloat16
        multiplied.append(b.shape)
        return ((a.float() @ b.float()) * scale_a * scale_b.t() + bias).to(out_dtype)

    def scaled_quant(x, use_per_token_if_dynamic=True):
        assert x.is_contiguous() and use_per_token_if_dynamic
        return *quantize(x, fmt.activation_qmax, fmt.dtype), *([None] if name == "int8" else [])

    kernels = dict(scaled_int8_quant=scaled_quant, scaled_fp8_quant=scaled_quant, cutlass_scaled_mm=cutlass_scaled_mm)
    for dtype, columns, used in ((torch.bfloat16, 32, 1), (torch.bfloat16, 24, 0), (torch.float32, 32, 0)):
        layer = LowBitLinear.from_linear(torch.nn.Linear(64, columns, dtype=dtype), fmt)
        x = torch.randn(64, 5, dtype=dtype).t().requires_grad_()
        plain = layer(x)
        gradient = torch.autograd.grad(plain.sum(), (x, layer.weight, layer.bias))
        with monkeypatch.context() as patch:
            patch.setattr(quant, "vllm_kernels", lambda device: SimpleNamespace(**kernels))
            y = layer(x)
            again = torch.autograd.grad(y.sum(), (x, layer.weight, layer.bias))
        assert torch.equal(y, plain) and all(map(torch.equal, again, gradient))
        assert multiplied == [(64, columns)] * used
        multiplied.clear()
    assert quant.vllm_kernels("cpu") is None


@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vllm_quantizes_activations_like_the_aligned_layer(dtype):
    """The same scales and numbers. vLLM gives a row of zeros the scale 0, and with AVX2 the number -128."""
    import_vllm()
    from vllm import _custom_ops

    x = torch.randn(400, 192, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[7] = 0
    (q, s, _), (ours, scale) = _custom_ops.scaled_int8_quant(x), quantize(x, 127.0, torch.int8)
    assert not (q[7] * s[7]).any() and not ours[7].any()
    q, s, ours, scale = (values[torch.arange(400) != 7] for values in (q, s, ours, scale))
    assert torch.equal(s, scale) and torch.equal(q, ours)


@pytest.mark.parametrize("bias", [True, False])
def test_align_changes_only_the_product_of_a_layer(bias):
    """Parameters, their order and their names are the same, for every position of the layer; no random draw."""
    first = torch.nn.Linear(8, 8, bias=bias)
    model = torch.nn.ModuleDict({"a": first, "b": torch.nn.Sequential(torch.nn.ReLU(), first), "c": torch.nn.ReLU()})
    model.get_output_embeddings = lambda: None
    model.eval()
    before, modules = list(model.named_parameters(remove_duplicate=False)), [name for name, _ in model.named_modules()]
    generator = torch.get_rng_state()
    quant.align(model, format_of("int8"))
    assert torch.equal(torch.get_rng_state(), generator)
    assert isinstance(model["a"], LowBitLinear) and model["b"][1] is model["a"] and not model["a"].training
    after = list(model.named_parameters(remove_duplicate=False))
    assert all(a == b and p is q for (a, p), (b, q) in zip(before, after, strict=True))
    assert [name for name, _ in model.named_modules()] == modules


def test_layers_that_are_quantized(folders):
    """All linear layers but the head and routers, also in a submodule (Gemma 4, HunYuan). vLLM ignores the same."""
    model = quant.align(AutoModelForCausalLM.from_pretrained(folders / "untied"), format_of("w4a16", 32))
    low = {name.split(".")[-1] for name, m in model.named_modules() if isinstance(m, LowBitLinear)}
    assert low == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    names = ("a.mlp.gate_proj", "a.mlp.gate", "a.router.proj", "a.mlp.gate.wg", "a.mlp.shared_expert_gate", "a.gates.x")
    linears = [(name, torch.nn.Linear(32, 32)) for name in names]
    model = SimpleNamespace(named_modules=lambda: iter(linears), get_output_embeddings=lambda: None)
    low = ["a.mlp.gate_proj", "a.gates.x"]
    assert list(quant.quantized_linears(model)) == low
    ignored = [rule.removeprefix("re:") for rule in engine_config(format_of("int8"))["ignore"][1:]]
    assert [name for name in names if not any(re.match(rule, name) for rule in ignored)] == low


NOT_WHOLE = ".*q_proj has rows of 32, not a multiple of the group"


@pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
@pytest.mark.parametrize(("M", "K", "N"), [(1, 4096, 24), (20, 4099, 30)])
def test_an_int8_product_is_exact(M, K, N, device):
    """Sums beyond 2^24, which float32 additions would round."""
    qx, qw = torch.full((M, K), 127, dtype=torch.int8), torch.randint(96, 128, (N, K), dtype=torch.int8)
    y = quant.product(*(x.to(device) for x in (qx, torch.ones(M, 1), qw, torch.ones(N, 1))))
    assert torch.equal(y.cpu(), (qx.long() @ qw.long().t()).float())


@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed")
@pytest.mark.parametrize(("M", "K", "N"), [(3, 64, 48), (20, 576, 96), (1, 1536, 16)])
def test_the_fp8_product_on_a_cpu_equals_vllms(M, K, N):
    """Its own function for comparison, with padded rows; a weight moved in place is converted again."""
    import_vllm()
    from vllm.model_executor.kernels.linear.scaled_mm import pytorch

    kernel = pytorch.ChannelWiseTorchFP8ScaledMMLinearKernel.apply_scaled_mm
    vllms = getattr(kernel, "__wrapped__", kernel)  # an engine in this process may have replaced it
    ours = converted_once(vllms)
    torch.manual_seed(0)
    weight = torch.randn(N, K).to(torch.float8_e4m3fn)
    numbers = dict(A=torch.randn(M + 2, K).to(torch.float8_e4m3fn), As=torch.rand(M + 2, 1), Bs=torch.rand(N, 1))
    for out_dtype, bias in [(torch.float32, None), (torch.bfloat16, torch.randn(N).to(torch.bfloat16))]:
        call = dict(numbers, B=weight.t(), out_dtype=out_dtype, bias=bias, output_shape=[1, M, N])
        for _ in range(2):
            torch.testing.assert_close(ours(None, **call), vllms(None, **call), rtol=1e-5, atol=1e-4)
            weight.copy_(weight.view(torch.uint8).roll(8).view(weight.dtype))  # equal words in another order


ON_VLLM = dict(rollout="vllm", rollout_dtype="bfloat16")
# capability of a GPU (None: a CPU), flags, error ("": none)
RUNNABLE = [
    (None, dict(rollout_quant="w4a16", quant_group=48), f"--quant_group=48: {NOT_WHOLE}"),
    (None, dict(learner_quant="w2a16", quant_group=24), "--quant_group=24: "),
    (None, dict(rollout_quant="w4a16", quant_group=16), ""),
    ((8, 6), dict(rollout_quant="fp8"), "--rollout_quant=fp8: needs compute capability 8.9; use int8"),
    ((8, 9), dict(rollout_quant="fp8"), ""),
    ((8, 9), dict(rollout_quant="w4a16", quant_group=16, **ON_VLLM), "kernels support only groups of 32, 64 and 128"),
    ((8, 9), dict(rollout_quant="w4a16", quant_group=32, **ON_VLLM), ""),
    ((8, 9), dict(rollout_quant="int8", rollout="vllm"), "--rollout_quant=int8: on a GPU .* add --rollout_dtype=bf"),
    ((8, 9), dict(rollout_quant="int8", rollout="vllm", samplers="a folder"), ""),
    ((8, 9), dict(rollout_quant="int8"), ""),
]


@pytest.mark.parametrize("capability, flags, error", RUNNABLE, ids=str)
def test_formats_that_cannot_run_are_refused_before_a_model_loads(capability, flags, error, folders, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if not error:
        return check_models(make_cfg(**flags), str(folders / "untied"), None)
    with pytest.raises(UserError, match=error):
        check_models(make_cfg(**flags), str(folders / "untied"), None)


@pytest.mark.parametrize("flags", [{"rollout_quant": "int8"}, {"learner_quant": "fp8"}, {"optimizer": "muon"}], ids=str)
def test_experts_of_an_unknown_kind_are_refused(tmp_path, flags):
    """GPT-OSS transposes its experts' matrices and adds biases to them."""
    standins.config("gpt_oss", num_local_experts=4).save_pretrained(tmp_path)
    flag = "--optimizer=muon" if "optimizer" in flags else "--rollout_quant, --learner_quant"
    with pytest.raises(UserError, match=f"{flag}: .*mlp.experts.gate_up_proj holds the weights of several"):
        check_models(make_cfg(**flags), str(tmp_path), None)
    check_models(make_cfg(), str(tmp_path), None)


def test_scales_of_int4_are_bfloat16_numbers_on_a_gpu(monkeypatch):
    """vLLM's kernels multiply bfloat16 numbers: exact int4 times a scale rounded to bfloat16."""
    x = torch.randn(16, 64)
    assert format_of("w4a16", 32).scales == torch.float32
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fmt = format_of("w4a16", 32)
    q, s = fmt.quantize(x)
    assert torch.equal(s, (x.reshape(16, 2, 32).abs().amax(-1) / 7).bfloat16().float())
    in_kernel = q.bfloat16().reshape(16, 2, 32) * s.bfloat16()[..., None]
    assert torch.equal(in_kernel.reshape(16, 64), dequantize(q, s, torch.bfloat16))
    assert ((dequantize(q, s) - x).abs() <= error_bound(x, fmt, s)).all()


def test_packed_tensors_are_on_the_weights_device():
    model = tiny_model(1).to("meta")
    packed = quant.for_engine(model.named_parameters(), model, format_of("w4a16", 32), packed=True)
    assert {x.device.type for _, x in packed} == {"meta"}


def test_int8_range_of_this_machine(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    for flags, qmax in (("avx2 sse", 63.0), ("avx2 avx_vnni", 127.0), ("avx512_vnni", 127.0), ("amx_int8", 127.0)):
        monkeypatch.setattr(quant.Path, "read_text", lambda self, flags=flags: flags)
        assert quant.int8_qmax.__wrapped__() == qmax


# -- Engine and learner together --------------------------------------------------------------------------------------


def moved(model, seed: int, size: float = 0.02):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g).to(p.device), alpha=size)
    return model


def learners(name, *kinds, device="cpu"):
    for kind in kinds:
        cfg = make_cfg(objective="tis", rollout_quant=name, learner_quant=kind, quant_group=32)
        yield Learner(tiny_model(1), None, cfg, Comm(device))


def mismatch(engine, learner) -> float:
    """Mean |p_inf - p_ref| over the tokens of 16 groups that the engine samples."""
    prompts = [np.array([5 + i, 3, 100 + i], np.int32) for i in range(16)]
    seeds = [list(range(9 * i, 9 * i + 8)) for i in range(16)]
    responses = engine.generate(prompts, seeds, Sampling(max_tokens=12), 0, [1])
    b = batching.collate(as_groups("q", prompts, responses, Sampling()), learner.cfg)
    gap = (learner.score(b, Needs()).logp.exp() - b.logp_inf.exp()).abs()[b.mask]
    return float(gap.mean())


def check_alignment(engine, name: str, device="cpu", share=0.1) -> None:
    """The mismatch of an aligned learner is a small share of a learner's in full precision: at the start, and after
    weight syncs that change weights. At the end an engine that keeps old weights is found."""
    aligned, plain = learners(name, "aligned", "none", device=device)
    check = WeightCheck(aligned.models.policy.config, np.arange(2, 14), engine.fmt)
    for version in range(3):
        of_aligned, of_plain = mismatch(engine, aligned), mismatch(engine, plain)
        assert of_aligned < of_plain * share and of_plain > 1e-4, (version, of_aligned, of_plain)
        for learner in (aligned, plain):
            moved(learner.models.policy, version)
        synced = check.load(engine, version, aligned.published("policy", engine.packed))
        assert (synced.changed > 0.5 or version == 0) and synced.nbytes > 0
    moved(aligned.models.policy, 3, 0.2)
    check_stale_engine(check, engine, aligned)


def check_stale_engine(check, engine, learner) -> None:
    """An engine that keeps the weights of version 2 is found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "load", lambda tensors: [None for _ in tensors])
        with pytest.raises(SyncError, match="the engine still holds the bytes of version 2"):
            check.load(engine, 3, learner.published("policy", engine.packed))


@pytest.mark.parametrize("name", ["int8", "fp8", "w4a16", "w2a16"])
def test_aligned_learners_have_a_tenth_of_vllms_mismatch(name, vllm_engines):
    check_alignment(vllm_engines(fmt=format_of(name, 32), seed=1), name)


@pytest.mark.parametrize("name", ["int8", "fp8", "w4a16", "w2a16"])
def test_the_plain_engine_equals_the_aligned_learner(name, folders):
    check_alignment(HFEngine(str(folders / "actor"), fmt=format_of(name, 32)), name, share=1e-3)


@pytest.mark.parametrize("name", ["int8", "w4a16"])
def test_the_tensors_of_the_forward_are_the_ones_published(name):
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    (learner,) = learners(name, "aligned")
    policy = learner.models.policy
    policy(torch.arange(2, 9)[None])
    sent, exact = dict(learner.published("policy", True)), dict(learner.published("policy", False))
    learner.cfg = replace(learner.cfg, samplers="x")  # remote samplers quantize on their own
    remote = dict(learner.published("policy", False))
    for n, m in quant.quantized_linears(policy).items():
        q, s = m.cached["weight"][1]
        if name == "w4a16":
            assert torch.equal(unpack_from_int32(sent[f"{n}.weight_packed"], 4, m.weight.shape), q)
        else:
            assert sent[f"{n}.weight"] is q  # the same object: no second quantization
        assert sent[f"{n}.weight_scale"] is s
        assert torch.equal(exact[f"{n}.weight"], dequantize(*m.quantized()))
        assert torch.equal(remote[f"{n}.weight"], m.weight)
    assert sent["lm_head.weight"].dtype == torch.float32 and "model.embed_tokens.weight" in sent


@pytest.mark.parametrize("own", ["none", "aligned", "fp8"])
def test_a_learner_publishes_the_engines_numbers_of_its_rounded_weights(own):
    """Whatever its own format; in 16 bits the forward pass and saved models also round the master weights."""
    learner = Learner(tiny_model(0), None, make_cfg(rollout_quant="int8", learner_quant=own, dtype="bfloat16"), Comm())
    learner.models.load_state_dict({n: x * 1.003 for n, x in learner.models.state_dict().items()})
    sent, unrounded = dict(learner.published("policy", False)), format_of("int8")
    for n, m in quant.quantized_linears(learner.models.policy).items():
        master = m.weight.detach()
        q, s = unrounded.quantize(master.bfloat16())
        assert torch.equal(sent[f"{n}.weight"], dequantize(q, s)) and not torch.equal(s, unrounded.quantize(master)[1])
        assert own != "aligned" or torch.equal(m.quantized()[1], s)
    assert torch.equal(sent["lm_head.weight"], learner.models.policy.lm_head.weight.bfloat16())


def test_only_the_sampling_model_is_aligned():
    cfg = make_cfg(objective="jackpot", actor="base:actor", rollout_quant="int8", learner_quant="aligned")
    learner = Learner(tiny_model(0), tiny_model(1), cfg, Comm())
    assert {type(m) for m in quant.quantized_linears(learner.models.actor).values()} == {LowBitLinear}
    assert {type(m) for m in quant.quantized_linears(learner.models.policy).values()} == {torch.nn.Linear}
