"""Remote samplers as real processes: over ZeroMQ and over a folder, killed, stopped, cut off, turned away; and the account adds up."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from remote.account import Account
from remote.keys import make_keys
import metrics
from conftest import ROOT
from test_train import finish, flags, start, wait_for

REMOTE = dict(
    rollout_batch=16, train_batch=16, steps=6, save_every=2, objective="tis", actor="none", give_up=90, eval_problems=8
)


def port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def box(address, folder, *more, keys="none", name="box", on=(), **kwargs):
    argv = [
        *on,
        sys.executable,
        "rollout.py",
        f"--connect={address}",
        f"--spool={folder}",
        "--rollout=hf",
        "--groups=2",
        f"--keys={keys}",
        f"--name={name}",
        "--give_up=90",
        "--patience=1",
        *more,
    ]
    return subprocess.Popen(
        argv,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **kwargs,
    )


def kill(*processes):
    for p in processes:
        p.send_signal(signal.SIGKILL)
    return "".join(p.communicate()[0] or "" for p in processes)


def the_account_adds_up(run, spools, updates=6, ranks=1, most=0.5):
    """Every group that was handed over is accounted for in the checkpoint or still in a spool, none is missing in between; every one accounted for stands in one
    column and once; as many were trained on as the updates took."""
    trained, have = 0, {}
    for path in (p for s in spools for p in s.glob("*/*-*") if not p.name.startswith(".")):
        incarnation, n = map(int, path.name.split("-"))
        have.setdefault((path.parent.name, incarnation), set()).add(n)
    for rank in range(ranks):
        state = torch.load(sorted((run / "checkpoints").glob("step_*"))[-1] / f"rank{rank}.pt", weights_only=True)[
            "source"
        ]
        account, counts = Account.of(state["account"]), state["counts"]
        assert sum(map(len, account.values())) == sum(counts.values()), counts
        trained += counts["trained"]
        for key, seen in account.items():
            have.setdefault(key, set()).update(range(seen.upto), seen.beyond)
        assert counts.get("refused", 0) == 0
    assert trained == updates * 4  # an update of 16 responses takes 4 groups
    assert have and all(numbers == set(range(max(numbers) + 1)) for numbers in have.values()), have
    rows = [r for r in metrics.read(run) if r["step"] >= 0]
    assert [r["step"] for r in rows] == list(range(updates)) and all(r["rollout_corr/k3_kl"] < most for r in rows)
    return rows


def zmq_flags(**more):
    where = port()
    return {**REMOTE, **dict(samplers="zmq", bind=f"tcp://127.0.0.1:{where}"), **more}


def go_on(out):
    return start(["--resume", f"--out={out}"])


def test_over_zmq_with_keys_two_samplers_of_another_kind_and_the_trained_actor(solvers, tmp_path):
    """A small actor samples on two hosts, one of them in int8; everything is encrypted; one joins late."""
    make_keys(str(tmp_path / "keys"), 2)
    settings = zmq_flags(
        objective="jackpot",
        actor=solvers / "actor",
        keys=tmp_path / "keys" / "learner",
        bind=f"tcp://*:{port()}",
        max_staleness=3,
    )
    address = settings["bind"].replace("*", "127.0.0.1")
    learner = start(flags(solvers, tmp_path / "run", **settings))
    first = box(address, tmp_path / "a", keys=tmp_path / "keys" / "sampler0", name="a")
    wait_for(tmp_path / "run", 0, learner)
    second = box(address, tmp_path / "b", "--rollout_quant=int8", keys=tmp_path / "keys" / "sampler1", name="b")
    code, text, err = finish(learner)
    said = kill(first, second)
    assert code == 0, err[-3000:] + said[-3000:]
    rows = the_account_adds_up(
        tmp_path / "run", [tmp_path / "a" / "spool", tmp_path / "b" / "spool"], most=10
    )  # two models that differ
    assert (
        all(r["staleness/max_updates"] <= 3 for r in rows)
        and "sampler a" in (tmp_path / "run" / "remote.log").read_text()
    )
    assert rows[-1]["remote/received"] >= 24 and rows[-1]["remote/strangers"] == 0


def test_over_a_folder_and_a_full_disk(solvers, tmp_path):
    """No file may grow beyond 600 bytes for a while: every group fails to be written, waits, and is trained on in the end."""
    shared = tmp_path / "shared"
    shared.mkdir()
    learner = start(flags(solvers, tmp_path / "run", **{**REMOTE, **dict(samplers="files", sync_path=shared)}))
    sampler = box(shared, tmp_path / "box")
    wait_for(tmp_path / "run", 1, learner)
    resource.prlimit(sampler.pid, resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
    done = metrics.read(tmp_path / "run")[-1]["step"]
    time.sleep(4)
    resource.prlimit(sampler.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    code, text, err = finish(learner)
    said = kill(sampler)
    assert code == 0, err[-3000:] + said[-3000:]
    the_account_adds_up(tmp_path / "run", [shared / "rollouts"])
    assert "File too large; waiting for room" in said and done >= 1


@pytest.mark.parametrize("who", ["sampler", "learner", "both", "learner, folder"])
def test_killed_and_started_again(who, solvers, tmp_path):
    """The spool is as small as can be: a learner that must see more groups than that between two checkpoints, orphans among them, gets them."""
    folder = "folder" in who
    (tmp_path / "shared").mkdir()
    settings = (
        {**REMOTE, **dict(samplers="files", sync_path=tmp_path / "shared", save_every=3)}
        if folder
        else zmq_flags(save_every=3)
    )
    address, spool = (
        (settings["sync_path"], tmp_path / "shared" / "rollouts")
        if folder
        else (settings["bind"], tmp_path / "box" / "spool")
    )
    learner, sampler = (
        start(flags(solvers, tmp_path / "run", **settings)),
        box(address, tmp_path / "box", "--spool_groups=2"),
    )
    wait_for(tmp_path / "run", 2, learner)
    if who in ("sampler", "both"):
        kill(sampler)
    if who != "sampler":
        kill(learner)
        learner = go_on(tmp_path / "run")
    if who in ("sampler", "both"):
        sampler = box(address, tmp_path / "box")
    code, text, err = finish(learner)
    said = kill(sampler)
    assert code == 0, err[-3000:] + said[-3000:]
    the_account_adds_up(tmp_path / "run", [spool])


def test_a_learner_that_waits_stops_at_a_signal_and_gives_up_with_a_sentence(solvers, tmp_path):
    """Nobody samples. What was computed is saved either way, and the sampler that comes in the end finds it."""
    settings = zmq_flags(give_up=600)
    learner = start(flags(solvers, tmp_path / "run", **settings))
    deadline = time.monotonic() + 120
    while (
        not (tmp_path / "run" / "versions" / "rank0" / "v000000.safetensors").exists() and time.monotonic() < deadline
    ):
        time.sleep(0.2)
    time.sleep(1)
    learner.send_signal(signal.SIGTERM)
    code, text, err = finish(learner)
    assert code == 0 and "stopped after update 0, saved: go on with --resume" in text, err[-3000:]
    code, text, err = finish(start(["--resume", f"--out={tmp_path / 'run'}", "--give_up=2"]))
    assert code == 1 and "error: no group to train on for 2 s" in err and "Traceback" not in err
    learner, sampler = (
        start(["--resume", f"--out={tmp_path / 'run'}", "--give_up=90"]),
        box(settings["bind"], tmp_path / "box"),
    )
    code, text, err = finish(learner)
    said = kill(sampler)
    assert code == 0, err[-3000:] + said[-3000:]
    the_account_adds_up(tmp_path / "run", [tmp_path / "box" / "spool"])


def test_stopped_for_longer_than_every_timeout(solvers, tmp_path):
    settings = zmq_flags()
    learner, sampler = (
        start(flags(solvers, tmp_path / "run", **settings)),
        box(settings["bind"], tmp_path / "box", "--give_up=14"),
    )
    wait_for(tmp_path / "run", 1, learner)
    for process, seconds in (
        (sampler, 16),
        (learner, 12),
    ):  # ZeroMQ's heartbeat gives up after 10 s, the sampler after 3, for good after 14
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)
    code, text, err = finish(learner)
    said = kill(sampler)
    assert code == 0, err[-3000:] + said[-3000:]
    the_account_adds_up(tmp_path / "run", [tmp_path / "box" / "spool"])


class Proxy(threading.Thread):
    """Between samplers and learner: whole messages are lost, damaged, doubled, held back and throttled, and the connection is cut now and then."""

    def __init__(self, upstream):
        import zmq

        super().__init__(daemon=True)
        self.upstream, self.address, self.stopping, self.random, self.did = (
            upstream,
            f"tcp://127.0.0.1:{port()}",
            False,
            random.Random(0),
            {},
        )
        self.context = zmq.Context()
        self.start()

    def run(self):
        import zmq

        front = self.context.socket(zmq.ROUTER)
        front.bind(self.address)
        back, held, cut = {}, [], time.monotonic() + 5
        while not self.stopping:
            poller = zmq.Poller()
            for s in (front, *back.values()):
                poller.register(s, zmq.POLLIN)
            ready = dict(poller.poll(20))
            for s in ready:
                who, *frames = (
                    s.recv_multipart()
                    if s is front
                    else [next(k for k, v in back.items() if v is s), *s.recv_multipart()]
                )
                if s is front and who not in back:
                    back[who] = self.context.socket(zmq.DEALER)
                    back[who].setsockopt(zmq.LINGER, 0)
                    back[who].connect(self.upstream)
                kind = self.random.choices(["pass", "lose", "damage", "double", "hold", "slow"], [80, 5, 5, 4, 4, 2])[0]
                self.did[kind] = self.did.get(kind, 0) + 1
                if kind == "damage":
                    i = self.random.randrange(len(frames))
                    at = self.random.randrange(len(frames[i])) if frames[i] else None
                    frames[i] = (
                        frames[i][:at] + bytes([frames[i][at] ^ 1 << self.random.randrange(8)]) + frames[i][at + 1 :]
                        if frames[i]
                        else b"?"
                    )
                if kind == "slow":
                    time.sleep(0.1)
                if kind == "hold":
                    held.append((s, who, frames))
                    continue
                for _ in range({"lose": 0, "double": 2}.get(kind, 1)):
                    self.pass_on(s is front, front, back, who, frames)
            if held and self.random.random() < 0.3:  # out of order
                s, who, frames = held.pop(self.random.randrange(len(held)))
                self.pass_on(s is front, front, back, who, frames)
            if time.monotonic() > cut:
                cut = time.monotonic() + 6
                self.did["cut"] = self.did.get("cut", 0) + 1
                for s in back.values():  # the learner sees the sampler vanish and another come
                    s.close(linger=0)
                back.clear()
                held.clear()
        self.context.destroy(linger=0)

    @staticmethod
    def pass_on(up, front, back, who, frames):
        if up and who in back:
            back[who].send_multipart(frames)
        elif not up:
            front.send_multipart([who, *frames])


def test_through_a_proxy_that_spoils_everything(solvers, tmp_path):
    settings = zmq_flags()
    proxy = Proxy(settings["bind"])
    learner, sampler = start(flags(solvers, tmp_path / "run", **settings)), box(proxy.address, tmp_path / "box")
    code, text, err = finish(learner)
    said = kill(sampler)
    proxy.stopping = True
    proxy.join()
    assert code == 0, err[-3000:] + said[-3000:]
    the_account_adds_up(tmp_path / "run", [tmp_path / "box" / "spool"])
    assert all(proxy.did.get(kind, 0) > 0 for kind in ("lose", "damage", "double", "hold", "slow", "cut")), proxy.did


@pytest.fixture
def hosts():
    """Two hosts with a cable between them: network namespaces. A command's prefix and an address for each, and what pulls the cable and plugs it in again."""
    names, tag = [f"mismatch{os.getpid()}{x}" for x in "ab"], os.getpid() % 10**6

    def ip(*command):
        return subprocess.run(["ip", *command], capture_output=True).returncode == 0

    try:
        if not shutil.which("ip") or not all(
            [
                *(ip("netns", "add", n) for n in names),
                ip("link", "add", f"va{tag}", "type", "veth", "peer", "name", f"vb{tag}"),
            ]
        ):
            pytest.skip("no network namespaces here; the test with the proxy stands for this one")
        for i, n in enumerate(names):
            end = f"v{'ab'[i]}{tag}"
            assert all(
                [
                    ip("link", "set", end, "netns", n),
                    ip("-n", n, "addr", "add", f"10.77.0.{i + 1}/24", "dev", end),
                    ip("-n", n, "link", "set", end, "up"),
                    ip("-n", n, "link", "set", "lo", "up"),
                ]
            )
            subprocess.run(
                [
                    "ip",
                    "netns",
                    "exec",
                    n,
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    end,
                    "root",
                    "netem",
                    "delay",
                    "40ms",
                    "loss",
                    "2%",
                ],
                capture_output=True,
            )  # where the kernel has netem
        yield (
            [["ip", "netns", "exec", n] for n in names],
            ["10.77.0.1", "10.77.0.2"],
            lambda up: ip("-n", names[1], "link", "set", f"vb{tag}", "up" if up else "down"),
        )
    finally:
        for n in names if shutil.which("ip") else ():
            ip("netns", "del", n)


