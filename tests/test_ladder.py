"""The ladder: shares by hand, rungs against the engines, and planted faults."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_cfg
from tools.ladder_faults import PLANTED, Planted, make_models, named

import batching
import probe
import probe.__main__ as probe_command
from probe import faults, ladder, page
from results import sweep
from rollout import Response, Rollout
from sampling import Sampling
from tasks.arith import arithmetic_tokenizer

FLOOR = [{"name": "x", "kl": 1e-9, "dp": 2e-9, "chi2_seq": 3e-9}]


@pytest.fixture(scope="module")
def models(folders, tmp_path_factory):
    return make_models(str(folders / "policy"), tmp_path_factory.mktemp("kinds"), arithmetic_tokenizer())


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Drawing takes as long as the rest of a small probe; test_a_different_model draws."""
    monkeypatch.setattr(probe, "draw_mismatch", lambda report, scored, path: path)
    monkeypatch.setattr(probe, "draw_ladder", lambda ladder, path: path)


def groups_and_batch(lengths, group_size: int):
    """Responses of these lengths, in groups and as a batch; only lengths and groups matter."""
    groups = []
    for g in range(0, len(lengths), group_size):
        responses = []
        for n in lengths[g : g + group_size]:
            none = np.zeros((n, 0), np.int32)
            responses.append(Response(np.full(n, 5, np.int32), np.ones(n, bool), np.zeros(n), none, none * 1.0, "stop"))
        groups.append(Rollout(("", 0, g), "", np.array([3], np.int32), Sampling(), 0, "", responses=responses))
    return groups, batching.collate(groups, make_cfg(group_size=group_size))


def test_shares_by_hand():
    """Loops over tokens, on ragged responses, with values in the padding that must not count."""
    lengths = [3, 1, 2, 4]
    logp = -1 - 0.3 * np.random.default_rng(0).random((4, 4, 4))
    logp[0, 3, :] -= 9  # the last response is beyond the clamp of 2, except on the first rung
    result = ladder.shares(["zero", "a", "b", "c"], logp, groups_and_batch(lengths, 2)[1], FLOOR, clamp=2.0)
    rungs = []
    for rung in logp:
        kl = dp = 0.0
        weights = []
        for zero, here, n in zip(logp[0], rung, lengths, strict=True):
            log_r = (zero - here)[:n]
            for x, a, b in zip(log_r, zero, here, strict=False):
                bounded = min(2.0, max(-2.0, x))
                kl += (np.exp(bounded) - 1 - x) / 10
                dp += abs(np.exp(a) - np.exp(b)) / 10
            weights.append(np.exp(min(2.0, max(-2.0, log_r.sum()))))
        rungs.append({"kl": kl, "dp": dp, "var": np.var(weights)})
    for name in rungs[0]:
        values = [rung[name] for rung in rungs]
        assert [row[name]["share"] for row in result["rows"]] == pytest.approx(np.diff(values))
        assert result["total"][name] == pytest.approx(values[-1]) and values[0] == 0
    assert [row["source"] for row in result["rows"]] == ["a", "b", "c"]
    assert result["floor"] == {"kl": 1e-9, "dp": 2e-9, "var": 3e-9}


def test_errors_are_over_prompts():
    """All responses of a prompt are equal: the error of a mean over P prompts is the error of P numbers, not of P G."""
    P, G = 30, 8
    x = np.repeat(np.random.default_rng(1).random(P), G)
    logp = np.stack([np.full((P * G, 1), -3.0), -3.0 + x[:, None]])
    result = ladder.shares(["zero", "a"], logp, groups_and_batch([1] * P * G, G)[1], FLOOR, 20.0)
    row = result["rows"][0]["dp"]
    gaps = (np.exp(-3 + x) - np.exp(-3))[::G]
    assert row["se"] == pytest.approx(gaps.std() / np.sqrt(P), rel=0.15)
    assert row["low"] < row["share"] < row["high"] == pytest.approx(row["low"] + 4 * row["se"], rel=0.15)
    text = page.ladder_text({"ladder": result | {"responses": P * G}, "responses": P * G})[1]
    assert f"{row['share']:.2g} [{row['low']:.1e}, {row['high']:.1e}]" in text and text.count("100 %") == 3


def test_as_many_prompts_as_fit():
    """Six responses of 4, 6, 3, 3, 5 and 2 tokens including a prompt of one token, two responses a prompt."""
    groups, batch = groups_and_batch([3, 5, 2, 2, 4, 1], 2)
    cases = [
        (23, 2, [0, 1, 2, 3, 4, 5]),
        (22, 2, [0, 1, 2, 3]),
        (1, 2, [0, 1, 2, 3]),
        (12, 1, [0, 2, 4]),
        (11, 1, [0, 2]),
    ]
    for tokens, most, rows in cases:
        chosen, part, of_rows = faults.within(groups, batch, tokens, most)
        assert of_rows == rows and part.length.tolist() == batch.length[rows].tolist()
        assert [len(r.tokens) for g in chosen for r in g.responses] == part.length.tolist()
        assert part.group.tolist() == batch.group[rows].tolist()


