"""What is a rollout worth? The gradient that a sampler's responses give, beside the on-policy one. No training.

    python worth.py --model=base:policy --actor=base:actor                  # another model samples
    python worth.py --model=FOLDER --actor=none --rollout_quant=w2a16       # low bits do
    python worth.py --model=FOLDER --actor=none --stale=OLDER_FOLDER        # older weights do
    python worth.py ... --rows="tis; tis is_cap=8; jackpot obrs_mask=expected"

with every flag of train.py that says how rollouts are made, and every objective of objectives.py as a row.

    g      the on-policy gradient of the policy (its mean)
    g_c    the gradient that one batch of B sampler responses gives under row c
    scale  = E<g_c, g> / |g|^2                  the length of the step along g: 1 where nothing is cut
    bias   = |E g_c - scale g|^2 / |g|^2        what of its mean points elsewhere
    noise  = (E|g_c|^2 - |E g_c|^2) / |g|^2     of one batch
    worth  = scale^2 noise_on / (bias + noise)

The expected cosine of g_c and g is kappa = scale / sqrt(scale^2 + bias + noise). An on-policy batch of (worth B)
responses has the same kappa, so worth counts on-policy responses a sampler response: times the ratio of the costs of
sampling (`--cost`) it says whether the sampler pays.

How: g_c is a sum over tokens, sum_t c_t grad log p_t, and c_t = d J_c / d log p_t comes from the row's own loss. Along
a direction v then <g_c, v> = sum_t c_t s_t with s_t = d/de log p_t(theta + e v): two forward passes with shifted
weights give s_t of all tokens, and every row is a weighted sum of them. Along g this gives scale; along random v
of unit covariance E<x, v>^2 = |x|^2, and that gives bias and noise. No gradient of the sampler is ever held.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import batching
import config
import flags
import objectives
import plot
import train
from eval import sampler_of
from flags import need, run_command
from learner import Comm, Learner
from model import Needs, TokenStats, needs_of_ref_pass
from objectives import REF
from rollout import LocalSource
from run import open_run
from sampling import Sampling

ROWS = (
    "none; is; tis is_cap=2; tis is_cap=3; tis is_cap=8; icepop; seq_is; seq_tis is_cap=1; seq_tis is_cap=2; "
    "seq_tis is_cap=4; seq_mis; geo_rs; z_tis; jackpot obrs_mode=mask; jackpot; jackpot obrs_mask=expected"
)
STEP = 0.02  # what a shift of the weights changes in log-probabilities, root mean square, in nats
FOLDS = 8  # of the jackknife over groups and over the on-policy batches


@dataclass(frozen=True)
class WorthFlags:
    """The measurement (worth.py)"""

    rows: str = ROWS
    """Objectives to weigh, separated by semicolons, each with flags of its own behind it."""
    batches: int = 24
    """Batches (--train_batch responses each) of the sampler."""
    reference: int = 48
    """On-policy batches, for g."""
    directions: int = 32
    """Random directions, for bias and noise."""
    noise_batches: int = 4
    """Of the sampler's batches, so many are also looked at along the random directions."""
    stale: str = ""
    """A model folder whose weights sample in the place of the policy's: an older checkpoint."""
    cost: bool = False
    """Time sampling by both, and say whether the sampler pays."""
    json: str = "out/worth.json"
    """Where the numbers go; the figure goes beside it."""


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> tuple[WorthFlags, dict[str, config.Config]]:
    """The flags of the measurement, and each row's configuration. UserError: one sentence."""
    both = dataclass(frozen=True)(type("Flags", (config.Config, WorthFlags), {}))
    pairs = flags.read(both, argv, "python worth.py --key=value ...", also={"config", *objectives.FOREIGN})
    names = {f.name for f in fields(WorthFlags)}
    own = WorthFlags(**{k: flags.convert(WorthFlags, k, v) for k, v in pairs if k in names})
    shared = [f"--{k}={v}" for k, v in pairs if k not in names]
    need(not any(k == "objective" for k, _ in pairs), "--objective: name the objectives to weigh with --rows")
    for name in ("batches", "reference", "directions", "noise_batches"):
        need(getattr(own, name) >= 1, f"--{name}={getattr(own, name)}: must be at least 1")
    need(own.reference % FOLDS == 0, f"--reference={own.reference}: a multiple of {FOLDS}, for its error")
    need(own.noise_batches <= own.batches, f"--noise_batches={own.noise_batches}: at most --batches={own.batches}")
    rows = {}
    for row in filter(None, map(str.strip, own.rows.split(";"))):
        objective, *more = row.split()
        rows[row] = config.parse([*shared, f"--objective={objective}", *(f"--{flag}" for flag in more)])
    need(rows, "--rows: names no objective")
    return own, rows


