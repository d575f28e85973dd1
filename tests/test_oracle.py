"""The objectives against oracle.py: a ragged fixture with different values everywhere, every combination of axes.

The repository's path is collate, the ref pass, prepare, joint_loss and reduce over micro-batches and ranks. The
oracle gets the same distributions and numbers, without tensors. Gradients are compared token by token, to 1e-10.
"""

import functools
import inspect
import itertools
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import torch
from conftest import f64, make_cfg
from transformers import PretrainedConfig

import batching
import objectives
from corrections import CORRECTIONS, REJECTIONS, USES_Z, rejects_by_support
from learner import Learner
from machinery.flags import UserError
from machinery.ranks import Comm
from model import PolicyAndActor, TokenStats, needs_of_update
from rollout import Response, Rollout, uniforms
from sampling import Sampling

V, K, SEED = 7, 2, 5
DISTRIBUTIONS = ("inf", "ref", "new", "actor_ref", "actor")

# -- The fixture: groups of 2, 3, 4 and 2 responses -------------------------------------------------------------------

# (group, reward, temperature, mask of tokens with a gradient)
ROWS = [
    (0, 1.0, 0.8, "111"),
    (0, 0.25, 0.8, "1"),
    (1, 0.5, 1.3, "10111"),
    (1, 0.0, 1.3, ""),
    (1, 0.75, 1.3, "0000"),
    (2, 0.125, 1.0, "11"),
    (2, 0.875, 1.0, "111110"),
    (2, 0.375, 1.0, "011"),
    (2, 1.5, 1.0, "1111101"),
    (3, 0.625, 0.6, "11"),  # a group of equal rewards: advantage 0
    (3, 0.625, 0.6, "1011"),
]
PROMPTS = [[3], [1, 4], [5, 2, 6], [2, 2, 0, 1]]
FAR = {(2, 0): 26.0, (8, 3): -26.0}  # log p_ref - log p_inf of two tokens in the wild fixture, beyond the clamp


def make_fixture(wild: bool, seed: int = 393) -> list[oracle.Response]:
    rng, of_start = random.Random(seed), random.Random(seed + 1)
    out = []
    for i, (group, reward, temperature, mask) in enumerate(ROWS):
        draws = uniforms(len(mask), "mask", SEED, ("test", 3, group), i - [row[0] for row in ROWS].index(group))
        shift = rng.gauss(0, 0.3)  # different for each response, to spread sums and means too
        tokens = []
        for t, on in enumerate(mask):
            distribution = normal([rng.gauss(0, 1.2) for _ in range(V)])
            others = [moved(rng, distribution, shift) for _ in DISTRIBUTIONS[1:]]
            token = oracle.Token(
                0, on == "1", float(draws[t]), distribution, *others, start=moved(of_start, distribution, 0.3)
            )
            token.id = rng.choices(range(V), distribution)[0]
            if wild and (i, t) in FAR:
                token.inf, token.ref = far_apart(token, FAR[i, t])
            tokens.append(token)
        out.append(oracle.Response(group, reward, tokens, temperature))
    return out


def moved(rng, distribution, shift) -> list[float]:
    """A distribution near this one."""
    return normal([np.log(p) + rng.gauss(shift * (x % 3), 0.6) for x, p in enumerate(distribution)])


def normal(logits) -> list[float]:
    weights = [float(np.exp(x)) for x in logits]
    return [w / sum(weights) for w in weights]


def far_apart(token, log_r: float) -> tuple[list[float], list[float]]:
    """(p_inf, p_ref) with this log-ratio at the sampled token: under one of the two the token is very rare."""
    near, rare = list(token.ref), list(token.inf)
    rare[token.id] = near[token.id] * float(np.exp(-abs(log_r)))
    others = sum(rare) - rare[token.id]
    rare = [p if x == token.id else p * (1 - rare[token.id]) / others for x, p in enumerate(rare)]
    return (rare, near) if log_r > 0 else (near, rare)


FIXTURE = {wild: make_fixture(wild) for wild in (False, True)}


