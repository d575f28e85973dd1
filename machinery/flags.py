"""The command line: a dataclass is a command's flags, and every command is read by the same code.

    @dataclass(frozen=True)
    class SizeFlags:
        \"\"\"Sizes\"\"\"                         # the title of a group in --help

        steps: int = 150
        \"\"\"Optimizer updates.\"\"\"             # the flag's help

A field is a flag, its type says what it takes, the string below it is its help. A class may inherit
from several such groups. `parse_flags(Flags, argv)` returns an instance, or raises UserError, one
sentence that names the flag; `run_command` prints it."""

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
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

LISTED = 36  # maximum number of names in an error message
NEAR = 0.75  # minimum similarity to suggest a flag name
BASE_ACCURACY = 0.3  # sampled accuracy of embedded models before RL
LIKE = 0.45  # minimum similarity to suggest a flag value


class UserError(ValueError):
    """An error that the user can fix; the message, one sentence, names the fix.

    It is printed without a traceback. Any other exception is a bug and keeps its traceback."""


def need(ok, sentence: str) -> None:
    """UserError with this sentence unless `ok`."""
    if not ok:
        raise UserError(sentence)


# errors of files and disks -> the fix, which follows the file's name and the system's message
RIGHTS = "name another place, or ask for the right to use this one"
ROOM = "make room there, or name a place on another disk"
DISK = "look at the disk, or name a place on another one"
PLACE = "name another place"
ABOUT_FILES = {
    errno.EACCES: RIGHTS,
    errno.EDQUOT: ROOM,
    errno.EEXIST: PLACE,
    errno.EFBIG: ROOM,
    errno.EIO: DISK,
    errno.EISDIR: "name a file",
    errno.ENAMETOOLONG: "name a shorter one",
    errno.ENOENT: "name a path that is there",
    errno.ENOSPC: ROOM,
    errno.ENOTDIR: PLACE,
    errno.ENOTEMPTY: PLACE,
    errno.EPERM: RIGHTS,
    errno.EROFS: PLACE,
    errno.ESTALE: DISK,
}


def about_files(e: OSError, path: Path | str | None = None) -> UserError | None:
    """The sentence for a file that cannot be read or written; None for trouble of another kind.

    path: the file, where the error does not name it."""
    if e.errno not in ABOUT_FILES:
        return None
    name = path if e.filename is None else e.filename
    prefix = "" if name is None else f"{name}: "
    return UserError(f"{prefix}{e.strerror}; {ABOUT_FILES[e.errno]}")


