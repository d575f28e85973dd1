"""A remote sampler: its flags and its loop. HeteroRL, section 4.2; source.py is the learner's side.

    python -m remote --connect=tcp://LEARNER:5555 --keys=keys/sampler0      # on any host, at any time; see --help
    python -m remote --connect=/shared/run                                  # over a shared folder

Everything but the engine's flags and the files of task and reward comes from the learner: the
model's configuration and tokenizer, the sampling settings, the task's flags, the weights.
Two threads run without waiting for each other. The main thread samples with the newest complete
weights, hands each group over to the spool and continues. The link's thread (link.py or
files.py) offers the groups in the spool until the learner holds them, and fetches new weights.
After a kill and a restart, a sampler offers the groups that are still in its spool and continues as
a new incarnation. Each sampler starts at a random place of the task."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

import msgspec
import torch

import quant
from config import Config, EngineFlags
from machinery.checkpoint.models import (
    read_config,
    read_tokenizer,
    vocabulary_size,
    write_zeros,
)
from machinery.checkpoint.tensors import Published, read_tensors
from machinery.flags import (
    UserError,
    check_ranges,
    need,
    need_each,
    parse_flags,
    run_command,
)
from machinery.run import lock_folder
from machinery.settings import check_engine
from model.engines import make_engine
from remote import wire
from remote.account import Spool, is_sampler
from remote.files import FilesLink
from remote.groups import encode_group, name_of
from remote.keys import SamplerKeys, sampler_keys
from remote.link import Connection, Link
from rollout import Rollout, request_seed
from source import LocalSource
from sync import WeightCheck
from tasks import make_task
from tasks.data import digest_of, file_of, mixed

FAULTS = ("poisoned", "grade/timeouts", "grade/failures")  # printed if there are any
PRINT_EVERY = 10.0  # seconds between two lines on the screen
LOCKS = []  # of samplers' folders, open until the process ends


@dataclass(frozen=True)
class SamplerFlags(EngineFlags):
    """A sampler for a learner on another machine"""

    connect: str = ""
    """Address of the learner, tcp://HOST:PORT, or a shared folder."""
    keys: str = "none"
    """This machine's folder of keys (python -m remote.keys makes them); none: no encryption, for
    addresses of this host only."""
    name: str = ""
    """This sampler's name; default: the name of its keys, or of the host."""
    give_up: float = 3600.0
    """Seconds without an answer from the learner after which to stop."""
    patience: float = 10.0
    """Seconds after which an unanswered request is sent again."""

    groups: int = 8
    """Number of groups sampled at once."""
    spool: str = ""
    """This sampler's folder: model and, over ZeroMQ, weights and the groups handed over but not yet
    held by the learner; default out/samplers/NAME. The folder stays after the process ends."""
    spool_groups: int = 4096
    """Stop sampling while the learner has this number of groups to fetch. Fetched groups stay on
    disk until a checkpoint holds them."""
    task: str = ""
    """This host's copy of the learner's task file, if the task is a file."""

    rollout_quant: Literal["auto", "none", "int8", "fp8", "w4a16", "w2a16"] = "auto"
    """Low-bit format of the engine's linear layers; auto: the learner's --rollout_quant."""


