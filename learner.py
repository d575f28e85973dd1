"""The learner: policy and optional actor, scored and trained through one wrapped module.

`Pair.forward` is the only way to a model: hidden states, then the chunked head (head.py), inside the module that DDP or
FSDP2 wraps. Under FSDP2 a head's weight read outside that forward is one rank's shard, so policy and actor live in one
module, and what needs both laws at once (distillation, the exact Z) happens in there too.

    score(batch, want) -> TokenStats        no gradient, any number of micro-batches
    update(batch, stats, loss, ...) -> dict one optimizer step: forward, loss, backward for each micro-batch, clip, step

Linear layers may be replaced in place (`Pair.policy.model` is an ordinary transformers module) and the optimizer is built
in one function, `make_optimizer`.
"""
from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import nn

import batch as batches
import head
import objectives
from batch import Batch
from metrics import Sums, observe


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
        t = torch.stack([torch.as_tensor(v, device=self.device).double() for v in values])
        if self.on:
            dist.all_reduce(t)
        return t.tolist()

    def max(self, values) -> list[float]:
        t = torch.stack([torch.as_tensor(v, device=self.device).double() for v in values])
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
# Scores
# ---------------------------------------------------------------------------------------------------------------------

@dataclass
class TokenStats:
    """What one forward says of each response token. logp, actor_logp and kl carry gradient; None: not asked for."""
    logp: torch.Tensor                         # (B, T)    log p_new(token)
    entropy: torch.Tensor | None = None        # (B, T)    nats
    s_logp: torch.Tensor | None = None         # (B, T, S) log p_new on batch.s_ids
    tail: torch.Tensor | None = None           # (B, T)    sum outside S of min(p_K, p_new / lambda)
    actor_logp: torch.Tensor | None = None     # (B, T)
    actor_entropy: torch.Tensor | None = None  # (B, T)
    kl: torch.Tensor | None = None             # (B, T)    distillation loss, gradient to the actor alone
    z: torch.Tensor | None = None              # (B, T)    exact Z of p_inf := actor, p_tgt := policy
    kl_full: torch.Tensor | None = None        # (B, T)    KL(policy || actor), whole vocabulary, no gradient
    kl_after: torch.Tensor | None = None       # (B, T)    KL(policy || law of the accepted tokens)
    top_ids: torch.Tensor | None = None        # (B, T, K) the policy's own top-K
    top_logp: torch.Tensor | None = None       # (B, T, K)
    top_actor_logp: torch.Tensor | None = None  # (B, T, K) the actor's log-probabilities there

    def detach(self) -> "TokenStats":
        return TokenStats(**{f.name: None if (x := getattr(self, f.name)) is None else x.detach() for f in fields(self)})


@dataclass(frozen=True)
class Want:
    """What a forward has to yield beyond the sampled tokens' log-probabilities."""
    entropy: bool = False
    s: bool = False                # s_logp, and with `tail` the second bound of Z
    tail: bool = False
    pair: bool = False             # z, kl_after (two models)
    distill: str = "none"          # "none" | "forward" | "reverse"
    distill_topk: int = 0
    topk: int = 0                  # top_ids, top_actor_logp (two models)
    lam: float = 1.0


