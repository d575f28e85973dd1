"""vLLM in this process: import, patched functions, shared memory of its ranks, and checksums."""

from __future__ import annotations

import functools
import math
import os
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from machinery.flags import UserError
from quant import ROUTERS, Format
from sync import SyncError, checksums, wrap

# -- Patches of vLLM, and state that vLLM must not change

VLLM_VERSION = "0.32.0"  # the version for which the patches below were written


def change_vllm(low_bits_on_cpu: bool) -> None:
    """Replace some functions of vLLM, each for the reason in the docstring of its replacement.

    Raises UserError if this version of vLLM lacks a module with such a function."""
    try:
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            VocabParallelEmbedding,
        )
        from vllm.model_executor.models.transformers.base import Base
        from vllm.v1.engine.logprobs import LogprobsProcessor

        change(LogprobsProcessor, "_update_sample_logprobs", lean_logprobs)
        change(VocabParallelEmbedding, "weight_loader", without_padding)
        change(Base, "_decorate_for_torch_compile", class_stays_the_learners)
        if not torch.cuda.is_available():
            from vllm.model_executor.layers.fused_moe import (
                unquantized_fused_moe_method as moe,
            )

            method = moe.UnquantizedFusedMoEMethod
            change(method, "process_weights_after_loading", pack_experts_anew)
        if low_bits_on_cpu:
            from vllm import _custom_ops
            from vllm.model_executor.kernels.linear.scaled_mm import cpu, pytorch

            change(_custom_ops, "create_onednn_scaled_mm", keep_scales_alive)
            change(cpu, "check_cpu_sgl_kernel", without_amx)
            fp8 = pytorch.ChannelWiseTorchFP8ScaledMMLinearKernel
            change(fp8, "apply_scaled_mm", converted_once)
    except ImportError as e:
        raise UserError(
            f"this vLLM has no {e.name} ({e}); install {VLLM_VERSION}, for which this was written, or use --rollout=hf"
        ) from None


def lean_logprobs(update_sample_logprobs):
    """Replacement for LogprobsProcessor._update_sample_logprobs: keep log-probabilities as arrays.

    Reason: vLLM converts the log-probabilities of every sampled token to lists, ranks and decoded
    words, which costs more than sampling. The replacement keeps the sampler's two arrays for each
    token, [1, K + 1]: ids and log-probabilities, the sampled token first. `_responses` reads
    them."""

    def lean(self, logprobs_lists):
        self.logprobs.token_ids.append(logprobs_lists.logprob_token_ids)
        self.logprobs.logprobs.append(logprobs_lists.logprobs)

    return lean


def without_padding(weight_loader):
    """Replacement for VocabParallelEmbedding.weight_loader: padding rows are not loaded.

    Reason: models pad their embeddings, and vLLM could sample the padding. With the tokenizer's
    size in its config vLLM neither samples nor scores padding, but rejects weights with padding
    rows."""

    def load(self, param, loaded_weight):
        rows = slice(self.org_vocab_size) if loaded_weight.ndim else ...
        weight_loader(self, param, loaded_weight[rows])

    return load


def class_stays_the_learners(decorate_for_torch_compile):
    """Replacement for the transformers backend's Base._decorate_for_torch_compile: it does nothing.

    Reason: for families without native vLLM code (Phi, OLMo, SmolLM3) vLLM uses the class of
    transformers, and changes it so that only vLLM can construct and call it. In this process the
    learner's model has the same class. As a consequence the engine's model is not compiled."""
    return lambda self, **more: None


def pack_experts_anew(process_weights_after_loading):
    """Replacement for UnquantizedFusedMoEMethod.process_weights_after_loading: make a new kernel at
    every load.

    Reason: on CPUs vLLM packs the weights of experts when it makes their kernel. It keeps the
    kernel when weights are replaced, so the new weights would stay unpacked and not fit the
    kernel."""

    def process(self, layer):
        self.moe_kernel = None
        process_weights_after_loading(self, layer)

    return process


