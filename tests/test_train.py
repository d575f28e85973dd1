"""The whole loop: real vLLM, kill and resume, stop by a signal, two ranks, every preset."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchrun
from conftest import ROOT, TINY_TASK, make_cfg
from safetensors.torch import load_file
from test_metrics import unexplained
from transformers import AutoModelForCausalLM

import eval as evaluation
import objectives
import presets
import quant
import train
from corrections import USES_Z
from delay import DelaySource
from learner import Comm
from machinery import checkpoint, plot, session, settings
from machinery.flags import UserError
from machinery.run import Log, lock_folder, open_run, read_metrics
from machinery.run import rows as run_rows
from model.engines import HFEngine
from sampling import Sampling
from source import LocalSource
from sync import SAMPLED, SyncError, WeightCheck
from tasks import arithmetic_tokenizer


def is_time(name: str) -> bool:
    """Whether a metric differs from run to run."""
    return name.endswith(("_s", "_seconds")) or name.startswith("speed/")


# A test with several processes needs more time. Each process has its own limit.
SEVERAL_PROCESSES = pytest.mark.timeout(900)


# ---------------------------------------------------------------------------------------------------------------------
# Runs, in a separate process and in this process
# ---------------------------------------------------------------------------------------------------------------------


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
        "actor_lr": 1e-3,
        "dtype": "float32",
        "obrs_topk": 5,
        "task": "arith",
        **TINY_TASK,
    }
    return [f"--{name}={value}" for name, value in {**base, **changes}.items()]


def start(argv, ranks=1, on=()):
    """train.py in a new process, under torchrun if there are several ranks. on: a command to run it under."""
    command = [sys.executable, "train.py"]
    if ranks > 1:
        command = [*torchrun.COMMAND, f"--nproc_per_node={ranks}", "train.py"]
    return begin([*on, *command, *argv])


STARTED: list[subprocess.Popen] = []


def begin(command, folder=ROOT, **environment):
    """A process in this folder. The fixture below ends it after the test."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", **environment}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    STARTED.append(subprocess.Popen(command, cwd=folder, env=environment, **pipes))
    return STARTED[-1]


@pytest.fixture(autouse=True)
def no_process_stays_behind():
    """End processes that a failed test left running."""
    yield
    while STARTED:
        stop(STARTED.pop())


def stop(process) -> None:
    """SIGTERM first: torchrun ends its ranks. SIGKILL would leave them running."""
    if process.poll() is None:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate(timeout=60)


