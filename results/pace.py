"""Samplers that are slower for long responses: drop the groups that come too old, or pace the samplers (delay.py)?

    python results/pace.py          # run what is missing (two at a time), then write results/pace.{md,png}

configs/pace.toml: GEPO, log-normal delays of 60 to 1800 seconds, four groups of 16 responses an update. Making a
response of --max_tokens takes 10, 20, 40 or 54 of the 64 updates that a group may be old. There are as many samplers as
would keep up if all responses were that long: a fifth more than is needed. `drop` throws away what is too old when the
learner would take it, `pace` lets samplers begin only what can be used in time, and the learner waits. KS p: the test
of Kolmogorov and Smirnov that groups that are dropped are as long as those trained on. hours: the virtual clock.
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import sweep

from config import parse
from delay import DelaySource
from sampling import Sampling
from tasks import make_task

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


class Clock(DelaySource):
    """The virtual clock of a run without its models: every response is as long as its problem's worked solution."""

    def __init__(self, cfg, store: str):
        engine = SimpleNamespace(packed=False, any_rank=bool, sleep=lambda: None)
        tokenizer = SimpleNamespace(eos_token_id=0)
        how = dict(group_size=cfg.group_size, topk=0, model="policy", check=None, cfg=cfg, store=Path(store))
        super().__init__(engine, make_task(cfg), tokenizer, Sampling.of(cfg), **how)

    def sample_tickets(self, taken: list) -> list:
        groups = []
        for ticket in taken:
            solution = self.task.solution(self.task.problem("train", ticket.number))
            tokens = [0] * min(self.cfg.max_tokens, len(solution.split()) + 1)  # a word is a token, and so is the end
            response = SimpleNamespace(tokens=tokens)
            groups.append(SimpleNamespace(version=ticket.version, responses=[response] * self.cfg.group_size))
        return groups


def clock_of(label: str, seeds: int = 3) -> list[str]:
    """A row of the table without models: means over the seeds, of KS p the range."""
    metrics, ages = [], []
    for seed in range(seeds):
        argv = sweep.command({**ROWS[label], "seed": seed}, "none", CONFIG)[1:]
        cfg = parse([word.replace(CONFIG, str(sweep.ROOT / CONFIG)) for word in argv])
        with tempfile.TemporaryDirectory() as store:
            source = Clock(cfg, store)
            for version in range(cfg.steps):
                source.publish(version, [])
                ages += [version - group.version for group in source.next(GROUPS, version)]
            metrics.append(source.metrics())

    def mean(key):
        return sum(m[key] for m in metrics) / seeds

    gone = mean("delay/dropped_staleness")
    p = sorted(m["delay/length_ks_p"] for m in metrics)
    return [
        label,
        f"{mean('delay/length_trained'):.2f}",
        f"{mean('delay/length_decided'):.2f}",
        f"{p[0]:.2g} to {p[-1]:.2g}",
        f"{100 * gone / (gone + cfg.steps * GROUPS):.1f}",
        f"{sum(ages) / len(ages):.1f}",
        f"{(cfg.steps * UPDATE + mean('delay/clock')) / 3600:.1f}",
    ]


def clocks() -> str:
    """The table without models: all rows."""
    head = ["", "tokens, trained", "tokens, offered", "KS p", "dropped, %", "staleness, updates", "hours"]
    return "## The clock alone\n\n" + sweep.markdown(head, [clock_of(label) for label in ROWS])


def study(flags):
    wanted = {label: sweep.with_seeds(row, 1) for label, row in ROWS.items()}
    if not flags.draw:
        sweep.run_missing(wanted, flags.jobs, CONFIG)
    got = {label: records for label, runs in wanted.items() if (records := sweep.recorded(runs, CONFIG))}
    if not got:
        sweep.page("pace", clocks())
        return
    sweep.page("pace", clocks(), sweep.table("Drop or pace", got, COLUMNS))
    drawn = [making for making in sorted(MAKING) if any(f"{way}, {making}" in got for way in ("drop", "pace"))]
    groups = [
        sweep.Group(f"the longest response takes {n} updates", [f"pace, {n}", f"drop, {n}"], PANELS) for n in drawn
    ]
    sweep.figure("pace", got, groups, strong=tuple(label for label in got if label.startswith("pace")))


if __name__ == "__main__":
    sweep.main(study, __doc__)
