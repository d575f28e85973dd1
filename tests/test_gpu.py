"""GPU versions of CPU tests, and tests that need a GPU. Skipped without a GPU.

python -m pytest tests/test_gpu.py                        # the whole GPU list: python -m bench
GPU_LIST_DEVICE=cpu python -m pytest tests/test_gpu.py    # the same tests on a CPU"""

import contextlib
import importlib.util
import os
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import at, log_probabilities, make_cfg, make_groups, tiny_model
from ranks import make_learner, one_update, relative
from standins import model, save
from test_quant import check_alignment, check_stale_engine, moved, test_an_int8_product_is_exact  # noqa: F401
from torchrun import torchrun
from transformers.models.qwen3 import modeling_qwen3

import quant
import train
from bench.gpu_parts import one_rank
from learner import Learner
from machinery.log import read_metrics
from machinery.ranks import Comm
from model.engines import HFEngine
from quant import LowBitLinear, dequantize, format_of, quantize
from rollout import uniforms
from sampling import Sampling
from sync import WeightCheck

DEVICE = os.environ.get("GPU_LIST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.timeout(300),
]
ON_A_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU has it")
f32, f64 = torch.float32, torch.float64


def gradient(case: dict, kind, device: str, **flags) -> dict:
    """The gradient of one update of the tiny learner, by parameter."""
    cfg = make_cfg(**{**case, **flags})
    return one_update(cfg, make_learner(cfg, kind, Comm(device)), make_groups(4, seed=3, prompt=(6, 12)))[0]


# 16 prompts of unequal lengths, 8 responses to each
PROMPTS = [np.array([5 + i, 3, 100 + i, 7][: 2 + i % 3], np.int32) for i in range(16)]
SEEDS = [list(range(9 * i, 9 * i + 8)) for i in range(16)]


def gaps_to_the_model(lm, groups) -> list[float]:
    """The largest |log p_inf - log p| of each response, sampled at temperature 0.8."""
    gaps = []
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for r in group:
            logp = at(*log_probabilities(lm, prompt, r.tokens, 0.8)).detach().numpy()
            gaps.append(np.abs(r.logp_inf - logp).max())
    return gaps


# -- Rollouts, gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["compile", "liger"])
@pytest.mark.parametrize("objective", ["grpo", "jackpot"])
def test_kernels_give_the_gradient_up_to_rounding(kernels, objective):
    """In bfloat16 the distance from the float32 gradient is at most 1.5 times the plain layers'."""
    if kernels == "liger" and (DEVICE == "cpu" or not importlib.util.find_spec("liger_kernel")):
        pytest.skip("liger-kernel is not installed, or there is no GPU")
    case = dict(objective=objective, rollout="hf")
    exact = gradient(case, f32, DEVICE)
    with patch.dict(vars(modeling_qwen3)):  # liger-kernel replaces its classes for the whole process
        plain, fused = (gradient(case, f32, DEVICE, dtype="bfloat16", kernels=k) for k in ("plain", kernels))
        assert relative(exact, fused) < 1.5 * relative(exact, plain)
        assert relative(exact, gradient(case, f32, DEVICE, kernels=kernels)) < 1e-5


def test_the_plain_engine_samples_as_on_a_cpu():
    """Tokens are equal unless a draw falls between two roundings; log-probabilities are the model's."""
    args = (PROMPTS, SEEDS, Sampling(max_tokens=12, temperature=0.8), 5, [1])
    on_gpu, on_cpu = (HFEngine(tiny_model(0), device=device).generate(*args) for device in (DEVICE, "cpu"))
    pairs = [pair for a, b in zip(on_gpu, on_cpu, strict=True) for pair in zip(a, b, strict=True)]
    assert sum(np.array_equal(a.tokens, b.tokens) for a, b in pairs) >= 126  # of 128
    assert max(gaps_to_the_model(tiny_model(0), on_gpu)) < 1e-4


