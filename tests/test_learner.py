"""The learner: whatever the split into micro-batches or ranks, one gradient; and it is the derivative of the loss."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, make_cfg, make_groups, tiny_model

import batching
import objectives
from learner import Comm, Learner, schedule
from model import Needs, needs_of_ref_pass, needs_of_update

CASES = [
    dict(objective="grpo"),
    dict(objective="tis", reduction="seq-mean-token-mean"),
    dict(objective="mis_gspo"),
    dict(objective="gepo", gepo_defence=4.0, cppo_beta=0.5),
    dict(objective="jackpot"),
    dict(objective="jackpot", obrs_target="new"),
    dict(objective="jackpot", obrs_mask="expected", loss_denominator="kept"),
    dict(objective="jackpot", loss_denominator="kept", reduction="seq-mean-token-mean"),
    dict(objective="jackpot", obrs_accept_rate=0.8),
    dict(objective="geo_rs", loss_denominator="kept", rs_low=0.001, rs_high=0.15),
    dict(objective="seq_tis", reduction="seq-mean-token-sum-norm"),
    dict(objective="jackpot", actor="base:actor"),
    dict(objective="jackpot", actor="base:actor", obrs_target="new", distill_direction="reverse"),
    dict(objective="tis", actor="base:actor", distill_topk=5),
    dict(objective="jackpot_adjusted"),
    dict(objective="tis_adjusted"),
]


def make_learner(cfg, dtype=torch.float64):
    two = cfg.actor != "none"
    return Learner(tiny_model(0, layers=2, dtype=dtype), tiny_model(1, dtype=dtype) if two else None, cfg, Comm())


def gradients(cfg, groups, dtype=torch.float64, ref=True, keep=None):
    """Gradients of every parameter after one update's backward passes (the step itself is held back)."""
    learner = make_learner(cfg, dtype)
    if ref:
        batching.write_ref(groups, learner.ref_columns(batching.collate(groups, cfg), cfg.obrs_lambda))
    b = batching.collate(groups, cfg)
    if ref:  # a policy that moved since the ref pass, so that ratios are not 1
        g = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in learner.models.parameters():
                p.add_(torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype), alpha=0.01)
    stats = objectives.prepare(b, learner.comm, cfg, {})
    learner._step = lambda loss, nothing: {"grad_norm": 0.0}
    logged = learner.update(b, stats)
    return {n: p.grad.clone() for n, p in learner.models.named_parameters()}, logged


def relative(a, b):
    num = sum(float((a[n] - b[n]).double().square().sum()) for n in a) ** 0.5
    return num / sum(float(a[n].double().square().sum()) for n in a) ** 0.5


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_any_micro_batch_split_gives_the_same_gradient(case):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        got = []
        for micro_tokens, share in (
            (10**6, True),
            (45, True),
            (1, False),
        ):  # one micro-batch, several, one for each response
            cfg, groups = (
                make_cfg(**case, micro_tokens=micro_tokens, train_batch=12, rollout_batch=12),
                make_groups(3, seed=3, prompt=(3, 12)),
            )
            assert {s for *_, s in make_learner(cfg)._micro(batching.collate(groups, cfg))} == {share}
            got.append(gradients(cfg, groups, dtype))
        for grads, logged in got[1:]:
            assert relative(got[0][0], grads) < tolerance
            for key, value in got[0][1].items():
                assert logged[key] == pytest.approx(value, rel=1e-6 if dtype == torch.float64 else 1e-3, abs=1e-6), key


