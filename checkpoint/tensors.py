"""Named tensors in files: whole dictionaries as they are published, and models tensor by tensor."""

from __future__ import annotations

import json
import math
import struct
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


# ---------------------------------------------------------------------------------------------------------------------
# A model, tensor by tensor
# ---------------------------------------------------------------------------------------------------------------------

FILE_BYTES = 5 * 10**9  # of tensors in one file of a model; one larger tensor has a file of its own
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
DTYPES |= {"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn}
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


class TensorFiles:
    """The safetensors files of a Hugging Face folder, for tensors that come one at a time in any order.

    The library writes whole dictionaries alone. The format: 8 bytes with the length of a header, the header (JSON:
    dtype, shape and place of every tensor), and the tensors' bytes. All is known before the first tensor comes.

    layout: name -> (dtype, shape), of every tensor that will come."""

    def __init__(self, folder: Path, layout: dict[str, tuple]):
        parts = split(layout)
        names = ["model.safetensors"]
        if len(parts) > 1:
            names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
        self.place = {}  # name of a tensor -> its open file, and where it begins there
        self.files = []
        self.layout = layout
        for name, part in zip(names, parts, strict=True):
            self.files.append(open(folder / name, "wb"))  # noqa: SIM115  closed by __exit__
            self._write_header(self.files[-1], part)
        if len(parts) > 1:
            index = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
            total = sum(n_bytes(*known) for known in layout.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
            (folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")

    def _write_header(self, file, part: list[str]) -> None:
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name in part:
            dtype, shape = self.layout[name]
            start, end = end, end + n_bytes(dtype, shape)
            header[name] = {"dtype": NAME_OF[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(struct.pack("<Q", len(text)) + text)
        for name in part:
            self.place[name] = file, 8 + len(text) + header[name]["data_offsets"][0]

    def write(self, name: str, x: torch.Tensor) -> None:
        """Put a tensor where it belongs; it is not kept."""
        file, start = self.place.pop(name)
        if (x.dtype, tuple(x.shape)) != self.layout[name]:
            raise ValueError(f"{name}: {x.dtype} {tuple(x.shape)} is not what was announced, {self.layout[name]}")
        file.seek(start)
        file.write(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, kind, *error) -> None:
        for file in self.files:
            file.close()
        if kind is None and self.place:
            raise ValueError(f"{len(self.place)} tensors did not come, {next(iter(self.place))} among them")


def n_bytes(dtype, shape) -> int:
    return math.prod(shape) * dtype.itemsize


def split(layout: dict[str, tuple]) -> list[list[str]]:
    """The names of each file's tensors, the widest numbers first: so each begins at a multiple of its own width."""
    parts, size = [[]], 0
    for name in sorted(layout, key=lambda name: -layout[name][0].itemsize):
        size += n_bytes(*layout[name])
        if parts[-1] and size > FILE_BYTES:
            parts.append([])
            size = n_bytes(*layout[name])
        parts[-1].append(name)
    return parts
