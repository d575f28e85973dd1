"""The hub's socket from outside: keys, strangers, protocols, sizes, replays, bounded room; raw peers, no models."""

import json
import logging
import os
import queue
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import zmq
import zmq.auth

from remote import account
from remote import files
from remote import hub
from remote import keys
from remote import link
from remote import source as remote
from remote import sampler
from remote import wire
from conftest import ROOT, make_cfg
from learner import Comm
from remote.sampler import Flags
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
        self.socket.send_multipart(
            [message if isinstance(message, bytes) else wire.encode(message)]
            + ([payload] if payload is not None else [])
        )

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
        self.say(
            wire.Hello(**{**dict(protocol=wire.PROTOCOL, sampler=self.name, incarnation=1, session=""), **changes})
        )

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
    assert (
        give(peer, data, "box/1/3") == wire.Got(["box/1/3"]) and h.counts["duplicate"] == 1
    )  # offered again: not fetched again
    assert (
        give(peer, data, "box/1/7") == wire.Held(["box/1/7"]) and h.counts["duplicate"] == 2
    )  # the checkpoint has it: forget it
    ((name, bytes_, when),) = h.take()
    assert (name, bytes_) == ("box/1/3", data) and abs(when - time.time()) < 30 and h.take() == []
    h.held(["box/1/3"])
    assert peer.hear(wire.Held) == wire.Held(["box/1/3"])
    for _ in range(2):  # a beat is answered, and what it says is kept
        peer.hello(session="session", handed=9, lost=["box/1/4", "box/1/3", "other/1/1", "junk"])
        assert peer.hear(wire.Got) == wire.Got([]) and h.reports["box", 1] == 9
    assert [(name, column) for name, column, _ in h.take()] == [
        ("box/1/4", "lost")
    ]  # one that is here already is not lost
    h.held(["box/1/4"])
    assert peer.hear(wire.Held) == wire.Held(["box/1/4"])
    peer.hello(session="session", handed=9, lost=["box/1/4"])  # not heard: said again
    assert peer.hear(wire.Held) == wire.Held(["box/1/4"]) and h.take() == []


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
    for peer in (early, late):  # who is there hears it, who comes later is told
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
        path.write_bytes(BLOB[: 100 * v])
        h.broadcast(v, path, 0.0)
    assert until(lambda: list(h.weights) == ["v000004.safetensors", "v000005.safetensors"])
    early.say(wire.Ask("v000003.safetensors", 0, 1))
    assert early.hear(wire.Gone) == wire.Gone("v000003.safetensors")
    early.hello(session="session")
    assert early.hear(wire.Got) == wire.Got(
        [], "v000005.safetensors"
    )  # a beat is told what is newest, and may have the offer again
    while early.hear(wire.Offer, within=0.2):
        pass
    early.say(wire.Needs())
    assert early.hear(wire.Offer).version == 5
    early.say(wire.Ask("v000005.safetensors", 3, 1))  # outside: no answer, and the hub lives
    early.say(wire.Ask("v000005.safetensors", 0, 1))
    assert early.hear(wire.Leaves)[1] == BLOB[:500]


