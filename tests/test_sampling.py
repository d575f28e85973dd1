"""Sampling transforms: what is kept, what is recorded, and the three worlds of the learner's law."""
from dataclasses import replace

import numpy as np
import pytest
import torch

import batch as batches
import sampling
from conftest import make_cfg, tiny_model
from learner import Comm, Learner
from pair import Want
from rollout import HFEngine, Rollout, Sampling

TRUNCATED = [Sampling(top_k=8), Sampling(top_p=0.8, top_k=16), Sampling(temperature=0.7, top_p=0.8, top_k=16), Sampling(min_p=0.2, top_k=16)]


def test_cut_by_hand():
    z = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    kept = lambda **k: (~sampling.cut(z, **k))[0].nonzero()[:, 0].tolist()
    assert kept() == [0, 1, 2, 3] and kept(top_k=2) == [1, 3] and kept(top_k=9) == [0, 1, 2, 3]
    assert kept(top_p=0.69) == [1, 3] and kept(top_p=0.71) == [1, 2, 3] and kept(top_p=1e-9) == [1]
    assert kept(min_p=0.6) == [1, 3] and kept(min_p=0.99) == [1]
    assert kept(top_k=3, top_p=0.76) == [1, 3]                               # .4 / .9 + .3 / .9 = .78: top_p speaks of what top_k left
    assert kept(min_p=0.4, top_p=0.45) == [1, 3]                             # .4 / .9 = .44 is not enough
    tie = torch.tensor([[0.3, 0.3, 0.3, 0.1]]).log()
    assert (~sampling.cut(tie, top_k=2)).sum() == 3
    each = sampling.cut(z.expand(2, 4), torch.tensor([[1.0], [0.69]]), torch.tensor([[1.0], [0.0]]), torch.zeros(2, 1))
    assert (~each).sum(1).tolist() == [1, 2]


def test_cut_is_what_vllm_cuts():
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    g = torch.Generator().manual_seed(0)
    z = torch.randn(64, 200, generator=g) * 3
    for k, p in ((20, None), (None, 0.8), (20, 0.8), (3, 0.99)):
        theirs = apply_top_k_top_p_pytorch(z.clone(), None if k is None else torch.full((64,), k), None if p is None else torch.full((64,), p))
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
    got = engine.generate([np.array(p, np.int32) for p in prompts], [[31 * i + j for j in range(n)] for i in range(len(prompts))], law, 5, [1], kept)
    return [Rollout(("t", 0, i), str(i), np.array(p, np.int32), law, "policy", "float32", 0, "", 0.0, 0.0, g) for i, (p, g) in enumerate(zip(prompts, got))]


@pytest.mark.parametrize("law", TRUNCATED, ids=str)
def test_records_are_those_of_the_cut_law(engine, law):
    model, sizes = tiny_model(1), []
    for group in sampled(engine, law):
        for r in group.responses:
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, r.tokens]).astype(np.int64))
            with torch.no_grad():
                z = model(input_ids=ids[None]).logits[0, len(group.prompt_ids) - 1:-1] / law.temperature
            gone = sampling.cut(z, law.top_p, law.top_k, law.min_p)
            want = z.masked_fill(gone, -torch.inf).log_softmax(-1)
            assert np.allclose(r.logp_inf, want.gather(1, ids[len(group.prompt_ids):, None])[:, 0], atol=1e-4)
            assert len(r.kept_offsets) == len(r.tokens) + 1 and r.kept_offsets.dtype == np.int64 and r.kept_ids.dtype == np.int32
            for t, token in enumerate(r.tokens):
                mine = r.kept_ids[r.kept_offsets[t]:r.kept_offsets[t + 1]]
                assert set(mine.tolist()) == set((~gone[t]).nonzero()[:, 0].tolist()) and token in mine and len(set(mine.tolist())) == len(mine)
                sizes.append(len(mine))
    assert len(set(sizes)) > 1 or law.top_p == 1 and law.min_p == 0
    assert sampled(engine, law, n=1, kept=0)[0].responses[0].kept_ids is None and sampled(engine, Sampling(), n=1)[0].responses[0].kept_ids is None


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
    b = batches.collate(groups, cfg)
    logp = learner.score(b, Want()).logp[b.mask]
    return (logp - b.logp_inf[b.mask]).exp().double(), logp <= -69, b, learner


def test_the_three_worlds(engine):
    """Equal weights: off is biased, the others are 1. A slightly different learner: replay's mean stays 1, recompute loses tokens."""
    groups = sampled(engine, Sampling(top_p=0.8, top_k=16), n=128)
    off, recompute, replay = (ratios(groups, w)[0] for w in ("off", "recompute", "replay"))
    assert off.mean() < 0.9 and off.max() < 1 and (recompute - 1).abs().max() < 1e-3 and (replay - 1).abs().max() < 1e-3
    replay, none_cut, *_ = ratios(groups, "replay", 0.02)
    recompute, cut, *_ = ratios(groups, "recompute", 0.02)
    error = float(replay.std() / len(replay) ** 0.5)
    assert abs(float(replay.mean()) - 1) < 4 * error and error < 0.02 and not none_cut.any() and float((replay - 1).abs().mean()) > 0.05
    assert 0.001 < float(cut.double().mean()) < 0.2 and torch.isfinite(recompute).all() and (recompute[cut] < 1e-20).all()


def test_a_token_that_the_learner_cuts_is_counted_and_teaches_nothing(folders):
    import objectives
    groups = sampled(HFEngine(str(folders / "actor")), Sampling(top_p=0.8, top_k=16))
    for i, g in enumerate(groups):
        for j, r in enumerate(g.responses):
            r.reward = float((i + j) % 2)
    _, cut, b, learner = ratios(groups, "recompute", 0.05)
    cfg, lost = replace(learner.cfg, correction="none", is_cap=None), float(cut.double().mean())    # no weight that would hide it
    learner.cfg = cfg
    learner._step = lambda loss: {}
    logged = learner.update(b, objectives.prepare(b, learner.comm, cfg, {}))
    assert lost > 0 and logged["rollout_corr/cut_fraction"] == pytest.approx(lost) and np.isfinite(logged["loss"])
    whole = {n: p.grad.clone() for n, p in learner.pair.named_parameters()}
    assert all(torch.isfinite(g).all() for g in whole.values())
    learner.pair.zero_grad()
    flat = b.mask.clone()
    flat[b.mask] = ~cut
    b.mask, stats = flat, objectives.prepare(b, learner.comm, cfg, {})
    learner.update(b, {**stats, "tokens": logged["tokens"]})
    for n, p in learner.pair.named_parameters():
        assert torch.allclose(p.grad, whole[n], atol=1e-6), n


def test_replay_needs_kept_sets(folders):
    groups = sampled(HFEngine(str(folders / "actor")), Sampling(top_k=8), kept=0)
    with pytest.raises(ValueError, match="--keep_sampling_mask=replay: group .* has no kept sets"):
        batches.collate(groups, make_cfg(top_k=8))
    assert sampling.largest(make_cfg(top_k=8), 256) == 20 and sampling.largest(make_cfg(top_p=0.9), 256) == 256 == sampling.largest(make_cfg(top_k=300), 256)
    assert sampling.largest(make_cfg(), 256) == 0 == sampling.largest(make_cfg(top_k=8, keep_sampling_mask="off"), 256)
