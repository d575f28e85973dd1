"""--exact: the sampler's and the learner's log-probabilities are bit-identical in every batch.

Started by tests/torchrun.py (see `test_two_ranks`), this file samples and scores on each rank."""

import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import standins
from conftest import ROOT, VOCAB, make_cfg, tiny_model
from torchrun import as_rank, torchrun

import batching
import objectives
import quant
from learner import Learner
from machinery.flags import UserError
from machinery.ranks import Comm
from model import Needs, PolicyAndActor, exact, head
from model.engines import HFEngine
from rollout import Rollout, as_groups
from sampling import Sampling
from train import Training

FORMATS = {
    "plain": {},
    "int8": {"rollout_quant": "int8", "learner_quant": "aligned"},
    "w4a16": {"rollout_quant": "w4a16", "learner_quant": "aligned", "quant_group": 32},
}
DISTRIBUTIONS = {"temperature": {"temperature": 0.7}, "kept sets": {"temperature": 1.3, "top_p": 0.9, "top_k": 40}}
BF16 = {"dtype": "bfloat16", "rollout_dtype": "bfloat16"}
TOKENS = 24  # longest response
SLOW = pytest.mark.slow


def make_pair(hidden: int = 32, comm=None, **changes):
    """(engine, learner) of one tiny model, with the learner's weights published."""
    cfg = make_cfg(**{"objective": "tis", "exact": True, "micro_tokens": 2500, **changes})
    learner = Learner(tiny_model(0, layers=2, hidden=hidden), None, cfg, comm or Comm())
    model = tiny_model(0, layers=2, hidden=hidden).to(getattr(torch, "float32" if cfg.exact else cfg.rollout_dtype))
    fmt = quant.format_of(cfg.rollout_quant, cfg.quant_group)
    engine = HFEngine(model, dtype=cfg.rollout_dtype, exact=cfg.exact, device=learner.comm.device, fmt=fmt)
    engine.load(learner.published("policy", engine.packed))
    return engine, learner


def sample(
    engine, n: int = 12, G: int = 4, seed: int = 0, longest=30, vocabulary: int = VOCAB, stop=(1, 2, 3), **distribution
) -> list[Rollout]:
    """n groups with prompts of unequal lengths below `longest`; a few responses end early, and a few contexts are
    longer than a block of keys."""
    draws = [np.random.default_rng((seed, i)) for i in range(n)]
    prompts = [rng.integers(0, vocabulary, rng.integers(2, longest)) for rng in draws]
    sampling = Sampling(max_tokens=TOKENS, **distribution)
    seeds = [[seed * 10**6 + G * i + g for g in range(G)] for i in range(n)]
    allowed = vocabulary if sampling.truncates else 0
    rows = engine.generate(prompts, seeds, sampling, 3, list(stop), allowed)
    for responses in rows:
        for g, response in enumerate(responses):
            response.reward = float(g % 2)
    return as_groups("test", [prompt.astype(np.int32) for prompt in prompts], rows, sampling)


def gap(learner, groups) -> float:
    """The largest |log p_inf - log p_ref|."""
    batch = batching.collate(groups, learner.cfg)
    return float((learner.score(batch, Needs()).logp - batch.logp_inf)[batch.exists].abs().max())


# -- Zero -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "fmt", "distribution"),
    [({}, "plain", "kept sets"), ({}, "int8", "temperature"), (BF16, "w4a16", "kept sets")]
    + [pytest.param(BF16, fmt, name, marks=SLOW) for fmt, name in (("plain", "temperature"), ("int8", "kept sets"))],
)
def test_ten_thousand_tokens_are_equal_in_every_split(dtype, fmt, distribution, monkeypatch):
    """Few and many micro-batches, shared and separate prompts, large and small chunks of the head."""
    engine, learner = make_pair(**dtype, **FORMATS[fmt], **DISTRIBUTIONS[distribution])
    groups = sample(engine, n=125, **DISTRIBUTIONS[distribution])
    assert sum(len(r.tokens) for group in groups for r in group.responses) >= 10**4
    if "top_p" in DISTRIBUTIONS[distribution]:
        assert all(r.allowed_ids is not None for group in groups for r in group.responses)
    assert {share for *_, share in learner._micro(batching.collate(groups, learner.cfg))} == {True}
    assert gap(learner, groups) == 0
    monkeypatch.setattr(PolicyAndActor, "can_share", False)
    monkeypatch.setattr(head, "LEAST_CHUNK", 4)
    learner.cfg = make_cfg(**{**vars(learner.cfg), "micro_tokens": 190})
    parts = [*learner._micro(batching.collate(groups, learner.cfg))]
    assert len(parts) > 100 and {share for *_, share in parts} == {False}
    assert gap(learner, groups) == 0


