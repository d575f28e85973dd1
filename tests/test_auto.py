"""--is_cap=auto, --correction=auto: against gradients by autograd and plain loops, against runs with a fixed cap, and
itself resumed and on two ranks."""

import copy
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import f64, make_cfg, make_groups, tiny_model
from test_train import SEVERAL_PROCESSES, flags, run_to_the_end, saved_at, since_the_epoch, timeless, train_here

import auto as auto_file
import batching
import checkpoint
import corrections
import objectives
import worth as worth_file
from auto import Chooser
from flags import UserError
from learner import Comm, Learner
from run import read_metrics

__all__ = ["train_here"]  # a fixture

# ---------------------------------------------------------------------------------------------------------------------
# The law, on gradients that are enumerated
# ---------------------------------------------------------------------------------------------------------------------

AUTO = {"cap": dict(objective="tis", is_cap="auto"), "cap of R": dict(objective="seq_tis", is_cap="auto")}
AUTO["correction"] = dict(objective="grpo", correction="auto")
FIXED = {"none": ("none", None), "tis_2": ("tis", 2.0), "icepop": ("icepop", None), "seq_tis_1": ("seq_tis", 1.0)}
FIXED |= {"seq_tis_4": ("seq_tis", 4.0), "prefix_tis_1": ("prefix_tis", 1.0), "retrace_seq": ("retrace_seq", None)}
FIXED |= {"seq_mis": ("seq_mis", None)}


def log_probs(model, group, response) -> torch.Tensor:
    """log p of each token of a response, by one forward pass of its own."""
    ids = torch.from_numpy(np.concatenate([group.prompt_ids, response.tokens])).long()[None]
    logits = model(ids).logits[0, len(group.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(response.tokens)), ids[0, len(group.prompt_ids) :]]


def groups_near(model, seed: int, n_groups: int = 4, noise: float = 0.7):
    """Made-up groups whose sampler differs from the model by `noise` nats a token."""
    groups = make_groups(n_groups, seed=seed)
    rng = np.random.default_rng(seed)
    for group in groups:
        for r in group.responses:
            r.reward = float(np.mean(r.tokens % 2))
            with torch.no_grad():
                r.logp_inf = (log_probs(model, group, r).numpy() + noise * rng.normal(size=len(r.tokens))).astype("f4")
    return groups


class Handed:
    """A source that hands out these batches of groups, and notes its sequence numbers."""

    def __init__(self, batches):
        self.batches, self.sequence, self.asked = list(batches), 0, []

    def next(self, n_groups: int, version: int):
        self.asked.append(self.sequence)
        self.sequence += n_groups
        return self.batches.pop(0)


def make_chooser(monkeypatch, on_policy, controllers=None, **changes):
    """A chooser for a float64 learner of two tiny models or one; on_policy: the batches of its probes."""
    cfg = make_cfg(train_batch=16, rollout_batch=16, micro_tokens=200, auto_every=3, **changes)
    actor = tiny_model(1, dtype=f64) if cfg.actor != "none" else None
    learner = Learner(tiny_model(0, layers=2, dtype=f64), actor, cfg, Comm())
    source = Handed(on_policy)
    monkeypatch.setattr(auto_file, "on_policy_source", lambda *_: source)
    controllers = {} if controllers is None else controllers
    return Chooser(SimpleNamespace(cfg=cfg), learner, controllers), learner, controllers


def weight_by_hand(name: str, auto: str, log_r: list[float]) -> list[float]:
    """keep x weight of each token of a response, from its log-ratios alone."""
    r = [math.exp(x) for x in log_r]
    R = math.exp(sum(log_r))
    if auto == "cap":
        return [min(x, float(name)) for x in r]
    if auto == "cap of R":
        return [min(R, float(name))] * len(r)
    until = [math.exp(sum(log_r[: t + 1])) for t in range(len(r))]
    low = [math.exp(sum(min(x, 0.0) for x in log_r[: t + 1])) for t in range(len(r))]
    return {
        "none": [1.0] * len(r),
        "tis_2": [min(x, 2.0) for x in r],
        "icepop": [x if 0.5 <= x <= 5 else 0.0 for x in r],
        "seq_tis_1": [min(R, 1.0)] * len(r),
        "seq_tis_4": [min(R, 4.0)] * len(r),
        "prefix_tis_1": [min(x, 1.0) for x in until],
        "retrace_seq": [x * min(R, 1.0) for x in low],
        "seq_mis": [R if R <= 4 else 0.0] * len(r),
    }[name]


