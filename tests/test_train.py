"""The whole loop: on real vLLM, killed and resumed, stopped by a signal, on two ranks, and every objective by name."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY_TASK

import metrics
import objectives
import quant
import train
from rollout import Sampling

TIMES = ("_s", "_seconds")


def flags(solvers, out, **changes):
    """A tiny run: two updates for each rollout batch, a checkpoint in the middle of one."""
    base = dict(
        model=solvers / "policy",
        actor=solvers / "actor",
        rollout="hf",
        out=out,
        steps=6,
        rollout_batch=32,
        train_batch=16,
        group_size=4,
        max_tokens=10,
        **TINY_TASK,
        save_every=3,
        eval_problems=16,
        lr=1e-3,
        actor_lr=1e-3,
        obrs_topk=5,
    )
    return [f"--{k}={v}" for k, v in {**base, **changes}.items()]


def start(argv, ranks=1, on=(), **kwargs):
    command = (
        [sys.executable, "train.py"]
        if ranks == 1
        else [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "train.py"]
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    return subprocess.Popen(
        [*on, *command, *argv], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def finish(process, timeout=240):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def timeless(run):
    """Every metric but times."""
    return [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in metrics.read(run)]


def wait_for(run, step, process):
    """Until the run has logged `step`."""
    end = time.time() + 200
    while time.time() < end and process.poll() is None:
        path = Path(run) / "metrics.jsonl"
        if path.exists() and any(f'"step": {step},' in line for line in path.read_text().splitlines()):
            return
        time.sleep(0.02)
    raise AssertionError(
        f"no step {step}: {process.communicate()[1][-2000:] if process.poll() is not None else 'too slow'}"
    )


@pytest.fixture(scope="module")
def whole(solvers, tmp_path_factory):
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    code, text, err = finish(start(flags(solvers, out)))
    assert code == 0, err[-3000:]
    return out, text


def test_a_run_leaves_everything_behind(whole, solvers):
    out, text = whole
    rows = metrics.read(out)
    assert (
        [r["step"] for r in rows] == list(range(-1, 6))
        and "eval/policy_pass@1" in rows[0]
        and "eval/actor_pass@1" in rows[-1]
    )
    for key in (
        "rollout_corr/kl",
        "rollout_corr/chi2_seq",
        "obrs/accept_rate",
        "obrs/z",
        "obrs/kl_after",
        "distill_kl",
        "grad_norm",
        "actor/grad_norm",
        "lr",
        "entropy",
        "reward",
        "staleness/max_updates",
        "loss",
        "weight_var",
        "ppo_kl",
    ):
        assert all(key in r and r[key] is not None for r in rows[1:]), key
    assert [r["staleness/max_updates"] for r in rows[1:]] == [0, 1] * 3 and [("rollout_s" in r) for r in rows[1:]] == [
        True,
        False,
    ] * 3
    assert all(r["obrs/kl_after"] < r["obrs/kl_before"] for r in rows[1:])
    saved = json.loads((out / "config.json").read_text())
    assert (
        saved["config"]["correction"] == "obrs"
        and saved["versions"]["torch"] == torch.__version__
        and "train.py" in saved["command"]
    )
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step_000003", "step_000006"]
    assert "policy pass@1" in text and (out / "curves.png").stat().st_size > 20_000
    from transformers import AutoModelForCausalLM

    a, b = (
        AutoModelForCausalLM.from_pretrained(f).state_dict()
        for f in (solvers / "policy", out / "checkpoints" / "step_000006" / "policy")
    )
    assert a.keys() == b.keys() and not torch.equal(a["model.embed_tokens.weight"], b["model.embed_tokens.weight"])


@pytest.mark.parametrize("after", [0, 4])
def test_killed_and_resumed_is_the_same_run(whole, solvers, tmp_path, after):
    """SIGKILL before the first checkpoint or after one in the middle of a rollout batch; then --resume: the same metrics, bit for bit."""
    out = tmp_path / "run"
    process = start(flags(solvers, out))
    wait_for(out, after, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, text, err = finish(start(["--resume", f"--out={out}"]))
    assert code == 0, err[-3000:]
    assert timeless(out) == timeless(whole[0])  # save_every=3 and two updates a batch: update 4 was pending
    one, two = (
        torch.load(f / "checkpoints" / "step_000006" / "learner.pt")["learner"]["optimizer.policy"]["parts"][0]["state"]
        for f in (out, whole[0])
    )
    assert all(torch.equal(one[i]["exp_avg"], two[i]["exp_avg"]) for i in one)


@pytest.mark.parametrize(
    "case",
    [
        dict(distill_kl_target=0.05, obrs_target="new"),
        dict(objective="tbpo", actor="none", rollout_quant="int8", learner_quant="aligned", optimizer="muon"),
    ],
    ids=["controllers", "low bits"],
)
def test_stopped_and_resumed_is_the_same_run(case, solvers, tmp_path):
    """Target new's kappa and the closed loop's lambda_distill live in the checkpoint; low-bit tensors and Muon's momentum come out of it."""
    more = dict(case, steps=4, save_every=0)
    for name, steps in (("whole", 4), ("run", 3)):
        code, _, err = finish(start(flags(solvers, tmp_path / name, **{**more, "steps": steps})))
        assert code == 0, err[-3000:]
    code, _, err = finish(start(["--resume", f"--out={tmp_path / 'run'}", "--steps=4"]))
    no_eval = lambda rows: [{k: v for k, v in r.items() if not k.startswith("eval/")} for r in rows]
    assert code == 0 and no_eval(timeless(tmp_path / "run")) == no_eval(timeless(tmp_path / "whole")), err[-3000:]
    if "distill_kl_target" in case:
        assert (
            metrics.read(tmp_path / "run")[4]["distill_lambda"] != 1.0
            and metrics.read(tmp_path / "run")[4]["obrs/kappa"] != 1.0
        )


