"""Sharded weights and optimizer states: each rank writes its shards, and any number of ranks can
read them.

The format is torch.distributed.checkpoint's: sharded tensors are written shard by shard,
replicated tensors once, and the file .metadata records the place of every shard. Tensors are named
MODEL/WEIGHT, and optimizer states MODEL/WEIGHT/KIND (exp_avg, momentum_buffer, ...).

Writing uses copies on the host (`Copies`) and a separate process group, so that a thread can write
during the next update."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from machinery.flags import UserError

warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)


def saving_group():
    """The process group of the thread that writes checkpoints."""
    return own_group("checkpoints")


def own_group(use: str):
    """A process group of all ranks for one use; None for a single process. Collective at the first
    call. Two threads must not share a group, because collective calls are paired by their order."""
    return further_group(dist.group.WORLD, use) if dist.is_initialized() else None


@functools.cache
def further_group(world, use: str):
    """An additional group of all ranks, made once for each use and each world group of this
    process."""
    return dist.new_group(backend="gloo")


def from_all(x, group) -> list:
    """The values of x on all ranks, in rank order. Collective."""
    if group is None:
        return [x]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, x, group=group)
    return values


class Copies:
    """Host copies of this rank's tensors; a tensor that is passed twice is copied once."""

    def __init__(self, group):
        self.made: dict[tuple, torch.Tensor] = {}
        self.mesh = None
        if group is not None:
            from torch.distributed.device_mesh import DeviceMesh

            self.mesh = DeviceMesh.from_group(group, "cpu")

    def __call__(self, x):
        """The copy of a tensor, with its sharding; other values are returned unchanged."""
        if not isinstance(x, torch.Tensor):
            return x
        x = x.detach()
        local = getattr(x, "_local_tensor", x)
        if not local.numel():  # an empty shard has no address
            return self._copy(x, local)
        key = (local.data_ptr(), local.dtype, local.shape)
        if key not in self.made:
            self.made[key] = self._copy(x, local)
        return self.made[key]

    def _copy(self, x, local):
        host = local.to("cpu", copy=True)
        if local is x:
            return host
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(host, self.mesh, x.placements, shape=x.shape, stride=x.stride())


def whole(x: torch.Tensor) -> torch.Tensor:
    """The detached tensor, gathered from all ranks if it is sharded."""
    x = x.detach()
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def write_shards(tensors: dict, folder: Path, group) -> None:
    """Write this rank's shards of the tensors (host copies). Collective: a failure on one rank
    raises on all ranks."""
    import torch.distributed.checkpoint as dcp

    try:
        dcp.save(tensors, checkpoint_id=folder, process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as e:  # a BaseException with a page of tracebacks
        raise next(iter(e.failures.values()))[0] from None


def read_shards(learner, folder: Path) -> None:
    """Restore weights and optimizer states written by any number of ranks. Collective.

    Raises UserError if they are from different models or a different optimizer."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    learner.make_states(
        {
            name: (x.size, x.properties.dtype)
            for name, x in saved.items()
            if hasattr(x, "properties")
        }
    )
    tensors = {}
    for name in learner.names:
        tensors |= learner.trained(name)
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except dcp.api.CheckpointException as e:
        why = " ".join(str(next(iter(e.failures.values()))[0]).split())[:200]
        raise UserError(
            f"--resume: {folder} does not fit this run's models and optimizer ({why}); continue with the "
            "models and optimizer that wrote it"
        ) from None
