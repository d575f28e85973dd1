"""The flags of train.py, in groups: name, type, default, and one sentence that --help prints.

python train.py --config=configs/x.toml --key=value

A function that reads flags names the smallest group that has them: `def check(cfg: ObrsFlags)`.
Flags with the default None are open: `--objective` fills them (presets.py), then
machinery/settings.py. That file also reads command lines and TOML files, and runs the checks that
concern several concepts. The file of each concept checks its flags."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFlags:
    """Models, objective, run folder"""

    objective: str = "jackpot"
    """Preset over correction and surrogate: none, tis, jackpot, ppo_is, gspo, ...
    (presets.OBJECTIVES)."""
    model: str = "base:policy"
    """Policy: a Hugging Face folder, an id of its hub, or base:policy for the embedded model, made
    on first use with an accuracy of 30 % (base:policy@0.2: of 20 %)."""
    actor: str = "auto"
    """Rollout model: a folder or id, base:actor, or none (the policy samples for itself);
    auto: base:actor if the policy is base:policy, else none."""
    out: str = "out/run"
    """Run folder: config, metrics.jsonl, checkpoints, plot."""
    resume: bool = False
    """Continue the run in --out from its newest checkpoint."""
    overwrite: bool = False
    """Delete the files that a run wrote in --out, no others, and start from scratch."""


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
    """Passes over the problems of --task, in groups that are trained on; in place of --steps; 0:
    --steps counts."""
    dynamic_sampling: int = 0
    """Resample groups in which all responses earn the same reward (DAPO): maximum number of
    sampling rounds of a batch, the first included; no limit with remote samplers; 0: off."""
    micro_tokens: int = 4096
    """Token budget (prompt and response) of one micro-batch on one rank."""


# ---------------------------------------------------------------------------------------------------------------------
# The objective
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObjectiveFlags:
    """The objective: one correction times one surrogate (open: filled from --objective)"""

    correction: str | None = None
    """Weight and keep-mask per token (corrections.CORRECTIONS)."""
    surrogate: str | None = None
    """How the policy moves on the advantage (objectives.SURROGATES)."""
    ratio_base: Literal["ref", "inf", "new", "group"] | None = None
    """Denominator of the surrogate's ratio; group: the expectation over the group's responses
    (corrections.py)."""
    ref_from: Literal["pass", "loglinear"] = "pass"
    """p_ref of several updates a batch: a pass before them, or between p_inf and p_new by age
    (corrections.py)."""
    advantage: Literal["grpo", "grpo_no_std", "rloo", "maxrl"] | None = None
    """Advantage within a group (default grpo)."""
    reduction: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None = None
    """How (B, T) becomes a number; one denominator over all ranks and micro-batches."""
    clip: bool = True
    """PPO clip on or off."""
    clip_low: float | None = None
    """eps_low (default 0.2; gspo and tbpo 3e-4, gmpo 0.4 of log r, dppo_tv 0.2 and dppo_kl 0.05 of
    a divergence)."""
    clip_high: float | None = None
    """eps_high (default 0.28; gspo and tbpo 4e-4; gmpo, dppo_tv and dppo_kl as --clip_low)."""
    dual_clip: float = 0.0
    """Dual-clip constant c for negative advantages (3 is usual); 0: off."""
    correction_target: Literal["ref", "new"] | None = None
    """Which policy stands above inf in weights and statistics: ref (the default), or new, as it is
    in the update."""
    normalize_weights: bool = False
    """Divide weights by their mean over the update's batch, on all ranks: self-normalised
    importance sampling."""
    is_cap: float | None = None
    """C: cap of importance weights (default by correction: tis 2, seq_tis 4, prefix_tis 1, ...)."""
    is_floor: float = 0.0
    """Lower bound of capped weights; 0: none (tbpo_mismatch: 1 / C)."""
    reject: str | None = None
    """Drop tokens or responses by a statistic of r, on top of a correction that only weighs
    (corrections.REJECTIONS; default none); several with their bounds:
    token:0.5:5,seq_max_k2:0:0.1."""
    reject_of: Literal["all", "negative"] | None = None
    """Responses that --reject may drop: all (the default), or only those with a negative
    advantage."""
    rs_low: float | None = None
    """Lower bound of the statistic below which --reject and rejecting corrections drop."""
    rs_high: float | None = None
    """Upper bound of the statistic above which --reject and rejecting corrections drop."""
    log_ratio_clamp: float = 20.0
    """Log-ratios are clamped to +- this before exp; sequence sums after summing."""
    mask_cut: bool = False
    """Leave responses that were cut at --max_tokens out of the loss and its denominator (DAPO's
    overlong filtering); their rewards still count in the advantages."""
    loss_denominator: Literal["proposed", "kept"] = "proposed"
    """Do rejected tokens count in the denominator?"""
    positive_only: bool = False
    """Train only on positive advantages (QaRL, Figure 8)."""
    tbpo_neg_high: float = 7e-4
    """tbpo: upper edge of the band of negative advantages."""
    gepo_expectation: Literal["weighted", "mean"] = "weighted"
    """ratio_base group: sum q^2 / sum q (GEPO Eq. 11), or the mean of q."""
    gepo_defence: float = 0.0
    """c of GEPO's defensive mixing, e = clip(c Var q, 0, 0.99) (the text names no value); 0:
    off."""
    cppo_beta: float | None = None
    """Weight of a KL between new and inf (CPPO: 0.005 in HeteroRL under delay); 0, the default:
    off."""
    cppo_kl: Literal["official", "k2", "k3"] | None = None
    """Its estimator: the released code's (the default; under samples of inf no KL), prime-rl's k2,
    or k3."""
    kl_coef: float = 0.0
    """Weight of the KL from the policy to the frozen model that the run started from; 0: off, and
    none is loaded."""
    kl_estimator: Literal["k2", "k3"] = "k2"
    """Its estimate from the sampled tokens (objectives.kl_estimate)."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus, in nats of the distribution that is scored; 0: off."""


