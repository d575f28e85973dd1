"""Run the rows of a study in results/NAME.json, summarise them there, and write the page's table and plot.

    python results/sweep.py jackpot                         # every run of the study: hours on two cores
    python results/sweep.py jackpot --only="stale by 64"    # the rows with this text in "GROUP: LABEL"
    python results/sweep.py jackpot --draw                  # run nothing: table and plot from results/jackpot.json

Written by hand in the JSON file of a study: its rows, each with a configuration (configs/NAME.toml), flags on top of it
and seeds; the columns of the table; the panels of the plot, each a group and a column of metrics.jsonl or eval/policy;
and the last share of the updates over which columns are averaged. A row is run once for each seed, in out/study, and an
interrupted run continues there. This script adds to a row the final and the best pass@1 of each seed, the mean of each
column of the table, and the plotted curves with at most POINTS points. It also writes the part of the page below the
line `<!-- table -->`.
"""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tqdm import tqdm

from machinery import log, settings
from machinery.flags import UserError, need, parse_flags, read_text, run_command
from machinery.log import read_metrics
from machinery.plot import pyplot

RESULTS = ROOT / "results"
STUDIES = ("jackpot", "tis", "praxis", "qarl", "real", "pair", "heterorl", "worth")
FOLDER = ROOT / "out" / "study"
MARKER = "<!-- table -->\n"  # a line in each page; the text below it is generated
POINTS = 25  # most points of a curve


@dataclass(frozen=True)
class SweepFlags:
    """A study"""

    draw: bool = False
    """Run nothing: write the table and the plot from the study's JSON file."""
    only: str = ""
    """Run the rows with this text in "GROUP: LABEL" only; the other rows keep their numbers."""
    jobs: int = 2
    """Number of runs at a time; the runs share the cores."""


# -- Runs


def run(study: dict, folder: Path, only: str = "", jobs: int = 2) -> None:
    """Run the selected rows, `jobs` runs at a time, and add their summaries to the study."""
    need(
        jobs >= 1,
        f"--jobs={jobs}: must be at least 1; name the number of runs at a time",
    )
    chosen = [
        (
            group,
            row,
            [(seed, folder_of(folder, group, label, seed)) for seed in row["seeds"]],
        )
        for group, rows in study["rows"].items()
        for label, row in rows.items()
        if only in f"{group}: {label}"
    ]
    need(
        chosen,
        f"--only={only}: no row has this text in its name; leave the flag out to run all rows",
    )
    threads = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    with ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(run_one, row, seed, place, threads)
            for _, row, runs in chosen
            for seed, place in runs
        ]
        for future in tqdm(futures, desc="runs"):
            future.result()
    for group, row, runs in chosen:
        row["git"] = sorted({config_of(place)["git"] for _, place in runs})
        row |= summary(study, group, [read_metrics(place) for _, place in runs])


def folder_of(folder: Path, group: str, label: str, seed: int) -> Path:
    """The folder of a run: "not distilled", "TIS", 0 -> not-distilled/tis-0."""
    words = [
        "-".join(
            "".join(c if c.isalnum() or c == "." else " " for c in x.lower()).split()
        )
        for x in (group, label)
    ]
    return folder / words[0] / f"{words[1]}-{seed}"


def command(row: dict, seed: int, folder: Path) -> list[str]:
    """The arguments for python that start a run."""
    flags = [
        f"--{key}={value}" for key, value in {**row["flags"], "seed": seed}.items()
    ]
    return [
        "train.py",
        f"--config=configs/{row['config']}.toml",
        *flags,
        f"--out={folder}",
    ]


def config_of(folder: Path) -> dict:
    """The config.json of a run; {} before it started."""
    path = folder / "config.json"
    return json.loads(read_text(path)) if path.is_file() else {}


def left(row: dict, seed: int, folder: Path) -> list[str]:
    """The command that starts or resumes a run; empty if the run is finished. UserError: the folder
    has a run with other flags."""
    argv = command(row, seed, folder)
    if not config_of(folder):
        return argv
    cfg = settings.parse([*argv[1:], "--resume"], installed=False)
    last = (log.rows(folder / "metrics.jsonl") or [{"step": -1}])[-1]
    evaluated = cfg.eval_every < 0 or any(key.startswith("eval/") for key in last)
    finished = last["step"] + 1 >= cfg.steps and evaluated
    return [] if finished else [*argv, "--resume"]


def run_one(row: dict, seed: int, folder: Path, threads: str) -> None:
    """Start or resume one run."""
    if argv := left(row, seed, folder):
        call(argv, threads)
        if left(row, seed, folder):
            raise SystemExit(
                f"error: {folder}: stopped by a signal; start the study again to go on"
            )


