"""HeteroRL's Theorem 1 and Figure 3 from exact variances."""

from __future__ import annotations

import math

import numpy as np
import torch

# ---------------------------------------------------------------------------------------------------------------------
# Theorem 1 and Figure 3: exact variances of p / q and of p / E_q[q] under q
# ---------------------------------------------------------------------------------------------------------------------


def discrete(p, q) -> dict:
    """Laws on the last axis -> KL(p||q), Var_q(p/q), Var_q(p/E_q[q]), float64."""
    p, q = torch.as_tensor(p, dtype=torch.float64), torch.as_tensor(q, dtype=torch.float64)
    mean = (q * q).sum(-1)
    return {
        "kl": torch.special.xlogy(p, p / q).sum(-1),
        "standard": (p * p / q).sum(-1) - 1,
        "group": ((q * p * p).sum(-1) - (q * p).sum(-1) ** 2) / mean**2,
    }


def gaussian(shift, sigma_p, sigma_q=1.0) -> dict:
    """The same for densities N(shift, sigma_p^2) and N(0, sigma_q^2). Var_q(p/q) is infinite from sigma_p^2 = 2 sigma_q^2 on."""
    m, s, t = (torch.as_tensor(x, dtype=torch.float64) for x in (shift, sigma_p, sigma_q))
    normal = lambda x, var: (-x * x / (2 * var)).exp() / (2 * math.pi * var).sqrt()
    gap = 2 * t * t - s * s
    finite = t * t / (s * gap.clamp_min(1e-300).sqrt()) * (m * m / gap.clamp_min(1e-300)).exp() - 1
    mean = 1 / (2 * t * math.sqrt(math.pi))
    return {
        "kl": (t / s).log() + (s * s + m * m) / (2 * t * t) - 0.5,
        "standard": torch.where(gap > 0, finite, math.inf),
        "group": (normal(m, t * t + s * s / 2) / (2 * s * math.sqrt(math.pi)) - normal(m, t * t + s * s) ** 2)
        / mean**2,
    }


def draw(path: str) -> dict[str, float]:
    """Figure 3 on grids; returns the share of each grid where the group's weight has the larger variance, and the largest KL of that region."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import TwoSlopeNorm

    a, b = torch.meshgrid(
        torch.linspace(0.005, 0.995, 199, dtype=torch.float64),
        torch.linspace(0.005, 0.995, 199, dtype=torch.float64),
        indexing="ij",
    )
    m, s = torch.meshgrid(
        torch.linspace(0.0, 3.0, 121, dtype=torch.float64),
        torch.linspace(0.1, 2.0, 191, dtype=torch.float64),
        indexing="ij",
    )
    cases = [
        ("Bernoulli", discrete(torch.stack([a, 1 - a], -1), torch.stack([b, 1 - b], -1)), a, b, "p(1)", "q(1)"),
        ("Gaussian, sigma_q = 1", gaussian(m, s), m, s, "mean of p, q's being 0", "sigma_p"),
    ]
    fig, axes = plt.subplots(2, 2, figsize=(12, 9.2))
    out = {}
    for row, (name, v, x, y, xlabel, ylabel) in zip(axes, cases):
        v, x, y = {k: u.numpy() for k, u in v.items()}, x.numpy(), y.numpy()
        worse = v["group"] > v["standard"]
        out[f"{name}: group worse, share"] = float(worse.mean())
        out[f"{name}: group worse, KL up to"] = float(v["kl"][worse].max())
        finite = np.isfinite(v["standard"])
        row[0].plot(v["kl"][finite].flatten(), v["standard"][finite].clip(max=1e30).flatten(), ",", color="C3")
        row[0].plot(v["kl"].flatten(), v["group"].flatten(), ",", color="C0")
        line = np.linspace(0.01, 6, 200)
        row[0].plot(line, np.exp(line) - 1, "k--", lw=1)
        row[0].plot([], [], "s", color="C3", label="Var p / q")
        row[0].plot([], [], "s", color="C0", label="Var p / E_q[q]")
        row[0].plot([], [], "k--", label="exp(KL) - 1, below every Var p / q")
        row[0].set(
            yscale="log",
            xlim=(0, 6),
            ylim=(1e-4, 1e6),
            xlabel="KL(p || q)",
            title=f"{name}: variance of the two weights",
        )
        row[0].legend(fontsize=8, loc="lower right")
        gain = np.where(finite, np.log10(v["standard"].clip(1e-12, 1e30) / v["group"].clip(1e-12)), np.nan).clip(-3, 6)
        image = row[1].pcolormesh(x, y, gain, norm=TwoSlopeNorm(0, -3, 6), cmap="RdBu", rasterized=True)
        row[1].contour(x, y, v["kl"], levels=[0.1, 0.5, 1, 2, 4], colors="k", linewidths=0.6)
        if not finite.all():
            row[1].contourf(x, y, finite.astype(float), levels=[-0.5, 0.5], colors="none", hatches=["//"])
        row[1].set(
            xlabel=xlabel,
            ylabel=ylabel,
            title="log10 Var(p/q) / Var(p/E): red, the group's is larger; lines: KL 0.1 to 4"
            + ("" if finite.all() else "; hatched: Var(p/q) infinite"),
        )
        row[1].title.set_fontsize(8)
        fig.colorbar(image, ax=row[1])
    fig.tight_layout()
    fig.savefig(path, dpi=100)
    plt.close(fig)
    return out


if __name__ == "__main__":
    for name, value in draw("assets/gepo.png").items():
        print(f"{name:45s} {value:.3f}")
    print("drawn: assets/gepo.png")
