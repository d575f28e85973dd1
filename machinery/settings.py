"""The configuration of a run from its command line: read flags, fill open flags, check all flags.

A TOML file may set any flag, the command line takes precedence, and `--objective` fills the
remaining flags (presets.OBJECTIVES). `resolve` returns a complete configuration, or raises
UserError with one sentence that names the flag and the fix."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

import corrections
import delay
import objectives
import presets
import quant
import sampling
import tasks
from config import (
    EMBEDDED,
    FIELDS,
    HARMLESS,
    MICRO_TOKENS,
    PROPOSED,
    Config,
    DelayFlags,
    LossFlags,
    StalenessFlags,
)
from machinery import flags
from machinery.checkpoint.models import model_in, own_dtype
from machinery.flags import UserError, choice, need, need_each
from model import exact, kernels, lora

# -- From a command line to a configuration


def parse(
    argv: list[str] | None = None, n_ranks: int | None = None, installed: bool = True
) -> Config:
    """The resolved configuration of a command line. n_ranks and installed are those of `resolve`.
    Raises UserError."""
    from_file, given = {}, {}
    usage = "python train.py [--config=FILE.toml] --key=value ..."
    for key, value in flags.read(Config, argv, usage, also={"config"}):
        if key == "config":
            from_file.update(flags.read_toml(Config, value))
        else:
            given[key] = flags.convert(Config, key, value)
    need(
        not (given.get("epochs") and "steps" in given),
        "--epochs with --steps: both set the length of the run; leave out one of the two flags",
    )
    # --steps replaces epochs of a file, and --epochs replaces steps of a file
    if "steps" in given:
        given["epochs"] = 0.0
    if given.get("epochs", from_file.get("epochs")):
        from_file.pop("steps", None)
    cfg = Config(**{**from_file, **given})
    if cfg.resume:
        cfg = resumed(cfg, set(given) | set(from_file))
    return resolve(cfg, n_ranks, installed)


def resumed(cfg: Config, given: set[str]) -> Config:
    """The saved configuration of the run in --out. The flags given now must agree with it."""
    need(
        not cfg.overwrite,
        "--resume with --overwrite: --resume continues the run, --overwrite deletes it; leave out one of the two flags",
    )
    path = Path(cfg.out) / "config.json"
    need(
        path.is_file(),
        f"--resume: {cfg.out} holds no run; start without --resume, or name its folder with --out",
    )
    saved = saved_flags(path)
    # whether the learning-rate schedule depends on --steps
    of_steps = saved["lr_schedule"] != "constant" or 0 < saved["warmup_steps"] < 1
    free = HARMLESS | (set() if of_steps else {"steps", "epochs"})
    now = resolve_open(replace(cfg, resume=False))
    # the same samplers may have new addresses
    if "local" not in (now.samplers, saved["samplers"]):
        free = free | {"samplers"}
    # a checkpoint that the run began with may be deleted or moved by now
    if not saved["lora_rank"] and not saved["kl_coef"]:
        free = free | {
            k
            for k in ("model", "actor")
            if "/" in saved[k] and not flags.names_model(saved[k])
        }
    changed = [
        k
        for k in sorted(given - free)
        if getattr(now, k) != saved.get(k, FIELDS[k].default)
    ]
    if changed:
        was = ", ".join(
            f"--{k} was {saved.get(k)!r} and is now {getattr(cfg, k)!r}"
            for k in changed
        )
        raise UserError(
            f"--resume with a changed configuration: {was}; give the old value, or start a new run in a different --out"
        )
    now = {k: getattr(cfg, k) for k in given & free}
    return Config(**{**saved, **now, "resume": True, "overwrite": False})


def digest_of_flags(config: dict) -> str:
    """A digest of the flags that detects an edited config.json."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def saved_flags(path: Path) -> dict:
    """The flags in a run's config.json. Raises UserError if it is damaged, edited or foreign."""
    fix = "copy it from a backup, or start a new run with --overwrite or in a different --out"
    made = flags.read_json(path, fix)
    saved = made.get("config")
    need(
        isinstance(saved, dict) and "lr_schedule" in saved,
        f"--resume: {path} holds no flags of a run; {fix}",
    )
    need(
        made.get("config_digest") == digest_of_flags(saved),
        f"--resume: the flags in {path} were edited after the run wrote them; give changes on the command line, or "
        f"{fix}",
    )
    return {k: v for k, v in saved.items() if k in FIELDS}


# -- Open flags, then checks


