"""Objects and messages that travel between learner and samplers. HeteroRL, section 4.2.

Groups of rollouts travel in one direction, weights in the other. The wire treats both as objects: a
name and some bytes. The owner of an object offers it by its manifest, and the receiver pulls it:

    manifest   name, size, and a SHA-256 of each leaf (1 MiB); the root, a digest of these digests, identifies the whole
    pull       asks for a few ranges of leaves at a time; each leaf is checked on arrival, and written if it is good;
               a missing or wrong leaf is asked for again

A receiver without room does not ask, so memory is bounded on both ends. An interrupted transfer
continues from its last good leaf. Nothing is allocated before the manifest's
size is checked, and nothing is unpickled: messages are msgspec structs, groups are safetensors
(groups.py).

The messages between a sampler's Line (link.py) and the learner's Hub (hub.py):

    sampler -> learner                                learner -> sampler
    Hello    name; repeated as a sign of life         Welcome, once; then Got, as a sign of life; or Refuse
    Offer    of a group                               Ask for leaves of it; Got, when the group has arrived whole;
    Leaves   the answer to Ask; or Gone               Held, when a checkpoint accounts for it
    Ask      for leaves of the weights                Offer of weights; Leaves, the answer to Ask; or Gone
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import zmq
from msgspec import Meta

from machinery import flags
from machinery.flags import UserError
from sampling import Sampling

LEAF = 1 << 20  # bytes
MOST = 16 * LEAF  # most bytes of a frame; ZeroMQ disconnects peers that send more
MOST_ASKED = 4  # most leaves in one message
IN_FLIGHT = 32 * LEAF  # most bytes that are asked for and have not arrived, on one connection
MOST_QUEUED = 512  # most messages that wait to be sent to one connection
MOST_WEIGHTS = 1 << 44  # bytes

# The maximum sizes in a message. decode checks them.
Text = Annotated[str, Meta(max_length=256)]  # names; each end has more rules for them
Texts = Annotated[list[Text], Meta(max_length=1 << 16)]
Number = Annotated[int, Meta(ge=0, lt=10**18)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]


class WireError(ValueError):
    """A message or an object is invalid. Reading data from a peer raises no other exception."""


def need(ok, sentence: str) -> None:
    """Raise WireError with this sentence unless `ok`."""
    if not ok:
        raise WireError(sentence)


def printable(text, most: int = 300) -> str:
    """Text from a peer, made safe for a screen or a line of a log."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:most])


# ---------------------------------------------------------------------------------------------------------------------
# Objects
# ---------------------------------------------------------------------------------------------------------------------


class Manifest(msgspec.Struct, frozen=True):
    """An object's name, size, and the digests of its leaves."""

    name: Text
    nbytes: Number
    leaves: list[bytes]

    @property
    def root(self) -> str:
        """A digest that is equal for objects with the same bytes, whatever their names."""
        return hashlib.sha256(
            self.nbytes.to_bytes(8, "little") + b"".join(self.leaves)
        ).hexdigest()[:32]

    def check(self, most: int) -> None:
        """Raise WireError unless this describes an object of at most `most` bytes."""
        need(
            0 < self.nbytes <= most,
            f"{self.name}: {self.nbytes} bytes, more than the maximum of {most}",
        )
        is_valid = len(self.leaves) == -(-self.nbytes // LEAF) and all(
            len(leaf) == 32 for leaf in self.leaves
        )
        need(
            is_valid,
            f"{self.name}: a manifest of {len(self.leaves)} leaves does not describe {self.nbytes} bytes",
        )


def manifest(name: str, data) -> Manifest:
    """The manifest of an object, computed in one pass over its bytes."""
    view = memoryview(data)
    starts = range(0, len(view), LEAF)
    digests = [hashlib.sha256(view[start : start + LEAF]).digest() for start in starts]
    return Manifest(name, len(view), digests)


def leaves(data, first: int, count: int) -> memoryview:
    """The bytes of `count` leaves from number `first` on. Raise WireError if they are outside the
    object."""
    view = memoryview(data)
    inside = 0 <= first * LEAF < len(view) and 1 <= count <= MOST_ASKED
    need(inside, f"leaves {first} to {first + count} of an object of {len(view)} bytes")
    return view[first * LEAF : (first + count) * LEAF]


class Window:
    """The asks in flight on one connection, at most IN_FLIGHT bytes. All asks are lost if nothing
    arrives for `patience` seconds."""

    def __init__(self, patience: float = 10.0):
        self.patience = patience
        self.asks: dict[tuple[Pull, int], int] = {}  # (pull, first leaf) -> bytes, in order
        self.heard = 0.0  # time of the last answer, or of the first ask

    @property
    def is_full(self) -> bool:
        return sum(self.asks.values()) >= IN_FLIGHT