@dataclass(frozen=True)
class ObrsFlags:
    """OBRS, Jackpot's correction (obrs.py)"""

    obrs_lambda: float = 1.0
    """lambda: acceptance is min(1, p_tgt / (lambda p_inf))."""
    obrs_accept_rate: float | None = None
    """Budget: choose lambda at each update so that this share is accepted; Z is then bracketed by
    the top-K."""
    obrs_c1: float = 3.0
    """c1: cap of the OBRS weight."""
    obrs_c2: float | None = None
    """c2: cap of p_ref / p_tgt (target new); default a little over 1 + eps_high, 3 where no token
    ratio is clipped (Jackpot Table 8; unbounded, a drawn mask may not train)."""
    obrs_topk: int = 20
    """K: how many of the engine's log-probabilities bound Z."""
    obrs_mask: Literal["bernoulli", "expected"] = "bernoulli"
    """Draw the mask, or weigh by its expectation."""
    obrs_mode: Literal["both", "mask", "reweight"] = "both"
    """Ablation: mask and reweight, or one of them."""
    obrs_target: Literal["ref", "new"] | None = None
    """Which policy the accepted tokens should follow (default ref)."""
    obrs_z: Literal["auto", "exact", "bracket", "approx"] = "auto"
    """Z: exact (two models, target ref), bracketed by the top-K, or the text's kappa Z_approx;
    auto: exact where possible."""
    kappa: Literal["auto", "exact"] = "auto"
    """Target new: the last update's kappa, or an extra forward for this update's own."""


