"""Weight sync: put new weights into the engine and prove that they are there.

The commonest silent failure of this field is an engine that goes on sampling from old weights:
training continues, the mismatch grows, and nothing reports it. So every publish ends in a proof,
from three facts:

  version   the engine's source names the version it was given;
  digest    SHA-256 over names, shapes, types and bytes, computed twice: over what was published,
            and over what the engine consumed;
  probe     log-probabilities of a fixed sequence, computed by the engine, against those of a
            forward pass of *the published tensors*.

With, over the probe's tokens, e = max |engine - published| and d = max |published - published before|,

    e <= tolerance and e < d / 4      proved: the engine has the new weights and not the old ones
    e <= tolerance, d too small       unproven: the two versions are too close to be told apart by a
                                      probe; version and digest must do
    e >  tolerance                    SyncError, never a warning

An engine that rounds activations may round a value between two steps the other way than the learner
does, so its tolerance is wider. Its weights are still compared bit for bit, by the digest.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import quant

# The largest error of the probe that is accepted, in nats: by the engine's precision, and for engines
# that round activations.
TOLERANCE = {"float32": 1e-4, "float64": 1e-4, "float16": 2e-2, "bfloat16": 1.5e-1}
TOLERANCE_ROUNDED = 0.5


class SyncError(RuntimeError):
    """The engine does not have the weights that were published."""


@dataclass(frozen=True)
class Proof:
    """What is known about the engine's weights after a publish."""

    version: int
    digest: str
    status: str  # "proved", "unproven", or "first": there was no version before to compare with
    error: float  # e above, in nats
    distance: float  # d above, in nats; NaN for the first version
    nbytes: int  # size of the published tensors


class Digest:
    """SHA-256 of a stream of named tensors, in the order of the stream."""

    def __init__(self):
        self.hash = hashlib.sha256()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        x = tensor.detach().contiguous().cpu()
        self.hash.update(f"{name} {tuple(x.shape)} {x.dtype};".encode())
        self.hash.update(x.reshape(-1).view(torch.uint8).numpy())

    def watch(self, named_tensors):
        """Pass a stream of (name, tensor) on, adding each one as it goes by."""
        for name, tensor in named_tensors:
            self.add(name, tensor)
            yield name, tensor

    def text(self) -> str:
        """32 hexadecimal digits."""
        return self.hash.hexdigest()[:32]


class Probe:
    """The learner's side of the probe: a model's structure without weights, and a fixed sequence.

    folder: a save_pretrained folder, of which only config.json is read; or None, with `config`.
    ids: the sequence's token ids, int [n]. fmt: the rollout's number format (quant.py)."""

    def __init__(self, folder: str | None, ids, fmt: quant.Format | None = None, config=None):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = config or AutoConfig.from_pretrained(folder)
        generator = torch.get_rng_state()  # put back below: a model is built with random weights
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        torch.set_rng_state(generator)
        rounds_activations = fmt is not None and fmt.activations
        self.model = quant.align(model, fmt if rounds_activations else None)
        self.names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        self._drop_weights()
        self.ids = np.asarray(ids, np.int64)
        self.previous: np.ndarray | None = None  # log-probabilities of the version published last

    def _drop_weights(self) -> None:
        """Keep the structure and its buffers; move the parameters to the meta device."""
        for module in self.model.modules():
            for name, p in list(module._parameters.items()):
                if p is not None:
                    module._parameters[name] = torch.nn.Parameter(p.to("meta"), requires_grad=False)

    @torch.no_grad()
    def logprobs(self, tensors: dict[str, torch.Tensor]) -> np.ndarray:
        """log p(ids[t] | ids[:t]) for t >= 1 under the tensors given, in nats: float32 [n - 1].

        The published tensors run through the structure, and nothing else does: SyncError if one of
        them was left out of the publication, so that it cannot be filled in from somewhere."""
        tensors = quant.load_quantized(self.model, tensors)
        self._check_complete(tensors)
        device = next(iter(tensors.values())).device
        for module in self.model.modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        weights = {name: x.float() for name, x in tensors.items() if name in self.names}
        ids = torch.from_numpy(self.ids)[None].to(device)  # (1, n)
        inputs = {"input_ids": ids, "use_cache": False}
        out = torch.func.functional_call(self.model, weights, (), inputs, tie_weights=False)
        logp = torch.log_softmax(out.logits[0, :-1].float(), -1)  # (n - 1, V)
        return logp.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()

    def _check_complete(self, tensors: dict[str, torch.Tensor]) -> None:
        """SyncError if a parameter is neither among the tensors nor held by a low-bit layer."""
        linears = quant.quantized_linears(self.model)
        loaded = {f"{name}.weight" for name, m in linears.items() if getattr(m, "loaded", None)}
        missing = sorted(self.names - set(tensors) - loaded)
        if missing:
            raise SyncError(
                f"{len(missing)} tensors were not published, {missing[0]} among them; publish the whole state dict"
            )

    def state_dict(self) -> dict:
        return {"previous": None if self.previous is None else torch.from_numpy(self.previous)}

    def load_state_dict(self, state: dict) -> None:
        self.previous = None if state["previous"] is None else state["previous"].numpy()


