"""Checkpoints at update boundaries: whole, atomic, and enough to go on as if nothing had happened.

    OUT/checkpoints/step_000050/policy/      Hugging Face folder, ready for eval.py or vLLM
                                actor/       the same, with two models
                                policy_adapter/, actor_adapter/
                                             with LoRA: adapters in peft's format (model/lora.py)
                                learner.pt   optimizers, counters, controllers
                                             (kappa, lambda_distill)
                                rank0.pt     that rank's source, pending groups with their ref
                                             columns, states of the random number generators
                                digests.json SHA-256 of every file

Everything is written beside its final name, onto the disk, and renamed once: a checkpoint exists whole or not at
all. One that was damaged later is found by its digests, and the one before it is taken.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from flags import UserError, need, read_json
from rollout import Response, Rollout
from sampling import Sampling

FORMAT = 3  # 2 with digests
# Format 1, which has no "format" key, differs from format 2 by these names alone: theirs -> ours.
RENAMED = {
    # of learner.pt
    "carry": "controllers",
    "world": "n_ranks",
    # of a response
    "kept_offsets": "allowed_offsets",
    "kept_ids": "allowed_ids",
    # of the ref columns
    "s_ids": "support_ids",
    "s_logp": "support_logp",
    "s_logp_ref": "support_logp_ref",
    "logp_actor_ref": "actor_logp_ref",
    "kl_before": "kl_ref",
    "kl_after": "kl_after_ref",
}


def renamed(state: dict) -> dict:
    """The same values under the names of format 2."""
    return {RENAMED.get(name, name): value for name, value in state.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Save and load
# ---------------------------------------------------------------------------------------------------------------------


def save(run, step: int, learner, source, pending: list[list[Rollout]], controllers: dict) -> Path:
    """Write the checkpoint of `step` updates, delete all but the newest `--keep`; returns its folder.

    Collective. run: a run.Run, of which cfg, configs and tokenizer are read. pending: the minibatches of groups that
    are not trained on yet. UserError: it could not be written there; the sentence says where it is instead."""
    shared = {
        "format": FORMAT,
        "step": step,
        "n_ranks": learner.comm.size,
        "learner": learner.state_dict(),
        "controllers": controllers,
    }
    own = {"source": source.state_dict(), "pending": [pack(groups) for groups in pending], "rng": rng_state()}
    checkpoints = Path(run.cfg.out) / "checkpoints"
    final = checkpoints / f"step_{step:06d}"
    why = write(final, run, learner, shared, own)
    if why:
        spare = Path(tempfile.gettempdir()) / f"{run.folder.resolve().name}-{final.name}"
        saved_there = not write(spare, run, learner, shared, own)
        raise UserError(not_written(final, why, spare if saved_there else None))
    if learner.comm.rank == 0:
        for old in folders(run.cfg.out)[: -run.cfg.keep]:
            shutil.rmtree(old)
    learner.comm.barrier()
    return final


def write(final: Path, run, learner, shared: dict, own: dict) -> str:
    """Write one checkpoint, whole or not at all. Why it could not be written, on every rank; "" where it was.

    Collective: a rank that cannot write goes on with the others to the end."""
    comm, first = learner.comm, learner.comm.rank == 0
    scratch = final.with_name(final.name + ".writing")
    attempt = Attempt()
    if first:
        attempt(shutil.rmtree, scratch, ignore_errors=True)
        attempt(scratch.mkdir, parents=True)
    comm.barrier()
    for name in learner.names:
        adapter = learner.adapter(name)
        if adapter is not None and first:
            attempt(adapter.save, scratch / f"{name}_adapter", getattr(run, name))
        if adapter is not None and run.cfg.lora_save == "adapter":
            continue
        tensors = {k: v.cpu() for k, v in learner.named_tensors(name)}
        if first:
            attempt(save_model, run.configs[name], tensors, run.tokenizer, scratch / name, getattr(run, name))
    if first:
        attempt(save_tensors, shared, scratch / "learner.pt")
    attempt(save_tensors, own, scratch / f"rank{comm.rank}.pt")
    failed = comm.any(attempt.error)  # every rank has written its part
    if first and not failed:
        attempt(seal, scratch)
        attempt(shutil.rmtree, final, ignore_errors=True)
        attempt(os.replace, scratch, final)
        attempt(flush, final.parent)
    failed = comm.any(attempt.error)
    if first and failed:
        shutil.rmtree(scratch, ignore_errors=True)
    return (attempt.why or "another rank could not write") if failed else ""


class Attempt:
    """Runs one write after the other until one fails."""

    def __init__(self):
        self.error: Exception | None = None

    def __call__(self, do, *args, **more) -> None:
        if self.error is None:
            try:
                do(*args, **more)
            except Exception as e:  # a full disk is an OSError, or whatever torch and safetensors make of it
                self.error = e

    @property
    def why(self) -> str:
        if isinstance(self.error, OSError) and self.error.strerror:
            return self.error.strerror
        return str(self.error).partition("\n")[0] if self.error else ""


def not_written(final: Path, why: str, spare: Path | None) -> str:
    """The sentence for a checkpoint that could not be written where it should be."""
    run = final.parent.parent
    if spare is None:
        mend = f"make room there and go on from the checkpoint before with --resume --out={run}"
    else:
        mend = f"it is whole in {spare}: make room, move it to {final}, and go on with --resume --out={run}"
    return f"{final}: the checkpoint could not be written ({why}); {mend}"


def save_model(config, tensors: dict, tokenizer, folder: Path, origin: str) -> None:
    """A Hugging Face folder from a config and whole tensors; tied heads are written once.

    origin: the folder that the run started from. Its generation_config.json, which lists the tokens that end a
    response, goes along as it is."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config)
    shell.save_pretrained(folder, state_dict=dict(tensors))
    tokenizer.save_pretrained(folder)
    generation = Path(origin) / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, folder / generation.name)


