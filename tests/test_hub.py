"""The hub's socket from outside: keys, unknown peers, protocols, sizes, replays, bounded memory, with raw peers."""

import contextlib
import hashlib
import logging
import os
import queue
import time
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
import zmq
from conftest import make_cfg
from test_wire import BLOB, group, limits

from learner import Comm
from machinery.checkpoint import read_tensors
from remote import account, files, files_link, hub, keys, link, sampler, wire
from remote import source as remote
from remote.groups import encode_group
from remote.sampler import SamplerFlags
from remote.weights import Store
from sampling import Sampling

WELCOME = wire.Welcome("session", {"world": 1}, {})


class Peer:
    """One end of a socket, for sending single messages. No call blocks: ZeroMQ holds back messages to a peer after a
    refused handshake, so a message is dropped after a second."""

    def __init__(self, kind):
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDTIMEO, 1000), (zmq.RCVTIMEO, 5000)):
            self.socket.setsockopt(option, value)

    def send(self, *frames):
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([f if isinstance(f, bytes) else wire.encode(f) for f in frames])

    def frames(self, within):
        """The frames of the next message, or None after this many seconds of silence."""
        return self.socket.recv_multipart() if self.socket.poll(int(1000 * within)) else None

    def close(self):
        self.context.destroy(linger=0)


class Raw(Peer):
    """A sampler end for sending single messages."""

    def __init__(self, address, keys=None, name="box", identity=b""):
        super().__init__(zmq.DEALER)
        self.name = name
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        if keys is not None:
            self.socket.curve_publickey = keys.public
            self.socket.curve_secretkey = keys.secret
            self.socket.curve_serverkey = keys.learner
        self.socket.connect(address)

    def say(self, message, *payload):
        self.send(message, *payload)

    def hear(self, kind=None, within=20.0):
        """The next message (of a kind), or None."""
        end = time.monotonic() + within
        while (left := end - time.monotonic()) > 0:
            frames = self.frames(left)
            if frames is None:
                break
            message = wire.decode(frames[0])
            if kind is None or isinstance(message, kind):
                return (message, frames[1]) if len(frames) == 2 else message
        return None

    def hello(self, **changes):
        self.say(wire.Hello(**{**dict(sampler=self.name, incarnation=1, session=""), **changes}))


class Learner(Peer):
    """A learner end for sending single messages, connected to one real sampler end."""

    def __init__(self, tmp_path, spool):
        super().__init__(zmq.ROUTER)
        at = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.end = link.Link([f"tcp://127.0.0.1:{at}"], ["box"], SamplerFlags(), spool, tmp_path, None)
        frames = self.frames(within=10)
        assert frames is not None, "the sampler says nothing"
        self.peer = frames[0]

    def say(self, *messages):
        for message in messages:
            self.send(self.peer, message)

    def hear(self, within):
        """The next message, or None."""
        frames = self.frames(within)
        return None if frames is None else wire.decode(frames[1])

    def hear_until(self, kind, name=None, within=20.0):
        """The messages up to the first of a kind (about a name); all messages if there is none."""
        heard = []
        end = time.monotonic() + within
        while time.monotonic() < end:
            message = self.hear(0.1)
            if message is not None:
                heard.append(message)
            if isinstance(message, kind) and name in (None, getattr(message, "name", None)):
                break
        return heard

    def hear_rest(self, silence=0.3, within=10.0):
        """The messages until a silence."""
        heard = []
        end = time.monotonic() + within
        while time.monotonic() < end and (message := self.hear(silence)) is not None:
            heard.append(message)
        return heard

    def close(self):
        self.end.close()
        super().close()


class Opened:
    """Hubs, raw peers and learners; closed after the test."""

    def __init__(self, folder):
        self.folder = folder
        self.things = []

    def add(self, thing):
        self.things.append(thing)
        return thing

    def hub(self, keys="none", held=(), **bounds):
        log = logging.getLogger(f"test.{self.folder}.{len(self.things)}")
        log.propagate = False
        log.handlers = [logging.FileHandler(self.folder / "log")]
        log.seen = self.folder / "log"
        log.setLevel(logging.INFO)
        before = account.Account()
        for name in held:
            before.add(name)
        h = self.add(hub.Hub("tcp://127.0.0.1:*", keys, WELCOME, limits(group(), **bounds), log))
        h.open(before)
        return h

    def raw(self, h, **more):
        return self.add(Raw(h.address, **more))

    def learner(self, spool):
        return self.add(Learner(self.folder, spool))


