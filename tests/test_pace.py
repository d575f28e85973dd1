"""Bytes in flight: a line of any bandwidth and round trip is full. A model of the line, exact; then a real one."""

import heapq
import math
import os

import pytest
from test_hub import closed_behind, until

from remote import account, link, pace, wire
from remote.line import Line
from remote.pace import Pace
from remote.sampler import SamplerFlags

MIB = 1 << 20


class Trusting(wire.Pull):
    """A pull that takes every leaf as good, so that gigabytes need not be hashed."""

    def _is_good(self, i, leaf):
        return True


class Nowhere:
    """A sink without a place."""

    def __setitem__(self, at, data):
        pass


def pull_of(nbytes, pace):
    leaves = -(-nbytes // wire.LEAF)
    return Trusting(wire.Manifest("x", nbytes, [b""] * leaves), Nowhere(), pace)


class LineModel:
    """A line as a function of time: asks take half the round trip, answers leave one after the other at `rate` bytes a
    second, and take the other half. lose: numbers of answers that are lost."""

    def __init__(self, rate, trip, lose=()):
        self.rate = rate
        self.trip = trip
        self.lose = set(lose)
        self.free = 0.0  # when the answer asked for last has left
        self.busy = 0.0
        self.sent = 0
        self.answers = 0
        self.coming = []  # (when it is here, number, pull, first, bytes)

    def ask(self, pull, first, count, now):
        nbytes = min((first + count) * wire.LEAF, pull.of.nbytes) - first * wire.LEAF
        self.busy += nbytes / self.rate
        self.sent += nbytes
        self.free = max(self.free, now + self.trip / 2) + nbytes / self.rate
        if self.answers not in self.lose:
            heapq.heappush(self.coming, (self.free + self.trip / 2, self.answers, pull, first, nbytes))
        self.answers += 1


def fetch(pulls, line, now=0.0, until=math.inf):
    """Pull everything over the model of a line; both ends look at least four times a second. The time then."""
    while now < until and not all(pull.done for pull in pulls):
        for pull in pulls:
            while (leaves := pull.ask(now)) is not None:
                line.ask(pull, *leaves, now)
        if not line.coming or line.coming[0][0] > now + 0.25:
            now += 0.25
            continue
        now, _, pull, first, _ = heapq.heappop(line.coming)
        pull.put(first, b"", now)
    return now


@pytest.mark.parametrize("most", [8 * MIB, MIB], ids=["weights", "groups"])
@pytest.mark.parametrize("trip", [0.010, 0.200])
@pytest.mark.parametrize("rate", [10e6, 30e6, 100e6, 300e6, 1000e6])
def test_a_line_of_any_bandwidth_and_round_trip_is_full(rate, trip, most):
    """At least 80 % of ten seconds of the line from a cold start, and little stands in its queue."""
    size = int(10 * rate)
    line, p = LineModel(rate, trip), Pace(most=most)
    seconds = fetch([pull_of(size, p)], line)
    assert line.sent == size and size / rate / seconds >= 0.8, size / rate / seconds
    assert p.window <= 2.2 * rate * trip + 4 * most or p.window == pace.LEAST
    assert p.window <= pace.MOST


@pytest.mark.parametrize("rate", [0.25e6, 1e6])
def test_a_slow_line_is_sent_nothing_twice(rate):
    """40 MiB, whose first answers take longer than --patience one after the other; then 40 groups of 1 MiB."""
    for pulls in (1, 40):
        line, p = LineModel(rate, 0.2), Pace()
        parts = [pull_of(40 * MIB // pulls, p) for _ in range(pulls)]
        seconds = fetch(parts, line)
        assert line.sent <= 1.05 * 40 * MIB and 40 * MIB / rate / seconds >= 0.9, (line.sent, seconds)
        assert p.window <= 3 * MIB


@pytest.mark.parametrize("rate", [0.04e6, 0.1e6])
def test_a_line_whose_first_answer_takes_longer_than_patience_is_learnt(rate):
    """26 s and 10.5 s for a leaf, and --patience is 10 s: only what was asked for in the first minute is sent twice."""
    line, p = LineModel(rate, 0.2), Pace()
    fetch([pull_of(60 * MIB, p)], line)
    assert 0 < line.sent - 60 * MIB <= pace.FIRST + pace.LEAST and p.timeout > MIB / rate


def test_a_line_that_changes_is_measured_again():
    """Ten times the round trip, then a tenth of the bandwidth: it is full again after two probes, and not flooded."""
    line, p = LineModel(50e6, 0.02), Pace()
    pull = pull_of(int(50e6 * 400), p)
    end = fetch([pull], line, until=30.0)
    line.trip = 0.2
    end = fetch([pull], line, end, end + 30.0)
    before = line.sent
    end = fetch([pull], line, end, end + 20.0)
    assert (line.sent - before) / (20.0 * 50e6) >= 0.8 and 20e6 <= p.window <= 60e6
    line.rate = 5e6
    fetch([pull], line, end, end + 60.0)
    assert p.window <= 8e6


def test_a_lost_answer_is_asked_for_again_at_once():
    """When a later one comes, and not after --patience; the last one of all is missed by the clock."""
    size = 200 * MIB
    whole, holes, tail = LineModel(100e6, 0.05), LineModel(100e6, 0.05, lose=[3, 40, 41]), LineModel(100e6, 0.05, [10])
    seconds = fetch([pull_of(size, Pace(most=MIB))], whole)
    with_holes = fetch([pull_of(size, Pace(most=MIB))], holes)
    assert holes.sent == whole.sent + 3 * MIB and with_holes < seconds + 0.2
    assert 10.0 < fetch([pull_of(11 * MIB, Pace(most=MIB))], tail) < 10.5 and tail.sent == 12 * MIB


def test_silence_is_waited_for_longer_each_time():
    p = Pace(patience=3.0)
    pull = pull_of(MIB, p)
    asked = [now / 10 for now in range(1000) if pull.ask(now / 10)]
    assert asked == pytest.approx([0, 3, 9, 21, 45, 93], abs=0.6)
    pull.put(0, b"", 100.0)
    assert pull.done and p.repeats == 5 and p.trip == 0.0 and not p.line and p.in_flight == 0  # it measures nothing


def test_what_is_not_wanted_any_more_leaves_room():
    p = Pace(most=MIB)
    gone, other = pull_of(9 * MIB, p), pull_of(9 * MIB, p)
    while gone.ask(0.0):
        pass
    assert p.in_flight == pace.FIRST and other.ask(0.0) is None
    gone.forget_asked()
    assert p.in_flight == 0 and other.ask(0.0) == (0, 1)
    gone.put(0, b"", 1.0)  # too late
    assert p.in_flight == MIB and len(gone.missing) == 9


# A real line, real ends. Machines are slower than the lines above, so these are narrow ones.


@pytest.fixture
def made(tmp_path):
    yield from closed_behind(tmp_path)


def far_sampler(made, h, rate, trip, tmp_path, sizes=(), **changes):
    """The line to a hub, and a sampler's end behind it that has said hello, with groups of these sizes to offer."""
    line = made.add(Line(int(h.address.rpartition(":")[2]), rate, trip))
    spool = account.Spool(tmp_path / "spool", ["box"], 1)
    for n, size in enumerate(sizes):
        spool.hand_over("box", f"box/1/{n}", os.urandom(size))
    flags = SamplerFlags(**changes)
    end = made.add(link.Link([f"tcp://127.0.0.1:{line.port}"], ["box"], flags, spool, tmp_path, None))
    assert until(lambda: h.peers)
    return line, end


def test_weights_fill_a_real_line(made, tmp_path):
    """64 MiB from a cold start over 16 MB/s and 200 ms: 3.2 MB are on the way. A busy machine may try again."""
    h = made.hub()
    line, end = far_sampler(made, h, 16e6, 0.2, tmp_path)
    shares = []
    while len(shares) < 6 and max(shares, default=0.0) < 0.8:
        version, busy, used = len(shares) + 1, line.down.busy, line.used
        path = tmp_path / f"v{version:06d}.safetensors"
        path.write_bytes(os.urandom(64 * MIB))
        h.broadcast(version, path, float(version))
        assert until(lambda: end.newest is not None and end.newest.version == version, within=120)  # noqa: B023
        shares.append((line.down.busy - busy) / (line.used - used))
    assert max(shares) >= 0.8, shares
    assert h.counts["bytes_out"] == 64 * MIB * len(shares)


def test_groups_fill_a_real_line(made, tmp_path):
    """The other way, groups of all sizes, one after the other; from the third on. A busy machine may try again."""
    h = made.hub(max_tokens=1 << 20)
    sizes = [3 * MIB + 7, 100_000, MIB, 40_000, 7 * MIB, 5] * 12
    line, _ = far_sampler(made, h, 8e6, 0.2, tmp_path, sizes)
    shares = []
    for first in range(3, 60, 18):  # three rounds of the sizes at a time, 35 MB
        assert until(lambda: h.counts["received"] >= first, within=60)  # noqa: B023
        busy, used = line.up.busy, line.used
        assert until(lambda: h.counts["received"] >= first + 18, within=120)  # noqa: B023
        shares.append((line.up.busy - busy) / (line.used - used))
        if shares[-1] >= 0.8:
            break
    assert max(shares) >= 0.8, shares
    assert line.up.sent <= 1.05 * sum(sizes)


def test_a_real_slow_line_is_sent_nothing_twice(made, tmp_path):
    """0.25 MB/s: the second leaf comes after 8.4 s, and --patience is 5."""
    h = made.hub()
    line, end = far_sampler(made, h, 0.25e6, 0.2, tmp_path, patience=5.0)
    (tmp_path / "v000001.safetensors").write_bytes(os.urandom(2 * MIB))
    h.broadcast(1, tmp_path / "v000001.safetensors", 1.0)
    assert until(lambda: end.newest is not None, within=60)
    assert line.down.sent <= 1.05 * 2 * MIB
