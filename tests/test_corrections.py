"""Corrections and rejections: numbers worked out by hand, and every row against a loop over tokens in plain floats."""

import math
import random
import re
import textwrap
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import LN, LOG_R, ROOT, STATS, TinyBatch, f64, make_cfg, tiny

import corrections
import obrs
from corrections import CORRECTIONS, REJECTIONS, apply_correction
from model import TokenStats


def full(x):
    """A number, a row or all of it as (2, 3) in float64."""
    return torch.as_tensor(x, dtype=f64).expand(2, 3)


def corrected(new, batch, **flags):
    """(weight, keep), both (2, 3), as the flags say."""
    weight, keep, _ = apply_correction(new, batch, STATS, make_cfg(**{"objective": "none", **flags}))
    return full(weight), full(keep)


# ---------------------------------------------------------------------------------------------------------------------
# By hand
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, flags, weight, keep",
    [
        ("none", {}, [[1, 1, 1], [1, 1, 1]], 1),
        ("is", {}, [[2, 0.5, 1], [4, 4, 4]], 1),
        ("tis", {}, [[2, 0.5, 1], [2, 2, 2]], 1),
        ("tis", {"is_cap": 3.0}, [[2, 0.5, 1], [3, 3, 3]], 1),
        ("icepop", {"rs_low": 0.6, "rs_high": 3.0}, [[2, 0.5, 1], [4, 4, 4]], [[1, 0, 1], [0, 0, 0]]),
        ("areal_drop", {"is_cap": 1.5}, [[2, 0.5, 1], [4, 4, 4]], [[0, 1, 1], [0, 0, 0]]),
        ("seq_is", {}, [[1, 1, 1], [64, 64, 64]], 1),
        ("seq_tis", {}, [[1, 1, 1], [4, 4, 4]], 1),
        ("prefix_tis", {}, 1, 1),
        ("prefix_tis", {"is_cap": 20.0}, [[2, 1, 1], [4, 16, 20]], 1),
        ("prefix_tis", {"is_floor": 1.5, "is_cap": 5.0}, [[2, 1.5, 1.5], [4, 5, 5]], 1),
        ("retrace", {}, [[1, 0.5, 0.5], [1, 1, 1]], 1),
        ("retrace_seq", {}, [[1, 0.5, 0.5], [1, 1, 1]], 1),
        ("seq_mis", {}, [[1, 1, 1], [64, 64, 64]], [[1, 1, 1], [0, 0, 0]]),
        ("seq_mis", {"rs_low": 2.0, "rs_high": 100.0}, [[1, 1, 1], [64, 64, 64]], [[0, 0, 0], [1, 1, 1]]),
        ("geo_rs", {}, 1, [[1, 1, 1], [0, 0, 0]]),
        ("geo_rs", {"rs_low": 0.5, "rs_high": 5.0}, 1, 1),
        ("geo_rs_seq_tis", {"rs_low": 0.5, "rs_high": 5.0, "is_cap": 8.0}, [[1, 1, 1], [8, 8, 8]], 1),
        ("tbpo_mismatch", {}, [[1, 1, 1], [2, 2, 2]], 1),
        ("tis", {"is_floor": 0.75}, [[2, 0.75, 1], [2, 2, 2]], 1),
        ("seq_tis", {"is_floor": 1.5}, [[1.5] * 3, [4, 4, 4]], 1),
        ("geo_rs_seq_tis", {"is_floor": 2.0, "rs_high": 5.0}, [[2] * 3, [4] * 3], 1),
        ("tbpo_mismatch", {"is_floor": 1.25}, [[1.25] * 3, [2, 2, 2]], 1),
        ("is", {"reject": "token", "rs_low": 0.6, "rs_high": 3.0}, [[2, 0.5, 1], [4, 4, 4]], [[1, 0, 1], [0, 0, 0]]),
        ("tis", {"reject": "sequence"}, [[2, 0.5, 1], [2, 2, 2]], [[1, 1, 1], [0, 0, 0]]),
        ("tis", {"reject": "geo"}, [[2, 0.5, 1], [2, 2, 2]], [[1, 1, 1], [0, 0, 0]]),
        ("tis", {"reject": "geo", "rs_low": 2.0, "rs_high": 4.5}, [[2, 0.5, 1], [2, 2, 2]], [[0, 0, 0], [1, 1, 1]]),
        # r - 1 - log r = 0.307, 0.193, 0 and 1.614 three times
        ("is", {"reject": "token_k3"}, [[2, 0.5, 1], [4, 4, 4]], [[0, 0, 1], [0, 0, 0]]),
        ("is", {"reject": "token_k3", "rs_high": 0.2}, [[2, 0.5, 1], [4, 4, 4]], [[0, 1, 1], [0, 0, 0]]),
        ("none", {"reject": "token_k3", "rs_low": 0.1, "rs_high": 0.2}, 1, [[0, 1, 0], [0, 0, 0]]),
        # their means are 1/6 and 1.614
        ("is", {"reject": "seq_mean_k3"}, [[2, 0.5, 1], [4, 4, 4]], 0),
        ("is", {"reject": "seq_mean_k3", "rs_high": 0.17}, [[2, 0.5, 1], [4, 4, 4]], [[1, 1, 1], [0, 0, 0]]),
        ("none", {"reject": "seq_mean_k3", "rs_low": 0.17, "rs_high": 1.7}, 1, [[0, 0, 0], [1, 1, 1]]),
        # (log r)^2 / 2 = 0.240, 0.240, 0 and 0.961 three times
        ("is", {"reject": "token_k2"}, [[2, 0.5, 1], [4, 4, 4]], [[0, 0, 1], [0, 0, 0]]),
        ("none", {"reject": "token_k2", "rs_high": 0.25}, 1, [[1, 1, 1], [0, 0, 0]]),
        ("none", {"reject": "token_k2", "rs_low": 0.2, "rs_high": 1.0}, 1, [[1, 1, 0], [1, 1, 1]]),
        # sums 0.480 and 2.883, means 0.160 and 0.961, largest 0.240 and 0.961
        ("none", {"reject": "seq_sum_k2", "rs_high": 0.49}, 1, [[1, 1, 1], [0, 0, 0]]),
        ("none", {"reject": "seq_sum_k2", "rs_high": 0.47}, 1, 0),
        ("none", {"reject": "seq_mean_k2", "rs_high": 0.17}, 1, [[1, 1, 1], [0, 0, 0]]),
        ("none", {"reject": "seq_mean_k2", "rs_high": 0.15}, 1, 0),
        ("none", {"reject": "seq_max_k2", "rs_high": 0.25}, 1, [[1, 1, 1], [0, 0, 0]]),
        ("none", {"reject": "seq_max_k2", "rs_high": 0.23}, 1, 0),
        # k3: sums 0.5 and 4.841, largest 0.307 and 1.614
        ("none", {"reject": "seq_sum_k3", "rs_high": 0.51}, 1, [[1, 1, 1], [0, 0, 0]]),
        ("none", {"reject": "seq_sum_k3", "rs_high": 0.49}, 1, 0),
        ("none", {"reject": "seq_max_k3", "rs_high": 0.31}, 1, [[1, 1, 1], [0, 0, 0]]),
        ("none", {"reject": "seq_max_k3", "rs_high": 0.30}, 1, 0),
        ("none", {"reject": "seq_max", "rs_high": 3.0}, 1, [[1, 1, 1], [0, 0, 0]]),
        ("none", {"reject": "seq_max", "rs_low": 2.5}, 1, [[0, 0, 0], [1, 1, 1]]),
        # R = 1: the kernel's 1; R = 64 with A < 0: 64^3 exp(2 (1 - 64))
        ("vespo", {}, [[1, 1, 1], [64**3 * math.exp(-126)] * 3], 1),
        ("vespo", {"log_ratio_clamp": LN(2)}, [[1, 1, 1], [8 * math.exp(-2)] * 3], 1),
        ("none", {"reject": "seq_min", "rs_low": 0.6}, 1, [[0, 0, 0], [1, 1, 1]]),
        ("is", {"reject": "seq_min:0.4:inf"}, [[2, 0.5, 1], [4, 4, 4]], 1),
        ("icepop", {"rs_low": 0.1, "rs_high": 3.0, "reject": "seq_min:0.6:inf"}, [[2, 0.5, 1], [4, 4, 4]], 0),
        ("is", {"log_ratio_clamp": LN(3)}, [[2, 0.5, 1], [3, 3, 3]], 1),
        ("seq_is", {"log_ratio_clamp": LN(9)}, [[1, 1, 1], [9, 9, 9]], 1),
        ("geo_rs", {"log_ratio_clamp": LN(1.05), "rs_high": 1.1}, 1, 1),
    ],
)
def test_corrections_by_hand(name, flags, weight, keep):
    got_weight, got_keep = corrected(*tiny(LOG_R), correction=name, **flags)
    assert torch.allclose(got_weight, full(weight))
    assert torch.equal(got_keep, full(keep))


