"""Writes tests/golden/values.jsonl: the results of each named correction by oracle.py, on the batches of batches.jsonl.

    python tests/tools/make_golden.py

No file of the program and no tensor library is imported, so that frameworks can be compared with the same files
(tests/tools/conform.py). A batch is a list of responses. A response has log-probabilities by three policies, for its
tokens and for the vocabulary at each place (the first word is the token), a draw and a mask for each token, an
advantage, a group, and the age of the weights that sampled it, in updates. A value is one line a case: weights, masks,
loss, derivatives of the loss in log p_new of each token with mask 1, and metrics. The values in git are from an earlier
program with separate formulas; tests/test_golden.py compares them with oracle.py."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import oracle

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
INF = math.inf

# -- Cases: flags of train.py -> the settings that the formulas read --------------------------------------------------

SEQ = "seq-mean-token-mean"
PLAIN = dict(correction="none", correction_target="ref", is_cap=INF, is_floor=0.0, rs_low=0.0, rs_high=INF)
PLAIN |= dict(reject="none", reject_of="all", loss_denominator="proposed")
PLAIN |= dict(reduction="token-mean", surrogate="ppo", ratio_base="ref", clip=True, clip_low=0.2, clip_high=0.28)
PLAIN |= dict(tbpo_neg_high=7e-4, dual_clip=0.0, gepo_defence=0.0, cppo_beta=0.0)
PLAIN |= dict(cppo_kl="official", obrs_target="ref", obrs_mask="bernoulli", obrs_mode="both", obrs_z="bracket")
PLAIN |= dict(obrs_topk=4, obrs_lambda=1.0, obrs_accept_rate=None, obrs_c1=3.0, obrs_c2=1.3)
PLAIN |= dict(log_ratio_clamp=20.0, max_tokens=9)
PLAIN |= dict(advantage="given", actor="none", positive_only=False, kl_coef=0.0, entropy_coef=0.0)

TIS, SEQ_TIS = dict(correction="tis", is_cap=2.0), dict(correction="seq_tis", is_cap=2.0)
BOUNDED = dict(correction="icepop", rs_low=0.5, rs_high=5.0)
DROP = dict(correction="areal_drop")
SEQ_MIS = dict(correction="seq_mis", rs_high=4.0)
NARROW = dict(reject="geo", rs_low=0.999, rs_high=1.001)
SMALL = dict(reject="seq_mean_k3", rs_high=0.01)
ON_NEW = dict(correction_target="new", surrogate="reinforce")
DIVIDED = dict(correction_target="new", ratio_base="inf")  # verl's bypass mode with PPO's clip
GSPO = dict(surrogate="gspo", clip_low=3e-4, clip_high=4e-4, reduction=SEQ)
TO_NEW = dict(ratio_base="new", obrs_target="new")
DPPO_TV = dict(surrogate="dppo_tv", ratio_base="inf", clip_low=0.2, clip_high=0.2)
EVEN = dict(clip_low=0.2, clip_high=0.2)
CASES = {
    "none": {},
    "grpo": {},
    "reinforce": dict(surrogate="reinforce"),
    "is": dict(correction="is"),
    "tis": TIS,
    "icepop": BOUNDED,
    "kpop": dict(correction="kpop", rs_high=0.1),
    "areal_drop": DROP | dict(is_cap=5.0),
    "seq_is": dict(correction="seq_is"),
    "seq_tis": SEQ_TIS | dict(is_cap=4.0),
    "prefix_tis": dict(correction="prefix_tis", is_cap=1.0),
    "z_tis": dict(correction="z_tis"),
    "jackpot": dict(correction="obrs"),
    "jackpot_adjusted": TO_NEW | dict(correction="obrs"),
    "retrace": dict(correction="retrace"),
    "retrace_seq": dict(correction="retrace_seq"),
    "spare": dict(correction="retrace_seq", reject="token", reject_of="negative", rs_low=0.9),
    "m2po": dict(correction="is", reject="token_m2", rs_high=0.04),
    "seq_mis": SEQ_MIS,
    "mis_gspo": GSPO | SEQ_MIS,
    "geo_rs": NARROW,
    "geo_rs_seq_tis": dict(correction="geo_rs_seq_tis", is_cap=4.0, rs_low=0.999, rs_high=1.001),
    "ppo_is": dict(ratio_base="inf"),
    "tis_adjusted": TIS | dict(correction_target="new", ratio_base="new"),
    "gspo": GSPO,
    "gepo": GSPO | EVEN | dict(ratio_base="group"),
    "tbpo": GSPO | dict(correction="tbpo_mismatch", is_cap=2.0, surrogate="tbpo"),
    "sapo": dict(surrogate="sapo", reduction=SEQ),
    "cispo": dict(surrogate="cispo"),
    "gmpo": dict(surrogate="gmpo", clip_low=0.4, clip_high=0.4, reduction=SEQ),
    "dppo_tv": DPPO_TV,
    "dppo_kl": dict(surrogate="dppo_kl", ratio_base="inf", clip_low=0.05, clip_high=0.05),
    "drpo": dict(
        surrogate="drpo", ratio_base="inf", clip_low=12.5, clip_high=12.5, reduction="seq-mean-token-sum-norm"
    ),
    "trm": dict(reject="seq_max_kl", rs_high=0.1),
    "prime_rl": DPPO_TV | dict(cppo_beta=0.002, cppo_kl="k2"),
    "vespo": ON_NEW | dict(correction="vespo"),
    "opsm": dict(correction_target="new", reject="geo", reject_of="negative", rs_low=math.exp(-1e-4)),
    # verl
    "decoupled_token_is": TIS,
    "decoupled_seq_is": SEQ_TIS,
    "decoupled_token_icepop": BOUNDED,
    "decoupled_seq_is_rs": SEQ_TIS | dict(reject="sequence", rs_low=0.5, rs_high=2.0),
    "decoupled_geo_rs": NARROW,
    "decoupled_geo_rs_seq_tis": SEQ_TIS | NARROW,
    "decoupled_geo_rs_token_tis": TIS | NARROW,
    "decoupled_k3_rs": SMALL,
    "decoupled_k3_rs_seq_tis": SEQ_TIS | SMALL,
    "decoupled_k3_rs_token_tis": TIS | SMALL,
    "bypass_ppo_clip": dict(ratio_base="inf"),
    "bypass_ppo_clip_geo_rs": DIVIDED | NARROW,
    "bypass_ppo_clip_k3_rs": DIVIDED | SMALL,
    "bypass_pg_is": ON_NEW | SEQ_TIS,
    "bypass_pg_token_icepop": ON_NEW | BOUNDED,
    "bypass_pg_geo_rs": ON_NEW | NARROW,
    "bypass_pg_geo_rs_seq_tis": ON_NEW | SEQ_TIS | NARROW,
    "bypass_pg_geo_rs_token_tis": ON_NEW | TIS | NARROW,
    "disabled": {},
    # TRL, SkyRL, OpenRLHF, slime, AReaL
    "token_truncate": TIS | dict(is_cap=3.0),
    "token_mask": DROP | dict(is_cap=3.0),
    "sequence_truncate": SEQ_TIS | dict(is_cap=3.0),
    "sequence_mask": SEQ_MIS | dict(rs_high=3.0),
    "dr_grpo": dict(reduction="seq-mean-token-sum-norm"),
    "dapo": {},
    "skyrl_geo_mask": dict(reject="geo", rs_low=0.99, rs_high=1.01),
    "skyrl_product_mask": dict(reject="sequence", rs_low=0.5, rs_high=2.0),
    "skyrl_token_mask": dict(reject="token", rs_low=0.5, rs_high=2.0),
    "skyrl_outlier_mask": dict(reject="seq_max:0:100,seq_min:1e-4:inf"),
    "seq_mask_tis": dict(correction="is", reject="geo", rs_low=0.5, rs_high=5.0),
    "slime_tis": TIS | EVEN | dict(reduction=SEQ),
    "slime_icepop": DROP | EVEN | dict(is_cap=2.0, reduction=SEQ),
    "areal_token_mask": DROP | EVEN | dict(is_cap=5.0),
    # presets with additional flags
    "tis --is_floor=0.7": TIS | dict(is_floor=0.7),
    "tis --reject=seq_min:0.4:inf": TIS | dict(reject="seq_min:0.4:inf"),
    "tis --dual_clip=1.3": TIS | dict(dual_clip=1.3),
    "z_tis --obrs_c1=0.7": dict(correction="z_tis", obrs_c1=0.7),
    "jackpot --obrs_c1=0.7": dict(correction="obrs", obrs_c1=0.7),
    "jackpot --obrs_target=new": dict(correction="obrs", obrs_target="new"),
    "is --reject=token:0.5:2,seq_max_k2:0:0.4,geo:0.8:1.25": dict(
        correction="is", reject="token:0.5:2,seq_max_k2:0:0.4,geo:0.8:1.25"
    ),
    "cispo --clip_low=1.0": dict(surrogate="cispo", clip_low=1.0),
    "decoupled_seq_is_rs --loss_denominator=kept": SEQ_TIS
    | dict(reject="sequence", rs_low=0.5, rs_high=2.0, loss_denominator="kept"),
    "icepop --loss_denominator=kept": BOUNDED | dict(loss_denominator="kept"),
    f"seq_mis --loss_denominator=kept --reduction={SEQ}": SEQ_MIS | dict(loss_denominator="kept", reduction=SEQ),
}
STATISTICS = {"token": (0.6, 1.5), "sequence": (0.4, 1.9), "geo": (0.8, 1.2), "seq_max": (0, 2), "token_k2": (0, 0.05)}
STATISTICS |= {"seq_sum_k2": (0, 0.2), "seq_mean_k2": (0, 0.1), "seq_max_k2": (0, 0.1), "token_k3": (0, 0.05)}
STATISTICS |= {"seq_sum_k3": (0, 0.2), "seq_mean_k3": (0, 0.1), "seq_max_k3": (0, 0.1)}
for name, (low, high) in STATISTICS.items():
    flags = f"is --reject={name} --rs_low={low} --rs_high={high}"
    CASES[flags] = dict(correction="is", reject=name, rs_low=low, rs_high=high)


# -- A case on a batch ------------------------------------------------------------------------------------------------


def evaluate(batch: list[dict], case: str) -> dict:
    """The golden values of a case: the results of the oracle's step, and metrics."""
    cfg = SimpleNamespace(**(PLAIN | CASES[case]))
    result = oracle.step([response_of(r, cfg) for r in batch], cfg, None, 0.0)
    weights = [[w for w, _ in row] for row in result.weighed]
    keep = [[k > 0 for _, k in row] for row in result.weighed]
    masks = ["".join("01"[on] for on in row) for row in keep]
    return {
        "weight": weights,
        "keep": masks,
        "loss": result.loss,
        "grad": result.policy,
        "metrics": metrics(weights, keep),
    }


