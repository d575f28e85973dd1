"""Evaluation: the estimator, the command, refused flags."""

import itertools
import json
import math
import shutil
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import copied, make_cfg, tiny_model, write_rows
from test_tasks import with_stop_tokens

import config
import eval as evaluation
import tasks
import train
from eval import mean_se, pass_at_k
from machinery import session, settings
from machinery.checkpoint.models import load_model
from machinery.flags import UserError, parse_flags
from machinery.ranks import Comm
from machinery.run import held_out_sets, open_run
from model.engines import HFEngine
from probe import ProbeFlags
from remote import wire
from remote.sampler import SamplerFlags, configure, open_source
from remote.source import describe_run
from rollout import Response
from sampling import Sampling
from tasks import prompts
from tasks.arith import Arithmetic, arithmetic_tokenizer
from tasks.prompts import encode


def table(path, *answers, problem="1 + {} :"):
    write_rows(path, [{"problem": problem.format(i), "answer": a} for i, a in enumerate(answers)])
    return path


@pytest.fixture
def evaluated(folders, tmp_path, monkeypatch):
    """A function: the result of eval.py for the tiny policy with these flags. It has the arguments of each call of the
    sampler (prompts, seeds, sampling, topk, stop_ids, max_allowed), and the lines of r.responses.jsonl at each call."""
    calls, lines, generate = [], [], HFEngine.generate

    def watched(self, *call):
        calls.append(call)
        lines.extend(len(file.read_text().splitlines()) for file in tmp_path.glob("r.responses.jsonl"))
        return generate(self, *call)

    def run(*argv, model=folders / "policy") -> dict:
        return evaluation.main([f"--model={model}", "--rollout=hf", "--max_tokens=8", *argv])

    monkeypatch.setattr(HFEngine, "generate", watched)
    run.calls, run.lines = calls, lines
    return run


def test_pass_at_k_is_the_mean_over_subsets_and_sets():
    for n, c in ((5, 2), (4, 0), (4, 4), (6, 1)):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(right, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert mean_se([1, 0, 0, 1]) == pytest.approx((0.5, math.sqrt(1 / 3) / 2))
    each = {"a_mean@2": 0.2, "a_se": 0.03, "b_mean@4": 0.6, "b_se": 0.04}
    got = evaluation.over_sets([("a", 2), ("b", 4)], [(0.2, 0.03), (0.6, 0.04)])
    assert got == pytest.approx({"pass@1": 0.4, "se": 0.025, **each})


def test_several_sets_with_different_settings(folders, evaluated, tmp_path, monkeypatch):
    """Each problem's responses are in the file, with their rewards."""
    monkeypatch.setattr(tasks, "at_once", lambda samples: 2)  # problems
    file = tmp_path / "r.responses.jsonl"
    shutil.copytree(folders / "actor", tmp_path / "run" / "actor")
    a, b = table(tmp_path / "a.jsonl", "1", "2", "3"), table(tmp_path / "b.jsonl", "4", "5")
    reward = tmp_path / "length.py"
    reward.write_text("def even(row, text, finish_reason):\n    return float(len(text) % 2 == 0)\n")
    common = [f"--task={a},{b}:samples=5:temperature=0.5:max_tokens=4", f"--reward={reward}:even", "--role=actor"]
    common += ["--samples=3", "--k=1,3", "--top_k=50", f"--out={tmp_path / 'r.json'}"]
    result = evaluated(*common, model=tmp_path / "run")
    calls = evaluated.calls
    sampled = [(len(c[0]), len(c[1][0]), c[2].temperature, c[2].max_tokens, c[2].top_k) for c in calls]
    assert sampled == [(2, 3, 1.0, 8, 50), (1, 3, 1.0, 8, 50), (2, 5, 0.5, 4, 50)]
    assert json.loads((tmp_path / "r.json").read_text()).items() >= result.items()
    assert evaluated.lines == [0, 2, 3]  # responses are written during sampling
    before = file.read_text()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(evaluation, "make_engine", lambda *args: 1 / 0)
        evaluated(*common, model=tmp_path / "run")
    assert file.read_text() == before  # an engine that does not start keeps the result
    rows = [json.loads(line) for line in before.splitlines()]
    assert [row["id"] + row["answer"] for row in rows] == ["a/01", "a/12", "a/23", "b/04", "b/15"]
    for row in rows:
        assert row["rewards"] == [float(len(text) % 2 == 0) for text in row["responses"]]
    means = []
    for label, n in (("a", 3), ("b", 5)):
        of_set = [row for row in rows if row["set"] == label]
        means.append(np.mean([np.mean(row["rewards"]) for row in of_set]))
        got = result["sets"][label]
        lengths = np.mean([row["tokens"] for row in of_set])
        assert (got[f"mean@{n}"], got["response_length"]) == pytest.approx((means[-1], lengths))
        assert got["pass@3"] >= got["pass@1"] == pytest.approx(got[f"mean@{n}"])
    assert 0 < result["mean"] < 1 and result["mean"] == pytest.approx(np.mean(means))


def test_angles_that_depend_on_the_batch_are_refused(folders, evaluated, tmp_path):
    """Refused before the model loads: the plain sampler would rotate a short row by the longest row of its batch."""
    rope = json.loads((folders / "policy" / "config.json").read_text())["rope_parameters"]
    rope |= {"rope_type": "dynamic", "factor": 2.0}
    model = copied(folders / "policy", tmp_path / "model", rope_parameters=rope)
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match="rotary angles of the kind dynamic"):
        evaluated(model=model)


