"""The rows of the studies: flags on top of a configuration, and the seeds of each row (run by results/sweep.py)."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One setting, run once for each seed."""

    flags: dict
    seeds: tuple[int, ...] = (0,)
    config: str = "study"  # configs/NAME.toml


class Study(NamedTuple):
    """The rows, table and plot of one page."""

    groups: dict[str, dict[str, Row]]
    # header -> pass, best, own, own_reward, worth, or the mean of a column of metrics.jsonl
    columns: dict[str, str]
    # (group, column of metrics.jsonl or eval/policy): a plot with a curve for each row of the group
    panels: tuple[tuple[str, str], ...]
    share: float = 0.1  # columns are averaged over this last share of the updates


def rows_of(
    seeds: tuple[int, ...], config: str, table: dict[str, dict], **shared
) -> dict[str, Row]:
    """Rows that share seeds, a configuration and some flags."""
    return {label: Row({**flags, **shared}, seeds, config) for label, flags in table.items()}


FIRST, LATER, TEXT = (0, 1, 2), (10, 11, 12), (20, 21, 22)
ALONE = dict(distill_lambda=0)
ON_POLICY = dict(objective="grpo", actor="none")

# ---------------------------------------------------------------------------------------------------------------------
# Jackpot
# ---------------------------------------------------------------------------------------------------------------------

JACKPOT = dict(objective="jackpot")
EXPECTED = dict(JACKPOT, obrs_mask="expected")
# one model that samples for itself, stale
STALE = dict(actor="none", steps=1280, train_batch=32, eval_every=160, save_every=320)
TO_NEW = dict(JACKPOT, obrs_target="new", clip=False, obrs_c2=3)
CLIPPED = dict(
    STALE, clip_low=0.4, clip_high=0.7, train_batch=64, steps=640, eval_every=80, save_every=160
)
TEXT_OBRS = dict(JACKPOT, obrs_target="new", obrs_c2=3)
FAR = dict(steps=400, save_every=25, keep=16)
WEAKLY = dict(JACKPOT, distill_lambda=0.01, steps=400)
DISTILLED = {
    "on-policy": ON_POLICY,
    "TIS": dict(objective="tis"),
    "Z-TIS": dict(objective="z_tis"),
    "Jackpot": JACKPOT,
    "Jackpot, expected mask": EXPECTED,
}
UNDISTILLED = {label: {**DISTILLED[label], **ALONE} for label in ("TIS", "Z-TIS", "Jackpot")}
jackpot = Study(
    groups={
        "distilled, 150 updates": rows_of(FIRST, "study", DISTILLED)
        | rows_of(
            (0,),
            "study",
            {
                "no correction": dict(objective="none"),
                "Jackpot, mask only": dict(JACKPOT, obrs_mode="mask"),
                "Jackpot, weights only": dict(JACKPOT, obrs_mode="reweight"),
            },
        ),
        "not distilled": rows_of(
            FIRST, "study", {"no correction": dict(objective="none", **ALONE), **UNDISTILLED}
        ),
        "400 updates": rows_of(
            LATER,
            "study",
            {
                "on-policy": {**ON_POLICY, **FAR},
                "Jackpot": {**JACKPOT, **FAR},
                "Jackpot, not distilled": {**JACKPOT, **ALONE, **FAR},
                "TIS, not distilled": {**DISTILLED["TIS"], **ALONE, **FAR},
                "Jackpot, distill_lambda 0.01": WEAKLY,
                "the same, KL held at 0.05": dict(WEAKLY, distill_kl_target=0.05),
            },
        ),
        "stale by 32 updates, clip 0.4/0.7": rows_of(
            TEXT,
            "study",
            {
                "no correction": dict(objective="none"),
                "Jackpot": TEXT_OBRS,
                "mask only": dict(TEXT_OBRS, obrs_mode="mask"),
                "weights only": dict(TEXT_OBRS, obrs_mode="reweight"),
            },
            rollout_batch=2048,
            **CLIPPED,
        ),
        "stale by 64": rows_of(
            TEXT,
            "study",
            {
                "PPO's clip": dict(objective="none"),
                "TIS, clip": dict(objective="tis"),
                "TIS-adjusted, no clip": dict(objective="tis_adjusted"),
                "Jackpot, no clip": TO_NEW,
            },
            rollout_batch=2048,
            **STALE,
        ),
        "stale by 128, no clip": rows_of(
            TEXT,
            "study",
            {
                "no correction": dict(objective="none", clip=False),
                "TIS-adjusted": dict(objective="tis_adjusted"),
                "Jackpot": TO_NEW,
            },
            rollout_batch=4096,
            **STALE,
        ),
    },
    columns={
        "seeds": "seeds",
        "pass@1, %": "pass",
        "best, %": "best",
        "KL(inf, ref)": "rollout_corr/k3_kl",
    },
    panels=(
        ("distilled, 150 updates", "eval/policy"),
        ("not distilled", "eval/policy"),
        ("not distilled", "distill_kl"),
        ("400 updates", "eval/policy"),
        ("stale by 64", "eval/policy"),
        ("stale by 128, no clip", "eval/policy"),
    ),
)

