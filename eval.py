"""Evaluation: unbiased pass@k on held-out problems, with standard errors.

    python eval.py --model=out/demo                           # a run folder: its newest checkpoint's policy
    python eval.py --model=FOLDER --task=FILE.jsonl --samples=8 --max_tokens=2048
    python eval.py --grade_gold=FILE.jsonl                    # no model: does the grader accept the file's own answers?
    python eval.py --mismatch --model=FOLDER                  # how far is the sampler from the learner? (mismatch.py)

pass@k of a problem with c right among n samples is 1 - C(n-c, k) / C(n, k), the mean over all k-subsets (Chen et al.
2021); its standard error is taken over problems.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# before torch is imported, as in train.py: its idle threads sleep
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from tqdm import tqdm

import checkpoint
import mismatch
import objectives
import quant
import sampling
import tasks
import warmstart
from config import Config, EngineFlags, PrecisionFlags, SamplingFlags, TaskFlags, check_engine
from engines import HFEngine, make_engine
from flags import UserError, check_output, choice, is_hub_id, need, parse_flags, read_json, run_command
from mismatch import MismatchFlags
from rollout import request_seed
from run import common_tokenizer
from sampling import Sampling
from tasks import Answer, Jsonl, encode, grade_all, make_task, run_stop_ids, stop_ids

PROBLEMS, PROBE_PROBLEMS = 512, 64  # unless --problems names a number: to evaluate, and for --mismatch
BATCH = 256  # problems that an engine is given at once


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of the n samples, drawn without replacement, hold at least one of the c right ones."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_se(x) -> tuple[float, float]:
    """Mean and its standard error over problems; NaN for a single one."""
    x = np.asarray(x, np.float64)
    if len(x) < 2:
        return float(x.mean()), math.nan
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x)))


def solve(engine, task, tokenizer, indices, samples: int, sampling: Sampling, seed: int, ends: list[int]):
    """Right answers among `samples` responses to each held-out problem, and the mean length.

    indices: numbers of problems. ends: tokens that end a response (tasks.stop_ids). Returns (len(indices), samples) of
    0 / 1, and tokens."""
    right, lengths = [], []
    for start in tqdm(range(0, len(indices), BATCH), desc="evaluate", leave=False, disable=len(indices) <= BATCH):
        problems = [task.problem("test", i) for i in indices[start : start + BATCH]]
        prompts = [np.array(encode(tokenizer, p), np.int32) for p in problems]
        seeds = []
        for problem in problems:
            seeds.append([request_seed("eval", seed, problem.id, s) for s in range(samples)])
        groups = engine.generate(prompts, seeds, sampling, 0, ends)
        grade_all(task, tokenizer, problems, groups)
        for group in groups:
            right.append([float(r.reward > 0.5) for r in group])
            lengths += [len(r.tokens) for r in group]
    return np.array(right), float(np.mean(lengths))


# ---------------------------------------------------------------------------------------------------------------------
# Within a training run. All of these are collective: every rank must call them
# ---------------------------------------------------------------------------------------------------------------------


def sampler_of(learner, name: str, cfg) -> HFEngine:
    """A sampler in plain torch of the learner's policy or actor as it is now.

    Under FSDP it has a whole copy of the weights, because shards cannot decode; aligned where the learner's is."""
    model = getattr(learner.models, name)
    if not (learner.comm.on and cfg.parallel == "fsdp"):
        return HFEngine(model, device=learner.device, vocabulary=learner.models.vocabulary)
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_config(copy.deepcopy(model.config))
    quant.align(whole, next((m.format for m in model.modules() if isinstance(m, quant.LowBitLinear)), None))
    engine = HFEngine(whole, device=learner.device, vocabulary=learner.models.vocabulary)
    engine.load(learner.named_tensors(name))
    return engine


