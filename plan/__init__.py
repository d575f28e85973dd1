"""The memory that a run needs on each rank, computed before a model loads (`python -m plan`).

The sizes of the states follow from the shapes in config.json. With P parameters, Q of them trained,
on n ranks that shard them (--parallel=fsdp; otherwise n = 1), each rank has, in bytes

    weights 4 P / n     gradients 4 Q / n     AdamW 8 Q / n, Muon 4 Q / n

With DDP gradients stay between updates. Activations are measured on tensors without data
(plan/footprint.py). A run needs less than its plan if rows are shorter than the longest row, and up
to a tenth more activations if responses share a prompt."""

from __future__ import annotations

import machinery.startup  # isort: skip  # noqa: F401

import bisect
from dataclasses import dataclass, replace

from config import Config, RunFlags
from corrections import topk_of
from machinery import warmstart
from machinery.checkpoint.models import from_hub, read_config, read_tokenizer
from machinery.flags import embedded_model, is_hub_id, need
from machinery.optim import Muon, make_optimizers
from model import lora
from model.engines import cache_of_a_token, cache_size, cached_tokens, evaluated_by
from model.head import LEAST_CHUNK
from plan.footprint import layers_travel_in, measure, on_meta, sampler_of
from quant import empty_model
from tasks import at_once, make_task

GIB = 2**30
MOST_RANKS = 64  # the largest number of ranks that is tried
# tokens of a micro-batch; larger micro-batches do not use a GPU better
MOST_MICRO = 1 << 15
# the GPU's memory without --gpu_gib: the head's chunks have their largest size
UNKNOWN = 80 * GIB


@dataclass(frozen=True)
class States:
    """Bytes of one model's states, unsharded, and of parts of its weights."""

    weights: int
    gradients: int
    optimizer: int
    saved: int  # the model in a checkpoint, in 16 bits
    tensor: int  # the largest tensor
    layer: int  # the largest layer, in float32
    # with FSDP: embedding and head in float32, and two layers in the type of their products
    gathered: int

    @classmethod
    def of(cls, cfg: Config, name: str, config) -> States:
        model = on_meta(cfg, name, config)
        moments = {}
        for optimizer in make_optimizers(model, cfg, 0.0):
            bytes_of_one = (1 if isinstance(optimizer, Muon) else 2) * 4
            for group in optimizer.param_groups:
                moments |= {p: bytes_of_one * p.numel() for p in group["params"]}
        weights = weights_of(model)
        gradients = sum(4 * p.numel() for p in moments)
        adapters = gradients if lora.learns(cfg, name) else 0
        layers = [weights_of(layer) for layer in model.base_model.layers]
        share = layers_travel_in(cfg, model) / 4
        return cls(
            weights=sum(p.nbytes for p in model.parameters()),
            gradients=gradients,
            optimizer=sum(moments.values()),
            saved=(weights - adapters) // 2,
            tensor=max(4 * p.numel() for p in model.parameters()),
            layer=max(layers),
            gathered=int(weights - sum(layers) + 2 * max(layers) * share),
        )


def weights_of(model) -> int:
    """Bytes of a module's parameters in float32; tied parameters count once."""
    return sum(4 * p.numel() for p in model.parameters())