def gradients_by_hand(model, groups, weighers) -> list[np.ndarray]:
    """For each of these, d/d weights of (1 / tokens) sum_t w_t A log p_t, of all parameters in one vector."""
    totals, count = [0.0] * len(weighers), 0
    for group in groups:
        rewards = [r.reward for r in group.responses]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((x - mean) ** 2 for x in rewards) / (len(rewards) - 1))
        for r in group.responses:
            logp = log_probs(model, group, r)
            held = [t for t in range(len(r.tokens)) if r.loss_mask[t]]
            log_r = [float(logp[t].detach()) - float(r.logp_inf[t]) for t in held]
            for i, weigh in enumerate(weighers):
                for t, w in zip(held, weigh(log_r), strict=True):
                    totals[i] = totals[i] + w * (r.reward - mean) / (std + 1e-6) * logp[t]
            count += len(held)
    found = [torch.autograd.grad(x / count, list(model.parameters()), retain_graph=True) for x in totals]
    return [np.concatenate([x.numpy().ravel() for x in one]) for one in found]


@pytest.mark.parametrize("auto", AUTO)
@pytest.mark.parametrize("actor", ["none", "base:actor"])
def test_cosines_of_two_probes_by_plain_loops(auto, actor, monkeypatch):
    """After two probes: faded sums of <g_c, g>, |g_c|^2 and |g|^2, with every gradient from autograd alone."""
    model = tiny_model(0, layers=2, dtype=f64)
    on_policy = [groups_near(model, seed, noise=0.0) for seed in range(20, 24)]
    for first, second in (on_policy[:2], on_policy[2:]):
        second[:2] = first[:2]  # so that their gradients have something in common
    trained_on = [groups_near(model, seed) for seed in (3, 4)]
    trained_on[1][:2] = copy.deepcopy(on_policy[2][:2])
    for response in (r for group in trained_on[1][:2] for r in group.responses):
        response.logp_inf = response.logp_inf + np.linspace(-0.4, 0.5, len(response.logp_inf), dtype="f4")
    chooser, learner, _ = make_chooser(monkeypatch, on_policy, actor=actor, **AUTO[auto])
    logged = [chooser.choose(groups, update) for groups, update in zip(trained_on, (0, 3), strict=True)]

    names = list(chooser.candidates)
    weighers = [lambda log_r, name=name: weight_by_hand(name, auto, log_r) for name in names]
    g = [gradients_by_hand(model, groups, [lambda log_r: [1.0] * len(log_r)])[0] for groups in on_policy]
    means = (g[0] + g[1]) / 2, (g[2] + g[3]) / 2
    cosines = {}
    for name, *own in zip(names, *(gradients_by_hand(model, groups, weighers) for groups in trained_on), strict=True):
        along = 0.5 * (own[0] @ means[0]) + own[1] @ means[1]
        squares = 0.5 * (own[0] @ own[0]) + own[1] @ own[1]
        cosines[name] = along / math.sqrt(squares * (0.5 * (means[0] @ means[0]) + means[1] @ means[1]))
    best = max(cosines, key=cosines.get)
    signal = 0.5 * (g[0] @ g[1]) + g[2] @ g[3]
    noise = sum(share * ((a @ a + b @ b) / 2 - a @ b) for share, a, b in ((0.5, *g[:2]), (1, *g[2:])))
    kappa = cosines[best] * math.sqrt((0.5 * (means[0] @ means[0]) + means[1] @ means[1]) / signal)
    assert 0 < kappa < 1 and signal > 0
    assert logged[1]["auto/worth"] == pytest.approx(noise / signal * kappa**2 / (1 - kappa**2), rel=1e-3)
    assert len(cosines) == (8 if auto == "correction" else 5)
    for name, cosine in cosines.items():
        assert logged[1][f"auto/cosine/{name}"] == pytest.approx(cosine, rel=1e-4, abs=1e-6), name
    assert sorted(cosines.values())[-1] > sorted(cosines.values())[-2] + 1e-4  # no tie
    assert learner.cfg == chooser.candidates[best]
    if auto == "correction":
        assert logged[1]["auto/correction"] == best and learner.cfg.correction == FIXED[best][0]
    else:
        assert logged[1]["auto/is_cap"] == float(best) == learner.cfg.is_cap
    assert [x["auto/responses"] for x in logged] == [32, 64]


