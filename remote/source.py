"""Groups from samplers on other machines, for the training loop. HeteroRL, section 4.2.

`RemoteSource` has the interface of a LocalSource (source.py in the root): it publishes weights,
returns groups in order of arrival, and keeps the account. hub.py or files.py brings the groups to
the first rank, which deals them to all ranks. No group is trained on twice. A sampler keeps each
group (account.py) until the learner says `held`; the learner says `held` only of groups that a
checkpoint accounts for. A learner that restarts from this checkpoint is offered all other groups
again. Every group has one fate:

    trained      the learner has trained on it
    staleness    sampled by weights that were more than --max_staleness updates old
    window       made more than --window_seconds ago (hosts synchronize their clocks by NTP)
    no_spread    all of its responses have the same reward (--dynamic_sampling)
    orphan       sampled by weights of a discarded history
    refused      not a group of this run, or has values that no engine can have sampled
    corrupt      damaged in the shared folder
    lost         over ZeroMQ: damaged in the sampler's spool, or missing there

`duplicate` is not a fate: it counts offers of groups that had already come. `faults` counts
exceptions of this code while it handles messages of samplers: they are in the log, and the run
continues."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from config import Config, PrecisionFlags, PromptFlags, TaskFlags
from model import routing_of
from remote import wire
from remote.account import Arrived, Intake, split
from remote.files import FilesHub
from remote.groups import Limits, decode_group, name_of
from remote.hub import Hub
from remote.weights import Store, mapped
from rollout import Rollout, probe_ids
from sampling import Sampling
from source import has_spread
from tasks.data import digest_of
from tasks.prompts import contents
from tasks.rewards import files_of

FATES = (
    "trained",
    "staleness",
    "window",
    "no_spread",
    "orphan",
    "refused",
    "corrupt",
    "lost",
)
TRAFFIC = ("received", "duplicate", "malformed", "faults")
PRINT_EVERY = 60.0  # seconds between two lines on the screen while the learner waits

# The flags of train.py that a sampler needs: task and prompt flags, and those below.
SHARED = {f.name for kind in (TaskFlags, PromptFlags) for f in dataclasses.fields(kind)}
SHARED |= {
    "group_size",
    "max_tokens",
    "seed",
    "rollout_dtype",
    "rollout_quant",
    "quant_group",
}
SHARED |= {"logprobs_mode", "lm_head_fp32", "router_replay", "check_sync"}


def open_remote_source(
    cfg: Config, run, topk: int, max_allowed: int, comm
) -> RemoteSource:
    """The source of --samplers. It accepts samplers from the first `publish` on.

    run: run.Run. topk: alternatives to record for each token; max_allowed: tokens of a set of
    allowed tokens, 0 if no sets are recorded. UserError: the address is in use, or the keys are missing."""
    model = getattr(run, run.rollout_model)
    description = describe_run(cfg, run, topk, max_allowed)
    setup = sampler_files(run.policy, model)
    welcome = wire.Welcome(secrets.token_hex(8), description, setup)
    limits = Limits(
        group_size=cfg.group_size,
        max_tokens=cfg.max_tokens,
        max_prompt=run.context,
        vocab=run.vocabulary,
        topk=topk,
        max_allowed=max_allowed,
        routed=routing_of(model) if cfg.router_replay else (0, 0, 0),
    )
    log = open_log(cfg.out)
    over_zmq = "://" in cfg.samplers
    if over_zmq:
        wire.check_address("samplers", cfg.samplers, 0)
    if comm.rank > 0:
        hub = Intake(limits, log)
    elif over_zmq:
        hub = Hub(cfg.samplers, cfg.keys, welcome, limits, log)
    else:
        hub = FilesHub(cfg.samplers, welcome, limits, log)
    folder = Path(cfg.out) / "versions" if over_zmq else Path(cfg.samplers) / "models"
    packed = travels_packed(cfg)
    # In float32 an update changes nearly every number, and a shared folder is read in place.
    with_deltas = over_zmq and (packed or cfg.rollout_dtype != "float32")
    return RemoteSource(
        hub, cfg, Store(folder, comm, with_deltas), comm, run.task, packed
    )


def sampler_files(policy: str, model: str) -> dict[str, bytes]:
    """The files of a sampler's model folder, compressed: the configuration of `model`, which samples,
    and the tokenizer of `policy`, as in local runs."""
    configs = ("config.json", "generation_config.json")
    files = {k: v for k, v in wire.pack_setup(policy).items() if k not in configs}
    return files | {k: v for k, v in wire.pack_setup(model).items() if k in configs}


def travels_packed(cfg: PrecisionFlags) -> bool:
    """Whether weights are sent in the low-bit format of --rollout_quant, which the engines load directly."""
    return cfg.rollout_quant in ("int8", "fp8", "w4a16")


def describe_run(cfg: Config, run, topk: int, max_allowed: int) -> wire.Description:
    """Everything that a sampler must know of a run, except the model's files."""
    shared = {k: v for k, v in dataclasses.asdict(cfg).items() if k in SHARED}
    return wire.Description(
        config=shared | contents(cfg),
        model=run.rollout_model,
        topk=topk,
        max_allowed=max_allowed,
        context=run.context,
        task_digest=digest_of(cfg.task),
        reward_digests={name: digest_of(name) for name in files_of(cfg.reward)},
        sampling=Sampling.of(cfg),
        probe=probe_ids(run.context, run.vocabulary).tolist(),
        packed=travels_packed(cfg),
        stop_ids=run.stop_ids,
    )


