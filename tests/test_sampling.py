"""Sampling transforms: what is kept, what is recorded, and the three worlds of the learner's law."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_cfg, tiny_model

import batching
import sampling
from engines import HFEngine
from learner import Comm, Learner
from model import Needs
from rollout import Rollout, Sampling

TRUNCATED = [
    Sampling(top_k=8),
    Sampling(top_p=0.8, top_k=16),
    Sampling(temperature=0.7, top_p=0.8, top_k=16),
    Sampling(min_p=0.2, top_k=16),
]


def test_cut_by_hand():
    z = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    kept = lambda **k: (~sampling.cut(z, **k))[0].nonzero()[:, 0].tolist()
    assert kept() == [0, 1, 2, 3] and kept(top_k=2) == [1, 3] and kept(top_k=9) == [0, 1, 2, 3]
    assert kept(top_p=0.69) == [1, 3] and kept(top_p=0.71) == [1, 2, 3] and kept(top_p=1e-9) == [1]
    assert kept(min_p=0.6) == [1, 3] and kept(min_p=0.99) == [1]
    assert kept(top_k=3, top_p=0.76) == [1, 3]  # .4 / .9 + .3 / .9 = .78: top_p speaks of what top_k left
    assert kept(min_p=0.4, top_p=0.45) == [1, 3]  # .4 / .9 = .44 is not enough
    tie = torch.tensor([[0.3, 0.3, 0.3, 0.1]]).log()
    assert (~sampling.cut(tie, top_k=2)).sum() == 3
    each = sampling.cut(z.expand(2, 4), torch.tensor([[1.0], [0.69]]), torch.tensor([[1.0], [0.0]]), torch.zeros(2, 1))
    assert (~each).sum(1).tolist() == [1, 2]


def test_cut_is_what_vllm_cuts():
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    g = torch.Generator().manual_seed(0)
    z = torch.randn(64, 200, generator=g) * 3
    for k, p in ((20, None), (None, 0.8), (20, 0.8), (3, 0.99)):
        theirs = apply_top_k_top_p_pytorch(
            z.clone(), None if k is None else torch.full((64,), k), None if p is None else torch.full((64,), p)
        )
        assert torch.equal(sampling.cut(z, p or 1.0, k or 0), theirs.isinf())


@pytest.fixture(params=["hf", "vllm"])
def engine(request, folders):
    if request.param == "vllm":
        vllm = request.getfixturevalue("vllm_engine")
        vllm.load(tiny_model(1).state_dict().items())
        return vllm
    return HFEngine(str(folders / "actor"))


def sampled(engine, law, n=8, kept=20, prompts=((5, 6, 7), (100, 3))):
    law = Sampling(**{**vars(law), "max_tokens": 12})
    got = engine.generate(
        [np.array(p, np.int32) for p in prompts],
        [[31 * i + j for j in range(n)] for i in range(len(prompts))],
        law,
        5,
        [1],
        kept,
    )
    return [
        Rollout(("t", 0, i), str(i), np.array(p, np.int32), law, "policy", "float32", 0, "", 0.0, 0.0, g)
        for i, (p, g) in enumerate(zip(prompts, got))
    ]


@pytest.mark.parametrize("law", TRUNCATED, ids=str)
def test_records_are_those_of_the_cut_law(engine, law):
    model, sizes = tiny_model(1), []
    for group in sampled(engine, law):
        for r in group.responses:
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, r.tokens]).astype(np.int64))
            with torch.no_grad():
                z = model(input_ids=ids[None]).logits[0, len(group.prompt_ids) - 1 : -1] / law.temperature
            gone = sampling.cut(z, law.top_p, law.top_k, law.min_p)
            want = z.masked_fill(gone, -torch.inf).log_softmax(-1)
            assert np.allclose(r.logp_inf, want.gather(1, ids[len(group.prompt_ids) :, None])[:, 0], atol=1e-4)
            assert (
                len(r.allowed_offsets) == len(r.tokens) + 1
                and r.allowed_offsets.dtype == np.int64
                and r.allowed_ids.dtype == np.int32
            )
            for t, token in enumerate(r.tokens):
                mine = r.allowed_ids[r.allowed_offsets[t] : r.allowed_offsets[t + 1]]
                assert (
                    set(mine.tolist()) == set((~gone[t]).nonzero()[:, 0].tolist())
                    and token in mine
                    and len(set(mine.tolist())) == len(mine)
                )
                sizes.append(len(mine))
    assert len(set(sizes)) > 1 or law.top_p == 1 and law.min_p == 0
    assert (
        sampled(engine, law, n=1, kept=0)[0].responses[0].allowed_ids is None
        and sampled(engine, Sampling(), n=1)[0].responses[0].allowed_ids is None
    )


def test_a_kept_set_that_does_not_fit_is_refused(engine):
    with pytest.raises(ValueError, match="more than 4 tokens: raise --kept_max, or bound it with --top_k"):
        sampled(engine, Sampling(top_p=0.95), kept=4)


def ratios(groups, world, noise=0.0):
    """p_ref / p_inf of every token in one of the three worlds, and which tokens the learner's law cuts."""
    cfg = make_cfg(objective="tis", keep_sampling_mask=world, top_p=0.8, top_k=16)
    model = tiny_model(1)
    with torch.no_grad():
        g = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g), alpha=noise)
    learner = Learner(model, None, cfg, Comm())
    b = batching.collate(groups, cfg)
    logp = learner.score(b, Needs()).logp[b.mask]
    return (logp - b.logp_inf[b.mask]).exp().double(), logp <= -69, b, learner


