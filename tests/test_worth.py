"""worth.py against exact gradients, plain loops, known distributions, and more ranks."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import TINY_TASK, f64, make_cfg, make_groups, tiny_model
from torchrun import torchrun

import objectives
import worth
from learner import Learner
from machinery import measure, run
from machinery.flags import UserError
from machinery.measure import FOLDS, Reference, RowSamples
from machinery.ranks import Comm
from objectives import REF
from source import LocalSource
from worth import Measurement, Weights


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


def exact_gradient(learner, cfg, batch) -> list[torch.Tensor]:
    """The policy's gradient from the learner's update."""
    columns = {name: x for name, x in learner.ref_columns(batch).items() if name in REF.values()}
    batch = replace(batch, **columns)
    learner.models.zero_grad()
    learner.backward(batch, objectives.prepare(batch, learner.comm, cfg, {}))
    return [-p.grad for p in learner.models.policy.parameters()]


ROWS = [row.split() for row in worth.ROWS.split(";")]


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_coefficients_and_slopes_of_a_row_give_its_gradient(row, monkeypatch):
    """sum_t c_t s_t along v = <gradient of the row's update, v>, for every row of the table."""
    monkeypatch.setattr(worth, "STEP", 1e-6)  # differences are exact in the limit, float64 is precise enough
    flags = {key: float(value) if "cap" in key else value for key, value in (x.split("=") for x in row[1:])}
    if row[0] == "geo_rs":
        flags = {"rs_low": 0.05, "rs_high": 1.0}  # random models are far apart: keep a part of the responses
    cfg, learner, batch = learner_and_batch(objective=row[0], actor="base:actor", **flags)
    c = worth.coefficients(batch, learner.comm, cfg)
    weights = Weights(learner)
    exact = [x.reshape(-1) for x in exact_gradient(learner, cfg, batch)]
    assert weights.learner.dot(exact, exact) > 0
    directions = [weights.random(0), exact]
    for v, s in zip(directions, weights.slopes(batch, directions), strict=True):
        want = sum(float((a * b).sum()) for a, b in zip(exact, v, strict=True))
        size = float((c * s).abs().sum())
        assert float((c * s).sum()) == pytest.approx(want, abs=1e-5 * size) and size > 0


def test_rows_measured_together_have_their_own_batches(monkeypatch):
    """Every row has the advantages, the Z and the coefficients of a separate measurement."""
    flags = {"tis": {}, "no std": {"advantage": "grpo_no_std"}}
    flags |= {str(x): {"objective": "jackpot", "obrs_lambda": x} for x in (0.8, 1.3)}
    cfgs, wanted = {}, {}
    for name, changes in flags.items():
        cfg, learner, alone = learner_and_batch(**{"objective": "tis", "actor": "base:actor", **changes})
        cfgs[name], wanted[name] = cfg, (alone.adv, worth.coefficients(alone, learner.comm, cfg))
    passes, score = [], learner.score
    monkeypatch.setattr(learner, "score", lambda batch, needs: passes.append(needs) or score(batch, needs))
    together = worth.batches_of(learner, ragged(4, seed=3), cfgs)
    assert len(passes) == 2  # one for each lambda; the other rows need only log-probabilities
    assert list(together) == list(flags)
    for name, (adv, c) in wanted.items():
        assert torch.equal(together[name].adv, adv)
        assert torch.allclose(worth.coefficients(together[name], learner.comm, cfgs[name]), c, atol=1e-12)
    assert not torch.allclose(together["tis"].adv, together["no std"].adv)
    assert not torch.allclose(together["0.8"].z_ref, together["1.3"].z_ref)