def as_groups(responses) -> list[Rollout]:
    """The fixture as groups of a sampler, in float64."""
    groups = []
    for group, prompt in enumerate(PROMPTS):
        rows = [r for r in responses if r.group == group]
        sampling = Sampling(temperature=rows[0].temperature)
        times = dict(version=7 - 2 * group, t_start=0.0, t_end=0.0, t_published=10.0 * group)
        meta = dict(prompt_id=str(group), model="policy", precision="float64", digest="", **times)
        responses_of = [as_response(r) for r in rows]
        prompt_ids = np.array(prompt, np.int32)
        uid = ("test", 3, group)
        groups.append(Rollout(uid=uid, prompt_ids=prompt_ids, sampling=sampling, responses=responses_of, **meta))
    return groups


def as_response(r) -> Response:
    top = [oracle.largest(token.inf, K) for token in r.tokens]
    return Response(
        tokens=np.array([token.id for token in r.tokens], np.int32),
        loss_mask=np.array([token.on for token in r.tokens], bool),
        logp_inf=np.log([token.inf[token.id] for token in r.tokens]),
        topk_ids=np.array(top, np.int32).reshape(-1, K),
        topk_logp=np.log([[t.inf[x] for x in ids] for t, ids in zip(r.tokens, top, strict=True)]).reshape(-1, K),
        finish_reason="stop",
        reward=r.reward,
    )


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    """float64 in collate's padding and in advantages: the comparison to 1e-10 is of formulas."""
    pad = batching.pad

    def pad64(rows, T=0, fill=0.0, dtype=None):
        return pad(rows, T, fill, dtype or (np.bool_ if isinstance(fill, bool) else np.float64))

    monkeypatch.setattr(batching, "pad", pad64)
    torch.set_default_dtype(f64)
    yield
    torch.set_default_dtype(torch.float32)


# -- The repository's path --------------------------------------------------------------------------------------------


class Table(torch.nn.ParameterList):
    """A model with identity output embeddings: its hidden states are its logits."""

    config = PretrainedConfig()

    def get_output_embeddings(self):
        return SimpleNamespace(weight=torch.eye(V))


class Tables(PolicyAndActor):
    """A policy and an actor with logits from tables, by row of the fixture and position in the response."""

    def __init__(self, *logits, start):
        super().__init__(*(Table([x]) for x in logits), start=Table([start]))

    can_share = False

    def _hidden(self, lm, batch, at, share):
        T = batch.tokens.shape[1]
        table = lm[0][[row_of(batch, b) for b in range(len(batch))]][:, :T]
        return table.flatten(0, 1)[at]


def row_of(batch, b: int) -> int:
    """The fixture's row of row b of the batch."""
    n = int(batch.prompt_len[b])
    return ROW_OF[tuple(batch.ids[b, :n].tolist()), tuple(batch.tokens[b, : batch.length[b]].tolist())]


ROW_OF = {(tuple(PROMPTS[r.group]), tuple(t.id for t in r.tokens)): i for i, r in enumerate(FIXTURE[False])}


def tables(responses, distributions) -> Tables:
    """distributions: the fixture's distributions of policy and actor; logits are temperature times log p."""
    T = max(len(r.tokens) for r in responses)
    built = []
    for distribution in (*distributions, "start"):
        logits = torch.zeros(len(responses), T, V)
        for b, r in enumerate(responses):
            for t, token in enumerate(r.tokens):
                logits[b, t] = r.temperature * torch.tensor(getattr(token, distribution)).log()
        built.append(torch.nn.Parameter(logits))
    return Tables(*built[:-1], start=built[-1])


class Lockstep:
    """The comm of one of n ranks that are threads: sums and concatenations over all ranks."""

    def __init__(self, rank: int, box: list, barrier):
        self.rank, self.box, self.barrier = rank, box, barrier

    def exchange(self, x) -> list:
        self.box[self.rank] = x
        self.barrier.wait()
        everyone = list(self.box)
        self.barrier.wait()
        return everyone

    def sum(self, values) -> list[float]:
        return [sum(float(x) for x in column) for column in zip(*self.exchange(values), strict=True)]

    def cat(self, x):
        return torch.cat(self.exchange(x))


def on_all(ranks: list, do) -> list:
    """[do(comm, part) for each part], all at once."""
    box, barrier = [None] * len(ranks), threading.Barrier(len(ranks), timeout=20)
    comms = [Lockstep(r, box, barrier) for r in range(len(ranks))]
    if len(ranks) == 1:
        return [do(comms[0], ranks[0])]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(do, comms, ranks))


RANKS = {"one": [[0, 1, 2, 3]], "two": [[1, 3], [0, 2]], "idle": [[0, 1, 2, 3], []]}


