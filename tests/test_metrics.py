"""Metrics by hand, and the log that a resume truncates."""

import math

import pytest
import torch
from conftest import make_cfg
from test_objectives import LN, LOG_R, STATS, One, f64, tiny

import metrics
import objectives


class OneRank(One):
    max = staticmethod(lambda xs: [float(x) for x in xs])


def observed(log_r, mask=None, new=None, objective="none", lengths=(3, 3), **flags):
    n, b = tiny(log_r, mask, new=new)
    n.entropy = torch.full_like(b.logp_ref, 0.5)
    b.length, b.reward = torch.tensor(lengths), torch.tensor([1.0, 0.0])
    b.tokens, b.exists = torch.arange(6).reshape(2, 3), b.mask
    b.staleness = torch.tensor([[2.0, 10.0], [4.0, 30.0]])
    b.kl_ref, b.kl_after = torch.full_like(b.logp_ref, 0.3), torch.full_like(b.logp_ref, 0.1)
    cfg = make_cfg(objective=objective, **flags)
    _, logs = objectives.loss(n, b, STATS, cfg)
    sums = metrics.Sums()
    metrics.observe(sums, n.detach(), b, STATS, logs, cfg)
    return sums.reduce(OneRank)


def test_numbers_by_hand():
    # log r: ln2, -ln2, 0 and ln4 x 3; r: 2, 1/2, 1, 4, 4, 4
    m = observed(LOG_R, objective="tis")
    assert m["rollout_corr/kl"] == pytest.approx(-3 * LN(4) / 6)
    r = [2, 0.5, 1, 4, 4, 4]
    assert m["rollout_corr/k3_kl"] == pytest.approx(sum(x - LN(x) - 1 for x in r) / 6)
    assert m["rollout_corr/chi2_token"] == pytest.approx(sum(x * x for x in r) / 6 - 1)
    assert m["rollout_corr/chi2_seq"] == pytest.approx((1 + 64**2) / 2 - 1)
    w = [2, 0.5, 1, 2, 2, 2]  # capped at 2
    mean = sum(w) / 6
    assert (
        m["rollout_corr/rollout_is_mean"] == pytest.approx(mean)
        and m["rollout_corr/rollout_is_max"] == 2
        and m["rollout_corr/rollout_is_min"] == pytest.approx(0.5)
    )
    assert (
        m["rollout_corr/rollout_is_std"]
        == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in w) / 6))
        == pytest.approx(math.sqrt(m["weight_var"]))
    )
    assert m["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(sum(w) ** 2 / 6 / sum(x * x for x in w))
    assert m["rollout_corr/seq_eff_sample_size"] == pytest.approx(65**2 / 2 / (1 + 64**2))
    assert (
        m["rollout_corr/rollout_is_ratio_fraction_high"] == 0.5 and m["rollout_corr/rollout_is_ratio_fraction_low"] == 0
    )
    p = math.exp(-1)
    gaps = [abs(p / x - p) for x in r]
    assert m["rollout_corr/mean_mismatch"] == pytest.approx(sum(gaps) / 6)
    assert m["rollout_corr/max_mismatch"] == pytest.approx((max(gaps[:3]) + max(gaps[3:])) / 2)
    assert m["rollout_corr/ppl_ratio"] == pytest.approx((1 + 1 / 4) / 2)
    assert (
        m["reward"],
        m["entropy"],
        m["response_length"],
        m["staleness/mean_updates"],
        m["staleness/max_seconds"],
    ) == (0.5, 0.5, 3.0, 3.0, 30.0)
    assert m["rollout_corr/t_max"] == math.inf and m["tokens"] == 6
    assert m["rollout_corr/seq_weight/16"] == pytest.approx(32.5) and "rollout_corr/seq_weight/32" not in m


def test_error_tokens_by_hand():
    """p_ref = 1e-4 in one of three tokens with A > 0 and in two of three with A < 0; one ratio of 3 in the lowest bucket, one of 1/3 in the highest."""
    n, b = tiny(
        [[0.0] * 3] * 2,
        ref=[[LN(1e-4), LN(0.05), LN(0.5)], [LN(1e-4), LN(1e-4), -0.1]],
        new=[[LN(3e-4), LN(0.05), LN(0.5)], [LN(1e-4), LN(1.5e-4), -0.1 - LN(3)]],
    )
    n.entropy = torch.zeros(2, 3, dtype=f64)
    b.length, b.reward, b.staleness = torch.tensor([3, 3]), torch.tensor([1.0, 0.0]), torch.zeros(2, 2)
    b.tokens, b.exists = torch.zeros(2, 3, dtype=torch.long), b.mask
    cfg, sums = make_cfg(objective="none"), metrics.Sums()
    metrics.observe(sums, n.detach(), b, STATS, objectives.loss(n, b, STATS, cfg)[1], cfg)
    m = sums.reduce(OneRank)
    assert m["error/low_prob_pos"] == pytest.approx(1 / 3) and m["error/low_prob_neg"] == pytest.approx(2 / 3)
    assert (m["error/ratio_out/0.001"], m["error/ratio_out/0.1"], m["error/ratio_out/1"]) == (
        pytest.approx(1 / 3),
        0.0,
        pytest.approx(1 / 2),
    )


def test_repetition_by_hand():
    t = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4], [1, 1, 1, 1, 1, 1, 0, 0], [1, 2, 3, 0, 0, 0, 0, 0]])
    exists = torch.arange(8)[None] < torch.tensor([8, 6, 3])[:, None]
    assert metrics.repetition(t, exists).tolist() == pytest.approx([1 / 5, 2 / 3, 0.0])
    assert metrics.repetition(t[:, :3], exists[:, :3]).tolist() == [0.0] * 3


