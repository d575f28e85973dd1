"""Train a policy with RL on the rollouts of another one. The loop, and nothing else: the algorithm
is in objectives.py.

    python train.py --objective=jackpot                            # a small actor rolls out, the bigger policy learns
    torchrun --nproc_per_node=2 train.py --objective=jackpot       # DDP, or --parallel=fsdp; one engine per rank
    python train.py --resume --out=out/run                         # go on after a kill

    publish -> rollout -> [ref pass] -> minibatch -> prepare -> forward, loss, backward -> step -> metrics

All flags are in config.py; --help shows the most common ones, --help=all the others too.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

# before torch is imported: its idle threads look for work for 0.1 ms, then leave the core to others
# (LOG.md)
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from tqdm import tqdm

import batching
import config
import objectives
from config import RunFlags
from eval import held_out
from learner import LOCAL_RANK, Comm, Learner, check_agreement, expects_agreement
from machinery import checkpoint, plot, settings
from machinery.flags import UserError, need, run_command
from machinery.run import (
    Log,
    locked,
    open_eval_engine,
    open_run,
    open_source,
    prepare_folder,
    samples_of,
)
from model import Needs, exact, needs_of_exact_kappa
from model.engines import evaluated_by
from presets import called
from source import given_back_if_it_fails


def train(cfg: config.Config) -> None:
    """Run `--steps` updates, or until a signal; saved and reported at the end. UserError: one
    sentence."""
    groups = (
        cfg.rollout_batch // cfg.group_size if cfg.samplers != "local" else 1
    )  # that a rank may wait for in turn
    comm = Comm.start(patience=groups * cfg.give_up + 1800)
    with locked(cfg, comm):
        t = Training(cfg, comm)
        try:
            loop(t, catch_signals())
        except Exception as e:  # save finished updates
            t.rescue()
            if (
                isinstance(e, UserError) and comm.rank > 0 and str(e) != ELSEWHERE
            ):  # the first may have nothing to say
                print(f"error: rank {comm.rank}: {e}", file=sys.stderr)
            raise
    comm.end()


def loop(t: Training, signals: list[str]) -> None:
    """Update, evaluate, log and save in turn."""
    cfg = t.cfg
    if t.step == 0:
        t.write(t.evaluate())
    bar = tqdm(
        total=cfg.steps,
        initial=t.step,
        desc=called(vars(cfg)),
        disable=t.log is None,
        dynamic_ncols=True,
    )
    halt = False
    while t.step < cfg.steps and not halt:
        if not t.pending and not t.roll_out(signals):
            break
        values = t.update()
        if due(cfg.eval_every, t.step) or t.step == cfg.steps:
            values |= t.evaluate()
        # a signal to one rank stops all of them, at the same update
        halt = t.comm.any(signals) or bool(t.learner.error)
        t.write(values)
        bar.update(1)
        bar.set_postfix(progress(values))
        t.look_after_save()
        if due(cfg.save_every, t.step):
            t.save()
    if t.step != t.saved_at:
        t.save()
    t.end_save()
    bar.close()
    if t.log:
        t.log.close()
        print(
            plot.report(cfg.out)
            if t.step == cfg.steps
            else f"stopped after update {t.step}, saved: {how_to_resume(cfg)}"
        )
    if t.second_engine is not None:
        t.second_engine.close()
    error = t.source.error or t.learner.error
    failed = t.comm.any(error)  # a rank that ends alone would be waited for
    t.source.close()  # last: vLLM's shutdown also ends the process group
    need(not failed, error or ELSEWHERE)


ELSEWHERE = "another rank has stopped this run, and says why"


class Training:
    """State of a run, and the stages of its loop."""

    def __init__(self, cfg: config.Config, comm: Comm):
        """Everything that can be wrong is found before the first model loads (config.py,
        machinery/run.py)."""
        self.comm = comm
        self.run = open_run(cfg, self.comm)  # task, tokenizer, model folders, newest checkpoint
        self.cfg = cfg = self.run.cfg  # with --epochs counted in updates
        self.source = open_source(cfg, self.run, self.comm)
        self.learner = Learner(
            *self.run.load_models(), cfg, self.comm, self.run.vocabulary, self.run.load_start()
        )
        self.learner.check_heads(self.run.probe_ids())
        self.to_check = expects_agreement(cfg)
        self.updates_per_rollout = cfg.rollout_batch // cfg.train_batch
        self.groups_per_update = cfg.train_batch // (cfg.group_size * self.comm.size)
        self.step = 0
        self.pending = []  # minibatches of groups that are not trained on yet
        self.controllers = {}  # carried from update to update: kappa, lambda_distill
        self.values = {}  # metrics of the last roll-out, until an update reports them
        self.clock: dict[str, float] = {}  # seconds by stage
        if self.run.checkpoint:
            saved = checkpoint.load(self.run.checkpoint, self.learner, self.source)
            self.step, self.pending, self.controllers = saved
            self.values = self.controllers.pop("values", {})
        self.saved_at = self.step
        self.saving: checkpoint.Saving | None = None  # the checkpoint that is being written
        if comm.writes:
            prepare_folder(self.run)
        comm.barrier()  # nobody writes there before
        self.log = Log(self.run.folder, cfg, self.step) if comm.rank == 0 else None
        self.second_engine = None  # of --eval_engine=second
        self.unwritten: dict | None = None  # metrics of an update that are not in the log yet

    def roll_out(self, signals) -> bool:
        """Stages 1 to 3: a new batch of groups into `pending`. False: a signal came first, or no
        sampler is left."""
        cfg, learner = self.cfg, self.learner
        source = self.source
        # 1. publish the rollout model's weights to the engine, and check that they arrived
        with timer(self.clock, "sync_s"):
            published = learner.published(self.run.rollout_model, source.packed)
            if cfg.check_sync:
                published = learner.verified(self.run.rollout_model, source.packed, published)
            source.publish(learner.version, published)
        # 2. roll out: whole groups, sampled and graded
        n = self.groups_per_update
        with timer(self.clock, "rollout_s"):
            groups = source.next(n * self.updates_per_rollout, learner.version, signals)
        if self.comm.any(not groups):  # a rank waited in vain for remote samplers
            source.give_back()
            return False
        self.values |= source.metrics()
        # 3. the ref pass, where the objective must know p_ref before the first update
        if "ref" in objectives.passes_needed(
            learner.cfg, self.controllers, self.updates_per_rollout
        ):
            with timer(self.clock, "ref_s"), given_back_if_it_fails(source):
                columns = learner.ref_columns(batching.collate(groups, cfg), cfg.obrs_lambda)
                batching.write_ref_columns(groups, columns)
        self.pending = [groups[i : i + n] for i in range(0, len(groups), n)]
        return True

    def update(self) -> dict[str, float]:
        """Stages 4 to 6: one optimizer step on the next minibatch; its metrics."""
        cfg, learner = self.cfg, self.learner
        groups = self.pending[0]
        values = dict(self.values)
        with timer(self.clock, "update_s"):
            # 4. one minibatch: padded, with advantages and mask uniforms
            batch = batching.collate(groups, cfg, learner.version, self.source.now(learner.version))
            # 5. statistics over all ranks: denominators, lambda, kappa
            fresh = None
            if "fresh" in objectives.passes_needed(
                learner.cfg, self.controllers, self.updates_per_rollout
            ):
                fresh = learner.score(batch, needs_of_exact_kappa(cfg))
            stats = objectives.prepare(batch, self.comm, learner.cfg, self.controllers, fresh)
            if due(cfg.log_samples, self.step):
                self.write_samples(groups[:4])
            if self.to_check and not self.comm.any(batch.staleness[:, 0].max() > 0):
                self.check_agreement(batch)
            # 6. forward, loss, backward for each micro-batch; clip; step
            logged = learner.update(batch, stats)
            objectives.update_controllers(self.controllers, logged, learner.cfg)
        if cfg.exact:
            exact.check_zero(cfg, logged)
        self.pending = self.pending[1:]
        self.values = {}
        self.step += 1
        self.unwritten = logged | values
        return self.unwritten

    def check_agreement(self, batch) -> None:
        """Once a run, on fresh rollouts: do learner and engine compute one policy?"""
        self.to_check = False
        warning = check_agreement(self.cfg, self.learner.agreement(batch))
        if warning and self.comm.rank == 0:
            tqdm.write(f"warning: {warning}", file=sys.stderr)

    def write(self, values: dict[str, float]) -> None:
        """A line of metrics: of the update that was done last."""
        if self.log:
            self.log.write(self.step - 1, values | self.read_clock())
        self.unwritten = None

    def write_samples(self, groups) -> None:
        """A response of each of these groups, whole, with the gap between policy and sampler at
        every token."""
        firsts = [replace(group, responses=group.responses[:1], ref={}) for group in groups]
        logp = self.learner.score(batching.collate(firsts, self.cfg), Needs()).logp
        if self.log:
            rows = [
                x[: len(g.responses[0].tokens)].numpy() for x, g in zip(logp, firsts, strict=True)
            ]
            self.log.write_samples(samples_of(firsts, rows, self.step, self.run.tokenizer))

    def evaluate(self) -> dict[str, float]:
        """Held-out pass@1 of policy and actor."""
        values = {}
        if self.cfg.eval_every < 0:
            return values
        with timer(self.clock, "eval_s"):
            for name in self.learner.names:
                engine = self.eval_engine(name)
                scores = held_out(self.learner, name, self.run, engine)
                values |= {f"eval/{name}_{key}": value for key, value in scores.items()}
                if engine is not None:
                    engine.sleep()
        return values

    def eval_engine(self, name: str):
        """An engine with one model's weights as they are now; None: a plain sampler on the
        learner's own."""
        kind = evaluated_by(self.cfg, name)
        if kind == "torch" or not self.run.eval_sets:
            return None
        if kind == "own":
            return self.source.lend(self.learner.published(name, self.source.packed))
        if self.second_engine is None:
            self.second_engine = open_eval_engine(self.cfg, self.run, self.comm)
        self.second_engine.load(self.learner.named_tensors(name))
        return self.second_engine

    def save(self) -> None:
        """Begin a checkpoint of the current state. A thread writes it during the next updates; one
        at a time."""
        self.end_save()
        with timer(self.clock, "save_s"):
            left = {**self.controllers, "values": self.values}
            state = (self.run, self.step, self.learner, self.source, self.pending, left)
            self.saving = checkpoint.Saving(checkpoint.Snapshot(*state))
            self.saved_at = self.step

    def look_after_save(self) -> None:
        """End the checkpoint that is being written, if it is written on every rank."""
        if self.saving is not None and not self.comm.any(self.saving.goes_on()):
            self.end_save()

    def end_save(self) -> None:
        """Wait for the checkpoint that is being written; then a source of remote groups may forget
        them.

        UserError: it could not be written."""
        if self.saving is None:
            return
        with timer(self.clock, "save_s"):
            saving, self.saving = self.saving, None
            saving.wait()
            self.source.saved()

    def rescue(self) -> None:
        """After an exception between two updates: save the state, if this is the only process and
        all is finite.

        With several ranks the others cannot be asked any more, and the checkpoint before stands."""
        try:
            self.end_save()
        except UserError as e:  # the first error is the one to be told last
            print(f"error: {e}", file=sys.stderr)
        between_updates = self.learner.version == self.step
        if (
            self.comm.size > 1
            or self.step == self.saved_at
            or not between_updates
            or not self.learner.is_finite()
        ):
            return
        try:
            self.save()
            self.end_save()
            if self.unwritten is not None:
                self.write(self.unwritten)
            print(
                f"an error after update {self.step}, saved: {how_to_resume(self.cfg)}",
                file=sys.stderr,
            )
        except Exception as e:  # the first error is the one to be told
            print(
                f"an error after update {self.step}, which could not be saved: {e}", file=sys.stderr
            )

    def read_clock(self) -> dict[str, float]:
        """Seconds by stage since it was last read."""
        seconds, self.clock = self.clock, {}
        return seconds


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def how_to_resume(cfg: RunFlags) -> str:
    return f"go on with --resume --out={cfg.out}"


def progress(logged: dict) -> dict[str, str]:
    """Values of the progress bar."""
    shown = {"reward": "reward", "rollout_corr/kl": "kl", "obrs/accept_rate": "accept"}
    return {name: f"{logged[key]:.3f}" for key, name in shown.items() if key in logged}


@contextmanager
def timer(clock: dict, name: str):
    start = time.perf_counter()
    yield
    clock[name] = clock.get(name, 0.0) + time.perf_counter() - start


def catch_signals() -> list[str]:
    """SIGTERM and Ctrl-C finish the update at hand, save, and stop; a second Ctrl-C stops at
    once."""
    seen: list[str] = []

    def handler(number, frame):
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)
    return seen


if __name__ == "__main__":
    run_command(lambda: train(settings.parse()), silent=LOCAL_RANK > 0)
