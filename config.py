"""The flags of train.py, in groups: name, type, default, and the help text that --help prints.

python train.py --config=configs/x.toml --key=value

The type of a parameter `cfg` is a group with all flags that the function reads. A flag with the
default None is filled from `--objective` (presets.py), then by machinery/settings.py; a remaining
None means off or no bound. Each file checks its own flags, machinery/settings.py combinations."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

# lowest temperature above 0: vLLM silently raises a lower temperature to 0.01
COLDEST = 0.01


@dataclass(frozen=True)
class RunFlags:
    """Models, objective, run folder"""

    objective: str = "jackpot"
    """Preset of correction, surrogate and more: tis, jackpot, gspo, ... (presets.OBJECTIVES)."""
    model: str = "base:policy"
    """Policy: a Hugging Face folder, a run folder (its newest checkpoint's policy), a hub id, a GGUF
    file (dequantized to bfloat16 once, into the folder FILE.gguf.bfloat16), or base:policy for the
    toy model, trained on first use to an accuracy of 30 % (base:policy@0.2: 20 %)."""
    actor: str = "auto"
    """Rollout model: a folder or id as for --model, base:actor, or none (the policy samples); auto:
    base:actor for base:policy, else none."""
    out: str = "out/run"
    """Run folder: config, metrics.jsonl, checkpoints, plot."""
    resume: bool = False
    """Continue the run in --out from its newest checkpoint."""
    overwrite: bool = False
    """Delete the files of the run in --out, but no other files, and start from scratch."""


@dataclass(frozen=True)
class SizeFlags:
    """Sizes"""

    steps: int = 150
    """Optimizer updates."""
    rollout_batch: int = 256
    """Responses sampled between weight syncs, over all ranks."""
    train_batch: int = 256
    """Responses per update, over all ranks."""
    group_size: int = 8
    """Responses per prompt."""
    epochs: float = 0.0
    """Passes over the problems of --task, counted in trained groups; replaces --steps; 0: off."""
    dynamic_sampling: int = 0
    """Replace groups of equal rewards by other prompts (DAPO): maximum number of sampling rounds per batch (remote
    samplers: no limit); 0: off."""
    micro_tokens: int | None = None
    """Token budget (prompts and responses) of one micro-batch on one rank; default: on a GPU the
    largest that the memory plan allows, on a CPU 4096. A resumed run keeps the number; None
    chooses again."""


@dataclass(frozen=True)
class ObjectiveFlags:
    """The objective: correction times surrogate; --objective fills flags without a value"""

    correction: str | None = None
    """Weight and keep-mask per token (corrections.CORRECTIONS)."""
    surrogate: str | None = None
    """Function of ratio and advantage that is maximised (objectives.SURROGATES)."""
    ratio_base: Literal["ref", "inf", "new", "group"] | None = None
    """Denominator of the surrogate's ratio; group: GEPO's expectation over the group."""
    advantage: Literal["grpo", "grpo_no_std", "rloo", "maxrl", "otb"] | None = None
    """Advantage within a group (default grpo; batching.py); otb: optimal token baseline."""
    reduction: (
        Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = None
    """Reduction of (B, T) to a scalar; one denominator over all ranks and micro-batches."""
    clip: bool = True
    """Clip the surrogate's ratio."""
    clip_low: float | None = None
    """eps_low (default 0.2; gspo and tbpo 3e-4; gmpo 0.4, a bound on the log-ratio; dppo_tv 0.2 and
    dppo_kl 0.05, bounds on a divergence; not used by drpo)."""
    clip_high: float | None = None
    """eps_high (default 0.28; gspo and tbpo 4e-4; gepo 0.2; drpo 12.5; gmpo, dppo_tv and dppo_kl
    as --clip_low)."""
    dual_clip: float = 0.0
    """Dual-clip constant c for negative advantages (3 is usual); 0: off."""
    correction_target: Literal["ref", "new"] | None = None
    """Numerator policy of the ratios p / p_inf in weights and in the statistics of --reject: ref
    (default) or new. The metrics of r and R always use ref."""
    is_cap: float | None = None
    """C: cap of importance weights (default by correction: tis 2, seq_tis 4, prefix_tis 1, ...)."""
    is_floor: float = 0.0
    """Lower bound of capped weights; 0: none (tbpo_mismatch: 1 / C)."""
    reject: str | None = None
    """Also drop tokens or responses by a statistic of r (corrections.REJECTIONS; default none);
    several statistics with their bounds: token:0.5:5,seq_max_k2:0:0.1."""
    reject_of: Literal["all", "negative"] | None = None
    """Tokens that --reject may drop: all (default), or those with a negative advantage
    (negative)."""
    rs_low: float | None = None
    """Lower bound of the statistic of --reject and of rejecting corrections."""
    rs_high: float | None = None
    """Upper bound of the statistic of --reject and of rejecting corrections."""
    log_ratio_clamp: float = 20.0
    """Log-ratios are clamped to +- this before exp; sequence sums after summing."""
    mask_cut: bool = False
    """Exclude responses truncated at --max_tokens from the loss and its denominator, not from the
    advantages (DAPO's overlong filtering)."""
    loss_denominator: Literal["proposed", "kept"] = "proposed"
    """Denominator of the loss: proposed counts rejected tokens, kept does not."""
    positive_only: bool = False
    """Train only on positive advantages (QaRL, Figure 8)."""
    tbpo_neg_high: float = 7e-4
    """tbpo: the upper bound of the ratio is 1 + this for negative advantages."""
    gepo_defence: float = 0.0
    """c of GEPO's defensive mixing e = clip(c Var q, 0, 0.99) (no value in the paper); 0: off."""
    cppo_beta: float | None = None
    """Weight of a KL between new and inf (CPPO: 0.005 in HeteroRL with delay); 0 (default): off."""
    cppo_kl: Literal["official", "k2"] | None = None
    """Estimator of the KL of --cppo_beta. official (default): CPPO's released code, whose mean
    under inf is chi2 - KL; k2: prime-rl's."""
    kl_coef: float = 0.0
    """Weight of KL(policy || start), start: the frozen model that the run started from; 0: off."""
    entropy_coef: float = 0.0
    """Weight of the entropy (nats) of the distribution that the learner scores; 0: off."""


@dataclass(frozen=True)
class ObrsFlags:
    """OBRS, Jackpot's correction (obrs.py)"""

    obrs_lambda: float = 1.0
    """lambda: acceptance is min(1, p_tgt / (lambda p_inf))."""
    obrs_accept_rate: float | None = None
    """Budget: choose lambda at each update so that this share of the tokens is accepted on average."""
    obrs_c1: float = 3.0
    """c1: cap of the OBRS weight."""
    obrs_c2: float | None = None
    """c2: cap of p_ref / p_tgt (target new); default 1.02 + clip_high for ppo and cispo with a
    finite clip, else 3 (Jackpot Table 8)."""
    obrs_topk: int = 20
    """K: number of the engine's top log-probabilities (for Z and for --reject=seq_max_kl)."""
    obrs_mask: Literal["bernoulli", "expected"] = "bernoulli"
    """Draw the mask, or weight tokens by its expectation."""
    obrs_mode: Literal["both", "mask", "reweight"] = "both"
    """Ablation: mask and reweight, mask only, or reweight only."""
    obrs_target: Literal["ref", "new"] | None = None
    """Target distribution of the accepted tokens (default ref)."""
    obrs_z: Literal["auto", "exact", "bracket", "approx"] = "auto"
    """Z: exact (two models, target ref); bracket: bounds from the top-K; approx: the paper's kappa
    Z_approx; auto: exact if possible, else bracket."""


@dataclass(frozen=True)
class ActorFlags:
    """Training of the actor (two models)"""

    distill_lambda: float = 1.0
    """Weight of KL(sg policy || actor), Jackpot Eq. 7, in the actor's loss; 0: no distillation."""
    distill_kl_target: float = 0.0
    """Adjust distill_lambda until the measured KL (nats per token) has this value; 0: off."""


@dataclass(frozen=True)
class LossFlags(ObjectiveFlags, ObrsFlags, ActorFlags):
    """All flags of the loss"""


@dataclass(frozen=True)
class SamplingFlags:
    """Sampling"""

    max_tokens: int | None = None
    """Maximum response length (toy models 32)."""
    stop: str = ""
    """Additional tokens that end a response, separated by commas."""
    temperature: float = 1.0
    """Sampling temperature, also used by the learner for scoring."""
    top_p: float = 1.0
    """Rollouts keep the smallest set of most likely tokens with at least this mass; 1: all."""
    top_k: int = 0
    """Rollouts keep the k most likely tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Rollouts keep tokens with at least this share of the largest token probability; 0: all."""
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """Log-probabilities that the engine returns. processed: of the sampling distribution; raw: of
    the model before temperature and truncation (biased)."""
    keep_sampling_mask: Literal["off", "recompute", "replay"] = "replay"
    """Scoring of truncated rollouts. off: over the whole vocabulary; recompute: over the tokens
    that the learner's truncation keeps; replay: over the recorded sets of allowed tokens
    (sampling.py)."""
    seed: int = 0
    """Seed of sampling, masks, simulated delays and LoRA's initial adapters."""


@dataclass(frozen=True)
class EngineFlags:
    """The rollout engine"""

    rollout: Literal["vllm", "hf"] = "vllm"
    """Rollout engine: vLLM in process, or a sampler in plain torch."""
    rollout_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Engine's precision; default: --dtype."""
    rollout_memory: float = 0.0
    """vLLM's memory. CPU: GiB of KV cache, 0: enough for a rollout batch, but for at most 256
    responses and at most a quarter of the free memory; CUDA: share of the GPU's memory, 0: 0.25."""
    rollout_tp: int = 1
    """vLLM's tensor-parallel size: the number of consecutive ranks that form one engine."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Format of vLLM's KV cache: --rollout_dtype's (auto), or fp8, which causes a mismatch
    (Jackpot, Table 2b)."""


@dataclass(frozen=True)
class PrecisionFlags:
    """Precision on both sides"""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the learner's products, of saved models, and of weights before they are quantized;
    default: the checkpoint's. 16-bit dtypes use autocast with float32 weights (LoRA: 16-bit frozen
    weights), float16 also a loss scaler."""
    lm_head_fp32: bool = False
    """Compute the language-model head in float32 on both sides, also with 16-bit layers."""
    rollout_quant: Literal["none", "int8", "fp8", "w4a16", "w2a16"] = "none"
    """Low-bit rollouts (quant.py): format of the engine's linear layers."""
    learner_quant: Literal["none", "aligned", "int8", "fp8", "w4a16", "w2a16"] = "none"
    """aligned: the learner's copy of the rollout model computes with the engine's low-bit weights
    and, in int8 and fp8, also rounds activations to that format (QaRL); a format: this format,
    independent of the engine's."""
    quant_group: int = 64
    """Columns that share a scale in w4a16 and w2a16."""
    exact: bool = False
    """On a CPU: sampler (--rollout=hf) and learner compute each sum in the same order: log p_inf =
    log p_ref bit for bit; the run stops if they differ (model/exact.py)."""
    router_replay: bool = False
    """Mixtures of experts: the learner sends each token to the engine's experts (vLLM: GPU
    only)."""


