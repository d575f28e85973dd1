"""The engines that sample: two classes with the same methods. `make_engine` chooses by the flags.

VLLMEngine runs vLLM in this process, and its weights are replaced while it runs. HFEngine is a
batched sampler with a KV cache in plain torch, for machines without vLLM. Both have

    generate(prompts, seeds, sampling, topk, stop_ids, max_allowed, finished)  sample groups
    load(named_tensors)                                              replace the weights
    held()                                                           checksums for sync.py
    logprobs(ids)                                                    score sequences, for sync.py
    sleep()                                                          free memory until the next call
    any_rank(condition)                                              whether any rank satisfies it
    close()
"""

from __future__ import annotations

import functools
import os
import sys
import time
from contextlib import nullcontext
from itertools import chain

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

import quant
from config import Config, RolloutFlags
from machinery.checkpoint.models import load_model
from machinery.flags import from_environment, is_first_rank, need
from model import Routing, in_vllm
from model.decoding import Records, Rows, give_routed, grouped, responses_of
from model.exact import InOrder, as_sampler
from model.head import Head, rows_at_once
from model.memory import unread
from rollout import Response, uniforms
from sampling import Sampling, pick, truncate
from sync import checksums

# read before vLLM overwrites it
LOCAL_WORLD_SIZE = from_environment("LOCAL_WORLD_SIZE", 1)