def test_steps_are_small_and_are_undone_to_the_bit():
    cfg, learner, batch = learner_and_batch(objective="none")
    weights, before = Weights(learner), [p.clone() for p in learner.models.policy.parameters()]
    v = weights.random(0)
    moved = weights.slopes(batch, [v])[0][batch.mask] * worth.STEP / weights.spreads[id(v)]
    assert 0.5 * worth.STEP < float(moved.square().mean().sqrt()) < 2 * worth.STEP
    assert all(map(torch.equal, before, learner.models.policy.parameters()))


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_a_share_is_measured_and_the_rest_is_frozen(share):
    """The gradient and steps are those of the whole, of the drawn tensors alone."""
    cfg, learner, batch = learner_and_batch(objective="none")
    policy, exact = learner.models.policy, exact_gradient(learner, cfg, batch)
    exact = dict(zip(policy.parameters(), exact, strict=True))
    learner.models.zero_grad()
    worth.draw(policy, share)
    drawn = [p for p in policy.parameters() if p.requires_grad]
    other = tiny_model(5, layers=2, dtype=f64)  # all ranks and repeated measurements draw the same
    worth.draw(other, share)
    assert [p.requires_grad for p in policy.parameters()] == [p.requires_grad for p in other.parameters()]
    size = sum(p.numel() for p in drawn) / sum(p.numel() for p in policy.parameters())
    assert 0.6 * share < size <= share and (share < 1) == (len(drawn) < len(exact))
    weights, before = Weights(learner), {p: p.detach().clone() for p in policy.parameters()}
    learner.backward(batch, objectives.prepare(batch, learner.comm, cfg, {}))
    for p, gradient in zip(drawn, weights.gradient(), strict=True):
        assert torch.allclose(gradient, exact[p].reshape(-1), rtol=1e-9, atol=1e-12)
    weights.shift(weights.random(0), 0.125)
    assert all(bool((p != old).any()) == p.requires_grad for p, old in before.items())
    weights.shift(weights.random(0), 0.0)
    assert all(torch.equal(p, old) for p, old in before.items())


def test_directions_are_independent_signs():
    weights = Weights(learner_and_batch(objective="none")[1])
    a, b, again = weights.random(0), weights.random(1), weights.random(0)
    n = sum(x.numel() for x in a)
    assert {x.dtype for x in a} == {torch.int8}  # 32 directions are kept, each at a quarter of the parameters' bytes
    assert all(torch.equal(x, y) for x, y in zip(a, again, strict=True))
    assert weights.learner.dot(a, a) == n and abs(weights.learner.dot(a, b)) < 4 * math.sqrt(n)
    large = [x.double() for x in a if len(x) > 500]
    pairs = [(x, y) for i, x in enumerate(large) for y in large[:i] if x.shape == y.shape]
    assert pairs and all(abs((x * y).mean()) < 0.3 for x, y in pairs)  # signs differ between parameters


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


def estimate(seen, reference) -> dict[str, float]:
    return measure.estimate(np.array(seen.along), np.concatenate(seen.noise), reference, GROUPS)


def true_numbers(scale, bias, noise, noise_on) -> dict[str, float]:
    worth_ = scale**2 * noise_on / (bias**2 + noise)
    cosines = dict(
        batch_cosine=scale / math.hypot(scale, bias, math.sqrt(noise)), cosine=scale / math.hypot(scale, bias)
    )
    return dict(worth=worth_, scale=scale, bias=bias**2, noise=noise, noise_on=noise_on, **cosines)


def test_the_squared_gradient_is_estimated_from_pairs_of_folds():
    """The square of one fold's mean has its noise: only products of two folds are unbiased."""
    gram = np.array([[4.0, 1.0, 2.0, 9.0], [1.0, 6.0, 3.0, 9.0], [2.0, 3.0, 5.0, 9.0], [9.0, 9.0, 9.0, 7.0]])
    reference = measure.Reference([], gram, np.ones(4), 3, np.ones((2, 4)))
    assert reference.square([0, 1, 2]) == (1 + 2 + 3) / 3 and reference.square([0, 3]) == 9


