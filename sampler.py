"""A remote sampler: its loop, its spool, and its end of the wire. HeteroRL, section 4.2; hub.py is the learner's end.

    python rollout.py --connect=tcp://LEARNER:5555 --keys=keys/sampler0                # on any host, at any time; --help lists the flags
    python rollout.py --connect=/shared/run                                            # over a shared folder

Everything but the engine's flags comes from the learner: the model's configuration and tokenizer, the law to sample from, the task. Three threads' worth of
work never wait for each other: the main thread samples with the newest weights that are here whole, hands each group over to the spool
(a file, written whole: from here on it is accounted for) and goes on; `Link` offers what is in the spool until the learner holds it, and
fetches new weights into the store meanwhile. Killed and started again, a sampler offers what its spool still holds and
goes on under a new incarnation. It walks the task in an order of its own, so samplers need not know of each other.
"""
from __future__ import annotations

import mmap
import os
import queue
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np

import hub
import wire
from rollout import LocalSource, request_seed, uniforms

BEAT = 2.0                         # seconds between two hellos
SAY = 10.0                         # and between two lines on the screen
OFFERS = 64                        # groups offered and not yet fetched, at most


@dataclass(frozen=True)
class Flags:
    connect: str = ""
    """Address of the learner, tcp://HOST:PORT (with several ranks one for each, by commas), a TOML file of routes, or a shared folder."""
    keys: str = "none"
    """This machine's folder of keys (hub.py makes them); none: in the clear, for addresses of this host only."""
    name: str = ""
    """This sampler's name; default: that of its keys, else of the host."""
    rollout: Literal["vllm", "hf"] = "vllm"
    """Rollout engine."""
    rollout_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Engine's precision."""
    rollout_quant: Literal["auto", "none", "int8", "fp8", "w4a16", "w3a16", "w2a16"] = "auto"
    """Low-bit format of the engine's linear layers; auto: the learner's --rollout_quant."""
    rollout_memory: float = 0.25
    """Engine's memory: GiB of KV cache on CPU, share of the GPU on CUDA."""
    groups: int = 8
    """Groups sampled at once."""
    spool: str = ""
    """Folder of groups handed over and not yet held by the learner; default out/samplers/NAME. It outlives the process."""
    spool_groups: int = 4096
    """Stop sampling when so many wait to be fetched. Fetched ones stay on disk until a checkpoint of the learner holds them."""
    task: str = ""
    """This host's copy of the learner's task file, where the task is one."""
    give_up: float = 3600.0
    """Seconds without an answer from the learner after which to stop."""
    patience: float = 10.0
    """Seconds after which an unanswered request is made again."""
    delay: Literal["none", "constant", "lognormal", "weibull", "exponential"] = "none"
    """Hold back new weights for a delay drawn from this law (delay.py), in seconds of this host's clock."""
    delay_min: float = 60.0
    """Shortest delay."""
    delay_max: float = 1800.0
    """Longest delay."""
    delay_mass: float = 0.995
    """Share of delays between the two."""
    most_weights: float = 64.0
    """Largest set of weights that is taken, in GiB."""


# ---------------------------------------------------------------------------------------------------------------------
# Groups that are handed over
# ---------------------------------------------------------------------------------------------------------------------

class Spool:
    """Files STREAM/INC-N, sealed, each a group that was handed over. Damaged ones are reported as lost."""

    def __init__(self, folder: Path, streams: list[str], incarnation: int):
        self.folder, self.incarnation, self.lock = folder, incarnation, threading.Lock()
        self.handed = dict.fromkeys(streams, 0)
        self.lost: dict[str, list[int]] = {s: [] for s in streams}
        self.waiting: dict[str, deque] = {s: deque() for s in streams}     # names, oldest first
        for s in streams:
            (folder / s).mkdir(parents=True, exist_ok=True)
            for scratch in (folder / s).glob(".*"):                        # cut off in the middle: never handed over
                scratch.unlink()
            old = [f"{s}/{'/'.join(p.name.split('-'))}" for p in (folder / s).glob("*-*")]
            self.waiting[s].extend(sorted(old, key=hub.split))

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def path(self, name: str) -> Path:
        (stream, incarnation), n = hub.split(name)
        return self.folder / stream / f"{incarnation}-{n}"

    def hand_over(self, stream: str, name: str, data: bytes) -> None:
        hub.place(self.path(name), hub.sealed(data))
        with self.lock:
            self.handed[stream] += 1
            self.waiting[stream].append(name)

    def read(self, name: str) -> bytes | None:
        """The group's bytes; None if they are gone or damaged, which is written down."""
        try:
            data = hub.opened(self.path(name).read_bytes())
        except FileNotFoundError:
            return None
        if data is None:
            (stream, incarnation), n = hub.split(name)
            if incarnation == self.incarnation:
                self.lost[stream].append(n)
            self.forget([name])
        return data

    def forget(self, names) -> None:
        with self.lock:
            for name in names:
                try:
                    self.waiting[hub.split(name)[0][0]].remove(name)
                except (ValueError, KeyError):
                    pass
        for name in names:
            self.path(name).unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# The sampler's end of the wire
