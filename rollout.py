"""Rollouts: a group of responses to one prompt, the engines that sample it, and the source that hands it over.

The group is the unit of everything downstream: transport, staleness, accounting, advantage. A `Rollout` is one group,
ragged, sampled by one model at one weight version with one law; only `batch.collate` ever pads it. It records the
log-probabilities *of the law that was sampled*, as the engine saw them: they are p_inf, and every correction in
objectives.py starts from them.

Two engines share one face (generate, load, logprobs, close):
  VLLMEngine  vLLM inside this process, weights replaced live;
  HFEngine    a batched KV-cache sampler in plain torch, for machines without vLLM.
`LocalSource` puts a task's prompt cursor and grading around an engine; other sources (delay.py, remote.py) have the same face: publish, next,
give_back, metrics, now, saved, state_dict, load_state_dict, close, error.
"""

from __future__ import annotations

import hashlib
import runpy
import time
from dataclasses import dataclass, field

import numpy as np

import sync
from sampling import Sampling
from tasks import encode, grade_all


@dataclass
class Response:
    """One response of a group. L tokens; the end-of-sequence token, if sampled, is among them."""

    tokens: np.ndarray  # int32 [L]
    loss_mask: np.ndarray  # bool [L]    tokens that may controllers a gradient
    logp_inf: np.ndarray  # float32 [L] log-probability of each token under the law that sampled it
    topk_ids: np.ndarray  # int32 [L, K]
    topk_logp: np.ndarray  # float32 [L, K] in falling order
    finish_reason: str  # "stop" | "length"
    allowed_offsets: np.ndarray | None = (
        None  # int64 [L+1]: token t could be any of allowed_ids[offsets[t]:offsets[t+1]];
    )
    allowed_ids: np.ndarray | None = None  # int32      absent: the whole vocabulary
    reward: float = 0.0


@dataclass
class Rollout:
    """One group: G responses to one prompt by one model at one weight version."""

    uid: tuple[str, int, int]  # sampler, incarnation, sequence number: unique for ever
    prompt_id: str
    prompt_ids: np.ndarray  # int32 [P]
    sampling: Sampling
    model: str  # "policy" or "actor": which one sampled
    precision: str  # of the sampling engine, e.g. "float32"
    version: int  # learner updates behind the weights that sampled
    digest: str  # of those weights, as the engine received them
    t_start: float  # seconds since the epoch, by the sampler's clock
    t_end: float
    responses: list[Response] = field(default_factory=list)
    ref: dict[str, list[np.ndarray]] = field(
        default_factory=dict
    )  # what the learner's ref pass adds: one array a response
    t_published: float = 0.0  # when the learner published the weights, by its own clock, in seconds


def uniforms(n: int, *key) -> np.ndarray:
    """n uniforms in [0, 1) (float64) from a counter-based generator (Philox): a pure function of (key, position).

    The key is hashed, so any tuple of strings and integers will do. No rank, batch or order of calls enters."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(n)


def request_seed(*key) -> int:
    """A 63-bit seed for one response, from the same keys."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


# ---------------------------------------------------------------------------------------------------------------------
# The source: prompts in, graded groups out
# ---------------------------------------------------------------------------------------------------------------------


class LocalSource:
    """An engine in this process, with the prompt cursor and the grader around it.

    With `world` sources, source `rank` takes problems rank, rank + world, ...: together they read the task once."""

    def __init__(
        self,
        engine,
        task,
        tokenizer,
        sampling: Sampling,
        *,
        group_size: int,
        topk: int,
        model: str,
        probe,
        kept: int = 0,
        rank: int = 0,
        world: int = 1,
    ):
        self.engine, self.task, self.tokenizer, self.sampling = engine, task, tokenizer, sampling
        self.group_size, self.topk, self.model, self.probe, self.kept = group_size, topk, model, probe, kept
        self.rank, self.world = rank, world
        self.incarnation, self.sequence = 0, 0
        self.version, self.digest, self.published, self.proof = -1, "", 0.0, None
        self.stop_ids, self.error = [tokenizer.eos_token_id], ""

    def now(self, learner_version: int) -> float:
        """The learner's clock, in seconds."""
        return time.time()

    def publish(self, version: int, named_tensors) -> None:
        """Put new weights into the engine, at once."""
        self.published = self.now(version)
        self.load(version, named_tensors)

    def load(self, version: int, named_tensors) -> None:
        """Put weights into the engine and prove that they are there (sync.py)."""
        self.proof = sync.prove(self.engine, version, named_tensors, self.probe)
        self.version, self.digest = version, self.proof.digest

    def next(self, n_groups: int, learner_version: int, stop=()) -> list[Rollout]:
        """The next n groups, sampled now with the newest published weights and graded. stop: for sources that wait (remote.py)."""
        numbers = range(self.sequence, self.sequence + n_groups)
        self.sequence += n_groups
        return self.sample(numbers)

    def identify(self, i: int) -> tuple[int, tuple[str, int, int]]:
        """(problem's number, uid) of this source's i-th group: all ranks are one sampler, and no rank enters a seed or a mask."""
        n = i * self.world + self.rank
        return n, ("rank0", self.incarnation, n)

    def sample(self, numbers) -> list[Rollout]:
        """The groups of these numbers, with the weights that the engine has."""
        start, (places, uids) = time.time(), zip(*map(self.identify, numbers))
        problems = [self.task.problem("train", i) for i in places]
        prompts = [np.array(encode(self.tokenizer, p), np.int32) for p in problems]
        seeds = [[request_seed(self.sampling.seed, uid, g) for g in range(self.group_size)] for uid in uids]
        groups = self.engine.generate(prompts, seeds, self.sampling, self.topk, self.stop_ids, self.kept)
        grade_all(self.task, self.tokenizer, problems, groups)
        return [
            Rollout(
                uid,
                p.id,
                ids,
                self.sampling,
                self.model,
                self.engine.dtype,
                self.version,
                self.digest,
                start,
                time.time(),
                responses,
                t_published=self.published,
            )
            for uid, p, ids, responses in zip(uids, problems, prompts, groups)
        ]

    def metrics(self) -> dict[str, float]:
        """What the last weight sync proved, once."""
        p, self.proof = self.proof, None
        return (
            {}
            if p is None
            else {
                "sync/error": p.error,
                "sync/distance": p.distance,
                "sync/proved": float(p.status == "proved"),
                "sync/MiB": p.nbytes / 2**20,
            }
        )

    def give_back(self) -> None:
        """What `next` gave will not be trained on: never so here."""

    def saved(self) -> None:
        """A checkpoint with the last state_dict is whole."""

    def state_dict(self) -> dict:
        return {"sequence": self.sequence, "incarnation": self.incarnation, "probe": self.probe.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.sequence, self.incarnation = state["sequence"], state["incarnation"]
        self.probe.load_state_dict(state["probe"])

    def close(self) -> None:
        self.engine.close()


if __name__ == "__main__":  # python rollout.py --connect=... is python -m remote --connect=...
    runpy.run_module("remote", run_name="__main__")
