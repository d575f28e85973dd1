"""Presets: every named objective as its axes, which flags a run reads, and the catalogue of what the names mean.

`--objective` fills the axes that neither the command line nor a file names (config.resolve). A name of another
framework stands for that framework's weight, masks and surrogate; PPO's clip is ours unless its row names one.
`python objectives.py` prints all of it.
"""

from __future__ import annotations

import math
import sys
import textwrap
from typing import NamedTuple

import corrections
from flags import from_environment, need

# ---------------------------------------------------------------------------------------------------------------------
# Objectives: presets over the axes
# ---------------------------------------------------------------------------------------------------------------------

DEFAULTS = {"ratio_base": "ref", "reduction": "token-mean", "obrs_target": "ref", "advantage": "grpo"}
DEFAULTS |= {"reject": "none", "reject_of": "all", "correction_target": "ref", "veto": 0.0}
DEFAULTS |= {"cppo_beta": 0.0, "cppo_kl": "official"}
PAPERS = {
    "none": {"correction": "none", "surrogate": "ppo"},  # the mismatch is ignored
    "grpo": {"correction": "none", "surrogate": "ppo"},  # the same by its usual name; clip and token mean are DAPO's
    "reinforce": {"correction": "none", "surrogate": "reinforce"},
    "is": {"correction": "is", "surrogate": "ppo"},
    "tis": {"correction": "tis", "surrogate": "ppo"},
    "icepop": {"correction": "icepop", "surrogate": "ppo"},
    "areal_drop": {"correction": "areal_drop", "surrogate": "ppo"},
    "z_tis": {"correction": "z_tis", "surrogate": "ppo"},
    "seq_is": {"correction": "seq_is", "surrogate": "ppo"},
    "seq_tis": {"correction": "seq_tis", "surrogate": "ppo"},
    "prefix_tis": {"correction": "prefix_tis", "surrogate": "ppo"},
    "retrace": {"correction": "retrace", "surrogate": "ppo"},
    "retrace_seq": {"correction": "retrace_seq", "surrogate": "ppo"},
    # ours (results/search.md): retrace_seq that also drops tokens of A < 0 with r < 0.9. PPO's clip does the like to
    # p_new / p_inf, and DeepSeek-V3.2 masks whole responses of negative advantage by their mean log-ratio
    "spare": dict(
        correction="retrace_seq", surrogate="ppo", reject="token", reject_of="negative", rs_low=0.9, rs_high=math.inf
    ),
    "seq_mis": {"correction": "seq_mis", "surrogate": "ppo"},
    "mis_gspo": {"correction": "seq_mis", "surrogate": "gspo", "reduction": "seq-mean-token-mean"},
    "geo_rs": {"correction": "geo_rs", "surrogate": "ppo"},
    "geo_rs_seq_tis": {"correction": "geo_rs_seq_tis", "surrogate": "ppo"},
    "ppo_is": {"correction": "none", "surrogate": "ppo", "ratio_base": "inf"},
    "tis_adjusted": {"correction": "tis_adjusted", "surrogate": "ppo", "ratio_base": "new"},
    "jackpot": {"correction": "obrs", "surrogate": "ppo"},
    "jackpot_adjusted": dict(correction="jackpot_adjusted", surrogate="ppo", ratio_base="new", obrs_target="new"),
    "gspo": {"correction": "none", "surrogate": "gspo", "reduction": "seq-mean-token-mean"},
    "gepo": {
        **{"correction": "none", "surrogate": "gspo", "ratio_base": "group", "reduction": "seq-mean-token-mean"},
        **{"advantage": "grpo_no_std", "clip_low": 0.2, "clip_high": 0.2},
    },
    "tbpo": {"correction": "tbpo_mismatch", "surrogate": "tbpo", "reduction": "seq-mean-token-mean"},
    "sapo": {"correction": "none", "surrogate": "sapo", "reduction": "seq-mean-token-mean"},  # its Eq. 1
    "cispo": {"correction": "none", "surrogate": "cispo"},
    "gmpo": {"correction": "none", "surrogate": "gmpo", "reduction": "seq-mean-token-mean"},
    "dppo_tv": {"correction": "none", "surrogate": "dppo_tv", "ratio_base": "inf"},
    "dppo_kl": {"correction": "none", "surrogate": "dppo_kl", "ratio_base": "inf"},
    "vespo": {"correction": "vespo", "surrogate": "reinforce", "correction_target": "new"},
    # DeepSeek-V3.2, Eq. 9 as TRL cites it: a response is dropped where A < 0 and mean log(p_inf / p_new) > delta
    "opsm": {
        **{"correction": "none", "surrogate": "ppo", "correction_target": "new"},
        **{"reject": "geo", "reject_of": "negative", "rs_low": math.exp(-1e-4), "rs_high": math.inf},
    },
}

