"""The whole loop: real vLLM, kill and resume, stop by a signal, two ranks, every preset."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchrun
from conftest import ROOT, TINY_TASK, make_cfg, make_groups
from safetensors.torch import load_file
from test_metrics import unexplained
from transformers import AutoModelForCausalLM

import corrections
import eval as evaluation
import presets
import quant
import train
from corrections import USES_Z
from learner import Learner
from machinery import checkpoint, plot, session, settings
from machinery.flags import UserError
from machinery.log import read_metrics, samples_of
from machinery.log import rows as run_rows
from machinery.ranks import Comm
from machinery.run import checkpoint_to_resume, open_run
from model import memory
from model.engines import HFEngine
from sampling import Sampling
from source import LocalSource
from tasks.arith import arithmetic_tokenizer

# A test with several processes needs more time. Each process has its own limit.
SEVERAL_PROCESSES = pytest.mark.timeout(900)


# -- Runs, in a separate process and in this process ------------------------------------------------------------------


def flags(solvers, out, **changes) -> list[str]:
    """A tiny run: two updates for each rollout batch, a checkpoint in the middle of a rollout batch."""
    base = {
        "model": solvers / "policy",
        "actor": solvers / "actor",
        "rollout": "hf",
        "out": out,
        "steps": 6,
        "rollout_batch": 32,
        "train_batch": 16,
        "group_size": 4,
        "max_tokens": 10,
        "save_every": 3,
        "eval_problems": 16,
        "lr": 1e-3,
        "actor_lr": 1e-2,
        "dtype": "float32",
        "obrs_topk": 5,
        "task": "arith",
        **TINY_TASK,
    }
    return [f"--{name}={value}" for name, value in {**base, **changes}.items()]


def start(argv, ranks=1):
    """train.py in a separate process, under torchrun if there are several ranks."""
    if ranks == 1:
        return begin(torchrun.Command("train.py", *argv))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    command = [*torchrun.COMMAND, f"--nproc_per_node={ranks}", "train.py", *argv]
    return begin(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))


STARTED: list[subprocess.Popen | torchrun.Command] = []


def begin(process):
    """The process, which the fixture below ends after the test."""
    STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def no_process_stays_behind():
    """End processes that a failed test left running, by SIGTERM, after which torchrun ends its ranks."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def finish(process, timeout=400):
    """(exit status, stdout, stderr) of a process."""
    out, err = process.communicate(timeout=timeout)
    return process.poll(), out, err


def run_to_the_end(argv) -> str:
    """The output of a run that must succeed."""
    code, out, err = finish(start(argv))
    assert code == 0, err[-3000:]
    return out


def wait_for(out, step, process) -> None:
    """Wait until the run has logged `step`."""
    end = time.time() + 200
    while time.time() < end and process.poll() is None:
        path = Path(out) / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last line may be half written
        if f'"step": {step},' in whole:
            return
        time.sleep(0.02)
    if process.poll() is None:
        raise AssertionError(f"no step {step} in 200 seconds")
    raise AssertionError(f"no step {step}: {process.communicate(timeout=60)[1][-2000:]}")


@pytest.fixture
def train_here(monkeypatch):
    """Train in this process: argv -> (configuration, metrics). The page of metrics explains every logged key.

    Curves are drawn in the tests of separate processes only."""
    monkeypatch.setattr(session, "catch_signals", lambda: [])
    monkeypatch.setattr(plot, "draw", lambda runs, path: path)

    def run(argv):
        cfg = settings.parse(argv)
        train.train(cfg)
        rows = read_metrics(cfg.out)
        assert unexplained({key for row in rows for key in row} - {"step"}) == []
        return cfg, rows

    return run


def timeless(out) -> list[dict]:
    """Every metric of each step except times and weight syncs: a resumed run checks its engine from the start."""
    rows = {}
    for row in read_metrics(out):
        kept = {k: v for k, v in row.items() if not k.endswith(("_s", "_seconds"))}
        rows.setdefault(row["step"], {}).update(kept)
    return [{k: v for k, v in row.items() if not k.startswith(("speed/", "sync/"))} for row in rows.values()]


