"""Memory: what is kept for the backward pass, where weights are read, in what type they travel."""

import numpy as np
import pytest
import torch
from conftest import make_cfg, make_groups, tiny_model
from ranks import LOW_BITS, hold_back_the_step, make_learner, one_update
from standins import FAMILIES, model, tokenizer

import batching
import objectives
from learner import Comm, Learner

f64 = torch.float64


def relative(a: dict, b: dict) -> float:
    """|a - b| / |a| over all parameters together."""
    assert a.keys() == b.keys()
    difference = sum(float((a[n] - b[n]).double().square().sum()) for n in a)
    return (difference / sum(float(x.double().square().sum()) for x in a.values())) ** 0.5


# ---------------------------------------------------------------------------------------------------------------------
# Activations
# ---------------------------------------------------------------------------------------------------------------------

AGAIN = [
    ({"objective": "jackpot", "actor": "base:actor"}, f64),
    ({"objective": "tis", "entropy_coef": 0.1, "dtype": "bfloat16"}, torch.float32),
    ({"objective": "tbpo", **LOW_BITS}, torch.float32),
    ({"objective": "tbpo", **LOW_BITS, "rollout_quant": "int8"}, torch.float32),
    ({"objective": "tis", "lora_rank": 3, "kl_coef": 0.3}, f64),
]


class Kept:
    """Counts the bytes that are kept for a backward pass."""

    def __init__(self):
        self.tensors = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda x: x)

    def keep(self, x):
        storage = x.untyped_storage()
        self.tensors[storage.data_ptr()] = storage.nbytes()
        return x

    def count(self, learner, batch, cfg) -> int:
        """Bytes beside the weights."""
        weights = {p.untyped_storage().data_ptr() for p in learner.models.parameters()}
        hold_back_the_step(learner)
        stats = objectives.prepare(batch, learner.comm, cfg, {})
        with self.hooks:
            learner.update(batch, stats)
        return sum(n for place, n in self.tensors.items() if place not in weights)


@pytest.mark.parametrize("micro_tokens", [10**6, 45, 1])
@pytest.mark.parametrize("case, dtype", AGAIN, ids=str)
def test_activations_that_are_computed_again_give_the_same_gradient(case, dtype, micro_tokens):
    """With prompts that are shared, and in the last case with prompts that are not."""
    grads = []
    for again in (False, True):
        cfg = make_cfg(**case, micro_tokens=micro_tokens, gradient_checkpointing=again)
        learner, groups = make_learner(cfg, dtype), make_groups(2, seed=3, prompt=(6, 12))
        shared = {share for *_, share in learner._micro(batching.collate(groups, cfg))}
        assert shared == {micro_tokens > 1}
        grads.append(one_update(cfg, learner, groups)[0])
    assert relative(*grads) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_layers_can_be_computed_again(family):
    grads = []
    for again in (False, True):
        cfg = make_cfg(objective="tis", gradient_checkpointing=again)
        learner = Learner(model(family), None, cfg, Comm())
        groups = make_groups(2, seed=3, prompt=(6, 12), vocab=len(tokenizer()))
        grads.append(one_update(cfg, learner, groups)[0])
    assert relative(*grads) < 1e-6


@pytest.mark.parametrize("share", [True, False])
def test_a_layers_input_alone_is_kept(share):
    """Of eight layers by far the most is not kept, whether prompts are shared or not."""
    kept = []
    for again in (False, True):
        cfg = make_cfg(objective="tis", gradient_checkpointing=again)
        learner = Learner(tiny_model(0, layers=8), None, cfg, Comm())
        groups = make_groups(2, seed=3, prompt=(6, 12))
        if not share:
            learner.models.policy.config.sliding_window = 512  # of no effect but this
        assert {s for *_, s in learner._micro(batching.collate(groups, cfg))} == {share}
        kept.append(Kept().count(learner, batching.collate(groups, cfg), cfg))
    assert kept[1] < 0.25 * kept[0]


def test_a_routing_is_replayed_in_the_second_run_too():
    """The experts that were given, none of them the router's own choice: with and without a second run one gradient,
    which is another one than without a replay."""
    grads = {}
    for again, replay in ((False, True), (True, True), (False, False)):
        cfg = make_cfg(objective="tis", gradient_checkpointing=again, router_replay=replay, micro_tokens=40)
        learner = Learner(model("qwen3_moe"), None, cfg, Comm())
        groups = make_groups(2, seed=3, prompt=(6, 12), vocab=len(tokenizer()))
        rng = np.random.default_rng(0)
        for group in groups:
            for r in group.responses:
                tokens = len(group.prompt_ids) + len(r.tokens) - 1
                chosen = [rng.permutation(8)[:2] for _ in range(2 * tokens)]
                r.routed = np.array(chosen, np.int16).reshape(tokens, 2, 2)
        grads[again, replay] = one_update(cfg, learner, groups)[0]
    assert relative(grads[False, True], grads[True, True]) < 1e-6
    assert relative(grads[False, True], grads[False, False]) > 1e-2
