"""A sampler's end of the wire: offers its spool, answers asks, fetches the newest weights. HeteroRL, section 4.2.

`Link` is a thread with one `Line`, a ZeroMQ DEALER socket, for each rank of the learner. The sampling loop
(sampler.py) reads `newest` and `error`, and never waits for the thread. A message that is none, or that cannot be, is
dropped. hub.py is the learner's end; wire.py says in which messages they talk.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from pathlib import Path

import zmq

from flags import UserError
from remote import delta, relay, wire
from remote.account import Spool, sampler_of
from remote.clock import LearnerClock
from remote.keys import SamplerKeys
from remote.pace import Pace
from remote.weights import mapped

BEAT = 2.0  # seconds between two hellos
OFFERED_AT_ONCE = 4 << 20  # bytes of groups that are read and hashed before asks are looked at again
OFFERS = 64  # groups offered and not yet fetched, at most
PRINT_EVERY = 30.0  # seconds between two lines on the screen about a learner that does not answer


class Link(threading.Thread):
    """One line to each rank of the learner; the newest weights come from the first rank.

    flags: sampler.SamplerFlags. store: the folder for weights. keys: None for a connection in the clear."""

    def __init__(
        self,
        addresses: list[str],
        streams: list[str],
        flags,
        spool: Spool,
        store: Path,
        keys: SamplerKeys | None,
    ):
        super().__init__(daemon=True, name="link")
        self.flags = flags
        self.spool = spool
        self.store = store
        self.keys = keys
        self.welcome: queue.Queue[wire.Welcome] = queue.Queue(maxsize=16)
        self.newest: wire.Weights | None = None  # None until the first weights are here whole
        self.error = ""
        self.stopping = False
        self.turned = time.monotonic()  # when the last turn began
        self.context = zmq.Context()
        self.relay: relay.Relay | None = None  # that serves others
        try:
            self.lines = [Line(self, address, stream) for address, stream in zip(addresses, streams, strict=True)]
            if flags.relay:
                self.relay = relay.Relay(flags.relay, keys)
        except Exception:
            self.context.destroy(linger=0)  # or the process would wait for open sockets
            raise
        self.lines[0].fetches_weights = True
        self.fetched_root = ""  # of the weights in the store
        self.new_routes: tuple[list[str], list[str]] | None = None  # that the thread has not followed yet
        self.start()

    def behind(self, stream: str) -> int:
        """Groups that the learner has not fetched.

        Those that it has fetched must not count: it holds them only when it saves, and to get there it needs more."""
        line = self.line(stream)
        return len(self.spool.waiting[stream]) - len(line.got if line else [])

    def granted(self, stream: str) -> int:
        """With --admission=pace: groups of this life that the learner has granted."""
        line = self.line(stream)
        return line.granted if line else 0

    def ask_for(self, stream: str, wants: int, version: int) -> None:
        """Ask for so many groups beyond those handed over, to be made with weights of this version; 0: for none."""
        line = self.line(stream)
        if line and line.asks != (wants, version):
            line.asks = (wants, version)
            if wants:
                line.beat = 0.0

    def offset(self, stream: str) -> float:
        """Seconds that the clock of this stream's learner is ahead of ours."""
        line = self.line(stream)
        return line.clock.offset if line else 0.0

    def line(self, stream: str) -> Line | None:
        """None for a moment, where routes are new."""
        return next((line for line in list(self.lines) if line.stream == stream), None)

    def reroute(self, addresses: list[str], streams: list[str]) -> None:
        """Go on with these lines. Others go on until the learner holds all that the spool has for them."""
        self.new_routes = (addresses, streams)

    def close(self) -> None:
        self.stopping = True
        self.join(timeout=5)

    def run(self) -> None:
        try:
            while not self.stopping and not self.error:
                self.turn()
        except Exception as e:
            self.error = f"the link failed: {e!r}"
            raise
        finally:
            self.context.destroy(linger=200)
            if self.relay is not None:
                self.relay.close()

    def turn(self) -> None:
        """Wait for a moment, then let every line do what is due."""
        poller = zmq.Poller()
        for line in self.lines:
            poller.register(line.socket, zmq.POLLIN)
            if line.source is not None:
                poller.register(line.source.socket, zmq.POLLIN)
        poller.poll(10)
        now = time.monotonic()
        away = now - self.turned
        self.turned = now
        if self.new_routes is not None:
            self._follow(*self.new_routes)
        for line in list(self.lines):
            if away > self.flags.patience:  # this process was suspended; do not count that time against the learner
                line.heard += away
                line.tried += away
            try:
                line.turn(time.monotonic())
            except OSError as e:  # no room for the new weights: they are asked for again
                print(f"{self.store}: {e.strerror or e}; waiting for room", flush=True)
                time.sleep(1.0)
            if line.left:
                self._close_if_done(line)
            elif line.silence > self.flags.give_up:
                self.error = (
                    f"no answer from {line.address} for {self.flags.give_up:.0f} s: is the learner up, "
                    "is that its address, and are these the keys it knows (--keys)? "
                    "A group that was handed over waits in the spool"
                )

    def _follow(self, addresses: list[str], streams: list[str]) -> None:
        self.new_routes = None
        here = {line.stream: line for line in self.lines}
        lines = []
        for address, stream in zip(addresses, streams, strict=True):
            line = here.pop(stream, None) or Line(self, address, stream)
            line.left = False
            if line.address != address:
                line.address = address
                line.connect()
            lines.append(line)
        for line in here.values():
            line.left = True
        self.lines = [*lines, *here.values()]
        for line in self.lines:
            line.fetch_weights_or_not(line is self.lines[0])

    def _close_if_done(self, line: Line) -> None:
        if not self.spool.waiting[line.stream] and not self.spool.lost[line.stream]:
            line.fetch_weights_or_not(False)
            line.socket.close(linger=200)
            self.lines = [other for other in self.lines if other is not line]


