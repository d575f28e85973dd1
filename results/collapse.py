"""Is a lost run known by its first updates? Rules from the first tenth of each recorded run, tried on other studies.

    python results/collapse.py          # run what is missing, then write results/collapse.md and collapse.png
    python results/collapse.py --draw   # from the records alone; a minute and a half

Every record of four studies is one run. A run is lost if its last held-out pass@1 lies more than three standard
errors below the best of the same run, the start included. A rule gives each run a score from the first tenth of its
updates. What a rule chooses (column, sign, weights, threshold) it chooses on three studies; it is tried on the fourth.

Two kinds of rules can be tried on some of the runs alone: worth, which results/foretell.py has measured of some rows
before training, and columns that the first records do without.

The runs of its own (configs/mend.toml) ask what a mend is worth: a doomed row and a healthy one, without a guard and
under each --guard, made to fire.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import foretell
import heterorl
import numpy as np
import prefix
import qarl
import sweep
from heterorl import ranks

STUDIES = ("study", "lowbit", "long", "delay")  # the configurations of the recorded runs
ERRORS = 3.0  # a run is lost so many standard errors below its best
SHARE = 0.1  # of the updates: what a rule has seen
WINDOW = 0.1  # of the updates: what a rule averages over
KL, ESS = "rollout_corr/kl", "rollout_corr/rollout_is_eff_sample_size"
# the names of rules
TO_REF, TO_NEW, BEST = "KL(inf, ref)", "KL(inf, new)", "the best of 30 columns"
# the columns that every record has, but staleness, which is a setting
COLUMNS = (
    *("reward", "entropy", "grad_norm", "clip_fraction", "ppo_kl", "weight_var"),
    *(KL, "rollout_corr/k3_kl", "rollout_corr/chi2_seq", ESS),
)
# ... and those that some have
MORE = ("rollout_corr/low_weight_fraction", "rollout_corr/seq_clamped_fraction", "rollout_corr/max_mismatch")
MORE += ("rollout_corr/log_r/1", "rollout_corr/log_r/99", "response_length")
WORTH = "worth before training"
SUMMARIES = ("level", "growth", "noise")
CANDIDATES = [f"{summary} of {column}" for summary in SUMMARIES for column in COLUMNS]
DRAWS = 1000  # of the bootstrap
SHUFFLES = 300  # of the labels
LATER = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
LIMITS = (0.005, 0.03, 0.05, 0.06, 0.1)  # nats a token
CONFIG = "configs/mend.toml"
MENDS = ("lr", "cap", "lambda")
ALONE = dict(objective="none", distill_lambda=0)
JACKPOT = dict(objective="jackpot")
FIRES = dict(guard_kl=0.01)  # a limit at which the guard fires in every run
ROWS = {
    "no correction, no distillation": ALONE,
    **{f"no correction, no distillation, guard {how}": dict(ALONE, guard=how, **FIRES) for how in MENDS},
    "Jackpot": JACKPOT,
    **{f"Jackpot, guard {how}": dict(JACKPOT, guard=how, **FIRES) for how in MENDS},
    "TIS, no distillation": dict(objective="tis", distill_lambda=0),
}
FIRST_SEED, SEEDS = 20, 3
# rows that were lost before there were quantiles of log r, run anew: configuration, rows, first seed
DOOMED = (
    (sweep.STUDY, {label: prefix.UNDISTILLED[label] for label in prefix.OLD_ALONE[1:]}, 13),
    (qarl.CONFIG, {"min(R, 1)": prefix.LOW["min(R, 1)"]}, 13),
    (heterorl.CONFIG, {"GSPO, 8": heterorl.TABLE["GSPO, 8"]}, 10),
)
DOOMED_SEEDS = 2
# other doomed rows, without a guard and with one at its default limit: configuration -> rows
GUARDED = {
    sweep.STUDY: {
        "no correction, no distillation": prefix.UNDISTILLED["no correction, no distillation"],
        "TIS, no distillation": prefix.UNDISTILLED["TIS, no distillation"],
    },
    qarl.CONFIG: {"min(R, 1), two bits": prefix.LOW["min(R, 1)"]},
}
GUARDS = {sweep.STUDY: "cap", qarl.CONFIG: "lr"}  # at two bits the row is capped at 1 already
GUARDED = {
    config: rows
    | {f"{label}, guard {GUARDS[config]}": flags | dict(guard=GUARDS[config]) for label, flags in rows.items()}
    for config, rows in GUARDED.items()
}
GUARDED_SEED, GUARDED_SEEDS = 16, 2
# one seed, on base models of another machine
EARLIER = {
    "no correction, no distillation": ALONE,
    "no correction, no distillation, half the rate": dict(ALONE, lr=5e-5),
    "no correction, no distillation, guard lr": dict(ALONE, guard="lr"),
    "Jackpot": JACKPOT,
    "Jackpot, half the rate": dict(JACKPOT, lr=5e-5),
    "Jackpot, guard lr": dict(JACKPOT, guard="lr", guard_kl=0.02),
}


class Run(NamedTuple):
    """One recorded run."""

    study: str
    name: str  # ROW-seed
    steps: int
    evals: list  # of the policy: (update, pass@1, standard error)
    columns: dict  # column -> its blocks
    worth: float = math.nan  # of its row, before training; NaN: not measured

    @property
    def row(self) -> str:
        return self.name.rpartition("-")[0]


# ---------------------------------------------------------------------------------------------------------------------
# Which runs are lost
# ---------------------------------------------------------------------------------------------------------------------


def errors_below(best, other) -> float:
    """By how many standard errors of their difference one evaluation lies below another."""
    return (best[1] - other[1]) / max(math.hypot(best[2], other[2]), 1e-9)


def best_of(evals) -> list:
    return max(evals, key=lambda x: x[1])


def is_lost(run: Run, errors: float = ERRORS) -> bool:
    """Does its last evaluation lie well below its best one?"""
    return errors_below(best_of(run.evals), run.evals[-1]) > errors


def fall_of(run: Run, errors: float = ERRORS) -> float:
    """The first evaluated update that lies well below the best before it; infinite without one."""
    for i in range(1, len(run.evals)):
        if errors_below(best_of(run.evals[:i]), run.evals[i]) > errors:
            return run.evals[i][0]
    return math.inf


def recorded() -> list[Run]:
    """Every record of the four studies."""
    runs, worth = [], worth_of_rows()
    for (study, flags), r in sweep.records_in(sweep.RESULTS / "runs").items():
        if study in STUDIES:
            runs.append(run_of(study, r, worth.get((study, sweep.row_of(flags)), math.nan)))
    return sorted(runs, key=lambda run: (STUDIES.index(run.study), run.name))


def run_of(study: str, record: dict, worth: float = math.nan) -> Run:
    there = [name for name in (*COLUMNS, *MORE) if name in record["columns"]]
    columns = {name: np.array(record["columns"][name], float) for name in there}
    return Run(study, record["name"], record["config"]["steps"], record["evals"]["policy"], columns, worth)


def worth_of_rows() -> dict[tuple, float]:
    """(study, flags without the seed) -> worth, of the rows that results/foretell.py has weighed."""
    found = {}
    for config, flags, _ in foretell.rows().values():
        measured = foretell.weighed(config, flags)
        if measured:
            study, key = sweep.key_of(flags, config)
            found[study, sweep.row_of(key)] = measured["worth"]
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What is seen of a run
# ---------------------------------------------------------------------------------------------------------------------


def summaries(x, share: float) -> tuple[float, float, float]:
    """Level, growth and noise of a column's blocks x (n,), over the tenth of the run that ends after `share` of it.

    level: the mean. growth: log of the second half's mean over the first half's. noise: standard deviation over
    mean. Both use magnitudes of at least 1e-6, below which a KL is rounding."""
    width = max(2, round(WINDOW * len(x)))
    end = max(width, round(share * len(x)))
    seen = x[end - width : end]
    first, second = np.nanmean(seen[: width // 2]), np.nanmean(seen[width // 2 :])
    growth = math.log(max(abs(second), 1e-6) / max(abs(first), 1e-6))
    return float(np.nanmean(seen)), growth, float(np.nanstd(seen) / max(abs(np.nanmean(seen)), 1e-6))


def table_of(runs: list[Run], share: float = SHARE) -> np.ndarray:
    """(runs, candidates): the summaries of every column."""
    rows = []
    for run in runs:
        each = [summaries(run.columns[column], share) for column in COLUMNS]
        rows.append([values[i] for i in range(len(SUMMARIES)) for values in each])
    return np.array(rows)


# ---------------------------------------------------------------------------------------------------------------------
# AUC: the share of pairs (a lost run, another run) in which the lost one has the higher score; ties count half
# ---------------------------------------------------------------------------------------------------------------------


def wins(x, lost) -> float:
    """Pairs that the lost runs win: the sum of their ranks, less the least that it can be."""
    n = lost.sum()
    return float(ranks(x)[lost].sum() - n * (n + 1) / 2)


def auc(x, lost) -> float:
    """NaN if all runs are lost or none."""
    pairs = lost.sum() * (~lost).sum()
    return wins(x, lost) / pairs if pairs else math.nan


def auc_inside(x, lost, study) -> float:
    """AUC over pairs of one study: how high a study lies as a whole does not enter."""
    won = pairs = 0.0
    for name in np.unique(study):
        own = study == name
        won += wins(x[own], lost[own])
        pairs += lost[own].sum() * (~lost[own]).sum()
    return won / pairs if pairs else math.nan


def interval(x, lost, study, row, draws: int = DRAWS) -> tuple[float, float]:
    """95 % of `auc_inside` over bootstrap samples of rows: the seeds of a row are drawn together."""
    rng = np.random.default_rng(0)
    blocks = {
        name: [np.flatnonzero((study == name) & (row == r)) for r in np.unique(row[study == name])]
        for name in np.unique(study)
    }
    values = []
    for _ in range(draws):
        chosen = [rows[i] for rows in blocks.values() for i in rng.integers(len(rows), size=len(rows))]
        at = np.concatenate(chosen)
        values.append(auc_inside(x[at], lost[at], study[at]))
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)


# ---------------------------------------------------------------------------------------------------------------------
# Rules: learn(table, lost, study) -> score(table), and a threshold on the score
# ---------------------------------------------------------------------------------------------------------------------


def one_of(*names: str) -> Callable:
    return one_column([CANDIDATES.index(name) for name in names])


def one_column(columns: list[int]) -> Callable:
    """The one column, with its sign, that orders the given runs best."""

    def learn(table, lost, study):
        found = np.array([auc_inside(table[:, column], lost, study) for column in columns])
        i = int(np.argmax(abs(found - 0.5)))
        sign = 1.0 if found[i] >= 0.5 else -1.0
        return lambda other: sign * other[:, columns[i]]

    return learn


def together(*names: str) -> Callable:
    """The sum of some columns; nothing is chosen but the threshold."""
    columns = [CANDIDATES.index(name) for name in names]
    return lambda table, lost, study: lambda other: other[:, columns].sum(1)


def linear(shape: Callable, ridge: float = 10.0) -> Callable:
    """All levels in one linear score: ridge regression of `lost` on shape(level), standardised, inside studies."""
    columns = [CANDIDATES.index(f"level of {column}") for column in COLUMNS]

    def learn(table, lost, study):
        x = shape(table[:, columns])
        mean, scale = x.mean(0), x.std(0) + 1e-9
        x, y = (x - mean) / scale, lost.astype(float)
        for name in np.unique(study):
            own = study == name
            x[own], y[own] = x[own] - x[own].mean(0), y[own] - y[own].mean()
        weights = np.linalg.solve(x.T @ x + ridge * np.eye(len(columns)), x.T @ y)
        return lambda other: (shape(other[:, columns]) - mean) / scale @ weights

    return learn


RULES = {
    TO_REF: one_of(f"level of {KL}"),
    "ESS": one_of(f"level of {ESS}"),
    "reward": one_of("level of reward"),
    BEST: one_of(*CANDIDATES),
    "10 levels, linear": linear(lambda x: x),
    "10 levels, linear in logs": linear(lambda x: np.log(np.maximum(x, 1e-4))),
    # mean(log inf - log ref) + mean(log ref - log new) under samples of inf: from what sampled to what learns
    TO_NEW: together(f"level of {KL}", "level of ppo_kl"),
}


def threshold(score, lost) -> float:
    """The cut that names the largest share of the lost runs less the share of the others."""
    at = np.unique(score)
    cuts = (at[1:] + at[:-1]) / 2
    gains = [(score[lost] > cut).mean() - (score[~lost] > cut).mean() for cut in cuts]
    return float(cuts[int(np.argmax(gains))]) if len(cuts) else math.inf


def held_out(learn: Callable, table, lost, study) -> tuple[np.ndarray, np.ndarray]:
    """(score, named) of every run, by the rule that the other studies chose."""
    score, named = np.zeros(len(lost)), np.zeros(len(lost), bool)
    for name in np.unique(study):
        own = study == name
        rule = learn(table[~own], lost[~own], study[~own])
        score[own] = rule(table[own])
        named[own] = score[own] > threshold(rule(table[~own]), lost[~own])
    return score, named


def by_chance(learn: Callable, table, lost, study, shuffles: int = SHUFFLES) -> float:
    """Share of shuffles of `lost` inside the studies after which the whole procedure orders as well as it did."""
    rng = np.random.default_rng(0)
    found = auc_inside(held_out(learn, table, lost, study)[0], lost, study)
    as_good = 0
    for _ in range(shuffles):
        other = lost.copy()
        for name in np.unique(study):
            own = np.flatnonzero(study == name)
            other[own] = lost[rng.permutation(own)]
        as_good += auc_inside(held_out(learn, table, other, study)[0], other, study) >= found
    return (as_good + 1) / (shuffles + 1)


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What the rules are tried on."""

    runs: list[Run]
    table: np.ndarray  # (runs, candidates)
    lost: np.ndarray  # (runs,) bool
    study: np.ndarray  # (runs,)
    row: np.ndarray  # (runs,)

    @property
    def labels(self) -> tuple:
        """What a rule is tried with."""
        return self.table, self.lost, self.study


