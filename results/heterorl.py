"""HeteroRL and GEPO in small: Table 2, Figures 5 to 7, the delay laws against each other, and the rows that the text lacks.

    python results/heterorl.py          # run what is missing (two at a time), then results/heterorl{,_more,_correlations}.{md,png}

configs/delay.toml: four simulated samplers (delay.py). `64`, `8`, `0`: --max_staleness, which caps the delays; 0 is the synchronous loop, without CPPO-KL
as in the text. One clip of 0.2 for all three methods of Table 2: only the coefficient differs. A length-normalised ratio hardly ever leaves 0.8 to 1.2, so
the clip holds GRPO's tokens and nothing else: three more rows tell its part from the coefficient's. `hours` is the virtual clock: what the updates
take when nobody waits, and what they would take if every update waited until each of the four samplers had its weights.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sweep

from delay import Law

CONFIG = "configs/delay.toml"
METHODS = {
    "GRPO": dict(objective="grpo", ratio_base="inf"),
    "GSPO": dict(objective="gspo", ratio_base="inf"),
    "GEPO": dict(objective="gepo"),
}
BOUNDS = {0: dict(max_staleness=0, cppo_beta=0.0), 8: dict(max_staleness=8), 64: dict(max_staleness=64)}
TABLE = {f"{m}, {s}": dict(flags, **bound) for s, bound in BOUNDS.items() for m, flags in METHODS.items()}
FAR = BOUNDS[64]
MORE = {
    "GEPO, 64": TABLE["GEPO, 64"],
    "GEPO, clip 0.01": dict(objective="gepo", clip_low=0.01, clip_high=0.01, **FAR),
    "GSPO, clip 0.01": dict(objective="gspo", ratio_base="inf", clip_low=0.01, clip_high=0.01, **FAR),
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
THREE = {f"{m}, {s}": 3 for m in METHODS for s in (8, 64)}
COLUMNS = {
    **{c: sweep.COLUMNS[c] for c in ("seeds", "policy pass@1, %", "best, %")},
    "staleness, updates": lambda rs: sweep.number(sweep.tail(rs, "staleness/mean_updates", 0.5)),
    "KL(inf, ref)": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/k3_kl", 0.5)),
    "variance of the weight": lambda rs: sweep.number(sweep.tail(rs, "weight_var", 0.5)),
    "advantage error": lambda rs: sweep.number(sweep.tail(rs, "advantage_error", 0.5)),
    "clipped, %": lambda rs: sweep.number(100 * sweep.tail(rs, "clip_fraction", 0.5)),
    "gradient norm": lambda rs: sweep.number(sweep.tail(rs, "grad_norm", 0.5)),
    "hours": lambda rs: f"{hours(rs, False):.1f}",
    "hours, waiting for all": lambda rs: f"{hours(rs, True):.1f}",
}
PANELS = [
    ("held-out pass@1 (%)", "eval/policy"),
    ("reward of the responses", "reward"),
    ("KL(inf || ref), k3, nats a token", "rollout_corr/k3_kl"),
    ("variance of the weight", "weight_var"),
    ("gradient norm", "grad_norm"),
    ("staleness of the responses, updates", "staleness/mean_updates"),
]
CHAIN = [
    ("staleness", "staleness/mean_updates"),
    ("KL(inf, ref)", "rollout_corr/k3_kl"),
    ("variance of the weight", "weight_var"),
    ("advantage error", "advantage_error"),
]
FLOORS = {"KL(inf, ref)": 1e-5, "variance of the weight": 1e-6}  # below, at bound 0, is rounding


def hours(records: list[dict], wait: bool) -> float:
    """Virtual hours of a run: an update takes step_seconds, and with `wait` the longest of the samplers' delays on top, in the mean."""
    c = records[0]["config"]
    longest = 0.0
    if wait and c["delay"] != "none":
        law, cap, n, grid = (
            Law(c["delay"], c["delay_min"], c["delay_max"], c["delay_mass"]),
            c["max_staleness"] * c["step_seconds"],
            c["delay_samplers"],
            2000,
        )
        longest = (
            sum(min(cap, law.quantile(((i + 0.5) / grid) ** (1 / n))) for i in range(grid)) / grid
        )  # the largest of n has the quantile Q(u^(1/n))
    return c["steps"] * (c["step_seconds"] + longest) / 3600


def correlations(got: dict[str, list[dict]]) -> None:
    """Figures 6 and 7: staleness, KL, variance of the weight and error of the advantage, update by update, of the three methods over all bounds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    pairs = [(CHAIN[i], CHAIN[j]) for i, j in ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3), (1, 3))]
    fig, axes = plt.subplots(2, 3, figsize=(14, 8))
    rows = []
    for m in METHODS:
        records = [r for label, rs in got.items() if label.startswith(m + ",") for r in rs]
        points = np.array(
            [
                [np.nan if v is None else v for v in row]
                for r in records
                for row in zip(*(r["columns"].get(key, [None] * len(r["updates"])) for _, key in CHAIN))
            ],
            float,
        )
        if not len(points):
            continue
        points = points[np.isfinite(points).all(1)]  # the error is measured every tenth update
        cells = []
        for ax, ((a, _), (b, _)) in zip(axes.flat, pairs):
            x, y = (points[:, [n for n, _ in CHAIN].index(n)] for n in (a, b))
            r = float(np.corrcoef(ranks(x), ranks(y))[0, 1])
            half = 1.96 / math.sqrt(len(x) - 3)
            cells.append(f"{r:.2f} [{math.tanh(math.atanh(r) - half):.2f}, {math.tanh(math.atanh(r) + half):.2f}]")
            ax.plot(x, y, ".", ms=4, alpha=0.6, label=f"{m}, {r:.2f}")
            ax.set(xlabel=a, ylabel=b, xscale="symlog" if a == "staleness" else "log", yscale="log")
        rows.append([m, str(len(points)), *cells])
    for ax, ((a, _), (b, _)) in zip(axes.flat, pairs):
        ax.set_xlim(left=FLOORS.get(a))
        ax.set_ylim(bottom=FLOORS.get(b))
        ax.legend(fontsize=8)
        ax.grid(alpha=0.3)
    fig.suptitle("Updates of all bounds of staleness; beside a method its rank correlation")
    fig.tight_layout()
    fig.savefig(sweep.RESULTS / "heterorl_correlations.png", dpi=100)
    plt.close(fig)
    text = sweep.markdown(["", "updates", *(f"{a} ~ {b}" for (a, _), (b, _) in pairs)], rows)
    (sweep.RESULTS / "heterorl_correlations.md").write_text(
        "`python results/heterorl.py`\n\nRank correlations over updates with 95 % intervals (Fisher).\n\n" + text,
        encoding="utf-8",
    )
    print(text)


def ranks(x):
    import numpy as np

    _, place, n = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(n) - (n - 1) / 2)[place]  # ties share their mean rank


def main():
    args = sweep.arguments(__doc__)
    got = sweep.run(TABLE | MORE, THREE, args.draw, args.jobs, config=CONFIG)
    sweep.write("heterorl", {label: got[label] for label in TABLE if label in got}, PANELS, COLUMNS)
    sweep.write(
        "heterorl_more", {label: got[label] for label in MORE if label in got}, PANELS, COLUMNS, script="heterorl"
    )
    correlations({label: got[label] for label in TABLE if label in got})


if __name__ == "__main__":
    main()
