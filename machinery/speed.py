"""Speed of a run: tokens per second, share of the device's peak, memory. Names begin with speed/.

    speed/rollout_tokens    sampled tokens of this rank, per second of rolling out
    speed/update_tokens     trained tokens of this rank, prompts included, per second of updating
    speed/peak              share of the device's dense bfloat16 peak that the updates reach
    speed/memory_GiB        the most that torch has allocated on the device since the last line

The work of a token is 6 P + 6 L A S operations for P parameters in products, L layers, A numbers of
all heads' queries and S tokens of a row: forward and backward, causal attention, nothing that is
computed a second time. With LoRA and for experts this counts more than is done, so there is no
share of the peak.
"""

from __future__ import annotations

import torch

GIB = 1 << 30
# operations a second, dense bfloat16 without sparsity
PEAK = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}


def peak_of(device: str) -> float:
    """Operations a second of this device; NaN where it is not known."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""
    return next((flops for key, flops in PEAK.items() if key in name), float("nan"))


def operations(model, length: float) -> float:
    """Operations a token of forward and backward on rows of `length` tokens (see above)."""
    c = model.config.get_text_config()
    P = sum(p.numel() for p in model.parameters())
    if not c.tie_word_embeddings:
        P -= model.get_input_embeddings().weight.numel()  # is looked up
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 6 * P + 6 * c.num_hidden_layers * c.num_attention_heads * head_dim * length


class Speed:
    """Counts tokens between two lines of the log."""

    def __init__(self, models: list, device: str, dense: bool):
        """models: those that learn. dense: `operations` counts their work."""
        self.models, self.device = models, device
        self.peak = peak_of(device) if dense else float("nan")
        self.sampled = self.trained = self.rows = 0

    def count_sampled(self, groups) -> None:
        """Count the responses of a roll-out."""
        self.sampled += sum(len(r.tokens) for group in groups for r in group.responses)

    def count_trained(self, batch) -> None:
        """Count the rows of an update."""
        self.trained += int((batch.prompt_len + batch.length).sum())
        self.rows += len(batch)

    def read(self, seconds: dict[str, float]) -> dict[str, float]:
        """The metrics since it was last read. seconds: by stage, over the same time."""
        out = {}
        if self.sampled and seconds.get("rollout_s"):
            out["speed/rollout_tokens"] = self.sampled / seconds["rollout_s"]
        if self.trained and seconds.get("update_s"):
            per_second = self.trained / seconds["update_s"]
            out["speed/update_tokens"] = per_second
            if self.peak == self.peak:
                work = sum(operations(m, self.trained / self.rows) for m in self.models)
                out["speed/peak"] = work * per_second / self.peak
        if torch.device(self.device).type == "cuda":
            out["speed/memory_GiB"] = torch.cuda.max_memory_allocated(self.device) / GIB
            torch.cuda.reset_peak_memory_stats(self.device)
        self.sampled = self.trained = self.rows = 0
        return out
