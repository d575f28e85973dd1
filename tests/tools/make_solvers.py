"""Makes tests/solvers: the small policy and actor of all tests that need models which solve something.

    python tests/tools/make_solvers.py        # half a minute

They are kept, and not made by the suite, because what a model this small learns differs from processor to processor:
on one of them it solved no held-out problem, and its gradient did not stand out of the noise of a test's few batches.
"""

import random
import shutil
import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (2, 1)]

from conftest import ROOT, TINY_TASK

from machinery import warmstart
from tasks import Arithmetic
from tasks.arith import of_settings

SEEDS = {"policy": 10, "actor": 11}
SHAPE = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1)
SHAPES = {"policy": {**SHAPE, "num_hidden_layers": 2}, "actor": {**SHAPE, "num_hidden_layers": 1}}
TARGET = 0.4


class Tossed(Arithmetic):
    """One problem in four is a held-out one, and each demonstration is right or wrong anew.

    There are some forty sums in all. Of those that are left out nothing would be learnt, and with one demonstration
    each, some would be solved always and the others never."""

    toss = random.Random(0)

    def problem(self, split: str, index: int):
        return super().problem("test" if index % 4 == 0 else "train", index)

    def solution(self, problem, slips: float) -> str:
        return super().solution(problem, float(self.toss.random() < 0.4))


def main() -> None:
    for name, seed in SEEDS.items():
        task = Tossed(**vars(of_settings(TINY_TASK["arith"])) | {"seed": seed})
        folder = ROOT / "tests" / "solvers" / name
        shutil.rmtree(folder, ignore_errors=True)
        with mock.patch.multiple(warmstart, SHAPES=SHAPES, LR=1e-2):
            warmstart.warm_start(name, task, TARGET, folder)


if __name__ == "__main__":
    main()
