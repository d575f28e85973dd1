"""The noise floor: the distances of the learner from itself and of the engine from itself, by
rounding alone.

    learner, 3 rows at once     the same weights and tokens in different micro-batches
    learner, 1 thread           the same micro-batches with 1 thread, or 2 if the run has 1 (CPU)
    engine, decode / prefill    tokens one by one with a cache, against the whole sequence at once
    engine, in other batches    the same draws for half of the prompts; up to the first token that differs

A gap that is no larger than its floor is explained by rounding alone; no fault of weights, formats
or settings is needed to explain it. If a correction has weights of high variance on the floor's
log-ratios, it adds noise to every run."""

from __future__ import annotations

import numpy as np
import torch

from batching import pad
from model import Needs
from probe.gaps import distances, exists, without_replies
from probe.verdicts import uneven
from rollout import request_seed
from sampling import Sampling

ROWS = 3  # rows of a micro-batch in the learner's second pass
LOGITS = 1 << 26  # number of logits of one engine prefill: 256 MiB


def floors(learner, batch, engine, sampling: Sampling, setup) -> list[dict]:
    """One row for each comparison (see `compare`); rows of the learner also have the error of the
    reward estimate. batch: scored by the learner (logp_ref). setup: eval.Setup."""
    clamp = learner.cfg.log_ratio_clamp
    rows = [
        learner_row(
            f"learner, {ROWS} rows at once", batch, in_pieces(learner, batch), clamp
        )
    ]
    if torch.device(learner.device).type == "cpu":
        threads = torch.get_num_threads()
        other = 1 if threads > 1 else 2
        torch.set_num_threads(other)
        again = learner.score(batch, Needs()).logp
        torch.set_num_threads(threads)
        name = f"learner, {other} thread{'s' if other > 1 else ''}"
        rows.append(learner_row(name, batch, again, clamp))
    return rows + engine_rows(engine, prompts_of(batch), sampling, setup, clamp)


def compare(name: str, logp, other, length, clamp: float) -> dict:
    """A row: its name, `gaps.distances` of two log-probabilities (B, T) of the same tokens, and
    "uneven": the corrections with high-variance weights under this rounding alone."""
    used = length > 0
    logp, other, length = logp[used], other[used], length[used]
    on = exists(logp, length)
    row = {"name": name} | distances(logp, other, on)
    kl, log_r = max(row["k1"], row["kl"]), np.where(on, other - logp, 0.0)
    return row | {"uneven": uneven(log_r, length, kl, clamp) if len(length) else []}


def learner_row(name: str, batch, again, clamp: float) -> dict:
    """A row for the learner's log-probabilities (B, T) in a first and a second pass."""
    logp, other = (x.double().numpy() for x in (batch.logp_ref, again))
    R, reward = (
        np.exp(((other - logp) * batch.mask.numpy()).sum(1)),
        batch.reward.double().numpy(),
    )
    moved = float(abs((R * reward).sum() / R.sum() - reward.mean()))
    sampled = (
        without_replies(x, batch.mask).double().numpy() for x in (batch.logp_ref, again)
    )
    length = batch.mask.sum(1).numpy()
    return {"reward": moved} | compare(name, *sampled, length, clamp)


def in_pieces(learner, batch) -> torch.Tensor:
    """The learner's log-probabilities (B, T), computed with ROWS responses at a time."""
    out = torch.zeros_like(batch.logp_inf)
    for start in range(0, len(batch), ROWS):
        rows = list(range(start, min(start + ROWS, len(batch))))
        logp = learner.score(batch.select(rows), Needs()).logp
        out[rows, : logp.shape[1]] = logp
    return out


def engine_rows(engine, prompts, sampling: Sampling, setup, clamp: float) -> list[dict]:
    """Rows for the engine against itself, on one response to each prompt at temperature 1 without
    truncation, scored by `engine.logprobs`."""
    plain = Sampling(max_tokens=max(1, sampling.max_tokens - 1), seed=sampling.seed)
    seeds = [[request_seed("floor", plain.seed, i)] for i in range(len(prompts))]
    half = len(prompts) // 2 + 1
    first, again = (
        [
            group[0]
            for group in engine.generate(
                prompts[:n], seeds[:n], plain, 1, setup.stop_ids
            )
        ]
        for n in (len(prompts), half)
    )
    decoded = pad([r.logp_inf for r in first]).double().numpy()
    length = np.array([len(r.tokens) for r in first])
    at_once = prefill(engine, prompts, [r.tokens for r in first], setup.vocabulary)
    alike = np.array(
        [common(a.tokens, b.tokens) for a, b in zip(first, again, strict=False)]
    )
    second = pad([r.logp_inf for r in again], decoded.shape[1]).double().numpy()
    return [
        compare("engine, decode / prefill", decoded, at_once, length, clamp),
        compare("engine, in other batches", decoded[:half], second, alike, clamp),
    ]


def prompts_of(batch) -> list[np.ndarray]:
    """The prompt of each group of a batch, int32."""
    first = np.unique(batch.group.numpy(), return_index=True)[1]
    return [batch.ids[b, : batch.prompt_len[b]].numpy().astype(np.int32) for b in first]


def prefill(engine, prompts, responses, vocabulary: int) -> np.ndarray:
    """Log-probabilities (B, T) of the responses' tokens, computed by the engine on whole sequences
    at temperature 1."""
    pairs = list(zip(prompts, responses, strict=True))
    ids = pad([np.concatenate(pair) for pair in pairs], dtype=np.int64).numpy()
    rows = max(1, LOGITS // (ids.shape[1] * vocabulary))
    parts = [
        engine.logprobs(ids[start : start + rows]) for start in range(0, len(ids), rows)
    ]
    logp = np.concatenate(parts)
    logps = [
        row[len(p) - 1 :][: len(r)] for row, (p, r) in zip(logp, pairs, strict=True)
    ]
    return pad(logps).double().numpy()


def common(a, b) -> int:
    """The number of tokens before the first difference."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def largest(rows: list[dict]) -> dict[str, float]:
    """The floor in the report: for each distance the largest value of all rows that have it."""
    keys = {key for row in rows for key in row} - {"name", "tokens", "uneven"}
    return {key: max(row[key] for row in rows if key in row) for key in keys}
