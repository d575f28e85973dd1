"""The objectives against oracle.py: one ragged fixture in which everything differs, and every combination of axes.

The repository's own path is collate, the ref pass, prepare, joint_loss and reduce over micro-batches and ranks; the
oracle sees the same laws and numbers, and no tensor. Gradients are compared token by token, to 1e-10.
"""

import itertools
import random
import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import torch
from conftest import f64, make_cfg

import batching
import objectives
from corrections import CORRECTIONS, USES_Z
from flags import UserError
from learner import Comm, Learner
from model import PolicyAndActor, TokenStats, needs_of_exact_kappa, needs_of_update
from rollout import Response, Rollout, uniforms
from sampling import Sampling

V, K, SEED = 7, 2, 5
LAWS = ("inf", "ref", "new", "actor_ref", "actor")

# ---------------------------------------------------------------------------------------------------------------------
# The fixture: groups of 2, 3, 4 and 2 responses
# ---------------------------------------------------------------------------------------------------------------------

# (group, reward, temperature, which tokens may carry a gradient)
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


def make_fixture(wild: bool) -> list[oracle.Response]:
    rng = random.Random(17)
    out = []
    for i, (group, reward, temperature, mask) in enumerate(ROWS):
        draws = uniforms(len(mask), "mask", SEED, ("test", 3, group), i - [row[0] for row in ROWS].index(group))
        shift = rng.gauss(0, 0.25)  # a response's own, so that sums and means spread as well
        tokens = []
        for t, on in enumerate(mask):
            law = random_law(rng)
            token = oracle.Token(0, on == "1", float(draws[t]), law, *(moved(rng, law, shift) for _ in LAWS[1:]))
            token.id = rng.choices(range(V), law)[0]
            if wild and (i, t) in FAR:
                token.inf, token.ref = far_apart(token, FAR[i, t])
            tokens.append(token)
        out.append(oracle.Response(group, reward, tokens, temperature))
    return out


def random_law(rng) -> list[float]:
    return normal([rng.gauss(0, 1.2) for _ in range(V)])


def moved(rng, law, shift) -> list[float]:
    """Another law near this one."""
    return normal([np.log(p) + rng.gauss(shift * (x % 3), 0.55) for x, p in enumerate(law)])


def normal(logits) -> list[float]:
    weights = [float(np.exp(x)) for x in logits]
    return [w / sum(weights) for w in weights]


def far_apart(token, log_r: float) -> tuple[list[float], list[float]]:
    """(p_inf, p_ref) with that log-ratio at the sampled token: one of the two nearly never samples it."""
    near, rare = list(token.ref), list(token.inf)
    rare[token.id] = near[token.id] * float(np.exp(-abs(log_r)))
    others = sum(rare) - rare[token.id]
    rare = [p if x == token.id else p * (1 - rare[token.id]) / others for x, p in enumerate(rare)]
    return (rare, near) if log_r > 0 else (near, rare)


FIXTURE = {wild: make_fixture(wild) for wild in (False, True)}


