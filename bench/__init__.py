"""What it costs: one table and one JSON line. Everything is measured in alternating pairs, because
machines drift.

    python -m bench                        # rollout, update, head, replay
    python -m bench update head            # some of them
    python -m bench gpu                    # the GPU list (bench/gpu.py), which has flags of its own

rollout  typed records against the bare engine call, same sampling settings (vLLM)
update   a jackpot update (ref pass, statistics, OBRS, step) against a plain PPO one: one model, the same recorded batch
head     the chunked head against whole logits, 2,048 tokens x 151,936 words x 1,024, both ways: time, peak memory
replay   top_k 20 on the demo's policy: a learner step that replays the sets of allowed tokens over one that does not,
         and rollouts (vLLM) that record them over rollouts that do not, with the same truncated sampling
quant    low bits on the demo's policy, by format: the aligned learner's update over the plain one, publication and load
         over plain weights', and the engine's rollout over an unquantized one's (vLLM)

tests/remote_tools/bench.py measures the transport between a learner and its samplers,
results/against_trl.py the whole step against TRL's."""

from __future__ import annotations

import copy
import difflib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import machinery.startup  # isort: skip  # noqa: F401

import numpy as np
import torch
from tqdm import tqdm

import batching
import config
import objectives
import quant
from learner import Comm, Learner
from machinery import settings
from machinery.flags import UserError, need
from machinery.warmstart import CONTEXT, SHAPES
from model import Needs, OneModelRows, Scored
from model.engines import HFEngine, VLLMEngine
from model.head import ChunkedHead, Head, chunk_rows
from rollout import Response, Rollout, as_groups
from sampling import Sampling, max_allowed
from tasks import arithmetic_tokenizer

ROOT = Path(__file__).resolve().parent.parent
STOP = [1]  # the id that ends a response


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def alternate(a, b, pairs: int, name: str, warm: int = 2) -> dict:
    """Run a and b in turn, after `warm` unmeasured runs of each; see `compare`."""
    for _ in range(warm):
        a()
        b()
    times = []
    for i in tqdm(range(pairs), desc=name, leave=False):
        if i % 2 == 0:
            ours, other = seconds(a), seconds(b)
        else:
            other, ours = seconds(b), seconds(a)
        times.append((ours, other))
    return compare(times)


def seconds(f) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def compare(times: list[tuple[float, float]]) -> dict:
    """Geometric mean of ours / other with its 95 % interval, and medians, from pairs of seconds
    (ours, the other's)."""
    t = np.array(times)
    log = np.log(t[:, 0] / t[:, 1])
    half = 1.96 * log.std(ddof=1) / math.sqrt(len(log)) if len(log) > 1 else math.nan
    return {
        "ratio": math.exp(log.mean()),
        "low": math.exp(log.mean() - half),
        "high": math.exp(log.mean() + half),
        "a_s": float(np.median(t[:, 0])),
        "b_s": float(np.median(t[:, 1])),
        "pairs": len(t),
    }


def synchronize(device: str) -> None:
    """Wait for the GPU, if there is one, so that its time is measured."""
    if device == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------------------------------
# Models, configurations and batches to measure with
# ---------------------------------------------------------------------------------------------------------------------


def shaped(folder: str, hidden=128, inter=384, layers=4, vocab=256, seed=0, **more):
    """A Qwen3-shaped model with random weights, saved in `folder` unless that is empty; 0.8M
    parameters by default."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": max(1, hidden // 64),
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**{**shape, **more}))
    if folder:
        model.save_pretrained(folder)
        arithmetic_tokenizer().save_pretrained(folder)
    return model


def policy_shaped(folder: str):
    """The demo's policy with random weights, saved in `folder`."""
    return shaped(folder, max_position_embeddings=CONTEXT, **SHAPES["policy"])


def resolved(**changes) -> config.Config:
    """A configuration of one model on one rank."""
    return settings.resolve(config.Config(**{"rollout": "hf", "actor": "none", **changes}), 1)


def random_prompts(rng, n: int = 32) -> list[np.ndarray]:
    """n prompts of 10 tokens."""
    return [rng.integers(2, 200, 10).astype(np.int32) for _ in range(n)]


def numbered_seeds(groups: int = 32, samples: int = 8, step: int = 8) -> list[list[int]]:
    """A seed of its own for each response to each prompt; the first ones of two groups are `step`
    apart."""
    return [list(range(step * i, step * i + samples)) for i in range(groups)]


