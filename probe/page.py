"""Text of the report: one function for each table. o: the report of probe.summarize. The doctor's
report has no floor."""

from __future__ import annotations

import math

from probe.floor import largest


def with_format(name: str, quant: str) -> str:
    """A name, followed by its low-bit format, if any."""
    return name if quant == "none" else f"{name} {quant}"


def text(o) -> str:
    """Text of the report."""
    tables = [
        models_text,
        distances_text,
        floor_text,
        *([turns_text] if o["by_turn"] else []),
        lengths_text,
        prefixes_text,
        verdicts_text,
    ]
    if o["ladder"] is not None:
        tables += [ladder_text, suspects_text]
    parts = [table(o) for table in tables]
    return "\n\n".join("\n".join(lines) for lines in parts)


def models_text(o) -> list[str]:
    who = f"{o['sampler']} in {o['engine']} samples, {o['model']} in {o['learner']} learns"
    if o["lm_head_fp32"]:
        who += ", heads in float32"
    s = o["sampling"]
    return [
        who,
        f"   temperature {s['temperature']:g}, top_p {s['top_p']:g}, top_k {s['top_k']}, min_p {s['min_p']:g}, "
        f"kept sets {s['keep_sampling_mask']}, {s['logprobs_mode']} log-probabilities",
        f"   {o['responses']} responses, {o['tokens']:,} tokens; length: mean {o['length']['mean']:.1f}, 95 % quantile "
        f"{o['length']['95 %']}, maximum {o['length']['max']}",
    ]


def distances_text(o) -> list[str]:
    floor = largest(o["floor"])
    kl = f"{o['k1_kl']:.3g} by k1 (floor {floor['k1']:.1g}), "
    kl += f"{o['k3_kl']:.3g} by k3 (floor {floor['kl']:.1g}) nats a token"
    ratio = f"mean {o['ratio_mean']:.4f} (floor 1 +- {floor['ratio']:.1g})"
    if o["cut_fraction"]:
        ratio += f"; {100 * o['cut_fraction']:.2f} % of the sampled tokens cut by the learner"
        ratio += f" (floor {100 * floor['cut']:.2f} %)"
    chi2 = f"{o['chi2_token']:.3g} a token (floor {floor['chi2']:.1g}), "
    chi2 += f"{o['chi2_seq']:.3g} a response (floor {floor['chi2_seq']:.1g})"
    effective = f"{o['token_ess']:.3f} of the tokens (floor {ess_floor(floor['chi2'])}), "
    effective += f"{o['seq_ess']:.3f} of the responses (floor {ess_floor(floor['chi2_seq'])})"
    if o["seq_clamped"] > 0.5:
        effective += " (false: they are clamped)"
    kl_floor = max(floor["k1"], floor["kl"])
    end = o["clamp"] / kl_floor if kl_floor else math.inf
    t_max = f"{o['t_max']:,.0f} tokens (floor {end:,.0f})"
    t_max += ": clamp / KL, the length at which sequence weights reach the clamp"
    if o["t_half"] < math.inf:
        t_max += f"; their ESS is halved every {o['t_half']:,.0f}, by chi2"
    gap = f"{o['max_mismatch']:.3g} largest of a response (floor {floor['max']:.1g}), {o['mean_mismatch']:.3g} mean"
    return [
        f"|p_inf - p_ref|    {gap} (floor {floor['mean']:.1g})",
        f"                   {o['largest_mismatch']:.3g} largest of all tokens, above 0.5 in "
        f"{100 * o['above_half']:.1f} % of the responses",
        f"KL(inf || ref)     {kl}",
        f"r = p_ref / p_inf  {ratio}",
        f"chi2               {chi2}",
        f"ESS                {effective}",
        f"T_max              {t_max}",
        (
            f"tokenization       {100 * o['retokenized']:.1f} % of the responses would be tokenized differently "
            "from their text"
        ),
        f"reward             {o['reward']:.3f} earned by the sampler, {o['reward_weighted']:.3f} estimated "
        f"for the learner (floor +- {floor['reward']:.1g})",
    ]


def ess_floor(chi2: float) -> str:
    """The ESS of a weight with mean 1: 1 / (1 + chi2) of its samples; near 1 as 1 - the lost
    share."""
    return f"1 - {chi2 / (1 + chi2):.1g}" if chi2 < 0.05 else f"{1 / (1 + chi2):.2g}"