@functools.cache
def learner_of(wild: bool, distributions: tuple) -> Learner:
    """A learner with tables as models, without optimizers."""
    learner = object.__new__(Learner)
    learner.comm, learner.device, learner.names = Comm(), "cpu", ["policy", "actor"][: len(distributions)]
    learner.version = 1
    learner.scaler = torch.amp.GradScaler("cpu", enabled=False)
    learner.comm.on = False  # vLLM may have started a process group of one rank in this process
    learner.models = learner.wrapped = tables(FIXTURE[wild], distributions)
    return learner


def scored_by(wild: bool, distributions: tuple, cfg) -> Learner:
    """The cached learner with these flags, in several micro-batches."""
    learner = learner_of(wild, distributions[: 1 + (cfg.actor != "none")])
    learner.cfg = replace(cfg, micro_tokens=25)
    return learner


MADE = {}  # cache of values that depend on few axes: batches with ref columns, advantages, forward passes


def once(key, make):
    if key not in MADE:
        MADE[key] = make()
    return MADE[key]


def batches_of(cfg, case, ref: bool) -> list:
    """(cache key of its columns, batch) of each rank."""
    out = []
    for rank, part in enumerate(RANKS[case["ranks"]]):
        where = (case["wild"], case["ranks"], rank)
        columns = (cfg.actor, cfg.kl_coef > 0, rejects_by_support(cfg)) if ref else ()
        if ref and cfg.correction in USES_Z:
            columns += (cfg.obrs_lambda, cfg.obrs_z, cfg.obrs_target, cfg.obrs_accept_rate is None)
        batch = once((where, columns), lambda part=part: batch_of(cfg, case["wild"], part, ref))
        of_adv = (cfg.advantage, cfg.actor, cfg.log_ratio_clamp)
        adv = once((where, of_adv), lambda part=part: batch_of(cfg, case["wild"], part, False).adv)
        out.append(((where, columns), replace(batch, adv=adv)))
    return out


def groups_of(wild: bool, part: list[int]) -> list[Rollout]:
    """A rank's groups; an idle rank has one group with all tokens masked."""
    groups = as_groups(FIXTURE[wild])
    if part:
        return [groups[i] for i in part]
    for r in groups[0].responses:
        r.loss_mask = np.zeros_like(r.loss_mask)
    return groups[:1]


def batch_of(cfg, wild: bool, part: list[int], ref: bool):
    groups = groups_of(wild, part)
    if ref:
        learner = scored_by(wild, ("ref", "actor_ref"), cfg)
        batching.write_ref_columns(groups, learner.ref_columns(batching.collate(groups, cfg)))
    return batching.collate(groups, cfg, version=9)


def forward(cfg, case, key, batch, needs) -> dict:
    """The current policy's and actor's statistics of a whole batch."""
    if not needs.tail and not needs.exact_z:
        needs = replace(needs, lam=1.0)  # lam is unused
    if not needs.support:
        key = key[0]
    learner = scored_by(case["wild"], ("new", "actor"), cfg)
    return once((key, cfg.actor, needs), lambda: learner.score(batch, needs).known())


GRADIENTS = ("logp", "actor_logp", "distill_loss", "entropy")


def repository(cfg, case):
    """(loss, {name: gradient in this statistic, a list for each response}, whether there was a ref pass)."""
    controllers = {"kappa": case["carried_kappa"]}
    if case["carried_distill"] is not None:
        controllers["distill"] = case["carried_distill"]
    ref_pass = objectives.needs_ref_pass(cfg, controllers, case["updates"])
    ranks = batches_of(cfg, case, ref_pass)

    def prepare(comm, part):
        _, batch = part
        return objectives.prepare(batch, comm, cfg, controllers)

    total, grads = 0.0, {name: {} for name in GRADIENTS}
    for (key, batch), stats in zip(ranks, on_all(ranks, prepare), strict=True):
        leaves, loss = one_rank(cfg, case, key, batch, stats)
        total += loss
        for name, x in leaves.items():
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            assert not grad[~batch.mask].any(), name
            for b in range(len(batch)):
                if case["ranks"] != "idle" or batch.mask.any():
                    grads[name][row_of(batch, b)] = grad[b][batch.mask[b]].tolist()
    return total, grads, ref_pass