def test_signals_save_first_and_resume_goes_on(whole, solvers, tmp_path):
    out = tmp_path / "run"
    process = start(flags(solvers, out, save_every=0))
    wait_for(out, 1, process)
    process.send_signal(signal.SIGTERM)
    code, text, err = finish(process)
    assert code == 0 and "saved: go on with --resume" in text, err[-3000:]
    done = len(metrics.read(out)) - 1
    assert 2 <= done < 6 and [p.name for p in (out / "checkpoints").iterdir()] == [f"step_{done:06d}"]
    code, text, err = finish(start(["--resume", f"--out={out}"]))
    assert code == 0 and timeless(out) == timeless(whole[0]), err[-3000:]


def test_resume_says_which_key_differs_and_a_run_is_not_overwritten(whole, solvers):
    out, _ = whole
    code, _, err = finish(start(["--resume", f"--out={out}", "--lr=5e-3", "--group_size=8"]))
    assert (
        code != 0
        and "--group_size was 4 and is now 8" in err
        and "--lr was 0.001 and is now 0.005" in err
        and "Traceback" not in err
    )
    code, _, err = finish(start(flags(solvers, out)))
    assert (
        code != 0
        and "already holds a run: add --resume to go on, --overwrite to delete it" in err
        and "Traceback" not in err
    )
    code, _, err = finish(start(["--resume", f"--out={out}", "--steps=7"]))
    assert code == 0 and len(metrics.read(out)) == 8, err[-2000:]
    made = json.loads((out / "config.json").read_text())  # what started the run stays, what went on is added
    assert (
        made["config"]["steps"] == 7
        and "--steps=6" in made["command"]
        and "--steps=7" in made["resumed"][-1]["command"]
    )


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_and_resume(solvers, tmp_path, parallel):
    """torchrun with one engine a rank: whole run against one stopped after its checkpoint and resumed."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    common = dict(parallel=parallel, steps=4, save_every=2)
    code, _, err = finish(start(flags(solvers, whole, **common), ranks=2))
    assert code == 0, err[-3000:]
    rows = metrics.read(whole)
    assert len(rows) == 5 and all(r["tokens"] > 16 for r in rows[1:])
    code, _, err = finish(start(flags(solvers, out, **{**common, "steps": 3, "save_every": 3}), ranks=2))
    assert code == 0, err[-3000:]
    code, _, err = finish(start(["--resume", f"--out={out}", "--steps=4"], ranks=2))
    assert code == 0, err[-3000:]
    no_eval = lambda rows: [{k: v for k, v in r.items() if not k.startswith("eval/")} for r in rows]
    assert no_eval(timeless(out)) == no_eval(timeless(whole))


@pytest.mark.parametrize(
    "objective", [o for o in objectives.OBJECTIVES if o not in objectives.ALIASES or o == "decoupled_geo_rs"]
)
@pytest.mark.parametrize("two", [False, True])
def test_every_objective_trains_end_to_end(objective, two, solvers, tmp_path, monkeypatch):
    """Every preset, one model and two, in process on the plain sampler: finite metrics, weights that moved, all proofs held."""
    argv = flags(
        solvers,
        tmp_path / "run",
        objective=objective,
        steps=2,
        save_every=0,
        eval_problems=4,
        actor=solvers / "actor" if two else "none",
    )
    monkeypatch.setattr(train.config, "sys", sys)
    cfg = train.config.parse(argv)
    monkeypatch.setattr(train, "catch_signals", lambda: [])
    train.train(cfg)
    rows = metrics.read(tmp_path / "run")
    assert len(rows) == 3 and all(
        r["skipped_steps"] == 0
        and (r["grad_norm"] > 0 or r["rollout_corr/rollout_rs_masked_fraction"] == 1)
        and r["loss"] is not None
        for r in rows[1:]
    )
    assert ("distill_kl" in rows[1]) == two and ("obrs/z" in rows[1]) == (cfg.correction in objectives.USES_Z)


@pytest.mark.parametrize(
    "case",
    [
        dict(objective="jackpot", actor="none"),
        dict(objective="jackpot"),
        dict(objective="jackpot", obrs_target="new"),
        dict(objective="jackpot", obrs_target="new", kappa="exact", actor="none", loss_denominator="kept"),
        dict(objective="jackpot", obrs_accept_rate=0.9, obrs_mask="expected"),
        dict(objective="tis", distill_lambda=0.0, temperature=0.8),
        dict(objective="jackpot", distill_kl_target=0.05, distill_direction="reverse"),
        dict(objective="jackpot", obrs_lambda=1.5),
        dict(objective="tis", top_p=0.9, top_k=8, temperature=0.8),
        dict(objective="jackpot", actor="none", top_k=8, min_p=0.02),
        dict(objective="jackpot", top_k=8),
        dict(objective="grpo", actor="none", top_p=0.8, top_k=8, keep_sampling_mask="recompute"),
        dict(objective="tbpo", actor="none", rollout_quant="int8", learner_quant="aligned"),
        dict(objective="jackpot", rollout_quant="fp8", learner_quant="aligned"),
        dict(objective="jackpot", actor="none", rollout_quant="w4a16", learner_quant="aligned", quant_group=32),
    ],
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_real_vllm_end_to_end(case, vllm_engines, solvers, tmp_path, monkeypatch):
    """Real vLLM rolls out, the learner trains, every sync is proved; the suite's one engine stands in for a fresh start."""
    cfg = train.config.parse(
        flags(
            solvers,
            tmp_path / "run",
            **{"steps": 4, "rollout": "vllm", "save_every": 0, "model": solvers / "actor", **case},
        )
    )
    fmt = quant.format_of(cfg.rollout_quant, cfg.quant_group)
    vllm_engine = vllm_engines(**({"fmt": fmt} if fmt else {}))
    laws, generate = [], vllm_engine.generate
    monkeypatch.setattr(
        vllm_engine, "generate", lambda p, s, sampling, *a: (laws.append(sampling), generate(p, s, sampling, *a))[1]
    )
    monkeypatch.setattr(train, "make_engine", lambda *a: vllm_engine)
    monkeypatch.setattr(vllm_engine, "close", lambda: None)
    monkeypatch.setattr(train, "catch_signals", lambda: [])
    train.train(cfg)
    assert all(s == Sampling(cfg.temperature, cfg.top_p, cfg.top_k, cfg.min_p, cfg.max_tokens, cfg.seed) for s in laws)
    rows = metrics.read(tmp_path / "run")[1:]
    assert len(rows) == 4 and all(r["skipped_steps"] == 0 for r in rows)
    rounded = fmt is not None and fmt.activations  # activations near a rounding edge may fall on either side
    assert (
        rows[0]["sync/error"] < (0.1 if rounded else 1e-4)
        and rows[2]["sync/distance"] > (0 if rounded else 4 * rows[2]["sync/error"])
        and rows[0]["sync/MiB"] > 0
    )
    assert rounded or rows[2]["sync/proved"] == 1.0
    if rounded:
        assert rows[0]["actor/engine_gap" if cfg.actor != "none" else "rollout_corr/mean_mismatch"] < 1e-3
    elif cfg.actor == "none":
        assert (
            rows[0]["rollout_corr/mean_mismatch"] < 1e-4
            and rows[1]["rollout_corr/mean_mismatch"] > rows[0]["rollout_corr/mean_mismatch"] * 0.1
        )
    else:
        assert rows[0]["actor/engine_gap"] < 1e-4  # the engine's actor is the learner's actor
    if cfg.correction in objectives.USES_Z:
        assert all(0 < r["obrs/accept_rate"] <= 1 and 0 < r["obrs/z"] <= 1 + 1e-6 for r in rows)
        if cfg.obrs_z == "exact":
            assert all(r["obrs/z"] == r["obrs/z_exact"] for r in rows)
        else:
            assert all(r["obrs/z_low"] <= r["obrs/z"] + 1e-9 <= r["obrs/z_high"] + 2e-9 for r in rows)
    if cfg.obrs_lambda != 1:
        assert all(r["obrs/z_exact"] <= 1 / cfg.obrs_lambda + 1e-6 for r in rows)
    if cfg.obrs_accept_rate:
        assert all(r["obrs/accept_rate"] == pytest.approx(0.9, abs=1e-3) for r in rows)
    if cfg.distill_kl_target:
        assert rows[0]["distill_lambda"] != rows[3]["distill_lambda"]