# verl's RolloutCorrectionConfig. Its bypass mode has no ref: weights and statistics are of p_new / p_inf
GEO = {"reject": "geo", "rs_low": 0.999, "rs_high": 1.001}
K3 = {"reject": "seq_mean_k3", "rs_high": 0.01}
TOKEN = {"correction": "tis", "surrogate": "ppo", "is_cap": 2.0}
SEQUENCE = {"correction": "seq_tis", "surrogate": "ppo", "is_cap": 2.0}
POP = {"correction": "icepop", "rs_low": 0.5, "rs_high": 5.0}
CLIPPED = {"correction": "none", "surrogate": "ppo", "ratio_base": "inf", "correction_target": "new"}
BYPASS = {"surrogate": "reinforce", "correction_target": "new"}
VERL = {
    "decoupled_token_is": TOKEN,
    "decoupled_seq_is": SEQUENCE,
    "decoupled_token_icepop": {**POP, "surrogate": "ppo"},
    "decoupled_seq_is_rs": {**SEQUENCE, "reject": "sequence", "rs_low": 0.5, "rs_high": 2.0},
    "decoupled_geo_rs": {"correction": "none", "surrogate": "ppo", **GEO},
    "decoupled_geo_rs_seq_tis": {**SEQUENCE, **GEO},
    "decoupled_geo_rs_token_tis": {**TOKEN, **GEO},
    "decoupled_k3_rs": {"correction": "none", "surrogate": "ppo", **K3},
    "decoupled_k3_rs_seq_tis": {**SEQUENCE, **K3},
    "decoupled_k3_rs_token_tis": {**TOKEN, **K3},
    "bypass_ppo_clip": {"correction": "none", "surrogate": "ppo", "ratio_base": "inf"},
    "bypass_ppo_clip_geo_rs": {**CLIPPED, **GEO},
    "bypass_ppo_clip_k3_rs": {**CLIPPED, **K3},
    "bypass_pg_is": {**SEQUENCE, **BYPASS},
    "bypass_pg_token_icepop": {**POP, **BYPASS},
    "bypass_pg_geo_rs": {"correction": "none", **GEO, **BYPASS},
    "bypass_pg_geo_rs_seq_tis": {**SEQUENCE, **GEO, **BYPASS},
    "bypass_pg_geo_rs_token_tis": {**TOKEN, **GEO, **BYPASS},
    "disabled": {"correction": "none", "surrogate": "ppo"},
}
TRL = {
    "token_truncate": {"correction": "tis", "surrogate": "ppo", "is_cap": 3.0},
    "token_mask": {"correction": "areal_drop", "surrogate": "ppo", "is_cap": 3.0},
    "sequence_truncate": {"correction": "seq_tis", "surrogate": "ppo", "is_cap": 3.0},
    "sequence_mask": {"correction": "seq_mis", "surrogate": "ppo", "rs_high": 3.0},
    "dr_grpo": {**PAPERS["grpo"], "advantage": "grpo_no_std", "reduction": "seq-mean-token-sum-norm"},
    "dapo": {**PAPERS["grpo"], "reduction": "token-mean", "clip_high": 0.28},
}
SKYRL = {
    "skyrl_geo_mask": {"correction": "geo_rs", "surrogate": "ppo", "rs_low": 0.99, "rs_high": 1.01},
    "skyrl_product_mask": {**PAPERS["none"], "reject": "sequence", "rs_low": 0.5, "rs_high": 2.0},
    "skyrl_token_mask": {**PAPERS["none"], "reject": "token", "rs_low": 0.5, "rs_high": 2.0},
    "skyrl_outlier_mask": {**PAPERS["none"], "reject": "seq_max", "rs_low": 0.0, "rs_high": 100.0, "veto": 1e-4},
}
# prime-rl's other loss bounds both directions at 0.1, for either sign of A
PRIME_RL = {"prime_rl": {**PAPERS["dppo_tv"], "advantage": "grpo_no_std", "cppo_beta": 0.002, "cppo_kl": "k2"}}
# slime's --use-tis, and its icepop_function under the same bounds, 0 and --tis-clip=2
SLIME_LOSS = {"surrogate": "ppo", "is_cap": 2.0, "clip_high": 0.2, "reduction": "seq-mean-token-mean"}
SLIME = {
    "slime_tis": {"correction": "tis", **SLIME_LOSS},
    "slime_icepop": {"correction": "areal_drop", **SLIME_LOSS},
}
# AReaL's use_decoupled_loss; and with its rejection_sampling as it stands: metric ratio, level token, action mask
AREAL = {
    "areal_decoupled": {"correction": "is", "surrogate": "ppo", "clip_high": 0.2},
    "areal_token_mask": {"correction": "areal_drop", "surrogate": "ppo", "is_cap": 5.0, "clip_high": 0.2},
}
OTHERS = {"seq_mask_tis": {**PAPERS["is"], "reject": "geo", "rs_low": 0.5, "rs_high": 5.0}}
FRAMEWORKS = {"verl": VERL, "TRL": TRL, "SkyRL": SKYRL, "prime-rl": PRIME_RL, "slime": SLIME, "AReaL": AREAL}
FRAMEWORKS |= {"OpenRLHF, NeMo-RL": OTHERS}
OBJECTIVES = {**PAPERS, **VERL, **TRL, **SKYRL, **PRIME_RL, **SLIME, **AREAL, **OTHERS}


