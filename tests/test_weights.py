"""Published weights on disk: written once for all ranks, deterministic."""

import os
import resource

import msgspec
import pytest
import torch
from conftest import Held, Stream, tiny_model
from safetensors.torch import load_file
from test_wire import RUN

import quant
from machinery.checkpoint.tensors import read_tensors, write_tensors
from machinery.flags import UserError
from machinery.ranks import Comm
from model.engines import HFEngine
from quant import format_of
from remote import delta, wire
from remote.sampler import SamplerFlags, open_source
from remote.weights import Store
from tasks.arith import arithmetic_tokenizer


def odd_tensors():
    """Tensors of many dtypes and shapes; a tied head, and a view of it."""
    x = torch.randn(7, 3)
    odd = {"b": torch.arange(5, dtype=torch.int8), "lm_head.weight": x, "a.t": x.t(), "embed_tokens.weight": x}
    odd |= {"low": torch.randn(3, 2).to(torch.float8_e4m3fn), "one": torch.tensor(2.5), "none": torch.zeros(0, 4)}
    return odd | {"half": torch.randn(3).bfloat16(), "long": torch.tensor([2**40, -1])}


def test_tensors_are_read_in_order(tmp_path):
    tensors = odd_tensors()
    for name in "xy":
        write_tensors(tmp_path / name, tensors.items())
    back = dict(read_tensors(tmp_path / "x"))
    assert list(back) == list(tensors)
    assert load_file(tmp_path / "x").keys() == tensors.keys() - {"lm_head.weight"}
    for name, x in tensors.items():
        assert back[name].dtype == x.dtype and back[name].shape == x.shape
        assert torch.equal(back[name].view(-1).view(torch.uint8), x.contiguous().view(-1).view(torch.uint8))
    data = (tmp_path / "x").read_bytes()
    assert data == (tmp_path / "y").read_bytes() and data[0] % 8 == 0  # tensors begin at a multiple of 8


def test_a_full_disk_is_one_sentence(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(UserError, match=r"/x: cannot be written .*; free disk space there"):
            write_tensors(tmp_path / "x", {"a": torch.ones(1000)}.items())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*tmp_path.iterdir()] == []


def test_one_copy_for_all_ranks(tmp_path):
    """Both ranks read every tensor equally often, one at a time; the first one writes. Old files are deleted."""
    for rank in range(2):
        comm = Comm()
        comm.rank = rank
        store = Store(tmp_path / "versions", comm, True)
        streams = [Stream(n=5, add=v, dtype=torch.bfloat16) for v in range(5)]
        published = [store.publish(v, stream) for v, stream in enumerate(streams)]
        assert [stream.passes for stream in streams] == [1] * 5
        path, _ = published[-1]
        assert dict(read_tensors(path))["t3"][0] == 7.0
        assert [change is not None for _, change in published] == [rank == 0 and v > 0 for v in range(5)]
        assert {file.name for file in path.parent.iterdir()} == {f"v00000{v}.safetensors" for v in (2, 3, 4)}


def test_a_restarted_learner_keeps_its_file_and_drops_the_delta(tmp_path):
    first = Store(tmp_path, Comm(), True)
    for v in range(3):
        path, _ = first.publish(v, Stream(n=2, add=v * (v < 2)))
    os.utime(path, (50.0, 50.0))
    again = Store(tmp_path, Comm(), True)
    path, change = again.publish(2, Stream(n=2), restored=True)
    assert path.stat().st_mtime == 50.0 and change is None
    assert [p.name for p in tmp_path.glob("v*.safetensors")] == [path.name]
    before = path.read_bytes()
    path, change = again.publish(3, Stream(n=2, add=1.0))
    assert change == delta.encode(before, path.read_bytes()) is not None
    os.utime(path, (50.0, 50.0))
    path, _ = Store(tmp_path, Comm(), True).publish(3, Stream(n=2, add=1.0))  # a different run
    assert path.stat().st_mtime > 50.0


FORMS = [  # dtype of the published weights, --rollout_quant of the learner, --rollout_quant of the sampler
    ("float32", "none", "none"),
    ("bfloat16", "none", "w4a16"),
    ("quantized", "int8", "auto"),
    ("quantized", "w4a16", "auto"),
]


def publish(folder, model, sync="bfloat16", learners="none"):
    """(the welcome of a learner of this model, its published weights)."""
    model.save_pretrained(folder / "model")
    arithmetic_tokenizer().save_pretrained(folder / "model")
    fmt, tensors = format_of(learners, 32), model.state_dict()
    if fmt is not None:
        tensors = dict(quant.for_engine(tensors.items(), model, fmt))
    if sync == "bfloat16":
        tensors = {name: x.bfloat16() for name, x in tensors.items()}
    write_tensors(folder / "v1", tensors.items())
    more = dict(packed=sync == "quantized", probe=torch.arange(2, 50).reshape(4, 12).tolist())
    run = msgspec.structs.replace(RUN, config={**RUN.config, "rollout_quant": learners}, **more)
    welcome = wire.Welcome("session", run, wire.pack_setup(str(folder / "model")))
    return welcome, wire.ReceivedWeights(1, 2.0, folder / "v1")


@pytest.mark.parametrize("sync, learners, samplers", FORMS)
def test_a_sampler_loads_the_published_weights(sync, learners, samplers, tmp_path):
    """In each published format; the engine has the weights bit for bit, and the weight check passes."""
    model = tiny_model(0)
    welcome, weights = publish(tmp_path, model, sync, learners)
    source = open_source(welcome, SamplerFlags(rollout="hf", rollout_quant=samplers), tmp_path / "box")
    source.load_weights(weights)
    assert (source.version, source.published) == (1, 2.0)
    engine = HFEngine(str(tmp_path / "model"), fmt=source.engine.fmt)
    tensors = model.state_dict().items()
    if sync == "bfloat16":
        tensors = [(name, x.bfloat16().float()) for name, x in tensors]
    engine.load(quant.for_engine(tensors, model, engine.fmt, engine.packed) if engine.fmt else tensors)
    assert (source.engine.logprobs(source.check.ids) == engine.logprobs(source.check.ids)).all()


def test_a_sampler_holds_only_its_engines_model(tmp_path):
    """From the start to checked weights, with activations and the sums of a digest in addition."""
    model = tiny_model(0, layers=8, hidden=128)
    welcome, weights = publish(tmp_path, model)
    with Held() as held:
        source = open_source(welcome, SamplerFlags(rollout="hf"), tmp_path / "box")
        source.load_weights(weights)
    assert held.most < 1.5 * sum(p.nbytes for p in model.parameters())
    assert all(p.is_meta for p in source.skeleton.parameters())
