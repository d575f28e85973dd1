"""Process settings that must precede the import of torch. Each command imports this file first.

- Idle threads of OpenMP sleep after 0.1 ms instead of keeping a core busy (LOG.md).
- Warnings and logs of torch, vLLM and transformers are off without --verbose."""

from __future__ import annotations

import logging
import os
import sys
import warnings

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


if "--verbose" in sys.argv:
    sys.argv.remove("--verbose")
else:
    silence()