# ---------------------------------------------------------------------------------------------------------------------

class Link(threading.Thread):
    """One connection for each learner rank: offers the spool, answers asks, fetches the newest weights (from the first rank)."""

    def __init__(self, addresses: list[str], streams: list[str], flags: Flags, spool: Spool, store: Path, keys):
        import zmq
        super().__init__(daemon=True, name="link")
        self.addresses, self.streams, self.flags, self.spool, self.store, self.keys = addresses, streams, flags, spool, store, keys
        self.welcome: queue.Queue = queue.Queue()
        self.newest: tuple[int, float, Path] | None = None                 # version, published, file
        self.error, self.stopping, self.blocked, self.since = "", False, 0.0, 0.0
        self.context = zmq.Context()
        self.lines = [Line(self, i) for i in range(len(addresses))]
        self.start()

    def run(self) -> None:
        try:
            while not self.stopping and not self.error:
                self.turn()
        except Exception as e:
            self.error = f"the link failed: {e!r}"
            raise
        finally:
            self.context.destroy(linger=200)

    def turn(self) -> None:
        import zmq
        poller = zmq.Poller()
        for line in self.lines:
            poller.register(line.socket, zmq.POLLIN)
        poller.poll(10)
        for line in self.lines:
            line.turn(time.monotonic())
            if line.silent > self.flags.give_up:
                self.error = (f"no answer from {line.address} for {self.flags.give_up:.0f} s: is the learner up, is that its address, "
                              "and are these the keys it knows (--keys)? A group that was handed over waits in the spool")

    def look(self) -> None:
        """FilesLink's turn; this one has a thread."""

    def behind(self) -> int:
        """Groups that the learner has not fetched. Those it has fetched must not count: it holds them when it saves, and to get there it needs more."""
        return sum(len(self.spool.waiting[line.stream]) - len(line.got) for line in self.lines)

    def close(self) -> None:
        self.stopping = True
        self.join(timeout=5)


