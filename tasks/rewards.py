"""Rewards: a weighted sum of named parts, computed in grading processes (tasks/grading.py).

    --reward=math                       right or wrong, by the math-verify library
    --reward=math,boxed*0.1             a sum, with weights
    --reward=mine.py:score,math*0.5     a function in your file:

        def score(row, text, finish_reason):       # the problem's row, the response, "stop" or "length"
            return 1.0 if row["answer"] in text else 0.0       # or {"right": 1.0, "short": 0.2}: the sum counts

`row` has every column of the problem's row; row["answer"] is the final answer. Evaluation counts a
response as right if the first part gives more than 0.5."""

from __future__ import annotations

import math
import pickle
import re
import sys
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal

from tqdm import tqdm

from machinery.flags import UserError, choice, need, number, shortened
from tasks.builtin import BUILT_IN, FORMATS, NUMBER, last_box, plain_number
from tasks.grading import Failure, graders
from tasks.prompts import Answer

# processor time for grading one answer; an answer that takes longer earns 0
GRADE_SECONDS = 5.0


@dataclass(frozen=True)
class Part:
    """One summand: a built-in name, or FILE.py:FUNCTION."""

    name: str
    weight: float

    @property
    def label(self) -> str:
        """The name in metrics: the name of the function."""
        return self.name.rpartition(":")[2]


@dataclass(frozen=True)
class Reward:
    """The parsed --reward. seconds: limit of processor time for each answer and part."""

    parts: tuple[Part, ...] = (Part("math", 1.0),)
    seconds: float = GRADE_SECONDS
    # longest response; praxis: tokens after the answer earn up to 1 more
    max_tokens: int = 0
    # DAPO's length penalty begins this many tokens below max_tokens (--overlong)
    overlong: int = 0
    opened: bool = False  # the prompt ends with <think>, so the response lacks the tag

    @property
    def needs_answer(self) -> bool:
        """Whether a row needs a final answer. Functions in a user's file may grade by different
        columns."""
        return any(
            part.name in BUILT_IN and part.name not in FORMATS for part in self.parts
        )

    def of(
        self, answers: list[Answer], known: dict | None = None
    ) -> tuple[list[float], Counter]:
        """(reward of each answer, counts). known: as for `values`.

        The counts: `answers`; `timeouts` and `failures`, results of a part that earn 0 because the
        function exceeded the limit, or raised or returned no reward; if `math` is a part, `unboxed`,
        answers without a box; if it is the first, `plain`, answers with a number as gold answer, and
        `inexact`, right plain answers that end with a different number; `reward/NAME`, the
        unweighted sum of each part."""
        total = [0.0] * len(answers)
        counts = Counter(answers=len(answers))
        results = [self.values(part, answers, known) for part in self.parts]
        for part, values in zip(self.parts, results, strict=True):
            for i, value in enumerate(values):
                counts["timeouts"] += value is None
                if value is None and part.name not in BUILT_IN:
                    limit = f"more than {self.seconds:g} s of processor time"
                    tell_once(part.name, f"{limit}; such a response earns 0 for it")
                if isinstance(value, Failure):
                    counts["failures"] += 1
                    earns = "such a response earns 0 for it (grade/failures)"
                    tell_once(part.name, f"{value.why}; {earns}")
                for name, x in self.named(part, value, answers[i]):
                    total[i] += part.weight * x
                    counts[f"reward/{name}"] += x
        for i, answer in enumerate(answers if self.overlong else []):
            # DAPO, Eq. 13: 0 up to max_tokens - overlong, then linear, and 1 at max_tokens
            penalty = (
                max(0.0, answer.tokens - (self.max_tokens - self.overlong))
                / self.overlong
            )
            total[i] -= penalty
            counts["reward/overlong"] -= penalty
        if any(part.name == "math" for part in self.parts):
            counts["unboxed"] = sum(last_box(a.text) is None for a in answers)
        if self.parts[0].name == "math":
            for value, answer in zip(results[0], answers, strict=True):
                if is_plain(answer.problem.answer):
                    counts["plain"] += 1
                    counts["inexact"] += value == 1 and not ends_with_number(
                        answer.text, answer.problem.answer
                    )
        return total, counts

    def values(
        self, part: Part, answers: list[Answer], known: dict | None = None
    ) -> list:
        """The pool's result for each answer. Equal answers are graded once; an answer without a box
        gets 0 from `math`. known: (part, call) -> result of earlier calls; it gets the new results."""
        known = {} if known is None else known
        calls = [self.call(part, answer) for answer in answers]
        try:
            keys = [(part.name, pickle.dumps(call)) for call in calls]
        except Exception as e:  # pickle raises many types
            raise UserError(
                f"--task: a row has a value that cannot be sent to the process of {part.name} ({shortened(e)}); keep "
                "functions out of rows"
            ) from None
        new = {
            k: call
            for k, call in zip(keys, calls, strict=True)
            if call and k not in known
        }
        results = graders().grade(part.name, list(new.values()), self.seconds)
        known |= dict(zip(new, results, strict=True))
        return [known[k] if call else 0.0 for k, call in zip(keys, calls, strict=True)]

    def call(self, part: Part, answer: Answer) -> tuple | None:
        """The arguments of the part's function; None: the answer is wrong without a call."""
        row, text = {"answer": answer.problem.answer}, answer.text
        finish_reason = "stop" if answer.finished else "length"
        if part.name == "math":  # reads only the last box
            text, finish_reason = last_box(text), "stop"
            if text is None:
                return None
        elif part.name == "think" and self.opened:
            text = f"<think>{text}"
        elif part.name not in BUILT_IN:
            row = answer.problem.row
        return row, text, finish_reason

    def named(self, part: Part, value, answer: Answer) -> list[tuple[str, float]]:
        """(name, value) pairs of a part's result; [] if the answer could not be graded."""
        if value is None or isinstance(value, Failure):
            return []
        if isinstance(value, dict):
            return [(f"{part.label}/{name}", x) for name, x in value.items()]
        if part.name == "praxis" and value:
            behind = answer.text.rpartition("####")[2].partition("\n")[2]
            tokens = answer.count(behind) if behind else 0
            bonus = min(tokens, self.max_tokens) / self.max_tokens
            return [(part.label, value), ("praxis_bonus", bonus)]
        return [(part.label, value)]


