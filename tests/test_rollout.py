"""Engines, records, and sources of groups, on the plain sampler and on real vLLM."""

import os
from collections import Counter
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_cfg, make_groups, tiny_model

import batching
from machinery.checkpoint.models import read_config
from machinery.flags import UserError
from machinery.run import open_eval_engine
from model import engines, in_vllm
from model.engines import HFEngine, make_engine
from rollout import Response, uniforms
from sampling import Sampling
from source import LocalSource
from sync import SyncError, WeightCheck
from tasks.arith import Arithmetic, arithmetic_tokenizer

PROBE_IDS = [5, 40, 3, 77, 200, 9, 12, 55, 13, 100, 31, 8]
PROMPTS = ((5, 6, 7), (100, 3))
SEEDS = [[11, 12, 13], [14, 15, 16]]
TWELVE_TOKENS = Sampling(max_tokens=12)


def sample(engine, seeds, sampling=TWELVE_TOKENS, K=20, prompts=PROMPTS, stop=(1,)):
    return engine.generate([np.array(p, np.int32) for p in prompts], seeds, sampling, K, list(stop))


def flat(groups) -> list[Response]:
    return [*chain.from_iterable(groups)]


def same_tokens(a: Response, b: Response) -> bool:
    return np.array_equal(a.tokens, b.tokens)


# -- engines ----------------------------------------------------------------------------------------------------------


def test_a_sample_depends_on_its_seed_and_not_on_its_batch(engine):
    together = sample(engine, SEEDS)
    for group, prompt, seeds in zip(together, PROMPTS, SEEDS, strict=True):
        for r, seed in zip(group, seeds, strict=True):
            alone = sample(engine, [[seed]], prompts=(prompt,))[0][0]
            assert same_tokens(alone, r) and np.abs(alone.logp_inf - r.logp_inf).max() < 1e-5
    others = sample(engine, [[21, 22], [23, 24]])
    assert any(not same_tokens(a, b) for a, b in zip(others[0], together[0], strict=False))


def test_prompts_of_more_tokens_than_vllm_reads_at_once(engine):
    """On a CPU vLLM reads 4,096 tokens at once; with 5,400 tokens each response is the same as in a smaller batch."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 256, 60) for _ in range(90)]
    four = Sampling(max_tokens=4)
    together = sample(engine, [[i] for i in range(90)], four, prompts=prompts)
    part = sample(engine, [[i] for i in range(60, 75)], four, prompts=prompts[60:75])
    assert all(same_tokens(a, b) for a, b in zip(flat(together[60:75]), flat(part), strict=True))


def test_a_group_reads_the_full_blocks_of_its_prompt_once(vllm_engines, monkeypatch):
    """32 of 40 tokens of a prompt; a response has the log-probabilities that it has alone."""
    engine = vllm_engines()
    core, step, cached = engine.llm.llm_engine, engine.llm.llm_engine.step, []
    monkeypatch.setattr(core, "step", lambda: [cached.append(o) or o for o in step()])
    prompt = np.random.default_rng(1).integers(2, 256, 40)
    (group,) = sample(engine, [[1, 2, 3, 4]], prompts=[prompt])
    assert sorted(o.num_cached_tokens for o in cached if o.finished) == [0, 32, 32, 32]
    engine.load(tiny_model(1).state_dict().items())  # no prefix of earlier weights is used
    (alone,) = sample(engine, [[4]], prompts=[prompt])[0]
    assert same_tokens(alone, group[3]) and np.abs(alone.logp_inf - group[3].logp_inf).max() < 1e-5


def test_a_stop_token_in_the_last_position_is_a_stop(engine):
    """With a limit of tokens that some responses reach with a stop token."""
    short = Sampling(max_tokens=3)
    responses = flat(sample(engine, [list(range(80))], short, prompts=((5, 6, 7),), stop=range(1, 20)))
    assert {r.finish_reason for r in responses if len(r.tokens) == 3} == {"stop", "length"}
    assert all((r.finish_reason == "stop") == (r.tokens[-1] in range(1, 20)) for r in responses)


def test_samples_follow_the_distribution(engine):
    """First tokens of many responses against the model's probabilities: chi-square over the likely tokens."""
    n = 3000
    groups = sample(engine, [list(range(n))], Sampling(max_tokens=1), K=0, prompts=((5, 6, 7),))
    with torch.no_grad():
        p = tiny_model(1)(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1).numpy()
    counts = np.bincount([int(r.tokens[0]) for r in groups[0]], minlength=256)
    likely = p * n >= 8
    chi2 = float(((counts[likely] - n * p[likely]) ** 2 / (n * p[likely])).sum())
    dof = int(likely.sum())
    assert dof >= 20 and abs(chi2 - dof) < 5 * (2 * dof) ** 0.5


