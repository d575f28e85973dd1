"""Remote samplers as real processes: over ZeroMQ and over a folder, killed, stopped, disconnected.

After every run the account of groups is complete. A learner has 240 s (test_train.finish); every wait has a limit."""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import torch
import zmq
from conftest import ROOT
from test_hub import until
from test_train import finish, flags, start, wait_for
from torchrun import free_port

from machinery.run import read_metrics
from remote import sampler
from remote.account import Account
from remote.keys import make_keys

pytestmark = pytest.mark.timeout(600)  # several processes on a machine that may be busy

REMOTE = dict(
    rollout_batch=16, train_batch=16, steps=6, save_every=2, objective="tis", actor="none", give_up=90, eval_problems=8
)


def box(address, folder, *more, keys="none", name="box"):
    """A sampler process."""
    argv = [sys.executable, "-m", "remote", f"--connect={address}", f"--spool={folder}", f"--keys={keys}"]
    argv += [f"--name={name}", "--rollout=hf", "--groups=2", "--give_up=90", "--patience=1", *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill(*processes):
    """Kill processes and return their output."""
    for p in processes:
        p.send_signal(signal.SIGKILL)
    return "".join(p.communicate(timeout=30)[0] or "" for p in processes)


def finishes(learner, *samplers):
    """Wait for the learner's end, then killed the samplers and return their output."""
    code, text, err = finish(learner)
    printed = kill(*samplers)
    assert code == 0, err[-3000:] + printed[-3000:]
    return printed


def source_state(run, rank=0):
    """The state of a rank's source in the newest complete checkpoint."""
    assert until(lambda: list((run / "checkpoints").glob("step_??????")), within=60)
    newest = sorted((run / "checkpoints").glob("step_??????"))[-1]
    return torch.load(newest / f"rank{rank}.pt", weights_only=True)["source"]


def assert_account_is_complete(run, spools, updates=6, ranks=1, most=0.5):
    """Every handed-over group is in the checkpoint's account or in a spool. Every group in the account has one fate.
    The number of trained groups equals the number that the updates used."""
    trained, have = 0, {}
    for spool in spools:
        for path in spool.glob("*/*-*"):
            if not path.name.startswith("."):
                incarnation, n = map(int, path.name.split("-"))
                have.setdefault((path.parent.name, incarnation), set()).add(n)
    for rank in range(ranks):
        state = source_state(run, rank)
        account, counts = Account.of(state["account"]), state["counts"]
        assert sum(map(len, account.values())) == sum(counts.values()), counts
        trained += counts["trained"]
        for key, seen in account.items():
            have.setdefault(key, set()).update(range(seen.upto), seen.beyond)
        assert counts.get("refused", 0) == 0
    assert trained == updates * 4  # an update of 16 responses takes 4 groups
    assert have and all(numbers == set(range(max(numbers) + 1)) for numbers in have.values()), have
    rows = [r for r in read_metrics(run) if r["step"] >= 0]
    assert [r["step"] for r in rows] == list(range(updates)) and all(r["rollout_corr/k3_kl"] < most for r in rows)
    return rows


def zmq_flags(**more):
    return {**REMOTE, "samplers": f"tcp://127.0.0.1:{free_port()}", **more}


def folder_flags(shared, **more):
    shared.mkdir()
    return {**REMOTE, "samplers": shared, **more}


def resume(out):
    return start(["--resume", f"--out={out}"])


def test_over_zmq_with_keys_two_samplers_and_a_trained_actor(solvers, tmp_path):
    """A small actor samples on two hosts, one in int8; all messages are encrypted; one sampler joins late."""
    make_keys(str(tmp_path / "keys"), 2)
    settings = zmq_flags(
        objective="jackpot",
        actor=solvers / "actor",
        keys=tmp_path / "keys" / "learner",
        samplers=f"tcp://*:{free_port()}",
        max_staleness=3,
    )
    address = settings["samplers"].replace("*", "127.0.0.1")
    learner = start(flags(solvers, tmp_path / "run", **settings))
    first = box(address, tmp_path / "a", keys=tmp_path / "keys" / "sampler0", name="sampler0-a")
    wait_for(tmp_path / "run", 0, learner)
    second = box(address, tmp_path / "b", "--rollout_quant=int8", keys=tmp_path / "keys" / "sampler1", name="sampler1")
    finishes(learner, first, second)
    spools = [tmp_path / "a" / "spool", tmp_path / "b" / "spool"]
    rows = assert_account_is_complete(tmp_path / "run", spools, most=10)  # two different models
    assert all(r["staleness/max_updates"] <= 3 for r in rows)
    assert "sampler sampler0-a" in (tmp_path / "run" / "remote.log").read_text()
    assert rows[-1]["remote/received"] >= 24 and rows[-1]["remote/strangers"] == 0


def test_over_a_folder_and_a_full_disk(solvers, tmp_path):
    """For a while files cannot exceed 600 bytes: every group fails to be written, waits, and is trained on later."""
    shared = tmp_path / "shared"
    learner = start(flags(solvers, tmp_path / "run", **folder_flags(shared, max_staleness=1)))
    sampler = box(shared, tmp_path / "box")
    wait_for(tmp_path / "run", 1, learner)
    resource.prlimit(sampler.pid, resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
    done = read_metrics(tmp_path / "run")[-1]["step"]
    assert any("File too large; waiting for disk space" in line for line in sampler.stdout)  # waits for this line
    resource.prlimit(sampler.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    finishes(learner, sampler)
    assert_account_is_complete(tmp_path / "run", [shared / "rollouts"])
    assert done >= 1


@pytest.mark.parametrize(
    "who",
    [
        pytest.param("sampler", marks=pytest.mark.slow),
        pytest.param("learner", marks=pytest.mark.slow),
        "both",
        pytest.param("learner, folder", marks=pytest.mark.slow),
    ],
)
def test_killed_and_started_again(who, solvers, tmp_path):
    """The spool is minimal: the learner still gets more groups between two checkpoints, orphans included."""
    if "folder" in who:
        settings = folder_flags(tmp_path / "shared", save_every=3)
        address, spool = settings["samplers"], tmp_path / "shared" / "rollouts"
    else:
        settings = zmq_flags(save_every=3)
        address, spool = settings["samplers"], tmp_path / "box" / "spool"
    learner = start(flags(solvers, tmp_path / "run", **settings))
    sampler = box(address, tmp_path / "box", "--spool_groups=2")
    wait_for(tmp_path / "run", 2, learner)
    if who in ("sampler", "both"):
        kill(sampler)
    if who != "sampler":
        kill(learner)
        learner = resume(tmp_path / "run")
    if who in ("sampler", "both"):
        sampler = box(address, tmp_path / "box")
    finishes(learner, sampler)
    assert_account_is_complete(tmp_path / "run", [spool])


@pytest.mark.slow
def test_a_waiting_learner_stops_at_a_signal_and_gives_up_with_an_error(solvers, tmp_path):
    """No sampler is running. The run is saved both times, and a late sampler continues it."""
    settings = zmq_flags(give_up=600)
    learner = start(flags(solvers, tmp_path / "run", **settings))
    published = tmp_path / "run" / "versions" / "v000000.safetensors"
    deadline = time.monotonic() + 120
    while not published.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1)
    learner.send_signal(signal.SIGTERM)
    code, text, err = finish(learner)
    assert code == 143 and "stopped after update 0, saved: continue with --resume" in text, err[-3000:]
    code, text, err = finish(start(["--resume", f"--out={tmp_path / 'run'}", "--give_up=2"]))
    assert code == 1 and "error: no group to train on for 2 s" in err and "Traceback" not in err
    learner = start(["--resume", f"--out={tmp_path / 'run'}", "--give_up=90"])
    finishes(learner, box(settings["samplers"], tmp_path / "box"))
    assert_account_is_complete(tmp_path / "run", [tmp_path / "box" / "spool"])


@pytest.mark.slow
def test_suspended_for_longer_than_every_timeout(solvers, tmp_path):
    settings = zmq_flags()
    learner = start(flags(solvers, tmp_path / "run", **settings))
    sampler = box(settings["samplers"], tmp_path / "box", "--give_up=14")
    wait_for(tmp_path / "run", 1, learner)
    # the sampler reports after 3 s and gives up after 14 s
    for process, seconds in ((sampler, 16), (learner, 12)):
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)
    finishes(learner, sampler)
    assert_account_is_complete(tmp_path / "run", [tmp_path / "box" / "spool"])


class Proxy(threading.Thread):
    """A proxy between samplers and learner: messages are lost, damaged, doubled, delayed and throttled, and connections
    are cut sometimes. No call blocks for longer than a second."""

    def __init__(self, upstream):
        super().__init__(daemon=True)
        self.upstream = upstream
        self.stopping = False
        self.random = random.Random(0)
        self.did = Counter()
        self.context = zmq.Context()
        self.front = self.open(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self.front.bind_to_random_port('tcp://127.0.0.1')}"
        self.back = {}  # sampler -> its socket to the learner
        self.held = []  # delayed messages
        self.start()

    def open(self, kind):
        end = self.context.socket(kind)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDTIMEO, 1000), (zmq.RCVTIMEO, 1000)):
            end.setsockopt(option, value)
        return end

    def run(self):
        cut = time.monotonic() + 5
        while not self.stopping:
            for message in self.receive():
                self.spoil(*message)
            if self.held and self.random.random() < 0.3:  # out of order
                self.pass_on(*self.held.pop(self.random.randrange(len(self.held))))
            if time.monotonic() > cut:
                cut = time.monotonic() + 6
                self.did["cut"] += 1
                for end in self.back.values():  # the learner sees one sampler vanish and a new one appear
                    end.close(linger=0)
                self.back.clear()
                self.held.clear()
        self.context.destroy(linger=0)

    def receive(self):
        """(whether it goes to the learner, sampler, frames) of every socket with a message."""
        poller = zmq.Poller()
        for end in (self.front, *self.back.values()):
            poller.register(end, zmq.POLLIN)
        ready = dict(poller.poll(20))
        messages = [(False, who, back.recv_multipart()) for who, back in self.back.items() if back in ready]
        if self.front in ready:
            who, *frames = self.front.recv_multipart()
            if who not in self.back:
                self.back[who] = self.open(zmq.DEALER)
                self.back[who].connect(self.upstream)
            messages.append((True, who, frames))
        return messages

    def spoil(self, up, who, frames):
        kind = self.random.choices(["pass", "lose", "damage", "double", "hold", "slow"], [80, 5, 5, 4, 4, 2])[0]
        self.did[kind] += 1
        if kind == "damage":
            i = self.random.randrange(len(frames))
            frames[i] = self.damage(frames[i])
        if kind == "slow":
            time.sleep(0.1)
        if kind == "hold":
            self.held.append((up, who, frames))
            return
        for _ in range({"lose": 0, "double": 2}.get(kind, 1)):
            self.pass_on(up, who, frames)

    def damage(self, frame):
        """Flip one bit."""
        if not frame:
            return b"?"
        at = self.random.randrange(len(frame))
        return frame[:at] + bytes([frame[at] ^ 1 << self.random.randrange(8)]) + frame[at + 1 :]

    def pass_on(self, up, who, frames):
        with contextlib.suppress(zmq.Again):  # no receiver: lost
            if not up:
                self.front.send_multipart([who, *frames])
            elif who in self.back:
                self.back[who].send_multipart(frames)


