"""KL to the start model, entropy bonus, clipped advantages: expectations by enumeration, gradients by autograd."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import STATS, TinyBatch, f64, make_cfg, make_groups, tiny_model
from ranks import make_learner

import batching
import objectives
from learner import Learner
from machinery import flags
from machinery.optim import schedule
from machinery.ranks import Comm
from model import Needs, TokenStats

V = 5


def distribution(seed: int, near=None):
    """Logits (V,) of a distribution over five tokens; near a given distribution, or random."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(V, generator=g, dtype=f64)
    return x if near is None else near + 0.5 * x


START, INF = distribution(0).log_softmax(0), distribution(1).log_softmax(0)
REF, NEW = distribution(2, INF).log_softmax(0), distribution(3, INF).log_softmax(0)


def kl(logp, logq):
    return (logp.exp() * (logp - logq)).sum()


def gradient_of(value, logits):
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def expected_gradient(value, distribution, logits):
    """sum_x p(x) d value_x / d logits, of values (V,); distribution: log p."""
    return gradient_of((distribution.exp().detach() * value).sum(), logits)


# -- In the loss ------------------------------------------------------------------------------------------------------


def five_tokens(logp, adv, inf=INF, ref=REF):
    """(TokenStats, batch) of five responses of one token, each token of the vocabulary once."""
    column = torch.ones(V, 1, dtype=torch.bool)
    batch = TinyBatch(
        logp_ref=ref[:, None],
        logp_inf=inf[:, None],
        mask=column,
        adv=adv,
        group=torch.zeros(V, dtype=torch.long),
        mask_uniforms=torch.linspace(0.1, 0.9, V, dtype=f64)[:, None],
        z_ref=torch.minimum(inf.exp(), ref.exp()).sum() * column.double(),
        logp_start=START[:, None],
    )
    return TokenStats(logp[:, None]), batch


NOTHING = torch.zeros(V, 1, dtype=f64)


@pytest.mark.parametrize(
    "flags, inf, ref",
    [
        (dict(objective="none"), NEW, NEW),  # on policy
        (dict(objective="none"), REF, REF),  # several updates on a batch of ref
        (dict(objective="is"), INF, REF),
        (dict(objective="is", surrogate="reinforce"), INF, NEW),
        (dict(objective="ppo_is"), INF, REF),
        (dict(objective="tis_adjusted", is_cap=1e9), INF, REF),
    ],
)
def test_the_term_is_the_policys_kl_for_every_sampler(flags, inf, ref):
    """Summed over the vocabulary under p_inf, the loss of tokens without advantage has the gradient of the KL."""
    z = NEW.clone().requires_grad_()
    logp = z.log_softmax(0)
    cfg = make_cfg(kl_coef=0.3, **flags)
    new, batch = five_tokens(logp, NOTHING, inf, ref)
    value, _ = objectives.loss(new, batch, STATS, cfg)
    got = expected_gradient(value[:, 0], inf, z)
    assert torch.allclose(got, gradient_of(0.3 * kl(logp, START), z))
    assert got.abs().max() > 0.01


def test_obrs_scales_reward_and_kl_equally():
    """OBRS scales both by Z, so their ratio is the flag's."""
    z = NEW.clone().requires_grad_()
    logp = z.log_softmax(0)
    cfg = make_cfg(objective="jackpot", obrs_mask="expected", obrs_c1=1e9, kl_coef=0.3, clip=False)
    cfg = replace(cfg, obrs_z="exact")
    reward = torch.tensor([[1.0], [0.0], [2.0], [-1.0], [0.5]], dtype=f64)
    new, batch = five_tokens(logp, reward)
    got = expected_gradient(objectives.loss(new, batch, STATS, cfg)[0][:, 0], INF, z)
    objective = (logp.exp() * reward[:, 0]).sum() - 0.3 * kl(logp, START)
    assert torch.allclose(got, -float(batch.z_ref[0]) * gradient_of(objective, z))


# -- Flags and the learner --------------------------------------------------------------------------------------------


def test_warm_up_as_a_share_of_the_steps():
    cfg = SimpleNamespace(warmup_steps=0.03, steps=150, lr_schedule="constant")  # 4.5 updates, so 5
    assert [schedule(step, cfg) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert schedule(0, replace(make_cfg(), warmup_steps=0.0)) == 1.0
    with pytest.raises(flags.UserError, match="--warmup_steps=2.5: must be whole, or a share"):
        make_cfg(warmup_steps=2.5)


def test_the_start_model_scores_and_stays_frozen():
    cfg = make_cfg(objective="tis", kl_coef=0.2, entropy_coef=0.01, micro_tokens=40, lr=1e-2, warmup_steps=0)
    learner, groups = make_learner(cfg), make_groups(2, seed=2)
    before = {name: p.detach().clone() for name, p in learner.models.named_parameters()}
    batch = batching.collate(groups, cfg)
    start_logp = learner.score(batch, Needs(start=True)).logp_start
    alone = Learner(tiny_model(3, dtype=f64), None, replace(cfg, kl_coef=0.0), Comm())
    assert torch.allclose(start_logp, alone.score(batch, Needs()).logp, atol=1e-12)
    before_logp = make_learner(replace(cfg, kl_coef=0.0)).score(batch, Needs()).logp
    logged = learner.backward(batch, objectives.prepare(batch, learner.comm, cfg, {}))
    learner.step(logged)
    assert logged["start_kl"] == pytest.approx(float((before_logp - start_logp)[batch.mask].mean()))
    for name, p in learner.models.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith("start."), name
    assert batch.logp_start is None  # one forward pass for both: no earlier scoring


def test_an_aligned_learner_has_an_aligned_start_model():
    """A policy equal to its start model has no drift."""
    cfg = make_cfg(kl_coef=0.1, rollout_quant="w4a16", learner_quant="aligned", quant_group=32)
    policy, start = tiny_model(0), tiny_model(0)
    stats = Learner(policy, None, cfg, Comm(), start=start).score(
        batching.collate(make_groups(), cfg), Needs(start=True)
    )
    assert torch.equal(stats.logp, stats.logp_start)
