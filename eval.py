"""Evaluate a model: mean@k and the unbiased pass@k on held-out problems, with standard errors.

    python eval.py --model=out/demo                           # a run folder: its newest checkpoint's policy
    python eval.py --model=FOLDER --task=FILE.jsonl --samples=8 --max_tokens=2048
    python eval.py --grade_gold=FILE.jsonl                    # no model: does the grader accept the file's own answers?
    python eval.py --mismatch --model=FOLDER                  # how far the sampler is from the learner, and what can be done (mismatch.py)

pass@k of a problem with c right among n samples is 1 - C(n-c, k) / C(n, k), the mean over all k-subsets (Chen et al. 2021);
its standard error is taken over problems.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tqdm import tqdm

import config
import objectives
import sampling
from engines import HFEngine, make_engine
from rollout import Sampling, request_seed
from tasks import encode, grade_all
from tasks import Jsonl, grade, make_task
from warmstart import base_model


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of the n samples, drawn without replacement, hold at least one of the c right ones."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_se(x) -> tuple[float, float]:
    """Mean and its standard error over problems."""
    x = np.asarray(x, np.float64)
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan


def solve(
    engine, task, tokenizer, indices, samples: int, sampling: Sampling, seed: int, split: str = "test", batch: int = 256
):
    """Right answers among `samples` responses for each problem index: (len(indices), samples) of 0 / 1, and the mean length."""
    right, lengths = [], []
    for start in tqdm(range(0, len(indices), batch), desc="evaluate", leave=False, disable=len(indices) <= batch):
        problems = [task.problem(split, i) for i in indices[start : start + batch]]
        prompts = [np.array(encode(tokenizer, p), np.int32) for p in problems]
        seeds = [[request_seed("eval", seed, p.id, s) for s in range(samples)] for p in problems]
        groups = engine.generate(prompts, seeds, sampling, 0, [tokenizer.eos_token_id])
        grade_all(task, tokenizer, problems, groups)
        right += [[float(r.reward > 0.5) for r in g] for g in groups]
        lengths += [len(r.tokens) for g in groups for r in g]
    return np.array(right), float(np.mean(lengths))


def learners_own(learner, name: str, cfg) -> HFEngine:
    """A plain sampler on the learner's model as it is now; under FSDP, on a whole copy: shards cannot decode. Collective."""
    model = getattr(learner.models, name)
    if not (learner.comm.on and cfg.parallel == "fsdp"):
        return HFEngine(model, device=learner.device)
    from transformers import AutoModelForCausalLM

    engine = HFEngine(AutoModelForCausalLM.from_config(copy.deepcopy(model.config)), device=learner.device)
    engine.load(learner.named_tensors(name))
    return engine


def fresh_advantage(learner, groups, task, tokenizer, cfg) -> float:
    """Mean advantage a token of responses sampled now by the policy itself, on these groups' prompts and against these groups'
    own baselines: what mean(w A) over the groups estimates. Their distance is GEPO's Figure 6 (c). Collective."""
    problems = [task.find(g.prompt_id) for g in groups]
    seeds = [
        [request_seed("fresh", cfg.seed, g.uid, learner.version, i) for i in range(cfg.group_size)] for g in groups
    ]
    fresh = learners_own(learner, "policy", cfg).generate(
        [g.prompt_ids for g in groups], seeds, groups[0].sampling, 0, [tokenizer.eos_token_id]
    )
    grade_all(task, tokenizer, problems, fresh)
    total = count = 0.0
    for old, new in zip(groups, fresh):
        reward = torch.tensor([r.reward for r in old.responses], dtype=torch.float64)
        known = objectives.ADVANTAGES[cfg.advantage](reward)  # linear in the reward: read its slope off
        spread = reward - reward.mean()
        slope = float((known * spread).sum() / spread.square().sum()) if spread.abs().max() > 0 else 0.0
        for r in new:
            total, count = total + slope * (r.reward - float(reward.mean())) * len(r.tokens), count + len(r.tokens)
    total, count = learner.comm.sum([total, count])
    return total / count