@dataclass(frozen=True)
class ActorFlags:
    """The actor's own training (two models)"""

    distill_lambda: float = 1.0
    """Weight of KL(policy || actor) in the actor's loss; 0: no distillation."""
    distill_direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(sg policy || actor), Jackpot Eq. 7; reverse: KL(actor || sg policy)."""
    distill_kl_target: float = 0.0
    """Closed loop: steer distill_lambda to hold the measured KL (nats a token) here; 0: fixed
    lambda."""


@dataclass(frozen=True)
class LossFlags(ObjectiveFlags, ObrsFlags, ActorFlags):
    """All that a loss is made of"""


# ---------------------------------------------------------------------------------------------------------------------
# Rollouts: where the mismatch comes from
# ---------------------------------------------------------------------------------------------------------------------


Quant = Literal["none", "int8", "fp8", "w4a16", "w3a16", "w2a16"]
LearnerQuant = Literal["none", "aligned", "int8", "fp8", "w4a16", "w3a16", "w2a16"]


COLDEST = 0.01  # lowest temperature above 0: vLLM takes a lower one for this one, and is silent


@dataclass(frozen=True)
class SamplingFlags:
    """Sampling"""

    max_tokens: int | None = None
    """Longest response (embedded models 32)."""
    stop: str = ""
    """More tokens that end a response, with commas; the ends of tokenizer and
    generation_config.json always count."""
    temperature: float = 1.0
    """Sampling temperature; the learner scores with it too."""
    top_p: float = 1.0
    """Rollouts keep the smallest set of most likely tokens with at least this mass; 1: all."""
    top_k: int = 0
    """Rollouts keep the k most likely tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Rollouts keep tokens with at least this share of the most likely one's probability; 0:
    all."""
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """Log-probabilities the engine returns: of the distribution it samples from, or raw, of the
    model before temperature and truncation (biased)."""
    keep_sampling_mask: Literal["off", "recompute", "replay"] = "replay"
    """Scoring of truncated rollouts. off: over the whole vocabulary; recompute: over the learner's
    truncation; replay: over the sets of allowed tokens that the rollout recorded (sampling.py)."""
    seed: int = 0
    """Seed of sampling and masks."""


@dataclass(frozen=True)
class EngineFlags:
    """The rollout engine"""

    rollout: Literal["vllm", "hf"] = "vllm"
    """Rollout engine: vLLM in process, or a sampler in plain torch."""
    rollout_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Engine's precision; default: the learner's --dtype, float32 for embedded models; eval.py: the
    checkpoint's own."""
    rollout_memory: float = 0.0
    """Engine's memory: GiB of KV cache on CPU, share of the GPU on CUDA; 0: enough for a rollout
    batch, or 0.25."""
    rollout_tp: int = 1
    """vLLM under torchrun: tensor-parallel size, the number of neighbouring ranks that form one
    engine."""
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto"
    """The engine's keys and values. In 8 bits, a mismatch that the learner does not share: fp8,
    vLLM's (Jackpot, Table 2b); int8, the plain sampler's (--rollout=hf). auto: in
    --rollout_dtype."""


@dataclass(frozen=True)
class PrecisionFlags:
    """Precision on both sides"""

    lm_head_fp32: bool = False
    """Compute the language-model head in float32 on both sides, above bodies of less."""
    rollout_quant: Quant = "none"
    """Low-bit rollouts (quant.py): the engine's linear layers in this format."""
    learner_quant: LearnerQuant = "none"
    """aligned: the learner's copy of the model that samples computes on the engine's low-bit
    numbers (QaRL); a format: whatever the engine does."""
    quant_group: int = 64
    """Columns that share a scale in w4a16 and its like."""
    exact: bool = False
    """Sampler (--rollout=hf) and learner take each sum in one order: log p_inf = log p_ref bit for
    bit, and a run in which they differ stops (model/exact.py)."""
    router_replay: bool = False
    """Mixtures of experts: the learner sends each token to the experts that the engine chose (vLLM:
    on a GPU)."""


@dataclass(frozen=True)
class RolloutFlags(SamplingFlags, EngineFlags, PrecisionFlags):
    """How responses are sampled, and with which numbers"""


@dataclass(frozen=True)
class DelayFlags:
    """How late a sampler loads new weights (delay.py)"""

    delay: Literal["none", "constant", "lognormal", "weibull", "exponential"] = "none"
    """Distribution of the delay after which a sampler loads the newest weights; none: at once."""
    delay_min: float = 60.0
    """Shortest delay, in seconds (virtual ones in train.py, this host's in a remote sampler)."""
    delay_max: float = 1800.0
    """Longest delay, in seconds; constant: the delay."""


@dataclass(frozen=True)
class StalenessFlags:
    """Delayed samplers, simulated or remote"""

    delay_samplers: int = 4
    """--delay: samplers, each with a model version of its own."""
    sampler_rate: float = 1.0
    """--delay: groups the samplers make for each that the learner trains on; above 1 they queue
    up."""
    step_seconds: float = 28.125
    """--delay: virtual seconds an update takes (1800 / 64)."""
    max_staleness: int | None = None
    """Bound in updates: delays are capped there, older groups dropped when the learner would take
    them (the updates of one batch come on top); 0: the synchronous loop; default none."""
    window_seconds: float = math.inf
    """Groups that were made longer ago are dropped, by the learner's clock."""
    sync_every: int = 1
    """Updates between two broadcasts of weights to delayed or remote samplers."""


