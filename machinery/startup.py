"""Process settings that must precede the import of torch. Each command imports this file first.

- Idle threads of OpenMP sleep after 0.1 ms instead of keeping a core busy (LOG.md).
- Ctrl-C while modules are imported ends the process without a traceback; `run_command` restores
  Python's KeyboardInterrupt.
- Closed standard streams are opened on the null device. Otherwise the next opened file would get
  the stream's descriptor and receive its output.
- A character that the terminal's encoding lacks is printed as an escape.
- An empty HOME counts as none: `~` is the home folder that the system knows.
- Warnings and logs of torch, vLLM and transformers are off without --verbose."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "2000")

LIBRARIES = ("torch", "vllm", "transformers", "peft")


def silence() -> None:
    """Hide warnings of the libraries, and log records below the level of errors."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in LIBRARIES:
        warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def open_closed_streams() -> None:
    """Open those of file descriptors 0 to 2 and of Python's three streams that are closed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  open until the process ends


def is_command() -> bool:
    """Whether this process runs a file of the root, or a package by `python -m`."""
    script = Path(sys.argv[0])
    return sys.argv[0] == "-m" or script.resolve().parent == Path(__file__).resolve().parent.parent


if "--verbose" not in sys.argv:
    silence()
if is_command():
    open_closed_streams()
    sys.stdout.reconfigure(errors="backslashreplace")
    if not os.environ.get("HOME"):
        os.environ.pop("HOME", None)
    sys.argv = [word for word in sys.argv if word != "--verbose"]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