@dataclass(frozen=True)
class RolloutFlags(SamplingFlags, EngineFlags, PrecisionFlags):
    """All flags of sampling, engine and precision"""


@dataclass(frozen=True)
class DelayFlags:
    """Delay of a sampler's weights (delay.py)"""

    delay: Literal["none", "constant", "lognormal", "weibull", "exponential"] = "none"
    """Distribution of the delay after which a sampler loads the newest weights; none: no delay."""
    delay_min: float = 60.0
    """Shortest delay, in virtual seconds."""
    delay_max: float = 1800.0
    """Longest delay, in virtual seconds; constant: the delay."""


@dataclass(frozen=True)
class StalenessFlags:
    """Delayed samplers, simulated or remote"""

    delay_samplers: int = 4
    """--delay: number of samplers, each with a separate model version."""
    step_seconds: float = 28.125
    """--delay: virtual seconds per update (default: 1800 s of delay are 64 updates)."""
    max_staleness: int | None = None
    """Maximum age of weights at a rollout, in updates: caps delays, and the learner drops older groups
    of remote samplers; 0: synchronous; default: no bound."""
    window_seconds: float = math.inf
    """Remote samplers, with synchronized clocks (NTP): drop groups older than this many seconds.
    No effect with --delay: simulated groups are trained on at once."""
    sync_every: int = 1
    """Updates between broadcasts of weights to delayed or remote samplers."""