def test_what_a_hub_does_not_take(made):
    make, raw = made
    h = make()
    old, odd, mute, peer = raw(h, name="old"), raw(h, name="a/b"), raw(h), raw(h)
    old.hello(protocol=0)
    assert f"speaks protocol {wire.PROTOCOL} and this sampler 0" in old.hear(wire.Refuse).why
    odd.hello()
    assert "no slash" in odd.hear(wire.Refuse).why
    mute.say(wire.Offer(wire.manifest("box/1/0", b"x")))  # without a hello
    assert mute.hear() == wire.Gone("")
    for junk in (b"", b"\x80\x04K\x01.", b"x" * 1000):
        peer.say(junk)
    peer.hello()
    assert peer.hear(wire.Welcome) and peer.hear(wire.Got) == wire.Got([]) and until(lambda: h.counts["malformed"] == 3)
    big = wire.Manifest("box/1/1", 1 << 40, [b"x" * 32] * (1 << 4))
    for of in (big, wire.Manifest("box/1/2", 10, [])):
        peer.say(wire.Offer(of))
        assert peer.hear(wire.Got).names == [of.name]  # not fetched, and booked
    for of in (wire.manifest("other/1/0", b"x"), wire.manifest("box/1/-4", b"x"), wire.manifest("box", b"x")):
        peer.say(wire.Offer(of))
    assert until(lambda: h.counts["malformed"] == 6)  # nobody's
    assert [(name, column) for name, column, _ in h.take()] == [("box/1/1", "refused"), ("box/1/2", "refused")]
    assert h.size == 0 and not h.peers[next(iter(h.peers))].pulls
    peer.say(b"y" * (17 << 20))  # over the socket's limit: cut off
    assert until(lambda: f"more at once than {wire.MOST} bytes" in h.log.seen.read_text())
    again = raw(h, name="again")
    again.hello()
    assert again.hear(wire.Welcome) is not None and h.counts["malformed"] == 6
    assert "offer refused: other/1/0 is no group of sampler box" in h.log.seen.read_text()


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
    assert until(lambda: len(h.arrived) == 2) and peer.hear(wire.Ask, within=0.3) is None  # here, but not looked at yet
    for _, d, _ in h.take():
        h.free(len(d))
    assert [peer.hear(wire.Ask).name for _ in range(2)] == ["box/1/2", "box/1/3"]
    again = raw(h)  # the same sampler on a new connection: what it was asked for is asked for again
    again.hello()
    assert (
        [again.hear(wire.Ask).name for _ in range(2)] == ["box/1/2", "box/1/3"]
        and h.size == 2 * len(data)
        and len(h.peers) == 1
    )


