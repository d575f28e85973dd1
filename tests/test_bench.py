"""The benchmarks' own arithmetic, command line and table; what they measure is for `python bench.py`."""

import json
import math

import pytest

import bench


def test_a_ratio_is_the_geometric_mean_over_pairs():
    out = bench.compare([(2.0, 1.0), (8.0, 1.0)])
    assert out["ratio"] == pytest.approx(4.0)
    assert out["high"] / out["ratio"] == pytest.approx(
        math.exp(1.96 * math.log(4) / 2)
    )  # std log 4 / sqrt 2, over sqrt 2
    assert out["ratio"] / out["low"] == pytest.approx(out["high"] / out["ratio"])
    assert (out["a_s"], out["b_s"], out["pairs"]) == (5.0, 1.0, 2)
    assert math.isnan(bench.compare([(2.0, 1.0)])["high"])


def test_pairs_alternate():
    """a b, b a, a b: neither gains from coming second."""
    calls = []
    out = bench.alternate(lambda: calls.append("a"), lambda: calls.append("b"), 3, "test", warm=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert out["pairs"] == 3


def test_both_heads_run_on_parameters_of_the_same_size():
    chunked, size = bench.head_once("chunked", N=5, V=50, H=4)
    naive, same = bench.head_once("naive", N=5, V=50, H=4)
    assert size == same == 4 * (5 * 4 + 50 * 4)
    chunked()
    naive()


def test_the_table(capsys):
    pair = {"ratio": 1.5, "low": 1.25, "high": 1.75, "a_s": 3.0, "b_s": 2.0, "pairs": 2}
    bench.print_table({"update": {**pair, "goal": "low"}, "gpu": {"tokens_per_s": 12.0}, "spin": {"none": pair}})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "             ratio     95 % interval   ours, s  other, s   more"
    assert lines[1] == "update       1.500     1.250 - 1.750     3.000     2.000   goal low"
    assert lines[2] == "gpu" + " " * 56 + "tokens_per_s 12"
    assert lines[3].split() == ["spin", "none", "1.500", "1.250", "-", "1.750", "3.000", "2.000"]
    assert json.loads(lines[4])["spin"] == {"none": pair}
