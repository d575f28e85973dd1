"""The GPU list: measurements that need a GPU. Each part runs in a process for at most 60 seconds,
parts that compile (LONG) for at most 180.

    python -m bench                              # all parts, at most 40 minutes: results/gpu.json and gpu.md
    python -m bench                              # again: the parts that have not succeeded yet
    python -m bench --parts=learner,linears-8B   # some parts (all of learner-*), measured again
    python -m bench --device=cpu --scale=tiny    # the script itself, on a CPU: out/gpu.json

engine       the first start of vLLM, which fills its cache
vllm         vLLM: tokens per second
sync         publication and its check, sleep and wake of the engine
learner-*    tokens per second, share of the device's peak, the plan's memory, by length
kernels-*    the learner's updates with a choice of --kernels
linears-*    speed of aligned linear layers over bfloat16 layers, on shapes of Qwen3;
             vLLM's kernels over plain torch
tests-*      tests/test_gpu.py: rollouts, sync and check, low bits, sleep, FSDP2, a run
obrs         time of a Jackpot update over a plain PPO update
pair         four updates of configs/real_pair.toml: seconds of each stage
trl, ours    TRL's step (PYTHONPATH=.trl, see results/against_trl.py) and our step
micro        updates with 4,096 tokens in a micro-batch and with the most that the plan allows
memory-*     checkpointing, two models, FSDP2 on one rank, aligned learners: time, memory and plan
head-*       the chunked head against whole logits, torch's and Liger's, a vocabulary of 151,936

The most important parts run first. Models have Qwen3's shapes and random weights, except in pair.
Each row is a line of JSON. After a failed part the next part starts. A part that reaches its limit
keeps the rows that it has measured (tests, obrs, trl and ours have none before their end). The
table of all rows is written below the marker of the page after each part. Shares of the peak refer
to dense bfloat16 without sparsity (`PEAK` in machinery/speed.py). The work is 6 P + 6 L A S
operations per token, for P parameters in matrix products, L layers, A = query heads times head size
and S tokens per row. It counts forward and backward passes with causal attention, and no
recomputation."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
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

from bench.gpu_parts import LIMIT, LONG, PARTS, Setting, ours_over_trl
from machinery.flags import UserError, check_output, need, parse_flags, read_text
from results.sweep import markdown, rewrite

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = ("torch", "triton", "transformers", "vllm", "liger_kernel")


@dataclass(frozen=True)
class GpuFlags:
    """The GPU list"""

    parts: str = ""
    """Names of parts to run, or their first words, separated by commas; by default all parts without
    a success in the file."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: a trial of the script without a GPU."""
    scale: Literal["full", "tiny"] = "full"
    """tiny: two layers and a few tokens."""
    out: str = ""
    """File to which the rows are appended, with the page next to it; by default results/gpu.json,
    and out/gpu.json for a trial."""
    minutes: float = 40.0
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
            json.loads(line)
            for line in out
            if line.startswith('{"what"') and line.endswith("}\n")
        ]
        if status and not why:
            last = [line.strip() for line in err if line.strip()][-1:]
            why = last[0][:300] if last else f"it ended with status {status}"
    return rows, why


