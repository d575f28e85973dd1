"""Low-bit rollouts, and a learner that computes like the low-bit engine: QaRL, section 3.1.

A quantized engine samples from a different policy than the learner's. A correction (corrections.py)
adds variance; QaRL (arXiv 2604.07853) removes the difference. The learner keeps high-precision
master weights W, but its linear layers compute with the engine's low-bit numbers. With --dtype in 16
bits, W below is W rounded to it, as in a saved model:

    forward     y  = Xq Wq^T   Wq = s_w q_w; int8, fp8: Xq = s_x q_x, the product uses q_x, q_w;
                               the other formats: Xq = x
    backward    dx = g Wq      straight through the rounding, in high precision;
                dW = g^T Xq    gradient of the master weights; no gradient through the scales

The engine receives the same q_w and s_w, so each version of the weights is quantized once (under
FSDP once per use, with the same result). Embedding, head and routers stay in high precision. Each
matrix of each expert is quantized separately.

    format   weights q_w             scales s_w     activations q_x   largest rounding error
    int8     int8 in +-127           one per row    int8, per token   s / 2,  s = max|row| / 127
    fp8      float8_e4m3fn in +-448  one per row    fp8, per token    |entry| / 16 (s / 1024 near 0)
    w4a16    int4 in +-7             one per group  full precision    s / 2,  s = max|group| / 7
    w2a16    int4 in +-1             one per group  full precision    s / 2,  s = max|group|

A row of a weight matrix is one output channel; a group is `--quant_group` consecutive entries of a
row. Quantization is symmetric: zero stays zero. A row of zeros has scale 1. w2a16 is a stress test
for models that w4a16 hardly affects. On x86 processors without VNNI int8 products saturate, so int8
weights stay within +-63 there (`int8_qmax`)."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from config import PrecisionFlags, RolloutFlags
from machinery.flags import need


@dataclass(frozen=True)
class Format:
    """A number format of linear layers."""

    name: str
    qmax: float  # largest magnitude of a quantized weight
    dtype: torch.dtype  # storage dtype of quantized numbers
    activations: bool  # whether activations are also quantized
    group: int = 0  # entries of a row that share a scale; 0: the whole row
    # scales are rounded to this type, stored in float32
    scales: torch.dtype = torch.float32
    # the learner's dtype, to which weights are rounded first; not a property of the numbers
    weights: torch.dtype = field(default=torch.float32, compare=False)

    @property
    def activation_qmax(self) -> float:
        """Largest magnitude of a quantized activation; for int8, 127 on any processor."""
        return 127.0 if self.dtype == torch.int8 else self.qmax

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(q_w, s_w) of a weight (..., K), rounded to `weights` first; see `quantize`."""
        weight = weight.to(self.weights)
        return quantize(weight, self.qmax, self.dtype, self.group, self.scales)


def format_of(name: str, group: int = 64, dtype: str | None = None) -> Format | None:
    """The format of a value of --rollout_quant or --learner_quant; None for "none". dtype: --dtype
    of the learner, whose weights are rounded to it before they are quantized; None: float32."""
    if name == "none":
        return None
    weights = getattr(torch, dtype or "float32")
    if name == "int8":
        return Format(name, int8_qmax(), torch.int8, True, weights=weights)
    if name == "fp8":
        return Format(name, 448.0, torch.float8_e4m3fn, True, weights=weights)
    weights_only = {"w4a16": 7.0, "w2a16": 1.0}
    # on a GPU vLLM stores int4 scales in the model dtype, here bfloat16; on a CPU vLLM gets
    # dequantized weights
    scales = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return Format(name, weights_only[name], torch.int8, False, group, scales, weights)


@functools.cache
def int8_qmax() -> float:
    """Largest magnitude of an int8 weight on this machine: 127, or 63 if products saturate.

    They saturate on x86 processors without VNNI, which add pairs of products in 16 bits."""
    x86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    cpuinfo = Path("/proc/cpuinfo")  # features of this processor
    flags = cpuinfo.read_text().split() if cpuinfo.is_file() else []
    exact = any("vnni" in flag or flag.startswith("amx_int8") for flag in flags)
    return 127.0 if torch.cuda.is_available() or not x86 or exact else 63.0


