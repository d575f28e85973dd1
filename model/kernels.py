"""Kernels of the learner's decoder layers (--kernels).

    plain      transformers' own modules
    liger      liger-kernel's RMSNorm, rotary embedding and SwiGLU, for its families, only on a GPU;
               it also replaces the family's classes in transformers, for the whole process
    compile    torch.compile of each decoder layer, with dynamic shapes; if prompts are shared, only
               its feed-forward block runs compiled
    auto       plain: no other choice has been measured to be faster on a GPU yet (results/gpu.md)

All compute the same function up to rounding. Layers are replaced or compiled in place; names and
weights do not change.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

import quant
from config import Config
from machinery.flags import need

BACKEND = "inductor"


def check(cfg: Config) -> None:
    """Raise UserError if these kernels do not run here, or contradict a different flag."""
    flag = f"--kernels={cfg.kernels}"
    if cfg.kernels in ("auto", "plain"):
        return
    need(
        not (cfg.exact or cfg.router_replay),
        f"{flag}: --exact and --router_replay also replace these modules; leave out --kernels or the other flag",
    )
    on_gpu = torch.cuda.is_available()
    if cfg.kernels == "compile":
        need(
            quant.learner_format(cfg) is None,
            f"{flag}: the low-bit layers of --learner_quant={cfg.learner_quant} have their own kernels; leave it out",
        )
        need(
            on_gpu or cfg.rollout != "vllm" or cfg.samplers != "local",
            f"{flag}: vLLM's CPU engine switches torch.compile off in this process; use --rollout=hf",
        )
    if cfg.kernels == "liger":
        need(on_gpu, f"{flag}: its kernels run on a GPU; use --kernels=plain")
        installed = importlib.util.find_spec("liger_kernel") is not None
        need(installed, f"{flag}: pip install liger-kernel, or use --kernels=compile")


def apply(model, kernels: str) -> None:
    """Install the kernels in a model. Raises UserError if liger-kernel does not know its family."""
    if kernels == "compile":
        for layer in model.base_model.layers:
            # compiled already
            if getattr(layer.forward, "func", None) is without_cache:
                continue
            layer.mlp.compile(dynamic=True, backend=BACKEND)
            compiled = torch.compile(layer.forward, dynamic=True, backend=BACKEND)
            layer.forward = functools.partial(without_cache, compiled, layer.forward)
    elif kernels == "liger":
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )

        family = model.config.model_type
        need(
            family in MODEL_TYPE_TO_APPLY_LIGER_FN,
            f"--kernels=liger: liger-kernel does not know the family {family}; use --kernels=compile",
        )
        # model/head.py computes the head and the loss
        _apply_liger_kernel_to_instance(
            model=model, cross_entropy=False, fused_linear_cross_entropy=False
        )


def without_cache(compiled, plain, *args, past_key_values=None, **more):
    """A decoder layer's forward pass, compiled only without a KV cache: the cache would cause a
    compilation for each layer."""
    if past_key_values is None:
        return compiled(*args, **more)
    return plain(*args, past_key_values=past_key_values, **more)
