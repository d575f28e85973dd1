"""A file of routes that changes while a sampler runs: ranks are added, left and moved, and no group is lost."""

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_hub
from test_hub import WELCOME, closed_behind, until, weights
from test_wire import group

from flags import UserError
from remote import routes, sampler
from remote.sampler import SamplerFlags


@pytest.fixture
def made(tmp_path):
    yield from closed_behind(tmp_path)


class Sampled:
    """A source of groups without a model."""

    owner = ("", 0)

    def load_weights(self, newest):
        self.version = newest.version

    def sample(self, numbers):
        time.sleep(0.05)
        return [replace(group(), uid=(*self.owner, n), version=self.version) for n in numbers]


def running(made, flags, welcome=WELCOME):
    """A sampler's loop in a thread, and its connection."""
    connection = sampler.connect(flags, 1)
    loop = sampler.Sampler(flags, connection, welcome, Sampled(), 1)

    def run():
        with contextlib.suppress(UserError):  # the link's error
            loop.run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def close():
        connection.link.error = "the test is over"
        thread.join(10)
        connection.link.close()

    made.add(SimpleNamespace(close=close))
    return connection


def write(path, learners, ranks):
    """As an editor does it: another file under the same name."""
    lines = ["[learners]", *(f'{rank} = "{address}"' for rank, address in enumerate(learners)), "[samplers]"]
    scratch = Path(f"{path}.new")
    scratch.write_text("\n".join([*lines, f"box = {ranks}"]))
    scratch.replace(path)


def hub_with_weights(made, folder):
    h = made.hub()
    (folder / "v000001.safetensors").write_bytes(b"weights")
    h.broadcast(1, folder / "v000001.safetensors", 1.0)
    return h


def test_routes_are_read_again_when_they_change(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(routes, "LOOK_EVERY", 0.1)
    first, second, third = (hub_with_weights(made, tmp_path) for _ in range(3))
    file = tmp_path / "routes.toml"
    write(file, [first.address, second.address], [0])
    flags = SamplerFlags(connect=str(file), name="box", groups=1, spool=str(tmp_path / "s"), spool_groups=5)
    connection = running(made, flags)
    link, spool = connection.link, connection.spool
    assert until(lambda: first.counts["received"] >= 2) and not second.peers

    write(file, [first.address, second.address], [1])  # to the other rank; its weights come from there too
    assert until(lambda: second.counts["received"] >= 2)
    assert [(line.stream, line.left, line.fetches_weights) for line in link.lines] == [
        ("box.1", False, True),
        ("box.0", True, False),
    ]
    assert until(lambda: first.counts["received"] == spool.handed["box.0"])  # what was made for it goes there
    file.write_text("[learners")  # half written
    assert until(lambda: "no file of routes" in capsys.readouterr().out)
    first.held([arrived.name for arrived in first.drain()])
    assert until(lambda: [line.stream for line in link.lines] == ["box.1"]) and not spool.waiting["box.0"]
    assert not link.error

    before = spool.handed["box.1"]
    write(file, [first.address, third.address], [0, 1])  # rank 1 moves, and rank 0 is back
    assert until(lambda: third.counts["received"] >= 2 and spool.handed["box.1"] > before)
    assert until(lambda: first.counts["received"] + second.counts["received"] + third.counts["received"] > 9)
    assert {line.stream for line in link.lines if not line.left} == {"box.0", "box.1"} and not link.error


def test_new_routes_must_pass_what_the_first_ones_passed(tmp_path, monkeypatch, capsys):
    """No keys for another host, an address that is none, another folder: the routes of before stay."""
    monkeypatch.setattr(routes, "LOOK_EVERY", 0.0)
    file = tmp_path / "routes.toml"
    write(file, ["tcp://127.0.0.1:5555"], [0])
    flags = SamplerFlags(connect=str(file), name="box")
    follower = routes.Follower(str(file), "box", lambda others: sampler.checked_keys(flags, others))
    assert follower.changed() is None
    for address, words in (("tcp://10.0.0.1:5555", "over a network keys are needed"), ("nowhere", "not an address")):
        write(file, [address], [0])
        assert follower.changed() is None and follower.changed() is None
        assert capsys.readouterr().out.count(f"{words}") == 1
    write(file, ["tcp://127.0.0.1:5555"], [0])  # another file, the same routes
    assert follower.changed() is None
    write(file, ["tcp://127.0.0.1:5556"], [0])
    assert follower.changed() == (["tcp://127.0.0.1:5556"], ["box.0"])
    file.unlink()
    assert follower.changed() is None and "no file of routes" in capsys.readouterr().out
    with pytest.raises(UserError, match="elsewhere: not the folder of before; start this sampler again"):
        sampler.check_same_folder(tmp_path, [str(tmp_path), "elsewhere"])


def test_one_address_on_another_host_needs_keys_whatever_the_others_are():
    flags = SamplerFlags(connect="routes.toml")
    assert sampler.checked_keys(flags, ["tcp://127.0.0.1:5555", "ipc:///tmp/hub"]) is None
    with pytest.raises(UserError, match="--connect=routes.toml: over a network keys are needed"):
        sampler.checked_keys(flags, ["tcp://127.0.0.1:5555", "tcp://10.0.0.1:5555"])


def test_a_folder_with_new_routes(made, tmp_path, monkeypatch):
    """Over a shared folder a sampler goes on with another stream."""
    monkeypatch.setattr(routes, "LOOK_EVERY", 0.1)
    shared = tmp_path / "shared"
    shared.mkdir()
    s = test_hub.source(shared)
    s.hub.ranks = 2
    s.hub.welcome = test_hub.msgspec.structs.replace(WELCOME, run={"world": 2, "paced": False})
    s.publish(0, weights(0))
    file = tmp_path / "routes.toml"
    write(file, [str(shared)] * 2, [0])
    flags = SamplerFlags(connect=str(file), name="box", groups=1, spool=str(tmp_path / "s"), spool_groups=3)
    spool = running(made, flags, s.hub.welcome).spool
    assert until(lambda: spool.handed["box.0"] == 3)
    write(file, [str(shared)] * 2, [1, 0])
    assert until(lambda: spool.handed.get("box.1") == 3)
    assert (shared / "rollouts" / "box.1").is_dir() and until((shared / "samplers" / "box.1").is_file)
