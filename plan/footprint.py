"""Memory of forward and backward passes, measured on tensors without data (torch's FakeTensorMode).

The learner's modules run with two and with four layers. Each further layer keeps half of the
difference between the two."""

from __future__ import annotations

import copy
import warnings
import weakref
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quant
from batching import Batch
from config import Config, RunFlags
from machinery.optim import learning
from model import (
    Needs,
    OneModelRows,
    PolicyAndActor,
    Scored,
    TwoModelRows,
    lora,
    memory,
    needs_of_update,
)


class Allocated(TorchDispatchMode):
    """Bytes of the live tensors that were created in this context, and their maximum since `peak`
    was set."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if not isinstance(x, torch.Tensor) or x.device.type == "meta":
                continue
            storage = x.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, storage._cdata)
        return out

    def gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


@dataclass(frozen=True)
class Activations:
    """Bytes of the largest micro-batch on one rank, without weights, gradients and optimizer."""

    kept: dict[str, int]  # by model: memory that its layers keep for the backward pass
    # peak above `kept`, of the logits or of the backward of a layer or the embedding
    moment: int
    forward: int  # peak of a pass without gradient


def measure(
    cfg: Config, configs: dict, rows: int, prompt: int, response: int, gpu: int
) -> Activations:
    """The activations of `rows` rows of prompt + response tokens. configs: name -> transformers
    config; gpu: bytes of GPU memory, which set the size of the head's chunks."""
    batch = (rows, prompt, response)
    kept = {}
    with warnings.catch_warnings():  # of the cache in quant.py
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        moment, forward = of_logits(cfg, configs, gpu, *batch)
        for name, config in configs.items():
            kept_by_two, layer, embedding = of_layers(cfg, name, config, 2, *batch)
            kept_by_four, *_ = of_layers(cfg, name, config, 4, *batch)
            of_further_layers = (
                (kept_by_four - kept_by_two) * (config.num_hidden_layers - 2) // 2
            )
            kept[name] = kept_by_two + of_further_layers
            moment = max(moment, layer, embedding - sum(kept.values()))
    return Activations(kept, moment, forward)


def of_layers(
    cfg: Config, name: str, config, n: int, rows: int, prompt: int, response: int
) -> tuple[int, int, int]:
    """(bytes that n layers keep for the backward pass, without logits; peak of the last layer's
    backward above them; peak of the embedding's backward, when nothing else is kept)."""
    with FakeTensorMode(), Allocated() as allocated:
        models = PolicyAndActor(
            shallow(cfg, name, config, n), None, memory.compute_type(cfg)
        )
        batch = shapes_of_batch(rows, prompt, response)
        base = allocated.peak = allocated.now
        peaks: list[int] = []
        for layer in (
            models.policy.base_model.layers[-1],
            models.policy.base_model.layers[0],
        ):
            note_peak_behind_backward(layer, allocated, peaks)
        hidden = models._hidden(
            models.policy, batch, torch.arange(rows * response), share=False
        )
        kept = allocated.now - base
        hidden.backward(torch.empty_like(hidden))
        embedding = allocated.peak - base if len(peaks) == 2 else 0
        return kept, peaks[0] - base - kept, embedding


def note_peak_behind_backward(layer, allocated: Allocated, peaks: list[int]) -> None:
    """After the layer's backward pass, append the peak to `peaks` and reset it."""

    def note(gradient):
        peaks.append(allocated.peak)
        allocated.peak = allocated.now

    def before(module, inputs):
        # not after a frozen embedding, and not when the layer is recomputed
        if inputs[0].requires_grad and not peaks:
            inputs[0].register_hook(note)

    layer.register_forward_pre_hook(before)


def of_logits(
    cfg: Config, configs: dict, gpu: int, rows: int, prompt: int, response: int
) -> tuple[int, int]:
    """(peak of logits, forward or backward, above kept memory; peak of a pass without gradient)."""
    needs = needs_of_update(cfg, "actor" in configs, True)
    with FakeTensorMode(), Allocated() as allocated:
        models = [shallow(cfg, name, config, 2) for name, config in configs.items()]
        models += [None] * (2 - len(models))
        pair = PolicyAndActor(*models, memory.compute_type(cfg), cfg.lm_head_fp32)
        pair.gpu_memory = gpu
        batch = shapes_of_batch(rows, prompt, response)
        base = allocated.peak = allocated.now
        with torch.no_grad():
            through_logits(pair, needs, batch)
        forward = allocated.peak - base
        base = allocated.peak = allocated.now
        outs = through_logits(pair, needs, batch)
        kept = allocated.now - base
        sum(x.sum() for x in outs.values() if x.requires_grad).backward()
        return allocated.peak - base - kept, forward


