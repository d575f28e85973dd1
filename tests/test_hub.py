"""The hub's socket from outside: keys, unknown peers, protocols, sizes, replays, bounded memory, with raw peers."""

import contextlib
import hashlib
import io
import os
import resource
import time
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
import zmq
from conftest import make_cfg
from test_wire import BLOB, RUN, group, limits

from machinery.checkpoint.tensors import read_tensors
from machinery.ranks import Comm
from remote import account, files, hub, keys, link, sampler, wire
from remote import source as remote
from remote.groups import encode_group
from remote.sampler import SamplerFlags
from remote.weights import Store
from sampling import Sampling

WELCOME = wire.Welcome("session", RUN, {})


class Peer:
    """One end of a socket, for single messages. No call blocks: ZeroMQ holds back messages to a peer after a refused
    handshake, so a message is dropped after a second."""

    route: list[bytes] = []  # a learner's end names the sampler first

    def __init__(self, kind):
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDTIMEO, 1000), (zmq.RCVTIMEO, 5000)):
            self.socket.setsockopt(option, value)

    def say(self, *messages):
        """Send messages: each is a message, bytes, or a tuple of several frames."""
        for message in messages:
            frames = message if isinstance(message, tuple) else (message,)
            frames = [frame if isinstance(frame, bytes) else wire.encode(frame) for frame in frames]
            with contextlib.suppress(zmq.Again):
                self.socket.send_multipart([*self.route, *frames])

    def hear(self, kind=object, within=20.0):
        """The next message of a kind; None after this many seconds."""
        end = time.monotonic() + within
        while (left := end - time.monotonic()) > 0 and self.socket.poll(int(1000 * left)):
            message = wire.decode(self.socket.recv_multipart()[-1])
            if isinstance(message, kind):
                return message
        return None

    def close(self):
        self.context.destroy(linger=0)


class Raw(Peer):
    """A sampler's end."""

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

    def hello(self, **changes):
        self.say(wire.Hello(**{**dict(sampler=self.name, incarnation=1, session=""), **changes}))


class Learner(Peer):
    """A learner's end, connected to one real sampler's end."""

    def __init__(self, tmp_path, spool):
        super().__init__(zmq.ROUTER)
        address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.end = link.Link(address, SamplerFlags(), spool, tmp_path, None)
        assert self.socket.poll(10_000), "the sampler says nothing"
        self.route = self.socket.recv_multipart()[:1]

    def close(self):
        self.end.close()
        super().close()


class Opened(contextlib.ExitStack):
    """Hubs, links, raw peers and learners; closed after the test."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def add(self, thing):
        self.callback(thing.close)
        return thing

    def hub(self, keys="none", held=(), **bounds):
        log = remote.open_log(self.folder)
        h = self.add(hub.Hub("tcp://127.0.0.1:*", keys, WELCOME, limits(group(), **bounds), log))
        h.held.update(held)
        h.open()
        return h

    def log(self):
        return (self.folder / "remote.log").read_text()

    def raw(self, h, **more):
        return self.add(Raw(h.address, **more))

    def learner(self, spool):
        return self.add(Learner(self.folder, spool))

    def link(self, h, folder, name="box", keys=None, **changes):
        spool = account.Spool(folder / "spool" / name, name, 1)
        return self.add(link.Link(h.address, SamplerFlags(**changes), spool, folder, keys))

    def folder_link(self, folder, name="box", **changes):
        spool = account.Spool(folder / "rollouts" / name, name, 1)
        return self.add(files.FilesLink(str(folder), SamplerFlags(**changes), spool))


@pytest.fixture
def opened(tmp_path):
    with Opened(tmp_path) as opened:
        yield opened


def until(condition, within=20.0):
    """Whether the condition becomes true within this many seconds."""
    end = time.monotonic() + within
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return bool(met)  # evaluated once a turn: the condition may become false again


def give(peer, data, name):
    """Offer a group and answer asks until the hub has the group. The hub's last answer."""
    peer.say(wire.Offer(wire.manifest(name, data)))
    while isinstance(m := peer.hear((wire.Ask, wire.Receipt)), wire.Ask) or (m and not m.got):
        if isinstance(m, wire.Ask):
            peer.say(wire.chunk_of(data, m))
    return m


def fates(h):
    """(name, fate) of the arrived groups."""
    return [(arrived.name, arrived.fate) for arrived in h.drain()]