@dataclass(frozen=True)
class RemoteFlags:
    """Remote samplers (remote/)"""

    samplers: str = "local"
    """local: an engine in this process. tcp://HOST:PORT: samplers on any host, over ZeroMQ;
    every address but tcp://127.0.0.1:PORT needs --keys. FOLDER: over a shared folder. Start samplers with
    python -m remote --connect=..."""
    keys: str = "none"
    """ZeroMQ: the learner's folder of keys (python -m remote.keys); none: on this host only."""
    give_up: float = 3600.0
    """Stop the run after this many seconds without a group to train on."""


@dataclass(frozen=True)
class OptimizerFlags:
    """Optimisation"""

    lr: float | None = None
    """Policy learning rate (toy models 1e-4)."""
    actor_lr: float | None = None
    """Actor learning rate (toy models 3e-4)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: torch.optim.Muon for the matrices of the layers, AdamW for the rest, at the same lr."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    lr_from_ess: bool = False
    """Multiply the policy's learning rate by sqrt(ESS / N) of the response weights R (VCPO)."""
    warmup_steps: float = 5.0
    """Updates of linear warm-up; below 1: share of --steps (0.03: 3 %, rounded up)."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW and Muon."""
    grad_clip: float | None = None
    """Maximum gradient norm per model (default 1; toy models 0.3)."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Wrapper under torchrun."""
    lora_rank: int = 0
    """LoRA: train the policy by adapters of this rank, scaled by 32 / rank, on frozen linear
    layers; an actor trains all its weights; 0: off."""