def test_through_a_proxy_that_damages_messages(solvers, tmp_path):
    settings = zmq_flags()
    proxy = Proxy(settings["samplers"])
    learner = start(flags(solvers, tmp_path / "run", **settings))
    finishes(learner, box(proxy.address, tmp_path / "box"))
    proxy.stopping = True
    proxy.join(timeout=10)
    assert not proxy.is_alive()
    assert_account_is_complete(tmp_path / "run", [tmp_path / "box" / "spool"])
    assert all(proxy.did[kind] > 0 for kind in ("lose", "damage", "double", "hold", "slow", "cut")), proxy.did


def streams(run, rank):
    """{sampler.rank: number of its groups} in a rank's checkpoint."""
    account = Account.of(source_state(run, rank)["account"])
    return {sampler: len(seen) for (sampler, _), seen in account.items()}


@pytest.mark.slow
def test_two_ranks_and_two_samplers(solvers, tmp_path):
    """Each sampler serves both ranks and fetches weights from the first rank."""
    at = free_port()
    settings = {**REMOTE, "samplers": f"tcp://127.0.0.1:{at}", "steps": 4}
    settings |= {"rollout_dtype": "bfloat16"}  # with deltas
    learner = start(flags(solvers, tmp_path / "run", **settings), ranks=2)
    both = f"tcp://127.0.0.1:{at},tcp://127.0.0.1:{at + 1}"
    finishes(learner, *(box(both, tmp_path / name, name=name) for name in ("a", "b")))
    spools = [tmp_path / "a" / "spool", tmp_path / "b" / "spool"]
    rows = assert_account_is_complete(tmp_path / "run", spools, updates=4, ranks=2)
    assert set(streams(tmp_path / "run", 0)) <= {"a.0", "b.0"} and set(streams(tmp_path / "run", 1)) <= {"a.1", "b.1"}
    assert rows[-1]["remote/trained"] == 16 and rows[-1]["remote/handed"] >= 16  # sum over both ranks


