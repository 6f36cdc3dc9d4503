"""Chooses the cases of a test that run every day, if all of them would prove little more; `make soak` runs the rest.

A test with @pytest.mark.sampled(together=2) runs cases in which any two values of its arguments occur together; with
together=1, cases in which each value occurs. A case named on the command line always runs.
"""

import itertools

import pytest
import torch

SIMPLE = (str, int, float, torch.dtype)  # types whose equal values count as the same value in all tests


def values(item):
    """Return the test's arguments: name, type, and value, or identity if its type is not simple."""
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
    """Return few cases that contain every combination of `together` values which occurs in any case.

    A greedy choice: always the case with the most new combinations.
    """
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
