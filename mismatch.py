"""The probe: how far is the sampler from the policy that learns, and which correction can bridge it? No training.

    python eval.py --mismatch --model=FOLDER --rollout_dtype=bfloat16 --lm_head_fp32=True   # engine against learner
    python eval.py --mismatch --model=base:policy --actor=base:actor                        # another model samples
    python eval.py --mismatch --model=FOLDER --rollout_quant=int8 --learner_quant=aligned   # both in low bits
    python eval.py --mismatch --model=FOLDER --temperature=0.7 --top_p=0.8 --keep_sampling_mask=off

The engine samples, the learner scores the same tokens, and everything else is arithmetic on p_inf and p_ref:

  gaps         the largest and the mean |p_inf - p_ref| of a response, against its length (TIS text);
  distances    KL, chi2, the ESS of token and sequence weights, and the length T_max = clamp / KL at which
               sequence weights end (Mismatch Praxis, section 4);
  control      is it the length of a response that makes its largest gap grow, or only the number of tokens? One long
               response against several short ones of the same total, and against the long one's own beginning
               (TIS text, "Longer Response, Larger Max Gap");
  verdicts     for each correction whether it can work at these lengths, and why.

Notation: r = p_ref / p_inf of a token, R = product of r over a response, T = tokens of a response.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import config
import corrections
import metrics
import objectives
import plot
from batching import collate
from checkpoint import load_model
from engines import make_engine
from learner import Comm, Learner
from model import Needs
from rollout import Rollout, request_seed
from run import check_models
from sampling import Sampling, max_allowed
from tasks import encode, grade_all

PIECES = 4  # the control: one long response against so many short ones
EDGES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]  # tokens


@dataclass(frozen=True)
class MismatchFlags:
    """The probe (eval.py --mismatch)"""

    mismatch: bool = False
    """Measure the mismatch between sampler and learner instead of the score."""
    actor: str = ""
    """Another model that samples: a run folder, a checkpoint, a Hugging Face folder or base:actor."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The learner's compute type."""
    log_ratio_clamp: float = config.Config.log_ratio_clamp
    """Log-ratios are clamped to +- this."""
    micro_tokens: int = config.Config.micro_tokens
    """Token budget of one forward."""


@dataclass
class Scored:
    """What engine and learner say of the same sampled tokens. Behind the end of a response every array is 0."""

    p_inf: np.ndarray  # (B, T) probability of each token under the engine that sampled it
    p_ref: np.ndarray  # (B, T) the same under the learner
    log_r: np.ndarray  # (B, T) log p_ref - log p_inf, not clamped
    length: np.ndarray  # (B,)   tokens of each response
    metrics: dict[str, float]  # reward, rollout_corr/*: as train.py logs them

    @property
    def gap(self) -> np.ndarray:
        """|p_inf - p_ref|, (B, T)."""
        return np.abs(self.p_inf - self.p_ref)

    @property
    def exists(self) -> np.ndarray:
        """(B, T) bool: the places that hold a token."""
        return exists(self.log_r, self.length)


@dataclass
class Report:
    """What the probe found. The names are the keys of the JSON file that `eval.py --out` writes."""

    model: str  # the learner's
    sampler: str  # the model that samples
    engine: str  # its engine, precision and low-bit format
    learner: str  # precision and low-bit format
    lm_head_fp32: bool
    sampling: dict  # the flags that shape the sampler's distribution
    vocabulary: int
    responses: int
    tokens: int  # of all responses
    length: dict  # tokens of a response: "mean", "95 %" (quantile), "max"
    kl: float  # KL(inf || ref), nats a token: the larger of the two estimates
    k1_kl: float  # mean of -log r
    k3_kl: float  # mean of r - 1 - log r
    chi2_token: float  # mean of r^2, less 1
    chi2_seq: float  # mean of R^2, less 1
    ratio_mean: float  # mean of r: 1 if the learner scores the distribution that was sampled
    token_ess: float  # ESS of r over the number of tokens
    seq_ess: float  # ESS of R over the number of responses
    seq_clamped: float  # share of the responses whose log R stands at the clamp
    max_mismatch: float  # largest |p_inf - p_ref| of a response, mean over responses
    mean_mismatch: float  # mean |p_inf - p_ref| of a response, mean over responses
    cut_fraction: float  # share of the sampled tokens to which the learner's own truncation gives probability 0
    reward: float  # mean reward of the sampler's responses
    reward_weighted: float  # the learner's, estimated by capped R
    t_max: float  # clamp / KL, tokens
    t_half: float  # log 2 / log(1 + chi2): the ESS of R halves every so many tokens
    by_length: list[dict]  # gaps of responses in buckets of length
    by_prefix: list[dict]  # sequence weights if responses ended earlier
    control: dict | None  # length, or number of tokens? None: too few responses are long enough
    verdicts: list[dict]  # "correction", "viable", "why"

    def as_dict(self) -> dict:
        """For JSON."""
        return dataclasses.asdict(self)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling and scoring
