"""HeteroRL and GEPO in small: Table 2, Figures 5 to 8, the delay distributions, and the rows that the text lacks.

    python results/heterorl.py          # run what is missing (two at a time), then write results/heterorl.md,
                                        # heterorl.png, heterorl_more.png and heterorl_correlations.png

configs/delay.toml: four simulated samplers (delay.py). `64`, `8`, `0`: --max_staleness, which caps
the delays; 0 is the synchronous loop, without CPPO-KL as in the text. One clip of 0.2 for all three
methods of Table 2: only the coefficient differs. A length-normalised ratio hardly ever leaves 0.8
to 1.2, so the clip holds GRPO's tokens and nothing else: three more rows tell its part from the
coefficient's. `hours` is the virtual clock: what the updates take when nobody waits, and what they
would take if every update waited until each of the four samplers had its weights.
"""

import math

import numpy as np
import sweep

from delay import DelayDistribution

CONFIG = "configs/delay.toml"
METHODS = {
    "GRPO": dict(objective="grpo", ratio_base="inf"),
    "GSPO": dict(objective="gspo", ratio_base="inf"),
    "GEPO": dict(objective="gepo"),
}
BOUNDS = {0: dict(max_staleness=0, cppo_beta=0.0), 8: dict(max_staleness=8), 64: dict(max_staleness=64)}
TABLE = {}
for bound, limits in BOUNDS.items():
    TABLE |= {f"{method}, {bound}": dict(flags, **limits) for method, flags in METHODS.items()}
FAR = BOUNDS[64]
NARROW = dict(clip_low=0.01, clip_high=0.01)
MORE = {
    "GEPO, 64": TABLE["GEPO, 64"],
    "GEPO, clip 0.01": dict(objective="gepo", **NARROW, **FAR),
    "GSPO, clip 0.01": dict(objective="gspo", ratio_base="inf", **NARROW, **FAR),
    "GRPO, no clip": dict(objective="grpo", ratio_base="inf", clip=False, **FAR),
    "GEPO, defensive": dict(objective="gepo", gepo_defence=4, **FAR),
    "GEPO, mean of q": dict(objective="gepo", gepo_expectation="mean", **FAR),
    "GEPO, weibull": dict(objective="gepo", delay="weibull", **FAR),
    "GEPO, exponential": dict(objective="gepo", delay="exponential", **FAR),
    "GEPO, constant": dict(objective="gepo", delay="constant", **FAR),
    "decoupled TIS": dict(objective="tis", **FAR),
    "truncated at 1, as V-trace": dict(objective="tis", is_cap=1, **FAR),
    "Jackpot, target new": dict(objective="jackpot", obrs_target="new", **FAR),
    "no correction": dict(objective="grpo", **FAR),
}
SEEDS = {f"{m}, {s}": 3 for m in METHODS for s in (8, 64)}
COLUMNS = {
    **{c: sweep.COLUMNS[c] for c in ("seeds", "policy pass@1, %", "best, %")},
    "staleness, updates": lambda rs: sweep.number(sweep.tail(rs, "staleness/mean_updates", 0.5)),
    "KL(inf, ref)": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/k3_kl", 0.5)),
    "variance of the weight": lambda rs: sweep.number(sweep.tail(rs, "weight_var", 0.5)),
    "advantage error": lambda rs: sweep.number(sweep.tail(rs, "advantage_error", 0.5)),
    "clipped, %": lambda rs: sweep.number(100 * sweep.tail(rs, "clip_fraction", 0.5)),
    "gradient norm": lambda rs: sweep.number(sweep.tail(rs, "grad_norm", 0.5)),
    "hours": lambda rs: f"{hours(rs, wait=False):.1f}",
    "hours, waiting for all": lambda rs: f"{hours(rs, wait=True):.1f}",
}
PANELS = [
    ("held-out pass@1 (%)", "eval/policy"),
    ("KL(inf || ref), k3, nats a token", "rollout_corr/k3_kl"),
    ("variance of the weight", "weight_var"),
]
AT_ONCE = [
    PANELS[0],
    ("reward of the responses", "reward"),
    ("gradient norm", "grad_norm"),
]  # there KL and variance are 0
GROUPS = [
    sweep.Group("staleness of at most 64 updates", [f"{m}, 64" for m in METHODS], PANELS),
    sweep.Group("staleness of at most 8 updates", [f"{m}, 8" for m in METHODS], PANELS),
    sweep.Group("no delay", [f"{m}, 0" for m in METHODS], AT_ONCE),
]
MORE_GROUPS = [
    sweep.Group("corrections of each token", ["GEPO, 64", "GRPO, no clip", *list(MORE)[9:]], PANELS),
    sweep.Group(
        "weights of a response",
        ["GEPO, 64", "GEPO, defensive", "GEPO, mean of q", "GEPO, clip 0.01", "GSPO, clip 0.01"],
        PANELS,
    ),
    sweep.Group(
        "distributions of the delay", ["GEPO, 64", "GEPO, weibull", "GEPO, exponential", "GEPO, constant"], PANELS
    ),
]
CHAIN = {
    "staleness": "staleness/mean_updates",
    "KL(inf, ref)": "rollout_corr/k3_kl",
    "variance of the weight": "weight_var",
    "advantage error": "advantage_error",
}
PAIRS = [
    ("staleness", "KL(inf, ref)"),
    ("staleness", "variance of the weight"),
    ("staleness", "advantage error"),
    ("KL(inf, ref)", "variance of the weight"),
    ("variance of the weight", "advantage error"),
    ("KL(inf, ref)", "advantage error"),
]
FLOORS = {"KL(inf, ref)": 1e-5, "variance of the weight": 1e-6}  # below, at bound 0, is rounding


