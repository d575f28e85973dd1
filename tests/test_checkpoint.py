"""Checkpoints: what goes in comes out, whole or not at all, also from a checkpoint with the names of format 1."""

import random
from dataclasses import fields, is_dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_groups, tiny_model

import checkpoint
from tasks import arithmetic_tokenizer

CONTROLLERS = {"kappa": 0.9970144912453727, "distill": 0.5}


def described(x):
    """A value with everything that must survive: the fields of dataclasses, the types and numbers of arrays."""
    if is_dataclass(x):
        return {f.name: described(getattr(x, f.name)) for f in fields(x)}
    if isinstance(x, np.ndarray):
        return str(x.dtype), x.shape, x.tolist()
    if isinstance(x, dict):
        return {name: described(value) for name, value in x.items()}
    if isinstance(x, list):
        return [described(value) for value in x]
    return x


def pending_groups():
    """Groups as they wait in the middle of a rollout batch: with allowed sets and with ref columns."""
    groups = make_groups(n_groups=2, G=3, K=4, seed=5)
    rng = np.random.default_rng(0)
    for group in groups:
        lengths = [len(response.tokens) for response in group.responses]
        for response in group.responses:
            sizes = rng.integers(1, 4, len(response.tokens))
            response.allowed_offsets = np.concatenate([[0], sizes.cumsum()]).astype(np.int64)
            response.allowed_ids = rng.integers(0, 256, sizes.sum()).astype(np.int32)
        for name in ("logp_ref", "tail_ref", "actor_logp_ref", "z_ref", "kl_ref", "kl_after_ref"):
            group.ref[name] = [rng.normal(size=n).astype(np.float32) for n in lengths]
        group.ref["support_ids"] = [rng.integers(0, 256, (n, 9)) for n in lengths]
        for name in ("support_logp", "support_logp_ref"):
            group.ref[name] = [rng.normal(size=(n, 9)).astype(np.float32) for n in lengths]
    return groups


def in_format_1(groups) -> dict:
    """The same groups as revisions before format 2 wrote them."""
    old_response = {"allowed_offsets": "kept_offsets", "allowed_ids": "kept_ids"}
    old_column = {
        "logp_ref": "logp_ref",
        "tail_ref": "tail_ref",
        "z_ref": "z_ref",
        "actor_logp_ref": "logp_actor_ref",
        "kl_ref": "kl_before",
        "kl_after_ref": "kl_after",
        "support_ids": "s_ids",
        "support_logp": "s_logp",
        "support_logp_ref": "s_logp_ref",
    }
    packed = checkpoint.pack(groups)
    for group in packed["groups"]:
        group["responses"] = [{old_response.get(k, k): v for k, v in r.items()} for r in group["responses"]]
        group["ref"] = {old_column[name]: rows for name, rows in group["ref"].items()}
    return packed


class Learner:
    """As much of a learner as a checkpoint asks of it; its weights cannot be read where `broken` is set."""

    def __init__(self):
        self.comm = SimpleNamespace(rank=0, size=1, barrier=lambda: None)
        self.names = ["policy"]
        self.model = tiny_model(0)
        self.loaded = None
        self.broken = False

    def named_tensors(self, name):
        for key, tensor in self.model.state_dict().items():
            yield key, tensor
            if self.broken:
                raise OSError("no space left on device")

    def state_dict(self):
        return {"version": 7}

    def load_state_dict(self, state):
        self.loaded = state


class Source:
    def state_dict(self):
        return {"sequence": 12}

    def load_state_dict(self, state):
        self.loaded = state


@pytest.fixture
def run(tmp_path):
    return SimpleNamespace(
        cfg=SimpleNamespace(out=str(tmp_path), keep=2),
        configs={"policy": tiny_model(0).config},
        tokenizer=arithmetic_tokenizer(),
    )


def test_pending_groups_come_back_equal():
    groups = pending_groups()
    again = checkpoint.unpack(checkpoint.pack(groups))
    assert described(again) == described(groups)
    whole_vocabulary = make_groups()  # no allowed sets, no ref columns
    assert described(checkpoint.unpack(checkpoint.pack(whole_vocabulary))) == described(whole_vocabulary)


def test_a_checkpoint_gives_back_what_it_was_given(run):
    learner, source = Learner(), Source()
    minibatches = [pending_groups(), make_groups()]
    folder = checkpoint.save(run, 50, learner, source, minibatches, CONTROLLERS)
    drawn = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
    assert checkpoint.load(folder, learner, source)[0] == 50
    assert drawn == (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())  # the same draws again
    step, pending, controllers = checkpoint.load(folder, learner, source)
    assert described(pending) == described(minibatches)
    assert controllers == CONTROLLERS
    assert learner.loaded == {"version": 7}
    assert source.loaded == {"sequence": 12}
    assert torch.load(folder / "learner.pt", weights_only=True)["format"] == 2


def test_a_checkpoint_of_format_1_loads_equal(run):
    """Before format 2: other names in the pending groups, `carry` for controllers, `world` for the number of ranks."""
    learner, source = Learner(), Source()
    groups = pending_groups()
    folder = checkpoint.save(run, 15, learner, source, [groups], CONTROLLERS)
    shared = {"step": 15, "world": 1, "learner": {"version": 15}, "carry": CONTROLLERS}
    torch.save(shared, folder / "learner.pt")
    own = torch.load(folder / "rank0.pt", weights_only=True)
    old = in_format_1(groups)
    assert "kept_ids" in old["groups"][0]["responses"][0] and "kl_before" in old["groups"][0]["ref"]
    torch.save({**own, "pending": [old]}, folder / "rank0.pt")
    step, pending, controllers = checkpoint.load(folder, learner, source)
    assert step == 15
    assert described(pending) == described([groups])
    assert controllers == CONTROLLERS
    assert learner.loaded == {"version": 15}


@pytest.mark.parametrize("n_ranks", ["n_ranks", "world"])
def test_another_number_of_ranks_is_refused(run, n_ranks):
    learner, source = Learner(), Source()
    folder = checkpoint.save(run, 3, learner, source, [], {})
    torch.save({"step": 3, n_ranks: 2, "learner": {}, "controllers": {}}, folder / "learner.pt")
    with pytest.raises(ValueError, match="was written by 2 rank.s. and this run has 1; use as many"):
        checkpoint.load(folder, learner, source)
    assert learner.loaded is None


def test_a_format_of_the_future_is_refused(run):
    learner, source = Learner(), Source()
    folder = checkpoint.save(run, 3, learner, source, [], {})
    torch.save({"format": 3}, folder / "learner.pt")
    with pytest.raises(ValueError, match="has checkpoint format 3, and this revision reads up to 2"):
        checkpoint.load(folder, learner, source)


def test_a_checkpoint_is_whole_or_not_there_and_old_ones_go(run, tmp_path):
    learner, source = Learner(), Source()
    assert checkpoint.newest(tmp_path) is None
    first = checkpoint.save(run, 1, learner, source, [], {})
    learner.broken = True
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(run, 2, learner, source, [], {})
    assert checkpoint.newest(tmp_path) == first
    assert checkpoint.load(first, learner, source)[0] == 1
    learner.broken = False
    # The folder that the interrupted save left behind is replaced by the next save of that step.
    for step in (2, 3):
        last = checkpoint.save(run, step, learner, source, [], {})
    assert checkpoint.newest(tmp_path) == last
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    assert sorted(p.name for p in last.iterdir()) == ["learner.pt", "policy", "rank0.pt"]