# ---------------------------------------------------------------------------------------------------------------------
# TIS: an engine that differs only in precision; then two bits
# ---------------------------------------------------------------------------------------------------------------------

OWN_WEIGHTS = dict(eval_engine="torch")  # pass@1 is measured with the learner's weights
VLLM = dict(rollout="vllm", **OWN_WEIGHTS)
TWO_BITS = dict(rollout_quant="w2a16")
tis = Study(
    groups={
        "an engine of the same weights, on-policy": {
            "exact zero (`--exact`)": Row(dict(ON_POLICY, exact=True), (14, 16, 17)),
            "float32": Row(ON_POLICY, (14, 16, 17)),
            "bfloat16": Row(dict(ON_POLICY, rollout_dtype="bfloat16", **OWN_WEIGHTS), (14, 16, 17)),
            "float16": Row(dict(ON_POLICY, rollout_dtype="float16", **OWN_WEIGHTS), (14, 16, 17)),
            "vLLM, bfloat16": Row({**ON_POLICY, **VLLM, "rollout_dtype": "bfloat16"}, (14, 16, 17)),
            "vLLM, fp8 cache": Row({**ON_POLICY, **VLLM, "kv_cache_dtype": "fp8"}, (15, 16, 17)),
        },
        "rollouts in two bits": {
            "float32 rollouts": Row(dict(objective="grpo"), FIRST, "lowbit"),
            "no correction": Row(dict(objective="grpo", **TWO_BITS), FIRST, "lowbit"),
            "PPO-IS": Row(dict(objective="ppo_is", **TWO_BITS), (0,), "lowbit"),
            "vanilla IS": Row(dict(objective="is", **TWO_BITS), (0,), "lowbit"),
            "TIS, C = 2": Row(dict(objective="tis", **TWO_BITS), FIRST, "lowbit"),
            "TIS, C = 8": Row(dict(objective="tis", is_cap=8, **TWO_BITS), (0,), "lowbit"),
            "Jackpot": Row(dict(JACKPOT, **TWO_BITS), (0,), "lowbit"),
        },
    },
    columns={
        "seeds": "seeds",
        "pass@1, %": "pass",
        "KL(inf, ref)": "rollout_corr/k3_kl",
        "ESS": "rollout_corr/rollout_is_eff_sample_size",
        "reward": "reward",
    },
    panels=(
        ("an engine of the same weights, on-policy", "eval/policy"),
        ("rollouts in two bits", "eval/policy"),
        ("rollouts in two bits", "reward"),
        ("rollouts in two bits", "ppo_kl"),
    ),
)

