"""Compare an installed framework's functions on tests/golden's batches with golden values: results/conformance.json.

    python -m pip install --target=FOLDER --no-deps verl ray tensordict omegaconf hydra-core codetiming pyvers orjson \\
        cloudpickle msgpack "antlr4-python3-runtime==4.9.3"
    PYTHONPATH=FOLDER python tests/tools/conform.py verl

    python -m pip install --target=FOLDER --no-deps trl
    PYTHONPATH=FOLDER python tests/tools/conform.py trl

    python -m pip install --target=FOLDER --no-deps areal     # and the packages that its import needs
    PYTHONPATH=FOLDER python tests/tools/conform.py areal

No framework is a dependency, and no test needs one. A row is a named correction: the largest difference of weights,
masks, loss and gradient from the golden values of any batch, relative to the largest golden value. 0 is below 1e-6,
because some functions compute in float32. - is a value that the function does not return. results/conformance.md is the
table. The metrics of verl in results/conformance.json are from an earlier program.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import sys
import textwrap
import types
from collections import defaultdict
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (2, 1)]

import torch

from results import sweep

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
NEVER = 1e9  # a bound that never acts
SEQ = "seq-mean-token-mean"


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (GOLDEN / name).read_text(encoding="utf-8").splitlines()]


class Case:
    """One batch as padded float64 tensors, (B, T)."""

    def __init__(self, responses: list[dict]):
        T = max(len(r["mask"]) for r in responses)
        rows = {name: [r[name] + [-1.0] * (T - len(r[name])) for r in responses] for name in ("inf", "ref", "new")}
        self.inf, self.ref = (torch.tensor(rows[name], dtype=torch.float64) for name in ("inf", "ref"))
        self.new = torch.tensor(rows["new"], dtype=torch.float64, requires_grad=True)
        self.mask = torch.tensor([[float(x == "1") for x in r["mask"].ljust(T, "0")] for r in responses]).double()
        self.adv = torch.tensor([[r["adv"]] for r in responses], dtype=torch.float64).expand_as(self.mask)
        self.tokens, self.responses = int(self.mask.sum()), int((self.mask.sum(1) > 0).sum())

    def rows(self, x) -> list[list[float]]:
        """The tokens with a mask of 1."""
        return [row[on > 0].tolist() for row, on in zip(x.expand_as(self.mask), self.mask, strict=True)]

    def results(self, loss=None, weight=None, keep=None) -> dict:
        """The results of a framework's function, in the form of golden values."""
        out = {"loss": loss, "weight": weight, "keep": keep, "grad": None}
        if loss is not None:
            self.new.grad = None
            loss.backward()
            out |= {"loss": [[float(loss.detach())]], "grad": self.rows(self.new.grad)}
        for name in ("weight", "keep"):
            out[name] = None if out[name] is None else self.rows(out[name].detach().double())
        return out


# -- verl -------------------------------------------------------------------------------------------------------------

VERL_STATISTICS = {  # this repository's -> (verl's, verl's threshold), with the bounds of the golden cases
    "token --rs_low=0.6 --rs_high=1.5": ("token_k1", "0.6_1.5"),
    "sequence --rs_low=0.4 --rs_high=1.9": ("seq_sum_k1", "0.4_1.9"),
    "geo --rs_low=0.8 --rs_high=1.2": ("seq_mean_k1", "0.8_1.2"),
    **{f"{name} --rs_low=0 --rs_high=0.05": (name, 0.05) for name in ("token_k2", "token_k3")},
    **{f"{name} --rs_low=0 --rs_high=0.2": (name, 0.2) for name in ("seq_sum_k2", "seq_sum_k3")},
    **{f"seq_{k} --rs_low=0 --rs_high=0.1": (f"seq_{k}", 0.1) for k in ("mean_k2", "mean_k3", "max_k2", "max_k3")},
}
# this repository's -> (verl's loss, clip, reduction, verl's old log-probabilities)
VERL_LOSSES = {
    "gspo": ("gspo", (3e-4, 4e-4), SEQ, "ref"),
    "sapo": ("sapo", (0.2, 0.28), SEQ, "ref"),
    "cispo": ("cispo", (0.2, 0.28), "token-mean", "ref"),
    "gmpo": ("geo_mean", (0.4, 0.4), SEQ, "ref"),
    "dppo_tv": ("dppo_tv", (0.2, 0.2), "token-mean", "inf"),
    "dppo_kl": ("dppo_kl", (0.05, 0.05), "token-mean", "inf"),
}


