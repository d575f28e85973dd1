"""Measure how int8 rounding amplifies last-bit differences: the reason why alignment does not help deep int8 models.

    python results/depth.py --task=FILE.jsonl     # a few minutes; writes the second table of results/atlas.md

Each model reads the problems and answers of FILE in float32, at full depth and cut to its first layers. Two distances,
exact over the vocabulary and averaged over tokens:

    to plain      KL of the low-bit model to the model without rounding
    to itself     KL of the low-bit model to itself after a relative change of the embeddings by 1e-7

An aligned learner and its engine sum in different orders, which changes values by about as much. So the second distance
is the part of the first distance that remains between them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import machinery.startup  # isort: skip  # noqa: F401

import torch

import quant
from machinery.checkpoint.models import load_model, read_tokenizer
from machinery.flags import need, parse_flags, run_command
from results import atlas, sweep

MODELS = {"SmolLM2-135M": ("smol135", (4, 12, 30)), "Qwen2.5-Coder-0.5B": ("qwen05", (4, 12, 24))}
NUDGE = 1e-7
TEXTS, TOKENS = 8, 192


@dataclass(frozen=True)
class DepthFlags:
    """Depth"""

    task: str = ""
    """A file of problems with `question` and `answer`."""


class Rounded(torch.nn.Linear):
    """An int8 layer. activations: "none" (only weights are rounded), "token" (a scale for each token), "static" (one
    scale for the layer, from the tokens seen while `calibrates` is set)."""

    def __init__(self, linear, activations: str):
        torch.nn.Module.__init__(self)
        fmt = quant.format_of("int8")
        q, s = fmt.quantize(linear.weight.detach())
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.nn.Parameter(quant.dequantize(q, s), requires_grad=False)
        self.bias, self.activations, self.largest, self.calibrates = (
            linear.bias,
            activations,
            0.0,
            False,
        )

    def forward(self, x):
        if self.calibrates:
            self.largest = max(self.largest, float(x.abs().max()))
        elif self.activations == "token":
            x = quant.dequantize(*quant.quantize(x, 127.0, torch.int8))
        elif self.activations == "static":
            s = self.largest / 127.0
            x = (x / s).round().clamp(-127, 127) * s
        return torch.nn.functional.linear(x, self.weight, self.bias)


def activations_of(row: str, name: str) -> str:
    """The rounding of a layer's input: "none", "token" or "static"."""
    if row == "weights alone" or (
        row == "all but down_proj's input" and name.endswith("down_proj")
    ):
        return "none"
    return "static" if row == "static scales" else "token"


ROWS = ("weights and activations", "all but down_proj's input", "static scales", "weights alone")


def shortened(folder: str, layers: int):
    """The model cut to its first layers."""
    model = load_model(folder).eval()
    model.model.layers = model.model.layers[:layers]
    return model


def in_int8(model, row: str, ids):
    """Put the model's linear layers into int8, in place; return the model."""
    layers = []
    for name, linear in quant.quantized_linears(model).items():
        parent, _, child = name.rpartition(".")
        layer = Rounded(linear, activations_of(row, name))
        setattr(model.get_submodule(parent), child, layer)
        layers.append(layer)
    if row == "static scales":
        for layer in layers:
            layer.calibrates = True
        logp_of(model, ids)
        for layer in layers:
            layer.calibrates = False
    return model


@torch.no_grad()
def logp_of(model, ids, nudge: float = 0.0):
    """Log-probabilities of the next token over the vocabulary, (texts * tokens, V)."""
    x = model.get_input_embeddings()(ids)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    logits = model(inputs_embeds=x * (1 + nudge * noise), use_cache=False).logits
    return logits.flatten(0, 1).float().log_softmax(-1)


def kl(logp, other) -> float:
    """KL(p || other), mean over tokens."""
    return float((logp.exp() * (logp - other)).sum(-1).mean())


def measure(folder: str, layers: int, ids) -> dict[str, list[float]]:
    """Row -> [KL to plain, KL to itself]."""
    model = shortened(folder, layers)
    plain = logp_of(model, ids)
    out = {"no rounding": [0.0, kl(plain, logp_of(model, ids, NUDGE))]}
    for row in ROWS:
        model = in_int8(shortened(folder, layers), row, ids)
        logp = logp_of(model, ids)
        out[row] = [kl(plain, logp), kl(logp, logp_of(model, ids, NUDGE))]
    return out


def texts(file: str, folder: str):
    """Token ids of TEXTS problems with their answers, (TEXTS, TOKENS)."""
    tokenizer = read_tokenizer(folder)
    lines = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    rows = [tokenizer(f"{x['question']}\n{x['answer']}\n").input_ids for x in lines[: 8 * TEXTS]]
    rows = [row[:TOKENS] for row in rows if len(row) >= TOKENS][:TEXTS]
    need(
        len(rows) == TEXTS,
        f"--task={file}: fewer than {TEXTS} texts of {TOKENS} tokens among the first",
    )
    return torch.tensor(rows)


def main() -> None:
    flags = parse_flags(DepthFlags, None, __doc__.strip())
    need(flags.task, "--task is missing: name a file with problems, such as GSM8K's")
    data = sweep.load("atlas")
    data["depth"] = {}
    for name, (model, depths) in MODELS.items():
        folder = f"out/models/{model}"
        ids = texts(flags.task, folder)
        for layers in depths:
            data["depth"][f"{name}, {layers} layers"] = measure(folder, layers, ids)
            print(
                f"{name}, {layers} layers: {data['depth'][f'{name}, {layers} layers']}", flush=True
            )
    sweep.store("atlas", data)
    sweep.rewrite("atlas", atlas.table(data))


if __name__ == "__main__":
    run_command(main)
