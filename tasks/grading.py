"""Grading in separate processes: an answer that takes forever harms neither run nor other answers.

`graders()` is the pool of this process. It calls reward functions (tasks/builtin.py, or a user's
file) with responses of a model: math-verify may compare two huge numbers forever, and a program
under test may loop. Each call has a limit of processor time, and ten times this limit in wall-clock
time. The kernel ends a process at its limit, because Python cannot act during one big computation.
SIGTERM and Ctrl-C work meanwhile."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from numbers import Real
from pathlib import Path

from machinery.flags import UserError, from_environment, shortened
from tasks.builtin import loaded

CHUNK = 16  # maximum number of answers that a process gets at once
MEMORY = 4 << 30  # bytes of address space of each process
PATIENCE = 10  # wall-clock limit of a call, as a multiple of its limit of processor time
TICK = 0.2  # polling interval in seconds
OUT_OF_TIME = (None, -signal.SIGPROF, -signal.SIGALRM)  # exit codes at a limit; None: it hangs


@dataclass(frozen=True)
class Failure:
    """A reward function raised an exception, or did not return a reward."""

    why: str


# ---------------------------------------------------------------------------------------------------------------------
# In the process that grades
# ---------------------------------------------------------------------------------------------------------------------


def grading_process(fd: int) -> None:
    """The main function of a grading process: receive calls and send values, until the other end of
    the socket `fd` closes.

    Each value is sent with the number of its call. The process ignores Ctrl-C and SIGTERM, which
    the parent handles."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with Connection(fd) as connection, contextlib.suppress(EOFError, OSError):
        function = answers = None
        while True:
            name, calls, seconds = connection.recv()
            if name is not None:  # load now, outside the time limit of the first answer
                try:
                    function, answers = function_of(name), text_of
                    if not name.endswith(".reply"):
                        answers = number_of
                except BaseException as e:  # the file is the user's: it may do anything
                    connection.send((None, ("failed", described(e))))
                    return
                connection.send((None, ("ready", None)))
            for number, call in calls:
                signal.setitimer(signal.ITIMER_PROF, seconds)
                signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)
                result = value_of(function, call, answers)
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                connection.send((number, result))


@functools.cache  # with several parts of --reward a process gets calls of each in turn
def function_of(name: str):
    """The function of a name: a built-in (tasks/builtin.py), FILE.py:FUNCTION or
    FILE.py:CLASS.METHOD."""
    path, colon, attribute = name.rpartition(":")
    if not colon:
        return loaded(name)
    owner, dot, method = attribute.partition(".")
    target = attribute_of(path, owner)
    return getattr(target(), method) if dot else target


def attribute_of(path: str, name: str):
    """An attribute of a Python file, which is imported as a module and can import files in its
    folder."""
    file = Path(path).resolve()
    sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"user_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look modules up there
    spec.loader.exec_module(module)
    return getattr(module, name)


def value_of(function, call, convert):
    """The result of the function for one response: ("value", converted value) or ("failed",
    reason)."""
    try:
        return "value", convert(function(*call))
    except BaseException as e:  # KeyboardInterrupt and SystemExit too
        return "failed", described(e)


class ResultError(Exception):
    """A function returned a value of the wrong type."""


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
    """An environment's reply; "" for None, which ends the conversation."""
    if value is not None and not isinstance(value, str):
        raise ResultError(f"it returned {repr(value)[:100]}, which is neither a text nor None")
    return value or ""


def is_number(x) -> bool:
    """Whether this is a number or a boolean of Python or numpy. numpy need not be loaded here."""
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
    return f"{type(e).__name__}: {shortened(e)}{place}"


# ---------------------------------------------------------------------------------------------------------------------
# In the process that asks for grades
# ---------------------------------------------------------------------------------------------------------------------


