"""Named corrections against tests/golden: values from formulas alone, by a program that knows nothing of ours."""

import itertools
import json
import runpy
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, One, f64, make_cfg

import metrics
import objectives
import presets
from batching import Batch
from machinery.measure import Sums
from model import TokenStats

GOLDEN = ROOT / "tests" / "golden"


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (GOLDEN / name).read_text(encoding="utf-8").splitlines()]


BATCHES = {row["batch"]: row for row in lines("batches.jsonl")}
VALUES = {(row["case"], row["batch"]): row for row in lines("values.jsonl")}
PADDING = {"inf": -0.7, "ref": -0.1, "new": -3.0}  # numbers that would show if they were read


class OneRank(One):
    max = One.sum


def tensors(responses: list[dict]) -> tuple[TokenStats, Batch]:
    """The batch as the learner has it, in float64, padded on the right."""
    B, T = len(responses), max(len(r["mask"]) for r in responses)
    columns = {}
    for which, fill in PADDING.items():
        columns[which] = torch.tensor([r[which] + [fill] * (T - len(r[which])) for r in responses], dtype=f64)
    words = {}
    for which, fill in PADDING.items():
        rows = [r["words"][which] + [[fill] * 4] * (T - len(r["mask"])) for r in responses]
        words[which] = torch.tensor(rows, dtype=f64)  # (B, T, 4): the whole vocabulary, so the bracket of Z is closed
    draws = [r["draws"] + [0.5] * (T - len(r["mask"])) for r in responses]
    mask = torch.tensor([[flag == "1" for flag in r["mask"].ljust(T, "0")] for r in responses])
    length = torch.tensor([len(r["mask"]) for r in responses])
    ids = torch.arange(B * (T + 1)).reshape(B, T + 1)
    batch = Batch(
        ids=ids,
        prompt_len=torch.ones(B, dtype=torch.long),
        length=length,
        group=torch.tensor([r["group"] for r in responses]),
        reward=torch.linspace(0, 1, B),
        cut=torch.zeros(B, dtype=torch.bool),
        spread=torch.ones(B, dtype=torch.bool),
        adv=torch.tensor([[r["adv"]] for r in responses], dtype=f64),
        sampling=torch.tensor([[1.0, 1.0, 0.0, 0.0]] * B),
        staleness=torch.tensor([[float(r["age"]), 0.0] for r in responses]),
        tokens=ids[:, 1:],
        mask=mask,
        logp_inf=columns["inf"],
        mask_uniforms=torch.tensor(draws, dtype=f64),
        support_ids=torch.arange(4).expand(B, T, 4),
        support_logp=words["inf"],
        p_kth=torch.full((B, T), 0.01),
        logp_ref=columns["ref"],
        support_logp_ref=words["ref"],
        tail_ref=torch.zeros(B, T, dtype=f64),
    )
    zero = torch.zeros(B, T, dtype=f64)
    return TokenStats(columns["new"].requires_grad_(), entropy=zero, support_logp=words["new"], tail=zero), batch


def flags_of(case: str) -> dict:
    """A case is an objective and further flags, as on the command line."""
    objective, *further = case.split()
    values = dict(word[2:].split("=") for word in further)
    return {"objective": objective} | {key: typed(text) for key, text in values.items()}