def held_out(learner, name: str, task, tokenizer, cfg) -> dict[str, float]:
    """pass@1 of the learner's own policy or actor on held-out problems, at temperature 1, spread over ranks.
    Nothing for a task that is a file, unless --eval_task names another: the training file is not held out."""
    if cfg.task != "arith" and not cfg.eval_task:
        return {}
    if cfg.eval_task:
        task = Jsonl(cfg.eval_task, cfg.task_seed)
    n = cfg.eval_problems if task.size is None else min(cfg.eval_problems, task.size)
    engine = learners_own(learner, name, cfg)
    right, _ = solve(
        engine,
        task,
        tokenizer,
        list(range(learner.comm.rank, n, learner.comm.size)),
        cfg.eval_samples,
        Sampling(max_tokens=cfg.max_tokens),
        cfg.seed,
    )
    score = right.mean(1)
    total, squares, count = learner.comm.sum([score.sum(), (score**2).sum(), len(score)])
    mean = total / count
    return {"pass@1": mean, "se": math.sqrt(max(0.0, squares / count - mean**2) / max(1, count - 1))}


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Eval:
    """Flags of eval.py."""

    model: str = ""
    """A run folder (its newest checkpoint's policy), a checkpoint, any Hugging Face folder, or base:policy."""
    which: Literal["policy", "actor"] = "policy"
    """Which model of a run or checkpoint."""
    task: str = "arith"
    """arith, or a JSONL file with problem/question and answer."""
    problems: int = 512
    """At most so many problems (--mismatch: 64 where nothing is said)."""
    samples: int = 4
    """n: responses to each problem."""
    k: str = "1,4"
    """pass@k for these k, each at most n."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this mass; 1: all."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely one's probability; 0: all."""
    max_tokens: int = 32
    """Longest response."""
    rollout: Literal["vllm", "hf"] = "vllm"
    """Engine."""
    rollout_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Its precision."""
    rollout_memory: float = 0.25
    """Engine's memory: GiB of KV cache on CPU, share of the GPU on CUDA."""
    lm_head_fp32: bool = False
    """Compute the language-model head in float32 above a body of less."""
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """Log-probabilities the engine returns: of the law it samples from, or of the model before temperature and truncation."""
    rollout_quant: Literal["none", "int8", "fp8", "w4a16", "w3a16", "w2a16"] = "none"
    """Low-bit format of the engine's linear layers (quant.py)."""
    quant_group: int = config.Config.quant_group
    """Columns that share a scale in w4a16 and its like."""
    seed: int = 0
    """Seed of sampling."""
    task_seed: int = 0
    """Seed of arith's problems."""
    task_min_ops: int = config.Config.task_min_ops
    """arith: fewest operations."""
    task_max_ops: int = config.Config.task_max_ops
    """arith: most operations."""
    task_operand: int = config.Config.task_operand
    """arith: largest operand."""
    task_total: int = config.Config.task_total
    """arith: largest running total."""
    task_explain: int = config.Config.task_explain
    """arith: tokens of explanation that earn a bonus."""
    mismatch: bool = False
    """Measure the mismatch between sampler and learner instead of the score."""
    actor: str = ""
    """Mismatch: another model that samples: a run folder, a checkpoint, a Hugging Face folder or base:actor."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Mismatch: the learner's compute type."""
    learner_quant: Literal["none", "aligned", "int8", "fp8", "w4a16", "w3a16", "w2a16"] = "none"
    """Mismatch: aligned: the learner computes on the engine's low-bit numbers."""
    keep_sampling_mask: Literal["off", "recompute", "replay"] = "replay"
    """Mismatch: what the learner scores where sampling truncates."""
    kept_max: int = config.Config.kept_max
    """Mismatch: largest kept set that is recorded."""
    log_ratio_clamp: float = config.Config.log_ratio_clamp
    """Mismatch: log-ratios are clamped to +- this."""
    micro_tokens: int = config.Config.micro_tokens
    """Mismatch: token budget of one forward."""
    grade_gold: str = ""
    """Feed this file's own answers to the grader instead of evaluating a model."""
    out: str = ""
    """Also write the results to this JSON file (and the figure of --mismatch beside it)."""


def find_model(cfg: Eval, flag: str, which: str) -> str:
    """The folder with config.json behind --model or --actor. The embedded models are those of this task."""
    name = getattr(cfg, flag)
    if name in ("base:policy", "base:actor"):
        return base_model(name[5:], config.Config(**{k: v for k, v in vars(cfg).items() if k.startswith("task_")}))
    root = Path(name)
    steps = sorted((root / "checkpoints").glob("step_??????"))
    for folder in (root, root / which, *(s / which for s in reversed(steps))):
        if (folder / "config.json").is_file() and "model_type" in json.loads(
            (folder / "config.json").read_text(encoding="utf-8")
        ):
            return str(folder)
    raise ValueError(f"--{flag}={name}: no model there; give a run folder, a checkpoint or a Hugging Face folder")


