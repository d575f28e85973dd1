"""Tasks: generated arithmetic, files, prompts, and the tokens that end a response."""

import hashlib
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import copied, make_cfg

from machinery import checkpoint, warmstart
from machinery.checkpoint.models import load_model
from model.engines import HFEngine
from rollout import Response, request_seed
from sampling import Sampling
from source import LocalSource
from tasks import grade_all, make_task
from tasks.arith import Arithmetic, arithmetic_tokenizer
from tasks.data import Table
from tasks.prompts import Problem, Style, stop_ids
from tasks.rewards import Reward


def held_out(problem) -> bool:
    """The rule that separates train and test: one problem in eight, by the hash of its text."""
    return hashlib.sha256(problem.id.encode()).digest()[0] < 32


@pytest.mark.parametrize("operand, total", [(9, 29), (20, 29), (150, 199)])
def test_arithmetic_is_verifiable_deterministic_and_split(operand, total):
    make = partial(Arithmetic, operand=operand, total=total)
    task, tokenizer = make(seed=3), arithmetic_tokenizer()
    train = [task.problem("train", i) for i in range(300)]
    test = [task.problem("test", i) for i in range(100)]
    assert not any(map(held_out, train)) and all(map(held_out, test))
    assert train == [make(seed=3).problem("train", i) for i in range(300)]
    assert train != [make(seed=4).problem("train", i) for i in range(300)]
    for p in train + test:
        words = p.id.split()
        at = int(words[0])
        for sign, b in zip(words[1::2], words[2::2], strict=True):
            assert 1 <= int(b) <= operand
            at += int(b) if sign == "+" else -int(b)
            assert 0 <= at <= total
        assert str(at) == p.answer and task.find(p.id) == p and 3 <= len(words) // 2 <= 5
        text = task.solution(p)
        assert (task.reward(p, text, True), task.reward(p, text, False)) == (1.0, 0.0)
        ids = tokenizer.encode(text)
        assert len(ids) + 1 <= task.max_response() and len(tokenizer.encode(p.prompt)) <= task.fit(tokenizer)
        assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text


def test_solutions_with_slips_continue_from_the_wrong_value():
    task = Arithmetic()
    wrong = 0
    for i in range(300):
        p = task.problem("train", i)
        text = task.solution(p, slips=0.2)
        wrong += task.reward(p, text, True) == 0.0
        steps = [s.split() for s in text.split(" # ")[0].split(" ; ")]
        assert all(before[4] == after[0] for before, after in pairwise(steps))
        assert text.split(" # ")[1] == steps[-1][4]
    assert 0.3 < wrong / 300 < 0.8


SUM = Problem("3 + 4", "3 + 4 :", "7")


def test_only_finished_responses_are_right():
    ids = np.array(arithmetic_tokenizer().encode("# 7"), np.int32)
    group = [Response(ids, ids >= 0, ids, ids[:, None], ids[:, None], reason) for reason in ("stop", "length")]
    grade_all(Arithmetic(), arithmetic_tokenizer(), [SUM], [group])
    assert [r.reward for r in group] == [1.0, 0.0]


@pytest.mark.parametrize(
    "text, short, long",
    [
        ("3 + 4 = 7 # 7", 1, 1),
        ("# 7 ; 3 + 4 = 7", 0, 1 + 6 / 8),
        ("# 7" + " ;" * 30, 0, 2),
        ("# 8 ; 3 + 4 = 7", 0, 0),
        ("# 7 ; # 8", 0, 0),
        ("3 + 4 = 7 ; 7", 0, 0),
        ("# 77", 0, 0),
    ],
)
def test_arithmetic_reward(text, short, long):
    """A right answer at the end; with explanations one `#` and a bonus for the text after it, finished or not."""
    assert Arithmetic().reward(SUM, text, True) == short
    assert [Arithmetic(explain=8).reward(SUM, text, finished) for finished in (True, False)] == [long, long]


def test_demonstrations_with_explanations():
    task, tokenizer = Arithmetic(explain=224), arithmetic_tokenizer()
    behind = []
    for i in range(300):
        p = task.problem("train", i)
        text = task.solution(p)
        steps = text.split(" # ")[0].split(" ; ")
        answer, *restated = text.split(" # ")[1].split(" ; ")
        assert answer == p.answer and set(restated) <= set(steps)
        assert len(tokenizer.encode(text)) + 1 <= task.max_response()
        assert task.reward(p, text, True) == pytest.approx(1 + 6 * len(restated) / 224)
        behind.append(len(restated))
    assert 4 < sum(behind) / 300 < 6 and max(behind) == 16
    short = [Arithmetic(explain=7).solution(task.problem("train", i)).split(" # ")[1].count(";") for i in range(50)]
    assert max(short) == 1