@dataclass(frozen=True)
class MemoryFlags:
    """Memory and kernels of the learner (model/memory.py, model/kernels.py)"""

    gradient_checkpointing: bool = False
    """Keep only the input of each layer and recompute its activations in the backward pass: a
    third more time, about a tenth of the activations' memory."""
    kernels: Literal["auto", "plain", "liger", "compile"] = "auto"
    """Kernels of decoder layers: of transformers (plain, auto), liger-kernel or torch.compile."""


@dataclass(frozen=True)
class TaskFlags:
    """The task"""

    task: str | None = None
    """arith (generated sums; default of toy models); FILE.jsonl, .json or .parquet;
    hf:NAME/SPLIT (a data set); a mix of files and data sets, separated by commas; FILE.py:CLASS
    (your class)."""
    columns: str = ""
    """prompt=NAME,answer=NAME: columns of the problem and of its answer, a.b for a nested one;
    default: problem, question or prompt; answer, solution, reward_model.ground_truth, ..."""
    reward: str = ""
    """Sum of parts, NAME*WEIGHT separated by commas: math (the last \\boxed{}), gsm8k, praxis,
    letter, boxed, think, FILE.py:FUNCTION (tasks/rewards.py); default: the
    reward of --task=FILE.py:CLASS; letter, if all rows have choices; else math. A run reads a file
    once; do not edit files that it imports."""
    overlong: int = 0
    """N: DAPO's length penalty rises from 0 to 1 over the last N tokens before --max_tokens; 0:
    off."""
    arith: str = ""
    """--task=arith: NAME=VALUE separated by commas. min_ops=3,max_ops=5: number of operations;
    operand=9,total=29: largest operand and running total; explain=0: reward this many tokens of
    explanation after a right answer; seed=0."""


@dataclass(frozen=True)
class PromptFlags:
    """Prompts"""

    system_prompt: str = ""
    """System message, as text or a file; a row's own system message takes precedence."""
    prompt_template: str = ""
    """Text, or a file, with {problem}; or plain, boxed, hashes, letter; default: the template for
    the answer format of --reward."""
    chat_template: str = "auto"
    """auto: the tokenizer's chat template, if there is one; off: no template; or a Jinja file."""
    chat_kwargs: str = ""
    """Arguments of the chat template: NAME=VALUE, with commas, such as enable_thinking=false."""
    chat_date: str = ""
    """Date in the chat template (YYYY-MM-DD); default: the UTC date at the start of the run."""
    max_prompt_tokens: int = 0
    """Drop problems with a longer prompt, and report their number; 0: keep all. An endless class
    needs it, and may draw no longer prompt."""


@dataclass(frozen=True)
class ReportFlags:
    """Evaluation, logging, checkpoints"""

    eval_every: int = 0
    """Updates between held-out evaluations; 0: only before and after the run; -1: never."""
    eval_engine: Literal["own", "torch", "second"] = "own"
    """Sampler of evaluations. own: the rollout engine for the model that samples (remote samplers:
    plain torch), plain torch for the other; second: as own, but a second engine for a policy with
    an actor; torch: plain torch for both."""
    eval_problems: int = 512
    """Maximum number of problems in each held-out set, each with one response at temperature 1;
    --eval_task can set the number of responses and the temperature."""
    eval_task: str = ""
    """Held-out sets in the format of --task, separated by commas; each can have settings:
    a.jsonl,b.jsonl:samples=32:temperature=0.6:max_tokens=8192. arith has a separate test split."""
    check_sync: bool = True
    """Check at every weight sync that the engine has the published weights, and on the first
    rollouts that engine and learner compute the same policy (not with delayed or remote samplers,
    raw log-probabilities, or truncated sampling without replay)."""
    save_every: int = 50
    """Updates between checkpoints; 0: only at the end."""
    keep: int = 2
    """Number of newest checkpoints to keep."""


