"""Jackpot in one file: a small actor writes every response, a bigger policy learns from them, both train.

The actor samples every token (p_inf), but the policy learns from them. Optimal budgeted rejection sampling
(OBRS) rejects tokens that the actor likes more than the policy does, and reweights what it accepts; PPO
does the rest, and distillation pulls the actor along. Equations are those of Jackpot, arXiv 2602.06107.

    python mini.py            # five minutes on two cores, of which base models take two at first use

Left out are vLLM, torchrun, GPUs and weight sync: the actor samples in plain torch, in this process, with
the weights that are trained. Left out are quantized engines, delayed or remote samplers, temperature and
truncation, which all open another gap between sampler and learner. Left out are all other corrections,
surrogates and advantages, and large vocabularies, for which Z can only be bracketed and logits come in
chunks. Left out are flags, resuming, other tasks and most metrics; train.py has all of this, and with
--rollout=hf and the sizes below its numbers equal this file's up to rounding (tests/test_mini.py).

Names: inf, the distribution that sampled; ref, the policy before the updates on this batch; new, the
policy now; A, advantage. B responses, P prompt tokens, T response tokens, V words, G responses to a prompt.
"""

import hashlib
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_, rnn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

# The settings, named as train.py's flags. Change them here.
STEPS, WARMUP_STEPS = 70, 5  # optimizer updates; configs/demo.toml has 150
LR, ACTOR_LR = 1e-4, 3e-4
ROLLOUT_BATCH, TRAIN_BATCH = 256, 256  # responses sampled at once, responses in one update
GROUP_SIZE, MAX_TOKENS = 8, 32  # G, longest response
GRAD_CLIP = 0.3  # largest gradient norm, each model on its own
OBRS_LAMBDA = 1.0  # the larger, the more is rejected, and the closer is the rest to the target
OBRS_C1 = 3.0  # cap of the OBRS weight
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # PPO
ACTOR_IS_CAP, DISTILL_LAMBDA = (
    2.0,
    1.0,
)  # the actor's loss: cap of its importance weight, weight of distillation
TASK_MIN_OPS, TASK_MAX_OPS = 3, 5  # operations in a problem
TASK_OPERAND, TASK_TOTAL = 9, 29  # largest operand, largest running total
EVAL_PROBLEMS = 1024
SEED = 0
OUT = "out/mini.png"


