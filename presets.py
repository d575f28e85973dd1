"""Presets: the flag values of every --objective.

`--objective` fills the flags that neither the command line nor a file sets (machinery/settings.py).
Presets in FRAMEWORKS have their framework's weight, masks and surrogate; clip, reduction and
advantage are this repository's defaults unless the row sets them. `python objectives.py` prints all
presets."""

from __future__ import annotations

import math

PER_RESPONSE = "seq-mean-token-mean"
DEFAULTS = {"ratio_base": "ref", "reduction": "token-mean", "obrs_target": "ref"}
DEFAULTS |= {"advantage": "grpo", "reject": "none", "reject_of": "all"}
DEFAULTS |= {"correction_target": "ref", "cppo_beta": 0.0, "cppo_kl": "official"}
DR_GRPO = {"advantage": "grpo_no_std", "reduction": "seq-mean-token-sum-norm"}


def preset(correction: str = "none", surrogate: str = "ppo", **more) -> dict:
    """Correction and surrogate, and the flags that differ from the defaults."""
    return {"correction": correction, "surrogate": surrogate, **more}


def band(reject: str, low: float, high: float = math.inf) -> dict:
    """A rejection with its bounds."""
    return {"reject": reject, "rs_low": low, "rs_high": high}


NAMED_AFTER_CORRECTION = (
    "is tis icepop kpop areal_drop z_tis seq_is seq_tis seq_mis prefix_tis "
    "retrace retrace_seq geo_rs geo_rs_seq_tis"
)
PAPERS = {
    "none": preset(),  # the mismatch is ignored
    "grpo": preset(),  # the same; clip and token mean are DAPO's
    "reinforce": preset(surrogate="reinforce"),
    **{name: preset(name) for name in NAMED_AFTER_CORRECTION.split()},
    # ours (results/worth.md): retrace_seq that also drops tokens with A < 0 and r < 0.9. Similar:
    # PPO's clip on p_new / p_inf, and DeepSeek-V3.2's mask of whole responses with A < 0 by their
    # mean log-ratio
    "spare": preset("retrace_seq", reject_of="negative", **band("token", 0.9)),
    # as in AReaL: the paper has no PPO clip, and its mask is that of p_new / p_inf
    "m2po": preset("is", reject="token_m2"),
    "mis_gspo": preset("seq_mis", "gspo", reduction=PER_RESPONSE),
    "ppo_is": preset(ratio_base="inf"),
    "tis_adjusted": preset("tis", ratio_base="new", correction_target="new"),
    "jackpot": preset("obrs"),
    "jackpot_adjusted": preset("obrs", ratio_base="new", obrs_target="new"),
    "gspo": preset(surrogate="gspo", reduction=PER_RESPONSE),
    "gepo": preset(
        surrogate="gspo",
        ratio_base="group",
        reduction=PER_RESPONSE,
        advantage="grpo_no_std",
        clip_low=0.2,
        clip_high=0.2,
    ),
    "tbpo": preset("tbpo_mismatch", "tbpo", reduction=PER_RESPONSE),
    "sapo": preset(surrogate="sapo", reduction=PER_RESPONSE),  # SAPO Eq. 1
    "cispo": preset(surrogate="cispo"),
    "gmpo": preset(surrogate="gmpo", reduction=PER_RESPONSE),
    "dppo_tv": preset(surrogate="dppo_tv", ratio_base="inf"),
    "dppo_kl": preset(surrogate="dppo_kl", ratio_base="inf"),
    "drpo": preset(surrogate="drpo", ratio_base="inf", **DR_GRPO),
    "trm": preset(reject="seq_max_kl"),
    "vespo": preset("vespo", "reinforce", correction_target="new"),
    # DeepSeek-V3.2, Eq. 9 as TRL cites it: a response is dropped if A < 0 and mean log(p_inf /
    # p_new) > delta = 1e-4
    "opsm": {
        **preset(correction_target="new", reject_of="negative"),
        **band("geo", math.exp(-1e-4)),
    },
}

