"""Weight sync: load new weights into an engine and check that the engine has them.

An engine that keeps sampling from old weights fails silently: training continues and the mismatch
grows. Two checks detect it.

Bytes, at every sync. The checksum of an engine tensor must equal the sum of its published parts'
checksums. At RL learning rates 99 % of the bytes of a bfloat16 model stay the same from one version
to the next; the check detects a single changed byte. The checksum of a tensor is

    sum over its words w of  w ((K w) >> 29)    modulo 2^64,

with words of 64 bits, or of 32, 16 or 8 if a row's bytes are not a multiple of 8. The checksum
does not depend on the order of the words or on zero words. So fused (q, k and v in one),
sharded, transposed and padded tensors can be compared without restoring their layout. If a kernel
repacks its weights, the checksum is taken before repacking (model/in_vllm.py).

Behaviour, once per engine and layout of the published tensors. A checksum cannot detect exchanged
tensors, a wrong scale, or a kernel that uses a separate copy. So the engine first loads the weights
with rows rolled by one, which have the same checksums, then the unrolled weights. After each load,
the engine's log-probabilities of fixed sequences are compared with a forward pass on the published
tensors (model/streamed.py):

    rms(log p_engine - log p_published) <= 5 f,    f = rms(log p_nudged - log p_published)

If f is at most half of the standard deviation of log p_published, the limit is also capped at this
deviation. On the first rollouts the probabilities of sampled tokens are compared
(model/agreement.py).

The noise floor f is measured on the same model and sequences, with one more forward pass in which
each module's output is perturbed by the engine's rounding error. On SmolLM2-135M, engine errors are
0.3 to 2.2 f in float32, bfloat16, int8, fp8 and w4a16. Cached prefixes need no check: vLLM's cache
is keyed by the number of loads (VLLMEngine.generate)."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass

import numpy as np
import torch

from model.streamed import StreamedModel

K = 0x1E3779B97F4A7C15  # odd
# words per step: a CPU's cache, 128 MiB of a GPU
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
LIMIT = 5.0  # tolerance, in multiples of the noise floor
TURN_OFF = "--check_sync=False trains without this check"


class SyncError(RuntimeError):
    """The engine does not have the weights that were published."""


# -- Checksums


def checksum(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Checksum of a tensor's bytes after a cast to `dtype`, int64 (), on the tensor's device."""
    x, dtype = x.detach(), dtype or x.dtype
    if x.ndim == 2 and not x.is_contiguous():  # a transposed view that a kernel uses
        x = x.t()
    row = (x.shape[-1] if x.ndim > 1 else 1) * dtype.itemsize
    word = next(
        kind
        for kind in (torch.int64, torch.int32, torch.int16, torch.int8)
        if row % kind.itemsize == 0
    )
    at_once = CHUNK.get(x.device.type, CHUNK["cuda"]) * word.itemsize // dtype.itemsize
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for numbers in x.reshape(-1).split(at_once):
        words = numbers.to(dtype).view(word).to(torch.int64)
        mixed = words * K
        mixed >>= 29
        mixed *= words
        total += mixed.sum()
    return total


def checksums(
    named_tensors: dict[str, torch.Tensor],
) -> dict[str, tuple[int, torch.dtype]]:
    """name -> (checksum, dtype) of tensors; tensors that share memory are read once."""
    sums, places = {}, {}
    for name, x in named_tensors.items():
        places[name] = (x.data_ptr(), x.shape, x.dtype)
        if places[name] not in sums:
            sums[places[name]] = checksum(x)
    on_host = to_host(sums)
    return {name: (on_host[place], place[2]) for name, place in places.items()}


def to_host(sums: dict) -> dict:
    """The dict with the values of its 0-d tensors, read in one transfer."""
    values = torch.stack(list(sums.values())).tolist() if sums else []
    return dict(zip(sums, values, strict=True))


class Stream:
    """Checksums of a stream of named tensors, computed while the stream is read.

    types: name -> dtype of the tensor in the engine; default: unchanged. rows: number of rows of
    embedding and head in the engine; None: all."""

    def __init__(self, types: dict[str, torch.dtype], rows: int | None):
        self.types, self.rows = types, rows
        self.sums: dict[str, torch.Tensor] = {}
        self.layout: list[tuple] = []  # (name, shape, dtype)
        self.nbytes = 0

    def watch(self, named_tensors):
        """Yield the tensors of a stream, and record the checksum of each tensor."""
        for name, x in named_tensors:
            self.layout.append((name, tuple(x.shape), x.dtype))
            self.nbytes += x.nbytes
            held = x if self.rows is None or not is_vocabulary(name) else x[: self.rows]
            self.sums[name] = checksum(held, self.types.get(name))
            yield name, x