class Pair(nn.Module):
    """Policy and optional actor as one module: (batch, want) -> the fields of TokenStats, as the dict that wrappers expect.

    With `share` a prompt is read once for all its responses in the batch, not once for each."""

    def __init__(self, policy, actor=None, autocast: torch.dtype | None = None):
        super().__init__()
        self.policy, self.actor, self.autocast = policy, actor, autocast

    @property
    def can_share(self) -> bool:
        """Whether the models see nothing but keys and values of a prompt: full attention in every layer."""
        models = [m for m in (self.policy, self.actor) if m is not None]
        return all(set(getattr(m.config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
                   and not getattr(m.config, "sliding_window", None) for m in models)

    def forward(self, batch: Batch, want: Want, share: bool = False):
        B, T = batch.tokens.shape
        at = batch.exists.flatten().nonzero()[:, 0]                       # (N,) places in (B, T) that are tokens
        row, t = at // T, at % T
        target = batch.tokens.flatten()[at]
        inv_t = None
        if bool((batch.temperature != 1).any()):
            inv_t = (1.0 / batch.temperature)[row, None]
        kept = None
        if batch.kept is not None:
            sizes = torch.cat([torch.as_tensor(o).diff() for o, _ in batch.kept]).to(at.device)
            kept_ids = torch.cat([torch.as_tensor(i, dtype=torch.long) for _, i in batch.kept]).to(at.device)
            kept = (torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), kept_ids)
        s_ids = batch.s_ids.flatten(0, 1)[at] if want.s else None
        s_on = batch.s_logp.flatten(0, 1)[at].isfinite() if want.s else None
        p_k = batch.p_k.flatten()[at] if want.tail else None
        law = lambda **k: head.one_model(target, inv_t, kept=kept, entropy=want.entropy, **k)
        rows = law(ids=s_ids, s_on=s_on, p_k=p_k, lam=want.lam)
        heads = [*self._hidden(self.policy, batch, at, share)]
        two = self.actor is not None
        if two:
            rows = head.two_models(rows, law(), want.distill, want.distill_topk, want.lam, want.pair, want.topk)
            heads += self._hidden(self.actor, batch, at, share)
        out = head.ChunkedHead.apply(rows, head.chunk_rows(heads[1].shape[0]), *heads)

        def back(x, on=True):                                                       # (N, ...) -> (B, T, ...)
            if not on:
                return None
            return x.new_zeros((B, T) + x.shape[1:]).index_put((row, t), x)
        if not two:
            out = (out[0], None, None, *out[1:]) + (None,) * 7
        logp, actor_logp, kl, entropy, s_logp, tail, actor_entropy, z, full, after, top_ids, top_logp, top_actor = out
        return dict(
            logp=back(logp), entropy=back(entropy, want.entropy), s_logp=back(s_logp, want.s), tail=back(tail, want.tail),
            actor_logp=back(actor_logp, two), actor_entropy=back(actor_entropy, two and want.entropy),
            kl=back(kl, two and want.distill != "none"), z=back(z, two and want.pair), kl_full=back(full, two),
            kl_after=back(after, two and want.pair), top_ids=back(top_ids, two and want.topk),
            top_logp=back(top_logp, two and want.topk), top_actor_logp=back(top_actor, two and want.topk))

    def _hidden(self, lm, batch, at, share):
        """Hidden states that predict the tokens at the places `at` in (B, T): (N, H); and the head's weight (V, H)."""
        scope = torch.autocast(at.device.type, self.autocast) if self.autocast else contextlib.nullcontext()
        with scope:
            hidden = (self._read_shared if share else self._read)(lm.base_model, batch, at)
        if self.autocast:                                                  # a bfloat16 product pays on GPUs alone; its sum stays float32
            hidden = hidden.to(self.autocast if hidden.is_cuda else torch.float32)
        return hidden, lm.get_output_embeddings().weight

    @staticmethod
    def _read(model, batch, at):
        ids, T = batch.ids[:, :-1], batch.tokens.shape[1]                  # nothing is predicted from the last token
        row, t = at // T, at % T
        hidden = model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1)[row * ids.shape[1] + batch.prompt_len[row] + t - 1]    # one place before its token

    @staticmethod
    def _read_shared(model, batch, at):
        """Each group's prompt first, then every response on top of its group's keys and values; gradients flow through them."""
        T = batch.tokens.shape[1]
        _, group, rows = batch.group.unique_consecutive(return_inverse=True, return_counts=True)               # (B,), (G,)
        first = rows.cumsum(0) - rows                                      # a group's first row
        plen = batch.prompt_len[first]
        P, n = int(plen.max()), max(T - 1, 1)
        place = torch.arange(P + n, device=at.device)
        prompts = model(input_ids=batch.ids[first, :P], use_cache=True)    # behind a shorter prompt: ids that no response sees
        prompts.past_key_values.batch_select_indices(group)
        before = prompts.last_hidden_state[torch.arange(len(plen), device=at.device), plen - 1][group]         # (B, H)
        seen = (place < batch.prompt_len[:, None]) | (place >= P)
        rest = model(input_ids=batch.tokens[:, :n], past_key_values=prompts.past_key_values, attention_mask=seen.long(), use_cache=True,
                     position_ids=batch.prompt_len[:, None] + place[:n]).last_hidden_state
        return torch.cat([before[:, None], rest], 1)[:, :T].flatten(0, 1)[at]


def want_ref(cfg, two: bool, lam: float) -> Want:
    """What the ref pass must yield under this configuration."""
    z = cfg.correction in objectives.USES_Z
    bracket = z and cfg.obrs_z != "exact"
    return Want(s=bracket, tail=bracket and not cfg.obrs_accept_rate, pair=two and z and cfg.obrs_target == "ref" and not cfg.obrs_accept_rate, lam=lam,
                topk=cfg.obrs_topk if two and bracket and cfg.obrs_target == "new" else 0)


def want_new(cfg, two: bool, lam: float, has_ref: bool) -> Want:
    """What the training pass must yield; without a ref pass it also plays its part (objectives.with_ref)."""
    z = cfg.correction in objectives.USES_Z
    bracket = z and cfg.obrs_z != "exact" and (cfg.obrs_target == "new" or not has_ref)
    return Want(entropy=True, s=bracket, tail=bracket and not cfg.obrs_accept_rate, pair=two and z and not has_ref, lam=lam,
                distill=cfg.distill_direction if two else "none", distill_topk=cfg.distill_topk)


