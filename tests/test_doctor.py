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
LENGTHS = rng.integers(24, 80, RESPONSES)
LOGITS = [2 * rng.normal(size=(n, V)) for n in LENGTHS]


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def top(logits, k):
    """Logits with all but the k largest at -inf."""
    edge = np.sort(logits, -1)[:, -k : -k + 1 or None]
    return np.where(logits >= edge, logits, -np.inf)


def sampled(sampler, trainer, seed=0):
    """[(ids, log p of the sampler, log p of the trainer)] of tokens drawn from the sampler's distribution. sampler and
    trainer: functions of (number of the response, its logits)."""
    draws = np.random.default_rng(seed)
    rows = []
    for i, logits in enumerate(LOGITS):
        inf, ref = log_softmax(sampler(i, logits)), log_softmax(trainer(i, logits))
        cumulative = np.exp(inf).cumsum(-1)
        ids = (cumulative < draws.random((len(logits), 1)) * cumulative[:, -1:]).sum(-1)
        place = np.arange(len(ids))
        rows.append((ids, inf[place, ids], ref[place, ids]))
    return rows


def plain(_, logits):
    return logits


def noisy(size, where=lambda n: np.ones(n)):
    noise = np.random.default_rng(3)
    return lambda _, logits: logits + size * where(len(logits))[:, None] * noise.normal(size=logits.shape)


def suppressed(_, logits):
    out = logits.copy()
    out[:, 7] -= 5
    return out


def changed(rows, change):
    """The rows with a changed column of the trainer: change(number, ids, inf, ref)."""
    return [(ids, inf, change(i, ids, inf, ref)) for i, (ids, inf, ref) in enumerate(rows)]


SAME = sampled(plain, noisy(0.01))


def last_masked(i, ids, inf, ref):
    return np.concatenate([ref[:-1], ref[-1:] - 4])


def broken_row(i, ids, inf, ref):
    return np.full(len(ref), -9.0) + np.random.default_rng(i).normal(size=len(ref)) if i % 10 == 0 else ref


PLANTED = {
    "16-bit arithmetic": SAME,
    "another policy": sampled(plain, noisy(0.5)),
    "temperature": sampled(lambda i, x: x / 0.7, plain),
    "truncated sampling": sampled(lambda i, x: top(x, 5), plain),
    "raw log-probabilities": [
        (ids, log_softmax(LOGITS[i])[np.arange(len(ids)), ids], ref)
        for i, (ids, _, ref) in enumerate(sampled(lambda i, x: top(x, 5), lambda i, x: top(x, 5)))
    ],
    "shifted by one token": changed(SAME, lambda i, ids, inf, ref: np.roll(ref, 1)),
    "rows of a different response": changed(SAME, lambda i, ids, inf, ref: SAME[(i + 1) % 60][2].repeat(4)[: len(ref)]),
    "some responses scored wrongly": changed(SAME, broken_row),
    "another prompt": sampled(plain, noisy(1.0, lambda n: np.exp(-np.arange(n)) + 0.005)),
    "the end of responses": changed(SAME, last_masked),
    "one token": sampled(plain, suppressed),
    "growth along the response": sampled(plain, noisy(0.5, lambda n: (np.arange(n) / n) ** 2)),
    "numbers that are not finite": changed(SAME, lambda i, ids, inf, ref: np.where(ids == 3, np.nan, ref)),
    "not recorded": [(ids, 0 * inf, ref) for ids, inf, ref in SAME],
    "no logarithms": [(ids, np.exp(inf), np.exp(ref)) for ids, inf, ref in SAME],
    "base of the logarithm": [(ids, inf / math.log(2), ref) for ids, inf, ref in SAME],
}


