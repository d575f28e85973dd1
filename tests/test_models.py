"""Logits and vocabularies of real models, on stand-ins of ten families: the learner scores like the model, engines
sample from the model, unsupported models are refused."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import logprobs, make_cfg, make_groups
from standins import COMMON, FAMILIES, config, folder_and_task, model, save, tokenizer
from transformers import AutoConfig
from transformers.integrations import sdpa_attention

import batching
import train
from learner import Learner
from machinery import run
from machinery.checkpoint import models
from machinery.flags import UserError
from machinery.ranks import Comm
from model import Needs, attention, memory
from model.engines import HFEngine
from model.head import check_head
from model.streamed import StreamedModel
from sampling import Sampling
from sync import WeightCheck

IDS = len(tokenizer())
PROMPTS = [np.arange(5, 10, dtype=np.int32), np.arange(20, 32, dtype=np.int32)]
TWO_ROWS = np.arange(40).reshape(2, 20)


def learner_of(policy, actor=None, vocabulary=IDS, **changes) -> Learner:
    named = {} if actor is None else {"actor": "base:actor"}
    return Learner(policy, actor, make_cfg(**{"objective": "tis", **named, **changes}), Comm(), vocabulary)


def scores(lm, ids: np.ndarray):
    """log p(ids[t] | ids[:t]) for t >= 1 from the model's logits over existing ids: (R, L) -> (R, L - 1)."""
    ids = torch.from_numpy(ids).long()
    logp = lm(input_ids=ids).logits[:, :-1, :IDS].log_softmax(-1)
    return logp.gather(2, ids[:, 1:, None])[..., 0]


def scores_of(lm, prompt, r):
    """The same of a response's tokens: (L,)."""
    return scores(lm, np.concatenate([prompt, r.tokens])[None])[0, len(prompt) - 1 :]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_learner_scores_like_the_model(family):
    """To 1e-5, for ten families; the gradient is the gradient of the model's log-softmax."""
    lm, groups = model(family), make_groups(2, vocab=IDS)
    learner = learner_of(lm)
    batch = batching.collate(groups, learner.cfg)
    with torch.enable_grad():
        logp = learner.models(batch, Needs())["logp"]
        logp.sum().backward()
    got = {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}
    lm.zero_grad()
    total = 0.0
    for row, (g, r) in enumerate((group, r) for group in groups for r in group.responses):
        want = scores_of(lm, g.prompt_ids, r)
        assert torch.allclose(logp[row, : len(r.tokens)], want, atol=1e-5)
        total = total + want.sum()
    total.backward()
    for name, p in lm.named_parameters():
        if p.grad is not None:
            assert torch.allclose(got[name], p.grad, atol=1e-4 * float(p.grad.abs().max())), name
    check_head("model", lm.config)


MAMBA = dict(mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
GROUPS = dict(n_group=1, topk_group=1, first_k_dense_replace=0, n_shared_experts=1)
# attention or a mixer with direct parameters, called with names only; or a router with a saved buffer
OWN_PARAMETERS = {
    "glm4_moe": dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16, **GROUPS),
    "falcon_h1": MAMBA,
    "diffllama": dict(num_key_value_heads=2),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=32),
    "bamba": {**MAMBA, "attn_layer_indices": [1], "mamba_n_heads": 8},
    "qwen3_5_text": dict(head_dim=32, layer_types=["linear_attention", "full_attention"], **LINEAR),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "olmo_hybrid": dict(rope_parameters=None, layer_types=["linear_attention", "full_attention"], **LINEAR),
}