# ---------------------------------------------------------------------------------------------------------------------
# Praxis: long responses
# ---------------------------------------------------------------------------------------------------------------------

CARD = dict(temperature=0.7, top_p=0.8, top_k=20)  # the sampling settings of the model card
THREE = {
    "no correction": dict(objective="none"),
    "TIS": dict(objective="tis"),
    "Seq-TIS": dict(objective="seq_tis"),
}
RETRACE_SEQ = dict(objective="retrace_seq")
CAPPED = dict(objective="seq_tis", is_cap=1)
PREFIX = dict(objective="prefix_tis")
PAST = {
    "`retrace`": dict(objective="retrace"),
    "`prefix_tis`": PREFIX,
    "TIS": dict(objective="tis"),
    "no correction": dict(objective="none"),
    "min(R, 1)": CAPPED,
}
SEEN = dict(eval_problems=1024, eval_every=64)
HALFWAY = dict(max_tokens=96, arith="explain=64", **SEEN)
praxis = Study(
    groups={
        "T 1": rows_of(FIRST, "long", THREE)
        | rows_of(
            (0,),
            "long",
            {
                "Seq-MIS": dict(objective="seq_mis"),
                "Geo-RS": dict(objective="geo_rs", rs_low=0.9, rs_high=1.1),
            },
        ),
        "T 0.4": rows_of((0,), "long", THREE, temperature=0.4),
        "T 0.7, top-p 0.8, top-k 20": rows_of(
            (0,), "long", THREE, keep_sampling_mask="off", **CARD
        ),
        "the same, allowed tokens replayed": rows_of((0,), "long", THREE, **CARD),
        "T 1, other seeds": rows_of(LATER, "long", {**PAST, "`retrace_seq`": RETRACE_SEQ}, **SEEN),
        "up to 96 tokens": rows_of(LATER, "long", {**PAST, "on-policy": ON_POLICY}, **HALFWAY),
    },
    columns={
        "seeds": "seeds",
        "pass@1, %": "own",
        "earned, %": "own_reward",
        "tokens": "response_length",
        "KL": "rollout_corr/k3_kl",
    },
    panels=(
        ("T 1", "reward"),
        ("T 1", "response_length"),
        ("T 0.4", "reward"),
        ("T 0.7, top-p 0.8, top-k 20", "reward"),
        ("T 1, other seeds", "reward"),
        ("up to 96 tokens", "reward"),
    ),
)

# ---------------------------------------------------------------------------------------------------------------------
# QaRL: low-bit rollouts and aligned learners
# ---------------------------------------------------------------------------------------------------------------------

