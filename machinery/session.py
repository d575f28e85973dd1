"""A training run around the loop of train.py: metrics, evaluation, checkpoints and signals."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

from tqdm import tqdm

import batching
import corrections
import quant
from config import Config
from eval import held_out
from learner import Learner
from machinery import checkpoint, plot, settings
from machinery.flags import UserError, need
from machinery.log import Log, samples_of
from machinery.optim import not_finite
from machinery.ranks import Comm
from machinery.run import (
    note_saved,
    open_eval_engine,
    open_run,
    open_source,
    prepare_folder,
)
from machinery.speed import Speed
from model import Needs, memory
from model.agreement import agreement, check_agreement, expects_agreement
from model.engines import evaluated_by
from presets import called

# metrics in the progress bar -> their names there
SHOWN = {"reward": "reward", "rollout_corr/kl": "kl", "obrs/accept_rate": "accept"}


class Session:
    """State of a run: models, source of rollouts, counters, log and checkpoints."""

    def __init__(self, cfg: Config, comm: Comm):
        """Open the run. UserError for wrong flags, files or models, mostly before a model loads."""
        self.comm = comm
        # task, tokenizer, model folders, newest checkpoint
        self.run = open_run(cfg, self.comm)
        self.cfg = cfg = self.run.cfg  # with --epochs converted to --steps
        if comm.rank == 0:
            print(settings.unlike_paper(cfg), end="")
        self.warn(memory.slow_dtype(cfg))
        self.source = open_source(cfg, self.run, self.comm)
        self.learner = Learner(
            *self.run.load_models(),
            cfg,
            self.comm,
            self.run.vocabulary,
            self.run.load_start(),
        )
        self.agreement_unchecked = expects_agreement(cfg)
        self.updates_per_rollout = cfg.rollout_batch // cfg.train_batch
        self.groups_per_update = cfg.train_batch // (cfg.group_size * self.comm.size)
        self.step = 0
        self.pending = []  # minibatches of groups that wait for their update
        self.drawn_at = -1  # the learner's version at the start of the last rollout
        self.controllers = {}  # carried from update to update: kappa, lambda_distill
        self.values = {}  # metrics of the last rollout, until an update reports them
        self.clock: dict[str, float] = {}  # seconds by stage
        models = [getattr(self.learner.models, name) for name in self.learner.names]
        dense = not cfg.lora_rank and not any(map(quant.expert_parameters, models))
        self.speed = Speed(models, self.learner.device, dense)
        if self.run.checkpoint:
            saved = checkpoint.load(self.run.checkpoint, self.learner, self.source)
            self.step, self.pending, self.controllers = saved
        self.saved_at = self.step
        if comm.rank == 0:
            prepare_folder(self.run)
        comm.barrier()  # no rank writes into the folder earlier
        self.log = Log(self.run.folder, self.step) if comm.rank == 0 else None
        self.second_engine = None  # the engine of --eval_engine=second
        self.signals: list[int] = []  # numbers of caught signals
        self.exit_code = 0  # 128 + the number of the signal that stopped the run
        self.bar = None

    # -- the loop ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Catch signals, show a progress bar, and evaluate before the first update."""
        self.signals = catch_signals()
        # an error has ended the run in the last update's evaluation
        missing = self.log and self.evaluation_due() and not self.log.evaluated
        if self.step == 0 or self.comm.any(missing):
            self.write(self.evaluate())
        self.bar = tqdm(
            total=self.cfg.steps,
            initial=self.step,
            desc=called(vars(self.cfg)),
            disable=self.log is None,
            dynamic_ncols=True,
        )

    def after_update(self, values: dict[str, float]) -> bool:
        """Evaluate, log and save if due. Returns False if a signal or an error stops the run."""
        cfg = self.cfg
        try:
            if self.evaluation_due():
                values |= self.evaluate()
        finally:
            self.write(values)
        self.bar.update(1)
        self.bar.set_postfix(
            {x: f"{values[key]:.3f}" for key, x in SHOWN.items() if key in values}
        )
        if due(cfg.save_every, self.step):
            self.save()
        # a signal to one rank stops all of them, at the same update
        return not (self.comm.any(self.signals) or self.learner.error)

    def finish(self) -> None:
        """Save, report and close. Raises UserError if an error has stopped the run."""
        if self.step != self.saved_at:
            self.save()
        self.bar.close()
        caught = int(self.comm.max([max(self.signals, default=0)])[0])
        if caught and self.step < self.cfg.steps:
            self.exit_code = 128 + caught
        if self.log:
            self.log.close()
            print(
                plot.report(self.cfg.out)
                if self.step == self.cfg.steps
                else f"stopped after update {self.step}, saved: continue with --resume --out={self.cfg.out}"
            )
        error = self.source.error or self.learner.error
        # all ranks stop together, so that no rank waits forever
        failed = self.comm.any(error)
        # last: vLLM's shutdown also ends the process group
        if self.second_engine is not None:
            self.second_engine.close()
        self.source.close()
        need(
            not failed,
            error or "another rank has stopped this run, and prints the reason",
        )

    # -- metrics and evaluation --------------------------------------------------------------------

    def check_agreement(self, batch) -> None:
        """Check once per run, on fresh rollouts, that learner and engine compute one policy."""
        self.agreement_unchecked = False
        self.warn(check_agreement(self.cfg, agreement(self.learner, batch)))

    def check_weights(self, logged: dict[str, float]) -> None:
        """Warn before the first optimizer step if few responses would determine it."""
        if self.step == 0:
            self.warn(corrections.dead_weights(self.cfg, logged))

    def warn(self, sentence: str) -> None:
        if sentence and self.comm.rank == 0:
            tqdm.write(f"warning: {sentence}", file=sys.stderr)

    def write(self, values: dict[str, float]) -> None:
        """Write the line of metrics of the last update."""
        if self.log:
            seconds, self.clock = self.clock, {}
            values = (
                values | self.speed.read(seconds) | seconds | {"time_s": time.time()}
            )
            self.log.write(self.step - 1, values)

    @contextmanager
    def rolling_out(self):
        """Time a rollout; grading after its last response is counted separately."""
        before = getattr(self.source, "grading_seconds", 0.0)
        with timer(self.clock, "rollout_s"):
            yield
        graded = getattr(self.source, "grading_seconds", 0.0) - before
        self.clock["rollout_s"] -= graded
        self.clock["grade_s"] = self.clock.get("grade_s", 0.0) + graded

    def write_samples(self, groups) -> None:
        """Log the first response of each group, with the gap between policy and sampler at every
        token."""
        firsts = [
            replace(group, responses=group.responses[:1], ref={}) for group in groups
        ]
        logp = self.learner.score(batching.collate(firsts, self.cfg), Needs()).logp
        if self.log:
            rows = [
                x[: len(g.responses[0].tokens)].numpy()
                for x, g in zip(logp, firsts, strict=True)
            ]
            self.log.write_samples(
                samples_of(firsts, rows, self.step, self.run.tokenizer)
            )

    def evaluation_due(self) -> bool:
        """Whether policy and actor are evaluated after the last update."""
        if self.cfg.eval_every < 0 or not self.run.eval_sets:
            return False
        return self.step == self.cfg.steps or due(self.cfg.eval_every, self.step)

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
        """An engine with the current weights of one model. None if the learner's own module samples
        in plain torch, or if there are no held-out sets."""
        kind = evaluated_by(self.cfg, name)
        if kind == "torch" or not self.run.eval_sets:
            return None
        if kind == "own":
            return self.source.lend(self.learner.published(name, self.source.packed))
        if self.second_engine is None:
            self.second_engine = open_eval_engine(self.cfg, self.run, self.comm)
        self.second_engine.load(self.learner.named_tensors(name))
        return self.second_engine

    # -- checkpoints -------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of the current state, and tell the source, so that remote samplers can
        drop the groups that the checkpoint contains.

        Raises UserError if the checkpoint could not be written."""
        self.saved_at = self.step
        with timer(self.clock, "save_s"):
            checkpoint.save(
                self.run,
                self.step,
                self.learner,
                self.source,
                self.pending,
                self.controllers,
            )
            if self.comm.rank == 0:
                note_saved(self.run.folder)
            self.source.saved()

    def rescue(self) -> None:
        """Save finished updates after an error between two updates. Several ranks keep their last
        checkpoint, because the other ranks cannot take part."""
        if self.drawn_at == self.learner.version:  # no update on the newest groups
            self.pending = []
            self.source.give_back()
        unsaved = self.learner.version == self.step > self.saved_at
        if unsaved and self.comm.size == 1 and not not_finite(self.learner.models):
            with suppress(UserError):  # the original error is the one to report
                self.save()
                done = (
                    f"an error after update {self.step}, saved: continue with --resume"
                )
                print(f"{done} --out={self.cfg.out}", file=sys.stderr)


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def timer(clock: dict, name: str):
    start = time.perf_counter()
    yield
    clock[name] = clock.get(name, 0.0) + time.perf_counter() - start


def catch_signals() -> list[int]:
    """Install signal handlers, and return the list that collects the numbers of caught signals.
    After SIGTERM, SIGHUP or Ctrl-C the run finishes the update, saves and stops; a second Ctrl-C
    stops it at once."""
    seen: list[int] = []

    def handler(number, frame):
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)

    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, handler)
    return seen