def resolve_open(cfg: Config) -> Config:
    """The configuration with open flags filled from the objective and the default bounds, and runs
    named by --model and --actor replaced by models of their newest checkpoints. Checks nothing."""
    folders = {
        flag: model_in(name, role) or model_in(name, "policy") or name
        for flag, name, role in (
            ("model", cfg.model, "policy"),
            ("actor", cfg.actor, "actor"),
        )
    }
    cfg = replace(cfg, **folders)
    if cfg.model.startswith("base:"):
        cfg = fill(fill(cfg, {"rollout_dtype": cfg.dtype}), EMBEDDED)
    elif cfg.dtype is None and flags.names_model(cfg.model):
        cfg = replace(cfg, dtype=own_dtype(cfg.model))
    cfg = fill(cfg, {"rollout_dtype": cfg.dtype, "grad_clip": 1.0})
    cfg = fill(
        cfg, corrections.still_read(presets.OBJECTIVES.get(cfg.objective, {}), cfg)
    )
    cfg = fill(cfg, presets.DEFAULTS)
    cfg = fill(cfg, objectives.default_bounds(cfg))
    if not cfg.chat_date:
        cfg = replace(cfg, chat_date=str(datetime.now(UTC).date()))
    if cfg.actor == "auto":
        cfg = replace(
            cfg, actor="base:actor" if cfg.model.startswith("base:policy") else "none"
        )
    if cfg.obrs_z == "auto":
        cfg = replace(
            cfg, obrs_z="exact" if corrections.exact_z_known(cfg) else "bracket"
        )
    if cfg.actor == "none":  # unused
        cfg = fill(cfg, {"actor_lr": EMBEDDED["actor_lr"]})
    if cfg.obrs_c2 is None:
        clipped = (
            cfg.clip
            and cfg.surrogate in ("ppo", "cispo")
            and cfg.clip_high < float("inf")
        )
        cfg = replace(cfg, obrs_c2=1.02 + cfg.clip_high if clipped else 3.0)
    return cfg


def unlike_paper(cfg: Config) -> str:
    """A line with the loss and delay flags in which a run differs from the paper of its objective;
    "" if there is no paper or no difference.

    HeteroRL and the delay flags are considered only if samplers are delayed."""
    delayed = cfg.delay != "none" or cfg.samplers != "local"
    name = presets.RECIPES.get(cfg.objective)
    if name is None or (name == "heterorl" and not delayed):
        return ""
    path = (
        Path(__file__).resolve().parent.parent / "configs" / "papers" / f"{name}.toml"
    )
    paper = flags.read_toml(Config, str(path))
    if cfg.objective in ("grpo", "gspo"):  # different rows of the same table
        paper |= {"ratio_base": "inf"}
    groups = (LossFlags, DelayFlags, StalenessFlags) if delayed else (LossFlags,)
    compared = {f.name for group in groups for f in fields(group)}
    if cfg.correction not in corrections.USES_Z:
        compared = {key for key in compared if not key.startswith("obrs_")}
    differs = [
        f"--{key}={getattr(cfg, key)} ({value})"
        for key, value in paper.items()
        if key in compared and getattr(cfg, key) != value
    ]
    if not differs:
        return ""
    return f"{cfg.objective}, with the paper's values in brackets (configs/papers/{name}.toml): {' '.join(differs)}\n"


def fill(cfg: Config, values: dict) -> Config:
    """The configuration with None replaced by these values."""
    return replace(cfg, **{k: v for k, v in values.items() if getattr(cfg, k) is None})


def resolve(cfg: Config, n_ranks: int | None = None, installed: bool = True) -> Config:
    """The complete, checked configuration. Raises UserError, which names the flag and the fix.

    n_ranks: by default the number of ranks that torchrun started. installed: also check that this
    host has the engine and packages."""
    if n_ranks is None:
        n_ranks = flags.from_environment("WORLD_SIZE", 1)
    choice("objective", cfg.objective, list(presets.OBJECTIVES))
    cfg = resolve_open(cfg)
    missing = [
        f"--{flag}={value}"
        for flag, value in PROPOSED.items()
        if getattr(cfg, flag) is None
    ]
    cfg = fill(cfg, EMBEDDED)
    # on a GPU the plan chooses it (machinery/run.py)
    if installed and not torch.cuda.is_available():
        cfg = fill(cfg, {"micro_tokens": MICRO_TOKENS})
    flags.check_ranges(cfg)
    check_sizes(cfg, n_ranks)
    sampling.check(cfg)
    sampling.check_kl(cfg)
    quant.check(cfg)
    delay.check(cfg)
    objectives.check(cfg)
    check_models(cfg)
    lora.check(cfg)
    exact.check(cfg)
    kernels.check(cfg)
    check_named(cfg.model, missing)
    tasks.check(cfg)
    if not installed:
        check_tensor_parallel(cfg, n_ranks)
    elif cfg.samplers == "local":
        check_engine(cfg, n_ranks)
        quant.check_routing(cfg)
    need(
        cfg.eval_engine != "second" or cfg.actor != "none",
        "--eval_engine=second: there is no actor, so the rollout engine already evaluates the policy; leave "
        "the flag out",
    )
    return cfg


