"""Corrections and rejections: values by hand, and formulas on plain tensors."""

import math
import re
import textwrap
from dataclasses import replace

import pytest
import torch
from conftest import LN, LOG_R, ROOT, STATS, TinyBatch, f64, make_cfg, tiny

import corrections
import objectives
import obrs
from corrections import CORRECTIONS, REJECTIONS, apply_correction
from learner import Comm
from model import TokenStats


def full(x):
    """A number, a row or a (2, 3) tensor as (2, 3) in float64."""
    return torch.as_tensor(x, dtype=f64).expand(2, 3)


def corrected(new, batch, **flags):
    """(weight, keep), both (2, 3), under the flags."""
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
        # means 1/6 and 1.614
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
    assert torch.allclose(
        weight[:, 0], torch.tensor([0.5, math.sqrt(2)], dtype=f64)
    )  # 1/4 -> 1/2; sqrt(2 * 1) is inside
    weight, _ = corrected(new, b, correction="seq_is")
    assert torch.allclose(weight[:, 0], torch.tensor([1 / 16, 2.0], dtype=f64))


@pytest.mark.parametrize("reject, low, high", [("token", 0.6, 3.0), ("geo", 1.5, math.inf), ("sequence", 0.0, 4.0)])
@pytest.mark.parametrize("adv", [(1.0, -1.0), (-1.0, 1.0), (0.0, 0.0), (-1.0, -2.0)])
def test_reject_of_negative_advantages(reject, low, high, adv):
    new, b = tiny(LOG_R)
    b = replace(b, adv=torch.tensor(adv, dtype=f64)[:, None])
    flags = dict(correction="is", reject=reject, rs_low=low, rs_high=high)
    weight, every = corrected(new, b, **flags)
    again, keep = corrected(new, b, **flags, reject_of="negative")
    assert torch.equal(weight, again) and 0 < every.sum() < every.numel()
    for i, a in enumerate(adv):
        assert keep[i].tolist() == (every[i].tolist() if a < 0 else [1.0] * 3)


def test_spare_by_hand():
    """prod min(r, 1) min(R, 1); tokens with A < 0 and r < 0.9 are dropped. r = 1, 0.85, 0.95 in both rows."""
    new, b = tiny([[0.0, LN(0.85), LN(0.95)]] * 2)
    weight, keep = corrected(new, replace(b, adv=torch.tensor([[0.5], [-0.5]])), objective="spare")
    assert torch.allclose(weight, torch.tensor([[1.0, 0.85, 0.8075]], dtype=f64) * 0.8075)
    assert keep.tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]]


def test_m2po_by_hand():
    """Squares 0.01, 0.04, 0.09, 0.16: their means are 0.01, 0.025, 0.0467, 0.075; the smallest always stays."""
    squares = torch.tensor([0.16, 0.01, 0.09, 0.04])
    for bound, largest in ((1.0, 0.16), (0.075, 0.16), (0.074, 0.09), (0.03, 0.04), (0.024, 0.01), (0.001, 0.01)):
        assert corrections.largest_kept(squares, bound) == pytest.approx(largest)
    assert corrections.largest_kept(torch.zeros(0), 0.04) == math.inf
    new, b = tiny([[0.1, -0.2, 9.0], [0.3, -0.4, 9.0]], mask=[[True, True, False]] * 2)
    cfg = make_cfg(objective="m2po", rs_high=0.05)
    stats = objectives.prepare(b, Comm(), cfg, {})
    _, keep, _ = apply_correction(new, b, stats, cfg)
    assert keep[:, :2].tolist() == [[1.0, 1.0], [1.0, 0.0]]
    comm = Comm()
    comm.cat = lambda x: torch.cat([x, torch.zeros(9)])  # a second rank without a gap lowers the mean
    assert objectives.prepare(b, comm, cfg, {}).largest_kept == pytest.approx(0.16)


def test_kpop_by_hand():
    """p = 0.6, q = 0.5: 0.6 ln 1.2 + 0.4 ln 0.8 = 0.02014 one way, 0.5 ln(5/6) + 0.5 ln(5/4) = 0.02041 the other way;
    with p = 0.5 and q = 0.6 the two values are exchanged. A certain token has a finite KL."""
    logp_inf = torch.tensor([[0.5, 0.6, 1.0, 1.0]], dtype=f64).log()
    log_r = torch.tensor([[0.6, 0.5, 1.0, 0.5]], dtype=f64).log() - logp_inf
    for high, kept in ((0.0201, [0, 0, 1, 0]), (0.0203, [0, 0, 1, 0]), (0.0205, [1, 1, 1, 0]), (99.0, [1, 1, 1, 1])):
        weight, keep = corrections.kpop(log_r, logp_inf, rs_high=high)
        assert keep.tolist() == [kept]
    assert torch.allclose(weight, torch.tensor([[1.2, 0.5 / 0.6, 1.0, 0.5]], dtype=f64))


