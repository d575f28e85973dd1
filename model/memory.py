"""Memory of models: where weights, gradients and activations are held.

    unread      a model without weights: its parameters take no memory, until it is known where they belong
    shard       FSDP2: each rank owns a part of every parameter, and gathers a layer when its turn comes
    fill        memory for the parameters where they belong, and their values: a rank reads its own part of the files
    recompute   activations inside a layer are computed again for the backward pass, not kept (--gradient_checkpointing)

Masters, gradients and optimizer states are float32, whatever precision the files have; each rank
has its part of them. While it learns no rank has the whole model in float32, unless it trains it
alone or under DDP. A plain sampler (--rollout=hf, --eval_engine=torch) is a whole copy on each
rank."""

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
from machinery.checkpoint import load_model, one_sentence, read_config
from machinery.checkpoint.models import exported, weight_files
from machinery.flags import need
from model import exact, lora
from model.streamed import empty_model

# ---------------------------------------------------------------------------------------------------------------------
# Weights: where they are read from, and where to
# ---------------------------------------------------------------------------------------------------------------------

PIECE = 1 << 24  # numbers that are read at once: 64 MiB in float32
PLAIN = {"F64", "F32", "F16", "BF16"}  # numbers in a file that are the weights themselves


@dataclass(frozen=True)
class OnDisk:
    """Where the weights of a model are that has none yet. adapter: of LoRA; None: new ones, drawn
    from seed."""

    folder: str
    adapter: Path | None = None
    seed: int = 0


def unread(folder: Path | str):
    """The model of a folder, its parameters on the meta device, where they take no memory; `fill`
    reads them."""
    model = empty_model(read_config(folder)).requires_grad_(True).eval()
    model.on_disk = OnDisk(str(folder))
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight and Stored(folder).has_two(model):
        head.weight = nn.Parameter(torch.empty_like(head.weight))
        model.config.tie_word_embeddings = False  # so do its copies and its checkpoints have two
    return model


@torch.no_grad()
def fill(models: nn.Module, device: str) -> None:
    """Move models to their device; those that `unread` made get their memory there, and their
    weights.

    Parameters remain the same objects. UserError, one sentence: `load_model`'s."""
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
    """In here a module that is moved keeps its Parameter objects: tied ones stay tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def read(model, folder: Path | str) -> None:
    """Fill a model's parameters and buffers from the files of a folder, tensor by tensor, each with
    a rank's own rows.

    Where names or kinds in the files are not the model's own, transformers reads them
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
    """(first row, rows) that this rank has of a tensor: all, where it is not sharded."""
    if not hasattr(x, "to_local"):
        return 0, x.detach()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return offset[0], x.detach().to_local()


def read_whole(tensors: dict, folder: Path | str) -> None:
    """Fill these tensors by transformers, which knows each family's older names and formats.

    Shards: the first rank alone has the whole model, in the precision of the files, and hands it
    out tensor by tensor."""
    sharded = any(hasattr(x, "to_local") for x in tensors.values())
    loaded, why = {}, [""]
    if not sharded or dist.get_rank() == 0:
        try:
            loaded = load_model(folder, "auto").state_dict()
        except ValueError as e:  # the other ranks must hear of it
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
    """The tensors of a model folder as its safetensors files have them."""

    def __init__(self, folder: Path | str):
        from safetensors import safe_open

        folder = Path(folder)
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, list[int]] = {}
        self.types: set[str] = set()
        for file in filter(Path.is_file, weight_files(folder)):
            with safe_open(file, "pt") as f:
                for name in f.keys():  # noqa: SIM118  it is no dictionary
                    self.files[name] = file
                    self.shapes[name] = f.get_slice(name).get_shape()
                    self.types.add(f.get_slice(name).get_dtype())

    def named(self, model) -> dict[str, torch.Tensor]:
        """Tensors to read, by their names in the files; of tied tensors the name that a file
        has."""
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
        """Whether the files have each of these tensors, under its name and in its shape, as plain
        numbers."""
        if (
            not self.types <= PLAIN
            or hasattr(model.config, "quantization_config")
            or rearranges(model)
        ):
            return False
        return all(x.ndim and self.shape(name, x) == list(x.shape) for name, x in tensors.items())

    def shape(self, name: str, x) -> list[int] | None:
        """The shape in the files of the tensor that shall become x; None: it is not there."""
        parts = expert_parts(name, 0)
        if name in self.shapes or not parts:
            return self.shapes.get(name)
        shapes = [self.shapes.get(part) for e in range(len(x)) for part in expert_parts(name, e)]
        alike = shapes[0] is not None and all(shape == shapes[0] for shape in shapes)
        return [len(x), len(parts) * shapes[0][0], *shapes[0][1:]] if alike else None

    def pieces(self, name: str, first: int, last: int):
        """Yields (row, rows of a tensor from there on) until all from `first` up to `last` have
        come.

        A file is open while one tensor is read, so that earlier ones can leave the memory."""
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

    def has_two(self, model) -> bool:
        """Whether head and embedding, which the config ties, are there as two different tensors."""
        tied = [
            name
            for name, p in model.named_parameters(remove_duplicate=False)
            if p is self.head_of(model)
        ]
        names = [name for name in tied if name in self.files]
        if len(names) < 2 or self.shapes[names[0]] != self.shapes[names[1]]:
            return False
        rows = self.shapes[names[0]][0]
        pairs = zip(self.pieces(names[0], 0, rows), self.pieces(names[1], 0, rows), strict=True)
        return any(not torch.equal(a, b) for (_, a), (_, b) in pairs)

    @staticmethod
    def head_of(model):
        return model.get_output_embeddings().weight


