"""Does worth foretell? Each correction's worth at the start against what the recorded runs with it reached.

    python results/foretell.py          # measure what is missing, then write results/foretell.md and foretell.png

Every row of Table 1, Tables 6 to 10 and the low-bit study whose sampler is another model or has other bits. Rows with
one sampler are weighed together, on its responses, with worth.py: a record each in results/worth. Late samplers have
no distance at the start: the rows of HeteroRL's study are weighed once where the policy of 64 updates ago samples for
that of an on-policy run's update 128 (the run is results/map.py's). Left out: Jackpot's stale samples, other K than 20,
the closed loop, and late samplers by another bound than 64 or by another law of delays (`can_be_weighed`).

What else may matter is asked of the same records, of training and of worth; curvature, which they do not hold, is
measured at the start (curvature.py).
"""

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import curvature
import heterorl
import lowbit
import map as worth_map
import numpy as np
import praxis
import prefix
import qarl
import sweep
import table1
import table6_10
from heterorl import ranks

import worth
from flags import need

FOLDER = sweep.RESULTS / "worth"
# flags that say how rollouts are made; what is left of a row, without TRAINING, is its objective
SAMPLER = ("actor", "actor_base_accuracy", "rollout_quant", "temperature", "top_p", "top_k", "keep_sampling_mask")
SAMPLER += ("task_min_ops", "task_max_ops", *prefix.HALFWAY)
TRAINING = ("distill_lambda", "distill_kl_target", "lr", "model", "rollout_batch", "max_staleness", "cppo_beta")
TRAINING += (*prefix.FAR, *prefix.SEEN)
SAME = {"prefix_tis": "prefix_tis is_cap=1"}  # its default, written out: records have either
LATE = heterorl.FAR["max_staleness"]
LONGER = {label: row for label, row in (prefix.LONGER_ALONE | prefix.LONGER).items() if "actor" not in row}
UPDATES = (0, 25, 75, 150)  # after which LONGER are weighed


def rows() -> dict[tuple[str, str], tuple[str, dict, int]]:
    """(study, label) -> (configuration, flags, first seed), of the rows whose sampler is not the policy."""
    found = {}
    for name, config, given, seed in (
        ("table1", sweep.STUDY, table1.ROWS, 0),
        ("table6_10", sweep.STUDY, table6_10.ROWS, 0),
        ("lowbit", qarl.CONFIG, lowbit.ROWS | qarl.ROWS, 0),
        ("prefix", sweep.STUDY, prefix.DISTILLED | prefix.UNDISTILLED, prefix.FIRST_SEED),
        ("prefix, 20 %", sweep.STUDY, prefix.WEAKER, prefix.FIRST_SEED),
        ("prefix, 10 %", sweep.STUDY, prefix.WEAKEST, prefix.FIRST_SEED),
        ("prefix, 400", sweep.STUDY, LONGER, prefix.FIRST_SEED),
        ("prefix, 14", sweep.STUDY, prefix.BRIEF, prefix.FIRST_SEED),
        ("prefix, two bits", qarl.CONFIG, prefix.LOW, prefix.FIRST_SEED),
        ("praxis", praxis.CONFIG, praxis.ROWS, 0),
        ("prefix, 96", praxis.CONFIG, prefix.MIDDLE, prefix.FIRST_SEED),
        ("prefix, long", praxis.CONFIG, prefix.LONG, prefix.FIRST_SEED),
        ("prefix, late", heterorl.CONFIG, prefix.LATE, prefix.FIRST_SEED),
        ("heterorl", heterorl.CONFIG, heterorl.TABLE | heterorl.MORE, 0),
    ):
        for label, flags in given.items():
            if can_be_weighed(label, flags, config):
                found[name, label] = (config, flags, seed)
    return found


def can_be_weighed(label: str, flags: dict, config: str) -> bool:
    """Not where the policy samples for itself, samples are stale, the learner rounds, or another K is recorded."""
    alone = flags.get("actor") == "none" or (config == qarl.CONFIG and "rollout_quant" not in flags)
    if config == heterorl.CONFIG:
        return flags["max_staleness"] == LATE and "delay" not in flags and "obrs_target" not in flags
    other = "rollout_batch" in flags or "learner_quant" in flags or "distill_kl_target" in flags
    return not (alone or other or label.startswith(("K = 10", "K = 40")))