@pytest.fixture
def make_run(folders, tmp_path):
    """A function: a run folder with these flags and one checkpoint."""

    def make(**changes):
        run = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(folders / "policy", run / "checkpoints" / "step_000001" / "policy")
        cfg = replace(make_cfg(out=str(run), model=str(folders / "policy"), actor="none", max_tokens=9), **changes)
        (run / "config.json").write_text(json.dumps({"config": vars(cfg), "command": "x"}))
        return run

    return make


@pytest.fixture
def solved(monkeypatch):
    """The arguments of each call of `solve` after the engine."""
    calls, solve = [], evaluation.solve
    monkeypatch.setattr(evaluation, "solve", lambda engine, *more, **m: calls.append(more) or solve(engine, *more, **m))
    return calls


def test_a_run_is_evaluated_with_its_prompts(make_run, tmp_path, monkeypatch, capsys):
    """The run's template and length are the defaults. --show_prompt samples nothing."""
    file = table(tmp_path / "x.jsonl", "1")
    run = make_run(task=str(file), prompt_template="{problem} #")
    monkeypatch.setattr(HFEngine, "generate", None)

    def shown(model, *flags) -> str:
        evaluation.main([f"--model={model}", "--rollout=hf", f"--task={file}", "--show_prompt", *flags])
        return capsys.readouterr().out

    for model in (run, run / "checkpoints" / "step_000001" / "policy"):
        printed = shown(model)
        assert "--dtype=float32 --max_tokens=9 --prompt_template={problem} #\n" in printed and "1 + 0 : #" in printed
    result = tmp_path / "result.json"
    result.write_text('{"command": ["before"]}')
    more = ["--prompt_template=plain", "--max_tokens=8", "--temperature=0", f"--out={result}"]
    assert "#" not in shown(run, *more) and "before" in result.read_text()


def test_a_model_trained_in_low_bits_is_evaluated_in_them(make_run):
    """Unless a flag asks for another format; only the model that sampled. The probe has the engine and the learner."""
    low = dict(
        rollout_quant="w4a16", learner_quant="aligned", quant_group=16, rollout_dtype="float16", dtype="bfloat16"
    )
    for changes, given, want in (
        (low, set(), ("w4a16", 16)),
        (low | {"learner_quant": "int8"}, set(), ("int8", 16)),
        (low, {"rollout_quant"}, ("none", 64)),
        (low | {"learner_quant": "none"}, set(), ("none", 64)),
        (low | {"actor": "base:actor"}, set(), ("none", 64)),
    ):
        run = str(make_run(**changes, lm_head_fp32=True, columns="answer=b"))
        other = tasks.as_trained(evaluation.EvalFlags(model=run, task="x.jsonl"), given)
        cfg = tasks.as_trained(evaluation.EvalFlags(model=run), given)
        assert (cfg.rollout_quant, cfg.quant_group, cfg.columns, other.columns) == (*want, "answer=b", "")
        assert (cfg.dtype, cfg.rollout_dtype, cfg.lm_head_fp32) == ("bfloat16", None, True)
        for actor in ("", "base:actor"):
            cfg = tasks.as_trained(ProbeFlags(model=run, actor=actor), given)
            seen = (cfg.rollout_quant, cfg.learner_quant, cfg.quant_group, cfg.rollout_dtype)
            own = not given and actor == changes.get("actor", "")  # the engine that is probed is the run's
            learner = "none" if actor else changes["learner_quant"]
            assert seen == (("w4a16", learner, 16, "float16") if own else ("none", "none", 64, None))


