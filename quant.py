"""Low-bit rollouts, and a learner that computes as the low-bit engine does: QaRL, section 3.1.

A quantized engine samples from another policy than the one that trains. Correcting for that
(objectives.py) costs variance; QaRL (arXiv 2604.07853) removes the difference. The learner keeps
high-precision master weights W, but runs its linear layers on the engine's own low-bit numbers,

    forward     y  = x^ W^T    x^ = s_x q_x, W^ = s_w q_w; the product is taken on q_x and q_w
    backward    dx = g W^      straight through the rounding, in high precision,
                dW = g^T x^    onto the master weights; no gradient through the scales

and hands the engine those very q_w and s_w, so that nothing is quantized twice. Embedding and head
stay in high precision.

    format   weights q_w, with scales s_w       activations q_x     largest rounding error
    int8     int8 in +-127, one a row           int8, one a token   s / 2,  s = max|row| / 127
    fp8      float8_e4m3fn in +-448, one a row  the same            |entry| / 16 (s / 1024 near 0)
    w4a16    int4 in +-7, one a group           full precision      s / 2,  s = max|group| / 7
    w3a16    the same in +-3                    full precision      s / 2,  s = max|group| / 3
    w2a16    the same in +-1                    full precision      s / 2,  s = max|group|

"One a row" is the number of scales. A row of a weight matrix is one output channel; a group is
`--quant_group` consecutive entries of a row. Scales are symmetric: zero stays zero. A row of zeros has
scale 1. Two and three bits are a stress for models that int4 hardly hurts. On x86 processors without
VNNI, int8 products saturate; there the weights stay within +-63 (`int8_qmax`).
"""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from flags import UserError, need

Quant = Literal["none", "int8", "fp8", "w4a16", "w3a16", "w2a16"]
LearnerQuant = Literal["none", "aligned", "int8", "fp8", "w4a16", "w3a16", "w2a16"]


@dataclass(frozen=True)
class PrecisionFlags:
    """Precision on both sides"""

    lm_head_fp32: bool = False
    """Compute the language-model head in float32 on both sides, above bodies of less."""
    rollout_quant: Quant = "none"
    """Low-bit rollouts (quant.py): the engine's linear layers in this format."""
    learner_quant: LearnerQuant = "none"
    """aligned: the learner's copy of the model that samples computes on the engine's low-bit numbers (QaRL);
    a format: whatever the engine does."""
    quant_group: int = 64
    """Columns that share a scale in w4a16 and its like."""


@dataclass(frozen=True)
class Format:
    """A number format of linear layers."""

    name: str
    qmax: float  # largest magnitude of a quantized weight
    dtype: torch.dtype  # in which quantized numbers are stored
    activations: bool  # whether activations are quantized too
    group: int = 0  # entries of a row that share a scale; 0: the whole row

    @property
    def activation_qmax(self) -> float:
        """Largest magnitude of a quantized activation: for int8 the whole range on any processor."""
        return 127.0 if self.dtype == torch.int8 else self.qmax


def format_of(name: str, group: int = 128) -> Format | None:
    """The format of a value of --rollout_quant or --learner_quant; None for "none"."""
    if name == "none":
        return None
    if name == "int8":
        return Format(name, int8_qmax(), torch.int8, True)
    if name == "fp8":
        return Format(name, 448.0, torch.float8_e4m3fn, True)
    weights_only = {"w4a16": 7.0, "w3a16": 3.0, "w2a16": 1.0}
    return Format(name, weights_only[name], torch.int8, False, group)


@functools.cache
def int8_qmax() -> float:
    """Largest magnitude of an int8 weight on this machine: 127, or 63 where products saturate.

    They do on x86 processors without VNNI, which add int8 products in pairs in 16 bits."""
    if torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return 127.0
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.is_file() else []
    saturates = not any("vnni" in flag or flag.startswith("amx_int8") for flag in flags)
    return 63.0 if saturates else 127.0


# ---------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------


def quantize(x: torch.Tensor, qmax: float, dtype: torch.dtype, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, s) with x ~ s q: s = max|x| / qmax over a row or group, q = round(x / s).

    x (M, K) -> q (M, K) of `dtype`, s (M, K / group) float32; s (M, 1) where group is 0."""
    M, K = x.shape
    x = x.float().reshape(M, -1, group or K)
    amax = x.abs().amax(-1, keepdim=True)
    s = torch.where(amax > 0, amax / qmax, 1.0)
    q = (x / s).clamp_(-qmax, qmax)
    if dtype == torch.int8:
        q = q.round_()  # the conversion to float8 rounds by itself
    return q.to(dtype).reshape(M, K), s[..., 0]


def dequantize(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """s q: (M, K) and (M, K / group) -> (M, K) float32."""
    M, K = q.shape
    return (q.float().reshape(M, s.shape[1], -1) * s[..., None]).reshape(M, K)


def product(qx, sx, qw, sw) -> torch.Tensor:
    """(s_x q_x) (s_w q_w)^T, multiplied as low-bit numbers.

    qx (M, K), sx (M, 1), qw (N, K), sw (N, 1) -> (M, N) float32."""
    if qx.dtype == torch.int8:
        return int_mm(qx, qw).float().mul_(sx).mul_(sw.t())
    if qx.is_cuda:
        return torch._scaled_mm(qx, qw.t(), scale_a=sx, scale_b=sw.t(), out_dtype=torch.bfloat16).float()
    return (qx.float() @ qw.float().t()).mul_(sx).mul_(sw.t())  # e4m3 products are exact in float32


def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b^T of int8 matrices: (M, K), (N, K) -> (M, N) int32.

    CUDA's kernel wants more than 16 rows and multiples of 8: zeros are added, and cut off again."""
    if not a.is_cuda:
        return torch._int_mm(a, b.t())
    pad = nn.functional.pad
    M, N = len(a), len(b)
    a = pad(a, (0, -a.shape[1] % 8, 0, max(0, 17 - M)))
    b = pad(b, (0, -b.shape[1] % 8, 0, -N % 8))
    return torch._int_mm(a, b.t())[:M, :N]


