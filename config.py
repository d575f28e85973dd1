"""The flags of train.py: their defaults, their choices, one sentence; then what must hold between them.

    python train.py --config=configs/x.toml --key=value

A TOML file sets any flag, the command line wins, and `--objective` fills what neither names
(presets.OBJECTIVES). `resolve` returns the configuration with nothing left open, or raises UserError with one
sentence that names the flag and the mend. Each concept's file checks its own flags (`objectives.check`,
`sampling.check`, ...); what concerns several of them is checked here.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch

import corrections
import delay
import objectives
import presets
import quant
import sampling
import tasks
from delay import DelayFlags, RemoteFlags, StalenessFlags
from machinery import flags
from machinery.flags import UserError, choice, need
from model import exact, lora
from model.memory import MemoryFlags
from quant import PrecisionFlags
from sampling import SamplingFlags
from tasks import PromptFlags, TaskFlags

# ---------------------------------------------------------------------------------------------------------------------
# The flags, in groups, but for those that stand in the file of their concept: sampling.py, quant.py, delay.py,
# machinery/optim.py, model/memory.py, tasks/. --help shows them in the order of `Config`'s bases
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFlags:
    """What is trained, by whose rollouts, and where it goes"""

    objective: str = "jackpot"
    """Preset over correction and surrogate: none, tis, jackpot, ppo_is, gspo, ... (presets.OBJECTIVES)."""
    model: str = "base:policy"
    """Policy: a Hugging Face folder, an id of its hub, or base:policy for the embedded model (made on first use)."""
    actor: str = "auto"
    """Rollout model: a folder or id, base:actor, or none (the policy samples for itself);
    auto: base:actor beside base:policy, else none."""
    out: str = "out/run"
    """Run folder: config, metrics.jsonl, checkpoints, plot."""
    resume: bool = False
    """Continue the run in --out from its newest checkpoint."""
    overwrite: bool = False
    """Delete what a run wrote in --out, and nothing else, and start anew."""
    seed: int = 0
    """Seed of sampling and masks."""


@dataclass(frozen=True)
class SizeFlags:
    """Sizes"""

    steps: int = 150
    """Optimizer updates."""
    rollout_batch: int = 256
    """Responses sampled between two weight syncs, over all ranks."""
    train_batch: int = 256
    """Responses in one update, over all ranks."""
    group_size: int = 8
    """Responses to one prompt."""
    epochs: float = 0.0
    """Passes over the problems of --task, in groups that are trained on; in place of --steps; 0: --steps counts."""
    dynamic_sampling: int = 0
    """Other prompts in the place of groups whose responses all earn the same (DAPO): at most so many rounds a batch,
    the first among them (2: one more); with remote samplers until there are enough; 0: never."""
    micro_tokens: int = 4096
    """Token budget (prompt and response) of one micro-batch on one rank."""


@dataclass(frozen=True)
class EngineFlags:
    """The rollout engine"""

    rollout: Literal["vllm", "hf"] = "vllm"
    """Rollout engine: vLLM in process, or a sampler in plain torch."""
    rollout_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Engine's precision; default: the learner's --dtype, float32 for embedded models and where nothing learns."""
    rollout_memory: float = 0.0
    """Engine's memory: GiB of KV cache on CPU, share of the GPU on CUDA; 0: enough for a rollout batch, or 0.25."""
    rollout_tp: int = 1
    """vLLM under torchrun: so many neighbouring ranks are one engine, each with a part of every weight."""
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto"
    """The engine's keys and values. In 8 bits, a mismatch that the learner does not share: fp8, vLLM's (Jackpot, Table
    2b); int8, the plain sampler's (--rollout=hf). auto: in --rollout_dtype."""


