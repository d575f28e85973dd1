"""OBRS on vocabularies small enough to enumerate: the theorems, the estimators, the bounds, by exact sums."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import make_cfg

import obrs
from results import figure2ab

P = torch.tensor([0.50, 0.20, 0.15, 0.10, 0.05], dtype=torch.float64)  # target
Q = torch.tensor([0.20, 0.40, 0.10, 0.10, 0.20], dtype=torch.float64)  # proposal


def kl(p, q):
    return float((p * (p / q).log()).sum())


def kept(p, q, lam):
    m = torch.minimum(q, p / lam)
    return m / m.sum(), float(m.sum())


def test_hand_worked_numbers():
    # lambda 1: a = min(1, p/q) = 1, 1/2, 1, 1, 1/4; Z = .2 + .2 + .1 + .1 + .05 = 0.65 = 1 - TV = 1 - 0.35
    a = obrs.acceptance(P.log(), Q.log(), 1.0)
    assert torch.allclose(a, torch.tensor([1.0, 0.5, 1.0, 1.0, 0.25], dtype=torch.float64))
    assert math.isclose(float((Q * a).sum()), 0.65)
    assert math.isclose(1 - 0.5 * float((P - Q).abs().sum()), 0.65)
    # w = Z max(1, p/q) = .65 * (2.5, 1, 1.5, 1, 1)
    w = obrs.weight(torch.tensor(0.65, dtype=torch.float64), P.log(), Q.log(), 1.0)
    assert torch.allclose(w, torch.tensor([1.625, 0.65, 0.975, 0.65, 0.65], dtype=torch.float64))
    # lambda 2: a = min(1, p/(2q)) = 1, 1/4, 3/4, 1/2, 1/8; Z = .2 + .1 + .075 + .05 + .025 = 0.45
    a = obrs.acceptance(P.log(), Q.log(), 2.0)
    assert torch.allclose(a, torch.tensor([1.0, 0.25, 0.75, 0.5, 0.125], dtype=torch.float64))
    w = obrs.weight(torch.tensor(0.45, dtype=torch.float64), P.log(), Q.log(), 2.0)
    assert torch.allclose(w, 0.45 * torch.tensor([2.5, 2, 2, 2, 2], dtype=torch.float64))


@pytest.mark.parametrize("lam", [0.3, 0.8, 1.0, 1.7, 2.5, 4.0])
def test_weight_is_target_over_accepted_law_and_mean_is_z_times_tis(lam):
    law, z = kept(P, Q, lam)
    w = obrs.weight(torch.tensor(z, dtype=torch.float64), P.log(), Q.log(), lam)
    assert torch.allclose(w, P / law)  # Alg. 1, line 23 = p_tgt / p'_inf
    a = obrs.acceptance(P.log(), Q.log(), lam)
    assert torch.allclose(a * w, z * P / Q)  # a w = Z p/q in both branches
    for c1 in (lam * z, 1.1 * lam * z, 3.0, 100.0):
        if c1 >= lam * z:  # E[Mask] min(w, c1) = Z min(p/q, c1/Z)
            assert torch.allclose(
                a * w.clamp_max(c1), z * torch.minimum(P / Q, torch.tensor(c1 / z, dtype=torch.float64))
            )


def test_theorem_3_3_and_proposition_9_2():
    """KL(p || kept) is never above KL(p || q), does not rise with lambda, and is flat outside min p/q < lambda < max p/q."""
    r = P / Q
    low, high = float(r.min()), float(r.max())
    grid = [low * 0.5, low, low * 1.2, 0.6, 1.0, 1.5, 2.0, high * 0.999, high, high * 2]
    values = [kl(P, kept(P, Q, lam)[0]) for lam in grid]
    assert all(v <= kl(P, Q) + 1e-12 for v in values)
    assert all(b <= a + 1e-12 for a, b in zip(values, values[1:]))
    assert math.isclose(values[0], kl(P, Q)) and math.isclose(
        values[1], kl(P, Q)
    )  # nothing rejected: unchanged, and not zero
    inside = [v for lam, v in zip(grid, values) if low < lam < high]
    assert all(b < a - 1e-6 for a, b in zip(inside, inside[1:]))  # strict inside
    assert abs(values[-1]) < 1e-12 and abs(values[-2]) < 1e-12  # lambda >= max p/q: exact rejection sampling


def test_theorem_3_4_unique_lambda_and_optimality():
    for rate in (0.1, 0.3, 0.65, 0.9, 0.99):
        lam = obrs.solve_lambda_context(P, Q, rate)
        law, z = kept(P, Q, lam)
        assert math.isclose(z, rate, rel_tol=1e-12)
        for other in (lam * 0.99, lam * 1.01):  # acceptance is strictly monotone here: unique
            assert abs(kept(P, Q, other)[1] - rate) > 1e-5
        generator = torch.Generator().manual_seed(0)
        for _ in range(200):  # no other rule of the same budget comes closer
            a = torch.rand(5, generator=generator, dtype=torch.float64)
            a = a * rate / float((Q * a).sum())
            if a.max() <= 1:
                assert kl(P, Q * a / rate) >= kl(P, law) - 1e-12
    assert math.isclose(obrs.solve_lambda_context(P, Q, 1.0), float((P / Q).min()))


def test_context_budget_beyond_reach_is_refused():
    p = torch.tensor([0.5, 0.5, 0.0])
    q = torch.tensor([0.25, 0.25, 0.5])
    assert kept(p.double(), q.double(), obrs.solve_lambda_context(p, q, 0.3))[1] == pytest.approx(0.3)
    with pytest.raises(ValueError, match="cannot be reached: p_inf has only 0.5"):
        obrs.solve_lambda_context(p, q, 0.6)
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        obrs.solve_lambda_context(p, q, 0.0)


def test_budget_over_tokens_is_exact():
    # r = 1/2, 1, 2, 4, rate 3/4: two below lambda gives (1.5 / lam + 2) / 4 = 3/4 -> lam = 1.5, which lies in (1, 2]
    assert obrs.solve_lambda(torch.tensor([4.0, 0.5, 2.0, 1.0]), 0.75) == pytest.approx(1.5)
    r = torch.exp(torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    for rate in (0.05, 0.5, 0.9, 0.95, 0.999):
        lam = obrs.solve_lambda(r, rate)
        assert float((r / lam).clamp_max(1).mean()) == pytest.approx(rate, abs=1e-12)
    assert obrs.solve_lambda(r, 1.0) == pytest.approx(float(r.min()))
    assert obrs.solve_lambda(torch.ones(10), 0.5) == pytest.approx(2.0)  # all equal: r / lambda = rate


def enumerated(mask_mode, c1=100.0, lam=1.0, lp=None, lq=None, u=None, mode="both", target="ref"):
    """obrs.correction on a row of all five tokens, with S the whole vocabulary."""
    lp, lq = (P.log() if lp is None else lp), (Q.log() if lq is None else lq)
    cfg = make_cfg(
        objective="jackpot", obrs_mask=mask_mode, obrs_c1=c1, obrs_lambda=lam, obrs_mode=mode, obrs_target=target
    )
    batch = SimpleNamespace(
        logp_inf=lq[None],
        u=torch.full((1, 5), 0.5, dtype=torch.float64) if u is None else u,
        logp_ref=lp[None],
        support_logp=lq.expand(1, 5, 5),
    )
    stats = {"lam": lam, "kappa": 1.0}
    return obrs.correction(lp[None], (lp.expand(1, 5, 5), None, None), batch, stats, cfg)


@pytest.mark.parametrize("lam", [0.8, 1.0, 1.2])
def test_both_masks_are_unbiased_for_z_times_target_and_expected_has_less_variance(lam):
    z = kept(P, Q, lam)[1]
    f = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64)  # any function of the token
    want = z * float((P * f).sum())
    w, a, logs = enumerated("expected", lam=lam)
    mean_expected = float((Q * a * w * f).sum())
    second_expected = float((Q * (a * w * f) ** 2).sum())
    # Bernoulli: integrate over u exactly, from draws on a fine grid of midpoints
    n = 20000
    u = ((torch.arange(n, dtype=torch.float64) + 0.5) / n)[:, None].expand(n, 5)
    w_b, keep, _ = enumerated("bernoulli", lam=lam, u=u)
    x = keep * w_b * f
    mean_bernoulli, second_bernoulli = float((Q * x.mean(0)).sum()), float((Q * (x**2).mean(0)).sum())
    assert mean_expected == pytest.approx(want, rel=1e-12)
    assert mean_bernoulli == pytest.approx(want, rel=1e-3)
    # law of total variance: the gap is E[Var(Mask)] w^2 f^2 = sum q a (1 - a) w^2 f^2
    gap = float((Q * a[0] * (1 - a[0]) * (w[0] * f) ** 2).sum())
    assert gap > 0.01
    assert second_bernoulli - second_expected == pytest.approx(gap, rel=1e-2)
    assert logs["z"][0, 0] == pytest.approx(z)


def test_modes():
    w, keep, _ = enumerated("bernoulli", mode="mask")
    assert torch.equal(w, torch.ones_like(w)) and set(keep.unique().tolist()) == {0.0, 1.0}
    w, keep, logs = enumerated("bernoulli", mode="reweight")
    assert torch.equal(keep, torch.ones_like(keep)) and float(w[0, 0]) == pytest.approx(0.65 * 2.5)
    assert float((Q * w[0]).sum()) != pytest.approx(1.0, abs=0.05)  # biased: E_inf[w] is not 1
    w, _, _ = enumerated("bernoulli", c1=1.0)
    assert float(w.max()) == 1.0


def test_target_new_multiplies_by_ref_over_new_capped_by_c2():
    ref = torch.tensor([0.45, 0.15, 0.20, 0.15, 0.05], dtype=torch.float64)
    cfg = make_cfg(objective="jackpot", obrs_target="new", obrs_c1=100.0, obrs_c2=1.2, obrs_mask="expected")
    batch = SimpleNamespace(
        logp_inf=Q.log()[None], u=None, logp_ref=ref.log()[None], support_logp=Q.log().expand(1, 5, 5)
    )
    w, a, _ = obrs.correction(
        P.log()[None], (P.log().expand(1, 5, 5), None, None), batch, {"lam": 1.0, "kappa": 1.0}, cfg
    )
    plain = 0.65 * (P / Q).clamp_min(1.0)
    # p_ref / p_new = .9, .75, 4/3 -> 1.2, 1.5 -> 1.2, 1
    assert torch.allclose(w[0], plain * torch.tensor([0.9, 0.75, 1.2, 1.2, 1.0], dtype=torch.float64))


def random_laws(n, vocab, seed, spread=1.5):
    g = torch.Generator().manual_seed(seed)
    lp = torch.randn(n, vocab, generator=g, dtype=torch.float64) * 2
    lq = lp + torch.randn(n, vocab, generator=g, dtype=torch.float64) * spread
    return lp.log_softmax(-1), lq.log_softmax(-1)


@pytest.mark.parametrize("lam", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("K", [1, 3, 10, 50])
def test_bracket_contains_z(lam, K):
    lp, lq = random_laws(300, 50, K)
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
        assert (high < wide_high - 1e-6).any()  # the second term earns its place
    # a duplicate counted twice would break the lower bound somewhere
    twice = torch.cat([lq.gather(1, sampled[:, None]), top], 1)
    if K >= 10:
        assert (obrs.z_bracket(twice, s_tgt, lam)[0] > z + 1e-9).any()


def test_token_z_modes():
    lp, lq = random_laws(4, 6, 0)
    batch = SimpleNamespace(support_logp=lq[None, :, :2])
    z_low, z_high = obrs.z_bracket(batch.support_logp, lp[None, :, :2], 1.0)
    for kappa, mode, want in (
        (0.5, "bracket", z_low),
        (100.0, "bracket", z_high),
        (0.5, "approx", 0.5 * z_low),
        (100.0, "approx", 100 * z_low),
    ):
        got, low, high = obrs.token_z(
            (lp[None, :, :2], None, None), batch, {"lam": 1.0, "kappa": kappa}, make_cfg(obrs_z=mode)
        )
        assert torch.equal(got, want) and torch.equal(low, z_low) and torch.equal(high, z_high)


def test_kappa():
    # 90 of 100 proposed tokens accepted, Z_approx adds up to 80: kappa = 0.9 / 0.8
    assert obrs.kappa_from(90.0, 100.0, 80.0) == pytest.approx(1.125)
    assert obrs.kappa_from(0.0, 100.0, 80.0) == 0.0
    assert obrs.kappa_from(0.0, 100.0, 0.0) == 1.0 and obrs.kappa_from(0.0, 0.0, 0.0) == 1.0


@pytest.mark.parametrize("kind", figure2ab.NOISES)
def test_simulation_rows_agree_with_the_theory(kind):
    low, high = figure2ab.simulate(vocab=2000, lam=1.0, kind=kind, noises=[0.05, 0.5], pairs=4, seed=0)
    for _, before, after, z, *_ in (low, high):
        assert 0 < after < before and 0 < z < 1
    assert high[1] > 5 * low[1] and high[3] < low[3]  # more noise: more KL, less acceptance
    assert (low[1] / low[2] > 10) == (kind == "mixture")  # what rejection can mend, and what it cannot
    assert figure2ab.simulate(2000, 1.0, kind, [0.5], 2, 7) == figure2ab.simulate(2000, 1.0, kind, [0.5], 2, 7)


def test_log_ratios_are_clamped_to_twenty():
    far, zero = torch.tensor([[60.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    assert float(obrs.acceptance(-far, zero, 1.0)) == pytest.approx(math.exp(-20))
    assert float(obrs.weight(1.0, far, zero, 1.0)) == pytest.approx(math.exp(20))
    cfg = make_cfg(objective="jackpot", obrs_target="new", obrs_c1=1e30, obrs_c2=1e30, obrs_mask="expected")
    batch = SimpleNamespace(logp_inf=zero, u=None, logp_ref=far, support_logp=zero[..., None])
    w, _, _ = obrs.correction(zero, (zero[..., None], None, None), batch, {"lam": 1.0, "kappa": 1.0}, cfg)
    assert float(w) == pytest.approx(math.exp(20))