def fresh_advantage(learner, groups, task, tokenizer, cfg) -> float:
    """Mean advantage per token of responses that the policy itself samples now, against the baselines of these groups.

    It is what mean(w A) over the groups estimates; their distance is GEPO's Figure 6 (c)."""
    problems = [task.find(g.prompt_id) for g in groups]
    prompts = [g.prompt_ids for g in groups]
    seeds = []
    for g in groups:
        key = ("fresh", cfg.seed, g.uid, learner.version)
        seeds.append([request_seed(*key, i) for i in range(cfg.group_size)])
    engine = sampler_of(learner, "policy", cfg)
    fresh = engine.generate(prompts, seeds, groups[0].sampling, 0, run_stop_ids(tokenizer, cfg))
    grade_all(task, tokenizer, problems, fresh)
    total = count = 0.0
    for group, responses in zip(groups, fresh, strict=True):
        reward = torch.tensor([r.reward for r in group.responses], dtype=torch.float64)
        slope = advantage_slope(reward, cfg)
        for r in responses:
            total += slope * (r.reward - float(reward.mean())) * len(r.tokens)
            count += len(r.tokens)
    total, count = learner.comm.sum([total, count])
    return total / count


def advantage_slope(reward, cfg) -> float:
    """a in A = a (R - mean), of one group's rewards (G,): every advantage is linear in them. 0 where all are equal."""
    spread = reward - reward.mean()
    if spread.abs().max() == 0:
        return 0.0
    known = objectives.ADVANTAGES[cfg.advantage](reward)
    return float((known * spread).sum() / spread.square().sum())


def held_out(learner, name: str, task, tokenizer, cfg) -> dict[str, float]:
    """pass@1 of the learner's own policy or actor on held-out problems, at temperature 1, spread over ranks.

    Nothing for a task that is a file, unless --eval_task names another one: the training file is not held out."""
    if cfg.task != "arith" and not cfg.eval_task:
        return {}
    if cfg.eval_task:
        task = make_task(cfg, "eval_task")
    n = cfg.eval_problems if task.size is None else min(cfg.eval_problems, task.size)
    mine = list(range(learner.comm.rank, n, learner.comm.size))
    engine = sampler_of(learner, name, cfg)
    plain = Sampling(max_tokens=cfg.max_tokens)
    right, _ = solve(engine, task, tokenizer, mine, cfg.eval_samples, plain, cfg.seed, run_stop_ids(tokenizer, cfg))
    score = right.mean(1)
    total, squares = learner.comm.sum([score.sum(), (score**2).sum()])
    mean = total / n
    variance = max(0.0, squares / n - mean**2)
    return {"pass@1": mean, "se": math.sqrt(variance / max(1, n - 1))}


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvalFlags(TaskFlags, SamplingFlags, EngineFlags, PrecisionFlags, MismatchFlags):
    """Evaluation"""

    model: str = ""
    """A run folder (its newest checkpoint's policy), a checkpoint, any Hugging Face folder or id, or base:policy."""
    which: Literal["policy", "actor"] = "policy"
    """Which model of a run or checkpoint."""
    problems: int | None = None
    """At most so many problems; default 512, with --mismatch 64."""
    samples: int = 4
    """n: responses to each problem."""
    k: str = "1,4"
    """pass@k for these k, each at most n."""
    seed: int = 0
    """Seed of sampling."""
    grade_gold: str = ""
    """Feed this file's own answers to the grader instead of evaluating a model."""
    out: str = ""
    """Also write the results to this JSON file (and the figure of --mismatch beside it)."""


@dataclass
class Setup:
    """The model that is evaluated, and on what; all checked."""

    task: object
    folder: str  # of the model
    tokenizer: object
    problems: int  # the first so many of the task's held-out ones
    longest_prompt: int  # tokens
    vocabulary: int
    stop_ids: list[int]