def test_micro_batches_hold_every_row_once_within_the_budget():
    b = batching.collate(make_groups(5, seed=1, prompt=(3, 12)), make_cfg())
    for budget in (10**6, 60, 31, 1):
        for share in (False, True):
            parts, total = batching.split(b, budget, share)
            assert sorted(r for p in parts for r in p) == list(range(len(b)))
            tokens = []
            for rows in parts:
                m = b.select(rows)
                one_each = len(m) * int((m.prompt_len + m.length).max())
                tokens.append(
                    len(m) * m.tokens.shape[1] + len(set(m.group.tolist())) * int(m.prompt_len.max())
                    if share
                    else one_each
                )
                assert tokens[-1] <= budget or len(rows) == 1
            assert sum(tokens) == total
            assert (len(parts) == 1) == (budget == 10**6) and (len(parts) == len(b)) == (budget == 1)
    even = batching.collate(make_groups(3, seed=1, prompt=(5, 6)), make_cfg())
    even = replace(even, length=torch.tensor([4, 2, 3, 1] * 3))  # groups alike in all but their rows stay whole
    assert sorted(batching.split(even, 4 * 4 + 5, True)[0]) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    first = [b.select(rows) for rows in batching.split(b, 31, False)[0]]
    assert [int((m.prompt_len + m.length).max()) for m in first] == sorted(
        (int((m.prompt_len + m.length).max()) for m in first), reverse=True
    )


def test_sliding_windows_read_each_prompt_with_its_response():
    learner = make_learner(make_cfg(actor="base:actor"))
    assert learner.models.can_share
    learner.models.actor.config.layer_types = ["sliding_attention"]
    assert not learner.models.can_share
    learner = make_learner(make_cfg())
    learner.models.policy.config.sliding_window = 16
    b = batching.collate(make_groups(3, seed=3, prompt=(3, 12)), make_cfg())
    assert {s for *_, s in learner._micro(b)} == {False}


def test_gradient_is_the_derivative_of_the_written_out_loss():
    """GRPO with a token-mean over the whole batch, straight from the model's logits, without any of the learner's machinery."""
    cfg, groups = make_cfg(objective="tis", micro_tokens=30), make_groups(2, seed=1)
    grads, logged = gradients(cfg, groups, ref=False)
    model, total, count = tiny_model(0, layers=2, dtype=torch.float64), 0.0, 0
    for g in groups:
        reward = torch.tensor([r.reward for r in g.responses], dtype=torch.float64)
        adv = (reward - reward.mean()) / (reward.std() + 1e-6) if reward.std() > 0 else torch.zeros_like(reward)
        for a, r in zip(adv, g.responses):
            ids = torch.from_numpy(np.concatenate([g.prompt_ids, r.tokens]).astype(np.int64))
            logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            P = len(g.prompt_ids)
            lp = torch.stack([logp[P + t - 1, int(tok)] for t, tok in enumerate(r.tokens)])
            w = (lp.detach() - torch.from_numpy(r.logp_inf)).exp().clamp_max(2.0)
            on = torch.from_numpy(r.loss_mask)
            total = total - (w * (lp - lp.detach()).exp() * a)[on].sum()
            count += int(on.sum())
    (total / count).backward()
    want = {"policy." + n: p.grad for n, p in model.named_parameters()}
    assert relative(want, {n: g for n, g in grads.items()}) < 1e-6  # advantages are float32
    assert logged["loss"] == pytest.approx(float(total.detach() / count), rel=1e-6) and logged["tokens"] == count


def test_score_is_the_models_own_log_softmax_with_temperature():
    groups = make_groups(2, seed=2)
    for g in groups:
        g.sampling = replace(g.sampling, temperature=0.7)
    cfg = make_cfg(objective="jackpot", micro_tokens=25)
    learner = make_learner(cfg)
    b = batching.collate(groups, cfg)
    stats = learner.score(b, Needs(entropy=True, s=True, tail=True))
    row = 0
    for g in groups:
        for r in g.responses:
            ids = torch.from_numpy(np.concatenate([g.prompt_ids, r.tokens]).astype(np.int64))
            logp = (learner.models.policy(input_ids=ids[None]).logits[0] / 0.7).log_softmax(-1)[
                len(g.prompt_ids) - 1 : -1
            ]
            L = len(r.tokens)
            assert torch.allclose(stats.logp[row, :L], logp.gather(1, ids[len(g.prompt_ids) :, None])[:, 0], atol=1e-7)
            assert torch.allclose(stats.entropy[row, :L], -(logp.exp() * logp).sum(-1), atol=1e-7)
            assert torch.allclose(
                stats.support_logp[row, :L, 1:],
                logp.gather(1, torch.from_numpy(r.topk_ids.astype(np.int64))),
                atol=1e-7,
            )
            assert float(stats.logp[row, L:].abs().sum()) == 0
            row += 1


