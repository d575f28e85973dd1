"""Built-in parts of rewards: (row, text, finish_reason) -> a number. They read only the answer of
the row."""

from __future__ import annotations

import re


def math_answer(row, text, finish_reason) -> bool:
    """Does the response's final answer equal the gold one? It may take for ever: the pool knows how
    to end it.

    math-verify looks at \\boxed{} first, then at the last expression. sympy tries numbers of its
    own at random: with a seed for each answer, the verdict does not depend on the answers
    before."""
    import sympy.core.random
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    sympy.core.random.seed(0)
    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    gold = parse(f"\\boxed{{{row['answer']}}}", extraction_config=configs, parsing_timeout=None)
    parsed = parse(text, extraction_config=configs, parsing_timeout=None)
    return bool(verify(gold, parsed, timeout_seconds=None))


def gsm8k(row, text, finish_reason) -> bool:
    """Is the number behind the last #### the gold one? GSM8K's own rule: equal texts, commas
    aside."""
    answers = re.findall(HASHES, text)
    return bool(answers) and plain_number(answers[-1]) == plain_number(row["answer"])


def praxis(row, text, finish_reason) -> bool:
    """The gate of Mismatch Praxis: one line with ####, and the right number there (`Reward` adds
    the bonus)."""
    return text.count("####") == 1 and gsm8k(row, text, finish_reason)


def letter(row, text, finish_reason) -> bool:
    """Multiple choice: is the letter in the last box, or else behind the last "answer is", the
    right one?"""
    box = last_box(text)
    letters = re.findall(IN_BOX, box) if box else re.findall(ANSWER_IS, text)
    return bool(letters) and letters[-1].upper() == row["answer"].upper()


def boxed(row, text, finish_reason) -> bool:
    """A format: the response holds exactly one box, whole, and ended by itself."""
    return (
        finish_reason == "stop"
        and len(re.findall(r"\\boxed\s*\{", text)) == 1
        and last_box(text) is not None
    )


def think(row, text, finish_reason) -> bool:
    """A format: <think> reasoning </think> <answer> answer </answer>, and nothing else
    (DeepSeek-R1)."""
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    form = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*"
    return (
        all(text.count(tag) == 1 for tag in tags)
        and re.fullmatch(form, text, re.DOTALL) is not None
    )


BUILT_IN = {
    "math": math_answer,
    "gsm8k": gsm8k,
    "praxis": praxis,
    "letter": letter,
    "boxed": boxed,
    "think": think,
}
FORMATS = ("boxed", "think")  # they look at the response alone
# how each wants the answer, where --prompt_template does not say (tasks/prompts.py)
TEMPLATE_OF = {
    "math": "boxed",
    "boxed": "boxed",
    "gsm8k": "hashes",
    "praxis": "hashes",
    "letter": "letter",
}
HASHES = r"####\s*(-?\$?[0-9][0-9.,]*)"
SIGNS = r"(?:\\(?:text|math|bold)[a-z]*|\\?[\s{($,;!*:])*(?:[Oo]ption\s+|[Cc]hoice\s+)?\(?"  # in front of a letter
IN_BOX = rf"^\\boxed{SIGNS}([A-Za-z])\b"
ANSWER_IS = rf"(?i:answer)[\s*]*(?:is\b|:){SIGNS}([A-Z])\b"


def loaded(name: str):
    """A built-in part, with the libraries it needs loaded."""
    function = BUILT_IN[name]
    function({"answer": "1"}, "\\boxed{1}", "stop")
    return function


def plain_number(text: str) -> str:
    """1,200. and $1200 as 1200."""
    return text.strip().replace(",", "").replace("$", "").rstrip(".")


def last_box(text: str) -> str | None:
    """The last \\boxed{...} of a response, whole; None if there is none, or if the last one is cut
    short or empty.

    Its braces are counted; a brace behind a backslash, as in \\{1, 2\\}, is a sign and not
    counted."""
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
