"""The learner's end of the wire: one ZeroMQ socket for all samplers of a rank. HeteroRL, section 4.2.

    torchrun train.py --samplers=zmq --bind=tcp://*:5555 --keys=keys/learner     # rank r binds port 5555 + r

`Hub` is a thread: samplers come and go, offer groups and pull weights (wire.py says in which messages). The training
loop only ever looks into its inbox (source.py), so no sampler can hold it up. Whatever a sampler sends, and whatever
comes of it, is booked to that sampler: it is logged, counted, and ends neither the thread nor another's connection.
guard.py has the bounds. link.py is the sampler's end; files.py has the same face over a shared folder.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from flags import UserError
from remote import wire
from remote.account import VERSIONS, Account, Arrived, believe, is_stream, sampler_of
from remote.delta import Chain
from remote.grants import Ask, Grants
from remote.groups import Limits
from remote.guard import MOST_ENTRIES, QUEUE, Connections, Names, Room
from remote.keys import secure
from remote.pace import Pace
from remote.relay import Fanout
from remote.weights import manifest_of, mapped

SILENT = 60.0  # seconds after which a sampler that says nothing gives its room back
UNANSWERED = 30.0  # seconds without a good leaf after which a group that was asked for gives its room back
SUSPENDED = 5.0  # seconds: a turn that takes longer means that this process was suspended
PULLS = 64  # groups that are fetched from one sampler at the same time, at most
OFFERS = 256  # of one sampler that are kept; a sampler has 64 open, and repeats them
LOST = 1024  # names in a hello that are looked at
HELD = 4096  # names in a message
LEAVES = 1  # in one ask: what a connection may keep unread is small
MOST = (LEAVES + 1) * wire.LEAF  # bytes of a frame from a sampler
BAD_LEAVES = 64  # of a group, after which it is given up
PEERS = 1024


@dataclass
class Peer:
    """A sampler's connection."""

    identity: bytes  # ZeroMQ's name for it
    key: str  # its public key; empty in the clear
    sampler: str
    incarnation: int
    heard: float  # when it said something last
    owner: str = ""  # who answers for it: its key, or its name
    pace: Pace = field(default_factory=lambda: Pace(most=LEAVES * wire.LEAF))
    offers: dict[str, wire.Manifest] = field(default_factory=dict)  # not asked for yet
    pulls: dict[str, wire.Pull] = field(default_factory=dict)

    def owns(self, name: str) -> bool:
        """Whether this may be the name of one of its groups."""
        try:
            return sampler_of(name) == self.sampler
        except ValueError:
            return False

    @property
    def waits(self) -> bool:
        """Whether it has groups that might be asked for now."""
        return bool(self.offers) and len(self.pulls) < PULLS


@dataclass
class Published:
    """Weights that samplers may fetch."""

    offer: wire.Offer
    data: mmap.mmap
    encoded: bytes  # the offer: all who do not read it share its bytes
    deltas: dict[str, bytes]  # name -> delta of its chain


