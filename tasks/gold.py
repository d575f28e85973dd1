"""Test of the grader on a file: it should accept gold answers and reject changed answers (eval.py
--grade_gold=FILE)."""

from __future__ import annotations

from tqdm import tqdm

from config import TaskFlags
from machinery.flags import need
from tasks.data import Table, columns_of, read_rows
from tasks.prompts import Answer, Style
from tasks.rewards import Reward, check_libraries

BATCH = 256  # answers that are graded at once


def wrapped(answer: str) -> str:
    """A gold answer in the form of a response."""
    return f"The answer is $\\boxed{{{answer}}}$."


def perturbed(answer: str) -> str:
    """A wrong answer close to a right answer: the first non-zero digit changed, or a term added if
    there is no such digit."""
    for i, digit in enumerate(answer):
        if digit in "123456789":
            other = "8" if digit == "9" else str(int(digit) + 1)
            return answer[:i] + other + answer[i + 1 :]
    return answer + " + 1"


def grade_gold(path: str, cfg: TaskFlags) -> dict:
    """Grade a file's gold answers and changed answers, and print the share of each that is
    accepted, with all errors.

    Raises UserError if --reward is set to a different grader than `math`."""
    need(
        cfg.reward in ("", "math"),
        f"--reward={cfg.reward}: --grade_gold checks only the grader of math; leave it out",
    )
    reward = Reward()
    check_libraries(reward, path)
    task = Table(path, read_rows(path, "grade_gold", columns_of(cfg)), Style(), reward)
    gold = changed = 0
    for start in tqdm(range(0, task.size, BATCH), desc="grade"):
        problems = [task.problem("test", i) for i in range(start, min(start + BATCH, task.size))]
        answers = [Answer(p, wrapped(p.answer), True) for p in problems]
        other = [Answer(p, wrapped(perturbed(p.answer)), True) for p in problems]
        rewards, _ = task.rewards(answers + other)
        for p, right, wrong in zip(
            problems, rewards[: len(answers)], rewards[len(answers) :], strict=True
        ):
            gold += right == 1
            changed += wrong == 1
            if not right:
                tqdm.write(f"gold answer refused: {p.answer}")
            if wrong:
                tqdm.write(f"changed answer accepted: {perturbed(p.answer)} for {p.answer}")
    n = task.size
    print(
        f"{path}: {gold} of {n} gold answers graded right ({100 * gold / n:.2f} %), "
        f"{changed} of {n} changed answers ({100 * changed / n:.2f} %)"
    )
    return {"file": path, "problems": n, "gold": gold / n, "changed": changed / n}
