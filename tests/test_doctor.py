"""The doctor: planted causes are named, columns of different programs are read, numbers equal a loop's."""

import json
import math

import numpy as np
import pytest
from conftest import ROOT

from machinery.flags import UserError
from probe import doctor
from probe.__main__ import main

V, RESPONSES = 50, 60
rng = np.random.default_rng(7)
LOGITS = [2 * rng.normal(size=(n, V)) for n in rng.integers(24, 80, RESPONSES)]


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def sampled(sampler, trainer):
    """[(ids, log p of the sampler, log p of the trainer)] of tokens drawn from the sampler's distribution. sampler and
    trainer: functions of a response's logits."""
    draws = np.random.default_rng(0)
    rows = []
    for logits in LOGITS:
        inf, ref = log_softmax(sampler(logits)), log_softmax(trainer(logits))
        cumulative = np.exp(inf).cumsum(-1)
        ids = (cumulative < draws.random((len(logits), 1)) * cumulative[:, -1:]).sum(-1)
        place = np.arange(len(ids))
        rows.append((ids, inf[place, ids], ref[place, ids]))
    return rows


def plain(logits):
    return logits


def top_five(logits):
    return np.where(logits >= np.sort(logits, -1)[:, -5:-4], logits, -np.inf)


def noisy(size, where=np.ones):
    """Add noise of this size, times a function of the response's length."""
    noise = np.random.default_rng(3)
    return lambda logits: logits + size * where(len(logits))[:, None] * noise.normal(size=logits.shape)


SAME = sampled(plain, noisy(0.01))


def changed(change):
    """SAME with a changed column of the trainer: change(number, ids, ref)."""
    return [(ids, inf, change(i, ids, ref)) for i, (ids, inf, ref) in enumerate(SAME)]


def scored_wrongly(i, ids, ref):
    return ref if i % 10 else np.random.default_rng(i).normal(-9, 1, len(ref))


PLANTED = {
    "16-bit arithmetic": SAME,
    "another policy": sampled(plain, noisy(0.5)),
    "temperature": sampled(lambda x: x / 0.7, plain),
    "truncated sampling": sampled(top_five, plain),
    "raw log-probabilities": [
        (ids, log_softmax(LOGITS[i])[np.arange(len(ids)), ids], ref)
        for i, (ids, _, ref) in enumerate(sampled(top_five, top_five))
    ],
    "shifted by one token": changed(lambda i, ids, ref: np.roll(ref, 1)),
    "rows of a different response": changed(lambda i, ids, ref: SAME[(i + 1) % 60][2].repeat(4)[: len(ref)]),
    "some responses scored wrongly": changed(scored_wrongly),
    "another prompt": sampled(plain, noisy(1.0, lambda n: np.exp(-np.arange(n)) + 0.005)),
    "the end of responses": changed(lambda i, ids, ref: ref - 4 * (np.arange(len(ref)) == len(ref) - 1)),
    "one token": sampled(plain, lambda x: x - 5 * (np.arange(V) == 7)),
    "growth along the response": sampled(plain, noisy(0.5, lambda n: (np.arange(n) / n) ** 2)),
    "numbers that are not finite": changed(lambda i, ids, ref: np.where(ids == 3, np.nan, ref)),
    "equal columns": [(ids, inf, inf) for ids, inf, _ in SAME],
    "not recorded": [(ids, 0 * inf, ref) for ids, inf, ref in SAME],
    "no logarithms": [(ids, np.exp(inf), np.exp(ref)) for ids, inf, ref in SAME],
    "base of the logarithm": [(ids, inf / math.log(2), ref) for ids, inf, ref in SAME],
}


def dump(tmp_path, rows, names=("rollout_log_probs", "old_log_probs", "response_ids")):
    path = tmp_path / "dump.jsonl"
    columns = [dict(zip(names, (inf, ref, ids, *more), strict=True)) for ids, inf, ref, *more in rows]
    path.write_text("".join(json.dumps({name: x.tolist() for name, x in row.items()}) + "\n" for row in columns))
    return path


def test_planted_causes_are_named_first(tmp_path, capsys):
    assert {name for name, *_ in doctor.CAUSES} == set(PLANTED)
    for cause, rows in PLANTED.items():
        result = main([f"--rollouts={dump(tmp_path, rows)}"])
        assert result["causes"][0]["cause"] == cause, result["causes"]
        assert f"   {cause}: " in capsys.readouterr().out
    once = changed(lambda i, ids, ref: ref - 2.5 * ((i == 4) & (np.arange(len(ref)) == 9)))
    assert main([f"--rollouts={dump(tmp_path, once)}"])["causes"][0]["cause"] != "one token"


def test_numbers_by_hand(tmp_path):
    rows = PLANTED["another policy"]
    result = main([f"--rollouts={dump(tmp_path, rows)}", f"--out={tmp_path / 'r.json'}"])
    p, q = (np.exp(np.concatenate([row[side] for row in rows])) for side in (1, 2))
    r, R = q / p, np.exp([(ref - inf).sum() for _, inf, ref in rows])
    want = {"k3_kl": (r - 1 - np.log(r)).mean(), "k1_kl": -np.log(r).mean(), "ratio_mean": r.mean()}
    want |= {"token_ess": r.sum() ** 2 / len(r) / (r * r).sum(), "seq_ess": R.sum() ** 2 / len(R) / (R * R).sum()}
    gaps = [np.abs(np.exp(inf) - np.exp(ref)) for _, inf, ref in rows]
    largest = np.array([gap.max() for gap in gaps])
    want |= {"chi2_token": (r * r).mean() - 1, "chi2_seq": (R * R).mean() - 1, "above_half": (largest > 0.5).mean()}
    want |= {"mean_mismatch": np.mean([gap.mean() for gap in gaps]), "max_mismatch": largest.mean()}
    want |= {"tokens": len(r), "responses": RESPONSES, "largest_mismatch": largest.max()}
    want["t_half"] = math.log(0.5) / math.log(want["token_ess"])
    assert {name: result[name] for name in want} == pytest.approx(want)
    first = result["largest"][0]
    ids, inf, ref = (x[first["place"]] for x in rows[first["response"]])
    assert abs(first["p_sampler"] - first["p_trainer"]) == pytest.approx(np.abs(p - q).max())
    assert first["token"] == ids and first["p_sampler"] == pytest.approx(np.exp(inf))
    assert json.loads((tmp_path / "r.json").read_text())["kl"] == result["kl"]


