"""The best weights over bins, of any form and of those that rise: isotonic regression in closed steps, for search.py.

Of all w the one with the largest

    f(w) = a w / sqrt(w' Q w)            a: how far each bin goes along g; Q: M + D of search.py

is w* = Q^-1 a, up to its scale. Of the w of a form (those that rise from bin to bin, say: a convex cone C) it is the w
of C nearest to w* in the metric of Q, min (w - w*)' Q (w - w*) = min w' Q w - 2 a w + const: isotonic regression where
C is the rising ones. (On a ray s w, s >= 0, the least w' Q w - 2 a w is -f(w)^2, or 0 where f(w) < 0.)
"""

from __future__ import annotations

import numpy as np

ANY, RISING, POSITIVE, HILL = FORMS = ("any", "rising", "rising, >= 0", "rising, then falling, >= 0")


def cones(form: str, n: int) -> list[np.ndarray]:
    """The weights of a form over n bins, as sums of columns with factors >= 0: of one of these matrices."""
    steps = np.tri(n)  # column j: 1 from bin j on
    if form == RISING:
        return [np.column_stack([steps, -np.ones(n)])]
    if form == POSITIVE:
        return [steps]
    after = np.column_stack([steps[:, 1:], np.zeros(n)])  # column j: 1 after bin j
    return [
        np.column_stack([steps[:, i] - after[:, j] for i in range(top + 1) for j in range(top, n)]) for top in range(n)
    ]


def nearest(Q: np.ndarray, a: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The w = columns v, v >= 0, with the least w' Q w - 2 a w: the nearest to Q^-1 a in the metric of Q.

    Columns are taken in one by one, the steepest first; one whose factor would fall below 0 is let go again (Lawson
    and Hanson's non-negative least squares)."""
    columns = columns / np.sqrt(np.einsum("ki,kl,li->i", columns, Q, columns))
    A, b = columns.T @ Q @ columns, columns.T @ a
    v, used = np.zeros(len(b)), np.zeros(len(b), bool)
    while True:
        slope = np.where(used, -np.inf, b - A @ v)
        if slope.max() <= 1e-9 * np.abs(b).max():
            return columns @ v
        used[slope.argmax()] = True
        while True:
            best = np.zeros(len(b))
            best[used] = np.linalg.solve(A[np.ix_(used, used)], b[used])
            if best[used].min() > 0:
                break
            falling = used & (best <= 0)
            share = v[falling] / (v[falling] - best[falling])
            v += share.min() * (best - v)
            used[np.flatnonzero(falling)[share.argmin()]] = False
        v = best


def best_weight(Q: np.ndarray, a: np.ndarray, form: str) -> np.ndarray:
    """The w of a form with the largest a w / sqrt(w' Q w); of many tops, the best. 0 where none goes along g."""
    if form == ANY:
        return np.linalg.solve(Q, a)
    return max((nearest(Q, a, columns) for columns in cones(form, len(a))), key=lambda w: a @ w)