def test_two_hosts_and_a_pulled_cable(hosts, solvers, tmp_path):
    """Keys, addresses that are not this host's own, and a cable that hangs loose for longer than every timeout."""
    (learner_host, sampler_host), (at, _), cable = hosts
    make_keys(str(tmp_path / "keys"), 1)
    settings = {**REMOTE, **dict(samplers="zmq", bind=f"tcp://{at}:5555", keys=tmp_path / "keys" / "learner")}
    learner = start(flags(solvers, tmp_path / "run", **settings), on=learner_host)
    sampler = box(f"tcp://{at}:5555", tmp_path / "box", keys=tmp_path / "keys" / "sampler0", on=sampler_host)
    wait_for(tmp_path / "run", 1, learner)
    assert cable(False)
    time.sleep(12)
    done = metrics.read(tmp_path / "run")[-1]["step"]
    assert cable(True)
    code, text, err = finish(learner)
    said = kill(sampler)
    assert code == 0, err[-3000:] + said[-3000:]
    assert done < 5  # it was cut off in the middle
    the_account_adds_up(tmp_path / "run", [tmp_path / "box" / "spool"])


def streams(run, rank):
    """(sampler.rank, how many of its groups) in a rank's checkpoint."""
    account = Account.of(
        torch.load(sorted((run / "checkpoints").glob("step_*"))[-1] / f"rank{rank}.pt", weights_only=True)["source"][
            "account"
        ]
    )
    return {sampler: len(seen) for (sampler, _), seen in account.items()}


