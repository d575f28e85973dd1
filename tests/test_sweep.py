"""The pages of results/: tables from their JSON files, rows that resolve, and a row that runs and is summarised."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_TASK
from tools import conform

from machinery.flags import UserError
from machinery.log import read_metrics
from machinery.settings import parse
from results import atlas, exact, ladder, long, pair_z, plans, sweep
from results.sweep import STUDIES

TABLES = dict.fromkeys(STUDIES, sweep.table)
TABLES |= {x.__name__.removeprefix("results."): x.table for x in (atlas, exact, ladder, plans)}
TABLES["conformance"] = conform.table
PAGES = {*TABLES, "gpu", "README"}


@pytest.mark.parametrize("name", TABLES)
def test_a_page_has_the_table_of_its_json(name):
    page = (ROOT / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert page.split(sweep.MARKER)[1] == "\n" + TABLES[name](sweep.load(name)), f"write results/{name}.md again"
    if name not in ("conformance", "exact", "plans"):  # no plot
        assert f"]({name}.png)" in page
        assert (ROOT / "results" / f"{name}.png").stat().st_size < 300_000


def test_pages_are_listed_and_files_are_small():
    assert {path.stem for path in (ROOT / "results").glob("*.md")} == PAGES
    assert all(path.stat().st_size <= 300_000 for path in (ROOT / "results").glob("*.json"))


@pytest.mark.parametrize("name", STUDIES)
def test_every_row_resolves_and_has_its_numbers(name, folders):
    study = sweep.load(name)
    for table in study["rows"].values():
        for label, row in table.items():
            roles = {"smollm": ["model"], "pair_cpu": ["model", "actor"]}.get(row["config"], [])
            fetched = [f"--{role}={folders / 'policy'}" for role in roles]  # a stand-in for fetched models
            parse(sweep.command(row, row["seeds"][0], ROOT / "out")[1:] + fetched)
            assert len(row["pass"]) == len(row["best"]) == len(row["seeds"]), label
    for group, key in study["panels"]:
        curves = [row["curves"][key] for row in study["rows"][group].values() if key in row["curves"]]
        assert curves and len(study["rows"][group]) <= len(sweep.COLOURS)
        assert all(2 <= len(curve["mean"]) <= sweep.POINTS for curve in curves)


@pytest.mark.parametrize("name", ["demo_gpu", "real_pair"])
def test_a_configuration_of_real_models_resolves(name, folders):
    """The folders are stand-ins for the real models."""
    actor = [f"--actor={folders / 'actor'}"] if name == "real_pair" else []
    cfg = parse([f"--config=configs/{name}.toml", f"--model={folders / 'policy'}", *actor])
    assert (cfg.steps, cfg.rollout_dtype) == (40, "bfloat16")


def test_a_run_without_its_last_evaluation_is_not_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "command", lambda *args: ["train.py"])
    monkeypatch.setattr(sweep, "config_of", lambda folder: {"steps": 2})
    monkeypatch.setattr(sweep.settings, "parse", lambda *args, **more: SimpleNamespace(steps=2, eval_every=1))
    for row, finished in (({"step": 1, "eval/policy_pass@1": 0.5}, True), ({"step": 1}, False), ({"step": 0}, False)):
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        assert (sweep.left({}, 0, tmp_path) == []) == finished


def test_summaries_by_hand():
    runs = [
        [{"step": step - 1, **({"reward": float(step - 1)} if step > 1 else {})} for step in range(61)]
        for _ in range(2)
    ]
    for rows, start in zip(runs, (0.3, 0.4), strict=True):
        for step, value, se in ((0, 0.25, 0.01), (30, start + 0.5, 0.03), (60, start, 0.02)):
            rows[step] |= {"eval/policy_pass@1": value, "eval/policy_se": se}
    columns = {"pass": "pass", "best": "best", "reward": "reward"}
    study = {"columns": columns, "panels": [["g", "reward"]], "share": 0.1}
    kept = sweep.summary(study, "g", runs)
    assert (kept["start"], kept["pass"], kept["best"]) == ([25.0, 25.0], [30.0, 40.0], [80.0, 90.0])
    assert kept["columns"]["reward"] == [56.5, 56.5]  # updates 55 to 60
    curve = kept["curves"]["reward"]
    assert curve["updates"][:2] == [4, 7] and curve["mean"][:2] == [2.0, 5.0] and len(curve["mean"]) == 20
    assert kept["curves"]["eval/policy"]["low"] == [25.0, 80.0, 30.0]
    assert kept["curves"]["eval/policy"]["high"] == [25.0, 90.0, 40.0] and sweep.cell(kept, "reward") == "56"
    assert [sweep.cell(row, "pass") for row in (kept, {**kept, "withdrawn": "why"})] == ["35.0±5.0", ""]
    one = sweep.summary(study, "g", runs[:1])
    assert sweep.cell(one, "pass") == "30.0±2.0" and sweep.cell(one, "best") == "80.0±3.0"
    assert (sweep.mean_se([1.0], math.nan), sweep.mean_se([], 1.0)) == ("1.0", "")
    assert [sweep.number(x) for x in (-6e-11, 0.0126, 121.4, 0.99)] == ["0", "0.013", "121", "0.99"]


@pytest.fixture()
def tiny(solvers):
    """A row of jackpot's study on tiny models, for four updates."""
    small = dict(model=solvers / "policy", actor=solvers / "actor", steps=4, rollout_batch=16, train_batch=16)
    small |= dict(group_size=4, max_tokens=10, eval_problems=16, eval_every=2, save_every=2, obrs_topk=5, **TINY_TASK)
    small |= dict(lr=1e-3, actor_lr=3e-4, dtype="float32", task="arith")
    study = sweep.load("jackpot")
    row = {"config": "study", "flags": {"objective": "jackpot", **small}, "seeds": [0, 1]}
    return {**study, "rows": {"g": {"Jackpot": row}}, "panels": [["g", "reward"]]}


