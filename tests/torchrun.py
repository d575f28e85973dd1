"""A script on several gloo ranks of this machine: how tests start it, and how it begins and ends."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

HERE = Path(__file__).resolve().parent
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def torchrun(script: str, *args, ranks: int = 2, timeout: float = 300) -> None:
    """Run a script on so many ranks and wait for its end. script: as seen from tests/. timeout: seconds."""
    done = subprocess.run(
        [*COMMAND, f"--nproc_per_node={ranks}", HERE / script, *map(str, args)],
        cwd=HERE.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def as_rank(main) -> None:
    """What such a script does: main(*its arguments), within a process group."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=150))
    main(*sys.argv[1:])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter and abort it