@pytest.mark.slow
def test_two_ranks_a_folder_and_four_bits(solvers, tmp_path):
    """The learner publishes int4 tensors over a folder."""
    shared = tmp_path / "shared"
    settings = folder_flags(shared, rollout_quant="w4a16", quant_group=16)
    learner = start(flags(solvers, tmp_path / "run", **settings), ranks=2)
    a = box(shared, tmp_path / "a", "--spool_groups=2", name="a")
    wait_for(tmp_path / "run", 2, learner)
    counts = streams(tmp_path / "run", 0) | streams(tmp_path / "run", 1)
    assert set(counts) == {"a.0", "a.1"}, counts
    kill(a)
    finishes(learner, box(shared, tmp_path / "b", name="b"))
    assert_account_is_complete(tmp_path / "run", [shared / "rollouts"], ranks=2, most=10)
    counts = streams(tmp_path / "run", 0) | streams(tmp_path / "run", 1)
    assert set(counts) == {"a.0", "a.1", "b.0", "b.1"}, counts


def test_a_sampler_without_an_answer_stops(tmp_path):
    message = "no answer from tcp://127.0.0.1:9 for 1 s: check that the learner runs"
    with pytest.raises(SystemExit, match=message):
        sampler.main([f"--spool={tmp_path / 's'}", "--connect=tcp://127.0.0.1:9", "--give_up=1", "--patience=0.2"])


def test_one_process_a_spool(tmp_path):
    sampler.lock_folder(tmp_path)
    with pytest.raises(SystemExit, match="another sampler uses this folder"):
        sampler.main([f"--spool={tmp_path}", "--connect=tcp://127.0.0.1:9"])
