"""The sampler's end over ZeroMQ: offers the groups in its spool, answers asks, fetches the newest
weights. HeteroRL, section 4.2.

`Link` is a thread with one `Line`, a ZeroMQ DEALER socket, for each rank of the learner. The
sampling loop (sampler.py) reads `newest` and `error`, and never waits for the thread. A malformed
message is dropped. hub.py is the learner's end; wire.py lists the messages."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from pathlib import Path

import zmq

from machinery.flags import UserError
from remote import delta, wire
from remote.account import Spool, is_of, retain_weights
from remote.keys import SamplerKeys

BEAT = 2.0  # seconds between two hellos
# bytes of groups that are read and hashed before the thread looks for asks again
OFFERED_AT_ONCE = 4 << 20
OFFERS = 64  # most groups that are offered and not yet fetched
PRINT_EVERY = 30.0  # seconds between two lines on the screen about a learner that does not answer


class Link(threading.Thread):
    """One line to each rank of the learner; the newest weights come from the first rank.

    flags: sampler.SamplerFlags. store: the folder for weights. keys: None for an unencrypted
    connection."""

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
        self.newest: wire.ReceivedWeights | None = None  # None until the first weights are complete
        self.newest_name = ""  # name of the weights in the last offer
        self.error = ""
        self.stopping = False
        self.context = zmq.Context()
        try:
            self.lines = {
                stream: Line(self, a, stream) for a, stream in zip(addresses, streams, strict=True)
            }
        except Exception:
            self.context.destroy(linger=0)  # otherwise the process would wait for open sockets
            raise
        first = self.lines[streams[0]]
        first.fetcher = Fetcher(self, first)
        self.start()

    def behind(self, stream: str) -> int:
        """The number of groups that the learner has not fetched. Fetched groups do not count: the
        learner holds them only after a checkpoint, and it needs more groups to reach one."""
        return len(self.spool.waiting[stream]) - len(self.lines[stream].got)

    def close(self) -> None:
        self.stopping = True
        self.join(timeout=5)

    def run(self) -> None:
        try:
            poller = zmq.Poller()
            for line in self.lines.values():
                poller.register(line.socket, zmq.POLLIN)
            while not self.stopping and not self.error:
                poller.poll(10)
                for line in self.lines.values():
                    self._turn(line)
        except Exception as e:
            self.error = f"the link failed: {e!r}"
            raise
        finally:
            self.context.destroy(linger=200)

    def _turn(self, line: Line) -> None:
        try:
            line.turn(time.monotonic())
        except OSError as e:  # no room for the new weights: the fetch is repeated
            print(f"{self.store}: {e.strerror or e}; waiting for disk space", flush=True)
            time.sleep(1.0)
        if line.silence > self.flags.give_up:
            self.error = (
                f"no answer from {line.address} for {self.flags.give_up:.0f} s: check that the learner runs, that "
                "this is its address, that its revision is the same, and that it knows these keys (--keys). Groups "
                "that were handed over stay in the spool"
            )


class Line:
    """A connection to one rank of the learner."""

    def __init__(self, link: Link, address: str, stream: str):
        self.link = link
        self.address = address
        self.stream = stream
        self.fetcher: Fetcher | None = None  # only on the line that brings weights
        self.session = ""  # the learner's session, after its welcome
        self.offered: dict[str, float] = {}  # name -> time of the offer
        self.got: set[str] = set()  # groups that the learner has received completely
        self.sent: tuple[str, bytes] = ("", b"")  # name and bytes of the last group asked for
        self.heard = time.monotonic()  # time of the learner's last message
        self.printed = self.heard
        self.beat = 0.0  # time of the last hello
        self.socket = self.connect()

    @property
    def silence(self) -> float:
        """Seconds since the learner's last message."""
        return time.monotonic() - self.heard

    def connect(self) -> zmq.Socket:
        """The socket, which connects again by itself."""
        socket, keys = self.link.context.socket(zmq.DEALER), self.link.keys
        if keys is not None:
            socket.curve_publickey = keys.public
            socket.curve_secretkey = keys.secret
            socket.curve_serverkey = keys.learner
        wire.set_socket_options(socket, linger=200)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        try:
            socket.connect(self.address)
        except zmq.ZMQError as e:
            raise UserError(
                f"--connect={self.address}: {zmq.strerror(e.errno)}; write tcp://HOST:PORT"
            ) from None
        return socket

    def send(self, message: wire.Message, payload=None) -> None:
        frames = [wire.encode(message)]
        if payload is not None:
            frames.append(payload)
        with contextlib.suppress(zmq.Again):  # lost messages are repeated later
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=payload is None)

    # -- the work of a turn

    def turn(self, now: float) -> None:
        """Receive and send what is due. OSError: no room for the weights."""
        self.receive()
        if now - self.beat > min(BEAT, self.link.flags.patience / 2):
            self.beat = now
            self.send_hello()
        self.print_silence(now)
        if self.session:
            self.offer(now)
            if self.fetcher is not None:
                self.fetcher.turn()

    def receive(self) -> None:
        """Handle at most a thousand messages that have arrived."""
        for _ in range(1000):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            with contextlib.suppress(wire.WireError):  # damaged on the way: it is asked for again
                self.handle(wire.decode(frames[0].buffer), frames)

    def send_hello(self) -> None:
        spool = self.link.spool
        handed, lost = spool.handed[self.stream], spool.lost[self.stream][:OFFERS]
        newest = self.link.newest_name
        self.send(wire.Hello(self.stream, spool.incarnation, self.session, handed, lost, newest))

    def print_silence(self, now: float) -> None:
        if now - max(self.heard, self.printed) > PRINT_EVERY:
            self.printed = now
            print(
                f"no answer from {self.address} for {self.silence:.0f} s, trying again "
                f"(at most {self.link.flags.give_up:.0f} s, --give_up)",
                flush=True,
            )

    def offer(self, now: float) -> None:
        """Offer the oldest waiting groups, and repeat offers that were not answered."""
        for name, when in list(self.offered.items()):
            if now - when > 3 * self.link.flags.patience:
                del self.offered[name]
        if len(self.offered) >= OFFERS:
            return
        spool = self.link.spool
        with spool.lock:
            waiting = [
                n for n in spool.waiting[self.stream] if n not in self.got and n not in self.offered
            ]
        read = 0
        for name in waiting[: OFFERS - len(self.offered)]:
            data = spool.read(name)
            if data is not None:
                self.offered[name] = now
                self.send(wire.Offer(wire.manifest(name, data)))
                read += len(data)
            if read >= OFFERED_AT_ONCE:  # asks may be waiting
                break

    # -- one method for each message

    def handle(self, message: wire.Message, frames: list[zmq.Frame]) -> None:
        self.heard = time.monotonic()
        match message:
            case wire.Welcome() if not self.link.welcome.full():  # otherwise the hello is repeated
                self.on_welcome(message)
            case wire.Refuse():
                self.link.error = wire.printable(message.why, 2000)
            case wire.Got():
                self.on_got(message)
            case wire.Held():
                self.on_held(message)
            case wire.Ask():
                self.on_ask(message)
            case wire.Offer() if self.fetcher is not None:
                self.fetcher.on_offer(message)
            case wire.Leaves() if self.fetcher is not None and len(frames) == 2:
                self.fetcher.on_leaves(message, frames[1].buffer, self.heard)
            case wire.Gone(name=""):
                self.session, self.beat = "", 0.0  # the learner does not know this connection
            case wire.Gone() if self.fetcher is not None:
                self.fetcher.on_gone(message.name)

    def on_welcome(self, message: wire.Welcome) -> None:
        """Begin a session: offers, fetched groups and asks of an earlier one have ended."""
        self.session = message.session
        self.offered.clear()
        self.got.clear()
        if self.fetcher is not None and self.fetcher.pull is not None:
            self.fetcher.pull.forget_asked()
        self.link.welcome.put(message)

    def on_got(self, message: wire.Got) -> None:
        with self.link.spool.lock:
            waiting = set(self.link.spool.waiting[self.stream])
        for name in waiting.intersection(message.names):
            self.offered.pop(name, None)
            self.got.add(name)

    def on_held(self, message: wire.Held) -> None:
        for name in message.names:
            self.offered.pop(name, None)
            self.got.discard(name)
        spool = self.link.spool
        with spool.lock:
            known = {*spool.waiting[self.stream], *spool.lost[self.stream]}
        spool.forget(known.intersection(message.names))

    def on_ask(self, ask: wire.Ask) -> None:
        if self.sent[0] != ask.name:
            data = self.link.spool.read(ask.name) if is_of(self.stream, ask.name) else None
            if data is None:
                self.send(wire.Gone(ask.name))
                return
            self.sent = (ask.name, data)
        self.offered[ask.name] = time.monotonic()
        self.send(wire.Leaves(ask.name, ask.first), wire.leaves(self.sent[1], ask.first, ask.count))


