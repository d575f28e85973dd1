"""Does the grader accept a file's own answers, and refuse changed ones? (eval.py
--grade_gold=FILE)"""

from __future__ import annotations

from tqdm import tqdm

from config import TaskFlags
from machinery.flags import need
from tasks.data import Table, columns_of, read_rows
from tasks.prompts import Answer, Style
from tasks.rewards import Reward, check_libraries

BATCH = 256  # answers that are graded at once


def wrapped(answer: str) -> str:
    """A file's own answer as a response would give it."""
    return f"The answer is $\\boxed{{{answer}}}$."


def perturbed(answer: str) -> str:
    """A wrong answer close to a right one: its first non-zero digit changed, or a term added where
    there is none."""
    for i, digit in enumerate(answer):
        if digit in "123456789":
            other = "8" if digit == "9" else str(int(digit) + 1)
            return answer[:i] + other + answer[i + 1 :]
    return answer + " + 1"


def grade_gold(path: str, cfg: TaskFlags) -> dict:
    """Does the grader accept a file's own answers, and refuse changed ones? Prints both shares and
    each exception.

    cfg: --columns counts. UserError: another grader than `math`
    is asked for."""
    need(
        cfg.reward in ("", "math"),
        f"--reward={cfg.reward}: --grade_gold tries the grader of math; leave it out",
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
