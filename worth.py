"""Worth: compare the gradient of a sampler's responses with the on-policy gradient, without
training.

    python worth.py --model=base:policy --actor=base:actor              # sampler: a different model
    python worth.py --model=FOLDER --actor=none --rollout_quant=w2a16   # sampler: low-bit policy
    python worth.py --model=FOLDER --actor=OLDER_FOLDER                 # sampler: older weights
    python worth.py ... --rows="tis; tis is_cap=8; jackpot obrs_mask=expected"
    torchrun --nproc_per_node=2 worth.py ... --parallel=fsdp --share=0.1

worth.py also takes train.py's flags, except --objective and --correction: --rows names objectives
(default: 22). These settings cannot be measured and raise an error: --delay, --samplers,
--learner_quant, --router_replay, --advantage=otb, --obrs_target=new, --obrs_z=approx and
--keep_sampling_mask=recompute.

    g      expected on-policy gradient of the policy
    g_c    gradient of one batch of B sampler responses under row c
    scale  = E<g_c, g> / |g|^2                  length of the step along g: 1 if E g_c = g
    bias   = |E g_c - scale g|^2 / |g|^2        part of E g_c orthogonal to g
    noise  = (E|g_c|^2 - |E g_c|^2) / |g|^2     of one batch; noise_on: of one on-policy batch
    worth  = scale^2 noise_on / (bias + noise)

The expected cosine of g_c and g is scale / sqrt(scale^2 + bias + noise). An on-policy batch of
(worth B) responses has the same cosine, so worth counts on-policy responses per sampler response.
The sampler pays if worth exceeds the sampler's cost per response divided by the policy's. Worth
describes the next step, not the result of many steps.

Method: g_c = sum_t c_t grad log p_t, a sum over tokens, with c_t = d J_c / d log p_t from the row's
loss. So for a direction v, <g_c, v> = sum_t c_t s_t with s_t = d/de log p_t(theta + e v). One
forward pass with slightly shifted weights gives s_t of all tokens, and each row is a weighted sum
of s_t. v = g gives scale. Random v of unit covariance give bias and noise, since E<x, v>^2 = |x|^2.
No gradient of sampler responses is stored."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import machinery.startup  # isort: skip  # noqa: F401

import numpy as np
import torch
from tqdm import tqdm

import batching
import config
import objectives
import sampling
from config import Config
from corrections import token_k3, topk_of
from eval import sampler_of, write_result
from learner import Learner
from machinery import flags, settings
from machinery.flags import need, run_command
from machinery.measure import FOLDS, Reference, RowSamples, with_errors
from machinery.optim import learning
from machinery.ranks import Comm
from machinery.run import open_run, open_source
from model import Needs, TokenStats, needs_of_ref_pass
from objectives import columns_of, unregularised
from source import LocalSource

ROWS = (
    "none; is; tis is_cap=2; tis is_cap=3; tis is_cap=8; icepop; seq_is; seq_tis is_cap=1; seq_tis is_cap=2; "
    "seq_tis is_cap=4; seq_mis; geo_rs rs_low=0.9 rs_high=1.1; prefix_tis is_cap=1; prefix_tis is_cap=2; "
    "prefix_tis is_cap=4; retrace; retrace_seq; spare; z_tis; jackpot obrs_mode=mask; jackpot; "
    "jackpot obrs_mask=expected"
)
OF_ROWS = {
    f.name for kind in (config.ObjectiveFlags, config.ObrsFlags) for f in fields(kind)
}
# root mean square change of log-probabilities by a shift of the weights, nats
STEP = 0.005


@dataclass(frozen=True)
class WorthFlags:
    """The measurement (worth.py)"""

    rows: str = ROWS
    """Objectives to measure, separated by semicolons, each followed by its flags."""
    batches: int = 24
    """Number of batches (--train_batch responses each) of the sampler."""
    reference: int = 48
    """Number of on-policy batches, for the gradient g."""
    directions: int = 32
    """Number of random directions, for bias and noise."""
    noise_batches: int = 4
    """Number of the sampler's batches that are also measured along the random directions."""
    share: float = 1.0
    """Share of the parameters that is measured: whole tensors, drawn at random. The rest is frozen."""
    json: str = "out/worth.json"
    """Output file."""


