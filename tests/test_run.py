"""A run: its folder and models, opened and refused; its log, written, truncated and read."""

import json
import math
import os
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY_TASK, copied, make_cfg, write_rows

import config
import plan
from learner import Learner
from machinery import plot, run, settings
from machinery.flags import UserError, check_result
from machinery.log import Log, read_metrics, truncate
from machinery.ranks import Comm
from machinery.run import locked, open_run, prepare_folder
from plan.footprint import Activations
from remote import keys
from remote.source import travels_packed

# -- Opening -----------------------------------------------------------------------------------------------------------


def flags(folders, tmp_path, **changes) -> dict:
    """Flags of a run of the tiny policy."""
    base = {"model": str(folders / "policy"), "objective": "grpo", "out": str(tmp_path / "run"), "max_tokens": 8}
    sums = TINY_TASK if changes.get("task", "arith") == "arith" else {}
    return {**base, **sums, **changes}


def opened(folders, tmp_path, **changes):
    return open_run(make_cfg(**flags(folders, tmp_path, **changes)), Comm())


def prepared(cfg):
    """Open a run and prepare its folder, like train.py."""
    with locked(cfg, Comm()):
        r = open_run(cfg, Comm())
        prepare_folder(r)
    return r


def started(folders, tmp_path, **changes):
    return prepared(make_cfg(**flags(folders, tmp_path, **changes)))


def config_of_run(tmp_path) -> dict:
    return json.loads((tmp_path / "run" / "config.json").read_text())


def shared_file(checkpoint: Path, n_ranks: int = 1) -> None:
    """The first files of a checkpoint that a run reads."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    torch.save({"format": 5, "n_ranks": n_ranks}, checkpoint / "learner.pt")
    for rank in range(n_ranks):
        torch.save({}, checkpoint / f"rank{rank}.pt")


def test_samplers_of_a_different_number_of_ranks_are_refused(folders, tmp_path, no_models):
    """Groups of delayed or remote samplers belong to one rank; a local source's groups are distributed again."""
    r = started(folders, tmp_path)
    saved = r.folder / "checkpoints" / "step_000002"
    shared_file(saved, n_ranks=4)
    for other in ({"delay": "constant"}, {"samplers": "zmq"}):
        with pytest.raises(UserError, match="step_000002 was written by 4 rank.s. and this run has 1"):
            open_run(replace(r.cfg, resume=True, **other), Comm())
    assert open_run(replace(r.cfg, resume=True), Comm()).checkpoint == saved


@pytest.fixture
def no_models(monkeypatch):
    """Loading a model fails."""
    monkeypatch.setattr(run, "unread", None)


EPOCHS = {"train_batch": 8, "rollout_batch": 8, "group_size": 2, "prompt_template": "plain"}
SUM = {"problem": "1 + 1", "answer": "2"}


def test_epochs_count_problems(folders, tmp_path):
    """The number of updates that train on every problem --epochs times, rounded up: 4 groups of 2 responses each."""
    file = write_rows(tmp_path / "task.jsonl", 10 * [SUM] + [{"problem": "1 + 1 + 1 + 1", "answer": "4"}])
    for epochs, longest, updates in ((2.0, 0, 6), (0.3, 0, 1), (1.5, 3, 4), (2.0, 3, 5)):
        r = opened(folders, tmp_path, task=file, epochs=epochs, max_prompt_tokens=longest, **EPOCHS)
        assert r.cfg.steps == updates
        assert r.context == (3 if longest else 7) + 8
    with pytest.raises(ValueError, match="--epochs=1.0: arith is endless; give --steps"):
        opened(folders, tmp_path, epochs=1.0)


