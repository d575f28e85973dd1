"""Grids of training runs: run what is missing, record what is needed, draw pages and figures from it.

A study is a script in this folder. It names rows (flags on top of a configuration), `run` makes the
runs that are missing, and the script writes its page and its figures from the records.

A record is one small file, results/runs/STUDY/ROW-seed.json: the row's flags, the command, the
configuration, the git revision, the seconds of each stage and the columns of `RECORDED`. STUDY is
the stem of the configuration file, ROW a short form of the label under which the row was first run.
A record is found by its flags and not by its name, so two studies that share a row share its runs.
A study that was killed goes on where it stopped, inside a run too (train.py --resume).

A page, results/NAME.md, has two parts. Above the line `<!-- table -->` stands what is written by
hand: the reading and the figures. Below it stands what `page` writes from the records.

    python results/table1.py                # run what is missing, then write results/table1.{md,png}
    python results/table1.py --draw         # from the records alone, whatever is there
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# Here for all scripts of this folder: each of them imports this module first.
sys.path.insert(0, str(ROOT))

from tqdm import tqdm

from config import HARMLESS, parse
from flags import UserError, check_output, need, parse_flags, run_command
from run import clean, read_metrics

RESULTS = ROOT / "results"
FOLDERS = ROOT / "out" / "study"
STUDY = "configs/study.toml"
RECORDED = (
    "reward",
    "entropy",
    "grad_norm",
    "clip_fraction",
    "ppo_kl",
    "weight_var",
    "advantage_error",
    "cppo_kl",
    "distill_kl",
    "distill_lambda",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/chi2_seq",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/seq_eff_sample_size",
    "rollout_corr/low_weight_fraction",
    "rollout_corr/seq_clamped_fraction",
    "rollout_corr/rollout_rs_seq_masked_fraction",
    "rollout_corr/ratio_mean",
    "rollout_corr/mean_mismatch",
    "rollout_corr/max_mismatch",
    *(f"rollout_corr/log_r/{q}" for q in ("1", "50", "99", "99.9")),
    "rollout_corr/reward_weighted",
    "ppo_kl_weighted",
    "ppo_k3_kl",
    "error/low_prob_pos",
    "error/low_prob_neg",
    "error/repetition",
    *(f"rollout_corr/low_weight/{n}" for n in (16, 32, 64, 128, 256)),
    "response_length",
    "staleness/mean_updates",
    "delay/clock",
    "delay/dropped_staleness",
    "delay/length_trained",
    "delay/length_decided",
    "delay/length_ks_p",
    "obrs/accept_rate",
    "obrs/lambda",
    "obrs/kappa",
    "obrs/z",
    "obrs/z_exact",
    "obrs/z_low",
    "obrs/z_high",
    "obrs/bracket_width",
    "obrs/kl_before",
    "obrs/kl_after",
    *(f"auto/{x}" for x in ("is_cap", "correction", "responses", "worth")),
)
POINTS = 150  # a longer run is averaged over neighbouring updates

Got = dict[str, list[dict]]  # label of a row -> its records, seed by seed


@dataclass(frozen=True)
class StudyFlags:
    """A study"""

    draw: bool = False
    """Run nothing: write the page and the figures from what is recorded."""
    jobs: int = 2
    """Runs at a time; the cores are shared out between them."""


def no_arguments(script: str) -> None:
    """End a script that takes no flags with one sentence if it is given any."""
    given = " ".join(sys.argv[1:])
    if given:
        sys.exit(f"error: {given}: results/{script}.py takes no flags; leave them out")


def main(study: Callable, doc: str, cls: type = StudyFlags) -> None:
    """Call study(flags) with the command line's flags; an error meant for the user is printed as one sentence."""
    run_command(lambda: study(parse_flags(cls, usage=doc.strip())))


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------


