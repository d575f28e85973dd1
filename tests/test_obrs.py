"""OBRS on vocabularies small enough to enumerate: estimators and bounds by exact sums."""

import math

import pytest
import torch
from conftest import f64

import obrs

P = torch.tensor([0.50, 0.20, 0.15, 0.10, 0.05], dtype=f64)  # target
Q = torch.tensor([0.20, 0.40, 0.10, 0.10, 0.20], dtype=f64)  # proposal


def accepted(p, q, lam):
    """(distribution of the accepted tokens, Z)."""
    m = torch.minimum(q, p / lam)
    return m / m.sum(), float(m.sum())


def test_hand_worked_numbers():
    # lambda 1: a = min(1, p/q) = 1, 1/2, 1, 1, 1/4; Z = .2 + .2 + .1 + .1 + .05 = 0.65 = 1 - TV = 1 - 0.35
    a = obrs.acceptance(P.log(), Q.log(), 1.0)
    assert torch.allclose(a, torch.tensor([1.0, 0.5, 1.0, 1.0, 0.25], dtype=f64))
    assert math.isclose(float((Q * a).sum()), 0.65)
    assert math.isclose(1 - 0.5 * float((P - Q).abs().sum()), 0.65)
    # w = Z max(1, p/q) = .65 * (2.5, 1, 1.5, 1, 1)
    w = obrs.weight(torch.tensor(0.65, dtype=f64), P.log(), Q.log(), 1.0)
    assert torch.allclose(w, torch.tensor([1.625, 0.65, 0.975, 0.65, 0.65], dtype=f64))
    # lambda 2: a = min(1, p/(2q)) = 1, 1/4, 3/4, 1/2, 1/8; Z = .2 + .1 + .075 + .05 + .025 = 0.45
    a = obrs.acceptance(P.log(), Q.log(), 2.0)
    assert torch.allclose(a, torch.tensor([1.0, 0.25, 0.75, 0.5, 0.125], dtype=f64))
    w = obrs.weight(torch.tensor(0.45, dtype=f64), P.log(), Q.log(), 2.0)
    assert torch.allclose(w, 0.45 * torch.tensor([2.5, 2, 2, 2, 2], dtype=f64))


@pytest.mark.parametrize("lam", [0.3, 1.0, 1.7, 4.0])
def test_weight_is_target_over_accepted_distribution_and_mean_is_z_times_tis(lam):
    distribution, z = accepted(P, Q, lam)
    w = obrs.weight(torch.tensor(z, dtype=f64), P.log(), Q.log(), lam)
    assert torch.allclose(w, P / distribution)  # Alg. 1, line 23 = p_tgt / p'_inf
    a = obrs.acceptance(P.log(), Q.log(), lam)
    assert torch.allclose(a * w, z * P / Q)  # a w = Z p/q in both branches
    for c1 in (lam * z, 1.1 * lam * z, 3.0, 100.0):
        if c1 >= lam * z:  # E[Mask] min(w, c1) = Z min(p/q, c1/Z)
            want = z * torch.minimum(P / Q, torch.tensor(c1 / z, dtype=f64))
            assert torch.allclose(a * w.clamp_max(c1), want)


def test_budget_over_tokens_is_exact():
    # r = 1/2, 1, 2, 4, rate 3/4: two below lambda gives (1.5 / lam + 2) / 4 = 3/4 -> lam = 1.5, in (1, 2]
    assert obrs.solve_lambda(torch.tensor([4.0, 0.5, 2.0, 1.0]), 0.75) == pytest.approx(1.5)
    r = torch.exp(torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=f64))
    for rate in (0.05, 0.5, 0.9, 0.95, 0.999):
        lam = obrs.solve_lambda(r, rate)
        assert float((r / lam).clamp_max(1).mean()) == pytest.approx(rate, abs=1e-12)
    assert obrs.solve_lambda(r, 1.0) == pytest.approx(float(r.min()))
    assert obrs.solve_lambda(torch.ones(10), 0.5) == pytest.approx(2.0)  # all equal: r / lambda = rate


