"""Corrections on quantized rollouts in small: the TIS text's Figures 2, 4 and 5, and Jackpot's Tables 2 and 6.

    python results/lowbit.py            # run what is missing (two at a time), then write results/lowbit.{md,png}

The learner stays in float32 (configs/lowbit.toml, four updates to a sync). int8 is the text's
format; on a model this small it changes little, so the same is done with w2a16. Jackpot's FP8 cache
needs a GPU: W8A8 int8 stands in its place.
"""

import sweep
from qarl import CONFIG, FLOAT32, PANELS

KINDS = {
    "none": dict(objective="grpo"),
    "PPO-IS": dict(objective="ppo_is"),
    "vanilla IS": dict(objective="is"),
    "TIS, C = 2": dict(objective="tis"),
    "TIS, C = 8": dict(objective="tis", is_cap=8),
    "Jackpot, mask only": dict(objective="jackpot", obrs_mode="mask"),
    "Jackpot": dict(objective="jackpot"),
}
ROWS = {FLOAT32: dict(objective="grpo")}
for fmt in ("int8", "w2a16"):
    ROWS |= {f"{fmt}: {label}": dict(flags, rollout_quant=fmt) for label, flags in KINDS.items()}
SEEDS = {FLOAT32: 3, "w2a16: none": 3, "w2a16: TIS, C = 2": 3}


def negative(records: list[dict]) -> str:
    """Share of a run's points at which ppo_kl is below zero, in percent: mean over seeds."""
    points = [v for r in records for v in r["columns"]["ppo_kl"]]
    return sweep.number(100 * sum(v < 0 for v in points) / len(points))


COLUMNS = {
    **{c: sweep.COLUMNS[c] for c in ("seeds", "policy pass@1, %", "best, %")},
    "reward of the engine": lambda rs: sweep.number(sweep.tail(rs, "reward")),
    "estimated for the learner": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/reward_weighted")),
    "mean gap of p": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/mean_mismatch")),
    "KL(inf, ref)": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/k3_kl")),
    "ppo_kl": lambda rs: sweep.number(sweep.tail(rs, "ppo_kl")),
    "lowest": lambda rs: sweep.number(min(v for r in rs for v in r["columns"]["ppo_kl"])),
    "below 0, %": negative,
    "weighted by TIS": lambda rs: sweep.number(sweep.tail(rs, "ppo_kl_weighted")),
    "entropy": lambda rs: sweep.number(sweep.tail(rs, "entropy")),
    "tokens": lambda rs: sweep.number(sweep.tail(rs, "response_length")),
    "ESS": sweep.COLUMNS["ESS"],
    "accepted, %": sweep.COLUMNS["accepted, %"],
}
SHOWN = [
    PANELS["pass"],
    PANELS["reward"],
    PANELS["gap"],
    PANELS["entropy"],
    ("tokens of a response", "response_length"),
    ("ppo_kl, k1: a negative one is no KL", "ppo_kl"),
]
GROUPS = [
    sweep.Group("w2a16 rollouts", [f"w2a16: {label}" for label in KINDS], SHOWN),
    sweep.Group(
        "int8 rollouts (vanilla IS and TIS at C = 8 are the run of TIS at C = 2)",
        [FLOAT32, *(f"int8: {label}" for label in KINDS if label not in ("vanilla IS", "TIS, C = 8"))],
        SHOWN[:3],
    ),
]


def study(flags):
    got = sweep.run(ROWS, SEEDS, flags.draw, flags.jobs, config=CONFIG)
    sweep.page("lowbit", sweep.table("The runs", got, COLUMNS))
    sweep.figure("lowbit", got, GROUPS, strong=("w2a16: TIS, C = 2", "int8: TIS, C = 2"))


if __name__ == "__main__":
    sweep.main(study, __doc__)
