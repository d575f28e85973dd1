"""Sampling settings: allowed tokens, records, and the three modes of the learner's scores."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import at, log_probabilities, make_cfg, make_groups, tiny_model
from transformers import AutoModelForCausalLM

import batching
import sampling
from learner import Learner
from machinery.flags import UserError
from machinery.ranks import Comm
from model import Needs
from model.decoding import Records
from model.engines import HFEngine
from rollout import Response, Rollout, as_groups
from sampling import Sampling

PROMPTS = ((5, 6, 7), (100, 3))
SETTINGS = [
    Sampling(temperature=0.6),
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


# -- records ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_records_are_of_the_sampled_distribution(engine, settings):
    """Against the model's logits, without a cache, divided by the temperature and truncated."""
    model, sizes = tiny_model(1), []
    for group in sampled(engine, settings):
        for r in group.responses:
            L = len(r.tokens)
            with torch.no_grad():
                logp, ids = log_probabilities(model, group.prompt_ids, r.tokens, settings.temperature)
            gone = sampling.cut(logp, settings.top_p, settings.top_k, settings.min_p)
            want = logp.masked_fill(gone, -torch.inf).log_softmax(-1)
            assert r.tokens.dtype == r.topk_ids.dtype == np.int32 and r.logp_inf.dtype == np.float32
            assert np.allclose(r.logp_inf, at(want, ids), atol=1e-4)
            assert np.allclose(r.topk_logp, want.topk(5).values, atol=1e-4)
            assert np.allclose(r.topk_logp, want.gather(1, torch.from_numpy(r.topk_ids).long()), atol=1e-4)
            assert (r.finish_reason == "stop") == (r.tokens[-1] == 1) and 1 not in r.tokens[:-1]
            assert L == 12 or r.tokens[-1] == 1
            for t in range(L) if settings.truncates else ():
                allowed = r.allowed_ids[r.allowed_offsets[t] : r.allowed_offsets[t + 1]].tolist()
                assert sorted(allowed) == (~gone[t]).nonzero()[:, 0].tolist()
                sizes.append(len(allowed))
            assert not settings.truncates or (len(r.allowed_offsets) == L + 1 and r.allowed_ids.dtype == np.int32)
    assert len(set(sizes)) > 1 or not settings.truncates


@pytest.mark.parametrize("settings", [Sampling(temperature=0.01), Sampling(temperature=0.01, top_k=5, top_p=0.9)])
def test_records_near_temperature_0_are_finite(engine, settings):
    model = tiny_model(1)
    for group in sampled(engine, settings, n=4):
        for r in group.responses:
            with torch.no_grad():
                logp, ids = log_probabilities(model, group.prompt_ids, r.tokens, settings.temperature)
            gone = sampling.cut(logp, settings.top_p, settings.top_k, settings.min_p)
            want = at(logp.masked_fill(gone, -torch.inf).log_softmax(-1), ids)
            assert np.isfinite(r.logp_inf).all() and np.allclose(r.logp_inf, want, atol=0.02)


def test_allowed_sets_are_recorded_on_request_under_truncation(engine):
    without = sampled(engine, Sampling(top_k=8), n=4, max_allowed=0)
    assert {r.allowed_ids for r in flat(without) + flat(sampled(engine, Sampling(), n=1))} == {None}
    with pytest.raises(UserError, match="more than 4 tokens: bound the number with --top_k"):
        sampled(engine, Sampling(top_p=0.95), max_allowed=4)


# -- the learner ------------------------------------------------------------------------------------------------------


def scored(groups, keep_sampling_mask, noise=0.0):
    """(p_ref / p_inf of every token, whether the learner cuts it) of a learner with changed weights."""
    cfg = make_cfg(objective="tis", keep_sampling_mask=keep_sampling_mask, top_p=0.8, top_k=16, micro_tokens=500)
    model = tiny_model(1)
    with torch.no_grad():
        g = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g), alpha=noise)
    learner = Learner(model, None, cfg, Comm())
    b = batching.collate(groups, cfg)
    logp = learner.score(b, Needs()).logp[b.mask]
    return (logp - b.logp_inf[b.mask]).exp().double(), logp <= -69


