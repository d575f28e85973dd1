"""The chunked head against the whole (N, V) logits: values and gradients, in float64."""

import math

import pytest
import torch

import head

N, V, H1, H2, K = 23, 40, 8, 6, 5


@pytest.fixture
def data():
    g = torch.Generator().manual_seed(0)
    r = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)
    return dict(
        h1=r(N, H1),
        w1=r(V, H1),
        h2=r(N, H2),
        w2=r(V, H2),
        target=torch.randint(0, V, (N,), generator=g),
        ids=torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(N)]),
        g=r(4, N),
        t=0.5 + torch.rand(N, 1, generator=g, dtype=torch.float64),
    )


def leaves(d, *names):
    return [d[n].clone().requires_grad_() for n in names]


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_one_model_matches_the_naive_way(data, chunk):
    d, lam = data, 1.3
    h, w = leaves(d, "h1", "w1")
    p_kth = torch.full((N,), 0.02, dtype=torch.float64)
    s_on = torch.ones(N, K, dtype=torch.bool)
    s_on[:, 0] = False  # the first entry repeats another: not counted twice
    ids = d["ids"].clone()
    ids[:, 0] = ids[:, 1]
    rows = head.OneModelRows(d["target"], 1 / d["t"], ids=ids, s_on=s_on, p_kth=p_kth, lam=lam)
    logp, entropy, at_ids, tail = head.ChunkedHead.apply(rows, chunk, h, w)
    (logp * d["g"][0]).sum().backward()

    h_, w_ = leaves(d, "h1", "w1")
    law = (h_ @ w_.t() / d["t"]).log_softmax(-1)
    mine = law.gather(1, d["target"][:, None])[:, 0]
    (mine * d["g"][0]).sum().backward()
    assert (
        torch.allclose(logp, mine, atol=1e-12)
        and torch.allclose(h.grad, h_.grad, atol=1e-12)
        and torch.allclose(w.grad, w_.grad, atol=1e-12)
    )
    assert torch.allclose(entropy, -(law.exp() * law).sum(-1)) and torch.allclose(at_ids, law.gather(1, ids))
    outside = torch.ones(N, V, dtype=torch.bool).scatter_(1, ids, False)
    assert torch.allclose(tail, (torch.minimum(law.exp() / lam, p_kth[:, None]) * outside).sum(-1), atol=1e-12)
    assert not entropy.requires_grad and not tail.requires_grad and not at_ids.requires_grad


def test_kept_sets_renormalise_and_a_cut_token_stays_finite(data):
    d = data
    offsets = torch.arange(N + 1) * K
    h, w = leaves(d, "h1", "w1")
    target = d["ids"][:, 0].clone()
    target[3] = next(i for i in range(V) if i not in d["ids"][3].tolist())  # sampled outside what is kept here
    rows = head.OneModelRows(target, kept=(offsets, d["ids"].flatten()))
    logp, entropy, *_ = head.ChunkedHead.apply(rows, 6, h, w)
    z = (d["h1"] @ d["w1"].t()).gather(1, d["ids"])
    want = z[:, 0] - z.logsumexp(-1)
    good = torch.arange(N) != 3
    assert torch.allclose(logp[good], want[good]) and logp[3] == head.FLOOR
    assert torch.allclose(entropy, -(z.softmax(-1) * z.log_softmax(-1)).sum(-1))
    logp.sum().backward()
    a, b = leaves(d, "h1", "w1")
    cut = torch.ones(N, V, dtype=torch.bool).scatter_(1, d["ids"], False)
    (a @ b.t()).masked_fill(cut, -1e30).log_softmax(-1).gather(1, target[:, None])[
        good
    ].sum().backward()  # a constant teaches nothing
    assert torch.allclose(h.grad, a.grad, atol=1e-10) and torch.allclose(w.grad, b.grad, atol=1e-10)


