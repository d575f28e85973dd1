"""Remote samplers as real processes: over ZeroMQ and over a folder, killed; a lossy connection.

After every run the account of groups is complete. A learner has 240 s (test_train.finish); every wait has a limit."""

import random
import resource
import signal
from collections import Counter

import pytest
import torch
import zmq
from test_hub import opened, until
from test_train import begin, finish, flags, no_process_stays_behind, start, wait_for
from test_wire import BLOB, group
from torchrun import Command, free_port

from machinery.log import read_metrics
from remote import link, sampler, wire
from remote.account import split
from remote.groups import encode_group
from remote.keys import make_keys

__all__ = ["no_process_stays_behind", "opened"]  # fixtures

pytestmark = pytest.mark.timeout(600)  # several processes on a machine that may be busy

UPDATES = 6
REMOTE = dict(rollout_batch=16, train_batch=16, steps=UPDATES, save_every=2, objective="tis", actor="none")
REMOTE |= dict(give_up=90, eval_problems=8)


def learn(solvers, tmp_path, samplers, ranks=1, **more):
    """(a learner with this --samplers, the address for its samplers)."""
    address = samplers.replace("*", "127.0.0.1")
    return start(flags(solvers, tmp_path / "run", **{**REMOTE, "samplers": samplers, **more}), ranks), address


def tcp(host="127.0.0.1"):
    return f"tcp://{host}:{free_port()}"


def box(address, folder, *more, keys="none", name="box"):
    """A sampler process."""
    argv = ["-m", "remote", f"--connect={address}", f"--spool={folder}", f"--keys={keys}"]
    argv += [f"--name={name}", "--rollout=hf", "--groups=2", "--give_up=90", "--patience=1", *more]
    return begin(Command(*argv, merged=True))


def kill(*processes):
    """Kill processes and return their output."""
    for p in processes:
        p.send_signal(signal.SIGKILL)
    return "".join(p.communicate(timeout=30)[0] or "" for p in processes)


def finishes(learner, *samplers):
    """Wait for the learner's end, then kill the samplers."""
    code, _, err = finish(learner)
    printed = kill(*samplers)
    assert code == 0, err[-3000:] + printed[-3000:]


def source_state(run):
    """The state of the source in the newest complete checkpoint."""
    assert until(lambda: list((run / "checkpoints").glob("step_??????")), within=60)
    newest = sorted((run / "checkpoints").glob("step_??????"))[-1]
    return torch.load(newest / "rank0.pt", weights_only=False)["source"]


def assert_account_is_complete(run, spools, most=0.5):
    """Every handed-over group is in the checkpoint's account or in a spool. Every group in the account has one fate.
    The number of trained groups equals the number that the updates used."""
    have = {}
    for path in (path for spool in spools for path in spool.glob("*/[!.]*-*")):
        incarnation, n = map(int, path.name.split("-"))
        have.setdefault((path.parent.name, incarnation), set()).add(n)
    state = source_state(run)
    counts = state["counts"]
    assert len(state["account"]) == sum(counts.values()) and counts.get("refused", 0) == 0, counts
    for name in state["account"]:
        sampler, incarnation, n = split(name)
        have.setdefault((sampler, incarnation), set()).add(n)
    assert counts["trained"] == UPDATES * 4  # an update of 16 responses takes 4 groups
    assert have and all(numbers == set(range(max(numbers) + 1)) for numbers in have.values()), have
    rows = [r for r in read_metrics(run) if r["step"] >= 0]
    assert [r["step"] for r in rows] == list(range(UPDATES)) and all(r["rollout_corr/k3_kl"] < most for r in rows)
    return rows


def resumed(tmp_path, *more):
    return start(["--resume", f"--out={tmp_path / 'run'}", *more])


def test_over_zmq_with_keys_and_two_samplers_killed_and_started_again(solvers, tmp_path):
    """A small actor samples on two hosts, one in int8, encrypted; one joins late, the other and the learner are killed.
    With a minimal spool the learner still gets more groups between two checkpoints, orphans included."""
    make_keys(str(tmp_path / "keys"), 2)
    more = dict(objective="jackpot", actor=solvers / "actor", keys=tmp_path / "keys" / "learner", max_staleness=3)
    learner, address = learn(solvers, tmp_path, tcp("*"), save_every=3, **more)

    def first(*flags):
        return box(address, tmp_path / "a", *flags, keys=tmp_path / "keys" / "sampler0", name="sampler0-a")

    sampler = first("--spool_groups=2")
    wait_for(tmp_path / "run", 2, learner)
    kill(learner, sampler)
    second = box(address, tmp_path / "b", "--rollout_quant=int8", keys=tmp_path / "keys" / "sampler1", name="sampler1")
    finishes(resumed(tmp_path), first(), second)
    spools = [tmp_path / "a" / "spool", tmp_path / "b" / "spool"]
    rows = assert_account_is_complete(tmp_path / "run", spools, most=10)  # two different models
    assert all(r["staleness/max_updates"] <= 3 for r in rows)
    assert "sampler sampler0-a" in (tmp_path / "run" / "remote.log").read_text()
    assert rows[-1]["remote/received"] > 0


