"""The learner: the gradient is the derivative of the loss for every split into micro-batches and ranks."""

import contextlib
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import copy_state, make_cfg, make_groups, tiny_model
from ranks import PROBE, RANK_CASES, UNEVEN_CASES, hold_back_the_step, make_learner, move, rank_groups
from ranks import one_update as update_of_one
from torch.utils._python_dispatch import TorchDispatchMode
from torchrun import torchrun

import batching
import learner as learner_module
import model as models
import objectives
import obrs
from learner import Agreement, Comm, Learner, check_agreement
from machinery.flags import UserError
from machinery.optim import make_optimizers, schedule
from model import Needs, PolicyAndActor, kernels, needs_of_exact_kappa, needs_of_ref_pass, needs_of_update

f64 = torch.float64


def gradients(cfg, groups, dtype=f64, ref=True):
    """(gradients of every parameter after the backward passes of one update, its metrics); no optimizer step."""
    learner = make_learner(cfg, dtype)
    if ref:
        write_ref(learner, groups)
    batch = batching.collate(groups, cfg)
    if ref:
        move(learner)
    stats = objectives.prepare(batch, learner.comm, cfg, {})
    hold_back_the_step(learner)
    logged = learner.update(batch, stats)
    return gradients_of(learner), logged


def gradients_of(learner) -> dict:
    return {name: p.grad.clone() for name, p in learner.models.named_parameters() if p.requires_grad}


def write_ref(learner, groups) -> None:
    batch = batching.collate(groups, learner.cfg)
    batching.write_ref_columns(groups, learner.ref_columns(batch, learner.cfg.obrs_lambda))


def one_update(learner, batch) -> dict:
    return learner.update(batch, objectives.prepare(batch, learner.comm, learner.cfg, {}))


def weights(learner) -> dict:
    return {name: p.detach().clone() for name, p in learner.models.named_parameters()}


def relative(a, b) -> float:
    """|a - b| / |a| over all parameters together."""
    difference = sum(float((a[n] - b[n]).double().square().sum()) for n in a)
    return (difference / sum(float(a[n].double().square().sum()) for n in a)) ** 0.5


def rows_of(groups):
    """(row of the batch, group, response)."""
    pairs = [(g, r) for g in groups for r in g.responses]
    return [(row, g, r) for row, (g, r) in enumerate(pairs)]


def log_probabilities(model, g, r, temperature=1.0):
    """(log-probabilities (L, V) along a response from the model's logits, its token ids (L,))."""
    ids = torch.from_numpy(np.concatenate([g.prompt_ids, r.tokens]).astype(np.int64))
    P = len(g.prompt_ids)
    logits = model(input_ids=ids[None]).logits[0, P - 1 : -1]
    return (logits / temperature).log_softmax(-1), ids[P:]


def at(logp, ids):
    return logp.gather(1, ids[:, None])[:, 0]


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches
# ---------------------------------------------------------------------------------------------------------------------

CASES = [
    {"objective": "grpo"},
    {"objective": "tis", "reduction": "seq-mean-token-mean"},
    {"objective": "mis_gspo"},
    {"objective": "gepo", "gepo_defence": 4.0, "cppo_beta": 0.5},
    {"objective": "jackpot"},
    {"objective": "jackpot", "obrs_target": "new"},
    {"objective": "jackpot", "obrs_mask": "expected", "loss_denominator": "kept"},
    {"objective": "jackpot", "loss_denominator": "kept", "reduction": "seq-mean-token-mean"},
    {"objective": "jackpot", "obrs_accept_rate": 0.8},
    {"objective": "geo_rs", "loss_denominator": "kept", "rs_low": 0.001, "rs_high": 0.15},
    {"objective": "seq_tis", "reduction": "seq-mean-token-sum-norm"},
    {"objective": "jackpot", "actor": "base:actor"},
    {"objective": "jackpot", "actor": "base:actor", "obrs_target": "new", "distill_direction": "reverse"},
    {"objective": "jackpot_adjusted"},
    {"objective": "tis_adjusted"},
    {"objective": "tis", "kl_coef": 0.3, "entropy_coef": 0.1},
    {"objective": "jackpot", "actor": "base:actor", "kl_coef": 0.3, "kl_estimator": "k3", "entropy_coef": 0.1},
]