def as_groups(responses) -> list[Rollout]:
    """The fixture as a sampler would hand it over, in float64."""
    groups = []
    for group, prompt in enumerate(PROMPTS):
        rows = [r for r in responses if r.group == group]
        sampling = Sampling(temperature=rows[0].temperature)
        times = dict(version=7 - 2 * group, t_start=0.0, t_end=0.0, t_published=10.0 * group)
        made = dict(prompt_id=str(group), model="policy", precision="float64", digest="", **times)
        responses_of = [as_response(r) for r in rows]
        prompt_ids = np.array(prompt, np.int32)
        uid = ("test", 3, group)
        groups.append(Rollout(uid=uid, prompt_ids=prompt_ids, sampling=sampling, responses=responses_of, **made))
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
    """Everything that collate pads, and the advantages, in float64: what is compared to 1e-10 is the formulas."""
    pad = batching.pad

    def pad64(rows, T=0, fill=0.0, dtype=None):
        return pad(rows, T, fill, dtype or (np.bool_ if isinstance(fill, bool) else np.float64))

    monkeypatch.setattr(batching, "pad", pad64)
    torch.set_default_dtype(f64)
    yield
    torch.set_default_dtype(torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# The repository's path
# ---------------------------------------------------------------------------------------------------------------------


class Tables(PolicyAndActor):
    """A policy and an actor whose logits stand in tables, by row of the fixture and place in the response."""

    def __init__(self, *logits):
        super().__init__(*(torch.nn.ParameterList([x]) for x in logits))

    can_share = False

    def _hidden(self, lm, batch, at, share):
        T = batch.tokens.shape[1]
        rows = [self.row_of(batch, b) for b in range(len(batch))]
        table = lm[0][rows][:, :T]
        return table.flatten(0, 1)[at], torch.eye(V)

    def row_of(self, batch, b: int) -> int:
        n = int(batch.prompt_len[b])
        return self.known[tuple(batch.ids[b, :n].tolist()), tuple(batch.tokens[b, : batch.length[b]].tolist())]


def tables(responses, laws) -> Tables:
    """laws: which of the fixture's laws policy and actor have; a token's logits are its temperature times log p."""
    T = max(len(r.tokens) for r in responses)
    built = []
    for law in laws:
        logits = torch.zeros(len(responses), T, V)
        for b, r in enumerate(responses):
            for t, token in enumerate(r.tokens):
                logits[b, t] = r.temperature * torch.tensor(getattr(token, law)).log()
        built.append(torch.nn.Parameter(logits))
    models = Tables(*built)
    models.known = {}
    for b, r in enumerate(responses):
        key = tuple(PROMPTS[r.group]), tuple(token.id for token in r.tokens)
        assert key not in models.known
        models.known[key] = b
    return models


def make_learner(cfg, responses, laws, comm=None) -> Learner:
    """A learner on tables, without optimizers."""
    learner = object.__new__(Learner)
    learner.cfg, learner.comm, learner.device = cfg, comm or Comm(), "cpu"
    learner.names = ["policy", "actor"][: len(laws)]
    learner.models = learner.wrapped = tables(responses, laws)
    return learner


class Lockstep:
    """The comms of ranks that are threads: sums and joins over all of them."""

    def __init__(self, n: int):
        self.n, self.barrier, self.box = n, threading.Barrier(n, timeout=20), [None] * n

    def rank(self, r: int):
        def exchange(x):
            self.box[r] = x
            self.barrier.wait()
            all_of_them = list(self.box)
            self.barrier.wait()
            return all_of_them

        def add(values):
            return [sum(float(x) for x in column) for column in zip(*exchange(values), strict=True)]

        return SimpleNamespace(sum=add, cat=lambda x: torch.cat(exchange(x)))


def on_all(ranks: list, do) -> list:
    """[do(comm, part) of each part], the parts at once where there are several."""
    if len(ranks) == 1:
        return [do(Lockstep(1).rank(0), ranks[0])]
    lockstep, out = Lockstep(len(ranks)), [None] * len(ranks)

    def run(r):
        try:
            out[r] = do(lockstep.rank(r), ranks[r])
        except BaseException:
            lockstep.barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(r,)) for r in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


RANKS = {"one": [[0, 1, 2, 3]], "two": [[1, 3], [0, 2]], "lopsided": [[0, 1, 2], [3]], "idle": [[0, 1, 2, 3], []]}


class Cache(dict):
    """What depends on few of the axes is made once: batches with their ref columns, and forwards."""

    def batches(self, cfg, case, ref: bool) -> list:
        """A batch for each rank."""
        columns = (cfg.actor, cfg.correction in USES_Z, cfg.obrs_z, cfg.obrs_target, cfg.obrs_accept_rate is None)
        key = ("batch", case["wild"], case["ranks"], cfg.advantage, ref, cfg.obrs_lambda, columns if ref else ())
        if key not in self:
            self[key] = [self.batch(cfg, case, ref, part) for part in RANKS[case["ranks"]]]
        return self[key]

    def batch(self, cfg, case, ref, part):
        responses = FIXTURE[case["wild"]]
        groups = [g for i, g in enumerate(as_groups(responses)) if i in part]
        if not part:  # a rank whose responses are all masked
            groups = as_groups(responses)[:1]
            for r in groups[0].responses:
                r.loss_mask = np.zeros_like(r.loss_mask)
        if ref:
            laws = ["ref", "actor_ref"][: 1 + (cfg.actor != "none")]
            learner = make_learner(replace(cfg, micro_tokens=25), responses, laws)
            columns = learner.ref_columns(batching.collate(groups, cfg), cfg.obrs_lambda)
            batching.write_ref_columns(groups, columns)
        return batching.collate(groups, cfg, version=9, now=100.0)

    def forward(self, cfg, case, batch, needs) -> dict:
        """The statistics of a whole batch by the policy and actor as they are now."""
        key = ("forward", id(batch), cfg.actor, needs)
        if key not in self:
            laws = ["new", "actor"][: 1 + (cfg.actor != "none")]
            learner = make_learner(replace(cfg, micro_tokens=25), FIXTURE[case["wild"]], laws)
            self[key] = learner.score(batch, needs).known()
        return self[key]


