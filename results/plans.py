"""Plan the memory of the recipes in configs/papers (plan/), and compare plans with the measured memory of small runs.

    python results/plans.py             # the plans of all recipes; no weights, no network
    python results/plans.py --check     # ten runs on this machine's CPUs, predicted and measured; some minutes
    python results/plans.py --draw      # table and plot from results/plans.json

SHAPES has the shapes of the recipes' models, as in their config.json files on the hub. The measured number is the peak
resident memory of a rank's process (VmHWM) during an update, or during the publication of weights and its check, minus
the memory of the process before its models.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import batching
import bench
import config
import objectives
import plan
from learner import Comm, Learner
from machinery import settings
from machinery.flags import parse_flags, run_command
from model import lora
from model.engines import HFEngine
from results import sweep
from rollout import probe_ids
from sync import WeightCheck

COMMON = {"vocab_size": 151_936, "max_position_embeddings": 40_960}
# hub id -> (family, hidden, inner, layers, heads, key-value heads, tied, more)
SHAPES = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, True, {}),
    "Qwen/Qwen2.5-32B": ("qwen2", 5120, 27_648, 64, 40, 8, False, {"vocab_size": 152_064}),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, True, {"head_dim": 128}),
    "Qwen/Qwen3-1.7B": ("qwen3", 2048, 6144, 28, 16, 8, True, {"head_dim": 128}),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, True, {"head_dim": 128}),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 12_288, 36, 32, 8, False, {"head_dim": 128}),
    "Qwen/Qwen3-30B-A3B": (
        *("qwen3_moe", 2048, 6144, 48, 32, 4, False),
        {
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
}


def config_of(name: str):
    """The config of a model on the hub, from SHAPES."""
    from transformers import AutoConfig

    family, hidden, inner, layers, heads, kv_heads, tied, more = SHAPES[name.removesuffix("-Base")]
    return AutoConfig.for_model(
        family,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        layer_types=["full_attention"] * layers,
        **{**COMMON, **more},
    )


# ---------------------------------------------------------------------------------------------------------------------
# The recipes
# ---------------------------------------------------------------------------------------------------------------------

RECIPES = sorted((sweep.ROOT / "configs" / "papers").glob("*.toml"))
HEAD = [
    "recipe",
    "GPUs",
    "states",
    "activations",
    "engine",
    "peak",
    "checkpoint",
    "does it fit?",
]


def ranks_of(path) -> int:
    """The number of ranks in the command at the top of a recipe."""
    text = path.read_text(encoding="utf-8")
    nodes = re.search(r"--nnodes=(\d+)", text)
    return int(re.search(r"--nproc_per_node=(\d+)", text)[1]) * (int(nodes[1]) if nodes else 1)


def gpu_of(path) -> float:
    """GiB of the GPU that a recipe names at its top; 80 if it names no GPU."""
    named = re.search(r"GPUs? of (\d+) GB", path.read_text(encoding="utf-8"))
    return float(named[1]) if named else 80.0


def row_of(name: str, argv: list[str], ranks: int, gpu_gib: float = 80.0) -> list[str]:
    """The cells of the table for the plan of one command."""
    cfg = settings.parse(argv, ranks, installed=False)
    models = {"policy": config_of(cfg.model)}
    if cfg.actor != "none":
        models["actor"] = config_of(cfg.actor)
    made = plan.plan_of(cfg, models, cfg.max_prompt_tokens, ranks, gpu_gib)
    _, says = plan.verdict(cfg, models, cfg.max_prompt_tokens, made, gpu_gib)
    states = made.sum_of("weights", "gradients", "optimizer")
    numbers = [
        states,
        made.sum_of("activations"),
        made.sum_of("engine"),
        made.peak,
        made.checkpoint,
    ]
    return [name, str(ranks), *(f"{x / plan.GIB:.1f}" for x in numbers), says]


def of_recipe(path) -> list[str]:
    """The cells of the table for a recipe's plan, on the GPUs that the recipe names."""
    return row_of(path.stem, [f"--config={path}"], ranks_of(path), gpu_of(path))


EXAMPLE = "--objective=jackpot --model=Qwen/Qwen3-4B --actor=Qwen/Qwen3-1.7B --max_tokens=4096 --max_prompt_tokens=1024"
EXAMPLE += " --task=hf:openai/gsm8k@main/train --dtype=bfloat16 --lr=1e-6 --actor_lr=1e-6"


def recipes() -> list[list[str]]:
    """The cells of the table for all plans."""
    rows = [of_recipe(path) for path in RECIPES]
    return rows + [
        row_of("Jackpot, 4B and 1.7B", [*EXAMPLE.split(), "--parallel=fsdp"], n) for n in (1, 8)
    ]


