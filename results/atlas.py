"""The atlas: mismatch of real models by engine and format, measured without training (python -m probe).

    python results/atlas.py --task=FILE.jsonl           # measures the rows that results/atlas.json lacks
    python results/atlas.py --task=FILE.jsonl --only=Qwen
    python results/atlas.py --draw                      # run nothing: table and plot from results/atlas.json

python -m tasks.pretrained smol135 (qwen05, qwen15) makes the folders. Each row is stored as soon as it is measured."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tqdm import tqdm

from machinery.flags import need, parse_flags, run_command
from results import sweep

SMOL, QWEN, PAIR = "SmolLM2-135M", "Qwen2.5-Coder-0.5B", "0.5B samples, 1.5B learns"
POLICY = {
    SMOL: "--model=out/models/smol135 --problems=24 --samples=4 --max_tokens=192",
    QWEN: "--model=out/models/qwen05 --problems=12 --samples=4 --max_tokens=160",
    PAIR: "--model=out/models/qwen15 --actor=out/models/qwen05 --problems=8 --samples=4 --max_tokens=160",
}
BF16 = "--dtype=bfloat16 --rollout_dtype=bfloat16"
TORCH_INT8 = "--rollout=hf --rollout_quant=int8 --learner_quant=aligned"
QWEN_SAMPLING = f"{BF16} --temperature=0.7 --top_p=0.8 --top_k=20"
ROWS = {
    SMOL: {
        "bfloat16": BF16,
        "float32": "--dtype=float32 --rollout_dtype=float32",
        "int8": f"{BF16} --rollout_quant=int8",
        "int8, aligned": f"{BF16} --rollout_quant=int8 --learner_quant=aligned",
        "int8, aligned, plain torch": f"{BF16} {TORCH_INT8}",
        "int8, aligned, plain torch, `--exact`": f"{BF16} {TORCH_INT8} --exact=True",
        "w4a16": f"{BF16} --rollout_quant=w4a16",
        "w4a16, aligned": f"{BF16} --rollout_quant=w4a16 --learner_quant=aligned",
        "fp8": f"{BF16} --rollout_quant=fp8",
        "fp8, aligned": f"{BF16} --rollout_quant=fp8 --learner_quant=aligned",
        "fp8 KV cache": f"{BF16} --kv_cache_dtype=fp8",
        "bfloat16, head in float32": f"{BF16} --lm_head_fp32=True",
        "float16": "--dtype=float16 --rollout_dtype=float16",
        "bfloat16, temperature 0.4": f"{BF16} --temperature=0.4",
        "bfloat16, temperature 0.7": f"{BF16} --temperature=0.7",
        "bfloat16, temperature 1.5": f"{BF16} --temperature=1.5",
        "int8, temperature 0.4": f"{BF16} --rollout_quant=int8 --temperature=0.4",
        "int8, temperature 0.7": f"{BF16} --rollout_quant=int8 --temperature=0.7",
        "int8, temperature 1.5": f"{BF16} --rollout_quant=int8 --temperature=1.5",
    },
    QWEN: {
        "bfloat16": BF16,
        "float32": "--dtype=float32 --rollout_dtype=float32",
        "float16": "--dtype=float16 --rollout_dtype=float16",
        "int8": f"{BF16} --rollout_quant=int8",
        "int8, aligned": f"{BF16} --rollout_quant=int8 --learner_quant=aligned",
        "w4a16": f"{BF16} --rollout_quant=w4a16",
        "w4a16, aligned": f"{BF16} --rollout_quant=w4a16 --learner_quant=aligned",
        "fp8": f"{BF16} --rollout_quant=fp8",
        "fp8, aligned": f"{BF16} --rollout_quant=fp8 --learner_quant=aligned",
        "fp8 KV cache": f"{BF16} --kv_cache_dtype=fp8",
        "bfloat16, head in float32": f"{BF16} --lm_head_fp32=True",
        "bfloat16, temperature 0.4": f"{BF16} --temperature=0.4",
        "bfloat16, temperature 0.7": f"{BF16} --temperature=0.7",
        "bfloat16, temperature 1.5": f"{BF16} --temperature=1.5",
        "0.7 / 0.8 / 20, set off": f"{QWEN_SAMPLING} --keep_sampling_mask=off",
        "0.7 / 0.8 / 20, recomputed": f"{QWEN_SAMPLING} --keep_sampling_mask=recompute",
        "0.7 / 0.8 / 20, replayed": f"{QWEN_SAMPLING} --keep_sampling_mask=replay",
    },
    PAIR: {"bfloat16": BF16},
}
# what a row keeps of probe's report
KEPT = (
    *(
        "responses",
        "tokens",
        "length",
        "kl",
        "ratio_mean",
        "token_ess",
        "seq_ess",
        "max_mismatch",
    ),
    *(
        "mean_mismatch",
        "largest_mismatch",
        "above_half",
        "cut_fraction",
        "by_prefix",
    ),
    "by_length",
)


@dataclass(frozen=True)
class AtlasFlags:
    """The atlas"""

    task: str = ""
    """File of problems in a format of train.py's --task."""
    draw: bool = False
    """Run nothing: write the table and the plot from the JSON file."""
    only: str = ""
    """Measure the rows with this text in "MODEL: ROW" only."""


def numbers(row: dict) -> list[str]:
    """The cells of a row of the table."""
    return [
        f"{row['kl']:.2g}",
        f"{row['mean_mismatch']:.2g}",
        f"{row['largest_mismatch']:.2g}",
        f"{100 * row['above_half']:.0f}",
        f"{row['token_ess']:.3f}",
        f"{row['seq_ess']:.2g}",
    ]


