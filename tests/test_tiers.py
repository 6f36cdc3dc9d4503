"""support/tiers.py: a sample leaves out only combinations that it contains elsewhere."""

import itertools

import pytest
from support.tiers import chosen

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
