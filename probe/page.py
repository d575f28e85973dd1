"""Text of the report: sections of lines; TABLES has the head and the row of each simple table. o:
the report of probe.summarize, or of the doctor, which has fewer numbers and no floor."""

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
    ("tokens that halve the ESS of R", "t_half", ""),
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
    """Text of the report of probe.summarize."""
    sections = [models_text(o), *tables(o)]
    if o["ladder"] is not None:
        sections += [ladder_text(o), suspects_text(o)]
    return "\n\n".join("\n".join(lines) for lines in sections)


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


def gaps(row: dict) -> str:
    """The columns of HEADS."""
    return f"   {row['max']:11.3g} {row['mean']:11.3g} {row['kl']:13.3g}"


HEADS = "   largest gap    mean gap    KL a token"  # of a row's `gaps.distances`
# rows of the report -> head of their table, text of a row
TABLES = {
    "floor": (
        f"the floor: against itself     tokens{HEADS}  chi2 a token  chi2 a response",
        lambda x: (
            f"   {x['name']:26s} {x['tokens']:6d}{gaps(x)} {x['chi2']:13.2g} {x['chi2_seq']:16.2g}"
        ),
    ),
    "by_turn": (
        f"turn    sampled tokens{HEADS}",
        lambda x: f"{x['turn']:4d} {x['tokens']:17d}{gaps(x)}",
    ),
    "by_length": (
        f"length          responses{HEADS}",
        lambda x: f"{x['from']:5d} - {x['to']:<7d} {x['responses']:9d}{gaps(x)}",
    ),
    "by_prefix": (
        "after tokens    responses    ESS of R    R < 1/4    clamped",
        lambda x: (
            f"{x['tokens']:12d} {x['responses']:12d} {x['ess']:11.3f} "
            f"{100 * x['low_weight']:8.1f} % {100 * x['clamped']:8.1f} %"
        ),
    ),
    "verdicts": (
        "is the variance of the weights small at these lengths? (worth.py measures gradients)",
        lambda x: (
            f"   {'yes' if x['viable'] else 'no '}  {x['correction']:14s} {x['why']}"
        ),
    ),
    "largest": (
        "largest gaps: response, place, token, p of sampler and trainer",
        lambda x: (
            f"   {x['response']:6d} {x['place']:6d} {'-' if x['token'] is None else x['token']:>8} "
            f"{x['p_sampler']:10.4f} {x['p_trainer']:10.4f}"
        ),
    ),
}


def tables(o) -> list[list[str]]:
    """Lines of the distances, and of each table that has rows."""
    sections = [distances_text(o)]
    for name, (head, line) in TABLES.items():
        if o.get(name):
            sections.append([head, *map(line, o[name])])
    return sections


def ladder_text(o) -> list[str]:
    """Each source's share of the three measures."""
    ladder = o["ladder"]
    total = ladder["total"]
    heads = ("KL a token", "|dp| a token", "var(R) of responses")
    title = "mismatch by source " + "".join(f"{head:^34s}" for head in heads)
    if ladder["responses"] < o["responses"]:
        title += f"  ({ladder['responses']} of {o['responses']} responses)"
    lines = [title]
    for row in ladder["rows"]:
        shares = "".join(share_text(row[name], total[name]) for name in total)
        lines.append(f"   {row['source']:19s}{shares}")
    for name, values in (("total", total), ("the floor", ladder["floor"])):
        numbers = "".join(f"{values[measure]:8.2g}{'':26s}" for measure in total)
        lines.append(f"   {name:19s}{numbers}")
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
    return lines
