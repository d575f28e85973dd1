"""Objects and messages that travel between learner and samplers. HeteroRL, section 4.2.

Groups of rollouts travel one way, weights the other. To the wire both are objects: a name and some
bytes. Whoever has an object offers it by its manifest, and whoever wants it pulls it:

    manifest   name, size, and a SHA-256 of each leaf (1 MiB); the root, a digest of these digests, names the whole
    pull       asks for a few ranges of leaves at a time; a leaf is checked when it comes, and written if it is good;
               a missing or wrong leaf is asked for again

A receiver without room does not ask, so memory is bounded on both ends. A broken transfer goes on
from its last good leaf, after a restart too. Nothing is allocated before the manifest's size has
been checked, and nothing is unpickled: messages are msgspec structs, groups are safetensors
(groups.py).

The messages between a sampler's Line (link.py) and the learner's Hub (hub.py):

    sampler -> learner                                learner -> sampler
    Hello    who it is; repeated as a sign of life    Welcome, once; then Got, as a sign of life; or Refuse
    Offer    of a group                               Ask for leaves of it; Got, when the group is here whole;
    Leaves   the answer to Ask; or Gone               Held, when a checkpoint accounts for it
    Ask      for leaves of the weights                Offer of weights; Leaves, the answer to Ask; or Gone
    Want     the offer of the newest weights again
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import zmq
from msgspec import Meta

from machinery import flags
from machinery.flags import UserError

LEAF = 1 << 20  # bytes
MOST = 16 * LEAF  # bytes of a frame; ZeroMQ cuts off whoever sends more
MOST_ASKED = 4  # leaves in one message
IN_FLIGHT = 32 * LEAF  # bytes that are asked for and not here, on one connection
MOST_QUEUED = 512  # messages to one connection that wait to be sent
MOST_WEIGHTS = 1 << 44  # bytes

# The most that a message may hold. decode checks it.
Text = Annotated[str, Meta(max_length=256)]  # names; each end has more rules for them
Texts = Annotated[list[Text], Meta(max_length=1 << 16)]
Number = Annotated[int, Meta(ge=0, lt=10**18)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]


class WireError(ValueError):
    """A message or an object is not as it should be. Reading from others raises no other
    exception."""


def need(ok, sentence: str) -> None:
    """WireError with this sentence unless `ok`."""
    if not ok:
        raise WireError(sentence)


def printable(text, most: int = 300) -> str:
    """Text from others, fit for a screen or a line of a log."""
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
        """The same for objects of the same bytes, whatever their names."""
        return hashlib.sha256(
            self.nbytes.to_bytes(8, "little") + b"".join(self.leaves)
        ).hexdigest()[:32]

    def check(self, most: int) -> None:
        """WireError unless this describes an object of at most `most` bytes."""
        need(
            0 < self.nbytes <= most,
            f"{self.name}: {self.nbytes} bytes, and at most {most} are taken",
        )
        is_valid = len(self.leaves) == -(-self.nbytes // LEAF) and all(
            len(leaf) == 32 for leaf in self.leaves
        )
        need(
            is_valid,
            f"{self.name}: a manifest of {len(self.leaves)} leaves does not describe {self.nbytes} bytes",
        )


POOL = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "leaves")


def each(work, numbers: range) -> list:
    """work(number) of each number, several at once: hashing and writing let other threads run."""
    if len(numbers) == 1:
        return [work(numbers[0])]
    return list(POOL.map(work, numbers))


def manifest(name: str, data) -> Manifest:
    """The manifest of an object, by one pass over its bytes."""
    view = memoryview(data)
    leaves = each(
        lambda start: hashlib.sha256(view[start : start + LEAF]).digest(), range(0, len(view), LEAF)
    )
    return Manifest(name, len(view), leaves)


def leaves(data, first: int, count: int) -> memoryview:
    """The bytes of `count` leaves from number `first` on. WireError if they lie outside the
    object."""
    view = memoryview(data)
    inside = 0 <= first * LEAF < len(view) and 1 <= count <= MOST_ASKED
    need(inside, f"leaves {first} to {first + count} of an object of {len(view)} bytes")
    return view[first * LEAF : (first + count) * LEAF]


class Window:
    """The asks in flight on one connection, IN_FLIGHT bytes at most.

    The other end answers in order, so an ask is lost when a later one was answered. All are lost
    when nothing has come for `patience` seconds, twice as long after each time."""

    def __init__(self, patience: float = 10.0):
        self.patience = patience
        self.asks: dict = {}  # key -> (bytes, whether it was asked before), in order
        self.in_flight = 0  # bytes
        self.heard = 0.0  # when something came last, or the first ask was made
        self.timeouts = 0  # since the last answer to a new ask

    @property
    def is_full(self) -> bool:
        return self.in_flight >= IN_FLIGHT

    def ask(self, key, nbytes: int, now: float, again: bool) -> None:
        """Note that these bytes were asked for."""
        if not self.asks:
            self.heard = now
        self.asks[key] = (nbytes, again)
        self.in_flight += nbytes

    def forget(self, key) -> None:
        self.in_flight -= self.asks.pop(key)[0]

    def answer(self, key, now: float) -> list:
        """Note that this ask was answered, and return the keys of those before it, which are
        lost."""
        self.heard = now
        if key not in self.asks:
            return []
        if not self.asks[key][
            1
        ]:  # an answer to one of two asks does not tell the time of an answer
            self.timeouts = 0
        lost = list(itertools.takewhile(lambda other: other != key, self.asks))
        for name in (*lost, key):
            self.forget(name)
        return lost

    def overdue(self, now: float) -> list:
        """The keys of all asks, if nothing has come for too long."""
        if not self.asks or now - self.heard <= self.patience * 2 ** min(self.timeouts, 6):
            return []
        self.timeouts += 1
        lost = list(self.asks)
        for key in lost:
            self.forget(key)
        return lost


class Pull:
    """An object on its way in.

    sink: takes slices of its bytes, a memoryview or a FileSink. window: of the connection, which
    other pulls may share. resume: check the bytes in the sink, and ask only for leaves that are not
    good."""

    def __init__(self, of: Manifest, sink, window: Window, resume: bool = False):
        self.of = of
        self.sink = sink
        self.window = window
        shards = [
            resume and self._is_good(i, sink[i * LEAF : (i + 1) * LEAF])
            for i in range(len(of.leaves))
        ]
        # the next one stands at the end
        self.missing = [i for i in reversed(range(len(of.leaves))) if not shards[i]]
        self.asked: dict[int, int] = {}  # first leaf -> how many
        self.repeated: set[int] = set()  # leaves that were asked for, and not answered
        self.corrupt = 0  # leaves that came and were not as the manifest says
        self.moved: float | None = None  # when the last good leaf came, or the first was asked for

    def _is_good(self, i: int, leaf) -> bool:
        return hashlib.sha256(leaf).digest() == self.of.leaves[i]

    @property
    def done(self) -> bool:
        return not self.missing and not self.asked

    def ask(self, now: float) -> tuple[int, int] | None:
        """The next range (first leaf, how many) to ask for. None: everything is asked for, or
        enough is in flight."""
        if self.moved is None:
            self.moved = now
        for pull, lost in self.window.overdue(now)[::-1]:
            pull._ask_again(lost)
        if not self.missing or self.window.is_full:
            return None
        first = self.missing.pop()
        count = 1
        while count < MOST_ASKED and self.missing and self.missing[-1] == first + count:
            self.missing.pop()
            count += 1
        self.asked[first] = count
        nbytes = min((first + count) * LEAF, self.of.nbytes) - first * LEAF
        self.window.ask((self, first), nbytes, now, first in self.repeated)
        return first, count

    def put(self, first: int, data, now: float) -> None:
        """Take an answer. One that was not asked for is dropped; leaves that are not as the
        manifest says are asked for again. OSError if the sink cannot be written: the leaves of this
        answer stay missing."""
        for pull, lost in self.window.answer((self, first), now)[::-1]:
            pull._ask_again(lost)
        if first not in self.asked:
            return
        asked = range(first, first + self.asked.pop(first))

        def write_if_good(i: int) -> bool:
            leaf = data[(i - first) * LEAF : (i - first + 1) * LEAF]
            if not self._is_good(i, leaf):
                return False
            self.sink[i * LEAF : i * LEAF + len(leaf)] = leaf
            return True

        try:
            good = each(write_if_good, asked)
        except OSError:  # a full disk
            self.missing += reversed(asked)
            raise
        bad = [i for i, ok in zip(asked, good, strict=True) if not ok]
        self.corrupt += len(bad)
        self.missing += reversed(bad)
        if len(bad) < len(asked):
            self.moved = now

    def _ask_again(self, first: int) -> None:
        again = range(first, first + self.asked.pop(first))
        self.repeated.update(again)
        self.missing += reversed(again)

    def forget_asked(self) -> None:
        """Nothing that was asked for will come: the connection is a new one, or the object is not
        wanted any more."""
        self.moved = None
        for first in sorted(self.asked, reverse=True):
            self.window.forget((self, first))
            self._ask_again(first)


class FileSink:
    """A file as a sink.

    It is written by calls: mapped pages cost three times as much, and a full disk would be a SIGBUS
    instead of an OSError."""

    def __init__(self, path, nbytes: int, resume: bool = False):
        self.file = open(path, "r+b" if resume else "w+b", buffering=0)  # noqa: SIM115 (closed by close)
        self.file.truncate(nbytes)

    def __getitem__(self, at: slice) -> bytes:
        return os.pread(self.file.fileno(), at.stop - at.start, at.start)

    def __setitem__(self, at: slice, data) -> None:
        written = os.pwrite(self.file.fileno(), data, at.start)
        if written != len(data):
            raise OSError(
                f"{self.file.name}: {written} of {len(data)} bytes written; is the disk full?"
            )

    def close(self) -> None:
        self.file.close()


class ReceivedWeights(NamedTuple):
    """A set of weights that is here whole. published: when, in seconds since the epoch, by the
    learner's clock."""

    version: int
    published: float
    path: Path


