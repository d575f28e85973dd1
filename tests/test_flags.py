"""The command line: values, errors, and the page of --help."""

import contextlib
import errno
import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest

from config import Config
from machinery import flags
from machinery.plot import PlotFlags

COMMANDS = [Config, PlotFlags]
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Sizes:
    """Sizes

    Only the first line is the group's title."""

    steps: int = 150
    """Optimizer updates."""
    lr: float = 1e-4
    """Learning
    rate."""
    most: int | None = None
    """Largest batch."""


@dataclass(frozen=True)
class Rules:
    """Rules"""

    clip: bool = True
    """Clip or not."""
    kind: Literal["drawn", "expected"] = "drawn"
    """Which mask."""
    target: Literal["ref", "new"] | None = None
    """Which policy."""
    cap: float | None = 2.0
    """Cap of the weight."""


@dataclass(frozen=True)
class Command(Sizes, Rules):
    """A command"""

    run_name: str = ""
    """Name of the run."""


PAGE = """\
python command.py --key=value ...

A command:
  --run_name
        Name of the run.

Sizes:
  --steps=150
        Optimizer updates.
  --lr=0.0001
        Learning rate.
  --most
        Largest batch.

Rules:
  --clip=True
        Clip or not.
  --kind=drawn    (one of drawn, expected)
        Which mask.
  --target    (one of ref, new)
        Which policy.
  --cap=2.0
        Cap of the weight.

--verbose shows warnings and logs of torch, vLLM and transformers."""


def parse(*argv) -> Command:
    return flags.parse_flags(Command, list(argv))


# ---------------------------------------------------------------------------------------------------------------------
# --help
# ---------------------------------------------------------------------------------------------------------------------


def test_the_page():
    """A command's flags first, then its groups in the order of its bases; a flag's default and its choices."""
    assert flags.help_page(Command, "python command.py --key=value ...") == PAGE


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--steps=3", "--help", "--no_such_flag"]])
def test_help_prints_the_page_and_exits_with_0(argv, capsys):
    with pytest.raises(SystemExit) as e:
        flags.parse_flags(Command, argv, "python command.py --key=value ...")
    assert e.value.code == 0
    assert capsys.readouterr().out.strip() == PAGE


def test_rare_flags_are_on_the_page_of_all_flags(capsys):
    """A command that extends train.py's flags shows its additional flags."""
    both = dataclass(frozen=True)(type("Both", (Rules, Config), {}))
    for argv, n in (
        (["--help"], 30),
        (["-h"], 30),
        (["--help=all"], len(fields(Config))),
        (["--help", "all"], len(fields(Config))),
    ):
        for command, more in ((Config, 0), (both, 3)):  # kind, target and cap; clip is a flag of train.py
            with pytest.raises(SystemExit):
                flags.parse_flags(command, argv)
            page = capsys.readouterr().out
            listed = {key for group in groups_on(page).values() for key in group}
            assert len(listed) == n + more, (argv, command)
            assert (f"--help=all shows {len(fields(Config)) - n} more flags." in page) == (n == 30)
            assert ("kind" in listed) == (command is both)


ONE_LINE = "from machinery import flags; flags.run_command(lambda: print('less than a buffer'))"


@pytest.mark.parametrize(
    "argv", [["objectives.py"], ["metrics.py"], ["-m", "machinery.plot", "--help"], ["-c", ONE_LINE]]
)
def test_a_closed_pipe_ends_a_command_quietly(argv):
    """Like `| head`; the reader is gone before the first line."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end) as closed_pipe:
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # with the default buffer
            stdout=closed_pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_a_different_broken_pipe_keeps_its_traceback():
    """The pipe to a different process breaks; standard output is open."""

    def command():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        in_a_pipe(lambda: flags.run_command(command))


def test_ctrl_c_ends_a_command_without_a_traceback():
    """The exit code is the shells'."""

    def command():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as e:
        flags.run_command(command)
    assert e.value.code == 130


def in_a_pipe(do) -> None:
    """Call a function with an open pipe as standard output."""
    read_end, write_end = os.pipe()
    with os.fdopen(read_end), os.fdopen(write_end, "w") as out, contextlib.redirect_stdout(out):
        do()


