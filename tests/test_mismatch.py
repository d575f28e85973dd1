"""The probe: its numbers by hand, its verdicts in known cases, the command on real models."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_cfg

import probe
import probe.__main__ as probe_command
from machinery import warmstart
from model import FLOOR
from model.engines import HFEngine
from probe import floor, gaps, page, verdicts
from sampling import Sampling


def judged(log_r, kl=0.0, floor=()) -> dict:
    """The verdicts by correction. log_r (B, T): every response has T tokens."""
    log_r = np.asarray(log_r, float)
    length = np.full(len(log_r), log_r.shape[1])
    evidence = verdicts.Evidence.of(log_r, length, kl, make_cfg().log_ratio_clamp)
    return {row["correction"]: row for row in verdicts.judged(evidence, floor)}


def viable(rows: dict) -> dict:
    return {name: row["viable"] for name, row in rows.items()}


def test_ess_and_prefixes_by_hand():
    assert gaps.ess([1, 1, 1, 1]) == 1
    assert gaps.ess([1, 0, 0, 0]) == 0.25
    assert gaps.ess([3, 1]) == pytest.approx(16 / 20)
    assert gaps.ess([0, 0]) == 0
    log_r = np.array([[math.log(3), -math.log(3), 0, 0], [0, 0, 0, 0], [0, -30, 0, 0]])
    rows = {r["tokens"]: r for r in gaps.by_prefix(log_r, np.array([4, 4, 2]), 20.0)}
    assert rows[1]["ess"] == pytest.approx(25 / 3 / 11) and rows[1]["responses"] == 3
    assert rows[2]["ess"] == pytest.approx(2 / 3)
    assert rows[2]["clamped"] == rows[2]["low_weight"] == pytest.approx(1 / 3)
    assert rows[4]["responses"] == 2 and rows[4]["ess"] == 1.0


def test_lengths_by_hand():
    gap = np.array([[0.1, 0.3, 0], [0.2, 0, 0], [0.5, 0.5, 0.5]])
    log_r = np.array([[-0.1, -0.1, 0], [0, 0, 0], [-0.3, 0, 0]])
    rows = gaps.by_length(gap, np.array([2, 1, 3]), log_r)
    assert [(r["from"], r["to"], r["responses"]) for r in rows] == [(1, 1, 1), (2, 2, 1), (3, 3, 1)]
    assert [r["max_mismatch"] for r in rows] == [0.2, 0.3, 0.5]
    assert [r["mean_mismatch"] for r in rows] == pytest.approx([0.2, 0.2, 0.5])
    assert [r["kl"] for r in rows] == pytest.approx([0, 0.1, 0.1])


def test_distances_by_hand():
    """Two responses of one token and two; padding does not count."""
    p, q = np.array([[0.5, 0.9], [0.2, 0.4]]), np.array([[0.25, 0.1], [0.3, 0.4]])
    row = gaps.distances(np.log(p), np.log(q), np.array([1, 2]))
    assert row["max"] == pytest.approx((0.25 + 0.1) / 2)
    assert row["mean"] == pytest.approx((0.25 + 0.05) / 2) and row["dp"] == pytest.approx((0.25 + 0.1) / 3)
    assert row["kl"] == pytest.approx(((0.5 - 1 - math.log(0.5)) + (1.5 - 1 - math.log(1.5))) / 3)
    assert row["chi2"] == pytest.approx((0.25 + 0.25) / 3) and row["chi2_seq"] == pytest.approx((0.25 + 0.25) / 2)
    assert row["log_R"] == pytest.approx(math.log(2))
    assert row["rms"] == pytest.approx(math.sqrt((math.log(2) ** 2 + math.log(1.5) ** 2) / 3)) and row["tokens"] == 3
    assert row["k1"] == pytest.approx(abs(math.log(0.5) + math.log(1.5)) / 3)
    assert row["cut"] == 0
    worst = floor.largest([row, {**row, "kl": 2.0, "max": 0.0, "reward": 0.5}])
    assert worst["kl"] == 2 and worst["max"] == row["max"] and worst["reward"] == 0.5 and "name" not in worst


def test_distances_of_cut_tokens():
    """Tokens cut by only one side are counted; padding and tokens cut by both sides are not."""
    p, q = np.array([[-1.0, FLOOR, FLOOR, -2.0]]), np.array([[FLOOR, FLOOR, -1.0, FLOOR]])
    row = gaps.distances(p, q, np.array([3]))
    assert row["cut"] == pytest.approx(2 / 3) and row["ratio"] > 1e29


def test_the_floor_of_the_estimated_reward():
    """sum R reward / sum R, minus the mean reward: R is over unmasked tokens."""
    batch = SimpleNamespace(
        logp_ref=torch.log(torch.tensor([[0.5, 0.8], [0.4, 0.5], [0.2, 0.7]])),
        mask=torch.tensor([[True, True], [True, False], [True, False]]),
        reward=torch.tensor([1.0, 0.0, 0.3]),
        length=torch.tensor([2, 2, 1]),
    )
    again = torch.log(torch.tensor([[0.25, 0.4], [0.6, 0.1], [0.6, 0.1]]))  # R = 1/4, 3/2 and 3
    row = floor.learner_row("learner", batch, again, 20.0)
    assert row["ratio"] == pytest.approx((0.5 + 0.5 + 1.5 + 0.2 + 3 - 5) / 5)
    assert row["reward"] == pytest.approx(1.3 / 3 - (0.25 + 0.9) / 4.75) and row["name"] == "learner"


def test_the_floor_of_an_engine(folders):
    """Decoding and reading differ by rounding, much more in bfloat16 than in float32. A different batch gives the same
    values. With dropout there is noise everywhere, and equal draws soon give different tokens."""
    rows = {}
    for kind in ("float32", "bfloat16", "noisy"):
        engine = HFEngine(str(folders / "policy"), dtype="float32" if kind == "noisy" else kind)
        if kind == "noisy":
            engine.model.model.layers[0].self_attn.attention_dropout = 0.2
            engine.model.train()
        setup = SimpleNamespace(stop_ids=[1], vocabulary=256)
        prompts = [np.array(ids, np.int32) for ids in ([5, 7, 4, 11], [9, 6, 3], [12, 3], [7, 7, 8, 3, 5])]
        measured = floor.engine_rows(engine, prompts, Sampling(max_tokens=12, temperature=0.5, seed=2), setup, 20.0)
        rows[kind] = {row["name"]: row for row in measured}
    decode = {kind: row["engine, decode / prefill"] for kind, row in rows.items()}
    again = {kind: row["engine, in other batches"] for kind, row in rows.items()}
    assert 0 < decode["float32"]["max"] < 1e-5 < decode["bfloat16"]["max"] < 0.1
    assert again["float32"]["max"] < 1e-5 and decode["noisy"]["rms"] > 1e-3
    assert (again["float32"]["tokens"], decode["float32"]["tokens"]) == (3 * 11, 4 * 11)  # half of the prompts and one
    assert again["noisy"]["tokens"] < decode["noisy"]["tokens"]
    few, more = np.array([1, 2, 3]), np.array([1, 2, 4, 5])
    assert floor.common(few, more) == 2 and floor.common(few[:2], more) == 2


def test_the_control_by_hand():
    """Two prompts with full responses and one without: pieces of 2, long responses of 10."""
    long, short = np.zeros((3, 10)), np.zeros((15, 2))
    long[:, 1] = 0.1
    long[:, 9] = [0.4, 0.6, 0.9]
    short[0, 1] = 0.2
    short[3, 0] = 0.3
    short[5:10, 0] = 0.05
    lengths = np.full(15, 2)
    lengths[14] = 1  # the third prompt has a short response that ended early
    c = gaps.control(long, np.array([10, 10, 10]), short, lengths, 2)
    assert c["prompts"] == 2
    assert c["one_short"][0] == pytest.approx(0.125) and c["5_short"][0] == pytest.approx(0.175)
    assert c["long_beginning"][0] == pytest.approx(0.1) and c["long"] == pytest.approx([0.5, 0.1])
    assert gaps.control(long, np.array([10, 9, 9]), short, lengths, 2) is None


def test_verdicts_in_known_cases():
    rng = np.random.default_rng(0)
    assert all(viable(judged(np.zeros((50, 10)))).values())
    close = viable(judged(0.02 * rng.standard_normal((400, 20)) - 0.0002, kl=2e-4))
    assert [name for name, holds in close.items() if not holds] == ["geo_rs"]  # means of 20 tokens: +- 0.0045

    s = 0.3  # log-normal: chi2 = e^(s^2) - 1 a token, KL = s^2 / 2
    long = judged(s * rng.standard_normal((400, 200)) - s * s / 2, kl=s * s / 2)
    token_level = {"none": False, "tis": True, "jackpot": True, "geo_rs": False}
    response_level = ["seq_is", "seq_tis", "seq_tis, C = 1", "prefix_tis", "retrace_seq", "seq_mis"]
    assert viable(long) == {**token_level, **dict.fromkeys(response_level, False)}
    assert "200 x 0.045 = 9, and the clamp is 20" in long["seq_is"]["why"]
    assert "false" not in long["seq_is"]["why"]

    clamped = judged(np.full((50, 200), -0.5), kl=0.5)
    assert not clamped["seq_is"]["viable"] and not clamped["geo_rs"]["viable"]
    assert "ESS of the responses is 1.00 but misleading: the weights are clamped" in clamped["seq_is"]["why"]
    assert "ESS of min(R, 1) is 1.00 but misleading: the weights are clamped" in clamped["seq_tis, C = 1"]["why"]
    assert not clamped["seq_tis, C = 1"]["viable"] and not clamped["retrace_seq"]["viable"]

    # the mean of r is exactly 1, but every response is at the clamp
    one = np.log([0.85] * 199 + [200 - 199 * 0.85])
    fair = judged(np.tile(one, (50, 1)), kl=0.05)
    assert not any(fair[name]["viable"] for name in ("seq_is", "seq_mis", "seq_tis, C = 1"))
    assert fair["jackpot"]["viable"] and "mean of r" not in fair["seq_is"]["why"]

    far = judged(np.zeros((50, 200)), kl=0.15)  # nothing is clamped here, but T x KL = 30 predicts clamping
    assert not far["seq_is"]["viable"] and not far["seq_tis"]["viable"] and far["tis"]["viable"]

    cut = judged(np.full((50, 5), math.log(0.9)), kl=0.1)
    assert "mean of r is 0.900, not 1" in cut["tis"]["why"]
    assert not cut["tis"]["viable"] and not cut["jackpot"]["viable"]
    assert judged(np.zeros((50, 10)), kl=0.05)["none"]["viable"] is False


def test_rounding_alone_can_rule_out_a_correction():
    """The learner's rounding is as large as the engine's gap: 200 tokens of +-0.3. Empty responses do not count."""
    rng = np.random.default_rng(1)
    s = 0.3
    noise = s * rng.standard_normal((300, 200)) - s * s / 2
    logp = np.full((300, 200), -1.0)
    length = np.full(300, 200)
    length[7] = 0
    row = floor.compare("learner, 3 rows at once", logp, logp + noise, length, 20.0)
    assert {"seq_is", "prefix_tis", "retrace_seq", "seq_mis", "geo_rs", "none"} <= set(row["uneven"])
    assert not {"tis", "jackpot"} & set(row["uneven"])
    near = floor.compare("engine", logp, logp, length, 20.0)
    assert near["uneven"] == [] and near["kl"] == 0
    assert floor.compare("engine", logp, logp, 0 * length, 20.0)["uneven"] == []
    rows = judged(np.zeros((50, 10)), floor=[near, row])
    assert not rows["seq_is"]["viable"] and rows["tis"]["viable"] and "rounding" not in rows["tis"]["why"]
    assert rows["seq_is"]["why"].endswith("; rounding alone makes them uneven (learner, 3 rows at once)")
    assert page.ess_floor(3.0) == "0.25" and page.ess_floor(0.01) == "1 - 0.01"


def test_the_verdicts_on_capped_weights_by_hand():
    """Two responses of 3 and 1 tokens, r = 1/2, 2, 1/4 and 3."""
    log_r = np.log([[0.5, 2.0, 0.25], [3.0, 1.0, 1.0]])
    evidence = verdicts.Evidence.of(log_r, np.array([3, 1]), 0.1, 20.0)
    assert evidence.states.endswith("(88 % shared with the learner's)")  # states 1, 1/2, 1; and 1: 3.5 of 4
    rows = {row["correction"]: row["why"] for row in verdicts.judged(evidence, [])}
    assert "min(R, 1) is 0.74" in rows["seq_tis, C = 1"]  # 1/4, 1
    assert "min(R_t, 1) is 0.82" in rows["prefix_tis"]  # 1/2, 1, 1/4; 1
    assert "min(r_s, 1) min(R, 1) is 0.40" in rows["retrace_seq"]  # 1/8, 1/8, 1/32; 1


@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_the_command(kind, folders, vllm_engines, tmp_path, capsys, monkeypatch):
    """Equal weights: tiny gaps, all corrections viable. An actor samples: large gaps. Output as text, JSON and PNG."""
    policy, actor = str(folders / "untied"), str(folders / "actor")

    def shared(cfg, folder, *more):
        """The suite's vLLM engine with this folder's weights."""
        from transformers import AutoModelForCausalLM

        engine = vllm_engines()
        monkeypatch.setattr(type(engine), "close", lambda self: None)
        state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
        engine.load(state.items())
        return engine

    if kind == "vllm":
        monkeypatch.setattr(probe, "make_engine", shared)
    common = [f"--rollout={kind}", "--dtype=float32", "--problems=12", "--max_tokens=16"]
    common.append(f"--out={tmp_path / 'm.json'}")
    same = probe_command.main([f"--model={actor}", *common])
    assert same["mean_mismatch"] < 1e-5 and same["max_mismatch"] < 1e-4
    assert same["token_ess"] > 0.999
    assert all(row["viable"] for row in same["verdicts"])
    report = capsys.readouterr().out
    assert "are weights even at these lengths?" in report and "engine, decode / prefill" in report
    lines = {line.split()[0]: line for line in report.splitlines() if line}
    for name, floors in {"|p_inf": 2, "KL(inf": 2, "r": 1, "chi2": 2, "ESS": 2, "T_max": 1, "reward": 1}.items():
        assert lines[name].count("(floor ") == floors, lines[name]
    assert f"(floor {20 / max(row[k] for row in same['floor'] for k in ('k1', 'kl')):,.0f})" in lines["T_max"]
    worst = max(row["chi2_seq"] for row in same["floor"])
    assert f"a response (floor {worst:.1g})" in lines["chi2"]
    assert f"of the responses (floor 1 - {worst:.1g})" in lines["ESS"]
    under_prefixes = report.split("after tokens ")[1].split("\n\n")[0].splitlines()[-1]
    assert under_prefixes.startswith(f"the floor, whole responses {f'1 - {worst:.1g}':>9s}   log R at most ")
    assert f"{max(row['log_R'] for row in same['floor']):.1g} (" in under_prefixes
    assert len(same["floor"]) == 4 and {row["tokens"] for row in same["floor"][:2]} == {same["tokens"]}
    for row in same["floor"]:  # float32: equal up to rounding
        assert 0 <= row["mean"] <= row["max"] < 1e-4 and 0 <= row["kl"] < 1e-8
    assert (tmp_path / "m.png").stat().st_size > 20_000

    different = probe_command.main([f"--model={policy}", f"--actor={actor}", *common])
    assert json.loads((tmp_path / "m.json").read_text())["kl"] == different["kl"] > 0.3
    assert different["sampler"] == actor and different["model"] == policy
    assert 0.01 < different["mean_mismatch"] < different["max_mismatch"] < 1
    verdict = {row["correction"]: row["viable"] for row in different["verdicts"]}
    assert not verdict["none"] and not verdict["seq_is"]
    assert different["t_max"] == pytest.approx(20 / different["kl"])

    cut = [f"--model={actor}", "--top_p=0.8", "--top_k=8", *common]
    off = probe_command.main([*cut, "--keep_sampling_mask=off"])
    assert off["ratio_mean"] < 0.95 and "mean of r" in off["verdicts"][1]["why"]
    replay = probe_command.main(cut)
    assert replay["mean_mismatch"] < 1e-4


def test_the_probe_of_low_bits(folders, tmp_path):
    """A quantized engine differs from a learner in full precision, and agrees with an aligned learner."""
    model, out = f"--model={folders / 'actor'}", f"--out={tmp_path / 'm.json'}"
    sizes = ["--problems=12", "--max_tokens=16"]
    common = [model, out, *sizes, "--rollout=hf", "--dtype=float32", "--rollout_quant=int8"]
    plain = probe_command.main(common)
    aligned = probe_command.main([*common, "--learner_quant=aligned"])
    for key in ("mean_mismatch", "max_mismatch"):  # the table by length has the same gaps
        total = sum(row["responses"] * row[key] for row in plain["by_length"])
        assert total / plain["responses"] == pytest.approx(plain[key], rel=1e-3)
    assert aligned["mean_mismatch"] < plain["mean_mismatch"] / 10
    assert plain["engine"] == "hf float32 int8" and aligned["learner"] == "float32 aligned"


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--learner_quant=aligned"], "the rollouts are not quantized, so there is no format to align with"),
        (["--samples=1"], "--samples=1: must be at least 2, since the report compares responses"),
        (["--top_p=0"], r"--top_p=0.0: must be in \(0, 1\]"),
        (["--actor=/no/such"], "--actor=/no/such: no model there"),
        (["--temperature=0"], "--temperature=0.0: must be at least 0.01"),
        (["--logprobs_mode=raw", "--top_k=4"], "no kept sets to replay"),
        (["--task=arith:temperature=0.6"], "--task=arith:temperature=0.6: the report covers one set"),
    ],
)
def test_bad_calls(folders, argv, sentence):
    with pytest.raises(ValueError, match=sentence):
        common = [f"--model={folders / 'actor'}", "--max_tokens=8", "--dtype=float32"]
        probe_command.main([*common, "--rollout=hf", *argv])


def test_precisions_of_the_probe_and_its_engine(folders, tmp_path, monkeypatch, capsys):
    """A custom model needs --dtype; a run's models have the run's precision; --rollout_dtype takes precedence."""
    seen = []

    def watched(cfg, setup, actor, start):
        seen.append((cfg.dtype, cfg.rollout_dtype))
        return SimpleNamespace(as_dict=dict)

    monkeypatch.setattr(probe_command, "probe", watched)
    monkeypatch.setattr(warmstart, "base_model", lambda flag, name, cfg: str(folders / "policy"))
    common = ["--rollout=hf", "--max_tokens=8"]
    custom = [*common, f"--model={folders / 'policy'}"]
    with pytest.raises(
        ValueError, match="these flags have no default for a custom model; name them, for instance --dtype=bfloat16$"
    ):
        probe_command.main(custom)
    probe_command.main([*custom, "--dtype=bfloat16"])
    probe_command.main([*custom, "--dtype=bfloat16", "--rollout_dtype=float16"])
    probe_command.main([*common, "--model=base:policy", "--dtype=bfloat16"])
    probe_command.main([*common, "--model=base:policy"])
    shutil.copytree(folders / "policy", tmp_path / "run" / "policy")
    saved = {"dtype": "bfloat16", "rollout_dtype": "float16", "max_tokens": 8}
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": saved}))
    probe_command.main(["--rollout=hf", f"--model={tmp_path / 'run'}"])
    both = ("bfloat16", "float16")
    assert seen == [("bfloat16", "bfloat16"), both, ("bfloat16", "float32"), ("float32", "float32"), both]