# -- Numbers


@functools.cache
def vllm_kernels(device: str):
    """The module with the kernels of vLLM's int8 and fp8 layers on a GPU: one kernel quantizes
    activations, one multiplies and scales. None on a CPU, or if vLLM cannot be imported."""
    if device == "cpu":
        return None
    try:
        from vllm import _custom_ops
    except ImportError:
        return None
    return _custom_ops


def quantize_activations(
    x: torch.Tensor, fmt: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q_x, s_x) of activations (M, K): int8 or fp8 with a scale for each token."""
    kernels = vllm_kernels(x.device.type)
    if kernels is None:
        return quantize(x, fmt.activation_qmax, fmt.dtype)
    if fmt.dtype == torch.int8:
        return kernels.scaled_int8_quant(x.contiguous())[:2]
    return kernels.scaled_fp8_quant(x.contiguous(), use_per_token_if_dynamic=True)


def quantize(
    x: torch.Tensor,
    qmax: float,
    dtype: torch.dtype,
    group: int = 0,
    scales: torch.dtype = torch.float32,
):
    """(q, s) with x ~ s q: s = max|x| / qmax per row or group, cast to `scales`; q = round(x (1 / s)),
    which rounds like vLLM; a division rounds 4 in 10,000 bfloat16 activations differently.

    x (..., K) -> q (..., K) of `dtype`, s (..., K / group) float32, or s (..., 1) if group is 0."""
    *rows, K = x.shape
    x = x.float().reshape(*rows, -1, group or K)
    amax = x.abs().amax(-1, keepdim=True)
    s = torch.where(amax > 0, amax / qmax, 1.0)
    s = s.to(scales).float()
    q = (x * s.reciprocal()).clamp_(-qmax, qmax)
    if dtype == torch.int8:
        q = q.round_()  # the conversion to float8 also rounds
    return q.to(dtype).reshape(*rows, K), s[..., 0]


def dequantize(
    q: torch.Tensor, s: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """s q: (..., K) and (..., K / group) -> (..., K), multiplied in float32. On a GPU one kernel
    multiplies and rounds."""
    if q.dtype != torch.int8:
        q = q.to(torch.bfloat16)  # exact; torch does not multiply float8
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    torch.mul(q.reshape(*s.shape, -1), s[..., None], out=out.view(*s.shape, -1))
    return out


def product(
    qx, sx, qw, sw, dtype: torch.dtype = torch.float32, bias=None
) -> torch.Tensor:
    """(s_x q_x) (s_w q_w)^T + bias: qx (M, K), sx (M, 1), qw (N, K), sw (N, 1), bias (N,) -> (M, N),
    rounded once to `dtype`.

    16 bits on a GPU, K and N multiples of 16: vLLM's kernel. int8 otherwise: exact int32 sums. fp8
    otherwise: exact products, summed in float32."""
    # for other sizes vLLM has a slower kernel, not used here
    in_multiples = qx.shape[1] % 16 == len(qw) % 16 == 0
    kernels = vllm_kernels(qx.device.type)
    if kernels is not None and in_multiples and dtype.itemsize == 2:
        return kernels.cutlass_scaled_mm(qx, qw.t(), sx, sw, dtype, bias)
    M, N, odd = len(qx), len(qw), -qx.shape[1] % 8
    if qx.dtype == torch.int8 and qx.is_cuda and (M < 17 or N % 8 or odd):
        # the kernel needs M > 16, and multiples of 8 for K and N
        pad = nn.functional.pad
        qx, qw = pad(qx, (0, odd, 0, max(0, 17 - M))), pad(qw, (0, odd, 0, -N % 8))
    if qx.dtype != torch.int8:
        y = qx.float() @ qw.float().t()
    elif qx.is_cuda or torch.cpu._is_vnni_supported():
        y = torch._int_mm(qx, qw.t())[:M, :N].float()
    else:  # _int_mm is 15 to 35 times slower here; sums below 2^24 are exact in float32
        pieces = zip(qx.split(1024, 1), qw.split(1024, 1), strict=True)
        y = sum((a.float() @ b.float().t()).int() for a, b in pieces).float()
    y = y.mul_(sx).mul_(sw.t())
    return (y if bias is None else y.add_(bias)).to(dtype)


# -- The aligned linear layer


class StraightThroughMatmul(torch.autograd.Function):
    """y = Xq Wq^T + bias with low-bit numbers; straight-through backward pass (formulas above).

    x (M, K); weight (N, K): master weight, only for its gradient; qw, sw: the quantized weight;
    multiply: (x, Wq) -> x Wq^T, if x is in full precision; bias (N,), or None."""

    @staticmethod
    def forward(ctx, x, weight, qw, sw, fmt: Format, multiply, bias):
        bias = None if bias is None else bias.to(x.dtype)
        if fmt.activations:
            qx, sx = quantize_activations(x, fmt)
            ctx.save_for_backward(qx, sx, qw, sw)
            return product(qx, sx, qw, sw, x.dtype, bias)
        ctx.save_for_backward(x, None, qw, sw)
        y = multiply(x, dequantize(qw, sw, x.dtype)).to(x.dtype)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, g):
        qx, sx, qw, sw = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = g @ dequantize(qw, sw, g.dtype)
        if ctx.needs_input_grad[1]:
            x = qx if sx is None else dequantize(qx, sx, g.dtype)
            dw = g.t() @ x
        if ctx.needs_input_grad[6]:
            db = g.sum(0)
        return dx, dw, None, None, None, None, db


class LowBit:
    """A module with quantized weights; the base class of LowBitLinear and LowBitExperts."""

    # False under FSDP: the version of a gathered weight does not change when its shards change.
    cache_quantized = True

    def use_format(self, fmt: Format) -> None:
        """Set the number format; forget published and cached quantized weights."""
        self.format = fmt
        # Published (q_w, s_w) by parameter, in an engine's copy, which has no master weights.
        self.loaded: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        # By parameter: the master weight's version and address, and its (q_w, s_w).
        self.cached: dict[str, tuple[tuple, tuple[torch.Tensor, torch.Tensor]]] = {}

    def quantized(self, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
        """(q_w, s_w) of a parameter, for the forward pass and for publishing.

        With cache_quantized they are computed once per version of the weight."""
        if name in self.loaded:
            return self.loaded[name]
        weight = getattr(self, name)
        if not self.cache_quantized:
            return self.format.quantize(weight.detach())
        version = (weight._version, weight.data_ptr())
        if name not in self.cached or self.cached[name][0] != version:
            self.cached[name] = version, self.format.quantize(weight.detach())
        return self.cached[name][1]


class LowBitLinear(LowBit, nn.Linear):
    """A linear layer that computes like the engine. `align` replaces an nn.Linear by it.

    The parameters are the same objects, under the same names, as in the replaced layer."""

    # model/exact.py replaces this function
    multiply = staticmethod(nn.functional.linear)

    @classmethod
    def from_linear(cls, linear: nn.Linear, fmt: Format) -> LowBitLinear:
        """A low-bit layer that shares the parameters of `linear`."""
        # On the meta device: no memory and no random numbers for weights that are replaced.
        has_bias = linear.bias is not None
        layer = cls(
            linear.in_features, linear.out_features, bias=has_bias, device="meta"
        )
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.use_format(fmt)
        return layer.train(linear.training)

    def forward(self, x):
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            flat = x.reshape(-1, x.shape[-1])  # (M, K)
            y = StraightThroughMatmul.apply(
                flat,
                self.weight,
                *self.quantized(),
                self.format,
                self.multiply,
                self.bias,
            )
        return y.reshape(*x.shape[:-1], -1)


class LowBitExperts(LowBit, nn.Module):
    """The experts of a layer, with matrices that compute like LowBitLinear. `align` replaces a
    layer's experts by it.

        y = sum over the chosen experts e of  w_e W_down,e (act(W_gate,e x) * W_up,e x)

    The parameters are shared with the replaced experts: gate_up_proj (E, 2 I, H) and down_proj (E,
    H, I)."""

    def __init__(self, experts, fmt: Format):
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.act_fn = experts.act_fn
        self.use_format(fmt)
        self.train(experts.training)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """Weighted sum of the chosen experts' outputs, (n, H), from hidden_states (n, H), and the
        experts chosen for each token and their weights, both (n, k)."""
        out, x, device = (
            torch.zeros_like(hidden_states),
            hidden_states,
            hidden_states.device.type,
        )
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        # (master weight, q_w, s_w) of each expert
        gate_up, down = (
            list(zip(getattr(self, name).unbind(), *self.quantized(name), strict=True))
            for name in ("gate_up_proj", "down_proj")
        )
        setting = (self.format, nn.functional.linear, None)
        with torch.autocast(device, enabled=False):
            for e in top_k_index.unique().tolist():
                token, k = (top_k_index == e).nonzero(as_tuple=True)
                gate, up = StraightThroughMatmul.apply(
                    x[token], *gate_up[e], *setting
                ).chunk(2, -1)
                y = StraightThroughMatmul.apply(
                    self.act_fn(gate) * up, *down[e], *setting
                )
                out.index_add_(
                    0, token, (y * top_k_weights[token, k, None]).to(out.dtype)
                )
        return out


ROUTERS = ("gate", "router", "shared_expert_gate")  # they stay in high precision


def quantized_linears(model) -> dict[str, nn.Linear]:
    """Linear layers to quantize, by name: all but head, routers and adapters (`lora.merged` adds
    adapters to their layers before quantization)."""
    head = model.get_output_embeddings()
    return {
        name.removesuffix(".base_layer"): m
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and m is not head and ".lora_" not in name
        if not {*name.split(".")} & {*ROUTERS}
    }


def experts_of(model) -> dict[str, nn.Module]:
    """The modules that contain all experts of a layer, by name: gate_up_proj (E, 2 I, H), down_proj
    (E, H, I)."""
    experts = {}
    for name, m in model.named_modules():
        # act(gate) * up
        gate = getattr(getattr(m, "_apply_gate", None), "__name__", "")
        known = gate == "_default_apply_gate" or isinstance(m, LowBitExperts)
        if known and m._parameters.keys() == {"gate_up_proj", "down_proj"}:
            E, rows, H = m.gate_up_proj.shape
            if m.down_proj.shape == (E, H, rows // 2):
                experts[name] = m
    return experts


def expert_parameters(model) -> dict[str, tuple[nn.Module, str]]:
    """(module, parameter name) of all expert parameters, by full name in the model."""
    return {
        f"{name}.{kind}": (m, kind)
        for name, m in experts_of(model).items()
        for kind in m._parameters
    }


def matrices_of(model) -> dict[str, tuple[nn.Module, str]]:
    """(module, parameter name) of all weights to quantize, by full name in the model."""
    linears = {
        f"{name}.weight": (m, "weight") for name, m in quantized_linears(model).items()
    }
    return linears | expert_parameters(model)


def learner_format(cfg: PrecisionFlags) -> Format | None:
    """The learner's format of the rollout model; None: high precision."""
    name = cfg.rollout_quant if cfg.learner_quant == "aligned" else cfg.learner_quant
    return format_of(name, cfg.quant_group, cfg.dtype)