def table(data: dict) -> str:
    """The table of the page: a line for each model and each row."""
    head = [
        "",
        "KL",
        "mean gap",
        "largest gap",
        "responses with a gap above 0.5, %",
        "ESS of token weights",
        "ESS of response weights",
    ]
    lines = []
    for group, rows in ROWS.items():
        lines.append([f"**{group}**"])
        measured = data["rows"].get(group, {})
        lines += [
            [label, *numbers(measured[label])] for label in rows if label in measured
        ]
    return sweep.markdown(head, lines)


def draw(data: dict) -> None:
    """Plot the KL of each row, the ESS of response weights by length, the KL by temperature, and the largest gaps of
    long and of short responses."""
    fig, axes = sweep.pyplot().subplots(
        1, 4, figsize=(17, 5.8), layout="constrained", width_ratios=(4, 4, 2, 3)
    )
    points = [
        (group, label, data["rows"][group][label])
        for group, rows in ROWS.items()
        for label in rows
        if label in data["rows"].get(group, {})
    ]
    colour = dict(zip(ROWS, sweep.COLOURS, strict=False))
    names = [f"{group}: {label}" for group, label, _ in points]
    for y, (group, _, row) in enumerate(points):
        axes[0].barh(y, row["kl"], color=colour[group])
        axes[0].plot(max(row["floor"]["k1"], row["floor"]["kl"], 1e-9), y, "k|", ms=12)
    axes[0].set_yticks(range(len(points)), names, fontsize=7)
    axes[0].invert_yaxis()
    axes[0].set_xscale("log")
    axes[0].set_xlabel("KL(inf || ref), nats a token; mark: noise floor", fontsize=8)
    drawn = [
        p for p in points if p[1] in ("bfloat16", "int8", "int8, aligned", "w4a16")
    ]
    marks = {"bfloat16": "-", "int8": "--", "int8, aligned": "-.", "w4a16": ":"}
    for group, label, row in drawn:
        name, line = f"{group}: {label}", dict(color=colour[group], ls=marks[label])
        prefix = [
            p for p in row["by_prefix"] if p["responses"] >= 8 and p["clamped"] <= 0.5
        ]  # a clamped ESS is misleading
        axes[1].plot(
            [p["tokens"] for p in prefix],
            [p["ess"] for p in prefix],
            label=name,
            **line,
        )
    axes[1].set_xscale("log")
    axes[1].set_xlabel("tokens of a response", fontsize=8)
    axes[1].set_title("ESS of response weights", fontsize=9)
    axes[1].legend(fontsize=7, ncol=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    for name, line in (("bfloat16", "-"), ("int8", "--")):
        kls = {1.0: data["rows"][SMOL][name]["kl"]}
        for t in (0.4, 0.7, 1.5):
            row = data["rows"][SMOL].get(f"{name}, temperature {t}")
            kls |= {t: row["kl"]} if row else {}
        style = dict(color=colour[SMOL], ls=line, marker=".")
        axes[2].plot(sorted(kls), [kls[t] for t in sorted(kls)], label=name, **style)
    axes[2].set_yscale("log")
    axes[2].set_xlabel("temperature", fontsize=8)
    axes[2].set_title(f"KL(inf || ref), {SMOL}", fontsize=9)
    axes[2].legend(fontsize=7)
    draw_long(axes[3], data.get("long", {}))
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.tick_params(labelsize=8)
    sweep.save(fig, sweep.RESULTS / "atlas.png")


def draw_long(ax, long: dict) -> None:
    """Plot the records of results/long.py: the largest gap, mean and standard error over prompts."""
    for colour, (name, row) in zip(sweep.COLOURS, long.items(), strict=False):
        keys = ("one short response", "all short responses", "long response")
        values = [row[key] for key in keys] + row["its pieces"]
        mean, error = zip(*values, strict=True)
        ax.errorbar(range(len(values)), mean, error, fmt="o", color=colour, label=name)
    pieces = [f"piece {n}" for n in range(1, 6)]
    names = ["short", "five short", "long", *pieces]
    ax.set_xticks(range(len(names)), names, rotation=60)
    ax.set_yscale("log")
    ax.set_title(f"largest gap, {SMOL}", fontsize=9)
    ax.legend(fontsize=7)


def main() -> None:
    flags = parse_flags(AtlasFlags, None, __doc__.strip())
    data = sweep.load("atlas")
    todo = [
        (group, label, text)
        for group, rows in ROWS.items()
        for label, text in rows.items()
        if label not in data["rows"].get(group, {})
        and flags.only in f"{group}: {label}"
    ]
    if not flags.draw and todo:
        need(
            flags.task, "--task is missing: name a file with problems, such as GSM8K's"
        )
        for group, label, text in tqdm(todo, desc="rows"):
            report = sweep.probed(f"{POLICY[group]} --task={flags.task} {text}")
            floor = {
                key: max(row[key] for row in report["floor"])
                for key in ("k1", "kl", "mean")
            }
            row = {key: report[key] for key in KEPT} | {"floor": floor}
            data = sweep.load("atlas")  # another process may have added rows
            data["rows"].setdefault(group, {})[label] = row
            sweep.store("atlas", data)
    sweep.rewrite(sweep.RESULTS / "atlas.md", table(data))
    draw(data)
    print(table(data))


if __name__ == "__main__":
    run_command(main)
