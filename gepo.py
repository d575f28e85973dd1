"""Group expectation weights: GEPO (the HeteroRL text), Eq. 9 to 15.

A delayed sampler's q may give a response a probability close to 0; then p / q explodes. GEPO divides by what q
gives the group on average. p and q are length-normalised, one number a response:

    p = exp(mean_t log p_new),  q = exp(mean_t log p_inf)
    E = sum_group q^2 / sum_group q               Eq. 11, `weighted`: an estimate of E_q[q^2] / E_q[q]
      = mean_group q                              `mean`: unbiased for E_q[q], which Eq. 11 is not
    w = p / E                                     Eq. 12
    w = p / (e sg(p) + (1 - e) E)                 Eq. 15, defensive mixing, e = clip(c Var_group q, 0, 0.99)

In this repository that is another base of gspo's ratio: `--objective=gspo --ratio_base=group`; the preset `gepo`
adds the text's clip and advantage, `--gepo_defence=c` the mixing. The group is a prompt's, by its id, and E is
made once a step from whole groups (objectives.prepare_group), so no micro-batch can split it. Everything stays in
log space: extreme probabilities are finite.

Theorem 1 says Var(p/q) - Var(p/E_q[q]) >= exp(KL(p||q)) - C for plain probabilities, neither length-normalised
nor estimated. Its first half is Var(p/q) + 1 = sum p^2/q >= exp KL; where p and q are close the group's
expectation may well be the worse weight. `python results/theorem1.py` draws both variances, exactly.
"""

from __future__ import annotations

import math

import torch


def log_group_mean(mean_logp_inf, group, how: str = "weighted"):
    """log E of each response's group, (B,). Eq. 11, or the plain mean.

    mean_logp_inf: (B,), -inf for a response without tokens; group: (B,) ids. A group without any token has 0."""
    log_q = mean_logp_inf
    if how == "mean":
        count = torch.where(log_q == -math.inf, -math.inf, 0.0).to(log_q)
        log_mean = log_group_sum(log_q, group) - log_group_sum(count, group)
    else:
        log_mean = log_group_sum(2 * log_q, group) - log_group_sum(log_q, group)
    return log_mean.nan_to_num(0.0)


def log_group_sum(x, group):
    """log sum exp(x) over each response's group: x (B,) -> (B,)."""
    same = group[:, None] == group[None, :]
    return torch.where(same, x[None, :], -math.inf).logsumexp(1)


def mixing(mean_logp_inf, group, c: float):
    """e = clip(c Var q, 0, 0.99), (B,): population variance of q in the response's group. Eq. 15."""
    same = (group[:, None] == group[None, :]) & (mean_logp_inf > -math.inf)[None, :]
    q, n = mean_logp_inf.exp(), same.sum(1).clamp_min(1)
    mean = (same * q).sum(1) / n
    variance = (same * (q[None, :] - mean[:, None]) ** 2).sum(1) / n
    return (c * variance).clamp(0.0, 0.99)


def log_base(mean_logp_new, log_group_mean, mixing):
    """log of what p is divided by: log (e p + (1 - e) E), each (B, 1), no gradient. Eq. 15; with e = 0 Eq. 12."""
    return torch.logaddexp(mixing.log() + mean_logp_new, torch.log1p(-mixing) + log_group_mean)


def cppo_kl(logp_new, logp_inf, how: str, clamp: float):
    """exp(d) - d - 1 a token, (B, T), with gradient.

    official: d = log p_inf - log p_new, as the released code has it; under samples of inf its mean is chi2 - KL,
    no KL. k3: d = log p_new - log p_inf, whose mean is KL(inf || new)."""
    d = logp_inf - logp_new if how == "official" else logp_new - logp_inf
    d = d.clamp(-clamp, clamp)
    return d.exp() - d - 1