@pytest.mark.parametrize(
    "single, g, along, own, worth",
    [
        (3.0, 2.0, 1.0, 3.0, 1.0),  # signal 1, noise 2; the step is an on-policy one
        (3.0, 2.0, 0.5, 3.0, 2 * 0.25 / (3 - 0.25)),  # half as long along g, as noisy
        (3.0, 2.0, -0.5, 3.0, 0.0),  # backwards
        (3.0, 1.5, 1.0, 3.0, math.nan),  # g_1 and g_2 have nothing in common
        (3.0, 3.0, 1.0, 3.0, math.nan),  # they are the same
        (3.0, 2.0, 2.0, 3.0, math.nan),  # straighter than g itself
    ],
)
def test_worth_of_the_one_in_force(single, g, along, own, worth, monkeypatch):
    chooser, _, controllers = make_chooser(monkeypatch, [], actor="base:actor", distill_worth_target=0.5)
    assert list(chooser.candidates) == [""]
    controllers["auto"].update(single=single, g=g, along={"": along}, own={"": own})
    monkeypatch.setattr(chooser, "weigh", lambda *_: None)
    logged = chooser.choose([], 0)
    assert logged == {"auto/responses": 0, "auto/worth": pytest.approx(worth, nan_ok=True)}
    assert controllers["worth"] == pytest.approx(worth, nan_ok=True)
    assert chooser.choose([], 1) == {"auto/responses": 0}, "between two measurements the last one stands"
    assert controllers["worth"] == pytest.approx(worth, nan_ok=True)


def test_probes_have_problems_of_their_own(monkeypatch):
    model = tiny_model(0, layers=2, dtype=f64)
    chooser, _, _ = make_chooser(monkeypatch, [groups_near(model, s) for s in range(6)], **AUTO["cap"])
    asked = []
    for update in range(9):
        source = auto_file.on_policy_source()
        source.sequence = 0
        logged = chooser.choose(groups_near(model, 9), update)
        asked.append(source.asked[-2:] if update % 3 == 0 else None)
        assert ("auto/cosine/1" in logged) == (update % 3 == 0)
    assert [x for x in asked if x] == [[0, 4], [8, 12], [16, 20]]


# ---------------------------------------------------------------------------------------------------------------------
# A probe leaves nothing behind
# ---------------------------------------------------------------------------------------------------------------------


def update(learner, groups) -> dict:
    batch = batching.collate(groups, learner.cfg, learner.version)
    return learner.update(batch, objectives.prepare(batch, learner.comm, learner.cfg, {}))