@contextmanager
def one_sentence(folder: Path | str, part: str, mend: str):
    """Whatever transformers makes of a model folder, many lines of it, as one UserError that names folder and part."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.disable_progress_bar()  # the run has a bar of its own
    logging.set_verbosity_error()  # its report of weights that do not fit goes into the sentence
    try:
        yield
    except UserError:
        raise
    except Exception as e:  # they raise all kinds
        words = " ".join(str(e).split())[:200] or type(e).__name__
        raise UserError(f"{folder}: its {part} cannot be read ({words}); {mend}") from None
    finally:
        logging.set_verbosity(before)


def from_hub(flag: str, name: str, cached: bool = False) -> str:
    """The folder of a model of the hub, owner/name, fetched unless it is there already. UserError: it cannot be had.

    cached: another process of this host has just fetched it."""
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return snapshot_download(name, allow_patterns=files, local_files_only=cached)
    except Exception as e:  # offline, unknown, not for everybody: they have a class for each
        why = " ".join(str(e).split())[:200] or type(e).__name__
        raise UserError(
            f"--{flag}={name}: no such folder here, and the hub does not give it ({why}); fetch it where there is a "
            f"network (hf download {name}), or give a folder"
        ) from None


def text_folder(folder: str, base_dir: str) -> str:
    """The folder, or where its model also sees or hears, one of its text model alone: only that is trained.

    It is made in `base_dir` once. UserError, one sentence: transformers has no such text model."""
    config = read_config(folder)
    text = config.get_text_config()
    if text is config:
        return folder
    files = [(path.resolve(), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(Path(folder).iterdir())]
    which = hashlib.sha256(repr(files).encode()).hexdigest()[:12]
    made = Path(base_dir) / f"text-{which}"
    if not (made / "config.json").is_file():
        mend = f"give a model of text alone: this one is of the family {config.model_type}"
        with one_sentence(folder, "text model", mend):
            tensors = text_tensors(folder, text)
        scratch = made.with_name(made.name + ".writing")
        shutil.rmtree(scratch, ignore_errors=True)
        save_model(text, tensors, read_tokenizer(folder), scratch, folder)
        os.replace(scratch, made)
    return str(made)


def text_tensors(folder: str, text) -> dict:
    """The weights of the text model in a model that also sees or hears, under its own names. text: its config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    with torch.device("meta"):
        own = AutoModelForCausalLM.from_config(text)
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto")
    body = whole.base_model.language_model.state_dict()
    tensors = {f"{own.base_model_prefix}.{name}": x for name, x in body.items()}
    tensors["lm_head.weight"] = whole.get_output_embeddings().weight.detach()
    need(tensors.keys() == own.state_dict().keys(), "its tensors have other names")
    return tensors


