"""Every flag of train.py: its default, its choices, one sentence; then what must hold between them.

    python train.py --config=configs/x.toml --key=value

A TOML file sets any flag, the command line wins, and `--objective` fills what neither names
(objectives.OBJECTIVES). `resolve` returns the configuration with nothing left open, or raises UserError with one
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
import flags
import objectives
import quant
import sampling
import tasks
from delay import DelayFlags, StalenessFlags
from flags import UserError, choice, need
from sampling import Sampling

# ---------------------------------------------------------------------------------------------------------------------
# The flags, in groups; --help shows them in the order of `Config`'s bases
# ---------------------------------------------------------------------------------------------------------------------

Quant = Literal["none", "int8", "fp8", "w4a16", "w3a16", "w2a16"]
LearnerQuant = Literal["none", "aligned", "int8", "fp8", "w4a16", "w3a16", "w2a16"]


@dataclass(frozen=True)
class RunFlags:
    """What is trained, by whose rollouts, and where it goes"""

    objective: str = "jackpot"
    """Preset over correction and surrogate: none, tis, jackpot, ppo_is, gspo, ... (objectives.OBJECTIVES)."""
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
    """Delete what stands in --out and start anew."""
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
    micro_tokens: int = 4096
    """Token budget (prompt and response) of one micro-batch on one rank."""


@dataclass(frozen=True)
class TaskFlags:
    """The task"""

    task: str = "arith"
    """arith (generated sums), or a JSONL file with problem/question and answer."""
    task_min_ops: int = 3
    """arith: fewest operations in a problem."""
    task_max_ops: int = 5
    """arith: most operations; a response has about 6 tokens for each."""
    task_operand: int = 9
    """arith: largest operand."""
    task_total: int = 29
    """arith: largest running total (up to 199)."""
    task_explain: int = 0
    """arith: reward up to so many tokens of explanation behind a right answer with up to 1 more (long responses);
    0: none."""
    task_seed: int = 0
    """Seed of the problems."""
    answer: Literal["boxed", "last"] = "boxed"
    """A file's answers: what counts of a response, its last \\boxed{} alone, or else its last expression."""
    grade_seconds: float = 5.0
    """Seconds of a processor that an answer may take to be graded; one that takes longer earns 0."""


@dataclass(frozen=True)
class SamplingFlags:
    """Sampling"""

    max_tokens: int = 32
    """Longest response."""
    stop: str = ""
    """Tokens that end a response, with commas, beside the tokenizer's own end and those of generation_config.json."""
    temperature: float = 1.0
    """Sampling temperature; the learner scores with it too."""
    top_p: float = 1.0
    """Rollouts keep the smallest set of most likely tokens with at least this mass; 1: all."""
    top_k: int = 0
    """Rollouts keep the k most likely tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Rollouts keep tokens with at least this share of the most likely one's probability; 0: all."""
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """Log-probabilities the engine returns: of the distribution it samples from, or raw, of the model before
    temperature and truncation (biased)."""
    keep_sampling_mask: Literal["off", "recompute", "replay"] = "replay"
    """What the learner scores where rollouts truncate: the whole vocabulary, its own cut, or the rollout's own
    sets of allowed tokens (sampling.py)."""
    kept_max: int = 256
    """Largest set of allowed tokens that is recorded where top_p or min_p alone truncate (vLLM returns as many)."""


@dataclass(frozen=True)
class EngineFlags:
    """The rollout engine"""

    rollout: Literal["vllm", "hf"] = "vllm"
    """Rollout engine: vLLM in process, or a sampler in plain torch."""
    rollout_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Engine's precision."""
    rollout_memory: float = 0.25
    """Engine's memory: GiB of KV cache on CPU, share of the GPU on CUDA."""


@dataclass(frozen=True)
class PrecisionFlags:
    """Precision on both sides"""

    lm_head_fp32: bool = False
    """Compute the language-model head in float32 on both sides, above bodies of less."""
    rollout_quant: Quant = "none"
    """Low-bit rollouts (quant.py): the engine's linear layers in this format."""
    learner_quant: LearnerQuant = "none"
    """aligned: the learner's copy of the model that samples computes on the engine's low-bit numbers (QaRL);
    a format: whatever the engine does."""
    quant_group: int = 64
    """Columns that share a scale in w4a16 and its like."""
    router_replay: bool = False
    """Mixtures of experts: the learner sends each token to the experts that the engine (--rollout=hf) chose."""


