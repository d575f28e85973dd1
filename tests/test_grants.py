"""--admission=pace with real samplers: nothing becomes too old, nobody who dies or lies starves the run."""

import contextlib
import itertools
import logging
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import make_cfg
from test_hub import closed_behind, hand_over, until, weights
from test_wire import group, limits

from flags import UserError
from learner import Comm
from remote import account, files, files_link, grants, hub, link, sampler, source, wire
from remote.grants import Ask, Grants
from remote.groups import name_of
from remote.sampler import SamplerFlags
from sampling import Sampling


@pytest.fixture
def made(tmp_path):
    yield from closed_behind(tmp_path)


def paced(groups=2, updates=1, room=10**9, owner=lambda stream: stream, **changes):
    """Grants of a learner whose batches have so many groups, and so many updates."""
    settings = dict(max_staleness=3, sync_every=1, grant_seconds=100.0, group_size=4) | changes
    cfg = SimpleNamespace(rollout_batch=4 * groups, train_batch=4 * groups // updates, **settings)
    return Grants(cfg, 1, room, owner)


def asks(g, stream, wants, version=0, handed=0, incarnation=1):
    g.ask(stream, Ask(incarnation, handed, wants, version))
    return g.give().get(stream, (0, handed))[1] - handed


# -- the rule ----------------------------------------------------------------------------------------------------------


def usable(versions, at, bound, updates, groups):
    """Whether all can be used in time, by trying every order in which they could be."""
    for order in set(itertools.permutations(versions)):
        ages = [at + updates * (i // groups) - version for i, version in enumerate(order)]
        if all(age <= bound for age in ages):
            return True
    return False


def test_what_is_granted_can_be_used_in_time_by_enumeration():
    r = random.Random(0)
    seen = Counter()
    for _ in range(300):
        updates, groups, bound = r.choice([1, 2]), r.choice([1, 2]), r.randrange(5)
        g = paced(groups, updates, max_staleness=bound)
        at = updates * r.randrange(3, 6)
        versions = [at - r.randrange(bound + 3) for _ in range(r.randrange(1, 6))]
        expected = usable(versions, at, bound, updates, groups)
        assert g._in_time(versions, at, groups) == expected
        seen[expected] += 1
    assert min(seen.values()) > 50


def test_how_many_are_granted_by_hand():
    """S = 3, one update a batch, e = 1: w = 1. Two batches of two groups, by weights at most two updates old."""
    g = paced()
    g.plan(3, 0)
    g.newest = 3
    assert asks(g, "old", 9, version=0) == 0  # one batch is left for it, and it may have to wait for one
    g.gone("old")
    assert asks(g, "box", 1, version=1) == 1
    assert asks(g, "box", 9, version=1) == 0 and g.granted["box"] == (1, 1)  # it has not begun that one
    assert asks(g, "box", 9, version=1, handed=1) == 3
    g.came("box/1/0", here=True)
    g.came("box/1/7", here=False)  # nobody was granted that
    g.plan(3, 1)
    assert asks(g, "box", 9, version=3, handed=4) == 0  # the one that is here is not used
    g.plan(4, 0)
    g.newest = 0
    assert asks(g, "box", 9, version=99, handed=4) == 0  # nobody has weights that are not published
    g.newest = 3
    assert asks(g, "box", 9, version=99, handed=4) == 1
    assert g.open["box/1/4"].version == 3


def test_when_to_wait_by_hand():
    """S = 1: at version 1 a group of version 0 has to be in this batch, one of version 1 in this or the next."""
    g = paced(max_staleness=1)
    assert g.may_take([1], 1, 1)
    assert asks(g, "box", 1) == 1
    assert not g.may_take([1], 1, 1) and g.may_take([1], 1, 2)
    assert g.may_take([1], 0, 1)  # a batch earlier it may be in the next
    assert g.may_take([-1, 1], 1, 1)  # it is too old and will be dropped
    assert g.may_take([0, 1], 1, 1)  # one of two is lost, whatever comes first


@pytest.mark.parametrize("room, groups", [(5, 5), (1, 2)])
def test_no_more_is_granted_than_there_is_room_for(room, groups):
    g = paced(room=room, max_staleness=20)
    assert asks(g, "box", 99) == groups  # but a batch


def test_one_update_after_the_other_with_a_bound_of_zero():
    g = paced(max_staleness=0)
    assert asks(g, "box", 9) == 2
    g.came("box/1/0", here=False)
    g.came("box/1/1", here=False)
    g.plan(1, 0)
    assert asks(g, "box", 9, version=0, handed=2) == 0
    g.newest = 1
    assert asks(g, "box", 9, version=1, handed=2) == 2


SLOWNESS = {"a": 1, "b": 5, "c": 60}


class Play:
    """A learner and three samplers of unequal speed, in turns of a clock. wait: as may_take says."""

    def __init__(self, seed, wait=True):
        self.r = r = random.Random(seed)
        self.wait = wait
        self.bound, self.updates, self.groups = r.randrange(1, 9), r.choice([1, 2]), r.choice([1, 3])
        self.every = r.randrange(1, self.bound + 2)
        self.g = paced(self.groups, self.updates, max_staleness=self.bound, sync_every=self.every)
        self.making = {}  # name -> (when it is done, version)
        self.ready, self.batch = [], []  # versions
        self.handed, self.has = Counter(), dict.fromkeys(SLOWNESS, 0)
        self.at = self.dropped = self.waits = 0
        for t in range(1500):
            self.sample(t)
            self.learn()
        assert self.at > 5

    def sample(self, t):
        for name in [name for name, (done, _) in self.making.items() if done <= t]:
            self.ready.append(self.making.pop(name)[1])
            self.g.came(name, here=True)
        for box in SLOWNESS:
            if self.r.random() < 0.3:
                self.has[box] = self.g.newest
            if not any(name.startswith(box) for name in self.making):
                self.g.ask(box, Ask(1, self.handed[box], self.r.choice([1, 4]), self.has[box]))
        for box, (_, upto) in self.g.give().items():
            for n in range(self.handed[box], upto):
                self.making[f"{box}/1/{n}"] = (t + self.r.randrange(1, 3 * SLOWNESS[box]), self.has[box])
            self.handed[box] = upto

    def learn(self):
        self.ready.sort()
        while self.ready and len(self.batch) < self.groups:
            if self.wait and not self.g.may_take(self.ready, self.at, self.groups - len(self.batch)):
                self.waits += 1
                break
            version = self.ready.pop(0)
            self.dropped += self.at - version > self.bound
            if self.at - version <= self.bound:
                self.batch.append(version)
        most = self.groups * (1 + (self.bound - self.every + 1) // (2 * self.updates))
        assert len(self.ready) + len(self.batch) + len(self.g.open) <= most
        if len(self.batch) == self.groups and self.r.random() < 0.5:  # an update takes a while
            self.at, self.batch = self.at + self.updates, []
            if self.at - self.g.newest >= self.every:
                self.g.newest = self.at
        self.g.plan(self.at, len(self.ready) + len(self.batch))


def test_nothing_becomes_too_old_however_long_it_takes():
    plays = [Play(seed) for seed in range(12)]
    assert sum(play.dropped for play in plays) == 0 < sum(play.waits for play in plays)
    assert sum(Play(seed, wait=False).dropped for seed in range(12)) > 0  # were it not for the waiting


# -- who dies, lies, or takes all --------------------------------------------------------------------------------------


def test_grants_lapse_and_who_lets_them_waits_twice_as_long_each_time(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(grants, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    g = paced(max_staleness=0)
    assert asks(g, "dead", 2) == 2
    g.forgive(30.0)
    clock[0] += 129.0  # thirty seconds were ours
    g.expire()
    assert asks(g, "box", 1) == 0
    clock[0] += 2.0
    g.expire()
    assert g.give() == {"box": (1, 1)} and g.lapsed == 2
    assert asks(g, "dead", 1, handed=2) == 0
    clock[0] += 102.0  # as long as it had held them
    assert asks(g, "dead", 1, handed=2) == 1
    g.gone("dead")
    assert asks(g, "dead", 1, handed=3) == 1  # it had held that for no time
    clock[0] += 7.0
    assert asks(g, "dead", 1, incarnation=2) == 0 and g.lapsed == 4  # a new life makes nothing that the last began
    clock[0] += 27.9
    assert asks(g, "dead", 1, incarnation=2) == 0
    clock[0] += 0.2
    assert asks(g, "dead", 1, incarnation=2) == 1
    assert g.ask("dead", Ask(1, 0, 5, 0)) == 0 and not g.asks  # a message of its last life


def test_a_lapse_is_forgotten_after_so_many_groups(monkeypatch):
    monkeypatch.setattr(grants, "FORGIVE", 3)
    g = paced()
    asks(g, "box", 1)
    g.gone("box")
    assert g.lapses["box"] == 1
    for n in range(3):
        g.paused.clear()
        asks(g, "box", 1, handed=n)
        g.came(f"box/1/{n}", here=False)
    assert g.lapses["box"] == 0


def test_nobody_takes_more_than_its_share_and_who_waits_longest_is_first():
    g = paced(groups=4, max_staleness=0, owner=account.without_rank)
    assert asks(g, "greedy.0", 1) == 1
    g.ask("greedy.1", Ask(1, 0, 9, 0))  # of the same owner
    g.ask("box", Ask(1, 0, 9, 0))
    assert g.give() == {"greedy.1": (1, 1), "box": (1, 2)}
    g.ask("late", Ask(1, 0, 9, 0))
    g.ask("box", Ask(1, 2, 9, 0))
    g.ask("greedy.0", Ask(1, 1, 9, 0))
    assert g.give() == {}
    g.came("greedy.1/1/0", here=False)
    assert g.give() == {"late": (1, 1)}


def test_what_anybody_can_make_grow_is_bounded(monkeypatch):
    monkeypatch.setattr(grants, "MOST_ASKS", 5)
    monkeypatch.setattr(grants, "MOST_OWNERS", 4)
    g = paced()
    for n in range(50):
        asks(g, f"box{n}", 10**17, version=10**17, handed=10**17)
        if n % 2:
            g.gone(f"box{n}")
    assert len(g.asks) <= len(g.granted) <= 5 and len(g.open) <= g.places
    assert len(g.lapses) <= 4 and len(g.paused) <= 4


# -- real links, hubs and loops ----------------------------------------------------------------------------------------


class Maker:
    """In the place of a SamplerSource: an engine that takes as long as its responses are long."""

    def __init__(self, seconds, lengths):
        self.seconds = seconds
        self.lengths = lengths
        self.made = {}  # name -> length
        self.owner = ("", 0)
        self.go_on = threading.Event()
        self.go_on.set()

    def load_weights(self, newest):
        self.newest = newest

    def sample(self, numbers):
        version, published = self.newest.version, self.newest.published
        self.go_on.wait()
        groups = []
        for n in numbers:
            length = self.lengths[n % len(self.lengths)]
            time.sleep(self.seconds * length)
            now = time.time()
            one = replace(group(), uid=(*self.owner, n), version=version, t_published=published, t_start=now, t_end=now)
            self.made[name_of(one.uid)] = length
            groups.append(one)
        return groups


class Loop(threading.Thread):
    """A sampler's own loop, over either transport."""

    def __init__(self, name, address, folder, maker):
        super().__init__(daemon=True)
        self.flags = SamplerFlags(groups=4, patience=1.0, give_up=60.0)
        (folder / name).mkdir()
        if "://" in address:
            spool = account.Spool(folder / name / "spool", [name], 1)
            self.link = link.Link([address], [name], self.flags, spool, folder / name, None)
        else:
            spool = account.Spool(folder / "rollouts", [name], 1)
            self.link = files_link.FilesLink(address, [name], self.flags, spool)
        self.connection = sampler.Connection(self.link, spool, [name], folder)
        self.maker = maker
        self.start()

    def run(self):
        with contextlib.suppress(UserError):  # `close` ends it
            welcome = sampler.first_welcome(self.link)
            self.maker.owner = (self.name_of_stream, 1)
            sampler.Sampler(self.flags, self.connection, welcome, self.maker, 1).run()

    @property
    def name_of_stream(self):
        return self.connection.streams[0]

    def close(self):
        self.link.error = "the test is over"
        self.maker.go_on.set()
        self.join(timeout=20)
        self.link.close()


def learner(made, folder, transport, **changes):
    """The learner's real end."""
    settings = dict(admission="pace", samplers=transport, sync_path=str(folder), rollout_batch=8, train_batch=8)
    cfg = make_cfg(**{**settings, "group_size": 4, "give_up": 60.0, **changes})
    bounds = limits(group())
    log = logging.getLogger(f"grants.{folder}")
    log.propagate = False
    welcome = replace_welcome(run={"world": 1, "paced": cfg.admission == "pace"})
    if transport == "zmq":
        end = made.add(hub.Hub("tcp://127.0.0.1:*", "none", welcome, bounds, log))
    else:
        end = files.FilesHub(str(folder), welcome, bounds, log)
    return source.RemoteSource(end, cfg, bounds, Sampling(), folder / "versions", Comm(), log)


def replace_welcome(**changes):
    return wire.Welcome(wire.PROTOCOL, "session", **{"setup": {}, **changes})


def train(s, updates, most=1):
    """So many updates, and the names of the groups that were trained on. most: groups that are asked for at once."""
    names = []
    for version in updates:
        s.publish(version, weights(version))
        got = s.next(2, version)
        assert len(got) == 2, s.error
        names += [name_of(one.uid) for one in got]
    return names


@pytest.mark.parametrize("transport", ["zmq", "files"])
@pytest.mark.parametrize("bound", [0, 3])
def test_samplers_of_unequal_speed_lose_nothing(bound, transport, made, tmp_path):
    """One in three groups takes thirty times as long as the others, and one sampler is slower than the other. What is
    trained on is what was made."""
    s = learner(made, tmp_path, transport, max_staleness=bound)
    makers = [Maker(0.0005, [1, 30, 1]), Maker(0.005, [30, 1, 1])]
    boxes = [made.add(Loop(f"box{i}", s.hub.address, tmp_path, maker)) for i, maker in enumerate(makers)]
    names = train(s, range(20))
    made_by = {**makers[0].made, **makers[1].made}
    assert s.counts == {"trained": 40} and s.metrics()["remote/lapsed"] == 0
    assert all(f"box{i}/1/{n}" in names for i, n in ((0, 1), (1, 0)))  # long ones are among them
    for box in boxes:
        box.close()
    assert set(names) <= set(made_by) and len(made_by) - len(names) <= s.grants.places


def test_without_pace_long_ones_are_lost(made, tmp_path):
    s = learner(made, tmp_path, "zmq", max_staleness=1, admission="drop")
    makers = [Maker(0.0005, [1]), Maker(0.02, [30])]
    for i, maker in enumerate(makers):
        made.add(Loop(f"box{i}", s.hub.address, tmp_path, maker))
    versions = itertools.count()
    assert until(lambda: train(s, [next(versions)]) and s.counts["staleness"] > 0)


@pytest.mark.parametrize("transport", ["zmq", "files"])
def test_a_sampler_that_never_hands_over_starves_nobody(transport, made, tmp_path, monkeypatch):
    """It has all the groups that are granted, and its link is alive."""
    s = learner(made, tmp_path, transport, max_staleness=1, grant_seconds=1.0)
    stuck, honest = Maker(0.0, [1]), Maker(0.0, [1])
    stuck.go_on.clear()
    made.add(Loop("stuck", s.hub.address, tmp_path, stuck))
    s.publish(0, weights(0))
    s.hub.plan(0, 0)
    assert until(lambda: s.hub.plan(0, 0) or len(s.grants.open) == 2)
    made.add(Loop("box", s.hub.address, tmp_path, honest))
    names = train(s, range(8))
    assert all(name.startswith("box/") for name in names) and s.metrics()["remote/lapsed"] >= 2
    stuck.go_on.set()  # what it made is taken as any other is: as long as it is young enough
    train(s, range(8, 12))
    assert until(lambda: s.next(1, 11) and s.counts["staleness"] == 2)


@pytest.mark.parametrize("transport", ["zmq", "files"])
def test_a_sampler_that_is_silent_keeps_no_grant(transport, made, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "SILENT", 2.0)
    monkeypatch.setattr(files, "SILENT", 5.0)
    s = learner(made, tmp_path, transport, max_staleness=0)
    dead, honest = Maker(0.0, [1]), Maker(0.0, [1])
    dead.go_on.clear()
    gone = made.add(Loop("dead", s.hub.address, tmp_path, dead))
    s.publish(0, weights(0))
    assert until(lambda: s.hub.plan(0, 0) or len(s.grants.open) == 2)
    gone.link.stopping = True
    made.add(Loop("box", s.hub.address, tmp_path, honest))
    names = train(s, range(5))
    assert all(name.startswith("box/") for name in names) and s.metrics()["remote/lapsed"] == 2


def test_groups_that_nobody_granted_are_taken_too(made, tmp_path):
    """A spool of before holds more than is granted; what of it is too old is dropped, as ever."""
    s = learner(made, tmp_path, "files", max_staleness=1)
    s.publish(0, weights(0))
    for n in range(6):
        hand_over(tmp_path, s, n)
    assert [len(s.next(2, version)) for version in (0, 1)] == [2, 2]
    s.cfg = replace(s.cfg, give_up=0.2)
    assert s.next(1, 2) == [] and s.counts == {"trained": 4, "staleness": 2}


def test_a_grant_of_another_life_is_none(made, tmp_path):
    """Neither what a folder still holds, nor what a learner of before has said."""
    s = learner(made, tmp_path, "files", max_staleness=1)
    s.publish(0, weights(0))
    spool = account.Spool(tmp_path / "rollouts", ["box"], 7)
    end = made.add(files_link.FilesLink(str(tmp_path), ["box"], SamplerFlags(), spool))
    grant = tmp_path / "grants" / "box"
    account.write_atomically(grant, wire.encode(wire.Grant(6, 5)))
    end._read_fetched_of("box")
    assert end.granted("box") == 0
    account.write_atomically(grant, wire.encode(wire.Grant(7, 5)))
    assert until(lambda: end.granted("box") == 5)
    learner(made, tmp_path, "files", max_staleness=1).publish(0, weights(0))
    assert until(lambda: end.granted("box") == 0) and not grant.exists()


def test_a_learner_that_starts_again_grants_what_samplers_already_ask(made, tmp_path):
    """Their hellos lie there before it opens the folder. A grant must stay there, or come again when it is removed."""
    learner(made, tmp_path, "files", max_staleness=1).publish(0, weights(0))
    hello = wire.Hello(wire.PROTOCOL, "box", 7, "session", sent=time.time(), wants=2)
    account.write_atomically(tmp_path / "samplers" / "box", wire.encode(hello))
    again = learner(made, tmp_path, "files", max_staleness=1)
    again.publish(0, weights(0))
    grant = tmp_path / "grants" / "box"

    def is_granted():
        again.hub.plan(0, 0)
        return grant.exists() and files.read_message(grant, wire.Grant) == wire.Grant(7, 2)

    assert until(is_granted) and again.grants.granted["box"] == (7, 2)
    grant.unlink()
    assert until(is_granted)


def test_a_learner_that_is_busy_shows_that_it_is_there(made, tmp_path, monkeypatch):
    """Over a shared folder, too: it touches `welcome` while nobody calls the hub."""
    monkeypatch.setattr(files, "BEAT", 0.05)
    s = learner(made, tmp_path, "files", max_staleness=1)
    s.publish(0, weights(0))
    before = (tmp_path / "welcome").stat().st_mtime_ns
    assert until(lambda: (tmp_path / "welcome").stat().st_mtime_ns > before)
    s.close()
    time.sleep(0.2)
    last = (tmp_path / "welcome").stat().st_mtime_ns
    time.sleep(0.2)
    assert (tmp_path / "welcome").stat().st_mtime_ns == last
