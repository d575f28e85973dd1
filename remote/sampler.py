"""A remote sampler: its flags and its loop. HeteroRL, section 4.2; source.py is what the learner makes of its groups.

    python -m remote --connect=tcp://LEARNER:5555 --keys=keys/sampler0      # on any host, at any time; see --help
    python -m remote --connect=/shared/run                                  # over a shared folder

Everything but the engine's flags comes from the learner: the model's configuration and tokenizer, the sampling
settings, the task, the weights; with --model, another model samples. Two threads do not wait for each other. This one
samples with the newest weights that are here whole, hands each group over to the spool (a file that appears whole; from
then on the group is accounted for) and goes on. The link's thread (link.py or files.py) offers what is in the spool
until the learner holds it, and fetches new weights meanwhile. Killed and started again, a sampler offers what its spool
still holds and goes on under a new incarnation. It walks the task in an order of its own, so samplers need not know of
each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import re
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import msgspec
import torch

import quant
from checkpoint import (
    Published,
    check_rows,
    check_weights,
    read_config,
    read_tensors,
    read_tokenizer,
    vocabulary_size,
    write_zeros,
)
from config import Config, DelayFlags, EngineFlags, check_engine
from delay import DelayDistribution, check_distribution
from engines import make_engine
from flags import UserError, need, parse_flags, run_command
from remote import wire
from remote.account import Spool, is_sampler
from remote.files_link import FilesLink, wait_for_ranks
from remote.groups import encode_group, name_of
from remote.keys import SamplerKeys, sampler_keys
from remote.link import Link
from remote.relay import check_flag
from remote.routes import Follower, is_file_of_routes, routes, streams_of
from rollout import Rollout, request_seed, uniforms
from sampling import Sampling
from source import LocalSource
from sync import WeightCheck
from tasks import digest_of, file_of, make_task

PRINT_EVERY = 10.0  # seconds between two lines on the screen


@dataclass(frozen=True)
class SamplerFlags(EngineFlags, DelayFlags):
    """A sampler for a learner on another machine"""

    connect: str = ""
    """Address of the learner, tcp://HOST:PORT (with several ranks one for each, separated by commas), a TOML file of
    routes, or a shared folder."""
    keys: str = "none"
    """This machine's folder of keys (python -m remote.keys makes them); none: in the clear, for addresses of this host
    only."""
    name: str = ""
    """This sampler's name; default: that of its keys, else of the host."""
    give_up: float = 3600.0
    """Seconds without an answer from the learner after which to stop."""
    patience: float = 10.0
    """Seconds after which an unanswered request is made again."""
    relay: str = ""
    """Serve weights to other samplers at this address, tcp://HOST:PORT, as they reach it (relay.py)."""
    most_weights: float = 64.0
    """Largest set of weights that is taken, in GiB."""

    groups: int = 8
    """Groups sampled at once."""
    spool: str = ""
    """Folder of groups handed over and not yet held by the learner; default out/samplers/NAME. It outlives the
    process."""
    spool_groups: int = 4096
    """Stop sampling for a rank of the learner when so many groups wait to be fetched by it. Fetched ones stay on disk
    until a checkpoint holds them."""
    model: str = ""
    """Folder of a model of this host's own, a smaller one say, that samples with the weights it has; default: the
    learner's model and weights."""
    task: str = ""
    """This host's copy of the learner's task file, where the task is one."""

    rollout_quant: Literal["auto", "none", "int8", "fp8", "w4a16", "w3a16", "w2a16"] = "auto"
    """Low-bit format of the engine's linear layers; auto: the learner's --rollout_quant."""


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------


def sample(flags: SamplerFlags) -> None:
    """Run until a signal comes. UserError: the learner refuses, or is silent for longer than --give_up."""
    incarnation = int(time.time() * 1000)
    connection = connect(flags, incarnation)
    try:
        welcome = first_welcome(connection.link)
        source = open_source(welcome, flags, connection.folder)
        Sampler(flags, connection, welcome, source, incarnation).run()
    finally:
        connection.link.close()


