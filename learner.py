"""The learner: policy and optional actor, scored and trained through one wrapped module.

    score(batch, needs) -> TokenStats       no gradient, any number of micro-batches
    backward(batch, stats) -> metrics       gradient over all micro-batches and ranks
    step(logged) -> metrics                 clip the gradients, one optimizer step

The forward pass is in model/, the loss in objectives.py, the optimizers in machinery/optim.py.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import nn

import batching
import corrections
import objectives
import quant
from batching import Batch
from config import Config
from machinery import optim
from machinery.checkpoint.shards import whole
from machinery.checkpoint.tensors import Published
from machinery.flags import UserError, need
from machinery.measure import Sums
from machinery.optim import make_optimizers, schedule
from machinery.ranks import Comm
from metrics import derive, observe
from model import (
    Needs,
    PolicyAndActor,
    TokenStats,
    check_replay,
    exact,
    kernels,
    lora,
    memory,
    needs_of_ref_pass,
    needs_of_update,
)

COUNTERS = ("version", "skipped", "skipped_in_a_row", "rejected")  # in a checkpoint
# consecutive non-finite updates that stop a run; float16 overflows do not count
MAX_SKIPS = 5
SHARED = 4096  # largest --max_tokens with shared prompts


class Learner:
    """The models, their optimizers and the parallel wrapper. Input batches are on the CPU."""

    def __init__(
        self,
        policy,
        actor,
        cfg: Config,
        comm: Comm,
        vocabulary: int | None = None,
        start=None,
    ):
        """vocabulary: number of valid token ids (model.PolicyAndActor). start: the frozen starting
        model of --kl_coef, or None."""
        self.cfg = cfg
        self.comm = comm
        self.device = comm.device
        self.names = ["policy"] if actor is None else ["policy", "actor"]
        self.lr = {"policy": cfg.lr, "actor": cfg.actor_lr}
        self.rollout_format = quant.engine_format(cfg)
        own_format = quant.learner_format(cfg)
        sampler = policy if actor is None else actor
        quant.align(sampler, own_format)
        if start is not None:  # the same format as the policy
            quant.align(
                start.requires_grad_(False), own_format if actor is None else None
            )
        if cfg.exact:
            exact.apply(sampler)
        if cfg.router_replay:
            check_replay(sampler)
        autocast = memory.compute_type(cfg)
        for model in filter(None, (policy, actor, start)):
            # FSDP gathers experts in 16 bits
            if not (self.sharded and memory.travels_in(model, autocast)):
                memory.round_experts(model, autocast)
        for model in filter(None, (policy, actor)):
            kernels.apply(model, cfg.kernels)
            if cfg.gradient_checkpointing:
                memory.recompute(model)
        options = (autocast, cfg.lm_head_fp32, vocabulary, cfg.router_replay)
        self.models = PolicyAndActor(policy, actor, *options, start)
        self.models.eval()  # no dropout: scoring and training use the same distribution
        self.wrapped = self._wrap(autocast)
        self.optimizers = {
            n: make_optimizers(getattr(self.models, n), cfg, self.lr[n])
            for n in self.names
        }
        self.scaler = torch.amp.GradScaler(
            torch.device(self.device).type, enabled=cfg.dtype == "float16"
        )
        self.version = 0  # updates so far
        self.skipped = 0  # updates skipped because of a non-finite loss or gradient
        self.skipped_in_a_row = 0
        self.rejected = 0  # updates with all tokens rejected
        self.error = ""  # reason to stop the run

    @property
    def has_actor(self) -> bool:
        return len(self.names) == 2

    @property
    def sharded(self) -> bool:
        return self.comm.on and self.cfg.parallel == "fsdp"

    def _wrap(self, compute: torch.dtype | None):
        """Shard or move the models to their device, load weights and wrap them.

        compute: matmul dtype if 16-bit."""
        if self.sharded:
            memory.shard(self.models, self.device, self.comm.size, compute)
        memory.fill(self.models, self.device)
        wrong = optim.not_finite(self.models)
        need(
            not wrong,
            f"the weight {wrong} is not finite: copy the model again, or give a complete checkpoint",
        )
        if self.comm.on and not self.sharded:
            return nn.parallel.DistributedDataParallel(
                self.models, gradient_as_bucket_view=True
            )
        return self.models

    # -- forward only ------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, batch: Batch, needs: Needs) -> TokenStats:
        """TokenStats of a whole batch with the current weights, without gradient."""
        out: dict[str, torch.Tensor] = {}
        with self._casts_kept():
            for rows, micro, share in self._micro(batch):
                statistics = self.wrapped(micro, needs, share)
                if rows is None:  # padding: a different rank has more micro-batches
                    continue
                for name, x in statistics.items():
                    if name not in out:
                        out[name] = x.new_zeros(
                            (len(batch), batch.tokens.shape[1]) + x.shape[2:]
                        )
                    out[name][rows, : x.shape[1]] = x
        self.models.end_replay()
        if self.sharded:
            self.wrapped.reshard()  # without a backward pass FSDP does not reshard
        return TokenStats(**{name: x.cpu() for name, x in out.items()})

    def ref_columns(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The ref pass: statistics of policy and actor before the first update on this batch."""
        new = self.score(batch, needs_of_ref_pass(self.cfg, self.has_actor))
        columns = objectives.columns_of(new)
        if new.top_ids is not None:
            columns |= self._wider_support(batch, new)
        return columns

    def _wider_support(self, batch: Batch, new: TokenStats) -> dict[str, torch.Tensor]:
        """The support's columns, extended by the policy's top-K."""
        if self.has_actor and corrections.actor_is_sampler(self.cfg):
            top_logp_inf = new.top_actor_logp
        else:  # unknown: use the policy's probability, capped at the engine's K-th
            top_logp_inf = torch.minimum(new.top_logp, batch.p_kth.log()[..., None])
        known = [
            (batch.support_ids == ids[..., None]).any(-1)
            for ids in new.top_ids.unbind(-1)
        ]
        top_logp_inf = top_logp_inf.masked_fill(torch.stack(known, -1), -torch.inf)
        support_logp = batch.support_logp
        # the paper's set: the sampled token (column 0) only if a top-K contains it
        if self.cfg.obrs_z == "approx":
            support_logp = support_logp.clone()
            listed = (new.top_ids == batch.tokens[..., None]).any(-1)
            support_logp[..., 0].masked_fill_(~listed, -torch.inf)
        return {
            "support_ids": torch.cat([batch.support_ids, new.top_ids], -1),
            "support_logp": torch.cat([support_logp, top_logp_inf], -1),
            "support_logp_ref": torch.cat([new.support_logp, new.top_logp], -1),
        }

    def _micro(self, batch: Batch):
        """Yield (rows, micro-batch, whether prompts are shared) within the token budget.

        All ranks make the same choice and yield equally many micro-batches: a rank with fewer
        repeats its last row (rows = None). Sharing prompts needs an attention mask,
        with which some kernels are slower and which grows with the square of the length. So prompts
        are shared only up to SHARED tokens, if sharing saves at least 15 % of the tokens."""
        plain, plain_tokens = batching.micro_batches(
            batch, self.cfg.micro_tokens, share=False
        )
        shared, shared_tokens = batching.micro_batches(
            batch, self.cfg.micro_tokens, share=True
        )
        plain_tokens, shared_tokens = self.comm.sum([plain_tokens, shared_tokens])
        share = self.models.can_share and self.cfg.max_tokens <= SHARED
        share &= shared_tokens <= 0.85 * plain_tokens
        parts = shared if share else plain
        for i in range(int(self.comm.max([len(parts)])[0])):
            if i < len(parts):
                yield parts[i], batch.select(parts[i]).to(self.device), share
            else:
                yield None, batch.select(parts[-1][-1:]).to(self.device), share

    # -- one optimizer step ------------------------------------------------------------------------

    def backward(self, batch: Batch, stats: objectives.StepStats) -> dict[str, float]:
        """Write the gradient of a batch's loss over all ranks to .grad; return the metrics."""
        cfg = self.cfg
        needs = needs_of_update(cfg, self.has_actor, batch.logp_ref is not None)
        sums, total = Sums(), torch.zeros((), dtype=torch.float64, device=self.device)
        micros = list(self._micro(batch))
        parts = [stats.select([0] if rows is None else rows) for rows, *_ in micros]
        # no operation of the loop waits for the GPU (but: recorded allowed sets, low-bit experts)
        with self._casts_kept():
            for i, ((rows, micro, share), part) in enumerate(
                zip(micros, parts, strict=True)
            ):
                with self._gradient_sync(last=i == len(micros) - 1):
                    new = TokenStats(**self.wrapped(micro, needs, share))
                    unreduced, logs = objectives.joint_loss(new, micro, part, cfg)
                    loss = objectives.reduce(unreduced, micro.mask, stats, cfg)
                    if rows is None:
                        loss = loss * 0.0
                    # both wrappers average over ranks; the loss is a sum
                    self.scaler.scale(loss * self.comm.size).backward()
                if rows is None:
                    continue
                total += loss.detach().double()
                new, batch_ref = new.detach(), objectives.with_ref(new, micro)
                with torch.no_grad():
                    observe(sums, new, batch_ref, stats, logs, cfg)
        self.models.end_replay()
        if self.scaler.is_enabled():
            for optimizer in chain.from_iterable(self.optimizers.values()):
                self.scaler.unscale_(optimizer)
            # halves the loss scale after an overflow, doubles it after 2,000 updates without one;
            # the loss scale is the same on all ranks
            self.scaler.update()
        logged = derive(sums.reduce(self.comm))
        return logged | {"loss": self.comm.sum([total])[0]}

    def dot(self, a, b) -> float:
        """<a, b> of two directions in a model's weights, the same number on every rank. a, b: one
        tensor per parameter; under FSDP this rank's shard."""
        partial_sum = sum(
            float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True)
        )
        total = self.comm.sum([partial_sum])[0]
        return total if self.sharded else total / self.comm.size

    def _casts_kept(self):
        """Context in which weights are cast once for all micro-batches. FSDP casts its shards."""
        return contextlib.nullcontext() if self.sharded else self.models.casts_kept()

    def _gradient_sync(self, last: bool):
        """Context in which DDP reduces gradients over ranks only in the last micro-batch's backward
        pass. FSDP reduces in every backward pass, so that a rank stores only its shard."""
        if self.comm.on and not self.sharded and not last:
            return self.wrapped.no_sync()
        return contextlib.nullcontext()

    def step(self, logged: dict[str, float]) -> dict[str, float]:
        """Clip the gradients of `backward`, check them, step. Returns the step's metrics. logged:
        metrics of `backward`.

        A non-finite loss or gradient skips the step on every rank; MAX_SKIPS consecutive skips stop
        the run (`error`). A float16 overflow at a loss scale of 1 or more does not count towards
        MAX_SKIPS. If every token was rejected or cut, a model with a gradient of 0 does not
        step, because momentum would change its weights; the update is counted."""
        loss = logged["loss"]
        ess = (
            logged["rollout_corr/seq_eff_sample_size"] if self.cfg.lr_from_ess else 1.0
        )
        norms = {name: self._clip(name) for name in self.names}
        # rejection does not mask the entropy bonus, CPPO's KL and distillation
        rejected = logged["rollout_corr/rollout_rs_masked_fraction"] >= 1
        idle = {name: rejected and norm == 0 for name, norm in norms.items()}
        finite = math.isfinite(loss) and all(map(math.isfinite, norms.values()))
        factor, out = schedule(self.version, self.cfg), {}
        self.version += 1
        for name in self.names:
            prefix = "" if name == "policy" else "actor/"
            lr = self.lr[name] * factor * (math.sqrt(ess) if name == "policy" else 1.0)
            self._optimize(name, lr, step=finite and not idle[name])
            out |= {f"{prefix}grad_norm": norms[name], f"{prefix}lr": lr}
        overflow = (
            self.scaler.is_enabled()
            and math.isfinite(loss)
            and self.scaler.get_scale() >= 1
        )
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + (not overflow)
        self.skipped += not finite
        self.rejected += idle["policy"]
        if self.skipped_in_a_row >= MAX_SKIPS:
            self.error = (
                f"{self.skipped_in_a_row} updates in a row had a non-finite loss or gradient (the last: loss {loss}, "
                f"gradient norm {norms['policy']}); lower --lr, or check --is_cap and --grad_clip"
            )
        name = optim.not_finite(self.models)
        if self.comm.any(name):
            name = name or "of another rank"
            raise UserError(
                f"update {self.version} made the weight {name} infinite or NaN: lower --lr (now {self.cfg.lr}) or "
                f"--actor_lr; the newest checkpoint in {self.cfg.out} is intact: start from its policy with --model"
            )
        counts = {
            "skipped_steps": self.skipped,
            "rejected_steps": self.rejected,
            "stepped": finite,
        }
        if self.scaler.is_enabled():
            counts["loss_scale"] = self.scaler.get_scale()
        return out | {name: float(n) for name, n in counts.items()}

    def _clip(self, name: str) -> float:
        """Clip one model's gradient; return its norm before clipping."""
        norm = nn.utils.clip_grad_norm_(
            getattr(self.models, name).parameters(), self.cfg.grad_clip
        )
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _optimize(self, name: str, lr: float, step: bool) -> None:
        for optimizer in self.optimizers[name]:
            for group in optimizer.param_groups:
                group["lr"] = lr
            if step:
                optim.step(optimizer)
            # DDP's buckets stay: without gradients in them, accumulation would need as much again
            optimizer.zero_grad(set_to_none=self.sharded or not self.comm.on)

    # -- weights in and out ------------------------------------------------------------------------

    def named_tensors(self, name: str, gather=lambda _, x: whole(x)):
        """Yield (Hugging Face name, full detached tensor) of one model, including `lm_head.weight`.
        gather: (name, this rank's shard) -> full tensor. Collective."""
        return lora.merged(getattr(self.models, name), self.model_state(name), gather)

    def model_state(self, name: str) -> dict[str, torch.Tensor]:
        """One model's parameters and buffers on this rank, with adapters and `lm_head.weight`."""
        state = getattr(self.models, name).state_dict()
        if "lm_head.weight" not in state:  # some state dicts omit tied heads
            state["lm_head.weight"] = state[
                next(k for k in state if k.endswith("embed_tokens.weight"))
            ]
        return state

    def write_adapter(self, name: str, folder: Path, base: str) -> None:
        """Write a model's adapters, if it has any, on the first rank. Collective."""
        if lora.learns(self.cfg, name):
            lora.write(
                getattr(self.models, name), whole, folder, base, self.comm.rank == 0
            )

    def published(self, name: str, packed: bool) -> Published:
        """The tensors of one model for an engine. The stream can be read more than once; each
        reading is collective.

        With --rollout_quant, packed publishes q_w and s_w; otherwise a local engine gets
        dequantized weights, and remote samplers get unquantized weights, which they quantize.
        Matrices are cast to `published_type` before gathering, except the head with --lm_head_fp32
        and a float32 learner's routers, which engines may keep in float32."""
        model, cfg = getattr(self.models, name), self.cfg
        dtype = published_type(cfg, name)
        kept = {*quant.ROUTERS} if cfg.dtype == "float32" else set()
        if cfg.lm_head_fp32:
            tied = model.config.tie_word_embeddings
            kept |= {"lm_head", "embed_tokens"} if tied else {"lm_head"}

        def gather(key, x):
            cast = dtype and x.ndim > 1 and not {*key.split(".")} & kept
            return whole(x.detach().to(dtype) if cast else x)

        fmt = self.rollout_format
        if fmt is None or (cfg.samplers != "local" and not packed):
            return Published(lambda: self.named_tensors(name, gather))
        if lora.learns(cfg, name):  # the learner does not round W + B A
            fmt = replace(fmt, weights=torch.float32)
        return Published(
            lambda: quant.for_engine(
                self.named_tensors(name, gather), model, fmt, packed
            )
        )

    def state_dict(self) -> dict:
        """Counters and the state of the loss scaler; `trained` returns weights and optimizer
        states."""
        return {
            **{n: getattr(self, n) for n in COUNTERS},
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore the state of `state_dict`."""
        for counter in COUNTERS:
            setattr(self, counter, state[counter])
        self.scaler.load_state_dict(state["scaler"])

    def trained(self, name: str) -> dict[str, torch.Tensor]:
        """Trainable weights (model/weight) and optimizer states (model/weight/kind) of one model on
        this rank.

        The tensors are not copies: writing to them changes the learner."""
        names = self._learning(name)
        tensors = {key: p.detach() for p, key in names.items()}
        for optimizer in self.optimizers[name]:
            for p, state in optimizer.state.items():
                tensors |= {f"{names[p]}/{kind}": x for kind, x in state.items()}
        return tensors

    def make_states(self, saved: dict[str, tuple]) -> None:
        """Allocate the optimizer states of a checkpoint. saved: name -> (shape, dtype) of the
        tensors of `trained`."""
        for name in self.names:
            optimizer_of = {}
            for optimizer in self.optimizers[name]:
                optimizer.state.clear()
                optimizer_of |= {
                    p: optimizer
                    for group in optimizer.param_groups
                    for p in group["params"]
                }
            parameter = {key: p for p, key in self._learning(name).items()}
            for key, (shape, dtype) in saved.items():
                weight, _, kind = key.rpartition("/")
                if weight not in parameter:
                    continue
                p = parameter[weight]
                # counts its steps on the device
                fused = optimizer_of[p].defaults.get("fused")
                count = torch.zeros(
                    (), dtype=dtype, device=p.device if fused else "cpu"
                )
                room = torch.zeros_like(p, dtype=dtype).detach() if shape else count
                optimizer_of[p].state[p][kind] = room

    def _learning(self, name: str) -> dict:
        """Trainable parameter -> name in a checkpoint, for one model."""
        model = getattr(self.models, name)
        return {
            p: f"{name}/{key}" for key, p in model.named_parameters() if p.requires_grad
        }


# -- Published tensors


def published_type(cfg: Config, name: str) -> torch.dtype | None:
    """The 16-bit dtype in which a model is published: the learner's, to which it rounds weights, or
    the engine's if the learner uses float32 and samplers do not quantize. None: float32, also for
    merged adapters and --exact."""
    dtype = cfg.dtype
    if dtype == "float32" and cfg.rollout_quant == "none":
        dtype = cfg.rollout_dtype
    full = cfg.exact or lora.learns(cfg, name) or dtype == "float32"
    return None if full else getattr(torch, dtype)
