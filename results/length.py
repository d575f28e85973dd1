"""Where does length end each correction? Worth by length of response, far from the policy and near it.

    python results/length.py    # measure what is missing (40 minutes), then write results/length.md and length.png

The models and the task of configs/long.toml: 60 tokens on average, up to 256. The far sampler is its actor, the near
one the policy itself in three bits. worth.py weighs the responses of each class of lengths for themselves: g is then
the part of the on-policy gradient that comes from responses of that class; a class in which g does not stand out of
its noise is left out. Its records are results/worth/length/*.json.
"""

import itertools
import json
import math
from dataclasses import dataclass

import foretell
import map as worth_map
import praxis
import sweep

from flags import need

EDGES = (16, 32, 64, 128)
FOLDER = foretell.FOLDER / "length"
SAMPLERS = {"actor": ("--actor=base:actor",), "w3a16": ("--actor=none", "--rollout_quant=w3a16")}
HOW = (f"--lengths={','.join(map(str, EDGES))}", "--batches=32", "--reference=64", "--directions=16")
ROWS = worth_map.ROWS
DRAWN = (
    "none",
    "tis is_cap=2",
    "jackpot obrs_mask=expected",
    "prefix_tis",
    "seq_tis is_cap=1",
    "retrace",
    "retrace_seq",
)


@dataclass
class Point:
    """Responses of one sampler whose lengths are in one class."""

    sampler: str
    part: str
    length: float  # middle of the class, or the mean length of all
    kl: float  # of the sampler, nats a token
    rows: dict  # row -> worth.py's numbers


def points() -> list[Point]:
    """What is recorded: for each sampler all responses together (part ""), then its classes."""
    found = []
    for name in SAMPLERS:
        path = FOLDER / f"{name}.json"
        if not path.is_file():
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        about = record["about"]
        found.append(Point(name, "", about["sampler/length"], about["kl"], record["rows"]))
        for part, rows in record["parts"].items():
            low, high = int(part.split()[0]), min(int(part.split()[2]), 255)
            found.append(Point(name, part, math.sqrt(max(low, 8) * (high + 1)), about["kl"], rows))
    return found


def tables(found: list[Point]) -> str:
    """A table for each sampler: rows by classes of length."""
    parts = []
    for name, group in itertools.groupby(found, lambda p: p.sampler):
        own = list(group)
        head = ["row", *(p.part.replace(f"to {2**31 - 1}", "or more") or "all" for p in own)]
        order = sorted(ROWS, key=lambda row: -own[0].rows[row]["worth"])
        cells = [[row, *(worth_map.value(p.rows[row]) for p in own)] for row in order]
        title = f"## {name}: KL {sweep.number(own[0].kl)} a token, {own[0].length:.0f} tokens"
        parts.append(f"{title}\n\n" + sweep.markdown(head, cells))
    return "\n".join(parts)


def draw(found: list[Point]) -> None:
    """Worth against length, a panel for each sampler, a line for each row."""
    plt = sweep.pyplot()
    names = list(dict.fromkeys(p.sampler for p in found))
    size = (3.6 * len(names), 4.2)
    fig, axes = plt.subplots(1, len(names), figsize=size, layout="constrained", squeeze=False, sharey=True)
    styles = sweep.styles_of(list(DRAWN), ("retrace",))
    for ax, name in zip(axes.flat, names, strict=True):
        own = [p for p in found if p.sampler == name and p.part]
        for i, row in enumerate(DRAWN):
            x = [p.length * 1.03 ** (i - len(DRAWN) // 2) for p in own]  # error bars stand apart
            y, error = ([p.rows[row][key] for p in own] for key in ("worth", "worth_se"))
            ends = ([min(a, b) for a, b in zip(y, error, strict=True)], error)
            ax.errorbar(x, y, yerr=ends, marker="o", ms=4, elinewidth=0.7, label=ROWS[row], **styles[row])
        ax.axhline(1, color="black", lw=0.9)
        ax.set_xscale("log")
        ax.set_xticks([p.length for p in own], [p.part.removesuffix(" tokens") for p in own])
        ax.set_yscale("symlog", linthresh=0.1, linscale=0.5)
        ticks = (0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
        ax.set_yticks(ticks, [f"{y:g}" for y in ticks])
        ax.set_ylim(-0.03, 30)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.set(title=f"{name}: KL {sweep.number(own[0].kl)} a token", xlabel="tokens of a response")
    axes[0, 0].set_ylabel("worth of a response of that length")
    handles, texts = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, texts, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    sweep.save(fig, sweep.RESULTS / "length.png")


def study(flags: sweep.StudyFlags) -> None:
    if not flags.draw:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, how in SAMPLERS.items():
            foretell.measure(f"length/{name}", praxis.CONFIG, [*how, *HOW], list(ROWS))
    found = points()
    need(found, "--draw: nothing is measured; run it once without --draw")
    sweep.page("length", tables(found))
    draw(found)


if __name__ == "__main__":
    sweep.main(study, __doc__)