class Hub(threading.Thread):
    """One socket for all samplers of a rank. The first methods are for the training loop, all others for the thread.

    counts: what came, by kind; reports: groups that each (sampler, incarnation) says it has handed over; broken: why
    the thread has died."""

    def __init__(self, bind: str, keys: str, welcome: wire.Welcome, limits: Limits, log):
        super().__init__(daemon=True, name="hub")
        self.welcome = welcome
        self.limits = limits
        self.log = log
        self.lock = threading.Lock()  # over the inbox
        self.arrived: deque[Arrived] = deque()  # the inbox
        self.room = Room(limits.room)
        self.connections = Connections()
        self.todo: deque[Published | wire.Held] = deque()  # what the training loop wants sent
        self.is_open = False
        self.stopping = False
        self.broken = ""
        self.counts: Counter = Counter()
        self.reports: dict[tuple[str, int], int] = {}
        self.got = Account()  # groups that are here, or that are known not to come
        self.held_before = Account()  # groups that a checkpoint accounts for
        self.entries: Counter = Counter()  # owner -> what it has left in the account
        self.muted: dict[bytes, None] = {}  # connections that a fault of ours was booked to
        self.turns = 0
        self.peers: dict[bytes, Peer] = {}
        self.weights: dict[str, Published] = {}  # the newest stands last
        self.chain = Chain()
        self.fanout = Fanout()
        self.grants: Grants | None = None  # with --admission=pace
        wire.check_address("bind", bind, 0)
        self.context = zmq.Context()
        self.authenticator = None
        try:
            self._open_socket(bind, keys)
        except Exception:
            self._close_sockets()  # or the process could wait for them for ever
            raise
        self.start()  # libzmq ends the process where peers leave a socket that nobody reads

    @property
    def size(self) -> int:
        """Bytes of groups held or asked for."""
        return self.room.size

    def _open_socket(self, bind: str, keys: str) -> None:
        self.socket = self.context.socket(zmq.ROUTER)
        known = {}
        if keys != "none":
            self.authenticator, known = secure(self.context, self.socket, keys, self.log)
        self.names = Names(known)
        self.encoded_welcome = wire.encode(msgspec.structs.replace(self.welcome, keys=list(known)))
        wire.set_socket_options(self.socket, linger=0, most=MOST, queue=QUEUE)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
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
            | zmq.EVENT_ACCEPTED
            | zmq.EVENT_DISCONNECTED
        )

    # -- called by the training loop -----------------------------------------------------------------------------------

    def open(self, held: Account) -> None:
        """Let samplers in. held: what the checkpoint accounts for."""
        self.held_before = held
        for key in held:
            self.entries[self.names.owner(key[0])] += held.entries(key)
        self.is_open = True

    def broadcast(self, version: int, path: Path, published: float, change: bytes | None = None) -> None:
        """Offer these weights to all samplers. change: the delta from those before, where there is one."""
        of, data = manifest_of(path), mapped(path)
        self.chain.add(of, change)
        offer = wire.Offer(of, version, published, [step for step, _ in self.chain.steps])
        deltas = {step.of.name: delta for step, delta in self.chain.steps}
        self.todo.append(Published(offer, data, wire.encode(offer), deltas))

    def plan(self, next_version: int, unused: int) -> None:
        """With --admission=pace: the learner takes its next batch at this version, and has so many groups for it."""
        if self.grants is not None:
            self.grants.plan(next_version, unused)

    def held(self, names: list[str]) -> None:
        """A checkpoint accounts for these groups: their samplers may forget them."""
        self.todo.append(wire.Held(names))

    def drain(self) -> list[Arrived]:
        """What has come since the last call, in order of arrival."""
        with self.lock:
            out = list(self.arrived)
            self.arrived.clear()
        return out

    def free(self, name: str, nbytes: int) -> None:
        """The training loop is done with a group of so many bytes: there is room again."""
        self.room.give(self.names.owner(sampler_of(name)), nbytes)

    def charge(self, name: str) -> None:
        """A group was fetched in vain: its owner has a bounded number of those."""
        self.entries[self.names.owner(sampler_of(name))] += 1

    def close(self) -> None:
        self.stopping = True
        if self.is_alive():
            self.join(timeout=60)
        if self.is_alive():
            return
        self._close_sockets()

    def _close_sockets(self) -> None:
        if self.authenticator is not None:
            self.authenticator.stop()
        self.context.destroy(linger=0)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        before = time.monotonic()
        try:
            while not self.stopping:
                poller.poll(10)
                now = time.monotonic()
                if now - before > SUSPENDED:
                    self._forgive(now - before)
                before = now
                self._send_todo()
                self._log_connections()
                self._receive()
                self._cut_those_ahead()
                self._give_up_silent(now)
                self._ask(now)
                self._grant()
                self._send_offers()
        except Exception as e:
            self.broken = repr(e)
            raise
        finally:  # sockets are closed by the thread that uses them
            self.connections.close()
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
                    self.fanout.new(published.offer.of.root)

    def _send_held(self, names: list[str]) -> None:
        by_sampler: dict[str, list[str]] = {}
        for name in names:
            self.held_before.add(name)
            by_sampler.setdefault(sampler_of(name), []).append(name)
        for identity, peer in self.peers.items():
            held = by_sampler.get(peer.sampler, [])
            for i in range(0, len(held), HELD):
                self._send(identity, wire.Held(held[i : i + HELD]))

    def _forgive(self, away: float) -> None:
        """This process was suspended; do not count that time against the samplers."""
        for peer in self.peers.values():
            peer.heard += away
            for pull in peer.pulls.values():
                pull.moved = None

    def _log_connections(self) -> None:
        while self.events.poll(0):
            event = recv_monitor_message(self.events)
            if event["event"] == zmq.EVENT_ACCEPTED:
                if not self.connections.accepted(int(event["value"])):
                    self.log.warning("more than %d connections: one of them is cut", self.connections.most)
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self.connections.closed(int(event["value"]))
                self.log.info("a connection is gone: its sampler left, or sent more at once than %d bytes", MOST)
            else:
                self.counts["strangers"] += 1
                self.log.warning("a handshake failed: no key, a wrong one, or not a sampler")

    def _cut_those_ahead(self) -> None:
        for _ in self.connections.cut_those_ahead():
            self.counts["malformed"] += 1
            self.log.warning("a connection is cut: it sent a message without an end")

    def _receive(self) -> None:
        """Handle what has come, but not for ever."""
        for _ in range(1000):
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._take(bytes(identity.buffer), frames)

    def _take(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        """One message. Whatever comes of it, the thread goes on."""
        try:
            self.connections.came(property_of(frames, zmq.SRCFD, -1), frames)
            if self.is_open and identity not in self.muted:
                self._handle(identity, frames)
        except wire.WireError as e:
            self.counts["malformed"] += 1
            self.log.warning("malformed message dropped: %s", e)
        except Exception as e:
            self._book_fault(identity, e)

    def _book_fault(self, identity: bytes, e: Exception) -> None:
        """A fault of ours, brought about by this connection: it is heard no more. A sampler comes back on a new one."""
        self.counts["faults"] += 1
        peer = self.peers.pop(identity, None)
        self.log.error("a fault in what sampler %s sent, which is dropped: %r", peer.sampler if peer else "?", e)
        self.muted[identity] = None
        if len(self.muted) > PEERS:
            del self.muted[next(iter(self.muted))]
        if peer is not None:
            self._give_back(peer)

    def _give_back(self, peer: Peer) -> None:
        """Give up all that this peer was asked for."""
        for name in list(peer.pulls):
            self._drop(peer, name)

    def _give_up_silent(self, now: float) -> None:
        """A sampler that says nothing any more gives its room back, and so does a group of which nothing comes."""
        for identity, peer in list(self.peers.items()):
            if now - peer.heard > SILENT:
                self.log.info("sampler %s says nothing: what it was asked for is given up", peer.sampler)
                if self.grants is not None:
                    self.grants.gone(peer.sampler)
                self._give_back(peer)
                del self.peers[identity]
                continue
            for name, pull in list(peer.pulls.items()):
                if pull.corrupt > BAD_LEAVES or (pull.moved is not None and now - pull.moved > UNANSWERED):
                    self.log.info("sampler %s does not send what it offered: the room is given back", peer.sampler)
                    self._drop(peer, name)

    def _ask(self, now: float) -> None:
        """Ask for what is offered, as far as there is room; another peer is the first each time."""
        peers = list(self.peers.values())
        self.turns += 1
        first = self.turns % max(1, len(peers))
        for peer in peers[first:] + peers[:first]:
            try:
                self._ask_peer(peer, now)
            except Exception as e:
                self._book_fault(peer.identity, e)

    def _ask_peer(self, peer: Peer, now: float) -> None:
        """Groups are begun one after the other, each when all of those before it is asked for."""
        for name, pull in peer.pulls.items():
            self._ask_for(peer, name, pull, now)
        others = {other.owner for other in self.peers.values() if other.waits} - {peer.owner}
        while peer.waits and peer.pace.size(now):
            name, of = next(iter(peer.offers.items()))
            if not self.room.take(peer.owner, of.nbytes, others):
                break
            del peer.offers[name]
            peer.pulls[name] = wire.Pull(of, memoryview(bytearray(of.nbytes)), peer.pace)
            self._ask_for(peer, name, peer.pulls[name], now)

    def _ask_for(self, peer: Peer, name: str, pull: wire.Pull, now: float) -> None:
        while (leaves := pull.ask(now)) is not None:
            self._send(peer.identity, wire.Ask(name, *leaves))

    def _grant(self) -> None:
        """Tell samplers that asked what they may make."""
        given = self.grants.give() if self.grants is not None else {}
        for peer in self.peers.values():
            if given and peer.sampler in given:
                self._send(peer.identity, wire.Grant(*given[peer.sampler]))

    def _send(self, identity: bytes, message: wire.Message | bytes, payload=None) -> None:
        """message: as it is, or encoded, where many are sent the same one."""
        copy = payload is None and not isinstance(message, bytes)
        frames = [identity, message if isinstance(message, bytes) else wire.encode(message)]
        if payload is not None:
            frames.append(payload)
        with contextlib.suppress(zmq.ZMQError):  # a peer that is gone or does not read: it will say hello again
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)

    # -- one method for each message -----------------------------------------------------------------------------------

    def _handle(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        """WireError: no message, or none that may come now."""
        wire.need(1 <= len(frames) <= 2, f"a message of {len(frames)} parts")
        message = wire.decode(frames[0].buffer)
        key = property_of(frames, "User-Id", "")
        if isinstance(message, wire.Hello):
            self._on_hello(identity, key, message)
            return
        peer = self.peers.get(identity)
        if peer is None or peer.key != key:  # a sampler of an earlier session: it must say who it is
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
                self.fanout.want(peer.identity)
            case wire.Gone() if message.name in peer.pulls:
                self._drop(peer, message.name)

    def _on_hello(self, identity: bytes, key: str, hello: wire.Hello) -> None:
        refusal = self._refusal(hello, key)
        if refusal:
            self.log.warning("sampler %s is refused: %s", wire.printable(hello.sampler, 100), refusal)
            self._send(identity, wire.Refuse(refusal))
            return
        known = self.peers.get(identity)
        same = known is not None and (known.sampler, known.incarnation) == (hello.sampler, hello.incarnation)
        if not same or hello.session != self.welcome.session:
            if known is None and len(self.peers) >= PEERS:
                self.log.warning("sampler %s has to wait: %d are here", hello.sampler, PEERS)
                return
            self._let_in(identity, key, hello)
        peer = self.peers[identity]
        peer.heard = time.monotonic()
        self.fanout.heard(identity, key, hello)
        believe(self.reports, (hello.sampler, hello.incarnation), hello.handed, self._is_proven)
        for name in filter(peer.owns, hello.lost[:LOST]):
            self._on_lost(peer, name)
        newest = next(reversed(self.weights), "")
        self._send(identity, wire.Got([], newest, hello.sent, time.time()))  # an answer: the learner is alive
        if self.grants is not None:
            granted = self.grants.ask(hello.sampler, Ask.of(hello))
            if granted > hello.handed:  # what said so before may be lost
                self._send(identity, wire.Grant(hello.incarnation, granted))

    def _is_proven(self, key: tuple[str, int]) -> bool:
        return key in self.got or key in self.held_before

    def _refusal(self, hello: wire.Hello, key: str) -> str:
        """Why this sampler is turned away; empty if it may come in."""
        mismatch = wire.protocol_mismatch(learner=wire.PROTOCOL, sampler=hello.protocol)
        if mismatch:
            return mismatch
        if not is_stream(hello.sampler):
            name = wire.printable(hello.sampler, 100)
            return f"--name={name}: a sampler's name is 1 to 64 letters, digits, - and _"
        refusal = self.names.refusal(hello.sampler, key)
        if refusal:
            return refusal
        same_name = [peer for peer in self.peers.values() if peer.sampler == hello.sampler]
        if any(peer.incarnation > hello.incarnation for peer in same_name):
            return f"another sampler called {hello.sampler} came later: give each a --name and keys of its own"
        return ""

    def _let_in(self, identity: bytes, key: str, hello: wire.Hello) -> None:
        self.log.info("sampler %s, incarnation %d, is here", hello.sampler, hello.incarnation)
        peer = Peer(identity, key, hello.sampler, hello.incarnation, heard=time.monotonic())
        peer.owner = self.names.owner(hello.sampler)
        if identity in self.peers and self.peers[identity].sampler != hello.sampler:  # it goes by another name now
            self._give_back(self.peers.pop(identity))
        # On a new connection, or from a new process, what the old one was asked for goes on from its last good leaf.
        for old in [other for other in self.peers.values() if other.sampler == hello.sampler]:
            peer.pulls |= self.peers.pop(old.identity).pulls
        for pull in peer.pulls.values():
            pull.pace = peer.pace
            pull.forget_asked()
        self.peers[identity] = peer
        self._send(identity, self.encoded_welcome)
        self.fanout.want(identity)

    def _send_offers(self) -> None:
        """Tell samplers of the newest weights, and where to fetch them."""
        if not self.weights:
            return
        newest = next(reversed(self.weights.values()))
        for identity, relay in self.fanout.turn(self.peers):
            offer = newest.encoded if relay is None else msgspec.structs.replace(newest.offer, relay=relay)
            self._send(identity, offer)

    def _on_lost(self, peer: Peer, name: str) -> None:
        """The sampler cannot send this group any more."""
        if self.held_before.has(name):
            self._send(peer.identity, wire.Held([name]))
        elif not self.got.has(name):
            peer.offers.pop(name, None)
            if name in peer.pulls:
                self._drop(peer, name)
            self._book(peer, name, "lost")

    def _book(self, peer: Peer, name: str, fate: str) -> None:
        """Hand over the fate of a group that will not come, so that a checkpoint says so."""
        if self._enter(peer, name):
            self.entries[peer.owner] += 1
            with self.lock:
                self.arrived.append(Arrived(name, time.time(), fate=fate))

    def _enter(self, peer: Peer, name: str) -> bool:
        """Note that this group is accounted for. False: its owner has left too much in the account already: lives,
        numbers out of order, groups that came to nothing. No more of it is booked."""
        if self.entries[peer.owner] >= MOST_ENTRIES:
            self.log.warning(
                "sampler %s has had too many lives or bad groups: nothing more of it is booked", peer.sampler
            )
            return False
        self.entries[peer.owner] += self.got.add(name, self.held_before)
        return True

    def _on_offer(self, peer: Peer, of: wire.Manifest) -> None:
        if not peer.owns(of.name):
            self.counts["malformed"] += 1
            self.log.warning("offer refused: %s is no group of sampler %s", wire.printable(of.name, 100), peer.sampler)
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
            self._book(peer, of.name, "refused")
            self._send(peer.identity, wire.Got([of.name]))
            return
        if of.name not in peer.pulls and len(peer.offers) < OFFERS and self.entries[peer.owner] < MOST_ENTRIES:
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
        pull = peer.pulls[name]
        if not self._enter(peer, name):
            self._drop(peer, name)
            return
        del peer.pulls[name]
        self.counts["received"] += 1
        self.counts["bytes_in"] += pull.of.nbytes
        with self.lock:
            self.arrived.append(Arrived(name, time.time(), data=bytes(pull.sink)))
        self._send(peer.identity, wire.Got([name]))

    def _drop(self, peer: Peer, name: str) -> None:
        """Give up a group that was asked for."""
        pull = peer.pulls.pop(name)
        pull.forget_asked()
        self.room.give(peer.owner, pull.of.nbytes)

    def _on_ask(self, peer: Peer, ask: wire.Ask) -> None:
        data = self._object(ask.name)
        if data is None:
            self._send(peer.identity, wire.Gone(ask.name))
            return
        try:
            part = wire.leaves(data, ask.first, ask.count)
        except wire.WireError as e:
            self.log.warning("ask refused: %s", e)
            return
        newest = next(reversed(self.weights.values()))
        if ask.name == newest.offer.of.name or ask.name in newest.deltas:
            self.fanout.asked(peer.identity)
        self.counts["bytes_out"] += len(part)
        self._send(peer.identity, wire.Leaves(ask.name, ask.first), part)

    def _object(self, name: str) -> mmap.mmap | bytes | None:
        """Weights or a delta of this name that samplers may fetch."""
        for published in self.weights.values():
            if published.offer.of.name == name:
                return published.data
            if name in published.deltas:
                return published.deltas[name]
        return None


def property_of(frames: list[zmq.Frame], name, default):
    """What ZeroMQ knows of the connection that a message came over: "User-Id", its public key; SRCFD, its file."""
    try:
        return frames[-1].get(name)
    except (IndexError, zmq.ZMQError):
        return default