def test_bracket_contains_the_exact_z_of_two_models():
    """Groups whose p_inf is the actor's own law: the exact Z lies in the bracket, and a larger S (target new) narrows it."""
    cfg = make_cfg(objective="jackpot", actor="base:actor", obrs_target="new")
    learner, groups = make_learner(cfg), make_groups(3, seed=4, K=5)
    b = batching.collate(groups, cfg)
    with torch.no_grad():
        for row, (g, r) in enumerate((g, r) for g in groups for r in g.responses):
            ids = torch.from_numpy(np.concatenate([g.prompt_ids, r.tokens]).astype(np.int64))
            logq = learner.models.actor(input_ids=ids[None]).logits[0].log_softmax(-1)[len(g.prompt_ids) - 1 : -1]
            top, where = logq.topk(5, -1)
            r.topk_ids, r.topk_logp = where.int().numpy(), top.float().numpy()
            r.logp_inf = logq.gather(1, ids[len(g.prompt_ids) :, None])[:, 0].float().numpy()
    import obrs

    b = batching.collate(groups, cfg)
    exact = learner.score(b, Needs(pair=True)).z[b.mask]
    small = learner.score(b, Needs(s=True, tail=True))
    low, high = (x[b.mask] for x in obrs.z_bracket(b.support_logp, small.support_logp, 1.0, small.tail))
    assert (low <= exact + 1e-6).all() and (exact <= high + 1e-6).all() and float((high - low).max()) > 0.01
    batching.write_ref(groups, learner.ref_columns(b, 1.0))
    b = batching.collate(groups, cfg)
    large = learner.score(b, Needs(s=True, tail=True))
    low2, high2 = (x[b.mask] for x in obrs.z_bracket(b.support_logp, large.support_logp, 1.0, large.tail))
    assert (
        (low2 <= exact + 1e-6).all()
        and (exact <= high2 + 1e-6).all()
        and float((high2 - low2).mean()) < float((high - low).mean())
    )


def test_a_budget_knows_the_whole_kl_before_but_not_after():
    """lambda comes after the ref pass: KL(policy || actor) needs none, the law of the accepted tokens does."""
    cfg, groups = make_cfg(objective="jackpot", actor="base:actor", obrs_accept_rate=0.9), make_groups(2, seed=4)
    _, logged = gradients(cfg, groups)
    assert (
        logged["obrs/kl_before"] > 0
        and "obrs/kl_after" not in logged
        and "obrs/kl_after_partial" in logged
        and "obrs/z_exact" not in logged
    )


def test_a_batch_of_empty_responses_is_a_finite_zero():
    cfg, groups = make_cfg(objective="tis"), make_groups(2, seed=4)
    for g in groups:
        for r in g.responses:
            r.tokens, r.loss_mask, r.logp_inf, r.topk_ids, r.topk_logp = (
                x[:0] for x in (r.tokens, r.loss_mask, r.logp_inf, r.topk_ids, r.topk_logp)
            )
    grads, logged = gradients(cfg, groups)
    assert logged["loss"] == 0 and logged["tokens"] <= 1 and all(float(g.abs().sum()) == 0 for g in grads.values())


def test_one_forward_serves_as_ref_pass_for_a_single_update():
    """With one update a batch, the pass-free path and an explicit ref pass give the same gradient."""
    for case in (dict(objective="tis"), dict(objective="jackpot", actor="base:actor")):
        cfg = make_cfg(**case)
        learner, groups = make_learner(cfg), make_groups(2, seed=6)
        free, _ = gradients(cfg, groups, ref=False)
        batching.write_ref(groups, learner.ref_columns(batching.collate(groups, cfg), 1.0))
        b = batching.collate(groups, cfg)
        learner._step = lambda loss, nothing: {"grad_norm": 0.0}
        learner.update(b, objectives.prepare(b, learner.comm, cfg, {}))
        assert relative(free, {n: p.grad for n, p in learner.models.named_parameters()}) < 1e-6


