"""A sampler's end of the wire: offers its spool, answers asks, fetches the newest weights. HeteroRL, section 4.2; hub.py is the learner's end.

`Link` is a thread with a ZeroMQ DEALER socket for each learner rank; the sampling loop reads `newest` and `error`, and never waits for it.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from pathlib import Path

from remote import wire
from remote.account import Spool, split

BEAT = 2.0  # seconds between two hellos
OFFERS = 64  # groups offered and not yet fetched, at most


class Link(threading.Thread):
    """One connection for each learner rank: offers the spool, answers asks, fetches the newest weights (from the first rank)."""

    def __init__(self, addresses: list[str], streams: list[str], flags, spool: Spool, store: Path, keys):
        import zmq

        super().__init__(daemon=True, name="link")
        self.addresses, self.streams, self.flags, self.spool, self.store, self.keys = (
            addresses,
            streams,
            flags,
            spool,
            store,
            keys,
        )
        self.welcome: queue.Queue = queue.Queue()
        self.newest: tuple[int, float, Path] | None = None  # version, published, file
        self.error, self.stopping, self.turned = "", False, time.monotonic()
        self.context = zmq.Context()
        self.lines = [Line(self, i) for i in range(len(addresses))]
        self.start()

    def run(self) -> None:
        try:
            while not self.stopping and not self.error:
                self.turn()
        except Exception as e:
            self.error = f"the link failed: {e!r}"
            raise
        finally:
            self.context.destroy(linger=200)

    def turn(self) -> None:
        import zmq

        poller = zmq.Poller()
        for line in self.lines:
            poller.register(line.socket, zmq.POLLIN)
        poller.poll(10)
        asleep, self.turned = time.monotonic() - self.turned, time.monotonic()
        for line in self.lines:
            if asleep > self.flags.patience:  # this process was stopped, or its host slept: that is nobody's silence
                line.heard += asleep
                line.began += asleep
            try:
                line.turn(time.monotonic())
            except OSError as e:  # no room for the new weights: they are asked for again
                print(f"{self.store}: {e.strerror or e}; waiting for room", flush=True)
                time.sleep(1.0)
            if line.silent > self.flags.give_up:
                self.error = (
                    f"no answer from {line.address} for {self.flags.give_up:.0f} s: is the learner up, is that its address, "
                    "and are these the keys it knows (--keys)? A group that was handed over waits in the spool"
                )

    def behind(self, stream: str) -> int:
        """Groups that the learner has not fetched. Those it has fetched must not count: it holds them when it saves, and to get there it needs more."""
        return len(self.spool.waiting[stream]) - len(self.lines[self.streams.index(stream)].got)

    def close(self) -> None:
        self.stopping = True
        self.join(timeout=5)


class Line:
    """A connection to one rank."""

    def __init__(self, link: Link, i: int):
        self.link, self.address, self.stream, self.fetches = link, link.addresses[i], link.streams[i], i == 0
        self.session, self.socket = "", None
        self.pull: wire.Pull | None = None
        self.offered: dict[str, float] = {}  # name -> when
        self.got: set[str] = set()
        self.cache: tuple[str, bytes] = ("", b"")
        self.next_weights: wire.Offer | None = None
        self.heard_of = self.have = ""  # the last weights that were offered, by name, and fetched, by their bytes
        self.heard = self.began = self.said = time.monotonic()
        self.beat = 0.0
        self.pace = wire.Pace(patience=link.flags.patience)
        self.connect()

    @property
    def silent(self) -> float:
        return time.monotonic() - self.heard

    def connect(self) -> None:
        import zmq

        if self.socket is not None:
            self.socket.close(linger=0)
        self.socket = self.link.context.socket(zmq.DEALER)
        if self.link.keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey, self.socket.curve_serverkey = self.link.keys
        for option, value in (
            (zmq.MAXMSGSIZE, wire.MOST),
            (zmq.SNDHWM, 64),
            (zmq.RCVHWM, 64),
            (zmq.LINGER, 200),
            (zmq.HEARTBEAT_IVL, 2000),
            (zmq.HEARTBEAT_TIMEOUT, 10000),
            (zmq.RECONNECT_IVL_MAX, 5000),
        ):
            self.socket.setsockopt(option, value)
        self.socket.connect(self.address)
        self.session, self.beat = "", 0.0
        self.offered.clear()
        self.got.clear()
        if self.pull is not None:
            self.pull.forget_asked()

    def send(self, message, payload=None) -> None:
        import zmq

        try:
            self.socket.send_multipart([wire.encode(message)] + ([payload] if payload is not None else []), zmq.NOBLOCK)
        except zmq.Again:  # nobody there, or nobody who reads: everything is said again later
            pass

    def turn(self, now: float) -> None:
        import zmq

        flags = self.link.flags
        for _ in range(1000):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                self.handle(wire.decode(frames[0].buffer), frames)
            except wire.WireError:
                continue  # damaged on the way: what it was will be asked for again
        if now - self.beat > min(BEAT, flags.patience / 2):
            self.beat = now
            spool = self.link.spool
            self.send(
                wire.Hello(
                    wire.PROTOCOL,
                    self.stream,
                    spool.incarnation,
                    self.session,
                    spool.handed[self.stream],
                    spool.lost[self.stream][:OFFERS],
                )
            )
        if self.silent > 3 * flags.patience and now - self.began > 3 * flags.patience:
            self.began = now
            if now - self.said > 30:
                self.said = now
                print(
                    f"no answer from {self.address} for {self.silent:.0f} s, trying again (at most {flags.give_up:.0f} s, --give_up)",
                    flush=True,
                )
            self.connect()
        if self.session:
            self.offer(now)
            self.fetch(now)

    def offer(self, now: float) -> None:
        for name, when in list(self.offered.items()):
            if now - when > 3 * self.link.flags.patience:
                del self.offered[name]
        if len(self.offered) >= OFFERS:
            return
        with self.link.spool.lock:
            waiting = [n for n in self.link.spool.waiting[self.stream] if n not in self.got and n not in self.offered]
        for name in waiting[: OFFERS - len(self.offered)]:
            data = self.link.spool.read(name)
            if data is not None:
                self.offered[name] = now
                self.send(wire.Offer(wire.manifest(name, data)))

    def handle(self, m, frames) -> None:
        self.heard = self.began = time.monotonic()
        if isinstance(m, wire.Refuse):
            self.link.error = m.why
        elif isinstance(m, wire.Welcome):
            if m.protocol != wire.PROTOCOL:
                self.link.error = f"the learner speaks protocol {m.protocol} and this sampler {wire.PROTOCOL}: bring both to one revision"
            self.session = m.session
            self.offered.clear()
            self.got.clear()
            if self.pull is not None:
                self.pull.forget_asked()
            self.link.welcome.put(m)
        elif isinstance(m, wire.Got):
            for name in m.names:
                self.offered.pop(name, None)
                self.got.add(name)
            if self.fetches and m.newest and m.newest != self.heard_of:
                self.send(wire.Needs())
        elif isinstance(m, wire.Held):
            for name in m.names:
                self.offered.pop(name, None)
                self.got.discard(name)
            self.link.spool.forget([n for n in m.names if self.mine(n)])
        elif isinstance(m, wire.Gone):
            if m.name == "":  # the learner does not know this connection: say hello again
                self.session, self.beat = "", 0.0
            elif self.pull is not None and self.pull.of.name == m.name:
                self.pull = None  # newer ones are out; if their offer was lost, the answer to the next beat says so
                if self.next_weights is self.offer_at:
                    self.next_weights = None
        elif isinstance(m, wire.Offer) and self.fetches:
            try:
                m.of.check(int(self.link.flags.most_weights * 2**30))
            except wire.WireError as e:
                self.link.error = f"--most_weights: {e}"
                return
            self.next_weights, self.heard_of = m, m.of.name
        elif isinstance(m, wire.Ask):
            self.serve(m)
        elif isinstance(m, wire.Leaves) and self.pull is not None and m.name == self.pull.of.name and len(frames) == 2:
            self.pull.put(m.first, frames[1].buffer, self.heard)

    def mine(self, name: str) -> bool:
        """Whether a name is one of this stream's groups; one that was damaged on the way is nobody's."""
        try:
            return split(name)[0][0] == self.stream
        except ValueError:
            return False

    def serve(self, m: wire.Ask) -> None:
        if self.cache[0] != m.name:
            data = self.link.spool.read(m.name) if self.mine(m.name) else None
            if data is None:
                return self.send(wire.Gone(m.name))
            self.cache = (m.name, data)
        self.offered[m.name] = time.monotonic()
        self.send(wire.Leaves(m.name, m.first), wire.leaves(self.cache[1], m.first, m.count))

    def fetch(self, now: float) -> None:
        """Fetch the newest weights into the store; one set at a time, whole before the next."""
        offer = self.next_weights
        if (
            self.pull is None and offer is not None and offer.of.root == self.have
        ):  # an update that moved nothing: a new version of the same bytes
            self.link.newest = (offer.version, offer.published, self.link.newest[2])
        elif self.pull is None and offer is not None:
            self.offer_at = offer
            self.part = (
                self.link.store / f"{offer.of.root}.part"
            )  # what an earlier attempt left of the same bytes is kept
            resume = self.part.is_file() and self.part.stat().st_size == offer.of.nbytes
            for other in self.link.store.glob("*.part"):  # of weights that nobody asks for any more
                if other != self.part:
                    other.unlink()
            self.pull = wire.Pull(offer.of, wire.FileSink(self.part, offer.of.nbytes, resume), self.pace, resume)
        if self.pull is None:
            return
        while (span := self.pull.ask(now)) is not None:
            self.send(wire.Ask(self.pull.of.name, *span))
        if self.pull.done:
            self.pull.sink.close()
            path = self.link.store / f"v{self.offer_at.version:06d}.safetensors"
            os.replace(self.part, path)
            self.pull, before, self.have = None, self.link.newest, self.offer_at.of.root
            self.link.newest = (self.offer_at.version, self.offer_at.published, path)
            for old in self.link.store.glob("v*.safetensors"):
                if old != path and (before is None or old != before[2]):
                    old.unlink()