def draw_rewards(groups: list[Rollout], rng) -> None:
    """Rewards 0 or 1, by chance."""
    for group in groups:
        for response in group.responses:
            response.reward = float(rng.integers(0, 2))


def random_groups(rng, n: int, length: int, vocabulary: int) -> list[Rollout]:
    """n groups of 8 responses of `length` tokens, all by chance."""
    prompts, responses = [], []
    for _ in range(n):
        prompts.append(rng.integers(0, vocabulary, 32).astype(np.int32))
        group = []
        for _ in range(8):
            response = Response(
                tokens=rng.integers(0, vocabulary, length).astype(np.int32),
                loss_mask=np.ones(length, bool),
                logp_inf=np.full(length, -11.0, np.float32),
                topk_ids=np.zeros((length, 0), np.int32),
                topk_logp=np.zeros((length, 0), np.float32),
                finish_reason="stop",
                reward=float(rng.integers(0, 2)),
            )
            group.append(response)
        responses.append(group)
    return as_groups("bench", prompts, responses, Sampling())


def recorded(cfg: config.Config, model, n_groups: int, K: int) -> list[Rollout]:
    """Groups sampled by the plain sampler from the model itself, with the K most likely tokens and
    random rewards."""
    rng = np.random.default_rng(0)
    prompts = random_prompts(rng, n_groups)
    sampling = Sampling(max_tokens=cfg.max_tokens)
    seeds = numbered_seeds(n_groups, cfg.group_size, 100)
    groups = as_groups(
        "bench", prompts, HFEngine(model).generate(prompts, seeds, sampling, K, STOP), sampling
    )
    draw_rewards(groups, rng)
    model.train()
    return groups


def update(learner, groups: list[Rollout]) -> None:
    """One optimizer step on these groups."""
    batch = batching.collate(groups, learner.cfg, learner.version)
    learner.update(batch, objectives.prepare(batch, learner.comm, learner.cfg, {}))


# ---------------------------------------------------------------------------------------------------------------------
# rollout, update
# ---------------------------------------------------------------------------------------------------------------------


def bench_rollout(root: str) -> dict:
    """Typed records over the bare call: the same requests and parameters, K = 20."""
    folder = f"{root}/rollout"
    shaped(folder)
    engine = VLLMEngine(folder, max_len=64, max_logprobs=20)
    prompts = random_prompts(np.random.default_rng(0))
    seeds = numbered_seeds()
    sampling = Sampling(max_tokens=24)
    requests, params = [], []
    for prompt, group in zip(prompts, seeds, strict=True):
        for seed in group:
            requests.append({"prompt_token_ids": prompt.tolist()})
            param = engine.make_params(
                temperature=1.0,
                max_tokens=24,
                seed=seed,
                stop_token_ids=STOP,
                logprobs=20,
                flat_logprobs=True,
                detokenize=False,
            )
            params.append(param)

    def typed():
        return engine.generate(prompts, seeds, sampling, 20, STOP)

    def bare():
        return engine.llm.generate(requests, params, use_tqdm=False)

    out = alternate(typed, bare, 30, "rollout")
    tokens = 0
    for group in typed():
        tokens += sum(len(response.tokens) for response in group)
    engine.close()
    return {**out, "tokens_per_s": tokens / out["a_s"], "goal": "ratio <= 1.10"}


def bench_update(root: str) -> dict:
    """Ref pass, statistics, loss, step: jackpot (target ref, K = 20, kappa, bracket) over plain
    PPO, one batch."""
    learners = {}
    for name in ("jackpot", "grpo"):
        cfg = resolved(objective=name, train_batch=128, rollout_batch=256, max_tokens=24, lr=1e-6)
        learners[name] = Learner(shaped(""), None, cfg, Comm())
    jackpot = learners["jackpot"]
    groups = recorded(jackpot.cfg, jackpot.models.policy, 32, 20)

    def step(name):
        learner = learners[name]
        whole = batching.collate(groups, learner.cfg)
        batching.write_ref_columns(groups, learner.ref_columns(whole, learner.cfg.obrs_lambda))
        update(learner, groups[:16])
        update(learner, groups[16:])

    out = alternate(partial(step, "jackpot"), partial(step, "grpo"), 60, "update")
    return {**out, "goal": "high <= 1.03"}


