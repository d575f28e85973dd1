"""The wire without sockets: manifests, pulls that lose and damage, groups that are not what they say, the account."""

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from conftest import make_groups
from safetensors.numpy import load

from remote import account, groups, wire
from remote.wire import LEAF

rng = np.random.default_rng(0)
BLOB = rng.integers(0, 256, 5 * LEAF + 12345, dtype=np.uint8).tobytes()


def transfer(pull, data, link, limit=10_000):
    """Play both ends until it is done; `link` may drop, damage, double or delay each answer. Returns the asks made."""
    asks, now = 0, 0.0
    flying = []
    while not pull.done and asks < limit:
        now += 0.05
        while (span := pull.ask(now)) is not None:
            asks += 1
            flying += link(span[0], bytes(wire.leaves(data, *span)))
        if flying:
            pull.put(*flying.pop(0), now)
        else:
            now += 1.0
    return asks


def test_a_clean_transfer_grows_its_steps():
    of = wire.manifest("x", BLOB)
    pull = wire.Pull(of, sink := bytearray(len(BLOB)), pace := wire.Pace(open=2))
    asks = transfer(pull, BLOB, lambda first, data: [(first, data)])
    assert bytes(sink) == BLOB and pull.corrupt == 0 and pace.leaves > 1 and asks < len(of.leaves)
    assert of.root == wire.manifest("y", BLOB).root != wire.manifest("x", BLOB[:-1] + b"?").root


def test_lost_damaged_doubled_and_shuffled_answers_end_in_the_same_bytes():
    r = random.Random(1)

    def bad_link(first, data):
        kind = r.random()
        if kind < 0.2:
            return []  # lost
        if kind < 0.4:
            i = r.randrange(len(data))
            return [(first, data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])]  # a bit is wrong
        if kind < 0.5:
            return [(first, data[:-1])]  # cut short
        if kind < 0.6:
            return [(first + 1, data), (first, data)]  # under a wrong number, then right
        return [(first, data), (first, data)]  # twice

    pull = wire.Pull(wire.manifest("x", BLOB), sink := bytearray(len(BLOB)), wire.Pace(patience=3.0))
    transfer(pull, BLOB, bad_link)
    assert pull.done and bytes(sink) == BLOB and pull.corrupt > 0


def test_a_broken_transfer_goes_on_from_its_good_leaves():
    of = wire.manifest("x", BLOB)
    first = wire.Pull(of, sink := bytearray(len(BLOB)), wire.Pace(open=1))
    for _ in range(2):
        span = first.ask(0.0)
        first.put(span[0], wire.leaves(BLOB, *span), 0.01)
    have = len(of.leaves) - len(first.missing)
    assert 0 < have < len(of.leaves)
    sink[0] ^= 1  # and one of them went bad on the disk
    again = wire.Pull(of, sink, wire.Pace(), resume=True)
    assert sorted(again.missing) == [0] + list(range(have, len(of.leaves)))
    transfer(again, BLOB, lambda f, d: [(f, d)])
    assert bytes(sink) == BLOB


def test_a_file_as_a_sink_says_when_the_disk_is_full(tmp_path):
    import resource

    sink, (soft, hard) = wire.FileSink(tmp_path / "part", 4000), resource.getrlimit(resource.RLIMIT_FSIZE)
    sink[100:200] = b"x" * 100
    assert sink[0:4000] == b"\0" * 100 + b"x" * 100 + b"\0" * 3800 and sink[3990:5000] == b"\0" * 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match="part: 500 of 1000 bytes written; is the disk full"):
            sink[1500:2500] = b"y" * 1000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sink.close()


def test_asks_are_few_and_late_ones_are_made_again():
    pace = wire.Pace(leaves=1, open=2, patience=5.0)
    pull = wire.Pull(wire.manifest("x", BLOB), bytearray(len(BLOB)), pace)
    assert [pull.ask(0.0), pull.ask(0.0), pull.ask(0.0)] == [(0, 1), (1, 1), None]
    assert pull.ask(4.0) is None and pull.ask(5.1) in ((0, 1), (1, 1))
    pull.forget_asked()
    assert pull.ask(5.2) in ((0, 1), (1, 1))
    slow = wire.Pace(leaves=8)
    slow.answered(2.0)
    assert slow.leaves == 4
    slow.failed()
    assert slow.leaves == 1 and [slow.answered(0.01) for _ in range(9)] and slow.leaves == slow.most


def test_sizes_are_checked_before_anything_is_allocated():
    of = wire.manifest("x", BLOB)
    of.check(len(BLOB))
    for wrong, most in (
        (of, len(BLOB) - 1),
        (msgspec.structs.replace(of, nbytes=1 << 60), 1 << 61),
        (msgspec.structs.replace(of, nbytes=0), 10),
        (msgspec.structs.replace(of, leaves=of.leaves[1:]), 1 << 40),
        (msgspec.structs.replace(of, leaves=[b"short"] * len(of.leaves)), 1 << 40),
    ):
        with pytest.raises(wire.WireError):
            wrong.check(most)
    for first, count in ((-1, 1), (6, 1), (0, 0), (0, 65)):
        with pytest.raises(wire.WireError, match="of an object of"):
            wire.leaves(BLOB, first, count)


