"""The parts of the GPU list (bench/gpu.py): each yields its rows, measured on a GPU or, at a small
scale, on a CPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

import batching
import bench
import objectives
import plan
import quant
from config import Config
from learner import Learner
from machinery import optim
from machinery.flags import UserError
from machinery.log import read_metrics
from machinery.ranks import Comm
from machinery.speed import operations, peak_of
from model import Needs, OneModelRows, Scored
from model.engines import VLLMEngine
from model.head import ChunkedHead, Head, chunk_rows, memory_of
from results import against_trl
from rollout import Rollout, probe_ids
from sampling import Sampling
from sync import WeightCheck
from tasks.arith import arithmetic_tokenizer

ROOT = Path(__file__).resolve().parent.parent
torch.backends.cuda.enable_cudnn_sdp(False)  # as vLLM in a run
GIB = 2**30
PROMPT = 32  # tokens of the prompts of `bench.random_groups`
QWEN3 = dict(
    vocab=151_936, head_dim=128, num_key_value_heads=8, max_position_embeddings=40_960
)
SHAPES = {
    "0.6B": dict(hidden=1024, inter=3072, layers=28, num_attention_heads=16),
    "1.7B": dict(hidden=2048, inter=6144, layers=28, num_attention_heads=16),
    "4B": dict(hidden=2560, inter=9728, layers=36, num_attention_heads=32),
    "8B": dict(
        hidden=4096,
        inter=12_288,
        layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
}
TINY = dict(
    hidden=64,
    inter=96,
    layers=2,
    vocab=300,
    head_dim=32,
    num_attention_heads=2,
    num_key_value_heads=1,
)


@dataclass(frozen=True)
class Setting:
    """The device and the scale of a part."""

    device: str = "cuda"
    tiny: bool = False

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def pick(self, full, tiny):
        """The value for this scale."""
        return tiny if self.tiny else full

    def shape(self, name: str) -> dict:
        """The shape of a model, as arguments of bench.shaped."""
        return self.pick(
            {**QWEN3, **SHAPES[name]}, {**TINY, "max_position_embeddings": 512}
        )

    def model(self, name: str, seed: int = 0):
        """A model with random weights on the device."""
        with torch.device(self.device):
            return bench.shaped("", seed=seed, **self.shape(name))

    def model_config(self, name: str):
        """The transformers config of a model."""
        with torch.device("meta"):
            return bench.shaped("", **self.shape(name)).config

    def learner(self, cfg: Config, name: str, actor: str = "") -> Learner:
        other = self.model(actor, 1) if actor else None
        return Learner(self.model(name), other, cfg, Comm(self.device))

    def seconds(self, f) -> float:
        """The duration of a call, including the device's work."""
        return bench.seconds(self.waited(f))

    def waited(self, f) -> Callable:
        """The call, followed by a wait until the device has finished."""

        def run():
            f()
            if self.cuda:
                torch.cuda.synchronize()

        return run

    def peak_of(self, f) -> float:
        """Peak GiB allocated during a call, above the memory allocated before; NaN without a
        GPU."""
        run = self.waited(f)
        if not self.cuda:
            run()
            return math.nan
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / GIB

    def allocated(self) -> float:
        """GiB allocated now."""
        gc.collect()
        if not self.cuda:
            return 0.0
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated() / GIB


def row(what: str, value: float = math.nan, unit: str = "", **more) -> dict:
    """A row of results. more: "spread", the smallest and the largest of the repeats, or a 95 %
    interval; "goal" and "met", the target, and whether it is met (None: unknown); "why", the reason
    if the quantity could not be measured."""
    usual = {"spread": [], "goal": "", "met": None, "why": ""}
    return {"what": what, "value": value, "unit": unit, **usual, **more}


def softly(part: Callable) -> Callable:
    """The part, a generator of rows about `what`; after an error it yields a row with the error."""

    @functools.wraps(part)
    def rows(s: Setting, what: str, *rest, **more) -> Iterator[dict]:
        try:
            yield from part(s, what, *rest, **more)
        except Exception as e:  # of any kind: the next case may succeed
            first = str(e).splitlines()[0][:200] if str(e) else ""
            yield row(what, why=f"failed: {type(e).__name__}: {first}")

    return rows


