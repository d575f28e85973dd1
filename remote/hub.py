"""The learner's end of remote samplers: HeteroRL, section 4.2. sampler.py and link.py are the other end.

    torchrun train.py --samplers=zmq --bind=tcp://*:5555 --keys=keys/learner            # each rank binds a port of its own: 5555, 5556, ...
    torchrun train.py --samplers=files --sync_path=/shared/run                          # the same over a shared folder

`Hub` is a thread with one ZeroMQ ROUTER socket: samplers come and go, offer groups and pull weights (wire.py); the training loop only ever looks
into its inbox (remote.py), so no sampler can hold it up. files.py has the same face over a folder.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

from remote import wire
from remote.account import Account, split
from remote.keys import secure

ROOM = 256 << 20  # bytes of groups that a rank holds or has asked for
KEPT_VERSIONS = 2  # a sampler in the middle of the one before the newest may finish it
SILENT = 60.0  # seconds after which a sampler that says nothing gives its room back


def retain(path: Path, kept: list[Path]) -> list[Path]:
    """The weights published last, `path` among them; all others of its folder are deleted, those of an undone history too, whatever their numbers."""
    kept = [*(p for p in kept if p != path), path][-KEPT_VERSIONS:]
    for old in path.parent.glob("v*.safetensors"):
        if old not in kept:
            old.unlink()
    return kept


def log_path(run, rank: int) -> Path:
    return Path(run) / ("remote.log" if rank == 0 else f"remote{rank}.log")


def logger(run: Path, rank: int) -> logging.Logger:
    """Who came, who was turned away and why."""
    log = logging.getLogger(f"remote.{run}.{rank}")
    if not log.handlers:
        handler = logging.FileHandler(log_path(run, rank))
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    return log


# ---------------------------------------------------------------------------------------------------------------------
# ZeroMQ
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Peer:
    """A sampler's connection."""

    sampler: str
    incarnation: int
    pace: wire.Pace = field(default_factory=wire.Pace)
    offers: dict = field(default_factory=dict)  # name -> manifest, not asked for yet
    pulls: dict = field(default_factory=dict)  # name -> Pull
    seen: float = 0.0

    def owns(self, name: str) -> bool:
        """Whether this may be the name of one of its groups."""
        try:
            (sampler, _), n = split(name)
        except ValueError:
            return False
        return sampler == self.sampler and n >= 0


