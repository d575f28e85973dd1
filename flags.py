"""The command line: a dataclass is a command's flags, and every command is read by the same code.

    @dataclass(frozen=True)
    class SizeFlags:
        \"\"\"Sizes\"\"\"                         # the title of a group in --help

        steps: int = 150
        \"\"\"Optimizer updates.\"\"\"             # the flag's help

A field is a flag, its type says what it takes, the string below it is its help. A class may inherit from several
such groups. `parse_flags(Flags, argv)` returns an instance, or raises UserError, one sentence that names the
flag; `run_command` prints it.
"""

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

LISTED = 36  # so many names at most stand in a sentence
NEAR = 0.75  # a name less like a flag than this is no slip of the finger, and gets no guess
LIKE = 0.45  # the same of a value and those that a flag takes


class UserError(ValueError):
    """What is wrong can be mended by whoever gave the command; the message, one sentence, says how.

    Such an error is printed without a traceback. Any other exception is a fault of ours and keeps its own."""


def need(ok, sentence: str) -> None:
    """UserError with this sentence unless `ok`."""
    if not ok:
        raise UserError(sentence)


# what can be wrong with a file or a disk, and the mend: with the file's name and the system's words it is a sentence
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
    where = "" if name is None else f"{name}: "
    return UserError(f"{where}{e.strerror}; {ABOUT_FILES[e.errno]}")


def read_text(path: Path | str) -> str:
    """The text of a file in UTF-8, without the mark that some editors put first. UserError names the file."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not a text file in UTF-8 (byte {e.start}); convert it") from None
    except OSError as e:
        raise about_files(e, path) or e from None


def read_json(path: Path | str, mend: str) -> dict:
    """The JSON object in a file. UserError names the file, what is wrong with it, and the mend."""
    try:
        found = json.loads(read_text(path))
    except UserError:
        raise
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not valid JSON ({e}); {mend}") from None
    need(isinstance(found, dict), f"{path}: not a JSON object; {mend}")
    return found


def is_hub_id(name: str) -> bool:
    """Whether this can be the id of a model on the hub: it reads owner/name, and nothing here is called so."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name)) and not Path(name).exists()


def names_model(name: str) -> bool:
    """Whether this is a folder with a config.json, or can be the id of a model on the hub."""
    return (Path(name) / "config.json").is_file() or is_hub_id(name)


def check_output(flag: str, path: str) -> None:
    """UserError, before anything is computed, if no file can be written at the path that a flag names."""
    file = Path(path)
    need(path.strip(), f"--{flag} is empty: name the file to write")
    need(not file.is_dir(), f"--{flag}={path}: a folder; name a file in it")
    there = next(folder for folder in file.absolute().parents if folder.exists())
    need(there.is_dir(), f"--{flag}={path}: {there} is a file, not a folder; {PLACE}")
    taken = file if file.exists() else there
    kernel = there.is_relative_to("/proc") or there.is_relative_to("/sys")  # nobody makes a file there
    need(os.access(taken, os.W_OK) and not kernel, f"--{flag}={path}: {taken} cannot be written; {PLACE}")


def from_environment(name: str, usual: int) -> int:
    """A whole number that torchrun sets. It is read while modules load, so what is wrong ends the process at once."""
    value = os.environ.get(name, str(usual))
    if not value.isdecimal():
        sys.exit(f"error: {name}={value} in the environment: must be a whole number, as torchrun sets it; unset it")
    return int(value)


def run_command(command: Callable[[], object], silent: bool = False) -> None:
    """Run a process's command: a UserError becomes one sentence and exit code 1, as does trouble with a file.

    Where whoever read the output has gone (`| head`), it ends without a word, with exit code 1, too; at a Ctrl-C with
    130, as shells have it.
    silent: print nothing and exit with 2, for ranks of torchrun beside the first, which has the same to say."""
    try:
        command()
        sys.stdout.flush()
    except BrokenPipeError:
        if not reader_has_gone():  # it was a pipe to another process
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes at its end
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (UserError, OSError) as e:
        said = e if isinstance(e, UserError) else about_files(e)
        if said is None:
            raise
        sys.exit(2 if silent else f"error: {said}")