def check_named(model: str, missing: list[str]) -> None:
    """Raise UserError, which proposes values, if flags without a default are missing."""
    need(
        not missing,
        f"--model={model}: these flags have no default for a custom model; name them, for instance "
        f"{' '.join(missing)}",
    )


def check_sizes(cfg: Config, n_ranks: int) -> None:
    """Check schedules, and the division of batches into groups and ranks."""
    warmup = cfg.warmup_steps
    whole_groups = (
        f"not divisible by --group_size={cfg.group_size} times {n_ranks} rank(s)"
    )
    whole_updates = f"not a multiple of --train_batch={cfg.train_batch}"
    need_each(
        cfg,
        (cfg.eval_every >= -1, "eval_every", "must be at least -1 (never evaluate)"),
        (
            warmup % 1 == 0 or warmup < 1,
            "warmup_steps",
            "must be whole, or a share below 1",
        ),
        (
            cfg.train_batch % (cfg.group_size * n_ranks) == 0,
            "train_batch",
            whole_groups,
        ),
        (cfg.rollout_batch % cfg.train_batch == 0, "rollout_batch", whole_updates),
    )


def check_models(cfg: Config) -> None:
    """Check --model and --actor: model folders or embedded base models."""
    for flag, value in (("model", cfg.model), ("actor", cfg.actor)):
        if value.startswith("base:"):
            flags.embedded_model(flag, value)
            need(
                cfg.task == "arith",
                f"--{flag}={value} knows only --task=arith; give a model's folder for {cfg.task}",
            )
        elif value != "none" or flag == "model":
            need(
                flags.names_model(value),
                f"--{flag}={value}: no such GGUF file"
                if value.endswith(".gguf")
                else f"--{flag}={value}: no Hugging Face model folder (no config.json there); give a folder as "
                "save_pretrained writes it, or base:policy",
            )


def check_engine(cfg: Config, n_ranks: int = 1) -> None:
    """Raise UserError unless the engine can start on this host. cfg: flags of train.py, eval.py or
    a remote sampler."""
    check_tensor_parallel(cfg, n_ranks)
    need(
        cfg.kv_cache_dtype == "auto" or cfg.rollout == "vllm",
        f"--kv_cache_dtype={cfg.kv_cache_dtype}: only vLLM has this cache; use --rollout=vllm, or auto",
    )
    need(
        cfg.rollout != "vllm" or importlib.util.find_spec("vllm") is not None,
        "--rollout=vllm: vLLM is not installed here; install it (make demo does), or use --rollout=hf",
    )


def check_tensor_parallel(cfg: Config, n_ranks: int) -> None:
    """Check that the ranks can be grouped into tensor-parallel engines."""
    flag = f"--rollout_tp={cfg.rollout_tp}"
    need(cfg.rollout_tp >= 1, f"{flag}: must be at least 1")
    if cfg.rollout_tp == 1:
        return
    need(
        cfg.rollout == "vllm",
        f"{flag}: --rollout={cfg.rollout} has an engine on each rank; use --rollout=vllm",
    )
    need(
        n_ranks % cfg.rollout_tp == 0,
        f"{flag}: one engine needs this number of ranks, and {n_ranks} is not a multiple of it; start "
        "a multiple with torchrun --nproc_per_node",
    )
    need(
        cfg.rollout_quant not in ("int8", "fp8")
        or getattr(cfg, "learner_quant", "none") == "none",
        f"{flag}: each rank of a {cfg.rollout_quant} engine scales its part of a row of activations, and an aligned "
        "learner the whole row; use w4a16, or leave the flag out",
    )
    need(
        getattr(cfg, "delay", "none") == "none" or not cfg.dynamic_sampling,
        f"{flag}: with --delay and --dynamic_sampling an engine's ranks need different weights; leave out one flag",
    )
