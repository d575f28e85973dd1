"""The engines that sample: vLLM in this process, and a batched KV-cache sampler in plain torch."""

from __future__ import annotations

import os
import sys
import tempfile

import numpy as np
import torch

import quant
from rollout import Response, uniforms
from sampling import Sampling, cut, ragged


# ---------------------------------------------------------------------------------------------------------------------
# vLLM, in this process
# ---------------------------------------------------------------------------------------------------------------------


def lean_logprobs() -> None:
    """vLLM turns the log-probabilities of every sampled token into lists, ranks and decoded words, which costs more than the sampling does.
    Here a request keeps the arrays as the sampler made them, one (1, K + 1) a token: ids and values, the sampled token first."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    def keep(self, lists):
        self.logprobs.token_ids.append(lists.logprob_token_ids)
        self.logprobs.logprobs.append(lists.logprobs)

    LogprobsProcessor._update_sample_logprobs = keep


class VLLMEngine:
    """vLLM as a sampler whose weights are replaced live. `folder` is a save_pretrained folder; prompts are token ids."""

    def __init__(
        self,
        folder: str,
        *,
        max_len: int,
        max_logprobs: int,
        dtype: str = "float32",
        seed: int = 0,
        memory_gib: float = 0.25,
        logprobs_mode: str = "processed",
        head_fp32: bool = False,
        fmt: quant.Format | None = None,
    ):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        cuda = torch.cuda.is_available()
        if not cuda:
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else 18 s of compiling at the first logprob
            os.environ.setdefault(
                "OMP_NUM_THREADS", str(torch.get_num_threads())
            )  # else vLLM takes torch's threads away, the learner's too
        try:
            from vllm import LLM, SamplingParams
        except ImportError as e:
            raise ValueError(
                f"--rollout=vllm: vLLM cannot be imported ({e}); install it (make demo does) or use --rollout=hf"
            ) from None
        self._params, self.dtype, self.fmt = SamplingParams, dtype, fmt
        self.packed = fmt is not None and (fmt.activations or (cuda and fmt.qmax == 7))
        if fmt and not self.packed:
            print(
                f"{fmt.name}: vLLM has no kernel for it here; the engine gets the exactly dequantized weights, which are the same function",
                file=sys.stderr,
            )
        if fmt:
            self.scratch = tempfile.TemporaryDirectory()
            folder = quant.checkpoint(folder, fmt, self.scratch.name, self.packed)
            if not cuda:
                quant.keep_scales_alive()
        keep = {k: os.environ.get(k) for k in ("LOCAL_WORLD_SIZE",)}  # vLLM overwrites it and reseeds torch:
        rng = torch.get_rng_state()  # neither must reach the learner
        lean_logprobs()
        size = dict(gpu_memory_utilization=memory_gib) if cuda else dict(kv_cache_memory_bytes=int(memory_gib * 2**30))
        head = dict(hf_overrides={"head_dtype": "float32"}) if head_fp32 else {}
        self.llm = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=not cuda,
            max_model_len=max_len,
            logprobs_mode=f"{logprobs_mode}_logprobs",
            max_logprobs=max(max_logprobs, 1),
            seed=seed,
            disable_log_stats=True,
            **size,
            **head,
        )
        torch.set_rng_state(rng)
        for k, v in keep.items():
            os.environ.pop(k, None) if v is None else os.environ.__setitem__(k, v)

    def generate(
        self,
        prompts: list[np.ndarray],
        seeds: list[list[int]],
        sampling: Sampling,
        topk: int,
        stop_ids: list[int],
        kept: int = 0,
    ) -> list[list[Response]]:
        """len(seeds[i]) responses to prompt i, each with a seed of its own, so that no sample depends on its batch.

        topk: the K of the records. kept > 0: where the sampling truncates, record each token's kept set, of at most `kept` tokens."""
        kept = kept if sampling.truncates else 0
        K = max(topk, kept)
        requests, params = [], []
        for prompt, group in zip(prompts, seeds):
            ids = [int(t) for t in prompt]
            for seed in group:
                requests.append({"prompt_token_ids": ids})
                params.append(
                    self._params(
                        temperature=sampling.temperature,
                        top_p=sampling.top_p,
                        top_k=sampling.top_k,
                        min_p=sampling.min_p,
                        max_tokens=sampling.max_tokens,
                        seed=seed,
                        stop_token_ids=stop_ids,
                        logprobs=K,
                        flat_logprobs=True,
                        detokenize=False,
                    )
                )  # the two that make log-probabilities cheap
        outputs = [o.outputs[0] for o in self.llm.generate(requests, params, use_tqdm=False)]
        responses = iter(self._responses(outputs, K, topk, kept))
        return [[next(responses) for _ in group] for group in seeds]

    @staticmethod
    def _responses(outputs, K: int, topk: int, kept: int) -> list[Response]:
        """All responses at once: one array of rows [sampled, top-1 .. top-K], one row a token, cut into responses."""
        ends = np.cumsum([len(o.token_ids) for o in outputs])
        ids = np.concatenate([row for o in outputs for row in o.logprobs.token_ids]).astype(np.int32, copy=False)
        logp = np.concatenate([row for o in outputs for row in o.logprobs.logprobs]).astype(np.float32, copy=False)
        if ids.shape != (ends[-1], K + 1):
            raise RuntimeError(
                f"vLLM returned log-probabilities of shape {ids.shape} for {ends[-1]} tokens and K = {K}: rollout.lean_logprobs does not fit this version of vLLM"
            )
        if kept:
            finite = np.isfinite(logp[:, 1:])  # a cut token has log-probability -inf
            full = finite.all(1)
            if full.any() and np.exp(logp[full, 1:]).sum(1).min() < 0.999:
                raise ValueError(too_many(kept))
            offsets, allowed_ids = ragged(finite, ids[:, 1:])
        out = []
        for o, start, end in zip(outputs, [0, *ends[:-1]], ends):
            sets = (
                {
                    "allowed_offsets": offsets[start : end + 1] - offsets[start],
                    "allowed_ids": allowed_ids[offsets[start] : offsets[end]].copy(),
                }
                if kept
                else {}
            )
            out.append(
                Response(
                    tokens=ids[start:end, 0].copy(),
                    loss_mask=np.ones(end - start, bool),
                    logp_inf=logp[start:end, 0].copy(),
                    topk_ids=ids[start:end, 1 : topk + 1].copy(),
                    topk_logp=logp[start:end, 1 : topk + 1].copy(),
                    finish_reason=o.finish_reason,
                    **sets,
                )
            )
        return out

    def load(self, named_tensors) -> None:
        """Replace the weights. Tied models must bring `lm_head.weight` too, or the head silently stays old."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_tensors)})
        self.llm.reset_prefix_cache()  # cached blocks belong to the old weights

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        """log p(ids[t] | ids[:t]) for t >= 1 at temperature 1, float32 [len(ids) - 1]: the probe of sync.prove."""
        params = self._params(max_tokens=1, temperature=1.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        out = self.llm.generate([{"prompt_token_ids": [int(t) for t in ids]}], params, use_tqdm=False)[0]
        flat = out.prompt_logprobs
        rows = {int(t): flat.logprobs[s] for t, (s, e) in enumerate(zip(flat.start_indices, flat.end_indices)) if e > s}
        return np.array([rows[t] for t in sorted(rows)], np.float32)[-(len(ids) - 1) :]

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


# ---------------------------------------------------------------------------------------------------------------------
# plain torch
# ---------------------------------------------------------------------------------------------------------------------


class HFEngine:
    """A batched KV-cache sampler around a transformers model: each prompt is read once, then its group decodes together."""

    def __init__(
        self,
        folder_or_model,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        batch_tokens: int = 1 << 20,
        logprobs_mode: str = "processed",
        head_fp32: bool = False,
        fmt: quant.Format | None = None,
    ):
        if isinstance(folder_or_model, (str, os.PathLike)):
            from transformers import AutoModelForCausalLM

            folder_or_model = AutoModelForCausalLM.from_pretrained(folder_or_model, dtype=getattr(torch, dtype))
        self.dtype, self.fmt, self.packed = (
            dtype,
            fmt,
            fmt is not None and fmt.activations,
        )  # int4 weights come exactly dequantized
        change = quant.align if self.packed or fmt is None else quant.dequantize_in_place
        self.model = change(folder_or_model, fmt).to(device).eval()
        self.device, self.batch_tokens, self.raw, self.head_fp32 = (
            device,
            batch_tokens,
            logprobs_mode == "raw",
            head_fp32,
        )

    def generate(
        self, prompts, seeds, sampling: Sampling, topk: int, stop_ids: list[int], kept: int = 0
    ) -> list[list[Response]]:
        """As VLLMEngine.generate; groups are cut into batches of at most `batch_tokens` cached tokens."""
        out, start = [], 0
        while start < len(prompts):
            stop, longest, rows = start, 0, 0
            while stop < len(prompts):
                longest, rows = max(longest, len(prompts[stop])), rows + len(seeds[stop])
                if stop > start and rows * (longest + sampling.max_tokens) > self.batch_tokens:
                    break
                stop += 1
            out += self._decode(
                prompts[start:stop], seeds[start:stop], sampling, topk, stop_ids, kept if sampling.truncates else 0
            )
            start = stop
        return out

    @torch.no_grad()
    def _decode(self, prompts, seeds, sampling, topk, stop_ids, kept):
        dev, T = self.device, sampling.max_tokens
        groups = torch.tensor([len(g) for g in seeds], device=dev)
        P = max(len(p) for p in prompts)
        ids = torch.zeros(len(prompts), P, dtype=torch.long)
        mask = torch.zeros(len(prompts), P, dtype=torch.long)
        for i, p in enumerate(prompts):  # left padding: all prompts end together
            ids[i, P - len(p) :], mask[i, P - len(p) :] = torch.as_tensor(np.asarray(p, np.int64)), 1
        ids, mask = ids.to(dev), mask.to(dev)
        padded = bool((mask == 0).any())
        logits, cache = self._forward(
            ids, attention_mask=mask if padded else None, position_ids=(mask.cumsum(1) - 1).clamp_min(0)
        )
        logits = logits.repeat_interleave(groups, 0)
        reorder = torch.repeat_interleave(torch.arange(len(prompts), device=dev), groups)
        cache.batch_select_indices(reorder)  # a group shares its prompt's cache
        mask, position = mask[reorder], mask.sum(1)[reorder]
        N = len(reorder)
        u = torch.from_numpy(np.stack([uniforms(T, "sample", s) for g in seeds for s in g])).to(dev)  # (N, T)
        tokens = torch.zeros(N, T, dtype=torch.int32, device=dev)
        logp = torch.zeros(N, T, device=dev)
        top_ids = torch.zeros(N, T, topk, dtype=torch.int32, device=dev)
        top_logp = torch.zeros(N, T, topk, device=dev)
        length = torch.full((N,), T, device=dev)
        stop, sets = torch.tensor(stop_ids, device=dev), []
        alive = torch.arange(N, device=dev)  # rows still decoding, in the cache's order
        for t in range(T):
            z = logits / sampling.temperature  # (n, V)
            if sampling.truncates:
                gone = cut(z, sampling.top_p, sampling.top_k, sampling.min_p)
                z = z.masked_fill_(gone, -torch.inf)
                if kept:
                    row, ids = (~gone).nonzero(as_tuple=True)
                    sets.append((alive[row].cpu().numpy(), np.full(len(row), t), ids.int().cpu().numpy()))
            law = z.log_softmax(-1)
            cdf = law.double().exp_().cumsum_(-1)
            token = torch.searchsorted(cdf, u[alive, t, None] * cdf[:, -1:], right=True).clamp_(max=law.shape[1] - 1)
            tokens[alive, t] = token[:, 0].int()
            law = logits.log_softmax(-1) if self.raw else law
            logp[alive, t] = law.gather(1, token)[:, 0]
            if topk:
                top_logp[alive, t], best = law.topk(topk, -1)
                top_ids[alive, t] = best.int()
            ended = torch.isin(token[:, 0], stop) & (length[alive] == T)  # a row that goes on after its end stays ended
            length[alive[ended]] = t + 1
            going = length[alive] == T
            n = int(going.sum())
            if n == 0 or t == T - 1:
                break
            if n < 0.75 * len(going):  # drop finished rows from the cache
                rows = going.nonzero()[:, 0]
                cache.batch_select_indices(rows)
                alive, token, mask, position = alive[rows], token[rows], mask[rows], position[rows]
            if padded:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            logits, cache = self._forward(
                token, attention_mask=mask if padded else None, past_key_values=cache, position_ids=position[:, None]
            )
            position = position + 1
        columns = zip(*(x.cpu().numpy() for x in (tokens, logp, top_ids, top_logp, length)))
        out = [[self._response(*next(columns), stop_ids) for _ in g] for g in seeds]
        if kept:
            self._kept([r for g in out for r in g], *map(np.concatenate, zip(*sets)), T, kept)
        return out

    def _forward(self, ids, **more):
        """Logits of the last place, (n, V) float32, and the cache."""
        if not self.head_fp32:
            out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **more)
            return out.logits[:, -1].float(), out.past_key_values
        out = self.model.base_model(input_ids=ids, use_cache=True, **more)
        return out.last_hidden_state[
            :, -1
        ].float() @ self.model.get_output_embeddings().weight.float().t(), out.past_key_values

    @staticmethod
    def _response(tokens, logp, top_ids, top_logp, L, stop_ids) -> Response:
        return Response(
            tokens=tokens[:L].copy(),
            loss_mask=np.ones(L, bool),
            logp_inf=logp[:L].copy(),
            topk_ids=top_ids[:L].copy(),
            topk_logp=top_logp[:L].copy(),
            finish_reason="stop" if int(tokens[L - 1]) in stop_ids else "length",
        )

    @staticmethod
    def _kept(responses, row, t, ids, T, kept) -> None:
        """Hand each response its kept sets, from all of them as (row, position, token id)."""
        sizes = np.bincount(row * T + t, minlength=len(responses) * T).reshape(-1, T)
        if sizes.max() > kept:
            raise ValueError(too_many(kept))
        ids = ids[np.lexsort((ids, t, row))]
        starts = np.concatenate([[0], sizes.sum(1).cumsum()])
        for i, r in enumerate(responses):
            r.allowed_offsets = np.concatenate([[0], sizes[i, : len(r.tokens)].cumsum()]).astype(np.int64)
            r.allowed_ids = ids[starts[i] : starts[i] + r.allowed_offsets[-1]]

    @torch.no_grad()
    def load(self, named_tensors) -> None:
        """Copy the weights in place; an unknown name or another shape is an error, a missing one is left to the probe."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in (
            quant.load_quantized(self.model, dict(named_tensors)).items() if self.packed else named_tensors
        ):
            own[name].copy_(tensor)

    @torch.no_grad()
    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        ids = torch.as_tensor(np.asarray(ids, np.int64))[None].to(self.device)
        logp = torch.log_softmax(self.model(input_ids=ids, use_cache=False).logits[0, :-1].float(), -1)
        return logp.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()

    def close(self) -> None:
        pass


def too_many(kept: int) -> str:
    return f"a sampled token's kept set has more than {kept} tokens: raise --kept_max, or bound it with --top_k"


def make_engine(cfg, folder: str, max_len: int, topk: int, device: str = "cpu"):
    """The engine named by `--rollout`, loaded from `folder`."""
    fmt = quant.format_of(cfg.rollout_quant, cfg.quant_group)
    if cfg.rollout == "hf":
        return HFEngine(
            folder,
            dtype=cfg.rollout_dtype,
            device=device,
            logprobs_mode=cfg.logprobs_mode,
            head_fp32=cfg.lm_head_fp32,
            fmt=fmt,
        )
    return VLLMEngine(
        folder,
        max_len=max_len,
        max_logprobs=topk,
        dtype=cfg.rollout_dtype,
        seed=cfg.seed,
        memory_gib=cfg.rollout_memory,
        logprobs_mode=cfg.logprobs_mode,
        head_fp32=cfg.lm_head_fp32,
        fmt=fmt,
    )
