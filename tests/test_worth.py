"""worth.py against exact gradients, plain loops, known distributions, and more ranks."""

import json
import math
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY_TASK, f64, make_cfg, make_groups, tiny_model
from torchrun import torchrun

import batching
import objectives
import worth
from learner import Comm, Learner
from machinery import measure, run
from machinery.flags import UserError
from machinery.measure import FOLDS, Reference, RowSamples
from objectives import REF
from worth import EVERYTHING, Measurement, Weights, WorthFlags

# ---------------------------------------------------------------------------------------------------------------------
# Exact gradients
# ---------------------------------------------------------------------------------------------------------------------


def ragged(n_groups: int, seed: int):
    """Random groups of unequal lengths; odd ids are rewarded. No id is 0: padding has no gradient."""
    groups = make_groups(n_groups, seed=seed)
    for group in groups:
        group.prompt_ids = group.prompt_ids.clip(min=1)
        for r in group.responses:
            r.tokens = r.tokens.clip(min=1)
            r.reward = float(np.mean(r.tokens % 2))
    return groups


def learner_and_batch(**flags):
    """A float64 learner with one or two tiny models, and a ragged batch with its ref columns."""
    cfg = make_cfg(train_batch=16, rollout_batch=16, micro_tokens=60, **flags)
    actor = tiny_model(1, dtype=f64) if cfg.actor != "none" else None
    learner = Learner(tiny_model(0, layers=2, dtype=f64), actor, cfg, Comm())
    return cfg, learner, worth.batches_of(learner, ragged(4, seed=3), {"row": cfg})["row"]


def test_rows_with_different_advantages_have_different_batches():
    cfg, learner, batch = learner_and_batch(objective="tis")
    rows = {"whole": cfg, "clipped": replace(cfg, advantage="grpo_no_std"), "again": replace(cfg, is_cap=9.0)}
    batches = worth.batches_of(learner, ragged(4, seed=3), rows)
    assert torch.equal(batches["whole"].adv, batch.adv) and torch.equal(batches["again"].adv, batch.adv)
    assert not torch.allclose(batches["clipped"].adv, batch.adv)


def exact_gradient(learner, cfg, batch) -> list[torch.Tensor]:
    """The policy's gradient from the learner's update."""
    columns = {name: x for name, x in learner.ref_columns(batch, cfg.obrs_lambda).items() if name in REF.values()}
    batch = replace(batch, **columns)
    learner.models.zero_grad()
    learner.backward(batch, objectives.prepare(batch, learner.comm, cfg, {}))
    return [-p.grad for p in learner.models.policy.parameters()]


ROWS = [row.split() for row in worth.ROWS.split(";")]


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
@pytest.mark.parametrize("actor", ["none", "base:actor"])
def test_coefficients_and_slopes_of_a_row_give_its_gradient(row, actor, monkeypatch):
    """sum_t c_t s_t along v = <gradient of the row's update, v>, for every row of the table."""
    monkeypatch.setattr(worth, "STEP", 1e-6)  # differences are exact in the limit, float64 is precise enough
    flags = {key: float(value) if "cap" in key else value for key, value in (x.split("=") for x in row[1:])}
    if row[0] == "geo_rs":
        flags = {"rs_low": 0.05, "rs_high": 1.0}  # random models are far apart: keep a part of the responses
    cfg, learner, batch = learner_and_batch(objective=row[0], actor=actor, **flags)
    c = worth.coefficients(batch, learner.comm, cfg)
    weights = Weights(learner, share=1.0)
    exact = exact_gradient(learner, cfg, batch)
    assert weights.dot(flat(exact), flat(exact)) > 0
    directions = [weights.random(0), weights.random(1), flat(exact)]
    for v, s in zip(directions, weights.slopes(batch, directions), strict=True):
        want = sum(float((a * b).sum()) for a, b in zip(flat(exact), v, strict=True))
        size = float((c * s).abs().sum())
        assert float((c * s).sum()) == pytest.approx(want, abs=1e-5 * size)
        assert size > 0


def flat(direction) -> list[torch.Tensor]:
    return [x.reshape(-1) for x in direction]


