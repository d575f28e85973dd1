"""How old a group is, on the learner's clock: offsets estimated over both transports, stamps that are not believed."""

import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import test_hub
from conftest import make_cfg
from test_hub import closed_behind, give, hand_over, until, weights
from test_wire import group

from delay import DelaySource, Ticket
from remote import account, clock, files_link, link, sampler, wire
from remote.clock import LearnerClock, made_at
from remote.groups import encode_group
from remote.sampler import SamplerFlags


@pytest.fixture
def made(tmp_path):
    yield from closed_behind(tmp_path)


def test_the_shortest_of_a_few_round_trips_tells_the_time():
    """The learner is 1000 s ahead. An answer that took 0.2 s on both ways is right; longer ones are wrong by half of
    the difference of their ways."""
    c = LearnerClock()
    assert c.offset == 0.0
    for there, back in ((3.0, 0.1), (0.2, 0.2), (0.1, 5.0)):
        c.answered(50.0, 1050.0 + there, 50.0 + there + back)
    assert c.offset == pytest.approx(1000.0)
    c.answered(50.0, 7.0, 49.0)  # the own clock was set back in between
    assert c.offset == pytest.approx(1000.0)
    for _ in range(clock.KEPT):  # the learner's clock was set anew
        c.answered(80.0, 2080.5, 81.0)
    assert c.offset == pytest.approx(2000.0)


def test_files_tell_the_time_by_the_clock_that_stamps_them():
    """The file system is 10 s behind us, the learner 1000 s ahead; each end is held up once before it writes."""
    c = LearnerClock()
    for late in (0.0, 4.0):
        c.stamped_there(1050.0, 40.0 + late)
    assert c.offset == 0.0  # half of it is not known yet
    for late in (3.0, 0.0):
        c.stamped_here(70.0, 60.0 + late)
    assert c.offset == pytest.approx(1000.0)


def test_no_group_is_from_the_future_or_older_than_its_weights():
    assert made_at(stamp=50.0, published=10.0, arrived=90.0) == 50.0
    assert made_at(stamp=1e9, published=10.0, arrived=90.0) == 90.0
    assert made_at(stamp=0.0, published=10.0, arrived=90.0) == 10.0


SKEW = 5000.0  # seconds that the sampler's clock is behind


def own_time():
    """What a sampler's thread sees when its host's clock is behind; every other thread of this process is right."""
    behind = threading.current_thread().name == "link"
    return time.time() - SKEW * behind


CLOCKS = SimpleNamespace(time=own_time, monotonic=time.monotonic, sleep=time.sleep)


def sampled(end):
    """The stamps that a sampler with this link gives to a group that it makes now, by its own clock."""
    own = time.time() - SKEW
    g = group()
    g.t_start, g.t_end = own - 2.0, own
    kept = []
    me = sampler.RemoteSampler.__new__(sampler.RemoteSampler)
    me.flags = SamplerFlags(groups=1)
    me.link, me.sampled, me.incarnation, me.busy = end, {"box": 0}, 1, 0.0
    me.source = SimpleNamespace(sample=lambda numbers: [g])
    me.hand_over = lambda stream, group, data: kept.append(group)
    me.sample_for("box", 1)
    return kept[0].t_start, kept[0].t_end


def test_a_sampler_stamps_its_groups_with_the_learners_time_over_a_socket(made, tmp_path, monkeypatch):
    h = made.hub()
    monkeypatch.setattr(link, "time", CLOCKS)
    spool = account.Spool(tmp_path / "spool", ["box"], 1)
    end = made.add(link.Link([h.address], ["box"], SamplerFlags(), spool, tmp_path, None))
    assert until(lambda: end.offset("box") != 0.0)
    assert end.offset("box") == pytest.approx(SKEW, abs=5.0)
    start, stop = sampled(end)
    assert stop == pytest.approx(time.time(), abs=5.0) and stop - start == pytest.approx(2.0)


def test_a_sampler_stamps_its_groups_with_the_learners_time_over_a_folder(made, tmp_path, monkeypatch):
    """The file system's clock is the learner's here."""
    monkeypatch.setattr(files_link, "time", CLOCKS)
    s = test_hub.source(tmp_path)
    s.publish(0, weights(0))
    spool = account.Spool(tmp_path / "rollouts", ["box"], 1)
    end = made.add(files_link.FilesLink(str(tmp_path), ["box"], SamplerFlags(), spool))
    assert until(lambda: end.newest is not None)
    assert end.offset("box") == pytest.approx(SKEW, abs=5.0)
    start, stop = sampled(end)
    assert stop == pytest.approx(time.time(), abs=5.0) and stop - start == pytest.approx(2.0)


@pytest.mark.parametrize("transport", ["zmq", "files"])
def test_the_window_counts_from_when_a_group_was_made(transport, made, tmp_path):
    """600 s of window. A group that was made 700 s ago and came just now is too old, one of 500 s is not."""
    s = test_hub.source(tmp_path, window_seconds=600.0, give_up=60.0)
    s.publish(0, weights(0))
    s.published = {0: s.published[0] - 3000.0}
    if transport == "zmq":
        s.hub = made.hub()
    for n, age in enumerate((700.0, 500.0)):
        if transport == "files":
            hand_over(tmp_path, s, n, t_end=time.time() - age)
        else:
            send(made.raw(s.hub), n, s.published[0], time.time() - age)
    assert [group.uid[2] for group in s.next(1, 0)] == [1]
    assert s.counts == {"window": 1, "trained": 1}


def send(peer, n, published, t_end):
    """Group n, made at t_end, comes over a socket."""
    peer.hello()
    one = replace(group(), uid=("box", 1, n), version=0, t_published=published, t_end=t_end)
    assert give(peer, encode_group(one), f"box/1/{n}")


def test_the_window_counts_from_when_a_group_was_made_in_the_simulation():
    s = DelaySource.__new__(DelaySource)
    s.cfg, s.dropped, s.decided, s.sampled = make_cfg(delay="constant", window_seconds=600.0), Counter(), Counter(), {}
    assert not s.still_wanted(Ticket(0, 0, made_at=300.0), 0, now=1000.0) and s.dropped == {"window": 1}
    assert s.still_wanted(Ticket(1, 0, made_at=500.0), 0, now=1000.0)


def test_a_remote_sampler_keeps_weights_for_its_delay(monkeypatch):
    """Ten seconds: what is published meanwhile waits."""
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