# verl's RolloutCorrectionConfig. In its bypass mode there is no ref: ratios are p_new / p_inf
GEO = band("geo", 0.999, 1.001)
K3 = {"reject": "seq_mean_k3", "rs_high": 0.01}
TOKEN = preset("tis", is_cap=2.0)
SEQUENCE = preset("seq_tis", is_cap=2.0)
POP = {"correction": "icepop", "rs_low": 0.5, "rs_high": 5.0}
CLIPPED = preset(ratio_base="inf", correction_target="new")
BYPASS = {"surrogate": "reinforce", "correction_target": "new"}
VERL = {
    "decoupled_token_is": TOKEN,
    "decoupled_seq_is": SEQUENCE,
    "decoupled_token_icepop": {**POP, "surrogate": "ppo"},
    "decoupled_seq_is_rs": {**SEQUENCE, **band("sequence", 0.5, 2.0)},
    "decoupled_geo_rs": preset(**GEO),
    "decoupled_geo_rs_seq_tis": {**SEQUENCE, **GEO},
    "decoupled_geo_rs_token_tis": {**TOKEN, **GEO},
    "decoupled_k3_rs": preset(**K3),
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
    "token_truncate": preset("tis", is_cap=3.0),
    "token_mask": preset("areal_drop", is_cap=3.0),
    "sequence_truncate": preset("seq_tis", is_cap=3.0),
    "sequence_mask": preset("seq_mis", rs_high=3.0),
    "dr_grpo": preset(**DR_GRPO),
    "dapo": preset(reduction="token-mean", clip_high=0.28),
}
SKYRL = {
    "skyrl_geo_mask": preset("geo_rs", rs_low=0.99, rs_high=1.01),
    "skyrl_product_mask": preset(**band("sequence", 0.5, 2.0)),
    "skyrl_token_mask": preset(**band("token", 0.5, 2.0)),
    "skyrl_outlier_mask": preset(reject="seq_max:0:100,seq_min:1e-4:inf"),
}
# prime-rl's second loss (not here) bounds both directions at 0.1, for both signs of A
PRIME = {"advantage": "grpo_no_std", "cppo_beta": 0.002, "cppo_kl": "k2"}
PRIME_RL = {"prime_rl": {**PAPERS["dppo_tv"], **PRIME}}
# slime's --use-tis, and its icepop_function with the same bounds, 0 and --tis-clip=2
SLIME_LOSS = dict(is_cap=2.0, clip_high=0.2, reduction=PER_RESPONSE)
SLIME = {
    "slime_tis": preset("tis", **SLIME_LOSS),
    "slime_icepop": preset("areal_drop", **SLIME_LOSS),
}
# AReaL's use_decoupled_loss with its default rejection_sampling: metric ratio, level token, action
# mask. Without rejection_sampling its weight is 1
AREAL = {"areal_token_mask": preset("areal_drop", is_cap=5.0, clip_high=0.2)}
OTHERS = {"seq_mask_tis": preset("is", **band("geo", 0.5, 5.0))}
FRAMEWORKS = {"verl": VERL, "TRL": TRL, "SkyRL": SKYRL, "prime-rl": PRIME_RL}
FRAMEWORKS |= {"slime": SLIME, "AReaL": AREAL, "OpenRLHF, NeMo-RL": OTHERS}
OBJECTIVES = {**PAPERS, **VERL, **TRL, **SKYRL, **PRIME_RL, **SLIME, **AREAL, **OTHERS}


# objective -> NAME: configs/papers/NAME.toml has the complete settings of the objective's paper
RECIPES = {
    "jackpot": "jackpot",
    "tis": "tis_dapo",
    **dict.fromkeys(("seq_tis", "geo_rs", "geo_rs_seq_tis", "seq_mis"), "praxis"),
    **dict.fromkeys(("grpo", "gspo", "gepo"), "heterorl"),
    **dict.fromkeys(("tbpo", "mis_gspo", "sapo"), "qarl"),
    **dict.fromkeys(("tis_adjusted", "jackpot_adjusted"), "jackpot_stale"),
}


def called(cfg: dict) -> str:
    """Name of a run: its preset, and the axes that differ from it. cfg: all flags, by name."""
    defaults = {**DEFAULTS, **OBJECTIVES[cfg["objective"]]}
    axes = [
        f"{axis}={cfg[axis]}"
        for axis in ("correction", "surrogate", "ratio_base")
        if cfg[axis] != defaults[axis]
    ]
    return ", ".join([cfg["objective"], *axes])
