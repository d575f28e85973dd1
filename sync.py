"""Weight sync: put new weights into the engine and prove that they are there.

The commonest silent failure of this field is an engine that goes on sampling from old weights: training continues, the
mismatch grows, nothing says so. So every publish ends in a proof, from three facts:

  version   the engine's source names the version it was given;
  digest    SHA-256 over names, shapes, types and bytes: once over what was published, once over what the engine consumed;
  probe     log-probabilities of a fixed sequence, by the engine, against a forward pass of *the published tensors*.

With e = max |engine - published| and d = max |published - previously published| over the probe's tokens,

    e <= tolerance and e < d / 4      proved: the engine has the new weights and not the old ones
    e <= tolerance, d too small       unproven: the two versions are too close to tell, version and digest must do
    e >  tolerance                    SyncError, never a warning

A quantized engine rounds activations, and a value that lies between two steps may go either way on the two sides: its tolerance is
wider. Its weights are compared bit for bit by the digest all the same.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import quant

TOLERANCE = {"float32": 1e-4, "float64": 1e-4, "float16": 2e-2, "bfloat16": 1.5e-1}  # nats, by the engine's precision
ROUNDED = 0.5  # nats, for engines that round activations


class SyncError(RuntimeError):
    """The engine does not have the weights that were published."""


@dataclass(frozen=True)
class Proof:
    """What is known about the engine's weights after a publish. error and distance: nats, over the probe's tokens."""

    version: int
    digest: str
    status: str  # "proved" | "unproven" | "first": nothing to compare with yet
    error: float
    distance: float
    nbytes: int  # moved


class Digest:
    """SHA-256 of a stream of named tensors, in its order; `watch` passes the stream on while hashing it."""

    def __init__(self):
        self.hash = hashlib.sha256()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        x = tensor.detach().contiguous().cpu()
        self.hash.update(f"{name} {tuple(x.shape)} {x.dtype};".encode())
        self.hash.update(x.reshape(-1).view(torch.uint8).numpy())

    def watch(self, named_tensors):
        for name, tensor in named_tensors:
            self.add(name, tensor)
            yield name, tensor

    def text(self) -> str:
        return self.hash.hexdigest()[:32]


class Probe:
    """The learner's side of the probe: the model's structure without weights, and a fixed sequence of token ids.

    logprobs(tensors) runs the published tensors, and nothing else, through that structure: a tensor left out of the
    publication fails here instead of being filled from somewhere."""

    def __init__(self, folder: str | None, ids, fmt: quant.Format | None = None, config=None):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = config or AutoConfig.from_pretrained(folder)
        state = torch.get_rng_state()
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.model = quant.align(model, fmt if fmt and fmt.activations else None)
        torch.set_rng_state(state)
        self.names = {n for n, _ in self.model.named_parameters(remove_duplicate=False)}
        for module in self.model.modules():  # keep the structure and its buffers, drop the weights
            for name, p in list(module._parameters.items()):
                if p is not None:
                    module._parameters[name] = torch.nn.Parameter(p.to("meta"), requires_grad=False)
        self.ids, self.previous = np.asarray(ids, np.int64), None

    @torch.no_grad()
    def logprobs(self, tensors: dict[str, torch.Tensor]) -> np.ndarray:
        """log p(ids[t] | ids[:t]), t >= 1, under the tensors given, float32 [len(ids) - 1]."""
        tensors = quant.load_quantized(self.model, tensors)
        missing = (
            self.names
            - set(tensors)
            - {f"{n}.weight" for n, m in quant.quantized_linears(self.model).items() if getattr(m, "loaded", None)}
        )
        if missing:
            raise SyncError(
                f"{len(missing)} tensors were not published, {sorted(missing)[0]} among them; publish the whole state dict"
            )
        device = next(iter(tensors.values())).device
        weights = {k: v.float() for k, v in tensors.items() if k in self.names}
        ids = torch.from_numpy(self.ids)[None].to(device)
        for module in self.model.modules():
            for name, b in list(module._buffers.items()):
                module._buffers[name] = b if b is None else b.to(device)
        out = torch.func.functional_call(
            self.model, weights, (), {"input_ids": ids, "use_cache": False}, tie_weights=False
        )
        logp = torch.log_softmax(out.logits[0, :-1].float(), -1)
        return logp.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()

    def state_dict(self) -> dict:
        return {"previous": None if self.previous is None else torch.from_numpy(self.previous)}

    def load_state_dict(self, state: dict) -> None:
        self.previous = None if state["previous"] is None else state["previous"].numpy()


def write_tensors(path: Path, tensors: dict, mark: str = "") -> None:
    """Published tensors as one safetensors file, whole or not at all, in their order; tensors that share memory are written once. mark: of the writer."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    own, alias, at = {}, {}, {}
    for name, x in tensors.items():
        first = at.setdefault((x.data_ptr(), x.shape, x.dtype), name)
        alias |= {} if first == name else {name: first}
        own |= {name: x.contiguous().cpu()} if first == name else {}
    scratch = path.with_name(path.name + (mark or ".writing"))
    save_file(
        own, scratch, metadata={"order": json.dumps([list(tensors), alias])}
    )  # one entry: several come in any order, and equal weights in unequal files
    scratch.replace(path)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The inverse of write_tensors."""
    from safetensors import safe_open

    with safe_open(path, "pt") as f:
        names, alias = json.loads(f.metadata()["order"])
        return {n: f.get_tensor(alias.get(n, n)) for n in names}


def prove(engine, version: int, named_tensors, probe: Probe) -> Proof:
    """Load the tensors into the engine and prove it (see above). SyncError if the engine turns out to be wrong."""
    tensors, sent, received = dict(named_tensors), Digest(), Digest()
    for name, tensor in tensors.items():
        sent.add(name, tensor)
    engine.load(received.watch(tensors.items()))
    if sent.text() != received.text():
        raise SyncError(
            f"version {version}: the engine consumed other bytes than were published "
            f"({received.text()} instead of {sent.text()}); its loader must take every tensor, once, in order"
        )
    published, sampled = probe.logprobs(tensors), engine.logprobs(probe.ids)
    error = float(np.abs(sampled - published).max())
    distance = float("nan") if probe.previous is None else float(np.abs(published - probe.previous).max())
    fmt = getattr(engine, "fmt", None)
    tolerance = ROUNDED if fmt and fmt.activations else TOLERANCE[engine.dtype]
    if not error <= tolerance:
        raise SyncError(
            f"version {version}: the engine's log-probabilities differ by {error:.3g} nats from the published weights' "
            f"(tolerance {tolerance:g} for {engine.dtype}); it is not sampling from these weights"
        )
    status = "first" if probe.previous is None else "proved" if error < distance / 4 else "unproven"
    probe.previous = published
    return Proof(
        version, sent.text(), status, error, distance, sum(x.numel() * x.element_size() for x in tensors.values())
    )