@dataclass(frozen=True)
class ObjectiveFlags:
    """The objective: one correction times one surrogate (open: filled from --objective)"""

    correction: str | None = None
    """Weight and keep-mask per token (corrections.CORRECTIONS)."""
    surrogate: str | None = None
    """How the policy moves on the advantage (objectives.SURROGATES)."""
    ratio_base: Literal["ref", "inf", "new", "group"] | None = None
    """Denominator of the surrogate's ratio; group: the expectation over the group's responses (corrections.py)."""
    ref_from: Literal["pass", "loglinear"] = "pass"
    """p_ref of several updates a batch: a pass before them, or between p_inf and p_new by age (corrections.py)."""
    advantage: Literal["grpo", "grpo_no_std", "rloo"] | None = None
    """Advantage within a group (default grpo)."""
    reduction: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None = None
    """How (B, T) becomes a number; one denominator over all ranks and micro-batches."""
    clip: bool = True
    """PPO clip on or off."""
    clip_low: float | None = None
    """eps_low (default 0.2; gspo and tbpo 3e-4, gmpo 0.4 of log r, dppo_tv 0.2 and dppo_kl 0.05 of a divergence)."""
    clip_high: float | None = None
    """eps_high (default 0.28; gspo and tbpo 4e-4; gmpo, dppo_tv and dppo_kl as --clip_low)."""
    dual_clip: float = 0.0
    """Dual-clip constant c for negative advantages (3 is usual); 0: off."""
    correction_target: Literal["ref", "new"] | None = None
    """Which policy stands above inf in weights and statistics: ref (the default), or new, as it is in the update."""
    normalize_weights: bool = False
    """Divide weights by their mean over the update's batch, on all ranks: self-normalised importance sampling."""
    is_cap: float | None = None
    """C: cap of importance weights (default by correction: tis 2, seq_tis 4, prefix_tis 1, ...)."""
    is_floor: float = 0.0
    """Lower bound of capped weights; 0: none (tbpo_mismatch: 1 / C)."""
    reject: str | None = None
    """Drop tokens or responses by a statistic of r, on top of a correction that only weighs (corrections.REJECTIONS;
    default none); several with their bounds: token:0.5:5,seq_max_k2:0:0.1."""
    reject_of: Literal["all", "negative"] | None = None
    """Whom --reject may drop: all (the default), or only what has a negative advantage."""
    rs_low: float | None = None
    """Lower bound of what --reject and rejecting corrections keep."""
    rs_high: float | None = None
    """Upper bound of what --reject and rejecting corrections keep."""
    veto: float | None = None
    """Drop a response in which one token has r below this (1e-4 is usual); 0, the default: off."""
    log_ratio_clamp: float = 20.0
    """Log-ratios are clamped to +- this before exp; sequence sums after summing."""
    loss_denominator: Literal["proposed", "kept"] = "proposed"
    """Do rejected tokens count in the denominator?"""
    positive_only: bool = False
    """Train on positive advantages alone (QaRL, Figure 8)."""
    tbpo_neg_high: float = 7e-4
    """tbpo: upper edge of the band of negative advantages."""
    gepo_expectation: Literal["weighted", "mean"] = "weighted"
    """ratio_base group: sum q^2 / sum q (GEPO Eq. 11), or the mean of q."""
    gepo_defence: float = 0.0
    """c of GEPO's defensive mixing, e = clip(c Var q, 0, 0.99) (the text names no value); 0: off."""
    cppo_beta: float | None = None
    """Weight of a KL between new and inf (CPPO: 0.005 in HeteroRL under delay); 0, the default: off."""
    cppo_kl: Literal["official", "k2", "k3"] | None = None
    """Its estimator: the released code's (the default; under samples of inf no KL), prime-rl's k2, or k3."""
    kl_coef: float = 0.0
    """Weight of the KL from the policy to the frozen model that the run started from; 0: off, and none is loaded."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it stands: a term of the loss, or taken off each response's reward before the advantage."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Its estimate from the sampled tokens (objectives.kl_estimate); default k2 in the loss, k1 in the reward."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus, in nats of the distribution that is scored; 0: off."""


@dataclass(frozen=True)
class ObrsFlags:
    """OBRS, Jackpot's correction (obrs.py)"""

    obrs_lambda: float = 1.0
    """lambda: acceptance is min(1, p_tgt / (lambda p_inf))."""
    obrs_accept_rate: float | None = None
    """Budget: choose lambda at each update so that this share is accepted; Z is then bracketed by the top-K."""
    obrs_c1: float = 3.0
    """c1: cap of the OBRS weight."""
    obrs_c2: float | None = None
    """c2: cap of p_ref / p_tgt (target new); default a little over 1 + eps_high, 3 where no token ratio is clipped
    (Jackpot Table 8; unbounded, a drawn mask may not train)."""
    obrs_topk: int = 20
    """K: how many of the engine's log-probabilities bound Z."""
    obrs_mask: Literal["bernoulli", "expected"] = "bernoulli"
    """Draw the mask, or weigh by its expectation."""
    obrs_mode: Literal["both", "mask", "reweight"] = "both"
    """Ablation: mask and reweight, or one of them."""
    obrs_target: Literal["ref", "new"] | None = None
    """Which policy the accepted tokens should follow (default ref)."""
    obrs_z: Literal["auto", "exact", "bracket", "approx"] = "auto"
    """Z: exact (two models, target ref), bracketed by the top-K, or the text's kappa Z_approx; auto: exact where
    possible."""
    kappa: Literal["auto", "exact"] = "auto"
    """Target new: the last update's kappa, or an extra forward for this update's own."""