@dataclass(frozen=True)
class SampleFlags(TaskFlags, PromptFlags, RolloutFlags):
    """Problems and sampling, shared by training and evaluation"""


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

    # the flags that --help prints; --help=all prints all flags
    COMMON = (
        *("objective", "model", "actor", "out", "resume", "steps"),
        *("rollout_batch", "train_batch", "group_size", "micro_tokens"),
        *("correction", "surrogate", "is_cap", "max_tokens", "temperature"),
        *(
            "rollout",
            "rollout_dtype",
            "rollout_quant",
            "learner_quant",
            "delay",
            "max_staleness",
        ),
        *("lr", "actor_lr", "dtype", "parallel"),
        *("task", "reward", "eval_every", "eval_task", "save_every"),
    )
    # the flags that may be infinite
    UNBOUNDED = (
        *("is_cap", "rs_high", "clip_high", "tbpo_neg_high", "obrs_c1", "obrs_c2"),
        *("grad_clip", "window_seconds", "give_up"),
    )


FIELDS = {f.name: f for f in fields(Config)}
# flag -> (lowest, highest) meaningful value; flags that depend on other flags are checked elsewhere
RANGES = {
    **dict.fromkeys(
        ("steps", "rollout_batch", "train_batch", "micro_tokens"), (1, 10**9)
    ),
    **dict.fromkeys(("max_tokens", "eval_problems", "samples", "problems"), (1, 10**9)),
    **dict.fromkeys(("keep", "obrs_topk", "quant_group", "delay_samplers"), (1, 10**6)),
    **dict.fromkeys(("lr", "actor_lr"), (1e-12, 1)),
    **dict.fromkeys(
        ("save_every", "dynamic_sampling", "max_prompt_tokens"), (0, 10**9)
    ),
    **dict.fromkeys(("warmup_steps", "epochs"), (0, 1e9)),
    **dict.fromkeys(("distill_kl_target", "distill_lambda", "cppo_beta"), (0, 1e6)),
    **dict.fromkeys(("gepo_defence", "kl_coef", "entropy_coef"), (0, 1e6)),
    **dict.fromkeys(("clip_low", "clip_high", "is_floor", "rs_low"), (0, math.inf)),
    **dict.fromkeys(("tbpo_neg_high", "rs_high", "grad_clip"), (1e-6, math.inf)),
    **dict.fromkeys(("is_cap", "obrs_c1"), (0.01, math.inf)),
    **dict.fromkeys(("step_seconds", "window_seconds"), (1e-6, math.inf)),
    **dict.fromkeys(("give_up", "patience"), (1e-6, math.inf)),
    "sync_every": (1, 10**6),
    "max_staleness": (0, 10**6),
    "group_size": (2, 10**6),
    "seed": (0, 10**18),
    "temperature": (COLDEST, 2),
    "weight_decay": (0, 1),
    "log_ratio_clamp": (0.1, 80),
    "obrs_lambda": (0.01, 100),
    "obrs_accept_rate": (0.01, 1),
    "lora_rank": (0, 10**6),
    "rollout_memory": (0, 10**6),
}
# flags that a resumed run may change: they do not change the training
HARMLESS = {
    *(
        "resume",
        "overwrite",
        "out",
        "keep",
        "save_every",
        "check_sync",
        "keys",
        "give_up",
    ),
    *("parallel", "micro_tokens", "rollout_memory"),
    *("gradient_checkpointing", "kernels", "eval_every"),
}

# defaults of toy models (EMBEDDED); values that errors propose for other models (PROPOSED)
EMBEDDED = {
    "task": "arith",
    "max_tokens": 32,
    "lr": 1e-4,
    "actor_lr": 3e-4,
    "dtype": "float32",
}
EMBEDDED |= {"rollout_dtype": "float32", "grad_clip": 0.3}
MICRO_TOKENS = 4096  # --micro_tokens on a CPU
PROPOSED = {
    "task": "hf:openai/gsm8k@main/train",
    "max_tokens": 4096,
    "lr": 1e-6,
    "actor_lr": 1e-6,
}