class VLLMEngine:
    """vLLM as a sampler with weights that are replaced while it runs.

    folder         a save_pretrained folder
    max_len        maximum tokens of prompt and response together
    max_logprobs   largest `topk` or `max_allowed` of any call
    seed           seed of vLLM itself; each response has its own seed
    memory_gib     CPU: GiB of KV cache; CUDA: share of the GPU's memory, less if it is not free;
                   0: `cache_size` on a CPU, 0.25 on a GPU
    rows           number of responses sampled at once: sets `cache_size` on a CPU, max_num_seqs on a GPU
    logprobs_mode  "processed": of the sampling distribution; "raw": of the model's softmax
    head_fp32      compute logits in float32 for every dtype
    fmt            number format of the linear layers (quant.py), or None
    vocabulary     tokenizer size; later embedding rows are padding. None: no padding
    kv_cache       dtype of the KV cache
    tp             number of consecutive ranks that form one engine: all of them make every call,
                   each with different prompts
    routing        record the experts of each token (Response.routed), on a GPU
    sleep_level    on a GPU. 1: `sleep` moves weights to host memory; 2: drops them; 0: no effect

    Raises UserError if vLLM cannot be imported, lacks a function that model/in_vllm.py replaces, or
    does not start."""

    def __init__(
        self,
        folder: str,
        *,
        max_len: int,
        max_logprobs: int,
        dtype: str = "float32",
        seed: int = 0,
        memory_gib: float = 0.0,
        rows: int = 256,
        logprobs_mode: str = "processed",
        head_fp32: bool = False,
        fmt: quant.Format | None = None,
        vocabulary: int | None = None,
        kv_cache: str = "auto",
        tp: int = 1,
        routing: bool = False,
        sleep_level: int = 0,
    ):
        make_llm, self.make_params = in_vllm.import_vllm()
        self.dtype, self.fmt = dtype, fmt
        cuda = torch.cuda.is_available()
        shell = unread(folder)
        # vLLM loads each expert's matrices
        self.experts = set(quant.expert_parameters(shell))
        # whether vLLM has a kernel for low-bit tensors; if not, it loads exactly dequantized ones
        self.packed = fmt is not None and (
            fmt.activations or (cuda and fmt.qmax == 7 and not self.experts)
        )
        in_vllm.change_vllm(low_bits_on_cpu=fmt is not None and not cuda)
        if fmt is not None and not self.packed:
            print(
                f"{fmt.name}: vLLM has no kernel for this format here; the engine gets the exactly dequantized "
                "weights, which compute the same function",
                file=sys.stderr,
            )
        self.sleep_level, self.asleep = sleep_level if cuda else 0, False
        self.ranks = dist.new_subgroups(tp, backend="gloo")[0] if tp > 1 else None
        overrides = {"head_dtype": "float32"} if head_fp32 else {}
        if vocabulary is not None:
            overrides["vocab_size"] = vocabulary
        if self.packed:
            overrides["quantization_config"] = in_vllm.engine_config(fmt)
        settings = dict(
            dtype=dtype,
            kv_cache_dtype=kv_cache,
            max_model_len=max_len,
            max_logprobs=max(max_logprobs, 1),
            logprobs_mode=f"{logprobs_mode}_logprobs",
            seed=seed % 2**32,  # the range of numpy seeds
            skip_tokenizer_init=True,
            enforce_eager=not cuda,
            # with chunked prefill vLLM rewinds the random generator, which a CPU generator cannot
            enable_chunked_prefill=None if cuda else False,
            disable_log_stats=True,
            use_tqdm_on_load=False,  # the run has its own progress bar
            enable_sleep_mode=self.sleep_level > 0,
            enable_return_routed_experts=routing,
            # with it a batch is in flight when a load resets the records of experts
            async_scheduling=False if routing else None,
            hf_overrides=overrides,
        )
        if cuda:
            settings["gpu_memory_utilization"] = share_of_gpu(memory_gib or 0.25)
            settings["max_num_seqs"] = min(max(rows, 16), 1024)
        else:
            of_a_token = cache_of_a_token(shell.config, getattr(torch, dtype).itemsize)
            most = psutil.virtual_memory().available // (4 * LOCAL_WORLD_SIZE)
            wanted = min(cache_size(of_a_token, max_len, rows), most)
            settings["kv_cache_memory_bytes"] = int(memory_gib * 2**30) or wanted
            settings["block_size"] = BLOCK
        if dist.is_initialized() and dist.get_world_size() > 1:  # under torchrun
            settings["distributed_executor_backend"] = "external_launcher"
            settings["tensor_parallel_size"] = tp
        if fmt is not None:
            settings["load_format"] = "dummy"  # the quantized weights are loaded below
        self.tp, self.kv_cache, self.held_rows = tp, kv_cache, vocabulary
        self.loads = 0  # number of weight loads
        with (
            in_vllm.in_one_sentence(f"it does not start with {folder}"),
            in_vllm.vllm_leaves_no_trace(),
            in_vllm.own_shared_memory(self.ranks),
        ):
            started = time.perf_counter()
            self.llm = make_llm(folder, **settings)
        if cuda and is_first_rank():
            seconds = time.perf_counter() - started
            print(
                f"vLLM started in {seconds:.0f} s; later starts reuse its compiled code"
            )
        if fmt is not None:
            model = load_model(folder, "auto")
            self.load(
                quant.for_engine(model.state_dict().items(), model, fmt, self.packed)
            )

    def generate(
        self,
        prompts,
        seeds,
        sampling: Sampling,
        topk: int,
        stop_ids,
        max_allowed=0,
        finished=None,
    ):
        """A list[Response] for each prompt: len(seeds[i]) responses to prompt i, int [P].

        Each response has its own seed, so that samples do not depend on the batch. topk: number of
        largest log-probabilities to record. max_allowed > 0: if sampling truncates, record each
        token's set of allowed tokens; raises UserError if a set is larger than max_allowed.
        finished: callback for the pairs (i, response) that end in one decoding step."""
        if not sampling.truncates:
            max_allowed = 0
        self._wake()
        K = max(topk, max_allowed)
        requests, params = [], []
        settings = dict(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=stop_ids,
            logprobs=K,
            # with `lean_logprobs` this makes log-probabilities cheap
            flat_logprobs=True,
            detokenize=False,
        )
        before, offset = self._of_all_ranks((list(prompts), seeds))
        for their_prompts, their_seeds in before:
            for prompt, group in zip(their_prompts, their_seeds, strict=True):
                # the salt is part of the prefix cache's key: no prefixes of older weights are used
                salt = str(self.loads)
                request = {
                    "prompt_token_ids": [int(t) for t in prompt],
                    "cache_salt": salt,
                }
                for seed in group:
                    requests.append(request)
                    params.append(self.make_params(**settings, seed=seed))
        requested = self.llm.enqueue(requests, params, use_tqdm=False)
        first = sum(len(group) for _, theirs in before[:offset] for group in theirs)
        # as the outputs have them
        names = (name.partition("-")[0] for name in requested[first:])
        prompts_of_names = [i for i, group in enumerate(seeds) for _ in group]
        prompt_of = dict(zip(names, prompts_of_names, strict=False))
        responses, core = {}, self.llm.llm_engine
        try:
            while core.has_unfinished_requests():  # the same steps on all ranks
                ended = [
                    o for o in core.step() if o.finished and o.request_id in prompt_of
                ]
                if not ended:
                    continue
                made = self._responses(
                    [o.outputs[0] for o in ended], K, topk, max_allowed
                )
                new = {o.request_id: r for o, r in zip(ended, made, strict=True)}
                responses |= new
                if finished is not None:
                    finished([(prompt_of[name], r) for name, r in new.items()])
        except BaseException:
            core.abort_request(requested, internal=True)
            raise
        return grouped([responses[name] for name in prompt_of], seeds)

    def _of_all_ranks(self, x) -> tuple[list, int]:
        """(values of x on all ranks of this engine, index of this rank among them)."""
        if self.ranks is None:
            return [x], 0
        values = [None] * self.ranks.size()
        dist.all_gather_object(values, x, group=self.ranks)
        return values, self.ranks.rank()

    def any_rank(self, condition: bool) -> bool:
        """Whether the condition is true on any rank of this engine: then all its ranks must
        sample."""
        return any(self._of_all_ranks(bool(condition))[0])

    def sleep(self) -> None:
        """Free GPU memory for the learner, until the next call of a different method."""
        if self.sleep_level and not self.asleep:
            self.llm.sleep(level=self.sleep_level)
            self.asleep = True

    def _wake(self) -> None:
        """Allocate the GPU memory again, with the weights."""
        if not self.asleep:
            return
        if self.sleep_level == 2:
            raise RuntimeError(
                "this engine has released its weights; load new weights first"
            )
        # release memory that the learner freed but torch still caches
        torch.cuda.empty_cache()
        self.llm.wake_up()
        self.asleep = False

    @staticmethod
    def _responses(outputs, K: int, topk: int, max_allowed: int) -> list[Response]:
        """The responses in vLLM's outputs, with the log-probabilities kept by `lean_logprobs`.

        The tokens of all responses form one table with rows [sampled, top-1 .. top-K]."""
        ends = np.cumsum([len(output.token_ids) for output in outputs])
        ids = np.concatenate(
            list(chain.from_iterable(o.logprobs.token_ids for o in outputs))
        )
        logp = np.concatenate(
            list(chain.from_iterable(o.logprobs.logprobs for o in outputs))
        )
        if ids.shape != (ends[-1], K + 1):
            raise RuntimeError(
                f"vLLM returned log-probabilities of shape {ids.shape} for {ends[-1]} tokens and K = {K}: "
                f"lean_logprobs (model/in_vllm.py), written for vLLM {in_vllm.VLLM_VERSION}, does not fit the version "
                "here"
            )
        ids, logp = (
            ids.astype(np.int32, copy=False),
            logp.astype(np.float32, copy=False),
        )
        reasons = [output.finish_reason for output in outputs]
        responses = responses_of(ids, logp, ends, reasons, topk, max_allowed)
        for response, output in zip(responses, outputs, strict=True):
            if output.routed_experts is not None:
                response.routed = output.routed_experts.astype(np.int16)
        return responses

    def load(self, named_tensors) -> None:
        """Replace the weights by the tensors of a state dict.

        The state dict of a model with tied weights must also contain `lm_head.weight`; otherwise
        the head silently keeps its old weight."""
        if self.asleep:  # the memory of the cache is allocated last
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        if not self.loads:
            self.llm.apply_model(in_vllm.note_packing)
        if not all(self.llm.apply_model(in_vllm.has_head)):
            named_tensors = (
                (name, x) for name, x in named_tensors if name != "lm_head.weight"
            )
        with in_vllm.in_one_sentence("it cannot load the published weights"):
            tensors = quant.by_expert(named_tensors, self.experts)
            self.llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": tensors}
            )
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.loads += 1
        self.llm.reset_prefix_cache()  # cached blocks are from the old weights

    @functools.cached_property
    def fused(self) -> dict[str, list[str]]:
        """Name of a fused module -> names of the published modules in it."""
        return self.llm.apply_model(in_vllm.fused_modules)[0]

    def held(self) -> tuple[dict, dict]:
        """Checksums of the engine's tensors by vLLM's names (sync.py), summed over its ranks: of
        the tensors in memory, and of tensors before a kernel packed them."""
        self._wake()
        of_ranks, _ = self._of_all_ranks(self.llm.apply_model(in_vllm.checksums_of)[0])
        return tuple(in_vllm.summed(parts) for parts in zip(*of_ranks, strict=True))

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        """log p(ids[t] | ids[:t]), t >= 1, temperature 1, in nats: (R, L) -> float32 (R, L - 1)."""
        self._wake()
        params = self.make_params(
            max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False
        )
        requests = [{"prompt_token_ids": row} for row in ids.tolist()]
        rows = []
        for output in self.llm.generate(requests, params, use_tqdm=False):
            flat = output.prompt_logprobs
            spans = zip(flat.start_indices, flat.end_indices, strict=True)
            # empty for the first token
            logp = [flat.logprobs[start] for start, end in spans if end > start]
            rows.append(logp[1 - ids.shape[1] :])
        return np.array(rows, np.float32)

    def close(self) -> None:
        """Shut vLLM down. This also destroys torch's process group, if there is one."""
        self.llm.llm_engine.engine_core.shutdown()