def sampler_of(flags: dict) -> dict:
    return {key: flags[key] for key in SAMPLER if key in flags}


def row_of(flags: dict) -> str:
    """A row as worth.py takes it: tis is_cap=3."""
    more = [f"{key}={value}" for key, value in flags.items() if key not in (*SAMPLER, *TRAINING, "objective")]
    return " ".join([flags["objective"], *more])


def how_taught(flags: dict) -> str:
    return "not distilled" if "distill_lambda" in flags else "distilled"


def name_of(config: str, flags: dict) -> str:
    """Of a sampler's record."""
    return sweep.slug(" ".join([Path(config).stem, *map(str, sampler_of(flags).values())]))


def samplers() -> dict[str, tuple[str, dict, list[str]]]:
    """Name of a record -> (configuration, flags of the sampler, rows)."""
    found = {}
    for config, flags, _ in rows().values():
        how = sampler_of(flags)
        found.setdefault(name_of(config, flags), (config, how, []))[2].append(row_of(flags))
    everything = set(map(str.strip, worth.ROWS.split(";")))
    return {name: (config, how, sorted(everything | set(texts))) for name, (config, how, texts) in found.items()}


def flags_of(config: str, how: dict) -> list[str]:
    """What worth.py must know of a sampler before the first update."""
    flags = [f"--{key}={value}" for key, value in how.items()]
    if how.get("rollout_quant") == "w2a16":  # what is worth little takes more responses to tell from nothing
        flags += ["--batches=96", "--reference=96", "--noise_batches=12"]
    if config == praxis.CONFIG:  # its batches are a quarter of the others'
        flags += ["--batches=48", "--reference=96", "--noise_batches=8"]
    if config == heterorl.CONFIG:
        flags += [f"--model={worth_map.policy_after(128)}", f"--stale={worth_map.policy_after(128 - LATE)}"]
        flags += ["--delay=none", "--cppo_beta=0", "--batches=32", "--reference=64", "--noise_batches=8"]
    return flags


def longer() -> dict[str, dict]:
    """LONGER's rows that are recorded, each as its record."""
    runs = {label: sweep.record_of({**flags, "seed": prefix.FIRST_SEED}) for label, flags in LONGER.items()}
    return {label: run for label, run in runs.items() if run}


def name_after(run: dict, updates: int) -> str:
    """Of the record of what a run has become: at the start all are the same."""
    return f"{run['name']}-after-{updates}" if updates else "400-after-0"


def models_after(run: dict, updates: int) -> list[str]:
    """What worth.py must know of them."""
    made = sweep.shown(sweep.folder_of(run["name"]) / "checkpoints" / f"step_{updates:06d}")
    return [f"--model={made}/policy", f"--actor={made}/actor"] if updates else []


