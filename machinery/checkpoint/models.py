"""Hugging Face model folders: find, check, read and write them."""

from __future__ import annotations

import copy
import fcntl
import importlib.util
import re
import shutil
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

import torch

from machinery.flags import UserError, is_hub_id, need, read_json, shortened

BASE_DIR = "out/base"  # toy models made here


def folders(out: Path | str) -> list[Path]:
    """The folders of a run's complete checkpoints, oldest first."""
    steps = (Path(out) / "checkpoints").glob("step_*")
    named = [path for path in steps if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step_")))


def newest(out: Path | str) -> Path | None:
    """The newest checkpoint of the run folder `out`; None if there is no checkpoint."""
    return next(reversed(folders(out)), None)


def model_in(name: str, which: str) -> str | None:
    """The folder of a model: `name` itself, or the model `which` ("policy" or "actor") of this
    checkpoint or of this run's newest checkpoint; None without such a folder."""
    root = Path(name)
    for folder in (root, root / which, (newest(root) or root) / which):
        path = folder / "config.json"  # a run's config.json has no model_type
        if path.is_file() and '"model_type"' in path.read_text(
            encoding="utf-8", errors="replace"
        ):
            return str(folder)
    return None


def save_model(
    config,
    named_tensors: Iterable,
    dtype: torch.dtype,
    tokenizer,
    folder: Path,
    origin: str,
) -> None:
    """Write (name, whole tensor) pairs into a Hugging Face folder in this dtype.

    dtype: the learner's, because weights rounded differently are a different policy. A tensor is
    rounded before the next one is read, so that memory holds one in full.

    Buffers are not rounded: a resumed run reads routing biases from these files, and rounded biases
    may route to different experts. origin: the folder of the starting model. Its
    generation_config.json, which lists the stop tokens, is copied unchanged."""
    config = copy.deepcopy(config)
    config.dtype = dtype
    model = on_meta(config)
    buffers = dict(model.named_buffers())
    kept = {
        name: x.to(dtype) if x.is_floating_point() and name not in buffers else x
        for name, x in named_tensors
        if name not in model.all_tied_weights_keys
    }
    model.save_pretrained(folder, state_dict=kept)
    for weights in folder.glob("*.safetensors"):  # else only its owner can read it
        weights.chmod((folder / "config.json").stat().st_mode)
    generation = Path(origin) / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, folder / generation.name)
    tokenizer.save_pretrained(folder)


def on_meta(config):
    """The model of a config, with all tensors on the meta device and in the config's precision."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def write_zeros(folder: Path) -> None:
    """Write weights of 0 into a model folder without weights."""
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    model = on_meta(read_config(folder))
    model.config.architectures = [type(model).__name__]  # vLLM finds the family by this
    model.config.save_pretrained(folder)
    left_out = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    kept = {name: x for name, x in model.state_dict().items() if name not in left_out}
    # experts, which transformers joins on loading, are separate tensors in files
    stored = revert_weight_conversion(model, kept)
    zeros = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in stored.items()}
    save_file(zeros, folder / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def one_sentence(folder: Path | str, part: str, fix: str):
    """Convert exceptions of transformers about a model folder to a UserError that names the folder
    and the part."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.disable_progress_bar()  # the run has its own progress bar
    logging.set_verbosity_error()  # the UserError reports weights that do not fit
    try:
        yield
    except UserError:
        raise
    except Exception as e:  # transformers raises many types
        raise UserError(
            f"{folder}: its {part} cannot be read ({shortened(e)}); {fix}"
        ) from None
    finally:
        logging.set_verbosity(before)


FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")  # of a hub model