def finish(process, timeout=400):
    """(exit status, stdout, stderr) of a process."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def run_to_the_end(argv, ranks=1) -> str:
    """The output of a run that must succeed."""
    code, out, err = finish(start(argv, ranks))
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
    """Train in this process: argv -> (configuration, metrics). The page of metrics explains every logged key."""
    monkeypatch.setattr(session, "catch_signals", lambda: [])

    def run(argv):
        cfg = settings.parse(argv)
        train.train(cfg)
        rows = read_metrics(cfg.out)
        assert unexplained({key for row in rows for key in row} - {"step"}) == []
        return cfg, rows

    return run


def timeless(out) -> list[dict]:
    """Every metric except times and weight syncs: a resumed run checks its engine from the start."""
    rows = [{k: v for k, v in row.items() if not is_time(k)} for row in read_metrics(out)]
    return [{k: v for k, v in row.items() if not k.startswith("sync/")} for row in rows]


def samples(out) -> list[dict]:
    return run_rows(Path(out) / "samples.jsonl")


def without_eval(rows) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows]


def shards_of(folder) -> dict[str, torch.Tensor]:
    """Every tensor in a checkpoint's shards, whole."""
    reader = dcp.FileSystemReader(folder / "shards")
    tensors = {name: torch.empty(x.size) for name, x in reader.read_metadata().state_dict_metadata.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def momenta(out) -> list[torch.Tensor]:
    """Adam's first moments of the policy at the end."""
    tensors = shards_of(out / "checkpoints" / "step_000006")
    return [x for name, x in sorted(tensors.items()) if name.startswith("policy/") and name.endswith("/exp_avg")]


@pytest.fixture(scope="module")
def whole(solvers, tmp_path_factory):
    """(folder, printed text) of an undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, run_to_the_end(flags(solvers, out))


# ---------------------------------------------------------------------------------------------------------------------
# Killed, stopped, resumed
# ---------------------------------------------------------------------------------------------------------------------

LOGGED = ["rollout_corr/kl", "rollout_corr/chi2_seq", "obrs/accept_rate", "obrs/z", "obrs/kl_after", "distill_kl"]
LOGGED += ["grad_norm", "actor/grad_norm", "lr", "entropy", "reward", "staleness/max_updates", "loss", "weight_var"]
LOGGED += ["ppo_kl"]


def test_a_run_logs_every_update(whole):
    rows = read_metrics(whole[0])
    assert [row["step"] for row in rows] == list(range(-1, 6))
    assert "eval/policy_pass@1" in rows[0]
    assert "eval/actor_pass@1" in rows[-1]
    for row in rows[1:]:
        for key in LOGGED:
            assert row.get(key) is not None, key
        assert row["obrs/kl_after"] < row["obrs/kl_before"]
    assert [row["staleness/max_updates"] for row in rows[1:]] == [0, 1] * 3
    assert ["rollout_s" in row for row in rows[1:]] == [True, False] * 3
    assert ["sync/MiB" in row for row in rows[1:]] == [True, False] * 3  # a roll-out logs it once
    assert unexplained({key for row in rows for key in row} - {"step"}) == []


def test_a_run_writes_all_its_files(whole, solvers):
    out, text = whole
    saved = json.loads((out / "config.json").read_text())
    assert saved["config"]["correction"] == "obrs"
    assert saved["versions"]["torch"] == torch.__version__
    assert "train.py" in saved["command"]
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step_000003", "step_000006"]
    assert "policy pass@1" in text
    assert (out / "curves.png").stat().st_size > 20_000
    before = AutoModelForCausalLM.from_pretrained(solvers / "policy").state_dict()
    after = AutoModelForCausalLM.from_pretrained(out / "checkpoints" / "step_000006" / "policy").state_dict()
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])


def test_samples_are_logged_and_printed(whole, capsys):
    """Four responses of the first update with the gap at every token, and printed in colours."""
    out, _ = whole
    logged = samples(out)
    assert [row["step"] for row in logged] == [0] * 4
    assert [step for step in range(25) if session.due(train.SAMPLES_EVERY, step)] == [0, 10, 20]
    for row in logged:
        assert " ".join(row["tokens"]) == row["response"]
        assert len(row["gaps"]) == len(row["tokens"])
        assert row["gap"] == pytest.approx(sum(map(abs, row["gaps"])) / len(row["gaps"]), abs=1e-9)
        assert row["prompt"].endswith(":")
        assert (row["finish_reason"] == "stop") == row["response"].endswith("<eos>")
        assert row["reward"] in (0.0, 1.0)
        at, token, gap = row["largest"][0]
        assert (row["tokens"][at], row["gaps"][at]) == (token, gap)
        assert abs(gap) == max(map(abs, row["gaps"]))
    assert max(row["gap"] for row in logged[:4]) > 0.05  # the actor's tokens, as the policy sees them
    assert len({row["response"] for row in logged}) > 1
    plot.main([f"--samples={out}", "--last=2"])
    printed = capsys.readouterr().out
    assert printed.count("\nupdate 1: reward") + printed.startswith("update 1: reward") == 2
    assert logged[-1]["prompt"] in printed
    with pytest.raises(UserError, match="samples.jsonl: no such file"):
        plot.main([f"--samples={out / 'checkpoints'}"])


def test_tokens_are_coloured_by_their_gap():
    assert plot.coloured("x", 0.001) == "x"
    assert len({plot.coloured("x", gap) for gap in (0.02, -0.2, 2.0)}) == 3
    assert plot.coloured("x", -2.0) == plot.coloured("x", 2.0)


def test_a_wrong_engine_is_found_at_the_first_update(solvers, tmp_path, train_here, monkeypatch):
    """Scaled logits on one side, as by a forgotten temperature: from the start, or only after the weight check."""
    forward, load, scale = HFEngine._forward, WeightCheck.load, [0.8]

    def scaled(self, ids, **more):
        logits, cache = forward(self, ids, **more)
        return scale[0] * logits, cache

    def loaded(self, *weights):
        synced = load(self, *weights)
        scale[0] = 0.8
        return synced

    monkeypatch.setattr(HFEngine, "_forward", scaled)
    with pytest.raises(SyncError, match="of sampled tokens are .* a different function"):
        train_here(flags(solvers, tmp_path / "sync", steps=2))
    scale[0] = 1.0
    monkeypatch.setattr(WeightCheck, "load", loaded)
    with pytest.raises(UserError, match="learner and engine compute different policies.*--check_sync=False"):
        train_here(flags(solvers, tmp_path / "run", steps=2))
    train_here(flags(solvers, tmp_path / "other", steps=2, check_sync=False))


@SEVERAL_PROCESSES
@pytest.mark.parametrize("after", [0, 4])
def test_killed_and_resumed_is_the_same_run(whole, solvers, tmp_path, after, train_here):
    """SIGKILL before the first checkpoint or after one in the middle of a rollout batch; --resume gives the same
    metrics, bit for bit."""
    out = tmp_path / "run"
    process = start(flags(solvers, out))
    wait_for(out, after, process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    train_here(["--resume", f"--out={out}"])
    assert timeless(out) == timeless(whole[0])  # save_every=3 and two updates a batch: update 4 was pending
    assert samples(out) == samples(whole[0])
    for got, want in zip(momenta(out), momenta(whole[0]), strict=True):
        assert torch.equal(got, want)


LOW_BITS = {"rollout_quant": "int8", "learner_quant": "aligned"}
RESUMED = {
    "controllers": {"distill_kl_target": 0.05, "obrs_target": "new"},
    "low bits": {"objective": "tbpo", "actor": "none", "optimizer": "muon", **LOW_BITS},
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=n, marks=[pytest.mark.slow] * (n == "controllers")) for n, c in RESUMED.items()]
)
def test_stopped_and_resumed_is_the_same_run(case, solvers, tmp_path, train_here):
    """Checkpoints contain target new's kappa, the controller's lambda_distill, low-bit tensors and Muon's momentum."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    for folder, steps in ((whole, 4), (out, 3)):
        train_here(flags(solvers, folder, **case, steps=steps, save_every=0))
    train_here(["--resume", f"--out={out}", "--steps=4"])
    assert without_eval(timeless(out)) == without_eval(timeless(whole))
    if "distill_kl_target" in case:
        last = read_metrics(out)[4]
        assert last["distill_lambda"] != 1.0
        assert last["obrs/kappa"] != 1.0


@pytest.mark.parametrize("more", [{}, {"lora_rank": 2}])
def test_an_untied_head_under_a_tied_config_is_kept(more, solvers, tmp_path, train_here):
    """Files with a head and an embedding, and a config that ties them: both are trained, saved and loaded."""
    untied, model = checkpoint.load_model(solvers / "policy"), tmp_path / "two"
    shutil.copytree(solvers / "policy", model)
    untied.config.tie_word_embeddings = False
    untied.lm_head.weight = torch.nn.Parameter(1.1 * untied.lm_head.weight.detach())
    untied.save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    whole, out = tmp_path / "whole", tmp_path / "run"
    for folder, steps in ((whole, 4), (out, 3)):
        changes = dict(model=model, actor="none", objective="tis", steps=steps, save_every=0, **more)
        train_here(flags(solvers, folder, **changes))
    train_here(["--resume", f"--out={out}", "--steps=4"])
    assert without_eval(timeless(out)) == without_eval(timeless(whole))
    saved = checkpoint.load_model(checkpoint.newest(str(out)) / "policy")
    head, embedding = saved.lm_head.weight, saved.get_input_embeddings().weight
    assert torch.allclose(head, untied.lm_head.weight, atol=0.05) and not torch.allclose(head, embedding, atol=0.05)


def skip_some_updates(monkeypatch) -> list[tuple]:
    """Skip updates 1, 4, 5 and 6 for a NaN loss; count update 2 as completely rejected. Return the learner's counts
    after each update."""
    original, counts = session.Learner._step, []

    def step(self, loss, all_rejected):
        bad = self.version in (0, 3, 4, 5)
        out = original(self, math.nan if bad else loss, all_rejected or self.version == 1)
        counts.append((self.version, self.skipped, self.skipped_in_a_row, self.rejected))
        return out

    monkeypatch.setattr(session.Learner, "_step", step)
    return counts


COUNTING = {"obrs_target": "new", "distill_kl_target": 0.05, "keep": 9, "save_every": 5}
COUNTING |= {"delay": "lognormal", "delay_min": 1.0, "delay_max": 6.0, "delay_samplers": 3, "step_seconds": 1.25}
COUNTING |= {"sampler_rate": 0.8, "window_seconds": 1.875}  # the learner waits, and surplus groups are dropped


def saved_at(out, step) -> dict:
    """Every value in a checkpoint except the model folders, by path: learner.pt, rank0.pt and the shards."""
    folder = out / "checkpoints" / f"step_{step:06d}"
    parts = {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in ("learner", "rank0")}
    return leaves({**parts, "shards": shards_of(folder)})


def leaves(x, path="") -> dict:
    """{path: leaf} of dicts, lists and tuples; tensors as lists."""
    if isinstance(x, torch.Tensor):
        return {path: x.tolist()}
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
    """Stopped after update 5 and resumed: every count equals the count of the uninterrupted run, and no count is 0."""
    counts = skip_some_updates(monkeypatch)
    whole, out = tmp_path / "whole", tmp_path / "run"
    train_here(flags(solvers, whole, **COUNTING, steps=8))
    whole_counts = list(counts)
    train_here(flags(solvers, out, **COUNTING, steps=5))
    assert counts[-1] == (5, 3, 2, 1)
    left = saved_at(out, 5)
    source = {name: left[f"/rank0/source/{name}"] for name in ("sequence", "made", "waited", "dropped/window")}
    values = [*source.values(), left["/learner/controllers/kappa"], left["/learner/controllers/distill"]]
    assert len({0.0, 1.0, *values}) == 2 + len(values)
    assert "/rank0/source/tickets/0/0" in left and left["/rank0/source/samplers/0/draws"] > 1
    assert any(name.startswith("/rank0/pending/0/groups") for name in left)
    train_here(["--resume", f"--out={out}", "--steps=8"])
    assert counts[-3:] == whole_counts[-3:] == [(6, 4, 3, 1), (7, 4, 0, 1), (8, 4, 0, 1)]
    assert without_sync(out) == without_sync(whole)
    assert samples(out) == samples(whole)
    resumed, uninterrupted = saved_at(out, 8), saved_at(whole, 8)
    assert resumed.keys() == uninterrupted.keys()
    different = [name for name in resumed if resumed[name] != uninterrupted[name] and not since_the_epoch(name)]
    assert different == []


def since_the_epoch(name: str) -> bool:
    return name.endswith(("/t_start", "/t_end"))


def without_sync(out) -> list[dict]:
    return without_eval(timeless(out))


def test_a_step_lost_in_16_bits_passes_the_weight_check(solvers, tmp_path, train_here):
    """A folder in bfloat16 and a learning rate below half a unit in the last place: the engine's matrices stay equal,
    the learner's change."""
    start = tmp_path / "start"
    AutoModelForCausalLM.from_pretrained(solvers / "policy").bfloat16().save_pretrained(start)
    arithmetic_tokenizer().save_pretrained(start)
    changes = {"model": start, "actor": "none", "objective": "tis", "steps": 4, "eval_every": -1, "lr": 1e-6}
    changes |= {"dtype": "float32", "rollout_dtype": "bfloat16", "warmup_steps": 0}
    _, rows = train_here(flags(solvers, tmp_path / "run", **changes))
    assert [row["step"] for row in rows][-1] == 3 and any(row.get("grad_norm", 0) > 0 for row in rows)


def test_a_run_resumes_from_unrounded_weights(solvers, tmp_path, train_here):
    """A folder in bfloat16: the export has its precision, but a resumed run starts from the unrounded weights."""
    start = tmp_path / "start"
    AutoModelForCausalLM.from_pretrained(solvers / "policy").bfloat16().save_pretrained(start)
    arithmetic_tokenizer().save_pretrained(start)
    changes = {"model": start, "actor": "none", "objective": "tis", "steps": 4, "save_every": 2, "eval_problems": 4}
    changes |= {"optimizer": "muon"}
    whole, again = tmp_path / "whole", tmp_path / "again"
    train_here(flags(solvers, whole, **changes))
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step_000004")
    train_here(["--resume", f"--out={again}"])
    assert without_sync(again) == without_sync(whole)
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
def first_alone(tensors, folder, group):
    if "000001" not in str(folder):
        threading.Event().wait()
    write(tensors, folder, group)
checkpoint.write_shards = first_alone
train.train(settings.parse(sys.argv[1:]))
"""


@SEVERAL_PROCESSES
def test_a_kill_during_a_save_leaves_the_previous_checkpoint(whole, solvers, tmp_path, train_here):
    """The second save never ends, and the updates continue. After SIGKILL the run resumes from the first checkpoint."""
    out = tmp_path / "run"
    process = begin([sys.executable, "-c", WRITES_FOR_EVER, *flags(solvers, out, save_every=1)])
    wait_for(out, 2, process)  # the save after update 2 goes on
    process.kill()
    process.communicate(timeout=60)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step_000001", "step_000002.writing"]
    assert checkpoint.newest(out).name == "step_000001"
    train_here(["--resume", f"--out={out}", "--save_every=0"])
    assert without_sync(out) == without_sync(whole[0])


def test_a_checkpoint_has_the_state_of_its_boundary(whole, solvers, tmp_path, train_here, monkeypatch):
    """A checkpoint is written during the next update. Only then do samplers learn which groups they may forget."""
    written, events, write, saved = threading.Event(), [], checkpoint.write_shards, LocalSource.saved
    update, seen = train.Training.update, []

    def late(tensors, folder, group):
        assert written.wait(100)
        write(tensors, folder, group)

    def watched(training):
        values = update(training)
        seen.append((training.step, list(events)))
        if training.step == 4:
            written.set()
        return values

    monkeypatch.setattr(checkpoint, "write_shards", late)
    monkeypatch.setattr(train.Training, "update", watched)
    monkeypatch.setattr(LocalSource, "saved", lambda self: events.append("held") or saved(self))
    out = tmp_path / "run"
    train_here(flags(solvers, out, save_every=3))
    assert timeless(out) == timeless(whole[0])
    assert seen[3] == (4, []) and events == ["held", "held"]
    late_save, want = (saved_at(folder, 3) for folder in (out, whole[0]))
    of_a_process = ("/rank0/rng", "/t_start", "/t_end", "/t_published")
    compared = [name for name in late_save if not any(part in name for part in of_a_process)]
    assert len(compared) > 300
    assert [name for name in compared if late_save[name] != want[name]] == []


def test_a_failed_save_ends_the_run_at_the_next_boundary(solvers, tmp_path, train_here, monkeypatch, capsys):
    def full(tensors, folder, group):
        if "000003" in str(folder):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_shards", full)
    out = tmp_path / "run"
    with pytest.raises(UserError, match="step_000003: the checkpoint could not be written .No space left on device"):
        train_here(flags(solvers, out))
    done = len(read_metrics(out)) - 1
    assert 3 <= done < 6
    # the emergency save at the end has room
    assert [p.name for p in (out / "checkpoints").iterdir()] == [f"step_{done:06d}"] * (done > 3)


@SEVERAL_PROCESSES
def test_sighup_saves_a_checkpoint(solvers, tmp_path):
    out = tmp_path / "run"
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and children inherit that
    process = start(flags(solvers, out, save_every=0, steps=500))
    signal.signal(signal.SIGHUP, inherited)
    wait_for(out, 1, process)
    process.send_signal(signal.SIGHUP)
    code, text, err = finish(process)
    assert code == 128 + signal.SIGHUP, err[-3000:]
    done = len(read_metrics(out)) - 1
    assert [p.name for p in (out / "checkpoints").iterdir()] == [f"step_{done:06d}"] and done < 500


@SEVERAL_PROCESSES
def test_signals_save_first_and_resume_goes_on(whole, solvers, tmp_path):
    out = tmp_path / "run"
    process = start(flags(solvers, out, save_every=0))
    wait_for(out, 1, process)
    process.send_signal(signal.SIGTERM)
    code, text, err = finish(process)
    assert code == 128 + signal.SIGTERM, err[-3000:]
    assert "saved: continue with --resume" in text
    done = len(read_metrics(out)) - 1
    assert 2 <= done < 6
    assert [p.name for p in (out / "checkpoints").iterdir()] == [f"step_{done:06d}"]
    run_to_the_end(["--resume", f"--out={out}"])
    assert timeless(out) == timeless(whole[0])


def raise_at(monkeypatch, owner, name: str, call: int, error=None) -> None:
    """Let the call-th call of a function fail like an internal fault, or with `error`."""
    original, calls = getattr(owner, name), []

    def function(*args, **more):
        calls.append(1)
        if len(calls) == call:
            raise error or ZeroDivisionError("a fault of ours")
        return original(*args, **more)

    monkeypatch.setattr(owner, name, function)


FAULTS = {  # place of the fault: (owner, name, call, newest checkpoint afterwards)
    "before an update": (train.objectives, "prepare", 5, 4),
    "between two models' steps": (session.Learner, "_optimize", 10, 3),
    "after the step": (train.objectives, "update_controllers", 5, 3),
    "while sampling": (HFEngine, "_decode", 7, 4),
    "in the ref pass": (train.batching, "write_ref_columns", 3, 4),
    "while logging": (session.Log, "write", 6, 5),
}


SLOW = ("between two models' steps", "in the ref pass", "after the step")  # the same property at different places


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=n, marks=[pytest.mark.slow] * (n in SLOW)) for n, f in FAULTS.items()]
)
def test_a_fault_saves_a_checkpoint_and_keeps_its_traceback(
    fault, whole, solvers, tmp_path, train_here, monkeypatch, capsys
):
    """The run resumes from the boundary of the last update and equals the uninterrupted run bit for bit."""
    owner, name, call, newest = fault
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        raise_at(patch, owner, name, call)
        with pytest.raises(ZeroDivisionError, match="a fault of ours"):
            train_here(flags(solvers, out))
    printed = capsys.readouterr().err
    assert checkpoint.newest(out).name == f"step_{newest:06d}"
    assert ("saved: continue with --resume" in printed) == (newest != 3)
    train_here(["--resume", f"--out={out}"])
    assert timeless(out) == timeless(whole[0])


def test_a_user_error_saves_a_checkpoint(solvers, tmp_path, train_here, monkeypatch):
    raise_at(monkeypatch, HFEngine, "_decode", 7, UserError("bound it"))
    with pytest.raises(UserError, match="bound it"):
        train_here(flags(solvers, tmp_path / "run"))
    assert checkpoint.newest(tmp_path / "run").name == "step_000004"


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("model", ["policy", "actor"])
def test_non_finite_weights_end_the_run_in_their_update(value, model, solvers, tmp_path, train_here, monkeypatch):
    """The optimizer makes one number of one model infinite or NaN in update 5: the newest checkpoint is of update 3."""
    original = session.Learner._optimize

    def optimize(self, name, lr, step):
        original(self, name, lr, step)
        if self.version == 5 and name == model:
            with torch.no_grad():
                list(getattr(self.models, name).parameters())[-1].view(-1)[-1] = value

    monkeypatch.setattr(session.Learner, "_optimize", optimize)
    with pytest.raises(UserError, match="update 5 made weights infinite or NaN: lower --lr .now 0.001"):
        train_here(flags(solvers, tmp_path / "run"))
    assert checkpoint.newest(tmp_path / "run").name == "step_000003"


def test_too_many_skipped_updates_save_and_end_the_run(solvers, tmp_path, train_here, monkeypatch):
    loss = train.objectives.reduce
    monkeypatch.setattr(train.objectives, "reduce", lambda *args: loss(*args) * math.nan)
    monkeypatch.setattr(sys.modules["learner"], "MAX_SKIPS", 2)
    with pytest.raises(UserError, match="2 updates in a row had a non-finite loss or gradient"):
        train_here(flags(solvers, tmp_path / "run"))
    assert checkpoint.newest(tmp_path / "run").name == "step_000002"


@SEVERAL_PROCESSES
def test_resume_with_deleted_checkpoints_is_refused(whole, tmp_path, train_here):
    """save_every is 3 and 6 updates are logged: checkpoints were deleted. After 3 updates there may be none yet."""
    out = tmp_path / "run"
    shutil.copytree(whole[0], out, ignore=shutil.ignore_patterns("checkpoints"))
    logged = (out / "metrics.jsonl").read_text()
    with pytest.raises(
        UserError,
        match="metrics of 6 updates but no checkpoint, though a checkpoint was saved every 3 updates; restore",
    ):
        train_here(["--resume", f"--out={out}"])
    assert (out / "metrics.jsonl").read_text() == logged
    (out / "checkpoints" / "step_000003.writing").mkdir(parents=True)  # killed while it was written
    checkpoint.check_none_lost(str(out))
    shutil.rmtree(out / "checkpoints")
    (out / "metrics.jsonl").write_text("".join(logged.splitlines(keepends=True)[:4]))
    checkpoint.check_none_lost(str(out))
    (out / "metrics.jsonl").write_text("".join(logged.splitlines(keepends=True)[:5]))
    with pytest.raises(UserError, match="metrics of 4 updates"):
        checkpoint.check_none_lost(str(out))


def test_resume_names_changed_flags_and_a_run_is_not_overwritten(whole, solvers, train_here):
    out, _ = whole
    with pytest.raises(UserError) as error:
        train_here(["--resume", f"--out={out}", "--lr=5e-3", "--group_size=8"])
    assert "--group_size was 4 and is now 8" in str(error.value)
    assert "--lr was 0.001 and is now 0.005" in str(error.value)
    with pytest.raises(UserError, match="already holds a run: add --resume to continue it, --overwrite to delete it"):
        train_here(flags(solvers, out))
    run_to_the_end(["--resume", f"--out={out}", "--steps=7"])
    assert len(read_metrics(out)) == 8
    saved = json.loads((out / "config.json").read_text())  # the first command stays, the resume is added
    assert saved["config"]["steps"] == 7
    assert "--steps=6" in saved["command"]
    assert "--steps=7" in saved["resumed"][-1]["command"]


@SEVERAL_PROCESSES
@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_ranks_train_and_resume_on_any_number(solvers, tmp_path, parallel, train_here):
    """torchrun with one engine a rank: a whole run, resumed in the middle of a rollout batch on two ranks and on one;
    then the one-rank run again on two, with the other --parallel."""
    out = tmp_path / "run"
    run_to_the_end(flags(solvers, out, parallel=parallel, steps=4, keep=9), ranks=2)
    rows, whole = read_metrics(out), timeless(out)
    assert len(rows) == 5
    assert all(row["tokens"] > 16 for row in rows[1:])
    shutil.rmtree(out / "checkpoints" / "step_000004")
    shutil.copytree(out, tmp_path / "one")
    torchrun.torchrun("../train.py", "--resume", f"--out={out}")
    assert without_sync(out) == without_eval(whole)
    train_here(["--resume", f"--out={tmp_path / 'one'}"])
    assert_alike(without_sync(tmp_path / "one"), without_eval(whole))
    end = tmp_path / "one"
    assert_same_tensors(end / "checkpoints" / "step_000004", out / "checkpoints" / "step_000004")
    other = "ddp" if parallel == "fsdp" else "fsdp"
    more = [f"--out={end}", f"--parallel={other}", "--steps=5"]
    torchrun.torchrun("../train.py", "--resume", *more)
    torchrun.torchrun("../train.py", "--resume", f"--out={out}", "--steps=5")
    assert_alike(without_sync(end), without_sync(out))


def assert_alike(rows, others) -> None:
    """Metrics are equal up to the order of sums over ranks."""
    assert [row.keys() for row in rows] == [row.keys() for row in others]
    for row, other in zip(rows, others, strict=True):
        for name, value in row.items():
            rounding = 1e-5 if "largest_" in name else 1e-6  # the largest of many roundings
            assert value == pytest.approx(other[name], rel=1e-6, abs=rounding), (row["step"], name)


def assert_same_tensors(folder, other) -> None:
    got, want = shards_of(folder), shards_of(other)
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert torch.allclose(x, want[name], rtol=1e-4, atol=1e-5), name


@SEVERAL_PROCESSES
def test_every_node_must_see_the_run_folder(solvers, tmp_path):
    disks = [tmp_path / "first", tmp_path / "second"]
    [disk.mkdir() for disk in disks]
    with pytest.raises(AssertionError, match="--out=run: a node does not see this folder; name a folder on a file sy"):
        torchrun.torchrun("../train.py", *flags(solvers, "run"), nodes=disks)
    assert not list(disks[0].iterdir()) and not list(disks[1].iterdir())


@SEVERAL_PROCESSES
def test_an_aligned_learner_is_evaluated_as_it_trains_under_fsdp_too(solvers, tmp_path, train_here):
    """Two bits change many answers: the gathered weights of a sharded learner give the answers of one process."""
    case = {"objective": "grpo", "actor": "none", "rollout_quant": "w2a16", "learner_quant": "aligned"}
    case |= {"quant_group": 32, "steps": 1, "save_every": 0, "eval_problems": 96, "eval_engine": "torch"}
    _, one = train_here(flags(solvers, tmp_path / "one", **case))
    torchrun.torchrun("../train.py", *flags(solvers, tmp_path / "two", parallel="fsdp", **case))
    two = read_metrics(tmp_path / "two")
    assert one[0]["eval/policy_pass@1"] == two[0]["eval/policy_pass@1"]


# ---------------------------------------------------------------------------------------------------------------------
# In this process, with the plain sampler
# ---------------------------------------------------------------------------------------------------------------------

# names of presets in other frameworks; decoupled_geo_rs is trained too: its bounds are narrow
ALIASES = {"decoupled_token_is", "decoupled_seq_is", "decoupled_seq_is_rs", "bypass_ppo_clip", "token_truncate"}
ALIASES |= {"token_mask", "sequence_truncate", "sequence_mask", "dr_grpo", "dapo", "seq_mask_tis"}


@pytest.mark.parametrize("objective", [name for name in presets.OBJECTIVES if name not in ALIASES])
@pytest.mark.parametrize("has_actor", [False, True])
def test_every_objective_trains_end_to_end(objective, has_actor, solvers, tmp_path, train_here):
    """Every preset, one model and two: metrics are finite, weights move, all checks pass."""
    actor = solvers / "actor" if has_actor else "none"
    changes = {"objective": objective, "steps": 2, "save_every": 0, "eval_problems": 4, "actor": actor}
    cfg, rows = train_here(flags(solvers, tmp_path / "run", **changes))
    assert len(rows) == 3
    for row in rows[1:]:
        assert row["skipped_steps"] == 0
        assert row["loss"] is not None
        rejected = row["rollout_corr/rollout_rs_masked_fraction"] > 0  # perhaps every response with a gradient
        alike = row["advantage_abs"] == 0  # every group has equal rewards: nothing to learn
        if not cfg.cppo_beta:  # the CPPO term does not depend on rewards
            assert (row["grad_norm"] == 0) if alike else (row["grad_norm"] > 0 or rejected)
    assert max(row["advantage_abs"] for row in rows[1:]) > 0
    assert ("distill_kl" in rows[1]) == has_actor
    assert ("obrs/z" in rows[1]) == (cfg.correction in USES_Z)


def test_aliases_are_names_of_presets():
    assert set(presets.OBJECTIVES) >= ALIASES


def test_a_delayed_run_trains_on_older_weights(solvers, tmp_path, train_here):
    delayed = {"delay": "constant", "delay_max": 60.0, "step_seconds": 30.0, "delay_samplers": 2}
    changes = {"objective": "tis", "steps": 4, "train_batch": 32, "save_every": 0, "actor": "none", **delayed}
    _, rows = train_here(flags(solvers, tmp_path / "run", **changes))
    assert "delay/clock" in rows[1]
    assert rows[1]["staleness/max_updates"] == 0 < rows[4]["staleness/max_updates"]


def evals(rows) -> list[dict]:
    return [{k: v for k, v in row.items() if k.startswith("eval/")} for row in rows]


def used_engines(monkeypatch) -> list:
    """The engine of every evaluation after this call."""
    used, solve = [], evaluation.solve
    monkeypatch.setattr(evaluation, "solve", lambda engine, *more: used.append(engine) or solve(engine, *more))
    return used


def test_the_policys_engine_evaluates_the_policy(solvers, tmp_path, train_here, monkeypatch):
    """Every evaluation uses the newest weights. In the middle of a rollout batch too, the engine gives the answers of
    the learner's weights."""
    changes = {"objective": "tis", "actor": "none", "steps": 3, "eval_every": 1, "save_every": 0, "eval_problems": 64}
    changes |= {"model": solvers / "actor", "lr": 0.02}  # this model solves some problems, and it moves
    used, rows = used_engines(monkeypatch), {}
    for kind in ("own", "torch"):
        _, rows[kind] = train_here(flags(solvers, tmp_path / kind, eval_engine=kind, **changes))
    assert evals(rows["own"]) == evals(rows["torch"])
    assert len({tuple(row.values()) for row in evals(rows["own"])}) > 1
    assert len(set(map(id, used[:4]))) == 1 < len(set(map(id, used[4:])))


def test_the_report_says_that_rounded_weights_were_evaluated(solvers, tmp_path, train_here, monkeypatch):
    """The rounded model samples: with two bits a group of 32 weights has four values."""
    changes = {"objective": "tis", "steps": 1, "save_every": 0, "rollout_quant": "w2a16", "quant_group": 32}
    used, reports, values = used_engines(monkeypatch), [], []
    alone = {"actor": "none"}
    for flag in (alone, {**alone, "eval_engine": "torch"}, {}, {"rollout_quant": "none"}):
        out = tmp_path / str(len(reports))
        train_here(flags(solvers, out, **{**changes, **flag}))
        reports.append([line for line in plot.report(out).splitlines() if "(held out: " in line])
        for engine in used[: len(used) // 2]:  # at the start
            groups = engine.model.model.layers[0].self_attn.q_proj.weight.reshape(-1, 32)
            values.append(max(len(group.unique()) for group in groups))
        used.clear()
    line = "   (held out: the {} in w2a16, as in rollouts; --eval_engine=torch evaluates it as saved)"
    assert reports == [[line.format("policy")], [], [line.format("actor")], []]
    assert [n <= 4 for n in values] == [True, False, False, True, False, False]
    assert all(n > 16 for n in values if n > 4)
    cfg = dict(eval_engine="own", samplers="local", rollout_quant="w2a16", learner_quant="none", actor="none")
    assert plot.rounded_line(cfg) == reports[0]
    for changes in ({"samplers": "zmq"}, {"learner_quant": "aligned"}, {"rollout_quant": "none"}):
        assert not plot.rounded_line(cfg | changes)


def test_remote_samplers_do_not_evaluate():
    """A second engine has the policy's weights. Plain torch evaluates the actor: its engines are remote."""
    loaded = []
    learner = SimpleNamespace(has_actor=True, named_tensors=lambda name: name)
    second = SimpleNamespace(load=loaded.append)
    cfg = SimpleNamespace(eval_engine="second", samplers="tcp://127.0.0.1:5555", actor="base:actor")
    t = SimpleNamespace(cfg=cfg, source=None, run=SimpleNamespace(eval_sets=[1]), learner=learner, second_engine=second)
    engines = [train.Training.eval_engine(t, name) for name in ("policy", "actor")]
    assert engines == [second, None] and loaded == ["policy"]


def test_an_evaluation_does_not_change_a_delayed_run(solvers, tmp_path, train_here):
    """The engine has older weights for the next groups than for the evaluation; --eval_every=-1 never evaluates."""
    delayed = {"delay": "constant", "delay_max": 60.0, "step_seconds": 30.0, "delay_samplers": 2}
    changes = {"objective": "tis", "steps": 5, "train_batch": 32, "save_every": 0, "actor": "none", **delayed}
    _, seen = train_here(flags(solvers, tmp_path / "seen", eval_every=1, **changes))
    _, rows = train_here(flags(solvers, tmp_path / "never", eval_every=-1, **changes))
    assert all(evals(seen)) and not any(evals(rows))
    assert without_sync(tmp_path / "seen") == without_sync(tmp_path / "never")
    assert max(row["staleness/max_updates"] for row in rows[1:]) > 0


def test_engines_evaluate_policy_and_actor(solvers, tmp_path, train_here, monkeypatch):
    """second: a separate engine evaluates the policy, the sampling engine the actor. Numbers equal plain torch with
    aligned weights. Each engine sleeps after every evaluation, the actor's also after the rollout. own: plain torch
    evaluates the policy."""
    slept = []
    monkeypatch.setattr(HFEngine, "sleep", lambda self: slept.append(self))
    changes = {"steps": 2, "eval_every": 1, "save_every": 0, "eval_problems": 64, "rollout_quant": "int8"}
    changes |= {"model": solvers / "actor", "actor": solvers / "policy", "lr": 0.02, "actor_lr": 0.1}
    used, rows = used_engines(monkeypatch), {}
    for kind in ("second", "own", "torch"):
        _, rows[kind] = train_here(
            flags(solvers, tmp_path / kind, eval_engine=kind, learner_quant="aligned", **changes)
        )
    assert evals(rows["second"]) == evals(rows["own"]) == evals(rows["torch"])
    assert len({row["eval/actor_pass@1"] for row in evals(rows["torch"])}) > 1
    seconds, owns, torchs = used[:6], used[6:12], used[12:]
    second, actor = seconds[:2]
    assert seconds == [second, actor] * 3 and second is not actor
    assert slept[:8] == [actor, second, actor, actor, second, actor, second, actor]  # the first sleep is at the start
    assert owns[1::2] == [owns[1]] * 3 and owns[1] in slept and not set(owns[::2]) & set(slept)
    assert not set(torchs) & set(slept)
    with pytest.raises(
        UserError, match="--eval_engine=second: there is no actor, so the rollout engine already evaluates"
    ):
        settings.parse(flags(solvers, tmp_path / "one", actor="none", eval_engine="second"))


@SEVERAL_PROCESSES
def test_follow_evaluates_every_checkpoint(solvers, tmp_path, train_here, monkeypatch):
    """One command with the run's settings gives the same numbers as in training. It waits while a process locks the
    folder, and ends after it. A second call finds every evaluation done."""
    out = tmp_path / "run"
    changes = {"objective": "tis", "actor": "none", "steps": 2, "save_every": 1, "lr": 0.02, "model": solvers / "actor"}
    changes |= {"rollout_quant": "int8", "learner_quant": "aligned", "eval_problems": 64, "eval_every": 1}
    _, rows = train_here(flags(solvers, out, **changes))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    bare = [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in lines]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in bare))
    assert not any(evals(read_metrics(out)))
    monkeypatch.setattr(evaluation, "POLL", 0.1)
    trainer = lock_folder(out)
    ends = []
    follower = threading.Thread(target=lambda: ends.append(evaluation.main(["--follow", str(out)])))
    follower.start()
    deadline = time.time() + 300
    while not all(evals(read_metrics(out))[1:]) and time.time() < deadline:
        time.sleep(0.1)
    assert evals(read_metrics(out))[1:] == evals(rows)[1:]
    time.sleep(1)
    assert follower.is_alive()
    trainer.close()
    follower.join(60)
    assert ends == [{"run": str(out), "evaluated": 2}]
    monkeypatch.setattr(subprocess, "run", None)
    assert evaluation.main([f"--follow={out}"]) == ends[0]
    truncated = Log(out, SimpleNamespace(wandb=""), 1)  # as in a resume after update 1
    truncated.close()
    assert [row["step"] for row in run_rows(out / "eval.jsonl")] == [0]


def test_the_report_ends_with_the_last_evaluation_of_each_model_and_times_every_stage():
    """If a follower evaluates the last checkpoint, the actor can be missing in the last row."""
    first = {"eval/policy_pass@1": 0.25, "eval/policy_se": 0.5, "eval/actor_pass@1": 0.75, "eval/actor_se": 0.125}
    rows = [{"update_s": 2.0}, first, {"grade_s": 4.5, "save_s": 1.0}, {**first, "eval/policy_pass@1": 0.5}]
    del rows[-1]["eval/actor_pass@1"]
    policy, actor = (line.split() for line in plot.evaluation_lines(rows))
    assert policy[-8:] == ["25.0", "+-", "50.0", "%", "50.0", "+-", "50.0", "%"]
    assert actor[-8:] == ["75.0", "+-", "12.5", "%", "75.0", "+-", "12.5", "%"]
    times = dict(line.split() for line in plot.time_lines(rows)[1:])
    assert times == {"grade": "4.5", "update": "2.0", "save": "1.0", "total": "7.5"}


def test_follow_refuses_bad_folders(solvers, tmp_path):
    with pytest.raises(UserError, match="--follow=.*none: not a run folder, or its config.json is not written yet"):
        evaluation.main([f"--follow={tmp_path / 'none'}"])
    saved = {"task": "hf:x", "eval_task": "", "eval_problems": 3}
    with pytest.raises(UserError, match="--follow: this run has no held-out set; name sets with --task"):
        evaluation.flags_of_run(saved)
    assert "--task=b.jsonl" in evaluation.flags_of_run(saved, "b.jsonl")
    argv = evaluation.flags_of_run({**saved, "eval_task": "a.jsonl", "reward": "gsm8k", "max_prompt_tokens": 9})
    assert argv == [
        "--max_prompt_tokens=9",
        "--reward=gsm8k",
        "--task=a.jsonl",
        "--problems=3",
        "--samples=1",
        "--rollout_tp=1",
        "--k=1",
    ]