# -- Flags


def parse(
    argv: list[str] | None,
    own: type[WorthFlags] = WorthFlags,
    usage: str = "python worth.py [--config=FILE.toml] --key=value ...",
) -> tuple[WorthFlags, dict[str, Config], Config]:
    """The flags, the configuration of each row, and the configuration of g (`on_policy_config`).
    UserError: one sentence."""
    worth_flags, pairs = flags.parse_own(own, Config, argv, usage)
    given = {k for k, _ in pairs}
    for name in ("objective", "correction"):
        need(name not in given, f"--{name}: name the objectives to measure with --rows")
    # lr, actor_lr: required, not used here. micro_tokens: the plan does not count the measurement
    defaults = {"lr": "1", "actor_lr": "1", "micro_tokens": str(config.MICRO_TOKENS)}
    pairs = [*((k, v) for k, v in defaults.items() if k not in given), *pairs]
    of_rows = {f.name for f in fields(config.ObjectiveFlags)} - {
        "advantage",
        "reduction",
        "mask_cut",
    }
    of_g = [f"--{k}={v}" for k, v in pairs if k not in of_rows] + ["--objective=none"]
    # the gradient is in float32, but the engine's dtype is the checkpoint's
    dtypes = {"dtype": "float32", "rollout_dtype": settings.parse(of_g).rollout_dtype}
    dtypes = [f"--{k}={v}" for k, v in dtypes.items() if k not in given]
    plain = settings.parse(dtypes + of_g)
    shared = dtypes + [f"--{k}={v}" for k, v in pairs]
    check(worth_flags)
    rows = {}
    for row in filter(None, map(str.strip, worth_flags.rows.split(";"))):
        objective, *flags_of_row = row.split()
        for flag in flags_of_row:
            name = flag.partition("=")[0]
            need(
                name in OF_ROWS or name not in config.FIELDS,
                f"--rows: {flag} of {row!r} is not a flag of an objective; all rows share it: give it outside --rows",
            )
        rows[row] = settings.parse(
            [
                *shared,
                f"--objective={objective}",
                *(f"--{flag}" for flag in flags_of_row),
            ]
        )
    need(rows, "--rows: no objective is named")
    for cfg in rows.values():
        check_row(cfg)
    groups = worth_flags.noise_batches * plain.train_batch // plain.group_size
    need(
        groups >= FOLDS,
        f"--noise_batches={worth_flags.noise_batches}: {groups} groups of responses; an error estimate needs "
        f"at least {FOLDS}",
    )
    need(
        len({topk_of(cfg) for cfg in rows.values()} - {0}) <= 1,
        "--rows: the rows have different --obrs_topk; measure these rows in separate runs",
    )
    return worth_flags, rows, on_policy_config(plain)


def check(worth_flags: WorthFlags) -> None:
    reference, directions = worth_flags.reference, worth_flags.directions
    batches = worth_flags.batches
    a_fold = f"must be a multiple of {FOLDS} above 0, for an error estimate"
    flags.need_each(
        worth_flags,
        (reference > 0 and reference % FOLDS == 0, "reference", a_fold),
        (directions > 0 and directions % FOLDS == 0, "directions", a_fold),
        (batches >= 3, "batches", "must be at least 3, for an error estimate"),
        (
            1 <= worth_flags.noise_batches <= batches,
            "noise_batches",
            "must be 1 to --batches",
        ),
        (0 < worth_flags.share <= 1, "share", "must be above 0 and at most 1"),
    )
    flags.check_result("json", worth_flags.json)