def typed(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text == "True" or text


def logged(new, batch, stats, logs, cfg) -> dict[str, float]:
    """The metrics of one update on this batch."""
    sums = Sums()
    metrics.observe(sums, new.detach(), objectives.with_ref(new, batch, cfg), stats, logs, cfg)
    return metrics.derive(sums.reduce(OneRank))


@pytest.mark.parametrize("case, batch", VALUES, ids=lambda x: str(x))
def test_weights_masks_loss_gradient_and_metrics_are_the_formulas(case, batch):
    want = VALUES[case, batch]
    cfg = make_cfg(**flags_of(case), max_tokens=9)
    new, data = tensors(BATCHES[batch]["responses"])
    if cfg.ref_from == "loglinear":
        data = replace(data, logp_ref=None)
    stats = objectives.prepare(data, One, cfg, {})
    value, logs = objectives.loss(new, data, stats, cfg)
    loss = objectives.reduce(value, data.mask, stats, cfg)
    loss.backward()
    ratio_is_weight = cfg.ratio_base in ("inf", "group")  # the log has the two multiplied
    for i, on in enumerate(data.mask):
        if not ratio_is_weight:
            assert logs["weight"][i][on].tolist() == pytest.approx(want["weight"][i], rel=1e-11)
        assert logs["keep"][i][on].tolist() == [float(flag) for flag in want["keep"][i]]
        assert new.logp.grad[i][on].tolist() == pytest.approx(want["grad"][i], rel=1e-10, abs=1e-12)
        assert not new.logp.grad[i][~on].any()
    assert float(loss.detach()) == pytest.approx(want["loss"], rel=1e-10, abs=1e-12)
    found = logged(new, data, stats, logs, cfg)
    for name, x in BATCHES[batch]["mismatch"].items() if cfg.ref_from == "pass" else ():
        assert found[f"rollout_corr/{name}"] == pytest.approx(x, rel=1e-9), name
    for name, x in want["metrics"].items():
        if not (ratio_is_weight and name == "rollout_is_eff_sample_size"):
            assert found[f"rollout_corr/{name}"] == pytest.approx(x, rel=1e-9, abs=1e-12), name


def test_the_files_are_what_the_program_writes(tmp_path):
    """And it imports nothing of this repository."""
    source = (ROOT / "tests" / "tools" / "make_golden.py").read_text(encoding="utf-8")
    made = runpy.run_path(str(ROOT / "tests" / "tools" / "make_golden.py"), run_name="golden")
    made["main"].__globals__["HERE"] = tmp_path
    made["main"]()
    for name in ("batches.jsonl", "values.jsonl"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (GOLDEN / name).read_text(encoding="utf-8")
    modules = [line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert set(modules) == {"__future__", "json", "math", "random", "pathlib"}
    assert sum(path.stat().st_size for path in GOLDEN.iterdir() if path.is_file()) < 350_000


def test_no_two_formulas_have_the_same_values():
    """Else a row could have another's formula, and nobody would see it."""
    made = runpy.run_path(str(ROOT / "tests" / "tools" / "make_golden.py"), run_name="golden")
    formula = {case: made["PLAIN"] | how for case, how in made["CASES"].items()}
    results = {
        case: [{k: x for k, x in VALUES[case, batch].items() if k not in ("case", "batch")} for batch in BATCHES]
        for case in formula
    }
    for one, other in itertools.combinations(formula, 2):
        assert (results[one] == results[other]) == (formula[one] == formula[other]), (one, other)


def test_every_objective_has_golden_values():
    assert {case.split()[0] for case, _ in VALUES} == set(presets.OBJECTIVES)


def test_the_batches_have_what_hurts():
    """Holes, empty responses, responses without a token that counts, ratios beyond the clamp; no number twice."""
    rows = [r for row in BATCHES.values() for r in row["responses"]]
    numbers = [x for r in rows for which in PADDING for x in r[which]]
    assert len(set(numbers)) == len(numbers)
    masks = [r["mask"] for r in rows]
    assert "" in masks and "0000" in masks and any("10" in mask and mask.endswith("1") for mask in masks)
    logs = [a - b for r in rows for a, b, on in zip(r["ref"], r["inf"], r["mask"], strict=True) if on == "1"]
    assert min(logs) < -20 and max(logs) > 20
    assert len({r["adv"] for r in rows}) == len(rows)


@pytest.mark.parametrize("case", sorted({case for case, _ in VALUES}))
def test_what_drops_drops_some_and_not_all(case):
    """Of the batches together; so a mask that is all 1 or all 0 does not pass."""
    cfg = make_cfg(**flags_of(case), max_tokens=9)
    flags = "".join(mask for batch in BATCHES for mask in VALUES[case, batch]["keep"])
    assert set(flags) == ({"0", "1"} if objectives.can_drop(cfg) else {"1"})
