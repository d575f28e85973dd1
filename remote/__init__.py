"""Samplers on other machines: README.md says how; the flags of the learner's side are here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flags import need


@dataclass(frozen=True)
class RemoteFlags:
    """Samplers on other machines (remote/)"""

    samplers: Literal["local", "zmq", "files"] = "local"
    """local: an engine in this process; zmq, files: samplers anywhere, over ZeroMQ or a shared folder
    (python rollout.py --connect=...)."""
    bind: str = "tcp://127.0.0.1:5555"
    """zmq: where to listen; rank r takes the port r higher. tcp://*:5555 for other hosts, with --keys."""
    keys: str = "none"
    """zmq: the learner's folder of keys (python -m remote.keys OUT --samplers=N); none: in the clear, on this host
    only."""
    sync_path: str = ""
    """files: the shared folder."""
    sync_dtype: Literal["float32", "bfloat16", "quantized"] = "float32"
    """Weights on the wire; quantized: in --rollout_quant's format, as the learner's aligned forward has them."""
    sync_delta: bool = False
    """zmq: send samplers that hold weights of before only what has changed since; the weights are the same, bit for
    bit."""
    grant_seconds: float = 1800.0
    """--admission=pace: seconds that a sampler has for a group; longer the learner waits for none."""
    give_up: float = 3600.0
    """Stop, with a sentence, after so many seconds without a group from any sampler."""


def check(cfg) -> None:
    """UserError, one sentence, if the flags of remote samplers contradict each other."""
    remote = cfg.samplers != "local"
    need(cfg.give_up > 0, f"--give_up={cfg.give_up}: must be above 0")
    need(cfg.grant_seconds > 0, f"--grant_seconds={cfg.grant_seconds}: must be above 0")
    need(cfg.samplers != "files" or cfg.sync_path.strip(), "--samplers=files: name the folder with --sync_path")
    need(
        cfg.samplers != "zmq" or cfg.bind.startswith(("tcp://", "ipc://")),
        f"--bind={cfg.bind}: not an address; write tcp://HOST:PORT",
    )
    need(
        cfg.samplers != "zmq" or cfg.keys != "none" or cfg.bind.startswith(("tcp://127.0.0.1:", "ipc://")),
        f"--bind={cfg.bind}: for other hosts --keys are needed (python -m remote.keys OUT --samplers=N makes them), "
        "or listen on tcp://127.0.0.1:PORT",
    )
    need(
        cfg.sync_dtype != "quantized" or cfg.rollout_quant not in ("none", "w3a16", "w2a16"),
        f"--sync_dtype=quantized: --rollout_quant={cfg.rollout_quant} is no format that engines load; use int8, fp8 or "
        "w4a16, or --sync_dtype=float32",
    )
    need(
        not cfg.sync_delta or cfg.samplers == "zmq",
        "--sync_delta: there is nothing to send; it goes with --samplers=zmq (a shared folder is read in place)",
    )
    need(
        not cfg.sync_delta or cfg.sync_dtype != "float32",
        "--sync_delta: in float32 nearly every number changes with each update; use --sync_dtype=bfloat16 or quantized",
    )
    need(
        not (remote and cfg.learner_quant == "aligned" and cfg.sync_dtype == "bfloat16"),
        "--sync_dtype=bfloat16: an engine that quantizes rounded weights has other low-bit numbers than "
        "--learner_quant=aligned; use --sync_dtype=float32 or quantized",
    )
