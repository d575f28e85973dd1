"""Weights from sampler to sampler, so that the learner's uplink does not grow with their number. HeteroRL, section 4.2.

    python -m remote --connect=... --keys=... --relay=tcp://10.0.0.7:6000      # "I may serve others at this address"

The learner sends each version to FAN samplers; every relay that has it whole may serve FAN others, and these, where
they are relays, FAN more:

    copies that leave the learner    min(N, FAN), whatever the number N of samplers
    rounds                           log_FAN N

A sampler waits with the weights that it has until the learner names it a source: itself, or a relay with its address
and public key (`Fanout`). The manifest comes from the learner, so what a relay sends need not be trusted: leaves that
are not what it says are dropped. A relay that sends one, that has the weights no more, or that says nothing for three
times --patience is left, and the sampler fetches what is missing from the learner (`Source`). Whoever was left by
STRIKES samplers is no relay any more. Nobody waits for longer than WAIT seconds, so who hinders others makes them fetch
from the learner, as without relays.

A relay (`Relay`) lets in the public keys that the learner has vouched for (Welcome.keys), and answers asks alone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from flags import UserError, need
from remote import wire
from remote.guard import Connections
from remote.keys import SamplerKeys, let_in
from remote.pace import Pace

FAN = 8
STRIKES = 3
WAIT = 300.0  # seconds until a sampler that waits for a relay fetches from the learner
STUCK = 30.0  # seconds without an ask after which a sampler is not counted on to have the weights soon
MOST_ASK = 4096  # bytes of a message to a relay
LOG = logging.getLogger("remote.relay")
LOG.addHandler(logging.NullHandler())  # a sampler has no log: who is turned away hears it
LOG.propagate = False
HOST = ("tcp://127.0.0.1:", "tcp://localhost:", "ipc://")


def may_serve(address: str, with_keys: bool) -> bool:
    """Whether this is an address that a sampler may be sent to: without keys, one of this host."""
    try:
        wire.check_address("relay", address, 1)
    except UserError:
        return False
    return with_keys or address.startswith(HOST)


# ---------------------------------------------------------------------------------------------------------------------
# The learner's side
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Member:
    """A sampler as a place to fetch from, and as one that fetches."""

    key: str = ""
    address: str = ""  # where it serves others; empty: nowhere
    root: str = ""  # of the weights that it has
    source: bytes | None = None  # the relay that it was sent to; None: the learner
    waits_since: float | None = None  # for a source
    sent_at: float = 0.0  # when it was named a source, or asked for something last

    @property
    def owner(self) -> str:
        """Who answers for it when it serves."""
        return self.key or self.address


class Fanout:
    """Who fetches the newest weights from whom. Where nobody is a relay, all fetch from the learner at once."""

    def __init__(self):
        self.root = ""  # of the newest weights
        self.members: dict[bytes, Member] = {}  # by ZeroMQ's name of a connection
        self.direct: set[bytes] = set()  # those that the learner sends these weights to
        self.strikes: dict[str, set] = {}  # owner of a relay -> who was sent there, and came to the learner instead

    def member(self, identity: bytes) -> Member:
        return self.members.setdefault(identity, Member())

    def heard(self, identity: bytes, key: str, hello: wire.Hello) -> None:
        """What a sampler says of itself. Only one that fetches its weights here can have an address."""
        member = self.member(identity)
        member.key = key
        member.address = hello.relay if hello.relay and may_serve(hello.relay, bool(key)) else ""
        member.root = hello.root

    def new(self, root: str) -> None:
        """There are newer weights."""
        self.root = root
        self.direct = set()
        for identity in self.members:
            self.want(identity)

    def want(self, identity: bytes) -> None:
        """This sampler is to be told of the newest weights."""
        member = self.member(identity)
        if member.waits_since is None:
            member.waits_since = time.monotonic()

    def asked(self, identity: bytes) -> None:
        """It fetches from the learner. Where it was sent to a relay, that one has failed."""
        member = self.member(identity)
        member.sent_at = time.monotonic()
        if member.source is not None:
            if member.source in self.members:
                self.strikes.setdefault(self.members[member.source].owner, set()).add(member.key or identity)
            member.source = None
            self.direct.add(identity)

    def is_relay(self, member: Member) -> bool:
        return bool(member.address) and len(self.strikes.get(member.owner, ())) < STRIKES

    def turn(self, here) -> list[tuple[bytes, wire.Relay | None]]:
        """Who is to be told where to fetch from now: (connection, its relay; None: the learner). here: connections."""
        for identity in [other for other in self.members if other not in here]:
            del self.members[identity]
        waiting = [identity for identity, member in self.members.items() if member.waits_since is not None]
        if not waiting:
            return []
        now = time.monotonic()
        waiting.sort(key=self._rank)
        places = self._places(now)
        hope = any(self._will_serve(member, now) for member in self.members.values())
        told = []
        for identity in waiting:
            member = self.members[identity]
            source = None
            if member.root != self.root and identity not in self.direct:
                if len(self.direct) >= FAN and places:
                    source = places.pop()
                elif len(self.direct) < FAN or not hope or now - member.waits_since > WAIT:
                    self.direct.add(identity)
                else:
                    continue
            member.source, member.waits_since, member.sent_at = source, None, now
            hope = hope or self.is_relay(member)
            relay = self.members.get(source)
            told.append((identity, relay and wire.Relay(relay.address, relay.key)))
        return told

    def _rank(self, identity: bytes) -> tuple:
        """Relays come first, then those that have been sent somewhere and ask again, then who has waited longest."""
        member = self.members[identity]
        return not self.is_relay(member), member.source is None, member.waits_since

    def _places(self, now: float) -> list[bytes]:
        """The relays that have the weights, each as often as it may serve one sampler more. One that never says that it
        is done takes no place for ever, and one that asks again, whom the offer did not reach or has crossed, none."""
        taken = Counter()
        for member in self.members.values():
            fetches = member.waits_since is None and now - member.sent_at < WAIT
            if member.source is not None and member.root != self.root and fetches:
                taken[member.source] += 1
        places = []
        for identity, member in self.members.items():
            if self.is_relay(member) and member.root == self.root:
                places += [identity] * (FAN - taken[identity])
        return places

    def _will_serve(self, member: Member, now: float) -> bool:
        """Whether this is a relay that has the weights, or will have them soon."""
        fetches = member.waits_since is None and now - member.sent_at < (WAIT if member.source else STUCK)
        return self.is_relay(member) and (member.root == self.root or fetches)


# ---------------------------------------------------------------------------------------------------------------------
# A sampler that serves others
# ---------------------------------------------------------------------------------------------------------------------


class Relay(threading.Thread):
    """Answers other samplers' asks for the weights that are here. keys: None for this host alone.

    UserError: the address is taken."""

    def __init__(self, address: str, keys: SamplerKeys | None):
        super().__init__(daemon=True, name="relay")
        self.objects: dict[str, object] = {}  # name -> bytes
        self.known: set[bytes] = set()  # public keys
        self.bytes_out = 0
        self.stopping = False
        self.connections = Connections()
        self.context = zmq.Context()
        self.authenticator = None
        self.socket = self.context.socket(zmq.ROUTER)
        wire.set_socket_options(self.socket, linger=0, most=MOST_ASK, queue=16)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
        try:
            if keys is not None:
                self.authenticator = let_in(self.context, self.socket, keys[:2], self.known, LOG)
                address = f"tcp://*:{address.rpartition(':')[2]}"  # others may know this host by another name
            self.socket.bind(address)
        except zmq.ZMQError as e:
            self._close_sockets()
            raise UserError(f"--relay={address}: {zmq.strerror(e.errno)}; name a free port of this host") from None
        self.events = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.start()

    def vouched(self, keys: list[str]) -> None:
        """The learner says who may come in."""
        self.known.update(key.encode("ascii", "replace") for key in keys)

    def serve(self, objects: dict[str, object]) -> None:
        """From now on these objects alone can be fetched."""
        self.objects = objects

    def run(self) -> None:
        try:
            while not self.stopping:
                self.socket.poll(10)
                self._look_at_connections()
                self._receive()
        finally:  # sockets are closed by the thread that uses them
            self.connections.close()
            self.socket.disable_monitor()
            self.events.close(linger=0)
            self.socket.close(linger=0)

    def _look_at_connections(self) -> None:
        while self.events.poll(0):
            event = recv_monitor_message(self.events)
            fd = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.connections.accepted(fd)
            else:
                self.connections.closed(fd)
        self.connections.cut_those_ahead()

    def _receive(self) -> None:
        for _ in range(100):
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            with contextlib.suppress(zmq.ZMQError):  # a frame of no connection
                self.connections.came(frames[-1].get(zmq.SRCFD) if frames else -1, frames)
            with contextlib.suppress(wire.WireError, zmq.ZMQError):  # no ask, or a peer that is gone or does not read
                self._answer(identity, frames)

    def _answer(self, identity, frames: list[zmq.Frame]) -> None:
        wire.need(len(frames) == 1, f"a message of {len(frames)} parts")
        ask = wire.decode(frames[0].buffer)
        wire.need(isinstance(ask, wire.Ask), "no ask")
        data = self.objects.get(ask.name)
        if data is None:
            self.socket.send_multipart([identity, wire.encode(wire.Gone(ask.name))], zmq.NOBLOCK)
            return
        part = wire.leaves(data, ask.first, ask.count)
        self.bytes_out += len(part)
        self.socket.send_multipart(
            [identity, wire.encode(wire.Leaves(ask.name, ask.first)), part], zmq.NOBLOCK, copy=False
        )

    def close(self) -> None:
        self.stopping = True
        self.join(timeout=10)
        self._close_sockets()

    def _close_sockets(self) -> None:
        if self.authenticator is not None:
            self.authenticator.stop()
        self.context.destroy(linger=0)


def check_flag(address: str, with_keys: bool, folder: bool) -> None:
    """UserError, one sentence, unless others can be served at this address (--relay)."""
    if not address:
        return
    need(not folder, f"--relay={address}: in a shared folder all samplers read the same file; leave it out")
    wire.check_address("relay", address, 1)
    need(
        with_keys or address.startswith(HOST),
        f"--relay={address}: over a network keys are needed (--keys); or name an address of this host, "
        "tcp://127.0.0.1:PORT",
    )


# ---------------------------------------------------------------------------------------------------------------------
# A sampler that is served
# ---------------------------------------------------------------------------------------------------------------------


class Source:
    """A connection to a relay. It is left for good when it has failed."""

    def __init__(self, socket, patience: float):
        self.socket = socket
        self.patience = patience
        self.pace = Pace(patience)
        self.since = time.monotonic()
        self.is_gone = False

    @classmethod
    def of(cls, context, offer: wire.Offer, keys: SamplerKeys | None, patience: float) -> Source | None:
        """The relay of an offer; None: there is none, or none that one should talk to."""
        relay = offer.relay
        if relay is None or not may_serve(relay.address, keys is not None):
            return None
        socket = context.socket(zmq.DEALER)
        wire.set_socket_options(socket, linger=0)
        try:
            if keys is not None:
                socket.curve_publickey = keys.public
                socket.curve_secretkey = keys.secret
                socket.curve_serverkey = relay.key.encode("ascii", "replace")
            socket.connect(relay.address)
        except zmq.ZMQError:  # no key, or no address
            socket.close(linger=0)
            return None
        return cls(socket, patience)

    def ask(self, name: str, first: int, count: int) -> None:
        with contextlib.suppress(zmq.Again):
            self.socket.send(wire.encode(wire.Ask(name, first, count)), zmq.NOBLOCK)

    def take(self, pull: wire.Pull) -> None:
        """Put what has come into the pull. OSError: no room for it."""
        for _ in range(100):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            with contextlib.suppress(wire.WireError):
                message = wire.decode(frames[0].buffer)
                if isinstance(message, wire.Leaves) and len(frames) == 2 and message.name == pull.of.name:
                    pull.put(message.first, frames[1].buffer, time.monotonic())
                self.is_gone |= isinstance(message, wire.Gone)

    def has_failed(self, pull: wire.Pull, now: float) -> bool:
        """Whether it sent what is not wanted, has it no more, or says nothing."""
        silent = now - max(self.since, self.pace.heard_at) > 3 * self.patience
        return self.is_gone or pull.corrupt > 0 or silent

    def close(self) -> None:
        self.socket.close(linger=0)
