"""Print the memory that a run needs on each rank. No model is loaded, and no weights are needed.

python -m plan --ranks=8 --gpu_gib=80 --config=configs/papers/jackpot.toml --max_prompt_tokens=1024
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import config
from machinery import flags, settings
from machinery.flags import need, run_command
from plan import configs_of, largest_micro, longest_prompt, plan_of, verdict


@dataclass(frozen=True)
class PlanFlags:
    """The plan"""

    ranks: int = 1
    """Number of ranks of the run."""
    gpu_gib: float = 0.0
    """Memory of a GPU in GiB: the plan says whether the run fits, and which flags would make it
    fit; 0: unknown."""


def main(argv: list[str] | None = None) -> None:
    """Print the plan of a configuration. Reads config.json; without --max_prompt_tokens also the
    tokenizer and the task's problems. UserError: one of them is missing, or a flag is wrong."""
    usage = "python -m plan --key=value ..."
    asked, pairs = flags.parse_own(PlanFlags, config.Config, argv, usage)
    need(asked.ranks >= 1, f"--ranks={asked.ranks}: must be at least 1")
    need(asked.gpu_gib >= 0, f"--gpu_gib={asked.gpu_gib}: must not be negative")
    cfg = settings.parse([f"--{k}={v}" for k, v in pairs], asked.ranks, installed=False)
    machine = (asked.ranks, asked.gpu_gib)
    configs = configs_of(cfg)
    prompt = cfg.max_prompt_tokens or longest_prompt(cfg)
    micro = config.MICRO_TOKENS
    if asked.gpu_gib:
        # as at the start of a run (machinery/run.py)
        micro = largest_micro(cfg, configs, prompt, asked.ranks, 0.9 * asked.gpu_gib)
    if cfg.micro_tokens is None:
        cfg = replace(cfg, micro_tokens=micro)
    made = plan_of(cfg, configs, prompt, *machine)
    print(made.text())
    if asked.gpu_gib:
        print(verdict(cfg, configs, prompt, made, asked.gpu_gib)[1])
        print(
            f"the largest micro-batch that fits, at least one row: --micro_tokens={micro}"
        )


if __name__ == "__main__":
    run_command(main)
