"""What it costs: one table and one JSON line. Everything is measured in alternating pairs, because machines drift.

    python bench.py                        # rollout, update, head, replay (and gpu, lowbit where there is one)
    python bench.py update head            # some of them
    python bench.py trl                    # the whole step against TRL's GRPOTrainer; needs `trl` importable, see the README

rollout  typed records against the bare engine call with the same sampling settings (vLLM)
update   a jackpot update (ref pass, statistics, OBRS, step) against a plain PPO one on the same recorded batch, one model
head     the chunked head against whole logits, 2,048 tokens x 151,936 words x 1,024, forward and backward: time and peak memory
replay   kept sets at top_k 20 on the demo's policy: a learner step that replays them over one that does not, and rollouts (vLLM)
         that record them over rollouts that do not, with the same truncated sampling
quant    low bits on the demo's policy, by format: the aligned learner's update over the plain one, publication and load over plain weights',
         and the engine's rollout over an unquantized one's (vLLM)
lowbit   on a GPU: the aligned forward of linear layers, quantization included, over bfloat16's, on Qwen3-0.6B, 1.7B and 8B shapes
wire     weights of 256 MiB from a learner's hub to a sampler on this host, digests, files and all, over a bare TCP copy and one SHA-256 pass
         of the same bytes; and the same with keys
samplers real runs with 1, 2 and 4 remote samplers whose delays are 60 s to 1800 s, a hundred times shortened: share of the samplers'
         time blocked on the transport, and of the learner's spent waiting
trl      publish, roll out, grade, update, with --rollout=hf, against one step of GRPOTrainer; and our step with vLLM beside it
gpu      learner tokens per second and share of the device's peak on a Qwen3-0.6B shape, bfloat16
"""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import batching
import config
import objectives
import quant
import sampling
from engines import HFEngine, VLLMEngine
from head import ChunkedHead, OneModelRows, chunk_rows
from learner import Comm, Learner
from rollout import LocalSource, Response, Rollout, Sampling
from sync import Probe
from tasks import Arithmetic, arithmetic_tokenizer

PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # dense bfloat16, flop/s


def alternate(a, b, pairs: int, name: str, warm: int = 2) -> dict:
    """Runs a and b in turn; the ratio a/b pair by pair: geometric mean with its 95 % interval, and median seconds."""
    for _ in range(warm):
        a(), b()
    times = []
    for i in tqdm(range(pairs), desc=name, leave=False):
        pair = {}
        for key, f in (("a", a), ("b", b)) if i % 2 == 0 else (("b", b), ("a", a)):
            start = time.perf_counter()
            f()
            pair[key] = time.perf_counter() - start
        times.append((pair["a"], pair["b"]))
    t = np.array(times)
    log = np.log(t[:, 0] / t[:, 1])
    half = 1.96 * log.std(ddof=1) / math.sqrt(len(log)) if len(log) > 1 else math.nan
    return {
        "ratio": math.exp(log.mean()),
        "low": math.exp(log.mean() - half),
        "high": math.exp(log.mean() + half),
        "a_s": float(np.median(t[:, 0])),
        "b_s": float(np.median(t[:, 1])),
        "pairs": pairs,
    }


