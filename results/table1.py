"""Jackpot's Figure 1, Figure 5 (c) and Table 1 in small: which correction lets a small actor train a bigger policy?

    python results/table1.py            # run what is missing (two at a time), then write results/table1.{md,png}

The same budget of responses for every row. Controls that the paper lacks: `tis` at C = c1 and
`z_tis` (OBRS is, in expectation, TIS scaled by Z), the expected mask, and the closed loop on the
measured KL.
"""

import sweep

ALONE = dict(distill_lambda=0)
ROWS = {
    "on-policy": dict(objective="grpo", actor="none"),
    # at the learning rate that the actor has in the other rows
    "actor's own on-policy": dict(objective="grpo", model="base:actor", actor="none", lr=3e-4),
    "no correction, no distillation": dict(objective="none", **ALONE),
    "distillation only": dict(objective="none"),
    "TIS + distillation": dict(objective="tis"),
    "TIS, C = c1": dict(objective="tis", is_cap=3),
    "Z-TIS": dict(objective="z_tis"),
    "Jackpot": dict(objective="jackpot"),
    "Jackpot, expected mask": dict(objective="jackpot", obrs_mask="expected"),
    "Jackpot, closed loop": dict(objective="jackpot", distill_kl_target=0.05),
    "TIS, no distillation": dict(objective="tis", **ALONE),
    "TIS, C = c1, no distillation": dict(objective="tis", is_cap=3, **ALONE),
    "Z-TIS, no distillation": dict(objective="z_tis", **ALONE),
    "Jackpot, no distillation": dict(objective="jackpot", **ALONE),
}
ONE = ("actor's own on-policy", "distillation only", "Jackpot, closed loop", "TIS, C = c1, no distillation")
SEEDS = {label: 1 if label in ONE else 3 for label in ROWS}
PANELS = [
    ("held-out pass@1 of the policy (%)", "eval/policy"),
    ("reward of the responses", "reward"),
    ("KL(policy || actor), nats a token", "distill_kl"),
]
GROUPS = [
    sweep.Group(
        "with distillation",
        [
            "on-policy",
            "Jackpot",
            "TIS + distillation",
            "TIS, C = c1",
            "Jackpot, expected mask",
            "distillation only",
            "Jackpot, closed loop",
        ],
        PANELS,
    ),
    sweep.Group(
        "without distillation",
        [
            "on-policy",
            "Jackpot, no distillation",
            "TIS, no distillation",
            "TIS, C = c1, no distillation",
            "Z-TIS, no distillation",
            "no correction, no distillation",
        ],
        [
            PANELS[0],
            ("entropy of the policy (nats)", "entropy"),
            PANELS[2],
        ],  # the reward is the actor's, the same in all
    ),
]


def study(flags):
    got = sweep.run(ROWS, SEEDS, flags.draw, flags.jobs)
    sweep.page("table1", sweep.table("The runs", got))
    sweep.figure("table1", got, GROUPS, strong=("Jackpot", "Jackpot, no distillation"))


if __name__ == "__main__":
    sweep.main(study, __doc__)
