"""Files of published weights, in the safetensors format."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from machinery.flags import UserError, shortened

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Published:
    """Named tensors that can be iterated repeatedly; each iteration computes them again, so that no
    second model is in memory."""

    read: Callable

    def __iter__(self):
        return self.read()


def write_tensors(path: Path, named_tensors) -> None:
    """Write a stream of tensors to a file, atomically. A tied head is written once. Equal tensors
    give equal files."""
    from safetensors.torch import save_file

    tensors = {name: x.detach().cpu().contiguous() for name, x in named_tensors}
    order, embedding = json.dumps(list(tensors)), tensors.get(embedding_of(tensors))
    if (
        embedding is not None
        and HEAD in tensors
        and torch.equal(embedding, tensors[HEAD])
    ):
        del tensors[HEAD]
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".writing")
    scratch.touch()
    mode = scratch.stat().st_mode
    try:  # without a second copy in memory
        save_file(tensors, scratch, {"order": order})
    except Exception as e:  # safetensors replaces the OSError of a full disk
        scratch.unlink()
        raise UserError(
            f"{path}: cannot be written ({shortened(e)}); free disk space there"
        ) from None
    scratch.chmod(mode)
    scratch.replace(path)


def read_tensors(path: Path) -> Published:
    """The tensors of a file that `write_tensors` wrote, in the order of the stream. The file stays
    open, so it may be deleted while they are read."""
    from safetensors import safe_open

    file = safe_open(path, "pt")
    order, stored = json.loads(file.metadata()["order"]), {*file.keys()}
    embedding = embedding_of(order)
    return Published(
        lambda: (
            (name, file.get_tensor(name if name in stored else embedding))
            for name in order
        )
    )


def embedding_of(names) -> str:
    """The name of the embedding among names of tensors, or ""."""
    return next((name for name in names if name.endswith("embed_tokens.weight")), "")