def test_a_run_is_evaluated_with_its_reward(make_run, solved, tmp_path, capsys):
    """The run's --reward is the default for the sets of its --task and --eval_task."""
    sums, more = table(tmp_path / "x.jsonl", "1"), table(tmp_path / "y.jsonl", "1")
    letters = tmp_path / "letters.jsonl"
    letters.write_text(json.dumps({"question": "1 +", "choices": ["1", "2"], "answer": 1}) + "\n")

    def graded(run, *flags) -> list[tuple]:
        """The main part of the reward and the template of each set."""
        solved.clear()
        evaluation.main([f"--model={run}", "--rollout=hf", "--samples=1", "--problems=1", *flags])
        return [(one.task.reward.parts[0].name, one.task.style.template) for one, *_ in solved]

    of_letters = [("letter", prompts.TEMPLATES["letter"])]
    for reward in ("", "letter*2"):  # as in QaRL's out-of-distribution row
        assert graded(make_run(task="elsewhere.jsonl", reward=reward), f"--task={letters}") == of_letters
    run = make_run(task=str(sums), eval_task=f"{more}:samples=2", reward="gsm8k*2,think", prompt_template="{problem} #")
    assert graded(run, f"--task={sums},{more}:samples=2") == 2 * [("gsm8k", "{problem} #")]
    assert graded(run, f"--task={sums}", "--reward=boxed", "--prompt_template=plain") == [("boxed", "{problem}")]
    assert graded(run, f"--task={letters}") == of_letters
    assert f"--reward=gsm8k*2,think and --prompt_template of {run} are not used" in capsys.readouterr().out
    run = make_run(task="arith", arith="min_ops=2,max_ops=4,operand=7,seed=5")  # not eval.py's default sums
    for arith, seed in ("", 5), ("--arith=min_ops=2,max_ops=4,operand=7,seed=6", 6):
        evaluation.main([f"--model={run}", "--rollout=hf", "--samples=1", "--problems=2", *filter(None, [arith])])
        task = solved[-1][0].task
        assert (task.min_ops, task.max_ops, task.operand, task.seed) == (2, 4, 7, seed)
    assert graded(run, f"--task={sums}")  # a file is a different task


class GoldEngine:
    """An engine that writes the gold answer to every second problem, and a wrong answer to the rest."""

    def __init__(self, poisoned=()):
        self.sizes, self.seeds, self.poisoned = [], [], poisoned
        self.any_rank = lambda condition: condition

    def generate(self, prompts, seeds, *more):
        self.sizes.append(len(prompts))
        self.seeds += seeds
        groups = []
        for of_group in seeds:
            i = self.todo.pop(0)
            answer = int(TASK.problem("test", i).answer) + i % 2
            ids = np.array(TOKENIZER.encode(f"# {answer % 200}") + [1], np.int32)
            logp = ids * (math.nan if i in self.poisoned else 0.0)
            response = Response(ids, ids > 0, logp, None, 0.0 * ids[:, None], "stop")
            groups.append([replace(response) for _ in of_group])
        return groups

    def solve(self, indices, samples: int, seed=0, **more):
        self.todo = list(indices)
        one = tasks.EvalSet(TASK, "arith", samples, 1.0, 32)
        return evaluation.solve(self, one, TOKENIZER, indices, Sampling(), seed, [1], **more)


TASK, TOKENIZER = Arithmetic(), arithmetic_tokenizer()


def test_right_is_above_a_half(monkeypatch):
    """The gold answer to every second problem: 1/2. A reward for the format alone is no right answer."""
    right, length = GoldEngine().solve(list(range(40)), 2)
    assert right.shape == (40, 2) and right.mean() == 0.5 and length == 3
    rewards = (0.1, 0.5, 0.51, 1.5)

    def grade(task, tokenizer, problems, groups):
        for response, reward in zip(sum(groups, []), rewards * len(groups), strict=True):
            response.reward = reward

    monkeypatch.setattr(evaluation, "grade_all", grade)
    assert GoldEngine().solve([0, 1], 4)[0].tolist() == 2 * [[0, 0, 1, 1]]


