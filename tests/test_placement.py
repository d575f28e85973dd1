"""Devices of ranks, samples of an engine on several ranks, sleeping engines. Without a GPU: calls are recorded;
vLLM's tensor parallelism runs on two CPU ranks."""

import json
import os
import pickle
import sys
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import ANY, Mock, call

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import at, log_probabilities, make_cfg, make_groups
from standins import folder_and_task, model, save
from tensor_parallel import tokens, work
from torchrun import torchrun

import train
from config import Config
from learner import Learner
from machinery import ranks, settings
from machinery.checkpoint.models import load_model
from machinery.flags import UserError
from machinery.ranks import Comm
from model import in_vllm
from model.engines import HFEngine, VLLMEngine, sleep_level
from probe import ProbeFlags
from probe.__main__ import check_flags
from sampling import Sampling
from source import LocalSource

# -- Each rank on its own GPU -----------------------------------------------------------------------------------------


def test_a_rank_uses_only_its_gpu(monkeypatch):
    """The device is set before the process group is made; there are at least as many GPUs as ranks."""
    calls, starts = [], {"LOCAL_RANK": 6, "WORLD_SIZE": 8}
    for name, value in starts.items():
        monkeypatch.setattr(ranks, name, value)
    for name, value in {"LOCAL_WORLD_SIZE": "8", "RANK": "6", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda kind, **how: calls.append((kind, how["device_id"])))
    assert Comm.start(patience=60).device == "cuda:6"
    assert calls == [6, ("cpu:gloo,cuda:nccl", torch.device("cuda", 6))]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    with pytest.raises(UserError, match=r"--nproc_per_node=8: this host has 7 GPU\(s\); start as many ranks as GPUs"):
        Comm.start(patience=60)


@pytest.mark.parametrize(
    "variables, missing",
    [
        ({}, "RANK, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "a RANK below it"),
    ],
)
def test_a_world_size_without_ranks_is_refused(monkeypatch, variables, missing):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "WORLD_SIZE", 2)
    with pytest.raises(UserError, match=f"^WORLD_SIZE=2 in the environment without {missing}: start several ranks"):
        Comm.start(patience=60)