def test_a_sampler_that_never_comes_back_gives_its_room_back(made, monkeypatch):
    make, raw = made
    monkeypatch.setattr(hub, "SILENT", 0.5)
    data = wire.encode_group(group())
    h = make(room=len(data) // 2)  # a group that is bigger than the room is taken alone
    gone, here = raw(h, name="gone"), raw(h, name="here")
    for peer in (gone, here):
        peer.hello()
        peer.say(wire.Offer(wire.manifest(f"{peer.name}/1/0", data)))
        assert peer is here or peer.hear(wire.Ask).name == "gone/1/0"
    end = time.monotonic() + 5
    while (ask := here.hear(wire.Ask, within=0.2)) is None and time.monotonic() < end:
        here.hello(session="session")
        here.say(wire.Offer(wire.manifest("here/1/0", data)))
    assert ask.name == "here/1/0" and [p.sampler for p in h.peers.values()] == ["here"]
    assert "sampler gone says nothing" in h.log.seen.read_text()


def test_a_group_goes_on_from_its_last_good_leaf(made):
    """A cut in the middle of a big group: on the new connection only what is missing is asked for."""
    make, raw = made
    big = replace(limits(group()), max_tokens=1 << 20)
    make_hub = lambda: make(g=None)
    h = make_hub()
    h.limits, data = big, os.urandom(3 * wire.LEAF)
    first = raw(h)
    first.hello()
    first.say(wire.Offer(wire.manifest("box/1/0", data)))
    asks = [first.hear(wire.Ask) for _ in range(3)]
    assert [(a.first, a.count) for a in asks] == [(0, 1), (1, 1), (2, 1)]
    first.say(wire.Leaves("box/1/0", 1), bytes(wire.leaves(data, 1, 1)))
    assert until(
        lambda: any(
            1 not in pull.asked and 1 not in pull.missing for p in h.peers.values() for pull in p.pulls.values()
        )
    )
    again = raw(h)
    again.hello()
    asks = [again.hear(wire.Ask) for _ in range(2)]
    assert sorted(a.first for a in asks) == [0, 2]
    for a in asks:
        again.say(wire.Leaves("box/1/0", a.first), bytes(wire.leaves(data, a.first, a.count)))
    assert until(lambda: h.arrived) and [(name, d == data) for name, d, _ in h.take()] == [("box/1/0", True)]


def test_two_samplers_of_one_name(made):
    """The later one stays; the earlier one is told to stop."""
    make, raw = made
    h = make()
    early, late = raw(h), raw(h)
    early.hello(incarnation=1)
    assert early.hear(wire.Welcome)
    late.hello(incarnation=2)
    assert late.hear(wire.Welcome)
    early.hello(incarnation=1, session="session")
    assert "another sampler called box came later: give each a --name" in early.hear(wire.Refuse).why
    assert [p.incarnation for p in h.peers.values()] == [2]


def test_only_known_keys_come_in(made, tmp_path):
    make, raw = made
    keys.make_keys(str(tmp_path / "keys"), 2)
    keys.make_keys(str(tmp_path / "others"), 1)
    h = make(keys=str(tmp_path / "keys" / "learner"))
    own = lambda root, name: (
        *keys.own_keys(tmp_path / root / name),
        zmq.auth.load_certificate(tmp_path / "keys" / "learner" / "learner.key")[0],
    )
    stranger, plain, friend = raw(h, keys=own("others", "sampler0")), raw(h), raw(h, keys=own("keys", "sampler1"))
    liar = raw(
        h, keys=(*keys.own_keys(tmp_path / "keys" / "sampler0"), keys.own_keys(tmp_path / "others" / "learner")[0])
    )  # a wrong learner key
    for peer in (stranger, plain, friend, liar):
        peer.hello()
    assert friend.hear() == WELCOME
    assert (
        stranger.hear(within=0.5) is None
        and plain.hear(within=0.1) is None
        and liar.hear(within=0.1) is None
        and len(h.peers) == 1
    )
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
    for m in (
        WELCOME,
        *(wire.Ask(name, 0, 1) for name in bad),
        wire.Held(bad),
        wire.Got(bad),
        wire.Ask("box/1/2", 0, 1),
    ):
        learner.send_multipart([who, wire.encode(m)])
    heard, until = [], time.monotonic() + 10
    while not any(isinstance(m, wire.Leaves) for m in heard) and time.monotonic() < until:
        if learner.poll(100):
            heard.append(wire.decode(learner.recv_multipart()[1]))
    end.close()
    context.destroy(linger=0)
    assert (
        [m.name for m in heard if isinstance(m, wire.Gone)] == bad
        and heard[-1] == wire.Leaves("box/1/2", 0)
        and end.error == ""
    )
    assert (tmp_path / "1-2").exists() and spool.read("box/1/2") == b"a group"


def old_sampler(address, spool):
    """A sampler of an earlier revision, as a process of its own."""
    code = f"import wire; wire.PROTOCOL = 1; import sampler; sampler.main(['--connect={address}', '--spool={spool}', '--name=box', '--give_up=20'])"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_an_old_sampler_over_a_socket_and_a_folder(made, tmp_path):
    make, _ = made
    h = make()
    done = old_sampler(h.address, tmp_path / "a")
    assert (
        done.returncode == 1
        and f"error: the learner speaks protocol {wire.PROTOCOL} and this sampler 1: bring both to one revision"
        in done.stderr
    )
    assert "it speaks protocol 1" in h.log.seen.read_text() and not h.peers
    s = source(tmp_path)
    s.publish(0, weights(0))
    done = old_sampler(tmp_path, tmp_path / "b")
    assert (
        done.returncode == 1
        and f"error: the learner speaks protocol {wire.PROTOCOL} and this sampler 1: bring both to one revision"
        in done.stderr
    )


def test_what_a_sampler_finds_out_about_its_learner(folders, tmp_path):
    """That it started anew with other wishes; that a model of this host's own speaks another language."""
    from transformers import AutoConfig, AutoTokenizer

    asked = queue.Queue()
    end = SimpleNamespace(welcome=asked)
    asked.put(replace_struct(WELCOME, session="another"))
    sampler.same_run(end, WELCOME)  # the same wishes
    asked.put(replace_struct(WELCOME, run={"world": 1, "topk": 20}))
    with pytest.raises(
        ValueError, match=r"the learner started anew and asks for something else \(its topk\): start this sampler again"
    ):
        sampler.same_run(end, WELCOME)
    tokenizer, config = (
        AutoTokenizer.from_pretrained(folders / "policy"),
        AutoConfig.from_pretrained(folders / "policy"),
    )
    sampler.check_own(str(folders / "actor"), tokenizer, config, 16)
    with pytest.raises(ValueError, match="a context of .* tokens, and the learner asks for 1000000"):
        sampler.check_own(str(folders / "actor"), tokenizer, config, 10**6)
    with pytest.raises(ValueError, match="--model=nowhere: no Hugging Face model folder"):
        sampler.check_own("nowhere", tokenizer, config, 16)
    shutil.copytree(folders / "actor", tmp_path / "other")
    changed = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**changed, "vocab_size": changed["vocab_size"] + 1}))
    with pytest.raises(ValueError, match="its tokenizer or vocabulary differs from the learner's"):
        sampler.check_own(str(tmp_path / "other"), tokenizer, config, 16)


def replace_struct(m, **changes):
    return type(m)(**{**{k: getattr(m, k) for k in m.__struct_fields__}, **changes})


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
    left = bytearray(weights[: 4 * leaf] + bytes(3 * leaf + 100))  # four of eight leaves had come
    left[2 * leaf + 7] ^= 1  # and one of them went bad on the disk
    (store / f"{of.root}.part").write_bytes(left)
    (store / "0123.part").write_bytes(b"of weights that are long gone")
    h.broadcast(3, tmp_path / "v000003.safetensors", 12.5)
    end = link.Link([h.address], ["box"], Flags(), account.Spool(tmp_path / "spool", ["box"], 1), store, None)
    until = time.monotonic() + 20
    while end.newest is None and time.monotonic() < until:
        time.sleep(0.01)
    assert end.newest == (3, 12.5, store / "v000003.safetensors") and end.newest[2].read_bytes() == weights
    assert h.counts["bytes_out"] == 4 * leaf + 100 and [p.name for p in store.glob("*.part")] == []
    (tmp_path / "v000004.safetensors").write_bytes(weights)  # an update that moved nothing
    h.broadcast(4, tmp_path / "v000004.safetensors", 13.5)
    while end.newest[0] != 4 and time.monotonic() < until:
        time.sleep(0.01)
    end.close()
    assert (
        end.newest == (4, 13.5, store / "v000003.safetensors")
        and end.newest[2].read_bytes() == weights
        and h.counts["bytes_out"] == 4 * leaf + 100
    )


def test_weights_that_are_gone_give_way_to_newer_ones(tmp_path):
    """The newer offer may come before the word that the older ones are gone, or get lost."""
    context = zmq.Context()
    learner = context.socket(zmq.ROUTER)
    at = learner.bind_to_random_port("tcp://127.0.0.1")
    end = link.Link(
        [f"tcp://127.0.0.1:{at}"], ["box"], Flags(), account.Spool(tmp_path / "spool", ["box"], 1), tmp_path, None
    )
    who = learner.recv_multipart()[0]

    def say(*messages):
        for m in messages:
            learner.send_multipart([who, wire.encode(m)])

    def asked(kind, name=None):
        until = time.monotonic() + 10
        while time.monotonic() < until:
            if (
                learner.poll(100)
                and isinstance(m := wire.decode(learner.recv_multipart()[1]), kind)
                and (name is None or m.name == name)
            ):
                return True

    say(WELCOME, wire.Offer(wire.manifest("v3", BLOB), 3, 1.0))
    assert asked(wire.Ask, "v3")
    say(wire.Offer(wire.manifest("v4", BLOB[1:]), 4, 2.0), wire.Gone("v3"))
    assert asked(wire.Ask, "v4")
    say(wire.Gone("v4"))
    while learner.poll(300):  # what was on its way
        wire.decode(learner.recv_multipart()[1])
    say(wire.Gone("v4"), wire.Got([], "v5"))
    time.sleep(0.3)
    heard = []
    while learner.poll(0):
        heard.append(wire.decode(learner.recv_multipart()[1]))
    assert (
        wire.Needs() in heard
        and not any(isinstance(m, wire.Ask) for m in heard)
        and end.newest is None
        and end.error == ""
    )
    end.close()
    context.destroy(linger=0)


