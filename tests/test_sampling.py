"""Sampling settings: allowed tokens, records, and the three modes of the learner's scores."""

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import make_cfg, tiny_model
from transformers import AutoModelForCausalLM

import batching
import model as models
import objectives
import sampling
from learner import Comm, Learner
from machinery.flags import UserError
from model import Needs
from model.decoding import Records
from model.engines import HFEngine
from rollout import Response, Rollout, as_groups
from sampling import Sampling

PROMPTS = ((5, 6, 7), (100, 3))
TRUNCATED = [
    Sampling(top_k=8),
    Sampling(top_p=0.8, top_k=16),
    Sampling(temperature=0.7, top_p=0.8, top_k=16),
    Sampling(min_p=0.2, top_k=16),
]


def test_cut_by_hand():
    z = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()

    def allowed(**settings):
        return (~sampling.cut(z, **settings))[0].nonzero()[:, 0].tolist()

    assert allowed() == [0, 1, 2, 3] and allowed(top_k=2) == [1, 3] and allowed(top_k=9) == [0, 1, 2, 3]
    assert allowed(top_p=0.69) == [1, 3] and allowed(top_p=0.71) == [1, 2, 3] and allowed(top_p=1e-9) == [1]
    assert allowed(min_p=0.6) == [1, 3] and allowed(min_p=0.99) == [1]
    assert allowed(top_k=3, top_p=0.76) == [1, 3]  # .4 / .9 + .3 / .9 = .78: top_p applies after top_k
    assert allowed(min_p=0.4, top_p=0.45) == [1, 3]  # .4 / .9 = .44 is not enough
    tie = torch.tensor([[0.3, 0.3, 0.3, 0.1]]).log()
    assert (~sampling.cut(tie, top_k=2)).sum() == 3
    each = sampling.cut(z.expand(2, 4), torch.tensor([[1.0], [0.69]]), torch.tensor([[1.0], [0.0]]), torch.zeros(2, 1))
    assert (~each).sum(1).tolist() == [1, 2]


def test_cut_equals_vllms():
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    g = torch.Generator().manual_seed(0)
    z = torch.randn(64, 200, generator=g) * 3
    for k, p in ((20, None), (None, 0.8), (20, 0.8), (3, 0.99)):
        ks = None if k is None else torch.full((64,), k)
        ps = None if p is None else torch.full((64,), p)
        want = apply_top_k_top_p_pytorch(z.clone(), ks, ps)
        assert torch.equal(sampling.cut(z, p or 1.0, k or 0), want.isinf())


# -- records ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["hf", "vllm"])
def engine(request, folders):
    """Each engine with the tiny actor's weights."""
    if request.param == "hf":
        return HFEngine(str(folders / "actor"))
    vllm = request.getfixturevalue("vllm_engine")
    vllm.load(tiny_model(1).state_dict().items())
    return vllm


def sampled(engine, settings, n=8, max_allowed=20) -> list[Rollout]:
    """A group of n responses to each prompt, of at most 12 tokens."""
    settings = replace(settings, max_tokens=12)
    prompts = [np.array(p, np.int32) for p in PROMPTS]
    seeds = [list(range(31 * i, 31 * i + n)) for i in range(len(prompts))]
    responses = engine.generate(prompts, seeds, settings, 5, [1], max_allowed)
    return as_groups("t", prompts, responses, settings)


def flat(groups) -> list[Response]:
    return [response for group in groups for response in group.responses]


def sequence(group: Rollout, response: Response) -> torch.Tensor:
    """Prompt and response, int64."""
    return torch.from_numpy(np.concatenate([group.prompt_ids, response.tokens]).astype(np.int64))


