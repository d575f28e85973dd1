"""Low-bit rollouts, and a learner that computes what the low-bit engine computes: QaRL, arXiv 2604.07853, section 3.1.

A quantized engine samples from another policy than the one that trains. Correcting for it (objectives.py) costs variance; QaRL
removes it: the learner cache_quantized high-precision master weights W but runs its linear layers on the engine's own low-bit numbers,

    forward     y  = x^ W^T          x^ = s_x q_x,  W^ = s_w q_w,  the product taken on q_x and q_w themselves
    backward    dx = g W^            straight through the rounding, in high precision,
                dW = g^T x^          onto the master weights; no gradient through the scales

and hands the engine those very q_w and s_w: nothing is quantized twice. Embedding and head stay as they are.

    format   weights q_w, s_w                                    activations q_x, s_x          rounding error of an entry
    int8     int8 in +-127, one scale an output channel          int8, one scale a token       s / 2,  s = max|row| / 127
    fp8      float8_e4m3fn in +-448, one scale an output channel the same, one scale a token   |entry| / 16 (s / 1024 near 0)
    w4a16    int4 in +-7, one scale for each group of a row      none (full precision)         s / 2,  s = max|group| / 7
    w3a16, w2a16   the same with +-3 and +-1: a stress for models that int4 hardly hurts

Scales are symmetric: zero stays zero. A row of zeros has scale 1. On x86 without VNNI, int8 products are summed in pairs in 16 bits and
saturate beyond +-63 (`int8_top`).
"""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True)
class Format:
    """A number format: largest magnitude of weights and activations, storage, whether activations are quantized, size of a group."""

    name: str
    qmax: float
    dtype: torch.dtype
    activations: bool
    group: int = 0  # columns that share a scale; 0: a whole row


def format_of(name: str, group: int = 128) -> Format | None:
    """The format of a flag's value; None for "none"."""
    if name == "none":
        return None
    if name == "int8":
        return Format(name, int8_top(), torch.int8, True)
    if name == "fp8":
        return Format(name, 448.0, torch.float8_e4m3fn, True)
    return Format(name, {"w4a16": 7.0, "w3a16": 3.0, "w2a16": 1.0}[name], torch.int8, False, group)


@functools.cache
def int8_top() -> float:
    """127, or 63 where the processor adds int8 products in pairs in 16 bits and saturates (x86 without VNNI)."""
    if torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return 127.0
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").is_file() else []
    return 127.0 if any("vnni" in f or f.startswith("amx_int8") for f in flags) else 63.0


# ---------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------


def quantize(x: torch.Tensor, qmax: float, dtype: torch.dtype, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, s) with x ~ s q: x (M, K) -> q (M, K) of `dtype`, s (M, K / group) float32, one scale a row where group is 0."""
    M, K = x.shape
    x = x.float().reshape(M, -1, group or K)
    amax = x.abs().amax(-1, keepdim=True)
    s = torch.where(amax > 0, amax / qmax, 1.0)
    q = (x / s).clamp_(-qmax, qmax)
    q = q.round_().to(dtype) if dtype == torch.int8 else q.to(dtype)
    return q.reshape(M, K), s[..., 0]


def dequantize(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """s q, (M, K) float32."""
    M, K = q.shape
    return (q.float().reshape(M, s.shape[1], -1) * s[..., None]).reshape(M, K)


def product(qx, sx, qw, sw) -> torch.Tensor:
    """(s_x q_x) (s_w q_w)^T on the low-bit numbers: (M, K), (M, 1), (N, K), (N, 1) -> (M, N) float32."""
    if qx.dtype == torch.int8:
        return int_mm(qx, qw).float().mul_(sx).mul_(sw.t())
    if qx.is_cuda:
        return torch._scaled_mm(qx, qw.t(), scale_a=sx, scale_b=sw.t(), out_dtype=torch.bfloat16).float()
    return (qx.float() @ qw.float().t()).mul_(sx).mul_(sw.t())  # e4m3 products are exact in float32


def int_mm(a, b):
    """a b^T of int8 matrices in int32. CUDA's kernel wants more than 16 rows and multiples of 8: zeros are added and cut off."""
    if not a.is_cuda:
        return torch._int_mm(a, b.t())
    M, N, pad = len(a), len(b), nn.functional.pad
    a = pad(a, (0, -a.shape[1] % 8, 0, max(0, 17 - M)))
    b = pad(b, (0, -b.shape[1] % 8, 0, -N % 8))
    return torch._int_mm(a, b.t())[:M, :N]