def test_ppo_kl_can_go_negative_and_its_weighted_form_differs():
    m = observed(LOG_R, new=[[-1.5, -0.5, -1.0], [-0.5] * 3])
    assert m["ppo_kl"] == pytest.approx((0.5 - 0.5 + 0 - 0.5 * 3) / 6)
    assert m["ppo_kl_weighted"] == pytest.approx((2 * 0.5 - 0.5 * 0.5 + 0 - 2 * 0.5 * 3) / 6)
    k3 = lambda d: math.exp(d) - 1 - d  # d = log p_new - log p_ref
    assert m["ppo_k3_kl"] == pytest.approx((k3(-0.5) + 4 * k3(0.5)) / 6)


def test_rejection_and_low_weights():
    m = observed([[LN(2), -LN(2), 0.0], [-LN(4)] * 3], objective="icepop", rs_low=0.6, rs_high=3.0)
    assert (
        m["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(4 / 6)
        and m["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5
    )
    assert (
        observed(LOG_R, objective="seq_tis", is_cap=0.5)["rollout_corr/low_weight_fraction"] == 0.5
    )  # R = 1, 64 against 1/C = 2
    assert m["rollout_corr/low_weight_fraction"] == 0.5 and m["rollout_corr/t_max"] == pytest.approx(
        20 / (3 * LN(4) / 6)
    )


def test_a_fully_clamped_batch_shows_a_false_ess_and_says_so():
    m = observed([[-9.0] * 3, [-30.0] * 3])  # the second's single tokens are beyond the clamp too
    assert m["rollout_corr/seq_eff_sample_size"] == pytest.approx(1.0) and m["rollout_corr/seq_clamped_fraction"] == 1.0
    assert m["rollout_corr/seq_false_ess"] == 1.0 and observed(LOG_R)["rollout_corr/seq_false_ess"] == 0.0
    narrow = observed(LOG_R, log_ratio_clamp=LN(3))  # R: 1 and 64 -> 3; r: 4 -> 3
    assert narrow["rollout_corr/seq_clamped_fraction"] == 0.5 and narrow["rollout_corr/chi2_seq"] == pytest.approx(
        (1 + 9) / 2 - 1
    )
    assert narrow["rollout_corr/chi2_token"] == pytest.approx((4 + 0.25 + 1 + 27) / 6 - 1)
    assert observed([[-LN(2)] * 3] * 2, log_ratio_clamp=7.0)["rollout_corr/t_max"] == pytest.approx(7 / LN(2))


def test_the_learners_reward_is_the_samplers_reweighted():
    """Rewards 1, 0; R = 1, 64 capped at 4: 1 / (1 + 4)."""
    assert observed(LOG_R)["rollout_corr/reward_weighted"] == pytest.approx(1 / 5) and observed(LOG_R)["reward"] == 0.5
    assert observed(LOG_R, objective="seq_tis", is_cap=2.0)["rollout_corr/reward_weighted"] == pytest.approx(1 / 3)


def test_warnings_are_said_once(tmp_path, capsys):
    log = metrics.Log(tmp_path, make_cfg(), 0)
    for step in range(3):
        log.write(step, {"rejected_steps": float(step), "rollout_corr/seq_false_ess": 0.0})
    log.close()
    said = capsys.readouterr().err
    assert said.count("every token of an update was rejected") == 1 and "update 2" in said and "clamp" not in said


def test_padding_never_counts():
    a = observed(LOG_R, mask=[[True, True, False], [True, False, False]], objective="tis")
    b = observed(
        [[LN(2), -LN(2), 7.0], [LN(4), -9.0, 9.0]], mask=[[True, True, False], [True, False, False]], objective="tis"
    )
    assert a == b


def test_obrs_metrics():
    m = observed([[0.0] * 3] * 2, objective="z_tis", actor="base:actor")
    assert m["obrs/kl_before"] == pytest.approx(0.3) and m["obrs/kl_after"] == pytest.approx(0.1)
    assert (
        m["obrs/z"] == m["obrs/z_exact"] == pytest.approx(0.9)
        and m["obrs/accept_rate"] == 1.0
        and "obrs/z_low" not in m
    )


def test_clip_fractions_by_the_sign_of_the_advantage():
    m = observed([[0.0] * 3] * 2, new=[[-1 + LN(2), -1, -1], [-1 - LN(2), -1 - LN(2), -1]])
    assert (
        m["clip_fraction_high"] == pytest.approx(1 / 6)
        and m["clip_fraction_low"] == pytest.approx(2 / 6)
        and m["clip_fraction"] == 0.5
    )


def test_partial_kl_counts_each_token_of_s_once():
    """One model: S = (a repeat, two tokens) with p = .5, .3 and q = .25, .6; Z_low = .25 + .3, kappa 1."""
    n, b = tiny([[0.0] * 3] * 2)
    n.entropy = torch.zeros(2, 3, dtype=f64)
    b.length, b.reward, b.staleness, b.kl_ref, b.kl_after = (
        torch.tensor([3, 3]),
        torch.zeros(2),
        torch.zeros(2, 2),
        None,
        None,
    )
    b.tokens, b.exists = torch.zeros(2, 3, dtype=torch.long), b.mask
    row = lambda *x: torch.tensor(x, dtype=f64).expand(2, 3, len(x))
    b.support_logp, b.support_logp_ref, b.tail_ref = (
        row(-math.inf, LN(0.25), LN(0.6)),
        row(LN(0.5), LN(0.5), LN(0.3)),
        torch.zeros(2, 3, dtype=f64),
    )
    cfg = make_cfg(objective="jackpot")
    _, logs = objectives.loss(n, b, STATS, cfg)
    sums = metrics.Sums()
    metrics.observe(sums, n.detach(), b, STATS, logs, cfg)
    m = sums.reduce(OneRank)
    assert m["obrs/kl_before_partial"] == pytest.approx(0.5 * LN(2) + 0.3 * LN(0.5))
    assert m["obrs/kl_after_partial"] == pytest.approx(0.5 * (LN(0.55) + LN(2)) + 0.3 * (LN(0.55) + 0))


def test_the_expected_mask_is_part_of_the_weight_and_a_draw_is_not():
    log_r = [[math.log(0.25)] * 3] * 2  # a = .25, w = Z max(1, .25) = Z
    for mask, weight in (("expected", 0.25 * 0.8), ("bernoulli", 0.8)):
        n, b = tiny(log_r)
        n.entropy, b.z_ref = torch.zeros(2, 3, dtype=f64), torch.full((2, 3), 0.8, dtype=f64)
        b.length, b.reward, b.staleness, b.kl_ref, b.kl_after = (
            torch.tensor([3, 3]),
            torch.zeros(2),
            torch.zeros(2, 2),
            b.z_ref,
            b.z_ref,
        )
        b.tokens, b.exists = torch.zeros(2, 3, dtype=torch.long), b.mask
        cfg = make_cfg(objective="jackpot", actor="base:actor", obrs_mask=mask)
        _, logs = objectives.loss(n, b, STATS, cfg)
        sums = metrics.Sums()
        metrics.observe(sums, n.detach(), b, STATS, logs, cfg)
        m = sums.reduce(OneRank)
        for key in ("mean", "min", "max"):
            assert m[f"rollout_corr/rollout_is_{key}"] == pytest.approx(weight)


def test_log_writes_truncates_and_reads(tmp_path):
    cfg = make_cfg(tensorboard=True)
    log = metrics.Log(tmp_path, cfg, 0)
    for step in (-1, 0, 1, 2):
        log.write(step, {"x": step / 2, "nothing": math.inf})
    log.close()
    assert metrics.read(tmp_path)[2] == {"step": 1, "x": 0.5, "nothing": None}
    assert list((tmp_path / "tensorboard").glob("events*"))
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 3, "x"')  # killed in the middle of a line
    log = metrics.Log(tmp_path, make_cfg(), 2)
    log.write(2, {"x": 9.0})
    log.close()
    assert [(r["step"], r["x"]) for r in metrics.read(tmp_path)] == [(-1, -0.5), (0, 0.0), (1, 0.5), (2, 9.0)]
    with pytest.raises(ValueError, match="no such file; give the folder of a run"):
        metrics.read(tmp_path / "none")