def test_ragged_prompts_and_finished_rows_change_nothing():
    """Left padding and dropped finished rows against one request at a time, and against smaller batches."""
    prompts = [(5,), (9, 8, 7, 6, 5, 4), (100, 3, 2), (4, 4)]
    seeds = [list(range(10 * i, 10 * i + 8)) for i in range(4)]

    def run(engine, seeds, prompts):
        return sample(engine, seeds, Sampling(max_tokens=40), prompts=prompts, stop=range(30))

    engine = HFEngine(tiny_model(1))
    groups = run(engine, seeds, prompts)
    lengths = [len(r.tokens) for r in flat(groups)]
    assert min(lengths) < 10 and len(set(lengths)) > 8
    for group, prompt, group_seeds in zip(groups, prompts, seeds, strict=True):
        for r, seed in zip(group[::3], group_seeds[::3], strict=True):
            alone = run(engine, [[seed]], (prompt,))[0][0]
            assert same_tokens(r, alone) and (r.finish_reason == "stop") == (r.tokens[-1] < 30)
    small = HFEngine(tiny_model(1))
    small.batch_tokens = 130
    assert all(map(same_tokens, flat(groups), flat(run(small, seeds, prompts))))
    batches = list(small._batches(prompts, seeds, 40))  # groups are cut into pieces
    sizes = [(sum(map(len, groups)), max(map(len, prompts)) + 40) for prompts, groups in batches]
    assert sum(rows for rows, _ in sizes) == 32 and all(rows * width <= 130 for rows, width in sizes)
    small.batch_tokens = 10  # less than a row
    assert [len(group) for _, (group,) in small._batches([range(3)], [list(range(5))], 30)] == [1] * 5


def test_sizes_of_caches():
    """By hand."""
    c = tiny_model(1, layers=3).config
    of_a_token = 2 * 3 * c.num_key_value_heads * c.head_dim
    for dtype, nbytes in (("float32", 4), ("bfloat16", 2)):
        assert HFEngine(tiny_model(1, layers=3), dtype=dtype).batch_tokens == 4 * 2**30 // (nbytes * of_a_token)
    block = 32 * 10  # bytes
    assert engines.cache_size(10, 64, 4) == 4 * 3 * block
    assert engines.cache_size(10, 129, 999) == 256 * 6 * block


def test_flags_reach_the_engines(folders, monkeypatch):
    cfg = make_cfg(logprobs_mode="raw", lm_head_fp32=True, rollout_quant="int8", rollout_memory=0.5, seed=9)
    plain = make_engine(cfg, str(folders / "actor"), 64, 5)
    assert plain.raw and plain.head_fp32 and plain.fmt.name == "int8" and plain.packed and plain.dtype == "float32"
    monkeypatch.setattr(engines, "VLLMEngine", lambda folder, **settings: settings)
    changes = dict(rollout="vllm", rollout_dtype="bfloat16", kv_cache_dtype="fp8", rollout_tp=2, router_replay=True)
    settings = make_engine(replace(cfg, **changes), "f", 64, 5, vocabulary=99, sleep_level=1)
    wanted = dict(max_len=64, max_logprobs=5, seed=9, memory_gib=0.5, rows=2 * cfg.rollout_batch)  # two ranks
    wanted |= dict(kv_cache="fp8", dtype="bfloat16", logprobs_mode="raw", head_fp32=True, fmt=plain.fmt)
    assert settings == {**wanted, "vocabulary": 99, "tp": 2, "routing": True, "sleep_level": 1}
    opened = SimpleNamespace(policy="f", eval_context=64, vocabulary=99)
    learners = open_eval_engine(replace(cfg, **changes), opened, SimpleNamespace(device="cpu"))
    assert (learners["dtype"], learners["fmt"], learners["kv_cache"]) == ("float32", None, "auto")


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="vLLM has no 8-bit cache here")
def test_an_8_bit_cache_adds_mismatch(vllm_engines):
    """Keys and values with three bits of mantissa: near the plain engine, but the gap exceeds float32 rounding."""
    ids = np.arange(48).reshape(2, 24) * 7 % 250
    gap = np.abs(np.exp(vllm_engines().logprobs(ids)) - np.exp(vllm_engines(kv_cache="fp8").logprobs(ids)))
    assert 1e-5 < gap.mean() < 0.06


def test_changes_of_vllm_are_made_once_and_refused_without_a_target():
    pytest.importorskip("vllm")
    owner, twice = SimpleNamespace(__name__="owner", one=lambda: 1), lambda function: lambda: 2 * function()
    for _ in range(2):  # by the second engine in this process
        in_vllm.change(owner, "one", twice)
    assert owner.one() == 2
    with pytest.raises(UserError, match=r"has no owner.two, which model/in_vllm.py replaces; .* --rollout=hf"):
        in_vllm.change(owner, "two", twice)