class Sampler:
    """The loop: load the newest weights, sample for the rank that has the fewest groups, hand over."""

    def __init__(
        self,
        flags: SamplerFlags,
        connection: Connection,
        welcome: wire.Welcome,
        source: SamplerSource,
        incarnation: int,
    ):
        self.flags = flags
        self.link = connection.link
        self.spool = connection.spool
        self.streams = connection.streams
        self.follower = connection.follower
        self.welcome = welcome
        self.is_paced = welcome.run["paced"]
        self.source = source
        self.incarnation = incarnation
        self.sampled = dict.fromkeys(connection.streams, 0)  # stream -> groups
        self.loaded: wire.Weights | None = None
        self.delays_drawn = 0
        self.hold_until = 0.0  # no new weights before
        self.began: float | None = None  # when the first weights were loaded
        self.printed = time.monotonic()
        self.busy = 0.0  # seconds spent sampling since `began`
        self.loading = 0.0  # seconds spent loading weights since `began`

    def run(self) -> None:
        """UserError with the link's error, when it has one."""
        while not self.link.error:
            check_same_run(self.link, self.welcome)
            self.follow_routes()
            if self.began is not None and time.monotonic() - self.printed > PRINT_EVERY:
                self.print_progress()
            hungry = [s for s in self.streams if self.link.behind(s) < self.flags.spool_groups]
            # The only waits there are: for the first weights, and for a learner that does not keep up or paces us.
            if self.link.newest is None or not hungry or not self.load_newest(self.link.newest):
                time.sleep(0.02)
                continue
            wanted = {stream: n for stream in hungry if (n := self.wanted(stream))}
            if not wanted:  # the learner paces us: it will want more
                time.sleep(0.01)
                continue
            # The ranks in turn, except that one that has enough is left out.
            stream = min(wanted, key=self.sampled.get)
            self.sample_for(stream, wanted[stream])
        raise UserError(self.link.error)

    def follow_routes(self) -> None:
        """Feed other ranks, if the file of routes says so. What waits for a rank that is left still goes there."""
        new = self.follower.changed() if self.follower else None
        if new is not None:
            self.streams = new[1]
            for stream in self.streams:
                self.spool.add(stream)
                self.sampled.setdefault(stream, 0)
            self.link.reroute(*new)

    def print_progress(self) -> None:
        self.printed = time.monotonic()
        awake = self.printed - self.began - self.loading
        waiting = sum(map(self.link.behind, self.streams))
        print(
            f"{sum(self.sampled.values())} groups, version {self.loaded.version}, {waiting} to be fetched, "
            f"{len(self.spool)} not held, blocked {100 * (1 - self.busy / awake):.2f} % of {awake:.0f} s",
            flush=True,
        )

    def load_newest(self, newest: wire.Weights) -> bool:
        """Load these weights if the engine has others and the delay is over. False: newer ones have replaced the file,
        and the link will say so."""
        if newest == self.loaded or time.monotonic() < self.hold_until:
            return True
        start = time.monotonic()
        try:
            self.source.load_weights(newest)
        except FileNotFoundError:
            return False
        self.loaded = newest
        self.loading += time.monotonic() - start
        if self.flags.delay != "none":
            self.hold_until = time.monotonic() + self.draw_delay()
        if self.began is None:
            self.began = time.monotonic()
            self.loading = 0.0
        return True

    def draw_delay(self) -> float:
        """Seconds for which the weights just loaded are used, a pure function of incarnation and number of the draw."""
        f = self.flags
        u = float(uniforms(1, "delay", self.streams[0], self.incarnation, self.delays_drawn)[0])
        self.delays_drawn += 1
        return DelayDistribution(f.delay, f.delay_min, f.delay_max).quantile(max(2.0**-53, u))

    def wanted(self, stream: str) -> int:
        """How many groups to sample at once for this stream: --groups, or what is granted of that. Where nothing is, it
        is asked for."""
        if not self.is_paced:
            return self.flags.groups
        granted = min(self.flags.groups, self.link.granted(stream) - self.sampled[stream])
        self.link.ask_for(stream, 0 if granted > 0 else self.flags.groups, self.loaded.version)
        return max(0, granted)

    def sample_for(self, stream: str, n: int) -> None:
        """Sample so many groups for one rank and hand them over."""
        start = time.monotonic()
        self.source.owner = (stream, self.incarnation)
        first = self.sampled[stream]
        groups = self.source.sample(range(first, first + n))
        offset = self.link.offset(stream)  # a learner counts how old a group is by its own clock
        for group in groups:
            group.t_start = max(0.0, group.t_start + offset)
            group.t_end = max(0.0, group.t_end + offset)
        encoded = [encode_group(group) for group in groups]
        # All time but this is the transport's: handing over, waiting, looking.
        self.busy += time.monotonic() - start
        self.sampled[stream] += n
        for group, data in zip(groups, encoded, strict=True):
            self.hand_over(stream, group, data)

    def hand_over(self, stream: str, group: Rollout, data: bytes) -> None:
        """Where the disk is full, nothing is lost: the sampler waits."""
        while not self.link.error:
            try:
                self.spool.hand_over(stream, name_of(group.uid), data)
                return
            except OSError as e:
                print(f"{self.spool.folder}: {e.strerror}; waiting for room", flush=True)
                time.sleep(1.0)


