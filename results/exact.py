"""Measure the difference of sampler and learner and the cost of --exact on the embedded policy, case by case.

    python results/exact.py                                  # 10^6 tokens, 100 updates: results/exact.json
    python results/exact.py --tokens=100000 --updates=10     # the same in small

Each case trains: every update samples with the weights of the previous update. Times are processor times on one thread,
alternately with and without --exact; the ratio is the median over turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import batching
from machinery import settings
from machinery.flags import parse_flags, run_command
from machinery.ranks import Comm
from model import Needs
from results import sweep
from train import Training

BF16 = ["--dtype=bfloat16", "--rollout_dtype=bfloat16"]
ALIGNED = ["--learner_quant=aligned", "--quant_group=64"]
CASES = {
    "float32": [],
    "bfloat16": BF16,
    "float32, int8": ["--rollout_quant=int8", *ALIGNED],
    "bfloat16, w4a16": [*BF16, "--rollout_quant=w4a16", *ALIGNED],
    "float32, temperature 0.7, top-p 0.9": ["--temperature=0.7", "--top_p=0.9"],
}
TOKENS, UPDATES = 1_000_000, 100
TURNS = 3  # repetitions of each time
TIMED = 256  # responses in each repetition
HEAD = ["case", "updates", "tokens", "largest, --exact", "without"]
HEAD += ["decoding", "forward", "forward and backward"]


def open_training(folder: str, case: str, exact: bool, batch: int) -> Training:
    out = Path(folder) / str(exact)
    out.mkdir()
    argv = [
        f"--out={out}",
        "--overwrite",
        "--actor=none",
        "--objective=tis",
        "--rollout=hf",
    ]
    argv += [f"--rollout_batch={batch}", f"--train_batch={batch}", f"--exact={exact}"]
    argv += ["--eval_every=-1", "--lr=1e-4", *CASES[case]]
    return Training(settings.parse(argv), Comm.start(patience=600))


def train(t: Training, updates: int) -> tuple[int, float]:
    """Train for some updates; return (tokens, the largest difference of their log-probabilities)."""
    tokens, largest = 0, 0.0
    for _ in range(updates):
        t.roll_out()
        tokens += sum(len(r.tokens) for group in t.pending[0] for r in group.responses)
        largest = max(largest, t.update()["rollout_corr/largest_gap"])
    return tokens, largest


def seconds(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def times(t: Training) -> list[float]:
    """Processor seconds of sampling responses, of scoring them, and of an update on them."""
    t.source.publish(t.learner.version, t.learner.published("policy", t.source.packed))
    groups = []
    sampling = [
        seconds(lambda: groups.extend(t.source.sample_next(TIMED // t.cfg.group_size)))
    ]
    t.pending = [groups]
    batch = batching.collate(t.pending[0], t.cfg)
    return [
        *sampling,
        seconds(lambda: t.learner.score(batch, Needs())),
        seconds(t.update),
    ]


def ratios(exact: Training, plain: Training) -> list[float]:
    """The ratio of each time with --exact to the time without it: the median over turns."""
    turns = [
        [a / b for a, b in zip(times(exact), times(plain), strict=True)]
        for _ in range(TURNS)
    ]
    return [statistics.median(column) for column in zip(*turns, strict=True)]


def measure(case: str, updates: int, batch: int) -> dict:
    """The numbers of a case. largest: of `updates` updates with --exact; without: of one update without
    --exact. costs: time ratios of decoding, forward, forward and backward."""
    with tempfile.TemporaryDirectory() as folder:
        exact, plain = (
            open_training(folder, case, flag, batch) for flag in (True, False)
        )
        tokens, largest = train(exact, updates)
        _, without = train(plain, 1)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        costs = ratios(exact, plain)
        torch.set_num_threads(threads)
        for t in (exact, plain):
            t.log.close()
    sizes = {"case": case, "updates": updates, "tokens": tokens}
    return {**sizes, "largest": largest, "without": without, "costs": costs}


def table(data: dict) -> str:
    """The table of the page."""
    rows = []
    for x in data["cases"]:
        gaps = [
            f"{x['updates']}",
            f"{x['tokens']:,}",
            f"{x['largest']:.3g}",
            f"{x['without']:.2g}",
        ]
        rows.append([x["case"], *gaps, *(f"{cost:.2f}" for cost in x["costs"])])
    return sweep.markdown(HEAD, rows)


@dataclass(frozen=True)
class ExactFlags:
    """Sampler and learner bit for bit"""

    tokens: int = TOKENS
    """Number of sampled tokens of all cases together."""
    updates: int = UPDATES
    """Number of updates of all cases together."""


def main() -> None:
    flags = parse_flags(ExactFlags, usage=__doc__.strip())
    # 20 tokens a response
    batch = max(64, flags.tokens // (20 * flags.updates) // 8 * 8)
    about = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "batch": batch,
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    rows = []
    for case in CASES:
        rows.append(measure(case, -(-flags.updates // len(CASES)), batch))
        print(rows[-1], flush=True)
    data = {"about": about, "cases": rows}
    sweep.store("exact", data)
    sweep.rewrite(sweep.RESULTS / "exact.md", table(data))
    print(table(data))


if __name__ == "__main__":
    run_command(main)
