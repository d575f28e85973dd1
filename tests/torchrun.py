"""Runs a test's script on several gloo ranks of this machine, and commands in separate processes.

The processes are forks of a process that has imported the libraries, because imports take seconds. Each imports the
files of the repository. Slow tests of test_remote use the real torchrun, test_bad_input and test_flags a new Python."""

import multiprocessing
import os
import random
import runpy
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LIMIT = 300  # seconds
LIBRARIES = ["torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "peft"]
LIBRARIES += ["transformers.models.qwen3.modeling_qwen3"]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(LIBRARIES)

# -- In a test --------------------------------------------------------------------------------------------------------


def torchrun(script: str, *args, ranks: int = 2) -> str:
    """Run a script on `ranks` ranks until its end; return the printed text of all ranks. script: relative to tests/."""
    port, end = free_port(), time.monotonic() + LIMIT
    with tempfile.NamedTemporaryFile("r", errors="replace") as screen:
        argv = [str((HERE / script).resolve()), *map(str, args)]
        jobs = [FORKS.Process(target=run_rank, args=(argv, rank, ranks, port, screen.name)) for rank in range(ranks)]
        for job in jobs:
            job.start()
        try:
            while any(job.is_alive() for job in jobs) and not any(job.exitcode for job in jobs):
                assert time.monotonic() < end, f"the ranks take more than {LIMIT} seconds"
                jobs[0].join(0.05)
        finally:  # after a failure, or a test's time limit, too
            for job in jobs:
                job.kill()
                job.join()
        assert [job.exitcode for job in jobs] == [0] * ranks, screen.read()[-3000:]
        return screen.read()


class Command:
    """`python *argv` in a separate process, with methods of subprocess.Popen. merged: stdout contains stderr."""

    def __init__(self, *argv: str, merged: bool = False):
        pipes = [FORKS.Pipe(duplex=False) for _ in range(1 if merged else 2)]
        self.job = FORKS.Process(target=run_command, args=([str(word) for word in argv], [end for _, end in pipes]))
        self.job.start()
        self.pid = self.job.pid
        for _, end in pipes:
            end.close()
        self.streams = [os.fdopen(os.dup(end.fileno()), errors="replace") for end, _ in pipes]
        self.stdout = self.streams[0]

    def poll(self) -> int | None:
        return self.job.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float) -> list[str]:
        """Wait for the end of the process; the rest of its streams."""
        with ThreadPool(2) as pool:
            texts = pool.map_async(lambda stream: stream.read(), self.streams).get(timeout)
        self.job.join(timeout)
        return texts


def free_port() -> int:
    """A free port below 32768, where the system does not choose a port for processes that ask for any."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
            return port


# -- In a rank --------------------------------------------------------------------------------------------------------


def run_rank(argv: list[str], rank: int, ranks: int, port: int, screen: str) -> None:
    """Run `python *argv` as one rank; its output is appended to the file `screen`."""
    log, of_tests = os.open(screen, os.O_WRONLY | os.O_APPEND), Path(argv[0]).parent == HERE
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    run(argv, [log, log], left=of_tests)


def run_command(argv: list[str], streams: list) -> None:
    """Run `python *argv`; its output goes to the connections `streams`."""
    os.chdir(HERE.parent)
    run(argv, [streams[0].fileno(), streams[-1].fileno()])


def run(argv: list[str], outputs: list[int], left: bool = False) -> None:
    """Run `python *argv` to the end of this process, with these file descriptors as stdout and stderr.

    left: a process group may be left to the end of the interpreter."""
    for stream, output in enumerate(outputs, start=1):
        os.dup2(output, stream)
    os.environ.update(OMP_NUM_THREADS="1", TQDM_DISABLE="1")
    import torch
    import torch.distributed as dist

    status = 1
    torch.set_num_threads(1)
    try:
        sys.argv = argv
        sys.path[:0] = [str(HERE.parent)]
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[:0] = [str(Path(argv[0]).resolve().parent)]
            runpy.run_path(argv[0], run_name="__main__")
        assert left or not dist.is_initialized(), "the process group is left to the end of the interpreter"
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # gloo's threads may outlive the interpreter and abort it


def as_rank(main) -> None:
    """Run main(*the arguments of the script) in a process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=150))
    main(*sys.argv[1:])
    dist.barrier()
    dist.destroy_process_group()