@pytest.mark.parametrize("settings", TRUNCATED, ids=str)
def test_records_are_of_the_truncated_distribution(engine, settings):
    model, sizes = tiny_model(1), []
    for group in sampled(engine, settings):
        P = len(group.prompt_ids)
        for r in group.responses:
            ids = sequence(group, r)
            with torch.no_grad():
                z = model(input_ids=ids[None]).logits[0, P - 1 : -1] / settings.temperature
            gone = sampling.cut(z, settings.top_p, settings.top_k, settings.min_p)
            want = z.masked_fill(gone, -torch.inf).log_softmax(-1)
            assert np.allclose(r.logp_inf, want.gather(1, ids[P:, None])[:, 0], atol=1e-4)
            assert len(r.allowed_offsets) == len(r.tokens) + 1
            assert r.allowed_offsets.dtype == np.int64 and r.allowed_ids.dtype == np.int32
            for t, token in enumerate(r.tokens):
                allowed = r.allowed_ids[r.allowed_offsets[t] : r.allowed_offsets[t + 1]].tolist()
                assert set(allowed) == set((~gone[t]).nonzero()[:, 0].tolist())
                assert token in allowed and len(set(allowed)) == len(allowed)
                sizes.append(len(allowed))
    by_top_k_alone = settings.top_p == 1 and settings.min_p == 0
    assert len(set(sizes)) > 1 or by_top_k_alone


def test_allowed_sets_are_recorded_on_request_under_truncation(engine):
    assert sampled(engine, TRUNCATED[0], n=1)[0].responses[0].allowed_ids is not None
    assert sampled(engine, TRUNCATED[0], n=1, max_allowed=0)[0].responses[0].allowed_ids is None
    assert sampled(engine, Sampling(), n=1)[0].responses[0].allowed_ids is None


def test_an_allowed_set_that_does_not_fit_is_refused(engine):
    with pytest.raises(ValueError, match="more than 4 tokens: bound the number with --top_k"):
        sampled(engine, Sampling(top_p=0.95), max_allowed=4)


# -- the learner ------------------------------------------------------------------------------------------------------


class Scored(NamedTuple):
    """Groups scored by a learner."""

    ratio: torch.Tensor  # p_ref / p_inf of every token, float64
    cut: torch.Tensor  # whether the learner cuts the token
    batch: batching.Batch
    learner: Learner


def scored(groups, keep_sampling_mask, noise=0.0) -> Scored:
    cfg = make_cfg(objective="tis", keep_sampling_mask=keep_sampling_mask, top_p=0.8, top_k=16)
    model = tiny_model(1)
    with torch.no_grad():
        g = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g), alpha=noise)
    learner = Learner(model, None, cfg, Comm())
    b = batching.collate(groups, cfg)
    logp = learner.score(b, Needs()).logp[b.mask]
    return Scored((logp - b.logp_inf[b.mask]).exp().double(), logp <= -69, b, learner)


def test_the_three_modes_of_scoring(engine):
    """Equal weights: off is biased, the remaining modes give 1.

    A slightly different learner: replay's mean stays 1, recompute loses tokens."""
    groups = sampled(engine, Sampling(top_p=0.8, top_k=16), n=128)
    off = scored(groups, "off").ratio
    assert off.mean() < 0.9 and off.max() < 1
    for way in ("recompute", "replay"):
        assert (scored(groups, way).ratio - 1).abs().max() < 1e-3
    replay = scored(groups, "replay", 0.02)
    error = float(replay.ratio.std() / len(replay.ratio) ** 0.5)
    assert abs(float(replay.ratio.mean()) - 1) < 4 * error and error < 0.02
    assert not replay.cut.any() and float((replay.ratio - 1).abs().mean()) > 0.05
    recompute = scored(groups, "recompute", 0.02)
    assert 0.001 < float(recompute.cut.double().mean()) < 0.2
    assert torch.isfinite(recompute.ratio).all() and (recompute.ratio[recompute.cut] < 1e-20).all()


def test_tokens_cut_by_the_learner_are_counted_without_gradient(folders):
    groups = sampled(HFEngine(str(folders / "actor")), Sampling(top_p=0.8, top_k=16))
    for i, g in enumerate(groups):
        for j, r in enumerate(g.responses):
            r.reward = float((i + j) % 2)
    at_start = scored(groups, "recompute", 0.05)
    b, learner = at_start.batch, at_start.learner
    lost = float(at_start.cut.double().mean())
    cfg = replace(learner.cfg, correction="none", is_cap=None)  # no weight that would hide the cut
    learner.cfg = cfg

    def no_step(loss, all_rejected):
        return {}

    learner._step = no_step  # keeps the gradients
    logged = learner.update(b, objectives.prepare(b, learner.comm, cfg, {}))
    assert lost > 0 and logged["rollout_corr/cut_fraction"] == pytest.approx(lost) and np.isfinite(logged["loss"])
    whole = {n: p.grad.clone() for n, p in learner.models.named_parameters()}
    assert all(torch.isfinite(g).all() for g in whole.values())
    learner.models.zero_grad()
    without = b.mask.clone()
    without[b.mask] = ~at_start.cut
    b.mask = without
    stats = objectives.prepare(b, learner.comm, cfg, {})
    learner.update(b, replace(stats, tokens=logged["tokens"]))
    for n, p in learner.models.named_parameters():
        assert torch.allclose(p.grad, whole[n], atol=1e-6), n


