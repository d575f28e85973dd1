"""What a vLLM engine needs of the process around it: a name of its own for the memory that its ranks share, and a way
for new weights.

    among_ranks          under torchrun several ranks are one engine
    own_shared_memory    two runs on one host do not meet in /dev/shm
    hand_over            weights, to an engine in this process or in another one of this node
"""

from __future__ import annotations

import base64
import os
import pickle
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

SHARED = Path("/dev/shm")
BUCKET = 1 << 28  # bytes of tensors that are handed over at a time, or one tensor

# ---------------------------------------------------------------------------------------------------------------------
# Several ranks that are one engine
# ---------------------------------------------------------------------------------------------------------------------


def among_ranks(tp: int) -> dict:
    """vLLM's settings under torchrun: each rank brings its own GPU, and `tp` neighbours are one engine."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    return {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": tp}


@contextmanager
def own_shared_memory(ranks):
    """While an engine of these ranks starts in here, what they share has a name of this run; ranks None: nothing does.

    On CPUs: under torchrun vLLM's build makes that name from the way in which the ranks met, which is the same for all
    runs on a host. Here the process that started the ranks is added to it. When all have opened the memory its name
    goes: a run that is killed leaves nothing behind."""
    if ranks is None or torch.cuda.is_available():
        yield
        return
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Launched

    own, met = f"run{os.getppid()}", Launched._distributed_args
    Launched._distributed_args = lambda self: (f"env://:{own}", *met(self)[1:])  # they have met already
    try:
        yield
    finally:
        Launched._distributed_args = met
        dist.barrier(group=ranks)
        for left in SHARED.glob(f"*{own}-*"):
            left.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# New weights
# ---------------------------------------------------------------------------------------------------------------------


def transfer_settings() -> dict:
    """vLLM's settings for weights that come from another process: where it has a GPU and one of its own.

    It lives in this process, unless VLLM_ENABLE_V1_MULTIPROCESSING=1 is set outside."""
    if not torch.cuda.is_available() or os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "1":
        return {}
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # or it reads no handles; the process is a child of this one
    return {"weight_transfer_config": {"backend": "ipc"}}


def hand_over(llm, named_tensors, apart: bool) -> None:
    """Replace an engine's weights by a stream of (name, tensor). apart: it has a process of its own.

    In this process it reads the tensors where they are: CUDA opens no handle of a process's own memory. Apart, it gets
    handles by vLLM's weight transfer (CUDA IPC), BUCKET after BUCKET: no second model is held."""
    if not apart:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_tensors})
        return
    if not vars(llm).get("opened_here"):
        llm.init_weight_transfer_engine({"init_info": {"packed": False}})
        llm.opened_here = True
    llm.start_weight_update()
    for bucket in in_buckets(named_tensors):
        llm.update_weights({"update_info": handles(bucket)})  # returns when the tensors are read
        torch.cuda.ipc_collect()
    llm.finish_weight_update()


def in_buckets(named_tensors):
    """Yields lists of (name, tensor) of at most BUCKET bytes, or of one tensor."""
    bucket, size = [], 0
    for name, x in named_tensors:
        if bucket and size + x.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, x.detach().contiguous()))
        size += x.nbytes
    if bucket:
        yield bucket


def handles(bucket: list) -> dict:
    """What vLLM's IPC engine needs to open these tensors in its process (IPCWeightTransferUpdateInfo)."""
    from torch.multiprocessing.reductions import reduce_tensor

    found = []
    for _, x in bucket:
        gpu = str(torch.cuda.get_device_properties(x.device).uuid)
        found.append({gpu: reduce_tensor(x)[1]})
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(x.dtype).removeprefix("torch.") for _, x in bucket],
        "shapes": [list(x.shape) for _, x in bucket],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(found)).decode(),
    }
