"""Named tensors in one file, as they are published."""

from __future__ import annotations

import json
from pathlib import Path

import torch


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