def is_vocabulary(name: str) -> bool:
    """Whether a tensor has a row for each token id."""
    return name.endswith(("embed_tokens.weight", "lm_head.weight", "lm_head.bias"))


def rolled(named_tensors):
    """Yield the tensors with rows rolled by one: a different model, the same checksums."""
    for name, x in named_tensors:
        # int64 tensors are the shapes of packed int4 weights
        if x.ndim and x.dtype != torch.int64:
            bits = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
            x = bits.roll(1, -2 if x.ndim > 1 and x.shape[-2] > 1 else -1).view(x.dtype)
        yield name, x


# -- Names


def key(name: str) -> str:
    """A tensor's name without engine-dependent prefix: from `layers.` on, or the last two parts."""
    name = name.replace(".routed_experts.", ".")
    start = f".{name}".find(".layers.")
    return name[start:] if start >= 0 else ".".join(name.split(".")[-2:])


def parts_of(held, published, fused: dict[str, list[str]]) -> dict[str, list[str]]:
    """engine tensor -> its published parts. fused: name of a fused module -> names of its parts."""
    by_key, parts_of_tensor = {key(name): name for name in published}, {}
    for name in held:
        for module, parts in {"": [""], **fused}.items():  # first the tensor itself
            keys = [key(name).replace(module, part) for part in parts]
            if all(part in by_key for part in keys):
                parts_of_tensor[name] = [by_key[part] for part in keys]
                break
    return parts_of_tensor


# -- The check


@dataclass(frozen=True)
class Synced:
    """Result of a checked weight sync."""

    version: int
    digest: str  # of the published tensors
    # share of tensors that changed since the last sync; NaN at the first sync
    changed: float
    nbytes: int  # of the published tensors
    # rms(log p_engine - log p_published), nats; NaN if behaviour was not compared
    error: float
    floor: float  # noise floor of `error`