# ---------------------------------------------------------------------------------------------------------------------
# The aligned linear layer
# ---------------------------------------------------------------------------------------------------------------------


class StraightThroughMatmul(torch.autograd.Function):
    """y = x^ W^T on low-bit numbers; backward straight through (see above). x (M, K), weight (N, K): the master, for its gradient alone."""

    @staticmethod
    def forward(ctx, x, weight, qw, sw, fmt: Format):
        if fmt.activations:
            qx, sx = quantize(x, fmt.qmax if fmt.dtype != torch.int8 else 127.0, fmt.dtype)
            ctx.save_for_backward(qx, sx, qw, sw)
            return product(qx, sx, qw, sw).to(x.dtype)
        ctx.save_for_backward(x, None, qw, sw)
        return x @ dequantize(qw, sw).to(x.dtype).t()

    @staticmethod
    def backward(ctx, g):
        qx, sx, qw, sw = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = g @ dequantize(qw, sw).to(g.dtype)
        if ctx.needs_input_grad[1]:
            dw = g.t() @ (qx if sx is None else dequantize(qx, sx).to(g.dtype))
        return dx, dw, None, None, None


class LowBitLinear(nn.Linear):
    """A linear layer that computes as the engine does. An nn.Linear becomes one by `align`; its master weight stays where it was."""

    loaded = cached_version = None
    cache_quantized = True  # False under FSDP: a gathered weight's version does not tell when its shards have changed

    def quantized_weight(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(q_w, s_w) of the weight as it is, made once for each version of it; the tensors that are published."""
        if self.loaded is not None:  # an engine's copy: what was loaded, no master
            return self.loaded
        at = (self.weight._version, self.weight.data_ptr())
        if self.cached_version != at or not self.cache_quantized:
            self.cached = quantize(self.weight.detach(), self.format.qmax, self.format.dtype, self.format.group)
            self.cached_version = at
        return self.cached

    def forward(self, x):
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(kind) if kind else x
            y = StraightThroughMatmul.apply(
                x.reshape(-1, x.shape[-1]), self.weight, *self.quantized_weight(), self.format
            ).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def quantized_linears(model) -> dict[str, nn.Linear]:
    """The linear layers that are quantized, by name: all but the head."""
    head = model.get_output_embeddings()
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


def align(model, fmt: Format | None):
    """Turn the model's linear layers into LowBitLinear in place. ValueError: a group that does not divide a row."""
    for name, m in quantized_linears(model).items() if fmt else ():
        if fmt.group and m.in_features % fmt.group:
            raise ValueError(
                f"--quant_group={fmt.group}: {name} has rows of {m.in_features}, which are not made of whole groups; choose a divisor"
            )
        m.__class__, m.format = LowBitLinear, fmt
    return model


def check(cfg, folder: str) -> None:
    """Can the formats of `cfg` run here, on the model of `folder` (its config.json alone)? ValueError: one sentence."""
    from transformers import AutoConfig, AutoModelForCausalLM

    formats = {f for f in (cfg.rollout_quant, cfg.learner_quant) if f not in ("none", "aligned")}
    cuda = torch.cuda.is_available()
    if "fp8" in formats and cuda and torch.cuda.get_device_capability() < (8, 9):
        raise ValueError(
            "--rollout_quant=fp8: this GPU multiplies no fp8 (compute capability below 8.9); it can run int8 and w4a16"
        )
    if cfg.rollout_quant == "w4a16" and cfg.rollout == "vllm" and cuda and cfg.quant_group not in (32, 64, 128):
        raise ValueError(f"--quant_group={cfg.quant_group}: vLLM's int4 kernels know groups of 32, 64 and 128")
    for f in sorted(formats):
        with torch.device("meta"):
            align(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), format_of(f, cfg.quant_group))