@dataclass(frozen=True)
class ActorFlags:
    """The actor's own training (two models)"""

    actor_correction: str = "tis"
    """Weight of the actor's own PPO loss (F of Jackpot Eq. 6), by the ratio p_actor,ref / p_inf."""
    distill_lambda: float = 1.0
    """Weight of KL(policy || actor) in the actor's loss; 0: no distillation."""
    distill_direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(sg policy || actor), Jackpot Eq. 7; reverse: KL(actor || sg policy)."""
    distill_topk: int = 0
    """KL over the policy's top-k and one bucket for the rest; 0: the whole vocabulary."""
    distill_kl_target: float = 0.0
    """Closed loop: steer distill_lambda to hold the measured KL (nats a token) here; 0: fixed lambda."""


@dataclass(frozen=True)
class OptimizerFlags:
    """Optimisation"""

    lr: float | None = None
    """Policy learning rate (embedded models 1e-4)."""
    actor_lr: float | None = None
    """Actor learning rate (embedded models 3e-4)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: torch.optim.Muon on the matrices of the layers, AdamW on the rest, at the same learning rates
    (RMS-matched)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up."""
    warmup_steps: float = 5.0
    """Updates of linear warm-up; below 1 a share of --steps (0.03: 3 %, rounded up)."""
    adam_beta2: float = 0.999
    """AdamW: share of the second moment that is kept."""
    weight_decay: float = 0.0
    """Decoupled weight decay, of AdamW and Muon."""
    grad_clip: float = 0.3
    """Largest gradient norm, each model on its own."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Learner's compute type (embedded models float32); the 16-bit ones are autocast over float32 weights, float16
    with a loss scaler."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Wrapper under torchrun."""
    lora_rank: int = 0
    """LoRA (model/lora.py): learn corrections of this rank to frozen linear layers; 0: off, all weights learn."""
    lora_alpha: int = 32
    """LoRA: their scale is this over the rank."""


