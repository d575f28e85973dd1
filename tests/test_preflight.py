"""Prompts, gold answers and rewards that contradict each other are reported before a model loads."""

from dataclasses import replace

import pytest
from conftest import make_cfg, write_rows

from machinery.flags import UserError
from machinery.settings import unlike_paper
from tasks import grading_metrics, make_task
from tasks.arith import arithmetic_tokenizer
from tasks.data import OwnTask, digest_of
from tasks.preflight import warnings_of
from tasks.prompts import Answer, Chat, render
from tasks.rewards import ends_with_number

THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"


def table(tmp_path, rows, name="rows.jsonl", **flags):
    """The task of a file with (problem, answer) rows, fitted to a tokenizer."""
    path = write_rows(tmp_path / name, [{"problem": p, "answer": a} for p, a in rows])
    task = make_task(replace(make_cfg(), task=path, max_tokens=16, **flags))
    task.fit(arithmetic_tokenizer())
    return task


BOX = "2 + 3 in \\boxed{}"


@pytest.mark.parametrize(
    "problem, template, reward, sentence",
    [
        ("2 + 3", "", "math", ""),
        ("2 + 3", "plain", "math", "--reward=math reads \\boxed in a response"),
        (BOX, "plain", "gsm8k", "--reward=gsm8k reads #### in a response"),
        ("2 + 3", "", "math,think", "--reward=think reads <think>"),
        ("<think> 2", "plain", "think", "--reward=think reads <answer> in a response, and 2 of 2 prompts"),
        ("<answer> 2 <think>\n", "plain", "think", ""),
        ("<answer> 2 <think>\n\n</think>\n", "plain", "think", "has begun or ended the thinking"),
        ("mixed", "plain", "math", "and 1 of 2 prompts do not ask for it;"),
    ],
)
def test_prompt_and_reward_that_contradict(tmp_path, problem, template, reward, sentence):
    rows = [(BOX if problem == "mixed" else problem, "5"), (problem, "5")]
    task = table(tmp_path, rows, prompt_template=template, reward=reward)
    warnings = warnings_of(task, arithmetic_tokenizer())
    assert len(warnings) == bool(sentence)
    assert all(sentence in w and w.startswith(str(tmp_path / "rows.jsonl")) for w in warnings)


WRONG = [("math", "1 = 2"), ("math", "\\frac{1}{2"), ("gsm8k", "\\frac{14}{3}"), ("letter", "7")]


@pytest.mark.parametrize("reward, answer", WRONG)
def test_gold_answers_that_no_response_can_give_are_counted(tmp_path, reward, answer):
    fine = "B" if reward == "letter" else "5"
    task = table(tmp_path, [("p", fine), ("q", answer), ("r", fine)], reward=reward)
    (sentence,) = warnings_of(task, arithmetic_tokenizer())
    assert f"1 of 3 gold answers are graded wrong by --reward={reward}" in sentence and repr(answer) in sentence


def test_control_tokens_in_problems_are_counted(tmp_path):
    task = table(tmp_path, [("p <eos> 5", "5"), ("q", "1"), ("<eos>", "7")], reward="math")
    (sentence,) = warnings_of(task, arithmetic_tokenizer())
    assert "2 problem(s) hold control tokens" in sentence


@pytest.mark.parametrize(
    "answer, why",
    [
        ("\frac{1}{2}", "holds a control character"),  # LaTeX with a single backslash in JSON
        ("x \notin S", "holds a control character"),
        *((fine, "") for fine in ("\\{1, 2\\}", "a) 5", "[0, 1)")),
    ],
)
def test_damaged_answers_are_refused(tmp_path, answer, why):
    if why:
        with pytest.raises(UserError, match=f"line 1: the `answer` .* {why}"):
            table(tmp_path, [("p", answer)])
    score = tmp_path / "own.py"
    score.write_text("def score(row, text, finish_reason):\n    return 1.0\n")
    task = table(tmp_path, [("p", answer)], reward=f"{score}:score" if why else "math")  # a function can read any text
    assert task.problem("test", 0).answer == answer.strip()
    several = table(tmp_path, [("p", ["5", "five"])], reward=f"{score}:score").problem("test", 0)
    assert several.row["answer"] == ["5", "five"]  # columns reach the function unchanged
    with pytest.raises(UserError, match="line 1: the problem holds a control character"):
        table(tmp_path, [("p \frac12", "5")])


