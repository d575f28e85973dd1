"""Non-finite log-probabilities, cut responses, counts over ranks: each affects only its response."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchrun
from conftest import make_cfg, make_groups, tiny_model
from test_train import flags, train_here  # noqa: F401  a fixture

import batching
import eval as evaluation
import objectives
from learner import Comm
from machinery.checkpoint import load_model, read_tokenizer
from machinery.flags import UserError
from machinery.run import read_metrics
from model.engines import HFEngine
from rollout import Response
from sampling import Sampling
from source import set_aside_if_poisoned
from tasks import EvalSet

INF, NAN = math.inf, math.nan


def response(logp, topk=((-1.0, -2.0),) * 3) -> Response:
    ids = np.zeros((3, 2), np.int32)
    return Response(np.arange(3, dtype=np.int32), np.ones(3, bool), np.float32(logp), ids, np.float32(topk), "stop")


@pytest.mark.parametrize(
    "logp, topk, poisoned",
    [
        ((-1, -2, -3), ((-1, -2),) * 3, False),
        ((-1, 1e-6, 0), ((1e-6, -2),) * 3, False),
        ((-1, -2, -3), ((-1, -INF),) * 3, False),  # truncation to one token
        ((-1, NAN, -3), ((-1, -2),) * 3, True),
        ((-1, -INF, -3), ((-1, -2),) * 3, True),
        ((INF, -2, -3), ((-1, -2),) * 3, True),
        ((-1, -2, 0.5), ((-1, -2),) * 3, True),
        ((-1, -2, -3), ((-1, -2), (NAN, -2), (-1, -2)), True),
        ((-1, -2, -3), ((-1, -2), (INF, -2), (-1, -2)), True),
    ],
)
def test_invalid_log_probabilities_poison_a_response(logp, topk, poisoned):
    r = response(logp, topk)
    assert set_aside_if_poisoned(r) is poisoned
    assert r.loss_mask.tolist() == [not poisoned] * 3
    assert np.isfinite(r.logp_inf).all() and not np.isnan(r.topk_logp).any()


@pytest.mark.parametrize("value", [NAN, -INF, INF, 0.5])
@pytest.mark.parametrize("objective", ["jackpot", "seq_mis"])
def test_one_poisoned_token_costs_one_response(
    solvers,
    tmp_path,
    train_here,  # noqa: F811
    monkeypatch,
    capsys,
    objective,
    value,  # noqa: F811
):
    """The first update equals an update without this response, and the user gets a warning."""
    generate = HFEngine.generate
    poison = [True]

    def wrapped(self, *args, **more):
        groups = generate(self, *args, **more)
        if len(groups[0]) == 1:  # a call of the weight check
            return groups
        r = groups[0][1]
        if poison[0] == "masked":
            r.loss_mask = np.zeros_like(r.loss_mask)
        elif poison[0]:
            r.logp_inf[0] = value
        poison[0] = False
        return groups

    monkeypatch.setattr(HFEngine, "generate", wrapped)
    common = dict(objective=objective, steps=2, eval_every=-1, actor="none", save_every=0)
    _, rows = train_here(flags(solvers, tmp_path / "poisoned", **common))
    assert "update 1: the engine gave a log-probability that is non-finite" in capsys.readouterr().err
    assert (rows[1]["poisoned"], rows[-1]["skipped_steps"]) == (1, 0)
    poison[0] = "masked"
    _, masked = train_here(flags(solvers, tmp_path / "masked", **common))
    same = ("loss", "grad_norm", "rollout_corr/kl", "reward")
    assert [rows[1][name] for name in same] == [masked[1][name] for name in same]
    assert rows[1]["grad_norm"] > 0


def test_an_engine_without_finite_values_ends_the_run(solvers, tmp_path, train_here, monkeypatch):  # noqa: F811
    generate = HFEngine.generate

    def wrapped(self, *args, **more):
        groups = generate(self, *args, **more)
        for group in groups:
            for r in group:
                r.logp_inf[-1] = NAN
        return groups

    monkeypatch.setattr(HFEngine, "generate", wrapped)
    with pytest.raises(UserError, match="of the first 32 responses 32 have log-probabilities from the engine that are"):
        train_here(flags(solvers, tmp_path / "run", objective="tis", actor="none", eval_every=-1))


def test_a_weight_that_is_not_finite_is_named(solvers, tmp_path, train_here):  # noqa: F811
    model = load_model(str(solvers / "policy"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = NAN
    model.save_pretrained(tmp_path / "nan")
    read_tokenizer(solvers / "policy").save_pretrained(tmp_path / "nan")
    argv = flags(solvers, tmp_path / "run", objective="tis", model=tmp_path / "nan", actor="none")
    with pytest.raises(UserError, match=r"weight policy\.model\.layers\.1\.mlp\.up_proj\.weight is not finite: copy"):
        train_here(argv)


# ---------------------------------------------------------------------------------------------------------------------
# Cut responses
# ---------------------------------------------------------------------------------------------------------------------


def test_cut_responses_are_excluded_from_loss_and_denominator():
    """--mask_cut: statistics equal those of a batch without the tokens of cut responses; advantages are unchanged."""
    groups = make_groups(3, 4)
    for g, group in enumerate(groups):
        for i, r in enumerate(group.responses):
            r.finish_reason = "length" if (i + g) % 3 == 0 else "stop"
    plain, masking = make_cfg(objective="grpo"), make_cfg(objective="grpo", mask_cut=True)
    whole, part = batching.collate(groups, plain), batching.collate(groups, masking)
    kept = [r for group in groups for r in group.responses if r.finish_reason == "stop"]
    assert 0 < len(kept) < len(whole)
    assert torch.equal(part.mask, whole.mask & ~whole.cut[:, None])
    assert torch.equal(part.adv, whole.adv) and torch.equal(part.reward, whole.reward)
    stats = objectives.prepare(part, Comm(), masking, {})
    assert (stats.tokens, stats.sequences) == (sum(int(r.loss_mask.sum()) for r in kept), len(kept))
    for reduction in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        cfg = replace(masking, reduction=reduction)
        ones = part.mask.double()
        per = {"token-mean": 1.0, "seq-mean-token-mean": 1.0}.get(reduction)
        want = per or sum(int(r.loss_mask.sum()) for r in kept) / cfg.max_tokens / len(kept)
        assert float(objectives.reduce(ones, part.mask, stats, cfg)) == pytest.approx(want)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks
# ---------------------------------------------------------------------------------------------------------------------


def test_failures_of_every_rank_are_counted(solvers, tmp_path):
    """The same groups on one rank and on two: the same number of failures."""
    rows = [{"problem": f"{i} + 1 :", "answer": str(i + 1), "n": i} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = "def odd(row, text, finish_reason):\n    return len(text) / (row['n'] % 2)\n"
    (tmp_path / "own.py").write_text(reward.replace("(row['n'] % 2)", "(row['n'] % 2 or row['n'] == 0)"))
    counts = {}
    for ranks in (1, 2):
        out = tmp_path / f"run{ranks}"
        argv = flags(solvers, out, objective="grpo", actor="none", steps=1, eval_every=-1, save_every=0, arith="")
        argv = [word for word in argv if not word.startswith(("--task=", "--arith="))]
        argv += [f"--task={tmp_path}/rows.jsonl", f"--reward={tmp_path}/own.py:odd"]
        torchrun.torchrun("../train.py", *argv, ranks=ranks)
        (row,) = [row for row in read_metrics(out) if row["step"] == 0]
        counts[ranks] = row["grade/failures"]
        assert row["grade_s"] > 0
    assert counts[1] == counts[2] > 0


# ---------------------------------------------------------------------------------------------------------------------
# Greedy evaluation
# ---------------------------------------------------------------------------------------------------------------------


def test_temperature_0_samples_the_most_likely_token():
    """Against an argmax over the logits, token by token."""
    one = EvalSet(task=None, label="x", samples=1, temperature=0.0, max_tokens=6)
    sampling = evaluation.drawn_as(one, Sampling(top_p=0.9, max_tokens=99))
    model = tiny_model(1)
    prompts = [np.arange(5, 5 + n, dtype=np.int32) for n in (3, 6, 4, 8)]
    groups = HFEngine(model).generate(prompts, [[1], [2], [3], [4]], sampling, 0, [10**6])
    for prompt, (r,) in zip(prompts, groups, strict=True):
        ids = torch.tensor(prompt.tolist())
        for _ in range(6):
            ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
        assert r.tokens.tolist() == ids[len(prompt) :].tolist()


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--temperature=0.001"], "--temperature=0.001: must be at least 0.01"),
        (["--task=TASK:temperature=0.001"], "temperature=0.001 must be 0, or at least 0.01"),
    ],
)
def test_bad_temperatures_are_refused(solvers, tmp_path, argv, sentence):
    (tmp_path / "rows.jsonl").write_text('{"problem": "1 + 1 :", "answer": "2"}\n')
    flags = [word.replace("TASK", str(tmp_path / "rows.jsonl")) for word in argv]
    task = [] if any("--task" in word for word in argv) else [f"--task={tmp_path}/rows.jsonl"]
    with pytest.raises(UserError, match=sentence):
        evaluation.main([f"--model={solvers}/policy", "--rollout=hf", "--max_tokens=8", *task, *flags])
    task = [f"--task={tmp_path}/rows.jsonl"]
    done = evaluation.main([f"--model={solvers}/policy", "--rollout=hf", "--max_tokens=8", *task, "--temperature=0"])
    assert (done["problems"], done["samples"], Path(done["model"]).name) == (1, 1, "policy")
