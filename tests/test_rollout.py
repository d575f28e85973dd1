"""Engines, records, and the proof of every weight sync, on the plain sampler and on real vLLM."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import batching
from conftest import make_cfg, make_groups, tiny_model
from learner import Comm, Learner
from model import Needs
import engines
import checkpoint
from engines import HFEngine, make_engine
from rollout import LocalSource, Sampling, uniforms
from sync import Digest, Probe, SyncError, prove
from tasks import Arithmetic, arithmetic_tokenizer

PROBE_IDS = [5, 40, 3, 77, 200, 9, 12, 55, 13, 100, 31, 8]


@pytest.fixture(params=["hf", "vllm"])
def engine(request, folders):
    """Both engines, holding the tiny actor."""
    if request.param == "hf":
        return HFEngine(str(folders / "actor"))
    engine = request.getfixturevalue("vllm_engine")
    engine.load(list(tiny_model(1).state_dict().items()))
    return engine


def sample(engine, seeds, sampling=Sampling(max_tokens=12), K=20, prompts=((5, 6, 7), (100, 3)), stop=(1,)):
    return engine.generate([np.array(p, np.int32) for p in prompts], seeds, sampling, K, list(stop))


def law(model, prompt, response, temperature=1.0):
    """The model's log-probabilities (L, V) along a response, computed plainly."""
    ids = torch.tensor([*prompt, *map(int, response.tokens)])[None]
    with torch.no_grad():
        return (model(input_ids=ids).logits[0].double() / temperature).log_softmax(-1)[len(prompt) - 1 : -1]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_records_are_those_of_the_sampled_law(engine, temperature):
    model, prompts = tiny_model(1), ((5, 6, 7), (100, 3))
    groups = sample(
        engine, [[11, 12, 13], [14, 15, 16]], Sampling(max_tokens=12, temperature=temperature), prompts=prompts
    )
    for prompt, group in zip(prompts, groups):
        for r in group:
            L, logp = len(r.tokens), law(model, prompt, r, temperature)
            assert (
                r.tokens.dtype == np.int32
                and r.logp_inf.dtype == np.float32
                and r.topk_ids.shape == r.topk_logp.shape == (L, 20)
            )
            assert (
                np.abs(
                    logp.gather(1, torch.from_numpy(r.tokens.astype(np.int64))[:, None])[:, 0].numpy() - r.logp_inf
                ).max()
                < 1e-4
            )
            best, ids = logp.topk(20)
            assert np.abs(best.numpy() - r.topk_logp).max() < 1e-4
            assert (
                np.abs(logp.gather(1, torch.from_numpy(r.topk_ids.astype(np.int64))).numpy() - r.topk_logp).max() < 1e-4
            )
            assert (
                (r.finish_reason == "stop") == (r.tokens[-1] == 1)
                and (L == 12 or r.tokens[-1] == 1)
                and 1 not in r.tokens[:-1]
            )
    assert len({tuple(r.tokens) for g in groups for r in g}) > 3


def test_a_sample_depends_on_its_seed_and_not_on_its_batch(engine):
    together = sample(engine, [[11, 12, 13], [14, 15, 16]])
    for group, prompt, seeds in zip(together, ((5, 6, 7), (100, 3)), ((11, 12, 13), (14, 15, 16))):
        for r, seed in zip(group, seeds):
            alone = sample(engine, [[seed]], prompts=(prompt,))[0][0]
            assert np.array_equal(alone.tokens, r.tokens) and np.abs(alone.logp_inf - r.logp_inf).max() < 1e-5
    again = sample(engine, [[11, 12, 13], [14, 15, 16]])
    assert all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logp_inf, b.logp_inf)
        for g, h in zip(together, again)
        for a, b in zip(g, h)
    )
    assert any(
        not np.array_equal(a.tokens, b.tokens) for a, b in zip(sample(engine, [[21, 22], [23, 24]])[0], together[0])
    )


def test_samples_follow_the_law(engine):
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
    """Left padding and the dropping of finished rows against one request at a time, with many stop tokens."""
    engine = HFEngine(tiny_model(1))
    prompts = [(5,), (9, 8, 7, 6, 5, 4), (100, 3, 2), (4, 4)]
    seeds = [[10 * i + j for j in range(8)] for i in range(4)]
    run = lambda e, s, p: sample(e, s, Sampling(max_tokens=40), prompts=p, stop=range(30))
    groups = run(engine, seeds, prompts)
    lengths = [len(r.tokens) for g in groups for r in g]
    assert min(lengths) < 10 and len(set(lengths)) > 8
    for g, p, s in zip(groups, prompts, seeds):
        for r, seed in zip(g, s):
            alone = run(engine, [[seed]], (p,))[0][0]
            assert np.array_equal(r.tokens, alone.tokens) and (r.finish_reason == "stop") == (r.tokens[-1] < 30)
    small = HFEngine(tiny_model(1), batch_tokens=100)  # cut into batches: the same again
    assert all(
        np.array_equal(a.tokens, b.tokens) for g, h in zip(groups, run(small, seeds, prompts)) for a, b in zip(g, h)
    )


