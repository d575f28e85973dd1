"""The language-model head, in chunks: the (B, T, V) logits never exist whole.

At 2,048 tokens and a vocabulary of 151,936, one copy of the logits is 1.2 GB in float32 and a naive loss keeps five.
Here the hidden states of the response tokens, packed to (N, H), meet the head's weight (V, H) a chunk at a time; each
chunk yields everything that is ever wanted of the full law (log-prob of the sampled token, entropy, the law at given ids,
the OBRS sums, a second model's KL) and is thrown away. Backward computes each chunk's logits again, turns them in place into
their own gradient, and adds hidden and weight gradients up in place: one more product than the naive way (4 instead of 3),
and no memory that grows with N times V.

`ChunkedHead` knows nothing of losses: `rows` says what to compute from a chunk's logits z and what their gradient is. There
are two, `OneModelRows` and `TwoModelRows`. With p = softmax(z / temperature), and g the gradient of the loss in an output,

    log p(target)             dz = g (onehot - p)
    KL(theta || omega)        dz = g (q - p)                       q: omega's law; theta gets none
    KL(omega || theta)        dz = g q (log q - log p - KL)
"""

from __future__ import annotations

import math

import torch

from sampling import cut

CHUNK_ELEMENTS = 1 << 25  # logits in flight: 128 MiB in float32
CUT = -1e30  # logit of a cut token: finite, so that 0 log 0 stays 0
FLOOR = -69.0  # log-probability of a sampled token that is cut: log 1e-30


class ChunkedHead(torch.autograd.Function):
    """outputs = rows(logits of a chunk, chunk's slice), joined over chunks.

    args: rows, chunk (rows per chunk), then hidden_1 (N, H1), weight_1 (V, H1), and hidden_2, weight_2 for a second model.
    rows([logits (n, V)], slice) returns a tuple of (n, ...) tensors, the `rows.differentiable` first of them differentiable;
    rows.backward(logits, slice, [gradient (n, 1) of each or None]) returns the gradient of each model's logits, or None."""

    @staticmethod
    def forward(ctx, rows, chunk, *heads):
        hidden, weight = heads[::2], [w.to(h.dtype) for h, w in zip(heads[::2], heads[1::2])]
        N, outs = len(hidden[0]), None
        for start in range(0, max(N, 1), chunk):  # no token at all: empty outputs
            sl = slice(start, min(start + chunk, N))
            got = rows([_logits(h[sl], w) for h, w in zip(hidden, weight)], sl)
            if outs is None:
                outs = tuple(g.new_empty((N,) + g.shape[1:]) for g in got)
            for out, g in zip(outs, got):
                out[sl] = g
        ctx.rows, ctx.chunk = rows, chunk
        ctx.save_for_backward(*heads)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outs[rows.differentiable :])
        return outs

    @staticmethod
    def backward(ctx, *grads):
        heads, rows = ctx.saved_tensors, ctx.rows
        hidden, weight = heads[::2], heads[1::2]
        grads = grads[: rows.differentiable]
        cast = [w.to(h.dtype) for h, w in zip(hidden, weight)]
        want_h, want_w = ctx.needs_input_grad[2::2], ctx.needs_input_grad[3::2]
        d_hidden = [torch.zeros_like(h) if n else None for h, n in zip(hidden, want_h)]
        d_weight = [torch.zeros_like(w) if n else None for w, n in zip(weight, want_w)]
        for start in range(0, len(hidden[0]), ctx.chunk):
            sl = slice(start, min(start + ctx.chunk, len(hidden[0])))
            logits = [_logits(h[sl], w) for h, w in zip(hidden, cast)]
            d_logits = rows.backward(logits, sl, [None if g is None else g[sl, None] for g in grads])
            del logits
            for m in range(len(d_logits)):
                dz = d_logits[m]
                if dz is None:
                    continue
                dz = dz.to(hidden[m].dtype)
                if want_h[m]:
                    d_hidden[m][sl] = dz @ cast[m]
                if want_w[m]:
                    if d_weight[m].dtype == dz.dtype:
                        d_weight[m].addmm_(dz.t(), hidden[m][sl])  # in place: no second (V, H) tensor
                    else:
                        d_weight[m] += dz.t() @ hidden[m][sl]
                d_logits[m] = dz = None
        return None, None, *(x for pair in zip(d_hidden, d_weight) for x in pair)