def table(data: dict) -> str:
    """The tables of the page: the plans in GiB on one GPU; predicted and measured peaks on CPUs."""
    rows = [
        [*cells, "yes" if says.startswith("it fits") else "no"] for *cells, says in data["recipes"]
    ]
    return (
        sweep.markdown(HEAD, rows)
        + "\n"
        + sweep.markdown(["run", "predicted", "measured", "ratio"], data["checked"])
    )


def draw(data: dict) -> None:
    """Plot each recipe's memory by kind, and predicted against measured peaks."""
    plt = sweep.pyplot()
    fig, (left, right) = plt.subplots(
        1, 2, figsize=(11, 3.6), layout="constrained", width_ratios=(2, 1)
    )
    names = [f"{row[0]}, {row[1]}" for row in data["recipes"]]
    start = [0.0] * len(names)
    for i, part in enumerate(HEAD[2:5], 2):
        values = [float(row[i]) for row in data["recipes"]]
        left.barh(names, values, left=start, color=sweep.COLOURS[i - 2], label=part)
        start = [a + b for a, b in zip(start, values, strict=True)]
    left.plot([float(row[5]) for row in data["recipes"]], names, "k|", ms=9, label="peak")
    left.set(title="plan: GiB on one GPU (recipe, GPUs)")
    left.legend(fontsize=7)
    predicted, peaks = ([float(row[i]) for row in data["checked"]] for i in (1, 2))
    right.plot([0, max(peaks)], [0, max(peaks)], color="grey", lw=0.8)
    right.plot(peaks, predicted, "o", ms=4, color=sweep.COLOURS[1])
    right.set(xlabel="measured, GiB", ylabel="predicted, GiB", title="peaks on CPUs")
    sweep.save(fig, sweep.RESULTS / "plans.png")


# ---------------------------------------------------------------------------------------------------------------------
# Predicted and measured
# ---------------------------------------------------------------------------------------------------------------------

SHAPE = dict(hidden=512, inter=1536, layers=6, vocab=16_000)
PROMPT, RESPONSE, ROWS = 32, 480, 2
# name -> (ranks, flags)
CASES = {
    "one process": (1, {}),
    "DDP, 2 ranks": (2, {}),
    "FSDP2, 2 ranks": (2, {"parallel": "fsdp"}),
    "FSDP2, 2 ranks, checkpointing": (2, {"parallel": "fsdp", "gradient_checkpointing": True}),
    "two models": (1, {"actor": "base:actor", "objective": "jackpot"}),
    "two models, checkpointing": (
        1,
        {"actor": "base:actor", "objective": "jackpot", "gradient_checkpointing": True},
    ),
    "LoRA": (1, {"lora_rank": 8}),
    "int8, aligned": (1, {"rollout_quant": "int8", "learner_quant": "aligned"}),
}
LARGE = {**SHAPE, "vocab": 151_936}  # shape of the published model
# name -> --rollout_dtype
PUBLISHED = {
    "sync and proof, 151,936 tokens": "float32",
    "the same, engine in bfloat16": "bfloat16",
}


def configured(flags: dict, ranks: int) -> config.Config:
    """The configuration of a case: an update has four micro-batches of ROWS rows on each rank."""
    sizes = dict(
        train_batch=8 * ranks, rollout_batch=8 * ranks, max_tokens=RESPONSE, micro_tokens=ROWS * 512
    )
    usual = dict(objective="grpo", actor="none", rollout="hf", lr=1e-4, actor_lr=1e-4, **sizes)
    return settings.resolve(config.Config(**{**usual, **flags}), ranks)