@pytest.mark.parametrize("truth", [dict(scale=0.7, bias=0.4, noise=1.5), dict(scale=1.0, bias=0.0, noise=0.8)])
def test_estimates_are_right_on_average_and_within_their_errors(truth):
    """Of a known distribution, 40 times: means are right, errors estimate the scatter and mostly hold the truth."""
    estimates = [measure.with_errors(*synthetic(seed, **truth), GROUPS) for seed in range(40)]
    for name, want in true_numbers(**truth, noise_on=0.8).items():
        values, errors = (np.array([x[key] for x in estimates]) for key in (name, f"{name}_se"))
        if truth["bias"] == 0 and name in ("bias", "cosine"):  # at the end of their range
            assert abs(values.mean() - want) < 0.05
            continue
        scatter = values.std(ddof=1)
        near = 3 * scatter / math.sqrt(len(values)) + 0.02 * want
        assert abs(values.mean() - want) < near + (0.02 if truth["bias"] == 0 else 0.0), name
        assert 0.6 * scatter < errors.mean() < 2 * scatter, name
        assert np.mean(np.abs(values - want) < 2 * errors) >= 0.8, name


def test_cosine_and_worth_in_known_cases():
    """cosine^2 = 1 / (1 + noise_on / worth). A row that rejects everything, or goes against g, is worth 0."""
    seen, reference = synthetic(3)
    x = estimate(seen, reference)
    assert x["batch_cosine"] ** 2 == pytest.approx(1 / (1 + x["noise_on"] / x["worth"]))
    nothing, away = (RowSamples([a * x for x in seen.along], [a * x for x in seen.noise]) for a in (0, -1))
    x = measure.with_errors(nothing, reference, GROUPS)
    assert x["worth"] == x["batch_cosine"] == x["cosine"] == x["scale"] == x["worth_se"] == 0 < x["noise_on"]
    x = estimate(away, reference)
    assert x["worth"] == 0 and x["batch_cosine"] < -0.2 and x["cosine"] < -0.5


SMALL = ["--train_batch=32", "--rollout_batch=32", "--group_size=4", "--max_tokens=8", "--rollout=hf"]
SMALL += ["--task=arith", "--rollout_dtype=float32", *(f"--{key}={value}" for key, value in TINY_TASK.items())]
LEAST = ["--batches=3", "--reference=16", "--directions=4", "--noise_batches=3"]
BRIEF = ["--batches=6", "--reference=24", "--directions=8", "--noise_batches=6"]


def weigh(tmp_path, models, *flags, actor="none") -> dict:
    actor = models / actor if actor != "none" else actor
    common = [f"--model={models / 'policy'}", f"--actor={actor}", *SMALL, f"--json={tmp_path / 'w.json'}"]
    return worth.main([*common, *flags])


@pytest.fixture
def measured(solvers):
    """A function: the measurement of the policy with these flags, after its ref passes."""

    def start(*flags):
        common = [f"--model={solvers / 'policy'}", "--actor=none", *SMALL, *BRIEF]
        return Measurement(*worth.parse([*common, *flags]))

    return start


def test_the_policys_responses_are_worth_1(tmp_path, solvers, capsys):
    """Before training; the result is printed and written."""
    flags = ["--batches=12", "--reference=24", "--directions=16", "--noise_batches=12", "--rows=none; tis"]
    results = weigh(tmp_path, solvers, *flags, "--train_batch=96", "--rollout_batch=96")
    for x in results["rows"].values():
        assert abs(x["worth"] - 1) < 2.5 * x["worth_se"] < 1.5
        assert abs(x["scale"] - 1) < 2.5 * x["scale_se"] < 0.8
        assert x["noise"] == pytest.approx(x["noise_on"], rel=0.3)
    about, printed = results["about"], capsys.readouterr().out
    assert about["kl"] < 1e-9 and all(abs(half - 1) < 0.5 for half in about["halves"])
    assert "the paper's values" not in printed  # a line of train.py
    assert json.loads((tmp_path / "w.json").read_text())["rows"] == results["rows"]