def test_two_sided_cap_and_sequence_means_ignore_padding():
    new, b = tiny([[-LN(4), -LN(4), 99.0], [LN(2), 0.0, 99.0]], mask=[[True, True, False]] * 2)
    weight, _ = corrected(new, b, correction="tbpo_mismatch")
    assert torch.allclose(weight[:, 0], torch.tensor([0.5, math.sqrt(2)], dtype=f64))  # 1/4 -> 1/2; sqrt(2 * 1) stays
    weight, _ = corrected(new, b, correction="seq_is")
    assert torch.allclose(weight[:, 0], torch.tensor([1 / 16, 2.0], dtype=f64))


@pytest.mark.parametrize("reject, low, high", [("token", 0.6, 3.0), ("geo", 1.5, math.inf), ("sequence", 0.0, 4.0)])
@pytest.mark.parametrize("adv", [(1.0, -1.0), (-1.0, 1.0), (0.0, 0.0), (-1.0, -2.0)])
def test_a_rejection_may_be_of_negative_advantages_alone(reject, low, high, adv):
    new, b = tiny(LOG_R)
    b = replace(b, adv=torch.tensor(adv, dtype=f64)[:, None])
    flags = dict(correction="is", reject=reject, rs_low=low, rs_high=high)
    weight, every = corrected(new, b, **flags)
    again, keep = corrected(new, b, **flags, reject_of="negative")
    assert torch.equal(weight, again) and 0 < every.sum() < every.numel()
    for i, a in enumerate(adv):
        assert keep[i].tolist() == (every[i].tolist() if a < 0 else [1.0] * 3)


def test_spare_by_hand():
    """prod min(r, 1) min(R, 1), without what is to be pushed down and has r < 0.9. r = 1, 0.85, 0.95 in both rows."""
    new, b = tiny([[0.0, LN(0.85), LN(0.95)]] * 2)
    weight, keep = corrected(new, replace(b, adv=torch.tensor([[0.5], [-0.5]])), objective="spare")
    assert torch.allclose(weight, torch.tensor([[1.0, 0.85, 0.8075]], dtype=f64) * 0.8075)
    assert keep.tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]]