CACHE = Cache()
GRADIENTS = ("logp", "actor_logp", "distill_loss")


def repository(cfg, case):
    """(loss, {name: its gradient in that statistic, a list for each response}, whether there was a ref pass)."""
    controllers = {"kappa": case["carried_kappa"]}
    if case["carried_distill"] is not None:
        controllers["distill"] = case["carried_distill"]
    passes = objectives.passes_needed(cfg, controllers, case["updates"])
    batches = CACHE.batches(cfg, case, "ref" in passes)

    def prepare(comm, batch):
        fresh = None
        if "fresh" in passes:
            fresh = TokenStats(**CACHE.forward(cfg, case, batch, needs_of_exact_kappa(cfg)))
        return objectives.prepare(batch, comm, cfg, controllers, fresh)

    for batch in batches:  # not in threads
        if "fresh" in passes:
            CACHE.forward(cfg, case, batch, needs_of_exact_kappa(cfg))
    total, found = 0.0, {name: {} for name in GRADIENTS}
    for batch, stats in zip(batches, on_all(batches, prepare), strict=True):
        leaves, loss = one_rank(cfg, case, batch, stats)
        total += loss
        if case["ranks"] == "idle" and batch is batches[1]:
            assert loss == 0
            assert all(x.grad is None or not x.grad.any() for x in leaves.values())
            continue
        for name, x in leaves.items():
            for b in range(len(batch)):
                key = tuple(batch.ids[b].tolist()), int(batch.length[b])
                found[name][row_of(batch, b)] = x.grad[b][batch.mask[b]].tolist() if x.grad is not None else None
                assert x.grad is None or not x.grad[b][~batch.mask[b]].any(), key
    return total, found, "ref" in passes


def row_of(batch, b: int) -> int:
    n = int(batch.prompt_len[b])
    return ROW_OF[tuple(batch.ids[b, :n].tolist()), tuple(batch.tokens[b, : batch.length[b]].tolist())]


ROW_OF = {(tuple(PROMPTS[r.group]), tuple(t.id for t in r.tokens)): i for i, r in enumerate(FIXTURE[False])}


def one_rank(cfg, case, batch, stats):
    """({statistic: leaf with its gradient}, loss) of one rank's micro-batches."""
    needs = needs_of_update(cfg, cfg.actor != "none", stats.lam, batch.logp_ref is not None)
    known = CACHE.forward(cfg, case, batch, needs)
    leaves = {name: known[name].clone().requires_grad_() for name in GRADIENTS if name in known}
    total = 0.0
    for rows in batching.micro_batches(batch, case["micro_tokens"], False)[0]:
        micro = batch.select(rows)
        T = micro.tokens.shape[1]
        new = TokenStats(**{name: x[rows][:, :T] for name, x in (known | leaves).items()})
        value, _ = objectives.joint_loss(new, micro, stats.select(rows), cfg)
        loss = objectives.reduce(value, micro.mask, stats, cfg)
        if loss.requires_grad:
            loss.backward()
        total += float(loss.detach())
    return leaves, total


# ---------------------------------------------------------------------------------------------------------------------
# The axes
# ---------------------------------------------------------------------------------------------------------------------

