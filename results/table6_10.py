"""Jackpot's Tables 6 to 10 in small: mask or weights alone, c1, lambda, K, and a budget.

    python results/table6_10.py         # run what is missing (two at a time), then write results/table6_10.{md,png}

`other model`: a small actor samples (target ref; Z exact, or bracketed where K matters). `stale`:
64 updates to a sync, no clip, target new, c2 unbounded.
"""

import math

import sweep
from table2_3 import COLUMNS as STALE_COLUMNS
from table2_3 import PANELS as DRIFT
from table2_3 import STALE

OTHER = dict(objective="jackpot")
STALE_64 = dict(objective="jackpot", obrs_target="new", clip=False, obrs_c2=math.inf, rollout_batch=2048, **STALE)
BOTH = "other model: mask and weights"
ROWS = {
    BOTH: OTHER,
    "other model: mask only": dict(OTHER, obrs_mode="mask"),
    "other model: weights only": dict(OTHER, obrs_mode="reweight"),
    "stale: mask and weights": STALE_64,
    "stale: mask only": dict(STALE_64, obrs_mode="mask"),
    "stale: weights only": dict(STALE_64, obrs_mode="reweight"),
    **{f"c1 = {c}": dict(OTHER, obrs_c1=c) for c in (2, 4, 8)},
    **{f"lambda = {x}": dict(OTHER, obrs_lambda=x) for x in (0.8, 1.2)},
    **{f"K = {k}, bracket": dict(OTHER, obrs_z="bracket", obrs_topk=k) for k in (10, 20, 40)},
    "budget: accept 90 %": dict(OTHER, obrs_accept_rate=0.9),
}
COLUMNS = {
    **STALE_COLUMNS,
    "first gradient norm": lambda rs: sweep.number(rs[0]["columns"]["grad_norm"][0]),
    "lambda": lambda rs: sweep.number(sweep.tail(rs, "obrs/lambda", 1.0)),
    "Z_low / Z": lambda rs: sweep.number(sweep.tail(rs, "obrs/z_low", 1.0) / sweep.tail(rs, "obrs/z_exact", 1.0)),
    "bracket's width": lambda rs: sweep.number(sweep.tail(rs, "obrs/bracket_width", 1.0)),
    "kappa": lambda rs: sweep.number(sweep.tail(rs, "obrs/kappa", 1.0)),
}
PASS = ("held-out pass@1 of the policy (%)", "eval/policy")
KL = ("KL(policy || actor), nats a token", "distill_kl")
ACCEPTED = ("share of accepted tokens", "obrs/accept_rate")
WIDTH = ("width of the bracket around Z", "obrs/bracket_width")
STALE_ROWS = [label for label in ROWS if label.startswith("stale")]
GROUPS = [
    sweep.Group(
        "another model samples: mask, weights, c1, lambda",
        [
            BOTH,
            "other model: mask only",
            "other model: weights only",
            "c1 = 2",
            "c1 = 8",
            "lambda = 0.8",
            "lambda = 1.2",
        ],
        [PASS, KL, ACCEPTED],
    ),
    sweep.Group(
        "another model samples: K of the bracket, and a budget",
        [BOTH, "K = 10, bracket", "K = 20, bracket", "K = 40, bracket", "budget: accept 90 %"],
        [PASS, WIDTH, ACCEPTED],
    ),
    sweep.Group("stale: 64 updates to a sync, no clip, c2 unbounded", STALE_ROWS, DRIFT),
]


def study(flags):
    got = sweep.run(ROWS, None, flags.draw, flags.jobs)
    stale = {label: records for label, records in got.items() if label in STALE_ROWS}
    other = {label: records for label, records in got.items() if label not in STALE_ROWS}
    sweep.page(
        "table6_10",
        sweep.table("Another model samples", other, COLUMNS),
        sweep.table("Stale samples", stale, COLUMNS),
    )
    sweep.figure("table6_10", got, GROUPS, strong=(BOTH, "stale: mask and weights"))


if __name__ == "__main__":
    sweep.main(study, __doc__)