@pytest.mark.parametrize("indices", [[0, 1, 2], []])
def test_ranks_of_one_engine_sample_equally_often(indices, monkeypatch):
    """The second rank of this engine has two problems, one a round: this rank joins every round."""
    monkeypatch.setattr(tasks, "at_once", lambda samples: 1)
    engine = GoldEngine()
    engine.any_rank = lambda condition: condition or len(engine.sizes) < 2
    assert engine.solve(indices, 3)[0].size == 3 * len(indices)
    assert engine.sizes == [1] * len(indices) + [0] * (2 - len(indices))


def test_poisoned_answers_are_graded_and_counted_over_all_rounds(monkeypatch):
    """One problem a round; half of all responses end the evaluation."""
    monkeypatch.setattr(tasks, "at_once", lambda samples: 1)
    assert GoldEngine({2}).solve([0, 1, 2], 2)[0].mean(1).tolist() == [1, 0, 1]
    with pytest.raises(UserError, match="of 4 responses 2 have log-probabilities"):
        GoldEngine({2}).solve([1, 2], 2)
    GoldEngine({2}).solve([1, 2], 2, summed=lambda counts: [counts[0], 2 * counts[1]])  # fewer over two ranks


def test_every_response_has_a_different_seed():
    """Seeds depend on problem, sample and --seed, not on the set of evaluated problems."""

    def seeds_of(indices, seed) -> np.ndarray:
        engine = GoldEngine()
        engine.solve(indices, 3, seed)
        return np.array(engine.seeds, object)

    zero, one = seeds_of([0, 1, 2, 3], 0), seeds_of([0, 1, 2, 3], 1)
    assert len({*zero.flat, *one.flat}) == 24 and (seeds_of([3, 1], 0) == zero[[3, 1]]).all()


def test_held_out_sums_over_ranks(monkeypatch):
    """Two ranks with equal scores: the same mean, and the standard error of twice as many problems."""
    cfg, seen = make_cfg(objective="grpo", eval_problems=20, max_tokens=8), []
    scores = np.array([[1.0]] * 3 + [[0.0]] * 7)
    monkeypatch.setattr(evaluation, "solve", lambda *args, summed: seen.append([args[3], summed([3])]) or (scores, 4.0))
    comm = SimpleNamespace(on=False, rank=1, size=2, sum=lambda values: [2 * float(x) for x in values])
    learner = SimpleNamespace(comm=comm, device="cpu", models=SimpleNamespace(policy=tiny_model(0), vocabulary=None))
    run = SimpleNamespace(cfg=cfg, tokenizer=TOKENIZER, stop_ids=[1], eval_sets=held_out_sets(cfg, TASK))
    result = evaluation.held_out(learner, "policy", run)
    assert seen == [[list(range(1, 20, 2)), [6]]]
    assert (result["pass@1"], result["se"]) == pytest.approx((0.3, math.sqrt(0.21 / 19)))


def test_shards_are_evaluated_with_a_full_copy_in_float32():
    """For every dtype in the config; without a random draw."""
    model = tiny_model(3)
    model.config.dtype = torch.bfloat16
    models = SimpleNamespace(policy=model, vocabulary=200)
    learner = SimpleNamespace(comm=SimpleNamespace(on=True), device="cpu", models=models)
    learner.named_tensors = lambda name: model.state_dict().items()
    before = torch.get_rng_state()
    engine = evaluation.sampler_of(learner, "policy", make_cfg(parallel="fsdp"))
    assert torch.equal(torch.get_rng_state(), before)
    assert engine.model is not model and {p.dtype for p in engine.model.parameters()} == {torch.float32}
    ids = np.array([[3, 9, 27, 81], [7, 49, 1, 2]])
    assert np.array_equal(engine.logprobs(ids), HFEngine(model, vocabulary=200).logprobs(ids))
    assert evaluation.sampler_of(learner, "policy", make_cfg(parallel="ddp")).model is model