AXES = {
    # every combination of these five
    "correction": list(CORRECTIONS),
    "surrogate": list(objectives.SURROGATES),
    "reduction": ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
    "loss_denominator": ["proposed", "kept"],
    "actor": ["none", "base:actor"],
    # every pair of values of any two
    "ratio_base": ["ref", "inf", "new", "group"],
    "allow_double_correction": [False, True],
    "advantage": list(objectives.ADVANTAGES),
    "clip": [True, False],
    "edges": ["usual", "wide"],
    "dual_clip": [0.0, 1.3],
    "positive_only": [False, True],
    "log_ratio_clamp": [20.0, 0.9],
    "is_cap": ["usual", "tight"],
    "is_floor": [0.0, 0.7],
    "reject": ["none", "token", "sequence", "geo", "token_k3", "seq_mean_k3"],
    "veto": [0.0, 0.45],
    "tbpo_cap": ["clip", "mask"],
    "gepo_expectation": ["weighted", "mean"],
    "gepo_defence": [0.0, 30.0],
    "cppo_beta": [0.0, 0.3],
    "cppo_kl": ["official", "k3"],
    "obrs_mask": ["bernoulli", "expected"],
    "obrs_mode": ["both", "mask", "reweight"],
    "obrs_target": ["ref", "new"],
    "obrs_z": ["bracket", "exact"],
    "obrs_lambda": [1.0, 0.7, 1.4],
    "obrs_accept_rate": [None, 0.8, 1.0],
    "obrs_c1": [3.0, 0.9],
    "obrs_c2": [None, 1.1],
    "kappa": ["auto", "exact"],
    "actor_correction": [c for c in CORRECTIONS if c not in USES_Z | {"tis_adjusted"}],
    "actor_is_cap": [None, 1.2],
    "distill_direction": ["forward", "reverse"],
    "distill_topk": [0, 3],
    "distill_lambda": [0.0, 0.6],
    # not flags: the state of the run, and how the batch is split
    "carried_kappa": [None, 1.07],
    "carried_distill": [None, 2.5],
    "updates": [1, 2],
    "ranks": list(RANKS),
    "micro_tokens": [10**6, 22, 1],
    "wild": [False, True],
}
CROSSED = list(AXES)[:5]
NO_FLAG = ("edges", "carried_kappa", "carried_distill", "updates", "ranks", "wild")
HAS_CAP = ("tis", "tis_adjusted", "areal_drop", "seq_tis", "geo_rs_seq_tis", "tbpo_mismatch")
REJECTS = ("icepop", "seq_mis", "geo_rs", "geo_rs_seq_tis")
REJECT_BOUNDS = {"token": (0.6, 1.6), "sequence": (0.4, 2.0), "geo": (0.85, 1.15), "token_k3": (0.001, 0.12)}
REJECT_BOUNDS |= {"seq_mean_k3": (0.01, 0.1)}


def flags_of(case) -> dict:
    """The flags of a case; bounds so that the fixture has tokens and responses on both sides of each."""
    flags = {name: value for name, value in case.items() if name not in NO_FLAG}
    if flags["is_cap"] == "usual" or case["correction"] not in HAS_CAP:
        del flags["is_cap"]
    else:
        flags["is_cap"] = 1.2
    if case["reject"] != "none":
        flags["rs_low"], flags["rs_high"] = REJECT_BOUNDS[case["reject"]]
    elif case["correction"] in REJECTS:
        by_token = case["correction"] == "icepop"
        flags["rs_low"], flags["rs_high"] = REJECT_BOUNDS["token" if by_token else "geo"]
    if case["edges"] == "wide":
        flags |= {"clip_low": 0.15, "clip_high": 0.22, "tbpo_neg_high": 0.3}
    return {**flags, "obrs_topk": K, "seed": SEED, "max_tokens": 9, "objective": "none", "micro_tokens": 10**6}


