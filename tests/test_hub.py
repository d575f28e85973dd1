"""The hub's socket from outside: keys, strangers, protocols, sizes, replays, bounded room; raw peers, no models."""
import logging
import os
import time
from dataclasses import replace

import pytest
import torch
import zmq
import zmq.auth

import account
import files
import hub
import keys
import link
import remote
import wire
from conftest import make_cfg
from sampler import Flags
from sampling import Sampling
from sync import read_tensors
from test_remote import port
from test_wire import BLOB, group, limits

WELCOME = wire.Welcome(wire.PROTOCOL, "session", {"world": 1}, {})


class Raw:
    """A hand-driven sampler."""

    def __init__(self, address, keys=None, name="box"):
        self.context, self.name = zmq.Context(), name
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey, self.socket.curve_serverkey = keys
        self.socket.connect(address)

    def say(self, message, payload=None):
        self.socket.send_multipart([message if isinstance(message, bytes) else wire.encode(message)] + ([payload] if payload is not None else []))

    def hear(self, kind=None, within=5.0):
        """The next message (of a kind), or None when it stays silent."""
        end = time.monotonic() + within
        while (left := end - time.monotonic()) > 0:
            if self.socket.poll(int(1000 * left) + 1):
                frames = self.socket.recv_multipart()
                message = wire.decode(frames[0])
                if kind is None or isinstance(message, kind):
                    return (message, frames[1]) if len(frames) == 2 else message
        return None

    def hello(self, **changes):
        self.say(wire.Hello(**{**dict(protocol=wire.PROTOCOL, sampler=self.name, incarnation=1, session=""), **changes}))

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def made(tmp_path):
    """Hubs and raw peers that are closed behind the test."""
    things = []

    def make(keys="none", room=hub.ROOM, held=(), g=None):
        log = logging.getLogger(f"test.{tmp_path}.{len(things)}")
        log.propagate, log.handlers, log.seen = False, [logging.FileHandler(tmp_path / "log")], tmp_path / "log"
        log.setLevel(logging.INFO)
        before = account.Account()
        for name in held:
            before.add(name)
        things.append(hub.Hub(f"tcp://127.0.0.1:{port()}", keys, WELCOME, limits(g or group()), log, room))
        things[-1].open(before)
        return things[-1]

    def raw(h, **more):
        things.append(Raw(h.address, **more))
        return things[-1]
    yield make, raw
    for x in things:
        x.close()


def until(condition, within=5.0):
    end = time.monotonic() + within
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def give(peer, data, name):
    """Offer a group and answer the asks for it until the hub has it."""
    peer.say(wire.Offer(wire.manifest(name, data)))
    while True:
        m = peer.hear((wire.Ask, wire.Got, wire.Held))
        if isinstance(m, wire.Ask):
            peer.say(wire.Leaves(m.name, m.first), bytes(wire.leaves(data, m.first, m.count)))
        elif m is None or m.names:
            return m


def test_a_group_arrives_once(made):
    make, raw = made
    h = make(held=["box/1/7"])
    peer = raw(h)
    peer.hello()
    assert peer.hear() == WELCOME
    data = wire.encode_group(group())
    assert give(peer, data, "box/1/3") == wire.Got(["box/1/3"])
    assert give(peer, data, "box/1/3") == wire.Got(["box/1/3"]) and h.counts["duplicate"] == 1      # offered again: not fetched again
    assert give(peer, data, "box/1/7") == wire.Held(["box/1/7"]) and h.counts["duplicate"] == 2     # the checkpoint has it: forget it
    (name, bytes_, when), = h.take()
    assert (name, bytes_) == ("box/1/3", data) and abs(when - time.time()) < 30 and h.take() == []
    h.held(["box/1/3"])
    assert peer.hear(wire.Held) == wire.Held(["box/1/3"])
    peer.hello(session="session", handed=9, lost=[4])                                               # a beat is answered, and what it says is kept
    assert peer.hear(wire.Got) == wire.Got([]) and h.reports["box", 1] == (9, [4])


def test_damaged_leaves_are_asked_for_again(made):
    make, raw = made
    h = make()
    peer = raw(h)
    peer.hello()
    data = wire.encode_group(group())
    peer.say(wire.Offer(wire.manifest("box/1/0", data)))
    ask = peer.hear(wire.Ask)
    peer.say(wire.Leaves(ask.name, ask.first), bytes([data[0] ^ 1]) + data[1:])
    assert peer.hear(wire.Ask) == ask and h.counts["bad_leaves"] == 1
    peer.say(wire.Leaves(ask.name, ask.first), data)
    assert peer.hear(wire.Got) == wire.Got(["box/1/0"])


def test_weights_are_served_in_ranges(made, tmp_path):
    make, raw = made
    h = make()
    early, late = raw(h, name="early"), raw(h, name="late")
    early.hello()
    early.hear(wire.Welcome)
    (tmp_path / "v000003.safetensors").write_bytes(BLOB)
    h.broadcast(3, tmp_path / "v000003.safetensors", 12.5)
    late.hello()
    for peer in (early, late):                                             # who is there hears it, who comes later is told
        offer = peer.hear(wire.Offer)
        assert offer == wire.Offer(wire.manifest("v000003.safetensors", BLOB), 3, 12.5)
        pull = wire.Pull(offer.of, sink := bytearray(len(BLOB)), wire.Pace())
        while not pull.done:
            while (span := pull.ask(time.monotonic())) is not None:
                peer.say(wire.Ask(offer.of.name, *span))
            message, payload = peer.hear(wire.Leaves)
            pull.put(message.first, payload, time.monotonic())
        assert bytes(sink) == BLOB
    assert h.counts["bytes_out"] == 2 * len(BLOB)
    for v in (4, 5):
        path = tmp_path / f"v00000{v}.safetensors"
        path.write_bytes(BLOB[:100 * v])
        h.broadcast(v, path, 0.0)
    assert until(lambda: list(h.weights) == ["v000004.safetensors", "v000005.safetensors"])
    early.say(wire.Ask("v000003.safetensors", 0, 1))
    assert early.hear(wire.Gone) == wire.Gone("v000003.safetensors")
    early.hello(session="session")
    assert early.hear(wire.Got) == wire.Got([], "v000005.safetensors")    # a beat is told what is newest, and may have the offer again
    while early.hear(wire.Offer, within=0.2):
        pass
    early.say(wire.Want())
    assert early.hear(wire.Offer).version == 5
    early.say(wire.Ask("v000005.safetensors", 3, 1))                       # outside: no answer, and the hub lives
    early.say(wire.Ask("v000005.safetensors", 0, 1))
    assert early.hear(wire.Leaves)[1] == BLOB[:500]


def test_what_a_hub_does_not_take(made):
    make, raw = made
    h = make()
    old, odd, mute, peer = raw(h, name="old"), raw(h, name="a/b"), raw(h), raw(h)
    old.hello(protocol=0)
    assert "speaks protocol 1 and this sampler 0" in old.hear(wire.Refuse).why
    odd.hello()
    assert "no slash" in odd.hear(wire.Refuse).why
    mute.say(wire.Offer(wire.manifest("box/1/0", b"x")))                   # without a hello
    assert mute.hear() == wire.Gone("")
    for junk in (b"", b"\x80\x04K\x01.", b"x" * 1000):
        peer.say(junk)
    peer.hello()
    assert peer.hear(wire.Welcome) and until(lambda: h.counts["malformed"] == 3)
    big = wire.Manifest("box/1/1", 1 << 40, [b"x" * 32] * (1 << 4))
    for of in (big, wire.Manifest("box/1/2", 10, []), wire.manifest("other/1/0", b"x"), wire.manifest("box/1/-4", b"x"), wire.manifest("box", b"x")):
        peer.say(wire.Offer(of))
        assert peer.hear(wire.Held) == wire.Held([of.name])                # go away, for good
    assert h.counts["refused"] == 5 and h.size == 0 and not h.peers[next(iter(h.peers))].pulls
    peer.say(b"y" * (17 << 20))                                            # over the socket's limit: cut off
    again = raw(h, name="again")
    again.hello()
    assert again.hear(wire.Welcome) is not None and h.counts["malformed"] == 3
    assert "refused" in h.log.seen.read_text()


