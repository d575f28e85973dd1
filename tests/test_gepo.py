"""Group expectations and the KL estimators of CPPO: by hand, at their limits, by enumeration."""

import math

import pytest
import torch
from conftest import f64

import corrections


def t(*x):
    """A vector in float64."""
    return torch.tensor(x, dtype=f64)


def test_expectations_by_hand():
    logq, group = t(0.5, 0.25, 0.1, 0.4, 0.4).log(), torch.tensor([0, 0, 1, 1, 1])
    # (1/4 + 1/16) / (3/4) and 0.33 / 0.9
    want = t(5 / 12, 5 / 12, 0.33 / 0.9, 0.33 / 0.9, 0.33 / 0.9)
    assert torch.allclose(corrections.group_expectation(logq, group, 0.0)[0].exp(), want)
    # population variances 1/64 and 0.02
    e = corrections.group_expectation(logq, group, 4.0)[1]
    assert torch.allclose(e, t(4 / 64, 4 / 64, 0.08, 0.08, 0.08))
    assert torch.equal(corrections.group_expectation(logq, group, 1e6)[1], torch.full((5,), 0.99, dtype=f64))
    assert float(corrections.group_expectation(logq, group, 0.0)[1].max()) == 0


def test_the_expectation_of_one_or_equal_responses_is_q():
    logq, same = t(-3.0, -0.5, -900.0), t(-2.0, -2.0, -2.0)
    assert torch.allclose(corrections.group_expectation(logq, torch.arange(3), 0.0)[0], logq, atol=1e-12)
    assert torch.allclose(corrections.group_expectation(same, torch.zeros(3), 0.0)[0], same, atol=1e-12)


def test_the_expectation_of_cppos_kl():
    """Exact expectations under q over three tokens: the released code's version is not a KL."""
    p, q = t(0.5, 0.3, 0.2), t(0.2, 0.2, 0.6)
    official = float((q * corrections.cppo_kl(p.log(), q.log(), "official", 20.0)).sum())
    kl, chi2 = float((q * (q / p).log()).sum()), float((q * q / p).sum() - 1)
    assert official == pytest.approx(chi2 - kl, abs=1e-12)
    assert abs(chi2 - 2 * kl) > 0.1
    assert float(corrections.cppo_kl(t(-500.0), t(0.0), "official", 20.0)) == pytest.approx(math.exp(20) - 21)
    k2 = [math.log(0.5 / 0.2) ** 2 / 2, math.log(0.3 / 0.2) ** 2 / 2, math.log(0.2 / 0.6) ** 2 / 2]
    assert corrections.cppo_kl(p.log(), q.log(), "k2", 20.0).tolist() == pytest.approx(k2)
