"""Evaluation: the estimator, the command, the bad calls."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import make_cfg, tiny_model

import eval as evaluation
from eval import mean_se, pass_at_k
from rollout import Response
from sampling import Sampling
from tasks import Arithmetic, arithmetic_tokenizer


def test_pass_at_k_is_the_mean_over_subsets():
    for n, c in ((5, 2), (4, 0), (4, 4), (6, 1)):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(right, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_at_k(4, 1, 1) == 0.25 and pass_at_k(4, 1, 4) == 1.0


def test_standard_error():
    mean, se = mean_se([1, 0, 0, 1])
    assert mean == 0.5 and se == pytest.approx(math.sqrt(1 / 3) / 2)


def test_the_command_on_a_folder_and_a_file(folders, tmp_path, capsys):
    out = tmp_path / "r.json"
    flags = ["--which=actor", "--problems=20", "--samples=3", "--k=1,3", f"--out={out}"]
    result = evaluation.main([f"--model={folders}", "--rollout=hf", "--max_tokens=8", *flags])
    assert json.loads(out.read_text()) == result
    assert result["mean@3"] == pytest.approx(result["pass@1"])
    assert result["pass@3"] >= result["pass@1"]
    assert 0 <= result["pass@1"] <= 1 and result["problems"] == 20
    assert "pass@3" in capsys.readouterr().out
    file = tmp_path / "x.jsonl"
    file.write_text('{"problem": "p", "answer": "1"}\n' * 3)
    result = evaluation.main([f"--model={folders / 'policy'}", "--rollout=hf", f"--task={file}", "--max_tokens=8"])
    assert result["problems"] == 3 and result["samples"] == 4


class Knows:
    """An engine that writes the gold answer to every `every`-th problem, and a wrong one to the others."""

    def __init__(self, task, tokenizer, every: int):
        self.task, self.tokenizer = task, tokenizer
        self.every = every
        self.seen = 0

    def generate(self, prompts, seeds, sampling, topk, stop):
        groups = []
        for prompt, group_seeds in zip(prompts, seeds, strict=True):
            gold = self.gold(prompt)
            answer = gold if self.seen % self.every == 0 else str((int(gold) + 1) % 200)
            self.seen += 1
            ids = np.array(self.tokenizer.encode("# " + answer) + [1], np.int32)
            mask = np.ones(len(ids), bool)
            groups.append([Response(ids, mask, None, None, None, "stop") for _ in group_seeds])
        return groups

    def gold(self, prompt) -> str:
        text = self.tokenizer.decode(prompt)[:-2]
        problems = (self.task.problem("test", i) for i in range(40))
        return next(p.answer for p in problems if p.id == text)


@pytest.mark.parametrize("every, score", [(1, 1.0), (2, 0.5)])
def test_a_model_that_always_answers_right_scores_one(every, score):
    """An engine that writes the gold answer: 1; one that errs on every other problem: 1/2."""
    task, tokenizer = Arithmetic(), arithmetic_tokenizer()
    engine = Knows(task, tokenizer, every)
    right, length = evaluation.solve(engine, task, tokenizer, list(range(40)), 2, Sampling(), 0)
    assert right.shape == (40, 2) and right.mean() == score
    assert length == 3


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--model=/no/such"], "--model=/no/such: no model there"),
        (["--k=1,9"], "--k=1,9: each k must lie between 1 and --samples=4"),
        (["--task=/no/such.jsonl"], "no such file"),
        (["--max_tokens=1000"], "over|more than the model's context of 128"),
    ],
)
def test_bad_calls(folders, argv, sentence):
    with pytest.raises(ValueError, match=sentence):
        evaluation.main([f"--model={folders / 'policy'}", "--rollout=hf", *argv])


def test_held_out_adds_up_over_ranks(monkeypatch):
    """Two ranks with equal scores: the same mean, and the standard error of twice as many problems."""
    cfg = make_cfg(objective="grpo", eval_problems=20, max_tokens=8)
    seen = []

    def three_of_ten(engine, task, tokenizer, indices, *more):
        seen.append(indices)
        return np.array([[1.0]] * 3 + [[0.0]] * 7), 4.0

    def sum_of_two(values):
        return [2 * float(x) for x in values]

    monkeypatch.setattr(evaluation, "solve", three_of_ten)
    comm = SimpleNamespace(on=False, rank=1, size=2, sum=sum_of_two)
    learner = SimpleNamespace(models=SimpleNamespace(policy=tiny_model(0)), comm=comm, device="cpu")
    result = evaluation.held_out(learner, "policy", Arithmetic(), arithmetic_tokenizer(), cfg)
    assert seen == [list(range(1, 20, 2))]
    assert result["pass@1"] == pytest.approx(0.3)
    assert result["se"] == pytest.approx(math.sqrt(0.21 / 19))