def expert_parts(name: str, e: int) -> list[str]:
    """The names in files of the matrices of expert e in a tensor of all experts (quant.by_expert);
    [] for others."""
    layer, experts, kind = name.rpartition(".experts.")
    halves = (
        {"gate_up_proj": ["gate", "up"], "down_proj": ["down"]}.get(kind, []) if experts else []
    )
    return [f"{layer}.experts.{e}.{half}_proj.weight" for half in halves]


def rearranges(model) -> bool:
    """Whether transformers changes tensors of this family while it reads them, beyond putting
    experts together."""
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
    """Wrap the models by FSDP2 and return them: a group for each layer; embeddings and heads are
    the root's.

    compute: the 16-bit type of the products, or None. Layers travel in it where they can
    (`travels_in`), and gradients are added up in float32. The root travels in float32, in which its
    embeddings and the sums of its head are taken."""
    from torch.distributed.device_mesh import init_device_mesh  # seconds to load
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(torch.device(device).type, (n_ranks,))
    for model in models.children():
        for layer in model.modules():
            if isinstance(layer, LOW_BIT):
                layer.cache_quantized = False
        policy = MixedPrecisionPolicy()
        if travels_in(model, compute):
            policy = MixedPrecisionPolicy(
                param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(models, mesh=mesh)


@contextmanager
def in_full_precision(models: nn.Module):
    """In here the layers that `shard` has wrapped compute with their weights as they are kept, not
    as they travel.

    Without gradients, and one whole layer at a time."""
    layers = [layer for model in models.children() for layer in model.base_model.layers]
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = functools.partial(
            forward_whole, layer, layer.forward, dict(layer.named_parameters())
        )
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward:
                layer.forward = forward


def forward_whole(layer, forward, shards: dict, *args, **kwargs):
    """`forward` of a layer, with these parameters of it made whole in the place of its own."""
    call = nn.Module()
    call.layer, call.forward = layer, forward
    full = {f"layer.{name}": p.full_tensor() for name, p in shards.items()}
    return torch.func.functional_call(call, full, args, kwargs)


LOW_BIT = (quant.LowBitLinear, quant.LowBitExperts)


def compute_type(cfg: OptimizerFlags) -> torch.dtype | None:
    """The 16-bit type of the learner's products; None: float32."""
    return None if cfg.dtype == "float32" else getattr(torch, cfg.dtype)


def travels_in(model: nn.Module, compute: torch.dtype | None) -> torch.dtype | None:
    """The 16-bit type in which a model's layers go from rank to rank; None: float32.

    Aligned and exact layers must compute on the very numbers that are published, and torch's
    LayerNorm takes one type alone on a CPU."""
    needs_float32 = any(
        isinstance(m, (*LOW_BIT, exact.ExactLinear, nn.LayerNorm)) for m in model.modules()
    )
    return None if needs_float32 else compute


# ---------------------------------------------------------------------------------------------------------------------
# Activations
# ---------------------------------------------------------------------------------------------------------------------


def recompute(model) -> None:
    """From here on each decoder layer of the model keeps its input for the backward pass, and
    nothing else.

    In the place of transformers' own, which asks for a model in training mode and drops the keys
    and values of a prompt that several responses share."""
    for i, layer in enumerate(model.base_model.layers):
        if getattr(layer.forward, "func", None) is not forward_again:  # of another learner
            layer.forward = functools.partial(forward_again, layer.forward, i)


def forward_again(forward, i: int, *args, past_key_values=None, **more):
    """The forward of layer i, which runs a second time in the backward pass, if there will be one.

    Keys and values go in and come out as tensors: a second run must find the cache as the first one
    did."""
    if not torch.is_grad_enabled():
        return forward(*args, past_key_values=past_key_values, **more)
    # nothing is drawn: dropout is off
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
    if not known:  # a prompt; behind the responses nothing comes that would read theirs
        filled(layer, *new)
    return out


def filled(layer, *keys_and_values):
    """A layer of a cache with these keys and values (B, heads, tokens, size), if there are any."""
    if keys_and_values:
        layer.lazy_initialization(*keys_and_values)
        layer.keys, layer.values = keys_and_values
    return layer


def check_names(folder: str, by_vllm: bool) -> None:
    """UserError, one sentence, before an engine starts: the files lack tensors of the model, or
    hold others.

    by_vllm: it samples there. transformers leaves other tensors out, and vLLM does not. Names that
    transformers changes while it reads them are not judged."""
    export = exported(read_config(folder))
    names = set(Stored(folder).files)
    missing = sorted(export.layout.keys() - names)
    others = sorted(
        name for name in names - export.layout.keys() - export.left_out if "rotary_emb" not in name
    )
    if not names or rearranges(export.shell) or not (missing or others):
        return
    prefix = next(
        (name.removesuffix(missing[0]) for name in others if missing and name.endswith(missing[0])),
        "",
    )
    need(
        not prefix,
        f"{folder}: its tensors are named {prefix}{min(missing, default='')} and the like, where the model has no "
        f"{prefix}; rename them in the files",
    )
    need(
        not (others and by_vllm),
        f"{folder}: its files hold {min(others, default='')}, which the model does not have and vLLM cannot leave out; "
        "remove it from the files, or use --rollout=hf",
    )