def opened_objects(folder):
    """The generator of the fixture `opened` for a file of tests."""
    opened = Opened(folder)
    yield opened
    for thing in opened.things:
        thing.close()


@pytest.fixture
def opened(tmp_path):
    yield from opened_objects(tmp_path)


def until(condition, within=20.0):
    """Whether the condition becomes true within this many seconds."""
    end = time.monotonic() + within
    while not condition():  # evaluated once a turn: the condition may become false again
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def give(peer, data, name):
    """Offer a group and answer asks until the hub has the group. The hub's last answer."""
    peer.say(wire.Offer(wire.manifest(name, data)))
    end = time.monotonic() + 20
    while time.monotonic() < end:
        m = peer.hear((wire.Ask, wire.Got, wire.Held))
        if isinstance(m, wire.Ask):
            peer.say(wire.Leaves(m.name, m.first), bytes(wire.leaves(data, m.first, m.count)))
        elif m is None or m.names:
            return m
    return None


def fates(h):
    """(name, fate) of the arrived groups."""
    return [(arrived.name, arrived.fate) for arrived in h.drain()]


def pull_all(peer, of):
    """Fetch an object from the hub and return its bytes."""
    pull = wire.Pull(of, sink := bytearray(of.nbytes), wire.Window())
    end = time.monotonic() + 20
    while not pull.done and time.monotonic() < end:
        while (leaves := pull.ask(time.monotonic())) is not None:
            peer.say(wire.Ask(of.name, *leaves))
        message, payload = peer.hear(wire.Leaves)
        pull.put(message.first, payload, time.monotonic())
    return bytes(sink)


def test_a_group_arrives_once(opened):
    h = opened.hub(held=["box/1/7"])
    peer = opened.raw(h)
    peer.hello()
    assert peer.hear() == WELCOME
    data = encode_group(group())
    assert give(peer, data, "box/1/3") == wire.Got(["box/1/3"])
    # a second offer is not fetched
    assert give(peer, data, "box/1/3") == wire.Got(["box/1/3"]) and h.counts["duplicate"] == 1
    # the checkpoint has it: the sampler may delete it
    assert give(peer, data, "box/1/7") == wire.Held(["box/1/7"]) and h.counts["duplicate"] == 2
    (arrived,) = h.drain()
    assert (arrived.name, arrived.data, arrived.fate) == ("box/1/3", data, "")
    assert abs(arrived.when - time.time()) < 30 and h.drain() == []
    h.held(["box/1/3"])
    assert peer.hear(wire.Held) == wire.Held(["box/1/3"])
    for _ in range(2):  # a heartbeat is answered, its values are kept
        peer.hello(session="session", handed=9, lost=["box/1/4", "box/1/3", "other/1/1", "junk"])
        assert peer.hear(wire.Got).names == [] and h.reports["box", 1] == 9
    assert fates(h) == [("box/1/4", "lost")]  # an arrived group is not lost
    h.held(["box/1/4"])
    assert peer.hear(wire.Held) == wire.Held(["box/1/4"])
    peer.hello(session="session", handed=9, lost=["box/1/4"])  # an unanswered message is repeated
    assert peer.hear(wire.Held) == wire.Held(["box/1/4"]) and h.drain() == []


def test_damaged_leaves_are_asked_for_again(opened):
    h = opened.hub()
    peer = opened.raw(h)
    peer.hello()
    data = encode_group(group())
    peer.say(wire.Offer(wire.manifest("box/1/0", data)))
    ask = peer.hear(wire.Ask)
    peer.say(wire.Leaves(ask.name, ask.first), bytes([data[0] ^ 1]) + data[1:])
    assert peer.hear(wire.Ask) == ask and h.counts["bad_leaves"] == 1
    peer.say(wire.Leaves(ask.name, ask.first), data)
    assert peer.hear(wire.Got) == wire.Got(["box/1/0"])


