"""The GPU list: measurements that need a GPU. Each part runs in a process with a time limit.

    python -m bench                                    # all parts in 30 minutes: results/gpu.md and gpu.json
    python -m bench --parts=learner,linears            # some parts; other results stay on the page
    python -m bench --device=cpu --scale=tiny          # the script itself, on a CPU: out/gpu

tests        tests/test_gpu.py: rollouts, sync and check (IPC too), low bits, sleep, FSDP2, a run
vllm         vLLM: tokens per second, publication and its check, sleep and wake
linears      speed of aligned linear layers over bfloat16 layers, on Qwen3-0.6B, 1.7B and 8B shapes
head         the chunked head against whole logits, torch's head and Liger's, 151,936 tokens
obrs         time of a Jackpot update over a plain PPO update
kernels      the learner's updates with each choice of --kernels
learner      tokens per second, share of the device's peak, the plan's memory, by model and length
memory       checkpointing, two models, FSDP2 on one rank, aligned learners: time, memory and plan
rollouts     the plain torch engine: tokens per second, publication and its check
trl, ours    TRL's step (PYTHONPATH=.trl, see results/against_trl.py) and our step

Models have Qwen3's shapes and random weights. A failed part becomes a line of the page, and the
next part starts. A part that reaches its limit keeps the rows that it has measured. Shares of the
peak refer to dense bfloat16 without sparsity (PEAK). The work is 6 P + 6 L A S operations per
token, for P parameters in matrix products, L layers, A numbers of all query heads together and S
tokens per row. It counts forward and backward passes with causal attention, and no
recomputation."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

from bench.gpu_parts import PARTS, Setting
from machinery.flags import UserError, check_output, need, parse_flags
from results import sweep

ROOT = Path(__file__).resolve().parent.parent

# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------

PACKAGES = ("torch", "triton", "transformers", "vllm", "liger_kernel")


@dataclass(frozen=True)
class GpuFlags:
    """The GPU list"""

    parts: str = ",".join(PARTS)
    """Names of parts to run, separated by commas."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: a trial of the script without a GPU."""
    scale: Literal["full", "tiny"] = "full"
    """tiny: two layers and a few tokens."""
    out: str = ""
    """Folder of gpu.md and gpu.json; by default results, and out/gpu for a trial."""
    minutes: float = 30.0
    """Time limit for all parts together; parts that have not begun by then are skipped."""
    part: str = ""
    """Run one part in this process, and print its lines as JSON."""


