"""Planted faults of weight syncs: the first sync after each fault must find it. The suite has a selection.

    python tests/tools/sync_faults.py    # every fault in every format, at steps of 1e-3 to 1e-8; 1,000 healthy syncs

A step of size s multiplies every weight by 1 + s N(0, 1), with a constant N for each weight, like a steady gradient.
Weights are in float64, so that small steps add up. A fault counts from the first sync that leaves wrong bytes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (2, 1)]

import numpy as np
import torch
from conftest import tiny_model

import quant
from model.engines import HFEngine
from rollout import uniforms
from sync import SyncError, WeightCheck

FORMATS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None)}
FORMATS |= {name: ("float32", name) for name in ("int8", "fp8", "w4a16")}
IDS = (uniforms(16 * 16, "probe") * 256).astype(np.int64).reshape(16, 16)


def without(*parts):
    """The engine keeps old tensors with one of these parts in the name."""

    def spoil(name, tensor):
        return None if any(part in name for part in parts) else tensor

    return spoil


def scale_of_one(name, tensor):
    """A loader that forgets the scales of one layer."""
    return torch.ones_like(tensor) if name.endswith("layers.1.mlp.up_proj.weight_scale") else tensor


FAULTS = {
    "never loaded": without(""),
    "one matrix skipped": without("layers.1.mlp.down_proj"),
    "one norm skipped": without("layers.0.input_layernorm"),
    "tied head left old": without("lm_head"),
    "one layer left old": without("layers.0."),
    "a scale left at 1": scale_of_one,
}

CASES = [  # (name, format); only formats with rounded activations have scales in the engine
    (name, fmt)
    for name, fault in FAULTS.items()
    for fmt in FORMATS
    if fault is not scale_of_one or fmt in ("int8", "fp8")
]


class Rig:
    """A trainer's weights, an engine with a loader that may have a fault, and the check of weights."""

    def __init__(self, fmt: str, seed: int = 1):
        self.dtype, name = FORMATS[fmt]
        self.format = quant.format_of(name or "none", 32)
        self.model = tiny_model(seed, layers=2)
        self.folder = tempfile.TemporaryDirectory()
        self.model.save_pretrained(self.folder.name)
        self.engine = HFEngine(self.folder.name, dtype=self.dtype, fmt=self.format)
        self.check = WeightCheck(self.model.config, IDS, self.format)
        self.version = 0
        generator = torch.Generator().manual_seed(seed)
        self.exact = [p.detach().double() for p in self.model.parameters()]
        self.drift = [torch.randn(p.shape, generator=generator) for p in self.model.parameters()]

    def step(self, size: float, updates: int = 1) -> None:
        with torch.no_grad():
            for p, exact, n in zip(self.model.parameters(), self.exact, self.drift, strict=True):
                exact.mul_((1 + size * n.double()) ** updates)
                p.copy_(exact)
        self.version += 1

    def published(self) -> dict:
        state = self.model.state_dict()
        if self.format is None:
            return state
        return dict(quant.for_engine(state.items(), self.model, self.format, self.engine.packed))

    def held(self) -> dict:
        """The published tensors as the engine holds them."""
        dtype = getattr(torch, self.dtype)
        low_bits = self.format is not None and self.format.activations
        return {
            name: x.to(dtype) if x.is_floating_point() and not low_bits else x for name, x in self.published().items()
        }

    def spoil(self, fault) -> None:
        """Plant a fault in the engine's loader."""
        load, before = self.engine.load, {name: x.clone() for name, x in self.published().items()}

        def spoilt(named_tensors):
            taken = {name: fault(name, x) for name, x in named_tensors}
            load({name: before[name] if x is None else x for name, x in taken.items()}.items())

        self.engine.load = spoilt

    def sync(self):
        return self.check.load(self.engine, self.version, self.published().items())

    def first_sync_after(self, fault, size: float) -> str:
        """The error of the first sync that leaves wrong bytes in the engine; "" without error."""
        old = {name: x.clone() for name, x in self.held().items()}
        self.spoil(fault)
        for doubling in range(40):
            self.step(size, 2**doubling)  # enough updates between two syncs for a difference
            new = self.held()
            if any(differs(old[name] if fault(name, x) is None else fault(name, x), x) for name, x in new.items()):
                break
        try:
            self.sync()
        except SyncError as e:
            return str(e)
        return ""


def differs(x, y) -> bool:
    return not torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def main() -> None:
    if sys.argv[1:]:
        sys.exit(f"error: {' '.join(sys.argv[1:])}: no such flag; this command takes none")
    for size in (1e-3, 1e-6, 1e-8):
        for name, fmt in CASES:
            rig = Rig(fmt)
            rig.sync()
            error = rig.first_sync_after(FAULTS[name], size)
            print(f"{size:7.0e}  {name:20s} {fmt:9s} {error or 'NOT FOUND'}"[:160], flush=True)
    for fmt in FORMATS:
        rig = Rig(fmt, seed=2)
        for _ in range(200):
            rig.sync()
            rig.step(1e-6)
        print(f"{fmt}: 200 healthy syncs, no alarm", flush=True)


if __name__ == "__main__":
    main()
