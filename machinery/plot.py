"""Plot the metrics of runs in one picture, write the closing table of a run, and print logged responses.

    python -m machinery.plot out/demo [out/other ...] [--out=FILE.png]

A run is a folder with metrics.jsonl. The first run has the thickest lines.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np

from machinery.flags import at_home, check_output, need, parse_flags, run_command
from machinery.log import read_metrics, rows
from presets import called

# Panels in reading order: (title with unit, key). The first eight with data are drawn.
PANELS = [
    ("reward of sampled responses", "reward"),
    ("held-out pass@1, policy", "eval/policy_pass@1"),
    ("KL(policy || actor), nats a token", "distill_kl"),
    ("KL(inf || ref), nats a token", "rollout_corr/k3_kl"),
    ("OBRS acceptance rate", "obrs/accept_rate"),
    ("KL(ref || accepted), nats a token", "obrs/kl_after"),
    ("effective sample size, tokens", "rollout_corr/rollout_is_eff_sample_size"),
    ("entropy of the policy, nats", "entropy"),
    ("gradient norm, policy", "grad_norm"),
    ("age of weights, updates", "staleness/mean_updates"),
    ("length of responses, tokens", "response_length"),
]
MOST_PANELS = 8
# One colour per run: the colour-blind-safe palette of Okabe and Ito, without yellow.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"]
USAGE = "python -m machinery.plot RUN [RUN ...] [--out=FILE.png]: draw the metrics of runs against each other"
# a curve with more points is drawn as a running mean over the faint raw line
SMOOTH = 20


@dataclass(frozen=True)
class PlotFlags:
    """The picture"""

    out: str = "out/curves.png"
    """Picture to write: .png, .pdf or .svg."""
    samples: str = ""
    """Do not draw: print the logged responses of this run, with tokens coloured by the gap between
    policy and sampler."""
    last: int = 4
    """With --samples: number of newest responses to print."""


# -- Curves


def draw(runs: list[str], out: str) -> str:
    """Write one picture with a panel for each of the first MOST_PANELS measured quantities and a
    line for each run; returns its path.

    Raises UserError if there are more runs than colours, or if a folder is not a run."""
    need(
        len(runs) <= len(COLOURS),
        f"{len(runs)} runs: draw at most {len(COLOURS)} in one picture",
    )
    rows = {str(run): read_metrics(run) for run in runs}
    plt = pyplot()
    from matplotlib.lines import Line2D

    measured = [
        panel
        for panel in PANELS
        if any(values_of(run, panel[1])[1] for run in rows.values())
    ]
    panels = measured[:MOST_PANELS]
    columns = max(1, -(-len(panels) // 2))
    fig, axes = plt.subplots(2, columns, figsize=(4.3 * columns, 7), squeeze=False)
    colours = dict(zip(rows, COLOURS, strict=False))
    for ax, (title, key) in zip(axes.flat, panels, strict=False):
        ax.set_title(title, fontsize=10)
        for run in reversed(rows):  # the first run last, above the others
            draw_line(
                ax,
                rows[run],
                key,
                colours[run],
                width=2.4 if run == str(runs[0]) else 1.2,
            )
        ax.set_xlabel("updates", fontsize=8)
        ax.ticklabel_format(axis="y", useOffset=False)
        ax.grid(alpha=0.3)
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    handles = [Line2D([], [], color=colours[run], label=run) for run in rows]
    fig.legend(
        handles=handles, loc="lower center", ncols=min(4, len(rows)), frameon=False
    )
    fig.tight_layout(rect=(0, 0.06, 1, 1))
    write(fig, Path(out))
    return out


def pyplot():
    """The pyplot module of matplotlib, set to draw into files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def write(fig, path: Path) -> None:
    """Save the figure (creating its folder) and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)
    pyplot().close(fig)


def values_of(rows: list[dict], key: str) -> tuple[list[float], list[float]]:
    """(updates, values) of a metric in the lines that have it."""
    measured = [row for row in rows if row.get(key) is not None]
    return [row["step"] + 1 for row in measured], [row[key] for row in measured]


def draw_line(ax, rows: list[dict], key: str, colour: str, width: float) -> None:
    """Draw one run's curve of a metric."""
    x, y = values_of(rows, key)
    style = dict(color=colour, linewidth=width)
    if key.startswith("eval/"):
        error_key = key.replace("pass@1", "se")
        errors = [
            row.get(error_key, float("nan")) for row in rows if row.get(key) is not None
        ]
        ax.errorbar(x, y, errors, marker="o", capsize=3, **style)
    elif len(y) > SMOOTH:
        ax.plot(x, y, alpha=0.25, **style)
        n = 1 + len(y) // 15
        ax.plot(x[n - 1 :], np.convolve(y, np.full(n, 1 / n), "valid"), **style)
    else:
        ax.plot(x, y, **style)


# -- The closing table