def test_kpop_by_hand():
    """p = 0.6, q = 0.5: 0.6 ln 1.2 + 0.4 ln 0.8 = 0.02014 one way, 0.5 ln(5/6) + 0.5 ln(5/4) = 0.02041 the other way;
    with p = 0.5 and q = 0.6 the same, exchanged. A certain token has a finite KL."""
    logp_inf = torch.tensor([[0.5, 0.6, 1.0, 1.0]], dtype=f64).log()
    log_r = torch.tensor([[0.6, 0.5, 1.0, 0.5]], dtype=f64).log() - logp_inf
    for high, kept in ((0.0201, [0, 0, 1, 0]), (0.0203, [0, 0, 1, 0]), (0.0205, [1, 1, 1, 0]), (99.0, [1, 1, 1, 1])):
        weight, keep = corrections.kpop(log_r, logp_inf, rs_high=high)
        assert keep.tolist() == [kept]
    assert torch.allclose(weight, torch.tensor([[1.2, 0.5 / 0.6, 1.0, 0.5]], dtype=f64))


def test_the_smallest_ratio_does_not_look_behind_the_end():
    new, b = tiny([[0.0, 0.0, -30.0], [0.0, -30.0, 0.0]], mask=[[True, True, False], [True, True, True]])
    _, keep = corrected(new, b, objective="tis", reject="seq_min")
    assert keep.tolist() == [[1.0] * 3, [0.0] * 3]


def test_several_rejections_drop_what_any_of_them_drops():
    """r = 2, 1/2, 1 and 4, 4, 4: by tokens the first and the last three go, by responses (R = 1, 64) the second one."""
    new, b = tiny(LOG_R)
    _, keep = corrected(new, b, correction="is", reject="token:0.4:1.5,sequence:0:2")
    assert keep.tolist() == [[0, 1, 1], [0, 0, 0]]
    _, keep = corrected(new, b, correction="is", reject="token:0.4:5,sequence:2:100")
    assert keep.tolist() == [[0, 0, 0], [1, 1, 1]]  # the first drops nothing here


def test_what_is_known_within_the_update_alone():
    """Weights of p_new, whichever flag brings it in; those of p_ref are known before."""
    within = {
        "tis_adjusted": dict(objective="tis_adjusted"),
        "target new": dict(objective="tis", correction_target="new", ratio_base="new"),
        "between inf and new": dict(objective="tis", ref_from="loglinear"),
        "OBRS towards new": dict(objective="jackpot_adjusted"),
    }
    assert {name: corrections.sees_new(make_cfg(**flags)) for name, flags in within.items()} == dict.fromkeys(
        within, True
    )
    for flags in (dict(objective="tis"), dict(objective="jackpot"), dict(objective="jackpot_adjusted", kappa="exact")):
        assert not corrections.sees_new(make_cfg(**flags))


def test_log_ratios_are_clamped_after_the_sequence_sum():
    new, b = tiny([[30.0, -30.0, 1.0], [15.0, 15.0, 0.0]])
    weight, _ = corrected(new, b, correction="seq_is")
    assert torch.allclose(weight[:, 0], torch.tensor([math.e, math.exp(20)], dtype=f64))
    weight, _ = corrected(new, b, correction="is")
    assert torch.allclose(weight[0], torch.tensor([math.exp(20), math.exp(-20), math.e], dtype=f64))


def test_tis_adjusted_sees_new():
    new, b = tiny(LOG_R, new=[[-1 + LN(2), -1, -1], [-1, -1 - LN(8), -1]])
    weight, _, _ = apply_correction(new, b, STATS, make_cfg(objective="tis_adjusted"))
    # p_new / p_inf = 4, .5, 1; 4, .5, 4 capped at 2
    assert torch.allclose(weight, torch.tensor([[2, 0.5, 1], [2, 0.5, 2]], dtype=f64))
    assert not weight.requires_grad


@pytest.mark.parametrize("name", sorted(set(CORRECTIONS) - corrections.USES_Z - {"tis_adjusted"}))
def test_a_correction_to_new_is_the_same_of_p_new(name):
    """Weights and rejection with p_new above p_inf; no gradient comes through them."""
    moved = [[LN(0.3), LN(1.2), 0.1], [0.05, LN(2.5), -0.2]]
    new, b = tiny(LOG_R, new=moved)
    flags = dict(correction=name, surrogate="reinforce", rs_low=0.3, rs_high=1.7)
    flags |= {} if "rs_low" in CORRECTIONS[name].bounds else {"reject": "token"}
    got = corrected(new, b, **flags, correction_target="new")
    want = corrected(None, replace(b, logp_ref=new.logp.detach()), **flags)
    other = corrected(None, b, **flags)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert not torch.equal(got[0] * got[1], other[0] * other[1])
    assert not got[0].requires_grad and not got[1].requires_grad


def test_jackpot_adjusted_sees_new():
    """One token, a support of that token: Z_low = min(p_inf, p_new), kappa 1, room 1 - p_inf."""
    p_inf, p_new = torch.tensor([[0.5]], dtype=f64), torch.tensor([[0.8]], dtype=f64)
    b = TinyBatch(
        logp_ref=p_inf.log(),
        logp_inf=p_inf.log(),
        mask_uniforms=torch.tensor([[0.9]]),
        support_logp=p_inf.log()[..., None],
    )
    new = TokenStats(p_new.log(), support_logp=p_new.log()[..., None])
    weight, keep, _ = apply_correction(new, b, STATS, make_cfg(objective="jackpot_adjusted"))
    assert float(weight) == pytest.approx(0.5 * 1.6)  # no p_ref / p_new factor
    assert float(keep) == 1.0
    weight, _, _ = apply_correction(new, b, STATS, make_cfg(objective="jackpot", obrs_target="new"))
    assert float(weight) == pytest.approx(0.5 * 1.6 * 0.5 / 0.8)
    # a surrogate without p_new / p_ref leaves nothing to undo
    alone = make_cfg(objective="jackpot", obrs_target="new", surrogate="reinforce")
    weight, _, _ = apply_correction(new, b, STATS, alone)
    assert float(weight) == pytest.approx(0.5 * 1.6)