def one_rank(cfg, case, key, batch, stats):
    """({statistic: leaf with its gradient}, loss) of one rank's micro-batches."""
    needs = needs_of_update(cfg, cfg.actor != "none", batch.logp_ref is not None)
    results = forward(cfg, case, key, batch, needs)
    leaves = {name: results[name].clone().requires_grad_() for name in GRADIENTS if name in results}
    total = 0.0
    for rows in batching.micro_batches(batch, case["micro_tokens"], False)[0]:
        micro = batch.select(rows)
        assert len(rows) == 1 or micro.ids.numel() <= case["micro_tokens"]
        T = micro.tokens.shape[1]
        new = TokenStats(**{name: x[rows][:, :T] for name, x in (results | leaves).items()})
        value, _ = objectives.joint_loss(new, micro, stats.select(rows), cfg)
        loss = objectives.reduce(value, micro.mask, stats, cfg)
        if loss.requires_grad:
            loss.backward()
        total += float(loss.detach())
    return leaves, total


# -- The axes ---------------------------------------------------------------------------------------------------------

AXES = {
    # every combination of these three
    "correction": list(CORRECTIONS),
    "surrogate": list(objectives.SURROGATES),
    "reduction": ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
    # every pair of values of any two axes
    "loss_denominator": ["proposed", "kept"],
    "positive_only": [False, True],
    "actor": ["none", "base:actor"],
    "ratio_base": ["ref", "inf", "new", "group"],
    "advantage": ["grpo", "grpo_no_std", "rloo", "maxrl"],  # otb: the test below
    "clip": [True, False],
    "edges": ["usual", "wide"],
    "dual_clip": [0.0, 1.3],
    "log_ratio_clamp": [20.0, 0.9],
    "is_cap": ["usual", "tight"],
    "is_floor": [0.0, 0.7],
    "correction_target": ["ref", "new"],
    "reject": ["none", *REJECTIONS],
    "reject_of": ["all", "negative"],
    "gepo_defence": [0.0, 30.0],
    "cppo_beta": [0.0, 0.3],
    "cppo_kl": ["official", "k2"],
    "kl_coef": [0.0, 0.2],
    "entropy_coef": [0.0, 0.4],
    "obrs_mask": ["bernoulli", "expected"],
    "obrs_mode": ["both", "mask", "reweight"],
    "obrs_target": ["ref", "new"],
    "obrs_z": ["bracket", "exact"],
    "obrs_lambda": [1.0, 0.7, 1.4],
    "obrs_accept_rate": [None, 0.8, 1.0],
    "obrs_c1": [2.0, 0.9],
    "obrs_c2": [None, 1.1],
    "distill_lambda": [0.0, 0.6],
    # not flags: the state of the run, and the split of the batch
    "carried_kappa": [None, 0.8, 1.4],
    "carried_distill": [None, 2.5],
    "updates": [1, 2],
    "ranks": list(RANKS),
    "micro_tokens": [10**6, 40, 25],
    "wild": [False, True],
}
CROSSED = list(AXES)[:3]
NO_FLAG = ("edges", "carried_kappa", "carried_distill", "updates", "ranks", "wild")
HAS_CAP = [name for name, row in CORRECTIONS.items() if "is_cap" in row.bounds]
HAS_FLOOR = [name for name, row in CORRECTIONS.items() if "is_floor" in inspect.signature(row.function).parameters]
REJECTS = [name for name, row in CORRECTIONS.items() if "rs_low" in row.bounds]
REJECT_BOUNDS = {"token": (0.6, 1.6), "sequence": (0.4, 2.0), "geo": (0.85, 1.15), "token_k3": (0.001, 0.12)}
REJECT_BOUNDS |= {"seq_mean_k3": (0.01, 0.1), "token_k2": (0.001, 0.12), "seq_mean_k2": (0.01, 0.1)}
REJECT_BOUNDS |= {"token_m2": (0.0, 0.03), "seq_max": (1.1, 2.0), "seq_min": (0.45, 1.2)}
REJECT_BOUNDS |= dict.fromkeys(("seq_max_k2", "seq_max_k3", "seq_max_kl"), (0.02, 0.3))
REJECT_BOUNDS |= {"seq_sum_k2": (0.05, 0.4), "seq_sum_k3": (0.05, 0.4)}


