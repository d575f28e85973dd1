"""Speed metrics by hand, and the operations of a token against torch's counter."""

from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model
from torch.utils.flop_counter import FlopCounterMode

from machinery import plot, speed


def test_tokens_per_second_by_hand(monkeypatch):
    """Two responses of 3 and 5 tokens in 2 s; rows of 4 + 3 and 2 + 5 tokens in 7 s; each is counted once."""
    monkeypatch.setattr(speed, "peak_of", lambda device: 1e6)
    model = tiny_model(1)
    meter = speed.Speed([model], "cpu", dense=True)
    meter.count_sampled([SimpleNamespace(responses=[SimpleNamespace(tokens=[0] * n) for n in (3, 5)])])
    batch = {"prompt_len": torch.tensor([4, 2]), "length": torch.tensor([3, 5])}
    meter.count_trained(type("Rows", (), {"__len__": lambda self: 2, **batch})())
    seconds = {"rollout_s": 2.0, "update_s": 7.0}
    values = meter.read(seconds)
    work = speed.operations(model, 7.0) * 2.0 / 1e6
    assert values == {"speed/rollout_tokens": 4.0, "speed/update_tokens": 2.0, "speed/peak": pytest.approx(work)}
    assert meter.read(seconds) == {}
    rows = [seconds | values, {"update_s": 1.0, "speed/update_tokens": 10.0}]
    lines = plot.time_lines(rows)
    assert [line.split() for line in lines[1:]] == [
        ["rollout", "2.0", "4", "tokens/s", "per", "rank"],
        ["update", "8.0", "3", "tokens/s", "per", "rank"],
        ["total", "10.0"],
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_operations_equal_torchs_count(tied):
    """Forward and backward of 2 rows of 6 tokens, with the head's products, without the embedding lookup."""
    model = tiny_model(1, layers=2, tie=tied)
    ids = torch.arange(12).view(2, 6)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    counted = sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op) and "bmm" not in str(op)
    )
    assert 12 * speed.operations(model, 0.0) == pytest.approx(counted, rel=0.05)  # norms are not products
    c = model.config
    per_token = speed.operations(model, 10.0) - speed.operations(model, 0.0)
    assert per_token == 6 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * 10
