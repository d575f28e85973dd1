"""Studies: run what is missing, go on inside a run, record what is small, refuse records of other settings."""

import importlib
import json
import re
import shutil
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY_TASK
from test_recipes import PAPERS
from test_train import finish, start

from config import HARMLESS, parse
from results import (
    aligned,
    figure2c,
    heterorl,
    index,
    lowbit,
    praxis,
    qarl,
    sweep,
    table1,
    table2_3,
    table6_10,
    text_settings,
)
from run import clean, read_metrics


@pytest.fixture()
def places(tmp_path, monkeypatch):
    """Pages, records and run folders in a place of their own."""
    monkeypatch.setattr(sweep, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sweep, "FOLDERS", tmp_path / "study")
    (tmp_path / "results").mkdir()
    return tmp_path


@pytest.fixture()
def rows(solvers, places):
    """The rows of a study of tiny runs."""
    base = dict(
        model=solvers / "policy",
        actor=solvers / "actor",
        steps=4,
        rollout_batch=16,
        train_batch=16,
        group_size=4,
        max_tokens=10,
        task="arith",
        **TINY_TASK,
        save_every=1,
        eval_problems=16,
        eval_every=2,
        lr=1e-3,
        actor_lr=3e-4,
        dtype="float32",
        obrs_topk=5,
    )
    return {"Jackpot": dict(objective="jackpot", **base), "TIS": dict(objective="tis", **base)}


def fake(path, flags: dict, config: str = sweep.STUDY, old: bool = False, columns: dict | None = None) -> dict:
    """A record as a run would have left it; old: as they were before records held their flags."""
    command = ["python", *sweep.command(flags, path.stem, config)]
    made = {k: clean(v) for k, v in asdict(parse(command[2:])).items() if k not in HARMLESS}
    record = {"flags": flags, "command": " ".join(command), "git": "", "versions": {}, "config": made}
    record |= {"seconds": {}, "evals": {"policy": [[0, 0.5, 0.1]]}, "updates": [1], "columns": columns or {}}
    if old:
        del record["flags"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    sweep.records_in.cache_clear()
    return record


@pytest.mark.slow
def test_a_study_runs_what_is_missing_and_draws_from_its_records(rows, capsys, monkeypatch):
    begun = dict(rows["Jackpot"], seed=0, steps=2)  # a run that was stopped after two updates
    assert finish(start(sweep.command(begun, "jackpot-0")[1:]))[0] == 0
    folder = sweep.FOLDERS / "study" / "jackpot-0"
    with monkeypatch.context() as m:  # train.py ends well when a signal stops it: that is no record
        m.setattr(sweep.subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=0))
        path = folder / "config.json"
        path.write_text(path.read_text().replace('"steps": 2', '"steps": 4'))
        with pytest.raises(SystemExit, match="stopped by a signal after update 2 of 4; start the study again"):
            sweep.run({"Jackpot": rows["Jackpot"]})
    monkeypatch.setattr(sweep, "POINTS", 2)
    got = sweep.run(rows, {"TIS": 2}, jobs=2)
    assert {k: len(v) for k, v in got.items()} == {"Jackpot": 1, "TIS": 2}
    record, lines = got["Jackpot"][0], read_metrics(folder)
    assert [r["step"] for r in lines] == [-1, 0, 1, 2, 3]  # two of them from before the stop
    assert record["updates"] == [2, 4]
    assert record["config"]["objective"] == "jackpot"
    assert "--objective=jackpot" in record["command"]
    assert record["columns"]["reward"][1] == pytest.approx((lines[3]["reward"] + lines[4]["reward"]) / 2, rel=1e-3)
    assert record["evals"]["policy"] == [
        [r["step"] + 1, r["eval/policy_pass@1"], r["eval/policy_se"]] for r in lines if "eval/policy_pass@1" in r
    ]
    assert record["seconds"]["update_s"] == pytest.approx(sum(r.get("update_s", 0) for r in lines), abs=0.06)
    first, second = got["TIS"]
    assert "obrs/accept_rate" not in first["columns"]
    assert first["columns"]["reward"] != second["columns"]["reward"]
    assert [r["path"] for r in (record, first, second)] == [
        sweep.RESULTS / "runs" / "study" / f"{name}.json" for name in ("jackpot-0", "tis-0", "tis-1")
    ]
    assert first["flags"] == {k: str(v) if k in ("model", "actor") else v for k, v in rows["TIS"].items()} | {"seed": 0}

    monkeypatch.setattr(sweep, "one", lambda *a: pytest.fail("ran again"))
    assert sweep.run(rows, {"TIS": 2}) == got
    more = {**rows, "more": dict(objective="none")}
    assert sweep.run(more, draw=True) == {"Jackpot": got["Jackpot"], "TIS": got["TIS"][:1]}
    the_page_and_the_figure(got, capsys)

    path = sweep.RESULTS / "runs" / "study" / "tis-0.json"
    changed = json.loads(path.read_text())
    changed["config"]["lr"] = 5e-4
    path.write_text(json.dumps(changed))
    sweep.records_in.cache_clear()
    with pytest.raises(ValueError, match="made with lr = 0.0005, configs/study.toml now says 0.001; delete the file"):
        sweep.run(rows)