def want_fresh(cfg) -> Want:
    """What the extra forward of `--kappa=exact` must yield: the policy at S as it is now."""
    return Want(s=True, tail=not cfg.obrs_accept_rate, lam=cfg.obrs_lambda)


# ---------------------------------------------------------------------------------------------------------------------
# The learner
# ---------------------------------------------------------------------------------------------------------------------

def make_optimizer(params, cfg, lr: float):
    """AdamW over one model's parameters. Another optimizer is another line here."""
    return torch.optim.AdamW(params, lr=lr, betas=(cfg.adam_beta1, cfg.adam_beta2), eps=cfg.adam_eps, weight_decay=cfg.weight_decay)


def schedule(step: int, cfg) -> float:
    """Learning-rate factor of update `step` (from 0): linear warm-up, then constant, linear or cosine decay to 0."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))}[cfg.lr_schedule]


class Learner:
    """Owns the models, their optimizers and the parallel wrapper. Batches go in on the CPU."""

    def __init__(self, policy, actor, cfg, comm: Comm, device: str = "cpu"):
        self.cfg, self.comm, self.device = cfg, comm, device
        self.pair = Pair(policy, actor, torch.bfloat16 if cfg.dtype == "bfloat16" else None).to(device)
        self.pair.eval()                                                   # dropout stays off: scoring and training see one law
        self.names = ["policy"] + (["actor"] if actor is not None else [])
        self.model = self._wrap()
        self.optimizers = {}
        for name in self.names:
            lr = cfg.lr if name == "policy" else cfg.actor_lr
            self.optimizers[name] = make_optimizer(getattr(self.pair, name).parameters(), cfg, lr)
        self.version, self.skipped_in_a_row, self.skipped = 0, 0, 0

    def _wrap(self):
        if not self.comm.on:
            return self.pair
        if self.cfg.parallel == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            mesh = init_device_mesh(torch.device(self.device).type, (self.comm.world,))
            for name in self.names:
                for layer in getattr(self.pair, name).base_model.layers:
                    fully_shard(layer, mesh=mesh)
            return fully_shard(self.pair, mesh=mesh)                       # embeddings, norms and heads: the root's group
        return nn.parallel.DistributedDataParallel(self.pair, gradient_as_bucket_view=True)

    @property
    def two(self) -> bool:
        return len(self.names) == 2

    # -- forward only --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, batch: Batch, want: Want) -> TokenStats:
        """TokenStats of a whole batch with the weights as they are, micro-batch by micro-batch, without gradient."""
        out = {}
        for rows, micro, share in self._micro(batch):
            new = TokenStats(**self.model(micro, want, share))
            if rows is None:                                               # filler: another rank has more micro-batches
                continue
            for f in fields(new):
                x = getattr(new, f.name)
                if x is not None:
                    full = out.setdefault(f.name, x.new_zeros((len(batch), batch.tokens.shape[1]) + x.shape[2:]))
                    full[rows, :x.shape[1]] = x
        if self.comm.on and self.cfg.parallel == "fsdp":
            self.model.reshard()                                           # no backward will: leave the shards as the owners
        return TokenStats(**{k: v.cpu() for k, v in out.items()})

    def ref_columns(self, batch: Batch, lam: float) -> dict[str, torch.Tensor]:
        """The ref pass: what objectives need of the policy (and actor) at the start of this step's updates."""
        new = self.score(batch, want_ref(self.cfg, self.two, lam))
        columns = {"logp_ref": new.logp, "s_logp_ref": new.s_logp, "tail_ref": new.tail, "logp_actor_ref": new.actor_logp,
                   "z_ref": new.z, "kl_before": new.kl_full if new.z is not None else None, "kl_after": new.kl_after}
        if new.top_ids is not None:            # two models, target new: S also covers the policy's own top-K
            dup = (new.top_ids[..., None] == batch.s_ids[:, :, None, :]).any(-1)
            columns["s_ids"] = torch.cat([batch.s_ids, new.top_ids], -1)
            columns["s_logp"] = torch.cat([batch.s_logp, new.top_actor_logp.masked_fill(dup, -torch.inf)], -1)
            columns["s_logp_ref"] = torch.cat([new.s_logp, new.top_logp], -1)
        return {k: v for k, v in columns.items() if v is not None}

    def _micro(self, batch: Batch):
        """(rows, micro-batch, whether to share prompts) by token budget: as many, and shared or not, on every rank.

        A rank with fewer repeats its last row (rows = None). Prompts are shared where that saves 15 % of the tokens: the
        responses' attention then needs a mask, which costs some kernels their speed."""
        plans = [batches.split(batch, self.cfg.micro_tokens, share) for share in (False, True)]
        tokens = self.comm.sum([n for _, n in plans])
        share = self.pair.can_share and tokens[1] <= 0.85 * tokens[0]
        parts = plans[share][0]
        for i in range(int(self.comm.max([len(parts)])[0])):
            real = i < len(parts)
            yield parts[i] if real else None, batch.select(parts[i] if real else parts[-1][-1:]).to(self.device), share

    # -- one optimizer step --------------------------------------------------------------------------------------------

    def update(self, batch: Batch, stats: dict, cfg=None) -> dict[str, float]:
        """One optimizer step on this rank's share of a batch. Returns the metrics of the step, global over ranks."""
        cfg = cfg or self.cfg
        want = want_new(cfg, self.two, stats["lam"], batch.logp_ref is not None)
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
                (loss * self.comm.world).backward()                        # both wrappers average over ranks; we sum
            if rows is not None:
                total += loss.detach().double()
                with torch.no_grad():
                    observe(sums, new.detach(), objectives.with_ref(new, micro), stats, logs, cfg)
        logged = sums.reduce(self.comm)
        logged["loss"] = self.comm.sum([total])[0]
        logged.update(self._step(logged["loss"]))
        return logged

    def _sync(self, last: bool):
        if not self.comm.on:
            return contextlib.nullcontext()
        if self.cfg.parallel == "fsdp":
            self.model.set_requires_gradient_sync(last)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if last else self.model.no_sync()

    def _step(self, loss: float) -> dict[str, float]:
        """Clip, check, step. A non-finite loss or gradient skips the step on every rank; too many in a row stop the run."""
        out, factor = {}, schedule(self.version, self.cfg)
        for name in self.names:
            norm = nn.utils.clip_grad_norm_(getattr(self.pair, name).parameters(), self.cfg.grad_clip)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            out["grad_norm" if name == "policy" else "actor/grad_norm"] = float(norm)
        fine = math.isfinite(loss) and all(map(math.isfinite, out.values()))
        for name, optimizer in self.optimizers.items():
            lr = (self.cfg.lr if name == "policy" else self.cfg.actor_lr) * factor
            for group in optimizer.param_groups:
                group["lr"] = lr
            if fine:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            out["lr" if name == "policy" else "actor/lr"] = lr
        self.version += 1
        self.skipped_in_a_row = 0 if fine else self.skipped_in_a_row + 1
        self.skipped += not fine
        out["skipped_steps"], out["stepped"] = float(self.skipped), float(fine)
        if self.skipped_in_a_row >= self.cfg.max_skips:
            raise RuntimeError(f"{self.skipped_in_a_row} updates in a row had a non-finite loss or gradient (the last: loss {loss}, "
                               f"gradient norm {out['grad_norm']}): lower --lr, or look at --is_cap and --grad_clip")
        return out

    # -- weights in and out --------------------------------------------------------------------------------------------

    def named_tensors(self, name: str):
        """Yields (Hugging Face name, whole detached tensor) of one model, `lm_head.weight` always included; collective."""
        state = getattr(self.pair, name).state_dict()
        if "lm_head.weight" not in state:                                  # tied heads are dropped from some state dicts
            state["lm_head.weight"] = state[next(k for k in state if k.endswith("embed_tokens.weight"))]
        for key, x in state.items():
            x = x.detach()
            yield key, x.full_tensor() if hasattr(x, "full_tensor") else x

    def state_dict(self) -> dict:
        """Optimizers and counters (whole, on rank 0); the weights themselves go through `tensors`. Collective."""
        out = {"version": self.version, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}
        for name in self.names:
            out[f"optimizer.{name}"] = self._optimizer_state(name)
        return out

    def _options(self):
        from torch.distributed.checkpoint.state_dict import StateDictOptions
        return StateDictOptions(full_state_dict=True, cpu_offload=True)

    def _optimizer_state(self, name: str) -> dict:
        if not (self.comm.on and self.cfg.parallel == "fsdp"):
            return self.optimizers[name].state_dict()
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
        return get_optimizer_state_dict(getattr(self.pair, name), self.optimizers[name], options=self._options())

    def load_state_dict(self, state: dict) -> None:
        self.version, self.skipped = state["version"], state["skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        for name in self.names:
            if self.comm.on and self.cfg.parallel == "fsdp":
                from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
                set_optimizer_state_dict(getattr(self.pair, name), self.optimizers[name], state[f"optimizer.{name}"], options=self._options())
            else:
                self.optimizers[name].load_state_dict(state[f"optimizer.{name}"])
