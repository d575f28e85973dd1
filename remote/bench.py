"""What remote samplers cost: a table and one JSON line.

    python -m remote.bench wire          # or line, samplers, or relay; without a name all

wire       weights of 256 MiB from a learner's hub to a sampler on this host, both ends' digests and the file included,
           over a bare TCP copy and one SHA-256 pass of the same bytes; and the same with keys
line       share of a line that weights fill, from their first byte on the way to the last, the lesser of two times,
           through a proxy that delays and throttles (line.py); both ends and the proxy share this host's cores
samplers   real runs with 1, 2 and 4 remote samplers whose delays are 60 s to 1800 s, a hundred times shortened: share
           of the samplers' time that is blocked on the transport, and of the learner's that is spent waiting
relay      what leaves a learner until all samplers have its weights of 8 MiB, in copies of them, and how long that
           takes, with 1, 4, 16 and 64 samplers, relays or not, with keys, over a line of 8 MB/s between two network
           namespaces (needs root, ip and tc)
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
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

from bench import alternate, parse, print_table
from flags import UserError, run_command
from remote import wire
from remote.account import Account, Spool
from remote.groups import Limits
from remote.guard import open_log
from remote.hub import Hub
from remote.keys import make_keys, sampler_keys
from remote.line import Line
from remote.link import Link
from remote.sampler import SamplerFlags
from run import read_metrics

# ---------------------------------------------------------------------------------------------------------------------
# wire
# ---------------------------------------------------------------------------------------------------------------------


def bench_wire(root: str, mib: int = 256, pairs: int = 20) -> dict:
    """A row in the clear, and one with keys."""
    make_keys(f"{root}/keys", 1)
    return {
        "in the clear": wire_over_tcp(f"{root}/plain", "none", "none", mib, pairs),
        "with keys": wire_over_tcp(f"{root}/curve", f"{root}/keys/learner", f"{root}/keys/sampler0", mib, pairs),
    }


def wire_over_tcp(root: str, learner_keys: str, own_keys: str, mib: int, pairs: int) -> dict:
    """Time of a publication that goes through hub and link, over that of the same bytes through a bare socket."""
    Path(root).mkdir()
    data = np.random.default_rng(0).integers(0, 256, mib << 20, dtype=np.uint8).tobytes()
    path = Path(root) / "weights"
    path.write_bytes(data)
    hub = open_hub("tcp://127.0.0.1:*", learner_keys, root)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    fetcher = spawn.Process(target=fetch, args=(theirs, hub.address, own_keys, f"{root}/box", mib), daemon=True)
    fetcher.start()
    port = ours.recv()
    versions = iter(range(1, 10_000))

    def through_the_hub():
        version = next(versions)
        with open(path, "r+b") as f:  # each version has bytes of its own: equal ones are not sent again
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
    """A learner's hub that weights alone will leave."""
    limits = Limits(group_size=1, max_tokens=1, max_prompt=1, vocab=1, topk=0, max_allowed=0)
    hub = Hub(address, keys, wire.Welcome(wire.PROTOCOL, "bench", {}, {}), limits, open_log(root, 0))
    hub.open(Account())
    return hub


def fetch(pipe, address: str, keys: str, store: str, mib: int) -> None:
    """The other process of bench_wire: a sampler's link, and a bare socket beside it. It says what has come."""
    Path(store).mkdir()
    server = socket.create_server(("127.0.0.1", 0))
    pipe.send(server.getsockname()[1])
    threading.Thread(target=receive_bare, args=(pipe, server, mib), daemon=True).start()
    own = None if keys == "none" else sampler_keys(keys)
    spool = Spool(Path(store) / "spool", ["box"], incarnation=1)
    link = Link([address], ["box"], SamplerFlags(), spool, Path(store), own)
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
# line
# ---------------------------------------------------------------------------------------------------------------------

LINES = {10: 64, 30: 128, 100: 1024, 300: 1024, 1000: 1024}  # MB/s -> MiB of weights


def bench_line(root: str) -> dict:
    """A row for each line."""
    out = {}
    for ms in (10, 200):
        for mb_per_s, mib in LINES.items():
            folder = Path(root) / f"{mb_per_s}-{ms}"
            folder.mkdir()
            out[f"{mb_per_s} MB/s, {ms} ms"] = fill(folder, mb_per_s * 1e6, ms / 1e3, mib)
    return out


