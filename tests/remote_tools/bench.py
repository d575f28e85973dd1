"""The costs of remote samplers: a table and one JSON line.

    python tests/remote_tools/bench.py wire          # or samplers; both without a name

wire       time of 256 MiB of weights from a learner's hub to a sampler on this host, with digests and the file, divided
           by the time of a bare TCP copy and one SHA-256 pass of equal bytes; without keys and with keys
samplers   real runs with 1, 2 and 4 remote samplers with delays of 60 s to 1800 s, divided by 100: share of the
           samplers' time that is blocked on the transport, and share of the learner's time that is waiting
"""

from __future__ import annotations

import difflib
import hashlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from bench import alternate, print_table
from machinery.flags import UserError, run_command
from machinery.run import read_metrics
from remote import wire
from remote.account import Account, Spool
from remote.groups import Limits
from remote.hub import Hub
from remote.keys import make_keys, sampler_keys
from remote.link import Link
from remote.sampler import SamplerFlags
from remote.source import open_log

# ---------------------------------------------------------------------------------------------------------------------
# wire
# ---------------------------------------------------------------------------------------------------------------------


def bench_wire(root: str, mib: int = 256, pairs: int = 20) -> dict:
    """A row without encryption, and a row with keys."""
    make_keys(f"{root}/keys", 1)
    return {
        "in the clear": wire_over_tcp(f"{root}/plain", "none", "none", mib, pairs),
        "with keys": wire_over_tcp(f"{root}/curve", f"{root}/keys/learner", f"{root}/keys/sampler0", mib, pairs),
    }


def wire_over_tcp(root: str, learner_keys: str, keys: str, mib: int, pairs: int) -> dict:
    """Time of a publication through hub and link, divided by the time of equal bytes through a bare socket."""
    Path(root).mkdir()
    data = np.random.default_rng(0).integers(0, 256, mib << 20, dtype=np.uint8).tobytes()
    path = Path(root) / "weights"
    path.write_bytes(data)
    hub = open_hub("tcp://127.0.0.1:*", learner_keys, root)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    fetcher = spawn.Process(target=fetch, args=(theirs, hub.address, keys, f"{root}/box", mib), daemon=True)
    fetcher.start()
    port = ours.recv()
    versions = iter(range(1, 10_000))

    def through_the_hub():
        version = next(versions)
        with open(path, "r+b") as f:  # versions differ, because equal bytes are not sent again
            f.write(version.to_bytes(8, "little"))
        (Path(root) / f"v{version}").symlink_to(path)
        hub.broadcast(version, Path(root) / f"v{version}", 0.0)
        assert ours.recv() == version

    def bare():
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(data)
        assert ours.recv() == "bare"

    out = alternate(through_the_hub, bare, pairs, "wire", warm=3)
    fetcher.kill()
    hub.close()
    return {**out, "share of bare throughput": 1 / out["ratio"], "MiB": mib}


def open_hub(address: str, keys: str, root: str) -> Hub:
    """A learner's hub that only sends weights."""
    limits = Limits(group_size=1, max_tokens=1, max_prompt=1, vocab=1, topk=0, max_allowed=0)
    hub = Hub(address, keys, wire.Welcome("bench", {}, {}), limits, open_log(root, 0))
    hub.open(Account())
    return hub


def fetch(pipe, address: str, keys: str, store: str, mib: int) -> None:
    """The second process of bench_wire: a sampler's link and a bare socket. Sends the received versions to `pipe`."""
    Path(store).mkdir()
    server = socket.create_server(("127.0.0.1", 0))
    pipe.send(server.getsockname()[1])
    threading.Thread(target=receive_bare, args=(pipe, server, mib), daemon=True).start()
    pair = None if keys == "none" else sampler_keys(keys)
    spool = Spool(Path(store) / "spool", ["sampler0"], incarnation=1)
    link = Link([address], ["sampler0"], SamplerFlags(), spool, Path(store), pair)
    version = None
    while True:
        time.sleep(0.001)
        if link.newest is not None and link.newest.version != version:
            version = link.newest.version
            pipe.send(version)


