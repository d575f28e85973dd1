"""What a response is worth while train.py trains, and what is chosen by it.

    --is_cap=auto, --correction=auto    the cap, the correction whose step points best (corrections.candidates)
    --distill_worth_target=0.5          the weight of distillation, steered to hold the worth of the actor's responses

worth.py defines worth and measures it before training, from many batches at fixed weights. Here a probe sees one batch
of the sampler's, the next to be trained on, and two that the policy samples itself.
"""

from __future__ import annotations

import math

import torch

import batching
import checkpoint
import config
import corrections
import objectives
from model import needs_of_exact_kappa
from objectives import unregularised
from optim import learning
from worth import local, on_policy_config, on_policy_source

DECAY = 0.5  # what a probe leaves of the evidence before it


class Chooser:
    """Chooses, every --auto_every updates, the candidate (corrections.candidates) whose step points best.

        cosine_c = mean <g_c, g> / sqrt(mean |g_c|^2 mean |g|^2)

    g: the mean gradient of two batches that the policy samples itself, g_1 and g_2; g_c: the gradient under candidate c
    of the minibatch that is trained on next, the same for all c. The means run over the probes so far, and older ones
    fade by DECAY. cosine_c is worth.py's kappa_c times a factor that is the same for all c, so both have the order of
    worth.

        worth_c   = (noise / signal) kappa_c^2 / (1 - kappa_c^2)
        kappa_c^2 = (mean <g_c, g>)^2 / (mean |g_c|^2 signal)
        signal    = mean <g_1, g_2>,   noise = mean (|g_1|^2 + |g_2|^2) / 2 - signal

    worth_c is reported for the candidate in force, in on-policy responses (worth.py): 1 if its step is as good as an
    on-policy one. It is NaN, and steers nothing, unless signal > 0, noise > 0 and kappa < 1.

    A probe costs 2 + (number of candidates) forward-backward passes, and two batches that plain torch samples; none of
    it moves the learner. At the start of results/prefix.md's runs (kappas of 0.25 to 0.7, batches of 256) one probe's
    choice is 0.02 below the best kappa on average, three probes' under 0.01: candidates of nearly equal worth are not
    told apart."""

    def __init__(self, run, learner, controllers: dict):
        """controllers: what every checkpoint keeps; the evidence is its entry `auto`."""
        self.run, self.learner, self.cfg = run, learner, run.cfg
        self.candidates = corrections.candidates(run.cfg)
        self.controllers = controllers
        self.on = corrections.is_probed(run.cfg)
        if self.on:
            nothing = dict.fromkeys(self.candidates, 0.0)
            start = {
                "chosen": next(iter(nothing)),
                "responses": 0,
                "g": 0.0,
                "single": 0.0,
                "along": nothing,
                "own": nothing,
            }
            self.evidence = controllers.setdefault("auto", start)
            learner.cfg = self.candidates[self.evidence["chosen"]]

    def choose(self, groups, update: int) -> dict[str, float]:
        """Called on all ranks before an update: every --auto_every updates weigh the candidates and choose. Metrics.

        groups: what is trained on next."""
        evidence, found = self.evidence, {}
        if update % self.cfg.auto_every == 0:
            with checkpoint.same_rng_state():
                self.weigh(groups, update)
            cosines = self.cosines()
            evidence["chosen"] = max(cosines, key=lambda name: (cosines[name], name == evidence["chosen"]))
            found = {f"auto/cosine/{name}": cosine for name, cosine in cosines.items() if name}
            found["auto/worth"] = self.controllers["worth"] = self.worth(evidence["chosen"])
        self.learner.cfg = self.candidates[evidence["chosen"]]
        if self.cfg.is_cap == "auto":
            found["auto/is_cap"] = self.learner.cfg.is_cap
        if self.cfg.correction == "auto":
            found["auto/correction"] = evidence["chosen"]
        return {"auto/responses": evidence["responses"], **found}

    def weigh(self, groups, update: int) -> None:
        """A probe: add the products of this minibatch to the evidence. Those that are not finite say nothing."""
        cfg, learner, evidence = unregularised(self.cfg), self.learner, self.evidence
        plain = on_policy_config(cfg)
        source = on_policy_source(learner, self.run, plain)
        n = cfg.train_batch // (cfg.group_size * learner.comm.size)  # groups of a batch, on this rank
        most = 2 * n * max(1, cfg.dynamic_sampling)  # of a probe
        source.sequence += update // cfg.auto_every * most  # every probe has problems of its own
        batches = [batching.collate(source.next(n, update), plain) for _ in range(2)]
        del source  # under FSDP its engine has a whole copy of the policy
        g, other = (self.gradient(batch, plain) for batch in batches)
        single = (learner.dot(g, g) + learner.dot(other, other)) / 2
        for x, y in zip(g, other, strict=True):
            x.add_(y).div_(2)
        del other  # one gradient is kept while the next is made (plan.py)
        square, along, own = learner.dot(g, g), {}, {}
        batch = batching.collate(groups, cfg, learner.version)
        for name, candidate in self.candidates.items():
            along[name], own[name] = self.products(batch, candidate, g)
        evidence["responses"] += 2 * cfg.train_batch
        if all(map(math.isfinite, [square, *along.values(), *own.values()])):
            evidence["g"] = DECAY * evidence["g"] + square
            evidence["single"] = DECAY * evidence["single"] + single
            evidence["along"] = {name: DECAY * evidence["along"][name] + along[name] for name in along}
            evidence["own"] = {name: DECAY * evidence["own"][name] + own[name] for name in own}

    def cosines(self) -> dict[str, float]:
        """cosine_c of every candidate; 0 for one that keeps nothing."""
        along, own, g = (self.evidence[kind] for kind in ("along", "own", "g"))
        return {name: along[name] / math.sqrt(own[name] * g) if own[name] * g > 0 else 0.0 for name in along}

    def worth(self, name: str) -> float:
        """Worth of a candidate's step, in on-policy responses per response."""
        single, along, own = self.evidence["single"], self.evidence["along"][name], self.evidence["own"][name]
        signal = 2 * self.evidence["g"] - single  # <g_1, g_2>
        noise = single - signal
        beside = own * signal - along**2  # 1 - kappa^2, times own and signal
        if min(signal, noise, beside) <= 0:
            return math.nan
        return noise / signal * max(along, 0.0) ** 2 / beside

    def products(self, batch, cfg: config.Config, g) -> tuple[float, float]:
        """<g_c, g> and |g_c|^2 of a candidate."""
        gradient = self.gradient(batch, cfg)
        return self.learner.dot(gradient, g), self.learner.dot(gradient, gradient)

    def gradient(self, batch, cfg: config.Config) -> list[torch.Tensor]:
        """The gradient of the policy's loss under these flags, by the learner's own backward."""
        self.learner.cfg, fresh = unregularised(cfg), None
        if "fresh" in objectives.passes_needed(cfg, {}, 1):
            fresh = self.learner.score(batch, needs_of_exact_kappa(cfg))
        self.learner.backward(batch, objectives.prepare(batch, self.learner.comm, cfg, {}, fresh))
        found = []
        for p in learning(self.learner.models.policy):
            found.append(local(p.grad).detach().clone())  # DDP's own is written into again
            p.grad = None
        self.learner.models.zero_grad(set_to_none=True)
        return found