def reader_has_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors alone
    return bool(poll.poll(0))


def parse_flags(cls, argv: list[str] | None = None, usage: str = ""):
    """An instance of the dataclass `cls` from `--key=value` arguments; by default the process's own.

    UserError: one sentence."""
    return cls(**{key: convert(cls, key, value) for key, value in read(cls, argv, usage)})


def read(cls, argv: list[str] | None = None, usage: str = "", also=()) -> list[tuple[str, str]]:
    """(flag, value) pairs as written; `--help` prints the page and exits.

    `--flag value` is `--flag=value`, and a bare `--flag` of a truth is `--flag=True`.
    also: further names that are let through, which the caller translates (config.py)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    kinds, pairs = types_of(cls), []
    while argv:
        word = argv.pop(0)
        if word in ("-h", "--help"):
            print(help_page(cls, usage), flush=True)
            raise SystemExit(0)
        need(word.startswith("--"), f"{word}: flags are written --key=value")
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        need(key in kinds or key in also, f"--{key}: no such flag{nearest(key, kinds)}")
        if not equals:
            value = "True"
            truth = kinds.get(FOREIGN.get(key, key)) is bool
            if argv and not argv[0].startswith("--") and (not truth or argv[0] in TRUTH):
                value = argv.pop(0)
            else:
                need(truth, f"--{key}: a value is missing; write --{key}=VALUE")
        pairs.append((key, value))
    return pairs


def nearest(key: str, names) -> str:
    """'; did you mean --NAME?', what another framework's flag is here, or where to look when nothing is near."""
    last = key.rpartition(".")[2]  # verl's have the path of its configuration before them
    there = COUNTERPARTS.get(last, last)
    if there.partition(" ")[0].partition("=")[0].strip(",") in names:
        return f"; here it is --{there}"
    if FOREIGN.get(last) in names:
        return f"; write --{last}, which is --{FOREIGN[last]} here"
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


def is_number_or_word(kind) -> bool:
    """Whether a type admits numbers beside words, as float | Literal["auto"] does."""
    return float in get_args(kind) and bool(choices_of(kind))


TRUTH = {"True": True, "true": True, "False": False, "false": False}


def convert(cls, key: str, text: str):
    """The value of a flag from its text. UserError: one sentence."""
    kind = types_of(cls)[key]
    if type(None) in get_args(kind):  # X | None: the default None leaves it to the objective
        if text == "None":
            return None
        if is_number_or_word(kind) and text in choices_of(kind):
            return text
        kind = next(k for k in get_args(kind) if k is not type(None))
    if get_origin(kind) is Literal:
        choice(key, text, get_args(kind))
        return text
    if kind is bool:
        choice(key, text, TRUTH)
        return TRUTH[text]
    if kind is str:
        return text
    try:
        if "_" in text:  # Python would read 0.5_5 as 0.55
            raise ValueError
        return finite(cls, key, kind(text))
    except UserError:
        raise
    except ValueError:
        wanted = "a whole number" if kind is int else " or ".join(["a number", *choices_of(types_of(cls)[key])])
        raise UserError(f"--{key}={text[:40]}: must be {wanted}") from None


def finite(cls, key: str, value, place: str = "--"):
    """The value. UserError where it is NaN, or too large a whole number; or infinite, unless the class says that this
    flag may be (UNBOUNDED). place: what stands before the flag in the sentence."""
    flag = f"{place}{key}={str(value)[:40]}"
    need(not (isinstance(value, float) and math.isnan(value)), f"{flag}: must be a number")
    need(type(value) is not int or abs(value) < 10**18, f"{flag}: must have at most 18 digits")
    infinite = isinstance(value, float) and math.isinf(value)
    need(not infinite or key in getattr(cls, "UNBOUNDED", ()), f"{flag}: must be finite")
    return value