def first_welcome(link: Link | FilesLink) -> wire.Welcome:
    """What the learner wants, once it has said so. UserError with the link's error."""
    while not link.error:
        try:
            return link.welcome.get(timeout=0.05)
        except queue.Empty:
            pass
    raise UserError(link.error)


def check_same_run(link: Link | FilesLink, welcome: wire.Welcome) -> None:
    """UserError if the learner has started anew and wants something else."""
    while not link.welcome.empty():
        again = link.welcome.get()
        changed = [k for k in {**welcome.run, **again.run} if welcome.run.get(k) != again.run.get(k)]
        if again.setup != welcome.setup:
            changed.append("model's configuration or tokenizer")
        if changed:
            raise UserError(
                f"the learner started anew and asks for something else (its {', '.join(changed)}): "
                "start this sampler again"
            )


# ---------------------------------------------------------------------------------------------------------------------
# The connection: everything that can be wrong before a model loads
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Connection:
    """streams: this sampler's names, one for each rank of the learner that it samples for. folder: its own.
    follower: of the file of routes; None where there is none that could change."""

    link: Link | FilesLink
    spool: Spool
    streams: list[str]
    folder: Path
    follower: Follower | None = None


def connect(flags: SamplerFlags, incarnation: int) -> Connection:
    """Check the flags, lock the folder, start the link. UserError: one sentence."""
    if not flags.connect:
        raise UserError("--connect: name the learner's address, tcp://HOST:PORT, a file of routes, or a shared folder")
    name = own_name(flags)
    check_distribution(flags)
    check_times(flags)
    if flags.groups < 1 or flags.spool_groups < flags.groups:
        raise UserError(
            f"--groups={flags.groups} --spool_groups={flags.spool_groups}: "
            "at least one group at once, and a spool that holds a batch"
        )
    check_engine(flags)
    check_own_files(flags)
    addresses, streams = routes(flags.connect, name)
    if any("://" in address for address in addresses):
        keys = checked_keys(flags, addresses)
        check_flag(flags.relay, keys is not None, folder=False)
        folder = own_folder(flags, name)
        spool = Spool(folder / "spool", streams, incarnation)
        follower = Follower(flags.connect, name, lambda others: checked_keys(flags, others))
        return Connection(Link(addresses, streams, flags, spool, folder, keys), spool, streams, folder, follower)
    if not addresses[0] or not Path(addresses[0]).is_dir():
        raise UserError(
            f"--connect={flags.connect}: neither an address such as tcp://HOST:PORT nor a folder that is there"
        )
    check_flag(flags.relay, False, folder=True)
    return connect_folder(flags, incarnation, Path(addresses[0]), name, streams, own_folder(flags, name))


def own_folder(flags: SamplerFlags, name: str) -> Path:
    """The folder of this sampler, for this process alone. UserError: it cannot be, or another one works there."""
    folder = Path(flags.spool or f"out/samplers/{name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_folder(folder)
    except OSError as e:
        raise UserError(f"--spool={folder}: cannot be written ({e.strerror}); name another folder") from None
    return folder


def check_own_files(flags: SamplerFlags) -> None:
    """UserError if --model or --task names what is not there: the learner is not asked for it."""
    if flags.model:
        there = (Path(flags.model) / "config.json").is_file()
        need(there, f"--model={flags.model}: no Hugging Face model folder (no config.json there); name another one")
        check_weights(flags.model)
    file = file_of(flags.task)
    need(
        not file or Path(file).is_file(),
        f"--task={flags.task}: no such file; copy the learner's file here and name it with --task",
    )


def check_times(flags: SamplerFlags) -> None:
    """UserError unless there is something to wait for, and room for weights."""
    for name in ("patience", "give_up", "most_weights"):
        value = getattr(flags, name)
        need(value > 0, f"--{name}={value}: must be above 0")


def own_name(flags: SamplerFlags) -> str:
    """--name, or the name of the keys, or the host's. UserError if it cannot be a sampler's name."""
    host = re.sub("[^A-Za-z0-9_-]", "-", os.uname().nodename.partition(".")[0])[:64] or "sampler"
    name = flags.name or (host if flags.keys == "none" else Path(flags.keys).name)
    if not is_sampler(name):
        raise UserError(f"--name={name}: a sampler's name is 1 to 64 letters, digits, - and _")
    return name


LOCKS = []  # open as long as the process lives


def lock_folder(folder: Path) -> None:
    """One process for each folder. UserError: another one works there."""
    lock = open(folder / "lock", "w")  # noqa: SIM115 (closing it would give the lock back)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(
            f"{folder}: another sampler works there; give this one a --name or a --spool of its own"
        ) from None
    LOCKS.append(lock)