def measure(name: str, config: str, flags: list[str], texts: list[str]) -> None:
    """Weigh the rows of one sampler, if that is not recorded."""
    path = FOLDER / f"{name}.json"
    if path.is_file():
        return
    flags = [*flags, f"--rows={'; '.join(texts)}", f"--json={os.path.relpath(path, sweep.ROOT)}"]
    argv = [sys.executable, "worth.py", f"--config={config}", *flags]
    done = subprocess.run(argv, cwd=sweep.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(argv[1:])} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def recorded(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def weighed(config: str, flags: dict) -> dict | None:
    """What is recorded of a row's worth."""
    name = name_of(config, flags)
    if not (FOLDER / f"{name}.json").is_file():
        return None
    rows = recorded(name)["rows"]
    return rows.get(row_of(flags)) or rows.get(SAME.get(row_of(flags)))


# ---------------------------------------------------------------------------------------------------------------------
# Worth against what was reached
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Point:
    """One row of one study."""

    label: str
    family: str  # points that may be compared: the same models, task and budget, with or without distillation
    sampler: str  # the record of worth
    worth: float
    worth_se: float
    kl: float  # of the sampler at the start
    reached: float  # at the end, percent (`reached_by`)
    reached_se: float
    step: dict = field(default_factory=dict)  # what else was measured with worth: scale, bias, noise, cosine
    runs: list[dict] = field(default_factory=list)  # the records of its runs


def points() -> list[Point]:
    """Of every row that is weighed and recorded."""
    found = {}
    for (study, label), (config, flags, seed) in rows().items():
        name, x = name_of(config, flags), weighed(config, flags)
        got = sweep.recorded(sweep.with_seeds(flags, 3, seed), config)
        if not got or not x:
            continue
        reached, error = reached_by(got, study)
        kl = recorded(name)["about"]["kl"]
        key = (name, row_of(flags), how_taught(flags), seed, "steps" in flags)  # a row may stand in two studies
        models = "other base models" if seed == 0 else "these base models"
        family = f"{name}, {models}, {how_taught(flags)}"
        family += ", 400 updates" if "steps" in flags else ""
        family += ", reward" if config == praxis.CONFIG else ""
        if config == qarl.CONFIG:
            family = f"low bits, {models}"
        if config == heterorl.CONFIG:
            family = f"late samplers, {models}"
        point = Point(label, family, name, x["worth"], x["worth_se"], kl, reached, error, x, got)
        found.setdefault(key, point)
    return list(found.values())


def reached_by(got: list[dict], study: str) -> tuple[float, float]:
    """What training reached, and its error, in percent: pass@1 of the policy on held-out problems.

    Where length earns a bonus, the reward: of the policy there too, or, of Praxis' rows, whose checkpoints are gone, of
    the last tenth of the responses."""
    if study in ("prefix, 96", "prefix, long"):
        return praxis.over_seeds(got, "reward")
    if study == "praxis":
        last = [100 * np.array(r["columns"]["reward"][-(len(r["updates"]) // 10) :]) for r in got]
        return sweep.mean_se([x.mean() for x in last], last[0].std(ddof=1) / math.sqrt(len(last[0])))
    return sweep.final(got)


def centred(points: list[Point], value: Callable) -> np.ndarray:
    """Ranks of value(point) inside each family, centred and over its size: levels of families do not enter."""
    out = np.zeros(len(points))
    for family in {p.family for p in points}:
        own = [i for i, p in enumerate(points) if p.family == family]
        r = ranks(np.array([value(points[i]) for i in own]))
        out[own] = (r - r.mean()) / len(own)
    return out


def interval(x: np.ndarray, y: np.ndarray, free: int) -> tuple[float, float, float]:
    """The correlation of x and y, and its 95 % interval by Fisher's z with so many degrees of freedom."""
    if not np.any(x) or not np.any(y):
        return math.nan, math.nan, math.nan
    r = float(np.clip(x @ y / math.sqrt((x @ x) * (y @ y)), -1 + 1e-12, 1 - 1e-12))
    half = 1.96 / math.sqrt(max(free, 1))
    return r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def within(points: list[Point], value: Callable) -> tuple[float, float, float]:
    """Spearman's correlation of value(point) and what was reached inside the families, and its 95 % interval."""
    free = len(points) - len({p.family for p in points}) - 2
    return interval(centred(points, value), centred(points, lambda p: p.reached), free)


def apart(points: list[Point]) -> Iterator[tuple[Point, Point]]:
    """(what ended higher, what ended lower), of each pair of one family that is more than two errors apart."""
    for a, b in itertools.combinations(points, 2):
        if a.family == b.family and abs(a.reached - b.reached) > 2 * math.hypot(a.reached_se, b.reached_se):
            yield (a, b) if a.reached > b.reached else (b, a)


def told_apart(points: list[Point], value: Callable) -> tuple[int, int]:
    """(pairs that value(point) orders as training did, all pairs that it orders), of those that are `apart`."""
    said = [value(high) > value(low) for high, low in apart(points) if value(high) != value(low)]
    return sum(said), len(said)


MEASURES = {"worth": lambda p: p.worth, "- KL of the sampler": lambda p: -p.kl}


def correlations(found: list[Point]) -> str:
    cells = []
    families = sorted({p.family for p in found})
    for name, value in MEASURES.items():
        for family in ("all", *families):
            own = [p for p in found if family in ("all", p.family)]
            r, low, high = within(own, value)
            right, n = told_apart(own, value)
            share = f"{right} of {n}" if n else "-"
            if len(own) > 2 and not math.isnan(r):
                cells.append([name, family, str(len(own)), f"{r:.2f}", f"{low:.2f} to {high:.2f}", share])
    head = ["", "rows", "n", "Spearman inside families", "95 %", "pairs more than two errors apart, ordered right"]
    return "## Does it order as training did?\n\n" + sweep.markdown(head, cells)


# ---------------------------------------------------------------------------------------------------------------------
# What else matters
# ---------------------------------------------------------------------------------------------------------------------


def over_seeds(of_run: Callable[[dict], float]) -> Callable[[Point], float]:
    return lambda p: sum(map(of_run, p.runs)) / len(p.runs)


def column(run: dict, key: str) -> np.ndarray:
    return np.array([x for x in run["columns"][key] if x is not None])


def tenths(run: dict, key: str) -> tuple[np.ndarray, np.ndarray]:
    """A column's first tenth and its last."""
    x = column(run, key)
    n = max(len(x) // 10, 2)
    return x[:n], x[-n:]


def growth(run: dict) -> float:
    """Of the sampler's KL: its last tenth over its first."""
    first, last = tenths(run, "rollout_corr/k3_kl")
    return last.mean() / max(first.mean(), 1e-12)


def unsteady(x: np.ndarray) -> float:
    """Standard deviation over mean."""
    return x.std(ddof=1) / x.mean()


def entropy_lost(run: dict) -> float:
    first, last = tenths(run, "entropy")
    return first.mean() - last.mean()


# Signs are set so that more is better, as one would guess before looking.
BEFORE = {
    "scale": lambda p: p.step["scale"],
    "- bias": lambda p: -p.step["bias"],
    "- noise": lambda p: -p.step["noise"],
    "cosine of the mean step": lambda p: p.step["cosine"],
}
ON_THE_WAY = {
    "- mean KL of the sampler": over_seeds(lambda run: -column(run, "rollout_corr/k3_kl").mean()),
    "- growth of that KL": over_seeds(lambda run: -growth(run)),
    "- tokens clipped": over_seeds(lambda run: -column(run, "clip_fraction").mean()),
    "- unsteady gradient norm, first tenth": over_seeds(lambda run: -unsteady(tenths(run, "grad_norm")[0])),
    "- unsteady gradient norm, whole run": over_seeds(lambda run: -unsteady(column(run, "grad_norm"))),
    "- entropy lost": over_seeds(lambda run: -entropy_lost(run)),
}


def where_it_varies(points: list[Point], value: Callable) -> list[Point]:
    """The points of the families in which value(point) takes more than one value."""
    values = {}
    for p in points:
        values.setdefault(p.family, set()).add(value(p))
    return [p for p in points if len(values[p.family]) > 1]


def besides_worth(points: list[Point], value: Callable) -> tuple[np.ndarray, np.ndarray]:
    """Ranks of value(point) and of what was reached, each without what the rank of worth says of it."""
    w = centred(points, lambda p: p.worth)
    both = centred(points, value), centred(points, lambda p: p.reached)
    return tuple(x - w * (x @ w) / max(w @ w, 1e-12) for x in both)


def given_worth(points: list[Point], value: Callable) -> tuple[float, float, float]:
    """The partial rank correlation of value(point) and what was reached, worth given, and its 95 % interval."""
    free = len(points) - len({p.family for p in points}) - 3
    return interval(*besides_worth(points, value), free)


def largest_by_chance(points: list[Point], values: list[Callable], draws: int = 2000) -> np.ndarray:
    """The largest of the partial correlations' sizes over all values, in draws that shuffle each family's results.

    What is shuffled is the part of a result that worth does not say (Freedman and Lane)."""
    rng = np.random.default_rng(0)
    families = [[i for i, p in enumerate(points) if p.family == f] for f in sorted({p.family for p in points})]
    where, parts = {id(p): i for i, p in enumerate(points)}, []
    for value in values:
        own = where_it_varies(points, value)
        x, y = np.zeros(len(points)), np.zeros(len(points))
        index = [where[id(p)] for p in own]
        x[index], y[index] = besides_worth(own, value)
        parts.append((x, y))
    found = []
    for _ in range(draws):
        order = np.arange(len(points))
        for own in families:
            order[own] = rng.permutation(own)
        found.append(max(abs(x @ y[order]) / math.sqrt((x @ x) * (y @ y)) for x, y in parts))
    return np.array(found)


def mends(points: list[Point], value: Callable) -> tuple[int, int]:
    """Pairs that are `apart`: (ordered wrongly by worth and rightly by value(point), the other way round)."""
    mended = broken = 0
    for high, low in apart(points):
        mended += high.worth < low.worth and value(high) > value(low)
        broken += high.worth > low.worth and value(high) < value(low)
    return mended, broken


def sure(points: list[Point]) -> tuple[int, int]:
    """`told_apart` by worth, of the pairs that are more than two errors apart in worth, too."""
    pairs = [(a, b) for a, b in apart(points) if abs(a.worth - b.worth) > 2 * math.hypot(a.worth_se, b.worth_se)]
    return sum(high.worth > low.worth for high, low in pairs), len(pairs)


def attainable(points: list[Point], worth_too: bool, draws: int = 200) -> tuple[float, float, float]:
    """`within` by worth, had training ordered each family as worth does: mean and 95 % of draws within the errors."""
    ordered = []
    for family in sorted({p.family for p in points}):
        own = sorted((p for p in points if p.family == family), key=lambda p: p.worth)
        ends = sorted((p.reached, p.reached_se) for p in own)
        ordered += [replace(p, reached=y, reached_se=se) for p, (y, se) in zip(own, ends, strict=True)]
    rng, found = np.random.default_rng(0), []
    for _ in range(draws):
        drawn = [replace(p, reached=rng.normal(p.reached, p.reached_se)) for p in ordered]
        if worth_too:
            drawn = [replace(p, worth=rng.normal(p.worth, p.worth_se)) for p in drawn]
        found.append(within(drawn, lambda p: p.worth)[0])
    return float(np.mean(found)), *map(float, np.percentile(found, (2.5, 97.5)))


def what_else(found: list[Point]) -> str:
    """Each candidate beside worth: what it says of where a row ends, and of the pairs that worth orders wrongly."""
    candidates = BEFORE | ON_THE_WAY
    chance = largest_by_chance(found, list(candidates.values()))
    right, pairs = told_apart(found, MEASURES["worth"])
    cells = []
    for name, value in candidates.items():
        own = where_it_varies(found, value)
        alone, partial = within(own, value), given_worth(own, value)
        cells.append([name, "before" if name in BEFORE else "on the way", str(len(own))])
        cells[-1] += [f"{r:.2f} ({low:.2f} to {high:.2f})" for r, low, high in (alone, partial)]
        p = (1 + sum(chance >= abs(partial[0]))) / (1 + len(chance))
        cells[-1] += [sweep.number(p), *map(str, mends(found, value))]
    head = ["", "known", "rows", "Spearman inside families", "given worth", "p", f"mends, of {pairs - right}"]
    head.append(f"breaks, of {right}")
    limits = ["{:.2f} ({:.2f} to {:.2f})".format(*attainable(found, too)) for too in (False, True)]
    of_one_sampler = [replace(p, family=f"{p.family}, {p.sampler}") for p in found]
    counts = ["{} of {}".format(*sure(points)) for points in (found, of_one_sampler)]
    different = {id(p) for pair in apart(found) for p in pair}
    some = [p for p in found if id(p) in different]
    note = (
        f"Where two rows are more than two errors apart in worth, too, worth puts {counts[0]} pairs in order; with\n"
        f"one sampler for both {counts[1]}. Errors are taken as independent, which those of one sampler are not.\n\n"
        "Had training ordered every family exactly as worth does, Spearman's correlation would be\n"
        f"{limits[0]} with training's errors, and {limits[1]} with those of worth, too.\n"
        f"Over the {len(some)} rows that end more than two errors from some other of their family it is "
        f"{within(some, MEASURES['worth'])[0]:.2f}.\n\n"
        "given worth: the partial rank correlation. p: how often the largest of all candidates is as large by chance\n"
        f"(2000 shuffles inside families; one in twenty is above {np.quantile(chance, 0.95):.2f}). mends, breaks: "
        "of the pairs\nthat worth orders wrongly and rightly, how many the candidate would order the other way."
    )
    return f"## What else matters?\n\n{note}\n\n" + sweep.markdown(head, cells)


def misses(found: list[Point]) -> str:
    """The pairs that training tells apart and worth orders wrongly."""
    cells = []
    for high, low in apart(found):
        if high.worth < low.worth:
            cells.append([high.family])
            cells[-1] += [f"{p.label}: {p.worth:.3f} +- {p.worth_se:.3f}, {p.reached:.1f}" for p in (high, low)]
            errors = (low.worth - high.worth) / math.hypot(high.worth_se, low.worth_se)
            cells[-1].append(f"{errors:.1f}")
    head = ["", "ended higher: worth, %", "ended lower: worth, %", "apart in worth, errors"]
    return "## The misses\n\n" + sweep.markdown(head, sorted(cells))


def table(found: list[Point]) -> str:
    cells = []
    for p in sorted(found, key=lambda p: (p.family, -p.worth)):
        reached = sweep.percent((p.reached, p.reached_se))
        cells.append([p.family, p.label, p.sampler, f"{p.worth:.3f} +- {p.worth_se:.3f}", sweep.number(p.kl), reached])
    head = ["", "row", "sampler", "worth at the start", "KL at the start", "reached at the end, %"]
    return "## The rows\n\n" + sweep.markdown(head, cells)


def on_the_way() -> str:
    """Worth of LONGER's rows after some updates, each on what it has become, against where it ended."""
    cells, found = [], {n: [] for n in UPDATES}
    for label, run in longer().items():
        if not all((FOLDER / f"{name_after(run, n)}.json").is_file() for n in UPDATES):
            continue
        then = {n: (100 * y, 100 * se) for n, y, se in run["evals"]["policy"]}
        reached = sweep.final([run])
        cells.append([label])
        for n in UPDATES:
            measured = recorded(name_after(run, n))
            x, kl = measured["rows"][row_of(LONGER[label])], measured["about"]["kl"]
            cells[-1].append(f"{x['worth']:.2f} +- {x['worth_se']:.2f} ({then[n][0]:.1f}, {kl:.3f})")
            family = how_taught(LONGER[label])
            found[n].append(Point(label, family, name_after(run, n), x["worth"], x["worth_se"], kl, *reached))
        cells[-1].append(sweep.percent(reached))
    if not cells:
        return ""
    counts = ["{} of {}".format(*told_apart(found[n], MEASURES["worth"])) for n in UPDATES]
    cells.append(["pairs more than two errors apart, ordered right", *counts, ""])
    head = ["row (400 updates)", *(f"after {n}" for n in UPDATES), "policy pass@1 at the end, %"]
    text = "Worth (pass@1 in %, KL of the sampler), after so many updates of the row itself.\n\n"
    return "## Worth on the way\n\n" + text + sweep.markdown(head, cells)


def draw(found: list[Point]) -> None:
    """Worth against pass@1, a panel for each family."""
    families = sorted({p.family for p in found})
    plt = sweep.pyplot()
    lines = math.ceil(len(families) / 4)
    fig, axes = plt.subplots(lines, 4, figsize=(14.4, 3.4 * lines), layout="constrained", squeeze=False)
    for ax in axes.flat[len(families) :]:
        ax.set_axis_off()
    for ax, family in zip(axes.flat, families, strict=False):
        own = [p for p in found if p.family == family]
        for sampler, colour in zip(sorted({p.sampler for p in own}), sweep.COLOURS, strict=False):
            some = [p for p in own if p.sampler == sampler]
            x, y = ([getattr(p, key) for p in some] for key in ("worth", "reached"))
            errors = ([p.worth_se for p in some], [p.reached_se for p in some])
            ax.errorbar(x, y, xerr=errors[0], yerr=errors[1], fmt="o", ms=4, lw=0.7, color=colour, label=sampler)
        ax.set_xlabel("worth at the start")
        ax.set_title(family, fontsize=8)
        ax.set_xscale("symlog", linthresh=0.02)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    for first in axes[:, 0]:
        first.set_ylabel("reached at the end (%)")
    sweep.save(fig, sweep.RESULTS / "foretell.png")


def study(flags):
    for name, (config, how, texts) in samplers().items():
        if not flags.draw:
            measure(name, config, flags_of(config, how), texts)
    for run, updates in itertools.product(longer().values(), UPDATES):
        if not flags.draw:
            texts = sorted({row_of(row) for row in LONGER.values()})
            measure(name_after(run, updates), sweep.STUDY, models_after(run, updates), texts)
    if not flags.draw and not (FOLDER / "curvature.json").is_file():
        worth_map.write(FOLDER / "curvature.json", curvature.measure())
    found = points()
    need(found, "--draw: nothing is measured; run it once without --draw")
    bent = curvature.table(recorded("curvature")["rows"])
    parts = (correlations(found), what_else(found), bent, misses(found), on_the_way(), table(found))
    sweep.page("foretell", *filter(None, parts))
    draw(found)


if __name__ == "__main__":
    sweep.main(study, __doc__)