def whole_state(learner) -> list:
    """Weights, gradients, optimizers and counters, and the random number generators."""
    state = checkpoint.rng_state()
    weights = [(p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in learner.models.parameters()]
    return copy.deepcopy([weights, learner.state_dict(), learner.models.training, state])


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("actor", ["none", "base:actor"])
def test_a_probe_moves_nothing_and_the_update_after_it_is_that_of_the_fixed_cap(actor, monkeypatch):
    model = tiny_model(0, layers=2, dtype=f64)
    first, second = groups_near(model, 1), groups_near(model, 2)
    on_policy = [groups_near(model, seed, noise=0.0) for seed in (5, 6)]
    more = {**AUTO["cap"], "actor": actor, "guard": "stop", "guard_kl": 9.0}
    chooser, probed, controllers = make_chooser(monkeypatch, on_policy, **more)
    update(probed, first)
    before = whole_state(probed)

    class Noisy(Handed):
        def next(self, *args):
            torch.rand(3)  # a sampler that takes from the generators
            np.random.rand(3)
            return super().next(*args)

    noisy = Noisy(on_policy)
    monkeypatch.setattr(auto_file, "on_policy_source", lambda *_: noisy)
    chooser.choose(second, 0)
    assert same(whole_state(probed), before)
    assert not noisy.batches and controllers["auto"]["responses"] == 32

    fixed = make_chooser(monkeypatch, [], **more)[1]
    update(fixed, first)
    fixed.cfg = probed.cfg
    assert update(fixed, second) == update(probed, second)
    assert same(whole_state(fixed), whole_state(probed))


def test_one_gradient_is_kept_while_the_next_is_made(monkeypatch):
    """plan.py counts on it."""
    model = tiny_model(0, layers=2, dtype=f64)
    chooser, _, _ = make_chooser(monkeypatch, [groups_near(model, s) for s in (20, 21)], **AUTO["cap"])
    gradient, made, alive = chooser.gradient, [], []

    def noting(*how):
        alive.append(sum(x() is not None for x in made))
        found = gradient(*how)
        made.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(chooser, "gradient", noting)
    chooser.choose(groups_near(model, 3), 0)
    assert alive == [0, 1, 1, 1, 1, 1, 1]


def test_a_probe_that_is_not_finite_says_nothing(monkeypatch):
    model = tiny_model(0, layers=2, dtype=f64)
    on_policy = [groups_near(model, seed, noise=0.0) for seed in (5, 6, 7, 8)]
    chooser, learner, controllers = make_chooser(monkeypatch, on_policy, **AUTO["cap"])
    assert controllers["auto"]["chosen"] == "2" and learner.cfg.is_cap == 2.0
    chooser.choose(groups_near(model, 3), 0)
    known = copy.deepcopy(controllers["auto"])
    assert known["own"]["2"] > 0
    on_policy[2][0].responses[0].reward = math.inf
    chooser.choose(groups_near(model, 3), 3)
    assert {**known, "responses": 64} == controllers["auto"]
    assert learner.cfg.is_cap == float(known["chosen"])


def test_ties_go_to_what_is_in_force(monkeypatch):
    chooser, learner, controllers = make_chooser(monkeypatch, [], **AUTO["cap"])
    monkeypatch.setattr(chooser, "weigh", lambda *_: None)
    for name in chooser.candidates:
        alike = {"along": dict.fromkeys(chooser.candidates, 0.3), "own": dict.fromkeys(chooser.candidates, 1.0)}
        controllers["auto"].update(alike, g=1.0, chosen=name)
        assert chooser.choose([], 0)["auto/is_cap"] == learner.cfg.is_cap == float(name)
        controllers["auto"]["own"]["4"] = 0.9  # less noise
        assert chooser.choose([], 0)["auto/is_cap"] == learner.cfg.is_cap == 4.0
        controllers["auto"]["own"]["4"] = 0.0  # nothing kept
        assert chooser.choose([], 0)["auto/cosine/4"] == 0.0 and learner.cfg.is_cap != 4.0


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs
# ---------------------------------------------------------------------------------------------------------------------

RUN = dict(objective="tis", is_cap="auto", auto_every=2)


def without_auto(rows) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("auto/")} for row in rows]


