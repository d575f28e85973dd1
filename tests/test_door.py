"""Odd files in a shared folder, odd messages of a learner to a sampler, descriptions of runs."""

import gc
import os
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch
import zmq
from test_hub import WELCOME, fates, hand_over, message_in, numbers, opened, started, until
from test_wire import RUN

from machinery.flags import UserError
from remote import account, files, hub, keys, sampler, wire
from remote.sampler import SamplerFlags
from tasks.arith import Arithmetic

__all__ = ["opened"]  # a fixture


# -- a learner's end of a folder ---------------------------------------------------------------------------------------


def test_odd_files_stop_no_stream(tmp_path):
    """Folders, links, pipes, empty and huge files under names of groups; names of no group; and a normal stream."""
    folder, victim = tmp_path / "f", tmp_path / "victim"
    s = started(folder, give_up=60.0)
    victim.write_bytes(account.with_digest(b"of another program"))
    rollouts, odd = folder / "rollouts", folder / "rollouts" / "a-first"
    for name in ("a-first", "a.b", "b c", "\u00b2", "x" * 65, "...", "a-first/1-0"):
        (rollouts / name).mkdir()
    for name, target in (("1-1", "nowhere"), ("1-2", "/dev/zero"), ("1-3", victim)):
        (odd / name).symlink_to(target)
    for pipe in (odd / "1-4", rollouts / "pipe"):
        os.mkfifo(pipe)
    for name in ("1-\u00b2", f"1-{10**18}", "01-5", "1-9", "../file"):
        (odd / name).touch()
    (odd / "1-6").write_bytes(b"damaged" * 20)
    with open(odd / "1-7", "wb") as f:
        f.truncate(1 << 40)
    (odd / "1-8").write_bytes(account.with_digest(b"no group"))
    for n in range(3):
        hand_over(folder, s, n)
    assert numbers(s.next(3, 0)) == [0, 1, 2] and s.hub.counts["faults"] == 0
    # a valid digest of no group, a huge file; every file that is not regular is damaged
    assert s.counts == {"trained": 3, "refused": 2, "corrupt": 7} and s.hub.size == 0
    log = (folder / "remote.log").read_text()
    assert "1-7 is too big for a group" in log and "1-6 is damaged" in log
    assert victim.exists() and not s.hub.held
    s.state_dict()
    s.saved()
    assert sorted(p.name for p in (folder / "receipts").iterdir()) == ["a-first", "box"]


def test_a_hello_under_a_wrong_name_or_a_path(tmp_path):
    """The learner must not write to ../../victim for a Hello of this name."""
    folder = tmp_path / "deep" / "er"
    s = started(folder)

    def say(file, message=None, **changes):
        hello = {**dict(sampler=file, incarnation=4, session="", handed=3), **changes}
        (folder / "samplers" / file).write_bytes(wire.encode(message or wire.Hello(**hello)))

    say("evil", sampler="../../victim")
    say("thief", sampler="box")
    say("good")
    say("other", wire.Receipt(["box/1/0"]))
    say("long", wire.Refuse("x" * wire.MOST))
    (folder / "samplers" / "linked").symlink_to(folder / "samplers" / "good")
    (folder / "samplers" / "folder").mkdir()
    os.mkfifo(folder / "samplers" / "pipe")
    begin = time.monotonic()
    assert s.hub.drain() == [] and time.monotonic() - begin < 5
    assert s.hub.reports == {("good", 4): 3} and s.hub.counts["malformed"] == 7 and s.hub.counts["faults"] == 0
    log = (folder / "remote.log").read_text()
    assert "sampler evil: a hello of ../../victim, under the name of a different sampler" in log
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]


