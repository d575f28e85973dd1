"""Print the memory that a run needs on each rank. No model is loaded, and no weights are needed.

python -m plan --ranks=8 --gpu_gib=80 --config=configs/papers/jackpot.toml --max_prompt_tokens=1024
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import config
from machinery import flags, settings
from machinery.flags import need, run_command
from plan import report


@dataclass(frozen=True)
class PlanFlags:
    """The plan"""

    ranks: int = 1
    """Number of ranks of the run."""
    gpu_gib: float = 0.0
    """Memory of a GPU in GiB: the plan says whether the run fits, and which flags would make it
    fit; 0: unknown."""


def main(argv: list[str] | None = None) -> None:
    """Print the plan of a configuration. UserError: a flag is wrong."""
    both = dataclass(frozen=True)(type("Flags", (PlanFlags, config.Config), {}))
    pairs = flags.read(both, argv, "python -m plan --key=value ...", also={"config"})
    names = {f.name for f in fields(PlanFlags)}
    asked = PlanFlags(**{k: flags.convert(PlanFlags, k, v) for k, v in pairs if k in names})
    need(asked.ranks >= 1, f"--ranks={asked.ranks}: must be at least 1")
    need(asked.gpu_gib >= 0, f"--gpu_gib={asked.gpu_gib}: must not be negative")
    cfg = settings.parse(
        [f"--{k}={v}" for k, v in pairs if k not in names], asked.ranks, installed=False
    )
    report(cfg, asked.ranks, asked.gpu_gib)


if __name__ == "__main__":
    run_command(main)
