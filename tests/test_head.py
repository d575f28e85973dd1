"""The chunked head and its rows against the full (N, V) logits: values and gradients, in float64."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import Held

from model import FLOOR, Needs, OneModelRows, Scored, TwoModelRows, head
from model.head import ChunkedHead, Head

f64 = torch.float64
N, V, H1, H2, K = 23, 40, 8, 6, 5
PLAIN = ("h1", "w1", None, "h2", "w2", None)


@pytest.fixture
def data():
    """Hidden states, head weights and biases of two models, sampled tokens, supports, temperatures."""
    g = torch.Generator().manual_seed(0)
    return SimpleNamespace(
        h1=torch.randn(N, H1, generator=g, dtype=f64),
        w1=torch.randn(V, H1, generator=g, dtype=f64),
        b1=torch.linspace(-1, 2, V, dtype=f64),
        h2=torch.randn(N, H2, generator=g, dtype=f64),
        w2=torch.randn(V, H2, generator=g, dtype=f64),
        b2=torch.linspace(1, -1, V, dtype=f64),
        target=torch.randint(0, V, (N,), generator=g),
        ids=torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(N)]),
        t=0.5 + torch.rand(N, 1, generator=g, dtype=f64),
    )


def support_of(d):
    """(ids, mask of counted ids, p_K): the first id repeats the second, so it is not counted."""
    ids = d.ids.clone()
    ids[:, 0] = ids[:, 1]
    on = torch.ones(N, K, dtype=torch.bool)
    on[:, 0] = False
    return ids, on, torch.full((N,), 0.02, dtype=f64)


def scored(d, warm=True, allowed=None) -> Scored:
    return Scored(d.target, 1 / d.t if warm else None, None, allowed)


def two_rows(d, needs, warm=True) -> TwoModelRows:
    """Rows of policy and actor, made like PolicyAndActor.forward."""
    return TwoModelRows(scored(d, warm), needs, *support_of(d))


# -- The naive way: from full log-probabilities -----------------------------------------------------------------------


def naive_logits(h, w, b, head: Head):
    """Scale, bias and cap on all rows, then only the existing token ids."""
    z = head.scale * (h @ w.t() + (0.0 if b is None else b))
    z = head.cap * torch.tanh(z / head.cap) if head.cap else z
    return z[:, : head.width]


def naive_one(d, logp, needs) -> dict:
    """The statistics of one model from its log-probabilities (N, V)."""
    p = logp.exp()
    out = {"logp": logp.gather(1, d.target[:, None])[:, 0]}
    if needs.entropy:
        out["entropy"] = -(p * logp).nan_to_num().sum(-1)
    ids, _, p_kth = support_of(d)
    if needs.support:
        out["support_logp"] = logp.gather(1, ids)
    if needs.tail:
        outside = torch.ones_like(p, dtype=torch.bool).scatter_(1, ids, False)
        out["tail"] = (torch.minimum(p / needs.lam, p_kth[:, None]) * outside).sum(-1)
    if needs.topk:
        out["top_logp"], out["top_ids"] = logp.topk(needs.topk, -1)
    return out


def naive_two(d, logp, logq, needs) -> dict:
    """The statistics of policy p and actor q together."""
    p, q = logp.exp(), logq.exp()
    out = {**naive_one(d, logp, needs), "kl": (p * (logp - logq)).sum(-1)}
    out |= {f"actor_{name}": x for name, x in naive_one(d, logq, Needs(entropy=needs.entropy)).items()}
    if needs.distill:
        out["distill_loss"] = (p.detach() * (logp.detach() - logq)).sum(-1)
    if needs.exact_z:
        accepted = torch.minimum(q, p / needs.lam)
        out["z"] = accepted.sum(-1)
        out["kl_after"] = (p * (logp - (accepted / accepted.sum(-1, keepdim=True)).log())).sum(-1)
    if needs.topk:
        out["top_actor_logp"] = logq.gather(1, out["top_ids"])
    return out


def compare(d, rows, needs, naive, heads, names, chunk=7) -> list:
    """Compare all outputs and all gradients with naive(*tensors of the given names); return the tensors."""
    tensors, plain = ([n and getattr(d, n).clone().requires_grad_() for n in names] for _ in range(2))
    outs = ChunkedHead.apply(rows, chunk, heads, [None] * len(heads), *tensors)
    got, want = dict(zip(rows.outputs, outs, strict=True)), naive(*plain)
    assert len(rows.outputs) == len(want) and got.keys() == want.keys()
    differentiable = {"logp", "actor_logp", "distill_loss"} & want.keys()
    differentiable |= {"entropy"} if needs.entropy_gradient else set()
    total = of_naive = 0.0
    for name, x in want.items():
        assert torch.allclose(got[name], x.to(got[name].dtype), atol=1e-9), name
        assert got[name].requires_grad == (name in differentiable), name
        if name in differentiable:
            g = torch.randn(N, dtype=f64)
            total, of_naive = total + (g * got[name]).sum(), of_naive + (g * x).sum()
    total.backward()
    of_naive.backward()
    for name, x, y in zip(names, tensors, plain, strict=True):
        assert name is None or torch.allclose(x.grad, y.grad, atol=1e-8), name
    return tensors


# -- Statistics -------------------------------------------------------------------------------------------------------

ONE_MODEL = [Needs(), Needs(support=True), Needs(entropy=True, topk=K), Needs(support=True, tail=True, lam=0.7)]
ONE_MODEL += [Needs(entropy=True, support=True, tail=True, lam=1.3)]
ONE_MODEL += [replace(needs, entropy_gradient=True) for needs in ONE_MODEL if needs.entropy]


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("needs", ONE_MODEL, ids=str)
def test_one_model_matches_the_naive_way(data, needs, chunk):
    """The requested outputs and no others, and the gradients of the first ones."""

    def naive(h, w, b):
        return naive_one(data, (h @ w.t() / data.t).log_softmax(-1), needs)

    rows = OneModelRows(scored(data), needs, *support_of(data))
    compare(data, rows, needs, naive, [Head()], PLAIN[:3], chunk)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_allowed_sets_renormalise_and_a_cut_token_stays_finite(data, entropy_gradient):
    """A sampled token outside its allowed set has the constant log-probability FLOOR, without gradient."""
    data.target = data.ids[:, 0].clone()
    data.target[3] = next(i for i in range(V) if i not in data.ids[3].tolist())
    needs = Needs(entropy=True, entropy_gradient=entropy_gradient)

    def naive(h, w, b):
        cut = torch.ones(N, V, dtype=torch.bool).scatter_(1, data.ids, False)
        out = naive_one(data, (h @ w.t() / data.t).masked_fill(cut, -1e30).log_softmax(-1), needs)
        return {**out, "logp": out["logp"].where(torch.arange(N) != 3, FLOOR)}

    rows = OneModelRows(scored(data, allowed=(torch.arange(N + 1) * K, data.ids.flatten())), needs)
    compare(data, rows, needs, naive, [Head()], PLAIN[:3])


TWO_MODELS = [
    Needs(entropy, support, support, exact_z, distill, topk, lam=0.8)
    for (entropy, support), (exact_z, topk), distill in itertools.product(
        [(False, True), (True, False)], [(False, K), (True, 0), (True, K)], [False, True]
    )
]


@pytest.mark.parametrize("needs", TWO_MODELS, ids=str)
@pytest.mark.parametrize("warm", [False, True])
def test_two_models_match_the_naive_way(data, needs, warm):
    """With and without a temperature. Distillation has a gradient only for the actor."""
    needs = replace(needs, entropy_gradient=needs.entropy and warm)
    t = data.t if warm else 1.0

    def naive(h1, w1, b1, h2, w2, b2):
        return naive_two(data, (h1 @ w1.t() / t).log_softmax(-1), (h2 @ w2.t() / t).log_softmax(-1), needs)

    compare(data, two_rows(data, needs, warm), needs, naive, [Head()] * 2, PLAIN)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_scale_bias_cap_and_padding_match_the_naive_way(data, cap, scale):
    """Rows of the weight without a token have no gradient; the first model has more of them."""
    ids = 33
    data.w1 = torch.cat([data.w1, data.w1.new_full((5, H1), 9.0)])
    data.b1 = torch.cat([data.b1, data.b1.new_ones(5)])
    data.target, data.ids = data.target.clamp(max=ids - 1), data.ids.clamp(max=ids - 1)
    needs = Needs(entropy=True, exact_z=True, distill=True, topk=K, lam=0.8)
    heads = [Head(scale, cap, ids), Head(1.0, 0.7, ids)]

    def naive(h1, w1, b1, h2, w2, b2):
        z1, z2 = naive_logits(h1, w1, b1, heads[0]), naive_logits(h2, w2, b2, heads[1])
        return naive_two(data, (z1 / data.t).log_softmax(-1), (z2 / data.t).log_softmax(-1), needs)

    tensors = compare(data, two_rows(data, needs), needs, naive, heads, ("h1", "w1", "b1", "h2", "w2", "b2"))
    assert float(tensors[1].grad[ids:].abs().sum()) == 0


# -- Memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_16_bit_inputs_have_float32_sums(dtype):
    """The product of the rounded inputs in float64, to float32's precision; torch's setting stays."""
    hidden, weight = torch.randn(40, 96).to(dtype), torch.randn(300, 96).to(dtype)
    before = torch.backends.mkldnn.matmul.fp32_precision
    logits = head.product(hidden, weight)
    assert logits.dtype == torch.float32 and torch.backends.mkldnn.matmul.fp32_precision == before
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().t(), rtol=1e-5, atol=3e-5)


def test_memory_does_not_grow_with_the_number_of_tokens():
    """Autograd keeps and makes a few tensors of a chunk, never one of (N, V)."""
    V, N = 5000, 2000
    h, w = torch.randn(N, 8, requires_grad=True), torch.randn(V, 8, requires_grad=True)
    rows = OneModelRows(Scored(torch.zeros(N, dtype=torch.long), None, None, None), Needs(entropy=True))
    with Held() as held:
        ChunkedHead.apply(rows, 64, [Head()], [None], h, w, None)[0].sum().backward()
    assert held.most < 8 * 4 * 64 * V < 4 * N * V / 3


@pytest.mark.parametrize(("gib", "mib"), [(0, 256), (6, 256), (24, 384), (80, 1024), (141, 1024)])
def test_chunks_take_a_64th_of_a_gpus_memory(gib, mib):
    """At least 256 MiB, as on a CPU (0), and at most 1 GiB, for logits in float32."""
    V = 151_936
    assert head.chunk_rows(V, gib << 30) == (mib << 20) // (4 * V)
    assert head.memory_of("cpu") == 0 and head.chunk_rows(V) == 441 and head.chunk_rows(10**9, gib << 30) == 16
