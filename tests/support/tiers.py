"""Which tests run in which tier: `make quick`, `make test`, `make ci`, `make soak`. Each contains the one before it.

quick   one back end, in one process: what somebody wants to know who has just cloned the repository
test    every back end; of a test with many cases those in which each value of an argument occurs
ci      everything but what takes too long for every change
soak    everything

A test with @pytest.mark.sampled(together=2) has in `ci` only cases in which any two values of its arguments occur
together. Tests marked `ci` or `soak` begin with that tier. A sample is one of the cases that pytest has collected, so
that a case named on the command line runs.
"""

import itertools
from types import ModuleType

import torch

TIERS = ("quick", "test", "ci", "soak")
SIMPLE = (str, int, float, torch.dtype)  # types whose equal values count as the same value in all tests

LATER = ("benchmarks", "ecosystem")  # folders that begin with `ci`: every bench, snippet of a page, and trainer
QUICK = ("cli", "engine", "optim", "params", "planning", "step", "store")  # folders
# A test file that uses one of these runs its tests, or parts of them, in other processes.
PROCESSES = ("multiprocessing", "subprocess", *(f"support.{name}" for name in ("beside", "faulty", "forked", "ranks")))


def of_tier(items, tier):
    """Return the tests of a tier, as a set."""
    if tier == "soak":
        return {*items}
    items = [item for item in items if not item.get_closest_marker("soak")]
    if tier == "ci":
        return sampled(items, lambda marked: marked.kwargs["together"] if marked else None)
    items = [item for item in items if not item.get_closest_marker("ci") and item.path.parent.name not in LATER]
    few = sampled(items, lambda _: 1)
    return {item for item in few if is_quick(item)} if tier == "quick" else few


def is_quick(item):
    on_file = ("backend", str, "file") in values(item) or "backend" not in item.fixturenames
    return (
        item.path.parent.name in QUICK
        and on_file
        and not (item.get_closest_marker("serial") or item.get_closest_marker("signals"))
        and not starts_processes(item.module)
    )


def starts_processes(module):
    def origin(value):
        return value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)

    return any(origin(value) in PROCESSES for value in vars(module).values())


# ---- samples of a test's cases ----------------------------------------------------------------


def values(item):
    """Return the test's arguments: name, type, and value, or identity if its type is not simple."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {(name, type(v), v if isinstance(v, SIMPLE) else id(v)) for name, v in params.items()}


def sampled(items, together):
    """Return a sample of each test's cases, as a set.

    `together`: from the test's mark `sampled`, or None, how many values have to occur together in a case; None: all.
    """
    tests, kept = {}, set()
    for item in items:
        tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        few = together(cases[0].get_closest_marker("sampled"))
        kept |= {*cases} if few is None else chosen(cases, few)
    return kept


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