def test_non_finite_steps_are_skipped_counted_and_stop_the_run():
    cfg = make_cfg(objective="grpo", max_skips=2)
    learner = make_learner(cfg, torch.float32)
    b = batching.collate(make_groups(2, seed=0), cfg)
    before = {n: p.clone() for n, p in learner.models.named_parameters()}
    bad = replace(b, adv=b.adv * torch.inf)
    logged = learner.update(bad, objectives.prepare(bad, learner.comm, cfg, {}))
    assert logged["skipped_steps"] == 1 and all(torch.equal(p, before[n]) for n, p in learner.models.named_parameters())
    logged = learner.update(b, objectives.prepare(b, learner.comm, cfg, {}))
    assert logged["skipped_steps"] == 1 and learner.skipped_in_a_row == 0
    assert any(not torch.equal(p, before[n]) for n, p in learner.models.named_parameters())
    learner.update(bad, objectives.prepare(bad, learner.comm, cfg, {}))
    with pytest.raises(RuntimeError, match="2 updates in a row had a non-finite loss or gradient"):
        learner.update(bad, objectives.prepare(bad, learner.comm, cfg, {}))


def test_an_update_with_everything_rejected_moves_the_actor_alone():
    """Adam's momentum must not controllers the policy on over a batch that taught nothing."""
    cfg = make_cfg(objective="geo_rs", actor="base:actor")
    learner = Learner(tiny_model(0), tiny_model(1), cfg, Comm())
    b = batching.collate(make_groups(), cfg)
    go = lambda c: learner.update(b, objectives.prepare(b, learner.comm, c, {}), c)
    assert go(replace(cfg, rs_low=0.0, rs_high=1e9))["rejected_steps"] == 0
    before = {n: p.clone() for n, p in learner.models.named_parameters()}
    out = go(replace(cfg, rs_low=1e8, rs_high=1e9))
    assert out["rejected_steps"] == 1 and out["stepped"] == 1 and out["grad_norm"] == 0 and math.isfinite(out["loss"])
    for n, p in learner.models.named_parameters():
        assert torch.equal(p, before[n]) == n.startswith("policy"), n


def test_step_clips_each_model_and_follows_the_schedule():
    cfg = make_cfg(
        objective="tis", actor="base:actor", lr=1e-2, actor_lr=2e-2, warmup_steps=4, grad_clip=1e-3, steps=10
    )
    learner = make_learner(cfg)
    b = batching.collate(make_groups(2, seed=8), cfg)
    logged = learner.update(b, objectives.prepare(b, learner.comm, cfg, {}))
    assert logged["lr"] == pytest.approx(1e-2 / 4) and logged["actor/lr"] == pytest.approx(2e-2 / 4)
    assert logged["grad_norm"] > 1e-3 and logged["actor/grad_norm"] > 1e-3  # as measured before the clip
    learner, seen = make_learner(cfg), {}
    for name, (o,) in learner.optimizers.items():  # what the optimizers really step with
        o.register_step_pre_hook(
            lambda o, *_, name=name: seen.update(
                {
                    name: (
                        o.param_groups[0]["lr"],
                        sum(float(p.grad.square().sum()) for p in o.param_groups[0]["params"]) ** 0.5,
                    )
                }
            )
        )
    learner.update(b, objectives.prepare(b, learner.comm, cfg, {}))
    assert seen["policy"] == pytest.approx((1e-2 / 4, 1e-3), rel=1e-2) and seen["actor"] == pytest.approx(
        (2e-2 / 4, 1e-3), rel=1e-2
    )
    for p in learner.models.parameters():
        p.grad = torch.full_like(p, torch.nan)
    assert learner._step(0.0)["stepped"] == 0  # a finite loss, a bad gradient
    group = (
        make_learner(make_cfg(adam_beta1=0.8, adam_beta2=0.7, adam_eps=1e-5, weight_decay=0.3))
        .optimizers["policy"][0]
        .param_groups[0]
    )
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.7), 1e-5, 0.3)
    assert [schedule(s, replace(cfg, lr_schedule="linear")) for s in (0, 3, 4, 7, 10)] == pytest.approx(
        [0.25, 1, 1, 0.5, 0]
    )
    assert schedule(7, replace(cfg, lr_schedule="cosine")) == pytest.approx(0.5) and schedule(9, cfg) == 1.0


