"""--rollout_noise: the law that is sampled is the law that is recorded, its KL is the formula's, and nothing else of a
run hears of it."""

import hashlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import VOCAB, make_cfg, make_groups, tiny_model
from test_train import flags, timeless, without_eval

import config
import eval as evaluation
import train
import worth
from corrections import exact_z_known
from engines import HFEngine
from learner import Comm, expects_agreement
from run import read_metrics
from sampling import Sampling
from tasks import Arithmetic, arithmetic_tokenizer

PROMPTS = [np.array(p, np.int32) for p in ((5, 6, 7), (100, 3, 9, 8, 31, 40), (77, 12))]
SEEDS = [[11, 12, 13], [14, 15], [16, 17, 18, 19]]  # of groups of unequal sizes
STOPS = list(range(1, 60))  # many, so that rows end early and are dropped


def sample(engine, sampling, prompts=PROMPTS, seeds=SEEDS, K=VOCAB, allowed=0):
    return engine.generate(list(prompts), seeds, sampling, K, STOPS, allowed)


def draws(seed: int, n: int, width: int) -> torch.Tensor:
    """The normal numbers of a response, (n, width), by the words of rollout.generator."""
    digest = hashlib.blake2b(repr(("noise", seed)).encode(), digest_size=16).digest()
    normal = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).standard_normal
    return torch.from_numpy(normal((n, width), np.float32)).double()


def loud():
    """A model whose last hidden states have no size near 1."""
    model = tiny_model(1)
    model.model.norm.weight.data.mul_(2.5)
    return model


def plain(model, prompt, response):
    """(h (L, H), log p (L, V) at temperature 1) of the model without noise at a response's places, float64."""
    ids = torch.tensor([*prompt.tolist(), *map(int, response.tokens)])[None]
    with torch.no_grad():
        h = model.base_model(input_ids=ids).last_hidden_state[0, len(prompt) - 1 : -1].double()
        logits = h @ model.get_output_embeddings().weight.double().t()
    return h, logits.log_softmax(-1)


def noisy_logits(model, prompt, response, seed: int, sigma: float):
    """(L, V) by the formula, one place after the other."""
    h, _ = plain(model, prompt, response)
    e, W = draws(seed, *h.shape), model.get_output_embeddings().weight.detach().double()
    rows = []
    for t in range(len(h)):
        size = (sum(x * x for x in h[t].tolist()) / len(h[t])) ** 0.5
        rows.append(W @ (h[t] + sigma * size * e[t]))
    return torch.stack(rows)


def in_pairs(groups):
    """(prompt, seed, response)."""
    for prompt, seeds, group in zip(PROMPTS, SEEDS, groups, strict=True):
        for seed, response in zip(seeds, group, strict=True):
            yield prompt, seed, response


@pytest.mark.parametrize("batch_tokens", [1 << 20, 60], ids=["one batch", "several"])
def test_what_is_recorded_is_the_law_that_was_sampled(batch_tokens):
    model, sampling = loud(), Sampling(max_tokens=12, temperature=0.7, noise=0.4)
    groups = sample(HFEngine(loud(), batch_tokens=batch_tokens), sampling)
    lengths, farthest = set(), 0.0
    for prompt, seed, r in in_pairs(groups):
        logp = (noisy_logits(model, prompt, r, seed, 0.4) / 0.7).log_softmax(-1)
        at = torch.from_numpy(r.tokens.astype(np.int64))[:, None]
        assert np.abs(logp.gather(1, at)[:, 0].numpy() - r.logp_inf).max() < 1e-4
        top = logp.gather(1, torch.from_numpy(r.topk_ids.astype(np.int64)))
        assert np.abs(top.numpy() - r.topk_logp).max() < 1e-4
        quiet = (plain(model, prompt, r)[1] / 0.7).log_softmax(-1).gather(1, at)[:, 0].numpy()
        farthest = max(farthest, np.abs(quiet - r.logp_inf).max())
        lengths.add(len(r.tokens))
    assert farthest > 0.1 and len(lengths) > 2


def test_sets_of_allowed_tokens_are_those_of_the_noisy_law():
    model, sampling = tiny_model(1), Sampling(max_tokens=8, top_k=5, noise=1.0)
    groups, differ = sample(HFEngine(tiny_model(1)), sampling, K=0, allowed=9), 0
    for prompt, seed, r in in_pairs(groups):
        noisy = noisy_logits(model, prompt, r, seed, 1.0)
        for t, (start, end) in enumerate(zip(r.allowed_offsets, r.allowed_offsets[1:], strict=False)):
            best = noisy[t].topk(5).indices
            assert set(r.allowed_ids[start:end].tolist()) == set(best.tolist())
            law = dict(zip(best.tolist(), noisy[t][best].log_softmax(-1).tolist(), strict=True))
            assert r.logp_inf[t] == pytest.approx(law[int(r.tokens[t])], abs=1e-4)
            differ += set(best.tolist()) != set(plain(model, prompt, r)[1][t].topk(5).indices.tolist())
    assert differ > 5


