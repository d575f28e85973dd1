"""Group expectation weights: GEPO (the HeteroRL text), Eq. 9 to 15. `python gepo.py` draws the text's Figure 3 from exact variances.

A delayed sampler's q may give a response a probability close to 0; then p / q explodes. GEPO divides by what q gives the group on average:

    p = exp(mean_t log p_new),  q = exp(mean_t log p_inf)                 length-normalised, one number a response
    E = sum_group q^2 / sum_group q                                       `weighted`, Eq. 11: an estimate of E_q[q^2] / E_q[q]
      = mean_group q                                                      `mean`: unbiased for E_q[q], which Eq. 11 is not
    w = p / E                                                             Eq. 12
    w = p / (e sg(p) + (1 - e) E),  e = clip(c Var_group q, 0, 0.99)      Eq. 15, defensive: `--gepo_defence=c`, 4 in the text, 0 is off

In this repository that is another denominator for `gspo`: `--objective=gspo --ratio_base=group`; the preset `gepo` adds the text's clip and advantage. The group is a prompt's, by its id; E is
made once a step from whole groups (objectives.prepare), so no micro-batch can split it. In log space: extreme probabilities stay finite.

Theorem 1 says Var(p/q) - Var(p/E_q[q]) >= exp(KL(p||q)) - C for plain probabilities, neither length-normalised nor estimated. Its first
half is Var(p/q) + 1 = sum p^2/q >= exp KL; where the two laws are close the group's expectation may well be the worse weight.
"""

from __future__ import annotations

import math

import torch


def log_group_mean(logq, group, how: str = "weighted"):
    """log E of each response's group: logq (B,) mean log p_inf, -inf for a response without tokens; group (B,) ids -> (B,). One exp and one log: q = e^-1000 stays finite."""
    same = group[:, None] == group[None, :]
    total = lambda x: torch.where(same, x[None, :], -math.inf).logsumexp(1)
    if how == "mean":
        log_e = total(logq) - total(torch.where(logq == -math.inf, -math.inf, 0.0).to(logq))
    else:
        log_e = total(2 * logq) - total(logq)
    return log_e.nan_to_num(0.0)  # a group without any token


def mixing(logq, group, c: float):
    """e = clip(c Var q, 0, 0.99), (B,): population variance of q in the response's group."""
    same = (group[:, None] == group[None, :]) & (logq > -math.inf)[None, :]
    q, n = logq.exp(), same.sum(1).clamp_min(1)
    mean = (same * q).sum(1) / n
    return (c * ((same * (q[None, :] - mean[:, None]) ** 2).sum(1) / n)).clamp(0.0, 0.99)


def log_base(logp, log_e, e):
    """log (e p + (1 - e) E): logp (B, 1) without gradient, log_e and e (B, 1)."""
    return torch.logaddexp(e.log() + logp, torch.log1p(-e) + log_e)


def cppo_kl(logp_new, logp_inf, how: str, clamp: float):
    """exp(d) - d - 1 a token, with gradient. official: d = log p_inf - log p_new, as the released code has it; under samples of inf its
    mean is chi2 - KL, not a KL. k3: d = log p_new - log p_inf, whose mean is KL(inf || new)."""
    d = (logp_inf - logp_new if how == "official" else logp_new - logp_inf).clamp(-clamp, clamp)
    return d.exp() - d - 1
