"""The sampler's end over ZeroMQ: offers the groups in its spool, sends them, fetches the newest
weights. HeteroRL, section 4.2.

`Link` is a thread with one ZeroMQ DEALER socket. The sampling loop (sampler.py) reads `welcome`,
`newest` and `error`, and never waits for the thread. A malformed message is dropped. hub.py is the
learner's end; wire.py lists the messages; files.py has both ends over a shared folder."""

from __future__ import annotations

import contextlib
import io
import math
import os
import threading
import time
from pathlib import Path

import zmq

from machinery.flags import UserError
from remote import delta, wire
from remote.account import Spool, retain_weights
from remote.keys import SamplerKeys

BEAT = 2.0  # seconds between two hellos
# most groups that are offered and not yet fetched; their bytes are in memory
OFFERS = 16
# seconds between two lines on the screen about a learner that does not answer
PRINT_EVERY = 30.0


class Connection(threading.Thread):
    """The part that does not depend on the transport.

    flags: sampler.SamplerFlags. address: of the learner. welcome: the last one, None before the
    first. newest: None until the first weights are complete. error: the reason why the thread has
    ended."""

    def __init__(self, address: str, flags, spool: Spool):
        super().__init__(daemon=True, name="link")
        self.address = address
        self.flags = flags
        self.spool = spool
        self.welcome: wire.Welcome | None = None
        self.newest: wire.ReceivedWeights | None = None
        self.got: set[str] = set()  # groups that the learner has received completely
        self.error = ""
        self.stopping = False
        # time of the learner's last message
        self.heard = self.printed = time.monotonic()
        self.beat = -math.inf  # time of the last hello

    @property
    def behind(self) -> int:
        """The number of groups that the learner has not fetched. Fetched groups do not count: the
        learner holds them only after a checkpoint, and it needs more groups to reach one."""
        return len(self.spool.waiting) - len(self.got)

    def close(self) -> None:
        self.stopping = True
        self.join(timeout=5)

    def hello(self) -> wire.Hello:
        """The sampler's sign of life."""
        return wire.Hello(
            self.spool.sampler,
            self.spool.incarnation,
            self.welcome.session if self.welcome else "",
            self.spool.handed,
            self.spool.lost[:100],
            self.newest.version if self.newest else -1,
        )

    def on_welcome(self, message: wire.Welcome) -> None:
        """Begin a session: groups that were fetched in an earlier session may be lost."""
        self.got.clear()
        self.welcome = message

    def on_receipt(self, receipt: wire.Receipt) -> None:
        self.spool.forget(receipt.held)
        with self.spool.lock:
            self.got = self.got.union(receipt.got).intersection(self.spool.waiting)

    def check_silence(self, now: float) -> None:
        """Print a line about a learner that does not answer; set `error` after --give_up
        seconds."""
        silence = now - self.heard
        if silence > self.flags.give_up:
            self.error = (
                f"no answer from {self.address} for {self.flags.give_up:.0f} s: check that the learner runs, that "
                "this is its address, that its revision is the same, and that it knows these keys (--keys). Groups "
                "that were handed over stay in the spool"
            )
        elif now - max(self.heard, self.printed) > PRINT_EVERY:
            self.printed = now
            print(
                f"no answer from {self.address} for {silence:.0f} s, trying again "
                f"(at most {self.flags.give_up:.0f} s, --give_up)",
                flush=True,
            )