def call(argv: list[str], threads: str) -> None:
    """Run one of the repository's commands. Raise SystemExit with the end of its error output if it fails."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "GOMP_SPINCOUNT": "2000",
        "TQDM_DISABLE": "1",
    }
    done = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"error: {' '.join(argv)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )


# -- The summary of a row


def summary(study: dict, group: str, runs: list[list[dict]]) -> dict:
    """The numbers of a row in a group of the study. runs: the rows of metrics.jsonl for each seed."""
    evals = [[r for r in rows if "eval/policy_pass@1" in r] for rows in runs]
    last = [rows[-1] for rows in evals]
    best = [max(rows, key=pass_of) for rows in evals]
    shown = [key for key in study["columns"].values() if key not in CELLS]
    metrics = [key.removesuffix("±") for key in shown]
    keys = ["eval/policy", *(key for of, key in study["panels"] if of == group)]
    return {
        "start": [pass_of(rows[0]) for rows in evals],
        "pass": [pass_of(r) for r in last],
        "best": [pass_of(r) for r in best],
        # over problems, if there is one seed
        "se": [round(100 * rows[0]["eval/policy_se"], 4) for rows in (last, best)],
        "columns": {
            key: [tail(rows, key, study["share"]) for rows in runs] for key in metrics
        },
        "curves": {key: curve(runs, key) for key in dict.fromkeys(keys)},
    }


def pass_of(row: dict) -> float:
    return round(100 * row["eval/policy_pass@1"], 4)


def short(x: float) -> float:
    return float(f"{x:.4g}")


def tail(rows: list[dict], key: str, share: float) -> float | None:
    """Mean of a column over the last share of the updates; None if it was not measured."""
    n = max(1, round(share * sum(r["step"] >= 0 for r in rows)))
    values = [r[key] for r in rows[-n:] if r.get(key) is not None]
    return short(sum(values) / len(values)) if values else None


def curve(runs: list[list[dict]], key: str) -> dict[str, list[float]]:
    """Updates, and the mean, minimum and maximum over seeds, averaged in at most POINTS blocks."""
    lines = [line for rows in runs if (line := line_of(rows, key))]
    length = min(map(len, lines), default=0)
    width = max(1, math.ceil(length / POINTS))
    blocks = [range(i, min(i + width, length)) for i in range(0, length, width)]
    means = [
        [sum(line[i][1] for i in block) / len(block) for line in lines]
        for block in blocks
    ]
    return {
        "updates": [lines[0][block[-1]][0] for block in blocks],
        "mean": [short(sum(m) / len(m)) for m in means],
        "low": [short(min(m)) for m in means] if len(lines) > 1 else [],
        "high": [short(max(m)) for m in means] if len(lines) > 1 else [],
    }


def line_of(rows: list[dict], key: str) -> list[tuple[int, float]]:
    """(updates, value) pairs of a column, or of the evaluations in percent."""
    if key == "eval/policy":
        return [(r["step"] + 1, pass_of(r)) for r in rows if "eval/policy_pass@1" in r]
    return [
        (r["step"] + 1, r[key])
        for r in rows
        if r["step"] >= 0 and r.get(key) is not None
    ]


# -- The JSON file and the table


def path_of(name: str) -> Path:
    return RESULTS / f"{name}.json"


def load(name: str) -> dict:
    """The content of a page's JSON file."""
    return json.loads(read_text(path_of(name)))


def store(name: str, data: dict) -> None:
    """Write a page's JSON file."""
    path_of(name).write_text(layout(data, 3) + "\n", encoding="utf-8")


def layout(data, depth: int) -> str:
    """JSON text with one entry per line for dictionaries up to this depth."""
    if not depth or not isinstance(data, dict):
        return json.dumps(data)
    entries = [
        f"{json.dumps(key)}: {layout(value, depth - 1)}" for key, value in data.items()
    ]
    return "{\n" + ",\n".join(entries) + "\n}"