class Hub(threading.Thread):
    """One socket for all samplers of a rank. `arrived` is its inbox: (name, bytes or the column of a group that will not come, when)."""

    def __init__(self, bind: str, keys: str, welcome: wire.Welcome, limits: wire.Limits, log, room: int = ROOM):
        import zmq

        super().__init__(daemon=True, name="hub")
        self.welcome, self.limits, self.log, self.room = welcome, limits, log, room
        self.lock, self.stopping, self.broken = threading.Lock(), False, ""
        self.arrived, self.size = deque(), 0  # the inbox; bytes held or asked for
        self.counts, self.reports = Counter(), {}  # (sampler, incarnation) -> groups handed over
        self.got, self.held_before = Account(), Account()
        self.peers: dict[bytes, Peer] = {}
        self.weights: dict[str, tuple[wire.Offer, mmap.mmap]] = {}
        self.todo: deque = deque()
        self.context, self.auth = zmq.Context(), None
        self.socket = self.context.socket(zmq.ROUTER)
        if keys != "none":
            self.auth = secure(self.context, self.socket, keys, log)
        for option, value in (
            (zmq.MAXMSGSIZE, wire.MOST),
            (zmq.SNDHWM, 64),
            (zmq.RCVHWM, 64),
            (zmq.LINGER, 0),
            (zmq.HEARTBEAT_IVL, 2000),
            (zmq.HEARTBEAT_TIMEOUT, 10000),
        ):
            self.socket.setsockopt(option, value)
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as e:
            raise ValueError(
                f"--bind={bind}: {zmq.strerror(e.errno)}; name a free address of this host, such as tcp://*:5555"
            ) from None
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.events = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_DISCONNECTED
        )

    # -- called by the training loop

    def open(self, held: Account) -> None:
        """Let samplers in. held: what the checkpoint accounts for."""
        self.held_before = held
        self.start()

    def broadcast(self, version: int, path: Path, published: float) -> None:
        with open(path, "rb") as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        self.todo.append((wire.Offer(wire.manifest(path.name, data), version, published), data))

    def held(self, names: list[str]) -> None:
        self.todo.append(wire.Held(names))

    def take(self) -> list[tuple[str, bytes | str, float]]:
        with self.lock:
            out = list(self.arrived)
            self.arrived.clear()
        return out

    def free(self, nbytes: int) -> None:
        """A group that was taken is gone: there is room again."""
        with self.lock:
            self.size -= nbytes

    def close(self) -> None:
        self.stopping = True
        if self.is_alive():
            self.join(timeout=60)
        if self.auth is not None:
            self.auth.stop()
        if not self.is_alive():
            self.context.destroy(linger=0)

    # -- the thread

    def run(self) -> None:
        try:
            self._run()
        except Exception as e:
            self.broken = repr(e)
            raise
        finally:  # sockets are closed by the thread that uses them
            self.socket.disable_monitor()
            self.events.close(linger=0)
            self.socket.close(linger=0)

    def _run(self) -> None:
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        while not self.stopping:
            poller.poll(10)
            self._errands()
            while self.events.poll(0):
                if recv_monitor_message(self.events)["event"] == zmq.EVENT_DISCONNECTED:
                    self.log.info(
                        "a connection is gone: its sampler left, or sent more at once than %d bytes", wire.MOST
                    )
                else:
                    self.counts["strangers"] += 1
                    self.log.warning("a handshake failed: no key, a wrong one, or not a sampler")
            for _ in range(1000):
                try:
                    identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._handle(bytes(identity.buffer), frames)
            now = time.monotonic()
            for identity, peer in list(self.peers.items()):
                if now - peer.seen > SILENT:
                    self.log.info("sampler %s says nothing: what it was asked for is given up", peer.sampler)
                    for name in list(peer.pulls):
                        self._drop(peer, name)
                    del self.peers[identity]
            self._ask(now)

    def _errands(self) -> None:
        while self.todo:
            errand = self.todo.popleft()
            if isinstance(errand, wire.Held):
                by_sampler: dict = {}
                for name in errand.names:
                    self.held_before.add(name)
                    by_sampler.setdefault(split(name)[0][0], []).append(name)
                for identity, peer in self.peers.items():
                    if peer.sampler in by_sampler:
                        self._send(identity, wire.Held(by_sampler[peer.sampler]))
            else:
                offer, data = errand
                self.weights[offer.of.name] = (offer, data)
                for old in list(self.weights)[:-KEPT_VERSIONS]:
                    del self.weights[old]
                for identity in self.peers:
                    self._send(identity, offer)

    def _send(self, identity: bytes, message, payload=None) -> None:
        import zmq

        frames = [identity, wire.encode(message)] + ([payload] if payload is not None else [])
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=payload is None)
        except zmq.ZMQError:  # a peer that is gone or does not read: it will say hello again
            pass

    def _handle(self, identity: bytes, frames) -> None:
        try:
            message = wire.decode(frames[0].buffer if frames else b"")
        except wire.WireError as e:
            self.counts["malformed"] += 1
            self.log.warning("malformed message dropped: %s", e)
            return
        if isinstance(message, wire.Hello):
            return self._hello(identity, message)
        peer = self.peers.get(identity)
        if peer is None:  # a sampler of an earlier session: it must say who it is
            return self._send(identity, wire.Gone(""))
        peer.seen = time.monotonic()
        if isinstance(message, wire.Offer):
            self._offer(identity, peer, message.of)
        elif isinstance(message, wire.Leaves) and message.name in peer.pulls and len(frames) == 2:
            pull = peer.pulls[message.name]
            bad = pull.corrupt
            pull.put(message.first, frames[1].buffer, peer.seen)
            self.counts["bad_leaves"] += pull.corrupt - bad
            if pull.done:
                self._whole(identity, peer, message.name)
        elif isinstance(message, wire.Ask):
            self._serve(identity, message)
        elif isinstance(message, wire.Needs) and self.weights:
            self._send(identity, list(self.weights.values())[-1][0])
        elif isinstance(message, wire.Gone) and message.name in peer.pulls:
            self._drop(peer, message.name)

    def _hello(self, identity: bytes, m: wire.Hello) -> None:
        if m.protocol != wire.PROTOCOL:
            self.log.warning("sampler %s refused: it speaks protocol %d", m.sampler, m.protocol)
            return self._send(
                identity,
                wire.Refuse(
                    f"the learner speaks protocol {wire.PROTOCOL} and this sampler {m.protocol}: bring both to one revision"
                ),
            )
        if "/" in m.sampler or not m.sampler:
            return self._send(
                identity, wire.Refuse(f"--name={m.sampler}: a sampler's name is not empty and has no slash")
            )
        if any(peer.sampler == m.sampler and peer.incarnation > m.incarnation for peer in self.peers.values()):
            self.log.warning(
                "sampler %s, incarnation %d, refused: another of that name came later", m.sampler, m.incarnation
            )
            return self._send(
                identity,
                wire.Refuse(f"another sampler called {m.sampler} came later: give each a --name and keys of its own"),
            )
        known, now = self.peers.get(identity), time.monotonic()
        if known is None or m.session != self.welcome.session:
            self.log.info("sampler %s, incarnation %d, is here", m.sampler, m.incarnation)
            peer = Peer(m.sampler, m.incarnation, seen=now)
            for old in [i for i, other in self.peers.items() if other.sampler == m.sampler]:
                peer.pulls |= self.peers.pop(
                    old
                ).pulls  # a new connection, or process: what the old one was asked for goes on from its last good leaf
            for pull in peer.pulls.values():
                pull.pace = peer.pace
                pull.forget_asked()
            self.peers[identity] = peer
            self._send(identity, self.welcome)
            for offer, _ in list(self.weights.values())[-1:]:
                self._send(identity, offer)
        self.peers[identity].seen = now
        peer, key = self.peers[identity], (m.sampler, m.incarnation)
        self.reports[key] = max(self.reports.get(key, 0), m.handed)
        for name in filter(peer.owns, m.lost):
            if self.held_before.has(name):
                self._send(identity, wire.Held([name]))
            elif not self.got.has(name):
                peer.offers.pop(name, None)
                if name in peer.pulls:
                    self._drop(peer, name)
                self._book(name, "lost")
        self._send(identity, wire.Got([], next(reversed(self.weights), "")))  # an answer: the learner is alive

    def _book(self, name: str, column: str) -> None:
        """A group that will not come, or is not wanted, goes into its column by way of the inbox, so that a checkpoint says so."""
        self.got.add(name)
        with self.lock:
            self.arrived.append((name, column, time.time()))

    def _offer(self, identity: bytes, peer: Peer, of: wire.Manifest) -> None:
        if not peer.owns(of.name):
            self.counts["malformed"] += 1
            self.log.warning("offer refused: %s is no group of sampler %s", of.name, peer.sampler)
            return
        if self.held_before.has(of.name) or self.got.has(of.name):
            self.counts["duplicate"] += 1
            self.log.info("%s is offered again", of.name)
            return self._send(identity, wire.Held([of.name]) if self.held_before.has(of.name) else wire.Got([of.name]))
        try:
            of.check(self.limits.nbytes)
        except wire.WireError as e:
            self.log.warning("offer refused: %s", e)
            self._book(of.name, "refused")
            return self._send(identity, wire.Got([of.name]))
        if of.name not in peer.pulls:
            peer.offers[of.name] = of

    def _ask(self, now: float) -> None:
        for identity, peer in self.peers.items():
            while peer.offers and len(peer.pulls) < 8:
                name, of = next(iter(peer.offers.items()))
                with self.lock:
                    if self.size and self.size + of.nbytes > self.room:
                        break
                    self.size += of.nbytes
                del peer.offers[name]
                peer.pulls[name] = wire.Pull(of, memoryview(bytearray(of.nbytes)), peer.pace)
            for name, pull in peer.pulls.items():
                while (span := pull.ask(now)) is not None:
                    self._send(identity, wire.Ask(name, *span))

    def _whole(self, identity: bytes, peer: Peer, name: str) -> None:
        pull = peer.pulls.pop(name)
        self.got.add(name)
        self.counts["received"] += 1
        self.counts["bytes_in"] += pull.of.nbytes
        with self.lock:
            self.arrived.append((name, bytes(pull.sink), time.time()))
        self._send(identity, wire.Got([name]))

    def _drop(self, peer: Peer, name: str) -> None:
        with self.lock:
            self.size -= peer.pulls.pop(name).of.nbytes

    def _serve(self, identity: bytes, m: wire.Ask) -> None:
        if m.name not in self.weights:
            return self._send(identity, wire.Gone(m.name))
        try:
            part = wire.leaves(self.weights[m.name][1], m.first, m.count)
        except wire.WireError as e:
            self.log.warning("ask refused: %s", e)
            return
        self.counts["bytes_out"] += len(part)
        self._send(identity, wire.Leaves(m.name, m.first), part)