def test_the_correction_of_the_contributing_page(monkeypatch):
    """A function and a row, as the page writes them, are all that --correction needs."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = textwrap.dedent(re.search(r" *```python\n(.*?)```", page, re.DOTALL)[1])
    table = dict(CORRECTIONS)
    monkeypatch.setattr(corrections, "CORRECTIONS", table)
    exec(block, {**vars(corrections), "CORRECTIONS": table})
    weight, keep = corrected(*tiny(LOG_R), correction="sqrt_tis", is_cap=1.8)
    assert torch.allclose(weight, full([[2**0.5, 0.5**0.5, 1], [1.8, 1.8, 1.8]]))
    assert torch.equal(keep, full(1))


def test_z_tis_is_the_mean_of_obrs():
    """z_tis = E[Mask] min(w, c1) of OBRS for c1 >= lambda Z, token by token."""
    new, b = tiny([[LN(2), -LN(2), 0.3], [LN(8), -1.0, 0.1]])
    two = dict(actor="base:actor", obrs_z="auto")
    weight, keep = corrected(new, b, objective="z_tis", **two)
    obrs_weight, obrs_keep = corrected(new, b, objective="jackpot", obrs_mask="expected", **two)
    assert torch.allclose(weight * keep, obrs_weight * obrs_keep)
    assert torch.allclose(weight, torch.minimum(0.9 * b.log_r.exp(), torch.tensor(3.0, dtype=f64)))
    weight, _ = corrected(new, b, objective="z_tis", obrs_c1=1.5, **two)
    assert float(weight.max()) == 1.5


# ---------------------------------------------------------------------------------------------------------------------
# The formulas alone: tensors and numbers, no object of this repository
# ---------------------------------------------------------------------------------------------------------------------

LOG_RATIOS = torch.tensor(LOG_R, dtype=f64)
MASK = torch.tensor([[True, False, True], [True, True, False]])  # R = 2 and 16, geometric means sqrt(2) and 4


@pytest.mark.parametrize(
    "got, weight, keep",
    [
        (corrections.none(LOG_RATIOS), 1, 1),
        (corrections.vanilla_is(LOG_RATIOS), [[2, 0.5, 1], [4, 4, 4]], 1),
        (corrections.tis(LOG_RATIOS, 3.0), [[2, 0.5, 1], [3, 3, 3]], 1),
        (corrections.tis(LOG_RATIOS, 3.0, is_floor=0.7), [[2, 0.7, 1], [3, 3, 3]], 1),
        (corrections.icepop(LOG_RATIOS, 0.6, 3.0), [[2, 0.5, 1], [4, 4, 4]], [[1, 0, 1], [0, 0, 0]]),
        (corrections.areal_drop(LOG_RATIOS, 3.0), [[2, 0.5, 1], [4, 4, 4]], [[1, 1, 1], [0, 0, 0]]),
        (corrections.z_tis(LOG_RATIOS, 0.9, 1.5), [[1.5, 0.45, 0.9], [1.5] * 3], 1),
        (corrections.seq_is(LOG_RATIOS, MASK), [[2] * 3, [16] * 3], 1),
        (corrections.seq_tis(LOG_RATIOS, MASK, 5.0), [[2] * 3, [5] * 3], 1),
        (corrections.seq_tis(LOG_RATIOS, MASK, 5.0, is_floor=3.0), [[3] * 3, [5] * 3], 1),
        (corrections.prefix_tis(LOG_RATIOS, MASK, 5.0), [[2, 2, 2], [4, 5, 5]], 1),
        (corrections.prefix_tis(-LOG_RATIOS, MASK, 5.0, is_floor=0.1), [[0.5] * 3, [0.25, 0.1, 0.1]], 1),
        (corrections.retrace(-LOG_RATIOS, MASK), [[0.5] * 3, [1 / 4, 1 / 16, 1 / 16]], 1),
        (corrections.retrace(LOG_RATIOS, ~MASK), [[1, 0.5, 0.5], [1] * 3], 1),
        (corrections.retrace_seq(-LOG_RATIOS, MASK), [[0.25] * 3, [1 / 64, 1 / 256, 1 / 256]], 1),
        (corrections.retrace_seq(LOG_RATIOS, MASK), 1, 1),
        (corrections.seq_mis(LOG_RATIOS, MASK, 3.0, 20.0), [[2] * 3, [16] * 3], [[0] * 3, [1] * 3]),
        # R = 2 and 16: 2^2 e^{3 (1 - 2)} where A >= 0, 16^3 e^{2 (1 - 16)} where A < 0
        (
            corrections.vespo(LOG_RATIOS, MASK, torch.tensor([[0.0], [-2.0]], dtype=f64)),
            [[4 * math.exp(-3)] * 3, [4096 * math.exp(-30)] * 3],
            1,
        ),
        (corrections.geo_rs(LOG_RATIOS, MASK, 1.0, 1.5), 1, [[1] * 3, [0] * 3]),
        (corrections.geo_rs_seq_tis(LOG_RATIOS, MASK, 5.0, 1.0, 4.5), [[2] * 3, [5] * 3], 1),
        (corrections.tbpo_mismatch(LOG_RATIOS, MASK, 2.0), [[math.sqrt(2)] * 3, [2] * 3], 1),
        (corrections.tbpo_mismatch(-LOG_RATIOS, MASK, 2.0), [[math.sqrt(0.5)] * 3, [0.5] * 3], 1),
        (corrections.tbpo_mismatch(-LOG_RATIOS, MASK, 2.0, is_floor=0.6), [[math.sqrt(0.5)] * 3, [0.6] * 3], 1),
    ],
)
def test_formulas_on_plain_tensors(got, weight, keep):
    assert torch.allclose(full(got[0]), full(weight))
    assert torch.equal(full(got[1]), full(keep))


@pytest.mark.parametrize(
    "f, args",
    [
        (corrections.vanilla_is, ()),
        (corrections.tis, (1e9,)),
        (corrections.icepop, (0.0, 1e9)),
        (corrections.areal_drop, (1e9,)),
        (corrections.z_tis, (1.0, 1e9)),
        (corrections.seq_is, (MASK,)),
        (corrections.seq_tis, (MASK, 1e9)),
        (corrections.prefix_tis, (MASK, 1e9)),
        (corrections.seq_mis, (MASK, 0.0, 1e9)),
        (corrections.geo_rs_seq_tis, (MASK, 1e9, 0.0, 1e9)),
        (corrections.tbpo_mismatch, (MASK, 1e9)),
    ],
)
def test_the_clamp_reaches_every_formula(f, args):
    """Log-ratios of 8 a token: under a clamp of 1.5 every weight is exp(1.5), under the default of 20 none is."""
    far = torch.full((2, 3), 8.0, dtype=f64)
    tight, _ = f(far, *args, clamp=1.5)
    wide, _ = f(far, *args)
    assert torch.allclose(full(tight), full(math.exp(1.5)))
    assert float(wide.min()) > math.exp(7)


def test_bounds_are_inclusive():
    assert corrections.inside(torch.tensor([0.9, 1.0, 2.0, 3.0, 3.1]), 1.0, 3.0).tolist() == [0, 1, 1, 1, 0]
    _, keep = corrections.areal_drop(torch.zeros(1, 1), 1.0)
    assert keep.tolist() == [[1.0]]


def test_ratios_and_k3_by_hand():
    assert torch.allclose(corrections.token_ratio(LOG_RATIOS), full([[2, 0.5, 1], [4, 4, 4]]))
    assert torch.allclose(corrections.seq_ratio(LOG_RATIOS, MASK), torch.tensor([[2.0], [16.0]], dtype=f64))
    assert torch.allclose(corrections.geo_ratio(LOG_RATIOS, MASK), torch.tensor([[math.sqrt(2)], [4]], dtype=f64))
    k3 = [[1 - LN(2), LN(2) - 0.5, 0], [3 - LN(4)] * 3]
    assert torch.allclose(corrections.token_k3(LOG_RATIOS), full(k3))
    everywhere = torch.ones(2, 3, dtype=torch.bool)
    seq_mean_k3 = REJECTIONS["seq_mean_k3"].statistic
    mean = seq_mean_k3(LOG_RATIOS, everywhere, 20.0)
    assert torch.allclose(mean, torch.tensor([[1 / 6], [3 - LN(4)]], dtype=f64))
    # a hole and padding are ignored: the first response's mean is (1 - log 2 + 0) / 2
    mean = seq_mean_k3(LOG_RATIOS, MASK, 20.0)
    assert torch.allclose(mean, torch.tensor([[(1 - LN(2)) / 2], [3 - LN(4)]], dtype=f64))
    garbage = LOG_RATIOS.masked_fill(~MASK, 99.0)
    assert torch.equal(seq_mean_k3(garbage, MASK, 20.0), mean)
    assert torch.equal(corrections.seq_ratio(garbage, MASK), corrections.seq_ratio(LOG_RATIOS, MASK))
    empty = seq_mean_k3(LOG_RATIOS, ~everywhere, 20.0)
    assert empty.tolist() == [[0.0], [0.0]]


def test_k3_is_clamped_token_by_token():
    far = torch.tensor([[3.0, -3.0, 0.0]], dtype=f64)
    up, down = math.exp(2) - 3, math.exp(-2) + 1
    assert torch.allclose(corrections.token_k3(far, 2.0), torch.tensor([[up, down, 0]], dtype=f64))
    everywhere = torch.ones(1, 3, dtype=torch.bool)
    mean = REJECTIONS["seq_mean_k3"].statistic(far, everywhere, 2.0)
    assert float(mean) == pytest.approx((up + down) / 3)


@pytest.mark.parametrize("x", [1e-6, -1e-6, 3e-7, 1e-4, -1e-4, 1e-3, -1e-2])
def test_k3_near_zero_is_accurate_in_float32(x):
    """exp(x) - 1 - x = x^2 / 2 + x^3 / 6 + ..., of which exp(x) - 1 - x in float32 would leave nothing."""
    got = corrections.token_k3(torch.tensor([x]))
    x = float(torch.tensor([x]))
    want = x**2 / 2 + x**3 / 6 + x**4 / 24
    assert got.dtype == torch.float32
    assert float(got) == pytest.approx(want, rel=1e-3, abs=0)


def test_k3_is_never_negative():
    x = torch.linspace(-1e-3, 1e-3, 20_001)
    assert float(corrections.token_k3(x).min()) >= 0
    assert float(corrections.token_k3(torch.zeros(1))) == 0


@pytest.mark.parametrize("reject", ["token_k3", "seq_mean_k3"])
def test_a_rejection_by_k3_ignores_holes_and_padding(reject):
    """Two responses that differ under the mask alone are kept alike."""
    mask = [[True, False, True], [True, True, False]]
    kept = []
    for x in (0.0, 9.0):
        _, b = tiny([[0.1, x, -0.1], [0.2, 0.3, x]], mask=mask)
        _, keep = corrected(None, b, reject=reject, rs_high=0.035)
        kept.append(keep * b.mask)
    # k3 = 0.0052, 0.0048; 0.0214, 0.0499, mean 0.0356
    want = {"token_k3": [[1, 0, 1], [1, 0, 0]], "seq_mean_k3": [[1, 0, 1], [0, 0, 0]]}[reject]
    assert kept[0].tolist() == kept[1].tolist() == want


def test_obrs_on_plain_tensors():
    """p_tgt = .5, .2, .05 against p_inf = .2, .4, .2: p / q = 2.5, 1/2, 1/4; Z = .65."""
    tgt, inf = torch.tensor([0.5, 0.2, 0.05], dtype=f64).log(), torch.tensor([0.2, 0.4, 0.2], dtype=f64).log()
    u = torch.tensor([0.9, 0.4, 0.3], dtype=f64)
    weight, keep, accept = obrs.correction(tgt, inf, None, 0.65, u, c1=1.5)
    assert weight.tolist() == pytest.approx([1.5, 0.65, 0.65])  # .65 max(1, p / q), at most 1.5
    assert keep.tolist() == [1, 1, 0]  # a = 1, 1/2, 1/4
    assert accept.tolist() == [1, 1, 0]


def test_gepos_base_on_plain_tensors():
    """log (e p + (1 - e) E) with e = 1/4, p = 0.2, E = 0.6; with e = 0 it is log E."""
    p, E = torch.tensor([[LN(0.2)]], dtype=f64), torch.tensor([[LN(0.6)]], dtype=f64)
    assert float(corrections.group_log_base(p, E, torch.tensor([[0.25]], dtype=f64)).exp()) == pytest.approx(0.5)
    assert float(corrections.group_log_base(p, E, torch.zeros(1, 1, dtype=f64))) == LN(0.6)


# ---------------------------------------------------------------------------------------------------------------------
# Every row against a loop over tokens, in plain floats
# ---------------------------------------------------------------------------------------------------------------------

V = 7  # tokens in the vocabulary
K = 2  # of which the engine returns so many log-probabilities
LAMBDA = 0.8
KAPPA = 1.35
CAP = 1.4
FLOOR = 0.6
C1 = 1.9
C2 = 1.15
CLAMP = 1.8
RS = {  # bounds that some tokens or responses are inside of and some are not
    "none": (0.55, 1.45),
    "token": (0.5, 2.1),
    "sequence": (0.3, 3.3),
    "geo": (0.55, 1.3),
    "token_k3": (0.004, 0.21),
    "seq_mean_k3": (0.06, 0.3),
    "token_k2": (0.004, 0.21),
    "seq_max": (1.4, 3.0),
    "seq_min": (0.18, 0.75),
    "seq_sum_k2": (0.25, 1.5),
    "seq_mean_k2": (0.06, 0.3),
    "seq_max_k2": (0.14, 1.0),
    "seq_sum_k3": (0.25, 1.5),
    "seq_max_k3": (0.14, 1.0),
}
LENGTHS = (8, 5, 1, 6, 3)
HOLES = ({2}, {0, 3}, set(), {5}, {1})  # tokens that carry no gradient; seq_min would drop one of them
TEMPERATURES = (0.7, 0.85, 1.0, 1.2, 1.5)
ADV = (0.4, -0.7, 0.0, -0.2, 1.1)


@dataclass
class Token:
    """One sampled token: three distributions over V tokens, and what was drawn."""

    inf: list
    ref: list
    new: list
    sampled: int
    uniform: float
    learns: bool

    def log_r(self, over="ref"):
        return math.log(getattr(self, over)[self.sampled] / self.inf[self.sampled])

    def top(self):
        return sorted(range(V), key=lambda x: -self.inf[x])[:K]

    def support(self):
        return {self.sampled, *self.top()}

    def tail(self, target):
        kth = self.inf[self.top()[-1]]
        return sum(min(kth, target[x] / LAMBDA) for x in range(V) if x not in self.support())


def softmax(logits, temperature):
    powers = [math.exp(x / temperature) for x in logits]
    return [x / sum(powers) for x in powers]


def ragged():
    """Five responses of different lengths, holes and temperatures; no two numbers in them are equal."""
    rng, rows = random.Random(27), []
    for length, holes, temperature in zip(LENGTHS, HOLES, TEMPERATURES, strict=True):
        rows.append([make_token(rng, temperature, t not in holes) for t in range(length)])
    return rows


def make_token(rng, temperature, learns):
    inf = [rng.gauss(0, 1.5) for _ in range(V)]
    ref = [x + rng.gauss(0, 1.0) for x in inf]
    new = [x + rng.gauss(0, 0.4) for x in ref]
    p_inf = softmax(inf, temperature)
    return Token(
        inf=p_inf,
        ref=softmax(ref, temperature),
        new=softmax(new, temperature),
        sampled=rng.choices(range(V), p_inf)[0],
        uniform=rng.random(),
        learns=learns,
    )


RAGGED = ragged()


def tensors():
    """The same as (policy now, batch): padded with numbers that would show if they were read."""
    new = TokenStats(
        logp=padded(lambda t: math.log(t.new[t.sampled]), -0.1).requires_grad_(),
        support_logp=padded(lambda t: support_logp(t, t.new), [-0.2] * (1 + K)),
        tail=padded(lambda t: t.tail(t.new), 0.9),
        z=padded(lambda t: exact_z(t, t.new), 0.3),
    )
    batch = TinyBatch(
        logp_ref=padded(lambda t: math.log(t.ref[t.sampled]), -9.0),
        logp_inf=padded(lambda t: math.log(t.inf[t.sampled]), -0.4),
        mask=padded(lambda t: t.learns, False),
        adv=torch.tensor(ADV, dtype=f64)[:, None],
        mask_uniforms=padded(lambda t: t.uniform, 0.0),
        support_logp=padded(inf_on_support, [-0.5] * (1 + K)),
        support_logp_ref=padded(lambda t: support_logp(t, t.ref), [-0.6] * (1 + K)),
        tail_ref=padded(lambda t: t.tail(t.ref), 0.8),
        z_ref=padded(lambda t: exact_z(t, t.ref), 0.7),
    )
    return new, batch


def padded(of_token, fill):
    """(B, T, ...) of a number or list for each token."""
    rows = []
    for row in RAGGED:
        padding = [fill] * (max(LENGTHS) - len(row))
        rows.append([of_token(t) for t in row] + padding)
    return torch.tensor(rows, dtype=torch.bool if isinstance(fill, bool) else f64)


def support_logp(token, target):
    return [math.log(target[x]) for x in (token.sampled, *token.top())]


def inf_on_support(token):
    """A sampled token that is in the top-K is listed once."""
    own = -math.inf if token.sampled in token.top() else math.log(token.inf[token.sampled])
    return [own, *(math.log(token.inf[x]) for x in token.top())]


def exact_z(token, target):
    return sum(min(token.inf[x], target[x] / LAMBDA) for x in range(V))


def clamped(x):
    return max(-CLAMP, min(CLAMP, x))


def bounded(x, low, high):
    return max(low, min(high, x))


def is_inside(x, low, high):
    return 1.0 if low <= x <= high else 0.0


def learners(row):
    """The tokens of a response that carry a gradient."""
    return [t for t in row if t.learns]


def sum_of(row):
    return sum(t.log_r() for t in learners(row))


def drops_of(row):
    return sum(min(t.log_r(), 0.0) for t in learners(row))


def place(row):
    return next(i for i, other in enumerate(RAGGED) if other is row)


def until(token, row):
    """The row up to a token, that token with it."""
    return row[: next(t for t, other in enumerate(row) if other is token) + 1]


def mean_of(row):
    return sum_of(row) / len(learners(row))


def k2(log_r):
    return clamped(log_r) * clamped(log_r) / 2


def statistics_of(row):
    """name -> the statistic of each token of a response that learns."""
    own = [t.log_r() for t in learners(row)]
    of_tokens = {"k2": [k2(x) for x in own], "k3": [k3(x) for x in own], "": [math.exp(clamped(x)) for x in own]}
    found = {"token": of_tokens[""], "token_k2": of_tokens["k2"], "token_k3": of_tokens["k3"]}
    whole = {"sequence": math.exp(clamped(sum(own))), "geo": math.exp(clamped(sum(own) / len(own)))}
    whole["seq_max"] = max(of_tokens[""])
    whole["seq_min"] = min(of_tokens[""])
    for name in ("k2", "k3"):
        values = of_tokens[name]
        whole |= {f"seq_sum_{name}": sum(values), f"seq_mean_{name}": sum(values) / len(own)}
        whole[f"seq_max_{name}"] = max(values)
    return found | {name: [value] * len(own) for name, value in whole.items()}


def k3(log_r):
    """r - 1 - log r, by its series where that is small."""
    return sum(clamped(log_r) ** n / math.factorial(n) for n in range(2, 40))


def expected_z(token, target, how):
    if how == "exact":
        return exact_z(token, target)
    low = sum(min(token.inf[x], target[x] / LAMBDA) for x in token.support())
    if how == "approx":
        return KAPPA * low
    room = min(1 - sum(token.inf[x] for x in token.support()), token.tail(target))
    return bounded(KAPPA * low, low, low + room)


def expected_obrs(token, cfg):
    """(weight, keep) of OBRS."""
    target = getattr(token, cfg.obrs_target)
    p, q = target[token.sampled], token.inf[token.sampled]
    accept = min(1.0, math.exp(clamped(math.log(p / q))) / LAMBDA)
    keep = accept
    if cfg.obrs_mask == "bernoulli":
        keep = 1.0 if token.uniform < accept else 0.0
    z = expected_z(token, target, cfg.obrs_z)
    weight = min(z * max(LAMBDA, math.exp(clamped(math.log(p / q)))), C1)
    if cfg.obrs_target == "new" and cfg.correction == "obrs":
        weight *= min(math.exp(clamped(math.log(token.ref[token.sampled] / p))), C2)
    if cfg.obrs_mode == "mask":
        weight = 1.0
    if cfg.obrs_mode == "reweight":
        keep = 1.0
    return weight, keep


def expected(name, token, row, cfg):
    """(weight, keep) of one token by its correction."""
    low, high = cfg.rs_low, cfg.rs_high
    r = math.exp(clamped(token.log_r()))
    R = math.exp(clamped(sum_of(row)))
    m = math.exp(clamped(mean_of(row)))
    if name in ("obrs", "jackpot_adjusted"):
        return expected_obrs(token, cfg)
    if name == "z_tis":
        return min(expected_z(token, token.ref, cfg.obrs_z) * r, C1), 1.0
    if name == "tis_adjusted":
        return bounded(math.exp(clamped(token.log_r("new"))), FLOOR, CAP), 1.0
    return {
        "none": (1.0, 1.0),
        "is": (r, 1.0),
        "tis": (bounded(r, FLOOR, CAP), 1.0),
        "icepop": (r, is_inside(r, low, high)),
        "kpop": (r, is_inside(binary_kl(token), low, high)),
        "areal_drop": (r, is_inside(r, 0.0, CAP)),
        "seq_is": (R, 1.0),
        "seq_tis": (bounded(R, FLOOR, CAP), 1.0),
        "prefix_tis": (bounded(math.exp(clamped(sum_of(until(token, row)))), FLOOR, CAP), 1.0),
        "retrace": (math.exp(clamped(drops_of(until(token, row)))), 1.0),
        "retrace_seq": (math.exp(clamped(drops_of(until(token, row)))) * min(R, 1.0), 1.0),
        "seq_mis": (R, is_inside(R, low, high)),
        "geo_rs": (1.0, is_inside(m, low, high)),
        "geo_rs_seq_tis": (bounded(R, FLOOR, CAP), is_inside(m, low, high)),
        "tbpo_mismatch": (bounded(m, FLOOR, CAP), 1.0),
        "vespo": (R**2 * math.exp(3 * (1 - R)) if ADV[place(row)] >= 0 else R**3 * math.exp(2 * (1 - R)), 1.0),
    }[name]


def binary_kl(token):
    """The larger of D(p, q) and D(q, p), for the two events "this token" and "another one"."""
    p, q = token.ref[token.sampled], token.inf[token.sampled]
    one = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    return max(one, q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)))


def expected_rejection(token, row, cfg):
    """1 where --reject keeps a token."""
    if cfg.reject == "none":
        return 1.0
    own = next(i for i, other in enumerate(learners(row)) if other is token)
    return is_inside(statistics_of(row)[cfg.reject][own], cfg.rs_low, cfg.rs_high)


def compare(cfg) -> tuple[list, list]:
    """The weights and keeps of all tokens that learn, after they were compared with the loop's."""
    new, batch = tensors()
    stats = replace(STATS, lam=LAMBDA, kappa=KAPPA)
    weight, keep, _ = apply_correction(new, batch, stats, cfg)
    assert not weight.requires_grad and not keep.requires_grad
    weight, keep = weight.expand_as(batch.mask)[batch.mask], keep.expand_as(batch.mask)[batch.mask]
    want_weight, want_keep = [], []
    for row in RAGGED:
        for token in learners(row):
            w, k = expected(cfg.correction, token, row, cfg)
            want_weight.append(w)
            want_keep.append(k * expected_rejection(token, row, cfg))
    assert weight.tolist() == pytest.approx(want_weight, rel=1e-12)
    assert keep.tolist() == pytest.approx(want_keep, rel=1e-12)
    return want_weight, want_keep


