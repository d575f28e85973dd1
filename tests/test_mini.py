"""mini.py and train.py are one algorithm: the same seed gives the same metrics, update for update."""

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, TINY_TASK, tiny_model

import config
import mini
import train
from machinery import run, settings
from tasks import Arithmetic, arithmetic_tokenizer

SIZES = {"steps": 20, "rollout_batch": 64, "group_size": 8, "max_tokens": 10, "eval_problems": 64, **TINY_TASK}
CASES = {
    # one update for each rollout, as in mini.py's own settings: ref is the policy of that very update
    "one update": {"train_batch": 64, "lr": 1e-3, "actor_lr": 2e-3},
    # four: ref stands still while the policy moves, and PPO clips; every bound is reached, and prompts need padding
    "four updates": {
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
# rel, abs: a mean of numbers of size 1 that cancel is known to the precision of 1, not of what is left
TOLERANCE = {"float32": (1e-4, 1e-6), "float64": (1e-9, 1e-12)}


def in_float64(from_pretrained):
    """What from_pretrained loads, in float64 whatever is asked for, with an RMSNorm that does not round to float32."""

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
    """The rows of metrics.jsonl; the first is the evaluation before training."""
    monkeypatch.setattr(train, "catch_signals", lambda: [])
    train.train(settings.parse(flags(solvers, out, **case)))
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def set_up(monkeypatch, **case):
    values = {**SIZES, **case}
    sums = (part.split("=") for part in values.pop("arith").split(","))
    for name, value in {**values, **{f"task_{name}": int(value) for name, value in sums}}.items():
        monkeypatch.setattr(mini, name.upper(), value)


def by_mini(solvers, monkeypatch, **case):
    """The same rows, with mini.py's metrics."""
    set_up(monkeypatch, **case)
    load = transformers.AutoModelForCausalLM.from_pretrained
    models = {name: load(solvers / name, dtype=torch.float32) for name in ("policy", "actor")}

    def scores():
        pairs = {name: mini.evaluate(model) for name, model in models.items()}
        means = {f"eval/{name}_pass@1": mean for name, (mean, _) in pairs.items()}
        return means | {f"eval/{name}_se": se for name, (_, se) in pairs.items()}

    before = scores()
    rows = mini.train(models["policy"], models["actor"])
    rows[-1] |= scores()
    return [before, *rows]


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_metric_is_train_pys(case, precision, solvers, tmp_path, monkeypatch):
    """In float64 both sides compute in float64, but sample from float32 logits, as engines do: p_inf is float32."""
    if precision == "float64":
        original = transformers.AutoModelForCausalLM.from_pretrained
        double = in_float64(original)
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", double)
        monkeypatch.setattr(run, "unread", double)
    want, got = by_train(solvers, tmp_path / "run", monkeypatch, **case), by_mini(solvers, monkeypatch, **case)
    assert len(got) == len(want) == 21
    rel, absolute = TOLERANCE[precision]
    for step, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for name, value in mine.items():
            assert value == pytest.approx(theirs[name], rel=rel, abs=absolute), (step, name)
    # the comparison means something: rewards differ within groups, tokens are rejected, both models move
    rewards = [row["reward"] for row in got[1:]]
    assert max(rewards) > 0 and min(rewards) < 1 and max(row["grad_norm"] for row in got[1:]) > 0.01
    accepted = [row["obrs/accept_rate"] for row in got[1:]]
    assert 0.05 < min(accepted) < 0.99
    assert (max(row["clip_fraction"] for row in got[1:]) > 0.01) == (case["train_batch"] < SIZES["rollout_batch"])


def test_problems_and_rewards_are_the_tasks():
    task, tokenizer = Arithmetic(), arithmetic_tokenizer()
    for split in ("train", "test"):
        for i in range(100):
            problem = task.problem(split, i)
            assert mini.problem(split, i) == (problem.id, problem.answer)
            assert mini.encode(problem.prompt).tolist() == tokenizer.encode(problem.prompt)
    right, wrong, eos = (mini.encode(text).tolist() for text in (task.solution(problem), "# 31", "<eos>"))
    responses = [right, wrong, right + wrong, right[:-1]]
    for extra in (0, 2, 255):  # <pad> and <unk>, which a grader never sees, and a word that stands for nothing
        responses += [right + [extra], right[:-1] + [extra] + right[-1:]]
    for tokens in responses + [response + eos for response in responses]:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        want = task.reward(problem, text, finished=tokens[-1:] == eos)
        assert mini.grade(torch.tensor(tokens), problem.answer) == want, text


def test_it_prints_train_pys_table_and_draws(solvers, tmp_path, monkeypatch, capsys):
    case = {"steps": 3, "train_batch": 64}
    by_train(solvers, tmp_path / "run", monkeypatch, **case)
    want = capsys.readouterr().out
    set_up(monkeypatch, **case, out=str(tmp_path / "new" / "mini.png"))
    folders = f"{solvers / 'policy'}\n{solvers / 'actor'}\n"
    monkeypatch.setattr(
        mini.subprocess, "run", lambda command, **options: SimpleNamespace(stdout=folders, returncode=0)
    )
    mini.main()
    got = capsys.readouterr().out
    table = got[: got.index("curves")].strip()
    assert table.count("\n") == 7 and table in want
    assert (tmp_path / "new" / "mini.png").read_bytes().startswith(b"\x89PNG")


def test_its_settings_are_the_demos():
    cfg = settings.parse([f"--config={ROOT}/configs/demo.toml", "--rollout=hf"])
    names = [name for name in vars(mini) if name.isupper() and hasattr(cfg, name.lower())]
    assert len(names) == 17
    for name, value in {"MIN_OPS": 3, "MAX_OPS": 5, "OPERAND": 9, "TOTAL": 29}.items():
        assert getattr(mini, f"TASK_{name}") == getattr(Arithmetic(), name.lower()) == value
    for name in set(names) - {"STEPS", "OUT"}:
        assert getattr(mini, name) == getattr(cfg, name.lower()), name


def test_it_stands_alone_in_300_lines():
    source = (ROOT / "mini.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 300
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    own = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules and not own & {module.split(".")[0] for module in modules}
