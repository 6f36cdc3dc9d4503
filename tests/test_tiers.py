"""Tiers and their budgets: a sample leaves out only combinations that it contains elsewhere, and no folder is slow."""

import itertools
from collections import Counter

import pytest
from support.backends import TESTS
from support.tiers import LATER, chosen
from support.times import BUDGETS, over_budget, table

ARGUMENTS = {"backend": ["file", "ram", "mixed", "files"], "steps": [1, 2, 3], "exact": [True, False], "of": [[], []]}


class Case:
    """A stand-in for pytest's items."""

    def __init__(self, values):
        self.callspec = self
        self.params = dict(zip(ARGUMENTS, values, strict=True))


@pytest.mark.parametrize(("together", "least"), [(1, 4), (2, 12), (3, 24), (4, 48)])
def test_all_values_meet(together, least):
    """All values are sampled, in at most a third more cases than the minimum. True is not 1, and equal lists differ."""
    few = chosen([Case(values) for values in itertools.product(*ARGUMENTS.values())], together)
    assert least <= len(few) <= least * 4 / 3
    for names in itertools.combinations(ARGUMENTS, together):
        for values in itertools.product(*(ARGUMENTS[name] for name in names)):
            assert any(all(case.params[n] is v for n, v in zip(names, values, strict=True)) for case in few)


def test_a_folder_over_its_budget_is_named():
    times = {
        "store/test_a.py": Counter({"own CPU": BUDGETS["store"] - 1, "tests": 3}),
        "store/test_b.py": Counter({"others' CPU": 2, "tests": 4}),
        "params/test_c.py": Counter({"wall": 1000}),
    }
    [line] = over_budget(times)
    assert line.startswith(f"tests/store took {BUDGETS['store'] + 1} s of CPU time")
    assert any(line.split()[:2] == ["store", "7"] for line in table(times))


def test_every_folder_has_a_budget():
    folders = {path.parent.name for path in TESTS.glob("*/test_*.py")} - {*LATER}
    assert folders == {*BUDGETS}