def ratio_row(what: str, pairs: dict, **goal) -> dict:
    """A row for the result of bench.compare: a ratio of times and its 95 % interval."""
    spread = [pairs["low"], pairs["high"]]
    return row(
        f"{what}, {pairs['pairs']} pairs", pairs["ratio"], "x", spread=spread, **goal
    )


def repeats_row(what: str, values: list[float], unit: str) -> dict:
    """A row for repeated measurements: their median, minimum and maximum."""
    spread = [min(values), max(values)]
    return row(
        f"{what}, {len(values)} times", float(np.median(values)), unit, spread=spread
    )


def tests(chosen: str, limit: int, s: Setting) -> Iterator[dict]:
    """tests/test_gpu.py, the tests with these names, in `limit` seconds: a row for each test that
    did not pass, and the number of passed tests."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-rfEs",
        "--tb=short",
        "tests/test_gpu.py",
    ]
    # the summary comes at the end, so the session ends before the part's limit
    command += ["-k", s.pick(chosen, "int8_product"), f"--session-timeout={limit - 20}"]
    env = {**os.environ, "GPU_LIST_DEVICE": s.device}
    passed, started = 0, time.perf_counter()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        for line in run.stdout:
            print(line, end="", file=sys.stderr)
            passed += " PASSED" in line
            found = re.match(r"(FAILED|ERROR|SKIPPED) (?:\[\d+\] )?(.*)", line)
            if found:
                yield row(found[2][:160], why=found[1].lower())
    what = f"passed, in {time.perf_counter() - started:.0f} s"
    yield row(what, passed, "tests", goal="all", met=run.returncode == 0)


def block_of(s: Setting, name: str) -> list[torch.nn.Linear]:
    """The linear layers of one decoder layer, in bfloat16."""
    with torch.device("meta"):
        shape = {**s.shape(name), "layers": 1, "vocab": 16}
        layer = bench.shaped("", **shape).base_model.layers[0]
    sizes = [
        (m.in_features, m.out_features)
        for m in layer.modules()
        if isinstance(m, torch.nn.Linear)
    ]
    how = {"device": s.device, "dtype": torch.bfloat16, "bias": False}
    return [torch.nn.Linear(*size, **how) for size in sizes]


# goal: speedup of an aligned layer's forward pass over bfloat16; 1 for other layers
SPEEDUPS = {("fp8", "8B"): 1.5, ("int8", "8B"): 1.2, ("fp8", "1.7B"): 1.3}


def linears(name: str, s: Setting) -> Iterator[dict]:
    """Speed of aligned linear layers relative to bfloat16 layers: all products of a decoder layer.
    Activations are quantized in each product, weights once, as in the micro-batches of an
    update."""
    for tokens in s.pick((8192, 32_768), (24,)):
        for kind in ("fp8", "int8"):
            yield from speeds(
                s, f"{kind}, {name}, {tokens:,} tokens", kind, name, tokens
            )


@softly
def speeds(s: Setting, what: str, kind: str, name: str, tokens: int) -> Iterator[dict]:
    """Three rows: aligned over bfloat16 layers, forward; aligned layers with vLLM's kernels over
    aligned layers in plain torch; aligned over bfloat16 layers, forward and backward."""
    plain = block_of(s, name)
    aligned = [quant.LowBitLinear.from_linear(m, quant.format_of(kind)) for m in plain]
    how = {"device": s.device, "dtype": torch.bfloat16}
    inputs = {m.in_features: torch.randn(tokens, m.in_features, **how) for m in plain}
    runs = [s.waited(partial(through, layers, inputs)) for layers in (plain, aligned)]
    pairs = bench.alternate(*runs, s.pick(10, 2), what)
    least = SPEEDUPS.get((kind, name), 1.0)
    goal = {"goal": f">= {least}", "met": pairs["ratio"] >= least}
    yield ratio_row(f"speed, forward, {what}", pairs, **goal)
    title = f"speed of vLLM's kernels over plain torch, {what}"
    if quant.vllm_kernels(s.device) is None:
        yield row(title, why="not installed")
    else:
        in_torch = mock.patch.object(quant, "vllm_kernels", lambda device: None)(
            runs[1]
        )
        yield ratio_row(title, bench.alternate(in_torch, runs[1], s.pick(10, 2), what))
    runs = [
        s.waited(partial(through, layers, inputs, True)) for layers in (plain, aligned)
    ]
    pairs = bench.alternate(*runs, s.pick(6, 2), what)
    least = 1.2 if name == "8B" else 1.0
    goal = {"goal": f">= {least}", "met": pairs["ratio"] >= least}
    yield ratio_row(f"forward and backward, {what}", pairs, **goal)


def through(layers, inputs: dict, backward: bool = False) -> None:
    """Compute the products of these layers, with `backward` also their gradients."""
    with torch.set_grad_enabled(backward):
        for m in layers:
            x = inputs[m.in_features].requires_grad_(backward)
            y = m(x)
            if backward:
                torch.autograd.grad(y, (x, m.weight), y.detach())


def heads(N: int, H: int, V: int, device: str) -> dict[str, Callable]:
    """Implementations of the negative log-probability of N tokens from hidden states (N, H),
    forward and backward: name -> a call."""
    how = {"device": device, "dtype": torch.bfloat16}
    hidden = torch.randn(N, H, **how).requires_grad_()
    weight = (torch.randn(V, H, **how) * 0.02).requires_grad_()
    target = torch.randint(0, V, (N,), device=device)

    def chunked(chunk):
        rows = OneModelRows(Scored(target, None, None, None), Needs())
        return -ChunkedHead.apply(rows, chunk, [Head()], [None], hidden, weight, None)[
            0
        ].sum()

    ways = {
        "chunked, as the learner runs it": partial(
            chunked, chunk_rows(V, memory_of(device))
        ),
        "chunked, 1,024 tokens at a time": partial(chunked, 1024),
        "whole logits": lambda: F.cross_entropy(
            (hidden @ weight.t()).float(), target, reduction="sum"
        ),
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options = torch.nn.LinearCrossEntropyOptions()
        ways["torch.nn.functional.linear_cross_entropy"] = partial(
            F.linear_cross_entropy,
            hidden,
            weight,
            target,
            reduction="sum",
            options=options,
        )
    if importlib.util.find_spec("liger_kernel") and device == "cuda":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        ways["liger-kernel"] = partial(
            LigerFusedLinearCrossEntropyLoss(reduction="sum"), weight, hidden, target
        )

    def both(f):
        hidden.grad = weight.grad = None
        f().backward()

    return {name: partial(both, f) for name, f in ways.items()}


def head(H: int, s: Setting) -> Iterator[dict]:
    """Time relative to whole logits, and memory in addition to the inputs, forward and backward,
    for hidden states of width H and weights in bfloat16."""
    N, H, V = s.pick((8192, H, 151_936), (48, 32, 300))
    ways = heads(N, H, V, s.device)
    for name in ("torch.nn.functional.linear_cross_entropy", "liger-kernel"):
        if name not in ways:
            yield row(f"{name}, width {H:,}", why="not installed")
    for name, f in ways.items():
        yield from one_head(s, f"{name}, width {H:,}", f, ways["whole logits"])


@softly
def one_head(s: Setting, what: str, run: Callable, whole: Callable) -> Iterator[dict]:
    """Rows for one implementation: time relative to whole logits, milliseconds, memory."""
    pairs = bench.alternate(s.waited(run), s.waited(whole), s.pick(8, 2), what)
    yield ratio_row(f"time relative to whole logits, {what}", pairs)
    yield row(f"time, {what}", 1000 * pairs["a_s"], "ms")
    yield row(f"memory, {what}", s.peak_of(run), "GiB")


def configured(s: Setting, rows: int, length: int, **flags):
    """A configuration with `rows` responses of `length` tokens in an update."""
    micro = {"micro_tokens": s.pick(16_384, 256), "max_tokens": length}
    sizes = {"train_batch": rows, "rollout_batch": rows, **micro}
    usual = {
        "objective": "grpo",
        "dtype": "bfloat16",
        "lr": 1e-6,
        "actor_lr": 1e-6,
        **sizes,
    }
    return bench.resolved(**{**usual, **flags})


def groups_of(learner: Learner, rows: int, length: int, K: int = 0) -> list[Rollout]:
    """Groups of `rows` random responses."""
    vocabulary = learner.models.policy.config.vocab_size
    return bench.random_groups(
        np.random.default_rng(0), rows // 8, length, vocabulary, K
    )


def batch_of(learner: Learner):
    """A batch of random responses, and its statistics."""
    cfg = learner.cfg
    batch = batching.collate(groups_of(learner, cfg.train_batch, cfg.max_tokens), cfg)
    return batch, objectives.prepare(batch, learner.comm, cfg, {})


def obrs(s: Setting) -> Iterator[dict]:
    """Time of Jackpot (target ref, K = 20) relative to PPO: ref pass, statistics, loss and step, on
    one model and one batch."""
    rows, length = s.pick((32, 1024), (16, 12))
    learners = {}
    for name in ("jackpot", "grpo"):
        cfg = configured(s, rows, length, objective=name, rollout_batch=2 * rows)
        learners[name] = s.learner(cfg, "0.6B")
    groups = groups_of(learners["grpo"], 2 * rows, length, K=20)

    def step(name):
        learner = learners[name]
        whole = batching.collate(groups, learner.cfg)
        batching.write_ref_columns(groups, learner.ref_columns(whole))
        bench.update(learner, groups[: len(groups) // 2])
        bench.update(learner, groups[len(groups) // 2 :])

    runs = [s.waited(partial(step, name)) for name in learners]
    pairs = bench.alternate(*runs, s.pick(6, 2), "obrs")
    goal = {"goal": "<= 1.01", "met": pairs["ratio"] <= 1.01}
    yield ratio_row("time, Jackpot over PPO", pairs, **goal)
    yield row("tokens of a step", 2 * rows * length)


@functools.cache
def planned(s: Setting, cfg: Config, names: tuple[str, ...]) -> float:
    """GiB that the plan predicts for forward and backward with models of these shapes, without an
    engine."""
    configs = dict(zip(("policy", "actor"), map(s.model_config, names), strict=False))
    made = plan.plan_of(cfg, configs, PROMPT, 1, memory_of(s.device) / GIB)
    return (made.of_stage("forward and backward") - made.categories["engine"]) / GIB


def fitting(
    s: Setting, what: str, cfg: Config, names: tuple[str, ...]
) -> tuple[str, Config]:
    """Name and configuration of a case, with activation checkpointing unless the plan leaves a
    tenth of the device's memory free without it."""
    total = memory_of(s.device) if s.cuda else math.inf
    if planned(s, cfg, names) <= 0.9 * total / GIB:
        return what, cfg
    return f"{what}, checkpointing", replace(cfg, gradient_checkpointing=True)


