"""Worth against KL a token and length of response: which correction is best where, and what ends it.

    python results/length.py    # measure what is missing (three hours on one core), then write results/length.{md,png}

A problem of n sums has a worked solution of 6 n + 2 tokens. So the task sets the length. Each length has base models
of its own whose policy is right three times in ten: where solutions are long, their demonstrations are more careful.
Samplers: actors that are right 5, 10, 20 and 30 times in a hundred; the first of them distilled toward the policy,
which stands still, for 5 to 80 updates; the policy in three and in two bits. Each is weighed once under the rows of
map.py and under some weights of candidates.py that no objective has: products over segments and windows of n tokens.
Records are results/worth/length/SUMS-SAMPLER.json.
"""

import json
import subprocess
import sys
from collections.abc import Iterator

import map as worth_map
import sweep
from map import Point, Sampler, spearman
from tqdm import tqdm

import warmstart
from flags import need
from tasks.arith import Arithmetic

SUMS = (1, 2, 5, 10, 20)  # of a problem
DISTILLED = (5, 20, 80)  # updates
FOLDER = sweep.RESULTS / "worth" / "length"
MADE = worth_map.MADE.with_name("length")
BASE = {"policy": ("policy", 0.3)} | {f"actor-{x}": ("actor", x) for x in (0.05, 0.1, 0.2, 0.3)}  # shape, accuracy
DISTIL = ("--lr=1e-12", "--actor_lr=3e-4", "--distill_lambda=10", "--seed=10")
DISTIL += ("--steps=80", "--save_every=5", "--keep=16", "--eval_every=0", "--eval_problems=64", "--log_samples=0")
MORE = ("segments of 8, min(., 1)", "segments of 16, min(., 1)", "segments of 32, min(., 1)", "last 16, min(., 1)")
ROWS = worth_map.ROWS | {label: label for label in MORE}
DRAWN = (
    "none",
    "tis is_cap=2",
    "jackpot obrs_mask=expected",
    "seq_tis is_cap=1",
    "retrace",
    "retrace_seq",
    "segments of 16, min(., 1)",
)


def tokens(n: int) -> int:
    """Of a solution of n sums, its end included."""
    return 6 * n + 2


def slips(n: int) -> float:
    """Share of careless steps that leaves a chain of n sums as likely right as the embedded task's of four."""
    return min(warmstart.SLIPS, 1 - (1 - warmstart.SLIPS) ** (4 / n))


def task(n: int) -> list[str]:
    own = (f"--task_min_ops={n}", f"--task_max_ops={n}", f"--max_tokens={tokens(n)}")
    return [f"--config={sweep.STUDY}", f"--model={MADE / str(n) / 'policy'}", "--rollout_dtype=float32", *own]


def samplers(n: int) -> dict[str, Sampler]:
    """Name of a record -> sampler, at one length."""
    own = MADE / str(n)
    found = {name: (f"--actor={own / name}",) for name in BASE if name != "policy"}
    for k in DISTILLED:
        found[f"distilled-{k}"] = (f"--actor={own / 'distilled' / 'checkpoints' / f'step_{k:06d}' / 'actor'}",)
    for name in ("w3a16", "w2a16"):
        found[name] = ("--actor=none", f"--rollout_quant={name}")
    line = f"{tokens(n)} tokens"
    return {f"{n}-{name}": Sampler(line, name, flags, line=line) for name, flags in found.items()}


def make_models(n: int) -> None:
    """The base models of one length, and the run whose checkpoints are actors on their way to the policy."""
    own = sweep.ROOT / MADE / str(n)
    for name, (shape, target) in BASE.items():
        if not (own / name).is_dir():
            scratch = own / f"{name}.unfinished"
            warmstart.warm_start(shape, Arithmetic(n, n), target, scratch, slips(n))
            scratch.rename(own / name)
    if not (own / "distilled" / "checkpoints" / f"step_{DISTILLED[-1]:06d}").is_dir():
        place = (f"--actor={MADE / str(n) / 'actor-0.05'}", f"--out={MADE / str(n) / 'distilled'}", "--overwrite")
        subprocess.run([sys.executable, "train.py", *task(n), *place, *DISTIL], cwd=sweep.ROOT, check=True)


def measure(n: int) -> None:
    """Weigh what is not recorded at one length; its policy's own gradient is measured once."""
    missing = {name: s for name, s in samplers(n).items() if not (FOLDER / f"{name}.json").is_file()}
    if missing:
        make_models(n)
    known = {}
    for name, sampler in tqdm(missing.items(), desc=f"samplers of {tokens(n)} tokens"):
        argv = [*task(n), *sampler.flags, *worth_map.HOW]
        worth_map.write(FOLDER / f"{name}.json", worth_map.weigh(argv, known, more=MORE))


def points() -> list[Point]:
    """What is recorded, short responses first, and near samplers first among them. Two warm starts that ended at the
    same step made one actor, which counts once."""
    found = []
    for n in SUMS:
        own = []
        for name, sampler in samplers(n).items():
            path = FOLDER / f"{name}.json"
            if path.is_file():
                record = json.loads(path.read_text(encoding="utf-8"))
                if all(record["rows"] != other.rows for other in own):
                    own.append(Point(name, sampler, record["about"], record["rows"]))
        found += sorted(own, key=lambda p: p.kl)
    return found


