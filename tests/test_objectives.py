"""Surrogates, reductions, advantages and the loss: values by hand, gradients against derivatives by hand."""

import math
import re
from dataclasses import fields, replace

import pytest
import torch
from conftest import LN, LOG_R, STATS, One, f64, make_cfg, tiny

import batching
import objectives
import presets
from corrections import CORRECTIONS, REJECTIONS, Correction
from model import TokenStats


def step(new, batch, cfg):
    """(unreduced loss, logs, reduced loss) of one optimizer step."""
    stats = objectives.prepare(batch, One, cfg, {})
    value, logs = objectives.loss(new, batch, stats, cfg)
    return value, logs, objectives.reduce(value, batch.mask, stats, cfg)


def surrogate_of(name, new, batch, **flags):
    """(value, clipped, ratio) of a surrogate on p_new / p_ref."""
    cfg = make_cfg(objective="none", surrogate=name, **flags)
    return objectives.surrogate_of(new.logp, batch.logp_ref, batch.adv, batch.mask, cfg)


# ---------------------------------------------------------------------------------------------------------------------
# Surrogates
# ---------------------------------------------------------------------------------------------------------------------


def ratios_of_two():
    """First response A = 1, ratios 2, 1/2, 1 (geometric mean 1); second A = -1, ratios 2, 2, 2."""
    return tiny(LOG_R, new=[[-3 + LN(2), -3 - LN(2), -3.0], [-3 + LN(2)] * 3], ref=[[-3.0] * 3, [-3.0] * 3])


def sapo_by_hand(tau, r):
    return 4 / tau / (1 + math.exp(-tau * (r - 1)))


@pytest.mark.parametrize(
    "surrogate, want",
    [
        ("reinforce", [[-3 + LN(2), -3 - LN(2), -3], [3 - LN(2)] * 3]),
        ("ppo", [[1.28, 0.5, 1], [-2, -2, -2]]),  # min: A > 0 is cut above, A < 0 is not
        ("gspo", [[1, 1, 1], [-2, -2, -2]]),
        ("sapo", [[sapo_by_hand(1, 2), sapo_by_hand(1, 0.5), sapo_by_hand(1, 1)], [-sapo_by_hand(1.05, 2)] * 3]),
        ("cispo", [[1.28 * (-3 + LN(2)), 0.8 * (-3 - LN(2)), -3], [-1.28 * (-3 + LN(2))] * 3]),
        # A > 0: log 2 is cut to 0.4; A < 0: no log-ratio is below -0.4
        ("gmpo", [[math.exp((0.4 - LN(2)) / 3)] * 3, [-2, -2, -2]]),
        ("dppo_tv", [[2, 0.5, 1], [-2, -2, -2]]),  # p moves by 0.05 and 0.025: below 0.2
        ("dppo_kl", [[2, 0.5, 1], [-2, -2, -2]]),
    ],
)
def test_surrogates_by_hand(surrogate, want):
    value, _, _ = surrogate_of(surrogate, *ratios_of_two())
    assert torch.allclose(value, torch.tensor(want, dtype=f64))


@pytest.mark.parametrize(
    "surrogate, clipped, ratio",
    [
        ("reinforce", [[False] * 3, [False] * 3], None),
        ("ppo", [[True, False, False], [False] * 3], [[2, 0.5, 1], [2] * 3]),
        ("gspo", [[False] * 3, [False] * 3], [[1] * 3, [2] * 3]),
        ("tbpo", [[False] * 3, [True] * 3], [[1] * 3, [2] * 3]),
        ("sapo", [[False] * 3, [False] * 3], [[2, 0.5, 1], [2] * 3]),
        ("cispo", [[True, True, False], [True] * 3], [[2, 0.5, 1], [2] * 3]),
        ("gmpo", [[True, False, False], [False] * 3], [[1] * 3, [2] * 3]),
        ("dppo_tv", [[False] * 3, [False] * 3], [[2, 0.5, 1], [2] * 3]),
    ],
)
def test_clipped_tokens_and_the_ratio(surrogate, clipped, ratio):
    _, got, r = surrogate_of(surrogate, *ratios_of_two())
    assert got.tolist() == clipped
    if ratio is None:
        assert r is None
    else:
        assert torch.allclose(r, torch.tensor(ratio, dtype=f64))


@pytest.mark.parametrize(
    "surrogate, slope",
    [
        ("ppo", [0, 0.5, 1]),  # a clipped token has no gradient
        ("cispo", [1.28, 0.8, 1]),  # a clipped token keeps its gradient
        ("gspo", [1, 1, 1]),  # d/dx_t sum_t s = 3 s / 3
        ("gmpo", [0, math.exp((0.4 - LN(2)) / 3), math.exp((0.4 - LN(2)) / 3)]),
        ("dppo_tv", [2, 0.5, 1]),
    ],
)
def test_gradients_of_surrogates(surrogate, slope):
    new, b = ratios_of_two()
    value, _, _ = surrogate_of(surrogate, new, b)
    value.sum().backward()
    assert new.logp.grad[0].tolist() == pytest.approx(slope)