def test_two_ranks_and_a_file_of_routes(solvers, tmp_path):
    """Sampler `a` serves both ranks and fetches its weights from the first, `b` the first alone: the second rank trains on what the first one's weights sampled."""
    at = port()
    (tmp_path / "routes.toml").write_text(
        f'[learners]\n0 = "tcp://127.0.0.1:{at}"\n1 = "tcp://127.0.0.1:{at + 1}"\n[samplers]\n"*" = [0, 1]\nb = [0]\n'
    )
    settings = {**REMOTE, **dict(samplers="zmq", bind=f"tcp://127.0.0.1:{at}", steps=4)}
    learner = start(flags(solvers, tmp_path / "run", **settings), ranks=2)
    boxes = [box(tmp_path / "routes.toml", tmp_path / name, name=name) for name in ("a", "b")]
    code, text, err = finish(learner)
    said = kill(*boxes)
    assert code == 0, err[-3000:] + said[-3000:]
    rows = the_account_adds_up(
        tmp_path / "run", [tmp_path / "a" / "spool", tmp_path / "b" / "spool"], updates=4, ranks=2
    )
    assert set(streams(tmp_path / "run", 0)) <= {"a.0", "b.0"} and set(streams(tmp_path / "run", 1)) == {"a.1"}
    assert rows[-1]["remote/trained"] == 16 and rows[-1]["remote/handed"] >= 16  # of both ranks