def test_rows_with_different_lambdas_have_different_z():
    """Weighed together, every row has the coefficients of a separate measurement."""
    cfgs = {}
    for lam in (0.8, 1.0, 1.3):
        cfgs[str(lam)], learner, alone = learner_and_batch(objective="jackpot", actor="base:actor", obrs_lambda=lam)
        cfgs[str(lam)] = (cfgs[str(lam)], worth.coefficients(alone, learner.comm, cfgs[str(lam)]))
    together = worth.batches_of(learner, ragged(4, seed=3), {name: cfg for name, (cfg, _) in cfgs.items()})
    for name, (cfg, want) in cfgs.items():
        assert torch.allclose(worth.coefficients(together[name], learner.comm, cfg), want, atol=1e-12)
    assert not torch.allclose(together["0.8"].z_ref, together["1.3"].z_ref)


def test_the_steps_of_directions_are_small_and_of_equal_size():
    cfg, learner, batch = learner_and_batch(objective="none")
    weights = Weights(learner, share=1.0)
    before = [p.clone() for p in learner.models.policy.parameters()]
    for number in (0, 1):
        v = weights.random(number)
        [s] = weights.slopes(batch, [v])
        moved = s[batch.mask] * worth.STEP / weights.spreads[id(v)]
        assert 0.5 * worth.STEP < float(moved.square().mean().sqrt()) < 2 * worth.STEP
    for old, p in zip(before, learner.models.policy.parameters(), strict=True):
        assert torch.equal(old, p)  # restored to the bit


def test_directions_are_independent_signs():
    cfg, learner, batch = learner_and_batch(objective="none")
    weights = Weights(learner, share=1.0)
    a, b, again = weights.random(0), weights.random(1), weights.random(0)
    n = sum(x.numel() for x in a)
    assert {x.dtype for x in a} == {torch.int8}  # 32 directions are kept, each at a quarter of the parameters' bytes
    assert all(torch.equal(x, y) for x, y in zip(a, again, strict=True))
    assert weights.dot(a, a) == n and abs(weights.dot(a, b)) < 4 * math.sqrt(n)
    assert abs(sum(float(x.sum()) for x in a)) < 4 * math.sqrt(n)
    products = [
        float((x * y).double().mean())
        for i, x in enumerate(a)
        for y in a[i + 1 :]
        if x.shape == y.shape and len(x) > 500
    ]
    assert max(map(abs, products)) < 0.3  # signs differ between parameters


def test_only_the_drawn_share_of_entries_moves():
    cfg, learner, batch = learner_and_batch(objective="none")
    part = Weights(learner, share=0.3)
    n = sum(x.numel() for x in learner.models.policy.parameters())
    chosen = sum(len(x) for x in part.at_rest)
    assert abs(chosen / n - 0.3) < 0.02
    before = [p.clone() for p in learner.models.policy.parameters()]
    part.shift(part.random(0), 0.125)
    moved = sum(int((old != p).sum()) for old, p in zip(before, learner.models.policy.parameters(), strict=True))
    assert moved == chosen
    part.shift(part.random(0), 0.0)
    exact = exact_gradient(learner, cfg, batch)
    size = sum(float(x.square().sum()) for x in exact)
    drawn = part.gradient()
    assert part.dot(drawn, drawn) / size == pytest.approx(0.3, abs=0.1)


# ---------------------------------------------------------------------------------------------------------------------
# Estimates on known distributions
# ---------------------------------------------------------------------------------------------------------------------

DIM, GROUPS, DIRECTIONS = 60, 8, 32


def synthetic(seed: int, batches: int = 20, scale=0.7, bias=0.4, noise=1.5, noise_on=0.8, each: int = 12):
    """Measurements of gradients from a known distribution: g = e_0, the row's mean is scale e_0 + bias e_1, a batch's
    squared noise is `noise` and `noise_on`, spread evenly over all entries."""
    rng = np.random.default_rng(seed)
    g, mean = np.eye(DIM)[0], scale * np.eye(DIM)[0] + bias * np.eye(DIM)[1]
    on = g + rng.normal(size=(FOLDS, each, DIM)) * math.sqrt(noise_on / DIM)
    means = on.mean(1)
    shares = mean / GROUPS + rng.normal(size=(batches, GROUPS, DIM)) * math.sqrt(noise / GROUPS / DIM)
    V = rng.choice([-1.0, 1.0], size=(DIRECTIONS, DIM))
    reference = Reference(list(means), means @ means.T, (on**2).sum(2).mean(1), each, V @ means.T)
    return RowSamples(along=list(shares.sum(1) @ means.T), noise=list(shares @ V.T)), reference