def test_uniforms_are_a_pure_function_of_key_and_position():
    u = uniforms(1000, "mask", 0, ("rank0", 0, 3), 2)
    assert np.array_equal(u[:10], uniforms(10, "mask", 0, ("rank0", 0, 3), 2)) and 0 <= u.min() and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.05 and not np.array_equal(u[:10], uniforms(10, "mask", 0, ("rank0", 0, 4), 2))
    groups = make_groups(4, seed=1)
    whole = batching.collate(groups, make_cfg())
    part = batching.collate(groups[2:], make_cfg())  # another rank, another place in the batch: the same draws
    assert torch.equal(whole.u[8:, : part.u.shape[1]][part.exists], part.u[part.exists])
    assert not torch.equal(whole.u, batching.collate(groups, make_cfg(seed=1)).u)
    assert len(set(whole.u[:, 0].tolist())) == len(whole)  # and each response has its own


def test_collate_by_hand():
    groups = make_groups(2, G=4, K=3, seed=5)
    b = batching.collate(groups, make_cfg(advantage="grpo_no_std"), version=7, now=2.0)
    row = 0
    for k, g in enumerate(groups):
        mean = np.mean([r.reward for r in g.responses])
        for r in g.responses:
            P, L = len(g.prompt_ids), len(r.tokens)
            assert b.ids[row].tolist() == [*g.prompt_ids, *r.tokens] + [0] * (b.ids.shape[1] - P - L)
            assert (
                b.group[row] == k
                and b.adv[row, 0] == pytest.approx(r.reward - mean, abs=1e-6)
                and b.staleness[row].tolist() == [7.0, 2.0]
            )
            assert b.mask[row, :L].tolist() == r.loss_mask.tolist() and not b.mask[row, L:].any()
            for t in range(L):
                in_top = int(r.tokens[t]) in r.topk_ids[t].tolist()
                assert torch.isinf(b.support_logp[row, t, 0]) == in_top and (
                    in_top or b.support_logp[row, t, 0] == r.logp_inf[t]
                )
                assert b.p_kth[row, t] == pytest.approx(np.exp(r.topk_logp[t, -1]))
            row += 1
    part = b.select([5, 2])
    assert part.tokens.shape[1] == int(part.length.max()) and torch.equal(
        part.tokens[0], b.tokens[5, : part.tokens.shape[1]]
    )
    again = checkpoint.unpack(checkpoint.pack(groups))
    assert all(
        torch.equal(getattr(batching.collate(again, make_cfg()), n), getattr(batching.collate(groups, make_cfg()), n))
        for n in ("ids", "support_logp", "u", "adv")
    )
    assert again[0].uid == groups[0].uid and again[0].sampling == groups[0].sampling


# -- sync ---------------------------------------------------------------------------------------------------------------


def test_publish_is_proved_and_a_wrong_engine_is_an_error(engine, folders):
    probe = Probe(str(folders / "actor"), PROBE_IDS)
    old, new = tiny_model(1), tiny_model(7)
    first = prove(engine, 3, old.state_dict().items(), probe)
    assert first.status == "first" and first.version == 3 and first.error < 1e-4
    second = prove(engine, 4, new.state_dict().items(), probe)
    assert second.status == "proved" and second.error < 1e-4 < second.distance / 4 and second.digest != first.digest
    same = prove(engine, 5, new.state_dict().items(), probe)
    assert same.status == "unproven" and same.digest == second.digest and same.distance == 0  # too close to tell
    r = sample(engine, [[1, 2]], prompts=((5, 6),))[0][0]
    assert (
        np.abs(
            law(new, (5, 6), r).gather(1, torch.from_numpy(r.tokens.astype(np.int64))[:, None])[:, 0].numpy()
            - r.logp_inf
        ).max()
        < 1e-4
    )

    load = engine.load
    try:
        engine.load = lambda tensors: [None for _ in tensors]  # consumes everything, keeps the old weights
        with pytest.raises(SyncError, match="version 6: the engine's log-probabilities differ by"):
            prove(engine, 6, old.state_dict().items(), probe)
        engine.load = lambda tensors: load(list(tensors)[1:-1])  # still hashes all of them: only the probe can tell
        prove_or_error(engine, old, probe)
        engine.load = lambda tensors: [next(iter(tensors))]  # stops after one tensor
        with pytest.raises(SyncError, match="consumed other bytes"):
            prove(engine, 8, old.state_dict().items(), probe)
    finally:
        engine.load = load
    assert prove(engine, 9, old.state_dict().items(), probe).error < 1e-4