def read_text(path: Path | str) -> str:
    """The text of a file in UTF-8, without the mark that some editors put first. UserError names
    the file."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not a text file in UTF-8 (byte {e.start}); convert it") from None
    except OSError as e:
        raise about_files(e, path) or e from None


def read_json(path: Path | str, fix: str) -> dict:
    """The JSON object in a file. UserError names the file, the problem, and the fix."""
    try:
        value = json.loads(read_text(path))
    except UserError:
        raise
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not valid JSON ({e}); {fix}") from None
    need(isinstance(value, dict), f"{path}: not a JSON object; {fix}")
    return value


def is_hub_id(name: str) -> bool:
    """Whether this can be the id of a model on the hub: it reads owner/name, and nothing here is
    called so."""
    return (
        bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name))
        and not Path(name).exists()
    )


def refuse_adapter(flag: str, name: str) -> None:
    """UserError if a folder has adapters alone."""
    folder = Path(name)
    alone = (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()
    merge = f"python -m model.lora --adapter={name} --out=FOLDER"
    need(not alone, f"--{flag}={name}: it has only adapters; merge them with {merge}")


def names_model(name: str) -> bool:
    """Whether this is a folder with a config.json, or can be the id of a model on the hub."""
    return (Path(name) / "config.json").is_file() or is_hub_id(name)


def embedded_model(flag: str, name: str) -> tuple[str, float]:
    """(policy or actor, sampled accuracy of its warm start) of base:KIND or base:KIND@ACCURACY."""
    kind, at, accuracy = name.removeprefix("base:").partition("@")
    choice(flag, f"base:{kind}", ["base:policy", "base:actor"])
    wrong = f"--{flag}={name}: the accuracy after @ must be a share between 0 and 1"
    try:
        share = float(accuracy) if at else BASE_ACCURACY
    except ValueError:
        raise UserError(wrong) from None
    need(0 < share < 1, wrong)
    return kind, share


def check_output(flag: str, path: str) -> None:
    """UserError, before anything is computed, if no file can be written at the path that a flag
    names."""
    file = Path(path)
    need(path.strip(), f"--{flag} is empty: name the file to write")
    need(not file.is_dir(), f"--{flag}={path}: a folder; name a file in it")
    there = next(folder for folder in file.absolute().parents if folder.exists())
    need(there.is_dir(), f"--{flag}={path}: {there} is a file, not a folder; {PLACE}")
    taken = file if file.exists() else there
    # nobody makes a file there
    kernel = there.is_relative_to("/proc") or there.is_relative_to("/sys")
    need(
        os.access(taken, os.W_OK) and not kernel,
        f"--{flag}={path}: {taken} cannot be written; {PLACE}",
    )


def check_result(flag: str, path: str) -> None:
    """`check_output` for a JSON result, which may replace an earlier result (it has `command`) and
    no other file."""
    check_output(flag, path)
    if not Path(path).exists():
        return
    try:
        before = json.loads(Path(path).read_text(encoding="utf-8"))
        replaceable = "command" in before and "config" not in before
    except (ValueError, TypeError, RecursionError):
        replaceable = False
    need(
        replaceable, f"--{flag}={path}: there is a file that is no earlier result; name another one"
    )


def from_environment(name: str, usual: int) -> int:
    """A whole number that torchrun sets, at least `usual`. A wrong value ends the process at once:
    modules read it while they load."""
    value = os.environ.get(name, str(usual))
    if not (value.isascii() and value.isdecimal()) or int(value) < usual:
        sys.exit(
            f"error: {name}={value} in the environment: must be a whole number of at least {usual}, as torchrun sets "
            "it; unset it"
        )
    return int(value)


def run_command(command: Callable[[], object], silent: bool = False) -> None:
    """Run a command, and exit with the code that it returns, if any; a UserError or a file error
    becomes one sentence and exit code 1.

    If stdout is closed (`| head`), exit silently with code 1. After Ctrl-C, exit with 130, as
    shells do. silent: print nothing and exit with 2, for ranks of torchrun other than the first,
    which prints the error."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # machinery/startup.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = command()
        sys.stdout.flush()
        if type(result) is int and result:
            sys.exit(result)
    except BrokenPipeError:
        if not reader_has_gone():  # it was a pipe to another process
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (UserError, OSError) as e:
        error = e if isinstance(e, UserError) else about_files(e)
        if error is None:
            raise
        sys.exit(2 if silent else f"error: {error}")


