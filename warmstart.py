"""Base models for the embedded default: two small Qwen3-shaped models, warm-started on the arithmetic task.

RL needs a base model that succeeds sometimes. With no network at run time we make our own, once: a policy and a smaller
actor, each trained by supervised steps on generated solutions until its *sampled* accuracy (temperature 1, the law RL
starts from) reaches a target, and saved with save_pretrained like any other model folder. Different seeds and sizes make
them err in different places: that is the actor-policy mismatch that the repository is about.

    python warmstart.py                # writes out/base/{policy,actor}-<key>; a second call finds them there
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from engines import HFEngine
from rollout import Sampling, request_seed
from tasks import encode, grade_all
from tasks import VOCAB, arithmetic_tokenizer, make_task

# every dimension a multiple of 32, so that quantized formats and kernels fit later
SHAPES = {
    "policy": dict(
        hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3
    ),
    "actor": dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ),
}
CONTEXT = 512
SLIPS = 0.22  # share of careless steps in the demonstrations: knowledge to sharpen, not facts to discover
BATCH, LR, WARMUP, EVAL_EVERY, EVAL_PROBLEMS = 64, 2e-3, 50, 20, 256


def base_model(name: str, cfg) -> str:
    """Folder of the embedded base model `name` ("policy" or "actor"), made now if it is not there yet."""
    task = make_task(cfg)
    target = cfg.base_accuracy if name == "policy" or cfg.actor_base_accuracy is None else cfg.actor_base_accuracy
    recipe = {
        "shape": SHAPES[name],
        "task": {k: v for k, v in vars(task).items() if k != "explain" or v},
        "target": target,
        "batch": BATCH,
        "lr": LR,
        "slips": SLIPS,
        "format": 3,
    }
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:10]
    folder = Path(cfg.base_dir) / f"{name}-{key}"
    if not (folder / "config.json").is_file():
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
        warm_start(name, task, target, scratch)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(scratch, folder)  # whole or not at all
    return str(folder)


def accuracy(model, tokenizer, task, n: int = EVAL_PROBLEMS, split: str = "train", offset: int = 10**6) -> float:
    """Share of n problems that one sampled response solves, at temperature 1."""
    problems = [task.problem(split, offset + i) for i in range(n)]
    prompts = [np.array(encode(tokenizer, p), np.int32) for p in problems]
    was = model.training
    groups = HFEngine(model).generate(
        prompts,
        [[request_seed("warm", i)] for i in range(n)],
        Sampling(max_tokens=task.max_response()),
        0,
        [tokenizer.eos_token_id],
    )
    model.train(was)
    grade_all(task, tokenizer, problems, groups)
    return sum(g[0].reward > 0.5 for g in groups) / n


def warm_start(name: str, task, target: float, folder: Path, max_steps: int = 6000) -> float:
    """Supervised steps until the sampled accuracy reaches `target`; saves model and tokenizer, returns the accuracy."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = arithmetic_tokenizer()
    state = torch.get_rng_state()
    torch.manual_seed(task.seed * 2 + (name == "actor"))
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **SHAPES[name],
        )
    )
    torch.set_rng_state(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    width, reached, seen = task.max_prompt() + task.max_response() + 1, 0.0, 0
    bar = tqdm(
        range(max_steps),
        desc=f"warm start {name} ({sum(p.numel() for p in model.parameters()) / 1e6:.2f}M)",
        leave=False,
    )
    for step in bar:
        ids, labels = torch.zeros(BATCH, width, dtype=torch.long), torch.full((BATCH, width), -100)
        for row in range(BATCH):
            problem = task.problem("train", (1 if name == "actor" else 2) * 10**9 + seen)
            seen += 1
            prompt = tokenizer.encode(problem.prompt)
            answer = tokenizer.encode(task.solution(problem, SLIPS)) + [tokenizer.eos_token_id]
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        longest = int((labels != -100).any(0).nonzero().max()) + 2  # a column of padding stays
        ids, labels = ids[:, :longest], labels[:, :longest]
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / WARMUP)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % EVAL_EVERY == 0:
            reached = accuracy(model, tokenizer, task)
            bar.set_postfix(loss=f"{loss.item():.3f}", accuracy=f"{reached:.2f}")
            if reached >= target:
                break
    else:
        raise RuntimeError(
            f"the warm start reached {reached:.2f} in {max_steps} steps, not {target}: "
            "lower --base_accuracy or make the task easier (--task_max_ops, --task_operand)"
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return reached


if __name__ == "__main__":
    import config

    try:
        made = config.parse()
    except ValueError as e:
        raise SystemExit(f"error: {e}")
    for name in SHAPES:
        print(base_model(name, made))
