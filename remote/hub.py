"""The learner's end over ZeroMQ: one socket for all samplers of a rank. HeteroRL, section 4.2.

    torchrun train.py --samplers=tcp://*:5555 --keys=keys/learner     # rank r binds port 5555 + r

`Hub` is a thread: samplers come and go, offer groups and pull weights (wire.py lists the messages).
The training loop only reads its inbox (source.py), so no sampler can block training. A malformed
message is logged, counted and dropped. link.py is the sampler's end; files.py has the same
interface over a shared folder."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from machinery.flags import UserError
from remote import wire
from remote.account import VERSIONS, Arrived, Intake, is_of, is_stream, sampler_of
from remote.delta import Chain
from remote.groups import Limits
from remote.keys import refusal_of, secure
from remote.weights import manifest_of, mapped

SILENT = 60.0  # seconds of silence after which a sampler's room is released
# seconds without a good leaf after which the room of a requested group is released
UNANSWERED = 30.0
PULLS = 64  # most groups that are fetched from one sampler at the same time
OFFERS = 256  # most remembered offers of one sampler; a sampler has 64 open, and repeats them


@dataclass
class Peer:
    """A sampler's connection."""

    identity: bytes  # ZeroMQ's name for the connection
    key: str  # the sampler's public key; empty without encryption
    sampler: str
    incarnation: int
    heard: float  # time of its last message
    window: wire.Window = field(default_factory=wire.Window)
    offers: dict[str, wire.Manifest] = field(default_factory=dict)  # not asked for yet
    pulls: dict[str, wire.Pull] = field(default_factory=dict)


@dataclass
class Offered:
    """Weights that samplers may fetch."""

    offer: wire.Offer
    data: mmap.mmap
    deltas: dict[str, bytes]  # name -> delta of the offer's chain


