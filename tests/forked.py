"""Runs command lines in forks of this process, because imports take seconds.

One fork runs many commands, one after another. A command may load a model only if its environment has LOADS=1."""

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
LOADED = 97  # exit status of a command that loads a model despite wrong flags


class Job(NamedTuple):
    """A command to run in the folder `here`, and the folder's earlier content."""

    environment: dict
    argv: list[str]
    here: Path
    before: dict

    def stream(self, name: str) -> Path:
        """The command's output, in a file next to its folder. name: "out" or "err"."""
        return self.here.with_name(f"{self.here.name}.{name}")

    def said(self) -> str:
        return self.stream("err").read_text(encoding="utf-8", errors="replace")


class Done(NamedTuple):
    """status: as in a shell; a negative status is the signal that ended the command."""

    status: int
    processor: float  # seconds
    clock: float  # seconds


def run_jobs(jobs: list[Job]) -> list[Done]:
    """Run the jobs as `python *argv`, without the time of imports. A job that ends its process is a fork's last."""
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
    """Run jobs in a fork and write a line of Done for each job to `sink`."""
    try:
        give_up_root()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # instead of pytest-timeout's handler: the alarm ends the process
        torch.distributed.is_initialized = lambda: False  # a fork has no ranks of a test's process group
        prepare(jobs[0])
        sys.stdout = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115  open as long as the process
        sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        for handler in [handler() for handler in logging._handlerList]:
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr  # the handler's own stream may be closed
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
    """Run the command; print like Python, and return its exit status."""
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
    """Apply the environment, and the settings in capitals of a row."""
    environment = job.environment
    os.environ.update(environment)
    absent = environment.get("WITHOUT", "").split(",")
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *more: None if name in absent else find_spec(name, *more)
    if "LOADS" not in environment:
        transformers.AutoModelForCausalLM.from_pretrained = lambda *args, **more: os._exit(LOADED)
        warmstart.warm_start = lambda *args: os._exit(LOADED)


def give_up_root() -> None:
    """Drop root's power to read and write every file."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        sets = (ctypes.c_uint32 * 6)()
        libc.capget(header, sets)
        sets[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, effective
        sets[1] &= ~0b110  # and permitted
        assert libc.capset(header, sets) == 0


def run_command_line(argv: list[str]) -> None:
    """Run `python *argv`, with Python's module path."""
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
