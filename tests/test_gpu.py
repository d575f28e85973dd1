"""GPU versions of CPU tests, and tests that need a GPU. Skipped without a GPU.

python -m pytest tests/test_gpu.py                        # the whole GPU list: python -m bench gpu
GPU_LIST_DEVICE=cpu python -m pytest tests/test_gpu.py    # the same tests on a CPU"""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import make_cfg, make_groups, tiny_model
from ranks import make_learner, one_update
from standins import model, save
from torchrun import torchrun

import batching
import objectives
import train
from bench.gpu_parts import one_rank
from learner import Comm, Learner
from model import Needs
from model.engines import HFEngine, VLLMEngine
from quant import LowBitLinear, dequantize, format_of, product, quantize
from rollout import as_groups, uniforms
from sampling import Sampling
from sync import SyncError, WeightCheck

DEVICE = os.environ.get("GPU_LIST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.timeout(150),
]
ON_A_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU has it")
f64 = torch.float64


def relative(a: dict, b: dict) -> float:
    """|a - b| / |a| over all parameters together."""
    assert a.keys() == b.keys()
    difference = sum(float((a[n].cpu() - b[n].cpu()).double().square().sum()) for n in a)
    return (difference / sum(float(x.double().square().sum()) for x in a.values())) ** 0.5


def gradient(case: dict, dtype, device: str, groups=None, **flags) -> dict:
    """The gradient of one update of the tiny learner, by parameter."""
    cfg = make_cfg(**case, **flags)
    learner = make_learner(cfg, dtype, Comm(device))
    return one_update(cfg, learner, groups or make_groups(4, seed=3, prompt=(6, 12)))[0]


def prompts_and_seeds() -> tuple[list, list]:
    """16 prompts of unequal lengths, 8 responses to each."""
    prompts = [np.array([5 + i, 3, 100 + i, 7][: 2 + i % 3], np.int32) for i in range(16)]
    return prompts, [list(range(9 * i, 9 * i + 8)) for i in range(16)]


# ---------------------------------------------------------------------------------------------------------------------
# Rollouts, gradients
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["compile", "liger"])
@pytest.mark.parametrize("objective", ["grpo", "jackpot"])
def test_kernels_give_the_gradient_up_to_rounding(kernels, objective):
    """In bfloat16 the distance from the float32 gradient is at most 1.5 times the plain layers'."""
    if kernels == "liger" and (DEVICE == "cpu" or not importlib.util.find_spec("liger_kernel")):
        pytest.skip("liger-kernel is not installed, or there is no GPU")
    case = dict(objective=objective, rollout="hf")
    groups = make_groups(4, seed=3, prompt=(6, 12))
    exact = gradient(case, torch.float32, DEVICE, groups)
    half = {**case, "dtype": "bfloat16"}
    plain, fused = (gradient(half, torch.float32, DEVICE, groups, kernels=k) for k in ("plain", kernels))
    assert relative(exact, fused) < 1.5 * relative(exact, plain)
    assert relative(exact, gradient(case, torch.float32, DEVICE, groups, kernels=kernels)) < 1e-5


def test_the_plain_engine_samples_as_on_a_cpu():
    """Tokens are equal unless a draw falls between two roundings; log-probabilities are the model's."""
    args = (*prompts_and_seeds(), Sampling(max_tokens=12, temperature=0.8), 5, [1])
    on_gpu, on_cpu = (HFEngine(tiny_model(0), device=device).generate(*args) for device in (DEVICE, "cpu"))
    lm, equal = tiny_model(0).eval(), 0
    for prompt, group, cpu_group in zip(args[0], on_gpu, on_cpu, strict=True):
        for a, b in zip(group, cpu_group, strict=True):
            equal += np.array_equal(a.tokens, b.tokens)
            ids = torch.from_numpy(np.concatenate([prompt, a.tokens])).long()
            with torch.no_grad():
                logp = (lm(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1] / 0.8).log_softmax(-1)
            want = logp.gather(1, ids[len(prompt) :, None])[:, 0]
            assert np.allclose(a.logp_inf, want, atol=1e-4)
            assert np.allclose(a.topk_logp, logp.topk(5, -1).values, atol=1e-4)
    assert equal >= 126  # of 128