def probed(flags: str) -> dict:
    """The report of probe, run in a separate process, because vLLM starts only once per process."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "m.json")
        argv = [sys.executable, "-m", "probe", f"--out={out}", *flags.split()]
        subprocess.run(argv, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return json.loads(read_text(out))


def merged(rows: list[list[str]]) -> list[list[str]]:
    """Rows with equal cells after the first become one row; its first cell lists their first cells."""
    names = {}
    for name, *cells in rows:
        names.setdefault(tuple(cells), []).append(name)
    return [[", ".join(group), *cells] for cells, group in names.items()]


def mean_se(values: list[float], single: float) -> str:
    """A cell with mean and standard error over seeds; `single` is the error of one value, NaN if none is shown."""
    if not values:
        return ""
    m = sum(values) / len(values)
    se = (
        single
        if len(values) == 1
        else math.sqrt(
            sum((v - m) ** 2 for v in values) / (len(values) - 1) / len(values)
        )
    )
    return f"{m:.1f}" if math.isnan(se) else f"{m:.1f}±{se:.1f}"


# worth, own, own_reward: written into the JSON file by hand, measured with worth.py and with eval.py
CELLS = {
    "seeds": lambda row: str(len(row["seeds"])),
    "pass": lambda row: (
        "" if "withdrawn" in row else mean_se(row["pass"], row["se"][0])
    ),
    "best": lambda row: mean_se(row["best"], row["se"][1]),
    "own": lambda row: mean_se(row.get("own", []), math.nan),
    "own_reward": lambda row: mean_se(row.get("own_reward", []), math.nan),
    "worth": lambda row: (
        "{:.2f}±{:.2f}".format(*row["worth"]) if "worth" in row else ""
    ),
}


def cell(row: dict, key: str) -> str:
    """One cell of the table. "METRIC±": mean and standard error over seeds, in percent."""
    if key in CELLS:
        return CELLS[key](row)
    recorded = row["columns"].get(key.removesuffix("±"), [])
    values = [x for x in recorded if x is not None]
    if key.endswith("±"):
        return mean_se([100 * x for x in values], math.nan)
    return number(sum(values) / len(values)) if values else ""


def number(x: float) -> str:
    """A number as two digits or a whole number; 0 for rounding errors of float32."""
    if abs(x) < 1e-9:
        return "0"
    return f"{x:.0f}" if abs(x) >= 10 else f"{x:.2g}"


def table(study: dict) -> str:
    """The table of a study: a line for each group and each row that has run."""
    lines = []
    for group, rows in study["rows"].items():
        lines.append([f"**{group}**"])  # the missing cells stay empty in Markdown
        for label, row in rows.items():
            if "pass" in row:
                lines.append(
                    [label, *(cell(row, key) for key in study["columns"].values())]
                )
    return markdown(["", *study["columns"]], lines)


def markdown(head: list[str], rows: list) -> str:
    """A Markdown table with these head cells and rows."""
    lines = [
        "| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)
    ]
    return "\n".join(lines) + "\n"


def rewrite(path: Path, text: str) -> None:
    """Replace the text below MARKER on a page, or make the page."""
    above = read_text(path).split(MARKER)[0] if path.is_file() else f"# {path.stem}\n\n"
    path.write_text(f"{above}{MARKER}\n{text}", encoding="utf-8")


# -- The plot

# The palette of Okabe and Ito, and three more
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000")
COLOURS += ("#999999", "#882255", "#808000")
LOGARITHMIC = ("distill_kl", "rollout_corr/k3_kl", "rollout_corr/mean_mismatch")


def draw(name: str, study: dict) -> None:
    """Draw results/NAME.png: the panels of the study."""
    plt = pyplot()
    panels = study["panels"]
    n = len(panels)
    columns = min(3, n)
    size = (4.6 * columns, 3.9 * math.ceil(n / columns))
    fig, axes = plt.subplots(
        math.ceil(n / columns),
        columns,
        figsize=size,
        layout="constrained",
        squeeze=False,
    )
    flat = list(axes.flat)
    for ax, (group, key) in zip(flat, panels, strict=False):
        draw_panel(ax, group, key, study["rows"][group])
    for ax in flat:
        ax.grid(alpha=0.3)
        ax.tick_params(labelsize=8)
    for ax in flat[n:]:
        ax.set_axis_off()
    save(fig, RESULTS / f"{name}.png")


def draw_panel(ax, group: str, key: str, rows: dict[str, dict]) -> None:
    """Draw one line for each row with this curve; the band is the range over seeds."""
    for (label, row), colour in zip(rows.items(), COLOURS, strict=False):
        if key not in row.get("curves", {}):
            continue
        line = row["curves"][key]
        dots = dict(marker="o", ms=3) if key == "eval/policy" else {}
        ax.plot(
            line["updates"],
            line["mean"],
            label=label.replace("`", ""),
            color=colour,
            lw=1.3,
            **dots,
        )
        if line["low"]:
            ax.fill_between(
                line["updates"],
                line["low"],
                line["high"],
                color=colour,
                alpha=0.12,
                lw=0,
            )
    ax.set_title(
        f"{group}: {key}".replace("eval/policy", "held-out pass@1 (%)"), fontsize=9
    )
    ax.set_xlabel("updates", fontsize=8)
    ax.legend(fontsize=7)
    if key in LOGARITHMIC:
        ax.set_yscale("log")


def save(fig, path: Path | str, dpi: int = 80) -> None:
    """Write a PNG with a palette, a third of the size of matplotlib's PNG, and close the figure."""
    from PIL import Image

    buffer = io.BytesIO()
    fig.savefig(buffer, dpi=dpi, format="png")
    pyplot().close(fig)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    picture = (
        Image.open(buffer)
        .convert("RGB")
        .quantize(64, Image.Quantize.MAXCOVERAGE, kmeans=1)
    )
    picture.save(path, format="PNG", optimize=True)


# -- The command


def main() -> None:
    """Run the command line: a study's name, then flags."""
    named, given = sys.argv[1:2], sys.argv[2:]
    known = ", ".join(STUDIES)
    if not named or named[0] not in STUDIES:
        raise UserError(
            f"{' '.join(named) or 'no study'}: no such study; name one of {known}"
        )
    flags = parse_flags(SweepFlags, given, __doc__.strip())
    name = named[0]
    study = load(name)
    if not flags.draw:
        run(study, FOLDER / name, flags.only, flags.jobs)
        store(name, study)
    rewrite(RESULTS / f"{name}.md", table(study))
    draw(name, study)
    print(table(study))


if __name__ == "__main__":
    run_command(main)