def test_a_failed_start_of_vllm(monkeypatch, tmp_path):
    """An exception becomes one sentence with the name of a log; changed global state is restored."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for size in (None, "2"):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if size:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
        generator = torch.get_rng_state()
        error = pytest.raises(UserError, match="it does not start .ValueError: no room left.; .*log")
        with error, in_vllm.in_one_sentence("it does not start"), in_vllm.vllm_leaves_no_trace():
            os.environ["LOCAL_WORLD_SIZE"] = "1"
            torch.manual_seed(12345)
            raise ValueError("no room\n left")
        assert os.environ.get("LOCAL_WORLD_SIZE") == size
        assert torch.equal(torch.get_rng_state(), generator)
    (log,) = tmp_path.iterdir()
    assert "Traceback" in log.read_text() and "no room" in log.read_text()
    with pytest.raises(SyncError), in_vllm.in_one_sentence("it cannot load"):
        raise SyncError("of the stream itself")


@pytest.mark.parametrize("free, share, given", [(80, 0.5, 0.5), (40, 0.5, 0.45), (8, 0.25, 0.09)])
def test_an_engine_takes_at_most_the_free_memory(free, share, given, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * 2**30, 80 * 2**30))
    assert engines.share_of_gpu(share) == given
    assert (f"only {free}.0 GiB are free" in capsys.readouterr().err) == (given < share)


# -- records ----------------------------------------------------------------------------------------------------------


def test_uniforms_are_a_pure_function_of_key_and_position():
    u = uniforms(1000, "mask", 0, ("rank0", 0, 3), 2)
    assert np.array_equal(u[:10], uniforms(10, "mask", 0, ("rank0", 0, 3), 2)) and u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.05 and not np.array_equal(u[:10], uniforms(10, "mask", 0, ("rank0", 0, 4), 2))
    groups = make_groups(4, seed=1)
    whole = batching.collate(groups, make_cfg())
    part = batching.collate(groups[2:], make_cfg())  # different rank, different position in the batch: the same draws
    same_rows = whole.mask_uniforms[8:, : part.mask_uniforms.shape[1]]
    assert torch.equal(same_rows[part.exists], part.mask_uniforms[part.exists])
    assert not torch.equal(whole.mask_uniforms, batching.collate(groups, make_cfg(seed=1)).mask_uniforms)
    assert len(set(whole.mask_uniforms[:, 0].tolist())) == len(whole)  # draws differ between responses


def test_collate_by_hand():
    groups = make_groups(2, G=4, K=3, seed=5)
    for response in groups[1].responses:
        response.reward = 1.0
    groups[0].responses[2].finish_reason = "length"
    groups[0].responses[2].reward = 1.0 - groups[0].responses[0].reward
    b = batching.collate(groups, make_cfg(advantage="grpo_no_std"), version=7)
    row = 0
    for k, g in enumerate(groups):
        mean = np.mean([r.reward for r in g.responses])
        for r in g.responses:
            P, L = len(g.prompt_ids), len(r.tokens)
            assert b.ids[row].tolist() == [*g.prompt_ids, *r.tokens] + [0] * (b.ids.shape[1] - P - L)
            assert b.group[row] == k and b.adv[row, 0] == pytest.approx(r.reward - mean, abs=1e-6)
            assert b.staleness[row] == 7.0
            assert b.cut[row] == (row == 2)
            assert b.mask[row, :L].tolist() == r.loss_mask.tolist() and not b.mask[row, L:].any()
            for t in range(L):
                in_top = int(r.tokens[t]) in r.topk_ids[t].tolist()
                assert torch.isinf(b.support_logp[row, t, 0]) == in_top
                assert in_top or b.support_logp[row, t, 0] == r.logp_inf[t]
                assert b.p_kth[row, t] == pytest.approx(np.exp(r.topk_logp[t, -1]))
            row += 1
    part = b.select([5, 2])
    assert part.tokens.shape[1] == int(part.length.max())
    assert torch.equal(part.tokens[0], b.tokens[5, : part.tokens.shape[1]])


@pytest.mark.parametrize("way", ["off", "replay", "recompute"])
def test_sampling_settings_in_the_learners_scores(way):
    """Each response has its group's settings: the temperature always, truncation only if it is recomputed."""
    groups = make_groups(2, G=2, K=3, seed=5)
    groups[0].sampling = Sampling(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05)
    groups[1].sampling = Sampling(temperature=1.3, top_p=0.8, top_k=30, min_p=0.01)
    for r in flat(g.responses for g in groups):
        r.allowed_offsets, r.allowed_ids = np.arange(len(r.tokens) + 1), r.tokens
    b = batching.collate(groups, make_cfg(keep_sampling_mask=way))
    first, second = [0.7, 1.0, 0.0, 0.0], [1.3, 1.0, 0.0, 0.0]
    if way == "recompute":
        first, second = [0.7, 0.9, 20.0, 0.05], [1.3, 0.8, 30.0, 0.01]
    assert torch.allclose(b.sampling, torch.tensor([first, first, second, second]))