def test_two_ranks_a_folder_four_bits_and_another_model(solvers, tmp_path):
    """The learner publishes int4 tensors over a folder; one host samples with a smaller model of its own."""
    shared = tmp_path / "shared"
    shared.mkdir()
    settings = {
        **REMOTE,
        **dict(samplers="files", sync_path=shared, rollout_quant="w4a16", quant_group=16, sync_dtype="quantized"),
    }
    learner = start(flags(solvers, tmp_path / "run", **settings), ranks=2)
    a = box(shared, tmp_path / "a", "--spool_groups=2", name="a")
    wait_for(tmp_path / "run", 2, learner)
    got = streams(tmp_path / "run", 0) | streams(tmp_path / "run", 1)
    assert set(got) == {"a.0", "a.1"}, got
    said = kill(a)
    b = box(shared, tmp_path / "b", f"--model={solvers / 'actor'}", name="b")
    code, text, err = finish(learner)
    said += kill(b)
    assert code == 0, err[-3000:] + said[-3000:]
    the_account_adds_up(tmp_path / "run", [shared / "rollouts"], ranks=2, most=10)
    got = streams(tmp_path / "run", 0) | streams(tmp_path / "run", 1)
    assert set(got) == {"a.0", "a.1", "b.0", "b.1"}, got


