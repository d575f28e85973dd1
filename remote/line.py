"""A long and narrow line between two programs of this host: a proxy that delays and throttles."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time


class Way:
    """One direction: bytes leave one after the other at `rate` bytes a second, and are there half a round trip later.

    sent: bytes; busy: seconds in which bytes have left."""

    def __init__(self, line, rate: float, trip: float):
        self.line = line
        self.rate = rate
        self.trip = trip
        self.free = 0.0  # when the last byte has left
        self.sent = 0

    @property
    def busy(self) -> float:
        return self.sent / self.rate

    async def carry(self, reader, writer) -> None:
        queue = asyncio.Queue()
        delivery = asyncio.create_task(self.deliver(queue, writer))
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 15):
                self.line.enter()
                self.free = max(self.free, time.monotonic()) + len(data) / self.rate
                self.sent += len(data)
                queue.put_nowait((self.free + self.trip / 2, data))
        queue.put_nowait((0.0, b""))
        await delivery

    async def deliver(self, queue, writer) -> None:
        with contextlib.suppress(OSError):
            while True:
                when, data = await queue.get()
                if not data:
                    break
                await asyncio.sleep(max(0.0, when - time.monotonic()))
                self.line.leave()
                writer.write(data)
        writer.close()


class Line(threading.Thread):
    """`port` of this host leads to `target`, at `rate` bytes a second each way and with a round trip of `trip` seconds.

    up: towards the target; down: back. used: seconds in which anything was on the way. When both ends are slow, and
    have nothing on the way, that is not the line's time, and not what is measured."""

    def __init__(self, target: int, rate: float, trip: float):
        super().__init__(daemon=True, name="line")
        self.target = target
        self.up = Way(self, rate, trip)
        self.down = Way(self, rate, trip)
        self.inside = 0  # pieces on the way
        self.since = 0.0
        self.over = 0.0  # seconds of the times before
        self.port = 0
        self.ready = threading.Event()
        self.loop = asyncio.new_event_loop()
        self.start()
        self.ready.wait(10)

    def enter(self) -> None:
        if not self.inside:
            self.since = time.monotonic()
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
        if not self.inside:
            self.over += time.monotonic() - self.since

    @property
    def used(self) -> float:
        if not self.inside:
            return self.over
        return self.over + time.monotonic() - self.since

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.listen())
        self.loop.run_forever()
        self.loop.run_until_complete(self.end())
        self.loop.close()

    async def end(self) -> None:
        self.server.close()
        carrying = asyncio.all_tasks() - {asyncio.current_task()}
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)

    async def listen(self) -> None:
        self.server = await asyncio.start_server(self.connected, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        self.ready.set()

    async def connected(self, reader, writer) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.target)
        with contextlib.suppress(asyncio.CancelledError):  # the test is over
            await asyncio.gather(self.up.carry(reader, back), self.down.carry(there, writer))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.join(timeout=10)
