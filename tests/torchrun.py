"""Runs a test's script on several gloo ranks of this machine.

Ranks are forks of one process that has imported the libraries, because imports take seconds for each rank. Each rank
imports the files of the repository. test_train tests commands under the real torchrun."""

import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LIMIT = 300  # seconds

# -- In a test --------------------------------------------------------------------------------------------------------

servers: list[subprocess.Popen] = []  # at most one, started on first use


class Job(NamedTuple):
    """A script to run on `ranks` ranks."""

    script: str
    args: list[str]
    ranks: int
    port: int  # of the process group


def torchrun(script: str, *args, ranks: int = 2) -> None:
    """Run a script on `ranks` ranks until its end. script: relative to tests/."""
    if not servers:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
        servers.append(subprocess.Popen([sys.executable, __file__], cwd=HERE.parent, env=environment, **pipes))
    (server,) = servers
    try:
        job = Job(str((HERE / script).resolve()), [*map(str, args)], ranks, free_port())
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        statuses, screen = json.loads(server.stdout.readline())
    except BaseException:  # a test's time limit, too: no later test may get this answer
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
        servers.clear()
        raise
    assert statuses == [0] * ranks, f"{statuses}: {screen}"


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


# -- In the process that forks ----------------------------------------------------------------------------------------


def serve() -> None:
    """For each line on stdin, a job, print [statuses, end of the ranks' output], until the parent closes the pipe."""
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    import conftest  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import train  # noqa: F401  for the libraries: some files of the repository read the environment of a rank

    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if name != "__main__" and file.startswith(str(HERE.parent)) and "site-packages" not in file:
            del sys.modules[name]
    for line in sys.stdin:
        job = Job(*json.loads(line))
        with tempfile.TemporaryFile("w+", errors="replace") as screen:
            pids = [fork_rank(job, rank, screen) for rank in range(job.ranks)]
            statuses = end_of(pids)
            screen.seek(0)
            print(json.dumps([statuses, screen.read()[-3000:]]), flush=True)


def end_of(pids: list[int]) -> list[int]:
    """The exit statuses of the ranks. If one fails, or after LIMIT seconds, end all."""

    def end_all(*signal_and_frame):
        for pid in set(pids) - statuses.keys():
            os.kill(pid, signal.SIGKILL)

    statuses: dict[int, int] = {}
    signal.signal(signal.SIGALRM, end_all)
    signal.alarm(LIMIT)
    while len(statuses) < len(pids):
        pid, status = os.waitpid(-1, 0)
        statuses[pid] = os.waitstatus_to_exitcode(status)
        if statuses[pid]:
            end_all()
    signal.alarm(0)
    return [statuses[pid] for pid in pids]


def fork_rank(job: Job, rank: int, screen) -> int:
    """The process id of a rank that runs the script as a program."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    import torch.distributed as dist

    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(screen.fileno(), stream)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.ranks))
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(job.ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port))
        sys.argv = [job.script, *job.args]
        sys.path[0] = str(Path(job.script).parent)
        runpy.run_path(job.script, run_name="__main__")
        ended = Path(job.script).parent == HERE or not dist.is_initialized()
        assert ended, "the process group is left to the end of the interpreter"
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


# -- In a rank --------------------------------------------------------------------------------------------------------


def as_rank(main) -> None:
    """Run main(*the arguments of the script) in a process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=150))
    main(*sys.argv[1:])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    serve()
