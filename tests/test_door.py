"""Odd files in a shared folder, odd messages of a learner to a sampler, bad flags."""

import gc
import logging
import os
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import test_hub
import torch
import zmq
from test_hub import WELCOME, hand_over, opened_objects, until, weights

from machinery.flags import UserError, parse_flags
from remote import account, files, files_link, hub, keys, sampler, wire
from remote.sampler import SamplerFlags
from sampling import Sampling
from tasks import Arithmetic


@pytest.fixture
def opened(tmp_path):
    yield from opened_objects(tmp_path)


def source(folder, **changes):
    """A source with enough patience for a busy machine."""
    return test_hub.source(folder, **{"give_up": 60.0, **changes})


def logged(s, folder):
    """A function that returns the log lines of a source, from now on."""
    handler = logging.FileHandler(folder / "source.log")
    s.log.handlers = [handler]
    return lambda: (folder / "source.log").read_text()


# -- a learner's end of a folder ---------------------------------------------------------------------------------------


def test_odd_files_stop_no_stream(tmp_path):
    """A stream with odd files of every kind, and a normal stream."""
    s = source(tmp_path / "f")
    log = logged(s, tmp_path)
    s.publish(0, weights(0))
    odd = tmp_path / "f" / "rollouts" / "a-first"
    odd.mkdir()
    victim = tmp_path / "victim"
    victim.write_bytes(account.with_digest(b"of another program"))
    (odd / "1-0").mkdir()
    (odd / "1-1").symlink_to("nowhere")
    (odd / "1-2").symlink_to("/dev/zero")
    (odd / "1-3").symlink_to(victim)
    os.mkfifo(odd / "1-4")
    (odd / "1-\u00b2").touch()
    (odd / f"1-{10**18}").touch()
    (odd / "01-5").touch()
    (odd / "1-6").write_bytes(b"damaged" * 20)
    (odd / "1-9").touch()
    with open(odd / "1-7", "wb") as f:
        f.truncate(1 << 40)
    (odd / "1-8").write_bytes(account.with_digest(b"no group"))
    for name in ("a.b", "b c", "\u00b2", "x" * 65, "..."):
        (tmp_path / "f" / "rollouts" / name).mkdir()
    (tmp_path / "f" / "rollouts" / "linked").symlink_to(odd)
    (tmp_path / "f" / "rollouts" / "file").touch()
    os.mkfifo(tmp_path / "f" / "rollouts" / "pipe")
    for n in range(3):
        hand_over(tmp_path / "f", s, n)
    assert [g.uid[2] for g in s.next(3, 0)] == [0, 1, 2] and s.hub.counts["faults"] == 0
    assert s.counts == {"trained": 3, "refused": 2, "corrupt": 2} and s.hub.size == 0
    assert "1-7 is too big for a group" in log() and "1-6 is damaged" in log()
    assert victim.exists() and s.taken == {}
    s.state_dict()
    s.saved()
    assert sorted(p.name for p in (tmp_path / "f" / "held").iterdir()) == ["a-first", "box"]


def test_a_hello_under_a_wrong_name_or_a_path(tmp_path):
    """The learner must not write to ../../victim for a Hello of this name."""
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    s = source(folder)
    log = logged(s, tmp_path)
    s.publish(0, weights(0))

    def say(file, **changes):
        hello = {**dict(sampler=file, incarnation=4, session="", handed=3), **changes}
        (folder / "samplers" / file).write_bytes(wire.encode(wire.Hello(**hello)))

    say("evil", sampler="../../victim")
    say("thief", sampler="box")
    say("good")
    say("liar", handed=10**12)
    (folder / "samplers" / "other").write_bytes(wire.encode(wire.Held(["box/1/0"])))
    (folder / "samplers" / "long").write_bytes(wire.encode(wire.Refuse("x" * wire.MOST)))
    (folder / "samplers" / "linked").symlink_to(folder / "samplers" / "good")
    (folder / "samplers" / "folder").mkdir()
    os.mkfifo(folder / "samplers" / "pipe")
    begin = time.monotonic()
    assert s.hub.drain() == [] and time.monotonic() - begin < 5
    assert s.hub.reports == {("good", 4): 3} and s.hub.counts["malformed"] == 5 and s.hub.counts["faults"] == 0
    assert "stream evil: a hello of ../../victim, under the name of a different sampler" in log()
    assert "stream liar: the sampler reports 1000000000000 groups handed over; 0 groups have arrived" in log()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "source.log"]