def keep_scales_alive(create_onednn_scaled_mm):
    """Replacement for _custom_ops.create_onednn_scaled_mm: tie the weight scales to the handler.

    Reason: on CPUs vLLM's int8 handler has a raw pointer to the scales, and replacing the weights
    frees them. Here the handler owns a copy of the scales."""

    def create(weight, scales, *more):
        scales = scales.clone()
        handler = create_onednn_scaled_mm(weight, scales, *more)
        handler.scales = scales
        return handler

    return create


def without_amx(check_cpu_sgl_kernel):
    """Replacement for scaled_mm.cpu.check_cpu_sgl_kernel: int8 layers use the oneDNN kernel on
    every CPU.

    Reason: on CPUs with AMX vLLM uses a different kernel if torch's default dtype is not float32.
    The default is the model's dtype when the engine starts, and float32 when weights are replaced,
    so a reload would find tensors in the format of the wrong kernel."""
    return lambda *shape_and_type: False


def converted_once(apply_scaled_mm):
    """Replacement for apply_scaled_mm of vLLM's fp8 layers: a float32 product with a weight that is
    converted once for each content.

    Reason: on a CPU torch._scaled_mm converts the weight in every call, which takes most of the
    time of sampling. The product is the same: exact products, summed in float32."""
    # address of a weight -> (mark of its content, the weight in float32)
    held: dict[int, tuple] = {}

    def converted(weight):  # (K, N), a transposed view
        words = weight.t().reshape(-1).view(torch.int64)
        # odd factors: the same words in another order have another sum
        mark = (weight.shape, int((words * torch.arange(1, 2 * len(words), 2)).sum()))
        if held.get(weight.data_ptr(), (None,))[0] != mark:
            held[weight.data_ptr()] = (mark, weight.float())
        return held[weight.data_ptr()][1]

    def apply(self, *, A, B, out_dtype, As, Bs, bias, output_shape):
        rows = math.prod(output_shape[:-1])  # the others are padding
        y = (A[:rows].float() @ converted(B)).mul_(As[:rows]).mul_(Bs.t())
        if bias is not None:
            y += bias
        return y.to(out_dtype).view(*output_shape)

    return apply


def change(owner, name: str, replacement) -> None:
    """Replace vLLM's function owner.name by replacement(original), once in this process.

    Raises UserError if this version of vLLM has no such function. If a patch does not fit a
    version, the check of shapes in `VLLMEngine._responses` or of the first weight sync fails."""
    import vllm

    original = getattr(owner, name, None)
    if original is None:
        raise UserError(
            f"--rollout=vllm: vLLM {vllm.__version__} has no {owner.__name__}.{name}, which model/in_vllm.py replaces; "
            f"install vllm=={VLLM_VERSION}, or use --rollout=hf"
        )
    if getattr(original, "changed_here", False):
        return
    changed = functools.wraps(original)(replacement(original))
    changed.changed_here = True
    setattr(owner, name, changed)