def from_hub(flag: str, name: str, files=FILES) -> str:
    """The local folder of a hub model, owner/name, downloaded if missing. Raises UserError if the
    download fails."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=list(files))
    except Exception as e:  # offline, unknown or gated: different exception types
        raise UserError(
            f"--{flag}={name}: no such folder here, and the hub cannot provide it ({shortened(e)}); download "
            f"it on a machine with a network (hf download {name}), or give a folder"
        ) from None


def local_folder(flag: str, name: str) -> str:
    """The local folder of a model: a hub model is downloaded, a GGUF file converted. Raises UserError."""
    if name.endswith(".gguf"):
        return from_gguf(Path(name))
    return from_hub(flag, name) if is_hub_id(name) else name


def from_gguf(file: Path) -> str:
    """The folder FILE.gguf.bfloat16, converted if it is missing or older than the file. One process
    converts, others wait. Raises UserError."""
    folder = file.with_name(f"{file.name}.bfloat16")

    def is_made() -> bool:
        made = folder / "config.json"
        return made.is_file() and made.stat().st_mtime >= file.stat().st_mtime

    if not is_made():
        with open(f"{folder}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_made():
                convert_gguf(file, folder)
    return str(folder)


def convert_gguf(file: Path, folder: Path, tied: bool | None = None) -> None:
    """Write a GGUF file's dequantized weights and tokenizer as a bfloat16 folder.

    tied: the head is the embedding, although the file may store and quantize it twice; None: as in the
    file. UserError: the package gguf is missing, or transformers cannot read the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    need(
        importlib.util.find_spec("gguf"),
        f"{file}: reading it needs the package gguf: pip install gguf --no-deps",
    )
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with one_sentence(file, "contents", "give a folder as save_pretrained writes it"):
        tokenizer = AutoTokenizer.from_pretrained(**source)
        stored = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = stored.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if tied is not None:
        config.tie_word_embeddings = tied
    config.dtype = torch.bfloat16
    weights = {name: x.bfloat16() for name, x in stored.state_dict().items()}
    del stored
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, source_name in model.all_tied_weights_keys.items():
        weights[name] = weights[source_name]
    model.load_state_dict(weights)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def read_config(folder: Path | str):
    """The transformers config of a model folder. Raises UserError if it is missing or invalid, or if
    the model is multimodal."""
    from transformers import AutoConfig

    fix = "give a complete folder of a causal language model, as save_pretrained writes it"
    read_json(Path(folder) / "config.json", fix)
    with one_sentence(folder, "config.json", fix):
        config = AutoConfig.from_pretrained(folder)
        need(
            config.get_text_config() is config,
            f"{folder}: a multimodal model of the family {config.model_type}; give a text-only model",
        )
        # torch's SDPA would ignore the cap
        if getattr(config, "attn_logit_softcapping", None):
            config._attn_implementation = "eager"
        # the routers' auxiliary loss is not used
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False
        sizes = config.vocab_size, config.max_position_embeddings
    need(
        all(isinstance(size, int) and size > 0 for size in sizes),
        f"{folder}: its config.json gives no vocab_size and max_position_embeddings above 0; {fix}",
    )
    return config


def check_family(folder: str) -> None:
    """Raise UserError, from config.json alone, if this model cannot be trained."""
    config = read_config(folder)
    need(
        not getattr(config, "quantization_config", None),
        f"{folder}: its weights are already quantized, and a learner cannot train the codes; give the model in 16 "
        "bits, and name a format with --rollout_quant",
    )
    fix = "give a complete checkpoint of a causal language model"
    with one_sentence(folder, "config.json", fix):
        model = on_meta(config)
    need(
        hasattr(model.base_model, "layers"),
        f"{folder}: a model of the family {config.model_type}: its layers are not found (base_model.layers); give a "
        "model of the Qwen or Llama kind",
    )


def check_angles(folder: str, context: int) -> None:
    """Raise UserError if the model's rotary angles would depend on the longest row of a batch.
    context: longest prompt and response, in tokens."""
    config = read_config(folder)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (
        ropes,
        *(value for value in ropes.values() if isinstance(value, dict)),
    ):
        kind = rope.get("rope_type", "default")
        trained_length = rope.get(
            "original_max_position_embeddings", config.max_position_embeddings
        )
        need(
            kind != "dynamic" and (kind != "longrope" or context <= trained_length),
            f"{folder}: rotary angles of the kind {kind}: with {context} tokens of prompt and response they depend "
            f"on a batch's longest row, and vLLM's angles differ; stay within {trained_length} tokens, or give a "
            "different model",
        )


