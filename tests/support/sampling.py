"""Which cases of a test are run every day, where all of them would prove the same over and over: the rest is for soak.

A test with @pytest.mark.sampled(together=2) has cases in which any two values of its arguments meet; together=1: each
value is in one. Named alone, any case is run.
"""

import itertools

import pytest
import torch

SIMPLE = (str, int, float, torch.dtype)  # of these, what is equal is the same in all tests


def values(item):
    """Its arguments: name, type and value of each, or which object it is."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {(name, type(v), v if isinstance(v, SIMPLE) else id(v)) for name, v in params.items()}


def leave_the_rest_to_soak(items):
    tests = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark and not item.get_closest_marker("soak"):
            tests.setdefault((item.path, item.originalname, mark.kwargs["together"]), []).append(item)
    for (_, _, together), cases in tests.items():
        for item in set(cases) - chosen(cases, together):
            item.add_marker(pytest.mark.soak)


def chosen(cases, together):
    """So few that any `together` values that meet in a case meet in one of these: always the one with most new ones."""
    met = {}
    for item in cases:
        of = sorted(values(item), key=lambda value: value[0])
        met[item] = {*itertools.combinations(of, min(together, len(of)))}
    left, taken = set().union(*met.values()), set()
    while left:
        best = max(cases, key=lambda item: len(met[item] & left))
        taken.add(best)
        left -= met[best]
    return taken