def test_a_policy_without_rewards_has_no_gradient(tmp_path, folders):
    with pytest.raises(UserError, match="is not distinguishable from its noise"):
        weigh(tmp_path, folders, *LEAST, "--rows=none")


def test_the_samples_of_a_row_by_hand(measured, monkeypatch):
    """Sums over all tokens along the gradient, sums over the tokens of each group along random directions."""
    monkeypatch.setattr(run, "sleep_level", pytest.fail)  # on a GPU the engine would drop its weights
    m = measured("--rows=is")
    batch = worth.batches_of(m.scorer, ragged(8, seed=5), m.rows)["is"]
    slopes = m.weights.slopes(batch, m.random)
    c, seen = worth.coefficients(batch, m.comm, m.cfg), RowSamples()
    m.add_to(seen, worth.Slopes({"is": batch}, slopes[:FOLDS], slopes), c)
    assert seen.along[0][1] == pytest.approx(float((c * slopes[1]).sum()))
    assert seen.noise[0].shape == (8, 8)  # groups, directions
    assert seen.noise[0].sum(0) == pytest.approx([float((c * s).sum()) for s in slopes])
    assert seen.noise[0][2, 5] == pytest.approx(float((c * slopes[5])[batch.group == 2].sum()))


def test_all_batches_are_counted_and_the_sampler_ends_first(measured, monkeypatch):
    """Totals are sums over all batches; a share applies to the measured parameters; the engine is closed once."""
    closed = []
    monkeypatch.setattr(LocalSource, "close", lambda source: closed.append(source))
    m = measured("--rows=none; tis", "--share=0.3")
    assert len(closed) == 1 and m.sampler is None
    measured_entries = sum(len(x) for x in m.weights.flat)
    assert measured_entries <= 0.3 * sum(p.numel() for p in m.scorer.models.policy.parameters())
    list(m.slopes(m.reference()))
    assert [m.totals[who][4] for who in ("on_policy", "sampler")] == [24 * 32, 6 * 32]
    batches = [by_row["tis"] for by_row in m.batches]
    assert m.totals["sampler"][1] == sum(int(batch.length.sum()) for batch in batches)
    assert len({tuple(batch.tokens.flatten().tolist()) for batch in batches}) == 6
    batches[0].mask[:, 0] = False  # masked tokens are in no sum
    m.totals["sampler"][:] = 0
    m.count("sampler", batches[0], 2.0)
    assert m.about()["kl"] == pytest.approx(2.0 / int(batches[0].mask.sum()))


def test_the_engine_records_the_largest_top_k_of_all_rows(measured):
    batch = measured("--rows=none; jackpot obrs_topk=7; tis").batches[0]["tis"]
    assert batch.support_ids.shape[2] == 8  # the sampled token and the top 7


def test_samplers_of_different_models(tmp_path, solvers, capsys):
    """Without a correction the step is not the policy's."""
    of_actor = weigh(tmp_path, solvers, *BRIEF, "--rows=none; prefix_tis; gspo", actor="actor")
    assert "mask_cut differ from g's, which scale and bias include: gspo\n" in capsys.readouterr().out
    assert of_actor["rows"]["none"]["worth"] < 0.5 * of_actor["rows"]["prefix_tis"]["worth"]