@dataclass(frozen=True)
class ReportFlags:
    """Evaluation, logging, checkpoints"""

    eval_every: int = 0
    """Held-out pass@1 every so many updates; 0: only before and after; -1: never (python eval.py --follow=RUN)."""
    eval_engine: Literal["own", "torch", "second"] = "own"
    """Who samples. own: the run's engine, roundings and all, for the model that it samples from, else plain torch;
    second: as own, but the policy of an actor has its own, which never sleeps; torch: plain torch, our own weights."""
    eval_problems: int = 512
    """Held-out problems."""
    eval_samples: int = 1
    """Responses to each of them, at temperature 1."""
    eval_task: str = ""
    """Held-out sets, as --task, with commas; each may have settings: a.jsonl,b.jsonl:samples=32:temperature=0.6:
    max_tokens=8192. arith has its own test split."""
    check_sync: bool = True
    """Check at every weight sync that the engine has the published weights (sync.py); False: for emergencies."""
    check_agreement: bool = True
    """Stop if on the first rollouts engine and learner, with the same weights, are different policies (learner.py)."""
    save_every: int = 50
    """Checkpoint every so many updates; 0: only at the end."""
    keep: int = 2
    """Checkpoints kept."""
    log_samples: int = 10
    """Every so many updates, four responses into samples.jsonl (python -m machinery.plot --samples=RUN); 0: never."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""
    wandb: str = ""
    """Also log to this wandb project."""


@dataclass(frozen=True)
class BaseModelFlags:
    """The embedded base models (machinery/warmstart.py)"""

    base_accuracy: float = 0.3
    """Sampled accuracy at which the warm start of embedded models stops."""
    actor_base_accuracy: float | None = None
    """The same for base:actor, where it should be weaker (or stronger) than base:policy."""


@dataclass(frozen=True)
class Config(
    RunFlags,
    SizeFlags,
    SamplingFlags,
    ObjectiveFlags,
    ObrsFlags,
    ActorFlags,
    OptimizerFlags,
    MemoryFlags,
    TaskFlags,
    PromptFlags,
    EngineFlags,
    PrecisionFlags,
    ReportFlags,
    DelayFlags,
    StalenessFlags,
    RemoteFlags,
    BaseModelFlags,
):
    """All flags of train.py."""

    # the flags that may be infinite
    UNBOUNDED = ("is_cap", "rs_high", "clip_high", "tbpo_neg_high", "obrs_c1", "obrs_c2")
    UNBOUNDED += ("grad_clip", "window_seconds", "give_up")


FIELDS = {f.name: f for f in fields(Config)}
# flags that a resumed run may change: they steer the process, not the training
HARMLESS = {
    *("resume", "overwrite", "out", "keep", "save_every", "log_samples", "check_agreement", "check_sync"),
    *("tensorboard", "wandb", "bind", "keys", "sync_path", "give_up", "parallel", "micro_tokens", "rollout_memory"),
    *("gradient_checkpointing", "offload", "rollout_sleep", "eval_every"),
}


# ---------------------------------------------------------------------------------------------------------------------
# From a command line to a configuration
# ---------------------------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None, n_ranks: int | None = None, installed: bool = True) -> Config:
    """The configuration of a command line, resolved. UserError: one sentence. Arguments as for `resolve`."""
    from_file, given = {}, {}
    for key, value in flags.read(Config, argv, "python train.py --key=value ...", also={"config"}):
        if key == "config":
            from_file.update(flags.read_toml(Config, value))
        else:
            given[key] = flags.convert(Config, key, value)
    need(not (given.get("epochs") and "steps" in given), "--epochs with --steps: both say how long; leave one out")
    if "steps" in given:  # over a file's epochs, and a file's steps are nothing beside epochs
        given["epochs"] = 0.0
    if given.get("epochs", from_file.get("epochs")):
        from_file.pop("steps", None)
    cfg = Config(**{**from_file, **given})
    if cfg.resume:
        cfg = resumed(cfg, set(given) | set(from_file))
    return resolve(cfg, n_ranks, installed)


def resumed(cfg: Config, given: set[str]) -> Config:
    """The saved configuration of the run in --out; flags given now must agree with it."""
    need(not cfg.overwrite, "--resume with --overwrite: one goes on, the other deletes; leave one of them out")
    path = Path(cfg.out) / "config.json"
    need(path.is_file(), f"--resume: {cfg.out} holds no run; start without --resume, or name its folder with --out")
    saved = saved_flags(path)
    of_steps = saved["lr_schedule"] != "constant" or 0 < saved["warmup_steps"] < 1  # the schedule depends on it
    free = HARMLESS | (set() if of_steps else {"steps", "epochs"})
    now = resolve_open(replace(cfg, resume=False))
    changed = [k for k in sorted(given - free) if getattr(now, k) != saved.get(k, FIELDS[k].default)]
    if changed:
        was = ", ".join(f"--{k} was {saved.get(k)!r} and is now {getattr(cfg, k)!r}" for k in changed)
        raise UserError(
            f"--resume with a changed configuration: {was}; give the old value, or start anew in another --out"
        )
    return Config(**{**saved, **{k: getattr(cfg, k) for k in given & free}, "resume": True, "overwrite": False})


def saved_flags(path: Path) -> dict:
    """The flags in a run's config.json. UserError if it is damaged, or not one of a run."""
    mend = "copy it from a backup, or start anew with --overwrite or in another --out"
    saved = flags.read_json(path, mend).get("config")
    need(isinstance(saved, dict) and "lr_schedule" in saved, f"--resume: {path} holds no flags of a run; {mend}")
    return {k: v if v is None else flags.of_toml(Config, str(path), k, v) for k, v in saved.items() if k in FIELDS}


# ---------------------------------------------------------------------------------------------------------------------
# Fill what is open, then check
# ---------------------------------------------------------------------------------------------------------------------


# what has a default for the embedded models alone, and what is proposed for others
EMBEDDED = {"task": "arith", "max_tokens": 32, "lr": 1e-4, "actor_lr": 3e-4, "dtype": "float32"}
EMBEDDED["rollout_dtype"] = "float32"
PROPOSED = {"task": "hf:openai/gsm8k@main/train", "max_tokens": 4096, "lr": 1e-6, "actor_lr": 1e-6, "dtype": "bfloat16"}