NAMES = {  # columns of sampler, trainer, tokens
    "verl": ("rollout_log_probs", "old_log_probs", "responses"),
    "TRL": ("sampling_per_token_logps", "old_per_token_logps", "completion_ids"),
    "prime-rl": ("inference_logprobs", "trainer_logprobs", "token_ids"),
    "slime": ("rollout_log_probs", "log_probs", "tokens"),
    "this repository": ("logp_inf", "logp_ref", "tokens"),
}


@pytest.mark.parametrize("program", NAMES)
def test_columns_of_different_programs_are_known(tmp_path, program):
    read = doctor.read(str(dump(tmp_path, SAME[:9], NAMES[program])))
    got = [x[read.on] for x in (read.tokens, read.inf, read.ref)]
    assert np.array_equal(got, [np.concatenate(want) for want in zip(*SAME[:9], strict=True)])


def test_a_dump_of_trl():
    """One step of GRPOTrainer (TRL 1.16) with vLLM in float32: its tensors under its names, and the numbers it logs as
    sampling_logp_difference and importance_sampling_ratio."""
    path = ROOT / "tests" / "golden" / "trl.jsonl"
    dump = doctor.read(str(path))
    gaps, R = np.abs(dump.log_r[dump.on]), np.exp(np.where(dump.on, dump.log_r, 0).sum(1))
    assert (gaps.mean(), gaps.max()) == pytest.approx((0.00120791, 0.00465536), rel=1e-3)
    assert (R.min(), R.mean(), R.max()) == pytest.approx((0.98904693, 1.00098777, 1.01188076), rel=1e-5)
    result = main([f"--rollouts={path}"])
    assert result["tokens"] == 256 and result["causes"][0]["cause"] == "16-bit arithmetic"
    assert result["seq_ess"] == pytest.approx(R.sum() ** 2 / 16 / (R**2).sum())


def test_a_dump_of_verl():
    """SmolLM2 in bfloat16 sampled, float32 scored; saved as a DataProto of verl 0.9.1, whose log has the numbers as
    rollout_corr/*. No response has 17 tokens, so that a gap of the first tokens proves nothing."""
    path = ROOT / "tests" / "golden" / "verl.jsonl"
    dump, result = doctor.read(str(path)), main([f"--rollouts={path}"])
    assert (result["responses"], result["tokens"]) == (12, 121)
    assert (result["k1_kl"], result["k3_kl"]) == pytest.approx((0.0060356152, 0.0013445971), rel=1e-4)
    R = np.exp(np.where(dump.on, dump.log_r, 0).sum(1))
    assert (R.min(), R.mean(), R.max()) == pytest.approx((0.7406134605, 0.9500293732, 1.1940013170), rel=1e-5)
    r = np.exp(dump.log_r[dump.on])
    assert (r**2).mean() - 1 == pytest.approx(-0.006695986, abs=1e-6)
    assert [x["cause"] for x in result["causes"]] == ["16-bit arithmetic"]


def test_masks_prompts_and_named_columns(tmp_path):
    """Masked tokens do not count; neither do a prompt before the response and padding after it."""
    spoiled = []
    for ids, inf, ref in SAME:
        mask, tool = np.arange(len(ids)) % 3 > 0, np.arange(len(ids)) % 5 > 0
        masks = [np.pad(x.astype(int), (0, 2)) for x in (mask, tool)]
        spoiled.append((ids, np.where(mask & tool, inf, 55.0), np.concatenate([[-7.0] * 5, ref]), *masks))
    path = dump(tmp_path, spoiled, ("a", "b", "c", "d", "tool_mask"))
    result = main([f"--rollouts={path}", "--columns=sampler=a,trainer=b,tokens=c,mask=d"])
    assert result["causes"][0]["cause"] == "16-bit arithmetic" and "are ignored" in result["notes"][0]
    assert result["tokens"] == sum((mask * tool).sum() for *_, mask, tool in spoiled)


BAD = {  # a row, flags -> sentence
    ('{"x": [1]}', ""): "no column of the sampler's log-probabilities among x; name it with --columns=sampler=NAME",
    ('{"logp_inf": [1], "x": 2}', ""): "no column of the trainer's log-probabilities among logp_inf, x",
    ('{"logp_inf": 3, "logp_ref": [1]}', ""): "line 1: logp_inf is not a list of numbers",
    ('{"logp_inf": [-1], "logp_ref": [-1], "mask": [0]}', ""): "no token has a mask other than 0",
    ('{"a": [1]}', "--columns=sampler=z,trainer=a"): "line 1: no column z",
    ("[1, 2]", ""): "its rows are not objects with columns",
}


@pytest.mark.parametrize("text, flag", BAD)
def test_bad_dumps_are_refused_in_one_sentence(tmp_path, text, flag):
    path = tmp_path / "dump.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(UserError) as e:
        main([f"--rollouts={path}", *filter(None, [flag])])
    assert BAD[text, flag] in str(e.value)
