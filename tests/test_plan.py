"""The plan: states against formulas, activations against autograd's, a peak against a real process."""

import ctypes
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, make_cfg

import bench
import objectives
import plan
import quant
from batching import collate
from learner import Learner
from machinery.ranks import Comm
from model import PolicyAndActor, lora, memory
from plan import footprint
from plan.__main__ import main as print_plan
from results import plans

H, INNER, HEADS, KV, D, V = 64, 160, 4, 2, 24, 515


def small(layers=6, **changes):
    from transformers import Qwen3Config

    sizes = dict(hidden_size=H, intermediate_size=INNER, head_dim=D, vocab_size=V, max_position_embeddings=512)
    heads = dict(num_attention_heads=HEADS, num_key_value_heads=KV, tie_word_embeddings=True)
    depth = dict(num_hidden_layers=layers, layer_types=["full_attention"] * layers)
    return Qwen3Config(**{**sizes, **heads, **depth, **changes})


def planned(prompt=37, ranks=1, gpu_gib=0.0, configs=None, **flags) -> plan.Plan:
    """The plan of a small Qwen3, or of these configs."""
    cfg = make_cfg(**{"objective": "grpo", "max_tokens": 90, **flags})
    return plan.plan_of(cfg, configs or {"policy": small()}, prompt, ranks, gpu_gib)


def parameters_of(V, H, inner, layers, heads, kv, d, tied) -> int:
    """Parameters of a Qwen3: embedding, head, attention with head norms, gated MLP, norms."""
    attention = H * heads * d + 2 * H * kv * d + heads * d * H + 2 * d
    return V * H * (1 if tied else 2) + layers * (attention + 3 * H * inner + 2 * H) + H


P = parameters_of(V, H, INNER, 6, HEADS, KV, D, True)
OF_A_TOKEN = 2 * 6 * KV * D * 4  # bytes of keys and values, layers, heads, size, float32


@pytest.fixture
def unmeasured(monkeypatch):
    """Plans without activations, for tests of different categories: measuring takes a second each."""
    none = footprint.Activations({"policy": 0, "actor": 0}, 0, 0)
    monkeypatch.setattr(plan, "measure", lambda cfg, configs, *batch: none)


def test_states_by_hand():
    cfg = make_cfg(objective="jackpot", actor="base:actor", dtype="bfloat16")
    P = parameters_of(151_936, 4096, 12_288, 36, 32, 8, 128, False)
    assert P == 8_190_735_360  # the authors' number
    states = plan.States.of(cfg, "policy", plans.config_of("Qwen/Qwen3-8B"))
    assert (states.weights, states.gradients, states.optimizer) == (4 * P, 4 * P, 8 * P)
    layer = (P - 2 * 151_936 * 4096 - 4096) // 36
    assert (states.tensor, states.layer) == (4 * 151_936 * 4096, 4 * layer)
    assert states.gathered == 4 * (P - 34 * layer)  # the root and two layers; DDP: no communication in 16 bits