def flags_of(case) -> dict:
    """The flags of a case. Each bound has tokens or responses of the fixture on both sides."""
    flags = {name: value for name, value in case.items() if name not in NO_FLAG}
    if flags["is_cap"] == "usual" or case["correction"] not in HAS_CAP:
        del flags["is_cap"]
    else:
        flags["is_cap"] = 1.2
    if case["reject"] != "none":
        flags["rs_low"], flags["rs_high"] = REJECT_BOUNDS[case["reject"]]
    elif case["correction"] in REJECTS:
        bounds = {"icepop": REJECT_BOUNDS["token"], "kpop": (0.0, 0.02)}
        flags["rs_low"], flags["rs_high"] = bounds.get(case["correction"], REJECT_BOUNDS["geo"])
    if case["edges"] == "wide":
        flags |= {"clip_low": 0.15, "clip_high": 0.22, "tbpo_neg_high": 0.3}
    return {**flags, "obrs_topk": K, "seed": SEED, "max_tokens": 9, "objective": "none", "micro_tokens": 10**6}


# one rule a line: combinations that the flags' checks must refuse
CONTRADICTIONS = [
    lambda c: c["correction"] == "z_tis" and c["obrs_target"] == "new",
    lambda c: c["ratio_base"] in ("inf", "group") and c["correction"] != "none",
    lambda c: c["correction_target"] == "new" and c["correction"] in USES_Z,
    lambda c: (
        c["correction_target"] == "new"
        and not CORRECTIONS[c["correction"]].plain
        and c["surrogate"] != "reinforce"
        and c["ratio_base"] != "new"
    ),
    lambda c: c["correction_target"] == "new" and c["loss_denominator"] == "kept" and drops(c),
    lambda c: c["ratio_base"] == "group" and c["surrogate"] not in ("gspo", "tbpo"),
    lambda c: c["gepo_defence"] and c["ratio_base"] != "group",
    lambda c: c["surrogate"] == "reinforce" and c["ratio_base"] != "ref",
    lambda c: c["dual_clip"] and (not c["clip"] or c["surrogate"] not in ("ppo", "gspo")),
    lambda c: c["reject"] != "none" and c["correction"] in REJECTS,
    lambda c: c["reject_of"] == "negative" and c["reject"] == "none",
    lambda c: c["reject"] == "token_m2" and (c["correction_target"] == "new" or c["reject_of"] == "negative"),
    lambda c: c["is_floor"] and c["correction"] not in HAS_FLOOR,
    lambda c: c["obrs_z"] == "exact" and (c["actor"] == "none" or c["obrs_target"] == "new" or c["obrs_accept_rate"]),
    lambda c: late(c) and c["loss_denominator"] == "kept",
    lambda c: late(c) and c["obrs_accept_rate"],
    lambda c: c["obrs_accept_rate"] and c["obrs_lambda"] != 1,
]


def drops(c) -> bool:
    """Whether a token may be dropped."""
    return CORRECTIONS[c["correction"]].drops or c["reject"] != "none"


def late(c) -> bool:
    """Whether OBRS targets the policy during the update: nothing about it is known before."""
    return c["correction"] in USES_Z and c["obrs_target"] == "new"


class Noted(dict):
    """A case that notes which axes a rule reads."""

    def __getitem__(self, name):
        self.read.append(name)
        return super().__getitem__(name)


def broken_by(case) -> list[str] | None:
    """The axes that the first broken rule reads; None if all rules hold."""
    for rule in CONTRADICTIONS:
        noted = Noted(case)
        noted.read = []
        if rule(noted):
            return noted.read
    return None


def draw(rng, fixed: dict) -> dict:
    return {name: fixed[name] if name in fixed else rng.choice(values) for name, values in AXES.items()}


def settled(rng, case: dict, fixed: dict) -> tuple[dict, bool]:
    """(case, whether all rules hold) after redrawing axes that break a rule; False: `fixed` contradicts the rules."""
    for _ in range(2000):
        read = broken_by(case)
        free = [name for name in read or () if name not in fixed]
        if not free:
            return case, read is None
        name = rng.choice(free)
        case = case | {name: rng.choice(AXES[name])}
    return case, False


# -- Comparison -------------------------------------------------------------------------------------------------------


