"""Jackpot's Tables 6 to 10 in small: mask or reweighting alone, c1, lambda, K, and a budget.

    python results/table6_10.py         # run what is missing (two at a time), then results/table6_10.{md,png} and table6_10_stale.{md,png}

`other model`: a small actor samples (target ref; Z exact, or bracketed where K matters). `stale`: 64 updates a sync, no clip, target new.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sweep
import table2_3
from table2_3 import STALE

OTHER = dict(objective="jackpot")
STALE_64 = dict(objective="jackpot", obrs_target="new", clip=False, rollout_batch=2048, **STALE)
ROWS = {
    "other model: mask and reweight": OTHER,
    "other model: mask only": dict(OTHER, obrs_mode="mask"),
    "other model: reweight only": dict(OTHER, obrs_mode="reweight"),
    "stale: mask and reweight": STALE_64,
    "stale: mask only": dict(STALE_64, obrs_mode="mask"),
    "stale: reweight only": dict(STALE_64, obrs_mode="reweight"),
    **{f"c1 = {c}": dict(OTHER, obrs_c1=c) for c in (2, 4, 8)},
    **{f"lambda = {x}": dict(OTHER, obrs_lambda=x) for x in (0.8, 1.2)},
    **{f"K = {k}, bracket": dict(OTHER, obrs_z="bracket", obrs_topk=k) for k in (10, 20, 40)},
    "budget: accept 90 %": dict(OTHER, obrs_accept_rate=0.9),
}
COLUMNS = {
    **sweep.COLUMNS,
    "lambda": lambda rs: sweep.number(sweep.tail(rs, "obrs/lambda", 1.0)),
    "Z_low / Z": lambda rs: sweep.number(sweep.tail(rs, "obrs/z_low", 1.0) / sweep.tail(rs, "obrs/z_exact", 1.0)),
    "bracket's width": lambda rs: sweep.number(sweep.tail(rs, "obrs/bracket_width", 1.0)),
    "kappa": lambda rs: sweep.number(sweep.tail(rs, "obrs/kappa", 1.0)),
}
PANELS = [
    ("held-out pass@1 of the policy (%)", "eval/policy"),
    ("KL(policy || actor), nats a token", "distill_kl"),
    ("acceptance", "obrs/accept_rate"),
    ("kappa", "obrs/kappa"),
    ("width of the bracket around Z", "obrs/bracket_width"),
    ("ESS of the weights that train", "rollout_corr/rollout_is_eff_sample_size"),
]


def main():
    args = sweep.arguments(__doc__)
    got = sweep.run(ROWS, None, args.draw, args.jobs)
    stale = {label: records for label, records in got.items() if label.startswith("stale")}
    sweep.write("table6_10", {label: records for label, records in got.items() if label not in stale}, PANELS, COLUMNS)
    sweep.write("table6_10_stale", stale, table2_3.PANELS, COLUMNS, script="table6_10")


if __name__ == "__main__":
    main()
