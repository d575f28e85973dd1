"""The learner's end over ZeroMQ: one socket for all samplers. HeteroRL, section 4.2.

    torchrun train.py --samplers=tcp://*:5555 --keys=keys/learner

`Hub` is a thread of the first rank: samplers come and go, offer groups and fetch weights (wire.py
lists the messages). The training loop only reads its inbox (source.py), so no sampler can block
training. A malformed message is logged, counted and dropped. link.py is the sampler's end; files.py
has the same interface over a shared folder."""

from __future__ import annotations

import contextlib
import io
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import zmq

from machinery.flags import UserError
from remote import wire
from remote.account import Arrived, Intake, is_of, is_sampler
from remote.delta import Chain
from remote.groups import Limits
from remote.keys import refusal_of, secure
from remote.weights import mapped

# seconds without a chunk after which a requested group's room is released
UNANSWERED = 30.0
PULLS = 64  # most groups that are fetched from one sampler at the same time


@dataclass
class Peer:
    """A sampler's connection."""

    identity: bytes  # ZeroMQ's name for the connection
    key: str  # the sampler's public key; empty without encryption
    sampler: str
    incarnation: int
    pulls: dict[str, wire.Pull] = field(default_factory=dict)
    # the weights that the sampler is fetching, and when it last asked for them
    asked: tuple[str, float] = ("", -math.inf)