@pytest.mark.parametrize(
    "divergence, low, high, closed",
    [
        # p_base 0.5, 0.5, 0.2; p_new 0.8, 0.3, 0.1: the gaps are 0.3, -0.2, -0.1
        ("tv", 0.15, 0.16, [[True, False, False], [False, True, False]]),
        ("tv", 0.05, 0.35, [[False] * 3, [False, True, True]]),
        # 0.5 log(0.5 / 0.8) + 0.5 log(0.5 / 0.2) = 0.2231; 0.5 log(0.5 / 0.3) + 0.5 log(0.5 / 0.7) = 0.0872;
        # 0.2 log 2 + 0.8 log(0.8 / 0.9) = 0.0444
        ("kl", 0.05, 0.06, [[True, False, False], [False, True, False]]),
        ("kl", 0.04, 0.23, [[False] * 3, [False, True, True]]),
        ("kl", math.inf, math.inf, [[False] * 3, [False] * 3]),
    ],
)
def test_dppo_masks_tokens_that_move_further_beyond_their_bound(divergence, low, high, closed):
    """The first response has A = 2, the second A = -3; a move back to p_base is never masked."""
    logp = torch.tensor([[0.8, 0.3, 0.1]] * 2, dtype=f64).log().requires_grad_()
    base = torch.tensor([[0.5, 0.5, 0.2]] * 2, dtype=f64).log()
    adv = torch.tensor([[2.0], [-3.0]], dtype=f64)
    value, clipped, r = objectives.dppo(logp, base, adv, low, high, divergence)
    want = torch.tensor([[1.6, 0.6, 0.5]], dtype=f64) * adv * ~torch.tensor(closed)
    assert clipped.tolist() == closed
    assert torch.allclose(value, want) and torch.allclose(r, torch.tensor([[1.6, 0.6, 0.5]], dtype=f64))
    value.sum().backward()
    assert torch.allclose(logp.grad, want)


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    """Masked tokens do not count; bounds apply to log r, on the side of A."""
    x = torch.tensor([[0.9, 9.0, -0.7], [0.3, -0.8, 9.0]], dtype=f64, requires_grad=True)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    adv = torch.tensor([[2.0], [-1.0]], dtype=f64)
    value, clipped, s = objectives.gmpo(x, mask, adv, 0.5, 0.6)
    want = [2 * math.exp((0.6 - 0.7) / 2), -math.exp((0.3 - 0.5) / 2)]
    assert value[:, 0].tolist() == pytest.approx(want)
    assert s[:, 0].tolist() == pytest.approx([math.exp(0.1), math.exp(-0.25)])
    assert (clipped & mask).tolist() == [[True, False, False], [False, True, False]]
    value[:, 0].sum().backward()
    half = [x / 2 for x in want]
    assert torch.allclose(x.grad, torch.tensor([[0, 0, half[0]], [half[1], 0, 0]], dtype=f64))


def test_dual_clip_and_no_clip():
    value, clipped, _ = surrogate_of("ppo", *ratios_of_two(), dual_clip=1.5)
    assert value[0].tolist() == pytest.approx([1.28, 0.5, 1])
    assert value[1].tolist() == [-1.5] * 3
    assert clipped.tolist() == [[True, False, False], [True] * 3]  # a positive advantage has no floor
    value, clipped, _ = surrogate_of("ppo", *ratios_of_two(), clip=False)
    assert value[0].tolist() == pytest.approx([2, 0.5, 1])
    assert not clipped.any()


def test_an_infinite_upper_edge_leaves_the_lower_edge_and_the_dual_clip():
    new, b = tiny(LOG_R, new=[[-1 + LN(9), -1.0, -1.0], [-1 - LN(2), -1.0, -1 + LN(4)]])
    value, clipped, _ = surrogate_of("ppo", new, b, clip_high=math.inf)
    assert value[0].tolist() == pytest.approx([9, 1, 1])
    assert value[1].tolist() == pytest.approx([-0.8, -1, -4])
    assert clipped.tolist() == [[False] * 3, [True, False, False]]
    value, _, _ = surrogate_of("ppo", new, b, clip_high=math.inf, dual_clip=3.0)
    assert value[1].tolist() == pytest.approx([-0.8, -1, -3])


