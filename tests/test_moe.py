"""Mixtures of experts, on a tiny Qwen3-MoE: expert matrices are quantized, aligned, published and optimized like
other matrices; routers stay in full precision; the learner routes tokens like the engine."""

import copy
import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import logprobs, make_cfg, make_groups
from standins import folder_and_task, model, save, tokenizer
from torch import nn
from torchrun import torchrun

import batching
import quant
import train
from eval import sampler_of
from learner import Learner
from machinery.checkpoint.models import read_config
from machinery.flags import UserError
from machinery.log import read_metrics
from machinery.optim import make_optimizers
from machinery.ranks import Comm
from model import Needs
from model.engines import HFEngine, VLLMEngine
from quant import LowBitExperts, by_expert, dequantize, experts_of, format_of, quantize
from remote import sampler
from remote.groups import Limits, decode_group, encode_group
from remote.wire import WireError
from sampling import Sampling
from sync import SyncError, WeightCheck

IDS = len(tokenizer())
FORMATS = ["int8", "fp8", "w4a16"]


def moe(seed: int = 0, **changes):
    return model("qwen3_moe", seed, moe_intermediate_size=32, **changes)


def logits(lm, seed: int = 3):
    ids = torch.randint(0, IDS, (2, 12), generator=torch.Generator().manual_seed(seed))
    return lm(input_ids=ids).logits


# -- In low bits ------------------------------------------------------------------------------------------------------


def naive_experts(m, x, chosen, weights, fmt):
    """Token by token: expert matrices quantized row by row, activations as one row."""
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for e, w in zip(chosen[t].tolist(), weights[t], strict=True):
            gate, up = naive_linear(m.gate_up_proj[e], x[t], fmt).chunk(2)
            out[t] += w * naive_linear(m.down_proj[e], nn.functional.silu(gate) * up, fmt)
    return out


def naive_linear(weight, x, fmt):
    rows = [dequantize(*quantize(row[None], fmt.qmax, fmt.dtype, fmt.group))[0] for row in weight]
    if fmt.activations:
        x = dequantize(*quantize(x[None], fmt.activation_qmax, fmt.dtype))[0]
    return torch.stack(rows) @ x


@pytest.mark.parametrize("name", FORMATS)
def test_aligned_experts_compute_on_low_bit_numbers(name):
    fmt, m = format_of(name, 16), next(iter(experts_of(moe()).values()))
    g = torch.Generator().manual_seed(0)
    x, weights = torch.randn(5, 64, generator=g), torch.rand(5, 2, generator=g)
    chosen = torch.stack([torch.randperm(8, generator=g)[:2] for _ in range(5)])
    with torch.no_grad():
        got, want = LowBitExperts(m, fmt)(x, chosen, weights), naive_experts(m, x, chosen, weights, fmt)
        assert torch.allclose(got, want, atol=1e-4)
        assert not torch.allclose(got, m(x, chosen, weights), atol=1e-2)


def test_gradients_of_experts_are_straight_through():
    """Weight-only formats: the gradient equals the one of a plain model with rounded weights, for every used expert."""
    fmt, aligned, plain = format_of("w4a16", 16), quant.align(moe(), format_of("w4a16", 16)), moe()
    quant.dequantize_in_place(plain, fmt)
    for lm in (aligned, plain):
        logits(lm).log_softmax(-1)[..., 7].sum().backward()
    assert torch.allclose(logits(aligned), logits(plain), atol=1e-4)
    wanted = dict(plain.named_parameters())
    for name, p in aligned.named_parameters():
        assert torch.allclose(p.grad, wanted[name].grad, atol=1e-3 * float(p.grad.abs().max())), name
    assert float(aligned.model.layers[0].mlp.experts.down_proj.grad.abs().max()) > 0


