"""Does a row of a product depend on the rows beside it? vLLM's linear layers on this CPU, and torch's.

    python results/rows.py                  # half a minute; needs vLLM

A layer of the demo's policy's shape reads 256 random rows, then fewer of them. Where bits differ, decoding (few rows)
rounds otherwise than reading (many). One thread."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to hand a function to the model, in this process
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench import policy_shaped
from engines import VLLMEngine
from results import sweep

FEWER = (1, 2, 5, 16, 31, 64, 100, 255)


def alike(product, x) -> list[int]:
    """The numbers of rows, of FEWER, that have the bits which they have among all of x."""
    whole = product(x)
    return [n for n in FEWER if torch.equal(product(x[:n].contiguous()), whole[:n])]


def layers_of(model) -> dict[str, tuple[list[int], list[int]]]:
    """By name: `alike` of vLLM's layer, and of torch's on random weights of that shape."""
    found = {}
    for name, layer in model.named_modules():
        if name.endswith(("layers.0.self_attn.qkv_proj", "layers.0.mlp.gate_up_proj", "layers.0.mlp.down_proj")):
            weight = torch.randn(layer.output_size, layer.input_size, dtype=layer.params_dtype)
            x = torch.randn(256, layer.input_size, dtype=layer.params_dtype)
            theirs = alike(lambda x, layer=layer: layer.quant_method.apply(layer, x, None), x)
            found[name] = theirs, alike(lambda x, weight=weight: torch.nn.functional.linear(x, weight), x)
    return found


def main() -> None:
    torch.set_num_threads(1)
    print(f"rows of {', '.join(map(str, FEWER))} that have the bits which they have among 256")
    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            policy_shaped(folder)
            engine = VLLMEngine(folder, max_len=64, max_logprobs=1, dtype=dtype)
        for name, (theirs, ours) in engine.llm.apply_model(layers_of)[0].items():
            print(f"{dtype:9s} {name:34s} vLLM {theirs}   torch {ours}")
        engine.close()


if __name__ == "__main__":
    sweep.no_arguments("rows")
    main()