@pytest.mark.parametrize(
    "log_s, adv, value, slope",
    [
        (0.0, 1, 1.0, 1),
        (3e-4, 1, 1.0003, 1),
        (5e-4, 1, 1.0004, 0),
        (-0.5, 1, math.exp(-0.5), 1),  # A > 0: only an upper edge
        (0.0, -1, -1.0, 1),
        (6e-4, -1, -1.0006, 1),
        (8e-4, -1, -1.0007, 0),
        (-2e-4, -1, -0.9998, 1),
        (-5e-4, -1, -0.9997, 0),
    ],
)
def test_tbpo_band(log_s, adv, value, slope):
    """One response of two tokens with log s = log_s.

    The value is clip(s) A; d/dlogp is s A / 2 a token inside the band and 0 outside."""
    base = torch.tensor([[-1.0, -2.0, 5.0]], dtype=f64)
    logp = (base + torch.tensor([[2 * log_s, 0.0, 3.0]], dtype=f64)).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    advantage = torch.tensor([[float(adv)]], dtype=f64)
    got, out, s = objectives.surrogate_of(logp, base, advantage, mask, make_cfg(objective="tbpo"))
    assert torch.allclose(got, torch.full((1, 3), value, dtype=f64), atol=1e-7)
    assert out.tolist() == [[slope == 0] * 3]
    assert torch.allclose(s, torch.full((1, 3), math.exp(log_s), dtype=f64))
    got[0, 0].backward()
    want = slope * math.exp(log_s) * adv / 2 * torch.tensor([[1.0, 1.0, 0.0]], dtype=f64)
    assert torch.allclose(logp.grad, want, atol=1e-9)


def test_tbpo_and_gspo_are_equal_without_clip():
    new, b = tiny(LOG_R, new=[[-0.5, -2.0, -1.0], [-0.2] * 3])
    tbpo, clipped, _ = surrogate_of("tbpo", new, b, clip=False)
    gspo, _, _ = surrogate_of("gspo", new, b, clip=False)
    assert torch.allclose(tbpo, gspo)
    assert not clipped.any()


@pytest.mark.parametrize("surrogate", ["ppo", "gspo", "tbpo", "sapo", "cispo"])
def test_the_clamp_reaches_surrogates(surrogate):
    """Log-ratios of 1 under a clamp of 0.5 give the ratios of 0.5 under a wide clamp."""
    one = torch.ones(1, 1, dtype=f64)
    base, mask = torch.zeros(1, 2, dtype=f64), torch.ones(1, 2, dtype=torch.bool)
    wide, tight = (make_cfg(objective="none", surrogate=surrogate, clip=False, log_ratio_clamp=c) for c in (20.0, 0.5))
    f = objectives.surrogate_of
    far, half = torch.full((1, 2), 1.0, dtype=f64), torch.full((1, 2), 0.5, dtype=f64)
    _, _, clamped = f(far, base, one, mask, tight)
    _, _, unclamped = f(far, base, one, mask, wide)
    assert torch.allclose(clamped, half.exp())
    assert torch.allclose(unclamped, far.exp())
    assert not torch.allclose(f(far, base, one, mask, tight)[0], f(far, base, one, mask, wide)[0])


# ---------------------------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets.OBJECTIVES)
def test_equal_policies_give_reinforce(name):
    """p_inf = p_ref = p_new, Z = 1: every objective's gradient is REINFORCE's under its own reduction,
    -A_t / denominator."""
    new, b = tiny([[0.0] * 3] * 2, mask=[[True, True, True], [True, False, False]])
    new.z = b.z_ref = torch.ones(2, 3, dtype=f64)
    b.mask_uniforms = torch.zeros(2, 3, dtype=f64)
    whole = torch.tensor([0.7, 0.3], dtype=f64).log().expand(2, 3, 2)
    b.support_logp = b.support_logp_ref = new.support_logp = whole
    b.tail_ref = new.tail = torch.zeros(2, 3, dtype=f64)
    cfg = make_cfg(objective=name)
    # GEPO: equal responses, no mixing
    gepo = {"log_group_mean": torch.full((2, 1), -1.0, dtype=f64), "mixing": torch.zeros(2, 1, dtype=f64)}
    stats = replace(STATS, tokens=4.0, **gepo)
    value, _ = objectives.loss(new, b, stats, cfg)
    objectives.reduce(value, b.mask, stats, cfg).backward()
    per_token = {
        "token-mean": [[1 / 4] * 3, [1 / 4, 0, 0]],
        "seq-mean-token-mean": [[1 / 6] * 3, [1 / 2, 0, 0]],
        "seq-mean-token-sum-norm": [[1 / 64] * 3, [1 / 64, 0, 0]],
    }[cfg.reduction]
    assert torch.allclose(new.logp.grad, -b.adv * torch.tensor(per_token, dtype=f64), atol=1e-12)


def test_obrs_with_lambda_above_one_scales_equal_policies_by_one_over_lambda():
    new, b = tiny([[0.0] * 3] * 2)
    cfg = make_cfg(objective="jackpot", obrs_lambda=2.0, obrs_mask="expected", actor="base:actor")
    b.z_ref = torch.full((2, 3), 0.5, dtype=f64)  # sum min(p, p / 2)
    value, _ = objectives.loss(new, b, replace(STATS, lam=2.0), cfg)
    objectives.reduce(value, b.mask, STATS, cfg).backward()
    # a = 1/2, w = Z lambda = 1: half of REINFORCE
    assert torch.allclose(new.logp.grad, -b.adv.expand(2, 3) / 6 * 0.5)


