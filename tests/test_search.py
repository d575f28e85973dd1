"""results/search.py, foretell.py, curvature.py: weights and ranks against plain loops, the best one against a law."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import TINY_TASK

import measure
import objectives
import worth
from optim import learning
from results import candidates, curvature, foretell, isotonic, praxis, search, sweep

n, B, T, F, K, M = 3, 12, 7, measure.FOLDS, 6, 2


def made_up(seed: int = 0, n: int = n, B: int = B, M: int = M) -> search.Tokens:
    """Tokens of responses of unequal lengths, everything in them random."""
    rng = np.random.default_rng(seed)
    mask = np.arange(T) < rng.integers(2, T + 1, (n, B))[..., None]
    return search.Tokens(
        log_r=rng.normal(size=(n, B, T)) * 0.6 * mask,
        mask=mask,
        plain=rng.normal(size=(n, B, 1)) * mask,
        reward=rng.integers(0, 2, (n, B)).astype(float),
        group=np.tile(np.repeat(np.arange(B // 4), 4), (n, 1)),
        along=rng.normal(size=(n, B, T, F)),
        random=rng.normal(size=(M, B, T, K)),
        gram=np.eye(F) + 1,
        squares=np.full(F, 3.0),
        overlap=rng.normal(size=(K, F)),
        each=np.array(3),
    )


def smallest(x):
    return min(x) if x else 0.0


# of one token: log r of its response, its place t, the response's length, its advantage
BY_HAND = {
    "min(R, 1)": lambda x, t, A: min(math.exp(sum(x)), 1),
    "min(R_t, 1) (prefix_tis)": lambda x, t, A: min(math.exp(sum(x[: t + 1])), 1),
    "R where R <= 1": lambda x, t, A: math.exp(sum(x)) * (sum(x) <= 0),
    "min(R, 1 / R)": lambda x, t, A: math.exp(-abs(sum(x))),
    "R / (1 + R)": lambda x, t, A: 1 / (1 + math.exp(-sum(x))),
    "prod min(r, 1) (Retrace)": lambda x, t, A: math.exp(sum(min(v, 0) for v in x[: t + 1])),
    "prod min(r, 1), own r to 2 (V-trace)": lambda x, t, A: (
        math.exp(sum(min(v, 0) for v in x[:t])) * min(math.exp(x[t]), 2)
    ),
    "r_t min of r before (MinPRO)": lambda x, t, A: min(math.exp(x[t] + smallest(x[:t])), 2),
    "suffix: min(prod_{s>=t}, 1)": lambda x, t, A: min(math.exp(sum(x[t:])), 1),
    "segments of 4, min(., 1)": lambda x, t, A: min(math.exp(sum(x[t // 4 * 4 : t + 1])), 1),
    "last 2, min(., 1)": lambda x, t, A: min(math.exp(sum(x[max(0, t - 1) : t + 1])), 1),
    "last 32, min(., 1)": lambda x, t, A: min(math.exp(sum(x[: t + 1])), 1),
    "smallest min(R_s, 1) so far": lambda x, t, A: min(1, *(math.exp(sum(x[: s + 1])) for s in range(t + 1))),
    "smallest min(R_s, 1) of all": lambda x, t, A: min(1, *(math.exp(sum(x[: s + 1])) for s in range(len(x)))),
    "Retrace times min(R, 1) (retrace_seq)": lambda x, t, A: (
        math.exp(sum(min(v, 0) for v in x[: t + 1])) * min(math.exp(sum(x)), 1)
    ),
    "r, PPO's clip of 0.2": lambda x, t, A: (
        math.exp(x[t]) * (math.exp(x[t]) <= 1.2 if A > 0 else math.exp(x[t]) >= 0.8)
    ),
    "exp(mean log r), clip of 0.01": lambda x, t, A: (
        math.exp(sum(x) / len(x)) * (sum(x) / len(x) <= math.log(1.01) if A > 0 else sum(x) / len(x) >= math.log(0.99))
    ),
    "retrace_seq, spare (spare)": lambda x, t, A: (
        math.exp(sum(min(v, 0) for v in x[: t + 1])) * min(math.exp(sum(x)), 1) * (A > 0 or math.exp(x[t]) >= 0.9)
    ),
    "R_t, clip of sqrt(t) (CTPO-LA)": lambda x, t, A: (
        math.exp(sum(x[: t + 1]))
        * (not (A > 0 and sum(x[: t + 1]) > 0.05 * math.sqrt(t + 1)))
        * (not (A < 0 and sum(x[: t + 1]) < -0.025 * math.sqrt(t + 1)))
    ),
}


@pytest.mark.parametrize("label", BY_HAND)
def test_a_candidate_by_a_plain_loop(label):
    t = made_up()
    w = np.broadcast_to(search.CANDIDATES[label](t), t.log_r.shape)
    for b, i in np.ndindex(n, B):
        length = int(t.mask[b, i].sum())
        x = t.log_r[b, i, :length].tolist()
        for place in range(length):
            want = BY_HAND[label](x, place, t.plain[b, i, 0])
            assert w[b, i, place] == pytest.approx(want, rel=1e-9), (b, i, place)


@pytest.mark.parametrize("label", search.CANDIDATES)
def test_every_candidate_can_be_weighed(label):
    t = made_up(1)
    w = search.CANDIDATES[label](t)
    assert np.isfinite(w * t.plain).all() and (np.broadcast_to(w, t.log_r.shape)[t.mask] >= -1e-12).any()
    assert math.isfinite(search.weigh(t, w)["worth"])


def test_what_is_seen_of_a_weight():
    t = made_up(2)
    w = search.CANDIDATES["r"](t)
    s = search.seen(t, w, slice(1, None, 2))
    assert len(s.along) == 1 and len(s.noise) == 1  # batch 1 of 3, and of the 2 that have random directions
    want = sum(w[1, i, p] * t.plain[1, i, p] * t.along[1, i, p, 2] for i, p in np.ndindex(B, T))
    assert s.along[0][2] == pytest.approx(want)
    in_group = sum(w[1, i, p] * t.plain[1, i, p] * t.random[1, i, p, 4] for i, p in np.ndindex(B, T) if i // 4 == 2)
    assert s.noise[0][2, 4] == pytest.approx(in_group)


def test_the_best_weight_of_a_known_law():
    """Two kinds of responses, of low and of high R: their gradients are g e_0 + noise and nothing but noise three times
    as large. The best weight is 1 for the first and 0 for the second."""
    rng = np.random.default_rng(0)
    n, B, D, K = 40, 64, 40, 48
    V = rng.choice([-1.0, 1.0], size=(K, D))
    low = rng.random((n, B)) < 0.5
    G = np.where(low[..., None], np.eye(D)[0], 0.0) + rng.normal(size=(n, B, D)) * np.where(low, 0.2, 0.6)[..., None]
    t = search.Tokens(
        log_r=np.where(low, -1.0, 1.0)[..., None] + 0.01 * rng.normal(size=(n, B, 1)),
        mask=np.ones((n, B, 1), bool),
        plain=np.ones((n, B, 1)),
        reward=np.zeros((n, B)),
        group=np.tile(np.arange(B) // 4, (n, 1)),
        along=np.repeat((G @ np.eye(D)[0])[:, :, None, None], F, 3),
        random=(G @ V.T)[:, :, None],
        gram=np.ones((F, F)),
        squares=np.ones(F),
        overlap=np.repeat(V[:, :1], F, 1),
        each=np.array(10),
    )
    edges = search.edges_of(t, "R")
    Q, a = search.moments(t, "R", edges, slice(None))
    w = isotonic.best_weight(Q, a, isotonic.ANY)
    middles = np.concatenate([[-9], edges])
    first, second = w[middles < -0.5].mean(), w[middles > 0.5].mean()
    assert abs(second) < 0.1 * first
    even = search.weigh(t, np.ones_like(t.log_r))["kappa"]
    applied = w[search.bin_of(t, "R", edges)]
    assert search.weigh(t, applied)["kappa"] > 1.05 * even
    found = search.held_out(t, "R")
    kappa = {form: search.weigh(t, weight)["kappa"] for form, (weight, _) in found.items()}
    assert min(kappa[isotonic.ANY], kappa[isotonic.HILL]) > 1.05 * even
    assert kappa[isotonic.RISING] == pytest.approx(even, rel=0.02)  # none that rises knows the two kinds apart
    low_only = np.where(low, 1.0, 0.0)[..., None]
    assert kappa[isotonic.HILL] == pytest.approx(search.weigh(t, low_only)["kappa"], rel=0.02)


def test_bins_of_each_quantity():
    """As many tokens in each of ten; of r those of by_sign."""
    t = made_up(8)
    for quantity in ("R", "R_t"):
        bins = search.bin_of(t, quantity, search.edges_of(t, quantity))[t.mask]
        counts = np.bincount(bins)
        assert len(counts) == search.BINS and counts.max() - counts.min() <= (T if quantity == "R" else 1)
    bins = search.bin_of(t, "r", search.edges_of(t, "r"))
    for k, (low, high) in enumerate(itertools.pairwise(search.SIDES)):
        assert ((bins == k) == ((np.exp(t.log_r) > low) & (np.exp(t.log_r) <= high))).all(), k


def orders(form: str, n: int) -> list[np.ndarray]:
    """Matrices B: w is of the form where B w >= 0 for one of them."""
    rises, first, last = np.eye(n)[1:] - np.eye(n)[:-1], np.eye(n)[:1], np.eye(n)[-1:]
    return {
        isotonic.ANY: [np.zeros((0, n))],
        isotonic.RISING: [rises],
        isotonic.POSITIVE: [np.concatenate([first, rises])],
        isotonic.HILL: [np.concatenate([first, rises[:top], -rises[top:], last]) for top in range(n)],
    }[form]


def by_enumeration(Q, a, B) -> np.ndarray:
    """The w of least w' Q w - 2 a w with B w >= 0: the best over all sets of rows of B w that are 0."""
    found = [np.zeros(len(a))]
    for held in itertools.product([False, True], repeat=len(B)):
        _, sizes, rows = np.linalg.svd(B[list(held)]) if any(held) else (0, [], np.eye(len(a)))
        free = rows[int(np.sum(np.array(sizes) > 1e-9)) :].T  # what these rows leave free
        if free.shape[1]:
            w = free @ np.linalg.solve(free.T @ Q @ free, free.T @ a)
            if (B @ w >= -1e-9).all():
                found.append(w)
    return min(found, key=lambda w: w @ Q @ w - 2 * a @ w)


@pytest.mark.parametrize("form", isotonic.FORMS)
def test_the_best_weight_of_a_form_by_enumeration(form):
    """Of random Q and a over five bins; where none goes along g, 0 is the best, and found."""
    rng, zeros, flat = np.random.default_rng(0), 0, 0
    for trial in range(40):
        half = rng.normal(size=(5, 7))
        Q, a = half @ half.T, rng.normal(size=5) - (trial % 4)
        want = min((by_enumeration(Q, a, B) for B in orders(form, 5)), key=lambda w: w @ Q @ w - 2 * a @ w)
        w = isotonic.best_weight(Q, a, form)
        assert w == pytest.approx(want, abs=1e-7), (trial, form)
        zeros += not np.abs(w).max()
        flat += (np.abs(np.diff(w)) < 1e-12).any()
    assert (zeros > 0) == (form in (isotonic.POSITIVE, isotonic.HILL)) and (flat > 0) == (form != isotonic.ANY)


def test_what_a_draw_adds_to_the_noise_by_many_draws():
    """Noise of a batch's gradient over 4000 draws of its masks, token by token and response by response."""
    t = made_up(6)
    rng = np.random.default_rng(0)
    for label in search.DRAWN:
        p = search.CANDIDATES[label](t)
        per = p.shape
        assert per == (n, B, 1 if label == "min(R, 1)" else T)
        added = []
        for b in range(M):
            kept = rng.random((4000, *per[1:])) < p[b]
            c = kept * t.plain[b]  # (draws, B, T)
            along = c.reshape(4000, -1) @ t.random[b].reshape(-1, K)
            added.append(along.var(0).mean())
        want = np.mean(added) / t.reference.square(range(F))
        assert search.draws_noise(t, p) == pytest.approx(want, rel=0.06), label


def test_a_drawn_mask_has_its_mean():
    p = np.full((50, 40, 1), 0.3)
    mask = candidates.drawn(p)
    assert set(np.unique(mask)) == {0.0, 1.0} and mask.shape == p.shape
    assert mask.mean() == pytest.approx(0.3, abs=0.04)
    t = made_up(7)
    for before, after in search.DRAWN.items():
        p, mask = search.CANDIDATES[before](t), search.CANDIDATES[after](t)
        assert (mask[np.broadcast_to(p >= 1, mask.shape)] == 1).all() and (mask[p < 1] == 0).any()


def test_a_pairs_ratio_has_less_error_than_its_parts():
    t = made_up(4)
    a, b = search.CANDIDATES["min(R, 1)"](t), search.CANDIDATES["min(R, 2)"](t)
    assert search.paired(t, a, 3.0 * a) == pytest.approx((0.0, 0.0), abs=1e-9)  # worth does not know the scale
    ratio, error = search.paired(t, a, b)
    ours, theirs = (search.weigh(t, w)["worth"] for w in (a, b))
    if ours > 1e-6 and theirs > 1e-6:
        assert ratio == pytest.approx(math.log(ours / theirs))
    assert error >= 0


# ---------------------------------------------------------------------------------------------------------------------
# foretell.py
# ---------------------------------------------------------------------------------------------------------------------


def point(family, worth_, reached, error=0.1):
    return foretell.Point("", family, "", worth_, 0.0, 0.0, reached, error)


def test_correlation_inside_families():
    """Levels of families do not enter: each orders its own perfectly, and the worse family has the larger worth."""
    found = [point("a", w, 10 * w) for w in (5.0, 6.0, 7.0)] + [point("b", w, 90 + w) for w in (0.1, 0.2, 0.3)]
    r, low, high = foretell.within(found, lambda p: p.worth)
    assert r == pytest.approx(1.0) and low <= r
    assert foretell.within(found, lambda p: -p.worth)[0] == pytest.approx(-1.0)
    assert math.isnan(foretell.within(found, lambda p: 1.0)[0])


def test_pairs_that_are_told_apart():
    found = [point("a", 0.1, 10), point("a", 0.2, 20), point("a", 0.3, 15), point("a", 0.4, 20.1), point("b", 9, 0)]
    right, pairs = foretell.told_apart(found, lambda p: p.worth)
    assert (right, pairs) == (4, 5)  # 20 and 20.1 are one; 0.3 with 15 stands behind 0.2 with 20


def run_with(**columns) -> dict:
    return dict(columns={"rollout_corr/k3_kl": [1.0], **columns})


def test_what_is_told_apart_in_worth_too_and_what_mends_a_pair():
    """Ranks of worth 1 2 3 4; of the end 1 3 2 4 apart, so one pair is wrong; the candidate has it right."""
    candidate = {0.1: 1.0, 0.2: 3.0, 0.3: 2.0, 0.4: 0.0}
    found = [point("a", w, y) for w, y in ((0.1, 10), (0.2, 30), (0.3, 20), (0.4, 40))] + [point("b", 0.5, 0)]
    high, low = next((a, b) for a, b in foretell.apart(found) if a.worth < b.worth)
    assert (high.worth, low.worth) == (0.2, 0.3)
    assert foretell.told_apart(found, lambda p: p.worth) == (5, 6)
    # the last is put below all three others, each of which it beat
    assert foretell.mends(found, lambda p: candidate.get(p.worth, 9.0)) == (1, 3)
    assert foretell.mends(found, lambda p: 1.0) == (0, 0)
    unsure = [replace(p, worth_se=0.09) for p in found]  # two errors of a difference are 0.255
    assert foretell.sure(unsure) == (1, 1) and foretell.sure(found) == (5, 6)
    line = "| a | : 0.200 +- 0.090, 30.0 | : 0.300 +- 0.090, 20.0 | 0.8 |"
    assert foretell.misses(unsure).splitlines()[4:] == [line]


def test_rank_correlation_given_worth():
    """The textbook formula for partial correlation, of one family without ties."""
    w, x, y = (np.array(v, float) for v in ((1, 2, 3, 4, 5, 6), (2, 1, 4, 3, 6, 5), (3, 1, 2, 6, 5, 4)))
    found = [point("a", *pair) for pair in zip(w, y, strict=True)]
    xy, xw, yw = (np.corrcoef(a, b)[0, 1] for a, b in ((x, y), (x, w), (y, w)))
    r, low, high = foretell.given_worth(found, lambda p: x[int(p.worth) - 1])
    assert r == pytest.approx((xy - xw * yw) / math.sqrt((1 - xw**2) * (1 - yw**2)))
    assert math.atanh(high) - math.atanh(r) == pytest.approx(1.96 / math.sqrt(6 - 1 - 3))
    assert low < r < high
    other = [point("b", w, w) for w in (1.0, 2.0)]
    assert foretell.where_it_varies(found + other, lambda p: p.worth if p.family == "a" else 0.0) == found


def test_the_largest_correlation_by_chance():
    """Two candidates on one family of three rows of one worth: by all six orders of the results."""
    found = [point("a", 1.0, y) for y in (10, 20, 30)]
    first, second = {10: 0, 20: 1, 30: 2}, {10: 0, 20: 2, 30: 1}
    values = [lambda p: first[p.reached], lambda p: second[p.reached]]
    exact = []
    for order in itertools.permutations((-1, 0, 1)):
        exact.append(max(abs(np.dot(x, order)) / 2 for x in ((-1, 0, 1), (-1, 1, 0))))
    drawn = foretell.largest_by_chance(found, values)
    assert set(drawn.round(6)) == set(np.round(exact, 6)) == {0.5, 1.0}
    assert np.mean(drawn > 0.9) == pytest.approx(np.mean(np.array(exact) > 0.9), abs=0.04)  # 4 of 6
    assert np.mean(foretell.largest_by_chance(found, values[:1]) > 0.9) == pytest.approx(2 / 6, abs=0.04)


def test_the_best_that_errors_allow():
    """Without errors 1; with errors of worth that drown it nothing; training's errors alone are in between."""
    found = [replace(point("a", w, 100 - 10 * w, 0.0), worth_se=100.0) for w in range(8)]
    assert foretell.attainable(found, False) == pytest.approx((1.0, 1.0, 1.0))
    mean, low, high = foretell.attainable(found, True)
    assert low < -0.5 and abs(mean) < 0.1 and high > 0.5
    noisy = [replace(p, reached_se=20.0) for p in found]
    assert 0.5 < foretell.attainable(noisy, False)[0] < 0.95


def test_what_is_seen_on_the_way():
    """Twenty updates, so that a tenth is two of them; over two runs the mean."""
    one = run_with(**{"rollout_corr/k3_kl": [0.1, 0.3, *[5.0] * 16, 0.6, 1.0], "clip_fraction": [0.0, None, 0.5]})
    two = run_with(grad_norm=[1.0, 3.0, *[2.0] * 18], entropy=[0.5, 0.3, *[9.0] * 16, 0.2, 0.0])
    assert foretell.growth(one) == pytest.approx(0.8 / 0.2)
    assert foretell.column(one, "clip_fraction").tolist() == [0.0, 0.5]
    assert foretell.unsteady(foretell.tenths(two, "grad_norm")[0]) == pytest.approx(math.sqrt(2) / 2)
    assert foretell.unsteady(foretell.column(two, "grad_norm")) == pytest.approx(math.sqrt(2 / 19) / 2)
    assert foretell.entropy_lost(two) == pytest.approx(0.4 - 0.1)
    assert foretell.over_seeds(foretell.growth)(replace(point("a", 1, 1), runs=[one, run_with()])) == pytest.approx(2.5)


def test_rows_and_samplers_of_the_studies():
    samplers = foretell.samplers()
    assert {"study", "lowbit-w2a16", "lowbit-int8"} <= set(samplers)
    assert "tis is_cap=3" in samplers["study"][2] and "none" in samplers["study"][2]
    assert samplers["lowbit-w2a16"][1] == {"rollout_quant": "w2a16"}
    rows = foretell.rows()
    assert ("table1", "on-policy") not in rows and ("lowbit", "w2a16: QaRL + GRPO") not in rows
    assert ("table1", "Jackpot") in rows and ("lowbit", "w2a16: TIS") in rows


def test_what_long_responses_reached_is_the_reward_of_the_last_tenth():
    """Over seeds their standard error, of one seed that of its updates; other studies' rows have pass@1."""
    columns = [[9.0] * 18 + [0.4, 0.6], [9.0] * 18 + [0.8, 0.9]]
    evals = {"policy": [[0, 0.25, 0.01], [20, 0.5, 0.02]]}
    got = [dict(updates=list(range(20)), columns={"reward": x}, evals=evals) for x in columns]
    assert foretell.reached_by(got, "praxis") == pytest.approx((67.5, 17.5))
    assert foretell.reached_by(got[:1], "praxis") == pytest.approx((50.0, 10.0))
    assert foretell.reached_by(got[:1], "table1") == pytest.approx((50.0, 2.0))


def test_what_our_own_long_rows_reached_is_the_policys_reward(tmp_path, monkeypatch):
    """By the files of two seeds, whose other numbers differ."""
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    folder = tmp_path / "runs" / "long" / "own_sampling"
    folder.mkdir(parents=True)
    config = dict(temperature=1.0, top_p=1.0, top_k=0, max_tokens=256, task_explain=224)
    got = [dict(name=f"row-{i}", command=f"python train.py --out=out/row-{i}", config=config) for i in (10, 11)]
    for run, reward in zip(got, (0.75, 0.85), strict=True):
        seen = {"mean@1": 0.5, "mean@1_se": 0.3, "reward": reward, "reward_se": 0.02}
        (folder / f"{run['name']}.json").write_text(json.dumps(seen))
    assert foretell.reached_by(got, "prefix, long") == pytest.approx((80.0, 5.0))
    assert foretell.reached_by(got[:1], "prefix, long") == pytest.approx((75.0, 2.0))


def test_tokens_by_sign_add_up_to_the_batch():
    t = made_up(5)
    rows = search.by_sign(t)
    assert len(rows) == len(search.SIDES) - 1
    parts = [row[sign] for row in rows for sign in ("A > 0", "A < 0")]
    plain = search.seen(t, np.ones_like(t.log_r))
    total = sum(part["along"][0] for part in parts)
    assert total == pytest.approx(np.mean(plain.along) / t.reference.square(range(F))) and abs(total) > 0.05
    assert sum(part["share"] for part in parts) == pytest.approx(1)
    here = (t.plain < 0) & (np.exp(t.log_r) < 0.3)
    assert rows[0]["r"] == [0, 0.3] and rows[0]["A < 0"]["share"] == pytest.approx(here.sum() / t.mask.sum())


def test_a_page_of_a_search_needs_its_record_and_not_its_tokens(tmp_path, monkeypatch):
    """Weighed once, written, and drawn from what was written: every number of it is that of the tokens."""
    monkeypatch.setattr(search, "RECORDS", tmp_path / "worth" / "search")
    t = made_up(6, n=8, B=48, M=8)
    t = replace(t, along=t.along + 0.2 * t.plain[..., None])  # so that all of it is worth something
    monkeypatch.setattr(search, "tokens_of", lambda name: t)
    record = search.record_of("actor")
    monkeypatch.setattr(search, "tokens_of", lambda name: pytest.fail("there is a record"))
    assert search.record_of("actor") == record == json.loads((tmp_path / "worth/search/actor.json").read_text())
    page = search.section("actor", record)
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in page.splitlines() if " | " in line}
    w, other = (search.CANDIDATES[label](t) for label in ("min(R^2, 1)", "min(R, 1)"))
    x, (log_ratio, error) = search.weigh(t, w), search.paired(t, w, other)
    row = cells["min(R^2, 1)"]
    assert row[1] == f"{x['worth']:.3f} +- {x['worth_se']:.3f}" and row[2] == sweep.number(x["kappa"])
    assert row[7] == f"{math.exp(log_ratio):.2f} ({log_ratio / error:+.1f})"
    assert f"8 batches of 48 responses of {t.mask.sum() / 8 / 48:.1f} tokens; 8 of these" in page
    assert f"R < 0.5 for {100 * (np.exp(t.log_r.sum(2)) < 0.5).mean():.0f} %" in page
    assert page.count("\n| --- |") == 6 and len(record["weights"]) == len(search.CANDIDATES)
    x = np.quantile(np.broadcast_to(t.log_r.sum(2, keepdims=True), t.log_r.shape)[t.mask], [0.03, 0.97])
    assert record["curves"]["range"] == pytest.approx(x.tolist(), rel=1e-5)


def test_worth_on_the_way_beside_where_each_row_ended(tmp_path, monkeypatch):
    """Two rows, other numbers everywhere: each row's own worth, at its own updates; one record serves both starts."""
    good, bad = "prod min(r, 1) min(R, 1), no distillation", "TIS, no distillation"
    runs = {
        label: dict(name=name, evals={"policy": [[n, y + n / 1000, 0.01] for n in (0, 25, 75, 150, 400)]})
        for label, name, y in ((good, "g", 0.5), (bad, "b", 0.125))
    }
    monkeypatch.setattr(foretell, "longer", lambda: runs)
    monkeypatch.setattr(foretell, "FOLDER", tmp_path)
    names = ["400-after-0", *(f"{run}-after-{n}" for run in "gb" for n in (25, 75, 150))]
    for i, name in enumerate(names):
        assert bad not in foretell.on_the_way(), "a row is shown when all of its records are there"
        rows = {row: dict(worth=i + x, worth_se=0.25) for row, x in (("retrace_seq", 0.5), ("tis", 0.75))}
        (tmp_path / f"{name}.json").write_text(json.dumps(dict(about=dict(kl=i / 100), rows=rows)))
    lines = foretell.on_the_way().splitlines()
    assert lines[-3:] == [
        f"| {good} | 0.50 +- 0.25 (50.0, 0.000) | 1.50 +- 0.25 (52.5, 0.010) | 2.50 +- 0.25 (57.5, 0.020) "
        "| 3.50 +- 0.25 (65.0, 0.030) | 90.0 +- 1.0 |",
        f"| {bad} | 0.75 +- 0.25 (12.5, 0.000) | 4.75 +- 0.25 (15.0, 0.040) | 5.75 +- 0.25 (20.0, 0.050) "
        "| 6.75 +- 0.25 (27.5, 0.060) | 52.5 +- 1.0 |",
        "| pairs more than two errors apart, ordered right | 0 of 1 | 0 of 1 | 0 of 1 | 0 of 1 |  |",
    ]
    asked = foretell.models_after(runs[bad], 75)
    assert [flag.rpartition("study/")[2] for flag in asked] == [
        "b/checkpoints/step_000075/policy",
        "b/checkpoints/step_000075/actor",
    ]
    assert foretell.models_after(runs[bad], 0) == []


# ---------------------------------------------------------------------------------------------------------------------
# praxis.py
# ---------------------------------------------------------------------------------------------------------------------


def test_reward_of_a_policy_from_the_responses_that_eval_left(tmp_path):
    """Mean over problems of the mean over responses; the responses go, the rest of the record stays."""
    path, responses = tmp_path / "row-3.json", tmp_path / "row-3.responses.jsonl"
    path.write_text(json.dumps({"mean@1": 0.25, "mean@1_se": 0.125}))
    rows = [{"rewards": [1.0, 0.0]}, {"rewards": [1.75, 1.25]}, {"rewards": [0.0, 0.5]}]
    responses.write_text("".join(json.dumps(row) + "\n" for row in ({"asked": 1}, *rows)))
    praxis.add_reward(path)
    seen = json.loads(path.read_text())
    assert seen.pop("reward") == pytest.approx(0.75)
    assert seen.pop("reward_se") == pytest.approx(math.sqrt((0.25**2 + 0.75**2 + 0.5**2) / 2 / 3))
    assert seen == {"mean@1": 0.25, "mean@1_se": 0.125} and not responses.exists()


def test_a_row_is_weighed_under_either_of_its_names():
    """prefix_tis by its default, recorded with the cap written out."""
    late = {p.label: p.worth for p in foretell.points() if p.family == "late samplers, these base models"}
    assert late["min(R_t, 1)"] == foretell.recorded("delay")["rows"]["prefix_tis is_cap=1"]["worth"]


# ---------------------------------------------------------------------------------------------------------------------
# curvature.py
# ---------------------------------------------------------------------------------------------------------------------


def test_the_table_of_curvature():
    """Means over batches and their standard errors, by hand."""
    x = dict(cosine=0.5, slope=[[0.001, 0.003], [0.0, 0.0], [-0.001, -0.001], [-0.002, 0.0]], reward=[[0.25, 0.75]] * 4)
    line = curvature.table({"a row": x}).splitlines()[-1]
    slopes = "2.00 +- 1.00 | 0.00 +- 0.00 | -1.00 +- 0.00 | -1.00 +- 1.00 | 1.50 +- 0.25"
    assert line == f"| a row | 0.50 | {slopes} | {' | '.join(['50.0 +- 25.0'] * 4)} |"


def test_steps_along_which_curvature_is_measured(solvers, monkeypatch):
    """Of two batches, entry by entry: mean over root mean square, of the gradients of each row's own loss."""
    small = [
        "--train_batch=16",
        "--rollout_batch=16",
        "--group_size=4",
        "--max_tokens=8",
        "--rollout=hf",
        "--dtype=float32",
    ]
    small += [f"--{key}={value}" for key, value in TINY_TASK.items()]
    small += ["--task=arith", f"--model={solvers / 'policy'}"]
    argv = [*small, f"--actor={solvers / 'actor'}", "--rows=none; seq_tis is_cap=1", "--directions=4"]
    m = worth.Measurement(*worth.parse(argv))
    gradients, seen = {row: [] for row in m.rows}, []
    kept = worth.batches_of

    def batches_of(learner, groups, rows):
        seen.append(kept(learner, groups, rows))
        return seen[-1]

    monkeypatch.setattr(curvature.worth, "batches_of", batches_of)
    steps = curvature.adams_steps(m, 2)
    assert set(steps) == {"on-policy", *m.rows}
    for made in seen:
        for row, cfg in m.rows.items():
            stats = objectives.prepare(made[row], m.comm, cfg, {})
            m.scorer.cfg = objectives.unregularised(cfg)
            m.scorer.backward(made[row], stats)
            gradients[row].append([-p.grad.flatten().clone() for p in learning(m.scorer.models.policy)])
            m.scorer.models.zero_grad(set_to_none=True)
    for row, pair in gradients.items():
        for step, a, b in zip(steps[row], *pair, strict=True):
            expected = (a + b) / 2 / (((a**2 + b**2) / 2).sqrt() + 1e-8)
            large = (a**2 + b**2) > 1e-8
            assert torch.allclose(step[large], expected[large], atol=1e-2)
    first, second = (torch.cat(steps[row]) for row in m.rows)
    assert (first - second).abs().mean() > 0.1
    m.sampler.close()