@pytest.mark.parametrize("template, opened", [(THINKS, True), (THINKS.replace("<think>", "go"), False)])
def test_think_continues_the_prompt(tmp_path, template, opened):
    """A chat template can write the opening tag: then the response contains only the closing tag."""
    assert table(tmp_path, [("2 + 3", "5")], reward="think*0.2,math").reward.parts[0].name == "math"
    task = table(tmp_path, [("2 + 3", "5")], reward="think")
    task.style = replace(task.style, chat=Chat(template=template))
    task.fit(arithmetic_tokenizer())
    problem = task.problem("test", 0)
    closed = Answer(problem, "2 and 3.\n</think>\n<answer>5</answer>", True)
    whole = Answer(problem, "<think>2 and 3.</think><answer>5</answer>", True)
    assert task.rewards([closed, whole])[0] == [float(opened), float(not opened)]
    own = tmp_path / "own.py"
    own.write_text("class Sums:\n    size = None\n    problem = lambda *_: {'problem': '2 + 3', 'answer': '5'}\n")
    endless = OwnTask(f"{own}:Sums", task.style, replace(task.reward, opened=not opened))
    endless.fit(arithmetic_tokenizer(), 50)
    assert endless.reward.opened == opened


def test_a_mix_of_files(tmp_path):
    """The rows of the first file, then of the second; the digest is over both contents."""
    a, b = tmp_path / "a.JSONL", tmp_path / "b.jsonl"
    write_rows(a, [{"problem": f"p{i}", "answer": str(i)} for i in range(2)])
    write_rows(b, [{"problem": "p2", "answer": "2"}])
    task = make_task(replace(make_cfg(), task=f"{a},{b}", max_tokens=16, prompt_template="plain"))
    problems = [task.problem("test", i) for i in range(3)]
    assert [(p.id, p.prompt, p.answer) for p in problems] == [(f"a+b/{i}", f"p{i}", str(i)) for i in range(3)]
    before = digest_of(f"{a},{b}")
    assert before != digest_of(str(a)) and digest_of(f"{b},{a}") != before
    write_rows(b, [{"problem": "p2", "answer": "3"}])
    assert digest_of(f"{a},{b}") != before


def test_differences_from_a_papers_settings_are_named():
    for changes, words in (
        ({"objective": "gepo", "delay": "lognormal"}, ["--cppo_beta=0.0 (0.005)", "--max_staleness=None (64)"]),
        ({"objective": "gspo", "delay": "constant"}, ["--ratio_base=ref (inf)", "--window_seconds=inf (1800.0)"]),
        ({"objective": "tis_adjusted"}, ["configs/papers/jackpot_stale.toml", "--clip=True (False)"]),
        ({"objective": "grpo"}, []),
    ):
        line = unlike_paper(make_cfg(actor="none", **changes))
        assert all(word in line for word in words) and bool(line) == bool(words) == line.count("\n")


def test_a_date_in_a_chat_template_is_fixed_for_a_run(tmp_path, monkeypatch):
    """Prompts do not depend on the host's clock: not over midnight, and not on remote samplers."""
    today = "{% for m in messages %}{{ m.content }}{% endfor %} on {{ strftime_now('%d %b %Y') }}"
    task = table(tmp_path, [("2 + 3", "5")], chat_date="2026-03-01")
    task.style = replace(task.style, chat=replace(task.style.chat, template=today))
    tokenizer = arithmetic_tokenizer()
    assert render(tokenizer, task.problem("test", 0))[0].endswith(" on 01 Mar 2026")
    assert make_cfg().chat_date and make_cfg(chat_date="2026-03-01").chat_date == "2026-03-01"
    with pytest.raises(UserError, match="--chat_date=soon: not a date; write YYYY-MM-DD"):
        table(tmp_path, [("2 + 3", "5")], chat_date="soon")


def test_inexact_right_answers_are_counted(tmp_path):
    """Right answers that math accepts with a different final number, if the gold answer is a plain number."""
    task = table(tmp_path, [("p", "12"), ("q", "x+1")], reward="math")
    plain, formula = task.problem("test", 0), task.problem("test", 1)
    texts = ["\\boxed{12}", "so \\boxed{12}", "\\boxed{10 + 2}", "7", "\\boxed{12} or 5"]
    answers = [Answer(plain, text, True) for text in texts] + [Answer(formula, "\\boxed{x+1}", True)]
    earned, counts = task.rewards(answers)
    assert (counts["plain"], counts["inexact"]) == (5, earned[2]) and earned[2] == 1
    assert grading_metrics(counts)["grade/inexact"] == 1 / 5
    assert not ends_with_number("\n" * 300_000, "5")  # in quadratic time: half an hour