@pytest.mark.parametrize("head_fp32", [False, True])
def test_an_evaluation_in_16_bits_samples_the_policy_that_the_learner_trains(head_fp32):
    """Updates of less than half a bfloat16 step change the float32 policy, but not the trained one."""
    cfg = make_cfg(dtype="bfloat16", lm_head_fp32=head_fp32)
    model = tiny_model(3).bfloat16().float()
    models = SimpleNamespace(policy=model, vocabulary=200)
    learner = SimpleNamespace(comm=SimpleNamespace(on=False), device="cpu", models=models)
    ids, found = np.array([[3, 9, 27, 81], [7, 49, 1, 2]]), []
    for change in (0.0, 0.9 * 2**-9):
        with torch.no_grad():
            for layer in (m for m in model.model.modules() if isinstance(m, torch.nn.Linear)):
                layer.weight.mul_(1 + change)
        engine = evaluation.sampler_of(learner, "policy", cfg)
        found.append((engine.logprobs(ids), HFEngine(model, vocabulary=200).logprobs(ids)))
    (trained, plain), (trained_later, plain_later) = found
    assert np.array_equal(trained, trained_later) and not np.array_equal(plain, plain_later)
    assert 0 < np.abs(trained - plain).max() < 0.05
    other = evaluation.sampler_of(learner, "policy", make_cfg(dtype="bfloat16", lm_head_fp32=not head_fp32))
    assert not np.array_equal(other.logprobs(ids), trained)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_evaluation_samples_in_the_checkpoints_dtype(evaluated, folders, tmp_path, monkeypatch, dtype):
    model = shutil.copytree(folders / "policy", tmp_path / "model")
    load_model(str(model)).to(getattr(torch, dtype)).save_pretrained(model)
    used, make_engine = [], evaluation.make_engine
    monkeypatch.setattr(evaluation, "make_engine", lambda cfg, *more: used.append(cfg) or make_engine(cfg, *more))
    for more in ([], ["--dtype=bfloat16"], ["--dtype=bfloat16", "--rollout_dtype=float32"]):
        evaluated("--max_tokens=2", "--problems=1", *more, model=model)
    assert [cfg.rollout_dtype for cfg in used] == [dtype, "bfloat16", "float32"]


SPARE = TOKENIZER.convert_tokens_to_ids("<spare0>")


def test_evaluation_in_training_has_the_runs_stop_tokens_and_reward(folders, evaluated, solved, tmp_path, hub):
    """Stop tokens of both models, in a folder and on the hub, apply to both; --eval_task is graded by --reward."""
    policy = with_stop_tokens(folders / "policy", tmp_path / "policy", [1, 8])
    with_stop_tokens(folders / "actor", hub("some/actor"), [1, 9])
    file = str(table(tmp_path / "x.jsonl", *"111"))
    flags = {"task": file, "reward": "gsm8k", "eval_task": f"{file}:temperature=0.5:samples=2", "stop": "<spare0>"}
    cfg = make_cfg(
        model=str(policy), actor="some/actor", max_tokens=4, group_size=2, out=str(tmp_path / "run"), **flags
    )
    models = SimpleNamespace(policy=tiny_model(0), actor=tiny_model(1), vocabulary=256)
    learner = SimpleNamespace(models=models, comm=Comm(), device="cpu", version=0)
    evaluation.held_out(learner, "actor", open_run(cfg, Comm()))
    assert evaluated.calls[0][4] == [1, 8, 9, SPARE]
    [(one, *_)] = solved
    assert (one.task.reward.parts[0].name, one.samples, one.temperature, one.max_tokens) == ("gsm8k", 2, 0.5, 4)


def flags_of_run(model, out, *more) -> list[str]:
    common = ["--rollout=hf", "--actor=none", "--objective=tis", "--max_tokens=6", "--lr=1e-4", "--dtype=float32"]
    sizes = ["--rollout_batch=8", "--train_batch=8", "--group_size=4", "--eval_problems=8"]
    return [*common, *sizes, "--stop=<spare0>", f"--model={model}", f"--out={out}", *more]