def run(
    rows: dict[str, dict],
    seeds: dict[str, int] | None = None,
    draw: bool = False,
    jobs: int = 2,
    config: str = STUDY,
    first_seed: int = 0,
) -> Got:
    """The records of every row, seed by seed, after running those that are missing, `jobs` at a time.

    rows: label -> flags on top of the file `config`; seeds: label -> how many (1 where none is
    said), from first_seed on. draw: run nothing, and leave out what is not there. UserError: a
    record was made with other settings."""
    wanted = {label: with_seeds(flags, (seeds or {}).get(label, 1), first_seed) for label, flags in rows.items()}
    if not draw:
        if jobs < 1:
            raise UserError(f"--jobs={jobs}: at least one run at a time")
        run_missing(wanted, jobs, config)
    got = {label: recorded(runs, config) for label, runs in wanted.items()}
    need(any(got.values()), f"--draw: no record of {config} in {shown(RESULTS / 'runs')}; run it once without --draw")
    return {label: records for label, records in got.items() if records}


def with_seeds(flags: dict, n: int, first: int = 0) -> list[dict]:
    """The flags of a row's runs, n seeds from the first on."""
    return [{**flags, "seed": seed} for seed in range(first, first + n)]


def recorded(runs: list[dict], config: str) -> list[dict]:
    """The records of these runs that are there."""
    return [record for flags in runs if (record := record_of(flags, config))]


def run_missing(wanted: dict[str, list[dict]], jobs: int, config: str) -> None:
    """Make the records that are not there: the first seed of every row, then the second."""
    missing = {}  # key of the flags -> (label, flags): a row under two labels is run once
    for label, runs in wanted.items():
        for flags in runs:
            if not record_of(flags, config):
                missing.setdefault(key_of(flags, config), (label, flags))
    todo = sorted(missing.values(), key=lambda row: row[1]["seed"])
    names = names_for(todo, config)
    threads = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, flags, n, threads, config) for (_, flags), n in zip(todo, names, strict=True)]
        for future in tqdm(futures, desc="runs", disable=not futures):
            future.result()


def one(flags: dict, name: str, threads: str, config: str = STUDY) -> None:
    """Run or resume one run and write its record."""
    out, path = folder_of(name, config), path_of(name, config)
    argv = [sys.executable, *command(flags, name, config)]
    if (out / "config.json").is_file():
        argv.append("--resume")
    env = {**os.environ, "OMP_NUM_THREADS": threads, "GOMP_SPINCOUNT": "2000", "TQDM_DISABLE": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(argv[1:])} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    last = read_metrics(out)[-1]["step"] + 1
    steps = json.loads((out / "config.json").read_text(encoding="utf-8"))["config"]["steps"]
    if last < steps:
        raise SystemExit(
            f"error: {out}: stopped by a signal after update {last} of {steps}; start the study again to go on"
        )
    record = {"flags": flags, **condense(out, command(flags, name, config))}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{name}.tmp")
    scratch.write_text(json.dumps(record, default=str) + "\n", encoding="utf-8")
    os.replace(scratch, path)
    records_in.cache_clear()


def condense(out: Path, argv: list[str]) -> dict:
    """What is recorded of a run folder."""
    rows = read_metrics(out)
    made = json.loads((out / "config.json").read_text(encoding="utf-8"))
    steps = [r for r in rows if r["step"] >= 0]
    width = math.ceil(len(steps) / POINTS)
    blocks = [steps[i : i + width] for i in range(0, len(steps), width)]

    def column(key):
        """The mean of each block, to four digits; of names the last."""
        values = []
        for block in blocks:
            x = [r[key] for r in block if r.get(key) is not None]
            if x and isinstance(x[-1], str):
                values.append(x[-1])
            else:
                values.append(float(f"{sum(x) / len(x):.4g}") if x else None)
        return values

    measured = [key for key in RECORDED if any(r.get(key) is not None for r in steps)]
    evals = {}
    for name in ("policy", "actor"):
        at = [r for r in rows if f"eval/{name}_pass@1" in r]
        if at:
            evals[name] = [[r["step"] + 1, r[f"eval/{name}_pass@1"], r[f"eval/{name}_se"]] for r in at]
    stages = ("rollout_s", "ref_s", "update_s", "auto_s", "sync_s", "eval_s", "save_s")
    return {
        "command": " ".join(["python", *argv]),
        "git": made["git"],
        "versions": made["versions"],
        "config": {k: clean(v) for k, v in made["config"].items() if k not in HARMLESS},
        "seconds": {k: round(sum(r.get(k, 0.0) for r in rows), 1) for k in stages},
        "evals": evals,
        "updates": [b[-1]["step"] + 1 for b in blocks],
        "columns": {key: column(key) for key in measured},
    }


