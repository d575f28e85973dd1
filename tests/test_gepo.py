"""Group expectation weights: by hand, at their limits, and Theorem 1 on distributions that can be enumerated or
integrated."""

import math

import pytest
import torch
from conftest import One, TinyBatch, f64, make_cfg

import corrections
import objectives
from model import TokenStats


def t(*x):
    """A vector in float64."""
    return torch.tensor(x, dtype=f64)


def group_mean(logq, group, method="weighted"):
    """E of each response's group."""
    return corrections.log_group_mean(logq, group, method).exp()


def test_expectations_by_hand():
    logq, group = t(0.5, 0.25, 0.1, 0.4, 0.4).log(), torch.tensor([0, 0, 1, 1, 1])
    # (1/4 + 1/16) / (3/4) and 0.33 / 0.9
    want = t(5 / 12, 5 / 12, 0.33 / 0.9, 0.33 / 0.9, 0.33 / 0.9)
    assert torch.allclose(group_mean(logq, group), want)
    assert torch.allclose(group_mean(logq, group, "mean"), t(0.375, 0.375, 0.3, 0.3, 0.3))
    # population variances 1/64 and 0.02
    e = corrections.group_mixing(logq, group, 4.0)
    assert torch.allclose(e, t(4 / 64, 4 / 64, 0.08, 0.08, 0.08))
    assert torch.equal(corrections.group_mixing(logq, group, 1e6), torch.full((5,), 0.99, dtype=f64))
    assert float(corrections.group_mixing(logq, group, 0.0).max()) == 0


@pytest.mark.parametrize("method", ["weighted", "mean"])
def test_the_expectation_of_one_or_equal_responses_is_q(method):
    logq, same = t(-3.0, -0.5, -900.0), t(-2.0, -2.0, -2.0)
    assert torch.allclose(corrections.log_group_mean(logq, torch.arange(3), method), logq, atol=1e-12)
    assert torch.allclose(corrections.log_group_mean(same, torch.zeros(3), method), same, atol=1e-12)


def test_extremes_stay_finite():
    far = corrections.log_group_mean(t(-1000.0, -2000.0, -1000.0), torch.zeros(3))
    assert torch.allclose(far, t(-1000.0, -1000.0, -1000.0))  # exp(-1000) is 0 in float64
    assert far.isfinite().all()


def test_weighted_is_biased_and_mean_is_not():
    """Eq. 11 converges to E_q[q^2] / E_q[q] for large groups; the mean is unbiased at any size."""
    q = t(0.6, 0.3, 0.1)
    generator = torch.Generator().manual_seed(0)
    draws = torch.multinomial(q, 40_000, replacement=True, generator=generator)
    large = group_mean(q[draws[:4000]].log(), torch.zeros(4000))[0]
    assert float(large) == pytest.approx(float((q**3).sum() / (q**2).sum()), rel=0.02)
    # every group of two, with its probability
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    chance = q[pairs].prod(1)
    same = torch.zeros(2)
    expectation = float((q * q).sum())
    mean = torch.stack([group_mean(q[pair].log(), same, "mean")[0] for pair in pairs])
    assert float((chance * mean).sum()) == pytest.approx(expectation, abs=1e-12)
    weighted = torch.stack([group_mean(q[pair].log(), same)[0] for pair in pairs])
    assert abs(float((chance * weighted).sum()) - expectation) > 0.01


MOVED = [[0.1, 0.3], [0.0, -0.2], [0.05, 0.0], [0.1, 0.0]]


def two_groups(moved):
    """(policy now, batch) of four responses in two groups, of two tokens and of one.

    moved: log p_new - log p_inf, per token; log p_ref is log p_inf."""
    inf = torch.tensor([[-1.0, -3.0], [-2.0, -2.0], [-1.0, 0.0], [-4.0, 0.0]], dtype=f64)
    batch = TinyBatch(
        logp_ref=inf.clone(),
        logp_inf=inf,
        mask=torch.tensor([[True, True], [True, True], [True, False], [True, False]]),
        adv=t(1.0, -1.0, 0.5, -0.5)[:, None],
        group=torch.tensor([0, 0, 1, 1]),
    )
    return TokenStats((inf + torch.tensor(moved, dtype=f64)).requires_grad_()), batch