@dataclass(frozen=True)
class Plan:
    """Bytes of one rank. categories: name -> bytes; stages: name -> the categories that it needs
    together."""

    ranks: int
    micro: tuple[int, int]  # the largest micro-batch: number of rows, tokens per row
    categories: dict[str, int]
    stages: dict[str, list[str]]
    checkpoint: int  # bytes on disk, for all ranks together

    def sum_of(self, *kinds: str) -> int:
        """Total bytes of the categories with names that begin with one of `kinds`."""
        return sum(
            size for name, size in self.categories.items() if name.startswith(kinds)
        )

    def of_stage(self, stage: str) -> int:
        return sum(self.categories[category] for category in self.stages[stage])

    @property
    def worst(self) -> str:
        """The stage that needs the most memory."""
        return max(self.stages, key=self.of_stage)

    @property
    def peak(self) -> int:
        return self.of_stage(self.worst)

    def text(self) -> str:
        """The plan as text: the categories, the stages, and disk."""
        rows, width = self.micro
        micro = f"the largest micro-batch has {rows} x {width} tokens"
        used = {name: size for name, size in self.categories.items() if size}
        lines = [f"GiB on one rank of {self.ranks}; {micro}"]
        lines += [f"  {name:<50}{size / GIB:9.2f}" for name, size in used.items()]
        lines += ["peak of each stage"]
        lines += [
            f"  {stage:<50}{self.of_stage(stage) / GIB:9.2f}" for stage in self.stages
        ]
        if self.checkpoint:
            lines += [
                f"{'a checkpoint on disk, all ranks':<52}{self.checkpoint / GIB:9.2f}"
            ]
        return "\n".join(lines)


