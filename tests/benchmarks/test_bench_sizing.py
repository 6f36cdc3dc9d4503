"""`python -m bench.sizing`: docs/sizing.md has today's predictions, and they follow from what the model says."""

import re
from pathlib import Path

import pytest

from bench import sizing

PAGE = Path(__file__).parents[2] / "docs/sizing.md"


def cells(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_page_has_the_tables():
    page = PAGE.read_text()
    assert sizing.BEGIN + sizing.tables() + sizing.END in page
    rates = [f"{rate / 1e6:.0f} M" for rate in sizing.rates_of_a_core().values()]
    assert all(rate in page for rate in rates)
    assert sizing.RATES_OF_A_CORE.name in page


def test_every_figure_is_marked_as_predicted():
    lines = sizing.tables().splitlines()
    heads = [cells(line) for line in lines if line.startswith("| model")]
    assert len(heads) == len(sizing.MACHINES)
    inputs = {"model", "drives", "states"}
    assert all(("(predicted)" in head) == (head not in inputs) for row in heads for head in row)


def test_what_does_not_fit_has_no_figures():
    one, eight = sizing.MACHINES
    assert [sizing.rows(one, billions * 1e9)[0].count("no: ") for billions in sizing.MODELS] == [0, 0, 1, 1, 1]
    (row,) = sizing.rows(one, 13e9)
    assert cells(row) == ["13 B", "no: 26 GB of parameters"] + [""] * 6
    assert all(len(sizing.rows(eight, billions * 1e9)) == 4 for billions in sizing.MODELS)


def test_figures_follow_from_bytes_and_rates():
    """7 B parameters on Gen4 drives: 24 B each at the mixed rate, 12 B written, and as many cores as that takes."""
    found = [cells(row) for row in sizing.rows(sizing.MACHINES[0], 7e9)]
    seconds = 24 * 7e9 / (2 / (1 / 6.5e9 + 1 / 4e9))
    for drives, states, space, step, cores, written in (row[2:] for row in found):
        n = int(drives)
        if states == "fp32":
            assert float(step) == pytest.approx(seconds / n, rel=0.02)
            assert (space, written) == (f"{168 / n:.0f} GB", f"{84 / n:.1f} TB")
            assert int(cores) == -(-7e9 // (float(step) * sizing.rates_of_a_core()["fp32"]))
        else:
            assert float(step) < seconds / n / 2.5
            assert float(re.match(r"[\d.]+", written)[0]) == pytest.approx(35.1 / n, rel=0.01)