@pytest.mark.parametrize("actor", [False, True])
def test_one_candidate_alone_trains_as_the_fixed_cap(actor, solvers, tmp_path, train_here, monkeypatch):
    """Every probe is taken, and the run is that without them bit for bit."""
    monkeypatch.setattr(corrections, "CAPS", ())
    more = {} if actor else {"actor": "none"}
    train_here(flags(solvers, tmp_path / "auto", **RUN, **more))
    train_here(flags(solvers, tmp_path / "fixed", objective="tis", **more))
    auto, fixed = timeless(tmp_path / "auto"), timeless(tmp_path / "fixed")
    assert without_auto(auto) == fixed
    assert [row["auto/responses"] for row in auto[1:]] == [32, 32, 64, 64, 96, 96]
    assert {row["auto/is_cap"] for row in auto[1:]} == {2.0}
    mine, theirs = saved_at(tmp_path / "auto", 6), saved_at(tmp_path / "fixed", 6)
    different = [name for name in theirs if mine[name] != theirs[name] and not since_the_epoch(name)]
    assert different == []
    assert all("/controllers/auto/" in x or x.endswith("/controllers/worth") for x in mine.keys() - theirs.keys())
    assert read_metrics(tmp_path / "auto")[1]["auto_s"] > 0


KEPT = dict(loss_denominator="kept", obrs_mask="bernoulli")


@pytest.mark.parametrize(
    "more",
    [
        dict(objective="tis", is_cap="auto", normalize_weights=True, actor="none"),
        dict(objective="grpo", correction="auto", normalize_weights=True, actor="none"),
        dict(objective="jackpot", distill_worth_target=0.5, obrs_target="new", kappa="exact", obrs_z="bracket", **KEPT),
        dict(objective="jackpot", distill_worth_target=0.5, **KEPT),
    ],
)
def test_a_probe_knows_what_must_be_known_before_a_backward(more, solvers, tmp_path, train_here):
    """The mean weight, what is kept, kappa of the policy as it is now: of the minibatch; g has none of them."""
    train_here(flags(solvers, tmp_path / "run", auto_every=1, steps=2, **more))
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 2 and all(math.isfinite(row["loss"]) and row["auto/responses"] for row in rows)


@pytest.mark.parametrize("auto", [dict(objective="seq_tis", is_cap="auto"), AUTO["correction"]])
def test_resumed_is_the_unstopped_run(auto, solvers, tmp_path, train_here):
    """Stopped between two probes and resumed: evidence, choice and everything else go on, with truncated sampling."""
    more = dict(auto_every=2, top_p=0.95, **auto)
    train_here(flags(solvers, tmp_path / "whole", **more))
    train_here(flags(solvers, tmp_path / "run", **{**more, "steps": 3}))
    train_here(["--resume", f"--out={tmp_path / 'run'}", "--steps=6"])
    whole, run = timeless(tmp_path / "whole"), timeless(tmp_path / "run")
    kept = [{k: v for k, v in row.items() if not k.startswith(("eval/", "sync/"))} for row in whole]
    assert [{k: v for k, v in row.items() if not k.startswith(("eval/", "sync/"))} for row in run] == kept
    mine, theirs = saved_at(tmp_path / "run", 6), saved_at(tmp_path / "whole", 6)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if mine[name] != theirs[name] and not since_the_epoch(name)] == []
    assert len([name for name in mine if "/controllers/auto/own/" in name]) == (5 if "is_cap" in auto else 8)
    assert sum("auto/cosine/seq_tis_1" in row or "auto/cosine/1" in row for row in run) == 3


