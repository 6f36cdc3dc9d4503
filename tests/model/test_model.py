"""The models of docs/commits.md, explored within bounds: no order of actions, kills and failures violates an invariant.

Each mutant leaves out one rule of the protocol. If one is no longer found, the model has become blind, or the rule is
not needed any more. Those that change nothing that counts are explored to the end as well, and say why.
"""

import os
import subprocess
from pathlib import Path

import pytest
from model import owners

HERE = Path(__file__).parent

# Ranks x devices, and bounds; the others are as in rounds.cpp and owners.py.
SMALL = "2x1 versions=3"
CI = (
    "2x1 versions=3 flush=1 manifest=1",
    "2x1 versions=4 guess=1 sync=1",
    "2x1 versions=3 flush=1 load=1 stepfail=0",
    "2x1 versions=3 first=1 missing=1",
    "2x1 versions=3 leave=1 load=1 stepfail=0",
    "2x2 versions=3 flush=1",
    "3x1 versions=3",
)
SOAK = (
    "1x1 versions=5 kills=3 flush=2 edit=1 load=1 loadfail=1",
    "1x1 versions=5 kills=2 flush=1 sync=1 residual=1",
    "1x1 versions=4 kills=2 flush=1 first=1 manifest=1 publish=1",
    "1x2 versions=5 kills=2 flush=1 sync=1 edit=1",
    "1x2 versions=4 kills=2 flush=1 first=1 missing=1",
    "1x2 versions=4 kills=2 flush=2 load=1 loadfail=1",
    "2x1 versions=4 kills=2 sync=1 guess=1",
    "2x1 versions=5 stepfail=2 sync=1",
    "2x1 versions=4 flush=1 sync=1",
    "2x1 versions=4 flush=1 guess=1",
    "2x1 versions=3 flush=1 edit=1",
    "2x1 versions=4 flush=1 load=1 loadfail=1",
    "2x1 versions=4 flush=1 load=2 stepfail=0",
    "2x1 versions=3 flush=1 load=1 edit=1 stepfail=0",
    "2x1 versions=4 flush=1 sync=1 residual=1 overlap=0",
    "2x1 versions=3 kills=2 first=1 missing=1 sync=1 manifest=1",
    "2x1 versions=3 flush=1 first=1 missing=1 publish=1",
    "2x1 versions=4 kills=2 publish=1 sharefail=1",
    "2x1 versions=4 flush=1 sync=1 publish=1",
    "2x1 versions=4 kills=2 manifest=2",
    "1x1 versions=4 kills=2 flush=2 leave=2 load=1 loadfail=1",
    "1x2 versions=4 kills=2 flush=1 leave=2 edit=1",
    "2x1 versions=4 kills=2 leave=2",
    "2x1 versions=3 flush=1 leave=1 load=1 stepfail=0",
    "2x2 versions=3 leave=1",
    "2x2 versions=3 flush=1",
    "2x2 versions=3 sync=1 guess=1",
    "2x2 versions=2 kills=2 flush=1 first=1 missing=1",
    "3x1 versions=3 flush=1 close=0",
    "3x1 versions=2 flush=1",
    "3x1 versions=2 flush=1 load=1 stepfail=0",
    "3x1 versions=3 publish=1 close=0",
    "3x1 versions=3 first=1 missing=1 stepfail=0",
)
OWNERS_CI = {"owners": 2, "versions": 4, "cuts": 1}
OWNERS_SOAK = (
    {"owners": 2, "versions": 4, "cuts": 2, "trainer_kills": 2, "failures": 2},
    {"owners": 2, "versions": 3, "cuts": 2, "owner_kills": 2, "trainer_kills": 2},
    {"owners": 1, "versions": 5, "cuts": 2, "owner_kills": 2, "trainer_kills": 2},
)

