"""What travels between learner and samplers (hub.py, link.py): how it is written down, cut up, checked, and put together again. HeteroRL, section 4.2.

Groups of rollouts travel one way, weights the other. Whoever has an object *offers* it by its manifest; whoever wants it *pulls* it:

    manifest   name, bytes, and a SHA-256 of each leaf (1 MiB); the root, a digest of those digests, names the whole
    pull       asks for a few ranges of leaves at a time; a leaf is checked when it comes, and kept; what is missing or wrong is asked for again

Pulling settles the rest. A receiver with no room does not ask, so memory is bounded on both ends. A broken transfer goes on from its last good
leaf, after a restart too. Ranges grow while answers come fast and shrink while they come late (`Pace`). Nothing is allocated before the
manifest's size has been looked at, and nothing is unpickled: messages are msgspec structs, groups are safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np

from rollout import Response, Rollout
from sampling import Sampling

PROTOCOL = 2
LEAF = 1 << 20
MOST = 16 * LEAF + 4096  # bytes of a message; whoever sends more is cut off before they are read


class WireError(ValueError):
    """What came is not what it should be."""


# ---------------------------------------------------------------------------------------------------------------------
# Objects
# ---------------------------------------------------------------------------------------------------------------------


class Manifest(msgspec.Struct, frozen=True):
    """An object's name, size, and the digests of its leaves."""

    name: str
    nbytes: int
    leaves: list[bytes]

    @property
    def root(self) -> str:
        return hashlib.sha256(self.nbytes.to_bytes(8, "little") + b"".join(self.leaves)).hexdigest()[:32]

    def check(self, most: int) -> None:
        """WireError unless the manifest is one of an object of at most so many bytes."""
        if not 0 < self.nbytes <= most:
            raise WireError(f"{self.name}: {self.nbytes} bytes, and at most {most} are taken")
        if len(self.leaves) != -(-self.nbytes // LEAF) or any(len(x) != 32 for x in self.leaves):
            raise WireError(
                f"{self.name}: a manifest of {len(self.leaves)} leaves does not describe {self.nbytes} bytes"
            )


POOL = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "leaves")


def each(work, numbers: range) -> list:
    """work(number) of each, several at once: hashing and writing let other threads run."""
    return list((map if len(numbers) == 1 else POOL.map)(work, numbers))


def manifest(name: str, data) -> Manifest:
    """One pass over the bytes."""
    view = memoryview(data)
    return Manifest(
        name, len(view), each(lambda i: hashlib.sha256(view[i : i + LEAF]).digest(), range(0, len(view), LEAF))
    )