def loop_cfg(correction, reject="none", **flags):
    """A configuration of any row with any rejection, also of those that `check` refuses; every number is another."""
    low, high = RS[reject]
    return replace(
        make_cfg(objective="none"),
        correction=correction,
        surrogate="ppo",
        ratio_base="new" if correction == "jackpot_adjusted" else "ref",
        reject=reject,
        is_cap=CAP,
        is_floor=FLOOR,
        rs_low=low,
        rs_high=high,
        log_ratio_clamp=CLAMP,
        obrs_c1=C1,
        obrs_c2=C2,
        obrs_lambda=LAMBDA,
        **flags,
    )


def test_the_fixture_reaches_every_branch():
    """Clamps, caps, and bounds act on some tokens or responses and not on others; no number occurs twice."""
    own = [t for row in RAGGED for t in learners(row)]
    r = [math.exp(clamped(t.log_r())) for t in own]
    by_row = [statistics_of(row) for row in RAGGED]
    statistics = {name: [x for found in by_row for x in found[name]] for name in by_row[0]} | {"none": r}
    assert set(statistics) == set(RS) == {"none", *REJECTIONS}
    for name, values in statistics.items():
        assert splits(values, *RS[name]), name
    for name in ("token", "sequence", "geo"):
        assert splits(statistics[name], FLOOR, CAP), name
    assert splits([t.log_r() for t in own], -CLAMP, CLAMP)
    assert splits([sum_of(row) for row in RAGGED], -CLAMP, CLAMP)
    least = math.log(RS["seq_min"][0])
    hidden = [row for row in RAGGED if any(t.log_r() < least for t in row if not t.learns)]
    assert any(statistics_of(row)["seq_min"][0] > math.exp(least) for row in hidden)
    assert {t.sampled in t.top() for t in own} == {True, False}
    for name in ("inf", "ref", "new"):
        numbers = [x for t in own for x in getattr(t, name)]
        assert len(set(numbers)) == len(numbers)


