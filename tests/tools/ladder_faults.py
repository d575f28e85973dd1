"""Faults planted in the plain torch engine: does the ladder (probe/) name the right one first?

The suite plants them in a tiny model; this plants them in the embedded policy, and prints what is named:

    python tests/tools/ladder_faults.py           # all, some minutes on two cores: results/ladder.json
    python tests/tools/ladder_faults.py "stale head" "a scale at 1"

They are planted as they happen in engines: in a loader that passes over tensors, in settings that are not handed on, in
a cache that is not emptied. The ladder is given the flags, the older weights and what the engine recorded.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (2, 1)]

import numpy as np
import torch
from torch import nn

import probe
import probe.__main__ as probe_command
from machinery.checkpoint import load_model
from results import sweep

CHAT = "# {{ messages[0]['content'] }}{% if add_generation_prompt %} :{% endif %}"  # in the embedded tokenizer's words
BLOCK = 4  # tokens of a block of the prefix cache


def spoil_load(engine, change: Callable) -> None:
    """The engine's loader gets what `change` makes of each tensor; None: it passes over it."""
    load = engine.load

    def spoilt(named_tensors):
        taken = {name: change(name, x) for name, x in dict(named_tensors).items()}
        load({name: x for name, x in taken.items() if x is not None}.items())

    engine.load = spoilt


def spoil_generate(engine, change: Callable = lambda groups: groups, **settings) -> None:
    """What is sampled passes through `change`; settings: a sampling setting, or `prompts`, a function of them."""
    generate, of_prompts = engine.generate, settings.pop("prompts", lambda prompts: prompts)

    def spoilt(prompts, seeds, sampling, *more):
        return change(generate(of_prompts(prompts), seeds, replace(sampling, **settings), *more))

    engine.generate = spoilt


def old_head(engine) -> None:
    """The head is a matrix of its own, and the publication names tied weights once."""
    head = engine.model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    spoil_load(engine, lambda name, x: None if name == "lm_head.weight" else x)


def old_layer(engine) -> None:
    spoil_load(engine, lambda name, x: None if ".layers.1." in name else x)


def lost_scale(engine) -> None:
    def change(name, x):
        return torch.ones_like(x) if name.endswith("layers.0.mlp.up_proj.weight_scale") else x

    spoil_load(engine, change)


def old_prefix(engine) -> None:
    """Whole blocks of the prompts are found in the cache, and stay there when the weights are replaced.

    Prompts are read one by one here, so that each has blocks of its own."""
    old, forward = copy.deepcopy(engine), engine._forward

    def cached(ids, attention_mask=None, position_ids=None, past_key_values=None):
        how = {"attention_mask": attention_mask, "position_ids": position_ids}
        n = (ids.shape[1] - 1) // BLOCK * BLOCK
        if past_key_values is not None or n == 0:
            return forward(ids, past_key_values=past_key_values, **how)
        _, cache = old._forward(ids[:, :n], position_ids=position_ids[:, :n])
        return forward(ids[:, n:], position_ids=position_ids[:, n:], past_key_values=cache)

    engine._forward = cached
    engine._batches = lambda prompts, groups, _: (([p], [g]) for p, g in zip(prompts, groups, strict=True))


def fewer_rows(engine) -> None:
    engine.vocabulary = 96


def other_rope(engine) -> None:
    """The config's base was not read: the engine's model is built with another."""
    config = copy.deepcopy(engine.model.config)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 1e6}
    model = type(engine.model)(config)
    model.load_state_dict(engine.model.state_dict())
    engine.model = model.eval()


def swap_sets(groups):
    """Neighbours of a group have each other's sets, as far as both go."""
    for group in groups:
        for a, b in zip(group[::2], group[1::2], strict=False):
            n = min(len(a.tokens), len(b.tokens))
            sets = [np.split(r.allowed_ids, r.allowed_offsets[1:-1]) for r in (a, b)]
            for r, own, other in ((a, *sets), (b, *sets[::-1])):
                mixed = other[:n] + own[n:]
                r.allowed_offsets = np.concatenate([[0], np.cumsum([len(x) for x in mixed])]).astype(np.int64)
                r.allowed_ids = np.concatenate(mixed).astype(np.int32)
    return groups


def saturated(engine) -> None:
    """Every module's output is stored in float16, whose largest number stands for all that are larger."""

    def store(module, inputs, output):
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.is_floating_point():
            first.copy_(first.clamp(-65504, 65504).half().float())

    for module in engine.model.base_model.modules():
        module.register_forward_hook(store)


