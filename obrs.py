"""Optimal budgeted rejection sampling (OBRS), Jackpot's correction: arXiv 2602.06107, sections 3-4.

Tokens are sampled from p_inf (the actor, the engine, a stale policy); the accepted tokens should be
distributed as p_tgt: p_ref, the policy before the first update on a rollout (PPO's p_old), or
p_new. Classical rejection sampling needs lambda >= max p_tgt / p_inf and rejects nearly all tokens
with a vocabulary of 100k. OBRS takes a small lambda, accepts with a capped probability, and
reweights accepted tokens:

    a(x)   = min(1, p_tgt(x) / (lambda p_inf(x)))         accept token x with this probability       Eq. 3
    Z      = sum_x min(p_inf(x), p_tgt(x) / lambda)       = the expected acceptance rate
    p'(x)  = min(p_inf(x), p_tgt(x) / lambda) / Z         distribution of the accepted tokens        Eq. 4
    w(x)   = p_tgt(x) / p'(x) = Z max(lambda, p_tgt(x) / p_inf(x))                                   Alg. 1, line 23
    rho    = min(w, c1) min(p_ref / p_tgt, c2)                                                       Alg. 1, line 24
    J      = reduce( Mask sg(rho) surrogate ),   Mask ~ Bernoulli(a)                                 Eq. 5

For every x, a(x) w(x) = Z p_tgt(x)/p_inf(x), so for c1 >= lambda Z

    E[Mask | x] min(w, c1) = Z min(p_tgt/p_inf, c1/Z):

in expectation OBRS is truncated importance sampling with cap c1/Z, scaled by Z, and Z = 1 -
TV(p_inf, p_tgt) at lambda = 1: contexts in which the two distributions differ more get lower
weight. `--obrs_mask=expected` (a replaces the random mask) has the same mean and lower variance.

Z is a sum over the vocabulary, but an engine returns only its top-K. Let the support S be
top-K(p_inf) and the sampled token, and p_K the engine's K-th probability. If an actor is the
sampler and the target is new, S also has the policy's top-K. With --obrs_z=approx, S is the union
of both top-K: the sampled token is in S only if a top-K contains it. The sum over S is a lower
bound of Z, except with approx if no actor is the sampler. Adding a bound on the sum outside S
gives an upper bound (`z_bracket`). One scalar kappa per update scales the lower bound to the
observed acceptance rate (section 4.4.2)."""

from __future__ import annotations

import math

import torch

CLAMP = 20.0  # log-ratios are clamped to +-CLAMP before exp


def acceptance(logp_tgt, logp_inf, lam, clamp=CLAMP):
    """a = min(1, p_tgt / (lambda p_inf)), elementwise, in (0, 1]. Jackpot Eq. 3."""
    log_r = (logp_tgt - logp_inf).clamp(-clamp, clamp)
    return (log_r - math.log(lam)).clamp_max(0.0).exp()


def weight(z, logp_tgt, logp_inf, lam, clamp=CLAMP):
    """w = Z max(lambda, p_tgt / p_inf), elementwise. Jackpot Alg. 1, line 23."""
    return z * (logp_tgt - logp_inf).clamp(-clamp, clamp).exp().clamp_min(lam)


def correction(
    logp_tgt,
    logp_inf,
    logp_ref,
    z,
    u,
    lam=1.0,
    obrs_c1=3.0,
    obrs_c2=1.3,
    obrs_mask="bernoulli",
    obrs_mode="both",
    clamp=CLAMP,
):
    """weight min(w, c1) min(p_ref / p_tgt, c2), tokens kept with probability a (obrs.py).
    Jackpot.

    Returns (weight, keep, accepted), each (B, T), no gradient. accepted, for the metrics: keep, or
    a if obrs_mode is `reweight`. u: uniforms in [0, 1), one per token. logp_ref: None if p_ref /
    p_tgt is not needed. obrs_mask `expected`: keep is the expectation a instead of a Bernoulli
    draw. obrs_mode: `mask` or `reweight` alone (Tables 6, 7). Each alone is biased: neither a nor w
    is proportional to p_tgt / p_inf, but a w is."""
    # Eq. 3:   min(1, p_tgt / (lambda p_inf))
    a = acceptance(logp_tgt, logp_inf, lam, clamp)
    # Eq. 5:   Mask ~ Bernoulli(a), or its mean
    keep = a if obrs_mask == "expected" else (u < a).to(a.dtype)
    # line 23: Z max(lambda, p_tgt / p_inf)
    w = weight(z, logp_tgt, logp_inf, lam, clamp)
    rho = w.clamp_max(obrs_c1)  # line 24: min(w, c1) min(p_ref / p_tgt, c2)
    if logp_ref is not None:
        rho = rho * (logp_ref - logp_tgt).clamp(-clamp, clamp).exp().clamp_max(obrs_c2)
    if obrs_mode == "mask":
        return torch.ones_like(rho), keep, keep
    if obrs_mode == "reweight":
        return rho, torch.ones_like(keep), a
    return rho, keep, keep


