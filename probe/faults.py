"""Known engine faults, each tested on the engine's recorded log-probabilities.

The last rung before the remainder of the ladder gives the values l that the engine should have
recorded. The remainder e = log p_inf - l is compared with the remainder of a model that has the
fault too:

    explained = 1 - sum e_fault^2 / sum e^2

over the tokens of a few responses. Two faults may record the same numbers: an engine at temperature
1, and an engine that samples correctly and records raw log-probabilities. In this case the fault
with the higher likelihood of the sampled tokens comes first.

A fault is a row of FAULTS and a generator that yields, for each of its variants, (variant, the
log-probabilities (B, T) that such an engine records). A third item has the log-probabilities under
its sampling distribution, if they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.func import functional_call

import batching
import quant
from model import FLOOR, Needs, PolicyAndActor
from rollout import Rollout
from tasks.prompts import Chat, encode

# if two explanations differ by less, the likelihood of the sampled tokens decides
ALIKE = 0.02
BOUND = 20.0  # differences of log-probabilities are clamped to +- this
ROPE_BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)  # of common models
RESAMPLED = 400  # bootstrap samples
SCREENED = 8  # layers that are tested on all responses


def within(
    groups: list[Rollout], batch: batching.Batch, tokens: float, most: int
) -> tuple[list[Rollout], batching.Batch, list[int]]:
    """(groups, their batch, its rows in `batch`): at most `most` responses to each prompt, and as
    many prompts as fit into `tokens` tokens, prompts included, but at least two."""
    kept, rows, first = [], [], 0
    for group in groups:
        group_rows = range(first, first + len(group.responses))[:most]
        tokens -= int((batch.prompt_len + batch.length)[list(group_rows)].sum())
        if tokens < 0 and len(kept) >= 2:
            break
        kept.append(replace(group, responses=group.responses[:most]))
        rows += group_rows
        first += len(group.responses)
    return kept, batch.select(rows), rows


def resampled(group: np.ndarray) -> np.ndarray:
    """Counts (RESAMPLED, B) of each response in bootstrap samples of the prompts. group (B,)."""
    prompts = group.max() + 1
    rng = np.random.default_rng(0)
    return rng.multinomial(prompts, np.full(prompts, 1 / prompts), RESAMPLED)[:, group]


@dataclass
class Case:
    """An engine's recorded log-probabilities of a few groups, and the tools to recompute them with
    a fault."""

    scorer: object  # probe.ladder.Scorer, which computes as the engine should
    setup: object  # eval.Setup
    groups: list[Rollout]
    batch: batching.Batch  # of these groups
    expected: np.ndarray  # (B, T) log-probabilities of the rung before the remainder
    budget: int  # tokens of one forward

    @property
    def model(self):
        return self.scorer.model

    def left(self, logp) -> np.ndarray:
        """(log p_inf - logp)^2, (B, T), 0 after the ends of responses."""
        off = self.batch.logp_inf.double().numpy() - logp
        return np.where(self.batch.exists.numpy(), off.clip(-BOUND, BOUND) ** 2, 0.0)

    @torch.no_grad()
    def logp(self, tensors=(), ids=None, **change) -> np.ndarray:
        """log p (B, T) of whole sequences.

        tensors: parameters and buffers with other values, by name. ids: other prompts with the
        responses, one for each response. change: of the recipe's temperature or truncation."""
        recipe, rule = replace(self.scorer.recipe, **change), self.scorer.sampling
        cuts = (
            [rule.top_p, rule.top_k, rule.min_p]
            if recipe.cut == "rule"
            else [1.0, 0.0, 0.0]
        )
        batch = replace(
            self.batch,
            sampling=torch.tensor([[recipe.temperature, *cuts]]).expand(
                len(self.batch), 4
            ),
            allowed=self.batch.allowed if recipe.cut == "sets" else None,
        )
        if ids is not None:
            prompt_len = torch.tensor([len(row) for row in ids]) - batch.length
            batch = replace(
                batch, ids=batching.pad(ids, dtype=np.int64), prompt_len=prompt_len
            )
        module = PolicyAndActor(self.model, vocabulary=self.setup.vocabulary)
        values = {f"policy.{name}": x for name, x in dict(tensors).items()}
        out = torch.zeros_like(batch.logp_inf)
        for rows in batching.micro_batches(batch, self.budget, share=False)[0]:
            part = batch.select(rows).to(self.scorer.device)
            logp = functional_call(module, values, (part, Needs()))["logp"]
            out[rows, : logp.shape[1]] = logp.float().cpu()
        return out.nan_to_num_(nan=FLOOR).clamp_min_(FLOOR).double().numpy()


# -- The faults