def engine_format(cfg: PrecisionFlags) -> Format | None:
    """The engine's format; None: high precision."""
    return format_of(cfg.rollout_quant, cfg.quant_group, cfg.dtype)


def align(model, fmt: Format | None):
    """Replace the model's linear layers by LowBitLinear and its experts by LowBitExperts; return
    the model.

    fmt None: no change. UserError: the row length is not a multiple of the group size, or the
    layout of the experts is unknown."""
    if fmt is None:
        return model
    refuse_experts(model, "--rollout_quant, --learner_quant")
    for name, (layer, kind) in matrices_of(model).items():
        columns = getattr(layer, kind).shape[-1]
        need(
            not fmt.group or columns % fmt.group == 0,
            f"--quant_group={fmt.group}: {name.rpartition('.')[0]} has rows of {columns}, not a multiple of the group; "
            "choose a divisor",
        )
    low_bit = {
        m: LowBitLinear.from_linear(m, fmt) for m in quantized_linears(model).values()
    }
    low_bit |= {m: LowBitExperts(m, fmt) for m in experts_of(model).values()}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in low_bit:
                setattr(parent, name, low_bit[child])
    return model


def refuse_experts(model, flag: str) -> None:
    """Raise UserError if the layout of the model's experts is unknown to `experts_of`, so that
    `flag` would not apply to them."""
    known = expert_parameters(model)
    others = [
        name
        for name, p in model.named_parameters()
        if p.ndim == 3 and "expert" in name and name not in known
    ]
    need(
        not others,
        f"{flag}: {others[0] if others else ''} holds the weights of several experts in an unknown layout; train "
        "this model without the flag",
    )


