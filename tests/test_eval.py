"""Evaluation: the estimator, the command, the bad calls."""

import itertools
import json
import math

import numpy as np
import pytest

import eval as evaluation
from eval import mean_se, pass_at_k


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
    result = evaluation.main(
        [
            f"--model={folders}",
            "--which=actor",
            "--rollout=hf",
            "--problems=20",
            "--samples=3",
            "--k=1,3",
            "--max_tokens=8",
            f"--out={out}",
        ]
    )
    assert (
        json.loads(out.read_text()) == result
        and result["mean@3"] == pytest.approx(result["pass@1"])
        and result["pass@3"] >= result["pass@1"]
    )
    assert 0 <= result["pass@1"] <= 1 and result["problems"] == 20 and "pass@3" in capsys.readouterr().out
    file = tmp_path / "x.jsonl"
    file.write_text('{"problem": "p", "answer": "1"}\n' * 3)
    result = evaluation.main([f"--model={folders / 'policy'}", "--rollout=hf", f"--task={file}", "--max_tokens=8"])
    assert result["problems"] == 3 and result["samples"] == 4


def test_a_model_that_always_answers_right_scores_one(folders):
    """An engine that writes the gold answer: pass@k 1; one that errs on every other problem: 1/2."""
    import numpy as np
    from rollout import Response, Sampling
    from tasks import Arithmetic, arithmetic_tokenizer

    task, tok = Arithmetic(), arithmetic_tokenizer()

    class Knows:
        def __init__(self, every):
            self.every, self.seen = every, 0

        def generate(self, prompts, seeds, sampling, topk, stop):
            groups = []
            for p, s in zip(prompts, seeds):
                problem = tok.decode(p)[:-2]
                gold = next(q for q in (task.problem("test", i) for i in range(40)) if q.id == problem)
                answer = gold.answer if self.seen % self.every == 0 else str((int(gold.answer) + 1) % 200)
                self.seen += 1
                ids = np.array(tok.encode("# " + answer) + [1], np.int32)
                groups.append([Response(ids, np.ones(len(ids), bool), None, None, None, "stop") for _ in s])
            return groups

    for every, want in ((1, 1.0), (2, 0.5)):
        right, length = evaluation.solve(Knows(every), task, tok, list(range(40)), 2, Sampling(), 0)
        assert right.shape == (40, 2) and right.mean() == want and length == 3


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


def test_held_out_adds_up_over_ranks(folders):
    """Two ranks with equal scores: the same mean, and the standard error of twice as many problems."""
    from types import SimpleNamespace
    from conftest import make_cfg, tiny_model
    from tasks import Arithmetic, arithmetic_tokenizer

    cfg, seen = make_cfg(objective="grpo", eval_problems=20, max_tokens=8), []
    solve, evaluation.solve = (
        evaluation.solve,
        lambda e, t, k, indices, *a: (seen.append(indices), (np.array([[1.0]] * 3 + [[0.0]] * 7), 4.0))[1],
    )
    try:
        comm = SimpleNamespace(on=False, rank=1, world=2, sum=lambda xs: [2 * float(x) for x in xs])
        learner = SimpleNamespace(pair=SimpleNamespace(policy=tiny_model(0)), comm=comm, device="cpu")
        got = evaluation.held_out(learner, "policy", Arithmetic(), arithmetic_tokenizer(), cfg)
    finally:
        evaluation.solve = solve
    assert (
        seen == [list(range(1, 20, 2))]
        and got["pass@1"] == pytest.approx(0.3)
        and got["se"] == pytest.approx(math.sqrt(0.21 / 19))
    )