def test_steps_and_epochs_on_the_command_line_take_precedence(folders, tmp_path):
    """--steps over a file's epochs, --epochs over a file's steps; in a resumed run too."""
    file, task = tmp_path / "run.toml", write_rows(tmp_path / "task.jsonl", 10 * [SUM])
    model = shutil.copytree(folders / "policy", tmp_path / "a" / "b" / "policy")
    all_flags = {**flags(folders, tmp_path, task=task), **EPOCHS, "dtype": "float32", "lr": 1e-3, "actor": "none"}
    all_flags["model"] = model
    argv = [f"--config={file}", *(f"--{key}={value}" for key, value in all_flags.items())]

    def steps(text, *more):
        file.write_text(text)
        return prepared(settings.parse([*argv, *more])).cfg.steps

    assert steps("epochs = 2") == steps("epochs = 2\nsteps = 500") == 5
    assert steps("epochs = 2", "--steps=7", "--overwrite") == 7
    assert steps("steps = 500", "--epochs=2", "--overwrite") == 5
    smaller = ("--micro_tokens=512", "--rollout_memory=0.1")  # after a run without enough memory
    assert steps("steps = 500", "--epochs=2", "--resume", *smaller) == 5
    assert steps("", "--resume", "--steps=9") == 9 and steps("", "--resume", "--epochs=4") == 10
    steps("lr_schedule = 'cosine'", "--epochs=2", "--overwrite")
    with pytest.raises(UserError, match="--resume with a changed configuration: --epochs was 2.0 and is now 4.0"):
        steps("", "--resume", "--epochs=4")
    with pytest.raises(UserError, match="--model was .* and is now"):
        steps("", "--resume", f"--model={folders / 'policy'}")
    shutil.rmtree(model)  # as checkpoints are deleted
    assert steps("", "--resume", f"--model={folders / 'policy'}") == 5


def test_the_plan_chooses_micro_tokens_on_a_gpu(folders, tmp_path, monkeypatch, capsys):
    """Stand-ins for the GPU's memory and for measured activations. The plan of the chosen number fits into nine tenths
    of the memory, and the plan of twice the number does not; all ranks take the smallest. config.json has the number,
    and a resumed run keeps it."""
    text = {**flags(folders, tmp_path, actor="none", lr=1e-3, dtype="float32"), "rollout": "hf", "task": "arith"}
    text["max_tokens"] = 100
    argv = [f"--{key}={value}" for key, value in text.items()]
    assert settings.parse(argv).micro_tokens == config.MICRO_TOKENS  # on a CPU
    monkeypatch.setattr(settings.torch.cuda, "is_available", lambda: True)
    cfg = settings.parse(argv)
    monkeypatch.undo()
    assert cfg.micro_tokens is None

    def known_activations(cfg, configs, rows, *more):
        return Activations({"policy": rows << 20}, rows << 18, rows << 18)

    monkeypatch.setattr(plan, "measure", known_activations)
    made = {
        n: plan.plan_of(replace(cfg, micro_tokens=n), *known, 1).peak for known in [shape(cfg)] for n in (512, 2048)
    }
    assert made[512] < made[2048]
    between = sum(made.values()) / 2 / 0.9
    monkeypatch.setattr(run, "memory_of", lambda device: between)
    with locked(cfg, Comm()):
        r = open_run(cfg, Comm())
        prepare_folder(r)
    chosen = r.cfg.micro_tokens
    fits = [
        plan.plan_of(replace(cfg, micro_tokens=n), *shape(cfg), 1, 0.9 * between / plan.GIB)
        for n in (chosen, 2 * chosen)
    ]
    assert chosen in (512, 1024) and fits[0].peak <= 0.9 * between < fits[1].peak
    assert f"--micro_tokens={chosen}: the plan of memory allows it" in capsys.readouterr().out
    assert config_of_run(tmp_path)["config"]["micro_tokens"] == chosen
    monkeypatch.setattr(run, "memory_of", None)  # not asked again
    assert open_run(settings.parse(["--resume", f"--out={cfg.out}"]), Comm()).cfg.micro_tokens == chosen
    assert settings.parse(["--resume", f"--out={cfg.out}", "--micro_tokens=256"]).micro_tokens == 256
    monkeypatch.setattr(run, "memory_of", lambda device: between)
    other = Comm()
    monkeypatch.setattr(other, "max", lambda values: [max(values[0], -128)])  # a rank with a smaller GPU
    assert open_run(cfg, other).cfg.micro_tokens == 128
    monkeypatch.setattr(plan, "largest_micro", lambda *args: {}["Zamba2"])
    assert open_run(cfg, Comm()).cfg.micro_tokens == config.MICRO_TOKENS
    assert "the plan cannot measure this model (KeyError)" in capsys.readouterr().out