def true_numbers(scale, bias, noise, noise_on) -> dict[str, float]:
    worth_ = scale**2 * noise_on / (bias**2 + noise)
    kappa = scale / math.sqrt(scale**2 + bias**2 + noise)
    cosine = scale / math.sqrt(scale**2 + bias**2)
    return dict(worth=worth_, kappa=kappa, cosine=cosine, scale=scale, bias=bias**2, noise=noise, noise_on=noise_on)


CASES = [dict(scale=0.7, bias=0.4, noise=1.5, noise_on=0.8), dict(scale=1.0, bias=0.0, noise=0.8, noise_on=0.8)]


def test_noise_along_the_gradient_is_not_worth():
    """If the row's mean gradient is small, scale^2 is mostly noise; worth corrects for the noise."""
    truth = dict(scale=0.04, bias=0.1, noise=1.5, noise_on=0.8)
    estimates = [
        measure.estimate(*arrays(*synthetic(seed, batches=6, each=48, **truth)), GROUPS) for seed in range(200)
    ]
    plain = [max(x["scale"], 0) ** 2 * x["noise_on"] / (x["bias"] + x["noise"]) for x in estimates]
    assert true_numbers(**truth)["worth"] < np.mean([x["worth"] for x in estimates]) < 0.75 * np.mean(plain)


@pytest.mark.parametrize("truth", CASES)
def test_estimates_are_right_on_average_and_within_their_errors(truth):
    """40 measurements of a known distribution: each mean is right within its scatter, the errors estimate the scatter,
    and the truth is within two errors in most measurements."""
    estimates = [measure.with_errors(*synthetic(seed, **truth), GROUPS) for seed in range(40)]
    for name, want in true_numbers(**truth).items():
        values, errors = (np.array([x[key] for x in estimates]) for key in (name, f"{name}_se"))
        if truth["bias"] == 0 and name in ("bias", "cosine"):  # at the end of their range
            assert abs(values.mean() - want) < 0.05
            continue
        scatter = values.std(ddof=1)
        near = 3 * scatter / math.sqrt(len(values)) + 0.02 * want
        assert abs(values.mean() - want) < near + (0.02 if truth["bias"] == 0 else 0.0), name
        assert 0.6 * scatter < errors.mean() < 2 * scatter, name
        assert np.mean(np.abs(values - want) < 2 * errors) >= 0.8, name


def test_kappa_follows_from_worth():
    """An on-policy batch of (worth B) responses has the row's kappa: kappa^2 = 1 / (1 + noise_on / worth)."""
    numbers = measure.estimate(*arrays(*synthetic(3)), GROUPS)
    assert numbers["kappa"] ** 2 == pytest.approx(1 / (1 + numbers["noise_on"] / numbers["worth"]))


def arrays(seen, reference):
    return np.array(seen.along), np.concatenate(seen.noise), reference


def test_a_row_that_rejects_everything_is_worth_0():
    seen, reference = synthetic(0)
    nothing = RowSamples([0 * x for x in seen.along], [0 * x for x in seen.noise])
    numbers = measure.with_errors(nothing, reference, GROUPS)
    assert numbers["worth"] == numbers["kappa"] == numbers["cosine"] == numbers["scale"] == 0
    assert numbers["worth_se"] == 0 and numbers["noise_on"] > 0


def test_a_row_against_the_gradient_is_worth_0():
    seen, reference = synthetic(0)
    away = RowSamples([-x for x in seen.along], [-x for x in seen.noise])
    numbers = measure.estimate(*arrays(away, reference), GROUPS)
    assert numbers["worth"] == 0 and numbers["kappa"] < -0.2 and numbers["cosine"] < -0.5


# ---------------------------------------------------------------------------------------------------------------------
# Whole measurements
# ---------------------------------------------------------------------------------------------------------------------

SMALL = ["--train_batch=32", "--rollout_batch=32", "--group_size=4", "--max_tokens=8", "--rollout=hf"]
SMALL += ["--task=arith", "--rollout_dtype=float32", *(f"--{key}={value}" for key, value in TINY_TASK.items())]
BRIEF = ["--batches=6", "--reference=24", "--directions=8", "--noise_batches=6"]


def weigh(tmp_path, solvers, *flags, model="policy", actor="none") -> dict:
    return worth.main(
        [
            f"--model={solvers / model}",
            f"--actor={solvers / actor if actor != 'none' else actor}",
            *SMALL,
            *flags,
            f"--json={tmp_path / 'w.json'}",
        ]
    )