@dataclass(frozen=True)
class RemoteFlags:
    """Samplers on other machines (remote/)"""

    samplers: str = "local"
    """local: an engine in this process. tcp://HOST:PORT: samplers on any host, over ZeroMQ; rank r
    listens r ports higher, and tcp://*:5555 needs --keys. FOLDER: over a shared folder. Samplers
    start with python -m remote --connect=..."""
    keys: str = "none"
    """ZeroMQ: the learner's folder of keys (python -m remote.keys OUT --samplers=N); none: in the
    clear, on this host only."""
    give_up: float = 3600.0
    """Seconds without a group from any sampler after which the run stops."""


# ---------------------------------------------------------------------------------------------------------------------
# The learner
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerFlags:
    """Optimisation"""

    lr: float | None = None
    """Policy learning rate (embedded models 1e-4)."""
    actor_lr: float | None = None
    """Actor learning rate (embedded models 3e-4)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: torch.optim.Muon on the matrices of the layers, AdamW on the rest, at the same learning
    rates (RMS-matched)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up."""
    warmup_steps: float = 5.0
    """Updates of linear warm-up; below 1 a share of --steps (0.03: 3 %, rounded up)."""
    weight_decay: float = 0.0
    """Decoupled weight decay, of AdamW and Muon."""
    grad_clip: float | None = None
    """Largest gradient norm, each model on its own (default 1; embedded models 0.3)."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Learner's compute type (embedded models float32); the 16-bit ones are autocast over float32
    weights, float16 with a loss scaler."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Wrapper under torchrun."""
    lora_rank: int = 0
    """LoRA (model/lora.py): learn corrections of this rank, times 32 / rank, to frozen linear
    layers; 0: off, all weights learn."""


@dataclass(frozen=True)
class MemoryFlags:
    """Memory and kernels of the learner (model/memory.py, model/kernels.py)"""

    gradient_checkpointing: bool = False
    """Keep only the input of each layer and recompute its activations in the backward pass: a third
    more time, a tenth of the memory. A response is never split over ranks: the longest one must fit
    on one rank."""
    kernels: Literal["auto", "plain", "liger", "compile"] = "auto"
    """Of decoder layers: transformers' own (plain, auto), liger-kernel's, or torch.compile's."""
    offload: bool = False
    """The optimizer's states wait in the host's memory between two updates."""


# ---------------------------------------------------------------------------------------------------------------------
# Task and reports
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskFlags:
    """The task"""

    task: str | None = None
    """arith (generated sums; the default of embedded models); FILE.jsonl, .json or .parquet;
    hf:NAME/SPLIT (a data set); several of these with commas (a mix); FILE.py:CLASS (your own)."""
    columns: str = ""
    """prompt=NAME,answer=NAME: columns of the problem and of its answer, a.b for a nested one;
    default: problem, question or prompt; answer, solution, reward_model.ground_truth, ..."""
    reward: str = ""
    """Sum of parts, NAME*WEIGHT with commas: math (the last \\boxed{}), gsm8k, praxis, letter, boxed, think,
    FILE.py:FUNCTION (tasks/rewards.py); default math, letter where rows have choices, or the reward
    of a class of your own."""
    overlong: int = 0
    """DAPO's length penalty: the reward falls over this number of tokens before --max_tokens, by 1
    at the end; 0: off."""
    arith: str = ""
    """--task=arith: NAME=VALUE with commas. min_ops=3,max_ops=5: number of operations; operand=9,
    total=29: largest operand and running total; explain=0: reward this many tokens of explanation
    after a right answer; seed=0."""


