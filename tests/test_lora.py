"""LoRA: published weights are W + (alpha / rank) B A, the base is constant, a resumed run is the same run."""

from dataclasses import replace

import numpy as np
import pytest
import standins
import torch
from conftest import f64, logprobs, make_cfg, make_groups, tiny_model
from safetensors.torch import load_file
from test_train import flags, train_here, without_eval
from transformers import AutoModelForCausalLM

import batching
import objectives
import quant
import train
from eval import sampler_of
from learner import Learner
from machinery import session, settings
from machinery.checkpoint.models import load_model
from machinery.log import read_metrics
from machinery.ranks import Comm
from model import Needs, lora
from model.engines import HFEngine

__all__ = ["train_here"]  # a fixture
peft = pytest.importorskip("peft")

RANK, ALPHA = 3, 32
FLAGS = dict(objective="tis", lora_rank=RANK, warmup_steps=0, lr=1e-2)
IDS = np.arange(24).reshape(2, 12) * 7 % 250


def adapted(model=None, dtype=torch.float32):
    """A model, or the tiny policy, with adapters different from zero."""
    model = lora.attach(model or tiny_model(0, layers=2, dtype=dtype), make_cfg(**FLAGS))
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(0.1 * torch.randn(p.shape, generator=g, dtype=f64))
    return model


def merged(model) -> dict:
    return dict(lora.merged(model, model.state_dict(), lambda _, x: x.detach()))


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids)).logits


# -- Merged tensors ---------------------------------------------------------------------------------------------------


def test_the_merged_model_equals_the_adapted_model():
    """All linear layers except the head have adapters; peft computes the adapted model."""
    model = adapted(dtype=f64)
    plain = tiny_model(0, layers=2, dtype=f64)
    base, tensors = plain.state_dict(), merged(model)
    assert list(tensors) == list(base)
    assert {name for name in base if not torch.equal(tensors[name], base[name])} == {n for n in base if "proj" in n}
    assert not torch.allclose(logits(plain), logits(model), atol=1e-2)
    plain.load_state_dict(tensors)
    assert torch.allclose(logits(plain), logits(model), atol=1e-12)


def test_experts_and_routers_have_no_adapters():
    start = standins.model("qwen3_moe", 5).state_dict()
    tensors = merged(adapted(standins.model("qwen3_moe", 5)))
    moved = {name for name, x in start.items() if not torch.equal(x, tensors[name])}
    layers = {f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(2) for part in "qkvo"}
    assert moved == layers and tensors.keys() == start.keys()


@pytest.mark.parametrize("quantized, dtype", [("w4a16", "float32"), ("w4a16", "bfloat16"), ("none", "bfloat16")])
def test_rollouts_use_the_merged_weights(quantized, dtype):
    """Not rounded to 16 bits: the learner adds W x and B A x."""
    cfg, model = make_cfg(**FLAGS, rollout_quant=quantized, quant_group=32, dtype=dtype), adapted()
    got = dict(Learner(model, None, cfg, Comm()).published("policy", packed=False))
    fmt, name = quant.format_of(quantized, 32), "model.layers.1.mlp.up_proj.weight"
    W = merged(model)[name]
    want = quant.dequantize(*quant.quantize(W, fmt.qmax, fmt.dtype, fmt.group)) if fmt else W
    assert torch.equal(got[name], want) and list(got) == list(tiny_model(0, layers=2).state_dict())


# -- The learner ------------------------------------------------------------------------------------------------------


def updated(cfg, model, steps=2):
    """A learner of this model after updates, and its batch."""
    learner = Learner(model, None, cfg, Comm())
    batch = batching.collate(make_groups(2, seed=8), cfg)
    for _ in range(steps):
        logged = learner.backward(batch, objectives.prepare(batch, learner.comm, cfg, {}))
        assert learner.step(logged)["stepped"]
    return learner, batch


def test_the_gradient_of_the_factors_follows_from_the_merged_weights():
    """dA = scale B^T dW and dB = scale dW A^T, with dW of a full learner with the merged weights."""
    cfg, model, plain = make_cfg(**FLAGS), adapted(dtype=f64), tiny_model(0, layers=2, dtype=f64)
    plain.load_state_dict(merged(model))
    batch = batching.collate(make_groups(2, seed=8), cfg)
    for one in (model, plain):
        learner = Learner(one, None, cfg if one is model else replace(cfg, lora_rank=0), Comm())
        learner.backward(batch, objectives.prepare(batch, learner.comm, cfg, {}))
    adapters = dict(model.named_parameters())
    for name, p in plain.named_parameters():
        layer = name.removesuffix(".weight")
        if (A := adapters.get(f"{layer}.lora_A.default.weight")) is None:
            continue
        B = adapters[f"{layer}.lora_B.default.weight"]
        assert torch.allclose(A.grad, ALPHA / RANK * B.detach().T @ p.grad, atol=1e-12), name
        assert torch.allclose(B.grad, ALPHA / RANK * p.grad @ A.detach().T, atol=1e-12), name
        assert adapters[f"{layer}.base_layer.weight"].grad is None