def samples(out) -> list[dict]:
    return run_rows(Path(out) / "samples.jsonl")


def without_eval(out) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in timeless(out)]


def shards_of(folder) -> dict[str, torch.Tensor]:
    """Every tensor in a checkpoint's shards, whole."""
    reader = dcp.FileSystemReader(folder / "shards")
    tensors = {name: torch.empty(x.size) for name, x in reader.read_metadata().state_dict_metadata.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.fixture(scope="module")
def whole(solvers, tmp_path_factory):
    """(folder, printed text) of an undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, run_to_the_end(flags(solvers, out))


# -- Killed, stopped, resumed -----------------------------------------------------------------------------------------


def test_a_run_logs_every_update_and_writes_all_its_files(whole, solvers):
    out, text = whole
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == list(range(-1, 6))
    assert {"eval/policy_pass@1", "eval/actor_pass@1"} <= rows[0].keys() & rows[-1].keys()
    assert all(row["obrs/kl_after"] < row["distill_kl"] for row in rows[1:])
    assert [row["staleness/max_updates"] for row in rows[1:]] == [0, 1] * 3
    assert ["rollout_s" in row for row in rows[1:]] == [True, False] * 3
    assert ["sync/MiB" in row for row in rows[1:]] == [True, False] * 3  # a roll-out logs it once
    assert unexplained({key for row in rows for key in row} - {"step"}) == []
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step_000003", "step_000006"]
    assert "policy pass@1" in text and (out / "curves.png").stat().st_size > 20_000
    before = AutoModelForCausalLM.from_pretrained(solvers / "policy").state_dict()
    after = AutoModelForCausalLM.from_pretrained(out / "checkpoints" / "step_000006" / "policy").state_dict()
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])


def test_samples_are_logged_and_printed(whole, capsys):
    """Four responses of the first update with the gap at every token, and printed in colours."""
    out, _ = whole
    logged = samples(out)
    assert [row["step"] for row in logged] == [0] * 4
    for row in logged:
        assert " ".join(row["tokens"]) == row["response"]
        assert row["gap"] == pytest.approx(sum(map(abs, row["gaps"])) / len(row["tokens"]), abs=1e-9)
        at, token, gap = row["largest"][0]
        assert (row["tokens"][at], row["gaps"][at], abs(gap)) == (token, gap, max(map(abs, row["gaps"])))
    assert max(row["gap"] for row in logged) > 0.05  # the actor's tokens, as the policy sees them
    plot.main([f"--samples={out}", "--last=2"])
    printed = capsys.readouterr().out
    assert printed.count("update 1: reward") == 2 and logged[-1]["prompt"] in printed
    assert len({plot.coloured("x", gap) for gap in (0.001, 0.02, -0.2, 2.0)}) == 4


def test_replies_have_no_gap():
    group = make_groups(1, 1)[0]
    r = group.responses[0]
    r.loss_mask[1] = False
    (row,) = samples_of([group], [r.logp_inf + 1 + r.tokens], 0, arithmetic_tokenizer())
    want = (1 + r.tokens) * r.loss_mask
    assert np.allclose(row["gaps"], want, atol=1e-3) and row["gap"] == pytest.approx(
        want.sum() / r.loss_mask.sum(), 1e-3
    )


def test_a_wrong_engine_is_found_at_the_first_update(solvers, tmp_path, train_here, monkeypatch):
    """Scaled logits on one side, as by a forgotten temperature."""
    forward = HFEngine._forward

    def scaled(self, ids, **more):
        logits, cache = forward(self, ids, **more)
        return 0.8 * logits, cache

    monkeypatch.setattr(HFEngine, "_forward", scaled)
    with pytest.raises(UserError, match="learner and engine compute different policies.*--check_sync=False"):
        train_here(flags(solvers, tmp_path / "run", steps=2))
    train_here(flags(solvers, tmp_path / "other", steps=2, check_sync=False))


COUNTING = {"obrs_target": "new", "distill_kl_target": 0.05, "keep": 9, "save_every": 5, "kl_coef": 0.1}
KAPPA_AND_LAMBDA = ("learner/controllers/kappa", "learner/controllers/distill")
COUNTING |= {"delay": "lognormal", "delay_min": 1.0, "delay_max": 6.0, "delay_samplers": 3, "step_seconds": 1.25}


def saved_at(out, step) -> dict:
    """Every value in a checkpoint except the model folders, by path: learner.pt, rank0.pt and the shards."""
    folder = out / "checkpoints" / f"step_{step:06d}"
    parts = {name: checkpoint.read(folder, f"{name}.pt") for name in ("learner", "rank0")}
    return leaves({**parts, "shards": shards_of(folder)})


def leaves(x, path="") -> dict:
    """{path: leaf} of dicts, lists, tuples and dataclasses; tensors and arrays as lists."""
    if isinstance(x, (torch.Tensor, np.ndarray)):
        return {path: x.tolist()}
    x = vars(x) if is_dataclass(x) else x
    if isinstance(x, dict):
        parts = [leaves(value, f"{path}/{name}") for name, value in x.items()]
    elif isinstance(x, (list, tuple)):
        parts = [leaves(value, f"{path}/{i}") for i, value in enumerate(x)]
    else:
        return {path: x}
    return {name: leaf for part in parts for name, leaf in part.items()}


def test_every_group_is_trained_on_once_and_in_order(solvers, tmp_path, train_here, monkeypatch):
    """Three updates to a rollout batch take its groups in the order of sampling."""
    seen, update = [], train.Training.update

    def watched(training):
        seen.extend(group.uid[2] for group in training.pending[0])
        return update(training)

    monkeypatch.setattr(train.Training, "update", watched)
    train_here(flags(solvers, tmp_path / "run", rollout_batch=48, eval_every=0))
    assert seen == list(range(6 * 16 // 4))


def test_counters_that_are_not_0_go_on(solvers, tmp_path, train_here, monkeypatch):
    """Stopped after update 5 and resumed: every count equals the count of the uninterrupted run, and no count is 0.

    Updates 1, 4, 5 and 6 are skipped for a NaN loss; update 2 counts as completely rejected."""
    original, counts = session.Learner.step, []

    def step(self, logged):
        changed = {"loss": math.nan} if self.version in (0, 3, 4, 5) else {}
        if self.version == 1:
            changed |= {"rollout_corr/rollout_rs_masked_fraction": 1.0}
            self.models.policy.zero_grad(set_to_none=False)
        out = original(self, logged | changed)
        counts.append((self.version, self.skipped, self.skipped_in_a_row, self.rejected))
        return out

    monkeypatch.setattr(session.Learner, "step", step)
    whole, out = tmp_path / "whole", tmp_path / "run"
    train_here(flags(solvers, whole, **COUNTING, steps=8))
    whole_counts = list(counts)
    train_here(flags(solvers, out, **COUNTING, steps=5))
    assert counts[-1] == (5, 3, 2, 1)
    left = saved_at(out, 5)
    values = [left[f"/{name}"] for name in ("rank0/source/sequence", *KAPPA_AND_LAMBDA)]
    assert len({0.0, 1.0, *values}) == 2 + len(values) and left["/rank0/source/samplers/0/draws"] > 1
    assert any(name.startswith("/rank0/pending/0/0/responses") for name in left)
    train_here(["--resume", f"--out={out}", "--steps=8"])
    assert counts[-3:] == whole_counts[-3:] == [(6, 4, 3, 1), (7, 4, 0, 1), (8, 4, 0, 1)]
    assert without_eval(out) == without_eval(whole) and without_eval(whole)[-2]["start_kl"]
    assert samples(out) == samples(whole)
    resumed, uninterrupted = saved_at(out, 8), saved_at(whole, 8)
    assert resumed.keys() == uninterrupted.keys()
    clocks = ("/t_start", "/t_end")
    assert [name for name in resumed if resumed[name] != uninterrupted[name] and not name.endswith(clocks)] == []


def test_a_run_resumes_from_unrounded_weights(solvers, tmp_path, train_here):
    """In bfloat16 the export is rounded. A step of less than half a unit in the last place passes the weight check."""
    start = tmp_path / "start"
    AutoModelForCausalLM.from_pretrained(solvers / "policy").bfloat16().save_pretrained(start)
    arithmetic_tokenizer().save_pretrained(start)
    changes = {"model": start, "actor": "none", "objective": "tis", "steps": 4, "save_every": 2, "eval_every": -1}
    changes |= {"lr": 1e-6, "dtype": "bfloat16", "warmup_steps": 0}
    whole, again = tmp_path / "whole", tmp_path / "again"
    train_here(flags(solvers, whole, **changes))
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step_000004")
    train_here(["--resume", f"--out={again}"])
    assert timeless(again) == timeless(whole)
    assert saved_at(again, 4)["/learner/step"] == 4
    exported = load_file(whole / "checkpoints" / "step_000004" / "policy" / "model.safetensors")
    trained = shards_of(whole / "checkpoints" / "step_000004")
    rounded = 0
    for name, x in exported.items():
        master = trained[f"policy/{name}"]
        assert x.dtype == torch.bfloat16 and torch.equal(x, master.bfloat16())
        rounded += int((x.float() != master).sum())
    assert rounded > 1000


WRITES_FOR_EVER = """
import threading, sys
import train
from machinery import checkpoint, session, settings
write = checkpoint.write_shards
def first_alone(tensors, folder):
    if "000001" not in str(folder):
        threading.Event().wait()
    write(tensors, folder)
checkpoint.write_shards = first_alone
train.train(settings.parse(sys.argv[1:]))
"""


@SEVERAL_PROCESSES
def test_killed_during_a_save_and_resumed_is_the_same_run(whole, solvers, tmp_path, train_here):
    """The second save never ends. After SIGKILL the run resumes from the first checkpoint, in the middle of a rollout
    batch: the same metrics and optimizer states, bit for bit."""
    out, script = tmp_path / "run", tmp_path / "writes_for_ever.py"
    script.write_text(WRITES_FOR_EVER)
    process = begin(torchrun.Command(script, *flags(solvers, out, save_every=1)))
    wait_for(out, 1, process)  # the line of update 2 precedes its save
    while not (out / "checkpoints" / "step_000002.writing").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step_000001", "step_000002.writing"]
    train_here(["--resume", f"--out={out}", "--save_every=0"])
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step_000001", "step_000006"]
    assert timeless(out) == timeless(whole[0])
    assert samples(out) == samples(whole[0])
    got, want = (shards_of(folder / "checkpoints" / "step_000006") for folder in (out, whole[0]))
    assert got.keys() == want.keys() and all(torch.equal(x, want[name]) for name, x in got.items())


def test_samplers_forget_groups_after_the_checkpoint_is_complete(solvers, tmp_path, train_here, monkeypatch):
    out, seen = tmp_path / "run", []
    monkeypatch.setattr(LocalSource, "saved", lambda self: seen.append(checkpoint.newest(out).name))
    train_here(flags(solvers, out, steps=4, save_every=3))
    assert seen == ["step_000003", "step_000004"]


@SEVERAL_PROCESSES
def test_signals_save_first_and_resume_goes_on(whole, solvers, tmp_path, train_here):
    out = tmp_path / "run"
    process = start(flags(solvers, out, save_every=0))
    wait_for(out, 1, process)
    process.send_signal(signal.SIGTERM)
    code, text, err = finish(process)
    assert code == 128 + signal.SIGTERM and "saved: continue with --resume" in text, err[-3000:]
    done = len(read_metrics(out)) - 1
    assert 2 <= done < 6
    assert [p.name for p in (out / "checkpoints").iterdir()] == [f"step_{done:06d}"]
    kept = (out / "checkpoints").rename(tmp_path / "kept")
    with pytest.raises(UserError, match="has no checkpoint, though the run saved one; restore"):
        checkpoint_to_resume(settings.parse(["--resume", f"--out={out}"]), Comm())
    kept.rename(out / "checkpoints")
    train_here(["--resume", f"--out={out}"])
    assert timeless(out) == timeless(whole[0])


def test_three_signals_are_collected_and_a_second_ctrl_c_interrupts():
    caught = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in caught}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        seen = session.catch_signals()
        for number in caught:
            signal.raise_signal(number)
        assert seen == caught
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_at(monkeypatch, owner, name: str, call: int, error) -> None:
    """Let the call-th call of a function fail with `error`."""
    original, calls = getattr(owner, name), []

    def function(*args, **more):
        calls.append(1)
        if len(calls) == call:
            raise error
        return original(*args, **more)

    monkeypatch.setattr(owner, name, function)


FAULTS = {  # place of the fault: (owner, name, call, newest checkpoint afterwards, error)
    "before an update": (train.objectives, "prepare", 5, 4, ZeroDivisionError("ours")),
    "between two models' steps": (session.Learner, "_optimize", 10, 3, ZeroDivisionError("ours")),
    "while sampling": (LocalSource, "next", 3, 4, UserError("bound it")),
    "while grading": (LocalSource, "seeds", 17, 4, ZeroDivisionError("ours")),
    "in the last evaluation": (session, "held_out", 4, 6, ZeroDivisionError("ours")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_saves_a_checkpoint_and_keeps_its_traceback(
    fault, whole, solvers, tmp_path, train_here, monkeypatch, capsys
):
    """The run resumes from the boundary of the last update and equals the uninterrupted run bit for bit."""
    owner, name, call, newest, error = FAULTS[fault]
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        raise_at(patch, owner, name, call, error)
        with pytest.raises(type(error), match=str(error)):
            train_here(flags(solvers, out))
    printed = capsys.readouterr().err
    assert checkpoint.newest(out).name == f"step_{newest:06d}"
    assert ("saved: continue with --resume" in printed) == (newest != 3)
    train_here(["--resume", f"--out={out}"])
    assert timeless(out) == timeless(whole[0])
    sampled = [row["step"] for row in read_metrics(out) if "rollout_s" in row]
    assert sampled == [0, 2, 4]  # also after an error in an update


def test_a_signal_during_a_save_ends_the_run(solvers, tmp_path, train_here, monkeypatch):
    seen, save = [], checkpoint.save
    monkeypatch.setattr(session, "catch_signals", lambda: seen)
    monkeypatch.setattr(checkpoint, "save", lambda *args: (seen.append(signal.SIGINT), save(*args))[1])
    assert len(train_here(flags(solvers, tmp_path / "run"))[1]) == 4  # and the evaluation before


def test_too_many_skipped_updates_save_and_end_the_run(solvers, tmp_path, train_here, monkeypatch):
    loss = train.objectives.reduce
    monkeypatch.setattr(train.objectives, "reduce", lambda *args: loss(*args) * math.nan)
    monkeypatch.setattr(sys.modules["learner"], "MAX_SKIPS", 2)
    with pytest.raises(UserError, match="2 updates in a row had a non-finite loss or gradient"):
        train_here(flags(solvers, tmp_path / "run"))
    assert checkpoint.newest(tmp_path / "run").name == "step_000002"


def test_resume_with_deleted_checkpoints_is_refused(whole, tmp_path, train_here):
    """A run killed before or during its first save starts again."""
    out = tmp_path / "run"
    shutil.copytree(whole[0], out, ignore=shutil.ignore_patterns("checkpoints"))
    logged = (out / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="has no checkpoint, though the run saved one; restore"):
        train_here(["--resume", f"--out={out}"])
    assert (out / "metrics.jsonl").read_text() == logged
    made = json.loads((out / "config.json").read_text())
    del made["saved"]
    (out / "config.json").write_text(json.dumps(made))
    checkpoint_to_resume(settings.parse(["--resume", f"--out={out}"]), Comm())


@SEVERAL_PROCESSES
def test_two_ranks_train_and_resume_on_any_number(solvers, tmp_path, train_here):
    """One engine a rank: a whole run under FSDP, resumed in the middle of a rollout batch on two ranks;
    on one rank; and then on two ranks under DDP."""
    out, one = tmp_path / "run", tmp_path / "one"
    torchrun.torchrun("../train.py", *flags(solvers, out, parallel="fsdp", steps=5))
    whole = without_eval(out)
    assert len(whole) == 6 and all(row["response_length"] > 1 for row in whole[1:])
    shutil.rmtree(out / "checkpoints" / "step_000005")
    shutil.copytree(out, one)
    torchrun.torchrun("../train.py", "--resume", f"--out={out}")
    assert without_eval(out) == whole
    train_here(["--resume", f"--out={one}", "--steps=4"])
    torchrun.torchrun("../train.py", "--resume", f"--out={one}", "--steps=5", "--parallel=ddp")
    rows = without_eval(one)
    assert [row.keys() for row in rows] == [row.keys() for row in whole]
    for row, other in zip(rows, whole, strict=True):  # equal up to the order of sums over ranks
        for name, value in row.items():
            rounding = 1e-5 if "largest_" in name or "chi2" in name else 1e-6  # the largest, or squares, of many
            assert value == pytest.approx(other[name], rel=1e-6, abs=rounding), (row["step"], name)
    got, want = (shards_of(folder / "checkpoints" / "step_000005") for folder in (one, out))
    assert got.keys() == want.keys()
    assert all(torch.allclose(x, want[name], rtol=1e-4, atol=1e-5) for name, x in got.items())


# -- In this process, with the plain sampler --------------------------------------------------------------------------


def test_dead_weights_are_reported_before_the_first_step(solvers, tmp_path, train_here, monkeypatch, capsys):
    """And 16-bit products without AVX-512."""
    calls, step = [], Learner.step
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(corrections, "dead_weights", lambda *a: calls.append("check") or "the weights are dead")
    monkeypatch.setattr(Learner, "step", lambda *a: calls.append("step") or step(*a))
    run = dict(objective="seq_tis", steps=2, actor="none", eval_every=-1)
    train_here(flags(solvers, tmp_path / "run", **run, dtype="bfloat16"))
    assert calls == ["check", "step", "step"]
    warnings = capsys.readouterr().err
    assert warnings.count("warning: the weights are dead") == warnings.count("--dtype=float32 is faster") == 1
    assert not memory.slow_dtype(make_cfg(dtype="float32"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not memory.slow_dtype(make_cfg(dtype="bfloat16"))


# other frameworks' presets combine the same rows; the bounds of decoupled_geo_rs are narrow
COMBINED = presets.OBJECTIVES.keys() - presets.PAPERS.keys() - {"decoupled_geo_rs"}


@pytest.mark.parametrize(
    "objective, has_actor",
    [
        pytest.param(name, i % 2 == 0, marks=[pytest.mark.slow] * (name in COMBINED))
        for i, name in enumerate(presets.OBJECTIVES)
    ],
)
def test_every_objective_trains_end_to_end(objective, has_actor, solvers, tmp_path, train_here):
    """Every preset, half of them with an actor: metrics are finite, weights move, all checks pass."""
    actor = solvers / "actor" if has_actor else "none"
    changes = {"objective": objective, "steps": 2, "save_every": 0, "eval_every": -1, "actor": actor}
    cfg, rows = train_here(flags(solvers, tmp_path / "run", **changes))
    assert len(rows) == 3
    for row in rows[1:]:
        assert row["skipped_steps"] == 0 and row["loss"] is not None
        rejected = row["rollout_corr/rollout_rs_masked_fraction"] > 0  # perhaps every response with a gradient
        alike = row["advantage_abs"] == 0  # every group has equal rewards: nothing to learn
        if not cfg.cppo_beta:  # the CPPO term does not depend on rewards
            assert (row["grad_norm"] == 0) if alike else (row["grad_norm"] > 0 or rejected)
    assert max(row["advantage_abs"] for row in rows[1:]) > 0
    assert ("distill_kl" in rows[1]) == has_actor
    assert ("obrs/z" in rows[1]) == (cfg.correction in USES_Z)


def evals(rows) -> list[dict]:
    return [{k: v for k, v in row.items() if k.startswith("eval/")} for row in rows]


def test_an_evaluation_does_not_change_a_delayed_run(solvers, tmp_path, train_here):
    """The engine has older weights for the next groups than for the evaluation; --eval_every=-1 never evaluates."""
    delayed = {"delay": "constant", "delay_max": 60.0, "step_seconds": 30.0, "delay_samplers": 2}
    changes = {"objective": "tis", "steps": 5, "train_batch": 32, "save_every": 0, "actor": "none", **delayed}
    _, seen = train_here(flags(solvers, tmp_path / "seen", eval_every=1, **changes))
    _, rows = train_here(flags(solvers, tmp_path / "never", eval_every=-1, **changes))
    assert all(evals(seen)) and not any(evals(rows))
    assert without_eval(tmp_path / "seen") == without_eval(tmp_path / "never")
    assert max(row["staleness/max_updates"] for row in rows[1:]) > 0


def test_engines_evaluate_policy_and_actor(solvers, tmp_path, train_here, monkeypatch):
    """second: a separate engine evaluates the policy, the sampling engine the actor. Numbers equal plain torch with
    aligned weights, also in the middle of a rollout batch. own: plain torch evaluates the policy."""
    changes = {"steps": 2, "eval_every": 1, "save_every": 0, "eval_problems": 64, "rollout_quant": "int8"}
    changes |= {"model": solvers / "actor", "actor": solvers / "policy", "lr": 0.02, "actor_lr": 0.1}
    used, rows, solve = [], {}, evaluation.solve
    monkeypatch.setattr(evaluation, "solve", lambda *more, **m: used.append(more[0]) or solve(*more, **m))
    for kind in ("second", "own", "torch"):
        _, rows[kind] = train_here(
            flags(solvers, tmp_path / kind, eval_engine=kind, learner_quant="aligned", **changes)
        )
    assert evals(rows["second"]) == evals(rows["own"]) == evals(rows["torch"])
    assert len({row["eval/actor_pass@1"] for row in evals(rows["torch"])}) > 1
    second, actor = used[:2]
    assert used[:6] == [second, actor] * 3 and second is not actor
    assert used[7:12:2] == [used[7]] * 3 and not set(map(id, used[12:])) & set(map(id, used[:12]))


# -- The source that the flags name -----------------------------------------------------------------------------------


def test_an_engine_records_the_columns_the_learner_needs(folders, tmp_path, monkeypatch):
    """The K largest log-probabilities if they bound Z, and the allowed sets if they are replayed. It has room for
    evaluations with longer responses."""
    sizes, two = [], {"actor": str(folders / "actor")}
    engine = SimpleNamespace(packed=True, close=lambda: None, sleep=lambda: None)
    monkeypatch.setattr("machinery.run.make_engine", lambda cfg, folder, *more: sizes.append(more[:2]) or engine)

    def opened_source(**changes):
        base = {"model": str(folders / "policy"), "out": str(tmp_path / "run"), "max_tokens": 8, "overwrite": True}
        cfg = make_cfg(**{**base, **TINY_TASK, "objective": "grpo", **changes})
        return session.open_source(cfg, open_run(cfg, Comm()), Comm())

    for kind, tokens in (("own", 50), ("torch", 8)):
        opened_source(eval_engine=kind, eval_task="arith:max_tokens=50", **two)
        assert tokens < sizes[-1][0] < tokens + 12  # plus a prompt
    for flags, topk, max_allowed in (
        ({}, 0, 0),
        ({"objective": "jackpot", "obrs_topk": 7}, 7, 0),
        ({"objective": "jackpot", "obrs_topk": 7, **two}, 0, 0),  # exact Z needs no top-K
        ({"top_k": 8}, 0, 12),  # ties with the 8th
        ({"top_k": 8, "keep_sampling_mask": "off"}, 0, 0),
        ({"objective": "jackpot", "obrs_topk": 7, "top_p": 0.9}, 7, 256),
    ):
        source = opened_source(**flags)
        assert type(source) is LocalSource and source.model == ("actor" if "actor" in flags else "policy")
        assert (source.topk, source.max_allowed) == (topk, max_allowed), flags
        assert sizes[-1][1] == max(topk, max_allowed), flags


# -- On real vLLM -----------------------------------------------------------------------------------------------------

ON_VLLM = [
    {"objective": "jackpot", "obrs_target": "new"},
    {"objective": "jackpot", "obrs_accept_rate": 0.9, "obrs_mask": "expected"},
    {"objective": "tis", "distill_lambda": 0.0, "top_p": 0.9, "top_k": 8, "temperature": 0.8},
    {"objective": "jackpot", "actor": "none", "top_k": 8, "min_p": 0.02},
    {"objective": "tbpo", "actor": "none", "rollout_quant": "int8", "learner_quant": "aligned"},
    {"objective": "jackpot", "rollout_quant": "fp8", "learner_quant": "aligned"},
    {"objective": "grpo", "actor": "none", "rollout_quant": "w4a16", "learner_quant": "aligned", "quant_group": 32},
]


@pytest.mark.parametrize("case", ON_VLLM, ids=lambda case: "-".join(map(str, case.values())))
def test_real_vllm_end_to_end(case, vllm_engines, solvers, tmp_path, monkeypatch, train_here):
    """vLLM samples with the flags' settings, the learner trains, and both have the same weights: at the first update
    and after a sync. With quantized activations, values near a rounding edge can round either way."""
    base = {"steps": 3, "rollout": "vllm", "save_every": 0, "model": solvers / "actor", "eval_problems": 4}
    argv = flags(solvers, tmp_path / "run", **{**base, **case})
    cfg = settings.parse(argv)
    fmt = quant.format_of(cfg.rollout_quant, cfg.quant_group)
    engine = vllm_engines(fmt=fmt) if fmt else vllm_engines()
    monkeypatch.setattr("machinery.run.make_engine", lambda *a: engine)
    monkeypatch.setattr(engine, "close", lambda: None)  # the suite's engine stays open
    seen, generate = [], engine.generate
    monkeypatch.setattr(engine, "generate", lambda *args: seen.append(args[2]) or generate(*args))
    _, (_, *rows) = train_here(argv)
    rollout = Sampling(cfg.temperature, cfg.top_p, cfg.top_k, cfg.min_p, cfg.max_tokens, cfg.seed)
    evaluating = Sampling(max_tokens=cfg.max_tokens)
    assert set(seen) == {rollout, evaluating}
    assert len(rows) == 3 and not any(row["skipped_steps"] for row in rows)
    rounded = fmt is not None and fmt.activations
    gap = "actor/engine_gap" if cfg.actor != "none" else "rollout_corr/mean_mismatch"
    assert rows[0]["sync/error"] < (0.1 if rounded else 1e-4) and rows[0][gap] < (1e-3 if rounded else 1e-4)
    assert rows[2]["sync/changed"] > (0 if rounded else 0.9)
    for row in rows if cfg.correction in USES_Z and cfg.obrs_z == "bracket" else []:
        assert 0 < row["obrs/z_low"] <= row["obrs/z"] + 1e-9 <= row["obrs/z_high"] + 2e-9
        assert not cfg.obrs_accept_rate or row["obrs/accept_rate"] == pytest.approx(0.9, abs=1e-3)