def ref_columns(learner, batch, rows: dict[str, config.Config]) -> batching.Batch:
    """The batch with what any row must know of policy and actor."""
    columns = {}
    for needs in {needs_of_ref_pass(cfg, learner.has_actor, cfg.obrs_lambda) for cfg in rows.values()}:
        need(not needs.topk, "--rows: a row with --obrs_target=new or --obrs_z=approx cannot be weighed")
        known = learner.score(batch, needs).known()
        columns |= {f"{name}_ref": x for name, x in known.items() if name in REF}
    return replace(batch, **columns)


def coefficients(batch, comm, cfg) -> torch.Tensor:
    """c_t = d J / d log p_t at p_new = p_ref, (B, T): the row's own loss, differentiated by its log-probabilities."""
    logp = batch.logp_ref.double().requires_grad_()
    new = TokenStats(logp, support_logp=batch.support_logp_ref, tail=batch.tail_ref, z=batch.z_ref)
    stats = objectives.prepare(batch, comm, cfg, {})
    unreduced, _ = objectives.loss(new, batch, stats, cfg)
    total = objectives.reduce(unreduced, batch.mask, stats, cfg)
    return -torch.autograd.grad(total, logp)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Directions
# ---------------------------------------------------------------------------------------------------------------------


class Weights:
    """The policy's parameters, which can be shifted along a direction and put back."""

    def __init__(self, learner):
        self.learner = learner
        self.parameters = list(learner.models.policy.parameters())
        self.at_rest = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def shift(self, direction, size: float) -> None:
        for p, rest, d in zip(self.parameters, self.at_rest, direction, strict=True):
            p.copy_(rest + size * d)

    def random(self, seed: int) -> list[torch.Tensor]:
        """A direction of independent signs: E <x, v>^2 = |x|^2."""
        out = []
        for i, p in enumerate(self.parameters):
            generator = torch.Generator(p.device).manual_seed(1_000_003 * seed + i)
            out.append(torch.randint(0, 2, p.shape, generator=generator, device=p.device, dtype=p.dtype) * 2 - 1)
        return out

    def slopes(self, batch, direction) -> torch.Tensor:
        """s_t = d/de log p_t(theta + e direction), (B, T): a central difference."""
        size = STEP / self.spread(batch, direction)
        up, down = (self.shifted(batch, direction, sign * size) for sign in (1, -1))
        self.shift(direction, 0.0)
        return (up - down).double() / (2 * size)

    def shifted(self, batch, direction, size: float) -> torch.Tensor:
        self.shift(direction, size)
        return self.learner.score(batch, Needs()).logp

    def spread(self, batch, direction) -> float:
        """About how far log-probabilities move for a step of 1, from a small one on a few responses."""
        few = batch.select(list(range(min(len(batch), 16))))
        small = 1e-3 / math.sqrt(sum(float(d.square().sum()) for d in direction))
        change = self.shifted(few, direction, small) - self.shifted(few, direction, -small)
        return max(float(change[few.mask].square().mean().sqrt()) / (2 * small), 1e-12)


def dot(a, b) -> float:
    """<a, b> over all parameters."""
    return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Reference:
    """The on-policy gradient, from FOLDS independent parts."""

    parts: list[list[torch.Tensor]]  # mean gradient of each part's batches
    gram: np.ndarray  # (FOLDS, FOLDS) <part, part>
    squares: np.ndarray  # (FOLDS,) mean |g_b|^2 of each part's batches
    batches: int  # in each part