def pull_all(peer, of):
    """Fetch an object from the hub and return its bytes."""
    pull = wire.Pull(of, sink := io.BytesIO())
    while not pull.done:
        peer.say(wire.Ask(of.name, pull.at))
        pull.put(peer.hear(wire.Chunk))
    return sink.getvalue()


def test_a_group_arrives_once(opened):
    h = opened.hub(held=["box/1/7"])
    peer = opened.raw(h)
    peer.hello()
    assert peer.hear() == WELCOME
    data = encode_group(group())
    for _ in range(2):  # the second offer is not fetched
        assert give(peer, data, "box/1/3") == wire.Receipt(["box/1/3"])
    # the checkpoint has it: the sampler may delete it
    assert give(peer, data, "box/1/7") == wire.Receipt(["box/1/7"], ["box/1/7"]) and h.counts["duplicate"] == 2
    (arrived,) = h.drain()
    assert (arrived.name, arrived.data, arrived.fate) == ("box/1/3", data, "")
    assert abs(arrived.when - time.time()) < 30 and h.drain() == []
    h.hold(["box/1/3"])
    assert peer.hear(wire.Receipt) == wire.Receipt([], ["box/1/3"])
    for _ in range(2):  # a heartbeat is answered, its values are kept
        peer.hello(session="session", handed=9, lost=["box/1/4", "box/1/2", "other/1/1", "junk"])
        assert peer.hear(wire.Receipt) == wire.Receipt() and h.reports["box", 1] == 9
    assert fates(h) == [("box/1/4", "lost"), ("box/1/2", "lost")]
    peer.hello(session="session", handed=9, lost=["box/1/3"])
    assert peer.hear(wire.Receipt) == wire.Receipt([], ["box/1/3"]) and fates(h) == []  # an arrived group is not lost
    h.hold(["box/1/4"])
    for _ in range(2):  # an unanswered message is repeated
        assert peer.hear(wire.Receipt) == wire.Receipt([], ["box/1/4"]) and h.drain() == []
        peer.hello(session="session", handed=9, lost=["box/1/4"])


def test_weights_are_served_in_chunks(opened, tmp_path):
    h = opened.hub()
    early, late = opened.raw(h, name="early"), opened.raw(h, name="late")
    early.hello()
    early.hear(wire.Welcome)
    broadcast(h, tmp_path, 3)
    late.hello()
    for peer in (early, late):  # a connected peer gets the offer, a later peer too
        offer = peer.hear(wire.Offer)
        assert offer == wire.Offer(wire.manifest("v000003.safetensors", BLOB), 3, 12.5)
        assert pull_all(peer, offer.of) == BLOB
    assert h.counts["bytes_out"] == 2 * len(BLOB)
    for v in (4, 5):
        broadcast(h, tmp_path, v, BLOB[: 100 * v])
    assert until(lambda: list(h.objects) == ["v000004.safetensors", "v000005.safetensors"])
    early.say(wire.Ask("v000003.safetensors", 0))
    assert early.hear(wire.Chunk) == wire.Chunk("v000003.safetensors", 0, b"")  # no longer there
    assert until(lambda: early.hear(wire.Offer, within=0.2) is None)
    for known, offered in ((4, True), (5, False)):
        early.hello(session="session", newest=known)  # a lost offer is repeated after a heartbeat
        assert isinstance(early.hear((wire.Offer, wire.Receipt)), wire.Offer) == offered
    early.say(wire.Ask("v000005.safetensors", 10**17), wire.Ask("v000005.safetensors", 0))
    assert [early.hear(wire.Chunk).data for _ in range(2)] == [b"", BLOB[:500]]
    broadcast(h, tmp_path, 6)
    early.say(wire.Ask("v000006.safetensors", 0))
    early.hear(wire.Chunk)
    for v in (7, 8, 9):  # a slow fetch lasts longer than several broadcasts
        broadcast(h, tmp_path, v, BLOB[:v])
    assert until(lambda: list(h.objects) == [f"v00000{v}.safetensors" for v in (6, 8, 9)])
    assert until(lambda: late.hear(within=0.2) is None)
    late.hello(session="of an earlier start", newest=9)  # its version 9 can have other weights
    assert isinstance(late.hear((wire.Offer, wire.Receipt)), wire.Offer)


