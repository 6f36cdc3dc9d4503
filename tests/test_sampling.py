"""What is left out every day is only what has been met: support/sampling.py."""

import itertools

import pytest
from support.sampling import chosen

ARGUMENTS = {"backend": ["file", "ram", "mixed", "files"], "steps": [1, 2, 3], "exact": [True, False], "of": [[], []]}


class Case:
    """What there is of an item of pytest's."""

    def __init__(self, values):
        self.callspec = self
        self.params = dict(zip(ARGUMENTS, values, strict=True))


@pytest.mark.parametrize(("together", "least"), [(1, 4), (2, 12), (3, 24), (4, 48)])
def test_all_values_meet(together, least):
    """In no more cases than a third above the fewest that there can be. True is not 1, nor is one list the other."""
    few = chosen([Case(values) for values in itertools.product(*ARGUMENTS.values())], together)
    assert least <= len(few) <= least * 4 / 3
    for names in itertools.combinations(ARGUMENTS, together):
        for values in itertools.product(*(ARGUMENTS[name] for name in names)):
            assert any(all(case.params[n] is v for n, v in zip(names, values, strict=True)) for case in few)
