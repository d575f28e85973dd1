"""Jackpot's ablations in the settings of the text, where the other studies here ran easier ones.

    python results/text_settings.py     # run what is missing (two at a time), then write results/text_settings.{md,png}

The text's 2,048 / 64 is 2,048 responses and 32 updates of 64 to a weight sync here, and its 2,048 / 32 and 4,096 / 32
are the 64 and 128 updates of results/table2_3.py: 40,960 responses in all of them. Every row is run anew, references
too, because base models differ a little between processors. The settings stand in the order in which they are run,
each seed of all rows before the next.
"""

from dataclasses import dataclass

import sweep
import table2_3
import table6_10
from table2_3 import JACKPOT, PANELS, STALE

# Tables 7 and 8: 32 updates of 64 responses to a sync, evaluated after as many responses as the rows of STALE
WIDE = dict(clip_low=0.4, clip_high=0.7, rollout_batch=2048)
WIDE |= {**STALE, "train_batch": 64, "steps": 640, "eval_every": 80, "save_every": 160}
BOTH = dict(JACKPOT, obrs_c2=3, **WIDE)
# Table 6: on-policy but for the 8 bits, here of the linear layers; the policy without them is evaluated
FP8 = dict(actor="none", rollout_quant="fp8", eval_engine="torch")
OTHER = table6_10.OTHER
STALE_32 = {
    "mask only": dict(BOTH, obrs_mode="mask"),
    "both, c1 = 3": BOTH,
    "weights only": dict(BOTH, obrs_mode="reweight"),
    "c1 = 2": dict(BOTH, obrs_c1=2),
    "c1 = 8": dict(BOTH, obrs_c1=8),
    "no correction": dict(objective="none", **WIDE),
    "c1 = 4": dict(BOTH, obrs_c1=4),
}
THRESHOLD = {
    "lambda = 1, distilled by 1": OTHER,
    **{f"lambda = {x}": dict(OTHER, obrs_lambda=x) for x in (0.9, 1.1, 0.8, 1.2)},
}
DISTILLED = {
    "lambda = 1, distilled by 1": OTHER,
    "reverse KL": dict(OTHER, distill_direction="reverse"),
    **{f"distilled by {x}": dict(OTHER, distill_lambda=x) for x in (0.1, 10, 0.01)},
}
STALE_128 = {
    "off-policy, no clip, 128": table2_3.ROWS["off-policy, no clip, 128"],
    "TIS-adjusted, 128": dict(objective="tis_adjusted", rollout_batch=4096, **STALE),
    "Jackpot, no clip, c2 = 3, 128": dict(table2_3.KINDS["Jackpot, no clip, c2 = 3"], rollout_batch=4096, **STALE),
}
STALE_64 = {
    "Jackpot, target ref, no clip, 64": dict(objective="jackpot", clip=False, rollout_batch=2048, **STALE),
    "TIS, 64": dict(objective="tis", rollout_batch=2048, **STALE),
    **{label: table2_3.ROWS[label] for label in ("off-policy, 64", "TIS-adjusted, 64", "Jackpot, no clip, c2 = 3, 64")},
}
EIGHT_BITS = {
    "fp8: no correction": dict(FP8, objective="grpo"),
    "fp8: mask only": dict(FP8, objective="jackpot", obrs_mode="mask"),
    "fp8: both": dict(FP8, objective="jackpot"),
    "fp8: weights only": dict(FP8, objective="jackpot", obrs_mode="reweight"),
}
OTHER_PANELS = [table6_10.PASS, table6_10.KL, table6_10.ACCEPTED]
GAP = ("KL(inf, ref), nats a token", "rollout_corr/k3_kl")
# title -> (rows, panels)
SETTINGS = {
    "Tables 7 and 8: 32 updates to a sync, clip 0.4 and 0.7, c2 = 3": (STALE_32, PANELS),
    "Table 9: another model samples, lambda": (THRESHOLD, OTHER_PANELS),
    "Eq. 7: another model samples, its distillation": (DISTILLED, OTHER_PANELS),
    "Tables 3 and 4: 128 updates to a sync": (STALE_128, PANELS),
    "Tables 3 and 4: 64 updates to a sync": (STALE_64, PANELS),
    "Table 6: rollouts in fp8": (EIGHT_BITS, [table6_10.PASS, GAP, PANELS[2]]),
}
ROWS = {label: flags for rows, _ in SETTINGS.values() for label, flags in rows.items()}
FIRST_SEED = 20
COLUMNS = {
    **table2_3.COLUMNS,
    "clipped, %": lambda rs: sweep.number(100 * sweep.tail(rs, "clip_fraction")),
    "drift": lambda rs: sweep.number(sweep.tail(rs, "ppo_kl")),
    "KL(inf, ref)": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/k3_kl")),
    "gradient norm": lambda rs: sweep.number(sweep.tail(rs, "grad_norm")),
}


@dataclass(frozen=True)
class TextFlags(sweep.StudyFlags):
    """Settings of the text"""

    seeds: int = 3
    """Runs of every row."""


def study(flags):
    got = sweep.run(ROWS, dict.fromkeys(ROWS, flags.seeds), flags.draw, flags.jobs, first_seed=FIRST_SEED)
    tables, groups = [], []
    for title, (rows, panels) in SETTINGS.items():
        ran = {label: got[label] for label in rows if label in got}
        if ran:
            tables.append(sweep.table(title, ran, COLUMNS))
            groups.append(sweep.Group(title, list(ran), panels))
    sweep.page("text_settings", *tables)
    sweep.figure("text_settings", got, groups, strong=("both, c1 = 3", "lambda = 1, distilled by 1", "fp8: both"))


if __name__ == "__main__":
    sweep.main(study, __doc__, TextFlags)