def lengths(found: list[Point]) -> Iterator[tuple[str, list[Point]]]:
    """(length, its points near to far)."""
    for panel in dict.fromkeys(p.sampler.panel for p in found):
        yield panel, [p for p in found if p.sampler.panel == panel]


def of_response(p: Point) -> float:
    """KL of a response: nats a token times tokens."""
    return p.kl * p.about["sampler/length"]


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def best_where(found: list[Point]) -> str:
    """A line a sampler: what is best, what is as good, and four rows beside it."""
    beside = ("none", "tis is_cap=2", "seq_tis is_cap=1", "retrace_seq")
    cells = []
    for p in found:
        top, *others = worth_map.as_good(p)
        rivals = len(others) if len(others) > 3 else ", ".join(others)
        own = [p.sampler.panel, p.sampler.label, sweep.number(p.kl), sweep.number(of_response(p))]
        own += [sweep.number(p.about["ess"]), sweep.number(p.about["sampler/reward"])]
        cells.append([*own, top, worth_map.value(p.rows[top]), str(rivals or "-")])
        cells[-1] += [worth_map.value(p.rows[row]) for row in beside]
    head = ["", "sampler", "KL a token", "KL a response", "ESS of R", "reward", "best", "worth", "as good", *beside]
    note = (
        "as good: the other rows that are less than two errors of the difference below the best; their number where\n"
        "they are more than three."
    )
    return f"## Which is best where\n\n{note}\n\n" + sweep.markdown(head, cells)


def where_it_stops(found: list[Point]) -> str:
    """Of each row at each length: where worth falls below a half."""
    cells = [[row, *(worth_map.half(own, row) for _, own in lengths(found))] for row in ROWS]
    head = ["row", *(panel for panel, _ in lengths(found))]
    title = "## The KL a token beyond which a response is worth less than half of one"
    return f"{title}\n\n" + sweep.markdown(head, cells)


DISTANCES = {"KL a token": lambda p: p.kl, "KL a response": of_response, "1 - ESS of R": lambda p: 1 - p.about["ess"]}


def what_orders(found: list[Point]) -> str:
    """Spearman's correlation of each measure of distance with a row's worth, over all lengths."""
    cells = []
    for row in ROWS:
        y = [p.rows[row]["worth"] for p in found]
        cells.append([row, *(f"{spearman([of(p) for p in found], y):.2f}" for of in DISTANCES.values())])
    title = f"## What orders worth? Spearman's correlation over all {len(found)} samplers"
    return f"{title}\n\n" + sweep.markdown(["row", *DISTANCES], cells)


def everything(found: list[Point]) -> str:
    """A table for each length."""
    parts = []
    for panel, own in lengths(found):
        cells = [[row, *(worth_map.value(p.rows[row]) for p in own)] for row in ROWS]
        parts.append(f"### {panel}\n\n" + sweep.markdown(["row", *(p.sampler.label for p in own)], cells))
    return "## All worths\n\n" + "\n".join(parts)


def draw(found: list[Point]) -> None:
    """Worth against KL, a panel for each length, a line for each row."""
    plt = sweep.pyplot()
    panels = list(lengths(found))
    how = dict(figsize=(3.4 * len(panels), 4.6), layout="constrained", sharex=True, sharey=True)
    fig, axes = plt.subplots(1, len(panels), squeeze=False, **how)
    styles = sweep.styles_of(list(DRAWN), ("retrace_seq",))
    for ax, (panel, own) in zip(axes.flat, panels, strict=True):
        for i, row in enumerate(DRAWN):
            x = [p.kl * 1.02 ** (i - len(DRAWN) // 2) for p in own]  # error bars stand apart
            y, error = ([p.rows[row][key] for p in own] for key in ("worth", "worth_se"))
            ends = ([min(a, b) for a, b in zip(y, error, strict=True)], error)
            ax.errorbar(x, y, yerr=ends, marker="o", ms=3, elinewidth=0.6, label=ROWS[row], **styles[row])
        ax.axhline(1, color="black", lw=0.9)
        ax.set(xscale="log", title=panel, xlabel="KL, nats a token")
        ax.set_yscale("symlog", linthresh=0.1, linscale=0.5)
        ax.set_ylim(-0.03, 10)
        ticks = (0, 0.05, 0.1, 0.2, 0.5, 1, 2, 4)
        ax.set_yticks(ticks, [f"{y:g}" for y in ticks])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0, 0].set_ylabel("worth of a response")
    handles, texts = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, texts, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    sweep.save(fig, sweep.RESULTS / "length.png")


def study(flags: sweep.StudyFlags) -> None:
    if not flags.draw:
        for n in SUMS:
            measure(n)
    found = points()
    need(found, "--draw: nothing is measured; run it once without --draw")
    sweep.page("length", *(part(found) for part in (best_where, where_it_stops, what_orders, everything)))
    draw(found)


if __name__ == "__main__":
    sweep.main(study, __doc__)
