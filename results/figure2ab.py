"""Jackpot's Figure 2 (a, b): what OBRS does to a pair of distributions, by simulation."""

from __future__ import annotations

import argparse

import numpy as np

# ---------------------------------------------------------------------------------------------------------------------
# Figure 2 (a, b): what OBRS does to a pair of laws, by simulation
# ---------------------------------------------------------------------------------------------------------------------

NOISES = {"mixture": np.geomspace(1e-4, 0.6, 14), "log-normal": np.geomspace(0.01, 1.5, 14)}


def dirichlet_pair(vocab: int, kind: str, noise: float, rng, concentration: float = 0.02):
    """A peaked law p_tgt ~ Dirichlet and a noisy neighbour p_inf; KL grows with `noise`.

    mixture: p_inf = (1 - noise) p_tgt + noise Dirichlet, an actor that sometimes says something else: OBRS can reject nearly
    all of the difference. log-normal: p_inf proportional to p_tgt exp(noise normal), an actor that is wrong about
    everything a little: half of the difference is mass that p_inf lacks, and no rejection brings it back."""
    p = rng.gamma(concentration, size=vocab) + 1e-30
    p /= p.sum()
    if kind == "mixture":
        other = rng.gamma(concentration, size=vocab) + 1e-30
        return p, (1 - noise) * p + noise * other / other.sum()
    q = p * np.exp(noise * rng.standard_normal(vocab))
    return p, q / q.sum()


def simulate(vocab: int, lam: float, kind: str, noises, pairs: int, seed: int):
    """Rows (noise, KL before, KL after, acceptance, and their standard deviations) over `pairs` random pairs each."""
    rng, rows = np.random.default_rng(seed), []
    for noise in noises:
        got = []
        for _ in range(pairs):
            p, q = dirichlet_pair(vocab, kind, noise, rng)
            kept = np.minimum(q, p / lam)
            z = kept.sum()
            got.append((float((p * np.log(p / q)).sum()), float((p * np.log(p * z / kept)).sum()), z))
        got = np.array(got)
        rows.append((float(noise), *got.mean(0).tolist(), *got.std(0).tolist()))
    return rows


def main():
    ap = argparse.ArgumentParser(description="Jackpot Figure 2 (a, b): acceptance rate and KL before and after OBRS.")
    ap.add_argument("--vocab", type=int, default=100_000, help="vocabulary size")
    ap.add_argument("--lam", type=float, default=1.0, help="lambda")
    ap.add_argument("--pairs", type=int, default=20, help="random pairs for each noise level")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--out", default="out/obrs.png", help="where to draw the figure")
    args = ap.parse_args()
    if args.lam <= 0 or args.vocab < 2 or args.pairs < 1:
        ap.error("--lam must be above 0, --vocab at least 2, --pairs at least 1")

    import os

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    for kind, noises in NOISES.items():
        rows = simulate(args.vocab, args.lam, kind, noises, args.pairs, args.seed)
        print(
            f"OBRS on Dirichlet pairs, {kind} noise, |V| = {args.vocab}, lambda = {args.lam}, {args.pairs} pairs a row"
        )
        print("KL(p_tgt||p_inf)   KL(p_tgt||p_kept)   shrinks by   acceptance")
        for _, before, after, z, *_ in rows:
            print(f"{before:16.5f}   {after:17.6f}   {before / after:9.1f}x   {100 * z:9.2f}%")
        _, before, after, z, _, _, spread = np.array(rows).T
        left.errorbar(before, 100 * z, 100 * spread, marker="o", ms=4, capsize=2, label=kind)
        right.loglog(before, after, marker="o", ms=4, label=f"after OBRS, {kind}")
    right.loglog(right.get_xlim(), right.get_xlim(), "--", color="grey", label="before")
    left.set(
        xscale="log",
        xlabel="KL(p_tgt || p_inf) before",
        ylabel="accepted tokens (%)",
        title="(a) acceptance rate",
        ylim=(None, 101),
    )
    right.set(xlabel="KL(p_tgt || p_inf) before", ylabel="KL(p_tgt || .)", title="(b) KL before and after")
    for ax in (left, right):
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    fig.suptitle(f"OBRS on Dirichlet pairs, |V| = {args.vocab:,}, lambda = {args.lam:g}")
    fig.tight_layout()
    os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
    fig.savefig(args.out, dpi=130)
    print(f"figure: {args.out}")


if __name__ == "__main__":
    main()
