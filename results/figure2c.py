"""Jackpot's Figure 2 (c) and section 8: does the gap between actor and policy stay small over a long run, and when does it break?

    python results/figure2c.py          # run what is missing (two at a time), then results/figure2c.md and results/figure2c.png

400 updates, and 150 of the rows that are over by then or that do not move. The closed loop holds KL(policy || actor) at 0.01 nats a token by steering lambda_distill. Its last row starts almost
without distillation and lets the gap grow to 0.05 before it holds: does that move the collapse of the row without distillation?
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sweep

LONG = dict(steps=400, eval_every=50)
ROWS = {
    "no correction, no distillation": dict(objective="none", distill_lambda=0),  # both are over within 150 updates
    "TIS, no distillation": dict(objective="tis", distill_lambda=0),
    "Jackpot, no distillation": dict(objective="jackpot", distill_lambda=0, **LONG),
    "TIS + distillation": dict(objective="tis"),
    "Jackpot": dict(objective="jackpot", **LONG),
    "Jackpot, closed loop": dict(objective="jackpot", distill_kl_target=0.01, **LONG),
    "Jackpot, closed loop from 0.01": dict(objective="jackpot", distill_lambda=0.01, distill_kl_target=0.05, **LONG),
}
PANELS = [
    ("KL(policy || actor), nats a token", "distill_kl"),
    ("held-out pass@1 of the policy (%)", "eval/policy"),
    ("reward of the responses", "reward"),
    ("lambda_distill", "distill_lambda"),
    ("gradient norm of the policy", "grad_norm"),
    ("entropy of the policy (nats)", "entropy"),
]


def main():
    args = sweep.arguments(__doc__)
    sweep.write("figure2c", sweep.run(ROWS, None, args.draw, args.jobs), PANELS)


if __name__ == "__main__":
    main()