def connect_folder(
    flags: SamplerFlags, incarnation: int, shared: Path, name: str, streams: list[str], folder: Path
) -> Connection:
    """A link over a shared folder, as soon as a learner is there. The spool lies in the shared folder."""
    ranks = wait_for_ranks(shared, flags)
    follower = Follower(flags.connect, name, lambda others: check_same_folder(shared, others))
    if not is_file_of_routes(flags.connect) or ranks == 1:
        streams = streams_of(name, ranks)
        follower = None
    spool = Spool(shared / "rollouts", streams, incarnation)
    return Connection(FilesLink(str(shared), streams, flags, spool), spool, streams, folder, follower)


def check_same_folder(shared: Path, addresses: list[str]) -> None:
    """UserError if new routes lead to another folder: the spool lies in this one."""
    for address in addresses:
        need(Path(address) == shared, f"{address}: not the folder of before; start this sampler again to change it")


def checked_keys(flags: SamplerFlags, addresses: list[str]) -> SamplerKeys | None:
    """The keys for these addresses of a learner's ranks. UserError: they are no addresses, or need keys."""
    for address in addresses:
        wire.check_address("connect", address, 1)
    keys = None if flags.keys == "none" else sampler_keys(flags.keys)
    on_this_host = all(a.startswith(("tcp://127.0.0.1:", "tcp://localhost:", "ipc://")) for a in addresses)
    if keys is None and not on_this_host:
        raise UserError(
            f"--connect={flags.connect}: over a network keys are needed "
            "(--keys; `python -m remote.keys OUT --samplers=N` makes them)"
        )
    return keys


# ---------------------------------------------------------------------------------------------------------------------
# The engine, the task and the weights, as the learner describes them
# ---------------------------------------------------------------------------------------------------------------------


class Description(msgspec.Struct):
    """What the learner says of its run (source.describe_run), with the types that it must have."""

    config: dict[str, str | int | float | bool | None]
    model: str
    topk: int
    kept: int
    context: int
    world: int
    task_digest: str
    sampling: dict[str, int | float]
    probe: list[list[int]]
    packed: bool
    paced: bool
    stop_ids: list[int]


def check_description(run: dict) -> None:
    """UserError unless this describes a run."""
    try:
        msgspec.convert(run, Description)
        Sampling(**run["sampling"])
        missing = {"rollout_quant", "quant_group", "seed", "group_size", "task", "max_tokens"} - set(run["config"])
        wire.need(not missing, f"{', '.join(missing)} missing")
        wire.need(run["context"] > 0 and min(run["topk"], run["kept"]) >= 0, "sizes below 0")
    except (msgspec.MsgspecError, TypeError, ValueError) as e:
        why = wire.printable(e)
        raise UserError(
            f"the learner describes no run that this sampler knows ({why}): bring both to one revision"
        ) from None


class SamplerSource(LocalSource):
    """A LocalSource whose groups carry this sampler's stream and incarnation, and which walks the task from a random
    place on.

    owner: (stream, incarnation) of the groups to be sampled next. skeleton: the learner's model without its weights;
    low_bits: the learner publishes low-bit tensors; fmt: the engine's low-bit format or None; own_model: the engine has
    weights of its own, and loads no others."""

    def __init__(self, *args, skeleton, low_bits: bool, fmt, own_model: bool, **more):
        super().__init__(*args, **more)
        self.owner = ("", 0)
        self.skeleton = skeleton
        self.low_bits = low_bits
        self.fmt = fmt
        self.own_model = own_model

    def identify(self, i: int) -> tuple[int, tuple[str, int, int]]:
        return request_seed("walk", *self.owner) % 2**31 + i, (*self.owner, i)

    def load_weights(self, newest: wire.Weights) -> None:
        """Put published weights into the engine, in the form that it takes. FileNotFoundError: newer ones have replaced
        them."""
        if self.own_model:  # its groups say how new the learner was
            self.version, self.published = newest.version, newest.published
            return
        stored = read_tensors(newest.path)
        self.published = newest.published
        self.load(newest.version, Published(lambda: self.for_engine(stored)))

    def for_engine(self, stored: Published):
        """Yields published tensors in the form that the engine takes, one after the other."""
        if self.low_bits:
            return iter(stored) if self.engine.packed else quant.without_int4(stored)
        whole = ((name, x.float() if x.is_floating_point() else x) for name, x in stored)
        return quant.for_engine(whole, self.skeleton, self.fmt, self.engine.packed) if self.fmt else whole


