"""Prompts, gold answers and rewards that contradict each other are reported before a model loads."""

import gzip
import json
from dataclasses import replace

import pytest
from conftest import ROOT, make_cfg

from config import Config
from machinery.flags import UserError, read_toml
from machinery.settings import resolve_open, unlike_paper
from presets import RECIPES
from tasks import Answer, arithmetic_tokenizer, digest_of, grading_metrics, make_task
from tasks.preflight import warnings_of
from tasks.prompts import Chat, render

THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"


def table(tmp_path, rows, name="rows.jsonl", **flags):
    """The task of a file with (problem, answer) rows, fitted to a tokenizer."""
    path = tmp_path / name
    path.write_text("".join(json.dumps({"problem": p, "answer": a}) + "\n" for p, a in rows), encoding="utf-8")
    task = make_task(replace(make_cfg(), task=str(path), max_tokens=16, **flags))
    task.fit(arithmetic_tokenizer())
    return task


def test_prompt_and_reward_that_agree(tmp_path):
    for reward in ("math", "gsm8k", "math,boxed*0.5", ""):
        task = table(tmp_path, [("2 + 3", "5"), ("1 + 1", "2")], reward=reward)
        assert warnings_of(task, arithmetic_tokenizer()) == []


@pytest.mark.parametrize(
    "problem, flags, sentence",
    [
        (
            "2 + 3? End with ####.",
            {"reward": "math", "prompt_template": "plain"},
            "asks for ####, which --reward=gsm8k",
        ),
        ("2 + 3", {"reward": "math", "prompt_template": "plain"}, "--reward=math reads \\boxed in a response"),
        (
            "2 + 3 in \\boxed{}",
            {"reward": "gsm8k", "prompt_template": "plain"},
            "asks for \\boxed, which --reward=math",
        ),
        ("2 + 3", {"reward": "math,think"}, "--reward=think reads <think>"),
    ],
)
def test_prompt_and_reward_that_contradict(tmp_path, problem, flags, sentence):
    (warning,) = warnings_of(table(tmp_path, [(problem, "5")], **flags), arithmetic_tokenizer())
    assert sentence in warning and warning.startswith(str(tmp_path / "rows.jsonl"))


def test_gold_answers_that_no_response_can_give(tmp_path):
    task = table(tmp_path, [("p", "5"), ("q", "9^{9^{9^9}} + 1"), ("r", "7")], reward="math")
    task.reward = replace(task.reward, seconds=0.5)
    (warning,) = warnings_of(task, arithmetic_tokenizer())
    assert "1 of the first 3 gold answers are graded wrong by --reward=math" in warning and "9^{9^{9^9}} + 1" in warning


def test_control_tokens_in_problems_are_counted(tmp_path):
    rows = [("1 + 1 <eos> 5", "2"), ("2 + 2", "4"), ("<eos>", "1")]
    (warning,) = warnings_of(table(tmp_path, rows), arithmetic_tokenizer())
    assert "2 problem(s) hold control tokens" in warning


@pytest.mark.parametrize("template, opened", [(THINKS, True), (THINKS.replace("<think>", "go"), False)])
def test_think_continues_the_prompt(tmp_path, template, opened):
    """A chat template can write the opening tag: then the response contains only the closing tag."""
    task = table(tmp_path, [("2 + 3", "5")], reward="think")
    task.style = replace(task.style, chat=Chat(template=template))
    task.fit(arithmetic_tokenizer())
    problem = task.problem("test", 0)
    closed = Answer(problem, "2 and 3.\n</think>\n<answer>5</answer>", True)
    whole = Answer(problem, "<think>2 and 3.</think><answer>5</answer>", True)
    assert task.rewards([closed, whole])[0] == [float(opened), float(not opened)]


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["\frac{1}{2}", "\text{no}", "3 \rho", "\nu", "a\x00", "\beta"])
def test_an_answer_with_a_control_character_is_refused(tmp_path, answer):
    """LaTeX with a single backslash in JSON."""
    with pytest.raises(UserError, match="line 1: the `answer` .* holds a control character"):
        table(tmp_path, [("p", f"x{answer} y")])
    score = tmp_path / "own.py"
    score.write_text("def score(row, text, finish_reason):\n    return 1.0\n")
    table(tmp_path, [("p", f"x{answer} y")], reward=f"{score}:score")  # a custom function can read any text


@pytest.mark.parametrize(
    "answer, whole", [("\\frac{1}{2", False), ("2}", False), ("\\{1, 2\\}", True), ("[0, 1)", True)]
)
def test_braces_of_an_answer(tmp_path, answer, whole):
    if whole:
        assert table(tmp_path, [("p", answer)]).problem("test", 0).answer == answer
    else:
        with pytest.raises(UserError, match="has an unclosed brace"):
            table(tmp_path, [("p", answer)])


