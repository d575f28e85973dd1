"""A remote sampler: its flags and its loop. HeteroRL, section 4.2; hub.py is the learner's end.

    python rollout.py --connect=tcp://LEARNER:5555 --keys=keys/sampler0                # on any host, at any time; --help lists the flags
    python rollout.py --connect=/shared/run                                            # over a shared folder

Everything but the engine's flags comes from the learner: the model's configuration and tokenizer, the law to sample from, the task; with --model, another
model samples. Two threads do not wait for each other: the main one samples with the newest weights that are here whole, hands each group over to the spool
(a file, written whole: from here on it is accounted for) and goes on; the link offers what is in the spool until the learner holds it, and
fetches new weights into the store meanwhile. Killed and started again, a sampler offers what its spool still holds and
goes on under a new incarnation. It walks the task in an order of its own, so samplers need not know of each other.
"""

from __future__ import annotations

import os
import queue
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np

from remote import wire
from remote.account import Spool
from delay import DelayDistribution, check
from remote.files import FilesLink, shared_world
from remote.keys import sampler_keys
from remote.link import Link
from rollout import LocalSource, request_seed, uniforms

SAY = 10.0  # seconds between two lines on the screen


@dataclass(frozen=True)
class Flags:
    connect: str = ""
    """Address of the learner, tcp://HOST:PORT (with several ranks one for each, by commas), a TOML file of routes, or a shared folder."""
    keys: str = "none"
    """This machine's folder of keys (keys.py makes them); none: in the clear, for addresses of this host only."""
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
    """Stop sampling for a rank of the learner when so many wait to be fetched by it. Fetched ones stay on disk until a checkpoint holds them."""
    model: str = ""
    """Folder of a model of this host's own, a smaller one say, that samples with the weights it has; default: the learner's model and weights."""
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
# The loop
# ---------------------------------------------------------------------------------------------------------------------


class SamplerSource(LocalSource):
    """A LocalSource whose groups controllers this sampler's stream and incarnation, and which walks the task from a random place on."""

    def identify(self, i: int) -> tuple[int, tuple[str, int, int]]:
        return request_seed("walk", *self.owner) % 2**31 + i, (*self.owner, i)


