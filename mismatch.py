"""The probe: how far is the law that samples from the policy that learns, and which correction can bridge it? No training.

    python eval.py --mismatch --model=FOLDER --rollout_dtype=bfloat16 --lm_head_fp32=True          # engine against learner
    python eval.py --mismatch --model=base:policy --actor=base:actor                               # another model samples
    python eval.py --mismatch --model=FOLDER --rollout_quant=int8 --learner_quant=aligned          # low bits, with a learner that follows
    python eval.py --mismatch --model=FOLDER --temperature=0.7 --top_p=0.8 --keep_sampling_mask=off

The engine samples, the learner scores the same tokens, and everything else is arithmetic on p_inf and p_ref: per response the largest
and the mean |p_inf - p_ref| against its length (TIS text); KL, chi2, ESS of token and sequence weights and the length T_max = clamp / KL
at which the latter end (Mismatch Praxis, section 4); and for each correction whether it can work at these lengths, and why.

The control (TIS text, "Longer Response, Larger Max Gap"): is it the length of a response that makes its largest gap grow, or only
the number of tokens? One long response against k short ones of the same total, and against the long one's own beginning.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np

import config
import metrics
import objectives
import sampling
from sampling import Sampling
from batching import collate
from learner import Comm, Learner
from metrics import Sums
from model import Needs
from rollout import Rollout, request_seed
from tasks import encode, grade_all
from run import load_model

PIECES = 4  # the control: one long response against so many short ones
EDGES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]


def learner_config(cfg, folder: str) -> config.Config:
    """The training configuration in which the learner scores: no correction, every response one batch."""
    shared = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.name in config.FIELDS}
    return config.resolve(
        config.Config(
            **{
                **shared,
                "objective": "none",
                "model": folder,
                "actor": "none",
                "group_size": cfg.samples,
                "train_batch": cfg.problems * cfg.samples,
                "rollout_batch": cfg.problems * cfg.samples,
                "out": "none",
            }
        ),
        world=1,
    )


def rollouts(engine, task, tokenizer, indices, samples: int, law, kept: int, key: str) -> list[Rollout]:
    """Graded groups of the held-out problems `indices`, sampled by the engine."""
    problems = [task.problem("test", i) for i in indices]
    prompts = [np.array(encode(tokenizer, p), np.int32) for p in problems]
    seeds = [[request_seed(key, law.seed, p.id, s) for s in range(samples)] for p in problems]
    groups = engine.generate(prompts, seeds, law, 1, [tokenizer.eos_token_id], kept)
    grade_all(task, tokenizer, problems, groups)
    return [
        Rollout((key, 0, i), p.id, ids, law, "policy", engine.dtype, 0, "", 0.0, 0.0, g)
        for i, (p, ids, g) in enumerate(zip(problems, prompts, groups))
    ]


def score(learner, groups, cfg):
    """(p_inf, p_ref, log r, length, metrics): probabilities and log-ratios are (B, T) arrays, 0 behind a response's end; rollout_corr/* as in training."""
    batch = collate(groups, cfg)
    new = learner.score(batch, Needs(entropy=True))
    stats = objectives.prepare(batch, learner.comm, cfg, {})
    batch = objectives.with_ref(new, batch)
    sums = Sums()
    metrics.observe(sums, new, batch, stats, objectives.loss(new, batch, stats, cfg)[1], cfg)
    on = batch.mask
    p_inf, p_ref, log_r = (
        (x.double() * on).numpy() for x in (batch.logp_inf.exp(), batch.logp_ref.exp(), batch.logp_ref - batch.logp_inf)
    )
    return p_inf, p_ref, log_r, batch.length.numpy(), sums.reduce(learner.comm)


def ess(w) -> float:
    """Effective sample size over the number of samples: (sum w)^2 / (n sum w^2)."""
    w = np.asarray(w, np.float64)
    return float(w.sum() ** 2 / (len(w) * (w**2).sum())) if len(w) and (w**2).sum() > 0 else 0.0


def by_prefix(log_r, length, clamp: float) -> list[dict]:
    """What sequence weights would be if responses ended after t tokens, from all that reach t: their ESS, low-weight and clamped share."""
    total, rows = log_r.cumsum(1), []
    for t in sorted({*(e for e in EDGES if e < length.max()), int(np.quantile(length, 0.9))}):
        reach = length >= t
        s = total[reach, t - 1]
        R = np.exp(s.clip(-clamp, clamp))
        rows.append(
            {
                "tokens": t,
                "responses": int(reach.sum()),
                "ess": ess(R),
                "low_weight": float((R < 0.25).mean()),
                "clamped": float((np.abs(s) >= clamp).mean()),
                "mean_log_weight": float(s.mean()),
            }
        )
    return rows