# what a run must have for some flags to matter -> whether it has it, and those flags. Where what is missing would be a
# contradiction, and not only of no use, the concept's own check refuses it
READ_WITH = {
    "a --correction that uses Z (obrs, jackpot_adjusted, z_tis)": (
        lambda cfg: cfg.correction in corrections.USES_Z,
        ("obrs_lambda", "obrs_accept_rate", "obrs_c1", "obrs_topk", "obrs_z", "obrs_target", "kappa"),
    ),
    "--correction=obrs or jackpot_adjusted": (
        lambda cfg: cfg.correction in ("obrs", "jackpot_adjusted"),
        ("obrs_c2", "obrs_mask", "obrs_mode"),
    ),
    "--correction=tbpo_mismatch": (
        lambda cfg: "tbpo_mismatch" in (cfg.correction, cfg.actor_correction),
        ("tbpo_cap",),
    ),
    "--correction=auto, --is_cap=auto or --distill_worth_target": (corrections.is_probed, ("auto_every",)),
    "--surrogate=tbpo": (lambda cfg: cfg.surrogate == "tbpo", ("tbpo_neg_high",)),
    "--ratio_base=group": (lambda cfg: cfg.ratio_base == "group", ("gepo_expectation",)),
    "--cppo_beta": (lambda cfg: cfg.cppo_beta > 0, ("cppo_kl",)),
    "--kl_coef": (lambda cfg: cfg.kl_coef > 0, ("kl_in", "kl_estimator")),
    "--guard": (lambda cfg: cfg.guard != "off", ("guard_kl",)),
    "--lora_rank": (lambda cfg: cfg.lora_rank > 0, ("lora_alpha", "lora_on", "lora_save")),
    "an --actor": (
        lambda cfg: cfg.actor != "none",
        ("actor_correction", "actor_is_cap", "actor_lr", "distill_lambda", "distill_direction", "distill_topk"),
    ),
    "--distill_kl_target or --distill_worth_target": (
        lambda cfg: cfg.distill_kl_target > 0 or cfg.distill_worth_target > 0,
        ("distill_gain", "distill_lambda_max"),
    ),
}


