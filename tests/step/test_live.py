"""The countdown of a step: a tile is complete once, when all that it needs has arrived, in whatever portions.

The phases of steps are checked in all tests: see support/phases.py.
"""

import random

import numpy as np

from csd_optim.step.live import NEVER, Countdown


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
    assert countdown.were_pushed([1, 2, 3])
    assert not countdown.were_pushed([0, 2])
    assert countdown.rank().tolist() == [NEVER, NEVER, 0, 1]


def test_portions_in_any_order():
    choose = random.Random(0)
    needed = [choose.randrange(1, 20) for _ in range(9)]
    countdown, units = Countdown(np.array(needed), range(9)), [k for k in range(9) for _ in range(needed[k])]
    choose.shuffle(units)
    while units:
        tiles = [units.pop() for _ in range(min(len(units), choose.randrange(1, 6)))]
        for tile in countdown.arrive(tiles):
            assert tile not in units
            countdown.note_pushed(tile)
    assert countdown.left == []