def name_of(case) -> str:
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize("dtype, tolerance, close", [(f64, 1e-10, 1e-6), (torch.float32, 1e-5, 1e-3)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_any_micro_batch_split_gives_the_same_gradient(case, dtype, tolerance, close):
    results = []
    # one micro-batch, several, one for each response; the last reads each row's prompt separately
    for micro_tokens, share in ((10**6, True), (45, True), (1, False)):
        cfg = make_cfg(**case, micro_tokens=micro_tokens, train_batch=12, rollout_batch=12)
        groups = make_groups(3, seed=3, prompt=(3, 12))
        assert {s for *_, s in make_learner(cfg, dtype)._micro(batching.collate(groups, cfg))} == {share}
        results.append(gradients(cfg, groups, dtype))
    want, wanted_log = results[0]
    for grads, logged in results[1:]:
        assert relative(want, grads) < tolerance
        for key, value in wanted_log.items():
            assert logged[key] == pytest.approx(value, rel=close, abs=1e-6), key


def tokens_read(batch, rows, share) -> int:
    """Tokens that a micro-batch of these rows reads, with padding."""
    m = batch.select(rows)
    if share:
        return len(m) * m.tokens.shape[1] + len(set(m.group.tolist())) * int(m.prompt_len.max())
    return len(m) * longest(m)


def longest(batch) -> int:
    return int((batch.prompt_len + batch.length).max())


def test_gradients_of_a_shared_prompt_are_added_up_in_order():
    """x[group] would sum gradients in the order of torch's threads, different in every run. The graph has no such
    node, and 40 backward passes with two threads agree."""
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

    def gradient():
        policy.zero_grad()
        models.read_shared(policy, batch, at).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = gradient()
        assert all(torch.equal(gradient(), first) for _ in range(40))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("budget", [10**6, 60, 31, 1])
def test_micro_batches_hold_every_row_once_within_the_budget(budget, share):
    b = batching.collate(make_groups(5, seed=1, prompt=(3, 12)), make_cfg())
    parts, total = batching.micro_batches(b, budget, share)
    assert sorted(row for rows in parts for row in rows) == list(range(len(b)))
    tokens = [tokens_read(b, rows, share) for rows in parts]
    assert sum(tokens) == total
    for rows, n in zip(parts, tokens, strict=True):
        assert n <= budget or len(rows) == 1
    assert (len(parts) == 1) == (budget == 10**6)
    assert (len(parts) == len(b)) == (budget == 1)


def test_groups_of_equal_size_stay_whole():
    b = batching.collate(make_groups(3, seed=1, prompt=(5, 6)), make_cfg())
    b = replace(b, length=torch.tensor([4, 2, 3, 1] * 3))
    parts, _ = batching.micro_batches(b, 4 * 4 + 5, share=True)
    assert sorted(parts) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_the_longest_micro_batch_comes_first():
    b = batching.collate(make_groups(5, seed=1, prompt=(3, 12)), make_cfg())
    lengths = [longest(b.select(rows)) for rows in batching.micro_batches(b, 31, share=False)[0]]
    assert lengths == sorted(lengths, reverse=True)


def test_sliding_windows_read_each_prompt_with_its_response():
    learner = make_learner(make_cfg(actor="base:actor"))
    assert learner.models.can_share
    learner.models.actor.config.layer_types = ["sliding_attention"]
    assert not learner.models.can_share
    learner = make_learner(make_cfg())
    learner.models.policy.config.sliding_window = 16
    b = batching.collate(make_groups(3, seed=3, prompt=(3, 12)), make_cfg())
    assert {share for *_, share in learner._micro(b)} == {False}


# ---------------------------------------------------------------------------------------------------------------------
# Against full logits
# ---------------------------------------------------------------------------------------------------------------------


def written_out_loss(model, groups):
    """(sum of the TIS losses of all tokens with a gradient, number of tokens), from the model's logits."""
    total, count = 0.0, 0
    for g in groups:
        reward = torch.tensor([r.reward for r in g.responses], dtype=f64)
        adv = torch.zeros_like(reward)
        if reward.std() > 0:
            adv = (reward - reward.mean()) / (reward.std() + 1e-6)
        for a, r in zip(adv, g.responses, strict=True):
            logp = at(*log_probabilities(model, g, r))
            w = (logp.detach() - torch.from_numpy(r.logp_inf)).exp().clamp_max(2.0)
            on = torch.from_numpy(r.loss_mask)
            total = total - (w * (logp - logp.detach()).exp() * a)[on].sum()
            count += int(on.sum())
    return total, count


def test_gradient_is_the_derivative_of_the_written_out_loss():
    """TIS with a token-mean over the whole batch, without the learner's code."""
    cfg, groups = make_cfg(objective="tis", micro_tokens=30), make_groups(2, seed=1)
    grads, logged = gradients(cfg, groups, ref=False)
    model = tiny_model(0, layers=2, dtype=f64)
    total, count = written_out_loss(model, groups)
    (total / count).backward()
    want = {"policy." + name: p.grad for name, p in model.named_parameters()}
    assert relative(want, grads) < 1e-6  # advantages are float32
    assert logged["loss"] == pytest.approx(float(total.detach() / count), rel=1e-6)
    assert logged["tokens"] == count


def test_score_is_the_models_log_softmax_with_temperature():
    groups = make_groups(2, seed=2)
    for g in groups:
        g.sampling = replace(g.sampling, temperature=0.7)
    cfg = make_cfg(objective="jackpot", micro_tokens=25)
    learner = make_learner(cfg)
    stats = learner.score(batching.collate(groups, cfg), Needs(entropy=True, support=True, tail=True))
    assert stats.known().keys() == {"logp", "entropy", "support_logp", "tail"}
    for row, g, r in rows_of(groups):
        logp, ids = log_probabilities(learner.models.policy, g, r, temperature=0.7)
        L = len(r.tokens)
        top = torch.from_numpy(r.topk_ids.astype(np.int64))
        assert torch.allclose(stats.logp[row, :L], at(logp, ids), atol=1e-7)
        assert torch.allclose(stats.entropy[row, :L], -(logp.exp() * logp).sum(-1), atol=1e-7)
        assert torch.allclose(stats.support_logp[row, :L, 0], at(logp, ids), atol=1e-7)
        assert torch.allclose(stats.support_logp[row, :L, 1:], logp.gather(1, top), atol=1e-7)
        assert float(stats.logp[row, L:].abs().sum()) == 0


@pytest.mark.parametrize("lam", [0.7, 1.5])
def test_z_and_tail_of_the_learner_at_any_lambda(lam):
    cfg = make_cfg(objective="jackpot", actor="base:actor", obrs_target="new")
    learner, groups = make_learner(cfg), make_groups(2, seed=2)
    b = batching.collate(groups, cfg)
    stats = learner.score(b, Needs(support=True, tail=True, exact_z=True, lam=lam))
    for row, g, r in rows_of(groups):
        L = len(r.tokens)
        p = log_probabilities(learner.models.policy, g, r)[0].exp()
        q = log_probabilities(learner.models.actor, g, r)[0].exp()
        outside = torch.ones_like(p).scatter_(1, b.support_ids[row, :L], 0.0)
        tail = (torch.minimum(p / lam, b.p_kth[row, :L, None].double()) * outside).sum(-1)
        assert torch.allclose(stats.z[row, :L], torch.minimum(q, p / lam).sum(-1), atol=1e-7)
        assert torch.allclose(stats.tail[row, :L], tail, atol=1e-6)


def test_the_larger_support_lists_no_token_twice():
    cfg = make_cfg(objective="jackpot", actor="base:actor", obrs_target="new")
    learner, groups = make_learner(cfg), make_groups(2, seed=2)
    b = batching.collate(groups, cfg)
    columns = learner.ref_columns(b, 0.7)
    for row in range(len(b)):
        for t in range(int(b.length[row])):
            counts = columns["support_logp"][row, t].isfinite()
            ids = columns["support_ids"][row, t][counts].tolist()
            assert len(ids) == len(set(ids))
            assert len(ids) > 3


@pytest.mark.parametrize("target", ["ref", "new"])
@pytest.mark.parametrize("flags", [{}, {"actor": "base:actor"}, {"actor": "base:actor", "delay": "lognormal"}], ids=str)
def test_z_approx_is_the_sum_over_both_top_k(flags, target):
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
    hold_back_the_step(learner)
    stats = objectives.prepare(batch, learner.comm, cfg, {})
    logged = learner.update(batch, stats)
    assert sampled_left_out > 0
    assert logged["obrs/z_approx"] == pytest.approx(sum(sums) / len(sums), rel=1e-6)
    assert logged["z_sum"] == pytest.approx(sum(sums), rel=1e-6)
    assert logged["obrs/z"] == pytest.approx(stats.kappa * sum(sums) / len(sums), rel=1e-6)
    assert not {"obrs/z_low", "obrs/z_high"} & set(logged)


def probabilities(model, groups) -> list:
    """[row][token][x] as plain numbers: the model's probabilities along each response."""
    with torch.no_grad():
        return [log_probabilities(model, g, r)[0].exp().tolist() for _, g, r in rows_of(groups)]


def sample_from_the_actor(learner, groups, K=5) -> None:
    """Replace p_inf and its top-K by the actor's."""
    for _, g, r in rows_of(groups):
        with torch.no_grad():
            logq, ids = log_probabilities(learner.models.actor, g, r)
        top, where = logq.topk(K, -1)
        r.topk_ids, r.topk_logp = where.int().numpy(), top.float().numpy()
        r.logp_inf = at(logq, ids).float().numpy()


def test_bracket_contains_the_exact_z_of_two_models():
    """Exact Z is in the bracket, and a larger support (target new) narrows the bracket."""
    cfg = make_cfg(objective="jackpot", actor="base:actor", obrs_target="new")
    learner, groups = make_learner(cfg), make_groups(3, seed=4, K=5)
    sample_from_the_actor(learner, groups)
    exact = learner.score(batching.collate(groups, cfg), Needs(exact_z=True)).z

    def width_of_the_bracket():
        b = batching.collate(groups, cfg)
        stats = learner.score(b, Needs(support=True, tail=True))
        low, high = (x[b.mask] for x in obrs.z_bracket(b.support_logp, stats.support_logp, 1.0, stats.tail))
        assert (low <= exact[b.mask] + 1e-6).all()
        assert (exact[b.mask] <= high + 1e-6).all()
        return high - low

    small = width_of_the_bracket()
    assert float(small.max()) > 0.01
    write_ref(learner, groups)
    assert float(width_of_the_bracket().mean()) < float(small.mean())


def test_allowed_sets_reach_the_head():
    """Each token is renormalised over its allowed set, through collate, micro-batches and the chunked head."""
    groups, rng, K = make_groups(2, seed=3), np.random.default_rng(0), 6
    for _, g, r in rows_of(groups):
        g.sampling = replace(g.sampling, top_k=K + 1)
        sets = [np.unique(np.append(rng.choice(256, K), token)) for token in r.tokens]
        r.allowed_ids = np.concatenate(sets).astype(np.int32)
        r.allowed_offsets = np.cumsum([0, *map(len, sets)])
    cfg = make_cfg(objective="grpo", micro_tokens=25)
    learner = make_learner(cfg)
    logp = learner.score(batching.collate(groups, cfg), Needs()).logp
    for row, g, r in rows_of(groups):
        p = log_probabilities(learner.models.policy, g, r)[0].exp().detach()
        for t, token in enumerate(r.tokens):
            allowed = r.allowed_ids[r.allowed_offsets[t] : r.allowed_offsets[t + 1]].astype(np.int64)
            want = math.log(p[t, int(token)] / p[t, allowed].sum())
            assert float(logp[row, t]) == pytest.approx(want, abs=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Outputs of each pass
# ---------------------------------------------------------------------------------------------------------------------


def test_the_outputs_of_each_pass_follow_the_objective():
    jackpot = make_cfg(objective="jackpot")
    two = make_cfg(objective="jackpot", actor="base:actor")
    target_new = make_cfg(objective="jackpot", obrs_target="new")
    assert needs_of_ref_pass(make_cfg(objective="tis"), False, 1.0) == Needs()
    assert needs_of_ref_pass(jackpot, False, 1.0) == Needs(support=True, tail=True)
    assert needs_of_ref_pass(two, True, 1.0) == Needs(exact_z=True)
    assert needs_of_update(two, True, 1.0, has_ref=False).exact_z
    assert not needs_of_update(two, True, 1.0, has_ref=True).exact_z
    assert needs_of_update(target_new, False, 1.0, has_ref=True).support
    assert needs_of_exact_kappa(target_new) == Needs(support=True, tail=True)


@pytest.mark.parametrize("flags", [{"distill_direction": "reverse"}, {}], ids=str)
def test_distillation_follows_the_flags(flags):
    needs = needs_of_update(make_cfg(objective="tis", actor="base:actor", **flags), True, 1.0, has_ref=True)
    assert needs.distill == flags.get("distill_direction", "forward")


def test_a_budget_knows_the_whole_kl_before_but_not_after():
    """lambda is solved after the ref pass: KL(policy || actor) is independent of lambda, the accepted KL is not."""
    cfg = make_cfg(objective="jackpot", actor="base:actor", obrs_accept_rate=0.9)
    _, logged = gradients(cfg, make_groups(2, seed=4))
    assert logged["obrs/kl_before"] > 0
    assert "obrs/kl_after" not in logged
    assert "obrs/kl_after_partial" in logged
    assert "obrs/z_exact" not in logged


@pytest.mark.parametrize("case", [{"objective": "tis"}, {"objective": "jackpot", "actor": "base:actor"}], ids=name_of)
def test_one_forward_serves_as_ref_pass_for_a_single_update(case):
    """With one update a batch, the gradient is the same with and without an explicit ref pass."""
    cfg, groups = make_cfg(**case), make_groups(2, seed=6)
    learner = make_learner(cfg)
    free, _ = gradients(cfg, groups, ref=False)
    write_ref(learner, groups)
    hold_back_the_step(learner)
    one_update(learner, batching.collate(groups, cfg))
    assert relative(free, gradients_of(learner)) < 1e-6


# ---------------------------------------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------------------------------------


def test_a_batch_of_empty_responses_is_a_finite_zero():
    cfg, groups = make_cfg(objective="tis"), make_groups(2, seed=4)
    for _, _, r in rows_of(groups):
        for name in ("tokens", "loss_mask", "logp_inf", "topk_ids", "topk_logp"):
            setattr(r, name, getattr(r, name)[:0])
    grads, logged = gradients(cfg, groups)
    assert logged["loss"] == 0
    assert logged["tokens"] <= 1
    assert all(float(g.abs().sum()) == 0 for g in grads.values())


def test_non_finite_steps_are_skipped_counted_and_stop_the_run(monkeypatch):
    monkeypatch.setattr(learner_module, "MAX_SKIPS", 2)
    cfg = make_cfg(objective="grpo")
    learner = make_learner(cfg, torch.float32)
    good = batching.collate(make_groups(2, seed=0), cfg)
    bad = replace(good, adv=good.adv * torch.inf)
    before = weights(learner)
    assert one_update(learner, bad)["skipped_steps"] == 1
    assert all(torch.equal(p, before[name]) for name, p in weights(learner).items())
    assert one_update(learner, good)["skipped_steps"] == 1
    assert learner.skipped_in_a_row == 0
    assert any(not torch.equal(p, before[name]) for name, p in weights(learner).items())
    one_update(learner, bad)
    assert not learner.error
    one_update(learner, bad)
    assert "2 updates in a row had a non-finite loss or gradient" in learner.error  # train.py saves and stops


@pytest.mark.parametrize("flag", ["entropy_coef", "cppo_beta"])
def test_unmasked_terms_learn_from_a_completely_rejected_batch(flag):
    """CPPO's KL must pull back a policy so far off that every token is rejected."""
    cfg = make_cfg(objective="geo_rs", rs_low=1e8, rs_high=1e9, **{flag: 0.1})
    learner = Learner(tiny_model(0), None, cfg, Comm())
    before = weights(learner)
    logged = one_update(learner, batching.collate(make_groups(), cfg))
    assert logged["rejected_steps"] == 0 and logged["grad_norm"] > 0
    assert any(not torch.equal(p, before[name]) for name, p in weights(learner).items())


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
    assert logged["rejected_steps"] == 1
    assert logged["stepped"] == 1
    assert logged["grad_norm"] == 0
    assert math.isfinite(logged["loss"])
    for name, p in weights(learner).items():
        assert torch.equal(p, before[name]) == name.startswith("policy"), name


STEP_FLAGS = {"objective": "tis", "actor": "base:actor", "lr": 1e-2, "actor_lr": 2e-2}
STEP_FLAGS |= {"warmup_steps": 4, "grad_clip": 1e-3, "steps": 10}


def test_step_clips_each_model_and_follows_the_schedule():
    cfg = make_cfg(**STEP_FLAGS)
    learner, stepped_with = make_learner(cfg), {}

    def note(optimizer, name):  # learning rate and gradient norm inside the optimizer
        group = optimizer.param_groups[0]
        norm = sum(float(p.grad.square().sum()) for p in group["params"]) ** 0.5
        stepped_with[name] = (group["lr"], norm)

    for name, (optimizer,) in learner.optimizers.items():
        optimizer.register_step_pre_hook(lambda optimizer, *_, name=name: note(optimizer, name))
    logged = one_update(learner, batching.collate(make_groups(2, seed=8), cfg))
    assert logged["lr"] == pytest.approx(1e-2 / 4)
    assert logged["actor/lr"] == pytest.approx(2e-2 / 4)
    assert logged["grad_norm"] > 1e-3  # as measured before the clip
    assert logged["actor/grad_norm"] > 1e-3
    assert stepped_with["policy"] == pytest.approx((1e-2 / 4, 1e-3), rel=1e-2)
    assert stepped_with["actor"] == pytest.approx((2e-2 / 4, 1e-3), rel=1e-2)


def test_a_finite_loss_with_a_bad_gradient_is_skipped():
    learner = make_learner(make_cfg(**STEP_FLAGS))
    for p in learner.models.parameters():
        p.grad = torch.full_like(p, torch.nan)
    assert learner._step(0.0)["stepped"] == 0


def test_the_flags_reach_adamw():
    cfg = make_cfg(weight_decay=0.3)
    group = make_learner(cfg).optimizers["policy"][0].param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-8, 0.3)


def test_schedules():
    cfg = make_cfg(**STEP_FLAGS)
    linear = replace(cfg, lr_schedule="linear")
    assert [schedule(step, linear) for step in (0, 3, 4, 7, 10)] == pytest.approx([0.25, 1, 1, 0.5, 0])
    assert schedule(7, replace(cfg, lr_schedule="cosine")) == pytest.approx(0.5)
    assert schedule(9, cfg) == 1.0


def test_muon_takes_no_convolution():
    """Three axes, but not stacked experts: the (channels, 1, width) weight of a mixer."""
    base = torch.nn.Module()
    base.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False), torch.nn.Conv1d(8, 8, 4, groups=8)])
    model = SimpleNamespace(base_model=base, parameters=base.parameters, named_modules=base.named_modules)
    adamw, muon = make_optimizers(model, make_cfg(optimizer="muon"), lr=0.01)
    shapes = [[tuple(p.shape) for group in o.param_groups for p in group["params"]] for o in (adamw, muon)]
    assert shapes == [[(8, 1, 4), (8,)], [(8, 8)]]