def read_config(folder: Path | str):
    """The transformers config of a model folder: of its text, where it also sees. UserError: one sentence."""
    from transformers import AutoConfig

    mend = "give a whole folder of a causal language model, as save_pretrained writes it"
    read_json(Path(folder) / "config.json", mend)
    with one_sentence(folder, "config.json", mend):
        config = AutoConfig.from_pretrained(folder)
        known = config.get_text_config().vocab_size, config.get_text_config().max_position_embeddings
    whole = all(isinstance(size, int) and size > 0 for size in known)
    need(whole, f"{folder}: its config.json gives no vocab_size and max_position_embeddings above 0; {mend}")
    return config


def read_tokenizer(folder: Path | str):
    """The tokenizer of a model folder. UserError, one sentence: there is none, or it is damaged."""
    from transformers import AutoTokenizer

    mend = "copy tokenizer.json and tokenizer_config.json of this model into the folder"
    with one_sentence(folder, "tokenizer", mend):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    need(len(tokenizer) > 1, f"{folder}: its tokenizer has no words; {mend}")  # made up where there are no files
    return tokenizer


def vocabulary_size(tokenizer) -> int:
    """How many token ids there are. A model's embedding may have more rows, which stand for none."""
    return max(tokenizer.get_vocab().values()) + 1


def check_rows(folder: str, vocabulary: int) -> None:
    """UserError: the tokenizer has ids for which a model has no row. More rows than ids are no error."""
    rows = read_config(folder).get_text_config().vocab_size
    need(
        rows >= vocabulary,
        f"{folder}: its tokenizer has {vocabulary} tokens and its config.json a vocab_size of {rows}; give the "
        "model the tokenizer that it was trained with",
    )


def check_weights(folder: Path | str) -> None:
    """UserError, one sentence, before an engine or a model loads them: a file of weights is not there, or damaged."""
    from safetensors import safe_open

    folder, mend = Path(folder), "copy the folder anew, or delete one of --base_dir: it is made again"
    indices = sorted(folder.glob("*.index.json"))
    files = [folder / "model.safetensors"]
    if indices:
        shards = read_json(indices[0], mend).get("weight_map")
        need(isinstance(shards, dict) and shards, f"{indices[0]}: lists no files of weights; {mend}")
        files = [folder / str(name) for name in sorted({*shards.values()}, key=str)]
    elif any(folder.glob("*.bin")):
        return  # torch's older format is looked at when it is loaded
    for file in files:
        need(file.is_file(), f"{folder}: no weights there ({file.name} is missing); {mend}")
        with one_sentence(file, "weights", mend), safe_open(file, "pt") as opened:
            opened.keys()


def load_model(folder: Path | str, dtype=torch.float32):
    """A causal language model. UserError, one sentence: no weights, damaged ones, or those of another model."""
    from transformers import AutoModelForCausalLM

    mend = "give a whole checkpoint of that shape"
    with one_sentence(folder, "weights", mend):
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    model, info = loaded
    wrong = sorted(map(str, (*info["mismatched_keys"], *info["missing_keys"])))
    need(not wrong, f"{folder}: its weights do not fit its config.json (first: {''.join(wrong[:1])}); {mend}")
    return model