@pytest.mark.parametrize("distill", ["forward", "reverse"])
@pytest.mark.parametrize("topk", [0, 4])
@pytest.mark.parametrize("chunk", [5, 100])
def test_two_models_match_the_naive_way(data, distill, topk, chunk):
    d, lam = data, 0.8
    h1, w1, h2, w2 = leaves(d, "h1", "w1", "h2", "w2")
    rows = head.TwoModelRows(
        head.OneModelRows(d["target"]), head.OneModelRows(d["target"]), distill, topk, lam, pair=True, topk=K
    )
    out = head.ChunkedHead.apply(rows, chunk, h1, w1, h2, w2)
    logp, actor, kl, entropy, _, _, actor_entropy, z, before, after, best, own, there = out
    (logp * d["g"][0] + actor * d["g"][1] + kl * d["g"][2]).sum().backward()

    a, b, c, e = leaves(d, "h1", "w1", "h2", "w2")
    p, q = (a @ b.t()).log_softmax(-1), (c @ e.t()).log_softmax(-1)
    at = d["target"][:, None]
    fixed = p.detach()
    lp, lq = fixed, q
    if topk:
        ids = fixed.topk(topk, -1).indices
        rest = lambda x: torch.cat([x.gather(1, ids), torch.log(1 - x.gather(1, ids).exp().sum(-1, keepdim=True))], -1)
        lp, lq = rest(fixed), rest(q)
    mine = (lp.exp() * (lp - lq)).sum(-1) if distill == "forward" else (lq.exp() * (lq - lp)).sum(-1)
    (p.gather(1, at)[:, 0] * d["g"][0] + q.gather(1, at)[:, 0] * d["g"][1] + mine * d["g"][2]).sum().backward()
    assert torch.allclose(kl, mine, atol=1e-9)
    for x, y in ((h1, a), (w1, b), (h2, c), (w2, e)):
        assert torch.allclose(x.grad, y.grad, atol=1e-8)
    m = torch.minimum(q.exp(), p.exp() / lam)
    assert torch.allclose(z, m.sum(-1)) and torch.allclose(before, (p.exp() * (p - q)).sum(-1))
    assert torch.allclose(after, (p.exp() * (p - (m / m.sum(-1, keepdim=True)).log())).sum(-1))
    assert (
        torch.equal(best, p.topk(K, -1).indices)
        and torch.allclose(there, q.gather(1, best))
        and torch.allclose(own, p.gather(1, best))
    )


def test_distillation_never_reaches_the_policy(data):
    h1, w1, h2, w2 = leaves(data, "h1", "w1", "h2", "w2")
    rows = head.TwoModelRows(head.OneModelRows(data["target"]), head.OneModelRows(data["target"]), "forward")
    head.ChunkedHead.apply(rows, 9, h1, w1, h2, w2)[2].sum().backward()
    assert float(h2.grad.abs().max()) > 1e-3 and float(h1.grad.abs().max()) == 0 and float(w1.grad.abs().max()) == 0


def test_top_k_kl_is_a_lower_bound_that_becomes_exact(data):
    args = [data[n] for n in ("h1", "w1", "h2", "w2")]
    kl = lambda k: head.ChunkedHead.apply(
        head.TwoModelRows(head.OneModelRows(data["target"]), head.OneModelRows(data["target"]), "forward", k), 9, *args
    )[2]
    assert (kl(3) <= kl(20) + 1e-9).all() and (kl(20) <= kl(0) + 1e-9).all() and not torch.allclose(kl(3), kl(0))


def test_memory_does_not_grow_with_the_number_of_tokens():
    """The largest tensor autograd keeps or makes is a chunk, never (N, V)."""
    V, N = 5000, 2000
    head_rows, seen = head.CHUNK_ELEMENTS, []
    h, w = torch.randn(N, 8, requires_grad=True), torch.randn(V, 8, requires_grad=True)
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple) else (out,):
                if isinstance(x, torch.Tensor):
                    seen.append(x.numel())
            return out

    with Watch():
        logp = head.ChunkedHead.apply(head.OneModelRows(torch.zeros(N, dtype=torch.long)), 64, h, w)[0]
        logp.sum().backward()
    assert max(seen) == 64 * V < N * V
    assert head.chunk_rows(151_936) * 151_936 <= head_rows and math.isfinite(float(logp.sum()))