def test_weights_are_served_in_ranges(opened, tmp_path):
    h = opened.hub()
    early, late = opened.raw(h, name="early"), opened.raw(h, name="late")
    early.hello()
    early.hear(wire.Welcome)
    (tmp_path / "v000003.safetensors").write_bytes(BLOB)
    h.broadcast(3, tmp_path / "v000003.safetensors", 12.5)
    late.hello()
    for peer in (early, late):  # a connected peer gets the offer, a later peer too
        offer = peer.hear(wire.Offer)
        assert offer == wire.Offer(wire.manifest("v000003.safetensors", BLOB), 3, 12.5)
        assert pull_all(peer, offer.of) == BLOB
    assert h.counts["bytes_out"] == 2 * len(BLOB)
    for v in (4, 5):
        path = tmp_path / f"v00000{v}.safetensors"
        path.write_bytes(BLOB[: 100 * v])
        h.broadcast(v, path, 0.0)
    assert until(lambda: list(h.weights) == ["v000004.safetensors", "v000005.safetensors"])
    early.say(wire.Ask("v000003.safetensors", 0, 1))
    assert early.hear(wire.Gone) == wire.Gone("v000003.safetensors")
    early.hello(session="session")
    # the answer to a heartbeat names the newest weights; the offer can be repeated
    assert early.hear(wire.Got).newest == "v000005.safetensors"
    assert until(lambda: early.hear(wire.Offer, within=0.2) is None)
    early.say(wire.Want())
    assert early.hear(wire.Offer).version == 5
    early.say(wire.Ask("v000005.safetensors", 3, 1))  # out of range: no answer
    early.say(wire.Ask("v000005.safetensors", 0, 1))
    assert early.hear(wire.Leaves)[1] == BLOB[:500]