def open_setup(cfg: EvalFlags, problems: int) -> Setup:
    """Find task and model. problems: so many unless --problems names a number. UserError: one sentence."""
    check(cfg)
    task = make_task(cfg)
    warmstart.check(cfg, task)
    folder = find_model(cfg, "model", cfg.which)
    one_model = cfg.model.startswith("base:") or Path(folder) == Path(cfg.model)
    need(
        cfg.which == "policy" or not one_model,
        f"--which={cfg.which}: {cfg.model} is one model, not a run or a checkpoint; leave it out",
    )
    model = checkpoint.read_config(folder).get_text_config()
    models = [folder, find_model(cfg, "actor", "actor")] if cfg.actor else [folder]
    tokenizer = common_tokenizer(cfg, folder, models[1] if cfg.actor else None)
    ends = stop_ids(tokenizer, models, cfg.stop)
    n = problems if cfg.problems is None else cfg.problems
    if task.size is not None:
        n = min(n, task.size)
    longest = task.max_prompt() or max(len(encode(tokenizer, task.problem("test", i))) for i in range(n))
    limit = model.max_position_embeddings
    if longest + cfg.max_tokens > limit:
        raise UserError(
            f"--max_tokens={cfg.max_tokens}: the longest prompt has {longest} tokens, together more than the model's "
            f"context of {limit}; shorten the response or drop long prompts"
        )
    vocabulary = checkpoint.vocabulary_size(tokenizer)
    need(
        cfg.top_k <= vocabulary, f"--top_k={cfg.top_k}: larger than the vocabulary of {vocabulary} tokens; 0 keeps all"
    )
    for one in models:
        checkpoint.check_rows(one, vocabulary)
        checkpoint.check_weights(one)
    quant.check_model(cfg, models[-1])
    return Setup(task, folder, tokenizer, n, longest, vocabulary, ends)


def check(cfg: EvalFlags) -> None:
    """UserError, one sentence: what can be wrong with the flags alone."""
    for name in ("samples", "max_tokens", "micro_tokens"):
        need(getattr(cfg, name) >= 1, f"--{name}={getattr(cfg, name)}: must be at least 1")
    need(cfg.problems is None or cfg.problems >= 1, f"--problems={cfg.problems}: must be at least 1")
    need(cfg.model.strip(), "--model is empty: name a run folder, a checkpoint or a Hugging Face folder")
    need(
        cfg.mismatch or not cfg.actor,
        f"--actor={cfg.actor}: another model samples for --mismatch alone; add it, or name the model with --model",
    )
    need(
        cfg.mismatch or cfg.learner_quant == "none",
        f"--learner_quant={cfg.learner_quant}: the learner's format is for --mismatch alone; add it, or name a "
        "--rollout_quant",
    )
    if cfg.mismatch:
        need(cfg.samples >= 2, f"--samples={cfg.samples}: --mismatch compares responses, so at least 2 to a problem")
        need(cfg.log_ratio_clamp > 0, f"--log_ratio_clamp={cfg.log_ratio_clamp}: must be above 0")
        quant.check(cfg)
    need(cfg.quant_group >= 1, f"--quant_group={cfg.quant_group}: must be at least 1")
    sampling.check(cfg)
    tasks.check(cfg)
    check_engine(cfg)


def find_model(cfg: EvalFlags, flag: str, which: str) -> str:
    """The folder with config.json behind --model or --actor. The embedded models are those of this task.

    which: "policy" or "actor", the one to take from a run or a checkpoint."""
    name = getattr(cfg, flag)
    if name.startswith("base:"):
        choice(flag, name, ["base:policy", "base:actor"])
        need(cfg.task == "arith", f"--{flag}={name} knows only --task=arith; give the folder of a model for {cfg.task}")
        task_flags = {k: v for k, v in vars(cfg).items() if k.startswith("task_")}
        return warmstart.base_model(name.removeprefix("base:"), Config(**task_flags))
    root = Path(name)
    for folder in (root, root / which, (checkpoint.newest(root, which) or root) / which):
        path = folder / "config.json"  # a run has one too, which is not a model's
        if path.is_file() and "model_type" in read_json(path, "copy it anew, or name another folder"):
            return checkpoint.text_folder(str(folder), Config().base_dir)
    if is_hub_id(name):
        return checkpoint.text_folder(checkpoint.from_hub(flag, name), Config().base_dir)
    raise UserError(f"--{flag}={name}: no model there; give a run folder, a checkpoint or a Hugging Face folder")


