"""Corrections on quantized rollouts in small: the TIS text's Figures 2, 4 and 5, and Jackpot's OBRS on low bits (its Tables 2 and 6).

    python results/lowbit.py            # run what is missing (two at a time), then results/lowbit.md and results/lowbit.png

The learner stays in float32 (configs/lowbit.toml, four updates to a sync). int8 is the text's format; on a model this small it changes
little, so the same is done with w2a16. Jackpot's FP8 cache needs a GPU: W8A8 int8 stands in its place.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sweep
from qarl import CONFIG, PANELS

KINDS = {
    "none": dict(objective="grpo"),
    "PPO-IS": dict(objective="ppo_is"),
    "vanilla IS": dict(objective="is"),
    "TIS, C = 2": dict(objective="tis"),
    "TIS, C = 8": dict(objective="tis", is_cap=8),
    "Jackpot, mask only": dict(objective="jackpot", obrs_mode="mask"),
    "Jackpot": dict(objective="jackpot"),
}
ROWS = {
    "float32 rollouts": dict(objective="grpo"),
    **{f"{f}: {label}": dict(flags, rollout_quant=f) for f in ("int8", "w2a16") for label, flags in KINDS.items()},
}
THREE = {"float32 rollouts": 3, "w2a16: none": 3, "w2a16: TIS, C = 2": 3}
COLUMNS = {
    **{c: sweep.COLUMNS[c] for c in ("seeds", "policy pass@1, %", "best, %")},
    "reward of the engine": lambda rs: sweep.number(sweep.tail(rs, "reward")),
    "estimated for the learner": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/reward_weighted")),
    "mean gap of p": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/mean_mismatch")),
    "KL(inf, ref)": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/k3_kl")),
    "ppo_kl": lambda rs: sweep.number(sweep.tail(rs, "ppo_kl")),
    "weighted by TIS": lambda rs: sweep.number(sweep.tail(rs, "ppo_kl_weighted")),
    "entropy": lambda rs: sweep.number(sweep.tail(rs, "entropy")),
    "tokens": lambda rs: sweep.number(sweep.tail(rs, "response_length")),
    "ESS": sweep.COLUMNS["ESS"],
    "accepted, %": sweep.COLUMNS["accepted, %"],
}
FIGURE = [
    *PANELS[:3],
    ("entropy (nats)", "entropy"),
    ("tokens of a response", "response_length"),
    ("ppo_kl, k1: a negative one is no KL", "ppo_kl"),
]


def main():
    args = sweep.arguments(__doc__)
    sweep.write("lowbit", sweep.run(ROWS, THREE, args.draw, args.jobs, config=CONFIG), FIGURE, COLUMNS)


if __name__ == "__main__":
    main()