TIS, WITH_ACTOR = {"objective": "tis"}, {"objective": "jackpot", "actor": "base:actor"}
OBJECTIVES = [{**TIS, "kl_coef": 0.3, "entropy_coef": 0.1}, {"objective": "jackpot"}]
OBJECTIVES += [{**WITH_ACTOR, "obrs_target": "new"}]
OBJECTIVES += [{"objective": "gepo", "gepo_defence": 4.0, "cppo_beta": 0.5}, {"objective": "tbpo", "optimizer": "muon"}]
# flags, further flags on this device, type of the weights, largest difference
GRADIENTS = [(case, {"micro_tokens": n}, f64, 1e-6) for case in OBJECTIVES for n in (10**6, 45)]
GRADIENTS += [(case, {"gradient_checkpointing": True}, f64, 1e-6) for case in (TIS, WITH_ACTOR)]
GRADIENTS += [(case, {"parallel": "fsdp"}, f64, 1e-6) for case in (TIS, WITH_ACTOR)]
GRADIENTS += [(TIS, {"dtype": "bfloat16", "gradient_checkpointing": on}, f32, 3e-2) for on in (False, True)]
GRADIENTS += [(TIS, {"dtype": "float16"}, f32, 1e-2)]


@pytest.mark.parametrize(("case", "flags", "kind", "most"), GRADIENTS, ids=str)
def test_the_gradient_equals_the_cpus(case, flags, kind, most):
    """Also in many micro-batches, with checkpointing, in the shards of one rank, and in 16 bits."""
    with one_rank(DEVICE) if "parallel" in flags else contextlib.nullcontext():
        here = gradient(case, kind, DEVICE, **flags)
    assert relative(gradient(case, kind, "cpu"), here) < most


# -- Low bits ---------------------------------------------------------------------------------------------------------

FORMATS = ["int8", "fp8", "w4a16"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [f32, torch.bfloat16], ids=str)
def test_quantized_numbers_equal_the_cpus(name, dtype):
    """On a GPU scales of int4 are bfloat16 numbers, which vLLM uses. vLLM's kernels quantize activations, if it is
    installed; a row of zeros may have any scale."""
    fmt, x = format_of(name, 32), torch.randn(40, 192, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3] = 0
    q, s = fmt.quantize(x.to(DEVICE))
    plain_q, plain_s = quantize(x, fmt.qmax, fmt.dtype, fmt.group, fmt.scales)
    activations = [quant.quantize_activations(x.to(DEVICE), fmt)] if fmt.activations else []
    for some_q, some_s in [(q, s), *activations]:
        nonzero = torch.arange(40) != 3
        assert torch.allclose(some_s.cpu()[nonzero], plain_s[nonzero], rtol=1e-6, atol=0) and some_q.dtype == fmt.dtype
        differ = some_q.cpu().float() != plain_q.float()  # a quotient midway between two numbers
        assert differ.float().mean() < 1e-3
    assert torch.allclose(dequantize(q, s).cpu(), dequantize(q.cpu(), s.cpu()), rtol=1e-6, atol=0)
    assert name != "w4a16" or DEVICE == "cpu" or torch.equal(s, s.bfloat16().float())


@pytest.mark.parametrize("shape", [(1, 32, 8), (5, 72, 40), (40, 192, 64), (300, 1024, 512)])
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [f32, torch.bfloat16], ids=str)
def test_a_low_bit_product_and_its_gradient_equal_the_cpus(name, shape, dtype):
    """In 16 bits vLLM's kernels multiply, if it is installed and the sizes are multiples of 16."""
    M, K, N = shape
    x, up, weight = ((torch.randn(*size) * 3).to(dtype) for size in ((M, K), (M, N), (N, K)))
    results = []
    for device in (DEVICE, "cpu"):
        linear = torch.nn.Linear(K, N, bias=False)
        linear.weight.data = weight.clone()
        layer, leaf = LowBitLinear.from_linear(linear.to(device), format_of(name)), x.to(device).requires_grad_()
        y = layer(leaf)
        (y * up.to(device)).sum().backward()
        results.append({"y": y.detach(), "dx": leaf.grad, "dw": layer.weight.grad})
    assert relative(*results) < (1e-5 if name == "int8" and dtype == f32 else 0.02)


@pytest.mark.parametrize("name", FORMATS)
def test_aligned_learners_agree_with_the_plain_engine(name):
    check_alignment(HFEngine(tiny_model(1), device=DEVICE, fmt=format_of(name, 32)), name, DEVICE, 0.2)


