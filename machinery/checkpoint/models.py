"""Model folders as transformers and the hub know them: found, checked, read and written."""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import torch

import quant
from machinery.checkpoint.tensors import TensorFiles
from machinery.flags import UserError, need, read_json

BASE_DIR = (
    "out/base"  # models that are made here once: embedded ones, and text models of multimodal ones
)


class Export:
    """A model on its way into a Hugging Face folder, in its own precision, one whole tensor after
    the other.

    stream(whole): yields (name, tensor) of the model, each made whole by the function `whole`.
    origin: the folder that the run started from. Its generation_config.json, which lists the tokens
    that end a response, goes along as it is. Made in the main thread: building a model sets torch's
    default precision for a moment. `write` may run in any."""

    def __init__(self, config, stream, tokenizer, origin: str):
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            self.shell = AutoModelForCausalLM.from_config(config)
        self.stream = stream
        self.tokenizer = tokenizer
        self.origin = origin
        self.dtype = self.shell.dtype if config.dtype else None  # None: each tensor's own
        self.left_out = {
            *self.shell.all_tied_weights_keys,
            *(self.shell._keys_to_ignore_on_save or ()),
        }
        shapes = self.kept(stream(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta")))
        together = layout_of(self.converted(dict(shapes)))
        alone = {}
        for name, x in shapes:
            alone |= layout_of(self.converted({name: x}))
        # else some file's tensor is made of several of ours, and we hold them all
        self.alone = alone == together
        self.layout = alone if self.alone else together

    def kept(self, tensors) -> list:
        """Those that a folder has: tied ones once."""
        return [(name, x) for name, x in tensors if name not in self.left_out]

    def converted(self, tensors: dict) -> dict:
        """As a folder has them: in its precision, and the experts, which transformers joins on
        loading, each alone."""
        from transformers.core_model_loading import revert_weight_conversion

        if self.dtype:
            tensors = {
                name: x.to(self.dtype) if self.rounds(name, x) else x for name, x in tensors.items()
            }
        return revert_weight_conversion(self.shell, tensors)

    def rounds(self, name: str, x) -> bool:
        """Whether a tensor has the model's own precision in files: not buffers, such as the biases
        by which some mixtures choose experts. A resumed run reads those from here, and rounded they
        choose others."""
        return x.is_floating_point() and name not in dict(self.shell.named_buffers())

    def write(self, folder: Path, tensors) -> None:
        """Write the folder. tensors: (name, whole tensor), as `stream` yields them; one is held at
        a time."""
        self._write_config(folder)
        with TensorFiles(folder, self.layout) as files:
            parts = ([named] for named in tensors) if self.alone else [tensors]
            for part in parts:
                for name, x in self.converted(dict(self.kept(part))).items():
                    files.write(name, x)

    def _write_config(self, folder: Path) -> None:
        from transformers import GenerationConfig

        folder.mkdir(parents=True, exist_ok=True)
        config = self.shell.config
        config.dtype = str(next(iter(self.layout.values()))[0]).removeprefix("torch.")
        config.architectures = [type(self.shell).__name__]
        config.save_pretrained(folder)
        generation = Path(self.origin) / "generation_config.json"
        if generation.is_file():
            shutil.copyfile(generation, folder / generation.name)
        else:
            GenerationConfig.from_model_config(config).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def layout_of(tensors: dict) -> dict:
    """name -> (dtype, shape)."""
    return {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}


def save_model(config, tensors: dict, tokenizer, folder: Path, origin: str) -> None:
    """A Hugging Face folder from a config and whole tensors, as Export writes it."""
    export = Export(
        config, lambda whole: ((name, whole(x)) for name, x in tensors.items()), tokenizer, origin
    )
    export.write(folder, tensors.items())


def exported(config) -> Export:
    """Names and shapes of the tensors in a folder of this configuration, without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config).state_dict()
    return Export(config, lambda whole: ((name, whole(x)) for name, x in names.items()), None, "")


def write_zeros(model, folder: Path) -> None:
    """Give a folder that has a configuration, and perhaps old weights, weights of 0, tensor by
    tensor. model: of that configuration, without weights."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    layout = exported(model.config).layout
    model.config.architectures = [type(model).__name__]  # by which vLLM knows the family
    model.config.save_pretrained(folder)
    with TensorFiles(folder, layout) as files:
        for name, (dtype, shape) in layout.items():
            files.write(name, torch.zeros(shape, dtype=dtype))


@contextmanager
def one_sentence(folder: Path | str, part: str, fix: str):
    """Turn exceptions of transformers about a model folder into a UserError that names
    folder and part."""
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
        raise UserError(f"{folder}: its {part} cannot be read ({words}); {fix}") from None
    finally:
        logging.set_verbosity(before)


def from_hub(flag: str, name: str, cached: bool = False) -> str:
    """The folder of a model of the hub, owner/name, fetched unless it is there already. UserError:
    it cannot be had.

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


def text_folder(folder: str) -> str:
    """The folder, or where its model also sees or hears, one of its text model alone: only that is
    trained.

    It is made in BASE_DIR once. UserError, one sentence: transformers has no such text model."""
    config = read_config(folder)
    text = config.get_text_config()
    if text is config:
        return folder
    files = [
        (path.resolve(), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(Path(folder).iterdir())
    ]
    digest = hashlib.sha256(repr(files).encode()).hexdigest()[:12]
    made = Path(BASE_DIR) / f"text-{digest}"
    if not (made / "config.json").is_file():
        fix = f"give a model of text alone: this one is of the family {config.model_type}"
        with one_sentence(folder, "text model", fix):
            tensors = text_tensors(folder, text)
        scratch = made.with_name(f"{made.name}.{os.getpid()}")  # another run may make the same one
        save_model(text, tensors, read_tokenizer(folder), scratch, folder)
        try:
            os.replace(scratch, made)
        except OSError:
            shutil.rmtree(scratch)
            if not (made / "config.json").is_file():  # else the other was first
                raise
    return str(made)


def text_tensors(folder: str, text) -> dict:
    """The weights of the text model in a model that also sees or hears, under its own names. text:
    its config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    with torch.device("meta"):
        text_model = AutoModelForCausalLM.from_config(text)
    full_model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto")
    body = full_model.base_model.language_model.state_dict()
    tensors = {f"{text_model.base_model_prefix}.{name}": x for name, x in body.items()}
    tensors["lm_head.weight"] = full_model.get_output_embeddings().weight.detach()
    need(tensors.keys() == text_model.state_dict().keys(), "its tensors have other names")
    return tensors


def read_config(folder: Path | str):
    """The transformers config of a model folder: of its text, where it also sees. UserError: one
    sentence."""
    from transformers import AutoConfig

    fix = "give a whole folder of a causal language model, as save_pretrained writes it"
    read_json(Path(folder) / "config.json", fix)
    with one_sentence(folder, "config.json", fix):
        config = AutoConfig.from_pretrained(folder)
        text = config.get_text_config()
        if getattr(
            text, "attn_logit_softcapping", None
        ):  # the usual attention of torch would leave the cap out
            text._attn_implementation = "eager"
        known = text.vocab_size, text.max_position_embeddings
    is_valid = all(isinstance(size, int) and size > 0 for size in known)
    need(
        is_valid,
        f"{folder}: its config.json gives no vocab_size and max_position_embeddings above 0; {fix}",
    )
    return config


def check_family(folder: str, by_vllm: bool) -> None:
    """UserError, one sentence, from config.json alone: this model would be trained or published
    wrongly. by_vllm: it samples there."""
    config = read_config(folder)
    is_plain = not getattr(config, "quantization_config", None)
    fix = "give the folder in 16 bits, and a format in --rollout_quant"
    need(
        is_plain,
        f"{folder}: its weights are quantized already, and a learner would train their codes; {fix}",
    )
    with one_sentence(folder, "config.json", "give a whole checkpoint of a causal language model"):
        export = exported(config)
    known = hasattr(export.shell.base_model, "layers")
    family = f"{folder}: a model of the family {config.model_type}"
    need(
        known,
        f"{family}: its layers are not found (base_model.layers); give a model of the Qwen or Llama kind",
    )
    sent = quant.by_expert(export.shell.state_dict().items(), quant.expert_parameters(export.shell))
    others = {name for name, _ in sent} - export.layout.keys() - export.left_out
    need(
        not (others and by_vllm),
        f"{family}: vLLM and this repository use different names for its tensors, such as "
        f"{min(others, default='')}; use --rollout=hf",
    )


def check_angles(folder: str, context: int) -> None:
    """UserError, one sentence: its rotary angles would depend on how long the longest row of a
    batch is."""
    config = read_config(folder).get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        kind = rope.get("rope_type", "default")
        trained_length = rope.get(
            "original_max_position_embeddings", config.max_position_embeddings
        )
        need(
            kind != "dynamic" and (kind != "longrope" or context <= trained_length),
            f"{folder}: rotary angles of the kind {kind}: with {context} tokens of prompt and response they depend on "
            f"a batch's longest row, and vLLM's are others; stay within {trained_length} tokens, or give another model",
        )


def own_dtype(folder: Path | str) -> str:
    """The type in which a checkpoint holds its weights, by its config.json; float32 without one."""
    named = str(getattr(read_config(folder), "dtype", "")).removeprefix("torch.")
    return named if named in ("float32", "bfloat16", "float16") else "float32"


def read_tokenizer(folder: Path | str):
    """The tokenizer of a model folder. UserError, one sentence: missing or damaged."""
    from transformers import AutoTokenizer

    fix = "copy tokenizer.json and tokenizer_config.json of this model into the folder"
    with one_sentence(folder, "tokenizer", fix):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    # made up where there are no files
    need(len(tokenizer) > 1, f"{folder}: its tokenizer has no words; {fix}")
    return tokenizer


def vocabulary_size(tokenizer) -> int:
    """How many token ids there are. A model's embedding may have more rows, which stand for
    none."""
    return max(tokenizer.get_vocab().values()) + 1


def check_rows(folder: str, vocabulary: int) -> None:
    """UserError: the tokenizer has ids for which a model has no row. More rows than ids are no
    error."""
    rows = read_config(folder).get_text_config().vocab_size
    need(
        rows >= vocabulary,
        f"{folder}: its tokenizer has {vocabulary} tokens and its config.json a vocab_size of {rows}; give the "
        "model the tokenizer that it was trained with",
    )


def stamps(folder: Path | str) -> dict[str, list[int]]:
    """file -> [size, time in ns], by which a model is told from another one that stood in the same
    folder."""
    files = sorted(path for path in Path(folder).iterdir() if path.is_file())
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of its index, or the one without it. UserError: it
    has two sets of them, of which transformers reads the one and vLLM the other."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not index.is_file():
        return [single]
    fix = "copy the folder again, or delete it where it was made here: it is made again"
    parts = read_json(index, fix).get("weight_map")
    need(isinstance(parts, dict) and parts, f"{index}: lists no files of weights; {fix}")
    files = [folder / str(name) for name in sorted({*parts.values()}, key=str)]
    need(
        not single.is_file() or single in files,
        f"{folder}: {single.name}, and an index of other files ({files[0].name}); delete the older of the two",
    )
    return files


def check_weights(folder: Path | str) -> None:
    """UserError, one sentence, before an engine or a model loads them: a file of weights is not
    there, or damaged."""
    from safetensors import safe_open

    folder, fix = (
        Path(folder),
        "copy the folder again, or delete it where it was made here: it is made again",
    )
    files = weight_files(folder)
    if not any(file.is_file() for file in files) and any(folder.glob("*.bin")):
        return  # torch's older format is looked at when it is loaded
    for file in files:
        need(file.is_file(), f"{folder}: no weights there ({file.name} is missing); {fix}")
        with one_sentence(file, "weights", fix), safe_open(file, "pt") as opened:
            opened.keys()


def load_model(folder: Path | str, dtype=torch.float32):
    """A causal language model. UserError, one sentence: no weights, damaged ones, or those of
    another model."""
    from transformers import AutoModelForCausalLM

    fix = "give a whole checkpoint of that shape"
    with one_sentence(folder, "weights", fix):
        options = {
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
            "config": read_config(folder),
        }
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    model, info = loaded
    wrong = sorted(map(str, (*info["mismatched_keys"], *info["missing_keys"])))
    need(
        not wrong,
        f"{folder}: its weights do not fit its config.json (first: {''.join(wrong[:1])}); {fix}",
    )
    return model
