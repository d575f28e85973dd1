"""The age of a group on the learner's clock: clock offsets over both transports, bounds on stamps."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_hub import opened, started, until
from test_wire import group

from remote import clock, files_link, link, sampler, wire
from remote.clock import LearnerClock, made_at
from remote.sampler import SamplerFlags

__all__ = ["opened"]  # a fixture


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
    assert [made_at(stamp, published=10.0, arrived=90.0) for stamp in (50.0, 1e9, 0.0)] == [50.0, 90.0, 10.0]


SKEW = 5000.0  # seconds that the sampler's clock is behind


def time_of_thread():
    """The sampler's thread sees a clock that is behind; each of the remaining threads sees the right time."""
    behind = threading.current_thread().name == "link"
    return time.time() - SKEW * behind


CLOCKS = SimpleNamespace(time=time_of_thread, monotonic=time.monotonic, sleep=time.sleep)


@pytest.mark.parametrize("transport", [link, files_link])
def test_samplers_stamp_groups_with_the_learners_time(transport, opened, tmp_path, monkeypatch):
    """The file system has the learner's clock."""
    monkeypatch.setattr(transport, "time", CLOCKS)
    if transport is link:
        end = opened.link(opened.hub(), tmp_path)
    else:
        started(tmp_path)
        end = opened.folder_link(tmp_path)
    assert until(lambda: end.offset("box") != 0.0)
    assert end.offset("box") == pytest.approx(SKEW, abs=5.0)
    now, kept = time.time() - SKEW, []
    me = sampler.RemoteSampler.__new__(sampler.RemoteSampler)
    me.link, me.sampled, me.incarnation, me.busy = end, {"box": 0}, 1, 0.0
    me.source = SimpleNamespace(sample=lambda numbers: [replace(group(), t_start=now - 2.0, t_end=now)])
    me.hand_over = lambda stream, group, data: kept.append(group)
    me.sample_for("box", 1)
    assert kept[0].t_end == pytest.approx(time.time(), abs=5.0)
    assert kept[0].t_end - kept[0].t_start == pytest.approx(2.0)


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
