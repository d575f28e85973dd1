"""Sources of rollouts: publish weights to samplers, return graded groups.

Three classes have the same methods (publish, next, metrics, now, saved, state_dict,
load_state_dict, close) and the attributes `packed` and `error`. The first two lend their
engine; the first redistributes saved states over ranks on resume. The `next` of the third can return
an empty list: then all ranks stop, and on each rank `give_back` takes back the groups of the last
`next`.

  LocalSource         (here)              one engine in this process
  DelaySource         (delay.py)          delayed samplers in this process, on a virtual clock
  RemoteSource        (remote/source.py)  sampler processes on other machines
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

import sync
from machinery.flags import need
from rollout import LEAST_LOGP, Response, Rollout, request_seed
from sampling import Sampling
from tasks import grade_all, grading_metrics, grading_thread, turns
from tasks.prompts import encode

POSITIVE = 1e-3  # largest log-probability that rounding can produce


def has_spread(group: Rollout) -> bool:
    """Whether the group's rewards differ, so that its advantages are not all 0."""
    return len({r.reward for r in group.responses}) > 1


def set_aside_if_poisoned(r: Response) -> bool:
    """Mask a response if the log-probability of a sampled token is non-finite or below LEAST_LOGP,
    or if any log-probability from the engine is NaN or above 1e-3. Returns True if the response was
    masked.

    One NaN would make the loss of the whole batch NaN, and an infinite value can do so."""
    listed = r.topk_logp  # -inf: a token that truncation excludes
    if (
        (r.logp_inf >= LEAST_LOGP).all()  # also False for NaN
        and (r.logp_inf <= POSITIVE).all()
        and (listed <= POSITIVE).all()  # also False for NaN
    ):
        return False
    r.loss_mask = np.zeros_like(r.loss_mask)
    r.logp_inf = np.zeros_like(r.logp_inf)
    r.topk_logp = np.full_like(listed, -np.inf)
    return True


def check_poisoned(poisoned: float, n: float) -> None:
    """Raise UserError if at least half of n responses are poisoned (`set_aside_if_poisoned`)."""
    need(
        not poisoned or poisoned < n / 2,
        f"of {n:.0f} responses {poisoned:.0f} have log-probabilities from the engine that are non-finite, positive or "
        f"below {LEAST_LOGP:g}; use --rollout_dtype=float32 or a different --rollout_quant, or copy the model again",
    )


