"""Text of the report: one function for each table. o: the report of probe.summarize, or of the
doctor, which has fewer numbers and no floor."""

from __future__ import annotations

from probe.floor import largest

# label, number of the report, its distance in the noise floor ("": none)
DISTANCES = (
    ("KL(inf || ref), nats a token: k1", "k1_kl", "k1"),
    ("KL(inf || ref), nats a token: k3", "k3_kl", "kl"),
    ("standard error of k3", "kl_error", ""),
    ("mean of r = p_ref / p_inf (floor: |mean - 1|)", "ratio_mean", "ratio"),
    ("chi2 of a token", "chi2_token", "chi2"),
    ("chi2 of a response", "chi2_seq", "chi2_seq"),
    ("ESS of token weights", "token_ess", ""),
    ("ESS of response weights", "seq_ess", ""),
    ("share of response weights at the clamp", "seq_clamped", ""),
    ("T_max = clamp / KL: |log R| reaches the clamp", "t_max", ""),
    ("tokens that halve the ESS of R, by chi2", "t_half", ""),
    ("|p_inf - p_ref|: mean", "mean_mismatch", "mean"),
    ("|p_inf - p_ref|: largest of a response", "max_mismatch", "max"),
    ("|p_inf - p_ref|: largest of all tokens", "largest_mismatch", ""),
    ("share of responses with a gap above 0.5", "above_half", ""),
    ("share of tokens cut by the learner", "cut_fraction", "cut"),
    ("share of responses tokenized differently", "retokenized", ""),
    ("reward of the sampler", "reward", ""),
    ("estimated reward of the learner", "reward_weighted", "reward"),
)


def text(o) -> str:
    """Text of the report."""
    tables = [models_text, distances_text, floor_text]
    tables += [turns_text] if o["by_turn"] else []
    tables += [lengths_text, prefixes_text, verdicts_text]
    tables += [] if o["ladder"] is None else [ladder_text, suspects_text]
    return "\n\n".join("\n".join(table(o)) for table in tables)


def models_text(o) -> list[str]:
    who = f"{o['sampler']} in {o['engine']} samples, {o['model']} in {o['learner']} learns"
    if o["lm_head_fp32"]:
        who += ", heads in float32"
    s = o["sampling"]
    return [
        who,
        f"   temperature {s['temperature']:g}, top_p {s['top_p']:g}, top_k {s['top_k']}, min_p {s['min_p']:g}, "
        f"sampling mask {s['keep_sampling_mask']}, {s['logprobs_mode']} log-probabilities",
        f"   {o['responses']} responses, {o['tokens']:,} tokens; length: mean {o['length']['mean']:.1f}, 95 % quantile "
        f"{o['length']['95 %']}, maximum {o['length']['max']}",
    ]


def distances_text(o) -> list[str]:
    floor = largest(o["floor"])
    lines = []
    for label, name, under in DISTANCES:
        if name in o:
            bound = f"   floor {floor[under]:.1g}" if under in floor else ""
            lines.append(f"{label:46s} {o[name]:10.4g}{bound}")
    return lines


HEADS = "   largest gap    mean gap    KL a token"  # of a row's `gaps.distances`


def row_text(row: dict) -> str:
    """The columns of HEADS."""
    return f"   {row['max']:11.3g} {row['mean']:11.3g} {row['kl']:13.3g}"


def floor_text(o) -> list[str]:
    """Distances of the learner from itself and of the engine from itself, by rounding."""
    lines = [f"the floor: against itself     tokens{HEADS}  chi2 a token  chi2 a response"]
    for row in o["floor"]:
        chi2 = f"{row['chi2']:13.2g} {row['chi2_seq']:16.2g}"
        lines.append(f"   {row['name']:26s} {row['tokens']:6d}{row_text(row)} {chi2}")
    return lines


def turns_text(o) -> list[str]:
    lines = [f"turn    sampled tokens{HEADS}"]
    return lines + [f"{x['turn']:4d} {x['tokens']:17d}{row_text(x)}" for x in o["by_turn"]]


def lengths_text(o) -> list[str]:
    lines = [f"length          responses{HEADS}"]
    for row in o["by_length"]:
        lines.append(f"{row['from']:5d} - {row['to']:<7d} {row['responses']:9d}{row_text(row)}")
    return lines


def prefixes_text(o) -> list[str]:
    lines = ["after tokens    responses    ESS of R    R < 1/4    clamped"]
    for row in o["by_prefix"]:
        lines.append(
            f"{row['tokens']:12d} {row['responses']:12d} {row['ess']:11.3f} "
            f"{100 * row['low_weight']:8.1f} % {100 * row['clamped']:8.1f} %"
        )
    return lines


def verdicts_text(o) -> list[str]:
    lines = ["is the variance of the weights small at these lengths? (worth.py measures gradients)"]
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
    fault = f"{first['fault']} {first['where']}".strip()
    lines = [f"remainder: {fault if first['named'] else 'no known fault explains it'}"]
    for row in suspects[:5]:
        lines.append(
            f"   {100 * row['explained']:6.1f} +- {100 * row['se']:.1f} %  {row['fault']}  {row['where']}"
        )
    if not any(row["fault"] == "stale weights" for row in suspects):
        lines.append("   (stale weights were not tested: name older weights with --synced_from)")
    return lines
