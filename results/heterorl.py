"""HeteroRL and GEPO in small: Table 2, Figures 5 to 7, the delay laws against each other, and the rows that the text lacks.

    python results/heterorl.py          # run what is missing (two at a time), then results/heterorl.{md,png} and results/heterorl_more.{md,png}

configs/delay.toml: four simulated samplers (delay.py). `64`, `8`, `0`: --max_staleness, which caps the delays; 0 is the synchronous loop, without CPPO-KL
as in the text. One clip of 0.2 for all three methods of Table 2: only the coefficient differs.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sweep

CONFIG = "configs/delay.toml"
METHODS = {"GRPO": dict(objective="grpo", ratio_base="inf"), "GSPO": dict(objective="gspo", ratio_base="inf"), "GEPO": dict(objective="gepo")}
BOUNDS = {0: dict(max_staleness=0, cppo_beta=0.0), 8: dict(max_staleness=8), 64: dict(max_staleness=64)}
TABLE = {f"{m}, {s}": dict(flags, **bound) for s, bound in BOUNDS.items() for m, flags in METHODS.items()}
FAR = BOUNDS[64]
MORE = {
    "GEPO, 64": TABLE["GEPO, 64"],
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
THREE = {f"{m}, 64": 3 for m in METHODS}
COLUMNS = {**{c: sweep.COLUMNS[c] for c in ("seeds", "policy pass@1, %", "best, %")},
           "staleness, updates": lambda rs: sweep.number(sweep.tail(rs, "staleness/mean_updates", 0.5)),
           "KL(inf, ref)": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/k3_kl", 0.5)),
           "variance of the weight": lambda rs: sweep.number(sweep.tail(rs, "weight_var", 0.5)),
           "advantage error": lambda rs: sweep.number(sweep.tail(rs, "advantage_error", 0.5)),
           "clipped, %": lambda rs: sweep.number(100 * sweep.tail(rs, "clip_fraction", 0.5)),
           "gradient norm": lambda rs: sweep.number(sweep.tail(rs, "grad_norm", 0.5))}
PANELS = [("held-out pass@1 (%)", "eval/policy"), ("reward of the responses", "reward"), ("KL(inf || ref), k3, nats a token", "rollout_corr/k3_kl"),
          ("variance of the weight", "weight_var"), ("gradient norm", "grad_norm"), ("staleness of the responses, updates", "staleness/mean_updates")]


def main():
    args = sweep.arguments(__doc__)
    got = sweep.run(TABLE | MORE, THREE, args.draw, args.jobs, config=CONFIG)
    sweep.write("heterorl", {label: got[label] for label in TABLE if label in got}, PANELS, COLUMNS)
    sweep.write("heterorl_more", {label: got[label] for label in MORE if label in got}, PANELS, COLUMNS, script="heterorl")


if __name__ == "__main__":
    main()
