"""The corrections' formulas: pure functions of (B, T) tensors and numbers. Each works in another framework, too, with
the few helpers that it calls.

    log_r = log p_ref - log p_inf        inf: the policy that sampled; ref: the learner's before the
                                         first update on this rollout batch
    r = exp(log_r)                       per token, (B, T)
    R = exp(sum_t log_r)                 per response, (B, 1)
    R_t = exp(sum_{s<=t} log_r_s)        per prefix of a response, (B, T)

Log-ratios are clamped to +- `clamp` (`--log_ratio_clamp`, 20) before exp, sequence sums after summing.
"""

from __future__ import annotations

import math

import torch

import obrs

CLAMP = obrs.CLAMP


# ---------------------------------------------------------------------------------------------------------------------
# Ratios from log-ratios (B, T): per token, or one number a response (B, 1)
# ---------------------------------------------------------------------------------------------------------------------


def token_ratio(log_r, clamp=CLAMP):
    """r = exp(log_r), (B, T)."""
    return log_r.clamp(-clamp, clamp).exp()


def seq_ratio(log_r, mask, clamp=CLAMP):
    """R = exp(sum_t log_r), (B, 1)."""
    return token_ratio(seq_sum(log_r, mask), clamp)


def prefix_ratio(log_r, mask, clamp=CLAMP):
    """R_t = exp(sum_{s<=t} log_r_s), (B, T): a response's ratio up to each token, that token with it."""
    return token_ratio((log_r * mask).cumsum(1), clamp)


def geo_ratio(log_r, mask, clamp=CLAMP):
    """exp(mean_t log_r) = R^(1/T), (B, 1): the same whatever the length."""
    return token_ratio(seq_mean(log_r, mask), clamp)


def token_k2(log_r, clamp=CLAMP):
    """(log r)^2 / 2, (B, T): each token's share of the k2 estimate of KL(inf || ref). Schulman."""
    return log_r.clamp(-clamp, clamp) ** 2 / 2


def token_k3(log_r, clamp=CLAMP):
    """r - 1 - log r >= 0, (B, T): each token's share of the k3 estimate of KL(inf || ref)."""
    x = log_r.clamp(-clamp, clamp).double()  # near 0 the two terms cancel: x^2 / 2 is left
    return (torch.expm1(x) - x).to(log_r.dtype)


def seq_sum(x, mask):
    """Sum over a response's tokens, (B, 1)."""
    return (x * mask).sum(1, keepdim=True)


def seq_mean(x, mask):
    """Mean over a response's tokens, (B, 1); 0 for an empty response."""
    return seq_sum(x, mask) / mask.sum(1, keepdim=True).clamp_min(1)


def seq_max(x, mask):
    """The largest of a response's tokens, (B, 1), of values that are never negative; 0 for an empty response."""
    return x.masked_fill(~mask, 0.0).amax(1, keepdim=True)


def loglinear_ref(logp_new, logp_inf, age):
    """log p_ref without a pass for it, (B, T): log p_inf + a (log p_new - log p_inf), a = (d - 1) / d.

    age d, (B, 1): how many updates old the sampling weights are. It estimates the policy of one update ago; at d = 0
    p_ref is p_new, a = 1 (AReaL's `loglinear` has a = 0 there)."""
    age = age.to(logp_inf)
    a = torch.where(age >= 1, (age - 1) / age.clamp_min(1), 1.0)
    return logp_inf + a * (logp_new - logp_inf)