def read_toml(cls, path: str) -> dict:
    """The flags that a flat TOML file sets; names and types are checked as on the command line."""
    need(Path(path).is_file(), f"--config={path}: no such file; name a TOML file of flags, such as configs/demo.toml")
    try:
        values = tomllib.loads(read_text(path))
    except UserError:
        raise
    except (ValueError, RecursionError) as e:
        raise UserError(f"--config={path}: not valid TOML ({e}); mend that place") from None
    kinds = types_of(cls)
    for key, value in values.items():
        need(key in kinds, f"{path}: {key}: no such flag{nearest(key, kinds)}")
        values[key] = of_toml(cls, path, key, value)
    return values


def of_toml(cls, path: str, key: str, value):
    """A TOML value as the flag's type: a whole number may stand for a float, nothing else changes."""
    kind = types_of(cls)[key]
    if type(value) is str:
        value = in_our_words(key, value)
    check_word(key, value, kind, f"{path}: ")
    if choices_of(kind) and type(value) is str:
        return value
    accepted = [t for t in (bool, float, int, str) if t is kind or t in get_args(kind)]
    accepted += [int] * (float in accepted)
    need(type(value) in accepted, f"{path}: {key} = {shortened(value)} is not of type {accepted[0].__name__}")
    finite(cls, key, value, f"{path}: ")
    return float(value) if float in accepted and type(value) is int else value


def shortened(value) -> str:
    """A value as an error shows it: on one line, and not all of a long one."""
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def check_word(key: str, value, kind, place: str = "") -> None:
    """UserError where a type admits words, and the value is neither one of them nor a number beside them."""
    words = choices_of(kind)
    if is_number_or_word(kind) and type(value) is str:
        need(value in words, f"{place}--{key}={value}: must be a number or {' or '.join(words)}")
    elif words and not is_number_or_word(kind):
        choice(key, value, words, place)


def choice(key: str, value, known, place: str = "") -> None:
    """UserError unless `value` is one of the known ones; it names the nearest. place: of the flag, if it is a file."""
    if value not in known:
        near = difflib.get_close_matches(str(value), list(known), 1, LIKE)
        guess = f"; did you mean {near[0]}?" if near else ""
        listed = [*known] if len(known) <= LISTED else [*known][:LISTED] + ["..."]
        raise UserError(f"{place}--{key}={value}: not one of {', '.join(listed)}{guess}")


def groups_of(cls) -> list[type]:
    """The class's own flags first, then its groups as they are written."""
    own = [cls] if "__annotations__" in vars(cls) else []
    return own + [g for base in cls.__bases__ if base is not object for g in groups_of(base)]


