"""LoRA: the policy learns a low-rank correction to each of its linear layers except the head.

    y = W x + (alpha / rank) B A x      W (out, in) frozen, A (rank, in) random, B (out, rank) = 0

A 16-bit --dtype is also the dtype of W, not only of its product; adapters are float32.

The adapters are modules of peft, an optional package. Only the learner has them. Published and
saved weights are merged tensor by tensor: W + (alpha / rank) B A under the base model's names
(`merged`). With --kl_coef the frozen model is the policy with its adapters switched off, without a
second copy.

A checkpoint also has the adapters in peft's format, for other programs. A run resumes exactly from its
base model and from the adapters in the checkpoint's shards (machinery/checkpoint/shards.py)."""

from __future__ import annotations

import copy
import importlib.util
from contextlib import contextmanager
from pathlib import Path

import torch

import quant
from config import Config, OptimizerFlags
from machinery.flags import need

NAME = "default"  # peft's name for a model's only adapter
ALPHA = 32  # B A is scaled by ALPHA / rank
FILE = "adapter_model.safetensors"


def learns(cfg: OptimizerFlags, name: str) -> bool:
    """Whether the model `name`, policy or actor, is trained by adapters."""
    return cfg.lora_rank > 0 and name == "policy"


def attach(model, cfg: Config):
    """Add adapters to the model, freeze all other weights, and return the model.

    For a model without weights (memory.unread) call `start` when the model's weights are read."""
    import peft

    adapted = "all-linear"
    if quant.expert_parameters(model):  # peft would adapt experts too
        adapted = sorted(
            {name.rpartition(".")[2] for name in quant.quantized_linears(model)}
        )
    config = peft.LoraConfig(
        r=cfg.lora_rank, lora_alpha=ALPHA, target_modules=adapted, task_type="CAUSAL_LM"
    )
    # peft draws adapters, which `start` overwrites
    with torch.random.fork_rng(devices=[]):
        peft.inject_adapter_in_model(config, model, adapter_name=NAME)
    for layer in layers(model):
        # autocast casts the inputs; peft would first copy them into float32
        layer.cast_input_dtype_enabled = False
        if cfg.dtype != "float32":
            layer.base_layer.to(getattr(torch, cfg.dtype))
    model.adapter_seed = cfg.seed
    if not any(p.is_meta for p in model.parameters()):
        start(model)
    return model


@torch.no_grad()
def start(model) -> None:
    """Initialize the adapters with B = 0 and A (rank, in) uniform in +-1 / sqrt(in), equal on every
    rank. Collective if they are sharded."""
    generator = torch.Generator().manual_seed(model.adapter_seed)
    for layer in layers(model):
        A, B = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        draws = torch.rand(A.shape, generator=generator, dtype=torch.float64)
        copy_into(A, (2 * draws - 1) / A.shape[1] ** 0.5)
        copy_into(B, torch.zeros(B.shape))


def copy_into(p, tensor) -> None:
    """Copy a whole tensor into a parameter, or into this rank's shard of it. Collective if the
    parameter is sharded: the first rank's tensor is used."""
    tensor = tensor.to(p.device, p.dtype)
    if hasattr(p, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor  # seconds to load

        tensor = distribute_tensor(tensor, p.device_mesh, p.placements)
    p.copy_(tensor)


def layers(model) -> list:
    """The layers with an adapter."""
    return [module for module in model.modules() if hasattr(module, "lora_A")]


@contextmanager
def switched_off(model):
    """Context in which the model is its base model, because the scale of every adapter is 0."""
    for layer in layers(model):
        layer.set_scale(NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers(model):
            layer.set_scale(NAME, 1.0)


def merged(model, state: dict, gather):
    """Yield (name, tensor) of the model's state dict under the names of the base model, with
    W + (alpha / rank) B A in place of W, A and B. gather: (name, shard) -> tensor of all ranks."""
    for name, x in state.items():
        if is_adapters(name):
            continue
        x = gather(name, x)
        layer, is_base, part = name.partition(".base_layer.")
        if is_base and part == "weight":
            adapters = (f"{layer}.lora_{matrix}.{NAME}.weight" for matrix in "AB")
            A, B = (gather(adapter, state[adapter]) for adapter in adapters)
            config = model.peft_config[NAME]
            x = x + (config.lora_alpha / config.r) * (B @ A)
        yield f"{layer}.{part}" if is_base else layer, x


def is_adapters(name: str) -> bool:
    """Whether this is the name of an adapter's parameter."""
    return ".lora_A." in name or ".lora_B." in name


def write(model, whole, folder: Path, base: str, first: bool) -> None:
    """Write the model's adapters in peft's format, on the `first` rank. whole: gathers a tensor from
    all ranks; base: folder of the base model. Collective if the adapters are sharded."""
    from safetensors.torch import save_file

    adapters = {name: x for name, x in model.state_dict().items() if is_adapters(name)}
    tensors = {}
    for name, x in adapters.items():
        place = "base_model.model." + name.replace(f".{NAME}.", ".")
        tensors[place] = whole(x).cpu().contiguous()
    if first:
        config = copy.copy(model.peft_config[NAME])
        config.base_model_name_or_path = str(base)
        config.inference_mode = True
        config.save_pretrained(folder)
        save_file(tensors, folder / FILE, metadata={"format": "pt"})


def check(cfg: Config) -> None:
    """Raise UserError if flags contradict each other, or if the package peft is missing."""
    rank = f"--lora_rank={cfg.lora_rank}"
    if cfg.lora_rank == 0:
        return
    need(
        cfg.optimizer != "muon",
        f"{rank}: --optimizer=muon orthogonalises whole matrices, not their factors; use adamw",
    )
    need(
        cfg.learner_quant == "none",
        f"{rank}: --learner_quant={cfg.learner_quant} computes on low-bit weights, and adapters are added in "
        "high precision; leave one of the two out",
    )
    need(
        importlib.util.find_spec("peft") is not None,
        f"{rank}: the package peft is not installed here; pip install peft, or leave the flag out",
    )