def inside(x, low, high):
    """1 where low <= x <= high, else 0."""
    return ((x >= low) & (x <= high)).to(x.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Corrections: -> (weight, keep), each (B, T) or (B, 1). None of them carries gradient.
# ---------------------------------------------------------------------------------------------------------------------


def none(log_r):
    """weight 1, keep all."""
    return torch.ones_like(log_r), torch.ones_like(log_r)


def vanilla_is(log_r, clamp=CLAMP):
    """weight r, unbounded. AReaL's F(x) = x."""
    weight = token_ratio(log_r, clamp)
    return weight, torch.ones_like(weight)


def tis(log_r, cap, floor=0.0, clamp=CLAMP):
    """weight min(r, C): truncated importance sampling; C = 2. TIS."""
    weight = token_ratio(log_r, clamp).clamp(floor, cap)
    return weight, torch.ones_like(weight)


def icepop(log_r, low, high, clamp=CLAMP):
    """weight r, tokens outside low <= r <= high dropped. Jackpot section 2.2 (IceProp)."""
    r = token_ratio(log_r, clamp)
    return r, inside(r, low, high)


def areal_drop(log_r, cap, clamp=CLAMP):
    """weight r, tokens with r > C dropped. TIS text on AReaL."""
    r = token_ratio(log_r, clamp)
    return r, (r <= cap).to(r.dtype)


def z_tis(log_r, z, c1, clamp=CLAMP):
    """weight Z min(r, c1 / Z): OBRS in expectation, without its mask; the control for it (obrs.py)."""
    weight = (z * token_ratio(log_r, clamp)).clamp_max(c1)
    return weight, torch.ones_like(weight)


def seq_is(log_r, mask, clamp=CLAMP):
    """weight R. Praxis."""
    weight = seq_ratio(log_r, mask, clamp)
    return weight, torch.ones_like(weight)


def seq_tis(log_r, mask, cap, floor=0.0, clamp=CLAMP):
    """weight min(R, C), C = 4. Praxis Seq-TIS."""
    weight = seq_ratio(log_r, mask, clamp).clamp(floor, cap)
    return weight, torch.ones_like(weight)


def seq_mis(log_r, mask, low, high, clamp=CLAMP):
    """weight R, responses outside low <= R <= high dropped. Praxis section 6."""
    weight = seq_ratio(log_r, mask, clamp)
    return weight, inside(weight, low, high)


def prefix_tis(log_r, mask, cap, floor=0.0, clamp=CLAMP):
    """weight min(R_t, C), C = 1: truncated per-decision importance sampling.

    Without a cap E_inf[R_t X_t] = E_ref[X_t] for every X_t that the first t tokens determine: context and token count
    as under ref. Later tokens enter through the advantage alone and stay the sampler's. So the weight has t factors
    where R has all, and less variance. The unbounded form is CTPO's ratio, arXiv 2605.07331; the cap is that of tis,
    and it bounds what one response can do to a batch."""
    weight = prefix_ratio(log_r, mask, clamp).clamp(floor, cap)
    return weight, torch.ones_like(weight)


def retrace(log_r, mask, clamp=CLAMP):
    """weight prod_{s<=t} min(r_s, 1): the traces of Retrace(1), with the token's own ratio."""
    weight = prefix_ratio(log_r.clamp_max(0), mask, clamp)
    return weight, torch.ones_like(weight)


def retrace_seq(log_r, mask, clamp=CLAMP):
    """weight prod_{s<=t} min(r_s, 1) min(R, 1): a token counts less if it, an earlier token or the whole response is
    less likely under ref than under inf.

    Of 62 weights that are never negative and do not see the advantage none beat it by two errors, with any of four
    samplers: results/search.md."""
    weight, keep = retrace(log_r, mask, clamp)
    return weight * seq_ratio(log_r, mask, clamp).clamp_max(1), keep


def vespo(log_r, mask, adv, positive=(2.0, 3.0), negative=(3.0, 2.0), clamp=CLAMP):
    """weight R^k exp(lambda (1 - R)), 1 at R = 1 and highest at R = k / lambda. VESPO, arXiv 2602.10693.

    positive, negative: (k, lambda) where A >= 0, and where A < 0. The form and these numbers are TRL's
    (GRPOTrainer.get_gamma_weights); there R is p_new / p_inf, `--correction_target=new`."""
    seq_log_r = seq_sum(log_r, mask).clamp(-clamp, clamp)
    weight = torch.where(adv >= 0, soft_kernel(seq_log_r, *positive), soft_kernel(seq_log_r, *negative))
    return weight, torch.ones_like(weight)


def soft_kernel(seq_log_r, k, lam):
    """R^k exp(lambda (1 - R))."""
    return (k * seq_log_r + lam * (1 - seq_log_r.exp())).exp()


def geo_rs(log_r, mask, low, high, clamp=CLAMP):
    """weight 1, responses outside low <= exp(mean log r) <= high dropped. Praxis."""
    keep = inside(geo_ratio(log_r, mask, clamp), low, high)
    return torch.ones_like(keep), keep


def geo_rs_seq_tis(log_r, mask, cap, low, high, floor=0.0, clamp=CLAMP):
    """weight min(R, C) on the responses that geo_rs keeps. Praxis."""
    weight, _ = seq_tis(log_r, mask, cap, floor, clamp)
    _, keep = geo_rs(log_r, mask, low, high, clamp)
    return weight, keep


def tbpo_mismatch(log_r, mask, cap, floor=0.0, drop=False, clamp=CLAMP):
    """weight exp(mean log r), capped two-sided to [1/C, C], C = 2. QaRL section 3.2.

    drop: responses outside are dropped instead. floor: another lower bound than 1/C."""
    m, low = geo_ratio(log_r, mask, clamp), floor or 1 / cap
    if drop:
        return m, inside(m, low, cap)
    return m.clamp(low, cap), torch.ones_like(m)


# ---------------------------------------------------------------------------------------------------------------------
# GEPO's group expectation (the HeteroRL text, Eq. 9 to 15): another base of gspo's ratio, `--ratio_base=group`
#
# A delayed sampler's q may give a response a probability close to 0; then p / q explodes. GEPO divides by what q
# gives the group on average. p and q are length-normalised, one number a response:
#
#     p = exp(mean_t log p_new),  q = exp(mean_t log p_inf)
#     E = sum_group q^2 / sum_group q               Eq. 11, `weighted`: an estimate of E_q[q^2] / E_q[q]
#       = mean_group q                              `mean`: unbiased for E_q[q], which Eq. 11 is not
#     w = p / E                                     Eq. 12
#     w = p / (e sg(p) + (1 - e) E)                 Eq. 15, defensive mixing, e = clip(c Var_group q, 0, 0.99)
#
# The group is a prompt's, by its id, and E is made once a step from whole groups (objectives.prepare_group), so no
# micro-batch can split it. Everything stays in log space: extreme probabilities are finite.
#
# Theorem 1 says Var(p/q) - Var(p/E_q[q]) >= exp(KL(p||q)) - C for plain probabilities, neither length-normalised
# nor estimated. Its first half is Var(p/q) + 1 = sum p^2/q >= exp KL; where p and q are close the group's
# expectation may well be the worse weight. `python results/theorem1.py` draws both variances, exactly.
# ---------------------------------------------------------------------------------------------------------------------


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


def group_mixing(mean_logp_inf, group, c: float):
    """e = clip(c Var q, 0, 0.99), (B,): population variance of q in the response's group. Eq. 15."""
    same = (group[:, None] == group[None, :]) & (mean_logp_inf > -math.inf)[None, :]
    q, n = mean_logp_inf.exp(), same.sum(1).clamp_min(1)
    mean = (same * q).sum(1) / n
    variance = (same * (q[None, :] - mean[:, None]) ** 2).sum(1) / n
    return (c * variance).clamp(0.0, 0.99)


def group_log_base(mean_logp_new, log_group_mean, mixing):
    """log of what p is divided by: log (e p + (1 - e) E), each (B, 1), no gradient. Eq. 15; with e = 0 Eq. 12."""
    return torch.logaddexp(mixing.log() + mean_logp_new, torch.log1p(-mixing) + log_group_mean)


def cppo_kl(logp_new, logp_inf, how: str, clamp: float):
    """CPPO's KL between new and inf: exp(d) - d - 1 of each token, (B, T), with gradient; k2: d^2 / 2.

    official: d = log p_inf - log p_new, as the released code has it; under samples of inf its mean is chi2 - KL,
    no KL. k3: d = log p_new - log p_inf, whose mean is KL(inf || new). k2, near it: prime-rl's, --cppo_beta=0.002."""
    d = logp_inf - logp_new if how == "official" else logp_new - logp_inf
    return d * d / 2 if how == "k2" else token_k3(d, clamp)
