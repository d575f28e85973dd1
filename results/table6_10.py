"""Jackpot's Tables 6 to 10 in small: mask or weights alone, c1, lambda, K, and a budget.

    python results/table6_10.py         # run what is missing (two at a time), then write results/table6_10.{md,png}

`other model`: a small actor samples (target ref; Z exact, or bracketed where K matters). `stale`:
64 updates to a sync, no clip, target new, c2 unbounded.

A vocabulary of 256 is kind to top-K. So Table 10's first half, how much of Z the top K hold, is also
computed on random pairs of distributions over 100,000 tokens, in seconds and without a model:

    Z         = sum_x min(p_inf, p_tgt / lambda)
    Z_low     = the same over S, the sampler's top-K and the sampled token, in expectation over it
    Z_approx  = the same over top-K(p_inf) and top-K(p_tgt) together                  (Jackpot 4.4.1)
"""

import math

import numpy as np
import sweep
from figure2ab import dirichlet_pair
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
VOCAB = 100_000
TOPK = (10, 20, 40)
# Dirichlet concentration of all tokens together: the smaller, the fewer tokens hold the mass
CONCENTRATIONS = (1, 10, 100, 2000)
NOISES = {"mixture": (0.01, 0.3), "log-normal": (0.1, 1.0)}
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


def captured(p_tgt, p_inf, k: int, lam: float = 1.0) -> tuple[float, float]:
    """(Z_low / Z, Z_approx / Z) of one pair of distributions, each (vocab,)."""
    kept = np.minimum(p_inf, p_tgt / lam)
    top = np.argpartition(-p_inf, k - 1)[:k]
    sampled = p_inf * kept
    low = kept[top].sum() + sampled.sum() - sampled[top].sum()  # a sampled token outside the top K adds its own term
    union = np.union1d(top, np.argpartition(-p_tgt, k - 1)[:k])
    return float(low / kept.sum()), float(kept[union].sum() / kept.sum())


def shares_of_z(vocab: int = VOCAB, pairs: int = 5, seed: int = 0) -> list[list[str]]:
    """Cells of the table of Z: one row for each concentration and noise, means over `pairs` pairs."""
    rng = np.random.default_rng(seed)
    rows = []
    for concentration in CONCENTRATIONS:
        for kind, noises in NOISES.items():
            for noise in noises:
                drawn = [dirichlet_pair(vocab, kind, noise, rng, concentration / vocab) for _ in range(pairs)]
                kl = np.mean([(p * np.log(p / q)).sum() for p, q in drawn])
                mass = np.mean([np.partition(q, -20)[-20:].sum() for _, q in drawn])
                shares = [np.mean([captured(p, q, k) for p, q in drawn], axis=0) for k in TOPK]
                cells = [f"{100 * x:.2f}" for pair in zip(*shares, strict=True) for x in pair]
                rows.append([f"{concentration}, {kind} {noise:g}", f"{kl:.3g}", f"{100 * mass:.1f}", *cells])
    return rows


def page_of_z() -> str:
    """The part of the page about Z at a large vocabulary."""
    columns = ["concentration, noise", "KL(p_tgt, p_inf)", "mass of the top 20, %"]
    columns += [f"{name} / Z, K = {k}, %" for name in ("Z_low", "Z_approx") for k in TOPK]
    parts = [
        f"## Z from the top K of {VOCAB:,} tokens",
        "Dirichlet pairs, five a row (figure2ab.py). Z_low is over the sampler's top K and the sampled token, Z_approx "
        "over the top K\nof both.",
        sweep.markdown(columns, shares_of_z()).rstrip(),
    ]
    return "\n\n".join(parts) + "\n"


def study(flags):
    got = sweep.run(ROWS, None, flags.draw, flags.jobs)
    stale = {label: records for label, records in got.items() if label in STALE_ROWS}
    other = {label: records for label, records in got.items() if label not in STALE_ROWS}
    sweep.page(
        "table6_10",
        sweep.table("Another model samples", other, COLUMNS),
        sweep.table("Stale samples", stale, COLUMNS),
        page_of_z(),
    )
    sweep.figure("table6_10", got, GROUPS, strong=(BOTH, "stale: mask and weights"))


if __name__ == "__main__":
    sweep.main(study, __doc__)