def prove_or_error(engine, model, probe):
    """Dropping the first (embedding) and last tensor on the way in must be found out."""
    with pytest.raises(Exception):
        prove(engine, 7, model.state_dict().items(), probe)


def test_a_tied_head_left_out_is_found_out(folders):
    probe = Probe(str(folders / "actor"), PROBE_IDS)
    partial = {k: v for k, v in tiny_model(7).state_dict().items() if k != "lm_head.weight"}
    with pytest.raises(SyncError, match="1 tensors were not published, lm_head.weight among them"):
        prove(HFEngine(str(folders / "actor")), 1, partial.items(), probe)
    learner = Learner(tiny_model(7), None, make_cfg(), Comm())
    assert "lm_head.weight" in dict(learner.named_tensors("policy"))


def test_untied_models_publish_their_head(folders):
    probe, engine = Probe(str(folders / "untied"), PROBE_IDS), HFEngine(str(folders / "untied"))
    prove(engine, 0, tiny_model(2, tie=False).state_dict().items(), probe)
    assert prove(engine, 1, tiny_model(3, tie=False).state_dict().items(), probe).status == "proved"


def test_the_probe_runs_the_published_tensors_alone(folders):
    probe, a, b = Probe(str(folders / "actor"), PROBE_IDS), tiny_model(1), tiny_model(7)
    assert np.allclose(probe.logprobs(a.state_dict()), HFEngine(a).logprobs(np.array(PROBE_IDS)), atol=1e-6)
    assert np.abs(probe.logprobs(a.state_dict()) - probe.logprobs(b.state_dict())).max() > 0.1
    one = dict(a.state_dict())
    one["lm_head.weight"] = b.state_dict()["lm_head.weight"]  # a head that disagrees with its embedding shows
    assert np.abs(probe.logprobs(one) - probe.logprobs(a.state_dict())).max() > 0.1


def test_digest_sees_names_shapes_types_and_bytes():
    x = torch.arange(6, dtype=torch.float32)
    base = [("a", x), ("b", x + 1)]
    texts = set()
    for stream in (
        base,
        base[::-1],
        [("a", x), ("c", x + 1)],
        [("a", x.view(2, 3)), ("b", x + 1)],
        [("a", x.double()), ("b", x + 1)],
        [("a", x), ("b", x + 1 + 1e-6)],
        base[:1],
    ):
        d = Digest()
        assert [n for n, _ in d.watch(stream)] == [n for n, _ in stream]
        texts.add(d.text())
    assert len(texts) == 7


def test_new_weights_drop_cached_prefixes(vllm_engine, monkeypatch):
    """A cached block belongs to the old weights; on this CPU blocks are longer than the suite's context, so the call itself is watched."""
    calls = []
    monkeypatch.setattr(vllm_engine.llm, "reset_prefix_cache", lambda *a, **k: calls.append(1))
    vllm_engine.load(list(tiny_model(1).state_dict().items()))
    assert calls


def test_an_error_near_the_distance_is_unproven(folders, monkeypatch):
    """Weights that moved by less than four times the engine's error prove nothing, although they moved."""
    engine, probe, moved = HFEngine(str(folders / "actor")), Probe(str(folders / "actor"), PROBE_IDS), tiny_model(1)
    prove(engine, 0, tiny_model(1).state_dict().items(), probe)
    with torch.no_grad():
        moved.model.norm.weight.mul_(1 + 2e-5)
    logprobs = engine.logprobs
    monkeypatch.setattr(engine, "logprobs", lambda ids: logprobs(ids) + 5e-5)
    proof = prove(engine, 1, moved.state_dict().items(), probe)
    assert proof.status == "unproven" and 0 < proof.distance < 4 * proof.error


# -- the source -----------------------------------------------------------------------------------------------------------


def make_source(engine, folders, rank=0, world=1):
    return LocalSource(
        engine,
        Arithmetic(),
        arithmetic_tokenizer(),
        Sampling(max_tokens=10, seed=3),
        group_size=3,
        topk=5,
        model="actor",
        probe=Probe(str(folders / "actor"), PROBE_IDS),
        rank=rank,
        world=world,
    )


