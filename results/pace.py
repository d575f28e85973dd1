"""Samplers that are slower for long responses: drop the groups that come too old, or pace the samplers (delay.py)?

    python results/pace.py          # run what is missing (two at a time), then write results/pace.{md,png}

configs/pace.toml: GEPO, log-normal delays of 60 to 1800 seconds, four groups of 16 responses an update. Making a
response of --max_tokens takes 10, 20, 40 or 54 of the 64 updates that a group may be old. There are as many samplers as
would keep up if all responses were that long: a fifth more than is needed. `drop` throws away what is too old when the
learner would take it, `pace` lets samplers begin only what can be used in time, and the learner waits. KS p: the test
of Kolmogorov and Smirnov that what is trained on has the lengths of what is offered. hours: the virtual clock.
"""

import sweep

CONFIG = "configs/pace.toml"
UPDATE = 28.125  # virtual seconds of an update, --step_seconds
TOKENS, GROUPS = 32, 4  # --max_tokens; groups of an update
MAKING = (54, 20, 40, 10)  # updates in which the longest response is made


def row(admission: str, making: int) -> dict:
    """The flags of a row: samplers that need so many updates for the longest response."""
    return dict(admission=admission, delay_samplers=making * GROUPS, token_seconds=making * UPDATE / TOKENS)


ROWS = {f"{admission}, {making}": row(admission, making) for making in MAKING for admission in ("drop", "pace")}


def last(records: list[dict], key: str) -> float:
    """The last value of a column: mean over seeds."""
    return sum(r["columns"][key][-1] for r in records) / len(records)


def dropped(records: list[dict]) -> float:
    """Groups that were dropped, in percent of those whose fate was decided."""
    groups = records[0]["config"]["steps"] * GROUPS
    gone = last(records, "delay/dropped_staleness")
    return 100 * gone / (gone + groups)


def hours(records: list[dict]) -> float:
    """Virtual hours of a run: an update takes UPDATE seconds, and the learner waits for groups on top."""
    return (records[0]["config"]["steps"] * UPDATE + last(records, "delay/clock")) / 3600


COLUMNS = {
    **{c: sweep.COLUMNS[c] for c in ("seeds", "policy pass@1, %", "best, %")},
    "tokens, trained": lambda rs: f"{last(rs, 'delay/length_trained'):.2f}",
    "tokens, offered": lambda rs: f"{last(rs, 'delay/length_decided'):.2f}",
    "KS p": lambda rs: sweep.number(last(rs, "delay/length_ks_p")),
    "dropped, %": lambda rs: f"{dropped(rs):.1f}",
    "staleness, updates": lambda rs: sweep.number(sweep.tail(rs, "staleness/mean_updates", 0.5)),
    "KL(inf, ref)": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/k3_kl", 0.5)),
    "hours": lambda rs: f"{hours(rs):.1f}",
}
PANELS = [
    ("held-out pass@1 (%)", "eval/policy"),
    ("tokens of the responses trained on", "response_length"),
    ("staleness (updates)", "staleness/mean_updates"),
]


def study(flags):
    got = sweep.run(ROWS, None, flags.draw, flags.jobs, config=CONFIG)
    sweep.page("pace", sweep.table("Drop or pace", got, COLUMNS))
    drawn = [making for making in sorted(MAKING) if any(f"{way}, {making}" in got for way in ("drop", "pace"))]
    groups = [
        sweep.Group(f"the longest response takes {n} updates", [f"pace, {n}", f"drop, {n}"], PANELS) for n in drawn
    ]
    sweep.figure("pace", got, groups, strong=tuple(label for label in got if label.startswith("pace")))


if __name__ == "__main__":
    sweep.main(study, __doc__)
