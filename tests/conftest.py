"""Shared by the suite: tiny models with random weights, shared vLLM engines, hand-made groups."""

import gc
import json
import math
import os
import random
import shutil
import sys
import weakref
from dataclasses import make_dataclass, replace
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # the values of make and train.py
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import batching
import config
import quant
from machinery import plot, settings
from model import Needs, TokenStats
from objectives import StepStats
from rollout import Response, Rollout, Sampling
from tasks.arith import VOCAB, arithmetic_tokenizer

f64 = torch.float64
LN = math.log

# -- Models and engines -----------------------------------------------------------------------------------------------


def tiny_model(seed: int, layers: int = 1, hidden: int = 32, std: float = 0.3, tie: bool = True, dtype=torch.float32):
    """A Qwen3-shaped model with large random weights: its distribution is far from uniform.

    In float64 it uses torch's RMSNorm: transformers' RMSNorm rounds to float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = dict(vocab_size=VOCAB, hidden_size=hidden, intermediate_size=64, num_hidden_layers=layers)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32, tie_word_embeddings=tie)
    ends = dict(max_position_embeddings=128, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    model = Qwen3ForCausalLM(Qwen3Config(initializer_range=std, **sizes, **heads, **ends)).to(dtype)
    if dtype == torch.float64:
        for parent in list(model.modules()):
            for name, norm in list(parent.named_children()):
                if type(norm).__name__ == "Qwen3RMSNorm":
                    setattr(parent, name, torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=dtype))
    return model


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders of a tiny policy, a tiny actor and an untied model, in the format of save_pretrained."""
    root = tmp_path_factory.mktemp("models")
    models = {"policy": tiny_model(0, layers=2), "actor": tiny_model(1), "untied": tiny_model(2, tie=False)}
    for name, model in models.items():
        model.save_pretrained(root / name)
        arithmetic_tokenizer().save_pretrained(root / name)
    return root


TINY_TASK = {"arith": "min_ops=1,max_ops=1,operand=3,total=9"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """name -> the cache folder of the hub's model of this name, offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def snapshot(name: str) -> Path:
        cached = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0123abcd")
        (cached / "snapshots").mkdir()
        return cached / "snapshots" / "0123abcd"

    return snapshot


@pytest.fixture(scope="session")
def solvers():
    """A policy and an actor that solve half of the sums of TINY_TASK, so RL can improve them (make_solvers.py)."""
    return ROOT / "tests" / "solvers"


@pytest.fixture(scope="session")
def vllm_engines(folders):
    """vLLM engines of the tiny actor by their settings, each started once, with the weights of its folder.

    The first engine that closes ends the process group: all stay open until the end."""
    from model import in_vllm
    from model.engines import VLLMEngine

    in_vllm.import_vllm()
    from vllm.model_executor.models import registry

    # a subprocess would import vLLM again for 10 s
    registry._run_in_subprocess = lambda inspect: inspect()
    engines = {}

    def get(**settings):
        key = tuple(sorted(settings.items()))
        if key not in engines:
            default = {"folder": str(folders / "actor"), "max_len": 64, "max_logprobs": 20}
            engines[key] = VLLMEngine(**{**default, **settings})
        engine, model = engines[key], tiny_model(1)
        if engine.loads and "folder" not in settings:  # by an earlier test
            state = model.state_dict().items()
            engine.load(quant.for_engine(state, model, engine.fmt, engine.packed) if engine.fmt else state)
        return engine

    yield get
    with patch("gc.collect"):
        engines.clear()


@pytest.fixture
def vllm_engine(vllm_engines):
    """The suite's default engine: float32, processed log-probabilities."""
    return vllm_engines()


@pytest.fixture(params=["hf", "vllm"])
def engine(request, folders):
    """Each engine with the tiny actor's weights."""
    from model.engines import HFEngine

    if request.param == "hf":
        return HFEngine(str(folders / "actor"))
    return request.getfixturevalue("vllm_engine")


class Stream:
    """Named tensors, by default made on request, and the largest number of them alive at a time."""

    def __init__(self, named_tensors=None, n=12, numbers=1 << 18, add=0.0, dtype=torch.float32):
        self.named_tensors = named_tensors
        self.made = [(f"t{i}", dict(size=(numbers,), fill_value=float(i + add), dtype=dtype)) for i in range(n)]
        self.passes = self.most = 0
        self.alive = weakref.WeakSet()

    def __iter__(self):
        self.passes += 1
        for name, x in self.named_tensors or ((name, torch.full(**its)) for name, its in self.made):
            self.alive.add(x)
            self.most = max(self.most, len(self.alive))
            yield name, x


class Held(TorchDispatchMode):
    """The largest number of bytes of tensors alive at a time, over all of torch's operations in this context."""

    def __init__(self):
        super().__init__()
        self.most, self.alive = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                storage = x.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self.alive.values()))
        return out


# -- Configurations and batches ---------------------------------------------------------------------------------------


def make_cfg(**changes) -> config.Config:
    """A resolved configuration for unit tests: one model unless an actor is named."""
    small = {"actor": "none", "rollout": "hf", "train_batch": 8, "rollout_batch": 8, "group_size": 4}
    small |= {**config.EMBEDDED, "micro_tokens": config.MICRO_TOKENS}  # for folders and on a GPU too
    return settings.resolve(config.Config(**{**small, **changes}), n_ranks=1)