def test_the_gate_of_a_shared_expert_is_not_quantized():
    """In Qwen2's family this gate is an ordinary linear layer."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = dict(hidden_size=32, num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2)
    widths = dict(intermediate_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=48)
    lm = Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=40, num_hidden_layers=1, **sizes, **widths))
    attention = [f"self_attn.{x}_proj" for x in "qkvo"]
    shared = [f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")]
    assert list(quant.quantized_linears(lm)) == [f"model.layers.0.{name}" for name in attention + shared]


@pytest.mark.parametrize("name", FORMATS)
def test_published_experts_equal_those_of_the_forward(name):
    """The router is published in full precision; every matrix of an expert has separate scales."""
    learner = learner_of(name)
    lm = learner.models.policy
    sent = dict(learner.published("policy", True))
    layer = "model.layers.1.mlp"
    assert torch.equal(sent[f"{layer}.gate.weight"], lm.model.layers[1].mlp.gate.weight)
    if name != "w4a16":
        q, s = sent[f"{layer}.experts.down_proj"], sent[f"{layer}.experts.down_proj_scale"]
        assert q.shape == (8, 64, 32) and s.shape == (8, 64, 1)
        master = lm.model.layers[1].mlp.experts.down_proj
        largest = learner.rollout_format.qmax
        assert torch.allclose(s[..., 0], master.abs().amax(-1) / largest)
    engine = HFEngine(moe(9), fmt=format_of(name, 16))
    engine.load(learner.published("policy", engine.packed))
    ids = np.arange(40).reshape(2, 20)
    assert np.allclose(engine.logprobs(ids), logprobs(learner, "policy", ids), atol=2e-4)


def test_a_16_bit_learner_rounds_its_experts():
    """Updates of less than half a bfloat16 step change neither its policy nor the evaluated one, also under FSDP."""
    cfg, ids = make_cfg(objective="tis", dtype="bfloat16"), np.arange(40).reshape(2, 20)
    learner = Learner(moe().bfloat16().float(), None, cfg, Comm())
    sharded = SimpleNamespace(
        **{**vars(learner), "comm": SimpleNamespace(on=True)}, named_tensors=learner.named_tensors
    )
    found = []
    for change in (0.0, 0.9 * 2**-9):
        learner.models.policy.set_experts_implementation("eager")
        with torch.no_grad():
            for module, kind in quant.expert_parameters(learner.models.policy).values():
                getattr(module, kind).mul_(1 + change)
        found.append([logprobs(learner, "policy", ids), sampler_of(learner, "policy", cfg).logprobs(ids)])
        learner.models.policy.set_experts_implementation("grouped_mm")  # as under FSDP
        found[-1].append(sampler_of(sharded, "policy", dataclasses.replace(cfg, parallel="fsdp")).logprobs(ids))
    for before, after in zip(*found, strict=True):
        assert np.array_equal(before, after)


def test_published_names_of_experts_are_the_hubs(tmp_path):
    """Like the folders that transformers writes."""
    from safetensors.torch import load_file

    lm = moe()
    written = load_file(save(lm, tmp_path) + "/model.safetensors")
    experts = quant.expert_parameters(lm)
    split = dict(by_expert(lm.state_dict().items(), experts))
    assert split.keys() == written.keys()
    assert all(torch.equal(split[name], x) for name, x in written.items())
    q = {"model.layers.0.mlp.experts.gate_up_proj_scale": torch.arange(12.0).reshape(2, 6, 1)}
    scales = dict(by_expert(q.items(), experts))
    assert scales["model.layers.0.mlp.experts.1.up_proj.weight_scale"].tolist() == [[9.0], [10.0], [11.0]]


def test_experts_in_an_unknown_layout_are_not_split():
    """gpt-oss interleaves gate and up and has biases: vLLM loads its tensors unchanged."""
    lm = model("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=32)
    tensors = lm.state_dict()
    sent = dict(by_expert(tensors.items(), quant.expert_parameters(lm)))
    assert sent.keys() == tensors.keys() and all(torch.equal(sent[name], x) for name, x in tensors.items())


# -- Publishing -------------------------------------------------------------------------------------------------------


def step(lm, size: float = 0.02) -> None:
    """Change every weight slightly."""
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in lm.parameters():
            p += size * torch.randn(p.shape, generator=g)


def check_sync(engine, learner, folder: str, fmt) -> None:
    """Two versions are loaded; an engine with outdated experts is found."""
    check = WeightCheck(read_config(folder), np.arange(8 * 30).reshape(8, 30), fmt)
    check.load(engine, 0, learner.published("policy", engine.packed))
    step(learner.models.policy)
    assert check.load(engine, 1, learner.published("policy", engine.packed)).changed > 0.5
    step(learner.models.policy, 0.1)
    load = engine.load

    def without_experts(named_tensors):
        old = dict(before)
        load((name, old[name] if ".experts." in name else x) for name, x in named_tensors)

    before = [(name, x.clone()) for name, x in learner.published("policy", engine.packed)]
    step(learner.models.policy, 0.1)
    engine.load = without_experts
    try:
        with pytest.raises(SyncError, match="experts"):
            check.load(engine, 2, learner.published("policy", engine.packed))
    finally:
        engine.load = load


@pytest.mark.parametrize("name", ["none", "fp8", "w4a16"])
def test_the_torch_engine_has_the_published_experts(tmp_path, name):
    folder, fmt = save(moe(), tmp_path), format_of(name, 16)
    check_sync(HFEngine(folder, fmt=fmt), learner_of(name), folder, fmt)


def learner_of(name: str) -> Learner:
    """A learner aligned with this format."""
    aligned = {"rollout_quant": name, "learner_quant": "aligned", "quant_group": 16} if name != "none" else {}
    return Learner(moe(), None, make_cfg(**aligned), Comm())


def test_vllm_has_the_published_experts(tmp_path):
    """In a separate process: vLLM creates its group of experts only if a process's first model has experts."""
    torchrun("test_moe.py", "vllm_has_experts", save(moe(), tmp_path), ranks=1)