def response_of(r: dict, cfg) -> oracle.Response:
    """A response of a batch; its reward is its advantage."""
    tokens = []
    for t, flag in enumerate(r["mask"]):
        inf, ref, new = ([math.exp(x) for x in r["words"][policy][t]] for policy in ("inf", "ref", "new"))
        tokens.append(oracle.Token(0, flag == "1", r["draws"][t], inf, ref, new, inf, inf, start=new))
    return oracle.Response(r["group"], r["adv"], tokens)


def metrics(w: list[list[float]], keep: list[list[bool]]) -> dict:
    """Effective sample size of weight x keep over tokens; shares of tokens, and of responses with a token, rejected."""
    applied = [x * on for row, mask in zip(w, keep, strict=True) for x, on in zip(row, mask, strict=True)]
    squares = math.fsum(x * x for x in applied)
    tokens = [on for row in keep for on in row]
    responses = [row for row in keep if row]
    return {
        "rollout_is_eff_sample_size": math.fsum(applied) ** 2 / len(applied) / squares if squares else 0.0,
        "rollout_rs_masked_fraction": 1 - sum(tokens) / len(tokens),
        "rollout_rs_seq_masked_fraction": sum(not all(row) for row in responses) / len(responses),
    }


def main() -> None:
    batches = [json.loads(line) for line in (GOLDEN / "batches.jsonl").read_text(encoding="utf-8").splitlines()]
    values = []
    for batch in batches:
        for case in CASES:
            values.append(json.dumps({"case": case, "batch": batch["batch"], **evaluate(batch["responses"], case)}))
    (GOLDEN / "values.jsonl").write_text("\n".join(values) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