@pytest.mark.parametrize("family", [*FAMILIES, *OWN_PARAMETERS])
def test_published_tensors_give_the_models_log_probabilities(family, tmp_path):
    """In the check of syncs and in the plain engine, which also samples from them, with a cache and padded prompts."""
    lm = model(family, **OWN_PARAMETERS.get(family, {}))
    folder = save(lm, tmp_path)
    for name, buffer in lm.named_buffers():
        if name in lm.state_dict():  # a value after training, different from the folder's
            buffer.copy_(torch.linspace(-0.5, 0.5, buffer.numel()))
    want = scores(lm, TWO_ROWS).detach().numpy()
    assert np.allclose(StreamedModel(lm.config).logprobs(lm.state_dict().items(), TWO_ROWS), want, atol=1e-4)
    for head_fp32 in (False, True) if family in FAMILIES else (False,):
        engine = HFEngine(folder, head_fp32=head_fp32)
        engine.load(lm.state_dict().items())
        assert np.allclose(engine.logprobs(TWO_ROWS), want, atol=1e-4)
        groups = engine.generate(PROMPTS, [[1, 2], [3, 4]], Sampling(max_tokens=12), 0, [])
        for prompt, group in zip(PROMPTS, groups, strict=True):
            for r in group:
                assert np.allclose(r.logp_inf, scores_of(lm, prompt, r).detach().numpy(), atol=1e-4)


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f != "qwen3_moe"]
)  # qwen3_moe: in a separate process, test_moe.py
def test_vllm_loads_the_weights_of_each_family(family, tmp_path, vllm_engines):
    """All published tensors, tied heads included; the learner still works in the engine's process, although vLLM uses
    transformers' class for a few families."""
    engine = vllm_engines(folder=save(model(family), tmp_path), memory_gib=0.02)
    new = model(family, seed=1)
    learner = learner_of(new)
    engine.load(learner.named_tensors("policy"))
    want = scores(new, TWO_ROWS).detach().numpy()
    assert np.allclose(engine.logprobs(TWO_ROWS), want, atol=1e-4)
    assert np.allclose(logprobs(learner, "policy", TWO_ROWS), want, atol=1e-4)
    assert isinstance(model(family, seed=2), type(new))  # a new model can still be made


# -- Unsupported models -----------------------------------------------------------------------------------------------


def test_a_family_with_unknown_operations_on_logits_is_refused(tmp_path):
    """Falcon-H1 multiplies logits by a factor; the same model with factor 1 is accepted."""
    sentence = "models of the family falcon_h1 apply an operation to their logits"
    other = model("falcon_h1", lm_head_multiplier=0.5, **MAMBA)
    with pytest.raises(UserError, match=f"--actor: {sentence}"):
        check_head("actor", other.config)
    check_head("actor", config("falcon_h1", lm_head_multiplier=1.0, **MAMBA))
    with pytest.raises(UserError, match=f"--model: {sentence}"):
        train.train(make_cfg(objective="tis", out=str(tmp_path / "run"), **folder_and_task(other, tmp_path)))
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_cap_of_attention_scores_is_applied(tmp_path):
    """Gemma 2 caps attention scores. torch's default attention would ignore the cap in models from a folder."""
    lm, ids = model("gemma2", attn_logit_softcapping=0.5, query_pre_attn_scalar=1), np.arange(12)[None] * 7 % IDS
    folder = save(lm, tmp_path)
    lm.set_attn_implementation("eager")
    capped = scores(lm, ids)
    lm.set_attn_implementation("sdpa")
    assert (scores(lm, ids) - capped).abs().max() > 0.01
    for one in (models.load_model(folder), learner_of(memory.unread(folder)).models.policy):
        assert torch.allclose(scores(one, ids), capped, atol=1e-5)
    published = StreamedModel(models.read_config(folder)).logprobs(lm.state_dict().items(), ids)
    for got in (published, HFEngine(folder).logprobs(ids)):
        assert np.allclose(got, capped.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "family, changes, sentence",
    [
        ("mixtral", {"num_local_experts": 4}, ""),
        ("qwen3_moe", {}, ""),
        ("gpt2", {}, "family gpt2: its layers are not found"),
        ("qwen2", {"quantization_config": {"quant_method": "fp8"}}, "its weights are already quantized"),
    ],
)
def test_unsupported_models_are_refused(family, changes, sentence, tmp_path):
    """The check reads only config.json."""
    config(family, **changes).save_pretrained(tmp_path)
    cfg = make_cfg()
    if not sentence:
        return run.check_models(cfg, str(tmp_path), None)
    with pytest.raises(UserError, match=sentence):
        run.check_models(cfg, str(tmp_path), None)