# -- the source: what becomes of groups ----------------------------------------------------------------------------------


def source(folder, **changes):
    cfg = make_cfg(samplers="files", sync_path=str(folder), **{**dict(give_up=0.5), **changes})
    log = logging.getLogger(f"source.{folder}")
    log.propagate = False
    ends = files.FilesHub(str(folder), WELCOME, limits(group()), log)
    return remote.RemoteSource(ends, cfg, limits(group()), Sampling(), folder / "versions", Comm(), log)


def hand_over(folder, source, n, version=0, **changes):
    """As a sampler does."""
    g = replace(
        group(),
        **{**dict(uid=("box", 1, n), version=version, t_published=source.published.get(version, 0.0)), **changes},
    )
    (folder / "rollouts" / "box").mkdir(parents=True, exist_ok=True)
    account.write_atomically(folder / "rollouts" / "box" / f"1-{n}", account.with_digest(wire.encode_group(g)))


def weights(x):
    return {"a": torch.full((3,), float(x)), "b": torch.ones(2)}.items()


def test_every_group_ends_in_one_column(tmp_path, monkeypatch):
    s = source(tmp_path, max_staleness=1, window_seconds=1000.0)
    for v in range(3):
        s.publish(v, weights(v))
    hand_over(tmp_path, s, 0, version=2)
    hand_over(tmp_path, s, 1, version=0)  # two updates old
    hand_over(tmp_path, s, 2, version=2, t_published=5.0)  # of another history's version 2
    hand_over(tmp_path, s, 3, version=7)  # nobody published that
    hand_over(tmp_path, s, 4, version=1, sampling=Sampling(temperature=0.5))
    hand_over(tmp_path, s, 5, version=1, uid=("box", 1, 9))  # another group's name inside
    (tmp_path / "rollouts" / "box" / "1-6").write_bytes(account.with_digest(b"damaged")[:-1])
    hand_over(tmp_path, s, 7, version=1)
    os.utime(tmp_path / "rollouts" / "box" / "1-7", (1.0, 1.0))  # arrived long ago
    hand_over(tmp_path, s, 8, version=1)
    (tmp_path / "rollouts" / "box" / "1-9").write_bytes(
        account.with_digest(bytes(s.limits.nbytes + 1))
    )  # whole, and bigger than any group
    account.write_atomically(
        tmp_path / "samplers" / "box", wire.encode(wire.Hello(wire.PROTOCOL, "box", 1, "session", 11))
    )  # it says 11, and the last one is nowhere
    (tmp_path / "rollouts" / "box" / "1-2~").write_bytes(b"an editor's")
    got = s.next(2, 2)
    assert [g.uid[2] for g in got] == [0, 8] and s.counts["lost"] == 0  # not yet: it may come
    monkeypatch.setattr(files, "PATIENCE", 0.0)
    s.hub.beat = -files.BEAT
    assert s.next(1, 2, stop=[]) == []
    s.error = ""
    assert s.counts == {"trained": 2, "staleness": 1, "orphan": 2, "refused": 3, "window": 1, "corrupt": 1, "lost": 1}
    m = s.metrics()
    assert [
        m[f"remote/{k}"] for k in ("trained", "orphan", "corrupt", "refused", "lost", "handed", "waiting", "samplers")
    ] == [2, 2, 1, 3, 1, 11, 0, 1]
    assert (
        sum(m[f"remote/{k}"] for k in remote.COLUMNS)
        == m["remote/handed"]
        == len(s.since)
        == s.state_dict()["account"][0][2]
    )
    assert (
        s.next(1, 2) == []
        and "no group to train on for 0 s at" in s.error
        and "2 trained" in s.error
        and "--resume goes on from here" in s.error
    )
    again = source(tmp_path)
    again.load_state_dict(s.state_dict())
    assert again.metrics()["remote/handed"] == 11 and again.counts == s.counts