def floor_text(o) -> list[str]:
    """Distances of the learner from itself and of the engine from itself, by rounding."""
    distances = "largest gap    mean gap    KL a token  chi2 a token  chi2 a response"
    lines = [f"the floor: against itself     tokens   {distances}"]
    for row in o["floor"]:
        numbers = f"{row['max']:11.2g} {row['mean']:11.2g} {row['kl']:13.2g} {row['chi2']:13.2g}"
        numbers += f" {row['chi2_seq']:16.2g}"
        lines.append(f"   {row['name']:26s} {row['tokens']:6d}   {numbers}")
    return lines


def turns_text(o) -> list[str]:
    lines = ["turn    sampled tokens   largest gap    mean gap    KL a token"]
    for row in o["by_turn"]:
        lines.append(
            f"{row['turn']:4d} {row['tokens']:17d}   {row['largest_mismatch']:11.3g} "
            f"{row['mean_mismatch']:11.3g} {row['kl']:13.3g}"
        )
    return lines


def lengths_text(o) -> list[str]:
    lines = ["length          responses   largest gap    mean gap    KL a token"]
    for row in o["by_length"]:
        lines.append(
            f"{row['from']:5d} - {row['to']:<7d} {row['responses']:9d}   "
            f"{row['max_mismatch']:11.3g} {row['mean_mismatch']:11.3g} {row['kl']:13.3g}"
        )
    if "floor" in o:
        floor = largest(o["floor"])
        numbers = f"{floor['max']:11.2g} {floor['mean']:11.2g} {floor['k1']:13.2g}"
        lines.append(f"the floor {'':18s} {numbers}")
    return lines


def prefixes_text(o) -> list[str]:
    lines = ["after tokens    responses    ESS of R    R < 1/4    clamped"]
    for row in o["by_prefix"]:
        lines.append(
            f"{row['tokens']:12d} {row['responses']:12d} {row['ess']:11.3f} "
            f"{100 * row['low_weight']:8.1f} % {100 * row['clamped']:8.1f} %"
        )
    floor = largest(o["floor"])
    return [
        *lines,
        f"the floor, whole responses {ess_floor(floor['chi2_seq']):>9s}   "
        f"log R at most {floor['log_R']:.1g} (log 4 is 1.4)",
    ]


def verdicts_text(o) -> list[str]:
    lines = [
        "are weights even at these lengths? (noise of the weights; worth.py measures gradients)"
    ]
    for row in o["verdicts"]:
        viable = "yes" if row["viable"] else "no "
        lines.append(f"   {viable}  {row['correction']:14s} {row['why']}")
    return lines


def ladder_text(o) -> list[str]:
    """Each source's share of the three measures."""
    heads = "".join(
        f"{head:^34s}" for head in ("KL a token", "|dp| a token", "var(R) of responses")
    )
    if o["ladder"]["responses"] < o["responses"]:
        heads += f"  ({o['ladder']['responses']} of {o['responses']} responses)"
    lines = [f"mismatch by source {heads}"]
    total = o["ladder"]["total"]
    for row in o["ladder"]["rows"]:
        lines.append(
            f"   {row['source']:19s}"
            + "".join(share_text(row[name], total[name]) for name in total)
        )
    lines.append(f"   {'total':19s}" + "".join(f"{x:8.2g}{'':26s}" for x in total.values()))
    lines.append(
        f"   {'the floor':19s}"
        + "".join(f"{o['ladder']['floor'][name]:8.2g}{'':26s}" for name in total)
    )
    return lines


def share_text(x: dict, total: float) -> str:
    """A share, its 95 % interval, and its percentage of the total."""
    between = f"[{x['low']:.1e}, {x['high']:.1e}]"
    part = f"{100 * x['share'] / total:4.0f} %" if total else f"{'':6s}"
    return f"{x['share']:8.2g} {between:18s}{part} "


def suspects_text(o) -> list[str]:
    """The faults that explain the largest parts of the remainder."""
    suspects = o["ladder"]["suspects"]
    if not suspects:
        return ["the remainder is rounding, so there is no search for a fault"]
    first = suspects[0]
    named = f"{first['fault']} {first['where']}".strip()
    is_named = first["certain"] or first["explained"] > 0.5
    lines = [f"remainder: {named}" if is_named else "remainder: no known fault explains it"]
    for row in suspects[:5]:
        lines.append(
            f"   {100 * row['explained']:6.1f} +- {100 * row['se']:.1f} %  {row['fault']}  {row['where']}"
        )
    if not any(row["fault"] == "stale weights" for row in suspects):
        lines.append("   (stale weights were not tested: name older weights with --synced_from)")
    return lines
