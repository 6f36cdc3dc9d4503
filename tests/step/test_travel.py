"""A tile is complete once, when all gradients have arrived, in whatever portions; its parameters arrive after that.

The phases of steps are checked in all tests: see support/phases.py.
"""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csd_optim import CSDRuntimeError
from csd_optim.step.all_gather import ParamAllGather
from csd_optim.step.countdown import NEVER, Countdown
from csd_optim.step.staging import NoStaging
from csd_optim.step.supplied_states import SuppliedStates
from csd_optim.step.travel import Travel
from csd_optim.step.two_passes import OnePass


def test_each_tile_is_complete_once():
    countdown = Countdown(np.array([2, 0, 1, 5]), [3, 0, 2])
    assert countdown.complete([0, 1, 2, 3]) == []  # tile 1 lacks nothing, but the step does not have it
    assert countdown.arrive([0, 2]) == [2]
    countdown.note_pushed(2)
    assert countdown.complete([2, 2]) == []
    assert countdown.arrive([0, 3, 0], [0, 4, 1]) == [0]
    assert not countdown.lacks(0)
    assert countdown.lacks(3)
    assert countdown.arrive([3]) == [3]  # who does not push a tile is told again
    assert countdown.complete([3, 0, 3]) == [3, 0]


def test_what_was_pushed_and_what_is_left():
    countdown = Countdown(np.zeros(4, np.int64), [3, 0, 2])
    for tile in countdown.complete([2, 3]):
        countdown.note_pushed(tile)
    assert countdown.left == [0]
    assert countdown.pushed == [2, 3]
    assert countdown.rank().tolist() == [NEVER, NEVER, 0, 1]


@given(st.lists(st.integers(1, 19), min_size=1, max_size=9), st.data())
def test_portions_in_any_order(needed, data):
    countdown = Countdown(np.array(needed), range(len(needed)))
    units = data.draw(st.permutations([tile for tile, n in enumerate(needed) for _ in range(n)]))
    while units:
        portion = data.draw(st.integers(1, 5))
        arrived, units = units[:portion], units[portion:]
        complete = countdown.arrive(arrived)
        assert {*complete} == {*arrived} - {*units}
        for tile in complete:
            countdown.note_pushed(tile)
    assert countdown.left == []


# ---- whether parameters have arrived -----------------------------------------------------------


class Asked:
    """An engine whose tiles are updated at once, until its step is over."""

    def __init__(self):
        self.tiles, self.is_over, self.native = [], False, self

    def params_ready(self, tiles, *, wait):
        if self.is_over:
            raise CSDRuntimeError("no step is under way")
        self.tiles.append(tiles.tolist())
        return True


def travel_of(images):
    """Return the travel of a step whose tiles `images` travel through staging buffers, and its engine."""
    engine, flow = Asked(), np.arange(4, dtype=np.uint32)
    passes = OnePass(engine, None, flow)
    return Travel(engine, None, flow, SuppliedStates(), images, NoStaging(), passes, ParamAllGather()), engine


def tiles(*numbers):
    return np.array(numbers, np.uint32)


def test_the_engine_is_asked_once_images_are_back():
    travel, engine = travel_of([1, 2])
    assert travel.arrived(tiles(0, 3), wait=False)
    assert not travel.arrived(tiles(0, 1), wait=False)
    travel.note_pulled(1)
    assert travel.arrived(tiles(0, 1), wait=False)
    assert not travel.arrived(tiles(1, 2), wait=False)
    assert engine.tiles == [[0, 3], [0, 1]]


@pytest.mark.parametrize("ends", [False, True])
def test_a_reader_waits_for_images_or_for_the_end(ends):
    """The end counts only once its thread is done: a step that has failed is undone by then."""
    travel, engine = travel_of([1, 2])
    said = []

    def reads():
        try:
            said.append(travel.arrived(tiles(1, 2), wait=True))
        except CSDRuntimeError:
            said.append("over")

    reader = threading.Thread(target=reads)
    reader.start()
    travel.note_pulled(1)
    reader.join(0.05)
    assert said == []
    engine.is_over = ends
    travel.end() if ends else travel.note_pulled(2)
    reader.join(300)
    assert said == ["over" if ends else True]
