"""Command-line flags: the fields of a dataclass are a command's flags. All commands use this file.

    @dataclass(frozen=True)
    class SizeFlags:
        \"\"\"Sizes\"\"\"                         # the title of a group in --help

        steps: int = 150
        \"\"\"Optimizer updates.\"\"\"             # the flag's help

A field is a flag, its type is the type of the value, and the string below it is the help text. A
class may inherit from several groups. `parse_flags(Flags, argv)` returns an instance. It raises
UserError with one sentence that names the flag; `run_command` prints the sentence."""

from __future__ import annotations

import ast
import difflib
import errno
import functools
import inspect
import json
import math
import os
import re
import select
import signal
import sys
import textwrap
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from config import RANGES

LISTED = 36  # maximum number of names in an error message
NEAR = 0.75  # minimum similarity to suggest a flag name
BASE_ACCURACY = 0.3  # sampled accuracy of toy models before RL
LIKE = 0.45  # minimum similarity to suggest a flag value


class UserError(ValueError):
    """An error that the user can fix. Its message is one sentence that names the fix.

    It is printed without a traceback. Any other exception is a bug and keeps its traceback."""


def need(ok, sentence: str) -> None:
    """Raise UserError with this sentence unless `ok` is true."""
    if not ok:
        raise UserError(sentence)


def need_each(flags, *checks: tuple[object, str, str]) -> None:
    """`need` for (condition, flag, sentence after the flag's value). flags: their values."""
    for ok, flag, sentence in checks:
        if not ok:
            raise UserError(f"--{flag}={getattr(flags, flag)}: {sentence}")


def check_ranges(group) -> None:
    """Raise UserError if a flag has no meaningful value (config.RANGES)."""
    for name, (low, high) in RANGES.items():
        value = getattr(group, name, None)
        most = (
            f"between {low:g} and {high:g}" if high < math.inf else f"at least {low:g}"
        )
        need(value is None or low <= value <= high, f"--{name}={value}: must be {most}")


def read_text(path: Path | str) -> str:
    """The text of a UTF-8 file without byte order mark. Raises UserError, which names the file."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise UserError(
            f"{path}: not a text file in UTF-8 (byte {e.start}); convert it"
        ) from None


def read_json(path: Path | str, fix: str) -> dict:
    """The JSON object in a file. Raises UserError, which names file, problem and fix."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not valid JSON ({e}); {fix}") from None
    need(isinstance(value, dict), f"{path}: not a JSON object; {fix}")
    return value


def shortened(e: BaseException) -> str:
    """The message of an exception in one line of at most 200 characters, or its type."""
    return " ".join(str(e).split())[:200] or type(e).__name__


def is_hub_id(name: str) -> bool:
    """Whether this can be the id of a hub model: the form owner/name, and no local path."""
    return (
        bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name))
        and not name.endswith(".gguf")
        and not Path(name).exists()
    )


def names_model(name: str) -> bool:
    """Whether this is a folder with a config.json, a GGUF file, or can be the id of a hub model."""
    path = Path(name)
    is_gguf = path.suffix == ".gguf" and path.is_file()
    return is_gguf or (path / "config.json").is_file() or is_hub_id(name)


def embedded_model(flag: str, name: str) -> tuple[str, float]:
    """("policy" or "actor", target accuracy of its warm start), from base:KIND[@ACCURACY]."""
    kind, at, accuracy = name.removeprefix("base:").partition("@")
    choice(flag, f"base:{kind}", ["base:policy", "base:actor"])
    share = number(accuracy) if at else BASE_ACCURACY
    need(
        0 < share < 1,
        f"--{flag}={name}: the accuracy after @ must be a share between 0 and 1",
    )
    return kind, share