class Line:
    """A connection to one rank."""

    def __init__(self, link: Link, i: int):
        self.link, self.address, self.stream, self.fetches = link, link.addresses[i], link.streams[i], i == 0
        self.session, self.socket = "", None
        self.pull: wire.Pull | None = None
        self.offered: dict[str, float] = {}                # name -> when
        self.got: set[str] = set()
        self.cache: tuple[str, bytes] = ("", b"")
        self.next_weights: wire.Offer | None = None
        self.heard_of = self.have = ""                     # the last weights that were offered, by name, and fetched, by their bytes
        self.heard = self.began = self.said = time.monotonic()
        self.beat = 0.0
        self.pace = wire.Pace(patience=link.flags.patience)
        self.connect()

    @property
    def silent(self) -> float:
        return time.monotonic() - self.heard

    def connect(self) -> None:
        import zmq
        if self.socket is not None:
            self.socket.close(linger=0)
        self.socket = self.link.context.socket(zmq.DEALER)
        if self.link.keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey, self.socket.curve_serverkey = self.link.keys
        for option, value in ((zmq.MAXMSGSIZE, 16 * wire.LEAF + 4096), (zmq.SNDHWM, 64), (zmq.RCVHWM, 64), (zmq.LINGER, 200),
                              (zmq.HEARTBEAT_IVL, 2000), (zmq.HEARTBEAT_TIMEOUT, 10000), (zmq.RECONNECT_IVL_MAX, 5000)):
            self.socket.setsockopt(option, value)
        self.socket.connect(self.address)
        self.session, self.beat = "", 0.0
        self.offered.clear()
        self.got.clear()
        if self.pull is not None:
            self.pull.forget_asked()

    def send(self, message, payload=None) -> None:
        import zmq
        try:
            self.socket.send_multipart([wire.encode(message)] + ([payload] if payload is not None else []), zmq.NOBLOCK)
        except zmq.Again:                                  # nobody there, or nobody who reads: everything is said again later
            pass

    def turn(self, now: float) -> None:
        import zmq
        flags = self.link.flags
        for _ in range(1000):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                self.handle(wire.decode(frames[0].buffer), frames)
            except wire.WireError:
                continue                                   # damaged on the way: what it was will be asked for again
        if now - self.beat > min(BEAT, flags.patience / 2):
            self.beat = now
            spool = self.link.spool
            self.send(wire.Hello(wire.PROTOCOL, self.stream, spool.incarnation, self.session, spool.handed[self.stream], spool.lost[self.stream]))
        if self.silent > 3 * flags.patience and now - self.began > 3 * flags.patience:
            self.began = now
            if now - self.said > 30:
                self.said = now
                print(f"no answer from {self.address} for {self.silent:.0f} s, trying again (at most {flags.give_up:.0f} s, --give_up)", flush=True)
            self.connect()
        if self.session:
            self.offer(now)
            self.fetch(now)

    def offer(self, now: float) -> None:
        for name, when in list(self.offered.items()):
            if now - when > 3 * self.link.flags.patience:
                del self.offered[name]
        if len(self.offered) >= OFFERS:
            return
        with self.link.spool.lock:
            waiting = [n for n in self.link.spool.waiting[self.stream] if n not in self.got and n not in self.offered]
        for name in waiting[:OFFERS - len(self.offered)]:
            data = self.link.spool.read(name)
            if data is not None:
                self.offered[name] = now
                self.send(wire.Offer(wire.manifest(name, data)))

    def handle(self, m, frames) -> None:
        self.heard = self.began = time.monotonic()
        if isinstance(m, wire.Refuse):
            self.link.error = m.why
        elif isinstance(m, wire.Welcome):
            if m.protocol != wire.PROTOCOL:
                self.link.error = f"the learner speaks protocol {m.protocol} and this sampler {wire.PROTOCOL}: bring both to one revision"
            self.session = m.session
            self.offered.clear()
            self.got.clear()
            if self.pull is not None:
                self.pull.forget_asked()
            self.link.welcome.put(m)
        elif isinstance(m, wire.Got):
            for name in m.names:
                self.offered.pop(name, None)
                self.got.add(name)
            if self.fetches and m.newest and m.newest != self.heard_of:
                self.send(wire.Want())
        elif isinstance(m, wire.Held):
            for name in m.names:
                self.offered.pop(name, None)
                self.got.discard(name)
            self.link.spool.forget([n for n in m.names if n.startswith(self.stream + "/")])
        elif isinstance(m, wire.Gone):
            if m.name == "":                               # the learner does not know this connection: say hello again
                self.session, self.beat = "", 0.0
            elif self.pull is not None and self.pull.of.name == m.name:
                self.pull = self.next_weights = None       # newer ones are out
        elif isinstance(m, wire.Offer) and self.fetches:
            try:
                m.of.check(int(self.link.flags.most_weights * 2**30))
            except wire.WireError as e:
                self.link.error = f"--most_weights: {e}"
                return
            self.next_weights, self.heard_of = m, m.of.name
        elif isinstance(m, wire.Ask):
            self.serve(m)
        elif isinstance(m, wire.Leaves) and self.pull is not None and m.name == self.pull.of.name and len(frames) == 2:
            self.pull.put(m.first, frames[1].buffer, self.heard)

    def serve(self, m: wire.Ask) -> None:
        if self.cache[0] != m.name:
            data = self.link.spool.read(m.name) if m.name.startswith(self.stream + "/") else None
            if data is None:
                return self.send(wire.Gone(m.name))
            self.cache = (m.name, data)
        self.offered[m.name] = time.monotonic()
        self.send(wire.Leaves(m.name, m.first), wire.leaves(self.cache[1], m.first, m.count))

    def fetch(self, now: float) -> None:
        """Fetch the newest weights into the store; one set at a time, whole before the next."""
        if self.pull is None and self.next_weights is not None and self.next_weights.of.root != self.have:
            offer = self.offer_at = self.next_weights
            self.part = self.link.store / f"{offer.of.root}.part"          # what an earlier attempt left of the same bytes is kept
            resume = self.part.is_file() and self.part.stat().st_size == offer.of.nbytes
            with open(self.part, "r+b" if resume else "w+b") as f:
                f.truncate(offer.of.nbytes)
                self.map = mmap.mmap(f.fileno(), offer.of.nbytes)
            self.pull = wire.Pull(offer.of, self.map, self.pace, resume)
        if self.pull is None:
            return
        while (span := self.pull.ask(now)) is not None:
            self.send(wire.Ask(self.pull.of.name, *span))
        if self.pull.done:
            self.map.flush()
            path = self.link.store / f"v{self.offer_at.version:06d}.safetensors"
            os.replace(self.part, path)
            self.pull, before, self.have = None, self.link.newest, self.offer_at.of.root
            self.link.newest = (self.offer_at.version, self.offer_at.published, path)
            for old in self.link.store.glob("v*.safetensors"):
                if old != path and (before is None or old != before[2]):
                    old.unlink()


