"""Space in a file that was given back serves others: first fit, aligned, and no byte is lost or handed out twice."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from csd_optim.store.unused import Unused

NBYTES = 16  # of the file


class File(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.unused, self.free = Unused(), set()

    @rule(offset=st.integers(0, NBYTES - 4), size=st.integers(1, 4))
    def give_back(self, offset, size):
        self.unused.add(offset, size)
        self.free.update(range(offset, offset + size))

    @rule(size=st.integers(0, 8), unit=st.sampled_from([1, 2, 4]))
    def take(self, size, unit):
        fits = (at for at in range(0, NBYTES, unit) if size and self.free.issuperset(range(at, at + size)))
        found = self.unused.take(size, unit)
        assert found == next(fits, None)
        if found is not None:
            self.free.difference_update(range(found, found + size))

    @invariant()
    def all_bytes_are_accounted_for(self):
        assert self.unused.nbytes == len(self.free)


def test_the_first_part_that_fits_is_taken():
    run_state_machine_as_test(File, settings=settings(stateful_step_count=20))
