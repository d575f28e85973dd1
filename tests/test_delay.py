"""Delay distributions against their quantiles, the virtual clock by hand, delayed runs that resume bit for bit."""

import math
import signal
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
import torch
from conftest import Stream, Watched, make_cfg, tiny_model
from test_rollout import PROBE_IDS
from test_train import flags, start, timeless, train_here, wait_for

from delay import DelayDistribution, DelaySource, Ticket
from machinery.checkpoint import read_config, shards
from machinery.run import read_metrics
from model.engines import HFEngine
from rollout import Sampling, uniforms
from sync import WeightCheck
from tasks import Arithmetic, arithmetic_tokenizer

__all__ = ["train_here"]  # a fixture


def distribution(kind, mass=0.995):
    return DelayDistribution(kind, 60.0, 1800.0, mass)


def test_the_papers_two_quantiles():
    """P(D < 60) = P(D > 1800) = 0.25 %: the paper's parameters, and 18 % of an exponential below 60 s."""
    lognormal = distribution("lognormal").fit()
    assert lognormal["mu"] == pytest.approx(5.795, abs=1e-3)
    assert lognormal["sigma"] == pytest.approx(0.606, abs=1e-3)
    weibull = distribution("weibull").fit()
    assert weibull["k"] == pytest.approx(2.288, abs=1e-3)
    rate = distribution("exponential").fit()["rate"]
    assert math.exp(-rate * 1800) == pytest.approx(0.0025)
    assert 1 - math.exp(-rate * 60) == pytest.approx(0.181, abs=1e-3)

    def lognormal_cdf(x):
        return NormalDist(lognormal["mu"], lognormal["sigma"]).cdf(math.log(x))

    def weibull_cdf(x):
        return 1 - math.exp(-((x / math.exp(weibull["log_scale"])) ** weibull["k"]))

    def exponential_cdf(x):
        return 1 - math.exp(-rate * x)

    for x, below in ((60.0, 0.0025), (1800.0, 0.9975)):
        assert lognormal_cdf(x) == pytest.approx(below)
        assert weibull_cdf(x) == pytest.approx(below)
    for kind, cdf in (
        ("lognormal", lognormal_cdf),
        ("weibull", weibull_cdf),
        ("exponential", exponential_cdf),
    ):
        for u in (0.2, 0.5, 0.9):
            assert cdf(distribution(kind).quantile(u)) == pytest.approx(u)
        assert distribution(kind).quantile(1e-9) == 60.0  # clipped
        assert distribution(kind).quantile(1 - 1e-9) == 1800.0
    # with nearly no mass between the bounds, nearly every delay is one of the two bounds
    for kind in ("lognormal", "weibull"):
        outside = distribution(kind, mass=0.001)
        assert {outside.quantile(u) for u in (1e-16, 0.2, 0.8, 1 - 1e-16)} == {60.0, 1800.0}
    assert distribution("constant").quantile(0.3) == 1800.0
    assert distribution("lognormal").quantile(0.5) == pytest.approx(math.sqrt(60 * 1800))


def delayed(folders, store, **changes):
    base = dict(delay="constant", delay_min=1.0, delay_max=3.0, step_seconds=1.0, delay_samplers=1)
    cfg = make_cfg(**{**base, **changes})
    return DelaySource(
        HFEngine(str(folders / "actor")),
        Arithmetic(),
        arithmetic_tokenizer(),
        Sampling(max_tokens=6, seed=3),
        group_size=2,
        topk=0,
        model="actor",
        check=WeightCheck(read_config(folders / "actor"), PROBE_IDS),
        cfg=cfg,
        store=store,
    )


def weights(version):
    """Weights that identify their version."""
    model = tiny_model(1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.05 * version)
    return model.state_dict()


def versions(source, updates, groups=1, stride=1):
    """[versions of the learner's groups] at each update."""
    out = []
    for v in range(0, updates * stride, stride):
        source.publish(v, weights(v).items())
        out.append([g.version for g in source.next(groups, v)])
    return out


