"""Ranks of torchrun: sums, maxima and gathers over all of them."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from machinery.flags import UserError, from_environment, need, shortened

# read before vLLM is imported, because vLLM overwrites these variables
LOCAL_RANK = from_environment("LOCAL_RANK", 0)
WORLD_SIZE = from_environment("WORLD_SIZE", 1)
FOREVER = 10 * 365 * 86400.0  # seconds: upper bound of the timeout given to torch


def connect(backend: str, **options) -> None:
    """Start the process group of torchrun's ranks. UserError: they cannot connect."""
    try:
        dist.init_process_group(backend, **options)
    except Exception as e:  # of several types
        place = " ".join(f"{x}={os.environ[x]}" for x in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(
            f"{place} in the environment: the ranks cannot connect ({shortened(e)}); start them with torchrun, or "
            "unset WORLD_SIZE"
        ) from None


class Comm:
    """Sums, maxima and gathers over ranks; in a single process each method returns its input."""

    # Keeps the group alive: its destructor joins gloo's threads, which may wait for the GIL.
    group = None

    def __init__(self, device="cpu"):
        self.on = dist.is_initialized()
        Comm.group = dist.group.WORLD
        self.rank = dist.get_rank() if self.on else 0
        self.size = dist.get_world_size() if self.on else 1
        self.device = device

    @classmethod
    def alone(cls, device) -> Comm:
        """A rank that works alone, also under torchrun: each method returns its input."""
        comm = cls(device)
        comm.on, comm.rank, comm.size = False, 0, 1
        return comm

    @classmethod
    def start(cls, patience: float) -> Comm:
        """Set this rank's device, and under torchrun start its process group. patience: timeout of
        collective calls, seconds."""
        patience = timedelta(seconds=min(patience, FOREVER))
        missing = [
            x for x in ("RANK", "MASTER_ADDR", "MASTER_PORT") if x not in os.environ
        ]
        need(
            WORLD_SIZE == 1 or not missing and from_environment("RANK", 0) < WORLD_SIZE,
            f"WORLD_SIZE={WORLD_SIZE} in the environment without {', '.join(missing) or 'a RANK below it'}: start "
            "several ranks with torchrun --nproc_per_node, or unset WORLD_SIZE",
        )
        if not torch.cuda.is_available():
            if WORLD_SIZE > 1:
                connect("gloo", timeout=patience)
            return cls("cpu")
        gpus = torch.cuda.device_count()
        ranks_on_host = from_environment("LOCAL_WORLD_SIZE", 1)
        need(
            gpus >= max(ranks_on_host, LOCAL_RANK + 1),
            f"torchrun --nproc_per_node={ranks_on_host}: this host has {gpus} GPU(s); start as many ranks as GPUs",
        )
        # first, because other libraries use the current GPU, by default GPU 0
        torch.cuda.set_device(LOCAL_RANK)
        cuda_device = torch.device("cuda", LOCAL_RANK)
        if WORLD_SIZE > 1:
            connect("cpu:gloo,cuda:nccl", timeout=patience, device_id=cuda_device)
        return cls(str(cuda_device))

    def max(self, values) -> list[float]:
        """Maxima over ranks of a list of scalars, in float64."""
        return self.sum(values, dist.ReduceOp.MAX)

    def sum(self, values, op=dist.ReduceOp.SUM) -> list[float]:
        """Sums over ranks of a list of scalars (numbers or 0-d tensors), in float64."""
        kind = {"dtype": torch.float64, "device": self.device}
        t = torch.stack([torch.as_tensor(v, **kind) for v in values])
        if self.on:
            dist.all_reduce(t, op=op)
        return t.tolist()

    def sum_counts(self, counts: dict[str, float]) -> Counter:
        """Sums over ranks of named counts; the names may differ between ranks."""
        total = Counter()
        for part in from_all(dict(counts)):
            total.update(part)
        return total

    def any(self, condition) -> bool:
        """Whether the condition is true on any rank; the same result on all ranks."""
        return self.max([bool(condition)])[0] > 0

    def cat(self, x: torch.Tensor) -> torch.Tensor:
        """The 1-D tensors of all ranks, concatenated in rank order."""
        return torch.cat([part.to(x.device) for part in from_all(x.cpu())])

    def barrier(self):
        if self.on:
            dist.barrier()

    def end(self) -> None:
        """Leave the process group, all ranks together, so that Python can exit. The last call."""
        # vLLM's shutdown may have destroyed it
        if WORLD_SIZE > 1 and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def from_all(x) -> list:
    """The values of x on all ranks, in rank order. Collective."""
    if not dist.is_initialized():
        return [x]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, x)
    return values