def check_row(cfg: Config) -> None:
    """Raise UserError if a row cannot be measured."""
    from_weights = "worth.py does not simulate delays; name an older policy as --actor"
    rounded = (
        "shifted weights cannot measure the gradient through rounded weights; use none"
    )
    recut = "shifted weights change the set of allowed tokens; use replay or off"
    truncates = sampling.Sampling.of(cfg).truncates
    of_policy = "needs the policy's top-K, which is unknown here"
    uses_z = cfg.correction in objectives.USES_Z
    flags.need_each(
        cfg,
        (
            not cfg.router_replay,
            "router_replay",
            "g is computed with the learner's routing",
        ),
        (
            cfg.advantage != "otb",
            "advantage",
            "g is computed without a ref pass; use another",
        ),
        (cfg.samplers == "local", "samplers", from_weights),
        (cfg.delay == "none", "delay", from_weights),
        (cfg.learner_quant == "none", "learner_quant", rounded),
        (
            not truncates or cfg.keep_sampling_mask != "recompute",
            "keep_sampling_mask",
            recut,
        ),
        (cfg.obrs_target == "ref", "obrs_target", of_policy),
        (not uses_z or cfg.obrs_z != "approx", "obrs_z", of_policy),
    )


# -- c_t: the coefficients of a row on a batch


def batches_of(learner, groups, rows: dict[str, Config]) -> dict[str, batching.Batch]:
    """row -> the groups as a batch, with the row's advantages and ref columns (Z depends on
    lambda)."""
    collated, scored, batches = {}, {}, {}
    needs = {
        row: needs_of_ref_pass(unregularised(cfg), learner.has_actor)
        for row, cfg in rows.items()
    }
    # last: rows that need only log-probabilities, which every pass gives
    for row in sorted(rows, key=lambda row: needs[row] == Needs()):
        cfg = rows[row]
        of_batch = (cfg.advantage, cfg.mask_cut)
        if of_batch not in collated:
            collated[of_batch] = batching.collate(groups, cfg)
        of_pass = needs[row]
        if of_pass == Needs():
            of_pass = next(iter(scored), of_pass)
        if of_pass not in scored:
            scored[of_pass] = learner.score(collated[of_batch], of_pass)
        batches[row] = replace(collated[of_batch], **columns_of(scored[of_pass]))
    return {row: batches[row] for row in rows}


def coefficients(batch, comm, cfg: Config) -> torch.Tensor:
    """c_t = d J / d log p_t at p_new = p_ref, (B, T), by differentiating the row's loss."""
    logp = batch.logp_ref.double().clone().requires_grad_()
    new = TokenStats(
        logp, support_logp=batch.support_logp_ref, tail=batch.tail_ref, z=batch.z_ref
    )
    stats = objectives.prepare(batch, comm, cfg, {})
    unreduced, _ = objectives.loss(new, batch, stats, unregularised(cfg))
    total = objectives.reduce(unreduced, batch.mask, stats, cfg)
    return -torch.autograd.grad(total, logp)[0]


# -- s_t: log-probabilities along a direction


def draw(policy, share: float) -> None:
    """Freeze all but a random choice of parameters with this share of the trained entries."""
    if share == 1:
        return
    parameters = learning(policy)
    left = share * sum(p.numel() for p in parameters)
    order = torch.randperm(len(parameters), generator=torch.Generator().manual_seed(0))
    for i in order.tolist():
        size = parameters[i].numel()
        parameters[i].requires_grad_(size <= left)
        left -= size * (size <= left)
    need(learning(policy), f"--share={share}: no parameter is so small; raise it")


