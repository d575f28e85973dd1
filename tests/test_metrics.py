"""Metrics: values by hand, every formula against plain loops over tokens, and the page that explains the metrics."""

import math
import random
import re
import runpy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, make_cfg

import metrics
import objectives
from batching import Batch
from model import TokenStats
from objectives import StepStats

f64 = torch.float64
LN = math.log


class OneRank:
    """A comm of one rank."""

    @staticmethod
    def sum(values):
        return [float(x) for x in values]

    max = sum

    @staticmethod
    def cat(x):
        return x


def observed(new, batch, stats, cfg, parts=None, comm=OneRank) -> dict[str, float]:
    """The metrics of one step. parts: the micro-batches, each a list of rows; one micro-batch by default."""
    sums = metrics.Sums()
    for rows in parts or [list(range(len(batch)))]:
        micro = batch.select(rows)
        T = micro.tokens.shape[1]
        seen = TokenStats(**{name: x[rows][:, :T] for name, x in new.known().items()})
        _, logs = objectives.joint_loss(seen, micro, stats, cfg)
        metrics.observe(sums, seen.detach(), micro, stats, logs, cfg)
    return metrics.derive(sums.reduce(comm))


# ---------------------------------------------------------------------------------------------------------------------
# Two responses of three tokens, by hand
# ---------------------------------------------------------------------------------------------------------------------

# r = 2, 1/2, 1 in the first response (product 1), 4, 4, 4 in the second (product 64, geometric mean 4)
LOG_R = [[LN(2), -LN(2), 0.0], [LN(4), LN(4), LN(4)]]
ALIKE = [[0.0] * 3] * 2
STATS = StepStats(tokens=6.0, sequences=2.0, lam=1.0, kappa=1.0, distill_lambda=0.0)


def tiny(log_r, mask=None, new=None, ref=None, **columns):
    """(TokenStats, Batch) of two responses of three tokens with A = 1 and -1, rewards 1 and 0.

    The default log p_ref is -1, the default p_new is p_ref; log p_inf = log p_ref - log_r."""
    log_r = torch.tensor(log_r, dtype=f64)
    ref = torch.full((2, 3), -1.0, dtype=f64) if ref is None else torch.tensor(ref, dtype=f64)
    batch = Batch(
        ids=torch.zeros(2, 4, dtype=torch.long),
        prompt_len=torch.ones(2, dtype=torch.long),
        length=torch.tensor([3, 3]),
        group=torch.zeros(2, dtype=torch.long),
        reward=torch.tensor([1.0, 0.0]),
        cut=torch.tensor([False, True]),
        spread=torch.tensor([True, True]),
        adv=torch.tensor([[1.0], [-1.0]], dtype=f64),
        sampling=torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 2),
        staleness=torch.tensor([[2.0, 10.0], [4.0, 30.0]]),
        tokens=torch.arange(6).reshape(2, 3),
        mask=torch.ones(2, 3, dtype=torch.bool) if mask is None else torch.tensor(mask),
        logp_inf=ref - log_r,
        mask_uniforms=torch.full((2, 3), 0.5, dtype=f64),
        support_ids=torch.zeros(2, 3, 1, dtype=torch.long),
        support_logp=torch.zeros(2, 3, 1, dtype=f64),
        p_kth=torch.zeros(2, 3, dtype=f64),
        logp_ref=ref,
    )
    new = ref if new is None else torch.tensor(new, dtype=f64)
    return TokenStats(new, entropy=torch.full((2, 3), 0.5, dtype=f64)), replace(batch, **columns)


def measured(log_r, mask=None, new=None, ref=None, columns=None, **flags) -> dict[str, float]:
    """The metrics of the two tiny responses. columns: more fields of the batch."""
    return observed(*tiny(log_r, mask, new, ref, **(columns or {})), STATS, make_cfg(**{"objective": "none", **flags}))


def drifted() -> dict[str, float]:
    """The metrics of a policy with 2, 1/2, 4, 1 and 8 times the start model's probabilities; one token is masked."""
    factors = torch.tensor([[2.0, 0.5, 4.0], [1.0, 8.0, 0.25]], dtype=f64)
    new = [[-1.0, -2.0, -3.0], [-1.5, -2.5, -0.5]]
    columns = {"logp_start": torch.tensor(new, dtype=f64) - factors.log()}
    return measured(LOG_R, mask=[[True] * 3, [True, True, False]], new=new, columns=columns)


def test_the_drift_from_the_start_by_hand():
    m = drifted()
    factors = [2, 0.5, 4, 1, 8]
    assert m["start_kl"] == pytest.approx(sum(LN(x) for x in factors) / 5)
    assert m["start_k3_kl"] == pytest.approx(sum(1 / x - 1 + LN(x) for x in factors) / 5)
    assert "start_kl" not in measured(LOG_R)


def test_numbers_by_hand():
    # log r: ln2, -ln2, 0 and ln4 x 3; r: 2, 1/2, 1, 4, 4, 4
    m = measured(LOG_R, objective="tis")
    r = [2, 0.5, 1, 4, 4, 4]
    assert m["rollout_corr/kl"] == pytest.approx(-3 * LN(4) / 6)
    assert m["rollout_corr/k3_kl"] == pytest.approx(sum(x - LN(x) - 1 for x in r) / 6)
    assert m["rollout_corr/chi2_token"] == pytest.approx(sum(x * x for x in r) / 6 - 1)
    assert m["rollout_corr/chi2_seq"] == pytest.approx((1 + 64**2) / 2 - 1)
    assert m["rollout_corr/seq_eff_sample_size"] == pytest.approx(65**2 / 2 / (1 + 64**2))
    assert m["rollout_corr/rollout_is_ratio_fraction_high"] == 0.5
    assert m["rollout_corr/rollout_is_ratio_fraction_low"] == 0
    p = math.exp(-1)
    gaps = [abs(p / x - p) for x in r]
    assert m["rollout_corr/mean_mismatch"] == pytest.approx(sum(gaps) / 6)
    assert m["rollout_corr/max_mismatch"] == pytest.approx((max(gaps[:3]) + max(gaps[3:])) / 2)
    assert m["rollout_corr/largest_mismatch"] == pytest.approx(max(gaps))
    assert m["rollout_corr/mismatch_above_half"] == 0.0
    far = measured([[-LN(4)] * 3, [0.0] * 3])  # gaps of 3 e^-1 and of 0
    assert far["rollout_corr/mismatch_above_half"] == 0.5
    assert m["rollout_corr/ppl_ratio"] == pytest.approx((1 + 1 / 4) / 2)
    assert m["rollout_corr/t_max"] == math.inf
    assert m["rollout_corr/seq_weight/16"] == pytest.approx(32.5)
    assert "rollout_corr/seq_weight/32" not in m
    assert m["tokens"] == 6
    assert m["reward"] == 0.5
    assert m["entropy"] == 0.5
    assert m["response_length"] == 3.0
    assert m["staleness/mean_updates"] == 3.0
    assert m["staleness/max_seconds"] == 30.0