def test_kappa_exact_equals_the_kappa_of_the_update(solvers, tmp_path, monkeypatch, train_here):
    """Target new: the kappa of the extra forward equals the kappa of the training pass."""
    seen, update_controllers = [], objectives.update_controllers

    def watched(controllers, logged, cfg):
        update_controllers(controllers, logged, cfg)
        seen.append((controllers["kappa"], logged["obrs/kappa"]))

    monkeypatch.setattr(objectives, "update_controllers", watched)
    changes = {"objective": "jackpot", "actor": "none", "obrs_target": "new", "kappa": "exact"}
    train_here(flags(solvers, tmp_path / "run", **changes, steps=4, save_every=0))
    assert len(seen) == 4
    for exact, used in seen:
        assert exact == pytest.approx(used, rel=1e-5)
    assert len({round(exact, 6) for exact, _ in seen}) > 1


# ---------------------------------------------------------------------------------------------------------------------
# The source that the flags name
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened_source(folders, tmp_path, monkeypatch):
    """flags -> (source, run, log-probabilities a token of its engine)."""
    topks = []
    engine = SimpleNamespace(packed=True, close=lambda: None, sleep=lambda: None)
    monkeypatch.setattr(
        "machinery.run.make_engine", lambda cfg, folder, max_len, topk, *more: topks.append(topk) or engine
    )
    monkeypatch.setitem(sys.modules, "remote.source", SimpleNamespace(open_remote_source=lambda *a: a))

    def make(**changes):
        base = {"model": str(folders / "policy"), "out": str(tmp_path / "run"), "max_tokens": 8, "overwrite": True}
        cfg = make_cfg(**{**base, **TINY_TASK, "objective": "grpo", **changes})
        run = open_run(cfg, Comm())
        source = session.open_source(cfg, run, Comm())
        return source, run, topks[-1] if topks else None

    return make


