"""Every flag of train.py, in one dataclass: its default, its choices, one sentence.

    python train.py --config=configs/x.toml --key=value

A TOML file sets any of them, the command line wins, and `--objective` fills what neither names (objectives.OBJECTIVES).
`resolve` returns the configuration with nothing left open, or raises ValueError with one sentence that names the flag and
the mend; it runs before any model loads.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
import os
import sys
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, Optional, get_args, get_type_hints

import delay
import objectives
import sampling
from sampling import Sampling


@dataclass(frozen=True)
class Config:
    # -- what is trained, by whose rollouts, on what
    objective: str = "jackpot"
    """Preset over correction and surrogate: none, tis, jackpot, ppo_is, gspo, ... (objectives.OBJECTIVES)."""
    model: str = "base:policy"
    """Policy: a Hugging Face folder, or base:policy for the embedded model (made on first use)."""
    actor: str = "auto"
    """Rollout model: a folder, base:actor, or none (the policy samples for itself); auto: base:actor beside base:policy, else none."""
    task: str = "arith"
    """arith (generated sums), or a JSONL file with problem/question and answer."""
    eval_task: str = ""
    """JSONL file of held-out problems; arith has its own test split."""
    task_min_ops: int = 3
    """arith: fewest operations in a problem."""
    task_max_ops: int = 5
    """arith: most operations; a response has about 6 tokens for each."""
    task_operand: int = 9
    """arith: largest operand."""
    task_total: int = 29
    """arith: largest running total (up to 199)."""
    task_explain: int = 0
    """arith: reward up to so many tokens of explanation behind a right answer with up to 1 more (long responses); 0: none."""
    task_seed: int = 0
    """Seed of the problems."""

    # -- the two axes, and what they read (open: from --objective)
    correction: Optional[str] = None
    """Weight and keep-mask per token (objectives.CORRECTIONS)."""
    surrogate: Optional[str] = None
    """How the policy moves on the advantage (objectives.SURROGATES)."""
    ratio_base: Optional[Literal["ref", "inf", "new", "group"]] = None
    """Denominator of the surrogate's ratio; group: the expectation over the group's responses (gepo.py)."""
    allow_double_correction: bool = False
    """Let a correction stand on top of a surrogate that already corrects (ratio_base inf)."""
    advantage: Optional[Literal["grpo", "grpo_no_std", "rloo"]] = None
    """Advantage within a group (default grpo)."""
    reduction: Optional[Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]] = None
    """How (B, T) becomes a number; one denominator over all ranks and micro-batching."""
    loss_denominator: Literal["proposed", "kept"] = "proposed"
    """Do rejected tokens count in the denominator?"""
    is_cap: Optional[float] = None
    """C: cap of importance weights (default by correction: tis 2, seq_tis 4, ...)."""
    is_floor: float = 0.0
    """Lower bound of capped weights; 0: none (tbpo_mismatch: 1 / C)."""
    reject: Optional[Literal["none", "token", "sequence", "geo"]] = None
    """Drop tokens by r, or whole responses by R or by exp(mean log r), on top of a correction that only weighs (default none)."""
    rs_low: Optional[float] = None
    """Lower bound of what --reject and rejecting corrections keep."""
    rs_high: Optional[float] = None
    """Upper bound of what --reject and rejecting corrections keep."""
    veto: float = 0.0
    """Drop a response in which one token has r below this (1e-4 is usual); 0: off."""
    log_ratio_clamp: float = 20.0
    """Log-ratios are clamped to +- this before exp; sequence sums after summing."""
    clip: bool = True
    """PPO clip on or off."""
    clip_low: Optional[float] = None
    """eps_low (default 0.2; gspo 3e-4)."""
    clip_high: Optional[float] = None
    """eps_high (default 0.28; gspo 4e-4)."""
    dual_clip: float = 0.0
    """Dual-clip constant c for negative advantages (3 is usual); 0: off."""
    tbpo_neg_high: float = 7e-4
    """tbpo: upper edge of the band of negative advantages."""
    tbpo_cap: Literal["clip", "mask"] = "clip"
    """tbpo_mismatch: cap the weight of a response that is outside [1/C, C], or drop the response."""
    gepo_expectation: Literal["weighted", "mean"] = "weighted"
    """ratio_base group: sum q^2 / sum q (GEPO Eq. 11), or the mean of q."""
    gepo_defence: float = 0.0
    """c of GEPO's defensive mixing, e = clip(c Var q, 0, 0.99) (4 in the text); 0: off."""
    cppo_beta: float = 0.0
    """Weight of the CPPO-KL between new and inf (0.005 in HeteroRL under delay); 0: off."""
    cppo_kl: Literal["official", "k3"] = "official"
    """Which estimator: the released code's (no KL under samples of inf), or k3 of KL(inf || new)."""
    positive_only: bool = False
    """Train on positive advantages alone."""

    # -- OBRS
    obrs_lambda: float = 1.0
    """lambda: acceptance is min(1, p_tgt / (lambda p_inf))."""
    obrs_accept_rate: Optional[float] = None
    """Budget: choose lambda at each update so that this share is accepted (Z is then bracketed by the engine's top-K)."""
    obrs_c1: float = 3.0
    """c1: cap of the OBRS weight."""
    obrs_c2: Optional[float] = None
    """c2: cap of p_ref / p_tgt (target new); default a little over 1 + eps_high, inf where no token ratio is clipped (there 3 trains and inf with a drawn mask may not)."""
    obrs_topk: int = 20
    """K: how many of the engine's log-probabilities bound Z."""
    obrs_mask: Literal["bernoulli", "expected"] = "bernoulli"
    """Draw the mask, or weigh by its expectation."""
    obrs_mode: Literal["both", "mask", "reweight"] = "both"
    """Ablation: mask and reweight, or one of them."""
    obrs_target: Optional[Literal["ref", "new"]] = None
    """Which policy the accepted tokens should follow (default ref)."""
    obrs_z: Literal["auto", "exact", "bracket", "approx"] = "auto"
    """Z: exact (two models, target ref), bracketed by the top-K, or the text's kappa Z_approx; auto: exact where possible."""
    kappa: Literal["auto", "exact"] = "auto"
    """Target new: the last update's kappa, or an extra forward for this update's own."""

    # -- the actor's training (two models)
    actor_correction: str = "tis"
    """F of the actor's own PPO loss, on p_omega,ref / p_inf."""
    actor_is_cap: Optional[float] = None
    """Cap of that weight."""
    distill_lambda: float = 1.0
    """Weight of KL(policy || actor) in the actor's loss; 0: no distillation."""
    distill_direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(sg policy || actor), Jackpot Eq. 7; reverse: KL(actor || sg policy)."""
    distill_topk: int = 0
    """KL over the policy's top-k and one bucket for the rest; 0: the whole vocabulary."""
    distill_kl_target: float = 0.0
    """Closed loop: steer distill_lambda to hold the measured KL (nats a token) here; 0: fixed lambda."""
    distill_gain: float = 0.1
    """Closed loop: the most that log(distill_lambda) moves in one update."""
    distill_lambda_max: float = 100.0
    """Closed loop: upper bound of distill_lambda."""

    # -- sizes
    steps: int = 150
    """Optimizer updates."""
    rollout_batch: int = 256
    """Responses sampled between two weight syncs, over all ranks."""
    train_batch: int = 256
    """Responses in one update, over all ranks."""
    group_size: int = 8
    """Responses to one prompt."""
    max_tokens: int = 32
    """Longest response."""
    micro_tokens: int = 4096
    """Token budget (prompt and response) of one micro-batch on one rank."""
    temperature: float = 1.0
    """Sampling temperature; the learner scores the same law."""
    top_p: float = 1.0
    """Rollouts keep the smallest set of most likely tokens with at least this mass; 1: all."""
    top_k: int = 0
    """Rollouts keep the k most likely tokens; 0: all."""
    min_p: float = 0.0
    """Rollouts keep tokens with at least this share of the most likely one's probability; 0: all."""
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """Log-probabilities the engine returns: of the law it samples from, or raw, of the model before temperature and truncation (biased)."""
    keep_sampling_mask: Literal["off", "recompute", "replay"] = "replay"
    """What the learner scores where rollouts truncate: the whole vocabulary, its own cut, or the rollout's kept sets (sampling.py)."""
    kept_max: int = 256
    """Largest kept set that is recorded where top_p or min_p alone truncate (vLLM returns that many log-probabilities a token)."""

    # -- optimisation
    lr: float = 1e-4
    """Policy learning rate."""
    actor_lr: float = 3e-4
    """Actor learning rate."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: torch.optim.Muon on the matrices of the layers, AdamW on the rest, at the same learning rates (RMS-matched)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up."""
    warmup_steps: int = 5
    """Updates of linear warm-up."""
    adam_beta1: float = 0.9
    """AdamW."""
    adam_beta2: float = 0.999
    """AdamW."""
    adam_eps: float = 1e-8
    """AdamW."""
    weight_decay: float = 0.0
    """AdamW."""
    grad_clip: float = 0.3
    """Largest gradient norm, each model on its own."""
    max_skips: int = 5
    """Stop after so many non-finite updates in a row."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Learner's compute type; bfloat16 is autocast over float32 weights."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Wrapper under torchrun."""

    # -- delayed samplers, simulated (delay.py)
    delay: Literal["none", "constant", "lognormal", "weibull", "exponential"] = "none"
    """Law of the delay after which a sampler loads the newest weights; none: the synchronous loop."""
    delay_min: float = 60.0
    """Shortest delay, in virtual seconds."""
    delay_max: float = 1800.0
    """Longest delay, in virtual seconds; constant: the delay."""
    delay_mass: float = 0.995
    """Share of delays between the two, before they are clipped to them."""
    delay_samplers: int = 4
    """Samplers, each with a model version of its own."""
    sampler_rate: float = 1.0
    """Groups the samplers make for each that the learner trains on; above 1 they queue up."""
    step_seconds: float = 28.125
    """Virtual seconds an update takes (1800 / 64)."""
    max_staleness: Optional[int] = None
    """Bound in updates: delays are capped there, older groups dropped when the learner would take them (the updates of one batch come on top); 0: the synchronous loop; default none."""
    window_seconds: float = math.inf
    """Groups that have waited longer are dropped."""
    sync_every: int = 1
    """Broadcast weights to delayed or remote samplers every so many updates."""

    # -- remote samplers (hub.py, files.py, sampler.py)
    samplers: Literal["local", "zmq", "files"] = "local"
    """local: an engine in this process; zmq, files: samplers anywhere, over ZeroMQ or a shared folder (python rollout.py --connect=...)."""
    bind: str = "tcp://127.0.0.1:5555"
    """zmq: where to listen; rank r takes the port r higher. tcp://*:5555 for other hosts, with --keys."""
    keys: str = "none"
    """zmq: the learner's folder of keys (python keys.py OUT --samplers=N); none: in the clear, on this host only."""
    sync_path: str = ""
    """files: the shared folder."""
    sync_dtype: Literal["float32", "bfloat16", "quantized"] = "float32"
    """Weights on the wire; quantized: in --rollout_quant's format, as the learner's aligned forward has them."""
    give_up: float = 3600.0
    """Stop, with a sentence, after so many seconds without a group from any sampler."""

    # -- engine
    rollout: Literal["vllm", "hf"] = "vllm"
    """Rollout engine: vLLM in process, or a sampler in plain torch."""
    rollout_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Engine's precision."""
    rollout_memory: float = 0.25
    """Engine's memory: GiB of KV cache on CPU, share of the GPU on CUDA."""
    lm_head_fp32: bool = False
    """Compute the language-model head in float32 on both sides, above bodies of less."""
    rollout_quant: Literal["none", "int8", "fp8", "w4a16", "w3a16", "w2a16"] = "none"
    """Low-bit rollouts (quant.py): the engine's linear layers in this format."""
    learner_quant: Literal["none", "aligned", "int8", "fp8", "w4a16", "w3a16", "w2a16"] = "none"
    """aligned: the learner's copy of the model that samples computes on the engine's low-bit numbers (QaRL); a format: whatever the engine does."""
    quant_group: int = 64
    """Columns that share a scale in w4a16 and its like."""

    # -- evaluation, logging, checkpoints
    eval_every: int = 0
    """Held-out pass@1 every so many updates; 0: only before and after."""
    eval_problems: int = 512
    """Held-out problems."""
    eval_samples: int = 1
    """Responses to each of them, at temperature 1."""
    advantage_error_every: int = 0
    """Every so many updates, |mean(w A) - mean A of fresh samples of the policy| (GEPO Fig. 6c); costs a rollout; 0: never."""
    out: str = "out/run"
    """Run folder: config, metrics.jsonl, checkpoints, plot."""
    save_every: int = 50
    """Checkpoint every so many updates; 0: only at the end."""
    keep: int = 2
    """Checkpoints kept."""
    resume: bool = False
    """Continue the run in --out from its newest checkpoint."""
    overwrite: bool = False
    """Delete what stands in --out and start anew."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""
    wandb: str = ""
    """Also log to this wandb project."""
    seed: int = 0
    """Seed of sampling and masks."""
    base_dir: str = "out/base"
    """Where embedded base models are kept."""
    base_accuracy: float = 0.3
    """Sampled accuracy at which the warm start of embedded models stops."""
    actor_base_accuracy: Optional[float] = None
    """The same for base:actor, where it should be weaker (or stronger) than base:policy."""


FIELDS = {f.name: f for f in fields(Config)}
CHOICES = {
    n: [a for o in (get_args(t) or ()) for a in (get_args(o) or (o,)) if isinstance(a, str)]
    for n, t in get_type_hints(Config).items()
}
CHOICES = {n: c for n, c in CHOICES.items() if c}
CAPPED = {c for c, b in objectives.BOUNDS.items() if "is_cap" in b}  # corrections that read C
# flags of verl and TRL -> ours; where values differ too, theirs -> ours
FOREIGN = {
    "rollout_is": ("correction", {"token": "tis", "sequence": "seq_tis", "null": "none"}),
    "rollout_is_threshold": "is_cap",
    "rollout_rs": ("reject", {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geo", "null": "none"}),
    "rollout_rs_threshold_lower": "rs_low",
    "rollout_rs_threshold": "rs_high",
    "rollout_token_veto_threshold": "veto",
    "loss_agg_mode": "reduction",
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "clip_ratio_c": "dual_clip",
    "vllm_importance_sampling_mode": "objective",
    "loss_type": "objective",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "num_generations": "group_size",
    "max_completion_length": "max_tokens",
}
# keys that a resumed run may change: they steer the process, not the training
HARMLESS = {
    "resume",
    "overwrite",
    "keep",
    "save_every",
    "tensorboard",
    "wandb",
    "out",
    "bind",
    "keys",
    "sync_path",
    "give_up",
}


def parse(argv: list[str] | None = None) -> Config:
    """The configuration of a command line, resolved. ValueError: one sentence."""
    import tyro

    argv = list(sys.argv[1:] if argv is None else argv)
    values, rest, i = {}, [], 0
    while i < len(argv):
        arg = argv[i]
        if arg in ("-h", "--help"):
            return tyro.cli(tyro.conf.FlagConversionOff[Config], args=["--help"], use_underscores=True)
        if not arg.startswith("--"):
            raise ValueError(f"{arg}: flags are written --key=value")
        key, eq, value = arg[2:].partition("=")
        key = key.replace("-", "_")
        if not eq:
            boolean = key in FIELDS and FIELDS[key].type == "bool"
            if (
                i + 1 < len(argv)
                and not argv[i + 1].startswith("--")
                and (not boolean or argv[i + 1] in ("True", "False", "true", "false"))
            ):
                i, value = i + 1, argv[i + 1]
            else:
                value = "True"
        i += 1
        if key in FOREIGN:
            key, named = FOREIGN[key] if isinstance(FOREIGN[key], tuple) else (FOREIGN[key], {})
            value = named.get(value, value)
        if key == "config":
            values.update(read_toml(value))
            continue
        known(key, f"--{key}")
        if key in CHOICES:
            choice(key, value, CHOICES[key])
        rest.append(f"--{key}={value.capitalize() if value in ('true', 'false') else value}")
    given = {a[2:].partition("=")[0] for a in rest}
    try:
        default = Config(**values)
    except TypeError as e:
        raise ValueError(f"--config: {e}") from None
    cfg = tyro.cli(tyro.conf.FlagConversionOff[Config], args=rest, default=default, use_underscores=True)
    if cfg.resume:
        cfg = resumed(cfg, given | set(values))
    return resolve(cfg)


def choice(flag, value, known_values):
    if value not in known_values:
        near = difflib.get_close_matches(str(value), known_values, 1, 0.3)
        raise ValueError(
            f"--{flag}={value}: not one of {', '.join(known_values)}" + (f"; did you mean {near[0]}?" if near else "")
        )


def known(key: str, shown: str) -> None:
    if key not in FIELDS:
        near = difflib.get_close_matches(key, FIELDS, 1, 0.4)
        raise ValueError(f"{shown}: no such flag" + (f"; did you mean --{near[0]}?" if near else "; see --help"))


def read_toml(path: str) -> dict:
    """A flat TOML file of flags; keys are checked like flags."""
    if not Path(path).is_file():
        raise ValueError(f"--config={path}: no such file")
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as e:
        raise ValueError(f"--config={path}: not valid TOML ({e})") from None
    for key, value in values.items():
        known(key, f"{path}: {key}")
        kind = str(FIELDS[key].type)
        if kind == "float" or "float" in kind and isinstance(value, int) and not isinstance(value, bool):
            values[key] = float(value) if isinstance(value, int) and not isinstance(value, bool) else value
        plain = {"int": int, "float": float, "str": str, "bool": bool}.get(kind)
        if plain and (not isinstance(values[key], plain) or isinstance(value, bool) != (plain is bool)):
            raise ValueError(f"{path}: {key} = {value!r} is not of type {kind}")
    return values


def resumed(cfg: Config, given: set[str]) -> Config:
    """The saved configuration of the run in --out; keys given now must agree with it."""
    saved_path = Path(cfg.out) / "config.json"
    if not saved_path.is_file():
        raise ValueError(f"--resume: {cfg.out} holds no run; start one without --resume, or name its folder with --out")
    saved = json.loads(saved_path.read_text(encoding="utf-8"))["config"]
    saved = {k: v for k, v in saved.items() if k in FIELDS}
    free = HARMLESS | ({"steps"} if saved["lr_schedule"] == "constant" else set())
    changed = [k for k in sorted(given - free) if getattr(resolve_open(replace(cfg, resume=False)), k) != saved[k]]
    if changed:
        was = ", ".join(f"--{k} was {saved[k]!r} and is now {getattr(cfg, k)!r}" for k in changed)
        raise ValueError(
            f"--resume with a changed configuration: {was}; give the old value, or start anew in another --out"
        )
    return Config(**{**saved, **{k: getattr(cfg, k) for k in given & free}, "resume": True, "overwrite": False})


def resolve_open(cfg: Config) -> Config:
    """Fill what the objective decides and what bounds default to; no checks."""
    preset = objectives.OBJECTIVES.get(cfg.objective, {})
    out = {
        "ratio_base": "ref",
        "reduction": "token-mean",
        "obrs_target": "ref",
        "advantage": "grpo",
        "reject": "none",
        **preset,
    }
    out = {k: v for k, v in out.items() if getattr(cfg, k) is None}
    cfg = replace(cfg, **out)
    bounds = {**objectives.BOUNDS.get(cfg.correction, {}), **objectives.REJECT_BOUNDS.get(cfg.reject, {})}
    bounds = {k: v for k, v in bounds.items() if getattr(cfg, k) is None}
    low, high = objectives.CLIPS.get(cfg.surrogate, objectives.CLIP)
    actor = cfg.actor
    if actor == "auto":
        actor = "base:actor" if cfg.model == "base:policy" else "none"
    z = cfg.obrs_z
    if z == "auto":
        z = (
            "exact"
            if actor != "none"
            and cfg.obrs_target == "ref"
            and not cfg.obrs_accept_rate
            and objectives.actor_is_sampler(cfg)
            else "bracket"
        )
    c2 = cfg.obrs_c2
    if c2 is None:
        high_now = high if cfg.clip_high is None else cfg.clip_high
        c2 = 1.02 + high_now if cfg.clip and cfg.surrogate in ("ppo", "cispo") else math.inf
    return replace(
        cfg,
        **bounds,
        actor=actor,
        obrs_z=z,
        obrs_c2=c2,
        clip_low=low if cfg.clip_low is None else cfg.clip_low,
        clip_high=high if cfg.clip_high is None else cfg.clip_high,
    )


def resolve(cfg: Config, world: int | None = None) -> Config:
    """The configuration with nothing open, checked. ValueError: one sentence naming flag and mend."""

    def need(ok, sentence):
        if not ok:
            raise ValueError(sentence)

    world = int(os.environ.get("WORLD_SIZE", 1)) if world is None else world
    choice("objective", cfg.objective, list(objectives.OBJECTIVES))
    cfg = resolve_open(cfg)
    choice("correction", cfg.correction, list(objectives.CORRECTIONS))
    choice("surrogate", cfg.surrogate, list(objectives.SURROGATES))
    choice(
        "actor_correction",
        cfg.actor_correction,
        [c for c in objectives.CORRECTIONS if c not in objectives.USES_Z | {"tis_adjusted"}],
    )
    for name, known_values in CHOICES.items():
        choice(name, getattr(cfg, name), known_values)
    two = cfg.actor != "none"
    for name in (
        "steps",
        "rollout_batch",
        "train_batch",
        "group_size",
        "max_tokens",
        "micro_tokens",
        "eval_problems",
        "eval_samples",
        "max_skips",
        "keep",
    ):
        need(getattr(cfg, name) >= 1, f"--{name}={getattr(cfg, name)}: must be at least 1")
    for name in ("lr", "actor_lr", "grad_clip", "obrs_c1", "rollout_memory", "log_ratio_clamp"):
        need(getattr(cfg, name) > 0, f"--{name}={getattr(cfg, name)}: must be above 0")
    sampling.check(cfg)
    need(cfg.kept_max >= 1, f"--kept_max={cfg.kept_max}: must be at least 1")
    need(
        not (two and Sampling.of(cfg).truncates and cfg.keep_sampling_mask == "recompute"),
        "--keep_sampling_mask=recompute with an --actor: each model would be cut by itself, and the KL between two cut laws is infinite; use replay or off",
    )
    need(
        cfg.learner_quant != "aligned" or cfg.rollout_quant != "none",
        "--learner_quant=aligned: the rollouts are not quantized, there is nothing to align with; name a --rollout_quant, or the learner's own format in --learner_quant",
    )
    need(cfg.quant_group >= 1, f"--quant_group={cfg.quant_group}: must be at least 1")
    delay.check(cfg)
    for name in ("delay_samplers", "sync_every"):
        need(getattr(cfg, name) >= 1, f"--{name}={getattr(cfg, name)}: must be at least 1")
    for name in ("sampler_rate", "step_seconds", "window_seconds"):
        need(getattr(cfg, name) > 0, f"--{name}={getattr(cfg, name)}: must be above 0")
    need(
        cfg.max_staleness is None or cfg.max_staleness >= 0,
        f"--max_staleness={cfg.max_staleness}: a number of updates, 0 or more; leave it out for no bound",
    )
    need(
        cfg.max_staleness is None or cfg.sync_every - 1 <= cfg.max_staleness,
        f"--max_staleness={cfg.max_staleness}: with --sync_every={cfg.sync_every} even the newest weights are up to {cfg.sync_every - 1} updates old; broadcast more often",
    )
    remote = cfg.samplers != "local"
    need(
        cfg.delay != "none" or remote or cfg.sync_every == 1 and cfg.max_staleness is None,
        f"--max_staleness={cfg.max_staleness} --sync_every={cfg.sync_every}: there are no delayed samplers; name a law with --delay, or a transport with --samplers",
    )
    need(
        cfg.delay == "none" or not remote,
        f"--delay={cfg.delay} plays samplers inside this process; --samplers={cfg.samplers} has real ones, to whom --delay is given themselves",
    )
    need(cfg.samplers != "files" or cfg.sync_path, "--samplers=files: name the shared folder with --sync_path")
    need(
        cfg.samplers != "zmq" or cfg.keys != "none" or cfg.bind.startswith(("tcp://127.0.0.1:", "ipc://")),
        f"--bind={cfg.bind}: for other hosts --keys are needed (python keys.py OUT --samplers=N makes them), or listen on tcp://127.0.0.1:PORT",
    )
    need(
        cfg.sync_dtype != "quantized" or cfg.rollout_quant not in ("none", "w3a16", "w2a16"),
        f"--sync_dtype=quantized: --rollout_quant={cfg.rollout_quant} is no format that engines load; use int8, fp8 or w4a16, or --sync_dtype=float32",
    )
    need(
        not (remote and cfg.learner_quant == "aligned" and cfg.sync_dtype == "bfloat16"),
        "--sync_dtype=bfloat16: an engine that quantizes rounded weights has other low-bit numbers than --learner_quant=aligned; use --sync_dtype=float32 or quantized",
    )
    need(
        cfg.delay == "none"
        or cfg.sampler_rate <= 1
        or cfg.max_staleness is not None
        or math.isfinite(cfg.window_seconds),
        f"--sampler_rate={cfg.sampler_rate}: more groups are made than trained on, and they wait for ever; bound them with --max_staleness or --window_seconds",
    )
    need(cfg.give_up > 0, f"--give_up={cfg.give_up}: must be above 0")
    need(cfg.obrs_c2 >= 1, f"--obrs_c2={cfg.obrs_c2}: caps p_ref / p_tgt, so at least 1")
    need(cfg.obrs_lambda > 0, f"--obrs_lambda={cfg.obrs_lambda}: lambda must be above 0 (1 is the usual value)")
    need(
        cfg.obrs_accept_rate is None or 0 < cfg.obrs_accept_rate <= 1,
        f"--obrs_accept_rate={cfg.obrs_accept_rate}: a budget lies in (0, 1]; leave it out to use --obrs_lambda",
    )
    for name in ("base_accuracy", "actor_base_accuracy"):
        need(
            getattr(cfg, name) is None or 0 < getattr(cfg, name) < 1,
            f"--{name}={getattr(cfg, name)}: a share between 0 and 1",
        )
    need(cfg.distill_lambda >= 0, f"--distill_lambda={cfg.distill_lambda}: must not be negative")
    need(cfg.group_size >= 2, f"--group_size={cfg.group_size}: an advantage needs at least 2 responses a prompt")
    need(
        cfg.train_batch % (cfg.group_size * world) == 0,
        f"--train_batch={cfg.train_batch}: not divisible by --group_size={cfg.group_size} times {world} rank(s); each rank trains on whole groups",
    )
    need(
        cfg.rollout_batch % cfg.train_batch == 0,
        f"--rollout_batch={cfg.rollout_batch}: not a multiple of --train_batch={cfg.train_batch}",
    )
    need(
        cfg.clip_low >= 0 and cfg.clip_high >= 0,
        f"--clip_low={cfg.clip_low} --clip_high={cfg.clip_high}: must not be negative",
    )
    rejects = cfg.correction in objectives.REJECTING
    need(
        not (rejects and cfg.reject != "none"),
        f"--reject={cfg.reject}: --correction={cfg.correction} already rejects by --rs_low and --rs_high; use --correction=is, or --reject=none",
    )
    need(
        cfg.rs_low is None or cfg.rs_high is None or cfg.rs_low < cfg.rs_high,
        f"--rs_low={cfg.rs_low} --rs_high={cfg.rs_high}: the bounds are crossed; rs_low must be below rs_high",
    )
    need(
        (cfg.rs_low is None and cfg.rs_high is None) or rejects or cfg.reject != "none",
        f"--rs_low={cfg.rs_low} --rs_high={cfg.rs_high}: nothing is rejected by bounds here; name what to bound with --reject=token, sequence or geo",
    )
    need(0 <= cfg.veto < 1, f"--veto={cfg.veto}: a ratio in [0, 1), such as 1e-4; 0 is off")
    need(
        cfg.is_floor >= 0
        and (cfg.is_floor == 0 or (cfg.correction in CAPPED - {"areal_drop"} and cfg.is_floor < cfg.is_cap)),
        f"--is_floor={cfg.is_floor}: a lower bound of a capped weight, below --is_cap={cfg.is_cap}; --correction={cfg.correction} "
        + ("has one" if cfg.correction in CAPPED - {"areal_drop"} else "has none"),
    )
    need(
        cfg.tbpo_neg_high > 0,
        f"--tbpo_neg_high={cfg.tbpo_neg_high}: the band's edges are 1 - clip_low and 1 + this; it must be above 0",
    )
    need(
        cfg.is_cap is None or cfg.correction != "tbpo_mismatch" or max(1.0, cfg.is_floor) < cfg.is_cap,
        f"--is_cap={cfg.is_cap}: tbpo_mismatch caps two-sided to [1/C, C], so C must be above 1",
    )
    need(
        cfg.ratio_base not in ("inf", "group") or cfg.correction == "none" or cfg.allow_double_correction,
        f"--ratio_base={cfg.ratio_base} already corrects for the mismatch: use --correction=none instead of {cfg.correction}, or --allow_double_correction=True",
    )
    need(
        cfg.correction not in ("tis_adjusted", "jackpot_adjusted") or cfg.ratio_base == "new",
        f"--correction={cfg.correction} carries p_new / p_inf itself: it needs --ratio_base=new, not {cfg.ratio_base}",
    )
    need(
        cfg.correction != "jackpot_adjusted" or cfg.obrs_target == "new",
        "--correction=jackpot_adjusted: its target is the policy now; use --obrs_target=new",
    )
    need(
        cfg.obrs_z != "exact"
        or (two and cfg.obrs_target == "ref" and not cfg.obrs_accept_rate and objectives.actor_is_sampler(cfg)),
        "--obrs_z=exact: the whole vocabulary is known only with an --actor, --obrs_target=ref, no --obrs_accept_rate, and samplers that are the learner's actor (no --delay, --samplers=local, low bits aligned, kept sets replayed); use bracket",
    )
    need(
        cfg.correction != "tis_adjusted" or cfg.loss_denominator != "kept" or not objectives.can_drop(cfg),
        "--loss_denominator=kept must know what is dropped before the update, and --correction=tis_adjusted is known within it; use proposed",
    )
    need(
        not (cfg.loss_denominator == "kept" and cfg.obrs_target == "new" and cfg.correction in objectives.USES_Z)
        or cfg.kappa == "exact",
        "--loss_denominator=kept with --obrs_target=new must know the mask before the update: add --kappa=exact",
    )
    need(
        not (cfg.correction in objectives.USES_Z and cfg.obrs_accept_rate and cfg.obrs_target == "new")
        or cfg.kappa == "exact",
        "--obrs_accept_rate with --obrs_target=new must know the policy before the update: add --kappa=exact",
    )
    need(
        cfg.correction != "z_tis" or cfg.obrs_target == "ref",
        "--correction=z_tis is a control for target ref; leave --obrs_target=ref",
    )
    need(
        cfg.kappa != "exact" or cfg.obrs_target == "new",
        "--kappa=exact is for --obrs_target=new; with target ref kappa always comes from the ref pass",
    )
    need(
        cfg.is_cap is None or cfg.correction in CAPPED,
        f"--is_cap={cfg.is_cap}: --correction={cfg.correction} has no cap C; "
        + (
            "use --rs_low and --rs_high"
            if cfg.correction in objectives.DROPS and cfg.correction not in objectives.USES_Z
            else "use --obrs_c1"
            if cfg.correction in objectives.USES_Z
            else "leave it out"
        ),
    )
    need(
        cfg.dual_clip == 0 or (cfg.dual_clip > 1 and cfg.clip and cfg.surrogate in ("ppo", "gspo")),
        f"--dual_clip={cfg.dual_clip}: needs a value above 1 (3 is usual), --clip=True and --surrogate=ppo or gspo",
    )
    need(
        cfg.ratio_base != "group" or cfg.surrogate in ("gspo", "tbpo"),
        f"--ratio_base=group divides the length-normalised probability of a response: it needs --surrogate=gspo or tbpo, not {cfg.surrogate}",
    )
    need(
        cfg.cppo_beta >= 0 and cfg.gepo_defence >= 0,
        f"--cppo_beta={cfg.cppo_beta} --gepo_defence={cfg.gepo_defence}: must not be negative; 0 is off",
    )
    need(
        cfg.gepo_defence == 0 or cfg.ratio_base == "group",
        f"--gepo_defence={cfg.gepo_defence}: mixes into the group's expectation; it needs --ratio_base=group",
    )
    need(
        cfg.ratio_base == "ref" or cfg.surrogate != "reinforce",
        f"--ratio_base={cfg.ratio_base}: --surrogate=reinforce has no ratio; use --surrogate=ppo",
    )
    need(
        cfg.distill_kl_target == 0 or cfg.distill_lambda > 0,
        "--distill_kl_target needs a --distill_lambda above 0 to start from",
    )
    need(cfg.distill_kl_target == 0 or two, "--distill_kl_target: there is no actor to distil; name one with --actor")
    for flag, value in (("model", cfg.model), ("actor", cfg.actor)):
        if value.startswith("base:"):
            choice(flag, value, ["base:policy", "base:actor"])
            need(
                cfg.task == "arith",
                f"--{flag}={value} knows only --task=arith; give the folder of a model for {cfg.task}",
            )
        elif value != "none" or flag == "model":
            need(
                (Path(value) / "config.json").is_file(),
                f"--{flag}={value}: no Hugging Face model folder (no config.json there)",
            )
    if cfg.task == "arith":
        need(
            1 <= cfg.task_min_ops <= cfg.task_max_ops,
            f"--task_min_ops={cfg.task_min_ops}: must be between 1 and --task_max_ops={cfg.task_max_ops}",
        )
        need(cfg.task_explain >= 0, f"--task_explain={cfg.task_explain}: must be 0 (no explanations) or more tokens")
        need(
            1 <= cfg.task_operand <= cfg.task_total < 200,
            f"--task_total={cfg.task_total}: must be below 200 and no less than --task_operand={cfg.task_operand}",
        )
    if cfg.rollout == "vllm" and not remote:
        need(
            importlib.util.find_spec("vllm") is not None,
            "--rollout=vllm: vLLM is not installed here; install it (make demo does), or use --rollout=hf",
        )
    if cfg.wandb:
        need(
            importlib.util.find_spec("wandb") is not None,
            f"--wandb={cfg.wandb}: wandb is not installed; pip install wandb, or leave the flag out",
        )
    return cfg


def check_sizes(cfg: Config, task) -> None:
    """What can be wrong between flags and the embedded models before these are made."""
    import warmstart

    if cfg.model.startswith("base:"):
        check_vocabulary(cfg, warmstart.VOCAB)
        if task.max_prompt() + cfg.max_tokens > warmstart.CONTEXT:
            raise ValueError(
                f"--max_tokens={cfg.max_tokens}: with prompts of up to {task.max_prompt()} tokens that is over the model's context of {warmstart.CONTEXT}"
            )


def check_vocabulary(cfg: Config, vocab: int) -> None:
    if cfg.correction in objectives.USES_Z and not 1 <= cfg.obrs_topk <= vocab:
        raise ValueError(f"--obrs_topk={cfg.obrs_topk}: K must lie between 1 and the vocabulary of {vocab} tokens")
    if cfg.top_k > vocab:
        raise ValueError(f"--top_k={cfg.top_k}: larger than the vocabulary of {vocab} tokens; 0 keeps all")
    if not 0 <= cfg.distill_topk < vocab:
        raise ValueError(
            f"--distill_topk={cfg.distill_topk}: must lie between 0 and the vocabulary of {vocab} tokens, less one"
        )


def check_models(cfg: Config, policy: str, actor: str | None) -> None:
    """What can be wrong between models and flags, from config.json alone. ValueError: one sentence."""
    vocab = [
        json.loads((Path(f) / "config.json").read_text(encoding="utf-8"))["vocab_size"] for f in (policy, actor) if f
    ]
    if len(set(vocab)) > 1:
        raise ValueError(
            f"--actor={actor}: its vocabulary has {vocab[1]} tokens and the policy's {vocab[0]}; actor and policy must share one"
        )
    check_vocabulary(cfg, vocab[0])
    if {cfg.rollout_quant, cfg.learner_quant} != {"none"}:
        import quant

        quant.check(cfg, actor or policy)