def dump(tmp_path, rows, names=("rollout_log_probs", "old_log_probs", "response_ids"), **more):
    path = tmp_path / "dump.jsonl"
    lines = []
    for i, (ids, inf, ref) in enumerate(rows):
        row = {names[0]: inf.tolist(), names[1]: ref.tolist(), names[2]: ids.tolist()}
        lines.append(json.dumps({**row, **{name: x[i] for name, x in more.items()}}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_named_first(tmp_path, cause, capsys):
    result = main([f"--rollouts={dump(tmp_path, PLANTED[cause])}"])
    assert result["causes"][0]["cause"] == cause, result["causes"]
    assert f"   {cause}: " in capsys.readouterr().out


def test_every_cause_is_planted():
    assert {name for name, *_ in (*doctor.BROKEN, *doctor.CAUSES)} == set(PLANTED)


def test_numbers_against_a_loop(tmp_path, capsys):
    rows = PLANTED["another policy"]
    result = main([f"--rollouts={dump(tmp_path, rows)}", f"--out={tmp_path / 'r.json'}"])
    log_r = [ref - inf for _, inf, ref in rows]
    every = [x for row in log_r for x in row.tolist()]
    n = len(every)
    assert result["tokens"] == n and result["responses"] == RESPONSES
    assert result["kl"] == pytest.approx(sum(math.exp(x) - 1 - x for x in every) / n)
    assert result["k1"] == pytest.approx(-sum(every) / n)
    assert result["ratio_mean"] == pytest.approx(sum(map(math.exp, every)) / n)
    r, R = [math.exp(x) for x in every], [math.exp(sum(row.tolist())) for row in log_r]
    assert result["token_ess"] == pytest.approx(sum(r) ** 2 / n / sum(x * x for x in r))
    assert result["seq_ess"] == pytest.approx(sum(R) ** 2 / len(R) / sum(x * x for x in R))
    gaps = [
        (abs(math.exp(a) - math.exp(b)), i, t)
        for i, (_, p, q) in enumerate(rows)
        for t, (a, b) in enumerate(zip(p, q, strict=True))
    ]
    top_gap, i, t = max(gaps)
    first = result["largest"][0]
    assert (first["response"], first["place"], first["token"]) == (i, t, int(rows[i][0][t]))
    assert abs(first["p_sampler"] - first["p_trainer"]) == pytest.approx(top_gap)
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["kl"] == result["kl"] and written["causes"] == result["causes"]
    assert "largest gaps" in capsys.readouterr().out


NAMES = [  # columns of sampler, trainer, tokens in each program
    ("rollout_log_probs", "old_log_probs", "responses"),  # verl
    ("sampling_per_token_logps", "old_per_token_logps", "completion_ids"),  # TRL
    ("inference_logprobs", "trainer_logprobs", "completion_ids"),  # prime-rl
    ("rollout_log_probs", "log_probs", "tokens"),  # slime
    ("logp_inf", "logp_ref", "tokens"),  # this repository
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0] + "-" + names[1])
def test_columns_of_different_programs_are_known(tmp_path, names):
    result = main([f"--rollouts={dump(tmp_path, SAME, names)}"])
    assert result["causes"][0]["cause"] == "16-bit arithmetic"


def test_a_dump_of_trl():
    """One step of GRPOTrainer (TRL 1.16) with vLLM in float32: its tensors under its names, and the numbers it logs as
    sampling_logp_difference and importance_sampling_ratio."""
    path = ROOT / "tests" / "golden" / "trl.jsonl"
    dump = doctor.read(str(path))
    gaps, R = np.abs(dump.flat(dump.log_r)), np.exp(np.where(dump.on, dump.log_r, 0).sum(1))
    assert (gaps.mean(), gaps.max()) == pytest.approx((0.00120791, 0.00465536), rel=1e-3)
    assert (R.min(), R.mean(), R.max()) == pytest.approx((0.98904693, 1.00098777, 1.01188076), rel=1e-5)
    result = main([f"--rollouts={path}"])
    assert result["tokens"] == 256 and result["causes"][0]["cause"] == "16-bit arithmetic"
    assert result["seq_ess"] == pytest.approx(R.sum() ** 2 / 16 / (R**2).sum())


def test_masks_prompts_and_named_columns(tmp_path):
    """Masked tokens do not count; a column that begins with the prompt is cut to its end."""
    masks = [(np.arange(len(ids)) % 3 > 0).astype(int).tolist() for ids, *_ in SAME]
    spoiled = [
        (ids, np.where(np.array(m) > 0, inf, 55.0), np.concatenate([[-7.0] * 5, ref]))
        for (ids, inf, ref), m in zip(SAME, masks, strict=True)
    ]
    path = dump(tmp_path, spoiled, ("a", "b", "c"), d=masks)
    result = main([f"--rollouts={path}", "--columns=sampler=a,trainer=b,tokens=c,mask=d"])
    assert result["causes"][0]["cause"] == "16-bit arithmetic" and "were used" in result["notes"][0]
    assert result["tokens"] == sum(map(sum, masks))


@pytest.mark.parametrize(
    "text, flags, sentence",
    [
        ('{"x": [1]}', [], "no column of the sampler's log-probabilities among x; name it with --columns=sampler=NAME"),
        ('{"logp_inf": [1], "x": 2}', [], "no column of the trainer's log-probabilities among logp_inf, x"),
        ('{"logp_inf": 3, "logp_ref": [1]}', [], "line 1: logp_inf is not a list of numbers"),
        ('{"logp_inf": ["a"], "logp_ref": [1]}', [], "line 1: logp_inf is not a list of numbers"),
        ('{"logp_inf": [-1], "logp_ref": [-1], "mask": [0]}', [], "no token has a mask other than 0"),
        ('{"a": [1]}', ["--columns=sample=a"], "--columns=sample=a: write KIND=NAME, separated by commas"),
        ('{"a": [1]}', ["--columns=sampler=z,trainer=a"], "line 1: no column z"),
        ("[1, 2]", [], "its rows are not objects with columns"),
    ],
)
def test_bad_dumps_are_refused_in_one_sentence(tmp_path, text, flags, sentence):
    path = tmp_path / "dump.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(UserError) as e:
        main([f"--rollouts={path}", *flags])
    assert sentence in str(e.value)
    with pytest.raises(UserError, match="--rollouts=.*nowhere.jsonl: no such file"):
        main([f"--rollouts={tmp_path / 'nowhere.jsonl'}"])
