"""Curvature: what becomes of the slope a few steps ahead, along each correction's own step (a part of foretell.py).

A row's step is Adam's, from the mean of sixteen batches of the actor's responses at the start. The policy's weights are
shifted by one, two and four of them in a straight line, and there it samples for itself: its reward, and its on-policy
gradient along the step. Where the surface is flat the slope stays; where it bends before training has come that far,
the slope at the start, which is all that worth knows, is not what the later steps meet.
"""

from __future__ import annotations

import math

import sweep
import torch
from tqdm import tqdm

import worth
from batching import collate
from config import EMBEDDED
from model import Needs
from optim import learning

ROWS = ("none", "tis", "tis is_cap=3", "jackpot", "seq_tis is_cap=1", "retrace_seq", "spare")
AHEAD = (0, 1, 2, 4)  # steps


def adams_steps(m: worth.Measurement, batches: int) -> dict[str, list[torch.Tensor]]:
    """Row -> the step that Adam makes of many batches, over its learning rate: mean over root mean square, by entry.

    `on-policy` is that of g."""
    weights = learning(m.scorer.models.policy)
    sums = {row: [[torch.zeros_like(x), torch.zeros_like(x)] for x in m.weights.flat] for row in ("on-policy", *m.rows)}
    for _ in tqdm(range(batches), desc="steps"):
        made = worth.batches_of(m.learner, m.sampler.next(m.groups, 0), m.rows)
        found = {"on-policy": m.gradient(collate(m.on_policy.next(m.groups, 0), m.plain))}
        logp = m.scorer.wrapped(next(iter(made.values())), Needs(), False)["logp"]
        for row, cfg in m.rows.items():
            total = (worth.coefficients(made[row], m.comm, cfg) * logp.double()).sum()
            found[row] = [x.flatten() for x in torch.autograd.grad(total, weights, retain_graph=True)]
        for row, gradient in found.items():
            for (first, second), x in zip(sums[row], gradient, strict=True):
                first += x / batches
                second += x**2 / batches
    return {row: [first / (second.sqrt() + 1e-8) for first, second in own] for row, own in sums.items()}


def measure(batches: int = 16, on_policy: int = 8) -> dict:
    """Of each row its step, and the slope of g along it and the reward after some such steps, as lists of batches."""
    argv = [f"--config={sweep.STUDY}", "--actor=base:actor", f"--rows={'; '.join(ROWS)}"]
    m = worth.Measurement(*worth.parse([*argv, "--directions=4"]))
    steps, found = adams_steps(m, batches), {}
    for row, step in tqdm(steps.items(), desc="rows"):
        size = m.weights.dot(step, step)
        along = m.weights.dot(step, steps["on-policy"])
        size_on = m.weights.dot(steps["on-policy"], steps["on-policy"])
        found[row] = {"cosine": along / math.sqrt(size * size_on), "slope": [], "reward": []}
        for n in AHEAD:
            m.weights.shift(step, n * EMBEDDED["lr"])
            seen = [collate(m.on_policy.next(m.groups, 0), m.plain) for _ in range(on_policy)]
            found[row]["slope"].append([m.weights.dot(m.gradient(batch), step) * EMBEDDED["lr"] for batch in seen])
            found[row]["reward"].append([batch.reward.mean().item() for batch in seen])
        m.weights.shift(step, 0.0)
    m.sampler.close()
    return {"flags": argv, "rows": found}


def table(rows: dict[str, dict]) -> str:
    """The record of `measure` as a table."""
    cells = []
    for row, x in rows.items():
        slopes, rewards = ([sweep.mean_se(each) for each in x[key]] for key in ("slope", "reward"))
        cells.append([row, f"{x['cosine']:.2f}"])
        cells[-1] += [f"{1000 * y:.2f} +- {1000 * se:.2f}" for y, se in slopes]
        cells[-1].append("{:.2f} +- {:.2f}".format(*lost(slopes[AHEAD.index(0)], slopes[AHEAD.index(2)])))
        cells[-1] += [f"{100 * y:.1f} +- {100 * se:.1f}" for y, se in rewards]
    head = ["row", "cosine with the on-policy step", *(f"slope after {n} (x 1000)" for n in AHEAD)]
    head += ["slope lost in two steps", *(f"reward after {n}, %" for n in AHEAD)]
    note = (
        "Along each row's own Adam step, in a straight line from the start: the on-policy gradient times the step,\n"
        "and the reward, where the policy is shifted by so many steps and samples for itself. slope lost: of that at 0."
    )
    return f"## Curvature\n\n{note}\n\n" + sweep.markdown(head, cells)


def lost(before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float]:
    """1 - after / before, of two means that have independent errors, and its error."""
    share = after[0] / before[0]
    return 1 - share, math.hypot(after[1], share * before[1]) / abs(before[0])
