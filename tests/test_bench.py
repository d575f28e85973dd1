"""Arithmetic and table of timings; the list of GPU measurements, on a CPU."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from test_grading import alive
from test_hub import until

import bench
from bench import gpu, gpu_parts


def test_a_ratio_is_the_geometric_mean_over_pairs():
    out = bench.compare([(2.0, 1.0), (8.0, 1.0)])
    half = math.exp(1.96 * math.log(4) / 2)  # std log 4 / sqrt 2, over sqrt 2
    want = {"ratio": 4.0, "low": 4.0 / half, "high": 4.0 * half, "a_s": 5.0, "b_s": 1.0, "pairs": 2}
    assert out == pytest.approx(want)
    assert math.isnan(bench.compare([(2.0, 1.0)])["high"])


def test_pairs_alternate():
    """a b, b a, a b: neither side gains from the order."""
    calls = []
    bench.alternate(lambda: calls.append("a"), lambda: calls.append("b"), 3, "test", warm=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"


TRIAL = gpu_parts.Setting("cpu", tiny=True)


@pytest.mark.parametrize("name", ["linears", "head", "obrs", "memory", "rollouts", "trl"])
def test_a_part_of_the_gpu_list_runs_on_a_cpu(name):
    rows = list(gpu.PARTS[name][0](TRIAL))
    assert rows and not [r for r in rows if r["why"] not in ("", "not installed")]
    assert all(math.isfinite(r["value"]) for r in rows if r["unit"] not in ("GiB", "%") and not r["why"])


@pytest.mark.timeout(600)
def test_the_gpu_list_writes_its_page_part_by_part(tmp_path):
    """A part runs in a separate process, vLLM too. Records of earlier parts stay; a late part is skipped."""
    assert sum(limit for _, limit in gpu.PARTS.values()) <= 60 * gpu.GpuFlags.minutes - 20
    gpu.write(tmp_path, {"head": {"rows": [gpu_parts.row("old", 3.0)], "failed": "", "seconds": 1.0, "about": {}}})
    (tmp_path / "gpu.md").write_text("# mine\n\n" + (tmp_path / "gpu.md").read_text().split("\n\n", 1)[1])
    flags = gpu.GpuFlags(device="cpu", scale="tiny", out=str(tmp_path))
    records = gpu.run_list(flags, ["vllm"])
    assert list(records) == ["head", "vllm"] and gpu.known(tmp_path).keys() == records.keys()
    assert [r["failed"] for r in records.values()] == ["", ""]
    assert "vLLM, 0.6B: a publication and its check" in [r["what"] for r in records["vllm"]["rows"]]
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("# mine\n") and "| old | 3 |" in page and "Not run yet: tests, linears, " in page
    assert "CPU (a trial of the script, no result)" in page and f"torch {torch.__version__}" in page
    assert "obrs" not in gpu.run_list(gpu.GpuFlags(device="cpu", out=str(tmp_path), minutes=0.01), ["obrs"])


WAYS = {
    "ValueError: no": "raise ValueError('no')",
    "it exceeded its limit of 2 s": "import time; time.sleep(60)",
    "it ended with status -9": "import os; os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("why", WAYS)
def test_a_part_that_ends_badly_keeps_its_measurements(why):
    row = gpu_parts.row("a", 1.5)
    said = f"print('noise'); print({json.dumps(row)!r}, flush=True); {WAYS[why]}"
    limit = 2 if "limit" in why else 60
    assert gpu.said_by([sys.executable, "-c", said], limit) == ([row], why)


def test_processes_started_by_a_part_end_with_it(tmp_path):
    started = tmp_path / "pid"
    program = "import os, pathlib, subprocess, time; child = subprocess.Popen(['sleep', '600']); "
    program += f"pathlib.Path({str(started)!r}).write_text(str(child.pid)); time.sleep(600)"
    for limit in (1, 5, 60):  # a busy machine may need longer to start
        gpu.said_by([sys.executable, "-c", program], limit)
        if started.exists():
            break
    assert until(lambda: not alive(int(started.read_text())))


def test_a_case_that_fails_does_not_end_its_part():
    def rows():
        yield gpu_parts.row("a", 1.0)
        raise RuntimeError("CUDA out of memory\nand more")

    got = list(gpu_parts.softly("b", rows()))
    assert got == [gpu_parts.row("a", 1.0), gpu_parts.missing("b", "failed: RuntimeError: CUDA out of memory")]


def test_lines_of_the_gpu_page():
    assert gpu.line_of(gpu_parts.row("a", 12345.6, "tokens/s", (1.0, 2.5))) == ["a", "12,346 tokens/s", "1 to 2.5", ""]
    for met, cell in ((True, ">= 1.3: yes"), (False, ">= 1.3: **no**"), (None, ">= 1.3")):
        assert gpu.line_of(gpu_parts.row("a", math.nan, "x", goal=">= 1.3", met=met)) == ["a", "- x", "", cell]
    assert gpu.line_of(gpu_parts.missing("a", "not installed")) == ["a", "not installed", "", ""]


WITHOUT_TORCH = """
import os, runpy, sys
sys.modules["torch"] = None  # its import raises an error
sys.path.insert(0, ".")
run = runpy.run_path if sys.argv[1].endswith(".py") else runpy.run_module
try:
    run(sys.argv[1], run_name="__main__")
except ImportError:
    print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("script", ["train.py", "eval.py", "worth.py", "bench", "remote"])
def test_idle_openmp_threads_sleep(script):
    """OpenMP reads the variable only once, when torch is imported."""
    env = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    argv = [sys.executable, "-c", WITHOUT_TORCH, script]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=50)
    assert done.stdout.split() == ["2000"], done.stderr[-500:]