def test_an_engine_has_room_for_evaluation(opened_source, folders, monkeypatch):
    """Responses longer than in training, of the policy or of the actor."""
    engine, lengths = SimpleNamespace(packed=True, sleep=lambda: None), []
    monkeypatch.setattr(
        "machinery.run.make_engine", lambda cfg, folder, max_len, *more: lengths.append(max_len) or engine
    )
    for flags in ({"actor": "none"}, {"actor": str(folders / "actor")}):
        for kind, tokens in (("own", 50), ("torch", 8)):
            opened_source(eval_engine=kind, eval_task="arith:max_tokens=50", **flags)
            assert tokens < lengths[-1] < tokens + 12  # plus a prompt


def test_an_engine_records_the_columns_the_learner_needs(opened_source, folders):
    """The K largest log-probabilities if they bound Z, and the allowed sets if they are replayed."""
    two = {"actor": str(folders / "actor")}
    for flags, topk, max_allowed in (
        ({}, 0, 0),
        ({"objective": "jackpot", "obrs_topk": 7}, 7, 0),
        ({"objective": "jackpot", "obrs_topk": 7, **two}, 0, 0),  # exact Z needs no top-K
        ({"objective": "jackpot", "obrs_topk": 7, "obrs_target": "new", **two}, 7, 0),
        ({"top_k": 8}, 0, 12),  # ties with the 8th
        ({"top_k": 8, "keep_sampling_mask": "off"}, 0, 0),
        ({"objective": "jackpot", "obrs_topk": 7, "top_p": 0.9}, 7, 256),
    ):
        source, run, recorded = opened_source(**flags)
        assert type(source) is LocalSource
        assert (source.topk, source.max_allowed) == (topk, max_allowed), flags
        assert recorded == max(topk, max_allowed), flags
        assert source.model == run.rollout_model


