"""Warnings, before a model loads, if prompts, gold answers and rewards do not fit together."""

from __future__ import annotations

import re

from tasks.builtin import TEMPLATE_OF
from tasks.prompts import Answer, render

TRIED = 32  # gold answers that are graded
# form in which a response gives its answer, for each reward
IN_BOX, AT_END = "The answer is $\\boxed{{{}}}$.", "#### {}"
HONEST = {"math": IN_BOX, "gsm8k": AT_END, "praxis": AT_END, "letter": IN_BOX}
MARKS = {"boxed": "\\boxed", "letter": "\\boxed", "hashes": "####"}  # marks in the templates
ASKED_BY = {name: (MARKS[template],) for name, template in TEMPLATE_OF.items()}
ASKED_BY |= {"think": ("<think>", "<answer>")}
BEGUN = r"<think>(?!\s*$)[^<]*(?:</think>\s*)?$"  # end of a prompt with more than the opening tag


def warnings_of(task, tokenizer) -> list[str]:
    """Warnings about the prompts, the gold answers and the reward of a task with rows."""
    reward = getattr(task, "reward", None)
    if reward is None or not task.size:
        return []
    n = min(TRIED, task.size)
    problems = [task.problem("test", i * task.size // n) for i in range(n)]  # of all mixed files
    prompts = [render(tokenizer, problem)[0] for problem in problems]
    sentences = [unasked(task, prompts), misgraded(task, problems)]
    return [f"{task.name}: {sentence}" for sentence in sentences if sentence]


def unasked(task, prompts: list[str]) -> str:
    """A warning if a prompt does not ask for a mark that the reward reads, or has it already; else
    ""."""
    for part in task.reward.parts:
        for mark in ASKED_BY.get(part.name, ()):
            silent = [prompt for prompt in prompts if mark not in prompt]
            if not silent:
                continue
            return (
                f"--reward={part.name} reads {mark} in a response, and {len(silent)} of {len(prompts)} prompts do not "
                "ask for it; print a prompt with eval.py --show_prompt, or ask for it with "
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
    part = task.reward.parts[0]
    if part.name not in HONEST:
        return ""
    answers = [Answer(p, HONEST[part.name].format(p.answer), True) for p in problems]
    values = task.reward.values(part, answers)
    wrong = [p.answer for p, value in zip(problems, values, strict=True) if value != 1]
    if not wrong:
        return ""
    return (
        f"{len(wrong)} of {len(problems)} gold answers are graded wrong by --reward={part.name} when a "
        f"response gives them, such as {wrong[0]!r:.60}"
    )
