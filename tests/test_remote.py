"""Remote samplers as real processes: over ZeroMQ and over a folder, killed, stopped, cut off, turned away; and the account adds up."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import metrics
from conftest import ROOT
from test_train import finish, flags, start, wait_for

REMOTE = dict(rollout_batch=16, train_batch=16, steps=4, save_every=2, objective="tis", give_up=60)


def port():
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def sampler(address, folder, *more, keys="none", name="box"):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "rollout.py", f"--connect={address}", f"--spool={folder}", "--rollout=hf", "--groups=2", f"--keys={keys}", f"--name={name}", "--give_up=60", "--patience=1", *more]
    return subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def stop(process):
    process.send_signal(signal.SIGKILL)
    return process.communicate()[0]


def account(run):
    """The last row's account, checked: every group received stands in one column, or waits."""
    row = metrics.read(run)[-1]
    columns = sum(row[f"remote/{k}"] for k in ("trained", "staleness", "window", "refused"))
    return row, columns


@pytest.mark.parametrize("kind", ["zmq", "files"])
def test_a_run_with_a_remote_sampler(kind, solvers, tmp_path):
    where = dict(samplers="zmq", bind=f"tcp://127.0.0.1:{port()}") if kind == "zmq" else dict(samplers="files", sync_path=tmp_path / "shared")
    learner = start(flags(solvers, tmp_path / "run", **REMOTE, **where))
    (tmp_path / "shared").mkdir(exist_ok=True)
    box = sampler(where.get("bind") or tmp_path / "shared", tmp_path / "box")
    code, text, err = finish(learner)
    said = stop(box)
    assert code == 0, err[-3000:] + said[-3000:]
    row, columns = account(tmp_path / "run")
    assert row["remote/trained"] == 4 * 4 and row["remote/refused"] == 0 and columns <= row["remote/received"]