class Hub(threading.Thread, Intake):
    """The socket, the thread, and the account of one rank. The training loop calls the first part
    of the methods."""

    def __init__(self, bind: str, keys: str, welcome: wire.Welcome, limits: Limits, log):
        threading.Thread.__init__(self, daemon=True, name="hub")
        Intake.__init__(self, limits.room, log)
        self.welcome = welcome
        self.limits = limits
        self.arrived: deque[Arrived] = deque()  # the inbox
        self.todo: deque[Offered | wire.Held] = deque()  # messages from the training loop
        self.stopping = False
        self.peers: dict[bytes, Peer] = {}
        self.weights: dict[str, Offered] = {}  # in order of publication
        self.chain = Chain()
        self.context = zmq.Context()
        self.authenticator = None
        try:
            self._open_socket(bind, keys)
        except Exception:
            self._close_sockets()  # otherwise the process could wait for them forever
            raise
        self.start()  # libzmq aborts the process if peers leave a socket that nothing reads

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

    def broadcast(
        self, version: int, path: Path, published: float, change: bytes | None = None
    ) -> None:
        """Offer these weights to all samplers. change: the delta from the previous weights, if
        there is one."""
        of, data = manifest_of(path), mapped(path)
        self.chain.add(of, change)
        offer = wire.Offer(of, version, published, [step for step, _ in self.chain.steps])
        self.todo.append(
            Offered(offer, data, {step.of.name: delta for step, delta in self.chain.steps})
        )

    def held(self, names: list[str]) -> None:
        """Report that a checkpoint accounts for these groups: their samplers may delete them."""
        self.todo.append(wire.Held(names))

    def drain(self) -> list[Arrived]:
        """The groups that have arrived since the last call, in order of arrival."""
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
                self._send_todo()
                self._receive()
                self._give_up_silent(time.monotonic())
                self._ask(time.monotonic())
        except Exception as e:
            self.broken = repr(e)
            raise
        finally:
            self.socket.close(linger=0)  # closed by the thread that uses it

    def _send_todo(self) -> None:
        while self.todo:
            match self.todo.popleft():
                case wire.Held() as held:
                    self._send_held(held.names)
                case Offered() as published:
                    self.weights[published.offer.of.name] = published
                    for old in list(self.weights)[:-VERSIONS]:
                        del self.weights[old]
                    for identity in self.peers:
                        self._send(identity, published.offer)

    def _send_held(self, names: list[str]) -> None:
        by_sampler: dict[str, list[str]] = {}
        for name in names:
            self.held_names.add(name)
            by_sampler.setdefault(sampler_of(name), []).append(name)
        for identity, peer in self.peers.items():
            if peer.sampler in by_sampler:
                self._send(identity, wire.Held(by_sampler[peer.sampler]))

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
            except Exception as e:  # a fault in this code: the run and all connections continue
                self.counts["faults"] += 1
                self.log.error("a fault in a message, which is dropped: %r", e)

    def _give_up_silent(self, now: float) -> None:
        """Release the room of silent samplers, and of requested groups without progress."""
        for identity, peer in list(self.peers.items()):
            if now - peer.heard > SILENT:
                self.log.info(
                    "sampler %s sends nothing: the requested groups are given up", peer.sampler
                )
                self._drop_all(self.peers.pop(identity))
                continue
            for name, pull in list(peer.pulls.items()):
                if pull.moved is not None and now - pull.moved > UNANSWERED:
                    self.log.info(
                        "sampler %s does not send the groups it offered: %s is given up",
                        peer.sampler,
                        name,
                    )
                    self._drop(peer, name)

    def _ask(self, now: float) -> None:
        """Ask for offered groups while there is room."""
        for peer in self.peers.values():
            for name, pull in peer.pulls.items():
                self._ask_for(peer, name, pull, now)
            while peer.offers and len(peer.pulls) < PULLS and not peer.window.is_full:
                name, of = next(iter(peer.offers.items()))
                if not self.take_room(of.nbytes):
                    break
                del peer.offers[name]
                peer.pulls[name] = wire.Pull(of, memoryview(bytearray(of.nbytes)), peer.window)
                self._ask_for(peer, name, peer.pulls[name], now)

    def _ask_for(self, peer: Peer, name: str, pull: wire.Pull, now: float) -> None:
        while (leaves := pull.ask(now)) is not None:
            self._send(peer.identity, wire.Ask(name, *leaves))

    def _send(self, identity: bytes, message: wire.Message, payload=None) -> None:
        frames = [identity, wire.encode(message)]
        if payload is not None:
            frames.append(payload)
        with contextlib.suppress(zmq.ZMQError):  # a peer that is gone will say hello again
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=payload is None)

    # -- one method for each message

    def _handle(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        """Handle a message. WireError: it is not a message, or not allowed now."""
        wire.need(1 <= len(frames) <= 2, f"a message of {len(frames)} parts")
        message = wire.decode(frames[0].buffer)
        try:
            key = frames[0].get("User-Id")
        except zmq.ZMQError:  # without encryption
            key = ""
        if isinstance(message, wire.Hello):
            self._on_hello(identity, key, message)
            return
        peer = self.peers.get(identity)
        if peer is None or peer.key != key:  # it must introduce itself
            self._send(identity, wire.Gone(""))
            return
        peer.heard = time.monotonic()
        match message:
            case wire.Offer():
                self._on_offer(peer, message.of)
            case wire.Leaves() if len(frames) == 2:
                self._on_leaves(peer, message, frames[1].buffer)
            case wire.Ask():
                self._on_ask(peer, message)
            case wire.Gone() if message.name in peer.pulls:
                self._drop(peer, message.name)

    def _on_hello(self, identity: bytes, key: str, hello: wire.Hello) -> None:
        refusal = self._refusal(hello, key)
        if refusal:
            self.log.warning(
                "sampler %s is refused: %s", wire.printable(hello.sampler, 100), refusal
            )
            self._send(identity, wire.Refuse(refusal))
            return
        peer = self.peers.get(identity)
        same = peer is not None and (peer.sampler, peer.incarnation) == (
            hello.sampler,
            hello.incarnation,
        )
        if not same or hello.session != self.welcome.session:
            peer = self._let_in(identity, key, hello)
        elif hello.newest != next(reversed(self.weights), ""):
            self._send_newest(identity)
        peer.heard = time.monotonic()
        self.report((hello.sampler, hello.incarnation), hello.handed)
        for name in hello.lost:
            if is_of(peer.sampler, name):
                self._on_lost(peer, name)
        self._send(identity, wire.Got([]))  # the answer shows that the learner is alive

    def _refusal(self, hello: wire.Hello, key: str) -> str:
        """Why this sampler is rejected; empty if it is accepted."""
        if not is_stream(hello.sampler):
            name = wire.printable(hello.sampler, 100)
            return f"--name={name}: a sampler's name is 1 to 64 letters, digits, - and _"
        if key and (refusal := refusal_of(hello.sampler, self.known[key])):
            return refusal
        same_name = [peer for peer in self.peers.values() if peer.sampler == hello.sampler]
        if any(peer.incarnation > hello.incarnation for peer in same_name):
            return f"a newer sampler is also called {hello.sampler}: give each sampler a different --name"
        return ""

    def _let_in(self, identity: bytes, key: str, hello: wire.Hello) -> Peer:
        self.log.info("sampler %s, incarnation %d, connected", hello.sampler, hello.incarnation)
        peer = Peer(identity, key, hello.sampler, hello.incarnation, heard=time.monotonic())
        if identity in self.peers and self.peers[identity].sampler != hello.sampler:  # a new name
            self._drop_all(self.peers.pop(identity))
        # Pulls of an older connection or process of the same sampler continue here from their last
        # good leaf.
        for old in [other for other in self.peers.values() if other.sampler == hello.sampler]:
            peer.pulls |= self.peers.pop(old.identity).pulls
        for pull in peer.pulls.values():
            pull.forget_asked()
            pull.window = peer.window
        self.peers[identity] = peer
        self._send(identity, self.welcome)
        self._send_newest(identity)
        return peer

    def _send_newest(self, identity: bytes) -> None:
        if self.weights:
            self._send(identity, next(reversed(self.weights.values())).offer)

    def _on_lost(self, peer: Peer, name: str) -> None:
        """Record that the sampler cannot send this group any more."""
        if self.held_names.has(name):
            self._send(peer.identity, wire.Held([name]))
        elif not self.got.has(name):
            peer.offers.pop(name, None)
            if name in peer.pulls:
                self._drop(peer, name)
            self._enter(Arrived(name, time.time(), fate="lost"))

    def _enter(self, arrived: Arrived) -> None:
        """Put a group, or its fate, into the inbox of the training loop."""
        self.got.add(arrived.name)
        self.arrived.append(arrived)

    def _on_offer(self, peer: Peer, of: wire.Manifest) -> None:
        wire.need(
            is_of(peer.sampler, of.name),
            f"{wire.printable(of.name, 100)} is not a group of sampler {peer.sampler}",
        )
        if self.got.has(of.name):
            self.counts["duplicate"] += 1
            answer = wire.Held if self.held_names.has(of.name) else wire.Got
            self._send(peer.identity, answer([of.name]))
            return
        try:
            of.check(self.limits.nbytes)
        except wire.WireError as e:
            self.log.warning("offer refused: %s", e)
            self._enter(Arrived(of.name, time.time(), fate="refused"))
            self._send(peer.identity, wire.Got([of.name]))
            return
        if of.name not in peer.pulls and len(peer.offers) < OFFERS:
            peer.offers[of.name] = of

    def _on_leaves(self, peer: Peer, message: wire.Leaves, data) -> None:
        pull = peer.pulls.get(message.name)
        if pull is None:
            return
        corrupt_before = pull.corrupt
        pull.put(message.first, data, peer.heard)
        self.counts["bad_leaves"] += pull.corrupt - corrupt_before
        if pull.done:
            del peer.pulls[message.name]
            self.counts["received"] += 1
            self.counts["bytes_in"] += pull.of.nbytes
            self._enter(Arrived(message.name, time.time(), data=bytes(pull.sink)))
            self._send(peer.identity, wire.Got([message.name]))

    def _drop(self, peer: Peer, name: str) -> None:
        """Stop fetching a group that was asked for."""
        pull = peer.pulls.pop(name)
        pull.forget_asked()
        self.free(pull.of.nbytes)

    def _drop_all(self, peer: Peer) -> None:
        for name in list(peer.pulls):
            self._drop(peer, name)

    def _on_ask(self, peer: Peer, ask: wire.Ask) -> None:
        data = self._object(ask.name)
        if data is None:
            self._send(peer.identity, wire.Gone(ask.name))
            return
        part = wire.leaves(data, ask.first, ask.count)
        self.counts["bytes_out"] += len(part)
        self._send(peer.identity, wire.Leaves(ask.name, ask.first), part)

    def _object(self, name: str) -> mmap.mmap | bytes | None:
        """The weights or the delta with this name that samplers may fetch; None if there are
        none."""
        for published in self.weights.values():
            if published.offer.of.name == name:
                return published.data
            if name in published.deltas:
                return published.deltas[name]
        return None