def by_length(gap, length, log_r) -> list[dict]:
    """Largest and mean gap of a response, in up to eight buckets of length with about as many responses each."""
    rows, below = [], int(length.min()) - 1
    top, mean = gap.max(1), gap.sum(1) / length
    for edge in np.unique(np.quantile(length, np.linspace(0, 1, 9)[1:], method="lower")).tolist():
        inside = (length > below) & (length <= edge)
        if inside.any():
            rows.append(
                {
                    "from": below + 1,
                    "mean_length": float(length[inside].mean()),
                    "to": int(edge),
                    "responses": int(inside.sum()),
                    "max_mismatch": float(top[inside].mean()),
                    "mean_mismatch": float(mean[inside].mean()),
                    "kl": float(-log_r[inside].sum() / length[inside].sum()),
                }
            )
            below = edge
    return rows


def control(gap, length, short_gap, short_length, piece: int) -> dict | None:
    """Largest gap in: one short response, PIECES short ones, the long one's first piece, the long one; only where all are full."""
    whole = short_length.reshape(-1, PIECES) >= piece
    full = np.flatnonzero((length >= PIECES * piece) & whole.all(1))
    if len(full) < 2:
        return None
    shorts = short_gap.reshape(len(length), PIECES, -1)[full, :, :piece].max(2)
    of = lambda x: [float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x)))]
    return {
        "prompts": len(full),
        "piece": piece,
        "one_short": of(shorts[:, 0]),
        f"{PIECES}_short": of(shorts.max(1)),
        "long_beginning": of(gap[full, :piece].max(1)),
        "long": of(gap[full, : PIECES * piece].max(1)),
    }


def verdicts(log_r, length, m: dict, cfg) -> list[dict]:
    """Can each correction work at these lengths? Rules of thumb, each with its number."""
    clamp, C, C_seq = cfg.log_ratio_clamp, objectives.BOUNDS["tis"]["is_cap"], objectives.BOUNDS["seq_tis"]["is_cap"]
    on = np.arange(log_r.shape[1])[None] < length[:, None]
    r = np.exp(log_r.clip(-clamp, clamp))[on]
    total, n = log_r.sum(1), float(length.mean())
    R, geo = np.exp(total.clip(-clamp, clamp)), np.exp((total / length).clip(-clamp, clamp))
    kl, longest = m["kl"], int(np.quantile(length, 0.95))
    low, high = (objectives.BOUNDS["geo_rs"][k] for k in ("rs_low", "rs_high"))
    kept, inside = R <= objectives.BOUNDS["seq_mis"]["rs_high"], (geo >= low) & (geo <= high)
    biased = abs(r.mean() - 1) > 0.005 and abs(r.mean() - 1) > 4 * r.std() / math.sqrt(len(r))
    clamped = float((np.abs(total) >= clamp).mean())
    reach = f"longest x KL = {longest} x {kl:.2g} = {longest * kl:.2g} of the clamp's {clamp:g}"

    def row(name, ok, why):
        return {"correction": name, "viable": bool(ok), "why": why}

    rows = [
        row("none", n * kl < 0.1, f"the laws of a whole response are {n * kl:.2g} nats apart (KL x {n:.0f} tokens)"),
        row(
            "tis",
            ess(r.clip(max=C)) > 0.5 and not biased,
            f"ESS of min(r, {C:g}) is {ess(r.clip(max=C)):.2f}; no length enters",
        ),
        row(
            "jackpot",
            np.minimum(1, r).mean() > 0.8 and not biased,
            f"{100 * np.minimum(1, r).mean():.1f} % of the tokens would be accepted; no length enters",
        ),
    ]
    fits = longest * kl < clamp and clamped < 0.01
    for name, w, more in (
        ("seq_is", R, ""),
        (
            "seq_tis",
            R.clip(max=C_seq),
            f"; {100 * (R < 1 / C_seq).mean():.0f} % of the responses weigh less than 1/{C_seq:g}",
        ),
    ):
        rows.append(
            row(
                name,
                fits and ess(w) > 0.5 and not biased,
                f"ESS of the responses is {ess(w):.2f}"
                + (" and false: they are clamped" if clamped > 0.5 else "")
                + more
                + "; "
                + reach,
            )
        )
    rows.append(
        row(
            "seq_mis",
            fits and kept.mean() > 0.5 and ess(R * kept) > 0.5 and not biased,
            f"keeps {100 * kept.mean():.0f} % of the responses, ESS with the dropped {ess(R * kept):.2f}",
        )
    )
    rows.append(
        row(
            "geo_rs",
            inside.mean() > 0.5,
            f"keeps {100 * inside.mean():.0f} % at [{low:g}, {high:g}]; nine in ten lie in [{np.quantile(geo, 0.05):.4g}, {np.quantile(geo, 0.95):.4g}]",
        )
    )
    if biased:
        for x in rows[1:]:
            x["why"] += (
                f"; but the mean of r is {r.mean():.3f}, not 1: the learner scores another law than was sampled (--keep_sampling_mask, --logprobs_mode, --temperature)"
            )
    return rows


