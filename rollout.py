"""Rollouts: a group of responses to one prompt, and the source that samples such groups.

The group is the unit of everything that follows: transport, staleness, accounting, advantage. A
`Rollout` is one group, not padded (batching.collate alone pads), sampled by one model at one weight
version with one set of sampling settings. It records the log-probabilities of the very distribution
that was sampled, as the engine computed them: they are p_inf, and every correction in corrections/
starts from them.

A *source* publishes weights to its sampler and hands out graded groups. There are three, with the
same methods (publish, next, metrics, now, give_back, saved, state_dict, load_state_dict, close) and
the same attributes `packed` and `error`; those in this process also lend their engine and deal out
what several of them had at a resume:

  LocalSource         (here)              one engine in this process
  DelaySource         (delay.py)          samplers that lag behind, in this process, on a virtual clock
  RemoteSource        (remote/source.py)  sampler processes on other machines

The engines that do the sampling (vLLM, or plain torch) are in engines.py.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

# before torch is imported, as in train.py: its idle threads soon sleep
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import numpy as np
import torch

from flags import UserError
from sampling import Sampling, set_too_large
from tasks import encode, grade_all, grading_metrics

if TYPE_CHECKING:
    import sync  # it imports this file


@dataclass
class Response:
    """One response of a group: L tokens, the end-of-sequence token among them if it was sampled."""

    tokens: np.ndarray  # int32 [L]
    loss_mask: np.ndarray  # bool [L]: tokens that may carry a gradient
    logp_inf: np.ndarray  # float32 [L]: of each token, under the distribution that sampled it
    topk_ids: np.ndarray  # int32 [L, K]: the K most likely tokens there
    topk_logp: np.ndarray  # float32 [L, K]: their log-probabilities, in falling order
    finish_reason: str  # "stop" or "length"
    # The tokens that truncated sampling allowed: token t is one of allowed_ids[offsets[t] : offsets[t + 1]].
    # None where they were not recorded, or where the whole vocabulary was allowed.
    allowed_offsets: np.ndarray | None = None  # int64 [L + 1]
    allowed_ids: np.ndarray | None = None  # int32
    # The experts that the engine chose for each token that it read: of the prompt, and of all here but the last.
    routed: np.ndarray | None = None  # int16 [P + L - 1, layers, k]
    reward: float = 0.0


@dataclass
class Rollout:
    """One group: G responses to one prompt by one model at one weight version."""

    uid: tuple[str, int, int]  # sampler, incarnation, sequence number: never given twice
    prompt_id: str
    prompt_ids: np.ndarray  # int32 [P]
    sampling: Sampling
    model: str  # the model that sampled: "policy" or "actor"
    precision: str  # of the sampling engine, e.g. "float32"
    version: int  # how many learner updates made the weights that sampled
    digest: str  # of those weights, as the engine received them
    t_start: float  # start and end of sampling, in seconds since the epoch by the learner's clock
    t_end: float
    responses: list[Response] = field(default_factory=list)
    # What the learner's ref pass adds (batching.write_ref_columns): name -> one array for each response.
    ref: dict[str, list[np.ndarray]] = field(default_factory=dict)
    t_published: float = 0.0  # when the learner published the weights, in seconds by its own clock


def as_groups(key: str, prompts, responses, sampling: Sampling, precision: str = "float32") -> list[Rollout]:
    """What an engine sampled outside a run, as groups of the policy's at version 0: responses[i] is prompts[i]'s.

    key: what tells their uids from those of other groups."""
    about = dict(sampling=sampling, model="policy", precision=precision, version=0, digest="", t_start=0.0, t_end=0.0)
    groups = []
    for i, (prompt, rows) in enumerate(zip(prompts, responses, strict=True)):
        groups.append(Rollout((key, 0, i), prompt_id=str(i), prompt_ids=prompt, responses=rows, **about))
    return groups


def generator(*key) -> np.random.Generator:
    """A counter-based generator (Philox) of numbers that depend on `key` and on their position alone.

    It is keyed by a hash of `key`: strings, integers and tuples of them. No rank, no batch and no order of calls
    enters."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def uniforms(n: int, *key) -> np.ndarray:
    """n uniform numbers in [0, 1), float64 [n], of the generator of `key`."""
    return generator(*key).random(n)


