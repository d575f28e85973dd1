"""The ladder: the share of each source in a mismatch. The sources are enabled one at a time.

The sampled tokens are fixed. The first rung scores them as the learner does, and the last rung has
the engine's records. Each rung between them scores the tokens in plain torch, with one more change:

    batch shape           the learner's own forward in different micro-batches
    decode path           token by token with a cache, as engines decode, instead of whole sequences
    head precision        the type of the head's factors and of the logits
    body precision        the type of all other weights and activations
    weight rounding       --rollout_quant: the weights rounded to the format's grid
    activation rounding   the activations rounded too
    truncation            the set of tokens over which probabilities are normalised
    temperature           1 if the engine records raw log-probabilities
    weight age            different weights of the same shape (--actor)
    other model           a model of a different shape (--actor)
    remainder             the engine's records against the rung before: kernels, vLLM's fp8 cache, a fault

With l_k = log p of rung k and d = l_0 - l_k, three numbers f are computed for each rung,

    KL        mean over tokens of e^d - 1 - d
    |dp|      mean over tokens of |e^l_k - e^l_0|
    var(R)    variance over responses of exp(sum of d), with the sum clamped

and a source's share is f_k - f_(k-1). The shares add up to f of the last rung by construction, and
f of the first rung is 0. If a source acts through an earlier source (activations rounded on a
rounded body), it is counted when it is enabled, in this order. A share may be negative. Errors:
bootstrap over prompts. If the remainder exceeds rounding, known faults are tested on it
(faults.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain

import numpy as np
import torch

import quant
from batching import Batch, pad
from config import Config, RolloutFlags
from model import FLOOR
from model.engines import HFEngine
from model.head import Head
from probe.faults import Case, resampled, suspects, within
from probe.floor import in_pieces, largest
from probe.gaps import k3
from rollout import Rollout
from sampling import Sampling, truncate

# Work of one rung and of one fault test: multiplications of a forward pass, by device
RUNG = {"cpu": 5e11, "cuda": 5e13}
FAULT = {"cpu": 6e10, "cuda": 6e12}
TRIED = 2  # most responses to a prompt on which faults are tested
# nats; no fault is searched if the remainder's root mean square is below this, or below ten times
# the first row of the floor (probe/floor.py)
LEAST = 1e-5
MEASURES = ("kl", "dp", "var")


@dataclass(frozen=True)
class Recipe:
    """How to compute the log-probabilities of given tokens. The fields are in the order of the
    ladder."""

    # "float32", or a 16-bit type; "T factors": only the factors in T, as in the learner
    head: str
    # type of weights and activations; "autocast T": products in T, weights in float32
    body: str
    weights: quant.Format | None
    activations: bool  # whether activations are rounded too
    # "none"; "sets": the recorded allowed tokens; "rule": top_p, top_k and min_p
    cut: str
    temperature: float
    folder: str

    @classmethod
    def of_learner(cls, cfg: Config, folder: str) -> Recipe:
        """The learner's recipe. cfg: the learner's config.Config."""
        low = cfg.dtype != "float32"
        fmt = quant.learner_format(cfg)
        cut = {"off": "none", "recompute": "rule", "replay": "sets"}[
            cfg.keep_sampling_mask
        ]
        return cls(
            head=f"{cfg.dtype} factors" if low and not cfg.lm_head_fp32 else "float32",
            body=f"autocast {cfg.dtype}" if low else "float32",
            weights=fmt,
            activations=fmt is not None and fmt.activations,
            cut=cut if Sampling.of(cfg).truncates else "none",
            temperature=cfg.temperature,
            folder=folder,
        )

    @classmethod
    def of_engine(cls, cfg: RolloutFlags, folder: str) -> Recipe:
        """The engine's recipe. cfg: the flags of the engine, as make_engine takes them."""
        fmt = quant.engine_format(cfg)
        raw = cfg.logprobs_mode == "raw"
        cut = "sets" if cfg.keep_sampling_mask == "replay" else "rule"
        return cls(
            head="float32" if cfg.lm_head_fp32 else cfg.rollout_dtype,
            body=cfg.rollout_dtype,
            weights=fmt,
            activations=fmt is not None and fmt.activations,
            cut=cut if Sampling.of(cfg).truncates and not raw else "none",
            temperature=1.0 if raw else cfg.temperature,
            folder=folder,
        )


SOURCES = {
    "head": "head precision",
    "body": "body precision",
    "weights": "weight rounding",
    "activations": "activation rounding",
    "cut": "truncation",
    "temperature": "temperature",
    "folder": "other model",  # "weight age" if both models have the same shape
}


def steps(learner: Recipe, engine: Recipe) -> Iterator[tuple[str, Recipe]]:
    """(source, recipe with the source enabled) for each field that differs, from the learner's
    recipe to the engine's."""
    recipe = learner
    for field in fields(Recipe):
        value = getattr(engine, field.name)
        if getattr(recipe, field.name) == value:
            continue
        recipe = replace(recipe, **{field.name: value})
        if field.name == "activations" and not (
            recipe.weights and recipe.weights.activations
        ):
            continue  # the format of the weights rounds no activations
        name = SOURCES[field.name]
        if field.name == "folder" and same_shape(learner.folder, engine.folder):
            name = "weight age"
        yield name, recipe


