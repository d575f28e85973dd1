"""Measure the mismatch between sampler and learner, and name usable corrections. No training.

    python -m probe --model=FOLDER --dtype=bfloat16 --lm_head_fp32=True           # engine against learner
    python -m probe --model=base:policy --actor=base:actor                        # a different model samples
    python -m probe --model=FOLDER --rollout_quant=int8 --learner_quant=aligned   # both in low bits
    python -m probe --model=FOLDER --temperature=0.7 --top_p=0.8 --keep_sampling_mask=off
    torchrun --nproc_per_node=2 -m probe --model=FOLDER --rollout_tp=2            # a tensor-parallel engine
    python -m probe --explain --model=FOLDER --rollout_quant=int8                 # sources of the mismatch

The engine samples and the learner scores the same tokens. All results are computed from p_inf and
p_ref:

  gaps         the largest and the mean |p_inf - p_ref| of a response, against its length (TIS article);
  floor        the distances of the learner from itself and of the engine from itself, by rounding (probe/floor.py);
  distances    KL, chi2, the ESS of token and sequence weights, and T_max = clamp / KL, the length at which sequence
               weights become useless (Mismatch Praxis, section 4);
  verdicts     for each correction whether the variance of its weights stays small at these lengths, and why;
  ladder       with --explain: the share of each source in the mismatch (probe/ladder.py).

Notation: r = p_ref / p_inf of a token, R = product of r over a response, T = tokens of a response.
"""

from __future__ import annotations

import machinery.startup  # isort: skip  # noqa: F401

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import config
from batching import Batch, collate
from config import Config
from eval import ModelFlags, Setup, n_problems
from learner import Learner
from machinery import settings
from machinery.checkpoint.models import load_model
from machinery.flags import is_first_rank
from machinery.ranks import Comm
from machinery.run import check_models
from model import FLOOR, Needs
from model.engines import make_engine
from probe.figures import draw_ladder, draw_mismatch
from probe.floor import floors
from probe.gaps import by_turn, exists, overview, without_replies
from probe.ladder import explain
from probe.page import text
from probe.verdicts import judged, weights
from rollout import Rollout, as_groups, request_seed
from sampling import Sampling, max_allowed
from tasks import grade_all, turns
from tasks.prompts import encode

PROBLEMS = 64  # default of --problems
PATIENCE = 3600.0  # seconds: timeout of collective calls


@dataclass(frozen=True)
class ProbeFlags(ModelFlags):
    """The mismatch report"""

    actor: str = ""
    """A different model that samples: a run folder, a checkpoint, a Hugging Face folder or
    base:actor; none: the policy samples."""
    explain: bool = False
    """Also divide the mismatch by source, and name a likely fault of the engine."""
    log_ratio_clamp: float = config.Config.log_ratio_clamp
    """Log-ratios are clamped to +- this."""
    micro_tokens: int = config.MICRO_TOKENS
    """Token budget of one forward pass."""


@dataclass
class ScoredTokens:
    """The sampled tokens under engine and learner, without an environment's replies; 0 after the end
    of a response."""

    inf: np.ndarray  # (B, T) log-probabilities of the engine
    ref: np.ndarray  # (B, T) log-probabilities of the learner
    length: np.ndarray  # (B,)
    turn: np.ndarray  # (B, T) turn of each token, from 0
    groups: list[Rollout]  # the responses, as the engine recorded them
    batch: Batch  # the same responses, scored by the learner


def probe(cfg: ProbeFlags, setup: Setup, actor: str | None) -> dict:
    """Sample, score, print and draw; return the report.

    setup: the learner's model and its problems. actor: folder of a different model that samples, or
    None. UserError: a flag is wrong."""
    train_cfg = learner_config(cfg, setup)
    check_models(train_cfg, setup.folder, actor)
    sampling = Sampling.of(cfg)
    allowed = max_allowed(train_cfg, setup.vocabulary)
    device = Comm.start(PATIENCE).device
    engine = make_engine(
        cfg,
        actor or setup.folder,
        setup.context,
        max(1, allowed),
        device,
        setup.vocabulary,
    )
    # with --rollout_tp each rank scores all responses
    comm = Comm.alone(device)
    learner = Learner(load_model(setup.folder), None, train_cfg, comm, setup.vocabulary)
    groups = rollouts(engine, setup, cfg.samples, sampling, allowed)
    scored = score(learner, groups, train_cfg)
    floor = floors(learner, scored.batch, engine, sampling, setup)
    ladder = explain(cfg, setup, learner, scored, actor, floor) if cfg.explain else None
    engine.close()
    report = summarize(cfg, setup, scored, floor) | {"ladder": ladder}
    if not is_first_rank():
        return report
    print(text(report))
    picture = Path(cfg.out).with_suffix(".png") if cfg.out else Path("out/mismatch.png")
    print(f"figure: {draw_mismatch(report, scored, picture)}")
    if ladder is not None:
        picture = picture.with_name(f"{picture.stem}-ladder.png")
        print(f"figure: {draw_ladder(ladder, picture)}")
    return report