def z_bracket(support_logp_inf, support_logp_tgt, lam, tail=None):
    """Bounds Z_low <= Z <= Z_high from the tokens of S (last axis; entries to ignore have logp_inf
    = -inf) and a bound on the sum outside S.

        Z_low  = sum_S min(p_inf, p_tgt / lambda)
        Z_high = Z_low + min( 1 - sum_S p_inf,  tail ),    tail = sum_{x not in S} min(p_K, p_tgt(x) / lambda)

    The first term of the min is the mass of p_inf outside S. The second term is computed by the
    learner's head over the whole vocabulary; it is a bound because p_inf <= p_K outside S. Without
    `tail` only the first term is used."""
    p_inf = support_logp_inf.exp()
    z_low = torch.minimum(p_inf, support_logp_tgt.exp() / lam).sum(-1)
    room = (1.0 - p_inf.sum(-1)).clamp_min(0.0)
    if tail is not None:
        room = torch.minimum(room, tail)
    return z_low, z_low + room


def token_z(
    support_logp_inf, support_logp_tgt, tail, exact, lam, kappa, how: str
) -> dict:
    """Z of each token as used, (B, T), and its bounds or approximation, by name of the metric.
    exact: Z, if both full distributions are known. how (`--obrs_z`):

    exact    Z over the whole vocabulary (two models, target ref; model.TwoModelRows)
    bracket  clip(kappa Z_low, Z_low, Z_high)
    approx   kappa Z_approx, Z_approx: the sum over top-K(p_inf) and top-K(p_ref). The paper has
             top-K(p_new), the same set before a batch's first update; here the ids are chosen once
             per rollout batch. If no actor is the sampler, min(p_ref, p_K) replaces the unknown
             p_inf on top-K(p_ref), and Z_approx is not a bound"""
    if how == "exact":
        return {"z": exact}
    low, high = z_bracket(support_logp_inf, support_logp_tgt, lam, tail)
    if how == "approx":
        return {"z": kappa * low, "z_approx": low}
    used = torch.minimum(torch.maximum(kappa * low, low), high)
    return {"z": used, "z_low": low, "z_high": high}


def kappa_from(acceptance: float, mean_z: float) -> float:
    """kappa = acceptance rate / mean(Z_low or Z_approx), section 4.4.2; 1 if the mean is 0."""
    return acceptance / mean_z if mean_z > 0 else 1.0


def target_of(new, batch, which: str) -> tuple:
    """(log p_tgt of the sampled tokens, log p_tgt on the support S, `tail`, exact Z). Target `ref`:
    from the batch's ref columns. Target `new`: from this forward pass, without gradient."""
    if which == "ref":
        return batch.logp_ref, batch.support_logp_ref, batch.tail_ref, batch.z_ref
    return new.logp.detach(), new.support_logp, new.tail, new.z


def solve_lambda(ratio, rate: float) -> float:
    """The lambda with mean_i min(1, r_i / lambda) = rate, exactly; if rate = 1, the largest.

    ratio: p_tgt / p_inf > 0 of the sampled tokens, 1-D; rate in (0, 1]. With S_k the sum of the k
    smallest r of n, the sum of min(1, r_i / lambda) is min_k (S_k / lambda + n - k). So lambda is
    the smallest S_k / (n rate - n + k) with a positive denominator."""
    r = ratio.double().sort().values
    room = len(r) * (rate - 1) + torch.arange(1, len(r) + 1).to(r)
    return float((r.cumsum(0) / room)[room > 0].min()) if len(r) else 1.0
