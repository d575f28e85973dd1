"""Runs a test's script on several gloo ranks of this machine.

Ranks are forks of a process that has imported the libraries, because imports take seconds for each rank. Each rank
imports the files of the repository. test_train tests commands under the real torchrun."""

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
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LIMIT = 300  # seconds
LIBRARIES = ["torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "peft"]
LIBRARIES += ["transformers.models.qwen3.modeling_qwen3"]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(LIBRARIES)

# -- In a test --------------------------------------------------------------------------------------------------------


def torchrun(script: str, *args, ranks: int = 2) -> None:
    """Run a script on `ranks` ranks until its end. script: relative to tests/."""
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
    status, of_tests = 1, Path(argv[0]).parent == HERE
    log = os.open(screen, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1", TQDM_DISABLE="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        sys.argv = argv
        sys.path[:0] = [str(Path(argv[0]).parent)]
        runpy.run_path(argv[0], run_name="__main__")
        assert of_tests or not dist.is_initialized(), "the process group is left to the end of the interpreter"
        status = 0
    except SystemExit as e:
        status = 0 if not e.code else 1
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