def command(flags: dict, name: str, config: str = STUDY) -> list[str]:
    """The arguments of python that make this run."""
    out = os.path.relpath(folder_of(name, config), ROOT)
    return ["train.py", f"--config={config}", *(f"--{k}={v}" for k, v in flags.items()), f"--out={out}"]


# ---------------------------------------------------------------------------------------------------------------------
# Records: where they are, and how one is found
# ---------------------------------------------------------------------------------------------------------------------


def folder_of(name: str, config: str = STUDY) -> Path:
    """The run folder of a record."""
    return FOLDERS / Path(config).stem / name


def path_of(name: str, config: str = STUDY) -> Path:
    """The file of a record."""
    return RESULTS / "runs" / Path(config).stem / f"{name}.json"


def slug(label: str) -> str:
    """A label as a file's name: 'Jackpot, c1 = 2' -> 'jackpot-c1-2'."""
    return re.sub(r"[^a-z0-9.]+", "-", label.lower().replace("'", "")).strip("-.") or "row"


def names_for(todo: list[tuple[str, dict]], config: str) -> list[str]:
    """The names of new records, ROW-seed: the row's name if another seed has one, else its label's, made unique."""
    taken = {}  # name of a row -> key of its flags
    for (stem, flags), record in records_in(RESULTS / "runs").items():
        if stem == Path(config).stem:
            taken[record["name"].rpartition("-")[0]] = row_of(flags)
    names = []
    for label, flags in todo:
        row = row_of(key_of(flags, config)[1])
        known = [name for name, other in taken.items() if other == row]
        name, n = slug(label), 1
        while not known and taken.setdefault(name, row) != row:
            n += 1
            name = f"{slug(label)}-{n}"
        names.append(f"{(known or [name])[0]}-{flags['seed']}")
    return names


def row_of(flags: frozenset) -> frozenset:
    """What the seeds of a row have in common."""
    return frozenset((key, value) for key, value in flags if key != "seed")


def key_of(flags: dict, config: str) -> tuple[str, frozenset]:
    """What a record is found by: the stem of its configuration's file, and its flags as they are written."""
    return Path(config).stem, frozenset((key, str(value)) for key, value in flags.items())


@functools.cache
def records_in(folder: Path) -> dict[tuple[str, frozenset], dict]:
    """Every record below `folder` by its key, each with its file's `name` and `path`.

    A record that was written before records held their flags is known by the flags of its command,
    wherever it lies."""
    records = {}
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            words = [word[2:].partition("=") for word in record["command"].split() if word.startswith("--")]
            said = {key: value for key, _, value in words}
            flags = record.get("flags", {k: v for k, v in said.items() if k not in ("config", "out")})
            key = key_of(flags, said["config"])
            if not {"config", "evals", "updates", "columns"} <= record.keys():
                raise KeyError
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(f"{shown(path)}: not the record of a run; move it out of results/runs") from None
        if key in records:
            raise UserError(f"{shown(path)} and {shown(records[key]['path'])} record the same run; delete one of them")
        records[key] = {"name": path.stem, "path": path, **record}
    return records


