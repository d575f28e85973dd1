"""GPU measurements: python -m bench gpu --key=value."""

from __future__ import annotations

import sys

from bench import gpu
from machinery.flags import need, run_command


def main(argv: list[str]) -> None:
    """Run the GPU list. UserError: the first word is not gpu."""
    need(
        argv[:1] == ["gpu"],
        f"{' '.join(argv) or 'no list'}: no such list; write python -m bench gpu",
    )
    gpu.main(argv[1:])


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
