"""The wire without sockets: manifests, pulls with losses and damage, invalid groups, the account."""

import io
import json
import random
import zlib
from dataclasses import replace

import numpy as np
import pytest
from conftest import make_groups
from safetensors.numpy import load, save

from machinery.flags import UserError
from remote import account, groups, wire
from remote.source import sampler_files
from remote.wire import CHUNK
from sampling import Sampling

rng = np.random.default_rng(0)
BLOB = rng.integers(0, 256, 2 * CHUNK + 12345, dtype=np.uint8).tobytes()
RUN = wire.Description(
    config=dict(rollout_quant="none", quant_group=32, seed=3, group_size=4, task="arith", max_tokens=16),
    model="policy", topk=4, max_allowed=0, context=64, task_digest="", reward_digests={}, sampling=Sampling(seed=3),
    probe=[[1, 2], [3, 4]], packed=False, stop_ids=[1, 7],
)  # fmt: skip


def transfer(pull, data, link):
    """Simulate both ends of a transfer; `link` may drop, damage, double or delay answers. Return the number of asks."""
    asks = 0
    while not pull.done:
        asks += 1
        for chunk in link(wire.chunk_of(data, wire.Ask("x", pull.at))):
            pull.put(chunk)
    return asks


def test_lost_doubled_and_shuffled_answers_give_the_same_bytes():
    r, before = random.Random(1), []

    def bad_link(chunk):
        before.append(chunk)
        return r.choice([[], [chunk, chunk], [r.choice(before), chunk], [before[0], before[0]]])

    for _ in range(5):
        pull = wire.Pull(wire.manifest("x", BLOB), sink := io.BytesIO())
        transfer(pull, BLOB, bad_link)
        assert sink.getvalue() == BLOB
    pull = wire.Pull(wire.manifest("x", BLOB), sink := io.BytesIO())
    assert transfer(pull, BLOB, lambda chunk: [chunk]) == 3 and sink.getvalue() == BLOB


def test_objects_that_differ_from_their_manifest_are_refused():
    of = wire.manifest("x", BLOB)
    assert of.digest == wire.manifest("y", BLOB).digest != wire.manifest("x", BLOB[:-1] + b"?").digest
    for data, sentence in (
        (BLOB[:-1] + b"?", "bytes that differ from its manifest"),
        (BLOB + b"x", "too many bytes"),
        (b"", "no longer there"),
        (BLOB[:CHUNK], "no longer there"),
    ):
        with pytest.raises(wire.WireError, match=f"x: {sentence}"):
            transfer(wire.Pull(of, io.BytesIO()), data, lambda chunk: [chunk])


def test_messages_survive_and_damaged_messages_do_not():
    for m in (
        wire.Hello("box", 7, "", 3, ["box/7/1"], 2),
        wire.Welcome("s", RUN, {"config.json": b"x"}),
        wire.Offer(wire.manifest("a/1/0", b"abc"), 3, 1.5, [wire.Step("0", wire.manifest("b", b"d"))]),
        *(wire.Refuse("no"), wire.Ask("a", 2), wire.Chunk("a", 0, b"x"), wire.Receipt(["a"], ["b"])),
    ):
        assert wire.decode(wire.encode(m)) == m
    whole = wire.encode(wire.Ask("box/1/2", 3))
    flipped = [(int.from_bytes(whole) ^ 1 << i).to_bytes(len(whole)) for i in range(8 * len(whole))]
    for bad in (b"", whole[:-1], whole + b"x", *flipped):
        with pytest.raises(wire.WireError, match="not a message, or a damaged one"):
            wire.decode(bad)


def group(allowed=False, K=4):
    """A group, with or without sets of two allowed tokens."""
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
def test_groups_survive_encoding(allowed, K):
    g = group(allowed, K)
    data = groups.encode_group(g)
    back = groups.decode_group(data, limits(g))
    assert len(data) <= limits(g).nbytes and np.array_equal(back.prompt_ids, g.prompt_ids)
    for name in groups.OF_GROUP:
        assert getattr(back, name) == getattr(g, name), name
    for a, b in zip(g.responses, back.responses, strict=True):
        for name, x in vars(a).items():
            y = getattr(b, name)
            assert np.array_equal(x, y), name
            if isinstance(x, np.ndarray) and name != "allowed_offsets":
                assert x.dtype == y.dtype, name


def spoil(change, allowed=False):
    g = group(allowed)
    change(g.responses)
    return groups.encode_group(g)


NO_LOGP = "log-probabilities that are NaN, below -200 or above 0"


def narrow(rs):
    """Responses with two alternatives for each token instead of four."""
    for r in rs:
        r.topk_ids, r.topk_logp = r.topk_ids[:, :2], r.topk_logp[:, :2]