def shaped(folder: str, hidden=128, inter=384, layers=4, vocab=256, seed=0, **more):
    """A Qwen3-shaped model folder with random weights; 0.8M parameters by default."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(Qwen3Config(**{**shape, **more}))
    if folder:
        model.save_pretrained(folder)
        arithmetic_tokenizer().save_pretrained(folder)
    return model


def flags(**changes):
    return config.resolve(config.Config(**{"rollout": "hf", "actor": "none", **changes}), n_ranks=1)


def bench_rollout(root: str) -> dict:
    """Typed records over the bare call: same requests, same parameters, K = 20."""
    folder = f"{root}/rollout"
    shaped(folder)
    engine = VLLMEngine(folder, max_len=64, max_logprobs=20)
    rng = np.random.default_rng(0)
    prompts, seeds = (
        [rng.integers(2, 200, 10).astype(np.int32) for _ in range(32)],
        [[i * 8 + g for g in range(8)] for i in range(32)],
    )
    sampling = Sampling(max_tokens=24)
    requests = [{"prompt_token_ids": p.tolist()} for p in prompts for _ in range(8)]
    params = [
        engine._params(
            temperature=1.0,
            max_tokens=24,
            seed=s,
            stop_token_ids=[1],
            logprobs=20,
            flat_logprobs=True,
            detokenize=False,
        )
        for g in seeds
        for s in g
    ]
    out = alternate(
        lambda: engine.generate(prompts, seeds, sampling, 20, [1]),
        lambda: engine.llm.generate(requests, params, use_tqdm=False),
        30,
        "rollout",
    )
    tokens = sum(len(r.tokens) for g in engine.generate(prompts, seeds, sampling, 20, [1]) for r in g)
    engine.close()
    return {**out, "tokens_per_s": tokens / out["a_s"], "goal": "ratio <= 1.10"}


def recorded(cfg, model, n_groups: int, K: int):
    """A recorded batch: groups sampled by the plain sampler from the model itself, random rewards."""
    rng, engine = np.random.default_rng(0), HFEngine(model)
    prompts = [rng.integers(2, 200, 10).astype(np.int32) for _ in range(n_groups)]
    sampling = Sampling(max_tokens=cfg.max_tokens)
    out = engine.generate(
        prompts, [[i * 100 + g for g in range(cfg.group_size)] for i in range(n_groups)], sampling, K, [1]
    )
    groups = [
        Rollout(("bench", 0, i), str(i), p, sampling, "policy", "float32", 0, "", 0.0, 0.0, g)
        for i, (p, g) in enumerate(zip(prompts, out))
    ]
    for g in groups:
        for r in g.responses:
            r.reward = float(rng.integers(0, 2))
    model.train()
    return groups


def bench_update(root: str) -> dict:
    """Ref pass, statistics, loss, step: jackpot (target ref, K = 20, kappa, bracket) over plain PPO, the same recorded batch."""
    sizes = dict(train_batch=128, rollout_batch=256, max_tokens=24, lr=1e-6)
    learners = {}
    for name in ("jackpot", "grpo"):
        cfg = flags(objective=name, **sizes)
        learners[name] = (cfg, Learner(shaped(""), None, cfg, Comm()))
    groups = recorded(learners["jackpot"][0], learners["jackpot"][1].models.policy, 32, 20)

    def step(name):
        cfg, learner = learners[name]
        batching.write_ref(groups, learner.ref_columns(batching.collate(groups, cfg), cfg.obrs_lambda))
        for half in (groups[:16], groups[16:]):
            b = batching.collate(half, cfg)
            learner.update(b, objectives.prepare(b, learner.comm, cfg, {}))

    return {**alternate(lambda: step("jackpot"), lambda: step("grpo"), 60, "update"), "goal": "high <= 1.03"}


def naive_head(hidden, weight, target, ids, p_kth):
    """The outputs of head.OneModelRows from whole logits."""
    logp = (hidden @ weight.t()).log_softmax(-1)
    mine = logp.gather(1, target[:, None])[:, 0]
    with torch.no_grad():
        p = logp.exp()
        entropy = -(p * logp).sum(-1)
        at_ids = logp.gather(1, ids)
        low = torch.minimum(p, p_kth[:, None])
        tail = (low.sum(-1) - low.gather(1, ids).sum(-1)).clamp_min(0)
    return mine, entropy, at_ids, tail


def head_once(which: str, N=2048, V=151_936, H=1024, seed=0):
    """One forward and backward of either head; returns a callable and the bytes of its parameters' gradients."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(N, H, generator=g).requires_grad_(),
        (torch.randn(V, H, generator=g) * 0.02).requires_grad_(),
    )
    target, ids = torch.randint(0, V, (N,), generator=g), torch.randint(0, V, (N, 21), generator=g)
    p_kth, on = torch.full((N,), 1e-4), torch.ones(N, 21, dtype=torch.bool)

    def run():
        hidden.grad = weight.grad = None
        if which == "naive":
            out = naive_head(hidden, weight, target, ids, p_kth)
        else:
            out = ChunkedHead.apply(OneModelRows(target, ids=ids, s_on=on, p_kth=p_kth), chunk_rows(V), hidden, weight)
        out[0].sum().backward()

    return run, 4 * (N * H + V * H)


