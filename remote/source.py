"""Groups from samplers on other machines, as train.py sees them: HeteroRL, section 4.2. hub.py and files.py bring them.

`RemoteSource` has the face of a LocalSource (rollout.py): it publishes weights, hands out groups in order of arrival, and keeps the account.
Nothing is lost and nothing trained on twice in the history that survives. A sampler keeps each group (account.py)
until the learner says `held`, which it says only of groups that a checkpoint accounts for; a learner that starts again from
that checkpoint is offered all others anew. Every group ends in one column of the account:

    trained, staleness (too many updates old), window (waited too long), orphan (sampled by weights of a history that did not survive),
    refused (not what was asked for), corrupt (damaged in the folder), lost (damaged in the spool, or gone)

and `duplicate` counts offers of what had come already: those are in another column too.
"""

from __future__ import annotations

import filecmp
import sys
import time
from collections import Counter, deque
from pathlib import Path

from remote import wire
from remote.account import Account, split
from remote.hub import log_path, retain
from sync import write_tensors

COLUMNS = ("trained", "staleness", "window", "orphan", "refused", "corrupt", "lost")


class RemoteSource:
    """The face of a LocalSource over a hub: groups in order of arrival, within the bounds of staleness and age."""

    def __init__(self, hub, cfg, limits: wire.Limits, sampling, store: Path, comm, log):
        self.hub, self.cfg, self.limits, self.sampling, self.store, self.comm, self.log = (
            hub,
            cfg,
            limits,
            sampling,
            store,
            comm,
            log,
        )
        self.taken = Account()  # what the last checkpoint accounts for; the hub turns it away
        self.since: list[str] = []  # the same since the last checkpoint
        self.ready: deque = deque()  # (name, group, when, bytes)
        self.batch: list = []  # the same, of the groups handed out last
        self.counts, self.broadcast_at, self.waited, self.saving, self.error = Counter(), None, 0.0, [], ""
        self.published: dict[int, float] = {}  # version -> when, of this history
        self.files: list[Path] = []  # weights published in this session

    def now(self, learner_version: int) -> float:
        return time.time()

    def publish(self, version: int, named_tensors) -> None:
        tensors = dict(named_tensors)  # collective: every rank must ask for them
        if self.broadcast_at is None:
            self.hub.open(Account.of(self.taken.state()))
        elif version - self.broadcast_at < self.cfg.sync_every:
            return
        if self.cfg.sync_dtype == "bfloat16":
            tensors = {k: x.bfloat16() if x.is_floating_point() else x for k, x in tensors.items()}
        path = self.store / f"v{version:06d}.safetensors"
        write_tensors(fresh := path.with_suffix(".new"), tensors)
        if path.exists() and filecmp.cmp(
            fresh, path, shallow=False
        ):  # a learner that starts again publishes its checkpoint's weights anew:
            fresh.unlink()  # the same ones, and what they sampled is still theirs
        else:
            fresh.replace(path)
        stamp = path.stat().st_mtime if self.comm.rank == 0 else 0.0  # samplers fetch from one rank and feed all
        self.broadcast_at, self.published[version] = version, self.comm.max([stamp])[0]
        self.hub.broadcast(version, path, self.published[version])
        self.files = retain(path, self.files)

    def next(self, n_groups: int, learner_version: int, stop=()) -> list:
        """The next n groups. Waits for them and says so once a minute; an empty list when `stop` fills, or, with `error` set, after --give_up seconds without any."""
        batch, self.batch, start = [], [], time.monotonic()
        last = said = before = start
        while len(batch) < n_groups and not stop and not self.error:
            for name, data, when in self.hub.take():
                self.look_at(name, data, when)
            now = time.monotonic()
            last += now - before if now - before > 5 else 0  # this process was stopped: that is nobody's silence
            before = now
            while self.ready and len(batch) < n_groups:
                name, group, when, nbytes = self.ready.popleft()
                self.hub.free(nbytes)
                if (column := self.column(group, when, learner_version)) == "trained":
                    batch.append((name, group, when, 0))
                    last = now
                else:
                    self.settle(name, column)
            if self.hub.broken:
                self.error = f"the hub failed: {self.hub.broken}"
            elif now - last > self.cfg.give_up:
                self.error = (
                    f"no group to train on for {self.cfg.give_up:.0f} s at {self.hub.address} ({self.said()}): start samplers "
                    f"(python rollout.py --connect=...), look at {log_path(self.cfg.out, self.comm.rank)}, or raise --give_up; --resume goes on from here"
                )
            elif now - said > 60:
                said = now
                print(
                    f"waiting for groups: {len(batch)} of {n_groups}, {len({s for s, _ in self.hub.reports.copy()})} samplers seen at {self.hub.address}",
                    flush=True,
                )
            if len(batch) < n_groups:
                time.sleep(0.01)
        self.waited += time.monotonic() - start
        if len(batch) < n_groups:
            self.ready.extendleft(reversed(batch))
            if self.error and self.comm.rank:  # train.py speaks for rank 0
                print(f"error: rank {self.comm.rank}: {self.error}", file=sys.stderr, flush=True)
            return []
        for name, *_ in batch:
            self.settle(name, "trained")
        self.batch = batch
        return [group for _, group, _, _ in batch]

    def give_back(self) -> None:
        """What `next` gave will not be trained on: another rank got nothing, and all stop."""
        for name, *_ in self.batch:
            self.since.remove(name)
            self.counts["trained"] -= 1
        self.ready.extendleft(reversed(self.batch))
        self.batch = []

    def said(self) -> str:
        """The account so far, in a few words."""
        return ", ".join(f"{n} {column}" for column, n in self.counts.items() if n) or "none came"

    def look_at(self, name: str, data: bytes | str, when: float) -> None:
        if isinstance(data, str):  # the column of a group that will not come
            return self.settle(name, data)
        try:
            group = wire.decode_group(data, self.limits)
            if wire.name_of(group.uid) != name:
                raise wire.WireError(f"{name} holds the group {wire.name_of(group.uid)}")
            if vars(group.sampling) | {"seed": 0} != vars(self.sampling) | {"seed": 0}:
                raise wire.WireError(f"{name}: sampled by another law, {group.sampling}")
        except wire.WireError as e:
            self.log.warning("group refused: %s", e)
            self.hub.free(len(data))
            return self.settle(name, "refused")
        self.ready.append((name, group, when, len(data)))

    def column(self, group, when: float, learner_version: int) -> str:
        if self.published.get(group.version) != group.t_published:
            return "orphan"
        if self.cfg.max_staleness is not None and learner_version - group.version > self.cfg.max_staleness:
            return "staleness"
        return "window" if time.time() - when > self.cfg.window_seconds else "trained"

    def settle(self, name: str, column: str) -> None:
        """The group's fate is decided: it stands in one column, and a checkpoint will say so."""
        self.counts[column] += 1
        self.since.append(name)
        key, n = split(name)  # a sampler that was killed may not have said how many
        self.hub.reports[key] = max(self.hub.reports.get(key, 0), n + 1)

    def metrics(self) -> dict[str, float]:
        """The account and the traffic, summed over ranks; collective."""
        known = self.hub.reports.copy()  # the hub's thread may add to it
        mine = {
            **{k: self.counts[k] for k in COLUMNS},
            **{k: self.hub.counts[k] for k in ("received", "duplicate", "bad_leaves", "malformed", "strangers")},
            "handed": sum(known.values()),
            "waiting": len(self.ready),
            "wait_s": self.waited / self.comm.size,
            "MiB_in": self.hub.counts["bytes_in"] / 2**20,
            "MiB_out": self.hub.counts["bytes_out"] / 2**20,
        }
        self.waited = 0.0
        return {
            **{f"remote/{k}": v for k, v in zip(mine, self.comm.sum(list(mine.values())))},
            "remote/samplers": self.comm.max([len({s for s, _ in known})])[0],
        }

    def state_dict(self) -> dict:
        account = Account.of(self.taken.state())
        for name in self.since:
            account.add(name)
        self.saving = list(self.since)
        return {
            "account": account.state(),
            "counts": dict(self.counts),
            "published": dict(self.published),
            "reports": [[*key, n] for key, n in self.hub.reports.copy().items()],
        }

    def saved(self) -> None:
        """The checkpoint is whole: samplers may forget what it accounts for."""
        for name in self.saving:
            self.taken.add(name)
        self.hub.held(self.saving)
        self.since = self.since[len(self.saving) :]
        self.saving = []

    def load_state_dict(self, state: dict) -> None:
        self.counts, self.taken, self.published = (
            Counter(state["counts"]),
            Account.of(state["account"]),
            dict(state["published"]),
        )
        self.hub.reports.update({(sampler, incarnation): n for sampler, incarnation, n in state.get("reports", [])})

    def close(self) -> None:
        self.hub.close()