@dataclass(frozen=True)
class ObjectiveFlags:
    """The objective: one correction times one surrogate (open: filled from --objective)"""

    correction: str | None = None
    """Weight and keep-mask per token (corrections.CORRECTIONS); auto: that of corrections.CHOICES worth most."""
    surrogate: str | None = None
    """How the policy moves on the advantage (objectives.SURROGATES)."""
    ratio_base: Literal["ref", "inf", "new", "group"] | None = None
    """Denominator of the surrogate's ratio; group: the expectation over the group's responses (corrections.py)."""
    advantage: Literal["grpo", "grpo_no_std", "rloo"] | None = None
    """Advantage within a group (default grpo)."""
    reduction: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None = None
    """How (B, T) becomes a number; one denominator over all ranks and micro-batches."""
    clip: bool = True
    """PPO clip on or off."""
    clip_low: float | None = None
    """eps_low (default 0.2; gspo 3e-4)."""
    clip_high: float | None = None
    """eps_high (default 0.28; gspo 4e-4)."""
    dual_clip: float = 0.0
    """Dual-clip constant c for negative advantages (3 is usual); 0: off."""
    is_cap: float | Literal["auto"] | None = None
    """C: cap of importance weights (default by correction: tis 2, seq_tis 4, prefix_tis 1, ...); auto: that of
    corrections.CAPS worth most."""
    auto_every: int = 25
    """Updates from one measurement of worth, and choice, by auto to the next (worth.Chooser)."""
    is_floor: float = 0.0
    """Lower bound of capped weights; 0: none (tbpo_mismatch: 1 / C)."""
    reject: str | None = None
    """Drop tokens or whole responses by a statistic of r, on top of a correction that only weighs
    (corrections.REJECTIONS; default none)."""
    reject_of: Literal["all", "negative"] | None = None
    """Whom --reject may drop: all (the default), or only what has a negative advantage."""
    rs_low: float | None = None
    """Lower bound of what --reject and rejecting corrections keep."""
    rs_high: float | None = None
    """Upper bound of what --reject and rejecting corrections keep."""
    veto: float = 0.0
    """Drop a response in which one token has r below this (1e-4 is usual); 0: off."""
    log_ratio_clamp: float = 20.0
    """Log-ratios are clamped to +- this before exp; sequence sums after summing."""
    loss_denominator: Literal["proposed", "kept"] = "proposed"
    """Do rejected tokens count in the denominator?"""
    positive_only: bool = False
    """Train on positive advantages alone."""
    allow_double_correction: bool = False
    """Let a correction stand on top of a surrogate that already corrects (ratio_base inf)."""
    tbpo_neg_high: float = 7e-4
    """tbpo: upper edge of the band of negative advantages."""
    tbpo_cap: Literal["clip", "mask"] = "clip"
    """tbpo_mismatch: cap the weight of a response that is outside [1/C, C], or drop the response."""
    gepo_expectation: Literal["weighted", "mean"] = "weighted"
    """ratio_base group: sum q^2 / sum q (GEPO Eq. 11), or the mean of q."""
    gepo_defence: float = 0.0
    """c of GEPO's defensive mixing, e = clip(c Var q, 0, 0.99) (the text names no value); 0: off."""
    cppo_beta: float = 0.0
    """Weight of the CPPO-KL between new and inf (0.005 in HeteroRL under delay); 0: off."""
    cppo_kl: Literal["official", "k3"] = "official"
    """Which estimator: the released code's (no KL under samples of inf), or k3 of KL(inf || new)."""


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
    """F of the actor's own PPO loss, on p_actor,ref / p_inf."""
    actor_is_cap: float | None = None
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


