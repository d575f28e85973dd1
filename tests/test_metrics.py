"""Metrics: values by hand, every formula against plain loops over tokens, and the page that explains the metrics."""

import math
import random
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
import torch
from conftest import LN, One, f64, make_cfg

import metrics
import objectives
from batching import Batch
from model import TokenStats
from objectives import StepStats


def observed(new, batch, stats, cfg, parts=None, comm=One) -> dict[str, float]:
    """The metrics of one step. parts: the micro-batches, each a list of rows; one micro-batch by default."""
    sums = metrics.Sums()
    for rows in parts or [list(range(len(batch)))]:
        micro = batch.select(rows)
        T = micro.tokens.shape[1]
        seen = TokenStats(**{name: x[rows][:, :T] for name, x in new.known().items()})
        _, logs = objectives.joint_loss(seen, micro, stats, cfg)
        metrics.observe(sums, seen.detach(), micro, stats, logs, cfg)
    return metrics.derive(sums.reduce(comm))


# -- Ragged responses as plain Python; all values differ --------------------------------------------------------------


# length, tokens without gradient, reward, advantage, age, whether it was cut
SHAPES = [
    (1, [], 0.2, 0.5, 1, False),
    (20, [0, 7, 8], 1.0, -1.2, 4, True),
    (7, [6], 0.0, 0.8, 2, False),
    (4, [1, 2], 0.7, -0.3, 0, True),
    (3, [0, 1, 2], 0.4, 1.1, 9, True),  # no gradient at all: excluded from all means
    (9, [4], 0.9, -0.7, 3, False),
]


def responses() -> list:
    rng, more = random.Random(1), random.Random(5)  # with these seeds every bound acts on a part of the values
    drawn = []
    for length, holes, *fields in SHAPES:
        tokens = [token(rng, more, mask=t not in holes) for t in range(length)]
        names = ("reward", "adv", "age", "cut")
        drawn.append(SimpleNamespace(tokens=tokens, **dict(zip(names, fields, strict=True))))
        drawn[-1].trained = [t for t in tokens if t.mask]
    drawn[1].tokens[3].logp_ref = -69.0  # the learner's own truncation cuts this token
    drawn[2].tokens[6].entropy = 1e6  # masked, so it does not count
    return drawn


def token(rng, more, mask: bool) -> SimpleNamespace:
    """A random token: p_ref rare, middling or likely, ratios on both sides of every bound."""
    ref = -rng.choice([rng.uniform(0.05, 2.2), rng.uniform(2.4, 6.8), rng.uniform(7.0, 9.0)])
    inf = min(-0.01, ref + rng.choice([rng.uniform(-0.3, 0.3), rng.uniform(-1.0, 1.0), rng.uniform(-4.0, 4.0)]))
    return SimpleNamespace(
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
        kl_after_ref=rng.uniform(0.0, 2.0),
        logp_start=more.uniform(-3.0, 0.0),
        routed_alike=more.random(),
    )


def support(rng, first: float) -> list[float]:
    """Log-probabilities of the sampled token and of three more, with at most 0.9 together."""
    shares = [rng.random() for _ in range(3)]
    mass = rng.uniform(0.4, 0.9)
    return [first, *(LN(mass * share / sum(shares)) for share in shares)]


