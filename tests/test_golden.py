"""Named corrections against tests/golden: values from formulas, by programs independent of the repository."""

import json

import pytest
import torch
from conftest import ROOT, One, f64, make_cfg
from tools import make_golden

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
PADDING = {"inf": -0.7, "ref": -0.1, "new": -3.0}  # values that would change the result if they were read


def tensors(responses: list[dict]) -> tuple[TokenStats, Batch]:
    """The batch as the learner's tensors, in float64, padded on the right."""
    B, T = len(responses), max(len(r["mask"]) for r in responses)
    columns, words = {}, {}
    for name, fill in PADDING.items():
        columns[name] = torch.tensor([r[name] + [fill] * (T - len(r[name])) for r in responses], dtype=f64)
        rows = [r["words"][name] + [[fill] * 4] * (T - len(r["mask"])) for r in responses]
        words[name] = torch.tensor(rows, dtype=f64)  # (B, T, 4): the whole vocabulary, so the bracket of Z is exact
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
        adv=torch.tensor([[r["adv"]] for r in responses], dtype=f64),
        sampling=torch.tensor([[1.0, 1.0, 0.0, 0.0]] * B),
        staleness=torch.tensor([float(r["age"]) for r in responses]),
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
    """The flags of a case: an objective and flags of the command line."""
    objective, *further = case.split()
    values = dict(word[2:].split("=") for word in further)
    return {"objective": objective} | {key: typed(text) for key, text in values.items()}


def typed(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text == "True" or text


@pytest.mark.parametrize("case, batch", VALUES, ids=lambda x: str(x))
def test_weights_masks_loss_gradient_and_metrics_equal_the_formulas(case, batch):
    want = VALUES[case, batch]
    cfg = make_cfg(**flags_of(case), max_tokens=9)
    new, data = tensors(BATCHES[batch]["responses"])
    stats = objectives.prepare(data, One, cfg, {})
    value, logs = objectives.loss(new, data, stats, cfg)
    loss = objectives.reduce(value, data.mask, stats, cfg)
    loss.backward()
    ratio_is_weight = cfg.ratio_base in ("inf", "group")  # the log has the product of both
    for i, on in enumerate(data.mask):
        if not ratio_is_weight:
            assert logs["weight"][i][on].tolist() == pytest.approx(want["weight"][i], rel=1e-11)
        assert logs["keep"][i][on].tolist() == [float(flag) for flag in want["keep"][i]]
        assert new.logp.grad[i][on].tolist() == pytest.approx(want["grad"][i], rel=1e-10, abs=1e-12)
        assert not new.logp.grad[i][~on].any()
    assert float(loss.detach()) == pytest.approx(want["loss"], rel=1e-10, abs=1e-12)
    sums = Sums()
    metrics.observe(sums, new.detach(), objectives.with_ref(new, data), stats, logs, cfg)
    metrics_of_batch = metrics.derive(sums.reduce(One))
    for name, x in BATCHES[batch]["mismatch"].items():
        assert metrics_of_batch[f"rollout_corr/{name}"] == pytest.approx(x, rel=1e-9), name
    for name, x in want["metrics"].items():
        if not (ratio_is_weight and name == "rollout_is_eff_sample_size"):
            assert metrics_of_batch[f"rollout_corr/{name}"] == pytest.approx(x, rel=1e-9, abs=1e-12), name


def close(got, want):
    """Whether nested values are equal up to rounding."""
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(close(got[key], want[key]) for key in want)
    if isinstance(want, list):
        return len(got) == len(want) and all(map(close, got, want))
    return got == want if isinstance(want, str) else got == pytest.approx(want, rel=1e-9, abs=1e-12)


def test_the_oracle_gives_the_golden_values():
    """The values in git are from an earlier program with separate formulas. Every objective has one."""
    assert {case for case, _ in VALUES} == set(make_golden.CASES) >= set(presets.OBJECTIVES)
    for (case, batch), want in VALUES.items():
        got = make_golden.evaluate(BATCHES[batch]["responses"], case)
        assert all(close(x, want[name]) for name, x in got.items()), (case, batch)
