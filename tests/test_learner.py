"""The learner: the gradient is the derivative of the loss for every split into micro-batches and ranks."""

import contextlib
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import at, log_probabilities, logprobs, make_cfg, make_groups, tiny_model
from ranks import PROBE, RANK_CASES, hold_back_the_step, make_learner, move, rank_groups, relative
from ranks import one_update as update_of_one
from torch.utils._python_dispatch import TorchDispatchMode
from torchrun import torchrun

import batching
import learner as learner_module
import model as models
import objectives
from learner import Learner
from machinery import optim
from machinery.flags import UserError
from machinery.measure import Sums
from machinery.optim import schedule
from machinery.ranks import Comm
from model import Needs, PolicyAndActor, kernels
from model.agreement import Agreement, agreement, check_agreement, expects_agreement

f64 = torch.float64
NO_LOSS = {"loss": 0.0, "rollout_corr/rollout_rs_masked_fraction": 0.0}


def gradients(cfg, groups, dtype=f64, ref=True):
    """(gradients of every parameter after the backward passes of one update, its metrics); no optimizer step."""
    learner = make_learner(cfg, dtype)
    if ref:
        return update_of_one(cfg, learner, groups)[:2]
    hold_back_the_step(learner)
    logged = one_update(learner, batching.collate(groups, cfg))
    return {name: p.grad for name, p in learner.models.named_parameters()}, logged


def write_ref(learner, groups) -> None:
    batch = batching.collate(groups, learner.cfg)
    batching.write_ref_columns(groups, learner.ref_columns(batch))


def one_update(learner, batch) -> dict:
    logged = learner.backward(batch, objectives.prepare(batch, learner.comm, learner.cfg, {}))
    return logged | learner.step(logged)


def weights(learner) -> dict:
    return {name: p.detach().clone() for name, p in learner.models.named_parameters()}


def rows_of(groups):
    """(row of the batch, group, response)."""
    pairs = [(g, r) for g in groups for r in g.responses]
    return [(row, g, r) for row, (g, r) in enumerate(pairs)]


# -- Micro-batches ----------------------------------------------------------------------------------------------------

CASES = [
    {"objective": "mis_gspo", "reduction": "seq-mean-token-mean"},
    {"objective": "gepo", "gepo_defence": 4.0, "cppo_beta": 0.5},
    {"objective": "jackpot", "obrs_mask": "expected", "loss_denominator": "kept", "reduction": "seq-mean-token-mean"},
    {"objective": "jackpot", "obrs_accept_rate": 0.8},
    {"objective": "geo_rs", "loss_denominator": "kept", "rs_low": 0.001, "rs_high": 0.15},
    {"objective": "seq_tis", "reduction": "seq-mean-token-sum-norm"},
    {"objective": "jackpot", "actor": "base:actor", "obrs_target": "new"},
    {"objective": "tis_adjusted", "kl_coef": 0.3, "entropy_coef": 0.1},
    {"objective": "jackpot", "actor": "base:actor", "kl_coef": 0.3, "entropy_coef": 0.1},
]


def test_prompts_of_long_responses_are_not_shared():
    """The mask of shared prompts grows with the square of the length."""
    for most, shared in ((4096, True), (4097, False)):
        cfg = make_cfg(train_batch=12, rollout_batch=12, max_tokens=most)
        batch = batching.collate(make_groups(3, seed=3, prompt=(3, 12)), cfg)
        assert {share for *_, share in make_learner(cfg)._micro(batch)} == {shared}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_micro_batch_split_gives_the_same_gradient(case):
    results = []
    # one micro-batch, several, one for each response; the last reads each row's prompt separately
    for micro_tokens, share in ((10**6, True), (45, True), (1, False)):
        cfg = make_cfg(**case, micro_tokens=micro_tokens, train_batch=12, rollout_batch=12)
        groups = make_groups(3, seed=3, prompt=(3, 12))
        assert {s for *_, s in make_learner(cfg)._micro(batching.collate(groups, cfg))} == {share}
        results.append(gradients(cfg, groups))
    want, wanted_log = results[0]
    for grads, logged in results[1:]:
        assert relative(want, grads) < 1e-10
        assert logged == pytest.approx(wanted_log, rel=1e-6, abs=1e-6)


