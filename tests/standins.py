"""Stand-ins for real models: each family's architecture with few layers and random weights, and a tokenizer like
Qwen's. Nothing is downloaded."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = "What is the answer? The answer is \\boxed{12}. Let x + y = 3, so 2x = 6 and therefore x is 3, and the sum is 9."
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
# settings of each family in addition to COMMON; none is neutral, such as a factor of 1
FAMILIES = {
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(tie_word_embeddings=False, head_dim=32),
    "llama": dict(tie_word_embeddings=False),
    "mistral": dict(tie_word_embeddings=False, sliding_window=8),
    "gemma2": dict(head_dim=32, sliding_window=8, query_pre_attn_scalar=32, final_logit_softcapping=2.0),
    "gemma3_text": dict(head_dim=32, sliding_window=8, query_pre_attn_scalar=32),
    "granite": dict(logits_scaling=3.0, embedding_multiplier=2.0, residual_multiplier=0.7, attention_multiplier=0.2),
    "cohere": dict(logit_scale=0.4),
    "phi": dict(tie_word_embeddings=False),
    "qwen3_moe": dict(tie_word_embeddings=False, head_dim=32, **EXPERTS),
}
COMMON = dict(hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
COMMON |= dict(max_position_embeddings=256, initializer_range=0.2, bos_token_id=None, eos_token_id=2, pad_token_id=0)


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of about 300 ids with Qwen's special tokens and a ChatML template with `enable_thinking`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


def config(family: str, vocab_size: int = 0, **changes):
    """The configuration of a small model of any family. vocab_size: rows of the embedding; 0: one for each id of the
    tokenizer."""
    rows = vocab_size or len(tokenizer())
    return AutoConfig.for_model(family, vocab_size=rows, **{**COMMON, **FAMILIES.get(family, {}), **changes})


def model(family: str, seed: int = 0, vocab_size: int = 0, **changes):
    """A float32 model of any family, with random biases and norms. changes: of the configuration."""
    torch.manual_seed(seed)
    its_config = config(family, vocab_size, **changes)
    if getattr(its_config, "attn_logit_softcapping", None):
        its_config._attn_implementation = "eager"  # the only implementation in transformers with the cap
    new_model = AutoModelForCausalLM.from_config(its_config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in new_model.parameters():
            if p.ndim == 1:
                p += 0.3 * torch.randn_like(p)
    return new_model


def save(model_of_family, folder) -> str:
    """Save a model and the tokenizer as a Hugging Face folder, and return its path."""
    model_of_family.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def folder_and_task(lm, folder: Path) -> dict:
    """Flags of a model on disk and of a file with eight problems."""
    rows = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(8)]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model": save(lm, folder / "start"), "task": str(folder / "task.jsonl")}