def shape(cfg) -> tuple[dict, int]:
    """(the models' configs, the tokens of the longest prompt) of a run."""
    r = open_run(replace(cfg, micro_tokens=1), Comm())
    return {"policy": r.configs["policy"].get_text_config()}, r.context - cfg.max_tokens


def test_a_run_is_resumed_or_deleted_only_when_asked(folders, tmp_path):
    started(folders, tmp_path)
    started(folders, tmp_path)  # no metrics yet: it may start again
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text('{"step": 0}\n')
    with pytest.raises(UserError, match="already holds a run: add --resume to continue it, --overwrite to delete it"):
        started(folders, tmp_path)

    for name in ("step_000003", "step_000012"):
        shared_file(tmp_path / "run" / "checkpoints" / name)
    first = config_of_run(tmp_path)
    assert first["versions"]["torch"] == torch.__version__ and first["command"] == " ".join(sys.argv)
    for steps in (200, 300):
        r = started(folders, tmp_path, resume=True, steps=steps)
    assert r.checkpoint.name == "step_000012"
    config = config_of_run(tmp_path)
    assert config["config"]["steps"] == 300
    assert [sorted(again) for again in config["resumed"]] == [["command", "git"]] * 2
    assert all(config[key] == first[key] for key in ("id", "command", "versions", "python"))
    assert log.exists()


def test_overwrite_deletes_only_files_of_a_run(folders, tmp_path, monkeypatch):
    """A killed deletion can be repeated. Never the starting model, and not while another process uses the folder."""
    started(folders, tmp_path)
    out = tmp_path / "run"
    for name in ("metrics.jsonl", "samples.jsonl", "curves.png", "remote.log", "remote1.log.1", "notes.log.jsonl"):
        (out / name).write_text("x")
    for name in ("checkpoints/step_000003", "mine/checkpoints"):
        (out / name).mkdir(parents=True)
    (out / "versions").symlink_to(out / "mine")  # not followed
    before = config_of_run(tmp_path)
    inside = shutil.copytree(folders / "policy", out / "checkpoints" / "step_000003" / "policy")
    for flag in ("model", "actor"):
        with pytest.raises(UserError, match=f"--overwrite: --out=.*run holds --{flag}=.*policy; name the folder"):
            started(folders, tmp_path, overwrite=True, **{flag: str(inside)})
    cfg = make_cfg(out=str(out), overwrite=True)
    assert settings.resolve_open(make_cfg(actor=str(out))).actor == str(inside)  # the policy of a run with one model
    other = Comm()
    other.rank = 1  # on a host without this disk
    elsewhere = replace(cfg, out=str(tmp_path / "elsewhere"))
    shutil.copytree(out, tmp_path / "elsewhere", symlinks=True)  # with a lock of an earlier run
    with pytest.raises(UserError, match="this host does not see the first rank's folder"), locked(elsewhere, other):
        pass
    with locked(cfg, Comm()), pytest.raises(UserError, match="another process uses this folder"):
        started(folders, tmp_path, overwrite=True)
    assert opened(folders, tmp_path, overwrite=True).checkpoint is None
    assert (out / "metrics.jsonl").exists()  # deleted only after all checks
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(shutil, "rmtree", lambda *_: sys.exit(1))
        started(folders, tmp_path, overwrite=True)
    started(folders, tmp_path, overwrite=True)
    assert {path.name for path in out.iterdir()} == {"config.json", "lock", "mine", "notes.log.jsonl"}
    assert (out / "mine" / "checkpoints").is_dir() and config_of_run(tmp_path)["id"] != before["id"]


def test_prompts_are_checked_before_models_load(folders, tmp_path, no_models):
    """The longest prompt and --max_tokens must fit the smaller context of both models."""
    file = write_rows(tmp_path / "long.jsonl", [{"problem": "1 + " * 100, "answer": "1"}])
    too_long = r"long.jsonl: the longest prompt has 2\d\d tokens, .* the model's context of 128; lower"
    with pytest.raises(ValueError, match=too_long):
        opened(folders, tmp_path, task=file)
    short = copied(folders / "actor", tmp_path / "short", max_position_embeddings=10)  # of 4 + 8 tokens
    with pytest.raises(UserError, match="exceeds the model's context of 10"):
        opened(folders, tmp_path, actor=str(short))


