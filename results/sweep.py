"""Grids of training runs for the studies in results/: run what is missing, keep what is small, draw the rest from it.

A study is a script in results/. It names rows (flags on top of configs/study.toml), `run` makes those that are missing, and the
script draws its table and figure from the records. A record is one small file, results/runs/NAME.json (in a folder of its own where a study has another configuration): command, configuration, git
revision, seconds by stage and the columns of `KEPT`. NAME is the flags themselves, so two studies that share a row share its
run. A study that was killed goes on where it stopped, inside a run too (train.py --resume).

    python results/table1.py                # run what is missing, then write results/table1.{md,png}
    python results/table1.py --draw         # from the records alone, whatever is there
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

import metrics
from config import HARMLESS, parse

ROOT = Path(__file__).resolve().parent
RESULTS, FOLDERS, STUDY = ROOT / "results", ROOT / "out" / "study", "configs/study.toml"
KEPT = (
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
    "rollout_corr/reward_weighted",
    "ppo_kl_weighted",
    "ppo_k3_kl",
    "error/low_prob_pos",
    "error/low_prob_neg",
    "error/repetition",
    *(f"rollout_corr/low_weight/{n}" for n in (16, 32, 64, 128, 256)),
    "response_length",
    "staleness/mean_updates",
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
)
POINTS = 150  # a longer run is averaged over neighbouring updates


def name_of(flags: dict) -> str:
    return ",".join(f"{k}={v}" for k, v in flags.items()).replace("/", "_")


def command(flags: dict, config: str = STUDY) -> list[str]:
    return [
        "train.py",
        f"--config={config}",
        *(f"--{k}={v}" for k, v in flags.items()),
        f"--out={os.path.relpath(folder_of(flags, config), ROOT)}",
    ]


def folder_of(flags: dict, config: str) -> Path:
    """The run folder: studies on another configuration have a folder of their own."""
    return (FOLDERS if config == STUDY else FOLDERS / Path(config).stem) / name_of(flags)


def path_of(flags: dict, config: str) -> Path:
    """The record's path, likewise."""
    return (RESULTS / "runs" if config == STUDY else RESULTS / "runs" / Path(config).stem) / f"{name_of(flags)}.json"


