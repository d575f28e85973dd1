"""Evaluation: unbiased pass@k on held-out problems, with standard errors.

    python eval.py --model=out/demo                           # a run folder: its newest checkpoint's policy
    python eval.py --model=FOLDER --task=a.jsonl,b.jsonl:samples=32:temperature=0.6 --max_tokens=2048 --out=scores.json
    python eval.py --model=FOLDER --task=FILE.jsonl --show_prompt  # print the first prompts

pass@k of a problem with c correct among n samples is 1 - C(n-c, k) / C(n, k), the mean over all
k-subsets (Chen et al. 2021). Standard errors are over problems."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import machinery.startup  # isort: skip  # noqa: F401

import numpy as np
import torch
from tqdm import tqdm

import quant
import sampling
import tasks
from config import EMBEDDED, PROPOSED, Config, SampleFlags
from machinery import flags, warmstart
from machinery.checkpoint import models
from machinery.flags import (
    check_ranges,
    check_result,
    is_hub_id,
    names_model,
    need,
    parse_flags,
    replace_text,
    run_command,
)
from machinery.run import check_folders, common_tokenizer, longest_contexts
from machinery.settings import check_engine, check_named, fill
from model import memory
from model.engines import HFEngine, make_engine
from rollout import request_seed
from sampling import Sampling
from source import check_poisoned, set_aside_if_poisoned
from tasks import EvalSet, eval_sets, grade_all, prompts, turns
from tasks.prompts import encode, stop_ids

PROBLEMS = 512  # default of --problems


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, include at least one of the c
    correct samples."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_se(x) -> tuple[float, float]:
    """Mean and standard error over problems; the error is NaN for a single problem."""
    x = np.asarray(x, np.float64)
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x))) if len(
        x
    ) > 1 else math.nan


def solve(
    engine,
    one: EvalSet,
    tokenizer,
    indices,
    sampling: Sampling,
    seed,
    ends,
    write=None,
    summed=list,
):
    """Sample and grade responses to problems of a held-out set. Returns correctness (0 or 1),
    (len(indices), one.samples), and the mean length in tokens.

    indices: problem numbers. sampling: top_p, top_k and min_p; temperature and maximum length are
    the set's. ends: tokens that end a response
    (prompts.stop_ids). write(problem, group): callback for each problem's graded responses.
    summed: sums a list of counts over ranks; default: this rank only."""
    task, samples, sampling = one.task, one.samples, drawn_as(one, sampling)
    right, lengths, chunk = [], [], tasks.at_once(samples)
    rounds = -(-len(indices) // chunk)
    bar = tqdm(total=rounds, desc="evaluate", leave=False, disable=rounds < 2)
    start = poisoned = 0
    # ranks sharing one engine must all call generate, even with no prompts
    while engine.any_rank(start < len(indices)):
        problems = [task.problem("test", i) for i in indices[start : start + chunk]]
        prompts = [np.array(encode(tokenizer, p), np.int32) for p in problems]
        seeds = [
            [request_seed("eval", seed, problem.id, s) for s in range(samples)]
            for problem in problems
        ]
        tools = (engine, task, tokenizer)
        groups = turns.sample(*tools, problems, prompts, seeds, sampling, 0, ends)
        grade_all(task, tokenizer, problems, groups)
        for problem, group in zip(problems, groups, strict=True):
            right.append([float(r.reward > 0.5) for r in group])
            lengths += [len(r.tokens) for r in group]
            if write is not None:
                write(problem, group)
        poisoned += sum(map(set_aside_if_poisoned, chain(*groups)))
        start += chunk
        bar.update(1)
    bar.close()
    check_poisoned(*summed([poisoned, samples * len(indices)]))
    return np.array(right), float(np.mean(lengths)) if lengths else math.nan


def drawn_as(one: EvalSet, sampling: Sampling) -> Sampling:
    """The settings with the set's temperature and maximum length; temperature 0: top_k = 1, which
    on a CPU draws among equal largest logits, frequent in 16 bits."""
    if one.temperature == 0:
        return replace(sampling, temperature=1.0, top_k=1, max_tokens=one.max_tokens)
    return replace(sampling, temperature=one.temperature, max_tokens=one.max_tokens)


# -- Within a training run. Functions with a parameter `learner` are collective


def sampler_of(learner, name: str, cfg: Config) -> HFEngine:
    """A plain torch sampler with the current weights of the learner's policy or actor.

    It computes as the learner does. In 16 bits the learner rounds its float32 weights and trains the
    rounded policy; the policy of the unrounded weights can be a much worse one. Under FSDP the
    sampler has a full copy of the weights, because shards cannot decode. The copy is quantized like
    the learner's model."""
    model = getattr(learner.models, name)
    sharded = learner.comm.on and cfg.parallel == "fsdp"
    if sharded:
        fmt = next(
            (m.format for m in model.modules() if isinstance(m, quant.LowBitLinear)),
            None,
        )
        model = quant.empty_model(model.config)
        quant.align(model, fmt)
        memory.fill(model, learner.device)
        memory.round_experts(model, memory.compute_type(cfg))
    engine = HFEngine(
        model,
        device=learner.device,
        vocabulary=learner.models.vocabulary,
        head_fp32=cfg.lm_head_fp32,
        autocast=memory.compute_type(cfg),
    )
    if sharded:
        engine.load(learner.named_tensors(name))
    return engine


