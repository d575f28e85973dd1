"""Draw runs against each other, and the table that ends a run.

    python plot.py out/demo [out/other ...] [--out=FILE.png]

A run is a folder with metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import metrics

# what is drawn, in reading order: (title, [keys: the first present is used], y axis from 0)
PANELS = [
    ("reward (sampler's responses)", ["reward"]),
    ("held-out pass@1, policy", ["eval/policy_pass@1"]),
    ("KL(policy || actor) per token", ["distill_kl", "obrs/kl_ref", "rollout_corr/k3_kl"]),
    ("OBRS acceptance", ["obrs/accept_rate"]),
    (
        "KL(policy || accepted law); staleness without OBRS",
        ["obrs/kl_after", "obrs/kl_after_partial", "staleness/mean_updates"],
    ),
    ("entropy, policy (nats)", ["entropy"]),
    ("gradient norm, policy", ["grad_norm"]),
    ("effective sample size, tokens", ["rollout_corr/rollout_is_eff_sample_size"]),
]


def draw(runs: list[str], out: str) -> str:
    """One PNG with a panel for each quantity and a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data = {str(r): metrics.read(r) for r in runs}
    fig, axes = plt.subplots(2, 4, figsize=(17, 7))
    for ax, (title, keys) in zip(axes.flat, PANELS):
        ax.set_title(title, fontsize=10)
        for label, rows in data.items():
            key = next((k for k in keys if any(k in r for r in rows)), None)
            if key is None:
                continue
            points = [
                (r["step"] + 1, r[key], r.get(key.replace("pass@1", "se")) if key.startswith("eval/") else None)
                for r in rows
                if r.get(key) is not None
            ]
            x, y, se = zip(*points)
            if key.startswith("eval/"):
                ax.errorbar(x, y, se, marker="o", capsize=3, label=label)
            else:
                (line,) = ax.plot(x, y, alpha=0.25 if len(y) > 20 else 1.0, label=None if len(y) > 20 else label)
                if len(y) > 20:  # a running mean over the raw line
                    w = max(1, len(y) // 15)
                    smooth = [sum(y[max(0, i - w) : i + 1]) / len(y[max(0, i - w) : i + 1]) for i in range(len(y))]
                    ax.plot(x, smooth, color=line.get_color(), label=label)
        if not ax.has_data():
            ax.text(
                0.5, 0.5, "not measured in these runs", ha="center", va="center", transform=ax.transAxes, color="grey"
            )
        ax.set_xlabel("updates", fontsize=8)
        ax.grid(alpha=0.3)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="lower center", ncols=min(4, len(labels)), frameon=False)
    fig.tight_layout(rect=(0, 0.05, 1, 1))
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=110)
    plt.close(fig)
    return out


def report(run: str) -> str:
    """The closing table of a run, and its curves."""
    rows = metrics.read(run)
    cfg = json.loads((Path(run) / "config.json").read_text(encoding="utf-8"))["config"]
    evals = [r for r in rows if "eval/policy_pass@1" in r]
    steps = [r for r in rows if r["step"] >= 0]
    last = steps[-max(1, len(steps) // 10) :]
    mean = lambda key: (
        sum(r[key] for r in last if r.get(key) is not None) / max(1, sum(r.get(key) is not None for r in last))
    )
    lines = [
        "",
        f"{cfg['objective']}: {len(steps)} updates of {cfg['train_batch']} responses",
        f"{'':34s}{'before':>16s}{'after':>16s}",
    ]
    for name in ("policy", "actor"):
        key, se = f"eval/{name}_pass@1", f"eval/{name}_se"
        if evals and key in evals[0]:
            cells = [f"{100 * r[key]:.1f} +- {100 * r[se]:.1f} %" for r in (evals[0], evals[-1])]
            lines.append(f"{name + ' pass@1, held out':34s}{cells[0]:>16s}{cells[1]:>16s}")
    for title, key, scale, unit in (
        ("KL(policy || actor), nats a token", "distill_kl", 1, ""),
        ("acceptance rate", "obrs/accept_rate", 100, " %"),
        ("KL(inf || ref), k3, nats a token", "rollout_corr/k3_kl", 1, ""),
    ):
        if any(key in r for r in steps):
            first = steps[0][key]
            form = (
                (lambda v: f"{scale * v:.1f}{unit}")
                if scale == 100
                else (lambda v: f"{v:.2g}" if v < 1e-3 else f"{v:.4f}")
            )
            lines.append(f"{title:34s}{form(first):>16s}{form(mean(key)):>16s}")
    lines += ["   (before: first update; after: mean of the last tenth)", "time by stage, seconds"]
    total = 0.0
    for stage in ("rollout_s", "ref_s", "update_s", "sync_s", "eval_s", "save_s"):
        spent = sum(r.get(stage, 0.0) for r in rows)
        total += spent
        if spent:
            lines.append(f"   {stage[:-2]:10s}{spent:9.1f}")
    lines += [f"   {'total':10s}{total:9.1f}", f"curves: {draw([run], str(Path(run) / 'curves.png'))}"]
    return "\n".join(lines)


def main():
    ap = argparse.ArgumentParser(description="Draw the metrics of runs against each other.")
    ap.add_argument("runs", nargs="+", help="run folders (each holds metrics.jsonl)")
    ap.add_argument("--out", default="out/curves.png", help="PNG to write")
    args = ap.parse_args()
    print(draw(args.runs, args.out))


if __name__ == "__main__":
    try:
        main()
    except ValueError as e:
        sys.exit(f"error: {e}")
