"""The learner: policy and optional actor, scored and trained through one wrapped module.

    score(batch, want) -> TokenStats        no gradient, any number of micro-batches
    update(batch, stats) -> dict            one optimizer step: forward, loss, backward for each micro-batch, clip, step

The forward is pair.py's; the optimizer is built in one function, `make_optimizer`.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import nn

import batching
import objectives
import quant
from batching import Batch
from metrics import Sums, observe
from model import PolicyAndActor, TokenStats, Needs, needs_of_update, needs_of_ref_pass


# ---------------------------------------------------------------------------------------------------------------------
# Ranks
# ---------------------------------------------------------------------------------------------------------------------


class Comm:
    """Sums, gathers and maxima over ranks; the identity for one process."""

    def __init__(self, device="cpu"):
        self.on = dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if self.on else (0, 1)
        self.device = device

    def sum(self, values) -> list[float]:
        """Sums over ranks of a list of scalars (numbers or 0-d tensors), in float64."""
        t = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values])
        if self.on:
            dist.all_reduce(t)
        return t.tolist()

    def max(self, values) -> list[float]:
        t = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values])
        if self.on:
            dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return t.tolist()

    def cat(self, x: torch.Tensor) -> torch.Tensor:
        """The 1-D tensors of all ranks, joined in rank order."""
        if not self.on:
            return x
        n = int(self.max([len(x)])[0])
        padded = torch.cat([x, x.new_full((n - len(x),), torch.nan)])
        out = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(out, padded)
        joined = torch.cat(out)
        return joined[~joined.isnan()]

    def barrier(self):
        if self.on:
            dist.barrier()


# ---------------------------------------------------------------------------------------------------------------------
# The learner
# ---------------------------------------------------------------------------------------------------------------------


def make_optimizers(model, cfg, lr: float) -> list:
    """AdamW over one model's parameters; or Muon over the matrices of its layers, and AdamW over the rest. Another optimizer is another line here."""
    inner = {id(p) for p in model.base_model.layers.parameters() if p.ndim == 2} if cfg.optimizer == "muon" else set()
    rest = [p for p in model.parameters() if id(p) not in inner]
    out = [
        torch.optim.AdamW(
            rest, lr=lr, betas=(cfg.adam_beta1, cfg.adam_beta2), eps=cfg.adam_eps, weight_decay=cfg.weight_decay
        )
    ]
    if inner:
        matrices = [p for p in model.parameters() if id(p) in inner]
        out.append(torch.optim.Muon(matrices, lr=lr, weight_decay=cfg.weight_decay, adjust_lr_fn="match_rms_adamw"))
    return out


