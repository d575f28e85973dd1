"""Evaluation: the estimator, the command, refused flags."""

import itertools
import json
import math
import shutil
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_cfg, tiny_model
from test_tasks import with_stop_tokens
from transformers import AutoConfig

import config
import eval as evaluation
import probe.__main__ as probe_command
import tasks
import train
from eval import mean_se, pass_at_k
from learner import Comm
from machinery import checkpoint, session, settings, warmstart
from machinery.checkpoint import load_model, save_model
from machinery.flags import UserError, parse_flags
from machinery.run import held_out_sets, open_run
from model.engines import HFEngine
from remote import wire
from remote.sampler import SamplerFlags, configure, open_source
from remote.source import describe_run
from rollout import Response
from sampling import Sampling
from tasks import Arithmetic, Table, arithmetic_tokenizer, encode, make_task, prompts, stop_ids


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
    flags = ["--role=actor", "--problems=20", "--samples=3", "--k=1,3", f"--out={out}"]
    result = evaluation.main([f"--model={folders}", "--rollout=hf", "--max_tokens=8", *flags])
    assert json.loads(out.read_text()).items() >= result.items()
    assert result["mean@3"] == pytest.approx(result["pass@1"])
    assert result["pass@3"] >= result["pass@1"]
    assert 0 <= result["pass@1"] <= 1 and result["problems"] == 20
    assert "pass@3" in capsys.readouterr().out
    file = tmp_path / "x.jsonl"
    file.write_text('{"problem": "p", "answer": "1"}\n' * 3)
    result = evaluation.main([f"--model={folders / 'policy'}", "--rollout=hf", f"--task={file}", "--max_tokens=8"])
    assert result["problems"] == 3 and result["samples"] == 4


def table(path, *answers, problem="1 + {} :"):
    path.write_text(
        "".join(json.dumps({"problem": problem.format(i), "answer": a}) + "\n" for i, a in enumerate(answers))
    )
    return path


def test_several_sets_with_different_settings(folders, tmp_path, monkeypatch, capsys):
    """One line for each problem; results are computed from the lines, and the mean over sets."""
    a, b = table(tmp_path / "a.jsonl", "1", "2", "3"), table(tmp_path / "b.jsonl", "4", "5")
    seen = []

    def watched(self, prompts, seeds, sampling, *more):
        seen.append((len(prompts), len(seeds[0]), sampling.temperature, sampling.max_tokens, sampling.top_k))
        return generate(self, prompts, seeds, sampling, *more)

    generate = HFEngine.generate
    monkeypatch.setattr(HFEngine, "generate", watched)
    reward = tmp_path / "length.py"
    reward.write_text("def even(row, text, finish_reason):\n    return float(len(text) % 2 == 0)\n")
    common = [f"--model={folders / 'policy'}", "--rollout=hf", "--max_tokens=8", "--samples=3", "--k=1,3", "--top_k=50"]
    common += [f"--task={a},{b}:samples=5:temperature=0.5:max_tokens=4", f"--reward={reward}:even"]
    common.append(f"--out={tmp_path / 'r.json'}")
    result = evaluation.main(common)
    assert seen == [(3, 3, 1.0, 8, 50), (2, 5, 0.5, 4, 50)]
    file = tmp_path / "r.responses.jsonl"
    head, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["set"], row["id"], row["answer"]) for row in rows] == [
        ("a", "a/0", "1"), ("a", "a/1", "2"), ("a", "a/2", "3"), ("b", "b/0", "4"), ("b", "b/1", "5"),
    ]  # fmt: skip
    assert head["evaluation"]["temperature"] == 1.0
    for row in rows:
        assert row["rewards"] == [float(len(text) % 2 == 0) for text in row["responses"]]
        assert (
            len(row["tokens"]) == len(row["finish_reasons"]) == len(row["rewards"]) == (3 if row["set"] == "a" else 5)
        )
    for label, n in (("a", 3), ("b", 5)):
        of_set = [row for row in rows if row["set"] == label]
        assert result["sets"][label][f"mean@{n}"] == pytest.approx(np.mean([np.mean(row["rewards"]) for row in of_set]))
        lengths = np.mean([row["tokens"] for row in of_set])
        assert result["sets"][label]["response_length"] == pytest.approx(lengths)
    assert 0 < result["mean"] < 1
    assert result["mean"] == pytest.approx((result["sets"]["a"]["mean@3"] + result["sets"]["b"]["mean@5"]) / 2)
    assert "mean of the 2 sets" in capsys.readouterr().out
    # killed after two problems and half of a third: the same command resumes and gives the same results
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:40])
    assert evaluation.main(common) == result
    assert file.read_text() == whole
    assert seen[2:] == [(1, 3, 1.0, 8, 50), (2, 5, 0.5, 4, 50)]
    assert evaluation.main([*common, "--k=1"])["sets"]["a"]["mean@3"] == result["sets"]["a"]["mean@3"]
    assert len(seen) == 4  # nothing was sampled
    refusal = "the file has responses of a different evaluation or to different problems; name a different --out"
    with pytest.raises(ValueError, match=refusal):
        evaluation.main([*common, "--temperature=0.7"])
    file.write_text("".join([*lines[:2], lines[2][:40] + "\n", *lines[3:]]))
    with pytest.raises(ValueError, match="r.responses.jsonl, line 3: not valid JSON .*; fix or remove that line"):
        evaluation.main(common)
    file.write_text(whole)
    table(b, "4", "6")
    with pytest.raises(ValueError, match=refusal):
        evaluation.main(common)