@pytest.mark.parametrize(("dtype", "fmt"), [({}, "plain"), ({}, "int8"), (BF16, "plain"), (BF16, "w4a16")])
def test_a_single_row_equals_a_batch(dtype, fmt):
    """A response decoded or read alone has the log-probabilities of a batch. Rows are wide: sums of few numbers have
    only one order."""
    engine, learner = make_pair(hidden=192, micro_tokens=1, **dtype, **FORMATS[fmt])
    groups = sample(engine, n=10, longest=5)
    alone = sample(engine, n=1, G=1, longest=5)
    assert np.array_equal(alone[0].responses[0].logp_inf, groups[0].responses[0].logp_inf)
    for r in itertools.chain.from_iterable(group.responses for group in groups):
        for name in ("tokens", "loss_mask", "logp_inf", "topk_ids", "topk_logp"):
            setattr(r, name, getattr(r, name)[:4])
    assert gap(learner, groups) == 0


@pytest.fixture(params=[1, 2])
def threads(request):
    """The number of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("dtype", "fmt"), [({}, "plain"), (BF16, "w4a16")])
def test_tokens_with_threads(dtype, fmt, threads):
    """The model is wide enough that products and sums are divided between threads."""
    engine, learner = make_pair(hidden=256, **dtype, **FORMATS[fmt])
    assert gap(learner, sample(engine, n=60)) == 0


@pytest.mark.parametrize("dtype", [{}, BF16], ids=["float32", "bfloat16"])
def test_without_exact_the_gap_is_not_zero(dtype):
    """The control experiment for the tests above."""
    engine, learner = make_pair(exact=False, **dtype)
    assert gap(learner, sample(engine)) > (1e-3 if dtype else 1e-7)


@pytest.mark.parametrize(("family", "head_fp32"), [*((name, False) for name in exact.FAMILIES), ("llama", True)])
def test_every_supported_family(family, head_fp32):
    """Biases, scaled logits, untied heads, a head dimension from the config, embeddings with unused rows."""
    changes, vocabulary = {"sliding_window": None} if family == "mistral" else {}, 290
    models = [standins.model(family, vocab_size=vocabulary + 9, **changes) for _ in range(2)]
    cfg = make_cfg(objective="tis", exact=True, lm_head_fp32=head_fp32, temperature=0.6, **BF16)
    learner = Learner(models[0], None, cfg, Comm(), vocabulary)
    engine = HFEngine(models[1], dtype="bfloat16", exact=True, head_fp32=head_fp32, vocabulary=vocabulary)
    assert gap(learner, sample(engine, vocabulary=vocabulary, temperature=0.6)) == 0


def test_the_sampling_actor_equals_the_scored_actor():
    cfg = make_cfg(objective="jackpot", exact=True, actor="base:actor", obrs_topk=3, **BF16)
    learner = Learner(tiny_model(0, layers=2), tiny_model(1), cfg, Comm())
    engine = HFEngine(tiny_model(1), dtype="bfloat16", exact=True)
    batch = batching.collate(sample(engine), cfg)
    stats = learner.score(batch, Needs(exact_z=True, distill="forward"))
    assert torch.equal(stats.actor_logp[batch.exists], batch.logp_inf[batch.exists])


def test_recomputed_truncation_equals_the_samplers():
    """--keep_sampling_mask=recompute truncates no sampled token. Many responses end early and leave the cache."""
    engine, learner = make_pair(keep_sampling_mask="recompute", top_p=0.8, min_p=0.02, **BF16)
    assert gap(learner, sample(engine, n=40, stop=range(0, VOCAB, 9), top_p=0.8, min_p=0.02)) == 0


# -- The same function and the same gradient as without --exact -------------------------------------------------------


@pytest.mark.parametrize("at_once", [128, 8])
def test_exact_attention_against_plain_attention(at_once, monkeypatch):
    """Against softmax(q k / sqrt(D)) v: heads with shared keys, left padding, one or several calls."""
    monkeypatch.setattr(exact, "AT_ONCE", at_once)
    B, heads, shared, Q, K, D = 3, 2, 3, 11, 70, 8
    query = torch.randn(B, heads * shared, Q, D, requires_grad=True)
    key, value = (torch.randn(B, heads, K, D, requires_grad=True) for _ in range(2))
    first, place = torch.tensor([0, 4, 33])[:, None, None, None], torch.arange(K)  # first visible key of each row
    mask = (place >= first) & (place <= torch.arange(K - Q, K)[:, None])
    got, _ = exact.attention(None, query, key, value, exact.Seen.of(mask), 0.3)
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(shared, 1)) * 0.3
    p = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    want = (p @ value.repeat_interleave(shared, 1)).transpose(1, 2)
    assert torch.allclose(got, want, atol=1e-5)
    tensors, g = (query, key, value), torch.randn_like(want)
    grads = torch.autograd.grad(got, tensors, g)
    for x, y in zip(grads, torch.autograd.grad(want, tensors, g), strict=True):
        assert torch.allclose(x, y, atol=1e-5)


ALONE = [(shared, 70, 1, 16) for shared in (1, 3, 4, 7)]  # heads with the same keys, tokens, stride, size
ALONE += [(2, 1100, 37, 32), (1, 700, 23, 128), (7, 700, 23, 64)]


@pytest.mark.parametrize(("shared", "T", "stride", "D"), ALONE)
def test_a_single_query_equals_the_same_query_in_a_batch(shared, T, stride, D, threads):
    """Bit for bit: T queries of a row at once against single queries in a different batch, with places after their
    keys. The longest rows have more keys than the kernel processes at a time."""
    B, heads = 5 if T < 100 else 2, 2
    query = torch.randn(B, heads * shared, T, D)
    key, value = torch.randn(B, heads, T, D), torch.randn(B, heads, T, D)
    mask = torch.ones(T, T, dtype=torch.bool).tril().expand(B, 1, T, T)
    whole, _ = exact.attention(None, query, key, value, exact.Seen.of(mask), 0.25)
    for t in range(0, T, stride):
        for room in (exact.room(t + 1), exact.room(t + 301)):
            rows = torch.tensor([t % B, (t + 3) % B, t % B])
            seen = exact.Seen.of((torch.arange(room) <= t).expand(3, 1, 1, room))
            behind = (0, 0, 0, room - t - 1)  # invisible keys count exactly 0 for every content
            k = F.pad(key[rows, :, : t + 1], behind, value=9.0)
            v = F.pad(value[rows, :, : t + 1], behind, value=1e34)
            alone, _ = exact.attention(None, query[rows, :, t : t + 1], k, v, seen, 0.25)
            assert torch.equal(alone[:, 0], whole[rows, t]), (t, room)


def test_a_query_without_visible_keys_is_finite():
    """A place in a padded prompt: no token reads it, but NaN times 0 would be NaN."""
    x, mask = torch.randn(1, 2, 40, 8), torch.ones(1, 1, 3, 40, dtype=torch.bool)
    mask[:, :, 0] = False
    assert exact.attention(None, x[:, :, :3], x, x, exact.Seen.of(mask), 0.25)[0].isfinite().all()


ROWS_OF_A_PRODUCT = """
import torch
from model import exact

