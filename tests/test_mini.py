"""mini.py and train.py are one algorithm: the same seed gives the same metrics in every update."""

import ast
import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, TINY_TASK, tiny_model

import config
import mini
import train
from machinery import run, session, settings
from machinery.flags import BASE_ACCURACY
from tasks.arith import Arithmetic, arithmetic_tokenizer

SIZES = {"steps": 12, "rollout_batch": 64, "group_size": 8, "max_tokens": 10, "eval_problems": 64, **TINY_TASK}
CASES = {
    # one update for each rollout, as in mini.py: ref is the policy of the same update; three micro-batches
    "one update": {"train_batch": 96, "rollout_batch": 96, "lr": 1e-3, "actor_lr": 2e-3},
    # four updates: ref is constant, the policy moves, PPO clips; every bound is reached, prompts need padding
    "four updates": {
        "group_size": 2,  # the ref pass has two parts
        "train_batch": 16,
        "arith": "min_ops=1,max_ops=2,operand=3,total=9",
        "max_tokens": 16,
        "lr": 1e-3,
        "actor_lr": 2e-3,
        "obrs_lambda": 1.3,
        "obrs_c1": 1.05,
        "clip_low": 0.05,
        "clip_high": 0.07,
        "distill_lambda": 0.5,
        "warmup_steps": 3,
        "grad_clip": 0.2,
        "seed": 3,
    },
}
# rel, abs: a mean of cancelling numbers of size 1 has the precision of 1, not of the remainder
TOLERANCE = {"float32": (1e-4, 1e-6), "float64": (1e-9, 1e-12)}


def in_float64(from_pretrained):
    """Models of from_pretrained in float64 for every requested dtype, with an RMSNorm that stays in float64."""

    def load(folder, **options):
        loaded = from_pretrained(folder, **options)
        model, *rest = loaded if isinstance(loaded, tuple) else (loaded,)
        double = tiny_model(0, layers=model.config.num_hidden_layers, dtype=torch.float64)
        double.load_state_dict(model.state_dict())
        return (double, *rest) if rest else double

    return load


def flags(solvers, out, **changes):
    values = {"model": solvers / "policy", "actor": solvers / "actor", "rollout": "hf", "out": out, "eval_every": 0}
    return [f"--{name}={value}" for name, value in {**config.EMBEDDED, **values, **SIZES, **changes}.items()]


def by_train(solvers, out, monkeypatch, **case):
    """The rows of metrics.jsonl; the first row is the evaluation before training."""
    monkeypatch.setattr(session, "catch_signals", lambda: [])
    train.train(settings.parse(flags(solvers, out, **case)))
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def set_up(monkeypatch, **case):
    values = {**SIZES, "micro_batch": 32, "device": "cpu", **case}
    sums = (part.split("=") for part in values.pop("arith").split(","))
    for name, value in {**values, **{f"task_{name}": int(value) for name, value in sums}}.items():
        monkeypatch.setattr(mini, name.upper(), value)


def by_mini(solvers, monkeypatch, **case):
    """The same rows with mini.py's metrics."""
    set_up(monkeypatch, **case)
    load = transformers.AutoModelForCausalLM.from_pretrained
    models = {name: load(solvers / name, dtype=torch.float32) for name in ("policy", "actor")}

    def scores():
        pairs = {name: mini.evaluate(model, mini.Addition()) for name, model in models.items()}
        means = {f"eval/{name}_pass@1": mean for name, (mean, _) in pairs.items()}
        return means | {f"eval/{name}_se": se for name, (_, se) in pairs.items()}

    before = scores()
    rows = mini.train(models["policy"], models["actor"], mini.Addition())
    rows[-1] |= scores()
    return [before, *rows]


@pytest.mark.parametrize("name, precision", [(name, "float64") for name in CASES] + [("four updates", "float32")])
def test_every_metric_equals_train_pys(name, precision, solvers, tmp_path, monkeypatch):
    """In float64 both sides compute in float64, but sample from float32 logits like engines: p_inf is float32."""
    case = CASES[name]
    if precision == "float64":
        original = transformers.AutoModelForCausalLM.from_pretrained
        double = in_float64(original)
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", double)
        monkeypatch.setattr(run, "unread", double)
    want, got = by_train(solvers, tmp_path / "run", monkeypatch, **case), by_mini(solvers, monkeypatch, **case)
    assert len(got) == len(want) == 13
    rel, absolute = TOLERANCE[precision]
    for step, (mini_row, train_row) in enumerate(zip(got, want, strict=True)):
        for name, value in mini_row.items():
            assert value == pytest.approx(train_row[name], rel=rel, abs=absolute), (step, name)
    # the comparison is not trivial: rewards differ within groups, tokens are rejected, both models move
    rewards = [row["reward"] for row in got[1:]]
    assert max(rewards) > 0 and min(rewards) < 1 and max(row["grad_norm"] for row in got[1:]) > 0.01
    accepted = [row["obrs/accept_rate"] for row in got[1:]]
    assert 0.05 < min(accepted) < 0.99
    assert (max(row["clip_fraction"] for row in got[1:]) > 0.01) == (case["train_batch"] < SIZES["rollout_batch"])


