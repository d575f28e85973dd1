"""The papers' settings in configs/papers/: every row resolves, settings equal the paper's, small runs work.

Small runs have stand-in models, two updates and eight tokens a response. Other settings are the recipe's."""

import json
import math
import re
import tomllib

import pytest
import standins
import torch
from conftest import ROOT
from torchrun import torchrun

import config
import tasks
import train
from machinery import settings
from machinery.flags import is_hub_id
from machinery.log import read_metrics

RECIPES = {path.stem: path for path in sorted((ROOT / "configs" / "papers").glob("*.toml"))}
# Sources of the papers' data on the hub, or of a line of Python in configs/README.md
HUB = {
    "AIME24": "hf:HuggingFaceH4/aime_2024/train",
    "AIME25": "hf:math-ai/aime25/test",
    "AMC12 2024": "hf:rawsh/2024_AMC12/train",
    "AMC22/23": "hf:AI-MO/aimo-validation-amc/train",
    "DAPO-Math-17k, made unique": "hf:open-r1/DAPO-Math-17k-Processed@all/train",
    "DeepScaleR": "out/data/deepscaler.jsonl",
    "GSM8K": "hf:openai/gsm8k@main/test",
    "GSM8K, to train": "hf:openai/gsm8k@main/train",
    "MATH lv. 3-5": "out/data/math_level3to5.jsonl",
    "MATH-500": "hf:HuggingFaceH4/MATH-500/test",
    "MATH-8K": "out/data/math8k.jsonl",
    "Minerva": "hf:math-ai/minervamath/test",
    "OlympiadBench": "out/data/olympiadbench.jsonl",
    "OpenR1-Math-46K": "hf:Elliott/Openr1-Math-46k-8192/train",
}
# Jackpot's tables: responses to each problem
TABLE_1 = {"GSM8K": 4, "MATH-500": 4, "AMC22/23": 4, "AMC12 2024": 4, "AIME24": 4, "AIME25": 4}
TABLE_2 = {**TABLE_1, "AIME24": 16, "AIME25": 16}
QARL_SETS = dict.fromkeys(("AIME24", "AIME25", "AMC22/23"), 8)  # the number is not in the text
QARL_SETS |= dict.fromkeys(("MATH-500", "Minerva", "OlympiadBench"), 1)
QWEN3_4B = {"model": "Qwen/Qwen3-4B-Base", "actor": "none", "task": "DeepScaleR"}
# Models, data and held-out sets of each recipe, with the responses to each problem, and `eval_temperature` and
# `eval_tokens` if they are not 1 and --max_tokens. Without an entry here, a recipe has no 8-bit cache, no chat template
# arguments and no system prompt
USUAL = {"kv_cache_dtype": "auto", "chat_kwargs": "", "system_prompt": ""}
QARL = {"actor": "none", "task": "OpenR1-Math-46K", "sets": QARL_SETS, "eval_temperature": 0.6, "reward": ""}
SOURCES = {
    "jackpot": {**QWEN3_4B, "actor": "Qwen/Qwen3-1.7B-Base", "sets": TABLE_1},
    "jackpot_stale": {**QWEN3_4B, "sets": TABLE_2},
    # the number is not in the text
    "jackpot_clip": {**QWEN3_4B, "sets": {"GSM8K": 4, "MATH-500": 4, "AMC22/23": 4, "AIME24": 16}},
    "jackpot_fp8": {**QWEN3_4B, "sets": TABLE_2, "kv_cache_dtype": "fp8"},
    "tis_dapo": {
        **{"model": "Qwen/Qwen2.5-32B", "actor": "none", "task": "DAPO-Math-17k, made unique"},
        "sets": {"AIME24": 32},  # the number is not in the text
    },
    "tis_int8": {
        **{"model": "Qwen/Qwen2.5-0.5B", "actor": "none", "task": "GSM8K, to train", "sets": {"GSM8K": 1}},
        "reward": "gsm8k",
    },
    "praxis": {
        **{"model": "Qwen/Qwen3-8B", "actor": "none", "task": "GSM8K, to train", "sets": {"GSM8K": 1}},
        **{"chat_kwargs": "enable_thinking=false", "eval_tokens": 2048},  # the number of tokens is not in the text
    },
    "qarl": {**QARL, "model": "Qwen/Qwen3-8B-Base"},
    "qarl_moe": {**QARL, "model": "Qwen/Qwen3-30B-A3B-Base"},
    "heterorl": {
        **{"model": "Qwen/Qwen3-1.7B", "actor": "none", "task": "MATH lv. 3-5", "sets": {"MATH-500": 8}},
        "system_prompt": "You are a helpful AI Assistant, designed to provided well-reasoned and detailed responses. "
        "You FIRST think about the reasoning process as an internal monologue and then provide the user with the "
        "answer. Please put your final answer within `\\boxed{}`. Also, indicate that it is the answer.",
    },
}
# More settings, copied from the papers, not from the files. `batches`: rollout batch and update, in prompts
TO_NEW = {"correction": "obrs", "obrs_target": "new", "obrs_lambda": 1, "obrs_topk": 20}
VERL = {"weight_decay": 0.01, "warmup_steps": 0}
PAPERS = {
    "jackpot": {
        **{"batches": (64, 64), "correction": "obrs", "obrs_target": "ref", "obrs_lambda": 1, "obrs_topk": 20},
        **{"obrs_z": "approx", "max_tokens": 8192, "clip_low": 0.2, "clip_high": 0.28},
    },
    "jackpot_stale": {**TO_NEW, "batches": (2048, 32), "clip": False, "obrs_z": "approx"},
    "jackpot_clip": {
        **{**TO_NEW, "batches": (2048, 64), "clip": True, "clip_low": 0.4, "clip_high": 0.7},
        **{"obrs_c2": 3, "max_tokens": 8192},
    },
    "jackpot_fp8": {"batches": (128, 64), "correction": "obrs", "obrs_target": "ref", "clip": True},
    "tis_dapo": {
        **{"batches": (512, 32), "group_size": 16, "correction": "tis", "clip_low": 0.2, "clip_high": 0.28},
        **{"reduction": "token-mean", "max_tokens": 20480, "overlong": 4096, "lr": 1e-6, "weight_decay": 0.1},
    },
    "tis_int8": {"batches": (256, 64), "correction": "tis", "rollout_quant": "int8", "epochs": 15, **VERL},
    "praxis": {
        **{"batches": (32, 32), "group_size": 8, "correction": "tis", "is_cap": 2, "max_tokens": 10000, "lr": 1e-6},
        **{"logprobs_mode": "processed", "log_ratio_clamp": 20, "temperature": 1, "top_p": 1, **VERL},
    },
    "qarl": {
        **{"batches": (512, 64), "group_size": 8, "rollout_quant": "w4a16", "learner_quant": "aligned", "is_cap": 2},
        **{"surrogate": "tbpo", "correction": "tbpo_mismatch", "clip_low": 3e-4, "clip_high": 4e-4, "lr": 1e-6},
        **{"tbpo_neg_high": 7e-4, "optimizer": "muon", "weight_decay": 0.01, "max_tokens": 16384},
        **{"micro_tokens": 22528},
        **{"max_prompt_tokens": 2048, "temperature": 1, "top_p": 1},
    },
    "heterorl": {
        **{"group_size": 8, "surrogate": "gspo", "ratio_base": "group", "advantage": "grpo_no_std", "lr": 1e-6},
        **{"cppo_beta": 0.005, "delay": "lognormal", "delay_min": 60, "delay_max": 1800},
        **{"delay_samplers": 4, "max_staleness": 64, "window_seconds": 1800, "lr_schedule": "constant", "epochs": 3},
        **{"warmup_steps": 0.03, "rollout_memory": 0.45},
    },
}
PAPERS["qarl_moe"] = PAPERS["qarl"]
# Models and data of a recipe's additional rows, in order
OTHERS = {
    "jackpot": [
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-1.7B-Base", "DeepScaleR"),
        ("Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-1.5B", "MATH-8K"),
        ("Qwen/Qwen3-4B-Base", "none", "DeepScaleR"),
        ("Qwen/Qwen3-1.7B-Base", "none", "DeepScaleR"),
    ],
    "jackpot_stale": [("Qwen/Qwen3-8B-Base", "none", "DeepScaleR")],
    "tis_dapo": [("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "none", "DAPO-Math-17k, made unique")],
    "qarl": [(f"Qwen/Qwen2.5-Math-{size}", "none", "OpenR1-Math-46K") for size in ("7B", "1.5B")],
}


def of_file(name: str) -> dict:
    return tomllib.loads(RECIPES[name].read_text())


def rows_of(name: str) -> list[list[str]]:
    """The flags of the rows in a recipe's head: indented lines up to two spaces or the end."""
    lines = re.findall(r"^#   (--.*?)(?:  .*)?$", RECIPES[name].read_text(), re.M)
    return [line.split() for line in lines]


def sets_of(eval_task: str) -> dict[str, dict]:
    """The held-out sets with their settings."""
    words = [tasks.parts_of(word) for word in eval_task.split(",")]
    return {source: dict(tasks.setting("eval_task", source, part) for part in of_set) for source, of_set in words}


def parsed(name: str, *flags: str, **options) -> config.Config:
    return settings.parse([f"--config={RECIPES[name]}", *flags], **options)


def planned(name: str, *flags: str) -> config.Config:
    """The configuration on eight ranks a node."""
    return parsed(name, *flags, n_ranks=8, installed=False)


def test_every_recipe_is_compared_and_listed():
    table = (ROOT / "configs" / "README.md").read_text()
    listed = set(re.findall(r"^\| \[(\w+)\]\(papers/\1\.toml\)", table, re.M))
    assert listed == RECIPES.keys() == PAPERS.keys() == SOURCES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_settings_of_its_paper(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a recipe is for a machine with GPUs
    cfg = planned(name)
    wanted = USUAL | SOURCES[name] | PAPERS[name]
    wanted["task"] = HUB[wanted["task"]]
    rollout, update = wanted.pop("batches", (8, 8))
    temperature, max_tokens = wanted.pop("eval_temperature", 1), wanted.pop("eval_tokens", cfg.max_tokens)
    sets = {
        HUB[one]: {"samples": n, "temperature": temperature, "max_tokens": max_tokens}
        for one, n in wanted.pop("sets").items()
    }
    defaults = {"samples": 1, "temperature": 1, "max_tokens": cfg.max_tokens}
    assert {source: defaults | changes for source, changes in sets_of(cfg.eval_task).items()} == sets
    assert (cfg.rollout_batch, cfg.train_batch) == (rollout * cfg.group_size, update * cfg.group_size)
    assert {key: getattr(cfg, key) for key in wanted} == wanted
    assert cfg.train_batch % (8 * cfg.group_size) == 0  # divisible among 8 GPUs
    assert cfg.dtype == cfg.rollout_dtype == "bfloat16"
    assert is_hub_id(cfg.model)
    head = RECIPES[name].read_text().split("\nobjective")[0]
    assert f"--config=configs/papers/{name}.toml" in head
    for part in ("# In the text", "Hardware: ", "Not run.", "# In small"):
        assert part in head
    for page in re.findall(r"results/\w+\.md|configs/papers/\w+\.toml", head):
        assert (ROOT / page).is_file()


@pytest.mark.parametrize("name", RECIPES)
def test_all_rows_of_a_recipe_resolve(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = rows_of(name)
    assert len(rows) >= 2
    base = planned(name)
    seen, others = {repr(base)}, []
    for row in rows:
        cfg = planned(name, *row)
        seen.add(repr(cfg))
        assert cfg.train_batch == base.train_batch
        if (cfg.model, cfg.actor, cfg.task) != (base.model, base.actor, base.task):
            others.append((cfg.model, cfg.actor, cfg.task))
    assert others == [(model, actor, HUB[task]) for model, actor, task in OTHERS.get(name, [])]
    assert len(seen) == 1 + len(rows)  # all runs are different


# -- Small runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Stand-ins by family, a large and a small one of qwen3, and six problems."""
    root = tmp_path_factory.mktemp("small")
    models = {"qwen3": ("qwen3", 2), "actor": ("qwen3", 1), "qwen2": ("qwen2", 2), "moe": ("qwen3_moe", 2)}
    for seed, (name, (family, layers)) in enumerate(models.items()):
        changes = {"num_hidden_layers": layers, "max_position_embeddings": 512}  # HeteroRL's system prompt is long
        standins.save(standins.model(family, seed, **changes), root / name)
    rows = [{"problem": f"What is {i} + {i}?", "answer": f"work\n#### {2 * i}"} for i in range(6)]
    (root / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def stand_in(model: str) -> str:
    """The stand-in with the architecture of a model of the hub."""
    if "A3B" in model:
        return "moe"
    return "qwen3" if "Qwen3" in model else "qwen2"


def shrunk(name: str, small, out) -> dict:
    """The flags that make a recipe small: two groups of two an update, with the recipe's number of updates a sync."""
    cfg = of_file(name)
    settings = "".join(f":{part}" for part in cfg["eval_task"].split(",")[0].split(":") if part.startswith("temp"))
    flags = dict(steps=2, epochs=0, group_size=2, train_batch=4, max_tokens=8, max_prompt_tokens=0, eval_problems=2)
    flags |= dict(eval_every=0, rollout="hf", rollout_tp=1, kv_cache_dtype="auto", quant_group=16, out=out)
    flags["rollout_batch"] = 4 * cfg["rollout_batch"] // cfg["train_batch"]
    flags["model"] = small / stand_in(cfg["model"])
    flags["actor"] = "none" if cfg["actor"] == "none" else small / "actor"
    flags["task"] = small / "sums.jsonl"
    flags["eval_task"] = f"{small / 'sums.jsonl'}:samples=2{settings}"
    flags["overlong"] = 4 if "overlong" in cfg else 0
    return flags if name in ON_TWO_RANKS else {**flags, "parallel": "ddp"}


ON_TWO_RANKS = ("jackpot", "qarl_moe")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_in_small(name, small, tmp_path):
    """In the recipe's precision."""
    flags = shrunk(name, small, tmp_path / "run")
    argv = [f"--{key}={value}" for key, value in flags.items()]
    if name in ON_TWO_RANKS:
        torchrun("../train.py", f"--config={RECIPES[name]}", *argv)
    else:
        train.train(parsed(name, *argv))
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    untouched = {key: value for key, value in of_file(name).items() if key not in {*flags, "rollout_memory"}}
    assert {key: saved[key] for key in untouched} == untouched
    rows = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert [row["step"] for row in rows] == [0, 1]
    assert all(math.isfinite(row[key]) for row in rows for key in ("loss", "grad_norm"))