def the_page_and_the_figure(got, capsys):
    """A new page of the study of tiny runs: means, errors and commands."""
    capsys.readouterr()
    sweep.page("small", sweep.table("The runs", got))
    table = capsys.readouterr().out
    last = [100 * r["evals"]["policy"][-1][1] for r in got["TIS"]]
    row = next(line for line in table.splitlines() if line.startswith("| TIS |"))
    assert row.startswith("| TIS | 2 |")
    assert f"{sum(last) / 2:.1f} +- {abs(last[0] - last[1]) / 2:.1f}" in row
    assert "# TIS\npython train.py --config=configs/study.toml --objective=tis" in table
    assert table.strip() in (sweep.RESULTS / "small.md").read_text()
    panels = [("reward", "reward"), ("pass@1", "eval/policy")]
    sweep.figure("small", got, [sweep.Group("", ["Jackpot", "TIS", "not run"], panels)], strong=("TIS",))
    assert (sweep.RESULTS / "small.png").stat().st_size > 5_000


def test_a_run_that_fails_says_which_and_why(rows):
    with pytest.raises(SystemExit, match="(?s)objectiv=jackpot.*--objectiv: no such flag; did you mean --objective?"):
        sweep.run({"bad": dict(objectiv="jackpot")})


def test_studies_on_another_configuration_keep_to_themselves(places):
    name, long = "tis-0", "configs/long.toml"
    assert sweep.path_of(name, long) == sweep.RESULTS / "runs" / "long" / "tis-0.json"
    assert sweep.path_of(name) == sweep.RESULTS / "runs" / "study" / "tis-0.json"
    assert sweep.folder_of(name, long) == sweep.FOLDERS / "long" / "tis-0"
    flags = dict(objective="tis", seed=0)
    argv = sweep.command(flags, name, long)
    assert "--config=configs/long.toml" in argv
    assert argv[-1].endswith("study/long/tis-0")
    assert "--config=configs/study.toml" in sweep.command(flags, name)
    fake(sweep.path_of(name), flags)
    assert sweep.record_of(flags)
    assert sweep.record_of(flags, long) is None


def test_a_record_is_found_by_its_flags(places, monkeypatch):
    flags = dict(objective="jackpot", obrs_c1=2, distill_lambda=0.0, clip=False, seed=0)
    fake(sweep.RESULTS / "runs" / "study" / "any-name.json", flags)
    monkeypatch.setattr(sweep, "one", lambda *a: pytest.fail("ran again"))
    other_order = dict(clip=False, distill_lambda=0.0, obrs_c1=2, objective="jackpot")
    got = sweep.run({"a": other_order, "the same": dict(other_order)})  # two labels share the run
    assert got["a"] == got["the same"]
    assert got["a"][0]["name"] == "any-name"
    assert sweep.record_of({**flags, "seed": 1}) is None
    assert sweep.record_of({**flags, "obrs_c1": 3}) is None
    assert sweep.record_of({k: v for k, v in flags.items() if k != "clip"}) is None


def test_a_new_record_is_named_after_its_label_and_never_after_two(places):
    assert sweep.slug("Jackpot, no clip, c2 = 3, 64") == "jackpot-no-clip-c2-3-64"
    assert sweep.slug("QaRL + TBPO, paper's band") == "qarl-tbpo-papers-band"
    fake(sweep.path_of("jackpot-0"), dict(objective="jackpot", seed=0))
    todo = [
        ("Jackpot", dict(objective="jackpot", obrs_c1=2, seed=0)),  # another row under the name that is taken
        ("Jackpot", dict(objective="jackpot", obrs_c1=2, seed=1)),
        ("Jackpot again", dict(objective="jackpot", seed=1)),  # another seed of the row that has it
        ("TIS", dict(objective="tis", seed=0)),
        ("tis!", dict(objective="tis", is_cap=3, seed=0)),
    ]
    assert sweep.names_for(todo, sweep.STUDY) == ["jackpot-2-0", "jackpot-2-1", "jackpot-1", "tis-0", "tis-2-0"]


