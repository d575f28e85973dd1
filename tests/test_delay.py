"""Delay laws against their quantiles, the virtual clock by hand, and delayed runs that resume bit for bit."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

import metrics
from conftest import make_cfg, tiny_model
from delay import DelayDistribution, DelaySource
from engines import HFEngine
from rollout import Sampling
from sync import Probe
from tasks import Arithmetic, arithmetic_tokenizer
from test_rollout import PROBE_IDS
from test_train import finish, flags, start, timeless, wait_for


def test_the_texts_two_quantiles():
    """P(D < 60) = P(D > 1800) = 0.25 %: the parameters of the text, and 18 % of an exponential below 60 s."""
    law = lambda kind: DelayDistribution(kind, 60.0, 1800.0, 0.995)
    p = law("lognormal").fit()
    assert p["mu"] == pytest.approx(5.795, abs=1e-3) and p["sigma"] == pytest.approx(0.606, abs=1e-3)
    assert law("weibull").fit()["k"] == pytest.approx(2.288, abs=1e-3)
    rate = law("exponential").fit()["rate"]
    assert math.exp(-rate * 1800) == pytest.approx(0.0025) and 1 - math.exp(-rate * 60) == pytest.approx(
        0.181, abs=1e-3
    )
    k, scale = law("weibull").fit().values()
    scale = math.exp(scale)
    for x, below in ((60.0, 0.0025), (1800.0, 0.9975)):
        assert NormalDist(p["mu"], p["sigma"]).cdf(math.log(x)) == pytest.approx(below) and 1 - math.exp(
            -((x / scale) ** k)
        ) == pytest.approx(below)
    for kind, cdf in (
        ("lognormal", lambda x: NormalDist(p["mu"], p["sigma"]).cdf(math.log(x))),
        ("weibull", lambda x: 1 - math.exp(-((x / scale) ** k))),
        ("exponential", lambda x: 1 - math.exp(-rate * x)),
    ):
        for u in (0.2, 0.5, 0.9):
            assert cdf(law(kind).quantile(u)) == pytest.approx(u)
        assert law(kind).quantile(1e-9) == 60.0 and law(kind).quantile(1 - 1e-9) == 1800.0  # clipped
    for kind in ("lognormal", "weibull"):  # next to no mass between the two: nearly every delay is one or the other
        assert {DelayDistribution(kind, 60.0, 1800.0, 0.001).quantile(u) for u in (1e-16, 0.2, 0.8, 1 - 1e-16)} == {
            60.0,
            1800.0,
        }
    assert law("constant").quantile(0.3) == 1800.0
    assert law("lognormal").quantile(0.5) == pytest.approx(math.sqrt(60 * 1800))


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
        probe=Probe(str(folders / "actor"), PROBE_IDS),
        cfg=cfg,
        store=store,
    )


def weights(version):
    """A version that can be told from the others."""
    model = tiny_model(1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.05 * version)
    return model.state_dict()


def versions(source, updates, groups=1, stride=1):
    """[versions of the groups that the learner gets] at each update."""
    out = []
    for v in range(0, updates * stride, stride):
        source.publish(v, weights(v).items())
        out.append([g.version for g in source.next(groups, v)])
    return out


def test_a_sampler_keeps_its_model_until_the_delay_is_over(folders, tmp_path):
    source = delayed(folders, tmp_path)
    assert versions(source, 8) == [[0], [0], [0], [3], [3], [3], [6], [6]]  # D = 3 steps
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "v000006.safetensors",
        "v000007.safetensors",
    ]  # held, and newest
    group = source.next(1, 7)[0]
    model = tiny_model(1)
    model.load_state_dict(weights(6))
    ids = torch.tensor(np.concatenate([group.prompt_ids, group.responses[0].tokens]).astype(np.int64))
    logp = (
        model(ids[None])
        .logits[0]
        .log_softmax(-1)[len(group.prompt_ids) - 1 : -1]
        .gather(1, ids[len(group.prompt_ids) :, None])[:, 0]
    )
    assert torch.allclose(
        logp, torch.from_numpy(group.responses[0].logp_inf), atol=1e-4
    )  # sampled with version 6, not with the newest
    assert group.t_published == 6.0 and source.now(7) == 7.0


def test_caps_broadcasts_and_several_updates_a_batch(folders, tmp_path):
    assert versions(delayed(folders, tmp_path / "a", max_staleness=2), 6) == [
        [0],
        [0],
        [2],
        [2],
        [4],
        [4],
    ]  # capped at 2 steps
    assert versions(delayed(folders, tmp_path / "b", max_staleness=0), 4) == [[0], [1], [2], [3]]
    assert versions(delayed(folders, tmp_path / "c", sync_every=2, delay_max=1.0), 6) == [[0], [0], [2], [2], [4], [4]]
    assert versions(delayed(folders, tmp_path / "d"), 4, stride=2) == [
        [0],
        [0],
        [2],
        [6],
    ]  # reloads at 3 s and at 6 s: version 2 was out, then 6


def test_samplers_draw_on_their_own(folders, tmp_path):
    changes = dict(delay="lognormal", delay_min=2.0, delay_max=9.0, delay_samplers=3)
    got = versions(delayed(folders, tmp_path / "a", **changes), 12, groups=3)
    assert got == versions(delayed(folders, tmp_path / "b", **changes), 12, groups=3)
    held = [[row[i] for row in got] for i in range(3)]
    assert (
        all(v == sorted(v) and v[0] == 0 for v in held) and len({tuple(v) for v in held}) == 3
    )  # never back, each at its own times
    assert all(2 <= b - a <= 10 for v in held for a, b in zip(sorted(set(v)), sorted(set(v))[1:]))
    assert got != versions(delayed(folders, tmp_path / "c", **changes, seed=1), 12, groups=3)


def test_what_waits_too_long_is_dropped_and_counted(folders, tmp_path):
    source = delayed(folders, tmp_path / "a", sampler_rate=2.0, window_seconds=2.5, delay_max=1.0)
    got = versions(source, 8, groups=1)
    assert got[:4] == [[0], [0], [1], [1]]  # two made a step, one used: first come, first served
    age = [v - row[0] for v, row in enumerate(got)]
    assert (
        max(age) <= 2
        and source.dropped["window"] == 16 - 8 - len(source.tickets) > 0
        and source.dropped["staleness"] == 0
    )
    m = source.metrics()
    assert (
        m["delay/dropped_window"] == source.dropped["window"]
        and m["delay/waiting"] == len(source.tickets)
        and m["sync/proved"] in (0.0, 1.0)
    )
    late = delayed(folders, tmp_path / "b", sampler_rate=2.0, max_staleness=2, delay_max=1.0)
    got = versions(late, 8, groups=1)
    assert (
        max(v - row[0] for v, row in enumerate(got)) == 2
        and late.dropped["staleness"] > 0
        and late.dropped["window"] == 0
    )
    both = delayed(folders, tmp_path / "d", sampler_rate=2.0, max_staleness=2, window_seconds=2.5, delay_max=1.0)
    versions(both, 8, groups=1)
    assert (
        sum(both.dropped.values()) == 16 - 8 - len(both.tickets) and both.dropped["staleness"] > 0
    )  # too old in both ways: counted once
    slow = delayed(folders, tmp_path / "c", sampler_rate=0.5, delay_max=1.0)
    assert (
        versions(slow, 4, groups=1) == [[0], [1], [2], [3]] and slow.waited == 4.0
    )  # the learner waits a step for each group
    assert slow.metrics()["delay/clock"] == 4.0 and slow.now(3) == 7.0


def test_two_ranks_share_clock_and_groups(folders, tmp_path):
    one = delayed(folders, tmp_path / "a", delay_samplers=1)
    two = [delayed(folders, tmp_path / "b", delay_samplers=1) for _ in range(2)]
    for rank, source in enumerate(two):
        source.rank, source.world = rank, 2
    for v in range(5):
        for source in (one, *two):
            source.publish(v, weights(v).items())
        whole, parts = one.next(4, v), [source.next(2, v) for source in two]
        for i, a in enumerate(whole):
            b = parts[i % 2][i // 2]
            assert (
                a.uid == b.uid
                and a.version == b.version
                and all(np.array_equal(x.tokens, y.tokens) for x, y in zip(a.responses, b.responses))
            )
    assert {p.name for p in (tmp_path / "a").iterdir()} == {p.name for p in (tmp_path / "b").iterdir()}


def test_state_survives_in_the_middle(folders, tmp_path):
    changes = dict(
        delay="weibull", delay_min=1.0, delay_max=6.0, delay_samplers=2, sampler_rate=1.5, window_seconds=1.5
    )
    whole, part = delayed(folders, tmp_path / "a", **changes), delayed(folders, tmp_path / "b", **changes)
    for v in range(4):
        for source in (whole, part):
            source.publish(v, weights(v).items())
            source.next(2, v)
    state = part.state_dict()
    for v in range(4, 8):  # goes on past the checkpoint, then dies
        part.publish(v, weights(v).items())
        part.next(2, v)
    back = delayed(folders, tmp_path / "b", **changes)
    back.load_state_dict(state)
    for v in range(4, 10):
        rows = []
        for source in (whole, back):
            source.publish(v, weights(v).items())
            rows.append(
                [(g.uid, g.version, g.digest, [r.tokens.tolist() for r in g.responses]) for g in source.next(2, v)]
            )
        assert rows[0] == rows[1]
    assert whole.metrics() == back.metrics() and whole.dropped["window"] > 0
    for p in (tmp_path / "b").iterdir():
        p.unlink()
    with pytest.raises(
        ValueError, match="--resume: .*safetensors is gone, and a delayed sampler still holds that version"
    ):
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


def test_a_bound_of_0_is_the_plain_loop(solvers, tmp_path):
    """Four delayed samplers that may never be stale train the very run of the loop without delays, metric for metric."""
    for name, more in (("plain", {}), ("bounded", dict(LOGNORMAL, delay_samplers=4, max_staleness=0))):
        code, _, err = finish(
            start(
                flags(
                    solvers,
                    tmp_path / name,
                    steps=3,
                    save_every=0,
                    **{**dict(rollout_batch=16, train_batch=16), **more},
                )
            )
        )
        assert code == 0, err[-3000:]
    plain, bounded = timeless(tmp_path / "plain"), timeless(tmp_path / "bounded")
    assert (
        plain == [{k: v for k, v in row.items() if not k.startswith("delay/")} for row in bounded]
        and "delay/clock" in bounded[1]
    )


def test_a_delayed_run_killed_and_resumed_is_the_same_run(solvers, tmp_path):
    import signal

    more = dict(LOGNORMAL, objective="gepo", actor="none", cppo_beta=0.005, steps=7)
    for name in ("whole", "run"):
        process = start(flags(solvers, tmp_path / name, **more))
        if name == "run":
            wait_for(tmp_path / "run", 4, process)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            process = start(["--resume", f"--out={tmp_path / name}"])
        code, _, err = finish(process)
        assert code == 0, err[-3000:]
    rows = metrics.read(tmp_path / "whole")
    no_sync = lambda run: [{k: v for k, v in row.items() if not k.startswith("sync/")} for row in timeless(run)]
    assert no_sync(tmp_path / "run") == no_sync(tmp_path / "whole")  # a resumed engine has a load more
    stale = [r["staleness/max_updates"] for r in rows[1:]]
    assert stale[0] == 0 and max(stale) >= 2 and max(r["rollout_corr/k3_kl"] for r in rows[1:]) > 1e-5
    assert all(
        r["staleness/mean_seconds"] == pytest.approx(r["staleness/mean_updates"]) for r in rows[1:]
    )  # one virtual second an update
    assert (
        len(list((tmp_path / "whole" / "versions").iterdir())) <= 2 + 1 + 2 * 3
    )  # held, newest, pinned by two checkpoints


@pytest.mark.parametrize(
    "flag, sentence",
    [
        (
            dict(delay="lognormal", delay_min=50.0, delay_max=20.0),
            "--delay_min=50.0 --delay_max=20.0: the shortest delay must be above 0 and not above the longest",
        ),
        (
            dict(delay="weibull", delay_min=20.0, delay_max=20.0),
            "--delay=weibull: two quantiles need --delay_min below --delay_max; use --delay=constant",
        ),
        (dict(delay="weibull", delay_mass=1.0), "--delay_mass=1.0: the share of delays"),
        (
            dict(delay="weibull", sampler_rate=2.0),
            "--sampler_rate=2.0: more groups are made than trained on, and they wait for ever",
        ),
        (
            dict(samplers="files", sync_path="x", rollout_quant="int8", learner_quant="aligned", sync_dtype="bfloat16"),
            "--sync_dtype=bfloat16: an engine that quantizes rounded weights",
        ),
        (dict(delay="constant", delay_samplers=0), "--delay_samplers=0: must be at least 1"),
        (dict(delay="constant", step_seconds=0.0), "--step_seconds=0.0: must be above 0"),
        (dict(delay="constant", max_staleness=-1), "--max_staleness=-1: a number of updates"),
        (
            dict(delay="constant", max_staleness=2, sync_every=8),
            "--max_staleness=2: with --sync_every=8 even the newest weights are up to 7 updates old",
        ),
        (
            dict(max_staleness=8),
            "--max_staleness=8 --sync_every=1: there are no delayed samplers; name a law with --delay",
        ),
    ],
)
def test_bad_flags(flag, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_cfg(**flag)
