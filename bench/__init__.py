"""Timing of alternating pairs, because a machine's speed drifts, and inputs to time. Used by
bench/gpu_parts.py and results/against_trl.py."""

from __future__ import annotations

import math
import time

import machinery.startup  # isort: skip  # noqa: F401

import numpy as np
import torch
from tqdm import tqdm

import batching
import config
import objectives
from machinery import settings
from rollout import Response, Rollout, as_groups
from sampling import Sampling
from tasks.arith import arithmetic_tokenizer


def alternate(a, b, pairs: int, name: str) -> dict:
    """Run a and b alternately, after two unmeasured runs of each; return `compare` of their times."""
    for _ in range(2):
        a()
        b()
    times = []
    for i in tqdm(range(pairs), desc=name, leave=False):
        if i % 2 == 0:
            times.append((seconds(a), seconds(b)))
        else:
            times.append((seconds(b), seconds(a))[::-1])
    return compare(times)


def seconds(f) -> float:
    """The duration of one call."""
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def compare(times: list[tuple[float, float]]) -> dict:
    """Geometric mean of a / b with its 95 % interval, and medians, from pairs of seconds (a, b)."""
    t = np.array(times)
    log = np.log(t[:, 0] / t[:, 1])
    half = 1.96 * log.std(ddof=1) / math.sqrt(len(log)) if len(log) > 1 else math.nan
    return {
        "ratio": math.exp(log.mean()),
        "low": math.exp(log.mean() - half),
        "high": math.exp(log.mean() + half),
        "a_s": float(np.median(t[:, 0])),
        "b_s": float(np.median(t[:, 1])),
        "pairs": len(t),
    }


def shaped(folder: str, hidden=128, inter=384, layers=4, vocab=256, seed=0, **more):
    """A Qwen3-shaped model with random weights, 0.8M parameters by default; saved in `folder`
    unless it is empty."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": max(1, hidden // 64),
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**{**shape, **more}))
    if folder:
        model.save_pretrained(folder)
        arithmetic_tokenizer().save_pretrained(folder)
    return model


def resolved(**changes) -> config.Config:
    """A configuration with one model on one rank."""
    usual = {"rollout": "hf", "actor": "none", "micro_tokens": config.MICRO_TOKENS}
    return settings.resolve(config.Config(**{**usual, **changes}), 1)


def random_groups(
    rng, n: int, length: int, vocabulary: int, K: int = 0
) -> list[Rollout]:
    """n groups of 8 responses of `length` random tokens, with K random top log-probabilities."""
    prompts, responses = [], []
    for _ in range(n):
        prompts.append(rng.integers(0, vocabulary, 32).astype(np.int32))
        group = []
        for _ in range(8):
            top_logp = rng.uniform(-12, -4, (length, K)).astype(np.float32)
            response = Response(
                tokens=rng.integers(0, vocabulary, length).astype(np.int32),
                loss_mask=np.ones(length, bool),
                logp_inf=np.full(length, -11.0, np.float32),
                topk_ids=rng.integers(0, vocabulary - K, (length, 1), np.int32)
                + np.arange(K, dtype=np.int32),
                topk_logp=-np.sort(-top_logp),
                finish_reason="stop",
                reward=float(rng.integers(0, 2)),
            )
            group.append(response)
        responses.append(group)
    return as_groups("bench", prompts, responses, Sampling())


def update(learner, groups: list[Rollout]) -> None:
    """Do one optimizer step on these groups."""
    batch = batching.collate(groups, learner.cfg, learner.version)
    stats = objectives.prepare(batch, learner.comm, learner.cfg, {})
    learner.step(learner.backward(batch, stats))
