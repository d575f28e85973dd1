"""Sharded weights and optimizer states: each rank writes its shards, and any number of ranks can
read them.

The format is torch.distributed.checkpoint's: sharded tensors are written shard by shard,
replicated tensors once, and the file .metadata records the place of every shard. Tensors are named
MODEL/WEIGHT, and optimizer states MODEL/WEIGHT/KIND (exp_avg, momentum_buffer, ...)."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from machinery.flags import UserError, shortened

warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)


def whole(x: torch.Tensor) -> torch.Tensor:
    """The detached tensor, gathered from all ranks if it is sharded."""
    x = x.detach()
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def write_shards(tensors: dict, folder: Path) -> None:
    """Write this rank's shards of the tensors. Collective: a failure on one rank
    raises on all ranks."""
    import torch.distributed.checkpoint as dcp

    try:
        dcp.save(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except (
        dcp.api.CheckpointException
    ) as e:  # a BaseException with a page of tracebacks
        raise next(iter(e.failures.values()))[0] from None


def read_shards(learner, folder: Path) -> None:
    """Restore weights and optimizer states written by any number of ranks. Collective.

    Raises UserError if they are from different models or a different optimizer."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    tensors = {name: x for name, x in saved.items() if hasattr(x, "properties")}
    learner.make_states(
        {name: (x.size, x.properties.dtype) for name, x in tensors.items()}
    )
    tensors = {}
    for name in learner.names:
        tensors |= learner.trained(name)
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except dcp.api.CheckpointException as e:
        why = shortened(next(iter(e.failures.values()))[0])
        raise UserError(
            f"--resume: {folder} does not fit this run's models and optimizer ({why}); continue with the "
            "models and optimizer that wrote it"
        ) from None
