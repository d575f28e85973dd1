"""Memory of models: the placement of weights, gradients and activations.

Master weights, gradients and optimizer states are float32 for every precision of the files, and
with FSDP2 they are sharded. During training no GPU has the whole model in float32, except with a
single rank or with DDP; the first rank has the whole model in host memory while the files are read
(in their precision) and while a checkpoint is written (in float32). A plain rollout engine
(--rollout=hf) is a whole copy on each rank; with FSDP2 so is the plain sampler of evaluations
(--eval_engine=torch, and own for a model from which no local engine samples)."""

from __future__ import annotations

import functools
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import quant
from config import PrecisionFlags
from machinery.checkpoint.models import load_model, read_config
from machinery.flags import need
from model import exact, lora


def unread(folder: Path | str):
    """The model of a folder, with its parameters on the meta device, where they take no memory;
    `fill` reads them."""
    model = quant.empty_model(read_config(folder)).requires_grad_(True).eval()
    model.on_disk = folder
    return model


@torch.no_grad()
def fill(models: nn.Module, device: str) -> None:
    """Move models to their device; allocate and read the weights of models made by `unread`.

    Parameters remain the same objects. Raises UserError if the weights do not fit the config."""
    if any(
        x.device != torch.device(device)
        for x in chain(models.parameters(), models.buffers())
    ):
        # else tied weights come apart
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            models._apply(
                lambda x: (
                    torch.empty_like(x, device=device) if x.is_meta else x.to(device)
                )
            )
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    for model in models.children():
        if hasattr(model, "on_disk"):
            read(model, vars(model).pop("on_disk"))
            if lora.layers(model):
                lora.start(model)


def read(model, folder: Path | str) -> None:
    """Fill a model's parameters and buffers, but no adapters, from a folder, by transformers.

    With shards only the first rank loads the whole model, into host memory and in the precision of
    the files, and distributes it tensor by tensor."""
    tensors, names = {}, {}
    for name, x in model.state_dict(keep_vars=True).items():
        if not lora.is_adapters(name):
            # tied ones once
            tensors[id(x)], names[id(x)] = x, name.replace(".base_layer.", ".")
    sharded = any(hasattr(x, "to_local") for x in tensors.values())
    loaded, why = {}, [""]
    if not sharded or dist.get_rank() == 0:
        try:
            loaded = load_model(folder, "auto").state_dict()
        except ValueError as e:  # the other ranks must raise it too
            why = [str(e)]
    if sharded:
        dist.broadcast_object_list(why, src=0)
    need(not why[0], why[0])
    for i, x in tensors.items():
        empty = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        # the first rank's is used
        lora.copy_into(x, loaded[names[i]] if loaded else empty)
        if sharded and not hasattr(x, "to_local"):  # a buffer: every rank has all of it
            dist.broadcast(x, src=0)


def shard(
    models: nn.Module, device: str, n_ranks: int, compute: torch.dtype | None
) -> nn.Module:
    """Wrap the models by FSDP2 and return them: each rank owns a shard of every parameter, each
    layer is a group, and the root group has embeddings and heads.

    compute: the 16-bit dtype of the products, or None. Layers are gathered in it if possible
    (`travels_in`), and gradients are summed in float32. The root is gathered in float32, the dtype
    of its embeddings and of the sums in its head."""
    from torch.distributed.device_mesh import init_device_mesh  # seconds to load
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(torch.device(device).type, (n_ranks,))
    for model in models.children():
        for layer in model.modules():
            if isinstance(layer, quant.LowBit):
                layer.cache_quantized = False
        policy = MixedPrecisionPolicy()
        if travels_in(model, compute):
            policy = MixedPrecisionPolicy(
                param_dtype=compute,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(models, mesh=mesh)


def compute_type(cfg: PrecisionFlags) -> torch.dtype | None:
    """The 16-bit dtype of the learner's products; None: float32."""
    return None if cfg.dtype == "float32" else getattr(torch, cfg.dtype)


def slow_dtype(cfg: PrecisionFlags) -> str:
    """A warning if this processor multiplies 16-bit matrices slowly and --dtype needs it; else ""."""
    fast = (
        torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX2"
    )
    if fast or cfg.dtype == "float32":
        return ""
    return f"--dtype={cfg.dtype}: without AVX-512 16-bit products take 60 times as long; --dtype=float32 is faster"


def travels_in(model: nn.Module, compute: torch.dtype | None) -> torch.dtype | None:
    """The 16-bit dtype in which ranks gather a model's layers; None: float32.

    Aligned and exact layers must compute with the published numbers, and torch's LayerNorm does not
    support mixed dtypes on a CPU."""
    needs_float32 = any(
        isinstance(m, (quant.LowBit, exact.ExactLinear, nn.LayerNorm))
        for m in model.modules()
    )
    return None if needs_float32 else compute


def round_experts(model, compute: torch.dtype | None) -> None:
    """Let autocast round the matrices of experts as it rounds linear layers: it does not apply to
    F.grouped_mm, transformers' default."""
    if compute is not None and quant.experts_of(model):
        model.set_experts_implementation("eager")


def recompute(model) -> None:
    """Make each decoder layer keep only its input for the backward pass
    (--gradient_checkpointing).

    It replaces transformers' gradient checkpointing, which requires training mode and drops the
    keys and values of a prompt that several responses share."""
    for i, layer in enumerate(model.base_model.layers):
        if getattr(layer.forward, "func", None) is not forward_again:  # not wrapped yet
            layer.forward = functools.partial(forward_again, layer.forward, i)


def forward_again(forward, i: int, *args, past_key_values=None, **more):
    """The forward pass of layer i, which runs again in the backward pass if gradients are enabled.

    Keys and values are tensor inputs and outputs, so that the second run starts from the same cache
    as the first."""
    if not torch.is_grad_enabled():
        return forward(*args, past_key_values=past_key_values, **more)
    # layers draw no random numbers, because dropout is off
    options = {"use_reentrant": False, "preserve_rng_state": False}
    if past_key_values is None:
        return checkpoint(forward, *args, **options, **more)
    layer = past_key_values.layers[i]
    known = (layer.keys, layer.values) if layer.is_initialized else ()

    def run(known, *args):
        filled_layer = filled(type(layer)(), *known)
        out = forward(*args, past_key_values=filled_layer, **more)
        return out, filled_layer.keys, filled_layer.values

    out, *new = checkpoint(run, known, *args, **options)
    if not known:  # a prompt; the keys and values of responses are not read again
        filled(layer, *new)
    return out


def filled(layer, *keys_and_values):
    """A cache layer, filled with these keys and values (B, heads, tokens, size) if given."""
    if keys_and_values:
        layer.lazy_initialization(*keys_and_values)
        layer.keys, layer.values = keys_and_values
    return layer