def open_source(welcome: wire.Welcome, flags: SamplerFlags, folder: Path) -> SamplerSource:
    """Engine, task and tokenizer as the learner describes them. UserError: one sentence."""
    from transformers import AutoTokenizer

    run, model = welcome.run, folder / "model"
    check_description(run)
    wire.unpack_setup(welcome.setup, model)
    cfg = configure(run, flags)
    tokenizer = AutoTokenizer.from_pretrained(model)
    if flags.model:
        check_own_model(flags.model, tokenizer, run["context"])
    vocabulary = vocabulary_size(tokenizer)
    skeleton = quant.empty_model(str(model))
    if not flags.model:
        write_zeros(skeleton, model)  # the engine starts from anything and is given its weights
    engine = make_engine(
        cfg,
        flags.model or str(model),
        run["context"],
        max(1, run["topk"], run["kept"]),
        "cuda" if torch.cuda.is_available() else "cpu",
        vocabulary,
    )
    fmt = quant.format_of(cfg.rollout_quant, cfg.quant_group)
    task = make_task(cfg)
    task.fit(tokenizer, cfg.max_prompt_tokens)  # drops what the learner drops
    return SamplerSource(
        engine,
        task,
        tokenizer,
        Sampling(**{**run["sampling"], "seed": cfg.seed}),
        group_size=cfg.group_size,
        topk=run["topk"],
        max_allowed=run["kept"],
        stop_ids=run["stop_ids"],
        model=Path(flags.model).name if flags.model else run["model"],
        check=WeightCheck(read_config(model), run["probe"], fmt, vocabulary) if cfg.check_sync else None,
        skeleton=skeleton,
        low_bits=run["packed"],
        fmt=fmt,
        own_model=bool(flags.model),
    )


def configure(run: dict, flags: SamplerFlags) -> Config:
    """The learner's flags, and this host's for the engine. UserError if they do not go together."""
    known = {f.name for f in fields(Config)}
    cfg = Config(**{k: v for k, v in run["config"].items() if k in known})
    task = flags.task or (cfg.task if cfg.task.startswith("hf:") else "arith")
    if cfg.task != "arith":
        check_task(task, cfg.task, run["task_digest"])
    learner_quant = run["config"]["rollout_quant"]
    own_quant = learner_quant if flags.rollout_quant == "auto" else flags.rollout_quant
    if run["packed"] and own_quant != learner_quant:
        raise UserError(
            f"--rollout_quant={own_quant}: the learner publishes {learner_quant} (its --sync_dtype=quantized); "
            "use that, or let it publish float32"
        )
    cfg = replace(
        cfg,
        task=task,
        rollout=flags.rollout,
        rollout_dtype=flags.rollout_dtype or cfg.rollout_dtype or "float32",
        rollout_quant=own_quant,
        rollout_memory=flags.rollout_memory,
        kv_cache_dtype=flags.kv_cache_dtype,
    )
    quant.check(cfg)
    quant.check_routing(cfg)
    quant.check_products(cfg)
    return cfg


def check_task(path: str, learners: str, digest: str) -> None:
    """UserError unless this host has the learner's task file."""
    try:
        same = digest_of(path) == digest
    except OSError:
        same = False
    need(same, f"--task={path}: not the learner's {learners}; copy that file here and name it with --task")


def check_own_model(folder: str, tokenizer, context: int) -> None:
    """UserError unless a model of this host's own has the learner's vocabulary and enough context."""
    own = read_config(folder).get_text_config()
    if read_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise UserError(f"--model={folder}: its tokenizer differs from the learner's; a sampler must share it")
    check_rows(folder, vocabulary_size(tokenizer))
    if own.max_position_embeddings < context:
        raise UserError(
            f"--model={folder}: a context of {own.max_position_embeddings} tokens, and the learner asks for {context}"
        )


def main(argv: list[str] | None = None) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        run_command(lambda: sample(parse_flags(SamplerFlags, argv)))


if __name__ == "__main__":
    main()