@dataclass(frozen=True)
class PromptFlags:
    """Prompts"""

    system_prompt: str = ""
    """Text, or a file, that goes before a problem as the system's message, unless its row brings
    one."""
    prompt_template: str = ""
    """Text, or a file, with {problem}; or plain, boxed, hashes, letter; default: as the reward
    wants the answer."""
    chat_template: str = "auto"
    """auto: the tokenizer's, where it has one; off: none; or a file of Jinja."""
    chat_kwargs: str = ""
    """Arguments of the chat template, NAME=VALUE with commas, such as enable_thinking=false."""
    chat_date: str = ""
    """Date that a chat template writes (YYYY-MM-DD), the same after a resume and on every sampler;
    default: the day on which the run began, in UTC."""
    max_prompt_tokens: int = 0
    """Drop, and count, problems with a longer prompt; 0: keep all."""


@dataclass(frozen=True)
class ReportFlags:
    """Evaluation, logging, checkpoints"""

    eval_every: int = 0
    """Updates between two held-out evaluations; 0: only before and after; -1: never (python eval.py
    --follow=RUN)."""
    eval_engine: Literal["own", "torch", "second"] = "own"
    """Sampler of evaluations. own: the rollout engine, with its rounding, for the model that it
    holds, else plain torch; second: as own, and one more engine for a policy with an actor; torch:
    plain torch, unrounded weights."""
    eval_problems: int = 512
    """Held-out problems, each with one response at temperature 1 unless --eval_task says otherwise."""
    eval_task: str = ""
    """Held-out sets, as --task, with commas; each may have settings:
    a.jsonl,b.jsonl:samples=32:temperature=0.6:max_tokens=8192. arith has its own test split."""
    check_sync: bool = True
    """Check at every weight sync that the engine has the published weights (sync.py), and on the first
    rollouts that engine and learner are the same policy (learner.py); False: for emergencies."""
    save_every: int = 50
    """Updates between two checkpoints; 0: only at the end."""
    keep: int = 2
    """Checkpoints kept."""
    wandb: str = ""
    """Also log to this wandb project."""


@dataclass(frozen=True)
class SampleFlags(TaskFlags, PromptFlags, RolloutFlags):
    """Problems and sampling, shared by training and evaluation"""


# ---------------------------------------------------------------------------------------------------------------------
# All of them
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config(
    RunFlags,
    SizeFlags,
    LossFlags,
    SampleFlags,
    OptimizerFlags,
    MemoryFlags,
    ReportFlags,
    DelayFlags,
    StalenessFlags,
    RemoteFlags,
):
    """All flags of train.py."""

    # the flags on the page of --help; --help=all shows all
    COMMON = (
        "objective",
        "model",
        "actor",
        "out",
        "resume",
        "steps",
        "rollout_batch",
        "train_batch",
        "group_size",
    )
    COMMON += ("micro_tokens", "correction", "surrogate", "is_cap", "max_tokens")
    COMMON += (
        "temperature",
        "rollout",
        "rollout_dtype",
        "rollout_quant",
        "learner_quant",
        "delay",
        "max_staleness",
    )
    COMMON += (
        "lr",
        "actor_lr",
        "dtype",
        "parallel",
        "task",
        "reward",
        "eval_every",
        "eval_task",
        "save_every",
    )
    # the flags that may be infinite
    UNBOUNDED = ("is_cap", "rs_high", "clip_high", "tbpo_neg_high", "obrs_c1", "obrs_c2")
    UNBOUNDED += ("grad_clip", "window_seconds", "give_up")


FIELDS = {f.name: f for f in fields(Config)}
# flags that a resumed run may change: they steer the process, not the training
HARMLESS = {
    *(
        "resume",
        "overwrite",
        "out",
        "keep",
        "save_every",
        "check_sync",
    ),
    *(
        "wandb",
        "keys",
        "give_up",
        "parallel",
        "micro_tokens",
        "rollout_memory",
    ),
    *("gradient_checkpointing", "kernels", "offload", "eval_every"),
}

# defaults of the embedded models, and the values that an error proposes for other models
EMBEDDED = {"task": "arith", "max_tokens": 32, "lr": 1e-4, "actor_lr": 3e-4, "dtype": "float32"}
EMBEDDED |= {"rollout_dtype": "float32", "grad_clip": 0.3}
PROPOSED = {
    "task": "hf:openai/gsm8k@main/train",
    "max_tokens": 4096,
    "lr": 1e-6,
    "actor_lr": 1e-6,
    "dtype": "bfloat16",
}
