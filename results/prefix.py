"""Weights capped at 1, of a response and of each prefix: do they train as well as they weigh?

    python results/prefix.py            # run what is missing (two at a time), then write results/prefix.{md,png}

worth.py ranks min(R, 1) (`--objective=seq_tis --is_cap=1`) and min(R_t, 1) (`prefix_tis`, R_t the product of r up to
and with token t) first where another model samples. Beside them rows of Table 1; then caps and corrections that are
chosen by worth while training (`--is_cap=auto`, `--correction=auto`); then what could lift them above on-policy, one
cause a row; then 400 updates, weaker actors, two bits, late and stale samplers and long responses, beside those
studies' rows.
"""

from dataclasses import dataclass

import heterorl
import length
import praxis
import qarl
import sweep
import table1
import table2_3

RETRACE = "prod min(r, 1) min(R, 1)"  # retrace_seq
NEW = {
    "spare": dict(objective="spare"),
    RETRACE: dict(objective="retrace_seq"),
    "min(R, 1)": dict(objective="seq_tis", is_cap=1),
    "min(R_t, 1)": dict(objective="prefix_tis"),
    "1 where 0.5 <= R <= 2": dict(objective="none", reject="sequence", rs_low=0.5, rs_high=2),
}
ALONE = dict(distill_lambda=0)
OLD = ("on-policy", "Jackpot", "TIS + distillation", "Jackpot, expected mask")
OLD_ALONE = ("Jackpot, no distillation", "TIS, no distillation", "no correction, no distillation")
DISTILLED = {**NEW, **{label: table1.ROWS[label] for label in OLD}}
CHOSEN = {
    "min(r, C), C by worth": dict(objective="tis", is_cap="auto"),
    "min(R, C), C by worth": dict(objective="seq_tis", is_cap="auto"),
    "the correction by worth": dict(objective="grpo", correction="auto"),
    **{label: DISTILLED[label] for label in (RETRACE, "min(R, 1)", "on-policy", "TIS + distillation")},
}
UNDISTILLED = {
    **{f"{label}, no distillation": {**flags, **ALONE} for label, flags in NEW.items()},
    **{label: table1.ROWS[label] for label in OLD_ALONE},
}
# why does retrace_seq end above on-policy? less noise in a step; what the policy finds unlikely has small weights; an
# actor that learns
WHY = {
    "on-policy": table1.ROWS["on-policy"],
    "on-policy, 512 responses": {**table1.ROWS["on-policy"], "rollout_batch": 512, "train_batch": 512},
    f"{RETRACE}, its own noise": {**NEW[RETRACE], "actor": "none", "rollout_noise": 0.7, "eval_engine": "torch"},
    f"{RETRACE}, the actor stands still": {**NEW[RETRACE], **ALONE, "actor_lr": 1e-12},
    RETRACE: NEW[RETRACE],
}
WHY_SEED = 13  # its only one: all its rows on one pair of base models
# their checkpoints are kept: foretell.py weighs the rows on the way
FAR = dict(steps=400, save_every=25, keep=16)
BEST = (RETRACE, "min(R, 1)")
CAPPED = (*BEST, "min(R_t, 1)")
LONGER = {label: {**DISTILLED[label], **FAR} for label in (*CAPPED, "Jackpot", "TIS + distillation")}
LONGER_ALONE = {
    **{label: {**UNDISTILLED[label], **FAR} for label in (*(f"{x}, no distillation" for x in CAPPED), *OLD_ALONE[:2])},
    "on-policy": {**DISTILLED["on-policy"], **FAR},
}
# from a weak distillation: lambda stays, or is steered to hold a KL, or the worth of a response
WEAKLY = dict(objective="jackpot", distill_lambda=0.01, steps=400)
STEERED = {
    "Jackpot, worth held at 0.5": {**WEAKLY, "distill_worth_target": 0.5},
    "Jackpot, KL held at 0.05": {**WEAKLY, "distill_kl_target": 0.05},
    "Jackpot, lambda 0.01": WEAKLY,
}
# the warm start of the actor stops at this sampled accuracy
WEAKER, WEAKEST = (
    {label: {**DISTILLED[label], "actor_base_accuracy": x} for label in (*CAPPED, "Jackpot", "TIS + distillation")}
    for x in (0.2, 0.1)
)
SEEN = dict(eval_problems=1024, eval_every=64)
LONG = {c: praxis.ROWS[f"{c}, T 1"] for c in ("none", "Token-TIS", "Seq-TIS")}
LONG |= {**NEW, "prod min(r, 1)": dict(objective="retrace")}
LONG = {label: {**flags, **SEEN} for label, flags in LONG.items()}
BRIEF_ROWS = {label: UNDISTILLED[label] for label in (*(f"{x}, no distillation" for x in CAPPED), *OLD_ALONE)}
BRIEF_ROWS["on-policy"] = DISTILLED["on-policy"]
BRIEF = {label: flags | dict(task_min_ops=2, task_max_ops=2, max_tokens=14) for label, flags in BRIEF_ROWS.items()}
# chains of ten sums, and the models with which length.py weighed them
CHAIN = dict(model="out/length/10/policy", task_min_ops=10, task_max_ops=10, max_tokens=62, lr=1e-4, actor_lr=3e-4)
CHAINS = {
    label: {"actor": "out/length/10/actor-0.3", **flags, **CHAIN, "rollout_dtype": "float32"}
    for label, flags in BRIEF_ROWS.items()
    if not label.startswith(("Jackpot", "no correction", "min(R, 1)"))
}
HALFWAY = dict(max_tokens=96, task_explain=64)
MIDDLE = ("none", "Token-TIS", "min(R, 1)", "min(R_t, 1)", "prod min(r, 1)")
MIDDLE = {label: {**LONG[label], **HALFWAY} for label in MIDDLE}
MIDDLE |= {
    "Jackpot": dict(objective="jackpot", **SEEN, **HALFWAY),
    "on-policy": dict(objective="grpo", actor="none", **SEEN, **HALFWAY),
}
LOW = {
    **{label: qarl.ROWS[f"w2a16: {label}"] for label in ("GRPO", "TIS")},
    **{label: {**flags, "rollout_quant": "w2a16"} for label, flags in NEW.items()},
}
LATE = {
    **{label: heterorl.TABLE[label] for label in ("GRPO, 64", "GEPO, 64")},
    "decoupled TIS": heterorl.MORE["decoupled TIS"],
    **{label: {**flags, **heterorl.FAR} for label, flags in NEW.items()},
}