def receive_bare(pipe, server: socket.socket, mib: int) -> None:
    buffer = memoryview(bytearray(mib << 20))
    while True:
        connection, _ = server.accept()
        got = 0
        while got < len(buffer):
            got += connection.recv_into(buffer[got:])
        hashlib.sha256(buffer).digest()
        pipe.send("bare")


# ---------------------------------------------------------------------------------------------------------------------
# samplers
# ---------------------------------------------------------------------------------------------------------------------


def bench_samplers(root: str, seconds: float = 30.0) -> dict:
    """A row for each number of samplers, n, with a run of seconds * (1 + n / 2)."""
    out = {}
    for n in (1, 2, 4):
        run = f"{root}/run{n}"
        screens = run_with_samplers(root, run, n, seconds * (1 + n / 2))
        rows = [r for r in read_metrics(run) if r["step"] > 0]  # the first update waits for loading of models
        last = [shares[-1] for shares in (re.findall(r"blocked ([0-9.]+) %", screen) for screen in screens) if shares]
        busy = sum(map(seconds_of_stages, rows))
        out[str(n)] = {
            "blocked, % (worst)": max(map(float, last)),
            "learner waits, %": 100 * sum(r["remote/wait_s"] for r in rows) / busy,
            "updates/s": len(rows) / busy,
            "staleness": sum(r["staleness/mean_updates"] for r in rows) / len(rows),
        }
    return out


def seconds_of_stages(row: dict) -> float:
    return sum(row.get(stage, 0) for stage in ("rollout_s", "update_s", "sync_s", "save_s"))


def run_with_samplers(root: str, run: str, n: int, seconds: float) -> list[str]:
    """Run a learner and n samplers for `seconds` after the first metrics, and return the samplers' output."""
    address = f"tcp://127.0.0.1:{20000 + os.getpid() % 20000 + 10 * n}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, "train.py", "--actor=none", "--objective=gepo", "--rollout=hf"]
    command += [f"--samplers={address}", "--rollout_batch=64", "--train_batch=64", "--steps=99999", "--eval_problems=8"]
    command += ["--save_every=5", f"--out={run}"]
    learner = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    samplers = []
    for i in range(n):
        command = [sys.executable, "-m", "remote", f"--connect={address}", "--rollout=hf", f"--name=box{i}"]
        command += [f"--spool={root}/box{n}{i}", "--delay=lognormal", "--delay_min=0.6", "--delay_max=18"]
        samplers.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True))
    start = time.monotonic()
    while not (Path(run) / "metrics.jsonl").exists() and time.monotonic() - start < 300:
        time.sleep(0.5)
    time.sleep(seconds)
    for process in (*samplers, learner):
        process.send_signal(signal.SIGTERM)
    screens = [process.communicate(timeout=120)[0] for process in samplers]
    learner.wait(timeout=120)
    return screens


BENCHES = {"wire": bench_wire, "samplers": bench_samplers}


def parse(argv: list[str], benches: dict) -> list[str]:
    """The benchmarks in a command line. UserError: an unknown name."""
    for name in [word for word in argv if word not in benches]:
        kind = "flag, only names of benchmarks" if name.startswith("-") else "benchmark"
        sentence = f"{name}: no such {kind}; there are {', '.join(benches)}"
        near = difflib.get_close_matches(name.lstrip("-"), benches, 1, 0.4)
        if near:
            sentence += f"; did you mean {near[0]}?"
        raise UserError(sentence)
    return argv


def main(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv):
        print(__doc__.strip())
        return
    names = parse(argv, BENCHES) or list(BENCHES)
    with tempfile.TemporaryDirectory() as root:
        print_table({name: BENCHES[name](root) for name in names})


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