# The first invariant that a mutant violates, and where. "": it changes nothing that counts.
MUTANTS = {
    "agree_without_round": ("I2", "2x1 versions=3 flush=1"),
    "copy_1_before_confirmation": ("I1", "2x1"),
    "copy_1_before_devices": ("I1", "1x2 flush=1"),
    "no_flush": ("I4", "2x1"),
    "no_discard_newer": ("I8", "2x1 close=0"),
    "discards_own_copy_first": ("I6", "1x1 kills=2"),
    "no_proof": ("I4", "1x1 flush=1"),
    "withdraw_keeps_number": ("I1", "2x1 close=0"),
    "withdraw_keeps_record": ("I1", "2x1 versions=3 kills=2"),
    "withdraw_keeps_manifest": ("I6", "2x1 manifest=1 close=0"),
    "withdraw_keeps_work": ("I2", "1x1 load=1 flush=1"),
    "number_reused": ("I1", "2x1 close=0"),
    "highest_not_exchanged": ("I1", "2x1 close=0"),
    "newest_of_each_rank": ("I1", "2x1"),
    # Where a round has two commits, the newer one repeats the older one, or is a save() that has not returned.
    "older_of_one_round": ("", "2x1 versions=2 edit=1 flush=1"),
    "step_before_copy_0": ("I4", "1x1"),
    "guess_before_confirmation": ("I4", "2x1 versions=3 guess=1 flush=1 close=0"),
    "copy_0_again": ("I6", "1x1 flush=1"),
    "load_leaves_tiles": ("I1", "2x1 versions=3 load=1 loadfail=1 stepfail=0"),
    "step_over_withdrawn_load": ("I7", "2x1 versions=3 load=1 flush=1 stepfail=0"),
    "load_over_withdrawn_load": ("I7", "2x1 versions=3 load=2 flush=1 stepfail=0"),
    "edit_over_withdrawn_load": ("I7", "1x1 load=1 edit=1 flush=1"),
    "leaves_before_commit": ("I4", "1x1 versions=3 leave=1"),
    "left_keeps_name": ("I9", "1x1 versions=3 leave=1"),
    "gives_back_at_once": ("I9", "1x1 versions=3 leave=1"),
    # One process alone may do so: a resume finds the commit that is in copy 0 of all devices.
    "gives_back_at_copy_0": ("I9", "2x1 versions=3 leave=1"),
    "missing_is_no_commit": ("I2", "2x1 versions=2 first=1 missing=1"),
    # A device with copy 1 had company with copy 0: a file that is there has a commit, and one that is not is missing.
    "copy_1_is_no_evidence": ("", "2x1 versions=2 first=1 missing=1"),
    "name_at_copy_0": ("I3", "2x1 publish=1"),
    "failed_share_not_told": ("I3", "2x1 versions=4 publish=1 sharefail=1 close=0"),
}
TWO, ONE = {"owners": 2}, {"owners": 1}
OWNERS_MUTANTS = {
    # check_rounds() and the step in a begin tell the difference, too: numbers of rounds do not repeat.
    "attach_ignores_steps": ("", TWO),
    "attach_after_restart": ("I1", TWO),
    "confirmed_too_early": ("I1", TWO),
    "no_take_back": ("", TWO),  # rounds differ then: "start again", and a resume finds the round before
    "named_at_finish": ("I3", TWO),
    "begin_without_confirm": ("I4", TWO),
    "begin_before_copy_0": ("I4", ONE),
    "lost_finish_counts": ("", ONE),  # begin refuses a step after another one: "start again"
    "owner_chooses_number": ("I1", TWO),
    "trainer_reuses_number": ("I1", TWO),
}


@pytest.fixture(scope="module")
def explore(tmp_path_factory):
    """Explore `rounds.cpp` within bounds, as they are written above. Returns what it prints."""
    directory, source = tmp_path_factory.mktemp("model"), HERE / "rounds.cpp"

    def run(bounds, *options):
        size, *rest = bounds.split()
        ranks, devices = size.split("x")
        program = directory / size
        if not program.exists():
            flags = ["-O2", "-std=c++20", "-Wall", "-Werror", f"-DRANKS={ranks}", f"-DDEVICES={devices}"]
            subprocess.run([os.environ.get("CXX", "g++"), *flags, source, "-o", program], check=True)
        ended = subprocess.run([program, *rest, *options], stdout=subprocess.PIPE, text=True)
        assert ended.returncode in (0, 1, 3), f"{bounds}: exit status {ended.returncode}: {ended.stdout}"
        return ended.stdout

    return run


def explore_owners(mutant="", **bounds):
    outcome, trace = owners.explore(owners.Model(mutant, **bounds))
    return "\n".join([outcome, *trace])


def check(name, printed, invariant=""):
    """Check an outcome; `invariant`: the one that is violated."""
    print(name, printed.splitlines()[0], sep=": ")
    expected = f"VIOLATION {invariant}" if invariant else "no violation"
    assert printed.startswith(expected), f"{name}: {expected} was expected, not\n{printed}"


def test_small(explore):
    check(SMALL, explore(SMALL))
    check("owners", explore_owners())
    assert {*MUTANTS} == mutants_of_rounds()
    assert {*OWNERS_MUTANTS} == {*owners.MUTANTS}


def mutants_of_rounds():
    listed = (HERE / "rounds.cpp").read_text().split("#define MUTANTS(X)")[1].split("\n\n")[0]
    return {line.split("X(")[1].split(")")[0] for line in listed.splitlines()[1:]} - {"none"}


@pytest.mark.ci
@pytest.mark.parametrize("bounds", CI)
def test_rounds(explore, bounds):
    check(bounds, explore(bounds))


@pytest.mark.ci
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants(explore, mutant):
    invariant, bounds = MUTANTS[mutant]
    check(f"mutant {mutant}", explore(bounds, f"mutant={mutant}"), invariant)


@pytest.mark.ci
def test_owners():
    check("owners", explore_owners(**OWNERS_CI))


@pytest.mark.ci
@pytest.mark.parametrize("mutant", OWNERS_MUTANTS)
def test_owners_mutants(mutant):
    invariant, bounds = OWNERS_MUTANTS[mutant]
    check(f"mutant {mutant}", explore_owners(mutant, **bounds), invariant)


@pytest.mark.soak
@pytest.mark.parametrize("bounds", SOAK)
def test_rounds_within_all_bounds(explore, bounds):
    check(bounds, explore(bounds))


@pytest.mark.soak
@pytest.mark.parametrize("bounds", OWNERS_SOAK, ids=str)
def test_owners_within_all_bounds(bounds):
    check(str(bounds), explore_owners(**bounds))