def test_ppo_is_ratio_is_new_over_inf():
    new, b = tiny([[LN(2), 0.0, -LN(4)], [0.0] * 3], adv=(-1.0, 1.0))
    value, logs = objectives.loss(new, b, STATS, make_cfg(objective="ppo_is"))
    # the metrics use the correcting ratio
    assert torch.allclose(logs["weight"][0], torch.tensor([2.0, 1.0, 0.25], dtype=f64))
    # -min(-r, -clip(r)) = max(r, clip(r)): 1/4 is cut at 0.8
    assert torch.allclose(value[0], torch.tensor([2.0, 1.0, 0.8], dtype=f64))
    assert torch.allclose(value[1], torch.tensor([-1.0] * 3, dtype=f64))


def test_weights_carry_no_gradient_and_multiply_the_surrogate():
    new, b = tiny(LOG_R, adv=(1.0, 0.5))
    value, logs = objectives.loss(new, b, STATS, make_cfg(objective="tis"))
    value.sum().backward()
    assert torch.allclose(new.logp.grad, torch.tensor([[-2, -0.5, -1], [-1, -1, -1]], dtype=f64))
    assert not logs["weight"].requires_grad


@pytest.mark.parametrize("denominator, total", [("proposed", 6), ("kept", 2)])
def test_rejected_tokens_have_no_gradient_and_the_kept_denominator_rescales(denominator, total):
    new, b = tiny(LOG_R, adv=(1.0, 1.0))
    cfg = make_cfg(objective="icepop", rs_low=0.6, rs_high=3.0, loss_denominator=denominator)
    step(new, b, cfg)[-1].backward()
    assert torch.allclose(new.logp.grad, -torch.tensor([[2, 0, 1], [0, 0, 0]], dtype=f64) / total)


@pytest.mark.parametrize(
    "reduction, want",
    [
        # one response keeps 2 of 3 tokens, the second none: mean over 1 response of (2 + 1) / 2
        ("seq-mean-token-mean", -1.5),
        # over the only response with a kept token
        ("seq-mean-token-sum-norm", -3 / 32),
    ],
)
def test_the_kept_denominator_of_responses(reduction, want):
    new, b = tiny(LOG_R, adv=(1.0, 1.0))
    flags = dict(objective="icepop", rs_low=0.6, rs_high=3.0, loss_denominator="kept")
    total = step(new, b, make_cfg(**flags, reduction=reduction))[-1]
    assert float(total.detach()) == pytest.approx(want)


def test_rejections_rescale_the_kept_denominator():
    """reject=token on `is` is icepop, in the loss and in its kept denominator."""
    got = []
    for flags in (dict(objective="icepop"), dict(objective="is", reject="token")):
        new, b = tiny(LOG_R)
        cfg = make_cfg(**flags, loss_denominator="kept", rs_low=0.6, rs_high=3.0)
        got.append(float(step(new, b, cfg)[-1].detach()))
        assert "ref" in objectives.passes_needed(cfg, {}, 1)
        assert objectives.passes_needed(replace(cfg, loss_denominator="proposed"), {}, 1) == set()
    assert got[0] == got[1] != 0


@pytest.mark.parametrize(
    "reject, keep, loss",
    [
        # r - 1 - log r = 1 - log 2, log 2 - 1/2, 0; 3 - log 4 three times
        ("token_k3", [[0, 1, 1], [0, 0, 0]], -(0.5 + 1) / 2),
        ("seq_mean_k3", [[1, 1, 1], [0, 0, 0]], -(2 + 0.5 + 1) / 3),  # mean 1/6; 3 - log 4
    ],
)
def test_rejections_by_k3_in_a_loss(reject, keep, loss):
    new, b = tiny(LOG_R, adv=(1.0, 1.0))
    cfg = make_cfg(objective="is", reject=reject, rs_high=0.2, loss_denominator="kept")
    _, logs, total = step(new, b, cfg)
    total.backward()
    assert logs["keep"].tolist() == keep
    assert float(total.detach()) == pytest.approx(loss)
    assert torch.equal(new.logp.grad != 0, torch.tensor(keep) == 1)


@pytest.mark.parametrize("objective", ["icepop", "seq_mis", "geo_rs", "jackpot"])
@pytest.mark.parametrize("denominator", ["proposed", "kept"])
@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_everything_rejected_is_a_finite_zero(objective, denominator, reduction):
    new, b = tiny([[9.0] * 3] * 2)
    b.support_logp = torch.full((2, 3, 2), -torch.inf, dtype=f64)  # Z is unknown
    b.support_logp_ref = torch.full((2, 3, 2), -5.0, dtype=f64)
    b.mask_uniforms = torch.ones(2, 3, dtype=f64)
    b.tail_ref = torch.zeros(2, 3, dtype=f64)
    if objective == "jackpot":
        b.logp_inf = b.logp_ref + 30  # p_tgt / p_inf = e^-30
    cfg = make_cfg(objective=objective, loss_denominator=denominator, reduction=reduction)
    _, logs, total = step(new, b, cfg)
    total.backward()
    assert float(logs["keep"].sum()) == 0
    assert float(total.detach()) == 0
    assert torch.equal(new.logp.grad, torch.zeros(2, 3, dtype=f64))


