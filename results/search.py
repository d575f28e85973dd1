"""Better corrections? Weights of many forms on the same responses, weighed with worth.py; and the best there can be.

    python results/search.py            # measure what is missing (40 minutes), then write results/search.md, search.png

A sampler's tokens are measured once and kept in out/search: log r, advantage, and how each log-probability moves along
g and along random directions (worth.py). Every candidate is then a function of log r, and its worth a weighted sum. The
page is drawn from records, one for each sampler: results/worth/search/NAME.json.

Samplers: `actor` (another model, configs/study.toml), `w2a16` (two bits, configs/lowbit.toml), `stale` and `stale-11`
(the policy of 125 updates ago; two runs of other seeds made the later one), and `long` (another model,
configs/long.toml), whose base models take an hour to make and which is not measured unless it is named:
--samplers=actor,w2a16,stale,stale-11,long.

The best weight that is a function of one quantity x (R, a prefix's R_t, r), by bins of x: let m_k be the mean of the
gradient of what falls into bin k, a_k = <m_k, g>, and D_kl the noise of bins k and l. A weight w has

    kappa^2 = s / (s + w' (M + D) w),   s = (w a)^2 / |g|^2,   M_kl = <m_k, m_l> - a_k a_l / |g|^2

so the best one has the largest (w a)^2 / (w' (M + D) w): w* = (M + D)^-1 a, up to its scale, which kappa does not see.
Of the weights of one form, those that rise with x, say, isotonic.py finds the best. Weights are fitted on one half of
the batches and weighed on the other.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import sweep
from candidates import CANDIDATES, DRAWN, prefix_log, token, total_log, whole
from isotonic import ANY, FORMS, HILL, RISING, best_weight

import checkpoint
import worth
from flags import choice, need
from measure import FOLDS, Reference, Seen, estimate, jackknife, replicates, with_errors

TOKENS = sweep.ROOT / "out" / "search"
RECORDS = sweep.RESULTS / "worth" / "search"
LATER = ["--config=configs/study.toml", "--objective=grpo", "--actor=none", "--steps=125"]
SEEDS = {"stale": 10, "stale-11": 11}  # of the run that made the later policy
STALE = ["--config=configs/study.toml", "--actor=none", "--stale=base:policy", "--noise_batches=12"]  # and --model
SAMPLERS = {
    "actor": ["--config=configs/study.toml", "--noise_batches=12"],
    "stale": STALE,
    "stale-11": STALE,
    "long": ["--config=configs/long.toml", "--batches=32", "--reference=64", "--noise_batches=8"],
    "w2a16": ["--config=configs/lowbit.toml", "--rollout_quant=w2a16", "--noise_batches=12"],
}


@dataclass
class Tokens:
    """n batches of B responses of up to T tokens; F folds of g, K random directions."""

    log_r: np.ndarray  # (n, B, T), 0 where nothing is trained on
    mask: np.ndarray  # (n, B, T) bool
    plain: np.ndarray  # (n, B, T) advantage / tokens of the batch: the coefficients without a correction
    reward: np.ndarray  # (n, B)
    group: np.ndarray  # (n, B)
    along: np.ndarray  # (n, B, T, F)
    random: np.ndarray  # (m, B, T, K), of the first m batches
    gram: np.ndarray
    squares: np.ndarray
    overlap: np.ndarray
    each: int

    @property
    def reference(self) -> Reference:
        return Reference([], self.gram, self.squares, int(self.each), self.overlap)

    @property
    def groups(self) -> int:
        return int(self.group.max()) + 1


def tokens_of(name: str) -> Tokens:
    """The measured tokens of a sampler, from the disk or made now."""
    path = TOKENS / f"{name}.npz"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name("unfinished.npz")
        np.savez(scratch, **measure(name))
        scratch.rename(path)
    return Tokens(**np.load(path))


def later_policy(seed: int) -> str:
    """The folder of the policy after 125 updates on responses of its own; trained if it is not there."""
    out = TOKENS / f"later-{seed}"
    if not checkpoint.folders(str(out)):
        argv = [*LATER, f"--seed={seed}", f"--out={out}", "--overwrite"]
        subprocess.run([sys.executable, "train.py", *argv], cwd=sweep.ROOT, check=True)
    return str(checkpoint.newest(str(out)) / "policy")


def measure(name: str) -> dict[str, np.ndarray]:
    argv = [*SAMPLERS[name], "--rows=none"]
    if name in SEEDS:
        argv.append(f"--model={later_policy(SEEDS[name])}")
    m = worth.Measurement(*worth.parse(argv))
    reference = m.references()[worth.EVERYTHING]
    found = []
    for s in m.slopes({worth.EVERYTHING: reference}):
        b = s.batches["none"]
        found.append(
            {
                "log_r": (b.log_r * b.mask).numpy(),
                "mask": b.mask.numpy(),
                "plain": (b.adv * b.mask / b.mask.sum()).numpy(),
                "reward": b.reward.numpy(),
                "group": b.group.numpy(),
                "along": np.stack([x.numpy() for x in s.along[worth.EVERYTHING]], -1).astype(np.float32),
                "random": None if s.random is None else np.stack([x.numpy() for x in s.random], -1).astype(np.float32),
            }
        )
    m.sampler.close()
    T = max(x["mask"].shape[1] for x in found)
    out = {key: np.stack([widen(x[key], T) for x in found if x[key] is not None]) for key in found[0]}
    return out | {
        "gram": reference.gram,
        "squares": reference.squares,
        "overlap": reference.overlap,
        "each": np.array(reference.batches),
    }


def widen(x: np.ndarray, T: int) -> np.ndarray:
    """(B, t, ...) -> (B, T, ...), padded with 0; (B,) as it is."""
    return x if x.ndim == 1 else np.pad(x, [(0, 0), (0, T - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def seen(t: Tokens, w: np.ndarray, batches=slice(None)) -> Seen:
    """What worth.py sees of a weight."""
    c = w * t.plain
    along = np.einsum("nbt,nbtf->nf", c[batches], t.along[batches])
    noise = []
    for b in range(len(t.random))[batches]:
        shares = np.einsum("bt,btk->bk", c[b], t.random[b])
        noise.append(np.stack([np.bincount(t.group[b], x, t.groups) for x in shares.T], 1))
    return Seen(list(along), noise)


def weigh(t: Tokens, w: np.ndarray, batches=slice(None)) -> dict[str, float]:
    return with_errors(seen(t, w, batches), t.reference, t.groups)


# ---------------------------------------------------------------------------------------------------------------------
# The best weight that is a function of one quantity
# ---------------------------------------------------------------------------------------------------------------------

BINS = 10
SIDES = (0.0, 0.3, 0.6, 0.9, 0.98, 1.02, 1.1, 2.0, math.inf)  # of r
QUANTITIES = {"R": total_log, "R_t": prefix_log, "r": lambda t: t.log_r}


def edges_of(t: Tokens, quantity: str) -> np.ndarray:
    """Where its bins end: as many tokens in each; but most tokens have r near 1, so the bins of r are SIDES."""
    if quantity == "r":
        return np.log(SIDES[1:-1])
    x = np.broadcast_to(QUANTITIES[quantity](t), t.log_r.shape)
    return np.unique(np.quantile(x[t.mask], np.linspace(0, 1, BINS + 1)[1:-1]))


def bin_of(t: Tokens, quantity: str, edges: np.ndarray) -> np.ndarray:
    """(n, B, T): the bin of each token."""
    return np.searchsorted(edges, np.broadcast_to(QUANTITIES[quantity](t), t.log_r.shape))


def moments(t: Tokens, quantity: str, edges: np.ndarray, batches) -> tuple[np.ndarray, np.ndarray]:
    """(M + D, a) of a quantity's bins, from these batches."""
    bins = bin_of(t, quantity, edges)
    each = [seen(t, bins == k, batches) for k in range(len(edges) + 1)]
    a = np.array([np.mean(s.along) for s in each])
    shares = np.stack([np.concatenate(s.noise) for s in each])  # (bins, groups, K)
    mean = shares.mean(1)
    spread = shares - mean[:, None]
    n = shares.shape[1]
    covariance = t.groups * np.einsum("kgv,lgv->kl", spread, spread) / (n - 1) / shares.shape[2]
    along_g = np.outer(a, t.overlap.mean(1)) / t.reference.square(range(FOLDS))
    elsewhere = t.groups * mean - along_g
    M = elsewhere @ elsewhere.T / shares.shape[2] - covariance * t.groups / n
    return M + covariance, a


