"""Published weights on disk: one file for all ranks that share it, written tensor by tensor. HeteroRL, section 4.2.

Gathered weights come one tensor after the other, and every rank must ask for each of them; the rank that writes
(comm.writes: one of those that share a disk) puts it where it belongs and forgets it, so nobody holds a second model.
That needs to know all names, types and shapes before: the first publication reads the stream twice. Beside the file
lie its manifest and, with --sync_delta, what has changed since the file before; every rank maps all three.

The file is safetensors' format (checkpoint.read_tensors reads it): 8 bytes with the length of a header, the header, the
tensors' bytes. Equal weights make equal files, and weights of the same model files of the same size.
"""

from __future__ import annotations

import filecmp
import json
import mmap
import struct
from collections import deque
from pathlib import Path

import msgspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from checkpoint.tensors import NAME_OF, n_bytes
from remote import delta, wire
from remote.account import VERSIONS, retain_weights, write_atomically


class Layout:
    """Where each tensor of a stream belongs in a file. Tensors that share memory are written once."""

    def __init__(self, named_tensors, cast):
        self.order: list[str] = []
        self.alias: dict[str, str] = {}  # name -> the name under which its bytes are in the file
        self.known: dict[str, tuple] = {}  # name -> (dtype, shape), of those that are in the file
        first: dict[tuple, tuple] = {}  # place in memory -> (its storage, name)
        for name, x in named_tensors:
            self.order.append(name)
            place = (x.data_ptr(), x.shape, x.dtype)
            storage, other = first.get(place, (None, ""))
            if storage is not None and not storage.expired():  # else other memory was there
                self.alias[name] = other
                continue
            first[place] = (StorageWeakRef(x.untyped_storage()), name)
            self.known[name] = (cast(x.dtype), tuple(x.shape))
        self._lay_out()

    def _lay_out(self) -> None:
        """The widest numbers first, so that each tensor begins at a multiple of its own width."""
        header = {"__metadata__": {"order": json.dumps([self.order, self.alias])}}
        self.place: dict[str, int] = {}
        end = 0
        for name in sorted(self.known, key=lambda name: -self.known[name][0].itemsize):
            dtype, shape = self.known[name]
            start, end = end, end + n_bytes(dtype, shape)
            header[name] = {"dtype": NAME_OF[dtype], "shape": list(shape), "data_offsets": [start, end]}
            self.place[name] = start
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.header = struct.pack("<Q", len(text)) + text

    def write(self, path: Path, named_tensors) -> None:
        """Write a stream of these tensors; none of them is kept."""
        left = set(self.known)
        with open(path, "wb") as file:
            file.write(self.header)
            for name, x in named_tensors:
                if name in self.alias:
                    continue
                left.remove(name)
                dtype, shape = self.known[name]
                if tuple(x.shape) != shape:
                    raise ValueError(f"{name}: {tuple(x.shape)} is not the shape of before, {shape}")
                file.seek(len(self.header) + self.place[name])
                file.write(x.detach().to(dtype).cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        if left:
            raise ValueError(f"{len(left)} tensors did not come, {min(left)} among them")


def halved(dtype: torch.dtype) -> torch.dtype:
    """The type in which a number travels with --sync_dtype=bfloat16."""
    return torch.bfloat16 if dtype.is_floating_point else dtype


def as_it_is(dtype: torch.dtype) -> torch.dtype:
    return dtype


class Store:
    """The folder of published weights, the same for all ranks that share a disk.

    cast: the type in which numbers of a type travel. with_deltas: compare each file with the one before."""

    def __init__(self, folder: Path, comm, cast, with_deltas: bool):
        self.folder = folder
        self.comm = comm
        self.cast = cast
        self.with_deltas = with_deltas
        self.layout: Layout | None = None  # known to the rank that writes
        self.files: list[Path] = []  # of this session

    def publish(self, version: int, named_tensors) -> tuple[Path, float]:
        """Write a version; (its file, when it was published). Collective. named_tensors: can be read more than once."""
        path = self.folder / f"v{version:06d}.safetensors"
        if self.comm.writes:
            self._write(path, named_tensors)
        else:
            for _ in range(1 if self.files else 2):  # as often as the rank that writes does
                deque(named_tensors, maxlen=0)
        stamp = path.stat().st_mtime if self.comm.rank == 0 else 0.0
        self.files = [*self.files[-VERSIONS:], path]
        return path, self.comm.max([stamp])[0]  # nobody goes on before the files are whole

    def _write(self, path: Path, named_tensors) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tidy(path)
        if self.layout is None:
            self.layout = Layout(named_tensors, self.cast)
        self._write_if_new(path, named_tensors)
        of = wire.manifest(path.name, mapped(path))
        write_atomically(path.with_suffix(".manifest"), msgspec.msgpack.encode(of), flush=False)
        change = delta.between(self.files[-1], path) if self.with_deltas and self.files else None
        if change is not None:
            write_atomically(path.with_suffix(".delta"), change, flush=False)

    def _tidy(self, path: Path) -> None:
        """Delete what no rank serves any more: all but the weights before, and the deltas that lead to them."""
        retain_weights(path, self.files, VERSIONS + 1)
        size = 0
        for beside in sorted(self.folder.glob("v*.delta"), reverse=True):
            size += beside.stat().st_size
            if not self.files or size > self.files[-1].stat().st_size:  # a chain has half of that (delta.Chain)
                beside.unlink()
        for beside in self.folder.glob("v*.manifest"):
            beside.unlink()

    def _write_if_new(self, path: Path, named_tensors) -> None:
        """A learner that starts again publishes its checkpoint's weights anew: they are the same bytes, and the file of
        before stands, for the groups that it sampled are not orphans."""
        fresh = path.with_suffix(".new")
        self.layout.write(fresh, named_tensors)
        if path.exists() and filecmp.cmp(fresh, path, shallow=False):
            fresh.unlink()
        else:
            fresh.replace(path)


def mapped(path: Path) -> mmap.mmap:
    """The bytes of a file, which other ranks may have mapped too."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def manifest_of(path: Path) -> wire.Manifest:
    """The manifest beside a file of weights; made anew where there is none."""
    beside = path.with_suffix(".manifest")
    if beside.is_file():
        return msgspec.msgpack.decode(beside.read_bytes(), type=wire.Manifest)
    return wire.manifest(path.name, mapped(path))


def change_of(path: Path) -> mmap.mmap | None:
    """What has changed since the file before; None: it is not worth it, or not asked for."""
    beside = path.with_suffix(".delta")
    return mapped(beside) if beside.is_file() else None