def test_responses_of_overwritten_weights_are_refused(folders, tmp_path, capsys):
    """The same folder name, different weights."""
    model, file = tmp_path / "model", table(tmp_path / "x.jsonl", "1", "2")
    shutil.copytree(folders / "policy", model)
    common = [f"--model={model}", "--rollout=hf", "--max_tokens=2", "--samples=1", f"--task={file}", "--reward=boxed"]
    common.append(f"--out={tmp_path / 'r.json'}")
    evaluation.main(common)
    capsys.readouterr()
    evaluation.main(common)
    assert "2 problems are already evaluated" in capsys.readouterr().out
    shutil.copy2(folders / "untied" / "model.safetensors", model / "model.safetensors")
    with pytest.raises(UserError, match="r.responses.jsonl: the file has responses of a different evaluation"):
        evaluation.main(common)


def test_angles_that_depend_on_the_batch_are_refused(folders, tmp_path):
    """Refused before the model loads: the plain sampler would rotate a short row by the longest row of its batch."""
    model = tmp_path / "model"
    shutil.copytree(folders / "policy", model)
    config_json = json.loads((model / "config.json").read_text())
    config_json["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    (model / "config.json").write_text(json.dumps(config_json))
    (model / "model.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"model: rotary angles of the kind dynamic: with \d+ tokens of prompt and resp"
    ):
        evaluation.main([f"--model={model}", "--rollout=hf", "--max_tokens=2"])


def test_responses_are_written_during_sampling(folders, tmp_path, monkeypatch):
    """With many responses a problem, few problems are sampled at once; pass@k has k = 1 and k = all."""
    file = table(tmp_path / "x.jsonl", *"12345")
    written, generate = [], HFEngine.generate

    def watched(self, prompts, *more):
        path = tmp_path / "r.responses.jsonl"
        written.append((len(prompts), len(path.read_text().splitlines()) - 1))
        return generate(self, prompts, *more)

    monkeypatch.setattr(HFEngine, "generate", watched)
    common = [f"--model={folders / 'policy'}", "--rollout=hf", "--max_tokens=1", f"--task={file}", "--reward=boxed"]
    result = evaluation.main([*common, "--samples=512", f"--out={tmp_path / 'r.json'}"])
    assert written == [(2, 0), (2, 2), (1, 4)]
    assert {key for key in result if key.startswith("pass@") and "_" not in key} == {"pass@1", "pass@512"}
    monkeypatch.undo()
    result = evaluation.main([*common, "--samples=1"])
    assert {key for key in result if key.startswith("pass@") and "_" not in key} == {"pass@1"}


def test_long_prompts_can_be_dropped(folders, tmp_path, capsys):
    file = table(tmp_path / "x.jsonl", "1", "2", problem="1 + {} :" + " 1" * 20)
    with open(file, "a") as f:
        f.write('{"problem": "1", "answer": "1"}\n')
    flags = [f"--model={folders / 'policy'}", "--rollout=hf", "--max_tokens=8", f"--task={file}"]
    flags.append("--prompt_template=plain")
    assert evaluation.main(flags)["problems"] == 3
    assert evaluation.main([*flags, "--max_prompt_tokens=20"])["problems"] == 1
    assert "x: 2 prompts of more than 20 tokens dropped" in capsys.readouterr().out


def test_long_held_out_prompts_of_a_run_can_be_dropped(folders, tmp_path, capsys):
    file = table(tmp_path / "x.jsonl", "1", "2", problem="1 + {} :" + " 1" * 60)
    with open(file, "a") as f:
        f.write('{"problem": "1", "answer": "1"}\n')
    train_on = table(tmp_path / "y.jsonl", "1", "2")
    flags = [f"--model={folders / 'policy'}", "--rollout=hf", "--actor=none", "--objective=tis", "--max_tokens=100"]
    flags += [f"--task={train_on}", f"--eval_task={file}", "--lr=1", "--dtype=float32", "--prompt_template=plain"]
    flags.append(f"--out={tmp_path / 'run'}")
    with pytest.raises(ValueError, match="or drop long prompts with --max_prompt_tokens"):
        open_run(settings.parse(flags), Comm())
    run = open_run(settings.parse([*flags, "--max_prompt_tokens=20"]), Comm())
    assert [one.task.size for one in run.eval_sets] == [1]
    assert f"{file}: 2 prompts of over 20 tokens dropped, 1 left" in capsys.readouterr().out


def test_show_prompt_samples_nothing(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(HFEngine, "generate", None)
    file = table(tmp_path / "x.jsonl", *"12345")
    flags = [f"--model={folders / 'policy'}", "--rollout=hf", "--max_tokens=8", f"--task={file}", "--show_prompt"]
    evaluation.main([*flags, "--prompt_template={problem} #"])
    page = capsys.readouterr().out.splitlines()
    assert page == [
        *(line for i in range(3) for line in (f"--- x/{i}: 5 tokens, answer {i + 1}", f"1 + {i} : #")),
        "--- a response ends with <eos> (1)",
    ]


def make_run(folders, tmp_path, monkeypatch, **changes):
    """A run folder with these flags and one checkpoint."""
    run = tmp_path / "run"
    shutil.copytree(folders / "policy", run / "checkpoints" / "step_000001" / "policy")
    cfg = replace(make_cfg(out=str(run), model=str(folders / "policy"), actor="none"), **changes)
    (run / "config.json").write_text(json.dumps({"config": vars(cfg), "command": "x"}))
    monkeypatch.setattr(evaluation.checkpoint, "newest", lambda root, which="": root / "checkpoints" / "step_000001")
    return run


def test_a_run_is_evaluated_with_its_prompts(folders, tmp_path, monkeypatch, capsys):
    """The run's template and length are the defaults."""
    file = table(tmp_path / "x.jsonl", "1")
    run = make_run(folders, tmp_path, monkeypatch, max_tokens=9, task=str(file), prompt_template="{problem} #")
    flags = [f"--model={run}", "--rollout=hf", f"--task={file}", "--show_prompt"]
    evaluation.main(flags)
    printed = capsys.readouterr().out
    assert f"as in {run}: --max_tokens=9 --prompt_template={{problem}} #\n" in printed and "1 + 0 : #" in printed
    evaluation.main([f"--model={run}/checkpoints/step_000001/policy", *flags[1:]])
    assert "1 + 0 : #" in capsys.readouterr().out
    evaluation.main([*flags, "--prompt_template=plain", "--max_tokens=8"])
    assert "#" not in capsys.readouterr().out


def test_a_run_on_sums_is_evaluated_on_its_sums(folders, tmp_path, monkeypatch, capsys):
    """Not on eval.py's default sums; flags take precedence, and a file is a different task."""
    hard = {"task": "arith", "arith": "min_ops=2,max_ops=4,operand=7,seed=5", "max_tokens": 9}
    run = make_run(folders, tmp_path, monkeypatch, **hard)
    seen = []
    monkeypatch.setattr(
        evaluation, "solve", lambda engine, task, *more: seen.append(vars(task)) or solve(engine, task, *more)
    )
    common = [f"--model={run}", "--rollout=hf", "--samples=1", "--problems=2"]
    evaluation.main(common)
    evaluation.main([*common, "--arith=min_ops=2,max_ops=4,operand=7,seed=6"])
    assert [(x["min_ops"], x["max_ops"], x["operand"], x["seed"]) for x in seen] == [(2, 4, 7, 5), (2, 4, 7, 6)]
    assert "--arith=min_ops=2,max_ops=4,operand=7,seed=5" in capsys.readouterr().out
    evaluation.main([*common, f"--task={table(tmp_path / 'x.jsonl', '1')}"])
    assert "--task_" not in capsys.readouterr().out


solve = evaluation.solve


def graded(monkeypatch) -> list[tuple]:
    """(first part of the reward, the template) of each file that `main` evaluates."""
    parts = []

    def watched(engine, task, *more):
        if isinstance(task, Table):
            parts.append((task.reward.parts[0].name, task.style.template))
        return solve(engine, task, *more)

    monkeypatch.setattr(evaluation, "solve", watched)
    return parts


def test_a_run_is_evaluated_with_its_reward(folders, tmp_path, monkeypatch, capsys):
    """The run's --reward is the default; rows with choices and sums are different kinds of task."""
    reward_flags = {"reward": "gsm8k*2,think", "prompt_template": "{problem} #"}
    run = make_run(folders, tmp_path, monkeypatch, max_tokens=9, task="elsewhere.jsonl", **reward_flags)
    sums, more = table(tmp_path / "x.jsonl", "1"), table(tmp_path / "y.jsonl", "1")
    letters = tmp_path / "letters.jsonl"
    letters.write_text(json.dumps({"question": "1 +", "choices": ["1", "2"], "answer": 1}) + "\n")
    parts = graded(monkeypatch)
    common = [f"--model={run}", "--rollout=hf", "--samples=1", "--problems=1"]
    evaluation.main([*common, f"--task={sums},{more}:samples=2"])
    assert parts == 2 * [("gsm8k", "{problem} #")]
    assert "--max_tokens=9 --prompt_template={problem} # --reward=gsm8k*2,think\n" in capsys.readouterr().out
    evaluation.main([*common, f"--task={sums}", "--reward=boxed", "--prompt_template=plain"])
    assert parts[2:] == [("boxed", "{problem}")]
    capsys.readouterr()
    evaluation.main([*common, f"--task={letters}"])
    assert parts[3:] == [("letter", prompts.TEMPLATES["letter"])]
    assert f"not as in {run}: --reward=gsm8k*2,think" in capsys.readouterr().out
    assert evaluation.main(common)["task"] == "arith"
    with pytest.raises(
        ValueError, match="can grade only some of these sets; name --reward, or evaluate the sets separ"
    ):
        evaluation.main([*common, f"--task={sums},{letters}"])


def test_rows_with_choices_are_graded_by_letters_without_a_reward(folders, tmp_path, monkeypatch):
    """As in QaRL's out-of-distribution row; a letter reward of the run itself applies too."""
    letters = tmp_path / "letters.jsonl"
    letters.write_text(json.dumps({"question": "1 +", "choices": ["1", "2"], "answer": 1}) + "\n")
    for i, reward in enumerate(("", "letter*2")):
        run = make_run(folders, tmp_path / str(i), monkeypatch, task="elsewhere.jsonl", reward=reward)
        parts = graded(monkeypatch)
        evaluation.main([f"--model={run}", "--rollout=hf", "--samples=1", f"--task={letters}"])
        assert parts == [("letter", prompts.TEMPLATES["letter"])]


@pytest.mark.parametrize("name", ["policy", "actor"])
def test_eval_and_training_share_embedded_models(name, monkeypatch):
    """Training and eval.py use the same folder."""
    calls = []
    monkeypatch.setattr(warmstart, "base_model", lambda *given: calls.append(given) or "folder")
    sums = ["--arith=min_ops=2,operand=7"]
    flags = parse_flags(evaluation.EvalFlags, [f"--model=base:{name}", *sums])
    assert evaluation.find_model(flags, "model", name) == "folder"
    trained = settings.parse(["--actor=base:actor", *sums])
    [(flag, value, cfg)] = calls
    keys = {warmstart.recipe_key(name, make_task(one), 0.3) for one in (cfg, trained)}
    assert (flag, value, len(keys)) == ("model", f"base:{name}", 1)


class GoldEngine:
    """An engine that writes the gold answer to every `every`-th problem, and a wrong answer to the rest."""

    def __init__(self, task, tokenizer, every: int):
        self.task, self.tokenizer = task, tokenizer
        self.every = every
        self.seen = 0

    def any_rank(self, condition):
        return condition

    def generate(self, prompts, seeds, sampling, topk, stop, max_allowed):
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
def test_right_answers_score_one(every, score):
    """The gold answer to every problem: 1; to every second problem: 1/2."""
    task, tokenizer = Arithmetic(), arithmetic_tokenizer()
    engine = GoldEngine(task, tokenizer, every)
    right, length = evaluation.solve(engine, task, tokenizer, list(range(40)), 2, Sampling(), 0, [1])
    assert right.shape == (40, 2) and right.mean() == score
    assert length == 3


def test_right_is_above_a_half(monkeypatch):
    """A reward for the format alone is no right answer."""

    def grade(task, tokenizer, problems, groups):
        for group in groups:
            for response, reward in zip(group, (0.1, 0.5, 0.51, 1.5), strict=True):
                response.reward = reward

    monkeypatch.setattr(evaluation, "grade_all", grade)
    task, tokenizer = Arithmetic(), arithmetic_tokenizer()
    right, _ = evaluation.solve(GoldEngine(task, tokenizer, 1), task, tokenizer, [0, 1], 4, Sampling(), 0, [1])
    assert right.tolist() == 2 * [[0, 0, 1, 1]]
    written = SimpleNamespace(known={"x": {task.problem("test", 0).id: {"rewards": [0.1, 0.5, 0.51], "tokens": [1]}}})
    one = SimpleNamespace(label="x", task=task)
    read, _ = evaluation.evaluate_set(None, one, SimpleNamespace(count=lambda one: 1), None, written)
    assert read.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("indices", [[0], [0, 1, 2], []])
def test_ranks_of_one_engine_sample_equally_often(indices, monkeypatch):
    """The second rank of this engine has two problems, one a round: this rank joins every round."""
    monkeypatch.setattr(tasks, "at_once", lambda samples: 1)
    task, tokenizer = Arithmetic(), arithmetic_tokenizer()
    engine, calls = GoldEngine(task, tokenizer, 1), []
    engine.any_rank = lambda condition: condition or len(calls) < 2
    generate = engine.generate
    engine.generate = lambda prompts, *more: calls.append(len(prompts)) or generate(prompts, *more)
    right, length = evaluation.solve(engine, task, tokenizer, indices, 3, Sampling(), 0, [1])
    assert calls == [1] * len(indices) + [0] * (2 - len(indices))
    assert right.size == 3 * len(indices) and (length == 3 if indices else math.isnan(length))


def test_every_response_has_a_different_seed():
    """Seeds depend on problem, sample and --seed, not on the set of evaluated problems."""
    task, tokenizer = Arithmetic(), arithmetic_tokenizer()

    def seeds_of(indices, seed):
        engine, seen = GoldEngine(task, tokenizer, 1), []
        generate = engine.generate
        engine.generate = lambda prompts, seeds, *more: seen.extend(seeds) or generate(prompts, seeds, *more)
        evaluation.solve(engine, task, tokenizer, indices, 3, Sampling(), seed, [1])
        return seen

    all_of_them = seeds_of([0, 1, 2, 3], 0)
    assert len({s for group in all_of_them for s in group}) == 12
    assert seeds_of([3, 1], 0) == [all_of_them[3], all_of_them[1]]
    assert not {s for group in seeds_of([0, 1, 2, 3], 1) for s in group} & {s for g in all_of_them for s in g}


def test_stop_tokens_in_evaluation_and_in_the_probe(folders, tmp_path, monkeypatch):
    """Stop tokens come from the model folder and --stop; in the probe, the sampler's and the learner's are joined."""
    policy = with_stop_tokens(folders / "policy", tmp_path / "policy", list(range(1, 60)))
    actor = with_stop_tokens(folders / "actor", tmp_path / "actor", list(range(60, 120)))
    seen = []

    def watched(self, prompts, seeds, sampling, topk, stop_ids, max_allowed=0):
        groups = generate(self, prompts, seeds, sampling, topk, stop_ids, max_allowed)
        seen.append((set(stop_ids), [r for group in groups for r in group]))
        return groups

    generate = HFEngine.generate
    monkeypatch.setattr(HFEngine, "generate", watched)
    common = ["--rollout=hf", "--max_tokens=8", "--problems=8", f"--model={policy}", "--stop=<spare0>"]
    stop = arithmetic_tokenizer().convert_tokens_to_ids("<spare0>")
    evaluation.main(common)
    probe_command.main([*common, "--dtype=float32", f"--actor={actor}", f"--out={tmp_path / 'x.json'}"])
    assert seen[0][0] == {*range(1, 60), stop} and len(seen) > 2
    assert all(ends == {*range(1, 120), stop} for ends, _ in seen[1:])
    for ends, responses in seen:
        assert {r.finish_reason for r in responses} >= {"stop"}
        assert all((int(r.tokens[-1]) in ends) == (r.finish_reason == "stop") for r in responses)
        assert not any(ends & set(r.tokens[:-1].tolist()) for r in responses)


def test_evaluation_in_training_has_the_runs_stop_tokens_and_reward(folders, tmp_path, monkeypatch):
    """Stop tokens of both models apply to both evaluations; --eval_task is graded by --reward."""
    policy = with_stop_tokens(folders / "policy", tmp_path / "policy", [1, 8])
    actor = with_stop_tokens(folders / "actor", tmp_path / "actor", [1, 9])
    file = tmp_path / "x.jsonl"
    file.write_text('{"problem": "p", "answer": "1"}\n' * 3)
    flags = {"task": str(file), "reward": "gsm8k", "eval_task": f"{file}:temperature=0.5:samples=2"}
    cfg = make_cfg(model=str(policy), actor=str(actor), max_tokens=4, group_size=2, **flags)
    seen = []

    def watched(self, prompts, seeds, sampling, topk, stop_ids, max_allowed):
        seen.append(stop_ids)
        return generate(self, prompts, seeds, sampling, topk, stop_ids, max_allowed)

    def solve(engine, task, tokenizer, indices, samples, sampling, *more):
        tasks.append((task, samples, sampling.temperature, sampling.max_tokens))
        return original(engine, task, tokenizer, indices, samples, sampling, *more)

    generate, original, tasks = HFEngine.generate, evaluation.solve, []
    monkeypatch.setattr(HFEngine, "generate", watched)
    monkeypatch.setattr(evaluation, "solve", solve)
    tokenizer, task = arithmetic_tokenizer(), Arithmetic()
    learner = SimpleNamespace(
        models=SimpleNamespace(policy=tiny_model(0), actor=tiny_model(1), vocabulary=256),
        comm=Comm(),
        device="cpu",
        version=0,
    )
    ends = stop_ids(tokenizer, [policy, actor])
    run = SimpleNamespace(cfg=cfg, task=task, tokenizer=tokenizer, stop_ids=ends, eval_sets=held_out_sets(cfg, task))
    for name in ("policy", "actor"):
        evaluation.held_out(learner, name, run)
    assert seen == 2 * [[1, 8, 9]]
    graded_tasks = [(t.name, t.reward.parts[0].name, *settings_of_set) for t, *settings_of_set in tasks]
    assert graded_tasks == 2 * [(str(file), "gsm8k", 2, 0.5, 4)]


def test_a_checkpoint_keeps_the_stop_tokens(folders, tmp_path):
    """Its generation_config.json is a byte copy from the starting folder."""
    origin = with_stop_tokens(folders / "policy", tmp_path / "policy", [1, 8])
    config = AutoConfig.from_pretrained(origin)
    save_model(config, tiny_model(0, layers=2).state_dict(), arithmetic_tokenizer(), tmp_path / "saved", str(origin))
    name = "generation_config.json"
    assert (tmp_path / "saved" / name).read_bytes() == (origin / name).read_bytes()
    (origin / name).unlink()
    save_model(config, tiny_model(0, layers=2).state_dict(), arithmetic_tokenizer(), tmp_path / "again", str(origin))
    assert (tmp_path / "again" / "config.json").is_file()


def test_a_run_keeps_its_stop_tokens_to_the_last_checkpoint(folders, tmp_path, monkeypatch):
    """From the starting folder through a resume to the evaluation of the last checkpoint."""
    origin = with_stop_tokens(folders / "policy", tmp_path / "policy", [1, 8])
    out = tmp_path / "run"
    flags = [
        "--rollout=hf",
        "--actor=none",
        "--objective=tis",
        "--max_tokens=6",
        "--lr=1e-4",
        "--dtype=float32",
        "--task=arith",
        "--eval_problems=8",
        "--stop=<spare0>",
    ]
    flags += ["--rollout_batch=8", "--train_batch=8", "--group_size=4", f"--model={origin}", f"--out={out}"]
    stop = arithmetic_tokenizer().convert_tokens_to_ids("<spare0>")
    for argv in ([*flags, "--steps=1"], ["--resume", f"--out={out}", "--steps=2"]):
        cfg = settings.parse(argv)
        run = open_run(cfg, Comm())
        assert session.open_source(cfg, run, Comm()).stop_ids == [1, 8, stop]
        described = describe_run(cfg, run, "policy", 0, 0, 1)
        assert described["stop_ids"] == [1, 8, stop] and described["config"]["rollout_dtype"] == cfg.rollout_dtype
        train.train(cfg)
    saved = out / "checkpoints" / "step_000002" / "policy" / "generation_config.json"
    assert saved.read_bytes() == (origin / "generation_config.json").read_bytes()
    seen, solve = [], evaluation.solve

    def watched(*args):
        seen.append(args[-2])
        return solve(*args)

    monkeypatch.setattr(evaluation, "solve", watched)
    command = [f"--model={out}", "--rollout=hf", "--problems=4", "--samples=2"]
    evaluation.main(command)
    evaluation.main([*command, "--stop="])
    assert seen == [[1, 8, stop], [1, 8]]


def test_a_remote_sampler_has_the_learners_stop_tokens_and_reward(folders, tmp_path):
    """Through the welcome message, even if the sampler's host has none of the prompt files."""
    origin = with_stop_tokens(folders / "policy", tmp_path / "policy", [1, 8])
    file = tmp_path / "x.jsonl"
    file.write_text('{"problem": "1 + 1", "answer": "2"}\n' * 3 + '{"problem": "1 + 1 + 1 + 1", "answer": "4"}\n')
    texts = {"system_prompt": "3 + 4", "prompt_template": "{problem} =", "chat_template": "{{ messages[1].content }} #"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    flags = [
        "--rollout=hf",
        "--actor=none",
        "--objective=tis",
        "--max_tokens=6",
        "--lr=1",
        "--dtype=float32",
        "--max_prompt_tokens=6",
        *(f"--{name}={tmp_path / name}" for name in texts),
        f"--model={origin}",
        "--stop=<spare0>",
    ]
    flags += [f"--task={file}", "--reward=gsm8k", f"--out={tmp_path / 'run'}"]
    cfg = settings.parse(flags)
    run = open_run(cfg, Comm())
    setup = wire.pack_setup(str(origin))
    assert "generation_config.json" in setup
    welcome = wire.Welcome("session", describe_run(cfg, run, "policy", 0, 0, 1), setup)
    for name in texts:  # the sampler's host has no such files
        (tmp_path / name).unlink()
    sampler_flags = SamplerFlags(rollout="hf", task=str(file))
    source = open_source(wire.decode(wire.encode(welcome)), sampler_flags, tmp_path / "sampler")
    assert source.stop_ids == [1, 8, arithmetic_tokenizer().convert_tokens_to_ids("<spare0>")]
    assert source.task.reward.parts[0].name == "gsm8k"
    assert source.task.size == run.task.size == 3  # the long prompt is dropped on both sides
    prompts = [one.tokenizer.decode(encode(one.tokenizer, one.task.problem("test", 0))) for one in (source, run)]
    assert prompts == 2 * ["1 + 1 = #"]


def test_a_remote_sampler_gets_every_flag_of_task_and_prompts(tmp_path):
    file = str(table(tmp_path / "x.jsonl", "2"))
    cfg = replace(make_cfg(max_tokens=8), task=file, reward="gsm8k*0.5,think", overlong=3, columns="prompt=problem")
    run = SimpleNamespace(context=20, stop_ids=[1], probe_ids=lambda: np.zeros((1, 3), int))
    description = describe_run(cfg, run, "policy", 0, 0, 1)
    names = {f.name for kind in (config.TaskFlags, config.PromptFlags) for f in fields(kind)}
    assert {k: description["config"].get(k, "-") for k in names} == {k: getattr(cfg, k) for k in names}
    sampler_cfg = configure(description, SamplerFlags(rollout="hf", task=file))
    assert make_task(sampler_cfg).reward == make_task(cfg).reward


def test_held_out_sums_over_ranks(monkeypatch):
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
    models = SimpleNamespace(policy=tiny_model(0), vocabulary=None)
    learner = SimpleNamespace(models=models, comm=comm, device="cpu")
    sets = held_out_sets(cfg, Arithmetic())
    run = SimpleNamespace(cfg=cfg, tokenizer=arithmetic_tokenizer(), stop_ids=[1], eval_sets=sets)
    result = evaluation.held_out(learner, "policy", run)
    assert seen == [list(range(1, 20, 2))]
    assert result["pass@1"] == pytest.approx(0.3)
    assert result["se"] == pytest.approx(math.sqrt(0.21 / 19))


def test_shards_are_evaluated_with_a_full_copy_in_float32():
    """For every dtype in the config; without a random draw."""
    model = tiny_model(3)
    model.config.dtype = torch.bfloat16
    learner = SimpleNamespace(
        comm=SimpleNamespace(on=True),
        device="cpu",
        models=SimpleNamespace(policy=model, vocabulary=200),
        named_tensors=lambda name: getattr(learner.models, name).state_dict().items(),
    )
    before = torch.get_rng_state()
    engine = evaluation.sampler_of(learner, "policy", make_cfg(parallel="fsdp"))
    assert torch.equal(torch.get_rng_state(), before)
    assert engine.model is not model and {p.dtype for p in engine.model.parameters()} == {torch.float32}
    ids = np.array([[3, 9, 27, 81], [7, 49, 1, 2]])
    assert np.array_equal(engine.logprobs(ids), HFEngine(model, vocabulary=200).logprobs(ids))
    assert evaluation.sampler_of(learner, "policy", make_cfg(parallel="ddp")).model is model


def test_one_process_follows_a_run_whose_engine_is_on_several_ranks():
    saved = asdict(config.Config(rollout="vllm", rollout_tp=2, eval_task="a.jsonl", max_tokens=64))
    cfg = parse_flags(evaluation.EvalFlags, [*evaluation.flags_of_run(saved), "--model=anything"])
    assert (cfg.rollout, cfg.rollout_tp, cfg.max_tokens, cfg.task) == ("vllm", 1, 64, "a.jsonl")
    evaluation.check(cfg)


def test_the_mean_of_several_sets_by_hand():
    got = evaluation.over_sets([("a", 2), ("b", 4)], [(0.2, 0.03), (0.6, 0.04)])
    each = {"a_mean@2": 0.2, "a_se": 0.03, "b_mean@4": 0.6, "b_se": 0.04}
    assert got == pytest.approx({"pass@1": 0.4, "se": 0.025, **each})


def test_the_context_is_the_maximum_over_sets(folders, tmp_path):
    """Prompt and response lengths of one set count together; the sum must also fit the actor's context."""
    for name, problem in (("a", "7 + " * 20 + "7"), ("b", "7")):
        row = {"problem": problem, "answer": "1"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    sets = f"{tmp_path / 'a.jsonl'}:max_tokens=2,{tmp_path / 'b.jsonl'}:max_tokens=30"
    common = [f"--model={folders / 'actor'}", "--rollout=hf", "--max_tokens=2", "--reward=boxed"]

    def context(task, *more) -> int:
        cfg = evaluation.filled(parse_flags(evaluation.EvalFlags, [*common, f"--task={task}", *more]), ("max_tokens",))
        return evaluation.open_setup(cfg, 8).context

    alone = [context(word) for word in sets.split(",")]
    assert alone[0] != alone[1] and context(sets) == max(alone)
    short = tmp_path / "short"
    shutil.copytree(folders / "actor", short)
    config_json = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config_json, "max_position_embeddings": max(alone) - 1}))
    probe = [*common, "--dtype=float32", f"--task={tmp_path / 'a.jsonl'}", "--max_tokens=30"]
    with pytest.raises(UserError, match="it exceeds the model's context of"):
        probe_command.main([*probe, f"--actor={short}"])


@pytest.mark.parametrize(
    "saved, argv, sentence",
    [
        ({}, ["--show_prompt"], "leave out --show_prompt"),
        ({}, ["--samples=2", "--model=x"], "leave out --model"),
    ],
)
def test_follow_refuses_other_flags(tmp_path, saved, argv, sentence):
    cfg = asdict(config.Config(eval_task="a.jsonl", **saved))
    (tmp_path / "config.json").write_text(json.dumps({"config": cfg, "objective": "x", "command": "x"}))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=sentence):
        evaluation.main([f"--follow={tmp_path}", *argv])