# -- Tensors for the engine


def for_engine(named_tensors, model, fmt: Format, packed: bool = True):
    """Yield (name, tensor) of a state dict as an engine loads it, with low-bit linear layers.

    X.weight becomes q_w and s_w: X.weight and X.weight_scale, or for int4 X.weight_packed (eight
    numbers per int32), X.weight_scale and X.weight_shape. If the layers of `model` are aligned in
    this format, the tensors of their forward pass are yielded. packed False, for engines without a
    kernel: X.weight is the exactly dequantized weight in float32."""
    matrices = matrices_of(model)
    for name, x in named_tensors:
        if name not in matrices:
            yield name, x
            continue
        layer, kind = matrices[name]
        aligned = isinstance(layer, LowBit) and layer.format == fmt
        sharded = hasattr(getattr(layer, kind), "full_tensor")
        if aligned and not sharded:
            q, s = layer.quantized(kind)
        else:
            q, s = fmt.quantize(x)
        if not packed:
            yield name, dequantize(q, s)
        elif fmt.activations:
            yield name, q
            yield f"{name}_scale", s
        else:
            from compressed_tensors.compressors.pack_quantized.helpers import (
                pack_to_int32,
            )

            yield f"{name}_packed", pack_to_int32(q, 4)
            yield f"{name}_scale", s
            yield f"{name}_shape", torch.tensor(x.shape, device=x.device)


