"""Z from the K most likely tokens of an actor, compared with Z over the whole vocabulary ("z" in results/atlas.json).

    python results/pair_z.py --task=FILE.jsonl

The 0.5B actor of configs/real_pair.toml samples in plain torch, and the 1.5B policy scores, both in bfloat16 with the
head in float32. For each sampled token, with p = p_actor and q = p_policy: Z = sum_x min(p, q); Z_low: the sum over the
K most likely x of p; Z_high: obrs.z_bracket; Z_approx: the sum over the K most likely x of p and the K of q.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import obrs
from machinery.flags import need, parse_flags, run_command
from results import sweep
from tasks.data import read_rows

POLICY, ACTOR = ROOT / "out/models/qwen15", ROOT / "out/models/qwen05"
PROBLEMS, SAMPLES, TOKENS = 8, 4, 160
CHUNK = 64  # tokens with two distributions over the vocabulary in memory
KS = (10, 20, 40)


@dataclass(frozen=True)
class ZFlags:
    """Z of the pair"""

    task: str = ""
    """File of problems in a format of train.py's --task."""


def sample(actor, tokenizer, problem: str):
    """SAMPLES responses: ids (SAMPLES, P + T) and mask (SAMPLES, P + T - 1), True if the next token is sampled."""
    message = [{"role": "user", "content": problem}]
    prompt = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    ids = actor.generate(
        prompt.repeat(SAMPLES, 1),
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        max_new_tokens=TOKENS,
    )
    stop = torch.tensor([tokenizer.eos_token_id, actor.generation_config.pad_token_id])
    ends = torch.isin(ids[:, prompt.shape[1] :], stop).long()
    ended_before = ends.cumsum(1) - ends
    mask = torch.zeros(SAMPLES, ids.shape[1] - 1, dtype=torch.bool)
    mask[:, prompt.shape[1] - 1 :] = ended_before == 0
    return ids, mask


def hidden(model, ids, mask):
    """Hidden states (N, H) that predict the N sampled tokens."""
    return model.model(input_ids=ids).last_hidden_state[:, :-1][mask]


def log_probs(model, states):
    """Log-probabilities (n, V) in float32."""
    return (states.float() @ model.lm_head.weight.float().t()).log_softmax(-1)


def z_of(logp, logq) -> dict[str, torch.Tensor]:
    """Z, and for each K Z_low, Z_high and Z_approx, each (n,). logp, logq: actor and policy, (n, V)."""
    p, q = logp.exp(), logq.exp()
    smaller = torch.minimum(p, q)
    values = {"Z": smaller.sum(-1)}
    for k in KS:
        top = p.topk(k).indices
        p_k = p.gather(1, top).amin(1, keepdim=True)
        outside = torch.ones_like(p, dtype=torch.bool).scatter(1, top, False)
        tail = torch.minimum(p_k, q).mul(outside).sum(-1)
        low, high = obrs.z_bracket(logp.gather(1, top), logq.gather(1, top), 1.0, tail)
        outside.scatter_(1, q.topk(k).indices, False)
        approx = smaller.mul(~outside).sum(-1)
        values |= {f"{k} low": low, f"{k} high": high, f"{k} approx": approx}
    return values


@torch.no_grad()
def main() -> None:
    flags = parse_flags(ZFlags, None, __doc__.strip())
    need(flags.task, "--task is missing: name a file with problems, such as GSM8K's")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ACTOR)
    actor, policy = [
        AutoModelForCausalLM.from_pretrained(x, dtype=torch.bfloat16).eval()
        for x in (ACTOR, POLICY)
    ]
    rows = read_rows(flags.task, "task", ("", ""))[:PROBLEMS]
    parts = []
    for row in tqdm(rows, desc="problems"):
        ids, mask = sample(actor, tokenizer, row["prompt"])
        states = [hidden(model, ids, mask).split(CHUNK) for model in (actor, policy)]
        for of_actor, of_policy in zip(*states, strict=True):
            parts.append(z_of(log_probs(actor, of_actor), log_probs(policy, of_policy)))
    z = {key: torch.cat([part[key] for part in parts]).double() for key in parts[0]}
    record = {"tokens": len(z["Z"]), "Z": sweep.short(z["Z"].mean().item())}
    for k in KS:
        for name in ("low", "high", "approx"):
            x = z[f"{k} {name}"]
            largest = (x / z["Z"] - 1).abs().max().item()
            ratio = (x.mean() / z["Z"].mean()).item()
            record[f"{name}, K = {k}"] = {
                "mean / mean Z": sweep.short(ratio),
                "largest": sweep.short(largest),
            }
    data = sweep.load("atlas")
    data["z"] = record
    sweep.store("atlas", data)
    print(record)


if __name__ == "__main__":
    run_command(main)