def test_a_signal_while_waiting_and_a_rank_without_groups(tmp_path):
    """Nobody trains on what was given back, the account does not hold it, and the next call gives it again."""
    s = source(tmp_path)
    s.publish(0, weights(0))
    for n in range(2):
        hand_over(tmp_path, s, n)
    assert s.next(3, 0, stop=["SIGTERM"]) == [] and s.error == "" and not s.counts
    assert s.next(2, 0) and s.counts["trained"] == 2 and s.hub.size == 0
    assert s.next(1, 0, stop=["SIGTERM"]) == []
    s.give_back()  # nothing: those two were trained on
    assert s.counts["trained"] == 2 and len(s.since) == 2
    hand_over(tmp_path, s, 2)
    assert s.next(1, 0)
    s.give_back()
    assert (
        s.counts["trained"] == 2
        and s.since == ["box/1/0", "box/1/1"]
        and [g.uid[2] for g in s.next(1, 0)] == [2]
        and s.counts["trained"] == 3
    )


def test_time_asleep_is_nobodys_silence(tmp_path, monkeypatch):
    """A learner that was stopped for longer than --give_up goes on waiting; one that was awake gives up."""
    s = source(tmp_path, give_up=30.0)
    s.publish(0, weights(0))
    clock, jumps = [0.0], iter([0.0, 1000.0])

    def take():
        clock[0] += next(jumps, 1.0)
        return []

    monkeypatch.setattr(
        remote, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time, sleep=lambda seconds: None)
    )
    monkeypatch.setattr(s.hub, "take", take)
    assert s.next(1, 0) == [] and "no group to train on for 30 s" in s.error and 1030 < clock[0] < 1035


def test_an_undone_history_does_not_delete_the_weights_of_this_one(tmp_path):
    """A learner came as far as version 17 and was killed; it starts again from its checkpoint at 10. Its folder holds newer numbers than it publishes."""
    dead = source(tmp_path)
    for v in (16, 17):
        dead.publish(v, weights(v))
    s = source(tmp_path)
    s.publish(10, weights(10))
    assert (
        [p.name for p in (tmp_path / "models").glob("v*")]
        == ["v000010.safetensors"]
        == [p.name for p in (tmp_path / "versions").glob("v*")]
    )
    end = files.FilesLink(str(tmp_path), ["box"], Flags(), account.Spool(tmp_path / "rollouts", ["box"], 1))
    assert until(lambda: end.newest is not None) and end.newest[0] == 10
    s.publish(11, weights(11))
    assert until(lambda: end.newest[0] == 11) and end.newest[2].is_file()
    end.close()


def test_room_of_a_folder(tmp_path):
    """What does not fit stays in the folder, and its sampler is not told that it was fetched."""
    s = source(tmp_path)
    s.publish(0, weights(0))
    s.hub.room = int(2.5 * len(wire.encode_group(group())))
    for n in range(4):
        hand_over(tmp_path, s, n)
    assert [name for name, _, _ in s.hub.take()] == ["box/1/0", "box/1/1"] and s.hub.take() == []
    assert wire.decode((tmp_path / "got" / "box").read_bytes()).names == ["box/1/0", "box/1/1"]
    s.hub.free(s.hub.size)
    assert [name for name, _, _ in s.hub.take()] == ["box/1/2", "box/1/3"]


