"""Hostile and broken peers: malformed messages, stolen names, groups that never arrive, a short run of fuzz.py."""

import random

import msgspec
import pytest
from remote_tools import fuzz
from test_hub import WELCOME, give, opened, until
from test_wire import group, limits

from remote import account, hub, keys, wire
from remote import source as remote
from remote.groups import encode_group

__all__ = ["opened"]  # a fixture

HELLO = dict(type="hello", sampler="box", incarnation=1, session="")
OFFER = dict(type="offer", of={"name": "a", "nbytes": 1, "digest": ""})


NO_MESSAGES = [
    b"\x80\x04K\x01.",  # a pickle
    *map(fuzz.frame_of, [*fuzz.GARBAGE, b""]),
    wire.encode({"type": "exec"}),
    wire.encode({"type": "ask", "name": "a", "start": -1}),
    wire.encode({**HELLO, "incarnation": 10**18}),  # 19 digits
    fuzz.frame_of(msgspec.msgpack.encode(HELLO).replace(b"\x01", b"\xcf" + b"\xff" * 8)),  # more than 64 bits
    wire.encode({"type": "ask", "name": "x" * 257, "start": 0}),
    wire.encode({"type": "receipt", "got": ["x"] * 270_000}),
    wire.encode({**OFFER, "published": float("nan")}),
    wire.encode({**OFFER, "version": -2}),
    wire.encode({**OFFER, "of": {**OFFER["of"], "nbytes": 0}}),
]


def test_malformed_messages_end_no_hub_and_no_link(opened, tmp_path):
    for message in NO_MESSAGES:
        with pytest.raises(wire.WireError):
            wire.decode(message)
            pytest.fail(repr(message[:40]))
    h = opened.hub()
    peer = opened.raw(h)
    peer.say(*NO_MESSAGES)
    peer.hello()
    assert peer.hear() == WELCOME and h.counts["malformed"] == len(NO_MESSAGES) and h.counts["faults"] == 0
    learner = opened.learner(account.Spool(tmp_path / "spool", "box", 1))
    learner.say(*NO_MESSAGES, WELCOME)
    assert until(lambda: learner.end.welcome) and learner.end.error == ""