class Grader:
    """A handle of a grading process."""

    def __init__(self):
        self.connection, theirs = Pipe()
        fd = theirs.fileno()
        root = str(Path(__file__).resolve().parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        # sympy iterates over sets in an order that depends on the hash seed, so the seed is fixed
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
        self.function: str | None = None  # the function that it was asked to load
        self.ready = False  # whether the function is loaded
        self.given: deque[int] = deque()  # numbers of the pending answers

    def give(self, function: str, numbers: list[int], calls: list[tuple], seconds: float) -> None:
        new = function != self.function
        if new:
            self.function, self.ready = function, False
        self.given.extend(numbers)
        with contextlib.suppress(OSError):  # if it has died, the next poll finds out
            self.connection.send(
                (function if new else None, list(zip(numbers, calls, strict=True)), seconds)
            )

    def end(self) -> None:
        """Kill the process and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Graders:
    """Up to `size` grading processes, started on demand and kept. `graders()` returns the only
    instance."""

    def __init__(self, size: int):
        self.size = size
        self.processes: list[Grader] = []
        self.stopped = threading.Event()  # if set, `grade` raises InterruptedError

    def grade(self, function: str, calls: list[tuple], seconds: float) -> list:
        """The result of the function for each call: a float, a dict of floats, a text, a Failure if
        the function raised or ended its process, or None at a time limit. Raises UserError if the
        function cannot be loaded."""
        values: list = [None] * len(calls)
        todo = deque(range(len(calls)))
        try:
            while todo or any(p.given for p in self.processes):
                if self.stopped.is_set():
                    raise InterruptedError("grading was stopped")
                while len(self.processes) < min(self.size, len(todo)):
                    self.processes.append(Grader())
                self._hand_out(function, todo, calls, seconds)
                # wait in short intervals, so that signals to this process are handled
                ready = wait([p.connection for p in self.processes], TICK)
                for p in list(self.processes):
                    if p.connection in ready:
                        self._listen(p, values, todo)
                    elif p.process.poll() is not None and not p.connection.poll():
                        # it has died, but a forked child keeps its end of the connection open
                        self._bury(p, values, todo)
        except BaseException:  # else a later call would receive answers of this call
            self.close()
            raise
        return values

    def _hand_out(self, function: str, todo: deque[int], calls, seconds: float) -> None:
        """Send a chunk to each idle process. Chunks become smaller towards the end, so that all
        processes finish together."""
        for p in self.processes:
            alive = p.process.poll() is None  # a process that died while idle is replaced
            if todo and not p.given and alive:
                n = min(CHUNK, max(1, len(todo) // (2 * self.size)))
                numbers = [todo.popleft() for _ in range(min(n, len(todo)))]
                p.give(function, numbers, [calls[i] for i in numbers], seconds)

    def _listen(self, p: Grader, values: list, todo: deque[int]) -> None:
        """Receive a message from a process."""
        try:
            number, (kind, message) = p.connection.recv()
        except (EOFError, OSError):
            self._bury(p, values, todo)
            return
        if p.ready:
            if number != p.given.popleft():
                raise RuntimeError(f"a grading process answered question {number} out of turn")
            values[number] = Failure(message) if kind == "failed" else message
        elif kind == "failed":
            raise UserError(f"--reward={p.function}: cannot be loaded ({message}); fix the file")
        p.ready = True

    def _bury(self, p: Grader, values: list, todo: deque[int]) -> None:
        """Remove a dead process. Its current answer is lost; its other answers are graded again."""
        self.processes.remove(p)
        with contextlib.suppress(subprocess.TimeoutExpired):
            p.process.wait(1.0)  # get its exit code before `end` kills it
        code = p.process.returncode
        p.end()
        if p.ready and p.given and code not in OUT_OF_TIME:
            cause = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            of_memory = "; out of memory?" if code == -signal.SIGKILL else ""
            values[p.given[0]] = Failure(f"it ended its process ({cause}{of_memory})")
        if p.given and not p.ready:
            raise RuntimeError(
                f"a grading process ended before it was ready (exit code {p.process.returncode}): python -c 'import "
                "tasks.grading' may show the reason"
            )
        todo.extend(list(p.given)[1:])

    def close(self) -> None:
        while self.processes:
            self.processes.pop().end()


@functools.cache
def graders() -> Graders:
    """The grading processes of this process: their number is the cores per rank of this host."""
    return Graders(max(1, len(os.sched_getaffinity(0)) // from_environment("LOCAL_WORLD_SIZE", 1)))


# a forked process cannot wait for its parent's grading processes
os.register_at_fork(after_in_child=graders.cache_clear)