def seen_of(runs: list[Run], share: float = SHARE, errors: float = ERRORS) -> Seen:
    """The first `share` of every run that had not fallen by then, if it is lost in the end."""
    runs = [run for run in runs if not is_lost(run, errors) or fall_of(run, errors) > share * run.steps]
    lost = np.array([is_lost(run, errors) for run in runs])
    study, row = np.array([run.study for run in runs]), np.array([run.row for run in runs])
    return Seen(runs, table_of(runs, share), lost, study, row)


def lost_runs(seen: Seen) -> str:
    """The runs that are lost, and how many of how many in each study."""
    counts = [f"{name} {seen.lost[seen.study == name].sum()} of {(seen.study == name).sum()}" for name in STUDIES]
    cells = []
    for run in seen.runs:
        if is_lost(run):
            best, last = best_of(run.evals), run.evals[-1]
            below = f"{errors_below(best, last):.1f}"
            at = [f"{fall_of(run):.0f}", str(run.steps)]
            cells.append([run.study, run.name, f"{100 * best[1]:.1f} at {best[0]}", f"{100 * last[1]:.1f}", below, *at])
    head = ["study", "run", "best pass@1, %", "last, %", "errors below", "first fall at update", "updates"]
    back = sum(not is_lost(run) and fall_of(run) < math.inf for run in seen.runs)
    note = f"By study: {', '.join(counts)}.\n{back} other runs fell as far on the way and came back."
    return f"## The lost runs\n\n{note}\n\n" + sweep.markdown(head, cells)