def test_gradients_of_a_shared_prompt_are_added_up_in_order():
    """x[group] would sum gradients in the order of torch's threads, different in every run. The graph has no such
    node."""
    groups = make_groups(12, G=6, seed=3, prompt=(12, 16))
    cfg = make_cfg(objective="tis", micro_tokens=10**6, train_batch=72, rollout_batch=72, group_size=6)
    batch = batching.collate(groups, cfg)
    at = batch.exists.flatten().nonzero()[:, 0]
    policy = make_learner(cfg, torch.float32).models.policy.base_model

    def names(node, seen):
        if node is not None and node not in seen:
            seen.add(node)
            for before, _ in node.next_functions:
                names(before, seen)
        return seen

    hidden = models.read_shared(policy, batch, at)
    assert "IndexBackward0" not in {node.name() for node in names(hidden.grad_fn, set())}
    assert torch.allclose(hidden, models.read_rows(policy, batch, at), atol=1e-5)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("budget", [10**6, 60, 31, 1])
def test_micro_batches_hold_every_row_once_within_the_budget(budget, share):
    b = batching.collate(make_groups(5, seed=1, prompt=(3, 12)), make_cfg())
    parts, total = batching.micro_batches(b, budget, share)
    assert sorted(row for rows in parts for row in rows) == list(range(len(b)))
    micros = [b.select(rows) for rows in parts]
    lengths = [int((m.prompt_len + m.length).max()) for m in micros]
    tokens = [len(m) * length for m, length in zip(micros, lengths, strict=True)]  # with padding
    if share:
        prompts = [len(set(m.group.tolist())) * int(m.prompt_len.max()) for m in micros]
        copies = [len(m) * int(m.prompt_len.max()) // 16 for m in micros]
        tokens = [len(m) * m.tokens.shape[1] + n + k for m, n, k in zip(micros, prompts, copies, strict=True)]
    assert sum(tokens) == total
    assert share or lengths == sorted(lengths, reverse=True)  # the longest comes first
    for rows, n in zip(parts, tokens, strict=True):
        assert n <= budget or len(rows) == 1
    assert (len(parts) == 1) == (budget == 10**6)
    assert (len(parts) == len(b)) == (budget == 1)


# -- Against full logits ----------------------------------------------------------------------------------------------


TWO = {"actor": "base:actor"}


@pytest.mark.parametrize("target, flags", [("new", {}), ("ref", TWO), ("ref", {**TWO, "delay": "lognormal"})], ids=str)
def test_z_approx_is_the_sum_over_both_top_k(target, flags):
    """Against sets and plain sums. A late actor is not the sampler: its p_inf is not used."""
    cfg = make_cfg(objective="jackpot", obrs_z="approx", obrs_topk=4, obrs_lambda=0.7, obrs_target=target, **flags)
    learner, groups = make_learner(cfg), make_groups(2, seed=2, K=4)
    if "actor" in flags:
        sample_from_the_actor(learner, groups, K=4)
    write_ref(learner, groups)
    old = probabilities(learner.models.policy, groups)
    actor = probabilities(learner.models.actor, groups) if "actor" in flags else None
    move(learner)
    target_p = old if target == "ref" else probabilities(learner.models.policy, groups)
    sums, sampled_left_out = [], 0
    for row, _, r in rows_of(groups):
        for t in np.flatnonzero(r.loss_mask):
            engine = dict(zip(r.topk_ids[t].tolist(), np.exp(r.topk_logp[t].astype(float)), strict=True))
            policy_top = sorted(range(len(old[row][t])), key=lambda x: -old[row][t][x])[:4]
            sampled = int(r.tokens[t])
            p_inf = {}
            for x in set(engine) | set(policy_top):
                p_inf[x] = min(old[row][t][x], min(engine.values()))
                if actor and "delay" not in flags:
                    p_inf[x] = actor[row][t][x]
                if x == sampled:
                    p_inf[x] = math.exp(r.logp_inf[t])
            p_inf |= engine
            sampled_left_out += sampled not in p_inf
            sums.append(sum(min(p, target_p[row][t][x] / 0.7) for x, p in p_inf.items()))
    batch = batching.collate(groups, cfg)
    stats = objectives.prepare(batch, learner.comm, cfg, {})
    logged = learner.backward(batch, stats)
    assert sampled_left_out > 0
    assert logged["obrs/z_approx"] == pytest.approx(sum(sums) / len(sums), rel=1e-6)
    assert logged["obrs/z"] == pytest.approx(stats.kappa * sum(sums) / len(sums), rel=1e-6)
    assert not {"obrs/z_low", "obrs/z_high"} & set(logged)


def probabilities(model, groups) -> list:
    """[row][token][x] as plain numbers: the model's probabilities along each response."""
    with torch.no_grad():
        return [log_probabilities(model, g.prompt_ids, r.tokens)[0].exp().tolist() for _, g, r in rows_of(groups)]


def sample_from_the_actor(learner, groups, K=5) -> None:
    """Replace p_inf and its top-K by the actor's."""
    for _, g, r in rows_of(groups):
        with torch.no_grad():
            logq, ids = log_probabilities(learner.models.actor, g.prompt_ids, r.tokens)
        top, where = logq.topk(K, -1)
        r.topk_ids, r.topk_logp = where.int().numpy(), top.float().numpy()
        r.logp_inf = at(logq, ids).float().numpy()


# -- Steps ------------------------------------------------------------------------------------------------------------


def test_non_finite_steps_are_skipped_counted_and_stop_the_run(monkeypatch):
    monkeypatch.setattr(learner_module, "MAX_SKIPS", 2)
    cfg = make_cfg(objective="grpo")
    learner = make_learner(cfg, torch.float32)
    good = batching.collate(make_groups(2, seed=0), cfg)
    bad = replace(good, adv=good.adv * torch.inf)
    before = weights(learner)
    assert one_update(learner, bad)["skipped_steps"] == 1
    assert all(torch.equal(p, before[name]) for name, p in weights(learner).items())
    assert (one_update(learner, good)["skipped_steps"], learner.skipped_in_a_row) == (1, 0)
    assert any(not torch.equal(p, before[name]) for name, p in weights(learner).items())
    one_update(learner, bad)
    assert not learner.error
    one_update(learner, bad)
    assert "2 updates in a row had a non-finite loss or gradient" in learner.error  # train.py saves and stops


def test_a_completely_rejected_update_moves_only_the_actor():
    """Adam's momentum must not move the policy after a batch without a gradient."""
    cfg = make_cfg(objective="geo_rs", actor="base:actor")
    learner = Learner(tiny_model(0), tiny_model(1), cfg, Comm())
    batch = batching.collate(make_groups(), cfg)
    learner.cfg = replace(cfg, rs_low=0.0, rs_high=1e9)
    assert one_update(learner, batch)["rejected_steps"] == 0
    before = weights(learner)
    learner.cfg = replace(cfg, rs_low=1e8, rs_high=1e9)
    logged = one_update(learner, batch)
    assert (logged["rejected_steps"], logged["stepped"], logged["grad_norm"]) == (1, 1, 0)
    for name, p in weights(learner).items():
        assert torch.equal(p, before[name]) == name.startswith("policy"), name
    # a batch in which every response was cut moves no model, whatever the flags
    for flags in ({"objective": "gepo", "cppo_beta": 0.1}, {"objective": "jackpot", "entropy_coef": 0.1}):
        cut = Learner(tiny_model(0), tiny_model(1), make_cfg(**flags, actor="base:actor"), Comm())
        one_update(cut, batch)
        before = weights(cut)
        assert one_update(cut, replace(batch, mask=torch.zeros_like(batch.mask)))["grad_norm"] == 0
        assert all(torch.equal(p, before[name]) for name, p in weights(cut).items())
    # CPPO's KL must pull back a policy so far off that every token is rejected
    learner = Learner(tiny_model(0), None, replace(learner.cfg, cppo_beta=0.1, actor="none"), Comm())
    before = weights(learner)
    assert one_update(learner, batch)["rejected_steps"] == 0
    assert any(not torch.equal(p, before[name]) for name, p in weights(learner).items())


STEP_FLAGS = {"objective": "tis", "actor": "base:actor", "lr": 1e-2, "actor_lr": 2e-2}
STEP_FLAGS |= {"warmup_steps": 4, "grad_clip": 1e-3, "steps": 10, "weight_decay": 0.3}


def test_step_clips_each_model_and_follows_the_schedule():
    cfg = make_cfg(**STEP_FLAGS)
    learner, stepped_with = make_learner(cfg), {}

    def note(optimizer, name):  # learning rate and gradient norm inside the optimizer
        group = optimizer.param_groups[0]
        norm = sum(float(p.grad.square().sum()) for p in group["params"]) ** 0.5
        stepped_with[name] = (group["lr"], norm)

    for name, (optimizer,) in learner.optimizers.items():
        assert optimizer.param_groups[0]["weight_decay"] == 0.3
        optimizer.register_step_pre_hook(lambda optimizer, *_, name=name: note(optimizer, name))
    logged = one_update(learner, batching.collate(make_groups(2, seed=8), cfg))
    assert (logged["lr"], logged["actor/lr"]) == pytest.approx((1e-2 / 4, 2e-2 / 4))
    assert min(logged["grad_norm"], logged["actor/grad_norm"]) > 1e-3  # as measured before the clip
    assert stepped_with["policy"] == pytest.approx((1e-2 / 4, 1e-3), rel=1e-2)
    assert stepped_with["actor"] == pytest.approx((2e-2 / 4, 1e-3), rel=1e-2)
    share = make_cfg(warmup_steps=0.07, steps=100)  # 7 updates, though 0.07 * 100 > 7
    assert schedule(6, share) == 1 > schedule(5, share)


def test_the_rate_falls_with_the_effective_sample_size():
    cfg = make_cfg(lr_from_ess=True, lr=1e-2, warmup_steps=0, actor="base:actor", actor_lr=2e-2, obrs_topk=3)
    groups = make_groups(longest=2)
    learner = make_learner(cfg)
    write_ref(learner, groups)
    batch = batching.collate(groups, cfg)
    logged = one_update(learner, batch)
    R = (batch.log_r.double() * batch.mask).sum(1).exp()
    ess = float(R.sum() ** 2 / (R**2).sum() / len(R))
    assert 0.15 < ess < 0.95
    assert (logged["lr"], logged["actor/lr"]) == pytest.approx((1e-2 * ess**0.5, 2e-2), rel=1e-5)


def test_schedules():
    cfg = make_cfg(**STEP_FLAGS)
    linear = replace(cfg, lr_schedule="linear")
    assert [schedule(step, linear) for step in (0, 3, 4, 7, 10)] == pytest.approx([0.25, 1, 1, 0.5, 0])
    assert schedule(7, replace(cfg, lr_schedule="cosine")) == pytest.approx(0.5)
    assert schedule(9, cfg) == 1.0


def test_muon_takes_the_matrices_and_adamw_the_rest():
    """Muon's step is orthogonal: all singular values of a matrix's update are similar, and its root mean square is
    0.2 lr. Embedding, head and norms use AdamW."""
    learner = make_learner(make_cfg(objective="tis", optimizer="muon", lr=1e-2, warmup_steps=0))
    adamw, muon = learner.optimizers["policy"]
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    named = dict(learner.models.policy.named_parameters())
    matrices = {id(p) for p in muon.param_groups[0]["params"]}
    inner = {name for name, p in named.items() if id(p) in matrices}
    assert inner == {name for name in named if "layers" in name and name.endswith("proj.weight")}
    assert sum(len(o.param_groups[0]["params"]) for o in (adamw, muon)) == len(named)

    before = {name: p.detach().clone() for name, p in named.items()}
    assert one_update(learner, batching.collate(make_groups(2, seed=8), learner.cfg))["stepped"]
    for name, p in named.items():
        step = p.detach() - before[name]
        assert step.abs().max() > 0, name
        if name in inner:
            s = torch.linalg.svdvals(step)
            assert s[0] < 2 * s[min(step.shape) // 2], name
            assert float(step.square().mean().sqrt()) == pytest.approx(0.2 * 1e-2, rel=0.3)


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_one_non_finite_weight_is_found(bad):
    learner = make_learner(make_cfg(objective="tis", actor="base:actor"))
    learner.step(NO_LOSS)
    with torch.no_grad():
        learner.models.actor.base_model.layers[0].mlp.up_proj.weight[3, 5] = bad
    weight = r"actor\.model\.layers\.0\.mlp\.up_proj\.weight"
    with pytest.raises(UserError, match=f"update 2 made the weight {weight} infinite or NaN: lower --lr"):
        learner.step(NO_LOSS)


def test_engine_and_learner_must_agree_up_to_a_measured_floor():
    cfg = make_cfg(objective="tis")
    assert check_agreement(cfg, Agreement(9e-4, 0.0)) == ""
    assert check_agreement(cfg, Agreement(0.09, 0.02)) == ""
    for measured in (Agreement(1.1e-3, 0.0), Agreement(0.11, 0.02), Agreement(math.nan, 0.02)):
        with pytest.raises(UserError, match="learner and engine compute different policies"):
            check_agreement(cfg, measured)
    replayed = [expects_agreement(replace(cfg, top_p=0.9, keep_sampling_mask=way)) for way in ("replay", "off")]
    assert replayed == [True, False] and not expects_agreement(replace(cfg, logprobs_mode="raw"))
    low_bits = replace(cfg, rollout_quant="w4a16")
    assert "is 0.4 on average" in check_agreement(low_bits, Agreement(0.4, 1e-4))
    assert check_agreement(replace(cfg, kv_cache_dtype="fp8"), Agreement(0.4, 1e-4))
    aligned = replace(cfg, rollout_quant="int8", learner_quant="aligned")
    with pytest.raises(UserError, match="compute different policies"):
        check_agreement(aligned, Agreement(0.4, 1e-4))


@pytest.mark.parametrize("actor", ["none", "base:actor"])
def test_the_agreement_is_of_the_sampling_model(actor):
    """The second model may be arbitrarily far away."""
    cfg = make_cfg(objective="tis", actor=actor, rollout_dtype="bfloat16")
    learner = make_learner(cfg)
    batch = batching.collate(make_groups(2, seed=9), cfg)
    logp = learner.score(batch, Needs())
    batch.logp_inf = (logp.logp if actor == "none" else logp.actor_logp).clone()
    exact = agreement(learner, batch)
    assert exact.gap == 0 < 1e-6 < exact.floor < 1e-2
    p = batch.logp_inf[0, 0].exp()
    batch.logp_inf[0, 0] = (p + 0.5 * (1 - p)).log()
    n = int(batch.mask.sum()) if len(batch) <= 16 else int(batch.mask[:16].sum())
    assert agreement(learner, batch).gap == pytest.approx(0.5 * (1 - float(p)) / n, rel=1e-4)
    assert agreement(learner, batch).floor == exact.floor  # the call changes nothing


class Casts(TorchDispatchMode):
    """Counts casts to bfloat16, by shape."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            self.counts[tuple(out.shape)] += 1
        return out


def test_weights_are_cast_once_for_all_micro_batches(monkeypatch):
    """Bodies and heads, in the ref pass and in the update; the gradient is bit-identical."""
    cfg = make_cfg(objective="jackpot", dtype="bfloat16", micro_tokens=24)
    groups = make_groups(4, seed=9)
    learner = make_learner(cfg, torch.float32)
    assert len(list(learner._micro(batching.collate(groups, cfg)))) > 2
    policy = learner.models.policy
    shapes = Counter(tuple(p.shape) for name, p in policy.named_parameters() if "_proj" in name)
    shapes[tuple(policy.get_output_embeddings().weight.shape)] += 1
    with Casts() as casts:
        once, _ = gradients(cfg, groups, torch.float32)
    assert {shape: casts.counts[shape] for shape in shapes} == {shape: 2 * n for shape, n in shapes.items()}
    monkeypatch.setattr(PolicyAndActor, "casts_kept", contextlib.nullcontext)
    with Casts() as casts:
        again, _ = gradients(cfg, groups, torch.float32)
    assert all(casts.counts[shape] >= 3 * 2 * n for shape, n in shapes.items())
    assert all(torch.equal(g, again[name]) for name, g in once.items())


class Waits(TorchDispatchMode):
    """Names of the operations for which a host waits for a GPU: sizes and values that it reads, constants that it
    copies, and index lists."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        reads = func._opname in ("_local_scalar_dense", "nonzero", "unique_consecutive", "masked_select", "_unique2")
        copies = func._opname == "lift_fresh" and args[0].numel() > 0
        indices = args[1] if func._opname in ("index", "index_put", "index_put_") else []
        by_mask = any(x is not None and x.dtype == torch.bool for x in indices)
        self.names[func._opname] += reads or copies or by_mask
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", [{}, {"actor": "base:actor"}, {"entropy_coef": 0.1, "temperature": 0.7}], ids=str)
@pytest.mark.parametrize("objective", ["jackpot", "tbpo", "gepo"])
@pytest.mark.parametrize("prompt", [(1, 2), (30, 34)], ids=["separate prompts", "shared prompts"])
def test_no_micro_batch_waits_for_the_gpu(objective, case, prompt):
    """Except for micro-batches of two tokens, for which transformers reads the mask."""
    cfg, groups = make_cfg(objective=objective, micro_tokens=120, **case), make_groups(4, seed=9, prompt=prompt)
    learner = make_learner(cfg, torch.float32)
    write_ref(learner, groups)
    batch = batching.collate(groups, cfg)
    micros, stats = list(learner._micro(batch)), objectives.prepare(batch, learner.comm, cfg, {})
    parts = [stats.select(rows) for rows, *_ in micros]
    needs = models.needs_of_update(cfg, learner.has_actor, True)
    assert len(micros) > 1 and {share for *_, share in micros} == {prompt == (30, 34)}
    for (_, micro, share), part in zip(micros, parts, strict=True):
        with Waits() as waits:
            new = models.TokenStats(**learner.wrapped(micro, needs, share))
            unreduced, logs = objectives.joint_loss(new, micro, part, cfg)
            objectives.reduce(unreduced, micro.mask, part, cfg).backward()
            with torch.no_grad():
                learner_module.observe(Sums(), new.detach(), objectives.with_ref(new, micro), part, logs, cfg)
        assert not +waits.names or micro.tokens.shape[1] == 2
    with Waits() as waits:
        learner.wrapped(replace(micros[0][1], facts=None), Needs(), share)
    assert waits.names["nonzero"]  # without the facts that `Batch.to` computes


def test_the_fused_adamw_equals_the_plain_one(monkeypatch):
    """On a GPU one kernel updates all weights. Low-bit layers see that they have changed."""
    weights = {}
    for kinds in (set(), {"cpu"}):
        monkeypatch.setattr(optim, "FUSED", kinds)
        flags = dict(rollout_quant="int8", learner_quant="aligned", lr=1e-3, weight_decay=0.1)
        learner = make_learner(make_cfg(objective="grpo", **flags), torch.float32)
        assert learner.optimizers["policy"][0].defaults["fused"] == bool(kinds)
        layer = learner.models.policy.base_model.layers[0].mlp.up_proj
        for step in range(3):
            before = layer.quantized()
            for i, p in enumerate(learner.models.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
            learner.step(NO_LOSS | {"loss": 1.0})
            assert layer.quantized() is not before
            assert torch.equal(layer.quantized()[0], layer.format.quantize(layer.weight.detach())[0])
        weights[bool(kinds)] = torch.cat([p.detach().flatten() for p in learner.models.parameters()])
        learner.make_states({f"{key}/step": ((), torch.float32) for key in learner._learning("policy").values()})
    assert torch.allclose(weights[True], weights[False], rtol=1e-6, atol=1e-8)


SHORT, LONG, slow = (2, 3), (30, 34), pytest.mark.slow  # prompts; long ones are shared


@pytest.mark.parametrize(
    "backend, prompt, flags",
    [
        ("aot_eager", LONG, {"gradient_checkpointing": True}),
        pytest.param("aot_eager", SHORT, {}, marks=slow),
        pytest.param("aot_eager", SHORT, {"objective": "jackpot", **TWO, "kl_coef": 0.1}, marks=slow),
        pytest.param("inductor", SHORT, {}, marks=slow),
    ],
)
def test_compiled_layers_give_the_same_gradient(backend, prompt, flags, monkeypatch):
    """One graph serves all layers and lengths, or one graph for each layer type."""
    groups = make_groups(3, seed=4, prompt=prompt)
    cfg = make_cfg(**{"objective": "grpo", "rollout": "hf", "micro_tokens": 64, **flags})
    monkeypatch.setattr(kernels, "BACKEND", backend)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # a vLLM engine in this process may have set it
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    two = cfg.actor != "none"
    with torch._dynamo.config.patch(disable=False):
        compiled, _ = gradients(replace(cfg, kernels="compile"), groups, torch.float32, ref=two)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    plain, _ = gradients(cfg, groups, torch.float32, ref=two)
    assert 0 < graphs <= 4
    assert relative(plain, compiled) < 1e-6


def test_a_second_learner_does_not_compile_a_model_again():
    model = tiny_model(0, layers=2)
    plain = [layer.forward for layer in model.base_model.layers]
    for _ in range(2):
        kernels.apply(model, "compile")
    for layer, forward in zip(model.base_model.layers, plain, strict=True):
        assert layer.forward.func is kernels.without_cache and layer.forward.args[1] == forward


def test_an_overflow_lowers_the_loss_scale_and_the_run_continues(monkeypatch):
    """Only overflows at the smallest loss scale count as skips."""
    monkeypatch.setattr(learner_module, "MAX_SKIPS", 1)
    learner = make_learner(make_cfg(objective="grpo", dtype="float16", warmup_steps=0), torch.float32)
    batch = batching.collate(make_groups(2, seed=9), learner.cfg)
    learner.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = weights(learner)
    scales = []
    while not (logged := one_update(learner, batch))["stepped"] and len(scales) < 40:
        assert all(torch.equal(p, before[name]) for name, p in learner.models.named_parameters())
        scales.append(logged["loss_scale"])
    assert scales == [2.0 ** (40 - n) for n in range(1, len(scales) + 1)] and len(scales) > 3
    assert (logged["loss_scale"], logged["skipped_steps"], learner.error) == (scales[-1], len(scales), "")
    again = make_learner(learner.cfg, torch.float32)
    again.load_state_dict(learner.state_dict())
    assert again.scaler.get_scale() == scales[-1]
    for p in learner.models.parameters():
        p.grad = torch.full_like(p, torch.nan)
    learner.scaler.update(0.5)
    assert not learner.step(NO_LOSS)["stepped"]
    assert "1 updates in a row" in learner.error


# -- Ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_give_the_gradient_of_one(parallel, tmp_path):
    """Two gloo ranks (tests/torchrun.py), unequal shares and numbers of micro-batches: the gradient of one process."""
    out = tmp_path / "ranks.pt"
    torchrun("ranks.py", parallel, out)
    ranks = torch.load(out)
    for i, (case, dtype, odd) in enumerate(RANK_CASES[parallel]):
        cfg = make_cfg(**case, train_batch=16, rollout_batch=16, micro_tokens=10**6)
        learner = make_learner(cfg, dtype)
        for name in learner.names:
            rounding = 1e-2 if cfg.dtype == "float16" else 1e-5
            assert np.abs(ranks[i]["probed"][name].numpy() - logprobs(learner, name, PROBE)).max() < rounding, case
        want, logged, controllers = update_of_one(cfg, learner, rank_groups(odd))
        grads = ranks[i]["grads"]
        if odd.startswith("all") and cfg.actor == "none":  # nothing to learn
            assert not any(g.any() for g in [*want.values(), *grads.values()]), case
        else:
            rounding = 1e-10 if dtype == f64 else 1e-5
            rounding = 1e-2 if cfg.dtype == "float16" else rounding
            assert relative(want, grads) < rounding, (case, odd)
        assert ranks[i]["square"] == pytest.approx(
            sum(float((g.double() ** 2).sum()) for g in grads.values()), rel=1e-9
        )
        for metrics, end in ranks[i]["logged"]:
            assert metrics.keys() == logged.keys()
            if cfg.dtype != "float16":  # different rows in one product give different roundings
                assert metrics == pytest.approx(logged, rel=1e-5, abs=1e-7, nan_ok=True), (case, odd)
                assert end == pytest.approx(controllers), (case, odd)
        assert ranks[i]["shared"] == {i != 1} or odd
        assert ranks[i]["roundtrip"]
        assert ranks[i]["names"] == sorted(tiny_model(0, layers=2).state_dict())


def test_comm_keeps_float64():
    """float32 cannot hold a clock in seconds since the epoch."""
    for reduced in (Comm().max, Comm().sum):
        assert reduced([1795284480.123456, torch.tensor(0.5), 3]) == [1795284480.123456, 0.5, 3.0]
