"""The chunked head and its rows against the full (N, V) logits: values and gradients, in float64."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model import FLOOR, Needs, OneModelRows, Scored, TwoModelRows, head
from model.head import ChunkedHead, Head

f64 = torch.float64
N, V, H1, H2, K = 23, 40, 8, 6, 5


@pytest.fixture
def data():
    """Hidden states and head weights of two models, sampled tokens, supports, temperatures, random gradients."""
    g = torch.Generator().manual_seed(0)
    return SimpleNamespace(
        h1=torch.randn(N, H1, generator=g, dtype=f64),
        w1=torch.randn(V, H1, generator=g, dtype=f64),
        h2=torch.randn(N, H2, generator=g, dtype=f64),
        w2=torch.randn(V, H2, generator=g, dtype=f64),
        target=torch.randint(0, V, (N,), generator=g),
        ids=torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(N)]),
        g=torch.randn(4, N, generator=g, dtype=f64),
        t=0.5 + torch.rand(N, 1, generator=g, dtype=f64),
    )


def leaves(d, *names):
    """Copies of these tensors with requires_grad."""
    return [getattr(d, name).clone().requires_grad_() for name in names]


def scored(target, inv_temperature=None, rule=None, allowed=None):
    return Scored(target, inv_temperature, rule, allowed)


def support_of(d):
    """(ids, mask of counted ids, p_K): the first id repeats the second, so it is not counted."""
    ids = d.ids.clone()
    ids[:, 0] = ids[:, 1]
    on = torch.ones(N, K, dtype=torch.bool)
    on[:, 0] = False
    return ids, on, torch.full((N,), 0.02, dtype=f64)


def apply(rows, chunk, *tensors) -> dict:
    """The outputs of the chunked head by name. tensors: hidden states and weight of each model, without bias."""
    threes = [x for i in range(0, len(tensors), 2) for x in (*tensors[i : i + 2], None)]
    heads = [Head()] * (len(tensors) // 2)
    return dict(zip(rows.outputs, ChunkedHead.apply(rows, chunk, heads, [None] * len(heads), *threes), strict=True))


def at(logp, target):
    return logp.gather(1, target[:, None])[:, 0]


# ---------------------------------------------------------------------------------------------------------------------
# The naive way: from full log-probabilities
# ---------------------------------------------------------------------------------------------------------------------


def naive_one(d, logp, needs) -> dict:
    """The statistics of one model from its log-probabilities (N, V)."""
    p = logp.exp()
    out = {"logp": at(logp, d.target)}
    if needs.entropy:
        out["entropy"] = -(p * logp).sum(-1)
    ids, _, p_kth = support_of(d)
    if needs.support:
        out["support_logp"] = logp.gather(1, ids)
    if needs.tail:
        outside = torch.ones(N, V, dtype=torch.bool).scatter_(1, ids, False)
        out["tail"] = (torch.minimum(p / needs.lam, p_kth[:, None]) * outside).sum(-1)
    return out


def naive_two(d, logp, logq, needs) -> dict:
    """The statistics of policy p and actor q together."""
    p, q = logp.exp(), logq.exp()
    out = {**naive_one(d, logp, needs), "actor_logp": at(logq, d.target), "kl": (p * (logp - logq)).sum(-1)}
    if needs.entropy:
        out["actor_entropy"] = -(q * logq).sum(-1)
    if needs.distill != "none":
        out["distill_loss"] = naive_distill(logp.detach(), logq, needs)
    if needs.exact_z:
        accepted = torch.minimum(q, p / needs.lam)
        out["z"] = accepted.sum(-1)
        out["kl_after"] = (p * (logp - (accepted / accepted.sum(-1, keepdim=True)).log())).sum(-1)
    if needs.topk:
        out["top_logp"], out["top_ids"] = logp.topk(needs.topk, -1)
        out["top_actor_logp"] = logq.gather(1, out["top_ids"])
    return out


def naive_distill(logp, logq, needs):
    """KL(p || q) or KL(q || p)."""
    if needs.distill == "reverse":
        return (logq.exp() * (logq - logp)).sum(-1)
    return (logp.exp() * (logp - logq)).sum(-1)


def with_rest(logp, best):
    listed = logp.gather(1, best)
    return torch.cat([listed, torch.log(1 - listed.exp().sum(-1, keepdim=True))], -1)


# ---------------------------------------------------------------------------------------------------------------------
# One model
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_one_model_matches_the_naive_way(data, chunk):
    d = data
    needs = Needs(entropy=True, support=True, tail=True, lam=1.3)
    h, w = leaves(d, "h1", "w1")
    out = apply(OneModelRows(scored(d.target, 1 / d.t), needs, *support_of(d)), chunk, h, w)
    (out["logp"] * d.g[0]).sum().backward()

    h_, w_ = leaves(d, "h1", "w1")
    want = naive_one(d, (h_ @ w_.t() / d.t).log_softmax(-1), needs)
    (want["logp"] * d.g[0]).sum().backward()
    assert torch.allclose(out["logp"], want["logp"], atol=1e-12)
    assert torch.allclose(h.grad, h_.grad, atol=1e-12)
    assert torch.allclose(w.grad, w_.grad, atol=1e-12)
    assert torch.allclose(out["entropy"], want["entropy"])
    assert torch.allclose(out["support_logp"], want["support_logp"])
    assert torch.allclose(out["tail"], want["tail"], atol=1e-12)
    assert not any(out[name].requires_grad for name in ("entropy", "support_logp", "tail"))


@pytest.mark.parametrize("asked", ["entropy", "both"])
@pytest.mark.parametrize("cut", [False, True])
def test_the_entropy_has_a_gradient_on_request(data, asked, cut):
    """The entropy of the scored distribution: with temperature, and with allowed sets."""
    d = data
    target = d.ids[:, 0]
    needs = Needs(entropy=True, support=True, entropy_gradient=True)
    allowed = (torch.arange(N + 1) * K, d.ids.flatten()) if cut else None
    rows = OneModelRows(scored(target, 1 / d.t, allowed=allowed), needs, *support_of(d))
    h, w = leaves(d, "h1", "w1")
    out = apply(rows, 7, h, w)

    h_, w_ = leaves(d, "h1", "w1")
    z = h_ @ w_.t() / d.t
    if cut:
        z = z.gather(1, d.ids)
    logp = z.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    assert torch.allclose(out["entropy"], entropy)
    got, want = out["entropy"] * d.g[1], entropy * d.g[1]
    if asked == "both":
        got = got + out["logp"] * d.g[0]
        want = want + (logp[:, 0] if cut else at(logp, target)) * d.g[0]
    got.sum().backward()
    want.sum().backward()
    assert torch.allclose(h.grad, h_.grad, atol=1e-10)
    assert torch.allclose(w.grad, w_.grad, atol=1e-10)
    assert not out["support_logp"].requires_grad


ONE_MODEL = [
    Needs(entropy=entropy, support=support, tail=tail, lam=lam)
    for entropy, support, tail, lam in itertools.product([False, True], [False, True], [False, True], [0.7, 1.5])
    if support or not tail  # the tail is outside the support
]


@pytest.mark.parametrize("needs", ONE_MODEL, ids=str)
def test_one_model_returns_exactly_the_requested_outputs(data, needs):
    d = data
    rows = OneModelRows(scored(d.target, 1 / d.t), needs, *support_of(d))
    want = naive_one(d, (d.h1 @ d.w1.t() / d.t).log_softmax(-1), needs)
    assert rows.outputs[0] == "logp"
    assert len(rows.outputs) == len(want)
    assert set(rows.outputs) == set(want)
    assert set(rows([d.h1 @ d.w1.t()], slice(0, N))) == set(want)
    got = apply(rows, 9, d.h1, d.w1)
    for name, x in want.items():
        assert torch.allclose(got[name], x, atol=1e-12), name


def test_allowed_sets_renormalise_and_a_cut_token_stays_finite(data):
    d = data
    target = d.ids[:, 0].clone()
    target[3] = next(i for i in range(V) if i not in d.ids[3].tolist())  # outside its allowed set
    h, w = leaves(d, "h1", "w1")
    allowed = (torch.arange(N + 1) * K, d.ids.flatten())
    out = apply(OneModelRows(scored(target, allowed=allowed), Needs(entropy=True)), 6, h, w)
    z = (d.h1 @ d.w1.t()).gather(1, d.ids)
    want = z[:, 0] - z.logsumexp(-1)
    good = torch.arange(N) != 3
    assert torch.allclose(out["logp"][good], want[good])
    assert out["logp"][3] == FLOOR
    assert torch.allclose(out["entropy"], -(z.softmax(-1) * z.log_softmax(-1)).sum(-1))

    out["logp"].sum().backward()
    h_, w_ = leaves(d, "h1", "w1")
    cut = torch.ones(N, V, dtype=torch.bool).scatter_(1, d.ids, False)
    logp = (h_ @ w_.t()).masked_fill(cut, -1e30).log_softmax(-1)
    at(logp, target)[good].sum().backward()  # the token at FLOOR is a constant without gradient
    assert torch.allclose(h.grad, h_.grad, atol=1e-10)
    assert torch.allclose(w.grad, w_.grad, atol=1e-10)


# ---------------------------------------------------------------------------------------------------------------------
# Policy and actor
# ---------------------------------------------------------------------------------------------------------------------


def two_rows(d, needs, inv_temperature=None):
    """Rows of policy and actor, made like PolicyAndActor.forward."""
    s = scored(d.target, inv_temperature)
    return TwoModelRows(OneModelRows(s, needs, *support_of(d)), OneModelRows(s, Needs(entropy=needs.entropy)), needs)


@pytest.mark.parametrize("distill", ["forward", "reverse"])
@pytest.mark.parametrize("chunk", [5, 100])
@pytest.mark.parametrize("warm", [False, True])
def test_two_models_match_the_naive_way(data, distill, chunk, warm):
    d = data
    t = d.t if warm else torch.ones(N, 1, dtype=f64)
    needs = Needs(entropy=True, exact_z=True, distill=distill, topk=K, lam=0.8)
    needs = replace(needs, entropy_gradient=warm)
    names = ("h1", "w1", "h2", "w2")
    heads = leaves(d, *names)
    out = apply(two_rows(d, needs, 1 / t if warm else None), chunk, *heads)
    bonus = out["entropy"] * d.g[3] if warm else 0.0
    (out["logp"] * d.g[0] + out["actor_logp"] * d.g[1] + out["distill_loss"] * d.g[2] + bonus).sum().backward()

    a, b, c, e = naive_heads = leaves(d, *names)
    want = naive_two(d, (a @ b.t() / t).log_softmax(-1), (c @ e.t() / t).log_softmax(-1), needs)
    bonus = want["entropy"] * d.g[3] if warm else 0.0
    (want["logp"] * d.g[0] + want["actor_logp"] * d.g[1] + want["distill_loss"] * d.g[2] + bonus).sum().backward()
    assert torch.allclose(out["distill_loss"], want["distill_loss"], atol=1e-9)
    for name, x, y in zip(names, heads, naive_heads, strict=True):
        assert torch.allclose(x.grad, y.grad, atol=1e-8), name
    for name in ("z", "kl", "kl_after", "entropy", "actor_entropy", "top_logp", "top_actor_logp"):
        assert torch.allclose(out[name], want[name]), name
    assert torch.equal(out["top_ids"], want["top_ids"])


TWO_MODELS = [
    Needs(entropy, support, support, exact_z, distill, topk, lam=1.2)
    for entropy, support, exact_z, distill, topk in itertools.product(
        [False, True], [False, True], [False, True], ["none", "forward", "reverse"], [0, K]
    )
]


@pytest.mark.parametrize("needs", TWO_MODELS, ids=str)
def test_two_models_return_exactly_the_requested_outputs(data, needs):
    """Only logp, actor_logp and the distillation loss have a gradient, and they come first."""
    d = data
    rows = two_rows(d, needs, 1 / d.t)
    logp, logq = ((h @ w.t() / d.t).log_softmax(-1) for h, w in ((d.h1, d.w1), (d.h2, d.w2)))
    want = naive_two(d, logp, logq, needs)
    first = ["logp", "actor_logp", "distill_loss"] if needs.distill != "none" else ["logp", "actor_logp"]
    assert list(rows.outputs[: rows.differentiable]) == first
    assert len(rows.outputs) == len(want)
    assert set(rows.outputs) == set(want)
    assert set(rows([d.h1 @ d.w1.t(), d.h2 @ d.w2.t()], slice(0, N))) == set(want)
    got = apply(rows, 9, *leaves(d, "h1", "w1", "h2", "w2"))
    for name, x in want.items():
        assert torch.allclose(got[name], x.to(got[name]), atol=1e-9), name
        assert got[name].requires_grad == (name in first), name


def test_distillation_never_reaches_the_policy(data):
    h1, w1, h2, w2 = leaves(data, "h1", "w1", "h2", "w2")
    out = apply(two_rows(data, Needs(distill="forward")), 9, h1, w1, h2, w2)
    out["distill_loss"].sum().backward()
    assert float(h2.grad.abs().max()) > 1e-3
    assert float(h1.grad.abs().max()) == 0
    assert float(w1.grad.abs().max()) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Notes the size of the output of every operation."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, torch.Tensor):
                self.sizes.append(x.numel())
        return out


def test_memory_does_not_grow_with_the_number_of_tokens():
    """The largest tensor that autograd keeps or makes is a chunk, never (N, V)."""
    V, N = 5000, 2000
    h, w = torch.randn(N, 8, requires_grad=True), torch.randn(V, 8, requires_grad=True)
    rows = OneModelRows(scored(torch.zeros(N, dtype=torch.long)), Needs(entropy=True))
    with Watch() as watch:
        logp = apply(rows, 64, h, w)["logp"]
        logp.sum().backward()
    assert max(watch.sizes) == 64 * V < N * V
    for device, elements in head.CHUNK_ELEMENTS.items():
        assert elements / 2 < head.chunk_rows(151_936, device) * 151_936 <= elements
    assert math.isfinite(float(logp.detach().sum()))


# ---------------------------------------------------------------------------------------------------------------------
# Heads with scale, bias and cap, and rows without a token
# ---------------------------------------------------------------------------------------------------------------------


def naive_logits(h, w, b, scale, cap, vocabulary):
    """Scale, bias and cap on all rows, then only the existing token ids."""
    z = scale * (h @ w.t() + b)
    z = cap * torch.tanh(z / cap) if cap else z
    return z[:, :vocabulary]


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("scale", [1.0, 0.4])
@pytest.mark.parametrize("vocabulary", [None, 33])
def test_scale_bias_cap_and_padding_match_the_naive_way(data, cap, scale, vocabulary):
    d = data
    ids = vocabulary or V
    d.b1, d.b2 = torch.linspace(-1, 2, V + 5, dtype=f64), torch.linspace(1, -1, V, dtype=f64)
    d.w1 = torch.cat([d.w1, d.w1.new_full((5, H1), 9.0)])  # the first model has more padding
    d.target = d.target.clamp(max=ids - 1)
    needs = Needs(entropy=True, exact_z=True, distill="forward", lam=0.8)
    names = ("h1", "w1", "b1", "h2", "w2", "b2")
    tensors, naive = leaves(d, *names), leaves(d, *names)
    rows = two_rows(d, needs, 1 / d.t)
    heads = [Head(scale, cap, ids), Head(1.0, 0.7, ids)]
    out = dict(zip(rows.outputs, ChunkedHead.apply(rows, 5, heads, [None, None], *tensors), strict=True))
    (out["logp"] * d.g[0] + out["actor_logp"] * d.g[1] + out["distill_loss"] * d.g[2]).sum().backward()

    logp = (naive_logits(*naive[:3], scale, cap, ids) / d.t).log_softmax(-1)
    logq = (naive_logits(*naive[3:], 1.0, 0.7, ids) / d.t).log_softmax(-1)
    want = naive_two(d, logp, logq, needs)
    (want["logp"] * d.g[0] + want["actor_logp"] * d.g[1] + want["distill_loss"] * d.g[2]).sum().backward()
    for name in want:
        assert torch.allclose(out[name], want[name], atol=1e-9), name
    for name, x, y in zip(names, tensors, naive, strict=True):
        assert torch.allclose(x.grad, y.grad, atol=1e-8), name
    assert float(tensors[1].grad[ids:].abs().sum()) == 0  # rows without a token have no gradient


def test_a_plain_head_makes_only_its_product():
    """Without soft cap, bias and padding, forward and backward need no additional tensor."""
    head, h, w = Head(), torch.randn(3, H1), torch.randn(V, H1)
    assert head.slope(head.logits(h, w)) is None
    assert torch.equal(head.logits(h, w), h @ w.t())
