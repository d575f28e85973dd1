"""Faults planted in the plain torch engine: does the ladder (probe/) name the right fault first?

The suite plants faults in a tiny model. This command plants faults in the embedded policy and prints suspects:

    python tests/tools/ladder_faults.py           # several minutes on two cores: results/ladder.json

Faults are like faults of real engines: a loader skips tensors, settings are not passed on. The ladder
has the flags, the older weights and the engine's records.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (2, 1)]

import numpy as np
import torch
from torch import nn

import probe
import probe.__main__ as probe_command
from machinery.checkpoint.models import load_model
from results import sweep

CHAT = "# {{ messages[0]['content'] }}{% if add_generation_prompt %} :{% endif %}"  # words of the embedded tokenizer


def spoil_load(engine, change: Callable) -> None:
    """`change` each tensor before the engine loads it; None: the loader skips the tensor."""
    load = engine.load

    def spoilt(named_tensors):
        taken = {name: change(name, x) for name, x in dict(named_tensors).items()}
        load({name: x for name, x in taken.items() if x is not None}.items())

    engine.load = spoilt


def spoil_generate(engine, change: Callable = lambda groups: groups, **settings) -> None:
    """`change` the sampled groups. settings: a sampling setting, or `prompts`, a function of prompts."""
    generate, of_prompts = engine.generate, settings.pop("prompts", lambda prompts: prompts)

    def spoilt(prompts, seeds, sampling, *more):
        return change(generate(of_prompts(prompts), seeds, replace(sampling, **settings), *more))

    engine.generate = spoilt


def old_head(engine) -> None:
    """The engine's head is a separate matrix, but the publication names tied weights once."""
    head = engine.model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    spoil_load(engine, lambda name, x: None if name == "lm_head.weight" else x)


def old_layer(engine) -> None:
    spoil_load(engine, lambda name, x: None if ".layers.1." in name else x)


def lost_scale(engine) -> None:
    lost = "layers.0.mlp.up_proj.weight_scale"
    spoil_load(engine, lambda name, x: torch.ones_like(x) if name.endswith(lost) else x)


def other_rope(engine) -> None:
    """The engine's model has a different base than the config."""
    config = copy.deepcopy(engine.model.config)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 1e6}
    engine.model.model.rotary_emb = type(engine.model.model.rotary_emb)(config)


def swap_sets(groups):
    """Neighbours of a group swap kept sets, up to the length of the shorter response."""
    for group in groups:
        for a, b in zip(group[::2], group[1::2], strict=False):
            n = min(len(a.tokens), len(b.tokens))
            sets = [np.split(r.allowed_ids, r.allowed_offsets[1:-1]) for r in (a, b)]
            for r, old, swapped in ((a, *sets), (b, *sets[::-1])):
                mixed = swapped[:n] + old[n:]
                r.allowed_offsets = np.concatenate([[0], np.cumsum([len(x) for x in mixed])]).astype(np.int64)
                r.allowed_ids = np.concatenate(mixed).astype(np.int32)
    return groups


def saturated(engine) -> None:
    """Every module's output is stored in float16, with larger numbers cut to the largest of float16."""

    def store(module, inputs, output):
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.is_floating_point():
            first.copy_(first.clamp(-65504, 65504).half().float())

    for module in engine.model.base_model.modules():
        module.register_forward_hook(store)


def no_template(engine) -> None:
    spoil_generate(engine, prompts=lambda prompts: [p[1:-1] for p in prompts])


def forgetful(engine) -> None:
    for module in engine.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    engine.model.train()
    torch.manual_seed(0)  # for equal draws in every run


@dataclass
class Planted:
    """A fault: name in probe.faults and place, function that plants it in an engine, flags, and kind of model."""

    name: str
    plant: Callable
    flags: tuple[str, ...] = ()
    kind: str = "new"


PLANTED = [
    Planted("stale weights lm_head", old_head),
    Planted("stale weights model.layers.1", old_layer),
    Planted("wrong temperature", lambda engine: spoil_generate(engine, temperature=1.0), ("--temperature=0.8",)),
    Planted("raw log-probabilities", lambda engine: setattr(engine, "raw", True), ("--temperature=0.8",)),
    Planted("a scale at 1", lost_scale, ("--rollout_quant=int8",)),
    Planted("truncated head", lambda engine: setattr(engine, "vocabulary", 96)),
    Planted("wrong rope base", other_rope),
    Planted("swapped kept sets", lambda engine: spoil_generate(engine, swap_sets), ("--top_k=12", "--top_p=0.95")),
    Planted("float16 overflow", saturated, kind="loud"),
    Planted("a dropout left on", forgetful),
    Planted("another chat template", no_template, kind="chat"),
]


def amplify(model) -> None:
    """Scale the residual stream to three times float16's largest number; the model's outputs stay equal.

    Every norm divides by the size of its input, so that additions to the stream may have any size."""
    ids = torch.arange(3, 96)[None]
    stream = model.model(ids, output_hidden_states=True).hidden_states[:-1]
    scale = 3 * 65504 / max(float(x.abs().max()) for x in stream)
    model.config.tie_word_embeddings = False  # the head does not change
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    model.model.embed_tokens.weight *= scale
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= scale
        layer.mlp.down_proj.weight *= scale


def make_models(folder: str, root: Path, tokenizer) -> dict[str, str]:
    """Model folders by kind. new: the model of `folder`; old: an earlier version; loud: activations exceed float16's
    largest number; chat: the tokenizer has a chat template."""
    models = {}
    for kind in ("new", "old", "loud", "chat"):
        model = load_model(folder)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in model.parameters() if kind == "old" else ():
                p.mul_(1 + 0.1 * torch.randn(p.shape, generator=generator))
            if kind == "loud":
                amplify(model)
        tokenizer.chat_template = CHAT if kind == "chat" else None
        models[kind] = str(root / kind)
        model.save_pretrained(models[kind])
        tokenizer.save_pretrained(models[kind])
    return models


def named(planted: Planted, models: dict[str, str], out: Path, *sizes: str) -> list[dict]:
    """The ladder's suspects, in order."""
    make = probe.make_engine

    def faulty(*args, **more):
        engine = make(*args, **more)
        planted.plant(engine)
        return engine

    flags = [f"--model={models[planted.kind]}", f"--out={out / 'm.json'}", "--rollout=hf", "--dtype=float32"]
    flags += ["--rollout_dtype=float32", *planted.flags, *sizes, "--explain"]
    if planted.kind == "new":
        flags.append(f"--synced_from={models['old']}")
    with mock.patch.object(probe, "make_engine", faulty):
        return probe_command.main(flags)["ladder"]["suspects"]


def main() -> None:
    import config
    from machinery import settings, warmstart
    from tasks.arith import arithmetic_tokenizer

    record = []
    with tempfile.TemporaryDirectory() as scratch:
        policy = warmstart.base_model("model", "base:policy", settings.resolve(config.Config(), 1))
        models = make_models(policy, Path(scratch), arithmetic_tokenizer())
        for planted in PLANTED:
            suspects = named(planted, models, Path(scratch), "--problems=16", "--max_tokens=32")
            kept = [dict(fault=x["fault"], where=x["where"], explained=round(x["explained"], 4)) for x in suspects[:3]]
            record.append({"planted": planted.name, "suspects": kept})
            print("PLANTED", planted.name, kept, flush=True)
    sweep.store("ladder", {**sweep.load("ladder"), "faults": record})


if __name__ == "__main__":
    main()