@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.5, 0), (1.0, 8)])
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_the_table_of_logprobs_modes(kind, mode, temperature, top_k, folders, vllm_engines):
    """Praxis, section 2. Raw log-probabilities agree with a learner that divides by the temperature only at
    temperature 1. Processed ones always agree; under truncation the learner needs the allowed sets. Tokens are equal
    in both modes."""

    def make(mode):
        if kind == "hf":
            return HFEngine(str(folders / "actor"), logprobs_mode=mode)
        return vllm_engines(logprobs_mode="raw") if mode == "raw" else vllm_engines()

    def sample_in(mode):
        settings = Sampling(temperature=temperature, top_k=top_k)
        return sampled(make(mode), settings, n=16, max_allowed=20 if mode == "processed" else 0)

    if kind == "vllm":
        vllm_engines().load(tiny_model(1).state_dict().items())
    groups = sample_in(mode)
    in_other_mode = sample_in("raw" if mode == "processed" else "processed")
    assert all((a.tokens == b.tokens).all() for a, b in zip(flat(groups), flat(in_other_mode), strict=True))
    cfg = make_cfg(
        objective="tis",
        temperature=temperature,
        top_k=top_k,
        logprobs_mode=mode,
        keep_sampling_mask="replay" if mode == "processed" else "off",
    )
    b = batching.collate(groups, cfg)
    logp = Learner(tiny_model(1), None, cfg, Comm()).score(b, Needs()).logp
    gap = (logp - b.logp_inf)[b.mask].abs().mean()
    if mode == "processed" or (temperature == 1 and top_k == 0):
        assert gap < 1e-4
    else:
        assert gap > 0.05 or (top_k and gap < 1e-4)
    if mode == "raw" and top_k:  # raw and off agree, but not with the sampling distribution
        truth = batching.collate(in_other_mode, make_cfg(top_k=top_k))
        assert (b.logp_inf - truth.logp_inf)[b.mask].abs().mean() > 0.05


@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_a_head_in_float32_over_a_bfloat16_body(kind, folders, vllm_engines):
    """A bfloat16 head rounds logits to multiples of at least 1/128, so the gap of the two best is a multiple too; a
    float32 head's gap is not."""
    folder, off_grid = str(folders / "actor"), {}
    for fp32 in (True, False):
        if kind == "hf":
            engine = HFEngine(folder, dtype="bfloat16", head_fp32=fp32)
        else:
            engine = vllm_engines(dtype="bfloat16", head_fp32=fp32)
        responses = flat(sampled(engine, Sampling(), n=16))
        gap = np.concatenate([r.topk_logp[:, 0] - r.topk_logp[:, 1] for r in responses]) * 128
        off_grid[fp32] = np.abs(gap - gap.round()).mean()
    assert off_grid[True] > 0.2 and off_grid[False] < 0.01, off_grid


def test_a_float32_head_scores_the_bfloat16_body_s_hidden_states(folders):
    folder = str(folders / "actor")
    body = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).requires_grad_(False)
    for group in sampled(HFEngine(folder, dtype="bfloat16", head_fp32=True), Sampling(), n=16):
        r, P = group.responses[0], len(group.prompt_ids)
        ids = sequence(group, r)
        hidden = body.base_model(input_ids=ids[None]).last_hidden_state[0, P - 1 : -1].float()
        logp = (hidden @ body.lm_head.weight.float().t()).log_softmax(-1).gather(1, ids[P:, None])[:, 0]
        assert np.abs(logp.numpy() - r.logp_inf).mean() < 0.01
        read = HFEngine(folder, dtype="bfloat16", head_fp32=True).logprobs(ids[None].numpy())[0, P - 1 :]
        assert np.abs(logp.numpy() - read).max() < 1e-4