def test_the_three_modes_of_scoring(folders):
    """Equal weights: off is biased, the remaining modes give 1.

    A slightly different learner: replay's mean stays 1, recompute loses tokens."""
    modes = ("off", "recompute", "replay")
    laws = [Sampling.of_policy(make_cfg(top_k=8, keep_sampling_mask=mode)) for mode in modes]
    assert [law.truncates for law in laws] == [False, True, True]
    groups = sampled(HFEngine(str(folders / "actor")), Sampling(top_p=0.8, top_k=16), n=128)
    off, _ = scored(groups, "off")
    assert off.mean() < 0.9 and off.max() < 1
    for way in modes[1:]:
        assert (scored(groups, way)[0] - 1).abs().max() < 1e-3
    ratio, cut = scored(groups, "replay", 0.02)
    error = float(ratio.std() / len(ratio) ** 0.5)
    assert abs(float(ratio.mean()) - 1) < 4 * error and error < 0.02
    assert not cut.any() and float((ratio - 1).abs().mean()) > 0.05
    ratio, cut = scored(groups, "recompute", 0.02)
    assert 0.001 < float(cut.double().mean()) < 0.2
    assert torch.isfinite(ratio).all() and (ratio[cut] < 1e-20).all()


@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.5, 0), (1.0, 8)])
@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_the_table_of_logprobs_modes(kind, temperature, top_k, folders, vllm_engines):
    """Praxis, section 2. Raw log-probabilities agree with a learner that divides by the temperature only at
    temperature 1, and with the sampling distribution only without truncation. Processed ones always agree; under
    truncation the learner needs the allowed sets. Tokens are equal in both modes."""
    settings, batches, gaps = Sampling(temperature=temperature, top_k=top_k), {}, {}
    for mode in ("raw", "processed"):
        if kind == "hf":
            engine = HFEngine(str(folders / "actor"), logprobs_mode=mode)
        else:
            engine = vllm_engines(logprobs_mode="raw") if mode == "raw" else vllm_engines()
        groups = sampled(engine, settings, n=16, max_allowed=20 if mode == "processed" else 0)
        flags = dict(temperature=temperature, top_k=top_k, logprobs_mode=mode)
        cfg = make_cfg(objective="tis", keep_sampling_mask="replay" if mode == "processed" else "off", **flags)
        b = batches[mode] = batching.collate(groups, cfg)
        logp = Learner(tiny_model(1), None, cfg, Comm()).score(b, Needs()).logp
        gaps[mode] = (logp - b.logp_inf)[b.mask].abs().mean()
    raw, processed = batches.values()
    assert torch.equal(raw.tokens, processed.tokens) and gaps["processed"] < 1e-4
    assert gaps["raw"] < 1e-4 if temperature == 1 else gaps["raw"] > 0.05
    if top_k:
        assert (raw.logp_inf - processed.logp_inf)[raw.mask].abs().mean() > 0.05


def test_a_head_in_float32_over_a_bfloat16_body(vllm_engines):
    """A bfloat16 head rounds logits to multiples of at least 1/128, so the gap of the two best is a multiple too; a
    float32 head's gap is not."""
    off_grid = {}
    for fp32 in (True, False):
        responses = flat(sampled(vllm_engines(dtype="bfloat16", head_fp32=fp32), Sampling(), n=16))
        gap = np.concatenate([r.topk_logp[:, 0] - r.topk_logp[:, 1] for r in responses]) * 128
        off_grid[fp32] = np.abs(gap - gap.round()).mean()
    assert off_grid[True] > 0.2 and off_grid[False] < 0.01, off_grid