def learner_config(cfg: ProbeFlags, setup) -> config.Config:
    """The configuration with which the learner scores: no correction, all responses in one
    batch."""
    responses = n_problems(setup.task, setup.most) * cfg.samples
    values = {
        "objective": "none",
        "model": setup.folder,
        "actor": "none",
        "lr": 1.0,  # required, but nothing is trained
        "group_size": cfg.samples,
        "train_batch": responses,
        "rollout_batch": responses,
        "out": "none",
        "rollout_tp": 1,
    }
    names = {f.name for f in dataclasses.fields(config.Config)}
    shared = {name: value for name, value in vars(cfg).items() if name in names}
    return settings.resolve(config.Config(**{**shared, **values}), 1)  # on one rank


def rollouts(
    engine, setup, samples: int, sampling: Sampling, allowed: int
) -> list[Rollout]:
    """Graded groups of `samples` responses to the held-out problems.

    allowed: maximum number of allowed tokens that are recorded under truncated sampling; 0: no
    tokens are recorded."""
    problems = [
        setup.task.problem("test", i) for i in range(n_problems(setup.task, setup.most))
    ]
    prompts = [np.array(encode(setup.tokenizer, p), np.int32) for p in problems]
    seeds = [
        [request_seed("probe", sampling.seed, p.id, s) for s in range(samples)]
        for p in problems
    ]
    tools = (engine, setup.task, setup.tokenizer)
    options = (sampling, 1, setup.stop_ids, allowed)
    responses = turns.sample(*tools, problems, prompts, seeds, *options)
    grade_all(setup.task, setup.tokenizer, problems, responses)
    groups = as_groups("probe", prompts, responses, sampling, engine.dtype)
    for group, problem in zip(groups, problems, strict=True):
        group.prompt_id = problem.id
    return groups


def score(learner, groups: list[Rollout], cfg: Config) -> ScoredTokens:
    """The learner's probabilities of the sampled tokens."""
    batch = collate(groups, cfg)
    batch.logp_ref = learner.score(batch, Needs()).logp
    turn = torch.from_numpy(turns.turns_of(batch.mask))
    columns = (batch.logp_inf.double(), batch.logp_ref.double(), turn)
    inf, ref, turn = (without_replies(x, batch.mask).numpy() for x in columns)
    return ScoredTokens(inf, ref, batch.mask.sum(1).numpy(), turn, groups, batch)


def retokenized(tokenizer, groups: list[Rollout]) -> float:
    """Share of the responses that change when they are decoded and tokenized again. A program that
    does this trains on tokens that were not sampled."""
    sampled = [
        response.tokens.tolist() for group in groups for response in group.responses
    ]
    texts = [
        tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in sampled
    ]
    again = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return float(np.mean([a != b for a, b in zip(again, sampled, strict=True)]))


def summarize(cfg: ProbeFlags, setup, scored: ScoredTokens, floor: list[dict]) -> dict:
    """The report without the ladder."""
    length, reward = scored.length, scored.batch.reward.numpy()
    numbers = overview(
        scored.inf,
        scored.ref,
        length,
        cfg.log_ratio_clamp,
        scored.batch.group.numpy(),
    )
    evidence = (scored.ref - scored.inf, length, numbers["kl"], cfg.log_ratio_clamp)
    capped, _ = weights("seq_tis", evidence[0], length, cfg.log_ratio_clamp)
    # by truncation (--keep_sampling_mask=recompute)
    cut = (scored.ref <= FLOOR)[exists(scored.ref, length)].mean()
    shaping = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "keep_sampling_mask",
        "logprobs_mode",
    )
    return numbers | {
        "model": cfg.model,
        "sampler": cfg.actor or cfg.model,
        "engine": f"{cfg.rollout} {cfg.rollout_dtype} {cfg.rollout_quant}".removesuffix(
            " none"
        ),
        "learner": f"{cfg.dtype} {cfg.learner_quant}".removesuffix(" none"),
        "lm_head_fp32": cfg.lm_head_fp32,
        "sampling": {name: getattr(cfg, name) for name in shaping},
        "vocabulary": setup.vocabulary,
        "responses": len(length),
        "tokens": int(length.sum()),
        "length": {
            "mean": float(length.mean()),
            "95 %": int(np.quantile(length, 0.95)),
            "max": int(length.max()),
        },
        # share of the sampled tokens to which the learner's truncation gives probability 0
        "cut_fraction": float(cut),
        "reward": float(reward.mean()),  # mean of the sampler's responses
        # of the learner, estimated with capped R
        "reward_weighted": float((capped * reward).sum() / capped.sum()),
        "by_turn": by_turn(scored.inf, scored.ref, scored.turn, length),
        "retokenized": retokenized(setup.tokenizer, scored.groups),
        "floor": floor,
        "verdicts": judged(*evidence, floor),
    }