def same_shape(folder: str, other: str) -> bool:
    """Whether the models of two folders have the same tensors."""
    shapes = [
        {name: x.shape for name, x in quant.empty_model(f).state_dict().items()}
        for f in (folder, other)
    ]
    return shapes[0] == shapes[1]


# -- A rung: log-probabilities of given tokens


class WideFormat(quant.Format):
    """fp8 with its weights in float32: the same numbers, converted once instead of in each product."""

    def quantize(self, weight):
        q, s = super().quantize(weight)
        return q.float(), s


class Scorer(HFEngine):
    """The plain torch engine for given tokens: it decodes like HFEngine, and computes by a
    recipe."""

    def __init__(
        self, recipe: Recipe, sampling: Sampling, device: str, vocabulary: int
    ):
        scope, _, dtype = recipe.body.rpartition(" ")
        fmt = recipe.weights
        if fmt is not None:
            fmt = replace(fmt, activations=fmt.activations and recipe.activations)
            if fmt.name == "fp8" and torch.device(device).type == "cpu":
                fmt = WideFormat(**vars(fmt))
        super().__init__(
            recipe.folder,
            dtype="float32" if scope else dtype,
            device=device,
            head_fp32=recipe.head == "float32" and dtype != "float32",
            fmt=fmt,
            vocabulary=vocabulary,
        )
        self.recipe, self.sampling = recipe, sampling
        self.autocast = getattr(torch, dtype) if scope else None

    def score(self, groups) -> np.ndarray:
        """log p (B, T) of the groups' responses, 0 after their ends."""
        prompts = [g.prompt_ids for g in groups]
        responses = [g.responses for g in groups]
        rows = []
        for batch in self._batches(prompts, responses, self.sampling.max_tokens):
            logp = self._force(*batch).double().cpu().numpy()
            told = chain.from_iterable(batch[1])
            rows += [row[: len(r.tokens)] for row, r in zip(logp, told, strict=True)]
        return pad(rows, dtype=np.float64).numpy()

    @torch.no_grad()
    def _force(self, prompts, groups) -> torch.Tensor:
        """Run HFEngine._decode with given tokens."""
        responses = list(chain.from_iterable(groups))
        length = torch.tensor([len(r.tokens) for r in responses], device=self.device)
        tokens = pad([r.tokens for r in responses], dtype=np.int64).to(self.device)
        out = torch.zeros(tokens.shape, device=self.device)
        logits, rows = self._read_prompts(prompts, [len(group) for group in groups])
        for t in range(tokens.shape[1]):
            token = tokens[rows.index, t, None]
            out[rows.index, t] = self._logp(
                logits, token, t, [responses[b] for b in rows.index.tolist()]
            )
            going = length[rows.index] > t + 1
            n_going = int(going.sum())
            if n_going == 0:
                break
            # as in HFEngine: the shape affects rounding
            if n_going < 0.75 * len(going):
                rows.shrink(going)
                token = token[going]
            logits = self._step(token, rows)
        return out

    def _logp(self, logits, token, t: int, responses) -> torch.Tensor:
        """log p (n,) of the t-th tokens (n, 1) of these responses under the recipe's
        distribution."""
        # bitwise as in HFEngine
        z = logits * (1.0 / torch.tensor(self.recipe.temperature))
        if self.recipe.cut == "rule":
            drawn = z.gather(1, token)  # the engine drew it from its set
            z = truncate(z, self.sampling).scatter_(1, token, drawn)
        elif self.recipe.cut == "sets":
            z = z.masked_fill_(outside(z, t, responses), -torch.inf)
        logp = z.log_softmax(-1).gather(1, token)[:, 0]
        return logp.nan_to_num_(nan=FLOOR).clamp_min_(FLOOR)

    def _forward(self, ids, **more):
        """Do the work of HFEngine._forward, also for a head and a body of different types."""
        head, _, factors = self.recipe.head.partition(" ")
        if self.autocast is None and head in ("float32", self.dtype):
            return super()._forward(ids, **more)
        with torch.autocast(
            ids.device.type, self.autocast, enabled=self.autocast is not None
        ):
            out = self.model.base_model(input_ids=ids, use_cache=True, **more)
        layer, dtype = self.model.get_output_embeddings(), getattr(torch, head)
        tensors = [
            out.last_hidden_state[:, -1],
            layer.weight,
            getattr(layer, "bias", None),
        ]
        z = Head.of(self.model.config).logits(
            *(None if x is None else x.to(dtype) for x in tensors)
        )
        if not factors:  # the logits are rounded too
            z = z.to(dtype).float()
        return z[:, : self.vocabulary], out.past_key_values


