"""Shared by the suite: tiny models with random weights, one vLLM engine for everything, hand-made groups."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import pytest
import torch

import config
from rollout import Response, Rollout, Sampling
from tasks import VOCAB, arithmetic_tokenizer


def tiny_model(seed: int, layers: int = 1, hidden: int = 32, std: float = 0.3, tie: bool = True, dtype=torch.float32):
    """A Qwen3-shaped model whose random weights are large enough for its law to be far from uniform.

    In float64 it takes torch's RMSNorm: transformers' own rounds to float32 whatever comes in."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=hidden,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=tie,
            initializer_range=std,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).to(dtype)
    if dtype == torch.float64:
        for parent in list(model.modules()):
            for name, norm in list(parent.named_children()):
                if type(norm).__name__ == "Qwen3RMSNorm":
                    setattr(parent, name, torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=dtype))
    return model


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders of a tiny policy, a tiny actor, and an untied one, as save_pretrained writes them."""
    root = tmp_path_factory.mktemp("models")
    for name, model in (
        ("policy", tiny_model(0, layers=2)),
        ("actor", tiny_model(1)),
        ("untied", tiny_model(2, tie=False)),
    ):
        model.save_pretrained(root / name)
        arithmetic_tokenizer().save_pretrained(root / name)
    return root


TINY_TASK = dict(task_min_ops=1, task_max_ops=1, task_operand=3, task_total=9)


@pytest.fixture(scope="session")
def solvers(tmp_path_factory):
    """The same two shapes, warm-started on one-step sums until they solve a third of them: RL has something to climb."""
    import warmstart
    from tasks import Arithmetic

    root, old = tmp_path_factory.mktemp("solvers"), (warmstart.SHAPES, warmstart.LR, warmstart.EVAL_PROBLEMS)
    shape = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1)
    warmstart.SHAPES = {"policy": {**shape, "num_hidden_layers": 2}, "actor": {**shape, "num_hidden_layers": 1}}
    warmstart.LR, warmstart.EVAL_PROBLEMS = 1e-2, 128
    for name in ("policy", "actor"):
        assert warmstart.warm_start(name, Arithmetic(1, 1, 3, 9), 0.3, root / name) >= 0.3
    warmstart.SHAPES, warmstart.LR, warmstart.EVAL_PROBLEMS = old
    return root


@pytest.fixture(scope="session")
def vllm_engines(folders):
    """vLLM engines of the tiny actor by their settings, each started once. The first that closes takes the process group along: all stay open."""
    from engines import VLLMEngine

    made = {}

    def get(**settings):
        key = tuple(sorted(settings.items()))
        if key not in made:
            made[key] = VLLMEngine(str(folders / "actor"), max_len=64, max_logprobs=20, **settings)
        return made[key]

    yield get
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="session")
def vllm_engine(vllm_engines):
    """The suite's usual engine: float32, processed log-probabilities."""
    return vllm_engines()


def make_cfg(**changes) -> config.Config:
    """A resolved configuration for unit tests: one model unless an actor is named."""
    changes = {"actor": "none", "rollout": "hf", "train_batch": 8, "rollout_batch": 8, "group_size": 4, **changes}
    return config.resolve(config.Config(**changes), world=changes.pop("world", 1))


def make_groups(
    n_groups: int = 2,
    G: int = 4,
    K: int = 3,
    seed: int = 0,
    vocab: int = VOCAB,
    longest: int = 9,
    prompt: tuple = (2, 7),
) -> list[Rollout]:
    """Ragged groups with made-up laws: sampled tokens, log-probabilities, a top-K that may or may not hold the sample."""
    rng = np.random.default_rng(seed)
    groups = []
    for i in range(n_groups):
        responses = []
        for g in range(G):
            L = int(rng.integers(1, longest + 1))
            logits = rng.normal(size=(L, vocab)) * 2
            logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
            tokens = np.array([rng.choice(vocab, p=np.exp(row) / np.exp(row).sum()) for row in logp])
            order = np.argsort(-logp, 1)[:, :K]
            mask = np.ones(L, bool)
            if L > 2 and g == 1:
                mask[1] = False  # a token that carries no gradient, inside a response
            responses.append(
                Response(
                    tokens.astype(np.int32),
                    mask,
                    logp[np.arange(L), tokens].astype(np.float32),
                    order.astype(np.int32),
                    np.take_along_axis(logp, order, 1).astype(np.float32),
                    "stop",
                    reward=float(rng.integers(0, 2)),
                )
            )
        groups.append(
            Rollout(
                ("test", 0, i),
                f"p{i}",
                rng.integers(0, vocab, int(rng.integers(*prompt))).astype(np.int32),
                Sampling(),
                "policy",
                "float32",
                0,
                "",
                0.0,
                0.0,
                responses,
            )
        )
    return groups
