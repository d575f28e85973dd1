"""Jackpot's Figure 2 (c) and section 8: does the gap between actor and policy stay small over a long run?

    python results/figure2c.py          # run what is missing (two at a time), then write results/figure2c.{md,png}

400 updates, and 150 of the rows that are over by then or that do not move. The closed loop steers
lambda_distill so that KL(policy || actor) stays at its set point. Its last row starts almost
without distillation and lets the gap grow to 0.05 before it holds: what becomes of the late fall of
the row without distillation?
"""

import sweep

LONG = dict(objective="jackpot", steps=400, eval_every=50)
ROWS = {
    # this row and the next are over within 150 updates
    "no correction, no distillation": dict(objective="none", distill_lambda=0),
    "TIS, no distillation": dict(objective="tis", distill_lambda=0),
    "Jackpot, no distillation, 400": dict(LONG, distill_lambda=0),
    "TIS + distillation": dict(objective="tis"),
    "Jackpot + distillation, 400": LONG,
    "Jackpot, loop at 0.01, 400": dict(LONG, distill_kl_target=0.01),
    "Jackpot, loop at 0.05 from lambda 0.01, 400": dict(LONG, distill_lambda=0.01, distill_kl_target=0.05),
}
PANELS = [
    ("KL(policy || actor), nats a token", "distill_kl"),
    ("held-out pass@1 of the policy (%)", "eval/policy"),
    ("reward of the responses", "reward"),
    ("lambda_distill", "distill_lambda"),
    ("gradient norm of the policy", "grad_norm"),
    ("entropy of the policy (nats)", "entropy"),
]


def study(flags):
    got = sweep.run(ROWS, None, flags.draw, flags.jobs)
    sweep.page("figure2c", sweep.table("The runs", got))
    sweep.figure("figure2c", got, [sweep.Group("", list(ROWS), PANELS)], strong=("Jackpot, no distillation, 400",))


if __name__ == "__main__":
    sweep.main(study, __doc__)