def record_of(flags: dict, config: str = STUDY) -> dict | None:
    """The record of a run, if it is there. UserError: it was made with other settings."""
    record = records_in(RESULTS / "runs").get(key_of(flags, config))
    if record is None:
        return None
    made = [flags[name] for name in ("model", "actor") if str(flags.get(name)).startswith("out/")]
    if not all((ROOT / folder).is_dir() for folder in made):  # another study's models, which are not here
        return record
    with contextlib.chdir(ROOT):  # where the paths of a command begin
        now = asdict(parse(command(flags, record["name"], config)[1:]))
    changed = [k for k, v in record["config"].items() if k in now and clean(now[k]) != v]
    changed = [k for k in changed if k != "rollout_memory"]  # the size of vLLM's cache, which changes no token
    if "obrs/z" not in record["columns"]:
        changed = [k for k in changed if not k.startswith("obrs_")]  # no matter to a run without OBRS
    if changed:
        was = f"made with {changed[0]} = {record['config'][changed[0]]!r}, {config} now says {now[changed[0]]!r}"
        raise UserError(f"{shown(record['path'])}: {was}; delete the file to run it again")
    return record


def shown(path: Path) -> str:
    """A path as an error names it."""
    return os.path.relpath(path, ROOT)


# ---------------------------------------------------------------------------------------------------------------------
# Reading records
# ---------------------------------------------------------------------------------------------------------------------


def final(records: list[dict], name: str = "policy") -> tuple[float, float]:
    """Last held-out pass@1 in percent: mean over seeds, and its standard error.

    The error is that over seeds, or over problems where there is one seed."""
    last = [r["evals"][name][-1] for r in records if name in r["evals"]]
    return mean_se([100 * x[1] for x in last], 100 * last[0][2])


def best(records: list[dict]) -> tuple[float, float]:
    """The best held-out pass@1 on the way, in percent: mean over seeds, standard error as in `final`."""
    top = [max(r["evals"]["policy"], key=lambda x: x[1]) for r in records]
    return mean_se([100 * x[1] for x in top], 100 * top[0][2])


def lately(records: list[dict], n: int = 4) -> float:
    """Mean of the last n evaluations in percent, over seeds: for runs whose last one swings."""
    last = [y for r in records for _, y, _ in r["evals"]["policy"][-n:]]
    return 100 * sum(last) / len(last)


def mean_se(x: list[float], single: float = math.nan) -> tuple[float, float]:
    """Mean and standard error; `single` is the error where there is one value."""
    m = sum(x) / len(x)
    if len(x) == 1:
        return m, single
    return m, math.sqrt(sum((v - m) ** 2 for v in x) / (len(x) - 1) / len(x))


def tail(records: list[dict], key: str, share: float = 0.1) -> float:
    """Mean of a column over the last tenth of the updates, over seeds; NaN where it was not measured."""
    x = []
    for r in records:
        n = max(1, round(share * len(r["updates"])))
        x += [v for v in r["columns"].get(key, [])[-n:] if v is not None]
    return sum(x) / len(x) if x else math.nan


def seconds(records: list[dict], *stages: str) -> float:
    """Seconds that a run spends in these stages: mean over seeds."""
    return sum(r["seconds"][s] for r in records for s in stages) / len(records)


def running_mean(x: list[float], width: int) -> list[float]:
    """Each value's mean with up to width - 1 values before it."""
    windows = [x[max(0, i - width + 1) : i + 1] for i in range(len(x))]
    return [sum(w) / len(w) for w in windows]


def percent(value: tuple[float, float]) -> str:
    """(mean, error) as a cell."""
    return f"{value[0]:.1f} +- {value[1]:.1f}"


def number(x: float) -> str:
    """Three digits, or nothing for NaN."""
    return "" if math.isnan(x) else f"{x:.3g}"


# ---------------------------------------------------------------------------------------------------------------------
# Pages
# ---------------------------------------------------------------------------------------------------------------------

