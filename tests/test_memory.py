"""Memory: activations for the backward pass, reading of weights, dtypes in communication."""

import copy
import shutil

import numpy as np
import pytest
import torch
from conftest import make_cfg, make_groups, tiny_model
from ranks import LOW_BITS, make_learner, one_update, relative
from standins import model, save, tokenizer
from test_models import OWN_PARAMETERS
from torch.distributed.tensor import DTensor
from torchrun import torchrun

import batching
import objectives
import quant
from bench import gpu_parts
from learner import Learner
from machinery.checkpoint.models import load_model
from machinery.ranks import Comm
from model import Needs, lora, memory

f64 = torch.float64


# -- Activations ------------------------------------------------------------------------------------------------------

AGAIN = [
    ({"objective": "jackpot", "actor": "base:actor"}, f64),
    ({"objective": "tis", "entropy_coef": 0.1, "dtype": "bfloat16"}, torch.float32),
    ({"objective": "tbpo", **LOW_BITS, "rollout_quant": "int8"}, torch.float32),
    ({"objective": "tis", "lora_rank": 3, "kl_coef": 0.3}, f64),
]


def bytes_kept(learner, batch, cfg) -> int:
    """Bytes that one update saves for backward passes, without the weights."""
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    stats = objectives.prepare(batch, learner.comm, cfg, {})
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        learner.backward(batch, stats)
    weights = {p.untyped_storage().data_ptr() for p in learner.models.parameters()}
    return sum(n for place, n in kept.items() if place not in weights)


@pytest.mark.parametrize("micro_tokens", [45, 1])
@pytest.mark.parametrize("case, dtype", AGAIN, ids=str)
def test_gradient_checkpointing_gives_the_same_gradient(case, dtype, micro_tokens):
    """With shared prompts, and in the last case with separate prompts."""
    grads = []
    for again in (False, True):
        cfg = make_cfg(**case, micro_tokens=micro_tokens, gradient_checkpointing=again)
        learner, groups = make_learner(cfg, dtype), make_groups(2, seed=3, prompt=(6, 12))
        shared = {share for *_, share in learner._micro(batching.collate(groups, cfg))}
        assert shared == {micro_tokens > 1}
        grads.append(one_update(cfg, learner, groups)[0])
    assert relative(*grads) < 1e-6


@pytest.mark.parametrize("share", [True, False])
def test_gradient_checkpointing_keeps_only_the_layers_inputs(share):
    """Most of the activations of eight layers are not kept, with shared and with separate prompts."""
    kept = []
    for again in (False, True):
        cfg = make_cfg(objective="tis", gradient_checkpointing=again)
        learner = Learner(tiny_model(0, layers=8), None, cfg, Comm())
        batch = batching.collate(make_groups(2, seed=3, prompt=(6, 12)), cfg)
        if not share:
            learner.models.policy.config.sliding_window = 512  # the only effect here: separate prompts
        assert {s for *_, s in learner._micro(batch)} == {share}
        kept.append(bytes_kept(learner, batch, cfg))
    assert kept[1] < 0.25 * kept[0]


def test_routes_are_replayed_in_recomputed_layers():
    """Routes that the router would not choose: the gradient is equal with and without checkpointing, and different
    from the gradient without replay."""
    grads = {}
    for again, replay in ((False, True), (True, True), (False, False)):
        cfg = make_cfg(objective="tis", gradient_checkpointing=again, router_replay=replay, micro_tokens=40)
        learner = Learner(model("qwen3_moe"), None, cfg, Comm())
        groups = make_groups(2, seed=3, prompt=(6, 12), vocab=len(tokenizer()))
        rng = np.random.default_rng(0)
        for group in groups:
            for r in group.responses:
                tokens = len(group.prompt_ids) + len(r.tokens) - 1
                chosen = [rng.permutation(8)[:2] for _ in range(2 * tokens)]
                r.routed = np.array(chosen, np.int16).reshape(tokens, 2, 2)
        grads[again, replay] = one_update(cfg, learner, groups)[0]
    assert relative(grads[False, True], grads[True, True]) < 1e-6
    assert relative(grads[False, True], grads[False, False]) > 1e-2


# -- Weights ----------------------------------------------------------------------------------------------------------


