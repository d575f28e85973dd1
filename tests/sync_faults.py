"""Planted faults of weight syncs, and how many syncs it takes to catch them. Not part of the suite, which has a few.

    python tests/sync_faults.py          # every fault in every format, at steps of 1e-3 and 1e-6; 1,000 healthy syncs
    python tests/sync_faults.py --cost   # what the proof costs at 1B parameters: 20 GiB of memory and 5 of disk, 10 min

A step of size s multiplies every weight by 1 + s N(0, 1), always the same N for a weight, as a steady gradient does.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import numpy as np
import torch
from conftest import tiny_model

import batching
import bench
import objectives
import quant
from engines import HFEngine
from learner import Comm, Learner, LearnerCheck
from rollout import uniforms
from sync import Probe, SyncError, prove

FORMATS = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("float32", "int8"),
    "fp8": ("float32", "fp8"),
}
IDS = (uniforms(16 * 16, "probe") * 256).astype(np.int64).reshape(16, 16)
MOST_IDS = (uniforms(128 * 16, "probe") * 256).astype(np.int64).reshape(128, 16)  # as many tokens as a run's probe has


def without(*parts):
    """The engine keeps what it has of tensors whose names hold one of these."""

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


class Rig:
    """A trainer's weights, an engine in some format whose loader may be spoilt, and the probe between them."""

    def __init__(self, fmt: str, seed: int = 1, ids=IDS):
        self.dtype, name = FORMATS[fmt]
        self.format = quant.format_of(name or "none")
        self.model = tiny_model(seed, layers=2)
        self.folder = tempfile.TemporaryDirectory()
        self.model.save_pretrained(self.folder.name)
        self.engine = HFEngine(self.folder.name, dtype=self.dtype, fmt=self.format)
        self.probe = Probe(self.folder.name, ids, self.format)
        self.version = 0
        generator = torch.Generator().manual_seed(seed)
        self.drift = [torch.randn(p.shape, generator=generator) for p in self.model.parameters()]

    def step(self, size: float) -> None:
        with torch.no_grad():
            for p, n in zip(self.model.parameters(), self.drift, strict=True):
                p.mul_(1 + size * n)
        self.version += 1

    def published(self) -> dict:
        state = self.model.state_dict()
        if self.format is None:
            return state
        return dict(quant.for_engine(state.items(), self.model, self.format, self.engine.packed))

    def spoil(self, fault) -> None:
        """From here on the engine's loader changes what it is given, behind the digest."""
        load, before = self.engine.load, self.published()

        def spoilt(named_tensors):
            taken = {name: fault(name, x) for name, x in named_tensors}
            load({name: before[name] if x is None else x for name, x in taken.items()}.items())

        before = {name: x.clone() for name, x in before.items()}
        self.engine.load = spoilt

    def sync(self):
        return prove(self.engine, self.version, self.published().items(), self.probe)

    def syncs_until_caught(self, size: float, most: int) -> tuple[int, str]:
        """(syncs, sentence) after healthy syncs have been proved once; 0 and "" if the fault was never caught."""
        for n in range(1, most + 1):
            self.step(size)
            try:
                self.sync()
            except SyncError as e:
                return n, str(e)
        return 0, ""


def stands_still(size: float, most: int) -> tuple[int, str]:
    """A trainer that publishes the weights it began with, for ever."""
    rig = Rig("float32")
    base = {name: x.clone() for name, x in rig.model.state_dict().items()}
    check = LearnerCheck(rig.probe, aligned=True)
    learner = HFEngine(rig.model)
    check(0, learner.logprobs(IDS), base.items())
    for n in range(1, most + 1):
        rig.step(size)
        try:
            check(rig.version, learner.logprobs(IDS), base.items())
        except SyncError as e:
            return n, str(e)
    return 0, ""


