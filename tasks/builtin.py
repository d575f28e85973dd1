"""Built-in parts of rewards: (row, text, finish_reason) -> a number. They read only the row's
answer."""

from __future__ import annotations

import functools
import re
from decimal import Decimal, InvalidOperation


def math_answer(row, text, finish_reason) -> bool:
    """Whether the response's final answer equals the gold answer, by math-verify.

    math-verify reads \\boxed{} first, then the last expression. It may not terminate; the grading
    process then hits its time limit. sympy draws random numbers, so it is seeded for each answer,
    and the result does not depend on earlier answers."""
    import sympy.core.random
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    sympy.core.random.seed(0)
    answer = row["answer"]
    box = last_box(text)
    if re.search(ELLIPSIS, answer + (box or "")):  # math-verify ignores ellipses
        response = box[len("\\boxed{") : -1] if box else text
        return without_dress(response) == without_dress(answer)
    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    gold, parsed = (
        parse(plain_numbers(x), extraction_config=configs, parsing_timeout=None)
        for x in (f"\\boxed{{{answer}}}", text)
    )
    # 1 = 2
    claims = [
        e for x in parsed if isinstance(x, sympy.Basic) for e in x.atoms(sympy.Eq)
    ]
    return (
        bool(grader().verify(gold, parsed, timeout_seconds=None))
        and repeated(gold) == repeated(parsed)
        and not any(far_apart(e.lhs, e.rhs) for e in claims if not e.free_symbols)
    )