def dequantize_in_place(model, fmt: Format):
    """Round the weights of the linear layers to the format's grid, in place, and return the model.

    The model then computes as in a format without quantized activations."""
    for layer, kind in matrices_of(model).values():
        weight = getattr(layer, kind).data
        weight.copy_(dequantize(*fmt.quantize(weight)))
    return model


def load_quantized(model, named_tensors):
    """Load published low-bit tensors into the model's aligned layers; yield the remaining tensors.

    A layer's scales follow its weight, as in `for_engine`."""
    matrices, stream = matrices_of(model), iter(named_tensors)
    for name, x in stream:
        if name not in matrices:
            yield name, x
            continue
        layer, kind = matrices[name]
        behind, scale = next(stream, ("nothing", None))
        if behind != f"{name}_scale":
            raise ValueError(f"{name}: followed by {behind}, not by its scales")
        device = getattr(layer, kind).device
        layer.loaded[kind] = x.to(device, copy=True), scale.to(device, copy=True)


def held_quantized(model) -> dict[str, torch.Tensor]:
    """The low-bit tensors of a model's aligned layers, under the names of `for_engine`."""
    tensors = {}
    for name, (layer, kind) in matrices_of(model).items():
        tensors[name], tensors[f"{name}_scale"] = layer.quantized(kind)
    return tensors


def without_int4(named_tensors):
    """Yield published tensors for an engine without int4: the three consecutive int4 tensors of a
    layer become one dequantized weight."""
    stream = iter(named_tensors)
    for name, x in stream:
        if name.endswith("_packed"):
            (_, scale), (_, shape) = next(stream), next(stream)
            name, x = name.removesuffix("_packed"), unpacked(x, scale, shape)
        yield name, x