def splits(values, low, high):
    """Whether some values are below, some between and some above."""
    return min(values) < low < high < max(values) and any(low < x < high for x in values)


@pytest.mark.parametrize("reject", ["none", *REJECTIONS])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_row_against_a_loop(name, reject):
    target = "new" if name == "jackpot_adjusted" else "ref"
    _, keep = compare(loop_cfg(name, reject, obrs_target=target, obrs_z="bracket"))
    refused = (
        reject != "none" and "rs_low" in CORRECTIONS[name].bounds
    )  # by corrections.check: both read the same bounds
    if reject != "none" and not refused:
        assert 0 < sum(k > 0 for k in keep) < len(keep)


@pytest.mark.parametrize("z", ["exact", "bracket", "approx"])
@pytest.mark.parametrize("target", ["ref", "new"])
@pytest.mark.parametrize("mode", ["both", "mask", "reweight"])
@pytest.mark.parametrize("mask", ["bernoulli", "expected"])
@pytest.mark.parametrize("name", ["obrs", "jackpot_adjusted"])
def test_obrs_against_a_loop(name, mask, mode, target, z):
    compare(loop_cfg(name, obrs_mask=mask, obrs_mode=mode, obrs_target=target, obrs_z=z))


@pytest.mark.parametrize("z", ["exact", "bracket", "approx"])
def test_z_tis_against_a_loop(z):
    compare(loop_cfg("z_tis", obrs_target="ref", obrs_z=z))


@pytest.mark.parametrize(
    "name, ess, clamped, dead",
    [
        ("seq_tis", 0.06, 0.0, True),
        ("seq_tis", 0.3, 0.0, False),
        ("seq_tis", 1.0, 0.9, True),  # all responses at the clamp
        ("retrace_seq", 0.06, 0.0, True),
        ("prefix_tis", 0.06, 0.0, True),
        ("tis", 0.06, 0.0, False),
        ("jackpot", 0.06, 0.0, False),
    ],
)
def test_dead_weights_are_said_with_what_still_works(name, ess, clamped, dead):
    logged = {"rollout_corr/seq_eff_sample_size": ess, "rollout_corr/seq_clamped_fraction": clamped}
    logged |= {"rollout_corr/kl": 0.25, "response_length": 160.0}
    sentence = corrections.dead_weights(make_cfg(objective=name), logged)
    assert bool(sentence) == dead
    if dead:
        assert "KL 0.25 a token over 160 tokens" in sentence and "--objective=tis" in sentence