def fill(root: Path, rate: float, trip: float, mib: int, times: int = 2) -> dict:
    """Publish so often to one sampler at the other end of a line: the least share of it that was used, and the rest."""
    hub = open_hub("tcp://127.0.0.1:*", "none", str(root))
    line = Line(int(hub.address.rpartition(":")[2]), rate, trip)
    spool = Spool(root / "spool", ["box"], incarnation=1)
    link = Link([f"tcp://127.0.0.1:{line.port}"], ["box"], SamplerFlags(), spool, root, None)
    link.welcome.get(timeout=60)
    shares, seconds = [], []
    for version in range(1, times + 1):
        path = root / f"v{version:06d}.safetensors"
        path.write_bytes(os.urandom(mib << 20))
        busy, used, start = line.down.busy, line.used, time.monotonic()
        hub.broadcast(version, path, float(version))
        while link.newest is None or link.newest.version != version:
            time.sleep(0.001)
        shares.append((line.down.busy - busy) / (line.used - used))
        seconds.append(time.monotonic() - start)
        path.unlink()
    sent = hub.counts["bytes_out"] / (times * (mib << 20))
    for part in (link, line, hub):
        part.close()
    return {"share": min(shares), "MB/s": (mib << 20) / 1e6 / max(seconds), "bytes sent, of the weights": sent}


# ---------------------------------------------------------------------------------------------------------------------
# samplers
# ---------------------------------------------------------------------------------------------------------------------


def bench_samplers(root: str, seconds: float = 30.0) -> dict:
    """A row for each number of samplers: runs of so many seconds, and of half as many more for each sampler."""
    out = {}
    for n in (1, 2, 4):
        run = f"{root}/run{n}"
        screens = run_with_samplers(root, run, n, seconds * (1 + n / 2))
        rows = [r for r in read_metrics(run) if r["step"] > 0]  # the first update waited for the models to load
        last = [found[-1] for found in (re.findall(r"blocked ([0-9.]+) %", screen) for screen in screens) if found]
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
    """A learner and n samplers for so many seconds after its first metrics. What the samplers have printed."""
    address = f"tcp://127.0.0.1:{20000 + os.getpid() % 20000 + 10 * n}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, "train.py", "--actor=none", "--objective=gepo", "--rollout=hf", "--samplers=zmq"]
    command += [f"--bind={address}", "--rollout_batch=64", "--train_batch=64", "--steps=100000", "--eval_problems=8"]
    command += ["--save_every=5", f"--out={run}"]
    learner = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    samplers = []
    for i in range(n):
        command = [sys.executable, "-m", "remote", f"--connect={address}", "--rollout=hf", f"--name=box{i}"]
        command += [f"--spool={root}/box{n}{i}", "--delay=lognormal", "--delay_min=0.6", "--delay_max=18"]
        samplers.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    start = time.monotonic()
    while not (Path(run) / "metrics.jsonl").exists() and time.monotonic() - start < 300:
        time.sleep(0.5)
    time.sleep(seconds)
    for process in (*samplers, learner):
        process.send_signal(signal.SIGTERM)
    screens = [process.communicate(timeout=120)[0] for process in samplers]
    learner.wait(timeout=120)
    return screens


# ---------------------------------------------------------------------------------------------------------------------
# relay
# ---------------------------------------------------------------------------------------------------------------------

LEARNER, SAMPLERS = "10.78.0.1", "10.78.0.2"  # addresses of the two hosts
CLONE_NEWNET = 0x40000000  # for setns(2)


def bench_relay(root: str, mib: int = 8, mb_per_s: int = 8, numbers=(1, 4, 16, 64)) -> dict:
    """A row for each number of samplers, all on one host, the learner on another."""
    make_keys(f"{root}/keys", max(numbers))
    hosts = Hosts(mb_per_s)
    out = {}
    try:
        for n in numbers:
            for relays in (False, True):
                made = publish_over(hosts, f"{root}/run{n}{relays}", f"{root}/keys", n, relays, mib)
                out.setdefault(str(n), {}).update(made)
    finally:
        hosts.delete()
    return out