def test_delayed_and_remote_sources_by_flag(opened_source):
    source, run, _ = opened_source(delay="constant")
    assert type(source) is DelaySource
    assert source.store == run.folder / "versions"
    opened, run, _ = opened_source(samplers="tcp://127.0.0.1:5555", objective="jackpot", obrs_topk=7)
    cfg, given_run, model, topk, max_allowed, _ = opened
    assert cfg is given_run.cfg
    assert (model, topk, max_allowed) == ("policy", 7, 0)


# ---------------------------------------------------------------------------------------------------------------------
# On real vLLM
# ---------------------------------------------------------------------------------------------------------------------

ON_VLLM = [
    {"objective": "jackpot", "actor": "none"},
    {"objective": "jackpot"},
    {"objective": "jackpot", "obrs_target": "new"},
    {"objective": "jackpot", "obrs_target": "new", "kappa": "exact", "actor": "none", "loss_denominator": "kept"},
    {"objective": "jackpot", "obrs_accept_rate": 0.9, "obrs_mask": "expected"},
    {"objective": "tis", "distill_lambda": 0.0, "temperature": 0.8},
    {"objective": "jackpot", "distill_kl_target": 0.05, "distill_direction": "reverse"},
    {"objective": "jackpot", "obrs_lambda": 1.5},
    {"objective": "tis", "top_p": 0.9, "top_k": 8, "temperature": 0.8},
    {"objective": "jackpot", "actor": "none", "top_k": 8, "min_p": 0.02},
    {"objective": "jackpot", "top_k": 8},
    {"objective": "grpo", "actor": "none", "top_p": 0.8, "top_k": 8, "keep_sampling_mask": "recompute"},
    {"objective": "tbpo", "actor": "none", "rollout_quant": "int8", "learner_quant": "aligned"},
    {"objective": "jackpot", "rollout_quant": "fp8", "learner_quant": "aligned"},
    {
        "objective": "jackpot",
        "actor": "none",
        "rollout_quant": "w4a16",
        "learner_quant": "aligned",
        "quant_group": 32,
    },
]