def with_stop_tokens(folder, to, ends):
    """A copy of a model folder with these stop tokens in its generation_config.json."""
    return copied(folder, to, "generation_config.json", eos_token_id=ends, temperature=0.6)


def test_stop_tokens_of_tokenizer_models_and_flag(folders, tmp_path):
    tokenizer = arithmetic_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["\n\n"]})
    two, one, none = (
        with_stop_tokens(folders / "actor", tmp_path / str(i), ends) for i, ends in enumerate(([9, 1, 8], 12, None))
    )
    assert stop_ids(tokenizer, []) == [1]
    assert stop_ids(tokenizer, [two, one, none, "base:policy"]) == [1, 9, 8, 12]
    bare = copied(folders / "actor", tmp_path / "bare", eos_token_id=[7, 8])
    (bare / "generation_config.json").unlink(missing_ok=True)
    assert stop_ids(tokenizer, [bare]) == [1, 7, 8]
    assert stop_ids(tokenizer, [one], "#, ;,") == [1, 12, tokenizer.encode("#")[0], tokenizer.encode(";")[0]]
    assert stop_ids(tokenizer, [], "\n\n") == [1, tokenizer.convert_tokens_to_ids("\n\n")]
    for word in ("1 2", "2000"):
        with pytest.raises(ValueError, match=f"--stop={word}: not one token of the model's vocabulary"):
            stop_ids(tokenizer, [], f";,{word}")
    for wrong in ([1, "x"], [True]):
        with pytest.raises(ValueError, match="generation_config.json: its eos_token_id lists"):
            stop_ids(tokenizer, [with_stop_tokens(folders / "actor", tmp_path / str(wrong), wrong)])
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no token that ends a response"):
        stop_ids(tokenizer, [none])


def test_both_engines_stop_at_several_tokens(engine):
    """Responses end at the first stop token, include it, and have finish_reason "stop"."""
    prompt = np.array(arithmetic_tokenizer().encode("3 + 4 :"), np.int32)
    seeds = [[request_seed("ends", i) for i in range(64)]]
    sampling = Sampling(max_tokens=24)
    free = engine.generate([prompt], seeds, sampling, 0, [1])[0]
    common = Counter(int(t) for r in free for t in r.tokens).most_common(3)
    second = next(t for t, _ in common if t != 1)
    group = engine.generate([prompt], seeds, sampling, 0, [1, second])[0]
    assert {second} <= {int(r.tokens[-1]) for r in group if r.finish_reason == "stop"} <= {1, second}
    assert all(len(r.tokens) == 24 for r in group if r.finish_reason == "length")
    assert not any({1, second} & {*r.tokens[:-1].tolist()} for r in group)
    for short, long in zip(group, free, strict=True):  # otherwise the responses are equal
        assert short.tokens.tolist() == long.tokens[: len(short.tokens)].tolist()


def test_a_source_ends_responses_and_reports_its_grading(folders):
    """A random model never writes a box; metrics are reported once."""
    task = Table("x", [{"prompt": "p", "answer": "5", "row": {}}], Style(), Reward(max_tokens=12, overlong=6))
    settings = {"group_size": 8, "topk": 0, "model": "actor", "check": None, "stop_ids": list(range(100))}
    engine = HFEngine(str(folders / "actor"))
    source = LocalSource(engine, task, arithmetic_tokenizer(), Sampling(max_tokens=12), **settings)
    responses = [r for step in range(2) for g in source.next(2, step) for r in g.responses]
    assert all(r.tokens[-1] < 100 for r in responses if r.finish_reason == "stop")
    assert all((r.tokens[:-1] >= 100).all() for r in responses)
    penalty = np.mean([max(0, len(r.tokens) - 6) / 6 for r in responses])
    logged = source.metrics()
    assert (logged["grade/timeouts"], logged["grade/unboxed"], logged["reward/math"]) == (0, 1, 0)
    assert logged["reward/overlong"] == pytest.approx(-penalty) and penalty > 0 and source.metrics() == {}


