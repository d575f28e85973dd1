"""Two multi-turn environments, as examples for tasks/turns.py.

--task=tasks/games.py:Calculator    products of a two- and a one-digit number, with a calculator
--task=tasks/games.py:Guess         a number from 1 to 20, after "higher" and "lower"
"""

from __future__ import annotations

import re

from rollout import generator

TURNS = 6  # guesses


def numbers_in(text: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d{1,9}", text)]


# an example conversation with the calculator
SHOWN = [
    {"role": "user", "content": "Compute 31 * 4."},
    {"role": "assistant", "content": "calc(31 * 4)"},
    {"role": "user", "content": "Result: 124"},
    {"role": "assistant", "content": "124"},
]


class Calculator:
    """An environment in which the model writes calc(A * B), reads the result and repeats it."""

    size = None

    def problem(self, split: str, index: int) -> dict:
        a, b = generator("calculator", split, index).integers((12, 3), (99, 10)).tolist()
        problem = [*SHOWN, {"role": "user", "content": f"Compute {a} * {b}."}]
        return {"problem": problem, "answer": str(a * b)}

    def reply(self, row: dict, messages: list[dict], text: str) -> str | None:
        call = re.search(r"calc\((\d{1,6}) ?([*+-]) ?(\d{1,6})\)", text)
        # an answer, or a second call
        if call is None or messages[-1]["content"].startswith("Result"):
            return None
        a, b = int(call[1]), int(call[3])
        return f"Result: {a * b if call[2] == '*' else a + b if call[2] == '+' else a - b}"

    def reward(self, row: dict, text: str, finish_reason: str) -> dict[str, float]:
        answers = numbers_in(text.rpartition(")")[2])
        return {
            "called": 0.2 * ("calc(" in text),
            "right": float(answers[-1:] == [int(row["answer"])]),
        }


class Guess:
    """An environment in which the model guesses a number and is told "higher" or "lower"."""

    size = None

    def problem(self, split: str, index: int) -> dict:
        number = int(generator("guess", split, index).integers(1, 21))
        question = f"I think of a number from 1 to 20. Guess it in {TURNS} turns. Answer with one number in each turn."
        return {"problem": question, "answer": str(number)}

    def reply(self, row: dict, messages: list[dict], text: str) -> str | None:
        guess = numbers_in(text)[-1:]
        if not guess or guess == [int(row["answer"])] or len(messages) >= 2 * TURNS - 1:
            return None
        return "higher" if guess[0] < int(row["answer"]) else "lower"

    def reward(self, row: dict, text: str, finish_reason: str) -> float:
        return float(numbers_in(text)[-1:] == [int(row["answer"])])
