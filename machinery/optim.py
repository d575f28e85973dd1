"""Optimizers, the placement of their states between two steps, and the schedule of their learning
rates."""

from __future__ import annotations

import math

import torch

import quant
from config import Config, MemoryFlags, OptimizerFlags


class Muon(torch.optim.Muon):
    """torch's Muon, to which a parameter (E, m, n) is E matrices: those of the experts of a layer.

    Shards of such a parameter hold whole experts."""

    def _init_group(self, group, *lists):
        group_lists = ([], [], [])  # parameters, gradients, momenta
        complex_numbers = super()._init_group(group, *group_lists)
        for tensors, wanted in zip(group_lists, lists, strict=True):
            for x in tensors:
                wanted += getattr(x, "_local_tensor", x).unbind() if x.ndim == 3 else [x]
        return complex_numbers


def make_optimizers(model, cfg: OptimizerFlags, lr: float) -> list:
    """AdamW over one model's parameters; or Muon over the matrices of its layers, and AdamW over
    the rest.

    Another optimizer is another line here."""
    matrices, experts = [], []
    if cfg.optimizer == "muon":
        matrices = [p for p in model.base_model.layers.parameters() if p.ndim == 2]
        # convolutions are none
        experts = [getattr(m, kind) for m, kind in quant.expert_parameters(model).values()]
    chosen = {id(p) for p in matrices + experts}
    others = [p for p in learning(model) if id(p) not in chosen]
    betas = (0.9, 0.999)
    # one parameter after the other: all at once would take 4 bytes of each for a moment
    options = {"eps": 1e-8, "weight_decay": cfg.weight_decay, "foreach": False}
    optimizers = [torch.optim.AdamW(others, lr=lr, betas=betas, **options)]
    if matrices:
        muon = Muon(matrices, lr=lr, weight_decay=cfg.weight_decay, adjust_lr_fn="match_rms_adamw")
        if experts:
            muon.add_param_group({"params": experts})  # at once torch takes nothing but matrices
        optimizers.append(muon)
    return optimizers


@torch.no_grad()
def not_finite(model) -> str:
    """The name of the first weight with a value that is no finite number; "" if there is none."""
    named = {name: getattr(p, "_local_tensor", p) for name, p in model.named_parameters()}
    named = {name: x for name, x in named.items() if x.numel() and not x.is_meta}
    if not named:
        return ""
    largest = torch.stack(torch._foreach_norm(list(named.values()), torch.inf))
    wrong = (~largest.isfinite()).nonzero()
    return list(named)[int(wrong[0])] if len(wrong) else ""


def learning(model) -> list:
    """The parameters that learn: all, or with LoRA the adapters."""
    return [p for p in model.parameters() if p.requires_grad]


# ---------------------------------------------------------------------------------------------------------------------
# States between two steps in the host's memory (--offload)
# ---------------------------------------------------------------------------------------------------------------------


def step(optimizer, cfg: MemoryFlags) -> None:
    """One step of an optimizer. With --offload its states are fetched for one parameter after the
    other: the same step, without the memory of all states at once."""
    if not cfg.offload:
        optimizer.step()
        return
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    for group, _ in groups:
        group["params"] = []
    for group, params in groups:
        for p in params:
            group["params"] = [p]
            move_states(optimizer, p, p.device)
            optimizer.step()
            move_states(optimizer, p, "cpu")
        group["params"] = []
    for group, params in groups:
        group["params"] = params


def states_like(optimizer, p) -> list:
    """(name, state) of a parameter's states that have its shape: moments, not counts."""
    state = optimizer.state.get(p, {})
    return [
        (name, x)
        for name, x in state.items()
        if isinstance(x, torch.Tensor) and x.shape == p.shape and x.ndim
    ]


def move_states(optimizer, p, device) -> None:
    """Move a parameter's moments, or this rank's part of them, to a device. With a GPU the host's
    copy is pinned."""
    for name, x in states_like(optimizer, p):
        if torch.device(device).type == "cpu" and torch.cuda.is_available():
            optimizer.state[p][name] = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x)
        else:
            optimizer.state[p][name] = x.to(device)


def schedule(step: int, cfg: Config) -> float:
    """Learning-rate factor of update `step` (from 0): linear warm-up, then constant, linear or
    cosine decay to 0."""
    warmup = cfg.warmup_steps if cfg.warmup_steps >= 1 else math.ceil(cfg.warmup_steps * cfg.steps)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, cfg.steps - warmup)
    if cfg.lr_schedule == "linear":
        return 1.0 - done
    if cfg.lr_schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return 1.0