def test_over_a_folder_and_a_full_disk(solvers, tmp_path):
    """Groups that a full disk (600 bytes a file) holds back are trained on later. The learner is killed too."""
    (tmp_path / "shared").mkdir()
    learner, shared = learn(solvers, tmp_path, str(tmp_path / "shared"), max_staleness=1)
    sampler = box(shared, tmp_path / "box")
    wait_for(tmp_path / "run", 1, learner)
    resource.prlimit(sampler.pid, resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
    assert any("File too large; waiting for disk space" in line for line in sampler.stdout)  # waits for this line
    resource.prlimit(sampler.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    kill(learner)
    finishes(resumed(tmp_path), sampler)
    assert_account_is_complete(tmp_path / "run", [tmp_path / "shared" / "rollouts"])


def test_lost_damaged_and_doubled_messages(opened, tmp_path, monkeypatch):
    """Three tenths of all messages: every group arrives once, and weights arrive whole."""
    r, whole, did = random.Random(0), zmq.Socket.send_multipart, Counter()

    def send_multipart(socket, frames, *args, **options):
        kind = r.choices(["pass", "lose", "damage", "double"], [70, 10, 10, 10])[0]
        did[kind] += 1
        *head, last = map(bytes, frames)
        if kind == "damage":
            at = r.randrange(len(last))
            last = last[:at] + bytes([last[at] ^ 1 << r.randrange(8)]) + last[at + 1 :]
        for _ in range({"lose": 0, "double": 2}.get(kind, 1)):
            whole(socket, [*head, last], *args)

    monkeypatch.setattr(zmq.Socket, "send_multipart", send_multipart)
    monkeypatch.setattr(link, "BEAT", 0.2)
    h = opened.hub()
    end = opened.link(h, tmp_path, patience=0.2)
    data = encode_group(group())
    for n in range(60):
        end.spool.hand_over(f"box/1/{n}", data)
    path, arrived = tmp_path / "learner.safetensors", []
    path.write_bytes(BLOB)
    h.broadcast(wire.Offer(wire.manifest(path.name, BLOB), 3, 1.0), path, None)
    assert until(lambda: arrived.extend(h.drain()) or len(arrived) >= 60 and end.newest is not None, within=60)
    names = [group.name for group in arrived]
    assert sorted(names) == sorted(f"box/1/{n}" for n in range(60))
    assert until(lambda: h.hold(names) or not end.spool.waiting) and not h.drain()
    assert all(group.data == data for group in arrived) and end.newest.path.read_bytes() == BLOB
    assert len(did) == 4 and end.error == "" and h.counts["faults"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("folder", [False, True])
def test_two_ranks_and_two_samplers_in_four_bits(folder, solvers, tmp_path):
    """Each sampler serves both ranks and fetches int4 tensors, over ZeroMQ as deltas."""
    (tmp_path / "shared").mkdir()
    samplers = str(tmp_path / "shared") if folder else tcp()
    more = dict(rollout_quant="w4a16", quant_group=16, max_staleness=1)  # groups of a, made before, become too old
    learner, address = learn(solvers, tmp_path, samplers, ranks=2, **more)
    a = box(address, tmp_path / "a", "--spool_groups=2", name="a")
    wait_for(tmp_path / "run", 2, learner)
    kill(a)
    finishes(learner, box(address, tmp_path / "b", name="b"))
    spools = [tmp_path / name for name in ("shared/rollouts", "a/spool", "b/spool")]
    rows = assert_account_is_complete(tmp_path / "run", spools, most=10)
    assert rows[-1]["remote/trained"] == 4 * UPDATES <= rows[-1]["remote/handed"]


def test_a_sampler_without_an_answer_stops(tmp_path):
    message = "no answer from tcp://127.0.0.1:9 for 1 s: check that the learner runs"
    with pytest.raises(SystemExit, match=message):
        sampler.main([f"--spool={tmp_path / 's'}", "--connect=tcp://127.0.0.1:9", "--give_up=1", "--patience=0.2"])