def test_a_base_model_is_made_once_for_each_recipe(tmp_path, monkeypatch):
    """Policy and actor can have different target accuracies, each in a folder. Other keys would hide existing ones."""
    calls = []

    def warm_start(name, task, target, folder):
        calls.append((name, target))
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(warmstart, "warm_start", warm_start)
    monkeypatch.setattr(warmstart.models, "check_weights", lambda folder: None)
    monkeypatch.setattr(checkpoint.models, "BASE_DIR", str(tmp_path))
    cfg, names = make_cfg(), ("policy", "policy@0.3", "actor@0.1", "actor@0.1", "actor")
    folders = {warmstart.base_model("actor", f"base:{name}", cfg) for name in names}
    assert calls == [("policy", 0.3), ("actor", 0.1), ("actor", 0.3)]
    assert len(folders) == len(list(tmp_path.iterdir())) == 3
    assert warmstart.base_model("model", "base:policy", replace(cfg, arith="explain=8")) not in folders
    assert warmstart.recipe_key("policy", Arithmetic(), 0.3) == "7f2e071048"
    assert warmstart.recipe_key("actor", Arithmetic(), 0.3) == "ec17287593"


@pytest.mark.parametrize("file, is_complete", [("config.json", True), ("model.safetensors", False)])
def test_the_first_of_two_processes_that_make_a_base_model_wins(file, is_complete, tmp_path, monkeypatch):
    """The second process uses a complete folder, and replaces an incomplete one of a killed process."""
    monkeypatch.setattr(checkpoint.models, "BASE_DIR", str(tmp_path))
    cfg = make_cfg()
    final = tmp_path / f"policy-{warmstart.recipe_key('policy', make_task(cfg), 0.3)}"

    def made_meanwhile(_, task, target, folder):
        for place, name in ((final, file), (folder, "config.json")):
            place.mkdir(parents=True)
            (place / name).write_text(str(place))

    monkeypatch.setattr(warmstart, "warm_start", made_meanwhile)
    assert warmstart.base_model("model", "base:policy", cfg) == str(final)
    assert [*tmp_path.iterdir()] == [final] and [path.name for path in final.iterdir()] == ["config.json"]
    assert ((final / "config.json").read_text() == str(final)) == is_complete


def test_accuracy_of_a_base_model_ignores_bonuses(folders, monkeypatch):
    """The warm start stops at a share of right answers, independent of the bonus for explanations."""

    def grade_half(task, tokenizer, problems, groups):
        for i, group in enumerate(groups):
            group[0].reward = 1.7 if i % 2 else 0.0

    monkeypatch.setattr(warmstart, "grade_all", grade_half)
    model = load_model(str(folders / "actor"))
    assert warmstart.accuracy(model, arithmetic_tokenizer(), Arithmetic(1, 1, 3, 9), 0, 8) == 0.5


def test_a_lucky_draw_does_not_end_a_warm_start(tmp_path, monkeypatch):
    """The target is confirmed on more problems, disjoint from the frequently checked ones."""
    problems, luck = [], iter([0.1, 0.5, 0.2, 0.5, 0.4])

    def accuracy(model, tokenizer, task, first, n):
        problems.append(range(first, first + n))
        return next(luck)

    monkeypatch.setattr(warmstart, "accuracy", accuracy)
    monkeypatch.setattr(warmstart, "BATCH", 8)
    assert warmstart.warm_start("actor", Arithmetic(1, 1, 3, 9), 0.4, tmp_path / "actor") == 0.4
    few, many = problems[0], problems[2]
    assert problems == [few, few, many, few, many]
    assert len(many) >= 1024 and not set(few) & set(many)


def test_a_warm_start_ignores_only_padding(monkeypatch):
    """Loss and gradient of a batch in four parts equal transformers' loss and gradient of the whole padded batch."""
    monkeypatch.setattr(warmstart, "BATCH", 10)  # parts of unequal size
    tokenizer = arithmetic_tokenizer()
    ids, labels = warmstart.demonstrations(Arithmetic(1, 3, 9, 40, explain=48), tokenizer, 7)
    model = warmstart.new_model("actor", 5, tokenizer)
    whole = model(input_ids=ids, labels=labels).loss
    wanted = torch.autograd.grad(whole, list(model.parameters()))
    assert warmstart.backward(model, ids, labels) == pytest.approx(whole.item(), rel=1e-5)
    for p, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)
