"""Multi-turn environments, as examples for tasks/turns.py.

--task=tasks/games.py:Calculator      products of a two- and a one-digit number, with a calculator
--task=tasks/games.py:WordProblems    GSM8K with the calculator; first write the splits of
                                      openai/gsm8k to out/gsm8k_train.jsonl and gsm8k_test.jsonl
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from rollout import generator
from tasks.rewards import ends_with_number

NUMBER = r"(\d{1,6}(?:\.\d{1,2})?)"


def conversation(*texts: str) -> list[dict]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


class Calculator:
    """An environment in which the model writes calc(A * B), reads the result and repeats it."""

    size = None
    calls = 1  # most calls for a problem
    shown = conversation("Compute 31 * 4.", "calc(31 * 4)", "Result: 124", "124")

    def problem(self, split: str, index: int) -> dict:
        a, b = (
            generator("calculator", split, index).integers((12, 3), (99, 10)).tolist()
        )
        problem = [*self.shown, {"role": "user", "content": f"Compute {a} * {b}."}]
        return {"problem": problem, "answer": str(a * b)}

    def reply(self, row: dict, messages: list[dict], text: str) -> str | None:
        call = re.search(rf"calc\({NUMBER} ?([*+/-]) ?{NUMBER}\)", text)
        results = [
            message["content"].startswith("Result") for message in messages[-1::-2]
        ]
        if call is None or all(results[: self.calls]):  # an answer, or a call too many
            return None
        a, b = float(call[1]), float(call[3])
        values = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else 0.0}
        return f"Result: {values[call[2]]:.12g}"

    def reward(self, row: dict, text: str, finish_reason: str) -> dict[str, float]:
        right = ends_with_number(text.rpartition(")")[2], row["answer"])
        return {"called": 0.2 * ("calc(" in text), "right": float(right)}


class WordProblems(Calculator):
    """GSM8K with the calculator, at most four calls for a problem. Both splits have the size of the
    test file, so most training problems are not used."""

    calls = 4
    shown = conversation(
        "A box holds 3 red pens and 12 blue pens. How many pens do 4 boxes hold?",
        *("calc(3 + 12)", "Result: 15", "calc(15 * 4)", "Result: 60", "60"),
    )

    def __init__(self):
        files = {split: Path(f"out/gsm8k_{split}.jsonl") for split in ("train", "test")}
        lines = {split: path.read_text().splitlines() for split, path in files.items()}
        self.rows = {split: list(map(json.loads, lines[split])) for split in files}
        self.size = min(map(len, lines.values()))

    def problem(self, split: str, index: int) -> dict:
        row = self.rows[split][index]
        answer = row["answer"].rpartition("#### ")[2].replace(",", "")
        problem = [*self.shown, {"role": "user", "content": row["question"]}]
        return {"problem": problem, "answer": answer}
