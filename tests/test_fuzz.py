"""A short run of remote_tools/fuzz.py; long runs are started by hand."""

import random

import pytest
from remote_tools import fuzz, poison

from machinery.flags import UserError
from remote import groups, wire


@pytest.mark.parametrize("where", ["in the clear", "with keys", "a shared folder"])
def test_a_short_attack(where, tmp_path):
    r = random.Random(7)
    if where == "a shared folder":
        report = fuzz.attack_folder(tmp_path / "x", r, 1500)
    else:
        report = fuzz.attack_sockets(tmp_path / "x", r, 1000, keys=where == "with keys")
    assert report.honest >= 10 and not report.broken, report


def test_a_report_with_failures_is_broken():
    good = fuzz.Report(frames=9, crashes=0, honest=3, lost=0, doubled=0, growth=63.0)
    assert not good.broken
    for changes in (dict(crashes=1), dict(lost=1), dict(doubled=1), dict(growth=65.0)):
        assert fuzz.Report(**{**vars(good), **changes}).broken


def test_poisoned_groups_are_refused_and_honest_groups_accepted():
    r = random.Random(3)
    taken = 0
    for n in range(300):
        group = poison.make_group(r, ("evil", 1, n), 0, 1.5)
        assert groups.decode_group(groups.encode_group(group), poison.LIMITS).uid == group.uid
        try:
            groups.decode_group(poison.poison(r, group), poison.LIMITS)
            taken += 1  # a few prompts only the task can check, and a few bytes are arbitrary
        except wire.WireError:
            pass
    assert taken < 60


def test_the_exit_code(monkeypatch, capsys):
    broken = fuzz.Report(frames=9, crashes=2, honest=3, lost=0, doubled=0, growth=1.0)
    monkeypatch.setattr(fuzz, "fuzz", lambda frames, seed: {"here": broken})
    with pytest.raises(UserError, match="broken: here"):
        fuzz.main(["--frames=30"])
    assert "crashes 2" in capsys.readouterr().out
    monkeypatch.undo()
    with pytest.raises(UserError, match="--frames=3: at least 30"):
        fuzz.main(["--frames=3"])
