"""What --sync_delta saves: bytes of the changed entries beside those of the whole weights, over real updates.

    python results/delta.py                         # some minutes on two CPU cores; prints a table

The embedded policy trains for a few updates at each learning rate; after each, its bfloat16 weights are written as a
learner publishes them, and the delta from the update before is made, applied, and compared byte for byte.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config
from checkpoint.tensors import Layout, halved
from flags import run_command
from learner import Comm
from remote import delta, wire
from train import Training

RATES = (1e-6, 1e-5, 1e-4)
UPDATES = 2


def train(folder: Path, rate: float) -> list[Path]:
    """The files of weights before the first update and after each."""
    argv = [f"--out={folder}", f"--lr={rate}", "--actor=none", "--objective=tis", "--rollout=hf", "--dtype=float32"]
    argv += ["--rollout_batch=64", "--train_batch=64", f"--steps={UPDATES}", "--eval_every=0", "--overwrite"]
    folder.mkdir()
    t = Training(config.parse(argv), Comm.start(patience=600))
    files = []
    for version in range(UPDATES + 1):
        if version and (t.pending or t.roll_out([])):
            t.update()
        tensors = t.learner.published(t.run.rollout_model, False)
        files.append(folder / f"v{version:06d}.safetensors")
        Layout(tensors, halved).write(files[-1], tensors)
    return files


def measure(before: Path, after: Path, scratch: Path) -> tuple[int, float]:
    """Bytes of the delta (of the whole weights, where it is not worth it), and the share of words that changed."""
    old, new = before.read_bytes(), after.read_bytes()
    words = [torch.frombuffer(bytearray(x), dtype=torch.int16) for x in (old, new)]
    share = (words[0] != words[1]).double().mean().item()
    data = delta.encode(old, new)
    if data is None:
        return len(new), share
    sink = wire.FileSink(scratch, len(new))
    for _ in delta.rebuild(before, [data], wire.manifest("x", new), sink):
        pass
    sink.close()
    assert scratch.read_bytes() == new
    return len(data), share


def main() -> None:
    print("| learning rate | whole, KiB | delta, KiB | of the whole | entries changed |")
    print("|---|---|---|---|---|")
    for rate in RATES:
        with tempfile.TemporaryDirectory() as folder:
            files = train(Path(folder) / "run", rate)
            pairs = list(zip(files[:-1], files[1:], strict=True))
            rows = [measure(*pair, Path(folder) / "rebuilt") for pair in pairs]
            whole = files[0].stat().st_size
            mean = sum(nbytes for nbytes, _ in rows) / len(rows)
            changed = sum(share for _, share in rows) / len(rows)
            print(
                f"| {rate:g} | {whole / 1024:.0f} | {mean / 1024:.1f} | {mean / whole:.1%} | {changed:.2%} |",
                flush=True,
            )


if __name__ == "__main__":
    run_command(main)
