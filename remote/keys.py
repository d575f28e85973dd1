"""CURVE keys: who may talk to whom, and nobody else can read it.

    python keys.py OUT --samplers=4         # OUT/learner and OUT/sampler0 ... OUT/sampler3, a folder to controllers to each machine

ZeroMQ's CURVE (Curve25519) authenticates and encrypts every connection: the learner lets in the samplers whose public keys it has, and a sampler
talks to the learner whose public key it has.
"""

from __future__ import annotations

import os
from pathlib import Path


def make_keys(out: str, samplers: int) -> None:
    """OUT/learner and OUT/sampler0, ...: one folder to controllers to each machine. CURVE key pairs; secrets readable by their owner alone."""
    import shutil
    import zmq.auth

    root = Path(out)
    if root.exists() and any(root.iterdir()):
        raise ValueError(f"{out} is not empty: keys are not overwritten; name a new folder")
    folders = [root / "learner", *(root / f"sampler{i}" for i in range(samplers))]
    for folder in folders:
        folder.mkdir(parents=True)
        os.chmod(folder, 0o700)
        zmq.auth.create_certificates(folder, folder.name)
        os.chmod(folder / f"{folder.name}.key_secret", 0o600)
    (folders[0] / "samplers").mkdir()
    for folder in folders[1:]:
        shutil.move(folder / f"{folder.name}.key", folders[0] / "samplers")  # the learner knows whom it lets in
        shutil.copy(folders[0] / "learner.key", folder)


def own_keys(folder: str) -> tuple[bytes, bytes]:
    """(public, secret) of the machine whose key folder this is. ValueError: none there, or readable by others."""
    import zmq.auth

    found = sorted(Path(folder).glob("*.key_secret"))
    if len(found) != 1:
        raise ValueError(
            f"--keys={folder}: {len(found)} secret keys there instead of one; `python keys.py OUT --samplers=N` makes a folder for each machine"
        )
    if found[0].stat().st_mode & 0o077:
        raise ValueError(
            f"--keys={folder}: {found[0].name} can be read by others; chmod 600 it, or make new keys if someone may have"
        )
    return zmq.auth.load_certificate(found[0])


def sampler_keys(folder: str) -> tuple[bytes, bytes, bytes]:
    """(public, secret, the learner's public) of a sampler's key folder."""
    import zmq.auth

    learner = Path(folder) / "learner.key"
    if not learner.is_file():
        raise ValueError(
            f"--keys={folder}: no learner.key there; copy the folder that `python keys.py` made for this sampler"
        )
    return *own_keys(folder), zmq.auth.load_certificate(learner)[0]


def secure(context, socket, keys: str, log):
    """CURVE on a bound socket: encrypted, and only samplers whose public keys lie in KEYS/samplers are let in; others are logged."""
    import zmq.auth
    from zmq.auth.thread import ThreadAuthenticator

    public, secret = own_keys(keys)
    if not any((Path(keys) / "samplers").glob("*.key")):
        raise ValueError(
            f"--keys={keys}: no sampler's public key in its folder samplers, so nobody could come in; is this the learner's folder?"
        )
    known = {zmq.auth.load_certificate(path)[0]: path.stem for path in (Path(keys) / "samplers").glob("*.key")}

    class Known:
        def callback(self, domain, key):
            if key not in known:
                log.warning(
                    "a stranger was turned away: nobody's public key here is %s", key.decode("ascii", "replace")
                )
            return key in known

    auth = ThreadAuthenticator(context)
    auth.start()
    auth.configure_curve_callback(domain="*", credentials_provider=Known())
    socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True
    return auth


if __name__ == "__main__":
    import argparse
    import sys

    ap = argparse.ArgumentParser(description="Keys for a learner and its samplers: one folder for each machine.")
    ap.add_argument("out", help="a new folder")
    ap.add_argument("--samplers", type=int, default=1, help="how many")
    a = ap.parse_args()
    try:
        make_keys(a.out, a.samplers)
    except ValueError as e:
        sys.exit(f"error: {e}")
    print(
        f"{a.out}/learner stays with the learner; controllers {a.out}/sampler0 to {a.out}/sampler{a.samplers - 1} to a host each, by a way you trust"
    )
