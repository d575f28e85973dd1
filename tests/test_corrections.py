"""Corrections and rejections: values by hand, and formulas on plain tensors."""

import math
import re
import textwrap

import pytest
import torch
from conftest import LN, LOG_R, ROOT, STATS, f64, make_cfg, tiny

import corrections
from corrections import CORRECTIONS, apply_correction


def full(x):
    """A number, a row or a (2, 3) tensor as (2, 3) in float64."""
    return torch.as_tensor(x, dtype=f64).expand(2, 3)


def corrected(new, batch, **flags):
    """(weight, keep), both (2, 3), under the flags."""
    weight, keep, _ = apply_correction(new, batch, STATS, make_cfg(**{"objective": "none", **flags}))
    return full(weight), full(keep)


# -- By hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, flags, weight, keep",
    [
        ("none", {}, 1, 1),
        ("is", {}, [[2, 0.5, 1], [4, 4, 4]], 1),
        ("is", {"log_ratio_clamp": LN(3)}, [[2, 0.5, 1], [3, 3, 3]], 1),
        ("tis", {}, [[2, 0.5, 1], [2, 2, 2]], 1),
        ("tis", {"is_floor": 0.75}, [[2, 0.75, 1], [2, 2, 2]], 1),
        ("icepop", {"rs_low": 0.6, "rs_high": 3.0}, [[2, 0.5, 1], [4, 4, 4]], [[1, 0, 1], [0, 0, 0]]),
        ("areal_drop", {"is_cap": 1.5}, [[2, 0.5, 1], [4, 4, 4]], [[0, 1, 1], [0, 0, 0]]),
        ("seq_is", {}, [[1, 1, 1], [64, 64, 64]], 1),
        ("seq_is", {"log_ratio_clamp": LN(9)}, [[1, 1, 1], [9, 9, 9]], 1),
        ("seq_tis", {}, [[1, 1, 1], [4, 4, 4]], 1),
        ("prefix_tis", {}, 1, 1),
        ("prefix_tis", {"is_floor": 1.5, "is_cap": 20.0}, [[2, 1.5, 1.5], [4, 16, 20]], 1),
        ("retrace", {}, [[1, 0.5, 0.5], [1, 1, 1]], 1),
        ("retrace_seq", {}, [[1, 0.5, 0.5], [1, 1, 1]], 1),
        ("seq_mis", {}, [[1, 1, 1], [64, 64, 64]], [[1, 1, 1], [0, 0, 0]]),
        ("geo_rs", {}, 1, [[1, 1, 1], [0, 0, 0]]),
        ("geo_rs_seq_tis", {"rs_high": 5.0, "is_cap": 8.0, "is_floor": 2.0}, [[2] * 3, [8] * 3], 1),
        ("tbpo_mismatch", {"is_floor": 1.25}, [[1.25] * 3, [2, 2, 2]], 1),
        # R = 1: the kernel's 1; R = 64 with A < 0: 64^3 exp(2 (1 - 64))
        ("vespo", {}, [[1, 1, 1], [64**3 * math.exp(-126)] * 3], 1),
        ("is", {"reject": "token", "rs_low": 0.6, "rs_high": 3.0}, [[2, 0.5, 1], [4, 4, 4]], [[1, 0, 1], [0, 0, 0]]),
        ("none", {"reject": "sequence"}, 1, [[1, 1, 1], [0, 0, 0]]),
        ("none", {"reject": "geo", "rs_low": 2.0, "rs_high": 4.5}, 1, [[0, 0, 0], [1, 1, 1]]),
        # r - 1 - log r = 0.307, 0.193, 0 and 1.614 three times: sums 0.5 and 4.841
        ("none", {"reject": "token_k3", "rs_low": 0.1, "rs_high": 0.2}, 1, [[0, 1, 0], [0, 0, 0]]),
        ("none", {"reject": "seq_mean_k3", "rs_low": 0.17, "rs_high": 1.7}, 1, [[0, 0, 0], [1, 1, 1]]),
        # (log r)^2 / 2 = 0.240, 0.240, 0 and 0.961 three times: sums 0.480 and 2.883
        ("none", {"reject": "token_k2", "rs_low": 0.2, "rs_high": 0.25}, 1, [[1, 1, 0], [0, 0, 0]]),
        ("none", {"reject": "seq_sum_k2", "rs_low": 0.47, "rs_high": 0.49}, 1, [[1, 1, 1], [0, 0, 0]]),
        ("none", {"reject": "seq_max_k2", "rs_low": 0.23, "rs_high": 0.25}, 1, [[1, 1, 1], [0, 0, 0]]),
        ("none", {"reject": "seq_max", "rs_low": 2.5}, 1, [[0, 0, 0], [1, 1, 1]]),
        ("is", {"reject": "seq_min:0.4:inf"}, [[2, 0.5, 1], [4, 4, 4]], 1),
        ("icepop", {"rs_low": 0.1, "rs_high": 3.0, "reject": "seq_min:0.6:inf"}, [[2, 0.5, 1], [4, 4, 4]], 0),
        # r = 2, 1/2, 1 and 4, 4, 4: `token` drops the first and the last three, `sequence` (R = 1, 64) the second row
        ("none", {"reject": "token:0.4:1.5,sequence:0:2"}, 1, [[0, 1, 1], [0, 0, 0]]),
        ("none", {"reject": "token:0.4:5,sequence:2:100"}, 1, [[0, 0, 0], [1, 1, 1]]),
    ],
)
def test_corrections_by_hand(name, flags, weight, keep):
    got_weight, got_keep = corrected(*tiny(LOG_R), correction=name, **flags)
    assert torch.allclose(got_weight, full(weight))
    assert torch.equal(got_keep, full(keep))