def use_engine(monkeypatch, engine) -> None:
    """Use the running engine of the test suite as a new engine, and keep it open."""
    monkeypatch.setattr("machinery.run.make_engine", lambda *a: engine)
    monkeypatch.setattr(engine, "close", lambda: None)


def note_sampling(monkeypatch, engine) -> list[Sampling]:
    """The settings of every call of the engine after this call."""
    seen, generate = [], engine.generate

    def noted(prompts, seeds, sampling, *more):
        seen.append(sampling)
        return generate(prompts, seeds, sampling, *more)

    monkeypatch.setattr(engine, "generate", noted)
    return seen


@pytest.mark.parametrize("case", ON_VLLM, ids=lambda case: "-".join(map(str, case.values())))
def test_real_vllm_end_to_end(case, vllm_engines, solvers, tmp_path, monkeypatch, train_here):
    """vLLM samples, the learner trains, every weight sync is checked."""
    base = {"steps": 4, "rollout": "vllm", "save_every": 0, "model": solvers / "actor"}
    argv = flags(solvers, tmp_path / "run", **{**base, **case})
    cfg = settings.parse(argv)
    fmt = quant.format_of(cfg.rollout_quant, cfg.quant_group)
    engine = vllm_engines(fmt=fmt) if fmt else vllm_engines()
    use_engine(monkeypatch, engine)
    seen = note_sampling(monkeypatch, engine)
    _, rows = train_here(argv)
    rollout = Sampling(cfg.temperature, cfg.top_p, cfg.top_k, cfg.min_p, cfg.max_tokens, cfg.seed)
    probing = Sampling(max_tokens=SAMPLED)  # by sync.py
    evaluating = Sampling(max_tokens=cfg.max_tokens)
    assert set(seen) - {probing} == {rollout, evaluating}
    assert len(rows) == 5
    assert all(row["skipped_steps"] == 0 for row in rows[1:])
    check_sync(cfg, rows[1:], rounded=fmt is not None and fmt.activations)
    if cfg.correction in USES_Z:
        check_obrs(cfg, rows[1:])
    if cfg.distill_kl_target:
        assert rows[1]["distill_lambda"] != rows[4]["distill_lambda"]


