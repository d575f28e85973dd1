"""Memory of models: the placement of weights, gradients and activations.

    unread      a model with parameters that take no memory until they are placed
    shard       FSDP2: each rank owns a shard of every parameter, and gathers one layer at a time
    fill        allocate the parameters, and read each rank's shards of them from the files
    recompute   recompute activations inside a layer in the backward pass (--gradient_checkpointing)

Master weights, gradients and optimizer states are float32 for every precision of the files, and
with FSDP2 they are sharded. During training no GPU has the whole model in float32, except with a
single rank or with DDP; for a checkpoint the first rank gathers it in host memory. A plain sampler
(--rollout=hf, --eval_engine=torch) is a whole copy on each rank."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import quant
from config import OptimizerFlags
from machinery.checkpoint.models import (
    in_files,
    load_model,
    on_meta,
    one_sentence,
    read_config,
    weight_files,
)
from machinery.flags import need
from model import exact, lora

# ---------------------------------------------------------------------------------------------------------------------
# Reading weights
# ---------------------------------------------------------------------------------------------------------------------

PIECE = 1 << 24  # entries that are read at once: 64 MiB in float32
PLAIN = {"F64", "F32", "F16", "BF16"}  # dtypes of unquantized weights in a file


@dataclass(frozen=True)
class OnDisk:
    """Location of the weights of a model that has not read them yet. adapter: folder of LoRA
    adapters; None: new adapters, drawn from seed."""

    folder: str
    adapter: Path | None = None
    seed: int = 0


def unread(folder: Path | str):
    """The model of a folder, with its parameters on the meta device, where they take no memory;
    `fill` reads them."""
    model = quant.empty_model(read_config(folder)).requires_grad_(True).eval()
    model.on_disk = OnDisk(str(folder))
    return model


@torch.no_grad()
def fill(models: nn.Module, device: str) -> None:
    """Move models to their device; allocate and read the weights of models made by `unread`.

    Parameters remain the same objects. Raises UserError if the weights do not fit the config."""
    if any(x.device != torch.device(device) for x in chain(models.parameters(), models.buffers())):
        with parameters_stay_objects():
            models._apply(
                lambda x: torch.empty_like(x, device=device) if x.is_meta else x.to(device)
            )
    for model in models.children():
        if hasattr(model, "on_disk"):
            source = vars(model).pop("on_disk")
            read(model, source.folder)
            lora.start(model, source.seed, source.adapter)


@contextmanager
def parameters_stay_objects():
    """Context in which a moved module keeps its Parameter objects, so that tied weights stay
    tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def read(model, folder: Path | str) -> None:
    """Fill a model's parameters and buffers from the files of a folder, tensor by tensor; a rank
    reads only its rows.

    If names or dtypes in the files are not those of the model, transformers reads them
    (`read_whole`)."""
    stored = Stored(folder)
    tensors = stored.named(model)
    if not stored.fit(model, tensors):
        read_whole(tensors, folder)
        return
    with one_sentence(folder, "weights", "copy the folder again"):
        for name, x in tensors.items():
            first, local_rows = own_rows(x)
            for row, piece in stored.pieces(name, first, first + len(local_rows)):
                local_rows[row - first : row - first + len(piece)].copy_(piece)


def own_rows(x) -> tuple[int, torch.Tensor]:
    """(index of the first row, rows) of this rank's shard; all rows if the tensor is not
    sharded."""
    if not hasattr(x, "to_local"):
        return 0, x.detach()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return offset[0], x.detach().to_local()


def read_whole(tensors: dict, folder: Path | str) -> None:
    """Fill these tensors by transformers, which supports each family's older names and formats.

    With shards only the first rank loads the whole model, in the precision of the files, and
    distributes it tensor by tensor."""
    sharded = any(hasattr(x, "to_local") for x in tensors.values())
    loaded, why = {}, [""]
    if not sharded or dist.get_rank() == 0:
        try:
            loaded = load_model(folder, "auto").state_dict()
        except ValueError as e:  # the other ranks must raise it too
            why = [str(e)]
    if sharded:
        dist.broadcast_object_list(why, src=0)
    need(not why[0], why[0])
    for name, x in tensors.items():
        full_tensors = (
            loaded[name].to(x.device, x.dtype)
            if loaded
            else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        )
        lora.copy_into(x, full_tensors)


