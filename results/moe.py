"""How far a learner is from a low-bit engine on a mixture of experts, with and without alignment and routing replay.

    python results/moe.py

A tiny Qwen3-MoE of random weights (4 layers, 16 experts, 4 of them for a token): nothing is trained, one batch of the
torch engine is scored by learners of the same weights. Writes results/moe.md below its marker.
"""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from tqdm import tqdm

import batching
from config import Config, resolve
from engines import HFEngine
from learner import Comm, Learner
from model import Needs, places
from quant import format_of
from results import sweep
from rollout import Rollout, as_groups, uniforms
from sampling import Sampling

VOCABULARY, PROMPT, TOKENS, GROUPS, G = 2048, 24, 64, 8, 4
ENGINES = ("float32", "bfloat16", "int8", "fp8", "w4a16", "w3a16", "w2a16")  # precision, or number format in float32


def tiny_moe():
    """Qwen3-MoE with weights large enough for a distribution that is far from uniform."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=4, head_dim=32)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, num_experts=16, num_experts_per_tok=4)
    text = dict(vocab_size=VOCABULARY, tie_word_embeddings=False, initializer_range=0.1, norm_topk_prob=True)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **text)).eval()


def sampled(model, engine: str) -> list[Rollout]:
    """Groups that this engine samples, with the experts of every token."""
    dtype = engine if engine == "bfloat16" else "float32"
    fmt = None if engine in ("float32", "bfloat16") else format_of(engine, 64)
    sampler = HFEngine(copy.deepcopy(model).to(getattr(torch, dtype)), dtype=dtype, fmt=fmt).record_routing()
    ids = (uniforms(GROUPS * PROMPT, "moe") * VOCABULARY).astype(np.int32).reshape(GROUPS, PROMPT)
    seeds = [[g * G + i for i in range(G)] for g in range(GROUPS)]
    drawn = sampler.generate(list(ids), seeds, Sampling(max_tokens=TOKENS), 1, [])
    return as_groups("moe", ids, drawn, Sampling(), dtype)


def learner_of(model, engine: str, aligned: bool) -> Learner:
    """A learner of the same weights that can replay the engine's routing."""
    sizes = dict(train_batch=GROUPS * G, rollout_batch=GROUPS * G, group_size=G, micro_tokens=1024, max_tokens=TOKENS)
    low_bits = "none" if engine in ("float32", "bfloat16") else engine
    flags = dict(rollout_quant=low_bits, learner_quant="aligned" if aligned else "none", router_replay=True)
    cfg = Config(objective="none", actor="none", rollout="hf", quant_group=64, **flags, **sizes)
    return Learner(copy.deepcopy(model), None, resolve(cfg, n_ranks=1), Comm())


def gap(learner: Learner, batch, replays: bool) -> tuple[float, float, float]:
    """(mean |p_learner - p_engine|, KL(engine || learner) in nats a token by k3, share of tokens and layers that the
    learner's routers send where the engine did)."""
    there = batch.exists
    stats = learner.score(batch if replays else replace(batch, routed=None), Needs())
    agreement = stats.routed_alike[there].mean() if replays else own_choice(learner, batch)
    log_r = (stats.logp - batch.logp_inf)[there].double()
    distance = (stats.logp.exp() - batch.logp_inf.exp())[there].abs().mean()
    return float(distance), float((log_r.exp() - 1 - log_r).mean()), float(agreement)


@torch.no_grad()
def own_choice(learner: Learner, batch) -> float:
    """The share of tokens and layers routed alike while the learner's routers choose for themselves."""
    routing, at = learner.models.routing, batch.exists.flatten().nonzero()[:, 0]
    learner.models.policy(input_ids=batch.ids[:, :-1])
    routing.given = batch.routed[:, :-1].flatten(0, 1)
    share = routing.alike()[places(batch, at)].mean()
    learner.models.end_replay()
    return share


def measure() -> str:
    """The table."""
    lines = [
        "| engine | learner | routing | mean abs(p - p_inf) | KL, nats a token | routed alike |",
        "|---|---|---|---|---|---|",
    ]
    model = tiny_moe()
    for engine in tqdm(ENGINES, leave=False):
        groups = sampled(model, engine)
        for aligned in (False, True) if engine not in ("float32", "bfloat16") else (False,):
            learner = learner_of(model, engine, aligned)
            batch = batching.collate(groups, learner.cfg)
            for replays in (False, True):
                distance, kl, agreement = gap(learner, batch, replays)
                name = "aligned" if aligned else "float32"
                routing = "the engine's" if replays else "its own"
                lines.append(f"| {engine} | {name} | {routing} | {distance:.2e} | {kl:.2e} | {100 * agreement:.2f} % |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sweep.no_arguments("moe")
    table = measure()
    sweep.rewrite("moe", f"Written by `python results/moe.py`.\n\n{table}")
    print(table)
