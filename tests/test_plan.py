"""The plan: states against formulas, activations against autograd's, a peak against a real process."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, make_cfg

import config
import plan
import quant
from machinery import settings
from machinery.flags import UserError
from model import PolicyAndActor, lora, memory
from plan import footprint
from plan.__main__ import main as print_plan
from results import plans
from rollout import probe_ids

SMALL = dict(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    vocab_size=515,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    layer_types=["full_attention"] * 6,
)


def small(**changes):
    from transformers import Qwen3Config

    return Qwen3Config(**{**SMALL, **changes})


def parameters_of(V, H, inner, layers, heads, kv, d, tied) -> int:
    """Parameters of a Qwen3: embedding, head, attention with head norms, gated MLP, norms."""
    attention = H * heads * d + 2 * H * kv * d + heads * d * H + 2 * d
    return V * H * (1 if tied else 2) + layers * (attention + 3 * H * inner + 2 * H) + H


@pytest.fixture
def unmeasured(monkeypatch):
    """Plans without activations, for tests of different categories: measuring takes a second each."""
    none = footprint.Activations({"policy": 0, "actor": 0}, 0, 0)
    monkeypatch.setattr(plan, "measure", lambda cfg, configs, *batch: none)
    monkeypatch.setattr(plan, "publishing", lambda *args: 0)


@pytest.fixture
def measured_once(monkeypatch):
    """Activations are measured once for each set of the learner's flags."""
    measure, memory_of_flags = plan.measure, {}

    def remembered(cfg, configs, *batch):
        key = repr((cfg.micro_tokens, cfg.gradient_checkpointing, configs, batch))
        if key not in memory_of_flags:
            memory_of_flags[key] = measure(cfg, configs, *batch)
        return memory_of_flags[key]

    monkeypatch.setattr(plan, "measure", remembered)


def test_states_by_hand():
    cfg = make_cfg(objective="jackpot", actor="base:actor", dtype="bfloat16")
    P = parameters_of(151_936, 4096, 12_288, 36, 32, 8, 128, False)
    assert P == 8_190_735_360  # the authors' number
    states = plan.States.of(cfg, "policy", plans.config_of("Qwen/Qwen3-8B"))
    assert (states.weights, states.gradients, states.optimizer) == (4 * P, 4 * P, 8 * P)
    assert states.tensor == 4 * 151_936 * 4096
    layer = (P - 2 * 151_936 * 4096 - 4096) // 36
    assert states.layer == 4 * layer
    root = P - 36 * layer
    assert (states.gathered, states.travels) == (4 * (root + 2 * layer), 4 * P)  # DDP: no communication in 16 bits


def test_states_of_shards_muon_and_adapters():
    P, E = parameters_of(515, 64, 160, 6, 4, 2, 24, True), 515 * 64
    config, ranks = small(), 3
    cfg = make_cfg(objective="grpo", parallel="fsdp", dtype="bfloat16", optimizer="muon")
    states = plan.States.of(cfg, "policy", config)
    vectors = 6 * (2 * 24 + 2 * 64) + 64
    assert states.optimizer == 8 * (E + vectors) + 4 * (P - E - vectors)
    assert states.travels == 4 * (E + 64) + 2 * (P - E - 64)
    planned = plan.plan_of(cfg, {"policy": config}, 8, ranks)
    assert planned.categories["weights, policy"] == 4 * P // ranks
    assert planned.categories["gradients, policy"] == 4 * P // ranks
    assert planned.categories["optimizer, policy"] == states.optimizer // ranks
    assert planned.moved == int(2 / 3 * (4 * P + 2 * states.travels))
    assert planned.host == 4 * P // ranks + states.optimizer // ranks  # copies for a checkpoint
    offloaded = plan.plan_of(replace(cfg, offload=True, parallel="ddp"), {"policy": config}, 8, ranks)
    assert offloaded.host == 4 * P + states.optimizer // ranks + states.optimizer
    cfg = make_cfg(objective="grpo", lora_rank=4)
    states = plan.States.of(cfg, "policy", config)
    H, inner, q, kv = 64, 160, 4 * 24, 2 * 24
    sides = [(H, q), (H, kv), (H, kv), (q, H), (H, inner), (H, inner), (inner, H)]
    adapters = 4 * 6 * 4 * sum(a + b for a, b in sides)
    assert states.gradients == adapters
    size = plan.plan_of(cfg, {"policy": config}, 8, 1).checkpoint
    assert size == 3 * adapters + 2 * P  # adapters, two moments, and the model in 16 bits