def test_truncated_sampling_is_mismatch_unless_the_learner_truncates(tmp_path, solvers):
    """All weights are 1 if both sides truncate, else the kept mass; on-policy responses are not truncated."""
    rewards = {}
    for kind in ("off", "replay"):
        cut = weigh(tmp_path, solvers, *LEAST, "--rows=none; is", "--top_p=0.5", f"--keep_sampling_mask={kind}")
        equal = cut["rows"]["is"] == pytest.approx(cut["rows"]["none"], rel=1e-3, abs=1e-6)
        assert (cut["about"]["kl"] < 1e-6) == equal == (kind != "off")
        rewards[kind] = cut["about"]["on_policy/reward"]
    assert rewards["off"] < rewards["replay"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel, share", [("ddp", 1.0), ("fsdp", 0.3)])
def test_two_ranks_give_the_result_of_one(parallel, share, tmp_path, solvers):
    """The same groups on two ranks: g, its noise and every row's scale agree; with DDP all numbers do."""
    flags = [*BRIEF, "--rows=none; prefix_tis", f"--share={share}"]
    one = weigh(tmp_path, solvers, *flags, actor="actor")
    models = [f"--model={solvers / 'policy'}", f"--actor={solvers / 'actor'}"]
    torchrun("../worth.py", *models, *SMALL, *flags, f"--parallel={parallel}", f"--json={tmp_path / 'two.json'}")
    two = json.loads((tmp_path / "two.json").read_text())
    compared = ["scale", "noise_on", "scale_se"]  # shards have different random directions
    if parallel == "ddp":  # groups are in a different order: the jackknife leaves out different groups
        compared += [name for name in one["rows"]["none"] if not name.endswith("_se")]
    for row, numbers in one["rows"].items():
        for name in compared:
            assert two["rows"][row][name] == pytest.approx(numbers[name], rel=0.02, abs=1e-3), (row, name)
    assert two["about"]["kl"] == pytest.approx(one["about"]["kl"], rel=1e-3)


def test_flags_of_rows_and_of_g(folders):
    """Defaults apply to missing flags; g has the given advantages, and no correction, low bits or regularisation."""
    flags = [f"--model={folders / 'policy'}", "--actor=none", *SMALL, "--lr=1e-6", "--kl_coef=0.1"]
    flags += ["--entropy_coef=0.1", "--is_floor=0.1", "--advantage=rloo", "--rollout_quant=int8", "--mask_cut=True"]
    names = ["tis is_cap=3", "jackpot is_floor=0 obrs_mask=expected advantage=grpo"]
    _, rows, g = worth.parse([*flags, f"--rows={'; '.join(names)};"])
    tis, jackpot = rows.values()
    for cfg in (tis, g):
        assert (cfg.lr, cfg.group_size, cfg.max_tokens, cfg.advantage, cfg.mask_cut) == (1e-6, 4, 8, "rloo", True)
    assert (g.correction, g.surrogate, g.is_floor, g.rollout_quant) == ("none", "reinforce", 0, "none")
    assert (g.kl_coef, g.entropy_coef, tis.kl_coef) == (0.0, 0.0, 0.1) and list(rows) == names
    assert (tis.is_cap, tis.is_floor, tis.rollout_quant) == (3, 0.1, "int8")
    assert (jackpot.obrs_mask, jackpot.advantage, jackpot.is_floor) == ("expected", "grpo", 0)
    with pytest.raises(UserError, match="temperature=0.5 of 'tis temperature=0.5' is not a flag of an obj"):
        worth.parse([*flags, "--rows=tis; tis temperature=0.5"])


def test_the_engine_has_the_precision_of_the_run(solvers, tmp_path):
    """g is in float32 unless a flag says otherwise; the engine has the precision of the run, also from a file."""
    (tmp_path / "run.toml").write_text('dtype = "bfloat16"\nmax_tokens = 8\ntask = "arith"\n')
    custom = [f"--model={solvers / 'policy'}", f"--config={tmp_path / 'run.toml'}"]
    for flags, wanted in (
        (custom, ("bfloat16", "float32")),
        ([*custom, "--rollout_dtype=float16"], ("float16", "float32")),
        ([*custom, "--dtype=bfloat16"], ("bfloat16", "bfloat16")),
        ([], ("float32", "float32")),
    ):
        _, rows, plain = worth.parse(["--actor=none", "--rollout=hf", "--rows=tis", *flags])
        assert [(cfg.rollout_dtype, cfg.dtype) for cfg in (rows["tis"], plain)] == 2 * [wanted]
