"""Jackpot in one file: a small actor samples all responses, a larger policy learns from them.

    python mini.py                                             # three minutes on two CPU cores
    python mini.py --model=Qwen/Qwen3-1.7B --actor=Qwen/Qwen3-0.6B --data=gsm8k.jsonl \\
        --lr=1e-6 --actor_lr=3e-6 --max_tokens=512 --rollout_batch=64 --train_batch=64

Read `jackpot` first: it is the whole algorithm (arXiv 2602.06107, Alg. 1). Optimal budgeted
rejection sampling (OBRS) keeps a token with probability min(1, p_policy / (lambda p_actor)), and
reweights the kept ones. PPO updates both models. Distillation keeps the actor close to the policy.

Without --model, two small models learn to add, after a warm start. --data: JSONL with `problem`
(or `question`) and `answer`. A response is correct if it ends and its last number is the answer's.
Under equal settings train.py --rollout=hf logs the same metrics up to rounding (test_mini.py).

Distributions: inf sampled the responses, ref is the policy before a rollout's updates, new is the
policy now. Shapes: B responses, P prompt tokens, T response tokens, V vocabulary, G group size.
"""

import hashlib
import json
import math
import os
import random
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

# Settings. Names of train.py's flags mean the same, except EVAL_PROBLEMS. The command line
# changes a setting: --steps=100.
MODEL = ""  # policy: a folder or hub id; needs ACTOR and DATA; "": the toy models
ACTOR = ""  # the model that samples, with the same tokenizer
DATA = ""  # JSONL file of problems and answers
STEPS = 45  # optimizer updates
WARMUP_STEPS = 5
LR = 1e-4
ACTOR_LR = 3e-4
ROLLOUT_BATCH = 256  # responses per rollout
TRAIN_BATCH = 256  # responses in one update
MICRO_BATCH = 256  # responses in one forward pass
GROUP_SIZE = 8  # G
MAX_TOKENS = 32  # maximum response length
GRAD_CLIP = 0.3  # maximum gradient norm per model
OBRS_LAMBDA = 1.0  # a larger lambda rejects more tokens
OBRS_C1 = 3.0  # cap of the OBRS weight
CLIP_LOW = 0.2  # PPO
CLIP_HIGH = 0.28
ACTOR_IS_CAP = 2.0  # cap of the importance weight in the actor's loss
DISTILL_LAMBDA = 1.0  # weight of the distillation loss
TASK_MIN_OPS = 3  # toy task: number of operations
TASK_MAX_OPS = 5
TASK_OPERAND = 9  # largest operand
TASK_TOTAL = 19  # largest running total
BASE_ACCURACY = 0.3  # accuracy at which a warm start stops
EVAL_PROBLEMS = 256  # exactly: a smaller file repeats
SEED = 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Samples(NamedTuple):
    """B responses. A row is a left-padded prompt and a right-padded response."""

    ids: torch.Tensor  # (B, P + T)
    attend: torch.Tensor  # (B, P + T) 0 on the padding of prompts, else 1
    mask: torch.Tensor  # (B, T) True on the response, including the end token
    logp_inf: torch.Tensor  # (B, T) log-probability of each token under inf
    reward: torch.Tensor  # (B,)
    adv: torch.Tensor = None  # (B, 1) advantage of each response
    mask_uniforms: torch.Tensor = None  # (B, T) uniform numbers for the OBRS mask


def jackpot(new, ref, batch):
    """Jackpot's per-token loss (B, T) and per-token metrics.

    new, ref: log-probabilities (B, T, V) of (policy, actor), now and before this rollout's
    updates. ref has no gradient. The target of OBRS is p_ref."""
    policy_new, actor_new = new
    policy_ref, actor_ref = ref
    tokens = batch.ids[:, -batch.mask.shape[1] :, None]
    # Policy: OBRS, then PPO.
    logp = policy_new.gather(2, tokens)[..., 0]
    logp_ref = policy_ref.gather(2, tokens)[..., 0]
    r = (logp_ref - batch.logp_inf).clamp(-20, 20).exp()  # p_ref / p_inf
    accept = (r / OBRS_LAMBDA).clamp_max(1)  # Eq. 3: a = min(1, p_ref / (lambda p_inf))
    keep = (batch.mask_uniforms < accept).to(accept.dtype)  # Eq. 5: mask ~ Bernoulli(a)
    z = torch.minimum(actor_ref.exp(), policy_ref.exp() / OBRS_LAMBDA).sum(-1)  # Eq. 4
    weight = z * r.clamp_min(OBRS_LAMBDA)  # Alg. 1, line 23: w = Z max(lambda, r)
    rho = weight.clamp_max(OBRS_C1)  # line 24: rho = min(w, c1)
    surrogate, clipped = ppo(logp, logp_ref, batch.adv)
    policy_loss = -keep * rho * surrogate  # Eq. 5
    # Actor: PPO with a capped importance weight (Eq. 6), and distillation (Eq. 7).
    actor_logp = actor_new.gather(2, tokens)[..., 0]
    actor_logp_ref = actor_ref.gather(2, tokens)[..., 0]
    actor_r = (actor_logp_ref - batch.logp_inf).clamp(-20, 20).exp()
    actor_surrogate, _ = ppo(actor_logp, actor_logp_ref, batch.adv)
    actor_loss = -actor_r.clamp_max(ACTOR_IS_CAP) * actor_surrogate
    target = policy_new.detach()
    distill = (target.exp() * (target - actor_new)).sum(-1)  # KL(policy || actor)
    loss = policy_loss + actor_loss + DISTILL_LAMBDA * distill  # Eq. 8
    metrics = {
        "loss": loss,
        "entropy": -(target.exp() * target).sum(-1),
        "clip_fraction": clipped,
        "distill_kl": distill,
        "actor/loss": actor_loss,
        "obrs/accept_rate": keep,
        "obrs/z": z,
        "rollout_corr/k3_kl": r - r.log() - 1,  # its mean under p_inf is KL(inf || ref)
    }
    return loss, metrics