def verl() -> dict:
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo import core_algos, rollout_corr_helper

    presets = [name for name, f in vars(RolloutCorrectionConfig).items() if isinstance(f, classmethod)]
    rows = {name: verl_preset(getattr(RolloutCorrectionConfig, name)(), core_algos) for name in presets}
    for ours, (name, threshold) in VERL_STATISTICS.items():
        rows[f"is --reject={ours}"] = verl_statistic(rollout_corr_helper, name, threshold)
    several = ("token_k1,seq_max_k2,seq_mean_k1", "0.5_2.0,0.4,0.8_1.25")
    rows["is --reject=token:0.5:2,seq_max_k2:0:0.4,geo:0.8:1.25"] = verl_statistic(rollout_corr_helper, *several)
    for ours, (name, clip, reduction, base) in VERL_LOSSES.items():
        rows[ours] = verl_loss(core_algos.get_policy_loss_fn(name), clip, reduction, base)
    # with verl's defaults: the denominator counts kept tokens, and DPPO's weights have a cap
    both = RolloutCorrectionConfig.decoupled_seq_is_rs()
    rows["decoupled_seq_is_rs, its denominator"] = verl_preset(both, core_algos, own_denominator=True)
    rows["decoupled_seq_is_rs --loss_denominator=kept"] = rows["decoupled_seq_is_rs, its denominator"]
    own_cap = verl_loss(core_algos.get_policy_loss_fn("dppo_tv"), (0.2, 0.2), "token-mean", "inf", cap=None)
    rows["dppo_tv, its clip_ratio_c"] = own_cap
    return rows


def verl_config(case: Case, clip=(0.2, 0.28), cap: float | None = NEVER, **policy_loss):
    """verl's actor configuration. Denominators count proposed tokens. cap: clip_ratio_c; None: verl's default."""
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio=clip[0],
        clip_ratio_low=clip[0],
        clip_ratio_high=clip[1],
        **({} if cap is None else {"clip_ratio_c": cap}),
        policy_loss=PolicyLossConfig(**policy_loss),
        global_batch_info={"batch_num_tokens": case.tokens, "global_batch_size": case.responses, "dp_size": 1},
    )


def verl_preset(preset, core_algos, own_denominator: bool = False):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    settings = {name: getattr(preset, name) for name in ("rollout_is", "rollout_is_threshold", "rollout_rs")}
    settings |= {"rollout_rs_threshold": preset.rollout_rs_threshold}

    def run(case: Case) -> dict:
        over = case.new.detach() if preset.bypass_mode else case.ref
        proto, mask, _ = compute_rollout_correction_and_rejection_mask(over, case.inf, case.mask, **settings)
        weight = None if proto is None else proto.batch["rollout_is_weights"]
        if preset.bypass_mode:
            config = verl_config(case, rollout_correction={**settings, "loss_type": preset.loss_type})
            loss, _ = core_algos.compute_policy_loss_bypass_mode(
                case.inf, case.new, case.adv, case.mask, "token-mean", config
            )
        else:
            config = verl_config(case)
            if own_denominator:
                config.global_batch_info.clear()
            loss, _ = core_algos.compute_policy_loss_vanilla(
                case.ref, case.new, case.adv, mask, "token-mean", config, weight
            )
        return case.results(loss, weight, mask)

    return run


def verl_statistic(helper, name: str, threshold):
    def run(case: Case) -> dict:
        mask, _ = helper.compute_rollout_rejection_mask(case.ref - case.inf, case.mask, name, threshold)
        return case.results(keep=mask)

    return run


def verl_loss(function, clip, reduction: str, base: str, cap: float | None = NEVER):
    def run(case: Case) -> dict:
        config = verl_config(case, clip, cap)
        loss, _ = function(getattr(case, base), case.new, case.adv, case.mask, reduction, config)
        return case.results(loss)

    return run


# -- TRL: methods of its trainer, on a stand-in for the trainer -------------------------------------------------------

TRL_LOSSES = {
    "grpo": dict(loss_type="dapo"),
    "dapo": dict(loss_type="dapo"),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "token_truncate": dict(loss_type="dapo", mode="token_truncate"),
    "token_mask": dict(loss_type="dapo", mode="token_mask"),
    "sequence_truncate": dict(loss_type="dapo", mode="sequence_truncate"),
    "sequence_mask": dict(loss_type="dapo", mode="sequence_mask"),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
    "sapo": dict(loss_type="sapo"),
    "cispo": dict(loss_type="cispo", epsilon_high=1.28),
    "cispo --clip_low=1.0": dict(loss_type="cispo", epsilon_high=1.28),
    "tis --dual_clip=1.3": dict(loss_type="dapo", mode="token_truncate", clip_max=2.0, delta=1.3),
    "vespo": dict(loss_type="vespo", mode="token_truncate", clip_max=NEVER),
    "opsm": dict(loss_type="dapo", off_policy_mask_threshold=1e-4),
}


def trl() -> dict:
    from trl.trainer.grpo_trainer import GRPOTrainer

    return {name: trl_loss(GRPOTrainer, **settings) for name, settings in TRL_LOSSES.items()}