@dataclass(frozen=True)
class OptimizerFlags:
    """Optimisation"""

    lr: float = 1e-4
    """Policy learning rate."""
    actor_lr: float = 3e-4
    """Actor learning rate."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: torch.optim.Muon on the matrices of the layers, AdamW on the rest, at the same learning rates
    (RMS-matched)."""
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
    guard: Literal["off", "stop", "mend"] = "off"
    """What to do where the first tenth is above --guard_kl (results/collapse.md); mend: half the learning rates."""
    guard_kl: float = 0.03
    """Guard: largest mean KL(inf, new) of the first tenth, nats a token."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Learner's compute type; bfloat16 is autocast over float32 weights."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Wrapper under torchrun."""


@dataclass(frozen=True)
class ReportFlags:
    """Evaluation, logging, checkpoints"""

    eval_every: int = 0
    """Held-out pass@1 every so many updates; 0: only before and after."""
    eval_problems: int = 512
    """Held-out problems."""
    eval_samples: int = 1
    """Responses to each of them, at temperature 1."""
    eval_task: str = ""
    """JSONL file of held-out problems; arith has its own test split."""
    check_agreement: bool = True
    """Stop if on the first rollouts engine and learner, with the same weights, are different policies (sync.py)."""
    advantage_error_every: int = 0
    """Every so many updates, |mean(w A) - mean A of fresh samples of the policy| (GEPO 6c); costly; 0: never."""
    save_every: int = 50
    """Checkpoint every so many updates; 0: only at the end."""
    keep: int = 2
    """Checkpoints kept."""
    log_samples: int = 10
    """Every so many updates, four responses whole into samples.jsonl (python plot.py --samples=RUN); 0: never."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""
    wandb: str = ""
    """Also log to this wandb project."""


@dataclass(frozen=True)
class RemoteFlags:
    """Samplers on other machines (remote/)"""

    samplers: Literal["local", "zmq", "files"] = "local"
    """local: an engine in this process; zmq, files: samplers anywhere, over ZeroMQ or a shared folder
    (python rollout.py --connect=...)."""
    bind: str = "tcp://127.0.0.1:5555"
    """zmq: where to listen; rank r takes the port r higher. tcp://*:5555 for other hosts, with --keys."""
    keys: str = "none"
    """zmq: the learner's folder of keys (python -m remote.keys OUT --samplers=N); none: in the clear, on this host
    only."""
    sync_path: str = ""
    """files: the shared folder."""
    sync_dtype: Literal["float32", "bfloat16", "quantized"] = "float32"
    """Weights on the wire; quantized: in --rollout_quant's format, as the learner's aligned forward has them."""
    give_up: float = 3600.0
    """Stop, with a sentence, after so many seconds without a group from any sampler."""


@dataclass(frozen=True)
class BaseModelFlags:
    """The embedded base models (warmstart.py)"""

    base_dir: str = "out/base"
    """Where embedded base models are kept."""
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
    TaskFlags,
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
    UNBOUNDED = ("is_cap", "actor_is_cap", "rs_high", "clip_high", "tbpo_neg_high", "obrs_c1", "obrs_c2")
    UNBOUNDED += ("grad_clip", "window_seconds", "give_up")


FIELDS = {f.name: f for f in fields(Config)}
# flags that a resumed run may change: they steer the process, not the training
HARMLESS = {
    *("resume", "overwrite", "keep", "save_every", "log_samples", "check_agreement", "tensorboard", "wandb", "out"),
    *("bind", "keys", "sync_path", "give_up"),
}


# ---------------------------------------------------------------------------------------------------------------------
# From a command line to a configuration
# ---------------------------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> Config:
    """The configuration of a command line, resolved. UserError: one sentence."""
    from_file, given, names = {}, {}, set()
    for key, value in flags.read(Config, argv, "python train.py --key=value ...", also={"config", *flags.FOREIGN}):
        if key == "config":
            from_file.update(flags.read_toml(Config, value))
            continue
        names.add(key)
        for name, text in flags.ours(key, value).items():
            given[name] = flags.convert(Config, name, text)
    given |= flags.bounds_of_verl(given, names)
    cfg = Config(**{**from_file, **given})
    if cfg.resume:
        cfg = resumed(cfg, set(given) | set(from_file))
    return resolve(cfg)