@dataclass
class Pace:
    """How many leaves to ask for at once on one connection, and how many such asks may be open."""

    leaves: int = 1
    open: int = 8
    patience: float = 10.0  # seconds until an answer counts as lost
    most: int = 8

    def answered(self, seconds: float) -> None:
        if seconds < 0.1:
            self.leaves = min(self.most, 2 * self.leaves)
        elif seconds > 1.0:
            self.leaves = max(1, self.leaves // 2)

    def failed(self) -> None:
        self.leaves = 1


class Pull:
    """An object on its way in. sink: what takes slices of its bytes, a memoryview or a FileSink; what already lies in it (`resume`) is checked and kept."""

    def __init__(self, of: Manifest, sink, pace: Pace, resume: bool = False):
        self.of, self.sink, self.pace = of, sink, pace
        self.missing = [
            i
            for i, leaf in enumerate(of.leaves)
            if not (resume and hashlib.sha256(self.sink[i * LEAF : (i + 1) * LEAF]).digest() == leaf)
        ]
        self.missing.reverse()  # the next one stands at the end
        self.asked: dict[int, tuple[int, float]] = {}  # first leaf -> how many, when
        self.corrupt = 0

    @property
    def done(self) -> bool:
        return not self.missing and not self.asked

    def ask(self, now: float) -> tuple[int, int] | None:
        """The next range to ask for, or None: everything is asked for, or enough is open."""
        for first, (count, since) in list(self.asked.items()):
            if now - since > self.pace.patience:
                self._again(first, count)
        if not self.missing or len(self.asked) >= self.pace.open:
            return None
        first, count = self.missing.pop(), 1
        while count < self.pace.leaves and self.missing and self.missing[-1] == first + count:
            self.missing.pop()
            count += 1
        self.asked[first] = (count, now)
        return first, count

    def put(self, first: int, data, now: float) -> None:
        """An answer. One that nobody asked for is dropped; leaves that are not what the manifest says are asked for again."""
        if first not in self.asked:
            return
        count, since = self.asked[first]
        del self.asked[first]

        def keep(i: int) -> bool:
            leaf = data[(i - first) * LEAF : (i - first + 1) * LEAF]
            if good := hashlib.sha256(leaf).digest() == self.of.leaves[i]:
                self.sink[i * LEAF : i * LEAF + len(leaf)] = leaf
            return good

        asked = range(first, first + count)
        try:
            bad = [i for i, good in zip(asked, each(keep, asked)) if not good]
        except OSError:  # a full disk: they are still missing
            self.missing += reversed(asked)
            raise
        self.corrupt += len(bad)
        self.missing += reversed(bad)
        self.pace.failed() if bad else self.pace.answered(now - since)

    def _again(self, first: int, count: int) -> None:
        del self.asked[first]
        self.missing += range(first + count - 1, first - 1, -1)
        self.pace.failed()

    def forget_asked(self) -> None:
        """The connection is a new one: nothing that was asked for will come."""
        for first, (count, _) in list(self.asked.items()):
            self._again(first, count)


class FileSink:
    """A file as a sink. Written by calls: mapped pages cost three times as much, and a full disk would be a SIGBUS instead of an error."""

    def __init__(self, path, nbytes: int, resume: bool = False):
        self.file = open(path, "r+b" if resume else "w+b", buffering=0)
        self.file.truncate(nbytes)

    def __getitem__(self, at: slice) -> bytes:
        return os.pread(self.file.fileno(), at.stop - at.start, at.start)

    def __setitem__(self, at: slice, data) -> None:
        if (n := os.pwrite(self.file.fileno(), data, at.start)) != len(data):
            raise OSError(f"{self.file.name}: {n} of {len(data)} bytes written; is the disk full?")

    def close(self) -> None:
        self.file.close()


def leaves(data, first: int, count: int):
    """The bytes of a range of leaves; WireError outside the object."""
    view = memoryview(data)
    if not 0 <= first * LEAF < len(view) or not 1 <= count <= 64:
        raise WireError(f"leaves {first} to {first + count} of an object of {len(view)} bytes")
    return view[first * LEAF : (first + count) * LEAF]


# ---------------------------------------------------------------------------------------------------------------------
# Messages
# ---------------------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Sampler: who it is. handed: groups handed over by this incarnation so far; lost: names of groups that it cannot send any more."""

    protocol: int
    sampler: str
    incarnation: int
    session: str  # the learner session it knows, "" at first
    handed: int = 0
    lost: list[str] = []


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Learner: what to sample. setup: config and tokenizer files of the model; run: the fields of config.Config that a sampler needs."""

    protocol: int
    session: str
    run: dict
    setup: dict[str, bytes]


class Refuse(msgspec.Struct, tag="refuse", frozen=True):
    why: str


class Offer(msgspec.Struct, tag="offer", frozen=True):
    """Here is an object. version and published: of weights, the learner's updates and clock behind them."""

    of: Manifest
    version: int = -1
    published: float = 0.0


class Ask(msgspec.Struct, tag="ask", frozen=True):
    name: str
    first: int
    count: int


class Leaves(msgspec.Struct, tag="leaves", frozen=True):
    """The answer; its bytes are the message's second frame."""

    name: str
    first: int


class Gone(msgspec.Struct, tag="gone", frozen=True):
    """The answer where the object is no longer there."""

    name: str


class Got(msgspec.Struct, tag="got", frozen=True):
    """Learner: these groups are here whole; no need to offer them again in this session. As the answer to a beat: the newest weights' name."""

    names: list[str]
    newest: str = ""


class Needs(msgspec.Struct, tag="want", frozen=True):
    """Sampler: it knows of no offer of the newest weights; please repeat it."""


class Held(msgspec.Struct, tag="held", frozen=True):
    """Learner: these groups are in a checkpoint, or refused for good: the sampler may forget them."""

    names: list[str]


Message = Hello | Welcome | Refuse | Offer | Ask | Leaves | Gone | Got | Needs | Held
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)