@pytest.fixture(autouse=True)
def same_draws():
    """Draws from global generators do not depend on earlier tests."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """A run in this process draws no curves, because that takes long; test_train checks those of another process."""
    monkeypatch.setattr(plot, "draw", lambda runs, out: out)


class One:
    """A comm of one rank."""

    @staticmethod
    def sum(values):
        return [float(x) for x in values]

    max = sum

    @staticmethod
    def cat(x):
        return x


COLUMNS = "logp_ref logp_inf mask adv group mask_uniforms support_logp support_logp_ref tail_ref z_ref"
COLUMNS += " actor_logp_ref logp_start staleness"


class TinyBatch(make_dataclass("Columns", [(name, torch.Tensor, None) for name in COLUMNS.split()])):
    """A stand-in for Batch with the fields that objectives read."""

    @property
    def log_r(self):
        return self.logp_ref - self.logp_inf


# r = 2, 1/2, 1 in the first response (product 1), 4, 4, 4 in the second (product 64, geometric mean 4)
LOG_R = [[LN(2), -LN(2), 0.0], [LN(4), LN(4), LN(4)]]
STATS = StepStats(tokens=6.0, sequences=2.0, lam=1.0, kappa=1.0, distill_lambda=0.0)


def tiny(log_r, mask=None, adv=(1.0, -1.0), new=None, ref=None) -> tuple[TokenStats, TinyBatch]:
    """(policy now, batch) of two responses of three tokens in float64.

    logp_ref: -1 unless given. logp_inf = logp_ref - log_r. new: ref unless given, with gradient."""
    log_r = torch.tensor(log_r, dtype=f64)
    ref = torch.full_like(log_r, -1.0) if ref is None else torch.tensor(ref, dtype=f64)
    mask = torch.ones_like(log_r, dtype=torch.bool) if mask is None else torch.tensor(mask)
    new = ref if new is None else torch.tensor(new, dtype=f64)
    batch = TinyBatch(
        logp_ref=ref,
        logp_inf=ref - log_r,
        mask=mask,
        adv=torch.tensor(adv, dtype=f64)[:, None],
        mask_uniforms=torch.full_like(log_r, 0.5),
        support_logp=(ref - log_r)[..., None],
        support_logp_ref=ref[..., None],
        z_ref=torch.full_like(log_r, 0.9),
    )
    return TokenStats(new.clone().requires_grad_()), batch


def make_groups(n_groups=2, G=4, K=3, seed=0, vocab=VOCAB, longest=9, prompt=(2, 7)) -> list[Rollout]:
    """Ragged groups with random distributions; the top-K may or may not hold the sampled token."""
    rng = np.random.default_rng(seed)
    groups = []
    for i in range(n_groups):
        responses = [make_response(rng, K, vocab, longest, hole=g == 1) for g in range(G)]
        ids = rng.integers(0, vocab, int(rng.integers(*prompt))).astype(np.int32)
        about = dict(sampling=Sampling(), model="policy", precision="float32", version=0, digest="")
        groups.append(Rollout(("test", 0, i), f"p{i}", ids, t_start=0.0, t_end=0.0, responses=responses, **about))
    return groups


def make_response(rng, K: int, vocab: int, longest: int, hole: bool) -> Response:
    """A response of up to `longest` tokens. hole: one token inside has no gradient."""
    L = int(rng.integers(1, longest + 1))
    logits = rng.normal(size=(L, vocab)) * 2
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    tokens = np.array([rng.choice(vocab, p=np.exp(row) / np.exp(row).sum()) for row in logp])
    order = np.argsort(-logp, 1)[:, :K]
    mask = np.ones(L, bool)
    if L > 2 and hole:
        mask[1] = False
    of_tokens = (tokens.astype(np.int32), mask, logp[np.arange(L), tokens].astype(np.float32))
    of_top = (order.astype(np.int32), np.take_along_axis(logp, order, 1).astype(np.float32))
    return Response(*of_tokens, *of_top, "stop", reward=float(rng.integers(0, 2)))


LONGEST = ["train", "remote", "learner", "oracle", "worth", "mini", "delay", "bench", "exact", "placement", "moe"]
LONGEST += ["memory", "mismatch", "plan", "quant", "sampling", "grading"]


def pytest_collection_finish():
    """Take imported modules out of garbage collection: tests that collect garbage need a tenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """With several processes the slowest files come first, so that the processes end at about the same time."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    order = {f"test_{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONGEST)))


def log_probabilities(model, prompt, tokens, temperature=1.0):
    """(log-probabilities (L, V) along a response from the model's logits, its token ids (L,))."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1), ids[len(prompt) :]


def at(logp, ids):
    return logp.gather(1, ids[:, None])[:, 0]


def logprobs(learner, name: str, ids) -> np.ndarray:
    """log p(ids[t] | ids[:t]) for t >= 1 of one model: (R, L) -> (R, L - 1)."""
    groups = []
    for row in ids.astype(np.int32):
        zero, nothing = np.zeros(len(row) - 1, np.float32), np.zeros((len(row) - 1, 0))
        response = Response(row[1:], zero == 0, zero, nothing.astype(np.int32), nothing, "length")
        groups.append(Rollout(("", 0, 0), "", row[:1], Sampling(), 0, "", responses=[response]))
    batch = batching.collate(groups, replace(learner.cfg, router_replay=False, mask_cut=False))
    stats = learner.score(batch, Needs())
    return (stats.logp if name == "policy" else stats.actor_logp).numpy()


def write_rows(path: Path, rows) -> str:
    """Write a JSONL file of dicts, and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def copied(folder: Path, to: Path, file="config.json", **changes) -> Path:
    """A copy of a model folder with changes of its config.json, or of a different JSON file."""
    shutil.copytree(folder, to)
    known = json.loads((to / file).read_text()) if (to / file).exists() else {}
    (to / file).write_text(json.dumps({**known, **changes}))
    return to