def reader_has_gone() -> bool:
    """Whether standard output is a pipe without a reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors alone
    return bool(poll.poll(0))


def parse_flags(cls, argv: list[str] | None = None, usage: str = ""):
    """An instance of the dataclass `cls` from `--key=value` arguments; by default the process's
    own.

    UserError: one sentence."""
    return cls(**{key: convert(cls, key, value) for key, value in read(cls, argv, usage)})


def read(cls, argv: list[str] | None = None, usage: str = "", also=()) -> list[tuple[str, str]]:
    """(flag, value) pairs as written; `--help` prints the page and exits, `--help=all` with the
    flags that are rare.

    `--flag value` is `--flag=value`, and a bare `--flag` of a truth is `--flag=True`.
    also: further names that are accepted, for the caller to read."""
    argv = list(sys.argv[1:] if argv is None else argv)
    kinds, pairs = types_of(cls), []
    while argv:
        word = argv.pop(0)
        if word in ("-h", "--help", "--help=all"):
            print(
                help_page(cls, usage, everything=word == "--help=all" or argv[:1] == ["all"]),
                flush=True,
            )
            raise SystemExit(0)
        need(word.startswith("--"), f"{word}: flags are written --key=value")
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        need(key in kinds or key in also, f"--{key}: no such flag{nearest(key, kinds)}")
        if not equals:
            value = "True"
            truth = kinds.get(key) is bool
            if argv and not argv[0].startswith("--") and (not truth or argv[0] in TRUTH):
                value = argv.pop(0)
            else:
                need(truth, f"--{key}: a value is missing; write --{key}=VALUE")
        pairs.append((key, value))
    return pairs


# names of verl, TRL and others -> the flags here
ELSEWHERE = {
    "num_iterations": "--rollout_batch above --train_batch",
    "ppo_epochs": "--rollout_batch above --train_batch",
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
    "epsilon": "--clip_low",
    "epsilon_high": "--clip_high",
    "mask_truncated_completions": "--mask_cut",
    "overlong_filtering": "--mask_cut",
    "use_vllm": "--rollout=vllm",
    "gradient_accumulation_steps": "--micro_tokens",
    "per_device_train_batch_size": "--train_batch, over all ranks",
    "num_train_epochs": "--epochs",
    "max_steps": "--steps",
    "output_dir": "--out",
    "tensor_parallel_size": "--rollout_tp",
    "model_name_or_path": "--model",
    "vllm_importance_sampling_cap": "--is_cap",
}


def nearest(key: str, names) -> str:
    """'; did you mean --NAME?', or a pointer to --help where no name is near."""
    if key in ELSEWHERE and "objective" in names:
        return f"; here it is {ELSEWHERE[key]}"
    near = difflib.get_close_matches(key, list(names), 1, NEAR)
    return f"; did you mean --{near[0]}?" if near else "; see --help"


@functools.cache
def types_of(cls) -> dict[str, type]:
    """Flag -> type, in the order of the fields."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def choices_of(kind) -> list[str]:
    """The strings that a type admits; [] where it admits any."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [c for part in get_args(kind) for c in choices_of(part)]


TRUTH = {"True": True, "true": True, "False": False, "false": False}


def convert(cls, key: str, text: str):
    """The value of a flag from its text. UserError: one sentence."""
    kind = types_of(cls)[key]
    if type(None) in get_args(kind):  # X | None: the default None leaves it to the objective
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
    try:
        if "_" in text or not text.isascii():  # Python would read 0.5_5 as 0.55, and other digits
            raise ValueError
        return finite(cls, key, kind(text))
    except UserError:
        raise
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise UserError(f"--{key}={text[:40]}: must be {wanted}") from None


def at_home(text: str) -> str:
    """The text with ~/ replaced by the home folder, at its start and after commas: a shell leaves
    --out=~/run as it is."""
    return re.sub(r"(^|,)~(?=/|$)", lambda m: m[1] + os.path.expanduser("~"), text)


def finite(cls, key: str, value, place: str = "--"):
    """The value. UserError for NaN, a too large whole number, or infinity, unless the class lists
    the flag as UNBOUNDED.

    place: prefix of the flag in the message."""
    flag = f"{place}{key}={str(value)[:40]}"
    need(not (isinstance(value, float) and math.isnan(value)), f"{flag}: must be a number")
    need(type(value) is not int or abs(value) < 10**18, f"{flag}: must have at most 18 digits")
    infinite = isinstance(value, float) and math.isinf(value)
    need(not infinite or key in getattr(cls, "UNBOUNDED", ()), f"{flag}: must be finite")
    sized = not isinstance(value, float) or infinite or value == 0 or 1e-12 <= abs(value) <= 1e12
    need(sized, f"{flag}: must be 0, or between 1e-12 and 1e12")
    return value


def read_toml(cls, path: str) -> dict:
    """The flags that a flat TOML file sets; names and types are checked as on the command line."""
    need(
        Path(path).is_file(),
        f"--config={path}: no such file; name a TOML file of flags, such as configs/demo.toml",
    )
    try:
        values = tomllib.loads(read_text(path))
    except UserError:
        raise
    except (ValueError, RecursionError) as e:
        raise UserError(f"--config={path}: not valid TOML ({e}); fix that line") from None
    kinds = types_of(cls)
    for key, value in values.items():
        need(key in kinds, f"{path}: {key}: no such flag{nearest(key, kinds)}")
        values[key] = of_toml(cls, path, key, value)
    return values


def of_toml(cls, path: str, key: str, value):
    """A TOML value as the flag's type: a whole number may stand for a float, nothing else
    changes."""
    kind = types_of(cls)[key]
    check_word(key, value, kind, f"{path}: ")
    if choices_of(kind) and type(value) is str:
        return value
    if type(value) is str:
        value = at_home(value)
    accepted = [t for t in (bool, float, int, str) if t is kind or t in get_args(kind)]
    accepted += [int] * (float in accepted)
    need(
        type(value) in accepted,
        f"{path}: {key} = {shortened(value)} is not of type {accepted[0].__name__}",
    )
    finite(cls, key, value, f"{path}: ")
    return float(value) if float in accepted and type(value) is int else value


def shortened(value) -> str:
    """A value as an error shows it: on one line, and not all of a long one."""
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def check_word(key: str, value, kind, place: str = "") -> None:
    """UserError where a type admits words, and the value is not one of them."""
    words = choices_of(kind)
    if words:
        choice(key, value, words, place)


def choice(key: str, value, known, place: str = "") -> None:
    """UserError unless `value` is one of the known ones; it names the nearest. place: of the flag,
    if it is a file."""
    if value not in known:
        near = difflib.get_close_matches(str(value), list(known), 1, LIKE)
        guess = f"; did you mean {near[0]}?" if near else ""
        listed = [*known] if len(known) <= LISTED else [*known][:LISTED] + ["..."]
        raise UserError(f"{place}--{key}={value}: not one of {', '.join(listed)}{guess}")


def groups_of(cls) -> list[type]:
    """The class's own flags first, then its groups as they are written."""
    first = [cls] if "__annotations__" in vars(cls) else []
    return first + [g for base in cls.__bases__ if base is not object for g in groups_of(base)]