def held_out(learner, name: str, run, engine=None) -> dict[str, float]:
    """pass@1 of the learner's policy or actor on the run's held-out sets, distributed over ranks.

    engine: an engine with this model's weights; None: a plain torch sampler. pass@1 is the mean
    over problems; with several sets it is the mean over sets, with mean@n of each set by name."""
    if not run.eval_sets:
        return {}
    cfg, engine = run.cfg, engine or sampler_of(learner, name, run.cfg)
    scores = []
    for eval_set in run.eval_sets:
        n = n_problems(eval_set.task, cfg.eval_problems)
        indices = list(range(learner.comm.rank, n, learner.comm.size))
        request = (run.tokenizer, indices, Sampling(), cfg.seed, run.stop_ids)
        right, _ = solve(engine, eval_set, *request, summed=learner.comm.sum)
        score = right.mean(1) if indices else np.zeros(0)
        total, squares = learner.comm.sum([score.sum(), (score**2).sum()])
        mean = total / n
        variance = max(0.0, squares / n - mean**2)
        scores.append((mean, math.sqrt(variance / max(1, n - 1))))
    return over_sets(
        [(eval_set.label, eval_set.samples) for eval_set in run.eval_sets], scores
    )


def over_sets(
    sets: list[tuple[str, int]], scores: list[tuple[float, float]]
) -> dict[str, float]:
    """The metrics of an evaluation. sets: (label, responses per problem); scores: (mean, standard
    error) of each set."""
    values = {}
    if len(sets) > 1:
        for (label, n), (mean, se) in zip(sets, scores, strict=True):
            values |= {f"{label}_mean@{n}": mean, f"{label}_se": se}
    means, errors = np.array(scores).T
    return {
        "pass@1": float(means.mean()),
        "se": math.sqrt((errors**2).sum()) / len(sets),
        **values,
    }


# -- The command


@dataclass(frozen=True)
class ModelFlags(SampleFlags):
    """Model and problems"""

    task: str = "arith"  # in train.py --task has a default only with toy models
    model: str = ""
    """A run folder (its newest checkpoint's policy), a checkpoint, any Hugging Face folder or id, a
    GGUF file (see train.py), or base:policy."""
    role: Literal["policy", "actor"] = "policy"
    """Model to evaluate if --model names a run or a checkpoint."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Default of --rollout_dtype; python -m probe: also the learner's compute dtype; default: the
    checkpoint's."""
    problems: int | None = None
    """Maximum number of problems of each set; default 512 (python -m probe: 64)."""
    samples: int = 4
    """n: number of responses to each problem."""
    seed: int = 0
    """Seed of sampling."""
    out: str = ""
    """Also write the results to this JSON file, X.json. eval.py also writes every response to
    X.responses.jsonl. python -m probe also draws X.png."""


@dataclass(frozen=True)
class EvalFlags(ModelFlags):
    """Evaluation"""

    k: str | None = None
    """pass@k for these k, each at most --samples; default: 1 and --samples."""
    show_prompt: bool = False
    """Print the first prompts as the model sees them, and the tokens that end a response; sample
    nothing."""


@dataclass
class Setup:
    """The model and the problem sets of an evaluation, checked."""

    sets: list[EvalSet]
    folder: str  # of the model
    tokenizer: object
    most: int  # maximum number of held-out problems per set
    context: int  # maximum length of prompt plus response, in tokens
    vocabulary: int
    stop_ids: list[int]

    @property
    def task(self):
        return self.sets[0].task


def n_problems(task, most: int) -> int:
    """Number of problems to use from a set of held-out problems."""
    return most if task.size is None else min(most, task.size)


