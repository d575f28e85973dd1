"""What one peer may take from a hub: connections, unread bytes, room, names, log lines. HeteroRL, section 4.2.

A sampler may be broken or hostile. What it can make grow has a bound here, and what it causes is booked to it alone:

    Connections   bytes that came in over a TCP connection and have not come out as whole messages
    Room          bytes of groups that are here or asked for, shared out among those who wait
    Names         which key a sampler's name belongs to
    open_log      lines of a kind in a minute, characters of a line, bytes of the file
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import logging.handlers
import os
import resource
import socket
import struct
import sys
import termios
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from remote.account import without_rank
from remote.wire import LEAF, printable

MOST_UNREAD = 4 * LEAF  # bytes of one connection: a queue of two messages, one on its way, and a margin
QUEUE = 2  # messages of one connection that wait to be read
MOST_CONNECTIONS = 512
OVERHEAD = 48  # bytes that encryption and framing add to a frame, at most
IN_STEP = 64 << 10  # bytes: a connection that is no further behind has sent nothing that is kept from the hub
MOST_ENTRIES = 1 << 16  # incarnations, numbers out of order and bad groups that an owner may leave in the account
NAMES = 64  # sampler names that one key may use in a run


# ---------------------------------------------------------------------------------------------------------------------
# Connections
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Connection:
    handle: socket.socket  # a handle of our own on ZeroMQ's socket: its number cannot come to mean another one
    sent: int = 0  # bytes that came out as whole messages, with what was sent around them
    spoke: bool = False


class Connections:
    """The open TCP connections of a socket, by the number of their file.

    ZeroMQ bounds a frame (MAXMSGSIZE) and a queue (RCVHWM), but neither the number of frames of a message nor what it
    keeps of one that is never finished. The kernel counts what each connection has received; the hub counts what comes
    out. Whoever is ahead by more than MOST_UNREAD is cut off. Where the system does not count (no Linux, or an ipc
    address, which only this host's own user can reach) nothing is cut."""

    def __init__(self, most: int = MOST_CONNECTIONS):
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = min(most, files // 8)
        self.open: dict[int, Connection] = {}

    def accepted(self, fd: int) -> bool:
        """Note a new connection. False: there are too many, and one of them was cut: the oldest of those that have
        never said anything, else this one."""
        self.closed(fd)
        try:
            self.open[fd] = Connection(socket.socket(fileno=os.dup(fd)))
        except OSError:  # gone already
            return True
        if len(self.open) <= self.most:
            return True
        silent = [other for other, c in self.open.items() if not c.spoke]
        self.cut(silent[0] if silent else fd)
        return False

    def closed(self, fd: int) -> None:
        connection = self.open.pop(fd, None)
        if connection is not None:
            connection.handle.close()

    def came(self, fd: int, frames: list) -> None:
        """A whole message came out."""
        connection = self.open.get(fd)
        if connection is None:
            return
        connection.spoke = True
        connection.sent += sum(len(frame) + OVERHEAD for frame in frames)
        received = received_by(connection.handle)
        if abs(received - connection.sent) < IN_STEP:  # heartbeats, and frames with less around them
            connection.sent = received

    def cut_those_ahead(self) -> list[int]:
        """Cut whoever has sent more than it may without finishing a message. Their numbers."""
        ahead = [fd for fd, c in self.open.items() if received_by(c.handle) - c.sent > MOST_UNREAD]
        for fd in ahead:
            self.cut(fd)
        return ahead

    def cut(self, fd: int) -> None:
        """End a connection. ZeroMQ then forgets what it has of an unfinished message."""
        if fd in self.open:
            with contextlib.suppress(OSError):
                self.open[fd].handle.shutdown(socket.SHUT_RDWR)
            self.closed(fd)

    def close(self) -> None:
        for fd in list(self.open):
            self.closed(fd)


def received_by(handle: socket.socket) -> int:
    """Bytes that ZeroMQ has read from a TCP socket so far; 0 where the system does not count them."""
    if not sys.platform.startswith("linux") or handle.family == socket.AF_UNIX:
        return 0
    try:
        info = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        waiting = array.array("i", [0])
        fcntl.ioctl(handle.fileno(), termios.FIONREAD, waiting)
    except OSError:
        return 0
    return struct.unpack_from("Q", info, 128)[0] - waiting[0] if len(info) >= 136 else 0  # tcpi_bytes_received


# ---------------------------------------------------------------------------------------------------------------------
# Room
# ---------------------------------------------------------------------------------------------------------------------


class Room:
    """Bytes of groups that are here or asked for. As long as others wait, nobody takes more than its share."""

    def __init__(self, most: int):
        self.most = most
        self.used: Counter = Counter()  # owner -> bytes
        self.lock = threading.Lock()

    @property
    def size(self) -> int:
        with self.lock:
            return sum(self.used.values())

    def take(self, owner: str, nbytes: int, waiting: set[str] = frozenset()) -> bool:
        """Whether there is room; it is taken. waiting: other owners who want some. A group that is bigger than all the
        room is taken alone."""
        with self.lock:
            size = sum(self.used.values())
            share = self.most // len({owner, *waiting, *self.used}) if waiting else self.most
            fits = size + nbytes <= self.most and (self.used[owner] + nbytes <= share or not self.used[owner])
            if fits or not size:
                self.used[owner] += nbytes
            return fits or not size

    def give(self, owner: str, nbytes: int) -> None:
        with self.lock:
            self.used[owner] -= nbytes
            if self.used[owner] <= 0:
                del self.used[owner]


# ---------------------------------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------------------------------


class Names(dict):
    """Sampler -> the public key that its name belongs to.

    A name that is that of a key's folder (sampler0, ...) belongs to that key; any other to the first that used it in
    the run. Without keys names belong to nobody."""

    def __init__(self, known: dict[str, str]):
        super().__init__({name: key for key, name in known.items()})
        self.known = set(known)

    def refusal(self, stream: str, key: str) -> str:
        """Why a sampler with this key may not have this name; empty, and the name is its own from now on, if it may."""
        if not key:
            return ""
        sampler = without_rank(stream)
        if sampler not in self and list(self.values()).count(key) > NAMES:
            return f"--name={sampler}: these keys have used {NAMES} names in this run; take one of them"
        if self.setdefault(sampler, key) != key:
            return f"--name={sampler}: that name belongs to other keys in this run; give this sampler another"
        return ""

    def restore(self, names: dict[str, str]) -> None:
        """The names of the run before a resume, as far as their keys are still known."""
        for sampler, key in names.items():
            if key in self.known:
                self.setdefault(sampler, key)

    def owner(self, stream: str) -> str:
        """Who answers for this sampler: its key, or without keys itself."""
        sampler = without_rank(stream)
        return self.get(sampler, sampler)


# ---------------------------------------------------------------------------------------------------------------------
# The log
# ---------------------------------------------------------------------------------------------------------------------

LINES = 20  # of one kind in PERIOD seconds
PERIOD = 60.0
LOG_BYTES = 4 << 20  # of one file; there are three


class FewOfAKind(logging.Filter):
    """At most LINES lines of a kind in a minute; the first one after that says how many were left out."""

    def __init__(self):
        super().__init__()
        self.since: dict[str, float] = {}
        self.count: Counter = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = str(record.msg), time.monotonic()
        left_out = 0
        if now - self.since.get(kind, -PERIOD) >= PERIOD:
            left_out = max(0, self.count[kind] - LINES)
            self.since[kind], self.count[kind] = now, 0
        self.count[kind] += 1
        if self.count[kind] > LINES:
            return False
        text = printable(record.getMessage(), 500)
        record.msg, record.args = f"{text} ({left_out} such lines left out)" if left_out else text, ()
        return True


def log_path(out: str | Path, rank: int) -> Path:
    return Path(out) / ("remote.log" if rank == 0 else f"remote{rank}.log")


def open_log(out: str | Path, rank: int) -> logging.Logger:
    """The file that says who came, who was turned away, and why."""
    log = logging.getLogger(f"remote.{out}.{rank}")
    if not log.handlers:
        path = log_path(out, rank)  # made by its first line, which a run that is refused does not write
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=2, delay=True)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
        log.addFilter(FewOfAKind())
        log.setLevel(logging.INFO)
        log.propagate = False
    return log