def docs_of(cls) -> dict[str, str]:
    """The string below each field of a class's own body, read from its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    docs = {}
    for field, below in zip(body, body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            docs[field.target.id] = " ".join(below.value.value.split())
    return docs


def help_page(cls, usage: str = "", everything: bool = True) -> str:
    """Each flag with its default, its choices and its sentence, by group.

    everything: also the flags that a class with a list COMMON does not have there."""
    kinds, defaults = types_of(cls), {f.name: f.default for f in fields(cls)}
    listing = [base for base in cls.__mro__ if "COMMON" in vars(base) and not everything]
    rare = {key for base in listing for key in types_of(base) if key not in base.COMMON}
    lines = [usage] if usage else []
    for group in groups_of(cls):
        docs = {key: sentence for key, sentence in docs_of(group).items() if key not in rare}
        if docs:
            lines += ["", f"{inspect.cleandoc(group.__doc__).splitlines()[0]}:"]
        for key, sentence in docs.items():
            listed = choices_of(kinds[key])
            default = "" if defaults[key] in (None, "") else f"={defaults[key]}"
            one_of = f"    (one of {', '.join(listed)})" if listed else ""
            lines.append(f"  --{key}{default}{one_of}")
            lines += textwrap.wrap(sentence, 104, initial_indent=" " * 8, subsequent_indent=" " * 8)
    if rare:
        lines += ["", f"--help=all shows {len(rare)} more flags."]
    lines += ["", "--verbose shows warnings and logs of torch, vLLM and transformers."]
    return "\n".join(lines).strip()
