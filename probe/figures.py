"""Figures of the mismatch report: three panels, and the waterfall plot of a ladder."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from machinery.plot import pyplot, write

BLUE, ORANGE = "#1f6fb4", "#e07b28"


def draw_mismatch(report, scored, clamp: float, path: Path) -> Path:
    """Draw three panels into `path`. report: of probe.summarize. scored: probe.ScoredTokens."""
    rng = np.random.default_rng(0)
    # lengths are integers: jitter keeps points from covering each other
    spread = scored.length + rng.uniform(-0.3, 0.3, len(scored.length))
    fig, axes = pyplot().subplots(1, 3, figsize=(15, 4.4))
    draw_gaps(axes[0], report, scored, spread)
    draw_weights(axes[1], report, scored, spread, clamp)
    draw_ess(axes[2], report)
    for ax in axes:
        ax.grid(alpha=0.3)
    fig.suptitle(
        f"{Path(report['sampler']).name} ({report['engine']}) samples, "
        f"{Path(report['model']).name} ({report['learner']}) learns: "
        f"KL {report['kl']:.3g}, T_max {report['t_max']:,.0f}"
    )
    fig.tight_layout()
    write(fig, path)
    return path


def draw_ladder(ladder: dict, path: Path) -> Path:
    """Draw a waterfall plot for each measure of a ladder (probe.ladder.shares). The bar of each
    source begins at the end of the bar above; the last bar ends at the total."""
    measures = {
        "kl": "KL a token",
        "dp": "mean |p_inf - p_ref| of a token",
        "var": "variance of sequence weights",
    }
    fig, axes = pyplot().subplots(1, 3, figsize=(15, 1.7 + 0.36 * len(ladder["rows"])))
    for ax, (measure, label) in zip(axes, measures.items(), strict=True):
        draw_waterfall(ax, ladder, measure)
        ax.set_title(label, fontsize=9)
    for ax in axes[1:]:
        ax.set_yticklabels([])
    fig.tight_layout()
    write(fig, path)
    return path


def draw_waterfall(ax, ladder: dict, measure: str) -> None:
    """Draw one measure of a ladder: sources from top to bottom, the total in black, the floor as a
    dotted line."""
    shares = [row[measure]["share"] for row in ladder["rows"]]
    errors = [row[measure]["se"] for row in ladder["rows"]]
    start = np.cumsum([0.0, *shares])[:-1]
    total, place = ladder["total"][measure], range(len(shares))
    colours = [ORANGE if share > 0 else BLUE for share in shares]
    ax.barh(place, shares, left=start, color=colours, xerr=errors, ecolor="grey", capsize=2)
    ax.barh(len(shares), total, color="black")
    ax.axvline(ladder["floor"][measure], color="grey", ls=":", lw=1)
    for y, (share, error) in enumerate(zip(shares, errors, strict=True)):
        part = f"{100 * share / total:.0f} %" if total else ""
        end = start[y] + max(share, 0) + error
        ax.annotate(part, (end, y), (5, 0), textcoords="offset points", va="center", fontsize=8)
    ax.set_yticks([*place, len(shares)], [*(row["source"] for row in ladder["rows"]), "total"])
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set_axisbelow(True)
    ax.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
    ax.grid(alpha=0.3, axis="x")


def column(rows: list[dict], name: str) -> list[float]:
    """One column of a table, as a list."""
    return [row[name] for row in rows]


def draw_gaps(ax, report, scored, spread) -> None:
    """Plot the largest and the mean gap of each response by its length, and their means by
    bucket."""
    dots = {"s": 8, "alpha": 0.4, "linewidths": 0}
    largest = scored.gap.max(1)
    mean = scored.gap.sum(1) / scored.length
    ax.scatter(spread, largest.clip(1e-9), color=ORANGE, label="largest of a response", **dots)
    ax.scatter(spread, mean.clip(1e-9), color=BLUE, label="mean of a response", **dots)
    length = column(report["by_length"], "mean_length")
    ax.plot(length, column(report["by_length"], "max_mismatch"), "o-", color=ORANGE, mec="white")
    ax.plot(length, column(report["by_length"], "mean_mismatch"), "o-", color=BLUE, mec="white")
    ax.set(
        yscale="log",
        xlabel="tokens of the response",
        ylabel="|p_inf - p_ref|",
        title="gap by length",
    )
    ax.legend(fontsize=8)


def draw_weights(ax, report, scored, spread, clamp: float) -> None:
    """Plot log R of each response by its length, and its mean at this KL."""
    total = scored.log_r.sum(1)
    ax.scatter(spread, total, s=8, alpha=0.5, color=BLUE, linewidths=0)
    T = np.arange(1, scored.length.max() + 1)
    ax.plot(T, -T * report["kl"], color=ORANGE, label="- T KL")
    if np.abs(total).max() > clamp / 4:
        for y in (-clamp, clamp):
            ax.axhline(y, color="crimson", lw=0.8, ls="--")
    for y in (-math.log(4), math.log(4)):
        ax.axhline(y, color="grey", lw=0.8, ls=":")
    ax.set(
        xlabel="tokens of the response",
        ylabel="log R = sum log r",
        title="sequence weights (dotted: 1/4 and 4; dashed: clamp)",
    )
    ax.legend(fontsize=8)


def draw_ess(ax, report) -> None:
    """Plot ESS, low-weight and clamped share of R for responses cut off earlier."""
    rows = report["by_prefix"]
    tokens = column(rows, "tokens")
    T = np.arange(1, report["length"]["max"] + 1)
    bound = (1 + max(report["chi2_token"], 0)) ** -T.astype(float)
    ax.plot(tokens, column(rows, "ess"), "o-", color=BLUE, label="ESS of R, measured")
    ax.plot(T, bound, color=BLUE, lw=0.8, ls="--", label="(1 + chi2)^-T")
    ax.plot(tokens, column(rows, "low_weight"), "o-", color=ORANGE, label="share with R < 1/4")
    ax.plot(
        tokens, column(rows, "clamped"), "o-", color="crimson", ms=3, label="share at the clamp"
    )
    ax.set(
        xlabel="length of responses if cut off here, tokens",
        ylim=(-0.03, 1.05),
        title="sequence weights by length",
    )
    ax.legend(fontsize=8)