def docs_of(cls) -> dict[str, str]:
    """The string below each field of a class's own body, read from its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    docs = {}
    for field, below in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[field.target.id] = " ".join(below.value.value.split())
    return docs


def help_page(cls, usage: str = "") -> str:
    """Every flag with its default, its choices and its sentence, group by group."""
    kinds, defaults = types_of(cls), {f.name: f.default for f in fields(cls)}
    lines = [usage] if usage else []
    for group in groups_of(cls):
        lines += ["", f"{inspect.cleandoc(group.__doc__).splitlines()[0]}:"]
        for key, sentence in docs_of(group).items():
            listed = choices_of(kinds[key])
            default = "" if defaults[key] in (None, "") else f"={defaults[key]}"
            admits = "a number, or " if is_number_or_word(kinds[key]) else "one of "
            one_of = f"    ({admits}{', '.join(listed)})" if listed else ""
            lines.append(f"  --{key}{default}{one_of}")
            lines += textwrap.wrap(sentence, 104, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines).strip()


# ---------------------------------------------------------------------------------------------------------------------
# Names of other frameworks
# ---------------------------------------------------------------------------------------------------------------------

# flags of verl and TRL -> ours
FOREIGN = {
    "rollout_is": "correction",
    "rollout_is_threshold": "is_cap",
    "rollout_rs": "reject",
    "rollout_rs_threshold_lower": "rs_low",
    "rollout_rs_threshold": "rs_high",
    "rollout_token_veto_threshold": "veto",
    "rollout_is_batch_normalize": "normalize_weights",
    "loss_agg_mode": "reduction",
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "clip_ratio_c": "dual_clip",
    "kl_loss_coef": "kl_coef",
    "kl_loss_type": "kl_estimator",
    "use_kl_in_reward": "kl_in",
    "entropy_coeff": "entropy_coef",
    "lr_warmup_steps_ratio": "warmup_steps",
    "vllm_importance_sampling_mode": "objective",
    "vllm_importance_sampling_clip_max": "is_cap",
    "vllm_importance_sampling_cap": "is_cap",
    "vllm_importance_sampling_clip_min": "is_floor",
    "off_policy_mask_threshold": "rs_low",
    "loss_type": "objective",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "delta": "dual_clip",
    "num_generations": "group_size",
    "max_completion_length": "max_tokens",
    "learning_rate": "lr",
    "beta": "kl_coef",
    "lora_r": "lora_rank",
    "warmup_ratio": "warmup_steps",
}
# flags of theirs that count something else, or are several of ours -> what to write
COUNTERPARTS = {
    "adv_estimator": "advantage=grpo, grpo_no_std or rloo",
    "gpu_memory_utilization": "rollout_memory, a share of the GPU",
    "gradient_accumulation_steps": "train_batch, the responses of one update; --micro_tokens cuts them into passes",
    "max_prompt_length": "max_prompt_tokens",
    "max_response_length": "max_tokens",
    "n": "group_size",
    "per_device_train_batch_size": "micro_tokens, of one pass; --train_batch counts one update's responses",
    "ppo_mini_batch_size": "train_batch, in responses, not prompts: prompts times --group_size",
    "steps_per_generation": "rollout_batch, the responses of one rollout: updates times --train_batch",
    "tensor_model_parallel_size": "rollout_tp",
    "train_batch_size": "rollout_batch, in responses, not prompts: prompts times --group_size",
    "use_vllm": "rollout=vllm, the default",
}
# verl's values -> ours, by our flag's name; under that name, and in files, they are understood too
RATIOS = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geo"}
VALUES = {
    "correction": {"token": "tis", "sequence": "seq_tis", "null": "none"},
    "reject": {**RATIOS, "geometric": "geo", "null": "none"},
    "kl_estimator": {"kl": "k1", "mse": "k2", "low_var_kl": "k3"},
    "kl_in": {"True": "reward", "true": "reward", "False": "loss", "false": "loss"},
}
# a correction whose weight verl bounds by one number -> the one that drops outside of two
MASKED = {"tis": "icepop", "seq_tis": "seq_mis", "geo_rs_seq_tis": "seq_mis", "icepop": "icepop", "seq_mis": "seq_mis"}


def ours(key: str, value: str) -> dict[str, str]:
    """A flag and its value under our names, whichever framework's they are; verl writes two bounds as low_high."""
    name = FOREIGN.get(key, key)
    value = in_our_words(name, value)
    need(
        key != "rollout_rs_threshold" or "," not in value,
        f"--{key}={value}: bounds of several statistics stand with their names here; write "
        "--reject=token:0.5:5,seq_max_k2:0:2",
    )
    low, between, high = value.partition("_")
    if key == "rollout_rs_threshold" and between:
        return {"rs_low": low, "rs_high": high}
    if key == "rollout_is_threshold" and between:  # what they bound is known with all flags: `meant`
        return {}
    if key == "beta":  # TRL knows one estimator
        return {name: value, "kl_estimator": "k3"}
    return {name: value}


def in_our_words(name: str, value: str) -> str:
    """A value of a flag of ours, or a list of statistics with their bounds, in our words."""
    words = VALUES.get(name, {})
    parts = [part.split(":") for part in value.split(",")]
    return ",".join(":".join([words.get(first, first), *bounds]) for first, *bounds in parts)