# -- the source -------------------------------------------------------------------------------------------------------


def make_source(engine, folders, rank=0, n_ranks=1):
    check = WeightCheck(read_config(folders / "actor"), PROBE_IDS)
    settings = dict(group_size=3, topk=5, model="actor", check=check, rank=rank, n_ranks=n_ranks)
    return LocalSource(engine, Arithmetic(), arithmetic_tokenizer(), Sampling(max_tokens=10, seed=3), **settings)


def assert_same_group(a, b):
    assert a.uid == b.uid and a.prompt_id == b.prompt_id
    assert all(same_tokens(x, y) for x, y in zip(a.responses, b.responses, strict=True))


def test_source_returns_whole_groups_and_resumes(folders):
    engine = HFEngine(str(folders / "actor"))
    source = make_source(engine, folders)
    source.publish(2, tiny_model(1).state_dict().items())
    groups = source.next(1, 2)
    groups += source.next(2, 2)
    assert [g.uid for g in groups] == [("rank0", 0, i) for i in range(3)] and len({g.prompt_id for g in groups}) == 3
    for g in groups:
        assert len(g.responses) == 3 and g.version == 2 and len(g.digest) == 32
        assert g.model == "actor" and g.t_end >= g.t_start
        assert all(r.topk_ids.shape[1] == 5 and r.reward in (0.0, 1.0) for r in g.responses)
    fresh = make_source(engine, folders)
    fresh.load_state_dict(source.state_dict())
    for a, b in zip(source.next(2, 2), fresh.next(2, 2), strict=True):
        assert_same_group(a, b)


@pytest.mark.parametrize(
    "flat, rounds, wanted, dropped, sequence",
    [
        ({1, 2, 5}, 5, [0, 3, 4, 6], 3, 7),
        ({1, 2, 5}, 2, [0, 3, 4, 1], 2, 6),
        ({1, 2, 5}, 0, [0, 1, 2, 3], None, 4),
        (set(range(99)), 3, [0, 1, 2, 3], 8, 12),
    ],
)
def test_groups_without_spread_are_replaced(folders, flat, rounds, wanted, dropped, sequence):
    """Only missing groups are replaced, from the next prompts, for `rounds` rounds; then dropped groups fill up."""
    source = make_source(SimpleNamespace(packed=False, any_rank=bool, sleep=lambda: None), folders)
    source.resample = rounds

    def sample(numbers):  # the first response to a prompt earns 1, the rest only if all of them do
        rewards = [(n, [1.0, *[float(n in flat)] * 2]) for n in numbers]
        return [SimpleNamespace(n=n, responses=[SimpleNamespace(reward=x) for x in xs]) for n, xs in rewards]

    source.sample = sample
    assert [group.n for group in source.next(4, 0)] == wanted
    assert source.sequence == sequence
    on_two_ranks = source.metrics(lambda counts: Counter({name: 2 * n for name, n in counts.items()}))
    assert on_two_ranks == ({} if dropped is None else {"dynamic_sampling/dropped": 2 * dropped})
    assert source.metrics() == ({"dynamic_sampling/dropped": 0} if rounds else {})
    source.give_back()
    assert source.sequence == 0


def test_half_of_all_sampled_responses_may_not_be_poisoned(folders):
    source = make_source(SimpleNamespace(packed=False), folders)
    source.counts.update(poisoned=4, sampled=9)
    assert source.metrics() == {"poisoned": 4}
    source.counts.update(poisoned=4, sampled=8)
    with pytest.raises(UserError, match="of 8 responses 4 have log-probabilities"):
        source.metrics()


def test_two_ranks_sample_the_groups_of_one(folders):
    """Uids, prompts, samples and mask uniforms depend on the problem's number, not on the rank. Every response of a
    problem has its own seed."""
    engine, task = HFEngine(str(folders / "actor")), Arithmetic()
    one = make_source(engine, folders).next(4, 0)
    assert [g.prompt_id for g in one] == [task.problem("train", i).id for i in range(4)]
    two = [make_source(engine, folders, rank, 2) for rank in (0, 1)]
    for source, groups in ((two[0], one[::2]), (two[1], one[1::2])):
        for group, again in zip(groups, source.next(2, 0), strict=True):
            assert_same_group(group, again)
    two.append(replace(two[0], sampling=Sampling(seed=4)))
    seeds = [seed for source in two for i in range(2) for seed in source.seeds(source.identify(i)[1])]
    assert len(set(seeds)) == 18