def schedule(step: int, cfg) -> float:
    """Learning-rate factor of update `step` (from 0): linear warm-up, then constant, linear or cosine decay to 0."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))}[
        cfg.lr_schedule
    ]


class Learner:
    """Owns the models, their optimizers and the parallel wrapper. Batches go in on the CPU."""

    def __init__(self, policy, actor, cfg, comm: Comm, device: str = "cpu"):
        self.cfg, self.comm, self.device = cfg, comm, device
        self.fmt = quant.format_of(cfg.rollout_quant, cfg.quant_group)
        own = self.fmt if cfg.learner_quant == "aligned" else quant.format_of(cfg.learner_quant, cfg.quant_group)
        quant.align(policy if actor is None else actor, own)  # the model that samples
        self.models = PolicyAndActor(
            policy, actor, torch.bfloat16 if cfg.dtype == "bfloat16" else None, cfg.lm_head_fp32
        ).to(device)
        self.models.eval()  # dropout stays off: scoring and training see one law
        self.names = ["policy"] + (["actor"] if actor is not None else [])
        self.model = self._wrap()
        self.optimizers = {}
        for name in self.names:
            lr = cfg.lr if name == "policy" else cfg.actor_lr
            self.optimizers[name] = make_optimizers(getattr(self.models, name), cfg, lr)
        self.version, self.skipped_in_a_row, self.skipped, self.rejected = 0, 0, 0, 0

    def _wrap(self):
        if not self.comm.on:
            return self.models
        if self.cfg.parallel == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(torch.device(self.device).type, (self.comm.size,))
            for layer in self.models.modules():
                if isinstance(layer, quant.LowBitLinear):
                    layer.cache_quantized = False
            for name in self.names:
                for layer in getattr(self.models, name).base_model.layers:
                    fully_shard(layer, mesh=mesh)
            return fully_shard(self.models, mesh=mesh)  # embeddings, norms and heads: the root's group
        return nn.parallel.DistributedDataParallel(self.models, gradient_as_bucket_view=True)

    @property
    def two(self) -> bool:
        return len(self.names) == 2

    # -- forward only --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, batch: Batch, want: Needs) -> TokenStats:
        """TokenStats of a whole batch with the weights as they are, micro-batch by micro-batch, without gradient."""
        out = {}
        for rows, micro, share in self._micro(batch):
            new = TokenStats(**self.model(micro, want, share))
            if rows is None:  # filler: another rank has more micro-batches
                continue
            for f in fields(new):
                x = getattr(new, f.name)
                if x is not None:
                    full = out.setdefault(f.name, x.new_zeros((len(batch), batch.tokens.shape[1]) + x.shape[2:]))
                    full[rows, : x.shape[1]] = x
        if self.comm.on and self.cfg.parallel == "fsdp":
            self.model.reshard()  # no backward will: leave the shards as the owners
        return TokenStats(**{k: v.cpu() for k, v in out.items()})

    def ref_columns(self, batch: Batch, lam: float) -> dict[str, torch.Tensor]:
        """The ref pass: what objectives need of the policy (and actor) at the start of this step's updates."""
        new = self.score(batch, needs_of_ref_pass(self.cfg, self.two, lam))
        columns = {
            "logp_ref": new.logp,
            "support_logp_ref": new.support_logp,
            "tail_ref": new.tail,
            "actor_logp_ref": new.actor_logp,
            "z_ref": new.z,
            "kl_ref": new.kl_full,
            "kl_after": new.kl_after,
        }
        if new.top_ids is not None:  # two models, target new: S also covers the policy's own top-K
            dup = (new.top_ids[..., None] == batch.support_ids[:, :, None, :]).any(-1)
            columns["support_ids"] = torch.cat([batch.support_ids, new.top_ids], -1)
            columns["support_logp"] = torch.cat(
                [batch.support_logp, new.top_actor_logp.masked_fill(dup, -torch.inf)], -1
            )
            columns["support_logp_ref"] = torch.cat([new.support_logp, new.top_logp], -1)
        return {k: v for k, v in columns.items() if v is not None}

    def _micro(self, batch: Batch):
        """(rows, micro-batch, whether to share prompts) by token budget: as many, and shared or not, on every rank.

        A rank with fewer repeats its last row (rows = None). Prompts are shared where that saves 15 % of the tokens: the
        responses' attention then needs a mask, which costs some kernels their speed."""
        plans = [batching.split(batch, self.cfg.micro_tokens, share) for share in (False, True)]
        tokens = self.comm.sum([n for _, n in plans])
        share = self.models.can_share and tokens[1] <= 0.85 * tokens[0]
        parts = plans[share][0]
        for i in range(int(self.comm.max([len(parts)])[0])):
            real = i < len(parts)
            yield parts[i] if real else None, batch.select(parts[i] if real else parts[-1][-1:]).to(self.device), share

    # -- one optimizer step --------------------------------------------------------------------------------------------

    def update(self, batch: Batch, stats: dict, cfg=None) -> dict[str, float]:
        """One optimizer step on this rank's share of a batch. Returns the metrics of the step, global over ranks."""
        cfg = cfg or self.cfg
        want = needs_of_update(cfg, self.two, stats["lam"], batch.logp_ref is not None)
        sums, total = Sums(), torch.zeros((), dtype=torch.float64, device=self.device)
        micros = list(self._micro(batch))
        for i, (rows, micro, share) in enumerate(micros):
            with self._sync(i == len(micros) - 1):
                new = TokenStats(**self.model(micro, want, share))
                real = objectives.micro_stats(stats, rows if rows is not None else [0])
                unreduced, logs = objectives.joint_loss(new, micro, real, cfg)
                loss = objectives.reduce(unreduced, micro.mask, stats, cfg)
                if rows is None:
                    loss = loss * 0.0
                (loss * self.comm.size).backward()  # both wrappers average over ranks; we sum
            if rows is not None:
                total += loss.detach().double()
                with torch.no_grad():
                    observe(sums, new.detach(), objectives.with_ref(new, micro), stats, logs, cfg)
        logged = sums.reduce(self.comm)
        logged["loss"] = self.comm.sum([total])[0]
        logged.update(self._step(logged["loss"], logged["rollout_corr/rollout_rs_masked_fraction"] >= 1))
        return logged

    def _sync(self, last: bool):
        if not self.comm.on:
            return contextlib.nullcontext()
        if self.cfg.parallel == "fsdp":
            self.model.set_requires_gradient_sync(last)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if last else self.model.no_sync()

    def _step(self, loss: float, nothing: bool = False) -> dict[str, float]:
        """Clip, check, step. A non-finite loss or gradient skips the step on every rank; too many in a row stop the run.

        nothing: every token was rejected, so the policy stands still (its optimizer's momentum too) and the update is counted."""
        out, factor = {}, schedule(self.version, self.cfg)
        for name in self.names:
            norm = nn.utils.clip_grad_norm_(getattr(self.models, name).parameters(), self.cfg.grad_clip)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            out["grad_norm" if name == "policy" else "actor/grad_norm"] = float(norm)
        fine = math.isfinite(loss) and all(map(math.isfinite, out.values()))
        for name, optimizers in self.optimizers.items():
            lr = (self.cfg.lr if name == "policy" else self.cfg.actor_lr) * factor
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
                if fine and not (nothing and name == "policy"):
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            out["lr" if name == "policy" else "actor/lr"] = lr
        self.version += 1
        self.skipped_in_a_row = 0 if fine else self.skipped_in_a_row + 1
        self.skipped += not fine
        self.rejected += nothing
        out["skipped_steps"], out["rejected_steps"], out["stepped"] = (
            float(self.skipped),
            float(self.rejected),
            float(fine),
        )
        if self.skipped_in_a_row >= self.cfg.max_skips:
            raise RuntimeError(
                f"{self.skipped_in_a_row} updates in a row had a non-finite loss or gradient (the last: loss {loss}, "
                f"gradient norm {out['grad_norm']}): lower --lr, or look at --is_cap and --grad_clip"
            )
        return out

    # -- weights in and out --------------------------------------------------------------------------------------------

    def named_tensors(self, name: str):
        """Yields (Hugging Face name, whole detached tensor) of one model, `lm_head.weight` always included; collective."""
        state = getattr(self.models, name).state_dict()
        if "lm_head.weight" not in state:  # tied heads are dropped from some state dicts
            state["lm_head.weight"] = state[next(k for k in state if k.endswith("embed_tokens.weight"))]
        for key, x in state.items():
            x = x.detach()
            yield key, x.full_tensor() if hasattr(x, "full_tensor") else x

    def published(self, name: str, packed: bool):
        """What an engine loads of one model: `named_tensors`, its linear layers in the rollout's format if there is one (quant.py); collective.
        Remote samplers quantize for themselves, each as it likes, unless the low-bit tensors are what travels."""
        named, by_itself = self.named_tensors(name), self.cfg.samplers != "local" and not packed
        return (
            quant.for_engine(named, getattr(self.models, name), self.fmt, packed)
            if self.fmt and not by_itself
            else named
        )

    def state_dict(self) -> dict:
        """Optimizers and counters (whole, on rank 0); the weights themselves go through `tensors`. Collective."""
        out = {
            "version": self.version,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "rejected": self.rejected,
        }
        for name in self.names:
            out[f"optimizer.{name}"] = self._optimizer_state(name)
        return out

    def _options(self):
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        return StateDictOptions(full_state_dict=True, cpu_offload=True)

    def _optimizer_state(self, name: str) -> dict:
        if not (self.comm.on and self.cfg.parallel == "fsdp"):
            return {"parts": [o.state_dict() for o in self.optimizers[name]]}
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return get_optimizer_state_dict(getattr(self.models, name), self.optimizers[name], options=self._options())

    def load_state_dict(self, state: dict) -> None:
        self.version, self.skipped = state["version"], state["skipped"]
        self.skipped_in_a_row, self.rejected = state["skipped_in_a_row"], state["rejected"]
        for name in self.names:
            if self.comm.on and self.cfg.parallel == "fsdp":
                from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

                set_optimizer_state_dict(
                    getattr(self.models, name),
                    self.optimizers[name],
                    state[f"optimizer.{name}"],
                    options=self._options(),
                )
            else:
                for optimizer, part in zip(self.optimizers[name], state[f"optimizer.{name}"]["parts"]):
                    optimizer.load_state_dict(part)
