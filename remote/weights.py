"""Published weights on disk: one file for all ranks. HeteroRL, section 4.2.

Gathered weights arrive one tensor after the other, and every rank must request each tensor. The
first rank copies them to host memory and writes the file. Next to the file are its manifest and,
over ZeroMQ, the delta from the previous file; every rank maps all three.

Equal weights make equal files, and weights of the same model make files of the same size
(machinery/checkpoint/tensors.py)."""

from __future__ import annotations

import filecmp
import mmap
from collections import deque
from pathlib import Path

import msgspec

from machinery.checkpoint.tensors import write_tensors
from remote import delta, wire
from remote.account import VERSIONS, retain_weights, write_atomically


class Store:
    """The folder of published weights, the same for all ranks.

    with_deltas: also write the delta from the previous file."""

    def __init__(self, folder: Path, comm, with_deltas: bool):
        self.folder = folder
        self.comm = comm
        self.with_deltas = with_deltas
        self.files: list[Path] = []  # of this session

    def publish(self, version: int, named_tensors) -> tuple[Path, float]:
        """Write a version; return (its file, the time of publication). Collective."""
        path = self.folder / f"v{version:06d}.safetensors"
        if self.comm.rank == 0:
            self._write(path, named_tensors)
        else:
            deque(named_tensors, maxlen=0)
        stamp = path.stat().st_mtime if self.comm.rank == 0 else 0.0
        self.files = [*self.files[-VERSIONS:], path]
        return path, self.comm.max([stamp])[0]  # no rank continues before the files are whole

    def _write(self, path: Path, named_tensors) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tidy(path)
        self._write_if_new(path, named_tensors)
        of = wire.manifest(path.name, mapped(path))
        write_atomically(path.with_suffix(".manifest"), msgspec.msgpack.encode(of), flush=False)
        if self.with_deltas and self.files:
            change = delta.encode(mapped(self.files[-1]), mapped(path))
            if change is not None:
                write_atomically(path.with_suffix(".delta"), change, flush=False)

    def _tidy(self, path: Path) -> None:
        """Delete files that no rank serves any more: all but the previous weights and the deltas
        that lead to them."""
        retain_weights(path, self.files, VERSIONS + 1)
        size = 0
        for sibling in sorted(self.folder.glob("v*.delta"), reverse=True):
            size += sibling.stat().st_size
            if not self.files or size > self.files[-1].stat().st_size:  # a chain has half of it
                sibling.unlink()
        for sibling in self.folder.glob("v*.manifest"):
            sibling.unlink()

    def _write_if_new(self, path: Path, named_tensors) -> None:
        """Write the file unless it exists with the same bytes. A restarted learner publishes its
        checkpoint's weights a second time; the unchanged file keeps groups that these weights
        sampled from becoming orphans."""
        fresh = path.with_suffix(".new")
        write_tensors(fresh, named_tensors)
        if path.exists() and filecmp.cmp(fresh, path, shallow=False):
            fresh.unlink()
        else:
            fresh.replace(path)


def mapped(path: Path) -> mmap.mmap:
    """The bytes of a file, memory-mapped; other ranks may have mapped it too."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def manifest_of(path: Path) -> wire.Manifest:
    """The manifest next to a file of weights; computed if it is missing."""
    sibling = path.with_suffix(".manifest")
    if sibling.is_file():
        return msgspec.msgpack.decode(sibling.read_bytes(), type=wire.Manifest)
    return wire.manifest(path.name, mapped(path))


def change_of(path: Path) -> mmap.mmap | None:
    """The delta from the previous file; None if there is none."""
    sibling = path.with_suffix(".delta")
    return mapped(sibling) if sibling.is_file() else None