# ---------------------------------------------------------------------------------------------------------------------
# Messages
# ---------------------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Sampler: who it is. handed: groups handed over by this incarnation so far; lost: names of
    groups that it cannot send any more; sent: when, in seconds since the epoch by its clock."""

    sampler: Text
    incarnation: Number
    session: Text  # the learner's session that it knows, "" at first
    handed: Number = 0
    lost: Texts = []
    sent: Seconds = 0.0


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Learner: the work. setup: configuration and tokenizer files of the model (pack_setup); run:
    everything else that a sampler must know (source.py writes it)."""

    session: Text
    run: dict
    setup: dict[str, bytes]


class Refuse(msgspec.Struct, tag="refuse", frozen=True):
    """Learner: this sampler is turned away, for good."""

    why: Annotated[str, Meta(max_length=2000)]


class Step(msgspec.Struct, frozen=True):
    """A delta of weights (delta.py): from those with the root `base`, to those of the next step or
    of the offer."""

    base: Text
    of: Manifest


class Offer(msgspec.Struct, tag="offer", frozen=True):
    """Here is an object. version and published: of weights, the learner's updates behind them and
    its clock. deltas: a chain that leads to them."""

    of: Manifest
    version: Annotated[int, Meta(ge=-1, lt=10**18)] = -1
    published: Seconds = 0.0
    deltas: Annotated[list[Step], Meta(max_length=64)] = []


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Please send these leaves."""

    name: Text
    first: Number
    count: Number


class Leaves(msgspec.Struct, tag="leaves", frozen=True):
    """The answer; its bytes are the message's second frame."""

    name: Text
    first: Number


