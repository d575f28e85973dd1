"""What a vLLM engine needs of the process around it: a name of its own for the memory that its ranks share, a way for
new weights, and int8 layers that compute what the learner does.

    own_shared_memory    two runs on one host do not meet in /dev/shm
    hand_over            weights, to an engine in this process or in another one of this node
    keep_scales_alive, always_onednn    what engines.py changes in vLLM's int8 layers
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
# Several ranks that are one engine, on CPUs
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def own_shared_memory(ranks):
    """While an engine of these ranks starts in here, what they share has a name of this run; ranks None: nothing does.

    Under torchrun vLLM's CPU build makes that name from the way in which the ranks met, which is the same for all runs
    on a host. Here the process that started the ranks is added to it. When all have opened the memory its name goes: a
    run that is killed leaves nothing behind."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Low bits on CPUs
# ---------------------------------------------------------------------------------------------------------------------


def keep_scales_alive(create_onednn_scaled_mm):
    """Replacement for _custom_ops.create_onednn_scaled_mm: tie the weight scales to the handler.

    Reason: on CPUs vLLM's int8 handler holds a bare pointer to the scales, and replacing the weights frees them.
    Here the handler gets a copy of its own, and holds on to it."""

    def create(weight, scales, *more):
        scales = scales.clone()
        handler = create_onednn_scaled_mm(weight, scales, *more)
        handler.scales = scales
        return handler

    return create


def always_onednn(check_cpu_sgl_kernel):
    """Replacement for the check_cpu_sgl_kernel that int8 layers ask: they take oneDNN's kernel on every processor.

    Reason: on processors with AMX vLLM would take another one, which refuses activations in float32."""
    return lambda n, k, dtype: False
