"""The map: what a response is worth under each correction, against the distance of sampler and policy.

    python results/map.py       # measure what is missing (an hour on two cores), then write results/map.md and map.png

Four kinds of distance: another model samples, weights are stale, the engine has fewer bits, the sampling law is
another. Each sampler is weighed once under all rows (worth.py) and leaves one record in results/worth/map. Two training
runs are made first: one keeps the policy after every update (`stale`), the other distils the embedded actor toward the
embedded policy, which stands still (`distilled`); 3.5 GB of checkpoints in out/map.

Actors farther away than base:actor are base:actor stopped earlier in its warm start: a weaker model of the same kind.
Base models come out otherwise on another processor. The records `second-*` were made with another pair than the rest;
where nothing is recorded yet both are measured with the pair of this machine.

Weights with noise are no model that anybody would sample from.

A sampler at temperature T beside a policy at temperature 1 is the policy with its last norm divided by T: that divides
the logits. (`--temperature` is no mismatch, the learner scores with it; with --logprobs_mode=raw it is a wrong record.)

Two rows on one sampler share their tokens, directions and g. So a record keeps what each row is worth where a part of
the data is left out, and a difference of two rows has an error of its own, in which the noise of both falls out.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import sweep
from candidates import CANDIDATES
from heterorl import ranks
from tqdm import tqdm

import config
import warmstart
import worth
from corrections import token_k3
from flags import need
from measure import Reference, Seen, estimate, jackknife, replicates, with_errors

FOLDER = sweep.RESULTS / "worth" / "map"
MADE = Path("out/map")  # models that sample
LAST = 128  # updates of the run whose policies are stale
STEPS = (1, 2, 4, 8, 16, 32, 64, 128)
DISTILLED = (5, 10, 20, 80)
WEAKER = (0.2, 0.1, 0.05)  # sampled accuracy at which the warm start of a weaker actor stops
SECOND = (0.2, 0.17, 0.15, 0.13, 0.1)  # the same, weighed later on a pair of base models that another processor made
TEMPERATURES = (0.6, 0.8, 1.25, 1.5)
TRAINED = {
    "stale": ["--objective=grpo", "--actor=none", "--seed=10", f"--steps={LAST}", f"--keep={LAST}"],
    "distilled": ["--lr=1e-12", "--distill_lambda=10", "--seed=10", "--steps=80", "--keep=80"],
}
HOW = ("--batches=8", "--reference=32", "--directions=16", "--noise_batches=4")
BAND = "none reject=sequence rs_low=0.5 rs_high=2"
ROWS = {
    "none": "none",
    "ppo_is": "PPO's clip on p_new / p_inf",
    "tis is_cap=2": "min(r, 2), TIS",
    "icepop": "r in [0.5, 5], IcePop",
    "jackpot obrs_mask=expected": "Jackpot, expected mask",
    "geo_rs": "Geo-RS",
    BAND: "1 where 0.5 <= R <= 2",
    "prefix_tis": "min(R_t, 1), prefix_tis",
    "retrace": "prod min(r, 1), retrace",
    "retrace_seq": "retrace times min(R, 1), retrace_seq",
    "seq_tis is_cap=1": "min(R, 1)",
    "seq_tis is_cap=4": "min(R, 4)",
    "seq_is": "R",
}
DRAWN = (
    "none",
    "ppo_is",
    "tis is_cap=2",
    "jackpot obrs_mask=expected",
    "seq_tis is_cap=1",
    "seq_tis is_cap=4",
    "retrace_seq",
)
ACTORS, STALE, FORMATS, LAWS, LATER = KINDS = (
    "another model samples",
    "stale weights",
    "a low-bit engine",
    "another sampling law",
    "the later policy, low bits",  # a control, drawn beside the stale ones: their policy is not the embedded one
)
PANELS = {ACTORS: (ACTORS,), STALE: (STALE, LATER), FORMATS: (FORMATS,), LAWS: (LAWS,)}


@dataclass(frozen=True)
class Sampler:
    """A point of the map."""

    panel: str
    label: str
    flags: tuple[str, ...]  # of worth.py, on top of configs/study.toml
    priced: bool = False  # whether its sampling is timed beside the policy's
    line: str = ""  # points of one line are joined; none: not drawn, there is no distance to draw it at


def samplers() -> dict[str, Sampler]:
    """Name of a record -> sampler, in the order in which they are measured."""
    alone, found = "--actor=none", {}
    for name in ("int8", "fp8", "w4a16", "w3a16", "w2a16"):
        multiplies = name in ("int8", "fp8")  # the others are weights alone, which the plain engine rounds once
        found[name] = Sampler(FORMATS, name, (alone, f"--rollout_quant={name}"), multiplies, "format")
    for t in TEMPERATURES:
        flags = (alone, f"--stale={MADE / f'temperature-{t}'}")
        found[f"temperature-{t}"] = Sampler(LAWS, f"T {t}", flags, line="colder" if t < 1 else "hotter")
    for p in (0.99, 0.95, 0.9):
        flags = (alone, f"--top_p={p}", "--keep_sampling_mask=off")
        found[f"top_p-{p}"] = Sampler(LAWS, f"top_p {p}", flags, line="top_p")
    found["actor"] = Sampler(ACTORS, "base:actor", ("--actor=base:actor",), True, "actor")
    for x in WEAKER:
        flags = ("--actor=base:actor", f"--actor_base_accuracy={x}")
        found[f"actor-{x}"] = Sampler(ACTORS, f"{100 * x:.0f} %", flags, line="actor")
    found["second-actor"] = Sampler(ACTORS, "base:actor, second pair", ("--actor=base:actor",), line="second pair")
    for x in SECOND:
        flags = ("--actor=base:actor", f"--actor_base_accuracy={x}")
        found[f"second-{x}"] = Sampler(ACTORS, f"{100 * x:.0f} %, second pair", flags, line="second pair")
    for n in DISTILLED:
        folder = MADE / "distilled" / "checkpoints" / f"step_{n:06d}" / "actor"
        found[f"distilled-{n}"] = Sampler(ACTORS, f"distilled {n}", (f"--actor={folder}",), line="actor")
    model = f"--model={policy_after(LAST)}"
    for n in STEPS:
        found[f"stale-{n}"] = Sampler(STALE, f"{n}", (model, alone, f"--stale={policy_after(LAST - n)}"), line="stale")
    for name in ("w4a16", "w3a16"):
        found[f"later-{name}"] = Sampler(LATER, name, (model, alone, f"--rollout_quant={name}"), line="later")
    replayed = (alone, "--top_p=0.9", "--keep_sampling_mask=replay")
    found["replay-0.9"] = Sampler(LAWS, "top_p 0.9, kept sets replayed", replayed)
    return found


def policy_after(updates: int) -> str:
    return str(MADE / "stale" / "checkpoints" / f"step_{updates:06d}" / "policy") if updates else "base:policy"


# ---------------------------------------------------------------------------------------------------------------------
# Models that sample
# ---------------------------------------------------------------------------------------------------------------------


def make_models() -> None:
    """The two runs whose checkpoints sample, and the policies at other temperatures, where they are missing."""
    for name, flags in TRAINED.items():
        out = MADE / name
        steps = next(flag.removeprefix("--steps=") for flag in flags if flag.startswith("--steps="))
        if not (sweep.ROOT / out / "checkpoints" / f"step_{int(steps):06d}").is_dir():
            more = ["--save_every=1", "--eval_every=0", "--eval_problems=64", "--log_samples=0", f"--out={out}"]
            argv = [sys.executable, "train.py", f"--config={sweep.STUDY}", *flags, *more, "--overwrite"]
            subprocess.run(argv, cwd=sweep.ROOT, check=True)
    for t in TEMPERATURES:
        if not (sweep.ROOT / MADE / f"temperature-{t}").is_dir():
            at_temperature(t, sweep.ROOT / MADE / f"temperature-{t}")


def at_temperature(t: float, folder: Path) -> None:
    """The embedded policy with its logits divided by t: its last norm's weight is."""
    from safetensors.torch import load_file, save_file

    base = warmstart.base_model("policy", config.parse([f"--config={sweep.ROOT / sweep.STUDY}"]))
    scratch = folder.with_name(f"{folder.name}.unfinished")
    shutil.copytree(base, scratch, dirs_exist_ok=True)
    tensors = load_file(f"{base}/model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] / t
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    scratch.rename(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def measure(name: str, known: dict) -> None:
    """Weigh all rows on one sampler, and record it.

    known: the gradients g that were measured for samplers before it, by policy and sampling law."""
    sampler = samplers()[name]
    record = weigh([f"--config={sweep.STUDY}", *sampler.flags, *HOW], known, sampler.priced)
    write(FOLDER / f"{name}.json", record)


def weigh(argv: list[str], known: dict, priced: bool = False, more: tuple[str, ...] = ()) -> dict:
    """The record of the sampler that these flags name: all rows, and the weights `more` of candidates.py."""
    m = worth.Measurement(*worth.parse([*argv, f"--rows={'; '.join(ROWS)}"]))
    law = (m.plain.model, m.on_policy.sampling)
    if law not in known:
        known.clear()
        known[law] = m.references()[worth.EVERYTHING], m.totals["on_policy"]
    reference, m.totals["on_policy"] = known[law]
    seen, log_r = {row: Seen() for row in (*ROWS, *more)}, []
    for slopes in m.slopes({worth.EVERYTHING: reference}):
        for row, cfg in m.rows.items():
            m.see(seen[row], slopes, worth.coefficients(slopes.batches[row], m.comm, cfg))
        batch = slopes.batches["none"]
        for label in more:
            m.see(seen[label], slopes, weighted(batch, label))
        log_r.append(np.ma.array(batch.log_r.double().numpy(), mask=~batch.mask.numpy()))
    about = m.about() | distances(log_r)
    if priced:
        about["price"] = worth.cost(m)["price"]
    m.sampler.close()
    rows = {row: row_record(seen[row], reference, m.groups) for row in seen}
    return {"flags": argv, "about": rounded(about), "rows": rows}


def weighted(batch, label: str):
    """c_t (B, T) under a weight of candidates.py, whose tokens have a first axis of batches."""
    tokens = SimpleNamespace(
        log_r=(batch.log_r * batch.mask).numpy()[None],
        mask=batch.mask.numpy()[None],
        plain=(batch.adv * batch.mask / batch.mask.sum()).numpy()[None],
    )
    return worth.torch.from_numpy((CANDIDATES[label](tokens) * tokens.plain)[0])


def distances(log_r: list[np.ma.MaskedArray]) -> dict[str, float]:
    """Of tokens: KL, and its estimate without a control variate; of responses: ESS of R, and how many have R < 0.5."""
    tokens = np.concatenate([x.compressed() for x in log_r])
    R = np.exp(np.clip(np.concatenate([x.sum(1).filled(0) for x in log_r]), -20, 20))
    return {
        "kl": token_k3(worth.torch.tensor(tokens)).mean().item(),
        "kl_plain": -tokens.mean(),
        "ess": R.sum() ** 2 / (len(R) * (R**2).sum()),
        "unlikely": (R < 0.5).mean(),
    }


def row_record(seen: Seen, reference: Reference, groups: int) -> dict:
    """What is recorded of a row: its numbers, and its worth where a part of the data is left out, kind by kind."""
    along, noise = np.array(seen.along), np.concatenate(seen.noise)
    _, *kinds = replicates(len(along), *noise.shape)
    left_out = [[estimate(along, noise, reference, groups, keep)["worth"] for keep in kind] for kind in kinds]
    return rounded(with_errors(seen, reference, groups)) | {"left_out": [list(map(short, x)) for x in left_out]}


def rounded(numbers: dict) -> dict:
    return {key: short(x) for key, x in numbers.items()}


def short(x: float) -> float:
    """Four digits."""
    return float(f"{x:.4g}")


def write(path: Path, record: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(record) + "\n", encoding="utf-8")
    scratch.rename(path)


# ---------------------------------------------------------------------------------------------------------------------
# Reading records: which row is best where
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Point:
    """A sampler with its record."""

    name: str
    sampler: Sampler
    about: dict
    rows: dict

    @property
    def kl(self) -> float:
        """KL(inf || ref) a token. k3 counts on E r = 1, which a truncated sampler breaks: there the plain mean."""
        return self.about["kl_plain"] if self.sampler.line == "top_p" else self.about["kl"]


def points() -> list[Point]:
    """What is recorded, near ones first in each panel."""
    found = []
    for name, sampler in samplers().items():
        path = FOLDER / f"{name}.json"
        if path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            found.append(Point(name, sampler, record["about"], record["rows"]))
    return sorted(found, key=lambda p: (KINDS.index(p.sampler.panel), p.sampler.line, p.kl))


def difference(point: Point, a: str, b: str) -> tuple[float, float]:
    """Worth of row a less that of row b, and its error: a jackknife of the difference."""
    x, y = point.rows[a], point.rows[b]
    kinds = [[u - v for u, v in zip(*both, strict=True)] for both in zip(x["left_out"], y["left_out"], strict=True)]
    return x["worth"] - y["worth"], jackknife(kinds)


def best(point: Point) -> str:
    return max(point.rows, key=lambda row: point.rows[row]["worth"])


def as_good(point: Point, errors: float = 2.0) -> list[str]:
    """The rows that are not more than two errors of the difference below the best one, best first."""
    top = best(point)
    found = []
    for row in sorted(point.rows, key=lambda row: -point.rows[row]["worth"]):
        less, error = difference(point, top, row)
        if row == top or less <= errors * error:
            found.append(row)
    return found


REGIONS = (0, 0.01, 0.1, math.inf)  # of KL: near, middling, far


def regions(found: list[Point]) -> Iterator[tuple[str, str, list[Point]]]:
    """(panel, region, its points), where there are any."""
    for panel in KINDS:
        for low, high in zip(REGIONS, REGIONS[1:], strict=False):
            own = [p for p in found if p.sampler.panel == panel and p.sampler.line and low <= p.kl < high]
            if own:
                yield panel, f"below {high}" if math.isfinite(high) else f"above {low}", own


def mean_worth(own: list[Point], row: str) -> float:
    return sum(p.rows[row]["worth"] for p in own) / len(own)


def mean_difference(own: list[Point], a: str, b: str) -> tuple[float, float]:
    """`difference`, averaged over samplers."""
    each = [difference(p, a, b) for p in own]
    return sum(d for d, _ in each) / len(own), math.sqrt(sum(error**2 for _, error in each)) / len(own)


def as_good_on_average(own: list[Point], errors: float = 2.0) -> list[str]:
    """`as_good` for several samplers together, by their mean worth."""
    order = sorted(own[0].rows, key=lambda row: -mean_worth(own, row))
    found = order[:1]
    for row in order[1:]:
        less, error = mean_difference(own, order[0], row)
        if less <= errors * error:
            found.append(row)
    return found


def prices(found: list[Point]) -> dict[str, float]:
    """Name of a sampler -> what a response costs in sampling, over one of the policy's.

    Timed where it is another computation; an actor costs what base:actor costs, and a policy with other weights 1."""
    timed = {p.name: p.about["price"] for p in found if "price" in p.about}
    actor = timed.get("actor", math.nan)
    return {p.name: actor if p.sampler.panel == ACTORS else timed.get(p.name, 1.0) for p in found}


def half(line: list[Point], row: str) -> str:
    """Where the row's worth falls below 1/2 for good, on the way out: the last distance before and the first after."""
    far = [i for i, p in enumerate(line) if p.rows[row]["worth"] >= 0.5]
    if not far:
        return f"below {sweep.number(line[0].kl)}"
    if far[-1] == len(line) - 1:
        return f"beyond {sweep.number(line[-1].kl)}"
    return f"{sweep.number(line[far[-1]].kl)} to {sweep.number(line[far[-1] + 1].kl)}"


def lines(found: list[Point]) -> Iterator[tuple[str, list[Point]]]:
    """(name, points near to far) of each line that is drawn."""
    for panel in KINDS:
        own = [p for p in found if p.sampler.panel == panel and p.sampler.line]
        for line in dict.fromkeys(p.sampler.line for p in own):
            yield line, [p for p in own if p.sampler.line == line]


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def value(x: dict) -> str:
    return f"{x['worth']:.2f} +- {x['worth_se']:.2f}"


def best_where(found: list[Point]) -> str:
    """The selection: a line a sampler."""
    cells = []
    price = prices(found)
    for p in found:
        top, *others = as_good(p)
        x = p.rows[top]
        priced = price[p.name]
        rivals = len(others) if len(others) > 3 else ", ".join(others)
        cells.append([p.sampler.panel, p.sampler.label, sweep.number(p.kl), top, value(x), str(rivals or "-")])
        cells[-1] += [value(p.rows["none"]), sweep.number(priced), sweep.number(x["worth"] / priced)]
        cells[-1].append("" if math.isnan(priced) else worth.pays(x["worth"], x["worth_se"], priced))
    head = ["", "sampler", "KL", "best", "worth", "as good", "none", "price", "net", "pays"]
    note = (
        "as good: the other rows that are less than two errors of the difference below the best; their number\n"
        "where they are more than three. price: of sampling a response, over one of the policy's. net: worth over\n"
        "price. pays: worth is above the price by two errors (no: below it; open: neither)."
    )
    return f"## Which is best where\n\n{note}\n\n" + sweep.markdown(head, cells)


def by_region(found: list[Point]) -> str:
    """The map in a few lines: kind of distance and region of KL, and the rows that are best there on average."""
    cells = []
    for panel, region, own in regions(found):
        top, *others = as_good_on_average(own)
        poor = [row for row in sorted(ROWS, key=lambda row: -mean_worth(own, row)) if row not in (top, *others)]
        names = "; ".join(f"{row} {mean_worth(own, row):.2f}" for row in others)
        cells.append([panel, region, str(len(own)), f"{top} {mean_worth(own, top):.2f}"])
        cells[-1] += [f"{len(others)} rows" if len(others) > 5 else names or "-"]
        cells[-1] += ["; ".join(f"{row} {mean_worth(own, row):.2f}" for row in poor) or "-"]
    head = ["", "KL", "samplers", "best by mean worth", "less than two errors below it", "more"]
    note = (
        "Mean worth over the samplers. The error is that of the mean difference of two rows, as if the samplers'\n"
        "errors were independent; they share g and the directions, so it is too small."
    )
    return f"## The map by regions\n\n{note}\n\n" + sweep.markdown(head, cells)


def how_often(found: list[Point]) -> str:
    """In how many samplers of each line a row is best or as good, and the least that it is worth where KL is small."""
    drawn = list(lines(found))
    near = [p for _, line in drawn for p in line if p.kl < REGIONS[2]]
    cells = []
    for row in ROWS:
        counts = [sum(row in as_good(p) for p in line) for _, line in drawn]
        tops = sum(best(p) == row for _, line in drawn for p in line)
        worst = min(near, key=lambda p: p.rows[row]["worth"])
        least = f"{value(worst.rows[row])} ({worst.name})"
        cells.append((sum(counts), [row, *map(str, counts), str(sum(counts)), str(tops), least]))
    head = ["row", *(f"{name} ({len(line)})" for name, line in drawn), "in all", "best itself"]
    head.append(f"least worth, of {len(near)} samplers with KL below {REGIONS[2]}")
    body = [cell for _, cell in sorted(cells, key=lambda cell: -cell[0])]
    return "## How often a row is best, or less than two errors below it\n\n" + sweep.markdown(head, body)


def where_it_stops(found: list[Point]) -> str:
    """Of each row on each line: where worth falls below a half."""
    drawn = list(lines(found))
    cells = [[row, *(half(line, row) for _, line in drawn)] for row in ROWS]
    head = ["row", *(name for name, _ in drawn)]
    return "## The KL beyond which a response is worth less than half of one\n\n" + sweep.markdown(head, cells)


EDGES = (0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, math.inf)


def by_distance(found: list[Point], row: str) -> str:
    """Worth of one row at the same KL, kind by kind."""
    drawn = list(lines(found))
    cells = []
    for low, high in zip(EDGES, EDGES[1:], strict=False):
        inside = [[value(p.rows[row]) for p in line if low <= p.kl < high] for _, line in drawn]
        label = f"{low} to {high}" if math.isfinite(high) else f"above {low}"
        cells.append([label, *("; ".join(some) for some in inside)])
    head = ["KL", *(name for name, _ in drawn)]
    return f"`{row}`:\n\n" + sweep.markdown(head, cells)


def spearman(x: list[float], y: list[float]) -> float:
    if len(set(x)) < 2 or len(set(y)) < 2:
        return math.nan
    return float(np.corrcoef(ranks(np.array(x)), ranks(np.array(y)))[0, 1])


DISTANCES = {
    "KL a token": lambda p: p.kl,
    "share of responses with R < 0.5": lambda p: p.about["unlikely"],
    "1 - ESS of R": lambda p: 1 - p.about["ess"],
}


def distance_alone(found: list[Point]) -> str:
    """Spearman's correlation of each measure of distance with worth, over all points of the lines."""
    drawn = [p for _, line in lines(found) for p in line]
    later = [p for p in drawn if p.sampler.panel in (STALE, LATER)]
    second = [p for p in drawn if p.sampler.line == "second pair"]
    cells = []
    for policy, own in (
        ("all", drawn),
        ("embedded", [p for p in drawn if p not in later and p not in second]),
        ("embedded, second pair", second),
        (f"after {LAST} updates", later),
    ):
        for name, of in DISTANCES.items():
            x = [of(p) for p in own]
            each = [spearman(x, [p.rows[row]["worth"] for p in own]) for row in DRAWN]
            top = spearman(x, [p.rows[best(p)]["worth"] for p in own])
            cells.append([policy, str(len(own)), name, *(f"{r:.2f}" for r in each), f"{top:.2f}"])
    head = ["policy", "samplers", "distance", *DRAWN, "the best of all"]
    parts = [by_distance(found, row) for row in ("none", "tis is_cap=2", "seq_tis is_cap=1", "retrace_seq")]
    title = "## Does KL alone say it?\n\nSpearman's correlation with worth over all points that are drawn:\n\n"
    return title + sweep.markdown(head, cells) + "\nWorth at the same KL:\n\n" + "\n".join(parts)


def everything(found: list[Point]) -> str:
    """Every number that is drawn, and those that are not."""
    parts = []
    for panel in KINDS:
        own = [p for p in found if p.sampler.panel == panel]
        if not own:
            continue
        cells = [[row, *(value(p.rows[row]) for p in own)] for row in ROWS]
        for name, key in (("KL", "kl"), ("ESS of R", "ess"), ("R < 0.5", "unlikely"), ("reward", "sampler/reward")):
            numbers = [p.kl if key == "kl" else p.about[key] for p in own]
            cells.append([name, *map(sweep.number, numbers)])
        parts.append(f"### {panel}\n\n" + sweep.markdown(["row", *(p.sampler.label for p in own)], cells))
    return "## All worths\n\n" + "\n".join(parts)


def draw(found: list[Point]) -> None:
    """Worth against KL, a panel for each kind of distance, a line for each row."""
    plt = sweep.pyplot()
    fig, axes = plt.subplots(2, 2, figsize=(13, 9.5), layout="constrained")
    styles = sweep.styles_of(list(DRAWN), ("retrace_seq",))
    price = prices(found)
    for ax, (panel, kinds) in zip(axes.flat, PANELS.items(), strict=True):
        own = [line for _, line in lines(found) if line[0].sampler.panel in kinds]
        far = [p.kl for line in own for p in line] or [1.0]
        aside = 0.004 * math.log10(10 * max(far) / min(far))  # of neighbouring rows, so that error bars stand apart
        for line in own:
            draw_line(ax, line, styles, aside)
        asked = sorted({price[p.name] for line in own for p in line} - {1.0})
        if panel == ACTORS and asked:
            ax.axhline(asked[0], color="black", lw=0.9, ls="--")
            ax.text(1, asked[0], " price", transform=ax.get_yaxis_transform(), fontsize=8, va="center")
        ax.axhline(1, color="black", lw=0.9)
        ax.set(
            xscale="log",
            title=TITLES.get(panel, panel),
            xlabel="KL(inf || ref), nats a token",
            ylabel="worth of a response",
        )
        ax.set_yscale("symlog", linthresh=0.1, linscale=0.5)
        ax.set_ylim(-0.03, 10)
        ticks = (0, 0.05, 0.1, 0.2, 0.5, 1, 2, 4)
        ax.set_yticks(ticks, [f"{y:g}" for y in ticks])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    handles, _ = axes[0, 0].get_legend_handles_labels()
    texts = [ROWS[row] for row in DRAWN]
    fig.legend(handles[: len(texts)], texts, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    sweep.save(fig, sweep.RESULTS / "map.png")


TITLES = {
    ACTORS: "another model samples; squares: a second pair of base models",
    STALE: "stale weights (updates); triangles: the same policy in low bits",
    LAWS: "another sampling law; triangles: hotter; squares: top_p, no kept sets",
}
MARKS = {"top_p": ("s", "--"), "second pair": ("s", "--"), "hotter": ("^", ":"), "later": ("^", ":")}


def draw_line(ax, line: list[Point], styles: dict, aside: float) -> None:
    """The rows over the points of one line, each a little aside, and the samplers' names on top."""
    mark, dash = MARKS.get(line[0].sampler.line, ("o", "-"))
    for i, row in enumerate(DRAWN):
        x = [p.kl * 10 ** (aside * (i - len(DRAWN) // 2)) for p in line]
        y, error = ([p.rows[row][key] for p in line] for key in ("worth", "worth_se"))
        ends = ([min(a, b) for a, b in zip(y, error, strict=True)], error)
        ax.errorbar(x, y, yerr=ends, marker=mark, ms=4, ls=dash, elinewidth=0.7, label=row, **styles[row])
    height = 4 if line[0].sampler.line == "second pair" else 9  # below the first pair's names
    for p in line:
        name = p.sampler.label.partition(",")[0]
        ax.text(p.kl, height, name, rotation=90, fontsize=6.5, ha="center", va="top", color="#555555")


def study(flags: sweep.StudyFlags) -> None:
    if not flags.draw:
        missing = [name for name in samplers() if not (FOLDER / f"{name}.json").is_file()]
        if missing:
            make_models()
        known = {}
        for name in tqdm(missing, desc="samplers"):
            measure(name, known)
    found = points()
    need(found, "--draw: nothing is measured; run it once without --draw")
    parts = (by_region, best_where, how_often, where_it_stops, distance_alone, everything)
    sweep.page("map", *(part(found) for part in parts))
    draw(found)


if __name__ == "__main__":
    sweep.main(study, __doc__)