@pytest.mark.parametrize(
    "flags, waits", [({}, 1), ({"dynamic_sampling": 10}, 10), ({"samplers": "tcp://127.0.0.1:5555"}, 4)]
)
def test_the_timeout_covers_all_waits(monkeypatch, flags, waits):
    """Rollouts until every prompt has rewards that differ, or groups of remote samplers."""
    patience = []
    monkeypatch.setattr(Comm, "start", lambda **more: patience.append(more["patience"]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.train(make_cfg(rollout_batch=32, train_batch=32, group_size=8, give_up=100, **flags))
    assert patience == [100 * waits + 1800]


def test_vllm_keeps_float32_products_and_the_learners_threads(monkeypatch):
    for name in ("TRITON_F32_DEFAULT", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    in_vllm.import_vllm()
    assert os.environ.get("TRITON_F32_DEFAULT") == "ieee" and "TORCHDYNAMO_DISABLE" not in os.environ
    assert os.environ.get("OMP_NUM_THREADS") == str(torch.get_num_threads())


def test_a_rank_alone_is_part_of_no_collective_call(monkeypatch):
    """A probe's learner on one of two ranks: it is not wrapped or summed over ranks."""
    for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    comm = Comm.alone("cpu")
    assert (comm.on, comm.rank, comm.size) == (False, 0, 1) and comm.sum([3.0]) == [3.0]


def test_an_unsupported_vllm_is_refused_in_one_sentence(monkeypatch):
    """A vLLM without a module that is changed."""
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.logprobs", None)
    with pytest.raises(UserError, match=r"this vLLM has no vllm.v1.engine.logprobs .*; install 0.* or use --rollout"):
        in_vllm.change_vllm(low_bits_on_cpu=False)


# -- Ranks that are one engine ----------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_two_ranks_are_one_engine(tmp_path, vllm_engines):
    """vLLM on two CPU ranks, each with half of every weight: on every rank, responses equal a single engine's, and
    log-probabilities equal a plain forward pass, after a load too. With --delay both ranks' groups have the same
    versions in turn, and each group fits its version's weights."""
    for name, seed in (("first", 0), ("other", 1)):
        save(model("qwen3", seed, num_key_value_heads=2), tmp_path / name)
    torchrun("tensor_parallel.py", *(str(tmp_path / name) for name in ("first", "other", "out")))
    outputs = pickle.loads((tmp_path / "out").read_bytes())
    models = {name: load_model(tmp_path / name).eval() for name in ("first", "other")}
    for name, folder in (("first", "first"), ("loaded", "other")):
        for rank in (0, 1):
            prompts, seeds = work(rank)
            assert [len(group) for group in outputs[rank][name]] == [len(group) for group in seeds]
            for prompt, group in zip(prompts, outputs[rank][name], strict=True):
                assert_sampled_from(models[folder], prompt, group)
    versions = [[version for version, *_ in one["delayed"]] for one in outputs]
    assert versions[0] == versions[1] and len(versions[0]) == 16 and {0, 1} < set(versions[0])
    for one in outputs:
        for version, prompt, group in one["delayed"]:
            assert_sampled_from(models[("first", "other")[version % 2]], prompt, group)
    single = vllm_engines(folder=str(tmp_path / "first"))
    for rank in (0, 1):
        alone = tokens(single.generate(*work(rank), Sampling(max_tokens=8, temperature=0.8), 3, [1]))
        assert [[ids for ids, *_ in group] for group in alone] == [
            [ids for ids, *_ in g] for g in outputs[rank]["first"]
        ]
    for one in outputs:
        assert one["any"] == [True, True, False] and one["logprobs"] == outputs[0]["logprobs"]
    assert [one["nothing"] for one in outputs] == [1, 0]


def assert_sampled_from(lm, prompt: list, group: list) -> None:
    """Each response's log-probabilities and top tokens are this model's, at a temperature of 0.8."""
    for ids, logp, top in group:
        want, sampled = log_probabilities(lm, prompt, ids, 0.8)
        assert np.allclose(logp, at(want, sampled).detach(), atol=1e-4)
        assert torch.equal(torch.tensor(top), want.topk(3, -1).indices)


@pytest.mark.timeout(400)
def test_a_probe_of_an_engine_on_two_ranks(tmp_path):
    """In float32 the engine's log-probabilities equal the learner's to rounding; its sums differ from one rank's."""
    named = folder_and_task(model("qwen3", num_key_value_heads=2), tmp_path) | {"reward": "math", "max_tokens": 12}
    named |= {"samples": 2, "rollout_tp": 2, "out": tmp_path / "two.json"}
    screen = torchrun("../probe/__main__.py", *(f"--{name}={value}" for name, value in named.items()))
    assert screen.count("figure: ") == 1  # of the first rank
    report = json.loads((tmp_path / "two.json").read_text())
    assert report["responses"] == 16 and report["tokens"] > 100 and (tmp_path / "two.png").is_file()
    assert 0 < report["largest_mismatch"] < 1e-5 and 0 <= report["kl"] < 1e-10


@pytest.mark.parametrize("ranks, words", [(1, "1 is not a multiple of it"), (4, "torchrun started 4 ranks; give both")])
def test_a_probe_has_one_engine(ranks, words, monkeypatch):
    monkeypatch.setattr("probe.__main__.WORLD_SIZE", ranks)
    with pytest.raises(UserError, match=f"--rollout_tp=2: .*{words}"):
        check_flags(ProbeFlags(model="m", rollout_tp=2, max_tokens=8, rollout="vllm"))


def test_ranks_of_one_engine_sample_until_all_have_their_groups(folders):
    """Dynamic sampling: a rank with all its groups keeps calling with 0 prompts while a second rank needs more."""

    answers, conditions, calls = [True, True, True, False], [], []
    engine = SimpleNamespace(packed=False, dtype="float32", sleep=lambda: calls.append("sleep"))
    engine.any_rank = lambda condition: conditions.append(condition) or answers[len(conditions) - 1]
    task = SimpleNamespace(problem=lambda split, i: SimpleNamespace(id=str(i)))
    options = dict(group_size=4, topk=0, model="policy", check=None, resample=5, stop_ids=[1])
    source = LocalSource(engine, task, None, Sampling(), **options)
    source.sample = lambda numbers: calls.append(len(numbers)) or make_groups(len(numbers), seed=2)
    assert len(source.next(2, 0)) == 2
    assert conditions == [True, False, False, False] and calls == [2, 0, 0, "sleep"]
    assert source.sequence == 2


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"rollout_tp": 2}, "--rollout_tp=2: --rollout=hf has an engine on each rank; use --rollout=vllm"),
        (
            {"rollout_tp": 2, "rollout": "vllm", "rollout_quant": "fp8", "learner_quant": "aligned"},
            "use w4a16, or leave",
        ),
        ({"rollout_tp": 3, "rollout": "vllm"}, r"--rollout_tp=3: .* 4 is not a multiple of it; start"),
        (
            {"rollout_tp": 2, "rollout": "vllm", "delay": "constant", "dynamic_sampling": 1},
            "--rollout_tp=2: with --delay and --dynamic_sampling an engine's ranks need different weights",
        ),
    ],
)
def test_ranks_that_cannot_be_one_engine_are_refused(flags, words):
    sizes = {"actor": "none", "rollout": "hf", "train_batch": 16, "rollout_batch": 16, "group_size": 4}
    with pytest.raises(UserError, match=words):
        settings.resolve(Config(**{**sizes, **flags}), n_ranks=4)