def check_output(flag: str, path: str) -> None:
    """Raise UserError if no file can be written at the path of a flag. Called before any work."""
    file = Path(path).absolute()
    there = next(place for place in (file, *file.parents) if place.exists())
    right = there.is_file() if there == file else there.is_dir()
    writable = path.strip() and right and os.access(there, os.W_OK)
    is_utf8 = path.encode(errors="replace") == path.encode(errors="surrogatepass")
    need(
        writable and is_utf8,
        f"--{flag}={path}: no file can be written there; name a different path",
    )


def check_result(flag: str, path: str) -> None:
    """`check_output` for a JSON result. It may replace an earlier result (a file with the key
    `command`), but no other file."""
    check_output(flag, path)
    replaceable = not Path(path).exists()
    with suppress(ValueError, TypeError):
        before = (
            {} if replaceable else json.loads(Path(path).read_text(encoding="utf-8"))
        )
        replaceable |= "command" in before and "config" not in before
    sentence = "this file exists and is not an earlier result; name a different file"
    need(replaceable, f"--{flag}={path}: {sentence}")


def from_environment(name: str, usual: int) -> int:
    """An integer environment variable of torchrun, at least `usual`, which is also the default.

    A wrong value ends the process at once, because modules read it on import."""
    value = os.environ.get(name, str(usual))
    if not (value.isascii() and value.isdecimal()) or int(value) < usual:
        sys.exit(
            f"error: {name}={value} in the environment: must be at least {usual}; unset it"
        )
    return int(value)


def is_first_rank() -> bool:
    """Whether this process prints for all ranks. Without other ranks, RANK may be left over."""
    return from_environment("WORLD_SIZE", 1) == 1 or from_environment("RANK", 0) == 0


