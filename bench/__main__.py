"""GPU measurements: python -m bench --key=value."""

from bench import gpu
from machinery.flags import run_command

if __name__ == "__main__":
    run_command(gpu.main)