# -- Randomness: every draw is a function of a key, not of the order of calls or the size of a batch
def uniforms(n, *key):
    """n uniform numbers in [0, 1), from a counter-based generator whose key is a hash."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return torch.from_numpy(generator.random(n))


def response_seed(*key):
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# -- The task: "12 + 7 - 3 :" wants "12 + 7 = 19 ; 19 - 3 = 16 # 16"; every number is one token
WORDS = ["<pad>", "<eos>", "<unk>", "+", "-", "=", ";", ":", "#"] + [str(n) for n in range(200)]
EOS = WORDS.index("<eos>")


def encode(text):
    return torch.tensor([WORDS.index(word) for word in text.split()])


def problem(split, index, attempt=0):
    """(text, answer) of problem `index`; a hash of the text puts one text in eight into "test"."""
    rng = random.Random(f"0/{split}/{index}/{attempt}")
    total = rng.randint(0, TASK_TOTAL)
    text = str(total)
    for _ in range(rng.randint(TASK_MIN_OPS, TASK_MAX_OPS)):
        operand = rng.randint(1, TASK_OPERAND)
        plus = rng.random() < 0.5
        if total + operand > TASK_TOTAL or total < operand:
            plus = total < operand  # the one direction that stays inside the range
        total += operand if plus else -operand
        text += f" + {operand}" if plus else f" - {operand}"
    held_out = hashlib.sha256(text.encode()).digest()[0] < 32  # one problem in eight
    if held_out == (split == "test"):
        return text, str(total)
    return problem(split, index, attempt + 1)


def grade(tokens, answer):
    """1 if the response ends by itself, and ends with `# ANSWER`; else 0."""
    words = tokens[tokens > 2]  # without <pad>, <eos> and <unk>
    return float(tokens[-1] == EOS and torch.equal(words[-2:], encode(f"# {answer}")))


class Batch(NamedTuple):
    """B responses. A row is a prompt, padded on the left to P tokens, and a response, padded on the right."""

    ids: torch.Tensor  # (B, P + T)
    attend: torch.Tensor  # (B, P + T) 0 on the padding before a prompt, else 1
    mask: torch.Tensor  # (B, T) True on the tokens of the response, <eos> among them
    logp_inf: torch.Tensor  # (B, T) log-probability of each token when it was sampled
    reward: torch.Tensor  # (B,)
    adv: torch.Tensor = None  # (B, 1) the advantage of a response is that of each of its tokens
    mask_uniforms: torch.Tensor = None  # (B, T) what OBRS's mask is drawn with


def read(model, tokens, attend, cache=None):
    """Logits of the tokens (B, N) that stand last in `attend` (B, M), and the keys and values of all M."""
    position = (attend.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]  # padding does not count
    out = model(
        input_ids=tokens, attention_mask=attend, position_ids=position, past_key_values=cache
    )
    return out.logits, out.past_key_values


@torch.no_grad()
def sample(model, problems, seeds):
    """A response for each seed at temperature 1, G to a problem: a Batch without advantages and mask draws.

    The token is the first at which the cumulative probability exceeds a uniform number."""
    G = len(seeds) // len(problems)
    prompts = [encode(f"{text} :") for text, _ in problems]
    ids = rnn.pad_sequence(prompts, batch_first=True, padding_side="left")  # with 0, <pad>
    logits, cache = read(model, ids, (ids > 0).long())
    cache.batch_repeat_interleave(G)  # a prompt is read once for its G responses
    logits, ids = logits.repeat_interleave(G, 0), ids.repeat_interleave(G, 0)
    attend, going = (ids > 0).long(), torch.ones(len(ids), dtype=torch.bool)
    draws = torch.stack([uniforms(MAX_TOKENS, "sample", seed) for seed in seeds])
    mask, logp_inf = [], []
    for t in range(MAX_TOKENS):
        logp = logits[:, -1].float().log_softmax(-1)  # (B, V)
        cdf = logp.double().exp().cumsum(-1)
        token = torch.searchsorted(cdf, draws[:, t, None] * cdf[:, -1:], right=True)
        mask.append(going)
        logp_inf.append(logp.gather(1, token)[:, 0])
        ids, attend = torch.cat([ids, token], 1), torch.cat([attend, torch.ones_like(token)], 1)
        going = going & (token[:, 0] != EOS)
        if not going.any():
            break
        logits, cache = read(model, token, attend, cache)
    mask = torch.stack(mask, 1)
    responses = [tokens[real] for tokens, real in zip(ids[:, -mask.shape[1] :], mask, strict=True)]
    reward = torch.tensor(
        [grade(tokens, problems[i // G][1]) for i, tokens in enumerate(responses)]
    )
    return Batch(ids, attend, mask, torch.stack(logp_inf, 1), reward)


def rollout(actor, number):
    """Rollout `number` (from 0): the actor's responses to the next problems."""
    groups = range(number * ROLLOUT_BATCH // GROUP_SIZE, (number + 1) * ROLLOUT_BATCH // GROUP_SIZE)
    # a response's key: its group as train.py names it (sampler, restarts, number), and its place in there
    keys = [(("rank0", 0, group), i) for group in groups for i in range(GROUP_SIZE)]
    seeds = [response_seed(SEED, *key) for key in keys]
    batch = sample(actor, [problem("train", group) for group in groups], seeds)
    reward = batch.reward.view(-1, GROUP_SIZE)
    adv = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)  # GRPO
    draws = torch.stack([uniforms(batch.mask.shape[1], "mask", SEED, *key) for key in keys])
    return batch._replace(adv=adv.view(-1, 1), mask_uniforms=draws)


def log_probs(model, batch):
    """log p(. | all before) over the vocabulary, at each token of the responses: (B, T, V)."""
    T, G = batch.mask.shape[1], GROUP_SIZE
    prompt, cache = read(model, batch.ids[::G, :-T], batch.attend[::G, :-T])
    cache.batch_repeat_interleave(G)
    response, _ = read(model, batch.ids[:, -T:-1], batch.attend[:, :-1], cache)
    return torch.cat([prompt[:, -1:].repeat_interleave(G, 0), response], 1).log_softmax(-1)


