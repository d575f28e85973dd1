"""Commands as a user gives them, in a process forked from this one: all is imported already, which takes seconds.

Many run one after the other in one process. None of them may load a model, unless its environment says LOADS=1.
"""

import ctypes
import importlib.util
import json
import logging
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from conftest import ROOT
from remote_tools import bench as transport  # noqa: F401  imported before the forks, as are others that are not used
from remote_tools import fuzz  # noqa: F401

import bench  # noqa: F401
import eval as evaluation  # noqa: F401
import remote.keys
import remote.sampler
import remote.source  # noqa: F401
import train  # noqa: F401
from machinery import warmstart
from results import sweep  # noqa: F401

LIMIT = 12  # seconds after which a command is ended
LOADED = 97  # how a command ends that loads a model although its flags are wrong


class Job(NamedTuple):
    """A command that is to be run in the folder `here`, and what the folder held before."""

    environment: dict
    argv: list[str]
    here: Path
    before: dict

    def stream(self, name: str) -> Path:
        """What it writes to the screen, beside its folder. name: "out" or "err"."""
        return self.here.with_name(f"{self.here.name}.{name}")

    def said(self) -> str:
        return self.stream("err").read_text(encoding="utf-8", errors="replace")


class Done(NamedTuple):
    """status: as the shell sees it; below 0, the signal that ended it."""

    status: int
    processor: float  # seconds
    clock: float  # seconds


def run_jobs(jobs: list[Job]) -> list[Done]:
    """Run them as `python *argv`, without the time that imports take. One that ends its process is the last in it."""
    done = []
    while len(done) < len(jobs):
        source, sink = os.pipe()
        pid = os.fork()
        if pid == 0:
            run_as_child(jobs[len(done) :], sink)
        os.close(sink)
        with open(source) as results_of_child:
            done += [Done(*json.loads(line)) for line in results_of_child]
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            done.append(Done(status, 0.0, 0.0))
    return done


def run_as_child(jobs: list[Job], sink: int) -> None:
    """The child's whole life. Its lines to `sink` are those of Done."""
    try:
        give_up_root()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not pytest-timeout's handler: the alarm is to end the process
        torch.distributed.is_initialized = lambda: False  # a group of an earlier test's has nobody else in a fork
        prepare(jobs[0])
        sys.stdout = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115  open as long as the process
        sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        for handler in [handler() for handler in logging._handlerList]:
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr  # what it had may be closed
        for job in jobs:
            for number, name in ((1, "out"), (2, "err")):
                with open(job.stream(name), "wb") as file:
                    os.dup2(file.fileno(), number)
            os.chdir(job.here)
            processor, clock = time.process_time(), time.monotonic()
            signal.alarm(LIMIT)  # ends the process
            status = ended(job.argv)
            signal.alarm(0)
            done = (status, time.process_time() - processor, time.monotonic() - clock)
            os.write(sink, (json.dumps(done) + "\n").encode())
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(LOADED)


def ended(argv: list[str]) -> int:
    """The status with which Python would end, and on the screen what it would say."""
    status = 0
    try:
        run_command_line(argv)
    except SystemExit as e:
        status = e.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        if not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def prepare(job: Job) -> None:
    """What a row's words in capitals ask for."""
    environment = job.environment
    os.environ.update(environment)
    absent = environment.get("WITHOUT", "").split(",")
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *more: None if name in absent else find_spec(name, *more)
    if "LOADS" not in environment:
        transformers.AutoModelForCausalLM.from_pretrained = lambda *args, **more: os._exit(LOADED)
        warmstart.warm_start = lambda *args: os._exit(LOADED)


def give_up_root() -> None:
    """Root may read and write what nobody else may: without that power it is a user like any other."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        sets = (ctypes.c_uint32 * 6)()
        libc.capget(header, sets)
        sets[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, of the effective ones
        sets[1] &= ~0b110  # and of the permitted ones
        assert libc.capset(header, sets) == 0


def run_command_line(argv: list[str]) -> None:
    """`python *argv`, with the path on which Python would look for modules."""
    kept = [p for p in sys.path if p not in ("", str(ROOT), str(ROOT / "tests"))]
    if argv[0] == "-m":
        sys.path[:] = [str(ROOT), *kept]
        sys.argv = argv[1:]
        sys.modules.pop(argv[1], None)
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        script = ROOT / argv[0]
        sys.path[:] = [str(script.parent), *kept]
        sys.argv = [str(script), *argv[1:]]
        runpy.run_path(str(script), run_name="__main__")
