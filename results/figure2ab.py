"""Jackpot's Figure 2 (a, b): what OBRS does to a pair of distributions, by simulation.

    python results/figure2ab.py                 # print the table and draw results/figure2ab.png
    python results/figure2ab.py --lam=1.2

For random pairs (p_tgt, p_inf) over a vocabulary, with kept(x) = min(p_inf(x), p_tgt(x) / lambda)
and Z = sum kept:

    acceptance  Z                                              (Jackpot, section 3.2)
    before      KL(p_tgt || p_inf)
    after       KL(p_tgt || kept / Z)                          (Jackpot, Eq. 4)

The paper simulates "Dirichlet distributions with controllable noise" and does not say which noise.
It matters, so there are two kinds: `dirichlet_pair`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import sweep

from flags import UserError, need

NOISES = {"mixture": np.geomspace(1e-4, 0.6, 14), "log-normal": np.geomspace(0.01, 1.5, 14)}


@dataclass(frozen=True)
class Figure2Flags:
    """Jackpot's Figure 2 (a, b): acceptance rate, and KL before and after OBRS"""

    vocab: int = 100_000
    """Size of the vocabulary."""
    lam: float = 1.0
    """lambda."""
    pairs: int = 20
    """Random pairs for each level of noise."""
    seed: int = 0
    """Seed of the pairs."""
    out: str = str(sweep.RESULTS / "figure2ab.png")
    """Where to draw the figure."""


def dirichlet_pair(vocab: int, kind: str, noise: float, rng, concentration: float = 0.02):
    """A peaked distribution p_tgt ~ Dirichlet and a noisy neighbour p_inf, each (vocab,); KL grows with `noise`.

    mixture: p_inf = (1 - noise) p_tgt + noise Dirichlet, an actor that sometimes says something
    else: OBRS can reject nearly all of the difference. log-normal: p_inf proportional to p_tgt
    exp(noise normal), an actor that is wrong about everything a little: half of the difference is
    mass that p_inf lacks, and no rejection brings it back."""
    p = rng.gamma(concentration, size=vocab) + 1e-30
    p /= p.sum()
    if kind == "mixture":
        other = rng.gamma(concentration, size=vocab) + 1e-30
        return p, (1 - noise) * p + noise * other / other.sum()
    q = p * np.exp(noise * rng.standard_normal(vocab))
    return p, q / q.sum()


def simulate(vocab: int, lam: float, kind: str, noises, pairs: int, seed: int):
    """Rows (noise, KL before, KL after, acceptance, and their standard deviations) over `pairs` random pairs each."""
    rng = np.random.default_rng(seed)
    rows = []
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


def check(flags: Figure2Flags) -> None:
    """UserError unless the pairs can be drawn."""
    if not (0 < flags.lam < math.inf):
        raise UserError(f"--lam={flags.lam}: must be a finite number above 0")
    need(2 <= flags.vocab <= 10**8, f"--vocab={flags.vocab}: at least 2 tokens, and at most 100 million")
    need(flags.pairs >= 1, f"--pairs={flags.pairs}: at least 1")
    need(flags.seed >= 0, f"--seed={flags.seed}: must not be negative")
    sweep.check_picture(flags.out)


def show(kind: str, rows, flags: Figure2Flags) -> None:
    """Print the rows of one kind of noise."""
    print(
        f"OBRS on Dirichlet pairs, {kind} noise, |V| = {flags.vocab}, lambda = {flags.lam}, {flags.pairs} pairs a row"
    )
    print("KL(p_tgt||p_inf)   KL(p_tgt||p_kept)   shrinks by   acceptance")
    for _, before, after, z, *_ in rows:
        print(f"{before:16.5f}   {after:17.6f}   {before / after:9.1f}x   {100 * z:9.2f}%")


def draw(results: dict, flags: Figure2Flags) -> None:
    """The figure: kind of noise -> rows of `simulate`."""
    fig, (left, right) = sweep.pyplot().subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for (kind, rows), colour in zip(results.items(), (sweep.STRONG, sweep.COLOURS[0]), strict=True):
        _, before, after, z, _, _, spread = np.array(rows).T
        left.errorbar(before, 100 * z, 100 * spread, marker="o", ms=4, capsize=2, color=colour, label=kind)
        right.loglog(before, after, marker="o", ms=4, color=colour, label=f"after OBRS, {kind}")
    right.loglog(right.get_xlim(), right.get_xlim(), "--", color="grey", label="before")
    left.set(xscale="log", ylim=(None, 101), ylabel="accepted tokens (%)", title="(a) acceptance rate")
    right.set(ylabel="KL(p_tgt || .)", title="(b) KL before and after")
    for ax in (left, right):
        ax.set_xlabel("KL(p_tgt || p_inf) before")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    fig.suptitle(f"OBRS on Dirichlet pairs, |V| = {flags.vocab:,}, lambda = {flags.lam:g}")
    sweep.save(fig, flags.out)


def study(flags: Figure2Flags) -> None:
    check(flags)
    results = {}
    for kind, noises in NOISES.items():
        results[kind] = simulate(flags.vocab, flags.lam, kind, noises, flags.pairs, flags.seed)
        show(kind, results[kind], flags)
    draw(results, flags)
    print(f"figure: {sweep.shown(flags.out)}")


if __name__ == "__main__":
    sweep.main(study, __doc__, Figure2Flags)
