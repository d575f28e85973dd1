"""Run under torchrun by test_placement: two ranks that are one vLLM engine; rank 0 saves what both have sampled.

tensor_parallel.py FOLDER OTHER OUT    the model to start from, and one whose weights are loaded"""

import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist

from checkpoint import load_model
from engines import VLLMEngine
from sampling import Sampling


def work(rank: int) -> tuple[list, list]:
    """(prompts, seeds) of this rank: the ranks bring unequally many, and prompts of other lengths."""
    prompts = [[5, 6, 7], [9, 10], [11, 12, 13, 14]]
    seeds = [[1, 2], [3], [4, 5]]
    return (prompts[:1], seeds[:1]) if rank else (prompts[1:], seeds[1:])


def tokens(groups) -> list:
    return [[(r.tokens.tolist(), r.logp_inf.tolist(), r.topk_ids.tolist()) for r in group] for group in groups]


def own_shared_memory() -> None:
    """With this launcher vLLM's CPU build has one name on a host for the memory that an engine's ranks share: two runs
    would meet in it, and a run that was killed would stand in the way of the next."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    name = f"engine-of-{os.environ['MASTER_PORT']}-{os.environ['TORCHELASTIC_RUN_ID']}"
    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: name)


def main(folder: str, other: str, out: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=150))
    rank = dist.get_rank()
    own_shared_memory()
    engine = VLLMEngine(folder, max_len=64, max_logprobs=5, tp=2, memory_gib=0.05)
    sampling = Sampling(max_tokens=8, temperature=0.8)
    said = {"first": tokens(engine.generate(*work(rank), sampling, 3, [1]))}
    state = load_model(other).state_dict()
    engine.load(state.items())
    said["loaded"] = tokens(engine.generate(*work(rank), sampling, 3, [1]))
    ids = torch.arange(24).reshape(2, 12).numpy() * 7 % 250
    said["logprobs"] = engine.logprobs(ids).tolist()
    said["nothing"] = (
        engine.generate([], [], sampling, 3, [1]) if rank else len(engine.generate([[3]], [[1]], sampling, 3, [1]))
    )
    said["any"] = [engine.any_rank(rank == 0), engine.any_rank(rank == 1), engine.any_rank(False)]
    found = [None, None]
    dist.all_gather_object(found, said)
    if rank == 0:
        Path(out).write_bytes(pickle.dumps(found))
        for left in Path("/dev/shm").glob(f"engine-of-{os.environ['MASTER_PORT']}-*"):
            left.unlink(missing_ok=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter and abort it


if __name__ == "__main__":
    main(*sys.argv[1:])
