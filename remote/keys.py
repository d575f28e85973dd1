"""CURVE keys: they authenticate learner and samplers, and encrypt their connection.

    python -m remote.keys OUT --samplers=4      # OUT/learner and OUT/sampler0 ... OUT/sampler3

Copy each folder to its machine over a trusted channel. ZeroMQ's CURVE (Curve25519) authenticates
and encrypts every connection: each end needs the public key of the other end. A sampler's name is
the name of its folder of keys, or begins with this name and a hyphen."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from machinery.flags import UserError, at_home, need, parse_flags, run_command

USAGE = "python -m remote.keys OUT [--samplers=N]: keys for a learner and its samplers, one folder for each machine"


class SamplerKeys(NamedTuple):
    """A sampler's keys, in ZeroMQ's format."""

    public: bytes
    secret: bytes
    learner: bytes  # the learner's public key


def make_keys(out: str, samplers: int) -> None:
    """Write OUT/learner and OUT/sampler0, ...: a folder of keys for each machine; only the owner
    can read the secret keys. UserError: OUT is not empty."""
    need(samplers >= 1, f"--samplers={samplers}: must be at least 1")
    root = Path(out)
    need(not root.exists() or root.is_dir(), f"{out} is a file; name a new folder")
    is_new = not root.exists() or not any(root.iterdir())
    need(is_new, f"{out} is not empty: keys are not overwritten; name a new folder")
    learner = root / "learner"
    folders = [root / f"sampler{i}" for i in range(samplers)]
    for folder in (learner, *folders):
        folder.mkdir(parents=True)
        os.chmod(folder, 0o700)
        zmq.auth.create_certificates(folder, folder.name)
        os.chmod(folder / f"{folder.name}.key_secret", 0o600)
    (learner / "samplers").mkdir()
    for folder in folders:
        # the learner knows the public keys of its samplers
        shutil.move(folder / f"{folder.name}.key", learner / "samplers")
        shutil.copy(learner / "learner.key", folder)


def machine_keys(folder: str) -> tuple[bytes, bytes]:
    """(public, secret) in a machine's folder of keys. Raise UserError if there is no secret key."""
    files = sorted(Path(folder).glob("*.key_secret"))
    need(
        len(files) == 1,
        f"--keys={folder}: {len(files)} secret keys there instead of one; "
        "`python -m remote.keys OUT --samplers=N` makes a folder for each machine",
    )
    public, secret = read_key_file(files[0])
    need(
        secret is not None,
        f"--keys={folder}: no secret key in {files[0].name}; copy it again, or make new keys",
    )
    return public, secret


def sampler_keys(folder: str) -> SamplerKeys:
    """The keys in a sampler's folder. Raise UserError if it is not one."""
    learner = Path(folder) / "learner.key"
    need(
        learner.is_file(),
        f"--keys={folder}: no learner.key there; copy the folder that `python -m remote.keys` made for this sampler",
    )
    return SamplerKeys(*machine_keys(folder), learner=read_key_file(learner)[0])


def read_key_file(path: Path) -> tuple[bytes, bytes | None]:
    """(public, secret or None) in a key file. Raise UserError if it has no keys."""
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError):
        sentence = (
            f"--keys: {path} is not a file of keys; copy it again, or make new keys"
        )
        raise UserError(sentence) from None


def secure(context, socket, keys: str) -> tuple[ThreadAuthenticator, dict[str, str]]:
    """Encrypt a socket before it is bound, and accept only the samplers that have a public key in
    KEYS/samplers.

    Returns the thread that answers ZeroMQ's questions, which the caller stops, and the name of each
    public key. UserError: there are no keys."""
    public, secret = machine_keys(keys)
    files = sorted((Path(keys) / "samplers").glob("*.key"))
    known = {read_key_file(path)[0].decode("ascii"): path.stem for path in files}
    need(
        known,
        f"--keys={keys}: no sampler's public key in its folder samplers, so no sampler can connect; check that "
        "this is the learner's folder",
    )
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain="*", location=Path(keys) / "samplers")
    socket.curve_publickey = public
    socket.curve_secretkey = secret
    socket.curve_server = True
    return authenticator, known


def refusal_of(sampler: str, owner: str) -> str:
    """Why a sampler with the keys of the folder `owner` may not use this name; empty if it may."""
    if sampler == owner or sampler.startswith(f"{owner}-"):
        return ""
    return f"--name={sampler}: these keys belong to {owner}; use this name, or {owner}-NAME"


@dataclass(frozen=True)
class KeysFlags:
    """Keys for a learner and its samplers"""

    samplers: int = 1
    """Number of samplers: OUT/sampler0, OUT/sampler1, ..."""


def main(argv: list[str]) -> None:
    outs = [
        at_home(arg) for arg in takewhile(lambda arg: not arg.startswith("-"), argv)
    ]
    flags = parse_flags(KeysFlags, argv[len(outs) :], usage=USAGE)
    need(
        len(outs) == 1 and outs[0],
        "name one new folder: python -m remote.keys keys --samplers=4",
    )
    make_keys(outs[0], flags.samplers)
    print(
        f"{outs[0]}/learner stays with the learner; carry {outs[0]}/sampler0 to "
        f"{outs[0]}/sampler{flags.samplers - 1} to one host each, over a channel that you trust"
    )


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