def test_experts_after_a_model_without_experts_are_refused(tmp_path, vllm_engine):
    """The case of --eval_engine=second, with vLLM's words."""
    with pytest.raises(UserError, match="expert parallel group is not initialized.* --rollout=hf runs without vLLM"):
        VLLMEngine(save(moe(), tmp_path), max_len=64, max_logprobs=1)


def vllm_has_experts(folder: str) -> None:
    engines = []
    for name in ("none", "w4a16"):
        fmt = format_of(name, 16)
        engines.append(VLLMEngine(folder, max_len=64, max_logprobs=20, fmt=fmt))
        check_sync(engines[-1], learner_of(name), folder, fmt)


# -- Muon -------------------------------------------------------------------------------------------------------------


def test_muon_treats_every_expert_as_a_separate_matrix():
    """Like torch's Muon on each expert alone, for two steps; every parameter has exactly one optimizer."""
    lm, cfg = moe(), make_cfg(optimizer="muon", weight_decay=0.01)
    adamw, muon = make_optimizers(lm, cfg, 0.02)
    optimized = [id(p) for o in (adamw, muon) for g in o.param_groups for p in g["params"]]
    assert sorted(optimized) == sorted(id(p) for p in lm.parameters())
    experts = lm.model.layers[1].mlp.experts
    assert {id(experts.gate_up_proj), id(experts.down_proj)} <= {id(p) for p in muon.param_groups[1]["params"]}
    alone = [nn.Parameter(x.detach().clone()) for p in experts.parameters() for x in p]
    reference = torch.optim.Muon(alone, lr=0.02, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for seed in (1, 2):
        (logits(lm, seed).log_softmax(-1)[..., 7] ** 2).sum().backward()
        gradients = [x for p in experts.parameters() for x in p.grad]
        for matrix, gradient in zip(alone, gradients, strict=True):
            matrix.grad = gradient.clone()
        for optimizer in (adamw, muon, reference):
            optimizer.step()
        lm.zero_grad()
    got = [x for p in experts.parameters() for x in p]
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(got, alone, strict=True))


# -- Routing replay ---------------------------------------------------------------------------------------------------


