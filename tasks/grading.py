"""Grading in processes of their own: an answer may take for ever, and must cost neither the run nor
the others.

`graders()` is the pool of this process. It calls reward functions (tasks/rewards.py, or a file of
the user's own) with responses that a model has written: math-verify may compare two huge numbers
until the end of days, a program under test may loop. Each call has a limit, in seconds of a
processor and ten times that by the clock; the kernel ends a process that runs into it, for Python
cannot act while one big number is computed. SIGTERM and Ctrl-C work meanwhile."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from numbers import Real
from pathlib import Path

from machinery.flags import UserError, from_environment
from tasks.builtin import loaded

CHUNK = 16  # answers that a process is given at once, at most
MEMORY = 4 << 30  # bytes of address space of each process
PATIENCE = 10  # times its seconds of a processor that a call may last by the clock
TICK = 0.2  # polling interval in seconds
SILENCE = (
    60.0  # seconds without output, plus twice an answer's limit, after which a process is killed
)
OUT_OF_TIME = (-signal.SIGPROF, -signal.SIGALRM, -signal.SIGKILL)  # exit codes of a limit
MOST_STILLBORN = 3  # processes that may end before they are ready


@dataclass(frozen=True)
class Failure:
    """A reward function raised an exception, or did not return a reward."""

    why: str


# ---------------------------------------------------------------------------------------------------------------------
# In the process that grades
# ---------------------------------------------------------------------------------------------------------------------


def grading_process(fd: int) -> None:
    """The whole life of a process that grades: calls in, values out, until the other end of the
    socket `fd` closes.

    Each answer carries the number of its question. A child that a reward function forks never
    answers: it ends where the function returns or raises. Ctrl-C and SIGTERM are the parent's
    affair."""
    import resource

    pid = os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with Connection(fd) as connection, contextlib.suppress(EOFError, OSError):
        function = answers = None
        while True:
            name, calls, seconds = connection.recv()
            if (
                name is not None
            ):  # everything is loaded now, and not at the cost of the first answer
                try:
                    function, answers = function_of(name), text_of
                    if not name.endswith(".reply"):
                        answers = number_of
                except BaseException as e:  # the file is the user's: it may do anything
                    end_if_forked(pid)
                    connection.send((None, ("failed", described(e))))
                    return
                end_if_forked(pid)
                connection.send((None, ("ready", None)))
            for number, call in calls:
                signal.setitimer(signal.ITIMER_PROF, seconds)
                signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)
                result = value_of(function, call, answers)
                end_if_forked(pid)
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                connection.send((number, result))


def end_if_forked(pid: int) -> None:
    """End this process at once unless it is the one with this number."""
    if os.getpid() != pid:
        os._exit(0)


def function_of(name: str):
    """The function behind a name: one of tasks/builtin.py, FILE.py:FUNCTION, or
    FILE.py:CLASS.METHOD."""
    path, colon, attribute = name.rpartition(":")
    if not colon:
        return loaded(name)
    owner, dot, method = attribute.partition(".")
    target = attribute_of(path, owner)
    return getattr(target(), method) if dot else target


def attribute_of(path: str, name: str):
    """An attribute of a Python file, which is run as a module; files in its folder can be
    imported."""
    file = Path(path).resolve()
    sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"user_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return getattr(module, name)


def value_of(function, call, convert):
    """The result of the function for one response: ("value", as `convert` makes it), or ("failed",
    reason)."""
    try:
        return "value", convert(function(*call))
    except BaseException as e:  # KeyboardInterrupt and SystemExit too
        return "failed", described(e)


class ResultError(Exception):
    """A function returned something of another type."""


def number_of(value):
    """A reward: a float, or a dict of floats."""
    numbers = list(value.values()) if isinstance(value, dict) else [value]
    if not all(is_number(x) and math.isfinite(x) for x in numbers):
        raise ResultError(
            f"it returned {repr(value)[:100]}, which is neither a finite number nor a dict of them"
        )
    if isinstance(value, dict):
        return {str(k): float(x) for k, x in value.items()}
    return float(value)


def text_of(value) -> str:
    """An environment's reply; "" for None, which ends a conversation."""
    if value is not None and not isinstance(value, str):
        raise ResultError(f"it returned {repr(value)[:100]}, which is neither a text nor None")
    return value or ""


def is_number(x) -> bool:
    """Whether this is a number or a truth value, of Python's own or of numpy's, which is not loaded
    here."""
    return isinstance(x, Real) or type(x).__name__ in ("bool", "bool_")


def described(e: BaseException) -> str:
    """An exception in one line, with the line of the user's code that raised it."""
    if isinstance(e, ResultError):
        return str(e)
    place = ""
    at = e.__traceback__
    while at is not None:
        file = Path(at.tb_frame.f_code.co_filename)
        if at.tb_frame.f_globals.get("__name__", "").startswith("user_"):
            place = f" ({file.name}, line {at.tb_lineno})"
        at = at.tb_next
    return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}{place}"


