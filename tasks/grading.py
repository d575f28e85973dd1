"""Grading in separate processes: an answer that takes forever harms neither run nor other answers.

`graders()` is the pool of this process. It calls reward functions (tasks/builtin.py, or a user's
file) with responses of a model: math-verify may compare two huge numbers forever, and a program
under test may loop. A user's file is read once in a run. Each call has a limit of processor time,
and ten times this limit in wall-clock time. The kernel ends a process at its limit, because Python
cannot act during one big computation. SIGTERM and Ctrl-C work meanwhile."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from numbers import Real
from pathlib import Path

from machinery.flags import from_environment, need, shortened
from tasks.builtin import BUILT_IN

CHUNK = 16  # maximum number of answers that a process gets at once
MEMORY = 4 << 30  # bytes of address space of each process
# wall-clock limit of a call, as a multiple of its limit of processor time
PATIENCE = 10
TICK = 0.2  # polling interval in seconds


@dataclass(frozen=True)
class Failure:
    """A reward function raised an exception, or did not return a reward."""

    why: str


# -- In the process that grades


def grading_process(fd: int) -> None:
    """Receive calls and send results, until the other end of the socket `fd` closes. The parent
    handles Ctrl-C and SIGTERM."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    pid, parent, deadline = os.getpid(), os.getppid(), math.inf

    def watch() -> None:
        """End this process at the wall-clock limit, and its children too if the parent has ended.
        The kernel's timer of wall-clock time is left to the user's code: math-verify sets it."""
        while os.getppid() == parent:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGPROF)
            time.sleep(TICK)
        os.killpg(pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()

    def send(result: tuple) -> None:
        if os.getpid() != pid:  # a child that the user's code forked never answers
            os._exit(0)
        connection.send(result)

    with Connection(fd) as connection, contextlib.suppress(EOFError, OSError):
        while True:
            name, source, packed, seconds = connection.recv()
            try:  # load outside the time limit of the call, the file before its objects
                function, calls = function_of(name, source), pickle.loads(packed)
            except BaseException as e:  # the file is the user's: it may do anything
                send(("unloadable", described(e)))
                continue
            convert = text_of if name.endswith(".reply") else number_of
            for call in calls:
                signal.setitimer(signal.ITIMER_PROF, seconds)
                deadline = time.monotonic() + PATIENCE * seconds
                try:
                    result = ("value", convert(function(*call)))
                except BaseException as e:  # KeyboardInterrupt and SystemExit too
                    result = ("failed", described(e))
                signal.setitimer(signal.ITIMER_PROF, 0)
                deadline = math.inf
                send(result)
    os.killpg(pid, signal.SIGKILL)  # also programs that calls have started


@functools.cache  # with several parts of --reward a process gets calls of each in turn
def function_of(name: str, source: bytes | None):
    """The function of a name: a built-in (tasks/builtin.py), FILE.py:FUNCTION or
    FILE.py:CLASS.METHOD. source: the file's contents."""
    path, colon, attribute = name.rpartition(":")
    if not colon:
        BUILT_IN[name]({"answer": "1"}, "\\boxed{1}", "stop")  # loads its libraries
        return BUILT_IN[name]
    owner, dot, method = attribute.partition(".")
    target = attribute_of(path, owner, source)
    return getattr(target(), method) if dot else target


def attribute_of(path: str, name: str, source: bytes | None = None):
    """An attribute of a Python file, which is imported as a module and can import files in its
    folder. source: the file's contents, read earlier."""
    file = Path(path).resolve()
    sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"user_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look modules up there
    if source is None:
        spec.loader.exec_module(module)
    else:
        exec(compile(source, file, "exec"), vars(module))
    return getattr(module, name)


class ResultError(Exception):
    """A function returned a value of the wrong type."""


def number_of(value):
    """A reward: a float, or a dict of floats."""
    numbers = list(value.values()) if isinstance(value, dict) else [value]
    # booleans of numpy are not Real, and numpy need not be loaded here
    is_number = [
        isinstance(x, Real) or type(x).__name__ in ("bool", "bool_") for x in numbers
    ]
    if not all(is_number) or not all(map(math.isfinite, numbers)):
        wanted = "which is neither a finite number nor a dict of them"
        raise ResultError(f"it returned {repr(value)[:100]}, {wanted}")
    if isinstance(value, dict):
        return {str(k): float(x) for k, x in value.items()}
    return float(value)


def text_of(value) -> str:
    """An environment's reply; "" for None, which ends the conversation."""
    if value is not None and not isinstance(value, str):
        raise ResultError(
            f"it returned {repr(value)[:100]}, which is neither a text nor None"
        )
    return value or ""


def described(e: BaseException) -> str:
    """An exception in one line, with the line of the user's code that raised it."""
    if isinstance(e, ResultError):
        return str(e)
    place = ""
    for frame, line in traceback.walk_tb(e.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("user_"):
            place = f" ({Path(frame.f_code.co_filename).name}, line {line})"
    return f"{type(e).__name__}: {shortened(e)}{place}"


# -- In the process that asks for grades


class Grader:
    """A grading process, started on demand and replaced when it has died."""

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.lock = threading.Lock()  # of two threads that call `Graders.grade`

    def start(self) -> None:
        self.connection, theirs = Pipe()
        fd = theirs.fileno()
        root = str(Path(__file__).resolve().parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        code = f"from tasks.grading import grading_process; grading_process({fd})"
        # sympy iterates over sets in an order that depends on the hash seed, so the seed is fixed
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "PYTHONHASHSEED": "0",
                "PYTHONPATH": os.pathsep.join(paths),
            },
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # its children end with it
        )
        theirs.close()

    def values(
        self, function: str, source: bytes | None, calls: list[tuple], seconds: float
    ) -> list:
        """The results of the calls, as in `Graders.grade`, up to a call that ends the process."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        results = []
        try:
            self.connection.send((function, source, pickle.dumps(calls), seconds))
            while len(results) < len(calls):
                # a forked child may keep the connection of a dead process open
                while not self.connection.poll(TICK):
                    if self.process.poll() is not None:
                        raise EOFError
                kind, value = self.connection.recv()
                need(
                    kind != "unloadable",
                    f"--reward={function}: cannot be loaded ({value}); fix the file, install its library, or raise "
                    "MEMORY (4 GiB, tasks/grading.py)",
                )
                results.append(Failure(value) if kind == "failed" else value)
        except (EOFError, OSError):
            results.append(self.failure())
        return results

    def failure(self) -> Failure | None:
        """The result of the call that ended the process; None at a time limit."""
        code = self.process.wait()
        self.end()
        if code == -signal.SIGPROF:
            return None
        cause = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return Failure(f"it ended its process ({cause})")

    def end(self) -> None:
        """Kill the process and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Graders:
    """Grading processes, each with a thread during a call of `grade`."""

    def __init__(self, size: int):
        self.processes = [Grader() for _ in range(size)]
        self.sources: dict[str, bytes] = {}  # the contents of users' files
        self.stopped = threading.Event()  # if set, `grade` raises InterruptedError

    def grade(self, function: str, calls: list[tuple], seconds: float) -> list:
        """The result of the function for each call: a float, a dict of floats, a text, a Failure if
        the function raised or ended its process, or None at a time limit. Raises UserError if the
        function cannot be loaded."""
        values: list = [None] * len(calls)
        file, colon, _ = function.rpartition(":")
        # all processes run the same version, also if the user edits the file
        if colon and file not in self.sources and Path(file).is_file():
            self.sources[file] = Path(file).read_bytes()
        source = self.sources.get(file)
        size = max(1, min(CHUNK, len(calls) // (4 * len(self.processes))))
        todo = iter(range(0, len(calls), size))  # shared by the threads
        over = threading.Event()
        errors = []

        def work(grader: Grader) -> None:
            try:
                for start in todo:
                    done, end = start, min(start + size, len(calls))
                    while done < end:
                        with grader.lock:
                            if over.is_set():
                                return
                            results = grader.values(
                                function, source, calls[done:end], seconds
                            )
                        values[done : done + len(results)] = results
                        done += len(results)
            except BaseException as e:
                errors.append(e)

        # no futures: the exception of a signal handler could leave their locks held forever
        used = self.processes[: len(calls)]
        threads = [threading.Thread(target=work, args=[x], daemon=True) for x in used]
        self._run(threads, errors, over)
        return values

    def _run(
        self, threads: list[threading.Thread], errors: list, over: threading.Event
    ) -> None:
        """Run the threads, and raise their first error. After an exception, such as Ctrl-C, set
        `over` and end the processes, so that the threads end."""
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    if self.stopped.is_set():
                        raise InterruptedError("grading was stopped")
                    thread.join(TICK)
                if errors:
                    raise errors[0]
        except BaseException:
            over.set()
            self.close()
            for thread in threads:
                while thread.is_alive():
                    thread.join(TICK)
                    self.close()  # a thread may have started a new process
            raise

    def close(self) -> None:
        for grader in self.processes:
            if grader.process is not None and grader.process.poll() is None:
                grader.end()


@functools.cache
def graders() -> Graders:
    """The grading processes of this process: their number is the cores per rank of this host."""
    return Graders(
        max(1, len(os.sched_getaffinity(0)) // from_environment("LOCAL_WORLD_SIZE", 1))
    )
