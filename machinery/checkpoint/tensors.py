"""Files of published weights, written tensor by tensor."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

NAME_OF = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
        self.header, self.place = self._header()

    def _header(self) -> tuple[bytes, dict[str, int]]:
        """(header bytes of a safetensors file, byte offset of each tensor in the file).

        The safetensors library can only write whole dictionaries. The format is 8 bytes with the
        length of the header, the header (JSON: dtype, shape and offsets of every tensor), and the
        tensors' bytes, so the header is known before the first tensor arrives."""
        header = {"__metadata__": {"order": json.dumps([self.order, self.alias])}}
        starts, end = {}, 0
        # the widest dtypes first, so that each tensor begins at a multiple of its item size
        for name in sorted(self.known, key=lambda name: -self.known[name][0].itemsize):
            dtype, shape = self.known[name]
            start, end = end, end + math.prod(shape) * dtype.itemsize
            kind = {"dtype": NAME_OF[dtype], "shape": list(shape)}
            header[name] = {**kind, "data_offsets": [start, end]}
            starts[name] = start
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        beginning = struct.pack("<Q", len(text)) + text
        return beginning, {name: len(beginning) + start for name, start in starts.items()}

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