@pytest.mark.parametrize(
    "reduction, want",
    [("token-mean", 1.0), ("seq-mean-token-mean", 1.0), ("seq-mean-token-sum-norm", 3 / 32)],
)
def test_empty_responses_change_nothing(reduction, want):
    new, b = tiny(LOG_R, mask=[[True] * 3, [False] * 3])
    cfg = make_cfg(objective="none", reduction=reduction)
    stats = objectives.prepare(b, One, cfg, {})
    assert (stats.tokens, stats.sequences) == (3.0, 1.0)
    assert float(step(new, b, cfg)[-1].detach()) == pytest.approx(-want)


@pytest.mark.parametrize(
    "reduction, want",
    [
        ("token-mean", 10 / 4),
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum-norm", (6 + 4) / 32 / 2),
    ],
)
def test_reductions_by_hand(reduction, want):
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
    mask = torch.tensor([[True] * 3, [True, False, False]])
    stats = replace(STATS, tokens=4.0, sequences=2.0)
    assert float(objectives.reduce(x, mask, stats, make_cfg(reduction=reduction))) == pytest.approx(want)


def test_the_loss_detaches_weight_and_keep(monkeypatch):
    """A new correction need not detach: weight and keep enter the loss as numbers."""

    def leaks(new):
        return new.logp.exp(), (new.logp.exp() * 2).clamp(max=1.0)

    def detaches(new):
        weight, keep = leaks(new)
        return weight.detach(), keep.detach()

    grads = []
    for apply in (leaks, detaches):
        monkeypatch.setitem(CORRECTIONS, "none", Correction(apply))
        new, b = tiny([[0.1, -0.2, 0.3], [0.0, 0.5, -0.4]])
        value, _ = objectives.loss(new, b, STATS, make_cfg(objective="grpo"))
        value.sum().backward()
        grads.append(new.logp.grad)
    assert torch.equal(*grads)
    assert float(grads[0].abs().sum()) > 0.1


# ---------------------------------------------------------------------------------------------------------------------
# Advantages, presets
# ---------------------------------------------------------------------------------------------------------------------


def test_advantages_by_hand():
    r = torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert batching.grpo_no_std(r).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert torch.allclose(batching.grpo(r), torch.tensor([0.5, -0.5, -0.5, 0.5]) / (math.sqrt(1 / 3) + 1e-6))
    assert torch.allclose(batching.rloo(r), torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3]))
    assert batching.rloo(torch.tensor([3.0, 0.0, 0.0])).tolist() == [3.0, -1.5, -1.5]
    assert batching.maxrl(torch.tensor([1.0, 0.0, 0.0, 0.0])).tolist() == [3.0, -1.0, -1.0, -1.0]
    assert (
        batching.maxrl(torch.tensor([0.0, 0.0])).tolist() == batching.maxrl(torch.tensor([2.0, 2.0])).tolist() == [0, 0]
    )


@pytest.mark.parametrize("name", batching.ADVANTAGES)
@pytest.mark.parametrize("G", [1, 4])
def test_a_group_of_equal_rewards_has_no_advantage(name, G):
    assert batching.ADVANTAGES[name](torch.full((G,), 0.3)).tolist() == [0.0] * G


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("decoupled_token_is", dict(objective="tis")),
        ("decoupled_seq_is", dict(objective="seq_tis", is_cap=2.0)),
        ("bypass_ppo_clip", dict(objective="ppo_is")),
        ("decoupled_geo_rs", dict(objective="none", reject="geo", rs_low=0.999, rs_high=1.001)),
        ("token_truncate", dict(objective="tis", is_cap=3.0)),
        ("token_mask", dict(objective="areal_drop", is_cap=3.0)),
        ("sequence_truncate", dict(objective="seq_tis", is_cap=3.0)),
        ("sequence_mask", dict(objective="seq_mis", rs_high=3.0)),
        ("seq_mask_tis", dict(objective="is", reject="geo", rs_low=0.5, rs_high=5.0)),
        ("decoupled_seq_is_rs", dict(objective="seq_tis", is_cap=2.0, reject="sequence", rs_low=0.5, rs_high=2.0)),
        ("dr_grpo", dict(objective="grpo", advantage="grpo_no_std", reduction="seq-mean-token-sum-norm")),
        ("dapo", dict(objective="grpo")),
        ("decoupled_token_icepop", dict(objective="icepop", rs_low=0.5, rs_high=5.0)),
        ("decoupled_geo_rs_token_tis", dict(objective="tis", reject="geo", rs_low=0.999, rs_high=1.001)),
        ("decoupled_k3_rs", dict(objective="none", reject="seq_mean_k3", rs_high=0.01)),
        ("decoupled_k3_rs_seq_tis", dict(objective="seq_tis", is_cap=2.0, reject="seq_mean_k3", rs_high=0.01)),
        ("decoupled_k3_rs_token_tis", dict(objective="tis", reject="seq_mean_k3", rs_high=0.01)),
        (
            "bypass_ppo_clip_k3_rs",
            dict(objective="ppo_is", reject="seq_mean_k3", rs_high=0.01, correction_target="new"),
        ),
        ("bypass_pg_is", dict(objective="seq_tis", is_cap=2.0, surrogate="reinforce", correction_target="new")),
        ("skyrl_geo_mask", dict(objective="geo_rs", rs_low=0.99, rs_high=1.01)),
        ("slime_tis", dict(objective="tis", clip_high=0.2, reduction="seq-mean-token-mean")),
        ("areal_token_mask", dict(objective="areal_drop", clip_high=0.2)),
        (
            "prime_rl",
            {
                **dict(objective="none", surrogate="dppo_tv", ratio_base="inf", clip_low=0.2, clip_high=0.2),
                **dict(cppo_beta=0.002, cppo_kl="k2", advantage="grpo_no_std"),
            },
        ),
    ],
)
def test_presets_named_after_other_frameworks(theirs, ours):
    assert replace(make_cfg(objective=theirs), objective="") == replace(make_cfg(**ours), objective="")


