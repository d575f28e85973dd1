"""Optimizers, where their states wait between two steps, the schedule of their learning rates, and a guard that ends or
mends a run which drifts off early."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

import corrections
import objectives
import quant
from flags import UserError, need


class Muon(torch.optim.Muon):
    """torch's Muon, to which a parameter (E, m, n) is E matrices: those of the experts of a layer.

    Shards of such a parameter hold whole experts."""

    def _init_group(self, group, *lists):
        found = ([], [], [])  # parameters, gradients, momenta
        complex_numbers = super()._init_group(group, *found)
        for tensors, wanted in zip(found, lists, strict=True):
            for x in tensors:
                wanted += getattr(x, "_local_tensor", x).unbind() if x.ndim == 3 else [x]
        return complex_numbers


def make_optimizers(model, cfg, lr: float) -> list:
    """AdamW over one model's parameters; or Muon over the matrices of its layers, and AdamW over the rest.

    Another optimizer is another line here."""
    matrices, experts = [], []
    if cfg.optimizer == "muon":
        matrices = [p for p in model.base_model.layers.parameters() if p.ndim == 2]
        experts = [getattr(m, kind) for m, kind in quant.expert_parameters(model).values()]  # convolutions are none
    chosen = {id(p) for p in matrices + experts}
    rest = [p for p in learning(model) if id(p) not in chosen]
    betas = (cfg.adam_beta1, cfg.adam_beta2)
    # one parameter after the other: all at once would take 4 bytes of each for a moment
    how = {"eps": cfg.adam_eps, "weight_decay": cfg.weight_decay, "foreach": False}
    optimizers = [torch.optim.AdamW(rest, lr=lr, betas=betas, **how)]
    if matrices:
        muon = Muon(matrices, lr=lr, weight_decay=cfg.weight_decay, adjust_lr_fn="match_rms_adamw")
        if experts:
            muon.add_param_group({"params": experts})  # at once torch takes nothing but matrices
        optimizers.append(muon)
    return optimizers


def learning(model) -> list:
    """The parameters that learn: all, or with LoRA the adapters."""
    return [p for p in model.parameters() if p.requires_grad]


# ---------------------------------------------------------------------------------------------------------------------
# States between two steps: in 16 bits (--optimizer_dtype), in the host's memory (--offload)
# ---------------------------------------------------------------------------------------------------------------------


def step(optimizer, cfg, version: int) -> None:
    """One step of an optimizer. Where its states wait elsewhere, they are fetched for one parameter after the other:
    the same step, without the memory of all states at once.

    version: of the update, from which the random numbers of the rounding follow, the same on every rank."""
    if cfg.optimizer_dtype == "float32" and not cfg.offload:
        optimizer.step()
        return
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    draws: dict = {}  # a generator for each device
    for group, _ in groups:
        group["params"] = []
    for group, params in groups:
        for p in params:
            group["params"] = [p]
            for name, x in states_like(optimizer, p):
                optimizer.state[p][name] = placed(x, p.device, p.dtype)
            optimizer.step()
            generator = draws.setdefault(p.device, torch.Generator(p.device).manual_seed(version))
            put_away(optimizer, p, cfg, generator)
        group["params"] = []
    for group, params in groups:
        group["params"] = params


def states_like(optimizer, p) -> list:
    """(name, state) of a parameter's states that have its shape: moments, not counts."""
    state = optimizer.state.get(p, {})
    return [(name, x) for name, x in state.items() if isinstance(x, torch.Tensor) and x.shape == p.shape and x.ndim]


def put_away(optimizer, p, cfg, generator) -> None:
    """Bring a parameter's states to where, and into the type in which, they wait for the next step."""
    for name, x in states_like(optimizer, p):
        if cfg.optimizer_dtype == "bfloat16":
            x = rounded(x, generator)
        optimizer.state[p][name] = placed(x, "cpu" if cfg.offload else p.device, x.dtype)


def placed(x, device, dtype):
    """A state, or this rank's part of it, on a device and in a type.

    Where there is a GPU, what waits on the host is pinned: it travels at the bus's full rate, without a second copy."""
    if torch.device(device).type == "cpu" and torch.cuda.is_available():
        return torch.empty_like(x, device="cpu", dtype=dtype, pin_memory=True).copy_(x)
    return x.to(device=device, dtype=dtype)


