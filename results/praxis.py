"""Mismatch Praxis in small: three corrections under three ways of sampling, on long responses, with a real mismatch.

    python results/praxis.py            # run what is missing (two at a time), then write results/praxis.md, praxis.png
                                        # and praxis_length.png

configs/long.toml: a small actor samples, 16 updates to a sync, responses of up to 256 tokens whose
length earns a bonus once the answer is right. `default` is the sampling that a model card
recommends (0.7, top_p 0.8, top_k 20), scored on the whole vocabulary as frameworks do; `replay` is
the same within the rollout's own sets of allowed tokens. Then the text's alternatives: Seq-MIS,
Geo-RS, and both. The table's `under its own sampling` evaluates the last checkpoint as it was
trained: same temperature, same truncation.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import sweep

CONFIG = "configs/long.toml"
CARD = dict(temperature=0.7, top_p=0.8, top_k=20)
SAMPLING = {
    "T 1": {},
    "T 0.4": dict(temperature=0.4),
    "default": dict(CARD, keep_sampling_mask="off"),
    "default, replay": CARD,
}
CORRECTIONS = {"none": "none", "Token-TIS": "tis", "Seq-TIS": "seq_tis"}
ROWS = {}
for how, sampling in SAMPLING.items():
    ROWS |= {f"{c}, {how}": dict(objective=objective, **sampling) for c, objective in CORRECTIONS.items()}
ROWS |= {
    "Seq-MIS, T 1": dict(objective="seq_mis"),
    "Geo-RS, T 1": dict(objective="geo_rs"),
    "Geo-RS-Seq-TIS, T 1": dict(objective="geo_rs_seq_tis"),
}
SEEDS = {f"{c}, T 1": 3 for c in CORRECTIONS}
SHOWN = {
    "reward": "reward of the responses,\nwith the length bonus",
    "response_length": "tokens of a response",
    "rollout_corr/k3_kl": "KL(inf || ref) a token",
    "rollout_corr/rollout_is_eff_sample_size": "ESS of the weights\nthat train",
    "rollout_corr/low_weight_fraction": "share of responses\nwith R < 1/4",
    "rollout_corr/seq_clamped_fraction": "share of responses\nat the clamp",
    "rollout_corr/chi2_seq": "chi2 of R",
}
SCALES = {"rollout_corr/k3_kl": "log", "rollout_corr/chi2_seq": "symlog"}
LENGTHS = (16, 32, 64, 128, 256)


def own_sampling(record: dict, before: bool = False) -> dict:
    """What eval.py says of the last checkpoint or of the base model, measured once: pass@1, and the mean reward.

    Temperature and truncation are those of the run (`eval/policy` is at temperature 1)."""
    c = record["config"]
    settings = [f"--{k}={c[k]}" for k in ("temperature", "top_p", "top_k", "max_tokens")]
    settings.append("--arith=explain=224")
    model, name = record["command"].split("--out=")[1], record["name"]
    if before:
        model, name = "base:policy", f"before-t-{c['temperature']}-p-{c['top_p']}"
    path = sweep.RESULTS / "runs" / Path(CONFIG).stem / "own_sampling" / f"{name}.json"
    if not path.is_file():
        problems = ["--rollout=hf", "--problems=1024", "--samples=1", "--k=1"]
        argv = [sys.executable, "eval.py", f"--model={model}", *problems, *settings, f"--out={path}"]
        subprocess.run(argv, cwd=sweep.ROOT, check=True, capture_output=True)
        add_reward(path)
    return json.loads(path.read_text(encoding="utf-8"))


def add_reward(path: Path) -> None:
    """The mean reward, with the length bonus, from the responses that eval.py left; they are not kept."""
    responses = path.with_suffix(".responses.jsonl")
    rows = [json.loads(line) for line in responses.read_text(encoding="utf-8").splitlines()[1:]]
    mean, error = sweep.mean_se([sum(row["rewards"]) / len(row["rewards"]) for row in rows])
    seen = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**seen, "reward": mean, "reward_se": error}, indent=1) + "\n", encoding="utf-8")
    responses.unlink()


def over_seeds(records: list[dict], key: str, before: bool = False) -> tuple[float, float]:
    """A number of `own_sampling` in percent, with its error over seeds, or over problems where there is one seed."""
    each = [own_sampling(r, before) for r in (records[:1] if before else records)]
    return sweep.mean_se([100 * x.get(key, math.nan) for x in each], 100 * each[0].get(f"{key}_se", math.nan))


COLUMNS = {
    "seeds": sweep.COLUMNS["seeds"],
    "reward": lambda rs: sweep.number(sweep.tail(rs, "reward")),
    "policy pass@1, %": sweep.COLUMNS["policy pass@1, %"],
    "under its own sampling, %": lambda rs: sweep.percent(over_seeds(rs, "mean@1")),
    "before training": lambda rs: sweep.percent(over_seeds(rs, "mean@1", before=True)),
    "tokens": lambda rs: sweep.number(sweep.tail(rs, "response_length")),
    "KL": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/k3_kl")),
    "T_max": lambda rs: sweep.number(20 / sweep.tail(rs, "rollout_corr/k3_kl")),
    "mean of r": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/ratio_mean")),
    "ESS": sweep.COLUMNS["ESS"],
    "ESS of R": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/seq_eff_sample_size")),
    "chi2 of R": lambda rs: sweep.number(sweep.tail(rs, "rollout_corr/chi2_seq")),
    "R < 1/4, %": lambda rs: sweep.number(100 * sweep.tail(rs, "rollout_corr/low_weight_fraction")),
    "rejected, %": lambda rs: sweep.number(100 * sweep.tail(rs, "rollout_corr/rollout_rs_seq_masked_fraction")),
    "at the clamp, %": lambda rs: sweep.number(100 * sweep.tail(rs, "rollout_corr/seq_clamped_fraction")),
}


def by_sampling(got: sweep.Got) -> None:
    """Praxis, Figures 1, 2 and 4: a column for each way of sampling, a line for each correction."""
    size = (3.6 * len(SAMPLING), 1.9 * len(SHOWN))
    plt = sweep.pyplot()
    fig, axes = plt.subplots(
        len(SHOWN), len(SAMPLING), figsize=size, sharex=True, sharey="row", layout="constrained", squeeze=False
    )
    for n, (column, how) in enumerate(zip(axes.T, SAMPLING, strict=True)):
        labels = [label for label in ROWS if label in got and label.partition(", ")[2] == how]
        styles = sweep.styles_of(labels, (f"Token-TIS, {how}",))
        for ax, (key, title) in zip(column, SHOWN.items(), strict=True):
            for label in labels:
                sweep.curve(ax, label.partition(", ")[0], got[label], key, smooth=8, **styles[label])
            ax.grid(alpha=0.3)
            ax.tick_params(labelsize=8)
            ax.set_yscale(SCALES.get(key, "linear"))
            if n == 0:
                ax.set_ylabel(title, fontsize=8)
        column[0].set_title(how)
        column[-1].set_xlabel("updates")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    sweep.save(fig, sweep.RESULTS / "praxis.png")


def by_length(got: sweep.Got) -> None:
    """Praxis, Figures 3 and 5: low-weight share by length, and response length against T_max."""
    fig, (left, right) = sweep.pyplot().subplots(1, 2, figsize=(11, 4), layout="constrained")
    for how, colour in zip(SAMPLING, sweep.COLOURS, strict=False):
        records = [r for c in CORRECTIONS for r in got.get(f"{c}, {how}", [])]
        shares = [100 * sweep.tail(records, f"rollout_corr/low_weight/{n}", 1.0) for n in LENGTHS]
        left.plot(range(len(LENGTHS)), shares, "o-", color=colour, label=how)  # a NaN leaves a gap
        for r in got.get(f"Token-TIS, {how}", [])[:1]:
            kl = sweep.running_mean(r["columns"]["rollout_corr/k3_kl"], 8)
            lengths = sweep.running_mean(r["columns"]["response_length"], 8)
            right.plot(r["updates"], lengths, color=colour, label=how)
            right.plot(r["updates"], [20 / k for k in kl], color=colour, ls="--", lw=0.9)
    left.set(xlabel="tokens of the response", ylabel="%", title="responses with R < 1/4 (all three corrections)")
    left.set_xticks(range(len(LENGTHS)), ["1-16", *(f"{n // 2 + 1}-{n}" for n in LENGTHS[1:])])
    right.set(xlabel="updates", title="Token-TIS: length, and T_max = 20 / KL (dashed)")
    for ax in (left, right):
        ax.grid(alpha=0.3)
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    sweep.save(fig, sweep.RESULTS / "praxis_length.png")


def low_weights(got: sweep.Got) -> str:
    """The left half of praxis_length.png as a table."""
    head = ["responses with R < 1/4, %, by length", "1-16", *(f"{n // 2 + 1}-{n}" for n in LENGTHS[1:])]
    rows = []
    for how in SAMPLING:
        records = [r for c in CORRECTIONS for r in got.get(f"{c}, {how}", [])]
        shares = [100 * sweep.tail(records, f"rollout_corr/low_weight/{n}", 1.0) for n in LENGTHS]
        rows.append([how, *map(sweep.number, shares)])
    return "## Weight and length (all three corrections, all updates)\n\n" + sweep.markdown(head, rows)


def study(flags):
    got = sweep.run(ROWS, SEEDS, flags.draw, flags.jobs, config=CONFIG)
    sweep.page("praxis", sweep.table("The runs", got, COLUMNS), low_weights(got))
    by_sampling(got)
    by_length(got)


if __name__ == "__main__":
    sweep.main(study, __doc__)