def test_a_follower_reports_a_folder_without_training(tmp_path, capsys):
    cfg = asdict(config.Config(eval_task="a.jsonl"))
    (tmp_path / "config.json").write_text(json.dumps({"config": cfg, "objective": "x", "command": "x"}))
    evaluation.main([f"--follow={tmp_path}"])
    assert capsys.readouterr().out == f"{tmp_path}: no process trains in this folder; checkpoints evaluated: 0\n"


def test_a_follower_rounds_only_the_sampling_model(tmp_path, monkeypatch):
    seen = []
    failed = SimpleNamespace(returncode=1)
    monkeypatch.setattr(evaluation.subprocess, "run", lambda command, **_: seen.append(command) or failed)
    for actor, rounded in (("x", [False, True]), ("none", [True])):
        seen.clear()
        saved = asdict(config.Config(actor=actor, rollout_quant="w2a16", quant_group=32))
        for name in ("policy", "actor")[: len(rounded)]:
            evaluation.evaluated(tmp_path, name, saved, [])
        assert ["--rollout_quant=w2a16" in command for command in seen] == rounded
        seen.clear()
        for changes in (
            {"eval_engine": "torch"},
            {"samplers": "zmq"},
            {"eval_engine": "torch", "learner_quant": "aligned"},
        ):
            evaluation.evaluated(tmp_path, ("policy", "actor")[len(rounded) - 1], saved | changes, [])
        assert ["--rollout_quant=w2a16" in command for command in seen] == [False, False, True]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_evaluation_samples_in_the_checkpoints_dtype(solvers, tmp_path, monkeypatch, dtype):
    load_model(str(solvers / "policy")).to(getattr(torch, dtype)).save_pretrained(tmp_path / "model")
    checkpoint.read_tokenizer(solvers / "policy").save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"problem": "1 + 1 :", "answer": "2"}\n')
    used, make_engine = [], evaluation.make_engine
    monkeypatch.setattr(evaluation, "make_engine", lambda cfg, *more: used.append(cfg) or make_engine(cfg, *more))
    common = [f"--model={tmp_path}/model", "--rollout=hf", "--max_tokens=8", f"--task={tmp_path}/rows.jsonl"]
    evaluation.main(common)
    evaluation.main([*common, "--rollout_dtype=float32"])
    assert [cfg.rollout_dtype for cfg in used] == [dtype, "float32"]
