"""Attack both transports and count failures: frames sent, crashes, honest groups lost or doubled, memory.

    python tests/remote_tools/fuzz.py [--frames=100000] [--seed=0]

Three real learners' ends run in turn: a Hub without keys, a Hub with keys, a FilesHub. At each end an honest sampler's
link delivers groups, while attackers send

    noise       random bytes, over ZeroMQ and over a bare TCP connection
    mutants     messages of an honest sampler with changed bytes, and a correct or wrong digest
    nonsense    messages of the correct form with odd values: huge, negative, nested, a different sampler's name
    poison      groups in correct messages, with values that no engine can sample
    crowds      samplers with new names, offers without answers to the hub's requests, messages of many parts
    junk        files, links, folders and pipes of all kinds in a shared folder

Without keys, no attacker uses the honest sampler's name or writes a valid welcome into the folder, because everyone may
do both. Exit code 1 after any failure.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import zmq

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from remote_tools.poison import HONEST, LIMITS, frame_of, make_group, mutate, nonsense, poison

from bench import print_table
from learner import Comm
from machinery.flags import need, parse_flags, run_command
from remote import wire
from remote.account import Spool, with_digest
from remote.files import FilesHub
from remote.files_link import FilesLink
from remote.groups import encode_group
from remote.hub import Hub
from remote.keys import SamplerKeys, make_keys, sampler_keys
from remote.link import Link
from remote.sampler import SamplerFlags
from remote.source import RemoteSource, log_path, open_log
from remote.weights import Store
from sampling import Sampling
from tasks import Arithmetic

EVERY = 100  # an attacker's frames between two groups of the honest sampler
MOST_GROWTH = 64.0  # MiB
WELCOME = wire.Welcome("session", {"world": 1}, {})


@dataclass(frozen=True)
class FuzzFlags:
    """Attack both transports"""

    frames: int = 100_000
    """Messages and files from attackers, all ends together."""
    seed: int = 0
    """Of all random draws."""


@dataclass
class Report:
    frames: int
    crashes: int  # dead threads, and exceptions that only a last handler caught
    honest: int  # groups of the honest sampler
    lost: int  # honest groups without training
    doubled: int  # honest groups with more than one training
    growth: float  # growth of the process after the first tenth, MiB

    @property
    def broken(self) -> bool:
        return bool(self.crashes or self.lost or self.doubled or self.growth > MOST_GROWTH)


# ---------------------------------------------------------------------------------------------------------------------
# Attackers
# ---------------------------------------------------------------------------------------------------------------------


class Attacker:
    """A sampler's socket that an attacker uses. Without valid keys the hub receives no message."""

    def __init__(
        self, r: random.Random, context, address: str, keys: SamplerKeys | None, name: str, in_the_clear: bool
    ):
        self.r = r
        self.name = name
        self.in_the_clear = in_the_clear
        self.socket = context.socket(zmq.DEALER)
        if keys is not None:
            self.socket.curve_publickey = keys.public
            self.socket.curve_secretkey = keys.secret
            self.socket.curve_serverkey = keys.learner
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 16), (zmq.RCVHWM, 64)):
            self.socket.setsockopt(option, value)
        self.socket.connect(address)
        self.offered: dict[str, bytes] = {}  # poisoned groups
        self.n = 0
        self.send(wire.encode(self.hello(name)))

    def hello(self, name: str, incarnation: int = 1) -> wire.Hello:
        return wire.Hello(name, incarnation, "", self.r.randrange(5), [])

    def send(self, *frames: bytes) -> None:
        """Wait briefly for a slow hub. Without a hub, the message is dropped."""
        if self.socket.poll(200, zmq.POLLOUT):
            with contextlib.suppress(zmq.Again):
                self.socket.send_multipart(frames, zmq.NOBLOCK)

    def attack(self) -> None:
        self.answer_asks()
        match self.r.randrange(10):
            case 0:
                self.send(*(self.r.randbytes(self.r.randrange(500)) for _ in range(self.r.choice([1, 1, 2, 3, 50]))))
            case 1 | 2 | 3:
                self.send(self.not_honest(self.mutant()))
            case 4 | 5 | 6:
                self.send(self.not_honest(nonsense(self.r, self.name)), *self.some_leaf())
            case 7 | 8:
                self.offer_poison()
            case _:
                self.join_a_crowd()

    def not_honest(self, frame: bytes) -> bytes:
        """The frame, without hellos in the honest sampler's name, which are legitimate without keys."""
        with contextlib.suppress(wire.WireError):
            if self.in_the_clear and getattr(wire.decode(frame), "sampler", "") == HONEST:
                return wire.encode(wire.Want())
        return frame

    def some_leaf(self) -> list[bytes]:
        return [self.r.randbytes(100)] if self.r.random() < 0.3 else []

    def mutant(self) -> bytes:
        group = f"{self.name}/1/{self.n}"
        message = self.r.choice(
            [
                self.hello(self.r.choice([self.name, HONEST])),
                wire.Offer(wire.manifest(group, b"x"), deltas=[wire.Step("", wire.manifest(group, b"y"))]),
                wire.Ask("v000000.safetensors", 0, 1),
                wire.Leaves(group, 0),
                wire.Gone(group),
                wire.Got([group], "v000000.safetensors"),
                wire.Held([group]),
            ]
        )
        frame = wire.encode(message)
        return frame_of(mutate(self.r, frame[8:])) if self.r.random() < 0.7 else mutate(self.r, frame)

    def offer_poison(self) -> None:
        """Offer a group; `answer_asks` sends it."""
        self.n += 1
        uid = (self.name, 1, self.n)
        data = poison(self.r, make_group(self.r, uid, 0, 0.0)) or b"?"
        name = f"{self.name}/1/{self.n}"
        if len(self.offered) < 64 and self.r.random() < 0.7:
            self.offered[name] = data  # other groups are never sent
        self.send(wire.encode(wire.Offer(wire.manifest(name, data))))

    def answer_asks(self) -> None:
        with contextlib.suppress(zmq.Again, wire.WireError):
            for _ in range(20):
                message = wire.decode(self.socket.recv_multipart(zmq.NOBLOCK)[0])
                if isinstance(message, wire.Ask) and message.name in self.offered:
                    data = self.offered.pop(message.name)
                    self.send(wire.encode(wire.Leaves(message.name, message.first)), data)
                elif isinstance(message, wire.Gone) and not message.name:
                    self.send(wire.encode(self.hello(self.name)))

    def join_a_crowd(self) -> None:
        name = self.r.choice([f"crowd{self.r.randrange(5000)}", self.name, f"{self.name}.{self.r.randrange(99)}"])
        self.send(wire.encode(self.hello(name, self.r.randrange(10**6))))
        self.send(wire.encode(self.hello(self.name)))  # and back