def test_the_three_worlds(engine):
    """Equal weights: off is biased, the others are 1. A slightly different learner: replay's mean stays 1, recompute loses tokens."""
    groups = sampled(engine, Sampling(top_p=0.8, top_k=16), n=128)
    off, recompute, replay = (ratios(groups, w)[0] for w in ("off", "recompute", "replay"))
    assert off.mean() < 0.9 and off.max() < 1 and (recompute - 1).abs().max() < 1e-3 and (replay - 1).abs().max() < 1e-3
    replay, none_cut, *_ = ratios(groups, "replay", 0.02)
    recompute, cut, *_ = ratios(groups, "recompute", 0.02)
    error = float(replay.std() / len(replay) ** 0.5)
    assert (
        abs(float(replay.mean()) - 1) < 4 * error
        and error < 0.02
        and not none_cut.any()
        and float((replay - 1).abs().mean()) > 0.05
    )
    assert (
        0.001 < float(cut.double().mean()) < 0.2 and torch.isfinite(recompute).all() and (recompute[cut] < 1e-20).all()
    )


def test_a_token_that_the_learner_cuts_is_counted_and_teaches_nothing(folders):
    import objectives

    groups = sampled(HFEngine(str(folders / "actor")), Sampling(top_p=0.8, top_k=16))
    for i, g in enumerate(groups):
        for j, r in enumerate(g.responses):
            r.reward = float((i + j) % 2)
    _, cut, b, learner = ratios(groups, "recompute", 0.05)
    cfg, lost = (
        replace(learner.cfg, correction="none", is_cap=None),
        float(cut.double().mean()),
    )  # no weight that would hide it
    learner.cfg = cfg
    learner._step = lambda loss, nothing: {}
    logged = learner.update(b, objectives.prepare(b, learner.comm, cfg, {}))
    assert lost > 0 and logged["rollout_corr/cut_fraction"] == pytest.approx(lost) and np.isfinite(logged["loss"])
    whole = {n: p.grad.clone() for n, p in learner.models.named_parameters()}
    assert all(torch.isfinite(g).all() for g in whole.values())
    learner.models.zero_grad()
    flat = b.mask.clone()
    flat[b.mask] = ~cut
    b.mask, stats = flat, objectives.prepare(b, learner.comm, cfg, {})
    learner.update(b, {**stats, "tokens": logged["tokens"]})
    for n, p in learner.models.named_parameters():
        assert torch.allclose(p.grad, whole[n], atol=1e-6), n


@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.5, 0), (1.0, 8)])
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_the_table_of_logprobs_modes(kind, mode, temperature, top_k, folders, vllm_engines):
    """Praxis, section 2: raw log-probabilities fit a learner that scales by the temperature at temperature 1 alone; processed ones always,
    and cut laws only where the learner takes the kept sets. The tokens are the same in both modes."""
    make = lambda m: (
        HFEngine(str(folders / "actor"), logprobs_mode=m)
        if kind == "hf"
        else vllm_engines(**({} if m == "processed" else {"logprobs_mode": m}))
    )
    if kind == "vllm":
        vllm_engines().load(tiny_model(1).state_dict().items())
    law = Sampling(temperature=temperature, top_k=top_k)
    groups, others = (
        sampled(make(m), law, n=16, kept=20 if m == "processed" else 0)
        for m in (mode, "raw" if mode == "processed" else "processed")
    )
    assert all((a.tokens == b.tokens).all() for g, o in zip(groups, others) for a, b in zip(g.responses, o.responses))
    cfg = make_cfg(
        objective="tis",
        temperature=temperature,
        top_k=top_k,
        logprobs_mode=mode,
        keep_sampling_mask="replay" if mode == "processed" else "off",
    )
    b = batching.collate(groups, cfg)
    gap = (Learner(tiny_model(1), None, cfg, Comm()).score(b, Needs()).logp - b.logp_inf)[b.mask].abs().mean()
    assert (
        gap < 1e-4 if mode == "processed" or (temperature == 1 and top_k == 0) else gap > 0.05 or (top_k and gap < 1e-4)
    )
    if mode == "raw" and top_k:  # raw and off agree with each other, and neither with what was sampled
        truth = batching.collate(others, make_cfg(top_k=top_k))
        assert (b.logp_inf - truth.logp_inf)[b.mask].abs().mean() > 0.05


