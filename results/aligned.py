"""Does the aligned learner stay aligned? 50 updates on vLLM, int8 and fp8, with and without --learner_quant=aligned.

    python results/aligned.py           # run what is missing (two at a time), then write results/aligned.{md,png}

One update to a sync, no correction; mean |p_inf - p_ref| of each update, and how many times smaller
alignment makes it.
"""

import sweep
from qarl import PANELS

FLAGS = dict(objective="grpo", actor="none", rollout="vllm", steps=50, eval_every=0, save_every=25)
FORMATS = ("int8", "fp8")
ROWS = {}
for fmt in FORMATS:
    ROWS[f"{fmt}, unaligned"] = dict(FLAGS, rollout_quant=fmt, learner_quant="none")
    ROWS[f"{fmt}, aligned"] = dict(FLAGS, rollout_quant=fmt, learner_quant="aligned")


def gaps(records: list[dict]) -> list[float]:
    """Mean |p_inf - p_ref| of each update."""
    return records[0]["columns"]["rollout_corr/mean_mismatch"]


def columns_of(got: sweep.Got) -> dict:
    """The table's columns; the last compares an aligned run with the unaligned one of the same format."""

    def times(records):
        fmt = records[0]["config"]["rollout_quant"]
        unaligned = got.get(f"{fmt}, unaligned")
        if records[0]["config"]["learner_quant"] == "none" or not unaligned:
            return ""
        return f"{min(u / a for u, a in zip(gaps(unaligned), gaps(records), strict=True)):.0f}"

    return {
        "policy pass@1, %": sweep.COLUMNS["policy pass@1, %"],
        "mean gap, updates 1-5": lambda rs: sweep.number(sum(gaps(rs)[:5]) / 5),
        "mean gap, updates 46-50": lambda rs: sweep.number(sum(gaps(rs)[-5:]) / 5),
        "largest of an update": lambda rs: sweep.number(max(gaps(rs))),
        "times smaller than unaligned, at least": times,
    }


def study(flags):
    got = sweep.run(ROWS, None, flags.draw, flags.jobs)
    sweep.page("aligned", sweep.table("The runs", got, columns_of(got)))
    panels = [PANELS["gap"], PANELS["reward"], ("KL(inf || ref), k3", "rollout_corr/k3_kl")]
    sweep.figure("aligned", got, [sweep.Group("", list(ROWS), panels)], strong=("int8, aligned",))


if __name__ == "__main__":
    sweep.main(study, __doc__)