def rounded(x, generator):
    """x in bfloat16, up or down at random, so that its mean is x.

    To the nearest, a second moment would stand still: at beta2 = 0.999 it moves by less than half the last bit. A
    number of float32 is one of bfloat16 and 16 bits below: noise of 16 bits is added to those, and they are cut off."""
    out = x.to(torch.bfloat16)
    mine, own = (getattr(t, "_local_tensor", t) for t in (out, x))
    noise = torch.randint(1 << 16, own.shape, generator=generator, dtype=torch.int32, device=own.device)
    bits = (own.float().view(torch.int32) + noise) & -(1 << 16)
    mine.copy_(bits.view(torch.float32))
    return out


def schedule(step: int, cfg) -> float:
    """Learning-rate factor of update `step` (from 0): linear warm-up, then constant, linear or cosine decay to
    0."""
    warmup = cfg.warmup_steps if cfg.warmup_steps >= 1 else math.ceil(cfg.warmup_steps * cfg.steps)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, cfg.steps - warmup)
    if cfg.lr_schedule == "linear":
        return 1.0 - done
    if cfg.lr_schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return 1.0


# ---------------------------------------------------------------------------------------------------------------------
# The guard
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GuardFlags:
    """A guard against collapse (results/collapse.md)"""

    guard: Literal["off", "stop", "lr", "cap", "lambda"] = "off"
    """What to do if the first tenth is above --guard_kl: stop; halve the learning rates; weigh responses by min(R, 1),
    whatever --correction is; or distil ten times as much."""
    guard_kl: float = 0.03
    """Guard: largest mean KL(inf, new) of the first tenth, nats a token."""


def mend_of(cfg) -> dict:
    """The flags of the loss that a guard changes when it fires. lambda: without distillation, to its default weight."""
    if cfg.guard == "cap":
        return corrections.capped_responses(cfg)
    if cfg.guard == "lambda":
        return {"distill_lambda": 10 * cfg.distill_lambda or 1.0}
    return {}


def check(cfg) -> None:
    """UserError, one sentence: a mend that something else would undo, or that cannot be."""
    flag, mend = f"--guard={cfg.guard}", mend_of(cfg)
    need(
        not mend or not corrections.is_probed(cfg),
        f"{flag}: auto and --distill_worth_target change the flags of the loss, too; leave them out, or use --guard=lr",
    )
    if cfg.guard == "lambda":
        need(cfg.actor != "none", f"{flag}: there is no actor to distil; name one with --actor, or use --guard=cap")
        need(cfg.distill_kl_target == 0, f"{flag} and --distill_kl_target steer the same weight; leave one out")
    if cfg.guard == "cap":
        try:
            objectives.check(replace(cfg, **mend))
        except UserError as e:
            raise UserError(f"{flag} would go on with --correction=seq_tis --is_cap=1, but {e}") from None


class Guard:
    """--guard: ends or mends a run whose first tenth is far from its samples (results/collapse.md).

        mean over the first tenth of the updates of KL(inf, new) > --guard_kl, nats a token
        KL(inf, new) = rollout_corr/kl + ppo_kl, the k1 estimate of how far what learns is from what sampled

    stop: the run ends there, saved. From the next update on, lr: every learning rate is halved; cap, lambda: the loss
    has other flags (`mend_of`)."""

    def __init__(self, cfg):
        self.how = cfg.guard
        self.mend = mend_of(cfg)
        self.limit = cfg.guard_kl
        self.last = max(1, round(cfg.steps / 10))  # the update that it judges after
        self.sum = 0.0  # of KL(inf, new) over the updates seen
        self.seen = 0
        self.fired = False

    @property
    def rate(self) -> float:
        """Factor of the learning rates."""
        return 0.5 if self.fired and self.how == "lr" else 1.0

    def mended(self, cfg):
        """The flags of the loss as they are now."""
        return replace(cfg, **self.mend) if self.fired and self.mend else cfg

    def watch(self, update: int, logged: dict[str, float]) -> str:
        """See the metrics of an update (from 1), the same on all ranks. What there is to say if the guard fires."""
        kl = logged["rollout_corr/kl"] + logged["ppo_kl"]
        if update <= self.last and math.isfinite(kl):
            self.sum += kl
            self.seen += 1
        if self.fired or update != self.last or self.mean <= self.limit:
            return ""
        self.fired = True
        done = {
            "stop": "the run ends here",
            "lr": "all learning rates are halved from here on",
            "cap": "responses are weighed by min(R, 1) from here on",
            "lambda": f"distillation has the weight {self.mend.get('distill_lambda', 0):g} from here on",
        }
        return (
            f"--guard={self.how}: over the first {update} updates KL(inf, new) was {self.mean:.3g} nats a token, above "
            f"--guard_kl={self.limit:g}: {done[self.how]}"
        )

    @property
    def mean(self) -> float:
        """KL(inf, new) of the updates seen; 0 before the first."""
        return self.sum / self.seen if self.seen else 0.0