def test_muon_takes_the_matrices_and_adamw_the_rest():
    """Muon's step is orthogonal: all singular values of a matrix's update are similar. Embedding, head and norms
    use AdamW."""
    learner = make_learner(make_cfg(objective="tis", optimizer="muon", lr=1e-2, warmup_steps=0))
    adamw, muon = learner.optimizers["policy"]
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
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

    copy = make_learner(learner.cfg)
    copy_state(copy, learner)
    loaded = copy.optimizers["policy"][1].state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(loaded, muon.state_dict()["state"][0]["momentum_buffer"])


@pytest.mark.parametrize("shape", [(20, 500), (500, 20), (50, 50)])
def test_muon_moves_an_entry_as_far_as_adamw_would(shape):
    """0.2 lr (root mean square) for every shape of the matrix."""
    layers = torch.nn.ModuleList([torch.nn.Linear(shape[1], shape[0], bias=False)])
    model = torch.nn.ModuleDict({"layers": layers, "norm": torch.nn.LayerNorm(2)})
    model.base_model = SimpleNamespace(layers=layers)
    _, muon = make_optimizers(model, make_cfg(optimizer="muon", weight_decay=0.0), lr=0.01)
    weight = layers[0].weight
    before = weight.detach().clone()
    weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    muon.step()
    assert float((weight.detach() - before).square().mean().sqrt()) == pytest.approx(0.2 * 0.01, rel=0.3)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_non_finite_weight_is_found(bad):
    learner = make_learner(make_cfg(objective="tis", actor="base:actor"))
    assert learner.is_finite()
    with torch.no_grad():
        learner.models.actor.base_model.layers[0].mlp.up_proj.weight[3, 5] = bad
    assert not learner.is_finite()
    with pytest.raises(UserError, match="update 1 made weights infinite or NaN"):
        learner._step(0.0)