# -- The engine's memory during the update ----------------------------------------------------------------------------


def recorded(level: int, monkeypatch) -> tuple[VLLMEngine, Mock]:
    """A VLLMEngine as on a GPU, and a stand-in for its vLLM, which records calls."""
    engine, llm = VLLMEngine.__new__(VLLMEngine), Mock()
    llm.apply_model = lambda f: [f(torch.nn.ModuleDict({"lm_head": torch.nn.Linear(1, 1)}))]
    llm.enqueue.return_value, llm.llm_engine.has_unfinished_requests.return_value = [], False
    monkeypatch.setattr(torch.cuda, "empty_cache", llm.free)
    vars(engine).update(experts=set(), llm=llm, sleep_level=level, asleep=False, ranks=None, loads=0)
    engine.make_params = lambda **how: None
    return engine, llm


LOADS, FORGETS = call.collective_rpc("reload_weights", kwargs=ANY), call.reset_prefix_cache()
GENERATES = [call.enqueue(ANY, ANY, use_tqdm=False), call.llm_engine.has_unfinished_requests()]


def test_an_engine_without_weights_loads_them_before_its_cache(monkeypatch):
    engine, llm = recorded(2, monkeypatch)
    engine.load([("a", torch.ones(1))])
    engine.sleep()
    engine.sleep()
    with pytest.raises(RuntimeError, match="released its weights; load new weights first"):
        engine.generate([[1]], [[2]], Sampling(), 0, [1])
    engine.load([("a", torch.ones(1)), ("b", torch.ones(1))])
    engine.generate([], [], Sampling(), 0, [1])
    loads_again = [call.free(), call.wake_up(tags=["weights"]), LOADS, call.wake_up(tags=["kv_cache"]), FORGETS]
    assert llm.mock_calls == [LOADS, FORGETS, call.sleep(level=2), *loads_again, *GENERATES]


def test_an_engine_with_weights_wakes_at_the_next_call(monkeypatch):
    """Without a GPU (level 0) nothing sleeps."""
    for level, before in ((1, [call.sleep(level=1), call.free(), call.wake_up()]), (0, [])):
        engine, llm = recorded(level, monkeypatch)
        engine.sleep()
        for _ in range(2):
            engine.generate([], [], Sampling(), 0, [1])
        assert llm.mock_calls == [*before, *GENERATES, *GENERATES]
    engine, llm = recorded(1, monkeypatch)
    engine._of_all_ranks = lambda parts: ([parts], None)
    engine.sleep()
    engine.held()  # reads the engine's memory
    assert llm.wake_up.called


def test_sleep_levels():
    for flags, level in (({}, 2), ({"rollout_quant": "int8"}, 1), ({"delay": "constant"}, 1)):
        assert sleep_level(make_cfg(**flags)) == level


@pytest.mark.parametrize("delay", ["none", "constant"])
def test_an_engine_sleeps_after_every_rollout(delay, folders, tmp_path, monkeypatch):
    """The order of calls of one run with the plain engine: only the learner works between a sleep and the next use,
    and an engine without weights is loaded first."""
    log = []

    def record(owner, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: log.append(name) or original(*args, **more))

    for name in ("sleep", "load", "generate", "logprobs"):
        record(HFEngine, name)
    record(Learner, "step")
    flags = {"actor": "none", "model": str(folders / "policy"), "delay": delay, "steps": 2, "max_tokens": 4}
    flags |= {"max_staleness": 1} if delay != "none" else {}
    train.train(make_cfg(objective="tis", out=str(tmp_path / "run"), eval_problems=1, check_sync=False, **flags))
    assert log[0] == "sleep"  # before a second engine starts, or a resumed run trains
    rounds = " ".join(log[1:]).split("step")
    assert len(rounds) == 3
    for one, evaluations in zip(rounds, (1, 0, 1), strict=True):  # before the first update, and after the last
        calls = one.split()
        rollouts = 0 if one is rounds[-1] else 1
        assert calls[-1] == "sleep" and calls[-2] == "generate" and calls.count("sleep") == evaluations + rollouts
        woken = [calls[0], *(after for before, after in pairwise(calls) if before == "sleep")]
        assert delay != "none" or set(woken) == {"load"}