@pytest.mark.slow
def test_a_row_of_a_study_runs_resumes_and_is_summarised(tiny, tmp_path, monkeypatch):
    sweep.run(tiny, tmp_path / "runs")
    row = tiny["rows"]["g"]["Jackpot"]
    metrics = read_metrics(sweep.folder_of(tmp_path / "runs", "g", "Jackpot", 0))
    assert [r["step"] for r in metrics] == [-1, 0, 1, 2, 3]
    assert row["pass"][0] == round(100 * metrics[-1]["eval/policy_pass@1"], 4)
    assert row["curves"]["reward"]["updates"] == [1, 2, 3, 4] and len(row["pass"]) == 2
    assert row["columns"]["rollout_corr/k3_kl"][0] > 0
    monkeypatch.setattr(sweep, "call", lambda *a: pytest.fail("ran again"))
    again = {**tiny, "rows": {"g": {"Jackpot": {key: row[key] for key in ("config", "flags", "seeds")}}}}
    sweep.run(again, tmp_path / "runs", only="g: Jack")
    assert again == tiny
    changed = {**row, "flags": {**row["flags"], "lr": 2e-3}}
    with pytest.raises(UserError, match="--lr was 0.001 and is now 0.002"):
        sweep.run({**tiny, "rows": {"g": {"Jackpot": changed}}}, tmp_path / "runs")

    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    sweep.rewrite(tmp_path / "tiny.md", sweep.table(tiny))
    sweep.draw("tiny", tiny)
    assert f"| Jackpot | 2 | {sweep.cell(row, 'pass')} |" in (tmp_path / "tiny.md").read_text(encoding="utf-8")
    assert (tmp_path / "tiny.png").stat().st_size > 1000


def test_a_failed_command_is_named_with_its_error():
    with pytest.raises(SystemExit, match="(?s)error: -c .* ended with 1:.*no such flag"):
        sweep.call(["-c", "import sys; sys.exit('no such flag')"], "1")


def test_z_of_the_pair_by_enumeration(monkeypatch):
    """Z, Z_low and Z_approx as sums in plain floats; Z_high bounds Z. K = 2 of 7 tokens."""
    monkeypatch.setattr(pair_z, "KS", (2,))
    generator = torch.Generator().manual_seed(3)
    logp, logq = (torch.randn(5, 7, generator=generator).mul(2).log_softmax(-1) for _ in range(2))
    z = pair_z.z_of(logp, logq)
    for n, (p, q) in enumerate(zip(logp.exp().tolist(), logq.exp().tolist(), strict=True)):
        of_p, of_q = (set(sorted(range(7), key=lambda x, law=law: -law[x])[:2]) for law in (p, q))
        sums = [sum(min(p[x], q[x]) for x in chosen) for chosen in (range(7), of_p, of_p | of_q)]
        assert [z[key][n].item() for key in ("Z", "2 low", "2 approx")] == pytest.approx(sums, rel=1e-5)
        assert z["2 high"][n] >= sums[0] - 1e-6
    assert (z["2 low"] < z["2 approx"]).any()


def test_the_gaps_of_long_responses_by_hand():
    """Two prompts, two pieces of two tokens: largest gaps as means and standard errors, mean gaps."""
    responses = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.0, 0.2, 0.1]])
    short = np.array([[[0.1, 0.1], [0.6, 0.0]], [[0.3, 0.2], [0.1, 0.4]]])
    row = long.summary(responses, short)
    assert row["one short response"] == pytest.approx([0.2, 0.1]) and row["all short responses"] == [0.5, 0.1]
    assert row["long response"] == pytest.approx([0.45, 0.05])
    assert row["its pieces"] == [pytest.approx([0.35, 0.15]), pytest.approx([0.3, 0.1])]
    assert row["mean gap, short"] == pytest.approx(0.225) and row["mean gap, pieces"] == pytest.approx([0.2, 0.25])


def test_a_cell_with_an_error_over_seeds():
    row = {"columns": {"reward": [0.5, None, 0.7]}}
    assert sweep.cell(row, "reward") == "0.6" and sweep.cell(row, "reward±") == "60.0±10.0"
