"""The learner's end of the wire: one ZeroMQ socket for all samplers of a rank. HeteroRL, section 4.2.

    torchrun train.py --samplers=zmq --bind=tcp://*:5555 --keys=keys/learner     # rank r binds port 5555 + r

`Hub` is a thread: samplers come and go, offer groups and pull weights (wire.py says in which messages). The training
loop only ever looks into its inbox (source.py), so no sampler can hold it up. link.py is the sampler's end; files.py
has the same face over a shared folder.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from flags import UserError
from remote import wire
from remote.account import VERSIONS, Account, Arrived, sampler_of, split
from remote.groups import Limits
from remote.keys import secure

SILENT = 60.0  # seconds after which a sampler that says nothing gives its room back
PULLS = 8  # groups that are fetched from one sampler at the same time


@dataclass
class Peer:
    """A sampler's connection."""

    identity: bytes  # ZeroMQ's name for it
    sampler: str
    incarnation: int
    heard: float  # when it said something last
    pace: wire.Pace = field(default_factory=wire.Pace)
    offers: dict[str, wire.Manifest] = field(default_factory=dict)  # not asked for yet
    pulls: dict[str, wire.Pull] = field(default_factory=dict)

    def owns(self, name: str) -> bool:
        """Whether this may be the name of one of its groups."""
        try:
            (sampler, _), n = split(name)
        except ValueError:
            return False
        return sampler == self.sampler and n >= 0


@dataclass
class Published:
    """Weights that samplers may fetch."""

    offer: wire.Offer
    data: mmap.mmap


