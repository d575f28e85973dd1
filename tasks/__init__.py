"""Tasks: the source of problems, the form of prompts, and the grading of answers.

    arith.py     generated sums with worked steps, for the toy models
    data.py      rows of files and data sets, or of a class in a user's file
    prompts.py   system prompt, template, chat template, tokens, stop tokens
    rewards.py   rewards: built-in parts, and functions in a user's file
    builtin.py   the built-in parts of rewards
    grading.py   the processes that compute rewards
    turns.py     environments that reply to the model
    preflight.py warnings if prompts, gold answers and rewards do not fit together

A task has `problem(split, index)`, `find(id)`, `rewards(answers)`, `size` (None: endless) and
`fit(tokenizer, limit)`. The rest of the repository is independent of the kind of problems."""

from __future__ import annotations

import hashlib
import math
import sys
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from config import COLDEST, Config, PromptFlags, SampleFlags
from machinery.flags import is_first_rank, need, need_each, number, read_json
from tasks import arith, builtin, data, prompts, rewards
from tasks.data import OwnTask, Table
from tasks.grading import graders
from tasks.prompts import Answer, Style


def make_task(
    cfg: SampleFlags,
    flag: str = "task",
    name: str | None = None,
    evaluates: bool = False,
):
    """The task that a flag names. name: one of several names in the flag. Raises UserError.

    evaluates: the task grades only by the first part of --reward, with weight 1."""
    name = getattr(cfg, flag) if name is None else name
    if name == "arith":
        return arith.of_settings(cfg.arith)
    is_custom = data.is_own(name)
    graded_otherwise = (
        cfg.reward and not rewards.Reward(rewards.parts_of(cfg.reward)).needs_answer
    )
    named = data.named_columns(cfg.columns, ("prompt", "answer"))
    columns = (named.get("prompt", ""), named.get("answer", ""))
    rows = (
        []
        if is_custom
        else data.read_rows(name, flag, columns, needed=not graded_otherwise)
    )
    default = (
        "letter"
        if rows and all(data.choices_of(row["row"]) for row in rows)
        else "math"
    )
    parts = rewards.parts_of(cfg.reward or (f"{name}.reward" if is_custom else default))
    # the first part grades evaluations and sets the prompt: not a format
    parts = tuple(sorted(parts, key=lambda part: part.name in builtin.FORMATS))
    reward = rewards.Reward(parts, max_tokens=cfg.max_tokens, overlong=cfg.overlong)
    if evaluates:
        reward = replace(
            reward, parts=(replace(reward.parts[0], weight=1.0),), overlong=0
        )
    style = Style.of(cfg, builtin.TEMPLATE_OF.get(reward.parts[0].name, "plain"))
    task = (
        OwnTask(name, style, reward, columns)
        if is_custom
        else Table(name, rows, style, reward)
    )
    first = task.problem("train", 0)
    rewards.try_out(reward, Answer(first, first.answer, True))
    return task