def test_a_mix_of_files_and_packed_ones(tmp_path):
    """The rows of the first file, then of the second; the digest is over both contents."""
    a, b = tmp_path / "a.JSONL", tmp_path / "b.jsonl.gz"
    a.write_text('{"problem": "p0", "answer": "0"}\n{"problem": "p1", "answer": "1"}\n')
    b.write_bytes(gzip.compress(b'{"problem": "p2", "answer": "2"}\n'))
    cfg = replace(make_cfg(), task=f"{a},{b}", max_tokens=16, prompt_template="plain")
    task = make_task(cfg)
    problems = [task.problem("test", i) for i in range(3)]
    assert [(p.id, p.prompt, p.answer) for p in problems] == [(f"a+b/{i}", f"p{i}", str(i)) for i in range(3)]
    before = digest_of(cfg.task)
    assert before != digest_of(str(a)) and digest_of(f"{b},{a}") != before
    b.write_bytes(gzip.compress(b'{"problem": "p2", "answer": "3"}\n'))
    assert digest_of(cfg.task) != before
    with pytest.raises(UserError, match="c.jsonl: no such file"):
        make_task(replace(cfg, task=f"{a},{tmp_path}/c.jsonl"))
    (tmp_path / "d.jsonl.zst").write_bytes(b"x")
    with pytest.raises(UserError, match="the compression is not gzip; unpack the file first"):
        make_task(replace(cfg, task=str(tmp_path / "d.jsonl.zst")))


# ---------------------------------------------------------------------------------------------------------------------
# Settings and clocks
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"objective": "gepo", "delay": "lognormal"}, ["--cppo_beta=0.0 (0.005)", "--max_staleness=None (64)"]),
        ({"objective": "grpo", "delay": "constant"}, ["--ratio_base=ref (inf)", "--window_seconds=inf (1800.0)"]),
        ({"objective": "jackpot"}, ["configs/papers/jackpot.toml"]),
        ({"objective": "grpo"}, []),
        ({"objective": "vespo"}, []),
    ],
)
def test_differences_from_a_papers_settings_are_named(changes, words):
    line = unlike_paper(make_cfg(actor="none", **changes))
    assert all(word in line for word in words) and bool(line) == bool(words) and line.count("\n") == bool(words)


@pytest.mark.parametrize("name", ["gepo", "jackpot", "tis", "tbpo"])
def test_a_recipe_has_its_papers_settings(name):
    path = ROOT / "configs" / "papers" / f"{RECIPES[name]}.toml"
    cfg = resolve_open(Config(**read_toml(Config, str(path))))
    assert cfg.objective == name and unlike_paper(cfg) == ""


def test_a_date_in_a_chat_template_is_fixed_for_a_run(tmp_path, monkeypatch):
    """Prompts do not depend on the host's clock: not over midnight, and not on remote samplers."""
    today = "{% for m in messages %}{{ m.content }}{% endfor %} on {{ strftime_now('%d %b %Y') }}"
    task = table(tmp_path, [("2 + 3", "5")], chat_date="2026-03-01")
    task.style = replace(task.style, chat=replace(task.style.chat, template=today))
    tokenizer = arithmetic_tokenizer()
    assert render(tokenizer, task.problem("test", 0))[0].endswith(" on 01 Mar 2026")
    cfg = make_cfg()
    assert cfg.chat_date and make_cfg(chat_date="2026-03-01").chat_date == "2026-03-01"
    with pytest.raises(UserError, match="--chat_date=soon: not a date; write YYYY-MM-DD"):
        table(tmp_path, [("2 + 3", "5")], chat_date="soon")


def test_inexact_right_answers_are_counted(tmp_path):
    """Right answers that math accepts with a different final number, if the gold answer is a plain number."""
    task = table(tmp_path, [("p", "12"), ("q", "x+1")], reward="math")
    plain, formula = task.problem("test", 0), task.problem("test", 1)
    texts = ["\\boxed{12}", "so \\boxed{12}", "\\boxed{10 + 2}", "7", "\\boxed{12} or 5"]
    earned, counts = task.rewards(
        [Answer(plain, text, True) for text in texts] + [Answer(formula, "\\boxed{x+1}", True)]
    )
    assert (counts["plain"], counts["exact"]) == (5, 3)
    exact = [True, True, False, False, True]
    assert counts["right_inexact"] == sum(r == 1 and not e for r, e in zip(earned[:5], exact, strict=True)) > 0
    values = grading_metrics(counts)
    assert values["grade/exact"] == 3 / 5 and values["grade/inexact"] == counts["right_inexact"] / 5
