"""Print the memory, the passes and the time of a measurement with worth.py. No model is loaded.

    python -m plan.worth --model=FOLDER --actor=FOLDER --share=0.1 --ranks=8 --parallel=fsdp --gpu_gib=80

The command takes the flags of worth.py and of train.py. Weights and gradients are in float32.
Passes over a batch, each with --train_batch responses:

    on-policy batch    1 forward and backward (3 times the operations of a forward pass)
    sampler's batch    ref passes, 1 unshifted, FOLDS shifted forward passes
    noise batch        1 unshifted, --directions shifted forward passes, in addition

All responses are counted with --max_tokens. The time is without sampling; with the device's peak as
--tflops it is a lower bound for responses of this length."""

from __future__ import annotations

import machinery.startup  # isort: skip  # noqa: F401

from dataclasses import dataclass, replace

import worth
from config import Config
from machinery.flags import need, run_command
from machinery.measure import FOLDS
from machinery.run import topk_of
from machinery.speed import operations
from model import needs_of_ref_pass
from objectives import unregularised
from plan import GIB, Plan, configs_of, longest_prompt, plan_of, torch_cache, weights_of
from quant import empty_model
from worth import WorthFlags


@dataclass(frozen=True)
class MeasurementFlags(WorthFlags):
    """The measurement (worth.py) and the machine"""

    ranks: int = 1
    """Number of ranks."""
    gpu_gib: float = 0.0
    """Memory of a GPU in GiB; 0: unknown."""
    tflops: float = 0.0
    """Operations per second of one rank in float32, in 1e12, for the time of the passes (peak of an
    H100: 67); 0: print no time."""


def bytes_of_an_entry(worth_flags: WorthFlags) -> int:
    """Bytes that the measurement keeps for each measured entry of the policy's parameters: start,
    FOLDS mean gradients, --directions signs, gradient, and with --share < 1 an index."""
    index = 8 if worth_flags.share < 1 else 0
    return 4 + 4 * FOLDS + worth_flags.directions + 8 + index


def passes_of(
    worth_flags: WorthFlags, rows: dict[str, Config], has_actor: bool
) -> tuple[int, int]:
    """The forward passes over a batch of (policy, actor), over all kinds of batches. The policy has
    --reference backward passes."""
    ref_passes = {
        needs_of_ref_pass(unregularised(cfg), has_actor) for cfg in rows.values()
    }
    slopes = worth_flags.batches * (1 + FOLDS)
    noise = worth_flags.noise_batches * (1 + worth_flags.directions)
    of_ref = worth_flags.batches * len(ref_passes)
    return worth_flags.reference + of_ref + slopes + noise, of_ref if has_actor else 0


def memory_of(asked: MeasurementFlags, cfg: Config, configs: dict, prompt: int) -> Plan:
    """The plan of a measurement, from the plan of a run with the same flags."""
    ranks = asked.ranks
    sharded = cfg.parallel == "fsdp" and ranks > 1
    cfg = replace(cfg, eval_every=-1, dtype=cfg.dtype if sharded else "float32")
    run = plan_of(cfg, configs, prompt, ranks, asked.gpu_gib)
    policy_bytes, width = (
        weights_of(empty_model(configs["policy"])),
        prompt + cfg.max_tokens,
    )
    entries = int(asked.share * policy_bytes) // 4 // (ranks if sharded else 1)
    copied = policy_bytes if sharded else 0
    cache = torch_cache(configs["policy"], 4, cfg.train_batch // ranks, width)
    categories = run.categories | {
        "measured entries": entries * bytes_of_an_entry(asked),
        "on-policy sampler: copy and KV cache": copied + cache,
    }
    weights = [name for name in run.categories if name.startswith("weights")]
    always = [*weights, "engine", "measured entries", "gathered from other ranks"]
    backward = [
        "gradients, policy",
        "activations, policy",
        "logits, or a layer's backward",
    ]
    stages = {
        "sample on-policy": [*always, "on-policy sampler: copy and KV cache"],
        "forward and backward": [*always, *backward],
        "slopes": [*always, "a forward without gradient"],
    }
    if sharded:  # the copy stays between batches
        stages["forward and backward"].append("on-policy sampler: copy and KV cache")
    used = {name for stage in stages.values() for name in stage}
    categories = {name: size for name, size in categories.items() if name in used}
    return replace(run, categories=categories, stages=stages, checkpoint=0)


def main(argv: list[str] | None = None) -> None:
    """Print the plan of a measurement. UserError: a flag is wrong."""
    usage = "python -m plan.worth --key=value ..."
    asked, rows, _ = worth.parse(argv, MeasurementFlags, usage)
    cfg = max(rows.values(), key=topk_of)
    need(asked.ranks >= 1, f"--ranks={asked.ranks}: must be at least 1")
    need(
        cfg.train_batch % (cfg.group_size * asked.ranks) == 0,
        f"--train_batch={cfg.train_batch}: must be a multiple of --group_size={cfg.group_size} times "
        f"--ranks={asked.ranks}",
    )
    configs = configs_of(cfg)
    prompt = cfg.max_prompt_tokens or longest_prompt(cfg)
    memory = memory_of(asked, cfg, configs, prompt)
    print(memory.text())
    if asked.gpu_gib:
        fits = "fits" if memory.peak <= asked.gpu_gib * GIB else "does not fit"
        print(
            f"it {fits} --gpu_gib={asked.gpu_gib:g}: about {memory.peak / GIB:.1f} GiB"
        )
    forward, of_actor = passes_of(asked, rows, "actor" in configs)
    print(
        f"passes over a batch of {cfg.train_batch} responses: {forward} forward and "
        f"{asked.reference} backward of the policy, {of_actor} forward of the actor"
    )
    responses = (asked.batches + asked.reference) * cfg.train_batch
    print(f"sampled responses: {responses:,} of at most {cfg.max_tokens} tokens")
    if asked.tflops:
        length = prompt + cfg.max_tokens
        passes = {"policy": forward + 2 * asked.reference, "actor": of_actor}
        work = 0.0
        for name, config in configs.items():
            # a forward pass takes a third of forward and backward
            of_a_token = operations(empty_model(config), length) / 3
            work += passes[name] * of_a_token * length * cfg.train_batch
        seconds = work / (asked.tflops * 1e12 * asked.ranks)
        print(
            f"the passes take {seconds / 60:.1f} minutes at --tflops={asked.tflops:g}"
        )


if __name__ == "__main__":
    run_command(main)