def ppo(logp, logp_ref, adv):
    """min(s A, clip(s, 1 - low, 1 + high) A) with s = p_new / p_ref, and where it is clipped."""
    s = (logp - logp_ref).clamp(-20, 20).exp()
    clipped = s.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * adv
    return torch.minimum(s * adv, clipped), clipped < s * adv


def jackpot(new, ref, batch):
    """Jackpot's joint loss, and what is worth watching.

    new, ref: the log_probs of (policy, actor), now and before the updates on this batch, the latter without
    gradient. The target of OBRS is p_ref: accepted tokens should look as if p_ref had sampled them."""
    policy_new, actor_new = new  # (B, T, V) each
    policy_ref, actor_ref = ref
    tokens = batch.ids[:, -batch.mask.shape[1] :, None]
    # the policy, by OBRS
    logp, logp_ref = (x.gather(2, tokens)[..., 0] for x in (policy_new, policy_ref))
    r = (logp_ref - batch.logp_inf).clamp(-20, 20).exp()  # p_tgt / p_inf, (B, T)
    a = (r / OBRS_LAMBDA).clamp_max(1)  # Eq. 3: a = min(1, p_tgt / (lambda p_inf))
    keep = (batch.mask_uniforms < a).to(a.dtype)  # Eq. 5: Mask ~ Bernoulli(a)
    # Eq. 4: Z = sum_x min(p_inf, p_tgt / lambda), exact: the learner sees both over the whole vocabulary
    z = torch.minimum(actor_ref.exp(), policy_ref.exp() / OBRS_LAMBDA).sum(-1)
    w = z * r.clamp_min(OBRS_LAMBDA)  # Alg. 1, line 23: w = Z max(lambda, p_tgt / p_inf)
    rho = w.clamp_max(
        OBRS_C1
    )  # line 24: rho = min(w, c1) min(p_ref / p_tgt, c2), the latter 1 here
    surrogate, clipped = ppo(logp, logp_ref, batch.adv)
    policy_loss = -keep * rho * surrogate  # Eq. 5; keep and rho come from ref, without gradient
    # the actor, by PPO on the same responses, and by distillation
    actor_logp, actor_logp_ref = (x.gather(2, tokens)[..., 0] for x in (actor_new, actor_ref))
    weight = (actor_logp_ref - batch.logp_inf).clamp(-20, 20).exp().clamp_max(ACTOR_IS_CAP)
    actor_loss = -weight * ppo(actor_logp, actor_logp_ref, batch.adv)[0]  # Eq. 6: no OBRS
    target = policy_new.detach()
    distill = (target.exp() * (target - actor_new)).sum(-1)  # Eq. 7: KL(sg p_theta,new || p_omega)
    # both: Eq. 8, a mean over tokens; the two objectives that are maximised have their minus above
    loss = (policy_loss + actor_loss + DISTILL_LAMBDA * distill)[batch.mask].mean()
    gap = (policy_ref - actor_ref).clamp_min(math.log(OBRS_LAMBDA))
    watched = {
        "entropy": -(target.exp() * target).sum(-1),
        "clip_fraction": clipped,
        "distill_kl": distill,
        "actor/loss": actor_loss,
        "obrs/accept_rate": keep,
        "obrs/z": z,
        "obrs/kl_after": z.log()
        + (policy_ref.exp() * gap).sum(-1),  # KL(p_tgt || accepted), by Eq. 4
        "rollout_corr/rollout_is_mean": rho,
        "rollout_corr/k3_kl": r - r.log() - 1,  # its mean over samples of p_inf is KL(inf || ref)
    }
    logged = {name: float(x.detach()[batch.mask].double().mean()) for name, x in watched.items()}
    return loss, {**logged, "loss": float(loss.detach()), "reward": float(batch.reward.mean())}