def test_records_written_before_still_load(places):
    runs = sweep.RESULTS / "runs"
    flags = dict(objective="jackpot", obrs_target="new", clip=False, seed=0)
    fake(runs / "objective=jackpot,obrs_target=new,clip=False,seed=0.json", flags, old=True)
    long = dict(objective="tis", temperature=0.4, seed=2)
    fake(runs / "long" / "objective=tis,temperature=0.4,seed=2.json", long, "configs/long.toml", old=True)
    assert sweep.record_of(flags)["config"]["clip"] is False
    assert sweep.record_of(long, "configs/long.toml")["config"]["temperature"] == 0.4

    fake(sweep.path_of("a-0"), flags)
    with pytest.raises(ValueError, match="a-0.json.* record the same run; delete one of them"):
        sweep.record_of(flags)
    sweep.path_of("a-0").write_text('{"command": "python train.py"}')
    sweep.records_in.cache_clear()
    with pytest.raises(ValueError, match="a-0.json: not the record of a run; move it out of results/runs"):
        sweep.record_of(flags)


def test_how_z_is_made_is_no_matter_to_a_run_without_z(places):
    flags = dict(objective="tis", seed=0)
    path = sweep.path_of("tis-0")
    for columns, loads in (({}, True), ({"obrs/z": [0.9]}, False)):
        record = fake(path, flags, columns=columns)
        record["config"]["obrs_z"] = "approx"
        path.write_text(json.dumps(record))
        if loads:
            assert sweep.record_of(flags)
        else:
            with pytest.raises(ValueError, match="made with obrs_z = 'approx'"):
                sweep.record_of(flags)


def test_every_record_belongs_to_a_row():
    studies = [
        (rows, getattr(module, "SEEDS", {}), getattr(module, "CONFIG", sweep.STUDY))
        for module in (table1, table2_3, table6_10, figure2c, aligned, qarl, lowbit, praxis)
        for rows in (module.ROWS, getattr(module, "LADDER", {}))
    ]
    studies += [(heterorl.TABLE | heterorl.MORE, heterorl.SEEDS, heterorl.CONFIG)]
    wanted = set()
    for flags in text_settings.ROWS.values():
        runs = sweep.with_seeds(flags, 3, text_settings.FIRST_SEED)
        wanted |= {sweep.key_of(run, sweep.STUDY) for run in runs if sweep.record_of(run)}
    for rows, seeds, config in studies:
        for label, flags in rows.items():
            wanted |= {sweep.key_of(run, config) for run in sweep.with_seeds(flags, seeds.get(label, 1))}
    records = sweep.records_in(ROOT / "results" / "runs")
    assert set(records) == wanted
    for (stem, _), record in records.items():
        assert record["path"].parent.name == stem
        assert re.fullmatch(r"[a-z0-9.-]+-[0-9]+", record["name"])