def test_the_policys_responses_are_worth_1(tmp_path, solvers, capsys):
    flags = ["--batches=24", "--reference=48", "--directions=16", "--noise_batches=24", "--rows=none; tis; seq_mis"]
    results = weigh(tmp_path, solvers, *flags, "--train_batch=96", "--rollout_batch=96")
    for x in results["rows"].values():
        assert abs(x["worth"] - 1) < 2.5 * x["worth_se"] < 1.5
        assert abs(x["scale"] - 1) < 2.5 * x["scale_se"] < 0.8
        assert x["noise"] == pytest.approx(x["noise_on"], rel=0.3)
    assert results["about"]["kl"] < 1e-9
    assert all(abs(half - 1) < 0.5 for half in results["about"]["halves"])
    printed = capsys.readouterr().out
    assert "none" in printed and "figure:" in printed
    assert json.loads((tmp_path / "w.json").read_text())["rows"] == results["rows"]
    assert (tmp_path / "w.png").stat().st_size > 10_000


@pytest.mark.slow
def test_errors_cover_in_twenty_measurements(tmp_path, solvers):
    """The policy's responses have worth 1 and scale 1. Correct errors cover them within two errors 19 times of 20."""
    flags = ["--batches=12", "--reference=24", "--directions=8", "--noise_batches=12", "--rows=none"]
    flags += ["--train_batch=96", "--rollout_batch=96"]
    rows = [weigh(tmp_path, solvers, *flags, f"--seed={seed}")["rows"]["none"] for seed in range(20)]
    for key in ("worth", "scale"):
        off = [abs(x[key] - 1) / x[f"{key}_se"] for x in rows]
        assert sum(z < 2 for z in off) >= 17, (key, sorted(off))
        assert np.mean(off) > 0.3, key  # errors are not too wide either


@pytest.mark.slow
def test_responses_sampled_by_vllm(tmp_path, solvers):
    """The policy's responses by vLLM, and the actor's: their KL equals the KL with plain torch."""
    pytest.importorskip("vllm")
    results = {
        (engine, actor): weigh(tmp_path, solvers, *BRIEF, "--rows=none; is", f"--rollout={engine}", actor=actor)
        for engine, actor in (("vllm", "none"), ("vllm", "actor"), ("hf", "actor"))
    }
    alone, of_actor, plain = results.values()
    assert alone["about"]["kl"] < 1e-6
    assert alone["rows"]["is"] == pytest.approx(alone["rows"]["none"], rel=0.02, abs=1e-3)
    assert of_actor["about"]["kl"] == pytest.approx(plain["about"]["kl"], rel=0.25) and of_actor["about"]["kl"] > 1e-3
    assert of_actor["rows"]["is"] != pytest.approx(of_actor["rows"]["none"], rel=0.02)


def test_halves_of_the_on_policy_gradient_by_hand():
    means = np.array([[1.0, 0.5], [2.0, -1.0], [0.0, 3.0], [1.5, 1.0]])
    reference = Reference([], means @ means.T, np.zeros(4), 1, np.zeros((1, 4)))
    pairs = [float(means[i] @ means[j]) for i in range(4) for j in range(4) if i != j]
    whole = sum(pairs) / 12
    first, second = float(means[0] @ means[1]), float(means[2] @ means[3])
    assert reference.halves() == pytest.approx([first / whole, second / whole])


def test_truncated_sampling_with_replayed_sets_is_on_policy(tmp_path, solvers):
    """With the kept sets on both sides all weights are 1; without them each r is the kept mass."""
    kept, cut = (
        weigh(tmp_path, solvers, *BRIEF, "--rows=none; is", "--top_p=0.8", f"--keep_sampling_mask={kind}")
        for kind in ("replay", "off")
    )
    assert kept["about"]["kl"] < 1e-9 and kept["rows"]["is"] == pytest.approx(kept["rows"]["none"], rel=1e-3, abs=1e-6)
    assert kept["rows"]["none"]["noise"] == pytest.approx(kept["rows"]["none"]["noise_on"], rel=0.5)
    assert cut["about"]["kl"] > 1e-4 and cut["rows"]["is"] != pytest.approx(cut["rows"]["none"], rel=1e-3)