def test_engine_and_learner_must_agree_up_to_a_measured_floor():
    cfg = make_cfg(objective="tis")
    assert check_agreement(cfg, Agreement(9e-4, 0.0)) == ""
    assert check_agreement(cfg, Agreement(0.09, 0.02)) == ""
    for agreement in (Agreement(1.1e-3, 0.0), Agreement(0.11, 0.02), Agreement(math.nan, 0.02)):
        with pytest.raises(UserError, match="learner and engine compute different policies"):
            check_agreement(cfg, agreement)
    low_bits = replace(cfg, rollout_quant="w4a16")
    assert "is 0.4 on average" in check_agreement(low_bits, Agreement(0.4, 1e-4))
    assert check_agreement(replace(cfg, kv_cache_dtype="fp8"), Agreement(0.4, 1e-4))
    aligned = replace(cfg, rollout_quant="int8", learner_quant="aligned")
    assert check_agreement(aligned, Agreement(0.001, 1e-4, plain=0.03)) == ""
    assert "alignment reduces the mismatch little" in check_agreement(aligned, Agreement(0.037, 0.03, plain=0.038))
    with pytest.raises(UserError, match="compute different policies"):
        check_agreement(aligned, Agreement(0.4, 1e-4, plain=0.4))


@pytest.mark.parametrize("actor", ["none", "base:actor"])
def test_the_agreement_is_of_the_sampling_model(actor):
    """The second model may be arbitrarily far away."""
    cfg = make_cfg(objective="tis", actor=actor)
    learner = make_learner(cfg)
    batch = batching.collate(make_groups(2, seed=9), cfg)
    logp = learner.score(batch, Needs())
    batch.logp_inf = (logp.logp if actor == "none" else logp.actor_logp).clone()
    exact = learner.agreement(batch)
    assert exact.gap == 0 < exact.floor < 1e-5 and math.isnan(exact.plain)
    p = batch.logp_inf[0, 0].exp()
    batch.logp_inf[0, 0] = (p + 0.5 * (1 - p)).log()
    n = int(batch.mask.sum()) if len(batch) <= 16 else int(batch.mask[:16].sum())
    assert learner.agreement(batch).gap == pytest.approx(0.5 * (1 - float(p)) / n, rel=1e-4)
    assert learner.agreement(batch).floor == exact.floor  # the call changes nothing