def head_memory(which: str) -> float:
    """Peak memory of one pass beyond parameters and their gradients, in bytes, read from a process of its own."""
    code = (
        "import resource, bench\nrun, grads = bench.head_once('%s')\n"
        "import os\nbase = int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\nrun()\n"
        "peak = next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "print(peak * 1024 - base - grads)" % which
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    return float(done.stdout.strip().splitlines()[-1])


def bench_head(root: str) -> dict:
    chunked, naive = head_once("chunked")[0], head_once("naive")[0]
    out = alternate(chunked, naive, 5, "head", warm=1)
    memory = {w: head_memory(w) for w in ("chunked", "naive")}
    return {
        **out,
        "chunked_MiB": memory["chunked"] / 2**20,
        "naive_MiB": memory["naive"] / 2**20,
        "memory_ratio": memory["chunked"] / memory["naive"],
        "goal": "ratio <= 1.40, memory_ratio <= 0.10",
    }


def bench_replay(root: str) -> dict:
    """Kept sets at top_k 20 on the policy's shape: the update with `replay` over `off`, same groups; the rollout with records over without."""
    from warmstart import CONTEXT, SHAPES

    folder, law = f"{root}/replay", Sampling(top_k=20, max_tokens=32)
    model = shaped(folder, max_position_embeddings=CONTEXT, **SHAPES["policy"])
    rng, width = np.random.default_rng(0), sampling.max_allowed(flags(top_k=20), 256)
    prompts, seeds = (
        [rng.integers(2, 200, 10).astype(np.int32) for _ in range(32)],
        [[i * 8 + g for g in range(8)] for i in range(32)],
    )
    engine = VLLMEngine(folder, max_len=64, max_logprobs=width)
    sample = lambda kept: engine.generate(prompts, seeds, law, 0, [1], kept)
    rollout = alternate(lambda: sample(width), lambda: sample(0), 30, "replay, rollout")
    groups = [
        Rollout(("bench", 0, i), str(i), p, law, "policy", "float32", 0, "", 0.0, 0.0, g)
        for i, (p, g) in enumerate(zip(prompts, sample(width)))
    ]
    engine.close()
    for g in groups:
        for r in g.responses:
            r.reward = float(rng.integers(0, 2))
    steps = {}
    for world in ("replay", "off"):
        cfg = flags(objective="tis", top_k=20, keep_sampling_mask=world, lr=1e-6)
        steps[world] = cfg, Learner(copy.deepcopy(model), None, cfg, Comm())

    def step(world):
        cfg, learner = steps[world]
        b = batching.collate(groups, cfg)
        learner.update(b, objectives.prepare(b, learner.comm, cfg, {}))

    out = alternate(lambda: step("replay"), lambda: step("off"), 30, "replay, update")
    return {
        **out,
        **{f"rollout_{k}": rollout[k] for k in ("ratio", "low", "high")},
        "goal": "ratio <= 1.05, rollout_ratio <= 1.05",
    }


def bench_quant(root: str) -> dict:
    """Update, publication and rollout in low bits, each over its unquantized twin."""
    from warmstart import CONTEXT, SHAPES

    folder, law = f"{root}/quant", Sampling(max_tokens=32)
    model = shaped(folder, max_position_embeddings=CONTEXT, **SHAPES["policy"])
    rng = np.random.default_rng(0)
    prompts, seeds = (
        [rng.integers(2, 200, 10).astype(np.int32) for _ in range(32)],
        [[i * 8 + g for g in range(8)] for i in range(32)],
    )
    cfgs = {
        f: flags(objective="tis", rollout_quant=f, learner_quant="none" if f == "none" else "aligned", lr=1e-6)
        for f in ("none", "int8", "fp8", "w4a16")
    }
    learners = {f: Learner(copy.deepcopy(model), None, c, Comm()) for f, c in cfgs.items()}
    engines = {
        f: VLLMEngine(folder, max_len=64, max_logprobs=1, fmt=quant.format_of(f, c.quant_group))
        for f, c in cfgs.items()
    }
    groups, out = recorded(cfgs["none"], learners["none"].models.policy, 32, 0), {}
    learners["none"].models.eval()

    def update(f):
        b = batching.collate(groups, cfgs[f])
        learners[f].update(b, objectives.prepare(b, learners[f].comm, cfgs[f], {}))

    def publish(f):
        for m in quant.quantized_linears(learners[f].models.policy).values():
            m.cached_version = None  # as after a step: quantization is part of the price
        engines[f].load(learners[f].published("policy", engines[f].packed))

    for f in ("int8", "fp8", "w4a16"):
        parts = {
            "update": update,
            "publish": publish,
            "rollout": lambda f: engines[f].generate(prompts, seeds, law, 0, [1]),
        }
        for name, part in parts.items():
            r = alternate(
                lambda: part(f), lambda: part("none"), {"update": 20, "publish": 30, "rollout": 20}[name], f"{f} {name}"
            )
            out[f"{f}_{name}"] = (
                f"{r['ratio']:.3f} [{r['low']:.3f}, {r['high']:.3f}] ({r['a_s'] * 1000:.0f} over {r['b_s'] * 1000:.0f} ms)"
            )
    engines["none"].close()
    return out


def bench_lowbit(root: str, device: str = "cuda", tokens: tuple = (8192, 32768), shapes: dict | None = None) -> dict:
    """The linear layers of one block forward, quantization of weights and activations included, over bfloat16; ratio of speeds."""
    shapes = shapes or {
        "0.6B": (1024, 3072, 4096),
        "1.7B": (2048, 6144, 4096),
        "8B": (4096, 12288, 6144),
    }  # hidden, feed-forward, q + k + v
    out, sync = {}, torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for name, (H, I, A) in shapes.items():
        weights = [
            torch.randn(n, k, device=device, dtype=torch.bfloat16) * 0.02
            for n, k in ((A, H), (H, H), (2 * I, H), (H, I))
        ]
        for T in tokens:
            inputs = {k: torch.randn(T, k, device=device, dtype=torch.bfloat16) for k in {w.shape[1] for w in weights}}

            def run(fmt):
                for w in weights:
                    x = inputs[w.shape[1]]
                    if fmt is None:
                        x @ w.t()
                    else:
                        quant.product(
                            *quant.quantize(x, 127.0 if fmt.dtype == torch.int8 else fmt.qmax, fmt.dtype),
                            *quant.quantize(w, fmt.qmax, fmt.dtype),
                        ).to(x.dtype)
                sync()

            for f in ("fp8", "int8"):
                fmt = quant.format_of(f)
                r = alternate(lambda: run(None), lambda: run(fmt), 10, f"{name} {T} {f}")
                out[f"{name}_{T}_{f}"] = f"{r['ratio']:.2f}x [{r['low']:.2f}, {r['high']:.2f}]"
    return out


def our_step(folder: str, engine, cfg):
    """A callable: publish, roll out, grade, update, as train.py's loop does it."""
    from run import load_model

    task = Arithmetic()
    learner = Learner(load_model(folder), None, cfg, Comm())
    source = LocalSource(
        engine,
        task,
        arithmetic_tokenizer(),
        Sampling(max_tokens=cfg.max_tokens),
        group_size=cfg.group_size,
        topk=0,
        model="policy",
        probe=Probe(folder, np.arange(2, 14)),
    )

    def step():
        source.publish(learner.version, learner.named_tensors("policy"))
        groups = source.next(cfg.train_batch // cfg.group_size, learner.version)
        b = batching.collate(groups, cfg, learner.version)
        learner.update(b, objectives.prepare(b, learner.comm, cfg, {}))

    return step


def bench_trl(root: str) -> dict:
    """GRPOTrainer's step, timed from its own callbacks, with one step of ours after each: batch 256, groups of 8, 16 new tokens."""
    try:
        from datasets import Dataset
        from datasets.table import InMemoryTable
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as e:
        raise SystemExit(f"error: bench.py trl needs TRL 1.16 ({e}); see 'Benchmarks' in the README")
    folder, steps, warm = f"{root}/trl", 24, 4
    shaped(folder)
    cfg = flags(objective="grpo", train_batch=256, rollout_batch=256, max_tokens=16, lr=1e-6)
    ours = our_step(folder, HFEngine(folder), cfg)
    task, times = Arithmetic(), []

    class Clock(TrainerCallback):
        def on_step_begin(self, *a, **k):
            self.start = time.perf_counter()

        def on_step_end(self, *a, **k):
            trl = time.perf_counter() - self.start
            start = time.perf_counter()
            ours()
            times.append((time.perf_counter() - start, trl))

    args = GRPOConfig(
        output_dir=f"{root}/trl_out",
        per_device_train_batch_size=256,
        num_generations=8,
        max_completion_length=16,
        max_steps=steps,
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=10**6,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=folder,
        args=args,
        train_dataset=Dataset(
            InMemoryTable.from_pydict({"prompt": [task.problem("train", i).prompt for i in range(2000)]}),
            fingerprint="bench",
        ),
        reward_funcs=lambda completions, **k: [float(len(c) % 2) for c in completions],
        processing_class=arithmetic_tokenizer(),
        callbacks=[Clock()],
    )
    trainer.train()
    t = np.array(times[warm:])
    log = np.log(t[:, 0] / t[:, 1])
    half = 1.96 * log.std(ddof=1) / math.sqrt(len(log))
    out = {
        "ratio": math.exp(log.mean()),
        "low": math.exp(log.mean() - half),
        "high": math.exp(log.mean() + half),
        "a_s": float(np.median(t[:, 0])),
        "b_s": float(np.median(t[:, 1])),
        "pairs": len(t),
        "goal": "ratio <= 0.80",
    }
    engine = VLLMEngine(folder, max_len=64, max_logprobs=1)
    with_vllm, spent = our_step(folder, engine, cfg), []
    for i in range(14):
        start = time.perf_counter()
        with_vllm()
        spent.append(time.perf_counter() - start)
    engine.close()
    return {**out, "vllm_step_s": float(np.median(spent[4:]))}


def bench_gpu(root: str, device: str = "cuda", tokens: int = 16384, updates: int = 5, **shape) -> dict:
    """Learner update (forward, chunked head, backward, AdamW) on a Qwen3-0.6B shape: tokens/s, share of peak, peak memory."""
    shape = shape or dict(
        hidden=1024,
        inter=3072,
        layers=28,
        vocab=151_936,
        head_dim=128,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    model, length = shaped("", **shape), 1024
    B = max(8, tokens // length)
    cfg = flags(
        objective="grpo",
        train_batch=B,
        rollout_batch=B,
        max_tokens=length,
        micro_tokens=tokens,
        dtype="bfloat16",
        lr=1e-6,
    )
    learner = Learner(model, None, cfg, Comm(device))
    rng = np.random.default_rng(0)
    V = model.config.vocab_size
    respond = lambda: Response(
        rng.integers(0, V, length).astype(np.int32),
        np.ones(length, bool),
        np.full(length, -11.0, np.float32),
        np.zeros((length, 0), np.int32),
        np.zeros((length, 0), np.float32),
        "stop",
        reward=float(rng.integers(0, 2)),
    )
    groups = [
        Rollout(
            ("bench", 0, i),
            str(i),
            rng.integers(0, V, 32).astype(np.int32),
            Sampling(),
            "policy",
            "float32",
            0,
            "",
            0.0,
            0.0,
            [respond() for _ in range(8)],
        )
        for i in range(B // 8)
    ]
    b = batching.collate(groups, cfg)
    stats, sync = (
        objectives.prepare(b, learner.comm, cfg, {}),
        torch.cuda.synchronize if device == "cuda" else (lambda: None),
    )
    learner.update(b, stats)
    sync()
    start = time.perf_counter()
    for _ in range(updates):
        learner.update(b, stats)
    sync()
    spent = (time.perf_counter() - start) / updates
    n, done = sum(p.numel() for p in model.parameters()), int(b.ids.numel())
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    peak = next((v for k, v in PEAK.items() if k in name), math.nan)
    return {
        "device": name,
        "parameters": n,
        "tokens_per_s": done / spent,
        "share_of_peak": 6 * n * done / spent / peak,
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else math.nan,
    }


def bench_wire(root, mib: int = 256, pairs: int = 20) -> dict:
    import multiprocessing

    from remote import hub, wire
    from remote.account import Account
    from remote.keys import make_keys

    spawn = multiprocessing.get_context("spawn")
    data = np.random.default_rng(0).integers(0, 256, mib << 20, dtype=np.uint8).tobytes()
    path, versions = Path(root) / "weights", iter(range(1, 10_000))
    path.write_bytes(data)
    make_keys(f"{root}/keys", 1)
    welcome = wire.Welcome(wire.PROTOCOL, "bench", {}, {})
    out = {}
    for name, keys in (("", "none"), ("with keys", f"{root}/keys/learner")):
        end = hub.Hub(
            "tcp://127.0.0.1:*", keys, welcome, wire.Limits(1, 1, 1, 1, 0, 0), hub.logger(Path(root), len(out))
        )
        end.open(Account())
        ours, theirs = spawn.Pipe()
        fetcher = spawn.Process(
            target=_fetch,
            args=(
                theirs,
                end.address,
                "none" if keys == "none" else f"{root}/keys/sampler0",
                f"{root}/box{len(out)}",
                mib,
            ),
            daemon=True,
        )
        fetcher.start()
        port = ours.recv()

        def through_the_hub():
            version = next(versions)
            with open(path, "r+b") as f:  # bytes of their own for each version: equal ones are not sent again
                f.write(version.to_bytes(8, "little"))
            (Path(root) / f"v{version}").symlink_to(path)
            end.broadcast(version, Path(root) / f"v{version}", 0.0)
            assert ours.recv() == version

        def bare():
            import socket

            with socket.create_connection(("127.0.0.1", port)) as s:
                s.sendall(data)
            assert ours.recv() == "bare"

        r = alternate(through_the_hub, bare, pairs, f"wire {name}", warm=3)
        out |= {f"{k} {name}".strip(): v for k, v in r.items() if k != "pairs"}
        out[f"share of bare throughput {name}".strip()] = 1 / r["ratio"]
        fetcher.kill()
        end.close()
    return {**out, "MiB": mib}


def _fetch(pipe, address, keys, store, mib):
    """The other process of bench_wire: a sampler's link, and a bare socket beside it."""
    import hashlib
    import socket
    import threading

    from remote import sampler
    from remote.account import Spool
    from remote.keys import sampler_keys
    from remote.link import Link

    Path(store).mkdir()
    server = socket.create_server(("127.0.0.1", 0))
    pipe.send(server.getsockname()[1])

    def bare():
        buffer = memoryview(bytearray(mib << 20))
        while True:
            connection, _ = server.accept()
            got = 0
            while got < len(buffer):
                got += connection.recv_into(buffer[got:])
            hashlib.sha256(buffer).digest()
            pipe.send("bare")

    threading.Thread(target=bare, daemon=True).start()
    own = None if keys == "none" else sampler_keys(keys)
    link = Link([address], ["box"], sampler.Flags(), Spool(Path(store) / "spool", ["box"], 1), Path(store), own)
    version = None
    while True:
        time.sleep(0.001)
        if link.newest is not None and link.newest[0] != version:
            version = link.newest[0]
            pipe.send(version)


def bench_samplers(root, seconds: float = 30.0) -> dict:
    import os
    import re
    import signal

    import metrics

    out = {}
    for n in (1, 2, 4):
        at, run = 20000 + os.getpid() % 20000 + 10 * n, f"{root}/run{n}"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        flags = [
            "--actor=none",
            "--objective=gepo",
            "--rollout=hf",
            "--samplers=zmq",
            f"--bind=tcp://127.0.0.1:{at}",
            "--rollout_batch=64",
            "--train_batch=64",
            "--steps=100000",
            "--eval_problems=8",
            "--save_every=5",
            f"--out={run}",
        ]
        learner = subprocess.Popen(
            [sys.executable, "train.py", *flags], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        boxes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "rollout.py",
                    f"--connect=tcp://127.0.0.1:{at}",
                    "--rollout=hf",
                    f"--name=box{i}",
                    f"--spool={root}/box{n}{i}",
                    "--delay=lognormal",
                    "--delay_min=0.6",
                    "--delay_max=18",
                ],
                env=env,
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(n)
        ]
        start = time.monotonic()
        while not (Path(run) / "metrics.jsonl").exists() and time.monotonic() - start < 300:
            time.sleep(0.5)
        time.sleep(seconds * (1 + n / 2))
        for p in (*boxes, learner):
            p.send_signal(signal.SIGTERM)
        said = [p.communicate()[0] for p in boxes]
        learner.wait()
        rows = [r for r in metrics.read(run) if r["step"] > 0]  # the first update waited for the models to load
        blocked = [float(x[-1]) for x in (re.findall(r"blocked ([0-9.]+) %", text) for text in said) if x]
        busy = sum(r.get("rollout_s", 0) + r.get("update_s", 0) + r.get("sync_s", 0) + r.get("save_s", 0) for r in rows)
        out |= {
            f"{n}: blocked, % (worst)": max(blocked),
            f"{n}: learner waits, %": 100 * sum(r["remote/wait_s"] for r in rows) / busy,
            f"{n}: updates/s": len(rows) / busy,
            f"{n}: staleness": sum(r["staleness/mean_updates"] for r in rows) / len(rows),
        }
    return out


BENCHES = {
    "wire": bench_wire,
    "samplers": bench_samplers,
    "rollout": bench_rollout,
    "update": bench_update,
    "head": bench_head,
    "replay": bench_replay,
    "quant": bench_quant,
    "lowbit": bench_lowbit,
    "trl": bench_trl,
    "gpu": bench_gpu,
}


def main():
    asked = sys.argv[1:] or ["rollout", "update", "head", "replay"] + (
        ["gpu", "lowbit"] if torch.cuda.is_available() else []
    )
    unknown = [a for a in asked if a not in BENCHES]
    if unknown:
        sys.exit(f"error: {unknown[0]}: no such benchmark; there are {', '.join(BENCHES)}")
    results = {}
    with tempfile.TemporaryDirectory() as root:
        for name in asked:
            results[name] = BENCHES[name](root)
    print(f"{'':10s}{'ratio':>8s}{'95 % interval':>18s}{'ours, s':>10s}{'other, s':>10s}   more")
    for name, r in results.items():
        more = ", ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in r.items()
            if k not in ("ratio", "low", "high", "a_s", "b_s", "pairs")
        )
        if "ratio" in r:
            print(
                f"{name:10s}{r['ratio']:8.3f}{r['low']:10.3f} -{r['high']:6.3f}{r['a_s']:10.3f}{r['b_s']:10.3f}   {more}"
            )
        else:
            print(f"{name:10s}{'':46s}   {more}")
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), **results}))


if __name__ == "__main__":
    main()