def trl_loss(trainer_class, mode: str = "", clip_max: float = 3.0, **settings):
    def run(case: Case) -> dict:
        trainer = trl_trainer(trainer_class, case, bool(mode), dict(settings))
        empty = torch.zeros(len(case.mask), 0, dtype=torch.long)
        inputs = {"prompt_ids": empty, "prompt_mask": empty, "completion_ids": torch.zeros_like(case.mask).long()}
        inputs |= {"completion_mask": case.mask, "advantages": case.adv[:, 0], "old_per_token_logps": case.ref}
        inputs |= {"sampling_per_token_logps": case.inf, "num_items_in_batch": case.mask.sum()}
        weight, keep = None, None
        if mode:
            weight = inputs["importance_sampling_ratio"] = trl_ratio(trainer_class, case, mode, clip_max)
        if trainer.loss_type == "vespo":
            weight = trainer_class.get_gamma_weights(
                case.adv[:, :1], case.new.detach() - case.ref, case.mask, inputs["importance_sampling_ratio"]
            )
        if trainer.off_policy_mask_threshold is not None:
            keep = trainer_class.get_off_policy_mask(
                case.adv[:, :1], case.new, case.inf, case.mask, trainer.off_policy_mask_threshold
            )
        return case.results(trainer_class._compute_loss(trainer, None, inputs), weight, keep)

    return run


