"""Compare the time of a whole step (publish, roll out, grade, update) with a step of TRL's GRPOTrainer.

    pip install --target=.trl --no-deps trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 pandas==3.1.1 \\
        pyarrow==26.0.1 xxhash==4.1.0 multiprocess==0.70.19 pytz==2026.6
    PYTHONPATH=.trl python results/against_trl.py

Both sides use the same model, prompts of one task, 256 responses in groups of 8, 16 new tokens, and plain torch
samplers. TRL's reward is a stand-in (whether the text has an odd length), not the task's grading.
After that our step is timed with vLLM. Only this file and tests/tools/conform.py use TRL.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import compare, resolved, seconds, shaped, update
from config import Config
from learner import Learner
from machinery.checkpoint.models import load_model, read_config
from machinery.flags import UserError, need, run_command
from machinery.ranks import Comm
from model import attention
from model.engines import HFEngine, VLLMEngine
from sampling import Sampling
from source import LocalSource
from sync import WeightCheck
from tasks.arith import Arithmetic, arithmetic_tokenizer


def our_step(folder: str, engine, cfg: Config, device: str = "cpu"):
    """A callable that publishes, rolls out, grades and updates, like the loop of train.py."""
    learner = Learner(load_model(folder), None, cfg, Comm(device))
    source = LocalSource(
        engine,
        Arithmetic(),
        arithmetic_tokenizer(),
        Sampling(max_tokens=cfg.max_tokens),
        group_size=cfg.group_size,
        topk=0,
        model="policy",
        check=WeightCheck(read_config(folder), np.arange(2, 14)),
    )

    def step():
        source.publish(learner.version, learner.published("policy", engine.packed))
        update(learner, source.next(cfg.train_batch // cfg.group_size, learner.version))

    return step


def grpo_trainer(folder: str, out: str, steps: int, callback, **options):
    """TRL's trainer on arith: batch 256, groups of 8, 16 new tokens, unless `options` of GRPOConfig
    differ."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    usual = dict(
        per_device_train_batch_size=256,
        num_generations=8,
        max_completion_length=16,
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=10**6,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        seed=0,
    )
    args = GRPOConfig(output_dir=out, max_steps=steps, **{**usual, **options})
    task = Arithmetic()
    prompts = [task.problem("train", i).prompt for i in range(2000)]

    def reward(completions, **more):
        return [float(len(c) % 2) for c in completions]

    return GRPOTrainer(
        model=folder,
        args=args,
        train_dataset=Dataset(
            InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="bench"
        ),
        reward_funcs=reward,
        processing_class=arithmetic_tokenizer(),
        callbacks=[callback],
    )


def trl_clock(times: list, ours=None):
    """A trainer callback that times TRL's steps, each followed by one of ours if given: appends (ours or 0, TRL's)."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            spent = time.perf_counter() - self.start
            with attention.grouped(True):
                times.append((seconds(ours) if ours else 0.0, spent))

    return Clock()


def against_trl(root: str) -> dict:
    """Compare GRPOTrainer's steps, timed by its callbacks, with one of our steps after each."""
    need(
        importlib.util.find_spec("trl"),
        "TRL 1.16 is needed; the head of this file says how to install it",
    )
    folder = f"{root}/trl"
    warm = 4  # steps that are not counted
    shaped(folder)
    cfg = resolved(
        objective="grpo", train_batch=256, rollout_batch=256, max_tokens=16, lr=1e-6
    )
    times = []
    clock = trl_clock(times, our_step(folder, HFEngine(folder), cfg))
    try:
        trainer = grpo_trainer(folder, f"{root}/trl_out", 24, clock)
    except ImportError as e:
        raise UserError(
            f"TRL 1.16 is needed ({e}); the head of this file says how to install it"
        ) from None
    with attention.grouped(False):  # TRL as it runs without this repository
        trainer.train()
    out = {**compare(times[warm:]), "goal": "ratio <= 0.80"}
    engine = VLLMEngine(folder, max_len=64, max_logprobs=1)
    with_vllm = our_step(folder, engine, cfg)
    spent = [seconds(with_vllm) for _ in range(14)]
    engine.close()
    return {**out, "vllm_step_s": float(np.median(spent[warm:]))}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        run_command(lambda: print(json.dumps(against_trl(root), indent=1)))