def test_a_policy_without_rewards_has_no_gradient(tmp_path, folders):
    with pytest.raises(UserError, match="is not distinguishable from its noise"):
        weigh(tmp_path, folders, *BRIEF, "--rows=none")


def test_responses_of_a_different_model_are_worth_less(tmp_path, solvers):
    """The models are far apart: without a correction the step is not the policy's."""
    results = weigh(tmp_path, solvers, *BRIEF, "--rows=none; prefix_tis", actor="actor")
    assert results["about"]["kl"] > 0.1
    assert results["rows"]["none"]["worth"] < 0.5 * results["rows"]["prefix_tis"]["worth"]


def test_parts_by_length_add_up(tmp_path, solvers, monkeypatch):
    """The parts' gradients sum to the whole gradient; a row's samples along any direction sum too."""
    flags = [f"--model={solvers / 'policy'}", "--actor=none", *SMALL, *BRIEF, "--rows=is", "--lengths=3,6"]
    worth_flags, rows, plain = worth.parse(flags)
    assert worth.parts(worth_flags) == [EVERYTHING, (0, 3), (3, 6), (6, EVERYTHING[1])]
    monkeypatch.setattr(run, "sleep_level", pytest.fail)  # on a GPU the engine would drop its weights
    m = Measurement(worth_flags, rows, plain)
    batch = batching.collate(ragged(8, seed=5), m.cfg)
    lengths = batch.length
    whole, *parts = (m.gradient(replace(batch, adv=batch.adv * worth.of_length(batch, part))) for part in m.parts)
    for entry, *shares in zip(whole, *parts, strict=True):
        assert torch.allclose(entry, sum(shares), atol=1e-6)
    assert all(m.weights.dot(g, g) > 0 for g in parts)
    batch = worth.batches_of(m.learner, ragged(8, seed=5), rows)["is"]
    slopes = m.weights.slopes(batch, m.random)
    c = worth.coefficients(batch, m.comm, rows["is"])
    seen = []
    for part in m.parts:
        seen.append(RowSamples())
        m.see(seen[-1], worth.Slopes({"is": batch}, {part: slopes[:FOLDS]}, slopes), c, part)
    assert np.allclose(np.sum([s.along[0] for s in seen[1:]], 0), seen[0].along[0])
    assert np.allclose(np.sum([s.noise[0] for s in seen[1:]], 0), seen[0].noise[0])
    middle = (lengths >= 3) & (lengths < 6)
    assert seen[2].along[0][1] == pytest.approx(float((c * slopes[1])[middle].sum()))
    m.sampler.close()


def test_the_worth_of_a_row_does_not_depend_on_other_rows(tmp_path, solvers):
    """Advantage and reduction are flags of the row; g has the command line's."""
    rows = ["none", "none advantage=grpo_no_std", "tis is_cap=3 reduction=seq-mean-token-sum-norm"]
    alone = {row: weigh(tmp_path, solvers, *BRIEF, f"--rows={row}", actor="actor")["rows"][row] for row in rows}
    together = weigh(tmp_path, solvers, *BRIEF, f"--rows={'; '.join(reversed(rows))}", actor="actor")["rows"]
    for row in rows:
        assert together[row] == pytest.approx(alone[row], rel=1e-4)
    assert alone[rows[1]]["scale"] < 0.8 * alone[rows[0]]["scale"]  # with rewards 0 and 1: std < 1


def test_the_cost_of_sampling(tmp_path, solvers, capsys):
    """The price of a model against itself is about 1; measured times fit the elapsed time; the verdict is printed."""
    start = time.perf_counter()
    results = weigh(tmp_path, solvers, *BRIEF, "--rows=none", "--cost")
    spent = time.perf_counter() - start
    about = results["about"]
    assert 0.3 < about["price"] < 3
    assert about["price"] == pytest.approx(about["sampler/seconds"] / about["on_policy/seconds"])
    assert 0 < 3 * 32 * (about["sampler/seconds"] + about["on_policy/seconds"]) < spent
    assert "\n".join(worth.verdict(results["rows"]["none"], about)) in capsys.readouterr().out


@dataclass
class Timed:
    """A source with a simulated clock: the first batch takes ten times as long."""

    seconds: float
    clock: list
    calls: int = 0

    def next(self, groups, version):
        assert groups == 8
        self.clock[0] += self.seconds * (1 if self.calls else 10)
        self.calls += 1

    def close(self):
        pass