def test_bfloat16_runs_close_to_float32():
    groups = make_groups(2, seed=9)
    full, _ = gradients(make_cfg(objective="grpo"), groups, torch.float32, ref=False)
    half, _ = gradients(make_cfg(objective="grpo", dtype="bfloat16"), groups, torch.float32, ref=False)
    assert 0 < relative(full, half) < 0.2
    assert {g.dtype for g in half.values()} == {torch.float32}


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


@pytest.mark.parametrize("objective", ["grpo", "jackpot"])
def test_weights_are_cast_once_for_all_micro_batches(objective, monkeypatch):
    """Bodies and heads, in the ref pass (Jackpot's) and in the update; the gradient is bit-identical."""
    passes = 2 if objective == "jackpot" else 1
    cfg = make_cfg(objective=objective, dtype="bfloat16", micro_tokens=24)
    groups = make_groups(4, seed=9)
    learner = make_learner(cfg, torch.float32)
    assert len(list(learner._micro(batching.collate(groups, cfg)))) > 2
    shapes = Counter()
    for model in (learner.models.policy, learner.models.actor):
        if model is not None:
            shapes += Counter(tuple(p.shape) for name, p in model.named_parameters() if "_proj" in name)
            shapes[tuple(model.get_output_embeddings().weight.shape)] += 1
    with Casts() as casts:
        once, _ = gradients(cfg, groups, torch.float32, ref=passes == 2)
    assert {shape: casts.counts[shape] for shape in shapes} == {shape: passes * n for shape, n in shapes.items()}
    monkeypatch.setattr(PolicyAndActor, "casts_kept", contextlib.nullcontext)
    with Casts() as casts:
        again, _ = gradients(cfg, groups, torch.float32, ref=passes == 2)
    assert all(casts.counts[shape] >= 3 * passes * n for shape, n in shapes.items())
    for name, g in once.items():
        assert torch.equal(g, again[name]), name


