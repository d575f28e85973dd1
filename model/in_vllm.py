"""vLLM in this process: import, patched functions, shared memory of its ranks, and new weights.

import_vllm             its classes, set up to run in this process
change_vllm             some functions are replaced, each for its reason
vllm_leaves_no_trace    global state that vLLM overwrites at its start is restored
among_ranks             under torchrun several ranks are one engine
own_shared_memory       two runs on one host do not meet in /dev/shm
checksums_of            which weights it holds
hand_over               weights, to an engine in this process or in another one of this node
"""

from __future__ import annotations

import base64
import functools
import os
import pickle
import sys
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from machinery.flags import UserError
from sync import SyncError, checksums, wrap

SHARED = Path("/dev/shm")
BUCKET = 1 << 28  # bytes of tensors that are handed over at a time, or one tensor

# ---------------------------------------------------------------------------------------------------------------------
# Patches of vLLM, and state that vLLM may not change
# ---------------------------------------------------------------------------------------------------------------------

VLLM_VERSION = "0.32.0"  # the patches below were written for its code
VLLM_VERSIONS = ("0.24.0", VLLM_VERSION)  # that have all of the functions they replace


def change_vllm(low_bits_on_cpu: bool) -> None:
    """Replace some functions of vLLM, each for the reason in the docstring of its replacement.

    UserError: this version of vLLM has one of them elsewhere."""
    try:
        _change_vllm(low_bits_on_cpu)
    except ImportError as e:
        raise UserError(
            f"this vLLM has no {e.name} ({e}); install {VLLM_VERSION}, for which this was written, or use --rollout=hf"
        ) from None


def _change_vllm(low_bits_on_cpu: bool) -> None:
    from vllm import _custom_ops
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.models.transformers.base import Base
    from vllm.v1.engine.logprobs import LogprobsProcessor

    change(LogprobsProcessor, "_update_sample_logprobs", lean_logprobs)
    change(VocabParallelEmbedding, "weight_loader", without_padding)
    change(Base, "_decorate_for_torch_compile", class_stays_the_learners)
    if torch.cuda.is_available():
        from vllm.v1.sample.ops import topk_topp_sampler

        change(topk_topp_sampler, "random_sample", all_rows_at_once)
    if not torch.cuda.is_available():
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
            UnquantizedFusedMoEMethod,
        )

        change(UnquantizedFusedMoEMethod, "process_weights_after_loading", pack_experts_anew)
    if low_bits_on_cpu:
        from vllm.model_executor.kernels.linear.scaled_mm import cpu

        change(_custom_ops, "create_onednn_scaled_mm", keep_scales_alive)
        change(cpu, "check_cpu_sgl_kernel", without_amx)


def lean_logprobs(update_sample_logprobs):
    """Replacement for LogprobsProcessor._update_sample_logprobs: keep log-probabilities as arrays.

    Reason: vLLM turns those of every sampled token into lists, ranks and decoded words, which costs
    more than the sampling does. Here a request keeps the arrays that the sampler made, two for each
    token, [1, K + 1]: ids and log-probabilities, the sampled token first. `_responses` reads
    them."""

    def lean(self, logprobs_lists):
        self.logprobs.token_ids.append(logprobs_lists.logprob_token_ids)
        self.logprobs.logprobs.append(logprobs_lists.logprobs)

    return lean


def without_padding(weight_loader):
    """Replacement for VocabParallelEmbedding.weight_loader: rows that stand for no token stay
    outside.

    Reason: models pad their embeddings, and padding can be sampled. With the tokenizer's size in
    its config vLLM neither samples nor scores padding, but refuses to load the padded rows."""

    def load(self, param, loaded_weight):
        rows = slice(self.org_vocab_size) if loaded_weight.ndim else ...
        weight_loader(self, param, loaded_weight[rows])

    return load


def class_stays_the_learners(decorate_for_torch_compile):
    """Replacement for the transformers backend's Base._decorate_for_torch_compile: nothing is done.

    Reason: for families that vLLM has no code of its own for (Phi, OLMo, SmolLM3) it takes
    transformers' class, and changes that class so that vLLM's engine alone can make and call it; in
    this process the learner's model is of the same class. The engine's model is not compiled
    then."""
    return lambda self, **more: None


def all_rows_at_once(random_sample):
    """Replacement for topk_topp_sampler.random_sample: invert each row's cumulative distribution at
    one uniform number.

    Reason: with a seed for each request vLLM fills each row of its noise in a launch of its own,
    hundreds for a token. The uniform is a hash of the request's seed and of its number of draws, so
    that a response still depends on nothing but its seed."""

    def sample(probs, generators, *more):
        n = len(probs)
        if len(generators) < n:  # requests without a seed
            return random_sample(probs, generators, *more)
        u = torch.from_numpy(next_uniforms([generators[i] for i in range(n)]))
        cdf = probs.cumsum(-1, dtype=torch.float64)
        token = torch.searchsorted(cdf, u.to(probs.device)[:, None] * cdf[:, -1:], right=True)
        return token.clamp_(max=probs.shape[1] - 1)[:, 0]

    return sample


