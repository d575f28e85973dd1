"""The embedded base models: two small models of the Qwen3 architecture, warm-started on arithmetic.

RL needs a base model that succeeds sometimes. The default must run without a network, so its models
are made here once: a policy and a smaller actor. Supervised steps on generated solutions train each
model until its *sampled* accuracy at temperature 1 reaches a target. The models are then saved in
out/base. Different seeds and sizes give them different errors, which is the actor-policy
mismatch that this repository studies.
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

from config import TaskFlags
from machinery.checkpoint import models
from machinery.flags import UserError, embedded_model
from model.engines import HFEngine
from rollout import request_seed
from sampling import Sampling
from tasks import grade_all, make_task
from tasks.arith import VOCAB, arithmetic_tokenizer
from tasks.prompts import encode

# Every dimension is a multiple of 32, so that quantized formats and kernels fit.
SHAPES = {
    "policy": dict(
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
    ),
    "actor": dict(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
}
CONTEXT = 512  # maximum tokens of prompt and response together
# Share of wrong steps in the demonstrations: RL then has to sharpen a skill, not to discover it.
# n steps are all right with probability (1 - SLIPS)^n.
SLIPS = 0.22
BATCH = 64
LR = 2e-3
WARMUP = 50
EVAL_EVERY = 20
EVAL_PROBLEMS = 256
CONFIRM_PROBLEMS = 1024  # different problems that confirm a reached target
MOST_STEPS = 6000
# index of the first demonstration problem of each model
DEMONSTRATED = {"actor": 10**9, "policy": 2 * 10**9}
# index of the first problem for measuring accuracy; RL and the demonstrations use other problems
MEASURED = 10**6


def base_model(flag: str, value: str, cfg: TaskFlags) -> str:
    """Folder of the embedded base model that a flag names (base:actor@0.2). Makes the model if it
    is missing."""
    name, target = embedded_model(flag, value)
    task = make_task(cfg)
    folder = Path(models.BASE_DIR) / f"{name}-{recipe_key(name, task, target)}"
    if (folder / "config.json").is_file():
        models.check_weights(folder)
    else:
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
        warm_start(name, task, target, scratch)
        if (folder / "config.json").is_file():  # a concurrent process was first
            shutil.rmtree(scratch)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(scratch, folder)  # atomic
    return str(folder)


def recipe_key(name: str, task, target: float) -> str:
    """Ten hexadecimal digits of a digest of a base model's settings. Constants that are not listed
    here, such as WARMUP and EVAL_EVERY, need a new "format"."""
    recipe = {
        "shape": SHAPES[name],
        "task": {k: v for k, v in vars(task).items() if k != "explain" or v},
        "target": target,
        "batch": BATCH,
        "lr": LR,
        "slips": SLIPS,
        "format": 4,
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:10]


def warm_start(name: str, task, target: float, folder: Path) -> float:
    """Train until the sampled accuracy reaches `target`, save model and tokenizer, and return the
    accuracy.

    Raises UserError if MOST_STEPS training steps do not reach the target."""
    tokenizer = arithmetic_tokenizer()
    model = new_model(name, task.seed * 2 + (name == "actor"), tokenizer)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01
    )
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    reached = 0.0
    bar = tqdm(
        range(MOST_STEPS), desc=f"warm start {name} ({millions:.2f}M)", leave=False
    )
    for step in bar:
        ids, labels = demonstrations(task, tokenizer, DEMONSTRATED[name] + step * BATCH)
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / WARMUP)
        optimizer.zero_grad(set_to_none=True)
        loss = backward(model, ids, labels)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % EVAL_EVERY == 0:
            reached = accuracy(model, tokenizer, task, 0, EVAL_PROBLEMS)
            if reached >= target:
                reached = accuracy(
                    model, tokenizer, task, EVAL_PROBLEMS, CONFIRM_PROBLEMS
                )
            bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{reached:.2f}")
            if reached >= target:
                break
    else:
        raise UserError(
            f"the warm start reached {reached:.2f} in {MOST_STEPS} steps, not {target}: lower the accuracy "
            f"(base:{name}@0.2) or make the task easier (--arith)"
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return reached


def config_of(name: str, **more):
    """The transformers config of a model of SHAPES."""
    from transformers import Qwen3Config

    sizes = dict(
        vocab_size=VOCAB,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    return Qwen3Config(**sizes, bos_token_id=None, **more, **SHAPES[name])


def new_model(name: str, seed: int, tokenizer):
    """A model of SHAPES with random weights from `seed`; torch's random state does not change."""
    from transformers import Qwen3ForCausalLM

    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = config_of(name, **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def demonstrations(task, tokenizer, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), both (BATCH, S) int64: solutions, some steps wrong, of BATCH problems from
    number `first` on.

    Labels are -100, which the loss ignores, on prompt and padding."""
    width = task.fit(tokenizer) + task.max_response() + 1
    ids = torch.zeros(BATCH, width, dtype=torch.long)
    labels = torch.full((BATCH, width), -100)
    for row in range(BATCH):
        problem = task.problem("train", first + row)
        prompt = tokenizer.encode(problem.prompt)
        answer = tokenizer.encode(task.solution(problem, SLIPS)) + [
            tokenizer.eos_token_id
        ]
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def backward(model, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Add the gradient of a batch's mean loss over its labels, and return the loss. ids, labels:
    (BATCH, S).

    Rows are sorted by length and processed in four parts, which reduces padding."""
    ends = (labels != -100).long().cumsum(1).argmax(1) + 1
    total = 0.0
    for rows in ends.argsort().chunk(4):
        longest = ends[rows].max()
        logits = model(input_ids=ids[rows, : longest - 1], use_cache=False).logits
        wanted = labels[rows, 1:longest]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        loss = loss / (labels != -100).sum()
        loss.backward()
        total += loss.item()
    return total


def accuracy(model, tokenizer, task, first: int, n: int) -> float:
    """Accuracy of one sampled response per problem at temperature 1, on n problems from number
    `first` on."""
    problems = [task.problem("train", MEASURED + first + i) for i in range(n)]
    prompts = [np.array(encode(tokenizer, p), np.int32) for p in problems]
    seeds = [[request_seed("warm", first + i)] for i in range(n)]
    sampling = Sampling(max_tokens=task.max_response())
    groups = HFEngine(model).generate(
        prompts, seeds, sampling, 0, [tokenizer.eos_token_id]
    )
    model.train()  # HFEngine evaluates
    grade_all(task, tokenizer, problems, groups)
    return sum(group[0].reward > 0.5 for group in groups) / n
