"""How much to ask for before it is answered: bytes in flight follow bandwidth x round trip. HeteroRL, section 4.2.

Whoever pulls decides how much is under way (wire.py). Too little, and a long line stands idle between an answer and the
next ask; too much, and a slow line is filled with what may not be wanted any more, and everything else waits behind it.
A `Pace` measures one connection by its answers, and keeps so many bytes in flight:

    window     = 2 rate trip                            bytes, between LEAST and MOST; FIRST before the first answer
    rate       = max (answered(t2) - answered(t1)) / (t2 - t1)      over the last PROBE seconds or two: bytes a second
    trip       = min (answer - ask)                                 seconds, since the line was empty last

The two are measured apart, as in BBR (Cardwell et al. 2016): a window that is too small shows the trip of an idle
line, one that is too large the rate of a full one. As long as the window limits the rate, a round trip doubles it, so
it grows like TCP in slow start. What waits in a queue makes every trip longer, so every PROBE seconds the line is left
to run empty, and the next answer tells the trip anew: that costs one round trip.

A connection keeps the order of its messages, and the other end answers asks in order. So an ask is lost when a later
one was answered, and asked again at once. Where nothing comes at all, everything is asked again, and slow start begins
anew, after

    timeout    = 2^repeats max(patience, 2 (mean trip + 4 mean deviation))      seconds without any answer

with the trips as they are, queues and all: on a slow line that is many times the time of an answer, so nothing is sent
twice because it is slow. An answer to what was asked twice measures nothing, and shortens no timeout (Karn and
Partridge 1987).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

MIB = 1 << 20
FIRST = 4 * MIB  # bytes in flight before anything is measured
LEAST = 2 * MIB
MOST = 256 * MIB  # a line of 1,000 MB/s and 200 ms holds 200 MB
ASKS = 8  # in a window, where an ask may be that large
PROBE = 10.0  # seconds between two measurements of an empty line
MOST_REPEATS = 6  # doublings of the timeout


@dataclass
class Open:
    """An ask that is not answered yet."""

    nbytes: int
    at: float  # when it was asked
    answered: int  # bytes that had been answered by then
    since: float  # when the last of them came; `at`, where nothing was under way
    alone: bool  # nothing was under way
    again: bool  # it was asked before


class Pace:
    """The bytes in flight on one connection. Seconds are those of one clock, whichever.

    patience: seconds without any answer after which everything is asked again, at least. most: bytes of one ask."""

    def __init__(self, patience: float = 10.0, most: int = 8 * MIB):
        self.patience = patience
        self.most = most
        self.line: dict = {}  # key of an ask -> Open, in the order in which they were asked
        self.in_flight = 0  # bytes
        self.answered = 0  # bytes, ever
        self.answered_at = 0.0  # when something of it came last
        self.heard_at = 0.0  # the same of any answer, be it one that is not waited for any more
        self.emptied = 0.0  # when the line was empty last
        self.aged = 0.0  # when `rates` was last moved on
        self.rates = [0.0, 0.0]  # the largest of the last two periods of at least PROBE seconds, bytes a second
        self.trip = 0.0  # seconds; 0: not measured yet
        self.mean_trip = 0.0
        self.deviation = 0.0
        self.repeats = 0  # timeouts since the last answer to what was asked once

    @property
    def window(self) -> int:
        """Bytes that may be in flight."""
        if not max(self.rates):
            return LEAST if self.repeats else FIRST
        return int(min(MOST, max(LEAST, 2 * max(self.rates) * self.trip)))

    @property
    def timeout(self) -> float:
        """Seconds without any answer after which what is in flight is lost."""
        longest = 2 * (self.mean_trip + 4 * self.deviation)
        return max(self.patience, longest) * 2 ** min(self.repeats, MOST_REPEATS)

    def size(self, now: float) -> int:
        """Bytes to ask for next; 0: nothing now."""
        if self.line and (self.in_flight >= self.window or now - self.emptied > PROBE):
            return 0
        return min(self.most, self.window // ASKS)

    def ask(self, key, nbytes: int, now: float, again: bool) -> None:
        """Note that so many bytes were asked for."""
        alone = not self.line
        if alone:
            self.emptied = self.answered_at = now
            if now - self.aged > PROBE:
                self.aged = now
                self.rates = [self.rates[1], 0.0]
        self.line[key] = Open(nbytes, now, self.answered, self.answered_at, alone, again)
        self.in_flight += nbytes

    def forget(self, key) -> None:
        """No answer to this ask is waited for."""
        ask = self.line.pop(key, None)
        if ask is not None:
            self.in_flight -= ask.nbytes

    def heard(self, now: float) -> None:
        """Something came: the line is not dead."""
        self.heard_at = now

    def answer(self, key, now: float) -> list:
        """Note that this ask was answered. The keys of those before it, which are lost, newest first."""
        if key not in self.line:
            return []
        lost = [*itertools.takewhile(lambda other: other != key, self.line)][::-1]
        for other in lost:
            self.forget(other)
        ask = self.line[key]
        self.forget(key)
        self.answered += ask.nbytes
        self.answered_at = now
        if not ask.again:
            self.repeats = 0
            self._measure(ask, now)
        return lost

    def _measure(self, ask: Open, now: float) -> None:
        trip = now - ask.at
        if ask.alone or not self.trip or trip < self.trip:
            self.trip = trip
        if not self.mean_trip:
            self.mean_trip = trip
            self.deviation = trip / 2
        self.deviation += (abs(trip - self.mean_trip) - self.deviation) / 4  # RFC 6298
        self.mean_trip += (trip - self.mean_trip) / 8
        rate = (self.answered - ask.answered) / max(1e-6, now - ask.since)
        self.rates[1] = max(self.rates[1], rate)

    def overdue(self, now: float) -> list:
        """The keys of all asks, when nothing has come for too long: they are lost. Newest first."""
        first = next(iter(self.line.values()), None)
        if first is None or now - max(first.at, self.heard_at) <= self.timeout:
            return []
        lost = list(self.line)[::-1]
        for key in lost:
            self.forget(key)
        self.repeats += 1
        self.rates = [0.0, 0.0]
        return lost