def test_messages_that_a_hub_refuses(opened):
    h = opened.hub()
    early, peer = opened.raw(h), opened.raw(h)
    early.say(wire.Offer(wire.manifest("box/1/0", b"x")))  # without a hello
    assert early.hear(within=0.3) is None
    for one, incarnation in ((early, 1), (peer, 2)):  # the later of two samplers of one name stays
        one.hello(incarnation=incarnation)
        assert one.hear(wire.Welcome)
    early.hello(incarnation=1, session="session")
    assert "a newer sampler is also called box: give each sampler a different --name" in early.hear(wire.Refuse).why
    assert [p.incarnation for p in h.peers.values()] == [2] and peer.hear(wire.Receipt) == wire.Receipt()
    most = h.limits.nbytes
    peer.say(wire.Offer(wire.Manifest("box/1/1", most + 1, "")))
    assert peer.hear(wire.Receipt).got == ["box/1/1"]  # not fetched, but recorded
    peer.say(*(wire.Offer(wire.manifest(name, b"x")) for name in ("other/1/0", "box/1/-4", "box")))
    assert until(lambda: h.counts["malformed"] == 3)  # groups of a different sampler
    assert fates(h) == [("box/1/1", "refused")] and h.size == 0
    peer.say(wire.Offer(wire.Manifest("box/1/3", most, "")))  # the maximum size is accepted
    assert peer.hear(wire.Ask).name == "box/1/3"
    peer.say(b"y" * (17 << 20))  # above the socket's limit: disconnected
    again = opened.raw(h, name="again")
    again.hello()
    assert again.hear(wire.Welcome) is not None and h.counts["malformed"] == 3
    assert "other/1/0 is not a group of sampler box" in opened.log()


def test_memory_for_groups_is_bounded_and_freed(opened):
    data = encode_group(group())
    h = opened.hub(room=2 * len(data) + 10)
    peer = opened.raw(h)
    peer.hello()
    offers = [wire.Offer(wire.manifest(f"box/1/{i}", data)) for i in range(4)]
    peer.say(*offers)
    asks = [peer.hear(wire.Ask) for _ in range(2)]
    assert asks == [wire.Ask("box/1/0", 0), wire.Ask("box/1/1", 0)]
    assert peer.hear(wire.Ask, within=0.3) is None and h.size == 2 * len(data)
    peer.say(wire.Chunk("box/1/0", 0, bytes([data[0] ^ 1]) + data[1:]))  # different bytes: it is given up
    assert until(lambda: h.size == len(data)) and h.counts["malformed"] == 1
    peer.say(offers[0])
    assert peer.hear(wire.Ask) == wire.Ask("box/1/0", 0)
    peer.say(wire.Chunk("box/1/0", 0, data[:100]), offers[0])  # a repeated offer continues
    assert [peer.hear(wire.Ask).start for _ in range(2)] == [100, 100]
    peer.say(wire.Chunk("box/1/0", 0, data), wire.Chunk("box/1/0", 100, data[100:]), wire.Chunk("box/1/1", 0, data))
    assert until(lambda: len(h.arrived) == 2)
    peer.say(*offers[2:])
    assert peer.hear(wire.Ask, within=0.3) is None  # arrived, but not processed
    for arrived in h.drain():
        assert arrived.data == data
        h.free(len(arrived.data))
    peer.say(*offers[2:])
    assert [peer.hear(wire.Ask).name for _ in range(2)] == ["box/1/2", "box/1/3"]
    again = opened.raw(h)  # the same sampler on a new connection offers again
    again.hello()
    assert again.hear(wire.Welcome) and h.size == 0 and len(h.peers) == 1


def test_only_known_keys_are_accepted(opened, tmp_path):
    keys.make_keys(str(tmp_path / "keys"), 2)
    keys.make_keys(str(tmp_path / "others"), 1)
    h = opened.hub(keys=str(tmp_path / "keys" / "learner"))
    valid, friends, foreign = (
        keys.sampler_keys(tmp_path / x) for x in ("keys/sampler0", "keys/sampler1", "others/sampler0")
    )
    friend = opened.raw(h, keys=friends, name="sampler1")
    wrong = (foreign._replace(learner=valid.learner), valid._replace(learner=foreign.learner), None)
    refused = [opened.raw(h, keys=pair) for pair in wrong]
    for peer in (friend, *refused):
        peer.hello()
    assert friend.hear() == WELCOME
    assert [peer.hear(within=0.3) for peer in refused] == [None] * 3 and len(h.peers) == 1 and not h.counts["faults"]
    assert (tmp_path / "keys" / "sampler0" / "sampler0.key_secret").stat().st_mode & 0o077 == 0