def at_once(samples: int) -> int:
    """Number of held-out problems per call of the engine. samples: responses to each problem."""
    return min(256, max(1, 1024 // samples))


@dataclass(frozen=True)
class EvalSet:
    """A held-out set with its sampling settings."""

    task: object
    label: str  # name in metrics and results
    samples: int  # responses to each problem
    temperature: float
    max_tokens: int


# settings that can be given for each set: type, smallest value (temperature 0: greedy)
SETTINGS = {"samples": (int, 1), "temperature": (float, 0), "max_tokens": (int, 1)}


def eval_sets(cfg: SampleFlags, flag: str, usual: dict) -> list[EvalSet]:
    """The sets named by a flag, such as NAME,NAME:samples=32:temperature=0.6; `usual` has the
    defaults. Raises UserError."""
    given = f"--{flag}={getattr(cfg, flag)}"
    sets, asked = [], []
    for word in getattr(cfg, flag).split(","):
        name, settings = parts_of(word)
        need(
            name,
            f"{given}: a set has no name; write FILE,FILE:samples=32:temperature=0.6",
        )
        asked.append(
            (name, usual | dict(setting(flag, name, part) for part in settings))
        )
    for name, options in asked:
        temperature = options["temperature"]
        need(
            temperature == 0 or COLDEST <= temperature <= 2,
            f"{given}: temperature={temperature} must be 0, or from {COLDEST} to 2",
        )
        if not temperature:  # greedy responses to a problem are identical
            options["samples"] = 1
        task = make_task(cfg, flag, name, evaluates=True)
        sets.append(EvalSet(task, data.label_of(name), **options))
    need(
        len({eval_set.label for eval_set in sets}) == len(sets),
        f"{given}: two sets have the same name; leave one out, or rename a file",
    )
    return sets


def parts_of(word: str) -> tuple[str, list[str]]:
    """(name of a set, its settings NAME=VALUE)."""
    first, *others = word.strip().split(":")  # the path in `first` may contain "="
    settings = [part for part in others if "=" in part]
    return ":".join([first, *(part for part in others if "=" not in part)]), settings


def names_of(value: str) -> list[str]:
    """The names of the sets in a flag's value."""
    return [name for name, _ in map(parts_of, value.split(",")) if name]


def digests(cfg: Config, task=None) -> dict[str, str]:
    """SHA-256 of each text and file named by the flags of task, reward and prompts (but not of files
    that a file imports), and of the problems of a `task` that a class makes."""
    names = [cfg.task, *names_of(cfg.eval_task)]
    names += rewards.files_of(cfg.reward)
    hashes = {name: data.digest_of(name) for name in names}
    for flag, text in prompts.contents(cfg).items():
        hashes[f"--{flag}"] = hashlib.sha256(text.encode()).hexdigest()
    if isinstance(task, OwnTask):
        name = f"the problems of {task.name} (a Python set has a new order in each process)"
        hashes[name] = task.digest()
    return hashes


def check_unchanged(cfg: Config, task) -> None:
    """Raise UserError if files or problems of the run that --resume continues have changed."""
    path = Path(cfg.out) / "config.json"
    before = (
        read_json(path, "name a different folder").get("data", {})
        if path.is_file()
        else {}
    )
    now = digests(cfg, task)
    changed = [
        name for name, digest in now.items() if before.get(name, digest) != digest
    ]
    need(
        not changed,
        f"--resume: {', '.join(changed)} changed since the run began; restore the old text, or start a new run in a "
        "different --out",
    )


def warn_if_shared(task, held_out: list[EvalSet]) -> None:
    """Print a warning if a held-out table has problems of the training table."""
    trained = {str(row["prompt"]).strip() for row in getattr(task, "rows", [])}
    for each in held_out if trained and is_first_rank() else []:
        n = sum(
            str(row["prompt"]).strip() in trained
            for row in getattr(each.task, "rows", [])
        )
        if n:
            print(
                f"warning: --eval_task={each.task.name}: {n} of its problems are in --task, so its score is not a "
                "held-out accuracy",
                file=sys.stderr,
            )


def setting(flag: str, name: str, part: str) -> tuple[str, float]:
    """(name, value) of a set's setting NAME=VALUE. Raises UserError."""
    key, _, text = part.partition("=")
    known = ", ".join(f"{key}=" for key in SETTINGS)
    need(
        key in SETTINGS,
        f"--{flag}={name}:{part}: no such setting; the settings are {known}",
    )
    kind, smallest = SETTINGS[key]
    value = number(text, kind)
    need(
        math.isfinite(value) and value >= smallest,
        f"--{flag}={name}:{part}: must be a number of at least {smallest}",
    )
    return key, value


def check(cfg: Config) -> None:
    """Raise UserError if the flags of the task contradict each other or are out of range."""
    need_each(
        cfg,
        (
            0 <= cfg.overlong < cfg.max_tokens,
            "overlong",
            "must be from 0 to below --max_tokens",
        ),
        (cfg.max_prompt_tokens >= 0, "max_prompt_tokens", "must be at least 0"),
    )
    need(
        not (getattr(cfg, "epochs", 0) and cfg.dynamic_sampling),
        "--epochs with --dynamic_sampling: the number of groups per update is not known; give --steps",
    )
    if cfg.task == "arith":
        arith.of_settings(cfg.arith)
        return
    held_out = getattr(cfg, "eval_every", 0) <= 0 or cfg.eval_task
    need_each(
        cfg,
        (
            held_out,
            "eval_every",
            "there is no held-out set; name files with --eval_task",
        ),
        (
            not cfg.arith,
            "arith",
            f"settings of --task=arith; leave it out for --task={cfg.task}",
        ),
    )


def as_trained(cfg: Config, given: set[str]):
    """Flags of eval.py or the probe, with prompts, length, precision, stop tokens and grading taken
    from the run that --model names, unless they are in `given`. Raises UserError.

    eval.py evaluates the policy as the learner computes it: in --dtype, and in low bits if it was
    trained in them. The probe compares the run's engine with the run's learner."""
    saved = config_of_run(Path(cfg.model)) if cfg.model else None
    if saved is None:
        return cfg
    names = {"max_tokens", "stop", "reward", "lm_head_fp32", "dtype"}
    names |= {f.name for f in fields(PromptFlags)} - {"max_prompt_tokens"}
    probes = hasattr(cfg, "actor")
    other = probes and cfg.actor not in ("", "none")  # an actor samples
    sampler = "policy" if saved.get("actor") == "none" else "actor"
    learner_quant = saved.get("learner_quant", "none")
    matches = sampler == ("actor" if other else getattr(cfg, "role", "policy"))
    matches = matches and "rollout_quant" not in given
    if matches and probes:
        names |= {"rollout_quant", "quant_group"}
        names |= set() if other else {"learner_quant"}
        names |= set() if "dtype" in given else {"rollout_dtype"}
    elif matches and learner_quant != "none":
        if learner_quant != "aligned":
            saved["rollout_quant"] = learner_quant
        names |= {"rollout_quant", "quant_group"}
    if names_of(cfg.task) == [saved.get("task")] == ["arith"]:  # the run's own sums
        names.add("arith")
    of_the_run = {saved.get("task"), *names_of(saved.get("eval_task", ""))}
    same_task = of_the_run.issuperset(names_of(cfg.task))
    names |= {"columns"} if same_task else set()
    of_run = {name: saved[name] for name in sorted(names - given) if name in saved}
    if of_run.get("reward") and not same_task:
        print(
            f"--reward={saved['reward']} and --prompt_template of {cfg.model} are not used, because the run has a "
            "different --task and --eval_task; set both flags to use the run's values"
        )
        for name in ("reward", "prompt_template"):
            of_run.pop(name, None)
    asked = {
        name: value for name, value in of_run.items() if value != getattr(cfg, name)
    }
    told = [f"--{k}={v}" for k, v in asked.items() if k != "chat_date"]
    if told:
        print(f"as in {cfg.model}: {' '.join(told)}")
    return replace(cfg, **asked)


def config_of_run(model: Path) -> dict | None:
    """The flags of the run of a folder: RUN itself, or RUN/checkpoints/step_N/policy. None: the
    folder belongs to no run."""
    inside = [path.parent for path in model.parents if path.name == "checkpoints"]
    for folder in (model, *inside[:1]):
        if (folder / "config.json").is_file():
            made = read_json(
                folder / "config.json", "copy it again, or name a different folder"
            )
            # the config.json of a model has no such key
            if isinstance(made.get("config"), dict):
                return made["config"]
    return None


def grade_all(task, tokenizer, problems, groups, known: dict | None = None) -> Counter:
    """Set each response's reward. problems: one for each group; groups: lists of responses; known:
    results of reward functions (`grading_thread`).

    The graded text has no special tokens and no replies of an environment; `finished` means that
    the response ended with a stop token. Returns the task's counts (rewards.Reward.of)."""
    pairs = [(p, r) for p, group in zip(problems, groups, strict=True) for r in group]
    earned, counts = task.rewards(
        [answer_of(tokenizer, *pair) for pair in pairs], known
    )
    for (_, response), reward in zip(pairs, earned, strict=True):
        response.reward = reward
    return counts


def answer_of(tokenizer, problem, response) -> Answer:
    """A response for the grader. Its text is that of the model's turns, joined by newlines."""
    tokens = zip(response.loss_mask.tolist(), response.tokens.tolist(), strict=True)
    runs = [
        [x for _, x in run]
        for sampled, run in groupby(tokens, itemgetter(0))
        if sampled
    ]
    text = "\n".join(tokenizer.decode(run, skip_special_tokens=True) for run in runs)
    finished = response.finish_reason == "stop"

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    return Answer(problem, text, finished, len(response.tokens), count)


@contextmanager
def grading_thread(task, tokenizer, problems):
    """A callback for finished responses, and a dict of their results (rewards.Reward.values), which
    a thread computes while the engine decodes other responses. At the end of the `with` block all
    of them are graded; until then nothing else may use `graders()`, because the end of the block
    stops all its calls.

    `grade_all` computes rewards and counts from the results, in the order of the responses, so that
    they do not depend on time. The callback takes pairs (index of the problem, response)."""
    known, arrived, calls, thread = {}, deque(), [], ThreadPoolExecutor(1)

    def grade() -> None:
        answers = [
            answer_of(tokenizer, *arrived.popleft()) for _ in range(len(arrived))
        ]
        for part in task.reward.parts:
            task.reward.values(part, answers, known)

    def add(finished) -> None:
        arrived.extend((problems[i], response) for i, response in finished)
        calls.append(thread.submit(grade))

    try:
        # `arith` needs no grading processes
        yield add if isinstance(task, Table) else None, known
        for call in calls:
            call.result()
    finally:
        graders().stopped.set()  # after an exception a call may still run
        thread.shutdown(cancel_futures=True)
        graders().stopped.clear()


def grading_metrics(counts: Counter) -> dict[str, float]:
    """Metrics from summed counts; empty if no answer was graded."""
    n = counts["answers"]
    if not n:
        return {}
    values = {f"grade/{name}": float(counts[name]) for name in ("timeouts", "failures")}
    if "unboxed" in counts:  # only if `math` grades
        values["grade/unboxed"] = counts["unboxed"] / n
    if counts["plain"]:
        values["grade/inexact"] = counts["inexact"] / counts["plain"]
    parts = {
        name: total / n for name, total in counts.items() if name.startswith("reward/")
    }
    return values | (parts if len(parts) > 1 else {})