# ---------------------------------------------------------------------------------------------------------------------
# head
# ---------------------------------------------------------------------------------------------------------------------


def naive_head(hidden, weight, target, support_ids, p_kth):
    """The outputs of model.OneModelRows from whole logits: logp, entropy, support_logp, tail."""
    logp = (hidden @ weight.t()).log_softmax(-1)
    at_target = logp.gather(1, target[:, None])[:, 0]
    with torch.no_grad():
        p = logp.exp()
        entropy = -(p * logp).sum(-1)
        support_logp = logp.gather(1, support_ids)
        low = torch.minimum(p, p_kth[:, None])
        tail = (low.sum(-1) - low.gather(1, support_ids).sum(-1)).clamp_min(0)
    return at_target, entropy, support_logp, tail


def head_once(which: str, N=2048, V=151_936, H=1024, seed=0):
    """One forward and backward of the "naive" or the "chunked" head: a callable, and the bytes of
    its gradients."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=g).requires_grad_()
    weight = (torch.randn(V, H, generator=g) * 0.02).requires_grad_()
    target = torch.randint(0, V, (N,), generator=g)
    support_ids = torch.randint(0, V, (N, 21), generator=g)
    p_kth = torch.full((N,), 1e-4)
    needs = Needs(entropy=True, support=True, tail=True)

    def run():
        hidden.grad = weight.grad = None
        if which == "naive":
            logp = naive_head(hidden, weight, target, support_ids, p_kth)[0]
        else:
            rows = OneModelRows(
                Scored(target, None, None, None), needs, support_ids, support_ids >= 0, p_kth
            )
            # of rows.outputs
            logp = ChunkedHead.apply(rows, chunk_rows(V), [Head()], [None], hidden, weight, None)[0]
        logp.sum().backward()

    return run, 4 * (N * H + V * H)


def print_head_memory(which: str) -> None:
    """Peak memory of one pass beyond parameters and their gradients, in bytes, read off the whole
    process."""
    run, gradients = head_once(which)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    run()
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))  # KiB
    print(peak * 1024 - before - gradients)


def head_memory(which: str) -> float:
    """`print_head_memory` in a process of its own, MiB."""
    command = [sys.executable, "-c", f"import bench; bench.print_head_memory({which!r})"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return float(done.stdout.strip().splitlines()[-1]) / 2**20


def bench_head(root: str) -> dict:
    """Time and memory of the chunked head over those of whole logits."""
    chunked, _ = head_once("chunked")
    naive, _ = head_once("naive")
    out = alternate(chunked, naive, 5, "head", warm=1)
    chunked_mib = head_memory("chunked")
    naive_mib = head_memory("naive")
    return {
        **out,
        "chunked_MiB": chunked_mib,
        "naive_MiB": naive_mib,
        "memory_ratio": chunked_mib / naive_mib,
        "goal": "ratio <= 1.40, memory_ratio <= 0.10",
    }


# ---------------------------------------------------------------------------------------------------------------------
# replay, quant
# ---------------------------------------------------------------------------------------------------------------------


def bench_replay(root: str) -> dict:
    """top_k 20 on the policy's shape: the update with `replay` over `off`; rollouts with records
    over those without."""
    folder = f"{root}/replay"
    model = policy_shaped(folder)
    sampling = Sampling(top_k=20, max_tokens=32)
    width = max_allowed(resolved(top_k=20), 256)
    rng = np.random.default_rng(0)
    prompts = random_prompts(rng)
    seeds = numbered_seeds()
    engine = VLLMEngine(folder, max_len=64, max_logprobs=width)

    def sample(allowed):
        return engine.generate(prompts, seeds, sampling, 0, STOP, allowed)

    rollout = alternate(partial(sample, width), partial(sample, 0), 30, "replay, rollout")
    groups = as_groups("bench", prompts, sample(width), sampling)
    engine.close()
    draw_rewards(groups, rng)
    learners = {}
    for mode in ("replay", "off"):
        cfg = resolved(objective="tis", top_k=20, keep_sampling_mask=mode, lr=1e-6)
        learners[mode] = Learner(copy.deepcopy(model), None, cfg, Comm())
    replay = partial(update, learners["replay"], groups)
    off = partial(update, learners["off"], groups)
    out = alternate(replay, off, 30, "replay, update")
    for name in ("ratio", "low", "high"):
        out[f"rollout_{name}"] = rollout[name]
    return {**out, "goal": "ratio <= 1.05, rollout_ratio <= 1.05"}


def bench_quant(root: str) -> dict:
    """Update, publication and rollout in low bits, each over its unquantized twin."""
    folder = f"{root}/quant"
    model = policy_shaped(folder)
    prompts = random_prompts(np.random.default_rng(0))
    seeds = numbered_seeds()
    learners, engines = {}, {}
    for name in ("none", "int8", "fp8", "w4a16"):
        aligned = "none" if name == "none" else "aligned"
        cfg = resolved(objective="tis", rollout_quant=name, learner_quant=aligned, lr=1e-6)
        learners[name] = Learner(copy.deepcopy(model), None, cfg, Comm())
        fmt = quant.format_of(name, cfg.quant_group)
        engines[name] = VLLMEngine(folder, max_len=64, max_logprobs=1, fmt=fmt)
    plain = learners["none"]
    groups = recorded(plain.cfg, plain.models.policy, 32, 0)
    plain.models.eval()

    def step(name):
        update(learners[name], groups)

    def publish(name):
        for linear in quant.quantized_linears(learners[name].models.policy).values():
            linear.cached_version = None  # as after a step: quantization is part of the price
        engines[name].load(learners[name].published("policy", engines[name].packed))

    def rollout(name):
        engines[name].generate(prompts, seeds, Sampling(max_tokens=32), 0, STOP)

    out = {}
    for name in ("int8", "fp8", "w4a16"):
        for label, part, pairs in (
            ("update", step, 20),
            ("publish", publish, 30),
            ("rollout", rollout, 20),
        ):
            r = alternate(partial(part, name), partial(part, "none"), pairs, f"{name} {label}")
            interval = f"{r['ratio']:.3f} [{r['low']:.3f}, {r['high']:.3f}]"
            out[f"{name}_{label}"] = (
                f"{interval} ({r['a_s'] * 1000:.0f} over {r['b_s'] * 1000:.0f} ms)"
            )
    engines["none"].close()
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------

BENCHES = {
    "rollout": bench_rollout,
    "update": bench_update,
    "head": bench_head,
    "replay": bench_replay,
    "quant": bench_quant,
}


def parse(argv: list[str], benches: dict) -> list[str]:
    """The benchmarks that a command line names. UserError, one sentence: an unknown name."""
    for name in [word for word in argv if word not in benches]:
        kind = "flag, only names of benchmarks" if name.startswith("-") else "benchmark"
        sentence = f"{name}: no such {kind}; there are {', '.join(benches)}"
        near = difflib.get_close_matches(name.lstrip("-"), benches, 1, 0.4)
        if near:
            sentence += f"; did you mean {near[0]}?"
        raise UserError(sentence)
    return argv


def print_table(results: dict[str, dict]) -> None:
    """One table and one JSON line. results: name -> a row, or several rows by name.

    A row has what `compare` returns, and more values by name; without "ratio" it has those
    alone."""
    rows = {}
    for name, result in results.items():
        if all(isinstance(row, dict) for row in result.values()):
            for part, row in result.items():
                rows[f"{name} {part}"] = row
        else:
            rows[name] = result
    width = max(10, *(len(name) + 1 for name in rows))
    print(
        f"{'':{width}s}{'ratio':>8s}{'95 % interval':>18s}{'ours, s':>10s}{'other, s':>10s}   more"
    )
    for name, row in rows.items():
        measured = " " * 46
        if "ratio" in row:
            interval = f"{row['low']:10.3f} -{row['high']:6.3f}"
            measured = f"{row['ratio']:8.3f}{interval}{row['a_s']:10.3f}{row['b_s']:10.3f}"
        print(f"{name:{width}s}{measured}   {extra(row)}")
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), **results}))


def extra(row: dict) -> str:
    """What a row has beyond `compare`."""
    cells = []
    for name, value in row.items():
        if name not in ("ratio", "low", "high", "a_s", "b_s", "pairs"):
            cells.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(cells)


def main(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv):
        print(__doc__.strip())
        return
    names = parse(argv, [*BENCHES, "gpu"]) or ["rollout", "update", "head", "replay"]
    need("gpu" not in names, "gpu: has flags of its own; run it alone, python -m bench gpu")
    results = {}
    with tempfile.TemporaryDirectory() as root:
        for name in names:
            results[name] = BENCHES[name](root)
    print_table(results)