def about(flags: GpuFlags) -> dict[str, str]:
    """The device, the date, the command, and the versions of the installed packages."""
    device = "CPU (a trial of the script, no result)"
    if flags.device == "cuda":
        query = "--query-gpu=name,memory.total,driver_version"
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        device = subprocess.run(
            command, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
    installed = importlib.metadata.packages_distributions()
    names = [name for name in PACKAGES if name in installed]
    versions = {name: importlib.metadata.version(installed[name][0]) for name in names}
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return {"device": device, "date": date, "command": " ".join(sys.argv), **versions}


def read_lines(path: Path) -> list[dict]:
    """The lines of a file of rows; [] without a file. UserError: a file with different lines."""
    lines = read_text(path).splitlines() if path.is_file() else []
    try:
        need(
            not lines or lines[0].startswith('{"about"'),
            "its first line is not of this command",
        )
        return [json.loads(line) for line in lines]
    except ValueError as e:
        raise UserError(
            f"--out={path}: not a file of rows ({e}); name a different file"
        ) from None


def parts_of(words: str) -> list[str]:
    """The parts that --parts names: NAME, or WORD for all parts WORD-*. UserError: no such part."""
    names = []
    for word in filter(None, words.split(",")):
        chosen = [name for name in PARTS if name == word or name.startswith(f"{word}-")]
        need(chosen, f"--parts={word}: no such part; there are {', '.join(PARTS)}")
        names += chosen
    return list(dict.fromkeys(names))


def run_list(flags: GpuFlags) -> None:
    """Run the parts one after the other. Append each row to the file and print it, as JSON; write
    the page after each part."""
    trial = flags.device == "cpu" or flags.scale == "tiny"
    path = Path(flags.out or (ROOT / "out" if trial else ROOT / "results") / "gpu.json")
    check_output("out", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    succeeded = {line["part"] for line in read_lines(path) if line.get("failed") == ""}
    names = parts_of(flags.parts) or [name for name in PARTS if name not in succeeded]
    end = time.perf_counter() + 60 * flags.minutes

    def write(line: dict) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")

    write({"about": about(flags)})
    for name in names:
        start = time.perf_counter()
        if end - start < 20:
            print(f"{name}: skipped, --minutes={flags.minutes:g} are over", flush=True)
            continue
        command = [sys.executable, "-m", "bench", f"--part={name}"]
        command += [f"--device={flags.device}", f"--scale={flags.scale}"]
        rows, why = said_by(command, min(LONG.get(name, LIMIT), end - start))
        for row in rows:
            write({"part": name, **row})
        if rows and name in ("ours", "trl"):
            for row in ours_over_trl(read_lines(path)):
                write({"part": name, **row})
        write({"part": name, "seconds": time.perf_counter() - start, "failed": why})
        rewrite(path.with_suffix(".md"), table(read_lines(path)))


def table(lines: list[dict]) -> str:
    """The page's table: the newest rows of each part, below the device, date and versions of their
    run."""
    newest: dict[str, list] = {}
    about, rows = {}, []
    for line in lines:
        if "about" in line:
            about, rows = line["about"], []
        elif "failed" in line:
            versions = " ".join(
                f"{name} {about[name]}" for name in PACKAGES if name in about
            )
            state = line["failed"] or f"{line['seconds']:.0f} s"
            head = f"**{line['part']}**: {state}; {about['device']}, {about['date']}, {versions}"
            newest[line["part"]] = [[head], *rows]
            rows = []
        else:
            rows.append(cells(line))
    return markdown(
        ["measured", "result", "spread", "goal", "met"], sum(newest.values(), [])
    )


def cells(row: dict) -> list[str]:
    """The cells of a row: a quantity, its value, its spread, and its goal."""
    value = row["why"] or f"{row['value']:,.4g} {row['unit']}".strip()
    spread = " to ".join(f"{x:,.4g}" for x in row["spread"])
    met = {True: "yes", False: "no", None: ""}[row["met"]]
    return [
        cell.replace("|", "/")
        for cell in (row["what"], value, spread, row["goal"], met)
    ]


def main(argv: list[str] | None = None) -> None:
    """Run `python -m bench`, or one part of it. UserError: a flag is wrong."""
    flags = parse_flags(GpuFlags, argv, __doc__.strip())
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "gpu: there is no GPU here; try the script with --device=cpu --scale=tiny"
        )
    if not flags.part:
        run_list(flags)
        return
    need(
        flags.part in PARTS,
        f"--part={flags.part}: no such part; there are {', '.join(PARTS)}",
    )
    for row in PARTS[flags.part](Setting(flags.device, flags.scale == "tiny")):
        print(json.dumps(row), flush=True)