def stored(family: str, folder, **changes) -> str:
    """A model of this family on disk, in bfloat16, in several files."""
    lm = model(family, **changes)
    for name, x in lm.named_buffers():
        if name.endswith("bias"):  # of a router, saved with the weights
            x.copy_(torch.arange(1.0, 1 + len(x)))
    save(lm, folder)
    lm.to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    return str(folder)


def odd_folders(tmp_path) -> list[str]:
    """Folders that need special reading: torch's older format, and tensors without the base model's prefix."""
    older, bare = (tmp_path / name for name in ("older", "bare"))
    save(model("llama"), older)
    torch.save(model("llama", 7).state_dict(), older / "pytorch_model.bin")
    (older / "model.safetensors").unlink()
    save(model("qwen2", 3), bare)
    model("qwen2", 3).model.save_pretrained(tmp_path / "body")
    shutil.copy(tmp_path / "body" / "model.safetensors", bare)
    return [str(older), str(bare)]


def alone(folder: str, **changes) -> Learner:
    cfg = make_cfg(objective="tis", **changes)
    policy = memory.unread(folder)
    return Learner(lora.attach(policy, cfg) if cfg.lora_rank else policy, None, cfg, Comm())


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.timeout(400)
def test_three_ranks_read_the_weights_that_transformers_reads(tmp_path):
    """Tied and untied heads, biases, experts and buffers, from bfloat16 files, and folders in different formats; by one
    process too; and adapters."""
    families = ("qwen2", "phi", "gemma2", "qwen3_moe")
    folders = [stored(family, tmp_path / family) for family in families] + odd_folders(tmp_path)
    folders.append(stored("glm4_moe", tmp_path / "glm4_moe", **OWN_PARAMETERS["glm4_moe"]))
    torchrun("shards.py", ",".join(folders), str(tmp_path / "found.pt"), ranks=3)
    read = torch.load(tmp_path / "found.pt")
    for folder in folders:
        wanted = load_model(folder)
        got = alone(folder).models.policy
        assert same(wanted.state_dict(), read[folder]), folder
        assert same(wanted.state_dict(), got.state_dict()), folder
        assert same(dict(wanted.named_buffers()), dict(got.named_buffers())), folder
        assert {(p.dtype, p.requires_grad, p.is_meta) for p in got.parameters()} == {(torch.float32, True, False)}
        assert len(list(got.parameters())) == len(list(wanted.parameters())), "tied only in one of the two"
    adapted = alone(folders[0], lora_rank=3).models.policy
    assert same(read["adapters"], {n: x for n, x in adapted.state_dict().items() if lora.is_adapters(n)})


def test_new_adapters_are_small_and_change_nothing():
    cfg = make_cfg(objective="tis", lora_rank=3, seed=5)
    first, again = (lora.attach(model("qwen3"), cfg) for _ in range(2))
    different = lora.attach(model("qwen3"), make_cfg(objective="tis", lora_rank=3, seed=6))
    assert same(first.state_dict(), again.state_dict()) and not same(first.state_dict(), different.state_dict())
    A = torch.cat([layer.lora_A["default"].weight.flatten() * layer.in_features**0.5 for layer in lora.layers(first)])
    assert float(A.abs().max()) <= 1 and float(A.std()) == pytest.approx(3**-0.5, rel=0.05)  # uniform in +-1
    assert not any(layer.lora_B["default"].weight.any() for layer in lora.layers(first))


# -- Communication between ranks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank():
    """A process group of one process."""
    with gpu_parts.one_rank("cpu"):
        yield


def logp_of(lm, parallel: str, **changes):
    """Log-probabilities (rows, T) of fixed responses by the learner."""
    cfg = make_cfg(objective="tis", parallel=parallel, **changes)
    comm = Comm()
    comm.on = parallel == "fsdp"
    learner = Learner(lm, None, cfg, comm)
    groups = make_groups(2, seed=3, prompt=(6, 12), vocab=len(tokenizer()))
    return learner.score(batching.collate(groups, cfg), Needs()).logp


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "phi"])
def test_layers_gathered_in_16_bits_equal_one_process(family, one_rank):
    """Bit for bit if norms are exact in bfloat16. With head norms in 16 bits too (Qwen3, as in vLLM),
    log-probabilities are as far from float32 as with autocast alone."""
    lm = model(family).to(torch.bfloat16).float()
    alone, shards = (logp_of(copy.deepcopy(lm), parallel, dtype="bfloat16") for parallel in ("ddp", "fsdp"))
    exact = logp_of(lm, "ddp")
    if not family.startswith("qwen3"):
        assert torch.equal(alone, shards)
    errors = [float((x - exact).abs().mean()) for x in (alone, shards)]
    assert errors[0] > 0 and 0.5 < errors[1] / errors[0] < 2