# GiB of KV cache on every machine, so that runs can be repeated elsewhere
CACHE_GIB = 4.0


def cache_of_a_token(config, number: int) -> int:
    """Bytes of a token's keys and values. config: of transformers; number: bytes per entry."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = (
        getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    return 2 * config.num_hidden_layers * heads * size * number


# Tokens per block of the KV cache on a CPU, vLLM's least. A group shares the full blocks of its prompt.
BLOCK = 32
MOST_ROWS = 256  # maximum number of responses that vLLM samples at once on a CPU


def cache_size(of_a_token: int, max_len: int, rows: int) -> int:
    """Bytes of KV cache for `rows` responses of max_len tokens, prompt included, in whole
    blocks."""
    return of_a_token * (-(-max_len // BLOCK) + 1) * BLOCK * min(rows, MOST_ROWS)


def share_of_gpu(share: float) -> float:
    """The share of the GPU's memory that vLLM may take: at most nine tenths of the free memory.

    Prints a warning if this is less than `share`."""
    free, total = torch.cuda.mem_get_info()
    most = int(90 * free / total) / 100
    if share <= most:
        return share
    gib = 2**30
    print(
        f"vLLM gets {most:.0%} of the GPU's {total / gib:.0f} GiB: only {free / gib:.1f} GiB are free, less than "
        f"--rollout_memory={share:g}; end other processes on the GPU, or lower --rollout_memory",
        file=sys.stderr,
    )
    return most


def cached_tokens(config, number: int) -> int:
    """Maximum number of tokens in the KV cache of an HFEngine."""
    return int(CACHE_GIB * 2**30) // cache_of_a_token(config, number)


class HFEngine:
    """A batched sampler around a transformers model: each group's prompt is processed once.

    folder_or_model  a save_pretrained folder, or a model, which is used (and quantized) in place
    exact            compute each sum in the learner's order (model/exact.py), with float32 weights
    routing          record the experts of each token (Response.routed), on any device
    autocast         dtype of products; None: of the weights. For a learner's float32 weights
    the rest         as for VLLMEngine"""

    def __init__(
        self,
        folder_or_model,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        exact: bool = False,
        logprobs_mode: str = "processed",
        head_fp32: bool = False,
        fmt: quant.Format | None = None,
        vocabulary: int | None = None,
        routing: bool = False,
        autocast: torch.dtype | None = None,
    ):
        model = folder_or_model
        if isinstance(model, (str, os.PathLike)):
            model = load_model(model, torch.float32 if exact else getattr(torch, dtype))
        self.dtype, self.fmt = dtype, fmt
        # int4 weights arrive dequantized
        self.packed = fmt is not None and fmt.activations
        if self.packed:
            quant.align(model, fmt)
        elif fmt is not None:
            quant.dequantize_in_place(model, fmt)
        self.model = model.to(device).eval()
        self.exact = exact
        if exact:
            as_sampler(self.model, dtype, head_fp32, vocabulary)
        self.device = device
        # maximum number of tokens in the KV cache
        self.batch_tokens = cached_tokens(model.config, getattr(torch, dtype).itemsize)
        self.raw = logprobs_mode == "raw"
        self.head_fp32, self.vocabulary = head_fp32 and not exact, vocabulary
        self.autocast = autocast
        self.kv_cache, self.fused, self.tp, self.held_rows = "auto", {}, 1, None
        self.routing = Routing(self.model) if routing else None
        # experts of the last forward pass, (n, tokens, layers, k) int16
        self.routed = None

    def generate(
        self,
        prompts,
        seeds,
        sampling: Sampling,
        topk: int,
        stop_ids,
        max_allowed=0,
        finished=None,
    ):
        """The result of VLLMEngine.generate, computed in batches that fit into `batch_tokens`.
        `finished` is not called."""
        if not sampling.truncates:
            max_allowed = 0
        responses = []
        with self.routing or nullcontext():
            for batch in self._batches(prompts, seeds, sampling.max_tokens):
                responses += self._decode(*batch, sampling, topk, stop_ids, max_allowed)
        return grouped(responses, seeds)

    def _batches(self, prompts, groups, max_tokens: int):
        """Yield (prompts, groups) in order, each with a cache of at most `batch_tokens` tokens or a
        single row.

        A group that does not fit is split. groups: lists with an item for each response."""
        batch, rows, longest = ([], []), 0, 0
        for prompt, group in zip(prompts, groups, strict=True):
            room = max(1, self.batch_tokens // (len(prompt) + max_tokens))
            for first in range(0, len(group), room):
                piece = group[first : first + room]
                rows += len(piece)
                longest = max(longest, len(prompt))
                if batch[0] and rows * (longest + max_tokens) > self.batch_tokens:
                    yield batch
                    batch, rows, longest = ([], []), len(piece), len(prompt)
                batch[0].append(prompt)
                batch[1].append(piece)
        if batch[0]:
            yield batch

    @torch.no_grad()
    def _decode(
        self, prompts, seeds, sampling: Sampling, topk: int, stop_ids, max_allowed: int
    ) -> list[Response]:
        """All N responses of one batch, decoded token by token."""
        T = sampling.max_tokens
        u = np.stack(
            [uniforms(T, "sample", seed) for seed in chain.from_iterable(seeds)]
        )
        u = torch.from_numpy(u).to(self.device)  # (N, T)
        stop = torch.tensor(stop_ids, device=self.device)
        records = Records(len(u), T, max(topk, max_allowed), self.device)
        logits, rows = self._read_prompts(prompts, [len(group) for group in seeds])
        # experts of the prompts, then of each later token
        routed = [(rows.index, self.routed)]
        for t in range(T):
            # the same float32 factor as in the learner
            z = truncate(logits * (1.0 / torch.tensor(sampling.temperature)), sampling)
            logp = z.log_softmax(-1)
            token = pick(logp, u[rows.index, t, None])
            if self.raw:
                logp = logits.log_softmax(-1)
            records.write(rows.index, t, token, logp)
            going = records.end(rows.index, t, torch.isin(token[:, 0], stop))
            n_going = int(going.sum())
            if t == T - 1 or n_going == 0:
                break
            # dropping fewer rows costs more than it saves
            if n_going < 0.75 * len(going):
                rows.shrink(going)
                token = token[going]
            logits = self._step(token, rows)
            routed.append((rows.index, self.routed))
        responses = records.responses(stop_ids, topk, max_allowed)
        if self.routing is not None:
            give_routed(responses, grouped(responses, seeds), prompts, routed)
        return responses

    def _read_prompts(self, prompts, group_sizes: list[int]):
        """(logits (N, V) of each response's first token, Rows for the decoding)."""
        # padded on the left, so that all prompts end together
        left = functools.partial(pad_sequence, batch_first=True, padding_side="left")
        sequences = [
            torch.as_tensor(np.asarray(prompt, np.int64)) for prompt in prompts
        ]
        ids = left(sequences).to(self.device)
        mask = left([torch.ones_like(x) for x in sequences]).to(self.device)
        position = (mask.cumsum(1) - 1).clamp_min(0)
        padded = bool((mask == 0).any())
        # Each response starts from the cache of its group's prompt.
        sizes = torch.tensor(group_sizes, device=self.device)
        # (N,)
        prompt_of = torch.arange(len(prompts), device=self.device).repeat_interleave(
            sizes
        )
        logits, cache = self._forward(
            ids, attention_mask=mask if padded else None, position_ids=position
        )
        kinds = {type(x).__module__ for x in (cache, *getattr(cache, "layers", ()))}
        need(
            kinds <= {"transformers.cache_utils", "model.exact"},
            f"--rollout=hf: {type(self.model).__name__} has a cache that cannot start several responses; use "
            "--rollout=vllm",
        )
        cache.reorder_cache(prompt_of)
        position = mask.sum(1)[prompt_of]
        if self.exact:
            cache.layers, padded = (
                [InOrder(layer, position) for layer in cache.layers],
                False,
            )
        rows = Rows(
            index=torch.arange(len(prompt_of), device=self.device),
            position=position,
            mask=mask[prompt_of] if padded else None,
            cache=cache,
        )
        return logits[prompt_of], rows

    def _step(self, token, rows: Rows):
        """Logits (n, V) of the next token of each row, after `token` (n, 1)."""
        if rows.mask is not None:
            rows.mask = torch.cat([rows.mask, rows.mask.new_ones(len(rows.mask), 1)], 1)
        logits, rows.cache = self._forward(
            token,
            attention_mask=rows.mask,
            past_key_values=rows.cache,
            position_ids=rows.position[:, None],
        )
        rows.position = rows.position + 1
        return logits

    def _forward(self, ids, **more):
        """(logits (n, V) of the last position in float32, cache)."""
        logits, cache = self._logits(ids, 1, use_cache=True, **more)
        if self.routing is not None:
            chosen = torch.stack(self.routing.chosen, 1)  # (n, layers, k) of all tokens
            self.routed = (
                chosen.reshape(*ids.shape, *chosen.shape[1:]).short().cpu().numpy()
            )
        return logits[:, -1], cache

    def _logits(self, ids, keep: int, **more):
        """(logits (n, keep, V) of the last positions in float32, cache). keep 0: all positions."""
        cast = self.autocast is not None
        with torch.autocast(ids.device.type, self.autocast, enabled=cast):
            if self.head_fp32:
                out = self.model.base_model(input_ids=ids, **more)
            else:
                out = self.model(input_ids=ids, logits_to_keep=keep, **more)
                logits = out.logits.float()
        if self.head_fp32:
            head, layer = Head.of(self.model.config), self.model.get_output_embeddings()
            logits = head.of_layer(layer, out.last_hidden_state[:, -keep:])
        return logits[..., : self.vocabulary], getattr(out, "past_key_values", None)

    @torch.no_grad()
    def load(self, named_tensors) -> None:
        """Copy the weights in place.

        An unknown name or a wrong shape is an error. A missing name is found by the weight check
        (sync.py)."""
        tensors = self.model.state_dict()
        if self.packed:
            named_tensors = quant.load_quantized(self.model, named_tensors)
        for name, tensor in named_tensors:
            tensors[name].copy_(tensor)

    def held(self) -> tuple[dict, dict]:
        """The result of VLLMEngine.held; there are no packed tensors."""
        tensors = self.model.state_dict()
        if self.packed:
            tensors |= quant.held_quantized(self.model)
        return checksums(tensors), {}

    @torch.no_grad()
    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        """log p(ids[t] | ids[:t]), t >= 1, temperature 1, in nats: (R, L) -> float32 (R, L - 1)."""
        at_once = rows_at_once(self.model.config, ids.shape[1])
        parts = []
        for rows in torch.from_numpy(ids).to(self.device).split(at_once):
            logp = self._logits(rows, 0, use_cache=False)[0][:, :-1].log_softmax(-1)
            parts.append(logp.gather(2, rows[:, 1:, None])[..., 0])
            del logp  # free it before the next rows' logits are computed
        return torch.cat(parts).cpu().numpy()

    def sleep(self) -> None:
        """Do nothing: the memory is shared with the learner through torch."""

    def any_rank(self, condition: bool) -> bool:
        """The condition itself, because each rank has a separate engine."""
        return bool(condition)

    def close(self) -> None: ...


def evaluated_by(cfg: Config, name: str) -> str:
    """Sampler of an evaluation (--eval_engine). "own": the engine that samples this model's
    rollouts; "second": a second engine; "torch": HFEngine on the learner's weights."""
    samples = "policy" if cfg.actor == "none" else "actor"
    if name == samples:
        return (
            "own" if cfg.samplers == "local" and cfg.eval_engine != "torch" else "torch"
        )
    return "second" if cfg.eval_engine == "second" else "torch"


def sleep_level(cfg: Config) -> int:
    """The sleep level of VLLMEngine between rollouts. Level 2 drops the weights, so it requires
    that new, unquantized weights arrive before each rollout. Delayed samplers may reuse old
    weights."""
    return 2 if cfg.delay == "none" and cfg.rollout_quant == "none" else 1


def make_engine(
    cfg: RolloutFlags,
    folder: str,
    max_len: int,
    topk: int,
    device: str = "cpu",
    vocabulary: int | None = None,
    sleep_level: int = 0,
):
    """The engine that `--rollout` names, with the weights of `folder`.

    max_len: tokens of prompt and response; topk: maximum number of recorded log-probabilities;
    vocabulary, sleep_level: as for VLLMEngine."""
    shared = dict(
        dtype=cfg.rollout_dtype,
        logprobs_mode=cfg.logprobs_mode,
        head_fp32=cfg.lm_head_fp32,
        fmt=quant.engine_format(cfg),
        vocabulary=vocabulary,
        routing=cfg.router_replay,
    )
    if cfg.rollout == "hf":
        return HFEngine(folder, device=device, exact=cfg.exact, **shared)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return VLLMEngine(
        folder,
        max_len=max_len,
        max_logprobs=topk,
        seed=cfg.seed,
        memory_gib=cfg.rollout_memory,
        rows=getattr(cfg, "rollout_batch", 1024) * cfg.rollout_tp // ranks,
        kv_cache=cfg.kv_cache_dtype,
        tp=cfg.rollout_tp,
        sleep_level=sleep_level,
        **shared,
    )
