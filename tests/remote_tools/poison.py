"""Groups and messages for fuzz.py: honest, mutated, and with values that no engine makes."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import msgspec
import numpy as np

from remote import wire
from remote.groups import Limits, encode_group
from rollout import Response, Rollout
from sampling import Sampling
from tasks import Arithmetic

HONEST = "sampler0"
LIMITS = Limits(group_size=4, max_tokens=32, max_prompt=16, vocab=256, topk=3, max_allowed=0)
ODD_NAMES = [
    "",
    "..",
    "../../victim",
    "a/b",
    "a.b",
    "a.0",
    "x" * 65,
    "x" * 300,
    "\x00",
    "²",
    "-",
    "sampler1",
    "sampler2",
]
ODD_NUMBERS = [-1, 0, 1, 10**9, 10**18 - 1, 10**18, 2**63, 2**64 - 1, 1e39, float("nan"), None, True, "1", [], {}]


def make_group(r: random.Random, uid: tuple[str, int, int], version: int, published: float) -> Rollout:
    """A group that an engine might sample."""
    rng = np.random.default_rng(r.getrandbits(64))
    problem = Arithmetic().problem("train", r.randrange(1000))
    responses = []
    for i in range(LIMITS.group_size):
        L = int(rng.integers(1, LIMITS.max_tokens + 1))
        ids = np.argsort(rng.random((L, LIMITS.vocab)), 1)[:, : LIMITS.topk].astype(np.int32)
        logp = np.log(np.tile([0.5, 0.25, 0.125], (L, 1))).astype(np.float32)
        mask = np.ones(L, bool)
        finish = "stop" if i % 2 else "length"
        responses.append(Response(ids[:, 0], mask, logp[:, 0], ids, logp, finish, reward=float(i % 3)))
    prompt = rng.integers(0, LIMITS.vocab, int(rng.integers(2, LIMITS.max_prompt))).astype(np.int32)
    now = time.time()
    return Rollout(
        uid, problem.id, prompt, Sampling(seed=r.randrange(9)), "policy", "float32", version, "ab12", now - 2, now,
        responses, t_published=published,
    )  # fmt: skip


def mutate(r: random.Random, data: bytes) -> bytes:
    """Change, delete, double or insert bytes."""
    data = bytearray(data)
    for _ in range(r.choice([1, 1, 2, 8])):
        at = r.randrange(len(data) + 1)
        match r.randrange(4):
            case 0 if data:
                data[at % len(data)] ^= 1 << r.randrange(8)
            case 1:
                del data[at : at + r.choice([1, 4, 64])]
            case 2:
                data[at:at] = data[at : at + r.choice([1, 4, 64])]
            case _:
                data[at:at] = r.randbytes(r.choice([1, 2, 8]))
    return bytes(data)


def frame_of(body: bytes) -> bytes:
    """A message's bytes after their correct digest."""
    return wire.digest(body) + body


def poison(r: random.Random, group: Rollout) -> bytes:
    """A group's bytes with a value that no engine can sample."""
    whole = encode_group(group)
    one = group.responses[0]
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
        deep = b"[" * 5000 + b"]" * 5000
        at = whole.index(b'temperature\\":') + len(b'temperature\\":')
        whole = whole[:at] + deep + whole[at:]
        size = int.from_bytes(whole[:8], "little") + len(deep)
        return size.to_bytes(8, "little") + whole[8:]
    if name in in_response:
        setattr(one, name, r.choice(in_response[name]))
    elif name in in_group:
        group = replace(group, **{name: r.choice(in_group[name])})
    try:
        return encode_group(group) if name != "bytes" else mutate(r, whole)
    except (ValueError, OverflowError, msgspec.MsgspecError):  # a value that the encoder rejects
        return mutate(r, whole)


def nonsense(r: random.Random, name: str) -> bytes:
    """A message of the correct form with odd values. name: of the attacker."""
    odd = r.choice(ODD_NUMBERS)
    text = r.choice(
        [*ODD_NAMES, f"{name}/1/{r.randrange(10**6)}", f"{name}/{odd}/{odd}", f"{HONEST}/1/{r.randrange(99)}"]
    )
    of = {"name": text, "nbytes": r.choice([odd, 1, 1 << 20]), "leaves": [r.randbytes(32)] * r.choice([0, 1, 1, 99])}
    names = [text] * r.choice([0, 1, 100, 70_000 if r.random() < 0.02 else 2])
    body = r.choice(
        [
            {"type": "hello", "sampler": r.choice([name, text]),
             "incarnation": r.choice([odd, r.randrange(10**6)]), "session": r.choice(["session", "", text]),
             "handed": r.choice([odd, r.randrange(10**6)]), "lost": names},
            {"type": "offer", "of": of, "version": odd, "published": odd},
            {"type": "ask", "name": text, "first": odd, "count": odd},
            {"type": "leaves", "name": text, "first": odd},
            {"type": "gone", "name": text},
            {"type": "got", "names": names, "newest": text},
            {"type": "held", "names": names},
            {"type": "want"},
            {"type": "welcome", "session": text, "run": {}, "setup": {text: b"x"}},
            {"type": text},
        ]
    )  # fmt: skip
    match r.randrange(12):
        case 0:
            return frame_of(b"\x81\xa4type" + b"\x91" * 3000 + b"\xc0")  # nested
        case 1:
            return frame_of(b"\x81\xa4type\xa5" + b"\xff\xfe\x80\x81\x82")  # invalid UTF-8
        case 2:
            return frame_of(b"\xdf\xff\xff\xff\xff" + r.randbytes(20))  # a map of four billion entries
    return frame_of(msgspec.msgpack.encode(body))