def test_dtypes_of_gathered_parameters(one_rank):
    """Matrices in 16 bits, gradients summed in float32; low-bit layers in float32, quantized as published."""
    aligned = {"dtype": "bfloat16", **LOW_BITS, "rollout_quant": "int8"}
    for flags, types in (({"dtype": "bfloat16"}, {torch.bfloat16}), (aligned, {None})):
        cfg = make_cfg(objective="tis", parallel="fsdp", **flags)
        learner = Learner(model("qwen3"), None, cfg, Comm())
        groups = [layer._get_fsdp_state()._fsdp_param_groups for layer in learner.models.policy.model.layers]
        assert learner.sharded and {p.mp_policy.param_dtype for (group,) in groups for p in group.fsdp_params} == types
        grads = one_update(cfg, learner, make_groups(2, seed=3, vocab=len(tokenizer())))[0]
        assert {x.dtype for x in grads.values()} == {torch.float32}
    layer = learner.models.policy.model.layers[0].mlp.up_proj
    sent = dict(learner.published("policy", True))
    q, s = quant.quantize(layer.weight.full_tensor().bfloat16(), quant.int8_qmax(), torch.int8)
    assert torch.equal(sent["model.layers.0.mlp.up_proj.weight"], q)
    learner.wrapped.unshard()
    learner.models.policy.model.layers[0].unshard()
    used = layer.quantized()
    assert torch.equal(used[0], q) and torch.equal(used[1], s) and not layer.cached


@pytest.mark.parametrize(
    "changes, matrix",
    [
        ({"rollout_dtype": "bfloat16"}, torch.bfloat16),
        ({"rollout_dtype": "float32"}, torch.float32),
        ({"rollout_dtype": "float32", "dtype": "bfloat16"}, torch.bfloat16),
        ({"rollout_dtype": "bfloat16", "lm_head_fp32": True}, torch.bfloat16),
        ({"rollout_dtype": "bfloat16", "dtype": "bfloat16", "exact": True}, torch.float32),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_travel_to_an_engine_in_its_precision(changes, matrix, tied, one_rank, monkeypatch):
    """A matrix is rounded to the learner's or the engine's 16 bits before it is gathered, but not a float32 head."""
    cfg = make_cfg(objective="tis", parallel="fsdp", **changes)
    learner, gathered = Learner(model("qwen2" if tied else "qwen3"), None, cfg, Comm()), []
    masters = dict(learner.named_tensors("policy"))
    full_tensor = DTensor.full_tensor
    monkeypatch.setattr(DTensor, "full_tensor", lambda x: gathered.append((x.ndim, x.dtype)) or full_tensor(x))
    sent = dict(learner.published("policy", False))
    head = ["lm_head.weight", "model.embed_tokens.weight"][: (1 + tied) * cfg.lm_head_fp32]
    assert set(gathered) == {(1, torch.float32), (2, matrix), *[(2, torch.float32) for _ in head]}
    assert list(sent) == list(masters)
    for name, x in sent.items():
        want = masters[name].to(matrix) if masters[name].ndim > 1 and name not in head else masters[name]
        assert x.dtype == want.dtype and torch.equal(x, want), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_routers_reach_an_engine_as_the_learner_uses_them(dtype):
    cfg = make_cfg(objective="tis", rollout_dtype="bfloat16", dtype=dtype)
    learner = Learner(model("qwen3_moe"), None, cfg, Comm())
    sent, masters = dict(learner.published("policy", False)), dict(learner.named_tensors("policy"))
    kept = {name for name, x in sent.items() if x.ndim > 1 and torch.equal(x, masters[name])}
    assert kept == {f"model.layers.{i}.mlp.gate.weight" for i in range(2) if dtype == "float32"}