class Weights:
    """The policy's measured parameters as one vector; under FSDP this rank's shard.

    A direction is a list of tensors, one per parameter."""

    def __init__(self, learner):
        self.learner = learner
        # replicas use the same directions
        self.seed = learner.comm.rank if learner.sharded else 0
        self.flat = [
            local(p).detach().view(-1) for p in learning(learner.models.policy)
        ]
        self.start = [x.clone() for x in self.flat]
        self.spreads: dict[int, float] = {}  # of directions, by id

    def gradient(self) -> list[torch.Tensor]:
        """Gradient of J (the loss is -J) from the last backward pass."""
        return [-local(p.grad).view(-1) for p in learning(self.learner.models.policy)]

    def random(self, number: int) -> list[torch.Tensor]:
        """A direction of independent random signs: E <x, v>^2 = |x|^2."""
        out = []
        first_seed = 1_000_003 * (1 + number) + 1009 * self.seed
        for seed, x in enumerate(self.start, first_seed):
            generator = torch.Generator().manual_seed(seed)
            signs = (
                torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int8) * 2
                - 1
            )
            out.append(signs.to(x.device))
        return out

    @torch.no_grad()
    def shift(self, direction, size: float) -> None:
        for x, values, d in zip(self.flat, self.start, direction, strict=True):
            x.copy_(values + size * d.to(x.device))

    def slopes(self, batch, directions) -> list[torch.Tensor]:
        """s_t = d/de log p_t(theta + e v), (B, T), for each direction v, by finite differences."""
        unshifted = self.learner.score(batch, Needs()).logp
        slopes = []
        for v in directions:
            size = STEP / self.spread(batch, unshifted, v)
            slopes.append((self.shifted(batch, v, size) - unshifted).double() / size)
        return slopes

    def shifted(self, batch, direction, size: float) -> torch.Tensor:
        """log p_t at weights shifted by size times the direction; the weights are restored."""
        self.shift(direction, size)
        logp = self.learner.score(batch, Needs()).logp
        self.shift(direction, 0.0)
        return logp

    def spread(self, batch, unshifted, direction) -> float:
        """Approximate root mean square change of log-probabilities per unit step, from a small step
        on a few responses of all ranks."""
        if id(direction) not in self.spreads:
            part = batch.select(list(range(min(len(batch), 16))))
            small = 1e-3 / math.sqrt(self.learner.dot(direction, direction))
            before = unshifted[: len(part), : part.tokens.shape[1]]
            change = (self.shifted(part, direction, small) - before)[part.mask]
            sums = [change.double().square().sum(), len(change)]
            squares, count = self.learner.comm.sum(sums)
            self.spreads[id(direction)] = max(math.sqrt(squares / count) / small, 1e-12)
        return self.spreads[id(direction)]


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor."""
    return x.to_local() if hasattr(x, "to_local") else x


# -- Measuring


@dataclass
class Slopes:
    """A batch of the sampler, and the slopes s_t of its log-probabilities."""

    batches: dict[str, batching.Batch]  # row -> the batch with the row's ref columns
    # (B, T) for each mean gradient of the reference, FOLDS in number
    along: list[torch.Tensor]
    # (B, T) for each random direction; None if not measured
    random: list[torch.Tensor] | None


class Measurement:
    """Sampler, policy and the on-policy gradient, over all ranks."""

    def __init__(
        self, worth_flags: WorthFlags, rows: dict[str, Config], on_policy_cfg: Config
    ):
        self.worth_flags, self.rows, self.on_policy_cfg = (
            worth_flags,
            rows,
            on_policy_cfg,
        )
        # the engine records the largest top-K of all rows
        self.cfg = cfg = max(rows.values(), key=topk_of)
        self.comm = Comm.start(cfg.give_up)
        self.run = run = open_run(cfg, self.comm)
        self.sampler = None  # under torchrun: open until the end
        # sums over the responses of each sampler
        self.totals = {"on_policy": np.zeros(5), "sampler": np.zeros(5)}
        # groups of a batch on this rank
        self.groups = cfg.train_batch // (cfg.group_size * self.comm.size)
        # one model after the other, for less memory: the engine, the actor, the gradient
        sampled = self.sample_all()
        policy, actor = run.load_models()
        draw(policy, worth_flags.share)
        learner = Learner(policy, actor, on_policy_cfg, self.comm, run.vocabulary)
        del actor
        self.batches = [
            batches_of(learner, groups, rows)
            for groups in self.bar(sampled, "ref pass")
        ]
        if not learner.sharded:  # under FSDP the policy is already wrapped
            in_float32 = replace(on_policy_cfg, dtype="float32")
            learner = Learner(policy, None, in_float32, self.comm, run.vocabulary)
            gc.collect()  # the actor
        self.scorer = learner
        self.on_policy = on_policy_source(self.scorer, run, on_policy_cfg)
        self.weights = Weights(self.scorer)
        self.random = [self.weights.random(k) for k in range(worth_flags.directions)]

    def sample_all(self) -> list[list]:
        """The groups of each batch of the sampler."""
        # a sleeping engine can drop its weights, and here they are not published again
        sampler = open_source(self.cfg, self.run, self.comm, sleeps=False)
        sampled = self.sample(sampler, self.worth_flags.batches)
        if self.comm.on:  # vLLM's shutdown would end the process group
            self.sampler = sampler
        else:
            sampler.close()
        return sampled

    def sample(self, source, batches: int) -> list[list]:
        """The groups of each batch, sampled all at once, which is faster."""
        groups, n = source.next(batches * self.groups, 0), self.groups
        return [groups[i : i + n] for i in range(0, len(groups), n)]

    def bar(self, items, what: str) -> tqdm:
        return tqdm(items, desc=what, disable=self.comm.rank > 0)

    def reference(self) -> Reference:
        """The on-policy gradient. UserError: it is not above its noise."""
        per_fold = self.worth_flags.reference // FOLDS
        means = [[0.0] * len(self.weights.flat) for _ in range(FOLDS)]
        squares = np.zeros(FOLDS)
        sampled = self.sample(self.on_policy, per_fold * FOLDS)
        for b, groups in enumerate(self.bar(sampled, "on-policy gradient")):
            batch = batching.collate(groups, self.on_policy_cfg)
            self.count("on_policy", batch)
            gradient, mean = self.gradient(batch), means[b // per_fold]
            squares[b // per_fold] += self.scorer.dot(gradient, gradient) / per_fold
            mean[:] = [a + x / per_fold for a, x in zip(mean, gradient, strict=True)]
        dot = self.scorer.dot
        gram = np.array([[dot(a, b) for b in means] for a in means])
        across = np.array([[dot(v, m) for m in means] for v in self.random])
        reference = Reference(means, gram, squares, per_fold, across)
        need(
            reference.is_found(),
            f"--reference={self.worth_flags.reference}: the on-policy gradient is not distinguishable from its "
            "noise; use more batches, or a task that the policy sometimes solves",
        )
        return reference

    def gradient(self, batch) -> list[torch.Tensor]:
        """The gradient of one on-policy batch, without a correction."""
        stats = objectives.prepare(batch, self.comm, self.on_policy_cfg, {})
        self.scorer.backward(batch, stats)
        gradient = self.weights.gradient()
        self.scorer.models.zero_grad(set_to_none=True)
        return gradient

    def slopes(self, reference: Reference) -> Iterator[Slopes]:
        """Yield the sampler's batches with their slopes."""
        for b, batches in enumerate(self.bar(self.batches, "the sampler's batches")):
            batch = next(iter(batches.values()))
            kl = token_k3(batch.log_r)[batch.mask].double().sum()
            self.count("sampler", batch, kl)
            noisy = b < self.worth_flags.noise_batches
            directions = reference.means + (self.random if noisy else [])
            slopes = self.weights.slopes(batch, directions)
            yield Slopes(batches, slopes[:FOLDS], slopes[FOLDS:] or None)

    def add_to(self, samples: RowSamples, slopes: Slopes, c: torch.Tensor) -> None:
        """Add the measurements of coefficients c (B, T) on a batch to `samples`."""
        batch = next(iter(slopes.batches.values()))
        samples.along.append(self.comm.sum([(c * s).sum() for s in slopes.along]))
        if slopes.random is not None:
            # (B, directions)
            shares = torch.stack([(c * s).sum(1) for s in slopes.random], 1)
            by_group = shares.new_zeros(self.groups, shares.shape[1])
            by_group.index_add_(0, batch.group, shares)
            everyone = self.comm.cat(by_group.flatten().to(self.comm.device))
            samples.noise.append(everyone.view(-1, len(slopes.random)).cpu().numpy())

    def count(self, who: str, batch, kl=0.0) -> None:
        """Add reward, length and KL of responses to the totals. kl: summed over tokens."""
        sums = [
            batch.reward.sum(),
            batch.length.sum(),
            kl,
            batch.mask.sum(),
            len(batch),
        ]
        self.totals[who] += np.array(self.comm.sum(sums))

    def about(self) -> dict[str, float]:
        """Mean reward and length of both samplers, and the KL between them."""
        out = {}
        for who, (reward, tokens, kl, read, responses) in self.totals.items():
            out |= {
                f"{who}/reward": reward / responses,
                f"{who}/length": tokens / responses,
                "kl": kl / read,
            }
        return out


