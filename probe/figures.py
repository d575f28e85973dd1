"""Figures of the mismatch report: gaps and weights by length, and the waterfall plot of a ladder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from machinery.plot import pyplot, write

BLUE, ORANGE = "#1f6fb4", "#e07b28"


def draw_mismatch(report, scored, path: Path) -> Path:
    """Draw two panels into `path`. report: of probe.summarize. scored: probe.ScoredTokens."""
    fig, axes = pyplot().subplots(1, 2, figsize=(11, 4.4))
    draw_gaps(axes[0], report, scored)
    draw_weights(axes[1], report)
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    fig.suptitle(
        f"{Path(report['sampler']).name} ({report['engine']}) samples, "
        f"{Path(report['model']).name} ({report['learner']}) learns: "
        f"KL {report['kl']:.3g}, T_max {report['t_max']:,.0f}"
    )
    fig.tight_layout()
    write(fig, path)
    return path


def draw_ladder(ladder: dict, path: Path) -> Path:
    """Draw the waterfall plot of a ladder's KL (probe.ladder.shares). The bar of each source begins
    at the end of the bar above; the last bar ends at the total; the floor is a dotted line."""
    rows, total = ladder["rows"], ladder["total"]["kl"]
    shares, errors = (
        np.array([row["kl"][name] for row in rows]) for name in ("share", "se")
    )
    start, place = np.cumsum([0.0, *shares])[:-1], range(len(rows))
    fig, ax = pyplot().subplots(figsize=(8, 1.7 + 0.36 * len(rows)))
    colours = [ORANGE if share > 0 else BLUE for share in shares]
    ax.barh(
        place, shares, left=start, color=colours, xerr=errors, ecolor="grey", capsize=2
    )
    ax.barh(len(rows), total, color="black")
    ax.axvline(ladder["floor"]["kl"], color="grey", ls=":", lw=1)
    for y, end in enumerate(start + shares.clip(0) + errors):
        part = f"{100 * shares[y] / total:.0f} %" if total else ""
        ax.annotate(
            part, (end, y), (5, 0), textcoords="offset points", va="center", fontsize=8
        )
    ax.set_yticks([*place, len(rows)], [*(row["source"] for row in rows), "total"])
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set_axisbelow(True)
    ax.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
    ax.grid(alpha=0.3, axis="x")
    ax.set_title("KL a token", fontsize=9)
    fig.tight_layout()
    write(fig, path)
    return path


def draw_gaps(ax, report, scored) -> None:
    """Plot the largest and the mean gap of each response by its length, and their means by
    bucket."""
    # lengths are integers: jitter keeps points from covering each other
    spread = scored.length + np.random.default_rng(0).uniform(
        -0.3, 0.3, len(scored.length)
    )
    gap = np.abs(np.exp(scored.inf) - np.exp(scored.ref))
    gaps = {"max": gap.max(1), "mean": gap.sum(1) / scored.length}
    rows = report["by_length"]
    length = [row["mean_length"] for row in rows]
    for (name, gap), color in zip(gaps.items(), (ORANGE, BLUE), strict=True):
        ax.scatter(
            spread,
            gap.clip(1e-9),
            8,
            color,
            alpha=0.4,
            lw=0,
            label=f"{name} of a response",
        )
        ax.plot(length, [row[name] for row in rows], "o-", color=color, mec="white")
    ax.set(
        yscale="log",
        xlabel="tokens of the response",
        ylabel="|p_inf - p_ref|",
        title="gap by length",
    )


def draw_weights(ax, report) -> None:
    """Plot ESS, low-weight and clamped share of R for responses cut off earlier."""
    rows = report["by_prefix"]
    lines = {
        "ess": "ESS of R",
        "low_weight": "share with R < 1/4",
        "clamped": "share at the clamp",
    }
    for (name, label), color in zip(
        lines.items(), (BLUE, ORANGE, "crimson"), strict=True
    ):
        values = [row[name] for row in rows]
        ax.plot([row["tokens"] for row in rows], values, "o-", color=color, label=label)
    ax.set(
        xlabel="length of responses if cut off here, tokens",
        ylim=(-0.03, 1.05),
        title="sequence weights by length",
    )