def test_a_cast_follows_the_weight():
    """One cast for all micro-batches, none afterwards, a new cast after the weight has changed."""
    models = make_learner(make_cfg(objective="grpo", dtype="bfloat16"), torch.float32).models
    weight = models.policy.get_output_embeddings().weight
    for step in range(2):
        with models.casts_kept():
            cast = models._cast(weight, torch.bfloat16)
            assert models._cast(weight, torch.bfloat16) is cast and not cast.requires_grad
            assert torch.equal(cast, weight.detach().bfloat16())
            assert models._cast(weight, torch.float32) is None
        assert models.casts is None and models._cast(weight, torch.bfloat16) is None
        weight.data += 1.0 + step


CASES_OF_KERNELS = {
    "rows": dict(prompt=(2, 3)),
    "shared prompts": dict(prompt=(30, 34)),
    "checkpointing": dict(prompt=(2, 3), gradient_checkpointing=True),
    "two models": dict(prompt=(2, 3), objective="jackpot", actor="base:actor", kl_coef=0.1),
}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES_OF_KERNELS)
def test_compiled_layers_give_the_same_gradient(name, backend, monkeypatch):
    """One graph serves all layers and lengths, or one graph for each layer type."""
    flags = dict(CASES_OF_KERNELS[name])
    groups = make_groups(3, seed=4, prompt=flags.pop("prompt"))
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
    assert relative(plain, compiled) < 2e-6