def sampled(lm):
    """Two groups of the torch engine, with prompts of two lengths and the experts of each token."""
    engine = HFEngine(lm, routing=True)
    groups = make_groups(2, G=3, vocab=IDS, prompt=(3, 9))
    prompts = [g.prompt_ids for g in groups]
    assert len(prompts[0]) != len(prompts[1])
    seeds, stop = [[1, 2, 3], [4, 5, 6]], list(range(0, IDS, 7))  # rows end at different times
    drawn = engine.generate(prompts, seeds, Sampling(max_tokens=12), 3, stop)
    for group, responses in zip(groups, drawn, strict=True):
        group.responses = responses
    return groups


def chosen_by(lm, ids):
    """The experts of each token from transformers' router logits: (tokens, layers, k)."""
    with torch.no_grad():
        by_layer = lm(input_ids=torch.from_numpy(ids.astype(np.int64))[None], output_router_logits=True).router_logits
    return torch.stack([x.topk(lm.config.num_experts_per_tok, -1).indices for x in by_layer], 1).numpy()


def test_the_engine_records_the_experts_of_each_token():
    lm = moe()
    groups = sampled(lm)
    assert len({len(r.tokens) for g in groups for r in g.responses}) > 2
    for g in groups:
        for r in g.responses:
            read = np.concatenate([g.prompt_ids, r.tokens])[:-1]  # the last token is sampled, and not read
            assert r.routed.dtype == np.int16
            assert np.array_equal(np.sort(r.routed, -1), np.sort(chosen_by(lm, read), -1))


def vllm_records_experts(folder: str) -> None:
    """Runs on a GPU, from test_gpu.py."""
    engine, lm = VLLMEngine(folder, max_len=64, max_logprobs=20, routing=True), moe()
    prompts = [np.arange(3, 3 + n, dtype=np.int32) for n in (5, 9)]
    alike, groups = [], engine.generate(prompts, [[1, 2, 3]] * 2, Sampling(max_tokens=12), 3, [2])
    for prompt, group in zip(prompts, groups, strict=True):
        for r in group:
            read = np.concatenate([prompt, r.tokens])[:-1]
            alike.append((np.sort(r.routed, -1) == np.sort(chosen_by(lm, read), -1)).mean())
    assert np.mean(alike) > 0.99, alike


def replaying(lm, start=None, **changes) -> Learner:
    sizes = dict(group_size=3, train_batch=6, rollout_batch=6)
    cfg = make_cfg(objective="tis", router_replay=True, **sizes, **changes)
    return Learner(lm, None, cfg, Comm(), start=start)


@pytest.mark.parametrize("divided", [True, False])
def test_replaying_a_models_own_routes_changes_nothing(divided):
    """With and without division of the expert weights by their sum."""
    lm = moe(norm_topk_prob=divided)
    groups = sampled(lm)
    learner, plain = replaying(moe(norm_topk_prob=divided)), Learner(lm, None, make_cfg(objective="tis"), Comm())
    a = learner.score(batching.collate(groups, learner.cfg), Needs(entropy=True))
    b = plain.score(batching.collate(groups, plain.cfg), Needs(entropy=True))
    assert torch.allclose(a.logp, b.logp, atol=1e-5)
    assert b.routed_alike is None
    there = batching.collate(groups, learner.cfg).exists
    assert float(a.routed_alike[there].min()) == 1
    assert not learner.models.routing.given  # replayed routes are cleared


def test_tokens_use_the_replayed_experts():
    """One expert a token has weight 1: routing all tokens to expert e equals a model with e as every expert."""
    lm, same, e = moe(num_experts_per_tok=1), moe(num_experts_per_tok=1), 5
    with torch.no_grad():
        for p in (p for m in experts_of(same).values() for p in m.parameters()):
            p.copy_(p[e].clone().expand_as(p))
    groups = sampled(lm)
    routes = [r.routed.copy() for g in groups for r in g.responses]
    for r in (r for g in groups for r in g.responses):
        r.routed = np.full_like(r.routed, e)
    learner = replaying(lm, copy.deepcopy(lm))
    batch = batching.collate(groups, learner.cfg)
    got = learner.score(batch, Needs(start=True))
    assert torch.equal(got.logp_start, got.logp)
    want = Learner(same, None, make_cfg(objective="tis"), Comm()).score(batch, Needs())
    assert torch.allclose(got.logp, want.logp, atol=1e-5)
    assert not torch.allclose(got.logp, Learner(lm, None, make_cfg(objective="tis"), Comm()).score(batch, Needs()).logp)
    # agreement of the first layer, whose routers have equal inputs: the share of tokens routed to e
    starts = [len(g.prompt_ids) - 1 for g in groups for _ in g.responses]
    for row, (routed, start) in enumerate(zip(routes, starts, strict=True)):
        first = (routed[start:, 0, 0] == e).astype(np.float32)
        alike = got.routed_alike[row, : len(first)].numpy()
        assert (alike >= first / 2).all() and (alike <= (1 + first) / 2).all()