def unread(given, cfg) -> list[str]:
    """A sentence for each group of the given flags that this run does not read. given: names; cfg: all flags."""
    said = []
    for what, (has, names) in READ_WITH.items():
        idle = [f"--{name}" for name in names if name in given]
        if idle and not has(cfg):
            said.append(f"{', '.join(idle)}: of no use in this run, which is without {what}")
    return said


def note_unread(given, cfg) -> None:
    """The same on the screen, from the first rank."""
    for idle in unread(given, cfg) if from_environment("RANK", 0) == 0 else []:
        print(f"note: {idle}", file=sys.stderr)


def called(cfg: dict) -> str:
    """What a run is called: its preset, and the axes that are not the preset's. cfg: all its flags, by name."""
    preset = {**DEFAULTS, **OBJECTIVES[cfg["objective"]]}
    own = [f"{axis}={cfg[axis]}" for axis in ("correction", "surrogate", "ratio_base") if cfg[axis] != preset[axis]]
    return ", ".join([cfg["objective"], *own])


# ---------------------------------------------------------------------------------------------------------------------
# The catalogue
# ---------------------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """What a name stands for: `python objectives.py` prints it."""

    formula: str
    users: str  # papers, and frameworks in which this form was seen
    needs: str = ""  # beside log p_inf of the sampled tokens, which all need
    costs: str = ""


WHOLE = "the response to its end"
LENGTH = "variance grows with T x KL"
TOP_K = "the engine's top-K, but where Z is exact"
OF_Z = "a ref pass, but where Z is exact"