def test_a_sampler_keeps_its_model_until_the_delay_is_over(folders, tmp_path):
    source = delayed(folders, tmp_path)
    assert versions(source, 8) == [[0], [0], [0], [3], [3], [3], [6], [6]]  # D = 3 steps
    on_disk = sorted(p.name for p in tmp_path.iterdir())
    assert on_disk == ["v000006.safetensors", "v000007.safetensors"]  # the sampler's version and the newest
    group = source.next(1, 7)[0]
    model = tiny_model(1)
    model.load_state_dict(weights(6))
    P = len(group.prompt_ids)
    ids = torch.tensor(np.concatenate([group.prompt_ids, group.responses[0].tokens]).astype(np.int64))
    logp = model(ids[None]).logits[0].log_softmax(-1)[P - 1 : -1].gather(1, ids[P:, None])[:, 0]
    # sampled with version 6, not with the newest
    assert torch.allclose(logp, torch.from_numpy(group.responses[0].logp_inf), atol=1e-4)
    assert group.t_published == 6.0
    assert source.now(7) == 7.0


def test_versions_and_checkpoints_use_different_process_groups(folders, tmp_path, monkeypatch):
    """A thread may be writing a checkpoint, and ranks match messages of one process group by order."""
    versions_of, savings = [], []
    monkeypatch.setattr("delay.own_group", versions_of.append)
    monkeypatch.setattr(shards, "own_group", savings.append)
    versions(delayed(folders, tmp_path), 2)
    shards.saving_group()
    assert set(versions_of) == {"delay"} and savings == ["checkpoints"]


def test_caps_broadcasts_and_several_updates_a_batch(folders, tmp_path):
    capped = delayed(folders, tmp_path / "a", max_staleness=2)
    assert versions(capped, 6) == [[0], [0], [2], [2], [4], [4]]
    synchronous = delayed(folders, tmp_path / "b", max_staleness=0)
    assert versions(synchronous, 4) == [[0], [1], [2], [3]]
    every_other = delayed(folders, tmp_path / "c", sync_every=2, delay_max=1.0)
    assert versions(every_other, 6) == [[0], [0], [2], [2], [4], [4]]
    # the sampler reloads at 3 s and at 6 s: versions 2 and 6 are published by then
    two_updates = delayed(folders, tmp_path / "d")
    assert versions(two_updates, 4, stride=2) == [[0], [0], [2], [6]]


def test_samplers_draw_independently(folders, tmp_path):
    changes = dict(delay="lognormal", delay_min=2.0, delay_max=9.0, delay_samplers=3)
    got = versions(delayed(folders, tmp_path / "a", **changes), 12, groups=3)
    assert got == versions(delayed(folders, tmp_path / "b", **changes), 12, groups=3)
    held = [[row[i] for row in got] for i in range(3)]
    assert all(v == sorted(v) and v[0] == 0 for v in held)  # versions never decrease
    assert len({tuple(v) for v in held}) == 3  # different reload times
    for v in held:
        assert all(2 <= later - earlier <= 10 for earlier, later in pairwise(sorted(set(v))))
    assert got != versions(delayed(folders, tmp_path / "c", **changes, seed=1), 12, groups=3)


def test_every_delay_is_a_different_draw(folders, tmp_path):
    """Each delay is the quantile of a uniform of its sampler and number; 200 draws have the distribution's median."""
    source = delayed(folders, tmp_path, delay="lognormal", delay_min=60.0, delay_max=1800.0, delay_samplers=2)
    draws = [[source.delay(i, n) for n in range(100)] for i in range(2)]
    every = [x for row in draws for x in row]
    assert len(set(every)) == 200
    assert draws[1][7] == distribution("lognormal").quantile(float(uniforms(1, "delay", source.cfg.seed, 1, 7)[0]))
    below = sum(x < math.sqrt(60 * 1800) for x in every)  # the median
    assert abs(below - 100) < 4 * math.sqrt(50)


def test_groups_that_wait_too_long_are_dropped_and_counted(folders, tmp_path):
    source = delayed(folders, tmp_path / "a", sampler_rate=2.0, window_seconds=2.5, delay_max=1.0)
    got = versions(source, 8, groups=1)
    assert got[:4] == [[0], [0], [1], [1]]  # two groups a step, one used: in order of sampling
    assert max(v - row[0] for v, row in enumerate(got)) <= 2
    assert source.dropped["window"] == 16 - 8 - len(source.tickets) > 0
    assert source.dropped["staleness"] == 0
    m = source.metrics()
    assert m["delay/dropped_window"] == source.dropped["window"]
    assert m["delay/waiting"] == len(source.tickets)
    assert m["sync/MiB"] > 0

    late = delayed(folders, tmp_path / "b", sampler_rate=2.0, max_staleness=2, delay_max=1.0)
    got = versions(late, 8, groups=1)
    assert max(v - row[0] for v, row in enumerate(got)) == 2
    assert late.dropped["staleness"] > 0
    assert late.dropped["window"] == 0

    slow = delayed(folders, tmp_path / "c", sampler_rate=0.5, delay_max=1.0)
    assert versions(slow, 4, groups=1) == [[0], [1], [2], [3]]
    assert slow.waited == 4.0  # the learner waits a step for each group
    assert slow.metrics()["delay/clock"] == 4.0
    assert slow.now(3) == 7.0

    both = delayed(folders, tmp_path / "d", sampler_rate=2.0, max_staleness=2, window_seconds=2.5, delay_max=1.0)
    versions(both, 8, groups=1)
    assert sum(both.dropped.values()) == 16 - 8 - len(both.tickets)  # too old in both ways: counted once
    assert both.dropped["staleness"] > 0