def test_the_kl_of_trm_is_over_a_coarser_vocabulary():
    p = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=f64)
    q = torch.tensor([0.3, 0.3, 0.1, 0.05, 0.25], dtype=f64)
    support = torch.tensor([[[1, 0, 1, 2]]])  # column 0: the sampled token, again in column 2
    logp = p.log()[support].masked_fill(torch.tensor([False, False, True, False]), -math.inf)
    on = torch.tensor([[True]])
    coarse = sum(a * math.log(a / b) for a, b in [(0.5, 0.3), (0.2, 0.3), (0.15, 0.1), (0.15, 0.3)])
    assert corrections.seq_max_kl(on, logp, q.log()[support]).item() == pytest.approx(coarse)
    whole = corrections.seq_max_kl(on, p.log()[None, None], q.log()[None, None]).item()
    assert whole == pytest.approx(float((p * (p / q).log()).sum())) and coarse < whole


def test_m2po_by_hand():
    """Squares 0.01, 0.04, 0.09, 0.16: their means are 0.01, 0.025, 0.0467, 0.075; the smallest always stays."""
    squares = torch.tensor([0.16, 0.01, 0.09, 0.04])
    for bound, largest in ((1.0, 0.16), (0.075, 0.16), (0.074, 0.09), (0.03, 0.04), (0.024, 0.01), (0.001, 0.01)):
        assert corrections.largest_kept(squares, bound) == pytest.approx(largest)
    assert corrections.largest_kept(torch.zeros(0), 0.04) == math.inf