def flip(data, i):
    """The bytes with their i-th bit turned."""
    at, bit = divmod(i, 8)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def test_messages_survive_and_garbage_does_not():
    for m in (
        wire.Hello(1, "box", 7, "", 3, ["box/7/1"]),
        wire.Welcome(1, "s", {"a": [1, 2.5, None]}, {"config.json": b"x"}),
        wire.Refuse("no"),
        wire.Offer(wire.manifest("a/1/0", b"abc"), 3, 1.5),
        wire.Ask("a", 0, 2),
        wire.Leaves("a", 0),
        wire.Gone("a"),
        wire.Got(["a"]),
        wire.Got([], "v"),
        wire.Want(),
        wire.Held([]),
    ):
        assert wire.decode(wire.encode(m)) == m
    whole = wire.encode(wire.Ask("box/1/2", 3, 4))
    spoilt = [flip(whole, i) for i in range(8 * len(whole))]
    for bad in (b"", b"\\x80\\x04K\\x01.", b"{}", whole[:-1], whole + b"x", *spoilt):
        with pytest.raises(wire.WireError, match="not a message, or a damaged one"):
            wire.decode(bad)
    for bad in (
        wire.encode({"type": "hello"}),
        wire.encode({"type": "got", "names": [1]}),
        wire.encode({"type": "ask", "name": 3, "first": 0, "count": 1}),
        wire.encode({"type": "exec"}),
    ):
        with pytest.raises(wire.WireError, match="not a message of protocol 2"):
            wire.decode(bad)


def test_a_full_disk_loses_no_leaf():
    """What could not be written is missing still, and is asked for again."""
    of, sink = wire.manifest("a", BLOB), bytearray(len(BLOB))

    class Full:
        full = True

        def __setitem__(self, at, data):
            if self.full:
                raise OSError(28, "No space left on device")
            sink[at] = data

    disk = Full()
    pull = wire.Pull(of, disk, wire.Pace(open=1))
    first, count = pull.ask(0.0)
    with pytest.raises(OSError):
        pull.put(first, wire.leaves(BLOB, first, count), 0.0)
    disk.full = False
    transfer(pull, BLOB, lambda f, d: [(f, d)])
    assert sink == BLOB


def group(allowed=False, K=4):
    """A group, with sets of two allowed tokens or without."""
    g = make_groups(1, seed=5, K=K)[0]
    if allowed:
        for r in g.responses:
            r.allowed_offsets = np.arange(0, 2 * len(r.tokens) + 1, 2)
            r.allowed_ids = np.stack([r.tokens, (r.tokens + 1) % 256], 1).flatten().astype(np.int32)
    return replace(g, uid=("box", 12, 3), version=4, t_published=1.5)


def limits(g, **changes):
    base = dict(
        group_size=len(g.responses),
        max_tokens=64,
        max_prompt=64,
        vocab=256,
        topk=g.responses[0].topk_ids.shape[1],
        max_allowed=2 if g.responses[0].allowed_ids is not None else 0,
    )
    return groups.Limits(**{**base, **changes})


@pytest.mark.parametrize("allowed, K", [(False, 4), (True, 0)])
def test_groups_come_back_as_they_went(allowed, K):
    g = group(allowed, K)
    data = groups.encode_group(g)
    back = groups.decode_group(data, limits(g))
    assert len(data) <= limits(g).nbytes
    for name in (
        "uid",
        "prompt_id",
        "sampling",
        "model",
        "precision",
        "version",
        "digest",
        "t_published",
        "t_start",
        "t_end",
    ):
        assert getattr(back, name) == getattr(g, name), name
    assert np.array_equal(back.prompt_ids, g.prompt_ids)
    for a, b in zip(g.responses, back.responses, strict=True):
        for name, x in vars(a).items():
            y = getattr(b, name)
            assert np.array_equal(x, y), name
            if isinstance(x, np.ndarray) and name != "allowed_offsets":
                assert x.dtype == y.dtype, name


def test_the_names_in_a_group_stay():
    """A spool that was written before must be read, and by another revision of the same protocol."""
    assert set(load(groups.encode_group(group(allowed=True)))) == {
        *("prompt_ids", "lengths", "rewards", "tokens", "loss_mask", "logp_inf", "topk_ids", "topk_logp"),
        *("kept_ids", "kept_sizes"),
    }
    assert rb"\"kept\":true" in groups.encode_group(group(allowed=True))


def spoil(change, allowed=False):
    g = group(allowed)
    change(g.responses)
    return groups.encode_group(g)


