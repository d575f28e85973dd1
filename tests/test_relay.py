"""Weights from sampler to sampler: how many copies leave the learner, and what becomes of relays that die or lie."""

import os

import numpy as np
import pytest
import zmq
from test_hub import Peer, closed_behind, until
from torchrun import free_port

from flags import UserError
from remote import account, bench, delta, link, relay, sampler, wire
from remote.keys import make_keys, sampler_keys
from remote.relay import FAN, Fanout, Relay
from remote.sampler import SamplerFlags

HOW = ("no relays", "relays")
BLOB = np.random.default_rng(3).integers(0, 256, 2 * wire.LEAF + 77, dtype=np.uint8).tobytes()


@pytest.fixture
def made(tmp_path):
    yield from closed_behind(tmp_path)


# -- the bench ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_bench_of_relays_counts_what_leaves_the_learner(tmp_path):
    """Two network namespaces and a throttled cable. Ten samplers: ten copies, or as many as it serves itself."""
    mib = 1
    try:
        rows = bench.bench_relay(str(tmp_path), mib=mib, mb_per_s=8, numbers=(FAN + 2,))
    except UserError as e:
        pytest.skip(str(e))
    (n, row), *more = rows.items()
    assert n == "10" and not more and set(row) == {f"{x}, {how}" for x in ("copies", "seconds") for how in HOW}
    assert 10 < row["copies, no relays"] < 11
    assert 1 < row["copies, relays"] < FAN + 1
    assert all(row[f"seconds, {how}"] > mib * row[f"copies, {how}"] / 8 * 0.8 for how in HOW)  # no faster than the line
    assert not [line for line in bench.run_ip("netns", "list").splitlines() if f"bench{os.getpid()}" in line]


# -- who fetches from whom ---------------------------------------------------------------------------------------------


def hello(name="box", root="", at=""):
    return wire.Hello(wire.PROTOCOL, name, 1, "", root=root, relay=at)