def on_policy_gradient(learner, groups, cfg) -> list[torch.Tensor]:
    """The gradient of one batch of on-policy groups: no correction."""
    batch = batching.collate(groups, cfg)
    stats = objectives.prepare(batch, learner.comm, cfg, {})
    learner.backward(batch, stats)
    gradient = [-p.grad.detach().clone() for p in learner.models.policy.parameters()]
    learner.models.zero_grad(set_to_none=True)
    return gradient


def measure_reference(learner, source, own, cfg, n_groups: int) -> Reference:
    each = own.reference // FOLDS
    parts, squares = [], np.zeros(FOLDS)
    for part in tqdm(range(FOLDS), desc="on-policy gradient"):
        total = None
        for _ in range(each):
            gradient = on_policy_gradient(learner, source.next(n_groups, 0), cfg)
            squares[part] += dot(gradient, gradient) / each
            total = gradient if total is None else [a + b for a, b in zip(total, gradient, strict=True)]
        parts.append([x / each for x in total])
    gram = np.array([[dot(a, b) for b in parts] for a in parts])
    return Reference(parts, gram, squares, each)


@dataclass
class Seen:
    """What was measured of the sampler's batches under one row."""

    along: np.ndarray  # (batches, FOLDS)      <g_c, part of g>
    noise: np.ndarray  # (groups, directions)  <share of a group in g_c, random direction>


def measure_sampler(learner, scorer, source, own, rows, reference: Reference, n_groups: int) -> tuple:
    """({row: Seen}, (directions, FOLDS) <random direction, part of g>)."""
    weights = Weights(scorer)
    random = [weights.random(k) for k in range(own.directions)]
    seen = {name: Seen([], []) for name in rows}
    for b in tqdm(range(own.batches), desc="the sampler's batches"):
        groups = source.next(n_groups, 0)
        batch = ref_columns(learner, batching.collate(groups, next(iter(rows.values()))), rows)
        c = {name: coefficients(batch, learner.comm, cfg) for name, cfg in rows.items()}
        slopes = [weights.slopes(batch, part) for part in reference.parts]
        for name in rows:
            seen[name].along.append([float((c[name] * s).sum()) for s in slopes])
        if b < own.noise_batches:
            slopes = [weights.slopes(batch, v) for v in tqdm(random, desc="random directions", leave=False)]
            for name in rows:
                shares = torch.stack([(c[name] * s).sum(1) for s in slopes], 1)  # (B, K)
                by_group = shares.new_zeros(n_groups, len(slopes)).index_add_(0, batch.group, shares)
                seen[name].noise.append(by_group.numpy())
    arrays = {name: Seen(np.array(x.along), np.concatenate(x.noise)) for name, x in seen.items()}
    return arrays, np.array([[dot(v, part) for part in reference.parts] for v in random])


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic
# ---------------------------------------------------------------------------------------------------------------------


def estimate(seen: Seen, reference: Reference, overlap: np.ndarray, n_groups: int, parts=None) -> dict[str, float]:
    """scale, bias, noise, noise_on, cosine of the mean, kappa and worth, as defined above. parts: of g, if not all."""
    parts = np.arange(len(reference.gram)) if parts is None else parts
    gram, J = reference.gram[np.ix_(parts, parts)], len(parts)
    square = (gram.sum() - np.trace(gram)) / (J * (J - 1))  # |g|^2 without its noise
    n = J * reference.batches
    noise_on = (reference.squares[parts].mean() - gram.mean()) * n / (n - 1)
    scale = seen.along[:, parts].mean() / square
    shares = seen.noise  # (groups, K)
    noise = n_groups * shares.var(0, ddof=1)
    elsewhere = n_groups * shares.mean(0) - scale * overlap[:, parts].mean(1)
    bias = (elsewhere**2 - noise * n_groups / len(shares)).mean()
    noise = noise.mean()
    out = {"scale": scale, "bias": max(bias, 0.0) / square, "noise": noise / square, "noise_on": noise_on / square}
    out["cosine"] = scale / math.sqrt(scale**2 + out["bias"]) if scale else 0.0
    out["kappa"] = scale / math.sqrt(scale**2 + out["bias"] + out["noise"]) if scale else 0.0
    out["worth"] = max(scale, 0.0) ** 2 * out["noise_on"] / (out["bias"] + out["noise"])
    return out


