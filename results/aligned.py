"""Does the aligned learner stay aligned? 50 updates on real vLLM, int8 and fp8, with and without --learner_quant=aligned.

    python results/aligned.py           # run what is missing (two at a time), then results/aligned.md and results/aligned.png

One update to a sync, no correction; mean |p_inf - p_ref| of each update, and how many times smaller alignment makes it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sweep
from qarl import PANELS

FLAGS = dict(objective="grpo", actor="none", rollout="vllm", steps=50, eval_every=0, save_every=25)
ROWS = {
    f"{f}, {how}": dict(FLAGS, rollout_quant=f, learner_quant=flag)
    for f in ("int8", "fp8")
    for how, flag in (("unaligned", "none"), ("aligned", "aligned"))
}


def main():
    args = sweep.arguments(__doc__)
    got = sweep.run(ROWS, None, args.draw, args.jobs)
    gaps = {label: rs[0]["columns"]["rollout_corr/mean_mismatch"] for label, rs in got.items()}

    def times(rs):
        """Smallest ratio of the unaligned gap to this run's, update by update."""
        label = next(name for name, records in got.items() if records is rs)
        pair = zip(gaps.get(label.replace(", aligned", ", unaligned"), []), gaps[label])
        return f"{min(u / a for u, a in pair):.0f}" if label.endswith(", aligned") else ""

    columns = {
        "policy pass@1, %": sweep.COLUMNS["policy pass@1, %"],
        "mean gap, updates 1-5": lambda rs: sweep.number(sum(rs[0]["columns"]["rollout_corr/mean_mismatch"][:5]) / 5),
        "mean gap, updates 46-50": lambda rs: sweep.number(
            sum(rs[0]["columns"]["rollout_corr/mean_mismatch"][-5:]) / 5
        ),
        "largest of an update": lambda rs: sweep.number(max(rs[0]["columns"]["rollout_corr/mean_mismatch"])),
        "times smaller than unaligned, at least": times,
    }
    sweep.write("aligned", got, [PANELS[2], PANELS[1], ("KL(inf || ref), k3", "rollout_corr/k3_kl")], columns)


if __name__ == "__main__":
    main()