def outside(z, t: int, responses) -> torch.Tensor:
    """Mask (n, V) of the tokens that are not in the recorded sets at position t."""
    gone = torch.ones_like(z, dtype=torch.bool)
    for i, r in enumerate(responses):
        if t >= len(r.tokens):  # an ended response that is still decoded
            gone[i] = False
            continue
        first, last = r.allowed_offsets[t], r.allowed_offsets[t + 1]
        gone[i, torch.from_numpy(r.allowed_ids[first:last].astype(np.int64))] = False
    return gone


# -- Shares


def explain(
    cfg: Config,
    setup,
    learner,
    scored,
    actor: str | None,
    floor: list[dict],
) -> dict:
    """The ladder of one configuration, for the report: "rows", "total", "floor" (see `shares`), and
    "suspects" if the remainder exceeds rounding.

    cfg: ProbeFlags. setup: eval.Setup. scored: probe.ScoredTokens. actor: folder of the model that
    samples, if it differs from the learner's. floor: rows of probe.floor.floors."""
    device = torch.device(learner.device).type
    size = sum(p.numel() for p in learner.models.parameters())
    most = max(len(group.responses) for group in scored.groups)
    groups, batch, _ = within(scored.groups, scored.batch, RUNG[device] / size, most)
    names, logp, scorer = rungs(cfg, learner, groups, batch, actor)
    shares_of = shares(names, logp, batch, floor, cfg.log_ratio_clamp)
    shares_of |= {"responses": len(batch), "suspects": []}
    remainder = (logp[-1] - logp[-2])[batch.exists.numpy()]
    if np.sqrt((remainder**2).mean()) > max(10 * floor[0]["rms"], LEAST):
        groups, batch, rows = within(groups, batch, FAULT[device] / size, TRIED)
        expected = logp[-2][rows, : batch.tokens.shape[1]]
        case = Case(scorer, setup, groups, batch, expected, cfg.micro_tokens)
        shares_of["suspects"] = suspects(case)
    return shares_of


def rungs(
    cfg: RolloutFlags, learner, groups: list[Rollout], batch: Batch, actor: str | None
) -> tuple[list[str], np.ndarray, Scorer]:
    """The names of the rungs (K), their log-probabilities (K, B, T), and the scorer of the last
    rung before the remainder, which computes the expected values of the engine."""
    folder, sampling = learner.cfg.model, Sampling.of(cfg)
    start, end = (
        Recipe.of_learner(learner.cfg, folder),
        Recipe.of_engine(cfg, actor or folder),
    )
    place = (sampling, learner.device, learner.models.vocabulary)
    scorer = Scorer(start, *place)
    logps = {
        "the learner": batch.logp_ref.double().numpy(),
        "batch shape": in_pieces(learner, batch).double().numpy(),
        "decode path": scorer.score(groups),
    }
    for source, recipe in steps(start, end):
        scorer = Scorer(recipe, *place)
        logps[source] = scorer.score(groups)
    logps["remainder"] = batch.logp_inf.double().numpy()
    return list(logps), np.stack(list(logps.values())), scorer


def shares(names: list[str], logp, batch, floor: list[dict], clamp: float) -> dict:
    """The ladder's table: for each source its share of each measure, {"share", "se", "low", "high"}
    (95 %).

    names (K), logp (K, B, T): the rungs, starting with the learner's. batch: lengths and groups.
    floor: rows of probe.floor.floors."""
    length, group = batch.length.numpy(), batch.group.numpy()
    on = np.arange(logp.shape[2]) < length[:, None]
    log_r = np.where(on, logp[0] - logp, 0.0)
    weight = np.exp(log_r.sum(2).clip(-clamp, clamp))  # (K, B)
    sums = {
        "kl": k3(log_r, clamp).sum(2),
        "dp": np.where(on, np.abs(np.exp(logp) - np.exp(logp[0])), 0.0).sum(2),
    }
    of_all = measures(sums, weight, length, np.ones((1, len(length))))
    again_of = measures(sums, weight, length, resampled(group))
    rows = []
    for k, name in enumerate(names[1:]):
        row = {"source": name}
        for measure in MEASURES:
            again = np.diff(again_of[measure], axis=1)[:, k]
            low, high = np.quantile(again, [0.025, 0.975])
            share = float(np.diff(of_all[measure])[0, k])
            row[measure] = {"share": share, "se": float(again.std())}
            row[measure] |= {"low": float(low), "high": float(high)}
        rows.append(row)
    under = largest(floor)
    return {
        "rows": rows,
        "total": {measure: float(of_all[measure][0, -1]) for measure in MEASURES},
        "floor": {"kl": under["kl"], "dp": under["dp"], "var": under["chi2_seq"]},
    }


def measures(sums: dict, weight, length, counts) -> dict[str, np.ndarray]:
    """KL, |dp| and var(R) of each rung, (n, K) each. sums, weight (K, B); counts (n, B): how often
    each response is drawn."""
    tokens = (counts @ length)[:, None]
    n = counts.sum(1, keepdims=True)
    out = {name: counts @ x.T / tokens for name, x in sums.items()}
    # centring changes no variance and reduces rounding errors
    centred = weight - weight[:, :1]
    shift = counts @ centred.T / n
    out["var"] = counts @ (centred**2).T / n - shift**2
    return out