def test_room_is_bounded_and_comes_back(made):
    make, raw = made
    data = wire.encode_group(group())
    h = make(room=2 * len(data) + 10)
    peer = raw(h)
    peer.hello()
    for i in range(4):
        peer.say(wire.Offer(wire.manifest(f"box/1/{i}", data)))
    asked = [peer.hear(wire.Ask).name for _ in range(2)]
    assert asked == ["box/1/0", "box/1/1"] and peer.hear(wire.Ask, within=0.3) is None and h.size == 2 * len(data)
    for name in asked:
        peer.say(wire.Leaves(name, 0), data)
    assert until(lambda: len(h.arrived) == 2) and peer.hear(wire.Ask, within=0.3) is None           # here, but not looked at yet
    for _, d, _ in h.take():
        h.free(len(d))
    assert [peer.hear(wire.Ask).name for _ in range(2)] == ["box/1/2", "box/1/3"]
    again = raw(h)                                                         # the same sampler on a new connection: what it was asked for is given up
    again.hello()
    assert again.hear(wire.Welcome) and until(lambda: h.size == 0)


def test_only_known_keys_come_in(made, tmp_path):
    make, raw = made
    keys.make_keys(str(tmp_path / "keys"), 2)
    keys.make_keys(str(tmp_path / "others"), 1)
    h = make(keys=str(tmp_path / "keys" / "learner"))
    own = lambda root, name: (*keys.own_keys(tmp_path / root / name), zmq.auth.load_certificate(tmp_path / "keys" / "learner" / "learner.key")[0])
    stranger, plain, friend = raw(h, keys=own("others", "sampler0")), raw(h), raw(h, keys=own("keys", "sampler1"))
    liar = raw(h, keys=(*keys.own_keys(tmp_path / "keys" / "sampler0"), keys.own_keys(tmp_path / "others" / "learner")[0]))      # a wrong learner key
    for peer in (stranger, plain, friend, liar):
        peer.hello()
    assert friend.hear() == WELCOME
    assert stranger.hear(within=0.5) is None and plain.hear(within=0.1) is None and liar.hear(within=0.1) is None and len(h.peers) == 1
    assert until(lambda: h.counts["strangers"] >= 2)
    assert "a stranger was turned away" in h.log.seen.read_text() and "a handshake failed" in h.log.seen.read_text()
    secret = tmp_path / "keys" / "sampler0" / "sampler0.key_secret"
    assert secret.stat().st_mode & 0o077 == 0
    os.chmod(secret, 0o640)
    with pytest.raises(ValueError, match="sampler0.key_secret can be read by others; chmod 600"):
        keys.own_keys(tmp_path / "keys" / "sampler0")
    with pytest.raises(ValueError, match="0 secret keys there instead of one"):
        keys.own_keys(tmp_path)
    with pytest.raises(ValueError, match="no sampler's public key in its folder samplers"):
        make(keys=str(tmp_path / "keys" / "sampler1"))
    with pytest.raises(ValueError, match="is not empty: keys are not overwritten"):
        keys.make_keys(str(tmp_path / "keys"), 1)


