"""results/map.py, length.py: which row is best where, on made-up records; records beside pages; a small measurement."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_TASK

import measure
import warmstart
import worth
from results import length, sweep
from results import map as the_map
from results.map import ACTORS, FORMATS, LAWS, STALE, Point, Sampler


def row(worth_: float, *left_out: float, error: float = 0.1) -> dict:
    """A row's record: one kind of data, left out part by part."""
    return {"worth": worth_, "worth_se": error, "left_out": [list(left_out)]}


def point(panel: str, kl: float, rows: dict, name: str = "x", line: str = "line", **about) -> Point:
    rows = {key: x if isinstance(x, dict) else row(x, x, x) for key, x in rows.items()}
    about = {"kl": kl, "kl_plain": 10 * kl, "ess": 0.5, "unlikely": 0.1, "sampler/reward": 0.3} | about
    return Point(name, Sampler(panel, name, (), line=line), about, rows)


# ---------------------------------------------------------------------------------------------------------------------
# The selection, on made-up records
# ---------------------------------------------------------------------------------------------------------------------


def test_what_two_rows_share_is_no_error_of_their_difference():
    """`near` moves with the best row, so that 0.1 less is sure; `far` moves against it, and 0.1 less is not."""
    p = point(STALE, 0.1, {"best": row(0.8, 0.6, 1.0), "near": row(0.7, 0.5, 0.9), "far": row(0.7, 0.9, 0.5)})
    assert the_map.best(p) == "best"
    assert the_map.difference(p, "best", "near") == pytest.approx((0.1, 0.0))
    less, error = the_map.difference(p, "best", "far")
    # of -0.3 and 0.5, by hand: (n - 1) / n sum of (x - mean)^2
    assert (less, error) == pytest.approx((0.1, math.sqrt(0.5 * (0.4**2 + 0.4**2))))
    assert the_map.as_good(p) == ["best", "far"]


def test_a_row_that_is_worth_nothing_is_not_as_good():
    p = point(STALE, 0.1, {"best": row(0.8, 0.7, 0.9), "nothing": row(0.0, 0.0, 0.0)})
    assert the_map.as_good(p) == ["best"]


def test_where_a_row_stops():
    line = [point(ACTORS, kl, {"a": w}) for kl, w in ((0.01, 0.9), (0.02, 0.4), (0.05, 0.6), (0.2, 0.3), (0.4, 0.1))]
    assert the_map.half(line, "a") == "0.05 to 0.2"  # it recovers at 0.05: only then for good
    assert the_map.half(line[:3], "a") == "beyond 0.05"
    assert the_map.half(line[3:], "a") == "below 0.2"


def test_what_a_sampler_costs():
    found = [
        point(ACTORS, 0.05, {"a": 1.0}, "actor", price=0.7),
        point(ACTORS, 0.01, {"a": 1.0}, "distilled-5"),
        point(FORMATS, 0.01, {"a": 1.0}, "int8", price=1.1),
        point(FORMATS, 0.5, {"a": 1.0}, "w2a16"),
        point(STALE, 0.1, {"a": 1.0}, "stale-4"),
    ]
    price = the_map.prices(found)
    assert price == {"actor": 0.7, "distilled-5": 0.7, "int8": 1.1, "w2a16": 1.0, "stale-4": 1.0}
    assert math.isnan(the_map.prices(found[1:2])["distilled-5"])  # base:actor is not timed yet


def test_the_best_of_several_samplers_together():
    """Each sampler's difference is within two errors; that of many together is not."""
    one = {"best": row(0.8, 0.75, 0.85), "other": row(0.7, 0.75, 0.65)}
    own = [point(STALE, kl, one) for kl in (0.02, 0.03, 0.04)]
    less, error = the_map.difference(own[0], "best", "other")
    assert less < 2 * error and the_map.as_good(own[0]) == ["best", "other"]
    assert the_map.mean_difference(own, "best", "other") == pytest.approx((0.1, error / math.sqrt(3)))
    assert the_map.as_good_on_average(own) == ["best", "other"]
    many = own * 3
    assert the_map.as_good_on_average(many) == ["best"]
    far = point(STALE, 0.3, one)
    assert [(region, len(some)) for _, region, some in the_map.regions([*own, far])] == [
        ("below 0.1", 3),
        ("above 0.1", 1),
    ]


def test_a_truncated_samplers_distance_is_the_plain_mean():
    assert point(LAWS, 0.01, {"a": 1.0}, line="top_p").kl == pytest.approx(0.1)
    assert point(LAWS, 0.01, {"a": 1.0}, line="colder").kl == 0.01