MARKER = "<!-- table -->\n"  # a line of its own
COLUMNS = {
    "seeds": lambda rs: str(len(rs)),
    "policy pass@1, %": lambda rs: percent(final(rs)),
    "best, %": lambda rs: percent(best(rs)),
    "actor pass@1, %": lambda rs: percent(final(rs, "actor")) if "actor" in rs[0]["evals"] else "",
    "KL(policy, actor)": lambda rs: number(tail(rs, "distill_kl")),
    "ESS": lambda rs: number(tail(rs, "rollout_corr/rollout_is_eff_sample_size")),
    "accepted, %": lambda rs: number(100 * tail(rs, "obrs/accept_rate")),
    "rollout, s": lambda rs: f"{seconds(rs, 'rollout_s'):.0f}",
    "learner, s": lambda rs: f"{seconds(rs, 'ref_s', 'update_s', 'sync_s'):.0f}",
}


def page(name: str, *parts: str) -> None:
    """Write results/NAME.md anew below MARKER; the parts are printed too."""
    text = "\n".join(parts)
    note = f"Written by `python results/{name}.py`; with `--draw` from the records alone, without running anything.\n"
    rewrite(name, f"{note}\n{text}")
    print(text)


def rewrite(name: str, text: str) -> None:
    """Put `text` below MARKER on results/NAME.md, and keep what stands above it."""
    path = RESULTS / f"{name}.md"
    reading = f"# {name}\n\n![{name}]({name}.png)\n\n"
    if path.is_file():
        reading = path.read_text(encoding="utf-8").split(MARKER)[0]
    path.write_text(f"{reading}{MARKER}\n{text}", encoding="utf-8")