def test_seq_min_ignores_padding():
    new, b = tiny([[0.0, 0.0, -30.0], [0.0, -30.0, 0.0]], mask=[[True, True, False], [True, True, True]])
    _, keep = corrected(new, b, objective="tis", reject="seq_min")
    assert keep.tolist() == [[1.0] * 3, [0.0] * 3]


def test_several_rejections_drop_the_union():
    """r = 2, 1/2, 1 and 4, 4, 4: `token` drops the first and the last three, `sequence` (R = 1, 64) the second row."""
    new, b = tiny(LOG_R)
    _, keep = corrected(new, b, correction="is", reject="token:0.4:1.5,sequence:0:2")
    assert keep.tolist() == [[0, 1, 1], [0, 0, 0]]
    _, keep = corrected(new, b, correction="is", reject="token:0.4:5,sequence:2:100")
    assert keep.tolist() == [[0, 0, 0], [1, 1, 1]]  # the first rejection drops nothing here


def test_corrections_that_need_p_new():
    """Weights of p_new are known only within the update, weights of p_ref before."""
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


def test_tis_adjusted_uses_p_new():
    new, b = tiny(LOG_R, new=[[-1 + LN(2), -1, -1], [-1, -1 - LN(8), -1]])
    weight, _, _ = apply_correction(new, b, STATS, make_cfg(objective="tis_adjusted"))
    # p_new / p_inf = 4, .5, 1; 4, .5, 4 capped at 2
    assert torch.allclose(weight, torch.tensor([[2, 0.5, 1], [2, 0.5, 2]], dtype=f64))
    assert not weight.requires_grad


@pytest.mark.parametrize("name", sorted(set(CORRECTIONS) - corrections.USES_Z - {"tis_adjusted"}))
def test_correction_target_new_replaces_p_ref_by_p_new(name):
    """Weights and rejection with p_new above p_inf; no gradient passes through them."""
    moved = [[LN(0.3), LN(1.2), 0.1], [0.05, LN(2.5), -0.2]]
    new, b = tiny(LOG_R, new=moved)
    flags = dict(correction=name, surrogate="reinforce", rs_low=0.3, rs_high=1.7)
    flags |= {} if "rs_low" in CORRECTIONS[name].bounds else {"reject": "token"}
    got = corrected(new, b, **flags, correction_target="new")
    want = corrected(None, replace(b, logp_ref=new.logp.detach()), **flags)
    of_ref = corrected(None, b, **flags)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert not torch.equal(got[0] * got[1], of_ref[0] * of_ref[1])
    assert not got[0].requires_grad and not got[1].requires_grad


def test_jackpot_adjusted_uses_p_new():
    """One token, a support of one token: Z_low = min(p_inf, p_new), kappa 1, room 1 - p_inf."""
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
    # a surrogate without p_new / p_ref needs no p_ref / p_new
    alone = make_cfg(objective="jackpot", obrs_target="new", surrogate="reinforce")
    weight, _, _ = apply_correction(new, b, STATS, alone)
    assert float(weight) == pytest.approx(0.5 * 1.6)


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
# The formulas on plain tensors and numbers
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
        # R = 2 and 16: 2^2 e^{3 (1 - 2)} for A >= 0, 16^3 e^{2 (1 - 16)} for A < 0
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
    """Log-ratios of 8 a token: a clamp of 1.5 makes every weight exp(1.5), the default of 20 makes none."""
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
    # masked tokens and padding are ignored: the first response's mean is (1 - log 2 + 0) / 2
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
    """exp(x) - 1 - x = x^2 / 2 + x^3 / 6 + ...; evaluated directly in float32 it would have no correct digit."""
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
def test_a_rejection_by_k3_ignores_masked_tokens_and_padding(reject):
    """Two responses that differ only under the mask have the same keep."""
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
def test_the_warning_of_dead_weights_names_an_alternative(name, ess, clamped, dead):
    logged = {"rollout_corr/seq_eff_sample_size": ess, "rollout_corr/seq_clamped_fraction": clamped}
    logged |= {"rollout_corr/kl": 0.25, "response_length": 160.0}
    sentence = corrections.dead_weights(make_cfg(objective=name), logged)
    assert bool(sentence) == dead
    if dead:
        assert "KL 0.25 a token over 160 tokens" in sentence and "--objective=tis" in sentence