def compare(case) -> None:
    """AssertionError with the case, unless loss and gradients equal the oracle's."""
    cfg = make_cfg(**flags_of(case))
    loss, grads, ref_pass = repository(replace(cfg, micro_tokens=case["micro_tokens"]), case)
    responses = FIXTURE[case["wild"]]
    if not ref_pass:  # the update's forward serves as the ref pass
        of_new = [[replace(token, ref=token.new, actor_ref=token.actor) for token in r.tokens] for r in responses]
        responses = [replace(r, tokens=tokens) for r, tokens in zip(responses, of_new, strict=True)]
    distill = cfg.distill_lambda if case["carried_distill"] is None else case["carried_distill"]
    want = oracle.step(responses, cfg, case["carried_kappa"], distill)
    assert close(loss, want.loss, scale=want.size), (case, loss, want.loss)
    want_grads = {"logp": want.policy, "entropy": want.entropy}
    if cfg.actor != "none":
        want_grads |= {"actor_logp": want.actor, "distill_loss": want.distill}
    for name, by_response in want_grads.items():
        for i, row in enumerate(by_response):
            for a, b in zip(grads[name][i], row, strict=True):
                assert close(a, b), (case, name, i, grads[name][i], row)


def close(a: float, b: float, scale: float = 0.0) -> bool:
    return abs(a - b) <= 1e-10 * max(1.0, abs(b), scale)


class Tally:
    """Run cases; note their pairs of values; check that contradicting flags are refused with UserError."""

    def __init__(self, seed: int):
        self.rng, self.seen, self.refused, self.ran = random.Random(seed), set(), 0, 0

    def run(self, fixed: dict) -> None:
        """A case with these values, or a refusal if they contradict each other."""
        case = draw(self.rng, fixed)
        if broken_by(case) and self.refused < 300:
            self.refused += 1
            with pytest.raises(UserError):
                make_cfg(**flags_of(case))
        case, possible = settled(self.rng, case, fixed)
        if not possible:
            with pytest.raises(UserError):
                make_cfg(**flags_of(case))
            return
        compare(case)
        self.ran += 1
        self.seen.update(itertools.combinations(case.items(), 2))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 4))])
def test_every_combination_agrees_with_the_oracle(seed):
    """All of correction x surrogate (in slow seeds x reduction), with the remaining axes at random; then every pair of
    values of any two axes without such a case. The flags' checks refuse exactly the contradictions."""
    tally, names = Tally(seed), CROSSED[: 3 if seed else 2]
    crossed = list(itertools.product(*(AXES[name] for name in names)))
    tally.rng.shuffle(crossed)  # to find a fault early
    for values in crossed:
        tally.run(dict(zip(names, values, strict=True)))
    assert tally.ran == len(crossed)
    for one, other in itertools.combinations(AXES, 2):
        for pair in itertools.product(AXES[one], AXES[other]):
            both = dict(zip((one, other), pair, strict=True))
            if tuple(both.items()) not in tally.seen:
                tally.run(both)
    assert tally.refused == 300


LEARNT = [
    {"objective": "tis"},
    {"objective": "tis", "kl_coef": 0.2, "entropy_coef": 0.4},
    {"objective": "jackpot", "obrs_mask": "expected", "loss_denominator": "kept"},
    {"objective": "jackpot", "obrs_target": "new", "obrs_lambda": 1.4},
    {"objective": "gepo", "actor": "none", "gepo_defence": 30.0, "cppo_beta": 0.3},
    {"objective": "mis_gspo", "clip_low": 0.15, "clip_high": 0.22, "distill_lambda": 0.6},
    {"objective": "tbpo", "clip_low": 0.15, "clip_high": 0.22, "tbpo_neg_high": 0.3},
]


