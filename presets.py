"""Presets: the flag values of every --objective.

`--objective` fills the flags that neither the command line nor a file sets (machinery/settings.py).
Presets in FRAMEWORKS have their framework's weight, masks and surrogate; clip, reduction and
advantage are this repository's defaults unless the row sets them. `python objectives.py` prints all
presets."""

from __future__ import annotations

import math

PER_RESPONSE = "seq-mean-token-mean"
DEFAULTS = {"ratio_base": "ref", "reduction": "token-mean", "obrs_target": "ref"}
DEFAULTS |= {
    "advantage": "grpo",
    "reject": "none",
    "reject_of": "all",
    "correction_target": "ref",
}
DEFAULTS |= {"cppo_beta": 0.0, "cppo_kl": "official"}
DR_GRPO = {"advantage": "grpo_no_std", "reduction": "seq-mean-token-sum-norm"}


def with_ppo(*corrections: str) -> dict[str, dict]:
    """One preset per correction, of the same name, with the surrogate ppo."""
    return {name: {"correction": name, "surrogate": "ppo"} for name in corrections}


PAPERS = {
    **with_ppo("none"),  # the mismatch is ignored
    # the same; clip and token mean are DAPO's
    "grpo": {"correction": "none", "surrogate": "ppo"},
    "reinforce": {"correction": "none", "surrogate": "reinforce"},
    **with_ppo(
        "is", "tis", "icepop", "kpop", "areal_drop", "z_tis", "seq_is", "seq_tis"
    ),
    **with_ppo("prefix_tis", "retrace", "retrace_seq"),
    # ours (results/worth.md): retrace_seq that also drops tokens with A < 0 and r < 0.9. Similar:
    # PPO's clip on p_new / p_inf, and DeepSeek-V3.2's mask of whole responses with A < 0 by their
    # mean log-ratio
    "spare": {
        **{"correction": "retrace_seq", "surrogate": "ppo", "reject": "token"},
        **{"reject_of": "negative", "rs_low": 0.9, "rs_high": math.inf},
    },
    # as in AReaL: the paper has no PPO clip, and its mask is that of p_new / p_inf
    "m2po": {"correction": "is", "surrogate": "ppo", "reject": "token_m2"},
    "seq_mis": {"correction": "seq_mis", "surrogate": "ppo"},
    "mis_gspo": {
        "correction": "seq_mis",
        "surrogate": "gspo",
        "reduction": PER_RESPONSE,
    },
    **with_ppo("geo_rs", "geo_rs_seq_tis"),
    "ppo_is": {"correction": "none", "surrogate": "ppo", "ratio_base": "inf"},
    "tis_adjusted": dict(
        correction="tis", surrogate="ppo", ratio_base="new", correction_target="new"
    ),
    "jackpot": {"correction": "obrs", "surrogate": "ppo"},
    "jackpot_adjusted": dict(
        correction="obrs", surrogate="ppo", ratio_base="new", obrs_target="new"
    ),
    "gspo": {"correction": "none", "surrogate": "gspo", "reduction": PER_RESPONSE},
    "gepo": {
        **{"correction": "none", "surrogate": "gspo", "ratio_base": "group"},
        **{
            "reduction": PER_RESPONSE,
            "advantage": "grpo_no_std",
            "clip_low": 0.2,
            "clip_high": 0.2,
        },
    },
    "tbpo": {
        "correction": "tbpo_mismatch",
        "surrogate": "tbpo",
        "reduction": PER_RESPONSE,
    },
    # SAPO Eq. 1
    "sapo": {"correction": "none", "surrogate": "sapo", "reduction": PER_RESPONSE},
    "cispo": {"correction": "none", "surrogate": "cispo"},
    "gmpo": {"correction": "none", "surrogate": "gmpo", "reduction": PER_RESPONSE},
    "dppo_tv": {"correction": "none", "surrogate": "dppo_tv", "ratio_base": "inf"},
    "dppo_kl": {"correction": "none", "surrogate": "dppo_kl", "ratio_base": "inf"},
    "drpo": {"correction": "none", "surrogate": "drpo", "ratio_base": "inf", **DR_GRPO},
    "trm": {"correction": "none", "surrogate": "ppo", "reject": "seq_max_kl"},
    "vespo": {
        "correction": "vespo",
        "surrogate": "reinforce",
        "correction_target": "new",
    },
    # DeepSeek-V3.2, Eq. 9 as TRL cites it: a response is dropped if A < 0 and mean log(p_inf /
    # p_new) > delta = 1e-4
    "opsm": {
        **{
            "correction": "none",
            "surrogate": "ppo",
            "correction_target": "new",
            "reject": "geo",
        },
        **{"reject_of": "negative", "rs_low": math.exp(-1e-4), "rs_high": math.inf},
    },
}