def resolve_open(cfg: Config) -> Config:
    """Fill what the objective decides and what bounds default to; no checks."""
    if cfg.model.startswith("base:"):
        cfg = fill(cfg, EMBEDDED)
    cfg = fill(cfg, {"rollout_dtype": cfg.dtype})
    cfg = fill(cfg, corrections.still_read(presets.OBJECTIVES.get(cfg.objective, {}), cfg))
    cfg = fill(cfg, presets.DEFAULTS)
    cfg = fill(cfg, objectives.default_bounds(cfg))
    if cfg.actor == "auto":
        cfg = replace(cfg, actor="base:actor" if cfg.model == "base:policy" else "none")
    if cfg.obrs_z == "auto":
        cfg = replace(cfg, obrs_z="exact" if corrections.exact_z_known(cfg) else "bracket")
    if cfg.actor == "none":  # nobody has that rate
        cfg = fill(cfg, {"actor_lr": EMBEDDED["actor_lr"]})
    if cfg.obrs_c2 is None:
        clipped = cfg.clip and cfg.surrogate in ("ppo", "cispo") and cfg.clip_high < float("inf")
        cfg = replace(cfg, obrs_c2=1.02 + cfg.clip_high if clipped else 3.0)
    return cfg


def fill(cfg: Config, values: dict) -> Config:
    """The configuration with those values where it has none yet."""
    return replace(cfg, **{k: v for k, v in values.items() if getattr(cfg, k) is None})


def resolve(cfg: Config, n_ranks: int | None = None, installed: bool = True) -> Config:
    """The configuration with nothing open, checked. UserError: one sentence naming flag and mend.

    n_ranks: default: as torchrun started them. installed: also check that this host has the engine and packages."""
    if n_ranks is None:
        n_ranks = flags.from_environment("WORLD_SIZE", 1)
    choice("objective", cfg.objective, list(presets.OBJECTIVES))
    cfg = resolve_open(cfg)
    missing = [f"--{flag}={value}" for flag, value in PROPOSED.items() if getattr(cfg, flag) is None]
    cfg = fill(cfg, EMBEDDED)
    for key, kind in flags.types_of(Config).items():
        flags.check_word(key, getattr(cfg, key), kind)
    check_sizes(cfg, n_ranks)
    sampling.check(cfg)
    sampling.check_with_actor(cfg)
    quant.check(cfg)
    delay.check(cfg)
    delay.check_remote(cfg)
    objectives.check(cfg)
    check_models(cfg)
    lora.check(cfg)
    exact.check(cfg)
    check_named(cfg.model, missing)
    tasks.check(cfg)
    if installed:
        check_packages(cfg, n_ranks)
    else:
        check_tensor_parallel(cfg, n_ranks)
    alone = cfg.eval_engine == "second" and cfg.actor == "none"
    need(not alone, "--eval_engine=second: the policy samples for itself, and its engine evaluates; leave the flag out")
    return cfg


def check_named(model: str, missing: list[str]) -> None:
    """UserError where flags without a default are missing; each as it is proposed."""
    need(
        not missing,
        f"--model={model}: a model of your own has no default of some flags; name them, for instance "
        f"{' '.join(missing)}",
    )


def check_sizes(cfg: Config, n_ranks: int) -> None:
    """Counts, rates and how batches divide among groups and ranks."""
    counts = ("steps", "rollout_batch", "train_batch", "group_size", "max_tokens", "micro_tokens", "eval_problems")
    for name in (*counts, "eval_samples", "keep"):
        need(getattr(cfg, name) >= 1, f"--{name}={getattr(cfg, name)}: must be at least 1")
    for name in ("lr", "actor_lr", "grad_clip"):
        need(getattr(cfg, name) > 0, f"--{name}={getattr(cfg, name)}: must be above 0")
    need(cfg.eval_every >= -1, f"--eval_every={cfg.eval_every}: a number of updates, 0 for before and after, or -1")
    schedule = ("warmup_steps", "save_every", "log_samples")
    schedule += ("epochs", "dynamic_sampling")
    for name in (*schedule, "weight_decay", "distill_kl_target"):
        need(getattr(cfg, name) >= 0, f"--{name}={getattr(cfg, name)}: must not be negative")
    warmup, whole = cfg.warmup_steps, cfg.warmup_steps == int(cfg.warmup_steps)
    need(warmup < 1 or whole, f"--warmup_steps={warmup}: a whole number of updates, or a share of --steps below 1")
    need(0 <= cfg.adam_beta2 < 1, f"--adam_beta2={cfg.adam_beta2}: must lie in [0, 1)")
    need(cfg.group_size >= 2, f"--group_size={cfg.group_size}: an advantage needs at least 2 responses a prompt")
    need(
        cfg.train_batch % (cfg.group_size * n_ranks) == 0,
        f"--train_batch={cfg.train_batch}: not divisible by --group_size={cfg.group_size} times {n_ranks} rank(s); "
        "each rank trains on whole groups",
    )
    need(
        cfg.rollout_batch % cfg.train_batch == 0,
        f"--rollout_batch={cfg.rollout_batch}: not a multiple of --train_batch={cfg.train_batch}",
    )