def test_the_cost_of_a_response_by_hand(monkeypatch):
    """Batches of 32: 3 seconds each by the sampler, 6 by the policy; the first of each does not count."""
    clock = [0.0]
    sampler, policy = Timed(3.0, clock), Timed(6.0, clock)
    monkeypatch.setattr(worth, "open_source", lambda *_, **kwargs: policy)
    monkeypatch.setattr(worth.time, "perf_counter", lambda: clock[0])
    cfg = make_cfg(train_batch=32, rollout_batch=32, group_size=4)
    m = SimpleNamespace(cfg=cfg, run=sampler, comm=Comm(), sampler=sampler, groups=8, quiet=True)
    monkeypatch.setattr(worth, "replace", lambda one, **_: one)
    assert worth.cost(m) == {"sampler/seconds": 3 / 32, "on_policy/seconds": 6 / 32, "price": 0.5}


def test_the_price_is_over_the_policy_in_full_precision(monkeypatch):
    """The baseline is without low bits, noise and actor."""

    @dataclass
    class Opened:
        actor: str = "x"

    clock, sources = [0.0], []

    def open_source(cfg, run, comm, sleeps):
        assert not sleeps
        sources.append((cfg.actor, cfg.rollout_quant, run.actor))
        return Timed(6.0, clock)

    monkeypatch.setattr(worth.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(worth, "open_source", open_source)
    cfg = make_cfg(rollout_quant="int8", rollout="hf", train_batch=32, rollout_batch=32, group_size=4)
    worth.cost(SimpleNamespace(cfg=cfg, run=Opened(), comm=Comm(), sampler=Timed(3.0, clock), groups=8, quiet=True))
    assert sources == [("none", "none", "")]


def test_the_engine_records_the_largest_top_k_of_all_rows(solvers):
    flags = [f"--model={solvers / 'policy'}", "--actor=none", *SMALL, *BRIEF]
    m = Measurement(*worth.parse([*flags, "--rows=none; jackpot obrs_topk=7; tis"]))
    (group,) = m.sampler.next(1, 0)
    assert group.responses[0].topk_ids.shape[1] == 7
    m.sampler.close()


def test_the_groups_parts_sum_to_the_batch(tmp_path, solvers):
    flags = [f"--model={solvers / 'policy'}", "--actor=none", *SMALL, *BRIEF, "--rows=none"]
    worth_flags, rows, plain = worth.parse(flags)
    m = Measurement(worth_flags, rows, plain)
    references = m.references()
    slopes = next(iter(m.slopes(references)))
    batch = slopes.batches["none"]
    c = worth.coefficients(batch, m.comm, rows["none"])
    seen = RowSamples()
    m.see(seen, slopes, c)
    assert seen.noise[0].shape == (8, 8)  # groups, directions
    whole = [float((c * s).sum()) for s in slopes.random]
    assert np.allclose(seen.noise[0].sum(0), whole)
    third = batch.group == 2
    assert seen.noise[0][2, 5] == pytest.approx(float((c * slopes.random[5])[third].sum()))
    m.sampler.close()


def test_stale_and_low_bit_samplers(tmp_path, solvers):
    """--stale samples with a different folder's weights; --rollout_quant rounds the policy's weights."""
    rows = "--rows=none"
    stale = weigh(tmp_path, solvers, *BRIEF, rows, f"--stale={solvers / 'actor'}")
    of_actor = weigh(tmp_path, solvers, *BRIEF, rows, actor="actor")
    assert stale["about"]["kl"] == pytest.approx(of_actor["about"]["kl"]) and stale["about"]["kl"] > 0.1
    low = weigh(tmp_path, solvers, *BRIEF, rows, "--rollout_quant=w4a16", "--quant_group=32")
    assert 1e-4 < low["about"]["kl"] < stale["about"]["kl"]


def test_truncated_sampling_is_mismatch_unless_the_learner_truncates(tmp_path, solvers):
    """--top_p: on-policy responses are truncated if and only if the learner scores truncated distributions."""
    rows = ["--rows=none", "--top_p=0.5"]
    off = weigh(tmp_path, solvers, *BRIEF, *rows, "--keep_sampling_mask=off")
    assert off["about"]["kl"] > 1e-3
    for kind in ("recompute", "replay"):
        cut = weigh(tmp_path, solvers, *BRIEF, *rows, f"--keep_sampling_mask={kind}")
        assert cut["about"]["kl"] < 1e-6


@pytest.mark.slow
def test_a_share_of_the_parameters_agrees_with_the_whole(tmp_path, solvers):
    """The same responses measured on a third of the entries: every number agrees within its errors."""
    more = ["--batches=24", "--reference=48", "--directions=16", "--noise_batches=12", "--rows=none; tis; prefix_tis"]
    whole, part = (weigh(tmp_path, solvers, *more, f"--share={s}", actor="actor")["rows"] for s in (1, 0.33))
    for row in whole:
        for name in ("worth", "scale", "cosine"):
            error = math.hypot(whole[row][f"{name}_se"], part[row][f"{name}_se"])
            assert abs(whole[row][name] - part[row][name]) < 2 * error, (row, name)
    assert part["none"]["worth"] < part["prefix_tis"]["worth"] and part["none"]["worth_se"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_give_the_result_of_one(parallel, tmp_path, solvers):
    """The same groups on two ranks: g, its noise and every row's scale agree; with DDP all numbers do."""
    one = weigh(tmp_path, solvers, *BRIEF, "--rows=none; prefix_tis", actor="actor")
    flags = [f"--model={solvers / 'policy'}", f"--actor={solvers / 'actor'}", *SMALL, *BRIEF]
    flags += ["--rows=none; prefix_tis", f"--parallel={parallel}", f"--json={tmp_path / 'two.json'}"]
    torchrun("../worth.py", *flags)
    two = json.loads((tmp_path / "two.json").read_text())
    compared = ["scale", "noise_on", "scale_se"]  # shards have different random directions
    if parallel == "ddp":  # groups are in a different order: the jackknife leaves out different groups
        compared += [name for name in one["rows"]["none"] if not name.endswith("_se")]
    for row, numbers in one["rows"].items():
        for name in compared:
            assert two["rows"][row][name] == pytest.approx(numbers[name], rel=0.02, abs=1e-3), (row, name)
        error = math.hypot(two["rows"][row]["worth_se"], numbers["worth_se"])
        assert abs(two["rows"][row]["worth"] - numbers["worth"]) < 3 * error, row
    for name in ("kl", "sampler/reward", "on_policy/length"):
        assert two["about"][name] == pytest.approx(one["about"][name], rel=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--stale=base:policy", "--actor=base:actor"],
            "--stale=base:policy: the actor samples here; add --actor=none",
        ),
        (["--objective=tis"], "--objective: name the objectives to measure with --rows"),
        (["--rows= ; "], "--rows: no objective is named"),
        (["--rows=tsi"], "tsi"),
        (["--rows=tis is_kap=3"], "is_cap"),
        (["--batches=2"], "--batches=2: must be at least 3"),
        (
            ["--rows=tis; tis temperature=0.5"],
            "--rows: temperature=0.5 of 'tis temperature=0.5' is not a flag of an obj",
        ),
        (["--noise_batches=25"], "--noise_batches=25: must be between 1 and --batches=24"),
        (["--reference=5"], "--reference=5: must be a multiple of 4"),
        (["--directions=0"], "--directions=0: must be a multiple of 4"),
        (["--share=0"], "--share=0.0: a share"),
        (["--lengths=9,9"], "--lengths=9,9: must be rising"),
        (["--lengths=x"], "--lengths=x: must be rising"),
        (["--delay=lognormal"], "weights with --stale"),
        (["--rollout_quant=int8", "--learner_quant=aligned"], "--learner_quant=aligned: the gradient through rounded"),
        (["--rows=jackpot obrs_target=new"], "top-K"),
        (["--json=/dev/null/x.json"], "--json=/dev/null/x.json"),
    ],
)
def test_flags_that_contradict_each_other(flags, message):
    with pytest.raises(UserError, match="") as e:
        worth.parse(["--model=base:policy", "--actor=none", "--rollout=hf", *flags])
    assert message in str(e.value)