def through_logits(pair: PolicyAndActor, needs: Needs, batch) -> dict:
    """The statistics that a forward pass returns."""
    at = torch.arange(batch.tokens.numel())
    scored = Scored(batch.tokens.flatten()[at], None, None, None)
    needs = replace(needs, support=False, tail=False)
    rows = OneModelRows(scored, needs)
    models = [pair.policy]
    if pair.actor is not None:
        rows = TwoModelRows(scored, needs)
        models.append(pair.actor)
    return pair._through_heads(models, rows, batch, at, share=False)


def on_meta(cfg: Config, name: str, config):
    """A model as the learner builds it, with its parameters on the meta device."""
    model = quant.empty_model(config).requires_grad_(True).eval()
    if lora.learns(cfg, name):
        lora.attach(model, cfg)
    if name == sampler_of(cfg):
        quant.align(model, quant.learner_format(cfg))
    if cfg.gradient_checkpointing:
        memory.recompute(model)
    return model


def shallow(cfg: Config, name: str, config, n: int):
    """A model of the first n layers on fake tensors, with gradients as after an earlier
    micro-batch."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = n
    if getattr(config, "layer_types", None):
        # a model may have fewer layers
        config.layer_types = (config.layer_types * n)[:n]
    with unset_fake_temporarily():
        model = on_meta(cfg, name, config)
        if layers_travel_in(cfg, model) == 2:
            model.base_model.layers.to(memory.compute_type(cfg))
    take_bytes(model)
    for p in learning(model):
        p.grad = torch.empty_like(p)
    return model


def take_bytes(model) -> None:
    """Replace a model's tensors by fake tensors, and its expert layers by EvenExperts."""
    with unset_fake_temporarily():
        for path, experts in quant.experts_of(model).items():
            model.set_submodule(path, EvenExperts(experts))
    made = {}  # tied parameters stay tied
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for key, x in kind.items():
                if x is None:
                    continue
                empty = torch.empty(x.shape, dtype=x.dtype)
                if isinstance(x, nn.Parameter):
                    empty = nn.Parameter(empty, x.requires_grad)
                kind[key] = made.setdefault(id(x), empty)


class EvenExperts(nn.Module):
    """The experts of a layer, with the same number of tokens each, because shapes do not determine
    the routing."""

    def __init__(self, experts):
        super().__init__()
        self.gate_up_proj = experts.gate_up_proj
        self.down_proj = experts.down_proj
        self.act_fn = experts.act_fn

    def forward(self, hidden_states, top_k_index, top_k_weights):
        E = len(self.down_proj)
        rows = -(-top_k_index.numel() // E)
        token = torch.zeros(E * rows, dtype=torch.long)
        x = hidden_states[token].view(E, rows, -1)
        gate, up = (x @ self.gate_up_proj.mT).chunk(2, -1)
        y = ((self.act_fn(gate) * up) @ self.down_proj.mT).flatten(0, 1)
        weighted = y * top_k_weights.flatten()[token, None]
        return torch.zeros_like(hidden_states).index_add(
            0, token, weighted.to(hidden_states.dtype)
        )


def shapes_of_batch(rows: int, prompt: int, response: int) -> Batch:
    """A batch with known shapes and no values."""
    fields = dict.fromkeys(Batch.__dataclass_fields__)
    fields["ids"] = torch.zeros(rows, prompt + response, dtype=torch.long)
    fields["tokens"] = torch.zeros(rows, response, dtype=torch.long)
    fields["prompt_len"] = torch.zeros(rows, dtype=torch.long)
    return Batch(**fields)


def sampler_of(cfg: RunFlags) -> str:
    return "policy" if cfg.actor == "none" else "actor"


def layers_travel_in(cfg: Config, model) -> int:
    """Bytes of one number of the layers' weights in computation: with FSDP they may be gathered in
    16 bits."""
    return (
        2
        if cfg.parallel == "fsdp" and memory.travels_in(model, memory.compute_type(cfg))
        else 4
    )