CASES = [
    {"objective": "tis", "kl_coef": 0.3, "entropy_coef": 0.1},
    {"objective": "jackpot"},
    {"objective": "jackpot", "actor": "base:actor", "obrs_target": "new", "distill_direction": "reverse"},
    {"objective": "gepo", "gepo_defence": 4.0, "cppo_beta": 0.5},
    {"objective": "tbpo", "optimizer": "muon"},
]


@pytest.mark.parametrize("micro_tokens", [10**6, 45])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_equals_the_cpus(case, micro_tokens):
    there = gradient(case, f64, "cpu", micro_tokens=10**6)
    assert relative(there, gradient(case, f64, DEVICE, micro_tokens=micro_tokens)) < 1e-6


@pytest.mark.parametrize("flags", [{}, {"actor": "base:actor", "objective": "jackpot"}, {"dtype": "bfloat16"}], ids=str)
def test_gradient_checkpointing_gives_the_same_gradient(flags):
    case, dtype = {"objective": "tis", **flags}, torch.float32 if "dtype" in flags else f64
    once, again = (gradient(case, dtype, DEVICE, gradient_checkpointing=enabled) for enabled in (False, True))
    assert relative(once, again) < (1e-2 if "dtype" in flags else 1e-6)


@pytest.mark.parametrize("dtype, rounding", [("bfloat16", 3e-2), ("float16", 1e-2)])
def test_a_gradient_in_16_bits_is_near_the_gradient_in_32(dtype, rounding):
    exact = gradient({"objective": "tis"}, torch.float32, DEVICE)
    rough = gradient({"objective": "tis", "dtype": dtype}, torch.float32, DEVICE)
    assert 0 < relative(exact, rough) < rounding


def test_offload_gives_the_same_step():
    models = []
    for offload in (False, True):
        cfg = make_cfg(objective="tis", lr=1e-2, offload=offload)
        learner = Learner(tiny_model(0, layers=2), None, cfg, Comm(DEVICE))
        batch = batching.collate(make_groups(2, seed=3), cfg)
        for _ in range(2):
            learner.update(batch, objectives.prepare(batch, learner.comm, cfg, {}))
        moments = [state["exp_avg"] for state in learner.optimizers["policy"][0].state.values()]
        assert {x.device.type for x in moments} == {"cpu" if offload else DEVICE}
        assert {x.is_pinned() for x in moments} == {offload and DEVICE == "cuda"}
        models.append({name: p.detach() for name, p in learner.models.named_parameters()})
    assert relative(*models) < 1e-6


@pytest.mark.parametrize("case", [{"objective": "tis"}, {"objective": "jackpot", "actor": "base:actor"}], ids=str)
def test_shards_of_one_rank_give_the_same_gradient(case):
    plain = gradient(case, f64, DEVICE)
    with one_rank(DEVICE):
        sharded = gradient(case, f64, DEVICE, parallel="fsdp")
    assert relative(plain, sharded) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ends", [[], list(range(0, 256, 9))], ids=["long", "ends"])
def test_sampler_and_learner_are_equal_with_exact(dtype, ends):
    """10^4 tokens, in few and in many micro-batches; with early ends the last rows decode in small batches. This test
    has never run on a GPU: a difference there is a finding."""
    cfg = make_cfg(objective="tis", exact=True, dtype=dtype, rollout_dtype=dtype)
    learner = Learner(tiny_model(0, layers=2, hidden=256), None, cfg, Comm(DEVICE))
    engine = HFEngine(tiny_model(0, layers=2, hidden=256), dtype=dtype, device=DEVICE, exact=True)
    prompts, seeds = prompts_and_seeds()
    sampling = Sampling(max_tokens=80)
    responses = engine.generate(prompts, seeds, sampling, 1, ends)
    batch = batching.collate(as_groups("q", prompts, responses, sampling), cfg)
    assert batch.exists.sum() >= (10**3 if ends else 10**4)
    for micro_tokens in (10**4, 200):
        learner.cfg = make_cfg(**{**vars(cfg), "micro_tokens": micro_tokens})
        gap = (learner.score(batch, Needs()).logp - batch.logp_inf)[batch.exists].abs().max()
        assert float(gap) == 0, f"the largest difference is {float(gap):.3g}"