@contextmanager
def in_one_sentence(problem: str):
    """Convert exceptions of vLLM to a UserError with vLLM's message; the traceback goes to a
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
            f"--rollout=vllm: {problem} ({words}); its traceback is in {log}; --rollout=hf runs without vLLM"
        ) from None


@contextmanager
def vllm_leaves_no_trace():
    """Restore global state that vLLM overwrites at its start and that the learner needs: torchrun's
    LOCAL_WORLD_SIZE and torch's random state.

    The environment variables of vLLM remain, because vLLM reads some of them later."""
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE")
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if local_world_size is not None:
            os.environ["LOCAL_WORLD_SIZE"] = local_world_size


def import_vllm():
    """vLLM's classes (LLM, SamplingParams), set up to run in this process.

    Environment variables that are already set are not changed, except
    VLLM_ENABLE_V1_MULTIPROCESSING. Raises UserError if the import fails."""
    # the engine runs in this process
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # FlashInfer cannot sample with a seed for each response, and vLLM does not start without it
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # else Triton multiplies float32 numbers as TF32, and the weight check refuses the engine
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    # else vLLM changes the number of the learner's threads
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    if not torch.cuda.is_available():
        # else vLLM compiles for 18 s at the first log-probability
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    try:
        from vllm import LLM, SamplingParams
    except ImportError as e:
        fix = "install it (make demo does) or use --rollout=hf"
        raise UserError(
            f"--rollout=vllm: vLLM cannot be imported ({e}); {fix}"
        ) from None
    return LLM, SamplingParams


@contextmanager
def own_shared_memory(ranks):
    """Make names of shared memory unique to this run while an engine of these ranks starts. ranks
    None: nothing is shared.

    Only for CPUs. Under torchrun vLLM derives the name from the ranks' rendezvous method, which is
    the same for all runs on a host. Here the id of the parent process is added. The name is
    unlinked when all ranks have opened the memory, so that a killed run leaves no file."""
    if ranks is None or torch.cuda.is_available():
        yield
        return
    from vllm.v1.executor.uniproc_executor import (
        ExecutorWithExternalLauncher as Launched,
    )

    prefix, met = f"run{os.getppid()}", Launched._distributed_args
    # only the name matters: the ranks are already connected
    Launched._distributed_args = lambda self: (f"env://:{prefix}", *met(self)[1:])
    try:
        yield
        dist.barrier(group=ranks)
    finally:
        Launched._distributed_args = met
        for left in Path("/dev/shm").glob(f"*{prefix}-*"):
            left.unlink(missing_ok=True)


def note_packing(model) -> None:
    """Make each layer of vLLM's model record the checksums of its weights before a kernel packs
    them.

    Some kernels keep only packed copies, for example those of linear layers on a CPU."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        process = getattr(method, "process_weights_after_loading", None)
        if process is not None and getattr(process, "func", None) is not note:
            method.process_weights_after_loading = functools.partial(note, process)


def note(process, layer) -> None:
    """Record a layer's loaded weights, then call its `process_weights_after_loading`."""
    layer.handed_over = checksums(dict(layer.named_parameters(recurse=False)))
    process(layer)


def checksums_of(model) -> tuple[dict, dict]:
    """Two dicts name -> (checksum, type): of a model's tensors in memory, and of its tensors before
    packing."""
    in_memory = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    packed = {}
    for prefix, module in model.named_modules():
        packed |= {
            f"{prefix}.{name}": known
            for name, known in vars(module).get("handed_over", {}).items()
        }
    return checksums({name: x for name, x in in_memory.items() if x.numel()}), packed


def fused_modules(model) -> dict[str, list[str]]:
    """Name of a fused module in vLLM's model -> names of the published modules in it."""
    experts = {"w13_weight": ["gate_up_proj"], "w2_weight": ["down_proj"]}
    return {**getattr(model, "packed_modules_mapping", {}), **experts}


def summed(of_ranks) -> dict:
    """name -> (checksum, type), with the checksums of an engine's ranks summed."""
    return {
        name: (wrap(sum(known[name][0] for known in of_ranks)), dtype)
        for name, (_, dtype) in of_ranks[0].items()
    }


def engine_config(fmt: Format) -> dict:
    """vLLM's `quantization_config` for packed tensors (compressed-tensors)."""
    kind = "float" if fmt.dtype.is_floating_point else "int"
    numbers = {"num_bits": 8 if fmt.activations else 4, "type": kind, "symmetric": True}
    weights, inputs = {**numbers, "strategy": "channel", "dynamic": False}, None
    if fmt.activations:
        inputs = {**numbers, "strategy": "token", "dynamic": True}
    else:
        weights |= {"strategy": "group", "group_size": fmt.group}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized" if fmt.activations else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", *(rf"re:.*\.{name}(\..*)?$" for name in ROUTERS)],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
            }
        },
    }


def has_head(model) -> bool:
    """Whether vLLM's model has a module for `lm_head.weight`. Some models with tied weights use the
    embedding instead."""
    return any(
        name.split(".")[-1] == "lm_head"
        for name, _ in model.named_modules(remove_duplicate=False)
    )