def seeds(seen: Seen, tried: dict[str, Tried]) -> str:
    """Rows of several seeds of which some run is lost: how many of the seeds, and what the KL says inside a row."""
    cells = []
    for name in STUDIES:
        for row in np.unique(seen.row[seen.study == name]):
            own = (seen.study == name) & (seen.row == row)
            if own.sum() > 1 and seen.lost[own].any():
                cells.append([name, row, f"{seen.lost[own].sum()} of {own.sum()}"])
    inside = np.char.add(np.char.add(seen.study, "/"), seen.row)
    value = auc_inside(tried[TO_NEW].score, seen.lost, inside)
    note = f"Over pairs of two seeds of one row, the AUC of {TO_NEW} is {value:.2f}."
    table = sweep.markdown(["study", "row", "lost seeds"], cells)
    return f"## Rows of several seeds with a lost run\n\n{note}\n\n{table}"


class Tried(NamedTuple):
    """A rule on the studies that it was not chosen on."""

    score: np.ndarray  # (runs,)
    named: np.ndarray  # (runs,) bool: above the other studies' threshold
    auc: float  # inside studies
    low: float  # of its 95 %
    high: float

    def __str__(self) -> str:
        return written(self.auc, self.low, self.high)


def written(value: float, low: float, high: float) -> str:
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def count_named(seen: Seen, named) -> list[str]:
    """Lost runs and other runs that are named, of how many: in all, and by study."""
    cells = []
    for own in [np.full(len(seen.lost), True), *(seen.study == s for s in STUDIES)]:
        lost, others = named[seen.lost & own], named[~seen.lost & own]
        cells.append(f"{lost.sum()}/{len(lost)}, {others.sum()}/{len(others)}")
    return cells


