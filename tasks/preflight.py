"""Warnings, before a model loads, if prompts, gold answers and rewards do not fit together."""

from __future__ import annotations

import re

from tasks.builtin import TEMPLATE_OF
from tasks.prompts import Answer, render

TRIED = 32  # gold answers that are graded
# form in which a response gives its answer, for each reward
IN_BOX, AT_END = "The answer is $\\boxed{{{}}}$.", "#### {}"
HONEST = {"math": IN_BOX, "gsm8k": AT_END, "praxis": AT_END, "letter": IN_BOX}
# marks in the templates
MARKS = {"boxed": "\\boxed", "letter": "\\boxed", "hashes": "####"}
ASKED_BY = {name: (MARKS[template],) for name, template in TEMPLATE_OF.items()}
ASKED_BY |= {"think": ("<think>", "<answer>")}
# end of a prompt with more than the opening tag
BEGUN = r"<think>(?!\s*$)[^<]*(?:</think>\s*)?$"


def warnings_of(task, tokenizer) -> list[str]:
    """Warnings about the prompts, the gold answers and the reward of a task with rows."""
    reward = getattr(task, "reward", None)
    if reward is None or not task.size:
        return []
    n = min(TRIED, task.size)
    # of all mixed files
    problems = [task.problem("test", i * task.size // n) for i in range(n)]
    prompts = [render(tokenizer, problem)[0] for problem in problems]
    sentences = [
        unasked(task, prompts),
        misgraded(task, problems),
        control_tokens(task, tokenizer),
    ]
    return [f"{task.name}: {sentence}" for sentence in sentences if sentence]


def unasked(task, prompts: list[str]) -> str:
    """A warning if a prompt does not ask for a mark that the reward reads, or, for
    --reward=think, if the prompt has begun or ended the thinking; else ""."""
    for part in task.reward.parts:
        for mark in ASKED_BY.get(part.name, ()):
            silent = sum(mark not in prompt for prompt in prompts)
            if silent:
                return (
                    f"--reward={part.name} reads {mark} in a response, and {silent} of {len(prompts)} prompts "
                    "do not ask for it; print a prompt with eval.py --show_prompt, or ask for it with "
                    "--prompt_template or --system_prompt"
                )
        if part.name == "think" and re.search(BEGUN, prompts[0]):
            return (
                "--reward=think reads <think> in a response, and the prompt has begun or ended the thinking; let the "
                "chat template end with <think> (--chat_kwargs or --chat_template)"
            )
    return ""


def misgraded(task, problems: list) -> str:
    """A warning if responses with the gold answers are graded wrong, else ""."""
    name = task.reward.parts[0].name
    if name not in HONEST:
        return ""
    golds = [p.answer for p in problems]
    wrong = [
        gold
        for gold, r in zip(golds, right(task, problems, golds), strict=True)
        if not r
    ]
    if not wrong:
        return ""
    return (
        f"{len(wrong)} of {len(problems)} gold answers are graded wrong by --reward={name} when a "
        f"response gives them, such as {wrong[0]!r:.60}; correct the answers, or change --reward"
    )


def right(task, problems: list, answers: list[str]) -> list[bool]:
    """Whether the reward's first part grades responses with these answers right."""
    part = task.reward.parts[0]
    texts = [HONEST[part.name].format(answer) for answer in answers]
    asked = [Answer(p, text, True) for p, text in zip(problems, texts, strict=True)]
    return [value == 1 for value in task.reward.values(part, asked)]


def control_tokens(task, tokenizer) -> str:
    """A warning if problems contain texts that the tokenizer reads as control tokens, else ""."""
    specials = [x for x in tokenizer.get_added_vocab() if x.startswith(("<", "["))]
    n = sum(any(x in str(row["prompt"]) for x in specials) for row in task.rows)
    if not n:
        return ""
    return (
        f"{n} problem(s) hold control tokens of the tokenizer, such as the end of a turn, and the model reads them "
        "as control tokens; remove them unless they are intended"
    )