def open_setup(cfg: ModelFlags, problems: int, sampler: str | None = None) -> Setup:
    """Open the task sets and the model, and check them. UserError: one sentence.

    problems: default of --problems. sampler: folder of a different model that samples."""
    defaults = ("samples", "temperature", "max_tokens")
    sets = eval_sets(cfg, "task", {flag: getattr(cfg, flag) for flag in defaults})
    folder = find_model(cfg, "model", cfg.role)
    one_model = Path(cfg.model) not in Path(folder).parents
    need(
        cfg.role == "policy" or not one_model,
        f"--role={cfg.role}: {cfg.model} is a single model, not a run or a checkpoint; leave the flag out",
    )
    folders = [folder, sampler] if sampler else [folder]
    tokenizer = common_tokenizer(cfg, folder, sampler)
    # a checkpoint's two models were trained with the stop tokens of both
    roles = ("policy", "actor")
    pair = [Path(folder).parent / role for role in roles if Path(folder).name in roles]
    ends = stop_ids(tokenizer, [*folders, *pair], cfg.stop)
    context = max(longest_contexts(cfg, sets, tokenizer, folders))
    vocabulary = models.vocabulary_size(tokenizer, folders)
    check_folders(cfg, folders, vocabulary, context, learns=False)
    quant.check_model(cfg, folders[-1])
    most = problems if cfg.problems is None else cfg.problems
    return Setup(sets, folder, tokenizer, most, context, vocabulary, ends)


def check(cfg: ModelFlags, greedy: bool = False, n_ranks: int = 1) -> None:
    """Raise UserError, one sentence, if a flag is invalid. greedy: --temperature may be 0."""
    cfg = replace(cfg, temperature=1.0) if greedy and cfg.temperature == 0 else cfg
    check_ranges(cfg)
    need(
        cfg.model.strip(),
        "--model is empty: name a run folder, a checkpoint or a Hugging Face folder",
    )
    sampling.check(cfg)
    tasks.check(cfg)
    check_engine(cfg, n_ranks)


def find_model(cfg: ModelFlags, flag: str, which: str) -> str:
    """The model folder (with config.json) of --model or of a different flag. base:policy and
    base:actor exist for --task=arith only.

    which: "policy" or "actor", the model to take from a run or a checkpoint."""
    name = getattr(cfg, flag)
    if name.startswith("base:"):
        other = f"--{flag}={name} knows only --task=arith; give the folder of a model for {cfg.task}"
        need(tasks.names_of(cfg.task) == ["arith"], other)
        return warmstart.base_model(flag, name, Config(task="arith", arith=cfg.arith))
    if folder := models.model_in(name, which):
        return folder
    if flag == "actor" and (folder := models.model_in(name, "policy")):
        return folder
    need(
        names_model(name),
        f"--{flag}={name}: no model there; give a run folder, a checkpoint, a Hugging Face folder or a GGUF file",
    )
    return models.local_folder(flag, name)


