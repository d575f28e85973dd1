"""Attack a learner's hub and count failures: frames sent, crashes, honest groups lost or doubled, memory.

    python tests/remote_tools/fuzz.py [--frames=100000] [--seed=0]

A hub without keys, then a hub with keys. An honest sampler's link delivers groups, while attackers send

    noise       random bytes
    mutants     messages of an honest sampler with changed bytes, and a correct or wrong digest
    nonsense    messages of the correct form with odd values: huge, negative, nested, a different sampler's name
    poison      groups in correct messages, with values that no engine can sample
    crowds      samplers with new names, offers without answers to the hub's requests, messages of many parts

Without keys, no attacker uses the honest sampler's name, because everyone may do so. Exit code 1 after any failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import zmq

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import make_groups
from test_hub import Opened, Raw, started, until

from machinery.flags import need, parse_flags, run_command
from remote import wire
from remote.groups import encode_group
from remote.keys import make_keys, sampler_keys
from rollout import Rollout
from tasks.arith import Arithmetic

EVERY = 100  # an attacker's frames between two groups of the honest sampler
MOST_GROWTH = 64.0  # MiB
HONEST = "sampler0"
ODD_NAMES = ["", "..", "../../victim", "a/b", "a.b", "a.0", "x" * 65, "x" * 300, "\x00", "²", "-", "sampler1"]
ODD_NUMBERS = [-1, 0, 1, 10**9, 10**18 - 1, 10**18, 2**63, 2**64 - 1, 1e39, float("nan"), None, True, "1", [], {}]


@dataclass(frozen=True)
class FuzzFlags:
    """Attack a learner's hub"""

    frames: int = 100_000
    """Messages from attackers, both hubs together."""
    seed: int = 0
    """Of all random draws."""


@dataclass
class Report:
    crashes: int  # dead threads, and exceptions that only a last handler caught
    honest: int  # groups of the honest sampler
    lost: int  # honest groups without training
    doubled: int  # honest groups with more than one training
    growth: float  # growth of the process after the first tenth, MiB

    @property
    def broken(self) -> bool:
        return bool(self.crashes or self.lost or self.doubled or self.growth > MOST_GROWTH)


# -- What attackers send -----------------------------------------------------------------------------------------------


def make_group(r: random.Random, uid: tuple[str, int, int], published: float = 0.0) -> Rollout:
    """A group that an engine might sample."""
    problem, now = Arithmetic().problem("train", r.randrange(1000)), time.time()
    (group,) = make_groups(1, K=4, seed=r.getrandbits(32))
    return replace(group, uid=uid, prompt_id=problem.id, t_start=now - 2, t_end=now, t_published=published)


def mutate(r: random.Random, data: bytes) -> bytes:
    """Change, delete, double or insert bytes."""
    for _ in range(r.choice([1, 1, 2, 8])):
        at, n = r.randrange(len(data) + 1), r.choice([1, 4, 64])
        before, part, after = data[:at], data[at : at + n], data[at + n :]
        data = before + r.choice([r.randbytes(len(part)), b"", 2 * part, r.randbytes(n) + part]) + after
    return data


def frame_of(body: bytes) -> bytes:
    """A message's bytes after their correct digest."""
    return hashlib.sha256(body).digest() + body


def poison(r: random.Random, group: Rollout) -> bytes:
    """A group's bytes with a value that no engine can sample, changed bytes, or deep nesting."""
    whole, one = encode_group(group), group.responses[0]
    in_response = {
        "reward": [1e39, -1e300, float("nan"), float("inf")],
        "logp_inf": [one.logp_inf * x for x in (-1, np.nan, np.inf, 1e30)],
        "topk_logp": [one.topk_logp * x for x in (-1, np.nan, -np.inf)],
        "topk_ids": [one.topk_ids + 500, one.topk_ids - 500, one.topk_ids * 0],
        "finish_reason": ["", "abort", "stop" * 1000],
    }
    in_group = {
        "prompt_id": ["evil", "", "x" * 5000, "1 + 1 +", "\x00", "9" * 5000],
        "version": [-1, 10**18, 10**30],
        "uid": [(*group.uid[:2], n) for n in (-1, 10**18, 10**4000)],
        "t_end": [-1.0, 1e300],
        "prompt_ids": [group.prompt_ids[:0]],
    }
    name = r.choice([*in_response, *in_group, "bytes", "nested"])
    if name == "nested":
        deep, temperature = b"[" * 5000 + b"]" * 5000, b'temperature\\":'
        size = int.from_bytes(whole[:8], "little") + len(deep)
        return size.to_bytes(8, "little") + whole[8:].replace(temperature, temperature + deep, 1)
    if name in in_response:
        setattr(one, name, r.choice(in_response[name]))
    elif name in in_group:
        group = replace(group, **{name: r.choice(in_group[name])})
    with contextlib.suppress(ValueError, OverflowError, msgspec.MsgspecError):  # a value that the encoder rejects
        if name != "bytes":
            return encode_group(group)
    return mutate(r, whole)


