"""Sums of two small numbers, for a pretrained model: --task=results/sums.py:Sums --max_tokens=16;
products for a larger one: --task=results/sums.py:Products --max_tokens=24."""

from __future__ import annotations

import random
import re


class Sums:
    """`What is a + b?` with a, b from 1 to 20; 80 of the 400 problems are held out."""

    size = 320  # training problems; the index repeats beyond the size

    def __init__(self):
        pairs = [(a, b) for a in range(1, 21) for b in range(1, 21)]
        random.Random(1).shuffle(pairs)
        self.pairs = {"test": pairs[:80], "train": pairs[80:]}

    def problem(self, split: str, index: int) -> dict:
        """The row of a problem."""
        pairs = self.pairs[split]
        a, b = pairs[index % len(pairs)]
        return {"problem": f"What is {a} + {b}?", "answer": str(a + b)}

    def reward(self, row: dict, text: str, finish_reason: str) -> float:
        """1 if the last number in the text is the answer, otherwise 0; `16 + 17` does not count as 33."""
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
        return float(numbers[-1:] == [row["answer"]])


class Products(Sums):
    """`What is a * b?` with a, b from 11 to 30; 80 of the 400 problems are held out."""

    def problem(self, split: str, index: int) -> dict:
        """The row of a problem."""
        pairs = self.pairs[split]
        a, b = (x + 10 for x in pairs[index % len(pairs)])
        return {"problem": f"What is {a} * {b}?", "answer": str(a * b)}