@pytest.mark.parametrize(
    "change, allowed, sentence",
    [
        (lambda rs: rs.pop(), False, "responses instead of"),
        (lambda rs: setattr(rs[0], "tokens", rs[0].tokens - 300), False, "tokens outside the vocabulary"),
        (lambda rs: [setattr(r, "tokens", r.tokens.astype(np.int64)) for r in rs], False, "tokens is int64"),
        (lambda rs: setattr(rs[0], "logp_inf", rs[0].logp_inf[1:]), False, "arrays of unequal length"),
        (lambda rs: rs[2].logp_inf.put(0, np.nan), False, NO_LOGP),
        (lambda rs: rs[2].logp_inf.put(0, -1e5), False, NO_LOGP),
        (lambda rs: rs[2].logp_inf.put(0, 1.0), False, NO_LOGP),
        (narrow, False, "top-K of 2 instead of 4"),
        (lambda rs: setattr(rs[0], "reward", float("inf")), False, "a reward that is NaN or infinite"),
        (lambda rs: setattr(rs[1], "reward", -2e6), False, r"a reward beyond 1e\+06"),
        (lambda rs: rs[2].topk_logp.put(1, np.nan), False, "top-K log-probabilities that are NaN or above 0"),
        (lambda rs: rs[2].topk_logp.put(3, -0.001), False, "top-K log-probabilities that are not sorted"),
        (lambda rs: rs[2].topk_logp.put([0, 1], -0.1), False, "top-K probabilities that sum to more than 1"),
        (lambda rs: rs[2].topk_ids.put(1, rs[2].topk_ids[0, 0]), False, "a token that occurs twice among the top K"),
        (lambda rs: setattr(rs[0], "finish_reason", "abort"), False, "not a group: Invalid enum value .abort."),
        (lambda rs: [r.loss_mask.fill(False) for r in rs], False, "a loss mask without any token"),
        (lambda rs: rs[0].loss_mask.view(np.uint8).put(0, 2), False, "a loss mask that is neither true nor false"),
        (lambda rs: rs[1].allowed_ids.put(0, rs[1].tokens[0] ^ 2), True, "a token that is not in its set of allowed"),
        (lambda rs: setattr(rs[0], "allowed_ids", rs[0].allowed_ids[1:]), True, "allowed tokens with wrong sizes"),
    ],
)
def test_invalid_groups_are_refused(change, allowed, sentence):
    with pytest.raises(wire.WireError, match=sentence):
        groups.decode_group(spoil(change, allowed), limits(group(allowed)))


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (dict(uid=("box", -1, 3)), r"Expected `int` >= 0 - at `\$.uid"),
        (dict(sampling=Sampling(seed=10**18)), "sampled with unknown settings"),
        (dict(sampling=Sampling(temperature="hot")), "not a group: Expected `float`, got `str`"),
        (dict(uid=("../box", 12, 3)), "'../box' is not a sampler's name"),
        (dict(prompt_id="x" * 1025), r"length <= 1024 - at `\$.prompt_id"),
        (dict(model="m\n"), "box/12/3: its model is"),
        (dict(t_end=1e300), r"at `\$.t_end"),
        (dict(prompt_ids=np.zeros(0, np.int32)), "after a prompt of 0"),
        (dict(prompt_ids=np.array([3, 256], np.int32)), "prompt_ids outside the vocabulary"),
    ],
)
def test_invalid_values_in_heads_are_refused(changes, sentence):
    g = replace(group(), **changes)
    with pytest.raises(wire.WireError, match=sentence):
        groups.decode_group(groups.encode_group(g), limits(group()))


@pytest.mark.parametrize(
    "old, new",
    [
        ('"temperature":1.0', '"temperature":' + "[" * 3000 + "]" * 3000),
        ('"version":4', '"version":' + "9" * 5000),
        ('["box",12,3]', '["box",12]'),
        ('"prompt_id":"', '"prompt_id":"\\ud800'),
        ('"sampling":{', '"sampling":{"bias":1,'),
        ('"t_end":0.0', '"t_end":1e999'),
    ],
)
def test_malformed_heads_are_refused(old, new):
    """Text that the encoder does not write."""
    data = groups.encode_group(group())
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])["__metadata__"]["head"]
    assert head.count(old) == 1 and groups.decode_group(save(load(data), metadata={"head": head}), limits(group()))
    with pytest.raises(wire.WireError):
        groups.decode_group(save(load(data), metadata={"head": head.replace(old, new)}), limits(group()))


