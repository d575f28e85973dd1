"""What two busy torch processes on one machine cost each other, by what OpenMP's idle threads are told to do.

    python results/spin.py

A forward-backward of a small model with 2 threads, beside another such process over the same alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from tqdm import tqdm

from bench import compare, print_table, shaped
from results import sweep

# what is added to the environment; OpenMP reads it once, when torch is imported
SPIN_SETTINGS = ("none", "OMP_WAIT_POLICY=PASSIVE", "GOMP_SPINCOUNT=2000", "GOMP_SPINCOUNT=10000", "OMP_NUM_THREADS=1")


def spin_worker() -> None:
    """A process of its own. A line of its input is a number of seconds: it runs forward and backward for so
    long, and prints how often in a second."""
    model = shaped("")
    ids = torch.randint(0, 256, (16, 32))
    for line in sys.stdin:
        limit = float(line)
        start = time.perf_counter()
        count = 0
        while time.perf_counter() - start < limit:
            model(input_ids=ids, labels=ids).loss.backward()
            count += 1
        print(count / (time.perf_counter() - start), flush=True)


class Worker:
    """A `spin_worker` with a setting of SPIN_SETTINGS, killed at the end of its `with` or after `limit` seconds."""

    def __init__(self, setting: str, limit: float):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
        env["OMP_NUM_THREADS"] = "2"
        if setting != "none":
            name, value = setting.split("=")
            env[name] = value
        command = [sys.executable, __file__, "worker"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, **pipes)
        self.alarm = threading.Timer(limit, self.process.kill)
        self.alarm.start()

    def start(self, span: float) -> None:
        """Let it be busy for so many seconds."""
        print(span, file=self.process.stdin, flush=True)

    def rate(self) -> float:
        """Forward-backwards per second since `start`."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("results/spin.py: a worker ended before it had measured")
        return float(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error) -> None:
        self.alarm.cancel()
        self.process.kill()
        self.process.communicate()


def measure(span: float = 5.0, rounds: int = 5) -> dict:
    """Seconds of a forward-backward beside a busy process of the same kind over those alone, a row for each setting.

    OpenMP's idle threads wait in a loop before they sleep, and keep the processor from a neighbour meanwhile."""
    rows = {}
    for setting in tqdm(SPIN_SETTINGS, desc="spin", leave=False):
        limit = 120 + 4 * span * rounds
        times = []
        with Worker(setting, limit) as first, Worker(setting, limit) as second:
            for worker in (first, second):  # until both have loaded and warmed up
                worker.start(1.0)
                worker.rate()
            for _ in range(rounds):
                first.start(span)
                alone = first.rate()
                first.start(span)
                second.start(span)
                beside = (first.rate() + second.rate()) / 2
                times.append((1 / beside, 1 / alone))
        row = compare(times)
        rows[setting] = {**row, "alone_per_s": 1 / row["b_s"], "beside_per_s": 1 / row["a_s"]}
    return rows


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        spin_worker()
    else:
        sweep.no_arguments("spin")
        print_table({"spin": measure()})