@softly
def case(
    s: Setting, what: str, cfg: Config, names: tuple[str, ...], n: int = 3
) -> Iterator[dict]:
    """Three rows for n updates of a new learner with these models, after one update that creates
    its states: speed, share of the device's peak, memory."""
    before = s.allocated()
    learner = s.learner(cfg, *names)
    batch, stats = batch_of(learner)
    length = cfg.max_tokens + PROMPT
    work = sum(
        operations(getattr(learner.models, name), length) for name in learner.names
    )
    run = s.waited(lambda: learner.step(learner.backward(batch, stats)))
    run()
    gib = s.allocated() - before + s.peak_of(run)
    tokens, seconds = int(batch.ids.numel()), [s.seconds(run) for _ in range(n)]
    share = work * tokens / float(np.median(seconds)) / peak_of(s.device)
    yield repeats_row(f"speed, {what}", [tokens / t for t in seconds], "tokens/s")
    yield row(f"share of peak, {what}", 100 * share, "%")
    expected = planned(s, cfg, names)
    near = abs(expected / gib - 1) <= 0.1 if s.cuda else None
    title = f"memory, {what}, planned {expected:.2f}"
    yield row(title, gib, "GiB", goal="plan within 10 %", met=near)


def learner(name: str, s: Setting) -> Iterator[dict]:
    """Updates (forward, chunked head, backward, AdamW) in bfloat16 with float32 master weights, by
    row length."""
    for length in s.pick((2048, 4096, 8192, 16_384), (40,)):
        if length == 16_384 and name != "0.6B":  # takes a minute by itself
            continue
        rows = max(8, s.pick(32_768, 8) // length // 8 * 8)
        cfg = configured(s, rows, length)
        what, cfg = fitting(s, f"{name}, {length:,} tokens", cfg, (name,))
        yield from case(s, what, cfg, (name,), n=2 if length > 8192 else 3)


def kernels(kind: str, s: Setting) -> Iterator[dict]:
    """Updates of the learner with a choice of --kernels, rows of 4,096 tokens."""
    for name in s.pick(("0.6B", "1.7B"), ("0.6B",)):
        length = s.pick(4096, 40)
        title = f"{name}, {length:,} tokens, --kernels={kind}"
        cfg = configured(s, 8, length, kernels=kind)
        yield from case(s, title, cfg, (name,))


def micro(s: Setting) -> Iterator[dict]:
    """Updates with micro-batches of 4,096 tokens, and of the most that the plan allows (the default
    of --micro_tokens on a GPU); with these also AdamW without its fused kernel."""
    name, length = "0.6B", s.pick(2048, 40)
    cfg = configured(s, s.pick(32, 8), length)
    configs = {"policy": s.model_config(name)}
    gib = 0.9 * memory_of(s.device) / GIB
    most = plan.largest_micro(cfg, configs, PROMPT, 1, gib) if s.cuda else 512
    for tokens, kinds in (
        (s.pick(4096, 80), optim.FUSED),
        (most, optim.FUSED),
        (most, set()),
    ):
        how = "fused AdamW" if kinds else "AdamW tensor by tensor"
        what = f"{name}, {length:,} tokens, --micro_tokens={tokens}, {how}"
        with mock.patch.object(optim, "FUSED", kinds):
            yield from case(s, what, replace(cfg, micro_tokens=tokens), (name,))


ALIGNED = {"learner_quant": "aligned", "quant_group": 32, "objective": "tis"}
CONFIGURATIONS = {
    "1.7B": {},
    "1.7B, checkpointing": {"gradient_checkpointing": True},
    "1.7B and 0.6B, Jackpot": {"actor": "base:actor", "objective": "jackpot"},
    "1.7B, FSDP2 on one rank": {"parallel": "fsdp"},
    "1.7B, int8, aligned": {"rollout_quant": "int8", **ALIGNED},
    "1.7B, fp8, aligned": {"rollout_quant": "fp8", **ALIGNED},
    "1.7B, w4a16, aligned": {"rollout_quant": "w4a16", **ALIGNED},
}


def memory(aligned: bool, s: Setting) -> Iterator[dict]:
    """Configurations of a run, aligned or not, each compared with the plan: rows of 2,048
    tokens."""
    rows, length = s.pick((16, 2048), (8, 40))
    for what, flags in CONFIGURATIONS.items():
        if aligned == ("rollout_quant" in flags):
            names = ("1.7B", "0.6B") if "actor" in flags else ("1.7B",)
            cfg = configured(s, rows, length, **flags)
            with (
                one_rank(s.device) if "parallel" in flags else contextlib.nullcontext()
            ):
                yield from case(s, *fitting(s, what, cfg, names), names)


@contextlib.contextmanager
def one_rank(device: str):
    """A process group of one rank: a new group, or the group of a vLLM engine in this process."""
    if torch.distributed.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    how = {"device_id": torch.device("cuda", 0)} if device == "cuda" else {}
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(
        backend, store=store, rank=0, world_size=1, **how
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def sampled(s: Setting, engine, learner: Learner) -> Iterator[dict]:
    """Tokens per second of an engine, with 64 prompts and 8 responses to each."""
    n, tokens = s.pick((64, 256), (2, 4))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 200, 10).astype(np.int32) for _ in range(n)]
    seeds = [list(range(8 * i, 8 * i + 8)) for i in range(n)]
    sampling = Sampling(max_tokens=tokens)
    engine.generate(prompts, seeds, replace(sampling, max_tokens=2), 0, [])
    times = [
        s.seconds(lambda: engine.generate(prompts, seeds, sampling, 0, []))
        for _ in range(2)
    ]
    speeds = [8 * n * tokens / t for t in times]
    yield repeats_row(f"speed, {8 * n} responses of {tokens}", speeds, "tokens/s")