def tried_on(seen: Seen, learn: Callable) -> Tried:
    score, named = held_out(learn, *seen.labels)
    return Tried(score, named, auc_inside(score, seen.lost, seen.study), *interval(score, *seen.labels[1:], seen.row))


def rules(seen: Seen, tried: dict[str, Tried]) -> str:
    """AUC of each rule, and how often chance does as well."""
    cells = []
    for name, t in tried.items():
        each = [f"{auc(t.score[seen.study == s], seen.lost[seen.study == s]):.2f}" for s in STUDIES]
        cells.append([name, str(t), f"{by_chance(RULES[name], *seen.labels):.3f}", *each])
    head = ["rule", "AUC inside studies (95 %)", "by chance", *STUDIES]
    note = "AUC of the held-out studies; `by chance` shuffles the lost runs inside the studies and does all again."
    return f"## From the first tenth of the updates\n\n{note}\n\n" + sweep.markdown(head, cells)


def named_runs(seen: Seen, tried: dict[str, Tried]) -> str:
    """With a threshold: the runs that each rule names, and how long before the fall."""
    cells = []
    for name, t in tried.items():
        named = t.named.astype(float)
        value = auc_inside(named, seen.lost, seen.study)
        ends = interval(named, *seen.labels[1:], seen.row)
        right = np.flatnonzero(t.named & seen.lost)
        leads = [fall_of(seen.runs[i]) - SHARE * seen.runs[i].steps for i in right]
        lead = f"{np.median(leads):.0f} ({min(leads):.0f} to {max(leads):.0f})" if leads else ""
        cells.append([name, *count_named(seen, t.named), written(value, *ends), lead])
    head = ["rule", "all", *STUDIES, "AUC of being named", "lead, updates: median (range)"]
    note = "Lost runs that the rule names, then other runs that it names; the threshold is the other studies'."
    return f"## With a threshold\n\n{note}\n\n" + sweep.markdown(head, cells)