def probe(cfg, folder: str, actor: str | None, task, tokenizer, n: int, longest: int, make_engine) -> dict:
    """Sample, score, print, draw; returns what is printed as a dict. make_engine: engines.make_engine."""
    import torch

    train_cfg, law = learner_config(cfg, folder), Sampling.of(cfg)
    vocabulary = load_config(folder).vocab_size
    config.check_models(train_cfg, folder, actor)
    kept = sampling.max_allowed(train_cfg, vocabulary)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = make_engine(cfg, actor or folder, longest + cfg.max_tokens, max(1, kept), device)
    learner = Learner(load_model(folder), None, train_cfg, Comm(device), device)
    groups = rollouts(engine, task, tokenizer, range(n), cfg.samples, law, kept, "probe")
    p_inf, p_ref, log_r, length, m = score(learner, groups, train_cfg)
    gap, clamp = np.abs(p_inf - p_ref), cfg.log_ratio_clamp
    first = length[:: cfg.samples]  # the control: each prompt's first response against PIECES short ones
    piece = max(1, int(np.median(first)) // PIECES)
    short = rollouts(
        engine, task, tokenizer, range(n), PIECES, dataclasses.replace(law, max_tokens=piece), kept, "short"
    )
    s_inf, s_ref, _, s_length, _ = score(learner, short, dataclasses.replace(train_cfg, group_size=PIECES))
    wide = max(piece, s_inf.shape[1])
    short_gap = np.zeros((n * PIECES, wide))
    short_gap[:, : s_inf.shape[1]] = np.abs(s_inf - s_ref)
    engine.close()
    chi2, k1, k3 = (m[f"rollout_corr/{x}"] for x in ("chi2_token", "kl", "k3_kl"))
    m["kl"] = max(k1, k3)  # where tokens were cut k3 is too small; k1 alone can be negative
    out = {
        "model": cfg.model,
        "sampler": cfg.actor if actor else cfg.model,
        "engine": f"{cfg.rollout} {cfg.rollout_dtype}"
        + (f" {cfg.rollout_quant}" if cfg.rollout_quant != "none" else ""),
        "learner": cfg.dtype + (f" {cfg.learner_quant}" if cfg.learner_quant != "none" else ""),
        "lm_head_fp32": cfg.lm_head_fp32,
        "sampling": {
            k: getattr(cfg, k)
            for k in ("temperature", "top_p", "top_k", "min_p", "keep_sampling_mask", "logprobs_mode")
        },
        "vocabulary": vocabulary,
        "responses": len(length),
        "tokens": int(length.sum()),
        "length": {"mean": float(length.mean()), "95 %": int(np.quantile(length, 0.95)), "max": int(length.max())},
        "kl": m["kl"],
        "k1_kl": k1,
        "k3_kl": k3,
        "chi2_token": chi2,
        "chi2_seq": m["rollout_corr/chi2_seq"],
        "ratio_mean": m["rollout_corr/ratio_mean"],
        "token_ess": ess(np.exp(log_r.clip(-clamp, clamp))[np.arange(log_r.shape[1])[None] < length[:, None]]),
        "seq_ess": m["rollout_corr/seq_eff_sample_size"],
        "seq_clamped": m["rollout_corr/seq_clamped_fraction"],
        "max_mismatch": m["rollout_corr/max_mismatch"],
        "mean_mismatch": m["rollout_corr/mean_mismatch"],
        "cut_fraction": m.get("rollout_corr/cut_fraction", 0.0),
        "reward": m["reward"],
        "reward_weighted": m["rollout_corr/reward_weighted"],
        "t_max": clamp / m["kl"] if m["kl"] > 0 else math.inf,
        "t_half": math.log(2) / math.log1p(chi2) if chi2 > 0 else math.inf,
        "by_length": by_length(gap, length, log_r),
        "by_prefix": by_prefix(log_r, length, clamp),
        "control": control(gap[:: cfg.samples], first, short_gap, s_length, piece),
        "verdicts": verdicts(log_r, length, m, cfg),
    }
    print(text(out, clamp))
    picture = Path(cfg.out).with_suffix(".png") if cfg.out else Path("out/mismatch.png")
    print(f"figure: {draw(out, p_inf, p_ref, log_r, length, clamp, picture)}")
    return out


def load_config(folder: str):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Text and figure
# ---------------------------------------------------------------------------------------------------------------------


def text(o: dict, clamp: float) -> str:
    """The report."""
    s, n = o["sampling"], o["length"]
    lines = [
        f"{o['sampler']} in {o['engine']} samples, {o['model']} in {o['learner']} learns"
        + (", heads in float32" if o["lm_head_fp32"] else ""),
        f"   temperature {s['temperature']:g}, top_p {s['top_p']:g}, top_k {s['top_k']}, min_p {s['min_p']:g}, kept sets {s['keep_sampling_mask']}, {s['logprobs_mode']} log-probabilities",
        f"   {o['responses']} responses, {o['tokens']:,} tokens; length {n['mean']:.1f} in the mean, {n['95 %']} at 95 %, {n['max']} at most",
        "",
        f"|p_inf - p_ref|    {o['max_mismatch']:.3g} largest of a response, {o['mean_mismatch']:.3g} mean",
        f"KL(inf || ref)     {o['k1_kl']:.3g} (k1), {o['k3_kl']:.3g} (k3) nats a token;   mean of r = p_ref / p_inf: {o['ratio_mean']:.4f}"
        + (
            f";   {100 * o['cut_fraction']:.2f} % of the sampled tokens cut by the learner" if o["cut_fraction"] else ""
        ),
        f"chi2               {o['chi2_token']:.3g} a token, {o['chi2_seq']:.3g} a response",
        f"ESS                {o['token_ess']:.3f} of the tokens, {o['seq_ess']:.3f} of the responses"
        + (" (false: they are clamped)" if o["seq_clamped"] > 0.5 else ""),
        f"T_max              {o['t_max']:,.0f} tokens: clamp / KL, where sequence weights end"
        + (f"; their ESS is halved every {o['t_half']:,.0f}, by chi2" if o["t_half"] < math.inf else ""),
        f"reward             {o['reward']:.3f} earned by the sampler, {o['reward_weighted']:.3f} estimated for the learner",
        "",
        "length          responses   largest gap    mean gap    KL a token",
    ]
    lines += [
        f"{r['from']:5d} - {r['to']:<7d} {r['responses']:9d}   {r['max_mismatch']:11.3g} {r['mean_mismatch']:11.3g} {r['kl']:13.3g}"
        for r in o["by_length"]
    ]
    lines += ["", "after tokens    responses    ESS of R    R < 1/4    clamped"]
    lines += [
        f"{r['tokens']:12d} {r['responses']:12d} {r['ess']:11.3f} {100 * r['low_weight']:8.1f} % {100 * r['clamped']:8.1f} %"
        for r in o["by_prefix"]
    ]
    c = o["control"]
    lines += [
        "",
        "length or number of tokens? largest gap in"
        if c
        else "length or number of tokens? too few responses are long enough to tell",
    ]
    if c:
        k = c["piece"]
        for name, label in (
            ("one_short", f"one response of {k}"),
            (f"{PIECES}_short", f"{PIECES} responses of {k}"),
            ("long_beginning", f"the first {k} of one of {PIECES * k}"),
            ("long", f"all {PIECES * k} of it"),
        ):
            lines.append(f"   {label:32s} {c[name][0]:.3g} +- {c[name][1]:.2g}")
    lines += ["", "can it work at these lengths?"]
    return "\n".join(
        lines + [f"   {'yes' if v['viable'] else 'no ':3s}  {v['correction']:8s} {v['why']}" for v in o["verdicts"]]
    )


def draw(o, p_inf, p_ref, log_r, length, clamp: float, path: Path) -> Path:
    """Six panels: the probabilities, the gaps by length, the control, sequence weights by length, their ESS by prefix, token ratios."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rng, blue, orange = np.random.default_rng(0), "#1f6fb4", "#e07b28"
    on = np.arange(log_r.shape[1])[None] < length[:, None]
    gap, jitter = np.abs(p_inf - p_ref), length + rng.uniform(-0.3, 0.3, len(length))
    fig, ((a, b, c), (d, e, f)) = plt.subplots(2, 3, figsize=(15, 8.4))
    pick = rng.permutation(int(on.sum()))[:5000]
    a.scatter(p_inf[on][pick], p_ref[on][pick], s=5, alpha=0.25, color=blue, linewidths=0)
    a.plot([0, 1], [0, 1], color="grey", lw=0.8)
    a.set(xlabel="p_inf: the sampler's", ylabel="p_ref: the learner's", title="probability of each sampled token")
    b.scatter(jitter, gap.max(1).clip(1e-9), s=8, alpha=0.4, color=orange, linewidths=0, label="largest of a response")
    b.scatter(
        jitter, (gap.sum(1) / length).clip(1e-9), s=8, alpha=0.4, color=blue, linewidths=0, label="mean of a response"
    )
    for key, color in (("max_mismatch", orange), ("mean_mismatch", blue)):
        b.plot(
            [r["mean_length"] for r in o["by_length"]], [r[key] for r in o["by_length"]], "o-", color=color, mec="white"
        )
    b.set(yscale="log", xlabel="tokens of the response", ylabel="|p_inf - p_ref|", title="gap by length")
    b.legend(fontsize=8)
    if o["control"]:
        k = o["control"]["piece"]
        names = {
            "one_short": f"one of {k}",
            f"{PIECES}_short": f"{PIECES} of {k}",
            "long_beginning": f"first {k}\nof {PIECES * k}",
            "long": f"all {PIECES * k}",
        }
        c.bar(
            list(names.values()),
            [o["control"][x][0] for x in names],
            yerr=[o["control"][x][1] for x in names],
            capsize=4,
            color=[blue, blue, orange, orange],
        )
    else:
        c.text(0.5, 0.5, "too few long responses", ha="center", transform=c.transAxes, color="grey")
    c.set(ylabel="largest |p_inf - p_ref|", title="length, or number of tokens?")
    total = log_r.sum(1)
    d.scatter(jitter, total, s=8, alpha=0.5, color=blue, linewidths=0)
    t = np.arange(1, length.max() + 1)
    d.plot(t, -t * o["kl"], color=orange, label="- T KL")
    if np.abs(total).max() > clamp / 4:
        for y in (-clamp, clamp):
            d.axhline(y, color="crimson", lw=0.8, ls="--")
    for y in (-math.log(4), math.log(4)):
        d.axhline(y, color="grey", lw=0.8, ls=":")
    d.set(
        xlabel="tokens of the response",
        ylabel="log R = sum log r",
        title="sequence weights (dotted: 1/4 and 4; dashed: clamp)",
    )
    d.legend(fontsize=8)
    rows = o["by_prefix"]
    e.plot([r["tokens"] for r in rows], [r["ess"] for r in rows], "o-", color=blue, label="ESS of R, measured")
    e.plot(t, (1 + max(o["chi2_token"], 0)) ** -t.astype(float), color=blue, lw=0.8, ls="--", label="(1 + chi2)^-T")
    e.plot([r["tokens"] for r in rows], [r["low_weight"] for r in rows], "o-", color=orange, label="share with R < 1/4")
    e.plot(
        [r["tokens"] for r in rows],
        [r["clamped"] for r in rows],
        "o-",
        color="crimson",
        ms=3,
        label="share at the clamp",
    )
    e.set(xlabel="if responses ended after so many tokens", ylim=(-0.03, 1.05), title="sequence weights by length")
    e.legend(fontsize=8)
    x = log_r[on]
    edge = max(1e-7, float(np.quantile(np.abs(x), 0.999)))
    f.hist(x.clip(-edge, edge), bins=81, color=blue)
    f.set(
        yscale="log",
        xlabel="log r = log p_ref - log p_inf",
        ylabel="tokens",
        title=f"token log-ratios (mean of r: {o['ratio_mean']:.4f})",
    )
    for ax in fig.axes:
        ax.grid(alpha=0.3)
    fig.suptitle(
        f"{Path(o['sampler']).name} ({o['engine']}) samples, {Path(o['model']).name} ({o['learner']}) learns: KL {o['kl']:.3g}, T_max {o['t_max']:,.0f}"
    )
    fig.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)
    plt.close(fig)
    return path