# ---------------------------------------------------------------------------------------------------------------------
# What the engine gets
# ---------------------------------------------------------------------------------------------------------------------


def for_engine(named_tensors, model, fmt: Format, packed: bool = True):
    """(name, tensor) of a state dict with the linear layers in low bits: X.weight q_w and X.weight_scale s_w, the tensors of the aligned
    forward themselves where there is one. packed = False: the exactly dequantized weights in place of both, for engines without a kernel."""
    linear = quantized_linears(model)
    for name, x in named_tensors:
        module = linear.get(name.removesuffix(".weight"))
        if module is None:
            yield name, x
            continue
        whole = isinstance(module, LowBitLinear) and module.format == fmt and not hasattr(module.weight, "full_tensor")
        q, s = module.quantized_weight() if whole else quantize(x, fmt.qmax, fmt.dtype, fmt.group)
        if not packed:
            yield name, dequantize(q, s).to(x.dtype)
        elif fmt.activations:
            yield name, q
            yield f"{name}_scale", s
        else:
            from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

            yield f"{name}_packed", pack_to_int32(q, 4)
            yield f"{name}_scale", s
            yield f"{name}_shape", torch.tensor(x.shape)


def dequantize_in_place(model, fmt: Format):
    """Replace the weights by their exactly dequantized values, in place: what a format without quantized activations computes with."""
    for m in quantized_linears(model).values():
        m.weight.data.copy_(dequantize(*quantize(m.weight.data, fmt.qmax, fmt.dtype, fmt.group)))
    return model


def load_quantized(model, tensors: dict) -> dict:
    """Put published low-bit tensors into an aligned model's layers, as they are; returns the tensors that are left, with int4 unpacked."""
    rest = dict(tensors)
    for name, module in quantized_linears(model).items():
        weight, scale = f"{name}.weight", rest.pop(f"{name}.weight_scale", None)
        if isinstance(module, LowBitLinear):
            module.loaded = None if scale is None else (rest.pop(weight).clone(), scale.clone())
        elif scale is not None:
            from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

            rest[weight] = dequantize(
                unpack_from_int32(rest.pop(f"{weight}_packed"), 4, torch.Size(rest.pop(f"{weight}_shape").tolist())),
                scale,
            )
    return rest


def keep_scales_alive() -> None:
    """vLLM's int8 handler on CPUs cache_quantized a bare pointer to the weight scales, which a live reload frees: tie a copy of them to the handler."""
    from vllm import _custom_ops as ops

    make = ops.create_onednn_scaled_mm
    if getattr(make, "cache_quantized", False):
        return

    def create_onednn_scaled_mm(weight, scales, *more):
        scales = scales.clone()
        handler = make(weight, scales, *more)
        handler.scales = scales
        return handler

    create_onednn_scaled_mm.cache_quantized = True
    ops.create_onednn_scaled_mm = create_onednn_scaled_mm


def engine_config(fmt: Format) -> dict:
    """`quantization_config` of a compressed-tensors checkpoint that holds these tensors."""
    kind = "float" if fmt.dtype.is_floating_point else "int"
    if fmt.activations:
        weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
        inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
        style = f"{kind}-quantized"
    else:
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": fmt.group,
            "dynamic": False,
        }
        inputs, style = None, "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": style,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }


def checkpoint(folder: str, fmt: Format, out: str, packed: bool = True) -> str:
    """A model folder in low bits, for an engine to start from: the same configuration and tokenizer, quantized tensors (see `published`)."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = {k: v.contiguous().clone() for k, v in for_engine(model.state_dict().items(), model, fmt, packed)}
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin", "*.pt"), dirs_exist_ok=True)
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if packed:
        (Path(out) / "config.json").write_text(
            json.dumps({**config, "quantization_config": engine_config(fmt)}, indent=1), encoding="utf-8"
        )
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    save_file(tensors, f"{out}/model.safetensors", metadata={"format": "pt"})
    return out