def made_up_map() -> list[Point]:
    """All rows on three samplers of every line; `none` falls fastest, `retrace_seq` is best beyond a KL of 0.1."""
    found = []
    for panel, line in (
        (ACTORS, "actor"),
        (STALE, "stale"),
        (FORMATS, "format"),
        (LAWS, "top_p"),
        (LAWS, "temperature"),
    ):
        for kl in (0.01, 0.05, 0.2):
            worths = dict.fromkeys(the_map.ROWS, 0.5 - kl) | {
                "none": max(0.6 - 3 * kl, 0.0),
                "retrace_seq": 0.5 + kl / 10,
            }
            rows = {name: row(w, w - 0.01, w + 0.01) for name, w in worths.items()}
            kl = kl / 10 if line == "top_p" else kl  # whose distance is the plain mean
            found.append(point(panel, kl, rows, f"{line} {kl}", line, price=0.8))
    return found


def test_the_tables_of_a_made_up_map():
    found = made_up_map()
    lines = the_map.best_where(found).splitlines()
    near, far = (next(x for x in lines if f"| stale {kl} |" in x).split(" | ") for kl in (0.01, 0.2))
    assert near[3] == "none" and near[4].startswith("0.57") and near[5] == "-"
    assert far[3] == "retrace_seq" and far[-1] == "no |" and far[-2] == "0.65"
    often = the_map.how_often(found).splitlines()
    assert "| retrace_seq | 2 | 2 | 2 | 2 | 2 | 10 | 10 | 0.50 +- 0.10 (actor 0.01) |" in often
    assert "| none | 1 | 1 | 1 | 1 | 1 | 5 | 5 | 0.45 +- 0.10 (actor 0.05) |" in often
    stops = the_map.where_it_stops(found)
    assert "| none | 0.01 to 0.05 |" in stops and "| retrace_seq | beyond 0.2 |" in stops
    assert "| seq_is | below 0.01 |" in stops
    alone = the_map.distance_alone(found).splitlines()
    assert next(x for x in alone if x.startswith("| all | 15 | KL a token |")).split(" | ")[3] == "-1.00"
    cell = next(x for x in alone if x.startswith("| 0.03 to 0.1 |")).split(" | ")
    assert cell[1] == "0.45 +- 0.10"  # `none` comes first: 0.6 - 0.15


def test_a_second_pairs_actors_are_another_policys():
    """With them in one heap the ranks of `none` would be those of five kinds and two pairs."""
    found = made_up_map()
    second = [point(ACTORS, kl, {row: 1.0 + kl for row in the_map.ROWS}, line="second pair") for kl in (0.02, 0.08)]
    lines = the_map.distance_alone([*found, *second]).splitlines()
    cells = {tuple(x.split(" | ")[:3]): x.split(" | ")[3] for x in lines if x.startswith(("| all", "| embedded"))}
    assert cells["| all", "17", "KL a token"] not in ("-1.00", "1.00")
    assert cells["| embedded", "12", "KL a token"] == "-1.00"  # and not the stale ones either
    assert cells["| embedded, second pair", "2", "KL a token"] == "1.00"