def sampler_of(i):
    return bytes([0, i // 256, i % 256])


def at(i):
    return f"tcp://127.0.0.1:{7000 + i}"


def spread(n, relays):
    """(copies that leave the learner, rounds, most copies that leave a relay) until all of n samplers have them."""
    f, rounds = Fanout(), 0
    has = dict.fromkeys(range(n), "")
    served = [0] * n
    for i in range(n):
        f.heard(sampler_of(i), "", hello(at=at(i) if i in relays else ""))
    f.new("new")
    while any(root != "new" for root in has.values()):
        rounds += 1
        assert rounds < 50
        told = f.turn({sampler_of(i) for i in range(n)})
        for identity, source in told:
            i = int.from_bytes(identity, "big")
            if source is None:
                f.asked(identity)
            else:
                other = int(source.address.rpartition(":")[2]) - 7000
                assert has[other] == "new" and other in relays and other != i
                served[other] += 1
        for identity, _ in told:
            i = int.from_bytes(identity, "big")
            has[i] = "new"
            f.heard(identity, "", hello(root="new", at=at(i) if i in relays else ""))
    return len(f.direct), rounds, max(served)


@pytest.mark.parametrize("n, rounds", [(1, 1), (4, 1), (8, 1), (16, 2), (72, 2), (73, 3), (500, 3)])
def test_the_learner_sends_eight_copies_however_many_there_are(n, rounds):
    direct, took, served = spread(n, range(n))
    assert (direct, took) == (min(n, FAN), rounds) and served <= FAN * (rounds - 1)


def test_without_relays_all_fetch_from_the_learner_at_once():
    assert spread(30, ()) == (30, 1, 0)


def test_who_comes_late_is_served_by_the_learner_while_it_serves_few():
    """A relay is another's machine."""
    f = Fanout()
    f.heard(b"a", "", hello(at=at(1)))
    f.new("new")
    assert told(f) == {b"a": None}
    f.heard(b"a", "", hello(root="new", at=at(1)))
    for i in range(FAN):
        f.heard(sampler_of(i), "", hello())
        f.want(sampler_of(i))
        assert told(f) == {sampler_of(i): None if i < FAN - 1 else wire.Relay(at(1))}


def test_relays_come_first():
    """The only two relays are those that came last."""
    assert spread(12, (10, 11))[:2] == (FAN, 2)


def told(f, *here):
    return dict(f.turn(here or set(f.members)))


def full(monkeypatch, clock=None):
    """A fan-out whose learner serves one, `a`, which is a relay; `b` and `c` are not."""
    monkeypatch.setattr(relay, "FAN", 1)
    f = Fanout()
    f.heard(b"a", "", hello(at=at(1)))
    for name in (b"b", b"c"):
        f.heard(name, "", hello())
    f.new("new")
    assert told(f) == {b"a": None} and told(f) == {}
    return f


def test_who_waits_for_a_relay_waits_not_for_ever(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(relay.time, "monotonic", lambda: now[0])
    f = full(monkeypatch)
    now[0] += relay.STUCK - 1
    f.asked(b"a")  # it fetches on
    now[0] += relay.STUCK - 1
    assert told(f) == {}
    now[0] += 2
    assert set(told(f)) == {b"b", b"c"}  # it is stuck
    f = full(monkeypatch)
    while now[0] < 10_000 and not (gone := told(f)):
        f.asked(b"a")  # a little at a time
        now[0] += 10.0
    assert set(gone) == {b"b", b"c"} and not any(gone.values())


def test_a_relay_that_is_gone_is_not_waited_for(monkeypatch):
    f = full(monkeypatch)
    assert told(f, b"b", b"c") == {b"b": None, b"c": None}


def test_a_relay_serves_so_many_and_is_struck_out_when_it_serves_nobody(monkeypatch):
    monkeypatch.setattr(relay, "STRIKES", 2)
    f = full(monkeypatch)
    f.heard(b"a", "", hello(root="new", at=at(1)))
    assert told(f) == {b"b": wire.Relay(at(1))} and told(f) == {}  # one at a time
    f.heard(b"b", "", hello(root="new"))
    assert told(f) == {b"c": wire.Relay(at(1))}
    f.asked(b"c")
    f.asked(b"c")  # it says so once
    assert f.direct == {b"a", b"c"} and f.strikes == {at(1): {b"c"}}
    f.new("newer")
    assert told(f) == {b"a": None}
    f.heard(b"a", "", hello(root="newer", at=at(1)))
    assert told(f) == {b"b": wire.Relay(at(1))}
    f.asked(b"b")
    assert told(f) == {b"c": None}  # nobody is sent there again, nor on a new connection
    f.heard(b"new", "", hello(root="newer", at=at(1)))
    f.heard(b"d", "", hello())
    f.want(b"d")
    assert told(f) == {b"d": None}


def test_who_asks_again_is_sent_to_the_same_place(monkeypatch):
    """Its question and the offer may cross on the way. It still fetches there, and its strike counts."""
    f = full(monkeypatch)
    f.heard(b"a", "", hello(root="new", at=at(1)))
    assert told(f) == {b"b": wire.Relay(at(1))}
    f.want(b"b")
    assert told(f) == {b"b": wire.Relay(at(1))}
    f.want(b"b")
    f.asked(b"b")  # before it is told again
    assert f.strikes == {at(1): {b"b"}} and b"b" in f.direct


def test_the_same_weights_under_another_version_are_not_fetched(monkeypatch):
    f = full(monkeypatch)
    for name in (b"a", b"b", b"c"):
        f.heard(name, "", hello(root="new"))
    f.new("new")
    assert told(f) == {b"a": None, b"b": None, b"c": None} and f.direct == set()


@pytest.mark.parametrize(
    "address, in_the_clear, with_keys",
    [
        ("tcp://127.0.0.1:80", True, True),
        ("tcp://10.0.0.1:80", False, True),
        ("tcp://127.0.0.1:0", False, False),
        ("10.0.0.1:80", False, False),
        ("tcp://:80", False, False),
        ("", False, False),
    ],
)
def test_addresses_to_which_samplers_are_sent(address, in_the_clear, with_keys):
    assert relay.may_serve(address, False) == in_the_clear and relay.may_serve(address, True) == with_keys
    f = Fanout()
    f.heard(b"a", "", hello(at=address))
    f.heard(b"b", "k" * 40, hello(at=address))
    assert bool(f.member(b"a").address) == in_the_clear and bool(f.member(b"b").address) == with_keys


@pytest.mark.parametrize(
    "more, sentence",
    [
        (["--relay=tcp://10.0.0.1:80"], "--relay=tcp://10.0.0.1:80: over a network keys are needed"),
        (["--relay=here"], "--relay=here: not an address; write tcp://HOST:PORT"),
        (["--relay=tcp://127.0.0.1:9", "--connect=."], "--relay=tcp://127.0.0.1:9: in a shared folder all samplers"),
    ],
)
def test_relay_flags_that_cannot_be(more, sentence, tmp_path):
    argv = ["--connect=tcp://127.0.0.1:5555", f"--spool={tmp_path}", *more]
    with pytest.raises(UserError) as e:
        sampler.sample(sampler.parse_flags(SamplerFlags, argv))
    assert str(e.value).startswith(sentence)


# -- real hubs and links -----------------------------------------------------------------------------------------------


def box(made, h, i, folder, keys=None, at=None, patience=1.0, **more):
    """A sampler's link, a relay unless `at` is empty."""
    own = folder / f"box{i}"
    own.mkdir()
    address = f"tcp://127.0.0.1:{free_port()}" if at is None else at
    flags = SamplerFlags(patience=patience, give_up=60.0, relay=address, **more)
    name = f"sampler{i}"
    return made.add(link.Link([h.address], [name], flags, account.Spool(own / "spool", [name], 1), own, keys))


def publish(h, folder, version, data):
    path = folder / f"v{version:06d}.safetensors"
    path.write_bytes(data)
    h.broadcast(version, path, float(version))


def have(ends, version, data):
    whole = lambda end: end.newest is not None and end.newest.version == version  # noqa: E731
    return until(lambda: all(map(whole, ends)), 60) and all(end.newest.path.read_bytes() == data for end in ends)


def test_the_uplink_does_not_grow_over_sockets(made, tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "FAN", 2)
    h = made.hub()
    ends = [box(made, h, i, tmp_path) for i in range(5)]
    assert until(lambda: sum(bool(m.address) for m in h.fanout.members.values()) == 5)
    for version, data in ((0, BLOB), (1, BLOB[::-1])):
        publish(h, tmp_path, version, data)
        assert have(ends, version, data)
        assert h.counts["bytes_out"] == 2 * len(BLOB) * (version + 1)
        assert sum(end.relay.bytes_out for end in ends) == 3 * len(BLOB) * (version + 1)
    late = box(made, h, 9, tmp_path, at="")
    assert have([late], 1, BLOB[::-1]) and h.counts["bytes_out"] == 4 * len(BLOB)


def test_deltas_come_from_relays_too(made, tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "FAN", 1)
    h = made.hub()
    ends = [box(made, h, i, tmp_path) for i in range(3)]
    assert until(lambda: sum(bool(m.address) for m in h.fanout.members.values()) == 3)
    publish(h, tmp_path, 0, BLOB)
    assert have(ends, 0, BLOB)
    before, after = h.counts["bytes_out"], b"?" + BLOB[1:]
    change = delta.encode(BLOB, after)
    path = tmp_path / "v000001.safetensors"
    path.write_bytes(after)
    h.broadcast(1, path, 1.0, change)
    assert have(ends, 1, after)
    assert h.counts["bytes_out"] - before == len(change) and before == len(BLOB)
    assert sum(end.relay.bytes_out for end in ends) == 2 * (len(BLOB) + len(change))


def test_relays_let_in_whom_the_learner_knows(made, tmp_path, monkeypatch):
    """With keys; somebody who has none, or others, gets nothing."""
    monkeypatch.setattr(relay, "FAN", 1)
    make_keys(str(tmp_path / "keys"), 2)
    make_keys(str(tmp_path / "others"), 1)
    keys = [sampler_keys(str(tmp_path / "keys" / f"sampler{i}")) for i in range(2)]
    h = made.hub(keys=str(tmp_path / "keys" / "learner"))
    ends = [box(made, h, i, tmp_path, keys[i]) for i in range(2)]
    assert until(lambda: sum(bool(m.address) for m in h.fanout.members.values()) == 2)
    publish(h, tmp_path, 0, BLOB)
    assert have(ends, 0, BLOB)
    assert h.counts["bytes_out"] == len(BLOB) == sum(end.relay.bytes_out for end in ends)
    serving = next(i for i in range(2) if ends[i].relay.bytes_out)
    address = ends[serving].flags.relay
    stranger = sampler_keys(str(tmp_path / "others" / "sampler0"))._replace(learner=keys[serving].public)
    for own in (None, stranger, keys[1 - serving]._replace(learner=keys[serving].public)):
        peer = made.add(Asker(address, own))
        peer.send(wire.Ask("v000000.safetensors", 0, 1))
        heard = peer.frames(within=5 if own and own.public == keys[1 - serving].public else 1)
        assert (heard is not None) == (own is not None and own.public == keys[1 - serving].public)
    assert isinstance(wire.decode(heard[0]), wire.Leaves) and heard[1] == BLOB[: wire.LEAF]


class Asker(Peer):
    """Whoever connects to a relay."""

    def __init__(self, address, keys=None):
        super().__init__(zmq.DEALER)
        if keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.public, keys.secret
            self.socket.curve_serverkey = keys.learner
        self.socket.connect(address)


def test_what_a_relay_does_not_answer(made):
    address = f"tcp://127.0.0.1:{free_port()}"
    r = made.add(Relay(address, None))
    r.serve({"w": BLOB})
    peer = made.add(Asker(address))
    peer.send(b"no message")
    peer.send(wire.Held(["w"]))
    peer.send(wire.Ask("w", 99, 1))
    peer.send(wire.Ask("w", 0, 99))
    peer.send(wire.Ask("w", 0, 1), b"more")
    peer.send(wire.Ask("other", 0, 1))
    assert wire.decode(peer.frames(5)[0]) == wire.Gone("other")  # the first answer there is
    peer.send(wire.Ask("w", 2, 1))
    assert peer.frames(5)[1] == BLOB[2 * wire.LEAF :] and r.bytes_out == 77
    peer.send(bytes(relay.MOST_ASK + 1))  # it is cut off, and comes back
    assert until(lambda: peer.send(wire.Ask("w", 2, 1)) or peer.frames(0.5) is not None) and r.is_alive()
    with pytest.raises(UserError, match=f"--relay={address}: Address already in use; name a free port"):
        Relay(address, None)


class Liar(Peer):
    """A relay that says it has the weights. answer: what it makes of an ask's leaves; None: it says nothing."""

    def __init__(self, h, made, answer):
        super().__init__(zmq.ROUTER)
        self.answer = answer
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.raw = made.raw(h, name="liar")
        self.raw.hello(relay=self.address)

    def turn(self):
        frames = self.frames(0.02)
        if frames is not None and self.answer is not None:
            ask = wire.decode(frames[1])
            self.send(frames[0], *self.answer(ask))


def lie(ask):
    part = bytearray(wire.leaves(BLOB, ask.first, ask.count))
    part[-1] ^= 1
    return wire.Leaves(ask.name, ask.first), bytes(part)


@pytest.mark.parametrize("answer", [None, lie, lambda ask: [wire.Gone(ask.name)]])
def test_a_relay_that_dies_or_lies(answer, made, tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "FAN", 1)
    h = made.hub()
    liar = made.add(Liar(h, made, answer))
    assert until(lambda: any(m.address for m in h.fanout.members.values()))
    publish(h, tmp_path, 0, BLOB)
    offer = liar.raw.hear(wire.Offer)
    honest = box(made, h, 1, tmp_path, at="", patience=1000.0 if answer else 1.0)  # an answer needs no patience
    liar.raw.hello(relay=liar.address, root=offer.of.root)
    assert until(lambda: liar.turn() or honest.newest is not None, 60)
    assert honest.newest.path.read_bytes() == BLOB and h.counts["bytes_out"] == len(BLOB)
    assert [len(who) for who in h.fanout.strikes.values()] == [1] and honest.lines[0].source is None


def test_a_relay_that_dies_in_the_middle(made, tmp_path, monkeypatch):
    """What has come from it is good, and is not fetched again."""
    monkeypatch.setattr(relay, "FAN", 1)
    monkeypatch.setattr(wire, "MOST_ASKED", 1)
    h = made.hub()
    good = []

    def two_leaves(ask):
        if len(good) == 2:
            return [wire.Gone(ask.name)]
        good.append(ask.first)
        return wire.Leaves(ask.name, ask.first), bytes(wire.leaves(BLOB, ask.first, 1))

    liar = made.add(Liar(h, made, two_leaves))
    assert until(lambda: any(m.address for m in h.fanout.members.values()))
    monkeypatch.setattr(relay, "Pace", lambda patience: wire.Pace(patience, most=wire.LEAF))
    publish(h, tmp_path, 0, BLOB)
    offer = liar.raw.hear(wire.Offer)
    honest = box(made, h, 1, tmp_path, at="")
    liar.raw.hello(relay=liar.address, root=offer.of.root)
    assert until(lambda: liar.turn() or honest.newest is not None, 60)
    assert honest.newest.path.read_bytes() == BLOB
    assert h.counts["bytes_out"] == len(BLOB) - sum(len(wire.leaves(BLOB, first, 1)) for first in good)