def test_metrics_of_rewards_and_cut_responses():
    reward = torch.tensor
    assert measured(LOG_R)["no_reward"] == 0
    assert measured(LOG_R, columns={"reward": reward([0.0, 0.0])})["no_reward"] == 1
    assert measured(LOG_R, columns={"reward": reward([1.0, -1.0])})["no_reward"] == 0  # their mean is 0
    assert measured(LOG_R)["mostly_cut"] == 0
    mask = [[True, False, False], [True] * 3]
    m = measured(LOG_R, mask=mask, columns={"cut": torch.tensor([True, True])})
    assert (m["cut"], m["mostly_cut"], m["empty"], m["response_length"]) == (1, 1, 0, 2)
    assert measured(LOG_R, mask=mask)["empty"] == 0.5


def test_weights_by_hand():
    m = measured(LOG_R, objective="tis")
    w = [2, 0.5, 1, 2, 2, 2]  # capped at 2
    mean = sum(w) / 6
    assert m["rollout_corr/rollout_is_mean"] == pytest.approx(mean)
    assert m["rollout_corr/rollout_is_max"] == 2
    assert m["rollout_corr/rollout_is_min"] == pytest.approx(0.5)
    assert m["rollout_corr/rollout_is_std"] == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in w) / 6))
    assert m["rollout_corr/rollout_is_std"] == pytest.approx(math.sqrt(m["weight_var"]))
    assert m["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(sum(w) ** 2 / 6 / sum(x * x for x in w))


def test_error_tokens_by_hand():
    """p_ref = 1e-4 in one of three tokens with A > 0 and in two of three with A < 0; one ratio of 3 in the lowest
    bucket, one of 1/3 in the highest."""
    m = measured(
        ALIKE,
        ref=[[LN(1e-4), LN(0.05), LN(0.5)], [LN(1e-4), LN(1e-4), -0.1]],
        new=[[LN(3e-4), LN(0.05), LN(0.5)], [LN(1e-4), LN(1.5e-4), -0.1 - LN(3)]],
    )
    assert m["error/low_prob_pos"] == pytest.approx(1 / 3)
    assert m["error/low_prob_neg"] == pytest.approx(2 / 3)
    assert m["error/ratio_out/0.001"] == pytest.approx(1 / 3)
    assert m["error/ratio_out/0.1"] == 0.0
    assert m["error/ratio_out/1"] == pytest.approx(1 / 2)


def test_repetition_by_hand():
    t = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4], [1, 1, 1, 1, 1, 1, 0, 0], [1, 2, 3, 0, 0, 0, 0, 0]])
    exists = torch.arange(8)[None] < torch.tensor([8, 6, 3])[:, None]
    assert metrics.repetition(t, exists).tolist() == pytest.approx([1 / 5, 2 / 3, 0.0])
    assert metrics.repetition(t[:, :3], exists[:, :3]).tolist() == [0.0] * 3


def test_ppo_kl_can_go_negative_and_its_weighted_form_differs():
    def k3(d):  # d = log p_new - log p_ref
        return math.exp(d) - 1 - d

    m = measured(LOG_R, new=[[-1.5, -0.5, -1.0], [-0.5] * 3])
    assert m["ppo_kl"] == pytest.approx((0.5 - 0.5 + 0 - 0.5 * 3) / 6)
    assert m["ppo_kl_weighted"] == pytest.approx((2 * 0.5 - 0.5 * 0.5 + 0 - 2 * 0.5 * 3) / 6)
    assert m["ppo_k3_kl"] == pytest.approx((k3(-0.5) + 4 * k3(0.5)) / 6)


