"""Checkpoints: saved state is restored, completely or not at all."""

import os
import resource
from types import SimpleNamespace

import numpy as np
import pytest
import standins
import torch
from conftest import make_cfg, make_groups, tiny_model
from safetensors.torch import load_file

import batching
from learner import Learner
from machinery import checkpoint
from machinery.checkpoint import models
from machinery.flags import UserError
from machinery.ranks import Comm
from tasks.arith import arithmetic_tokenizer

CONTROLLERS = {"kappa": 0.9970144912453727, "distill": 0.5}


def pending_groups():
    """Groups that wait in the middle of a rollout batch, with allowed sets and ref columns."""
    groups = make_groups(n_groups=2, G=3, K=4, seed=5)
    rng = np.random.default_rng(0)
    for group in groups:
        for response in group.responses:
            sizes = rng.integers(1, 4, len(response.tokens))
            response.allowed_offsets = np.concatenate([[0], sizes.cumsum()]).astype(np.int64)
            response.allowed_ids = rng.integers(0, 256, sizes.sum()).astype(np.int32)
    cfg = make_cfg(objective="jackpot", actor="base:actor")
    learner = Learner(tiny_model(0), tiny_model(1), cfg, Comm())
    batching.write_ref_columns(groups, learner.ref_columns(batching.collate(groups, cfg)))
    return groups


def make_learner(parallel: str = "ddp") -> Learner:
    return Learner(tiny_model(0), None, make_cfg(objective="tis", parallel=parallel, warmup_steps=0), Comm())


class Source:
    def state_dict(self):
        return {"sequence": 12}

    def load_state_dict(self, state):
        self.loaded = state


@pytest.fixture
def run(tmp_path):
    return SimpleNamespace(
        cfg=SimpleNamespace(out=str(tmp_path), keep=2, dtype="float32"),
        folder=tmp_path,
        configs={"policy": tiny_model(0).config},
        tokenizer=arithmetic_tokenizer(),
        policy=str(tmp_path / "start"),
    )


def test_a_checkpoint_restores_its_state(run):
    """Groups that wait in the middle of a rollout batch, with and without allowed sets and ref columns; controllers,
    counters and weights."""
    learner, source = make_learner(), Source()
    minibatches = [pending_groups(), make_groups()]
    learner.version = 7
    folder = checkpoint.save(run, 50, learner, source, minibatches, CONTROLLERS)
    learner.version, weight = 0, learner.models.policy.lm_head.weight
    before = weight.detach().clone()
    weight.data.zero_()
    step, pending, controllers = checkpoint.load(folder, learner, source)
    with np.printoptions(threshold=10**6, floatmode="unique"):
        assert repr(pending) == repr(minibatches)
    assert (step, controllers, learner.version, source.loaded) == (50, CONTROLLERS, 7, {"sequence": 12})
    assert torch.equal(weight, before)