# one rule a line: what the flags' checks must refuse
CONTRADICTIONS = [
    lambda c: c["correction"] in ("tis_adjusted", "jackpot_adjusted") and c["ratio_base"] != "new",
    lambda c: c["correction"] == "jackpot_adjusted" and c["obrs_target"] != "new",
    lambda c: c["correction"] == "z_tis" and c["obrs_target"] == "new",
    lambda c: (
        c["correction"] == "tis_adjusted" and c["loss_denominator"] == "kept" and (c["reject"] != "none" or c["veto"])
    ),
    lambda c: c["ratio_base"] in ("inf", "group") and c["correction"] != "none" and not c["allow_double_correction"],
    lambda c: c["ratio_base"] == "group" and c["surrogate"] not in ("gspo", "tbpo"),
    lambda c: c["gepo_defence"] and c["ratio_base"] != "group",
    lambda c: c["surrogate"] == "reinforce" and c["ratio_base"] != "ref",
    lambda c: c["dual_clip"] and (not c["clip"] or c["surrogate"] not in ("ppo", "gspo")),
    lambda c: c["reject"] != "none" and c["correction"] in REJECTS,
    lambda c: c["is_floor"] and (c["correction"] not in HAS_CAP or c["correction"] == "areal_drop"),
    lambda c: c["obrs_z"] == "exact" and (c["actor"] == "none" or c["obrs_target"] == "new" or c["obrs_accept_rate"]),
    lambda c: c["kappa"] == "exact" and c["obrs_target"] == "ref",
    lambda c: late(c) and c["loss_denominator"] == "kept",
    lambda c: late(c) and c["obrs_accept_rate"],
]


def late(c) -> bool:
    """OBRS towards the policy as it is in the update: what must be known before that is not."""
    return c["correction"] in USES_Z and c["obrs_target"] == "new" and c["kappa"] != "exact"


def contradicts(case) -> bool:
    return any(rule(case) for rule in CONTRADICTIONS)


def draw(rng, fixed: dict) -> dict:
    return {name: fixed[name] if name in fixed else rng.choice(values) for name, values in AXES.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Side by side
# ---------------------------------------------------------------------------------------------------------------------


def compare(case) -> oracle.Result:
    """AssertionError, naming the case, unless loss and gradients are the oracle's. Returns what the oracle says."""
    cfg = make_cfg(**flags_of(case))
    loss, found, ref_pass = repository(replace(cfg, micro_tokens=case["micro_tokens"]), case)
    responses = FIXTURE[case["wild"]]
    if not ref_pass:  # the update's own forward serves as the ref pass
        responses = [replace(r, tokens=[ref_is_new(token) for token in r.tokens]) for r in responses]
    distill = cfg.distill_lambda if case["carried_distill"] is None else case["carried_distill"]
    want = oracle.step(responses, cfg, case["carried_kappa"], distill)
    assert close(loss, want.loss, scale=want.size), (case, loss, want.loss)
    wanted = {"logp": want.policy}
    if cfg.actor != "none":
        wanted |= {"actor_logp": want.actor, "distill_loss": want.distill}
    for name, by_response in wanted.items():
        for i, row in enumerate(by_response):
            got = found[name][i] if found[name][i] is not None else [0.0] * len(row)
            assert len(got) == len(row)
            for a, b in zip(got, row, strict=True):
                assert close(a, b), (case, name, i, got, row)
    return want


def ref_is_new(token):
    return replace(token, ref=token.new, actor_ref=token.actor)


def close(a: float, b: float, scale: float = 0.0) -> bool:
    return abs(a - b) <= 1e-10 * max(1.0, abs(b), scale)


def test_every_combination_agrees_with_the_formulas_written_out():
    """All of correction x surrogate x reduction x denominator x models, the other axes drawn anew each time; then
    every pair of values of any two axes that no such case had. What the flags' checks refuse is refused by a rule."""
    rng, seen, refused, ran = random.Random(0), set(), Counter(), 0

    def run(fixed, tries):
        nonlocal ran
        for _ in range(tries):
            case = draw(rng, fixed)
            if not contradicts(case):
                compare(case)
                ran += 1
                seen.update(itertools.combinations(case.items(), 2))
                return
            if refused[case["correction"]] < 40:
                refused[case["correction"]] += 1
                with pytest.raises(UserError):
                    make_cfg(**flags_of(case))

    for values in itertools.product(*(AXES[name] for name in CROSSED)):
        for _ in range(REPEATS):
            run(dict(zip(CROSSED, values, strict=True)), 60)
    for one, other in itertools.combinations(AXES, 2):
        for pair in itertools.product(AXES[one], AXES[other]):
            both = dict(zip((one, other), pair, strict=True))
            if tuple(both.items()) not in seen:
                run(both, 200)
    print(ran, "cases", dict(refused))
    assert ran > 900 * REPEATS


REPEATS = 3