def groups_on(page: str) -> dict[str, list[str]]:
    """The flags below each title of a page."""
    groups = {}
    for line in page.splitlines():
        if re.fullmatch(r"\S.*:", line):
            groups[line[:-1]] = below = []
        elif line.startswith("  --"):
            below.append(re.match("  --([a-z0-9_]+)", line)[1])
    return groups


def test_the_groups_of_train():
    """In the order of Config's bases and of their bases, each with the flags of its class."""
    want = {}
    for base in [group for parent in Config.__bases__ for group in flags.groups_of(parent)]:
        want[base.__doc__.splitlines()[0]] = list(base.__annotations__)
    assert {"Sizes", "Optimisation", "OBRS, Jackpot's correction (obrs.py)", "Prompts"} <= set(want)
    got = groups_on(flags.help_page(Config))
    assert got == want
    assert list(got) == list(want)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_on_the_page_once(command):
    listed = [key for group in groups_on(flags.help_page(command)).values() for key in group]
    assert sorted(listed) == sorted(f.name for f in fields(command))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_its_sentence(command):
    for group in flags.groups_of(command):
        sentences = flags.docs_of(group)
        for key in group.__annotations__:
            assert key in sentences, f"--{key} has no sentence below it"
            assert len(sentences[key]) > 4, key
            assert sentences[key].endswith((".", "?")), key


@pytest.mark.parametrize("command", COMMANDS)
def test_every_group_has_a_title(command):
    for group in flags.groups_of(command):
        assert not group.__doc__.startswith(group.__name__), group  # dataclass's default docstring


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_fits_a_screen(command):
    assert all(len(line) <= 120 for line in flags.help_page(command).splitlines())


# ---------------------------------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults(command):
    assert flags.parse_flags(command, []) == command()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_default_can_be_written(command):
    """Each flag reads its printed default: type and value are equal."""
    for f in fields(command):
        got = getattr(flags.parse_flags(command, [f"--{f.name}={f.default}"]), f.name)
        assert got == f.default, f.name
        assert type(got) is type(f.default), f.name


@pytest.mark.parametrize(
    "argv, key, value",
    [
        (["--steps=3"], "steps", 3),
        (["--steps", "3"], "steps", 3),
        (["--steps=-3"], "steps", -3),
        (["--steps", "-3"], "steps", -3),
        (["--steps=3", "--steps=4"], "steps", 4),
        (["--lr=1"], "lr", 1.0),
        (["--lr=1e-3"], "lr", 1e-3),
        (["--lr", "1e-9"], "lr", 1e-9),
        (["--most=5"], "most", 5),
        (["--most=None"], "most", None),
        (["--cap=None"], "cap", None),
        (["--cap=3"], "cap", 3.0),
        (["--clip"], "clip", True),
        (["--clip=False"], "clip", False),
        (["--clip=false"], "clip", False),
        (["--clip=true"], "clip", True),
        (["--clip", "False"], "clip", False),
        (["--clip", "--steps=3"], "clip", True),
        (["--kind=expected"], "kind", "expected"),
        (["--target=new"], "target", "new"),
        (["--target=None"], "target", None),
        (["--run_name=a=b"], "run_name", "a=b"),
        (["--run-name=a-b_c"], "run_name", "a-b_c"),
        (["--run-name", "a-b"], "run_name", "a-b"),
        (["--run_name="], "run_name", ""),
        (["--run_name=None"], "run_name", "None"),
        (["--run_name=1_0"], "run_name", "1_0"),
    ],
)
def test_values(argv, key, value):
    got = getattr(parse(*argv), key)
    assert got == value
    assert type(got) is type(value)


def test_several_flags_at_once():
    assert parse("--clip", "--lr", "0.5", "--kind=expected", "--most", "7") == Command(
        clip=True, lr=0.5, kind="expected", most=7
    )


def test_the_default_arguments_are_the_processs(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["command.py", "--steps=9"])
    assert flags.parse_flags(Command) == Command(steps=9)


def test_reading_does_not_change_the_arguments():
    argv = ["--steps", "9"]
    flags.parse_flags(Command, argv)
    assert argv == ["--steps", "9"]


def test_additional_names_are_passed_on():
    """config.parse translates them; a bare name takes the next word as its value."""
    argv = ["--config=x.toml", "--num-steps", "3", "--steps=4"]
    want = [("config", "x.toml"), ("num_steps", "3"), ("steps", "4")]
    assert flags.read(Command, argv, also={"config", "num_steps"}) == want
    with pytest.raises(ValueError, match="--num_steps: no such flag"):
        flags.read(Command, argv, also={"config"})


