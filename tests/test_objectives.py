"""Surrogates, reductions, advantages and the loss by hand; the state between steps. test_oracle.py has the rest."""

import math
import re
from dataclasses import replace

import pytest
import torch
from conftest import LN, LOG_R, One, f64, make_cfg, tiny

import batching
import objectives
import presets
from corrections import CORRECTIONS, REJECTIONS


def step(new, batch, cfg):
    """(logs, reduced loss) of one optimizer step."""
    stats = objectives.prepare(batch, One, cfg, {})
    value, logs = objectives.loss(new, batch, stats, cfg)
    return logs, objectives.reduce(value, batch.mask, stats, cfg)


def surrogate_of(name, new, batch, **flags):
    """(value, clipped, ratio) of a surrogate on p_new / p_ref."""
    cfg = make_cfg(objective="none", surrogate=name, **flags)
    return objectives.surrogate_of(new.logp, batch.logp_ref, batch.adv, batch.mask, cfg)


def test_without_a_ref_pass_ref_is_the_same_forward_pass_without_gradient():
    new, batch = tiny(LOG_R)
    scored = objectives.with_ref(new, replace(batch, logp_ref=None))
    _, loss = step(new, scored, make_cfg(objective="tis", is_cap=2.0))
    loss.backward()
    weights = torch.tensor([[2, 0.5, 1], [2, 2, 2]], dtype=f64)  # min(r, 2)
    torch.testing.assert_close(new.logp.grad, -weights * batch.adv / 6)


def test_the_loss_stops_the_gradient_of_weight_and_mask(monkeypatch):
    """A correction returns a weight p_new and a mask p_new^2 with gradient."""
    new, batch = tiny(LOG_R)
    p = new.logp.exp()
    monkeypatch.setattr(objectives, "apply_correction", lambda *_: (p, p * p, {}))
    scored = objectives.with_ref(new, replace(batch, logp_ref=None))
    step(new, scored, make_cfg(objective="none"))[1].backward()
    torch.testing.assert_close(new.logp.grad, -(p.detach() ** 3) * batch.adv / 6)


# -- Surrogates -------------------------------------------------------------------------------------------------------


def ratios_of_two():
    """First response A = 1, ratios 2, 1/2, 1 (geometric mean 1); second A = -1, ratios 2, 2, 2."""
    return tiny(LOG_R, new=[[-3 + LN(2), -3 - LN(2), -3.0], [-3 + LN(2)] * 3], ref=[[-3.0] * 3, [-3.0] * 3])


def sapo_by_hand(tau, r):
    return 4 / tau / (1 + math.exp(-tau * (r - 1)))


NONE = [[False] * 3, [False] * 3]
BY_TOKEN, BY_RESPONSE = [[2, 0.5, 1], [2] * 3], [[1] * 3, [2] * 3]
DRPO = math.exp(-3) / 2 / 0.04
SAPO = [[sapo_by_hand(1, 2), sapo_by_hand(1, 0.5), sapo_by_hand(1, 1)], [-sapo_by_hand(1.05, 2)] * 3]


