"""QaRL in small (its Table 1, Table 3 and Figure 8): low-bit rollouts, a learner that computes what the engine computes, and TBPO.

    python results/qarl.py              # run what is missing (two at a time), then results/qarl.{md,png} and results/qarl_ladder.{md,png}

configs/lowbit.toml: one model, four updates of 128 responses to a weight sync. int8, fp8 and w4a16 hardly hurt a model this small, so w2a16
(weights of -1, 0, 1 times a scale for 64 of them) is the stress. The learning rate moves the length-normalised ratio s some thirty times farther than
the papers' do: at their bands GSPO and TBPO clip half of the tokens, so both bands are thirty times as wide, `paper's band` excepted.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sweep

CONFIG = "configs/lowbit.toml"
BAND = dict(clip_low=9e-3, clip_high=1.2e-2)
TBPO = dict(objective="tbpo", **BAND, tbpo_neg_high=2.1e-2)
FORMATS = ("int8", "fp8", "w4a16", "w2a16")
ROWS = {"GRPO, float32 rollouts": dict(objective="grpo"), "TBPO, float32 rollouts": TBPO}
for f in FORMATS:
    low, aligned = dict(rollout_quant=f), dict(rollout_quant=f, learner_quant="aligned")
    ROWS |= {
        f"{f}: GRPO": dict(objective="grpo", **low),
        f"{f}: TIS": dict(objective="tis", **low),
        f"{f}: QaRL + GRPO": dict(objective="grpo", **aligned),
        f"{f}: QaRL + TBPO": dict(TBPO, **aligned),
    }
ROWS["w2a16: TBPO"] = dict(TBPO, rollout_quant="w2a16")
STRESS = dict(rollout_quant="w2a16", learner_quant="aligned")
LADDER = {
    "QaRL + GRPO": ROWS["w2a16: QaRL + GRPO"],
    "QaRL + TBPO": ROWS["w2a16: QaRL + TBPO"],
    "QaRL + TBPO, paper's band": dict(objective="tbpo", **STRESS),
    "QaRL + GSPO": dict(objective="gspo", **BAND, **STRESS),
    "QaRL + MIS-GSPO": dict(objective="mis_gspo", **BAND, **STRESS),
    "QaRL + GRPO, positive only": dict(objective="grpo", positive_only=True, **STRESS),
    "QaRL + GRPO, on-policy": dict(objective="grpo", rollout_batch=128, **STRESS),
    "QaRL + GRPO, dual clip": dict(objective="grpo", dual_clip=3, **STRESS),
    "QaRL + SAPO": dict(objective="sapo", **STRESS),
}
THREE = {
    "GRPO, float32 rollouts": 3,
    **{f"w2a16: {x}": 3 for x in ("GRPO", "TIS", "QaRL + GRPO", "QaRL + TBPO")},
    "QaRL + GRPO": 3,
    "QaRL + TBPO": 3,
}
COLUMNS = {
    **{c: sweep.COLUMNS[c] for c in ("seeds", "policy pass@1, %", "best, %")},
    "reward of the engine": lambda rs: sweep.number(sweep.tail(rs, "reward")),
    "mean gap of p": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/mean_mismatch")),
    "KL(inf, ref)": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/k3_kl")),
    "KL(ref, new)": lambda rs: sweep.number(sweep.tail(rs, "ppo_k3_kl")),
    "clipped, %": lambda rs: sweep.number(100 * sweep.tail(rs, "clip_fraction")),
    "error tokens, A < 0, %": lambda rs: sweep.number(100 * sweep.tail(rs, "error/low_prob_neg")),
    "repeated, %": lambda rs: sweep.number(100 * sweep.tail(rs, "error/repetition")),
    "learner, s": sweep.COLUMNS["learner, s"],
}
PANELS = [
    ("held-out pass@1 of the learner, as it computes (%)", "eval/policy"),
    ("reward of the engine's responses", "reward"),
    ("mean |p_inf - p_ref|", "rollout_corr/mean_mismatch"),
    ("KL(ref || new) by k3, under samples of inf", "ppo_k3_kl"),
    ("sampled tokens with p_ref < 1e-3, A < 0", "error/low_prob_neg"),
    ("entropy (nats)", "entropy"),
]


def main():
    args = sweep.arguments(__doc__)
    got = sweep.run(ROWS | LADDER, THREE, args.draw, args.jobs, config=CONFIG)
    sweep.write("qarl", {label: got[label] for label in ROWS if label in got}, PANELS, COLUMNS)
    sweep.write("qarl_ladder", {label: got[label] for label in LADDER if label in got}, PANELS, COLUMNS, script="qarl")


if __name__ == "__main__":
    main()
