"""Mismatch Praxis in small: three corrections under three ways of sampling, on long responses, with a mismatch that is real.

    python results/praxis.py            # run what is missing (two at a time), then results/praxis.md, results/praxis.png, results/praxis_length.png

configs/long.toml: a small actor samples, 16 updates to a sync, responses of up to 256 tokens whose length earns a bonus once the
answer is right. `default` is the sampling that a model card recommends (0.7, top_p 0.8, top_k 20), scored on the whole vocabulary as
frameworks do; `replay` is the same with the rollout's kept sets. Then the text's alternatives: Seq-MIS, Geo-RS, and both. The table's `under
its own law` evaluates the last checkpoint as it was trained: same temperature, same truncation.
"""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sweep

CARD = dict(temperature=0.7, top_p=0.8, top_k=20)
SAMPLING = {
    "T 1": {},
    "T 0.4": dict(temperature=0.4),
    "default": dict(CARD, keep_sampling_mask="off"),
    "default, replay": CARD,
}
CORRECTIONS = {"none": "none", "Token-TIS": "tis", "Seq-TIS": "seq_tis"}
ROWS = {
    f"{c}, {s}": dict(objective=objective, **law) for s, law in SAMPLING.items() for c, objective in CORRECTIONS.items()
}
ROWS |= {
    "Seq-MIS, T 1": dict(objective="seq_mis"),
    "Geo-RS, T 1": dict(objective="geo_rs"),
    "Geo-RS-Seq-TIS, T 1": dict(objective="geo_rs_seq_tis"),
}
THREE = [f"{c}, T 1" for c in CORRECTIONS]
SHOWN = [
    ("reward of the responses,\nwith the length bonus", "reward"),
    ("tokens of a response", "response_length"),
    ("KL(inf || ref) a token", "rollout_corr/k3_kl"),
    ("ESS of the weights\nthat train", "rollout_corr/rollout_is_eff_sample_size"),
    ("share of responses\nwith R < 1/4", "rollout_corr/low_weight_fraction"),
    ("share of responses\nat the clamp", "rollout_corr/seq_clamped_fraction"),
    ("chi2 of R", "rollout_corr/chi2_seq"),
]


def own_law(record: dict, before: bool = False) -> tuple[float, float]:
    """Pass@1 in percent of the last checkpoint, or of the base model, under the law of the run (`eval/policy` is at temperature 1), and its standard error; measured once."""
    out, c = record["command"].split("--out=")[1], record["config"]
    law = [f"--{k}={c[k]}" for k in ("temperature", "top_p", "top_k", "max_tokens", "task_explain")]
    name = f"before,temperature={c['temperature']},top_p={c['top_p']}" if before else Path(out).name
    path = sweep.RESULTS / "runs" / "long" / "own_law" / f"{name}.json"
    if not path.is_file():
        subprocess.run(
            [
                sys.executable,
                "eval.py",
                f"--model={'base:policy' if before else out}",
                "--rollout=hf",
                "--problems=1024",
                "--samples=1",
                "--k=1",
                *law,
                f"--out={path}",
            ],
            cwd=sweep.ROOT,
            check=True,
            capture_output=True,
        )
    seen = json.loads(path.read_text(encoding="utf-8"))
    return 100 * seen["mean@1"], 100 * seen["mean@1_se"]


def own_laws(records: list[dict]) -> str:
    each = [own_law(r) for r in records]
    return sweep.percent(sweep.mean_se([x for x, _ in each], each[0][1]))


COLUMNS = {
    "seeds": sweep.COLUMNS["seeds"],
    "reward": lambda rs: sweep.number(sweep.tail(rs, "reward")),
    "policy pass@1, %": sweep.COLUMNS["policy pass@1, %"],
    "under its own law, %": own_laws,
    "before training": lambda rs: sweep.percent(own_law(rs[0], before=True)),
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
LENGTHS = (16, 32, 64, 128, 256)


def by_law(got: dict) -> None:
    """Praxis, Figures 1, 2 and 4: a column for each way of sampling, a line for each correction."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(
        len(SHOWN), len(SAMPLING), figsize=(4 * len(SAMPLING), 2.3 * len(SHOWN)), sharex=True, sharey="row"
    )
    for n, (column, law) in enumerate(zip(axes.T, SAMPLING)):
        for ax, (title, key) in zip(column, SHOWN):
            for i, label in enumerate(label for label in got if label.endswith(f", {law}")):
                sweep.curve(ax, label.split(",")[0], got[label], key, smooth=8, color=f"C{i}", lw=1.3)
            ax.grid(alpha=0.3)
            if n == 0:
                ax.set_ylabel(title, fontsize=8)
            if key in ("rollout_corr/k3_kl", "rollout_corr/chi2_seq"):
                ax.set_yscale("log" if key.endswith("kl") else "symlog")
        column[0].set_title(law)
        column[0].legend(fontsize=7)
        column[-1].set_xlabel("updates")
    fig.tight_layout()
    fig.savefig(sweep.RESULTS / "praxis.png", dpi=100)
    plt.close(fig)


def by_length(got: dict) -> None:
    """Praxis, Figures 3 and 5: low-weight share by length, and response length against T_max."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for i, s in enumerate(SAMPLING):
        records = [r for c in CORRECTIONS for r in got.get(f"{c}, {s}", [])]
        share = [
            (k, 100 * y)
            for k, n in enumerate(LENGTHS)
            if (y := sweep.tail(records, f"rollout_corr/low_weight/{n}", 1.0)) == y
        ]
        left.plot(*zip(*share), "o-", color=f"C{i}", label=s)
        for r in got.get(f"Token-TIS, {s}", [])[:1]:
            mean = lambda x: [sum(x[max(0, k - 7) : k + 1]) / len(x[max(0, k - 7) : k + 1]) for k in range(len(x))]
            right.plot(r["updates"], mean(r["columns"]["response_length"]), color=f"C{i}", label=s)
            right.plot(
                r["updates"], [20 / k for k in mean(r["columns"]["rollout_corr/k3_kl"])], color=f"C{i}", ls="--", lw=0.9
            )
    left.set(xlabel="tokens of the response", ylabel="%", title="responses with R < 1/4 (all three corrections)")
    left.set_xticks(range(len(LENGTHS)), ["1-16", *(f"{n // 2 + 1}-{n}" for n in LENGTHS[1:])])
    right.set(xlabel="updates", title="Token-TIS: length, and T_max = 20 / KL (dashed)")
    for ax in (left, right):
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(sweep.RESULTS / "praxis_length.png", dpi=100)
    plt.close(fig)


def main():
    args = sweep.arguments(__doc__)
    got = sweep.run(ROWS, {label: 3 for label in THREE}, args.draw, args.jobs, config="configs/long.toml")
    sweep.table("praxis", got, COLUMNS)
    by_law(got)
    by_length(got)


if __name__ == "__main__":
    main()
