"""Messages and objects that travel between learner and samplers. HeteroRL, section 4.2.

Groups of rollouts travel in one direction, weights in the other. The wire treats both as objects: a
name and some bytes. The owner of an object offers it by its manifest: name, size and SHA-256. The
receiver asks for one chunk after the other. A receiver without room does not ask, so memory is
bounded on both ends if no peer is hostile. Nothing is allocated before the manifest's size is
checked, and nothing is unpickled: messages are msgspec structs, groups are safetensors (groups.py).
Every message starts with its SHA-256. A damaged message is dropped, and the sampler repeats each
message that has no answer.

The messages between a sampler's Link (link.py) and the learner's Hub (hub.py):

    sampler -> learner                                learner -> sampler
    Hello    name; repeated as a sign of life         Welcome, once; then Receipt, as a sign of life; or Refuse
    Offer    of a group                               Ask for its next chunk; Receipt, when it has arrived whole,
    Chunk    the answer to Ask                        and when a checkpoint accounts for it
    Ask      for the next chunk of the weights        Offer of weights; Chunk, the answer to Ask
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
import zlib
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import zmq
from msgspec import Meta

from machinery import flags
from machinery.flags import UserError
from sampling import Sampling

CHUNK = 4 << 20  # bytes
MOST = 16 << 20  # most bytes of a message; ZeroMQ disconnects peers that send more
MOST_QUEUED = 512  # most messages that wait to be sent to one connection
MOST_WEIGHTS = 1 << 44  # bytes

# The maximum sizes in a message. decode checks them.
Text = Annotated[str, Meta(max_length=256)]  # names; each end has more rules for them
Texts = Annotated[list[Text], Meta(max_length=1 << 18)]
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


def with_digest(data: bytes) -> bytes:
    """The bytes of a message or a file, preceded by their SHA-256."""
    return hashlib.sha256(data).digest() + data


def verified(data):
    """The inverse of with_digest. Raise WireError if the bytes are damaged."""
    body = data[32:]
    need(hashlib.sha256(body).digest() == data[:32], "not a message, or a damaged one")
    return body


class Manifest(msgspec.Struct, frozen=True):
    """An object's name, size and SHA-256."""

    name: Text
    nbytes: Annotated[int, Meta(ge=1, lt=10**18)]
    digest: Text


def manifest(name: str, data) -> Manifest:
    return Manifest(name, len(data), hashlib.sha256(data).hexdigest())


class Pull:
    """An object that is being received, one chunk after the other, into `sink.write`."""

    def __init__(self, of: Manifest, sink):
        self.of = of
        self.sink = sink
        self.at = 0  # bytes received
        self.digest = hashlib.sha256()
        self.moved = time.monotonic()  # time of the last chunk

    @property
    def done(self) -> bool:
        return self.at == self.of.nbytes

    def put(self, chunk: Chunk) -> bool:
        """Write the next chunk. False: it is not the next chunk, but an earlier one repeated.

        WireError: the object is gone, or its bytes differ from the manifest. OSError: the disk is
        full."""
        if chunk.start != self.at:
            return False
        need(chunk.data, f"{self.of.name}: no longer there")
        need(
            self.at + len(chunk.data) <= self.of.nbytes,
            f"{self.of.name}: too many bytes",
        )
        self.sink.write(chunk.data)
        self.digest.update(chunk.data)
        self.at += len(chunk.data)
        self.moved = time.monotonic()
        same = not self.done or self.digest.hexdigest() == self.of.digest
        need(same, f"{self.of.name}: bytes that differ from its manifest")
        return True


class ReceivedWeights(NamedTuple):
    """A complete set of weights on this host. published: time in seconds since the epoch, by the
    learner's clock."""

    version: int
    published: float
    path: Path


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """From a sampler: its name. handed: number of groups handed over by this incarnation; lost:
    names of groups that it cannot send any more; newest: version of its newest weights."""

    sampler: Text
    incarnation: Number
    session: Text  # the session that the sampler knows, "" at first
    handed: Number = 0
    lost: Texts = []
    newest: Annotated[int, Meta(ge=-1, lt=10**18)] = -1


class Description(msgspec.Struct, frozen=True):
    """Everything that a sampler must know of a run, except the model's files (source.py)."""

    config: dict[str, str | int | float | bool | None]
    model: str
    topk: Number
    max_allowed: Number
    context: Number
    task_digest: str
    reward_digests: dict[str, str]  # FILE.py:NAME -> SHA-256 of the file
    sampling: Sampling
    probe: list[list[int]]
    packed: bool
    stop_ids: list[int]


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """From the learner: the description of the run. session: a new random name at each start of the
    learner; setup: configuration and tokenizer files of the model (pack_setup)."""

    session: Text
    run: Description
    setup: dict[str, bytes]


class Refuse(msgspec.Struct, tag="refuse", frozen=True):
    """From the learner: this sampler is rejected permanently."""

    why: Annotated[str, Meta(max_length=2000)]


class Step(msgspec.Struct, frozen=True):
    """A delta of weights (delta.py): from the weights with the digest `base` to the weights of the
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
    """A request for the bytes of an object from `start` on."""

    name: Text
    start: Number


class Chunk(msgspec.Struct, tag="chunk", frozen=True):
    """The answer to Ask. Without data: the object no longer exists."""

    name: Text
    start: Number
    data: bytes


class Receipt(msgspec.Struct, tag="receipt", frozen=True):
    """From the learner. got: groups that have arrived whole or were refused, and need no new offer
    in this session; held: groups whose fate is in a checkpoint: the sampler may delete them."""

    got: Texts = []
    held: Texts = []


Message = Hello | Welcome | Refuse | Offer | Ask | Chunk | Receipt
DECODER = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """A message after its digest."""
    return with_digest(msgspec.msgpack.encode(message))


def decode(frame) -> Message:
    """The inverse of encode. Raise WireError if the frame is damaged or is not a message."""
    body = verified(frame)
    try:
        return DECODER.decode(body)
    except Exception as e:  # RecursionError too, and others
        raise WireError(f"not a message of this revision: {printable(e)}") from None


def chunk_of(data, ask: Ask) -> Chunk:
    """The bytes that were asked for."""
    return Chunk(ask.name, ask.start, data[ask.start : ask.start + CHUNK])


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
    shutil.rmtree(folder, ignore_errors=True)  # files of an earlier run
    folder.mkdir(parents=True)
    for name, data in files.items():
        flags.need(
            re.fullmatch(SETUP_FILE, name),
            f"the learner sent a file called {printable(name, 100)!r}; it is not written",
        )
        try:
            (folder / name).write_bytes(zlib.decompress(data))
        except zlib.error:
            fault = f"the learner sent a damaged {name}; start this sampler again"
            raise UserError(fault) from None