def scale_of_one(case: Case) -> Iterator[tuple]:
    """One linear layer has scales of 1, because its scales were not loaded. Every layer is tried on
    a response to each of two prompts, and the most likely layers on all responses."""
    fmt = case.scorer.fmt
    if fmt is None:
        return
    layers = quant.quantized_linears(case.model)

    def at(name: str, part: Case) -> np.ndarray:
        weight = layers[name].weight
        q, _ = quant.quantize(weight, fmt.qmax, fmt.dtype, fmt.group)
        return part.logp({f"{name}.weight": q.to(weight.dtype)})  # its scales are 1

    first = np.unique(case.batch.group.numpy(), return_index=True)[1][:2]
    small = replace(case, batch=case.batch.select(first))
    left = {name: small.left(at(name, small)).sum() for name in layers}
    for name in sorted(left, key=left.get)[:SCREENED]:
        yield name, at(name, case)


def wrong_rope(case: Case) -> Iterator[tuple]:
    """A wrong RoPE base: theta_i = base^(-2 i / d)."""
    rope = getattr(case.model.config.get_text_config(), "rope_parameters", None) or {}
    base = rope.get("rope_theta")
    if base is None or rope.get("rope_type") != "default":
        return
    speeds = {
        name: x for name, x in case.model.named_buffers() if name.endswith(".inv_freq")
    }
    for other in ROPE_BASES:
        if other != base:
            power = math.log(other) / math.log(base)
            changed = {name: x**power for name, x in speeds.items()}
            yield f"{other:g} for {base:g}", case.logp(changed)


def wrong_temperature(case: Case) -> Iterator[tuple]:
    """A wrong temperature: 1 first, then a search between a third and three times the right
    temperature."""
    right = case.scorer.recipe.temperature

    def at(temperature: float) -> tuple:
        return f"{temperature:.3g} for {right:g}", case.logp(temperature=temperature)

    if right != 1:
        yield at(1.0)
    low, high = math.log(right / 3), math.log(right * 3)
    for _ in range(10):  # the sum of squares has one minimum
        inner = [low + (high - low) / 3, high - (high - low) / 3]
        tried = [at(math.exp(x)) for x in inner]
        yield from tried
        if case.left(tried[0][1]).sum() < case.left(tried[1][1]).sum():
            high = inner[1]
        else:
            low = inner[0]


def raw(case: Case) -> Iterator[tuple]:
    """Correct sampling, but raw log-probabilities, before temperature and truncation."""
    recipe = case.scorer.recipe
    if recipe.temperature != 1 or recipe.cut != "none":
        yield "", case.logp(temperature=1.0, cut="none"), case.logp()


def other_prompt(case: Case) -> Iterator[tuple]:
    """The prompts are rendered in a different way."""
    tokenizer = case.setup.tokenizer

    def with_template(template):
        chat = Chat(template)
        problem = case.setup.task.find
        return lambda g: encode(tokenizer, replace(problem(g.prompt_id), chat=chat))

    def with_token(token):
        return lambda g: [] if token is None else [token, *g.prompt_ids]

    variants = {
        "no chat template": with_template(""),
        "the tokenizer's template": with_template(None),
        "first token missing": lambda g: g.prompt_ids[1:],
        "first token twice": lambda g: [g.prompt_ids[0], *g.prompt_ids],
        "last token missing": lambda g: g.prompt_ids[:-1],
        "<bos> in front": with_token(tokenizer.bos_token_id),
        "<eos> in front": with_token(tokenizer.eos_token_id),
    }
    for variant, rendered in variants.items():
        prompts = [list(rendered(group)) for group in case.groups]
        differ = any(
            p != list(g.prompt_ids) for p, g in zip(prompts, case.groups, strict=True)
        )
        if all(prompts) and differ:
            pairs = zip(prompts, case.groups, strict=True)
            ids = [
                np.concatenate([p, r.tokens])
                for p, group in pairs
                for r in group.responses
            ]
            yield variant, case.logp(ids=ids)


FAULTS = {
    "a scale at 1": scale_of_one,
    "wrong rope base": wrong_rope,
    "wrong temperature": wrong_temperature,
    "raw log-probabilities": raw,
    "another chat template": other_prompt,
}


# -- Naming the fault


def suspects(case: Case) -> list[dict]:
    """The tested faults by explained share: "fault", "where", "explained" (at most 1), its error
    "se", "sampled", the mean log-probability of the tokens, and "named", whether "explained"
    exceeds 1/2. Several faults may be named."""
    before, on = case.left(case.expected), case.batch.exists.numpy()
    counts = resampled(case.batch.group.numpy())

    def row(fault: str, where: str, left, sampled) -> dict:
        again = 1 - counts @ left.sum(1) / np.maximum(counts @ before.sum(1), 1e-300)
        explained = float(1 - left.sum() / before.sum())
        return {
            "fault": fault,
            "where": where,
            "explained": explained,
            "se": float(again.std()),
            "sampled": float(sampled[on].mean()),
            "named": explained > 0.5,
        }

    rows = []
    for name, fault in FAULTS.items():
        variants = [
            row(name, at, case.left(x), (x, *y)[-1]) for at, x, *y in fault(case)
        ]
        rows += sorted(variants, key=lambda row: -row["explained"])[:1]
    rows.sort(key=lambda row: -row["explained"])
    alike = [row for row in rows if row["explained"] > rows[0]["explained"] - ALIKE]
    return sorted(alike, key=lambda row: -row["sampled"]) + rows[len(alike) :]
