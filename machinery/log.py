"""The log of a run: metrics.jsonl, samples.jsonl, and warnings about metrics.

metrics.jsonl has one line for the evaluation before training, and one per update; metrics.py
explains the names."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from machinery.flags import need, replace_text

# thresholds of WARNINGS that are not 0
ABOVE = {
    "grade/inexact": 0.2,
    "rollout_corr/seq_clamped_fraction": 0.5,
    "cut": 0.5,
}
# printed once per run, when the metric exceeds its threshold
WARNINGS = {
    "grade/inexact": (
        "more than a fifth of the responses to problems with a number as gold answer are graded right, but end with a "
        "different number: the policy may exploit the grader; read samples.jsonl, or use --reward=gsm8k"
    ),
    "rollout_corr/seq_clamped_fraction": (
        "more than half of the responses are at the clamp of --log_ratio_clamp: their weights are equal because they "
        "are clamped, and an effective sample size near 1 is misleading; sequence weights correct nothing at this "
        "length"
    ),
    "poisoned": (
        "the engine gave a log-probability that is non-finite, positive or below -200: such responses are left out; "
        "if this repeats, try --rollout_dtype=float32 or a different --rollout_quant"
    ),
    "no_reward": (
        "every reward of an update is 0, so nothing is learned from it: read samples.jsonl, and check --max_tokens, "
        "--reward and the prompt"
    ),
    "cut": (
        "more than half of the responses of an update were cut at --max_tokens, and cut responses earn little or "
        "nothing: raise --max_tokens, or read samples.jsonl"
    ),
    "rejected_steps": (
        "no token of an update reached the loss, so the policy did not change: with --mask_cut every response was cut "
        "(raise --max_tokens), or every token was rejected (widen --rs_low and --rs_high)"
    ),
}


class Log:
    """Writer of metrics.jsonl and samples.jsonl. Names of times, and no other names, end in `_s`
    or `_seconds`."""

    def __init__(self, run: Path, step: int):
        self.path = run / "metrics.jsonl"
        truncate(self.path.with_name("samples.jsonl"), step)
        # step 0 also removes the evaluation before training (step -1)
        truncate(self.path, step or -1)
        # whether the last line has an evaluation
        last = rows(self.path)[-1:]
        self.evaluated = any(name.startswith("eval/") for row in last for name in row)
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  open as long as the run
        # the number of rejected updates is a count since the start of the run
        rejected = any(row.get("rejected_steps") for row in last)
        self.said = {"rejected_steps"} if rejected else set()

    def write(self, step: int, values: dict) -> None:
        self.file.write(
            json.dumps({"step": step, **{k: clean(v) for k, v in values.items()}})
            + "\n"
        )
        self.file.flush()
        for name in WARNINGS.keys() - self.said:
            if values.get(name, 0) > ABOVE.get(name, 0):
                self.said.add(name)
                tqdm.write(
                    f"warning: update {step + 1}: {WARNINGS[name]}", file=sys.stderr
                )

    def write_samples(self, samples: list[dict]) -> None:
        with open(self.path.with_name("samples.jsonl"), "a", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in samples)

    def close(self) -> None:
        self.file.close()


def samples_of(groups, logp: list, step: int, tokenizer) -> list[dict]:
    """Lines of samples.jsonl: the first response of each group.

    logp: for each of these responses, the policy's log-probabilities of its tokens."""
    out = []
    for group, policy in zip(groups, logp, strict=True):
        r = group.responses[0]
        gap = (policy - r.logp_inf).astype(np.float64).round(4) * r.loss_mask
        texts = [tokenizer.decode([int(t)]) for t in r.tokens]
        row = {
            "step": step,
            "prompt": tokenizer.decode(group.prompt_ids.tolist()),
            "response": tokenizer.decode(r.tokens.tolist()),
            "reward": r.reward,
            "finish_reason": r.finish_reason,
            # mean |log p_policy - log p_inf| of sampled tokens, nats
            "gap": float(np.abs(gap).sum() / max(1, r.loss_mask.sum())),
            # position, token, gap
            "largest": [
                [int(t), texts[t], float(gap[t])] for t in np.argsort(-np.abs(gap))[:5]
            ],
            "tokens": texts,
            "gaps": gap.tolist(),
        }
        out.append(row)
    return out


def clean(v):
    """The value, or None for NaN and infinity, which JSON does not have."""
    return None if isinstance(v, float) and not math.isfinite(v) else v


def truncate(path: Path, step: int) -> None:
    """Keep only the lines before `step`, because a resumed run writes the later lines again."""
    if not path.exists():
        return
    kept = [json.dumps(row) + "\n" for row in rows(path) if row["step"] < step]
    replace_text(path, "".join(kept))


def rows(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl, without a last line that a kill has cut short. UserError: a
    different line is damaged."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    out = []
    for number, line in enumerate(lines, 1):
        try:
            out.append(json.loads(line))
        except ValueError:
            need(
                number == len(lines),
                f"{path}, line {number}: not valid JSON; remove that line",
            )
    return out


def read_metrics(run: Path | str) -> list[dict]:
    """The lines of a run's metrics.jsonl. Raises UserError if the file has no lines."""
    path = Path(run) / "metrics.jsonl"
    need(
        path.is_file(),
        f"{path}: no such file; give the folder of a run (it holds metrics.jsonl)",
    )
    lines = rows(path)
    need(
        lines,
        f"{path}: no line of metrics in it; wait for the run's first update, or give the folder of a different run",
    )
    return lines