class Pull:
    """An object that is being received.

    sink: takes slices of the object's bytes, a memoryview or a FileSink. window: of the connection;
    several pulls may share it."""

    def __init__(self, of: Manifest, sink, window: Window):
        self.of = of
        self.sink = sink
        self.window = window
        # in reverse order: pop takes the next leaf
        self.missing = list(reversed(range(len(of.leaves))))
        self.asked: dict[int, int] = {}  # first leaf -> number of leaves
        self.corrupt = 0  # number of leaves that arrived and differ from the manifest
        self.moved: float | None = None  # time of the last good leaf, or of the first ask

    @property
    def done(self) -> bool:
        return not self.missing and not self.asked

    def ask(self, now: float) -> tuple[int, int] | None:
        """The next range (first leaf, number) to ask for. None: everything is asked for, or enough
        is in flight."""
        if self.moved is None:
            self.moved = now
        if now - self.window.heard > self.window.patience:
            self.window.heard = now
            for pull, lost in reversed(list(self.window.asks)):
                pull._ask_again(lost)
        if not self.missing or self.window.is_full:
            return None
        first = self.missing.pop()
        count = 1
        while count < MOST_ASKED and self.missing and self.missing[-1] == first + count:
            self.missing.pop()
            count += 1
        self.asked[first] = count
        self.window.asks[self, first] = min((first + count) * LEAF, self.of.nbytes) - first * LEAF
        return first, count

    def put(self, first: int, data, now: float) -> None:
        """Process an answer. An answer that was not asked for is dropped; leaves that differ from
        the manifest are asked for again. OSError if the sink cannot be written: the leaves of this
        answer stay missing."""
        self.window.heard = now
        if first not in self.asked:
            return
        del self.window.asks[self, first]
        asked = range(first, first + self.asked.pop(first))
        bad = []
        try:
            for i in asked:
                leaf = data[(i - first) * LEAF : (i - first + 1) * LEAF]
                if hashlib.sha256(leaf).digest() == self.of.leaves[i]:
                    self.sink[i * LEAF : i * LEAF + len(leaf)] = leaf
                else:
                    bad.append(i)
        except OSError:  # a full disk
            self.missing += reversed(asked)
            raise
        self.corrupt += len(bad)
        self.missing += reversed(bad)
        if len(bad) < len(asked):
            self.moved = now

    def _ask_again(self, first: int) -> None:
        del self.window.asks[self, first]
        self.missing += reversed(range(first, first + self.asked.pop(first)))

    def forget_asked(self) -> None:
        """Mark all asked leaves as missing: the connection is new, or the object is not wanted any
        more."""
        self.moved = None
        for first in sorted(self.asked, reverse=True):
            self._ask_again(first)


class FileSink:
    """A file as a sink.

    It is written by system calls: mapped pages are three times slower, and a full disk would raise
    SIGBUS instead of OSError."""

    def __init__(self, path, nbytes: int):
        self.file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by close)
        self.file.truncate(nbytes)

    def __setitem__(self, at: slice, data) -> None:
        written = os.pwrite(self.file.fileno(), data, at.start)
        if written != len(data):
            raise OSError(
                f"{self.file.name}: {written} of {len(data)} bytes written; is the disk full?"
            )

    def close(self) -> None:
        self.file.close()


class ReceivedWeights(NamedTuple):
    """A complete set of weights on this host. published: time in seconds since the epoch, by the
    learner's clock."""

    version: int
    published: float
    path: Path


# ---------------------------------------------------------------------------------------------------------------------
# Messages
# ---------------------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """From a sampler: its name. handed: number of groups handed over by this incarnation; lost:
    names of groups that it cannot send any more; newest: name of the weights last offered to it."""

    sampler: Text
    incarnation: Number
    session: Text  # the session that the sampler knows, "" at first
    handed: Number = 0
    lost: Texts = []
    newest: Text = ""


class Description(msgspec.Struct, frozen=True):
    """Everything that a sampler must know of a run, except the model's files (source.py)."""

    config: dict[str, str | int | float | bool | None]
    model: str
    topk: Number
    max_allowed: Number
    context: Number
    world: Annotated[int, Meta(ge=1, le=4096)]  # number of ranks
    task_digest: str
    sampling: Sampling
    probe: list[list[int]]
    packed: bool
    stop_ids: list[int]


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """From the learner: the work. setup: configuration and tokenizer files of the model
    (pack_setup)."""

    session: Text
    run: Description
    setup: dict[str, bytes]