def is_plain(answer: str) -> bool:
    """Whether a gold answer is a plain number in digits."""
    is_number = isinstance(plain_number(answer), Decimal)
    return is_number and re.fullmatch(NUMBER, answer.strip()) is not None


def ends_with_number(text: str, answer: str) -> bool:
    """Whether the last number in the last box of a response, or else in its text, is the gold
    answer."""
    numbers = re.findall(NUMBER, last_box(text) or text)
    return bool(numbers) and plain_number(numbers[-1]) == plain_number(answer)


TOLD: set[str] = set()  # names of functions with a printed failure


def tell_once(name: str, why: str) -> None:
    """Print a warning at a function's first failure. Training continues and counts failures."""
    if name not in TOLD:
        TOLD.add(name)
        tqdm.write(f"warning: {name}: {why}", file=sys.stderr)


def files_of(text: str) -> list[str]:
    """The parts of --reward that are functions in a user's file."""
    return [part.name for part in parts_of(text) if ".py:" in part.name] if text else []


def parts_of(text: str) -> tuple[Part, ...]:
    """The parts of --reward. Raises UserError."""
    parts = []
    for word in text.split(","):
        name, star, weight = word.strip().partition("*")
        value = number(weight) if star else 1.0
        need(
            math.isfinite(value),
            f"--reward={text}: {weight} is not a weight; write NAME*0.5",
        )
        if ":" not in name:
            choice("reward", name, [*BUILT_IN, "FILE.py:FUNCTION"])
        parts.append(Part(name.strip(), value))
    need(
        # labels are names in metrics
        len({part.label for part in parts}) == len(parts),
        f"--reward={text}: the same part is named twice; leave one part out, or rename its function",
    )
    return tuple(parts)


def try_out(reward: Reward, answer: Answer) -> None:
    """Raise UserError if a function in a user's file cannot grade the first problem. Called before
    a model loads."""
    for part in reward.parts:
        if part.name in BUILT_IN:
            continue
        (value,) = reward.values(part, [answer])
        place = f"--reward={part.name}: on the first problem"
        if isinstance(value, Failure):
            raise UserError(f"{place} with the answer as response: {value.why}")
        limit = f"{reward.seconds:g} seconds"
        need(value is not None, f"{place} it needs more than {limit}; make it faster")
