"""The files of test_bad_input.py: damaged, foreign, unreadable or misnamed.

FILES: name -> text, bytes, a folder (a dict of the same), or a function of the path that makes the file.
"""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from config import EMBEDDED, Config
from machinery.settings import digest_of_flags
from remote.keys import make_keys

GOOD = '{"problem": "1 + 1 :", "answer": "2"}\n'
ROW = '{"step": 0, "reward": 0.5}\n'
MODELS: dict[str, Path] = {}  # POLICY and ACTOR: complete model folders


def model(change=None, **config):
    """A copy of the policy's folder. change: a function applied to the copy; config: changes of config.json."""

    def make(path: Path) -> None:
        shutil.copytree(MODELS["POLICY"], path)
        data = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**data, **config}))
        if change:
            change(path)

    return make


def without(names: str):
    return lambda folder: [path.unlink() for path in folder.glob(names)]


def holding(name: str, content):
    return lambda folder: make_file(folder / name, content)


def cut(name: str, size: int):
    return lambda folder: os.truncate(folder / name, size)


def keys_of(owner: str, change=None):
    """The folder of keys of `owner`: "learner" or "sampler0". change: a function applied to the folder."""

    def make(path: Path) -> None:
        all_keys = path.with_name("all keys")
        make_keys(str(all_keys), 1)
        (all_keys / owner).rename(path)
        shutil.rmtree(all_keys)
        if change:
            change(path)

    return make


def only_public(folder: Path) -> None:
    shutil.copy(folder / "learner.key", folder / "sampler0.key_secret")


def unreadable(path: Path) -> None:
    path.touch(0)


def read_only(path: Path) -> None:
    path.mkdir()
    path.chmod(0o555)


def shuffled_words(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<spare0>", "<changed>"))


FLAGS = {**asdict(Config(model="base:policy", rollout="hf")), **EMBEDDED}


def run_of(**changes) -> str:
    """The config.json of a run with these flags."""
    changed = {**FLAGS, **changes}
    return json.dumps({"config": changed, "command": "train.py", "config_digest": digest_of_flags(changed)})


RUN = run_of()
DAMAGED = {"learner.pt": "cut", "policy": {"config.json": "{}"}}
FILES = {
    # problems
    "fine.jsonl": GOOD,
    "empty.jsonl": "",
    "cut.jsonl": GOOD + '{"problem": "1 +',
    "cut.json": f"[\n{GOOD},\n{GOOD}",
    "no_answer.jsonl": GOOD + '{"problem": "1 + 1"}\n',
    "fine.parquet": "PAR1, it says",
    "own.py": "x = 1\n",
    "brackets.jsonl": "[" * 100_000,
    "packed.jsonl.gz": b"\x1f\x8b\x08\x00\x00",
    "latin1.jsonl": GOOD.encode() + b'{"problem": "caf\xe9", "answer": "1"}\n',
    # configurations
    "cut.toml": "steps = ",
    "unreadable.toml": unreadable,
    # model folders
    "no_config": {"model.safetensors": "x"},
    "config_cut": model(holding("config.json", '{"model_type": "qwe')),
    "new_type": model(model_type="nosuch"),
    "small_vocabulary": model(vocab_size=100),
    "wider": model(hidden_size=64),
    "no_tokenizer": model(without("tokenizer*")),
    "other_words": model(shuffled_words),
    "no_weights": model(without("model.safetensors")),
    "weights_cut": model(cut("model.safetensors", 5000)),
    # run folders
    "file": "not a folder",
    "read_only": read_only,
    "run": {"config.json": RUN, "metrics.jsonl": ROW},
    "run_of_a_model": {"config.json": '{"model_type": "qwen3"}', "notes.txt": "mine"},
    "answers": {"x.responses.jsonl": "mine"},
    "notes": {"notes.txt": "mine", "checkpoints": {"mine": "precious"}},
    "run_spoilt": lambda path: make_file(
        path,
        {"config.json": run_of(model=str(MODELS["POLICY"]), actor="none"), "checkpoints": {"step_000002": DAMAGED}},
    ),
    # metrics
    "metrics_junk": {"metrics.jsonl": "junk\n" * 50},
    # keys
    "keys_learner": keys_of("learner"),
    "keys_cut": keys_of("learner", cut("learner.key_secret", 200)),
    "keys_sampler_public": keys_of("sampler0", only_public),
}


def make_file(path: Path, content) -> None:
    if callable(content):
        content(path)
    elif isinstance(content, dict):
        path.mkdir()
        for name, inner in content.items():
            make_file(path / name, inner)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content)