class BareAttacker:
    """A TCP connection without ZeroMQ: random bytes, sometimes after ZeroMQ's greeting."""

    def __init__(self, r: random.Random, address: str):
        self.r = r
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.at = (host, int(port))

    def attack(self) -> None:
        greeting = self.r.choice([b"", b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 1 + 31)])
        with contextlib.suppress(OSError), socket.create_connection(self.at, timeout=2) as connection:
            connection.sendall(greeting + self.r.randbytes(2000))


class Vandal:
    """An attacker with write access to the shared folder, who does not change the honest sampler's files."""

    def __init__(self, r: random.Random, folder: Path, victim: Path):
        self.r = r
        self.folder = folder
        self.victim = victim
        self.left: list[Path] = []

    def attack(self) -> None:
        name = self.r.choice(
            ["evil", "evil2", "a..b", "a b", "²", ".evil", "x" * 65, "evil.0", f"e{self.r.randrange(50)}"]
        )
        kind = self.r.choice(["rollouts", "rollouts", "rollouts", "samplers", "held", "got", "models", "."])
        path = self.folder / kind / name
        if kind == "rollouts" and self.r.random() < 0.9:
            file = self.r.choice(
                [f"1-{self.r.randrange(200)}", "1-²", "01-2", "1-2-3", f"1-{10**20}", "1-2.lost", "9-9"]
            )
            path = path / file
        if kind == ".":
            path = self.folder / self.r.choice(["welcome", "junk"])
        with contextlib.suppress(OSError, ValueError):
            self.clear(path)
            path.parent.mkdir(exist_ok=True)
            self.put(path, name)
            self.left.append(path)
        if len(self.left) > 300:
            with contextlib.suppress(OSError):
                self.clear(self.left.pop(0))

    def clear(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(path.lstat().st_mode):
                shutil.rmtree(path)
            else:
                path.unlink()

    def put(self, path: Path, name: str) -> None:
        stream = path.parent.name
        group = make_group(self.r, (stream, 1, self.r.randrange(200)), 0, 0.0)
        match self.r.randrange(7 if path.name == "welcome" else 9):  # anyone can pose as learner without keys
            case 0:
                path.write_bytes(self.r.randbytes(self.r.randrange(3000)))
            case 1:
                path.mkdir()
            case 2:
                path.symlink_to(self.r.choice([self.victim, "/dev/zero", "nowhere", self.folder]))
            case 3:
                os.mkfifo(path)
            case 4:
                with open(path, "wb") as f:
                    f.truncate(self.r.choice([0, 10, 1 << 30]))
            case 5:
                path.write_bytes(with_digest(poison(self.r, group)))
            case 6:
                path.write_bytes(with_digest(mutate(self.r, encode_group(group))))
            case 7:
                handed = self.r.choice([3, 100, 10**12, 10**17])
                path.write_bytes(wire.encode(wire.Hello(name, self.r.randrange(9), "", handed, [])))
            case _:
                path.write_bytes(nonsense(self.r, name))


# ---------------------------------------------------------------------------------------------------------------------
# A learner's end, an honest sampler, and the fate of its groups
# ---------------------------------------------------------------------------------------------------------------------


class Consumer(threading.Thread):
    """A training loop: takes groups and sometimes saves."""

    def __init__(self, source: RemoteSource):
        super().__init__(daemon=True, name="consumer")
        self.source = source
        self.trained: Counter = Counter()
        self.stop: list[str] = []
        self.broken = ""

    def run(self) -> None:
        try:
            while not self.stop and not self.source.error:
                for group in self.source.next(1, 0, self.stop):
                    self.trained[group.uid] += 1
                if sum(self.trained.values()) % 8 == 0:
                    self.source.state_dict()
                    self.source.saved()
        except Exception as e:
            self.broken = repr(e)


class Scene:
    """A learner's end with an honest sampler. attackers: act in random order."""

    def __init__(self, root: Path, hub: Hub | FilesHub, make_link):
        self.hub = hub
        cfg = SimpleNamespace(sync_every=1, max_staleness=None, window_seconds=1e9, give_up=300.0)
        cfg.dynamic_sampling, cfg.out = 0, str(root)
        store = Store(root / "versions", Comm(), False)
        self.source = RemoteSource(hub, cfg, LIMITS, Sampling(), store, Comm(), hub.log, Arithmetic())
        self.source.publish(0, {"w": torch.ones(3)}.items())
        self.spool, self.link = make_link()
        self.consumer = Consumer(self.source)
        self.consumer.start()
        self.handed = 0

    def hand_over(self, r: random.Random) -> None:
        uid = (HONEST, 1, self.handed)
        group = make_group(r, uid, 0, self.source.published[0])
        self.spool.hand_over(HONEST, f"{HONEST}/1/{self.handed}", encode_group(group))
        self.handed += 1

    def crashes(self) -> int:
        """Dead threads, and exceptions that a last handler caught."""
        gone = [self.consumer.broken, self.source.error, self.hub.broken, self.link.error, not self.link.is_alive()]
        return sum(map(bool, gone)) + self.hub.counts["faults"]

    def run(self, r: random.Random, attackers: list, frames: int, weights: list[int]) -> Report:
        begin = 0.0
        for i in range(frames):
            if i % EVERY == 0:
                self.hand_over(r)
            if i == frames // 10:
                begin = resident_mib()
            r.choices(attackers, weights)[0].attack()
        growth = resident_mib() - begin
        end = time.monotonic() + 60
        while len(self.honest()) < self.handed and time.monotonic() < end and not self.consumer.broken:
            time.sleep(0.05)
        growth = max(growth, resident_mib() - begin)
        crashes = self.crashes()
        for line in log_path(self.source.cfg.out, 0).read_text(errors="replace").splitlines():
            if " a fault in " in line:
                print(line, file=sys.stderr)
        times = self.honest()
        doubled = sum(n > 1 for n in times.values())
        return Report(frames, crashes, self.handed, self.handed - len(times), doubled, growth)

    def honest(self) -> dict:
        return {uid: n for uid, n in list(self.consumer.trained.items()) if uid[0] == HONEST}

    def close(self) -> None:
        self.consumer.stop.append("over")
        self.consumer.join(timeout=20)
        self.link.close()
        self.source.close()


def resident_mib() -> float:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize() / 2**20


def attack_sockets(root: Path, r: random.Random, frames: int, keys: bool) -> Report:
    """A Hub, without keys, or with keys of which one attacker has valid keys."""
    root.mkdir()
    honest = theirs = None
    learner = "none"
    if keys:
        make_keys(str(root / "keys"), 2)
        learner = str(root / "keys" / "learner")
        honest, theirs = (sampler_keys(str(root / "keys" / f"sampler{i}")) for i in range(2))
    hub = Hub("tcp://127.0.0.1:*", learner, WELCOME, LIMITS, open_log(root, 0))

    def make_link():
        (root / "store").mkdir()
        spool = Spool(root / "spool", [HONEST], 1)
        flags = SamplerFlags(patience=1.0, give_up=120.0)
        return spool, Link([hub.address], [HONEST], flags, spool, root / "store", honest)

    scene = Scene(root, hub, make_link)
    context = zmq.Context()
    names = ["sampler1-evil", "sampler1", HONEST] if keys else ["evil", "evil-2", "evil_3"]
    attackers = [Attacker(r, context, hub.address, theirs, name, not keys) for name in names]
    stranger = Attacker(r, context, hub.address, None, "stranger", not keys)
    bare = BareAttacker(r, hub.address)
    try:
        return scene.run(r, [*attackers, stranger, bare], frames, [30, 30, 30, 2, 1])
    finally:
        context.destroy(linger=0)
        scene.close()


def attack_folder(root: Path, r: random.Random, frames: int) -> Report:
    """A FilesHub. A file outside the folder must not change."""
    shared, victim = root / "shared", root / "victim"
    shared.mkdir(parents=True)
    victim.write_bytes(b"of another program")
    hub = FilesHub(str(shared), WELCOME, LIMITS, open_log(root, 0))

    def make_link():
        spool = Spool(shared / "rollouts", [HONEST], 1)
        return spool, FilesLink(str(shared), [HONEST], SamplerFlags(give_up=120.0), spool)

    scene = Scene(root, hub, make_link)
    try:
        report = scene.run(r, [Vandal(r, shared, victim)], frames, [1])
    finally:
        scene.close()
    return replace(report, crashes=report.crashes + (victim.read_bytes() != b"of another program"))


def fuzz(frames: int, seed: int) -> dict[str, Report]:
    """A report for each attacked end."""
    need(frames >= 30, f"--frames={frames}: at least 30")
    r = random.Random(seed)
    part = frames // 3
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        return {
            "zmq, in the clear": attack_sockets(root / "clear", r, part, keys=False),
            "zmq, with keys": attack_sockets(root / "keys", r, part, keys=True),
            "a shared folder": attack_folder(root / "files", r, frames - 2 * part),
        }


def main(argv: list[str]) -> None:
    flags = parse_flags(FuzzFlags, argv, usage="python tests/remote_tools/fuzz.py [--frames=100000] [--seed=0]")
    reports = fuzz(flags.frames, flags.seed)
    print_table({name: asdict(report) for name, report in reports.items()})
    broken = [name for name, report in reports.items() if report.broken]
    need(not broken, f"broken: {', '.join(broken)}")


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