def check_models(cfg: Config) -> None:
    """Model folders, and the accuracy of embedded base models."""
    for name in ("base_accuracy", "actor_base_accuracy"):
        value = getattr(cfg, name)
        need(value is None or 0 < value < 1, f"--{name}={value}: a share between 0 and 1")
    for flag, value in (("model", cfg.model), ("actor", cfg.actor)):
        if value.startswith("base:"):
            choice(flag, value, ["base:policy", "base:actor"])
            need(cfg.task == "arith", f"--{flag}={value} knows only --task=arith; give a model's folder for {cfg.task}")
        elif value != "none" or flag == "model":
            need(
                flags.names_model(value),
                f"--{flag}={value}: no Hugging Face model folder (no config.json there); give one as save_pretrained "
                "writes it, or base:policy",
            )


def check_engine(cfg, n_ranks: int = 1) -> None:
    """UserError unless the engine of the flags (train.py's, eval.py's, a sampler's) can be started here."""
    memory = f"--rollout_memory={cfg.rollout_memory}"
    need(cfg.rollout_memory >= 0, f"{memory}: must not be negative; 0 sizes it by the batch")
    check_tensor_parallel(cfg, n_ranks)
    check_kv_cache(cfg)
    if cfg.rollout != "vllm":
        return
    need(
        importlib.util.find_spec("vllm") is not None,
        "--rollout=vllm: vLLM is not installed here; install it (make demo does), or use --rollout=hf",
    )
    if torch.cuda.is_available():
        need(cfg.rollout_memory <= 1, f"{memory}: on a GPU a share of its memory, at most 1")
    else:
        here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        need(cfg.rollout_memory < here, f"{memory}: GiB on a CPU, and this host has {here:.0f}; name fewer")


def check_tensor_parallel(cfg, n_ranks: int) -> None:
    """Whether so many ranks can be one engine."""
    flag = f"--rollout_tp={cfg.rollout_tp}"
    need(cfg.rollout_tp >= 1, f"{flag}: must be at least 1")
    if cfg.rollout_tp == 1:
        return
    need(cfg.rollout == "vllm", f"{flag}: --rollout={cfg.rollout} has an engine on each rank; use --rollout=vllm")
    need(
        n_ranks % cfg.rollout_tp == 0,
        f"{flag}: so many neighbouring ranks are one engine, and {n_ranks} rank(s) cannot be divided into such; start "
        "a multiple with torchrun --nproc_per_node",
    )
    unequal = getattr(cfg, "delay", "none") != "none" and cfg.dynamic_sampling
    need(not unequal, f"{flag}: with --delay and --dynamic_sampling its ranks need unequal weights; leave one out")


def check_kv_cache(cfg) -> None:
    """Whether the engine has a cache of 8 bits."""
    flag = f"--kv_cache_dtype={cfg.kv_cache_dtype}"
    if cfg.kv_cache_dtype == "auto":
        return
    engine = {"fp8": "vllm", "int8": "hf"}[cfg.kv_cache_dtype]
    need(cfg.rollout == engine, f"{flag}: --rollout={cfg.rollout} has no such cache; use --rollout={engine}, or auto")
    need(
        engine == "hf" or torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability() == "AVX512",
        f"{flag}: on a CPU vLLM has this cache with AVX-512 alone, and this one is without; use auto",
    )


def check_packages(cfg: Config, n_ranks: int) -> None:
    """What the flags need to be installed."""
    if cfg.samplers == "local":
        check_engine(cfg, n_ranks)
        quant.check_routing(cfg)
    found = not cfg.wandb or importlib.util.find_spec("wandb") is not None
    need(found, f"--wandb={cfg.wandb}: wandb is not installed; pip install wandb, or leave the flag out")
