"""Training at zero: does a mismatch of the engine alone change training at this scale, and from what size on?

    python results/zero.py                    # run what is missing of the first rows, then write results/zero.{md,png}
    python results/zero.py --whole            # all rows

Policy and sampler are one model with one version of its weights; only the engine differs. Two kinds of rows:

  engines   the on-policy row of table1 with a difference of exactly 0 (--exact), in float32, bfloat16 and float16, in
            plain torch and in vLLM on the CPU, at one update a sync and at 16
  the dial  --rollout_noise: a gap of a chosen size (sampling.Noise), under no correction and four of them

Held-out problems are solved by the learner's own weights in plain torch, or without noise, in every row: an engine's
rounding enters training alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import sweep
import table1
import table2_3

ON_POLICY = table1.ROWS["on-policy"]  # --rollout=hf in float32: its record is shared
LEARNERS = dict(eval_engine="torch")
BF16 = dict(rollout_dtype="bfloat16", **LEARNERS)
VLLM = dict(rollout="vllm", **LEARNERS)
KINDS = {
    "exact zero": dict(exact=True),
    "float32 engine": {},
    "bfloat16 engine": BF16,
    "float16 engine": dict(rollout_dtype="float16", **LEARNERS),
    "vLLM, float32": VLLM,
    "vLLM, bfloat16": VLLM | BF16,
    "vLLM, float16": VLLM | dict(rollout_dtype="float16"),
}
ONE_UPDATE_ONLY = {
    "vLLM, 8-bit cache": VLLM | dict(kv_cache_dtype="fp8"),  # weights in float32; AVX-512
    "int8 cache": dict(kv_cache_dtype="int8", **LEARNERS),
}
ENGINES = {label: {**ON_POLICY, **flags} for label, flags in (KINDS | ONE_UPDATE_ONLY).items()}
LATE = dict(table2_3.STALE, rollout_batch=512)
SYNCED_LATE = {f"{label}, 16 updates": {**ENGINES[label], **LATE} for label in KINDS}
SIGMAS = (0.07, 0.2, 0.7, 2)  # a KL of about 1e-4, 1e-3, 1e-2 and 2e-1 nats a token at the start
CORRECTIONS = {
    "none": dict(objective="none"),
    "tis": dict(objective="tis"),
    "icepop": dict(objective="icepop"),
    "seq_mis": dict(objective="seq_mis"),
    "jackpot, expected mask": dict(objective="jackpot", obrs_mask="expected"),
}


def dialled(correction: str, sigma: float) -> str:
    """The label of a row of the dial."""
    return f"{correction}, noise {sigma:g}"


DIAL = {
    dialled(name, sigma): dict(flags, actor="none", rollout_noise=sigma)
    for sigma in reversed(SIGMAS)
    for name, flags in CORRECTIONS.items()
}
FIRST = ("exact zero", "float32 engine", "bfloat16 engine")
FIRST += tuple(dialled(name, sigma) for sigma in (2, 0.7) for name in ("none", "tis"))
FIRST_SEED = 12  # from which on every row has its seeds

# title -> rows
SETTINGS = {
    "Engines, one update a sync": ENGINES,
    "Engines, 16 updates a sync": SYNCED_LATE,
    "The dial": DIAL,
}
ALL = ENGINES | SYNCED_LATE | DIAL


def at_first(records: list[dict], key: str) -> float:
    """Mean of a column over the first tenth of the updates, over seeds."""
    backwards = [{**r, "columns": {key: r["columns"].get(key, [])[::-1]}} for r in records]
    return sweep.tail(backwards, key)


# KL: KL(inf || ref) by k3, nats a token; gap: |p_inf - p_ref| of a sampled token
K3 = "rollout_corr/k3_kl"
COLUMNS = {
    **{c: sweep.COLUMNS[c] for c in ("seeds", "policy pass@1, %", "best, %")},
    "KL at first": lambda rs: sweep.number(at_first(rs, K3)),
    "KL at the end": lambda rs: sweep.number(sweep.tail(rs, K3)),
    "mean gap": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/mean_mismatch", 1.0)),
    "ESS": sweep.COLUMNS["ESS"],
    "ESS of responses": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/seq_eff_sample_size")),
    "reward": lambda rs: sweep.number(sweep.tail(rs, "reward")),
    "entropy": lambda rs: sweep.number(sweep.tail(rs, "entropy")),
    "gradient norm": lambda rs: sweep.number(sweep.tail(rs, "grad_norm")),
}


@dataclass(frozen=True)
class ZeroFlags(sweep.StudyFlags):
    """Training at zero"""

    seeds: int = 8
    """Runs of every row."""
    whole: bool = False
    """All rows, and not the first ones alone."""


def missing(seeds: int) -> str:
    """The part of the page that names the rows without a record."""
    lines = []
    for title, rows in SETTINGS.items():
        named = [label for label, flags in rows.items() if not records_of(flags, seeds)]
        lines += [f"- {title}: {'; '.join(named)}"] if named else []
    return "\n".join(["## Not run", "", *(lines or ["Every row has a record."])]) + "\n"


def records_of(flags: dict, seeds: int) -> list[dict]:
    return sweep.recorded(sweep.with_seeds(flags, seeds, FIRST_SEED), sweep.STUDY)


def draw(got: sweep.Got) -> None:
    """Training of the engines and of the largest noise; and what is reached against the KL at the start."""
    plt = sweep.pyplot()
    fig, axes = plt.subplots(1, 3, figsize=(13.8, 4.2), layout="constrained")
    shown = [label for label in ENGINES if "float16" not in label or "bfloat16" in label]  # which is as float32
    largest = {label: got[label] for label in got if label in shown or label.endswith(f"noise {SIGMAS[-1]:g}")}
    styles = sweep.styles_of(list(largest)[: sweep.LINES], ("exact zero",))
    panels = {"eval/policy": "held-out pass@1 (%)", K3: "KL(inf || ref) by k3, nats a token"}
    for ax, (key, title) in zip(axes, panels.items(), strict=False):
        for label, style in styles.items():
            if label in largest:
                sweep.curve(ax, label, largest[label], key, smooth=1 if key.startswith("eval/") else 8, **style)
        ax.set(title=title, xlabel="updates")
    axes[0].legend(fontsize=7)
    axes[1].set_yscale("log")
    draw_dial(axes[2], got)
    for ax in axes:
        ax.grid(alpha=0.3)
    sweep.save(fig, sweep.RESULTS / "zero.png")


def draw_dial(ax, got: sweep.Got) -> None:
    """pass@1 at the end against the KL of the first tenth of the updates: a line for each correction, a point for each
    engine of 16 bits, a band for float32."""
    if "float32 engine" in got:
        y, error = sweep.final(got["float32 engine"])
        ax.axhspan(y - error, y + error, color="#7F7F7F", alpha=0.2, label="float32 engine")
    for label, marker in {"bfloat16 engine": "s", "float16 engine": "^", "vLLM, 8-bit cache": "v"}.items():
        if label in got:
            y, error = sweep.final(got[label])
            ax.errorbar([at_first(got[label], K3)], [y], yerr=error, marker=marker, ms=5, color="#000000", label=label)
    for name, colour in zip(CORRECTIONS, sweep.COLOURS, strict=False):
        labels = [label for sigma in SIGMAS if (label := dialled(name, sigma)) in got]
        if labels:
            x = [at_first(got[label], K3) for label in labels]
            y, error = zip(*(sweep.final(got[label]) for label in labels), strict=True)
            ax.errorbar(x, y, yerr=error, marker="o", ms=4, lw=1.2, color=colour, label=name)
    ax.set(title="held-out pass@1 at the end (%)", xlabel="KL(inf || ref) at first, nats a token")
    ax.set(xscale="log", xlim=(1e-7, 1))
    ax.legend(fontsize=7)


def study(flags):
    wanted = ALL if flags.whole else {label: ALL[label] for label in FIRST}
    if not flags.draw:
        sweep.run(wanted, dict.fromkeys(wanted, flags.seeds), False, flags.jobs, first_seed=FIRST_SEED)
    got = {label: records for label, row in ALL.items() if (records := records_of(row, flags.seeds))}
    sweep.need(got, "--draw: no row has a record; run it once without --draw")
    parts = {title: {label: got[label] for label in rows if label in got} for title, rows in SETTINGS.items()}
    tables = [sweep.table(title, some, COLUMNS) for title, some in parts.items() if some]
    sweep.page("zero", *tables, missing(flags.seeds))
    draw(got)


if __name__ == "__main__":
    sweep.main(study, __doc__, ZeroFlags)
