"""Studies: run what is missing, go on inside a run, keep what is small, refuse records of other settings."""

import json
from types import SimpleNamespace

import pytest
import sweep
from conftest import TINY_TASK
from test_train import finish, start

import metrics


@pytest.fixture()
def study(solvers, tmp_path, monkeypatch):
    """A study of tiny runs in a folder of its own, and the flags of its rows."""
    monkeypatch.setattr(sweep, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sweep, "FOLDERS", tmp_path / "study")
    base = dict(
        model=solvers / "policy",
        actor=solvers / "actor",
        steps=4,
        rollout_batch=16,
        train_batch=16,
        group_size=4,
        max_tokens=10,
        **TINY_TASK,
        save_every=1,
        eval_problems=16,
        eval_every=2,
        lr=1e-3,
        obrs_topk=5,
    )
    monkeypatch.setattr(sweep, "name_of", lambda f: f"{f['objective']}-{f['seed']}" if "objective" in f else "bad")
    return {"Jackpot": dict(objective="jackpot", **base), "TIS": dict(objective="tis", **base)}


def test_a_study_runs_what_is_missing_and_draws_from_its_records(study, capsys, monkeypatch):
    begun = dict(study["Jackpot"], seed=0, steps=2)  # a run that was stopped after two updates
    assert finish(start(sweep.command(begun)[1:]))[0] == 0
    with monkeypatch.context() as m:  # train.py ends well when a signal stops it: that is no record
        m.setattr(sweep.subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=0))
        path = sweep.FOLDERS / "jackpot-0" / "config.json"
        path.write_text(path.read_text().replace('"steps": 2', '"steps": 4'))
        with pytest.raises(SystemExit, match="stopped by a signal after update 2 of 4; start the study again"):
            sweep.run({"Jackpot": study["Jackpot"]})
    monkeypatch.setattr(sweep, "POINTS", 2)
    got = sweep.run(study, {"TIS": 2}, jobs=2)
    assert {k: len(v) for k, v in got.items()} == {"Jackpot": 1, "TIS": 2}
    record, rows = got["Jackpot"][0], metrics.read(sweep.FOLDERS / "jackpot-0")
    assert [r["step"] for r in rows] == [-1, 0, 1, 2, 3]  # two of them from before the stop
    assert (
        record["updates"] == [2, 4]
        and record["config"]["objective"] == "jackpot"
        and "--objective=jackpot" in record["command"]
    )
    assert record["columns"]["reward"][1] == pytest.approx((rows[3]["reward"] + rows[4]["reward"]) / 2, rel=1e-3)
    assert record["evals"]["policy"] == [
        [r["step"] + 1, r["eval/policy_pass@1"], r["eval/policy_se"]] for r in rows if "eval/policy_pass@1" in r
    ]
    assert record["seconds"]["update_s"] == pytest.approx(sum(r.get("update_s", 0) for r in rows), abs=0.06)
    assert (
        "obrs/accept_rate" not in got["TIS"][0]["columns"]
        and got["TIS"][0]["columns"]["reward"] != got["TIS"][1]["columns"]["reward"]
    )

    monkeypatch.setattr(sweep, "one", lambda *a: pytest.fail("ran again"))
    assert sweep.run(study, {"TIS": 2}) == got and sweep.run({**study, "more": dict(objective="none")}, draw=True) == {
        "Jackpot": got["Jackpot"],
        "TIS": got["TIS"][:1],
    }
    capsys.readouterr()
    sweep.write("small", got, [("reward", "reward"), ("pass@1", "eval/policy")])
    table = capsys.readouterr().out
    last = [100 * r["evals"]["policy"][-1][1] for r in got["TIS"]]
    assert f"{sum(last) / 2:.1f} +- {abs(last[0] - last[1]) / 2:.1f}" in table.splitlines()[3] and table.splitlines()[
        3
    ].startswith("| TIS | 2 |")
    assert table in (sweep.RESULTS / "small.md").read_text() and (sweep.RESULTS / "small.png").stat().st_size > 10_000

    path = sweep.RESULTS / "runs" / "tis-0.json"
    changed = json.loads(path.read_text())
    changed["config"]["lr"] = 5e-4
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="made with lr = 0.0005, configs/study.toml now says 0.001; delete the file"):
        sweep.run(study)


def test_studies_on_another_configuration_keep_to_themselves(study):
    flags = dict(objective="tis", seed=0)
    assert (
        sweep.path_of(flags, "configs/long.toml") == sweep.RESULTS / "runs" / "long" / "tis-0.json"
        and sweep.path_of(flags, sweep.STUDY).parent.name == "runs"
    )
    assert sweep.folder_of(flags, "configs/long.toml") == sweep.FOLDERS / "long" / "tis-0"
    argv = sweep.command(flags, "configs/long.toml")
    assert (
        "--config=configs/long.toml" in argv
        and argv[-1].endswith("study/long/tis-0")
        and "--config=configs/study.toml" in sweep.command(flags)
    )


def test_a_run_that_fails_says_which_and_why(study):
    with pytest.raises(SystemExit, match="(?s)objectiv=jackpot.*--objectiv: no such flag; did you mean --objective?"):
        sweep.run({"bad": dict(objectiv="jackpot")})