ADJUSTED = {"correction": "tis_adjusted", "ratio_base": "new", "clip": True}  # p_new / sg(p_new): the clip never acts
# A row of text_settings, the recipe whose figures in print it has, and what the recipe says otherwise
TEXT = [
    ("both, c1 = 3", "jackpot_clip", {"obrs_c1": 3, "obrs_mode": "both"}),
    ("mask only", "jackpot_clip", {"obrs_mode": "mask"}),
    ("weights only", "jackpot_clip", {"obrs_mode": "reweight"}),
    *((f"c1 = {c}", "jackpot_clip", {"obrs_c1": c, "obrs_mode": "both"}) for c in (2, 4, 8)),
    ("no correction", "jackpot_clip", {"correction": "none"}),
    ("lambda = 1, distilled by 1", "jackpot", {"distill_lambda": 1}),
    *((f"lambda = {x}", "jackpot", {"obrs_lambda": x, "distill_lambda": 1}) for x in (0.8, 0.9, 1.1, 1.2)),
    ("reverse KL", "jackpot", {"distill_direction": "reverse", "distill_lambda": 1}),
    *((f"distilled by {x}", "jackpot", {"distill_lambda": x}) for x in (0.01, 0.1, 10)),
    ("TIS-adjusted, 128", "jackpot_stale", {**ADJUSTED, "batches": (4096, 32)}),
    ("Jackpot, no clip, c2 = 3, 128", "jackpot_stale", {"obrs_c2": 3, "batches": (4096, 32)}),
    ("Jackpot, target ref, no clip, 64", "jackpot_stale", {"obrs_target": "ref"}),
    ("off-policy, no clip, 128", "jackpot_stale", {"correction": "none", "batches": (4096, 32)}),
    ("TIS-adjusted, 64", "jackpot_stale", ADJUSTED),
    ("TIS, 64", "jackpot_stale", {"correction": "tis", "clip": True}),
    ("off-policy, 64", "jackpot_stale", {"correction": "none", "clip": True}),
    ("Jackpot, no clip, c2 = 3, 64", "jackpot_stale", {"obrs_c2": 3}),
    *(
        (f"fp8: {label}", "jackpot_fp8", {"batches": (64, 64), "rollout_quant": "fp8", **flags})
        for label, flags in {
            "no correction": {"correction": "none"},
            "mask only": {"obrs_mode": "mask"},
            "both": {"obrs_mode": "both"},
            "weights only": {"obrs_mode": "reweight"},
        }.items()
    ),
]


def test_the_rows_of_the_text_have_its_settings():
    assert {label for label, *_ in TEXT} == set(text_settings.ROWS)
    for label, recipe, changed in TEXT:
        cfg = asdict(parse(sweep.command({**text_settings.ROWS[label], "seed": 20}, "x")[1:]))
        said = {**PAPERS[recipe], **changed}
        rollout, train = said.pop("batches")
        assert cfg["rollout_batch"] / cfg["train_batch"] == rollout / train, label  # updates to a weight sync
        assert cfg["steps"] * cfg["train_batch"] == (40_960 if rollout > train else 38_400), label
        ours = {"obrs_z", "max_tokens"}  # the bracket where Z is not exact; 32 tokens
        if said.get("correction") != "obrs":
            ours |= {key for key in said if key.startswith("obrs_")}
        wrong = {key: cfg[key] for key, value in said.items() if key not in ours and cfg[key] != value}
        assert wrong == {}, label
        assert (cfg["actor"] == "base:actor") == (recipe == "jackpot"), label


def test_a_row_stands_under_one_label_and_every_figure_can_be_drawn():
    rows = text_settings.ROWS
    assert len({sweep.key_of(flags, sweep.STUDY) for flags in rows.values()}) == len(rows)
    for labels, _ in text_settings.SETTINGS.values():
        assert len(labels) <= sweep.LINES


def test_a_page_is_written_again_as_it_is(places, capsys):
    shutil.copytree(ROOT / "results" / "runs" / "study", sweep.RESULTS / "runs" / "study")
    committed = (ROOT / "results" / "aligned.md").read_text()
    reading = committed.split(sweep.MARKER)[0]
    assert reading.startswith("# ")
    assert "| claim | verdict |" in reading
    page = sweep.RESULTS / "aligned.md"
    page.write_text(f"{reading}{sweep.MARKER}what stood here before\n")
    aligned.study(sweep.StudyFlags(draw=True))
    assert page.read_text() == committed
    assert 5_000 < (sweep.RESULTS / "aligned.png").stat().st_size < 300_000


# figure2ab and theorem1 compute all anew; the others write no such page
HAVE_SCRIPTS = {name for name in index.STUDIES if (ROOT / "results" / f"{name}.py").is_file()}
FROM_RECORDS = sorted(HAVE_SCRIPTS - {"figure2ab", "theorem1", "aligned", "moe", "ladder"})
FLAGS = {"text_settings": text_settings.TextFlags}


@pytest.mark.parametrize("name", FROM_RECORDS)
def test_a_page_says_what_its_records_say(name, monkeypatch, capsys):
    written = {}
    monkeypatch.setattr(sweep, "rewrite", written.__setitem__)
    monkeypatch.setattr(sweep, "save", lambda *_, **__: None)
    importlib.import_module(f"results.{name}").study(FLAGS.get(name, sweep.StudyFlags)(draw=True))
    sweep.pyplot().close("all")
    committed = (ROOT / "results" / f"{name}.md").read_text().split(sweep.MARKER)[1]
    assert written[name] == committed.removeprefix("\n"), f"run python results/{name}.py --draw"