def test_messages_that_a_hub_refuses(opened):
    h = opened.hub()
    odd, mute, peer = opened.raw(h, name="a/b"), opened.raw(h), opened.raw(h)
    odd.hello()
    assert "--name=a/b: a sampler's name is 1 to 64 letters" in odd.hear(wire.Refuse).why
    mute.say(wire.Offer(wire.manifest("box/1/0", b"x")))  # without a hello
    assert mute.hear() == wire.Gone("")
    for junk in (b"", b"\x80\x04K\x01.", b"x" * 1000):
        peer.say(junk)
    peer.hello()
    assert peer.hear(wire.Welcome) and peer.hear(wire.Got).names == [] and until(lambda: h.counts["malformed"] == 3)
    most = h.limits.nbytes
    leaves = [[b"x" * 32] * -(-n // wire.LEAF) for n in (most, most + 1)]
    too_large = wire.Manifest("box/1/1", most + 1, leaves[1])
    for of in (too_large, wire.Manifest("box/1/2", 10, [])):
        peer.say(wire.Offer(of))
        assert peer.hear(wire.Got).names == [of.name]  # not fetched, but recorded
    for of in (wire.manifest("other/1/0", b"x"), wire.manifest("box/1/-4", b"x"), wire.manifest("box", b"x")):
        peer.say(wire.Offer(of))
    assert until(lambda: h.counts["malformed"] == 6)  # groups of a different sampler
    assert fates(h) == [("box/1/1", "refused"), ("box/1/2", "refused")]
    assert h.size == 0 and not h.peers[next(iter(h.peers))].pulls
    peer.say(wire.Offer(wire.Manifest("box/1/3", most, leaves[0])))  # the maximum size is accepted
    assert peer.hear(wire.Ask).name == "box/1/3"
    peer.say(b"y" * (17 << 20))  # above the socket's limit: disconnected
    again = opened.raw(h, name="again")
    again.hello()
    assert again.hear(wire.Welcome) is not None and h.counts["malformed"] == 6
    assert "other/1/0 is not a group of sampler box" in h.log.seen.read_text()


def test_memory_for_groups_is_bounded_and_freed(opened):
    data = encode_group(group())
    h = opened.hub(room=2 * len(data) + 10)
    peer = opened.raw(h)
    peer.hello()
    for i in range(4):
        peer.say(wire.Offer(wire.manifest(f"box/1/{i}", data)))
    names = [peer.hear(wire.Ask).name for _ in range(2)]
    assert names == ["box/1/0", "box/1/1"] and peer.hear(wire.Ask, within=0.3) is None and h.size == 2 * len(data)
    for name in names:
        peer.say(wire.Leaves(name, 0), data)
    assert until(lambda: len(h.arrived) == 2) and peer.hear(wire.Ask, within=0.3) is None  # arrived, but not processed
    for arrived in h.drain():
        h.free(len(arrived.data))
    assert [peer.hear(wire.Ask).name for _ in range(2)] == ["box/1/2", "box/1/3"]
    again = opened.raw(h)  # the same sampler on a new connection: open asks are repeated
    again.hello()
    assert [again.hear(wire.Ask).name for _ in range(2)] == ["box/1/2", "box/1/3"]
    assert h.size == 2 * len(data) and len(h.peers) == 1


def test_the_memory_of_a_silent_sampler_is_freed(opened, monkeypatch):
    monkeypatch.setattr(hub, "SILENT", 1.0)
    data = encode_group(group())
    h = opened.hub(room=len(data) // 2)  # one group larger than the limit is accepted
    gone, here = opened.raw(h, name="gone"), opened.raw(h, name="here")
    for peer in (gone, here):
        peer.hello()
        peer.say(wire.Offer(wire.manifest(f"{peer.name}/1/0", data)))
        assert peer is here or peer.hear(wire.Ask).name == "gone/1/0"
    end = time.monotonic() + 20
    while (ask := here.hear(wire.Ask, within=0.2)) is None and time.monotonic() < end:
        here.hello(session="session")
        here.say(wire.Offer(wire.manifest("here/1/0", data)))
    assert ask.name == "here/1/0" and [p.sampler for p in h.peers.values()] == ["here"]
    assert "sampler gone sends nothing" in h.log.seen.read_text()


def test_a_group_resumes_from_its_last_good_leaf(opened):
    """A disconnect in the middle of a large group: on the new connection only missing leaves are asked for."""
    h = opened.hub(max_tokens=1 << 20)
    data = os.urandom(7 * wire.LEAF)
    first = opened.raw(h)
    first.hello()
    first.say(wire.Offer(wire.manifest("box/1/0", data)))
    asks = [first.hear(wire.Ask) for _ in range(2)]
    assert [(a.first, a.count) for a in asks] == [(0, 4), (4, 3)]
    first.say(wire.Leaves("box/1/0", 4), bytes(wire.leaves(data, 4, 3)))
    (pull,) = next(iter(h.peers.values())).pulls.values()
    assert until(lambda: 4 not in pull.asked)
    again = opened.raw(h)
    again.hello()
    asks = [again.hear(wire.Ask)]
    assert (asks[0].first, asks[0].count) == (0, 4)
    for a in asks:
        again.say(wire.Leaves("box/1/0", a.first), bytes(wire.leaves(data, a.first, a.count)))
    assert until(lambda: h.arrived) and [(a.name, a.data == data) for a in h.drain()] == [("box/1/0", True)]


def test_two_samplers_of_one_name(opened):
    """The later sampler stays; the earlier sampler is told to stop."""
    h = opened.hub()
    early, late = opened.raw(h), opened.raw(h)
    early.hello(incarnation=1)
    assert early.hear(wire.Welcome)
    late.hello(incarnation=2)
    assert late.hear(wire.Welcome)
    early.hello(incarnation=1, session="session")
    assert "a newer sampler is also called box: give each sampler a different --name" in early.hear(wire.Refuse).why
    assert [p.incarnation for p in h.peers.values()] == [2]


def test_only_known_keys_are_accepted(opened, tmp_path):
    keys.make_keys(str(tmp_path / "keys"), 2)
    keys.make_keys(str(tmp_path / "others"), 1)
    h = opened.hub(keys=str(tmp_path / "keys" / "learner"))
    valid = keys.sampler_keys(tmp_path / "keys" / "sampler0")
    foreign = keys.sampler_keys(tmp_path / "others" / "sampler0")
    friend = opened.raw(h, keys=keys.sampler_keys(tmp_path / "keys" / "sampler1"), name="sampler1")
    refused = [
        opened.raw(h, keys=foreign._replace(learner=valid.learner)),
        opened.raw(h, keys=valid._replace(learner=foreign.learner)),
        opened.raw(h),  # without keys
    ]
    for peer in (friend, *refused):
        peer.hello()
    assert friend.hear() == WELCOME
    assert [peer.hear(within=0.3) for peer in refused] == [None] * 3 and len(h.peers) == 1
    assert until(lambda: h.counts["strangers"] >= 1)
    assert "a connection with an unknown public key was refused" in h.log.seen.read_text()
    secret = tmp_path / "keys" / "sampler0" / "sampler0.key_secret"
    assert secret.stat().st_mode & 0o077 == 0


def test_damaged_names_stop_no_sampler_and_delete_no_file(opened, tmp_path):
    """Damaged messages of a learner: invalid numbers, a path outside the spool."""
    spool = account.Spool(tmp_path / "spool", ["box"], 1)
    spool.hand_over("box", "box/1/2", b"a group")
    (tmp_path / "1-2").write_bytes(b"of another program")
    learner = opened.learner(spool)
    bad = ["box/1/2&", "box/2", "box/../../1/2", "other/1/2"]
    learner.say(WELCOME, *(wire.Ask(name, 0, 1) for name in bad))
    learner.say(wire.Held(bad), wire.Got(bad), wire.Ask("box/1/2", 0, 1))
    heard = learner.hear_until(wire.Leaves)
    assert [m.name for m in heard if isinstance(m, wire.Gone)] == bad
    assert heard[-1] == wire.Leaves("box/1/2", 0) and learner.end.error == ""
    assert (tmp_path / "1-2").exists() and spool.read("box/1/2") == b"a group"


def test_a_sampler_checks_its_learners_run(tmp_path):
    """The learner restarted with different flags, or it trains on a different task file."""
    welcomes = queue.Queue()
    end = SimpleNamespace(welcome=welcomes)
    welcomes.put(msgspec.structs.replace(WELCOME, session="another"))
    sampler.check_same_run(end, WELCOME)  # the same flags
    welcomes.put(msgspec.structs.replace(WELCOME, run={**WELCOME.run, "topk": 20}))
    sentence = r"the learner restarted and its topk changed: restart this sampler"
    with pytest.raises(ValueError, match=sentence):
        sampler.check_same_run(end, WELCOME)
    task = tmp_path / "task.py"
    with pytest.raises(ValueError, match="task.py:Sums: no such file; copy the learner's file here"):
        sampler.connect(SamplerFlags(connect="tcp://127.0.0.1:9", task=f"{task}:Sums", rollout="hf"), 1)
    task.write_text("class Sums: ...")
    sampler.check_task(f"{task}:Sums", "elsewhere/task.py:Sums", hashlib.sha256(task.read_bytes()).hexdigest())
    with pytest.raises(ValueError, match="differs from the learner's elsewhere/task.py:Sums"):
        sampler.check_task(f"{task}:Sums", "elsewhere/task.py:Sums", "0" * 64)


def test_a_taken_address(opened):
    h = opened.hub()
    with pytest.raises(ValueError, match="--samplers=tcp://127.0.0.1:.*: Address already in use; name a free address"):
        hub.Hub(h.address, "none", WELCOME, limits(group()), h.log)


def test_a_sampler_that_starts_again_fetches_the_rest_of_the_weights(opened, tmp_path):
    """A process that died during a download left a part of the file, partly damaged: only bad and missing leaves are
    sent again."""
    h, store = opened.hub(), tmp_path / "store"
    leaf = wire.LEAF
    store.mkdir()
    weights = os.urandom(7 * leaf + 100)
    (tmp_path / "v000003.safetensors").write_bytes(weights)
    of = wire.manifest("v000003.safetensors", weights)
    left = bytearray(weights[: 4 * leaf] + bytes(3 * leaf + 100))  # four of eight leaves had arrived
    left[2 * leaf + 7] ^= 1  # one of these is damaged
    (store / f"{of.root}.part").write_bytes(left)
    (store / "0123.part").write_bytes(b"of weights that are long gone")
    h.broadcast(3, tmp_path / "v000003.safetensors", 12.5)
    spool = account.Spool(tmp_path / "spool", ["box"], 1)
    end = opened.add(link.Link([h.address], ["box"], SamplerFlags(), spool, store, None))
    assert until(lambda: end.newest is not None, within=20)
    assert end.newest == (3, 12.5, store / "v000003.safetensors") and end.newest.path.read_bytes() == weights
    assert h.counts["bytes_out"] == 4 * leaf + 100 and [p.name for p in store.glob("*.part")] == []
    (tmp_path / "v000004.safetensors").write_bytes(weights)  # unchanged weights
    h.broadcast(4, tmp_path / "v000004.safetensors", 13.5)
    assert until(lambda: end.newest.version == 4, within=20)
    assert end.newest == (4, 13.5, store / "v000003.safetensors") and end.newest.path.read_bytes() == weights
    assert h.counts["bytes_out"] == 4 * leaf + 100


def test_withdrawn_weights_are_replaced_by_newer_weights(opened, tmp_path):
    """The newer offer can come before the withdrawal, or be lost."""
    learner = opened.learner(account.Spool(tmp_path / "spool", ["box"], 1))

    def is_asked_for(name):
        message = learner.hear_until(wire.Ask, name)[-1]
        return isinstance(message, wire.Ask) and message.name == name

    learner.say(WELCOME, wire.Offer(wire.manifest("v3", BLOB), 3, 1.0))
    assert is_asked_for("v3")
    learner.say(wire.Offer(wire.manifest("v4", BLOB[1:]), 4, 2.0), wire.Gone("v3"))
    assert is_asked_for("v4")
    learner.say(wire.Gone("v4"))
    learner.hear_rest(silence=1.0)  # messages in flight
    learner.say(wire.Gone("v4"), wire.Got([], "v5"))
    heard = learner.hear_until(wire.Want) + learner.hear_rest()
    assert wire.Want() in heard and not any(isinstance(m, wire.Ask) for m in heard)
    assert learner.end.newest is None and learner.end.error == ""


# -- the source: fates of groups ---------------------------------------------------------------------------------------


def source(folder, room=256 << 20, with_deltas=False, **changes):
    cfg = make_cfg(samplers=str(folder), **{**dict(give_up=0.5), **changes})
    log = logging.getLogger(f"source.{folder}")
    log.propagate = False
    bounds = limits(group(), room=room)
    end = files.FilesHub(str(folder), WELCOME, bounds, log)
    store = Store(folder / "versions", Comm(), with_deltas)
    return remote.RemoteSource(end, cfg, bounds, Sampling(), store, Comm(), log)


def hand_over(folder, source, n, version=0, **changes):
    """Write a group like a sampler."""
    g = replace(group(), uid=("box", 1, n), version=version, t_published=source.published.get(version, 0.0))
    data = account.with_digest(encode_group(replace(g, **changes)))
    (folder / "rollouts" / "box").mkdir(parents=True, exist_ok=True)
    account.write_atomically(folder / "rollouts" / "box" / f"1-{n}", data)


def weights(x):
    return {"a": torch.full((3,), float(x)), "b": torch.ones(2)}.items()


def test_every_group_has_one_fate(tmp_path, monkeypatch):
    s = source(tmp_path, max_staleness=1, window_seconds=1000.0)
    for v in range(3):
        s.publish(v, weights(v))
    now = time.time()
    s.published = {v: when - 3000.0 for v, when in s.published.items()}
    hand_over(tmp_path, s, 0, version=2, t_end=now - 900.0)
    hand_over(tmp_path, s, 1, version=0)  # two updates old
    hand_over(tmp_path, s, 2, version=2, t_published=5.0)  # version 2 of a different history
    hand_over(tmp_path, s, 3, version=7)  # never published
    hand_over(tmp_path, s, 4, version=1, sampling=Sampling(temperature=0.5))
    hand_over(tmp_path, s, 5, version=1, uid=("box", 1, 9))  # a different group's name inside
    (tmp_path / "rollouts" / "box" / "1-6").write_bytes(account.with_digest(b"damaged")[:-1])
    hand_over(tmp_path, s, 7, version=1, t_end=now - 1100.0)  # sampled too long ago
    os.utime(tmp_path / "rollouts" / "box" / "1-0", (1.0, 1.0))  # an implausible clock
    hand_over(tmp_path, s, 8, version=1, t_end=now + 9000.0)
    too_big = account.with_digest(bytes(s.limits.nbytes + 1))  # valid, but larger than any group
    (tmp_path / "rollouts" / "box" / "1-9").write_bytes(too_big)
    hello = wire.Hello("box", 1, "session", 11)  # 11 groups reported, the last one is missing
    account.write_atomically(tmp_path / "samplers" / "box", wire.encode(hello))
    (tmp_path / "rollouts" / "box" / "1-2~").write_bytes(b"an editor's")
    got = s.next(2, 2)
    assert [g.uid[2] for g in got] == [0, 8] and s.counts["lost"] == 0  # it may still arrive
    monkeypatch.setattr(files, "PATIENCE", 0.0)
    s.hub.beat = -files.BEAT
    assert s.next(1, 2, stop=[]) == []
    s.error = ""
    assert s.counts == {"trained": 2, "staleness": 1, "orphan": 2, "refused": 3, "window": 1, "corrupt": 1, "lost": 1}
    m = {name.removeprefix("remote/"): value for name, value in s.metrics().items()}
    names = ("trained", "orphan", "corrupt", "refused", "lost", "handed", "waiting", "samplers")
    assert [m[name] for name in names] == [2, 2, 1, 3, 1, 11, 0, 1]
    assert sum(m[fate] for fate in remote.FATES) == m["handed"] == len(s.since) == s.state_dict()["account"][0][2]
    assert s.next(1, 2) == []
    for words in ("no group to train on for 0 s at", "2 trained", "--resume continues from here"):
        assert words in s.error
    again = source(tmp_path)
    again.load_state_dict(s.state_dict())
    assert again.metrics()["remote/handed"] == 11 and again.counts == s.counts


def test_groups_given_back_are_returned_again(tmp_path):
    """Groups given back are not trained on and not in the account; the next call returns them again."""
    s = source(tmp_path)
    s.publish(0, weights(0))
    for n in range(2):
        hand_over(tmp_path, s, n)
    assert s.next(3, 0, stop=["SIGTERM"]) == [] and s.error == "" and not s.counts
    assert s.next(2, 0) and s.counts["trained"] == 2 and s.hub.size == 0
    assert s.next(1, 0, stop=["SIGTERM"]) == []
    s.give_back()  # no effect: both groups were trained on
    assert s.counts["trained"] == 2 and len(s.since) == 2
    hand_over(tmp_path, s, 2)
    assert s.next(1, 0)
    s.give_back()
    assert s.counts["trained"] == 2 and s.since == ["box/1/0", "box/1/1"]
    assert [g.uid[2] for g in s.next(1, 0)] == [2] and s.counts["trained"] == 3


def test_suspended_time_does_not_count_for_give_up(tmp_path, monkeypatch):
    """A learner suspended for longer than --give_up waits further; an awake learner gives up."""
    s = source(tmp_path, give_up=30.0)
    s.publish(0, weights(0))
    clock, jumps = [0.0], iter([0.0, 1000.0])

    def drain():
        clock[0] += next(jumps, 1.0)
        return []

    fake = SimpleNamespace(monotonic=lambda: clock[0], time=time.time, sleep=lambda seconds: None)
    monkeypatch.setattr(remote, "time", fake)
    monkeypatch.setattr(s.hub, "drain", drain)
    assert s.next(1, 0) == [] and "no group to train on for 30 s" in s.error and 1030 < clock[0] < 1035


def test_weights_of_a_killed_history_do_not_replace_new_weights(opened, tmp_path):
    """A learner was killed at version 17 and resumes from its checkpoint at 10: its folder has higher versions than it
    publishes."""
    dead = source(tmp_path)
    for v in (16, 17):
        dead.publish(v, weights(v))
    s = source(tmp_path)
    s.publish(10, weights(10))
    for folder in ("models", "versions"):
        assert [p.name for p in (tmp_path / folder).glob("v*.safetensors")] == ["v000010.safetensors"]
    spool = account.Spool(tmp_path / "rollouts", ["box"], 1)
    end = opened.add(files_link.FilesLink(str(tmp_path), ["box"], SamplerFlags(), spool))
    assert until(lambda: end.newest is not None) and end.newest.version == 10
    s.publish(11, weights(11))
    assert until(lambda: end.newest.version == 11) and end.newest.path.is_file()


def test_memory_for_groups_of_a_folder(tmp_path):
    """Groups beyond the limit stay in the folder, and the sampler is not told that they were fetched."""
    s = source(tmp_path, room=int(2.5 * len(encode_group(group()))))
    s.publish(0, weights(0))
    for n in range(4):
        hand_over(tmp_path, s, n)
    assert [arrived.name for arrived in s.hub.drain()] == ["box/1/0", "box/1/1"] and s.hub.drain() == []
    assert wire.decode((tmp_path / "got" / "box").read_bytes()).names == ["box/1/0", "box/1/1"]
    s.hub.free(s.hub.size)
    assert [arrived.name for arrived in s.hub.drain()] == ["box/1/2", "box/1/3"]


def test_a_folder_without_a_learner_and_a_full_disk(opened, tmp_path, monkeypatch):
    def folder_link(incarnation, **changes):
        spool = account.Spool(tmp_path / "rollouts", ["box"], incarnation)
        return opened.add(files_link.FilesLink(str(tmp_path), ["box"], SamplerFlags(**changes), spool))

    s = source(tmp_path)
    s.publish(0, weights(0))
    end = folder_link(1, give_up=0.5)
    assert until(lambda: "no message from a learner" in end.error, within=20)
    hand_over(tmp_path, s, 0)

    def full(path, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(files, "write_atomically", full)
        assert s.next(1, 0)  # the learner continues and writes later
        s.state_dict()
        s.saved()
        s.publish(1, weights(1))
    assert not (tmp_path / "held" / "box").exists() and not (tmp_path / "models" / "v000001.safetensors").exists()
    s.hub.beat = -files.BEAT
    assert s.hub.drain() == []  # with the next heartbeat
    assert wire.decode((tmp_path / "held" / "box").read_bytes()).names == ["box/1/0"]
    assert wire.decode((tmp_path / "models" / "newest").read_bytes()).version == 1
    assert (tmp_path / "models" / "v000001.safetensors").exists()


def test_lost_groups_of_a_spool_are_reported_until_held(tmp_path):
    spool = account.Spool(tmp_path, ["box"], 7)
    for n in range(3):
        spool.hand_over("box", f"box/7/{n}", b"group %d" % n)
    (tmp_path / "box" / "7-0").write_bytes(b"damaged")
    (tmp_path / "box" / "7-1").unlink()
    assert spool.read("box/7/0") is None and spool.read("box/7/1") is None and spool.read("box/7/2") == b"group 2"
    assert spool.lost["box"] == ["box/7/0", "box/7/1"] and list(spool.waiting["box"]) == ["box/7/2"]
    again = account.Spool(tmp_path, ["box"], 8)  # a new incarnation
    assert again.lost["box"] == ["box/7/0", "box/7/1"] and list(again.waiting["box"]) == ["box/7/2"]
    again.forget(["box/7/0", "box/7/2"])
    assert again.lost["box"] == ["box/7/1"] and sorted(p.name for p in (tmp_path / "box").iterdir()) == ["7-1.lost"]


def test_groups_are_held_after_the_checkpoint_and_not_returned_again(tmp_path):
    s = source(tmp_path)
    s.publish(0, weights(0))
    for n in range(3):
        hand_over(tmp_path, s, n)
    held = tmp_path / "held" / "box"
    assert len(s.next(2, 0)) == 2
    state = s.state_dict()
    s.next(1, 0)  # after the state was taken
    assert not held.exists()
    s.saved()
    assert sorted(wire.decode(held.read_bytes()).names) == ["box/1/0", "box/1/1"]
    assert s.since == ["box/1/2"]  # for the next checkpoint
    again = source(tmp_path)
    again.load_state_dict(state)
    again.publish(0, weights(0))  # the same bytes: groups of these weights are still valid
    assert [g.uid[2] for g in again.next(1, 0)] == [2]  # the files of the two remaining groups are held
    again.state_dict()
    again.saved()
    assert sorted(wire.decode(held.read_bytes()).names) == ["box/1/0", "box/1/1", "box/1/2"]
    other = source(tmp_path)
    other.publish(0, weights(1))  # different bytes under the same number: a different history
    assert other.published[0] != s.published[0]


def test_weights_are_published_every_sync_every_updates(tmp_path):
    s = source(tmp_path, sync_every=2, max_staleness=4)
    for v in range(6):
        s.publish(v, weights(v + 1 / 3))
    newest = wire.decode((tmp_path / "models" / "newest").read_bytes())
    names = sorted(p.name for p in (tmp_path / "models").glob("v*"))
    assert newest.version == 4 and names == ["v000002.safetensors", "v000004.safetensors"]
    tensors = dict(read_tensors(tmp_path / "models" / newest.of.name))
    assert torch.equal(tensors["a"], torch.full((3,), 4 + 1 / 3))


def test_groups_without_spread_are_not_trained_on(tmp_path):
    """Only with --dynamic_sampling."""
    flat = [replace(r, reward=0.5) for r in group().responses]
    for rounds, wanted in ((0, [0, 1, 2]), (1, [0, 2, 3])):
        folder = tmp_path / str(rounds)
        s = source(folder, dynamic_sampling=rounds)
        s.publish(0, weights(0))
        for n in range(4):
            hand_over(folder, s, n, **({"responses": flat} if n == 1 else {}))
        assert [g.uid[2] for g in s.next(3, 0)] == wanted
        assert (s.counts["no_spread"], s.counts["trained"]) == (rounds, 3)
        assert s.metrics()["remote/no_spread"] == rounds
