"""Sources of rollouts: they publish weights to a sampler and hand out graded groups.

There are three, with the same methods (publish, next, metrics, now, give_back, saved, state_dict,
load_state_dict, close) and the same attributes `packed` and `error`; those in this process also
lend their engine and deal out the states of several ranks at a resume:

  LocalSource         (here)              one engine in this process
  DelaySource         (delay.py)          samplers that lag behind, in this process, on a virtual clock
  RemoteSource        (remote/source.py)  sampler processes on other machines
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

import sync
from rollout import Response, Rollout, request_seed
from sampling import Sampling
from tasks import encode, grade_all, grading_metrics, turns

POSITIVE = 1e-3  # largest log-probability that rounding explains


def has_spread(group: Rollout) -> bool:
    """Whether the group's responses earned different rewards: only then is there an advantage to
    learn from."""
    return len({r.reward for r in group.responses}) > 1


def set_aside_if_poisoned(r: Response) -> bool:
    """Leave a response out of the loss if the engine gave one of its tokens a log-probability that
    is not finite or above 0; its numbers become 0. Whether that was so.

    One such token would make the loss of the whole batch NaN."""
    listed = r.topk_logp  # -inf there: a token that truncation does not allow
    if (
        np.isfinite(r.logp_inf).all()
        and (r.logp_inf <= POSITIVE).all()
        and (listed <= POSITIVE).all()  # false for NaN too
    ):
        return False
    r.loss_mask = np.zeros_like(r.loss_mask)
    r.logp_inf = np.zeros_like(r.logp_inf)
    r.topk_logp = np.full_like(listed, -np.inf)
    return True


@contextmanager
def given_back_if_it_fails(source):
    """After an exception in here the source stands where it stood before the last `next`: no group
    is skipped."""
    try:
        yield
    except Exception:
        source.give_back()
        raise


@dataclass(eq=False, repr=False)
class LocalSource:
    """Groups that an engine in this process samples for a task's prompts, graded.

    Of `n_ranks` sources, source `rank` takes the problems rank, rank + n_ranks, ...: together they
    read the task once."""

    engine: Any  # VLLMEngine or HFEngine
    task: Any
    tokenizer: Any
    sampling: Sampling
    _: KW_ONLY
    group_size: int  # G: responses to each prompt
    topk: int  # K: how many of the most likely tokens are recorded with each sampled one
    model: str  # name of the model in the engine: "policy" or "actor"
    check: sync.WeightCheck | None  # of its weights; None: they are loaded without one
    max_allowed: int = 0  # largest set of allowed tokens that is recorded; 0: none is
    resample: int = 0  # rounds of --dynamic_sampling
    stop_ids: list[int] | None = (
        None  # the tokens that end a response (tasks.stop_ids); None: the tokenizer's end
    )
    rank: int = 0
    n_ranks: int = 1

    def __post_init__(self):
        self.stop_ids = self.stop_ids or [self.tokenizer.eos_token_id]
        self.no_spread = 0  # groups that were dropped for it since the last `metrics`
        self.counts = Counter()  # of grading and poisoned responses, since the last `metrics`
        self.grading_seconds = 0.0  # since the start
        # whether `publish` wants low-bit tensors (quant.for_engine)
        self.packed = self.engine.packed
        self.incarnation = 0
        self.sequence = 0  # groups taken so far: where this source stands in the task
        self.version = -1  # of the engine's weights, as are the next three
        self.digest = ""
        self.published = 0.0  # seconds, by the learner's clock
        self.synced: sync.Synced | None = None  # until `metrics` has reported it
        self.error = ""  # why no more groups can come; remote/source.py sets it
        self.before: dict[str, Any] = {}  # state before the last `next`

    def now(self, learner_version: int) -> float:
        """The learner's clock, in seconds."""
        return time.time()

    def publish(self, version: int, named_tensors) -> None:
        """Put new weights into the engine, at once. SyncError if they do not arrive."""
        self.published = self.now(version)
        self.load(version, named_tensors)

    def load(self, version: int, named_tensors) -> None:
        """Put weights into the engine and check that they are there: SyncError if not (sync.py)."""
        if self.check is None:
            self.engine.load(named_tensors)
        else:
            self.synced = self.check.load(self.engine, version, named_tensors)
            self.digest = self.synced.digest
        self.version = version

    def next(self, n_groups: int, learner_version: int, stop=()) -> list[Rollout]:
        """The next n groups, sampled now with the newest published weights and graded.

        stop: a list that fills when the run must end, for sources that wait (remote/source.py)."""
        self.remember("sequence")
        with given_back_if_it_fails(self):
            groups = self.with_spread(n_groups, self.sample_next)
        self.engine.sleep()
        return groups

    def sample_next(self, n_groups: int) -> list[Rollout]:
        numbers = range(self.sequence, self.sequence + n_groups)
        self.sequence += n_groups
        return self.sample(numbers)

    def with_spread(self, n_groups: int, sample) -> list[Rollout]:
        """n groups by sample(n). With --dynamic_sampling (DAPO, Eq. 11) a group with equal rewards
        is set aside and another prompt sampled, up to the number of rounds; then groups that were
        set aside fill the rest."""
        groups, aside = [], []
        for _ in range(max(1, self.resample)):
            if not self.engine.any_rank(len(groups) < n_groups):
                break
            for group in sample(n_groups - len(groups)):
                (aside if self.resample and not has_spread(group) else groups).append(group)
        missing = n_groups - len(groups)
        self.no_spread += len(aside) - missing
        return groups + aside[:missing]

    def remember(self, *names: str) -> None:
        """Save the attributes that `give_back` restores."""
        self.before = {name: copy.deepcopy(getattr(self, name)) for name in names}

    def identify(self, i: int) -> tuple[int, tuple[str, int, int]]:
        """(number of the problem, uid) of this source's i-th group.

        All ranks count as one sampler: seeds and mask uniforms do not depend on the rank that took
        the group."""
        n = i * self.n_ranks + self.rank
        return n, ("rank0", self.incarnation, n)

    def sample(self, numbers) -> list[Rollout]:
        """The groups of these numbers, sampled with the weights that the engine has, and graded."""
        start = time.time()
        problems, uids = [], []
        for i in numbers:
            number, uid = self.identify(i)
            problems.append(self.task.problem("train", number))
            uids.append(uid)
        prompts = [np.array(encode(self.tokenizer, problem), np.int32) for problem in problems]
        seeds = [self.seeds(uid) for uid in uids]
        tools = (self.engine, self.task, self.tokenizer)
        options = (self.sampling, self.topk, self.stop_ids, self.max_allowed)
        groups = turns.sample(*tools, problems, prompts, seeds, *options)
        graded_from = time.perf_counter()
        # not +=, which drops counts of 0 and less
        self.counts.update(grade_all(self.task, self.tokenizer, problems, groups))
        self.grading_seconds += time.perf_counter() - graded_from
        self.counts["poisoned"] += sum(set_aside_if_poisoned(r) for group in groups for r in group)
        end = time.time()
        rollouts = []
        for uid, problem, prompt, responses in zip(uids, problems, prompts, groups, strict=True):
            rollout = Rollout(
                uid=uid,
                prompt_id=problem.id,
                prompt_ids=prompt,
                sampling=self.sampling,
                model=self.model,
                precision=self.engine.dtype,
                version=self.version,
                digest=self.digest,
                t_start=start,
                t_end=end,
                responses=responses,
                t_published=self.published,
            )
            rollouts.append(rollout)
        return rollouts

    def seeds(self, uid) -> list[int]:
        """One seed for each response of a group."""
        return [request_seed(self.sampling.seed, uid, g) for g in range(self.group_size)]

    def lend(self, named_tensors) -> Any:
        """The engine with these weights, for an evaluation. Weights are published again before the
        next rollout."""
        self.engine.load(named_tensors)
        return self.engine

    def metrics(self, summed=Counter) -> dict[str, float]:
        """The last weight sync, and how grading went; empty when that was reported before.

        summed: sums named counts over ranks (Comm.sum_counts); by default those of this rank."""
        synced, self.synced = self.synced, None
        counts = summed({**self.counts, "no_spread": self.no_spread})
        self.counts, self.no_spread = Counter(), 0
        values = grading_metrics(counts)
        if counts["poisoned"]:
            values["poisoned"] = float(counts["poisoned"])
        if self.resample:
            values["dynamic_sampling/dropped"] = float(counts["no_spread"])
        if synced is None:
            return values
        known = {
            "changed": synced.changed,
            "MiB": synced.nbytes / 2**20,
            "error": synced.error,
            "floor": synced.floor,
        }
        return values | {f"sync/{name}": x for name, x in known.items() if not math.isnan(x)}

    def give_back(self) -> None:
        """Restore the state before the last `next`: its groups will not be trained on."""
        vars(self).update(self.before)

    def saved(self) -> None:
        """A checkpoint with the last state_dict is complete on disk: nothing to do."""

    def state_dict(self) -> dict:
        return {"sequence": self.sequence, "incarnation": self.incarnation}

    def load_state_dict(self, state: dict) -> None:
        self.sequence = state["sequence"]
        self.incarnation = state["incarnation"]

    def dealt(self, states: list[dict]) -> dict:
        """Where this source goes on at a resume, when len(states) ranks wrote the checkpoint and
        n_ranks read it.

        Each took as many (with --dynamic_sampling not quite: then some problems are left out, and
        none comes twice)."""
        taken = max(state["sequence"] for state in states) * len(states)
        rank_state = states[min(self.rank, len(states) - 1)]
        return {**rank_state, "sequence": -(-taken // self.n_ranks)}

    def close(self) -> None:
        self.engine.close()
