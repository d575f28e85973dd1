"""Jackpot's Figure 1, Figure 5c and Table 1 in small: which correction lets a weak, small actor train a bigger policy?

    python results/table1.py            # run what is missing (two at a time), then results/table1.md and results/table1.png

The same budget of responses for every row. Controls that the paper lacks: `tis` at C = c1 and `z_tis` (OBRS is, in expectation,
TIS scaled by Z), the expected mask, and the closed loop on the measured KL.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sweep

ROWS = {
    "on-policy": dict(objective="grpo", actor="none"),
    "actor's own on-policy": dict(
        objective="grpo", model="base:actor", actor="none", lr=3e-4
    ),  # its learning rate in the other rows
    "no correction": dict(objective="none", distill_lambda=0),
    "distillation only": dict(objective="none"),
    "TIS + distillation": dict(objective="tis"),
    "TIS, C = c1": dict(objective="tis", is_cap=3),
    "Z-TIS": dict(objective="z_tis"),
    "Jackpot": dict(objective="jackpot"),
    "Jackpot, expected mask": dict(objective="jackpot", obrs_mask="expected"),
    "Jackpot, closed loop": dict(objective="jackpot", distill_kl_target=0.05),
    "TIS, no distillation": dict(objective="tis", distill_lambda=0),
    "TIS, C = c1, no distillation": dict(objective="tis", is_cap=3, distill_lambda=0),
    "Z-TIS, no distillation": dict(objective="z_tis", distill_lambda=0),
    "Jackpot, no distillation": dict(objective="jackpot", distill_lambda=0),
}
THREE = [
    "on-policy",
    "no correction",
    "TIS + distillation",
    "TIS, C = c1",
    "Z-TIS",
    "Jackpot",
    "Jackpot, expected mask",
    "TIS, no distillation",
    "Z-TIS, no distillation",
    "Jackpot, no distillation",
]
PANELS = [
    ("held-out pass@1 of the policy (%)", "eval/policy"),
    ("held-out pass@1 of the actor (%)", "eval/actor"),
    ("reward of the responses", "reward"),
    ("KL(policy || actor), nats a token", "distill_kl"),
    ("ESS of the weights that train", "rollout_corr/rollout_is_eff_sample_size"),
    ("entropy of the policy (nats)", "entropy"),
]


def main():
    args = sweep.arguments(__doc__)
    got = sweep.run(ROWS, {label: 3 for label in THREE}, args.draw, args.jobs)
    sweep.write("table1", got, PANELS)


if __name__ == "__main__":
    main()