def test_types_and_choices():
    assert list(flags.types_of(Command)) == [f.name for f in fields(Command)]
    assert flags.types_of(Command)["steps"] is int
    choices = {key: flags.choices_of(kind) for key, kind in flags.types_of(Command).items()}
    assert choices.pop("kind") == ["drawn", "expected"]
    assert choices.pop("target") == ["ref", "new"]
    assert set(map(tuple, choices.values())) == {()}


# ---------------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--steps=x"], "--steps=x: must be a whole number"),
        (["--steps=\uff11\uff12"], "--steps=\uff11\uff12: must be a whole number"),
        (["--lr=\u0661e-3"], "--lr=\u0661e-3: must be a number"),
        (["--lr=1e-300"], "--lr=1e-300: must be 0, or between 1e-12 and 1e12"),
        (["--lr=-1e13"], "--lr=-10000000000000.0: must be 0, or between 1e-12 and 1e12"),
        (["--steps=1.5"], "--steps=1.5: must be a whole number"),
        (["--steps=1e3"], "--steps=1e3: must be a whole number"),
        (["--steps="], "--steps=: must be a whole number"),
        (["--steps"], "--steps: a value is missing; write --steps=VALUE"),
        (["--steps", "--lr=1"], "--steps: a value is missing; write --steps=VALUE"),
        (["--run_name"], "--run_name: a value is missing; write --run_name=VALUE"),
        (["--steps=None"], "--steps=None: must be a whole number"),
        (["--steps=1_0"], "--steps=1_0: must be a whole number"),
        (["--most=x"], "--most=x: must be a whole number"),
        (["--lr=x"], "--lr=x: must be a number"),
        (["--lr=None"], "--lr=None: must be a number"),
        (["--lr=0.5_5"], "--lr=0.5_5: must be a number"),
        (["--cap=0.5_5"], "--cap=0.5_5: must be a number"),
        (["--cap=none"], "--cap=none: must be a number"),
        (["--clip=yes"], "--clip=yes: not one of True, true, False, false"),
        (["--clip=1"], "--clip=1: not one of True, true, False, false"),
        (["--clip="], "--clip=: not one of True, true, False, false"),
        (["--clip=fals"], "--clip=fals: not one of True, true, False, false; did you mean false?"),
        (["--kind=expeced"], "--kind=expeced: not one of drawn, expected; did you mean expected?"),
        (["--kind=None"], "--kind=None: not one of drawn, expected"),
        (["--kind=zzz"], "--kind=zzz: not one of drawn, expected"),
        (["--target=rev"], "--target=rev: not one of ref, new; did you mean ref?"),
        (["stray"], "stray: flags are written --key=value"),
        (["-steps=3"], "-steps=3: flags are written --key=value"),
        (["--clip", "stray"], "stray: flags are written --key=value"),
        (["--steps=3", "4"], "4: flags are written --key=value"),
        (["--stps=3"], "--stps: no such flag; did you mean --steps?"),
        (["--run-nam=x"], "--run_nam: no such flag; did you mean --run_name?"),
        (["--"], "--: no such flag; see --help"),
    ],
)
def test_one_sentence(argv, sentence):
    with pytest.raises(ValueError) as e:
        parse(*argv)
    assert str(e.value) == sentence


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("objectve", "objective"),
        ("temprature", "temperature"),
        ("obrs_lamda", "obrs_lambda"),
        ("max_token", "max_tokens"),
        ("groupsize", "group_size"),
        ("seeed", "seed"),
        ("train-bach", "train_batch"),
    ],
)
def test_a_misspelled_flag_gets_a_suggestion(typed, meant):
    with pytest.raises(ValueError, match=f"no such flag; did you mean --{meant}\\?"):
        flags.parse_flags(Config, [f"--{typed}=1"])


@pytest.mark.parametrize(
    "typed",
    [
        "critic_warmup",
        "num_steps",
        "lerning_rate",
        "batch_size",
        "pipeline_parallel_size",
        "value_head",
        "x",
    ],
)
def test_an_unknown_flag_gets_no_suggestion(typed):
    with pytest.raises(ValueError) as e:
        flags.parse_flags(Config, [f"--{typed}=8"])
    assert str(e.value) == f"--{typed}: no such flag; see --help"