def sample(flags: Flags) -> None:
    """Run until the learner refuses, goes away for longer than --give_up, or a signal comes. ValueError: one sentence."""
    incarnation = int(time.time() * 1000)
    link, spool, streams, folder = connect(flags, incarnation)
    try:
        welcome = first(link)
        source, load = start(welcome, flags, folder)
        draws, until, version = 0, 0.0, None
        numbers, busy, loading, began, said = dict.fromkeys(streams, 0), 0.0, 0.0, 0.0, time.monotonic()
        while not link.error:
            same_run(link, welcome)
            newest = link.newest
            if began and time.monotonic() - said > SAY:
                said = time.monotonic()
                open_for = said - began - loading
                print(
                    f"{sum(numbers.values())} groups, version {version[0]}, {sum(map(link.behind, streams))} to be fetched, {len(spool)} not held, "
                    f"blocked {100 * (1 - busy / open_for):.2f} % of {open_for:.0f} s",
                    flush=True,
                )
            hungry = [s for s in streams if link.behind(s) < flags.spool_groups]
            if (
                newest is None or not hungry
            ):  # the only waits there are: for the first weights, and for a learner that does not keep up
                time.sleep(0.02)
                continue
            if newest != version and time.monotonic() >= until:
                at = time.monotonic()
                try:
                    load(newest)
                except FileNotFoundError:  # newer ones have replaced them: the link will say so
                    time.sleep(0.02)
                    continue
                version, loading = newest, loading + time.monotonic() - at
                if flags.delay != "none":
                    u = float(uniforms(1, "delay", streams[0], incarnation, draws)[0])
                    until, draws = (
                        time.monotonic()
                        + DelayDistribution(flags.delay, flags.delay_min, flags.delay_max, flags.delay_mass).quantile(
                            max(2.0**-53, u)
                        ),
                        draws + 1,
                    )
            if not began:  # the first weights are in
                began, loading = time.monotonic(), 0.0
            turn, at = min(hungry, key=numbers.get), time.monotonic()  # the ranks in turn, but for one that has enough
            source.owner = (turn, incarnation)
            groups = [
                (g, wire.encode_group(g)) for g in source.sample(range(numbers[turn], numbers[turn] + flags.groups))
            ]
            busy += time.monotonic() - at  # the rest of the time is the transport's: handing over, waiting, looking
            numbers[turn] += flags.groups
            for g, data in groups:
                while not link.error:
                    try:
                        spool.hand_over(turn, wire.name_of(g.uid), data)
                        break
                    except OSError as e:  # a full disk: nothing is lost, everything waits
                        print(f"{spool.folder}: {e.strerror}; waiting for room", flush=True)
                        time.sleep(1.0)
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
    check(flags)
    if flags.groups < 1 or flags.spool_groups < flags.groups:
        raise ValueError(
            f"--groups={flags.groups} --spool_groups={flags.spool_groups}: at least one group at once, and a spool that holds a batch"
        )
    folder = Path(flags.spool or f"out/samplers/{name}")
    folder.mkdir(parents=True, exist_ok=True)
    lock(folder)
    if flags.connect.endswith(".toml"):
        try:
            routes = tomllib.loads(Path(flags.connect).read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as e:
            raise ValueError(f"--connect={flags.connect}: no file of routes ({e})") from None
        ranks = routes.get("samplers", {}).get(name, routes.get("samplers", {}).get("*"))
        if ranks is None or any(str(r) not in routes.get("learners", {}) for r in ranks):
            raise ValueError(
                f'{flags.connect}: no route for {name}; it needs [learners] 0 = "tcp://..." and [samplers] {name} = [0]'
            )
        addresses, streams = [routes["learners"][str(r)] for r in ranks], [f"{name}.{r}" for r in ranks]
    else:
        addresses = flags.connect.split(",")
        streams = [name] if len(addresses) == 1 else [f"{name}.{r}" for r in range(len(addresses))]
    if "://" not in addresses[0]:
        shared = Path(addresses[0])
        if not shared.is_dir():
            raise ValueError(
                f"--connect={flags.connect}: neither an address such as tcp://HOST:PORT nor a folder that is there"
            )
        world = shared_world(shared, flags)
        if not flags.connect.endswith(".toml") or world == 1:
            streams = [name] if world == 1 else [f"{name}.{r}" for r in range(world)]
        spool = Spool(shared / "rollouts", streams, incarnation)
        return FilesLink(str(shared), streams, flags, spool), spool, streams, folder
    for address in addresses:
        if address.startswith("tcp://") and not address.rpartition(":")[2].isdigit():
            raise ValueError(f"--connect={address}: no port; write tcp://HOST:PORT")
    keys = None
    if flags.keys == "none":
        if not all(a.startswith(("tcp://127.0.0.1:", "tcp://localhost:", "ipc://")) for a in addresses):
            raise ValueError(
                f"--connect={flags.connect}: over a network keys are needed (--keys; `python keys.py OUT --samplers=N` makes them)"
            )
    else:
        keys = sampler_keys(flags.keys)
    spool = Spool(folder / "spool", streams, incarnation)
    return Link(addresses, streams, flags, spool, folder, keys), spool, streams, folder


def lock(folder: Path) -> None:
    """One process a folder."""
    import fcntl

    handle = open(folder / "lock", "w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(
            f"{folder}: another sampler works there; give this one a --name or a --spool of its own"
        ) from None
    lock.handles = [*getattr(lock, "handles", []), handle]  # held as long as the process lives


def first(link) -> wire.Welcome:
    while not link.error:
        try:
            return link.welcome.get(timeout=0.05)
        except queue.Empty:
            pass
    raise ValueError(link.error)


def same_run(link, welcome: wire.Welcome) -> None:
    """ValueError if the learner has started anew and wants something else."""
    while not link.welcome.empty():
        now = link.welcome.get()
        changed = [k for k in {**welcome.run, **now.run} if welcome.run.get(k) != now.run.get(k)] + (
            ["model's configuration or tokenizer"] if now.setup != welcome.setup else []
        )
        if changed:
            raise ValueError(
                f"the learner started anew and asks for something else (its {', '.join(changed)}): start this sampler again"
            )


def start(welcome: wire.Welcome, flags: Flags, folder: Path):
    """(source, load): engine, task and tokenizer as the learner describes them, and what puts a version into the engine."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    import quant
    from engines import make_engine
    from run import unpack_setup
    from sampling import Sampling
    from sync import Probe, read_tensors
    from tasks import make_task
    from config import Config

    run, model = welcome.run, folder / "model"
    unpack_setup(welcome.setup, model)
    cfg = Config(**{k: v for k, v in run["config"].items() if k in {f.name for f in fields(Config)}})
    if cfg.task != "arith":
        from hashlib import sha256

        if (
            not flags.task
            or not Path(flags.task).is_file()
            or sha256(Path(flags.task).read_bytes()).hexdigest() != run["task_digest"]
        ):
            raise ValueError(
                f"--task={flags.task}: not the learner's {cfg.task}; copy that very file here and name it with --task"
            )
    fmt = run["config"]["rollout_quant"] if flags.rollout_quant == "auto" else flags.rollout_quant
    if run["packed"] and fmt != run["config"]["rollout_quant"]:
        raise ValueError(
            f"--rollout_quant={fmt}: the learner publishes {run['config']['rollout_quant']} (its --sync_dtype=quantized); use that, or let it publish float32"
        )
    cfg = replace(
        cfg,
        task=flags.task or "arith",
        rollout=flags.rollout,
        rollout_dtype=flags.rollout_dtype,
        rollout_quant=fmt,
        rollout_memory=flags.rollout_memory,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    if flags.model:
        check_own(flags.model, tokenizer, AutoConfig.from_pretrained(model), run["context"])
    torch.manual_seed(0)
    skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    skeleton.save_pretrained(model)  # the engine starts from anything and is given its weights
    engine = make_engine(
        cfg,
        flags.model or str(model),
        run["context"],
        max(1, run["topk"], run["kept"]),
        "cuda" if torch.cuda.is_available() else "cpu",
    )
    form = quant.format_of(fmt, cfg.quant_group)
    source = SamplerSource(
        engine,
        make_task(cfg),
        tokenizer,
        Sampling(**{**run["sampling"], "seed": cfg.seed}),
        group_size=cfg.group_size,
        topk=run["topk"],
        kept=run["kept"],
        model=Path(flags.model).name if flags.model else run["model"],
        probe=Probe(str(model), np.array(run["probe"], np.int64), form),
    )

    def load(newest) -> None:
        version, published, path = newest
        if flags.model:  # it stays what it is, and its groups say how new the learner was
            source.version, source.published = version, published
            return
        tensors = read_tensors(path)
        if run["packed"] and not engine.packed:
            tensors = quant.load_quantized(skeleton, tensors)
        if not run["packed"]:
            tensors = {k: x.float() if x.is_floating_point() else x for k, x in tensors.items()}
            tensors = dict(quant.for_engine(tensors.items(), skeleton, form, engine.packed)) if form else tensors
        source.published = published
        source.load(version, tensors.items())

    return source, load


def check_own(folder: str, tokenizer, config, context: int) -> None:
    """ValueError unless a model of this host's own speaks the learner's language."""
    from transformers import AutoConfig, AutoTokenizer

    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"--model={folder}: no Hugging Face model folder (no config.json there)")
    own = AutoConfig.from_pretrained(folder)
    if (
        own.vocab_size != config.vocab_size
        or AutoTokenizer.from_pretrained(folder).get_vocab() != tokenizer.get_vocab()
    ):
        raise ValueError(
            f"--model={folder}: its tokenizer or vocabulary differs from the learner's; a sampler must share them"
        )
    if own.max_position_embeddings < context:
        raise ValueError(
            f"--model={folder}: a context of {own.max_position_embeddings} tokens, and the learner asks for {context}"
        )


def main(argv=None) -> None:
    import tyro

    try:
        sample(tyro.cli(tyro.conf.FlagConversionOff[Flags], args=argv, use_underscores=True, prog="rollout.py"))
    except ValueError as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        pass