def fixed_limits(seen: Seen, tried: dict[str, Tried]) -> str:
    """The runs above one limit for all studies: chosen with all of them in sight, so too good."""
    cells = [[f"{limit:g}", *count_named(seen, tried[TO_NEW].score > limit)] for limit in LIMITS]
    head = [f"{TO_NEW} above, nats a token", "all", *STUDIES]
    return "## One limit for all studies, not held out\n\n" + sweep.markdown(head, cells)


def on_some(seen: Seen, tried: dict[str, Tried]) -> str:
    """Rules that some of the runs alone can be tried on, each beside KL(inf, new) on the same runs."""
    kl, cells = tried[TO_NEW].score, []
    values = {WORTH: np.array([run.worth for run in seen.runs])} | {name: level(seen, name) for name in MORE}
    for name, x in values.items():
        own = np.isfinite(x)
        if not own.any():
            continue
        lost, study, row = seen.lost[own], seen.study[own], seen.row[own]
        score = -x[own]
        if name != WORTH:
            score, _ = held_out(one_column([0]), x[own][:, None], lost, study)
        both = [written(auc_inside(s, lost, study), *interval(s, lost, study, row)) for s in (score, kl[own])]
        each = []
        for one in STUDIES:
            a, b = (auc(s[study == one], lost[study == one]) for s in (score, kl[own]))
            each.append("" if math.isnan(a) else f"{a:.2f}, {b:.2f}")
        cells.append([name, f"{lost.sum()} of {len(lost)}", *both, *each])
    head = ["rule", "lost runs", "AUC inside studies (95 %)", f"{TO_NEW} on the same runs", *STUDIES]
    note = "Little worth names a run; the sign of a column's level is chosen on the other studies. By study: rule, KL."
    return f"## On some of the runs: worth, and quantiles of log r\n\n{note}\n\n" + sweep.markdown(head, cells)