def trl_trainer(trainer_class, case: Case, corrects: bool, settings: dict):
    """The attributes of a trainer that _compute_loss reads."""
    entropies = torch.zeros_like(case.mask)
    args = dict(
        delta=settings.pop("delta", None), sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=1
    )
    args |= dict(vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0)
    accelerator = types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    base = dict(importance_sampling_level="token", off_policy_mask_threshold=None, epsilon_low=0.2, epsilon_high=0.28)
    return types.SimpleNamespace(
        **{**base, **settings},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (case.new, entropies, None),
        get_off_policy_mask=trainer_class.get_off_policy_mask,
        get_gamma_weights=trainer_class.get_gamma_weights,
        use_vllm=corrects,
        vllm_importance_sampling_correction=corrects,
        args=types.SimpleNamespace(**args),
        accelerator=accelerator,
        model=types.SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=9,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        beta=0.0,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


def trl_ratio(trainer_class, case: Case, mode: str, clip_max: float):
    """vllm_importance_sampling_ratio: runs one statement of TRL's method, because no function computes the ratio."""
    method = trainer_class._generate_and_score_completions
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    makes = [node for node in ast.walk(tree) if isinstance(node, ast.If) and makes_ratio(node)]
    settings = dict(vllm_importance_sampling_clip_max=clip_max, vllm_importance_sampling_clip_min=None)
    settings |= dict(use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode)
    names = {"self": types.SimpleNamespace(**settings), "torch": torch, "math": math, "tool_mask": None}
    names |= {"completion_mask": case.mask, "old_per_token_logps": case.ref, "sampling_per_token_logps": case.inf}
    exec(compile(ast.Module(body=[makes[-1]], type_ignores=[]), "trl", "exec"), names)
    return names["vllm_importance_sampling_ratio"]


def makes_ratio(node: ast.If) -> bool:
    """Whether the first statement is `mask = ...` and the body computes the ratio."""
    first = node.body[0]
    return (
        isinstance(first, ast.Assign)
        and ast.unparse(first.targets[0]) == "mask"
        and "sequence_level_is" in str([ast.unparse(statement) for statement in node.body])
    )


# -- AReaL ------------------------------------------------------------------------------------------------------------

# this repository's -> AReaL's rejection sampling; AReaL's statistics have no lower bound, this repository's have 0
AREAL = {
    "grpo": None,
    "icepop": dict(lower=0.5, upper=5.0),
    "areal_drop": dict(upper=5.0),
    "tis": dict(action="clamp", upper=2.0),
    "tis --is_floor=0.7": dict(action="clamp", lower=0.7, upper=2.0),
}
AREAL_STATISTICS = {
    **{f"token_{k} --rs_low=0 --rs_high=0.05": dict(level="token", metric=f"kl_{k}", upper=0.05) for k in ("k2", "k3")},
    **{f"seq_sum_{k} --rs_low=0 --rs_high=0.2": dict(agg="sum", metric=f"kl_{k}", upper=0.2) for k in ("k2", "k3")},
    **{f"seq_mean_{k} --rs_low=0 --rs_high=0.1": dict(agg="mean", metric=f"kl_{k}", upper=0.1) for k in ("k2", "k3")},
    **{f"seq_max_{k} --rs_low=0 --rs_high=0.1": dict(agg="max", metric=f"kl_{k}", upper=0.1) for k in ("k2", "k3")},
    "seq_max --rs_low=0 --rs_high=2": dict(agg="max", metric="ratio", upper=2.0),
}


def areal() -> dict:
    from areal.api.cli_args import RejectionSamplingConfig
    from areal.utils.functional import functional

    def config_of(settings):
        return None if settings is None else RejectionSamplingConfig(**settings)

    rows = {name: areal_loss(functional, config_of(settings)) for name, settings in AREAL.items()}
    for ours, settings in AREAL_STATISTICS.items():
        rows[f"is --reject={ours}"] = areal_mask(functional, config_of({"level": "sequence", **settings}))
    return rows


def areal_loss(functional, rejection):
    def run(case: Case) -> dict:
        args = (case.new, case.ref, case.inf, case.adv, 0.2, case.mask.bool(), 0.28)
        loss, statistics = functional.ppo_actor_loss_fn(*args, rejection_sampling=rejection)
        return case.results(loss, statistics.get("behave_imp_weight"))

    return run


def areal_mask(functional, rejection):
    def run(case: Case) -> dict:
        result = functional.apply_rejection_sampling(case.ref, case.inf, case.mask.bool(), None, rejection)
        return case.results(keep=result.loss_mask)

    return run


# -- The table --------------------------------------------------------------------------------------------------------

FRAMEWORKS = {"verl": verl, "trl": trl, "areal": areal}


def difference(results, want) -> float | None:
    """The largest difference, divided by the largest golden value; None without results."""
    if results is None:
        return None
    pairs = [(a, b) for x, y in zip(results, want, strict=True) for a, b in zip(x, y, strict=True)]
    scale = max([abs(b) for _, b in pairs], default=0.0) or 1.0
    return max([abs(a - b) for a, b in pairs], default=0.0) / scale


def golden(row: dict) -> dict:
    """The golden values of a case on a batch, all as lists of lists."""
    keep = [[float(flag) for flag in flags] for flags in row["keep"]]
    return {"weight": row["weight"], "keep": keep, "loss": [[row["loss"]]], "grad": row["grad"]}


def compared(results: dict, want: dict) -> list[float | None]:
    """Differences of weight, mask, loss, gradient. Only kept weights are compared. The mask is not compared if a
    framework gives dropped tokens a weight of 0."""
    weight, keep = results["weight"], results["keep"]
    if weight is not None and keep is not None:
        inside_weight = any(0.0 in row for row in weight)
        weight, keep = product(weight, keep), None if inside_weight else keep
    cells = [difference(weight, product(want["weight"], want["keep"])), difference(keep, want["keep"])]
    return cells + [difference(results[name], want[name]) for name in ("loss", "grad")]


def product(one: list, other: list) -> list[list[float]]:
    return [[a * b for a, b in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)]


def written(cells: list) -> str:
    """The largest of the batches; a dash if all are None."""
    numbers = [x for x in cells if x is not None]
    if not numbers:
        return "-"
    return "0" if max(numbers) < 1e-6 else f"{max(numbers):.1g}"


def table(data: dict) -> str:
    """The table of the page: one line for each framework, then the cases that differ."""
    rows = []
    for name, record in data.items():
        differ = {case: cells[:4] for case, cells in record["cases"].items() if not set(cells[:4]) <= {"0", "-"}}
        cases = len(record["cases"])
        rows.append([f"**{name}**: {cases - len(differ)} of {cases} cases agree"])
        rows += sweep.merged([[f"`{case}`", *cells] for case, cells in differ.items()])
    return sweep.markdown(["case", "weight", "mask", "loss", "gradient"], rows)


def main() -> None:
    names = sys.argv[1:]
    if not names or set(names) - set(FRAMEWORKS):
        sys.exit(f"error: name a framework that is installed: {', '.join(FRAMEWORKS)}")
    torch.set_default_dtype(torch.float64)
    values = {(row["case"], row["batch"]): golden(row) for row in lines("values.jsonl")}
    for name in names:
        try:
            rows = FRAMEWORKS[name]()
        except ImportError as e:
            sys.exit(f"error: {name} is not installed ({e}); the head of tests/tools/conform.py says how")
        title, cases = f"{name} {__import__(name).__version__}", {}
        for case, run in rows.items():
            cells = []
            for batch in lines("batches.jsonl"):
                want = values[case.split(", ")[0], batch["batch"]]  # the part after a comma is the special setting
                cells.append(compared(run(Case(batch["responses"])), want))
            cases[case] = [written(column) for column in zip(*cells, strict=True)]
        data = {key: x for key, x in sweep.load("conformance").items() if key.split()[0] != name}
        data[title] = {**sweep.load("conformance").get(title, {}), "cases": cases}
        sweep.store("conformance", data)
    sweep.rewrite(sweep.RESULTS / "conformance.md", table(sweep.load("conformance")))


if __name__ == "__main__":
    main()