def on_policy_source(learner, run, cfg: Config) -> LocalSource:
    """The learner's policy as a sampler, on different problems than the sampler's."""
    source = LocalSource(
        sampler_of(learner, "policy", cfg),
        run.task,
        run.tokenizer,
        sampling.Sampling.of_policy(cfg),
        group_size=cfg.group_size,
        topk=0,
        max_allowed=sampling.max_allowed(cfg, run.vocabulary),
        stop_ids=run.stop_ids,
        model="policy",
        check=None,
        rank=learner.comm.rank,
        n_ranks=learner.comm.size,
        resample=cfg.dynamic_sampling,
    )
    source.incarnation, source.sequence = 1, (1 << 20) // learner.comm.size
    return source


def on_policy_config(cfg: Config) -> Config:
    """The flags of g: the policy samples, no correction, no trust region, no rejection."""
    changes = {"correction": "none", "surrogate": "reinforce", "ratio_base": "ref"}
    changes |= {"is_cap": None, "is_floor": 0.0, "rs_low": None, "rs_high": None}
    changes |= {
        "reject": "none",
        "reject_of": "all",
        "positive_only": False,
        "cppo_beta": 0.0,
    }
    changes |= {
        "loss_denominator": "proposed",
        "actor": "none",
        "rollout_quant": "none",
    }
    return replace(unregularised(cfg), **changes)


