"""Published weights on disk: one file for all ranks. HeteroRL, section 4.2.

Gathered weights arrive one tensor after the other, and every rank must request each tensor. The
first rank copies them to host memory and writes the file. Equal weights make equal files, and
weights of the same model make files of the same size (machinery/checkpoint/tensors.py)."""

from __future__ import annotations

import filecmp
import mmap
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from machinery.checkpoint.tensors import write_tensors
from remote import delta
from remote.account import retain_weights


@dataclass
class Store:
    """The folder of published weights."""

    folder: Path
    comm: object
    with_deltas: bool  # also return the delta from the previous file
    files: list[Path] = field(default_factory=list)  # of this session

    def publish(
        self, version: int, named_tensors, restored: bool = False
    ) -> tuple[Path, bytes | None]:
        """Write a version; return (its file, the delta from the previous file), which only the
        first rank has. Collective. restored: a resumed run publishes its checkpoint's weights again."""
        path, change = self.folder / f"v{version:06d}.safetensors", None
        if self.comm.rank > 0:
            deque(named_tensors, maxlen=0)
            return path, None
        self._write(path, named_tensors, restored)
        if self.with_deltas and self.files:
            change = delta.encode(mapped(self.files[-1]), mapped(path))
        self.files = retain_weights(path, self.files)
        return path, change

    def _write(self, path: Path, named_tensors, restored: bool) -> None:
        """Write the file. A restored version with the same bytes keeps its file and its time, so that
        groups sampled from it do not become orphans. Another run in the same folder replaces the
        file: its groups may have different prompts and rewards."""
        fresh = path.with_suffix(".new")
        write_tensors(fresh, named_tensors)
        if restored and path.exists() and filecmp.cmp(fresh, path, shallow=False):
            fresh.unlink()
        else:
            fresh.replace(path)


def mapped(path: Path) -> mmap.mmap:
    """The bytes of a file, memory-mapped."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