HALVES = (slice(0, None, 2), slice(1, None, 2))


def held_out(t: Tokens, quantity: str) -> dict[str, tuple[np.ndarray, list]]:
    """form -> the best weight of it, each half of the batches under what the other half gave; and both fits by bins."""
    edges = edges_of(t, quantity)
    bins = bin_of(t, quantity, edges)
    found = [moments(t, quantity, edges, half) for half in HALVES]
    out = {}
    for form in FORMS:
        fits = [best_weight(Q, a, form) for Q, a in found]
        w = np.empty_like(t.log_r)
        for half, values in zip(reversed(HALVES), fits, strict=True):
            w[half] = values[bins[half]]
        out[form] = w, fits
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Drawn masks
# ---------------------------------------------------------------------------------------------------------------------


def draws_noise(t: Tokens, p: np.ndarray) -> float:
    """What drawing a mask adds to `noise`: the sum of p (1 - p) |its share of g_c|^2 over all that is drawn by itself,
    a token where p is (n, B, T), a response where it is (n, B, 1); over |g|^2."""
    shares = t.plain[: len(t.random), ..., None] * t.random
    if p.shape[2] == 1:
        shares = shares.sum(2, keepdims=True)
    p = p[: len(t.random), ..., None]
    return float((p * (1 - p) * shares**2).sum((1, 2)).mean() / t.reference.square(range(FOLDS)))


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def paired(t: Tokens, a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """log of worth under a over worth under b, and its error: noise that both share falls out."""
    both = [seen(t, w) for w in (a, b)]
    both = [(np.array(s.along), np.concatenate(s.noise)) for s in both]

    def log_ratio(keep):
        over, under = (estimate(*s, t.reference, t.groups, keep)["worth"] for s in both)
        return math.log(max(over, 1e-9) / max(under, 1e-9))

    along, noise = both[0]
    kinds = replicates(len(along), *noise.shape)
    (whole_ratio,), *left_out = [[log_ratio(keep) for keep in kind] for kind in kinds]
    return whole_ratio, jackknife(left_out)


def ratio(pair: tuple[float, float]) -> str:
    """A ratio of worths, and how many errors it is from 1; "-" where one of them is worth nothing."""
    log_ratio, error = pair
    return "-" if abs(log_ratio) > 5 else f"{math.exp(log_ratio):.2f} ({log_ratio / max(error, 1e-9):+.1f})"


BESIDE = {"min(R, 1)": "min(R, 1)", "retrace_seq": "Retrace times min(R, 1) (retrace_seq)"}


@dataclass(frozen=True)
class SearchFlags:
    """A search"""

    draw: bool = False
    """Measure nothing: write the page from what is there."""
    samplers: str = "actor,w2a16,stale,stale-11"
    """Which samplers, with commas; also: long."""


def record_of(name: str) -> dict:
    """What the page says of a sampler, from its record; measured and written if there is none."""
    path = RECORDS / f"{name}.json"
    if not path.is_file():
        record = rounded(weighed(tokens_of(name)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def rounded(x):
    """Every float in x to six digits."""
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [rounded(value) for value in x]
    return float(f"{x:.6g}") if isinstance(x, float) else x


def weighed(t: Tokens) -> dict:
    """All numbers of one sampler."""
    fits = {quantity: held_out(t, quantity) for quantity in QUANTITIES}
    return {
        "about": about(t),
        "weights": candidates_of(t),
        "functions": best_functions(t, fits),
        "named": distances(t, fits),
        "drawn": draws(t),
        "by_ratio": by_ratio(t),
        "by_sign": by_sign(t),
        "curves": curves(t, fits["R"]),
    }


def about(t: Tokens) -> dict[str, float]:
    """The sampler in numbers."""
    n, B = t.reward.shape
    return {
        "batches": n,
        "responses": B,
        "tokens": float(t.mask.sum() / n / B),
        "along_random": len(t.random),
        "reward": float(t.reward.mean()),
        "kl": float((token(t) - 1 - t.log_r)[t.mask].mean()),
        "R_below_half": float((whole(t) < 0.5).mean()),
        "noise_on": weigh(t, np.ones_like(t.log_r))["noise_on"],
    }


def candidates_of(t: Tokens) -> dict[str, dict]:
    """label -> worth of a candidate, and over those of BESIDE."""
    others = {name: CANDIDATES[label](t) for name, label in BESIDE.items()}
    rows = {}
    for label, weight in CANDIDATES.items():
        w = weight(t)
        rows[label] = weigh(t, w) | {"over": {name: paired(t, w, other) for name, other in others.items()}}
    return rows


Fits = dict[str, dict[str, tuple[np.ndarray, list]]]  # quantity -> form -> held_out's


def best_functions(t: Tokens, fits: Fits) -> list[dict]:
    """The best function of each quantity, form by form: over the rising one, over that of R, and its worth on the very
    batches that it is fitted on."""
    rows = []
    for quantity, forms in fits.items():
        edges = edges_of(t, quantity)
        Q, a = moments(t, quantity, edges, slice(None))
        for form, (w, _) in forms.items():
            fitted = weigh(t, best_weight(Q, a, form)[bin_of(t, quantity, edges)])["worth"]
            beside = {"rising": paired(t, w, forms[RISING][0]), "that of R": paired(t, w, fits["R"][form][0])}
            rows.append({"quantity": quantity, "form": form, **weigh(t, w), "over": beside, "fitted": fitted})
    return rows


NAMED = {  # label -> what it is a function of; R stands beside what is none of one quantity
    "r": "r",
    "min(r, 1)": "r",
    "min(r, 2) (TIS)": "r",
    "r in [0.5, 5] (IcePop)": "r",
    "R_t (CTPO's ratio)": "R_t",
    "min(R_t, 1) (prefix_tis)": "R_t",
    "R": "R",
    "min(R, 1)": "R",
    "min(R, 2)": "R",
    "min(R, 4)": "R",
    "R where R <= 4 (seq MIS)": "R",
    "min(R, 1) - 0.2": "R",
    "none": "R",
    "exp(mean log r), clip of 0.2": "R",
    "prod min(r, 1) (Retrace)": "R",
    "r_t min of r before (MinPRO)": "R",
    "Retrace times min(R, 1) (retrace_seq)": "R",
    "retrace_seq, spare (spare)": "R",
}


def distances(t: Tokens, fits: Fits) -> dict[str, dict]:
    """Named corrections: form -> their worth over that of the best function of a quantity, of each form."""
    rows = {}
    for label, quantity in NAMED.items():
        w = CANDIDATES[label](t)
        rows[label] = {form: paired(t, w, fits[quantity][form][0]) for form in FORMS}
    return rows


def draws(t: Tokens) -> dict[str, dict]:
    """Drawn masks beside their expectations; and beside the noise that theory says the draw adds."""
    rows = {}
    for before, after in DRAWN.items():
        p, mask = CANDIDATES[before](t), CANDIDATES[after](t)
        rows[before] = {
            "expected": weigh(t, p),
            "drawn": weigh(t, mask),
            "over": paired(t, mask, p),
            "added": draws_noise(t, p),
        }
    return rows


def by_ratio(t: Tokens) -> list[dict]:
    """Responses by R: how far along g one goes, and how large its gradient is, both over |g| of the batch."""
    total = t.log_r.sum(2)
    m, B = len(t.random), total.shape[1]
    square = t.reference.square(range(FOLDS))
    along = np.einsum("nbt,nbtf->nbf", t.plain, t.along).mean(2) * B / square
    size = (np.einsum("nbt,nbtk->nbk", t.plain[:m], t.random) ** 2).mean(2) * B**2 / square
    edges = np.quantile(total, np.linspace(0, 1, BINS + 1))
    rows = []
    for low, high in zip(edges, edges[1:], strict=False):
        here = (total >= low) & (total <= high)
        rows.append(
            {
                "R": [math.exp(low), math.exp(high)],
                "along": [float(along[here].mean()), float(along[here].std() / math.sqrt(here.sum()))],
                "size": float(math.sqrt(size[here[:m]].mean())),
                "reward": float(t.reward[here].mean()),
            }
        )
    return rows


SIGNS = {1: "A > 0", -1: "A < 0"}


def by_sign(t: Tokens) -> list[dict]:
    """Tokens by r, those of positive and those of negative advantage: how far along g all of them together go."""
    square = t.reference.square(range(FOLDS))
    r, rows = token(t), []
    for low, high in zip(SIDES, SIDES[1:], strict=False):
        row = {"r": [low, high if math.isfinite(high) else None]}
        for sign, label in SIGNS.items():
            here = (r >= low) & (r < high) & t.mask & (np.sign(t.plain) == sign)
            along = np.einsum("nbt,nbtf->n", here * t.plain, t.along) / FOLDS / square
            error = along.std(ddof=1) / math.sqrt(len(along))
            share = float(here.sum() / t.mask.sum())
            row[label] = {"share": share, "along": [float(along.mean()), float(error)]}
        rows.append(row)
    return rows


def curves(t: Tokens, forms: dict[str, tuple[np.ndarray, list]]) -> dict:
    """The best functions of R as the figure has them: log R at the middle of each bin, the weight of each half."""
    total = np.broadcast_to(total_log(t), t.log_r.shape)[t.mask]
    out = {"range": np.quantile(total, [0.03, 0.97]).tolist()}
    for form in (ANY, RISING, HILL):
        out[form] = []
        for w in forms[form][1]:
            middles = np.quantile(total, (np.arange(len(w)) + 0.5) / len(w))
            out[form].append({"log R": middles.tolist(), "weight": (w / max(w.max(), 1e-12)).tolist()})
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def plus_minus(x: float, error: float, digits: int) -> str:
    return f"{x:.{digits}f} +- {error:.{digits}f}"


def numbers(x: dict) -> list[str]:
    found = plus_minus(x["worth"], x["worth_se"], 3)
    return [found, *(sweep.number(x[key]) for key in ("kappa", "cosine", "scale", "bias", "noise"))]


HEAD = ["weight", "worth", "kappa", "cosine", "scale", "bias", "noise"]
BEST_TITLE = "The best function of one quantity, each half of the batches under what the other half gave:"
NAMED_TITLE = "Worth over that of the best function of a quantity, by its form; in brackets, errors from 1:"
DRAWN_TITLE = "Masks drawn with these probabilities, once for each token or response, beside their expectations:"
RATIO_TITLE = "Gradients G of responses by R, no weight: <G, g> / g^2, and size over g's:"
SIGN_TITLE = "The same for all tokens of a kind together, by r and the sign of A:"


def section(name: str, record: dict) -> str:
    """The page's part of one sampler."""
    of = record["about"]
    parts = [
        f"## {name}",
        f"{of['batches']} batches of {of['responses']} responses of {of['tokens']:.1f} tokens; {of['along_random']} of "
        f"these batches along random directions.\nReward {of['reward']:.2f}, KL(inf || ref) {of['kl']:.2g} a token, "
        f"R < 0.5 for {100 * of['R_below_half']:.0f} % of responses.\n"
        f"Noise of an on-policy batch over |g|^2: {of['noise_on']:.2f}.",
        table_of_weights(record["weights"]),
        f"{BEST_TITLE}\n\n{table_of_functions(record['functions'])}",
        f"{NAMED_TITLE}\n\n{table_of_named(record['named'], record['weights'])}",
        f"{DRAWN_TITLE}\n\n{table_of_drawn(record['drawn'])}",
        f"{RATIO_TITLE}\n\n{table_by_ratio(record['by_ratio'])}",
        f"{SIGN_TITLE}\n\n{table_by_sign(record['by_sign'])}",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def table_of_weights(rows: dict[str, dict]) -> str:
    """Every candidate, best first, beside those of BESIDE."""
    best_first = sorted(rows.items(), key=lambda item: -item[1]["worth"])
    cells = [[label, *numbers(x), *(ratio(x["over"][name]) for name in BESIDE)] for label, x in best_first]
    return sweep.markdown([*HEAD, *(f"over {name}" for name in BESIDE)], cells)


def table_of_functions(rows: list[dict]) -> str:
    cells = [
        [x["quantity"], x["form"], *numbers(x), *(ratio(pair) for pair in x["over"].values()), f"{x['fitted']:.3f}"]
        for x in rows
    ]
    more = ["over rising", "over that of R", "worth on what it is fitted on"]
    return sweep.markdown(["function of", "form", *HEAD[1:], *more], cells)


def table_of_named(rows: dict[str, dict], weights: dict[str, dict]) -> str:
    cells = [
        [label, NAMED[label], f"{weights[label]['worth']:.3f}", *(ratio(x[form]) for form in FORMS)]
        for label, x in rows.items()
    ]
    return sweep.markdown(["weight", "function of", "worth", *FORMS], cells)


def table_of_drawn(rows: dict[str, dict]) -> str:
    cells = []
    for label, x in rows.items():
        expected, drawn, added = x["expected"], x["drawn"], x["added"]
        wrong = expected["bias"] + expected["noise"]
        theory = f"{wrong / (wrong + added):.2f}"
        worths = [f"{expected['worth']:.3f}", f"{drawn['worth']:.3f}", ratio(x["over"]), theory]
        noise = [f"{expected['noise']:.3g}", f"{added:.3g}", f"{drawn['noise']:.3g} +- {drawn['noise_se']:.2g}"]
        cells.append([label, *worths, *noise])
    head = ["mask", "worth, expected", "worth, drawn", "drawn over expected", "by theory"]
    return sweep.markdown([*head, "noise, expected", "the draw adds, by theory", "noise, drawn"], cells)


def table_by_ratio(rows: list[dict]) -> str:
    cells = [
        [
            "{:.2g} to {:.2g}".format(*x["R"]),
            plus_minus(*x["along"], 2),
            f"{x['size']:.0f}",
            f"{x['reward']:.2f}",
        ]
        for x in rows
    ]
    return sweep.markdown(["R", "along g", "size", "reward"], cells)


def table_by_sign(rows: list[dict]) -> str:
    cells = []
    for x in rows:
        low, high = x["r"]
        row = [f"{low:g} to {math.inf if high is None else high:g}"]
        for label in SIGNS.values():
            row += [f"{100 * x[label]['share']:.2f}", f"{x[label]['along'][0]:+.2f} +- {x[label]['along'][1]:.2f}"]
        cells.append(row)
    return sweep.markdown(["r", "A > 0: % of tokens", "along g", "A < 0: % of tokens", "along g"], cells)


OTHERS = sweep.RESULTS / "worth" / "stale-64.json"  # made by worth.py, whose flags it holds


def on_others() -> str:
    """Named objectives where weights of 64 updates ago sample for those of update 128: no form was found on these."""
    record = json.loads(OTHERS.read_text(encoding="utf-8"))
    rows = sorted(record["rows"].items(), key=lambda item: -item[1]["worth"])
    return sweep.markdown(HEAD, [[name, *numbers(x)] for name, x in rows])


def draw(records: dict[str, dict]) -> None:
    """The best functions of R by bins, of two halves of the data, beside min(R, 1)."""
    plt = sweep.pyplot()
    fig, axes = plt.subplots(1, len(records), figsize=(3.8 * len(records), 3.6), layout="constrained", squeeze=False)
    for ax, (name, record) in zip(axes[0], records.items(), strict=True):
        curves = record["curves"]
        for form, colour in zip((ANY, RISING, HILL), (sweep.STRONG, *sweep.COLOURS), strict=False):
            for half, style in enumerate(("o-", "s:")):
                line = curves[form][half]
                label = f"{form}, half {half + 1}"
                ax.plot(line["log R"], line["weight"], style, c=colour, ms=3, lw=1.2, label=label)
        x = np.linspace(*curves["range"], 100)
        ax.plot(x, np.minimum(np.exp(x), 1), "k--", lw=1, label="min(R, 1)")
        ax.set(title=name, xlabel="log R")
        ax.grid(alpha=0.3)
    axes[0, 0].set_ylabel("weight, over its largest")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    sweep.save(fig, sweep.RESULTS / "search.png")


def study(flags):
    names = flags.samplers.split(",")
    for name in names:
        choice("samplers", name, list(SAMPLERS))
    if flags.draw:
        names = [name for name in names if (RECORDS / f"{name}.json").is_file()]
        need(names, "--draw: nothing is measured; run it once without --draw")
    records = {name: record_of(name) for name in names}
    parts = [section(name, record) for name, record in records.items()]
    sweep.page("search", *parts, f"## stale by 64 updates: other tokens\n\n{on_others()}")
    draw(records)


if __name__ == "__main__":
    sweep.main(study, __doc__, SearchFlags)
