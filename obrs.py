"""Optimal budgeted rejection sampling (OBRS): the heart of Jackpot, arXiv 2602.06107, sections 3 and 4.

Tokens come from p_inf (the actor, the engine, a stale policy); we want them to look as if they came from p_tgt. Classical
rejection sampling would need lambda >= max p_tgt / p_inf and would reject nearly everything over a vocabulary of 100k.
OBRS takes a small lambda, accepts what it can, and reweights what remains:

    a(x)   = min(1, p_tgt(x) / (lambda p_inf(x)))              accept token x with this probability       (Eq. 3)
    Z      = sum_x min(p_inf(x), p_tgt(x) / lambda)            = the expected acceptance rate
    p'(x)  = min(p_inf(x), p_tgt(x) / lambda) / Z              law of the accepted tokens                 (Eq. 4)
    w(x)   = p_tgt(x) / p'(x) = Z max(lambda, p_tgt(x) / p_inf(x))                                        (Alg. 1, line 23)
    rho    = min(w, c1) min(p_ref / p_tgt, c2)                                                            (Alg. 1, line 24)
    J      = reduce( Mask sg(rho) surrogate ),   Mask ~ Bernoulli(a)                                      (Eq. 5)

What it is, exactly: a(x) w(x) = Z p_tgt(x)/p_inf(x) in both branches, so for c1 >= lambda Z

    E[Mask | x] min(w, c1) = Z min(p_tgt/p_inf, c1/Z):

in expectation OBRS is truncated importance sampling with cap c1/Z, scaled by Z. At lambda = 1, Z = 1 - TV(p_inf, p_tgt):
contexts in which the two laws disagree count less. What OBRS adds to TIS is that Z, the choice of target, and mask noise;
`--obrs_mask=expected` (weight a w instead of a draw) has the same mean and lower variance, by the law of total variance.

Z is a sum over the vocabulary, but an engine returns only its own top-K. On S = top-K(p_inf) + the sampled token,
with p_K the engine's K-th probability, two sums over the same S bracket it (`z_bracket`), and one scalar kappa per update
scales the lower one to the acceptance rate really seen (section 4.4.2).

    python obrs.py                     # Figure 2 (a, b): Dirichlet pairs over a KL grid at |V| = 100k, table and PNG
"""

from __future__ import annotations

import math

import torch

CLAMP = 20.0  # log-ratios are clamped to +-CLAMP before exp


def acceptance(logp_tgt, logp_inf, lam, clamp=CLAMP):
    """a = min(1, p_tgt / (lambda p_inf)), elementwise, in (0, 1]. Jackpot Eq. 3."""
    return (logp_tgt - logp_inf - math.log(lam)).clamp(-clamp, 0.0).exp()


def weight(z, logp_tgt, logp_inf, lam, clamp=CLAMP):
    """w = Z max(lambda, p_tgt / p_inf), elementwise. Jackpot Alg. 1, line 23."""
    return z * (logp_tgt - logp_inf).clamp(-clamp, clamp).exp().clamp_min(lam)


def z_bracket(s_logp_inf, s_logp_tgt, lam, tail=None):
    """Certified bounds Z_low <= Z <= Z_high from the tokens of S alone (last axis; absent entries have logp_inf = -inf).

        Z_low  = sum_S min(p_inf, p_tgt / lambda)
        Z_high = Z_low + min( 1 - sum_S p_inf,  tail ),    tail = sum_{x not in S} min(p_K, p_tgt(x) / lambda)

    The first term of the min bounds what p_inf has left, the second (from the learner's head, which sees the whole
    vocabulary) what p_tgt can fill when no token outside S has more than p_K. Without `tail` only the first is used."""
    p_inf = s_logp_inf.exp()
    z_low = torch.minimum(p_inf, s_logp_tgt.exp() / lam).sum(-1)
    room = (1.0 - p_inf.sum(-1)).clamp_min(0.0)
    if tail is not None:
        room = torch.minimum(room, tail)
    return z_low, z_low + room


def token_z(target, batch, stats, cfg):
    """(Z_t, Z_low, Z_high), each (B, T) or None, for a target given as (logp at S, tail, exact Z).

    `exact`: the whole vocabulary was seen (two models, target ref). `bracket`: clip(kappa Z_low, Z_low, Z_high).
    `approx`: the text's pure kappa Z_approx."""
    s_logp_tgt, tail, exact = target
    if cfg.obrs_z == "exact":
        return exact, None, None
    z_low, z_high = z_bracket(batch.support_logp, s_logp_tgt, stats["lam"], tail)
    z = stats["kappa"] * z_low
    return (z if cfg.obrs_z == "approx" else torch.minimum(torch.maximum(z, z_low), z_high)), z_low, z_high


