"""Speed metrics of a run: tokens per second, share of the device's peak, and memory.

    speed/rollout_tokens    tokens of this rank's responses, replies of an environment included,
                            per second of rollout
    speed/update_tokens     trained tokens of this rank, prompts included, per second of update
    speed/peak              share of the device's dense bfloat16 peak that the updates reach
    speed/memory_GiB        peak memory that torch has allocated on the device since the last line

Forward and backward of a token cost 6 P + 6 L A S operations: P parameters in matrix products,
L layers, A query entries over all heads, S tokens of the row. Attention is causal, and recomputed
activations are not counted. With LoRA and with experts this overestimates the cost, so speed/peak
is left out.
"""

from __future__ import annotations

import torch

# operations per second, bfloat16 without sparsity
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


def peak_of(device: str) -> float:
    """Peak operations per second of this device; NaN if unknown."""
    name = (
        torch.cuda.get_device_name(device)
        if torch.device(device).type == "cuda"
        else ""
    )
    return next((flops for key, flops in PEAK.items() if key in name), float("nan"))


def operations(model, length: float) -> float:
    """Operations per token, forward and backward, on rows of `length` tokens (see above)."""
    c = model.config.get_text_config()
    P = sum(p.numel() for p in model.parameters())
    if not c.tie_word_embeddings:
        P -= model.get_input_embeddings().weight.numel()  # a lookup, not a product
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 6 * P + 6 * c.num_hidden_layers * c.num_attention_heads * head_dim * length


class Speed:
    """Counter of the tokens between two lines of the log."""

    def __init__(self, models: list, device: str, dense: bool):
        """models: the trained models. dense: whether `operations` is correct for them."""
        self.models, self.device = models, device
        self.peak = peak_of(device) if dense else float("nan")
        self.sampled = self.trained = self.rows = 0

    def count_sampled(self, groups) -> None:
        """Count the tokens of a rollout's responses."""
        self.sampled += sum(len(r.tokens) for group in groups for r in group.responses)

    def count_trained(self, batch) -> None:
        """Count the rows and tokens of an update."""
        self.trained += int((batch.prompt_len + batch.length).sum())
        self.rows += len(batch)

    def read(self, seconds: dict[str, float]) -> dict[str, float]:
        """The metrics since the last call; resets them. seconds: by stage, over the same period."""
        out = {}
        if self.sampled and seconds.get("rollout_s"):
            out["speed/rollout_tokens"] = self.sampled / seconds["rollout_s"]
        if self.trained and seconds.get("update_s"):
            out["speed/update_tokens"] = per_second = self.trained / seconds["update_s"]
            if self.peak == self.peak:
                work = sum(operations(m, self.trained / self.rows) for m in self.models)
                out["speed/peak"] = work * per_second / self.peak
        if torch.device(self.device).type == "cuda":
            out["speed/memory_GiB"] = (
                torch.cuda.max_memory_allocated(self.device) / 2**30
            )
            torch.cuda.reset_peak_memory_stats(self.device)
        self.sampled = self.trained = self.rows = 0
        return out
