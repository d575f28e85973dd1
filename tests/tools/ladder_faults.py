"""Faults planted in the plain torch engine: does the ladder (probe/) name the right fault first?

The suite plants faults in a tiny model. This command plants faults in the embedded policy and prints suspects:

    python tests/tools/ladder_faults.py           # several minutes on two cores: results/ladder.json

Faults are like faults of real engines: a loader skips tensors, settings are not passed on. The ladder
has the flags and the engine's records.
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

import torch

import probe
import probe.__main__ as probe_command
import quant
from machinery.checkpoint.models import load_model
from results import sweep

CHAT = "# {{ messages[0]['content'] }}{% if add_generation_prompt %} :{% endif %}"  # words of the embedded tokenizer


def spoil_generate(engine, change: Callable = lambda prompts: prompts, **settings) -> None:
    """`change` the prompts. settings: sampling settings that replace the flags'."""
    generate = engine.generate

    def spoilt(prompts, seeds, sampling, *more):
        return generate(change(prompts), seeds, replace(sampling, **settings), *more)

    engine.generate = spoilt


def lost_scale(engine) -> None:
    """The loader skips the scales of one layer."""
    tensors = quant.held_quantized(engine.model)
    lost = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight_scale"))
    engine.load({**tensors, lost: torch.ones_like(tensors[lost])}.items())


def other_rope(engine) -> None:
    """The engine's model has a different base than the config."""
    config = copy.deepcopy(engine.model.config)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 1e6}
    engine.model.model.rotary_emb = type(engine.model.model.rotary_emb)(config)


def no_template(engine) -> None:
    spoil_generate(engine, lambda prompts: [p[1:-1] for p in prompts])


@dataclass
class Planted:
    """A fault: name in probe.faults and place, function that plants it in an engine, flags, and kind of model."""

    name: str
    plant: Callable
    flags: tuple[str, ...] = ()
    kind: str = "new"


PLANTED = [
    Planted("wrong temperature", lambda engine: spoil_generate(engine, temperature=1.0), ("--temperature=0.8",)),
    Planted("raw log-probabilities", lambda engine: setattr(engine, "raw", True), ("--temperature=0.8",)),
    Planted("a scale at 1", lost_scale, ("--rollout_quant=int8",)),
    Planted("wrong rope base", other_rope),
    Planted("another chat template", no_template, kind="chat"),
]


def make_models(folder: str, root: Path, tokenizer) -> dict[str, str]:
    """Model folders by kind. new: the model of `folder`; old: an earlier version; chat: the tokenizer has a chat
    template."""
    models = {}
    for kind in ("new", "old", "chat"):
        model = load_model(folder)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in model.parameters() if kind == "old" else ():
                p.mul_(1 + 0.1 * torch.randn(p.shape, generator=generator))
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
