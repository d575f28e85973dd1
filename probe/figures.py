"""Figures of the mismatch report: six panels, and a waterfall plot for each ladder."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from machinery.plot import write

BLUE, ORANGE = "#1f6fb4", "#e07b28"


def draw_mismatch(report, scored, clamp: float, path: Path) -> Path:
    """Draw six panels into `path`. report, scored: probe.Report and probe.ScoredTokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rng = np.random.default_rng(0)
    # lengths are integers: jitter keeps points from covering each other
    spread = scored.length + rng.uniform(-0.3, 0.3, len(scored.length))
    panels = [["probabilities", "gaps", "control"], ["weights", "ess", "ratios"]]
    fig, axes = plt.subplot_mosaic(panels, figsize=(15, 8.4))
    draw_probabilities(axes["probabilities"], scored, rng)
    draw_gaps(axes["gaps"], report, scored, spread)
    draw_control(axes["control"], report)
    draw_weights(axes["weights"], report, scored, spread, clamp)
    draw_ess(axes["ess"], report)
    draw_ratios(axes["ratios"], report, scored)
    for ax in axes.values():
        ax.grid(alpha=0.3)
    fig.suptitle(
        f"{Path(report.sampler).name} ({report.engine}) samples, {Path(report.model).name} ({report.learner}) learns: "
        f"KL {report.kl:.3g}, T_max {report.t_max:,.0f}"
    )
    fig.tight_layout()
    write(fig, path)
    return path


def draw_ladder(ladders: list[dict], titles: list[str], path: Path) -> Path:
    """Draw a waterfall plot for each ladder (probe.ladder.shares) and measure. The bar of each
    source begins at the end of the bar above; the last bar ends at the total."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measures = {
        "kl": "KL a token",
        "dp": "mean |p_inf - p_ref| of a token",
        "var": "variance of sequence weights",
    }
    heights = [2 + len(ladder["rows"]) for ladder in ladders]
    size = (15, 0.36 * sum(heights) + 1)
    fig, axes = plt.subplots(len(ladders), 3, figsize=size, squeeze=False, height_ratios=heights)
    for ladder, title, row in zip(ladders, titles, axes, strict=True):
        for ax, (measure, label) in zip(row, measures.items(), strict=True):
            draw_waterfall(ax, ladder, measure)
            ax.set_title(f"{title}: {label}" if title else label, fontsize=9)
        for ax in row[1:]:
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


def draw_probabilities(ax, scored, rng) -> None:
    """Plot p_ref against p_inf for at most 5,000 tokens."""
    on = scored.exists
    pick = rng.permutation(int(on.sum()))[:5000]
    ax.scatter(
        scored.p_inf[on][pick], scored.p_ref[on][pick], s=5, alpha=0.25, color=BLUE, linewidths=0
    )
    ax.plot([0, 1], [0, 1], color="grey", lw=0.8)
    ax.set(
        xlabel="p_inf: the sampler's",
        ylabel="p_ref: the learner's",
        title="probability of each sampled token",
    )


def draw_gaps(ax, report, scored, spread) -> None:
    """Plot the largest and the mean gap of each response by its length, and their means by
    bucket."""
    dots = {"s": 8, "alpha": 0.4, "linewidths": 0}
    largest = scored.gap.max(1)
    mean = scored.gap.sum(1) / scored.length
    ax.scatter(spread, largest.clip(1e-9), color=ORANGE, label="largest of a response", **dots)
    ax.scatter(spread, mean.clip(1e-9), color=BLUE, label="mean of a response", **dots)
    length = column(report.by_length, "mean_length")
    ax.plot(length, column(report.by_length, "max_mismatch"), "o-", color=ORANGE, mec="white")
    ax.plot(length, column(report.by_length, "mean_mismatch"), "o-", color=BLUE, mec="white")
    ax.set(
        yscale="log",
        xlabel="tokens of the response",
        ylabel="|p_inf - p_ref|",
        title="gap by length",
    )
    ax.legend(fontsize=8)


def draw_control(ax, report) -> None:
    """Plot the largest gap of short and of long responses."""
    ax.set(ylabel="largest |p_inf - p_ref|", title="length, or number of tokens?")
    if report.control is None:
        ax.text(
            0.5, 0.5, "too few long responses", ha="center", transform=ax.transAxes, color="grey"
        )
        return
    k, n = report.control["piece"], report.control["pieces"]
    labels = {
        "one_short": f"one of {k}",
        f"{n}_short": f"{n} of {k}",
        "long_beginning": f"first {k}\nof {n * k}",
        "long": f"all {n * k}",
    }
    means = [report.control[name][0] for name in labels]
    errors = [report.control[name][1] for name in labels]
    ax.bar(list(labels.values()), means, yerr=errors, capsize=4, color=[BLUE, BLUE, ORANGE, ORANGE])


def draw_weights(ax, report, scored, spread, clamp: float) -> None:
    """Plot log R of each response by its length, and its mean at this KL."""
    total = scored.log_r.sum(1)
    ax.scatter(spread, total, s=8, alpha=0.5, color=BLUE, linewidths=0)
    T = np.arange(1, scored.length.max() + 1)
    ax.plot(T, -T * report.kl, color=ORANGE, label="- T KL")
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
    rows = report.by_prefix
    tokens = column(rows, "tokens")
    T = np.arange(1, report.length["max"] + 1)
    bound = (1 + max(report.chi2_token, 0)) ** -T.astype(float)
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


def draw_ratios(ax, report, scored) -> None:
    """Plot a histogram of log r over all tokens."""
    log_r = scored.log_r[scored.exists]
    edge = max(1e-7, float(np.quantile(np.abs(log_r), 0.999)))
    ax.hist(log_r.clip(-edge, edge), bins=81, color=BLUE)
    ax.set(
        yscale="log",
        xlabel="log r = log p_ref - log p_inf",
        ylabel="tokens",
        title=f"token log-ratios (mean of r: {report.ratio_mean:.4f})",
    )