def test_groups_beyond_the_limits_and_garbage_are_refused():
    g, truncated = group(), group(allowed=True, K=0)
    data = groups.encode_group(g)
    for of, changes, sentence in (
        (g, dict(max_tokens=1), "lengths"),
        (g, dict(max_allowed=3), "arrays"),
        (g, dict(vocab=214), "topk_ids outside the vocabulary of 214"),
        (truncated, dict(vocab=214), "allowed_ids outside the vocabulary of 214"),
        (truncated, dict(max_allowed=0), "arrays"),
        (truncated, dict(max_allowed=1), "sets of allowed tokens with wrong sizes"),
    ):
        with pytest.raises(wire.WireError, match=sentence):
            groups.decode_group(groups.encode_group(of), limits(of, **changes))
    for bad in (b"", b"x" * 100, data[:-3], (1 << 60).to_bytes(8, "little") + data[8:], data.replace(b"uid", b"uio")):
        with pytest.raises(wire.WireError, match="not a group"):
            groups.decode_group(bad, limits(g))
    # truncated sampling gives truncated tokens probability 0
    assert groups.decode_group(spoil(lambda rs: [r.topk_logp[:, 2:].fill(-np.inf) for r in rs]), limits(g))


def test_names_of_groups():
    assert account.split("x-y/3/4") == ("x-y", 3, 4) and account.split(f"{'x' * 64}/0/{'9' * 18}")
    odd = ["a", "", "a/b/c", "x/y/3/4", "a/01/2", "a/1/2 ", "a/1/2\n", "a/-1/2", "a/1/\u00b2", "a.b/1/2", "../a/1/2"]
    for bad in (*odd, f"a/1/{10**18}", f"{'x' * 65}/1/2"):
        with pytest.raises(ValueError):
            account.split(bad)
    names = account.names_of_files("box", ["10-1", "9-11", "9-2", "9-3.lost", ".9-4.77", "9-1-2"])
    assert names == ["box/9/2", "box/9/11", "box/10/1"]


def test_lost_groups_of_a_spool_among_odd_files_are_reported_until_held(tmp_path):
    spool = account.Spool(tmp_path, "box", 7)
    for n in range(3):
        spool.hand_over(f"box/7/{n}", b"group %d" % n)
    (tmp_path / "7-0").write_bytes(b"damaged")
    (tmp_path / "7-1").unlink()
    assert [spool.read(f"box/7/{n}") for n in range(3)] == [None, None, b"group 2"]
    for name in ("1-\u00b2", "01-2", "1-2-3", f"1-{10**18}", "x-y", "1-3.lost~", ".1-9.77"):
        (tmp_path / name).touch()
    for name in (".folder", "v000001.safetensors"):
        (tmp_path / name).mkdir()
    again = account.Spool(tmp_path, "box", 8)  # a new incarnation
    for one in (spool, again):
        assert one.lost == ["box/7/0", "box/7/1"] and list(one.waiting) == ["box/7/2"]
    again.forget(["box/7/0", "box/7/2", "other/1/1"])
    assert again.lost == ["box/7/1"] and [p.name for p in tmp_path.glob("7-*")] == ["7-1.lost"]
    new = tmp_path / "v000002.safetensors"
    assert account.retain_weights(new, []) == [new]  # a folder cannot be deleted


def test_a_sampler_has_the_rollout_models_shape_and_the_policys_tokenizer(tmp_path):
    for which in ("policy", "actor"):
        (tmp_path / which).mkdir()
        for name in ("config.json", "tokenizer.json", *(["generation_config.json"] if which == "policy" else [])):
            (tmp_path / which / name).write_text(which)
    files = sampler_files(*(str(tmp_path / which) for which in ("policy", "actor")))
    assert {k: zlib.decompress(x) for k, x in files.items()} == {"config.json": b"actor", "tokenizer.json": b"policy"}


def test_file_names_of_a_sent_model(tmp_path):
    good = {"config.json": zlib.compress(b"{}"), "merges.txt": zlib.compress(b"")}
    (tmp_path / "model" / "chat_template.jinja").parent.mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text("of an earlier run")
    wire.unpack_setup(good, tmp_path / "model")
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["config.json", "merges.txt"]
    for name in ("../x.json", "/etc/x.json", "a/b.json", ".x.json", "x.py", "x.json\n", "", "x" * 300 + ".json"):
        with pytest.raises(UserError, match="the learner sent a file called"):
            wire.unpack_setup({name: zlib.compress(b"x")}, tmp_path / "model")
    with pytest.raises(UserError, match="the learner sent a damaged x.json; start this sampler again"):
        wire.unpack_setup({"x.json": zlib.compress(b"x" * 99)[:-3]}, tmp_path / "model")
    assert wire.printable("a\x1b[2Jb\nc\u00e9", 7) == "a?[2Jb?" and wire.printable(17) == "17"