# -- Models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "samplers, quant, learner_quant, dtype",
    [
        ("local", "none", "none", "bfloat16"),
        ("files", "none", "none", "float32"),
        ("local", "int8", "none", "float32"),
        ("files", "int8", "aligned", "bfloat16"),
        ("local", "w4a16", "aligned", "float32"),
        ("files", "w4a16", "none", "bfloat16"),
        ("files", "w2a16", "aligned", "bfloat16"),
    ],
)
def test_published_weights_have_the_engines_format(samplers, quant, learner_quant, dtype, folders, tmp_path):
    """Weights are in the engine's format and dtype, or in full for remote samplers that round on their own."""
    place = "local" if samplers == "local" else str(tmp_path / "shared")
    quants = dict(rollout_quant=quant, learner_quant=learner_quant, quant_group=16, rollout_dtype=dtype)
    r = opened(folders, tmp_path, samplers=place, rollout="hf", actor="none", **quants)
    learner = Learner(*r.load_models(), r.cfg, Comm(), r.vocabulary)
    packed = travels_packed(r.cfg) if samplers == "files" else quant == "int8"
    published = dict(learner.published("policy", packed))
    assert (torch.bfloat16 in {x.dtype for x in published.values()}) == (dtype == "bfloat16" and quant == "none")
    packed_names = [name for name in published if name.endswith("_scale")]
    assert bool(packed_names) == (packed and quant != "none")


def test_tied_weights_that_differ_are_refused(folders, tmp_path):
    model = copied(folders / "untied", tmp_path / "model", tie_word_embeddings=True)
    with pytest.raises(UserError, match="ties lm_head.weight and model.embed_tokens.weight, which differ in its files"):
        opened(folders, tmp_path, model=str(model), actor="none")


def layers(model) -> int:
    return len(model.base_model.layers)


def test_the_weight_check_uses_the_same_sequences_in_every_run(folders, tmp_path):
    """The check is of the sampling model, on sequences that depend only on the context; --check_sync=False has none."""
    check = opened(folders, tmp_path, actor=str(folders / "actor"), max_tokens=32).weight_check()
    context = 2 * 1 + 2 + 32
    assert check.ids.shape == (512 // (context - 1), context - 1)
    assert 0 <= check.ids.min() <= check.ids.max() < 256
    alone = opened(folders, tmp_path, overwrite=True, max_tokens=32, seed=7).weight_check()
    assert np.array_equal(alone.ids, check.ids)
    assert [layers(one.model.model) for one in (check, alone)] == [1, 2]
    assert opened(folders, tmp_path, overwrite=True, check_sync=False).weight_check() is None


# -- metrics.jsonl -----------------------------------------------------------------------------------------------------


def logged(tmp_path, first: int, rows: dict) -> None:
    """Open the log at update `first` and write step -> values."""
    log = Log(tmp_path, first)
    for step, values in rows.items():
        log.write(step, values)
    log.close()


def test_log_writes_truncates_and_reads(tmp_path):
    rows = {step: {"x": step / 2, "nothing": math.inf} for step in (-1, 0, 1, 2)}
    logged(tmp_path, 0, rows)
    assert read_metrics(tmp_path)[2] == {"step": 1, "x": 0.5, "nothing": None}
    (tmp_path / "samples.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    logged(tmp_path, 2, {2: {"x": 9.0}})
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 1}\n'
    assert [(r["step"], r["x"]) for r in read_metrics(tmp_path)] == [(-1, -0.5), (0, 0.0), (1, 0.5), (2, 9.0)]
    logged(tmp_path, 0, {-1: {"x": 3.0}})  # a new run deletes the lines of an earlier run
    assert read_metrics(tmp_path) == [{"step": -1, "x": 3.0}]


def test_truncate_keeps_the_lines_before_the_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) for step in (-1, 0, 1)]
    for step, kept in ((1, [-1, 0]), (3, [-1, 0, 1, 2])):
        path.write_text("\n".join([*lines, json.dumps({"step": 2}), '{"st']))  # cut short by a kill
        truncate(path, step)
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == kept
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    path.write_text("\n".join([*lines, '{"st', json.dumps({"step": 2})]))
    with pytest.raises(UserError, match="metrics.jsonl, line 4: not valid JSON; remove that line"):
        truncate(path, 3)