def test_a_sampler_checks_its_learners_run(tmp_path, monkeypatch):
    """The learner restarted with different flags, or it trains on a different task file."""
    opened = []
    monkeypatch.setattr(sampler, "open_source", lambda *args: opened.append(args) or SimpleNamespace())
    link = SimpleNamespace(welcome=None)
    me = sampler.RemoteSampler(SamplerFlags(), link, account.Spool(tmp_path, "box", 1), tmp_path)
    for welcome in (None, WELCOME, msgspec.structs.replace(WELCOME, session="another")):  # the same flags
        link.welcome = welcome
        me.read_welcome()
    assert opened == [(WELCOME, SamplerFlags(), tmp_path)] and me.source.owner == ("box", 1)
    link.welcome = msgspec.structs.replace(WELCOME, run=msgspec.structs.replace(RUN, topk=20))
    with pytest.raises(ValueError, match="the learner restarted as a different run: restart this sampler"):
        me.read_welcome()
    task = tmp_path / "task.py"
    task.write_text("class Sums: ...")
    sampler.check_file("task", f"{task}:Sums", "elsewhere/task.py:Sums", hashlib.sha256(task.read_bytes()).hexdigest())
    with pytest.raises(ValueError, match="differs from the learner's elsewhere/task.py:Sums"):
        sampler.check_file("task", f"{task}:Sums", "elsewhere/task.py:Sums", "0" * 64)
    described = msgspec.structs.replace(RUN, reward_digests={f"{task}:score": "0" * 64})
    with pytest.raises(ValueError, match="--reward=.*task.py:score: this file differs from the learner's"):
        sampler.configure(described, SamplerFlags())


def test_a_new_session_ends_the_fetch_of_an_earlier_one(opened, tmp_path):
    me = opened.link(opened.hub(), tmp_path)
    me.close()  # its thread
    me.work = iter(())
    me._handle(WELCOME)
    assert me.work is None


def broadcast(h, folder, version, data=BLOB):
    """Publish these bytes as weights of a version."""
    path = folder / f"v{version:06d}.safetensors"
    path.write_bytes(data)
    h.broadcast(wire.Offer(wire.manifest(path.name, data), version, 12.5), path, None)


def test_unchanged_weights_are_fetched_once(opened, tmp_path):
    h, store = opened.hub(), tmp_path / "store"
    store.mkdir()
    (store / "weights.part").write_bytes(b"left by a process that died during a download")
    end = opened.link(h, store)
    for version in (3, 4):
        broadcast(h, tmp_path, version)
        assert until(lambda version=version: end.newest is not None and end.newest.version == version)
        assert end.newest == (version, 12.5, store / "v000003.safetensors") and end.newest.path.read_bytes() == BLOB
    assert h.counts["bytes_out"] == len(BLOB) and [p.name for p in store.glob("*.part")] == []