def report(run: str) -> str:
    """Draw the curves of a run, and return its closing table, which names their path."""
    rows = read_metrics(run)
    cfg = json.loads((Path(run) / "config.json").read_text(encoding="utf-8"))["config"]
    steps = [row for row in rows if row["step"] >= 0]
    lines = [
        "",
        f"{called(cfg)}: {len(steps)} updates of {cfg['train_batch']} responses",
        f"{'':34s}{'before':>16s}{'after':>16s}",
        *evaluation_lines(rows),
        *metric_lines(steps),
        "   (pass@1: first and last evaluation; other lines: first update, mean of the last tenth)",
        *time_lines(rows),
        f"curves: {draw([run], str(Path(run) / 'curves.png'))}",
    ]
    return "\n".join(lines)


def evaluation_lines(rows: list[dict]) -> list[str]:
    """Held-out accuracy of each model, at the first and at the last evaluation."""
    lines = []
    for name in ("policy", "actor"):
        accuracy = f"eval/{name}_pass@1"
        error = f"eval/{name}_se"
        evaluated = [row for row in rows if accuracy in row]
        if evaluated:
            ends = (evaluated[0], evaluated[-1])
            before, after = (
                f"{100 * row[accuracy]:.1f} +- {100 * row[error]:.1f} %" for row in ends
            )
            lines.append(f"{name + ' pass@1, held out':34s}{before:>16s}{after:>16s}")
    return lines


def metric_lines(steps: list[dict]) -> list[str]:
    """Distances between the two policies, at the first update and averaged over the last tenth."""
    last = steps[-max(1, len(steps) // 10) :]
    lines = []
    for title, key, written in (
        ("KL(policy || actor), nats a token", "distill_kl", nats),
        ("acceptance rate", "obrs/accept_rate", percent),
        ("KL(inf || ref), k3, nats a token", "rollout_corr/k3_kl", nats),
    ):
        if any(key in row for row in steps):
            values = [row[key] for row in last if row.get(key) is not None]
            ends = [steps[0].get(key), sum(values) / len(values) if values else None]
            lines.append(
                f"{title:34s}"
                + "".join(f"{'-' if x is None else written(x):>16s}" for x in ends)
            )
    return lines


def time_lines(rows: list[dict]) -> list[str]:
    """Seconds of each stage of the training loop, and in total."""
    lines = ["time by stage, seconds"]
    total = 0.0
    for stage in (
        "rollout_s",
        "grade_s",
        "ref_s",
        "update_s",
        "sync_s",
        "eval_s",
        "save_s",
    ):
        spent = sum(row.get(stage, 0.0) for row in rows)
        total += spent
        if spent:
            rate = f"speed/{stage[:-2]}_tokens"
            tokens = sum(row[rate] * row[stage] for row in rows if rate in row)
            per_second = f"{tokens / spent:11,.0f} tokens/s per rank" if tokens else ""
            lines.append(f"   {stage[:-2]:10s}{spent:9.1f}{per_second}")
    return [*lines, f"   {'total':10s}{total:9.1f}"]


def nats(x: float) -> str:
    return f"{x:.2g}" if x < 1e-3 else f"{x:.4f}"


def percent(x: float) -> str:
    return f"{100 * x:.1f} %"


# -- Responses

# minimum |log p_policy - log p_inf| of a token, in nats -> its colour in the terminal
GAPS = {1.0: "\033[41m", 0.1: "\033[31m", 0.01: "\033[33m"}
PLAIN = "\033[0m"


def print_samples(run: str, last: int) -> None:
    """Print the newest responses in samples.jsonl. Raises UserError if the run has logged none."""
    path = Path(run) / "samples.jsonl"
    need(path.is_file(), f"{path}: no such file; give the folder of a run of train.py")
    for row in rows(path)[-last:]:
        header = f"reward {row['reward']:g}, {row['finish_reason']}, gap {row['gap']:.3g} nats"
        print(f"update {row['step'] + 1}: {header}\n{row['prompt']}")
        print(
            *(
                coloured(text, gap)
                for text, gap in zip(row["tokens"], row["gaps"], strict=True)
            )
        )
        largest = ", ".join(f"{text!r} {gap:+.3g}" for _, text, gap in row["largest"])
        print(f"largest: {largest}\n")
    colours = "  ".join(
        f"{colour}{low:g} and more{PLAIN}" for low, colour in GAPS.items()
    )
    print(f"gaps: {colours} nats")


def coloured(text: str, gap: float) -> str:
    colour = next((colour for low, colour in GAPS.items() if abs(gap) >= low), "")
    return f"{colour}{text}{PLAIN}" if colour else text


def main(argv: list[str]) -> None:
    runs = [
        at_home(arg) for arg in takewhile(lambda arg: not arg.startswith("-"), argv)
    ]
    flags = parse_flags(PlotFlags, argv[len(runs) :], usage=USAGE)
    need(flags.last >= 1, f"--last={flags.last}: must be at least 1")
    if flags.samples:
        print_samples(flags.samples, flags.last)
        return
    need(runs, "name at least one run folder: python -m machinery.plot out/demo")
    check_output("out", flags.out)
    known = Path(flags.out).suffix in (".png", ".pdf", ".svg")
    need(
        known,
        f"--out={flags.out}: the name of a picture must end in .png, .pdf or .svg",
    )
    print(draw(runs, flags.out))


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
