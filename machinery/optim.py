"""Optimizers and the learning-rate schedule."""

from __future__ import annotations

import math

import torch

import quant
from config import Config, OptimizerFlags

FUSED = {"cuda"}  # device types on which one kernel does AdamW's step of all tensors


class Muon(torch.optim.Muon):
    """torch's Muon, which also accepts a parameter (E, m, n) of E experts as E matrices.

    Shards of such a parameter contain whole experts."""

    def _init_group(self, group, *lists):
        group_lists = ([], [], [])  # parameters, gradients, momenta
        complex_numbers = super()._init_group(group, *group_lists)
        for tensors, wanted in zip(group_lists, lists, strict=True):
            for x in tensors:
                wanted += (
                    getattr(x, "_local_tensor", x).unbind() if x.ndim == 3 else [x]
                )
        return complex_numbers


def make_optimizers(model, cfg: OptimizerFlags, lr: float) -> list:
    """AdamW for all parameters of one model, or Muon for the matrices of its layers and AdamW for
    the rest.

    New optimizers are added here."""
    matrices, experts = [], []
    if cfg.optimizer == "muon":
        matrices = [p for p in model.base_model.layers.parameters() if p.ndim == 2]
        # not all 3-D parameters are experts: convolutions are excluded
        experts = [
            getattr(m, kind) for m, kind in quant.expert_parameters(model).values()
        ]
    chosen = {id(p) for p in matrices + experts}
    others = [p for p in learning(model) if id(p) not in chosen]
    options = {"eps": 1e-8, "weight_decay": cfg.weight_decay, "betas": (0.9, 0.999)}
    # foreach=True would need 4 more bytes per parameter for a moment
    options |= {"fused": others[0].device.type in FUSED, "foreach": False}
    optimizers = [torch.optim.AdamW(others, lr=lr, **options)]
    if matrices:
        muon = Muon(
            matrices,
            lr=lr,
            weight_decay=cfg.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        if experts:
            # torch's constructor accepts only matrices
            muon.add_param_group({"params": experts})
        optimizers.append(muon)
    return optimizers


def step(optimizer) -> None:
    """Take a step, and advance the version of each weight, because the fused kernel does not.
    quant.LowBit recognizes new weights by their version."""
    optimizer.step()
    for group in optimizer.param_groups:
        torch.autograd.graph.increment_version(group["params"])


@torch.no_grad()
def not_finite(model) -> str:
    """Name of the first weight that contains NaN or infinity; "" if all weights are finite."""
    named = {
        name: getattr(p, "_local_tensor", p) for name, p in model.named_parameters()
    }
    named = {name: x for name, x in named.items() if x.numel() and not x.is_meta}
    if not named:
        return ""
    largest = torch.stack(torch._foreach_norm(list(named.values()), torch.inf))
    wrong = (~largest.isfinite()).nonzero()
    return list(named)[int(wrong[0])] if len(wrong) else ""


def learning(model) -> list:
    """The trainable parameters: all of them, or the adapters with LoRA."""
    return [p for p in model.parameters() if p.requires_grad]


def schedule(step: int, cfg: Config) -> float:
    """Learning-rate factor of update `step` (from 0): linear warm-up, then constant, or linear or
    cosine decay to 0."""
    warmup = (
        cfg.warmup_steps
        if cfg.warmup_steps >= 1
        else math.ceil(cfg.warmup_steps * cfg.steps - 1e-9)
    )
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, cfg.steps - warmup)
    if cfg.lr_schedule == "linear":
        return 1.0 - done
    if cfg.lr_schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return 1.0