# ---------------------------------------------------------------------------------------------------------------------
# Low bits
# ---------------------------------------------------------------------------------------------------------------------

FORMATS = ["int8", "fp8", "w4a16"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiled_quantizer_equals_the_plain_one(name, dtype):
    fmt, x = format_of(name, 32), torch.randn(40, 192, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3] = 0
    q, s = fmt.quantize(x.to(DEVICE))
    plain_q, plain_s = quantize.__wrapped__(x, fmt.qmax, fmt.dtype, fmt.group, fmt.scales)
    assert torch.allclose(s.cpu(), plain_s, rtol=1e-6, atol=0) and q.dtype == fmt.dtype
    assert (q.cpu().float() != plain_q.float()).float().mean() < 1e-3  # a quotient midway between two numbers
    assert torch.allclose(dequantize(q, s).cpu(), dequantize(q.cpu(), s.cpu()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(1, 32, 8), (5, 72, 40), (40, 192, 64), (300, 1024, 512)])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_product_equals_that_of_the_dequantized_matrices(name, shape):
    """int8 exact up to float32 rounding; fp8 with its kernel's rounding: bfloat16, and sums in fewer bits."""
    M, K, N = shape
    g, fmt = torch.Generator().manual_seed(1), format_of(name)
    qx, sx = fmt.quantize(torch.randn(M, K, generator=g) * 3)
    qw, sw = fmt.quantize(torch.randn(N, K, generator=g))
    want = dequantize(qx, sx).double() @ dequantize(qw, sw).double().t()
    got = product(*(x.to(DEVICE) for x in (qx, sx, qw, sw))).cpu().double()
    assert got.shape == want.shape
    assert (got - want).abs().max() <= (1e-5 if name == "int8" else 0.02) * want.abs().max()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_aligned_layer_and_its_gradient_equal_the_cpus(name, dtype):
    g = torch.Generator().manual_seed(2)
    x, up = torch.randn(3, 7, 64, generator=g).to(dtype), torch.randn(3, 7, 48, generator=g).to(dtype)
    weight, results = torch.randn(48, 64, generator=g), []
    for device in (DEVICE, "cpu"):
        linear = torch.nn.Linear(64, 48, bias=False)
        linear.weight.data = weight.clone()
        layer = LowBitLinear.from_linear(linear.to(device, dtype), format_of(name, 32))
        leaf = x.to(device).requires_grad_()
        y = layer(leaf)
        (y * up.to(device)).sum().backward()
        results.append({"y": y.detach(), "dx": leaf.grad, "dw": layer.weight.grad})
    assert results[0]["y"].dtype == dtype
    assert relative(*results) < 0.02


@ON_A_GPU
def test_scales_of_int4_are_bfloat16_numbers():
    """vLLM keeps scales in 16 bits, so it uses the learner's scales exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        _, s = format_of("w4a16", 32).quantize(torch.randn(16, 64, device=DEVICE) * 0.02)
        assert s.dtype == torch.float32 and torch.equal(s, s.to(dtype).float())


@torch.no_grad()
def move(learner, seed: int) -> None:
    """Change every weight by about 2 %."""
    g = torch.Generator().manual_seed(seed)
    for p in learner.models.parameters():
        p.mul_((1 + 0.02 * torch.randn(p.shape, generator=g)).to(p.device))


def learners(name: str, *kinds: str):
    for kind in kinds:
        cfg = make_cfg(objective="tis", rollout_quant=name, learner_quant=kind, quant_group=32)
        yield Learner(tiny_model(1), None, cfg, Comm(DEVICE))


def mismatch(engine, learner) -> float:
    """Mean |p_inf - p_ref| over the tokens of 16 groups sampled by the engine."""
    prompts, seeds = prompts_and_seeds()
    responses = engine.generate(prompts, seeds, Sampling(max_tokens=12), 0, [1])
    b = batching.collate(as_groups("q", prompts, responses, Sampling()), learner.cfg)
    return float((learner.score(b, Needs()).logp.exp() - b.logp_inf.exp()).abs()[b.mask].mean())


def check_alignment(engine, name: str) -> None:
    """An aligned learner computes the engine's probabilities, before and after syncs; a plain learner does not."""
    aligned, plain = learners(name, "aligned", "none")
    check = WeightCheck(aligned.models.policy.config, np.arange(2, 14), engine.fmt)
    for version in range(3):
        for learner in (aligned, plain):
            move(learner, version)
        synced = check.load(engine, version, aligned.published("policy", engine.packed))
        assert synced.changed > 0.5 or version == 0
        assert mismatch(engine, aligned) < 0.2 * mismatch(engine, plain)


@pytest.mark.parametrize("name", FORMATS)
def test_aligned_learners_agree_with_the_plain_engine(name):
    fmt = format_of(name, 32)
    check_alignment(HFEngine(tiny_model(1), device=DEVICE, fmt=fmt), name)


# ---------------------------------------------------------------------------------------------------------------------
# Sync, and a whole run
# ---------------------------------------------------------------------------------------------------------------------

IDS = (uniforms(8 * 32, "probe") * 256).astype(np.int64).reshape(8, 32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_syncs_are_checked(dtype):
    learner = Learner(tiny_model(1), None, make_cfg(), Comm(DEVICE))
    engine = HFEngine(tiny_model(2).to(getattr(torch, dtype)), dtype=dtype, device=DEVICE)
    check, changed = WeightCheck(learner.models.policy.config, IDS), []
    for version in range(4):
        changed.append(check.load(engine, version, learner.published("policy", False)).changed)
        move(learner, version)
    assert min(changed[1:]) > 0.5
    engine.load = lambda tensors: [None for _ in tensors]  # read, but not loaded
    with pytest.raises(SyncError, match="the engine still holds the bytes of version 3"):
        check.load(engine, 4, learner.published("policy", False))


@pytest.mark.parametrize("flags", [{}, {"dtype": "bfloat16", "rollout_dtype": "bfloat16"}], ids=str)
def test_a_run_trains_saves_and_resumes(flags, folders, tmp_path):
    """The whole train.py: policy and actor, the plain engine, evaluation, a checkpoint, a resume."""
    flags_of_run = {
        "model": str(folders / "policy"),
        "actor": str(folders / "actor"),
        "out": str(tmp_path / "run"),
        **flags,
    }
    flags_of_run |= {"max_tokens": 6, "eval_problems": 4, "save_every": 2, "lr": 1e-3, "actor_lr": 1e-3}
    train.train(make_cfg(objective="jackpot", steps=2, **flags_of_run))
    train.train(make_cfg(objective="jackpot", steps=4, resume=True, **flags_of_run))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "loss" in line]
    assert [line["step"] for line in updates] == [0, 1, 2, 3]
    assert all(np.isfinite(line["loss"]) and line["stepped"] for line in updates)


# ---------------------------------------------------------------------------------------------------------------------
# vLLM
# ---------------------------------------------------------------------------------------------------------------------

VLLM = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed")


@pytest.fixture(scope="module")
def vllm(folders):
    """vLLM engines of the tiny actor by their format, each started once."""
    engines = {}

    def get(name: str = "none") -> VLLMEngine:
        if name not in engines:
            settings = {"max_len": 64, "max_logprobs": 20, "memory_gib": 0.1, "fmt": format_of(name, 32)}
            settings["sleep_level"] = int(name == "none")  # vLLM's allocator serves one engine of a process
            engines[name] = VLLMEngine(
                str(folders / "actor"), dtype="bfloat16" if DEVICE == "cuda" else "float32", **settings
            )
        return engines[name]

    yield get
    for engine in engines.values():
        engine.close()


@VLLM
@pytest.mark.timeout(300)
def test_vllm_samples_from_the_model(vllm):
    prompts, seeds = prompts_and_seeds()
    groups = vllm().generate(prompts, seeds, Sampling(max_tokens=12, temperature=0.8), 5, [1])
    lm, gaps = tiny_model(1).eval(), []
    for prompt, group in zip(prompts, groups, strict=True):
        for r in group:
            ids = torch.from_numpy(np.concatenate([prompt, r.tokens])).long()
            with torch.no_grad():
                logp = (lm(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1] / 0.8).log_softmax(-1)
            gaps.append(np.abs(r.logp_inf - logp.gather(1, ids[len(prompt) :, None])[:, 0].numpy()).mean())
    assert np.mean(gaps) < (0.05 if DEVICE == "cuda" else 1e-4)


@VLLM
@pytest.mark.timeout(300)
def test_weight_syncs_of_vllm_are_checked(vllm):
    check_syncs(vllm())


def check_syncs(engine) -> None:
    """Published weights pass the check, and an engine that keeps old weights is found."""
    learner = Learner(tiny_model(1), None, make_cfg(), Comm(DEVICE))
    check, changed = WeightCheck(learner.models.policy.config, IDS), []
    for version in range(4):
        changed.append(check.load(engine, version, learner.published("policy", engine.packed)).changed)
        engine.sleep()
        move(learner, version)
    assert min(changed[1:]) > 0.5
    load = engine.load
    engine.load = lambda tensors: [None for _ in tensors]
    with pytest.raises(SyncError, match="the engine still holds the bytes of version 3"):
        check.load(engine, 4, learner.published("policy", engine.packed))
    engine.load = load


@VLLM
@ON_A_GPU
@pytest.mark.timeout(300)
def test_an_engine_in_a_separate_process_gets_new_weights_by_ipc(folders):
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [sys.executable, __file__, str(folders / "actor")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def sync_by_ipc(folder: str) -> None:
    """The test in that process."""
    engine = VLLMEngine(folder, max_len=64, max_logprobs=20, memory_gib=0.1, dtype="bfloat16", sleep_level=1)
    assert engine.apart
    check_syncs(engine)
    engine.close()


@VLLM
@ON_A_GPU
@pytest.mark.timeout(300)
def test_a_sleeping_engine_frees_its_memory(vllm):
    engine = vllm()
    prompts, seeds = prompts_and_seeds()
    args = (prompts, seeds, Sampling(max_tokens=4), 0, [1])
    before = engine.generate(*args)
    free = torch.cuda.mem_get_info()[0]
    engine.sleep()
    given_back = torch.cuda.mem_get_info()[0] - free
    assert given_back > 0.05 * torch.cuda.get_device_properties(0).total_memory  # of a tenth
    after = engine.generate(*args)
    assert all(
        np.array_equal(a.tokens, b.tokens)
        for one, other in zip(before, after, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@VLLM
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FORMATS)
def test_aligned_learners_agree_with_vllm(name, vllm):
    engine = vllm(name)
    assert engine.packed == (DEVICE == "cuda" or name != "w4a16")
    check_alignment(engine, name)


@VLLM
@ON_A_GPU
@pytest.mark.timeout(300)
def test_vllm_records_the_experts_of_each_token(tmp_path):
    folder = save(model("qwen3_moe", moe_intermediate_size=32), tmp_path)
    torchrun("test_moe.py", "vllm_records_experts", folder, ranks=1)


if __name__ == "__main__":
    sync_by_ipc(sys.argv[1])