def test_a_running_learner_touches_its_welcome(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BEAT", 0.1)
    started(tmp_path)
    os.utime(tmp_path / "welcome", (5.0, 5.0))
    assert until(lambda: (tmp_path / "welcome").stat().st_mtime > 5.0)


def test_unknown_problems_are_refused(tmp_path):
    s = started(tmp_path, give_up=60.0)
    s.task = Arithmetic()
    for n, prompt_id in enumerate(("evil", "", "1 + 2 -", "3 + 4 - 5", "9" * 900 + " + x")):
        hand_over(tmp_path, s, n, prompt_id=prompt_id)
    assert [g.prompt_id for g in s.next(1, 0)] == ["3 + 4 - 5"] and fates(s.hub) == []
    assert s.counts == {"refused": 4, "trained": 1}


# -- a sampler's end ---------------------------------------------------------------------------------------------------


def test_a_sampler_survives_odd_files_in_the_folder(opened, tmp_path):
    """Junk instead of each message, weights under a path, weights as a link; then valid files."""
    folder = tmp_path / "f"
    started(folder)
    newest = folder / "models" / "newest"
    offer = message_in(newest)
    newest.write_bytes(b"junk")
    receipt = folder / "receipts" / "box"
    os.mkfifo(receipt)
    end = opened.folder_link(folder)
    end.spool.hand_over("box/1/0", b"a group")
    outside = tmp_path / "v000000.safetensors"
    outside.write_bytes((folder / "models" / offer.of.name).read_bytes())
    (folder / "models" / "v000009.safetensors").symlink_to(outside)
    for changes in (dict(name="../v000000.safetensors"), dict(name="v000009.safetensors"), dict(digest="x")):
        of = msgspec.structs.replace(offer.of, **changes)
        newest.write_bytes(wire.encode(msgspec.structs.replace(offer, of=of)))
        assert not until(lambda: end.newest is not None or end.error, within=0.2) and end.is_alive()
    newest.write_bytes(wire.encode(offer))
    assert until(lambda: end.newest is not None) and end.newest.version == 0
    receipt.unlink()
    receipt.write_bytes(wire.encode(wire.Receipt(held=["box/1/0", "other/1/0", "../../x/1/2"])))
    assert until(lambda: not end.spool.waiting) and end.error == ""


def test_a_sampler_survives_odd_messages_of_its_learner(opened, tmp_path):
    """Names of unknown groups, paths, an offer without a version, chunks that were not asked for, many welcomes."""
    spool = account.Spool(tmp_path / "spool", "box", 1)
    spool.hand_over("box/1/0", b"a group")
    (tmp_path / "1-0").write_bytes(b"of another program")
    learner = opened.learner(spool)
    bad = ["box/1/0&", "box/0", "box/../../1/0", "other/1/0"]
    learner.say(WELCOME, *(wire.Ask(name, 0) for name in bad))
    for names in (bad, [f"box/1/{n}" for n in range(1, 50_000)]):
        learner.say(wire.Receipt(names, names))
    assert learner.hear(wire.Offer).of.name == "box/1/0"
    learner.say(wire.Chunk("x", 10**17, b"x"), wire.Ask("box/1/0", 10**17), wire.Ask("box/1/0", 0))
    assert [learner.hear(wire.Chunk).data for _ in range(2)] == [b"", b"a group"]
    learner.say(wire.Offer(wire.manifest("v", b"x")), *[WELCOME] * 50, wire.Receipt(), wire.Receipt(["box/1/0"]))
    assert until(lambda: learner.end.got == {"box/1/0"})
    assert learner.end.wanted is None and learner.end.error == ""
    assert (tmp_path / "1-0").exists() and list(spool.waiting) == ["box/1/0"]
    learner.say(wire.Refuse("\x1b[2Jno"))
    assert until(lambda: learner.end.error == "?[2Jno")


def test_a_samplers_precision_is_the_learners_by_default(monkeypatch):
    def engines(learners, samplers, rollout="hf", quant="none"):
        changes = {"rollout_dtype": learners, "rollout_quant": quant}
        run = msgspec.structs.replace(RUN, config={**RUN.config, **changes})
        return sampler.configure(run, SamplerFlags(rollout=rollout, rollout_dtype=samplers)).rollout_dtype

    assert (engines("bfloat16", None), engines("bfloat16", "float16")) == ("bfloat16", "float16")
    assert engines(None, None) == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="return only 16-bit numbers; add --rollout_dtype=bfloat16"):
        engines("float32", None, "vllm", "int8")
    assert engines("float32", "bfloat16", "vllm", "int8") == "bfloat16"


BAD_RUNS = [dict(topk=-1), dict(sampling={"top_p": "all"}), dict(probe=[["x"]])]
BAD_RUNS.append(dict(config={**RUN.config, "task": ["arith"]}))


@pytest.mark.parametrize("changes", BAD_RUNS)
def test_invalid_descriptions_of_a_run_are_refused(changes):
    welcome = msgspec.structs.replace(WELCOME, run=msgspec.structs.replace(RUN, **changes))
    with pytest.raises(wire.WireError, match="not a message of this revision"):
        wire.decode(wire.encode(welcome))


def test_the_default_name_of_a_sampler(monkeypatch):
    for host, name in (("box.example.com", "box"), ("B\u00fcro 7", "B-ro-7"), (".", "sampler")):
        monkeypatch.setattr(sampler.os, "uname", lambda host=host: SimpleNamespace(nodename=host))
        assert sampler.sampler_name(SamplerFlags()) == name


def test_a_hub_that_cannot_listen_closes_its_sockets(tmp_path):
    """ZeroMQ waits for open sockets at the end of a process, so a process with an open socket would hang."""
    keys.make_keys(str(tmp_path / "keys"), 1)

    def still_open():
        return [id(x) for x in gc.get_objects() if type(x) is zmq.Context and not x.closed], threading.active_count()

    before, room = still_open(), SimpleNamespace(room=1)
    with pytest.raises(UserError, match="--samplers=tcp://nowhere.invalid:5555: ") as error:
        hub.Hub("tcp://nowhere.invalid:5555", str(tmp_path / "keys" / "learner"), WELCOME, room, None)
    assert error and still_open() == before  # the error still references the hub


def test_samplers_start_at_different_problems():
    me, first = sampler.SamplerSource.__new__(sampler.SamplerSource), set()
    for owner in (("a", 1), ("b", 1), ("a", 2)):
        me.owner = owner
        n, uid = me.identify(3)
        assert uid == (*owner, 3) and me.identify(4)[0] == n + 1
        first.add(n)
    assert len(first) == 3