def test_given_flags_apply_to_every_row_and_g(folders):
    """worth.py's defaults apply only to missing flags; g has the rows' groups and lengths."""
    common = [f"--model={folders / 'policy'}", "--actor=none", *SMALL[:2], *SMALL[4:], "--rows=none"]
    _, rows, plain = worth.parse([*common, "--lr=1e-6", "--group_size=4", "--max_tokens=8", "--kl_coef=0.1"])
    for cfg in (rows["none"], plain):
        assert (cfg.lr, cfg.group_size, cfg.max_tokens) == (1e-6, 4, 8)
    assert (rows["none"].kl_coef, plain.kl_coef) == (0.1, 0.0)


def test_rows_are_configurations():
    flags = ["--actor=none", "--rollout=hf", "--is_floor=0.1", "--advantage=rloo", "--rollout_quant=int8"]
    worth_flags, rows, plain = worth.parse([*flags, "--rows=tis is_cap=3; jackpot is_floor=0 obrs_mask=expected;"])
    assert (plain.correction, plain.surrogate, plain.advantage, plain.is_floor) == ("none", "reinforce", "rloo", 0)
    assert plain.rollout_quant == "none" and rows["tis is_cap=3"].rollout_quant == "int8"
    assert list(rows) == ["tis is_cap=3", "jackpot is_floor=0 obrs_mask=expected"]
    assert rows["tis is_cap=3"].is_cap == 3 and rows["jackpot is_floor=0 obrs_mask=expected"].obrs_mask == "expected"
    assert worth_flags == WorthFlags(rows=worth_flags.rows)