def _logits(hidden, weight):
    if hidden.dtype in (
        torch.bfloat16,
        torch.float16,
    ):  # logits are float32 always, never rounded to 8 bits of mantissa
        return (
            torch.mm(hidden, weight.t(), out_dtype=torch.float32)
            if hidden.is_cuda
            else hidden.float() @ weight.t().float()
        )
    return hidden @ weight.t()


def chunk_rows(V: int) -> int:
    return max(16, CHUNK_ELEMENTS // V)


class OneModelRows:
    """Rows of one model. target (N,), inv_t (N, 1) = 1 / temperature; the law may be cut, by the rollout's own sets
    (kept = (offsets (N + 1,), ids)) or by a rule on these very logits (rule = top_p, top_k, min_p, each (N, 1); sampling.py).

    Outputs: logp (n,), entropy (n,), logp at ids (n, S), tail (n,). `tail` is the certified bound's second term,
    sum_{x not in S} min(p_K, p(x) / lambda), wanted when `p_kth` (N,) is given."""

    differentiable = 1

    def __init__(
        self,
        target,
        inv_t=None,
        ids=None,
        s_on=None,
        p_kth=None,
        lam: float = 1.0,
        kept=None,
        rule=None,
        entropy: bool = True,
    ):
        self.target, self.inv_t, self.ids, self.s_on, self.p_kth, self.lam = target, inv_t, ids, s_on, p_kth, lam
        self.kept, self.rule, self.entropy = kept, rule, entropy
        self.cuts = kept is not None or rule is not None

    def law(self, z, sl):
        """Logits of the law really sampled: scaled by the temperature, cut to the rollout's kept set."""
        if self.inv_t is not None:
            z = z * self.inv_t[sl]
        if self.rule is not None:
            z = z.masked_fill(cut(z, *(x[sl] for x in self.rule)), CUT)
        if self.kept is not None:
            offsets, ids = self.kept  # ragged: row n keeps ids[offsets[n]:offsets[n + 1]]
            lo, hi = int(offsets[sl.start]), int(offsets[sl.stop])
            gone = torch.ones_like(z, dtype=torch.bool)
            row = torch.repeat_interleave(
                torch.arange(sl.stop - sl.start, device=z.device), offsets[sl.start : sl.stop + 1].diff()
            )
            gone[row, ids[lo:hi]] = False
            z = z.masked_fill(gone, CUT)
        return z

    def __call__(self, logits, sl):
        return self.stats(self.law(logits.pop(), sl).log_softmax(-1), sl)

    def backward(self, logits, sl, grads):
        return [self.pull(self.law(logits.pop(), sl).softmax(-1), sl, grads[0])]

    def pull(self, p, sl, g):
        """d logits for a gradient g (n, 1) of log p(target): g (onehot - p), made out of p in place."""
        if g is None:
            return None
        at, g = self.target[sl, None], g.to(p.dtype)
        if self.cuts:
            g = g * (p.gather(1, at) > 0)  # a sampled token that is cut stands at FLOOR, whatever the logits
        dz = p.mul_(-g).scatter_add_(1, at, g)
        return dz if self.inv_t is None else dz.mul_(self.inv_t[sl])

    def stats(self, logp, sl):
        none = logp.new_zeros(len(logp))
        p = logp.exp() if self.entropy or self.p_kth is not None else None
        entropy = -torch.linalg.vecdot(p, logp) if self.entropy else none
        at_ids = logp.gather(1, self.ids[sl]) if self.ids is not None else logp.new_zeros(len(logp), 0)
        tail = none
        if self.p_kth is not None:
            p_kth = self.p_kth[sl, None].to(p.dtype)
            inside = torch.minimum(at_ids.exp() / self.lam, p_kth).mul_(self.s_on[sl]).sum(-1)
            tail = (torch.minimum(p.div_(self.lam), p_kth, out=p).sum(-1) - inside).clamp_min_(0.0)
        mine = logp.gather(1, self.target[sl, None])[:, 0]
        return (
            (mine.clamp_min(FLOOR), entropy, at_ids.clamp_min(FLOOR), tail)
            if self.cuts
            else (mine, entropy, at_ids, tail)
        )


class TwoModelRows:
    """Rows of policy (theta) and actor (omega) together, each in its own `OneModelRows`.

    Outputs: policy logp, actor logp, distillation KL (gradient to the actor alone), then without gradient: policy entropy,
    policy logp at S, tail, actor entropy, exact Z, KL(theta || omega), KL(theta || accepted law), the policy's
    top ids, its logp there, the actor's logp there.
    distill: "forward" KL(sg theta || omega) (Jackpot Eq. 7) or "reverse" KL(omega || sg theta); topk > 0 sums over theta's
    top-k and one bucket for the rest."""

    differentiable = 3

    def __init__(
        self,
        policy: OneModelRows,
        actor: OneModelRows,
        distill: str = "forward",
        distill_topk: int = 0,
        lam: float = 1.0,
        pair: bool = False,
        topk: int = 0,
    ):
        self.policy, self.actor, self.distill, self.distill_topk = policy, actor, distill, distill_topk
        self.lam, self.models, self.topk = lam, pair, topk

    def gap(self, logp, logq):
        """(log p, log q) over the words, or over the policy's top-k and one bucket for the rest; and the words' buckets."""
        if not self.distill_topk:
            return logp, logq, None
        best = logp.topk(self.distill_topk, -1).indices
        bucket = lambda x: torch.cat(
            [x.gather(1, best), x.scatter(1, best, -torch.inf).logsumexp(-1, keepdim=True)], -1
        )
        where = torch.full_like(logp, self.distill_topk, dtype=torch.long)
        where.scatter_(1, best, torch.arange(self.distill_topk, device=best.device).expand_as(best))
        return bucket(logp), bucket(logq), where

    def kl(self, logp, logq):
        """The distillation loss per row, (n,)."""
        if self.distill == "none":
            return logp.new_zeros(len(logp))
        logp, logq, _ = self.gap(logp, logq)
        return (
            torch.linalg.vecdot(logq.exp(), logq - logp)
            if self.distill == "reverse"
            else torch.linalg.vecdot(logp.exp(), logp - logq)
        )

    def backward(self, logits, sl, grads):
        g_policy, g_actor, g_kl = grads
        logq, logp = self.actor.law(logits.pop(), sl).log_softmax(-1), self.policy.law(logits.pop(), sl).log_softmax(-1)
        q, dz = logq.exp(), None
        if g_kl is not None and self.distill != "none":
            lp, lq, where = self.gap(logp, logq)
            if self.distill == "reverse":  # g q (log q - log p - KL), bucket by bucket
                gap = lq - lp
                gap = gap - torch.linalg.vecdot(lq.exp(), gap)[:, None]
                dz = q * (gap if where is None else gap.gather(1, where))
            else:  # g (q - p); inside the rest's bucket p is spread as q is
                dz = q - (logp.exp() if where is None else logq.add_((lp - lq).gather(1, where)).exp_())
            dz.mul_(g_kl)
            if self.actor.inv_t is not None:
                dz.mul_(self.actor.inv_t[sl])
        own = self.actor.pull(q, sl, g_actor)
        if own is not None:
            dz = own if dz is None else dz.add_(own)
        return [self.policy.pull(logp.exp_(), sl, g_policy), dz]

    def __call__(self, logits, sl):
        logq, logp = self.actor.law(logits.pop(), sl).log_softmax(-1), self.policy.law(logits.pop(), sl).log_softmax(-1)
        kl = self.kl(logp, logq)
        none, width = logp.new_zeros(len(logp)), logp.new_zeros(len(logp), 0)
        best, own, there = width.long(), width, width
        if self.topk:
            own, best = logp.topk(self.topk, -1)
            there = logq.gather(1, best)
        z = after = none
        p, gap = logp.exp(), logp - logq
        full = torch.linalg.vecdot(p, gap)
        if self.models:
            log_lam = math.log(self.lam)
            z = torch.minimum(logq, logp - log_lam).exp().sum(-1)
            after = z.clamp_min(1e-30).log() + torch.linalg.vecdot(p, gap.clamp_min_(log_lam))
        pol, act = self.policy.stats(logp, sl), self.actor.stats(logq, sl)
        return pol[0], act[0], kl, pol[1], pol[2], pol[3], act[1], z, full, after, best, own, there