def test_the_ladders_page_says_what_its_record_says(monkeypatch):
    ladder, written = importlib.import_module("results.ladder"), {}
    monkeypatch.setattr(ladder.sweep, "rewrite", written.__setitem__)
    monkeypatch.setattr(ladder, "measure", lambda flags: pytest.fail(f"{flags}: not in results/ladder.json"))
    monkeypatch.setattr(ladder.figures, "draw_ladder", lambda *_: None)
    ladder.main()
    committed = (ROOT / "results" / "ladder.md").read_text().split(sweep.MARKER)[1]
    assert written["ladder"] == committed.removeprefix("\n"), "run python results/ladder.py"


def test_the_index_holds_the_claims_of_the_pages(places):
    for path in (ROOT / "results").glob("*.md"):
        shutil.copy(path, sweep.RESULTS)
    index.study(index.IndexFlags())
    committed = (ROOT / "results" / "README.md").read_text()
    assert (sweep.RESULTS / "README.md").read_text() == committed, "run python results/index.py"
    assert {path.stem for path in sweep.RESULTS.glob("*.md")} == {
        *index.STUDIES,
        "README",
        "conformance",
        "exact",
        "gpu",
        "plans",
    }
    (sweep.RESULTS / "qarl.md").write_text("# no claims\n")
    with pytest.raises(ValueError, match="results/qarl.md: no table of claims"):
        index.study(index.IndexFlags())


def test_the_index_counts_the_verdicts_of_a_page(places, monkeypatch):
    monkeypatch.setattr(index, "STUDIES", ("one",))
    verdicts = ("shown", "in part", "not shown, one seed", "reproduced", "not reproduced: opposite", "not shown")
    verdicts += ("cannot be tested here", "out of reach", "shown, three seeds", "out of reach", "shown")
    claims = "".join(f"| {i} | {verdict} | shown in part |\n" for i, verdict in enumerate(verdicts))
    (sweep.RESULTS / "one.md").write_text(f"| claim | verdict | why |\n|---|---|---|\n{claims}\n| not | shown | a |\n")
    readme = sweep.RESULTS / "README.md"
    readme.write_text(f"| `one` | what, 1, 2 | 9, 9, 9, 9 | [one](one.md) |\n{sweep.MARKER}")
    index.study(index.IndexFlags())
    assert readme.read_text().startswith("| `one` | what, 1, 2 | 4, 1, 3, 3 | [one](one.md) |\n")
    (sweep.RESULTS / "one.md").write_text("| claim | verdict | why |\n|---|---|---|\n| a | perhaps | b |\n")
    with pytest.raises(
        ValueError, match="results/one.md: a verdict is 'perhaps'; begin it with one of reproduced; shown"
    ):
        index.study(index.IndexFlags())


def test_a_panel_has_at_most_seven_lines(places):
    record = dict(updates=[1, 2], columns={"reward": [0.1, 0.2]}, evals={})
    got = {str(i): [record] for i in range(8)}
    panels = [("reward", "reward")]
    sweep.figure("seven", got, [sweep.Group("seven", list(got)[:7], panels)], strong=("3",))
    with pytest.raises(ValueError, match="eight: 8 lines in a panel"):
        sweep.figure("eight", got, [sweep.Group("eight", list(got), panels)])
    styles = sweep.styles_of(list(got)[:7], ("3",))
    assert len({style["color"] for style in styles.values()}) == 7
    assert max(styles, key=lambda label: styles[label]["lw"]) == "3"


def test_flags_of_a_study(monkeypatch):
    seen = []
    for argv, flags in ((["--draw"], (True, 2)), (["--jobs=3"], (False, 3)), ([], (False, 2))):
        monkeypatch.setattr(sys, "argv", ["table1.py", *argv])
        sweep.main(seen.append, "A study.")
        assert (seen[-1].draw, seen[-1].jobs) == flags
    monkeypatch.setattr(sys, "argv", ["table1.py", "--drow"])
    with pytest.raises(SystemExit, match="error: --drow: no such flag; did you mean --draw?"):
        sweep.main(seen.append, "A study.")
    with pytest.raises(ValueError, match="--jobs=0: at least one run at a time"):
        sweep.run({}, jobs=0)