def tensors(drawn: list, actor: bool) -> tuple[TokenStats, Batch]:
    """The responses as tensors. Padding holds values that must not count."""
    T = max(len(r.tokens) for r in drawn)

    def padded(name, fill, dtype=f64):
        rows = [[getattr(t, name) for t in r.tokens] for r in drawn]
        return torch.tensor([row + [fill] * (T - len(row)) for row in rows], dtype=dtype)

    def per_response(values, dtype=f64):
        return torch.tensor(values, dtype=dtype)

    stats = {name: padded(name, -33.0) for name in ("logp", "entropy", "tail", "routed_alike")}
    columns = {name: padded(name, -44.0) for name in ("logp_ref", "tail_ref", "logp_start")}
    stats["support_logp"] = padded("support_new", [-1.0] * 4)
    columns["support_logp_ref"] = padded("support_ref", [-2.0] * 4)
    if actor:
        stats |= {name: padded(name, -3.0) for name in ("actor_logp", "actor_entropy", "distill_loss", "kl")}
        columns |= {name: padded(name, -4.0) for name in ("actor_logp_ref", "z_ref", "kl_after_ref")}
    lengths = [len(r.tokens) for r in drawn]
    batch = Batch(
        ids=torch.zeros(len(drawn), 2 + T, dtype=torch.long),
        prompt_len=per_response([2] * len(drawn), torch.long),
        length=per_response(lengths, torch.long),
        group=per_response([i // 3 for i in range(len(drawn))], torch.long),
        reward=per_response([r.reward for r in drawn]),
        cut=per_response([r.cut for r in drawn], torch.bool),
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


# -- The loops: every metric, from weights, masks and clips as the loss logs them (test_oracle.py checks these) -------


def exp_clamped(x: float, cfg) -> float:
    return math.exp(max(-cfg.log_ratio_clamp, min(cfg.log_ratio_clamp, x)))


def log_r(t) -> float:
    return t.logp_ref - t.logp_inf


def ratio(t, cfg) -> float:
    return exp_clamped(log_r(t), cfg)


def response_ratio(r, cfg) -> float:
    return exp_clamped(sum(log_r(t) for t in r.trained), cfg)


def note_logs(drawn: list, new, batch, cfg, stats) -> None:
    """Give each token what the loss logs."""
    _, logs = objectives.joint_loss(new, batch, stats, cfg)
    for i, r in enumerate(drawn):
        for n, t in enumerate(r.tokens):
            vars(t).update({name: x[i, n].item() for name, x in logs.items()})


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def ess(weights) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def loops(drawn: list, cfg, stats, actor: bool) -> dict[str, float]:
    """All metrics of these responses, name by name."""
    note_logs(drawn, *tensors(drawn, actor), cfg, stats)
    trained = [r for r in drawn if r.trained]
    pairs = []  # (token, its response)
    for r in trained:
        pairs += [(t, r) for t in r.trained]
    out = mismatch(trained, cfg) | weights(trained, pairs) | sequences(trained, cfg) | rewards(trained, pairs)
    out |= update(pairs) | errors(pairs)
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
    means, largest = [], []
    for r in trained:
        gaps = [abs(math.exp(t.logp_inf) - math.exp(t.logp_ref)) for t in r.trained]
        means.append(mean(gaps))
        largest.append(max(gaps))
    out["rollout_corr/mean_mismatch"] = mean(means)
    out["rollout_corr/max_mismatch"] = mean(largest)
    out["rollout_corr/largest_mismatch"] = max(largest)
    out["rollout_corr/mismatch_above_half"] = mean(float(gap > 0.5) for gap in largest)
    out["rollout_corr/largest_gap"] = max(abs(log_r(t)) for t in tokens)
    if cfg.keep_sampling_mask == "recompute":
        out["rollout_corr/cut_fraction"] = mean(t.logp_ref <= -69.0 for t in tokens)
    return out


def weights(trained, pairs) -> dict:
    applied = [t.weight * t.keep for t, _ in pairs]
    return {
        "rollout_corr/rollout_is_eff_sample_size": ess(applied),
        "weight_var": mean((w - mean(applied)) ** 2 for w in applied),
        "rollout_corr/rollout_rs_masked_fraction": 1 - mean(t.keep for t, _ in pairs),
        "rollout_corr/rollout_rs_seq_masked_fraction": mean(any(t.keep == 0 for t in r.trained) for r in trained),
    }


def sequences(trained, cfg) -> dict:
    C = cfg.is_cap if cfg.correction == "seq_tis" else 4.0
    R = [response_ratio(r, cfg) for r in trained]
    capped = [min(x, C) for x in R]
    clamped = mean(abs(sum(log_r(t) for t in r.trained)) >= cfg.log_ratio_clamp for r in trained)
    return {
        "rollout_corr/seq_eff_sample_size": ess(R),
        "rollout_corr/seq_clamped_fraction": clamped,
        "rollout_corr/reward_weighted": sum(c * r.reward for c, r in zip(capped, trained, strict=True)) / sum(capped),
    }


def rewards(trained, pairs) -> dict:
    return {
        "reward": mean(r.reward for r in trained),
        "response_length": mean(len(r.trained) for r in trained),
        "no_reward": 0.0,
        "cut": mean(r.cut for r in trained),
        "advantage_abs": mean(abs(r.adv) for r in trained),
        "entropy": mean(t.entropy for t, _ in pairs),
        "router/agreement": mean(t.routed_alike for t, _ in pairs),
        "staleness/mean_updates": mean(r.age for r in trained),
        "staleness/max_updates": max(r.age for r in trained),
    }


def update(pairs) -> dict:
    return {
        "clip_fraction": mean(t.clipped for t, _ in pairs),
        "ppo_kl": mean(t.logp_ref - t.logp for t, _ in pairs),
        "start_kl": mean(t.logp - t.logp_start for t, _ in pairs),
    }


def errors(pairs) -> dict:
    out = {}
    for low, high in ((0.0, 1e-3), (1e-3, 1e-1), (1e-1, 1.0)):
        inside = [t for t, _ in pairs if low < math.exp(t.logp_ref) <= high]
        out[f"error/ratio_out/{high:g}"] = mean(abs(t.logp - t.logp_ref) > LN(2) for t in inside)
    return out | {
        "error/low_prob_pos": mean(t.logp_ref < LN(1e-3) for t, r in pairs if r.adv > 0),
        "error/low_prob_neg": mean(t.logp_ref < LN(1e-3) for t, r in pairs if r.adv < 0),
    }


def acceptance(tokens, cfg, stats) -> dict:
    names = {"obrs/accept_rate": "accept", "obrs/z": "z"}
    out = {"obrs/lambda": stats.lam} if cfg.obrs_accept_rate else {}
    if cfg.obrs_z != "exact":
        names |= {f"obrs/{key}": key for key in ("z_low", "z_high", "z_approx") if hasattr(tokens[0], key)}
        out["obrs/kappa"] = stats.kappa
    out |= {name: mean(getattr(t, key) for t in tokens) for name, key in names.items()}
    if cfg.actor != "none" and cfg.obrs_target == "ref":
        out["obrs/kl_after"] = mean(t.kl_after_ref for t in tokens)
    return out


def of_actor(pairs, cfg, stats) -> dict:
    tokens = [t for t, _ in pairs]
    return {
        "actor/loss": mean(t.actor_loss for t in tokens),
        "actor/entropy": mean(t.actor_entropy for t in tokens),
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
    "obrs, budget": {"objective": "jackpot", "obrs_accept_rate": 0.8},
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


def test_cut_responses_count_as_sampled():
    """--mask_cut leaves cut responses out of the loss; `reward` and `cut` count them."""
    drawn, cfg, stats, actor = case("none")
    new, batch = tensors(drawn, actor)
    tokens = batch.mask.any(1).tolist()  # one response has none
    batch.cut = torch.tensor([i < 4 for i in range(len(drawn))])
    batch.mask &= ~batch.cut[:, None]
    m = observed(new, batch, stats, replace(cfg, mask_cut=True))
    rewards = [r.reward for i, r in enumerate(drawn) if i < 4 or tokens[i]]
    assert m["reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert m["cut"] == pytest.approx(4 / len(rewards))


def test_steps_that_end_in_a_warning():
    """No reward, responses that are mostly truncated, sequence weights at the clamp."""
    drawn, cfg, stats, actor = case("none")
    names = ("no_reward", "cut", "rollout_corr/seq_clamped_fraction")
    usual = observed(*tensors(drawn, actor), stats, cfg)
    for r in drawn:
        r.reward, r.cut = 0.0, True
        for t in r.tokens:
            t.logp_inf = t.logp_ref + 2 * CLAMP
    m = observed(*tensors(drawn, actor), stats, cfg)
    assert all(usual[name] <= 0.5 and m[name] == 1 for name in names)
    assert m["rollout_corr/seq_eff_sample_size"] == pytest.approx(1)  # equal weights, and meaningless
    drawn[0].reward, drawn[1].reward = 1.0, -1.0  # their mean is 0
    new, batch = tensors(drawn, actor)
    assert observed(new, batch, stats, cfg)["no_reward"] == 0
    batch.logp_ref = batch.logp_ref.float()
    batch.logp_inf = batch.logp_ref - 60  # squares of weights are above float32's range
    m = observed(new, batch, stats, replace(cfg, log_ratio_clamp=80.0, correction="is"))
    assert m["rollout_corr/seq_eff_sample_size"] == pytest.approx(0.8)  # one response has one token
    assert m["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1)
    assert m["rollout_corr/chi2_token"] == pytest.approx(math.exp(120), rel=1e-4)


# -- One row a metric, and the page of all metrics --------------------------------------------------------------------


def named_on_the_page() -> list[str]:
    """The names at the start of the page's lines."""
    return [line.split()[0] for line in metrics.page().splitlines() if re.match(r"  \S", line)]


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
        if key not in named and not any(fnmatchcase(key, pattern) for pattern in mentioned):
            missing.append(key)
    return missing


def test_every_public_row_is_computed_and_explained_once():
    computed = set()
    for name in CASES:
        drawn, cfg, stats, actor = case(name)
        computed |= observed(*tensors(drawn, actor), stats, cfg).keys()
    names = [row.name for row in metrics.ROWS]
    public = {name for name in names if not name.startswith("_")}
    assert public == computed and len(names) == len(set(names))
    assert unexplained(computed) == []
    unknown = ["rollout_corr/nothing", "versions", "sync/nothing", "actor", "eval/policy"]
    assert unexplained([*unknown, "remote/anything", "delay/versions", "sync_s"]) == unknown
    assert sorted(named_on_the_page()) == sorted(public | set(metrics.ELSEWHERE))  # each once