ABOUT_CORRECTIONS = {
    "none": Entry("1", "GRPO, PPO", "p_inf = p_ref", "bias of the whole mismatch"),
    "is": Entry("r", "AReaL", "", "variance: r is unbounded"),
    "tis": Entry("min(r, C)", "TIS; verl, TRL, slime, SkyRL, OpenRLHF, NeMo-RL", "", "bias above C"),
    "tis_adjusted": Entry("min(p_new / p_inf, C)", "Jackpot 10.1", "ratio_base new", "PPO's clip, which never acts"),
    "icepop": Entry(
        "r; drops r outside [low, high]", "IcePop; verl, slime, SkyRL, OpenRLHF, NeMo-RL", "", "the dropped tokens"
    ),
    "areal_drop": Entry("r; drops r > C", "AReaL; TRL token_mask", "", "the dropped tokens"),
    "seq_is": Entry("R", "Praxis", WHOLE, LENGTH),
    "seq_tis": Entry("min(R, C)", "Praxis; verl, TRL, slime, SkyRL", WHOLE, f"{LENGTH}, up to C"),
    "prefix_tis": Entry("min(R_t, C)", "per-decision IS; CTPO", "", "bias of what follows a token"),
    "retrace": Entry("prod_{s<=t} min(r_s, 1)", "Retrace(1)", "", "shrinks along a response"),
    "retrace_seq": Entry("prod_{s<=t} min(r_s, 1) min(R, 1)", "ours", WHOLE, "shrinks along a response"),
    "seq_mis": Entry("R; drops R outside [low, high]", "Praxis; verl, TRL", WHOLE, "the dropped responses"),
    "geo_rs": Entry("1; drops g outside [low, high]", "Praxis; verl, SkyRL", WHOLE, "the dropped responses"),
    "geo_rs_seq_tis": Entry("min(R, C); drops g outside [low, high]", "Praxis; verl", WHOLE, "the dropped responses"),
    "tbpo_mismatch": Entry("g in [1/C, C]; or dropped outside", "QaRL 3.2; AReaL's sequence ratio", WHOLE, "bias"),
    "vespo": Entry(
        "R^k exp(lambda (1 - R)), (k, lambda) by sign of A", "VESPO; TRL", f"A; {WHOLE}", "responses with R far from 1"
    ),
    "z_tis": Entry("Z min(r, c1 / Z)", "ours: OBRS in expectation", TOP_K, OF_Z),
    "obrs": Entry("min(w, c1) min(p_ref / p_tgt, c2); draws", "Jackpot", TOP_K, OF_Z),
    "jackpot_adjusted": Entry("min(w, c1), w of p_new / p_inf; draws", "Jackpot 10.1", TOP_K, "noise of the draw"),
}
ABOUT_REJECTIONS = {
    "token": Entry("r", "verl token_k1; SkyRL token mask"),
    "sequence": Entry("R", "verl seq_sum_k1; SkyRL product mask", WHOLE),
    "geo": Entry("g = exp(mean_t log r)", "verl seq_mean_k1; SkyRL geometric mask; DeepSeek-V3.2, slime, TRL", WHOLE),
    "seq_max": Entry("max_t r", "SkyRL outlier mask, with --veto", WHOLE),
    "token_k2": Entry("(log r)^2 / 2", "verl; AReaL"),
    "token_k3": Entry("r - 1 - log r", "verl; AReaL"),
    "seq_sum_k2": Entry("sum_t k2", "verl; AReaL", WHOLE),
    "seq_sum_k3": Entry("sum_t k3", "verl; AReaL", WHOLE),
    "seq_mean_k2": Entry("mean_t k2", "verl; AReaL", WHOLE),
    "seq_mean_k3": Entry("mean_t k3", "K3-RS; verl; AReaL", WHOLE),
    "seq_max_k2": Entry("max_t k2", "verl; AReaL", WHOLE),
    "seq_max_k3": Entry("max_t k3", "verl; AReaL", WHOLE),
}
ABOUT_SURROGATES = {
    "reinforce": Entry("A log p_new", "REINFORCE; verl bypass_pg_*"),
    "ppo": Entry("min(s A, clip(s, 1 - low, 1 + high) A), s = p_new / p_base", "PPO, GRPO, DAPO; all"),
    "gspo": Entry("the same of exp(mean_t log s)", "GSPO; verl, TRL, slime, SkyRL; over a group: GEPO", WHOLE),
    "tbpo": Entry("clip(exp(mean_t log s)) A, no gradient outside the band", "QaRL 3.2", WHOLE),
    "sapo": Entry("(4 / tau) sigmoid(tau (s - 1)) A", "SAPO; verl, TRL, SkyRL, AReaL"),
    "cispo": Entry("sg(clip(s)) A log p_new", "MiniMax-M1; verl, TRL, slime, SkyRL"),
    "gmpo": Entry("A exp(mean_t x), x = log s bounded on the side of A", "GMPO; verl geo_mean, TRL", WHOLE),
    "dppo_tv": Entry("s A; 0 where |p_new - p_base| > bound, moving on", "DPPO; prime-rl, verl, SkyRL"),
    "dppo_kl": Entry("s A; 0 where KL(p_base || p_new), token or not, > bound", "DPPO; verl, SkyRL"),
}
ABOUT_OPTIONS = {
    "normalize_weights": Entry(
        "weight / mean of keep weight over all ranks", "verl rollout_is_batch_normalize", "a ref pass", "bias, small"
    ),
    "is_floor": Entry("max(weight, floor)", "TRL vllm_importance_sampling_clip_min", "", "bias below the floor"),
    "veto": Entry("drops a response with some r < veto", "verl, SkyRL, slime", WHOLE, "the dropped responses"),
    "reject_of": Entry("--reject alone, where A < 0", "DeepSeek-V3.2; slime, TRL", "A", "no more than --reject"),
    "correction_target": Entry(
        "p_new for p_ref in r, R and g", "verl bypass_*; VESPO, DeepSeek-V3.2", "", "weights that move with the update"
    ),
    "ref_from": Entry(
        "loglinear: log p_ref = log p_inf + (d - 1) / d (log p_new - log p_inf), d updates old",
        "AReaL prox_logp_method",
        "the age of the weights",
        "bias: it is the policy of one update ago",
    ),
}
SOURCES = {
    "AReaL": "arXiv 2505.24298",
    "CTPO": "arXiv 2605.07331",
    "DAPO": "arXiv 2503.14476",
    "DPPO": "arXiv 2602.04879",
    "DeepSeek-V3.2": "arXiv 2512.02556",
    "GEPO": "HeteroRL, arXiv 2508.17850",
    "GMPO": "arXiv 2507.20673",
    "GRPO": "arXiv 2402.03300",
    "GSPO": "arXiv 2507.18071",
    "IcePop": "Ling team, Small Leak Can Sink a Great Ship (2025); arXiv 2510.18855",
    "Jackpot": "arXiv 2602.06107",
    "K3-RS": "verl's documentation of rollout corrections; k3 is Schulman's, Approximating KL Divergence (2020)",
    "MiniMax-M1": "arXiv 2506.13585",
    "PPO": "arXiv 1707.06347",
    "Praxis": "LLM Data Company, Mismatch Praxis: Rollout Settings and IS Corrections",
    "QaRL": "arXiv 2604.07853",
    "REINFORCE": "Williams, Machine Learning 8 (1992)",
    "Retrace": "arXiv 1606.02647",
    "SAPO": "arXiv 2511.20347",
    "TIS": "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    "VESPO": "arXiv 2602.10693",
    "per-decision IS": "Precup, Sutton, Singh, Eligibility Traces for Off-Policy Policy Evaluation (ICML 2000)",
    "verl, TRL, AReaL": "their lines and revisions: results/conformance.md",
    "NeMo-RL": "github.com/NVIDIA-NeMo/RL",
    "OpenRLHF": "github.com/OpenRLHF/OpenRLHF",
    "SkyRL": "github.com/NovaSky-AI/SkyRL",
    "prime-rl": "github.com/PrimeIntellect-ai/prime-rl",
    "slime": "github.com/THUDM/slime",
}
HEAD = """\
loss = - reduce( keep * sg(weight) * surrogate )

r = p_ref / p_inf of a token, R = prod_t r of a response, R_t up to a token, g = R^(1/T); A: the advantage.
All need log p_inf of the sampled tokens, as the engine sampled them. p_ref costs a forward pass where a batch makes
several updates; else the update's own forward has it. With --correction_target=new p_new stands for p_ref."""