@pytest.mark.parametrize("name", presets.OBJECTIVES)
def test_every_preset_is_a_configuration(name):
    """For one model and for two; every open field of the preset is filled."""
    for actor in ("none", "base:actor"):
        cfg = make_cfg(objective=name, actor=actor)
        assert None not in (cfg.correction, cfg.surrogate, cfg.reject, cfg.correction_target, cfg.clip_low)


def test_weights_over_their_mean():
    """Tokens: r = 2, 1/2, 1 and 4 twice, capped at 3, mean 9.5 / 5. Responses: R = 1 and 16 (dropped), mean 1 / 2."""
    new, b = tiny(LOG_R, mask=[[True] * 3, [True, True, False]])
    cfg = make_cfg(objective="tis", is_cap=3.0, normalize_weights=True, reject="token", rs_low=0.7, rs_high=9.0)
    stats = objectives.prepare(b, One, cfg, {})
    assert stats.weight_mean == pytest.approx(9.5 / 5)  # tokens dropped by --reject count
    _, logs = objectives.loss(new, b, stats, cfg)
    want = torch.tensor([[2, 0.5, 1], [3, 3, 3]], dtype=f64) / 1.9
    assert torch.allclose(logs["weight"], want)
    assert logs["keep"].tolist() == [[1, 0, 1], [1, 1, 1]]
    cfg = make_cfg(objective="seq_mis", normalize_weights=True)
    assert objectives.prepare(b, One, cfg, {}).weight_mean == pytest.approx(0.5)
    assert objectives.passes_needed(cfg, {}, 1) == {"ref"}
    nothing = make_cfg(objective="seq_mis", normalize_weights=True, rs_low=99.0, rs_high=100.0)
    assert objectives.prepare(b, One, nothing, {}).weight_mean == 1.0
    actor = objectives.actor_config(replace(cfg, correction_target="new"))
    assert not actor.normalize_weights and actor.correction_target == "ref"


def test_presets_and_axes():
    cfg = make_cfg(objective="jackpot")
    assert (cfg.correction, cfg.surrogate, cfg.ratio_base, cfg.obrs_target) == ("obrs", "ppo", "ref", "ref")
    cfg = make_cfg(objective="jackpot", surrogate="gspo", obrs_target="new", reduction="seq-mean-token-mean")
    assert (cfg.correction, cfg.surrogate, cfg.clip_low, cfg.obrs_target) == ("obrs", "gspo", 3e-4, "new")
    assert make_cfg(objective="seq_tis", is_cap=9.0).is_cap == 9.0
    assert make_cfg(objective="seq_tis").is_cap == 4.0
    assert make_cfg(objective="tis").is_cap == 2.0
    with pytest.raises(ValueError, match="ratio_base=inf already corrects"):
        make_cfg(objective="ppo_is", correction="tis")
    with pytest.raises(ValueError, match="ratio_base=new"):
        make_cfg(objective="none", correction="tis_adjusted")


# ---------------------------------------------------------------------------------------------------------------------
# Before and after the step
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        dict(objective="jackpot"),
        dict(objective="jackpot", obrs_accept_rate=0.8),
        dict(objective="icepop", loss_denominator="kept"),
        dict(objective="icepop", loss_denominator="kept", reduction="seq-mean-token-mean"),
    ],
    ids=lambda flags: "-".join(map(str, flags.values())),
)
def test_prepare_ignores_masked_tokens(flags):
    got = []
    for x in (0.0, 9.0):
        _, b = tiny([[LN(2), -LN(2), x], [LN(4), 0.1, -x]], mask=[[True, True, False]] * 2)
        b.support_logp, b.support_logp_ref = b.logp_inf[..., None], b.logp_ref[..., None]
        got.append(objectives.prepare(b, One, make_cfg(**flags), {}))
    for field in fields(got[0]):
        first, second = (getattr(stats, field.name) for stats in got)
        if first is None:
            assert second is None
        else:
            assert torch.equal(torch.as_tensor(first), torch.as_tensor(second)), field.name