class Fetcher:
    """Fetches the newest weights over a line into the store, one complete set after the other."""

    def __init__(self, link: Link, line: Line):
        self.link = link
        self.line = line
        self.window = wire.Window(link.flags.patience)
        self.wanted: wire.Offer | None = None  # the last offer, until its weights are complete
        self.fetching: wire.Offer | None = None  # the offer that `work` fetches
        self.work = None  # the running generator `fetch`
        self.pull: wire.Pull | None = None  # the running pull of a delta or of the whole weights
        self.root = ""  # root of the weights in the store

    def turn(self) -> None:
        """Continue the fetch for a moment. OSError: no room in the store; the fetch starts over."""
        if self.work is None and self.wanted is not None:
            self.fetching = self.wanted
            self.work = self.fetch(self.wanted)
        if self.work is None:
            return
        try:
            next(self.work)
        except StopIteration:
            self.stop()
        except OSError:
            self.stop()
            raise

    def stop(self) -> None:
        if self.pull is not None:
            self.pull.forget_asked()
        if self.work is not None:
            self.work.close()
        self.work = self.pull = None

    def on_offer(self, offer: wire.Offer) -> None:
        wire.need(offer.version >= 0, "an offer of weights without a version")
        offer.of.check(wire.MOST_WEIGHTS)
        self.wanted = offer
        self.link.newest_name = offer.of.name

    def on_leaves(self, message: wire.Leaves, data, now: float) -> None:
        if self.pull is not None and self.pull.of.name == message.name:
            try:
                self.pull.put(message.first, data, now)
            except OSError:
                self.stop()
                raise

    def on_gone(self, name: str) -> None:
        """Stop the fetch: newer weights are published. If their offer was lost, the next hello
        gets it."""
        if self.pull is not None and self.pull.of.name == name:
            self.stop()
            if self.wanted is self.fetching:
                self.wanted = None

    def fetch(self, offer: wire.Offer):
        """Bring these weights into the store. A generator that yields while it waits and after each
        block."""
        store, before = self.link.store, self.link.newest
        if offer.of.root == self.root:  # same weights, new version
            path = before.path
        else:
            part = store / "weights.part"
            if not (yield from self.fetch_deltas(offer, part)):
                with contextlib.closing(wire.FileSink(part, offer.of.nbytes)) as sink:
                    yield from self.wait_for(wire.Pull(offer.of, sink, self.window))
            path = store / f"v{offer.version:06d}.safetensors"
            os.replace(part, path)
            self.root = offer.of.root
            retain_weights(path, [before.path] if before else [])
        self.link.newest = wire.ReceivedWeights(offer.version, offer.published, path)
        if self.wanted is offer:
            self.wanted = None

    def fetch_deltas(self, offer: wire.Offer, part: Path):
        """Rebuild the file from the weights in the store and a chain of deltas. False: there is no
        such chain, or it does not lead to these weights."""
        deltas = []
        try:
            for of in delta.chain_from(self.root, offer):
                pull = wire.Pull(of, memoryview(bytearray(of.nbytes)), self.window)
                yield from self.wait_for(pull)
                deltas.append(pull.sink)
            if deltas:
                with contextlib.closing(wire.FileSink(part, offer.of.nbytes)) as sink:
                    yield from delta.rebuild(self.link.newest.path, deltas, offer.of, sink)
        except wire.WireError as e:
            print(
                f"{self.line.address} sent {wire.printable(e)}; its weights are fetched in full",
                flush=True,
            )
            return False
        return bool(deltas)

    def wait_for(self, pull: wire.Pull):
        """Ask for leaves until the object is complete."""
        self.pull = pull
        while not pull.done:
            while (leaves := pull.ask(time.monotonic())) is not None:
                self.line.send(wire.Ask(pull.of.name, *leaves))
            yield
        self.pull = None
