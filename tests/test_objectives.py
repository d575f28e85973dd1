"""Corrections, surrogates, reductions and advantages: numbers worked out by hand, gradients against derivations."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import make_cfg

import objectives
from model import TokenStats

f64 = torch.float64
LN = math.log


class One:
    """A comm of one rank."""

    sum = staticmethod(lambda xs: [float(x) for x in xs])
    cat = staticmethod(lambda x: x)


@dataclass
class Fields:
    logp_ref: torch.Tensor = None
    logp_inf: torch.Tensor = None
    mask: torch.Tensor = None
    adv: torch.Tensor = None
    u: torch.Tensor = None
    support_logp: torch.Tensor = None
    support_logp_ref: torch.Tensor = None
    tail_ref: torch.Tensor = None
    z_ref: torch.Tensor = None
    actor_logp_ref: torch.Tensor = None


def tiny(log_r, mask=None, adv=(1.0, -1.0), new=None, ref=None):
    """Two responses of three tokens: logp_ref given or -1, logp_inf = ref - log_r; new = ref unless given.
    A stand-in for Batch with the fields that objectives read."""
    log_r = torch.tensor(log_r, dtype=f64)
    ref = torch.full_like(log_r, -1.0) if ref is None else torch.tensor(ref, dtype=f64)
    mask = torch.ones_like(log_r, dtype=torch.bool) if mask is None else torch.tensor(mask)
    b = Fields(
        logp_ref=ref,
        logp_inf=ref - log_r,
        mask=mask,
        adv=torch.tensor(adv, dtype=f64)[:, None],
        u=torch.full_like(log_r, 0.5),
        support_logp=None,
        support_logp_ref=None,
        tail_ref=None,
        z_ref=torch.ones_like(log_r) * 0.9,
    )
    n = (ref if new is None else torch.tensor(new, dtype=f64)).clone().requires_grad_()
    return TokenStats(n), b


STATS = {"tokens": 6.0, "sequences": 2.0, "lam": 1.0, "kappa": 1.0, "kept_factor": None, "distill": 0.0}
# r = 2, 1/2, 1 in the first response (product 1), 4, 4, 4 in the second (product 64, geometric mean 4)
LOG_R = [[LN(2), -LN(2), 0.0], [LN(4), LN(4), LN(4)]]


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
        ("none", {"veto": 0.6}, 1, [[0, 0, 0], [1, 1, 1]]),
        ("is", {"veto": 0.4}, [[2, 0.5, 1], [4, 4, 4]], 1),
        ("icepop", {"rs_low": 0.1, "rs_high": 3.0, "veto": 0.6}, [[2, 0.5, 1], [4, 4, 4]], 0),
        ("tbpo_mismatch", {"tbpo_cap": "mask"}, [[1] * 3, [4] * 3], [[1] * 3, [0] * 3]),
        ("tbpo_mismatch", {"tbpo_cap": "mask", "is_cap": 5.0}, [[1] * 3, [4] * 3], 1),
        ("is", {"log_ratio_clamp": LN(3)}, [[2, 0.5, 1], [3, 3, 3]], 1),
        ("seq_is", {"log_ratio_clamp": LN(9)}, [[1, 1, 1], [9, 9, 9]], 1),
        ("geo_rs", {"log_ratio_clamp": LN(1.05)}, 1, 1),
    ],
)
def test_corrections_by_hand(name, flags, weight, keep):
    new, b = tiny(LOG_R)
    w, k, _ = objectives.apply_correction(new, b, STATS, make_cfg(objective="none", correction=name, **flags))
    full = lambda x: torch.as_tensor(x, dtype=f64).expand(2, 3)
    assert torch.allclose(w.expand(2, 3), full(weight)) and torch.equal(k.expand(2, 3).to(f64), full(keep))


def test_two_sided_cap_and_sequence_means_ignore_padding():
    new, b = tiny([[-LN(4), -LN(4), 99.0], [LN(2), 0.0, 99.0]], mask=[[True, True, False]] * 2)
    w, _, _ = objectives.tbpo_mismatch(new, b, STATS, make_cfg(correction="tbpo_mismatch"))
    assert torch.allclose(w[:, 0], torch.tensor([0.5, math.sqrt(2)], dtype=f64))  # 1/4 -> 1/2; sqrt(2 * 1) stays
    w, _, _ = objectives.seq_is(new, b, STATS, make_cfg(correction="seq_is"))
    assert torch.allclose(w[:, 0], torch.tensor([1 / 16, 2.0], dtype=f64))


@pytest.mark.parametrize(
    "log_s, adv, value, slope",
    [
        (0.0, 1, 1.0, 1),
        (3e-4, 1, 1.0003, 1),
        (5e-4, 1, 1.0004, 0),
        (-0.5, 1, math.exp(-0.5), 1),  # A > 0: an upper edge alone
        (0.0, -1, -1.0, 1),
        (6e-4, -1, -1.0006, 1),
        (8e-4, -1, -1.0007, 0),
        (-2e-4, -1, -0.9998, 1),
        (-5e-4, -1, -0.9997, 0),
    ],
)
def test_tbpo_band(log_s, adv, value, slope):
    """One response of two tokens with log s = log_s: value clip(s) A, and d/dlogp = s A / 2 a token inside the band, 0 outside."""
    base = torch.tensor([[-1.0, -2.0, 5.0]], dtype=f64)
    logp = (base + torch.tensor([[2 * log_s, 0.0, 3.0]], dtype=f64)).requires_grad_()
    got, out = objectives.tbpo(
        logp,
        base,
        torch.tensor([[float(adv)]], dtype=f64),
        torch.tensor([[True, True, False]]),
        make_cfg(objective="tbpo"),
    )
    assert torch.allclose(got, torch.full((1, 3), value, dtype=f64), atol=1e-7) and out.tolist() == [[slope == 0] * 3]
    got[0, 0].backward()
    assert torch.allclose(
        logp.grad, slope * math.exp(log_s) * adv / 2 * torch.tensor([[1.0, 1.0, 0.0]], dtype=f64), atol=1e-9
    )


def test_tbpo_without_its_clip_is_gspo_without_its():
    new, b = tiny(LOG_R, new=[[-0.5, -2.0, -1.0], [-1.5] * 3])
    f = lambda name: objectives.SURROGATES[name](
        new.logp, b.logp_ref, b.adv, b.mask, make_cfg(objective=name, clip=False)
    )[0]
    assert torch.allclose(f("tbpo"), f("gspo"))


def test_a_veto_does_not_look_behind_the_end():
    new, b = tiny([[0.0, 0.0, -30.0], [0.0, -30.0, 0.0]], mask=[[True, True, False], [True, True, True]])
    _, k, _ = objectives.apply_correction(new, b, STATS, make_cfg(objective="tis", veto=1e-4))
    assert k.expand(2, 3).tolist() == [[1.0] * 3, [0.0] * 3]


def test_rejections_rescale_the_kept_denominator():
    """reject=token on `is` is icepop, in the loss and in its kept denominator."""
    got = []
    for flags in (dict(objective="icepop"), dict(objective="is", reject="token")):
        new, b = tiny(LOG_R)
        c = make_cfg(**flags, loss_denominator="kept", rs_low=0.6, rs_high=3.0)
        stats = objectives.prepare(b, One, c, {})
        value, _ = objectives.loss(new, b, stats, c)
        got.append(float(objectives.reduce(value, b.mask, stats, c).detach()))
        assert (
            "ref" in objectives.passes_needed(c, {}, 1)
            and objectives.passes_needed(replace(c, loss_denominator="proposed"), {}, 1) == set()
        )
    assert got[0] == got[1] != 0


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("decoupled_token_is", dict(objective="tis")),
        ("decoupled_seq_is", dict(objective="seq_tis", is_cap=2.0)),
        ("bypass_ppo_clip", dict(objective="ppo_is")),
        ("decoupled_geo_rs", dict(objective="geo_rs", rs_low=0.999, rs_high=1.001)),
        ("token_truncate", dict(objective="tis", is_cap=3.0)),
        ("token_mask", dict(objective="areal_drop", is_cap=3.0)),
        ("sequence_truncate", dict(objective="seq_tis", is_cap=3.0)),
        ("sequence_mask", dict(objective="seq_mis", rs_high=3.0)),
        ("seq_mask_tis", dict(objective="is", reject="geo", rs_low=0.5, rs_high=5.0)),
        ("decoupled_seq_is_rs", dict(objective="seq_tis", is_cap=2.0, reject="sequence", rs_low=0.5, rs_high=2.0)),
        ("dr_grpo", dict(objective="grpo", advantage="grpo_no_std", reduction="seq-mean-token-sum-norm")),
        ("dapo", dict(objective="grpo")),
    ],
)
def test_names_of_other_frameworks(theirs, ours):
    assert replace(make_cfg(objective=theirs), objective="") == replace(make_cfg(**ours), objective="")


def test_the_clamp_reaches_obrs_and_surrogates():
    import obrs

    a = lambda clamp: float(obrs.acceptance(torch.tensor(-3.0), torch.tensor(0.0), 1.0, clamp))
    assert a(20.0) == pytest.approx(math.exp(-3)) and a(2.0) == pytest.approx(math.exp(-2))
    assert float(obrs.weight(0.5, torch.tensor(3.0), torch.tensor(0.0), 1.0, 2.0)) == pytest.approx(0.5 * math.exp(2))
    for name in ("ppo", "gspo", "sapo", "cispo"):
        cfg = make_cfg(objective="none", surrogate=name, clip=False)
        wide, tight = (
            objectives.SURROGATES[name](
                torch.full((1, 2), 1.0),
                torch.zeros(1, 2),
                torch.ones(1, 1),
                torch.ones(1, 2, dtype=torch.bool),
                replace(cfg, log_ratio_clamp=c),
            )[0]
            for c in (20.0, 0.5)
        )
        assert not torch.allclose(wide, tight), name


def test_log_ratios_are_clamped_after_the_sequence_sum():
    new, b = tiny([[30.0, -30.0, 1.0], [15.0, 15.0, 0.0]])
    w, _, _ = objectives.seq_is(new, b, STATS, make_cfg(correction="seq_is"))
    assert torch.allclose(w[:, 0], torch.tensor([math.e, math.exp(20)], dtype=f64))
    w, _, _ = objectives.vanilla_is(new, b, STATS, make_cfg(correction="is"))
    assert torch.allclose(w[0], torch.tensor([math.exp(20), math.exp(-20), math.e], dtype=f64))


def test_tis_adjusted_and_jackpot_adjusted_see_new():
    new, b = tiny(LOG_R, new=[[-1 + LN(2), -1, -1], [-1, -1 - LN(8), -1]])
    w, k, _ = objectives.tis_adjusted(new, b, STATS, make_cfg(objective="tis_adjusted"))
    assert torch.allclose(
        w, torch.tensor([[2, 0.5, 1], [2, 0.5, 2]], dtype=f64)
    )  # p_new / p_inf = 4, .5, 1; 4, .5, 4 capped at 2
    assert not w.requires_grad
    # jackpot_adjusted on a one-token S: Z_low = min(p_inf, p_new), kappa 1, room 1 - p_inf
    p_inf, p_new = torch.tensor([[0.5]], dtype=f64), torch.tensor([[0.8]], dtype=f64)
    b = Fields(logp_ref=p_inf.log(), logp_inf=p_inf.log(), u=torch.tensor([[0.9]]), support_logp=p_inf.log()[..., None])
    n = TokenStats(p_new.log(), support_logp=p_new.log()[..., None])
    w, k, _ = objectives.obrs_correction(n, b, STATS, make_cfg(objective="jackpot_adjusted"))
    assert float(w) == pytest.approx(0.5 * 1.6) and float(k) == 1.0  # no p_ref / p_new factor
    w, k, _ = objectives.obrs_correction(n, b, STATS, make_cfg(objective="jackpot", obrs_target="new"))
    assert float(w) == pytest.approx(0.5 * 1.6 * 0.5 / 0.8)


def test_z_tis_is_the_mean_of_obrs():
    """z_tis = E[Mask] min(w, c1) of OBRS for c1 >= lambda Z, token by token."""
    new, b = tiny([[LN(2), -LN(2), 0.3], [LN(8), -1.0, 0.1]])
    w, k, _ = objectives.z_tis(new, b, STATS, make_cfg(objective="z_tis", obrs_z="auto", actor="base:actor"))
    ow, ok, logs = objectives.obrs_correction(
        new, b, STATS, make_cfg(objective="jackpot", obrs_mask="expected", actor="base:actor")
    )
    assert torch.allclose(w * k, ow * ok)
    assert torch.allclose(w, torch.minimum(0.9 * b.logp_ref.sub(b.logp_inf).exp(), torch.tensor(3.0, dtype=f64)))
    w, _, _ = objectives.z_tis(new, b, STATS, make_cfg(objective="z_tis", actor="base:actor", obrs_c1=1.5))
    assert float(w.max()) == 1.5


@pytest.mark.parametrize("surrogate", ["reinforce", "ppo", "gspo", "sapo", "cispo"])
def test_surrogates_by_hand(surrogate):
    # first response A = 1, ratios 2, 1/2, 1 (geometric mean 1); second A = -1, ratios 2, 2, 2
    ref = [[-3.0] * 3, [-3.0] * 3]
    new, b = tiny(LOG_R, new=[[-3 + LN(2), -3 - LN(2), -3.0], [-3 + LN(2)] * 3], ref=ref)
    cfg = make_cfg(objective="none", surrogate=surrogate)
    value, clipped = objectives.SURROGATES[surrogate](new.logp, b.logp_ref, b.adv, b.mask, cfg)
    s = lambda tau, r: 4 / tau / (1 + math.exp(-tau * (r - 1)))
    want = {
        "reinforce": [[-3 + LN(2), -3 - LN(2), -3], [3 - LN(2)] * 3],
        "ppo": [[1.28, 0.5, 1], [-2, -2, -2]],  # min: A > 0 is cut above, A < 0 is not
        "gspo": [[1, 1, 1], [-2, -2, -2]],
        "sapo": [[s(1, 2), s(1, 0.5), s(1, 1)], [-s(1.05, 2)] * 3],
        "cispo": [[1.28 * (-3 + LN(2)), 0.8 * (-3 - LN(2)), -3], [-1.28 * (-3 + LN(2))] * 3],
    }[surrogate]
    assert torch.allclose(value, torch.tensor(want, dtype=f64))
    if surrogate == "ppo":
        assert clipped.tolist() == [[True, False, False], [False] * 3]
        dual, cut = objectives.ppo(new.logp, b.logp_ref, b.adv, b.mask, replace(cfg, dual_clip=1.5))
        assert dual[1].tolist() == [-1.5] * 3 and cut[1].all() and dual[0].tolist() == pytest.approx([1.28, 0.5, 1])
        free, _ = objectives.ppo(new.logp, b.logp_ref, b.adv, b.mask, replace(cfg, clip=False))
        assert free[0].tolist() == pytest.approx([2, 0.5, 1])
    value.sum().backward()
    if surrogate == "ppo":
        assert new.logp.grad.tolist()[0] == pytest.approx([0, 0.5, 1])  # a clipped token has no gradient
    if surrogate == "cispo":
        assert new.logp.grad.tolist()[0] == pytest.approx([1.28, 0.8, 1])  # a clipped token keeps its gradient
    if surrogate == "gspo":
        assert new.logp.grad.tolist()[0] == pytest.approx([1, 1, 1])  # d/dx_t sum_t s = 3 s / 3


@pytest.mark.parametrize("name", [o for o in objectives.OBJECTIVES])
def test_equal_laws_give_reinforce(name):
    """p_inf = p_ref = p_new, Z = 1: every objective's gradient is REINFORCE's under its own reduction, -A_t / denominator."""
    new, b = tiny([[0.0] * 3] * 2, mask=[[True, True, True], [True, False, False]])
    new.z = b.z_ref = torch.ones(2, 3, dtype=f64)
    b.u = torch.zeros(2, 3, dtype=f64)
    whole = torch.tensor([0.7, 0.3], dtype=f64).log().expand(2, 3, 2)
    b.support_logp = b.support_logp_ref = new.support_logp = whole
    b.tail_ref = new.tail = torch.zeros(2, 3, dtype=f64)
    cfg = make_cfg(objective=name)
    stats = {
        **STATS,
        "tokens": 4.0,
        "log_e": torch.full((2, 1), -1.0, dtype=f64),
        "defence": torch.zeros(2, 1, dtype=f64),
    }  # gepo: equal responses
    value, logs = objectives.loss(new, b, stats, cfg)
    objectives.reduce(value, b.mask, stats, cfg).backward()
    per_token = {
        "token-mean": [[1 / 4] * 3, [1 / 4, 0, 0]],
        "seq-mean-token-mean": [[1 / 6] * 3, [1 / 2, 0, 0]],
        "seq-mean-token-sum-norm": [[1 / 64] * 3, [1 / 64, 0, 0]],
    }[cfg.reduction]
    assert torch.allclose(new.logp.grad, -b.adv * torch.tensor(per_token, dtype=f64), atol=1e-12)


def test_obrs_with_lambda_above_one_scales_equal_laws_by_one_over_lambda():
    new, b = tiny([[0.0] * 3] * 2)
    cfg = make_cfg(objective="jackpot", obrs_lambda=2.0, obrs_mask="expected", actor="base:actor")
    b.z_ref = torch.full((2, 3), 0.5, dtype=f64)  # sum min(p, p / 2)
    value, _ = objectives.loss(new, b, {**STATS, "lam": 2.0}, cfg)
    objectives.reduce(value, b.mask, STATS, cfg).backward()
    # a = 1/2, w = Z lambda = 1: half of REINFORCE
    assert torch.allclose(new.logp.grad, -b.adv.expand(2, 3) / 6 * 0.5)


def test_ppo_is_ratio_is_new_over_inf():
    new, b = tiny([[LN(2), 0.0, -LN(4)], [0.0] * 3], adv=(-1.0, 1.0))
    value, logs = objectives.loss(new, b, STATS, make_cfg(objective="ppo_is"))
    assert torch.allclose(
        logs["weight"][0], torch.tensor([2.0, 1.0, 0.25], dtype=f64)
    )  # the metrics see the ratio that corrects
    assert torch.allclose(
        value[0], torch.tensor([2.0, 1.0, 0.8], dtype=f64)
    )  # -min(-r, -clip(r)) = max(r, clip(r)): 1/4 is cut at 0.8
    assert torch.allclose(value[1], torch.tensor([-1.0] * 3, dtype=f64))


def test_weights_carry_no_gradient_and_multiply_the_surrogate():
    new, b = tiny(LOG_R, adv=(1.0, 0.5))
    value, logs = objectives.loss(new, b, STATS, make_cfg(objective="tis"))
    value.sum().backward()
    assert torch.allclose(new.logp.grad, torch.tensor([[-2, -0.5, -1], [-1, -1, -1]], dtype=f64))
    assert not logs["weight"].requires_grad


def test_rejected_tokens_have_no_gradient_and_kept_denominator_rescales():
    new, b = tiny(LOG_R, adv=(1.0, 1.0))
    cfg = make_cfg(objective="icepop", rs_low=0.6, rs_high=3.0)
    for denominator, total in (("proposed", 6), ("kept", 2)):
        c = replace(cfg, loss_denominator=denominator)
        stats = objectives.prepare(b, One, c, {})
        new.logp.grad = None
        value, _ = objectives.loss(new, b, stats, c)
        objectives.reduce(value, b.mask, stats, c).backward()
        assert torch.allclose(new.logp.grad, -torch.tensor([[2, 0, 1], [0, 0, 0]], dtype=f64) / total)
    c = replace(cfg, loss_denominator="kept", reduction="seq-mean-token-mean")
    stats = objectives.prepare(b, One, c, {})
    value, _ = objectives.loss(new, b, stats, c)
    # one response keeps 2 of 3 tokens, the other none: mean over 1 response of (2 + 1) / 2
    assert float(objectives.reduce(value, b.mask, stats, c)) == pytest.approx(-1.5)
    c = replace(cfg, loss_denominator="kept", reduction="seq-mean-token-sum-norm")
    stats = objectives.prepare(b, One, c, {})
    value, _ = objectives.loss(new, b, stats, c)
    assert float(objectives.reduce(value, b.mask, stats, c)) == pytest.approx(
        -3 / 32
    )  # over the one response that keeps any


@pytest.mark.parametrize("objective", ["icepop", "seq_mis", "geo_rs", "jackpot"])
@pytest.mark.parametrize("denominator", ["proposed", "kept"])
@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_everything_rejected_is_a_finite_zero(objective, denominator, reduction):
    new, b = tiny([[9.0] * 3] * 2)
    b.support_logp = torch.full((2, 3, 2), -torch.inf, dtype=f64)  # and nothing known of Z
    b.support_logp_ref = torch.full((2, 3, 2), -5.0, dtype=f64)
    b.u = torch.ones(2, 3, dtype=f64)
    b.tail_ref = torch.zeros(2, 3, dtype=f64)
    if objective == "jackpot":
        b.logp_inf = b.logp_ref + 30  # p_tgt / p_inf = e^-30
    cfg = make_cfg(objective=objective, loss_denominator=denominator, reduction=reduction)
    stats = objectives.prepare(b, One, cfg, {})
    value, logs = objectives.loss(new, b, stats, cfg)
    loss = objectives.reduce(value, b.mask, stats, cfg)
    loss.backward()
    assert (
        float(logs["keep"].sum()) == 0 and float(loss) == 0 and torch.equal(new.logp.grad, torch.zeros(2, 3, dtype=f64))
    )


def test_empty_responses_change_nothing():
    new, b = tiny(LOG_R, mask=[[True] * 3, [False] * 3])
    for reduction, want in (("token-mean", 1.0), ("seq-mean-token-mean", 1.0), ("seq-mean-token-sum-norm", 3 / 32)):
        cfg = make_cfg(objective="none", reduction=reduction)
        stats = objectives.prepare(b, One, cfg, {})
        assert (stats["tokens"], stats["sequences"]) == (3.0, 1.0)
        value, _ = objectives.loss(new, b, stats, cfg)
        assert float(objectives.reduce(value, b.mask, stats, cfg)) == pytest.approx(-want)


def test_reductions_by_hand():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
    mask = torch.tensor([[True] * 3, [True, False, False]])
    stats = {"tokens": 4.0, "sequences": 2.0}
    for reduction, want in (
        ("token-mean", 10 / 4),
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum-norm", (6 + 4) / 32 / 2),
    ):
        assert float(objectives.reduce(x, mask, stats, make_cfg(reduction=reduction))) == pytest.approx(want)


def test_advantages_by_hand():
    r = torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert objectives.grpo_no_std(r).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert torch.allclose(objectives.grpo(r), torch.tensor([0.5, -0.5, -0.5, 0.5]) / (math.sqrt(1 / 3) + 1e-6))
    assert torch.allclose(objectives.rloo(r), torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3]))
    assert objectives.rloo(torch.tensor([3.0, 0.0, 0.0])).tolist() == [3.0, -1.5, -1.5]
    for name, f in objectives.ADVANTAGES.items():
        assert f(torch.full((4,), 0.3)).tolist() == [0.0] * 4, name


def test_positive_only():
    new, b = tiny([[0.0] * 3] * 2)
    value, _ = objectives.loss(new, b, STATS, make_cfg(objective="none", positive_only=True))
    assert value.tolist() == [[-1.0] * 3, [0.0] * 3]


def test_joint_loss_adds_the_actors_own_ppo_and_distillation():
    new, b = tiny(LOG_R)
    new.actor_logp = torch.full((2, 3), -2.0, dtype=f64, requires_grad=True)
    new.kl = torch.full((2, 3), 0.25, dtype=f64, requires_grad=True)
    b.actor_logp_ref = torch.full((2, 3), -2.0, dtype=f64)
    cfg = make_cfg(objective="none", actor="base:actor", surrogate="gspo", actor_correction="tis", actor_is_cap=1.5)
    value, logs = objectives.joint_loss(new, b, {**STATS, "distill": 2.0}, cfg)
    own = -b.adv * (b.actor_logp_ref - b.logp_inf).exp().clamp_max(1.5)
    assert torch.allclose(value, -b.adv + own + 2.0 * 0.25)
    value.sum().backward()
    assert torch.allclose(new.actor_logp.grad, own) and torch.allclose(new.kl.grad, torch.full((2, 3), 2.0, dtype=f64))
    own = objectives.actor_config(replace(cfg, clip=False, positive_only=True))
    assert (
        own.clip_low == 0.2 and own.clip and not own.positive_only
    )  # standard PPO, whatever the policy's surrogate does


def test_closed_loop_moves_lambda_towards_the_set_point_with_bounded_gain():
    cfg = make_cfg(actor="base:actor", distill_kl_target=0.1, distill_gain=0.2, distill_lambda=1.0)
    controllers, seen = {}, []
    for kl in (0.5, 0.15, 0.1, 0.05):
        objectives.update_controllers(
            controllers, {"distill_kl": kl, "z_low_sum": 0.0, "accept_sum": 0.0, "tokens": 1.0}, cfg
        )
        seen.append(controllers["distill"])
    want = [0.2, 0.3, 0.3, 0.2]  # +gain (bounded), +gain/2, 0, -gain/2
    assert [math.log(x) for x in seen] == pytest.approx(want)
    objectives.update_controllers(
        controllers, {"distill_kl": math.nan, "z_low_sum": 0.0, "accept_sum": 0.0, "tokens": 1.0}, cfg
    )
    objectives.update_controllers(
        controllers, {"distill_kl": 9.0, "stepped": 0.0}, cfg
    )  # a skipped step teaches nothing
    assert controllers["distill"] == seen[-1]
    stats = objectives.prepare(tiny(LOG_R)[1], One, make_cfg(objective="none"), controllers)
    assert stats["distill"] == seen[-1]


def test_kappa_of_target_new_comes_from_the_last_update():
    cfg = make_cfg(objective="jackpot", obrs_target="new")
    controllers = {"kappa": None}
    assert objectives.passes_needed(cfg, controllers, 1) == {"ref"}
    objectives.update_controllers(controllers, {"accept_sum": 90.0, "z_low_sum": 80.0, "tokens": 100.0}, cfg)
    assert controllers["kappa"] == pytest.approx(1.125)
    assert objectives.passes_needed(cfg, controllers, 1) == set() and objectives.passes_needed(cfg, controllers, 4) == {
        "ref"
    }
    assert objectives.passes_needed(replace(cfg, actor="base:actor"), controllers, 1) == {
        "ref"
    }  # S needs the policy's own top-K each time
    assert objectives.passes_needed(replace(cfg, kappa="exact"), controllers, 1) == {"ref", "fresh"}
    b = tiny(LOG_R)[1]
    assert objectives.prepare(b, One, cfg, controllers)["kappa"] == pytest.approx(1.125)


def test_kappa_and_budget_of_target_ref():
    new, b = tiny([[LN(2), -LN(2), 0.0], [LN(4), -LN(4), 0.0]])
    b.support_logp, b.support_logp_ref = b.logp_inf[..., None], b.logp_ref[..., None]
    b.u = torch.full((2, 3), 0.3, dtype=f64)
    cfg = make_cfg(objective="jackpot")
    # a = 1, 1/2, 1, 1, 1/4, 1; u = 0.3 accepts 5 of 6; Z_low = min(p_inf, p_ref) per token
    z_low = torch.minimum(b.logp_inf, b.logp_ref).exp().sum()
    assert objectives.prepare(b, One, cfg, {})["kappa"] == pytest.approx(5 / float(z_low))
    expected = objectives.prepare(b, One, replace(cfg, obrs_mask="expected"), {})
    assert expected["kappa"] == pytest.approx(4.75 / float(z_low))
    # budget 0.5 over r = .25, .5, 1, 1, 2, 4: all but 2 and 4 below: lam = 2.75 / (3 - 2); lies in (1, 2]? no: k = 5: 4.75 / (3 - 1) = 2.375
    assert objectives.prepare(b, One, replace(cfg, obrs_accept_rate=0.5), {})["lam"] == pytest.approx(2.375)


def test_presets_and_axes():
    cfg = make_cfg(objective="jackpot")
    assert (cfg.correction, cfg.surrogate, cfg.ratio_base, cfg.obrs_target) == ("obrs", "ppo", "ref", "ref")
    cfg = make_cfg(objective="jackpot", surrogate="gspo", obrs_target="new", reduction="seq-mean-token-mean")
    assert (cfg.correction, cfg.surrogate, cfg.clip_low, cfg.obrs_target) == ("obrs", "gspo", 3e-4, "new")
    cfg = make_cfg(objective="seq_tis", is_cap=9.0)
    assert cfg.is_cap == 9.0 and make_cfg(objective="seq_tis").is_cap == 4.0 and make_cfg(objective="tis").is_cap == 2.0
    with pytest.raises(ValueError, match="ratio_base=inf already corrects"):
        make_cfg(objective="ppo_is", correction="tis")
    with pytest.raises(ValueError, match="ratio_base=new"):
        make_cfg(objective="none", correction="tis_adjusted")
    assert make_cfg(objective="ppo_is", correction="tis", allow_double_correction=True).ratio_base == "inf"


@pytest.mark.parametrize(
    "flags",
    [
        dict(objective="jackpot"),
        dict(objective="jackpot", obrs_accept_rate=0.8),
        dict(objective="icepop", loss_denominator="kept"),
        dict(objective="icepop", loss_denominator="kept", reduction="seq-mean-token-mean"),
    ],
    ids=lambda f: "-".join(map(str, f.values())),
)
def test_prepare_never_looks_under_the_mask(flags):
    got = []
    for x in (0.0, 9.0):
        _, b = tiny([[LN(2), -LN(2), x], [LN(4), 0.1, -x]], mask=[[True, True, False]] * 2)
        b.support_logp, b.support_logp_ref = b.logp_inf[..., None], b.logp_ref[..., None]
        got.append(objectives.prepare(b, One, make_cfg(**flags), {}))
    assert all(
        torch.equal(torch.as_tensor(got[0][k]), torch.as_tensor(got[1][k])) for k in got[0] if got[0][k] is not None
    )


def test_the_actors_own_loss_is_plain_ppo_under_any_policy_objective():
    own = objectives.actor_config(make_cfg(objective="jackpot_adjusted", actor="base:actor", dual_clip=3.0))
    assert own.ratio_base == "ref" and own.dual_clip == 0.0
    new, b = tiny(LOG_R, mask=[[True] * 3, [True, False, False]])
    new.actor_logp, b.actor_logp_ref = (
        torch.full((2, 3), -2.0, dtype=f64, requires_grad=True),
        torch.full((2, 3), -2.0, dtype=f64),
    )
    new.kl, got = torch.full((2, 3), 0.25, dtype=f64, requires_grad=True), []
    for factor in (None, torch.full((2, 1), 7.0, dtype=f64)):  # the policy's kept denominator is not the actor's
        stats = {**STATS, "kept_factor": factor, "distill": 1.0}
        _, logs = objectives.joint_loss(new, b, stats, make_cfg(objective="none", actor="base:actor"))
        got.append(logs["actor_loss"])
        assert logs["distill"].tolist() == [[0.25] * 3, [0.25, 0, 0]]
    for flags in (dict(reject="geo"), dict(veto=0.9), dict(is_floor=1.9)):  # nor is what the policy drops or bounds
        _, logs = objectives.joint_loss(
            new,
            b,
            {**STATS, "distill": 1.0},
            make_cfg(objective="tis", actor="base:actor", actor_correction="tis", **flags),
        )
        got.append(logs["actor_loss"])
    plain = objectives.joint_loss(
        new, b, {**STATS, "distill": 1.0}, make_cfg(objective="tis", actor="base:actor", actor_correction="tis")
    )[1]["actor_loss"]
    assert torch.equal(*got[:2]) and all(torch.equal(x, plain) for x in got[2:])


def test_bounds_of_the_closed_loop_and_clamps():
    cfg = make_cfg(
        actor="base:actor", distill_kl_target=0.1, distill_gain=5.0, distill_lambda=1.0, distill_lambda_max=2.0
    )
    controllers = {}
    for kl, want in ((9.0, 2.0), (9.0, 2.0), (0.0, 2.0 * math.exp(-5)), (0.0, 1e-4), (0.0, 1e-4)):
        objectives.update_controllers(controllers, {"distill_kl": kl}, cfg)
        assert controllers["distill"] == pytest.approx(want)
    assert float(objectives.geo_ratio(tiny([[60.0] * 3] * 2)[1], make_cfg())[0]) == pytest.approx(math.exp(20))


def test_a_correction_that_forgets_to_detach_changes_no_gradient(monkeypatch):
    """Whoever adds a correction need not think of it: weight and keep enter the loss as numbers."""
    grads = []
    for leak in (True, False):

        def own(new, batch, stats, cfg):
            x = new.logp if leak else new.logp.detach()
            return x.exp(), (x.exp() * 2).clamp(max=1.0), {}

        monkeypatch.setitem(objectives.CORRECTIONS, "none", own)
        new, b = tiny([[0.1, -0.2, 0.3], [0.0, 0.5, -0.4]])
        value, _ = objectives.loss(new, b, STATS, make_cfg(objective="grpo"))
        value.sum().backward()
        grads.append(new.logp.grad)
    assert torch.equal(*grads) and float(grads[0].abs().sum()) > 0.1