def evaluate(cfg: EvalFlags) -> dict:
    """Sample, grade, and print pass@k with standard errors."""
    n = cfg.samples
    ks = [int(k) if k.strip().isdecimal() else 0 for k in cfg.k.split(",")]
    need(
        n < 1 or 1 <= min(ks) <= max(ks) <= n, f"--k={cfg.k}: each k must lie between 1 and --samples={n}, as in 1,{n}"
    )
    setup = open_setup(cfg, PROBLEMS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    context = setup.longest_prompt + cfg.max_tokens
    engine = make_engine(cfg, setup.folder, context, 0, device, setup.vocabulary)
    indices = list(range(setup.problems))
    how = (n, Sampling.of(cfg), cfg.seed, setup.stop_ids)
    right, length = solve(engine, setup.task, setup.tokenizer, indices, *how)
    scores = {f"mean@{n}": right.mean(1)}  # one number a problem
    for k in ks:
        scores[f"pass@{k}"] = [pass_at_k(n, int(c), k) for c in right.sum(1)]
    out = {
        "model": setup.folder,
        "task": cfg.task,
        "problems": setup.problems,
        "samples": n,
        "response_length": length,
    }
    sizes = f"{setup.problems} problems, {n} responses each, {length:.1f} tokens a response"
    print(f"{setup.folder} on {cfg.task}: {sizes}")
    for name, score in scores.items():
        mean, se = mean_se(score)
        out[name] = mean
        out[f"{name}_se"] = se
        print(f"  {name:8s} {100 * mean:6.2f} +- {100 * se:.2f} %")
    engine.close()
    return out


def measure_mismatch(cfg: EvalFlags) -> dict:
    """The probe of mismatch.py."""
    setup = open_setup(cfg, PROBE_PROBLEMS)
    actor = find_model(cfg, "actor", "actor") if cfg.actor else None
    return mismatch.probe(cfg, setup, actor).as_dict()


def wrapped(answer: str) -> str:
    """A file's own answer as a response would give it."""
    return f"The answer is $\\boxed{{{answer}}}$."


def perturbed(answer: str) -> str:
    """A wrong answer close to a right one: its first non-zero digit changed, or a term added where there is none."""
    for i, digit in enumerate(answer):
        if digit in "123456789":
            other = "8" if digit == "9" else str(int(digit) + 1)
            return answer[:i] + other + answer[i + 1 :]
    return answer + " + 1"


def grade_gold(path: str, seconds: float = EvalFlags.grade_seconds) -> dict:
    """Does the grader accept a file's own answers, and refuse changed ones? Prints both shares and each exception.

    seconds: of a processor, for each answer (--grade_seconds)."""
    task = Jsonl(path, seconds=seconds, flag="grade_gold")
    gold = changed = 0
    for start in tqdm(range(0, task.size, BATCH), desc="grade"):
        problems = [task.problem("test", i) for i in range(start, min(start + BATCH, task.size))]
        own = [Answer(p, wrapped(p.answer), True) for p in problems]
        other = [Answer(p, wrapped(perturbed(p.answer)), True) for p in problems]
        rewards, _ = task.rewards(own + other)
        for p, right, wrong in zip(problems, rewards[: len(own)], rewards[len(own) :], strict=True):
            gold += right == 1
            changed += wrong == 1
            if not right:
                tqdm.write(f"gold answer refused: {p.answer}")
            if wrong:
                tqdm.write(f"changed answer accepted: {perturbed(p.answer)} for {p.answer}")
    n = task.size
    print(
        f"{path}: {gold} of {n} gold answers graded right ({100 * gold / n:.2f} %), "
        f"{changed} of {n} changed answers ({100 * changed / n:.2f} %)"
    )
    return {"file": path, "problems": n, "gold": gold / n, "changed": changed / n}


def main(argv: list[str] | None = None) -> dict:
    """One command; returns what --out writes. UserError: one sentence."""
    cfg = parse_flags(EvalFlags, sys.argv[1:] if argv is None else argv)
    if cfg.out:
        check_output("out", cfg.out)
    if cfg.grade_gold:
        need(
            cfg.task == EvalFlags.task, f"--task={cfg.task}: --grade_gold names the file itself; leave one of them out"
        )
        need(not cfg.model, f"--model={cfg.model}: --grade_gold grades a file's own answers, no model's; leave it out")
        tasks.check(cfg)
        result = grade_gold(cfg.grade_gold, cfg.grade_seconds)
    elif cfg.mismatch:
        result = measure_mismatch(cfg)
    else:
        result = evaluate(cfg)
    if cfg.out:
        path = Path(cfg.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    run_command(main)