def with_errors(seen: Seen, reference: Reference, overlap: np.ndarray, n_groups: int) -> dict[str, float]:
    """`estimate`, and NAME_se by the jackknife: over the sampler's batches, its groups, and the parts of g."""
    out = estimate(seen, reference, overlap, n_groups)
    n, folds, J = len(seen.along), np.arange(len(seen.noise)) % FOLDS, np.arange(FOLDS)
    left_out = [
        [estimate(replace(seen, along=np.delete(seen.along, b, 0)), reference, overlap, n_groups) for b in range(n)],
        [estimate(replace(seen, noise=seen.noise[folds != f]), reference, overlap, n_groups) for f in range(FOLDS)],
        [estimate(seen, reference, overlap, n_groups, J[j != J]) for j in J],
    ]
    for name in list(out):
        variance = 0.0
        for replicates in left_out:
            x = np.array([r[name] for r in replicates])
            variance += (len(x) - 1) / len(x) * ((x - x.mean()) ** 2).sum()
        out[f"{name}_se"] = math.sqrt(variance)
    return out


def table(results: dict[str, dict]) -> str:
    lines = [f"{'':32s} {'worth':>15s} {'kappa':>7s} {'cosine':>7s} {'scale':>7s} {'bias':>7s} {'noise':>7s}"]
    for name, x in sorted(results.items(), key=lambda item: -item[1]["worth"]):
        worth = f"{x['worth']:.3f} +- {x['worth_se']:.3f}"
        numbers = " ".join(f"{x[k]:7.3f}" for k in ("kappa", "cosine", "scale", "bias", "noise"))
        lines.append(f"{name:32s} {worth:>15s} {numbers}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def measure(own: WorthFlags, rows: dict[str, config.Config]) -> dict:
    """Sample, weigh, print."""
    lead = next((cfg for cfg in rows.values() if cfg.correction == "obrs"), next(iter(rows.values())))
    comm = Comm.start(lead.give_up)
    run = open_run(lead, comm)
    sampler = train.open_source(lead, replace(run, policy=own.stale or run.policy), comm)
    learner = Learner(*run.load_models(), lead, comm)
    plain = replace(lead, correction="none", surrogate="reinforce", ratio_base="ref", actor="none", reject="none")
    source = on_policy_source(learner, run, plain)
    n_groups = lead.train_batch // (lead.group_size * comm.size)
    start = time.perf_counter()
    scorer = learner if learner.sharded else Learner(learner.models.policy, None, plain, comm)  # without the actor
    reference = measure_reference(scorer, source, own, plain, n_groups)
    seen, overlap = measure_sampler(learner, scorer, sampler, own, rows, reference, n_groups)
    results = {name: with_errors(x, reference, overlap, n_groups) for name, x in seen.items()}
    sampler.close()
    print(table(results))
    print(f"{time.perf_counter() - start:.0f} s")
    return results


def on_policy_source(learner, run, cfg) -> LocalSource:
    """The learner's own policy as a sampler, on problems of its own."""
    source = LocalSource(
        sampler_of(learner, "policy", cfg),
        run.task,
        run.tokenizer,
        Sampling.of(cfg),
        group_size=cfg.group_size,
        topk=0,
        model="policy",
        probe=None,
        rank=learner.comm.rank,
        n_ranks=learner.comm.size,
    )
    source.incarnation, source.sequence = 1, 1 << 20
    return source


def main(argv: list[str] | None = None) -> dict:
    own, rows = parse(sys.argv[1:] if argv is None else argv)
    results = measure(own, rows)
    path = Path(own.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"figure: {plot.draw_worth(results, path.with_suffix('.png'))}")
    return results


if __name__ == "__main__":
    run_command(main)
