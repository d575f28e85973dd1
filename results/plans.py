"""Plan the memory of the recipes in configs/papers (plan/).

    python results/plans.py             # the plans of all recipes; no weights, no network

SHAPES has the shapes of the recipes' models, as in their config.json files on the hub. "checked" in results/plans.json
compares plans with measured peaks.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import plan
from machinery import settings
from machinery.flags import run_command
from results import sweep

COMMON = {"vocab_size": 151_936, "max_position_embeddings": 40_960}
# hub id -> (family, hidden, inner, layers, heads, key-value heads, tied, more)
SHAPES = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, True, {}),
    "Qwen/Qwen2.5-32B": (
        "qwen2",
        5120,
        27_648,
        64,
        40,
        8,
        False,
        {"vocab_size": 152_064},
    ),
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

    family, hidden, inner, layers, heads, kv_heads, tied, more = SHAPES[
        name.removesuffix("-Base")
    ]
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


# -- The recipes

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


def row_of(name: str, argv: list[str], ranks: int, gpu_gib: float = 80.0) -> list[str]:
    """The cells of the table for the plan of one command."""
    cfg = settings.parse(argv, ranks, installed=False)
    models = {"policy": config_of(cfg.model)}
    if cfg.actor != "none":
        models["actor"] = config_of(cfg.actor)
    made = plan.plan_of(cfg, models, cfg.max_prompt_tokens, ranks, gpu_gib)
    _, says = plan.verdict(cfg, models, cfg.max_prompt_tokens, made, gpu_gib)
    parts = (("weights", "gradients", "optimizer"), ("activations",), ("engine",))
    numbers = [*(made.sum_of(*names) for names in parts), made.peak, made.checkpoint]
    return [name, str(ranks), *(f"{x / plan.GIB:.1f}" for x in numbers), says]


def of_recipe(path) -> list[str]:
    """The cells of the table for a recipe's plan, on the GPUs that the recipe names; 80 GiB each by default."""
    text = path.read_text(encoding="utf-8")
    nodes, gpu = (
        re.search(r"--nnodes=(\d+)", text),
        re.search(r"GPUs? of (\d+) GB", text),
    )
    ranks = int(re.search(r"--nproc_per_node=(\d+)", text)[1]) * (
        int(nodes[1]) if nodes else 1
    )
    return row_of(
        path.stem, [f"--config={path}"], ranks, float(gpu[1]) if gpu else 80.0
    )


EXAMPLE = "--objective=jackpot --model=Qwen/Qwen3-4B --actor=Qwen/Qwen3-1.7B --max_tokens=4096 --max_prompt_tokens=1024"
EXAMPLE += " --task=hf:openai/gsm8k@main/train --dtype=bfloat16 --lr=1e-6 --actor_lr=1e-6 --micro_tokens=4096"


def recipes() -> list[list[str]]:
    """The cells of the table for all plans."""
    rows = [of_recipe(path) for path in RECIPES]
    return rows + [
        row_of("Jackpot, 4B and 1.7B", [*EXAMPLE.split(), "--parallel=fsdp"], n)
        for n in (1, 8)
    ]


def table(data: dict) -> str:
    """The table of the page: the plans in GiB on one GPU; recipes with equal plans share a line."""
    rows = [
        [*cells, "yes" if says.startswith("it fits") else "no"]
        for *cells, says in data["recipes"]
    ]
    return sweep.markdown(HEAD, sweep.merged(rows))


def main() -> None:
    data = {**sweep.load("plans"), "recipes": recipes()}
    sweep.store("plans", data)
    sweep.rewrite(sweep.RESULTS / "plans.md", table(data))
    print(table(data))


if __name__ == "__main__":
    run_command(main)
