"""python -m bench NAMES, or python -m bench gpu --key=value."""

from __future__ import annotations

import sys

import bench
from bench import gpu
from machinery.flags import run_command

if __name__ == "__main__":
    argv = sys.argv[1:]
    run_command(lambda: gpu.main(argv[1:]) if argv[:1] == ["gpu"] else bench.main(argv))
