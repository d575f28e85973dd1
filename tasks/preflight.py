"""Warnings, before a model loads, if prompts, gold answers and rewards do not fit together."""

from __future__ import annotations

from tasks.builtin import TEMPLATE_OF
from tasks.gold import wrapped
from tasks.prompts import Answer, Problem, render

TRIED = 32  # gold answers that are graded
# form in which a response gives its answer, for each reward
HONEST = {
    "math": wrapped,
    "gsm8k": "#### {}".format,
    "praxis": "#### {}".format,
    "letter": wrapped,
}
MARKS = {"boxed": "\\boxed", "letter": "\\boxed", "hashes": "####"}  # marks in the templates
ASKED_BY = {name: MARKS[template] for name, template in TEMPLATE_OF.items()} | {"think": "<think>"}


def warnings_of(task, tokenizer) -> list[str]:
    """Warnings about the prompts, the gold answers and the reward of a task with rows."""
    reward = getattr(task, "reward", None)
    if reward is None or not task.size:
        return []
    problems = [task.problem("test", i) for i in range(min(TRIED, task.size))]
    sentences = [unasked(task, tokenizer, problems[0]), misgraded(task, problems)]
    sentences.append(control_tokens(task, tokenizer))
    return [f"{task.name}: {sentence}" for sentence in sentences if sentence]


def unasked(task, tokenizer, problem: Problem) -> str:
    """A warning if the first prompt does not ask for the mark that the reward reads, else ""."""
    prompt = render(tokenizer, problem)[0]
    for part in task.reward.parts:
        mark = ASKED_BY.get(part.name)
        if mark is None or mark in prompt:
            continue
        others = [name for name, other in ASKED_BY.items() if other in prompt and other != mark]
        instead = (
            f"; it asks for {ASKED_BY[others[0]]}, which --reward={others[0]} reads"
            if others
            else ""
        )
        return (
            f"--reward={part.name} reads {mark} in a response, and the first prompt does not ask for it{instead}; "
            "print the prompt with eval.py --show_prompt, or ask for it with --prompt_template or --system_prompt"
        )
    return ""


def misgraded(task, problems: list[Problem]) -> str:
    """A warning if responses with the gold answers are graded wrong, else ""."""
    part = task.reward.parts[0]
    if part.name not in HONEST:
        return ""
    answers = [Answer(p, HONEST[part.name](p.answer), True) for p in problems]
    values = task.reward.values(part, answers)
    wrong = [p.answer for p, value in zip(problems, values, strict=True) if value != 1]
    if not wrong:
        return ""
    return (
        f"{len(wrong)} of the first {len(problems)} gold answers are graded wrong by --reward={part.name} when a "
        f"response gives them, such as {wrong[0]!r:.60}; eval.py --grade_gold lists such answers for --reward=math"
    )


def control_tokens(task, tokenizer) -> str:
    """A warning if problems contain texts that the tokenizer reads as control tokens, else ""."""
    specials = [x for x in tokenizer.get_added_vocab() if x.startswith("<") or x.startswith("[")]
    n = 0
    for row in task.rows if isinstance(task.rows, list) else []:
        prompt = row["prompt"]
        texts = [m["content"] for m in prompt] if isinstance(prompt, list) else [prompt]
        n += any(x in text for x in specials for text in texts)
    if not n:
        return ""
    return (
        f"{n} problem(s) hold control tokens of the tokenizer, such as the end of a turn, and the model reads them "
        "as control tokens; remove them unless they are intended"
    )
