"""Measure the ladder (probe/ladder.py), the sources of a mismatch, on configurations of the embedded pair of models.

    python results/ladder.py                # measures the configurations that results/ladder.json lacks, a minute each

Nothing is trained: 256 responses of at most 32 tokens are sampled and scored.
tests/tools/ladder_faults.py plants the faults and writes their part of results/ladder.json."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machinery.flags import run_command
from probe import figures
from results import sweep

RUNS = {
    "actor": "--actor=base:actor",
    "int8": "--rollout_quant=int8",
    "w2a16": "--rollout_quant=w2a16",
    "bf16": "--rollout_dtype=bfloat16",
    "bf16, top-p off": "--rollout_dtype=bfloat16 --top_p=0.9 --keep_sampling_mask=off",
    "actor, int8, bf16, raw": "--actor=base:actor --rollout_quant=int8 --rollout_dtype=bfloat16 --temperature=0.9 "
    "--logprobs_mode=raw",
    "vLLM, float32": "--rollout=vllm",
    "vLLM, bf16": "--rollout=vllm --rollout_dtype=bfloat16",
}
DRAWN = "int8"
SHOWN = 0.01  # smaller shares of the KL are left out of the table


def table(data: dict) -> str:
    """The table of the page: KL, mean gap and sources by configuration."""
    rows = []
    for name in RUNS:
        ladder = data["ladders"][name]
        total = ladder["total"]["kl"]
        shares = sorted(
            ((x["kl"]["share"] / total, x["source"]) for x in ladder["rows"]),
            reverse=True,
        )
        parts = ", ".join(
            f"{source} {100 * share:.0f} %"
            for share, source in shares
            if share >= SHOWN
        )
        numbers = (total, ladder["total"]["dp"], ladder["floor"]["kl"])
        rows.append([name, *(f"{x:.2g}" for x in numbers), parts])
    head = [
        "configuration",
        "KL",
        "mean abs(dp)",
        "floor of the KL",
        "sources of the KL",
    ]
    return sweep.markdown(head, rows)


def main() -> None:
    data = sweep.load("ladder")
    for name, flags in RUNS.items():
        if name not in data["ladders"]:
            engine = "" if "--rollout=" in flags else "--rollout=hf"
            report = sweep.probed(f"--explain --model=base:policy {engine} {flags}")
            data["ladders"][name] = report["ladder"]
            sweep.store("ladder", data)
    sweep.rewrite(sweep.RESULTS / "ladder.md", table(data))
    figures.draw_ladder(data["ladders"][DRAWN], sweep.RESULTS / "ladder.png")
    print(table(data))


if __name__ == "__main__":
    run_command(main)