def rows_from(batch, first):
    """The batch from row `first`, without its groups."""
    columns = {name: getattr(batch, name)[first:] for name in ("logp_ref", "logp_inf", "mask", "adv")}
    return TinyBatch(**columns)


def of_groups(f, q):
    """f of each pair of responses, repeated for both: (4,)."""
    return torch.stack([f(q[:2]), f(q[:2]), f(q[2:]), f(q[2:])])


@pytest.mark.parametrize("c", [0.0, 4.0])
def test_loss_and_gradient_equal_the_papers(c):
    cfg = make_cfg(objective="gepo", gepo_defence=c)
    new, b = two_groups(MOVED)
    stats = objectives.prepare(b, One, cfg, {})
    value, logs = objectives.loss(new, b, stats, cfg)
    total = objectives.reduce(value, b.mask, stats, cfg)
    total.backward()
    q = t(math.exp(-2), math.exp(-2), math.exp(-1), math.exp(-4))  # length-normalised, by hand
    p = t(math.exp(-1.8), math.exp(-2.1), math.exp(-0.95), math.exp(-3.9)).requires_grad_()
    E = of_groups(lambda x: (x * x).sum() / x.sum(), q)
    e = of_groups(lambda x: (c * ((x - x.mean()) ** 2).mean()).clamp(0, 0.99), q)
    w, adv = p / (e * p.detach() + (1 - e) * E), b.adv[:, 0]
    want = -torch.minimum(w * adv, w.clamp(0.8, 1.2) * adv).mean()
    assert float(total.detach()) == pytest.approx(float(want.detach()), rel=1e-12)
    grad = torch.autograd.grad(want, p)[0] * p.detach() / b.mask.sum(1)  # d p / d log p_t = p / T
    assert torch.allclose(new.logp.grad, grad[:, None] * b.mask, atol=1e-12)
    assert torch.allclose(logs["weight"][:, 0], w.detach(), atol=1e-12)  # logged as the weight
    assert float(w.detach()[3]) < 0.3  # the group's mean, not the response's q
    assert c == 0 or float(e[2]) > 0.1
    # a micro-batch keeps its groups' numbers
    for first, rows in ((2, [2, 3]), (3, [3])):  # and half a group
        part = TokenStats(new.logp.detach()[first:])
        again, _ = objectives.loss(part, rows_from(b, first), stats.select(rows), cfg)
        assert torch.allclose(again, value.detach()[first:])


def test_expectations_of_the_cppo_kl_estimators():
    """Exact expectations under q over three tokens: the released code's version is not a KL."""
    p, q = t(0.5, 0.3, 0.2), t(0.2, 0.2, 0.6)
    k3 = float((q * corrections.cppo_kl(p.log(), q.log(), "k3", 20.0)).sum())
    official = float((q * corrections.cppo_kl(p.log(), q.log(), "official", 20.0)).sum())
    kl, chi2 = float((q * (q / p).log()).sum()), float((q * q / p).sum() - 1)
    assert k3 == pytest.approx(kl, abs=1e-12)
    assert official == pytest.approx(chi2 - kl, abs=1e-12)
    assert abs(chi2 - 2 * kl) > 0.1
    assert float(corrections.cppo_kl(t(-500.0), t(0.0), "official", 20.0)) == pytest.approx(math.exp(20) - 21)
    k2 = [math.log(0.5 / 0.2) ** 2 / 2, math.log(0.3 / 0.2) ** 2 / 2, math.log(0.2 / 0.6) ** 2 / 2]
    assert corrections.cppo_kl(p.log(), q.log(), "k2", 20.0).tolist() == pytest.approx(k2)