def test_states_of_shards_muon_and_adapters(unmeasured):
    ranks, config = 3, small(dtype=torch.bfloat16)
    cfg = make_cfg(parallel="fsdp", objective="grpo", dtype="bfloat16", optimizer="muon")
    embedding, vectors = V * H, 6 * (2 * D + 2 * H) + H
    optimizer = 8 * (embedding + vectors) + 4 * (P - embedding - vectors)
    made = plan.plan_of(cfg, {"policy": config}, 8, ranks)
    assert config.dtype == torch.bfloat16  # a checkpoint writes its folder in this dtype
    sizes = {"weights, policy": 4 * P, "gradients, policy": 4 * P, "optimizer, policy": optimizer}
    assert {name: made.categories[name] for name in sizes} == {name: size // ranks for name, size in sizes.items()}
    cfg, q, kv = make_cfg(objective="grpo", lora_rank=4), HEADS * D, KV * D
    sides = [(H, q), (H, kv), (H, kv), (q, H), (H, INNER), (H, INNER), (INNER, H)]
    adapters = 4 * 6 * 4 * sum(a + b for a, b in sides)
    assert plan.States.of(cfg, "policy", small()).gradients == adapters
    assert planned(lora_rank=4).checkpoint == 3 * adapters + 2 * P  # two moments, and the model in 16 bits
    low = planned(lora_rank=4, dtype="bfloat16")  # frozen matrices of layers in 16 bits
    assert low.categories["weights, policy"] == 4 * P + adapters - 2 * 6 * sum(a * b for a, b in sides)
    assert low.checkpoint == 3 * adapters + 2 * P


def test_gradients_of_ddp_and_the_start_model_of_fsdp(unmeasured):
    """DDP's buckets stay between updates; FSDP gathers embedding and head of the start model too."""
    one, two = planned(), planned(ranks=2)
    more = {stage: two.of_stage(stage) - one.of_stage(stage) for stage in ("publish", "forward and backward")}
    gradients = one.categories["gradients, policy"]
    assert more["publish"] - more["forward and backward"] == gradients + two.categories["minibatch"]
    sharded = [planned(ranks=2, parallel="fsdp", kl_coef=x).categories["gathered from other ranks"] for x in (0, 1)]
    assert sharded[1] - sharded[0] == plan.States.of(make_cfg(parallel="fsdp"), "policy", small()).gathered


KINDS = [{"dtype": "bfloat16"}, {"gradient_checkpointing": True}, {"lora_rank": 4}]
KINDS.append({"rollout_quant": "int8", "learner_quant": "aligned"})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
def test_activations_equal_autograds_saved_tensors(kind):
    """A forward pass with autograd's saved-tensor hooks, on all six layers; the plan measures two and four."""
    from transformers import AutoModelForCausalLM

    cfg = make_cfg(objective="grpo", **kind)
    rows, prompt, response = 3, 37, 90
    kept = plan.measure(cfg, {"policy": small()}, rows, prompt, response, 0).kept["policy"]
    model = AutoModelForCausalLM.from_config(small(), dtype=torch.float32).eval()
    if cfg.rollout_quant != "none":
        quant.align(model, quant.format_of("int8", cfg.quant_group))
    if cfg.gradient_checkpointing:
        memory.recompute(model)
    if cfg.lora_rank:
        lora.attach(model, cfg)
    models, saved = PolicyAndActor(model, None, memory.compute_type(cfg)), {}

    def see(x):
        storage = x.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return x

    batch = footprint.shapes_of_batch(rows, prompt, response)
    with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
        hidden = models._hidden(model, batch, torch.arange(rows * response), share=False)
    for x in (*model.parameters(), *model.buffers()):
        saved.pop(x.untyped_storage().data_ptr(), None)
    assert sum(saved.values()) + hidden.nbytes == pytest.approx(kept, rel=0.03)


def test_a_micro_batch_has_as_many_rows_as_fit(unmeasured):
    """A row longer than the budget is read anyway; each of two ranks has half of 8 responses."""
    micro = [planned(micro_tokens=tokens, ranks=ranks).micro for tokens, ranks in ((400, 1), (100, 1), (4000, 2))]
    assert micro == [(3, 127), (1, 127), (4, 127)]


CHECKED = dict(objective="jackpot", actor="base:actor", rollout="hf", gradient_checkpointing=True, max_tokens=480)
CHECKED |= dict(train_batch=8, rollout_batch=8, micro_tokens=1024)


def shapes() -> dict:
    sizes = dict(hidden=512, inter=1536, vocab=16_000)
    return {"policy": bench.shaped("", layers=6, **sizes), "actor": bench.shaped("", layers=3, **sizes)}


def memory_of(key: str) -> int:
    """A value of this process in bytes: VmRSS, or VmHWM (the peak)."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])


def trim() -> None:
    """Return freed memory to the system, and reset the peak."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measure_update() -> None:
    """Print the peak of this process in a second update, in bytes above its memory before the models."""
    cfg, models = make_cfg(**CHECKED), shapes()
    trim()
    before = memory_of("VmRSS") - sum(plan.weights_of(model) for model in models.values())
    learner = Learner(models.pop("policy"), models.pop("actor"), cfg, Comm())
    batch = collate(bench.random_groups(np.random.default_rng(0), 1, 480, 16_000), cfg)
    for _ in range(2):  # the first update creates the optimizer states
        trim()
        learner.step(learner.backward(batch, objectives.prepare(batch, Comm(), cfg, {})))
    print(memory_of("VmHWM") - before)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_peak_of_a_real_process():
    made = plan.plan_of(make_cfg(**CHECKED), {key: model.config for key, model in shapes().items()}, 32, 1)
    peak = made.of_stage("forward and backward") - made.categories["engine"]
    command = [sys.executable, "-c", "import test_plan; test_plan.measure_update()"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    printed = subprocess.run(command, env=env, cwd=ROOT / "tests", capture_output=True, text=True, check=True).stdout
    assert peak == pytest.approx(int(printed.split()[-1]), rel=0.1)


def test_stages_sum_their_categories():
    made = planned()
    c = made.categories
    states = c["weights, policy"] + c["optimizer, policy"]
    assert made.of_stage("roll out") == states + c["engine"]
    assert made.of_stage("publish") == states + c["engine"] + c["a tensor to publish, and the weight check"]
    busy = c["gradients, policy"] + c["activations, policy"] + c["logits, or a layer's backward"]
    busy += c["minibatch"]
    assert made.of_stage("forward and backward") == states + busy + c["engine"]  # the torch engine does not sleep
    assert made.of_stage("ref pass") == states + c["a forward without gradient"] + c["engine"]
    assert made.peak == max(map(made.of_stage, made.stages))
    assert planned(kl_coef=0.1).of_stage("roll out") == states + c["engine"] + 4 * P  # the frozen start model
    assert made.checkpoint == 4 * P * 4 - 2 * P  # float32 weights, two moments, and 16-bit weights for use


BATCH = {"train_batch": 16, "rollout_batch": 16, "group_size": 8}


@pytest.mark.parametrize("case, K", [({}, 0), ({"objective": "jackpot", "obrs_topk": 20}, 20)])
def test_a_minibatch_has_the_size_of_its_tensors(unmeasured, case, K):
    """Without the ref pass, which adds a column of log-probabilities. obrs_z=approx adds the policy's top-K."""
    cfg = make_cfg(**{"objective": "tis", **BATCH, **case})
    batch = collate(bench.random_groups(np.random.default_rng(0), 2, 90, 500, K), cfg)
    one = planned(prompt=32, **BATCH, **case).categories["minibatch"]
    assert 1 < one / sum(x.nbytes for x in batch.tensors().values()) < 1.5
    approx = planned(prompt=32, obrs_z="approx", **BATCH, **case).categories["minibatch"]
    assert approx - one == 16 * 90 * 16 * K


def test_a_published_tensor_by_hand():
    """The embedding twice if it is larger than the logits of the weight check."""
    assert planned().categories["a tensor to publish, and the weight check"] == 4 * V * H + 4 * V * 2048
    large = planned(configs={"policy": small(vocab_size=1_200_000)})
    assert large.categories["a tensor to publish, and the weight check"] == 2 * 4 * 1_200_000 * H


def test_vllm_sleeps_on_a_gpu(unmeasured):
    """During evaluation the engine is awake."""
    gpu = dict(rollout="vllm", rollout_memory=0.5, rollout_dtype="bfloat16")
    asleep, cpu = planned(gpu_gib=10.0, **gpu), planned(**gpu)
    assert asleep.categories["engine"] == 5 * plan.GIB
    small_share = make_cfg(objective="grpo", **{**gpu, "rollout_memory": 0.4})
    assert "more than --rollout_memory=0.4" in plan.verdict(small_share, {}, 37, asleep, 10.0)[1]
    for stage in ("forward and backward", "evaluate"):
        assert "engine" in cpu.stages[stage] and "engine" not in asleep.stages[stage]
    for made in (asleep, cpu):
        assert made.of_stage("evaluate") == made.of_stage("roll out")


def test_bytes_of_an_engine(unmeasured):
    """At least its weights and one row, divided over its ranks; none if remote samplers have it."""

    def engine(ranks=2, rollout="vllm", **changes):
        cfg = replace(make_cfg(objective="grpo", max_tokens=90, rollout=rollout), **changes)
        return plan.plan_of(cfg, {"policy": small()}, 37, ranks, 1e-4).categories["engine"]

    assert engine() == 4 * P + 127 * OF_A_TOKEN
    assert engine(rollout_tp=2) == (4 * P) // 2 + 127 * OF_A_TOKEN // 2
    assert engine(rollout="hf", rollout_batch=64) == 4 * P + 32 * 127 * OF_A_TOKEN  # a cache for a rank's responses
    assert engine(samplers="folder") == engine(samplers="folder", rollout="hf") == 0


TWO = {"policy": small(), "actor": small(3)}


def test_an_evaluation_by_hand(unmeasured):
    """A second model needs a second engine, or a cache in plain torch, and under FSDP a copy."""

    def peaks(configs, ranks=2, **changes):
        actor = "none" if len(configs) == 1 else "base:actor"
        return planned(ranks=ranks, configs=configs, **{"eval_problems": 101, "actor": actor, **changes})

    def evaluation(*args, **changes):
        return peaks(*args, **changes).categories["evaluation"]

    one = {"policy": small()}
    cache = 51 * 127 * OF_A_TOKEN  # a rank's problems
    assert evaluation(one) == 0 == evaluation(TWO, eval_every=-1)
    assert evaluation(one, eval_engine="torch") == cache == evaluation(TWO)
    assert evaluation(one, eval_engine="torch", eval_problems=9999) == 256 * 127 * OF_A_TOKEN  # at most 256 at once
    assert evaluation(TWO, parallel="fsdp") == 4 * P + cache
    assert evaluation(TWO, parallel="fsdp", ranks=1) == 101 * 127 * OF_A_TOKEN  # one rank, so no sharding
    vllm = dict(rollout="vllm", rollout_memory=0.25, eval_engine="second")
    second = peaks(TWO, gpu_gib=10.0, **vllm)  # only the first engine of a process can sleep
    assert second.categories["evaluation"] == second.categories["second engine"] == 2.5 * plan.GIB
    assert all("second engine" in needed for needed in second.stages.values())
    assert peaks(TWO, gpu_gib=10.0, eval_every=-1, **vllm).categories["second engine"] == 0
    sizes = [peaks(TWO, rollout_dtype=x, **vllm).categories for x in ("float32", "bfloat16")]  # in the learner's dtype
    assert sizes[0]["second engine"] == sizes[1]["second engine"] and sizes[0]["engine"] > sizes[1]["engine"]
    remote = evaluation(TWO, samplers="folder", gpu_gib=1e-6, **vllm)  # plain torch evaluates the actor
    assert remote == max(4 * P + 127 * OF_A_TOKEN, cache // 2)
    half, whole = 2 * 2**30 // OF_A_TOKEN, 4 * 2**30 // OF_A_TOKEN  # of the tokens held at once
    assert evaluation(one, eval_engine="torch", max_tokens=half) == whole * OF_A_TOKEN


BIG = dict(objective="grpo", max_tokens=400, micro_tokens=8000, train_batch=256, rollout_batch=256)


def test_proposals_are_tried_in_order(monkeypatch):
    def known(cfg, configs, rows, *more):
        return footprint.Activations({"policy": rows * (1 if cfg.gradient_checkpointing else 8) << 20}, 0, 0)

    monkeypatch.setattr(plan, "measure", known)
    monkeypatch.setattr(plan, "publishing", lambda *args: 0)
    cfg, configs = make_cfg(**BIG), {"policy": small()}
    made = plan.plan_of(cfg, configs, 37, 2)

    def verdict(size) -> tuple[bool, str]:
        return plan.verdict(make_cfg(**BIG), configs, 37, made, size / plan.GIB)

    assert verdict(made.peak)[0] and "it fits" in verdict(made.peak)[1]
    words, before = [], made.peak
    for name, value in {"gradient_checkpointing": True, "micro_tokens": 437, "parallel": "fsdp"}.items():
        cfg, words = replace(cfg, **{name: value}), [*words, f"--{name}={value}"]
        after = plan.plan_of(cfg, configs, 37, 2).peak
        assert after < before and f"; with {', '.join(words)} it needs" in verdict((after + before) / 2)[1]
        before = after
    sentence = verdict(1e3)[1]
    assert "do not save enough" in sentence and sentence.count("fsdp") == 1 and "fsdp on 64 ranks" in sentence
    whole = make_cfg(objective="grpo", train_batch=48, rollout_batch=48)  # 8 ranks would split groups of 4
    assert [n for flag, _, n in plan.mends(whole, 20, 1) if "ranks" in flag] == [2, 4]


def test_the_largest_micro_batch_that_fits(monkeypatch):
    """A power of two, or one row."""
    monkeypatch.setattr(plan, "plan_of", lambda cfg, *more: SimpleNamespace(peak=cfg.micro_tokens * plan.GIB // 1024))
    cfg = make_cfg(**BIG)
    for gpu_gib, tokens in ((4.0, 4096), (3.99, 2048), (100.0, 32768), (0.4, 437)):
        assert plan.largest_micro(cfg, {}, 37, 2, gpu_gib) == tokens


def test_the_plan_counts_the_chunks_of_this_gpu():
    """The logits of a step without gradient: 1/64 of the GPU's memory, with a vocabulary that fills a chunk."""
    cfg, config = make_cfg(objective="grpo", max_tokens=2000, micro_tokens=4_000), small(vocab_size=100_000)
    sizes = [plan.plan_of(cfg, {"policy": config}, 40, 1, gib).categories for gib in (8.0, 24.0, 0.0)]
    logits = [size["logits, or a layer's backward"] for size in sizes]
    assert logits[0] < logits[1] < logits[2]


def test_the_command(tmp_path, capsys):
    """A folder with only config.json is enough."""
    small().save_pretrained(tmp_path)
    argv = [f"--model={tmp_path}", "--actor=none", "--lr=1e-6", "--dtype=bfloat16", "--max_tokens=64", "--task=arith"]
    print_plan([*argv, "--max_prompt_tokens=32", "--gpu_gib=80", "--rollout=hf", "--ranks=4"])
    printed = capsys.readouterr().out
    assert "one rank of 4" in printed and "it fits --gpu_gib=80" in printed and "--micro_tokens=32768" in printed
    weights = float(re.search(r"weights, policy +([\d.]+)", printed)[1])
    assert weights == pytest.approx(4 * P / plan.GIB, abs=0.005)


RECIPES = [path for path in plans.RECIPES if path.stem in ("jackpot", "qarl_moe")]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_the_gpus_in_its_head(path, monkeypatch):
    monkeypatch.setattr(plan, "mends", lambda *of_plan: [])  # without proposals
    *cells, says = plans.of_recipe(path)
    assert says.startswith("it fits") or "does not fit" in path.read_text().split("\nobjective")[0], says
    page = (ROOT / "results" / "plans.md").read_text()
    rows = re.findall(r"^\| ([\w, ]+) \| \d", page, re.MULTILINE)
    assert {r.stem for r in plans.RECIPES} <= set(", ".join(rows).split(", "))
    assert f"| {' | '.join(cells)} | " in page, "run python results/plans.py"