REJECTING = """\
Each costs what it drops, and the bias of what is left. It needs log p_ref and log p_inf alone, as weights do."""
MOVING = """\
Each needs log p_new with its gradient and log p_base; none costs a pass more. Bounds on s cost bias where they act.
reinforce has none: nothing holds p_new near the policy that sampled."""


def catalogue() -> str:
    """Name, formula, who uses it, what it needs, what it costs; then every --objective by its axes."""
    lines = [HEAD]
    lines += section("--correction: the weight, and what it drops", ABOUT_CORRECTIONS)
    lines += section(
        f"--reject: drops what has a statistic outside [--rs_low, --rs_high]\n{REJECTING}", ABOUT_REJECTIONS
    )
    lines += section(f"--surrogate: what the advantage moves\n{MOVING}", ABOUT_SURROGATES)
    lines += section("beside them, flags that change what a correction gives", ABOUT_OPTIONS)
    lines += ["", "--objective: presets over all axes"]
    for who, rows in {"": PAPERS, **FRAMEWORKS}.items():
        lines += ["", f"  {who}" if who else "  papers, and ours"]
        for name, axes in rows.items():
            said = "  ".join(f"{axis}={value}" for axis, value in axes.items())
            how = {"initial_indent": "    ", "subsequent_indent": " " * 32, "break_on_hyphens": False}
            lines += textwrap.wrap(f"{name:27} {said}", 116, **how)
    lines += ["", "sources", "", *(f"  {name:17} {where}" for name, where in SOURCES.items())]
    return "\n".join(lines)


def print_catalogue() -> None:
    """The command `python objectives.py`."""
    words = " ".join(sys.argv[1:])
    need(words in ("", "-h", "--help"), f"{words}: objectives.py explains all names and takes none")
    print(catalogue())


def section(title: str, entries: dict[str, Entry]) -> list[str]:
    """A titled list of entries."""
    lines = ["", *title.splitlines()]
    for name, entry in entries.items():
        lines.append(f"  {name:17} {entry.formula}")
        known = {"used by": entry.users, "needs": entry.needs, "costs": entry.costs}
        said = "; ".join(f"{what} {text}" for what, text in known.items() if text)
        lines += textwrap.wrap(said, 116, initial_indent=" " * 20, subsequent_indent=" " * 20)
    return lines