def next_uniforms(generators) -> np.ndarray:
    """The next uniform number in [0, 1) of each generator, float64 (n,): SplitMix64 of its seed and
    of its offset, which goes on by 4 (vLLM takes a draw back by 4)."""
    offsets = np.array([g.get_offset() for g in generators], np.uint64)
    seeds = np.array([g.initial_seed() % 2**64 for g in generators], np.uint64)
    for g, offset in zip(generators, offsets.tolist(), strict=True):
        g.set_offset(offset + 4)
    x = seeds + (offsets // 4 + 1) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) / 2.0**53


def pack_experts_anew(process_weights_after_loading):
    """Replacement for UnquantizedFusedMoEMethod.process_weights_after_loading: a kernel is made at
    every load.

    Reason: on CPUs vLLM packs experts' weights when it makes their kernel, and keeps the kernel
    when it replaces the weights, which then stay unpacked and fit nowhere."""

    def process(self, layer):
        self.moe_kernel = None
        process_weights_after_loading(self, layer)

    return process


def keep_scales_alive(create_onednn_scaled_mm):
    """Replacement for _custom_ops.create_onednn_scaled_mm: tie the weight scales to the handler.

    Reason: on CPUs vLLM's int8 handler holds a bare pointer to the scales, and replacing the
    weights frees them. Here the handler gets a copy of its own, and holds on to it."""

    def create(weight, scales, *more):
        scales = scales.clone()
        handler = create_onednn_scaled_mm(weight, scales, *more)
        handler.scales = scales
        return handler

    return create


def without_amx(check_cpu_sgl_kernel):
    """Replacement for scaled_mm.cpu.check_cpu_sgl_kernel: int8 layers take the oneDNN kernel on
    every CPU.

    Reason: vLLM takes another kernel on CPUs with AMX if torch's default type is not float32. It is
    the model's type when the engine starts and float32 when weights are replaced, so a reload finds
    other tensors than it left."""
    return lambda *shape_and_type: False


def change(owner, name: str, replacement) -> None:
    """Put replacement(original) in the place of vLLM's function owner.name, once in this process.

    UserError if this version of vLLM has no such function. One that has it, but is not the version
    these changes were written for, is used with a warning: where a change does not fit it, the
    check of shapes in `VLLMEngine._responses` or the proof of the first weight sync (sync.py) will
    tell."""
    import vllm

    original = getattr(owner, name, None)
    if original is None:
        raise UserError(
            f"--rollout=vllm: vLLM {vllm.__version__} has no {owner.__name__}.{name}, which model/in_vllm.py replaces; "
            f"install vllm=={VLLM_VERSION}, or use --rollout=hf"
        )
    if getattr(original, "changed_here", False):
        return
    if vllm.__version__.split("+")[0] not in VLLM_VERSIONS:
        print(
            f"vLLM {vllm.__version__}: model/in_vllm.py replaces {owner.__name__}.{name} as it is in {VLLM_VERSION}",
            file=sys.stderr,
        )
    changed = functools.wraps(original)(replacement(original))
    changed.changed_here = True
    setattr(owner, name, changed)


@contextmanager
def in_one_sentence(problem: str):
    """Turn exceptions of vLLM into a UserError with vLLM's message; the traceback goes to a
    file."""
    try:
        yield
    except (UserError, SyncError):
        raise
    except Exception as e:
        log = Path(tempfile.gettempdir()) / f"vllm-{os.getpid()}.log"
        log.write_text(traceback.format_exc(), encoding="utf-8")
        words = f"{type(e).__name__}: {' '.join(str(e).split())[:400]}"
        raise UserError(
            f"--rollout=vllm: {problem} ({words}); its traceback is in {log}; --rollout=hf does without"
        ) from None


@contextmanager
def vllm_leaves_no_trace():
    """Restore global state that vLLM overwrites at its start and that the learner needs.

    That is torchrun's LOCAL_WORLD_SIZE and the state of torch's random numbers. The variables of
    vLLM's own stay: it reads some of them later."""
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE")
    generator = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(generator)
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if local_world_size is not None:
            os.environ["LOCAL_WORLD_SIZE"] = local_world_size


def import_vllm():
    """vLLM's classes (LLM, SamplingParams), set up to run in this process.

    Environment variables that are set already stay as they are. UserError: it cannot be
    imported."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process
    if not torch.cuda.is_available():
        # else it compiles for 18 s at the first log-probability
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # else it takes the learner's away
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    try:
        from vllm import LLM, SamplingParams
    except ImportError as e:
        fix = "install it (make demo does) or use --rollout=hf"
        raise UserError(f"--rollout=vllm: vLLM cannot be imported ({e}); {fix}") from None
    return LLM, SamplingParams


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks that are one engine
# ---------------------------------------------------------------------------------------------------------------------


def among_ranks(tp: int) -> dict:
    """vLLM's settings under torchrun: each rank brings its own GPU, and `tp` neighbours are one
    engine."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    return {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": tp}