def correction(logp_tgt, target, batch, stats, cfg):
    """OBRS as a correction: (weight, keep) per token, (B, T), both without gradient, and what to log.

    keep is the Bernoulli draw [u < a], or a itself in the expected mode; weight is rho above. `--obrs_mode` takes
    either half away (Tables 6, 7): mask alone (weight 1), or reweighting alone (keep 1; biased, since E_inf[w] != 1)."""
    lam = stats["lam"]
    z, z_low, z_high = token_z(target, batch, stats, cfg)
    clamp = cfg.log_ratio_clamp
    a = acceptance(logp_tgt, batch.logp_inf, lam, clamp)
    keep = a if cfg.obrs_mask == "expected" else (batch.u < a).to(a.dtype)
    rho = weight(z, logp_tgt, batch.logp_inf, lam, clamp).clamp_max(cfg.obrs_c1)
    if cfg.obrs_target == "new" and cfg.correction != "jackpot_adjusted":
        rho = rho * (batch.logp_ref - logp_tgt).clamp(-clamp, clamp).exp().clamp_max(cfg.obrs_c2)
    if cfg.obrs_mode == "mask":
        rho = torch.ones_like(rho)
    if cfg.obrs_mode == "reweight":
        keep = torch.ones_like(keep)
    return rho, keep, obrs_logs(keep if cfg.obrs_mode != "reweight" else a, z, z_low, z_high)


def obrs_logs(accept, z, z_low, z_high) -> dict:
    """What to log: acceptance and Z, and the bracket where there is one."""
    return {"accept": accept, "z": z, **({} if z_low is None else {"z_low": z_low, "z_high": z_high})}


def kappa_from(accepted: float, proposed: float, z_sum: float) -> float:
    """kappa = (accepted / proposed) / mean(Z_approx), section 4.4.2; 1 where nothing can be said (no mass in S at all)."""
    return (accepted / proposed) / (z_sum / proposed) if proposed > 0 and z_sum > 0 else 1.0


def solve_lambda(ratio, rate: float) -> float:
    """The lambda of a budget: mean_i min(1, r_i / lambda) = rate over sampled tokens, exactly, by one sort.

    ratio: 1-D tensor of p_tgt / p_inf > 0; rate in (0, 1). With the ratios sorted and S_k the sum of the k smallest,
    lambda in (r_k, r_{k+1}] gives (S_k / lambda + n - k) / n = rate, so lambda = S_k / (n rate - n + k).
    rate = 1: the largest lambda that rejects nothing, min r."""
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


def solve_lambda_context(p_tgt, p_inf, rate: float) -> float:
    """Theorem 3.4 for one enumerated context: the lambda with sum_x min(p_inf, p_tgt / lambda) = rate.

    p_tgt, p_inf: 1-D probabilities. rate in (0, 1) gives the unique lambda if it can be reached; above
    p_inf(supp p_tgt) no lambda reaches it (ValueError). rate = 1: the largest lambda that rejects nothing, min p/q."""
    p, q = torch.as_tensor(p_tgt).double(), torch.as_tensor(p_inf).double()
    if not 0.0 < rate <= 1.0:
        raise ValueError(f"the acceptance rate must lie in (0, 1], not {rate}")
    reachable = float(q[p > 0].sum())
    if rate > reachable * (1 + 1e-12):
        raise ValueError(
            f"an acceptance rate of {rate} cannot be reached: p_inf has only {reachable:.6g} of its mass where p_tgt > 0"
        )
    p, q = p[q > 0], q[q > 0]
    if rate >= reachable * (1 - 1e-12):
        return float((p / q)[p > 0].min())
    order = (p / q).argsort()  # below lambda the target limits, above it the proposal
    r, p_sum = (p / q)[order], p[order].cumsum(0)
    q_rest = q.sum() - q[order].cumsum(0)
    lam = p_sum / (rate - q_rest)
    upper = torch.cat([r[1:], r.new_tensor([torch.inf])])
    inside = (rate > q_rest) & (lam >= r * (1 - 1e-12)) & (lam <= upper * (1 + 1e-12))
    return float(lam[inside.nonzero()[0, 0]])
