"""tests/mutants.py keeps up with the code: each of its changes still has its one place."""

from pathlib import Path

import pytest
from mutants import MUTANTS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_changes_one_place(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert [old for old, new, *_ in MUTANTS[name] if text.count(old) != 1 or old == new] == []