def run(
    rows: dict[str, dict], seeds: dict[str, int] | None = None, draw: bool = False, jobs: int = 2, config: str = STUDY
) -> dict[str, list[dict]]:
    """The records of every row, seed by seed, after running those that are missing, `jobs` at a time.

    rows: label -> flags on top of the file `config`; seeds: label -> how many (1 where none is said). draw: run nothing, leave out what is not there."""
    wanted = {
        label: [{**flags, "seed": s} for s in range((seeds or {}).get(label, 1))] for label, flags in rows.items()
    }
    if not draw:
        missing = {
            name_of(f): f
            for f in sorted((f for runs in wanted.values() for f in runs), key=lambda f: f["seed"])
            if not record_of(f, config)
        }
        threads = str(max(1, len(os.sched_getaffinity(0)) // jobs))
        with ThreadPoolExecutor(jobs) as pool:
            done = [pool.submit(one, flags, threads, config) for flags in missing.values()]
            for future in tqdm(done, desc="runs", disable=not done):
                future.result()
    got = {label: [r for f in runs if (r := record_of(f, config))] for label, runs in wanted.items()}
    return {label: records for label, records in got.items() if records}


def record_of(flags: dict, config: str = STUDY) -> dict | None:
    """The record of a run, if it is there. ValueError: it was made with other settings."""
    path = path_of(flags, config)
    if not path.is_file():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    now = asdict(parse(command(flags, config)[1:]))
    changed = [k for k, v in record["config"].items() if k in now and metrics.clean(now[k]) != v]
    if changed:
        raise ValueError(
            f"{os.path.relpath(path, ROOT)}: made with {changed[0]} = {record['config'][changed[0]]!r}, {config} now says {now[changed[0]]!r}; "
            "delete the file to run it again"
        )
    return record


def one(flags: dict, threads: str, config: str = STUDY) -> None:
    """Run or resume one run and write its record."""
    out, path = folder_of(flags, config), path_of(flags, config)
    argv = [sys.executable, *command(flags, config)]
    if (out / "config.json").is_file():
        argv.append("--resume")
    env = {**os.environ, "OMP_NUM_THREADS": threads, "TQDM_DISABLE": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(argv[1:])} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    last, steps = (
        metrics.read(out)[-1]["step"] + 1,
        json.loads((out / "config.json").read_text(encoding="utf-8"))["config"]["steps"],
    )
    if last < steps:
        raise SystemExit(
            f"error: {out}: stopped by a signal after update {last} of {steps}; start the study again to go on"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(condense(out, command(flags, config))) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def condense(out: Path, argv: list[str]) -> dict:
    """What is kept of a run folder."""
    rows, made = metrics.read(out), json.loads((out / "config.json").read_text(encoding="utf-8"))
    steps = [r for r in rows if r["step"] >= 0]
    width = math.ceil(len(steps) / POINTS)
    blocks = [steps[i : i + width] for i in range(0, len(steps), width)]

    def mean(block, key):
        x = [r[key] for r in block if r.get(key) is not None]
        return float(f"{sum(x) / len(x):.4g}") if x else None

    columns = {key: [mean(b, key) for b in blocks] for key in KEPT if any(r.get(key) is not None for r in steps)}
    evals = {
        n: [[r["step"] + 1, r[f"eval/{n}_pass@1"], r[f"eval/{n}_se"]] for r in rows if f"eval/{n}_pass@1" in r]
        for n in ("policy", "actor")
    }
    seconds = {
        k: round(sum(r.get(k, 0.0) for r in rows), 1)
        for k in ("rollout_s", "ref_s", "update_s", "sync_s", "eval_s", "save_s")
    }
    plain = {k: metrics.clean(v) for k, v in made["config"].items() if k not in HARMLESS}
    return {
        "command": " ".join(["python", *argv]),
        "git": made["git"],
        "versions": made["versions"],
        "config": plain,
        "seconds": seconds,
        "evals": {n: e for n, e in evals.items() if e},
        "updates": [b[-1]["step"] + 1 for b in blocks],
        "columns": columns,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Reading records
# ---------------------------------------------------------------------------------------------------------------------


def final(records: list[dict], name: str = "policy") -> tuple[float, float]:
    """Last held-out pass@1 in percent: mean over seeds, and its standard error (over seeds if there are some, else over problems)."""
    last = [r["evals"][name][-1] for r in records if name in r["evals"]]
    return mean_se([100 * x[1] for x in last], 100 * last[0][2])


def best(records: list[dict]) -> tuple[float, float]:
    """The best held-out pass@1 on the way, in percent: mean over seeds, standard error as in `final`."""
    top = [max(r["evals"]["policy"], key=lambda x: x[1]) for r in records]
    return mean_se([100 * x[1] for x in top], 100 * top[0][2])


def mean_se(x: list[float], single: float = math.nan) -> tuple[float, float]:
    m = sum(x) / len(x)
    return m, (math.sqrt(sum((v - m) ** 2 for v in x) / (len(x) - 1) / len(x)) if len(x) > 1 else single)


def tail(records: list[dict], key: str, share: float = 0.1) -> float:
    """Mean of a column over the last tenth of the updates, over seeds; NaN where it was not measured."""
    x = [
        v
        for r in records
        for v in r["columns"].get(key, [])[-max(1, round(share * len(r["updates"]))) :]
        if v is not None
    ]
    return sum(x) / len(x) if x else math.nan


def curve(ax, label: str, records: list[dict], key: str, smooth: int = 1, **style) -> None:
    """One line: a column, or `eval/policy` and `eval/actor`, averaged over seeds; the band is the range over seeds."""
    if key.startswith("eval/"):
        lines = [[(x, 100 * y) for x, y, _ in r["evals"].get(key[5:], [])] for r in records]
    else:
        lines = [[(x, y) for x, y in zip(r["updates"], r["columns"].get(key, [])) if y is not None] for r in records]
    lines = [line for line in lines if line]
    if not lines:
        return
    x = [p[0] for p in lines[0]]
    ys = [
        [
            sum(p[1] for p in line[max(0, i - smooth + 1) : i + 1]) / len(line[max(0, i - smooth + 1) : i + 1])
            for i in range(len(line))
        ]
        for line in lines
    ]
    mean = [sum(c) / len(c) for c in zip(*ys)]
    (line,) = ax.plot(x[: len(mean)], mean, label=label, **style)
    if len(ys) > 1:
        ax.fill_between(
            x[: len(mean)],
            [min(c) for c in zip(*ys)],
            [max(c) for c in zip(*ys)],
            color=line.get_color(),
            alpha=0.15,
            lw=0,
        )


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(r) + " |" for r in (head, ["---"] * len(head), *rows)) + "\n"


def arguments(doc: str) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=doc.splitlines()[0])
    ap.add_argument("--draw", action="store_true", help="run nothing: draw what is recorded")
    ap.add_argument("--jobs", type=int, default=2, help="runs at a time; the cores are shared out between them")
    return ap.parse_args()


# ---------------------------------------------------------------------------------------------------------------------
# Table and figure
# ---------------------------------------------------------------------------------------------------------------------


def percent(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.1f} +- {pair[1]:.1f}"


def number(x: float) -> str:
    return "" if math.isnan(x) else f"{x:.3g}"


def seconds(records: list[dict], *stages: str) -> float:
    return sum(r["seconds"][s] for r in records for s in stages) / len(records)


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


def write(
    name: str, got: dict[str, list[dict]], panels: list[tuple[str, str]], columns: dict = COLUMNS, script: str = ""
) -> None:
    """results/NAME.md and results/NAME.png of a study; the table is printed too. panels: (title, column or eval/...); script: if it is not NAME."""
    table(name, got, columns, script)
    figure(name, got, panels)


def table(name: str, got: dict[str, list[dict]], columns: dict = COLUMNS, script: str = "") -> None:
    used = {title: [f(rs) for rs in got.values()] for title, f in columns.items()}
    used = {title: cells for title, cells in used.items() if any(cells)}
    text = markdown(["", *used], [[label, *(cells[i] for cells in used.values())] for i, label in enumerate(got)])
    start = sorted(
        {
            percent((100 * r["evals"]["policy"][0][1], 100 * r["evals"]["policy"][0][2]))
            for rs in got.values()
            for r in rs
        }
    )
    notes = [
        f"`python results/{script or name}.py`",
        "",
        f"Policy pass@1 before training: {', '.join(start)} %. After a pass@1: the standard error over seeds, or over problems where there is one seed.",
        "",
        text,
        "Commands:",
        "",
    ]
    notes += [f"- {label}: `{rs[0]['command'].split(' --out=')[0]}`" for label, rs in got.items()]
    (RESULTS / f"{name}.md").write_text("\n".join(notes) + "\n", encoding="utf-8")
    print(text)


def figure(name: str, got: dict[str, list[dict]], panels: list[tuple[str, str]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = math.ceil(len(panels) / 3)
    fig, axes = plt.subplots(
        rows, min(3, len(panels)), figsize=(5.2 * min(3, len(panels)), 3.9 * rows + 0.9), squeeze=False
    )
    colours = plt.get_cmap("tab20").colors
    for ax, (title, key) in zip(axes.flat, panels):
        for i, (label, records) in enumerate(got.items()):
            curve(
                ax,
                label,
                records,
                key,
                smooth=1 if key.startswith("eval/") else 8,
                color=colours[(2 * i) % 20 + (2 * i) // 20],
                marker="o" if key.startswith("eval/") else None,
                ms=3,
                lw=1.3,
            )
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("updates", fontsize=8)
        ax.grid(alpha=0.3)
        if key in (
            "distill_kl",
            "distill_lambda",
            "rollout_corr/kl",
            "rollout_corr/k3_kl",
            "rollout_corr/mean_mismatch",
        ):
            ax.set_yscale("log")
    handles, labels = max((ax.get_legend_handles_labels() for ax in axes.flat), key=lambda hl: len(hl[1]))
    lines = math.ceil(len(labels) / 4)
    fig.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=9)
    fig.tight_layout(rect=(0, (0.25 * lines + 0.1) / fig.get_size_inches()[1], 1, 1))
    fig.savefig(RESULTS / f"{name}.png", dpi=100)
    plt.close(fig)