# -- Sync, and a whole run --------------------------------------------------------------------------------------------

IDS = (uniforms(8 * 32, "probe") * 256).astype(np.int64).reshape(8, 32)


def check_syncs(engine) -> None:
    """Published weights pass the check, and an engine that keeps old weights is found."""
    learner = Learner(tiny_model(1), None, make_cfg(), Comm(DEVICE))
    check = WeightCheck(learner.models.policy.config, IDS)
    for version in range(3):
        synced = check.load(engine, version, learner.published("policy", engine.packed))
        assert version == 0 or synced.changed > 0.5
        engine.sleep()
        moved(learner.models.policy, version)
    check_stale_engine(check, engine, learner)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_syncs_are_checked(dtype):
    check_syncs(HFEngine(tiny_model(2).to(getattr(torch, dtype)), dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("flags", [{}, {"dtype": "bfloat16", "rollout_dtype": "bfloat16"}], ids=str)
def test_a_run_trains_saves_and_resumes(flags, folders, tmp_path):
    """The whole train.py: policy and actor, the plain engine, evaluation, a checkpoint, a resume."""
    paths = {"model": str(folders / "policy"), "actor": str(folders / "actor"), "out": str(tmp_path / "run")}
    flags = {**paths, **flags, "max_tokens": 6, "eval_problems": 4, "save_every": 2, "lr": 1e-3, "actor_lr": 1e-3}
    train.train(make_cfg(objective="jackpot", steps=2, **flags))
    train.train(make_cfg(objective="jackpot", steps=4, resume=True, **flags))
    updates = [line for line in read_metrics(str(tmp_path / "run")) if "loss" in line]
    assert [line["step"] for line in updates] == [0, 1, 2, 3]
    assert all(np.isfinite(line["loss"]) and line["stepped"] for line in updates)


# -- vLLM -------------------------------------------------------------------------------------------------------------

VLLM = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed")


@pytest.fixture
def vllm(vllm_engines):
    """vLLM engines of the tiny actor by their format."""

    def get(name: str = "none"):
        sleep_level = int(name == "none")  # vLLM's allocator serves one engine of a process
        dtype = "bfloat16" if DEVICE == "cuda" else "float32"
        return vllm_engines(fmt=format_of(name, 32), memory_gib=0.1, sleep_level=sleep_level, dtype=dtype)

    return get


@VLLM
def test_vllm_samples_from_the_model_and_its_weight_syncs_are_checked(vllm):
    groups = vllm().generate(PROMPTS, SEEDS, Sampling(max_tokens=12, temperature=0.8), 5, [1])
    assert np.mean(gaps_to_the_model(tiny_model(1), groups)) < (0.1 if DEVICE == "cuda" else 1e-4)
    check_syncs(vllm())


@VLLM
@ON_A_GPU
def test_a_sleeping_engine_frees_its_memory(vllm):
    args = (PROMPTS, SEEDS, Sampling(max_tokens=4), 0, [1])
    before = vllm().generate(*args)
    free = torch.cuda.mem_get_info()[0]
    vllm().sleep()
    given_back = torch.cuda.mem_get_info()[0] - free
    assert given_back > 0.05 * torch.cuda.get_device_properties(0).total_memory  # of a tenth
    after = vllm().generate(*args)
    assert [r.tokens.tolist() for group in before for r in group] == [r.tokens.tolist() for g in after for r in g]


@VLLM
@pytest.mark.parametrize("name", FORMATS)
def test_aligned_learners_agree_with_vllm(name, vllm):
    assert vllm(name).packed == (DEVICE == "cuda" or name != "w4a16")
    # vLLM in bfloat16, learners in float32: bfloat16's gap is as large as that of 8 bits
    check_alignment(vllm(name), name, DEVICE, 0.2 if DEVICE == "cpu" or name == "w4a16" else 0.9)


@VLLM
@ON_A_GPU
def test_vllm_records_the_experts_of_each_token(tmp_path):
    folder = save(model("qwen3_moe", moe_intermediate_size=32), tmp_path)
    torchrun("test_moe.py", "vllm_records_experts", folder, ranks=1)