class Refuse(msgspec.Struct, tag="refuse", frozen=True):
    """From the learner: this sampler is rejected permanently."""

    why: Annotated[str, Meta(max_length=2000)]


class Step(msgspec.Struct, frozen=True):
    """A delta of weights (delta.py): from the weights with the root `base` to the weights of the
    next step or of the offer."""

    base: Text
    of: Manifest


class Offer(msgspec.Struct, tag="offer", frozen=True):
    """An object can be fetched. version and published (weights only): number of updates, and time
    by the learner's clock. deltas: a chain that leads to these weights."""

    of: Manifest
    version: Annotated[int, Meta(ge=-1, lt=10**18)] = -1
    published: Seconds = 0.0
    deltas: Annotated[list[Step], Meta(max_length=64)] = []


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """A request for these leaves."""

    name: Text
    first: Number
    count: Number


class Leaves(msgspec.Struct, tag="leaves", frozen=True):
    """The answer to Ask; the bytes are the second frame of the message."""

    name: Text
    first: Number


class Gone(msgspec.Struct, tag="gone", frozen=True):
    """The answer if the object no longer exists. With an empty name: the learner's answer to a
    sampler that has not said hello in this session."""

    name: Text


class Got(msgspec.Struct, tag="got", frozen=True):
    """From the learner: these groups have arrived whole and need no new offer in this session."""

    names: Texts


class Held(msgspec.Struct, tag="held", frozen=True):
    """From the learner: these groups are in a checkpoint, or refused for good; the sampler may
    delete them."""

    names: Texts


Message = Hello | Welcome | Refuse | Offer | Ask | Leaves | Gone | Got | Held
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def digest(body) -> bytes:
    return hashlib.blake2b(body, digest_size=8).digest()


def encode(message: Message) -> bytes:
    """A message after its digest. A message that is damaged on the way is dropped whole and sent
    again later."""
    body = _encoder.encode(message)
    return digest(body) + body


def decode(frame) -> Message:
    """The inverse of encode. Raise WireError if the frame is damaged or is not a message."""
    head, body = bytes(frame[:8]), frame[8:]
    need(digest(body) == head, "not a message, or a damaged one")
    try:
        return _decoder.decode(body)
    except Exception as e:  # MsgspecError, UnicodeDecodeError, RecursionError and others
        raise WireError(f"not a message of this revision: {printable(e)}") from None


def check_address(flag: str, address: str, least: int) -> None:
    """Raise UserError unless this is an address with a TCP port from `least` to 65535 (ZeroMQ maps
    99999 to a different port), or with * for any free port if `least` is 0."""
    match = re.fullmatch(r"tcp://\S+:([0-9]{1,5}|\*)", address)
    port = match and match[1].replace("*", "0")
    flags.need(
        match and least <= int(port) <= 65535,
        f"--{flag}={address}: write tcp://HOST:PORT, with a port from {least} to 65535",
    )


def set_socket_options(socket, linger: int) -> None:
    """Bound the messages and queues on both ends, and let the kernel find a dead connection within
    25 s.

    ZeroMQ's own heartbeats abort the whole process (libzmq 4.3.5, `!_io_error`) if a peer leaves
    while its queue is full. linger: milliseconds for which unsent messages may delay the closing of
    the socket."""
    for option, value in (
        (zmq.MAXMSGSIZE, MOST),
        (zmq.SNDHWM, MOST_QUEUED),
        (zmq.RCVHWM, 64),
        (zmq.LINGER, linger),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 10),
        (zmq.TCP_KEEPALIVE_INTVL, 5),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        socket.setsockopt(option, value)


SETUP_FILE = r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,100}\.(json|model|txt|jinja)"


def pack_setup(folder: str) -> dict[str, bytes]:
    """The small files of a model folder, compressed: configuration and tokenizer, no weights."""
    return {
        path.name: zlib.compress(path.read_bytes())
        for path in sorted(Path(folder).iterdir())
        if path.is_file()
        and re.fullmatch(SETUP_FILE, path.name)
        and not path.name.endswith(".index.json")
    }


def unpack_setup(files: dict[str, bytes], folder: Path) -> None:
    """Write the files that pack_setup packed. Raise UserError for a file outside the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        if not re.fullmatch(SETUP_FILE, name):
            raise UserError(
                f"the learner sent a file called {printable(name, 100)!r}; it is not written"
            )
        (folder / name).write_bytes(zlib.decompress(data))