# ---------------------------------------------------------------------------------------------------------------------
# Seen from here
# ---------------------------------------------------------------------------------------------------------------------


class Grader:
    """A grading process, seen from here."""

    def __init__(self):
        self.connection, theirs = Pipe()
        fd = theirs.fileno()
        root = str(Path(__file__).resolve().parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        # sympy iterates over sets in an order that depends on the hash seed: use one seed
        # everywhere
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from tasks.grading import grading_process; grading_process({fd})",
            ],
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(paths)},
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # its children end with it
        )
        theirs.close()
        self.function: str | None = None  # that it was asked to load
        self.ready = False  # whether it has
        self.given: deque[int] = deque()  # numbers of the answers it has not said anything about
        self.heard = time.monotonic()  # when it was last heard of, or given something

    def give(self, function: str, numbers: list[int], calls: list[tuple], seconds: float) -> None:
        new = function != self.function
        if new:
            self.function, self.ready = function, False
        self.given.extend(numbers)
        self.heard = time.monotonic()
        with contextlib.suppress(OSError):  # it has died: the next look at its connection tells
            self.connection.send(
                (function if new else None, list(zip(numbers, calls, strict=True)), seconds)
            )

    def end(self) -> None:
        """End it, and whatever it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Graders:
    """Up to `size` grading processes, started when they are needed and kept. `graders()` gives the
    only instance."""

    def __init__(self, size: int):
        self.size = size
        self.processes: list[Grader] = []
        self.stillborn = 0

    def grade(self, function: str, calls: list[tuple], seconds: float) -> list:
        """The result of the function for each call: a float, a dict of floats, a Failure if it
        raised or ended its process; None if it used up its processor time. UserError: the function
        cannot be loaded."""
        values: list = [None] * len(calls)
        todo = deque(range(len(calls)))
        try:
            while todo or any(p.given for p in self.processes):
                while len(self.processes) < min(self.size, len(todo)):
                    self.processes.append(Grader())
                self._hand_out(function, todo, calls, seconds)
                # In slices, so that a signal to this process never has to wait for an answer.
                ready = wait([p.connection for p in self.processes], TICK)
                for p in list(self.processes):
                    if p.connection in ready:
                        self._listen(p, values, todo)
                    elif p.process.poll() is not None and not p.connection.poll():
                        # a child that it forked keeps its end of the connection open
                        self._bury(p, values, todo)
                    elif p.given and time.monotonic() - p.heard > SILENCE + 2 * PATIENCE * seconds:
                        p.process.kill()  # stopped, or swapped out
        except BaseException:  # later answers of the processes would belong to this call
            self.close()
            raise
        return values

    def _hand_out(self, function: str, todo: deque[int], calls, seconds: float) -> None:
        """A chunk for each process that has nothing to do; small ones towards the end, so that all
        end together."""
        for p in self.processes:
            alive = p.process.poll() is None  # one that died while it had nothing to do is replaced
            if todo and not p.given and alive:
                n = min(CHUNK, max(1, len(todo) // (2 * self.size)))
                numbers = [todo.popleft() for _ in range(min(n, len(todo)))]
                p.give(function, numbers, [calls[i] for i in numbers], seconds)

    def _listen(self, p: Grader, values: list, todo: deque[int]) -> None:
        """Read a message of a process."""
        try:
            number, (kind, message) = p.connection.recv()
        except (EOFError, OSError):
            self._bury(p, values, todo)
            return
        p.heard = time.monotonic()
        if p.ready:
            if number != p.given.popleft():
                raise RuntimeError(f"a grading process answered question {number} out of turn")
            values[number] = Failure(message) if kind == "failed" else message
        elif kind == "failed":
            raise UserError(f"--reward={p.function}: cannot be loaded ({message}); fix the file")
        p.ready = True

    def _bury(self, p: Grader, values: list, todo: deque[int]) -> None:
        """A process has died: the answer at hand is lost, and the others are done again."""
        self.processes.remove(p)
        with contextlib.suppress(subprocess.TimeoutExpired):
            p.process.wait(1.0)  # its own exit code, not that of `end`
        p.end()
        if p.ready and p.given and p.process.returncode not in OUT_OF_TIME:
            why = f"it ended its process (exit code {p.process.returncode})"
            values[p.given[0]] = Failure(why)
        todo.extend(list(p.given)[1 if p.ready else 0 :])
        self.stillborn += not p.ready and bool(p.given)
        if self.stillborn > MOST_STILLBORN:
            raise RuntimeError(
                f"grading processes end before they are ready (exit code {p.process.returncode}): "
                "python -c 'import tasks.grading' may tell why"
            )

    def close(self) -> None:
        while self.processes:
            self.processes.pop().end()


@functools.cache
def graders() -> Graders:
    """The grading processes of this process: as many as there are cores for each rank of this
    host."""
    return Graders(max(1, len(os.sched_getaffinity(0)) // from_environment("LOCAL_WORLD_SIZE", 1)))


# a forked process cannot wait for those of its parent
os.register_at_fork(after_in_child=graders.cache_clear)