# verl's RolloutCorrectionConfig. In its bypass mode there is no ref: ratios are p_new / p_inf
GEO = {"reject": "geo", "rs_low": 0.999, "rs_high": 1.001}
K3 = {"reject": "seq_mean_k3", "rs_high": 0.01}
TOKEN = {"correction": "tis", "surrogate": "ppo", "is_cap": 2.0}
SEQUENCE = {"correction": "seq_tis", "surrogate": "ppo", "is_cap": 2.0}
POP = {"correction": "icepop", "rs_low": 0.5, "rs_high": 5.0}
CLIPPED = {**PAPERS["ppo_is"], "correction_target": "new"}
BYPASS = {"surrogate": "reinforce", "correction_target": "new"}
VERL = {
    "decoupled_token_is": TOKEN,
    "decoupled_seq_is": SEQUENCE,
    "decoupled_token_icepop": {**POP, "surrogate": "ppo"},
    "decoupled_seq_is_rs": {
        **SEQUENCE,
        "reject": "sequence",
        "rs_low": 0.5,
        "rs_high": 2.0,
    },
    "decoupled_geo_rs": {"correction": "none", "surrogate": "ppo", **GEO},
    "decoupled_geo_rs_seq_tis": {**SEQUENCE, **GEO},
    "decoupled_geo_rs_token_tis": {**TOKEN, **GEO},
    "decoupled_k3_rs": {"correction": "none", "surrogate": "ppo", **K3},
    "decoupled_k3_rs_seq_tis": {**SEQUENCE, **K3},
    "decoupled_k3_rs_token_tis": {**TOKEN, **K3},
    "bypass_ppo_clip": PAPERS["ppo_is"],
    "bypass_ppo_clip_geo_rs": {**CLIPPED, **GEO},
    "bypass_ppo_clip_k3_rs": {**CLIPPED, **K3},
    "bypass_pg_is": {**SEQUENCE, **BYPASS},
    "bypass_pg_token_icepop": {**POP, **BYPASS},
    "bypass_pg_geo_rs": {"correction": "none", **GEO, **BYPASS},
    "bypass_pg_geo_rs_seq_tis": {**SEQUENCE, **GEO, **BYPASS},
    "bypass_pg_geo_rs_token_tis": {**TOKEN, **GEO, **BYPASS},
    "disabled": PAPERS["none"],
}
TRL = {
    "token_truncate": {"correction": "tis", "surrogate": "ppo", "is_cap": 3.0},
    "token_mask": {"correction": "areal_drop", "surrogate": "ppo", "is_cap": 3.0},
    "sequence_truncate": {"correction": "seq_tis", "surrogate": "ppo", "is_cap": 3.0},
    "sequence_mask": {"correction": "seq_mis", "surrogate": "ppo", "rs_high": 3.0},
    "dr_grpo": {**PAPERS["grpo"], **DR_GRPO},
    "dapo": {**PAPERS["grpo"], "reduction": "token-mean", "clip_high": 0.28},
}
SKYRL = {
    "skyrl_geo_mask": {
        "correction": "geo_rs",
        "surrogate": "ppo",
        "rs_low": 0.99,
        "rs_high": 1.01,
    },
    "skyrl_product_mask": {
        **PAPERS["none"],
        "reject": "sequence",
        "rs_low": 0.5,
        "rs_high": 2.0,
    },
    "skyrl_token_mask": {
        **PAPERS["none"],
        "reject": "token",
        "rs_low": 0.5,
        "rs_high": 2.0,
    },
    "skyrl_outlier_mask": {
        **PAPERS["none"],
        "reject": "seq_max:0:100,seq_min:1e-4:inf",
    },
}
# prime-rl's second loss (not here) bounds both directions at 0.1, for both signs of A
PRIME = {"advantage": "grpo_no_std", "cppo_beta": 0.002, "cppo_kl": "k2"}
PRIME_RL = {"prime_rl": {**PAPERS["dppo_tv"], **PRIME}}
# slime's --use-tis, and its icepop_function with the same bounds, 0 and --tis-clip=2
SLIME_LOSS = {
    "surrogate": "ppo",
    "is_cap": 2.0,
    "clip_high": 0.2,
    "reduction": PER_RESPONSE,
}
SLIME = {
    "slime_tis": {"correction": "tis", **SLIME_LOSS},
    "slime_icepop": {"correction": "areal_drop", **SLIME_LOSS},
}
# AReaL's use_decoupled_loss with its default rejection_sampling: metric ratio, level token, action
# mask. Without rejection_sampling its weight is 1
AREAL = {"areal_token_mask": {**PAPERS["areal_drop"], "is_cap": 5.0, "clip_high": 0.2}}
OTHERS = {
    "seq_mask_tis": {**PAPERS["is"], "reject": "geo", "rs_low": 0.5, "rs_high": 5.0}
}
FRAMEWORKS = {
    "verl": VERL,
    "TRL": TRL,
    "SkyRL": SKYRL,
    "prime-rl": PRIME_RL,
    "slime": SLIME,
}
FRAMEWORKS |= {"AReaL": AREAL, "OpenRLHF, NeMo-RL": OTHERS}
OBJECTIVES = {**PAPERS, **VERL, **TRL, **SKYRL, **PRIME_RL, **SLIME, **AREAL, **OTHERS}


# objective -> NAME: configs/papers/NAME.toml has the complete settings of the objective's paper
RECIPES = {"jackpot": "jackpot", "tis": "tis_dapo", "gepo": "heterorl", "tbpo": "qarl"}
RECIPES |= dict.fromkeys(("seq_tis", "geo_rs", "geo_rs_seq_tis", "seq_mis"), "praxis")
RECIPES |= dict.fromkeys(("grpo", "gspo"), "heterorl") | dict.fromkeys(
    ("mis_gspo", "sapo"), "qarl"
)
RECIPES |= dict.fromkeys(("tis_adjusted", "jackpot_adjusted"), "jackpot_stale")


def called(cfg: dict) -> str:
    """Name of a run: its preset, and the axes that differ from it. cfg: all flags, by name."""
    preset = {**DEFAULTS, **OBJECTIVES[cfg["objective"]]}
    axes = [
        f"{axis}={cfg[axis]}"
        for axis in ("correction", "surrogate", "ratio_base")
        if cfg[axis] != preset[axis]
    ]
    return ", ".join([cfg["objective"], *axes])