def test_a_plan_does_not_change_configurations():
    """A checkpoint writes its folder in the configuration's dtype."""
    config = small(dtype=torch.bfloat16)
    plan.plan_of(make_cfg(objective="grpo"), {"policy": config}, 8, 1)
    assert config.dtype == torch.bfloat16


KINDS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "checkpointing": {"gradient_checkpointing": True},
    "int8": {"rollout_quant": "int8", "learner_quant": "aligned"},
    "adapters": {"lora_rank": 4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_activations_equal_autograds_saved_tensors(kind):
    """A forward pass with autograd's saved-tensor hooks, on all six layers; the plan measures two and four."""
    from transformers import AutoModelForCausalLM

    cfg = make_cfg(objective="grpo", **KINDS[kind])
    rows, prompt, response = 3, 37, 90
    kept = plan.measure(cfg, {"policy": small()}, rows, prompt, response).kept["policy"]
    model = AutoModelForCausalLM.from_config(small(), dtype=torch.float32).eval()
    if cfg.rollout_quant != "none":
        quant.align(model, quant.format_of("int8", cfg.quant_group))
    if cfg.gradient_checkpointing:
        memory.recompute(model)
    if cfg.lora_rank:
        lora.attach(model, cfg)
    models = PolicyAndActor(model, None, memory.compute_type(cfg))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    weights |= {b.untyped_storage().data_ptr() for b in model.buffers()}
    saved = {}

    def see(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    batch = footprint.shapes_of_batch(rows, prompt, response)
    with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
        hidden = models._hidden(model, batch, torch.arange(rows * response), share=False)
    assert sum(saved.values()) + hidden.nbytes == pytest.approx(kept, rel=0.03)


def test_a_micro_batch_has_as_many_rows_as_fit():
    cfg = make_cfg(objective="grpo", max_tokens=90, micro_tokens=400)
    planned = plan.plan_of(cfg, {"policy": small()}, 37, 1)
    assert planned.micro == (3, 127)
    one = plan.plan_of(make_cfg(objective="grpo", max_tokens=90, micro_tokens=100), {"policy": small()}, 37, 1)
    assert one.micro == (1, 127)  # a row longer than the budget is read anyway
    assert one.sum_of("activations") == pytest.approx(planned.sum_of("activations") / 3, rel=0.01)
    few = plan.plan_of(make_cfg(objective="grpo", max_tokens=90, micro_tokens=4000), {"policy": small()}, 37, 2)
    assert few.micro == (4, 127)  # each of two ranks has half of 8 responses


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_peak_of_a_real_process():
    name = "two models, checkpointing"
    ranks, flags = plans.CASES[name]
    cfg = plans.configured(flags, ranks)
    planned = plan.plan_of(cfg, {key: m.config for key, m in plans.models_of(cfg).items()}, plans.PROMPT, ranks)
    peak = planned.of_stage("forward and backward") - planned.categories["engine"]
    assert peak == pytest.approx(plans.run_case(ranks, flags), rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", plans.PUBLISHED)
def test_the_peak_of_a_real_sync(name):
    dtype = plans.PUBLISHED[name]
    assert plans.plan_of_sync(dtype) == pytest.approx(plans.run_script(1, f"--sync={dtype}"), rel=0.1)


def test_stages_sum_their_categories():
    cfg = make_cfg(objective="grpo", max_tokens=90)
    planned = plan.plan_of(cfg, {"policy": small()}, 37, 1)
    c = planned.categories
    states = c["weights, policy"] + c["optimizer, policy"]
    assert planned.of_stage("roll out") == states + c["engine"]
    assert planned.of_stage("publish") == states + c["engine"] + c["a tensor to publish, and its proof"]
    busy = c["gradients, policy"] + c["activations, policy"] + c["logits, or a layer's backward"]
    assert planned.of_stage("forward and backward") == states + busy + c["engine"]  # the torch engine does not sleep
    assert planned.of_stage("ref pass") == states + c["a forward without gradient"] + c["engine"]
    assert planned.peak == max(map(planned.of_stage, planned.stages))
    held = plan.plan_of(make_cfg(objective="grpo", max_tokens=90, kl_coef=0.1), {"policy": small()}, 37, 1)
    assert held.of_stage("roll out") == states + c["engine"] + 4 * P_SMALL  # the frozen model of --kl_coef
    assert (
        planned.checkpoint == 4 * P_SMALL * 4 - 2 * P_SMALL
    )  # float32 weights, two moments, and 16-bit weights for use


P_SMALL = parameters_of(515, 64, 160, 6, 4, 2, 24, True)


def test_the_weight_check_by_hand():
    """With a large vocabulary: a chunk of the logits, and the head if it is not the learner's tensor (an engine in 16
    bits, or gathered shards)."""
    V, H = 151_936, 64
    config, embedding, piece = small(vocab_size=V), 4 * V * H, 4 * V * (2**25 // V)
    cfg = make_cfg(objective="grpo", max_tokens=200)
    ids = probe_ids(237, V)
    assert ids.shape == (4, 128)
    all_logits = 4 * V * 4 * 127  # one chunk on a GPU
    of_proof = footprint.of_proof(cfg, config, ids, gathered=False)
    assert of_proof == pytest.approx(piece, rel=0.02)
    rounded = footprint.of_proof(replace(cfg, rollout_dtype="bfloat16"), config, ids, gathered=False)
    assert rounded == pytest.approx(embedding + piece, rel=0.02)
    assert footprint.of_proof(cfg, config, ids, gathered=True) == pytest.approx(rounded, rel=0.01)
    assert footprint.of_scoring(cfg, {"policy": config}, *ids.shape) == pytest.approx(2 * all_logits, rel=0.02)
    planned = plan.plan_of(cfg, {"policy": config}, 37, 1)
    assert planned.categories["a tensor to publish, and its proof"] == pytest.approx(2 * all_logits, rel=0.02)
    wide = small(vocab_size=V, hidden_size=512)
    planned = plan.plan_of(cfg, {"policy": wide}, 37, 1).categories["a tensor to publish, and its proof"]
    assert planned == max(2 * 4 * V * 512, footprint.of_proof(cfg, wide, ids, gathered=False))


def test_vllm_sleeps_on_a_gpu(unmeasured):
    gpu = dict(objective="grpo", rollout="vllm", rollout_memory=0.5)
    planned = plan.plan_of(make_cfg(**gpu), {"policy": small()}, 37, 1, gpu_gib=10.0)
    assert planned.categories["engine"] == 5 * plan.GIB
    cpu = plan.plan_of(make_cfg(**gpu), {"policy": small()}, 37, 1)
    for stage in ("forward and backward", "evaluate"):
        assert "engine" in cpu.stages[stage] and "engine" not in planned.stages[stage]
    for plans_of_it in (planned, cpu):  # awake during evaluation
        assert plans_of_it.of_stage("evaluate") == plans_of_it.of_stage("roll out")


def test_a_sleeping_engine_with_weights_needs_host_memory(unmeasured):
    gpu = dict(objective="grpo", rollout="vllm", rollout_memory=0.5, rollout_dtype="bfloat16")

    def host(gpu_gib=10.0, **changes):
        return plan.plan_of(replace(make_cfg(**gpu), **changes), {"policy": small()}, 37, 2, gpu_gib).host

    dropped = host()  # weights are loaded before the next sampling
    assert host(rollout_quant="int8") == host(delay="constant") == dropped + 2 * P_SMALL
    assert host(rollout_quant="int8", rollout_tp=2) == dropped + P_SMALL
    awake = (dict(gpu_gib=0.0), dict(samplers="tcp://127.0.0.1:5555"))
    assert [host(rollout_quant="int8", **changes) for changes in awake] == [dropped] * 2


@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_remote_samplers_have_the_engine(engine, unmeasured):
    cfg = make_cfg(objective="grpo", rollout=engine, rollout_memory=0.5, max_tokens=90)
    here, remote = (
        plan.plan_of(replace(cfg, samplers=samplers), {"policy": small()}, 37, 1, gpu_gib=10.0)
        for samplers in ("local", "folder")
    )
    assert here.categories["engine"] > 0 == remote.categories["engine"]
    assert here.of_stage("roll out") - remote.of_stage("roll out") == here.categories["engine"]


def test_an_engine_takes_at_least_its_minimum(unmeasured):
    cfg = make_cfg(objective="grpo", rollout="vllm", rollout_memory=0.5, max_tokens=90)
    P, of_a_token = P_SMALL, 2 * 6 * 2 * 24 * 4  # keys and values, layers, heads, size, float32
    engine = plan.plan_of(cfg, {"policy": small()}, 37, 2, gpu_gib=1e-4).categories["engine"]
    assert engine == 4 * P + 127 * of_a_token
    two = plan.plan_of(replace(cfg, rollout_tp=2), {"policy": small()}, 37, 2, gpu_gib=1e-4)
    assert two.categories["engine"] == (4 * P) // 2 + 127 * of_a_token // 2
    plain = plan.plan_of(make_cfg(objective="grpo", rollout_batch=64, max_tokens=90), {"policy": small()}, 37, 2)
    assert plain.categories["engine"] == 4 * P + 32 * 127 * of_a_token  # a cache for a rank's responses


def test_an_evaluation_by_hand(unmeasured):
    """The sampling engine needs no more memory. The second model needs a second engine, or a cache in plain torch, and
    under FSDP a copy."""
    of_a_token = 2 * 6 * 2 * 24 * 4
    two = {"policy": small(), "actor": small(num_hidden_layers=3, layer_types=["full_attention"] * 3)}
    defaults = dict(max_tokens=90, eval_problems=101)

    def evaluation(configs, gpu_gib=0.0, ranks=2, **changes):
        cfg = make_cfg(**{**defaults, "actor": "none" if len(configs) == 1 else "base:actor", **changes})
        peaks = plan.plan_of(cfg, configs, 37, ranks, gpu_gib)
        assert peaks.stages["evaluate"][-1] == "evaluation"
        return peaks.categories["evaluation"]

    one = {"policy": small()}
    cache = 51 * 127 * of_a_token  # a rank's problems
    assert evaluation(one) == 0 == evaluation(two, eval_every=-1)
    assert evaluation(one, eval_engine="torch") == cache == evaluation(two)
    assert evaluation(one, eval_engine="torch", eval_problems=9999) == 256 * 127 * of_a_token  # at most 256 at once
    sets = "a.jsonl:samples=2,b.jsonl:samples=7:max_tokens=60:temperature=0.5,c.jsonl"  # sets with separate settings
    assert evaluation(two, eval_task=sets) == 51 * 7 * 97 * of_a_token
    assert evaluation(two, parallel="fsdp") == 4 * P_SMALL + cache
    assert evaluation(two, parallel="fsdp", ranks=1) == 101 * 127 * of_a_token  # one rank, so no sharding
    assert evaluation(two, eval_engine="second", rollout="vllm", rollout_memory=0.25, gpu_gib=10.0) == 2.5 * plan.GIB
    remote = dict(
        samplers="folder", rollout="vllm", rollout_memory=0.25, gpu_gib=1e-6
    )  # the actor is evaluated by plain torch
    assert evaluation(two, eval_engine="second", **remote) == max(4 * P_SMALL + 127 * of_a_token, cache // 2)
    long = dict(max_tokens=4 * 2**30 // of_a_token // 2)  # longer than half of the tokens held at once
    assert evaluation(one, eval_engine="torch", **long) == 4 * 2**30 // of_a_token * of_a_token
    longer = dict(max_tokens=4 * 2**30 // of_a_token)  # longer than all tokens held at once: one response
    assert evaluation(one, eval_engine="torch", **longer) == (37 + longer["max_tokens"]) * of_a_token


def test_a_second_engine_stays_in_memory(unmeasured):
    """The engine of the policy needs at least its weights; only the first engine of a process can sleep."""
    two = {"policy": small(), "actor": small(num_hidden_layers=3, layer_types=["full_attention"] * 3)}
    defaults = dict(objective="tis", actor="base:actor", rollout="vllm", rollout_memory=0.25, max_tokens=90)

    def stages(gpu_gib, **changes):
        peaks = plan.plan_of(make_cfg(**defaults, **changes), two, 37, 1, gpu_gib)
        evaluation = {"evaluate": peaks.categories["evaluation"]}
        return {stage: peaks.of_stage(stage) - evaluation.get(stage, 0) for stage in peaks.stages}

    for gpu_gib, size in ((10.0, 2.5 * plan.GIB), (1e-6, 4 * P_SMALL + 127 * 2 * 6 * 2 * 24 * 4)):
        without, there = stages(gpu_gib), stages(gpu_gib, eval_engine="second")
        assert {there[stage] - without[stage] for stage in there} == {size}
        assert stages(gpu_gib, eval_engine="second", eval_every=-1) == without


def test_a_plan_proposes_no_evaluations(measured_once):
    """A full copy of the policy on each of 8 ranks is the largest stage."""
    cfg = make_cfg(actor="base:actor", max_tokens=20, micro_tokens=60, parallel="fsdp", eval_problems=4000)
    two = {"policy": small(), "actor": small(num_hidden_layers=1, layer_types=["full_attention"])}
    planned = plan.plan_of(cfg, two, 37, 8)
    assert planned.worst == "evaluate"
    least = plan.plan_of(replace(cfg, eval_every=-1), two, 37, 8).peak
    proposal = plan.verdict(cfg, two, 37, planned, 1.01 * least / plan.GIB)[1]
    assert "; with --eval_every=-1 it needs" in proposal


BIG = dict(objective="grpo", max_tokens=400, micro_tokens=8000, train_batch=256, rollout_batch=256)


def test_proposals_are_tried_in_order(measured_once):
    cfg = make_cfg(**BIG)
    configs = {"policy": small()}
    planned = plan.plan_of(cfg, configs, 37, 2)
    fits, sentence = plan.verdict(cfg, configs, 37, planned, planned.peak / plan.GIB)
    assert fits and "it fits" in sentence
    changes = {"gradient_checkpointing": True}, {"micro_tokens": 437}, {"parallel": "fsdp"}
    changes += ({"offload": True},)
    words = [f"--{name}={value}" for change in changes for name, value in change.items()]
    sizes = [planned.peak]
    for n, change in enumerate(changes, 1):
        cfg = replace(cfg, **change)
        sizes.append(plan.plan_of(cfg, configs, 37, 2).peak)
        assert sizes[-1] < sizes[-2]
        if n in (1, 4):
            fits, sentence = plan.verdict(make_cfg(**BIG), configs, 37, planned, (sizes[-1] + sizes[-2]) / 2 / plan.GIB)
            assert not fits and f"; with {', '.join(words[:n])} it needs" in sentence
    sentence = plan.verdict(make_cfg(**BIG), configs, 37, planned, 1e-6)[1]
    assert sentence.endswith("do not save enough; use a smaller model or shorter responses")
    assert sentence.count("fsdp") == 1 and "--parallel=fsdp on 64 ranks" in sentence


def test_ranks_that_do_not_divide_the_batch_are_not_proposed():
    """Groups of 4, 48 responses: 2 or 4 ranks have whole groups, 8 and more do not."""
    cfg = make_cfg(objective="grpo", train_batch=48, rollout_batch=48, group_size=4)
    assert [n for flag, _, n in plan.mends(cfg, 20, 1) if "ranks" in flag] == [2, 4]


def test_proposals_that_do_not_help_are_left_out(measured_once):
    """vLLM sleeps during the update, so a smaller share of the GPU does not reduce the update's memory."""
    cfg = make_cfg(**BIG, rollout="vllm", rollout_memory=0.6)
    gpu_gib = 0.3
    planned = plan.plan_of(cfg, {"policy": small()}, 37, 1, gpu_gib)
    assert planned.worst == "forward and backward"
    assert (
        "; with --gradient_checkpointing=True it needs"
        in plan.verdict(cfg, {"policy": small()}, 37, planned, gpu_gib)[1]
    )


def test_the_longest_row_is_the_longest_that_fits(monkeypatch):
    """Or shorter by at most a hundredth of the memory. The context's length if it fits; 0 if no token fits."""
    cfg = make_cfg(**{**BIG, "micro_tokens": 64}, rollout="hf")
    configs = {"policy": small(max_position_embeddings=200)}

    def peak(length):
        return 10**6 + 3000 * length + 40 * length**2

    monkeypatch.setattr(
        plan, "plan_of", lambda cfg, configs, prompt, *more: SimpleNamespace(peak=peak(prompt + cfg.max_tokens))
    )
    response = plan.longest_row(cfg, configs, 37, 1, (peak(110) + 10) / plan.GIB)
    assert 100 < response <= 110 and 0.99 * peak(110) < peak(response)
    assert plan.longest_row(cfg, configs, 37, 1, peak(200) / plan.GIB) == 200
    assert plan.longest_row(cfg, configs, 37, 1, (peak(38) - 10) / plan.GIB) == 0
    assert plan.longest_row(cfg, configs, 200, 1, 80.0) == 0  # a prompt as long as the context


def test_the_largest_micro_batch_is_a_power_of_two_that_fits(monkeypatch):
    def planned(cfg, configs, prompt, ranks, gpu_gib):
        return SimpleNamespace(peak=cfg.micro_tokens * plan.GIB // 1024)

    monkeypatch.setattr(plan, "plan_of", planned)
    made = SimpleNamespace(micro=(3, 700), ranks=2)
    for gpu_gib, tokens in ((5.0, 4096), (4.0, 4096), (3.99, 2048), (100.0, 32768), (0.9, 700)):
        assert plan.largest_micro(make_cfg(**BIG), made, {}, 37, gpu_gib) == tokens


def test_the_command(tmp_path, capsys):
    """A folder with only config.json is enough."""
    small().save_pretrained(tmp_path)
    argv = [f"--model={tmp_path}", "--actor=none", "--lr=1e-6", "--dtype=bfloat16", "--max_tokens=64"]
    argv.append("--task=arith")
    print_plan([*argv, "--max_prompt_tokens=32", "--gpu_gib=80", "--rollout=hf", "--ranks=4"])
    printed = capsys.readouterr().out
    assert "one rank of 4" in printed and "it fits --gpu_gib=80" in printed
    assert "the longest row that fits has 512 tokens, including 32 of the prompt" in printed  # the model's context
    assert "the largest micro-batch that fits: --micro_tokens=32768" in printed
    assert float(re.search(r"weights, policy +([\d.]+)", printed)[1]) == pytest.approx(
        4 * P_SMALL / plan.GIB, abs=0.005
    )
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_plan_beyond_the_models_context_is_refused(tmp_path):
    """Like a run: the model reads 512 tokens."""
    small().save_pretrained(tmp_path)
    flags = dict(model=str(tmp_path), actor="none", rollout="hf", lr=1e-6, dtype="bfloat16", task="arith")
    for tokens, prompt, fits in ((480, 32, True), (481, 32, False)):
        cfg = settings.resolve(config.Config(**flags, max_tokens=tokens, max_prompt_tokens=prompt))
        if fits:
            plan.report(cfg, 1, 0.0)
            continue
        with pytest.raises(
            UserError, match="--max_tokens=481: with a prompt of 32 tokens it exceeds .* context of 512"
        ):
            plan.report(cfg, 1, 0.0)


def test_parameters_equal_the_authors_numbers():
    """In billions."""
    printed = {"Qwen/Qwen2.5-0.5B": 0.49, "Qwen/Qwen2.5-32B": 32.5, "Qwen/Qwen3-0.6B": 0.6, "Qwen/Qwen3-1.7B": 1.7}
    printed |= {"Qwen/Qwen3-4B": 4.0, "Qwen/Qwen3-8B": 8.2, "Qwen/Qwen3-30B-A3B": 30.5}
    cfg = make_cfg(objective="grpo")
    for name, billions in printed.items():
        weights = plan.States.of(cfg, "policy", plans.config_of(name)).weights
        assert weights / 4e9 == pytest.approx(billions, rel=0.04), name


@pytest.mark.parametrize("path", plans.RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_the_gpus_in_its_head(path, monkeypatch):
    monkeypatch.setattr(plan, "fitting", lambda *plan_of: ([], None))  # without proposals
    *cells, says = plans.of_recipe(path)
    assert says.startswith("it fits") or "does not fit" in path.read_text().split("\nobjective")[0], says
    page = (ROOT / "results" / "plans.md").read_text()
    assert f"| {' | '.join(cells)} | " in page, "run python results/plans.py"


def test_activations_of_experts():
    config = plans.config_of("Qwen/Qwen3-30B-A3B")
    cfg = make_cfg(objective="grpo", dtype="bfloat16")
    batch = (1, 64, 448)
    dense = footprint.of_layers(cfg, "policy", plans.config_of("Qwen/Qwen3-1.7B"), 1, *batch)
    sparse = footprint.of_layers(cfg, "policy", config, 1, *batch)
    # eight experts of width 768 equal one MLP of width 6144, with separate inputs; then the weights in 16 bits
    weights = 2 * 128 * 3 * 2048 * 768
    assert sparse.kept - weights > dense.kept and json.dumps(sparse.kept)