def test_damaged_names_stop_no_sampler_and_delete_nothing(tmp_path):
    """A learner's messages as the way spoilt them: numbers that are none, a path out of the spool."""
    context = zmq.Context()
    learner = context.socket(zmq.ROUTER)
    at = learner.bind_to_random_port("tcp://127.0.0.1")
    spool = account.Spool(tmp_path / "spool", ["box"], 1)
    spool.hand_over("box", "box/1/2", b"a group")
    (tmp_path / "1-2").write_bytes(b"somebody else's")
    end = link.Link([f"tcp://127.0.0.1:{at}"], ["box"], Flags(), spool, tmp_path, None)
    who = learner.recv_multipart()[0]
    bad = ["box/1/2&", "box/2", "box/../../1/2", "other/1/2"]
    for m in (WELCOME, *(wire.Ask(name, 0, 1) for name in bad), wire.Held(bad), wire.Got(bad), wire.Ask("box/1/2", 0, 1)):
        learner.send_multipart([who, wire.encode(m)])
    heard, until = [], time.monotonic() + 10
    while not any(isinstance(m, wire.Leaves) for m in heard) and time.monotonic() < until:
        if learner.poll(100):
            heard.append(wire.decode(learner.recv_multipart()[1]))
    end.close()
    context.destroy(linger=0)
    assert [m.name for m in heard if isinstance(m, wire.Gone)] == bad and heard[-1] == wire.Leaves("box/1/2", 0) and end.error == ""
    assert (tmp_path / "1-2").exists() and spool.read("box/1/2") == b"a group"


def test_a_taken_address(made):
    make, _ = made
    h = make()
    with pytest.raises(ValueError, match="--bind=tcp://127.0.0.1:.*: Address already in use; name a free address"):
        hub.Hub(h.address, "none", WELCOME, limits(group()), h.log)


def test_a_sampler_that_starts_again_fetches_the_rest_of_the_weights(made, tmp_path):
    """A process that died in the middle left a part of the file, some of it damaged: only what is not good crosses the wire again."""
    make, _ = made
    h, store, leaf = make(), tmp_path / "store", wire.LEAF
    store.mkdir()
    weights = os.urandom(7 * leaf + 100)
    (tmp_path / "v000003.safetensors").write_bytes(weights)
    of = wire.manifest("v000003.safetensors", weights)
    left = bytearray(weights[:4 * leaf] + bytes(3 * leaf + 100))                       # four of eight leaves had come
    left[2 * leaf + 7] ^= 1                                                            # and one of them went bad on the disk
    (store / f"{of.root}.part").write_bytes(left)
    (store / "0123.part").write_bytes(b"of weights that are long gone")
    h.broadcast(3, tmp_path / "v000003.safetensors", 12.5)
    end = link.Link([h.address], ["box"], Flags(), account.Spool(tmp_path / "spool", ["box"], 1), store, None)
    until = time.monotonic() + 20
    while end.newest is None and time.monotonic() < until:
        time.sleep(0.01)
    assert end.newest == (3, 12.5, store / "v000003.safetensors") and end.newest[2].read_bytes() == weights
    assert h.counts["bytes_out"] == 4 * leaf + 100 and [p.name for p in store.glob("*.part")] == []
    (tmp_path / "v000004.safetensors").write_bytes(weights)                            # an update that moved nothing
    h.broadcast(4, tmp_path / "v000004.safetensors", 13.5)
    while end.newest[0] != 4 and time.monotonic() < until:
        time.sleep(0.01)
    end.close()
    assert end.newest == (4, 13.5, store / "v000003.safetensors") and end.newest[2].read_bytes() == weights and h.counts["bytes_out"] == 4 * leaf + 100


# -- the source: what becomes of groups ----------------------------------------------------------------------------------

def source(folder, **changes):
    cfg = make_cfg(samplers="files", sync_path=str(folder), **{**dict(give_up=0.5), **changes})
    log = logging.getLogger(f"source.{folder}")
    log.propagate = False
    ends = files.FilesHub(str(folder), WELCOME, limits(group()), log)
    return remote.RemoteSource(ends, cfg, limits(group()), Sampling(), folder / "versions", 0, 1, log)


def hand_over(folder, source, n, version=0, **changes):
    """As a sampler does."""
    g = replace(group(), **{**dict(uid=("box", 1, n), version=version, t_published=source.published.get(version, 0.0)), **changes})
    (folder / "rollouts" / "box").mkdir(parents=True, exist_ok=True)
    account.place(folder / "rollouts" / "box" / f"1-{n}", account.sealed(wire.encode_group(g)))