def evaluate(cfg: EvalFlags) -> dict:
    """Sample, grade, and print pass@k with standard errors for each set. Returns the results."""
    need(
        cfg.rollout_tp == 1,
        f"--rollout_tp={cfg.rollout_tp}: eval.py has one rank; leave the flag out",
    )
    check(cfg, greedy=True)
    no_learner = "an evaluation has no learner; use python -m probe"
    for name in ("learner_quant", "exact", "router_replay"):
        flags.need_each(cfg, (getattr(cfg, name) in (False, "none"), name, no_learner))
    setup = open_setup(cfg, PROBLEMS)
    ks = {eval_set.label: ks_of(cfg.k, eval_set.samples) for eval_set in setup.sets}
    if cfg.out:
        path = Path(cfg.out).with_suffix(".responses.jsonl")
        ours = not path.exists() or path.read_bytes()[:7] in (b"", b'{"set":')
        need(
            ours,
            f"--out={cfg.out}: {path} exists and is not from eval.py; name a different file",
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = make_engine(cfg, setup.folder, setup.context, 0, device, setup.vocabulary)
    if cfg.out:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
    results = []
    for eval_set in setup.sets:
        indices = range(n_problems(eval_set.task, setup.most))
        request = (indices, Sampling.of(cfg), cfg.seed, setup.stop_ids)
        write = (
            partial(write_responses, path, eval_set.label, setup.tokenizer)
            if cfg.out
            else None
        )
        right, length = solve(engine, eval_set, setup.tokenizer, *request, write)
        results.append(scores(eval_set, right, length, ks[eval_set.label]))
    engine.close()
    first = {"model": setup.folder, "task": cfg.task}
    if len(results) == 1:
        return first | results[0]
    mean = float(np.mean([r[f"mean@{r['samples']}"] for r in results]))
    print(f"mean of the {len(results)} sets: {100 * mean:.2f} %")
    return first | {
        "mean": mean,
        "sets": {
            eval_set.label: r for eval_set, r in zip(setup.sets, results, strict=True)
        },
    }


def ks_of(text: str | None, n: int) -> list[int]:
    """--k as a list of numbers; default [1, n]. UserError: a number is not between 1 and n."""
    if text is None:
        return sorted({1, n})
    ks = [flags.number(k, int) for k in text.split(",")]
    need(
        all(1 <= k <= n for k in ks),
        f"--k={text}: each k must be between 1 and --samples={n}, as in 1,{n}",
    )
    return ks


def scores(one: EvalSet, right, length: float, ks: list[int]) -> dict:
    """Compute and print mean@n and pass@k of a set with standard errors over problems."""
    n = one.samples
    means = {f"mean@{n}": right.mean(1)}  # one number per problem
    for k in ks:
        means[f"pass@{k}"] = [pass_at_k(n, int(c), k) for c in right.sum(1)]
    out = {"problems": len(right), "samples": n, "response_length": length}
    print(
        f"{one.label}: {len(right)} problems, {n} responses each, {length:.1f} tokens a response"
    )
    for name, score in means.items():
        mean, se = mean_se(score)
        out |= {name: mean, f"{name}_se": se}
        print(f"  {name:8s} {100 * mean:6.2f} +- {100 * se:.2f} %")
    return out


def write_responses(path: Path, label: str, tokenizer, problem, group) -> None:
    """Append a problem's graded responses to a JSONL file. label: of the problem's set."""
    row = {
        "set": label,
        "id": problem.id,
        "answer": problem.answer,
        "rewards": [r.reward for r in group],
        "tokens": [len(r.tokens) for r in group],
        "finish_reasons": [r.finish_reason for r in group],
        "responses": tokenizer.batch_decode(
            [r.tokens.tolist() for r in group], skip_special_tokens=True
        ),
    }
    with open(path, "a", encoding="utf-8") as f:
        f.write(json.dumps(row) + "\n")


def show_prompt(cfg: EvalFlags) -> dict:
    """Print the first prompts of each set as the model sees them."""
    check(cfg, greedy=True)
    setup = open_setup(cfg, prompts.SHOWN)
    for eval_set in setup.sets:
        n = n_problems(eval_set.task, min(setup.most, prompts.SHOWN))
        problems = [eval_set.task.problem("test", i) for i in range(n)]
        print(prompts.shown(setup.tokenizer, problems, setup.stop_ids))
    return {}


def filled(cfg: ModelFlags) -> ModelFlags:
    """The flags with defaults filled in. UserError: --max_tokens is not set, and the model is not a
    toy model."""
    is_custom = cfg.model.strip() and not cfg.model.startswith("base:")
    if is_custom and cfg.max_tokens is None:
        find_model(cfg, "model", cfg.role)  # raises for a wrong name
        check_named(cfg.model, [f"--max_tokens={PROPOSED['max_tokens']}"])
    flags_of_ours = ("max_tokens",) if is_custom else ("max_tokens", "dtype")
    cfg = fill(cfg, {flag: EMBEDDED[flag] for flag in flags_of_ours})
    if cfg.dtype is None:
        model = (
            cfg.model if is_hub_id(cfg.model) else find_model(cfg, "model", cfg.role)
        )
        cfg = replace(cfg, dtype=models.own_dtype(model))
    return fill(cfg, {"rollout_dtype": cfg.dtype})


def main(argv: list[str] | None = None) -> dict:
    """Run the command; return the result, which --out writes. UserError: one sentence."""
    cfg = parse_flags(EvalFlags, argv, "python eval.py --model=FOLDER --key=value ...")
    cfg = tasks.as_trained(cfg, {key for key, _ in flags.read(EvalFlags, argv)})
    cfg = filled(cfg)
    if cfg.out:
        check_result("out", cfg.out)
    result = show_prompt(cfg) if cfg.show_prompt else evaluate(cfg)
    write_result("" if cfg.show_prompt else cfg.out, result)
    return result


def write_result(out: str, result: dict) -> None:
    """Write a result to the JSON file `out`, unless `out` is empty."""
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        named = {"command": sys.argv[1:], **result}
        replace_text(Path(out), json.dumps(named, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
