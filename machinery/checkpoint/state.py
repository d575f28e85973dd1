"""The state of a checkpoint without weights: random number generators and pending groups, as plain
containers of tensors and numbers."""

from __future__ import annotations

import random
from contextlib import contextmanager

import numpy as np
import torch

from rollout import Response, Rollout, request_seed
from sampling import Sampling

# ---------------------------------------------------------------------------------------------------------------------
# States of the random number generators
# ---------------------------------------------------------------------------------------------------------------------


def rng_state() -> dict:
    """The states of the generators of torch, CUDA, numpy and Python, as plain containers."""
    kind, keys, *position = np.random.get_state()
    python = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *position],
        "python": [python[0], list(python[1]), python[2]],
    }


def set_rng_state(state: dict) -> None:
    """Restore the generators from the result of rng_state."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, *position = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *position))
    python = state["python"]
    random.setstate((python[0], tuple(python[1]), python[2]))


def new_rng_state(seed: int, rank: int) -> dict:
    """The generator states of a rank that the checkpoint does not have, from the run's seed and the
    rank."""
    rank_seed = request_seed("rank", seed, rank) % 2**32
    with same_rng_state():
        torch.manual_seed(rank_seed)
        np.random.seed(rank_seed)
        random.seed(rank_seed)
        return rng_state()


@contextmanager
def same_rng_state():
    """Restore the generators to their present states at the end of the context."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)


# ---------------------------------------------------------------------------------------------------------------------
# Pending groups
# ---------------------------------------------------------------------------------------------------------------------


def pack(groups: list[Rollout]) -> dict:
    """Groups as plain containers of tensors, strings and numbers; a checkpoint has no pickled
    classes."""
    packed = []
    for group in groups:
        state = {
            **vars(group),
            "sampling": dict(vars(group.sampling)),
            "responses": [dict(vars(response)) for response in group.responses],
        }
        packed.append(
            converted(state, np.ndarray, lambda x: torch.from_numpy(np.ascontiguousarray(x)))
        )
    return {"groups": packed}


def unpack(packed: dict) -> list[Rollout]:
    """The inverse of pack."""
    groups = []
    for tensors in packed["groups"]:
        state = converted(tensors, torch.Tensor, torch.Tensor.numpy)
        state["uid"] = tuple(state["uid"])
        state["sampling"] = Sampling(**state["sampling"])
        state["responses"] = [Response(**response) for response in state["responses"]]
        groups.append(Rollout(**state))
    return groups


def dealt(pending: list[list[dict]], rank: int, n_ranks: int) -> list[dict]:
    """This rank's packed groups of each pending minibatch, for a resume with a different number of
    ranks.

    pending: the packed minibatches of each previous rank. Group i of rank r of N ranks is group
    i N + r of the minibatch, the order in which sources distribute problems. A minibatch therefore
    keeps its groups for any number of ranks."""
    minibatches = []
    for parts in zip(*pending, strict=True):
        turns = zip(*(part["groups"] for part in parts), strict=True)
        groups = [group for turn in turns for group in turn]
        minibatches.append({"groups": groups[rank::n_ranks]})
    return minibatches


def converted(x, kind: type, convert):
    """x with `convert` applied to every value of the type `kind`, also inside dicts and lists."""
    if isinstance(x, kind):
        return convert(x)
    if isinstance(x, dict):
        return {name: converted(value, kind, convert) for name, value in x.items()}
    if isinstance(x, list):
        return [converted(value, kind, convert) for value in x]
    return x
