"""The claims of every study in one place: gathers the first table of each page into results/README.md.

python results/index.py             # rewrite what stands below the marker of results/README.md, and the counts above it
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import sweep

from flags import need, read_text

STUDIES = (
    "figure2ab",
    "table1",
    "table2_3",
    "table6_10",
    "text_settings",
    "figure2c",
    "lowbit",
    "praxis",
    "aligned",
    "moe",
    "qarl",
    "theorem1",
    "heterorl",
    "pace",
    "search",
    "bounds",
    "prefix",
    "foretell",
    "map",
    "length",
    "collapse",
    "ladder",
    "zero",
)
VERDICTS = (
    ("reproduced", "shown"),
    ("in part",),
    ("not reproduced", "not shown"),
    ("cannot be tested", "out of reach"),
)


@dataclass(frozen=True)
class IndexFlags:
    """No flags"""


def claims_of(name: str) -> list[str]:
    """The table of claims of a page, line by line."""
    lines = read_text(sweep.RESULTS / f"{name}.md").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("| claim | verdict |")]
    need(starts, f"results/{name}.md: no table of claims; add a line that begins with | claim | verdict |")
    rest = lines[starts[0] :]
    return rest[: next((i for i, line in enumerate(rest) if not line.startswith("|")), len(rest))]


def counts_of(name: str) -> str:
    """How many claims of a page have each kind of verdict: "2, 1, 1, 0"."""
    counts = dict.fromkeys(VERDICTS, 0)
    for line in claims_of(name)[2:]:
        verdict = line.split(" | ")[1]
        kind = next((kind for kind in VERDICTS if verdict.startswith(kind)), None)
        need(kind, f"results/{name}.md: a verdict is {verdict!r}; begin it with one of {'; '.join(sum(VERDICTS, ()))}")
        counts[kind] += 1
    return ", ".join(map(str, counts.values()))


def study(flags: IndexFlags) -> None:
    path = sweep.RESULTS / "README.md"
    text = read_text(path)
    for name in STUDIES:
        text = re.sub(rf"\| [\d, ]+ \| \[{name}\]", f"| {counts_of(name)} | [{name}]", text)
    path.write_text(text, encoding="utf-8")
    parts = ["Written by `python results/index.py` from the tables that open the pages.\n"]
    for name in STUDIES:
        parts += [f"### [{name}]({name}.md): `python results/{name}.py`\n", "\n".join(claims_of(name)) + "\n"]
    sweep.rewrite("README", "\n".join(parts))


if __name__ == "__main__":
    sweep.main(study, __doc__, IndexFlags)