@pytest.mark.parametrize(
    "change, allowed, sentence",
    [
        (lambda rs: rs.pop(), False, "responses instead of"),
        (lambda rs: setattr(rs[0], "tokens", rs[0].tokens + 300), False, "tokens outside the vocabulary"),
        (lambda rs: setattr(rs[0], "tokens", rs[0].tokens - 300), False, "tokens outside the vocabulary"),
        (lambda rs: [setattr(r, "tokens", r.tokens.astype(np.int64)) for r in rs], False, "tokens is int64"),
        (lambda rs: setattr(rs[0], "logp_inf", rs[0].logp_inf[1:]), False, "arrays of unequal length"),
        (
            lambda rs: setattr(rs[0], "logp_inf", rs[0].logp_inf * np.nan),
            False,
            "log-probabilities that are NaN, infinite or above 0",
        ),
        (
            lambda rs: setattr(rs[0], "logp_inf", rs[0].logp_inf - np.inf),
            False,
            "log-probabilities that are NaN, infinite or above 0",
        ),
        (
            lambda rs: setattr(rs[0], "logp_inf", -rs[0].logp_inf + 1),
            False,
            "log-probabilities that are NaN, infinite or above 0",
        ),
        (
            lambda rs: (
                [setattr(r, "topk_ids", r.topk_ids[:, :2]) for r in rs]
                + [setattr(r, "topk_logp", r.topk_logp[:, :2]) for r in rs]
            ),
            False,
            "top-K of 2 instead of 4",
        ),
        (lambda rs: setattr(rs[0], "reward", float("inf")), False, "a reward that is NaN or infinite"),
        (
            lambda rs: setattr(rs[0], "allowed_ids", rs[0].allowed_ids[1:]),
            True,
            "sets of allowed tokens of wrong sizes",
        ),
    ],
)
def test_groups_that_are_not_what_was_asked_for(change, allowed, sentence):
    with pytest.raises(wire.WireError, match=sentence):
        groups.decode_group(spoil(change, allowed), limits(group(allowed)))


def test_groups_beyond_the_limits_or_none_at_all():
    g = group()
    data = groups.encode_group(g)
    for changes, sentence in (
        (dict(max_tokens=1), "lengths"),
        (dict(max_prompt=1), "lengths"),
        (dict(max_allowed=3), "the sets of allowed tokens are missing"),
        (dict(vocab=3), "outside the vocabulary of 3"),
    ):
        with pytest.raises(wire.WireError, match=sentence):
            groups.decode_group(data, limits(g, **changes))
    truncated = group(allowed=True)
    with pytest.raises(wire.WireError, match="sets of allowed tokens that were not asked for"):
        groups.decode_group(groups.encode_group(truncated), limits(truncated, max_allowed=0))
    with pytest.raises(wire.WireError, match="sets of allowed tokens of wrong sizes"):
        groups.decode_group(groups.encode_group(truncated), limits(truncated, max_allowed=1))
    for bad in (b"", b"x" * 100, data[:-3], (1 << 60).to_bytes(8, "little") + data[8:], data.replace(b"uid", b"uio")):
        with pytest.raises(wire.WireError, match="not a group"):
            groups.decode_group(bad, limits(g))


def test_seen_and_account():
    seen, r = account.Seen(), random.Random(0)
    order = list(range(200)) + [7, 9]
    r.shuffle(order)
    for n in order:
        seen.add(n)
        assert n in seen
    assert seen.upto == 200 and not seen.beyond and len(seen) == 200 and 200 not in seen
    seen.add(205)
    assert 205 in seen and 204 not in seen and len(seen) == 201
    held = account.Account()
    for name in ("a/1/0", "a/1/2", "b.0/5/0"):
        held.add(name)
    back = account.Account.of(held.state())
    assert back.state() == held.state()
    assert all(back.has(name) for name in ("a/1/2", "b.0/5/0"))
    assert not any(back.has(name) for name in ("a/1/1", "b/5/0", "a/2/0"))
    assert account.split("x-y.7/3/4") == (("x-y.7", 3), 4) and account.split(f"{'x' * 64}/0/{'9' * 18}")
    odd = [
        "a",
        "a/b/c",
        "",
        "x/y/3/4",
        "a/01/2",
        "a/1/2 ",
        "a/1/2\n",
        "a/-1/2",
        "a/1/\u00b2",
        "a.b/1/2",
        "a.01/1/2",
        "../a/1/2",
    ]
    for bad in (*odd, f"a/1/{10**18}", f"{'x' * 65}/1/2"):
        with pytest.raises(ValueError):
            account.split(bad)


def test_files_behind_their_digest_and_whole_ones(tmp_path):
    data = b"some group" * 100
    assert account.verified(account.with_digest(data)) == data
    assert account.verified(account.with_digest(data)[:-1]) is None and account.verified(b"") is None
    account.write_atomically(tmp_path / "x", b"1")
    account.write_atomically(tmp_path / "x", b"22")
    assert (tmp_path / "x").read_bytes() == b"22" and [p.name for p in tmp_path.iterdir()] == ["x"]