GARBAGE = [
    b"\x81\xa4type" + b"\x91" * 3000 + b"\xc0",  # nested
    b"\x81\xa4type\xa5" + b"\xff\xfe\x80\x81\x82",  # invalid UTF-8
    b"\xdf\xff\xff\xff\xff" + bytes(20),  # a map of four billion entries
]


def nonsense(r: random.Random, name: str) -> bytes:
    """A message of the correct form with odd values. name: of the attacker."""
    odd, large = r.choice(ODD_NUMBERS), r.randrange(10**6)
    text = r.choice([*ODD_NAMES, f"{name}/1/{large}", f"{name}/{odd}/{odd}", f"{HONEST}/1/{r.randrange(99)}"])
    of = {"name": text, "nbytes": r.choice([odd, 1, 1 << 20]), "digest": r.choice(["", "0" * 64, text])}
    names = [text] * r.choice([0, 1, 100, 70_000 if r.random() < 0.005 else 2])
    hello = {"sampler": r.choice([name, text]), "incarnation": r.choice([odd, large]), "handed": r.choice([odd, large])}
    bodies = [
        {"type": "hello", "session": r.choice(["session", "", text]), "lost": names, "newest": odd, **hello},
        {"type": "offer", "of": of, "version": odd, "published": odd},
        {"type": "ask", "name": text, "start": odd},
        {"type": "chunk", "name": text, "start": odd, "data": r.randbytes(r.choice([0, 100]))},
        {"type": "welcome", "session": text, "run": {}, "setup": {text: b"x"}},
        *({"type": kind, "got": names, "held": names} for kind in ("receipt", text)),
    ]
    return frame_of(r.choice(GARBAGE) if r.random() < 0.25 else msgspec.msgpack.encode(r.choice(bodies)))


# -- Attacks -----------------------------------------------------------------------------------------------------------


class Attacker(Raw):
    """A sampler's socket that an attacker uses. keys: None, or valid keys."""

    def __init__(self, r: random.Random, address: str, keys, name: str, in_the_clear: bool):
        super().__init__(address, keys, name)
        self.socket.setsockopt(zmq.SNDTIMEO, 100)  # an attacker does not wait for a hub
        self.r, self.in_the_clear = r, in_the_clear
        self.offered: dict[str, bytes] = {}  # poisoned groups
        self.n = 0
        self.hello()

    def attack(self) -> None:
        self.answer_asks()
        match self.r.randrange(10):
            case 0:
                self.say(tuple(self.r.randbytes(self.r.randrange(500)) for _ in range(self.r.choice([1, 1, 2, 3, 50]))))
            case 1 | 2 | 3:
                self.say(self.not_honest(self.mutant()))
            case 4 | 5 | 6:
                more = [self.r.randbytes(100)] if self.r.random() < 0.3 else []
                self.say((self.not_honest(nonsense(self.r, self.name)), *more))
            case 7 | 8:
                self.offer_poison()
            case _:
                name = self.r.choice([f"crowd{self.r.randrange(5000)}", self.name, f"{self.name}.{self.n}"])
                self.hello(sampler=name, incarnation=self.r.randrange(10**6))
                self.hello()  # and back

    def not_honest(self, frame: bytes) -> bytes:
        """The frame, without hellos in the honest sampler's name, which are legitimate without keys."""
        with contextlib.suppress(wire.WireError):
            if self.in_the_clear and getattr(wire.decode(frame), "sampler", "") == HONEST:
                return wire.encode(wire.Receipt())
        return frame

    def mutant(self) -> bytes:
        group = f"{self.name}/1/{self.n}"
        messages = [
            wire.Hello(self.r.choice([self.name, HONEST]), 1, "", self.r.randrange(5)),
            wire.Offer(wire.manifest(group, b"x"), deltas=[wire.Step("", wire.manifest(group, b"y"))]),
            *(wire.Ask("v000000.safetensors", 0), wire.Chunk(group, 0, b"x"), wire.Receipt([group], [group])),
        ]
        frame = wire.encode(self.r.choice(messages))
        return frame_of(mutate(self.r, frame[32:])) if self.r.random() < 0.7 else mutate(self.r, frame)

    def offer_poison(self) -> None:
        """Offer a group; `answer_asks` sends it."""
        self.n += 1
        name = f"{self.name}/1/{self.n}"
        data = poison(self.r, make_group(self.r, (self.name, 1, self.n))) or b"?"
        if len(self.offered) < 64 and self.r.random() < 0.7:
            self.offered[name] = data  # other groups are never sent
        self.say(wire.Offer(wire.manifest(name, data)))

    def answer_asks(self) -> None:
        while (message := self.hear(wire.Ask, within=0.002)) is not None:
            if message.name in self.offered:
                self.say(wire.chunk_of(self.offered.pop(message.name), message))