def by_expert(named_tensors, experts):
    """Yield the tensors under the names that vLLM loads, as views: one tensor per expert, gate and
    up separate. experts: names to split (expert_parameters); tensors with different names are
    unchanged.

        X.experts.gate_up_proj (E, 2 I, H)    X.experts.0.gate_proj.weight (I, H), X.experts.0.up_proj.weight, ...
        X.experts.down_proj (E, H, I)         X.experts.0.down_proj.weight (H, I), ...

    Scales (X.experts.down_proj_scale) are split in the same way."""
    for name, x in named_tensors:
        layer, _, kind = name.rpartition(".experts.")
        kind, _, part = kind.partition("_proj")
        if f"{layer}.experts.{kind}_proj" not in experts:
            yield name, x
            continue
        for e, matrix in enumerate(x):
            halves = kind.split("_")  # gate, up; or down
            for half, rows in zip(halves, matrix.chunk(len(halves)), strict=True):
                yield f"{layer}.experts.{e}.{half}_proj.weight{part}", rows


def unpacked(packed, scale, shape) -> torch.Tensor:
    """The float32 weight of published int4 tensors."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    return dequantize(unpack_from_int32(packed, 4, torch.Size(shape.tolist())), scale)


def check(cfg: PrecisionFlags) -> None:
    """Raise UserError, one sentence, if flags of the formats contradict each other."""
    need(
        cfg.learner_quant != "aligned" or cfg.rollout_quant != "none",
        "--learner_quant=aligned: the rollouts are not quantized, so there is no format to align with; name a "
        "--rollout_quant, or name the learner's format in --learner_quant",
    )


def check_routing(cfg: RolloutFlags) -> None:
    """Raise UserError if --router_replay is set and the engine cannot report its chosen experts."""
    # vLLM's implementation is in Triton
    reports = cfg.rollout == "hf" or torch.cuda.is_available()
    need(
        not cfg.router_replay or reports,
        "--router_replay: on a CPU vLLM does not report its expert choices; use --rollout=hf",
    )
    need(
        not cfg.router_replay or cfg.rollout_tp == 1,
        f"--router_replay: vLLM reports expert choices only on the first rank of an engine; use --rollout_tp=1, not "
        f"{cfg.rollout_tp}",
    )


def check_products(cfg: RolloutFlags) -> None:
    """Raise UserError if vLLM on this host's GPU cannot multiply in the rollout format."""
    low = cfg.rollout_quant in ("int8", "fp8", "w4a16") and cfg.rollout == "vllm"
    need(
        not (low and torch.cuda.is_available()) or cfg.rollout_dtype != "float32",
        f"--rollout_quant={cfg.rollout_quant}: on a GPU vLLM layers of this format return only 16-bit numbers; add "
        "--rollout_dtype=bfloat16",
    )


def check_model(cfg: RolloutFlags, folder: str) -> None:
    """Raise UserError if the flags' formats cannot run on this host with the model of `folder`;
    reads only config.json."""
    formats = {cfg.rollout_quant, cfg.learner_quant} - {"none", "aligned"}
    cuda = torch.cuda.is_available()
    need(
        not ("fp8" in formats and cuda and torch.cuda.get_device_capability() < (8, 9)),
        f"--{'rollout' if cfg.rollout_quant == 'fp8' else 'learner'}_quant=fp8: needs compute capability 8.9; use int8",
    )
    # a remote sampler checks on its host
    if getattr(cfg, "samplers", "local") == "local":
        check_products(cfg)
    vllm_kernel = cfg.rollout_quant == "w4a16" and cfg.rollout == "vllm" and cuda
    need(
        not vllm_kernel or cfg.quant_group in (32, 64, 128),
        f"--quant_group={cfg.quant_group}: vLLM's int4 kernels support only groups of 32, 64 and 128",
    )
    for name in sorted(formats):
        with torch.device("meta"):
            align(empty_model(folder), format_of(name, cfg.quant_group))


def empty_model(config):
    """A model's structure, with its parameters on the meta device. config: a transformers config
    (not changed) or a model folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if isinstance(config, str | Path):
        config = AutoConfig.from_pretrained(config)
    register = nn.Module.register_parameter

    def on_meta(module, name, p):
        if p is not None and not p.is_meta:  # a meta parameter may be tied already
            p = nn.Parameter(p.to("meta"), requires_grad=False)
        register(module, name, p)

    random_state = torch.get_rng_state()  # the constructor draws random weights
    nn.Module.register_parameter = on_meta
    try:
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32
        )
    finally:
        nn.Module.register_parameter = register
        torch.set_rng_state(random_state)