@pytest.mark.parametrize("kind", ["deleted", "junk", "link"])
def test_a_damaged_welcome_is_written_again(kind, tmp_path):
    s = source(tmp_path / "f")
    s.publish(0, weights(0))
    welcome, victim = tmp_path / "f" / "welcome", tmp_path / "victim"
    victim.write_bytes(b"of another program")
    os.utime(victim, (5.0, 5.0))
    welcome.unlink()
    if kind == "junk":
        welcome.write_bytes(b"junk")
    if kind == "link":
        welcome.symlink_to(victim)
    s.hub.beat = -files.BEAT
    s.hub.drain()
    assert not welcome.is_symlink() and wire.decode(welcome.read_bytes()) == WELCOME
    assert victim.read_bytes() == b"of another program" and victim.stat().st_mtime == 5.0
    os.utime(welcome, (5.0, 5.0))
    assert until(lambda: welcome.stat().st_mtime > 5.0)  # the heartbeat


def test_a_rank_reads_only_its_streams(tmp_path):
    ends = []
    for rank, ranks in ((0, 1), (1, 12)):
        ends.append(files.FilesHub(str(tmp_path), WELCOME, SimpleNamespace(room=9), None, rank, ranks))
    for name in ("a", "a.1", "b.1", "a.11", "a.01", ".1", "a.b.1"):
        (tmp_path / "rollouts" / name).mkdir()
    assert [end._streams("rollouts") for end in ends] == [["a"], ["a.1", "b.1"]]


def test_unknown_problems_are_refused(tmp_path):
    s = source(tmp_path)
    s.task = Arithmetic()
    s.publish(0, weights(0))
    for n, prompt_id in enumerate(("evil", "", "1 + 2 -", "3 + 4 - 5", "9" * 900 + " + x")):
        hand_over(tmp_path, s, n, prompt_id=prompt_id)
    assert [g.prompt_id for g in s.next(1, 0)] == ["3 + 4 - 5"] and s.next(1, 0, ["over"]) == []
    assert s.counts["refused"] >= 3 and s.counts["trained"] == 1


# -- a sampler's end ---------------------------------------------------------------------------------------------------


def folder_link(opened, folder, **changes):
    spool = account.Spool(folder / "rollouts", ["box"], 1)
    return opened.add(files_link.FilesLink(str(folder), ["box"], SamplerFlags(**changes), spool))