@pytest.mark.parametrize(
    "surrogate, flags, want, clipped, ratio",
    [
        ("reinforce", {}, [[-3 + LN(2), -3 - LN(2), -3], [3 - LN(2)] * 3], NONE, None),
        # min: A > 0 is cut above, A < 0 is not
        ("ppo", {}, [[1.28, 0.5, 1], [-2, -2, -2]], [[True, False, False], [False] * 3], BY_TOKEN),
        ("ppo", {"dual_clip": 1.5}, [[1.28, 0.5, 1], [-1.5] * 3], [[True, False, False], [True] * 3], BY_TOKEN),
        ("ppo", {"clip": False}, [[2, 0.5, 1], [-2, -2, -2]], NONE, BY_TOKEN),
        ("gspo", {}, [[1, 1, 1], [-2, -2, -2]], NONE, BY_RESPONSE),
        ("tbpo", {}, [[1, 1, 1], [-1.0007] * 3], [[False] * 3, [True] * 3], BY_RESPONSE),
        ("tbpo", {"clip": False}, [[1, 1, 1], [-2, -2, -2]], NONE, BY_RESPONSE),
        ("sapo", {}, SAPO, NONE, BY_TOKEN),
        (
            *("cispo", {}, [[1.28 * (-3 + LN(2)), 0.8 * (-3 - LN(2)), -3], [-1.28 * (-3 + LN(2))] * 3]),
            *([[True, True, False], [True] * 3], BY_TOKEN),
        ),
        # A > 0: log 2 is cut to 0.4; A < 0: no log-ratio is below -0.4
        (
            *("gmpo", {}, [[math.exp((0.4 - LN(2)) / 3)] * 3, [-2, -2, -2]]),
            *([[True, False, False], [False] * 3], BY_RESPONSE),
        ),
        # p moves by 0.05 and 0.025; a move back to p_base is never masked
        ("dppo_tv", {}, [[2, 0.5, 1], [-2, -2, -2]], NONE, BY_TOKEN),
        (
            "dppo_tv",
            {"clip_high": 0.04, "clip_low": 0.02},
            [[0, 0.5, 1], [-2] * 3],
            [[True, False, False], [False] * 3],
            BY_TOKEN,
        ),
        ("dppo_kl", {}, [[2, 0.5, 1], [-2, -2, -2]], NONE, BY_TOKEN),
        # p_base = e^-3; the penalty is |A| p_base (s - 1)^2 / (2 high), and p moves by e^-3 and -e^-3 / 2
        (
            *("drpo", {"clip_high": 0.04}, [[2 - DRPO, 0.5 - DRPO / 4, 1], [-2 - DRPO] * 3]),
            *([[True, False, False], [False] * 3], BY_TOKEN),
        ),
    ],
)
def test_surrogates_by_hand(surrogate, flags, want, clipped, ratio):
    value, got, r = surrogate_of(surrogate, *ratios_of_two(), **flags)
    assert torch.allclose(value, torch.tensor(want, dtype=f64))
    assert got.tolist() == clipped
    assert r is None if ratio is None else torch.allclose(r, torch.tensor(ratio, dtype=f64))


def test_an_infinite_upper_edge_leaves_the_lower_edge_and_the_dual_clip():
    new, b = tiny(LOG_R, new=[[-1 + LN(9), -1.0, -1.0], [-1 - LN(2), -1.0, -1 + LN(4)]])
    value, clipped, _ = surrogate_of("ppo", new, b, clip_high=math.inf, dual_clip=3.0)
    assert value[0].tolist() == pytest.approx([9, 1, 1])
    assert value[1].tolist() == pytest.approx([-0.8, -1, -3])
    assert clipped.tolist() == [[False] * 3, [True, False, True]]


# -- The loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reduction, denominator, want",
    [
        ("token-mean", "proposed", -3 / 6),
        # r = 2 and 1 are kept in the first response, nothing in the second
        ("token-mean", "kept", -3 / 2),
        ("seq-mean-token-mean", "kept", -3 / 2),
        ("seq-mean-token-sum-norm", "kept", -3 / 32),
    ],
)
def test_denominators_by_hand(reduction, denominator, want):
    new, b = tiny(LOG_R, adv=(1.0, 1.0))
    flags = dict(rs_low=0.6, rs_high=3.0, loss_denominator=denominator, reduction=reduction)
    for axes in (dict(objective="icepop"), dict(objective="is", reject="token")):
        cfg = make_cfg(**axes, **flags)
        assert float(step(new, b, cfg)[-1].detach()) == pytest.approx(want)
        assert objectives.needs_ref_pass(cfg, {}, 1) == (denominator == "kept")