def level(seen: Seen, column: str) -> np.ndarray:
    """(runs,): the level of a column over the first tenth; NaN where it was not recorded."""
    return np.array(
        [summaries(run.columns[column], SHARE)[0] if column in run.columns else np.nan for run in seen.runs]
    )


def other_meanings(runs: list[Run]) -> str:
    """The same AUC if `lost` is another number of errors."""
    cells = []
    for errors in (2.0, ERRORS, 4.0):
        seen = seen_of(runs, SHARE, errors)
        each = []
        for learn in RULES.values():
            score, _ = held_out(learn, *seen.labels)
            each.append(f"{auc_inside(score, seen.lost, seen.study):.2f}")
        cells.append([f"{errors:.0f}", str(seen.lost.sum()), *each])
    head = ["errors below the best", "lost runs", *RULES]
    return "## If lost means something else\n\n" + sweep.markdown(head, cells)


def later(runs: list[Run]) -> dict[str, list[Tried]]:
    """Rule -> how it does at each share of LATER, among the runs that have not fallen by then."""
    names = (TO_REF, "ESS", "reward", BEST, TO_NEW)
    return {name: [tried_on(seen_of(runs, share), RULES[name]) for share in LATER] for name in names}


def later_table(runs: list[Run], found: dict[str, list[Tried]]) -> str:
    lost = [str(seen_of(runs, share).lost.sum()) for share in LATER]
    cells = [["lost runs that have not fallen yet", *lost]]
    cells += [[name, *map(str, line)] for name, line in found.items()]
    head = ["share of the updates seen", *(f"{100 * share:.0f} %" for share in LATER)]
    return "## Seen for longer\n\nAUC inside the held-out studies (95 %).\n\n" + sweep.markdown(head, cells)


def evaluations(records: list[dict]) -> str:
    """Every evaluation on the way, mean over seeds: pass@1 at update."""
    lines = zip(*(r["evals"]["policy"] for r in records), strict=True)
    return ", ".join(f"{np.mean([100 * y for _, y, _ in line]):.1f} at {line[0][0]}" for line in lines)


def last_of(records: list[dict]) -> list[float]:
    """pass@1 of each seed after the last update, in percent."""
    return [100 * r["evals"]["policy"][-1][1] for r in records]


def first_kl(records: list[dict]) -> str:
    """KL(inf, new) of the first tenth, seed by seed."""
    each = [[summaries(np.array(r["columns"][name], float), SHARE)[0] for name in (KL, "ppo_kl")] for r in records]
    return ", ".join(f"{sum(both):.4f}" for both in each)


def count_lost(records: list[dict]) -> str:
    return f"{sum(is_lost(run_of('mend', r)) for r in records)} of {len(records)}"


MENDED = {
    f"{TO_NEW} of the first tenth": first_kl,
    "policy pass@1 on the way, %": evaluations,
    "each seed at the end": lambda records: ", ".join(f"{x:.1f}" for x in last_of(records)),
    "mean": lambda records: sweep.percent(sweep.final(records)),
    "lost": count_lost,
}


# ---------------------------------------------------------------------------------------------------------------------
# The figure
# ---------------------------------------------------------------------------------------------------------------------


def draw_levels(ax, seen: Seen, tried: dict[str, Tried]) -> None:
    """KL(inf, new) of the first tenth, a column of points for each study."""
    x = np.maximum(tried[TO_NEW].score, 1e-5)
    aside = np.random.default_rng(0).uniform(-0.3, 0.3, len(x))
    at = np.array([STUDIES.index(name) for name in seen.study]) + aside
    ax.plot(at[~seen.lost], x[~seen.lost], "o", ms=4, color=sweep.COLOURS[0], alpha=0.5, label="not lost")
    ax.plot(at[seen.lost], x[seen.lost], "D", ms=6, color=sweep.STRONG, label="lost")
    ax.set_xticks(range(len(STUDIES)), STUDIES)
    ax.set(yscale="log", ylabel=f"{TO_NEW}, nats a token (at least 1e-5)", title="the first tenth of every run")
    ax.legend(fontsize=8)