@pytest.mark.parametrize("lam", [0.8, 1.2])
def test_both_masks_are_unbiased_for_z_times_target_and_expected_has_less_variance(lam):
    z = accepted(P, Q, lam)[1]
    f = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=f64)  # any function of the token
    want = z * float((P * f).sum())
    w, a, _ = obrs.correction(P.log(), Q.log(), None, z, None, lam=lam, obrs_c1=100.0, obrs_mask="expected")
    assert float((Q * a * w * f).sum()) == pytest.approx(want, rel=1e-12)
    # Bernoulli: integrate over u exactly, from draws on a fine grid of midpoints
    u = ((torch.arange(20000, dtype=f64) + 0.5) / 20000)[:, None].expand(-1, 5)
    w, keep, _ = obrs.correction(P.log(), Q.log(), None, z, u, lam=lam, obrs_c1=100.0)
    x = keep * w * f
    assert float((Q * x.mean(0)).sum()) == pytest.approx(want, rel=1e-3)
    # law of total variance: the gap is E[Var(Mask)] w^2 f^2 = sum q a (1 - a) w^2 f^2
    gap = float((Q * a * (1 - a) * (w * f) ** 2).sum())
    assert gap > 0.01
    assert float((Q * ((x**2).mean(0) - (a * w * f) ** 2)).sum()) == pytest.approx(gap, rel=1e-2)


def random_distributions(n, vocab, seed, spread=1.5):
    """(log p, log q), each (n, vocab)."""
    g = torch.Generator().manual_seed(seed)
    lp = torch.randn(n, vocab, generator=g, dtype=f64) * 2
    lq = lp + torch.randn(n, vocab, generator=g, dtype=f64) * spread
    return lp.log_softmax(-1), lq.log_softmax(-1)


@pytest.mark.parametrize("lam", [0.7, 1.5])
@pytest.mark.parametrize("K", [1, 10, 50])
def test_bracket_contains_z(lam, K):
    lp, lq = random_distributions(300, 50, K)
    z = torch.minimum(lq.exp(), lp.exp() / lam).sum(-1)
    top, ids = lq.topk(K, -1)
    sampled = torch.distributions.Categorical(logits=lq).sample()
    dup = (ids == sampled[:, None]).any(-1)
    support_ids = torch.cat([sampled[:, None], ids], 1)
    s_inf = torch.cat([lq.gather(1, sampled[:, None]).masked_fill(dup[:, None], -torch.inf), top], 1)
    s_tgt = lp.gather(1, support_ids)
    outside = torch.ones_like(lq, dtype=torch.bool).scatter_(1, support_ids, False)
    tail = (torch.minimum(lp.exp() / lam, top[:, -1:].exp()) * outside).sum(-1)
    low, high = obrs.z_bracket(s_inf, s_tgt, lam, tail)
    wide_low, wide_high = obrs.z_bracket(s_inf, s_tgt, lam)
    assert (low <= z + 1e-12).all() and (z <= high + 1e-12).all()
    assert torch.equal(low, wide_low) and (high <= wide_high + 1e-15).all()
    if K == 50:
        assert torch.allclose(low, z) and torch.allclose(high, z, atol=1e-9)
    else:
        assert (high < wide_high - 1e-6).any()  # the second term tightens the bound
    # a token counted twice would break the lower bound
    twice = torch.cat([lq.gather(1, sampled[:, None]), top], 1)
    if K >= 10:
        assert (obrs.z_bracket(twice, s_tgt, lam)[0] > z + 1e-9).any()


def test_token_z_modes():
    lp, lq = random_distributions(4, 6, 0)
    support = lq[None, :, :2]
    exact = torch.full((1, 4), 0.4, dtype=f64)
    target = lp[None, :, :2]
    z_low, z_high = obrs.z_bracket(support, target, 1.0)
    for kappa, method, want in (
        (0.5, "bracket", z_low),
        (100.0, "bracket", z_high),
        (0.5, "approx", 0.5 * z_low),
        (100.0, "approx", 100 * z_low),
    ):
        got = obrs.token_z(support, target, None, exact, 1.0, kappa, method)
        bounds = {"z_approx": z_low} if method == "approx" else {"z_low": z_low, "z_high": z_high}
        assert got.keys() == {"z", *bounds}
        assert all(torch.equal(got[name], x) for name, x in {"z": want, **bounds}.items())
    assert obrs.token_z(support, target, None, exact, 1.0, 100.0, "exact") == {"z": exact}


def test_kappa():
    assert obrs.kappa_from(0.9, 0.8) == pytest.approx(1.125)
    assert obrs.kappa_from(0.0, 0.8) == 0.0
    assert obrs.kappa_from(0.0, 0.0) == 1.0