def digest(body) -> bytes:
    return hashlib.blake2b(body, digest_size=8).digest()


def encode(message: Message) -> bytes:
    """A message behind its digest: one that is damaged on the way is dropped whole, and said again in time."""
    body = _encoder.encode(message)
    return digest(body) + body


def decode(frame) -> Message:
    head, body = bytes(frame[:8]), frame[8:]
    if digest(body) != head:
        raise WireError("a damaged message, or none")
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as e:
        raise WireError(f"not a message of protocol {PROTOCOL}: {e}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Groups
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What a group may be at most; whoever offers more is refused before anything is allocated."""

    group_size: int
    max_tokens: int
    max_prompt: int
    vocab: int
    topk: int
    kept: int

    @property
    def nbytes(self) -> int:
        token = 4 + 1 + 4 + 8 * self.topk + 4 + 4 * self.kept
        return self.group_size * (self.max_tokens * token + 64) + 4 * self.max_prompt + (1 << 16)


class Head(msgspec.Struct, frozen=True):
    """Everything of a group but its arrays."""

    uid: tuple[str, int, int]
    prompt_id: str
    sampling: dict
    model: str
    precision: str
    version: int
    digest: str
    t_published: float
    t_start: float
    t_end: float
    finish: list[str]
    kept: bool


def name_of(uid) -> str:
    return f"{uid[0]}/{uid[1]}/{uid[2]}"


def encode_group(g: Rollout) -> bytes:
    from safetensors.numpy import save

    rs = g.responses
    kept = rs[0].allowed_ids is not None
    head = Head(
        tuple(g.uid),
        g.prompt_id,
        vars(g.sampling),
        g.model,
        g.precision,
        g.version,
        g.digest,
        g.t_published,
        g.t_start,
        g.t_end,
        [r.finish_reason for r in rs],
        kept,
    )
    arrays = {
        "prompt_ids": g.prompt_ids,
        "lengths": np.array([len(r.tokens) for r in rs], np.int32),
        "rewards": np.array([r.reward for r in rs]),
    }
    for name in ("tokens", "loss_mask", "logp_inf", "topk_ids", "topk_logp", *(["allowed_ids"] if kept else [])):
        arrays[name] = np.concatenate([getattr(r, name) for r in rs])
    if kept:
        arrays["allowed_sizes"] = np.concatenate([np.diff(r.allowed_offsets) for r in rs]).astype(np.int32)
    return save(
        {k: np.ascontiguousarray(v) for k, v in arrays.items()}, metadata={"head": msgspec.json.encode(head).decode()}
    )


SHAPES = {
    "prompt_ids": (np.int32, 1),
    "lengths": (np.int32, 1),
    "rewards": (np.float64, 1),
    "tokens": (np.int32, 1),
    "loss_mask": (np.bool_, 1),
    "logp_inf": (np.float32, 1),
    "topk_ids": (np.int32, 2),
    "topk_logp": (np.float32, 2),
    "allowed_ids": (np.int32, 1),
    "allowed_sizes": (np.int32, 1),
}


def decode_group(data, limits: Limits) -> Rollout:
    """The group, or WireError with what is wrong with it: types, shapes, sizes, token ids, log-probabilities."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    data = bytes(data)
    try:
        a = load(data)
        size = int.from_bytes(data[:8], "little")
        head = msgspec.json.decode(json.loads(data[8 : 8 + size])["__metadata__"]["head"], type=Head)
        sampling = Sampling(**head.sampling)
    except (SafetensorError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as e:
        raise WireError(f"not a group: {e}") from None

    def need(ok, what):
        if not ok:
            raise WireError(f"group {name_of(head.uid)}: {what}")

    need(set(a) == set(SHAPES) - (set() if head.kept else {"allowed_ids", "allowed_sizes"}), f"arrays {sorted(a)}")
    for name, x in a.items():
        need(x.dtype == SHAPES[name][0] and x.ndim == SHAPES[name][1], f"{name} is {x.dtype} with {x.ndim} dimensions")
    L, G = a["lengths"], len(a["lengths"])
    N = int(L.astype(np.int64).sum())
    need(
        G == limits.group_size and len(a["rewards"]) == G == len(head.finish),
        f"{G} responses instead of {limits.group_size}",
    )
    need(
        L.min() >= 1 and L.max() <= limits.max_tokens and len(a["prompt_ids"]) <= limits.max_prompt,
        f"lengths {L.tolist()} after a prompt of {len(a['prompt_ids'])}",
    )
    need(
        all(len(a[k]) == N for k in ("tokens", "loss_mask", "logp_inf", "topk_ids", "topk_logp")),
        "arrays of unequal length",
    )
    need(
        a["topk_ids"].shape == a["topk_logp"].shape == (N, limits.topk),
        f"top-K of {a['topk_ids'].shape[1]} instead of {limits.topk}",
    )
    for name in ("prompt_ids", "tokens", "topk_ids", "allowed_ids"):
        need(
            name not in a or a[name].size == 0 or 0 <= a[name].min() and a[name].max() < limits.vocab,
            f"{name} outside the vocabulary of {limits.vocab}",
        )
    need(
        np.isfinite(a["logp_inf"]).all() and a["logp_inf"].max() < 1e-3 and not np.isnan(a["topk_logp"]).any(),
        "log-probabilities that are none",
    )
    need(np.isfinite(a["rewards"]).all() and head.version >= 0, "a reward or version that is none")
    need(head.kept == (limits.kept > 0), "kept sets are missing" if limits.kept else "kept sets that nobody asked for")
    ends = np.cumsum(L)
    kept_at = np.concatenate([[0], np.cumsum(a["allowed_sizes"], dtype=np.int64)]) if head.kept else None
    if head.kept:
        need(
            len(a["allowed_sizes"]) == N
            and a["allowed_sizes"].min() >= 1
            and a["allowed_sizes"].max() <= limits.kept
            and kept_at[-1] == len(a["allowed_ids"]),
            "kept sets of wrong sizes",
        )
    responses = []
    for i, (start, end) in enumerate(zip(ends - L, ends)):
        sets = (
            {
                "allowed_offsets": kept_at[start : end + 1] - kept_at[start],
                "allowed_ids": a["allowed_ids"][kept_at[start] : kept_at[end]],
            }
            if head.kept
            else {}
        )
        responses.append(
            Response(
                a["tokens"][start:end],
                a["loss_mask"][start:end],
                a["logp_inf"][start:end],
                a["topk_ids"][start:end],
                a["topk_logp"][start:end],
                head.finish[i],
                **sets,
                reward=float(a["rewards"][i]),
            )
        )
    return Rollout(
        head.uid,
        head.prompt_id,
        a["prompt_ids"],
        sampling,
        head.model,
        head.precision,
        head.version,
        head.digest,
        head.t_start,
        head.t_end,
        responses,
        t_published=head.t_published,
    )