@pytest.mark.parametrize("own, dtype", [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")])
def test_a_policy_is_saved_in_the_dtype_that_trained_it(own, dtype, run):
    """Whatever the starting folder has: the rounding of a different dtype would be a different policy."""
    learner, run.cfg.dtype, run.configs["policy"].dtype = make_learner(), dtype, getattr(torch, own)
    saved = checkpoint.save(run, 1, learner, Source(), [], {}) / "policy"
    weights = load_file(saved / "model.safetensors")
    assert weights and models.own_dtype(str(saved)) == dtype
    trained = learner.models.policy.state_dict()
    assert all(torch.equal(x, trained[name].to(getattr(torch, dtype))) for name, x in weights.items())


def test_pending_groups_are_distributed_again():
    """Each minibatch keeps its groups, in the order of the problems, for any number of ranks."""
    numbers = [f"p{i}" for i in range(12)]
    of_two = [[numbers[6 * batch : 6 * batch + 6][rank::2] for batch in range(2)] for rank in range(2)]
    assert checkpoint.dealt(of_two, 0, 1) == [numbers[:6], numbers[6:]]
    of_three = [checkpoint.dealt(of_two, rank, 3) for rank in range(3)]
    assert of_three[1] == [["p1", "p4"], ["p7", "p10"]]
    assert [checkpoint.dealt(of_three, rank, 2) for rank in range(2)] == of_two


def test_a_different_format_is_refused(tmp_path):
    for shared, number in (({"format": 6}, 6), ({"format": 4}, 4), ({"world": 1}, 1)):
        torch.save(shared, tmp_path / "learner.pt")
        with pytest.raises(UserError, match=f"has checkpoint format {number}, and this revision reads 5"):
            checkpoint.load(tmp_path, make_learner(), Source())


def test_old_checkpoints_are_deleted(run, tmp_path):
    learner, source = make_learner(), Source()
    assert checkpoint.newest(tmp_path) is None
    (tmp_path / "checkpoints" / "step_000009.writing").mkdir(parents=True)  # of a killed save
    (tmp_path / "checkpoints" / "step_backup").mkdir()  # made by the user
    for step in (1, 2, 999_999, 1_000_000):
        last = checkpoint.save(run, step, learner, source, [], {})
    assert checkpoint.newest(tmp_path) == last and last.name == "step_1000000"
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step_backup", "step_999999", "step_1000000"}
    assert sorted(p.name for p in last.iterdir()) == ["learner.pt", "policy", "rank0.pt", "shards"]


@pytest.mark.parametrize("nbytes", [100, 1000, 10_000])  # in a config, in learner.pt, in the weights
def test_a_full_disk_is_an_error_and_keeps_the_previous_checkpoint(run, tmp_path, nbytes):
    learner, source = make_learner(), Source()
    first = checkpoint.save(run, 1, learner, source, [], {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))  # files of this process cannot grow beyond this size
    try:
        with pytest.raises(UserError, match="step_000002: the checkpoint could not be written"):
            checkpoint.save(run, 2, learner, source, [make_groups()], {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]
    assert checkpoint.newest(tmp_path) == first


# -- Model folders ----------------------------------------------------------------------------------------------------


def contents(folder) -> dict:
    """Every file of a model folder; weights as tensors with their precision."""
    weights = {name: (x.dtype, x.tolist()) for name, x in load_file(folder / "model.safetensors").items()}
    return {"weights": weights, **{path.name: path.read_bytes() for path in folder.glob("*.json")}}


# tied; biases and an untied head; experts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "phi", "qwen3_moe"])
def test_an_export_equals_save_pretrained(family, dtype, tmp_path):
    """From float32, in this dtype."""
    model = standins.model(family).to(dtype)
    standins.save(model, tmp_path / "theirs")
    config = models.read_config(tmp_path / "theirs")
    weights = {name: x.float() for name, x in model.state_dict().items()}
    weights |= {name: weights[name].clone() for name in model.all_tied_weights_keys}  # gathered from ranks
    models.save_model(config, weights.items(), dtype, standins.tokenizer(), tmp_path / "ours", str(tmp_path / "theirs"))
    modes = {path.stat().st_mode for path in (tmp_path / "ours").iterdir()}
    assert len(modes) == 1  # all files are readable by the same users
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    loaded = models.load_model(tmp_path / "ours").state_dict()
    assert all(torch.equal(x, loaded[name]) for name, x in weights.items())


def test_biases_of_routers_are_exported_in_float32(tmp_path):
    """A bfloat16 mixture with float32 biases: their last bits decide the choice of experts."""
    shape = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=0)
    shape |= dict(moe_intermediate_size=32, n_shared_experts=1, num_key_value_heads=2, head_dim=16)
    model = standins.model("glm4_moe", **shape).to(torch.bfloat16)
    standins.save(model, tmp_path / "theirs")
    weights = {name: x.float() for name, x in model.state_dict().items()}
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    weights[name] = torch.tensor([1.0, 1.0 + 2**-12, 1.0 - 2**-12, 0.5])
    config = models.read_config(tmp_path / "theirs")
    where = (standins.tokenizer(), tmp_path / "ours", str(tmp_path / "theirs"))
    models.save_model(config, weights.items(), torch.bfloat16, *where)
    assert torch.equal(load_file(tmp_path / "ours" / "model.safetensors")[name], weights[name])
    loaded = models.load_model(tmp_path / "ours", "auto").state_dict()
    assert torch.equal(loaded[name], weights[name]) and loaded["model.norm.weight"].dtype == torch.bfloat16


class Harmful:
    def __reduce__(self):
        return os.mkdir, (str(self.made),)


def test_a_checkpoint_of_someone_else_runs_no_code(run, tmp_path):
    """Nor does a damaged one give a traceback."""
    learner, harmful = make_learner(), Harmful()
    folder = checkpoint.save(run, 1, learner, Source(), [make_groups()], {})
    harmful.made = tmp_path / "made"
    for name in ("rank0.pt", "learner.pt"):
        torch.save({"pending": harmful}, folder / name)
        with pytest.raises(UserError, match=f"step_000001 is damaged .{name}: .*; delete it and resume"):
            checkpoint.load(folder, learner, Source())
    assert not harmful.made.exists()