def draw_rules(ax, seen: Seen, tried: dict[str, Tried]) -> None:
    """AUC of every rule: over all studies with its interval, and below it in each."""
    for i, t in enumerate(tried.values()):
        ax.plot([t.low, t.high], [i, i], lw=2, color=sweep.STRONG)
        ax.plot(t.auc, i, "D", ms=7, color=sweep.STRONG)
        for name, colour, mark in zip(STUDIES, sweep.COLOURS, "osv^", strict=False):
            own = seen.study == name
            value = auc(t.score[own], seen.lost[own])
            ax.plot(value, i + 0.25, mark, ms=5, color=colour, label=name if i == 0 else None)
    ax.axvline(0.5, color="black", lw=0.8, ls=":")
    ax.set_yticks(range(len(tried)), list(tried))
    ax.set(xlim=(-0.03, 1.03), xlabel="AUC on the held-out study", title="rules from the first tenth")
    ax.invert_yaxis()
    ax.legend(fontsize=8, loc="lower left")


def draw_later(ax, found: dict[str, list[Tried]]) -> None:
    """AUC against the share of the updates that is seen."""
    x = [100 * share for share in LATER]
    for (name, line), colour in zip(found.items(), (*sweep.COLOURS[:4], sweep.STRONG), strict=True):
        ax.plot(x, [t.auc for t in line], "o-", ms=4, color=colour, label=name)
        if name == TO_NEW:
            ax.fill_between(x, [t.low for t in line], [t.high for t in line], color=colour, alpha=0.12, lw=0)
    ax.axhline(0.5, color="black", lw=0.8, ls=":")
    ax.set(ylim=(0, 1), xlabel="updates seen (%)", ylabel="AUC inside the held-out studies", title="seen for longer")
    ax.legend(fontsize=8, loc="lower left")


def draw_mends(ax, got: sweep.Got) -> None:
    """Where each seed of a guarded row ended, and their mean."""
    for i, (label, records) in enumerate(got.items()):
        colour = sweep.COLOURS[0] if label.startswith("Jackpot") else sweep.STRONG
        ax.plot(last_of(records), [i] * len(records), "o", ms=5, color=colour, alpha=0.6)
        ax.plot(np.mean(last_of(records)), i, "|", ms=16, mew=2, color=colour)
    ax.set_yticks(range(len(got)), list(got))
    ax.set(xlim=(0, None), xlabel="pass@1 after 150 updates (%)", title="guards that fire after 15 updates")
    ax.invert_yaxis()


def draw(seen: Seen, tried: dict[str, Tried], found: dict[str, list[Tried]], got: sweep.Got) -> None:
    fig, axes = sweep.pyplot().subplots(2, 2, figsize=(13, 8.6), layout="constrained")
    draw_levels(axes[0, 0], seen, tried)
    draw_rules(axes[0, 1], seen, tried)
    draw_later(axes[1, 0], found)
    draw_mends(axes[1, 1], got)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    sweep.save(fig, sweep.RESULTS / "collapse.png")


def study(flags):
    how = dict(jobs=flags.jobs, config=CONFIG)
    got = sweep.run(ROWS, dict.fromkeys(ROWS, SEEDS), draw=flags.draw, first_seed=FIRST_SEED, **how)
    for config, rows, first in DOOMED if not flags.draw else ():
        sweep.run(rows, dict.fromkeys(rows, DOOMED_SEEDS), jobs=flags.jobs, config=config, first_seed=first)
    elsewhere = {}
    for config, rows in GUARDED.items():
        each = dict.fromkeys(rows, GUARDED_SEEDS)
        elsewhere |= sweep.run(rows, each, flags.draw, flags.jobs, config, GUARDED_SEED)
    earlier = sweep.run(EARLIER, draw=True, **how)  # their base models are not here
    runs = recorded()
    seen = seen_of(runs)
    tried = {name: tried_on(seen, learn) for name, learn in RULES.items()}
    found = later(runs)
    parts = [rules(seen, tried), named_runs(seen, tried), fixed_limits(seen, tried), seeds(seen, tried)]
    parts += [on_some(seen, tried), other_meanings(runs), later_table(runs, found)]
    parts += [sweep.table("What a mend is worth", got, MENDED)]
    parts += [sweep.table("On other doomed rows, at the default limit", elsewhere, MENDED)]
    parts += [sweep.table("The same with one seed, on base models of another machine", earlier, MENDED)]
    sweep.page("collapse", *parts, lost_runs(seen))
    draw(seen, tried, found, got)


if __name__ == "__main__":
    sweep.main(study, __doc__)