def published(s: Setting, engine, learner: Learner) -> Iterator[dict]:
    """Seconds of three publications with their checks; an update follows each publication. On a GPU
    the engine then sleeps and wakes up."""
    vocabulary = learner.models.policy.config.vocab_size
    check = WeightCheck(learner.models.policy.config, probe_ids(144, vocabulary))
    batch, stats = batch_of(learner)
    changed, times = [], []
    for version in range(3):
        load = partial(
            check.load, engine, version, learner.published("policy", engine.packed)
        )
        times.append(s.seconds(lambda now=load: changed.append(now().changed)))
        learner.step(learner.backward(batch, stats))
    goal = {"goal": "> 0", "met": changed[-1] > 0}
    yield row("share of tensors changed by an update", changed[-1], **goal)
    yield row("the first publication and its check", times[0], "s")
    yield repeats_row("a publication and its check", times[1:], "s")
    if s.cuda:
        free = torch.cuda.mem_get_info()[0]
        asleep = s.seconds(engine.sleep)
        yield row(
            "memory freed by sleep", (torch.cuda.mem_get_info()[0] - free) / GIB, "GiB"
        )
        awake = s.seconds(
            lambda: engine.load(learner.published("policy", engine.packed))
        )
        yield row("falls asleep", asleep, "s")
        yield row("wake-up and load", awake, "s")