def test_the_engine_has_the_precision_of_the_run(solvers, tmp_path):
    """g is in float32 unless a flag says otherwise; the engine has the precision of the run, also from a file."""
    (tmp_path / "run.toml").write_text('dtype = "bfloat16"\nmax_tokens = 8\ntask = "arith"\n')
    common = [f"--model={solvers / 'policy'}", "--actor=none", "--rollout=hf", "--rows=tis"]
    for flags, wanted in (
        ([*common, f"--config={tmp_path / 'run.toml'}"], ("bfloat16", "float32")),
        ([*common, "--task=arith", "--max_tokens=8", "--rollout_dtype=float16"], ("float16", "float32")),
        ([*common, "--task=arith", "--max_tokens=8", "--dtype=bfloat16"], ("bfloat16", "bfloat16")),
        (["--actor=none", "--rollout=hf", "--rows=tis"], ("float32", "float32")),
    ):
        _, rows, plain = worth.parse(flags)
        assert [(cfg.rollout_dtype, cfg.dtype) for cfg in (rows["tis"], plain)] == 2 * [wanted]
    with pytest.raises(UserError, match="no default precision; set it, for instance --rollout_dtype=bfloat16"):
        worth.parse([*common, "--task=arith", "--max_tokens=8"])
    (tmp_path / "run.toml").write_text('dtype = "float32"\nmax_tokens = 8\ntask = "arith"\nentropy_coef = 0.01\n')
    _, _, plain = worth.parse([*common, f"--config={tmp_path / 'run.toml'}"])
    assert plain.entropy_coef == 0


def test_a_verdict():
    about = {"price": 0.4, "sampler/seconds": 0.02, "on_policy/seconds": 0.05}
    about |= {"sampler/length": 20, "on_policy/length": 25}
    assert worth.verdict({"worth": 0.8, "worth_se": 0.1}, about) == [
        "a token takes 1 ms with the sampler and 2 ms with the policy",
        "on-policy responses per second: 40 from the sampler, 20 from the policy",
        "this sampler is worth its cost, by a factor of 2.00 +- 0.25",
    ]
    assert [worth.pays(w, 0.1, 0.6) for w in (0.9, 0.75, 0.45, 0.3)] == ["yes", "open", "open", "no"]
    assert worth.verdict({"worth": 0.2, "worth_se": 0.01}, about)[-1].startswith(
        "this sampler is not worth its cost, by a factor of 0.50"
    )
    assert worth.verdict({"worth": 0.5, "worth_se": 0.1}, about)[-1].startswith(
        "undecided: the worth is within two errors of the cost"
    )


def test_the_number_of_batches_for_a_precise_worth_by_hand():
    """An error of 60 % is 2.4 times too large: 5.76 times as many batches."""
    about = {"batches": 24, "reference": 50}
    (sentence,) = worth.more_batches({"worth": 2.0, "worth_se": 1.2}, about)
    assert "60% of its worth" in sentence and "--batches=139 --reference=288, 5.8 times as long" in sentence
    assert worth.more_batches({"worth": -2.0, "worth_se": 0.49}, about) == []
    assert len(worth.more_batches({"worth": -2.0, "worth_se": 0.51}, about)) == 1