def models_of(cfg: config.Config) -> dict:
    made = {"policy": bench.shaped("", **SHAPE)}
    if cfg.actor != "none":
        made["actor"] = bench.shaped("", **{**SHAPE, "layers": SHAPE["layers"] // 2})
    return made


def memory_of(key: str) -> int:
    """A value of this process's /proc/self/status in bytes: VmRSS, or VmHWM (the peak)."""
    with open("/proc/self/status", encoding="utf-8") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(key))


def trim() -> None:
    """Return freed memory to the system, and reset the peak."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as f:
        f.write("5")


def measured(flags: dict) -> None:
    """Run one rank of a case, and print the peak of the second update in bytes above the memory before the models."""
    comm = Comm.start(600)
    cfg = configured(flags, max(1, comm.size))
    models = models_of(cfg)
    if cfg.lora_rank:
        lora.attach(models["policy"], cfg)
    trim()
    before = memory_of("VmRSS") - sum(plan.weights_of(model) for model in models.values())
    learner = Learner(models.pop("policy"), models.pop("actor", None), cfg, comm)
    groups = bench.random_groups(np.random.default_rng(comm.rank), 1, RESPONSE, SHAPE["vocab"])
    batch = batching.collate(groups, cfg)
    stats = objectives.prepare(batch, comm, cfg, {})
    learner.update(batch, stats)  # creates the optimizer states
    trim()
    learner.update(batch, stats)
    if comm.rank == 0:
        print(json.dumps(memory_of("VmHWM") - before), flush=True)


def measured_sync(dtype: str) -> None:
    """Print the peak of two syncs with their checks, in bytes above the memory before the models."""
    cfg = configured({"rollout_dtype": dtype}, 1)
    with tempfile.TemporaryDirectory() as folder:
        model, sampler = (
            bench.shaped(folder, **LARGE),
            bench.shaped("", **LARGE, seed=1).to(getattr(torch, dtype)),
        )
        trim()
        before = memory_of("VmRSS") - sum(
            x.nbytes for m in (model, sampler) for x in m.parameters()
        )
        learner, engine = Learner(model, None, cfg, Comm()), HFEngine(sampler, dtype=dtype)
        check = WeightCheck(model.config, probe_ids(PROMPT + RESPONSE, LARGE["vocab"]))
        peaks = []
        for version in range(2):
            trim()
            tensors = learner.verified("policy", False, learner.published("policy", packed=False))
            check.load(engine, version, tensors)
            peaks.append(memory_of("VmHWM") - before)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.001)
    print(json.dumps(max(peaks)), flush=True)


def plan_of_sync(dtype: str) -> int:
    """The planned bytes of `measured_sync`, which allocates neither optimizer states nor a KV cache."""
    cfg, shape = configured({"rollout_dtype": dtype}, 1), bench.shaped("", **LARGE).config
    made = plan.plan_of(cfg, {"policy": shape}, PROMPT, 1)
    cache = plan.torch_cache(
        shape, getattr(torch, dtype).itemsize, cfg.rollout_batch, PROMPT + RESPONSE
    )
    return made.of_stage("publish") - made.categories["optimizer, policy"] - cache


def run_case(ranks: int, flags: dict) -> int:
    """The measured bytes of a case, run in separate processes."""
    return run_script(ranks, f"--case={json.dumps(flags)}")


def run_script(ranks: int, what: str) -> int:
    """The number that this script prints with the argument `what`, in separate processes."""
    script = [__file__, what]
    command = [sys.executable, *script]
    if ranks > 1:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
            *script,
        ]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "TQDM_DISABLE": "1",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {command}: {done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def compared(name: str, said: int, got: int) -> list[str]:
    """Print and return a row of the second table."""
    row = [name, f"{said / plan.GIB:.3f}", f"{got / plan.GIB:.3f}", f"{said / got:.3f}"]
    print(*row, sep="   ", flush=True)
    return row


def check() -> list[list[str]]:
    """The cells of the second table: predicted and measured bytes, and their ratio."""
    plan.footprint.DEVICE = "cpu"
    rows = []
    for name, (ranks, flags) in CASES.items():
        cfg = configured(flags, ranks)
        configs = {key: model.config for key, model in models_of(cfg).items()}
        made = plan.plan_of(cfg, configs, PROMPT, ranks)
        said = made.of_stage("forward and backward") - made.categories["engine"]
        rows.append(compared(name, said, run_case(ranks, flags)))
    for name, dtype in PUBLISHED.items():
        rows.append(compared(name, plan_of_sync(dtype), run_script(1, f"--sync={dtype}")))
    return rows


@dataclass(frozen=True)
class PlanFlags:
    """Plans"""

    check: bool = False
    """Compare predictions with measurements on this machine."""
    draw: bool = False
    """Plan nothing: write the tables and the plot from results/plans.json."""
    case: str = ""
    """Run one rank of a case of --check, with its flags as JSON."""
    sync: str = ""
    """Run the syncs of --check, with an engine of this type."""


def main() -> None:
    flags = parse_flags(PlanFlags, usage=__doc__.strip())
    if flags.case:
        measured(json.loads(flags.case))
    elif flags.sync:
        measured_sync(flags.sync)
    else:
        data = sweep.load("plans")
        if flags.check:
            data["checked"] = check()
        elif not flags.draw:
            data["recipes"] = recipes()
        sweep.store("plans", data)
        sweep.rewrite("plans", table(data))
        draw(data)
        print(table(data))


if __name__ == "__main__":
    run_command(main)