def said_by(command: list[str], limit: float) -> tuple[list[dict], str]:
    """(the lines that a command printed, why it failed or ""); the command is stopped after `limit`
    seconds."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # in a separate process group, so that its child processes are stopped with it
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=err, text=True, process_group=0
        )
        why = ""
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status, why = 1, f"it exceeded its limit of {limit:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (out, err):
            stream.seek(0)
        rows = [
            json.loads(line) for line in out if line.startswith('{"what"') and line.endswith("}\n")
        ]
        if status and not why:
            last = [line.strip() for line in err if line.strip()][-1:]
            why = last[0][:300] if last else f"it ended with status {status}"
    return rows, why


def run_part(name: str, flags: GpuFlags, limit: float) -> dict:
    """Run one part in a separate process, and return its record."""
    command = [
        sys.executable,
        "-m",
        "bench",
        f"--part={name}",
        f"--device={flags.device}",
        f"--scale={flags.scale}",
    ]
    start = time.perf_counter()
    rows, why = said_by(command, limit)
    return {
        "rows": rows,
        "failed": why,
        "seconds": time.perf_counter() - start,
        "about": about(flags, name),
    }


def about(flags: GpuFlags, part: str) -> dict[str, str]:
    """The machine, the versions, the date and the command."""
    found = {"device": "CPU (a trial of the script, no result)", "driver": "none"}
    if flags.device == "cuda":
        asked = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total",
            "--format=csv,noheader",
        ]
        with contextlib.suppress(OSError):
            said = subprocess.run(
                asked, capture_output=True, text=True, check=False
            ).stdout.splitlines()
            name, driver, total = [*said[:1], "unknown, unknown, unknown"][0].split(", ")
            found |= {"device": f"{name}, {total}", "driver": driver}
    installed = importlib.metadata.packages_distributions()
    for package in PACKAGES:
        names = installed.get(package)
        found[package] = importlib.metadata.version(names[0]) if names else "not installed"
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    command = f"`python -m bench --parts={part} --device={flags.device} --scale={flags.scale}`"
    python = sys.version.split()[0]
    return {
        **found,
        "cuda": str(torch.version.cuda),
        "python": python,
        "date": date,
        "command": command,
    }


def cell(x: float) -> str:
    """A number with three digits, or a whole number from 1,000 on."""
    if math.isnan(x):
        return "-"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def line_of(r: dict) -> list[str]:
    """The cells of a row: what, measured, spread, goal."""
    spread = " to ".join(cell(x) for x in r["spread"])
    goal = r["goal"]
    if goal and r["met"] is not None:
        goal += ": yes" if r["met"] else ": **no**"
    return [r["what"], r["why"] or f"{cell(r['value'])} {r['unit']}".strip(), spread, goal]


def text_of(records: dict[str, dict]) -> str:
    """The text of the page below its marker."""
    parts = [
        "Written by `python -m bench` from gpu.json; a spread is the range over repeats, or a 95 % interval.\n"
    ]
    for name in PARTS:
        if name not in records:
            continue
        record = records[name]
        where = ", ".join(f"{key} {value}" for key, value in record["about"].items())
        says = " ".join(PARTS[name][0].__doc__.split())
        parts.append(f"## {name}\n\n{says}\n\n{where}; {record['seconds']:.0f} s.\n")
        if record["failed"]:
            parts.append(f"**failed: {record['failed']}**\n")
        if record["rows"]:
            parts.append(
                sweep.markdown(["what", "measured", "spread", "goal"], map(line_of, record["rows"]))
            )
    missing = [name for name in PARTS if name not in records]
    if missing:
        parts.append(f"Not run yet: {', '.join(missing)}.\n")
    return "\n".join(parts)


def write(folder: Path, records: dict[str, dict]) -> None:
    """Write gpu.json and gpu.md; the text above the marker of gpu.md is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    page = folder / "gpu.md"
    above = (
        page.read_text(encoding="utf-8").split(sweep.MARKER)[0] if page.is_file() else "# gpu\n\n"
    )
    page.write_text(f"{above}{sweep.MARKER}\n{text_of(records)}", encoding="utf-8")


def known(folder: Path) -> dict[str, dict]:
    """The content of a folder's gpu.json; an empty dictionary if there is none."""
    file = folder / "gpu.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def named(flags: GpuFlags) -> list[str]:
    """The parts that a command line names. Raise UserError for an unknown name."""
    names = [name.strip() for name in flags.parts.split(",") if name.strip()]
    for flag, asked in (("parts", names), ("part", [flags.part] if flags.part else [])):
        for name in asked:
            need(name in PARTS, f"--{flag}={name}: no such part; there are {', '.join(PARTS)}")
    need(names, f"--parts is empty: name one or more of {', '.join(PARTS)}")
    need(flags.minutes > 0, f"--minutes={flags.minutes:g}: must be above 0")
    return names


def run_list(flags: GpuFlags, names: list[str]) -> dict[str, dict]:
    """Run the parts one after the other, and write the page after each part."""
    trial = flags.device == "cpu" or flags.scale == "tiny"
    folder = Path(flags.out or (ROOT / "out" / "gpu" if trial else sweep.RESULTS))
    check_output("out", str(folder / "gpu.json"))
    records, end = known(folder), time.perf_counter() + 60 * flags.minutes
    for name in names:
        left = end - time.perf_counter()
        if left < 20:
            print(f"{name}: skipped, --minutes={flags.minutes:g} are over", flush=True)
            continue
        print(f"{name} ...", flush=True)
        record = run_part(name, flags, min(PARTS[name][1], left))
        records[name] = record
        write(folder, records)
        for r in record["rows"]:
            print("   ", "   ".join(filter(None, line_of(r))), flush=True)
        print(
            f"    {record['seconds']:.0f} s",
            f"failed: {record['failed']}" if record["failed"] else "",
            flush=True,
        )
    print(folder / "gpu.md")
    return records


def main(argv: list[str] | None = None) -> None:
    """Run `python -m bench`, or one part of it."""
    flags = parse_flags(GpuFlags, argv, __doc__.strip())
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise UserError("gpu: there is no GPU here; try the script with --device=cpu --scale=tiny")
    names = named(flags)
    if not flags.part:
        run_list(flags, names)
        return
    for one in PARTS[flags.part][0](Setting(flags.device, flags.scale == "tiny")):
        print(json.dumps(one), flush=True)