class Line:
    """A connection to one rank of the learner."""

    def __init__(self, link: Link, address: str, stream: str):
        self.link = link
        self.address = address
        self.stream = stream
        self.fetches_weights = False
        self.left = False  # the routes lead elsewhere now: it goes on only until its groups are held
        self.socket = None
        self.session = ""  # the learner's, once it has said welcome
        self.clock = LearnerClock()
        self.granted = 0  # groups of this life, by the learner's word
        self.asks = (0, 0)  # how many more, with weights of which version
        self.offered: dict[str, float] = {}  # name -> when
        self.got: set[str] = set()  # groups that the learner has here whole
        self.sent: tuple[str, bytes] = ("", b"")  # the group that was asked for last, and its bytes
        self.heard = time.monotonic()  # when the learner said something last
        self.tried = self.heard  # the same, or when a new connection was tried last
        self.printed = self.heard
        self.faulted = 0.0  # when a fault was printed last
        self.beat = 0.0  # when the last hello was sent
        # Weights are fetched one set at a time, whole before the next.
        self.newest_name = ""  # of the weights that were offered last
        self.wanted: wire.Offer | None = None  # the newest weights that are offered
        self.fetching: wire.Offer | None = None  # the weights of `pull`
        self.part = Path()  # the file that they are written to
        self.sink: wire.FileSink | None = None  # the same, open
        self.pull: wire.Pull | None = None  # of a delta, or of the whole weights
        self.chain: list[wire.Manifest] = []  # the deltas to fetch; empty: the whole weights
        self.deltas: list[memoryview] = []  # those of them that are here
        self.rebuilding = None  # delta.rebuild, as far as it is
        self.refused_root = ""  # of weights whose deltas were no good
        self.pace = Pace(link.flags.patience)  # of weights that come from the learner
        self.source: relay.Source | None = None  # the relay that they come from instead
        self.connect()

    @property
    def silence(self) -> float:
        """Seconds since the learner said something."""
        return time.monotonic() - self.heard

    def connect(self) -> None:
        """A new connection, on which nothing is known of the old one."""
        if self.socket is not None:
            self.socket.close(linger=0)
        self.socket = self.link.context.socket(zmq.DEALER)
        keys = self.link.keys
        if keys is not None:
            self.socket.curve_publickey = keys.public
            self.socket.curve_secretkey = keys.secret
            self.socket.curve_serverkey = keys.learner
        wire.set_socket_options(self.socket, linger=200)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        try:
            self.socket.connect(self.address)
        except zmq.ZMQError as e:
            raise UserError(f"--connect={self.address}: {zmq.strerror(e.errno)}; write tcp://HOST:PORT") from None
        self.say_hello_again()
        self.forget_session()

    def say_hello_again(self) -> None:
        """The learner does not know this connection."""
        self.session = ""
        self.beat = 0.0

    def forget_session(self) -> None:
        """What was offered, fetched and asked for belongs to a session or a connection that is over."""
        self.offered.clear()
        self.got.clear()
        if self.pull is not None:
            self.pull.forget_asked()

    def send(self, message: wire.Message, payload=None) -> None:
        frames = [wire.encode(message)]
        if payload is not None:
            frames.append(payload)
        with contextlib.suppress(zmq.Again):  # nobody there, or nobody who reads: everything is sent again later
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=payload is None)

    # -- what is due ---------------------------------------------------------------------------------------------------

    def turn(self, now: float) -> None:
        self.receive()
        if now - self.beat > min(BEAT, self.link.flags.patience / 2):
            self.beat = now
            self.send_hello()
        self.reconnect_if_silent(now)
        if self.session:
            self.offer(now)
            if self.fetches_weights:
                self.fetch(now)

    def receive(self) -> None:
        """Handle what has come, but not for ever."""
        for _ in range(1000):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                self.handle(wire.decode(frames[0].buffer), frames)
            except wire.WireError:  # damaged on the way: what it was will be asked for again
                pass
            except OSError:  # no room for the new weights: `Link.turn` says so
                raise
            except Exception as e:  # a fault of ours in what the learner sent
                self.say_fault(e)

    def say_fault(self, e: Exception) -> None:
        now = time.monotonic()
        if now - self.faulted > PRINT_EVERY:
            self.faulted = now
            print(f"a fault in what {self.address} sent, which is dropped: {wire.printable(repr(e))}", flush=True)

    def send_hello(self) -> None:
        spool = self.link.spool
        wants, version = self.asks
        self.send(
            wire.Hello(
                protocol=wire.PROTOCOL,
                sampler=self.stream,
                incarnation=spool.incarnation,
                session=self.session,
                handed=spool.handed[self.stream],
                lost=spool.lost[self.stream][:OFFERS],
                sent=time.time(),
                wants=wants,
                version=version,
                root=self.link.fetched_root if self.fetches_weights else "",
                relay=self.link.flags.relay if self.fetches_weights else "",
            )
        )

    def reconnect_if_silent(self, now: float) -> None:
        patience, give_up = self.link.flags.patience, self.link.flags.give_up
        if self.silence <= 3 * patience or now - self.tried <= 3 * patience:
            return
        self.tried = now
        if now - self.printed > PRINT_EVERY:
            self.printed = now
            print(
                f"no answer from {self.address} for {self.silence:.0f} s, trying again "
                f"(at most {give_up:.0f} s, --give_up)",
                flush=True,
            )
        self.connect()

    def offer(self, now: float) -> None:
        """Offer the oldest groups that wait, and those again whose offers were not answered."""
        for name, when in list(self.offered.items()):
            if now - when > 3 * self.link.flags.patience:
                del self.offered[name]
        if len(self.offered) >= OFFERS:
            return
        spool = self.link.spool
        with spool.lock:
            waiting = [n for n in spool.waiting[self.stream] if n not in self.got and n not in self.offered]
        read = 0
        for name in waiting[: OFFERS - len(self.offered)]:
            data = spool.read(name)
            if data is not None:
                self.offered[name] = now
                self.send(wire.Offer(wire.manifest(name, data)))
                read += len(data)
            if read >= OFFERED_AT_ONCE:  # asks are waiting, perhaps
                break

    def fetch(self, now: float) -> None:
        """Fetch the newest weights into the store. OSError: no room there."""
        if self.rebuilding is not None:
            self.go_on_rebuilding()
            return
        if self.pull is None and self.wanted is not None:
            if self.wanted.of.root == self.link.fetched_root:  # nothing has changed but the version
                self.link.newest = wire.Weights(self.wanted.version, self.wanted.published, self.link.newest.path)
            else:
                self.begin_fetch(self.wanted)
        if self.pull is None:
            return
        if self.source is not None:
            self.source.take(self.pull)
            if self.source.has_failed(self.pull, now):
                self.leave_source()
        while (leaves := self.pull.ask(now)) is not None:
            if self.source is not None:
                self.source.ask(self.pull.of.name, *leaves)
            else:
                self.send(wire.Ask(self.pull.of.name, *leaves))
        if self.pull.done:
            self.end_pull()

    def leave_source(self) -> None:
        """The relay is no good, or not needed any more: what is missing comes from the learner."""
        if self.source is not None:
            self.source.close()
            self.source = None
            if self.pull is not None:
                self.pull.forget_asked()
                self.pull.pace = self.pace

    def fetch_weights_or_not(self, fetches: bool) -> None:
        """Whether this is the line that weights come over, from now on."""
        if not fetches:
            self.forget_fetch()
            self.wanted = None
            self.newest_name = ""
        self.fetches_weights = fetches

    def forget_fetch(self) -> None:
        if self.pull is not None:
            self.pull.forget_asked()
        self.leave_source()
        if self.sink is not None:
            self.sink.close()
        self.pull = self.sink = self.rebuilding = None
        self.deltas = []

    def begin_fetch(self, offer: wire.Offer) -> None:
        """Fetch the deltas that lead from the weights in the store to these; without any, the whole weights."""
        self.fetching = offer
        self.source = relay.Source.of(self.link.context, offer, self.link.keys, self.link.flags.patience)
        self.chain = []
        if offer.of.root != self.refused_root:
            try:
                self.chain = delta.chain_from(self.link.fetched_root, offer)
            except wire.WireError as e:
                self.refuse_deltas(e)
        if self.chain:
            self.begin_delta()
        else:
            self.begin_pull(offer)

    def begin_delta(self) -> None:
        of = self.chain[len(self.deltas)]
        self.pull = wire.Pull(of, memoryview(bytearray(of.nbytes)), self.pace_of_source)

    def begin_pull(self, offer: wire.Offer) -> None:
        resume = self.open_part(offer)
        self.pull = wire.Pull(offer.of, self.sink, self.pace_of_source, resume)

    @property
    def pace_of_source(self) -> Pace:
        return self.pace if self.source is None else self.source.pace

    def open_part(self, offer: wire.Offer) -> bool:
        """Open the file that the weights are written to. What is left of other weights is deleted.

        True: an earlier attempt has left some of the same bytes there."""
        self.part = self.link.store / f"{offer.of.root}.part"
        resume = self.part.is_file() and self.part.stat().st_size == offer.of.nbytes
        for other in self.link.store.glob("*.part"):
            if other != self.part:
                other.unlink()
        self.sink = wire.FileSink(self.part, offer.of.nbytes, resume)
        return resume

    def end_pull(self) -> None:
        """A delta or the whole weights are here."""
        pull, self.pull = self.pull, None
        if not self.chain:
            self.end_fetch()
            return
        self.deltas.append(pull.sink)
        if len(self.deltas) < len(self.chain):
            self.begin_delta()
        else:
            self.open_part(self.fetching)
            before = self.link.newest.path
            self.rebuilding = delta.rebuild(before, self.deltas, self.fetching.of, self.sink)

    def go_on_rebuilding(self) -> None:
        """One block of the weights, from those before and the deltas."""
        try:
            next(self.rebuilding)
        except StopIteration:
            self.end_fetch()
        except wire.WireError as e:
            self.refuse_deltas(e)
            self.forget_fetch()
        except OSError:
            self.forget_fetch()  # it is begun again
            raise

    def refuse_deltas(self, e: wire.WireError) -> None:
        """Fetch these weights whole instead."""
        self.refused_root = self.fetching.of.root
        print(f"{self.address} sent {wire.printable(e)}; its weights are fetched whole", flush=True)

    def end_fetch(self) -> None:
        """The weights are here whole; they and the ones before them stay in the store."""
        deltas = {of.name: data for of, data in zip(self.chain, self.deltas, strict=True)}
        self.forget_fetch()
        path = self.link.store / f"v{self.fetching.version:06d}.safetensors"
        os.replace(self.part, path)
        before = self.link.newest
        self.link.fetched_root = self.fetching.of.root
        self.link.newest = wire.Weights(self.fetching.version, self.fetching.published, path)
        for old in self.link.store.glob("v*.safetensors"):
            if old != path and (before is None or old != before.path):
                old.unlink()
        if self.link.relay is not None:
            self.link.relay.serve({self.fetching.of.name: mapped(path), **deltas})
        self.beat = 0.0  # the learner is told that they are here

    # -- one method for each message -----------------------------------------------------------------------------------

    def handle(self, message: wire.Message, frames: list[zmq.Frame]) -> None:
        self.heard = self.tried = time.monotonic()
        match message:
            case wire.Welcome():
                self.on_welcome(message)
            case wire.Refuse():
                self.link.error = wire.printable(message.why, 2000)
            case wire.Got():
                self.on_got(message)
            case wire.Grant() if message.incarnation == self.link.spool.incarnation:
                self.granted = max(self.granted, message.groups)
            case wire.Held():
                self.on_held(message)
            case wire.Ask():
                self.on_ask(message)
            case wire.Offer() if self.fetches_weights:
                self.on_offer(message)
            case wire.Leaves() if len(frames) == 2:
                self.on_leaves(message, frames[1].buffer)
            case wire.Gone():
                self.on_gone(message)

    def on_welcome(self, welcome: wire.Welcome) -> None:
        mismatch = wire.protocol_mismatch(learner=welcome.protocol, sampler=wire.PROTOCOL)
        if mismatch:
            self.link.error = mismatch
            return
        if self.link.welcome.full():  # nobody has looked for long: it is asked for again
            return
        self.session = welcome.session
        self.forget_session()
        self.granted = 0
        if self.link.relay is not None:
            self.link.relay.vouched(welcome.keys)
        self.link.welcome.put(welcome)

    def on_got(self, message: wire.Got) -> None:
        if message.sent:
            self.clock.answered(message.sent, message.clock, time.time())
        with self.link.spool.lock:
            waiting = set(self.link.spool.waiting[self.stream])
        for name in waiting.intersection(message.names):
            self.offered.pop(name, None)
            self.got.add(name)
        if self.fetches_weights and message.newest and message.newest != self.newest_name:
            self.send(wire.Want())

    def on_held(self, message: wire.Held) -> None:
        for name in message.names:
            self.offered.pop(name, None)
            self.got.discard(name)
        spool = self.link.spool
        with spool.lock:
            here = {*spool.waiting[self.stream], *spool.lost[self.stream]}
        spool.forget(here.intersection(message.names))

    def owns(self, name: str) -> bool:
        """Whether this is the name of one of this stream's groups; one that was damaged on the way is not."""
        try:
            return sampler_of(name) == self.stream
        except ValueError:
            return False

    def on_ask(self, ask: wire.Ask) -> None:
        if self.sent[0] != ask.name:
            data = self.link.spool.read(ask.name) if self.owns(ask.name) else None
            if data is None:
                self.send(wire.Gone(ask.name))
                return
            self.sent = (ask.name, data)
        self.offered[ask.name] = time.monotonic()
        self.send(wire.Leaves(ask.name, ask.first), wire.leaves(self.sent[1], ask.first, ask.count))

    def on_offer(self, offer: wire.Offer) -> None:
        wire.need(offer.version >= 0, "an offer of weights without a version")
        try:
            offer.of.check(int(self.link.flags.most_weights * 2**30))
        except wire.WireError as e:
            self.link.error = f"--most_weights={self.link.flags.most_weights}: {wire.printable(e)}"
            return
        self.wanted = offer
        self.newest_name = offer.of.name

    def on_leaves(self, message: wire.Leaves, data) -> None:
        if self.pull is not None and self.pull.of.name == message.name:
            self.pull.put(message.first, data, self.heard)

    def on_gone(self, message: wire.Gone) -> None:
        if message.name == "":
            self.say_hello_again()
        elif self.pull is not None and self.pull.of.name == message.name:
            # Newer weights are out. If their offer was lost, the answer to the next hello says so.
            self.forget_fetch()
            if self.wanted is self.fetching:
                self.wanted = None