# ---------------------------------------------------------------------------------------------------------------------


def probe(cfg, setup, actor: str | None) -> Report:
    """Sample, score, print, draw.

    cfg: eval.EvalFlags. setup: eval.Setup, the learner's model and its problems. actor: folder of another model that
    samples, or None. UserError, one sentence: what does not go together."""
    train_cfg = learner_config(cfg, setup)
    check_models(train_cfg, setup.folder, actor)
    sampling = Sampling.of(cfg)
    allowed = max_allowed(train_cfg, setup.vocabulary)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    context = setup.longest_prompt + cfg.max_tokens
    engine = make_engine(cfg, actor or setup.folder, context, max(1, allowed), device, setup.vocabulary)
    learner = Learner(load_model(setup.folder), None, train_cfg, Comm(device), setup.vocabulary)
    groups = rollouts(engine, setup, cfg.samples, sampling, allowed, "probe")
    first = groups[0]
    learner.check_heads(np.concatenate([first.prompt_ids, first.responses[0].tokens])[None])
    scored = score(learner, groups, train_cfg)
    # the control: the first response to each prompt against PIECES short ones
    first = scored.length[:: cfg.samples]
    piece = max(1, int(np.median(first)) // PIECES)
    shorter = dataclasses.replace(sampling, max_tokens=piece)
    groups = rollouts(engine, setup, PIECES, shorter, allowed, "short")
    short = score(learner, groups, dataclasses.replace(train_cfg, group_size=PIECES))
    engine.close()
    report = summarize(cfg, setup, scored)
    report.control = control(scored.gap[:: cfg.samples], first, short.gap, short.length, piece)
    print(text(report))
    picture = Path(cfg.out).with_suffix(".png") if cfg.out else Path("out/mismatch.png")
    print(f"figure: {plot.draw_mismatch(report, scored, cfg.log_ratio_clamp, picture)}")
    return report


def learner_config(cfg, setup) -> config.Config:
    """The training configuration in which the learner scores: no correction, all responses in one batch."""
    responses = setup.problems * cfg.samples
    own = {
        "objective": "none",
        "model": setup.folder,
        "actor": "none",
        "lr": 1.0,  # asked for, and nothing learns
        "group_size": cfg.samples,
        "train_batch": responses,
        "rollout_batch": responses,
        "out": "none",
    }
    names = {f.name for f in dataclasses.fields(config.Config)}
    shared = {name: value for name, value in vars(cfg).items() if name in names}
    return config.resolve(config.Config(**{**shared, **own}), 1)  # on one rank


def rollouts(engine, setup, samples: int, sampling: Sampling, allowed: int, key: str) -> list[Rollout]:
    """Graded groups of `samples` responses to the held-out problems. Another `key` draws other responses.

    allowed: where sampling truncates, record the ids of the allowed tokens, at most so many; 0: record none."""
    problems = [setup.task.problem("test", i) for i in range(setup.problems)]
    prompts = [np.array(encode(setup.tokenizer, p), np.int32) for p in problems]
    seeds = []
    for problem in problems:
        seeds.append([request_seed(key, sampling.seed, problem.id, s) for s in range(samples)])
    groups = engine.generate(prompts, seeds, sampling, 1, setup.stop_ids, allowed)
    grade_all(setup.task, setup.tokenizer, problems, groups)
    out = []
    for i, problem in enumerate(problems):
        rollout = Rollout(
            uid=(key, 0, i),
            prompt_id=problem.id,
            prompt_ids=prompts[i],
            sampling=sampling,
            model="policy",
            precision=engine.dtype,
            version=0,
            digest="",
            t_start=0.0,
            t_end=0.0,
            responses=groups[i],
        )
        out.append(rollout)
    return out


def score(learner, groups: list[Rollout], cfg) -> Scored:
    """The learner's probabilities of the sampled tokens, and the metrics that training would log."""
    batch = collate(groups, cfg)
    new = learner.score(batch, Needs(entropy=True))
    stats = objectives.prepare(batch, learner.comm, cfg, {})
    batch = objectives.with_ref(new, batch)
    _, logs = objectives.loss(new, batch, stats, cfg)
    sums = metrics.Sums()
    metrics.observe(sums, new, batch, stats, logs, cfg)
    return Scored(
        p_inf=(batch.logp_inf.exp().double() * batch.mask).numpy(),
        p_ref=(batch.logp_ref.exp().double() * batch.mask).numpy(),
        log_r=((batch.logp_ref - batch.logp_inf).double() * batch.mask).numpy(),
        length=batch.length.numpy(),
        metrics=metrics.derive(sums.reduce(learner.comm)),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic on (B, T) arrays
# ---------------------------------------------------------------------------------------------------------------------


def exists(x, length) -> np.ndarray:
    """(B, T) bool, T as in x (B, T): the places that hold a token."""
    return np.arange(x.shape[1])[None] < length[:, None]


def ess(w) -> float:
    """Effective sample size over the number of samples: (sum w)^2 / (n sum w^2)."""
    w = np.asarray(w, np.float64)
    if len(w) == 0 or (w**2).sum() == 0:
        return 0.0
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def by_prefix(log_r, length, clamp: float) -> list[dict]:
    """What R would be if responses ended after t tokens, from all that reach t: ESS, low-weight and clamped share."""
    total = log_r.cumsum(1)  # log R after t tokens
    ends = {t for t in EDGES if t < length.max()} | {int(np.quantile(length, 0.9))}
    rows = []
    for t in sorted(ends):
        reach = length >= t
        log_weight = total[reach, t - 1]
        R = np.exp(log_weight.clip(-clamp, clamp))
        row = {
            "tokens": t,
            "responses": int(reach.sum()),
            "ess": ess(R),
            "low_weight": float((R < 0.25).mean()),
            "clamped": float((np.abs(log_weight) >= clamp).mean()),
            "mean_log_weight": float(log_weight.mean()),
        }
        rows.append(row)
    return rows


def by_length(gap, length, log_r) -> list[dict]:
    """Largest and mean gap of a response, in up to eight buckets of length with about as many responses each."""
    largest = gap.max(1)
    mean = gap.sum(1) / length
    edges = np.unique(np.quantile(length, np.linspace(0, 1, 9)[1:], method="lower")).tolist()
    below = int(length.min()) - 1
    rows = []
    for edge in edges:
        inside = (length > below) & (length <= edge)
        if not inside.any():
            continue
        row = {
            "from": below + 1,
            "mean_length": float(length[inside].mean()),
            "to": int(edge),
            "responses": int(inside.sum()),
            "max_mismatch": float(largest[inside].mean()),
            "mean_mismatch": float(mean[inside].mean()),
            "kl": float(-log_r[inside].sum() / length[inside].sum()),
        }
        rows.append(row)
        below = edge
    return rows


def control(gap, length, short_gap, short_length, piece: int) -> dict | None:
    """Largest gap, [mean, standard error] over prompts: is it the length of a response, or the number of its tokens?

    Of one short response (`piece` tokens), of PIECES short ones together, of a long one's first `piece` tokens, and of
    its first PIECES * piece. gap (P, T), length (P,): one long response to each of P prompts; short_gap and
    short_length: PIECES short ones to each, prompt by prompt. A prompt counts if all of its responses are full.
    None: fewer than two do."""
    whole = (short_length >= piece).reshape(-1, PIECES).all(1)
    full = np.flatnonzero((length >= PIECES * piece) & whole)
    if len(full) < 2:
        return None
    short = short_gap.reshape(len(length), PIECES, -1)[full, :, :piece].max(2)  # (prompts, PIECES)

    def mean_se(x) -> list[float]:
        return [float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x)))]

    return {
        "prompts": len(full),
        "piece": piece,
        "pieces": PIECES,
        "one_short": mean_se(short[:, 0]),
        f"{PIECES}_short": mean_se(short.max(1)),
        "long_beginning": mean_se(gap[full, :piece].max(1)),
        "long": mean_se(gap[full, : PIECES * piece].max(1)),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Verdicts: can a correction work at these lengths? Each rule of thumb returns (viable, why), with its numbers
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Evidence:
    """What the verdicts rest on. Every log-ratio is clamped to +-clamp before exp."""

    token_ratio: np.ndarray  # (N,) r of each token of all responses
    seq_ratio: np.ndarray  # (B,) R of each response
    geo_ratio: np.ndarray  # (B,) R^(1/T)
    length: np.ndarray  # (B,) T
    clamped: float  # share of the responses whose log R stands at the clamp
    kl: float  # KL(inf || ref), nats a token
    clamp: float

    @classmethod
    def of(cls, log_r, length, kl: float, clamp: float) -> Evidence:
        """From log r (B, T), 0 behind the end of a response, and the lengths (B,)."""
        total = log_r.sum(1)
        return cls(
            token_ratio=np.exp(log_r.clip(-clamp, clamp))[exists(log_r, length)],
            seq_ratio=np.exp(total.clip(-clamp, clamp)),
            geo_ratio=np.exp((total / length).clip(-clamp, clamp)),
            length=length,
            clamped=float((np.abs(total) >= clamp).mean()),
            kl=kl,
            clamp=clamp,
        )

    @property
    def biased(self) -> bool:
        """Is the mean of r off 1 by more than 0.005 and more than noise? Then the learner scores another distribution
        than was sampled, and weights do not mend that."""
        off = abs(self.token_ratio.mean() - 1)
        return off > 0.005 and off > 4 * self.token_ratio.std() / math.sqrt(len(self.token_ratio))

    @property
    def longest(self) -> int:
        """Tokens of a long response: 95 % have at most so many."""
        return int(np.quantile(self.length, 0.95))

    @property
    def sequence_weights_fit(self) -> bool:
        """Do the weights of whole responses stay off the clamp?"""
        return self.longest * self.kl < self.clamp and self.clamped < 0.01

    @property
    def reach(self) -> str:
        """How near the longest responses come to the clamp."""
        product = self.longest * self.kl
        return f"longest x KL = {self.longest} x {self.kl:.2g} = {product:.2g} of the clamp's {self.clamp:g}"


def bound(correction: str, flag: str) -> float:
    """A correction's own default of --is_cap, --rs_low or --rs_high."""
    return corrections.CORRECTIONS[correction].bounds[flag]


def judge_none(x: Evidence):
    """Without a correction: KL of a whole response below 0.1 nats."""
    T = float(x.length.mean())
    apart = T * x.kl
    return apart < 0.1, f"the distributions of a whole response are {apart:.2g} nats apart (KL x {T:.0f} tokens)"


def judge_tis(x: Evidence):
    """ESS of min(r, C) above 1/2."""
    C = bound("tis", "is_cap")
    share = ess(x.token_ratio.clip(max=C))
    return share > 0.5 and not x.biased, f"ESS of min(r, {C:g}) is {share:.2f}; no length enters"


def judge_jackpot(x: Evidence):
    """More than 80 % of the tokens accepted, by min(1, r)."""
    accepted = np.minimum(1, x.token_ratio).mean()
    why = f"{100 * accepted:.1f} % of the tokens would be accepted; no length enters"
    return accepted > 0.8 and not x.biased, why


def judge_seq_is(x: Evidence):
    """R off the clamp, its ESS above 1/2."""
    share = ess(x.seq_ratio)
    viable = x.sequence_weights_fit and share > 0.5 and not x.biased
    return viable, f"{seq_ess_text(x, share)}; {x.reach}"


def judge_seq_tis(x: Evidence):
    """R off the clamp, ESS of min(R, C) above 1/2."""
    C = bound("seq_tis", "is_cap")
    share = ess(x.seq_ratio.clip(max=C))
    light = f"{100 * (x.seq_ratio < 1 / C).mean():.0f} % of the responses weigh less than 1/{C:g}"
    viable = x.sequence_weights_fit and share > 0.5 and not x.biased
    return viable, f"{seq_ess_text(x, share)}; {light}; {x.reach}"


def judge_seq_mis(x: Evidence):
    """R off the clamp, more than half of the responses kept, ESS with weight 0 for the dropped above 1/2."""
    keep = x.seq_ratio <= bound("seq_mis", "rs_high")
    share = ess(x.seq_ratio * keep)
    viable = x.sequence_weights_fit and keep.mean() > 0.5 and share > 0.5 and not x.biased
    return viable, f"keeps {100 * keep.mean():.0f} % of the responses, ESS with the dropped {share:.2f}"


def judge_geo_rs(x: Evidence):
    """More than half of the responses kept."""
    low, high = bound("geo_rs", "rs_low"), bound("geo_rs", "rs_high")
    keep = (x.geo_ratio >= low) & (x.geo_ratio <= high)
    nine_in_ten = f"[{np.quantile(x.geo_ratio, 0.05):.4g}, {np.quantile(x.geo_ratio, 0.95):.4g}]"
    why = f"keeps {100 * keep.mean():.0f} % at [{low:g}, {high:g}]; nine in ten lie in {nine_in_ten}"
    return keep.mean() > 0.5, why


def seq_ess_text(x: Evidence, share: float) -> str:
    """Equal weights have ESS 1, also if they are equal because all of them were clamped."""
    false = " and false: they are clamped" if x.clamped > 0.5 else ""
    return f"ESS of the responses is {share:.2f}{false}"


VERDICTS = {
    "none": judge_none,
    "tis": judge_tis,
    "jackpot": judge_jackpot,
    "seq_is": judge_seq_is,
    "seq_tis": judge_seq_tis,
    "seq_mis": judge_seq_mis,
    "geo_rs": judge_geo_rs,
}


def verdicts(x: Evidence) -> list[dict]:
    """One row a correction: its name, whether it is viable at these lengths, and why."""
    rows = []
    for name, judge in VERDICTS.items():
        viable, why = judge(x)
        if x.biased and name != "none":
            why += f"; but the mean of r is {x.token_ratio.mean():.3f}, not 1: the learner scores another distribution "
            why += "than was sampled (--keep_sampling_mask, --logprobs_mode, --temperature)"
        rows.append({"correction": name, "viable": bool(viable), "why": why})
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------------------------------


def summarize(cfg, setup, scored: Scored) -> Report:
    """The report but for the control."""
    m = {name.removeprefix("rollout_corr/"): value for name, value in scored.metrics.items()}
    length = scored.length
    # where tokens were cut k3 is too small; k1 alone can be negative
    kl = max(m["kl"], m["k3_kl"])
    evidence = Evidence.of(scored.log_r, length, kl, cfg.log_ratio_clamp)
    shaping = ("temperature", "top_p", "top_k", "min_p", "keep_sampling_mask", "logprobs_mode")
    return Report(
        model=cfg.model,
        sampler=cfg.actor or cfg.model,
        engine=with_format(f"{cfg.rollout} {cfg.rollout_dtype}", cfg.rollout_quant),
        learner=with_format(cfg.dtype, cfg.learner_quant),
        lm_head_fp32=cfg.lm_head_fp32,
        sampling={name: getattr(cfg, name) for name in shaping},
        vocabulary=setup.vocabulary,
        responses=len(length),
        tokens=int(length.sum()),
        length={"mean": float(length.mean()), "95 %": int(np.quantile(length, 0.95)), "max": int(length.max())},
        kl=kl,
        k1_kl=m["kl"],
        k3_kl=m["k3_kl"],
        chi2_token=m["chi2_token"],
        chi2_seq=m["chi2_seq"],
        ratio_mean=m["ratio_mean"],
        token_ess=ess(evidence.token_ratio),
        seq_ess=m["seq_eff_sample_size"],
        seq_clamped=m["seq_clamped_fraction"],
        max_mismatch=m["max_mismatch"],
        mean_mismatch=m["mean_mismatch"],
        cut_fraction=m.get("cut_fraction", 0.0),
        reward=m["reward"],
        reward_weighted=m["reward_weighted"],
        t_max=cfg.log_ratio_clamp / kl if kl > 0 else math.inf,
        t_half=math.log(2) / math.log1p(m["chi2_token"]) if m["chi2_token"] > 0 else math.inf,
        by_length=by_length(scored.gap, length, scored.log_r),
        by_prefix=by_prefix(scored.log_r, length, cfg.log_ratio_clamp),
        control=None,
        verdicts=verdicts(evidence),
    )


def with_format(name: str, quant: str) -> str:
    """A name, and the low-bit format behind it if there is one."""
    return name if quant == "none" else f"{name} {quant}"


def text(o: Report) -> str:
    """The report as it is printed."""
    parts = [models_text(o), distances_text(o), lengths_text(o), prefixes_text(o), control_text(o), verdicts_text(o)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def models_text(o: Report) -> list[str]:
    who = f"{o.sampler} in {o.engine} samples, {o.model} in {o.learner} learns"
    if o.lm_head_fp32:
        who += ", heads in float32"
    s = o.sampling
    return [
        who,
        f"   temperature {s['temperature']:g}, top_p {s['top_p']:g}, top_k {s['top_k']}, min_p {s['min_p']:g}, "
        f"kept sets {s['keep_sampling_mask']}, {s['logprobs_mode']} log-probabilities",
        f"   {o.responses} responses, {o.tokens:,} tokens; length {o.length['mean']:.1f} in the mean, "
        f"{o.length['95 %']} at 95 %, {o.length['max']} at most",
    ]


def distances_text(o: Report) -> list[str]:
    kl = f"{o.k1_kl:.3g} (k1), {o.k3_kl:.3g} (k3) nats a token;   mean of r = p_ref / p_inf: {o.ratio_mean:.4f}"
    if o.cut_fraction:
        kl += f";   {100 * o.cut_fraction:.2f} % of the sampled tokens cut by the learner"
    effective = f"{o.token_ess:.3f} of the tokens, {o.seq_ess:.3f} of the responses"
    if o.seq_clamped > 0.5:
        effective += " (false: they are clamped)"
    t_max = f"{o.t_max:,.0f} tokens: clamp / KL, where sequence weights end"
    if o.t_half < math.inf:
        t_max += f"; their ESS is halved every {o.t_half:,.0f}, by chi2"
    return [
        f"|p_inf - p_ref|    {o.max_mismatch:.3g} largest of a response, {o.mean_mismatch:.3g} mean",
        f"KL(inf || ref)     {kl}",
        f"chi2               {o.chi2_token:.3g} a token, {o.chi2_seq:.3g} a response",
        f"ESS                {effective}",
        f"T_max              {t_max}",
        f"reward             {o.reward:.3f} earned by the sampler, {o.reward_weighted:.3f} estimated for the learner",
    ]


def lengths_text(o: Report) -> list[str]:
    lines = ["length          responses   largest gap    mean gap    KL a token"]
    for row in o.by_length:
        lines.append(
            f"{row['from']:5d} - {row['to']:<7d} {row['responses']:9d}   "
            f"{row['max_mismatch']:11.3g} {row['mean_mismatch']:11.3g} {row['kl']:13.3g}"
        )
    return lines


def prefixes_text(o: Report) -> list[str]:
    lines = ["after tokens    responses    ESS of R    R < 1/4    clamped"]
    for row in o.by_prefix:
        lines.append(
            f"{row['tokens']:12d} {row['responses']:12d} {row['ess']:11.3f} "
            f"{100 * row['low_weight']:8.1f} % {100 * row['clamped']:8.1f} %"
        )
    return lines


def control_text(o: Report) -> list[str]:
    if o.control is None:
        return ["length or number of tokens? too few responses are long enough to tell"]
    k = o.control["piece"]
    labels = {
        "one_short": f"one response of {k}",
        f"{PIECES}_short": f"{PIECES} responses of {k}",
        "long_beginning": f"the first {k} of one of {PIECES * k}",
        "long": f"all {PIECES * k} of it",
    }
    lines = ["length or number of tokens? largest gap in"]
    for name, label in labels.items():
        mean, se = o.control[name]
        lines.append(f"   {label:32s} {mean:.3g} +- {se:.2g}")
    return lines


def verdicts_text(o: Report) -> list[str]:
    lines = ["can it work at these lengths?"]
    for row in o.verdicts:
        viable = "yes" if row["viable"] else "no "
        lines.append(f"   {viable}  {row['correction']:8s} {row['why']}")
    return lines