class Link(Connection):
    """store: the folder for weights. keys: None for an unencrypted connection.

    wanted: the last offer of weights, until they are complete. chunk: the last answer to an Ask.
    digest: of the weights in the store."""

    def __init__(
        self, address: str, flags, spool: Spool, store: Path, keys: SamplerKeys | None
    ):
        super().__init__(address, flags, spool)
        # name -> (data, time of Offer or Ask)
        self.offered: dict[str, tuple[bytes, float]] = {}
        self.store = store
        self.wanted: wire.Offer | None = None
        self.work = None  # the running generator `_fetch`
        self.chunk: wire.Chunk | None = None
        self.digest = ""
        self.context = zmq.Context()
        try:
            self.socket = self._connect(keys)
        except Exception:
            # otherwise the process would wait for open sockets
            self.context.destroy(linger=0)
            raise
        self.start()

    def _connect(self, keys: SamplerKeys | None) -> zmq.Socket:
        """The socket, which connects again by itself."""
        socket = self.context.socket(zmq.DEALER)
        if keys is not None:
            socket.curve_publickey = keys.public
            socket.curve_secretkey = keys.secret
            socket.curve_serverkey = keys.learner
        wire.set_socket_options(socket, linger=200)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        try:
            socket.connect(self.address)
        except zmq.ZMQError as e:
            fault = f"--connect={self.address}: {zmq.strerror(e.errno)}; write tcp://HOST:PORT"
            raise UserError(fault) from None
        return socket

    def send(self, message: wire.Message) -> None:
        with contextlib.suppress(zmq.Again):  # lost messages are repeated later
            self.socket.send_multipart([wire.encode(message)], zmq.NOBLOCK)

    def run(self) -> None:
        try:
            while not self.stopping and not self.error:
                self.socket.poll(10)
                try:
                    self._turn(time.monotonic())
                except (
                    OSError
                ) as e:  # no room for the new weights: the fetch is repeated
                    print(
                        f"{self.store}: {e.strerror or e}; waiting for disk space",
                        flush=True,
                    )
                    time.sleep(1.0)
        except Exception as e:
            self.error = f"the link failed: {e!r}"
            raise
        finally:
            self.context.destroy(linger=200)

    def _turn(self, now: float) -> None:
        """Receive messages, and send those that are due. OSError: no room for the weights."""
        self._receive()
        if now - self.beat > min(BEAT, self.flags.patience / 2):
            self.beat = now
            self.send(self.hello())
        self.check_silence(now)
        if self.welcome is not None:
            self._offer(now)
            self._continue_fetch()

    def _receive(self) -> None:
        """Handle at most a thousand messages that have arrived."""
        for _ in range(1000):
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            # damaged on the way: it is asked for again
            with contextlib.suppress(wire.WireError):
                self._handle(wire.decode(frame))

    def _offer(self, now: float) -> None:
        """Offer the oldest waiting groups, and repeat offers without an answer."""
        for name, (data, when) in self.offered.items():
            if now - when > self.flags.patience:
                self._offer_group(name, data, now)
        known = self.got.union(self.offered)
        with self.spool.lock:
            waiting = [name for name in self.spool.waiting if name not in known]
        for name in waiting[: OFFERS - len(self.offered)]:
            if (data := self.spool.read(name)) is not None:
                self._offer_group(name, data, now)

    def _offer_group(self, name: str, data: bytes, now: float) -> None:
        self.offered[name] = data, now
        self.send(wire.Offer(wire.manifest(name, data)))

    # -- one method for each message

    def _handle(self, message: wire.Message) -> None:
        self.heard = time.monotonic()
        match message:
            case wire.Welcome():
                self.on_welcome(message)
                self.offered.clear()
                self.work = None  # the fetch of an earlier session
            case wire.Refuse():
                self.error = wire.printable(message.why, 2000)
            case wire.Receipt():
                self.on_receipt(message)
                for name in (*message.got, *message.held):
                    self.offered.pop(name, None)
            case wire.Ask() if message.name in self.offered:
                data, _ = self.offered[message.name]
                self.offered[message.name] = data, self.heard
                self.send(wire.chunk_of(data, message))
            case wire.Offer() if (
                message.version >= 0 and message.of.nbytes <= wire.MOST_WEIGHTS
            ):
                self.wanted = message
            case wire.Chunk():
                self.chunk = message

    # -- the newest weights, one complete set after the other

    def _continue_fetch(self) -> None:
        """Fetch weights for a moment. OSError: no room in the store; the fetch starts over."""
        if self.wanted is None:
            return
        work = self.work or self._fetch(self.wanted)
        self.work = None
        try:
            if next(work, "complete") is None:
                self.work = work
        except wire.WireError:  # withdrawn: the next hello gets the newest offer
            self.wanted = None

    def _fetch(self, offer: wire.Offer):
        """Bring these weights into the store. A generator that yields while it waits and after each
        block."""
        before = self.newest
        if offer.of.digest == self.digest:  # same weights, new version
            path = before.path
        else:
            part = self.store / "weights.part"
            with open(part, "wb") as sink:
                # raises if the disk is full
                os.posix_fallocate(sink.fileno(), 0, offer.of.nbytes)
                if not (yield from self._rebuild(offer, sink)):
                    sink.seek(0)
                    yield from self._pull(offer.of, sink)
            path = self.store / f"v{offer.version:06d}.safetensors"
            os.replace(part, path)
            self.digest = offer.of.digest
            retain_weights(path, [before.path] if before else [])
        self.newest = wire.ReceivedWeights(offer.version, offer.published, path)
        if self.wanted == offer:
            self.wanted = None

    def _rebuild(self, offer: wire.Offer, sink):
        """Write the weights from those in the store and a chain of deltas. False: there is no such
        chain, or it does not lead to these weights."""
        deltas = []
        try:
            for of in delta.chain_from(self.digest, offer):
                data = io.BytesIO()
                yield from self._pull(of, data)
                deltas.append(data.getvalue())
            if deltas:
                yield from delta.rebuild(self.newest.path, deltas, offer.of, sink)
        except wire.WireError as e:
            fault = f"{self.address} sent {wire.printable(e)}"
            print(f"{fault}; its weights are fetched in full", flush=True)
            return False
        return bool(deltas)

    def _pull(self, of: wire.Manifest, sink):
        """Ask for the chunks of an object until it is complete."""
        pull = wire.Pull(of, sink)
        asked = -math.inf
        while not pull.done:
            now = time.monotonic()
            if now - asked > self.flags.patience:
                asked = now
                self.send(wire.Ask(of.name, pull.at))
            yield
            chunk, self.chunk = self.chunk, None
            if chunk is not None and chunk.name == of.name and pull.put(chunk):
                asked = -math.inf