class FilesLink:
    """The same over a shared folder (hub.FilesHub); called by the sampler between two batches. The spool is the folder itself."""

    def __init__(self, folder: str, streams: list[str], flags: Flags, spool: Spool):
        self.folder, self.streams, self.flags, self.spool = Path(folder), streams, flags, spool
        self.newest, self.error, self.session, self.welcome, self.got = None, "", "", queue.Queue(), dict.fromkeys(streams, 0)
        self.look()

    def behind(self) -> int:
        return sum(len(self.spool.waiting[s]) - min(len(self.spool.waiting[s]), self.got[s]) for s in self.streams)

    def look(self) -> None:
        try:
            m = wire.decode((self.folder / "welcome").read_bytes())
            if m.protocol != wire.PROTOCOL:
                self.error = f"the learner speaks protocol {m.protocol} and this sampler {wire.PROTOCOL}: bring both to one revision"
            if m.session != self.session:
                self.session = m.session
                self.welcome.put(m)
        except (FileNotFoundError, wire.WireError):
            return
        for stream in self.streams:
            hub.place(self.folder / "samplers" / stream, wire.encode(wire.Hello(wire.PROTOCOL, stream, self.spool.incarnation, self.session, self.spool.handed[stream], self.spool.lost[stream])))
            try:
                self.spool.forget(wire.decode((self.folder / "held" / stream).read_bytes()).names)
            except (FileNotFoundError, wire.WireError):
                pass
            try:
                got = set(wire.decode((self.folder / "got" / stream).read_bytes()).names)
                self.got[stream] = len(got.intersection(self.spool.waiting[stream]))
            except (FileNotFoundError, wire.WireError):
                self.got[stream] = 0
        try:
            offer = wire.decode((self.folder / "models" / "newest").read_bytes())
        except (FileNotFoundError, wire.WireError):
            return
        path = self.folder / "models" / offer.of.name
        if self.newest != (offer.version, offer.published, path) and path.is_file() and wire.manifest(offer.of.name, path.read_bytes()) == offer.of:
            self.newest = (offer.version, offer.published, path)

    def close(self) -> None:
        pass


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------

class SamplerSource(LocalSource):
    """A LocalSource whose groups carry this sampler's stream and incarnation, and which walks the task from a random place on."""

    def identify(self, i: int) -> tuple[int, tuple[str, int, int]]:
        return request_seed("walk", *self.owner) % 2**31 + i, (*self.owner, i)