def own_dtype(model: str) -> str:
    """The dtype of the weights of a folder or hub model according to its config.json, the default
    of --dtype and --rollout_dtype; float32 if it names none. A GGUF file is read as bfloat16."""
    if model.endswith(".gguf"):
        return "bfloat16"
    folder = (
        from_hub("model", model, files=["config.json"]) if is_hub_id(model) else model
    )
    named = str(getattr(read_config(folder), "dtype", "")).removeprefix("torch.")
    return named if named in ("float32", "bfloat16", "float16") else "float32"


def read_tokenizer(folder: Path | str):
    """The tokenizer of a model folder. Raises UserError if it is missing or damaged."""
    from transformers import AutoTokenizer

    fix = "copy tokenizer.json and tokenizer_config.json of this model into the folder"
    with one_sentence(folder, "tokenizer", fix):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    # transformers makes an empty tokenizer if there are no files
    need(len(tokenizer) > 1, f"{folder}: its tokenizer has no vocabulary; {fix}")
    return tokenizer


def vocabulary_size(tokenizer, folders: Iterable) -> int:
    """Number of token ids that the tokenizer and these models share. Raises UserError if a model
    lacks an id that prompts may contain.

    A model's embedding may have more rows, which are padding. It may lack added tokens that the
    chat template does not use: the tokenizer of Gemma 3 has a token for images."""
    known, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    sizes = [max(known.values()) + 1]
    for folder in folders:
        rows = read_config(folder).vocab_size
        lacking = [word for word, i in known.items() if i >= rows]
        need(
            all(w in added and w not in str(tokenizer.chat_template) for w in lacking),
            f"{folder}: its tokenizer has {sizes[0]} tokens and its config.json a vocab_size of {rows}; give the "
            "model the tokenizer that it was trained with",
        )
        sizes.append(rows)
    return min(sizes)


def check_weights(folder: Path | str) -> None:
    """Raise UserError if a file of weights is missing or damaged, or if weights that config.json
    ties differ in the files. Called before an engine or a model loads them."""
    from safetensors import safe_open

    folder = Path(folder)
    fix = "copy the folder again, or delete it if it was made here: it is made again"
    files = [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        parts = read_json(index, fix).get("weight_map")
        need(
            isinstance(parts, dict) and parts,
            f"{index}: lists no files of weights; {fix}",
        )
        files = [folder / name for name in sorted({*parts.values()})]
    if not any(file.is_file() for file in files) and any(folder.glob("*.bin")):
        return  # torch's older format is checked on loading
    tied = on_meta(read_config(folder)).all_tied_weights_keys
    stored = {}
    for file in files:
        need(
            file.is_file(),
            f"{folder}: no weights there ({file.name} is missing); {fix}",
        )
        with one_sentence(file, "weights", fix), safe_open(file, "pt") as opened:
            names = {*opened.keys()} & {*tied, *tied.values()}
            stored |= {name: opened.get_tensor(name) for name in names}
    for pair in tied.items():
        held = [stored[name] for name in pair if name in stored]
        need(
            len(held) < 2 or torch.equal(*held),
            f"{folder}: its config.json ties {' and '.join(pair)}, which differ in its files; set tie_word_embeddings "
            "to false there",
        )


def load_model(folder: Path | str, dtype=torch.float32):
    """The causal language model in a folder. Raises UserError if its weights are missing, damaged
    or do not fit the config."""
    from transformers import AutoModelForCausalLM

    fix = "give a complete checkpoint of that shape"
    with one_sentence(folder, "weights", fix):
        config = read_config(folder)
        options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, **options
        )
    wrong = sorted(map(str, (*info["mismatched_keys"], *info["missing_keys"])))
    need(
        not wrong,
        f"{folder}: its weights do not fit its config.json (first: {''.join(wrong[:1])}); {fix}",
    )
    return model