def load(folder: Path, learner, source) -> tuple[int, list[list[Rollout]], dict]:
    """Bring learner and source back; returns (step, pending, controllers) as `save` took them.

    The learner's weights were loaded from the folder already. UserError: `shared_by_ranks`'s."""
    shared = shared_by_ranks(folder, learner.comm.size)
    own = torch.load(folder / f"rank{learner.comm.rank}.pt", weights_only=True)
    learner.load_state_dict(shared["learner"])
    source.load_state_dict(own["source"])
    set_rng_state(own["rng"])
    return shared["step"], [unpack(packed) for packed in own["pending"]], shared["controllers"]


def shared_by_ranks(folder: Path, n_ranks: int, mmap: bool = False) -> dict:
    """What is in learner.pt. mmap: tensors stay on the disk, for a look at the rest.

    UserError: the checkpoint has another number of ranks, or a format of the future."""
    shared = renamed(torch.load(folder / "learner.pt", weights_only=True, mmap=mmap))
    if shared.get("format", 1) > FORMAT:
        raise UserError(
            f"--resume: {folder} has checkpoint format {shared['format']}, and this revision reads up to {FORMAT}; "
            "resume with the revision that wrote it"
        )
    if shared["n_ranks"] != n_ranks:
        raise UserError(
            f"--resume: {folder} was written by {shared['n_ranks']} rank(s) and this run has {n_ranks}; use as many"
        )
    return shared


# ---------------------------------------------------------------------------------------------------------------------
# Whole on the disk, and found to be whole
# ---------------------------------------------------------------------------------------------------------------------


def save_tensors(state: dict, path: Path) -> None:
    with open(path, "wb") as f:
        torch.save(state, f)


def flush(path: Path) -> None:
    """Onto the disk: a loss of power does not undo it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(folder: Path) -> None:
    """Write digests.json, and everything onto the disk."""
    digests = {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / "digests.json").write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
    for path in (*folder.rglob("*"), folder):
        flush(path)


def digest(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def damage(folder: Path, part: str = "") -> str:
    """What is wrong with a checkpoint, or with one model's folder in it; "" where nothing is."""
    if not (folder / "digests.json").is_file():
        return damage_without_digests(folder)
    try:
        digests = json.loads((folder / "digests.json").read_text(encoding="utf-8"))
        for name, known in digests.items():
            if not name.startswith(part):
                continue
            if not (folder / name).is_file():
                return f"{name} is missing"
            if digest(folder / name) != known:
                return f"{name} has other bytes than were written"
    except (OSError, ValueError, AttributeError) as e:
        return f"digests.json cannot be read ({e})"
    return ""


def damage_without_digests(folder: Path) -> str:
    """The same for checkpoints of formats 1 and 2, which carry none: they can be read, or they cannot."""
    if not (folder / "learner.pt").is_file():
        return "learner.pt is missing"
    try:
        shared = torch.load(folder / "learner.pt", weights_only=True, mmap=True)
        ranks = range(renamed(shared)["n_ranks"])
        for path in (folder / f"rank{rank}.pt" for rank in ranks):
            torch.load(path, weights_only=True, mmap=True)
    except Exception as e:  # whatever a file that is cut short makes of torch.load
        return f"it cannot be read ({type(e).__name__})"
    return "digests.json is missing" if shared.get("format", 1) > 2 else ""