def test_two_ranks_share_clock_and_groups(folders, tmp_path):
    one = delayed(folders, tmp_path / "a", delay_samplers=1)
    two = [delayed(folders, tmp_path / "b", delay_samplers=1) for _ in range(2)]
    for rank, source in enumerate(two):
        source.rank, source.n_ranks = rank, 2
    for v in range(5):
        for source in (one, *two):
            source.publish(v, weights(v).items())
        whole = one.next(4, v)
        parts = [source.next(2, v) for source in two]
        for i, a in enumerate(whole):
            b = parts[i % 2][i // 2]
            assert a.uid == b.uid
            assert a.version == b.version
            assert [r.tokens.tolist() for r in a.responses] == [r.tokens.tolist() for r in b.responses]
    assert {p.name for p in (tmp_path / "a").iterdir()} == {p.name for p in (tmp_path / "b").iterdir()}


def test_a_version_stays_on_disk_while_a_group_of_any_rank_needs_it(folders, tmp_path, monkeypatch):
    """With --dynamic_sampling, ranks take unequal numbers of groups."""
    elsewhere = {0}
    monkeypatch.setattr("delay.from_all", lambda needed, group: [needed, elsewhere])
    source = delayed(folders, tmp_path, delay="constant", delay_max=1.0)
    for v in range(6):
        source.publish(v, weights(v).items())
        source.next(1, v)
    assert source.path(0).exists() and not source.path(1).exists()
    elsewhere.clear()
    source.publish(6, weights(6).items())
    assert not source.path(0).exists() and source.path(6).exists()


def test_versions_are_written_and_loaded_tensor_by_tensor(folders, tmp_path):
    """One rank writes for both, and both read every tensor equally often. Without a due broadcast no rank reads."""
    ranks = [delayed(folders, tmp_path / str(rank), sync_every=2) for rank in range(2)]
    ranks[1].rank = 1
    for source in ranks:
        streams = [Stream(add=v) for v in range(5)]
        for v, stream in enumerate(streams):
            source.publish(v, stream)
        assert [stream.passes for stream in streams] == [2, 0, 1, 0, 1]
        assert max(stream.most for stream in streams) <= 2
    assert not (tmp_path / "1").exists()
    source, loaded = ranks[0], []
    source.load = lambda version, tensors: loaded.append(Watched(tensors))
    source.sample = list
    source.sample_tickets([Ticket(0, 4, 4.0)])
    for _ in range(2):  # the weight check reads twice
        assert all((x == 4.0 + int(name[1:])).all() for name, x in loaded[0])
    assert loaded[0].most <= 2


def identity(groups):
    """The identity of each group: uid, version, digest and tokens."""
    return [(g.uid, g.version, g.digest, [r.tokens.tolist() for r in g.responses]) for g in groups]


def test_state_is_restored_in_the_middle_of_a_run(folders, tmp_path):
    changes = dict(
        delay="weibull", delay_min=1.0, delay_max=6.0, delay_samplers=2, sampler_rate=1.5, window_seconds=1.5
    )
    whole = delayed(folders, tmp_path / "a", **changes)
    part = delayed(folders, tmp_path / "b", **changes)
    for v in range(4):
        for source in (whole, part):
            source.publish(v, weights(v).items())
            source.next(2, v)
    state = part.state_dict()
    for v in range(4, 8):  # continues after the checkpoint, then dies
        part.publish(v, weights(v).items())
        part.next(2, v)
    back = delayed(folders, tmp_path / "b", **changes)
    back.load_state_dict(state)
    for v in range(4, 10):
        for source in (whole, back):
            source.publish(v, weights(v).items())
        assert identity(whole.next(2, v)) == identity(back.next(2, v))
    assert whole.metrics() == back.metrics()
    assert whole.dropped["window"] > 0
    for p in (tmp_path / "b").iterdir():
        p.unlink()
    gone = "--resume: .*safetensors is missing, and a delayed sampler still uses this version"
    with pytest.raises(ValueError, match=gone):
        delayed(folders, tmp_path / "b", **changes).load_state_dict(state)


LOGNORMAL = dict(
    delay="lognormal",
    delay_min=2.0,
    delay_max=12.0,
    step_seconds=1.0,
    delay_samplers=2,
    rollout_batch=16,
    train_batch=16,
)


def test_a_staleness_bound_of_0_is_the_plain_loop(solvers, tmp_path, train_here):
    """Delayed samplers without staleness give the metrics of a run without delays."""
    sizes = dict(rollout_batch=16, train_batch=16, steps=3, save_every=0)
    for name, more in (("plain", {}), ("bounded", {**LOGNORMAL, "delay_samplers": 4, "max_staleness": 0})):
        train_here(flags(solvers, tmp_path / name, **{**more, **sizes}))
    plain = timeless(tmp_path / "plain")
    bounded = timeless(tmp_path / "bounded")
    assert "delay/clock" in bounded[1]
    for row in bounded:
        for key in [key for key in row if key.startswith("delay/")]:
            del row[key]
    assert plain == bounded


def without_sync(run):
    """The rows of a run without weight syncs: a resumed engine has one load more."""
    return [{k: v for k, v in row.items() if not k.startswith("sync/")} for row in timeless(run)]


def test_a_delayed_run_killed_and_resumed_is_the_same_run(solvers, tmp_path, train_here):
    more = dict(LOGNORMAL, objective="gepo", actor="none", cppo_beta=0.005, steps=7)
    process = start(flags(solvers, tmp_path / "run", **more))
    wait_for(tmp_path / "run", 4, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    train_here(["--resume", f"--out={tmp_path / 'run'}"])
    train_here(flags(solvers, tmp_path / "whole", **more))
    assert without_sync(tmp_path / "run") == without_sync(tmp_path / "whole")
    rows = read_metrics(tmp_path / "whole")[1:]
    stale = [row["staleness/max_updates"] for row in rows]
    assert stale[0] == 0 and max(stale) >= 2
    assert max(row["rollout_corr/k3_kl"] for row in rows) > 1e-5
    for row in rows:  # an update takes one virtual second
        assert row["staleness/mean_seconds"] == pytest.approx(row["staleness/mean_updates"])
    on_disk = list((tmp_path / "whole" / "versions").iterdir())
    assert len(on_disk) <= 2 + 1 + 2 * 3  # held, newest, kept for two checkpoints


@pytest.mark.parametrize("updates", [1, 2, 4])
def test_waiting_time_does_not_depend_on_updates_a_batch(folders, tmp_path, updates):
    """Samplers make a quarter of the needed groups: the groups of 8 updates take 32 steps, 24 of them waiting."""
    batch = dict(train_batch=8, rollout_batch=8 * updates)
    source = delayed(folders, tmp_path, sampler_rate=0.25, step_seconds=10.0, **batch)
    source.sample_tickets = lambda taken: taken
    for v in range(0, 8, updates):
        source.publish(v, weights(v).items())
        assert len(source.next(2 * updates, v)) == 2 * updates
    assert source.waited == 240.0


@pytest.mark.parametrize("rate, window", [(0.5, 1.1), (0.3, 3.1), (0.25, 3.1), (1.0, 0.5), (0.6, 1.001)])
def test_the_narrowest_allowed_windows_fill_an_update(folders, tmp_path, rate, window):
    source = delayed(folders, tmp_path, sampler_rate=rate, window_seconds=window)
    source.publish(0, weights(0).items())
    source.sample_tickets = lambda taken: taken
    for v in range(3):
        assert len(source.next(3, v)) == 3


def test_both_last_checkpoints_can_be_resumed(folders, tmp_path):
    """The newest checkpoint may be incomplete: the previous checkpoint's versions stay until it is complete."""
    source, states = delayed(folders, tmp_path, delay_max=1.0), []
    for v in range(9):
        source.publish(v, weights(v).items())
        source.next(1, v)
        if v in (2, 5):
            states.append(source.state_dict())
    for state in states:
        delayed(folders, tmp_path, delay_max=1.0).load_state_dict(state)
