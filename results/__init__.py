"""The studies. They are scripts, and find one another in this folder by their bare names; so do the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))

import sweep

__all__ = ["sweep"]  # `from results import sweep` is the very module that the studies import