def train(policy, actor):
    """Train both in place; returns the metrics, one dict an update."""
    models = (policy.eval(), actor.eval())  # eval: no dropout
    rates = [
        {"params": policy.parameters(), "lr": LR},
        {"params": actor.parameters(), "lr": ACTOR_LR},
    ]
    optimizer = torch.optim.AdamW(rates, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARMUP_STEPS)
    )
    updates = ROLLOUT_BATCH // TRAIN_BATCH  # between two rollouts
    metrics, bar = [], tqdm(range(STEPS), desc="jackpot")
    for step in bar:
        # 1. The actor samples. If several updates follow, ref is computed before the first of them.
        if step % updates == 0:
            batch = rollout(actor, step // updates)
            with torch.no_grad():
                ref = [log_probs(model, batch) for model in models] if updates > 1 else None
        # 2. Both models are scored on a minibatch of whole groups, and learn from it.
        rows = slice(step % updates * TRAIN_BATCH, (step % updates + 1) * TRAIN_BATCH)
        part = Batch(*(column[rows] for column in batch))
        new = [log_probs(model, part) for model in models]
        part_ref = [logp.detach() for logp in new] if ref is None else [logp[rows] for logp in ref]
        loss, logged = jackpot(new, part_ref, part)
        loss.backward()
        logged["grad_norm"] = float(clip_grad_norm_(policy.parameters(), GRAD_CLIP))
        logged["actor/grad_norm"] = float(clip_grad_norm_(actor.parameters(), GRAD_CLIP))
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        metrics.append(logged)
        bar.set_postfix(
            reward=f"{logged['reward']:.3f}", accept=f"{logged['obrs/accept_rate']:.3f}"
        )
    return metrics


def evaluate(model):
    """pass@1 on held-out problems, one response to each, and its standard error."""
    problems = [problem("test", i) for i in range(EVAL_PROBLEMS)]
    seeds = [response_seed("eval", SEED, text, 0) for text, _ in problems]
    mean = float(sample(model, problems, seeds).reward.mean())
    return mean, math.sqrt(mean * (1 - mean) / (EVAL_PROBLEMS - 1))


TABLE = {
    "KL(policy || actor), nats a token": "distill_kl",
    "acceptance rate": "obrs/accept_rate",
    "KL(inf || ref), k3, nats a token": "rollout_corr/k3_kl",
}
PANELS = {
    "reward": "reward",
    "entropy, policy": "entropy",
    "gradient norm, policy": "grad_norm",
    **TABLE,
}


def main():
    # machinery/warmstart.py prints the folders of the two base models; at first use it makes them (2 to 3 minutes)
    command = [sys.executable, "-m", "machinery.warmstart", "--rollout=hf"]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if made.returncode:
        sys.exit(made.returncode)  # machinery/warmstart.py has said why
    policy, actor = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)
        for f in made.stdout.split("\n")[:2]
    )
    models = {"policy": policy, "actor": actor}
    before = {name: evaluate(model) for name, model in models.items()}
    metrics = train(policy, actor)
    after = {name: evaluate(model) for name, model in models.items()}
    print(f"\njackpot: {STEPS} updates of {TRAIN_BATCH} responses\n{'before':>50s}{'after':>16s}")
    for name in models:
        cells = [
            f"{100 * mean:.1f} +- {100 * se:.1f} %" for mean, se in (before[name], after[name])
        ]
        print(f"{name + ' pass@1, held out':34s}{cells[0]:>16s}{cells[1]:>16s}")
    last = metrics[-max(1, STEPS // 10) :]
    for title, key in TABLE.items():
        values = [metrics[0][key], sum(row[key] for row in last) / len(last)]
        cells = [f"{100 * value:.1f} %" if "rate" in key else f"{value:.4f}" for value in values]
        print(f"{title:34s}{cells[0]:>16s}{cells[1]:>16s}")
    print(f"   (before: first update; after: mean of the last tenth)\ncurves: {OUT}")
    _, axes = plt.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    for ax, (title, key) in zip(axes.flat, PANELS.items(), strict=True):
        ax.plot(range(1, STEPS + 1), [row[key] for row in metrics])
        ax.set(title=title, xlabel="updates")
        ax.grid(alpha=0.3)
    Path(OUT).parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(OUT, dpi=110)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(
            f"error: {sys.argv[1]}: mini.py takes no flags; change its settings at the head of the file"
        )
    main()