def test_without_noise_every_bit_is_what_it_was():
    """Neither a draw nor a hook: samples are those of an engine that never had the setting."""
    given = config.parse(["--actor=none", "--rollout=hf", "--rollout_noise=0"])
    assert Sampling.of(given) == Sampling.of(config.parse(["--actor=none", "--rollout=hf"]))
    engine = HFEngine(tiny_model(1))
    before = sample(engine, Sampling(max_tokens=12))
    sample(engine, Sampling(max_tokens=12, noise=0.5))
    after = sample(engine, Sampling(max_tokens=12, noise=0.0))
    assert not engine.model.base_model._forward_hooks
    for (_, _, a), (_, _, b) in zip(in_pairs(before), in_pairs(after), strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.logp_inf, b.logp_inf) and np.array_equal(a.topk_logp, b.topk_logp)


def test_noise_is_of_its_response_alone():
    """Other responses of the group have other noise from the first token on; alone or in a batch it is the same."""
    sampling = Sampling(max_tokens=10, noise=0.5)
    engine = HFEngine(tiny_model(1))
    together = sample(engine, sampling)
    first = [group[0].topk_logp[0] for group in together] + [together[0][1].topk_logp[0]]
    for i, a in enumerate(first):
        assert all(np.abs(a - b).max() > 1e-2 for b in first[:i])
    for (prompt, seed, r), number in zip(in_pairs(together), range(99), strict=False):
        ((alone,),) = sample(engine, sampling, [prompt], [[seed]])
        assert np.array_equal(alone.tokens, r.tokens), number
        assert np.abs(alone.logp_inf - r.logp_inf).max() < 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_kl_a_token_is_that_of_the_formula(temperature):
    """KL(p_inf || p) of 4,000 places, from the whole recorded laws in float64, against

        (sigma rms(h) / temperature)^2 / 2 (sum_v p_v |W_v|^2 - |sum_v p_v W_v|^2)

    in the mean over places, within four standard errors; and for four times the noise sixteen times as much."""
    model = tiny_model(1)
    W = model.get_output_embeddings().weight.detach().double()
    means = {}
    for sigma in (0.01, 0.04):
        sampling = Sampling(max_tokens=10, temperature=temperature, noise=sigma)
        seeds = [list(range(1000 * i, 1000 * i + 170)) for i in range(len(PROMPTS))]
        measured, expected = [], []
        for prompt, group in zip(PROMPTS, sample(HFEngine(tiny_model(1)), sampling, seeds=seeds), strict=True):
            for r in group:
                h, logp = plain(model, prompt, r)
                logp = (logp / temperature).log_softmax(-1)
                noisy = torch.zeros_like(logp)
                noisy.scatter_(1, torch.from_numpy(r.topk_ids.astype(np.int64)), torch.from_numpy(r.topk_logp).double())
                noisy = noisy.log_softmax(-1)  # float32 sums to 1 up to 1e-7, and KL is as small
                measured += (noisy.exp() * (noisy - logp)).sum(-1).tolist()
                p = logp.exp()
                spread = p @ W.square().sum(1) - (p @ W).square().sum(1)
                expected += (sigma**2 * h.square().mean(1) / temperature**2 / 2 * spread).tolist()
        assert len(measured) > 2000
        ratio = np.array(measured) - np.array(expected)
        means[sigma] = np.mean(measured)
        assert abs(ratio.mean()) < 4 * ratio.std() / len(ratio) ** 0.5 + 0.02 * means[sigma]
        assert ratio.std() / len(ratio) ** 0.5 < 0.05 * means[sigma]
    assert means[0.04] / means[0.01] == pytest.approx(16, rel=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_noise_goes_before_the_head_in_every_precision(dtype):
    """With the engine's own head and with one in float32; a 16-bit engine rounds as it does without noise."""
    for head_fp32 in (False, True):
        how = {"dtype": dtype, "head_fp32": head_fp32}
        model = tiny_model(1).to(getattr(torch, dtype))
        groups = sample(HFEngine(model, **how), Sampling(max_tokens=6, noise=0.3), K=3)
        for prompt, seed, r in in_pairs(groups):
            logp = noisy_logits(tiny_model(1), prompt, r, seed, 0.3).log_softmax(-1)
            at = torch.from_numpy(r.tokens.astype(np.int64))[:, None]
            gap = np.abs(logp.gather(1, at)[:, 0].numpy() - r.logp_inf).max()
            assert gap < {"float32": 1e-4, "bfloat16": 0.4}[dtype]


# -- what noise leaves alone ------------------------------------------------------------------------------------------


def test_a_noisy_run_is_proved_and_evaluated_without_noise_and_resumes(solvers, tmp_path, monkeypatch):
    """The first evaluation and the proof of the first sync are those of a run without noise; the gap is there; a run
    that stops in the middle of a rollout batch goes on as if it had not."""
    monkeypatch.setattr(train, "catch_signals", lambda: [])
    how = {"objective": "tis", "actor": "none", "save_every": 0}
    for name, more in {"quiet": {"steps": 1}, "whole": {"steps": 4}, "run": {"steps": 3}}.items():
        noise = 0.0 if name == "quiet" else 0.5
        train.train(config.parse(flags(solvers, tmp_path / name, **how, **more, rollout_noise=noise)))
    train.train(config.parse(["--resume", f"--out={tmp_path / 'run'}", "--steps=4"]))
    assert without_eval(timeless(tmp_path / "run")) == without_eval(timeless(tmp_path / "whole"))
    quiet, noisy = (read_metrics(tmp_path / name) for name in ("quiet", "whole"))
    assert noisy[0]["eval/policy_pass@1"] == quiet[0]["eval/policy_pass@1"]
    for name in ("sync/error", "sync/MiB"):
        assert noisy[1][name] == quiet[1][name]
    assert quiet[1]["rollout_corr/k3_kl"] < 1e-9 < 1e-3 < noisy[1]["rollout_corr/k3_kl"]


@pytest.mark.parametrize("mask, cut", [("replay", dict(top_p=0.8, top_k=9, min_p=0.01)), ("off", {})])
def test_the_policy_itself_has_no_noise(mask, cut, solvers, monkeypatch):
    """What a correction is compared with: fresh samples of the policy (GEPO 6c), and the on-policy side of worth.py.
    Truncation is the policy's own where the learner scores with it."""
    truncated = dict(top_p=0.8, top_k=9, min_p=0.01, keep_sampling_mask=mask)
    cfg = make_cfg(objective="tis", rollout_noise=3.0, temperature=0.7, **truncated)
    tokenizer, task = arithmetic_tokenizer(), Arithmetic()
    models = SimpleNamespace(policy=tiny_model(0), vocabulary=VOCAB)
    learner = SimpleNamespace(models=models, comm=Comm(), device="cpu", version=0)
    run = SimpleNamespace(cfg=cfg, task=task, tokenizer=tokenizer, vocabulary=VOCAB, stop_ids=[1])
    seen, generate = [], HFEngine.generate
    monkeypatch.setattr(HFEngine, "generate", lambda *args: seen.append(args[3]) or generate(*args))
    groups = make_groups(2, 2)
    for i, group in enumerate(groups):
        group.prompt_id, group.sampling = task.problem("train", i).id, Sampling.of(cfg)
    evaluation.fresh_advantage(learner, groups, run)
    law = Sampling(temperature=0.7, seed=cfg.seed, max_tokens=cfg.max_tokens, **cut)
    assert seen == [law] and worth.on_policy_source(learner, run, cfg).sampling == law
    assert worth.on_policy_source(learner, run, replace(cfg, dynamic_sampling=3)).resample == 3


def test_nothing_that_needs_one_policy_on_both_sides_trusts_a_noisy_one():
    two = {"objective": "jackpot", "model": "base:policy", "actor": "base:actor"}
    assert exact_z_known(make_cfg(**two)) and not exact_z_known(make_cfg(**two, rollout_noise=0.1))
    assert make_cfg(**two, rollout_noise=0.1).obrs_z == "bracket"
    assert expects_agreement(make_cfg(objective="tis"))
    assert not expects_agreement(make_cfg(objective="tis", rollout_noise=0.1))


def test_the_probe_measures_a_noisy_engine(solvers, tmp_path, capsys):
    """python eval.py --mismatch --rollout_noise: the dial's KL before a run."""
    task = ["--task_min_ops=1", "--task_max_ops=1", "--task_operand=3", "--task_total=9"]
    kl = {}
    for noise in (0.2, 0.4):
        argv = [
            "--mismatch",
            "--dtype=float32",
            f"--model={solvers / 'policy'}",
            "--rollout=hf",
            "--max_tokens=8",
            "--problems=24",
            *task,
        ]
        report = evaluation.main([*argv, f"--rollout_noise={noise}", f"--out={tmp_path / 'm.json'}"])
        assert report["sampling"]["rollout_noise"] == noise
        assert f"noise {noise:g}" in capsys.readouterr().out
        kl[noise] = report["k3_kl"]
    assert 2 < kl[0.4] / kl[0.2] < 8