# the same with PPO's clip and without it, on one pair of base models
CLIPPED = {"min(R_t, 1)": LATE["min(R_t, 1)"], "min(R_t, 1), no clip": LATE["min(R_t, 1)"] | dict(clip=False)}
CLIPPED_SEED = 13


def stale(n: int) -> dict[str, dict]:
    """Rows that sync every n updates. Until then p_ref is what sampled, so weights are of p_new / p_inf and stand in
    place of the ratio."""
    held = dict(rollout_batch=32 * n, **table2_3.STALE)
    new = dict(correction_target="new", ratio_base="new", **held)
    return {
        **{label: {**NEW[label], **new} for label in CAPPED},
        "TIS-adjusted": dict(objective="tis_adjusted", **held),
        "PPO's clip": dict(objective="none", **held),
    }


STALE = {**stale(128), "no correction, no clip": table2_3.ROWS["off-policy, no clip, 128"]}
# title -> (rows, configuration)
SETTINGS = {
    "another model samples, distilled": (DISTILLED, sweep.STUDY),
    "another model samples, distilled: chosen by worth": (CHOSEN, sweep.STUDY),
    "another model samples, not distilled": (UNDISTILLED, sweep.STUDY),
    "above on-policy: why?": (WHY, sweep.STUDY),
    "two bits": (LOW, qarl.CONFIG),
    "an actor of 20 %": (WEAKER, sweep.STUDY),
    "an actor of 10 %": (WEAKEST, sweep.STUDY),
    "400 updates, not distilled": (LONGER_ALONE, sweep.STUDY),
    "400 updates, distilled": (LONGER, sweep.STUDY),
    "400 updates, weakly distilled": (STEERED, sweep.STUDY),
    "late by up to 64 updates": (LATE, heterorl.CONFIG),
    "late, with and without a clip": (CLIPPED, heterorl.CONFIG),
    "stale by up to 16 updates": (stale(16), sweep.STUDY),
    "stale by up to 64 updates": (stale(64), sweep.STUDY),
    "stale by up to 128 updates": (STALE, sweep.STUDY),
    "responses of 14 tokens": (BRIEF, sweep.STUDY),
    "chains of 62 tokens": (CHAINS, sweep.STUDY),
    "responses of up to 96 tokens": (MIDDLE, praxis.CONFIG),
    "long responses": (LONG, praxis.CONFIG),
}
SHORT = {
    "above on-policy: why?": " (why)",
    "two bits": " (w2a16)",
    "an actor of 20 %": " (20 %)",
    "an actor of 10 %": " (10 %)",
    "400 updates, not distilled": " (400)",
    "400 updates, distilled": " (400, distilled)",
    "400 updates, weakly distilled": " (400, weakly distilled)",
    "late by up to 64 updates": " (late)",
    "late, with and without a clip": " (clip)",
    "stale by up to 16 updates": " (stale by 16)",
    "stale by up to 64 updates": " (stale by 64)",
    "stale by up to 128 updates": " (stale)",
    "responses of 14 tokens": " (14)",
    "chains of 62 tokens": " (62)",
    "responses of up to 96 tokens": " (96)",
    "long responses": " (long)",
}
FIGURES = ("prefix", "prefix_more")  # of the settings without a short name, and of those with one
NOT_DRAWN = ("1 where", "Jackpot, expected mask", "Seq-TIS")  # a panel has room for seven lines
FIRST_SEED = 10  # every row is run anew: base models differ a little between processors