def test_the_router_has_a_gradient_through_expert_weights():
    """Against finite differences: the chosen experts are fixed, their weights depend on the router."""
    lm = moe()
    learner = replaying(lm)
    batch = batching.collate(sampled(moe(1)), learner.cfg)
    weight, g = lm.model.layers[0].mlp.gate.weight, torch.Generator().manual_seed(0)
    direction = torch.randn(weight.shape, generator=g)
    learner.models(batch, Needs())["logp"].double().sum().backward()
    slope = float((weight.grad * direction).sum())
    sums = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * 1e-3 * direction
            sums.append(float(learner.score(batch, Needs()).logp.double().sum()))
            weight -= sign * 1e-3 * direction
    assert slope == pytest.approx((sums[0] - sums[1]) / 2e-3, rel=0.02)
    assert abs(slope) > 1e-2


def test_experts_pass_the_wire():
    groups = sampled(moe())
    limits = Limits(3, 12, 9, IDS, 3, 0, routed=(2, 2, 8))
    again = decode_group(encode_group(groups[0]), limits)
    for a, b in zip(groups[0].responses, again.responses, strict=True):
        assert np.array_equal(a.routed, b.routed) and np.array_equal(a.tokens, b.tokens)
    bad = (((0, 0, 0), "arrays"), ((3, 2, 8), "experts of shape"), ((2, 2, 3), "experts that the model does not have"))
    for wrong, words in bad:
        with pytest.raises(WireError, match=words):
            decode_group(encode_group(groups[0]), dataclasses.replace(limits, routed=wrong))


def test_impossible_replays_are_refused(monkeypatch):
    with pytest.raises(UserError, match="--router_replay: models of the family qwen3 have no experts"):
        replaying(model("qwen3"))
    with pytest.raises(UserError, match="--router_replay: this model has layers without experts"):
        replaying(model("qwen3_moe", mlp_only_layers=[0]))
    with pytest.raises(UserError, match="--router_replay: vLLM reports expert choices only on the first rank"):
        quant.check_routing(SimpleNamespace(router_replay=True, rollout="hf", rollout_tp=2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    description = SimpleNamespace(
        packed=False, reward_digests={}, config=dataclasses.asdict(make_cfg(router_replay=True))
    )
    with pytest.raises(UserError, match="--router_replay: on a CPU vLLM does not report"):
        sampler.configure(description, sampler.SamplerFlags(rollout="vllm"))
    assert sampler.configure(description, sampler.SamplerFlags(rollout="hf")).router_replay


def test_a_run_replays_the_routes_of_a_low_bit_engine(tmp_path):
    """The whole loop with two updates: without alignment the learner's router often chooses different experts."""
    paths = folder_and_task(moe(), tmp_path)
    low_bits = {"rollout_quant": "w4a16", "quant_group": 16, "steps": 1, "max_tokens": 8, "check_sync": False}
    logged = {}
    for name in ("none", "aligned"):
        case = {"objective": "tis", "router_replay": True, "learner_quant": name, "out": str(tmp_path / name)}
        train.train(make_cfg(**paths, **low_bits, **case))
        logged[name] = read_metrics(tmp_path / name)[-1]
    assert logged["aligned"]["router/agreement"] == 1
    assert logged["none"]["router/agreement"] < 1
    assert logged["aligned"]["rollout_corr/mean_mismatch"] < 1e-4 < logged["none"]["rollout_corr/mean_mismatch"]


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