def test_rejection_and_low_weights():
    m = measured([[LN(2), -LN(2), 0.0], [-LN(4)] * 3], objective="icepop", rs_low=0.6, rs_high=3.0)
    assert m["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(4 / 6)
    assert m["rollout_corr/rollout_rs_seq_masked_fraction"] == 1  # each has a token outside, as verl counts
    assert m["rollout_corr/all_rejected_fraction"] == 0.5
    assert m["rollout_corr/low_weight_fraction"] == 0.5
    assert m["rollout_corr/t_max"] == pytest.approx(20 / (3 * LN(4) / 6))
    capped = measured(LOG_R, objective="seq_tis", is_cap=0.5)  # R = 1, 64 against 1/C = 2
    assert capped["rollout_corr/low_weight_fraction"] == 0.5


def test_a_fully_clamped_batch_is_marked_as_false_ess():
    m = measured([[-9.0] * 3, [-30.0] * 3])  # the single tokens of the second response are beyond the clamp too
    assert m["rollout_corr/seq_eff_sample_size"] == pytest.approx(1.0)
    assert m["rollout_corr/seq_clamped_fraction"] == 1.0
    assert m["rollout_corr/seq_false_ess"] == 1.0
    assert measured(LOG_R)["rollout_corr/seq_false_ess"] == 0.0
    narrow = measured(LOG_R, log_ratio_clamp=LN(3))  # R: 1 and 64 -> 3; r: 4 -> 3
    assert narrow["rollout_corr/seq_clamped_fraction"] == 0.5
    assert narrow["rollout_corr/chi2_seq"] == pytest.approx((1 + 9) / 2 - 1)
    assert narrow["rollout_corr/chi2_token"] == pytest.approx((4 + 0.25 + 1 + 27) / 6 - 1)
    assert measured([[-LN(2)] * 3] * 2, log_ratio_clamp=7.0)["rollout_corr/t_max"] == pytest.approx(7 / LN(2))


def test_reward_weighted_by_hand():
    """Rewards 1, 0; R = 1, 64 capped at 4: 1 / (1 + 4)."""
    m = measured(LOG_R)
    assert m["rollout_corr/reward_weighted"] == pytest.approx(1 / 5)
    assert m["reward"] == 0.5
    capped = measured(LOG_R, objective="seq_tis", is_cap=2.0)
    assert capped["rollout_corr/reward_weighted"] == pytest.approx(1 / 3)


def test_padding_never_counts():
    mask = [[True, True, False], [True, False, False]]
    other_padding = [[LN(2), -LN(2), 7.0], [LN(4), -9.0, 9.0]]
    assert measured(LOG_R, mask, objective="tis") == measured(other_padding, mask, objective="tis")


def test_obrs_metrics(monkeypatch):
    columns = {
        "z_ref": torch.full((2, 3), 0.9, dtype=f64),
        "kl_ref": torch.full((2, 3), 0.3, dtype=f64),
        "kl_after_ref": torch.full((2, 3), 0.1, dtype=f64),
    }
    m = measured(ALIKE, columns=columns, objective="z_tis", actor="base:actor")
    assert m["obrs/kl_before"] == pytest.approx(0.3)
    with monkeypatch.context() as patch:  # a different distribution sampled
        patch.setattr(metrics, "corrections", SimpleNamespace(actor_is_sampler=lambda cfg: False))
        another = measured(ALIKE, columns=columns, objective="z_tis", actor="base:actor")
        assert "obrs/kl_before" not in another and another["obrs/z_exact"] == m["obrs/z_exact"]
    assert m["obrs/kl_after"] == pytest.approx(0.1)
    assert m["obrs/z"] == m["obrs/z_exact"] == pytest.approx(0.9)
    assert m["obrs/accept_rate"] == 1.0
    assert "obrs/z_low" not in m


def test_clip_fractions_by_the_sign_of_the_advantage():
    m = measured(ALIKE, new=[[-1 + LN(2), -1, -1], [-1 - LN(2), -1 - LN(2), -1]])
    assert m["clip_fraction_high"] == pytest.approx(1 / 6)
    assert m["clip_fraction_low"] == pytest.approx(2 / 6)
    assert m["clip_fraction"] == 0.5


def test_partial_kl_counts_each_token_of_the_support_once():
    """One model: the support holds a repeat and two tokens with p = .5, .3 and q = .25, .6; Z_low = .25 + .3."""

    def everywhere(*x):
        return torch.tensor(x, dtype=f64).expand(2, 3, len(x))

    columns = {
        "support_logp": everywhere(-math.inf, LN(0.25), LN(0.6)),
        "support_logp_ref": everywhere(LN(0.5), LN(0.5), LN(0.3)),
        "tail_ref": torch.zeros(2, 3, dtype=f64),
    }
    m = measured(ALIKE, columns=columns, objective="jackpot")
    assert m["obrs/kl_before_partial"] == pytest.approx(0.5 * LN(2) + 0.3 * LN(0.5))
    assert m["obrs/kl_after_partial"] == pytest.approx(0.5 * (LN(0.55) + LN(2)) + 0.3 * (LN(0.55) + 0))


@pytest.mark.parametrize("mask, weight", [("expected", 0.25 * 0.8), ("bernoulli", 0.8)])
def test_the_expected_mask_is_part_of_the_weight_and_a_draw_is_not(mask, weight):
    columns = {name: torch.full((2, 3), 0.8, dtype=f64) for name in ("z_ref", "kl_ref", "kl_after_ref")}
    log_r = [[LN(0.25)] * 3] * 2  # a = .25, w = Z max(1, .25) = Z
    m = measured(log_r, columns=columns, objective="jackpot", actor="base:actor", obrs_mask=mask)
    for key in ("mean", "min", "max"):
        assert m[f"rollout_corr/rollout_is_{key}"] == pytest.approx(weight)


# ---------------------------------------------------------------------------------------------------------------------
# Ragged responses as plain Python; all values differ
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Token:
    """One response token, in plain numbers."""

    id: int
    mask: bool  # whether it has a gradient
    uniform: float  # OBRS's draw
    logp_inf: float
    logp_ref: float
    logp: float  # log p_inf on the support, -inf for a repeated token
    entropy: float
    support_inf: list[float]  # log p_inf on the support, -inf where a token is listed already
    support_ref: list[float]
    support_new: list[float]
    tail_ref: float
    tail: float
    # of the actor
    actor_logp_ref: float
    actor_logp: float
    actor_entropy: float
    distill_loss: float
    kl: float
    z_ref: float
    kl_ref: float
    kl_after_ref: float
    routed_alike: float = 0.0
    # results of the loops below
    weight: float = 1.0
    keep: float = 1.0
    clipped: bool = False
    logs: dict = field(default_factory=dict)


@dataclass
class Response:
    tokens: list[Token]
    reward: float
    adv: float
    age: tuple[float, float]  # in updates, in seconds
    cut: bool
    spread: bool

    @property
    def trained(self) -> list[Token]:
        return [t for t in self.tokens if t.mask]


# length, tokens without gradient, reward, advantage, age, whether it was cut, whether its group's rewards differ
SHAPES = [
    (1, [], 0.2, 0.5, (1, 3.5), False, True),
    (20, [0, 7, 8], 1.0, -1.2, (4, 20.0), True, True),
    (7, [6], 0.0, 0.8, (2, 11.0), False, False),
    (4, [1, 2], 0.7, -0.3, (0, 1.25), True, False),
    (3, [0, 1, 2], 0.4, 1.1, (9, 99.0), True, True),  # no gradient at all: excluded from all means
    (9, [4], 0.9, -0.7, (3, 17.0), False, False),
]


def responses() -> list[Response]:
    rng = random.Random(34)  # with this seed every bound acts on a part of the values (tested below)
    drawn = []
    for length, holes, *more in SHAPES:
        tokens = [token(rng, mask=t not in holes) for t in range(length)]
        drawn.append(Response(tokens, *more))
    routing = random.Random(5)
    for t in (t for r in drawn for t in r.tokens):
        t.routed_alike = routing.random()
    drawn[1].tokens[3].logp_ref = -69.0  # the learner's own truncation cuts this token
    drawn[2].tokens[6].entropy = 1e6  # masked, so it does not count
    return drawn


def token(rng, mask: bool) -> Token:
    """A random token: p_ref rare, middling or likely, ratios on both sides of every bound."""
    ref = -rng.choice([rng.uniform(0.05, 2.2), rng.uniform(2.4, 6.8), rng.uniform(7.0, 9.0)])
    inf = min(-0.01, ref + rng.choice([rng.uniform(-0.3, 0.3), rng.uniform(-1.0, 1.0), rng.uniform(-4.0, 4.0)]))
    return Token(
        id=rng.randrange(2),
        mask=mask,
        uniform=rng.random(),
        logp_inf=inf,
        logp_ref=ref,
        logp=min(-0.01, ref + rng.choice([rng.uniform(-0.3, 0.4), rng.uniform(-4.0, 4.0)])),
        entropy=rng.uniform(0.0, 3.0),
        support_inf=support(rng, first=rng.choice([inf, -math.inf])),
        support_ref=support(rng, first=ref),
        support_new=support(rng, first=ref - 0.5),
        tail_ref=rng.uniform(0.0, 0.1),
        tail=rng.uniform(0.0, 0.1),
        actor_logp_ref=inf + rng.uniform(-1.0, 1.0),
        actor_logp=inf + rng.uniform(-2.0, 2.0),
        actor_entropy=rng.uniform(0.0, 3.0),
        distill_loss=rng.uniform(0.0, 2.0),
        kl=rng.uniform(0.0, 2.0),
        z_ref=rng.uniform(0.3, 1.0),
        kl_ref=rng.uniform(0.0, 2.0),
        kl_after_ref=rng.uniform(0.0, 2.0),
    )


def support(rng, first: float) -> list[float]:
    """Log-probabilities of the sampled token and of three more, with at most 0.9 together."""
    shares = [rng.random() for _ in range(3)]
    mass = rng.uniform(0.4, 0.9)
    return [first, *(LN(mass * share / sum(shares)) for share in shares)]


def tensors(drawn: list[Response], actor: bool) -> tuple[TokenStats, Batch]:
    """The responses as tensors. Padding holds values that must not count."""
    T = max(len(r.tokens) for r in drawn)

    def padded(name, fill, dtype=f64):
        rows = [[getattr(t, name) for t in r.tokens] for r in drawn]
        return torch.tensor([row + [fill] * (T - len(row)) for row in rows], dtype=dtype)

    def per_response(values, dtype=f64):
        return torch.tensor(values, dtype=dtype)

    stats = {name: padded(name, -33.0) for name in ("logp", "entropy", "tail", "routed_alike")}
    columns = {name: padded(name, -44.0) for name in ("logp_ref", "tail_ref")}
    stats["support_logp"] = padded("support_new", [-1.0] * 4)
    columns["support_logp_ref"] = padded("support_ref", [-2.0] * 4)
    if actor:
        stats |= {name: padded(name, -3.0) for name in ("actor_logp", "actor_entropy", "distill_loss", "kl")}
        columns |= {name: padded(name, -4.0) for name in ("actor_logp_ref", "z_ref", "kl_ref", "kl_after_ref")}
    lengths = [len(r.tokens) for r in drawn]
    batch = Batch(
        ids=torch.zeros(len(drawn), 2 + T, dtype=torch.long),
        prompt_len=per_response([2] * len(drawn), torch.long),
        length=per_response(lengths, torch.long),
        group=per_response([i // 3 for i in range(len(drawn))], torch.long),
        reward=per_response([r.reward for r in drawn]),
        cut=per_response([r.cut for r in drawn], torch.bool),
        spread=per_response([r.spread for r in drawn], torch.bool),
        adv=per_response([[r.adv] for r in drawn]),
        sampling=per_response([[1.0, 1.0, 0.0, 0.0]] * len(drawn)),
        staleness=per_response([r.age for r in drawn]),
        tokens=padded("id", 0, torch.long),
        mask=padded("mask", False, torch.bool),
        logp_inf=padded("logp_inf", -0.5),
        mask_uniforms=padded("uniform", 1.0),
        support_ids=torch.zeros(len(drawn), T, 4, dtype=torch.long),
        support_logp=padded("support_inf", [-1.5] * 4),
        p_kth=torch.zeros(len(drawn), T, dtype=f64),
        **columns,
    )
    return TokenStats(**stats), batch


# ---------------------------------------------------------------------------------------------------------------------
# The loops: weights, masks and clips by flag
# ---------------------------------------------------------------------------------------------------------------------


def exp_clamped(x: float, cfg) -> float:
    return math.exp(max(-cfg.log_ratio_clamp, min(cfg.log_ratio_clamp, x)))


def log_r(t: Token) -> float:
    return t.logp_ref - t.logp_inf


def ratio(t: Token, cfg) -> float:
    return exp_clamped(log_r(t), cfg)


def response_ratio(r: Response, cfg) -> float:
    return exp_clamped(sum(log_r(t) for t in r.trained), cfg)


def correct_none(r, t, cfg, stats):
    return 1.0, 1.0


def correct_tis(r, t, cfg, stats):
    return min(ratio(t, cfg), cfg.is_cap), 1.0


def correct_icepop(r, t, cfg, stats):
    inside = cfg.rs_low <= ratio(t, cfg) <= cfg.rs_high
    return (ratio(t, cfg), 1.0) if inside else (0.0, 0.0)


def correct_seq_tis(r, t, cfg, stats):
    return min(response_ratio(r, cfg), cfg.is_cap), 1.0


def correct_seq_mis(r, t, cfg, stats):
    weight = response_ratio(r, cfg)
    return (weight, 1.0) if cfg.rs_low <= weight <= cfg.rs_high else (0.0, 0.0)


def correct_obrs(r, t, cfg, stats):
    target = t.logp_ref if cfg.obrs_target == "ref" else t.logp
    accept = min(1.0, exp_clamped(target - t.logp_inf, cfg) / stats.lam)
    keep = accept if cfg.obrs_mask == "expected" else float(t.uniform < accept)
    t.logs = {"accept": keep, **z_of(t, cfg, stats)}
    weight = t.logs["z"] * max(stats.lam, exp_clamped(target - t.logp_inf, cfg))
    weight = min(weight, cfg.obrs_c1)
    if cfg.obrs_target == "new":
        weight *= min(exp_clamped(t.logp_ref - target, cfg), cfg.obrs_c2)
    return weight, keep


def z_of(t: Token, cfg, stats) -> dict:
    """Z of a token: exact, or kappa Z_low limited to its bracket."""
    if cfg.obrs_z == "exact":
        return {"z": t.z_ref}
    support_tgt, tail = (t.support_ref, t.tail_ref) if cfg.obrs_target == "ref" else (t.support_new, t.tail)
    low, mass = 0.0, 0.0
    for inf, tgt in zip(t.support_inf, support_tgt, strict=True):
        low += min(math.exp(inf), math.exp(tgt) / stats.lam)
        mass += math.exp(inf)
    if cfg.obrs_z == "approx":
        return {"z": stats.kappa * low, "z_approx": low}
    high = low + min(max(0.0, 1 - mass), tail)
    return {"z": min(max(stats.kappa * low, low), high), "z_low": low, "z_high": high}


CORRECT = {
    "none": correct_none,
    "tis": correct_tis,
    "icepop": correct_icepop,
    "seq_is": lambda r, t, cfg, stats: (response_ratio(r, cfg), 1.0),
    "seq_tis": correct_seq_tis,
    "seq_mis": correct_seq_mis,
    "obrs": correct_obrs,
}


def correct(drawn: list[Response], cfg, stats) -> None:
    """Fill in weight, keep and clipped of every token."""
    for r in drawn:
        least = float(cfg.reject.split(":")[1]) if cfg.reject.startswith("seq_min") else 0.0
        vetoed = any(ratio(t, cfg) < least for t in r.trained)
        for t in r.tokens:
            t.weight, t.keep = CORRECT[cfg.correction](r, t, cfg, stats)
            if vetoed:
                t.keep = 0.0
            moved = exp_clamped(t.logp - (t.logp_inf if cfg.ratio_base == "inf" else t.logp_ref), cfg)
            t.clipped = moved > 1 + cfg.clip_high if r.adv > 0 else moved < 1 - cfg.clip_low
            if cfg.ratio_base == "inf":  # the ratio is the weight
                t.weight *= moved


# ---------------------------------------------------------------------------------------------------------------------
# The loops: every metric
# ---------------------------------------------------------------------------------------------------------------------


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def ess(weights) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def loops(drawn: list[Response], cfg, stats, actor: bool) -> dict[str, float]:
    """All metrics of these responses, name by name."""
    correct(drawn, cfg, stats)
    trained = [r for r in drawn if r.trained]
    pairs = []  # (token, its response)
    for r in trained:
        pairs += [(t, r) for t in r.trained]
    out = mismatch(trained, cfg) | weights(trained, pairs, cfg) | sequences(trained, cfg) | rewards(trained, pairs)
    out |= update(pairs, cfg) | errors(trained, pairs)
    out["tokens"] = len(pairs)
    if cfg.correction == "obrs":
        out |= acceptance([t for t, _ in pairs], cfg, stats)
    if actor:
        out |= of_actor(pairs, cfg, stats)
    return out


def mismatch(trained, cfg) -> dict:
    tokens = [t for r in trained for t in r.trained]
    out = {
        "rollout_corr/ratio_mean": mean(ratio(t, cfg) for t in tokens),
        "rollout_corr/kl": mean(t.logp_inf - t.logp_ref for t in tokens),
        "rollout_corr/k3_kl": mean(ratio(t, cfg) - log_r(t) - 1 for t in tokens),
        "rollout_corr/chi2_token": mean(ratio(t, cfg) ** 2 for t in tokens) - 1,
        "rollout_corr/chi2_seq": mean(response_ratio(r, cfg) ** 2 for r in trained) - 1,
    }
    means, largest, perplexity = [], [], []
    for r in trained:
        gaps = [abs(math.exp(t.logp_inf) - math.exp(t.logp_ref)) for t in r.trained]
        means.append(mean(gaps))
        largest.append(max(gaps))
        perplexity.append(exp_clamped(-mean(log_r(t) for t in r.trained), cfg))
    out["rollout_corr/mean_mismatch"] = mean(means)
    out["rollout_corr/max_mismatch"] = mean(largest)
    out["rollout_corr/largest_mismatch"] = max(largest)
    out["rollout_corr/mismatch_above_half"] = mean(float(gap > 0.5) for gap in largest)
    out["rollout_corr/ppl_ratio"] = mean(perplexity)
    out["rollout_corr/t_max"] = math.inf
    if out["rollout_corr/kl"] > 0:
        out["rollout_corr/t_max"] = cfg.log_ratio_clamp / out["rollout_corr/kl"]
    ordered = sorted(log_r(t) for t in tokens)
    for percent in ("1", "50", "99", "99.9"):
        out[f"rollout_corr/log_r/{percent}"] = ordered[int(float(percent) / 100 * len(ordered))]
    out["rollout_corr/largest_gap"] = max(abs(x) for x in ordered)
    if cfg.keep_sampling_mask == "recompute":
        out["rollout_corr/cut_fraction"] = mean(t.logp_ref <= -69.0 for t in tokens)
    return out


def token_cap(cfg) -> float:
    return cfg.is_cap if cfg.correction == "tis" else 2.0


def weights(trained, pairs, cfg) -> dict:
    applied = [t.weight * t.keep for t, _ in pairs]
    bounded = cfg.correction in ("icepop", "seq_mis")  # dropped tokens have weight 0
    shown = applied if bounded or cfg.obrs_mask == "expected" else [t.weight for t, _ in pairs]
    middle = mean(shown)
    out = {
        "rollout_corr/rollout_is_mean": middle,
        "rollout_corr/rollout_is_min": min(shown),
        "rollout_corr/rollout_is_max": max(shown),
        "rollout_corr/rollout_is_std": math.sqrt(mean((w - middle) ** 2 for w in shown)),
        "rollout_corr/rollout_is_eff_sample_size": ess(applied),
        "weight_var": mean((w - mean(applied)) ** 2 for w in applied),
        "rollout_corr/rollout_rs_masked_fraction": 1 - mean(t.keep for t, _ in pairs),
        "rollout_corr/rollout_rs_seq_masked_fraction": mean(any(t.keep == 0 for t in r.trained) for r in trained),
        "rollout_corr/all_rejected_fraction": mean(all(t.keep == 0 for t in r.trained) for r in trained),
        "weighted_advantage": mean(t.weight * t.keep * r.adv for t, r in pairs),
    }
    ratios, low, high = [ratio(t, cfg) for t, _ in pairs], 1 / token_cap(cfg), token_cap(cfg)
    if cfg.correction.startswith("seq"):  # one weight a response
        ratios = [math.exp(sum(log_r(t) for t in r.trained)) for r in trained]  # not clamped
        low, high = (1 / cfg.is_cap, cfg.is_cap) if cfg.correction == "seq_tis" else (1 / 4, 4)
        out["rollout_corr/rollout_is_max"] = max(response_ratio(r, cfg) for r in trained)
        out["rollout_corr/rollout_is_min"] = min(ratios)
    if cfg.correction in ("icepop", "seq_mis"):
        low, high = cfg.rs_low, cfg.rs_high
    out["rollout_corr/rollout_is_ratio_fraction_high"] = mean(x > high for x in ratios)
    out["rollout_corr/rollout_is_ratio_fraction_low"] = mean(x < low for x in ratios)
    return out


def sequences(trained, cfg) -> dict:
    C = cfg.is_cap if cfg.correction == "seq_tis" else 4.0
    R = [response_ratio(r, cfg) for r in trained]
    capped = [min(x, C) for x in R]
    clamped = mean(abs(sum(log_r(t) for t in r.trained)) >= cfg.log_ratio_clamp for r in trained)
    out = {
        "rollout_corr/seq_eff_sample_size": ess(R),
        "rollout_corr/seq_clamped_fraction": clamped,
        "rollout_corr/seq_false_ess": float(clamped > 0.5),
        "rollout_corr/low_weight_fraction": mean(x < 1 / C for x in R),
        "rollout_corr/reward_weighted": sum(c * r.reward for c, r in zip(capped, trained, strict=True)) / sum(capped),
    }
    for low, high in ((0, 16), (16, 32)):
        inside = [x for x, r in zip(R, trained, strict=True) if low < len(r.trained) <= high]
        out[f"rollout_corr/seq_weight/{high}"] = mean(inside)
        out[f"rollout_corr/low_weight/{high}"] = mean(x < 1 / C for x in inside)
    return out


def rewards(trained, pairs) -> dict:
    return {
        "reward": mean(r.reward for r in trained),
        "response_length": mean(len(r.trained) for r in trained),
        "no_reward": 0.0,
        "spread": mean(r.spread for r in trained),
        "cut": mean(r.cut for r in trained),
        "mostly_cut": 0.0,
        "empty": mean(len(r.trained) == 1 and not r.cut for r in trained),
        "entropy_of_cut": mean(t.entropy for r in trained if r.cut for t in r.trained),
        "advantage_abs": mean(abs(r.adv) for r in trained),
        "entropy": mean(t.entropy for t, _ in pairs),
        "router/agreement": mean(t.routed_alike for t, _ in pairs),
        "staleness/mean_updates": mean(r.age[0] for r in trained),
        "staleness/mean_seconds": mean(r.age[1] for r in trained),
        "staleness/max_updates": max(r.age[0] for r in trained),
        "staleness/max_seconds": max(r.age[1] for r in trained),
    }


def update(pairs, cfg) -> dict:
    k1, weighted, k3, drift = [], [], [], []
    for t, _ in pairs:
        d = t.logp - t.logp_ref
        k1.append(-d)
        weighted.append(min(ratio(t, cfg), token_cap(cfg)) * -d)
        k3.append(exp_clamped(d, cfg) - 1 - d)
        late = max(-cfg.log_ratio_clamp, min(cfg.log_ratio_clamp, t.logp_inf - t.logp))
        drift.append(math.exp(late) - late - 1)
    out = {
        "clip_fraction": mean(t.clipped for t, _ in pairs),
        "clip_fraction_high": mean(t.clipped and r.adv > 0 for t, r in pairs),
        "clip_fraction_low": mean(t.clipped and r.adv < 0 for t, r in pairs),
        "ppo_kl": mean(k1),
        "ppo_kl_weighted": mean(weighted),
        "ppo_k3_kl": mean(k3),
    }
    if cfg.cppo_beta:
        out["cppo_kl"] = mean(drift)
    return out


def errors(trained, pairs) -> dict:
    out = {
        "error/low_prob_pos": mean(t.logp_ref < LN(1e-3) for t, r in pairs if r.adv > 0),
        "error/low_prob_neg": mean(t.logp_ref < LN(1e-3) for t, r in pairs if r.adv < 0),
        "error/repetition": mean(repeated(r) for r in trained if len(r.tokens) >= 4),
    }
    for low, high in ((0.0, 1e-3), (1e-3, 1e-1), (1e-1, 1.0)):
        inside = [t for t, _ in pairs if low < math.exp(t.logp_ref) <= high]
        out[f"error/ratio_out/{high:g}"] = mean(abs(t.logp - t.logp_ref) > LN(2) for t in inside)
    return out


def repeated(r: Response) -> float:
    """Share of the 4-grams that occur earlier in the response."""
    ids = [t.id for t in r.tokens]
    seen, again = set(), 0
    for i in range(len(ids) - 3):
        gram = tuple(ids[i : i + 4])
        again += gram in seen
        seen.add(gram)
    return again / (len(ids) - 3)


def acceptance(tokens, cfg, stats) -> dict:
    names = {"obrs/accept_rate": "accept", "obrs/z": "z"}
    out = {"obrs/lambda": stats.lam}
    if cfg.obrs_z != "exact":
        names |= {f"obrs/{key}": key for key in ("z_low", "z_high", "z_approx") if key in tokens[0].logs}
        out["obrs/kappa"] = stats.kappa
        out["z_sum"] = sum(t.logs["z_approx" if cfg.obrs_z == "approx" else "z_low"] for t in tokens)
        out["accept_sum"] = sum(t.logs["accept"] for t in tokens)
    out |= {name: mean(t.logs[key] for t in tokens) for name, key in names.items()}
    if cfg.obrs_z == "bracket":
        out["obrs/z_low_over_z_used"] = out["obrs/z_low"] / out["obrs/z"]
        out["obrs/bracket_width"] = out["obrs/z_high"] - out["obrs/z_low"]
    if cfg.actor == "none" or cfg.obrs_target == "new":
        out["obrs/kl_before_partial"] = mean(kl_on_support(t, cfg, -math.inf, 0.0) for t in tokens)
        out["obrs/kl_after_partial"] = mean(kl_on_support(t, cfg, LN(stats.lam), LN(t.logs["z"])) for t in tokens)
        return out
    for name in ("kl_before", "kl_after"):
        column = {"kl_before": "kl_ref", "kl_after": "kl_after_ref"}[name]
        out[f"obrs/{name}"] = mean(getattr(t, column) for t in tokens)
    out["obrs/z_exact"] = mean(t.z_ref for t in tokens)
    if cfg.obrs_z == "bracket":
        out["obrs/z_low_over_z"] = out["obrs/z_low"] / out["obrs/z_exact"]
    return out


def kl_on_support(t: Token, cfg, least: float, log_z: float) -> float:
    """sum p_tgt (log_z + max(log p_tgt - log p_inf, least)) over the tokens of the support, each once."""
    total = 0.0
    for inf, tgt in zip(t.support_inf, t.support_ref if cfg.obrs_target == "ref" else t.support_new, strict=True):
        if inf > -math.inf:
            total += math.exp(tgt) * (log_z + max(tgt - inf, least))
    return total


def of_actor(pairs, cfg, stats) -> dict:
    tokens = [t for t, _ in pairs]
    losses = []
    for t, r in pairs:  # PPO with weight min(p_actor,ref / p_inf, 2)
        weight = min(exp_clamped(t.actor_logp_ref - t.logp_inf, cfg), 2.0)
        moved = exp_clamped(t.actor_logp - t.actor_logp_ref, cfg)
        clipped = max(1 - cfg.clip_low, min(1 + cfg.clip_high, moved))
        losses.append(-weight * min(moved * r.adv, clipped * r.adv))
    return {
        "actor/loss": mean(losses),
        "actor/entropy": mean(t.actor_entropy for t in tokens),
        "actor/distill_loss": mean(t.distill_loss for t in tokens),
        "actor/engine_gap": mean(abs(math.exp(t.logp_inf) - math.exp(t.actor_logp_ref)) for t in tokens),
        "actor/largest_gap": max((abs(t.actor_logp_ref - t.logp_inf) for t in tokens), default=math.nan),
        "distill_kl": mean(t.kl for t in tokens),
        "distill_lambda": stats.distill_lambda,
    }


CASES = {
    "seq_is": {"objective": "seq_is"},
    "none": {"objective": "none"},
    "tis": {"objective": "tis", "is_cap": 1.7},
    "icepop": {"objective": "icepop", "rs_low": 0.4, "rs_high": 3.0},
    "seq_tis": {"objective": "seq_tis", "is_cap": 3.0},
    "seq_mis with seq_min": {"objective": "seq_mis", "rs_low": 0.01, "rs_high": 8.0, "reject": "seq_min:0.15:inf"},
    "obrs": {"objective": "jackpot", "obrs_lambda": 1.3, "obrs_c1": 1.1},
    "obrs, expected mask": {"objective": "jackpot", "obrs_mask": "expected"},
    "obrs, target new": {"objective": "jackpot", "obrs_target": "new", "obrs_lambda": 0.7},
    "obrs, the text's Z": {"objective": "jackpot", "obrs_z": "approx", "obrs_lambda": 1.3},
    "obrs, two models": {"objective": "jackpot", "actor": "base:actor"},
    "obrs, two models, bracketed": {"objective": "jackpot", "actor": "base:actor", "obrs_z": "bracket"},
    "two models": {"objective": "tis", "actor": "base:actor"},
    "ratio over inf": {"objective": "ppo_is", "cppo_beta": 0.1},
    "truncation recomputed": {"objective": "grpo", "top_p": 0.9, "keep_sampling_mask": "recompute"},
}
CLAMP = 2.5  # narrow: it acts on single tokens and on whole responses
PARTS = {
    "whole": None,
    "two micro-batches": [[0, 2, 3], [1, 4, 5]],
    "one response each": [[5], [4], [3], [2], [1], [0]],
}


def case(name):
    """(responses, flags, statistics of the step, whether there is an actor)."""
    cfg = make_cfg(log_ratio_clamp=CLAMP, **CASES[name])
    stats = StepStats(tokens=36.0, sequences=5.0, lam=cfg.obrs_lambda, kappa=1.15, distill_lambda=0.6)
    return responses(), cfg, stats, cfg.actor != "none"


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("name", CASES)
def test_every_metric_equals_a_plain_loop_over_tokens(name, parts):
    drawn, cfg, stats, actor = case(name)
    want = loops(drawn, cfg, stats, actor)
    got = observed(*tensors(drawn, actor), stats, cfg, parts)
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


@pytest.mark.parametrize("name", CASES)
def test_every_bound_acts_on_a_part_of_the_ragged_responses(name):
    """The loops cannot check a share of 0 or 1, or a cap above all values."""
    drawn, cfg, stats, actor = case(name)
    m = loops(drawn, cfg, stats, actor)
    shares = ["rollout_corr/rollout_is_ratio_fraction_high", "rollout_corr/rollout_is_ratio_fraction_low"]
    shares += ["rollout_corr/seq_clamped_fraction", "rollout_corr/low_weight_fraction", "error/repetition"]
    shares += ["error/low_prob_pos", "error/low_prob_neg", "clip_fraction_high", "clip_fraction_low"]
    shares += ["error/ratio_out/0.001", "error/ratio_out/0.1", "error/ratio_out/1"]
    if cfg.correction in ("icepop", "seq_mis", "obrs"):
        shares.append("rollout_corr/rollout_rs_masked_fraction")
    if cfg.correction == "seq_mis":
        shares.append("rollout_corr/rollout_rs_seq_masked_fraction")
    for share in shares:
        assert 0 < m[share] < 1, share
    trained = [r for r in drawn if r.trained]
    totals = [sum(log_r(t) for t in r.trained) for r in trained]
    assert min(totals) < -CLAMP < CLAMP < max(totals)
    assert max(x for x in totals if x < CLAMP) > LN(4)
    assert min(x for x in totals if x > -CLAMP) < -LN(4)


def test_z_is_at_both_ends_of_its_bracket_and_between():
    drawn, cfg, stats, actor = case("obrs")
    loops(drawn, cfg, stats, actor)
    logs = [t.logs for r in drawn for t in r.trained]
    assert any(z["z"] == z["z_low"] for z in logs)
    assert any(z["z"] == z["z_high"] > z["z_low"] for z in logs)
    assert any(z["z_low"] < z["z"] < z["z_high"] for z in logs)
    weights = [t.weight for r in drawn for t in r.trained]
    assert min(weights) < max(weights) == cfg.obrs_c1


def test_two_ranks_with_equal_shares_double_only_the_counts():
    drawn, cfg, stats, actor = case("obrs")

    class TwoRanks(OneRank):
        @staticmethod
        def sum(values):
            return [2 * float(x) for x in values]

        @staticmethod
        def cat(x):
            return torch.cat([x, x])

    one = observed(*tensors(drawn, actor), stats, cfg)
    two = observed(*tensors(drawn, actor), stats, cfg, comm=TwoRanks)
    assert one.keys() == two.keys()
    for key, value in one.items():
        counts = key in ("tokens", "z_sum", "accept_sum")
        assert two[key] == pytest.approx(2 * value if counts else value, rel=1e-12), key


# ---------------------------------------------------------------------------------------------------------------------
# One row a metric, and the page of all metrics
# ---------------------------------------------------------------------------------------------------------------------


def family(name: str) -> str:
    """seq_weight/16 -> seq_weight/N."""
    return re.sub(r"/[0-9.]+$", "/N", name)


def named_on_the_page() -> set[str]:
    """The names at the start of the page's lines."""
    lines = metrics.page().splitlines()
    return {line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("   ")}


def mentioned_on_the_page() -> set[str]:
    """Names and patterns inside the texts of metrics from other files: `remote/*`, `actor/lr`, delay's `versions`."""
    names = set()
    for name, meaning in metrics.ELSEWHERE.items():
        prefix, slash, _ = name.partition("/")
        words = re.findall(r"[\w/@*]+", meaning)
        names |= {word for word in words if "_" in word or "/" in word}
        names |= {prefix + slash + word for word in words if slash and "/" not in word}
    return names


def unexplained(keys) -> list[str]:
    """The keys of metrics.jsonl without an explanation on the page."""
    named, mentioned = named_on_the_page(), mentioned_on_the_page()
    missing = []
    for key in keys:
        if family(key) not in named and not any(fnmatchcase(key, pattern) for pattern in mentioned):
            missing.append(key)
    return missing


def public_rows() -> list[str]:
    return [row.name for row in metrics.ROWS if not row.name.startswith("_")]


def test_every_name_has_one_row():
    names = [row.name for row in metrics.ROWS]
    assert len(names) == len(set(names))
    assert not set(names) & set(metrics.ELSEWHERE)


def test_every_public_row_is_computed_and_explained():
    computed = set()
    for name in CASES:
        drawn, cfg, stats, actor = case(name)
        computed |= observed(*tensors(drawn, actor), stats, cfg).keys()
    computed |= drifted().keys()
    assert {family(name) for name in public_rows()} == {family(name) for name in computed}
    assert unexplained(computed) == []
    assert all(row.meaning for row in metrics.ROWS if not row.name.startswith("_"))


def test_the_page_names_every_metric_once_and_nothing_else():
    page = metrics.page()
    assert named_on_the_page() == {family(name) for name in public_rows()} | set(metrics.ELSEWHERE)
    heads = [line.split()[0] for line in page.splitlines() if re.match(r"  \S", line)]
    assert len(heads) == len(set(heads))
    assert max(map(len, page.splitlines())) <= 120


def test_unknown_names_are_not_on_the_page():
    for key in (
        "rollout_corr/nothing",
        "versions",
        "sync/nothing",
        "actor",
        "_w",
        "rollout_corr/kl/16x",
        "eval/policy",
    ):
        assert unexplained([key]) == [key]
    assert unexplained(["remote/anything", "delay/versions", "delay/dropped_window", "eval/actor_se", "sync_s"]) == []


@pytest.mark.parametrize("more", [[], ["--help"]])
def test_the_command_prints_the_page(more, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["metrics.py", *more])
    runpy.run_path(str(ROOT / "metrics.py"), run_name="__main__")
    assert capsys.readouterr().out == metrics.page() + "\n"


def test_a_new_metric_is_one_row(monkeypatch):
    """A mean, a maximum and a derived value, each added as a row, are in the metrics of every step."""
    rows = [
        metrics.Mean("mine/new", metrics.tokens, lambda v: v.new.logp),
        metrics.Max("mine/longest", metrics.responses, lambda v: v.batch.length),
        metrics.Mean("_mine", metrics.responses, lambda v: v.batch.reward),
        metrics.Derived("mine/twice", lambda m: 2 * m["_mine"] + m.count("_mine")),
        metrics.Mean("mine/never", metrics.tokens, lambda v: v.r, when=lambda v: False),
    ]
    drawn, cfg, stats, actor = case("tis")
    before = observed(*tensors(drawn, actor), stats, cfg)
    monkeypatch.setattr(metrics, "ROWS", [*metrics.ROWS, *rows])
    after = observed(*tensors(drawn, actor), stats, cfg, PARTS["two micro-batches"])
    assert after.keys() - before.keys() == {"mine/new", "mine/longest", "mine/twice"}
    trained = [r for r in drawn if r.trained]
    assert after["mine/new"] == pytest.approx(mean(t.logp for r in trained for t in r.trained))
    assert after["mine/longest"] == 20
    assert after["mine/twice"] == pytest.approx(2 * mean(r.reward for r in trained) + 5)
