"""Jackpot's Tables 2 and 3 in small: a stale policy as its own sampler, with and without PPO's clip.

    python results/table2_3.py          # run what is missing (two at a time), then write results/table2_3.{md,png}

One model, 1,280 updates of 32 responses (40,960 in all): 20 weight syncs of 64 updates each, or 10
of 128. Some rows have no bound c2 on p_ref / p_new; that is ours, in the text c2 is always finite.
"""

import math

import sweep

STALE = dict(actor="none", steps=1280, train_batch=32, eval_every=160, save_every=320)
JACKPOT = dict(objective="jackpot", obrs_target="new")
KINDS = {
    "off-policy": dict(objective="none"),
    "off-policy, no clip": dict(objective="none", clip=False),
    "Jackpot": JACKPOT,
    "Jackpot, no clip, c2 unbounded": dict(JACKPOT, clip=False, obrs_c2=math.inf),
    "TIS-adjusted": dict(objective="tis_adjusted"),
    "Jackpot-adjusted": dict(objective="jackpot_adjusted"),
    "Jackpot, no clip, expected mask": dict(JACKPOT, clip=False, obrs_mask="expected", obrs_c2=math.inf),
    "Jackpot, no clip, c2 = 3": dict(JACKPOT, clip=False, obrs_c2=3),
    "Jackpot-adjusted, expected mask": dict(objective="jackpot_adjusted", obrs_mask="expected"),
}
ON_POLICY = "on-policy, a sync before every update"
ROWS = {ON_POLICY: dict(objective="grpo", rollout_batch=32, **STALE)}
for label, flags in KINDS.items():
    ROWS[f"{label}, 64"] = dict(flags, rollout_batch=2048, **STALE)
for label in list(KINDS)[:4]:
    ROWS[f"{label}, 128"] = dict(KINDS[label], rollout_batch=4096, **STALE)
COLUMNS = {**sweep.COLUMNS, "mean of the last four, %": lambda rs: f"{sweep.lately(rs):.1f}"}
PANELS = [
    ("held-out pass@1 (%)", "eval/policy"),
    ("drift since the sync, mean log p_ref / p_new", "ppo_kl"),
    ("gradient norm", "grad_norm"),
]
GROUPS = [
    sweep.Group(
        "with PPO's clip", [ON_POLICY, "Jackpot, 64", "off-policy, 64", "Jackpot, 128", "off-policy, 128"], PANELS
    ),
    sweep.Group(
        "without the clip, 64 updates to a sync",
        [
            "off-policy, no clip, 64",
            "Jackpot, no clip, c2 = 3, 64",
            "Jackpot, no clip, expected mask, 64",
            "Jackpot, no clip, c2 unbounded, 64",
            "TIS-adjusted, 64",
            "Jackpot-adjusted, 64",
            "Jackpot-adjusted, expected mask, 64",
        ],
        PANELS,
    ),
    sweep.Group(
        "without the clip, 128 updates to a sync",
        ["off-policy, no clip, 128", "Jackpot, no clip, c2 unbounded, 128"],
        PANELS,
    ),
]
STRONG = ("Jackpot, 64", "Jackpot, no clip, c2 = 3, 64", "Jackpot, no clip, c2 unbounded, 128")


def study(flags):
    got = sweep.run(ROWS, None, flags.draw, flags.jobs)
    sweep.page("table2_3", sweep.table("The runs", got, COLUMNS))
    sweep.figure("table2_3", got, GROUPS, STRONG)


if __name__ == "__main__":
    sweep.main(study, __doc__)
