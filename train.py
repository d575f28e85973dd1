"""Train a policy with RL on rollouts of a different policy: the training loop.

    python train.py --objective=jackpot                       # small actor samples, policy learns
    torchrun --nproc_per_node=2 train.py --objective=jackpot  # DDP or FSDP, one engine per rank
    python train.py --resume --out=out/run                    # resume from the newest checkpoint

    publish -> rollout -> [ref pass] -> minibatch -> prepare -> forward, loss, backward -> step -> metrics

`objectives.loss` multiplies the weight and mask of a correction (corrections.py) by a surrogate.
presets.py maps --objective=jackpot to --correction=obrs: `corrections.weight_and_mask` calls
`obrs.correction` for mask and weight. Z, the expected acceptance rate, is exact by default if an
actor is the sampler (`corrections.exact_z_known` has the conditions, model.TwoModelRows the sum).
Otherwise a factor kappa (`obrs.kappa_from`) scales Z_low or Z_approx, sums over the top-K:
`objectives.prepare_obrs` computes kappa before the update. With --obrs_target=new `prepare_obrs`
takes the kappa of the previous update (`objectives.update_controllers`), except in the first
update. All flags are in config.py; --help prints the most common ones, --help=all prints all.

torchrun kills its ranks 30 seconds after a signal; `torchrun --shutdown-timeout=3600` lets them
finish the update and save."""

from __future__ import annotations

import machinery.startup  # isort: skip  # noqa: F401

import batching
import objectives
from config import Config
from machinery import settings
from machinery.flags import run_command
from machinery.ranks import Comm
from machinery.run import locked
from machinery.session import Session, due, timer
from model import exact

SAMPLES_EVERY = 10  # updates between two writes of four responses to samples.jsonl


def train(cfg: Config) -> int:
    """Run `--steps` updates; stop early at a signal; save and report at the end. Returns the exit code.
    Raises UserError with a one-sentence message."""
    # timeout: in the worst case a rank waits `give_up` seconds for each group or rollout
    local = cfg.samplers == "local"
    waits = cfg.dynamic_sampling if local else cfg.rollout_batch // cfg.group_size
    comm = Comm.start(patience=max(1, waits) * cfg.give_up + 1800)
    with locked(cfg, comm):
        training = Training(cfg, comm)
        try:
            loop(training)
        except Exception:
            training.rescue()
            raise
    comm.end()
    return training.exit_code


def loop(training: Training) -> None:
    """Sample a batch, then update on each minibatch."""
    training.start()
    while training.step < training.cfg.steps:
        if not training.pending and not training.roll_out():
            break
        if not training.after_update(training.update()):
            break
    training.finish()


class Training(Session):
    """The stages of the loop."""

    def roll_out(self) -> bool:
        """Stages 1 to 3: sample a batch of groups into `pending`. Returns False if a rank
        gets no groups (remote samplers only)."""
        cfg, learner = self.cfg, self.learner
        source = self.source
        # 1. publish the rollout model's weights to the engine, and check that it has them
        with timer(self.clock, "sync_s"):
            published = learner.published(self.run.rollout_model, source.packed)
            source.publish(learner.version, published)
        # 2. sample and grade whole groups
        n = self.groups_per_update
        self.drawn_at = learner.version
        source.mark()
        with self.rolling_out():
            wanted = n * self.updates_per_rollout
            groups = source.next(wanted, learner.version, self.signals)
        # remote samplers only: no group for --give_up seconds, or a signal
        if self.comm.any(not groups):
            source.give_back()
            return False
        self.speed.count_sampled(groups)
        self.values |= source.metrics(self.comm.sum_counts)
        # 3. the learner's p_ref (PPO's p_old), if needed before the first update
        updates = self.updates_per_rollout
        if objectives.needs_ref_pass(learner.cfg, self.controllers, updates):
            with timer(self.clock, "ref_s"):
                for i in range(0, len(groups), 16):  # columns are large
                    part = groups[i : i + 16]
                    columns = learner.ref_columns(batching.collate(part, cfg))
                    batching.write_ref_columns(part, columns)
        self.pending = [groups[i : i + n] for i in range(0, len(groups), n)]
        return True

    def update(self) -> dict[str, float]:
        """Stages 4 to 6: one optimizer step on the next minibatch. Returns the metrics."""
        cfg, learner = self.cfg, self.learner
        groups = self.pending[0]
        values = dict(self.values)
        with timer(self.clock, "update_s"):
            # 4. pad one minibatch; compute advantages and mask uniforms
            batch = batching.collate(groups, cfg, learner.version)
            # 5. statistics over all ranks: denominators, kappa
            stats = objectives.prepare(batch, self.comm, learner.cfg, self.controllers)
            if due(SAMPLES_EVERY, self.step):
                self.write_samples(groups[:4])
            if self.agreement_unchecked:
                is_stale = self.comm.any(batch.staleness.max() > 0)
                if not is_stale:
                    self.check_agreement(batch)
            # 6. forward, objectives.joint_loss, backward for each micro-batch; clip; optimizer step
            logged = learner.backward(batch, stats)
            self.check_weights(logged)
            logged |= learner.step(logged)
            self.speed.count_trained(batch)
            objectives.update_controllers(self.controllers, logged, learner.cfg)
        if cfg.exact:
            exact.check_zero(cfg, logged)
        self.pending = self.pending[1:]
        self.values = {}
        self.step += 1
        return logged | values


if __name__ == "__main__":
    run_command(lambda: train(settings.parse()))
