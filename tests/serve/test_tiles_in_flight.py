"""Which tiles leave and which have come back, whatever an owner sends."""

from csd_optim.serve.trainer.tiles_in_flight import TilesInFlight
from csd_optim.threads import SharedCondition


def under_way(tiles):
    changed = SharedCondition()
    return TilesInFlight(1, tiles, as_pushed=False, window=len(tiles), changed=changed, may_leave=[changed.condition()])


def can_be_pulled(found):
    with found.changed:
        return found.would_pull


def test_a_tile_that_is_answered_before_it_has_left_is_back_once_it_has():
    """Else its gradients could be freed while they are still read."""
    found = under_way([3])
    found.push(3)
    assert found.next_to_leave(0) == 3
    assert found.begin_return(3)
    found.note_back(3)
    assert not can_be_pulled(found)
    found.note_sent(3)
    assert found.pull() == 3
    found.stop()


def test_a_tile_comes_back_once():
    found = under_way([3, 4])
    assert not found.begin_return(3)  # it has not left
    found.push(3)
    assert found.next_to_leave(0) == 3
    found.note_sent(3)
    assert found.begin_return(3)
    assert not found.begin_return(3)
    assert found.began_to_return == [3]
    assert not can_be_pulled(found)
    found.note_back(3)
    assert not found.begin_return(3)
    assert found.pull() == 3
    assert not can_be_pulled(found)
    found.stop()