def test_problems_and_rewards_equal_the_tasks(monkeypatch):
    monkeypatch.setattr(mini, "TASK_TOTAL", 29)
    task, toy, tokenizer = Arithmetic(), mini.Addition(), arithmetic_tokenizer()
    problem = task.problem("test", 29)
    assert toy.problem("test", 29) == (problem.id, problem.answer)
    assert toy.encode(problem.id) == tokenizer.encode(problem.prompt)
    right, wrong, eos = (tokenizer.encode(text) for text in (task.solution(problem), "# 31", "<eos>"))
    responses = [right, wrong, right + wrong, right[:-1]]
    for extra in (0, 2, 255):  # <pad> and <unk>, invisible for a grader, and an unused word
        responses += [right + [extra], right[:-1] + [extra] + right[-1:]]
    for tokens in responses + [response + eos for response in responses]:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        want = task.reward(problem, text, finished=tokens[-1:] == eos)
        assert toy.grade(tokens, problem.answer) == want, text


def test_the_demonstrations_are_right_half_of_the_time():
    """A fifth of three to five steps is wrong."""
    toy = mini.Addition()
    right = [toy.grade(toy.demonstration(i)[1], toy.problem("train", i)[1]) for i in range(300)]
    assert 0.2 < sum(right) / 300 < 0.6


def test_mini_runs_alone(monkeypatch, capsys):
    """A small warm start, training and evaluation of the toy task."""
    small, config_class = {"num_hidden_layers": 1, "intermediate_size": 64}, mini.transformers.Qwen3Config
    monkeypatch.setattr(mini.transformers, "Qwen3Config", lambda **sizes: config_class(**{**sizes, **small}))
    set_up(monkeypatch, steps=1, train_batch=64, base_accuracy=0.0)
    mini.main()
    assert capsys.readouterr().out.count("held-out pass@1") == 2


def test_real_models_and_a_file(solvers, tmp_path, monkeypatch, capsys):
    """Two folders with a tokenizer, and problems of a JSONL file under both column names."""
    names = ("problem", "question")
    task = Arithmetic(**{name: int(value) for name, value in (p.split("=") for p in TINY_TASK["arith"].split(","))})
    problems = [task.problem("train", i) for i in range(64)]
    rows = [{names[i % 2]: f"{p.id} :", "answer": f"#### {p.answer}"} for i, p in enumerate(problems)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    folders = {"model": str(solvers / "policy"), "actor": str(solvers / "actor"), "data": str(tmp_path / "sums.jsonl")}
    set_up(monkeypatch, steps=2, train_batch=64, **folders)
    policy, actor, file = mini.load()
    assert file.ends == [1]
    assert len(file.rows["test"]) == 8 and len(file.rows["train"]) == 56
    assert file.problem("train", 0) == (f"{problems[1].id} :", float(problems[1].answer))
    eos = file.tokenizer.encode("<eos>")
    response = file.tokenizer.encode("3 + 4 = 7 # 19")
    assert [file.grade(x, 19.0) for x in (response + eos, response, eos)] == [1, 0, 0]
    assert file.grade(response + eos, 18.0) == 0
    file.tokenizer.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %} # {% endif %}"
    assert file.encode("3 + 4") == file.tokenizer.encode("3 + 4 #")
    mini.main()
    assert capsys.readouterr().out.count("held-out pass@1") == 2


def test_minis_settings_equal_the_demos():
    cfg = settings.parse([f"--config={ROOT}/configs/demo.toml", "--rollout=hf"])
    exceptions = {"STEPS", "MODEL", "ACTOR", "EVAL_PROBLEMS"}  # three minutes, and no folders
    names = [name for name in vars(mini) if name.isupper() and hasattr(cfg, name.lower()) and name not in exceptions]
    assert len(names) == 14
    for name in names:
        assert getattr(mini, name) == getattr(cfg, name.lower()), name
    assert mini.BASE_ACCURACY == BASE_ACCURACY


def test_mini_imports_no_file_of_the_repository():
    source = (ROOT / "mini.py").read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    files = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules and not files & {module.split(".")[0] for module in modules}