@pytest.mark.parametrize(
    "argv, sentence",
    [
        ([], "--connect: name the learner's address"),
        (["--connect=tcp://10.0.0.1:5555"], "over a network keys are needed"),
        (["--connect=nowhere"], "neither an address such as tcp://HOST:PORT nor a folder"),
        (["--connect=tcp://127.0.0.1:9", "--name=a/b"], "--name=a/b: a sampler's name has no slash and no dot"),
        (["--connect=tcp://127.0.0.1:9", "--keys=nowhere"], "--keys=nowhere: no learner.key there"),
        (
            ["--connect=tcp://127.0.0.1:9", "--give_up=1", "--patience=0.2"],
            "no answer from tcp://127.0.0.1:9 for 1 s: is the learner up, is that its address, and are these the keys it knows",
        ),
        (["--connect=tcp://127.0.0.1"], "--connect=tcp://127.0.0.1: no port; write tcp://HOST:PORT"),
        (["--connect=routes.toml"], "--connect=routes.toml: no file of routes"),
        (
            ["--connect=tcp://127.0.0.1:9", "--delay=lognormal", "--delay_min=0"],
            "--delay_min=0.0 --delay_max=1800.0: the shortest delay must be above 0",
        ),
        (["--connect=tcp://127.0.0.1:9", "--delay=weibull", "--delay_mass=1"], "--delay_mass=1.0: the share of delays"),
        (["--connect=tcp://127.0.0.1:9", "--groups=0"], "--groups=0 --spool_groups=4096: at least one group at once"),
    ],
)
def test_bad_sampler_flags(argv, sentence, tmp_path):
    done = subprocess.run(
        [sys.executable, "rollout.py", f"--spool={tmp_path / 's'}", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr


def test_one_process_a_spool(tmp_path):
    from remote import sampler

    sampler.lock(tmp_path)
    done = subprocess.run(
        [sys.executable, "rollout.py", f"--spool={tmp_path}", "--connect=tcp://127.0.0.1:9"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "another sampler works there" in done.stderr
