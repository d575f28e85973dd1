"""HeteroRL's Theorem 1 and Figure 3 from exact variances: of p / q, and of GEPO's p / E_q[q], under samples of q.

    python results/theorem1.py                  # print the shares and draw results/theorem1.png

    Var_q(p / q)      = sum p^2 / q - 1                        >= exp(KL(p || q)) - 1
    Var_q(p / E_q[q]) = (sum q p^2 - (sum q p)^2) / (sum q^2)^2

Theorem 1 (the text's Eq. 14) says Var(p/q) - Var(p/E_q[q]) >= exp(KL(p||q)) - C for plain
probabilities, neither length-normalised nor estimated from a group. Figure 3 looks at Bernoulli and
Gaussian pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import sweep
import torch

STANDARD = sweep.STRONG  # Var p / q
GROUP = sweep.COLOURS[0]  # Var p / E_q[q]


@dataclass(frozen=True)
class Theorem1Flags:
    """HeteroRL's Theorem 1 and Figure 3 from exact variances"""

    out: str = str(sweep.RESULTS / "theorem1.png")
    """Where to draw the figure."""


def discrete(p, q) -> dict:
    """KL(p||q), Var_q(p/q) and Var_q(p/E_q[q]) of distributions on the last axis, in float64."""
    p = torch.as_tensor(p, dtype=torch.float64)
    q = torch.as_tensor(q, dtype=torch.float64)
    mean = (q * q).sum(-1)
    return {
        "kl": torch.special.xlogy(p, p / q).sum(-1),
        "standard": (p * p / q).sum(-1) - 1,
        "group": ((q * p * p).sum(-1) - (q * p).sum(-1) ** 2) / mean**2,
    }


def gaussian(shift, sigma_p, sigma_q=1.0) -> dict:
    """The same for densities N(shift, sigma_p^2) and N(0, sigma_q^2).

    Var_q(p/q) is infinite from sigma_p^2 = 2 sigma_q^2 on."""
    m, s, t = (torch.as_tensor(x, dtype=torch.float64) for x in (shift, sigma_p, sigma_q))
    gap = 2 * t * t - s * s
    finite = t * t / (s * gap.clamp_min(1e-300).sqrt()) * (m * m / gap.clamp_min(1e-300)).exp() - 1
    mean = 1 / (2 * t * math.sqrt(math.pi))
    second = normal(m, t * t + s * s / 2) / (2 * s * math.sqrt(math.pi))
    return {
        "kl": (t / s).log() + (s * s + m * m) / (2 * t * t) - 0.5,
        "standard": torch.where(gap > 0, finite, math.inf),
        "group": (second - normal(m, t * t + s * s) ** 2) / mean**2,
    }


def normal(x, variance):
    """The density of N(0, variance) at x."""
    return (-x * x / (2 * variance)).exp() / (2 * math.pi * variance).sqrt()


class Case(NamedTuple):
    """One family of pairs on a grid of two parameters; arrays of one shape."""

    name: str
    values: dict  # kl, standard, group
    x: np.ndarray
    y: np.ndarray
    xlabel: str
    ylabel: str


def cases() -> list[Case]:
    """Figure 3's two families."""
    line = torch.linspace(0.005, 0.995, 199, dtype=torch.float64)
    a, b = torch.meshgrid(line, line, indexing="ij")
    shifts = torch.linspace(0.0, 3.0, 121, dtype=torch.float64)
    sigmas = torch.linspace(0.1, 2.0, 191, dtype=torch.float64)
    m, s = torch.meshgrid(shifts, sigmas, indexing="ij")
    bernoulli = discrete(torch.stack([a, 1 - a], -1), torch.stack([b, 1 - b], -1))
    made = [
        ("Bernoulli", bernoulli, a, b, "p(1)", "q(1)"),
        ("Gaussian, sigma_q = 1", gaussian(m, s), m, s, "mean of p, q's being 0", "sigma_p"),
    ]
    return [
        Case(name, {k: u.numpy() for k, u in values.items()}, x.numpy(), y.numpy(), xlabel, ylabel)
        for name, values, x, y, xlabel, ylabel in made
    ]


def shares(case: Case) -> dict[str, float]:
    """Share of the grid on which the group's weight has the larger variance, and the largest KL in that region."""
    worse = case.values["group"] > case.values["standard"]
    return {
        f"{case.name}: group worse, share": float(worse.mean()),
        f"{case.name}: group worse, KL up to": float(case.values["kl"][worse].max()),
    }


def draw_variances(ax, case: Case) -> None:
    """Both variances of every pair against its KL."""
    v = case.values
    finite = np.isfinite(v["standard"])
    ax.plot(v["kl"][finite].flatten(), v["standard"][finite].clip(max=1e30).flatten(), ",", color=STANDARD)
    ax.plot(v["kl"].flatten(), v["group"].flatten(), ",", color=GROUP)
    line = np.linspace(0.01, 6, 200)
    ax.plot(line, np.exp(line) - 1, "k--", lw=1)
    ax.plot([], [], "s", color=STANDARD, label="Var p / q")
    ax.plot([], [], "s", color=GROUP, label="Var p / E_q[q]")
    ax.plot([], [], "k--", label="exp(KL) - 1, below every Var p / q")
    ax.set(yscale="log", xlim=(0, 6), ylim=(1e-4, 1e6), xlabel="KL(p || q)")
    ax.set_title(f"{case.name}: variance of the two weights", fontsize=10)
    ax.legend(fontsize=8, loc="lower right")


def draw_gain(fig, ax, case: Case) -> None:
    """How many times smaller the group's variance is, over the family's parameters."""
    from matplotlib.colors import TwoSlopeNorm

    v = case.values
    finite = np.isfinite(v["standard"])
    gain = np.log10(v["standard"].clip(1e-12, 1e30) / v["group"].clip(1e-12))
    gain = np.where(finite, gain, np.nan).clip(-3, 6)
    image = ax.pcolormesh(case.x, case.y, gain, norm=TwoSlopeNorm(0, -3, 6), cmap="RdBu", rasterized=True)
    ax.contour(case.x, case.y, v["kl"], levels=[0.1, 0.5, 1, 2, 4], colors="k", linewidths=0.6)
    title = "log10 Var(p/q) / Var(p/E): red, the group's is larger; lines: KL 0.1 to 4"
    if not finite.all():
        ax.contourf(case.x, case.y, finite.astype(float), levels=[-0.5, 0.5], colors="none", hatches=["//"])
        title += "; hatched: Var(p/q) infinite"
    ax.set(xlabel=case.xlabel, ylabel=case.ylabel)
    ax.set_title(title, fontsize=8)
    fig.colorbar(image, ax=ax)


def draw(path: str) -> dict[str, float]:
    """Draw Figure 3 at `path`; returns the `shares` of both families."""
    fig, axes = sweep.pyplot().subplots(2, 2, figsize=(12, 9.2), layout="constrained")
    found = {}
    for (left, right), case in zip(axes, cases(), strict=True):
        found |= shares(case)
        draw_variances(left, case)
        draw_gain(fig, right, case)
    sweep.save(fig, path)
    return found


def study(flags: Theorem1Flags) -> None:
    sweep.check_picture(flags.out)
    for name, value in draw(flags.out).items():
        print(f"{name:45s} {value:.3f}")
    print(f"drawn: {sweep.shown(flags.out)}")


if __name__ == "__main__":
    sweep.main(study, __doc__, Theorem1Flags)