def test_a_sampler_survives_odd_files_in_the_folder(opened, tmp_path):
    """Junk instead of each message, weights under a path, weights as a link; then valid files."""
    s = source(tmp_path / "f")
    s.publish(0, weights(0))
    folder = tmp_path / "f"
    newest = (folder / "models" / "newest").read_bytes()
    offer = wire.decode(newest)
    (folder / "models" / "newest").write_bytes(b"junk")
    (folder / "held" / "box").mkdir()
    os.mkfifo(folder / "got" / "box")
    end = folder_link(opened, folder)
    end.spool.hand_over("box", "box/1/0", b"a group")
    (tmp_path / "v000000.safetensors").write_bytes((folder / "models" / offer.of.name).read_bytes())

    def offered(**changes):
        of = msgspec.structs.replace(offer.of, **changes)
        (folder / "models" / "newest").write_bytes(wire.encode(msgspec.structs.replace(offer, of=of)))
        assert not until(lambda: end.newest is not None or end.error, within=0.3)

    offered(name="../../v000000.safetensors")
    offered(name="../v000000.safetensors")
    offered(nbytes=0, leaves=[])
    offered(leaves=[])
    offered(leaves=[b"x" * 32])
    linked = wire.Offer(msgspec.structs.replace(offer.of, name="v000009.safetensors"), 9)
    (folder / "models" / "v000009.safetensors").symlink_to(tmp_path / "v000000.safetensors")
    (folder / "models" / "newest").write_bytes(wire.encode(linked))
    assert not until(lambda: end.newest is not None or end.error, within=0.3) and end.is_alive()
    (folder / "models" / "newest").write_bytes(newest)
    assert until(lambda: end.newest is not None) and end.newest.version == 0
    (folder / "held" / "box").rmdir()
    (folder / "held" / "box").write_bytes(wire.encode(wire.Held(["box/1/0", "other/1/0", "../../x/1/2"])))
    assert until(lambda: not end.spool.waiting["box"]) and end.error == ""


def test_invalid_welcomes_are_ignored(tmp_path):
    flags = SamplerFlags(connect=str(tmp_path), give_up=0.1)
    for welcome in (b"junk", wire.encode(wire.Want()), *(wire.encode(with_world(x)) for x in (None, "1", 0, 10**9))):
        (tmp_path / "welcome").write_bytes(welcome)
        with pytest.raises(UserError, match="no learner in this folder for 0 s"):
            files_link.wait_for_ranks(tmp_path, flags)
    (tmp_path / "welcome").write_bytes(wire.encode(with_world(3)))
    assert files_link.wait_for_ranks(tmp_path, flags) == 3


def with_world(ranks):
    return msgspec.structs.replace(WELCOME, run={"world": ranks})


def test_a_sampler_survives_odd_messages_of_its_learner(opened, tmp_path):
    """Names of unknown groups, an offer without a version, leaves without an ask, many welcomes."""
    spool = account.Spool(tmp_path / "spool", ["box"], 1)
    spool.hand_over("box", "box/1/0", b"a group")
    learner = opened.learner(spool)
    line = learner.end.lines["box"]
    many = [f"box/1/{n}" for n in range(1, 50_000)]
    learner.say(WELCOME, wire.Got(many), wire.Held(many), wire.Leaves("x", 10**17), wire.Ask("box/1/0", 10**17, 10**17))
    learner.say(wire.Offer(wire.manifest("v", b"x")), *[WELCOME] * 50)
    learner.say(wire.Got(many), wire.Got([]), wire.Got(["box/1/0"]))
    assert until(lambda: line.got == {"box/1/0"}, within=10)
    assert learner.end.welcome.qsize() == 16 and line.fetcher.wanted is None and learner.end.error == ""
    assert list(spool.waiting["box"]) == ["box/1/0"]
    learner.say(wire.Refuse("\x1b[2Jno"))
    assert until(lambda: learner.end.error == "?[2Jno")


RUN = dict(
    config=dict(rollout_quant="none", quant_group=32, seed=3, group_size=4, task="arith", max_tokens=16),
    model="policy", topk=4, max_allowed=0, context=64, world=1, task_digest="", sampling=vars(Sampling(seed=3)),
    probe=[[1, 2], [3, 4]], packed=False, stop_ids=[1, 7],
)  # fmt: skip


@pytest.mark.parametrize(
    "learners, samplers, engines",
    [("bfloat16", None, "bfloat16"), ("bfloat16", "float16", "float16"), (None, None, "float32")],
)
def test_a_samplers_precision_is_the_learners_by_default(learners, samplers, engines):
    run = {**RUN, "config": {**RUN["config"], "rollout_dtype": learners}}
    flags = sampler.SamplerFlags(rollout="hf", rollout_dtype=samplers)
    assert sampler.configure(run, flags).rollout_dtype == engines