def test_source_hands_over_whole_groups_and_resumes_where_it_was(engine, folders):
    source = make_source(engine, folders)
    source.publish(2, tiny_model(1).state_dict().items())
    groups = source.next(2, 2) + source.next(1, 2)
    assert [g.uid for g in groups] == [("rank0", 0, i) for i in range(3)] and len({g.prompt_id for g in groups}) == 3
    assert all(
        len(g.responses) == 3 and g.version == 2 and len(g.digest) == 32 and g.model == "actor" and g.t_end >= g.t_start
        for g in groups
    )
    assert all(r.topk_ids.shape[1] == 5 and r.reward in (0.0, 1.0) for g in groups for r in g.responses)
    state = source.state_dict()
    next_groups = source.next(2, 2)
    fresh = make_source(engine, folders)
    fresh.load_state_dict(state)
    fresh.publish(2, tiny_model(1).state_dict().items())
    for a, b in zip(next_groups, fresh.next(2, 2)):
        assert (
            a.uid == b.uid
            and a.prompt_id == b.prompt_id
            and all(np.array_equal(x.tokens, y.tokens) for x, y in zip(a.responses, b.responses))
        )


def test_every_response_has_its_own_seed(folders, monkeypatch):
    engine, seen = HFEngine(str(folders / "actor")), []
    generate = engine.generate
    monkeypatch.setattr(
        engine,
        "generate",
        lambda prompts, seeds, *a: (seen.extend(s for g in seeds for s in g), generate(prompts, seeds, *a))[1],
    )
    for seed, rank in ((3, 0), (4, 0), (3, 1)):
        source = make_source(engine, folders, rank, 2)
        source.sampling = Sampling(max_tokens=4, seed=seed)
        source.next(2, 0)
    assert len(seen) == len(set(seen)) == 18


def test_flags_reach_the_engines(folders, monkeypatch):

    cfg = make_cfg(logprobs_mode="raw", lm_head_fp32=True, rollout_quant="int8", rollout_memory=0.5, seed=9)
    plain = make_engine(cfg, str(folders / "actor"), 64, 5)
    assert plain.raw and plain.head_fp32 and plain.fmt.name == "int8" and plain.packed and plain.dtype == "float32"
    monkeypatch.setattr(engines, "VLLMEngine", lambda folder, **settings: (folder, settings))
    folder, settings = make_engine(replace(cfg, rollout="vllm", rollout_dtype="bfloat16"), "f", 64, 5)
    assert folder == "f" and settings == dict(
        max_len=64,
        max_logprobs=5,
        dtype="bfloat16",
        seed=9,
        memory_gib=0.5,
        logprobs_mode="raw",
        head_fp32=True,
        fmt=plain.fmt,
    )


def test_two_ranks_sample_what_one_would(folders):
    """Uids, prompts, samples and so mask uniforms belong to the problem's number, not to the rank that took it."""
    engine = HFEngine(str(folders / "actor"))
    one = make_source(engine, folders).next(4, 0)
    two = [make_source(engine, folders, rank, 2).next(2, 0) for rank in (0, 1)]
    for i, a in enumerate(one):
        b = two[i % 2][i // 2]
        assert (
            a.uid == b.uid
            and a.prompt_id == b.prompt_id
            and all(np.array_equal(x.tokens, y.tokens) for x, y in zip(a.responses, b.responses))
        )


def test_only_finished_responses_are_rewarded():
    from rollout import Response
    from tasks import grade_all

    task, tok = Arithmetic(), arithmetic_tokenizer()
    p = task.problem("train", 0)
    ids = np.array(tok.encode("# " + p.answer), np.int32)
    group = [Response(ids, np.ones(len(ids), bool), None, None, None, why) for why in ("stop", "length")]
    grade_all(task, tok, [p], [group])
    assert [r.reward for r in group] == [1.0, 0.0]


def test_ranks_share_out_the_problems(folders):
    engine, task = HFEngine(str(folders / "actor")), Arithmetic()
    ids = [[g.prompt_id for g in make_source(engine, folders, rank, 2).next(3, 0)] for rank in (0, 1)]
    assert [x for pair in zip(*ids) for x in pair] == [task.problem("train", i).id for i in range(6)]


def test_vllm_records_and_learner_agree(vllm_engine, folders):
    """The whole path: real vLLM records, collated, scored by the learner: the same law to float32 noise, Z = 1."""
    import obrs

    source = make_source(vllm_engine, folders)
    source.publish(0, tiny_model(1).state_dict().items())
    cfg = make_cfg(objective="jackpot", obrs_topk=5, group_size=3, train_batch=12, rollout_batch=12)
    learner = Learner(tiny_model(1), None, cfg, Comm())
    b = batching.collate(source.next(4, 0), cfg)
    stats = learner.score(b, Needs(s=True, tail=True))
    assert float((stats.logp - b.logp_inf)[b.mask].abs().max()) < 1e-4
    low, high = obrs.z_bracket(b.support_logp, stats.support_logp, 1.0, stats.tail)
    assert (low[b.mask] < 1).all() and (high[b.mask] > 1 - 1e-4).all()
