"""Log-probabilities of a state dict that arrives as a stream of named tensors.

A model structure without weights runs the forward pass. Each module takes its tensors from the
stream before it runs and drops them afterwards, so that no second model is in memory. sync.py
compares an engine with this forward pass."""

from __future__ import annotations

import functools
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

import quant
from model.head import Head, score


class StreamedModel:
    """A model's structure, with a forward pass that reads its weights from a stream.

    fmt: number format of the linear layers; if it rounds activations, so does this forward pass.
    vocabulary: number of token ids; None: all rows of the embedding."""

    def __init__(
        self, config, fmt: quant.Format | None = None, vocabulary: int | None = None
    ):
        rounds_activations = fmt is not None and fmt.activations
        self.model = quant.align(
            quant.empty_model(config), fmt if rounds_activations else None
        ).eval()
        self.vocabulary = vocabulary

    @torch.no_grad()
    def logprobs(
        self, named_tensors, ids: np.ndarray, dtype: str = "float32", nudge: float = 0.0
    ) -> np.ndarray:
        """log p(ids[t] | ids[:t]) for t >= 1, in nats: ids (rows, L) -> float32 (rows, L - 1).
        Raises KeyError if the stream lacks a tensor.

        Computed in float32 with weights rounded to `dtype`. nudge > 0: in the last half of the
        rows, each module's output is multiplied by 1 + nudge u with u uniform in [-1, 1], as a
        model of rounding errors."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        stream = TensorStream(named_tensors, getattr(torch, dtype), device)
        layer, hooks = self.model.get_output_embeddings(), []
        layer.forward = functools.partial(
            score, Head.of(self.model.config, self.vocabulary), layer
        )
        # a module with parameters, or with a convolution, may read its children's: filled together
        owners = {}
        for name, module in self.model.named_modules():
            if published_names(module):
                parent = name.rpartition(".")[0]
                apart = parent not in owners and not isinstance(module, torch.nn.Conv1d)
                owners.setdefault(name if apart else parent, []).append((name, module))
        for name, parts in owners.items():
            owner = self.model.get_submodule(name)
            hooks.append(
                owner.register_forward_pre_hook(functools.partial(fill, parts, stream))
            )
            hooks.append(owner.register_forward_hook(functools.partial(release, parts)))
        try:
            tokens = torch.from_numpy(ids).to(device)
            for module in self.model.modules():
                module._buffers.update(
                    {
                        n: x.to(device)
                        for n, x in module._buffers.items()
                        if x is not None
                    }
                )
            with nudged(self.model, nudge, last_half=True) if nudge else nullcontext():
                out = self.model.base_model(input_ids=tokens, use_cache=False)
                return layer(out.last_hidden_state, tokens).cpu().numpy()
        finally:
            for hook in hooks:
                hook.remove()
            vars(layer).pop("forward", None)


class TensorStream:
    """A stream of named tensors, from which modules take tensors by name in any order."""

    def __init__(self, named_tensors, dtype: torch.dtype, device):
        self.stream = iter(named_tensors)
        self.dtype, self.device = dtype, device
        self.waiting: dict[str, torch.Tensor] = {}

    def find(self, *names: str) -> str | None:
        """The first of these names in the stream, which is read up to there; None: none of them."""
        while True:
            for name in names:
                if name in self.waiting:
                    return name
            item = next(self.stream, None)
            if item is None:
                return None
            self.waiting[item[0]] = item[1]

    def take(self, name: str) -> torch.Tensor:
        """The tensor of this name. Raises KeyError if it is not in the stream."""
        self.find(name)
        return self.waiting.pop(name).to(self.device)


def published_names(module) -> list[str]:
    """Names of a module's own tensors in a checkpoint: its parameters and persistent buffers."""
    tensors = {**module._parameters, **module._buffers}
    return [
        name
        for name, x in tensors.items()
        if x is not None and name not in module._non_persistent_buffers_set
    ]


def fill(parts: list, stream: TensorStream, *_) -> None:
    """Forward pre-hook: set the published tensors of these (name, module), rounded to the engine's
    dtype. A weight is published alone, with its scales, or as packed int4 numbers."""
    for name, module in parts:
        for key in published_names(module):
            full = f"{name}.{key}"
            if isinstance(module, quant.LowBit) and key != "bias":
                module.loaded[key] = (stream.take(full), stream.take(f"{full}_scale"))
                continue
            packed = f"{full}_packed"
            if key == "weight" and stream.find(full, packed) == packed:
                int4 = (
                    stream.take(f"{full}_{part}")
                    for part in ("packed", "scale", "shape")
                )
                tensor = quant.unpacked(*int4)
            else:
                tensor = stream.take(full)
            if key in module._buffers:
                module._buffers[key] = tensor.float()
            else:
                weight = tensor.to(stream.dtype).float()
                module._parameters[key] = torch.nn.Parameter(
                    weight, requires_grad=False
                )


def release(parts: list, *_) -> None:
    """Forward hook: move the parameters of these (name, module) to the meta device, and drop their
    low-bit tensors."""
    for _name, module in parts:
        if isinstance(module, quant.LowBit):
            module.loaded = {}
        for key, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[key] = torch.nn.Parameter(
                    p.to("meta"), requires_grad=False
                )


@contextmanager
def nudged(model, nudge: float, last_half: bool = False):
    """Context in which the output of each module with parameters is multiplied by 1 + nudge u with
    u uniform in [-1, 1]: each entry has a relative rounding error. last_half: only the last half of
    the rows."""
    noise, hooks = {}, []

    def hook(_module, _inputs, out):
        if not isinstance(out, torch.Tensor):
            return out
        if out.device not in noise:
            noise[out.device] = torch.Generator(out.device).manual_seed(0)
        plain, x = out.tensor_split([len(out) - len(out) // 2 if last_half else 0])
        u = torch.rand(x.shape, generator=noise[out.device], device=x.device) * 2 - 1
        return torch.cat([plain, (x * (1 + nudge * u)).to(x.dtype)])

    for module in model.modules():
        if module._parameters:
            hooks.append(module.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