@contextmanager
def own_shared_memory(ranks):
    """Names of shared memory contain the run while an engine of these ranks starts; ranks None:
    nothing is shared.

    On CPUs: under torchrun vLLM's build makes that name from the way in which the ranks met, which
    is the same for all runs on a host. Here the process that started the ranks is added to it. When
    all have opened the memory its name goes: a run that is killed leaves nothing behind."""
    if ranks is None or torch.cuda.is_available():
        yield
        return
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Launched

    prefix, met = f"run{os.getppid()}", Launched._distributed_args
    # they have met already
    Launched._distributed_args = lambda self: (
        f"env://:{prefix}",
        *met(self)[1:],
    )
    try:
        yield
    finally:
        Launched._distributed_args = met
        dist.barrier(group=ranks)
        for left in SHARED.glob(f"*{prefix}-*"):
            left.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# Checksums of its weights
# ---------------------------------------------------------------------------------------------------------------------


def note_packing(model) -> None:
    """From here on each layer of vLLM's model keeps the checksums of the weights that its kernel is
    handed to pack.

    Some kernels keep packed copies alone: those of a CPU have no other weights of a linear
    layer."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        process = getattr(method, "process_weights_after_loading", None)
        if process is not None and not getattr(process, "notes", False):
            method.process_weights_after_loading = noting(process)


def noting(process):
    """`process_weights_after_loading` of a layer, after its loaded weights were recorded."""

    @functools.wraps(process)
    def note(layer):
        layer.handed_over = checksums(dict(layer.named_parameters(recurse=False)))
        process(layer)

    note.notes = True
    return note


def checksums_of(model) -> tuple[dict, dict]:
    """name -> (checksum, type) of a model's tensors, as they are in memory and as they were handed
    over."""
    in_memory = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    packed = {}
    for prefix, module in model.named_modules():
        packed |= {
            f"{prefix}.{name}": known for name, known in vars(module).get("handed_over", {}).items()
        }
    return checksums({name: x for name, x in in_memory.items() if x.numel()}), packed


def fused_modules(model) -> dict[str, list[str]]:
    """Name of a fused module in vLLM's model -> names of the published modules in it."""
    experts = {"w13_weight": ["gate_up_proj"], "w2_weight": ["down_proj"]}
    return {**getattr(model, "packed_modules_mapping", {}), **experts}


def summed_over(ranks, known: dict) -> dict:
    """(checksum, type) by name, the checksums summed over the ranks of an engine; ranks None: one
    alone."""
    if ranks is None:
        return known
    sums = [None] * ranks.size()
    dist.all_gather_object(sums, {name: value for name, (value, _) in known.items()}, group=ranks)
    return {
        name: (wrap(sum(sums_of_rank[name] for sums_of_rank in sums)), dtype)
        for name, (_, dtype) in known.items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# New weights
# ---------------------------------------------------------------------------------------------------------------------


def transfer_settings() -> dict:
    """vLLM's settings for weights that come from another process: where it has a GPU and one of its
    own.

    It lives in this process, unless VLLM_ENABLE_V1_MULTIPROCESSING=1 is set outside."""
    if not torch.cuda.is_available() or os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "1":
        return {}
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = (
        "1"  # or it reads no handles; the process is a child of this one
    )
    return {"weight_transfer_config": {"backend": "ipc"}}


def has_head(model) -> bool:
    """Whether vLLM's model has a module for `lm_head.weight`; some tied ones take the embedding
    itself."""
    return any(
        name.split(".")[-1] == "lm_head" for name, _ in model.named_modules(remove_duplicate=False)
    )


def hand_over(llm, named_tensors, apart: bool) -> None:
    """Replace an engine's weights by a stream of (name, tensor). apart: it has a process of its
    own.

    In this process it reads the tensors where they are: CUDA opens no handle of a process's own
    memory. Apart, it gets handles by vLLM's weight transfer (CUDA IPC), BUCKET after BUCKET: no
    second model is held."""
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
        # shapes, and tensors of a file, are on the host
        bucket.append((name, x.detach().cuda().contiguous()))
        size += x.nbytes
    if bucket:
        yield bucket


def handles(bucket: list) -> dict:
    """Handles by which vLLM's IPC engine opens these tensors in its process
    (IPCWeightTransferUpdateInfo)."""
    from torch.multiprocessing.reductions import reduce_tensor

    tensors = []
    for _, x in bucket:
        gpu = str(torch.cuda.get_device_properties(x.device).uuid)
        tensors.append({gpu: reduce_tensor(x)[1]})
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(x.dtype).removeprefix("torch.") for _, x in bucket],
        "shapes": [list(x.shape) for _, x in bucket],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(tensors)).decode(),
    }
