"""The probe: its numbers by hand, its verdicts in known cases, the command on real models."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import probe
import probe.__main__ as probe_command
from machinery.flags import UserError
from model import FLOOR
from model.engines import HFEngine
from probe import floor, gaps, verdicts
from sampling import Sampling


def judged(log_r, kl=0.0, floor=()) -> dict:
    """The verdicts by correction. log_r (B, T): every response has T tokens."""
    log_r = np.asarray(log_r, float)
    length = np.full(len(log_r), log_r.shape[1])
    return {row["correction"]: row for row in verdicts.judged(log_r, length, kl, 20.0, floor)}


def test_tables_by_length_by_hand():
    for weights, share in (([1, 1, 1, 1], 1), ([1, 0, 0, 0], 0.25), ([3, 1], 16 / 20), ([0, 0], 0)):
        assert gaps.ess(weights) == pytest.approx(share)
    log_r = np.array([[math.log(3), -math.log(3), 0, 0], [0, 0, 0, 0], [0, -30, 0, 0]])
    rows = {r["tokens"]: r for r in gaps.by_prefix(log_r, np.array([4, 4, 2]), 20.0)}
    assert [rows[n]["ess"] for n in (1, 2, 4)] == pytest.approx([25 / 3 / 11, 2 / 3, 1.0])
    assert [rows[n]["responses"] for n in (1, 2, 4)] == [3, 3, 2]
    assert rows[2]["clamped"] == rows[2]["low_weight"] == pytest.approx(1 / 3)
    p, q = np.array([[0.5, 0.5, 9], [0.4, 9, 9], [0.8, 0.2, 0.4]]), np.array([[0.4, 0.2, 1], [0.2, 1, 1], [0.4] * 3])
    rows = gaps.by_length(np.log(p), np.log(q), np.array([2, 1, 3]))
    assert [(r["from"], r["to"], r["responses"]) for r in rows] == [(1, 1, 1), (2, 2, 1), (3, 3, 1)]
    assert [r["max"] for r in rows] == pytest.approx([0.2, 0.3, 0.4])
    assert [r["mean"] for r in rows] == pytest.approx([0.2, 0.2, 0.2])
    assert [r["k1"] for r in rows] == pytest.approx([math.log(2), math.log(1.25 * 2.5) / 2, 0])


def test_distances_by_hand():
    """Two responses of one token and two; padding does not count. Tokens cut by only one side are counted."""
    p, q = np.array([[0.5, 0.9], [0.2, 0.4]]), np.array([[0.25, 0.1], [0.3, 0.4]])
    row = gaps.distances(np.log(p), np.log(q), np.array([[True, False], [True, True]]))
    two, more = math.log(2), math.log(1.5)
    want = {"max": (0.25 + 0.1) / 2, "mean": (0.25 + 0.05) / 2, "dp": (0.25 + 0.1) / 3, "tokens": 3, "cut": 0}
    want |= {"kl": ((0.5 - 1 + two) + (1.5 - 1 - more)) / 3, "k1": (two - more) / 3, "ratio": 0}
    want |= {"chi2": (0.25 + 0.25) / 3, "chi2_seq": (0.25 + 0.25) / 2, "rms": math.sqrt((two**2 + more**2) / 3)}
    assert row == pytest.approx(want)
    worst = floor.largest([row, {**row, "kl": 2.0, "max": 0.0, "reward": 0.5}])
    assert worst["kl"] == 2 and worst["max"] == row["max"] and worst["reward"] == 0.5
    p, q = np.array([[-1.0, FLOOR, FLOOR, -2.0]]), np.array([[FLOOR, FLOOR, -1.0, FLOOR]])
    row = gaps.distances(p, q, np.array([[True, True, True, False]]))
    assert row["cut"] == pytest.approx(2 / 3) and row["ratio"] > 1e29


def test_the_error_of_k3_is_that_of_the_jackknife():
    """Short responses have larger gaps; two problems in three have two responses."""
    rng, length = np.random.default_rng(0), np.where(np.arange(64) % 2, 8, 200)
    problem = np.arange(64) * 2 // 3
    log_r = rng.normal(size=(64, 200)) * np.where(length == 8, 0.5, 0.05)[:, None]
    found = gaps.overview(np.zeros((64, 200)), log_r, length, 20.0, problem)
    sums = np.where(np.arange(200) < length[:, None], np.expm1(log_r) - log_r, 0).sum(1)
    sums, length = np.bincount(problem, sums), np.bincount(problem, length)
    without = (sums.sum() - sums) / (length.sum() - length)  # one problem
    assert found["kl_error"] == pytest.approx(without.std() * 42**0.5, rel=0.1)


def test_the_floor_of_the_estimated_reward():
    """sum R reward / sum R, minus the mean reward: R, as all distances, is over unmasked tokens."""
    batch = SimpleNamespace(
        logp_ref=torch.log(torch.tensor([[0.5, 0.8], [0.4, 0.5], [0.2, 0.7]])),
        mask=torch.tensor([[True, True], [False, True], [True, False]]),
        reward=torch.tensor([1.0, 0.0, 0.3]),
        length=torch.tensor([2, 2, 1]),
    )
    again = torch.log(torch.tensor([[0.25, 0.4], [0.6, 0.1], [0.6, 0.1]]))  # R = 1/4, 1/5 and 3
    row = floor.learner_row("learner", batch, again, 20.0)
    assert row["ratio"] == pytest.approx(0.05, 1e-4) and row["name"] == "learner"
    assert row["reward"] == pytest.approx(abs(1.3 / 3 - (0.25 + 0.9) / 3.45))


def test_the_floor_of_an_engine(folders):
    """Decoding and reading differ by rounding, much more in bfloat16 than in float32. A different batch gives the same
    values. With dropout there is noise everywhere, and equal draws soon give different tokens."""
    decode, again = {}, {}
    setup = SimpleNamespace(stop_ids=[1], vocabulary=256)
    prompts = [np.array(ids, np.int32) for ids in ([5, 7, 4, 11], [9, 6, 3], [12, 3], [7, 7, 8, 3, 5])]
    sampling = Sampling(max_tokens=12, temperature=0.5, seed=2)
    for kind in ("float32", "bfloat16", "noisy"):
        engine = HFEngine(str(folders / "policy"), dtype="float32" if kind == "noisy" else kind)
        if kind == "noisy":
            engine.model.model.layers[0].self_attn.attention_dropout = 0.2
            engine.model.train()
        decode[kind], again[kind] = floor.engine_rows(engine, prompts, sampling, setup, 20.0)
    assert 0 < decode["float32"]["max"] < 1e-5 < decode["bfloat16"]["max"] < 0.1
    assert again["float32"]["max"] < 1e-5 and decode["noisy"]["rms"] > 1e-3
    assert (again["float32"]["tokens"], decode["float32"]["tokens"]) == (3 * 11, 4 * 11)  # half of the prompts and one
    assert again["noisy"]["tokens"] < decode["noisy"]["tokens"]
    assert floor.common(np.array([1, 2, 3]), np.array([1, 2, 4, 5])) == 2


LONG = ["seq_is", "seq_tis", "seq_tis, C = 1", "prefix_tis", "retrace_seq", "seq_mis"]  # weights of long products


def test_verdicts_in_known_cases():
    rng = np.random.default_rng(0)

    def refused(rows) -> set:
        return {name for name, row in rows.items() if not row["viable"]}

    assert refused(judged(np.zeros((50, 10)), kl=0.05)) == {"none"}
    close = judged(0.02 * rng.standard_normal((400, 20)) - 0.0002, kl=2e-4)
    assert refused(close) == {"geo_rs"}  # means of 20 tokens: +- 0.0045
    s = 0.3  # log-normal: chi2 = e^(s^2) - 1 a token, KL = s^2 / 2
    long = judged(s * rng.standard_normal((400, 200)) - s * s / 2, kl=s * s / 2)
    assert refused(long) == {"none", "geo_rs", *LONG}
    assert "200 x 0.045 = 9, and the clamp is 20" in long["seq_is"]["why"]
    clamped = judged(np.full((50, 200), -0.5), kl=0.5)
    assert {"seq_is", "geo_rs", "seq_tis, C = 1", "retrace_seq"} <= refused(clamped)
    assert all("1.00 but misleading" in clamped[name]["why"] for name in ("seq_is", "seq_tis, C = 1"))
    # the mean of r is exactly 1, but every response is at the clamp
    one = np.log([0.85] * 199 + [200 - 199 * 0.85])
    fair = judged(np.tile(one, (50, 1)), kl=0.05)
    assert {"seq_is", "seq_mis", "seq_tis, C = 1"} <= refused(fair)
    assert fair["jackpot"]["viable"] and "mean of r" not in fair["seq_is"]["why"]
    far = judged(np.zeros((50, 200)), kl=0.15)  # nothing is clamped here, but T x KL = 30 predicts clamping
    assert {"seq_is", "seq_tis"} <= refused(far) and far["tis"]["viable"]
    assert {"tis", "jackpot"} <= refused(judged(np.full((50, 5), math.log(0.9)), kl=0.1))  # the mean of r is not 1


def test_rounding_alone_can_rule_out_a_correction():
    """The learner's rounding is as large as the engine's gap: 200 tokens of +-0.3. Empty responses do not count."""
    noise = 0.3 * np.random.default_rng(1).standard_normal((300, 200)) - 0.045
    logp, length = np.full((300, 200), -1.0), np.where(np.arange(300) == 7, 0, 200)
    row = floor.compare("learner, 3 rows at once", logp, logp + noise, length, 20.0)
    assert {"seq_is", "prefix_tis", "retrace_seq", "seq_mis", "geo_rs", "none"} <= set(row["uneven"])
    assert not {"tis", "jackpot"} & set(row["uneven"])
    near = floor.compare("engine", logp, logp, length, 20.0)
    assert near["uneven"] == [] and near["kl"] == 0
    rows = judged(np.zeros((50, 10)), floor=[near, row])
    assert not rows["seq_is"]["viable"] and rows["tis"]["viable"] and "rounding" not in rows["tis"]["why"]
    assert rows["seq_is"]["why"].endswith(
        "; rounding alone gives the weights a high variance (learner, 3 rows at once)"
    )


def test_the_verdicts_on_weights_by_hand():
    """Two responses of 3 and 1 tokens, r = 1/2, 2, 1/4 and 3."""
    log_r = np.log([[0.5, 2.0, 0.25], [3.0, 1.0, 1.0]])
    rows = {row["correction"]: row["why"] for row in verdicts.judged(log_r, np.array([3, 1]), 0.1, 20.0, [])}
    ess = {"tis": 0.68, "seq_tis, C = 1": 0.74, "prefix_tis": 0.82, "retrace_seq": 0.40, "geo_rs": 0}
    # min(r, 2): 1/2, 2, 1/4, 2. min(R, 1): 1/4, 1. min(R_t, 1): 1/2, 1, 1/4, 1. retrace_seq: 1/8, 1/8, 1/32, 1
    assert all(f"the ESS of its weights is {x:.2f}" in rows[name] for name, x in ess.items())
    assert "68.8 % of the tokens" in rows["jackpot"]  # min(r, 1): 1/2, 1, 1/4, 1
    assert "0 % are kept" in rows["geo_rs"] and "2 x 0.1 = 0.2" in rows["seq_is"]


@pytest.fixture
def probe_with(folders, vllm_engines, tmp_path, monkeypatch):
    """A function: the probe's report with these flags; its vLLM engine is the suite's."""

    def shared(cfg, folder, *more):
        engine = vllm_engines()
        monkeypatch.setattr(type(engine), "close", lambda self: None)
        return engine

    def measure(*flags, rollout="hf"):
        if rollout == "vllm":
            monkeypatch.setattr(probe, "make_engine", shared)
        sizes = ["--dtype=float32", "--problems=12", "--max_tokens=16", f"--out={tmp_path / 'm.json'}"]
        return probe_command.main([f"--model={folders / 'actor'}", f"--rollout={rollout}", *sizes, *flags])

    return measure


@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_the_command(kind, folders, probe_with, tmp_path, capsys):
    """Equal weights: tiny gaps, all corrections viable. An actor samples: large gaps. Output as text, JSON and PNG."""
    same = probe_with("--actor=none", rollout=kind)
    assert same["mean_mismatch"] < 1e-5 and same["max_mismatch"] < 1e-4 and same["token_ess"] > 0.999
    assert all(row["viable"] for row in same["verdicts"])
    worst = max(row["chi2_seq"] for row in same["floor"])
    assert f"chi2 of a response {same['chi2_seq']:38.4g}   floor {worst:.1g}" in capsys.readouterr().out
    assert len(same["floor"]) == 4 and {row["tokens"] for row in same["floor"][:2]} == {same["tokens"]}
    assert all(0 <= row["mean"] <= row["max"] < 1e-4 and 0 <= row["kl"] < 1e-8 for row in same["floor"])  # rounding
    assert (tmp_path / "m.png").stat().st_size > 20_000

    actor = str(folders / "actor")
    different = probe_with(f"--model={folders / 'untied'}", f"--actor={actor}", rollout=kind)
    assert json.loads((tmp_path / "m.json").read_text())["kl"] == different["kl"] > 0.3
    assert different["sampler"] == actor != different["model"]
    assert 0.01 < different["mean_mismatch"] < different["max_mismatch"] < 1
    assert {"none", "seq_is"} <= {row["correction"] for row in different["verdicts"] if not row["viable"]}
    assert different["t_max"] == pytest.approx(20 / different["kl"])

    off = probe_with("--top_p=0.8", "--top_k=8", "--keep_sampling_mask=off", rollout=kind)
    assert off["ratio_mean"] < 0.95 and "mean of r" in off["verdicts"][1]["why"]
    assert probe_with("--top_p=0.8", "--top_k=8", rollout=kind)["mean_mismatch"] < 1e-4


def test_bad_calls(probe_with):
    for flag, sentence in (("--task=arith:temperature=0.6", "covers one set"), ("--temperature=0", "0.01 and 2")):
        with pytest.raises(UserError, match=sentence):
            probe_with(flag)