def test_the_correction_of_the_contributing_page(monkeypatch):
    """The function and the row of the page are enough for --correction."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    function, row = re.findall(r" *```python\n(.*?)```", page, re.DOTALL)[:2]
    names = dict(vars(corrections))
    exec(textwrap.dedent(function), names)
    monkeypatch.setattr(corrections, "CORRECTIONS", CORRECTIONS | eval(f"{{{row.strip()}}}", names))
    weight, keep = corrected(*tiny(LOG_R), correction="sqrt_tis", is_cap=1.8)
    assert torch.allclose(weight, full([[2**0.5, 0.5**0.5, 1], [1.8, 1.8, 1.8]]))
    assert torch.equal(keep, full(1))


# -- The formulas on plain tensors and numbers ------------------------------------------------------------------------

LOG_RATIOS = torch.tensor(LOG_R, dtype=f64)
MASK = torch.tensor([[True, False, True], [True, True, False]])  # R = 2 and 16, geometric means sqrt(2) and 4


@pytest.mark.parametrize(
    "got, weight, keep",
    [
        (corrections.vanilla_is(LOG_RATIOS), [[2, 0.5, 1], [4, 4, 4]], 1),
        (corrections.tis(LOG_RATIOS, 3.0, is_floor=0.7), [[2, 0.7, 1], [3, 3, 3]], 1),
        (corrections.icepop(LOG_RATIOS, 0.6, 3.0), [[2, 0.5, 1], [4, 4, 4]], [[1, 0, 1], [0, 0, 0]]),
        (corrections.areal_drop(LOG_RATIOS, 3.0), [[2, 0.5, 1], [4, 4, 4]], [[1, 1, 1], [0, 0, 0]]),
        (corrections.z_tis(LOG_RATIOS, 0.9, 1.5), [[1.5, 0.45, 0.9], [1.5] * 3], 1),
        (corrections.seq_is(LOG_RATIOS, MASK), [[2] * 3, [16] * 3], 1),
        (corrections.seq_tis(LOG_RATIOS, MASK, 5.0, is_floor=3.0), [[3] * 3, [5] * 3], 1),
        (corrections.prefix_tis(-LOG_RATIOS, MASK, 5.0, is_floor=0.1), [[0.5] * 3, [0.25, 0.1, 0.1]], 1),
        (corrections.retrace(LOG_RATIOS, ~MASK), [[1, 0.5, 0.5], [1] * 3], 1),
        (corrections.retrace_seq(-LOG_RATIOS, MASK), [[0.25] * 3, [1 / 64, 1 / 256, 1 / 256]], 1),
        (corrections.seq_mis(LOG_RATIOS, MASK, 3.0, 20.0), [[2] * 3, [16] * 3], [[0] * 3, [1] * 3]),
        # R = 2 and 16: 2^2 e^{3 (1 - 2)} for A >= 0, 16^3 e^{2 (1 - 16)} for A < 0
        (
            corrections.vespo(LOG_RATIOS, MASK, torch.tensor([[0.0], [-2.0]], dtype=f64)),
            [[4 * math.exp(-3)] * 3, [4096 * math.exp(-30)] * 3],
            1,
        ),
        (corrections.geo_rs(LOG_RATIOS, MASK, 1.0, 1.5), 1, [[1] * 3, [0] * 3]),
        (corrections.geo_rs_seq_tis(LOG_RATIOS, MASK, 5.0, 1.0, 4.5), [[2] * 3, [5] * 3], 1),
        (corrections.tbpo_mismatch(-LOG_RATIOS, MASK, 2.0, is_floor=0.6), [[math.sqrt(0.5)] * 3, [0.6] * 3], 1),
    ],
)
def test_formulas_on_plain_tensors(got, weight, keep):
    assert torch.allclose(full(got[0]), full(weight))
    assert torch.equal(full(got[1]), full(keep))


def test_bounds_are_inclusive():
    assert corrections.inside(torch.tensor([0.9, 1.0, 2.0, 3.0, 3.1]), 1.0, 3.0).tolist() == [0, 1, 1, 1, 0]
    _, keep = corrections.areal_drop(torch.zeros(1, 1), 1.0)
    assert keep.tolist() == [[1.0]]


def test_k3_near_zero_is_accurate_in_float32():
    """exp(x) - 1 - x = x^2 / 2 + x^3 / 6 + ...; evaluated directly in float32 it would have no correct digit."""
    x = torch.linspace(-1e-3, 1e-3, 20_001)
    got, exact = corrections.token_k3(x), x.double()
    want = exact**2 / 2 + exact**3 / 6 + exact**4 / 24
    assert got.dtype == torch.float32 and float(got.min()) >= 0
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=0)


# objective, ESS, share at the clamp, share of rejected tokens, responses of an update
DEAD = [("seq_tis", 0.06, 0.0), ("seq_tis", 1.0, 0.9), ("retrace_seq", 0.06, 0.0)]
DEAD += [("seq_tis", 1 / 16, 0.0, 0.0, 16)]  # all weight on one of 16 responses
DEAD += [("trm", 0.3, 0.0, 1.0), ("icepop", 0.3, 0.0, 0.91)]
ALIVE = [("seq_tis", 0.3, 0.0), ("seq_tis", 0.13, 0.0, 0.0, 16), ("tis", 0.06, 0.0), ("jackpot", 0.06, 0.0)]
ALIVE += [("trm", 0.3, 0.0, 0.9), ("jackpot", 0.06, 0.0, 0.5)]


@pytest.mark.parametrize("case", DEAD + ALIVE)
def test_the_warning_of_dead_weights_names_an_alternative(case):
    name, ess, clamped, rejected, n = case + (0.0, 256)[len(case) - 3 :]
    logged = {"rollout_corr/seq_eff_sample_size": ess, "rollout_corr/seq_clamped_fraction": clamped}
    logged |= {"rollout_corr/kl": 0.25, "response_length": 160.0}
    logged |= {"rollout_corr/rollout_rs_masked_fraction": rejected}
    cfg = make_cfg(objective=name, train_batch=n, rollout_batch=256)
    assert ("--objective=tis" in corrections.dead_weights(cfg, logged)) == (case in DEAD)
