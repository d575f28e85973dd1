"""QaRL in small (Tables 1 and 3, Figures 8 and 9): low-bit rollouts, a learner aligned with the engine, TBPO.

    python results/qarl.py              # run what is missing (two at a time), then write results/qarl.md, qarl.png
                                        # and qarl_ladder.png

configs/lowbit.toml: one model, four updates of 128 responses to a weight sync. int8, fp8 and w4a16
hardly hurt a model this small, so w2a16 (weights of -1, 0, 1 times a scale for 64 of them) is the
stress test. The learning rate moves the length-normalised ratio s some thirty times farther than
the papers' do: at their bands GSPO and TBPO clip half of the tokens, so both bands are thirty times
as wide, `paper's band` excepted.
"""

import sweep

CONFIG = "configs/lowbit.toml"
BAND = dict(clip_low=9e-3, clip_high=1.2e-2)
TBPO = dict(objective="tbpo", **BAND, tbpo_neg_high=2.1e-2)
FORMATS = ("int8", "fp8", "w4a16", "w2a16")
FLOAT32 = "GRPO, float32 rollouts"
ROWS = {FLOAT32: dict(objective="grpo"), "TBPO, float32 rollouts": TBPO}
for fmt in FORMATS:
    low = dict(rollout_quant=fmt)
    aligned = dict(rollout_quant=fmt, learner_quant="aligned")
    ROWS |= {
        f"{fmt}: GRPO": dict(objective="grpo", **low),
        f"{fmt}: TIS": dict(objective="tis", **low),
        f"{fmt}: QaRL + GRPO": dict(objective="grpo", **aligned),
        f"{fmt}: QaRL + TBPO": dict(TBPO, **aligned),
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
    "QaRL + SAPO": dict(objective="sapo", reduction="token-mean", **STRESS),
}
STRESSED = [label for label in ROWS if label.startswith("w2a16")]
SEEDS = {label: 3 for label in (FLOAT32, *STRESSED[:4], "QaRL + GRPO", "QaRL + TBPO")}
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
PANELS = {
    "pass": ("held-out pass@1 of the learner, as it computes (%)", "eval/policy"),
    "reward": ("reward of the engine's responses", "reward"),
    "gap": ("mean |p_inf - p_ref|", "rollout_corr/mean_mismatch"),
    "kl": ("KL(ref || new) by k3, under samples of inf", "ppo_k3_kl"),
    "error": ("sampled tokens with p_ref < 1e-3, A < 0", "error/low_prob_neg"),
    "entropy": ("entropy (nats)", "entropy"),
}


def group_of(fmt: str) -> sweep.Group:
    """The rows of one format beside rollouts in float32; all panels of the stress test, three of the others."""
    labels = [FLOAT32, *(label for label in ROWS if label.startswith(f"{fmt}:"))]
    names = list(PANELS) if fmt == "w2a16" else ["pass", "reward", "gap"]
    return sweep.Group(f"{fmt} rollouts", labels, [PANELS[name] for name in names])


LADDER_PANELS = [PANELS[name] for name in ("pass", "reward", "kl")]
LADDER_GROUPS = [
    sweep.Group(
        "TBPO beside a ratio of each token",
        ["QaRL + TBPO", *(label for label in LADDER if "GRPO" in label), "QaRL + SAPO"],
        LADDER_PANELS,
    ),
    sweep.Group(
        "a ratio of each response, beside GRPO",
        ["QaRL + GRPO", *(label for label in LADDER if "TBPO" in label or "GSPO" in label)],
        LADDER_PANELS,
    ),
]


def study(flags):
    got = sweep.run(ROWS | LADDER, SEEDS, flags.draw, flags.jobs, config=CONFIG)
    formats = {label: got[label] for label in ROWS if label in got}
    ladder = {label: got[label] for label in LADDER if label in got}
    sweep.page(
        "qarl",
        sweep.table("Formats", formats, COLUMNS),
        sweep.table("The ladder of objectives", ladder, COLUMNS),
    )
    strong = [f"{fmt}: QaRL + TBPO" for fmt in FORMATS]
    sweep.figure("qarl", got, [group_of(fmt) for fmt in reversed(FORMATS)], tuple(strong))
    sweep.figure("qarl_ladder", got, LADDER_GROUPS, strong=("QaRL + TBPO",))


if __name__ == "__main__":
    sweep.main(study, __doc__)
