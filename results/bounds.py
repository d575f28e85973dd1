"""Which bound? Worth of a response against C, c1, lambda, K and the bounds of masks, at three distances.

    python results/bounds.py    # measure what is missing (40 minutes), then write results/bounds.md and bounds.png

The embedded policy learns; three actors sample: base:actor, base:actor distilled toward the policy for 20 updates, and
one whose warm start stopped at 20 %. Each is weighed once under all rows (worth.py), on the same responses, so rows
share their noise. --obrs_topk changes what the engine records, so K = 1 is a measurement of its own, with the same
seeds; it stands beside an exact Z, which is what two models have. Records are results/worth/bounds/*.json.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import foretell
import sweep

from flags import need

FOLDER = foretell.FOLDER / "bounds"
MADE = Path("out/bounds")  # the run that distils
UPDATES = 20
NEAR = str(MADE / "checkpoints" / f"step_{UPDATES:06d}" / "actor")
SAMPLERS = {
    "distilled": (f"--actor={NEAR}",),
    "base:actor": ("--actor=base:actor",),
    "20 %": ("--actor=base:actor", "--actor_base_accuracy=0.2"),
}
JACKPOT = "jackpot obrs_mask=expected"
INFINITE = math.inf
# axis -> value -> row of worth.py. A mask of tokens keeps 1/b <= r <= b, one of responses R <= b.
AXES = {
    "C of min(r, C)": {C: f"tis is_cap={C:g}" for C in (0.5, 1, 1.5, 2, 3, 5, 8)} | {INFINITE: "is"},
    "C of min(R_t, C)": {C: f"prefix_tis is_cap={C:g}" for C in (0.5, 1, 2, 4, 8)},
    "C of min(R, C)": {C: f"seq_tis is_cap={C:g}" for C in (0.5, 1, 2, 4, 8, 16)} | {INFINITE: "seq_is"},
    "c1 of OBRS": {c: f"{JACKPOT} obrs_c1={c:g}" for c in (1, 1.5, 2, 3, 5, 8)},
    "lambda of OBRS": {x: f"{JACKPOT} obrs_lambda={x:g}" for x in (0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2)},
    "K of OBRS": {1: f"{JACKPOT} obrs_z=bracket obrs_topk=1", 256: f"{JACKPOT} obrs_c1=3"},
    "b of the token mask": {b: f"icepop rs_low={1 / b:g} rs_high={b:g}" for b in (1.25, 1.5, 2, 3, 5, 10)},
    "b of the response mask": {b: f"seq_mis rs_high={b:g}" for b in (1, 2, 4, 8, 16)},
}


def measurements() -> dict[str, tuple[tuple[str, ...], list[str]]]:
    """Name of a record -> (flags of the sampler, rows)."""
    every = list(dict.fromkeys(row for values in AXES.values() for row in values.values()))
    alone = [row for row in every if "topk" in row]
    found = {}
    for name, flags in SAMPLERS.items():
        found[sweep.slug(name)] = (flags, [row for row in every if row not in alone])
        found[f"{sweep.slug(name)}-topk"] = (flags, alone)
    return found


def make_near() -> None:
    """The actor after some updates of distillation toward a policy that stands still."""
    if (sweep.ROOT / NEAR).is_dir():
        return
    flags = ("--lr=1e-12", "--distill_lambda=10", "--seed=10", f"--steps={UPDATES}", f"--save_every={UPDATES}")
    flags += ("--eval_every=-1", f"--out={MADE}", "--overwrite")
    subprocess.run([sys.executable, "train.py", f"--config={sweep.STUDY}", *flags], cwd=sweep.ROOT, check=True)


def weighed() -> dict[str, tuple[float, dict]]:
    """Sampler -> (KL, nats a token; row -> worth.py's numbers), of all that is recorded."""
    found = {}
    for name in SAMPLERS:
        records = [FOLDER / f"{key}.json" for key in measurements() if key.startswith(sweep.slug(name))]
        got = [json.loads(path.read_text(encoding="utf-8")) for path in records if path.is_file()]
        if got:
            found[name] = got[0]["about"]["kl"], {row: x for record in got for row, x in record["rows"].items()}
    return found


def tables(found: dict) -> str:
    """A table for each axis: samplers by values."""
    parts = []
    for axis, values in AXES.items():
        cells = []
        for name, (kl, rows) in found.items():
            cells.append([f"{name}, KL {sweep.number(kl)}", *(shown(rows.get(row)) for row in values.values())])
        head = ["", *("none" if value == INFINITE else f"{value:g}" for value in values)]
        parts.append(f"## {axis}\n\n" + sweep.markdown(head, cells))
    return "\n".join(parts)


def shown(x: dict | None) -> str:
    return f"{x['worth']:.2f} +- {x['worth_se']:.2f}" if x else ""


def draw(found: dict) -> None:
    """Worth against the bound, a panel for each axis, a line for each sampler."""
    plt = sweep.pyplot()
    fig, axes = plt.subplots(2, 4, figsize=(14.4, 7), layout="constrained", sharey=True)
    for ax, (axis, values) in zip(axes.flat, AXES.items(), strict=True):
        finite = [value for value in values if value != INFINITE]
        for i, (name, (kl, rows)) in enumerate(found.items()):
            points = {value: rows[row] for value, row in values.items() if row in rows}
            x = [2 * max(finite) if value == INFINITE else value for value in points]  # no bound stands at the right
            y, error = ([p[key] for p in points.values()] for key in ("worth", "worth_se"))
            label = f"{name}, KL {sweep.number(kl)}"
            x = [value * 1.02**i for value in x]  # error bars stand apart
            ax.errorbar(x, y, yerr=error, marker="o", ms=4, lw=1.3, elinewidth=0.7, color=sweep.COLOURS[i], label=label)
        ax.set_xscale("log")
        ends = [2 * max(finite)] if INFINITE in values else []
        ax.set_xticks([*finite, *ends], [*(f"{value:g}" for value in finite), *("none" for _ in ends)], fontsize=7)
        ax.minorticks_off()
        ax.axhline(1, color="black", lw=0.9)
        ax.grid(alpha=0.3)
        ax.set_title(axis, fontsize=10)
    for ax in axes[:, 0]:
        ax.set_ylabel("worth of a response")
    axes[0, 0].legend(fontsize=8)
    sweep.save(fig, sweep.RESULTS / "bounds.png")


def study(flags: sweep.StudyFlags) -> None:
    if not flags.draw:
        FOLDER.mkdir(parents=True, exist_ok=True)
        make_near()
        for name, (how, rows) in measurements().items():
            foretell.measure(f"bounds/{name}", sweep.STUDY, list(how), rows)
    found = weighed()
    need(found, "--draw: nothing is measured; run it once without --draw")
    sweep.page("bounds", tables(found))
    draw(found)


if __name__ == "__main__":
    sweep.main(study, __doc__)