class Hub(threading.Thread, Intake):
    """The socket, the thread, and the account."""

    def __init__(
        self, bind: str, keys: str, welcome: wire.Welcome, limits: Limits, log
    ):
        threading.Thread.__init__(self, daemon=True, name="hub")
        Intake.__init__(self, limits, log)
        self.welcome = welcome
        self.arrived: deque[Arrived] = deque()  # the inbox
        self.todo: deque[Callable[[], None]] = deque()  # work from the training loop
        self.stopping = False
        self.peers: dict[bytes, Peer] = {}
        self.newest: wire.Offer | None = None
        # the weights and deltas that samplers may fetch
        self.objects: dict[str, bytes] = {}
        self.chain = Chain()
        self.context = zmq.Context()
        self.authenticator = None
        try:
            self._open_socket(bind, keys)
        except Exception:
            self._close_sockets()  # otherwise the process could wait for them forever
            raise
        # libzmq aborts the process if peers leave a socket that nothing reads
        self.start()

    def _open_socket(self, bind: str, keys: str) -> None:
        self.socket = self.context.socket(zmq.ROUTER)
        self.known: dict[str, str] = {}  # public key -> name
        if keys != "none":
            self.authenticator, self.known = secure(self.context, self.socket, keys)
        wire.set_socket_options(self.socket, linger=0)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as e:
            raise UserError(
                f"--samplers={bind}: {zmq.strerror(e.errno)}; name a free address of this host, such as tcp://*:5555"
            ) from None
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    # -- called by the training loop

    def broadcast(self, offer: wire.Offer, path: Path, change: bytes | None) -> None:
        self.todo.append(partial(self._publish, offer, mapped(path), change))

    def hold(self, names: list[str]) -> None:
        super().hold(names)
        self.todo.append(partial(self._report_held, names))

    def drain(self) -> list[Arrived]:
        return [self.arrived.popleft() for _ in range(len(self.arrived))]

    def close(self) -> None:
        self.stopping = True
        self.join(timeout=60)
        if not self.is_alive():
            self._close_sockets()

    def _close_sockets(self) -> None:
        if self.authenticator is not None:
            self.authenticator.stop()
        self.context.destroy(linger=0)

    # -- the thread

    def run(self) -> None:
        try:
            while not self.stopping:
                self.socket.poll(10)
                while self.todo:
                    self.todo.popleft()()
                self._receive()
                self._give_up_unanswered(time.monotonic())
        except Exception as e:
            self.broken = repr(e)
            raise
        finally:
            self.socket.close(linger=0)  # closed by the thread that uses it

    def _publish(self, offer: wire.Offer, data, change: bytes | None) -> None:
        """Offer new weights. Keep the previous weights and all that a sampler still fetches: a slow
        connection may need several broadcasts for its first copy."""
        self.chain.add(offer.of, change)
        deltas = [step for step, _ in self.chain.steps]
        self.newest = msgspec.structs.replace(offer, deltas=deltas)
        weights = [name for name in self.objects if name.endswith(".safetensors")]
        now = time.monotonic()
        asked = [peer.asked for peer in self.peers.values()]
        fetched = {name for name, when in asked if now - when < UNANSWERED}
        kept = {
            name: data
            for name, data in self.objects.items()
            if name in fetched.union(weights[-1:])
        }
        served = {step.of.name: delta for step, delta in self.chain.steps}
        self.objects = kept | served | {offer.of.name: data}
        for identity in self.peers:
            self._send(identity, self.newest)

    def _report_held(self, names: list[str]) -> None:
        for identity, peer in self.peers.items():
            if ours := [name for name in names if is_of(peer.sampler, name)]:
                self._send(identity, wire.Receipt(held=ours))

    def _receive(self) -> None:
        """Handle at most a thousand messages that have arrived."""
        for _ in range(1000):
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                if self.is_open:
                    self._handle(bytes(identity.buffer), frames)
            except wire.WireError as e:
                self.counts["malformed"] += 1
                self.log.warning("malformed message dropped: %s", e)
            except (
                Exception
            ) as e:  # a fault in this code: the run and all connections continue
                self.counts["faults"] += 1
                self.log.error("a fault in a message, which is dropped: %r", e)

    def _give_up_unanswered(self, now: float) -> None:
        """Release the room of requested groups without progress."""
        for peer in self.peers.values():
            for name, pull in list(peer.pulls.items()):
                if now - pull.moved > UNANSWERED:
                    self.log.info("sampler %s does not send %s", peer.sampler, name)
                    self._drop(peer, name)

    def _send(self, identity: bytes, message: wire.Message) -> None:
        # a peer that is gone will say hello again
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([identity, wire.encode(message)], zmq.NOBLOCK)

    # -- one method for each message

    def _handle(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        """Handle a message. WireError: it is not a message, or not allowed now."""
        wire.need(len(frames) == 1, f"a message of {len(frames)} parts")
        message = wire.decode(frames[0].buffer)
        try:
            key = frames[0].get("User-Id")
        except zmq.ZMQError:  # without encryption
            key = ""
        peer = self.peers.get(identity)
        if isinstance(message, wire.Hello):
            self._on_hello(identity, key, message)
        elif peer is not None and peer.key == key:  # others must introduce themselves
            match message:
                case wire.Offer():
                    self._on_offer(peer, message.of)
                case wire.Chunk():
                    self._on_chunk(peer, message)
                case wire.Ask():
                    self._on_ask(peer, message)

    def _on_hello(self, identity: bytes, key: str, hello: wire.Hello) -> None:
        refusal = self._refusal(hello, key)
        if refusal:
            self.log.warning("sampler %s is refused: %s", hello.sampler, refusal)
            self._send(identity, wire.Refuse(refusal))
            return
        peer = self.peers.get(identity)
        same = (
            peer
            and peer.sampler == hello.sampler
            and peer.incarnation == hello.incarnation
        )
        is_new = not same or hello.session != self.welcome.session
        if is_new:
            peer = self._let_in(identity, key, hello)
        self.report(hello.sampler, hello.incarnation, hello.handed)
        for name in hello.lost:
            if is_of(peer.sampler, name) and name not in self.got:
                if name in peer.pulls:
                    self._drop(peer, name)
                self._enter(Arrived(name, fate="lost"))
        # a new peer may have this version from before the learner's resume
        if self.newest and (is_new or hello.newest != self.newest.version):
            self._send(identity, self.newest)
        held = [name for name in hello.lost if name in self.held]
        # also shows that the learner is alive
        self._send(identity, wire.Receipt(held=held))

    def _refusal(self, hello: wire.Hello, key: str) -> str:
        """Why this sampler is rejected; empty if it is accepted."""
        if not is_sampler(hello.sampler):
            name = wire.printable(hello.sampler, 100)
            return (
                f"--name={name}: a sampler's name is 1 to 64 letters, digits, - and _"
            )
        if key and (refusal := refusal_of(hello.sampler, self.known[key])):
            return refusal
        for peer in self.peers.values():
            if peer.sampler == hello.sampler and peer.incarnation > hello.incarnation:
                return (
                    f"a newer sampler is also called {hello.sampler}: give each sampler a different --name; if there "
                    "is only this one, its clock was set back: correct it"
                )
        return ""

    def _let_in(self, identity: bytes, key: str, hello: wire.Hello) -> Peer:
        """Replace the earlier peers of this connection and of this sampler."""
        self.log.info(
            "sampler %s, incarnation %d, connected", hello.sampler, hello.incarnation
        )
        for old in list(self.peers.values()):
            if old.identity == identity or old.sampler == hello.sampler:
                for name in list(old.pulls):
                    self._drop(old, name)
                del self.peers[old.identity]
        self.peers[identity] = Peer(identity, key, hello.sampler, hello.incarnation)
        self._send(identity, self.welcome)
        return self.peers[identity]

    def _enter(self, arrived: Arrived) -> None:
        """Put a group, or its fate, into the inbox of the training loop."""
        self.got.add(arrived.name)
        self.arrived.append(arrived)

    def _on_offer(self, peer: Peer, of: wire.Manifest) -> None:
        """Ask for an offered group if there is room; if not, the sampler repeats its offer."""
        name = of.name
        wire.need(
            is_of(peer.sampler, name),
            f"{name} is not a group of sampler {peer.sampler}",
        )
        if name in self.got:
            self.counts["duplicate"] += 1
        elif of.nbytes > self.limits.nbytes:
            self.log.warning("offer refused: %s has %d bytes", name, of.nbytes)
            self._enter(Arrived(name, fate="refused"))
        else:
            is_new = name not in peer.pulls
            if is_new and len(peer.pulls) < PULLS and self.take_room(of.nbytes):
                peer.pulls[name] = wire.Pull(of, io.BytesIO())
            if name in peer.pulls:
                self._send(peer.identity, wire.Ask(name, peer.pulls[name].at))
            return
        self._send_receipt(peer, name)

    def _send_receipt(self, peer: Peer, name: str) -> None:
        held = [name] if name in self.held else []
        self._send(peer.identity, wire.Receipt([name], held))

    def _on_chunk(self, peer: Peer, chunk: wire.Chunk) -> None:
        pull = peer.pulls.get(chunk.name)
        try:
            if pull is None or not pull.put(chunk):
                return
        except wire.WireError:
            self._drop(peer, chunk.name)  # the sampler repeats its offer
            raise
        if not pull.done:
            self._send(peer.identity, wire.Ask(chunk.name, pull.at))
            return
        del peer.pulls[chunk.name]
        self.counts["received"] += 1
        self.counts["bytes_in"] += pull.of.nbytes
        self._enter(Arrived(chunk.name, pull.sink.getvalue()))
        self._send_receipt(peer, chunk.name)

    def _drop(self, peer: Peer, name: str) -> None:
        """Stop fetching a group that was asked for."""
        self.free(peer.pulls.pop(name).of.nbytes)

    def _on_ask(self, peer: Peer, ask: wire.Ask) -> None:
        data = self.objects.get(ask.name, b"")
        chunk = wire.chunk_of(data, ask)
        unfinished = ask.start + len(chunk.data) < len(data)
        peer.asked = ask.name if unfinished else "", time.monotonic()
        self.counts["bytes_out"] += len(chunk.data)
        self._send(peer.identity, chunk)