def plan_of(
    cfg: Config, configs: dict, prompt: int, ranks: int, gpu_gib: float = 0.0
) -> Plan:
    """The plan for one of `ranks` ranks. configs: name -> transformers config; prompt: tokens of
    the longest prompt."""
    width = prompt + cfg.max_tokens
    rows = min(max(1, cfg.micro_tokens // width), cfg.train_batch // ranks)
    memory = int(gpu_gib * GIB) or UNKNOWN
    measured = measure(cfg, configs, rows, prompt, cfg.max_tokens, memory)
    models = {name: States.of(cfg, name, config) for name, config in configs.items()}
    sharded = cfg.parallel == "fsdp" and ranks > 1
    n = ranks if sharded else 1
    states = {f"weights, {name}": model.weights // n for name, model in models.items()}
    if cfg.kl_coef and not lora.learns(cfg, "policy"):
        states["weights, frozen start model"] = models["policy"].weights // n
    states |= {
        f"optimizer, {name}": model.optimizer // n for name, model in models.items()
    }
    gradients = {
        f"gradients, {name}": model.gradients // n for name, model in models.items()
    }
    activations = {f"activations, {name}": size for name, size in measured.kept.items()}
    sampling = second = gathered = 0
    if cfg.samplers == "local":
        sampling = engine(cfg, configs[sampler_of(cfg)], width, ranks, gpu_gib)
    asleep = gpu_gib > 0 and cfg.rollout == "vllm"
    # it evaluates the policy, and stays awake: only one engine of a process can sleep
    if cfg.eval_every >= 0 and evaluated_by(cfg, "policy") == "second":
        learners = replace(cfg, rollout_dtype=cfg.dtype)
        second = engine(learners, configs["policy"], width, ranks, gpu_gib)
    # also the gradient of the largest layer before it is reduced over ranks
    if sharded:
        largest = max(model.layer for model in models.values())
        read = [model.gathered for model in models.values()]
        if "weights, frozen start model" in states:
            read.append(models["policy"].gathered)
        gathered = sum(read) + largest
    others = {
        "minibatch": minibatch(cfg, prompt, ranks),
        "logits, or a layer's backward": measured.moment,
        "a forward without gradient": measured.forward,
        "gathered from other ranks": gathered,
        "engine": sampling,
        "second engine": second,
        "evaluation": evaluation(cfg, configs, width, ranks, sampling if asleep else 0),
        "a tensor to publish, and the weight check": publishing(models, configs),
    }
    buckets = [] if sharded or ranks == 1 else [*gradients]  # of DDP
    stays = [*states, *buckets, "second engine"]
    always = [*stays, *([] if asleep else ["engine"])]
    busy = [*([] if buckets else gradients), *activations]
    busy += ["minibatch", "logits, or a layer's backward", "gathered from other ranks"]
    stages = {
        "publish": [*stays, "engine", "a tensor to publish, and the weight check"],
        "roll out": [*stays, "engine"],
        "evaluate": [*always, "evaluation"],
        "ref pass": [
            *always,
            "a forward without gradient",
            "gathered from other ranks",
        ],
        "forward and backward": [*always, *busy],
    }
    # trainable weights in float32, as many bytes as their gradients
    saved = sum(m.gradients + m.optimizer + m.saved for m in models.values())
    categories = states | gradients | activations | others
    return Plan(ranks, (rows, width), categories, stages, saved)


def minibatch(cfg: Config, prompt: int, ranks: int) -> int:
    """Bytes of a rank's responses in an update (batching.Batch), with the top-K of each token."""
    columns = 1 + topk_of(cfg) * (2 if cfg.obrs_z == "approx" else 1)
    of_a_token = 48 + 16 * columns
    return cfg.train_batch // ranks * (prompt * 8 + cfg.max_tokens * of_a_token)


def publishing(models: dict[str, States], configs: dict) -> int:
    """Bytes of the larger of two: a tensor sent to the engine with its gathered shards, and the
    weight check, which holds the head in float32 and a chunk of logits of at most 2,048 tokens
    (sync.WeightCheck)."""
    tensor = max(model.tensor for model in models.values())
    logits = max(4 * 2048 * config.vocab_size for config in configs.values())
    return tensor + max(tensor, min(logits, LEAST_CHUNK))


def engine(cfg: Config, config, width: int, ranks: int, gpu_gib: float) -> int:
    """Bytes of the rollout engine on one rank: weights and KV cache; on a GPU vLLM's memory share,
    if both fit into it."""
    # of low-bit weights an upper bound
    number = 4 if cfg.rollout_dtype == "float32" else 2
    weights = weights_of(empty_model(config)) * number // 4 // cfg.rollout_tp
    of_a_token, rows = cache_of_a_token(config, number), cfg.rollout_batch // ranks
    if cfg.rollout != "vllm":
        return weights + torch_cache(config, number, rows, width)
    if gpu_gib:
        share = cfg.rollout_memory or 0.25
        return max(
            int(share * gpu_gib * GIB), weights + of_a_token * width // cfg.rollout_tp
        )
    return weights + (
        int(cfg.rollout_memory * GIB) or cache_size(of_a_token, width, rows)
    )


def torch_cache(config, number: int, rows: int, width: int) -> int:
    """Bytes of HFEngine's KV cache for `rows` responses, or for as many responses as it processes
    at once."""
    most = max(cached_tokens(config, number), width)
    return cache_of_a_token(config, number) * min(rows * width, most)


def evaluation(cfg: Config, configs: dict, width: int, ranks: int, own: int) -> int:
    """Bytes of an evaluation on one rank, without states and rollout engine; responses are as long
    as in training, with one sample for each problem.

    own: bytes of the rollout engine, if it sleeps at other times. Models are evaluated one after
    the other: by the engine that samples from the model, by a second engine, or in plain torch."""
    if cfg.eval_every < 0:
        return 0
    sharded = cfg.parallel == "fsdp" and ranks > 1
    rows = min(at_once(1), -(-cfg.eval_problems // ranks))
    sizes = {"own": own, "second": 0}  # a second engine is always loaded
    most = 0
    for name, config in configs.items():
        copied = weights_of(empty_model(config)) if sharded else 0  # by eval.sampler_of
        sizes["torch"] = copied + torch_cache(config, 4, rows, width)
        most = max(most, sizes[evaluated_by(cfg, name)])
    return most


def mends(cfg: Config, width: int, ranks: int):
    """Yield (flags, changes of the configuration, ranks) that reduce memory: the cheapest first,
    cumulative."""
    if cfg.rollout == "vllm" and cfg.rollout_memory > 0.4:
        yield "--rollout_memory=0.4", {"rollout_memory": 0.4}, ranks
    if not cfg.gradient_checkpointing:
        yield "--gradient_checkpointing=True", {"gradient_checkpointing": True}, ranks
    if cfg.micro_tokens >= 2 * width:
        yield f"--micro_tokens={width}", {"micro_tokens": width}, ranks
    if cfg.parallel == "ddp" and ranks > 1:
        yield "--parallel=fsdp", {"parallel": "fsdp"}, ranks
    n_ranks = ranks
    while n_ranks < MOST_RANKS:
        n_ranks *= 2
        if cfg.train_batch % (cfg.group_size * n_ranks):
            continue  # settings.check_sizes
        yield f"--parallel=fsdp on {n_ranks} ranks", {"parallel": "fsdp"}, n_ranks


def largest_micro(
    cfg: Config, configs: dict, prompt: int, ranks: int, gpu_gib: float
) -> int:
    """The largest --micro_tokens, a power of two up to MOST_MICRO, with which the run fits; at least
    the tokens of one row."""

    def peak(tokens: int) -> int:
        small = replace(cfg, micro_tokens=tokens)
        return plan_of(small, configs, prompt, ranks, gpu_gib).peak

    row = prompt + cfg.max_tokens
    sizes = [1 << k for k in range(row.bit_length(), MOST_MICRO.bit_length())]
    fitting = bisect.bisect(sizes, gpu_gib * GIB, key=peak)
    return sizes[fitting - 1] if fitting else row


def verdict(
    cfg: Config, configs: dict, prompt: int, made: Plan, gpu_gib: float
) -> tuple[bool, str]:
    """(whether a plan fits a GPU of gpu_gib GiB, a sentence with the verdict and the flags that
    make it fit)."""
    peak = f"{made.peak / GIB:.1f} GiB ({made.worst})"
    share = cfg.rollout_memory or 0.25
    if cfg.rollout == "vllm" and made.categories["engine"] > int(share * gpu_gib * GIB):
        least = (
            f"{made.categories['engine'] / GIB:.1f} GiB for weights and one response"
        )
        fix = "raise it, or --rollout_tp"
        return (
            False,
            f"vLLM needs {least}, more than --rollout_memory={share:g} of the GPU; {fix}",
        )
    if made.peak / GIB <= gpu_gib:
        return True, f"it fits --gpu_gib={gpu_gib:g}: about {peak}"
    needs = f"a rank needs {peak}, and --gpu_gib={gpu_gib:g} is less"
    flags: dict[str, str] = {}  # a later flag replaces an earlier one of the same name
    for flag, changes, n_ranks in mends(cfg, prompt + cfg.max_tokens, made.ranks):
        smaller = plan_of(replace(cfg, **changes), configs, prompt, n_ranks, gpu_gib)
        if smaller.peak < made.peak:
            cfg, made = replace(cfg, **changes), smaller
            flags[flag.partition("=")[0]] = flag
        if made.peak <= gpu_gib * GIB:
            with_flags = (
                f"with {', '.join(flags.values())} it needs {made.peak / GIB:.1f}"
            )
            return False, f"{needs}; {with_flags}"
    tried = ", ".join(flags.values()) or "flags"
    fix = "use a smaller model or shorter responses"
    return False, f"{needs}; {tried} do not save enough; {fix}"


def configs_of(cfg: RunFlags) -> dict:
    """ "policy", and "actor" if there is one -> the model's transformers config."""
    configs = {"policy": config_of("model", cfg.model)}
    if cfg.actor != "none":
        configs["actor"] = config_of("actor", cfg.actor)
    return configs


def config_of(flag: str, name: str):
    """The transformers config of --model or --actor; its value is `name`."""
    if name.startswith("base:"):
        return warmstart.config_of(embedded_model(flag, name)[0])
    if is_hub_id(name):
        name = from_hub(flag, name, files=["config.json"])
    return read_config(name)


def longest_prompt(cfg: Config) -> int:
    """Tokens of the longest prompt of --task."""
    if cfg.model.startswith("base:"):
        return make_task(cfg).fit(warmstart.arithmetic_tokenizer())
    need(
        not is_hub_id(cfg.model),
        f"the lengths of the prompts of --task={cfg.task} are not known without the tokenizer of {cfg.model}; give "
        "--max_prompt_tokens",
    )
    return make_task(cfg).fit(read_tokenizer(cfg.model))
