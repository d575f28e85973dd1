"""Makes tests/solvers: the small policy and actor of tests that need models that solve problems.

    python tests/tools/make_solvers.py        # half a minute

The models are files, and the suite does not train them, because results of training differ between processors. On one
processor the policy solved no held-out problem, and a test's few batches did not show its gradient in the noise.
"""

import random
import shutil
import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (2, 1)]

from conftest import ROOT, TINY_TASK

from machinery import warmstart
from tasks.arith import Arithmetic, of_settings

SEEDS = {"policy": 10, "actor": 11}
SHAPE = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1)
SHAPES = {"policy": {**SHAPE, "num_hidden_layers": 2}, "actor": {**SHAPE, "num_hidden_layers": 1}}
TARGET = 0.4


class Tossed(Arithmetic):
    """One problem in four is a held-out problem, and each demonstration is right or wrong at random.

    There are about forty sums. A model would learn nothing of sums without demonstrations, and with one demonstration a
    sum, it would solve a sum always or never."""

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
