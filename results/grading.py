"""What grading costs: 256 long answers by one process after the other answer, and by as many as there are cores.

    python results/grading.py

The responses have some 2,000 words of worked steps before the box, as real ones do. Two of --answer's rules are
measured: `boxed`, where the box alone goes to math-verify, and `last`, where all of the text does.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tqdm import tqdm

from results import sweep
from tasks.builtin import last_box, math_answer
from tasks.grading import Graders, graders

ANSWERS = 256
SECONDS = 60.0  # no answer here comes near


def long_response(rng: random.Random, answer: str) -> str:
    """Worked steps of no meaning, and the answer in a box."""
    steps = []
    for _ in range(160):
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        steps.append(f"Since $\\frac{{{a}}}{{{b}}} + x_{{{a}}} = {a + b}$, we get {a} * {b} = {a * b} as before.")
    return " ".join(steps) + f" So the answer is $\\boxed{{{answer}}}$."


def answers(rng: random.Random) -> list[tuple[str, str]]:
    """(response, gold answer), all different, every other one right."""
    pairs = []
    for i in range(ANSWERS):
        gold = f"\\frac{{{2 * i + 1}}}{{{2 + i % 7}}}"
        said = gold if i % 2 else f"{i} + \\sqrt{{{i + 2}}}"
        pairs.append((long_response(rng, said), gold))
    return pairs


def measure(pairs: list[tuple[str, str]]) -> tuple[float, float, float]:
    """Seconds in this process by the clock and of its processor, and seconds in the pool, which has been started; both
    must say the same."""
    start, processor = time.perf_counter(), time.process_time()
    calls = [({"answer": gold}, text, "stop") for text, gold in pairs]
    serial = [float(math_answer(*call)) for call in tqdm(calls, desc="one after the other", leave=False)]
    middle, processor = time.perf_counter(), time.process_time() - processor
    pooled = graders().grade("math", calls, SECONDS)
    end = time.perf_counter()
    if pooled != serial:
        raise RuntimeError("the pool's verdicts differ from those of this process")
    return middle - start, processor, end - middle


def main() -> None:
    pool: Graders = graders()
    pool.grade("math", [({"answer": "1"}, f"\\boxed{{{i}}}", "stop") for i in range(64)], SECONDS)  # all have started
    texts = answers(random.Random(0))
    boxes = [(last_box(text), gold) for text, gold in texts]
    words = sum(len(text.split()) for text, _ in texts) / len(texts)
    print(f"{ANSWERS} answers of {words:.0f} words, {pool.size} processes")
    print("--answer   serial    pool   serial / pool   processor ms an answer")
    for rule, pairs in (("boxed", boxes), ("last", texts)):
        serial, processor, pooled = measure(pairs)
        print(f"{rule:8s} {serial:6.1f} s {pooled:5.1f} s {serial / pooled:15.2f} {1000 * processor / ANSWERS:24.2f}")


if __name__ == "__main__":
    sweep.no_arguments("grading")
    main()