class WeightCheck:
    """Load weights into an engine and check that the engine has them.

    config: transformers config. ids: the sequences (R, L) to compare on. fmt: number format of the
    engine's linear layers. vocabulary: number of token ids; None: all rows of the embedding."""

    def __init__(self, config, ids, fmt=None, vocabulary: int | None = None):
        self.ids = np.atleast_2d(np.asarray(ids, np.int64))
        self.model = StreamedModel(config, fmt, vocabulary)
        self.engine = None  # last engine for which behaviour was compared
        self.layout: list[tuple] = []  # layout of the tensors published to this engine
        # published tensor -> dtype in the engine
        self.types: dict[str, torch.dtype] = {}
        self.parts: dict[str, list[str]] = {}  # engine tensor -> published tensors
        self.in_place: set[str] = set()  # engine tensors that kernels read in place
        self.before: dict[str, int] = {}  # checksums of the last version
        self.version = -1

    def load(self, engine, version: int, named_tensors) -> Synced:
        """Load named tensors, an iterable that can be read more than once. SyncError: the engine
        does not have these tensors."""
        error = floor = float("nan")
        if engine is self.engine:
            stream, loaded = self._load(engine, named_tensors)
        if engine is not self.engine or stream.layout != self.layout:
            engine.load(rolled(named_tensors))
            held, packed = engine.held()
            self._compare(engine, version, rolled(named_tensors), trial=True)
            held = held | packed
            self.parts = parts_of(
                held, [name for name, _ in named_tensors], engine.fused
            )
            self.types = {
                p: held[name][1] for name, parts in self.parts.items() for p in parts
            }
            stream, loaded = self._load(engine, named_tensors)
            error, floor = self._compare(engine, version, named_tensors)
            self._keep_readable(engine, loaded)
            self.engine, self.layout = engine, stream.layout
        stale = self._differing(engine, loaded)
        if stale:
            names = [part for name in stale for part in self.parts[name]]
            suffix = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
            state = "holds bytes that differ from the published bytes"
            if all(self._matches(engine, name, self.before) for name in stale):
                state = f"still holds the bytes of version {self.version}"
            raise SyncError(
                f"version {version}: the engine {state} in {names[0]}{suffix}; {TURN_OFF}"
            )
        changed = [loaded[name] != self.before.get(name) for name in loaded]
        share = float(np.mean(changed)) if self.before else float("nan")
        self.before, self.version = loaded, version
        return Synced(
            version, digest(stream.layout, loaded), share, stream.nbytes, error, floor
        )

    def _load(self, engine, named_tensors) -> tuple[Stream, dict[str, int]]:
        """Load the tensors; return the stream and its checksums by name. Store the engine's
        checksums in `self.held`."""
        stream = Stream(self.types, engine.held_rows)
        passing = stream.watch(named_tensors)
        engine.load(passing)
        for _ in passing:  # tensors that the engine did not read
            pass
        self.held = engine.held()
        return stream, to_host(stream.sums)

    def _differing(self, engine, loaded: dict[str, int]) -> list[str]:
        """Engine tensors with checksums that differ from their published parts'."""
        return [name for name in self.parts if not self._matches(engine, name, loaded)]

    def _matches(self, engine, name: str, loaded: dict[str, int]) -> bool:
        held, packed = self.held
        sums = held if name in self.in_place else packed
        return sums[name][0] in totals(
            [loaded.get(part, 0) for part in self.parts[name]], engine.tp
        )

    def _keep_readable(self, engine, loaded: dict[str, int]) -> None:
        """Remove engine tensors without comparable checksums from `parts`; warn about them."""
        held, packed = self.held
        self.in_place = set(held)
        self.in_place -= {
            name for name in self._differing(engine, loaded) if name in packed
        }
        for name in self._differing(engine, loaded):
            del self.parts[name]
        read = {part for parts in self.parts.values() for part in parts}
        # some engines store a tied head only once
        tied = {loaded[name] for name in read}
        unread = [
            name
            for name in loaded
            if name not in read and not (is_vocabulary(name) and loaded[name] in tied)
        ]
        if unread:
            print(
                f"weight sync: the bytes of {len(unread)} tensors, such as {unread[0]}, cannot be read back from "
                "this engine; their loading was checked once, by comparing log-probabilities",
                file=sys.stderr,
            )

    def _compare(
        self, engine, version: int, named_tensors, trial: bool = False
    ) -> tuple[float, float]:
        """Compare the engine's log-probabilities with a forward pass on the published tensors:
        (error, noise floor), in nats.

        SyncError: the error is too large for rounding. trial: the weights are rolled, so 16-bit
        numbers may overflow."""
        dtype = getattr(torch, engine.dtype)
        engine_logp = engine.logprobs(self.ids)  # (R, L - 1)
        rows = np.concatenate([self.ids, self.ids])  # the second half is nudged
        # an fp8 cache has a relative rounding error of 2^-4
        nudge = torch.finfo(dtype).eps / 2 if engine.kv_cache == "auto" else 2.0**-4
        try:
            logp = self.model.logprobs(named_tensors, rows, engine.dtype, nudge)
        except KeyError as e:
            raise SyncError(
                f"{e.args[0]} was not published; publish the complete state dict"
            ) from None
        published, nudged = np.split(logp, 2)
        if trial and not (np.isfinite(engine_logp).all() and np.isfinite(logp).all()):
            return float("nan"), float("nan")
        error, floor = rms(engine_logp - published), rms(nudged - published)
        spread = float(published.std())
        limit = LIMIT * floor if 2 * floor > spread else min(LIMIT * floor, spread)
        if not error <= limit:
            hint = (
                "that the test weights (rows rolled by one) should give: the engine computes with copies that its "
                "loader does not replace, or computes a different function"
                if trial
                else "that the published weights should give: in the engine a tensor is transposed, exchanged, scaled "
                "or missing"
            )
            raise SyncError(
                f"version {version}: the engine's log-probabilities are {error:.3g} nats away from the values {hint} "
                f"(rounding explains {floor:.3g}); {TURN_OFF}"
            )
        return error, floor


def totals(sums: list[int], tp: int) -> set[int]:
    """Checksums that a tensor of these parts can have, summed over `tp` ranks: all parts are
    sharded, or all but the first (keys and values) are replicated, or all parts are replicated."""
    first, others = sums[0], sum(sums[1:])
    return {wrap(a * first + b * others) for b in range(1, tp + 1) for a in (1, b)}


def wrap(n: int) -> int:
    """n modulo 2^64, as a signed integer."""
    return (n + 2**63) % 2**64 - 2**63


def rms(x: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.square(x, dtype=np.float64).mean()))


def digest(layout: list[tuple], sums: dict[str, int]) -> str:
    """Hash (32 hexadecimal digits) of names, shapes, dtypes and checksums of published tensors."""
    return hashlib.blake2b(repr((layout, sums)).encode(), digest_size=16).hexdigest()
