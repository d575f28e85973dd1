"""Files of named tensors, written tensor by tensor: published weights, and the files of model
folders."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
DTYPES |= {"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn}
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


def header_of(layout: dict[str, tuple], names, metadata: dict) -> tuple[bytes, dict[str, int]]:
    """(header bytes of a safetensors file with these tensors in this order, byte offset of each
    tensor in the file).

    The safetensors library can only write whole dictionaries. The format is 8 bytes with the length
    of the header, the header (JSON: dtype, shape and offsets of every tensor), and the tensors'
    bytes, so the header is known before the first tensor arrives.

    layout: name -> (dtype, shape)."""
    header, starts, end = {"__metadata__": metadata}, {}, 0
    for name in names:
        dtype, shape = layout[name]
        start, end = end, end + n_bytes(dtype, shape)
        header[name] = {"dtype": NAME_OF[dtype], "shape": list(shape), "data_offsets": [start, end]}
        starts[name] = start
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    beginning = struct.pack("<Q", len(text)) + text
    return beginning, {name: len(beginning) + start for name, start in starts.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Published tensors
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """Named tensors that can be iterated repeatedly; each iteration computes them again, so that no
    second model is in memory."""

    read: Callable

    def __iter__(self):
        return self.read()


class Layout:
    """The offset of each tensor of a stream in one safetensors file. Tensors that share memory are
    written once. Equal tensors give equal files."""

    def __init__(self, named_tensors):
        self.order: list[str] = []
        self.alias: dict[str, str] = {}  # name -> name of the tensor in the file with its bytes
        self.known: dict[str, tuple] = {}  # name -> (dtype, shape) of the tensors in the file
        first: dict[tuple, tuple] = {}  # (address, shape, dtype) -> (storage, name)
        for name, x in named_tensors:
            self.order.append(name)
            place = (x.data_ptr(), x.shape, x.dtype)
            storage, other = first.get(place, (None, ""))
            if storage is not None and not storage.expired():  # else the memory was reused
                self.alias[name] = other
                continue
            first[place] = (StorageWeakRef(x.untyped_storage()), name)
            self.known[name] = (x.dtype, tuple(x.shape))
        # The widest dtypes first, so that each tensor begins at a multiple of its item size.
        names = sorted(self.known, key=lambda name: -self.known[name][0].itemsize)
        self.header, self.place = header_of(
            self.known, names, {"order": json.dumps([self.order, self.alias])}
        )

    def write(self, path: Path, named_tensors) -> None:
        """Write a stream of these tensors, atomically, without keeping them in memory."""
        left = set(self.known)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(path.name + ".writing")
        with open(scratch, "wb") as file:
            file.write(self.header)
            for name, x in named_tensors:
                if name in self.alias:
                    continue
                left.remove(name)
                dtype, shape = self.known[name]
                if tuple(x.shape) != shape:
                    raise ValueError(
                        f"{name}: {tuple(x.shape)} differs from the previous shape, {shape}"
                    )
                file.seek(self.place[name])
                file.write(
                    x.detach().to(dtype).cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                )
        if left:
            raise ValueError(f"{len(left)} tensors are missing, {min(left)} among them")
        scratch.replace(path)


def read_tensors(path: Path) -> Published:
    """The tensors of a file that a Layout wrote, in the order of the stream. The file stays open,
    so it may be deleted while they are read."""
    from safetensors import safe_open

    file = safe_open(path, "pt")
    names, alias = json.loads(file.metadata()["order"])
    return Published(lambda: ((name, file.get_tensor(alias.get(name, name))) for name in names))


# ---------------------------------------------------------------------------------------------------------------------
# A model, tensor by tensor
# ---------------------------------------------------------------------------------------------------------------------

FILE_BYTES = 5 * 10**9  # maximum bytes of tensors per file; a larger tensor gets its own file


class TensorFiles:
    """Writer of the safetensors files of a Hugging Face folder, for tensors that arrive one at a
    time in any order.

    layout: name -> (dtype, shape) of every tensor."""

    def __init__(self, folder: Path, layout: dict[str, tuple]):
        parts = split(layout)
        names = ["model.safetensors"]
        if len(parts) > 1:
            names = [
                f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)
            ]
        self.place = {}  # name of a tensor -> (its open file, its offset there)
        self.files = []
        self.layout = layout
        for name, part in zip(names, parts, strict=True):
            self.files.append(open(folder / name, "wb"))  # noqa: SIM115  closed by __exit__
            self._write_header(self.files[-1], part)
        if len(parts) > 1:
            index = {
                tensor: name for name, part in zip(names, parts, strict=True) for tensor in part
            }
            total = sum(n_bytes(*known) for known in layout.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
            (folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")

    def _write_header(self, file, part: list[str]) -> None:
        header, place = header_of(self.layout, part, {"format": "pt"})
        file.write(header)
        self.place |= {name: (file, start) for name, start in place.items()}

    def write(self, name: str, x: torch.Tensor) -> None:
        """Write a tensor at its offset, without keeping it in memory."""
        file, start = self.place.pop(name)
        if (x.dtype, tuple(x.shape)) != self.layout[name]:
            raise ValueError(
                f"{name}: {x.dtype} {tuple(x.shape)} differs from the announced {self.layout[name]}"
            )
        file.seek(start)
        file.write(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, kind, *error) -> None:
        for file in self.files:
            file.close()
        if kind is None and self.place:
            raise ValueError(
                f"{len(self.place)} tensors are missing, {next(iter(self.place))} among them"
            )


def n_bytes(dtype, shape) -> int:
    return math.prod(shape) * dtype.itemsize


def split(layout: dict[str, tuple]) -> list[list[str]]:
    """The names of the tensors of each file, the widest dtypes first, so that each tensor begins at
    a multiple of its item size."""
    parts, size = [[]], 0
    for name in sorted(layout, key=lambda name: -layout[name][0].itemsize):
        size += n_bytes(*layout[name])
        if parts[-1] and size > FILE_BYTES:
            parts.append([])
            size = n_bytes(*layout[name])
        parts[-1].append(name)
    return parts