class Hosts:
    """Two network namespaces and a cable, throttled at the first one's end. UserError: this process may make none."""

    def __init__(self, mb_per_s: int):
        self.names = [f"bench{os.getpid()}{x}" for x in "ab"]
        self.ends = [f"e{x}{os.getpid() % 10**6}" for x in "ab"]
        try:
            for name in self.names:
                run_ip("netns", "add", name)
            run_ip("link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
            for name, end, address in zip(self.names, self.ends, (LEARNER, SAMPLERS), strict=True):
                run_ip("link", "set", end, "netns", name)
                run_ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
                run_ip("-n", name, "link", "set", end, "up")
                run_ip("-n", name, "link", "set", "lo", "up")
            throttle = f"tc qdisc add dev {self.ends[0]} root tbf rate {8 * mb_per_s}mbit burst 256kb latency 100ms"
            run_ip("netns", "exec", self.names[0], *throttle.split())
        except (OSError, subprocess.CalledProcessError) as e:
            self.delete()
            raise UserError(f"relay: no network namespaces here ({e}); run it as root, with iproute2") from None

    def sent(self) -> int:
        """Bytes that have left the first host."""
        (link,) = json.loads(run_ip("-n", self.names[0], "-s", "-j", "link", "show", self.ends[0]))
        return link["stats64"]["tx"]["bytes"]

    def delete(self) -> None:
        for name in self.names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


def run_ip(*command: str) -> str:
    """What this command of ip(8) prints."""
    return subprocess.run(["ip", *command], capture_output=True, check=True, text=True, timeout=30).stdout


def move_to(host: str) -> None:
    """This process goes on in a network namespace: its sockets belong there."""
    with open(f"/run/netns/{host}") as f:
        if ctypes.CDLL(None, use_errno=True).setns(f.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def publish_over(hosts: Hosts, root: str, keys: str, n: int, relays: bool, mib: int) -> dict:
    """Publish once, to n samplers that are there: what leaves the learner, over the weights' size, and the time."""
    Path(root).mkdir()
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    there, far = spawn.Pipe()
    learner = spawn.Process(target=publish, args=(theirs, hosts.names[0], root, f"{keys}/learner", mib), daemon=True)
    samplers = spawn.Process(target=fetch_all, args=(far, hosts.names[1], root, keys, n, relays), daemon=True)
    learner.start()
    samplers.start()
    assert (ours.recv(), there.recv()) == ("listening", "welcome")
    time.sleep(3.0)  # all have said hello
    before, start = hosts.sent(), time.monotonic()
    ours.send("publish")
    assert there.recv() == "fetched"
    seconds, copies = time.monotonic() - start, (hosts.sent() - before) / (mib << 20)
    for process in (learner, samplers):
        process.kill()
        process.join()
    how = "relays" if relays else "no relays"
    return {f"copies, {how}": copies, f"seconds, {how}": seconds}


def publish(pipe, host: str, root: str, keys: str, mib: int) -> None:
    """The learner's process."""
    move_to(host)
    hub = open_hub(f"tcp://{LEARNER}:5555", keys, root)
    pipe.send("listening")
    pipe.recv()
    path = Path(root) / "v000000.safetensors"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, mib << 20, dtype=np.uint8).tobytes())
    hub.broadcast(0, path, 0.0)
    time.sleep(600)


def fetch_all(pipe, host: str, root: str, keys: str, n: int, relays: bool) -> None:
    """The samplers' process."""
    move_to(host)
    links = []
    for i in range(n):
        store = Path(root) / f"box{i}"
        store.mkdir()
        flags = SamplerFlags(relay=f"tcp://{SAMPLERS}:{6000 + i}" if relays else "")
        spool = Spool(store / "spool", [f"sampler{i}"], incarnation=1)
        own = sampler_keys(f"{keys}/sampler{i}")
        links.append(Link([f"tcp://{LEARNER}:5555"], [f"sampler{i}"], flags, spool, store, own))
    for link in links:
        link.welcome.get(timeout=60)
    pipe.send("welcome")
    while any(link.newest is None for link in links):
        time.sleep(0.01)
    pipe.send("fetched")


BENCHES = {"wire": bench_wire, "line": bench_line, "samplers": bench_samplers, "relay": bench_relay}


def main(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv):
        print(__doc__.strip())
        return
    names = parse(argv, BENCHES) or list(BENCHES)
    with tempfile.TemporaryDirectory() as root:
        print_table({name: BENCHES[name](root) for name in names})


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