def seeds_of(rows: dict[str, dict], wanted: int) -> tuple[int, int]:
    """(first seed, how many) of the runs of a setting's rows."""
    for some, seed in ((WHY, WHY_SEED), (CLIPPED, CLIPPED_SEED)):
        if rows is some:
            return seed, 1
    return FIRST_SEED, wanted


def chosen(records: list[dict]) -> str:
    """What auto took at each of its probes: of the first seed."""
    columns, every = records[0]["columns"], records[0]["config"].get("auto_every", 1)
    names = columns.get("auto/correction") or [f"{cap:g}" for cap in columns.get("auto/is_cap", [])]
    return ", ".join(names[::every])


def is_long(records: list[dict]) -> bool:
    """Whether length earns a bonus in these runs."""
    return records[0]["config"]["task_explain"] > 0


def steered(records: list[dict]) -> str:
    """The weight of distillation at the end, where the rows differ in it."""
    return sweep.number(sweep.tail(records, "distill_lambda")) if records[0]["flags"].get("distill_lambda") else ""


PANELS = [("held-out pass@1 of the policy (%)", "eval/policy"), ("reward of the responses", "reward")]
COLUMNS = {
    **{c: sweep.COLUMNS[c] for c in ("seeds", "policy pass@1, %", "best, %")},
    "policy's reward, %": lambda rs: sweep.percent(praxis.over_seeds(rs, "reward")) if is_long(rs) else "",
    "reward": lambda rs: sweep.number(sweep.tail(rs, "reward")),
    "KL(inf, ref)": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/k3_kl")),
    "ESS": sweep.COLUMNS["ESS"],
    "entropy": lambda rs: sweep.number(sweep.tail(rs, "entropy")),
    "tokens": lambda rs: sweep.number(sweep.tail(rs, "response_length")),
    "chosen": chosen,
    "lambda": steered,
    "gradient norm": lambda rs: sweep.number(sweep.tail(rs, "grad_norm")),
}


@dataclass(frozen=True)
class PrefixFlags(sweep.StudyFlags):
    """Weights capped at 1"""

    seeds: int = 3
    """Runs of every row."""
    settings: int = len(SETTINGS)
    """The first so many settings."""


def study(flags):
    tables, groups, everything = [], {name: [] for name in FIGURES}, {}
    for title, (rows, config) in list(SETTINGS.items())[: flags.settings]:
        first, n = seeds_of(rows, flags.seeds)
        if not flags.draw:
            if rows is CHAINS:
                length.make_models(10)
            sweep.run(rows, dict.fromkeys(rows, n), False, flags.jobs, config, first)
        wanted = {label: sweep.with_seeds(row, n, first) for label, row in rows.items()}
        got = {label: records for label, runs in wanted.items() if (records := sweep.recorded(runs, config))}
        if not got:
            continue
        tables.append(sweep.table(title, got, COLUMNS))
        named = {f"{label}{SHORT.get(title, '')}": records for label, records in got.items()}
        everything |= named
        drawn = [label for label in named if not label.startswith(NOT_DRAWN)]
        groups[FIGURES[title in SHORT]].append(sweep.Group(title, drawn, PANELS))
    sweep.page("prefix", *tables)
    for name, some in groups.items():
        if some:
            sweep.figure(name, everything, some, strong=tuple(label for label in everything if "R_t" in label))


if __name__ == "__main__":
    sweep.main(study, __doc__, PrefixFlags)