def folders(out: Path | str) -> list[Path]:
    """The folders of a run's checkpoints, oldest first; one that is being written is not among them."""
    found = (Path(out) / "checkpoints").glob("step_*")
    named = [path for path in found if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step_")))


def newest(out: Path | str, part: str = "") -> Path | None:
    """The newest whole checkpoint of the run folder `out`; None if the run was killed before its first.

    part: only this model's folder matters. Damaged ones are named on the screen and left out. UserError: all are."""
    found = folders(out)
    damaged = []
    for folder in reversed(found):
        wrong = damage(folder, part)
        if not wrong:
            for said in damaged:
                print(f"warning: {said}; the checkpoint before it is taken", file=sys.stderr)
            return folder
        damaged.append(f"{folder} is damaged ({wrong})")
    mend = "start anew with --overwrite, or in another --out"
    need(not found, f"{out}: no checkpoint there is whole; {mend} (the newest: {''.join(damaged[:1])})")
    return None


def set_aside(out: Path | str, chosen: Path | None) -> None:
    """Rename the checkpoints after the chosen one, which were damaged, so that none is taken for the newest."""
    found = folders(out)
    for folder in found[found.index(chosen) + 1 :] if chosen else []:
        aside = folder.with_name(folder.name + ".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)


# ---------------------------------------------------------------------------------------------------------------------
# States of the random number generators
# ---------------------------------------------------------------------------------------------------------------------


def rng_state() -> dict:
    """The generators of torch, CUDA, numpy and Python, as plain containers."""
    kind, keys, *rest = np.random.get_state()
    python = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
        "python": [python[0], list(python[1]), python[2]],
    }


def set_rng_state(state: dict) -> None:
    """The inverse of rng_state."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    python = state["python"]
    random.setstate((python[0], tuple(python[1]), python[2]))


@contextmanager
def same_rng_state():
    """The generators stand after this as they stood before."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)


# ---------------------------------------------------------------------------------------------------------------------
# Pending groups
# ---------------------------------------------------------------------------------------------------------------------


def pack(groups: list[Rollout]) -> dict:
    """Groups as containers of tensors, strings and numbers: a checkpoint holds no pickled classes."""
    packed = []
    for group in groups:
        state = {
            **vars(group),
            "sampling": dict(vars(group.sampling)),
            "responses": [dict(vars(response)) for response in group.responses],
        }
        packed.append(converted(state, np.ndarray, lambda x: torch.from_numpy(np.ascontiguousarray(x))))
    return {"groups": packed}


def unpack(packed: dict) -> list[Rollout]:
    """The inverse of pack, for both formats."""
    groups = []
    for tensors in packed["groups"]:
        state = converted(tensors, torch.Tensor, torch.Tensor.numpy)
        state["uid"] = tuple(state["uid"])
        state["sampling"] = Sampling(**state["sampling"])
        state["responses"] = [Response(**renamed(response)) for response in state["responses"]]
        state["ref"] = renamed(state["ref"])
        groups.append(Rollout(**state))
    return groups


def converted(x, kind: type, convert):
    """x with `convert` applied to every value of the type `kind`, inside dicts and lists too."""
    if isinstance(x, kind):
        return convert(x)
    if isinstance(x, dict):
        return {name: converted(value, kind, convert) for name, value in x.items()}
    if isinstance(x, list):
        return [converted(value, kind, convert) for value in x]
    return x


# ---------------------------------------------------------------------------------------------------------------------
# Weights on disk
# ---------------------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: dict, mark: str = "") -> None:
    """Write published tensors to one safetensors file, in their order: completely or not at all.

    Tensors that share memory are written once. mark: an ending for the scratch file, different for
    each writer where several may write to the same path."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    own = {}
    first_name = {}  # of the tensors at one address
    alias = {}  # name -> the name under which its bytes are in the file
    for name, x in tensors.items():
        first = first_name.setdefault((x.data_ptr(), x.shape, x.dtype), name)
        if first == name:
            own[name] = x.contiguous().cpu()
        else:
            alias[name] = first
    # One entry for both: safetensors writes several in any order, and equal weights must make
    # equal files.
    metadata = {"order": json.dumps([list(tensors), alias])}
    scratch = path.with_name(path.name + (mark or ".writing"))
    save_file(own, scratch, metadata=metadata)
    scratch.replace(path)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors that write_tensors wrote, in their order."""
    from safetensors import safe_open

    with safe_open(path, "pt") as f:
        names, alias = json.loads(f.metadata()["order"])
        return {name: f.get_tensor(alias.get(name, name)) for name in names}
