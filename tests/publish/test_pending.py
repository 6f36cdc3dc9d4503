"""The version in the making alone: all transitions of its phase, and number, base and kind of the next version."""

import itertools

import pytest

from csd_optim.publish.pending import NextVersion, PendingVersion, VersionPhase

ORDER = ["UNDER_WAY", "DUE", "WRITTEN", "CONFIRMED", "NAMED"]
ALLOWED = {*itertools.pairwise(ORDER), *((phase, "GIVEN_UP") for phase in [*ORDER[:-1], "GIVEN_UP"])}


@pytest.mark.parametrize("now", VersionPhase, ids=lambda phase: phase.name)
@pytest.mark.parametrize("then", VersionPhase, ids=lambda phase: phase.name)
def test_each_transition(now, then):
    version = PendingVersion("run", 7, 12, None, 7, now)
    if (now.name, then.name) in ALLOWED:
        version.enter(then)
        assert version.phase is then
    else:
        with pytest.raises(AssertionError, match=f"cannot become {then.name}: it is {now.name}"):
            version.enter(then)
        assert version.phase is now


def through(version, *phases):
    for phase in phases:
        version.enter(VersionPhase[phase])
    return version


def test_a_chain():
    """Versions follow each other; every third one is full."""
    following, seen = NextVersion("run", 5, 0, 0), []
    for step in range(1, 8):
        version = through(following.begin(step, 3), "DUE", "WRITTEN", "CONFIRMED")
        seen.append((version.number, version.step, version.base, version.last_full))
        following = following.after(version)
    full = [(5, 1, None, 5), (8, 4, None, 8), (11, 7, None, 11)]
    assert seen == [full[0], (6, 2, 5, 5), (7, 3, 6, 5), full[1], (9, 5, 8, 8), (10, 6, 9, 8), full[2]]
    assert following == NextVersion("run", 12, 11, 11)


def test_a_version_that_is_given_up_uses_its_number():
    """All ranks then ask for a full version, by `base`: until one is confirmed, each version is a full one."""
    following = NextVersion("run", 6, 5, 5)._replace(base=0)
    for number in (6, 7):
        version = through(following.begin(number, 100), "DUE", "GIVEN_UP")
        assert (version.base, version.last_full) == (None, number)
        following = following.after(version)
        assert following == NextVersion("run", number + 1, 0, 5)
    version = through(following.begin(9, 100), "DUE", "WRITTEN", "CONFIRMED")
    assert following.after(version) == NextVersion("run", 9, 8, 8)


def test_the_version_of_an_undone_step_leaves_no_trace():
    following = NextVersion("run", 6, 5, 5)
    through(following.begin(4, 100), "DUE", "WRITTEN")  # and is forgotten
    assert following.begin(4, 100) == PendingVersion("run", 6, 4, 5, 5)