def test_a_run_keeps_its_stop_tokens_to_the_last_checkpoint(folders, solved, tmp_path):
    """From the starting folder through a resume to the evaluation of the last checkpoint."""
    origin, out = with_stop_tokens(folders / "policy", tmp_path / "policy", [1, 8]), tmp_path / "run"
    for argv in (flags_of_run(origin, out, "--task=arith", "--steps=1"), ["--resume", f"--out={out}", "--steps=2"]):
        cfg = settings.parse(argv)
        run = open_run(cfg, Comm())
        described = describe_run(cfg, run, 0, 0)
        assert session.open_source(cfg, run, Comm()).stop_ids == described.stop_ids == [1, 8, SPARE]
        assert described.config["rollout_dtype"] == cfg.rollout_dtype
        train.train(cfg)
    saved = out / "checkpoints" / "step_000002" / "policy" / "generation_config.json"
    assert saved.read_bytes() == (origin / "generation_config.json").read_bytes()
    solved.clear()
    for more in ([], ["--stop="]):
        evaluation.main([f"--model={out}", "--rollout=hf", "--problems=4", "--samples=2", *more])
    assert [call[-2] for call in solved] == [[1, 8, SPARE], [1, 8]]


def test_a_remote_sampler_has_the_learners_stop_tokens_and_reward(folders, tmp_path):
    """Through the welcome message, even if the sampler's host has none of the prompt files."""
    origin = with_stop_tokens(folders / "policy", tmp_path / "policy", [1, 8])
    rows = 3 * [{"problem": "1 + 1", "answer": "2"}] + [{"problem": "1 + 1 + 1 + 1", "answer": "4"}]
    file = write_rows(tmp_path / "x.jsonl", rows)
    texts = {"system_prompt": "3 + 4", "prompt_template": "{problem} =", "chat_template": "{{ messages[1].content }} #"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    more = [f"--task={file}", "--reward=gsm8k*0.5,think", "--max_prompt_tokens=6", "--columns=prompt=problem"]
    cfg = settings.parse(flags_of_run(origin, tmp_path / "run", *more, *(f"--{x}={tmp_path / x}" for x in texts)))
    run = open_run(cfg, Comm())
    setup = wire.pack_setup(str(origin))
    assert "generation_config.json" in setup
    description = describe_run(cfg, run, 0, 0)
    names = {f.name for kind in (config.TaskFlags, config.PromptFlags) for f in fields(kind)} - texts.keys()
    names |= {"check_sync"}
    assert {name: description.config.get(name, "-") for name in names} == {x: getattr(cfg, x) for x in names}
    welcome = wire.decode(wire.encode(wire.Welcome("session", description, setup)))
    for name in texts:  # the sampler's host has no such files
        (tmp_path / name).unlink()
    flags = SamplerFlags(rollout="hf", task=file, groups=5)
    assert configure(description, flags).rollout_batch == 5 * cfg.group_size
    source = open_source(welcome, flags, tmp_path / "sampler")
    assert source.stop_ids == [1, 8, SPARE] and source.task.reward == run.task.reward
    assert source.task.size == run.task.size == 3  # the long prompt is dropped on both sides
    asked = [one.tokenizer.decode(encode(one.tokenizer, one.task.problem("test", 0))) for one in (source, run)]
    assert asked == 2 * ["1 + 1 = #"]


def test_the_setup_of_several_sets(folders, tmp_path):
    """The largest context of all sets, which must fit the sampler too; stop tokens of learner, sampler and --stop."""
    a, b = table(tmp_path / "a.jsonl", "1", problem="7 + " * 20 + "7"), table(tmp_path / "b.jsonl", "1", problem="7")
    sets = f"{a}:max_tokens=2,{b}:max_tokens=30"
    model = with_stop_tokens(folders / "actor", tmp_path / "pair" / "policy", [1, 8])
    with_stop_tokens(folders / "actor", tmp_path / "pair" / "actor", [7])
    sampler = with_stop_tokens(folders / "actor", tmp_path / "sampler", [9])

    def setup(task, sampler=""):
        flags = [f"--model={model}", f"--task={task}", "--rollout=hf", "--reward=boxed", "--stop=<spare0>"]
        cfg = evaluation.filled(parse_flags(evaluation.EvalFlags, [*flags, "--max_tokens=30"]))
        return evaluation.open_setup(cfg, 8, str(sampler) or None)

    alone = [setup(word).context for word in sets.split(",")]
    assert alone[0] != alone[1] and setup(sets).context == max(alone)
    assert setup(sets).stop_ids == [1, 8, 7, SPARE] and setup(sets, sampler).stop_ids == [1, 8, 9, 7, SPARE]
    with pytest.raises(UserError, match="exceeds the model's context"):
        setup(sets, copied(sampler, tmp_path / "short", max_position_embeddings=max(alone) - 1))
