"""Weight sync: put new weights into the engine and prove that they are there.

The commonest silent failure of this field is an engine that goes on sampling from old weights: training continues,
the mismatch grows, and nothing reports it. An engine rounds in its own way, so its log-probabilities never equal the
learner's, and no tolerance tells a healthy bfloat16 engine from a stale one. What tells them apart is *change*. Between
two versions of the weights let, over the tokens of a probe,

    dP   the change of log-probabilities under the published tensors themselves (a forward of them alone)
    dE   the change of the engine's
    b    the slope of dE on dP:  b = <dE, dP> / <dP, dP>,  se its standard error

    b near 1    the engine has the new weights
    b near 0    it has the old ones                          SyncError
    between     it has some of the new ones                  SyncError

Rounding does not follow dP, so it widens se and leaves b alone, if dP has none of its own: there activations are not
rounded, or b would be smaller by the share of it. What rounding them does to the published tensors' log-probabilities
is taken off the engine's. Where one step is too small to see, the engine is compared with the last version that was
proved ("unproven" as long). Four things are compared in this way:

    prompt     log-probabilities of fixed sequences, as the engine reads a prompt
    decode     those of tokens that it samples one by one, which a stale cache of prefixes would spoil
    module     one module after the other: what would dP be, had this one stayed as the engine started with it?
    learner    the published tensors against the learner's own forward, of which they should be a copy (`LearnerCheck`)

Beside that, the engine's log-probabilities must be those of the published tensors as a whole (`explained`), and engine
and probe must have consumed the same (`Digest`). Tensors come as a stream, read twice: no second model is held.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
from dataclasses import dataclass, replace

import numpy as np
import torch

import quant
from sampling import Sampling

SIGMAS = 6.0  # standard errors to either side of a slope, before an engine is accused
FEW = 12.0  # of sampled tokens, whose errors are not normal: one of 800 healthy 16-bit versions was 6.2 off
SURE = 3.0  # before its weights count as proved
NEW = 0.9  # the slope of an engine with new weights is not below this
EXPLAINED = 0.9  # share of the spread of log-probabilities over tokens that engine and tensors must have in common
ROUNDOFF = {"float32": 2.0**-21, "float16": 2.0**-11, "bfloat16": 2.0**-8, "low bits": 2.0**-6}  # of activations
GROWN = 5.0  # times the error of the first version (or the format's round-off), relative to the log-probabilities
LONG_UNPROVEN = 50  # syncs in a row after which it is said aloud
GOLDEN = (5**0.5 - 1) / 2  # of all modules, how far the watched one moves on from version to version
DECODED = 4  # tokens that the engine samples after each of the probe's prompts


class SyncError(RuntimeError):
    """The engine does not have the weights that were published."""


# ---------------------------------------------------------------------------------------------------------------------
# Does one change follow another?
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slope:
    """The slope of one change on another, and its standard error; NaN where nothing has changed."""

    b: float = float("nan")
    se: float = float("nan")

    @property
    def low(self) -> float:
        return self.b - SIGMAS * self.se

    @property
    def high(self) -> float:
        return self.b + SIGMAS * self.se

    @property
    def is_new(self) -> bool:
        return self.b - SURE * self.se > 0.5

    @classmethod
    def of(cls, y: np.ndarray, x: np.ndarray, noise=0.0) -> Slope:
        """b = <y, x> / <x, x> for changes (rows, tokens); entries that are NaN do not count.

        se is the largest of three: for independent errors of tokens; for errors that a row's tokens share, from what b
        becomes when a row is left out; and for errors of y as large as `noise`, (rows, tokens) or one for all. Where
        two or three tokens have most of the change, b follows their errors, and what is left says nothing of them."""
        y, x = np.where(np.isnan(x) | np.isnan(y), 0.0, (y, x)).astype(np.float64)
        square, n = (x * x).sum(), np.count_nonzero(x)
        if square == 0 or n < 8:
            return cls()
        b = (y * x).sum() / square
        error = (y - b * x) * (x != 0)
        of_tokens = (error * error).sum() / (n - 1) / square
        without = np.maximum(square - (x * x).sum(1), 1e-9 * square)  # <x, x> of the other rows
        of_rows = np.square((error * x).sum(1) / without).sum() * (len(x) - 1) / len(x)
        of_noise = np.square(noise * x).sum() / square**2
        return cls(float(b), float(np.sqrt(max(of_tokens, of_rows, of_noise))))


def explained(y: np.ndarray, x: np.ndarray) -> float:
    """The share of the spread of x over tokens that y has too: 1 - |y - x|^2 / |x - mean x|^2."""
    return float(1 - np.square(y - x).sum() / max(np.square(x - x.mean()).sum(), 1e-30))


@dataclass(frozen=True)
class Reference:
    """What a later version is compared with: log-probabilities of one version, by engine and published tensors."""

    version: int
    engine: np.ndarray  # (R, tokens)
    published: np.ndarray  # the same
    tokens: np.ndarray | None = None  # (R, DECODED) that the engine sampled, where it did

    def state(self) -> dict:
        arrays = {"engine": self.engine, "published": self.published, "tokens": self.tokens}
        return {"version": self.version, **{k: x if x is None else torch.from_numpy(x) for k, x in arrays.items()}}

    @classmethod
    def of(cls, state: dict | None) -> Reference | None:
        if state is None:
            return None
        return cls(**{k: x.numpy() if isinstance(x, torch.Tensor) else x for k, x in state.items()})


# ---------------------------------------------------------------------------------------------------------------------
# The published tensors' side
# ---------------------------------------------------------------------------------------------------------------------


class Digest:
    """A digest of a stream of named tensors in its order: names, shapes, types, and sums over their contents.

    The sums, modulo 2^64, are taken where the tensor lies: plain, and with a weight for each position."""

    CHUNK = 1 << 20

    def __init__(self):
        self.hash = hashlib.blake2b(digest_size=16)
        self.nbytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        x = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self.nbytes += len(x)
        words = x[: len(x) // 4 * 4].view(torch.int32)
        sums = list(x[len(words) * 4 :].long())  # the bytes behind the last whole word
        for start in range(0, len(words), self.CHUNK):
            part = words[start : start + self.CHUNK].long()
            place = torch.arange(start, start + len(part), device=part.device)
            sums.append(part.sum() + ((2 * place + 1) * 0x9E3779B97F4A7C1 * part).sum())
        content = torch.stack(sums).tolist() if sums else []
        self.hash.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {content};".encode())

    def watch(self, named_tensors):
        """Pass a stream of (name, tensor) on, adding each one as it goes by."""
        for name, tensor in named_tensors:
            self.add(name, tensor)
            yield name, tensor

    def text(self) -> str:
        """32 hexadecimal digits."""
        return self.hash.hexdigest()


class Probe:
    """A model's structure without weights, the sequences that are compared, and what earlier versions said of them.

    folder: the save_pretrained folder that the engine starts from; or None, with `config`: then no module is watched.
    ids: (R, L), or one sequence. fmt: the rollout's number format. vocabulary: ids that there are; None: all rows."""

    def __init__(self, folder: str | None, ids, fmt=None, config=None, vocabulary: int | None = None):
        from checkpoint import read_config  # they import this file
        from model.memory import InFolder

        rounds_activations = fmt is not None and fmt.activations
        model = empty_model(config or read_config(folder))
        self.model = quant.align(model, fmt if rounds_activations else None).eval()
        self.rounds_activations = rounds_activations
        self.in_folder = InFolder(folder, self.model, fmt) if folder else None
        self.vocabulary = vocabulary
        self.ids = np.atleast_2d(np.asarray(ids, np.int64))
        self.prompt: Reference | None = None
        self.decode: Reference | None = None
        self.start: Reference | None = None  # of the prompts, at the first version
        self.unproven = 0  # syncs in a row without a proof
        self.first_error = 0.0  # of the engine, relative, at the first version

    def logprobs(self, named_tensors, ids=None, dtype: str = "float32", twins=None, smooth: int = 0) -> np.ndarray:
        """log p(ids[t] | ids[:t]) for t >= 1 under the tensors of a stream, in nats: float32 (rows, L - 1).

        Each module takes its tensors out of the stream when its turn comes, and gives them up behind it. The published
        tensors run through the structure, and nothing else does. dtype: of the engine, which rounds weights to it.
        twins: (a module's name, other tensors of it, n): the last n rows run with those. smooth: of so many of the
        first rows activations are not rounded, whatever the format does. SyncError: a tensor is missing."""
        ids = torch.from_numpy(self.ids if ids is None else ids)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        return self.score(named_tensors, ids, dtype, twins, smooth, device).cpu().numpy()

    @torch.no_grad()
    def score(self, named_tensors, ids, dtype: str, twins, smooth: int = 0, device=None):
        """The same of a tensor (rows, L). device: where it is computed; None: where the published tensors are."""
        from model import head  # it imports this file

        stream = Taken(named_tensors, getattr(torch, dtype), device)
        layer, hooks = self.model.get_output_embeddings(), []
        layer.forward = functools.partial(head.score, head.Head.of(self.model.config, self.vocabulary), layer)
        owners = {}  # a mixer with parameters reads those of its parts itself: they are filled together
        for name, module in self.model.named_modules():
            if published_of(module):
                above = name.rpartition(".")[0]
                owners.setdefault(above if above in owners else name, []).append((name, module))
                others, n = twins[1:] if twins is not None and twins[0] == name else ({}, 0)
                n_smooth = smooth if isinstance(module, quant.LowBitLinear | quant.LowBitExperts) else 0
                if n or n_smooth:
                    how = module, module.forward, stream.dtype, others, n / len(ids), n_smooth / len(ids)
                    module.forward = functools.partial(in_parts, *how)
        for parts in owners.values():
            hooks.append(parts[0][1].register_forward_pre_hook(functools.partial(fill, parts, stream)))
            hooks.append(parts[0][1].register_forward_hook(functools.partial(give_up, parts)))
        try:
            ids = ids.to(stream.device)
            for module in self.model.modules():
                module._buffers.update({n: x.to(ids.device) for n, x in module._buffers.items() if x is not None})
            logp = layer(self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state, ids)
        finally:
            for hook in hooks:
                hook.remove()
            for module in self.model.modules():
                vars(module).pop("forward", None)
        stream.finish()
        return logp

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompts that the engine goes on from: whole blocks of its cache, where they are long enough."""
        return max(1, self.ids.shape[1] - DECODED)

    def with_sampled(self, tokens: np.ndarray) -> np.ndarray:
        """The sequences with what the engine sampled behind their prompts, (R, L); what follows is not looked at."""
        rows, P = self.ids.copy(), self.prompt_length
        rows[:, P : P + tokens.shape[1]] = tokens.clip(0)
        return rows

    def modules(self) -> list[str]:
        """The modules that can be watched, by name: those that make one tensor of one tensor. Not routers, which make
        several, experts, which take several, and convolutions, whose tensors a mixer reads itself."""
        named = {n: m for n, m in self.model.named_modules() if m._parameters and not isinstance(m, torch.nn.Conv1d)}
        return [n for n, m in named.items() if takes_one_tensor(m) and not {*n.split(".")} & {*quant.ROUTERS}]

    def watched(self, version: int) -> tuple[str, dict[str, torch.Tensor]]:
        """The module that is watched at this version, by name, and its tensors as the engine started with them.

        Multiples of the golden ratio come to all of n modules within some 2 n syncs, whatever the stride of versions
        (8 n at the worst). No tensors: the folder has them in another way, or is gone; then nothing is watched."""
        modules = self.modules()
        name = modules[int(version * GOLDEN % 1 * len(modules))]
        return name, self.in_folder.tensors(name, self.model.get_submodule(name)) if self.in_folder else {}

    def state_dict(self) -> dict:
        parts = {"prompt": self.prompt, "decode": self.decode, "start": self.start}
        counts = {"unproven": self.unproven, "first_error": self.first_error}
        return counts | {name: part and part.state() for name, part in parts.items()}

    def load_state_dict(self, state: dict) -> None:
        """A checkpoint without references, or with those of other sequences, starts anew."""
        self.unproven, self.first_error = state.get("unproven", 0), state.get("first_error", 0.0)
        prompt, decode, start = (Reference.of(state.get(part)) for part in ("prompt", "decode", "start"))
        if prompt is not None and prompt.engine.shape == self.ids[:, 1:].shape:
            self.prompt, self.decode, self.start = prompt, decode, start


def empty_model(config):
    """A model's structure: its parameters on the meta device, one made after the other, its buffers in place."""
    from transformers import AutoModelForCausalLM

    register = torch.nn.Module.register_parameter

    def on_meta(module, name, p):
        if p is not None and not p.is_meta:  # one that is there already may be tied
            p = torch.nn.Parameter(p.to("meta"), requires_grad=False)
        register(module, name, p)

    generator = torch.get_rng_state()  # put back below: a model draws random weights
    torch.nn.Module.register_parameter = on_meta
    try:
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)  # it writes into it
    finally:
        torch.nn.Module.register_parameter = register
        torch.set_rng_state(generator)


