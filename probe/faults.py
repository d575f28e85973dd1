"""Known engine faults, each tested on the engine's recorded log-probabilities.

The last rung of the ladder gives the values l that the engine should have recorded. The remainder
e = log p_inf - l is compared with the remainder of a scorer that has the fault too:

    explained = 1 - sum e_fault^2 / sum e^2

over the tokens of a few responses. Two faults may record the same numbers: an engine at temperature
1, and an engine that samples correctly and records raw log-probabilities. In this case the fault
with the higher likelihood of the sampled tokens comes first. Faults of stale weights are tested
only if the older weights are known (--synced_from).

A fault is a row of FAULTS and a generator that yields a finding for each of its variants."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

import batching
import quant
from model import FLOOR, Needs, PolicyAndActor
from probe.floor import prefill
from rollout import Rollout
from tasks.prompts import Chat, encode

ALIKE = 0.02  # if two explanations differ by less, the likelihood of the sampled tokens decides
BOUND = 20.0  # differences of log-probabilities are clamped to +- this
LARGEST_FLOAT16 = 65504.0
ROPE_BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)  # of common models
RANDOM = 0.1  # share of noise in the remainder above which an engine counts as random
RESAMPLED = 200  # bootstrap samples


def within(
    groups: list[Rollout], batch: batching.Batch, tokens: float
) -> tuple[list[Rollout], batching.Batch, list[int]]:
    """(groups, their batch, its rows in `batch`) with at most this number of tokens, prompts included.

    Drops responses to each prompt first, then prompts. At least two prompts remain."""

    def size(g, n: int) -> int:
        return sum(len(g.prompt_ids) + len(r.tokens) for r in g.responses[:n])

    n = max(len(g.responses) for g in groups)
    while n > 1 and sum(size(g, n) for g in groups) > tokens:
        n -= 1
    total = np.cumsum([size(g, n) for g in groups])
    count = max(2, int((total <= tokens).sum()))
    first = np.cumsum([0, *(len(g.responses) for g in groups)])
    rows = []
    for g, start in zip(groups[:count], first, strict=False):
        rows += range(start, start + min(n, len(g.responses)))
    return [replace(g, responses=g.responses[:n]) for g in groups[:count]], batch.select(rows), rows


@dataclass
class Finding:
    """The remainder under one variant of a fault."""

    variant: str  # layer, temperature or prompt; "": the fault has one variant
    left: np.ndarray  # (B, T) squared remainder of each token
    # (B, T) log-probability of each token in the distribution that the faulty engine samples from
    sampled: np.ndarray
    certain: bool = False  # the fault was observed directly; it is named before all others


@dataclass
class Case:
    """An engine's recorded log-probabilities of a few groups, and the tools to recompute them with
    a fault."""

    scorer: object  # probe.ladder.Scorer, which computes as the engine should
    old: object | None  # the same scorer with the older weights
    engine: object  # the engine itself
    setup: object  # eval.Setup
    groups: list[Rollout]
    batch: batching.Batch  # of these groups
    expected: np.ndarray  # (B, T) log-probabilities of the last rung
    budget: int  # tokens of one forward
    only: frozenset[str] = frozenset()  # layers to try; empty: all

    def __post_init__(self):
        for scorer in filter(None, (self.scorer, self.old)):
            head = scorer.model.get_output_embeddings()  # separates a tied head from the embedding
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)

    @property
    def model(self):
        return self.scorer.model

    def shortest(self) -> Case:
        """The case with one response only: the response with the fewest tokens, prompt included."""
        told = [(g, r) for g in self.groups for r in g.responses]
        row = int((self.batch.prompt_len + self.batch.length).argmin())
        group, response = told[row]
        batch = self.batch.select([row])
        return replace(
            self,
            groups=[replace(group, responses=[response])],
            batch=batch,
            expected=self.expected[[row], : batch.tokens.shape[1]],
        )

    def tries(self, layer: str) -> bool:
        """Whether a fault is tested on this layer."""
        return not self.only or layer in self.only

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def left(self, logp) -> np.ndarray:
        """(log p_inf - logp)^2, (B, T), 0 after the ends of responses."""
        off = self.batch.logp_inf.double().numpy() - logp
        return np.where(self.batch.exists.numpy(), off.clip(-BOUND, BOUND) ** 2, 0.0)

    def finding(self, where: str, logp, sampled=None) -> Finding:
        """The finding for logp (B, T), the records of an engine with the fault. sampled:
        log-probabilities of its sampling distribution; None: equal to logp."""
        return Finding(where, self.left(logp), logp if sampled is None else sampled)

    @torch.no_grad()
    def logp(self, model=None, groups=None, vocabulary: int | None = None, **recipe) -> np.ndarray:
        """log p (B, T) of whole sequences, optionally with a different model, prompts, number of
        head rows, temperature or truncation."""
        batch = self.as_sampled(groups, **recipe)
        module = PolicyAndActor(model or self.model, vocabulary=vocabulary or self.setup.vocabulary)
        out = torch.zeros_like(batch.logp_inf)
        for rows in batching.micro_batches(batch, self.budget, share=False)[0]:
            logp = module(batch.select(rows).to(self.scorer.device), Needs())["logp"]
            out[rows, : logp.shape[1]] = logp.float().cpu()
        return out.nan_to_num_(nan=FLOOR).clamp_min_(FLOOR).double().numpy()

    def as_sampled(self, groups, **change) -> batching.Batch:
        """The batch with the engine's temperature and truncation, or with changed ones. groups:
        replaces the prompts."""
        recipe, rule = replace(self.scorer.recipe, **change), self.scorer.sampling
        cuts = [rule.top_p, rule.top_k, rule.min_p] if recipe.cut == "rule" else [1.0, 0.0, 0.0]
        batch = replace(
            self.batch,
            sampling=torch.tensor([[recipe.temperature, *cuts]]).expand(len(self.batch), 4),
            allowed=self.batch.allowed if recipe.cut == "sets" else None,
        )
        if groups is None:
            return batch
        ids = [np.concatenate([g.prompt_ids, r.tokens]) for g in groups for r in g.responses]
        prompt_len = torch.tensor([len(g.prompt_ids) for g in groups for _ in g.responses])
        return replace(batch, ids=batching.pad(ids, dtype=np.int64), prompt_len=prompt_len)


@contextlib.contextmanager
def put(parameters: dict, values: dict):
    """Set parameters to these values inside the context."""
    kept = {name: parameters[name].data for name in values}
    for name, x in values.items():
        parameters[name].data = x
    try:
        yield
    finally:
        for name, x in kept.items():
            parameters[name].data = x


@contextlib.contextmanager
def body_once(model):
    """Inside, the model's body computes each input once: for faults of the head and of
    temperature."""
    body, outputs = model.base_model, {}
    forward = body.forward

    def remembered(*args, **more):
        tensors = [x for x in (*args, *more.values()) if isinstance(x, torch.Tensor)]
        key = tuple(x.cpu().numpy().tobytes() for x in tensors)
        if key not in outputs:
            outputs[key] = forward(*args, **more)
        return outputs[key]

    body.forward = remembered
    try:
        yield
    finally:
        body.forward = forward


# ---------------------------------------------------------------------------------------------------------------------
# Stale weights
# ---------------------------------------------------------------------------------------------------------------------


def stale(case: Case, where: str, names) -> Finding:
    """The finding if the parameters with these names have their older values."""
    old = dict(case.old.model.named_parameters())
    with put(case.parameters, {name: old[name].data for name in names}):
        return case.finding(where, case.logp())


def places(model) -> dict[str, list[str]]:
    """The parameter names of a model, grouped by decoder layer; parameters outside layers form
    their own groups. The head is left out."""
    head = model.get_output_embeddings().weight
    by_kind: dict[str, list[str]] = {}
    for name, p in model.named_parameters():
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
        if p is not head:
            by_kind.setdefault(".".join(parts[: number + 1]), []).append(name)
    return by_kind


def stale_weights(case: Case) -> Iterator[Finding]:
    """Yield the case that no new weights arrived."""
    yield stale(case, "", case.parameters)


def stale_head(case: Case) -> Iterator[Finding]:
    """Yield the case of a stale head, as happens if tied weights are sent under one name."""
    head = case.model.get_output_embeddings().weight
    yield stale(case, "", [name for name, p in case.parameters.items() if p is head])


def stale_layer(case: Case) -> Iterator[Finding]:
    """Yield the cases of one stale layer, embedding or final norm."""
    for place, names in places(case.model).items():
        if case.tries(place):
            yield stale(case, place, names)


# ---------------------------------------------------------------------------------------------------------------------
# A wrong model function
# ---------------------------------------------------------------------------------------------------------------------


def scale_of_one(case: Case) -> Iterator[Finding]:
    """Yield the cases of one linear layer with scales of 1, because its scales were not loaded."""
    fmt = case.scorer.fmt
    layers = quant.quantized_linears(case.model) if fmt is not None else {}
    low_bit = [layer for layer in layers.values() if isinstance(layer, quant.LowBitLinear)]
    for layer in low_bit:
        q, s = layer.quantized()
        # a CPU multiplies float8 numbers in float32: cast them once, not in each of the passes
        q = q.float() if q.is_floating_point() and not q.is_cuda else q
        layer.loaded["weight"] = q, s
    for name, layer in layers.items():
        if not case.tries(name):
            continue
        if isinstance(layer, quant.LowBitLinear):
            q, s = layer.loaded["weight"]
            layer.loaded["weight"] = q, torch.ones_like(s)
            logp = case.logp()
            layer.loaded["weight"] = q, s
        else:
            q, _ = quant.quantize(layer.weight, fmt.qmax, fmt.dtype, fmt.group)
            with put({"weight": layer.weight}, {"weight": q.to(layer.weight.dtype)}):
                logp = case.logp()
        yield case.finding(name, logp)
    for layer in low_bit:
        layer.loaded = {}


def truncated_head(case: Case) -> Iterator[Finding]:
    """Yield the cases of a head without its last rows: their tokens have probability 0."""
    rows = len(case.model.get_output_embeddings().weight)
    # the head has all tokens that were sampled or allowed
    first = int(case.batch.tokens.max()) + 1
    if case.scorer.recipe.cut == "sets":
        first = max(first, *(int(ids.max()) + 1 for _, ids in case.batch.allowed if len(ids)))
    tried = {rows // n * n for n in (16, 32, 64, 128, 256)} | {
        1 << k for k in range(rows.bit_length())
    }
    tried |= set(np.linspace(first, rows, 9).astype(int).tolist())
    for n in sorted(n for n in tried - {case.setup.vocabulary} if first <= n <= rows):
        yield case.finding(f"{n} rows", case.logp(vocabulary=n))


def wrong_rope(case: Case) -> Iterator[Finding]:
    """Yield the cases of a wrong RoPE base: theta_i = base^(-2 i / d)."""
    config = case.model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    base = rope.get("rope_theta")
    rotary = [
        m for m in case.model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)
    ]
    if base is None or rope.get("rope_type") != "default" or not rotary:
        return
    frequencies = [m.inv_freq for m in rotary]
    for other in ROPE_BASES:
        if other == base:
            continue
        for m, speeds in zip(rotary, frequencies, strict=True):
            m.inv_freq = speeds ** (math.log(other) / math.log(base))
        yield case.finding(f"{other:g} for {base:g}", case.logp())
    for m, speeds in zip(rotary, frequencies, strict=True):
        m.inv_freq = speeds


def float16_overflow(case: Case) -> Iterator[Finding]:
    """Yield the case of a body in float16 with overflow clamped to the largest float16 number."""
    if case.scorer.dtype == "float16":
        return

    def hold(x):
        return (
            x.clamp(-LARGEST_FLOAT16, LARGEST_FLOAT16)
            if getattr(x, "dtype", None) == torch.float16
            else x
        )

    def behind(module, inputs, output):
        return tuple(map(hold, output)) if isinstance(output, tuple) else hold(output)

    model = copy.deepcopy(case.model).half()
    for m in model.modules():  # also for the sums before a norm
        m.register_forward_pre_hook(lambda module, inputs: tuple(map(hold, inputs)))
        m.register_forward_hook(behind)
    yield case.finding("", case.logp(model))


def dropout(case: Case) -> Iterator[Finding]:
    """Yield the case of a random engine. Two identical requests give the noise: half of the squared
    difference.

    The draws behind the records are unknown, so the explained part is the noise's share of the
    remainder. A random engine is biased too: tokens are likelier under the draws that chose them,
    and the mean of the engine is flatter. A different fault may imitate this bias, but no other
    fault makes an engine random. If noise has more than the share RANDOM of the remainder, the
    fault is certain."""
    prompts = [g.prompt_ids for g in case.groups for _ in g.responses]
    # an engine that scores needs room for one more token
    most = case.scorer.sampling.max_tokens - 1
    told = [r.tokens[:most] for g in case.groups for r in g.responses]
    first_pass, two = (prefill(case.engine, prompts, told, case.setup.vocabulary) for _ in range(2))
    left = case.left(case.expected)
    noise = (first_pass - two) ** 2 / 2 / case.scorer.recipe.temperature**2
    certain = bool(noise.sum() > RANDOM * left.sum())
    left[:, : first_pass.shape[1]] -= noise
    yield Finding("", left, case.expected, certain)


# ---------------------------------------------------------------------------------------------------------------------
# A wrong distribution, wrong prompts
# ---------------------------------------------------------------------------------------------------------------------


def wrong_temperature(case: Case) -> Iterator[Finding]:
    """Yield the cases of a wrong temperature: 1 first, then a search between a third and three
    times the right temperature."""
    right = case.scorer.recipe.temperature

    def at(temperature: float) -> Finding:
        return case.finding(f"{temperature:.3g} for {right:g}", case.logp(temperature=temperature))

    if right != 1:
        yield at(1.0)
    low, high = math.log(right / 3), math.log(right * 3)
    golden = (math.sqrt(5) - 1) / 2
    inner = [high - golden * (high - low), low + golden * (high - low)]
    tried = [at(math.exp(x)) for x in inner]
    for _ in range(11):  # golden-section search: the sum of squares has one minimum
        if tried[0].left.sum() < tried[1].left.sum():
            high = inner[1]
            inner = [high - golden * (high - low), inner[0]]
            tried = [at(math.exp(inner[0])), tried[0]]
        else:
            low = inner[0]
            inner = [inner[1], low + golden * (high - low)]
            tried = [tried[1], at(math.exp(inner[1]))]
    yield from tried


def raw(case: Case) -> Iterator[Finding]:
    """Yield the case of correct sampling with raw log-probabilities, before temperature and
    truncation."""
    recipe = case.scorer.recipe
    if recipe.temperature != 1 or recipe.cut != "none":
        yield case.finding("", case.logp(temperature=1.0, cut="none"), case.logp())


def kept_sets(case: Case) -> Iterator[Finding]:
    """Yield the case of recorded sets of allowed tokens that belong to different responses."""
    if case.scorer.recipe.cut == "sets":
        yield case.finding("", case.logp(cut="rule"))


def other_prompt(case: Case) -> Iterator[Finding]:
    """Yield the cases of prompts rendered in a different way: a different template, different
    special tokens."""
    tokenizer = case.setup.tokenizer
    asked = [
        renderings(tokenizer, case.setup.task.find(g.prompt_id), g.prompt_ids.tolist())
        for g in case.groups
    ]
    for variant in asked[0]:
        prompts = [rendered[variant] for rendered in asked]
        differ = [p != g.prompt_ids.tolist() for p, g in zip(prompts, case.groups, strict=True)]
        if all(prompts) and any(differ):
            groups = [
                replace(g, prompt_ids=np.array(p, np.int32))
                for g, p in zip(case.groups, prompts, strict=True)
            ]
            yield case.finding(variant, case.logp(groups=groups))


def renderings(tokenizer, problem, ids: list[int]) -> dict[str, list[int]]:
    """Alternative renderings of a problem's prompt: name -> token ids; empty if a rendering does
    not exist."""
    model_template = getattr(tokenizer, "chat_template", None)
    prompt, kwargs = problem.prompt, dict(problem.chat.kwargs)
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    template = model_template if problem.chat.template is None else problem.chat.template
    unprompted = []
    if template:
        variants = kwargs | {
            "chat_template": template,
            "add_generation_prompt": False,
            "tokenize": False,
        }
        unprompted = tokenizer(
            tokenizer.apply_chat_template(messages, **variants), add_special_tokens=False
        )["input_ids"]
    special = {"<bos>": tokenizer.bos_token_id, "<eos>": tokenizer.eos_token_id}
    texts = {
        "no chat template": encode(tokenizer, replace(problem, chat=Chat(""))),
        "the tokenizer's template": encode(tokenizer, replace(problem, chat=Chat(None)))
        if model_template
        else [],
        "no generation prompt": unprompted,
        "first token missing": ids[1:],
        "first token twice": ids[:1] + ids,
        "last token missing": ids[:-1],
    }
    for name, token in special.items():
        texts[f"{name} in front"] = [] if token is None else [token, *ids]
    return texts


# ---------------------------------------------------------------------------------------------------------------------
# Naming the fault
# ---------------------------------------------------------------------------------------------------------------------

FAULTS = {
    "stale weights": stale_weights,
    "stale head": stale_head,
    "stale layer": stale_layer,
    "a scale at 1": scale_of_one,
    "truncated head": truncated_head,
    "wrong rope base": wrong_rope,
    "float16 overflow": float16_overflow,
    "a dropout left on": dropout,
    "wrong temperature": wrong_temperature,
    "raw log-probabilities": raw,
    "swapped kept sets": kept_sets,
    "another chat template": other_prompt,
}


STALE = (stale_weights, stale_head, stale_layer)  # need the older weights
BY_LAYER = (stale_layer, scale_of_one)
OF_HEAD = (truncated_head, wrong_temperature, raw, kept_sets)
FINAL = 4  # number of layers that are tested on all responses


def best_finding(fault, case: Case) -> Finding | None:
    """The variant of a fault that explains most; None without variants. All layers are tested on
    one response, the FINAL best layers on all responses."""
    if fault in BY_LAYER:
        tried = sorted(fault(case.shortest()), key=lambda finding: finding.left.sum())
        case = replace(case, only=frozenset(finding.variant for finding in tried[:FINAL]))
    with body_once(case.model) if fault in OF_HEAD else contextlib.nullcontext():
        return min(fault(case), key=lambda finding: finding.left.sum(), default=None)


def suspects(case: Case) -> list[dict]:
    """The tested faults, certain faults first, then by explained share: "fault", "where",
    "explained" (at most 1) and its error."""
    before = case.left(case.expected)
    rows = []
    for name, fault in FAULTS.items():
        if fault in STALE and case.old is None:
            continue
        best = best_finding(fault, case)
        if best is not None:
            explained = 1 - best.left.sum() / before.sum()
            se = error(before.sum(1), best.left.sum(1), case.batch.group.numpy())
            row = {"fault": name, "where": best.variant, "explained": float(explained), "se": se}
            sampled = float(best.sampled[case.batch.exists.numpy()].mean())
            rows.append(row | {"sampled": sampled, "certain": best.certain})
    rows.sort(key=lambda row: -row["explained"])
    alike = [row for row in rows if row["explained"] > rows[0]["explained"] - ALIKE]
    telling = sorted(alike, key=lambda row: -row["sampled"]) + rows[len(alike) :]
    return sorted(telling, key=lambda row: not row["certain"])


def error(before, left, group) -> float:
    """Standard error of 1 - sum left / sum before, (B,) each, by bootstrap over prompts."""
    prompts = group.max() + 1
    counts = np.random.default_rng(0).multinomial(
        prompts, np.full(prompts, 1 / prompts), RESAMPLED
    )[:, group]
    return float((1 - counts @ left / np.maximum(counts @ before, 1e-300)).std())
