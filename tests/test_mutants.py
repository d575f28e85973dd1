"""tests/tools/mutants.py keeps up with the code: each of its changes still has its one place."""

import shlex
from pathlib import Path

import pytest
from tools.mutants import MUTANTS, TESTS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_changes_one_place(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert [old for old, new, *_ in MUTANTS[name] if text.count(old) != 1 or old == new] == []


@pytest.mark.parametrize("name", TESTS)
def test_every_test_of_a_mutant_exists(name):
    """A missing file ends pytest with an error, and a mutant would seem to die of it."""
    for test in (word for word in shlex.split(TESTS[name]) if word.startswith("test_") and ".py" in word):
        file, _, function = test.partition("::")
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {function.partition('[')[0]}" in text


def test_every_file_with_mutants_has_tests():
    assert set(MUTANTS) == set(TESTS)