class PrintableFormatter(logging.Formatter):
    """Formats a line of the log so that it is short and printable."""

    def format(self, record: logging.LogRecord) -> str:
        return wire.printable(super().format(record), 500)


def open_log(out: str | Path) -> logging.Logger:
    """The log of samplers that were accepted and rejected."""
    log = logging.getLogger(f"remote.{out}")
    if not log.handlers:
        # the first line makes the file, so a refused run has no log
        handler = logging.FileHandler(Path(out) / "remote.log", delay=True)
        handler.setFormatter(PrintableFormatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    return log


@dataclass
class Ready:
    """A valid group that is not trained on yet."""

    name: str
    group: Rollout
    when: float  # time of arrival, in seconds since the epoch
    nbytes: int  # of room that it takes; 0 after it was handed out


@dataclass
class RemoteSource:
    """The interface of a LocalSource over a hub: groups in order of arrival, within the bounds of
    staleness and age.

    store: folder of the published weights (weights.py). task: must contain each group's problem;
    None: not checked."""

    hub: Intake
    cfg: Config
    store: Store
    comm: object
    task: object = None
    packed: bool = False  # `publish` needs the engine's low-bit tensors
    error: str = ""
    counts: Counter = field(default_factory=Counter)  # fate -> groups
    # groups decided since the last checkpoint
    since: list[str] = field(default_factory=list)
    # those in the checkpoint being written
    saving: list[str] = field(default_factory=list)
    ready: deque[Ready] = field(default_factory=deque)
    batch: list[Ready] = field(default_factory=list)  # handed out last
    waited: float = 0.0  # seconds spent in `next` since the last metrics
    broadcast_at: int | None = None  # the version published last
    # version -> time, in this history
    published: dict[int, float] = field(default_factory=dict)

    # -- weights

    def publish(self, version: int, named_tensors) -> None:
        """Offer new weights to the samplers, every --sync_every updates. Collective."""
        if self.broadcast_at is None:
            self.hub.open()
        elif version - self.broadcast_at < self.cfg.sync_every:
            return
        # a resumed run begins with its checkpoint's weights, published before or not
        restored = self.broadcast_at is None and bool(self.published)
        self.broadcast_at = version
        path, change = self.store.publish(version, named_tensors, restored)
        if self.comm.rank == 0:
            self.published[version] = path.stat().st_mtime
            of = wire.manifest(path.name, mapped(path))
            self.hub.broadcast(
                wire.Offer(of, version, self.published[version]), path, change
            )

    # -- groups

    def next(self, n_groups: int, learner_version: int, stop=()) -> list[Rollout]:
        """The next n groups for each rank; an empty list if `stop` fills on the first rank, or,
        with `error` set, after --give_up seconds without a group to train on. Waits, and prints a line once a
        minute. Collective."""
        self.batch = []
        if self.comm.rank == 0:
            start = time.monotonic()
            n = n_groups * self.comm.size
            batch = self._collect(n, learner_version, stop)
            self.waited += time.monotonic() - start
            if len(batch) == n:
                self.batch = batch
            else:
                self.ready.extendleft(reversed(batch))
        for item in self.batch:
            self.record_fate(item.name, "trained")
        groups = [item.group for item in self.batch]
        if self.comm.size == 1:
            return groups
        # the earliest groups are in the first minibatch of all ranks
        parts = [groups[rank :: self.comm.size] for rank in range(self.comm.size)]
        received: list = [None]
        dist.scatter_object_list(received, parts if self.comm.rank == 0 else None)
        return received[0]

    def _collect(self, n_groups: int, learner_version: int, stop) -> list[Ready]:
        """Up to n groups to train on: fewer if `stop` fills or `error` is set first."""
        batch: list[Ready] = []
        last_group = last_print = time.monotonic()
        while len(batch) < n_groups and not stop and not self.error:
            for arrived in self.hub.drain():
                self.validate(arrived)
            now = time.monotonic()
            while self.ready and len(batch) < n_groups:
                item = self.ready.popleft()
                self.hub.free(item.nbytes)
                item.nbytes = 0
                fate = self.fate(item, learner_version)
                if fate == "trained":
                    batch.append(item)
                    last_group = now
                else:
                    self.record_fate(item.name, fate)
            if self.hub.broken:
                self.error = f"the hub failed: {self.hub.broken}"
            elif now - last_group > self.cfg.give_up:
                self.error = self._no_group_came()
            elif now - last_print > PRINT_EVERY:
                last_print = now
                print(
                    f"waiting for groups: {len(batch)} of {n_groups}, {len(self._samplers())} "
                    f"samplers seen at {self.hub.address}",
                    flush=True,
                )
            if len(batch) < n_groups:
                time.sleep(0.01)
        return batch

    def _no_group_came(self) -> str:
        account = (
            ", ".join(f"{n} {fate}" for fate, n in self.counts.items() if n)
            or "none came"
        )
        return (
            f"no group to train on for {self.cfg.give_up:.0f} s at {self.hub.address} ({account}): start "
            f"samplers (python -m remote --connect=...), read {self.cfg.out}/remote.log, or raise --give_up; "
            "--resume continues from here"
        )

    def _samplers(self) -> set[str]:
        """The names of all samplers that have reported so far."""
        # a copy, because the hub's thread may add entries
        return {sampler for sampler, _ in self.hub.reports.copy()}

    def mark(self) -> None:
        """Forget the groups that `give_back` would take back."""
        self.batch = []

    def give_back(self) -> None:
        """Take back the groups since the last `mark`, which will not be trained on now."""
        for item in self.batch:
            self.since.remove(item.name)
            self.counts["trained"] -= 1
        self.ready.extendleft(reversed(self.batch))
        self.batch = []

    def validate(self, arrived: Arrived) -> None:
        """Append a valid group to `ready`; record the fate of any other group."""
        if arrived.fate:
            self.record_fate(arrived.name, arrived.fate)
            return
        try:
            group = self.decode(arrived)
        except wire.WireError as e:
            self.hub.log.warning("group refused: %s", e)
        except (
            Exception
        ) as e:  # a fault in this code: this group is refused, and the run continues
            self.hub.counts["faults"] += 1
            self.hub.log.error(
                "a fault in group %s, which is refused: %r", arrived.name, e
            )
        else:
            self.ready.append(
                Ready(arrived.name, group, arrived.when, len(arrived.data))
            )
            return
        self.hub.free(len(arrived.data))
        self.record_fate(arrived.name, "refused")

    def decode(self, arrived: Arrived) -> Rollout:
        """The group in these bytes. Raise WireError if it is not a group of this run."""
        name = arrived.name
        group = decode_group(arrived.data, self.hub.limits)
        wire.need(
            name_of(group.uid) == name, f"{name} holds the group {name_of(group.uid)}"
        )
        same = dataclasses.replace(group.sampling, seed=self.cfg.seed) == Sampling.of(
            self.cfg
        )
        wire.need(same, f"{name}: sampled with other settings, {group.sampling}")
        if self.task is not None:
            try:
                self.task.find(group.prompt_id)
            except Exception:  # a task may raise any exception for an unknown id
                problem = wire.printable(group.prompt_id, 100)
                raise wire.WireError(
                    f"{name}: the task has no problem {problem}"
                ) from None
        return group

    def fate(self, item: Ready, learner_version: int) -> str:
        """The fate of a ready group if the learner takes it now."""
        group, bound = item.group, self.cfg.max_staleness
        if self.published.get(group.version) != group.t_published:
            return "orphan"
        if bound is not None and learner_version - group.version > bound:
            return "staleness"
        # by the sampler's clock, clipped to the possible range
        made = min(max(group.t_end, group.t_published), item.when)
        if time.time() - made > self.cfg.window_seconds:
            return "window"
        if self.cfg.dynamic_sampling and not has_spread(group):
            return "no_spread"
        return "trained"

    def record_fate(self, name: str, fate: str) -> None:
        """Record a group's fate; the next checkpoint stores it."""
        self.counts[fate] += 1
        self.since.append(name)
        # a killed sampler may not have reported this group
        sampler, incarnation, n = split(name)
        self.hub.report(sampler, incarnation, n + 1)

    # -- the account

    def metrics(self, summed=None) -> dict[str, float]:
        """The account and the traffic, on the first rank."""
        values = {fate: self.counts[fate] for fate in FATES}
        values |= {kind: self.hub.counts[kind] for kind in TRAFFIC}
        values |= {
            "handed": sum(self.hub.reports.copy().values()),
            "waiting": len(self.ready),
            "wait_s": self.waited,
            "MiB_in": self.hub.counts["bytes_in"] / 2**20,
            "MiB_out": self.hub.counts["bytes_out"] / 2**20,
            "samplers": len(self._samplers()),
        }
        self.waited = 0.0
        return {f"remote/{name}": float(value) for name, value in values.items()}

    def state_dict(self) -> dict:
        self.saving = list(self.since)
        return {
            "account": sorted(self.hub.held.union(self.since)),
            "counts": dict(self.counts),
            "published": dict(self.published),
            "reports": [[*key, n] for key, n in self.hub.reports.copy().items()],
        }

    def saved(self) -> None:
        """Tell the samplers that a checkpoint now holds the groups of the last `state_dict`."""
        self.hub.hold(self.saving)
        self.since = self.since[len(self.saving) :]
        self.saving = []

    def load_state_dict(self, state: dict) -> None:
        self.counts = Counter(state["counts"])
        self.hub.held = set(state["account"])
        self.published = dict(state["published"])
        for report in state["reports"]:
            self.hub.report(*report)

    def close(self) -> None:
        self.hub.close()
