"""Train a policy with RL on rollouts of another law. The loop, and nothing else: the algorithm is in objectives.py.

    python train.py --objective=jackpot                            # a small actor rolls out, the bigger policy learns
    torchrun --nproc_per_node=2 train.py --objective=jackpot       # DDP, or --parallel=fsdp; one engine per rank
    python train.py --resume --out=out/run                         # go on after a kill

    publish -> rollout -> [ref pass] -> minibatch -> prepare -> forward, loss, backward -> step -> metrics

Every flag stands in config.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))  # read before vLLM: it overwrites such variables

import torch
from tqdm import tqdm

import batching
import checkpoint
import config
import objectives
import sampling
from sampling import Sampling
from delay import DelaySource
from eval import fresh_advantage, held_out
from learner import Comm, Learner
from metrics import Log
from model import needs_of_exact_kappa
from engines import make_engine
from rollout import LocalSource
from run import open_run, remote_source


def train(cfg: config.Config) -> Path:
    # -- set-up: everything that can be wrong is found before the first model loads (config.py, runs.py) -----------------
    device = f"cuda:{LOCAL_RANK}" if torch.cuda.is_available() else "cpu"
    if WORLD > 1:
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=cfg.give_up + 1800)
        )
    comm = Comm(device)
    world = open_run(cfg, comm)  # task, tokenizer, model folders, run folder, newest checkpoint
    two = world.actor is not None
    sampler = "actor" if two else "policy"  # whose weights the engine gets
    topk = cfg.obrs_topk if cfg.correction in objectives.USES_Z and cfg.obrs_z != "exact" else 0
    kept = sampling.max_allowed(cfg, world.configs[sampler].vocab_size)
    if cfg.samplers == "local":
        engine = make_engine(cfg, world.actor or world.policy, world.context, max(topk, kept), device)
        Source = LocalSource if cfg.delay == "none" else partial(DelaySource, cfg=cfg, store=Path(cfg.out) / "versions")
        source = Source(
            engine,
            world.task,
            world.tokenizer,
            Sampling.of(cfg),
            group_size=cfg.group_size,
            topk=topk,
            kept=kept,
            model=sampler,
            probe=world.probe(sampler),
            rank=comm.rank,
            world=comm.size,
        )
        packed = engine.packed
    else:
        source, packed = remote_source(cfg, world, sampler, topk, kept, comm), cfg.sync_dtype == "quantized"
    learner = Learner(*world.load_models(), cfg, comm, device)
    step, pending, controllers = checkpoint.load(world.checkpoint, learner, source) if world.checkpoint else (0, [], {})
    run, updates = Path(cfg.out), cfg.rollout_batch // cfg.train_batch
    groups_per_update = cfg.train_batch // (cfg.group_size * comm.size)
    log = Log(run, cfg, step) if comm.rank == 0 else None
    stop = catch_signals()
    clock: dict[str, float] = {}
    saved_at, halt = step, False

    def evaluate(names):
        with timer(clock, "eval_s"):
            return {
                f"eval/{n}_{k}": v
                for n in names
                for k, v in held_out(learner, n, world.task, world.tokenizer, cfg).items()
            }

    def save():
        with timer(clock, "save_s"):
            checkpoint.save(run, step, learner, source, pending, controllers, world.tokenizer, world.configs, cfg.keep)
            source.saved()

    if step == 0:
        first = evaluate(learner.names)
        if log:
            log.write(-1, {**first, **clock})
        clock.clear()

    bar = tqdm(total=cfg.steps, initial=step, desc=f"{cfg.objective}", disable=comm.rank != 0, dynamic_ncols=True)
    while step < cfg.steps and not halt:
        values = {}
        if not pending:
            # 1. publish the sampler's weights into the engine, and prove that they arrived
            with timer(clock, "sync_s"):
                source.publish(learner.version, learner.published(sampler, packed))
            # 2. roll out: whole groups, sampled and graded
            with timer(clock, "rollout_s"):
                groups = source.next(groups_per_update * updates, learner.version, stop)
            if comm.max([not groups])[0] > 0:  # remote samplers: a signal came, or none of them, while a rank waited
                source.give_back()
                break
            values.update(source.metrics())
            # 3. the ref pass, where the objective must know p_ref before the first update
            if "ref" in objectives.passes_needed(cfg, controllers, updates):
                with timer(clock, "ref_s"):
                    batching.write_ref(groups, learner.ref_columns(batching.collate(groups, cfg), cfg.obrs_lambda))
            pending = [groups[i : i + groups_per_update] for i in range(0, len(groups), groups_per_update)]
        # 4. one minibatch: padded, with advantages and mask uniforms
        with timer(clock, "update_s"):
            batch = batching.collate(pending[0], cfg, learner.version, source.now(learner.version))
            # 5. statistics over all ranks: denominators, lambda, kappa
            fresh = (
                learner.score(batch, needs_of_exact_kappa(cfg))
                if "fresh" in objectives.passes_needed(cfg, controllers, updates)
                else None
            )
            stats = objectives.prepare(batch, comm, cfg, controllers, fresh)
            fresh_adv = (
                fresh_advantage(learner, pending[0], world.task, world.tokenizer, cfg)
                if due(cfg.advantage_error_every, step)
                else None
            )
            # 6. forward, loss, backward for each micro-batch; clip; step
            logged = learner.update(batch, stats)
            objectives.update_controllers(controllers, logged, cfg)
        if fresh_adv is not None:
            values.update(fresh_advantage=fresh_adv, advantage_error=abs(logged["weighted_advantage"] - fresh_adv))
        pending = pending[1:]
        step += 1
        # 7. metrics, evaluation, checkpoint
        if due(cfg.eval_every, step) or step == cfg.steps:
            values.update(evaluate(learner.names))
        halt = comm.max([len(stop)])[0] > 0  # a signal to one rank stops all of them, at the same update
        if log:
            log.write(step - 1, {**logged, **values, **clock})
            bar.update(1)
            bar.set_postfix(
                reward=f"{logged['reward']:.3f}",
                kl=f"{logged['rollout_corr/kl']:.3f}",
                **({"accept": f"{logged['obrs/accept_rate']:.3f}"} if "obrs/accept_rate" in logged else {}),
            )
        clock.clear()
        if due(cfg.save_every, step):
            save()
            saved_at = step
    if step != saved_at:
        save()
    bar.close()
    if log:
        log.close()
        print(
            f"stopped after update {step}, saved: go on with --resume --out={cfg.out}"
            if step < cfg.steps
            else world.report()
        )
    source.close()  # last: vLLM's shutdown also ends the process group
    if source.error:
        raise ValueError(source.error)
    return run


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def timer(clock: dict, name: str):
    start = time.perf_counter()
    yield
    clock[name] = clock.get(name, 0.0) + time.perf_counter() - start


def catch_signals() -> list:
    """SIGTERM and Ctrl-C finish the update at hand, save, and stop; a second Ctrl-C stops at once."""
    seen: list = []

    def handler(number, frame):
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)
    return seen


if __name__ == "__main__":
    try:
        train(config.parse())
    except ValueError as e:
        sys.exit(f"error: {e}" if LOCAL_RANK == 0 else 2)