def test_a_folder_without_a_learner_and_one_without_room(tmp_path, monkeypatch):
    s = source(tmp_path)
    s.publish(0, weights(0))
    end = files.FilesLink(str(tmp_path), ["box"], Flags(give_up=0.5), account.Spool(tmp_path / "rollouts", ["box"], 1))
    assert until(lambda: "no sign of life from a learner" in end.error, within=20)
    small = files.FilesLink(
        str(tmp_path), ["box"], Flags(most_weights=1e-9), account.Spool(tmp_path / "rollouts", ["box"], 2)
    )
    assert until(lambda: "--most_weights=1e-09: the learner's weights have" in small.error)
    hand_over(tmp_path, s, 0)

    def full(path, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(files, "place", full)
        assert s.next(1, 0)  # the learner goes on, and says it later
        s.state_dict()
        s.saved()
        s.publish(1, weights(1))
    assert not (tmp_path / "held" / "box").exists() and not (tmp_path / "models" / "v000001.safetensors").exists()
    s.hub.beat = -files.BEAT
    assert s.hub.take() == [] and wire.decode((tmp_path / "held" / "box").read_bytes()).names == [
        "box/1/0"
    ]  # with the next sign of life
    assert (
        wire.decode((tmp_path / "models" / "newest").read_bytes()).version == 1
        and (tmp_path / "models" / "v000001.safetensors").exists()
    )


def test_a_damaged_spool_says_so_until_it_is_held(tmp_path):
    spool = account.Spool(tmp_path, ["box"], 7)
    for n in range(3):
        spool.hand_over("box", f"box/7/{n}", b"group %d" % n)
    (tmp_path / "box" / "7-0").write_bytes(b"damaged")
    (tmp_path / "box" / "7-1").unlink()
    assert spool.read("box/7/0") is None and spool.read("box/7/1") is None and spool.read("box/7/2") == b"group 2"
    assert spool.lost["box"] == ["box/7/0", "box/7/1"] and list(spool.waiting["box"]) == ["box/7/2"]
    again = account.Spool(tmp_path, ["box"], 8)  # another life
    assert again.lost["box"] == ["box/7/0", "box/7/1"] and list(again.waiting["box"]) == ["box/7/2"]
    again.forget(["box/7/0", "box/7/2"])
    assert again.lost["box"] == ["box/7/1"] and sorted(p.name for p in (tmp_path / "box").iterdir()) == ["7-1.lost"]


def test_held_only_after_the_checkpoint_and_never_again(tmp_path):
    s = source(tmp_path)
    s.publish(0, weights(0))
    for n in range(3):
        hand_over(tmp_path, s, n)
    held = tmp_path / "held" / "box"
    assert len(s.next(2, 0)) == 2
    state = s.state_dict()
    s.next(1, 0)  # after the state was taken: not in it
    assert not held.exists()
    s.saved()
    assert sorted(wire.decode(held.read_bytes()).names) == ["box/1/0", "box/1/1"]
    assert s.since == ["box/1/2"]  # that is for the next checkpoint
    again = source(tmp_path)
    again.load_state_dict(state)
    again.publish(0, weights(0))  # the same bytes: what they sampled is still theirs
    assert [g.uid[2] for g in again.next(1, 0)] == [2] and again.hub.counts[
        "duplicate"
    ] == 2  # the files were still there
    again.state_dict()
    again.saved()
    assert sorted(wire.decode(held.read_bytes()).names) == ["box/1/0", "box/1/1", "box/1/2"]
    other = source(tmp_path)
    other.publish(0, weights(1))  # other bytes under the same number: another history
    assert other.published[0] != s.published[0]


def test_weights_go_out_every_so_many_updates_in_the_type_asked_for(tmp_path):
    s = source(tmp_path, sync_every=2, sync_dtype="bfloat16", max_staleness=4)
    for v in range(6):
        s.publish(v, weights(v + 1 / 3))
    newest = wire.decode((tmp_path / "models" / "newest").read_bytes())
    assert newest.version == 4 and sorted(p.name for p in (tmp_path / "models").glob("v*")) == [
        "v000002.safetensors",
        "v000004.safetensors",
    ]
    tensors = read_tensors(tmp_path / "models" / newest.of.name)
    assert tensors["a"].dtype == torch.bfloat16 and torch.equal(
        tensors["a"].float(), torch.full((3,), 4 + 1 / 3).bfloat16().float()
    )
