"""Is the difference 0, and what does it cost? --exact on the embedded policy, case by case, beside runs without it.

    python results/exact.py                                  # 10^6 tokens, 100 updates; writes results/exact.md
    python results/exact.py --tokens=100000 --updates=10     # the same in small

Each case trains: every update samples anew with the weights of the last one. Times are of a processor, one thread,
with and without --exact in turn; the ratio is the median over turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import batching
import config
from flags import run_command
from learner import Comm
from model import Needs
from model.exact import has_tiles
from train import Training

PAGE = Path(__file__).with_suffix(".md")
BF16 = ["--dtype=bfloat16", "--rollout_dtype=bfloat16"]
ALIGNED = ["--learner_quant=aligned", "--quant_group=64"]
CASES = {
    "float32": [],
    "bfloat16": BF16,
    "float32, int8": ["--rollout_quant=int8", *ALIGNED],
    "bfloat16, w4a16": [*BF16, "--rollout_quant=w4a16", *ALIGNED],
    "float32, temperature 0.7, top-p 0.9": ["--temperature=0.7", "--top_p=0.9"],
}
TOKENS, UPDATES, DECODING = 1_000_000, 100, 1.5  # the aim: 0 over so much, at so much of the time at most
TURNS = 3  # of the times
TIMED = 256  # responses in each
HEADER = """# Sampler and learner bit for bit

`python results/exact.py{arguments}`, the embedded policy, torch {torch}, {threads} thread(s), {processor}.
The largest |log p_inf - log p_ref| of a case's sampled tokens, over all its updates, each on fresh rollouts of a batch
of {batch} responses; and without `--exact`, over one update.

| case | updates | tokens | largest, --exact | largest, without | decoding | forward | forward and backward |
|---|---|---|---|---|---|---|---|
"""
FOOTER = """
The last three columns: processor time with `--exact` over that without, the median of {turns} turns, on one thread:
sampling {timed} responses, scoring them, and an update of them. How it is done: model/exact.py.

The aim was 0 over {aim_tokens:,} tokens and {aim_updates} updates, with decoding at most {aim_decoding} times as long.
Recorded are {tokens:,} tokens and {updates} updates, all cases together. Decoding takes longer than that in {missed}
of {cases} cases.

Nothing of this has run on CUDA: not plain torch with `--exact`, and not a vLLM with `VLLM_BATCH_INVARIANT=1` beside
it. `python bench.py gpu --parts=exact` is written to measure both.
"""


@dataclass
class Measured:
    """A case's line of the table."""

    case: str
    updates: int
    tokens: int
    largest: float  # with --exact
    without: float
    costs: list[float]  # of decoding, forward, forward and backward

    def line(self) -> str:
        gaps = f"{self.largest:.3g} | {self.without:.2g}"
        costs = " | ".join(f"{x:.2f}" for x in self.costs)
        return f"| {self.case} | {self.updates} | {self.tokens:,} | {gaps} | {costs} |"


def open_training(folder: str, case: str, exact: bool, batch: int) -> Training:
    out = Path(folder) / str(exact)
    out.mkdir()
    argv = [f"--out={out}", "--overwrite", "--actor=none", "--objective=tis", "--rollout=hf", *CASES[case]]
    argv += [
        f"--rollout_batch={batch}",
        f"--train_batch={batch}",
        "--eval_every=-1",
        "--log_samples=0",
        f"--exact={exact}",
        "--lr=1e-4",
    ]
    return Training(config.parse(argv), Comm.start(patience=600))


def train(t: Training, updates: int) -> tuple[int, float]:
    """(tokens, largest difference of their log-probabilities) over so many updates."""
    tokens, largest = 0, 0.0
    for _ in range(updates):
        t.roll_out([])
        tokens += sum(len(r.tokens) for group in t.pending[0] for r in group.responses)
        largest = max(largest, t.update()["rollout_corr/largest_gap"])
    return tokens, largest


def seconds(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def times(t: Training) -> list[float]:
    """Processor seconds: of sampling responses, of scoring them, of an update of them."""
    t.source.publish(t.learner.version, t.learner.published("policy", t.source.packed))
    groups = []
    found = [seconds(lambda: groups.extend(t.source.sample_next(TIMED // t.cfg.group_size)))]
    t.pending = [groups]
    batch = batching.collate(t.pending[0], t.cfg)
    return [*found, seconds(lambda: t.learner.score(batch, Needs())), seconds(t.update)]


def ratios(exact: Training, plain: Training) -> list[float]:
    """Of each of these times, with --exact over without: the median over turns."""
    turns = [[a / b for a, b in zip(times(exact), times(plain), strict=True)] for _ in range(TURNS)]
    return [statistics.median(column) for column in zip(*turns, strict=True)]


def measure(case: str, updates: int, batch: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        exact, plain = (open_training(folder, case, flag, batch) for flag in (True, False))
        tokens, largest = train(exact, updates)
        _, without = train(plain, 1)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        costs = ratios(exact, plain)
        torch.set_num_threads(threads)
        for t in (exact, plain):
            t.log.close()
    return Measured(case, updates, tokens, largest, without, costs)


def footer(rows: list[Measured]) -> str:
    """What the times are, and where the aim is missed."""
    return FOOTER.format(
        turns=TURNS,
        timed=TIMED,
        aim_tokens=TOKENS,
        aim_updates=UPDATES,
        aim_decoding=DECODING,
        tokens=sum(row.tokens for row in rows),
        updates=sum(row.updates for row in rows),
        missed=sum(row.costs[0] > DECODING for row in rows),
        cases=len(rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="sampled tokens of all cases together")
    parser.add_argument("--updates", type=int, default=UPDATES, help="updates of all cases together")
    args = parser.parse_args()
    batch = max(64, args.tokens // (20 * args.updates) // 8 * 8)  # some 20 tokens a response
    given = "" if len(sys.argv) == 1 else " " + " ".join(sys.argv[1:])
    processor = f"{torch.backends.cpu.get_cpu_capability()} {'with' if has_tiles() else 'without'} bfloat16 tiles (AMX)"
    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "batch": batch, "processor": processor}
    rows = []
    for case in CASES:
        rows.append(measure(case, -(-args.updates // len(CASES)), batch))
        print(rows[-1].line(), flush=True)
    table = "".join(f"{row.line()}\n" for row in rows)
    PAGE.write_text(HEADER.format(arguments=given, **about) + table + footer(rows), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