def resumed(cfg: Config, given: set[str]) -> Config:
    """The saved configuration of the run in --out; flags given now must agree with it."""
    need(not cfg.overwrite, "--resume with --overwrite: one goes on, the other deletes; leave one of them out")
    path = Path(cfg.out) / "config.json"
    need(
        path.is_file(),
        f"--resume: {cfg.out} holds no run; start one without --resume, or name its folder with --out",
    )
    saved = saved_flags(path)
    free = HARMLESS | ({"steps"} if saved["lr_schedule"] == "constant" else set())
    now = resolve_open(replace(cfg, resume=False))
    changed = [k for k in sorted(given - free) if getattr(now, k) != saved.get(k, FIELDS[k].default)]
    if changed:
        was = ", ".join(f"--{k} was {saved.get(k)!r} and is now {getattr(cfg, k)!r}" for k in changed)
        raise UserError(
            f"--resume with a changed configuration: {was}; give the old value, or start anew in another --out"
        )
    changeable = {k: getattr(cfg, k) for k in given & free}
    return Config(**{**saved, **changeable, "resume": True, "overwrite": False})


def saved_flags(path: Path) -> dict:
    """The flags in a run's config.json. UserError if it is damaged, or not one of a run."""
    mend = "copy it from a backup, or start anew with --overwrite or in another --out"
    saved = flags.read_json(path, mend).get("config")
    need(isinstance(saved, dict) and "lr_schedule" in saved, f"--resume: {path} holds no flags of a run; {mend}")
    return {k: v if v is None else flags.of_toml(Config, str(path), k, v) for k, v in saved.items() if k in FIELDS}


# ---------------------------------------------------------------------------------------------------------------------
# Fill what is open, then check
# ---------------------------------------------------------------------------------------------------------------------


def resolve_open(cfg: Config) -> Config:
    """Fill what the objective decides and what bounds default to; no checks."""
    cfg = fill(cfg, objectives.OBJECTIVES.get(cfg.objective, {}))
    cfg = fill(cfg, objectives.DEFAULTS)
    cfg = fill(cfg, objectives.default_bounds(cfg))
    if cfg.actor == "auto":
        cfg = replace(cfg, actor="base:actor" if cfg.model == "base:policy" else "none")
    if cfg.obrs_z == "auto":
        cfg = replace(cfg, obrs_z="exact" if corrections.exact_z_known(cfg) else "bracket")
    if cfg.obrs_c2 is None:
        clipped = cfg.clip and cfg.surrogate in ("ppo", "cispo")
        cfg = replace(cfg, obrs_c2=1.02 + cfg.clip_high if clipped else 3.0)
    return cfg


def fill(cfg: Config, values: dict) -> Config:
    """The configuration with those values where it has none yet."""
    return replace(cfg, **{k: v for k, v in values.items() if getattr(cfg, k) is None})


def resolve(cfg: Config, n_ranks: int | None = None) -> Config:
    """The configuration with nothing open, checked. UserError: one sentence naming flag and mend."""
    n_ranks = flags.from_environment("WORLD_SIZE", 1) if n_ranks is None else n_ranks
    choice("objective", cfg.objective, list(objectives.OBJECTIVES))
    cfg = resolve_open(cfg)
    for key, kind in flags.types_of(Config).items():
        flags.check_word(key, getattr(cfg, key), kind)
    check_sizes(cfg, n_ranks)
    sampling.check(cfg)
    check_sampling_with_an_actor(cfg)
    quant.check(cfg)
    delay.check(cfg)
    check_remote(cfg)
    for one in corrections.candidates(cfg).values():
        objectives.check(one)
    check_models(cfg)
    tasks.check(cfg)
    check_packages(cfg)
    return cfg