def forgetful(engine) -> None:
    for module in engine.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    engine.model.train()
    torch.manual_seed(0)  # the same draws whatever ran before


@dataclass
class Planted:
    """A fault: its name in probe.faults, what plants it in an engine, the flags, and the kind of model it takes."""

    name: str
    plant: Callable
    flags: tuple[str, ...] = ()
    kind: str = "new"


PLANTED = [
    Planted("stale head", old_head),
    Planted("stale layer", old_layer),
    Planted("wrong temperature", lambda engine: spoil_generate(engine, temperature=1.0), ("--temperature=0.8",)),
    Planted("raw log-probabilities", lambda engine: setattr(engine, "raw", True), ("--temperature=0.8",)),
    Planted("prefix cache of old weights", old_prefix),
    Planted("a scale at 1", lost_scale, ("--rollout_quant=int8",)),
    Planted("truncated head", fewer_rows),
    Planted("wrong rope base", other_rope),
    Planted("swapped kept sets", lambda engine: spoil_generate(engine, swap_sets), ("--top_k=12", "--top_p=0.95")),
    Planted("float16 overflow", saturated, kind="loud"),
    Planted("a dropout left on", forgetful),
    Planted(
        "another chat template",
        lambda engine: spoil_generate(engine, prompts=lambda prompts: [p[1:-1] for p in prompts]),
        kind="chat",
    ),
]


def amplify(model) -> None:
    """The same function of a residual stream whose largest numbers are three times float16's: every norm divides by the
    size of what it gets, so that what is added to the stream may have any size."""
    ids = torch.arange(3, 96)[None]
    stream = model.model(ids, output_hidden_states=True).hidden_states[:-1]
    scale = 3 * 65504 / max(float(x.abs().max()) for x in stream)
    model.config.tie_word_embeddings = False  # the head stays as it is
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    model.model.embed_tokens.weight *= scale
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= scale
        layer.mlp.down_proj.weight *= scale


def make_models(folder: str, root: Path, tokenizer) -> dict[str, str]:
    """Model folders by kind. new: that of `folder`; old: an earlier version; loud: its activations go beyond
    float16's largest number; chat: its tokenizer has a chat template."""
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
    """The ladder's suspects, first first."""
    make = probe.make_engine

    def faulty(*args, **more):
        engine = make(*args, **more)
        planted.plant(engine)
        return engine

    probe.make_engine = faulty
    flags = [f"--model={models[planted.kind]}", f"--out={out / 'm.json'}", "--rollout=hf", "--dtype=float32"]
    flags += ["--rollout_dtype=float32", *planted.flags, *sizes, "--explain"]
    if planted.kind == "new":
        flags.append(f"--synced_from={models['old']}")
    try:
        return probe_command.main(flags)["ladder"]["suspects"]
    finally:
        probe.make_engine = make


def main() -> None:
    import config
    from machinery import settings, warmstart
    from tasks import arithmetic_tokenizer

    right, record = 0, []
    chosen = [planted for planted in PLANTED if planted.name in (sys.argv[1:] or [p.name for p in PLANTED])]
    with tempfile.TemporaryDirectory() as scratch:
        policy = warmstart.base_model("model", "base:policy", settings.resolve(config.Config(), 1))
        models = make_models(policy, Path(scratch), arithmetic_tokenizer())
        for planted in chosen:
            start = time.perf_counter()
            suspects = named(planted, models, Path(scratch), "--problems=16", "--max_tokens=32")
            seconds = time.perf_counter() - start
            first = suspects[0]["fault"] if suspects else "nothing"
            right += first == planted.name
            kept = [dict(fault=x["fault"], where=x["where"], explained=round(x["explained"], 4)) for x in suspects[:3]]
            record.append({"planted": planted.name, "suspects": kept})
            found = ", ".join(f"{x['fault']} {x['where']} {100 * x['explained']:.1f} %" for x in suspects[:3])
            print(f"PLANTED {planted.name:28s} {first == planted.name!s:6s} {seconds:5.0f} s   {found}", flush=True)
    print(f"PLANTED {right} of {len(chosen)} named first")
    if chosen == PLANTED:
        sweep.store("ladder", {**sweep.load("ladder"), "faults": record})


if __name__ == "__main__":
    main()
