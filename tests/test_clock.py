"""The age of a group on the learner's clock: clock offsets over both transports, bounds on stamps."""

import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import test_hub
from conftest import make_cfg
from test_hub import give, hand_over, opened_objects, until, weights
from test_wire import group

from delay import DelaySource, Ticket
from remote import account, clock, files_link, link, sampler, wire
from remote.clock import LearnerClock, made_at
from remote.groups import encode_group
from remote.sampler import SamplerFlags


@pytest.fixture
def opened(tmp_path):
    yield from opened_objects(tmp_path)


def test_the_offset_comes_from_the_shortest_round_trip():
    """The learner is 1000 s ahead. A round trip with equal ways gives the exact offset; unequal ways are wrong by half
    of their difference."""
    c = LearnerClock()
    assert c.offset == 0.0
    for there, back in ((3.0, 0.1), (0.2, 0.2), (0.1, 5.0)):
        c.answered(50.0, 1050.0 + there, 50.0 + there + back)
    assert c.offset == pytest.approx(1000.0)
    c.answered(50.0, 7.0, 49.0)  # the sampler's clock was set back in between
    assert c.offset == pytest.approx(1000.0)
    for _ in range(clock.KEPT):  # the learner's clock was set forward
        c.answered(80.0, 2080.5, 81.0)
    assert c.offset == pytest.approx(2000.0)


def test_the_offset_over_files_comes_from_the_file_systems_clock():
    """The file system is 10 s behind the sampler, the learner 1000 s ahead; each end is once late with a write."""
    c = LearnerClock()
    for late in (0.0, 4.0):
        c.stamped_there(1050.0, 40.0 + late)
    assert c.offset == 0.0  # only one half is known
    for late in (3.0, 0.0):
        c.stamped_here(70.0, 60.0 + late)
    assert c.offset == pytest.approx(1000.0)


def test_stamps_lie_between_publication_and_arrival():
    assert made_at(stamp=50.0, published=10.0, arrived=90.0) == 50.0
    assert made_at(stamp=1e9, published=10.0, arrived=90.0) == 90.0
    assert made_at(stamp=0.0, published=10.0, arrived=90.0) == 10.0


SKEW = 5000.0  # seconds that the sampler's clock is behind


def time_of_thread():
    """The sampler's thread sees a clock that is behind; each of the remaining threads sees the right time."""
    behind = threading.current_thread().name == "link"
    return time.time() - SKEW * behind


CLOCKS = SimpleNamespace(time=time_of_thread, monotonic=time.monotonic, sleep=time.sleep)


def sampled(end):
    """The stamps of a sampler with this link for a group made now."""
    now = time.time() - SKEW
    g = group()
    g.t_start, g.t_end = now - 2.0, now
    kept = []
    me = sampler.RemoteSampler.__new__(sampler.RemoteSampler)
    me.flags = SamplerFlags(groups=1)
    me.link, me.sampled, me.incarnation, me.busy = end, {"box": 0}, 1, 0.0
    me.source = SimpleNamespace(sample=lambda numbers: [g])
    me.hand_over = lambda stream, group, data: kept.append(group)
    me.sample_for("box", 1)
    return kept[0].t_start, kept[0].t_end


def test_samplers_stamp_groups_with_the_learners_time_over_a_socket(opened, tmp_path, monkeypatch):
    h = opened.hub()
    monkeypatch.setattr(link, "time", CLOCKS)
    spool = account.Spool(tmp_path / "spool", ["box"], 1)
    end = opened.add(link.Link([h.address], ["box"], SamplerFlags(), spool, tmp_path, None))
    assert until(lambda: end.offset("box") != 0.0)
    assert end.offset("box") == pytest.approx(SKEW, abs=5.0)
    start, stop = sampled(end)
    assert stop == pytest.approx(time.time(), abs=5.0) and stop - start == pytest.approx(2.0)


def test_samplers_stamp_groups_with_the_learners_time_over_a_folder(opened, tmp_path, monkeypatch):
    """The file system has the learner's clock."""
    monkeypatch.setattr(files_link, "time", CLOCKS)
    s = test_hub.source(tmp_path)
    s.publish(0, weights(0))
    spool = account.Spool(tmp_path / "rollouts", ["box"], 1)
    end = opened.add(files_link.FilesLink(str(tmp_path), ["box"], SamplerFlags(), spool))
    assert until(lambda: end.newest is not None)
    assert end.offset("box") == pytest.approx(SKEW, abs=5.0)
    start, stop = sampled(end)
    assert stop == pytest.approx(time.time(), abs=5.0) and stop - start == pytest.approx(2.0)


@pytest.mark.parametrize("transport", ["zmq", "files"])
def test_the_window_starts_when_a_group_is_made(transport, opened, tmp_path):
    """A window of 600 s: a group made 700 s ago is too old although it arrives now; 500 s are allowed."""
    s = test_hub.source(tmp_path, window_seconds=600.0, give_up=60.0)
    s.publish(0, weights(0))
    s.published = {0: s.published[0] - 3000.0}
    if transport == "zmq":
        s.hub = opened.hub()
    for n, age in enumerate((700.0, 500.0)):
        if transport == "files":
            hand_over(tmp_path, s, n, t_end=time.time() - age)
        else:
            send(opened.raw(s.hub), n, s.published[0], time.time() - age)
    assert [group.uid[2] for group in s.next(1, 0)] == [1]
    assert s.counts == {"window": 1, "trained": 1}


def send(peer, n, published, t_end):
    """Send group n, opened at t_end, over a socket."""
    peer.hello()
    one = replace(group(), uid=("box", 1, n), version=0, t_published=published, t_end=t_end)
    assert give(peer, encode_group(one), f"box/1/{n}")


def test_the_window_starts_when_a_group_is_made_in_the_simulation():
    s = DelaySource.__new__(DelaySource)
    s.cfg, s.dropped, s.decided, s.sampled = make_cfg(delay="constant", window_seconds=600.0), Counter(), Counter(), {}
    assert not s.still_wanted(Ticket(0, 0, made_at=300.0), 0, now=1000.0) and s.dropped == {"window": 1}
    assert s.still_wanted(Ticket(1, 0, made_at=500.0), 0, now=1000.0)


def test_a_remote_sampler_keeps_its_weights_for_a_delay(monkeypatch):
    """A delay of ten seconds: newer weights wait."""
    now, loaded = [0.0], []
    monkeypatch.setattr(sampler, "time", SimpleNamespace(monotonic=lambda: now[0]))
    me = sampler.RemoteSampler.__new__(sampler.RemoteSampler)
    me.flags = SamplerFlags(delay="constant", delay_min=1.0, delay_max=10.0)
    me.source = SimpleNamespace(load_weights=loaded.append)
    me.loaded, me.began, me.loading, me.hold_until, me.delays_drawn = None, None, 0.0, 0.0, 0
    me.streams, me.incarnation = ["box"], 1
    for version, at in enumerate((0.0, 5.0, 9.9, 10.0, 19.9, 20.0)):
        now[0] = at
        assert me.load_newest(wire.ReceivedWeights(version, 0.0, None))
    assert [weights.version for weights in loaded] == [0, 3, 5] and me.delays_drawn == 3