def check_sync(cfg, rows, rounded) -> None:
    """Engine and learner have the same weights. rounded: activations near a rounding edge can round either way."""
    assert rows[0]["sync/MiB"] > 0
    if rounded:
        assert rows[0]["sync/error"] < 0.1
        assert rows[2]["sync/changed"] > 0
        gap = "actor/engine_gap" if cfg.actor != "none" else "rollout_corr/mean_mismatch"
        assert rows[0][gap] < 1e-3
        return
    assert rows[0]["sync/error"] < 1e-4
    assert rows[2]["sync/changed"] > 0.9
    if cfg.actor == "none":
        assert rows[0]["rollout_corr/mean_mismatch"] < 1e-4
        assert rows[1]["rollout_corr/mean_mismatch"] > rows[0]["rollout_corr/mean_mismatch"] * 0.1
    else:
        assert rows[0]["actor/engine_gap"] < 1e-4  # the engine's actor is the learner's actor


def check_obrs(cfg, rows) -> None:
    """Acceptance and Z are probabilities, and Z is in its bracket."""
    for row in rows:
        assert 0 < row["obrs/accept_rate"] <= 1
        assert 0 < row["obrs/z"] <= 1 + 1e-6
        if cfg.obrs_z == "exact":
            assert row["obrs/z"] == row["obrs/z_exact"]
        else:
            assert row["obrs/z_low"] <= row["obrs/z"] + 1e-9 <= row["obrs/z_high"] + 2e-9
        if cfg.obrs_lambda != 1:
            assert row["obrs/z_exact"] <= 1 / cfg.obrs_lambda + 1e-6
        if cfg.obrs_accept_rate:
            assert row["obrs/accept_rate"] == pytest.approx(0.9, abs=1e-3)


def test_a_vllm_run_is_reproducible_bit_for_bit(vllm_engine, solvers, tmp_path, monkeypatch, train_here):
    use_engine(monkeypatch, vllm_engine)
    for name in ("a", "b"):
        train_here(flags(solvers, tmp_path / name, rollout="vllm", steps=3, train_batch=32, save_every=0))
    first, second = timeless(tmp_path / "a"), timeless(tmp_path / "b")
    assert first == second
    assert first[3]["reward"] > 0
