"""Groups from samplers on other machines, as train.py sees them: HeteroRL, section 4.2. hub.py and files.py bring them.

`RemoteSource` has the face of a LocalSource (rollout.py): it publishes weights, hands out groups in order of arrival, and keeps the account.
Nothing is lost and nothing trained on twice in the history that survives. A sampler keeps each group (account.py)
until the learner says `held`, which it says only of groups that a checkpoint accounts for; a learner that starts again from
that checkpoint is offered all others anew. Every group ends in one column of the account:

    trained, staleness (too many updates old), window (waited too long), orphan (sampled by weights of a history that did not survive),
    refused (not what was asked for), corrupt (damaged in the folder), lost (damaged in the spool)

and `duplicate` counts offers of what had come already: those are in another column too.
"""
from __future__ import annotations

import filecmp
import time
from collections import Counter, deque
from pathlib import Path

import wire
from account import Account
from hub import KEPT_VERSIONS, log_path
from sync import write_tensors


class RemoteSource:
    """The face of a LocalSource over a hub: groups in order of arrival, within the bounds of staleness and age."""

    def __init__(self, hub, cfg, limits: wire.Limits, sampling, store: Path, rank: int, world: int, log):
        self.hub, self.cfg, self.limits, self.sampling, self.store, self.rank, self.world, self.log = hub, cfg, limits, sampling, store, rank, world, log
        self.taken = Account()                             # what the last checkpoint accounts for; the hub turns it away
        self.since: list[str] = []                         # the same since the last checkpoint
        self.ready: deque = deque()                        # (name, group, when, bytes)
        self.counts, self.broadcast_at, self.waited, self.saving = Counter(), None, 0.0, []
        self.published: dict[int, float] = {}              # version -> when, of this history

    def now(self, learner_version: int) -> float:
        return time.time()

    def publish(self, version: int, named_tensors) -> None:
        tensors = dict(named_tensors)                      # collective: every rank must ask for them
        if self.broadcast_at is None:
            self.hub.open(Account.of(self.taken.state()))
        elif version - self.broadcast_at < self.cfg.sync_every:
            return
        if self.cfg.sync_dtype == "bfloat16":
            tensors = {k: x.bfloat16() if x.is_floating_point() else x for k, x in tensors.items()}
        path = self.store / f"v{version:06d}.safetensors"
        write_tensors(fresh := path.with_suffix(".new"), tensors)
        if path.exists() and filecmp.cmp(fresh, path, shallow=False):      # a learner that starts again publishes its checkpoint's weights anew:
            fresh.unlink()                                                 # the same ones, and what they sampled is still theirs
        else:
            fresh.replace(path)
        self.broadcast_at, self.published[version] = version, path.stat().st_mtime
        self.hub.broadcast(version, path, self.published[version])
        for old in sorted(self.store.glob("v*.safetensors"))[:-KEPT_VERSIONS]:
            old.unlink()

    def next(self, n_groups: int, learner_version: int) -> list:
        """The next n groups. Waits for them, says so once a minute, and gives up after --give_up seconds without any."""
        out, start, said = [], time.monotonic(), time.monotonic()
        last = start
        while len(out) < n_groups:
            if self.hub.broken:
                raise RuntimeError(f"the hub failed: {self.hub.broken}; --resume goes on from the last checkpoint")
            arrived = self.hub.take()
            for name, data, when in arrived:
                self.look_at(name, data, when)
            while self.ready and len(out) < n_groups:
                name, group, when, nbytes = self.ready.popleft()
                self.hub.free(nbytes)
                column = self.column(group, when, learner_version)
                self.settle(name, column)
                out += [group] if column == "trained" else []
            if len(out) == n_groups:
                break
            now = time.monotonic()
            last = now if arrived else last
            if now - last > self.cfg.give_up:
                raise RuntimeError(f"no group from any sampler for {self.cfg.give_up:.0f} s at {self.hub.address}: start samplers "
                                   f"(python rollout.py --connect=...), look at {log_path(self.cfg.out, self.rank)}, or raise --give_up; --resume goes on from the last checkpoint")
            if now - said > 60:
                said = now
                print(f"waiting for groups: {len(out)} of {n_groups}, {len(self.hub.reports)} samplers seen at {self.hub.address}", flush=True)
            time.sleep(0.01)
        self.waited += time.monotonic() - start
        return out

    def look_at(self, name: str, data: bytes, when: float) -> None:
        try:
            group = wire.decode_group(data, self.limits)
            if wire.name_of(group.uid) != name:
                raise wire.WireError(f"{name} holds the group {wire.name_of(group.uid)}")
            if group.sampling != self.sampling and vars(group.sampling) | {"seed": 0} != vars(self.sampling) | {"seed": 0}:
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

    def metrics(self) -> dict[str, float]:
        known = self.hub.reports.copy()                    # the hub's thread may add to it
        reports = list(known.values())
        said = {f"remote/{k}": float(self.counts[k]) for k in ("trained", "staleness", "window", "orphan", "refused")}
        more = {f"remote/{k}": float(self.hub.counts[k]) for k in ("received", "duplicate", "corrupt", "bad_leaves", "malformed", "strangers")}
        out = {**said, **more, "remote/lost": float(sum(len(lost) for _, lost in reports)), "remote/handed": float(sum(n for n, _ in reports)),
               "remote/samplers": float(len({s for s, _ in known})), "remote/waiting": float(len(self.ready)), "remote/wait_s": self.waited,
               "remote/MiB_in": self.hub.counts["bytes_in"] / 2**20, "remote/MiB_out": self.hub.counts["bytes_out"] / 2**20}
        self.waited = 0.0
        return out

    def state_dict(self) -> dict:
        account = Account.of(self.taken.state())
        for name in self.since:
            account.add(name)
        self.saving = list(self.since)
        return {"account": account.state(), "counts": dict(self.counts), "published": dict(self.published)}

    def saved(self) -> None:
        """The checkpoint is whole: samplers may forget what it accounts for."""
        for name in self.saving:
            self.taken.add(name)
        self.hub.held(self.saving)
        self.since = self.since[len(self.saving):]
        self.saving = []

    def load_state_dict(self, state: dict) -> None:
        self.counts, self.taken, self.published = Counter(state["counts"]), Account.of(state["account"]), dict(state["published"])

    def close(self) -> None:
        self.hub.close()