def sample(flags: Flags) -> None:
    """Run until the learner refuses, goes away for longer than --give_up, or a signal comes. ValueError: one sentence."""
    incarnation = int(time.time() * 1000)
    link, spool, streams, folder = connect(flags, incarnation)
    try:
        welcome = first(link, flags)
        source, load = start(welcome, flags, folder)
        law, draws = delay_law(flags), 0
        until, version, counts = 0.0, None, [0] * len(streams)
        numbers, blocked, began, said = dict.fromkeys(streams, 0), 0.0, 0.0, time.monotonic()
        while not link.error:
            link.look()
            newest = link.newest
            if began and time.monotonic() - said > SAY:
                said = time.monotonic()
                print(f"{sum(counts)} groups, version {version[0]}, {link.behind()} to be fetched, {len(spool)} not held, "
                      f"blocked {100 * blocked / (said - began):.2f} % of {said - began:.0f} s", flush=True)
            if newest is None or link.behind() >= flags.spool_groups:      # the only waits there are: for the first weights, and for a learner that does not keep up
                blocked += wait(0.02)
                continue
            if newest != version and time.monotonic() >= until:
                load(newest)
                version = newest
                if law is not None:
                    u = float(uniforms(1, "delay", streams[0], incarnation, draws)[0])
                    until, draws = time.monotonic() + law.quantile(max(2.0**-53, u)), draws + 1
            began = began or time.monotonic()
            turn = streams[sum(counts) // flags.groups % len(streams)]
            source.owner = (turn, incarnation)
            groups = source.sample(range(numbers[turn], numbers[turn] + flags.groups))
            numbers[turn] += flags.groups
            counts[streams.index(turn)] += flags.groups
            for g in groups:
                data = wire.encode_group(g)
                while not link.error:
                    try:
                        spool.hand_over(turn, wire.name_of(g.uid), data)
                        break
                    except OSError as e:                                   # a full disk: nothing is lost, everything waits
                        print(f"{spool.folder}: {e.strerror}; waiting for room", flush=True)
                        blocked += wait(1.0)
        raise ValueError(link.error)
    finally:
        link.close()


def connect(flags: Flags, incarnation: int):
    """(link, spool, streams, folder of this sampler): everything that can be wrong before a model loads."""
    import tomllib
    if not flags.connect:
        raise ValueError("--connect: name the learner's address, tcp://HOST:PORT, a file of routes, or a shared folder")
    name = flags.name or (Path(flags.keys).name if flags.keys != "none" else os.uname().nodename)
    if "/" in name or "." in name:
        raise ValueError(f"--name={name}: a sampler's name has no slash and no dot")
    if flags.groups < 1 or flags.spool_groups < flags.groups:
        raise ValueError(f"--groups={flags.groups} --spool_groups={flags.spool_groups}: at least one group at once, and a spool that holds a batch")
    folder = Path(flags.spool or f"out/samplers/{name}")
    folder.mkdir(parents=True, exist_ok=True)
    lock(folder)
    if flags.connect.endswith(".toml"):
        routes = tomllib.loads(Path(flags.connect).read_text(encoding="utf-8"))
        ranks = routes.get("samplers", {}).get(name, routes.get("samplers", {}).get("*"))
        if ranks is None or any(str(r) not in routes.get("learners", {}) for r in ranks):
            raise ValueError(f"{flags.connect}: no route for {name}; it needs [learners] 0 = \"tcp://...\" and [samplers] {name} = [0]")
        addresses, streams = [routes["learners"][str(r)] for r in ranks], [f"{name}.{r}" for r in ranks]
    else:
        addresses = flags.connect.split(",")
        streams = [name] if len(addresses) == 1 else [f"{name}.{r}" for r in range(len(addresses))]
    if "://" not in addresses[0]:
        shared = Path(addresses[0])
        if not shared.is_dir():
            raise ValueError(f"--connect={flags.connect}: neither an address such as tcp://HOST:PORT nor a folder that is there")
        world = shared_world(shared, flags)
        streams = [name] if world == 1 else [f"{name}.{r}" for r in range(world)]
        spool = Spool(shared / "rollouts", streams, incarnation)
        return FilesLink(str(shared), streams, flags, spool), spool, streams, folder
    keys = None
    if flags.keys == "none":
        if not all(a.startswith(("tcp://127.0.0.1:", "tcp://localhost:", "ipc://")) for a in addresses):
            raise ValueError(f"--connect={flags.connect}: over a network keys are needed (--keys; `python hub.py keys OUT --samplers=N` makes them)")
    else:
        import zmq.auth
        if not (Path(flags.keys) / "learner.key").is_file():
            raise ValueError(f"--keys={flags.keys}: no learner.key there; copy the folder that `python hub.py keys` made for this sampler")
        keys = (*hub.own_keys(flags.keys), zmq.auth.load_certificate(Path(flags.keys) / "learner.key")[0])
    spool = Spool(folder / "spool", streams, incarnation)
    return Link(addresses, streams, flags, spool, folder, keys), spool, streams, folder


def lock(folder: Path) -> None:
    """One process a folder."""
    import fcntl
    handle = open(folder / "lock", "w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"{folder}: another sampler works there; give this one a --name or a --spool of its own") from None
    lock.handles = [*getattr(lock, "handles", []), handle]                 # held as long as the process lives


def shared_world(folder: Path, flags: Flags) -> int:
    """Ranks of the learner, once it is there."""
    start = said = time.monotonic()
    while not (folder / "welcome").is_file():
        if time.monotonic() - start > flags.give_up:
            raise ValueError(f"--connect={flags.connect}: no learner there for {flags.give_up:.0f} s; start it with --samplers=files --sync_path={folder}")
        if time.monotonic() - said > 30:
            said = time.monotonic()
            print(f"no learner at {folder} yet, waiting (at most {flags.give_up:.0f} s, --give_up)", flush=True)
        time.sleep(0.05)
    return wire.decode((folder / "welcome").read_bytes()).run["world"]


def first(link, flags: Flags) -> wire.Welcome:
    while not link.error:
        try:
            return link.welcome.get(timeout=0.05)
        except queue.Empty:
            link.look()
    raise ValueError(link.error)


def start(welcome: wire.Welcome, flags: Flags, folder: Path):
    """(source, load): engine, task and tokenizer as the learner describes them, and what puts a version into the engine."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    import quant
    from rollout import make_engine
    from runs import unpack_setup
    from sampling import Sampling
    from sync import Probe, read_tensors
    from tasks import make_task
    from config import Config
    run, model = welcome.run, folder / "model"
    unpack_setup(welcome.setup, model)
    cfg = Config(**{k: v for k, v in run["config"].items() if k in {f.name for f in fields(Config)}})
    if cfg.task != "arith":
        from hashlib import sha256
        if not flags.task or not Path(flags.task).is_file() or sha256(Path(flags.task).read_bytes()).hexdigest() != run["task_digest"]:
            raise ValueError(f"--task={flags.task}: not the learner's {cfg.task}; copy that very file here and name it with --task")
    fmt = run["config"]["rollout_quant"] if flags.rollout_quant == "auto" else flags.rollout_quant
    if run["packed"] and fmt != run["config"]["rollout_quant"]:
        raise ValueError(f"--rollout_quant={fmt}: the learner publishes {run['config']['rollout_quant']} (its --sync_dtype=quantized); use that, or let it publish float32")
    cfg = replace(cfg, task=flags.task or "arith", rollout=flags.rollout, rollout_dtype=flags.rollout_dtype, rollout_quant=fmt, rollout_memory=flags.rollout_memory)
    torch.manual_seed(0)
    skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    skeleton.save_pretrained(model)                                        # the engine starts from anything and is given its weights
    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = make_engine(cfg, str(model), run["context"], max(1, run["topk"], run["kept"]), "cuda" if torch.cuda.is_available() else "cpu")
    form = quant.format_of(fmt, cfg.quant_group)
    source = SamplerSource(engine, make_task(cfg), tokenizer, Sampling(**{**run["sampling"], "seed": cfg.seed}), group_size=cfg.group_size, topk=run["topk"], kept=run["kept"],
                           model=run["model"], probe=Probe(str(model), np.array(run["probe"], np.int64), form))

    def load(newest) -> None:
        version, published, path = newest
        tensors = read_tensors(path)
        if not run["packed"]:
            tensors = {k: x.float() if x.is_floating_point() else x for k, x in tensors.items()}
            tensors = dict(quant.published(tensors.items(), skeleton, form, engine.packed)) if form else tensors
        source.published = published
        source.load(version, tensors.items())
    return source, load


def wait(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def delay_law(flags: Flags):
    from delay import Law
    return None if flags.delay == "none" else Law(flags.delay, flags.delay_min, flags.delay_max, flags.delay_mass)


def main(argv=None) -> None:
    import tyro
    try:
        sample(tyro.cli(tyro.conf.FlagConversionOff[Flags], args=argv, use_underscores=True, prog="rollout.py"))
    except ValueError as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        pass