def test_a_second_learner_does_not_compile_a_model_again():
    model = tiny_model(0, layers=2)
    plain = [layer.forward for layer in model.base_model.layers]
    for _ in range(2):
        kernels.apply(model, "compile")
    for layer, forward in zip(model.base_model.layers, plain, strict=True):
        assert layer.forward.func is kernels.without_cache and layer.forward.args[1] == forward


def test_logprobs_for_the_weight_check_are_float32():
    """Engine and learner are compared at small updates: 16 bits would round them away."""
    ids = np.random.default_rng(0).integers(0, 200, (3, 20))
    results = []
    for dtype in ("float32", "bfloat16"):
        learner = Learner(tiny_model(0), None, make_cfg(objective="tis", dtype=dtype), Comm())
        results.append(learner.logprobs("policy", ids))
    assert np.array_equal(*results)
    assert learner.models.autocast == torch.bfloat16  # training still uses it


def test_float16_with_its_loss_scale_is_closer_to_float32_than_bfloat16():
    """Ten bits of mantissa against seven. The loss scale does not change the units of gradients."""
    groups = make_groups(2, seed=9)
    full, wanted = gradients(make_cfg(objective="grpo"), groups, torch.float32, ref=False)
    distance = {}
    for dtype in ("bfloat16", "float16"):
        got, logged = gradients(make_cfg(objective="grpo", dtype=dtype), groups, torch.float32, ref=False)
        assert logged["loss"] == pytest.approx(wanted["loss"], abs=1e-2)
        distance[dtype] = relative(full, got)
    assert 0 < distance["float16"] < 0.3 * distance["bfloat16"]