def replace_text(path: Path, text: str) -> None:
    """Write a file that is complete at any time."""
    scratch = path.with_name(f"{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def run_command(command: Callable[[], object]) -> None:
    """Run a command and exit with its return code, if any. A UserError, an error about a named
    file, a full disk, or another rank's end prints one sentence and exits with code 1.

    If stdout is closed (`| head`), exit silently with code 1. After Ctrl-C, exit with 130, as
    shells do."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # machinery/startup.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = command()
        sys.stdout.flush()
        if type(result) is int and result:
            sys.exit(result)
    except BrokenPipeError:
        if not reader_has_gone():  # the broken pipe is not stdout
            raise
        # Python flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except UserError as e:
        sys.exit(f"error: {e}")
    except OSError as e:
        if e.filename is None and e.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        file = e.filename or "a file that this command writes"
        sys.exit(
            f"error: {file}: {e.strerror}; name a different path or free disk space"
        )
    except RuntimeError as e:
        if "Connection closed by peer" not in str(e):
            raise
        sys.exit("error: another rank has stopped, and prints the reason")


def reader_has_gone() -> bool:
    """Whether standard output is a pipe without a reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors only
    return bool(poll.poll(0))


def parse_flags(cls, argv: list[str] | None = None, usage: str = ""):
    """An instance of the dataclass `cls` from `--key=value` arguments, by default sys.argv[1:].

    Raises UserError."""
    return cls(
        **{key: convert(cls, key, value) for key, value in read(cls, argv, usage)}
    )


def parse_own(own, cls, argv: list[str] | None, usage: str) -> tuple:
    """(an instance of the dataclass `own`, the (flag, value) pairs of `cls` and of --config) from
    arguments that may name flags of both."""
    both = dataclass(frozen=True)(type("Flags", (own, cls), {}))
    pairs, names = read(both, argv, usage, also={"config"}), types_of(own)
    values = {key: convert(own, key, value) for key, value in pairs if key in names}
    return own(**values), [(key, value) for key, value in pairs if key not in names]


def read(
    cls, argv: list[str] | None = None, usage: str = "", also=()
) -> list[tuple[str, str]]:
    """(flag, value) pairs as written. `--help` prints the help page and exits; `--help=all` also
    prints rare flags.

    `--flag value` is `--flag=value`, and a bare boolean `--flag` is `--flag=True`.
    also: additional accepted names, which the caller interprets."""
    argv = list(sys.argv[1:] if argv is None else argv)
    kinds, pairs = types_of(cls), []
    while argv:
        word = argv.pop(0)
        if word in ("-h", "--help", "--help=all"):
            everything = word == "--help=all" or argv[:1] == ["all"]
            print(help_page(cls, usage, everything), flush=True)
            raise SystemExit(0)
        need(word.startswith("--"), f"{word}: flags are written --key=value")
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        need(key in kinds or key in also, f"--{key}: no such flag{nearest(key, kinds)}")
        if not equals:
            value = "True"
            truth = kinds.get(key) is bool
            if (
                argv
                and not argv[0].startswith("--")
                and (not truth or argv[0] in TRUTH)
            ):
                value = argv.pop(0)
            else:
                need(truth, f"--{key}: a value is missing; write --{key}=VALUE")
        pairs.append((key, value))
    return pairs


# names in verl, TRL and similar libraries -> flags of this repository
ELSEWHERE = {
    "num_iterations": "--rollout_batch above --train_batch (each response in one update)",
    "ppo_epochs": "--rollout_batch above --train_batch (each response in one update)",
    "reward_weights": "--reward=NAME*0.5",
    "reward_funcs": "--reward=FILE.py:FUNCTION",
    "filter_overlong_prompts": "--max_prompt_tokens",
    "max_prompt_length": "--max_prompt_tokens",
    "max_response_length": "--max_tokens",
    "max_completion_length": "--max_tokens",
    "use_kl_loss": "--kl_coef",
    "kl_loss_coef": "--kl_coef",
    "beta": "--kl_coef",
    "scale_rewards": "--advantage",
    "loss_type": "--objective or --reduction",
    "loss_agg_mode": "--reduction",
    "num_generations": "--group_size",
    "n": "--group_size",
    "learning_rate": "--lr",
    "max_grad_norm": "--grad_clip",
    "clip_ratio": "--clip_low and --clip_high",
    "epsilon": "--clip_low",
    "epsilon_high": "--clip_high",
    "mask_truncated_completions": "--mask_cut",
    "overlong_filtering": "--mask_cut",
    "use_vllm": "--rollout=vllm",
    "gradient_accumulation_steps": "--micro_tokens",
    "per_device_train_batch_size": "--train_batch, over all ranks",
    "ppo_mini_batch_size": "--train_batch, in responses (verl: prompts), over all ranks",
    "num_train_epochs": "--epochs",
    "total_epochs": "--epochs",
    "adv_estimator": "--advantage",
    "max_steps": "--steps",
    "output_dir": "--out",
    "save_steps": "--save_every",
    "prompt_key": "--columns=prompt=NAME",
    "gpu_memory_utilization": "--rollout_memory",
    "tensor_parallel_size": "--rollout_tp",
    "model_name_or_path": "--model",
    "vllm_importance_sampling_cap": "--is_cap",
}


def nearest(key: str, names) -> str:
    """'; did you mean --NAME?', or a pointer to --help if no name is similar."""
    # verl: actor_rollout_ref.rollout.n
    ours = ELSEWHERE.get(key.rpartition(".")[2], "")
    if set(re.findall(r"--(\w+)", ours)) & set(names):
        return f"; here it is {ours}"
    near = difflib.get_close_matches(key, list(names), 1, NEAR)
    return f"; did you mean --{near[0]}?" if near else "; see --help"


@functools.cache
def types_of(cls) -> dict[str, type]:
    """Flag name -> type, in the order of the fields."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def choices_of(kind) -> list[str]:
    """The strings that a Literal type allows; [] for any other type."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [c for part in get_args(kind) for c in choices_of(part)]


TRUTH = {"True": True, "true": True, "False": False, "false": False}


def convert(cls, key: str, text: str):
    """The value of a flag, parsed from its text. Raises UserError."""
    kind = types_of(cls)[key]
    if type(None) in get_args(kind):  # X | None: None is filled from the objective
        if text == "None":
            return None
        kind = next(k for k in get_args(kind) if k is not type(None))
    if get_origin(kind) is Literal:
        choice(key, text, get_args(kind))
        return text
    if kind is bool:
        choice(key, text, TRUTH)
        return TRUTH[text]
    if kind is str:
        return at_home(text)
    value = number(text, kind)
    wanted = "a whole number" if kind is int else "a number"
    need(not math.isnan(value), f"--{key}={text[:40]}: must be {wanted}")
    bounded = key not in getattr(cls, "UNBOUNDED", ())
    need(not bounded or abs(value) < math.inf, f"--{key}={value}: must be finite")
    return value


def number(text: str, kind: type = float):
    """The number that a text writes in ASCII digits, as an int or a float; NaN if it is none."""
    try:
        return kind(text) if text.isascii() else math.nan
    except ValueError:
        return math.nan


def at_home(text: str) -> str:
    """The text with ~/ and ~NAME/ expanded at its start and after commas; shells do not expand
    --out=~/run."""
    return re.sub(
        r"(^|,)(~[\w-]*)(?=/|$)", lambda m: m[1] + os.path.expanduser(m[2]), text
    )


def read_toml(cls, path: str) -> dict:
    """The flags set by a flat TOML file, with names and types checked as on the command line."""
    text = read_text(path)
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as e:
        raise UserError(
            f"--config={path}: not valid TOML ({e}); fix that line"
        ) from None
    kinds = types_of(cls)
    for key, value in values.items():
        need(key in kinds, f"{path}: {key}: no such flag{nearest(key, kinds)}")
        try:
            values[key] = convert(cls, key, str(value))
        except UserError as e:
            raise UserError(f"{path}: {e}") from None
    return values


def choice(key: str, value, known) -> None:
    """Raise UserError, which names the most similar choice, unless `value` is in `known`."""
    if value not in known:
        near = difflib.get_close_matches(str(value), list(known), 1, LIKE)
        guess = f"; did you mean {near[0]}?" if near else ""
        listed = [*known] if len(known) <= LISTED else [*known][:LISTED] + ["..."]
        raise UserError(f"--{key}={value}: not one of {', '.join(listed)}{guess}")


def groups_of(cls) -> list[type]:
    """The classes with flags: the class itself if it has own flags, then its bases in order."""
    first = [cls] if "__annotations__" in vars(cls) else []
    return first + [
        g for base in cls.__bases__ if base is not object for g in groups_of(base)
    ]


def docs_of(cls) -> dict[str, str]:
    """Field -> the string below it in the body of this class, read from the source code."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


def help_page(cls, usage: str = "", everything: bool = True) -> str:
    """The help page: each flag with its default, choices and help text, by group.

    everything: also flags that are missing from the list COMMON of their class."""
    kinds, defaults = types_of(cls), {f.name: f.default for f in fields(cls)}
    listing = [
        base for base in cls.__mro__ if "COMMON" in vars(base) and not everything
    ]
    rare = {key for base in listing for key in types_of(base) if key not in base.COMMON}
    lines = [usage] if usage else []
    for group in groups_of(cls):
        docs = {
            key: sentence for key, sentence in docs_of(group).items() if key not in rare
        }
        if docs:
            lines += ["", f"{inspect.cleandoc(group.__doc__).splitlines()[0]}:"]
        for key, sentence in docs.items():
            listed = choices_of(kinds[key])
            default = "" if defaults[key] in (None, "") else f"={defaults[key]}"
            one_of = f"    (one of {', '.join(listed)})" if listed else ""
            lines.append(f"  --{key}{default}{one_of}")
            lines += textwrap.wrap(
                sentence, 104, initial_indent=" " * 8, subsequent_indent=" " * 8
            )
    if rare:
        lines += ["", f"--help=all shows {len(rare)} more flags."]
    lines += ["", "--verbose shows warnings and logs of torch, vLLM and transformers."]
    return "\n".join(lines).strip()
