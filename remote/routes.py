"""Which sampler feeds which ranks of the learner, and where they listen: --connect, or a file that may change.

    tcp://HOST:PORT,tcp://HOST:PORT     all ranks, in order
    routes.toml                         [learners] RANK = "tcp://HOST:PORT", [samplers] NAME = [RANK, ...]
    a folder                            files.py; or a file of routes with that folder as every address

A file of routes is read again when it changes (`Follower`): a rank may move to another host, samplers be sent to other
ranks, while all of them run. A file that is none, half written say, changes nothing. README.md shows one.
"""

from __future__ import annotations

import os
import time
import tomllib
from pathlib import Path

from flags import UserError, need

LOOK_EVERY = 2.0  # seconds between two looks at the file


def routes(where: str, name: str) -> tuple[list[str], list[str]]:
    """(addresses, streams) of --connect: those of a TOML file of routes, or addresses separated by commas."""
    if not is_file_of_routes(where):
        addresses = where.split(",")
        return addresses, streams_of(name, len(addresses))
    try:
        tables = tomllib.loads(Path(where).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"--connect={where}: no file of routes ({e}); remote/README.md shows one") from None
    learners, samplers = tables.get("learners", {}), tables.get("samplers", {})
    no_route = f'{where}: no route for {name}; it needs [learners] 0 = "tcp://..." and [samplers] {name} = [0]'
    need(isinstance(learners, dict) and isinstance(samplers, dict), no_route)
    ranks = samplers.get(name, samplers.get("*"))
    need(isinstance(ranks, list) and ranks and all(type(rank) is int and rank >= 0 for rank in ranks), no_route)
    addresses = [learners.get(str(rank)) for rank in ranks]
    need(all(isinstance(address, str) for address in addresses) and len(set(ranks)) == len(ranks), no_route)
    return addresses, [f"{name}.{rank}" for rank in ranks]


def is_file_of_routes(where: str) -> bool:
    return where.endswith(".toml")


def streams_of(name: str, ranks: int) -> list[str]:
    """A stream for each rank; with one rank, the sampler's own name."""
    return [name] if ranks == 1 else [f"{name}.{rank}" for rank in range(ranks)]


class Follower:
    """Looks every other second whether the file of routes has changed.

    check: what addresses must pass; it raises UserError."""

    def __init__(self, where: str, name: str, check):
        self.where = where
        self.name = name
        self.check = check
        self.looked = time.monotonic()
        self.stamp = self._stamp()
        self.now = routes(where, name)

    def _stamp(self) -> tuple:
        """Changes when the file does."""
        if not is_file_of_routes(self.where):
            return ()
        try:
            here = os.stat(self.where)
        except OSError:
            return ()
        return here.st_ino, here.st_size, here.st_mtime_ns

    def changed(self) -> tuple[list[str], list[str]] | None:
        """The routes, if they are new since the last call. What is wrong with the file is printed, once."""
        if time.monotonic() - self.looked < LOOK_EVERY:
            return None
        self.looked = time.monotonic()
        stamp = self._stamp()
        if stamp == self.stamp:
            return None
        self.stamp = stamp
        try:
            new = routes(self.where, self.name)
            self.check(new[0])
        except UserError as e:
            print(f"{e}; the routes of before stay", flush=True)
            return None
        if new == self.now:
            return None
        self.now = new
        print(f"new routes: {', '.join(new[1])} to {', '.join(new[0])}", flush=True)
        return new