@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_a_head_in_float32_over_a_bfloat16_body(kind, folders, vllm_engines):
    """A bfloat16 head rounds its logits to multiples of 1/128 and more, so the two best differ by such a multiple; a float32 head's do not.
    On the plain engine the records are also exactly those of the bfloat16 body's hidden states under a float32 head."""
    from transformers import AutoModelForCausalLM

    folder, grid = str(folders / "actor"), {}
    for fp32 in (True, False):
        engine = (
            HFEngine(folder, dtype="bfloat16", head_fp32=fp32)
            if kind == "hf"
            else vllm_engines(dtype="bfloat16", head_fp32=fp32)
        )
        groups = sampled(engine, Sampling(), n=16)
        gap = np.concatenate([r.topk_logp[:, 0] - r.topk_logp[:, 1] for g in groups for r in g.responses]) * 128
        grid[fp32] = np.abs(gap - gap.round()).mean()
        if kind == "hf" and fp32:
            body = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).requires_grad_(False)
            for group in groups:
                ids = torch.from_numpy(np.concatenate([group.prompt_ids, group.responses[0].tokens]).astype(np.int64))
                hidden = (
                    body.base_model(input_ids=ids[None]).last_hidden_state[0, len(group.prompt_ids) - 1 : -1].float()
                )
                logp = (
                    (hidden @ body.lm_head.weight.float().t())
                    .log_softmax(-1)
                    .gather(1, ids[len(group.prompt_ids) :, None])[:, 0]
                )
                assert np.abs(logp.numpy() - group.responses[0].logp_inf).mean() < 0.01
    assert grid[True] > 0.2 and grid[False] < 0.01, grid


def test_the_learners_head_in_float32(folders):
    """bfloat16 learner: the flag keeps the head's factors in float32, without it they are rounded first."""
    groups = sampled(HFEngine(str(folders / "actor")), Sampling())
    got = {}
    for fp32 in (True, False):
        cfg = make_cfg(objective="tis", dtype="bfloat16", lm_head_fp32=fp32)
        learner, seen = Learner(tiny_model(1), None, cfg, Comm()), []
        b = batching.collate(groups, cfg)
        learner.models.policy.base_model.register_forward_hook(lambda m, i, o: seen.append(o.last_hidden_state))
        learner.cfg = replace(cfg, micro_tokens=10**6)
        learner.models._read_shared = learner.models._read
        logp = learner.score(b, Needs()).logp[0, : int(b.length[0])]
        (hidden,), weight = seen, learner.models.policy.lm_head.weight.detach()
        hidden = hidden[0, int(b.prompt_len[0]) - 1 : int((b.prompt_len + b.length)[0]) - 1].float()
        hidden = hidden if fp32 else hidden.bfloat16().float()
        want = (
            (hidden @ (weight if fp32 else weight.bfloat16().float()).t())
            .log_softmax(-1)
            .gather(1, b.tokens[0, : len(logp), None])[:, 0]
        )
        assert torch.allclose(logp, want.detach(), atol=1e-5)
        got[fp32] = logp
    assert (got[True] - got[False]).abs().max() > 1e-4


def test_replay_needs_kept_sets(folders):
    groups = sampled(HFEngine(str(folders / "actor")), Sampling(top_k=8), kept=0)
    with pytest.raises(ValueError, match="--keep_sampling_mask=replay: group .* has no kept sets"):
        batching.collate(groups, make_cfg(top_k=8))
    assert (
        sampling.max_allowed(make_cfg(top_k=8), 256) == 12
        and sampling.max_allowed(make_cfg(top_k=8, rollout_dtype="bfloat16"), 256) == 20
        and sampling.max_allowed(make_cfg(top_p=0.9), 256) == 256 == sampling.max_allowed(make_cfg(top_k=300), 256)
    )
    assert (
        sampling.max_allowed(make_cfg(), 256)
        == 0
        == sampling.max_allowed(make_cfg(top_k=8, keep_sampling_mask="off"), 256)
    )