def test_a_sampler_on_a_gpu_refuses_unsupported_products(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run = {**RUN, "config": {**RUN["config"], "rollout_quant": "int8", "rollout_dtype": "float32"}}
    with pytest.raises(UserError, match="in 16 bits with this format; add --rollout_dtype=bfloat16"):
        sampler.configure(run, sampler.SamplerFlags(rollout="vllm"))
    assert sampler.configure(run, sampler.SamplerFlags(rollout="vllm", rollout_dtype="bfloat16"))


@pytest.mark.parametrize(
    "changes",
    [
        dict(topk="4"),
        dict(topk=-1),
        dict(context=0),
        dict(max_allowed=-3),
        dict(config=None),
        dict(config={"seed": 3}),
        dict(config={**RUN["config"], "task": ["arith"]}),
        dict(sampling={"heat": 1.0}),
        dict(probe=[["x"]]),
        dict(probe=[1]),
        dict(model=7),
    ],
)
def test_invalid_descriptions_of_a_run_are_refused(changes):
    sampler.check_description({**RUN, "later": "an entry of a later revision"})
    with pytest.raises(UserError, match="this sampler does not know the learner's kind of run .*one revision"):
        sampler.check_description({**RUN, **changes})


def test_a_refused_description_writes_no_file(tmp_path):
    with pytest.raises(UserError, match="this sampler does not know the learner's kind of run"):
        sampler.open_source(WELCOME, SamplerFlags(), tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- flags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--connect=pigeon://127.0.0.1:9", "--keys="], "--connect=pigeon://127.0.0.1:9: "),
        (["--name=" + "x" * 65], "a sampler's name is 1 to 64 letters"),
        (["--name=\n"], "a sampler's name is 1 to 64 letters"),
    ],
)
def test_bad_sampler_flags_are_refused(argv, sentence, tmp_path, monkeypatch):
    base = ["--connect=tcp://127.0.0.1:9", f"--spool={tmp_path}"]
    if "--keys=" in argv:
        keys.make_keys(str(tmp_path / "keys"), 1)
        argv = [argv[0], f"--keys={tmp_path / 'keys' / 'sampler0'}"]
    with pytest.raises(UserError) as e:
        sampler.connect(parse_flags(SamplerFlags, [*base, *argv]), 1)
    assert sentence in str(e.value)


def test_the_default_name_of_a_sampler(monkeypatch):
    for host, name in (("box.example.com", "box"), ("B\u00fcro 7", "B-ro-7"), (".", "sampler")):
        monkeypatch.setattr(sampler.os, "uname", lambda host=host: SimpleNamespace(nodename=host))
        assert sampler.sampler_name(SamplerFlags()) == name


def test_a_hub_that_cannot_listen_closes_its_sockets(tmp_path):
    """ZeroMQ waits for open sockets at the end of a process, so a process with an open socket would hang."""
    keys.make_keys(str(tmp_path / "keys"), 1)

    def still_open():
        return [id(x) for x in gc.get_objects() if type(x) is zmq.Context and not x.closed], threading.active_count()

    before = still_open()
    with pytest.raises(UserError, match="--samplers=tcp://nowhere.invalid:5555: ") as error:
        hub.Hub(
            "tcp://nowhere.invalid:5555", str(tmp_path / "keys" / "learner"), WELCOME, SimpleNamespace(room=1), None
        )
    assert error and still_open() == before  # the error still references the hub


def test_samplers_start_at_different_problems():
    me, first = sampler.SamplerSource.__new__(sampler.SamplerSource), set()
    for owner in (("a", 1), ("b", 1), ("a", 2), ("a.1", 1)):
        me.owner = owner
        n, uid = me.identify(3)
        assert uid == (*owner, 3) and me.identify(4)[0] == n + 1
        first.add(n)
    assert len(first) == 4
