"""Make the table and plot of results/conformance.json: differences of the frameworks from the golden values.

    python results/conformance.py                # table and plot; tests/tools/conform.py writes the JSON file

For each framework the file has the largest relative difference of weight, mask, loss and gradient of each case
(0: below 1e-6; -: not returned) and the function called. It has the same for verl's logged metrics."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from machinery.flags import run_command
from results import sweep

PARTS = ("weight", "mask", "loss", "gradient")


def table(data: dict) -> str:
    """The table of the page: one line for each framework, then one line for each case that differs."""
    rows = []
    for name, record in data.items():
        cases = record["cases"]
        same = sum(agrees(cells) for cells in cases.values())
        rows.append([f"**{name}**: {same} of {len(cases)} cases agree"])
        rows += [[f"`{case}`", *cells[:4]] for case, cells in cases.items() if not agrees(cells)]
    return sweep.markdown(["case", *PARTS], rows)


def agrees(cells: list[str]) -> bool:
    """Whether each returned quantity is within 1e-6 of the golden values."""
    return set(cells[:4]) <= {"0", "-"}


def draw(data: dict) -> None:
    """Plot for each framework and quantity how many cases agree and how many differ."""
    plt = sweep.pyplot()
    fig, axes = plt.subplots(1, len(data), figsize=(10, 2.4), layout="constrained", sharey=True)
    for ax, (name, record) in zip(axes, data.items(), strict=True):
        columns = [
            [cells[i] for cells in record["cases"].values() if cells[i] != "-"]
            for i in range(len(PARTS))
        ]
        same, differ = [
            [sum((x == "0") == yes for x in column) for column in columns] for yes in (True, False)
        ]
        ax.barh(PARTS, same, color=sweep.COLOURS[1], label="agree")
        ax.barh(PARTS, differ, left=same, color=sweep.COLOURS[0], label="differ")
        ax.set(title=name, xlabel="cases")
    axes[0].legend(fontsize=8)
    sweep.save(fig, sweep.RESULTS / "conformance.png")


def write() -> None:
    """Write the table and the plot."""
    data = sweep.load("conformance")
    sweep.rewrite("conformance", table(data))
    draw(data)
    print(table(data))


if __name__ == "__main__":
    sweep.no_arguments("conformance")
    run_command(write)