def hours(records: list[dict], wait: bool) -> float:
    """Virtual hours of a run: an update takes step_seconds, with `wait` the longest of the samplers' delays on top."""
    c = records[0]["config"]
    longest = mean_longest(c) if wait and c["delay"] != "none" else 0.0
    return c["steps"] * (c["step_seconds"] + longest) / 3600


def mean_longest(c: dict, grid: int = 2000) -> float:
    """Expected seconds of the longest of `delay_samplers` delays, capped at the bound of staleness.

    The largest of n draws has the quantile Q(u^(1/n)): the mean over u on a grid."""
    delays = DelayDistribution(c["delay"], c["delay_min"], c["delay_max"])
    cap = c["max_staleness"] * c["step_seconds"]
    shares = [((i + 0.5) / grid) ** (1 / c["delay_samplers"]) for i in range(grid)]
    return sum(min(cap, delays.quantile(u)) for u in shares) / grid


def measured(records: list[dict]) -> dict[str, np.ndarray]:
    """The four quantities of the chain at every update at which all were measured (the error: every tenth)."""
    rows = []
    for r in records:
        columns = [r["columns"].get(key, [None] * len(r["updates"])) for key in CHAIN.values()]
        rows += [row for row in zip(*columns, strict=True) if None not in row]
    points = np.array(rows, float).reshape(-1, len(CHAIN))
    points = points[np.isfinite(points).all(1)]
    return dict(zip(CHAIN, points.T, strict=True))


def rank_correlation(x, y) -> tuple[float, float, float]:
    """Spearman's correlation and its 95 % interval by Fisher's transformation."""
    r = float(np.corrcoef(ranks(x), ranks(y))[0, 1])
    half = 1.96 / math.sqrt(len(x) - 3)
    return r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def ranks(x):
    """Ranks of an array; ties share their mean rank."""
    _, place, n = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(n) - (n - 1) / 2)[place]


def correlations(got: sweep.Got) -> str:
    """Figures 6 and 7: how staleness, KL, variance and error move together, update by update, over all bounds."""
    fig, axes = sweep.pyplot().subplots(2, 3, figsize=(13, 7.4), layout="constrained")
    rows = []
    for method, colour in zip(METHODS, (*sweep.COLOURS[:2], sweep.STRONG), strict=True):
        values = measured([r for label, records in got.items() if label.startswith(f"{method},") for r in records])
        if not len(values["staleness"]):
            continue
        cells = []
        for ax, (a, b) in zip(axes.flat, PAIRS, strict=True):
            r, low, high = rank_correlation(values[a], values[b])
            cells.append(f"{r:.2f} [{low:.2f}, {high:.2f}]")
            ax.plot(values[a], values[b], ".", ms=4, alpha=0.6, color=colour, label=f"{method}, {r:.2f}")
            ax.set(xlabel=a, ylabel=b, xscale="symlog" if a == "staleness" else "log", yscale="log")
        rows.append([method, str(len(values["staleness"])), *cells])
    for ax, (a, b) in zip(axes.flat, PAIRS, strict=True):
        ax.set_xlim(left=FLOORS.get(a))
        ax.set_ylim(bottom=FLOORS.get(b))
        ax.legend(fontsize=8)
        ax.grid(alpha=0.3)
    fig.suptitle("Updates of all bounds of staleness; beside a method its rank correlation")
    sweep.save(fig, sweep.RESULTS / "heterorl_correlations.png")
    head = ["", "updates", *(f"{a} ~ {b}" for a, b in PAIRS)]
    title = "## Rank correlations over updates, with 95 % intervals (Fisher)\n\n"
    return title + sweep.markdown(head, rows)


def study(flags):
    got = sweep.run(TABLE | MORE, SEEDS, flags.draw, flags.jobs, config=CONFIG)
    main = {label: got[label] for label in TABLE if label in got}
    more = {label: got[label] for label in MORE if label in got}
    sweep.page(
        "heterorl",
        sweep.table("Table 2", main, COLUMNS),
        sweep.table("Further rows", more, COLUMNS),
        correlations(main),
    )
    sweep.figure("heterorl", got, GROUPS, strong=("GEPO, 64", "GEPO, 8", "GEPO, 0"))
    sweep.figure("heterorl_more", got, MORE_GROUPS, strong=("GEPO, 64",))


if __name__ == "__main__":
    sweep.main(study, __doc__)
