"""Does worth foretell? Each correction's worth at the start against what the recorded runs with it reached.

    python results/foretell.py          # measure what is missing, then write results/foretell.md and foretell.png

Every row of Table 1, Tables 6 to 10 and the low-bit study whose sampler is another model or has other bits. Rows with
one sampler are weighed together, on its responses, with worth.py: a record each in results/worth. Late samplers have
no distance at the start: the rows of HeteroRL's study are weighed once where the policy of 64 updates ago samples for
that of an on-policy run's update 128 (the run is results/map.py's). Left out: Jackpot's stale samples, other K than 20,
the closed loop, and late samplers by another bound than 64 or by another law of delays (`can_be_weighed`).
"""

import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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
        ("prefix, two bits", qarl.CONFIG, prefix.LOW, prefix.FIRST_SEED),
        ("praxis", praxis.CONFIG, praxis.ROWS, 0),
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


def points() -> list[Point]:
    """Of every row that is weighed and recorded."""
    found = {}
    for (study, label), (config, flags, seed) in rows().items():
        name = name_of(config, flags)
        if not (FOLDER / f"{name}.json").is_file():
            continue
        got = sweep.recorded(sweep.with_seeds(flags, 3, seed), config)
        measured = recorded(name)
        x = measured["rows"].get(row_of(flags)) or measured["rows"].get(SAME.get(row_of(flags)))
        if not got or not x:
            continue
        reached, error = reached_by(got, study)
        kl = measured["about"]["kl"]
        key = (name, row_of(flags), how_taught(flags), seed, "steps" in flags)  # a row may stand in two studies
        models = "other base models" if seed == 0 else "these base models"
        family = f"{name}, {models}, {how_taught(flags)}"
        family += ", 400 updates" if "steps" in flags else ""
        family += ", reward" if config == praxis.CONFIG else ""
        if config == qarl.CONFIG:
            family = f"low bits, {models}"
        if config == heterorl.CONFIG:
            family = f"late samplers, {models}"
        point = Point(label, family, name, x["worth"], x["worth_se"], kl, reached, error)
        found.setdefault(key, point)
    return list(found.values())


def reached_by(got: list[dict], study: str) -> tuple[float, float]:
    """What training reached, and its error, in percent: pass@1 of the policy on held-out problems.

    Where length earns a bonus, the reward: of the policy there too, or, of Praxis' rows, whose checkpoints are gone, of
    the last tenth of the responses."""
    if study == "prefix, long":
        return praxis.over_seeds(got, "reward")
    if study == "praxis":
        last = [100 * np.array(r["columns"]["reward"][-(len(r["updates"]) // 10) :]) for r in got]
        return sweep.mean_se([x.mean() for x in last], last[0].std(ddof=1) / math.sqrt(len(last[0])))
    return sweep.final(got)


def within(points: list[Point], value) -> tuple[float, float, float]:
    """Spearman's correlation of value(point) and what was reached inside the families, and its 95 % interval.

    Ranks are centred in each family, so levels of families do not enter."""
    x, y = [], []
    families = {p.family for p in points}
    for family in families:
        own = [p for p in points if p.family == family]
        for out, values in ((x, [value(p) for p in own]), (y, [p.reached for p in own])):
            r = ranks(np.array(values))
            out.extend((r - r.mean()) / len(own))
    if np.std(x) == 0:
        return math.nan, math.nan, math.nan
    r = float(np.clip(np.corrcoef(x, y)[0, 1], -1 + 1e-12, 1 - 1e-12))
    half = 1.96 / math.sqrt(max(len(x) - len(families) - 2, 1))
    return r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def told_apart(points: list[Point], value) -> tuple[int, int]:
    """(pairs that value(point) orders as training did, all pairs), of one family and more than two errors apart."""
    right = n = 0
    for a, b in itertools.combinations(points, 2):
        apart = abs(a.reached - b.reached) > 2 * math.hypot(a.reached_se, b.reached_se)
        if a.family == b.family and apart and value(a) != value(b):
            n += 1
            right += (value(a) > value(b)) == (a.reached > b.reached)
    return right, n


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
    found = points()
    need(found, "--draw: nothing is measured; run it once without --draw")
    sweep.page("foretell", *filter(None, (correlations(found), on_the_way(), table(found))))
    draw(found)


if __name__ == "__main__":
    sweep.main(study, __doc__)
