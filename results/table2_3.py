"""Jackpot's Tables 2 and 3 in small: a stale policy as its own sampler, 64 or 128 updates to a weight sync, with and without PPO's clip.

    python results/table2_3.py          # run what is missing (two at a time), then results/table2_3.md and results/table2_3.png

One model, 1,280 updates of 32 responses (40,960 in all): 20 syncs of 64 updates, or 10 of 128. `on-policy` syncs before every update.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sweep

STALE = dict(actor="none", steps=1280, train_batch=32, eval_every=160, save_every=320)
KINDS = {
    "off-policy": dict(objective="none"),
    "off-policy, no clip": dict(objective="none", clip=False),
    "Jackpot": dict(objective="jackpot", obrs_target="new"),
    "Jackpot, no clip": dict(objective="jackpot", obrs_target="new", clip=False),
    "TIS-adjusted": dict(objective="tis_adjusted"),
    "Jackpot-adjusted": dict(objective="jackpot_adjusted"),
    "Jackpot, no clip, expected mask": dict(objective="jackpot", obrs_target="new", clip=False, obrs_mask="expected"),
    "Jackpot, no clip, c2 = 3": dict(objective="jackpot", obrs_target="new", clip=False, obrs_c2=3),
    "Jackpot-adjusted, expected mask": dict(objective="jackpot_adjusted", obrs_mask="expected"),
}
ROWS = {"on-policy": dict(objective="grpo", rollout_batch=32, **STALE)}
for label, flags in KINDS.items():
    ROWS[f"{label}, 64"] = dict(flags, rollout_batch=2048, **STALE)
for label in list(KINDS)[:4]:
    ROWS[f"{label}, 128"] = dict(KINDS[label], rollout_batch=4096, **STALE)
PANELS = [
    ("held-out pass@1 (%)", "eval/policy"),
    ("reward of the responses", "reward"),
    ("drift since the sync, mean log p_ref / p_new", "ppo_kl"),
    ("gradient norm", "grad_norm"),
    ("OBRS acceptance", "obrs/accept_rate"),
    ("entropy (nats)", "entropy"),
]


def main():
    args = sweep.arguments(__doc__)
    sweep.write("table2_3", sweep.run(ROWS, None, args.draw, args.jobs), PANELS)


if __name__ == "__main__":
    main()