def test_statistics_of_a_micro_batch():
    """Values per response follow their rows; numbers are unchanged."""
    column = torch.tensor([[1.0], [2.0], [3.0]])
    stats = replace(STATS, kept_factor=column, mixing=10 * column)
    part = stats.select([2, 0])
    assert part.kept_factor.tolist() == [[3.0], [1.0]]
    assert part.mixing.tolist() == [[30.0], [10.0]]
    assert part.log_group_mean is None
    assert replace(part, kept_factor=None, mixing=None) == STATS


def test_kappa_and_budget_of_target_ref():
    new, b = tiny([[LN(2), -LN(2), 0.0], [LN(4), -LN(4), 0.0]])
    b.support_logp, b.support_logp_ref = b.logp_inf[..., None], b.logp_ref[..., None]
    b.mask_uniforms = torch.full((2, 3), 0.3, dtype=f64)
    cfg = make_cfg(objective="jackpot")
    # a = 1, 1/2, 1, 1, 1/4, 1; u = 0.3 accepts 5 of 6; Z_low = min(p_inf, p_ref) per token
    z_low = float(torch.minimum(b.logp_inf, b.logp_ref).exp().sum())
    assert objectives.prepare(b, One, cfg, {}).kappa == pytest.approx(5 / z_low)
    expected = objectives.prepare(b, One, replace(cfg, obrs_mask="expected"), {})
    assert expected.kappa == pytest.approx(4.75 / z_low)
    # Budget 0.5 over r = .25, .5, 1, 1, 2, 4. The four smallest below lambda: 2.75 / (3 - 2) = 2.75, not in (1, 2].
    # The five smallest: 4.75 / (3 - 1) = 2.375, in (2, 4].
    assert objectives.prepare(b, One, replace(cfg, obrs_accept_rate=0.5), {}).lam == pytest.approx(2.375)


def test_no_pass_for_a_ref_between_sampler_and_policy():
    cfg = make_cfg(objective="tis", actor="none", ref_from="loglinear")
    assert objectives.passes_needed(cfg, {}, 4) == set()
    assert objectives.passes_needed(replace(cfg, ref_from="pass"), {}, 4) == {"ref"}
    new, b = tiny(LOG_R)
    b = replace(b, logp_ref=None, staleness=torch.tensor([[1.0, 9.0], [4.0, 9.0]]))
    ref = objectives.with_ref(new, b, cfg).logp_ref
    assert torch.equal(ref[0], b.logp_inf[0])  # the policy of one update ago is the sampler
    assert torch.allclose(ref[1], b.logp_inf[1] / 4 + new.logp.detach()[1] * 3 / 4, atol=1e-12)
    assert not ref.requires_grad
    fresh = replace(b, staleness=torch.zeros(2, 2))
    assert torch.allclose(objectives.with_ref(new, fresh, cfg).logp_ref, new.logp.detach(), atol=1e-12)


def test_kappa_of_target_new_comes_from_the_last_update():
    cfg = make_cfg(objective="jackpot", obrs_target="new")
    controllers = {"kappa": None}
    assert objectives.passes_needed(cfg, controllers, 1) == {"ref"}
    objectives.update_controllers(controllers, {"accept_sum": 90.0, "z_sum": 80.0, "tokens": 100.0}, cfg)
    assert controllers["kappa"] == pytest.approx(1.125)
    assert objectives.passes_needed(cfg, controllers, 1) == set()
    assert objectives.passes_needed(cfg, controllers, 4) == {"ref"}
    # with an actor the support needs the policy's top-K each time
    assert objectives.passes_needed(replace(cfg, actor="base:actor"), controllers, 1) == {"ref"}
    assert objectives.passes_needed(replace(cfg, kappa="exact"), controllers, 1) == {"ref", "fresh"}
    _, b = tiny(LOG_R)
    assert objectives.prepare(b, One, cfg, controllers).kappa == pytest.approx(1.125)


def test_the_controller_of_lambda_distill_has_bounded_gain():
    cfg = make_cfg(actor="base:actor", distill_kl_target=0.1, distill_lambda=1.0)
    nothing = {"z_sum": 0.0, "accept_sum": 0.0, "tokens": 1.0}
    controllers, seen = {}, []
    for kl in (0.5, 0.15, 0.1, 0.05):
        objectives.update_controllers(controllers, {"distill_kl": kl, **nothing}, cfg)
        seen.append(math.log(controllers["distill"]))
    assert seen == pytest.approx([0.1, 0.15, 0.15, 0.1])  # +gain (bounded), +gain/2, 0, -gain/2
    last = controllers["distill"]
    objectives.update_controllers(controllers, {"distill_kl": math.nan, **nothing}, cfg)
    objectives.update_controllers(controllers, {"distill_kl": 9.0, "stepped": 0.0}, cfg)  # a skipped step
    assert controllers["distill"] == last
    stats = objectives.prepare(tiny(LOG_R)[1], One, make_cfg(objective="none"), controllers)
    assert stats.distill_lambda == last