for threads in (1, 2, 4):
    torch.set_num_threads(threads)
    for wide, outputs in ((64, 256), (256, 32), (192, 512), (1024, 256)):
        x, weight = torch.randn(1, wide), torch.randn(outputs, wide)
        rows = exact.product(x.repeat(150, 1), weight)
        assert torch.equal(rows, rows[:1].expand_as(rows)), (threads, wide, outputs)
"""


@pytest.mark.timeout(60)
def test_rows_of_a_product_do_not_depend_on_their_position():
    """On a processor with only AVX2, and with several threads."""
    env = {**os.environ, "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    done = subprocess.run([sys.executable, "-c", ROWS_OF_A_PRODUCT], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize("fmt", ["plain", "w4a16"])
def test_the_gradient_equals_the_gradient_without_exact(fmt):
    """An update's gradient with and without --exact, with and without gradient checkpointing."""
    groups = sample(make_pair(**FORMATS[fmt])[0])
    grads = []
    for flags in ({"exact": False}, {"exact": True}, {"exact": True, "gradient_checkpointing": True}):
        _, learner = make_pair(**FORMATS[fmt], **flags)
        batch = batching.collate(groups, learner.cfg)
        learner.backward(batch, objectives.prepare(batch, Comm(), learner.cfg, {}))
        grads.append(torch.cat([p.grad.flatten() for p in learner.models.parameters()]))
    for other in grads[1:]:
        assert float((other - grads[0]).norm() / grads[0].norm()) < 1e-4
    assert float(grads[0].norm()) > 1e-3