def takes_one_tensor(module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


class Taken:
    """A stream of named tensors from which modules take theirs by name, in any order."""

    def __init__(self, named_tensors, dtype: torch.dtype, device):
        self.stream = iter(named_tensors)
        self.dtype = dtype
        name, tensor = next(self.stream)
        self.seen: dict[str, torch.Tensor] = {name: tensor}
        self.device = device or tensor.device

    def take(self, name: str) -> torch.Tensor:
        """The tensor of this name, SyncError: it does not come."""
        while name not in self.seen:
            one = next(self.stream, None)
            if one is None:
                raise SyncError(f"{name} was not published; publish the whole state dict")
            self.seen[one[0]] = one[1]
        return self.seen[name]

    def of_module(self, name: str, module) -> dict[str, torch.Tensor]:
        """The published tensors of a module's own, in its names; a low-bit weight is several."""
        taken = {}
        for own in published_of(module):
            for part in self.parts(f"{name}.{own}", module):
                taken[part.removeprefix(f"{name}.")] = self.take(part)
                del self.seen[part]
        return taken

    def parts(self, name: str, module) -> list[str]:
        if not name.endswith(".weight") and not isinstance(module, quant.LowBitExperts):
            return [name]
        if isinstance(module, quant.LowBitLinear | quant.LowBitExperts):
            return [name, f"{name}_scale"]
        while name not in self.seen and f"{name}_packed" not in self.seen:
            one = next(self.stream, None)
            if one is None:
                return [name]  # `take` says that it is missing
            self.seen[one[0]] = one[1]
        return [name] if name in self.seen else [f"{name}_packed", f"{name}_scale", f"{name}_shape"]

    def finish(self) -> None:
        """Read the stream to its end, for a digest that watches it."""
        for _ in self.stream:
            pass


def published_of(module) -> list[str]:
    """Names of a module's own tensors that are published: its parameters, and buffers that checkpoints hold."""
    own = {**module._parameters, **module._buffers}
    return [name for name, x in own.items() if x is not None and name not in module._non_persistent_buffers_set]


def fill(parts: list, stream: Taken, *_) -> None:
    """A hook before a forward: these modules, with their names, get their published tensors."""
    for name, module in parts:
        put(module, {key: x.to(stream.device) for key, x in stream.of_module(name, module).items()}, stream.dtype)


def in_parts(module, forward, dtype, others: dict, twins: float, smooth: float, *inputs):
    """A module's forward whose rows differ, or their tokens one by one: of the first share, `smooth`, it does not round
    activations, and of the last share, `twins`, it has other tensors."""
    n = len(inputs[0])
    first, last = round(smooth * n), n - round(twins * n)
    out = []
    if first:
        module.format = replace(module.format, activations=False)
        out.append(forward(*(x[:first] for x in inputs)))
        module.format = replace(module.format, activations=True)
    if first < last:
        out.append(forward(*(x[first:last] for x in inputs)))
    if last < n:
        put(module, {name: tensor.to(inputs[0].device) for name, tensor in others.items()}, dtype)
        out.append(forward(*(x[last:] for x in inputs)))
    return torch.cat(out)


def put(module, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Give a module its published tensors, as an engine of this dtype holds them."""
    if isinstance(module, quant.LowBitLinear):
        module.loaded = (tensors["weight"], tensors["weight_scale"])
    elif isinstance(module, quant.LowBitExperts):
        module.loaded = {kind: (tensors[kind], tensors[f"{kind}_scale"]) for kind in module._parameters}
        return
    elif "weight_packed" in tensors:
        tensors["weight"] = quant.unpacked(*(tensors[f"weight_{part}"] for part in ("packed", "scale", "shape")))
    for name in published_of(module):
        if name in tensors and name in module._buffers:
            module._buffers[name] = tensors[name].float()
        elif name in tensors and not (name == "weight" and isinstance(module, quant.LowBitLinear)):
            value = tensors[name].to(dtype).float()
            module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)


def give_up(parts: list, *_) -> None:
    """A hook behind a forward: these modules' tensors go."""
    for _name, module in parts:
        if isinstance(module, quant.LowBitLinear | quant.LowBitExperts):
            module.loaded = None if isinstance(module, quant.LowBitLinear) else {}
        for key, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[key] = torch.nn.Parameter(p.to("meta"), requires_grad=False)


# ---------------------------------------------------------------------------------------------------------------------
# The proof
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """What is known about the engine's weights after a publish."""

    version: int
    digest: str
    status: str  # "first", "proved", "unproven", or "same": nothing has changed
    slope: Slope  # of prompts
    decode_slope: Slope
    error: float  # root mean square of engine - published, nats
    distance: float  # of the change of the published log-probabilities since the reference
    nbytes: int  # size of the published tensors


def prove(engine, version: int, named_tensors, probe: Probe) -> Proof:
    """Load the tensors into the engine and prove that it has them, by the rules above.

    named_tensors: a stream that can be read twice. SyncError if the engine consumed other tensors, or samples from
    other weights."""
    if iter(named_tensors) is named_tensors:  # a stream that can be read once
        named_tensors = list(named_tensors)
    received, sent = Digest(), Digest()
    engine.load(received.watch(named_tensors))
    tokens, sampled = sample(engine, probe)  # before the prompts are read whole, which would renew cached prefixes
    engine_says = engine.logprobs(probe.ids)  # (R, L - 1)
    watched, old = probe.watched(version)
    published = published_says(probe, tokens, sent.watch(named_tensors), engine.dtype, watched, old)
    insist(
        sent.text() == received.text(),
        f"version {version}: the engine consumed other tensors than were published ({received.text()} instead of "
        f"{sent.text()}); its loader must take every tensor, once, in order",
    )
    if probe.rounds_activations:
        engine_says = engine_says - (published["rounded prompt"] - published["prompt"])
        sampled = sampled - (published["rounded decode"] - published["decode"])
    check_level(version, engine_says, published["prompt"])
    slope = slope_since(probe.prompt, engine_says, published["prompt"])
    error = rms(engine_says - published["prompt"])
    decode_slope = decode_since(probe.decode, tokens, sampled, published.get("decode before"), error)
    first, distance = probe.prompt is None, rms_change(probe.prompt, published["prompt"])
    statuses = {
        judge("prompts", version, probe.prompt, slope),
        judge("sampled tokens", version, probe.decode, decode_slope, FEW),
    }
    check_module(version, watched, probe.start, engine_says, published)
    pairs = {"prompts": (engine_says, published["prompt"]), "sampled tokens": (sampled, published["decode"])}
    check_growth(version, engine, probe, pairs)
    status = "first" if first else next(s for s in ("unproven", "proved", "same") if s in statuses)
    if status in ("first", "proved"):
        probe.prompt = Reference(version, engine_says, published["prompt"])
    if status in ("first", "proved") or np.isnan(decode_slope.b):
        probe.decode = Reference(version, sampled, published["decode"], tokens)
    probe.start = probe.start or Reference(version, engine_says, published["prompt"])
    probe.unproven = probe.unproven + 1 if status == "unproven" else 0
    return Proof(version, sent.text(), status, slope, decode_slope, error, distance, sent.nbytes)


def insist(ok, sentence: str) -> None:
    """SyncError with this sentence unless `ok`."""
    if not ok:
        raise SyncError(sentence)


def sample(engine, probe: Probe) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, log-probabilities) that the engine samples behind the prompts, (R, DECODED); -1 behind an end."""
    prompts = list(probe.ids[:, : probe.prompt_length])
    seeds = [[row] for row in range(len(prompts))]
    n = min(DECODED, probe.ids.shape[1] - probe.prompt_length)
    groups = engine.generate(prompts, seeds, Sampling(max_tokens=n), 0, [])
    tokens = np.full((len(prompts), n), -1, np.int64)
    logp = np.full((len(prompts), n), np.nan, np.float32)
    for row, (response,) in enumerate(groups):
        tokens[row, : len(response.tokens)] = response.tokens
        logp[row, : len(response.tokens)] = response.logp_inf
    return tokens, logp


def published_says(probe: Probe, tokens, named_tensors, dtype: str, watched: str, old: dict) -> dict[str, np.ndarray]:
    """Log-probabilities under the published tensors, by name.

    prompt (R, L - 1); decode: of the tokens that the engine has sampled now, and "decode before": of those that it
    sampled at the reference, (R, DECODED); twin (R, L - 1): with the watched module's old tensors, where there are.
    Where the format rounds activations the first three do not, but "rounded prompt", "rounded decode" and twin do."""
    rows = {"prompt": probe.ids, "decode": probe.with_sampled(tokens)}
    if probe.decode is not None:
        rows["decode before"] = probe.with_sampled(probe.decode.tokens)
    smooth, twins = 0, None
    if probe.rounds_activations:
        smooth = sum(map(len, rows.values()))
        rows |= {"rounded prompt": rows["prompt"], "rounded decode": rows["decode"]}
    if old:
        rows["twin"] = probe.ids
        twins = (watched, old, len(probe.ids))
    logp = probe.logprobs(named_tensors, np.concatenate(list(rows.values())), dtype, twins, smooth)
    says = dict(zip(rows, np.split(logp, len(rows)), strict=True))
    first = probe.prompt_length - 1
    for name in {"decode", "decode before", "rounded decode"} & set(says):
        says[name] = says[name][:, first : first + tokens.shape[1]]
    return says


def slope_since(before: Reference | None, engine_says, published) -> Slope:
    if before is None:
        return Slope()
    return Slope.of(engine_says - before.engine, published - before.published)


def decode_since(before: Reference | None, tokens, sampled, published_before, error: float) -> Slope:
    """The same for sampled tokens, as far as they are those that the engine sampled at the reference.

    They are few, and their errors unequal: errors e of logits move log p by (1 - p) e at most, which is little for most
    of what is sampled. error: of log-probabilities where p is small, as those of the prompts are; root mean square."""
    if before is None:
        return Slope()
    common = (tokens == before.tokens).cumprod(1).astype(bool)
    change = np.where(common, sampled - before.engine, np.nan)
    unlikely = np.hypot(np.expm1(before.published), np.expm1(published_before))  # 1 - p, of then and of now
    return Slope.of(change, published_before - before.published, error * unlikely)


def rms_change(before: Reference | None, published) -> float:
    return float("nan") if before is None else float(np.sqrt(np.square(published - before.published).mean()))


def judge(where: str, version: int, before: Reference | None, slope: Slope, sigmas: float = SIGMAS) -> str:
    """What a slope says: "proved", "unproven", or "same". SyncError: the engine is behind."""
    if np.isnan(slope.b):
        return "same"
    low, high = slope.b - sigmas * slope.se, slope.b + sigmas * slope.se
    changed = f"version {version}: of what changed since version {before.version} in the log-probabilities of {where} "
    shows = f"{changed}the engine shows {slope.b:.3g} +- {slope.se:.2g} of 1: it"
    insist(high >= NEW, f"{shows} samples from {'old weights' if high < 0.5 else 'weights of which some are old'}")
    insist(low <= 2 - NEW, f"{shows} has other weights")
    return "proved" if slope.is_new else "unproven"


def check_level(version: int, engine_says, published) -> None:
    """SyncError unless the engine's log-probabilities are those of the published tensors, up to its rounding."""
    insist(np.isfinite(engine_says).all(), f"version {version}: the engine's log-probabilities are not finite")
    share = explained(engine_says, published)
    insist(
        share >= EXPLAINED,
        f"version {version}: the engine's log-probabilities are not those of the published weights (they share "
        f"{max(0.0, share):.2f} of their spread, and at least {EXPLAINED} is usual for any format): a scale, a head or "
        "a layer is missing",
    )


def check_growth(version: int, engine, probe: Probe, pairs: dict) -> None:
    """SyncError if the engine has drifted away from the published tensors since the first version, part by part.

    pairs: where -> (engine, published). Rounding is relative to the logits, whose size is that of the log-probabilities
    of the prompts: those of sampled tokens go to 0 as a policy becomes sure, and their errors do not."""
    fmt = getattr(engine, "fmt", None)
    roundoff = ROUNDOFF["low bits" if fmt is not None and fmt.activations else engine.dtype]
    size = rms(pairs["prompts"][1])
    errors = {where: rms(says - published) / size for where, (says, published) in pairs.items()}
    probe.first_error = probe.first_error or max(roundoff, *errors.values())
    for where, error in errors.items():
        insist(
            error <= GROWN * probe.first_error,
            f"version {version}: the engine's log-probabilities of {where} have drifted away from those of the "
            f"published weights (relative error {error:.2g}, at first {probe.first_error:.2g}): some weights "
            "that it uses, or prefixes that it keeps, are old",
        )


def rms(x: np.ndarray) -> float:
    """Root mean square of the entries that are there; 1e-30 at least."""
    there = x[~np.isnan(x)]
    return max(float(np.sqrt(np.square(there, dtype=np.float64).mean())), 1e-30) if len(there) else 1e-30


def check_module(version: int, watched: str, start: Reference | None, engine_says, published: dict) -> None:
    """SyncError if the engine has all new weights but those of the watched module: it lacks what they changed."""
    if "twin" in published and start is not None:
        lacking = (published["prompt"] - start.published) - (engine_says - start.engine)
        rounded = published.get("rounded prompt", published["prompt"])  # as the twin is
        slope = Slope.of(lacking, rounded - published["twin"])
        insist(
            not slope.low > 0.5,
            f"version {version}: the engine has not got the new weights of {watched} (it lacks {slope.b:.3g} +- "
            f"{slope.se:.2g} of what they changed)",
        )