def test_bounds_of_the_controller_of_lambda_distill():
    cfg = make_cfg(actor="base:actor", distill_kl_target=0.1)
    for kl, start, want in ((9.0, 99.0, 100.0), (0.0, 1.0001e-4, 1e-4)):
        controllers = {"distill": start}
        objectives.update_controllers(controllers, {"distill_kl": kl}, cfg)
        assert controllers["distill"] == pytest.approx(want)


# ---------------------------------------------------------------------------------------------------------------------
# Two models
# ---------------------------------------------------------------------------------------------------------------------


def with_actor(new, b):
    """Add an actor with log-probability -2 for every token, and a distillation loss of 1/4."""
    new.actor_logp = torch.full((2, 3), -2.0, dtype=f64, requires_grad=True)
    new.distill_loss = torch.full((2, 3), 0.25, dtype=f64, requires_grad=True)
    b.actor_logp_ref = torch.full((2, 3), -2.0, dtype=f64)
    return new, b


def test_joint_loss_adds_the_actors_ppo_and_distillation():
    new, b = with_actor(*tiny(LOG_R))
    cfg = make_cfg(objective="none", actor="base:actor", surrogate="gspo")
    value, _ = objectives.joint_loss(new, b, replace(STATS, distill_lambda=2.0), cfg)
    actor_loss = -b.adv * (b.actor_logp_ref - b.logp_inf).exp().clamp_max(2.0)
    assert torch.allclose(value, -b.adv + actor_loss + 2.0 * 0.25)
    value.sum().backward()
    assert torch.allclose(new.actor_logp.grad, actor_loss)
    assert torch.allclose(new.distill_loss.grad, torch.full((2, 3), 2.0, dtype=f64))


def test_the_actors_objective_is_plain_ppo():
    cfg = make_cfg(objective="none", actor="base:actor", surrogate="gspo", clip=False)
    actor_cfg = objectives.actor_config(cfg)
    assert actor_cfg.clip_low == 0.2
    assert actor_cfg.clip
    actor_cfg = objectives.actor_config(make_cfg(objective="jackpot_adjusted", actor="base:actor", dual_clip=3.0))
    assert actor_cfg.ratio_base == "ref"
    assert actor_cfg.dual_clip == 0.0


def actor_loss(stats=STATS, **flags):
    """(the actor's PPO loss, the logged distillation loss)."""
    new, b = with_actor(*tiny(LOG_R, mask=[[True] * 3, [True, False, False]]))
    cfg = make_cfg(actor="base:actor", **flags)
    _, logs = objectives.joint_loss(new, b, replace(stats, distill_lambda=1.0), cfg)
    return logs["actor_loss"], logs["distill"]


def test_the_actor_ignores_the_policys_kept_denominator_and_mean_weight():
    plain, distill = actor_loss(objective="none")
    assert distill.tolist() == [[0.25] * 3, [0.25, 0, 0]]
    factor = torch.full((2, 1), 7.0, dtype=f64)
    scaled, distill = actor_loss(replace(STATS, kept_factor=factor, weight_mean=5.0), objective="none")
    assert distill.tolist() == [[0.25] * 3, [0.25, 0, 0]]
    assert torch.equal(plain, scaled)


@pytest.mark.parametrize("flags", [dict(reject="geo"), dict(reject="seq_min:0.9:inf"), dict(is_floor=1.9)])
def test_the_actor_ignores_the_policys_rejections_and_floors(flags):
    plain, _ = actor_loss(objective="tis")
    same, _ = actor_loss(objective="tis", **flags)
    assert torch.equal(plain, same)


def test_a_batch_without_a_ref_pass_takes_ref_from_the_update():
    new, b = tiny(LOG_R, new=[[-0.5, -0.7, -0.9], [-1.1, -1.3, -1.7]])
    new.support_logp = torch.full((2, 3, 2), -2.0, dtype=f64)
    new.z = torch.full((2, 3), 0.4, dtype=f64)
    cfg = make_cfg(objective="jackpot")
    got = objectives.with_ref(new, replace(b, logp_ref=None, z_ref=None), cfg)
    assert torch.equal(got.logp_ref, new.logp.detach())
    assert not got.logp_ref.requires_grad
    assert got.support_logp_ref is not None and torch.equal(got.support_logp_ref, new.support_logp)
    assert torch.equal(got.z_ref, new.z)
    assert got.tail_ref is None
    assert objectives.with_ref(TokenStats(new.logp), b, cfg) is b


def test_the_catalogue_has_every_name():
    page = objectives.catalogue()
    for name in (*CORRECTIONS, *REJECTIONS, *objectives.SURROGATES, *presets.OBJECTIVES):
        assert re.search(rf"^ +{name} +\S", page, re.MULTILINE), name
    assert "tis               weight min(r, C), C = 2" in page and "--is_cap=2\n" in page


def test_positive_only():
    new, b = tiny(LOG_R)
    value, _ = objectives.loss(new, b, STATS, make_cfg(objective="none", positive_only=True))
    plain, _ = objectives.loss(*tiny(LOG_R), STATS, make_cfg(objective="none"))
    assert torch.equal(value, plain * (b.adv > 0))
