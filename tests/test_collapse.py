"""results/collapse.py: AUC against plain loops, the rules on made-up runs, and that a left-out study is left out.
optim.Guard: where it fires, what it does, and that it goes on after a resume."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_cfg, make_groups, take_over
from ranks import make_learner
from test_learner import one_update, weights
from test_train import flags, train_here, without_sync

import batching
import checkpoint
import config
import train
from flags import UserError
from model import Needs
from optim import Guard
from results import collapse
from results.collapse import CANDIDATES, COLUMNS, Run
from run import read_metrics

__all__ = ["train_here"]  # a fixture


def loop_auc(x, lost, study=None) -> float:
    """Every pair in turn."""
    won = pairs = 0.0
    for i in range(len(x)):
        for j in range(len(x)):
            same = study is None or study[i] == study[j]
            if lost[i] and not lost[j] and same:
                pairs += 1
                won += 1.0 if x[i] > x[j] else 0.5 if x[i] == x[j] else 0.0
    return won / pairs


def run_of(values=(), columns=None, study="a", name="row-0", steps=100) -> Run:
    """A run of 100 blocks; values: its pass@1 at equally spaced updates, with an error of 0.01 each."""
    evals = [[i * steps // max(len(values) - 1, 1), y, 0.01] for i, y in enumerate(values)]
    own = {column: np.ones(100) for column in COLUMNS}
    return Run(study, name, steps, evals, own | (columns or {}))


def planted(n: int = 12, seed: int = 0):
    """(table of noise, lost, study) of four studies of n runs, a third of them lost."""
    rng = np.random.default_rng(seed)
    study = np.repeat(np.array(["a", "b", "c", "d"]), n)
    lost = np.tile(np.arange(n) % 3 == 0, 4)
    return rng.normal(size=(len(study), len(CANDIDATES))), lost, study


# ---------------------------------------------------------------------------------------------------------------------
# AUC
# ---------------------------------------------------------------------------------------------------------------------


def test_auc_is_the_share_of_pairs():
    rng = np.random.default_rng(0)
    for _ in range(20):
        x = rng.integers(0, 6, 30).astype(float)  # with ties
        lost = rng.random(30) < 0.3
        study = rng.choice(["a", "b", "c"], 30)
        assert collapse.auc(x, lost) == pytest.approx(loop_auc(x, lost))
        assert collapse.auc_inside(x, lost, study) == pytest.approx(loop_auc(x, lost, study))
    assert collapse.auc(np.array([1.0, 2.0]), np.array([False, True])) == 1
    assert math.isnan(collapse.auc(np.array([1.0, 2.0]), np.array([True, True])))


def test_a_study_that_lies_higher_as_a_whole_does_not_enter():
    x = np.array([1.0, 2.0, 11.0, 12.0])
    lost = np.array([True, False, True, False])
    study = np.array(["a", "a", "b", "b"])
    assert collapse.auc(x, lost) == 0.25
    assert collapse.auc_inside(x, lost, study) == 0


def test_the_interval_draws_the_seeds_of_a_row_together():
    rng = np.random.default_rng(1)
    once = rng.normal(size=24)
    lost = np.arange(24) % 3 == 0
    x, lost, rows = np.repeat(once + lost, 3), np.repeat(lost, 3), np.repeat(np.arange(24), 3)
    study = np.full(72, "a")
    low, high = collapse.interval(x, lost, study, rows, draws=300)
    assert low < collapse.auc(x, lost) < high
    assert collapse.interval(x, lost, study, rows, draws=300) == (low, high)
    alone = collapse.interval(x, lost, study, np.arange(72), draws=300)
    assert high - low > 1.3 * (alone[1] - alone[0])  # 24 rows say less than 72 would


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------


def test_lost_is_well_below_the_best_of_the_same_run():
    fallen = run_of([0.3, 0.5, 0.45, 0.2, 0.3])
    assert collapse.is_lost(fallen)
    assert collapse.fall_of(fallen) == 50  # 0.05 is 3.5 errors of the difference
    assert collapse.errors_below(fallen.evals[1], fallen.evals[2]) == pytest.approx(0.05 / math.hypot(0.01, 0.01))
    came_back = run_of([0.3, 0.5, 0.2, 0.49])
    assert not collapse.is_lost(came_back)
    assert collapse.fall_of(came_back) == 66
    grown = run_of([0.3, 0.4, 0.5])
    assert not collapse.is_lost(grown)
    assert collapse.fall_of(grown) == math.inf
    assert collapse.is_lost(run_of([0.3, 0.25]))  # the start is an evaluation too
    assert not collapse.is_lost(run_of([0.3, 0.25]), errors=4)
    dead = Run("a", "row-0", 10, [[0, 0.3, 0.0], [10, 0.0, 0.0]], {})  # of errors of 0
    assert collapse.is_lost(dead)


def test_a_summary_sees_its_tenth_and_nothing_else():
    x = np.concatenate([np.full(5, 2.0), np.full(5, 6.0), np.full(90, 1e9)])
    level, growth, noise = collapse.summaries(x, 0.1)
    assert (level, growth, noise) == (4.0, pytest.approx(math.log(3)), pytest.approx(0.5))
    x[40:50] = 7.0
    assert collapse.summaries(x, 0.5) == (7.0, 0.0, 0.0)
    x[0] = np.nan  # not measured there
    assert collapse.summaries(x, 0.1)[0] == pytest.approx((4 * 2 + 5 * 6) / 9)
    assert collapse.summaries(np.full(10, -1e-9), 0.1)[1] == 0  # a KL that is rounding does not grow


def test_the_table_has_a_column_for_each_candidate():
    runs = [run_of(columns={column: np.full(100, float(i)) for i, column in enumerate(COLUMNS)})]
    table = collapse.table_of(runs)
    assert table.shape == (1, len(CANDIDATES))
    for i, column in enumerate(COLUMNS):
        assert table[0, CANDIDATES.index(f"level of {column}")] == i
        assert table[0, CANDIDATES.index(f"noise of {column}")] == 0


def test_a_run_that_has_fallen_is_not_foretold():
    early, late, kept = run_of([0.5, 0.1, 0.1]), run_of([0.3, 0.5, 0.1]), run_of([0.3, 0.1, 0.4])
    assert collapse.seen_of([early, late, kept], 0.1).lost.tolist() == [True, True, False]
    assert collapse.seen_of([early, late, kept], 0.5).lost.tolist() == [True, False]


def test_every_record_has_what_the_rules_read():
    runs = collapse.recorded()
    assert {run.study for run in runs} == set(collapse.STUDIES)
    assert np.isfinite(collapse.table_of(runs)).all()
    seen = collapse.seen_of(runs)
    assert seen.lost.sum() >= 20
    assert "no-correction-no-distillation" in seen.row[seen.lost]
    assert "on-policy" not in seen.row[seen.lost]


# ---------------------------------------------------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------------------------------------------------


def test_a_rule_takes_the_best_column_with_its_sign():
    table, lost, study = planted()
    table[:, 7] = np.where(lost, -5.0, 5.0)
    score = collapse.one_of(*CANDIDATES)(table, lost, study)(table)
    assert (score == -table[:, 7]).all()
    assert collapse.threshold(score, lost) == 0
    assert (abs(collapse.one_of(CANDIDATES[3])(table, lost, study)(table)) == abs(table[:, 3])).all()  # no other column


def test_a_threshold_names_most_of_the_lost_and_few_others():
    score = np.arange(7.0)
    lost = np.array([False, False, True, False, True, True, True])
    assert collapse.threshold(score, lost) == 3.5  # 3 of 4, and none of the others; 1.5 would name 4 of 4 and 1 of 3
    assert collapse.threshold(np.ones(7), lost) == math.inf  # nothing is told apart: nobody is named


def test_a_column_that_works_in_one_study_does_not_help_there():
    table, lost, study = planted()
    inside = study == "a"
    table[inside, 4] = np.where(lost[inside], 9.0, -9.0)
    table[:, 11] += np.where(lost & ~inside, 6.0, 0.0)  # what works elsewhere, and not in a
    score, _ = collapse.held_out(collapse.one_of(*CANDIDATES), table, lost, study)
    assert collapse.auc(table[inside, 4], lost[inside]) == 1
    assert (score[inside] == table[inside, 11]).all()
    assert 0.2 < collapse.auc(score[inside], lost[inside]) < 0.8


@pytest.mark.parametrize("name", list(collapse.RULES))
def test_the_labels_of_a_left_out_study_change_nothing_of_it(name):
    table, lost, study = planted()
    inside = study == "b"
    other = lost.copy()
    other[inside] = ~other[inside]
    before, after = (collapse.held_out(collapse.RULES[name], table, labels, study) for labels in (lost, other))
    assert (before[0][inside] == after[0][inside]).all()
    assert (before[1][inside] == after[1][inside]).all()
    if name in (collapse.BEST, "10 levels, linear"):  # which choose more than a sign and a threshold
        assert (before[0][~inside] != after[0][~inside]).any()


@pytest.mark.parametrize("name", [name for name in collapse.RULES if name not in ("ESS", "reward")])
def test_a_rule_finds_what_holds_in_every_study(name):
    table, lost, study = planted()
    table = 1 + table % 1  # above 0, as levels are
    table[:, CANDIDATES.index(f"level of {collapse.KL}")] += np.where(lost, 20.0, 0.0)
    score, named = collapse.held_out(collapse.RULES[name], table, lost, study)
    assert collapse.auc_inside(score, lost, study) == 1
    assert (named == lost).mean() > 0.95
    assert collapse.by_chance(collapse.RULES[name], table, lost, study, shuffles=19) == 0.05


def test_noise_is_no_better_than_chance():
    chances = [collapse.by_chance(collapse.RULES["ESS"], *planted(seed=seed), shuffles=19) for seed in range(20)]
    assert np.mean(chances) > 0.3
    assert sum(p <= 0.05 for p in chances) <= 4


def test_the_kl_to_the_learner_is_the_sum_of_both():
    columns = {collapse.KL: np.full(100, 0.25), "ppo_kl": np.full(100, 0.5)}
    table = collapse.table_of([run_of(columns=columns)])
    assert collapse.RULES[collapse.TO_NEW](None, None, None)(table) == 0.75


# ---------------------------------------------------------------------------------------------------------------------
# Rules of some of the runs
# ---------------------------------------------------------------------------------------------------------------------


def test_worth_is_that_of_the_row_and_nan_where_it_was_not_measured():
    worth = {(run.study, run.name): run.worth for run in collapse.recorded()}
    page = Path("results/foretell.md").read_text()  # without distillation: retrace_seq 0.80 ..., none 0.05
    for row, value in (("prod-min-r-1-min-r-1-no-distillation", "0.80"), ("tis-no-distillation", "0.32")):
        seeds = [x for (study, name), x in worth.items() if study == "study" and name.rpartition("-")[0] == row]
        assert len(seeds) >= 3 and len(set(seeds)) == 1
        assert f"{seeds[0]:.2f}" == value and f" {value} and " in page
    assert math.isnan(worth["study", "on-policy-0"])


def test_a_rule_is_tried_on_the_runs_that_have_it_and_beside_the_kl_on_the_same():
    rng = np.random.default_rng(3)
    column, runs = "response_length", []
    for i in range(40):
        own = {column: np.full(100, rng.normal())} if i % 4 else {}
        evals = [0.5, 0.1] if i % 3 == 0 else [0.3, 0.5]
        run = run_of(evals, own, collapse.STUDIES[i % 2], f"row{i}-0")
        runs.append(run._replace(worth=rng.normal() if i % 5 else math.nan))
    seen = collapse.seen_of(runs)
    kl = rng.normal(size=len(runs))
    lines = collapse.on_some(seen, {collapse.TO_NEW: SimpleNamespace(score=kl)}).splitlines()
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in lines if line.startswith("| ")}
    assert cells.keys() == {"rule", "---", collapse.WORTH, column}  # no run has the others

    has = [not math.isnan(run.worth) for run in runs]
    x, y, lost, study = (np.array(v)[has] for v in ([-r.worth for r in runs], kl, seen.lost, seen.study))
    assert cells[collapse.WORTH][0] == f"{lost.sum()} of {len(lost)}" == "11 of 32"
    for cell, values in zip(cells[collapse.WORTH][1:3], (x, y), strict=True):
        assert cell.startswith(f"{loop_auc(values, lost, study):.2f} (")
    assert cells[column][0].endswith(" of 30")


# ---------------------------------------------------------------------------------------------------------------------
# The guard
# ---------------------------------------------------------------------------------------------------------------------


def fires_at(kls, how="lr", limit=0.03, steps=40) -> list[int]:
    """The updates (from 1) at which a guard has something to say."""
    guard = Guard(make_cfg(guard=how, guard_kl=limit, steps=steps))
    rows = [{"rollout_corr/kl": kl - 0.5, "ppo_kl": 0.5} for kl in kls]
    return [i for i, row in enumerate(rows, 1) if guard.watch(i, row)]


def test_the_guard_judges_once_by_the_mean_of_the_first_tenth():
    assert fires_at([0.01, 0.02, 0.04, 0.06]) == [4]  # 0.0325
    assert fires_at([0.01, 0.02, 0.04, 0.04]) == []  # 0.0275
    assert fires_at([9.0, 9.0, 9.0]) == []  # not before
    assert fires_at([0.01] * 4 + [9.0] * 36) == []  # and not after
    assert fires_at([9.0] * 40) == [4]
    assert fires_at([math.nan, 0.02, 0.04, 0.06]) == [4]  # the mean of three
    assert fires_at([math.nan] * 4) == []
    assert fires_at([9.0, 0.0], steps=4) == [1]


def test_the_guard_says_what_it_does():
    for how, done in (
        ("stop", "the run ends here"),
        ("lr", "all learning rates are halved from here on"),
        ("cap", "responses are weighed by min(R, 1) from here on"),
        ("lambda", "distillation has the weight 20 from here on"),
    ):
        guard = Guard(make_cfg(guard=how, guard_kl=0.03, steps=10, actor="base:actor", distill_lambda=2.0))
        said = guard.watch(1, {"rollout_corr/kl": 0.04, "ppo_kl": 0.0})
        assert said == (
            f"--guard={how}: over the first 1 updates KL(inf, new) was 0.04 nats a token, above --guard_kl=0.03: {done}"
        )
        assert guard.rate == (0.5 if how == "lr" else 1.0)


def guarded(**changes):
    """A learner whose first tenth is two updates, and four batches for it, with responses of R above and below 1."""
    cfg = make_cfg(**{"objective": "grpo", "steps": 20, **changes}, warmup_steps=0)
    batches = [batching.collate(make_groups(2, seed=seed), cfg) for seed in range(4)]
    learner = make_learner(cfg)
    for batch in batches:
        total = ((learner.score(batch, Needs()).logp - batch.logp_inf) * batch.mask).sum(1)
        batch.logp_inf[1] += (total[1] - 1) / batch.mask[1].sum()  # R = e
    return learner, batches


def test_lr_halves_the_rate_from_the_next_update_on(capsys):
    learner, batches = guarded(guard="lr", guard_kl=1e-9)
    logged = [one_update(learner, batch) for batch in batches]
    kls = [row["rollout_corr/kl"] + row["ppo_kl"] for row in logged]
    assert sum(kls[:2]) > 0
    lr = learner.cfg.lr
    assert [row["lr"] for row in logged] == [lr, lr, lr / 2, lr / 2]
    assert [row["guard/fired"] for row in logged] == [0, 1, 1, 1]
    assert logged[3]["guard/kl"] == pytest.approx(sum(kls[:2]) / 2)
    assert capsys.readouterr().out.count("--guard=lr: over the first 2 updates") == 1
    assert not learner.error


def test_a_stop_ends_the_run_and_changes_nothing_before():
    learner, batches = guarded(guard="stop", guard_kl=1e-9)
    one_update(learner, batches[0])
    assert not learner.error
    assert one_update(learner, batches[1])["lr"] == learner.cfg.lr
    assert learner.error.startswith("--guard=stop: over the first 2 updates")


@pytest.mark.parametrize("how", ["lr", "cap", "lambda"])
def test_without_a_guard_or_where_it_does_not_fire_no_bit_changes(how):
    learner, batches = guarded(actor="base:actor")
    silent, _ = guarded(guard=how, guard_kl=1e9, actor="base:actor")
    for batch in batches:
        plain, watched = one_update(learner, batch), one_update(silent, batch)
        assert not any(name.startswith("guard/") for name in plain)
        assert plain == {name: value for name, value in watched.items() if not name.startswith("guard/")}
    assert all(torch.equal(p, weights(silent)[name]) for name, p in weights(learner).items())


def continues_as(learner, flags: dict, batches) -> bool:
    """Whether a learner goes on, to the last bit, as one does that had these flags from the start."""
    other, _ = guarded(**flags)
    take_over(other, learner)
    for batch in batches:
        mine, theirs = one_update(learner, batch), one_update(other, batch)
        if theirs != {name: value for name, value in mine.items() if not name.startswith("guard/")}:
            return False
    return all(torch.equal(p, weights(other)[name]) for name, p in weights(learner).items())


@pytest.mark.parametrize(
    "flags",
    [
        dict(objective="grpo"),
        dict(objective="jackpot", actor="base:actor"),  # OBRS, with its mask
        dict(objective="seq_mis"),  # rejects by bounds of its own
        dict(objective="tis", is_floor=0.9, is_cap=1.1, reject="geo", rs_low=0.1, rs_high=0.9),  # --reject stays
    ],
    ids=lambda flags: flags["objective"],
)
def test_cap_trains_on_as_a_run_with_min_r_1_does(flags):
    from_then_on = {**flags, "correction": "seq_tis", "is_cap": 1.0, "is_floor": 0.0}
    for update, same in ((1, False), (2, True)):  # it fires after the second
        learner, batches = guarded(guard="cap", guard_kl=1e-9, **flags)
        for batch in batches[:update]:
            one_update(learner, batch)
        assert learner.guard.fired == same
        assert continues_as(learner, from_then_on, batches[update:]) == same


@pytest.mark.parametrize("before, after", [(0.0, 1.0), (0.5, 5.0)])
def test_lambda_distils_ten_times_as_much_or_begins_to(before, after):
    for update, same in ((1, False), (2, True)):
        learner, batches = guarded(guard="lambda", guard_kl=1e-9, actor="base:actor", distill_lambda=before)
        for batch in batches[:update]:
            assert one_update(learner, batch)["distill_lambda"] == before
        from_then_on = dict(actor="base:actor", distill_lambda=after)
        assert continues_as(learner, from_then_on, batches[update:]) == same


@pytest.mark.parametrize("how", ["lr", "cap", "lambda"])
@pytest.mark.parametrize("after", [1, 3])
def test_a_resumed_guard_judges_and_mends_as_the_whole_run(after, how):
    """Saved before it judges, and after it fired; what goes on may be longer."""
    how = dict(guard=how, guard_kl=1e-9, actor="base:actor")
    whole, batches = guarded(**how)
    expected = [one_update(whole, batch) for batch in batches]
    first, _ = guarded(**how)
    for batch in batches[:after]:
        one_update(first, batch)
    second, _ = guarded(**how, steps=100)
    take_over(second, first)
    assert [one_update(second, batch) for batch in batches[after:]] == expected[after:]
    assert all(torch.equal(p, weights(whole)[name]) for name, p in weights(second).items())


def test_a_checkpoint_from_before_the_guard_still_loads():
    learner, batches = guarded()
    one_update(learner, batches[0])
    state = learner.state_dict()
    del state["guard"]
    other, _ = guarded()
    other.load_state_dict(state)
    assert (other.version, other.guard.seen) == (1, 0)


def test_a_run_is_stopped_saved_and_can_go_on(solvers, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "catch_signals", lambda: [])
    out, plain = tmp_path / "run", tmp_path / "plain"
    with pytest.raises(UserError, match="--guard=stop: over the first 1 updates .* the run ends here"):
        train.train(config.parse(flags(solvers, out, objective="tis", guard="stop", guard_kl=1e-9)))
    assert checkpoint.newest(out).name == "step_000001"
    train.train(config.parse(["--resume", f"--out={out}"]))
    train.train(config.parse(flags(solvers, plain, objective="tis")))
    stopped, whole = ([row for row in read_metrics(folder) if row["step"] >= 0] for folder in (out, plain))
    assert [row["guard/fired"] for row in stopped] == [1.0] * 6
    assert [row["loss"] for row in stopped] == [row["loss"] for row in whole]


def test_a_capped_run_of_jackpot_resumes_as_the_whole_run(solvers, tmp_path, train_here):
    """It fires inside a batch of two updates, whose ref pass was OBRS's; the checkpoint is inside the next one. Kappa
    of the target new is no longer handed on."""
    more = dict(objective="jackpot", obrs_target="new", guard="cap", guard_kl=1e-9)
    _, whole = train_here(flags(solvers, tmp_path / "whole", **more))
    train_here(flags(solvers, tmp_path / "run", **{**more, "steps": 3}))
    train_here(["--resume", f"--out={tmp_path / 'run'}", "--steps=6"])
    assert without_sync(tmp_path / "run") == without_sync(tmp_path / "whole")
    steps = [row for row in whole if row["step"] >= 0]
    assert ["obrs/accept_rate" in row for row in steps] == [True] + [False] * 5
    assert all(row["rollout_corr/rollout_rs_masked_fraction"] == 0 for row in steps[1:])


@pytest.mark.parametrize(
    "given, sentence",
    [
        (["--guard=cap", "--objective=tis", "--is_cap=auto"], "--guard=cap: auto and --distill_worth_target change"),
        (["--guard=cap", "--objective=grpo", "--correction=auto"], "--guard=cap: auto and --distill_worth_target"),
        (["--guard=lambda", "--distill_worth_target=0.5"], "--guard=lambda: auto and --distill_worth_target change"),
        (["--guard=lambda", "--distill_kl_target=0.1"], "--guard=lambda and --distill_kl_target steer the same weight"),
        (["--guard=lambda", "--actor=none"], "--guard=lambda: there is no actor to distil"),
        (["--guard=cap", "--objective=gepo"], "--guard=cap would go on with .*, but --ratio_base=group already"),
        (["--guard=mend"], "--guard=mend: not one of off, stop, lr, cap, lambda"),
    ],
)
def test_a_mend_that_cannot_be_is_refused(given, sentence):
    with pytest.raises(UserError, match=sentence):
        config.parse(["--rollout=hf", *given])


def test_flags_of_the_guard():
    config.parse(["--rollout=hf", "--guard=lr", "--objective=grpo", "--correction=auto"])  # another thing is steered
    config.parse(["--rollout=hf", "--guard=cap", "--distill_kl_target=0.1"])
    assert config.parse(["--rollout=hf"]).guard == "off"
    with pytest.raises(UserError, match="--guard=maybe"):
        config.parse(["--rollout=hf", "--guard=maybe"])
    with pytest.raises(UserError, match="--guard_kl=0.0: must be above 0"):
        config.parse(["--rollout=hf", "--guard_kl=0"])