# ---------------------------------------------------------------------------------------------------------------------
# The aligned linear layer
# ---------------------------------------------------------------------------------------------------------------------


class StraightThroughMatmul(torch.autograd.Function):
    """y = x^ W^T on low-bit numbers; backward straight through the rounding (formulas above).

    x (M, K); weight (N, K): the master, here for its gradient alone; qw, sw: its quantized form."""

    @staticmethod
    def forward(ctx, x, weight, qw, sw, fmt: Format):
        if fmt.activations:
            qx, sx = quantize(x, fmt.activation_qmax, fmt.dtype)
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
            x = qx if sx is None else dequantize(qx, sx).to(g.dtype)
            dw = g.t() @ x
        return dx, dw, None, None, None


class LowBitLinear(nn.Linear):
    """A linear layer that computes as the engine does. `align` puts it in the place of an nn.Linear.

    Its parameters are those of the layer it replaces, the same objects under the same names."""

    # False under FSDP: the version of a gathered weight does not tell when its shards have changed.
    cache_quantized = True
    # An engine's copy has no master weights: it holds what was published, (q_w, s_w), here.
    loaded: tuple[torch.Tensor, torch.Tensor] | None = None
    # (q_w, s_w) made from the master weight, and that weight's version and address at the time.
    cached: tuple[torch.Tensor, torch.Tensor] | None = None
    cached_version: tuple[int, int] | None = None

    @classmethod
    def from_linear(cls, linear: nn.Linear, fmt: Format) -> LowBitLinear:
        """A low-bit layer over the very parameters of `linear`."""
        # On the meta device: no memory taken and no random numbers drawn for weights that are replaced.
        has_bias = linear.bias is not None
        layer = cls(linear.in_features, linear.out_features, bias=has_bias, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.format = fmt
        return layer.train(linear.training)

    def quantized_weight(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(q_w, s_w) of the weight as it is now: the tensors of the forward pass and of the publication.

        They are made once for each version of the weight."""
        if self.loaded is not None:
            return self.loaded
        version = (self.weight._version, self.weight.data_ptr())
        if self.cached_version != version or not self.cache_quantized:
            fmt = self.format
            self.cached = quantize(self.weight.detach(), fmt.qmax, fmt.dtype, fmt.group)
            self.cached_version = version
        return self.cached

    def forward(self, x):
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            flat = x.reshape(-1, x.shape[-1])  # (M, K)
            y = StraightThroughMatmul.apply(flat, self.weight, *self.quantized_weight(), self.format)
            y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def quantized_linears(model) -> dict[str, nn.Linear]:
    """The linear layers that are quantized, by name: all but the head, and adapters, which are merged before."""
    head = model.get_output_embeddings()
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    return {name.removesuffix(".base_layer"): m for name, m in linears.items() if ".lora_" not in name}


def align(model, fmt: Format | None):
    """Put a LowBitLinear in the place of each of the model's linear layers, and return the model.

    fmt None: nothing changes. UserError: a row of weights cannot be divided into whole groups, or the model has
    experts."""
    if fmt is None:
        return model
    refuse_experts(model, "--rollout_quant, --learner_quant")
    low_bit = {}
    for name, linear in quantized_linears(model).items():
        if fmt.group and linear.in_features % fmt.group:
            raise UserError(
                f"--quant_group={fmt.group}: {name} has rows of {linear.in_features}, which are not made of whole "
                "groups; choose a divisor"
            )
        low_bit[linear] = LowBitLinear.from_linear(linear, fmt)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in low_bit:
                setattr(parent, name, low_bit[child])
    return model


def refuse_experts(model, flag: str) -> None:
    """UserError: the model keeps its experts' weights (E, out, in) in one tensor, which `flag` would pass over."""
    experts = [name for name, p in model.named_parameters() if p.ndim == 3 and "expert" in name]
    need(
        not experts,
        f"{flag}: {experts[0] if experts else ''} holds the weights of several experts in one tensor, and only "
        "matrices are known here; train this model without the flag",
    )


# ---------------------------------------------------------------------------------------------------------------------
# What the engine gets
# ---------------------------------------------------------------------------------------------------------------------


def for_engine(named_tensors, model, fmt: Format, packed: bool = True):
    """Yield (name, tensor) of a state dict as an engine loads it, the linear layers in low bits.

    A layer's X.weight becomes q_w and s_w: X.weight and X.weight_scale, or for int4 X.weight_packed
    (eight numbers to an int32), X.weight_scale and X.weight_shape. Where the layers of `model` are
    aligned in this format, these are the very tensors of their forward pass. packed False, for
    engines without a kernel: X.weight is the exactly dequantized weight, in its old type."""
    linears = quantized_linears(model)
    for name, x in named_tensors:
        layer = linears.get(name.removesuffix(".weight"))
        if layer is None:
            yield name, x
            continue
        aligned = isinstance(layer, LowBitLinear) and layer.format == fmt
        sharded = hasattr(layer.weight, "full_tensor")
        if aligned and not sharded:
            q, s = layer.quantized_weight()
        else:
            q, s = quantize(x, fmt.qmax, fmt.dtype, fmt.group)
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
    """Round the weights of the linear layers to the format's grid, in place, and return the model.

    A plain model then computes what a format without quantized activations computes."""
    for linear in quantized_linears(model).values():
        weight = linear.weight.data
        weight.copy_(dequantize(*quantize(weight, fmt.qmax, fmt.dtype, fmt.group)))
    return model


def load_quantized(model, tensors: dict) -> dict:
    """Put published low-bit tensors into the model's aligned layers as they are; return the others.

    int4 tensors of a layer that is not aligned come back dequantized, as X.weight."""
    rest = dict(tensors)
    for name, layer in quantized_linears(model).items():
        weight = f"{name}.weight"
        scale = rest.pop(f"{weight}_scale", None)
        if isinstance(layer, LowBitLinear):
            layer.loaded = None if scale is None else (rest.pop(weight).clone(), scale.clone())
        elif scale is not None:
            rest[weight] = unpacked(rest.pop(f"{weight}_packed"), scale, rest.pop(f"{weight}_shape"))
    return rest


def unpacked(packed, scale, shape) -> torch.Tensor:
    """The weight of published int4 tensors, float32."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    return dequantize(unpack_from_int32(packed, 4, torch.Size(shape.tolist())), scale)


def quantized_checkpoint(folder: str, fmt: Format, out: str, packed: bool = True) -> str:
    """Write a model folder in low bits, for an engine to start from; return its path, `out`.

    Configuration and tokenizer are those of `folder`; the tensors are as in `for_engine`."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = {}
    for name, x in for_engine(model.state_dict().items(), model, fmt, packed):
        tensors[name] = x.contiguous().clone()
    weights = shutil.ignore_patterns("*.safetensors*", "*.bin", "*.pt")
    shutil.copytree(folder, out, ignore=weights, dirs_exist_ok=True)
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if packed:
        text = json.dumps({**config, "quantization_config": engine_config(fmt)}, indent=1)
        (Path(out) / "config.json").write_text(text, encoding="utf-8")
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    save_file(tensors, f"{out}/model.safetensors", metadata={"format": "pt"})
    return out


def engine_config(fmt: Format) -> dict:
    """`quantization_config` of a checkpoint with packed tensors, as compressed-tensors reads it."""
    kind = "float" if fmt.dtype.is_floating_point else "int"
    if fmt.activations:
        style = f"{kind}-quantized"
        weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
        inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    else:
        style = "pack-quantized"
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": fmt.group,
            "dynamic": False,
        }
        inputs = None
    return {
        "quant_method": "compressed-tensors",
        "format": style,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }


def check(cfg) -> None:
    """UserError with one sentence if the flags of the formats contradict each other."""
    need(
        cfg.learner_quant != "aligned" or cfg.rollout_quant != "none",
        "--learner_quant=aligned: the rollouts are not quantized, there is nothing to align with; name a "
        "--rollout_quant, or the learner's own format in --learner_quant",
    )
    need(cfg.quant_group >= 1, f"--quant_group={cfg.quant_group}: must be at least 1")


def check_model(cfg, folder: str) -> None:
    """UserError with one sentence if the formats of the flags cannot run here on the model of `folder`.

    Only the model's config.json is read."""
    formats = {cfg.rollout_quant, cfg.learner_quant} - {"none", "aligned"}
    cuda = torch.cuda.is_available()
    need(
        not ("fp8" in formats and cuda and torch.cuda.get_device_capability() < (8, 9)),
        "--rollout_quant=fp8: this GPU multiplies no fp8 (compute capability below 8.9); it can run int8 and w4a16",
    )
    vllm_kernel = cfg.rollout_quant == "w4a16" and cfg.rollout == "vllm" and cuda
    need(
        not vllm_kernel or cfg.quant_group in (32, 64, 128),
        f"--quant_group={cfg.quant_group}: vLLM's int4 kernels know groups of 32, 64 and 128",
    )
    for name in sorted(formats):
        with torch.device("meta"):
            align(empty_model(folder), format_of(name, cfg.quant_group))


def empty_model(folder: str):
    """The model of a folder without its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
