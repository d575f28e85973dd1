"""Process settings that must precede the import of torch. Commands import this file first.

- Idle threads of OpenMP sleep after 0.1 ms instead of keeping a core busy (LOG.md).
- On a CPU, tensors from 2 MB on get memory in pages of 2 MB instead of 4 KB (LOG.md).
- Ctrl-C while modules are imported ends the process without a traceback; `run_command` restores
  Python's KeyboardInterrupt.
- Closed standard streams are opened on the null device, so that no file gets their numbers.
- Without --verbose, warnings of torch, vLLM, transformers and peft, and their log records below the
  level of errors, are off."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

for number in range(3):
    try:
        os.fstat(number)
    except OSError:
        os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  open until the process ends
sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115

# a command of this repository, not a program that imports its modules
is_command = (
    Path(__file__).resolve().parents[1] in [*Path(sys.argv[0]).resolve().parents][:2]
)
if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if "--verbose" in sys.argv:
    sys.argv.remove("--verbose")
else:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for library in ("torch", "vllm", "transformers", "peft"):
        warnings.filterwarnings("ignore", module=rf"{library}(\.|$)")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