def test_an_unexpected_exception_ends_no_hub(opened, monkeypatch):
    """One peer's message raises an exception inside the hub."""
    h = opened.hub()
    bad, good = opened.raw(h, name="bad"), opened.raw(h, name="good")
    on_offer = h._on_offer
    monkeypatch.setattr(h, "_on_offer", lambda peer, of: 1 // (peer.sampler != "bad") and on_offer(peer, of))
    for peer in (bad, good):
        peer.hello()
        assert peer.hear(wire.Welcome)
    data = encode_group(group())
    bad.say(wire.Offer(wire.manifest("bad/1/0", data)))
    assert until(lambda: h.counts["faults"] == 1) and give(good, data, "good/1/7") == wire.Receipt(["good/1/7"])
    assert h.broken == "" and "ZeroDivisionError" in opened.log()


def test_a_name_belongs_to_keys(opened, tmp_path):
    """A different key uses the name with a later incarnation: refused, and no group of the owner is recorded."""
    keys.make_keys(str(tmp_path / "keys"), 3)
    h = opened.hub(keys=str(tmp_path / "keys" / "learner"))
    owner = opened.raw(h, keys=keys.sampler_keys(tmp_path / "keys" / "sampler1"), name="sampler1-box")
    owner.hello(incarnation=5)
    assert owner.hear(wire.Welcome).session == WELCOME.session
    thief = opened.raw(h, keys=keys.sampler_keys(tmp_path / "keys" / "sampler2"))
    for name in ("sampler1-box", "sampler1", "sampler20"):
        thief.hello(sampler=name, incarnation=9, handed=7, lost=[f"{name}/5/0", f"{name}/9/0"])
        sentence = f"--name={name}: these keys belong to sampler2; use this name, or sampler2-NAME"
        assert thief.hear(wire.Refuse).why == sentence
    thief.say(wire.Offer(wire.manifest("sampler1-box/5/0", b"x")))
    assert thief.hear(within=0.3) is None and h.drain() == [] and not any(n == 7 for n in h.reports.values())
    assert [p.incarnation for p in h.peers.values()] == [5]
    assert give(owner, encode_group(group()), "sampler1-box/5/0") == wire.Receipt(["sampler1-box/5/0"])
    thief.hello(sampler="sampler2", incarnation=9)
    assert thief.hear(wire.Welcome)


def test_a_known_identity_with_different_keys_is_refused(opened, tmp_path):
    """In ZeroMQ each end chooses its identity: reusing a free identity does not take over its sampler."""
    keys.make_keys(str(tmp_path / "keys"), 2)
    h = opened.hub(keys=str(tmp_path / "keys" / "learner"))
    pairs = [keys.sampler_keys(tmp_path / "keys" / f"sampler{i}") for i in range(2)]
    first = opened.raw(h, keys=pairs[0], name="sampler0", identity=b"same")
    first.hello()
    assert first.hear(wire.Welcome)
    first.close()

    def offers():
        second = opened.raw(h, keys=pairs[1], name="sampler1", identity=b"same")
        second.say(wire.Offer(wire.manifest("sampler0/1/0", b"x")), wire.Hello("sampler0", 1, ""))
        message = second.hear(within=1)
        second.close()
        return message

    # until ZeroMQ notices the closed first connection, it ignores a new one with the same identity
    assert until(lambda: isinstance(offers(), wire.Refuse), within=60) and h.size == 0


def test_a_hub_answers_valid_names_after_open(opened, tmp_path):
    log = remote.open_log(tmp_path)
    h = opened.add(hub.Hub("tcp://127.0.0.1:*", "none", WELCOME, limits(group()), log))
    peer = opened.raw(h)
    peer.hello()
    assert peer.hear(within=0.3) is None and h.peers == {}
    h.open()
    for name in ("", "a.b", "../x", "a\n", "é", "x" * 65):
        peer.hello(sampler=name, handed=3)
        assert "a sampler's name is 1 to 64 letters, digits, - and _" in peer.hear(wire.Refuse).why
        assert not h.peers and not h.reports
    peer.hello()
    assert peer.hear(wire.Welcome) == WELCOME
    # the memory of a group that is asked for is freed if the connection changes its name
    peer.say(wire.Offer(wire.manifest("box/1/0", b"a group")))
    assert peer.hear(wire.Ask) and h.size == len(b"a group")
    peer.hello(sampler="other")
    assert until(lambda: [p.sampler for p in h.peers.values()] == ["other"]) and h.size == 0


def test_the_memory_of_groups_that_never_arrive_is_freed(opened, monkeypatch):
    monkeypatch.setattr(hub, "UNANSWERED", 0.5)
    data = encode_group(group())
    h = opened.hub(room=6 * len(data) + 10)
    hog, honest = opened.raw(h, name="hog"), opened.raw(h, name="honest")
    hog.hello()
    hog.say(*(wire.Offer(wire.manifest(f"hog/1/{n}", data)) for n in range(6)))
    assert until(lambda: h.size == 6 * len(data))
    honest.hello()

    def is_asked():
        honest.say(wire.Offer(wire.manifest("honest/1/0", data)))
        return honest.hear(wire.Ask, within=0.2)

    assert until(is_asked)
    assert "sampler hog does not send hog/1/0" in opened.log()


@pytest.mark.parametrize("keys", [False, True])
def test_a_short_attack(keys, tmp_path):
    report = fuzz.attack(tmp_path / "x", random.Random(7), 700, keys)
    assert (report.honest, report.crashes, report.lost, report.doubled) == (7, 0, 0, 0) and report.growth < 64.0
