"""Arithmetic of timings; the list of GPU measurements, on a CPU."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from test_grading import alive
from test_hub import until

import bench
from bench import gpu, gpu_parts
from machinery.flags import UserError


def test_a_ratio_is_the_geometric_mean_over_pairs():
    out = bench.compare([(2.0, 1.0), (8.0, 1.0)])
    half = math.exp(1.96 * math.log(4) / 2)  # std log 4 / sqrt 2, over sqrt 2
    want = {"ratio": 4.0, "low": 4.0 / half, "high": 4.0 * half, "a_s": 5.0, "b_s": 1.0, "pairs": 2}
    assert out == pytest.approx(want)
    assert math.isnan(bench.compare([(2.0, 1.0)])["high"])


def test_pairs_alternate():
    """a b, b a, a b: neither side gains from the order."""
    calls = []
    bench.alternate(lambda: calls.append("a"), lambda: calls.append("b"), 3, "test")
    assert "".join(calls) == "abab" + "ab" + "ba" + "ab"


@pytest.mark.parametrize(
    "name",
    [
        *("linears-8B", "head-1024", "obrs", "micro", "trl"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("memory-plain", "pair")),
    ],
)
def test_a_part_of_the_gpu_list_runs_on_a_cpu(name):
    rows = list(gpu.PARTS[name](gpu_parts.Setting("cpu", tiny=True)))
    assert rows and not [r for r in rows if r["why"] not in ("", "not installed")]
    assert all(math.isfinite(r["value"]) for r in rows if r["unit"] not in ("GiB", "%") and not r["why"])


def part(name: str, failed: str = "", value: float = 1.5) -> list[dict]:
    about = {"device": "a card", "date": "2026-01-01", "torch": "2.13.0"}
    goal = {"spread": [1.0, 2.0], "goal": ">= 1", "met": value >= 1}
    row = gpu_parts.row("speed", value, "tokens/s", **goal)
    return [{"about": about}, {"part": name, **row}, {"part": name, "seconds": 3.0, "failed": failed}]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name, last",
    [
        ("obrs", "tokens of a step"),
        pytest.param("sync", "a publication and its check, 2 times", marks=pytest.mark.slow),
        pytest.param("ours", "our step, 16 responses of 8", marks=pytest.mark.slow),
    ],
)
def test_the_gpu_list_appends_rows_to_its_file(tmp_path, monkeypatch, name, last):
    """A part runs in a separate process, vLLM too. Earlier lines stay; a late part is skipped."""
    assert sum(gpu.LONG.get(name, gpu.LIMIT) for name in gpu.PARTS) <= 60 * gpu.GpuFlags.minutes - 20
    path = tmp_path / "gpu.json"
    before = part("old")
    path.write_text("".join(json.dumps(line) + "\n" for line in before))
    flags = gpu.GpuFlags(device="cpu", scale="tiny", out=str(path), parts=name)
    monkeypatch.setattr(gpu, "LIMIT", 300)  # a busy machine may need longer
    gpu.run_list(flags)
    lines = gpu.read_lines(path)
    head, *rows, end = lines[3:]
    assert lines[:3] == before and head["about"].items() >= {("torch", torch.__version__)}
    assert end.items() >= {("part", name), ("failed", "")}
    assert last in [row["what"] for row in rows]
    page = path.with_suffix(".md").read_text()
    assert f"torch {torch.__version__}" in page and f"| {last} |" in page
    gpu.run_list(replace(flags, minutes=0.01, parts="micro"))
    assert '"part": "micro"' not in path.read_text()


def test_the_page_has_the_newest_rows_of_each_part():
    lines = part("vllm", value=0.5) + part("obrs")[1:] + part("vllm", value=2500.0)
    assert gpu.table(lines).splitlines()[2:] == [
        "| **vllm**: 3 s; a card, 2026-01-01, torch 2.13.0 |",
        "| speed | 2,500 tokens/s | 1 to 2 | >= 1 | yes |",
        "| **obrs**: 3 s; a card, 2026-01-01, torch 2.13.0 |",
        "| speed | 1.5 tokens/s | 1 to 2 | >= 1 | yes |",
    ]
    assert "| **trl**: it ended with status 1; a card" in gpu.table(part("trl", "it ended with status 1"))


def test_only_parts_without_a_success_run_again(tmp_path, monkeypatch):
    path, ran = tmp_path / "gpu.json", []
    path.write_text("".join(json.dumps(line) + "\n" for line in part("vllm") + part("obrs", "failed")))
    monkeypatch.setattr(gpu, "said_by", lambda command, limit: (ran.append(command[3]), ([], ""))[1])
    gpu.run_list(gpu.GpuFlags(device="cpu", scale="tiny", out=str(path)))
    assert ran == [f"--part={name}" for name in gpu.PARTS if name != "vllm"]
    ran.clear()
    gpu.run_list(gpu.GpuFlags(device="cpu", scale="tiny", out=str(path), parts="vllm"))
    assert ran == ["--part=vllm"]


def test_a_word_names_all_parts_that_begin_with_it():
    assert gpu.parts_of("head,obrs") == ["head-1024", "head-2560", "obrs"]
    assert gpu.parts_of("memory,memory-plain") == ["memory-plain", "memory-aligned"]
    with pytest.raises(UserError, match="--parts=hea: no such part"):
        gpu.parts_of("hea")


def test_every_gpu_test_belongs_to_one_part():
    """The parts tests-* divide tests/test_gpu.py by names."""
    listed = []

    class Names:
        def pytest_collection_finish(self, session):
            listed.append([item.nodeid for item in session.items])

    for words in ["", *(gpu.PARTS[name].args[0] for name in gpu.parts_of("tests"))]:
        pytest.main(["--collect-only", "-qq", str(ROOT / "tests/test_gpu.py"), "-k", words], plugins=[Names()])
    assert sorted(sum(listed[1:], [])) == sorted(listed[0]) and all(listed)


def test_the_ratio_of_steps_uses_the_newest_rows():
    lines = [{"part": name, "value": value, "unit": "s"} for name, value in [("trl", 9.0), ("trl", 4.0), ("ours", 3.0)]]
    assert gpu_parts.ours_over_trl(lines[:2]) == []
    (ratio,) = gpu_parts.ours_over_trl(lines)
    assert (ratio["value"], ratio["met"]) == (0.75, True)
    another_card = [*lines[:2], {"about": {"device": "another card"}}, lines[2]]
    assert gpu_parts.ours_over_trl(another_card) == []


WAYS = {
    "ValueError: no": "raise ValueError('no')",
    "it exceeded its limit of 2 s": "import time; time.sleep(60)",
    "it ended with status -9": "import os; os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("why", WAYS)
def test_a_part_that_ends_badly_keeps_its_measurements(why):
    row = gpu_parts.row("a", 1.5)
    said = f"print('noise'); print({json.dumps(row)!r}, flush=True); {WAYS[why]}"
    assert gpu.said_by([sys.executable, "-c", said], 2 if "limit" in why else 60) == ([row], why)


def test_processes_started_by_a_part_end_with_it(tmp_path):
    started = tmp_path / "pid"
    for limit in (1, 5, 60):  # a busy machine may need longer to start
        gpu.said_by(["sh", "-c", f"sleep 600 & echo $! > {started}; wait"], limit)
        if started.exists():
            break
    assert until(lambda: not alive(int(started.read_text())))


WITHOUT_TORCH = """
import os, runpy, sys
sys.modules["torch"] = None  # its import raises an error
sys.path.insert(0, ".")
try:
    (runpy.run_path if sys.argv[1].endswith(".py") else runpy.run_module)(sys.argv[1], run_name="__main__")
except ImportError:
    print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("THP_MEM_ALLOC_ENABLE"))
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("script", ["train.py", "eval.py", "worth.py", "bench", "remote"])
def test_variables_precede_torch(script):
    """Idle threads of OpenMP sleep, and large tensors get large pages: each variable is read once."""
    settings = ("GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE")
    env = {key: value for key, value in os.environ.items() if key not in settings}
    argv = [sys.executable, "-c", WITHOUT_TORCH, script]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=50)
    assert done.stdout.split() == ["2000", "1"], done.stderr[-500:]


@pytest.mark.parametrize("text", ['{"a": 1}\n', "notes\n", '{"about": {}}\n{"part"'])
def test_rows_are_not_appended_to_another_file(tmp_path, text):
    path = tmp_path / "notes.json"
    path.write_text(text)
    with pytest.raises(UserError, match="notes.json: not a file of rows .*; name a different file"):
        gpu.run_list(gpu.GpuFlags(device="cpu", scale="tiny", out=str(path)))
    assert path.read_text() == text
