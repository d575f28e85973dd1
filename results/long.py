"""Largest gaps of long responses, of their pieces, and of short responses ("long" in results/atlas.json).

    python results/long.py --task=FILE.jsonl --row=bfloat16   # or another row of SmolLM2 in results/atlas.py

Does the largest gap grow with the length of a response, or only with the number of tokens? For each prompt the engine
samples one response of PIECES * PIECE tokens and PIECES responses of PIECE tokens, without a stop token. A gap is
|p_learner - p_engine| of a sampled token (TIS text, "Longer Response, Larger Max Gap")."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np

import probe
from eval import filled, open_setup
from learner import Learner
from machinery.checkpoint.models import load_model
from machinery.flags import need, parse_flags, run_command
from machinery.ranks import Comm
from probe import ProbeFlags
from results import atlas, sweep
from sampling import Sampling

PROMPTS, PIECES, PIECE = 64, 5, 204


@dataclass(frozen=True)
class LongFlags:
    """Long responses"""

    task: str = ""
    """File of problems in a format of train.py's --task."""
    row: str = "bfloat16"
    """Row of SmolLM2 in results/atlas.py: the formats of engine and learner."""


def gaps(cfg: ProbeFlags) -> tuple[np.ndarray, np.ndarray]:
    """Gaps of long responses, (PROMPTS, PIECES * PIECE), and of short ones, (PROMPTS, PIECES, PIECE)."""
    setup = replace(open_setup(cfg, PROMPTS), stop_ids=[])
    device = Comm.start(probe.PATIENCE).device
    engine = probe.make_engine(
        cfg, setup.folder, setup.context, 1, device, setup.vocabulary
    )
    engine.make_params = partial(engine.make_params, ignore_eos=True)
    comm, train_cfg = Comm.alone(device), probe.learner_config(cfg, setup)
    learner = Learner(load_model(setup.folder), None, train_cfg, comm, setup.vocabulary)
    found = []
    for samples, tokens in ((1, PIECES * PIECE), (PIECES, PIECE)):
        sampling = replace(Sampling.of(cfg), max_tokens=tokens)
        groups = probe.rollouts(engine, setup, samples, sampling, 0)
        scored = probe.score(learner, groups, train_cfg)
        need((scored.length == tokens).all(), "a response ended early")
        found.append(np.abs(np.exp(scored.ref) - np.exp(scored.inf)))
    engine.close()
    return found[0], found[1].reshape(-1, PIECES, PIECE)


def summary(long: np.ndarray, short: np.ndarray) -> dict:
    """Largest gap as [mean, standard error] over prompts, and mean gap. long: (P, PIECES * PIECE), short: (P, PIECES,
    PIECE)."""
    pieces = long.reshape(short.shape)

    def mean_se(x) -> list[float]:
        error = x.std(ddof=1) / math.sqrt(len(x))
        return [sweep.short(float(x.mean())), sweep.short(float(error))]

    return {
        "one short response": mean_se(short[:, 0].max(1)),
        "all short responses": mean_se(short.max((1, 2))),
        "long response": mean_se(long.max(1)),
        "its pieces": [mean_se(pieces[:, n].max(1)) for n in range(short.shape[1])],
        "mean gap, short": sweep.short(float(short.mean())),
        "mean gap, pieces": [sweep.short(float(x)) for x in pieces.mean((0, 2))],
    }


def main() -> None:
    flags = parse_flags(LongFlags, None, __doc__.strip())
    need(flags.task, "--task is missing: name a file with problems, such as GSM8K's")
    rows = atlas.ROWS[atlas.SMOL]
    need(flags.row in rows, f"--row={flags.row}: no such row; give one of {list(rows)}")
    model = atlas.POLICY[atlas.SMOL].split()[0]
    size = f"--problems={PROMPTS} --samples={PIECES} --max_tokens={PIECES * PIECE} --task={flags.task}"
    argv = f"{model} {size} {rows[flags.row]}".split()
    record = summary(*gaps(filled(parse_flags(ProbeFlags, argv, ""))))
    data = sweep.load("atlas")
    data.setdefault("long", {})[flags.row] = record
    sweep.store("atlas", data)
    print(record)


if __name__ == "__main__":
    run_command(main)
