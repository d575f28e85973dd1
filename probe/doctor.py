"""Diagnose the mismatch in rollouts dumped by any program. No model is loaded.

    python -m probe --rollouts=FILE.jsonl
    python -m probe --rollouts=FILE.parquet --columns=sampler=old_logps,trainer=new_logps,tokens=ids

A row is one response, with lists over its tokens: the log-probabilities of the sampled tokens under
sampler and trainer and, if present, token ids and a loss mask. The column names of verl, TRL,
prime-rl, slime and of this repository are known (COLUMNS); --columns gives different names.

Each rule looks for the sign of a cause in the two log-probabilities of each token and in log r:

    log r = log p_trainer - log p_sampler of a token. If the sampler records its own sampling distribution,
    E r = 1 for any normalised distribution of the trainer over the tokens that the sampler can draw. A sampler
    with top-p and a trainer over the whole vocabulary have E r < 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from batching import pad
from config import Config
from eval import write_result
from machinery.flags import check_ranges, check_result, need, parse_flags
from probe.gaps import exists, k3, overview
from probe.page import tables
from probe.verdicts import judged
from tasks.data import from_file, named_columns

COLUMNS = {  # in order of preference
    "sampler": (
        *("rollout_log_probs", "sampling_per_token_logps", "inference_logprobs"),
        *("rollout_logprobs", "logp_inf", "sampler_logps", "behavior_logprobs"),
    ),
    "trainer": (
        *(
            "old_log_probs",
            "old_per_token_logps",
            "trainer_logprobs",
            "log_probs",
            "logp_ref",
        ),
        *("trainer_logps", "prox_logp", "per_token_logps"),
    ),
    "tokens": (
        *("response_ids", "completion_ids", "responses", "tokens", "output_ids"),
        "token_ids",
    ),
    "mask": ("response_mask", "completion_mask", "loss_mask", "loss_masks", "mask"),
}
PRECISION = 0.06  # rms of log r below which 16-bit arithmetic explains the mismatch
SHOWN = 8  # number of listed tokens with the largest gaps


@dataclass(frozen=True)
class DoctorFlags:
    """The doctor"""

    rollouts: str = ""
    """File of responses dumped by a different program: JSONL, JSON or Parquet."""
    columns: str = ""
    """Names of columns: sampler=NAME,trainer=NAME,tokens=NAME,mask=NAME; default: usual names."""
    log_ratio_clamp: float = Config.log_ratio_clamp
    """Log-ratios are clamped to +- this in the statistics; the rules for causes clamp them to +- 20."""
    out: str = ""
    """Also write the report to this JSON file."""


@dataclass
class Dump:
    """The log-probabilities of a file, padded with 0."""

    inf: np.ndarray  # (B, T) log-probabilities of the sampler
    ref: np.ndarray  # (B, T) log-probabilities of the trainer
    length: np.ndarray  # (B,)
    tokens: np.ndarray | None  # (B, T) ids
    notes: list[str]  # corrections that were made while reading

    @property
    def on(self) -> np.ndarray:
        return exists(self.inf, self.length)

    @property
    def sides(self) -> dict[str, np.ndarray]:
        """The log-probabilities of all tokens, by side."""
        return {"sampler": self.inf[self.on], "trainer": self.ref[self.on]}

    @property
    def log_r(self) -> np.ndarray:
        """log p_trainer - log p_sampler, (B, T), clamped to +- 20."""
        return (self.ref - self.inf).clip(-20, 20)


def read(path: str, columns: str = "") -> Dump:
    """Read the responses of a file. UserError: the file or a column is wrong."""
    rows = from_file(path, "rollouts")
    need(rows, f"--rollouts={path}: no rows")
    named = named_columns(columns, COLUMNS)
    first = rows[0][1]
    need(
        isinstance(first, dict),
        f"--rollouts={path}: its rows are not objects with columns",
    )
    at = {}
    for kind, names in COLUMNS.items():
        at[kind] = named.get(kind) or next(
            (name for name in names if name in first), ""
        )
    for kind in ("sampler", "trainer"):
        need(
            at[kind],
            f"--rollouts={path}: no column of the {kind}'s log-probabilities among {', '.join(first)}; name it with "
            f"--columns={kind}=NAME",
        )
    parts, extra = [], set()
    for place, row in rows:
        inf, ref = (numbers(row, at[kind], place) for kind in ("sampler", "trainer"))
        tokens = numbers(row, at["tokens"], place) if at["tokens"] else None
        mask = (
            numbers(row, at["mask"], place) != 0
            if at["mask"]
            else np.ones(len(inf), bool)
        )
        if row.get("tool_mask") is not None:  # TRL: 0 for the tokens of a tool
            mask = mask & (numbers(row, "tool_mask", place) != 0)
        n = min(len(x) for x in (inf, ref, mask))
        extra |= {len(ref) - n, len(inf) - n}
        inf, ref, mask = (shortened(x, n) for x in (inf, ref, mask))
        tokens = (
            shortened(tokens, n) if tokens is not None and len(tokens) >= n else None
        )
        parts.append((inf[mask], ref[mask], None if tokens is None else tokens[mask]))
    cut = "sampler, trainer and mask differ in length: zeros at the end of longer lists, or else their first values, "
    cut += "are ignored"
    notes = [cut] if extra != {0} else []
    parts = [part for part in parts if len(part[0])]
    need(parts, f"--rollouts={path}: no token has a mask other than 0")
    length = np.array([len(part[0]) for part in parts])
    inf, ref, ids = (
        None if any(x is None for x in rows) else pad(rows, dtype=np.float64).numpy()
        for rows in zip(*parts, strict=True)
    )
    return Dump(inf, ref, length, ids, notes)


def shortened(x: np.ndarray, n: int) -> np.ndarray:
    """n values of x: without padding, zeros at the end, or else without the prompt at the beginning."""
    return x[len(x) - n :] if x[n:].any() else x[:n]


def numbers(row: dict, column: str, place: str) -> np.ndarray:
    """A column of a row as float64. Raise UserError if it is not a list of numbers."""
    need(column in row, f"{place}: no column {column}")
    try:
        x = np.asarray(row[column], np.float64)
    except (TypeError, ValueError):
        x = np.zeros((0, 0))
    need(
        x.ndim == 1,
        f"{place}: {column} is not a list of numbers, one for each token of a response",
    )
    return x


# -- Causes: each rule yields the evidence in one sentence if it finds its sign

CAUSES: list[tuple] = []  # (name, rule, check, broken), the most specific first


def cause(name: str, check: str, broken: bool = False):
    """Add a rule to CAUSES. check: advice on where to look. broken: the cause makes all further
    causes meaningless, so the search ends."""

    def add(rule):
        CAUSES.append((name, rule, check, broken))
        return rule

    return add


fatal_cause = partial(cause, broken=True)


@fatal_cause(
    "numbers that are not finite", "16-bit overflow, or tokens that truncation forbids"
)
def not_finite(d: Dump) -> Iterator[str]:
    bad = {side: int((~np.isfinite(x)).sum()) for side, x in d.sides.items()}
    if any(bad.values()):
        yield ", ".join(
            f"{n} of the {side}'s log-probabilities are NaN or infinite"
            for side, n in bad.items()
            if n
        )


@fatal_cause(
    "not recorded",
    "whether the engine is asked for log-probabilities (vLLM: logprobs=0)",
)
def not_recorded(d: Dump) -> Iterator[str]:
    zero = [side for side, x in d.sides.items() if (x == 0).all()]
    if zero:
        yield f"all log-probabilities of the {' and the '.join(zero)} are 0"


@fatal_cause(
    "equal columns",
    "whether one column is a copy of the other (verl: bypass_mode); otherwise nothing",
)
def equal_columns(d: Dump) -> Iterator[str]:
    if (d.inf == d.ref).all():
        yield "sampler and trainer are equal in every bit"


@fatal_cause("no logarithms", "whether probabilities or negated numbers were dumped")
def not_logarithms(d: Dump) -> Iterator[str]:
    positive = [side for side, x in d.sides.items() if (x > 1e-3).mean() > 0.5]
    if positive:
        yield f"more than half of the numbers of the {' and the '.join(positive)} are above 0"


@fatal_cause("base of the logarithm", "natural logarithms on both sides")
def base_of_the_logarithm(d: Dump) -> Iterator[str]:
    """A line through the origin of slope 0.69 (ln against log2) or 2.3 (log10) fits without
    residual."""
    inf, ref = d.inf[d.on], d.ref[d.on]
    slope = (inf * ref).sum() / max((inf**2).sum(), 1e-30)
    residual = ((ref - slope * inf) ** 2).sum() / max(((ref - inf) ** 2).sum(), 1e-30)
    for base in (2, 10):
        for side, factor in (
            ("sampler", math.log(base)),
            ("trainer", 1 / math.log(base)),
        ):
            if abs(slope / factor - 1) < 0.02 and residual < 0.05:
                times = f"the trainer's numbers are {slope:.3f} times the sampler's"
                yield f"{times}: the {side}'s are logarithms to base {base}"


@fatal_cause(
    "shifted by one token", "the slice of the logits: position t scores token t + 1"
)
def one_place_off(d: Dump) -> Iterator[str]:
    """The trainer's numbers fit the sampler's numbers of a neighbouring token."""
    straight = correlation(d.inf, d.ref, d.on)
    right = correlation(d.inf[:, :-1], d.ref[:, 1:], d.on[:, 1:])
    left = correlation(d.inf[:, 1:], d.ref[:, :-1], d.on[:, 1:])
    best = max(right, left)
    if best > 0.8 and best > straight + 0.2:
        neighbour = "next" if right > left else "previous"
        fits = f"correlation {best:.2f}, {straight:.2f} without a shift"
        yield f"the trainer's number for the {neighbour} token fits better ({fits})"


@fatal_cause(
    "rows of a different response",
    "the order of rows after sorting, balancing or packing",
)
def other_rows(d: Dump) -> Iterator[str]:
    """The two sides are nearly uncorrelated."""
    straight = correlation(d.inf, d.ref, d.on)
    if straight < 0.3:
        yield f"the correlation of the two sides over tokens is {straight:.2f}"


@cause(
    "some responses scored wrongly",
    "padding side, attention mask, packing and position ids of these rows",
)
def some_rows(d: Dump) -> Iterator[str]:
    """A few responses cause nearly all of the gap."""
    rms = np.sqrt((d.log_r**2 * d.on).sum(1) / d.length)
    bad = rms > 20 * np.median(rms) + 0.5
    if 0 < bad.mean() < 0.4:
        share = f"{100 * bad.mean():.0f} % of the responses have rms log r {rms[bad].mean():.2g}"
        yield f"{share}, and the median of all responses is {np.median(rms):.2g}"


@cause(
    "another prompt",
    "the chat template, a second begin-of-sequence token, the system prompt",
)
def first_tokens(d: Dump) -> Iterator[str]:
    """The gap is at the beginning of responses."""
    near, far = gap_between(d, 0, 4), gap_between(d, 16, None)
    if near > 10 * far and near > 1e-2 and d.on[:, 16:].sum() >= 64:
        yield f"KL of the first 4 tokens {near:.2g}, after 16 tokens {far:.2g}"


@cause(
    "the end of responses",
    "the end token: appended by one side, or masked by the other",
)
def last_token(d: Dump) -> Iterator[str]:
    """The gap is at the last token of responses."""
    last = np.arange(d.inf.shape[1])[None] == d.length[:, None] - 1
    near, far = k3(d.log_r[last]).mean(), k3(d.log_r[d.on & ~last]).mean()
    if near > 20 * far and near > 1e-3:
        yield f"KL of the last token {near:.2g}, of the other tokens {far:.2g}"


@cause(
    "one token",
    "this token: a special token, a padded row of the vocabulary, a logit bias or penalty",
)
def one_token(d: Dump) -> Iterator[str]:
    """The gap is at one token id."""
    if d.tokens is None:
        return
    ids, gap = d.tokens[d.on].astype(int), k3(d.log_r[d.on])
    total = Counter()
    for token, x in zip(ids.tolist(), gap.tolist(), strict=True):
        total[token] += x
    token, most = total.most_common(1)[0]
    share, frequency = most / max(gap.sum(), 1e-30), (ids == token).mean()
    typical = np.median(gap[ids == token])
    if share > 0.5 and frequency < 0.2 and typical > gap.mean():
        yield f"token {token} has {100 * share:.0f} % of the KL and is {100 * frequency:.1f} % of the tokens"


def truncated(d: Dump, sign: int) -> Iterator[str]:
    """One side normalises over its kept tokens and the other does not: log r <= 0 nearly everywhere
    if the side is the sampler (sign 1), >= 0 if it is the trainer (sign -1)."""
    log_r = d.log_r[d.on]
    against, mean = (sign * log_r > 2e-2).mean(), np.exp(log_r).mean()
    if against < 0.01 and sign * (mean - 1) < -0.005:
        side = f"{'above' if sign > 0 else 'below'} 1 in {100 * against:.1f} % of the tokens"
        yield f"the mean of r is {mean:.3f}, and r is {side}"


cause(
    "truncated sampling",
    "top-p, top-k, min-p: score within the kept set (here --keep_sampling_mask=replay)",
)(partial(truncated, sign=1))
cause(
    "raw log-probabilities",
    "whether the engine returns numbers before truncation (vLLM: processed_logprobs)",
)(partial(truncated, sign=-1))


@cause("temperature", "that both sides divide the logits by the same temperature")
def temperature(d: Dump) -> Iterator[str]:
    """log r is proportional to log p: p_trainer ~ p_sampler^c."""
    inf, log_r = d.inf[d.on], d.log_r[d.on]
    slope, start = np.polyfit(inf, log_r, 1)
    spread = max(((log_r - log_r.mean()) ** 2).sum(), 1e-30)
    residual = ((log_r - slope * inf - start) ** 2).sum() / spread
    if residual < 0.5 and abs(slope) > 0.03:
        hotter = "sampler" if slope > 0 else "trainer"
        share = f"{100 * (1 - residual):.0f} % of its variance"
        yield f"log r changes by {slope:.2f} for each nat of log p ({share}): the {hotter} is hotter"


@cause(
    "growth along the response",
    "8-bit KV cache, position ids, sliding window, RoPE scaling",
)
def grows(d: Dump) -> Iterator[str]:
    """The gap grows with the position in the response."""
    T = int(np.median(d.length))
    if T < 16:
        return
    near, far = gap_between(d, 0, T // 4), gap_between(d, 3 * T // 4, T)
    if far > 4 * near and far > 1e-5:
        yield f"KL of the first quarter {near:.2g}, of the last quarter {far:.2g}"


@cause(
    "16-bit arithmetic",
    "nothing: no correction is needed except for very long responses",
)
def arithmetic(d: Dump) -> Iterator[str]:
    """E r = 1, and the gap is as small as 16-bit arithmetic makes it."""
    rms, mean = of_r(d)
    if rms < PRECISION and abs(mean - 1) < 0.005:
        yield f"the root mean square of log r is {rms:.2g}, and the mean of r is {mean:.4f}"


@cause(
    "another policy",
    "stale weights, a failed sync, low-bit rollouts, a different model or temperature",
)
def another_policy(d: Dump) -> Iterator[str]:
    """E r = 1, and the gap is too large for 16-bit arithmetic."""
    rms, mean = of_r(d)
    error = np.exp(d.log_r[d.on]).std() / math.sqrt(d.length.sum())
    if rms >= PRECISION and abs(mean - 1) < max(0.005, 4 * error):
        r = f"the mean of r is {mean:.3f} +- {error:.1g}: both sides are normalised"
        yield f"the root mean square of log r is {rms:.2g}, and {r}"


def correlation(x, y, on) -> float:
    x, y = x[on], y[on]
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def gap_between(d: Dump, start: int, end: int | None) -> float:
    """Mean k3 of the tokens at these positions; 0 if there are no tokens."""
    x = k3(d.log_r[:, start:end])[d.on[:, start:end]]
    return float(x.mean()) if len(x) else 0.0


def of_r(d: Dump) -> tuple[float, float]:
    """(root mean square of log r, mean of r)."""
    log_r = d.log_r[d.on]
    return float(np.sqrt((log_r**2).mean())), float(np.exp(log_r).mean())


def causes(d: Dump) -> tuple[list[dict], bool]:
    """(the causes that fit: name, evidence, check, the most specific first; whether the last one
    makes all numbers meaningless)."""
    rows = []
    for name, rule, check, broken in CAUSES:
        with np.errstate(all="ignore"):
            evidence = next(rule(d), "")
        if evidence:
            rows.append({"cause": name, "evidence": evidence, "check": check})
        if evidence and broken:
            return rows, True
    if not rows:
        check = "temperature, truncation and mask of both sides (vLLM: processed_logprobs); "
        check += "python -m probe --model=..."
        rows = [
            {"cause": "unknown", "evidence": "no known pattern fits", "check": check}
        ]
    return rows, False


def main(argv: list[str] | None = None) -> dict:
    """Print the report, and return it as a dictionary. UserError: a flag is wrong."""
    cfg = parse_flags(
        DoctorFlags, argv, "python -m probe --rollouts=FILE --key=value ..."
    )
    check_ranges(cfg)
    if cfg.out:
        check_result("out", cfg.out)
    d = read(cfg.rollouts, cfg.columns)
    likely, broken = causes(d)
    report = {
        "rollouts": cfg.rollouts,
        "responses": len(d.length),
        "tokens": int(d.length.sum()),
        "notes": d.notes,
        "causes": likely,
    }
    if not broken:
        clamp, log_r = cfg.log_ratio_clamp, np.where(d.on, d.ref - d.inf, 0.0)
        report |= overview(d.inf, d.ref, d.length, clamp) | {"floor": []}
        report["verdicts"] = judged(log_r, d.length, report["kl"], clamp, [])
        report["largest"] = largest(d)
    print(text(report))
    write_result(cfg.out, report)
    return report


def largest(d: Dump) -> list[dict]:
    """Rows for the tokens with the largest gaps."""
    gap = np.where(d.on, np.abs(np.exp(d.inf) - np.exp(d.ref)), 0.0)
    rows = []
    for at in np.argsort(gap, axis=None)[::-1][:SHOWN]:
        b, t = (int(i) for i in np.unravel_index(at, gap.shape))
        token = None if d.tokens is None else int(d.tokens[b, t])
        p = {"p_sampler": math.exp(d.inf[b, t]), "p_trainer": math.exp(d.ref[b, t])}
        rows.append({"response": b, "place": t, "token": token} | p)
    return rows


def text(o: dict) -> str:
    """The report as text."""
    lines = [
        f"{o['rollouts']}: {o['responses']} responses, {o['tokens']:,} tokens",
        *o["notes"],
        "",
        "likely causes",
    ]
    for row in o["causes"]:
        lines += [
            f"   {row['cause']}: {row['evidence']}",
            f"      check {row['check']}",
        ]
    sections = [lines] if "kl" not in o else [lines, *tables(o)]
    return "\n\n".join("\n".join(section) for section in sections)
