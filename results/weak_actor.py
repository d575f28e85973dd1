"""When the actor is much weaker than the policy (9.5 % against 28 %): what still helps, and what cannot.

    python results/weak_actor.py        # run what is missing (two at a time), then results/weak_actor.md and results/weak_actor.png
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sweep

WEAK = dict(actor_base_accuracy=0.1)
ROWS = {
    "on-policy": dict(objective="grpo", actor="none"),
    "no correction": dict(objective="none", distill_lambda=0, **WEAK),
    "distillation only": dict(objective="none", **WEAK),
    "TIS + distillation": dict(objective="tis", **WEAK),
    "Z-TIS": dict(objective="z_tis", **WEAK),
    "Jackpot": dict(objective="jackpot", **WEAK),
    "Jackpot, closed loop": dict(objective="jackpot", distill_kl_target=0.02, **WEAK),
}
PANELS = [("held-out pass@1 of the policy (%)", "eval/policy"), ("held-out pass@1 of the actor (%)", "eval/actor"), ("KL(policy || actor), nats a token", "distill_kl"),
          ("acceptance", "obrs/accept_rate"), ("ESS of the weights that train", "rollout_corr/rollout_is_eff_sample_size"), ("lambda_distill", "distill_lambda")]


def main():
    args = sweep.arguments(__doc__)
    sweep.write("weak_actor", sweep.run(ROWS, None, args.draw, args.jobs), PANELS)


if __name__ == "__main__":
    main()