@pytest.mark.parametrize(
    "kind, tokens, refused", [("longrope", 65, True), ("longrope", 64, False), ("dynamic", 9, True)]
)
def test_angles_that_depend_on_a_batch_are_refused(kind, tokens, refused, tmp_path):
    """Both engines would rotate keys by different angles than the learner."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    config("llama", rope_parameters=rope).save_pretrained(tmp_path)
    if not refused:
        return models.check_angles(str(tmp_path), tokens)
    with pytest.raises(UserError, match=f"rotary angles of the kind {kind}: with {tokens} tokens of prompt"):
        models.check_angles(str(tmp_path), tokens)


# -- Embedding rows without a token -----------------------------------------------------------------------------------


def padded(family: str, rows: int, seed: int = 0):
    """A model with more rows than the tokenizer has ids; the additional rows have the largest logits."""
    lm = model(family, seed, vocab_size=rows)
    with torch.no_grad():
        weight = lm.get_output_embeddings().weight
        weight[IDS:] = 5 * weight[: rows - IDS]
    return lm


@pytest.mark.parametrize("kind", ["hf", "hf, head in float32", "vllm"])
def test_engines_ignore_padding_rows(kind, tmp_path, vllm_engines):
    """They never sample or score a padding row, with their first weights and with published weights."""
    folder, other = save(padded("qwen2", IDS + 30), tmp_path), padded("qwen2", IDS + 30, 1)
    if kind == "vllm":
        engine = vllm_engines(folder=folder, vocabulary=IDS)
    else:
        engine = HFEngine(folder, head_fp32=kind != "hf", vocabulary=IDS)
    check = WeightCheck(models.read_config(folder), np.arange(8 * 30).reshape(8, 30), vocabulary=IDS)
    for lm in (padded("qwen2", IDS + 30), other):
        tensors = {**lm.state_dict(), "lm_head.weight": lm.get_output_embeddings().weight.detach()}
        check.load(engine, 0, tensors.items())  # SyncError unless engine and check agree
        groups = engine.generate(PROMPTS, [[1, 2]] * 2, Sampling(max_tokens=20), 5, [])
        for prompt, r in ((prompt, r) for prompt, group in zip(PROMPTS, groups, strict=True) for r in group):
            assert max(r.tokens.max(), r.topk_ids.max()) < IDS
            assert np.allclose(r.logp_inf, scores_of(lm, prompt, r).detach().numpy(), atol=1e-4)
    assert int(other(torch.from_numpy(TWO_ROWS)).logits.argmax(-1).max()) >= IDS  # it would sample a padding row


# -- Sources of models ------------------------------------------------------------------------------------------------


def folder_of(model: str) -> str:
    """The folder that --model=MODEL opens."""
    return run.model_folder("model", SimpleNamespace(model=model), Comm())


def test_an_id_of_the_hub(hub):
    """Offline: a cached model is found, a different one is refused in one sentence."""
    fetched = hub("some/one")
    save(model("qwen3"), fetched)
    assert Path(folder_of("some/one")) == fetched
    with pytest.raises(UserError, match="--model=some/other: no such folder here, and the hub cannot provide it"):
        folder_of("some/other")


def test_a_multimodal_model_is_refused(tmp_path):
    AutoConfig.for_model("qwen2_5_vl", text_config={**COMMON, "vocab_size": IDS}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="a multimodal model of the family qwen2_5_vl; give a text-only model"):
        models.read_config(tmp_path)


def test_added_tokens_may_lack_rows(tmp_path):
    """As in Gemma 3's tokenizer; not if the chat template writes them. The routers' auxiliary loss is switched off."""
    experts = model("qwen3_moe", output_router_logits=True)
    folder, more = save(experts, tmp_path), tokenizer()
    check_head("model", models.read_config(folder))
    more.add_tokens(["<image>"])
    assert len(more) == IDS + 1 and models.vocabulary_size(more, [folder]) == IDS
    more.chat_template += "<image>"
    with pytest.raises(
        UserError, match=f"its tokenizer has {IDS + 1} tokens and its config.json a vocab_size of {IDS}"
    ):
        models.vocabulary_size(more, [folder])


# -- Attention without copies -----------------------------------------------------------------------------------------


def results_with_a_mask() -> dict:
    """Logits after a cached, padded prompt, and gradients by parameter."""
    lm = model("llama", 0, num_attention_heads=4, num_key_value_heads=2)
    ids = torch.arange(24).reshape(2, 12) * 7 % 200
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    out = lm(input_ids=ids, attention_mask=mask, use_cache=True)
    (out.logits * torch.linspace(-1, 1, IDS)).sum().backward()
    more = torch.cat([mask, mask[:, -1:]], 1)
    after = lm(input_ids=ids[:, :1], attention_mask=more, past_key_values=out.past_key_values).logits
    return {"logits": out.logits, "after": after, **{name: p.grad for name, p in lm.named_parameters()}}


def test_keys_and_values_read_in_groups_give_the_same_bits(monkeypatch):
    with attention.grouped(False):
        copied = results_with_a_mask()

    def repeat(*args):
        raise AssertionError("keys and values are copied")

    monkeypatch.setattr(sdpa_attention, "repeat_kv", repeat)
    read = results_with_a_mask()
    assert copied.keys() == read.keys() and all(torch.equal(copied[name], read[name]) for name in copied)


def test_on_a_gpu_masks_ask_for_copies():
    """In float32 always: the kernel without a score matrix does not support groups."""
    key = torch.empty(1, 2, 3, 8, device="meta")
    half = key.bfloat16()
    assert not attention.reads_groups(torch.ones(1), half, half) and attention.reads_groups(None, half, half)
    assert not attention.reads_groups(None, key, key)