def open_model(cfg: Eval):
    """(task, model folder, tokenizer, problems, longest prompt), all checked. ValueError: one sentence."""
    from transformers import AutoTokenizer

    sampling.check(cfg)
    task, folder = make_task(cfg), find_model(cfg, "model", cfg.which)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    n = cfg.problems if task.size is None else min(cfg.problems, task.size)
    limit = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    longest = task.max_prompt() or max(len(encode(tokenizer, task.problem("test", i))) for i in range(n))
    if longest + cfg.max_tokens > limit:
        raise ValueError(
            f"--max_tokens={cfg.max_tokens}: the longest prompt has {longest} tokens, together more than the model's context of {limit}"
        )
    return task, folder, tokenizer, n, longest


def evaluate(cfg: Eval) -> dict:
    """Sample, grade, and print pass@k with standard errors."""
    ks = [int(k) for k in cfg.k.split(",")]
    if max(ks) > cfg.samples or min(ks) < 1:
        raise ValueError(f"--k={cfg.k}: each k must lie between 1 and --samples={cfg.samples}")
    task, folder, tokenizer, n, longest = open_model(cfg)
    engine = make_engine(cfg, folder, longest + cfg.max_tokens, 0, "cuda" if torch.cuda.is_available() else "cpu")
    right, length = solve(engine, task, tokenizer, list(range(n)), cfg.samples, Sampling.of(cfg), cfg.seed)
    out = {"model": folder, "task": cfg.task, "problems": n, "samples": cfg.samples, "response_length": length}
    out[f"mean@{cfg.samples}"], out[f"mean@{cfg.samples}_se"] = mean_se(right.mean(1))
    for k in ks:
        out[f"pass@{k}"], out[f"pass@{k}_se"] = mean_se([pass_at_k(cfg.samples, int(c), k) for c in right.sum(1)])
    print(f"{folder} on {cfg.task}: {n} problems, {cfg.samples} responses each, {length:.1f} tokens a response")
    for name in (f"mean@{cfg.samples}", *(f"pass@{k}" for k in ks)):
        print(f"  {name:8s} {100 * out[name]:6.2f} +- {100 * out[name + '_se']:.2f} %")
    engine.close()
    return out


def measure_mismatch(cfg: Eval) -> dict:
    """The probe of mismatch.py."""
    import mismatch

    if cfg.samples < 2:
        raise ValueError(f"--samples={cfg.samples}: --mismatch compares responses, so at least 2 to a problem")
    if cfg.problems == Eval.problems:
        cfg = replace(cfg, problems=64)
    task, folder, tokenizer, n, longest = open_model(cfg)
    actor = find_model(cfg, "actor", "actor") if cfg.actor else None
    return mismatch.probe(replace(cfg, problems=n), folder, actor, task, tokenizer, n, longest, make_engine)


def wrapped(answer: str) -> str:
    """A file's own answer as a response would give it."""
    return f"The answer is $\\boxed{{{answer}}}$."


def perturbed(answer: str) -> str:
    """A wrong answer close to a right one: its first non-zero digit changed, or a term added where there is none."""
    for i, ch in enumerate(answer):
        if ch in "123456789":
            return answer[:i] + ("8" if ch == "9" else str(int(ch) + 1)) + answer[i + 1 :]
    return answer + " + 1"


def grade_gold(path: str) -> dict:
    """Does the grader accept a file's own answers, and refuse changed ones? Prints both shares and each exception."""
    task = Jsonl(path)
    right = wrong = 0
    for row in tqdm(task.rows, desc="grade"):
        good, bad = (
            grade(wrapped(row["answer"]), row["answer"]),
            grade(wrapped(perturbed(row["answer"])), row["answer"]),
        )
        right, wrong = right + good, wrong + bad
        if not good:
            tqdm.write(f"gold answer refused: {row['answer']}")
        if bad:
            tqdm.write(f"changed answer accepted: {perturbed(row['answer'])} for {row['answer']}")
    n = task.size
    print(
        f"{path}: {right} of {n} gold answers graded right ({100 * right / n:.2f} %), {wrong} of {n} changed answers ({100 * wrong / n:.2f} %)"
    )
    return {"file": path, "problems": n, "gold": right / n, "changed": wrong / n}


def main(argv=None) -> dict:
    import tyro

    argv = [
        f"{a}=True" if a.startswith("--") and "=" not in a and Eval.__annotations__.get(a[2:]) == "bool" else a
        for a in (sys.argv[1:] if argv is None else argv)
    ]
    cfg = tyro.cli(tyro.conf.FlagConversionOff[Eval], args=argv, use_underscores=True)
    result = grade_gold(cfg.grade_gold) if cfg.grade_gold else measure_mismatch(cfg) if cfg.mismatch else evaluate(cfg)
    if cfg.out:
        Path(cfg.out).parent.mkdir(parents=True, exist_ok=True)
        Path(cfg.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    try:
        main()
    except ValueError as e:
        sys.exit(f"error: {e}")