def test_weights_wait_for_disk_space(opened, tmp_path, capsys):
    h, (soft, hard) = opened.hub(), resource.getrlimit(resource.RLIMIT_FSIZE)
    broadcast(h, tmp_path, 3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(BLOB) - 500, hard))
    try:
        end = opened.link(h, tmp_path / "box")
        assert until(lambda: "box: File too large; waiting for disk space" in capsys.readouterr().out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert until(lambda: end.newest is not None) and end.newest.path.read_bytes() == BLOB


def test_withdrawn_weights_are_replaced_by_newer_weights(opened, tmp_path):
    """The newer offer can come before the withdrawal, or be lost."""
    learner = opened.learner(account.Spool(tmp_path / "spool", "box", 1))

    def is_asked_for(name):
        return until(lambda: getattr(learner.hear(wire.Ask, within=1), "name", "") == name)

    for version in (3, 4):
        learner.say(WELCOME, wire.Offer(wire.manifest(f"v{version}", BLOB), version, 1.0))
        assert is_asked_for(f"v{version}")
        learner.say(wire.Chunk(f"v{version}", 0, b""))
    assert learner.hear(wire.Hello).newest == -1  # the learner then offers the newest weights again
    assert learner.end.newest is None and learner.end.error == ""


# -- the source: fates of groups ---------------------------------------------------------------------------------------


def source(folder, room=256 << 20, **changes):
    cfg = make_cfg(samplers=str(folder), **{**dict(give_up=0.5), **changes})
    log = remote.open_log(folder)
    bounds = limits(group(), room=room)
    end = files.FilesHub(str(folder), WELCOME, bounds, log)
    return remote.RemoteSource(end, cfg, Store(folder / "models", Comm(), False), Comm())


def hand_over(folder, source, n, version=0, name="box", **changes):
    """Write a group like a sampler."""
    g = replace(group(), uid=(name, 1, n), version=version, t_published=source.published.get(version, 0.0))
    data = account.with_digest(encode_group(replace(g, **changes)))
    (folder / "rollouts" / name).mkdir(parents=True, exist_ok=True)
    account.write_atomically(folder / "rollouts" / name / f"1-{n}", data)


def weights(x):
    return {"a": torch.full((3,), float(x)), "b": torch.ones(2)}.items()


def started(folder, groups=0, **changes):
    """A source that has published version 0, and this number of groups in its folder."""
    s = source(folder, **changes)
    s.publish(0, weights(0))
    for n in range(groups):
        hand_over(folder, s, n)
    return s


def numbers(groups):
    return [g.uid[2] for g in groups]


def message_in(path):
    return wire.decode(path.read_bytes())


def test_every_group_has_one_fate(tmp_path):
    s, box = source(tmp_path, max_staleness=1, window_seconds=1000.0), tmp_path / "rollouts" / "box"
    for v in range(3):
        s.publish(v, weights(v))
    now = time.time()
    s.published = {v: when - 3000.0 for v, when in s.published.items()}
    for n, changes in enumerate((
        dict(version=2, t_end=now - 900.0),
        dict(version=0),  # two updates old
        dict(version=2, t_published=5.0),  # version 2 of a different history
        dict(version=7),  # never published
        dict(version=1, sampling=Sampling(temperature=0.5)),
        dict(version=1, uid=("box", 1, 9)),  # a different group's name inside
        dict(version=1),  # damaged below
        dict(version=1, t_end=now - 1100.0),  # sampled too long ago
        dict(version=1, t_end=now + 9000.0),
    )):  # fmt: skip
        hand_over(tmp_path, s, n, **changes)
    os.utime(box / "1-0", (1.0, 1.0))  # an implausible clock
    (box / "1-6").write_bytes(account.with_digest(b"damaged")[:-1])
    (box / "1-9").write_bytes(account.with_digest(bytes(s.hub.limits.nbytes + 1)))  # valid, but larger than any group
    (box / "1-2~").write_bytes(b"an editor's")
    account.write_atomically(tmp_path / "samplers" / "box", wire.encode(wire.Hello("box", 1, "session", 10)))
    assert numbers(s.next(2, 2)) == [0, 8] and s.next(1, 2) == []
    assert s.counts == {"trained": 2, "staleness": 1, "orphan": 2, "refused": 3, "window": 1, "corrupt": 1}
    m = {name.removeprefix("remote/"): value for name, value in s.metrics().items()}
    assert (m["trained"], m["orphan"], m["corrupt"], m["refused"]) == (2, 2, 1, 3)
    assert (m["handed"], m["waiting"], m["samplers"]) == (10, 0, 1)
    assert sum(m[fate] for fate in remote.FATES) == m["handed"] == len(s.since) == len(s.state_dict()["account"])
    assert "no group to train on for 0 s at" in s.error and "2 trained" in s.error
    again = source(tmp_path)
    again.load_state_dict(s.state_dict())
    assert again.metrics()["remote/handed"] == 10 and again.counts == s.counts


def test_groups_given_back_are_returned_again(tmp_path):
    """Groups given back are not trained on and not in the account; the next call returns them again."""
    s = started(tmp_path, 2)
    assert s.next(3, 0, stop=["SIGTERM"]) == [] and s.error == "" and not s.counts
    assert s.next(2, 0) and s.counts["trained"] == 2 and s.hub.size == 0
    assert s.next(1, 0, stop=["SIGTERM"]) == []
    s.give_back()  # no effect: both groups were trained on
    hand_over(tmp_path, s, 2)
    assert s.next(1, 0) and s.counts["trained"] == 3
    s.give_back()
    assert s.counts["trained"] == 2 and s.since == ["box/1/0", "box/1/1"]
    assert numbers(s.next(1, 0)) == [2] and s.counts["trained"] == 3


def test_ranks_share_the_earliest_groups(tmp_path, monkeypatch):
    """The first minibatch of two ranks has the groups that arrived first."""
    s, dealt = started(tmp_path, 4), []
    monkeypatch.setattr(remote.dist, "scatter_object_list", lambda received, parts: dealt.extend(parts))
    s.comm.size = 2
    s.next(2, 0)
    assert [numbers(part) for part in dealt] == [[0, 2], [1, 3]]


def test_memory_for_groups_of_a_folder(tmp_path):
    """Groups beyond the limit stay in the folder, and the sampler is not told that they were fetched. Samplers take
    turns."""
    s = started(tmp_path, 4, room=int(2.5 * len(encode_group(group()))))
    assert fates(s.hub) == [("box/1/0", ""), ("box/1/1", "")] and s.hub.drain() == []
    assert message_in(tmp_path / "receipts" / "box").got == ["box/1/0", "box/1/1"]
    s.hub.free(s.hub.size)
    assert fates(s.hub) == [("box/1/2", ""), ("box/1/3", "")]
    for n in range(12):
        hand_over(tmp_path, s, n // 3, name="abc"[n % 3])
    for pair in ("c/1/0", "a/1/0"), ("b/1/0", "c/1/1"), ("a/1/1", "b/1/1"):
        s.hub.free(s.hub.size)
        assert fates(s.hub) == [(name, "") for name in pair]


def test_a_folder_without_a_learner_and_a_full_disk(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BEAT", 60.0)
    s = started(tmp_path)
    end = opened.folder_link(tmp_path, give_up=0.5)
    assert until(lambda: "no answer from" in end.error) and end.welcome is None  # of a run that may have ended
    hand_over(tmp_path, s, 0)
    with monkeypatch.context() as m:
        m.setattr(files, "write_atomically", lambda path, data: os.listdir("/nowhere"))  # raises an OSError
        assert s.next(1, 0)  # the learner continues and writes later
        s.state_dict()
        s.saved()
        s.publish(1, weights(1))
    assert not (tmp_path / "receipts" / "box").exists() and message_in(tmp_path / "models" / "newest").version == 0
    s.hub.beat = -files.BEAT
    assert s.hub.drain() == []  # with the next heartbeat
    assert message_in(tmp_path / "receipts" / "box").held == ["box/1/0"]
    assert message_in(tmp_path / "models" / "newest").version == 1


def test_groups_are_held_after_the_checkpoint_and_not_returned_again(tmp_path):
    s, receipt = started(tmp_path, 3), tmp_path / "receipts" / "box"
    assert len(s.next(2, 0)) == 2
    state = s.state_dict()
    s.next(1, 0)  # after the state was taken
    assert message_in(receipt).held == []
    s.saved()
    assert message_in(receipt).held == ["box/1/0", "box/1/1"]
    assert s.since == ["box/1/2"]  # for the next checkpoint
    again = source(tmp_path)
    again.load_state_dict({**state, "published": {-1: 1.0}})  # weights are published after their checkpoint
    again.publish(0, weights(0))  # the same bytes: groups of these weights are still valid
    assert numbers(again.next(1, 0)) == [2]  # the files of the two remaining groups are held
    again.state_dict()
    again.saved()
    assert message_in(receipt).held == ["box/1/0", "box/1/1", "box/1/2"]
    other = source(tmp_path)
    other.publish(0, weights(1))  # different bytes under the same number: a different history
    assert other.published[0] != s.published[0]


def test_weights_are_published_every_sync_every_updates(tmp_path):
    s = source(tmp_path, sync_every=2, max_staleness=4)
    for v in range(6):
        s.publish(v, weights(v + 1 / 3))
    newest = message_in(tmp_path / "models" / "newest")
    names = sorted(p.stem for p in (tmp_path / "models").glob("v*.safetensors"))
    assert newest.version == 4 and names == ["v000000", "v000002", "v000004"]
    tensors = dict(read_tensors(tmp_path / "models" / newest.of.name))
    assert torch.equal(tensors["a"], torch.full((3,), 4 + 1 / 3))


def test_groups_without_spread_are_not_trained_on_with_dynamic_sampling(tmp_path):
    s = started(tmp_path, 4, dynamic_sampling=1)
    hand_over(tmp_path, s, 1, responses=[replace(r, reward=0.5) for r in group().responses])
    assert numbers(s.next(3, 0)) == [0, 2, 3] and s.metrics()["remote/no_spread"] == 1
