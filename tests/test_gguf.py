"""GGUF files as models: the converted folder has the file's weights, head and tokenizer."""

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import standins
import torch
from standins import model

from config import Config
from eval import EvalFlags, find_model
from machinery import run, settings
from machinery.checkpoint import models
from machinery.checkpoint.models import load_model
from machinery.flags import UserError, is_hub_id, names_model
from machinery.ranks import Comm

NAMES = {  # names of qwen2's tensors in the GGUF format
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(lm, file: Path) -> None:
    """Write a Qwen2 model and the tokenizer of the stand-ins as a GGUF file in float32."""
    config, stored = lm.config, json.loads(standins.tokenizer().backend_tokenizer.to_str())["model"]
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    tokens = sorted(stored["vocab"], key=stored["vocab"].get)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in standins.SPECIAL else 1 for token in tokens])  # 3: control, 1: normal
    writer.add_token_merges([" ".join(pair) for pair in stored["merges"]])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    for name, x in lm.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer = re.match(r"model\.layers\.(\d+)\.(.*)\.(weight|bias)$", name)
        stem, kind = (layer[2], layer[3]) if layer else name.rsplit(".", 1)
        block = f"blk.{layer[1]}." if layer else ""
        writer.add_tensor(f"{block}{NAMES[stem]}.{kind}", x.numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def folder_of(file: Path) -> Path:
    """The folder that --model=FILE opens."""
    return Path(run.model_folder("model", SimpleNamespace(model=str(file)), Comm()))


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_is_converted_once(tied, tmp_path):
    """The folder has the file's weights in bfloat16, its head and its tokenizer. A newer file is converted again."""
    lm, file = model("qwen2", tie_word_embeddings=tied), tmp_path / "m.gguf"
    write_gguf(lm, file)
    folder = folder_of(file)
    config, read = models.read_config(folder), load_model(folder, dtype=torch.bfloat16).state_dict()
    assert (config.tie_word_embeddings, config.dtype, models.own_dtype(str(file))) == (tied, torch.bfloat16, "bfloat16")
    assert read.keys() == lm.state_dict().keys()
    for name, x in lm.state_dict().items():
        assert torch.equal(read[name], x.bfloat16()), name
    text = "What is the answer<|im_end|>"  # Qwen splits digits, the stand-in joins them
    assert models.read_tokenizer(folder)(text).input_ids == standins.tokenizer()(text).input_ids
    made = (folder / "config.json").stat().st_mtime_ns
    assert folder_of(file) == folder and (folder / "config.json").stat().st_mtime_ns == made
    other = model("qwen2", seed=1, tie_word_embeddings=tied)
    write_gguf(other, file)
    os.utime(file, (time.time() + 9, time.time() + 9))
    key = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(
        load_model(folder_of(file), dtype=torch.bfloat16).state_dict()[key], other.state_dict()[key].bfloat16()
    )


def test_two_processes_convert_a_gguf_file_once(tmp_path, monkeypatch):
    """A lock holds between processes as between threads, which open the lock file each."""
    write_gguf(model("qwen2"), tmp_path / "m.gguf")
    converted, convert = [], models.convert_gguf
    monkeypatch.setattr(models, "convert_gguf", lambda *args: (converted.append(args), convert(*args)))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(folder_of, [tmp_path / "m.gguf"] * 2)
    assert first == second and len(converted) == 1
    load_model(first)


def test_the_name_of_a_gguf_file(tmp_path, monkeypatch):
    """A file is a model of train.py and eval.py; a missing one is no id of the hub."""
    monkeypatch.chdir(tmp_path)
    write_gguf(model("qwen2"), Path("m.gguf"))
    assert names_model("m.gguf") and not names_model("a/m.gguf") and not is_hub_id("a/m.gguf")
    assert find_model(EvalFlags(model="m.gguf"), "model", "policy") == "m.gguf.bfloat16"
    with pytest.raises(UserError, match="--model=a/m.gguf: no model there; .* or a GGUF file"):
        find_model(EvalFlags(model="a/m.gguf"), "model", "policy")
    with pytest.raises(UserError, match="--model=a/m.gguf: no such GGUF file"):
        settings.check_models(Config(model="a/m.gguf", actor="none"))


def test_a_damaged_gguf_file_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF, but damaged")
    with pytest.raises(UserError, match="m.gguf: its contents cannot be read .*; give a folder as save_pretrained"):
        folder_of(tmp_path / "m.gguf")
    with (
        pytest.raises(UserError, match=r"needs the package gguf: pip install gguf --no-deps"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("importlib.util.find_spec", lambda name: None)
        folder_of(tmp_path / "m.gguf")