def test_an_overflow_lowers_the_loss_scale_and_the_run_continues(monkeypatch):
    monkeypatch.setattr(learner_module, "MAX_SKIPS", 1)
    learner = make_learner(make_cfg(objective="grpo", dtype="float16", warmup_steps=0), torch.float32)
    batch = batching.collate(make_groups(2, seed=9), learner.cfg)
    learner.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = weights(learner)
    scales = []
    while not (logged := one_update(learner, batch))["stepped"]:
        assert all(torch.equal(p, before[name]) for name, p in learner.models.named_parameters())
        scales.append(logged["loss_scale"])
    assert scales == [2.0 ** (40 - n) for n in range(1, len(scales) + 1)]
    assert len(scales) > 3
    assert logged["loss_scale"] == scales[-1]
    assert logged["skipped_steps"] == len(scales)
    assert not learner.error
    again = make_learner(learner.cfg, torch.float32)
    again.load_state_dict(learner.state_dict())
    assert again.scaler.get_scale() == scales[-1]


def test_overflows_at_the_smallest_scale_count_as_skips(monkeypatch):
    monkeypatch.setattr(learner_module, "MAX_SKIPS", 2)
    learner = make_learner(make_cfg(objective="grpo", dtype="float16"), torch.float32)
    for p in learner.models.parameters():
        p.grad = torch.full_like(p, torch.nan)
    learner.scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    learner.scaler.scale(torch.ones(()))
    learner._step(0.0)
    assert learner.skipped_in_a_row == 1
    learner.scaler.update(1024.0)
    learner._step(math.nan)  # a NaN loss
    assert "2 updates in a row" in learner.error


# ---------------------------------------------------------------------------------------------------------------------
# Ranks
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_give_the_gradient_of_one(parallel, tmp_path):
    """torchrun with two gloo ranks, unequal shares, unequal numbers of micro-batches: the gradient of one process."""
    out = tmp_path / "ranks.pt"
    torchrun("ranks.py", parallel, out)
    ranks = torch.load(out)
    for i, (case, dtype, odd) in enumerate([*RANK_CASES, *UNEVEN_CASES]):
        cfg = make_cfg(**case, train_batch=16, rollout_batch=16, micro_tokens=10**6)
        learner = make_learner(cfg, dtype)
        for name in learner.names:  # float32, for every dtype of the training pass
            assert np.abs(ranks[i]["probed"][name].numpy() - learner.logprobs(name, PROBE)).max() < 1e-5, case
        want, logged, controllers = update_of_one(cfg, learner, rank_groups(odd))
        grads = ranks[i]["grads"]
        if nothing_to_learn(cfg, odd):
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
            if cfg.dtype == "float16":  # different rows in one product give different roundings
                continue
            for key in logged:
                assert metrics[key] == pytest.approx(logged[key], rel=1e-5, abs=1e-7, nan_ok=True), (case, odd, key)
            assert end == pytest.approx(controllers), (case, odd)
        assert ranks[i]["shared"] == {i != 1} or odd
        assert ranks[i]["roundtrip"]
        assert ranks[i]["names"] == sorted(tiny_model(0, layers=2).state_dict())


def nothing_to_learn(cfg, odd: str) -> bool:
    return odd.startswith("all") and cfg.actor == "none"


def test_uneven_shares_distinguish_ranks():
    """In each kind of uneven share, sums over ranks differ from a rank's sums: tokens, responses and rewards."""
    for odd in ("empty", "masked", "poor", "short"):
        halves = [rank_groups(odd)[:2], rank_groups(odd)[2:]]
        tokens = [sum(int(r.loss_mask.sum()) for g in half for r in g.responses) for half in halves]
        rewards = [{r.reward for g in half for r in g.responses} for half in halves]
        assert rewards[0] == {0.0, 1.0}
        assert tokens[0] > 20
        assert (tokens[1] == 0) == (odd in ("empty", "masked"))
        assert (rewards[1] == {0.0}) == (odd == "poor")


def test_comm_keeps_float64():
    """float32 cannot hold a clock in seconds since the epoch."""
    for reduced in (Comm().max, Comm().sum):
        assert reduced([1795284480.123456, torch.tensor(0.5), 3]) == [1795284480.123456, 0.5, 3.0]