def plain_numbers(text: str) -> str:
    """The text with numbers in forms that math-verify reads: no full stop at the end of a box, no
    space before thousands, mixed numbers as sums (it reads 1 1/4 as 11/4), and repeating
    decimals as fractions."""

    def fraction(match) -> str:
        integer, digits, period = match.groups()
        above = int(integer + digits + period) - int(integer + digits or 0)
        return f"\\frac{{{above}}}{{{'9' * len(period) + '0' * len(digits)}}}"

    text = re.sub(
        r"(?<=\d)(?:\.(?=\s*\}$)|(?:\\[,!]|[ ~])(?=\d{3}(?![\d/])))", "", text
    )
    text = re.sub(r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\{([0-9]+)\}", fraction, text)
    return re.sub(MIXED, r"\1(\2 + \3/\4)", text)


@functools.cache
def grader():
    """math-verify's grader. Its absolute tolerance, under which all tiny numbers are equal, is
    replaced by `far_apart`."""
    from math_verify import grader

    equal = grader.sympy_numeric_eq
    grader.sympy_numeric_eq = lambda a, b, *digits: (
        equal(a, b, *digits) and not far_apart(a, b)
    )
    return grader


def far_apart(*pair) -> bool:
    """Whether the constant terms of two expressions are real and differ by more than 1 %."""
    import sympy

    exact = [x for x in pair if isinstance(x, sympy.Expr)]  # no matrices
    terms = [x.as_independent(*x.free_symbols, as_Add=True)[0] for x in exact]
    real = [x for x in terms if x.is_extended_real and x.is_finite]
    return len(real) == 2 and bool(
        abs(real[0] - real[1]) > sympy.Max(*map(abs, real)) / 100
    )


def repeated(parsed: list) -> int:
    """Number of repeated elements of a list such as 5, 5, which math-verify reads as a set."""
    if len(parsed) < 2 or type(parsed[0]).__name__ != "FiniteSet":
        return 0
    parts = re.split(
        "[,;]", re.sub(r"[(\[][^()\[\]]*[)\]]|,(?=\d{3}(?!\d))", "x", parsed[1])
    )
    return max(0, sum(map(bool, map(str.strip, parts))) - len(parsed[0]))


def without_dress(text: str) -> str:
    """A text without spaces and dollar signs, with every ellipsis written as three dots."""
    return re.sub(r"[\s$]|\\[,;! ]", "", re.sub(ELLIPSIS, "...", text))


def gsm8k(row, text, finish_reason) -> bool:
    """Whether the line after the last #### has the gold answer as its only number. 3, +3, 3.0, $3,
    **3**, x = 3 are equal."""
    behind = [part for part in text.split("####")[1:] if part.strip()]
    answer = re.match(HASHES, behind[-1].lstrip()) if behind else None
    return answer is not None and plain_number(answer[1]) == plain_number(row["answer"])


def praxis(row, text, finish_reason) -> bool:
    """The gate of Mismatch Praxis: exactly one ####, followed by the right number (`Reward` adds
    the bonus)."""
    return text.count("####") == 1 and gsm8k(row, text, finish_reason)


def letter(row, text, finish_reason) -> bool:
    """Multiple choice: whether the letter in the last box, or else after the last "answer is", is
    right."""
    box = last_box(re.sub(r"\\(?:text|math|bold)[a-z]*", "", text))
    letters = re.findall(IN_BOX, box) if box else re.findall(ANSWER_IS, text)
    return bool(letters) and letters[-1].upper() == row["answer"].upper()


def boxed(row, text, finish_reason) -> bool:
    """A format: the response has exactly one complete box, and ended with a stop token."""
    one_box = len(re.findall(r"\\boxed\s*\{", text)) == 1
    return finish_reason == "stop" and one_box and last_box(text) is not None


def think(row, text, finish_reason) -> bool:
    """A format: <think> reasoning </think> <answer> answer </answer>, and nothing else
    (DeepSeek-R1)."""
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    form = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*"
    once = all(text.count(tag) == 1 for tag in tags)
    return once and re.fullmatch(form, text, re.DOTALL) is not None


BUILT_IN = {
    "math": math_answer,
    "gsm8k": gsm8k,
    "praxis": praxis,
    "letter": letter,
    "boxed": boxed,
    "think": think,
}
FORMATS = ("boxed", "think")  # parts that read only the response
# default --prompt_template of each part (tasks/prompts.py)
TEMPLATE_OF = {
    "math": "boxed",
    "boxed": "boxed",
    "gsm8k": "hashes",
    "praxis": "hashes",
    "letter": "letter",
}
# possessive: no part of 3,4; few blanks, because a long run of them takes quadratic time
NUMBER = r"[-+−–]?[\s$€£\\]{0,9}(?:[0-9]{1,3}(?:[, ][0-9]{3})++(?:\.[0-9]*+)?|[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)"
# a number with no second number, factorial, or single letter behind it on its line
HASHES = (
    rf"(?:\s*[A-Za-z]?\s*=|\\boxed|[\s*$\\({{])*({NUMBER})"
    r"(?!!|\s*(?:[×·√]|[xyz]\b)|[^\W\d_](?![^\W\d_])|[^\n]*[\d²³¹¼-¾])"
)
ELLIPSIS = r"\\(?:l|c|d)?dots[cbmio]?\b|\.\.\.|…"
MIXED = r"(?<![\w./^}])(-?)(\d+)(?:[ ~]|\\[ ,;])+(\d+)/(\d+)(?![\w./^])"
# signs before a letter
SIGNS = (
    r"(?:\\(?:text|math|bold)[a-z]*|\\?[\s{($,;!*:])*(?:[Oo]ption\s+|[Cc]hoice\s+)?\(?"
)
# no second letter, and not the word A or I
ALONE = (
    r"\b(?! +[B-HJ-Z]\b)(?![^\w\n]*(?:[,;/&]|or\b|and\b)[^\w\n]*[A-HJ-Z]\b)"
    r"(?!(?<=[AIai])\s+(?!(?:because|since|as|is|which|for|and|but)\b)[a-z])"
)
IN_BOX = rf"^\\boxed{SIGNS}([A-Za-z]){ALONE}"
ANSWER_IS = rf"(?i:answer)[\s*]*(?:is\b|:){SIGNS}([A-Z]){ALONE}"


def plain_number(text: str) -> Decimal | str:
    """The Decimal of a text such as 1,200. or $1200.00 or -3 or .5; the text if it is no number."""
    digits = (
        re.sub(r"[\s,$€£\\*+]", "", text)
        .replace("−", "-")
        .replace("–", "-")
        .rstrip(".")
    )
    try:
        return Decimal(digits)
    except InvalidOperation:
        return digits


def last_box(text: str) -> str | None:
    """The last \\boxed{...} of a response; None if there is no box, or if the last box is
    incomplete or empty.

    Braces are matched; a brace after a backslash, as in \\{1, 2\\}, is ignored."""
    starts = [match.end() for match in re.finditer(r"\\boxed\s*\{", text)]
    if not starts:
        return None
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[starts[-1] :], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            inside = text[starts[-1] : starts[-1] + match.start()]
            return f"\\boxed{{{inside}}}" if inside.strip() else None
    return None