def probe_ids(context: int, vocabulary: int) -> np.ndarray:
    """Fixed pseudo-random sequences (R, L), some 512 tokens, on which two forwards of one model are compared."""
    length = min(128, context - 1)
    rows = max(4, 512 // length)
    return (uniforms(rows * length, "probe") * vocabulary).astype(np.int64).reshape(rows, length)


def request_seed(*key) -> int:
    """A seed of 63 bits for one response: a hash of `key`, as in `uniforms`."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


class Records:
    """What is recorded of N responses of at most T tokens, while they are decoded."""

    def __init__(self, N: int, T: int, topk: int, device):
        self.T, self.topk = T, topk
        self.tokens = torch.zeros(N, T, dtype=torch.int32, device=device)
        self.logp = torch.zeros(N, T, device=device)
        self.top_ids = torch.zeros(N, T, topk, dtype=torch.int32, device=device)
        self.top_logp = torch.zeros(N, T, topk, device=device)
        self.length = torch.full((N,), T, device=device)  # T also while a response goes on
        self.allowed: list[np.ndarray] = []  # int64 [3, n] a step: response, position, token id

    def write(self, which, t: int, token, logp) -> None:
        """Token t of the responses `which` (n,): the token (n, 1), and log-probabilities (n, V)."""
        self.tokens[which, t] = token[:, 0].int()
        self.logp[which, t] = logp.gather(1, token)[:, 0]
        if self.topk:
            self.top_logp[which, t], best = logp.topk(self.topk, -1)
            self.top_ids[which, t] = best.int()

    def write_allowed(self, which, t: int, gone) -> None:
        """The tokens that were allowed at position t: those that are not `gone`, (n, V) bool."""
        row, ids = (~gone).nonzero(as_tuple=True)
        columns = torch.stack([which[row], torch.full_like(row, t), ids])
        self.allowed.append(columns.cpu().numpy())

    def end(self, which, t: int, stops):
        """Note that responses end with token t where it `stops` them; returns which go on, (n,) bool.

        A finished row may stay in the cache for a while; what it samples after its end is ignored."""
        ended = stops & (self.length[which] == self.T)
        self.length[which[ended]] = t + 1
        return self.length[which] == self.T

    def responses(self, stop_ids, max_allowed: int) -> list[Response]:
        """All of them, each cut to its length. UserError if a set of allowed tokens is too large."""
        tokens, logp = self.tokens.cpu().numpy(), self.logp.cpu().numpy()
        top_ids, top_logp = self.top_ids.cpu().numpy(), self.top_logp.cpu().numpy()
        responses = []
        for i, L in enumerate(self.length.tolist()):
            response = Response(
                tokens=tokens[i, :L].copy(),
                loss_mask=np.ones(L, bool),
                logp_inf=logp[i, :L].copy(),
                topk_ids=top_ids[i, :L].copy(),
                topk_logp=top_logp[i, :L].copy(),
                finish_reason="stop" if int(tokens[i, L - 1]) in stop_ids else "length",
            )
            responses.append(response)
        if max_allowed:
            self._give_allowed(responses, max_allowed)
        return responses

    def _give_allowed(self, responses: list[Response], max_allowed: int) -> None:
        """Hand each response its sets of allowed tokens."""
        allowed = np.concatenate(self.allowed, 1)
        place = allowed[0] * self.T + allowed[1]  # response and position as one number
        sizes = np.bincount(place, minlength=len(responses) * self.T).reshape(-1, self.T)
        used = np.arange(self.T) < np.array([len(r.tokens) for r in responses])[:, None]  # not behind an end
        if sizes[used].max() > max_allowed:
            raise UserError(set_too_large(max_allowed))
        ids = allowed[2, np.lexsort((allowed[2], place))].astype(np.int32)
        starts = np.concatenate([[0], sizes.sum(1).cumsum()])
        for i, r in enumerate(responses):
            ends = sizes[i, : len(r.tokens)].cumsum()
            r.allowed_offsets = np.concatenate([[0], ends]).astype(np.int64)
            r.allowed_ids = ids[starts[i] : starts[i] + r.allowed_offsets[-1]]


@dataclass
class Rows:
    """The n responses that are still being decoded, in the order of the cache's rows."""

    which: torch.Tensor  # (n,) int64: their numbers among all N responses
    position: torch.Tensor  # (n,) int64: of the next token
    mask: torch.Tensor | None  # (n, tokens in the cache): for attention; None if nothing is padded
    cache: Any  # of transformers

    def shrink(self, going) -> None:
        """Drop the rows that are not `going`, (n,) bool, from the cache and from here."""
        rows = going.nonzero()[:, 0]
        self.cache.batch_select_indices(rows)
        self.which = self.which[rows]
        self.position = self.position[rows]
        if self.mask is not None:
            self.mask = self.mask[rows]


def grouped(responses, seeds: list[list[int]]) -> list[list[Response]]:
    """Responses in a row, divided into groups: one for each list of seeds."""
    responses = iter(responses)
    return [list(islice(responses, len(group))) for group in seeds]


def give_routed(responses, groups, prompts, routed) -> None:
    """Hand each response the experts of the tokens that were read for it.

    routed: first (_, experts (prompts, P, layers, k)) of all prompts, padded on the left; then for each decoding step
    (numbers (n,) of the responses that still go on, their experts (n, 1, layers, k))."""
    (_, of_prompts), *steps = routed
    tokens = np.full((len(responses), len(steps), *of_prompts.shape[2:]), -1, np.int16)
    for t, (which, experts) in enumerate(steps):
        tokens[which.cpu().numpy(), t] = experts[:, 0]
    rows = iter(tokens)
    for prompt, group, experts in zip(prompts, groups, of_prompts, strict=True):
        for r in group:
            r.routed = np.concatenate([experts[len(experts) - len(prompt) :], next(rows)[: len(r.tokens) - 1]])


# ---------------------------------------------------------------------------------------------------------------------
# The source: prompts in, graded groups out
# ---------------------------------------------------------------------------------------------------------------------


def has_spread(group: Rollout) -> bool:
    """Whether the group's responses earned different rewards: only then is there an advantage to learn from."""
    return len({r.reward for r in group.responses}) > 1


@contextmanager
def given_back_if_it_fails(source):
    """After an exception in here the source stands where it stood before the last `next`: no group is skipped."""
    try:
        yield
    except Exception:
        source.give_back()
        raise


@dataclass(eq=False, repr=False)
class LocalSource:
    """An engine in this process, given a task's prompts, with the task's grading of what it samples.

    Of `n_ranks` sources, source `rank` takes the problems rank, rank + n_ranks, ...: together they
    read the task once."""

    engine: Any  # VLLMEngine or HFEngine
    task: Any
    tokenizer: Any
    sampling: Sampling
    _: KW_ONLY
    group_size: int  # G: responses to each prompt
    topk: int  # K: how many of the most likely tokens are recorded with each sampled one
    model: str  # the model whose weights the engine gets: "policy" or "actor"
    check: sync.WeightCheck | None  # of its weights; None: they are loaded without one
    max_allowed: int = 0  # largest set of allowed tokens that is recorded; 0: none is
    resample: int = 0  # rounds of --dynamic_sampling
    stop_ids: list[int] | None = None  # the tokens that end a response (tasks.stop_ids); None: the tokenizer's end
    rank: int = 0
    n_ranks: int = 1

    def __post_init__(self):
        self.stop_ids = self.stop_ids or [self.tokenizer.eos_token_id]
        self.no_spread = 0  # groups that were dropped for it since the last `metrics`
        self.graded = Counter()  # counts of grading since the last `metrics`
        self.packed = self.engine.packed  # whether `publish` wants low-bit tensors (quant.for_engine)
        self.incarnation = 0
        self.sequence = 0  # groups taken so far: where this source stands in the task
        self.version = -1  # of the engine's weights, as are the next three
        self.digest = ""
        self.published = 0.0  # seconds, by the learner's clock
        self.synced: sync.Synced | None = None  # until `metrics` has reported it
        self.error = ""  # why no more groups can come; remote/source.py sets it
        self.before: dict[str, Any] = {}  # what the last `next` has changed, as it was

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
        """n groups by sample(n). With --dynamic_sampling (DAPO, Eq. 11) a group whose responses all earned the same is
        set aside, and another prompt sampled, for at most so many rounds; those set aside fill what is missing then."""
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
        """Note what `give_back` must put back."""
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
        groups = self.engine.generate(prompts, seeds, self.sampling, self.topk, self.stop_ids, self.max_allowed)
        self.graded.update(
            grade_all(self.task, self.tokenizer, problems, groups)
        )  # not +=, which drops counts of 0 and less
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
        """The engine with these weights, to evaluate with. What it samples next is published before."""
        self.engine.load(named_tensors)
        return self.engine

    def metrics(self) -> dict[str, float]:
        """The last weight sync, and how grading went; empty when that was reported before."""
        synced, self.synced = self.synced, None
        values, self.graded = grading_metrics(self.graded), Counter()
        if self.resample:
            values["dynamic_sampling/dropped"] = float(self.no_spread)
            self.no_spread = 0
        if synced is None:
            return values
        known = {"changed": synced.changed, "MiB": synced.nbytes / 2**20, "error": synced.error, "floor": synced.floor}
        return values | {f"sync/{name}": x for name, x in known.items() if not math.isnan(x)}

    def give_back(self) -> None:
        """Take back what the last `next` handed out, or failed to: it will not be trained on."""
        vars(self).update(self.before)

    def saved(self) -> None:
        """A checkpoint with the last state_dict is complete on disk: nothing to do."""

    def state_dict(self) -> dict:
        return {"sequence": self.sequence, "incarnation": self.incarnation}

    def load_state_dict(self, state: dict) -> None:
        self.sequence = state["sequence"]
        self.incarnation = state["incarnation"]

    def dealt(self, states: list[dict]) -> dict:
        """Where this source goes on at a resume, when len(states) ranks wrote the checkpoint and n_ranks read it.

        Each took as many (with --dynamic_sampling not quite: then some problems are left out, and none comes twice)."""
        taken = max(state["sequence"] for state in states) * len(states)
        own = states[min(self.rank, len(states) - 1)]
        return {**own, "sequence": -(-taken // self.n_ranks)}

    def close(self) -> None:
        self.engine.close()