def weights(x):
    return {"a": torch.full((3,), float(x)), "b": torch.ones(2)}.items()


def test_every_group_ends_in_one_column(tmp_path):
    s = source(tmp_path, max_staleness=1, window_seconds=1000.0)
    for v in range(3):
        s.publish(v, weights(v))
    hand_over(tmp_path, s, 0, version=2)
    hand_over(tmp_path, s, 1, version=0)                                   # two updates old
    hand_over(tmp_path, s, 2, version=2, t_published=5.0)                  # of another history's version 2
    hand_over(tmp_path, s, 3, version=7)                                   # nobody published that
    hand_over(tmp_path, s, 4, version=1, sampling=Sampling(temperature=0.5))
    hand_over(tmp_path, s, 5, version=1, uid=("box", 1, 9))                # another group's name inside
    (tmp_path / "rollouts" / "box" / "1-6").write_bytes(account.sealed(b"damaged")[:-1])
    hand_over(tmp_path, s, 7, version=1)
    os.utime(tmp_path / "rollouts" / "box" / "1-7", (1.0, 1.0))            # arrived long ago
    hand_over(tmp_path, s, 8, version=1)
    (tmp_path / "rollouts" / "box" / "1-9").write_bytes(account.sealed(bytes(s.limits.nbytes + 1)))        # whole, and bigger than any group
    got = s.next(2, 2)
    assert [g.uid[2] for g in got] == [0, 8]
    assert s.counts == {"trained": 2, "staleness": 1, "orphan": 2, "refused": 2, "window": 1} and s.hub.counts["corrupt"] == 2
    m = s.metrics()
    assert (m["remote/trained"], m["remote/orphan"], m["remote/corrupt"], m["remote/waiting"]) == (2, 2, 2, 0)
    with pytest.raises(RuntimeError, match="no group from any sampler for 0 s at .*: start samplers"):
        s.next(1, 2)


def test_held_only_after_the_checkpoint_and_never_again(tmp_path):
    s = source(tmp_path)
    s.publish(0, weights(0))
    for n in range(3):
        hand_over(tmp_path, s, n)
    held = tmp_path / "held" / "box"
    assert len(s.next(2, 0)) == 2
    state = s.state_dict()
    s.next(1, 0)                                                           # after the state was taken: not in it
    assert not held.exists()
    s.saved()
    assert sorted(wire.decode(held.read_bytes()).names) == ["box/1/0", "box/1/1"]
    assert s.since == ["box/1/2"]                                          # that is for the next checkpoint
    again = source(tmp_path)
    again.load_state_dict(state)
    again.publish(0, weights(0))                                           # the same bytes: what they sampled is still theirs
    assert [g.uid[2] for g in again.next(1, 0)] == [2] and again.hub.counts["duplicate"] == 2       # the files were still there
    again.state_dict()
    again.saved()
    assert sorted(wire.decode(held.read_bytes()).names) == ["box/1/0", "box/1/1", "box/1/2"]
    other = source(tmp_path)
    other.publish(0, weights(1))                                           # other bytes under the same number: another history
    assert other.published[0] != s.published[0]


def test_weights_go_out_every_so_many_updates_in_the_type_asked_for(tmp_path):
    s = source(tmp_path, sync_every=2, sync_dtype="bfloat16", max_staleness=4)
    for v in range(6):
        s.publish(v, weights(v + 1 / 3))
    newest = wire.decode((tmp_path / "models" / "newest").read_bytes())
    assert newest.version == 4 and sorted(p.name for p in (tmp_path / "models").glob("v*")) == ["v000002.safetensors", "v000004.safetensors"]
    tensors = read_tensors(tmp_path / "models" / newest.of.name)
    assert tensors["a"].dtype == torch.bfloat16 and torch.equal(tensors["a"].float(), torch.full((3,), 4 + 1 / 3).bfloat16().float())
