"""The files of test_bad_input.py: damaged, foreign, unreadable or misnamed.

FILES: name -> text, bytes, a folder (a dict of the same), or a function of the path that makes the file.
"""

import fcntl
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from config import EMBEDDED, Config
from remote.keys import make_keys

GOOD = '{"problem": "1 + 1 :", "answer": "2"}\n'
OWN = """
class Small:
    size = 3

class Wide:
    size = None

    def problem(self, split, index):
        return {"prompt": "p", "answer": 1}

    def reward(self, row, text, finish_reason):
        return 1.0

def raises(row, text, finish_reason):
    return 1 / 0

def text(row, text, finish_reason):
    return text
"""
ROW = '{"step": 0, "reward": 0.5}\n'
MODELS: dict[str, Path] = {}  # POLICY and ACTOR: complete model folders
HELD = []  # files and sockets that a row's second process holds


def model(change=None, **config):
    """A copy of the policy's folder. change: a function applied to the copy; config: changes of config.json."""

    def make(path: Path) -> None:
        shutil.copytree(MODELS["POLICY"], path)
        data = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**data, **config}))
        if change:
            change(path)

    return make


def without(*names: str):
    return lambda folder: [path.unlink() for name in names for path in folder.glob(name)]


def holding(name: str, content):
    return lambda folder: make_file(folder / name, content)


def cut(name: str, size: int):
    return lambda folder: os.truncate(folder / name, size)


def keys_of(owner: str, change=None):
    """The folder of keys of `owner`: "learner" or "sampler0". change: a function applied to the folder."""

    def make(path: Path) -> None:
        make_keys(str(path / "all"), 1)
        for part in (path / "all" / owner).iterdir():
            part.rename(path / part.name)
        shutil.rmtree(path / "all")
        if change:
            change(path)

    return make


def only_public(folder: Path) -> None:
    secret = folder / "sampler0.key_secret"
    secret.write_text((folder / "learner.key").read_text())


def locked(path: Path) -> None:
    """A folder locked by a different process."""
    path.mkdir()
    lock = open(path / "lock", "w")  # noqa: SIM115  closed after the row
    fcntl.flock(lock, fcntl.LOCK_EX)
    HELD.append(lock)


def unreadable(content):
    def make(path: Path) -> None:
        make_file(path, content)
        path.chmod(0)

    return make


def read_only(path: Path) -> None:
    path.mkdir()
    path.chmod(0o555)