def test_the_learners_head_in_float32(folders, monkeypatch):
    """bfloat16 learner: with the flag the head's factors stay in float32, without it they are rounded first."""
    monkeypatch.setattr(models, "read_shared", models.read_rows)  # one forward, separate rows
    groups = sampled(HFEngine(str(folders / "actor")), Sampling())
    got = {}
    for fp32 in (True, False):
        cfg = make_cfg(objective="tis", dtype="bfloat16", lm_head_fp32=fp32)
        learner, seen = Learner(tiny_model(1), None, cfg, Comm()), []
        b = batching.collate(groups, cfg)
        learner.models.policy.base_model.register_forward_hook(
            lambda module, inputs, out, seen=seen: seen.append(out.last_hidden_state)
        )
        learner.cfg = replace(cfg, micro_tokens=10**6)
        L, P = int(b.length[0]), int(b.prompt_len[0])
        logp = learner.score(b, Needs()).logp[0, :L]
        (hidden,), weight = seen, learner.models.policy.lm_head.weight.detach()
        hidden = hidden[0, P - 1 : P + L - 1].float()
        if not fp32:
            hidden, weight = hidden.bfloat16().float(), weight.bfloat16().float()
        want = (hidden @ weight.t()).log_softmax(-1).gather(1, b.tokens[0, :L, None])[:, 0]
        assert torch.allclose(logp, want.detach(), atol=1e-5)
        got[fp32] = logp
    assert (got[True] - got[False]).abs().max() > 1e-4


def test_replay_needs_allowed_sets(folders):
    groups = sampled(HFEngine(str(folders / "actor")), Sampling(top_k=8), max_allowed=0)
    with pytest.raises(ValueError, match="--keep_sampling_mask=replay: group .* has no allowed sets"):
        batching.collate(groups, make_cfg(top_k=8))


def test_tokens_after_the_end_have_no_allowed_sets():
    """A row is decoded beyond its end; the sizes of sets after the end do not matter."""
    records = Records(2, 3, 0, "cpu")
    per_position = [(0, 0, 2), (0, 1, 5), (1, 0, 1), (1, 1, 2), (1, 2, 2)]  # response, position, size
    records.allowed = [np.array([[i] * size, [t] * size, list(range(size))]) for i, t, size in per_position]
    responses = [SimpleNamespace(tokens=np.zeros(n)) for n in (1, 3)]
    records._give_allowed(responses, 2)
    assert [r.allowed_ids.tolist() for r in responses] == [[0, 1], [0, 0, 1, 0, 1]]
    responses[0].tokens = np.zeros(2)
    with pytest.raises(UserError, match="allows more than 2 tokens: bound the number"):
        records._give_allowed(responses, 2)


def test_the_largest_size_of_a_recorded_set():
    def limit(**flags):
        return sampling.max_allowed(make_cfg(**flags), 256)

    assert limit(top_k=8) == 12 and limit(top_k=8, rollout_dtype="bfloat16") == 24
    assert limit(top_p=0.9) == 256 == limit(top_k=300)
    assert limit() == 0 == limit(top_k=8, keep_sampling_mask="off")


def test_minus_one_keeps_all_tokens():
    """Otherwise every learner would truncate without truncated sampling."""
    assert Sampling.of(make_cfg(objective="grpo", top_k=-1)) == Sampling.of(make_cfg(objective="grpo", top_k=0))


def test_a_sampled_token_outside_its_set_is_an_error():
    """600 tokens are allowed, but the engine reports only four with nearly all of the probability."""
    ids = np.array([[5, 6, 7, 8]], np.int32)
    logp = np.log(np.array([[0.7, 0.2, 0.09, 0.00999]])).astype(np.float32)
    offsets, allowed = sampling.allowed_sets(ids, logp, np.array([7]), 4)
    assert allowed.tolist() == [5, 6, 7, 8]
    part = np.log(np.array([[0.6, 0.2, 0.1, 0.05]])).astype(np.float32)  # 0.05 on tokens that are not listed
    with pytest.raises(UserError, match="allows more than 4 tokens"):
        sampling.allowed_sets(ids, part, np.array([7]), 4)
    with pytest.raises(UserError, match="allows more than 4 tokens"):
        sampling.allowed_sets(ids, logp, np.array([500]), 4)