def test_a_float32_head_scores_the_bfloat16_body_s_hidden_states(folders):
    folder, ids = str(folders / "actor"), torch.arange(5, 45).reshape(2, 20) * 7 % 250
    body = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).requires_grad_(False)
    hidden = body.base_model(input_ids=ids).last_hidden_state[:, :-1].float()
    logp = (hidden @ body.lm_head.weight.float().t()).log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    engine = HFEngine(folder, dtype="bfloat16", head_fp32=True)
    assert np.abs(logp.numpy() - engine.logprobs(ids.numpy())).max() < 1e-4
    group = sampled(engine, Sampling(), n=1)[0]
    read = engine.logprobs(sequence(group, group.responses[0])[None].numpy())[0, len(group.prompt_ids) - 1 :]
    assert np.abs(read - group.responses[0].logp_inf).mean() < 0.01


@pytest.mark.parametrize("fp32", [False, True])
def test_the_learners_head_in_float32(fp32):
    """bfloat16 learner: with the flag the head's factors stay in float32, without it they are rounded first."""
    cfg = make_cfg(objective="tis", dtype="bfloat16", lm_head_fp32=fp32)
    b, models = batching.collate(make_groups(), cfg), Learner(tiny_model(1), None, cfg, Comm()).models
    with torch.no_grad():
        hidden = models._hidden(models.policy, b, b.exists.flatten().nonzero()[:, 0], False)
        weight = models.policy.lm_head.weight.to(torch.float32 if fp32 else torch.bfloat16)
        want = (hidden.float() @ weight.float().t()).log_softmax(-1).gather(1, b.tokens[b.exists][:, None])[:, 0]
        assert torch.allclose(models(b, Needs())["logp"][b.exists], want, atol=1e-5)
    assert hidden.dtype == weight.dtype


def test_tokens_after_the_end_have_no_allowed_sets():
    """A row is decoded beyond its end; the sizes of sets after the end do not matter."""
    records, both, token = Records(2, 2, 2, "cpu"), torch.arange(2), torch.zeros(2, 1, dtype=torch.long)
    records.write(both, 0, token, torch.tensor([[0.6, 0.4, 0.0], [1.0, 0.0, 0.0]]).log())
    assert records.end(both, 0, torch.tensor([True, False])).tolist() == [False, True]
    records.write(both, 1, token, torch.tensor([[0.4, 0.3, 0.3], [0.7, 0.3, 0.0]]).log())
    assert [r.allowed_ids.tolist() for r in records.responses([0], 0, 2)] == [[0, 1], [0, 0, 1]]
    records.length[0] = 2
    with pytest.raises(UserError, match="allows more than 2 tokens: bound the number"):
        records.responses([0], 0, 2)


def test_the_largest_size_of_a_recorded_set():
    def limit(**flags):
        return sampling.max_allowed(make_cfg(**flags), 256)

    assert limit(top_k=8) == 12 and limit(top_k=8, rollout_dtype="bfloat16") == 24
    assert limit(top_p=0.9) == 256 == limit(top_k=300)
    assert limit() == limit(top_k=-1) == 0 == limit(top_k=8, keep_sampling_mask="off")


def test_a_sampled_token_outside_its_set_is_an_error():
    """600 tokens are allowed, but the engine reports only four with nearly all of the probability."""
    ids = np.array([[5, 6, 7, 8]], np.int32)
    logp = np.log(np.array([[0.7, 0.2, 0.09, 0.00999]])).astype(np.float32)
    offsets, allowed = sampling.allowed_sets(ids, logp, np.array([7]), 4)
    assert allowed.tolist() == [5, 6, 7, 8]
    part = np.log(np.array([[0.6, 0.2, 0.1, 0.05]])).astype(np.float32)  # 0.05 on tokens that are not listed
    for listed, token in ((part, 7), (logp, 500)):
        with pytest.raises(UserError, match="allows more than 4 tokens"):
            sampling.allowed_sets(ids, listed, np.array([token]), 4)
