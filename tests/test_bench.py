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
    assert out["ratio"] == pytest.approx(4.0)
    assert out["high"] / out["ratio"] == pytest.approx(
        math.exp(1.96 * math.log(4) / 2)
    )  # std log 4 / sqrt 2, over sqrt 2
    assert out["ratio"] / out["low"] == pytest.approx(out["high"] / out["ratio"])
    assert (out["a_s"], out["b_s"], out["pairs"]) == (5.0, 1.0, 2)
    assert math.isnan(bench.compare([(2.0, 1.0)])["high"])


def test_pairs_alternate():
    """a b, b a, a b: neither side gains from the order."""
    calls = []
    out = bench.alternate(lambda: calls.append("a"), lambda: calls.append("b"), 3, "test", warm=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert out["pairs"] == 3


def test_the_table(capsys):
    pair = {"ratio": 1.5, "low": 1.25, "high": 1.75, "a_s": 3.0, "b_s": 2.0, "pairs": 2}
    bench.print_table({"update": {**pair, "goal": "low"}, "gpu": {"tokens_per_s": 12.0}, "spin": {"none": pair}})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "             ratio     95 % interval   ours, s  other, s   more"
    assert lines[1] == "update       1.500     1.250 - 1.750     3.000     2.000   goal low"
    assert lines[2] == "gpu" + " " * 56 + "tokens_per_s 12"
    assert lines[3].split() == ["spin", "none", "1.500", "1.250", "-", "1.750", "3.000", "2.000"]
    assert json.loads(lines[4])["spin"] == {"none": pair}


# ---------------------------------------------------------------------------------------------------------------------
# The GPU list on a CPU
# ---------------------------------------------------------------------------------------------------------------------

TRIAL = gpu_parts.Setting("cpu", tiny=True)


@pytest.mark.parametrize("name", ["linears", "head", "obrs", "learner", "memory", "rollouts", "exact", "trl"])
def test_a_part_of_the_gpu_list_runs_on_a_cpu(name):
    rows = list(gpu.PARTS[name][0](TRIAL))
    assert rows and not [r for r in rows if r["why"] not in ("", "not installed")]
    assert all(math.isfinite(r["value"]) for r in rows if r["unit"] not in ("GiB", "%") and not r["why"])
    json.loads(json.dumps(rows))


@pytest.mark.timeout(600)
def test_the_gpu_list_writes_its_page_part_by_part(tmp_path, monkeypatch):
    """Parts run in separate processes: vLLM, and the tests that a CPU can run. Records of earlier parts stay."""
    assert gpu.PARTS["vllm"][1] < 300
    assert (
        sum(limit for _, limit in gpu.PARTS.values()) <= 60 * gpu.GpuFlags.minutes - 20
    )  # otherwise the last part is skipped
    gpu.write(tmp_path, {"head": {"rows": [gpu_parts.row("old", 3.0)], "failed": "", "seconds": 1.0, "about": {}}})
    (tmp_path / "gpu.md").write_text("# mine\n\n" + (tmp_path / "gpu.md").read_text().split("\n\n", 1)[1])
    flags = gpu.GpuFlags(device="cpu", scale="tiny", out=str(tmp_path))
    records = gpu.run_list(flags, ["tests", "vllm"])
    assert list(records) == ["head", "tests", "vllm"] and gpu.known(tmp_path).keys() == records.keys()
    assert [r["failed"] for r in records.values()] == ["", "", ""]
    assert records["tests"]["rows"][-1]["met"] and records["tests"]["rows"][-1]["value"] == 8
    assert "vLLM, 0.6B: a publication and its check" in [r["what"] for r in records["vllm"]["rows"]]
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("# mine\n") and "| old | 3 |" in page and "Not run yet: linears, " in page
    assert "CPU (a trial of the script, no result)" in page and f"torch {torch.__version__}" in page
    late = gpu.run_list(gpu.GpuFlags(device="cpu", scale="tiny", out=str(tmp_path), minutes=0.01), ["obrs"])
    assert "obrs" not in late


ROW = json.dumps(gpu_parts.row("a", 1.5))
WAYS = {
    "": ("print({row!r})", 1),
    "ValueError: no": ("print({row!r}); raise ValueError('no')", 1),
    "it exceeded its limit of 3 s": ("print({row!r}, flush=True); import time; time.sleep(60)", 1),
    "it ended with status -9": ("import os; os.kill(os.getpid(), 9)", 0),
}


@pytest.mark.parametrize("why", WAYS)
def test_a_part_that_ends_badly_keeps_its_measurements(why):
    program, n = WAYS[why]
    limit = 3 if "limit" in why else 60
    rows, failed = gpu.said_by([sys.executable, "-c", "print('noise');" + program.format(row=ROW)], limit)
    assert (rows, failed) == ([gpu_parts.row("a", 1.5)] * n, why)


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
    nan = math.nan
    assert gpu.line_of(gpu_parts.row("a", 12345.6, "tokens/s", (1.0, 2.5))) == ["a", "12,346 tokens/s", "1 to 2.5", ""]
    assert gpu.line_of(gpu_parts.row("a", 1.4, "x", goal=">= 1.3", met=True))[3] == ">= 1.3: yes"
    assert gpu.line_of(gpu_parts.row("a", 1.2, "x", goal=">= 1.3", met=False))[3] == ">= 1.3: **no**"
    assert gpu.line_of(gpu_parts.row("a", nan, "GiB", goal="near")) == ["a", "- GiB", "", "near"]
    assert gpu.line_of(gpu_parts.missing("a", "not installed")) == ["a", "not installed", "", ""]


def test_operations_of_a_token():
    """Every matrix and the tied head once, forward and twice backward, and causal attention."""
    model = TRIAL.model("0.6B")
    H, inner, A, kv, V, length = 64, 96, 64, 32, 300, 40
    layer = H * A + 2 * H * kv + A * H + 3 * H * inner
    norms = 2 * (2 * H + 2 * 32) + H
    attention = 3 * 2 * (2 * A * length / 2)  # three passes, two products, half of the places
    assert gpu_parts.operations(model, length) == 6 * (2 * layer + norms + H * V) + 2 * attention


AS_TORCH_IS_IMPORTED = """
import importlib.abc, os, runpy, sys

class First(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.stdout.flush()
            os._exit(0)

sys.meta_path.insert(0, First())
sys.path.insert(0, ".")
run = runpy.run_path if sys.argv[1].endswith(".py") else runpy.run_module
run(sys.argv[1], run_name="__main__")
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("script", ["train.py", "eval.py", "worth.py", "bench", "remote"])
def test_idle_openmp_threads_sleep(script):
    """OpenMP reads the variable only once, when torch is imported."""
    env = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    argv = [sys.executable, "-c", AS_TORCH_IS_IMPORTED, script]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=50)
    assert done.stdout.split() == ["2000"], done.stderr[-500:]