def test_a_vllm_run_is_reproducible_bit_for_bit(vllm_engine, solvers, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "make_engine", lambda *a: vllm_engine)
    monkeypatch.setattr(vllm_engine, "close", lambda: None)
    monkeypatch.setattr(train, "catch_signals", lambda: [])
    runs = []
    for name in ("a", "b"):
        cfg = train.config.parse(flags(solvers, tmp_path / name, rollout="vllm", steps=3, train_batch=32, save_every=0))
        train.train(cfg)
        runs.append(timeless(tmp_path / name))
    assert runs[0] == runs[1] and runs[0][3]["reward"] > 0


def test_advantage_error_is_small_on_policy_and_reproducible(solvers, tmp_path, monkeypatch):
    """On-policy and uncorrected, mean(w A) is near 0 and so is the mean advantage of fresh samples, within sampling error."""
    monkeypatch.setattr(train, "catch_signals", lambda: [])
    cfg = train.config.parse(
        flags(
            solvers,
            tmp_path / "run",
            objective="grpo",
            actor="none",
            steps=2,
            rollout_batch=256,
            train_batch=256,
            group_size=8,
            advantage_error_every=1,
            save_every=0,
        )
    )
    train.train(cfg)
    rows = metrics.read(tmp_path / "run")[1:]
    assert all(
        r["advantage_error"] == pytest.approx(abs(r["weighted_advantage"] - r["fresh_advantage"]))
        and r["advantage_error"] < 0.3
        for r in rows
    )
    assert rows[0]["fresh_advantage"] != 0 and rows[0]["fresh_advantage"] != rows[1]["fresh_advantage"]


def test_kappa_exact_equals_the_updates_own_kappa(solvers, tmp_path, monkeypatch):
    """Target new: the extra forward's kappa is what the training pass finds for itself."""
    monkeypatch.setattr(train, "catch_signals", lambda: [])
    cfg = train.config.parse(
        flags(
            solvers,
            tmp_path / "run",
            objective="jackpot",
            actor="none",
            obrs_target="new",
            kappa="exact",
            steps=4,
            save_every=0,
        )
    )
    seen = []
    finish_ = objectives.update_controllers
    monkeypatch.setattr(
        objectives,
        "finish",
        lambda controllers, logged, cfg: (
            finish_(controllers, logged, cfg),
            seen.append((controllers["kappa"], logged["obrs/kappa"])),
        ),
    )
    train.train(cfg)
    assert (
        len(seen) == 4
        and all(a == pytest.approx(b, rel=1e-5) for a, b in seen)
        and len({round(a, 6) for a, _ in seen}) > 1
    )