@pytest.mark.parametrize("objective", ["icepop", "seq_mis", "jackpot"])
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
    logs, total = step(new, b, cfg)
    total.backward()
    assert float(logs["keep"].sum()) == 0
    assert float(total.detach()) == 0
    assert torch.equal(new.logp.grad, torch.zeros(2, 3, dtype=f64))


# -- Advantages, presets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, rewards, want",
    [
        ("grpo_no_std", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("grpo", [1, 0, 0, 1], [0.5 / (3**-0.5 + 1e-6) * sign for sign in (1, -1, -1, 1)]),
        ("rloo", [3, 0, 0], [3, -1.5, -1.5]),
        ("maxrl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("maxrl", [0, 0], [0, 0]),
        *((name, [0.3] * G, [0] * G) for name in batching.ADVANTAGES for G in (1, 4)),
    ],
)
def test_advantages_by_hand(name, rewards, want):
    reward = torch.tensor(rewards, dtype=f64)
    assert batching.ADVANTAGES[name](reward).tolist() == pytest.approx(want)


def test_presets_and_axes():
    cfg = make_cfg(objective="jackpot", surrogate="gspo", obrs_target="new", reduction="seq-mean-token-mean")
    assert (cfg.correction, cfg.surrogate, cfg.clip_low, cfg.obrs_target) == ("obrs", "gspo", 3e-4, "new")
    assert [make_cfg(objective=name).is_cap for name in ("tis", "seq_tis")] == [2.0, 4.0]
    assert make_cfg(objective="seq_tis", is_cap=9.0).is_cap == 9.0


def test_the_catalogue_has_every_name():
    page = objectives.catalogue()
    for name in (*CORRECTIONS, *REJECTIONS, *objectives.SURROGATES, *presets.OBJECTIVES):
        assert re.search(rf"^ +{name} +\S", page, re.MULTILINE), name
    assert "tis               weight min(r, C), C = 2" in page and "--is_cap=2\n" in page


# -- Before and after the step ----------------------------------------------------------------------------------------


def test_kappa_of_target_new_comes_from_the_last_update():
    cfg = make_cfg(objective="jackpot", obrs_target="new")
    controllers = {"kappa": None}
    assert objectives.needs_ref_pass(cfg, controllers, 1)
    objectives.update_controllers(controllers, {"obrs/accept_rate": 0.9, "obrs/z_low": 0.8}, cfg)
    assert controllers["kappa"] == pytest.approx(1.125)
    assert not objectives.needs_ref_pass(cfg, controllers, 1)
    assert objectives.needs_ref_pass(cfg, controllers, 4)
    # with an actor the support needs the policy's top-K each time
    assert objectives.needs_ref_pass(replace(cfg, actor="base:actor"), controllers, 1)
    assert objectives.prepare(tiny(LOG_R)[1], One, cfg, controllers).kappa == pytest.approx(1.125)


def test_the_controller_of_lambda_distill_has_bounded_gain():
    cfg = make_cfg(actor="base:actor", distill_kl_target=0.1, distill_lambda=1.0)
    controllers, seen = {}, []
    for kl in (0.5, 0.15, 0.1, 0.05):
        objectives.update_controllers(controllers, {"distill_kl": kl}, cfg)
        seen.append(math.log(controllers["distill"]))
    assert seen == pytest.approx([0.1, 0.15, 0.15, 0.1])  # +gain (bounded), +gain/2, 0, -gain/2
    last = controllers["distill"]
    objectives.update_controllers(controllers, {"distill_kl": math.nan}, cfg)
    objectives.update_controllers(controllers, {"distill_kl": 9.0, "stepped": 0.0}, cfg)  # a skipped step
    assert controllers["distill"] == last
    for kl, start, want in ((9.0, 99.0, 100.0), (0.0, 1.0001e-4, 1e-4)):
        controllers = {"distill": start}
        objectives.update_controllers(controllers, {"distill_kl": kl}, cfg)
        assert controllers["distill"] == pytest.approx(want)