# -- Requirements and checks ------------------------------------------------------------------------------------------

REFUSED = [
    ({}, "only on a CPU"),
    ({"dtype": "float16", "rollout_dtype": "float16"}, "float32 or bfloat16"),
    ({"learner_quant": "int8"}, "--learner_quant=int8"),
    ({"rollout_quant": "fp8", "learner_quant": "aligned"}, "not fp8"),
    ({"top_p": 0.9, "keep_sampling_mask": "off"}, "use replay"),
    ({"logprobs_mode": "raw"}, "--logprobs_mode=raw"),
]


@pytest.mark.parametrize(("flags", "says"), REFUSED)
def test_flags_that_exclude_exact_are_refused(flags, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: says == "only on a CPU")
    with pytest.raises(UserError, match="--exact") as e:
        make_cfg(objective="tis", exact=True, **flags)
    assert says in str(e.value)


@pytest.mark.parametrize("family", ["gemma2", "mistral", "qwen3_moe", "phi", "llama"])
def test_unsupported_models_are_refused(family, tmp_path):
    standins.config(family, **({"hidden_act": "gelu"} if family == "llama" else {})).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--exact"):
        exact.check_model(make_cfg(objective="tis", exact=True), str(tmp_path), None)


def test_a_run_stops_at_a_gap_above_zero(folders, tmp_path):
    """One batch of two updates; then one log-probability is changed in its last bit."""
    size = dict(rollout_batch=16, train_batch=8, group_size=4, steps=8, eval_every=-1, max_tokens=8, objective="tis")
    paths = dict(model=str(folders / "policy"), out=str(tmp_path), overwrite=True)
    t = Training(make_cfg(exact=True, **paths, **size), Comm())
    t.roll_out()
    assert [t.update()["rollout_corr/largest_gap"] for _ in range(2)] == [0, 0]
    t.roll_out()
    response = t.pending[0][0].responses[0]
    response.logp_inf[0] = np.nextafter(response.logp_inf[0], np.float32(-1e9))
    with pytest.raises(UserError, match="--exact: on fresh rollouts log p_inf and log p_ref differ"):
        t.update()
    t.log.close()


@pytest.mark.parametrize(("gap", "is_zero"), [(0.0, True), (-np.inf, True), (1e-9, False), (np.nan, False)])
def test_a_nan_gap_is_not_zero(gap, is_zero):
    """-inf: a step without a token. On old rollouts the gap is not compared."""
    cfg, logged = make_cfg(exact=True, objective="tis"), {"rollout_corr/largest_gap": gap}
    with contextlib.nullcontext() if is_zero else pytest.raises(UserError, match="--exact: on fresh rollouts"):
        exact.check_zero(cfg, {**logged, "staleness/max_updates": 0})
    exact.check_zero(cfg, {**logged, "staleness/max_updates": 1})


# -- Ranks ------------------------------------------------------------------------------------------------------------

RANK_CASES = [{"parallel": "ddp"}, {"parallel": "fsdp", **FORMATS["int8"], **DISTRIBUTIONS["temperature"]}]
RANK_CASES += [
    BF16 | {"parallel": "fsdp", **FORMATS["w4a16"]},
    BF16 | {"parallel": "ddp", **DISTRIBUTIONS["kept sets"]},
]


@pytest.mark.timeout(300)
def test_two_ranks(tmp_path):
    """Each rank samples and scores its share, before and after a joint update."""
    out = tmp_path / "gaps.pt"
    torchrun("test_exact.py", out)
    gaps = torch.load(out)
    assert len(gaps) == 2 * len(RANK_CASES) and all(pair == [0, 0] for pair in gaps)


def main(out: str) -> None:
    comm, gaps = Comm(), []
    for case in RANK_CASES:
        engine, learner = make_pair(comm=comm, **case)
        for turn in range(2):
            distribution = {name: case[name] for name in ("temperature", "top_p", "top_k") if name in case}
            groups = sample(engine, n=12 + comm.rank, seed=1 + comm.rank, **distribution)
            gaps.append([None] * comm.size)
            dist.all_gather_object(gaps[-1], gap(learner, groups))
            if turn == 0:
                batch = batching.collate(groups, learner.cfg)
                learner.step(learner.backward(batch, objectives.prepare(batch, comm, learner.cfg, {})))
                engine.load(learner.published("policy", engine.packed))
    if comm.rank == 0:
        torch.save(gaps, out)


if __name__ == "__main__":
    as_rank(main)