def prove(engine, version: int, named_tensors, probe: Probe) -> Proof:
    """Load the tensors into the engine and prove that it has them, by the rules above.

    SyncError if the engine consumed other bytes, or samples from other weights."""
    tensors = dict(named_tensors)
    sent, received = Digest(), Digest()
    for name, tensor in tensors.items():
        sent.add(name, tensor)
    engine.load(received.watch(tensors.items()))
    if sent.text() != received.text():
        raise SyncError(
            f"version {version}: the engine consumed other bytes than were published "
            f"({received.text()} instead of {sent.text()}); its loader must take every tensor, once, in order"
        )
    published = probe.logprobs(tensors)
    error = float(np.abs(engine.logprobs(probe.ids) - published).max())
    limit = tolerance(engine)
    if not error <= limit:  # also where it is NaN
        raise SyncError(
            f"version {version}: the engine's log-probabilities differ by {error:.3g} nats from the published weights' "
            f"(tolerance {limit:g} for {engine.dtype}); it is not sampling from these weights"
        )
    if probe.previous is None:
        status, distance = "first", float("nan")
    else:
        distance = float(np.abs(published - probe.previous).max())
        status = "proved" if error < distance / 4 else "unproven"
    probe.previous = published
    nbytes = sum(x.numel() * x.element_size() for x in tensors.values())
    return Proof(version, sent.text(), status, error, distance, nbytes)


def tolerance(engine) -> float:
    """The largest error that the probe accepts of an engine, in nats."""
    fmt = getattr(engine, "fmt", None)
    if fmt is not None and fmt.activations:
        return TOLERANCE_ROUNDED
    return TOLERANCE[engine.dtype]


# ---------------------------------------------------------------------------------------------------------------------
# Weights on disk
# ---------------------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: dict, mark: str = "") -> None:
    """Write published tensors to one safetensors file, in their order: completely or not at all.

    Tensors that share memory are written once. mark: an ending for the scratch file, different for
    each writer where several may write to the same path."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    own = {}
    first_name = {}  # of the tensors at one address
    alias = {}  # name -> the name under which its bytes are in the file
    for name, x in tensors.items():
        first = first_name.setdefault((x.data_ptr(), x.shape, x.dtype), name)
        if first == name:
            own[name] = x.contiguous().cpu()
        else:
            alias[name] = first
    # One entry for both: safetensors writes several in any order, and equal weights must make
    # equal files.
    metadata = {"order": json.dumps([list(tensors), alias])}
    scratch = path.with_name(path.name + (mark or ".writing"))
    save_file(own, scratch, metadata=metadata)
    scratch.replace(path)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors that write_tensors wrote, in their order."""
    from safetensors import safe_open

    with safe_open(path, "pt") as f:
        names, alias = json.loads(f.metadata()["order"])
        return {name: f.get_tensor(alias.get(name, name)) for name in names}