def test_muon_takes_the_matrices_and_adamw_the_rest():
    """Muon's step is orthogonal: on a matrix all singular values of the update are alike. Embedding, head and norms step by AdamW."""
    learner = make_learner(make_cfg(objective="tis", optimizer="muon", lr=1e-2, warmup_steps=0))
    adamw, muon = learner.optimizers["policy"]
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    named = dict(learner.models.policy.named_parameters())
    inner = {n for n, p in named.items() if any(p is q for q in muon.param_groups[0]["params"])}
    assert inner == {n for n in named if "layers" in n and n.endswith("proj.weight")}
    assert sum(len(o.param_groups[0]["params"]) for o in (adamw, muon)) == len(named)
    before = {n: p.detach().clone() for n, p in named.items()}
    b = batching.collate(make_groups(2, seed=8), learner.cfg)
    assert learner.update(b, objectives.prepare(b, learner.comm, learner.cfg, {}))["stepped"]
    for n, p in named.items():
        step = p.detach() - before[n]
        assert step.abs().max() > 0, n
        if n in inner:
            s = torch.linalg.svdvals(step)
            assert s[0] < 2 * s[min(step.shape) // 2], n
    state = learner.state_dict()
    other = make_learner(learner.cfg)
    other.load_state_dict(state)
    assert torch.equal(
        other.optimizers["policy"][1].state_dict()["state"][0]["momentum_buffer"],
        muon.state_dict()["state"][0]["momentum_buffer"],
    )


def test_what_each_pass_computes_follows_the_objective():
    assert needs_of_ref_pass(make_cfg(objective="tis"), False, 1.0) == Needs()
    w = needs_of_ref_pass(make_cfg(objective="jackpot"), False, 1.0)
    assert w.s and w.tail and not w.pair
    two = make_cfg(objective="jackpot", actor="base:actor")
    assert needs_of_ref_pass(two, True, 1.0).pair and not needs_of_ref_pass(two, True, 1.0).s
    assert (
        needs_of_update(two, True, 1.0, has_ref=False).pair and not needs_of_update(two, True, 1.0, has_ref=True).pair
    )
    assert needs_of_update(make_cfg(objective="jackpot", obrs_target="new"), False, 1.0, True).s
    for flags in (dict(distill_direction="reverse"), dict(distill_topk=3), {}):
        w = needs_of_update(make_cfg(objective="tis", actor="base:actor", **flags), True, 1.0, True)
        assert (w.distill, w.distill_topk) == (flags.get("distill_direction", "forward"), flags.get("distill_topk", 0))


def laws(model, g, r):
    """The model's probabilities (L, V) along a response, and the token ids of prompt and response."""
    ids = torch.from_numpy(np.concatenate([g.prompt_ids, r.tokens]).astype(np.int64))
    return model(input_ids=ids[None]).logits[0].softmax(-1)[len(g.prompt_ids) - 1 : -1].detach(), ids


@pytest.mark.parametrize("lam", [0.7, 1.5])
def test_z_and_tail_of_the_learner_at_any_lambda(lam):
    cfg = make_cfg(objective="jackpot", actor="base:actor", obrs_target="new")
    learner, groups = make_learner(cfg), make_groups(2, seed=2)
    b = batching.collate(groups, cfg)
    got = learner.score(b, Needs(s=True, tail=True, pair=True, lam=lam))
    for row, (g, r) in enumerate((g, r) for g in groups for r in g.responses):
        L = len(r.tokens)
        p, q = laws(learner.models.policy, g, r)[0], laws(learner.models.actor, g, r)[0]
        outside = torch.ones_like(p).scatter_(1, b.support_ids[row, :L], 0.0)
        assert torch.allclose(got.z[row, :L], torch.minimum(q, p / lam).sum(-1), atol=1e-7)
        assert torch.allclose(
            got.tail[row, :L], (torch.minimum(p / lam, b.p_kth[row, :L, None].double()) * outside).sum(-1), atol=1e-6
        )
    columns = learner.ref_columns(b, lam)
    for row in range(len(b)):  # the larger S lists no token twice
        for t in range(int(b.length[row])):
            ids = columns["support_ids"][row, t][columns["support_logp"][row, t].isfinite()].tolist()
            assert len(ids) == len(set(ids)) and len(ids) > 3


def test_kept_sets_reach_the_head():
    """Each token renormalised over its own kept set, through collate, micro-batches and the chunked head."""
    groups, rng, K = make_groups(2, seed=3), np.random.default_rng(0), 6
    for g in groups:
        g.sampling = replace(g.sampling, top_k=K + 1)
        for r in g.responses:
            rows = [np.unique(np.append(rng.choice(256, K), t)) for t in r.tokens]
            r.allowed_ids, r.allowed_offsets = np.concatenate(rows).astype(np.int32), np.cumsum([0, *map(len, rows)])
    cfg = make_cfg(objective="grpo", micro_tokens=25)
    learner = make_learner(cfg)
    logp = learner.score(batching.collate(groups, cfg), Needs()).logp
    for row, (g, r) in enumerate((g, r) for g in groups for r in g.responses):
        p, _ = laws(learner.models.policy, g, r)
        for t, token in enumerate(r.tokens):
            kept = r.allowed_ids[r.allowed_offsets[t] : r.allowed_offsets[t + 1]]
            assert float(logp[row, t]) == pytest.approx(
                float((p[t, int(token)] / p[t, kept.astype(np.int64)].sum()).log()), abs=1e-6
            )


def test_bfloat16_runs_close_to_float32():
    cfg = make_cfg(objective="grpo")
    groups = make_groups(2, seed=9)
    full, _ = gradients(cfg, groups, torch.float32, ref=False)
    half, logged = gradients(make_cfg(objective="grpo", dtype="bfloat16"), groups, torch.float32, ref=False)
    assert 0 < relative(full, half) < 0.2 and next(iter(half.values())).dtype == torch.float32


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_give_the_gradient_of_one(parallel, tmp_path):
    """torchrun with two gloo ranks, ragged shares, unequal numbers of micro-batches: the gradient of one process."""
    out = tmp_path / "ranks.pt"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            str(Path(__file__).parent / "ranks.py"),
            parallel,
            str(out),
        ],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = torch.load(out)
    from ranks import RANK_CASES, rank_groups

    for i, (case, dtype) in enumerate(RANK_CASES):
        cfg = make_cfg(**case, train_batch=16, rollout_batch=16, micro_tokens=10**6)
        want, logged = gradients(cfg, rank_groups(), dtype)
        assert relative(want, ranks[i]["grads"]) < (1e-10 if dtype == torch.float64 else 1e-5), case
        for key in (
            "loss",
            "reward",
            "rollout_corr/kl",
            "rollout_corr/rollout_is_max",
            "rollout_corr/chi2_seq",
            "tokens",
        ):
            assert ranks[i]["logged"][key] == pytest.approx(logged[key], rel=1e-5, abs=1e-7), (case, key)
        assert (
            ranks[i]["shared"] == {i != 1}
            and ranks[i]["roundtrip"]
            and ranks[i]["names"] == sorted(tiny_model(0, layers=2).state_dict())
        )


def test_comm_keeps_float64():
    """A clock in seconds since the epoch has no place in float32."""
    for f in (Comm().max, Comm().sum):
        assert f([1795284480.123456, torch.tensor(0.5), 3]) == [1795284480.123456, 0.5, 3.0]