@dataclass(eq=False, repr=False)
class LocalSource:
    """Graded groups for a task's prompts, sampled by an engine in this process.

    Source `rank` of `n_ranks` takes the problems rank, rank + n_ranks, ..., so that all sources
    together read the task once."""

    engine: Any  # VLLMEngine or HFEngine
    task: Any
    tokenizer: Any
    sampling: Sampling
    _: KW_ONLY
    group_size: int  # G: responses to each prompt
    topk: int  # K: number of most likely tokens recorded for each sampled token
    model: str  # name of the model in the engine: "policy" or "actor"
    check: sync.WeightCheck | None  # check of loaded weights; None: no check
    # size limit of a recorded set of allowed tokens; 0: do not record sets
    max_allowed: int = 0
    resample: int = 0  # rounds of --dynamic_sampling
    # tokens that end a response (tasks.prompts); None: the tokenizer's end token
    stop_ids: list[int] | None = None
    rank: int = 0
    n_ranks: int = 1

    def __post_init__(self):
        self.stop_ids = self.stop_ids or [self.tokenizer.eos_token_id]
        # since the last `metrics`: groups dropped because all rewards were equal; counts of grading
        # and of masked responses
        self.no_spread = 0
        self.counts = Counter()
        # since the start, without grading while the engine decodes
        self.grading_seconds = 0.0
        # whether `publish` takes low-bit tensors (quant.for_engine)
        self.packed = self.engine.packed
        self.incarnation = 0
        self.sequence = 0  # groups taken so far, the source's position in the task
        self.before = 0  # `sequence` at the last `mark`
        # version, digest and publication time (learner's clock, seconds) of the engine's weights
        self.version = -1
        self.digest = ""
        self.published = 0.0
        # last weight sync, until `metrics` reports it
        self.synced: sync.Synced | None = None
        self.error = ""  # reason why no more groups can arrive; set by remote/source.py

    def now(self, learner_version: int) -> float:
        """The learner's clock, in seconds."""
        return time.time()

    def publish(self, version: int, named_tensors) -> None:
        """Load new weights into the engine immediately. SyncError: the check failed."""
        self.published = self.now(version)
        self.load(version, named_tensors)

    def load(self, version: int, named_tensors) -> None:
        """Load weights into the engine and check them (sync.py). SyncError: the check failed."""
        if self.check is None:
            self.engine.load(named_tensors)
        else:
            self.synced = self.check.load(self.engine, version, named_tensors)
            self.digest = self.synced.digest
        self.version = version

    def next(self, n_groups: int, learner_version: int, stop=()) -> list[Rollout]:
        """Sample and grade the next n groups with the newest published weights.

        With --dynamic_sampling (DAPO, Eq. 11), groups with equal rewards are set aside and new
        prompts are sampled, up to the number of rounds; groups set aside fill missing places.
        stop: nonempty if the run must end, for sources that wait (remote/source.py)."""
        groups, aside = [], []
        for _ in range(max(1, self.resample)):
            if not self.engine.any_rank(len(groups) < n_groups):
                break
            for group in self.sample_next(n_groups - len(groups)):
                (aside if self.resample and not has_spread(group) else groups).append(
                    group
                )
        missing = n_groups - len(groups)
        self.no_spread += len(aside) - missing
        self.engine.sleep()
        return groups + aside[:missing]

    def mark(self) -> None:
        """Remember the position, to which `give_back` returns."""
        self.before = self.sequence

    def give_back(self) -> None:
        """Take back the groups since the last `mark`, which will not be trained on now."""
        self.sequence = self.before

    def sample_next(self, n_groups: int) -> list[Rollout]:
        numbers = range(self.sequence, self.sequence + n_groups)
        self.sequence += n_groups
        return self.sample(numbers)

    def identify(self, i: int) -> tuple[int, tuple[str, int, int]]:
        """(problem number, uid) of this source's i-th group.

        All ranks count as one sampler: seeds and mask uniforms do not depend on the rank."""
        n = i * self.n_ranks + self.rank
        return n, ("rank0", self.incarnation, n)

    def sample(self, numbers) -> list[Rollout]:
        """Sample and grade the groups with these numbers, with the engine's current weights."""
        start = time.time()
        identities = [self.identify(i) for i in numbers]
        problems = [self.task.problem("train", number) for number, _ in identities]
        uids = [uid for _, uid in identities]
        prompts = [
            np.array(encode(self.tokenizer, problem), np.int32) for problem in problems
        ]
        seeds = [self.seeds(uid) for uid in uids]
        tools = (self.engine, self.task, self.tokenizer)
        options = (self.sampling, self.topk, self.stop_ids, self.max_allowed)
        with grading_thread(self.task, self.tokenizer, problems) as (grade, known):
            groups = turns.sample(
                *tools, problems, prompts, seeds, *options, finished=grade
            )
            graded_from = time.perf_counter()
        # not +=, which removes counts of 0 and below
        self.counts.update(
            grade_all(self.task, self.tokenizer, problems, groups, known)
        )
        self.grading_seconds += time.perf_counter() - graded_from
        self.counts["sampled"] += sum(map(len, groups))
        self.counts["poisoned"] += sum(
            set_aside_if_poisoned(r) for group in groups for r in group
        )
        about = dict(
            sampling=self.sampling,
            model=self.model,
            precision=self.engine.dtype,
            version=self.version,
            digest=self.digest,
            t_start=start,
            t_end=time.time(),
            t_published=self.published,
        )
        return [
            Rollout(uid, problem.id, prompt, responses=responses, **about)
            for uid, problem, prompt, responses in zip(
                uids, problems, prompts, groups, strict=True
            )
        ]

    def seeds(self, uid) -> list[int]:
        """One seed per response of a group."""
        return [
            request_seed(self.sampling.seed, uid, g) for g in range(self.group_size)
        ]

    def lend(self, named_tensors) -> Any:
        """The engine with these weights loaded, for an evaluation. The weights are published again
        before the next rollout."""
        self.engine.load(named_tensors)
        return self.engine

    def metrics(self, summed=Counter) -> dict[str, float]:
        """Metrics of grading, and of the last weight sync if they are not reported yet.

        summed: sums named counts over ranks (Comm.sum_counts); default: this rank only. UserError:
        half of the responses are poisoned."""
        synced, self.synced = self.synced, None
        counts = summed({**self.counts, "no_spread": self.no_spread})
        self.counts, self.no_spread = Counter(), 0
        values = grading_metrics(counts)
        check_poisoned(counts["poisoned"], counts["sampled"])
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
        return values | {
            f"sync/{name}": x for name, x in known.items() if not math.isnan(x)
        }

    def saved(self) -> None:
        """Callback after the checkpoint with the last state_dict is on disk; does nothing here."""

    def state_dict(self) -> dict:
        return {"sequence": self.sequence, "incarnation": self.incarnation}

    def load_state_dict(self, state: dict) -> None:
        self.sequence = state["sequence"]
        self.incarnation = state["incarnation"]

    def dealt(self, states: list[dict]) -> dict:
        """State in which this rank resumes when the number of ranks changed: len(states) ranks
        wrote the checkpoint, n_ranks read it.

        Ranks have taken equally many groups; with --dynamic_sampling the numbers can
        differ. All ranks resume from the largest number, so some problems are skipped and no
        problem is repeated."""
        taken = max(state["sequence"] for state in states) * len(states)
        rank_state = states[min(self.rank, len(states) - 1)]
        return {**rank_state, "sequence": -(-taken // self.n_ranks)}

    def close(self) -> None:
        self.engine.close()