def saved(s: Setting, model, name: str) -> str:
    """Save a model for vLLM and return its folder. The path is the same in all parts, because
    vLLM's cache of compiled code depends on it."""
    folder = str(ROOT / f"out/bench-{name}-{s.pick('full', 'tiny')}")
    model.save_pretrained(folder)
    return folder


def vllm(measured: Callable, s: Setting) -> Iterator[dict]:
    """VLLMEngine in bfloat16 with the shape of Qwen3-0.6B, on the same device as a learner.
    measured: `sampled`, `published`, or nothing but the start, which fills vLLM's cache."""
    if not importlib.util.find_spec("vllm"):
        yield row("vLLM", why="not installed")
        return
    learner = s.learner(configured(s, *s.pick((16, 512), (8, 40)), lr=1e-3), "0.6B")
    folder = saved(s, learner.models.policy, "0.6B")
    how = {"max_len": s.pick(2048, 160), "max_logprobs": 20}
    how |= {"dtype": s.pick("bfloat16", "float32")}
    start = time.perf_counter()
    engine = VLLMEngine(folder, memory_gib=s.pick(0.3, 0.05), sleep_level=2, **how)
    yield row("start of the engine", time.perf_counter() - start, "s")
    yield from measured(s, engine, learner)
    engine.close()