def test_frozen_weights_in_16_bits_give_the_same_updates():
    cfg = make_cfg(**FLAGS, dtype="bfloat16")
    low = lora.attach(tiny_model(0, layers=2), cfg)
    assert {layer.base_layer.weight.dtype for layer in lora.layers(low)} == {torch.bfloat16}
    high = lora.attach(tiny_model(0, layers=2), make_cfg(**FLAGS))  # float32, rounded in every product
    for model in (low, high):
        updated(cfg, model)
    for (name, p), q in zip(low.named_parameters(), high.parameters(), strict=True):
        assert not p.requires_grad or (torch.equal(p, q) and p.dtype == torch.float32 and p.any()), name


def test_evaluations_sample_a_policy_with_frozen_16_bit_layers():
    """The plain torch sampler has the log-probabilities of the merged weights, to bfloat16's precision."""
    cfg = make_cfg(**FLAGS, dtype="bfloat16")
    learner = Learner(adapted(dtype=torch.float32), None, cfg, Comm())
    for layer in lora.layers(learner.models.policy):
        layer.base_layer.bfloat16()
    plain = tiny_model(0, layers=2)
    plain.load_state_dict(dict(learner.named_tensors("policy")))
    merged_logp, base_logp = (HFEngine(m).logprobs(IDS) for m in (plain, tiny_model(0, layers=2)))
    gap = np.abs(sampler_of(learner, "policy", cfg).logprobs(IDS) - merged_logp).mean()
    assert gap < 0.1 * np.abs(base_logp - merged_logp).mean()


def test_vllm_has_the_learners_log_probabilities(vllm_engine):
    cfg = make_cfg(**FLAGS)
    learner, _ = updated(cfg, lora.attach(tiny_model(1), cfg))
    vllm_engine.load(learner.published("policy", vllm_engine.packed))
    logp = logprobs(learner, "policy", IDS)
    assert np.abs(vllm_engine.logprobs(IDS) - logp).max() < 1e-5
    assert np.abs(HFEngine(tiny_model(1)).logprobs(IDS) - logp).max() > 0.1


def test_the_start_model_is_the_policy_without_its_adapters():
    cfg = make_cfg(**FLAGS, kl_coef=0.1)
    learner, batch = updated(cfg, adapted())
    assert learner.models.start is None
    stats = learner.score(batch, Needs(start=True))
    plain = Learner(tiny_model(0, layers=2), None, make_cfg(), Comm())
    assert torch.allclose(stats.logp_start, plain.score(batch, Needs()).logp, atol=1e-6)
    again = learner.score(batch, Needs())  # the adapters are active again
    assert torch.equal(again.logp, stats.logp)
    assert (stats.logp - stats.logp_start).abs().max() > 0.1


# -- A run ------------------------------------------------------------------------------------------------------------


def argv(folders, out, **changes) -> list[str]:
    """A run with a gradient in every update: with an entropy bonus."""
    sizes = dict(rollout_batch=16, train_batch=8, steps=4, max_tokens=6, eval_problems=4)
    return flags(folders, out, actor="none", entropy_coef=0.1, kl_coef=0.01, **sizes, **FLAGS, **changes)


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    """The folder of an undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "catch_signals", lambda: [])
        patch.setattr(session.plot, "draw", lambda runs, out: out)
        train.train(settings.parse(argv(folders, out)))
    return out


def step(out, n):
    return out / "checkpoints" / f"step_{n:06d}"


def bytes_of(folder) -> dict:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_resumed_run_is_the_same_run(whole, folders, tmp_path, train_here):
    """Stopped after update 3, in the middle of a rollout batch: metrics, adapters and merged models bit for bit."""
    out = tmp_path / "run"
    train_here([*argv(folders, out), "--steps=3"])
    train_here(["--resume", f"--out={out}", "--steps=4"])
    for part in ("policy", "policy_adapter"):
        assert bytes_of(step(out, 4) / part) == bytes_of(step(whole, 4) / part)
    assert without_eval(out) == without_eval(whole)
    last = read_metrics(whole)[-1]
    assert last["start_kl"] > 0 and last["stepped"] == 1


def test_a_checkpoint_holds_adapters_for_peft_and_the_merged_model(whole, folders):
    adapter = step(whole, 4) / "policy_adapter"
    layer = "base_model.model.model.layers.0.mlp.up_proj"
    assert {f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"} <= load_file(adapter / lora.FILE).keys()
    exported = load_model(step(whole, 4) / "policy").state_dict()
    base = AutoModelForCausalLM.from_pretrained(folders / "policy")
    by_peft = peft.PeftModel.from_pretrained(base, adapter)
    assert by_peft.peft_config["default"].base_model_name_or_path == str(folders / "policy")
    tensors = by_peft.merge_and_unload().state_dict()
    assert tensors.keys() == exported.keys()
    assert all(torch.allclose(x, tensors[name], atol=1e-6) for name, x in exported.items())