# a model of 1.2 billion parameters, with a head of 128,256 tokens
LLAMA_1B = {
    "hidden": 2048,
    "inter": 8192,
    "layers": 16,
    "vocab": 128_256,
    "head_dim": 64,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def peak_gib() -> float:
    """The most memory that this process has held since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def cost(responses: int = 8, length: int = 64) -> None:
    """Seconds of a sync without and with its proof, beside an update's (forward and backward) for each token."""
    started = tempfile.TemporaryDirectory()
    model = bench.shaped(started.name, **LLAMA_1B)
    model.requires_grad_(True)
    vocab = model.config.vocab_size
    cfg = bench.resolved(objective="grpo", train_batch=responses, rollout_batch=responses, max_tokens=length)
    rows = max(4, min(2048, 2**26 // vocab) // 144)  # as run.probe has them for a large batch
    ids = (uniforms(rows * 144, "probe") * vocab).astype(np.int64).reshape(rows, 144)
    engine = HFEngine(bench.shaped("", **LLAMA_1B, seed=1))
    learner = Learner(model, None, cfg, Comm())
    probe, check = Probe(started.name, ids), LearnerCheck(Probe(None, ids, config=model.config), True)
    tensors = learner.published("policy", packed=False)
    held = sum(x.nbytes for _, x in tensors) / 2**30
    weights = sum(p.numel() for p in model.parameters())
    print(f"{weights / 1e9:.2f}e9 parameters; a probe of {ids.size} tokens", flush=True)
    for version in range(2):  # the second has an earlier version to be compared with
        forget_peak()
        before = peak_gib()
        start = time.perf_counter()
        engine.load(tensors)
        loaded = time.perf_counter()
        prove(engine, version, tensors, probe)
        proved = time.perf_counter()
        check(version, learner.logprobs("policy", ids), tensors)
        end = time.perf_counter()
        load, proof, own = loaded - start, proved - loaded, end - proved
        extra = proof - load + own
        print(
            f"version {version}: load {load:.1f} s; proof without load {proof - load:.1f} s; "
            f"the learner's leg {own:.1f} s; "
            f"memory above both models {peak_gib() - before:.2f} GiB (weights published: {held:.2f})",
            flush=True,
        )
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 1e-3)
    del engine
    groups = bench.random_groups(np.random.default_rng(0), responses // 8, length, vocab)
    batch = batching.collate(groups, cfg)
    stats = objectives.prepare(batch, learner.comm, cfg, {})
    for _ in range(2):
        start = time.perf_counter()
        learner.backward(batch, stats)
        seconds = time.perf_counter() - start
        learner.models.zero_grad(set_to_none=True)
    tokens = int(batch.ids.numel())
    per_token = seconds / tokens
    print(f"forward and backward: {1e3 * per_token:.1f} ms a token ({tokens} tokens in {seconds:.1f} s)")
    print(f"the proof is 1 % of an update of {100 * extra / per_token:,.0f} tokens, without counting its sampling")


def main() -> None:
    if sys.argv[1:] == ["--cost"]:
        return cost()
    if sys.argv[1:]:
        sys.exit(
            f"error: {' '.join(sys.argv[1:])}: no such flag; --cost times a proof, and without it faults are planted"
        )
    for size, most in ((1e-3, 200), (1e-6, 20_000)):
        for name, fault in FAULTS.items():
            for fmt in FORMATS:
                if fault is scale_of_one and FORMATS[fmt][1] is None:
                    continue
                rig = Rig(fmt, ids=MOST_IDS)
                rig.sync()
                rig.spoil(fault)
                n, said = rig.syncs_until_caught(size, most)
                print(f"{size:7.0e}  {name:20s} {fmt:9s} caught after {n:5d} syncs  {said[:100]}", flush=True)
        print(f"{size:7.0e}  published weights stand still: {stands_still(size, most)}", flush=True)
    for fmt in FORMATS:
        rig, proved = Rig(fmt, seed=2, ids=MOST_IDS), 0
        for _ in range(250):
            proved += rig.sync().status == "proved"
            rig.step(1e-4)
        print(f"{fmt}: 250 healthy syncs, no alarm, {proved} proved", flush=True)


if __name__ == "__main__":
    main()