def test_warnings_are_printed_once(tmp_path, capsys):
    rows = {
        step: {"rejected_steps": float(step), "cut": 0.5, "rollout_corr/seq_clamped_fraction": 0.5} for step in range(3)
    }
    logged(tmp_path, 0, rows)
    warnings = capsys.readouterr().err
    assert warnings.count("every token was rejected") == 1
    assert "update 2" in warnings and "clamp" not in warnings and "max_tokens," not in warnings
    logged(tmp_path, 3, {3: {"rejected_steps": 2.0, "cut": 0.51}})  # after a resume: one of them is new
    warnings = capsys.readouterr().err
    assert "rejected" not in warnings and "cut at --max_tokens, and" in warnings


def test_an_edited_configuration_is_refused(tmp_path):
    """Flags edited in config.json would otherwise apply without notice."""
    config = run.provenance(make_cfg(out=str(tmp_path), lr=1e-3))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert settings.parse(["--resume", f"--out={tmp_path}"]).lr == 1e-3
    remote = tmp_path / "remote"
    remote.mkdir()
    config = run.provenance(make_cfg(out=str(remote), samplers="tcp://127.0.0.1:5555"))
    (remote / "config.json").write_text(json.dumps(config))
    moved = settings.parse(["--resume", f"--out={remote}", "--samplers=tcp://127.0.0.1:6666"])
    assert moved.samplers == "tcp://127.0.0.1:6666"
    edited = {**config, "config": {**config["config"], "lr": 5e-3}}
    for written in (edited, {**edited, "config_digest": None}):
        (tmp_path / "config.json").write_text(json.dumps(written))
        with pytest.raises(UserError, match="config.json were edited after the run wrote them"):
            settings.parse(["--resume", f"--out={tmp_path}"])


def test_paths_where_a_run_cannot_write_are_refused(tmp_path):
    """A file in place of a folder, a folder in place of a file, a name outside UTF-8."""
    for name in ("a", "c/metrics.jsonl"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a" / "checkpoints").write_text("{}")
    for name in (b"a", b"c", b"\xff"):
        with pytest.raises(UserError, match="--out=.*: no file can be written there; name a different path"):
            run.check_folder(make_cfg(out=str(tmp_path / os.fsdecode(name))))


@pytest.mark.parametrize(
    "content, replaced",
    [('{"command": ["--k=1"], "pass@1": 0.5}', True), ('{"model_type": "qwen3"}', False), ("notes", False)]
    + [('{"command": "python train.py", "config": {}}', False), ("[1]", False), ("", False)],
)
def test_a_result_replaces_only_an_earlier_result(tmp_path, content, replaced):
    path = tmp_path / "scores.json"
    path.write_text(content)
    refused = pytest.raises(UserError, match="this file exists and is not an earlier result; name a different file")
    with nullcontext() if replaced else refused:
        check_result("out", str(path))
    assert path.read_text() == content


def test_the_home_folder_in_a_flag_or_argument(monkeypatch, tmp_path):
    """A shell does not expand --out=~/x or '~/x'."""
    monkeypatch.setenv("HOME", "/home/me")
    wanted = {"~/x": "/home/me/x", "a,~/b": "a,/home/me/b", "~": "/home/me", "a~/b": "a~/b", "~root/x": "/root/x"}
    assert {text: settings.parse([f"--out={text}"]).out for text in wanted} == wanted
    monkeypatch.setenv("HOME", str(tmp_path))
    keys.main(["~/keys"])
    assert (tmp_path / "keys" / "learner").is_dir()
    drawn = []
    monkeypatch.setattr(plot, "draw", lambda runs, out: drawn.extend(runs))
    plot.main(["~/run", f"--out={tmp_path}/x.png"])
    assert drawn == [f"{tmp_path}/run"]


@pytest.mark.parametrize("name", ["metrics.jsonl/a", "samples.jsonl/a", "curves.png/a", "checkpoints", "versions"])
def test_a_folder_that_cannot_hold_a_run(tmp_path, name):
    """A folder in the way of a file, or a file in the way of a folder, is found before a model loads."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"{name.partition('/')[0]}(/new)?: no file can be written there"):
        run.check_folder(settings.parse([f"--out={tmp_path}"]))