def resident_mib() -> float:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize() / 2**20


def attack(root: Path, r: random.Random, frames: int, keys: bool) -> Report:
    """Attack the hub of a learner that trains and sometimes saves. keys: one attacker has valid keys of its own, the
    stranger has none."""
    root.mkdir()
    pairs, learner = [None, None], "none"
    if keys:
        make_keys(str(root / "keys"), 2)
        pairs = [sampler_keys(str(root / "keys" / f"sampler{i}")) for i in range(2)]
        learner = str(root / "keys" / "learner")
    with Opened(root) as opened:
        source = started(root, give_up=300.0)
        source.task = Arithmetic()
        hub = source.hub = opened.hub(learner)
        link = opened.link(hub, root, HONEST, pairs[0], patience=1.0, give_up=120.0)
        names = ["sampler1-evil", "sampler1", HONEST] if keys else ["evil", "evil-2", "evil_3"]
        attackers = [opened.add(Attacker(r, hub.address, pairs[1], name, not keys)) for name in names] * 20
        attackers.append(opened.add(Attacker(r, hub.address, None, "stranger", not keys)))
        trained: Counter = Counter()  # uid -> times
        stop: list[str] = []
        broken: list[Exception] = []

        def train() -> None:
            try:
                while not stop and not source.error:
                    trained.update(group.uid for group in source.next(1, 0, stop))
                    if sum(trained.values()) % 8 == 0:
                        source.state_dict()
                        source.saved()
            except Exception as e:
                broken.append(e)

        def honest() -> list[int]:
            return [n for uid, n in list(trained.items()) if uid[0] == HONEST]

        learner_thread = threading.Thread(target=train, daemon=True)
        learner_thread.start()
        begin, handed = 0.0, 0
        for i in range(frames):
            if i % EVERY == 0:
                group = make_group(r, (HONEST, 1, handed), source.published[0])
                link.spool.hand_over(f"{HONEST}/1/{handed}", encode_group(group))
                handed += 1
            if i == frames // 10:
                begin = resident_mib()
            r.choice(attackers).attack()
        growth = resident_mib() - begin
        until(lambda: len(honest()) >= handed or broken, within=60)
        growth = max(growth, resident_mib() - begin)
        crashes = sum(map(bool, (broken, source.error, hub.broken, link.error, not link.is_alive())))
        stop.append("over")
        learner_thread.join(timeout=20)
        times = honest()
        doubled = sum(n > 1 for n in times)
        return Report(crashes + hub.counts["faults"], handed, handed - len(times), doubled, growth)


def main(argv: list[str]) -> None:
    flags = parse_flags(FuzzFlags, argv, usage="python tests/remote_tools/fuzz.py [--frames=100000] [--seed=0]")
    r, broken = random.Random(flags.seed), []
    with tempfile.TemporaryDirectory() as folder:
        for name, keys in (("in the clear", False), ("with keys", True)):
            report = attack(Path(folder) / name, r, flags.frames // 2, keys)
            print(name, report)
            broken += [name] * report.broken
    need(not broken, f"broken: {', '.join(broken)}")


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