# thirty times the paper's band, because the higher learning rate moves the ratio s that much farther
BAND = dict(clip_low=9e-3, clip_high=1.2e-2)
TBPO = dict(objective="tbpo", **BAND, tbpo_neg_high=2.1e-2)
GRPO = dict(objective="grpo")
ALIGNED = dict(learner_quant="aligned")
BOTH = {**TWO_BITS, **ALIGNED}
ON_VLLM = dict(ON_POLICY, rollout="vllm", steps=50, eval_every=0, save_every=25)
qarl = Study(
    groups={
        "common formats": {
            "float32: GRPO": Row(GRPO, FIRST, "lowbit"),
            "float32: TBPO": Row(TBPO, (0,), "lowbit"),
            **{
                f"{x}: GRPO": Row(dict(GRPO, rollout_quant=x), (0,), "lowbit")
                for x in ("int8", "fp8", "w4a16")
            },
            **{
                f"{x}: GRPO, aligned": Row({**GRPO, **ALIGNED, "rollout_quant": x}, (0,), "lowbit")
                for x in ("int8", "fp8", "w4a16")
            },
        },
        "two bits": {
            "GRPO": Row({**GRPO, **TWO_BITS}, FIRST, "lowbit"),
            "TIS": Row(dict(objective="tis", **TWO_BITS), FIRST, "lowbit"),
            "TBPO": Row({**TBPO, **TWO_BITS}, (0,), "lowbit"),
            "GRPO, aligned": Row({**GRPO, **BOTH}, FIRST, "lowbit"),
            "TBPO, aligned": Row({**TBPO, **BOTH}, FIRST, "lowbit"),
            "TBPO, the paper's band": Row(dict(objective="tbpo", **BOTH), (0,), "lowbit"),
            "GSPO, aligned": Row(dict(objective="gspo", **BAND, **BOTH), (0,), "lowbit"),
            "positive only, aligned": Row(dict(GRPO, positive_only=True, **BOTH), (0,), "lowbit"),
            "SAPO, aligned": Row(dict(objective="sapo", **BOTH), FIRST, "lowbit"),
        },
        "vLLM, 50 updates": {
            "int8": Row(dict(ON_VLLM, rollout_quant="int8", learner_quant="none")),
            "int8, aligned": Row({**ON_VLLM, **ALIGNED, "rollout_quant": "int8"}),
            "fp8": Row(dict(ON_VLLM, rollout_quant="fp8", learner_quant="none")),
            "fp8, aligned": Row({**ON_VLLM, **ALIGNED, "rollout_quant": "fp8"}),
        },
    },
    columns={
        "seeds": "seeds",
        "pass@1, %": "pass",
        "reward of the engine": "reward",
        "mean gap of p": "rollout_corr/mean_mismatch",
    },
    panels=(
        ("two bits", "eval/policy"),
        ("two bits", "reward"),
        ("vLLM, 50 updates", "rollout_corr/mean_mismatch"),
    ),
)

# ---------------------------------------------------------------------------------------------------------------------
# Low-bit rollouts of a real model
# ---------------------------------------------------------------------------------------------------------------------

W4A16 = dict(rollout_quant="w4a16", quant_group=64)
CORRECTED = {
    "no correction": {**GRPO, **W4A16},
    "TIS": dict(objective="tis", **W4A16),
    "Jackpot, expected mask": {**EXPECTED, **W4A16},
    "`retrace_seq`": dict(objective="retrace_seq", **W4A16),
    "no correction, aligned": {**GRPO, **W4A16, "learner_quant": "aligned"},
}
real = Study(
    groups={
        "SmolLM2-135M": {"bfloat16 engine": Row(GRPO, (0,), "smollm")},
        "SmolLM2-135M, w4a16 engine": {
            label: row._replace(seeds=(0, 1)) if label in ("no correction", "TIS") else row
            for label, row in rows_of((0,), "smollm", CORRECTED).items()
        },
    },
    columns={
        "seeds": "seeds",
        "pass@1, %": "pass",
        "reward of the engine": "reward",
        "KL(inf, ref)": "rollout_corr/k3_kl",
        "ESS of responses": "rollout_corr/seq_eff_sample_size",
        "entropy": "entropy",
    },
    panels=(
        ("SmolLM2-135M, w4a16 engine", "reward"),
        ("SmolLM2-135M, w4a16 engine", "rollout_corr/k3_kl"),
    ),
    share=0.2,
)

# ---------------------------------------------------------------------------------------------------------------------
# HeteroRL: delayed samplers
# ---------------------------------------------------------------------------------------------------------------------

