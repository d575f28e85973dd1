"""Optimal budgeted rejection sampling (OBRS): the heart of Jackpot, arXiv 2602.06107, sections 3
and 4.

Tokens come from p_inf (the actor, the engine, a stale policy); we want them to look as if they came
from p_tgt. Classical rejection sampling would need lambda >= max p_tgt / p_inf and would reject
nearly everything over a vocabulary of 100k. OBRS takes a small lambda, accepts with a capped
probability, and reweights accepted tokens:

    a(x)   = min(1, p_tgt(x) / (lambda p_inf(x)))         accept token x with this probability       Eq. 3
    Z      = sum_x min(p_inf(x), p_tgt(x) / lambda)       = the expected acceptance rate
    p'(x)  = min(p_inf(x), p_tgt(x) / lambda) / Z         distribution of the accepted tokens        Eq. 4
    w(x)   = p_tgt(x) / p'(x) = Z max(lambda, p_tgt(x) / p_inf(x))                                   Alg. 1, line 23
    rho    = min(w, c1) min(p_ref / p_tgt, c2)                                                       Alg. 1, line 24
    J      = reduce( Mask sg(rho) surrogate ),   Mask ~ Bernoulli(a)                                 Eq. 5

In both branches a(x) w(x) = Z p_tgt(x)/p_inf(x), so for c1 >= lambda Z

    E[Mask | x] min(w, c1) = Z min(p_tgt/p_inf, c1/Z):

in expectation OBRS is truncated importance sampling with cap c1/Z, scaled by Z. At lambda = 1, Z =
1 - TV(p_inf, p_tgt): contexts in which the two distributions disagree count less. OBRS adds to TIS
this Z, the choice of target, and mask noise; `--obrs_mask=expected` (weight a w instead of a draw)
has the same mean and lower variance.

Z is a sum over the vocabulary, but an engine returns only its top-K. Let the support S be
top-K(p_inf) and the sampled token, and p_K the engine's K-th probability. The sum over S is a lower
bound of Z. With a bound on what lies outside S it becomes an upper one (`z_bracket`). One scalar
kappa per update scales the lower bound to the acceptance rate that was observed (section 4.4.2).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

CLAMP = 20.0  # log-ratios are clamped to +-CLAMP before exp


class Target(NamedTuple):
    """The policy that the accepted tokens should follow, as far as the learner has seen it."""

    logp: torch.Tensor  # (B, T)    of the sampled tokens
    support_logp: torch.Tensor | None  # (B, T, S) on the support S
    # (B, T) sum outside S of min(p_K, p_tgt / lambda), p_K the engine's K-th
    tail: torch.Tensor | None
    z: torch.Tensor | None  # (B, T)    the exact Z, where both distributions were seen whole


class Z(NamedTuple):
    """Z of each token, (B, T), and its bounds or approximation where it is not exact."""

    used: torch.Tensor
    summed: torch.Tensor | None = (
        None  # the sum over the support that kappa scales: Z_low or Z_approx
    )
    high: torch.Tensor | None = None  # Z_high, where `summed` is the certified Z_low


# ---------------------------------------------------------------------------------------------------------------------
# The mechanism
# ---------------------------------------------------------------------------------------------------------------------


def acceptance(logp_tgt, logp_inf, lam, clamp=CLAMP):
    """a = min(1, p_tgt / (lambda p_inf)), elementwise, in (0, 1]. Jackpot Eq. 3."""
    return ((logp_tgt - logp_inf).clamp(-clamp, clamp) - math.log(lam)).clamp_max(0.0).exp()


def weight(z, logp_tgt, logp_inf, lam, clamp=CLAMP):
    """w = Z max(lambda, p_tgt / p_inf), elementwise. Jackpot Alg. 1, line 23."""
    return z * (logp_tgt - logp_inf).clamp(-clamp, clamp).exp().clamp_min(lam)


def correction(
    logp_tgt,
    logp_inf,
    logp_ref,
    z,
    u,
    *,
    lam=1.0,
    c1=3.0,
    c2=1.3,
    expected=False,
    mode="both",
    clamp=CLAMP,
):
    """OBRS as a correction of a surrogate on p_new / p_ref: (weight, keep, accepted), each (B, T),
    no gradient. accepted, for the metrics: the drawn mask, or a without a mask.

    u: uniforms in [0, 1), one a token. logp_ref: None where the target is p_ref itself, so that p_ref / p_tgt is
    1. expected: keep is its expectation a instead of the draw. mode: `mask` or `reweight` alone (Tables 6, 7;
    reweighting alone is biased, since E_inf[w] is not 1)."""
    a = acceptance(logp_tgt, logp_inf, lam, clamp)  # Eq. 3:   min(1, p_tgt / (lambda p_inf))
    keep = a if expected else (u < a).to(a.dtype)  # Eq. 5:   Mask ~ Bernoulli(a), or its mean
    w = weight(z, logp_tgt, logp_inf, lam, clamp)  # line 23: Z max(lambda, p_tgt / p_inf)
    rho = w.clamp_max(c1)  # line 24: min(w, c1) min(p_ref / p_tgt, c2)
    if logp_ref is not None:
        rho = rho * (logp_ref - logp_tgt).clamp(-clamp, clamp).exp().clamp_max(c2)
    if mode == "mask":
        return torch.ones_like(rho), keep, keep
    if mode == "reweight":
        return rho, torch.ones_like(keep), a
    return rho, keep, keep


# ---------------------------------------------------------------------------------------------------------------------
# Z from what an engine returns
# ---------------------------------------------------------------------------------------------------------------------


def z_bracket(support_logp_inf, support_logp_tgt, lam, tail=None):
    """Certified bounds Z_low <= Z <= Z_high from the tokens of S (last axis; absent ones have
    logp_inf = -inf), and a bound on the others.

        Z_low  = sum_S min(p_inf, p_tgt / lambda)
        Z_high = Z_low + min( 1 - sum_S p_inf,  tail ),    tail = sum_{x not in S} min(p_K, p_tgt(x) / lambda)

    The first term of the min bounds the rest of p_inf. The second, from the learner's head over the
    whole vocabulary, bounds the contribution of p_tgt when no token outside S has more than p_K.
    Without `tail` only the first is used."""
    p_inf = support_logp_inf.exp()
    z_low = torch.minimum(p_inf, support_logp_tgt.exp() / lam).sum(-1)
    room = (1.0 - p_inf.sum(-1)).clamp_min(0.0)
    if tail is not None:
        room = torch.minimum(room, tail)
    return z_low, z_low + room


def token_z(target: Target, support_logp_inf, lam, kappa, how: str) -> Z:
    """Z of each token, (B, T). how (`--obrs_z`):

    exact    the whole vocabulary was seen (two models, target ref)
    bracket  clip(kappa Z_low, Z_low, Z_high)
    approx   kappa Z_approx, the text's sum over two top-K, p_inf's and p_ref's (the text has p_new's, which is the same
             before a batch's first update: these ids are chosen once a rollout). Nothing certifies it: without the
             actor at hand p_inf on the policy's own top-K is unknown, and min(p_ref, p_K) replaces it"""
    if how == "exact":
        return Z(target.z)
    low, high = z_bracket(support_logp_inf, target.support_logp, lam, target.tail)
    if how == "approx":
        return Z(kappa * low, low)
    return Z(torch.minimum(torch.maximum(kappa * low, low), high), low, high)