STEP = ((256, 256), (16, 8))  # responses and tokens of a step: full, tiny


def ours(s: Setting) -> Iterator[dict]:
    """Whole steps (publish, roll out, grade, update) with vLLM: 0.6B, groups of 8."""
    cfg = configured(s, *s.pick(*STEP))
    folder = saved(s, s.model("0.6B"), "0.6B")
    share = dict(dtype="bfloat16", memory_gib=s.pick(0.3, 0.05))
    engine = VLLMEngine(folder, max_len=cfg.max_tokens + 64, max_logprobs=1, **share)
    step = against_trl.our_step(folder, engine, cfg, s.device)
    times = [s.seconds(step) for _ in range(s.pick(5, 2))][1:]
    engine.close()
    yield repeats_row(
        f"our step, {cfg.train_batch} responses of {cfg.max_tokens}", times, "s"
    )


def trl(s: Setting) -> Iterator[dict]:
    """Steps of TRL's GRPOTrainer with the same model, batch and lengths as `ours` (on a GPU with
    vLLM in the same process). PYTHONPATH=.trl, see results/against_trl.py."""
    if importlib.util.find_spec("trl") is None:
        yield row("TRL's step", why="not installed")
        return
    rows, length = s.pick(*STEP)
    options = dict(
        per_device_train_batch_size=s.pick(32, 16),
        gradient_accumulation_steps=s.pick(8, 1),
        max_completion_length=length,
        use_cpu=not s.cuda,
        bf16=s.cuda,
        use_vllm=s.cuda,
    )
    options |= (
        dict(vllm_mode="colocate", vllm_gpu_memory_utilization=0.3) if s.cuda else {}
    )
    n, times = s.pick(5, 2), []
    with tempfile.TemporaryDirectory() as folder:
        s.model("0.6B").save_pretrained(f"{folder}/model")
        arithmetic_tokenizer().save_pretrained(f"{folder}/model")
        clock = against_trl.trl_clock(times)
        against_trl.grpo_trainer(
            f"{folder}/model", f"{folder}/out", n, clock, **options
        ).train()
    theirs = [seconds for _, seconds in times[1:]]
    yield repeats_row(f"TRL's step, {rows} responses of {length}", theirs, "s")


