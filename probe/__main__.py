"""Measure the mismatch between sampler and learner on held-out problems."""

from __future__ import annotations

import sys
from dataclasses import replace

import quant
import tasks
from eval import check, filled, find_model, open_setup, write_result
from machinery import flags
from machinery.flags import (
    check_result,
    is_first_rank,
    need,
    parse_flags,
    run_command,
)
from machinery.ranks import WORLD_SIZE
from probe import PROBLEMS, ProbeFlags, doctor, probe


def main(argv: list[str] | None = None) -> dict:
    """The report as a dictionary, which --out writes. UserError: a flag is wrong."""
    if any(
        word.split("=")[0] == "--rollouts"
        for word in (sys.argv[1:] if argv is None else argv)
    ):
        return doctor.main(argv)
    usage = "python -m probe --model=FOLDER --key=value ...  (--rollouts=FILE --help: of a dump)"
    cfg = parse_flags(ProbeFlags, argv, usage)
    cfg = tasks.as_trained(cfg, {key for key, _ in flags.read(ProbeFlags, argv)})
    cfg = filled(cfg)
    if cfg.actor == "none":
        cfg = replace(cfg, actor="")
    if cfg.out:
        check_result("out", cfg.out)
    check_flags(cfg)
    actor = find_model(cfg, "actor", "actor") if cfg.actor else None
    setup = open_setup(cfg, PROBLEMS, actor)
    settings = [(s.samples, s.temperature, s.max_tokens) for s in setup.sets]
    need(
        settings == [(cfg.samples, cfg.temperature, cfg.max_tokens)],
        f"--task={cfg.task}: the report covers one set, sampled with the flags; name one set without settings",
    )
    need(
        not (cfg.explain and getattr(setup.task, "environment", "")),
        f"--explain: --task={cfg.task} has several turns, but sources are computed only for responses with one turn; "
        "leave --explain out",
    )
    result = probe(cfg, setup, actor)
    if is_first_rank():
        write_result(cfg.out, result)
    return result


def check_flags(cfg: ProbeFlags) -> None:
    """Raise UserError for flags that are invalid or contradict each other."""
    check(cfg, n_ranks=WORLD_SIZE)
    need(
        cfg.rollout_tp == WORLD_SIZE,
        f"--rollout_tp={cfg.rollout_tp}: a probe has one engine, and torchrun started {WORLD_SIZE} ranks; give both "
        "the same number",
    )
    need(
        not cfg.explain or cfg.rollout_tp == 1,
        "--explain: sources are computed in plain torch on one rank; leave out --rollout_tp",
    )
    need(
        cfg.samples >= 2,
        f"--samples={cfg.samples}: must be at least 2, since the report compares responses to the same problem",
    )
    need(
        not (cfg.actor and (cfg.learner_quant != "none" or cfg.router_replay)),
        "--learner_quant, --router_replay: these flags apply only if the policy samples; leave out --actor",
    )
    need(
        not (cfg.explain and (cfg.router_replay or cfg.exact)),
        "--explain: it switches sources on in plain torch; leave out --router_replay and --exact",
    )
    quant.check(cfg)


if __name__ == "__main__":
    run_command(main)
