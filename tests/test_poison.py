"""Non-finite log-probabilities, cut responses, counts over ranks: each affects only its response."""

# ruff: noqa: F401, F811  train_here is a fixture

import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from conftest import make_cfg, make_groups, tiny_model
from test_train import flags, train_here

import batching
import eval as evaluation
import objectives
from machinery import checkpoint
from machinery.checkpoint.models import load_model, read_tokenizer
from machinery.flags import UserError
from machinery.ranks import Comm
from model.engines import HFEngine
from rollout import Response
from sampling import Sampling
from source import set_aside_if_poisoned
from tasks import EvalSet

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    "logp, topk, poisoned",
    [
        ((-1, -2, -3), ((-1, -2),) * 3, False),
        ((-1, 1e-6, 0), ((1e-6, -2),) * 3, False),
        ((-1, -2, -3), ((-1, -INF),) * 3, False),  # truncation to one token
        *((logp, ((-1, -2),) * 3, True) for logp in ((-1, NAN, -3), (-1, -INF, -3), (INF, -2, -3), (-1, -2, 0.5))),
        ((-1, -500, -2), ((-1, -2),) * 3, True),
        ((-1, -2, -3), ((-1, -2), (NAN, -2), (-1, -2)), True),
        ((-1, -2, -3), ((-1, -2), (INF, -2), (-1, -2)), True),
    ],
)
def test_invalid_log_probabilities_poison_a_response(logp, topk, poisoned):
    ids = np.zeros((3, 2), np.int32)
    r = Response(np.arange(3, dtype=np.int32), np.ones(3, bool), np.float32(logp), ids, np.float32(topk), "stop")
    assert set_aside_if_poisoned(r) is poisoned
    assert r.loss_mask.tolist() == [not poisoned] * 3
    assert np.isfinite(r.logp_inf).all() and not np.isnan(r.topk_logp).any()


def spoil_rollouts(monkeypatch, spoil) -> None:
    """spoil(groups) after each call of the plain engine's `generate`, except the calls of the weight check."""
    generate = HFEngine.generate

    def wrapped(self, *args, **more):
        groups = generate(self, *args, **more)
        if len(groups[0]) > 1:
            spoil(groups)
        return groups

    monkeypatch.setattr(HFEngine, "generate", wrapped)


@pytest.mark.parametrize("objective, value", [("jackpot", NAN), ("seq_mis", INF)])
def test_one_poisoned_token_costs_one_response(solvers, tmp_path, train_here, monkeypatch, capsys, objective, value):
    """The first update equals an update without this response, and the user gets a warning."""
    rows = {}
    for how in ("poisoned", "masked"):

        def spoil(groups, how=how):
            if how == "masked":
                groups[0][1].loss_mask[:] = False
            else:
                groups[0][1].logp_inf[0] = value

        with monkeypatch.context() as patch:
            spoil_rollouts(patch, spoil)
            once = dict(objective=objective, steps=1, eval_every=-1, actor="none", save_every=0)
            argv = flags(solvers, tmp_path / how, **once)
            (rows[how],) = [row for row in train_here(argv)[1] if row["step"] == 0]
        warned = "update 1: the engine gave a log-probability that is non-finite" in capsys.readouterr().err
        assert warned == (how == "poisoned")
    assert (rows["poisoned"]["poisoned"], rows["poisoned"]["skipped_steps"]) == (1, 0)
    for name in ("loss", "grad_norm", "rollout_corr/kl", "reward"):
        assert rows["poisoned"][name] == rows["masked"][name]
    assert rows["poisoned"]["grad_norm"] > 0


@pytest.mark.parametrize("rollout, value", [(1, NAN), (1, -500.0), (2, -1e30)])
def test_an_engine_without_valid_values_ends_the_run(solvers, tmp_path, train_here, monkeypatch, rollout, value):
    """In the first rollout, or a later one."""
    rollouts = []

    def spoil(groups):
        rollouts.append(1)
        for r in chain.from_iterable(groups if len(rollouts) >= rollout else []):
            r.logp_inf[-1] = value

    spoil_rollouts(monkeypatch, spoil)
    with pytest.raises(UserError, match="of 32 responses 32 have log-probabilities from the engine"):
        train_here(flags(solvers, tmp_path / "run", objective="tis", actor="none", eval_every=-1))


# -- Cut responses -----------------------------------------------------------------------------------------------------


def test_cut_responses_are_excluded_from_loss_and_denominator():
    """--mask_cut: statistics equal those of a batch without the tokens of cut responses; advantages are unchanged."""
    groups = make_groups(3, 4)
    responses = [r for group in groups for r in group.responses]
    for i, r in enumerate(responses):
        r.finish_reason = "length" if i % 3 == 0 else "stop"
    plain, masking = make_cfg(objective="grpo"), make_cfg(objective="grpo", mask_cut=True)
    whole, part = batching.collate(groups, plain), batching.collate(groups, masking)
    kept = [r for r in responses if r.finish_reason == "stop"]
    assert torch.equal(part.mask, whole.mask & ~whole.cut[:, None])
    assert torch.equal(part.adv, whole.adv) and torch.equal(part.reward, whole.reward)
    stats = objectives.prepare(part, Comm(), masking, {})
    assert (stats.tokens, stats.sequences) == (sum(int(r.loss_mask.sum()) for r in kept), len(kept))
    of_sums = stats.tokens / masking.max_tokens / len(kept)
    for reduction, want in (("token-mean", 1), ("seq-mean-token-mean", 1), ("seq-mean-token-sum-norm", of_sums)):
        loss = objectives.reduce(part.mask.double(), part.mask, stats, replace(masking, reduction=reduction))
        assert float(loss) == pytest.approx(want)


# -- Greedy evaluation -------------------------------------------------------------------------------------------------


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


def test_a_weight_that_is_not_finite_is_named(solvers, tmp_path, train_here):
    model = load_model(str(solvers / "policy"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = NAN
    model.save_pretrained(tmp_path / "nan")
    read_tokenizer(solvers / "policy").save_pretrained(tmp_path / "nan")
    argv = flags(solvers, tmp_path / "run", objective="tis", model=tmp_path / "nan", actor="none")
    with pytest.raises(UserError, match=r"weight policy\.model\.layers\.1\.mlp\.up_proj\.weight is not finite: copy"):
        train_here(argv)
    argv = ["--task=arith", "--rollout=hf", "--max_tokens=4", "--problems=2"]
    with pytest.raises(UserError, match="of 8 responses 8 have log-probabilities from the engine that are non-finite"):
        evaluation.main([*argv, f"--model={tmp_path / 'nan'}"])


def test_an_evaluation_may_be_greedy(solvers, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"problem": "1 + 1 :", "answer": "2"}\n')
    argv = [f"--model={solvers}/policy", "--rollout=hf", "--max_tokens=8", f"--task={tmp_path}/rows.jsonl"]
    assert evaluation.main([*argv, "--temperature=0"])["samples"] == 1
    with pytest.raises(UserError, match="temperature=0.001 must be 0, or from 0.01 to 2"):
        evaluation.main([*argv[:3], f"{argv[3]}:temperature=0.001"])