def ppo(logp, logp_ref, adv):
    """min(s A, clip(s, 1 - low, 1 + high) A) with s = p_new / p_ref, and the clip mask."""
    s = (logp - logp_ref).clamp(-20, 20).exp()
    clipped = s.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * adv
    return torch.minimum(s * adv, clipped), clipped < s * adv


def train(policy, actor, task):
    """Train both models in place; return the metrics of each update."""
    models = (policy.eval(), actor.eval())  # eval: no dropout
    groups = [{"params": policy.parameters(), "lr": LR}]
    groups += [{"params": actor.parameters(), "lr": ACTOR_LR}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    ramp = [lambda step: min(1, (step + 1) / max(1, WARMUP_STEPS))] * 2
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, ramp)
    updates_per_rollout = ROLLOUT_BATCH // TRAIN_BATCH
    history = []
    bar = tqdm(range(STEPS), desc="jackpot")
    for step in bar:
        # 1. The actor samples.
        if step % updates_per_rollout == 0:
            rollout_batch = rollout(actor, task, step // updates_per_rollout)
            ref = None
            if updates_per_rollout > 1:  # ref is computed before the first update
                with torch.no_grad():
                    ref = [log_probs(model, rollout_batch) for model in models]
        # 2. Forward and backward, in micro-batches. The loss is the mean over tokens.
        start = step % updates_per_rollout * TRAIN_BATCH
        stop = start + TRAIN_BATCH
        n_tokens = rollout_batch.mask[start:stop].sum()
        metrics = {}
        for first in range(start, stop, MICRO_BATCH):
            rows = slice(first, min(first + MICRO_BATCH, stop))
            batch = Samples(*(column[rows] for column in rollout_batch))
            new = [log_probs(model, batch) for model in models]
            batch_ref = [x[rows] for x in ref] if ref else [x.detach() for x in new]
            loss, token_metrics = jackpot(new, batch_ref, batch)
            (loss[batch.mask].sum() / n_tokens).backward()
            for name, values in token_metrics.items():
                mean = float(values.detach()[batch.mask].double().sum() / n_tokens)
                metrics[name] = metrics.get(name, 0.0) + mean
        # 3. Update both models.
        metrics["reward"] = float(rollout_batch.reward[start:stop].double().mean())
        for name, model in (("grad_norm", policy), ("actor/grad_norm", actor)):
            metrics[name] = float(clip_grad_norm_(model.parameters(), GRAD_CLIP))
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        history.append(metrics)
        bar.set_postfix(reward=metrics["reward"], kl=metrics["distill_kl"])
    return history


def log_probs(model, batch):
    """log p over the vocabulary at each response token: (B, T, V)."""
    T = batch.mask.shape[1]
    G = math.gcd(GROUP_SIZE, len(batch.ids))  # rows that share a prompt, processed once
    prompt, cache = forward(model, batch.ids[::G, :-T], batch.attend[::G, :-T])
    cache.batch_repeat_interleave(G)
    response, _ = forward(model, batch.ids[:, -T:-1], batch.attend[:, :-1], cache)
    logits = torch.cat([prompt[:, -1:].repeat_interleave(G, 0), response], 1)
    return logits.log_softmax(-1)


def forward(model, tokens, attend, cache=None):
    """Return logits (B, N, V) and the KV cache. tokens (B, N): attend's last N columns."""
    place = (attend.cumsum(1) - 1).clamp_min(0)  # without padding
    options = {"position_ids": place[:, -tokens.shape[1] :], "past_key_values": cache}
    out = model(input_ids=tokens, attention_mask=attend, use_cache=True, **options)
    return out.logits, out.past_key_values


# Sampling: a draw depends only on its key, not on the batch or the order of calls.
def uniforms(n, *key):
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    bits = np.random.Philox(key=int.from_bytes(digest, "little"))
    return torch.from_numpy(np.random.Generator(bits).random(n))


def response_seed(*key):
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def rollout(actor, task, number):
    """Rollout number `number` (from 0): the actor's responses to the next problems."""
    n_groups = ROLLOUT_BATCH // GROUP_SIZE
    indices = range(number * n_groups, (number + 1) * n_groups)
    # Keys as in train.py: uid of the group (sampler, process, number), and index in the group.
    keys = [(("rank0", 0, index), i) for index in indices for i in range(GROUP_SIZE)]
    problems = [task.problem("train", index) for index in indices]
    batch = sample(actor, task, problems, [response_seed(SEED, *key) for key in keys])
    reward = batch.reward.view(-1, GROUP_SIZE)
    std = reward.std(1, keepdim=True)
    adv = (reward - reward.mean(1, keepdim=True)) / (std + 1e-6)  # GRPO
    u = [uniforms(batch.mask.shape[1], "mask", SEED, *key) for key in keys]
    return batch._replace(adv=adv.view(-1, 1), mask_uniforms=torch.stack(u).to(DEVICE))


@torch.no_grad()
def sample(model, task, problems, seeds):
    """Sample one response per seed at temperature 1, without advantages and mask uniforms."""
    G = len(seeds) // len(problems)
    prompts = [torch.tensor(task.encode(problem)) for problem, _ in problems]
    ids = pad_sequence(prompts, batch_first=True, padding_side="left").to(DEVICE)
    real = [torch.ones_like(prompt) for prompt in prompts]
    attend = pad_sequence(real, batch_first=True, padding_side="left").to(DEVICE)
    logits, cache = forward(model, ids, attend)
    cache.batch_repeat_interleave(G)
    logits = logits[:, -1:].repeat_interleave(G, 0)
    ids, attend = (x.repeat_interleave(G, 0) for x in (ids, attend))
    ends = torch.tensor(task.ends, device=DEVICE)
    draws = torch.stack([uniforms(MAX_TOKENS, "sample", x).to(DEVICE) for x in seeds])
    unfinished = torch.ones(len(ids), dtype=torch.bool, device=DEVICE)
    columns = []
    for t in range(MAX_TOKENS):
        logp = logits[:, -1].float().log_softmax(-1)  # (B, V)
        cdf = logp.double().exp().cumsum(-1)
        token = torch.searchsorted(cdf, draws[:, t, None] * cdf[:, -1:], right=True)
        columns.append((unfinished, logp.gather(1, token)[:, 0]))
        ids = torch.cat([ids, token], 1)
        attend = torch.cat([attend, torch.ones_like(token)], 1)
        unfinished = unfinished & ~torch.isin(token[:, 0], ends)
        if not unfinished.any():
            break
        logits, cache = forward(model, token, attend, cache)
    mask, logp_inf = (torch.stack(column, 1) for column in zip(*columns, strict=True))
    new = ids[:, -mask.shape[1] :]
    responses = [row[on].tolist() for row, on in zip(new, mask, strict=True)]
    rewards = [task.grade(x, problems[i // G][1]) for i, x in enumerate(responses)]
    return Samples(ids, attend, mask, logp_inf, torch.tensor(rewards, device=DEVICE))


def evaluate(model, task):
    """pass@1 on held-out problems, one response each, and the standard error."""
    problems = [task.problem("test", i) for i in range(EVAL_PROBLEMS)]
    seeds = [response_seed("eval", SEED, problem, 0) for problem, _ in problems]
    mean = float(sample(model, task, problems, seeds).reward.mean())
    return mean, math.sqrt(mean * (1 - mean) / (EVAL_PROBLEMS - 1))


# Tasks: problem(split, index) -> (text, answer), encode(text), grade(tokens, answer), ends
class File:
    """Problems of a JSONL file; every eighth row is held out. The answer is a number."""

    def __init__(self, path, tokenizer, ends):
        lines = Path(path).read_text("utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line]
        train = [row for i, row in enumerate(rows) if i % 8]
        self.rows = {"train": train, "test": rows[::8]}
        self.tokenizer, self.ends = tokenizer, ends

    def problem(self, split, index):
        row = self.rows[split][index % len(self.rows[split])]
        return row.get("problem") or row["question"], last_number(str(row["answer"]))

    def encode(self, text):
        if self.tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            options = {"tokenize": False, "add_generation_prompt": True}
            text = self.tokenizer.apply_chat_template(chat, **options)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def grade(self, tokens, answer):
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return float(tokens[-1] in self.ends and last_number(text) == answer)


def last_number(text):
    return float((["nan"] + re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")))[-1])


class Addition:
    """The toy: "12 + 7 - 3 :" -> "12 + 7 = 19 ; 19 - 3 = 16 # 16"; only the last "# 16" counts."""

    words = ["<pad>", "<eos>", "<unk>", "+", "-", "=", ";", ":", "#"]
    words += [str(n) for n in range(200)]
    ends = [1]

    def problem(self, split, index, attempt=0):
        rng = random.Random(f"0/{split}/{index}/{attempt}")
        total = rng.randint(0, TASK_TOTAL)
        text = str(total)
        for _ in range(rng.randint(TASK_MIN_OPS, TASK_MAX_OPS)):
            operand = rng.randint(1, TASK_OPERAND)
            plus = rng.random() < 0.5
            if total + operand > TASK_TOTAL or total < operand:
                plus = total < operand  # the operation that keeps the total in range
            total += operand if plus else -operand
            text += f" + {operand}" if plus else f" - {operand}"
        held_out = hashlib.sha256(text.encode()).digest()[0] < 32  # one in eight
        if held_out == (split == "test"):
            return text, str(total)
        return self.problem(split, index, attempt + 1)

    def encode(self, text):
        return [self.words.index(word) for word in f"{text} :".split()]

    def grade(self, tokens, answer):
        numbers = [token for token in tokens if token > 2]  # no <pad>, <eos>, <unk>
        right = [self.words.index("#"), self.words.index(answer)]
        return float(tokens[-1] == 1 and numbers[-2:] == right)

    def demonstration(self, index):
        """Prompt, and a solution in which each step is wrong with probability 0.22."""
        text, _ = self.problem("train", index)
        rng = random.Random(text)
        words = text.split()
        total = int(words[0])
        steps = []
        for sign, operand in zip(words[1::2], words[2::2], strict=True):
            slip = rng.choice((-2, -1, 1, 2)) if rng.random() < 0.22 else 0
            result = max(total + int(sign + operand) + slip, 0)
            steps.append(f"{total} {sign} {operand} = {result}")
            total = result
        solution = (" ; ".join(steps) + f" # {total} <eos>").split()
        return self.encode(text), [self.words.index(word) for word in solution]


def warm_start(task, seed, hidden, layers):
    """Train a small model on demonstrations until it reaches BASE_ACCURACY."""
    sizes = dict(vocab_size=256, hidden_size=hidden, intermediate_size=3 * hidden)
    sizes |= dict(num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64)
    sizes |= dict(num_hidden_layers=layers, head_dim=32, tie_word_embeddings=True)
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    title = f"warm start, {model.num_parameters():,} weights"
    for step in tqdm(range(2000), desc=title):
        first = 10**9 * (seed + 1) + 64 * step
        rows = [task.demonstration(i) for i in range(first, first + 64)]
        ids = [torch.tensor(p + solution) for p, solution in rows]
        labels = [torch.tensor([-100] * len(p) + solution) for p, solution in rows]
        ids = pad_sequence(ids, batch_first=True).to(DEVICE)
        labels = pad_sequence(labels, batch_first=True, padding_value=-100).to(DEVICE)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        if step % 20 == 19 and evaluate(model, task)[0] >= BASE_ACCURACY:
            break
    return model


def load():
    """Policy, actor and task of the settings."""
    if not MODEL:
        task = Addition()
        return warm_start(task, 0, 192, 3), warm_start(task, 1, 128, 2), task
    load_model = transformers.AutoModelForCausalLM.from_pretrained
    # SDPA would ignore the cap of Gemma 2's attention scores
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    models = [load_model(x, **options).to(DEVICE) for x in (MODEL, ACTOR)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    ends = [model.generation_config.eos_token_id for model in models]
    return *models, File(DATA, tokenizer, np.unique(np.hstack(ends)).tolist())


def main():
    policy, actor, task = load()
    before = [evaluate(model, task) for model in (policy, actor)]
    train(policy, actor, task)
    after = [evaluate(model, task) for model in (policy, actor)]
    for name, *scores in zip(("policy", "actor"), before, after, strict=True):
        scores = [f"{100 * mean:.1f} +- {100 * se:.1f} %" for mean, se in scores]
        print(f"{name}: held-out pass@1 {' -> '.join(scores)} after {STEPS} updates")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        flag, _, value = argument.partition("=")
        name = flag.removeprefix("--").upper()
        # the expression finds digits outside ASCII
        if name not in globals() or not value or re.search(r"[^\D0-9]", value):
            sys.exit(f"error: {argument}: write --name=value; mini.py has the names")
        globals()[name] = type(globals()[name])(os.path.expanduser(value))
    main()