class Hub(threading.Thread):
    """One socket for all samplers of a rank. The first methods are for the training loop, all others for the thread.

    counts: what came, by kind; reports: groups that each (sampler, incarnation) says it has handed over; broken: why
    the thread has died."""

    def __init__(self, bind: str, keys: str, welcome: wire.Welcome, limits: Limits, log):
        super().__init__(daemon=True, name="hub")
        self.welcome = welcome
        self.limits = limits
        self.log = log
        self.lock = threading.Lock()  # over the inbox and its size
        self.arrived: deque[Arrived] = deque()  # the inbox
        self.size = 0  # bytes of groups held or asked for
        self.todo: deque[Published | wire.Held] = deque()  # what the training loop wants sent
        self.stopping = False
        self.broken = ""
        self.counts: Counter = Counter()
        self.reports: dict[tuple[str, int], int] = {}
        self.got = Account()  # groups that are here, or that are known not to come
        self.held_before = Account()  # groups that a checkpoint accounts for
        self.peers: dict[bytes, Peer] = {}
        self.weights: dict[str, Published] = {}  # the newest stands last
        self._open_socket(bind, keys)

    def _open_socket(self, bind: str, keys: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.authenticator = None if keys == "none" else secure(self.context, self.socket, keys, self.log)
        wire.set_socket_options(self.socket, linger=0)
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as e:
            raise UserError(
                f"--bind={bind}: {zmq.strerror(e.errno)}; name a free address of this host, such as tcp://*:5555"
            ) from None
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.events = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_DISCONNECTED
        )

    # -- called by the training loop -----------------------------------------------------------------------------------

    def open(self, held: Account) -> None:
        """Let samplers in. held: what the checkpoint accounts for."""
        self.held_before = held
        self.start()

    def broadcast(self, version: int, path: Path, published: float) -> None:
        """Offer these weights to all samplers."""
        with open(path, "rb") as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        offer = wire.Offer(wire.manifest(path.name, data), version, published)
        self.todo.append(Published(offer, data))

    def held(self, names: list[str]) -> None:
        """A checkpoint accounts for these groups: their samplers may forget them."""
        self.todo.append(wire.Held(names))

    def drain(self) -> list[Arrived]:
        """What has come since the last call, in order of arrival."""
        with self.lock:
            out = list(self.arrived)
            self.arrived.clear()
        return out

    def free(self, nbytes: int) -> None:
        """The training loop is done with a group of so many bytes: there is room again."""
        with self.lock:
            self.size -= nbytes

    def close(self) -> None:
        self.stopping = True
        if self.is_alive():
            self.join(timeout=60)
        if self.authenticator is not None:
            self.authenticator.stop()
        if not self.is_alive():
            self.context.destroy(linger=0)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        try:
            while not self.stopping:
                poller.poll(10)
                self._send_todo()
                self._log_connections()
                self._receive()
                now = time.monotonic()
                self._give_up_silent(now)
                self._ask(now)
        except Exception as e:
            self.broken = repr(e)
            raise
        finally:  # sockets are closed by the thread that uses them
            self.socket.disable_monitor()
            self.events.close(linger=0)
            self.socket.close(linger=0)

    def _send_todo(self) -> None:
        while self.todo:
            match self.todo.popleft():
                case wire.Held() as held:
                    self._send_held(held.names)
                case Published() as published:
                    self.weights[published.offer.of.name] = published
                    for old in list(self.weights)[:-VERSIONS]:
                        del self.weights[old]
                    for identity in self.peers:
                        self._send(identity, published.offer)

    def _send_held(self, names: list[str]) -> None:
        by_sampler: dict[str, list[str]] = {}
        for name in names:
            self.held_before.add(name)
            by_sampler.setdefault(sampler_of(name), []).append(name)
        for identity, peer in self.peers.items():
            if peer.sampler in by_sampler:
                self._send(identity, wire.Held(by_sampler[peer.sampler]))

    def _log_connections(self) -> None:
        while self.events.poll(0):
            if recv_monitor_message(self.events)["event"] == zmq.EVENT_DISCONNECTED:
                self.log.info("a connection is gone: its sampler left, or sent more at once than %d bytes", wire.MOST)
            else:
                self.counts["strangers"] += 1
                self.log.warning("a handshake failed: no key, a wrong one, or not a sampler")

    def _receive(self) -> None:
        """Handle what has come, but not for ever."""
        for _ in range(1000):
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._handle(bytes(identity.buffer), frames)

    def _give_up_silent(self, now: float) -> None:
        """A sampler that says nothing any more gives its room back."""
        for identity, peer in list(self.peers.items()):
            if now - peer.heard > SILENT:
                self.log.info("sampler %s says nothing: what it was asked for is given up", peer.sampler)
                for name in list(peer.pulls):
                    self._drop(peer, name)
                del self.peers[identity]

    def _ask(self, now: float) -> None:
        """Ask for what is offered, as far as there is room."""
        for identity, peer in self.peers.items():
            while peer.offers and len(peer.pulls) < PULLS:
                name, of = next(iter(peer.offers.items()))
                with self.lock:
                    if self.size and self.size + of.nbytes > self.limits.room:
                        break
                    self.size += of.nbytes
                del peer.offers[name]
                peer.pulls[name] = wire.Pull(of, memoryview(bytearray(of.nbytes)), peer.pace)
            for name, pull in peer.pulls.items():
                while (leaves := pull.ask(now)) is not None:
                    self._send(identity, wire.Ask(name, *leaves))

    def _send(self, identity: bytes, message: wire.Message, payload=None) -> None:
        frames = [identity, wire.encode(message)]
        if payload is not None:
            frames.append(payload)
        with contextlib.suppress(zmq.ZMQError):  # a peer that is gone or does not read: it will say hello again
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=payload is None)

    # -- one method for each message -----------------------------------------------------------------------------------

    def _handle(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        try:
            message = wire.decode(frames[0].buffer if frames else b"")
        except wire.WireError as e:
            self.counts["malformed"] += 1
            self.log.warning("malformed message dropped: %s", e)
            return
        if isinstance(message, wire.Hello):
            self._on_hello(identity, message)
            return
        peer = self.peers.get(identity)
        if peer is None:  # a sampler of an earlier session: it must say who it is
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
            case wire.Want():
                self._send_newest(peer)
            case wire.Gone() if message.name in peer.pulls:
                self._drop(peer, message.name)

    def _on_hello(self, identity: bytes, hello: wire.Hello) -> None:
        refusal = self._refusal(hello)
        if refusal:
            self._send(identity, wire.Refuse(refusal))
            return
        if identity not in self.peers or hello.session != self.welcome.session:
            self._let_in(identity, hello)
        peer = self.peers[identity]
        peer.heard = time.monotonic()
        key = (hello.sampler, hello.incarnation)
        self.reports[key] = max(self.reports.get(key, 0), hello.handed)
        for name in filter(peer.owns, hello.lost):
            self._on_lost(peer, name)
        newest = next(reversed(self.weights), "")
        self._send(identity, wire.Got([], newest))  # an answer: the learner is alive

    def _refusal(self, hello: wire.Hello) -> str:
        """Why this sampler is turned away; empty if it may come in."""
        mismatch = wire.protocol_mismatch(learner=wire.PROTOCOL, sampler=hello.protocol)
        if mismatch:
            self.log.warning("sampler %s refused: it speaks protocol %d", hello.sampler, hello.protocol)
            return mismatch
        if "/" in hello.sampler or not hello.sampler:
            return f"--name={hello.sampler}: a sampler's name is not empty and has no slash"
        same_name = [peer for peer in self.peers.values() if peer.sampler == hello.sampler]
        if any(peer.incarnation > hello.incarnation for peer in same_name):
            self.log.warning(
                "sampler %s, incarnation %d, refused: another of that name came later",
                hello.sampler,
                hello.incarnation,
            )
            return f"another sampler called {hello.sampler} came later: give each a --name and keys of its own"
        return ""

    def _let_in(self, identity: bytes, hello: wire.Hello) -> None:
        self.log.info("sampler %s, incarnation %d, is here", hello.sampler, hello.incarnation)
        peer = Peer(identity, hello.sampler, hello.incarnation, heard=time.monotonic())
        # On a new connection, or from a new process, what the old one was asked for goes on from its last good leaf.
        for old in [other for other in self.peers.values() if other.sampler == hello.sampler]:
            peer.pulls |= self.peers.pop(old.identity).pulls
        for pull in peer.pulls.values():
            pull.pace = peer.pace
            pull.forget_asked()
        self.peers[identity] = peer
        self._send(identity, self.welcome)
        self._send_newest(peer)

    def _send_newest(self, peer: Peer) -> None:
        if self.weights:
            newest = next(reversed(self.weights.values()))
            self._send(peer.identity, newest.offer)

    def _on_lost(self, peer: Peer, name: str) -> None:
        """The sampler cannot send this group any more."""
        if self.held_before.has(name):
            self._send(peer.identity, wire.Held([name]))
        elif not self.got.has(name):
            peer.offers.pop(name, None)
            if name in peer.pulls:
                self._drop(peer, name)
            self._book(name, "lost")

    def _book(self, name: str, fate: str) -> None:
        """Hand over the fate of a group that will not come, so that a checkpoint says so."""
        self.got.add(name)
        with self.lock:
            self.arrived.append(Arrived(name, time.time(), fate=fate))

    def _on_offer(self, peer: Peer, of: wire.Manifest) -> None:
        if not peer.owns(of.name):
            self.counts["malformed"] += 1
            self.log.warning("offer refused: %s is no group of sampler %s", of.name, peer.sampler)
        elif self.held_before.has(of.name) or self.got.has(of.name):
            self.counts["duplicate"] += 1
            self.log.info("%s is offered again", of.name)
            answer = wire.Held if self.held_before.has(of.name) else wire.Got
            self._send(peer.identity, answer([of.name]))
        else:
            self._on_new_offer(peer, of)

    def _on_new_offer(self, peer: Peer, of: wire.Manifest) -> None:
        try:
            of.check(self.limits.nbytes)
        except wire.WireError as e:
            self.log.warning("offer refused: %s", e)
            self._book(of.name, "refused")
            self._send(peer.identity, wire.Got([of.name]))
            return
        if of.name not in peer.pulls:
            peer.offers[of.name] = of

    def _on_leaves(self, peer: Peer, message: wire.Leaves, data) -> None:
        pull = peer.pulls.get(message.name)
        if pull is None:
            return
        corrupt_before = pull.corrupt
        pull.put(message.first, data, peer.heard)
        self.counts["bad_leaves"] += pull.corrupt - corrupt_before
        if pull.done:
            self._on_whole_group(peer, message.name)

    def _on_whole_group(self, peer: Peer, name: str) -> None:
        pull = peer.pulls.pop(name)
        self.got.add(name)
        self.counts["received"] += 1
        self.counts["bytes_in"] += pull.of.nbytes
        with self.lock:
            self.arrived.append(Arrived(name, time.time(), data=bytes(pull.sink)))
        self._send(peer.identity, wire.Got([name]))

    def _drop(self, peer: Peer, name: str) -> None:
        """Give up a group that was asked for."""
        with self.lock:
            self.size -= peer.pulls.pop(name).of.nbytes

    def _on_ask(self, peer: Peer, ask: wire.Ask) -> None:
        if ask.name not in self.weights:
            self._send(peer.identity, wire.Gone(ask.name))
            return
        try:
            part = wire.leaves(self.weights[ask.name].data, ask.first, ask.count)
        except wire.WireError as e:
            self.log.warning("ask refused: %s", e)
            return
        self.counts["bytes_out"] += len(part)
        self._send(peer.identity, wire.Leaves(ask.name, ask.first), part)