# -- The command


def weigh(
    worth_flags: WorthFlags, rows: dict[str, Config], on_policy_cfg: Config
) -> dict:
    """Sample and measure all rows: {"about": both samplers, "rows": {row: ...}}."""
    start = time.perf_counter()
    measurement = Measurement(worth_flags, rows, on_policy_cfg)
    reference = measurement.reference()
    samples = {name: RowSamples() for name in rows}
    for slopes in measurement.slopes(reference):
        for name, cfg in rows.items():
            c = coefficients(slopes.batches[name], measurement.comm, cfg)
            measurement.add_to(samples[name], slopes, c)
    groups = measurement.groups * measurement.comm.size
    measured = {name: with_errors(samples[name], reference, groups) for name in rows}
    about = measurement.about() | {"halves": reference.halves()}
    about["unlike_g"] = [
        name
        for name, cfg in rows.items()
        if (cfg.advantage, cfg.reduction, cfg.mask_cut)
        != (on_policy_cfg.advantage, on_policy_cfg.reduction, on_policy_cfg.mask_cut)
    ]
    about["seconds"] = time.perf_counter() - start
    results = {"about": about, "rows": measured}
    if measurement.sampler is not None:
        measurement.sampler.close()
    if measurement.comm.rank == 0:
        write_result(worth_flags.json, results)
        print(table(results))
    measurement.comm.end()
    return results


def table(results: dict) -> str:
    """The table of all numbers, best row first. The two cosines with g: expected value for a
    batch, and value of the mean gradient."""
    about = results["about"]
    lines = [
        f"sampler: {about['sampler/length']:.1f} tokens, reward {about['sampler/reward']:.3f}, "
        f"KL(inf || ref) {about['kl']:.4f} a token; on-policy: {about['on_policy/length']:.1f} tokens, reward "
        f"{about['on_policy/reward']:.3f}; {about['seconds']:.0f} s",
        "|g|^2 from each half of the on-policy batches: {:.2f} and {:.2f} of the |g|^2 from all".format(
            *about["halves"]
        ),
        f"{'':49s}  cosine with g",
        f"{'':32s}            worth   batch    mean   scale     bias    noise",
    ]
    ordered = sorted(results["rows"], key=lambda name: -results["rows"][name]["worth"])
    for name in ordered:
        x = results["rows"][name]
        numbers = " ".join(f"{x[k]:7.3f}" for k in ("batch_cosine", "cosine", "scale"))
        worth = f"{x['worth']:.3f} +- {x['worth_se']:.3f}"
        lines.append(
            f"{name:32s} {worth:>16s} {numbers} {x['bias']:8.3f} {x['noise']:8.3f}"
        )
    if about["unlike_g"]:
        lines.append(
            "--advantage, --reduction or --mask_cut differ from g's, which scale and bias include: "
            + "; ".join(about["unlike_g"])
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict:
    return weigh(*parse(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    run_command(main)