class Stored:
    """The tensors in the safetensors files of a model folder."""

    def __init__(self, folder: Path | str):
        from safetensors import safe_open

        folder = Path(folder)
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, list[int]] = {}
        self.types: set[str] = set()
        for file in filter(Path.is_file, weight_files(folder)):
            with safe_open(file, "pt") as f:
                for name in f.keys():  # noqa: SIM118  not a dictionary
                    self.files[name] = file
                    self.shapes[name] = f.get_slice(name).get_shape()
                    self.types.add(f.get_slice(name).get_dtype())

    def named(self, model) -> dict[str, torch.Tensor]:
        """The model's tensors to read, by their names in the files. Tied tensors appear once, under
        the name that a file has."""
        names: dict[int, list[str]] = {}
        tensors = {}
        for name, x in model.state_dict(keep_vars=True).items():
            if not lora.is_adapters(name):
                names.setdefault(id(x), []).append(name.replace(".base_layer.", "."))
                tensors[id(x)] = x
        return {
            next((n for n in names[i] if n in self.files), names[i][0]): x
            for i, x in tensors.items()
        }

    def fit(self, model, tensors: dict) -> bool:
        """Whether the files have each of these tensors with its name and shape, unquantized."""
        if (
            not self.types <= PLAIN
            or hasattr(model.config, "quantization_config")
            or rearranges(model)
        ):
            return False
        return all(x.ndim and self.shape(name, x) == list(x.shape) for name, x in tensors.items())

    def shape(self, name: str, x) -> list[int] | None:
        """The shape in the files of the tensor that is read into x; None: it is missing."""
        parts = expert_parts(name, 0)
        if name in self.shapes or not parts:
            return self.shapes.get(name)
        shapes = [self.shapes.get(part) for e in range(len(x)) for part in expert_parts(name, e)]
        alike = shapes[0] is not None and all(shape == shapes[0] for shape in shapes)
        return [len(x), len(parts) * shapes[0][0], *shapes[0][1:]] if alike else None

    def pieces(self, name: str, first: int, last: int):
        """Yield (index of the first row, consecutive rows) of a tensor for the rows `first` to
        `last` - 1.

        A file is opened for each tensor, so that the memory of earlier tensors can be freed."""
        from safetensors import safe_open

        if name in self.files:
            size = max(1, PIECE // max(1, torch.Size(self.shapes[name][1:]).numel()))
            with safe_open(self.files[name], "pt") as f:
                for row in range(first, last, size):
                    yield row, f.get_slice(name)[row : min(row + size, last)]
            return
        opened = {}
        for e in range(first, last):
            for part in expert_parts(name, e):
                opened[self.files[part]] = opened.get(self.files[part]) or safe_open(
                    self.files[part], "pt"
                )
            yield (
                e,
                torch.cat(
                    [opened[self.files[part]].get_tensor(part) for part in expert_parts(name, e)]
                )[None],
            )

    def tensor(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self.files[name], "pt") as f:
            return f.get_tensor(name)


def stored_tensors(folder: str):
    """(a folder's model without weights, an iterable of (name, float32 tensor) read from its files
    one by one, including `lm_head.weight`).

    If names or dtypes in the files are not those of the model, transformers reads the whole
    model."""
    stored, model = Stored(folder), unread(folder)
    tensors = stored.named(model)
    embedding = next(
        name for name, p in model.named_parameters() if p is model.get_input_embeddings().weight
    )
    if not stored.fit(model, tensors) or embedding not in tensors:
        full_model = load_model(folder)
        return full_model, full_model.state_dict().items()
    sources = {name: name for name in tensors}
    sources.setdefault("lm_head.weight", embedding)  # a tied head is stored once

    def read(name: str):
        rows = stored.pieces(name, 0, len(tensors[name]))
        return torch.cat([piece.float() for _, piece in rows])

    return model, ((name, read(source)) for name, source in sources.items())


def expert_parts(name: str, e: int) -> list[str]:
    """Names in the files of the matrices of expert e, for the name of a tensor of all experts
    (quant.by_expert); [] for any other tensor."""
    layer, experts, kind = name.rpartition(".experts.")
    halves = (
        {"gate_up_proj": ["gate", "up"], "down_proj": ["down"]}.get(kind, []) if experts else []
    )
    return [f"{layer}.experts.{e}.{half}_proj.weight" for half in halves]


def rearranges(model) -> bool:
    """Whether transformers changes tensors of this family on loading, apart from joining
    experts."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = {"MergeModulelist", "Concatenate"}
    operations = [
        op for way in get_model_conversion_mapping(model) for op in getattr(way, "operations", [])
    ]
    return not {type(op).__name__ for op in operations} <= known


# ---------------------------------------------------------------------------------------------------------------------
# Shards
# ---------------------------------------------------------------------------------------------------------------------


def shard(models: nn.Module, device: str, n_ranks: int, compute: torch.dtype | None) -> nn.Module:
    """Wrap the models by FSDP2 and return them: each layer is a group, and the root group has
    embeddings and heads.

    compute: the 16-bit dtype of the products, or None. Layers are gathered in it if possible
    (`travels_in`), and gradients are summed in float32. The root is gathered in float32, the dtype
    of its embeddings and of the sums in its head."""
    from torch.distributed.device_mesh import init_device_mesh  # seconds to load
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(torch.device(device).type, (n_ranks,))
    for model in models.children():
        for layer in model.modules():
            if isinstance(layer, quant.LowBit):
                layer.cache_quantized = False
        policy = MixedPrecisionPolicy()
        if travels_in(model, compute):
            policy = MixedPrecisionPolicy(
                param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(models, mesh=mesh)


def compute_type(cfg: OptimizerFlags) -> torch.dtype | None:
    """The 16-bit dtype of the learner's products; None: float32."""
    return None if cfg.dtype == "float32" else getattr(torch, cfg.dtype)


def travels_in(model: nn.Module, compute: torch.dtype | None) -> torch.dtype | None:
    """The 16-bit dtype in which ranks gather a model's layers; None: float32.

    Aligned and exact layers must compute with the published numbers, and torch's LayerNorm does not
    support mixed dtypes on a CPU."""
    needs_float32 = any(
        isinstance(m, (quant.LowBit, exact.ExactLinear, nn.LayerNorm)) for m in model.modules()
    )
    return None if needs_float32 else compute


# ---------------------------------------------------------------------------------------------------------------------
# Activations
# ---------------------------------------------------------------------------------------------------------------------


def recompute(model) -> None:
    """Make each decoder layer of the model keep only its input for the backward pass.

    It replaces transformers' gradient checkpointing, which requires training mode and drops the
    keys and values of a prompt that several responses share."""
    for i, layer in enumerate(model.base_model.layers):
        if getattr(layer.forward, "func", None) is not forward_again:  # not wrapped yet
            layer.forward = functools.partial(forward_again, layer.forward, i)


def forward_again(forward, i: int, *args, past_key_values=None, **more):
    """The forward pass of layer i, which runs again in the backward pass if gradients are enabled.

    Keys and values are tensor inputs and outputs, so that the second run starts from the same cache
    as the first."""
    if not torch.is_grad_enabled():
        return forward(*args, past_key_values=past_key_values, **more)
    # layers draw no random numbers, because dropout is off
    options = {
        "use_reentrant": False,
        "preserve_rng_state": False,
    }
    if past_key_values is None:
        return checkpoint(forward, *args, **options, **more)
    layer = past_key_values.layers[i]
    known = (layer.keys, layer.values) if layer.is_initialized else ()

    def run(known, *args):
        filled_layer = filled(type(layer)(), *known)
        return (
            forward(*args, past_key_values=filled_layer, **more),
            filled_layer.keys,
            filled_layer.values,
        )

    out, *new = checkpoint(run, known, *args, **options)
    if not known:  # a prompt; the keys and values of responses are not read again
        filled(layer, *new)
    return out


def filled(layer, *keys_and_values):
    """A cache layer, filled with these keys and values (B, heads, tokens, size) if given."""
    if keys_and_values:
        layer.lazy_initialization(*keys_and_values)
        layer.keys, layer.values = keys_and_values
    return layer


def check_names(folder: str, by_vllm: bool) -> None:
    """Raise UserError if tensor names in the files do not fit the model. Called before an engine
    starts.

    by_vllm: vLLM samples from the model. transformers ignores unknown tensors, and vLLM does not.
    Families with names that transformers changes on loading are not checked."""
    model, stored = on_meta(read_config(folder)), Stored(folder)
    for tied in model.all_tied_weights_keys.items():
        held = [stored.tensor(name) for name in tied if name in stored.files]
        need(
            len(held) < 2 or torch.equal(*held),
            f"{folder}: its config.json ties {' and '.join(tied)}, which differ in its files; set tie_word_embeddings "
            "to false there",
        )
    expected, left_out = in_files(model)
    names = set(stored.files)
    missing = sorted(expected.keys() - names)
    others = sorted(name for name in names - expected.keys() - left_out if "rotary_emb" not in name)
    if not names or rearranges(model) or not (missing or others):
        return
    prefix = next(
        (name.removesuffix(missing[0]) for name in others if missing and name.endswith(missing[0])),
        "",
    )
    need(
        not prefix,
        f"{folder}: its tensors have names such as {prefix}{min(missing, default='')}, but the model's names have no "
        f"{prefix}; rename the tensors in the files",
    )
    need(
        not (others and by_vllm),
        f"{folder}: its files hold {min(others, default='')}, which the model does not have and vLLM cannot ignore; "
        "remove this tensor from the files, or use --rollout=hf",
    )
