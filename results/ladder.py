"""Where does a mismatch come from? The ladder (probe/ladder.py) on configurations of the embedded pair of models.

    python results/ladder.py                # what results/ladder.json lacks, a minute each; page and figure
    rm results/ladder.json                  # to measure all of it anew

Nothing is trained: 256 responses of at most 32 tokens are sampled and scored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from probe import figures
from results import sweep

RECORD = sweep.RESULTS / "ladder.json"
FAULTS = sweep.RESULTS / "ladder_faults.json"
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
DRAWN = ("int8", "bf16", "actor, int8, bf16, raw")
MEASURES = {"kl": "KL", "dp": "mean abs(dp)", "var": "var(R)"}


def measure(flags: str) -> dict:
    """The ladder of one configuration, by a command of its own: an engine of vLLM's takes a process along."""
    with tempfile.TemporaryDirectory() as scratch:
        argv = [sys.executable, "-m", "probe", "--explain", "--model=base:policy"]
        argv += [f"--out={scratch}/m.json", *([] if "--rollout=" in flags else ["--rollout=hf"]), *flags.split()]
        subprocess.run(argv, check=True, cwd=ROOT)
        return json.loads(Path(scratch, "m.json").read_text(encoding="utf-8"))["ladder"]


def table(name: str, ladder: dict) -> str:
    """One configuration: each source's share, its 95 % interval, the share in hundredths of the total."""
    flags = " ".join(x for x in ("--model=base:policy", RUNS[name]) if x)
    lines = [f"### {name}: `{flags}`\n", f"| source | {' | '.join(MEASURES.values())} |", "|---|---|---|---|"]
    for row in ladder["rows"]:
        lines.append(f"| {row['source']} | " + " | ".join(cell(row[m], ladder["total"][m]) for m in MEASURES) + " |")
    for label in ("total", "floor"):
        lines.append(f"| {label} | " + " | ".join(f"{ladder[label][m]:.2g}" for m in MEASURES) + " |")
    suspects = [x for x in ladder["suspects"] if x["explained"] > 0.5]
    if ladder["suspects"] and not suspects:
        lines.append(f"\nWhat remains: none of {len(ladder['suspects'])} known faults explains half of it.")
    return "\n".join(lines) + "\n"


def planted_faults() -> str:
    """What the ladder names of each planted fault, first first: by the record of tests/ladder_faults.py."""
    rows = []
    for x in json.loads(FAULTS.read_text(encoding="utf-8")):
        named = [f"{s['fault']} {s['where']}".strip() + f" ({100 * s['explained']:.1f} %)" for s in x["suspects"]]
        rows.append([x["planted"], named[0], "; ".join(named[1:])])
    head = ["planted", "named first (explains)", "then"]
    return f"### Planted faults: `python tests/ladder_faults.py`\n\n{sweep.markdown(head, rows)}"


def cell(x: dict, total: float) -> str:
    return f"{x['share']:.2g} [{x['low']:.1e}, {x['high']:.1e}] ({100 * x['share'] / total:.0f} %)"


def main() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    for name, flags in RUNS.items():
        if name not in record:
            record[name] = measure(flags)
            RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    known = {name: record[name] for name in RUNS}
    tables = "\n".join(table(name, ladder) for name, ladder in known.items())
    sweep.rewrite("ladder", f"Written by `python results/ladder.py`.\n\n{tables}\n{planted_faults()}")
    figures.draw_ladder([known[name] for name in DRAWN], list(DRAWN), sweep.RESULTS / "ladder.png")


if __name__ == "__main__":
    sweep.no_arguments("ladder")
    main()