@dataclass
class RemoteSampler:
    """The loop: load the newest weights, sample, hand over."""

    flags: SamplerFlags
    link: Connection
    spool: Spool
    folder: Path  # used by this sampler only
    welcome: wire.Welcome | None = None
    source: SamplerSource | None = None  # opened at the first welcome
    loaded: wire.ReceivedWeights | None = None
    sampled: int = 0  # groups
    printed: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Run the loop until the link has an error; raise it as UserError."""
        while not self.link.error:
            self.read_welcome()
            if (
                self.loaded is not None
                and time.monotonic() - self.printed > PRINT_EVERY
            ):
                self.printed = time.monotonic()
                version, behind = self.loaded.version, self.link.behind
                counts = self.source.metrics()
                print(
                    f"{self.sampled} groups, version {version}, {behind} to be fetched",
                    *(
                        f"{name} {counts[name]:.3g}"
                        for name in FAULTS
                        if counts.get(name)
                    ),
                    sep=", ",
                    flush=True,
                )
            is_ready = self.source is not None and self.link.newest is not None
            # The loop waits only for the first weights, and for a learner that does not keep up.
            keeps_up = self.link.behind < self.flags.spool_groups
            if not is_ready or not keeps_up or not self.load_newest(self.link.newest):
                time.sleep(0.02)
                continue
            groups = self.source.sample(
                range(self.sampled, self.sampled + self.flags.groups)
            )
            self.sampled += self.flags.groups
            for group in groups:
                self.hand_over(group)
        raise UserError(self.link.error)

    def read_welcome(self) -> None:
        """Open the source at the first welcome. Raise UserError if the learner has restarted with a
        different run."""
        welcome = self.link.welcome
        if welcome is not None and self.source is None:
            self.welcome = welcome
            self.source = open_source(welcome, self.flags, self.folder)
            self.source.owner = (self.spool.sampler, self.spool.incarnation)
        elif welcome is not self.welcome:
            need(
                msgspec.structs.replace(welcome, session=self.welcome.session)
                == self.welcome,
                "the learner restarted as a different run: restart this sampler",
            )
            self.welcome = welcome

    def load_newest(self, newest: wire.ReceivedWeights) -> bool:
        """Load these weights if they are not loaded. False: newer weights have replaced the file,
        and the link will report them."""
        if newest != self.loaded:
            try:
                self.source.load_weights(newest)
            except FileNotFoundError:
                return False
            self.loaded = newest
        return True

    def hand_over(self, group: Rollout) -> None:
        """Hand over a group. If the disk is full, the sampler waits and loses nothing."""
        data = encode_group(group)
        while not self.link.error:
            try:
                self.spool.hand_over(name_of(group.uid), data)
                return
            except OSError as e:
                print(
                    f"{self.spool.folder}: {e.strerror}; waiting for disk space",
                    flush=True,
                )
                time.sleep(1.0)


def connect(flags: SamplerFlags) -> RemoteSampler:
    """Check the flags, lock the folder, start the link. UserError: a flag is wrong."""
    need(
        flags.connect,
        "--connect: name the learner's address, tcp://HOST:PORT, or a shared folder",
    )
    name = sampler_name(flags)
    check_ranges(flags)
    need_each(
        flags,
        (flags.groups >= 1, "groups", "must be at least 1"),
        (
            flags.spool_groups >= flags.groups,
            "spool_groups",
            "must be at least --groups",
        ),
    )
    need(
        flags.rollout_tp == 1,
        f"--rollout_tp={flags.rollout_tp}: a sampler has one rank; leave the flag out",
    )
    check_engine(flags)
    files = filter(None, map(file_of, mixed(flags.task)))
    need(
        all(Path(file).is_file() for file in files),
        f"--task={flags.task}: no such file; copy the learner's file here and name it with --task",
    )
    over_zmq = "://" in flags.connect
    keys = checked_keys(flags) if over_zmq else None
    need(
        over_zmq or Path(flags.connect).is_dir(),
        f"--connect={flags.connect}: neither an address such as tcp://HOST:PORT nor an existing folder",
    )
    own_folder = flags.spool or f"out/samplers/{name}"
    LOCKS.append(lock_folder("spool", own_folder))
    folder = Path(own_folder)
    incarnation = int(time.time() * 1000)
    if over_zmq:
        spool = Spool(folder / "spool" / name, name, incarnation)
        link = Link(flags.connect, flags, spool, folder, keys)
    else:  # groups in the shared folder are handed over
        spool = Spool(Path(flags.connect) / "rollouts" / name, name, incarnation)
        link = FilesLink(flags.connect, flags, spool)
    return RemoteSampler(flags, link, spool, folder)


def sampler_name(flags: SamplerFlags) -> str:
    """--name, or the name of the keys, or the host's name. Raise UserError if it is not a valid
    name."""
    host = (
        re.sub("[^A-Za-z0-9_-]", "-", os.uname().nodename.partition(".")[0])[:64]
        or "sampler"
    )
    name = flags.name or (host if flags.keys == "none" else Path(flags.keys).name)
    need(
        is_sampler(name),
        f"--name={name}: a sampler's name is 1 to 64 letters, digits, - and _",
    )
    return name


def checked_keys(flags: SamplerFlags) -> SamplerKeys | None:
    """The sampler's keys. Raise UserError for an invalid address, or if keys are needed and
    missing."""
    address = flags.connect
    wire.check_address("connect", address, 1)
    keys = None if flags.keys == "none" else sampler_keys(flags.keys)
    on_this_host = address.startswith(("tcp://127.0.0.1:", "tcp://localhost:"))
    need(
        keys or on_this_host,
        f"--connect={address}: a connection over a network needs keys (--keys; `python -m remote.keys OUT "
        "--samplers=N` makes them)",
    )
    return keys


@dataclass(eq=False, repr=False)
class SamplerSource(LocalSource):
    """A LocalSource for groups that carry this sampler's name and incarnation, and start at a
    random place of the task."""

    _: KW_ONLY
    skeleton: torch.nn.Module  # the learner's model without its weights
    low_bits: bool  # the learner publishes low-bit tensors
    fmt: quant.Format | None  # the engine's low-bit format
    owner: tuple[str, int] = ("", 0)  # (name, incarnation) of the sampler

    def identify(self, i: int) -> tuple[int, tuple[str, int, int]]:
        return request_seed("walk", *self.owner) % 2**31 + i, (*self.owner, i)

    def load_weights(self, newest: wire.ReceivedWeights) -> None:
        """Load published weights into the engine, in the form that it needs. FileNotFoundError:
        newer weights have replaced them."""
        stored = read_tensors(newest.path)
        self.published = newest.published
        self.load(newest.version, Published(lambda: self.for_engine(stored)))

    def for_engine(self, stored: Published):
        """Yield published tensors in the form that the engine needs, one after the other."""
        if self.low_bits:
            return iter(stored) if self.engine.packed else quant.without_int4(stored)
        if not self.fmt:
            return iter(stored)
        tensors = (
            (name, x.float() if x.is_floating_point() else x) for name, x in stored
        )
        return quant.for_engine(tensors, self.skeleton, self.fmt, self.engine.packed)


def open_source(
    welcome: wire.Welcome, flags: SamplerFlags, folder: Path
) -> SamplerSource:
    """Engine, task and tokenizer as the learner describes them. UserError: they cannot be made."""
    run, model = welcome.run, folder / "model"
    wire.unpack_setup(welcome.setup, model)
    cfg = configure(run, flags)
    tokenizer = read_tokenizer(model)
    vocabulary = vocabulary_size(tokenizer, [model])
    write_zeros(model)  # the engine starts with zeros; load_weights replaces them
    engine = make_engine(
        cfg,
        str(model),
        run.context,
        max(1, run.topk, run.max_allowed),
        "cuda" if torch.cuda.is_available() else "cpu",
        vocabulary,
    )
    fmt = quant.engine_format(cfg)
    task = make_task(cfg)
    # drops the problems that the learner drops
    task.fit(tokenizer, cfg.max_prompt_tokens)
    check = (
        WeightCheck(read_config(model), run.probe, fmt, vocabulary)
        if cfg.check_sync
        else None
    )
    return SamplerSource(
        engine,
        task,
        tokenizer,
        replace(run.sampling, seed=cfg.seed),
        group_size=cfg.group_size,
        topk=run.topk,
        max_allowed=run.max_allowed,
        stop_ids=run.stop_ids,
        model=run.model,
        check=check,
        skeleton=quant.empty_model(model),
        low_bits=run.packed,
        fmt=fmt,
    )


def configure(run: wire.Description, flags: SamplerFlags) -> Config:
    """The learner's flags, with this host's engine flags. Raise UserError if they contradict."""
    known = {f.name for f in fields(Config)}
    cfg = Config(**{k: v for k, v in run.config.items() if k in known})
    task = flags.task or (cfg.task if cfg.task.startswith("hf:") else "arith")
    if cfg.task != "arith":
        check_file("task", task, cfg.task, run.task_digest)
    for name, digest in run.reward_digests.items():
        check_file("reward", name, name, digest)
    fmt = cfg.rollout_quant if flags.rollout_quant == "auto" else flags.rollout_quant
    need(
        not run.packed or fmt == cfg.rollout_quant,
        f"--rollout_quant={fmt}: the learner publishes its weights in {cfg.rollout_quant}; leave the flag out",
    )
    cfg = replace(
        cfg,
        task=task,
        rollout=flags.rollout,
        rollout_batch=flags.groups * cfg.group_size,  # responses at once
        rollout_dtype=flags.rollout_dtype or cfg.rollout_dtype or "float32",
        rollout_quant=fmt,
        rollout_memory=flags.rollout_memory,
        kv_cache_dtype=flags.kv_cache_dtype,
    )
    quant.check(cfg)
    quant.check_routing(cfg)
    quant.check_products(cfg)
    return cfg


def check_file(flag: str, path: str, learners: str, digest: str) -> None:
    """Raise UserError unless this host has the learner's file of a flag."""
    try:
        same = digest_of(path) == digest
    except OSError:
        same = False
    need(
        same,
        f"--{flag}={path}: this file differs from the learner's {learners}; copy the learner's file here"
        + (" and name it with --task" if flag == "task" else ""),
    )


def sample(flags: SamplerFlags) -> None:
    """Run until a signal comes. Raise UserError if the learner refuses, or is silent for longer
    than --give_up."""
    sampler = connect(flags)
    with contextlib.closing(sampler.link):
        sampler.run()


def main(argv: list[str] | None = None) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        run_command(lambda: sample(parse_flags(SamplerFlags, argv)))