INF = dict(ratio_base="inf")
METHODS = {
    "GRPO": dict(GRPO, **INF),
    "GSPO": dict(objective="gspo", **INF),
    "GEPO": dict(objective="gepo"),
}
NARROW = dict(clip_low=0.01, clip_high=0.01)
heterorl = Study(
    groups={
        "no delay": rows_of((0,), "delay", METHODS, max_staleness=0, cppo_beta=0.0),
        "at most 8 updates": rows_of(FIRST, "delay", METHODS, max_staleness=8),
        "at most 64": rows_of(FIRST, "delay", METHODS, max_staleness=64)
        | rows_of(
            (0,),
            "delay",
            {
                "no correction": GRPO,
                "GRPO, no clip": dict(GRPO, **INF, clip=False),
                "TIS": dict(objective="tis"),
                "V-trace's cap of 1": dict(objective="tis", is_cap=1),
                "Jackpot to new": dict(JACKPOT, obrs_target="new"),
                "GSPO, clip 0.01": dict(objective="gspo", **INF, **NARROW),
                "GEPO, clip 0.01": dict(objective="gepo", **NARROW),
            },
            max_staleness=64,
        ),
        "at most 64, other seeds": rows_of(
            LATER,
            "delay",
            {
                "GRPO": METHODS["GRPO"],
                "GEPO": METHODS["GEPO"],
                "`retrace_seq`": RETRACE_SEQ,
                "min(R, 1)": CAPPED,
            },
            max_staleness=64,
        ),
    },
    columns={
        "seeds": "seeds",
        "pass@1, %": "pass",
        "best, %": "best",
        "KL(inf, ref)": "rollout_corr/k3_kl",
        "weight's variance": "weight_var",
    },
    panels=(
        ("at most 8 updates", "eval/policy"),
        ("at most 64", "eval/policy"),
        ("at most 64", "rollout_corr/k3_kl"),
    ),
    share=0.5,
)

# ---------------------------------------------------------------------------------------------------------------------
# Worth: measured before training, and compared with training
# ---------------------------------------------------------------------------------------------------------------------

OURS = {
    "`retrace_seq`": RETRACE_SEQ,
    "min(R, 1)": CAPPED,
    "min(R_t, 1)": PREFIX,
    "TIS": dict(objective="tis"),
    "Jackpot": JACKPOT,
}
PAIR = {label: OURS[label] for label in ("`retrace_seq`", "TIS")}
LONG = {label: {**OURS[label], **FAR} for label in ("`retrace_seq`", "min(R, 1)", "TIS")}
TO_P_NEW = dict(correction_target="new", ratio_base="new")
worth = Study(
    groups={
        "distilled, 150 updates": rows_of(
            LATER, "study", {**OURS, "`spare`": dict(objective="spare"), "on-policy": ON_POLICY}
        ),
        "not distilled": rows_of(
            LATER, "study", {**OURS, "no correction": dict(objective="none")}, **ALONE
        ),
        "an actor of 20 %": rows_of(LATER, "study", PAIR, actor="base:actor@0.2"),
        "an actor of 10 %": rows_of(LATER, "study", PAIR, actor="base:actor@0.1"),
        "two bits": rows_of(
            LATER,
            "lowbit",
            {x: OURS[x] for x in ("`retrace_seq`", "min(R, 1)", "TIS")},
            rollout_quant="w2a16",
        ),
        "400 updates, not distilled": rows_of(LATER, "study", LONG, **ALONE)
        | rows_of(LATER, "study", {"on-policy": {**ON_POLICY, **FAR}}),
        "400 updates, distilled": rows_of(LATER, "study", LONG),
        "stale by 128 updates": rows_of(
            LATER,
            "study",
            {
                "`retrace_seq` of p_new / p_inf": {**RETRACE_SEQ, **TO_P_NEW},
                "min(R, 1) of p_new / p_inf": {**CAPPED, **TO_P_NEW},
                "PPO's clip": dict(objective="none"),
            },
            rollout_batch=4096,
            **STALE,
        ),
    },
    columns={
        "seeds": "seeds",
        "worth": "worth",
        "pass@1, %": "pass",
        "KL(inf, ref)": "rollout_corr/k3_kl",
    },
    panels=(("400 updates, not distilled", "eval/policy"),),
)

STUDIES = {
    "jackpot": jackpot,
    "tis": tis,
    "praxis": praxis,
    "qarl": qarl,
    "real": real,
    "heterorl": heterorl,
    "worth": worth,
}