def table(title: str, got: Got, columns: dict = COLUMNS) -> str:
    """A part of a page: one line a row, then the command of each row's first seed.

    columns: title -> function of a row's records that returns a cell; a column without any is left out."""
    used = {}
    for column, cell in columns.items():
        cells = [cell(records) for records in got.values()]
        if any(cells):
            used[column] = cells
    rows = list(zip(got, *used.values(), strict=True))
    first = [r["evals"]["policy"][0] for records in got.values() for r in records]
    start = sorted({percent((100 * x[1], 100 * x[2])) for x in first})
    commands = [lines_of(label, records[0]) for label, records in got.items()]
    parts = [
        f"## {title}",
        f"Policy pass@1 before training: {', '.join(start)} %.\n"
        "After a pass@1: the standard error over seeds, or over problems where there is one seed.",
        markdown(["", *used], rows).rstrip(),
        "The commands of the first seeds:",
        "```\n" + "\n".join(commands) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def lines_of(label: str, record: dict) -> str:
    """A row's command below its label, in lines of at most 120 characters."""
    command = record["command"].split(" --out=")[0]
    lines = textwrap.wrap(command, 110, break_on_hyphens=False, break_long_words=False)
    return f"# {label}\n" + " \\\n    ".join(lines)


def markdown(head: list[str], rows: list) -> str:
    """A table in Markdown: the cells of its head, and of each row."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------------------------------

STRONG = "#D55E00"  # the row that matters; with the others, the colours of Okabe and Ito
COLOURS = ("#0072B2", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000", "#7F7F7F")
LOGARITHMIC = ("distill_kl", "distill_lambda", "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/mean_mismatch")
LINES = 7  # of a panel


class Group(NamedTuple):
    """Panels side by side that show the same rows and share one legend."""

    title: str
    labels: list[str]  # at most LINES
    panels: list[tuple[str, str]]  # (title, column, or eval/policy and eval/actor)


def figure(name: str, got: Got, groups: list[Group], strong: tuple[str, ...] = ()) -> None:
    """Draw results/NAME.png: the groups below one another, the rows named in `strong` drawn strongest."""
    plt = pyplot()
    groups = [g._replace(labels=[label for label in g.labels if label in got]) for g in groups]
    heights = [3.3 * math.ceil(len(g.panels) / 3) + 0.6 for g in groups]
    width = 4.6 * min(3, max(len(g.panels) for g in groups))
    fig = plt.figure(figsize=(width, sum(heights)), layout="constrained")
    parts = fig.subfigures(len(groups), 1, height_ratios=heights, squeeze=False).flat
    for part, group in zip(parts, groups, strict=True):
        draw_group(part, got, group, strong)
    save(fig, RESULTS / f"{name}.png")


def draw_group(part, got: Got, group: Group, strong: tuple[str, ...]) -> None:
    """One group of a figure."""
    if len(group.labels) > LINES:
        raise UserError(f"{group.title}: {len(group.labels)} lines in a panel, more than {LINES} are not told apart")
    columns = min(3, len(group.panels))
    axes = part.subplots(math.ceil(len(group.panels) / columns), columns, squeeze=False).flat
    styles = styles_of(group.labels, strong)
    legend = {}
    for ax, (title, key) in zip(axes, group.panels, strict=False):
        evaluated = key.startswith("eval/")
        for label in group.labels:
            dots = dict(marker="o", ms=3) if evaluated else {}
            curve(ax, label, got[label], key, smooth=1 if evaluated else 8, **styles[label], **dots)
        legend.update(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("updates", fontsize=8)
        ax.tick_params(labelsize=8)
        ax.grid(alpha=0.3)
        if key in LOGARITHMIC:
            ax.set_yscale("log")
    for ax in axes:  # those that no panel took
        ax.set_axis_off()
    if group.title:
        part.suptitle(group.title, fontsize=11, fontweight="bold")
    ordered = [label for label in group.labels if label in legend]
    handles = [legend[label] for label in ordered]
    abreast = min(4, len(ordered), 130 // max(map(len, ordered)))
    part.legend(handles, ordered, loc="outside lower center", ncols=abreast, frameon=False, fontsize=9)


def styles_of(labels: list[str], strong: tuple[str, ...]) -> dict[str, dict]:
    """How each row is drawn: the one of `strong` thick and in front, the others thin, every colour once."""
    front = next((label for label in labels if label in strong), None)
    others = [label for label in labels if label != front]
    styles = {label: dict(color=colour, lw=1.2) for label, colour in zip(others, COLOURS, strict=False)}
    return {**styles, front: dict(color=STRONG, lw=2.6, zorder=3)}


def curve(ax, label: str, records: list[dict], key: str, smooth: int = 1, **style) -> None:
    """One line: a column, or `eval/policy` and `eval/actor`, averaged over seeds; the band is the range over seeds."""
    lines = [line for r in records if (line := points_of(r, key))]
    if not lines:
        return
    x = [at for at, _ in lines[0]]
    ys = [running_mean([y for _, y in line], smooth) for line in lines]
    columns = list(zip(*ys, strict=False))  # over seeds; a shorter one ends the line
    x = x[: len(columns)]
    (line,) = ax.plot(x, [sum(c) / len(c) for c in columns], label=label, **style)
    if len(ys) > 1:
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        ax.fill_between(x, low, high, color=line.get_color(), alpha=0.12, lw=0)


def points_of(record: dict, key: str) -> list[tuple[int, float]]:
    """(updates, value) of a column, or of an evaluation in percent; what was not measured is left out."""
    if key.startswith("eval/"):
        return [(x, 100 * y) for x, y, _ in record["evals"].get(key.removeprefix("eval/"), [])]
    column = record["columns"].get(key, [])
    return [(x, y) for x, y in zip(record["updates"], column, strict=False) if y is not None]


def pyplot():
    """matplotlib's pyplot, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def check_picture(path: str) -> None:
    """UserError, before anything is computed, if --out cannot be the picture that `save` writes."""
    check_output("out", path)
    need(path.endswith(".png"), f"--out={path}: a picture's name ends in .png; name it so")


def save(fig, path: Path | str, dpi: int = 100) -> None:
    """Write a PNG with a palette, a third as large as matplotlib's own, and close the figure."""
    from PIL import Image

    buffer = io.BytesIO()
    fig.savefig(buffer, dpi=dpi, format="png")
    pyplot().close(fig)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    picture = Image.open(buffer).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=1)
    picture.save(path, format="PNG", optimize=True)


if __name__ == "__main__":
    sys.exit(
        "error: sweep.py is no study but what they share; run one of them, such as python results/table1.py --draw"
    )
