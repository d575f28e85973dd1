"""`--task=arith`: an endless supply of generated sums with worked steps.

The vocabulary has one token for every number 0..199. The right response to "38 + 7 - 12 :" is
"38 + 7 = 45 ; 45 - 12 = 33 # 33". If each step is right with probability q, a problem with n steps
is solved with probability q^n, so accuracy rises smoothly during RL. Train and test problems are
disjoint for every seed, because a hash of the problem's text decides the split."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from dataclasses import dataclass, fields

from machinery.flags import UserError, need, number
from tasks.prompts import Answer, Problem

NUMBERS = 200  # the numbers 0..199 are one token each
VOCAB = 256  # numbers, signs, and spare words up to a multiple of 32


@dataclass
class Arithmetic:
    """Chains of min_ops to max_ops sums, operands 1..operand, every running total inside 0..total.

    explain > 0 rewards long responses, as in Mismatch Praxis: an explanation may follow the answer,
    and a right answer earns 1 + min(tokens after the answer, explain) / explain. Demonstrations
    restate steps as the explanation, five on average."""

    min_ops: int = 3
    max_ops: int = 5
    operand: int = 9
    total: int = 29
    seed: int = 0
    explain: int = 0

    name = "arith"
    size = None  # endless

    def problem(self, split: str, index: int) -> Problem:
        """Problem number `index` of a split ("train" or "test"): a pure function of the seed."""
        for attempt in range(1000):
            rng = random.Random(f"{self.seed}/{split}/{index}/{attempt}")
            total = rng.randint(0, self.total)
            text = str(total)
            for _ in range(rng.randint(self.min_ops, self.max_ops)):
                # b small enough that + or - stays in the range
                b = rng.randint(1, min(self.operand, max(total, self.total - total)))
                plus = rng.random() < 0.5
                if total + b > self.total or total - b < 0:
                    plus = total < b  # the sign that stays in the range
                total += b if plus else -b
                text += f" + {b}" if plus else f" - {b}"
            # one problem in eight is a test problem
            held_out = hashlib.sha256(text.encode()).digest()[0] < 32
            if held_out == (split == "test"):
                return Problem(text, text + " :", str(total))
        raise UserError(
            f"no {split} problem in 1000 draws: raise max_ops or operand in --arith"
        )

    def find(self, id: str) -> Problem:
        """The problem of an id, which is the problem's text."""
        start, operations = parts(id)
        answer = start + sum(b if sign == "+" else -b for sign, b in operations)
        return Problem(id, id + " :", str(answer))

    def solution(self, problem: Problem, slips: float = 0.0) -> str:
        """Worked steps, for the warm start only.

        With probability `slips` a step's result is off by 1 or 2, and the later steps use the wrong
        result, so that the final answer is usually wrong."""
        rng = random.Random(f"slips/{self.seed}/{problem.id}")
        total, operations = parts(problem.id)
        steps = []
        for sign, b in operations:
            result = total + b if sign == "+" else total - b
            if rng.random() < slips:
                result = min(max(result + rng.choice((-2, -1, 1, 2)), 0), NUMBERS - 1)
            steps.append(f"{total} {sign} {b} = {result}")
            total = result
        text = " ; ".join(steps) + f" # {total}"
        restated = 0
        while 6 * (restated + 1) <= min(self.explain, 96) and rng.random() < 0.85:
            text += f" ; {rng.choice(steps)}"
            restated += 1
        return text

    def reward(self, problem: Problem, text: str, finished: bool) -> float:
        """1 if the response is finished and ends with `# ANSWER`, else 0.

        With `explain`: exactly one `#`, followed by the right answer, earns 1 plus the bonus, even
        if the response is not finished."""
        if self.explain:
            match = re.search(r"^[^#]*# (\d+)((?: [^#]+)?)$", text.strip())
            if match is None or match.group(1) != problem.answer:
                return 0.0
            return 1.0 + min(len(match.group(2).split()), self.explain) / self.explain
        match = re.search(r"# (\d+)\s*$", text)
        return float(
            finished and match is not None and match.group(1) == problem.answer
        )

    def rewards(self, answers: list[Answer], known=None) -> tuple[list[float], Counter]:
        """The reward of each answer, and no counts."""
        return [self.reward(a.problem, a.text, a.finished) for a in answers], Counter()

    def fit(self, tokenizer, limit: int = 0) -> int:
        """Tokens of the longest prompt: the first number, two per operation, the colon. Drops no
        prompt."""
        return 2 * self.max_ops + 2

    def max_response(self) -> int:
        """Tokens of the longest demonstration: six per step, answer, end token, explanation."""
        return 6 * self.max_ops + 2 + self.explain


def parts(text: str) -> tuple[int, list[tuple[str, int]]]:
    """A problem's start and operations: "38 + 7 - 12" gives 38 and [("+", 7), ("-", 12)]."""
    words = text.split()
    operations = [
        (sign, int(b)) for sign, b in zip(words[1::2], words[2::2], strict=True)
    ]
    return int(words[0]), operations


def arithmetic_tokenizer():
    """A word-level Hugging Face tokenizer: numbers, signs, and unused words up to VOCAB."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", "+", "-", "=", ";", ":", "#"]
    words += [str(i) for i in range(NUMBERS)]
    words += [f"<spare{i}>" for i in range(VOCAB - len(words))]
    tok = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    )
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def of_settings(text: str) -> Arithmetic:
    """The task of --arith, a comma-separated list of NAME=VALUE. Raises UserError."""
    known = [field.name for field in fields(Arithmetic)]
    values = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        need(
            name in known,
            f"--arith={text}: {name} is not a setting; the settings are {', '.join(known)}",
        )
        values[name] = number(value, int)
        need(
            values[name] >= 0,
            f"--arith={text}: {part}: must be a whole number, 0 or more",
        )
    task = Arithmetic(**values)
    need(
        1 <= task.min_ops <= task.max_ops,
        f"--arith: min_ops={task.min_ops}: must be between 1 and max_ops={task.max_ops}",
    )
    need(
        1 <= task.operand <= task.total < NUMBERS,
        f"--arith: total={task.total}: must be below {NUMBERS} and no less than operand={task.operand}",
    )
    return task
