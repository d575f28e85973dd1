"""The command line: values, errors, and the page of --help."""

import contextlib
import errno
import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import Literal

import pytest
from conftest import ROOT

from config import Config
from machinery import flags
from machinery.plot import PlotFlags


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
  --cap=2.0
        Cap of the weight.

--verbose shows warnings and logs of torch, vLLM and transformers."""


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--steps=3", "--help", "--no_such_flag"]])
def test_help_prints_the_page_and_exits_with_0(argv, capsys):
    """A command's flags first, then its groups in the order of its bases; a flag's default and its choices."""
    with pytest.raises(SystemExit) as e:
        flags.parse_flags(Command, argv, "python command.py --key=value ...")
    assert e.value.code == 0
    assert capsys.readouterr().out.strip() == PAGE


def groups_on(page: str) -> dict[str, list[str]]:
    """The flags below each title of a page."""
    _, *parts = re.split(r"^(\S.*):$", page, flags=re.M)
    flags_below = [re.findall("^  --([a-z0-9_]+)", part, re.M) for part in parts[1::2]]
    return dict(zip(parts[::2], flags_below, strict=True))


def test_rare_flags_are_on_the_page_of_all_flags(capsys):
    """A command that extends train.py's flags shows its additional flags."""
    both = dataclass(frozen=True)(type("Both", (Rules, Config), {}))
    every = len(fields(Config))
    for argv, n in ((["--help"], 30), (["--help=all"], every), (["--help", "all"], every)):
        with pytest.raises(SystemExit):
            flags.parse_flags(both, argv)
        page = capsys.readouterr().out
        listed = {key for group in groups_on(page).values() for key in group}
        assert len(listed) == n + 2, argv  # kind and cap; clip is a flag of train.py
        assert (f"--help=all shows {every - n} more flags." in page) == (n == 30)


@pytest.mark.parametrize("command", [Config, PlotFlags])
def test_the_page_of_a_command(command):
    """Groups in the order of the bases, with a title; every flag once, with a sentence; lines of 120 columns."""
    page = flags.help_page(command)
    groups = flags.groups_of(command)
    assert groups_on(page) == {group.__doc__.splitlines()[0]: list(group.__annotations__) for group in groups}
    for group in groups:
        assert not group.__doc__.startswith(group.__name__), group  # dataclass's default docstring
        for key, sentence in flags.docs_of(group).items():
            assert len(sentence) > 4 and sentence.endswith((".", "?")), key
        assert set(flags.docs_of(group)) == set(group.__annotations__)
    assert all(len(line) <= 120 for line in page.splitlines())


ONE_LINE = "from machinery import flags; flags.run_command(lambda: print('less than a buffer'))"


@pytest.mark.parametrize("argv", [["objectives.py"], ["-c", ONE_LINE]])
def test_a_closed_pipe_ends_a_command_quietly(argv):
    """Like `| head`; the reader is gone before the first line."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    env = {**os.environ, "PYTHONUNBUFFERED": ""}  # with the default buffer
    with os.fdopen(write_end) as closed:
        run = {"cwd": ROOT, "env": env, "stdout": closed, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run([sys.executable, *argv], **run)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_different_broken_pipe_keeps_its_traceback():
    """The pipe to a different process breaks; standard output is open. Ctrl-C gives the exit code of shells."""

    def fail(error):
        raise error

    read_end, write_end = os.pipe()
    with os.fdopen(read_end), os.fdopen(write_end, "w") as out, contextlib.redirect_stdout(out):  # noqa: SIM117
        with pytest.raises(BrokenPipeError):
            flags.run_command(lambda: fail(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    full, peer = OSError(errno.ENOSPC, "No space left"), RuntimeError("[pair.cc:553] Connection closed by peer [::1]")
    for error, code in (
        (KeyboardInterrupt(), 130),
        (full, "error: a file that this command writes: No space left; name a different path or free disk space"),
        (peer, "error: another rank has stopped, and prints the reason"),
    ):
        with pytest.raises(SystemExit) as e:
            flags.run_command(lambda error=error: fail(error))
        assert e.value.code == code
    with pytest.raises(RuntimeError):
        flags.run_command(lambda: fail(RuntimeError("ours")))


@pytest.mark.parametrize("command", [Config, PlotFlags])
def test_every_default_can_be_written(command):
    """Each flag reads its printed default: type and value are equal."""
    assert flags.parse_flags(command, []) == command()
    for f in fields(command):
        got = getattr(flags.parse_flags(command, [f"--{f.name}={f.default}"]), f.name)
        assert (got, type(got)) == (f.default, type(f.default)), f.name


@pytest.mark.parametrize(
    "line, wanted",
    [
        ("--steps -3", {"steps": -3}),
        ("--steps=3 --steps=4", {"steps": 4}),
        ("--lr 1e-9", {"lr": 1e-9}),
        ("--most=None --cap=None", {"most": None, "cap": None}),
        ("--clip=false", {"clip": False}),
        ("--clip --steps=3", {"clip": True, "steps": 3}),
        ("--kind=expected", {"kind": "expected"}),
        ("--run_name=a=b", {"run_name": "a=b"}),
        ("--run-name a-b_c", {"run_name": "a-b_c"}),
        ("--run_name=None", {"run_name": "None"}),
    ],
)
def test_values(line, wanted, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["command.py", *line.split()])
    got = flags.parse_flags(Command)
    assert got == Command(**wanted)
    assert all(type(getattr(got, key)) is type(value) for key, value in wanted.items())
    assert sys.argv == ["command.py", *line.split()]  # unchanged


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--steps", "--lr=1"], "--steps: a value is missing; write --steps=VALUE"),
        (["--steps=\uff11\uff12"], "--steps=\uff11\uff12: must be a whole number"),
        (["--steps=1.5"], "--steps=1.5: must be a whole number"),
        (["--cap=none"], "--cap=none: must be a number"),
        (["--clip=fals"], "--clip=fals: not one of True, true, False, false; did you mean false?"),
        (["--kind=drwan"], "--kind=drwan: not one of drawn, expected; did you mean drawn?"),
        (["--clip", "stray"], "stray: flags are written --key=value"),
        (["--"], "--: no such flag; see --help"),
    ],
)
def test_one_sentence(argv, sentence):
    with pytest.raises(ValueError) as e:
        flags.parse_flags(Command, argv)
    assert str(e.value) == sentence