def meant(written: dict[str, str], given: dict, from_file: dict, cfg) -> dict:
    """What other frameworks mean beyond names and values, as flags of ours that replace those given.

    written: flags as they stand on the command line; given: the same under our names; from_file: the file's; cfg: what
    all of them and the objective's come to without this. A flag that is given or in the file means what it says."""
    check_said_once(written)
    found, said = {}, {*given, *from_file}
    if "epsilon" in written and "clip_high" not in said:  # TRL: one bound for both sides
        found["clip_high"] = given["clip_low"]
    if written.get("loss_type") == "grpo" and "reduction" not in said:
        found["reduction"] = "seq-mean-token-mean"
    bounded = "rollout_is_threshold" in written or "is_cap" in said
    if "rollout_is" in written and not bounded and cfg.correction == "seq_tis":  # verl: 2 at either level
        found["is_cap"] = 2.0
    if "rollout_rs_threshold" in written and "rs_low" not in given:  # of a ratio x is 1/x .. x
        of_ratio = cfg.reject in ("none", *RATIOS.values())
        found["rs_low"] = 1 / cfg.rs_high if of_ratio and cfg.rs_high else 0.0
    if "_" in written.get("rollout_is_threshold", ""):
        found |= masked(written["rollout_is_threshold"], cfg, found.get("rs_low", cfg.rs_low))
    if any(flag.startswith("vllm_importance_sampling_c") for flag in written):
        found |= trls_bounds(given, cfg)
    if "off_policy_mask_threshold" in written:  # the largest mean of log(p_inf / p_new) of a response with A < 0
        most = given["rs_low"]
        need(
            (cfg.reject, cfg.reject_of, cfg.correction_target) == ("geo", "negative", "new"),
            f"--off_policy_mask_threshold={most}: a bound of --objective=opsm, not of {cfg.objective}; name that one",
        )
        found["rs_low"] = math.exp(-most)
    return found


def same(text: str, other: str) -> bool:
    """Whether two values of a flag are one: 2 and 2.0 are."""
    try:
        return float(text) == float(other)
    except ValueError:
        return text == other


def check_said_once(written: dict[str, str]) -> None:
    """UserError if two flags that mean one of ours say different things of it."""
    said = {}
    for key, value in written.items():
        name = FOREIGN.get(key, key)
        other = said.setdefault(name, (key, value))
        need(
            same(in_our_words(name, value), in_our_words(name, other[1])),
            f"--{other[0]}={other[1]} and --{key}={value} both mean --{name}; give one, and write what the other adds "
            "as flags of ours (python train.py --help)",
        )


def trls_bounds(given: dict, cfg) -> dict:
    """TRL's bounds of a weight: where it truncates they are is_floor and is_cap; where it masks, what lies outside of
    them is dropped."""
    if cfg.correction == "seq_mis":
        low, high = given.get("is_floor", cfg.rs_low), given.get("is_cap", cfg.rs_high)
    elif cfg.correction == "areal_drop" and "is_floor" in given:  # it has no lower bound
        low, high = given["is_floor"], cfg.is_cap
    else:
        return {}
    return {
        "correction": MASKED.get(cfg.correction, "icepop"),
        "is_floor": 0.0,
        "is_cap": None,
        "rs_low": low,
        "rs_high": high,
    }


def masked(bounds: str, cfg, rs_low: float | None) -> dict:
    """Two bounds of verl's weight, low_high: it drops what lies outside. What is rejected besides keeps its own."""
    need(
        cfg.correction in MASKED,
        f"--rollout_is_threshold={bounds}: two bounds of a weight, which --correction={cfg.correction} does not "
        "have; add --rollout_is=token or --rollout_is=sequence",
    )
    found = {"correction": MASKED[cfg.correction]}
    for name, text in zip(("rs_low", "rs_high"), bounds.split("_", 1), strict=True):
        found[name] = convert(type(cfg), name, text)
    reject = "geo" if cfg.correction == "geo_rs_seq_tis" else cfg.reject
    if reject != "none" and ":" not in reject and "," not in reject:
        found["reject"] = f"{reject}:{rs_low}:{cfg.rs_high}"
    return found