def shuffled_words(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<spare0>", "<changed>"))


FLAGS = {**asdict(Config(model="base:policy", rollout="hf")), **EMBEDDED}
RUN = json.dumps({"config": FLAGS, "command": "train.py"})
RUN_OF_POLICY = json.dumps({"config": {**FLAGS, "model": "POLICY", "actor": "none"}, "command": "train.py"})
DAMAGED = {"digests.json": '{"policy/config.json": "00"}', "policy": {"config.json": "{}"}}
RESPONSE = {"step": 0, "prompt": "1", "reward": 1.0, "finish_reason": "stop", "gap": 0.0}
RESPONSE |= {"tokens": ["1"], "gaps": [0.0], "largest": []}
FILES = {
    # problems
    "fine.jsonl": GOOD,
    "empty.jsonl": "",
    "blank.jsonl": "\n \n\n",
    "cut.jsonl": GOOD + '{"problem": "1 +',
    "list.jsonl": GOOD + "[1, 2]\n",
    "array.jsonl": f"[\n{GOOD}]",
    "cut.json": f"[\n{GOOD},\n{GOOD}",
    "no_answer.jsonl": GOOD + '{"problem": "1 + 1"}\n',
    "no_problem.jsonl": GOOD + GOOD + '{"answer": "1"}\n',
    "empty_problem.jsonl": '{"problem": " ", "answer": "1"}\n',
    "number_problem.jsonl": '{"problem": 3, "answer": "1"}\n',
    "array.json": '{"problem": "1 + 1", "answer": "2"}\n',
    "fine.parquet": "PAR1, it says",
    "own.py": OWN,
    "chat_problem.jsonl": '{"problem": [{"role": "user", "content": 2}], "answer": "2"}\n',
    "other_keys.jsonl": '{"prompt": "1 + 1", "solution": "2"}\n',
    "capitals.jsonl": '{"PROBLEM": "1 + 1", "ANSWER": "2"}\n',
    "list_answer.jsonl": '{"problem": "1", "answer": [1]}\n',
    "null_answer.jsonl": '{"problem": "1", "answer": null}\n',
    "true_answer.jsonl": '{"problem": "1", "answer": true}\n',
    "nan_answer.jsonl": '{"problem": "1", "answer": NaN}\n',
    "infinite_answer.jsonl": '{"problem": "1", "answer": -1e400}\n',
    "hashes_answer.jsonl": '{"problem": "1", "answer": "so ####  "}\n',
    "surrogate.jsonl": '{"problem": "\\ud800", "answer": "1"}\n',
    "surrogate_answer.jsonl": GOOD + '{"problem": "1", "answer": "\\udfff"}\n',
    "null.jsonl": GOOD + "null\n",
    "text.jsonl": '"1 + 1"\n',
    "no_comma.jsonl": '{"problem": "1" "answer": "1"}\n',
    "python_quotes.jsonl": "{'problem': '1', 'answer': '1'}\n",
    "brackets.jsonl": "[" * 100_000,
    "digits.jsonl": '{"problem": "1", "answer": ' + "9" * 5000 + "}\n",
    "long.jsonl": GOOD + '{"problem": "' + "1 + " * 500 + '", "answer": "1"}\n',
    "table.csv": "problem,answer\n1 + 1,2\n",
    "utf16.jsonl": GOOD.encode("utf-16"),
    "latin1.jsonl": GOOD.encode() + b'{"problem": "caf\xe9", "answer": "1"}\n',
    "packed.jsonl.gz": b"\x1f\x8b\x08\x00\x00",
    "unreadable.jsonl": unreadable(GOOD),
    # configurations
    "cut.toml": "steps = ",
    "two_lines.toml": "lr = 1e-3\nsteps 3\n",
    "twice.toml": "lr = 1e-3\nlr = 1e-4\n",
    "near.toml": "stps = 3",
    "far.toml": "critic_warmup = 8",
    "section.toml": "[RunFlags]\nlr = 1e-3\n",
    "include.toml": 'config = "other.toml"',
    "bom.toml": "\ufeffstps = 3",
    "utf16.toml": "lr = 1".encode("utf-16"),
    "zeros.toml": "\x00\x00\x00",
    "json.toml": '{"lr": 1e-3}',
    "yaml.toml": "lr: 1e-3",
    "flags.toml": "--lr=1e-3",
    "text_steps.toml": "steps = 'x'",
    "true_steps.toml": "steps = true",
    "float_steps.toml": "steps = 1.5",
    "text_lr.toml": "lr = 'x'",
    "true_lr.toml": "lr = true",
    "list_lr.toml": "lr = [1e-3, 1e-4]",
    "date_lr.toml": "lr = 2024-01-01",
    "inf_lr.toml": "lr = inf",
    "nan_clip.toml": "grad_clip = nan",
    "long_lr.toml": "lr = " + "9" * 400,
    "long_steps.toml": "steps = " + "9" * 30,
    "digits.toml": "steps = " + "9" * 5000,
    "text_cap.toml": "is_cap = 'x'",
    "one_clip.toml": "clip = 1",
    "number_correction.toml": "correction = 1",
    "number_model.toml": "model = 3",
    "choice.toml": "rollout = 'hff'",
    "list_choice.toml": "rollout = ['vllm']",
    "objective.toml": "objective = 'jackpt'",
    "bound.toml": "temperature = 0",
    "unreadable.toml": unreadable("lr = 1"),
    # model folders
    "no_config": {"model.safetensors": "x"},
    "only_config": {"config.json": '{"model_type": "qwen3"}'},
    "config_cut": model(holding("config.json", '{"model_type": "qwe')),
    "config_list": model(holding("config.json", "[]")),
    "config_number": model(holding("config.json", "3")),
    "config_empty": model(holding("config.json", "")),
    "config_utf16": model(holding("config.json", "{}".encode("utf-16"))),
    "config_untyped": model(holding("config.json", "{}")),
    "new_type": model(model_type="nosuch"),
    "t5_type": model(model_type="t5"),
    "text_vocabulary": model(vocab_size="many"),
    "negative_vocabulary": model(vocab_size=-3),
    "small_vocabulary": model(vocab_size=100),
    "text_context": model(max_position_embeddings="long"),
    "short_context": model(max_position_embeddings=10),
    "text_width": model(hidden_size="wide"),
    "wider": model(hidden_size=64),
    "deeper": model(num_hidden_layers=3, layer_types=["full_attention"] * 3),
    "layers_of_two_numbers": model(num_hidden_layers=9),
    "new_activation": model(hidden_act="nosuch"),
    "new_dtype": model(dtype="nosuch"),
    "gptq": model(quantization_config={"quant_method": "gptq", "bits": 4}),
    "no_tokenizer": model(without("tokenizer*")),
    "tokenizer_cut": model(cut("tokenizer.json", 99)),
    "tokenizer_utf16": model(holding("tokenizer.json", "{}".encode("utf-16"))),
    "tokenizer_empty": model(holding("tokenizer.json", "{}")),
    "tokenizer_config_cut": model(cut("tokenizer_config.json", 9)),
    "other_words": model(shuffled_words),
    "ends_cut": model(holding("generation_config.json", "{")),
    "ends_text": model(holding("generation_config.json", '{"eos_token_id": "</s>"}')),
    "ends_list": model(holding("generation_config.json", "[2]")),
    "no_weights": model(without("model.safetensors")),
    "weights_empty": model(cut("model.safetensors", 0)),
    "weights_cut": model(cut("model.safetensors", 5000)),
    "weights_html": model(holding("model.safetensors", "<html>404: Not Found</html>")),
    "weights_pointer": model(holding("model.safetensors", "version https://git-lfs.github.com/spec/v1\n")),
    "weights_unreadable": model(lambda folder: (folder / "model.safetensors").chmod(0)),
    "index_cut": model(holding("model.safetensors.index.json", "{")),
    "index_empty": model(holding("model.safetensors.index.json", "{}")),
    "shard_missing": model(
        holding("model.safetensors.index.json", '{"weight_map": {"a": "model-00001-of-2.safetensors"}}')
    ),
    # run folders
    "file": "not a folder",
    "read_only": read_only,
    "locked": locked,
    "run": {"config.json": RUN, "metrics.jsonl": ROW},
    "run_of_a_model": {"config.json": '{"model_type": "qwen3"}', "notes.txt": "mine"},
    "config_damaged": {"config.json": RUN[:99], "metrics.jsonl": ROW},
    "notes": {"notes.txt": "mine", "checkpoints": {"mine": "precious"}},
    "run_cut": {"config.json": RUN[:99]},
    "run_of_lists": {"config.json": "[]"},
    "run_without_flags": {"config.json": '{"command": "train.py"}'},
    "run_of_text": {"config.json": RUN.replace('"steps": 150', '"steps": "many"')},
    "run_of_old_choices": {"config.json": RUN.replace('"rollout": "hf"', '"rollout": "sglang"')},
    "run_in_utf16": {"config.json": RUN.encode("utf-16")},
    "run_spoilt": {
        "config.json": RUN_OF_POLICY,
        "checkpoints": {"step_000002": DAMAGED, "step_000004": DAMAGED},
    },
    # metrics and responses
    "metrics_empty": {"metrics.jsonl": ""},
    "metrics_blank": {"metrics.jsonl": "\n\n"},
    "metrics_junk": {"metrics.jsonl": "junk\n" * 50},
    "metrics_binary": {"metrics.jsonl": b"\xff\x00\n" * 50},
    "metrics_of_lists": {"metrics.jsonl": "[1]\n" * 3},
    "metrics_text_step": {"metrics.jsonl": '{"step": "x", "reward": 1}\n' * 3},
    "metrics_no_step": {"metrics.jsonl": '{"reward": 1}\n' * 3},
    "metrics_text": {"metrics.jsonl": ROW + '{"step": 1, "reward": "high"}\n'},
    "metrics_list": {"metrics.jsonl": ROW + '{"step": 1, "entropy": [1.0]}\n'},
    "metrics_truth": {"metrics.jsonl": ROW + '{"step": 7, "grad_norm": true}\n'},
    "metrics_folder": {"metrics.jsonl": {"x": "y"}},
    "metrics_unreadable": {"metrics.jsonl": unreadable(ROW)},
    "responses_empty": {"samples.jsonl": ""},
    "responses_junk": {"samples.jsonl": "junk\n" * 9},
    "responses_metrics": {"samples.jsonl": ROW},
    "responses_text": {"samples.jsonl": json.dumps({**RESPONSE, "reward": "high"}) + "\n"},
    "responses_null": {"samples.jsonl": json.dumps({**RESPONSE, "tokens": None}) + "\n"},
    "responses_uneven": {"samples.jsonl": json.dumps({**RESPONSE, "gaps": [0.0, 1.0]}) + "\n"},
    "responses": {"samples.jsonl": json.dumps(RESPONSE) + "\n"},
    # keys
    "keys_learner": keys_of("learner"),
    "keys_open": keys_of("learner", lambda folder: (folder / "learner.key_secret").chmod(0o644)),
    "keys_two": keys_of("learner", lambda folder: shutil.copy(folder / "learner.key_secret", folder / "b.key_secret")),
    "keys_cut": keys_of("learner", cut("learner.key_secret", 200)),
    "keys_nobody": keys_of("learner", without("samplers/*")),
    "keys_sampler": keys_of("sampler0"),
    "keys_sampler_open": keys_of("sampler0", lambda folder: (folder / "sampler0.key_secret").chmod(0o640)),
    "keys_sampler_junk": keys_of("sampler0", holding("learner.key", "junk")),
    "keys_sampler_short": keys_of("sampler0", holding("learner.key", 'metadata\ncurve\n    public-key = "short"\n')),
    "keys_sampler_empty": keys_of("sampler0", holding("sampler0.key_secret", "")),
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
        path.write_text(content.replace('"POLICY"', json.dumps(str(MODELS["POLICY"]))))