def ours_over_trl(lines: list[dict]) -> list[dict]:
    """A row with the ratio of the newest steps of `ours` and `trl` on the newest device, perhaps of
    two starts; [] without both."""
    device, seconds = "", {}
    for line in lines:
        if "about" in line and line["about"]["device"] != device:
            device, seconds = line["about"]["device"], {}
        elif line.get("unit") == "s":
            seconds[line["part"]] = line["value"]
    if not {"ours", "trl"} <= seconds.keys():
        return []
    ratio = seconds["ours"] / seconds["trl"]
    return [row("our step over TRL's", ratio, "x", goal="<= 0.8", met=ratio <= 0.8)]


def pair(s: Setting) -> Iterator[dict]:
    """Four updates of configs/real_pair.toml (tiny: of two random models): seconds of the stages
    after the first update, and memory. out/gsm8k_train.jsonl, if it exists, replaces the hub's
    GSM8K."""
    with tempfile.TemporaryDirectory() as scratch:
        flags = {"config": "configs/real_pair.toml"}
        if (ROOT / "out/gsm8k_train.jsonl").is_file():
            flags |= {"task": "out/gsm8k_train.jsonl", "eval_task": ""}
        if s.tiny:
            bench.shaped(f"{scratch}/model", layers=2)
            bench.shaped(f"{scratch}/actor", layers=1)
            flags = {"model": f"{scratch}/model", "actor": f"{scratch}/actor"}
            flags |= {"rollout": "hf", "task": "arith", "max_tokens": 8}
            flags |= {"train_batch": 16, "rollout_batch": 16, "objective": "jackpot"}
            flags |= {"lr": 1e-3, "actor_lr": 1e-3}
        flags |= {
            "steps": 4,
            "eval_every": -1,
            "save_every": 0,
            "out": f"{scratch}/run",
        }
        argv = [
            sys.executable,
            "train.py",
            *(f"--{key}={x}" for key, x in flags.items()),
        ]
        with tempfile.TemporaryFile("w+") as errors:
            run = subprocess.Popen(
                argv, cwd=ROOT, stdout=errors, stderr=errors, text=True
            )
            try:
                run.wait(LONG["pair"] - 20)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
            errors.seek(0)
            last = [line.strip() for line in errors if line.strip()][-1:]
        folder = Path(scratch, "run")
        if not (folder / "metrics.jsonl").is_file():
            raise UserError(f"the pair: no update ({''.join(last)[:300]})")
        rows = [r for r in read_metrics(folder) if r["step"] > 0]
    for key in ("rollout_s", "update_s", "sync_s", "speed/memory_GiB"):
        values = [r[key] for r in rows if key in r]
        if values:
            unit = "s" if key.endswith("_s") else "GiB"
            yield repeats_row(key.removesuffix("_s"), values, unit)
    if len(rows) < 3:
        raise UserError(f"the pair: {len(rows) + 1} of 4 updates")


LIMIT = 60  # seconds of a part
MOST = 180  # seconds of parts that compile
COMPILING = "engine pair ours trl tests-vllm tests-aligned"
LONG = dict.fromkeys(COMPILING.split(), MOST)
# name -> part; the most important first
PARTS = {
    "engine": partial(vllm, lambda *_: ()),
    "vllm": partial(vllm, sampled),
    "sync": partial(vllm, published),
    "learner-0.6B": partial(learner, "0.6B"),
    "learner-1.7B": partial(learner, "1.7B"),
    "kernels-plain": partial(kernels, "plain"),
    "kernels-compile": partial(kernels, "compile"),
    "kernels-liger": partial(kernels, "liger"),
    "linears-8B": partial(linears, "8B"),
    "tests-numbers": partial(tests, "gradient or quantized or product", LIMIT),
    "tests-vllm": partial(tests, "(vllm or sleeping) and not aligned", MOST),
    "tests-aligned": partial(tests, "vllm and aligned", MOST),
    "tests-runs": partial(
        tests, "not (gradient or quantized or product or vllm or sleeping)", LIMIT
    ),
    "obrs": obrs,
    "pair": pair,
    "trl": trl,
    "ours": ours,
    "micro": micro,
    "memory-plain": partial(memory, False),
    "memory-aligned": partial(memory, True),
    "head-1024": partial(head, 1024),
    "head-2560": partial(head, 2560),
    "linears-1.7B": partial(linears, "1.7B"),
    "linears-0.6B": partial(linears, "0.6B"),
    "learner-4B": partial(learner, "4B"),
}
