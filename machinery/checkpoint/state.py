"""The pending groups of a checkpoint, as plain containers of tensors and numbers."""

from __future__ import annotations

import numpy as np
import torch

from rollout import Response, Rollout
from sampling import Sampling


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