def kappa_from(accepted: float, proposed: float, z_sum: float) -> float:
    """kappa = (accepted / proposed) / mean(Z_low or Z_approx), section 4.4.2; 1 if S has no
    mass."""
    if proposed <= 0 or z_sum <= 0:
        return 1.0
    return (accepted / proposed) / (z_sum / proposed)


def target_of(new, batch, which: str) -> Target:
    """The target `ref` from a batch's ref columns, or `new` from this forward (TokenStats), without
    gradient."""
    if which == "ref":
        return Target(batch.logp_ref, batch.support_logp_ref, batch.tail_ref, batch.z_ref)
    return Target(new.logp.detach(), new.support_logp, new.tail, new.z)


def obrs_logs(accept, z: Z) -> dict:
    """Logs for metrics.py: acceptance, Z, and its bracket or approximation."""
    logs = {"accept": accept, "z": z.used}
    if z.high is not None:
        return logs | {"z_low": z.summed, "z_high": z.high}
    return logs if z.summed is None else logs | {"z_approx": z.summed}


# ---------------------------------------------------------------------------------------------------------------------
# Budgets: the lambda of an acceptance rate
# ---------------------------------------------------------------------------------------------------------------------


def solve_lambda(ratio, rate: float) -> float:
    """The lambda of a budget: mean_i min(1, r_i / lambda) = rate over sampled tokens, exactly, by
    one sort.

    ratio: 1-D tensor of p_tgt / p_inf > 0; rate in (0, 1). With the ratios sorted and S_k the sum
    of the k smallest, lambda in (r_k, r_{k+1}] gives (S_k / lambda + n - k) / n = rate, so lambda =
    S_k / (n rate - n + k). rate = 1: the largest lambda that rejects nothing, min r."""
    r = ratio.double().sort().values
    n = len(r)
    if rate >= 1.0 or n == 0:
        return float(r[0]) if n else 1.0
    k = torch.arange(1, n + 1, dtype=torch.float64, device=r.device)
    room = n * rate - n + k  # > 0 once enough tokens are below lambda
    lam = torch.where(room > 0, r.cumsum(0) / room.clamp_min(1e-300), torch.inf)
    upper = torch.cat([r[1:], r.new_tensor([torch.inf])])
    inside = (lam >= r * (1 - 1e-12)) & (lam <= upper * (1 + 1e-12))
    return float(lam[inside.nonzero()[0, 0]])
