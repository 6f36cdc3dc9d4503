"""I/O errors in steps of two passes over a tile: the preloaded library faults/faults.c makes system calls fail."""

import errno
import os
import time

import pytest
import torch
from faults import EOF, FOREVER, SHORT, TILE_READ, TILE_WRITE
from support.faulty import child, fault, in_child  # noqa: F401
from support.two_passes import SECONDS, SHAPES, Model, TwoPasses, gradients, undone_params

from csd_optim import CSDOSError
from csd_optim.bindings import AS_PUSHED

pytestmark = pytest.mark.at_hand("drives the engine, by windows and addresses")

DEVICES = {
    "file": ["{}/csd1"],
    "files": ["{}/csd0", "{}/csd1", "{}/csd2"],
    "mixed": ["ram:", "{}/csd1"],
    "few buffers": ["file:{}/csd1?buffers=1"],
    "paced": ["file:{}/csd1?read=20MB/s&write=10MB/s&latency=1ms"],
}


TILE = 2048  # a half is longer than a page, which is what makes it a tile for faults.c


def training(kind, directory):
    return TwoPasses([device.format(directory) for device in DEVICES[kind]], tile_elems=TILE)


def same(image, others):
    return all(map(torch.equal, image, others))


def complete_pass_1(ours, tiles):
    """Push the first passes and wait until their halves are stored. No second pass is read meanwhile (AS_PUSHED)."""
    ours.first_passes(tiles)
    end, elems = time.monotonic() + SECONDS, sum(extent.n_tiles * extent.tile_elems for extent in [ours.extent])
    while sum(ours.native.stats(d)["write_bytes"] for d in range(len(ours.engine.devices.specs))) < 4 * elems:
        assert time.monotonic() < end, "pass 1 does not end"
        time.sleep(0.001)


def rest_of_step(ours, tiles, groups, which):
    """Do what follows after pass 1, or all of it, and wait for the last writes, which may fail later than the step."""
    if which == "pass 1":
        ours.first_passes(tiles)
    for g, group in enumerate(groups):
        ours.orthogonalize(group)
        ours.second_passes(groups, g)
    ours.engine.finish()
    ours.native.wait_writes()


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("calls", [TILE_READ, TILE_WRITE])
@pytest.mark.parametrize("which", ["pass 1", "pass 2"])
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.sampled(together=2)
@in_child
def test_an_error_in_either_pass_undoes_the_step(kind, which, calls, skip, tmp_path):
    with training(kind, tmp_path) as ours:
        model = Model(ours.params)
        for _ in range(2):
            model.step(ours.step(), ours.constants)
            ours.commit()
        before, slots = ours.image(), ours.slots()
        grads = gradients(SHAPES, 9)
        groups = ours.groups(grads)
        tiles = ours.begin(grads, order=AS_PUSHED)
        if which == "pass 2":
            complete_pass_1(ours, tiles)
        with (
            ours.in_time(),
            fault(calls, tmp_path / "csd1", errno.EIO, skip=skip),
            pytest.raises(CSDOSError) as caught,
        ):
            rest_of_step(ours, tiles, groups, which)
        assert caught.value.errno == errno.EIO
        assert str(tmp_path / "csd1") in str(caught.value)
        ours.give_up()
        if ours.engine.states.step == 3:  # it was complete: its data waited in buffers
            model.step(grads, ours.constants)
        else:
            assert ours.slots() == slots
            undone_params(ours, before)
            assert same(ours.image(), before)
        for _ in range(2):
            model.step(ours.step(), ours.constants)
            ours.commit()
        assert same(ours.image(), model.image())


@pytest.mark.parametrize("effect", [SHORT, EOF])
@in_child
def test_transfers_that_are_short(effect, tmp_path):
    with training("files", tmp_path) as ours:
        model = Model(ours.params)
        model.step(ours.step(), ours.constants)
        ours.commit()
        before = ours.image()
        if effect == SHORT:
            with fault(TILE_READ | TILE_WRITE, tmp_path, effect=SHORT):
                model.step(ours.step(), ours.constants)
                ours.commit()
        else:
            with (
                fault(TILE_READ, tmp_path / "csd1", effect=EOF),
                pytest.raises(CSDOSError, match=os.strerror(errno.EIO)),
            ):
                ours.step()
            ours.give_up()
            undone_params(ours, before)
            assert same(ours.image(), before)
        model.step(ours.step(), ours.constants)
        assert same(ours.image(), model.image())


@pytest.mark.parametrize("times", [1, 3, FOREVER])
@in_child
def test_writes_that_fail_when_the_step_is_complete_are_retried(times, tmp_path):
    """Of one half or of both; the tile moves to its other slot once both are written."""
    with TwoPasses([f"file:{tmp_path}/csd1?buffers=64"], tile_elems=TILE) as ours:
        model = Model(ours.params)
        model.step(ours.step(), ours.constants)
        ours.commit()
        slots = ours.slots()
        with fault(TILE_WRITE, tmp_path, errno.EIO, times=times, hold=True) as let_go:
            model.step(ours.step(), ours.constants)
            moved = [a != b for a, b in zip(ours.slots(), slots, strict=True)]
            assert not (any if times == FOREVER else all)(moved)  # a tile with a half that is still to be written
            let_go()
            if times == FOREVER:
                with pytest.raises(CSDOSError, match="stay in memory"):
                    ours.native.wait_writes()
        ours.native.wait_writes()
        assert ours.slots() == [1 - slot for slot in slots]
        ours.commit()
        assert same(ours.image(), model.image())
        model.step(ours.step(), ours.constants)
        assert same(ours.image(), model.image())