def test_lambda_is_steered_by_worth(solvers, tmp_path, train_here):
    """Jackpot from a weak distillation, resumed between two measurements: each measurement moves lambda by the gain
    times its distance from the target, update by update, and nothing else of the run's first update is changed."""
    loop = dict(objective="jackpot", auto_every=2, distill_worth_target=0.25, distill_lambda=0.01, distill_gain=0.3)
    train_here(flags(solvers, tmp_path / "whole", **loop))
    train_here(flags(solvers, tmp_path / "run", **{**loop, "steps": 3}))
    train_here(["--resume", f"--out={tmp_path / 'run'}", "--steps=6"])
    train_here(flags(solvers, tmp_path / "fixed", objective="jackpot", distill_lambda=0.01, steps=1))
    whole, run, fixed = ([row for row in timeless(tmp_path / x) if "loss" in row] for x in ("whole", "run", "fixed"))
    assert [row["loss"] for row in run] == [row["loss"] for row in whole]
    assert without_auto(whole[:1])[0]["loss"] == fixed[0]["loss"]
    wanted, worth, moved = 0.01, math.nan, 0
    for i, row in enumerate(whole):
        assert row["distill_lambda"] == pytest.approx(wanted, rel=1e-9)
        assert ("auto/worth" in row) == (i % 2 == 0)
        if i % 2 == 0:
            worth = math.nan if row["auto/worth"] is None else row["auto/worth"]
        if not math.isnan(worth):
            moved += 1
            wanted *= math.exp(0.3 * max(-1.0, min(1.0, (0.25 - worth) / 0.25)))
    assert moved >= 2, "no measurement stood out of its noise: take another seed"


@pytest.mark.slow
@SEVERAL_PROCESSES
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_choose_as_one(parallel, solvers, tmp_path):
    """The same groups on two ranks, sharded or not: the same cosines, responses and choice at both probes. At the
    second one DDP writes every gradient into the same memory."""
    more = dict(RUN, steps=2, auto_every=1, train_batch=32, save_every=0)
    run_to_the_end(flags(solvers, tmp_path / "one", **more))
    run_to_the_end(flags(solvers, tmp_path / "two", parallel=parallel, **more), ranks=2)
    for one, two in zip(*(read_metrics(tmp_path / name)[1:] for name in ("one", "two")), strict=True):
        names = [name for name in one if name.startswith("auto/")]
        assert len(names) == 8
        for name in names:
            same = two[name] is None if one[name] is None else two[name] == pytest.approx(one[name], rel=2e-3)
            assert same, name  # worth is None where two batches do not tell it
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3, abs=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# What can be chosen
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, row in corrections.CORRECTIONS.items() if "is_cap" in row.bounds])
def test_every_correction_with_a_cap_has_caps_of_its_own(name):
    """Its default first, then the list's; those that its own rules refuse are left out."""
    base = "new" if name == "tis_adjusted" else "ref"
    cfg = make_cfg(objective="none", correction=name, is_cap="auto", ratio_base=base)
    found = corrections.candidates(cfg)
    caps = [one.is_cap for one in found.values()]
    assert caps[0] == corrections.CORRECTIONS[name].bounds["is_cap"]
    assert len(set(caps)) == len(caps) and (1.0 in caps) == (name != "tbpo_mismatch")
    for one in found.values():
        objectives.check(one)
        assert one.correction == name


def test_the_corrections_to_choose_among_need_nothing_but_r():
    found = corrections.candidates(make_cfg(**AUTO["correction"]))
    assert {name: (one.correction, one.is_cap) for name, one in found.items()} == FIXED
    for one in found.values():
        assert one.correction not in corrections.USES_Z
        bounds = corrections.CORRECTIONS[one.correction].bounds
        assert (one.rs_low, one.rs_high) == (bounds.get("rs_low"), bounds.get("rs_high"))


def test_a_floor_leaves_the_caps_above_it():
    assert list(corrections.candidates(make_cfg(objective="tis", is_cap="auto", is_floor=2.0))) == ["4", "8"]


def test_without_auto_there_is_one_candidate():
    cfg = make_cfg(objective="tis")
    assert corrections.candidates(cfg) == {"": cfg}


def test_rows_of_worth_name_their_caps():
    with pytest.raises(UserError, match="--rows: tis is_cap=auto leaves the choice to auto; name each cap in a row"):
        worth_file.parse(["--model=base:policy", "--actor=none", "--rollout=hf", "--rows=tis is_cap=auto"])