def test_the_figure_of_a_made_up_map(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    the_map.draw(made_up_map())
    assert (tmp_path / "map.png").stat().st_size > 20_000


# ---------------------------------------------------------------------------------------------------------------------
# The records and the page
# ---------------------------------------------------------------------------------------------------------------------

RECORDS = sorted(the_map.FOLDER.glob("*.json"))


def test_every_record_is_a_sampler_and_every_sampler_is_recorded():
    assert {path.stem for path in RECORDS} == set(the_map.samplers())
    for path in RECORDS:
        text = path.read_text()
        assert not any(place in text for place in ('"/', "=/", "/tmp", "/work", "/home", "/root"))
        record = json.loads(text)
        assert set(record["rows"]) == set(the_map.ROWS)
        assert list(the_map.samplers()[path.stem].flags) == record["flags"][1 : -len(the_map.HOW)]


def test_the_page_is_what_the_records_say(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    committed = (ROOT / "results" / "map.md").read_text()
    (tmp_path / "map.md").write_text(committed.split(sweep.MARKER)[0] + sweep.MARKER + "what stood here before\n")
    the_map.study(sweep.StudyFlags(draw=True))
    assert (tmp_path / "map.md").read_text() == committed, "run python results/map.py --draw"
    assert 5_000 < (tmp_path / "map.png").stat().st_size < 300_000


def cells_of(page: str, title: str) -> list[dict[str, str]]:
    """The first table below a title, a dictionary a line."""
    below = page.split(f"{title}\n", 1)[1].splitlines()
    table = [line for line in below[next(i for i, x in enumerate(below) if x.startswith("|")) :]]
    table = table[: next((i for i, line in enumerate(table) if not line.startswith("|")), len(table))]
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    return [dict(zip(head, line, strict=True)) for line in body]


def test_lines_of_the_page_by_hand():
    """From the files alone: the best row, its worth, who is as good, the price."""
    page = (ROOT / "results" / "map.md").read_text()
    table = {(x[""], x["sampler"]): x for x in cells_of(page, "## Which is best where")}
    for name, sampler in the_map.samplers().items():
        record = json.loads((the_map.FOLDER / f"{name}.json").read_text())
        rows = record["rows"]
        top = max(rows.values(), key=lambda x: x["worth"])
        line = table[sampler.panel, sampler.label]
        assert line["worth"] == f"{top['worth']:.2f} +- {top['worth_se']:.2f}"
        assert rows[line["best"]] == top
        others = 0
        for x in rows.values():
            variance = 0.0
            for a, b in zip(top["left_out"], x["left_out"], strict=True):
                d = np.array(a) - np.array(b)
                variance += (len(d) - 1) * d.var()
            others += x is not top and top["worth"] - x["worth"] <= 2 * math.sqrt(variance)
        said = line["as good"]
        assert others == (0 if said == "-" else int(said) if said.isdigit() else len(said.split(",")))


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def test_distances_by_a_plain_loop():
    log_r = [np.ma.array([[0.1, -0.2, 9.0], [-0.5, -0.4, 0.3]], mask=[[0, 0, 1], [0, 0, 0]])]
    found = the_map.distances(log_r)
    tokens, R = [0.1, -0.2, -0.5, -0.4, 0.3], [math.exp(-0.1), math.exp(-0.6)]
    assert found["kl_plain"] == pytest.approx(-sum(tokens) / 5)
    assert found["kl"] == pytest.approx(sum(math.exp(x) - 1 - x for x in tokens) / 5)
    assert found["ess"] == pytest.approx(sum(R) ** 2 / (2 * sum(x * x for x in R)))
    assert found["unlikely"] == 0.0
    assert the_map.distances([log_r[0] * 2])["unlikely"] == 0.5


def test_a_policy_at_a_temperature(tmp_path, solvers, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(warmstart, "base_model", lambda name, cfg: str(solvers / "policy"))
    the_map.at_temperature(0.5, tmp_path / "cold")
    plain, cold = (AutoModelForCausalLM.from_pretrained(x) for x in (solvers / "policy", tmp_path / "cold"))
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.allclose(cold(ids).logits, plain(ids).logits / 0.5, atol=1e-5)


def test_a_small_map(tmp_path, solvers, monkeypatch):
    """Two samplers of one policy: g is measured once, and a record's numbers are those of worth.py."""
    small = (
        "--train_batch=32",
        "--rollout_batch=32",
        "--group_size=4",
        "--max_tokens=8",
        "--task=arith",
        "--dtype=float32",
    )
    small += tuple(f"--{key}={value}" for key, value in TINY_TASK.items())
    model = (f"--model={solvers / 'policy'}", *small)
    samplers = {
        "actor": Sampler(ACTORS, "a", (*model, f"--actor={solvers / 'actor'}"), True, "actor"),
        "stale-1": Sampler(STALE, "1", (*model, "--actor=none", f"--stale={solvers / 'actor'}"), line="stale"),
    }
    monkeypatch.setattr(the_map, "samplers", lambda: samplers)
    monkeypatch.setattr(the_map, "FOLDER", tmp_path / "map")
    monkeypatch.setattr(the_map, "HOW", ("--batches=3", "--reference=12", "--directions=4", "--noise_batches=2"))
    asked, references = [], worth.Measurement.references
    monkeypatch.setattr(worth.Measurement, "references", lambda m: asked.append(1) or references(m))
    known = {}
    for name in samplers:
        the_map.measure(name, known)
    assert len(asked) == 1
    near, far = the_map.points()
    assert (near.name, far.name) == ("actor", "stale-1") and "price" in near.about and "price" not in far.about
    assert near.kl == far.kl > 0.1  # the same weights sample, once as an actor and once as an older policy
    for p in (near, far):
        assert set(p.rows) == set(the_map.ROWS)
        for x in p.rows.values():
            assert list(map(len, x["left_out"])) == [3, 4, 4, 4]
            assert measure.jackknife(x["left_out"]) == pytest.approx(x["worth_se"], rel=0.02, abs=1e-3)
        assert "on_policy/reward" in p.about
    assert near.rows["retrace_seq"]["worth"] == pytest.approx(far.rows["retrace_seq"]["worth"], rel=1e-3)
    shutil.rmtree(tmp_path / "map")
    assert the_map.points() == []


# ---------------------------------------------------------------------------------------------------------------------
# length.py: the rows, and weights that no objective has, by KL and length of response
# ---------------------------------------------------------------------------------------------------------------------


def test_a_weight_of_candidates_is_weighed_as_the_objective_of_that_name():
    """tis caps a token's ratio at 2, seq_tis is_cap=1 the response's at 1; the batch's coefficients are theirs."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(7) < torch.tensor([7, 4, 1, 6])[:, None]
    log_r = (torch.randn(4, 7, generator=generator) * 0.8).masked_fill(~mask, 9.0)
    adv = torch.randn(4, 1, generator=generator).expand(4, 7)
    batch = SimpleNamespace(log_r=log_r, mask=mask, adv=adv)
    plain = adv * mask / 18
    r, R = log_r.exp(), (log_r * mask).sum(1, keepdim=True).exp()
    assert torch.allclose(the_map.weighted(batch, "min(r, 2) (TIS)"), (plain * r.clamp(max=2)).masked_fill(~mask, 0))
    assert torch.allclose(the_map.weighted(batch, "min(R, 1)"), plain * R.clamp(max=1))
    first = (log_r * mask)[:, :4].cumsum(1)
    rest = (log_r * mask)[:, 4:].cumsum(1)
    segments = torch.cat([first, rest], 1).exp().clamp(max=1)
    assert torch.allclose(the_map.weighted(batch, "segments of 4, min(., 1)"), plain * segments)


def made_up_lengths(folder) -> None:
    """Records of two lengths: three samplers, then one."""
    folder.mkdir()
    short, other = ("1-w3a16", 0.01, 8), ("5-actor-0.3", 0.125, 32)
    for name, kl, tokens in (("1-actor-0.05", 0.25, 8), short, ("1-w2a16", 0.5, 8), other):
        rows = {r: row(x := i / 8 + 0.5 - kl, 2 * x, 3 * x, error=kl) for i, r in enumerate(length.ROWS)}
        about = {"kl": kl, "ess": 1 - kl, "sampler/length": tokens, "sampler/reward": 0.5, "unlikely": 0.1}
        (folder / f"{name}.json").write_text(json.dumps({"about": about, "rows": rows}))


def test_worth_by_length_of_made_up_records(tmp_path, monkeypatch):
    """Each cell is its own record's; samplers stand near to far within a length."""
    monkeypatch.setattr(length, "FOLDER", tmp_path / "length")
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    made_up_lengths(tmp_path / "length")
    found = length.points()
    assert [p.name for p in found] == ["1-w3a16", "1-actor-0.05", "1-w2a16", "5-actor-0.3"]
    assert [length.of_response(p) for p in found] == [0.08, 2.0, 4.0, 4.0]
    top = len(length.ROWS) - 1
    best = cells_of(length.best_where(found), "Which is best where")
    assert [line[""] for line in best] == ["8 tokens"] * 3 + ["32 tokens"]
    assert best[1]["sampler"] == "actor-0.05" and best[1]["KL a response"] == "2" and best[1]["ESS of R"] == "0.75"
    assert best[1]["best"] == list(length.ROWS)[-1] and best[1]["worth"] == f"{top / 8 + 0.25:.2f} +- 0.25"
    assert best[3]["none"] == "0.38 +- 0.12"
    stops = {line["row"]: line for line in cells_of(length.where_it_stops(found), "worth less than half of one")}
    assert stops["none"] == {"row": "none", "8 tokens": "below 0.01", "32 tokens": "below 0.125"}
    assert stops["ppo_is"]["8 tokens"] == "0.01 to 0.25" and stops["ppo_is"]["32 tokens"] == "beyond 0.125"
    orders = cells_of(length.what_orders(found), "over all 4 samplers")
    assert orders[0] == {"row": "none", "KL a token": "-1.00", "KL a response": "-0.63", "1 - ESS of R": "-1.00"}
    every = cells_of(length.everything(found), "32 tokens")
    assert every[0] == {"row": "none", "actor-0.3": "0.38 +- 0.12"}
    length.draw(found)
    assert (tmp_path / "length.png").stat().st_size > 10_000


def test_the_page_by_length_is_what_the_records_say(tmp_path, monkeypatch, capsys):
    records = {path.stem: path.read_text() for path in length.FOLDER.glob("*.json")}
    assert set(records) <= {name for n in length.SUMS for name in length.samplers(n)}
    assert not any(place in text for text in records.values() for place in ('"/', "=/", "/tmp", "/home", "/root"))
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    committed = (ROOT / "results" / "length.md").read_text()
    (tmp_path / "length.md").write_text(committed.split(sweep.MARKER)[0] + sweep.MARKER + "what stood here before\n")
    length.study(sweep.StudyFlags(draw=True))
    assert (tmp_path / "length.md").read_text() == committed, "run python results/length.py --draw"
    x = json.loads(records["5-actor-0.3"])["rows"]["retrace_seq"]
    line = next(line for line in cells_of(committed, "### 32 tokens") if line["row"] == "retrace_seq")
    assert line["actor-0.3"] == f"{x['worth']:.2f} +- {x['worth_se']:.2f}"
