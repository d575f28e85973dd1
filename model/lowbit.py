"""Quantized copies of model folders, from which vLLM starts, made tensor by tensor: packed in the
format of compressed-tensors, or dequantized."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from machinery.checkpoint.shards import from_all
from machinery.flags import from_environment
from model import memory
from quant import ROUTERS, Format, by_expert, expert_parameters, for_engine

PART = 1 << 28  # bytes of tensors in one file, which are in memory together


def quantized_checkpoint(folder: str, fmt: Format, out: str, packed: bool = True) -> str:
    """Write a quantized copy of a model folder for an engine; returns its path, `out`.

    Configuration and tokenizer are copied; `for_engine` computes the tensors one by one. packed:
    low-bit tensors; else dequantized tensors."""
    weights = shutil.ignore_patterns("*.safetensors*", "*.bin", "*.pt")
    shutil.copytree(folder, out, ignore=weights, dirs_exist_ok=True)
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if packed:
        text = json.dumps({**config, "quantization_config": engine_config(fmt)}, indent=1)
        (Path(out) / "config.json").write_text(text, encoding="utf-8")
    model, named_tensors = stored_tensors(folder)
    tied = model.config.tie_word_embeddings  # the files may still have two equal tensors
    stream = by_expert(for_engine(named_tensors, model, fmt, packed), expert_parameters(model))
    write_parts(
        ((name, x) for name, x in stream if not (tied and name == "lm_head.weight")), Path(out)
    )
    return out


def quantized_for_a_node(folder: str, fmt: Format, packed: bool):
    """(path of a quantized copy for all ranks of a node, its TemporaryDirectory or None).
    Collective.

    The node's first rank writes the copy, and owns the TemporaryDirectory, which deletes it."""
    folder_lock = None
    local = from_environment("LOCAL_RANK", 0) if dist.is_initialized() else 0
    if local == 0:
        folder_lock = tempfile.TemporaryDirectory()
        quantized_checkpoint(folder, fmt, folder_lock.name, packed)
    # every rank waits until the copies are complete
    paths = from_all(folder_lock and folder_lock.name)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return paths[
        rank - local
    ], folder_lock  # torchrun counts the ranks of a node one after the other


def stored_tensors(folder: str):
    """(a folder's model without weights, an iterable of (name, float32 tensor) read from its files
    one by one).

    If names or dtypes in the files are not those of the model, transformers reads the whole
    model."""
    from transformers import AutoModelForCausalLM

    stored, model = memory.Stored(folder), memory.unread(folder)
    tensors = stored.named(model)
    embedding = next(
        name for name, p in model.named_parameters() if p is model.get_input_embeddings().weight
    )
    if not stored.fit(model, tensors) or embedding not in tensors:
        full_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return full_model, full_model.state_dict().items()
    pieces = {name: stored.pieces(name, 0, len(x)) for name, x in tensors.items()}
    return model, (
        (name, torch.cat([piece.float() for _, piece in rows])) for name, rows in pieces.items()
    )


def write_parts(named_tensors, out: Path) -> None:
    """Write a stream of tensors as the files of a Hugging Face folder, of PART bytes or one tensor
    each."""
    from safetensors.torch import save_file

    files, part, size = [], {}, 0

    def write():
        files.append((out / f"model-{len(files) + 1:05d}.safetensors", list(part)))
        save_file(part, files[-1][0], metadata={"format": "pt"})
        part.clear()

    for name, x in named_tensors:
        if part and size + x.nbytes > PART:
            write()
            size = 0
        part[name] = x.contiguous().clone()
        size += x.nbytes
    write()
    if len(files) == 1:
        files[0][0].rename(out / "model.safetensors")
        return
    index = {name: path.name for path, names in files for name in names}
    (out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}, indent=1)
    )


def engine_config(fmt: Format) -> dict:
    """`quantization_config` of a checkpoint with packed tensors (compressed-tensors)."""
    kind = "float" if fmt.dtype.is_floating_point else "int"
    if fmt.activations:
        style = f"{kind}-quantized"
        weights = {
            "num_bits": 8,
            "type": kind,
            "symmetric": True,
            "strategy": "channel",
            "dynamic": False,
        }
        inputs = {
            "num_bits": 8,
            "type": kind,
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    else:
        style = "pack-quantized"
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": fmt.group,
            "dynamic": False,
        }
        inputs = None
    return {
        "quant_method": "compressed-tensors",
        "format": style,
        "quantization_status": "compressed",
        "ignore": ["lm_head", *(rf"re:.*\.{name}(\..*)?$" for name in ROUTERS)],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }
