"""Delay distributions against their quantiles, the virtual clock by hand, delayed runs that resume bit for bit."""

import math
from functools import partial
from statistics import NormalDist

import pytest
import torch
from conftest import Stream, at, log_probabilities, make_cfg, tiny_model
from test_rollout import PROBE_IDS
from test_train import flags, timeless, train_here

from delay import DelaySource, delay_quantile
from machinery.checkpoint.models import read_config
from model.engines import HFEngine
from rollout import Sampling, uniforms
from sync import WeightCheck
from tasks.arith import Arithmetic, arithmetic_tokenizer

__all__ = ["train_here"]  # a fixture


def test_the_papers_two_quantiles():
    """P(D < 60) = P(D > 1800) = 0.25 %: the paper's parameters, and 18 % of an exponential below 60 s."""
    quantile = partial(delay_quantile, low=60.0, high=1800.0)
    cdfs = {
        "lognormal": lambda x: NormalDist(5.795, 0.606).cdf(math.log(x)),
        "weibull": lambda x: 1 - math.exp(-((x / 822.96) ** 2.2878)),
        "exponential": lambda x: 1 - math.exp(math.log(0.0025) * x / 1800),
    }
    for kind, cdf in cdfs.items():
        below = 1 - 0.0025 ** (60 / 1800) if kind == "exponential" else 0.0025
        assert (cdf(60.0), cdf(1800.0)) == pytest.approx((below, 0.9975), rel=0.01)
        for u in (0.2, 0.5, 0.9):
            assert cdf(quantile(kind, u=u)) == pytest.approx(u, abs=1e-3)
        assert [quantile(kind, u=u) for u in (1e-9, 1 - 1e-9)] == [60.0, 1800.0]  # clipped
    assert quantile("constant", u=0.3) == 1800.0
    assert quantile("lognormal", u=0.5) == pytest.approx(math.sqrt(60 * 1800))


def delayed(folders, store, **changes):
    base = dict(delay="constant", delay_max=3.0, step_seconds=1.0, delay_samplers=1)
    return DelaySource(
        HFEngine(str(folders / "actor")),
        Arithmetic(),
        arithmetic_tokenizer(),
        Sampling(max_tokens=6, seed=3),
        group_size=2,
        topk=0,
        model="actor",
        check=WeightCheck(read_config(folders / "actor"), PROBE_IDS),
        cfg=make_cfg(**{**base, **changes}),
        store=store,
    )


def weights(version):
    """Weights that identify their version."""
    model = tiny_model(1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.05 * version)
    return model.state_dict()


def update(source, version, groups=1):
    """Publish a version and take groups."""
    source.publish(version, weights(version).items())
    return source.next(groups, version)


def versions(source, updates, groups=1, stride=1):
    """[versions of the learner's groups] at each update."""
    return [[g.version for g in update(source, v, groups)] for v in range(0, updates * stride, stride)]


def identity(groups):
    """The identity of each group: uid, version, digest and tokens."""
    return [(g.uid, g.version, g.digest, [r.tokens.tolist() for r in g.responses]) for g in groups]


@pytest.mark.parametrize(
    "changes, stride, expected",
    [
        (dict(), 1, [0, 0, 0, 3, 3, 3, 6, 6]),  # D = 3 steps
        (dict(), 2, [0, 0, 2, 6]),  # the sampler reloads at 3 s and at 6 s: versions 2 and 6 are published by then
        (dict(max_staleness=2), 1, [0, 0, 2, 2, 4, 4]),
        (dict(max_staleness=0), 1, [0, 1, 2, 3]),
        (dict(sync_every=2, delay_max=1.0), 1, [0, 0, 2, 2, 4, 4]),
        (dict(sync_every=2, max_staleness=2), 1, [0, 0, 2, 2, 4, 4]),
        (dict(max_staleness=2), 4, [0, 4, 8]),  # newest weights after four updates to a rollout batch
    ],
)
def test_a_sampler_keeps_its_model_until_the_delay_is_over(changes, stride, expected, folders, tmp_path):
    source = delayed(folders, tmp_path, **changes)
    assert versions(source, len(expected), stride=stride) == [[v] for v in expected]


def test_a_group_is_sampled_with_its_samplers_version(folders, tmp_path):
    source = delayed(folders, tmp_path)
    versions(source, 7)
    (group,) = update(source, 7)
    on_disk = sorted(p.name for p in tmp_path.iterdir())
    assert on_disk == ["v000006.safetensors", "v000007.safetensors"]  # the sampler's version and the newest
    model = tiny_model(1)
    model.load_state_dict(weights(6))
    logp = at(*log_probabilities(model, group.prompt_ids, group.responses[0].tokens))
    assert torch.allclose(logp, torch.from_numpy(group.responses[0].logp_inf), atol=1e-4)
    assert (group.version, group.t_published, source.now(7)) == (6, 6.0, 7.0)


def test_samplers_take_turns(folders, tmp_path):
    """Over several rollouts, also of numbers of groups that the number of samplers does not divide."""
    source = delayed(
        folders, tmp_path, delay="lognormal", delay_min=60.0, delay_max=1800.0, delay_samplers=3, step_seconds=100.0
    )
    for v in range(12):
        groups = update(source, v, 4)
        held = [sampler.version for sampler in source.samplers]
        assert [(g.uid[2], g.version) for g in groups] == [(n, held[n % 3]) for n in range(4 * v, 4 * v + 4)]
    assert len(set(held)) > 1
    source.n_ranks, source.engine.tp = 4, 2  # the two ranks of an engine sample from one sampler
    turns = [[source.samplers.index(source.sampler_of(n)) for n in range(3)] for source.rank in range(4)]
    assert turns == 2 * [[0, 2, 1]] + 2 * [[1, 0, 2]]


def test_every_delay_is_a_different_draw(folders, tmp_path):
    """Each delay is the quantile of a uniform of its sampler and number."""
    source = delayed(folders, tmp_path, delay="lognormal", delay_min=60.0, delay_max=1800.0, delay_samplers=2)
    draws = [[source.delay(i, n) for n in range(100)] for i in range(2)]
    every = [x for row in draws for x in row]
    assert len(set(every)) == 200
    assert draws[1][7] == delay_quantile(
        "lognormal", 60.0, 1800.0, float(uniforms(1, "delay", source.cfg.seed, 1, 7)[0])
    )


def test_groups_given_back_are_sampled_again(folders, tmp_path):
    source = delayed(folders, tmp_path / "store", delay_samplers=3)
    update(source, 0)
    before = source.state_dict()
    source.mark()
    source.next(2, 0)
    assert source.state_dict() != before
    source.give_back()
    assert source.state_dict() == before


def test_two_ranks_share_clock_and_groups(folders, tmp_path):
    changes = dict(delay="lognormal", delay_min=1.0, delay_max=6.0, delay_samplers=3)
    one, *two = (delayed(folders, tmp_path / store, **changes) for store in ("a", "b", "b"))
    for rank, source in enumerate(two):
        source.rank, source.n_ranks = rank, 2
    for v in range(5):
        whole = identity(update(one, v, 4))
        for source in two:
            source.publish(v, weights(v).items())
        assert [identity(source.next(2, v)) for source in two] == [whole[::2], whole[1::2]]
    assert len({version for _, version, *_ in whole}) > 1
    assert {p.name for p in (tmp_path / "a").iterdir()} == {p.name for p in (tmp_path / "b").iterdir()}


def test_one_rank_writes_versions_for_all(folders, tmp_path):
    """Both ranks read every tensor once. Without a due broadcast no rank reads."""
    ranks = [delayed(folders, tmp_path / str(rank), sync_every=2) for rank in range(2)]
    ranks[1].rank = 1
    for source in ranks:
        streams = [Stream(add=v) for v in range(5)]
        for v, stream in enumerate(streams):
            source.publish(v, stream)
        assert [stream.passes for stream in streams] == [1, 0, 1, 0, 1]
    assert not (tmp_path / "1").exists()
    source, loaded = ranks[0], []
    source.load = lambda version, tensors: loaded.append(Stream(tensors))
    source.sample = list
    source.samplers[0].version = 4
    source.sample_next(1)
    for _ in range(2):  # the weight check reads twice
        assert all((x == 4.0 + int(name[1:])).all() for name, x in loaded[0])
    assert loaded[0].most <= 2


def test_state_is_restored_in_the_middle_of_a_run(folders, tmp_path):
    """Also the last checkpoint but one, after a run that continues and dies: the last one may be incomplete."""
    changes = dict(delay="weibull", delay_min=1.0, delay_max=4.0, delay_samplers=6)
    whole, part = (delayed(folders, tmp_path / name, **changes) for name in "ab")
    for v in range(4):
        assert identity(update(whole, v, 2)) == identity(update(part, v, 2))
    state = part.state_dict()
    assert any(sampler.until > 4 and sampler.version for sampler in part.samplers)  # it keeps an old version
    for v in range(4, 8):
        update(part, v, 2)
        if v == 5:
            last = part.state_dict()
    back = delayed(folders, tmp_path / "b", **changes)
    back.load_state_dict(last)
    back.load_state_dict(state)
    for v in range(4, 9):
        assert identity(update(whole, v, 2)) == identity(update(back, v, 2))
    assert whole.metrics() == back.metrics()


def test_a_staleness_bound_of_0_is_the_plain_loop(solvers, tmp_path, train_here):
    """Delayed samplers without staleness give the metrics of a run without delays."""
    sizes = dict(rollout_batch=16, train_batch=16, steps=2, save_every=0)
    bound = dict(delay="lognormal", delay_min=2.0, delay_max=12.0, step_seconds=1.0, delay_samplers=4, max_staleness=0)
    for name, more in (("plain", {}), ("bounded", bound)):
        train_here(flags(solvers, tmp_path / name, **more, **sizes))
    bounded = timeless(tmp_path / "bounded")
    assert "delay/versions" in bounded[1]
    kept = [{k: v for k, v in row.items() if not k.startswith("delay/")} for row in bounded]
    assert kept == timeless(tmp_path / "plain")