PROBE = ("--explain", "--rollout=hf", "--dtype=float32", "--rollout_dtype=float32")
HEAD, BODY, WEIGHTS, ACTIVATIONS = "head precision", "body precision", "weight rounding", "activation rounding"
CASES = [  # flags, sources
    ("--rollout_quant=int8 --temperature=0.7", [WEIGHTS, ACTIVATIONS]),
    ("--rollout_quant=w2a16 --learner_quant=int8 --quant_group=32", [WEIGHTS]),
    ("--top_p=0.8 --top_k=12 --temperature=1.2", []),
    ("--top_p=0.8 --keep_sampling_mask=off --rollout_quant=fp8", [WEIGHTS, ACTIVATIONS, "truncation"]),
    ("--min_p=0.1 --keep_sampling_mask=recompute --rollout_dtype=bfloat16 --lm_head_fp32=True", [BODY]),
    ("--temperature=0.6 --logprobs_mode=raw --dtype=bfloat16", [HEAD, BODY, "temperature"]),
]


def ladder_of(tmp_path, *flags) -> dict:
    """The probe's report, as written."""
    probe_command.main([*PROBE, "--problems=4", "--max_tokens=8", f"--out={tmp_path}/m.json", *flags])
    return json.loads((tmp_path / "m.json").read_text())


@pytest.mark.parametrize("flags, sources", CASES)
def test_the_last_rung_is_the_engine(flags, sources, folders, tmp_path):
    """The rung before the remainder equals the records to the last bit. The sources are the flags' differences."""
    result = ladder_of(tmp_path, f"--model={folders / 'policy'}", *flags.split())["ladder"]
    rows = {row["source"]: row for row in result["rows"]}
    assert list(rows) == ["batch shape", "decode path", *sources, "remainder"]
    assert result["suspects"] == []
    for measure, total in result["total"].items():
        assert sum(row[measure]["share"] for row in result["rows"]) == pytest.approx(total)
        assert abs(rows["remainder"][measure]["share"]) < 1e-12
    assert all(rows[source]["dp"]["share"] != 0 for source in sources)


def test_a_different_model_and_weight_age(folders, models, tmp_path, monkeypatch):
    monkeypatch.undo()
    for actor, source in ((str(folders / "actor"), "other model"), (models["old"], "weight age")):
        rows = ladder_of(tmp_path, f"--model={models['new']}", f"--actor={actor}")["ladder"]["rows"]
        assert [row["source"] for row in rows[2:]] == [source, "remainder"]
        assert rows[2]["kl"]["share"] > 100 * rows[0]["kl"]["share"]
    assert (tmp_path / "m-ladder.png").stat().st_size > 10_000


@pytest.mark.parametrize("planted", PLANTED, ids=[planted.name for planted in PLANTED])
def test_a_planted_fault_is_named(planted, models, tmp_path, monkeypatch):
    """Faults are tested one after the other, each on the true model: no test changes it."""
    suspects, kept = ladder.suspects, []

    def watched(case):
        before = case.logp()
        result = suspects(case)
        kept.append((before != 0).any() and np.array_equal(before, case.logp()))
        return result

    monkeypatch.setattr(ladder, "suspects", watched)
    first = named(planted, models, tmp_path, "--problems=8", "--max_tokens=12")[0]
    assert f"{first['fault']} {first['where']}".startswith(planted.name) and first["named"] and kept == [True]


def test_an_unknown_fault_is_not_named(models, tmp_path):
    half = Planted("half a layer", lambda engine: engine.model.model.layers[1].mlp.down_proj.weight.data.mul_(0.5))
    suspects = named(half, models, tmp_path, "--problems=8", "--max_tokens=12")
    assert suspects and not any(row["named"] for row in suspects)


def test_the_record_names_every_planted_fault_first():
    record = sweep.load("ladder")["faults"]
    assert [x["planted"] for x in record] == [planted.name for planted in PLANTED]
    for x in record:
        assert f"{x['suspects'][0]['fault']} {x['suspects'][0]['where']}".startswith(x["planted"])


def test_a_sampled_token_is_in_its_set():
    """The engine drew it, even if the rule on rounded logits leaves it out."""
    scorer = object.__new__(ladder.Scorer)
    recipe = dict(temperature=1.0, cut="rule")
    vars(scorer).update(recipe=SimpleNamespace(**recipe), sampling=Sampling(top_k=2))
    p = torch.tensor([[0.5, 0.3, 0.2]])
    found = scorer._logp(p.log(), torch.tensor([[2]]), 0, [])
    assert found.exp().item() == pytest.approx(0.2)  # with the two allowed tokens