@pytest.mark.parametrize("case", LEARNT, ids=lambda case: "-".join(map(str, case.values())))
def test_gradients_in_logits_of_the_learners_update(case):
    """Learner.backward in several micro-batches: temperature and distillation too, for every logit."""
    cfg = make_cfg(**{"actor": "base:actor", **case}, obrs_topk=K, seed=SEED, max_tokens=9, micro_tokens=30)
    two = cfg.actor != "none"
    groups, responses = groups_of(False, [0, 1, 2, 3]), FIXTURE[False]
    learner = scored_by(False, ("ref", "actor_ref"), cfg)
    batching.write_ref_columns(groups, learner.ref_columns(batching.collate(groups, cfg)))
    learner = scored_by(False, ("new", "actor"), cfg)
    batch = batching.collate(groups, cfg)
    learner.models.zero_grad()
    logged = learner.backward(batch, objectives.prepare(batch, learner.comm, cfg, {"kappa": 1.07, "distill": 2.5}))
    want = oracle.step(responses, cfg, 1.07, 2.5)
    assert close(logged["loss"], want.loss)
    tables = [x[0].grad for x in (learner.models.policy, learner.models.actor) if x is not None]
    for i, r in enumerate(responses):
        places = [t for t, token in enumerate(r.tokens) if token.on]
        for n, t in enumerate(places):
            by_hand = [oracle.policy_logits(r.tokens[t], want.policy[i][n], want.entropy[i][n], r.temperature)]
            if two:
                actor, distilled = want.actor[i][n], want.distill[i][n]
                by_hand.append(oracle.actor_logits(r.tokens[t], actor, distilled, r.temperature))
            for table, row in zip(tables, by_hand, strict=True):
                assert all(close(a, b) for a, b in zip(table[i, t].tolist(), row, strict=True)), (i, t)
                table[i, t] = 0.0
    assert all(not table.any() for table in tables)  # no gradient elsewhere


OTB = [{}, {"ratio_base": "inf"}, {"reject": "token:0.6:inf"}, {"correction": "seq_mis", "rs_low": 0.7, "rs_high": 9}]
OTB += [{"correction": name, "is_cap": 1.2} for name in ("tis", "seq_tis")]
OTB += [{"correction": "obrs", "obrs_mask": "expected", "obrs_topk": K}]


@pytest.mark.parametrize("flags", OTB, ids=str)
def test_the_optimal_token_baseline(flags):
    """The advantage of each kept token, from the fixture's distributions, in loops; with the applied weights."""
    cfg = make_cfg(**{"advantage": "otb", "actor": "none", "correction": "none", **flags})
    assert objectives.needs_ref_pass(cfg, {}, 1)
    batch = batch_of(cfg, False, [0, 1, 2, 3], True)
    stats = objectives.prepare(batch, Comm(), cfg, {})
    responses = FIXTURE[False]

    def weight(r, token) -> float:
        """The weight of a token; 0: dropped."""
        ratio, R = (math.exp(sum(oracle.log_ratio(x, "ref", "inf") for x in on)) for on in ([token], r.on))
        weights = {"tis": min(ratio, 1.2), "seq_tis": min(R, 1.2), "seq_mis": R * (0.7 <= R <= 9)}
        w = ratio if cfg.ratio_base == "inf" else weights.get(cfg.correction, 1.0)
        if cfg.correction == "obrs" and token.on:
            w = math.prod(oracle.obrs(token, cfg, stats.lam, stats.kappa))
        return w * token.on * (cfg.reject == "none" or ratio >= 0.6)

    def energy(r, t) -> float:
        """Squared norm of the weighted gradient of the log-probabilities up to t in the logits."""
        norms = [sum(((v == token.id) - p) ** 2 for v, p in enumerate(token.ref)) for token in r.tokens[: t + 1]]
        return sum(weight(r, token) ** 2 * norm for token, norm in zip(r.tokens[: t + 1], norms, strict=True))

    some_differ, some_dropped = False, False
    for b in range(len(batch)):
        r = responses[row_of(batch, b)]
        group = [x for x in responses if x.group == r.group]
        for t in range(batch.tokens.shape[1]):
            here = [x for x in group if t < len(x.tokens) and weight(x, x.tokens[t])]
            some_dropped |= any(not weight(x, token) for x in group for token in x.on)
            want = 0.0
            if r in here and len({x.reward for x in group}) > 1:
                W = [energy(x, t) for x in here]
                want = r.reward - sum(w * x.reward for w, x in zip(W, here, strict=True)) / sum(W)
                some_differ |= abs(want - (r.reward - sum(x.reward for x in group) / len(group))) > 0.01
            assert close(float(batch.adv[b, t]), want), (b, t)
    assert some_differ and some_dropped == (cfg.reject != "none" or cfg.correction == "seq_mis")
    batch.reward.fill_(0.1)  # equal rewards: exactly 0, without rounding
    objectives.prepare(batch, Comm(), cfg, {})
    assert not batch.adv.any()
    assert batch.select([2, 0]).adv.shape[1] == batch.select([2, 0]).tokens.shape[1]