def check_sizes(cfg: Config, n_ranks: int) -> None:
    """Counts, rates and how batches divide among groups and ranks."""
    counts = ("steps", "rollout_batch", "train_batch", "group_size", "max_tokens", "micro_tokens", "eval_problems")
    for name in (*counts, "eval_samples", "max_skips", "keep", "auto_every"):
        need(getattr(cfg, name) >= 1, f"--{name}={getattr(cfg, name)}: must be at least 1")
    for name in ("lr", "actor_lr", "grad_clip", "distill_lambda_max", "guard_kl"):
        need(getattr(cfg, name) > 0, f"--{name}={getattr(cfg, name)}: must be above 0")
    schedule = ("warmup_steps", "save_every", "eval_every", "log_samples", "advantage_error_every")
    for name in (*schedule, "weight_decay", "adam_eps", "distill_kl_target", "distill_gain"):
        need(getattr(cfg, name) >= 0, f"--{name}={getattr(cfg, name)}: must not be negative")
    for name in ("adam_beta1", "adam_beta2"):
        need(0 <= getattr(cfg, name) < 1, f"--{name}={getattr(cfg, name)}: must lie in [0, 1)")
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


def check_sampling_with_an_actor(cfg: Config) -> None:
    cut_by_itself = Sampling.of(cfg).truncates and cfg.keep_sampling_mask == "recompute"
    need(
        not (cut_by_itself and cfg.actor != "none"),
        "--keep_sampling_mask=recompute with an --actor: the KL between two cut distributions is infinite; use replay",
    )


def check_remote(cfg: Config) -> None:
    """Samplers on other machines, and the weights that travel to them."""
    remote = cfg.samplers != "local"
    need(cfg.give_up > 0, f"--give_up={cfg.give_up}: must be above 0")
    need(cfg.samplers != "files" or cfg.sync_path.strip(), "--samplers=files: name the folder with --sync_path")
    need(
        cfg.samplers != "zmq" or cfg.bind.startswith(("tcp://", "ipc://")),
        f"--bind={cfg.bind}: not an address; write tcp://HOST:PORT",
    )
    need(
        cfg.samplers != "zmq" or cfg.keys != "none" or cfg.bind.startswith(("tcp://127.0.0.1:", "ipc://")),
        f"--bind={cfg.bind}: for other hosts --keys are needed (python -m remote.keys OUT --samplers=N makes them), "
        "or listen on tcp://127.0.0.1:PORT",
    )
    need(
        cfg.sync_dtype != "quantized" or cfg.rollout_quant not in ("none", "w3a16", "w2a16"),
        f"--sync_dtype=quantized: --rollout_quant={cfg.rollout_quant} is no format that engines load; use int8, fp8 or "
        "w4a16, or --sync_dtype=float32",
    )
    need(
        not (remote and cfg.learner_quant == "aligned" and cfg.sync_dtype == "bfloat16"),
        "--sync_dtype=bfloat16: an engine that quantizes rounded weights has other low-bit numbers than "
        "--learner_quant=aligned; use --sync_dtype=float32 or quantized",
    )


def check_models(cfg: Config) -> None:
    """Model folders, and the accuracy of embedded base models."""
    for name in ("base_accuracy", "actor_base_accuracy"):
        value = getattr(cfg, name)
        need(value is None or 0 < value < 1, f"--{name}={value}: a share between 0 and 1")
    need(cfg.base_dir.strip(), "--base_dir is empty: name a folder, such as out/base")
    for flag, value in (("model", cfg.model), ("actor", cfg.actor)):
        if value.startswith("base:"):
            choice(flag, value, ["base:policy", "base:actor"])
            need(
                cfg.task == "arith",
                f"--{flag}={value} knows only --task=arith; give the folder of a model for {cfg.task}",
            )
        elif value != "none" or flag == "model":
            need(
                flags.names_model(value),
                f"--{flag}={value}: no Hugging Face model folder (no config.json there); give one as save_pretrained "
                "writes it, or base:policy",
            )


def check_engine(cfg) -> None:
    """UserError unless the engine of the flags (train.py's, eval.py's, a sampler's) can be started here."""
    memory = f"--rollout_memory={cfg.rollout_memory}"
    need(cfg.rollout_memory > 0, f"{memory}: must be above 0")
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


def check_packages(cfg: Config) -> None:
    """What the flags need to be installed."""
    if cfg.samplers == "local":
        check_engine(cfg)
    if cfg.wandb:
        need(
            importlib.util.find_spec("wandb") is not None,
            f"--wandb={cfg.wandb}: wandb is not installed; pip install wandb, or leave the flag out",
        )