class Gone(msgspec.Struct, tag="gone", frozen=True):
    """The answer where the object is no longer there. With an empty name, the learner's answer to a
    sampler that has not said hello in this session."""

    name: Text


class Got(msgspec.Struct, tag="got", frozen=True):
    """Learner: these groups are here whole; no need to offer them again in this session. As the
    answer to a hello: newest is the name of the newest weights, sent that hello's time, and clock
    the learner's (clock.py)."""

    names: Texts
    newest: Text = ""
    sent: Seconds = 0.0
    clock: Seconds = 0.0


class Want(msgspec.Struct, tag="want", frozen=True):
    """Sampler: it knows of no offer of the newest weights; please repeat it."""


class Held(msgspec.Struct, tag="held", frozen=True):
    """Learner: these groups are in a checkpoint, or refused for good; the sampler may forget
    them."""

    names: Texts


Message = Hello | Welcome | Refuse | Offer | Ask | Leaves | Gone | Got | Want | Held
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def digest(body) -> bytes:
    return hashlib.blake2b(body, digest_size=8).digest()


def encode(message: Message) -> bytes:
    """A message behind its digest: one that is damaged on the way is dropped whole, and sent again
    in time."""
    body = _encoder.encode(message)
    return digest(body) + body


def decode(frame) -> Message:
    """The inverse of encode. WireError if the frame is damaged, or no message."""
    head, body = bytes(frame[:8]), frame[8:]
    need(digest(body) == head, "not a message, or a damaged one")
    try:
        return _decoder.decode(body)
    except (
        Exception
    ) as e:  # MsgspecError, but also UnicodeDecodeError, RecursionError and whatever else there is
        raise WireError(f"not a message of this revision: {printable(e)}") from None


def check_address(flag: str, address: str, least: int) -> None:
    """UserError unless it is one, and a TCP port lies in `least` to 65535; ZeroMQ takes 99999 for
    another one."""
    known = address.startswith(("tcp://", "ipc://", "inproc://"))
    flags.need(
        known and address.partition("://")[2],
        f"--{flag}={address}: not an address; write tcp://HOST:PORT",
    )
    if not address.startswith("tcp://"):
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if least == 0 and port == "*":  # any that is free
        return
    flags.need(
        port.isascii() and port.isdigit(), f"--{flag}={address}: no port; write tcp://HOST:PORT"
    )
    flags.need(host, f"--{flag}={address}: no host; write tcp://HOST:PORT")
    flags.need(
        least <= int(port[:6]) <= 65535,
        f"--{flag}={address}: a port is a number from {least} to 65535",
    )


def set_socket_options(socket, linger: int) -> None:
    """The same on both ends: messages and queues are bounded, and the kernel finds a dead
    connection within 25 s.

    ZeroMQ's own heartbeats end the whole process (libzmq 4.3.5, `!_io_error`) when a peer leaves
    while its queue is full. linger: milliseconds that messages not yet sent may delay the socket's
    end."""
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
    """Write the files that pack_setup packed. UserError: a file outside the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        if not re.fullmatch(SETUP_FILE, name):
            raise UserError(
                f"the learner sent a file called {printable(name, 100)!r}; it is not written"
            )
        (folder / name).write_bytes(zlib.decompress(data))
