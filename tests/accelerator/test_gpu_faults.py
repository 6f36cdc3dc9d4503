"""`gpu:` beside named directories on a disk that fails: see ../engine/test_faults.py."""

import errno
import functools
import os

import pytest
from faults import ALLOCATE, EOF, ERROR, FOREVER, META_READ, META_WRITE, SHORT, SYNC, TILE_READ, TILE_WRITE
from support.accelerator_training import Trained, same
from support.backends import TILE
from support.faulty import child, fault, in_child  # noqa: F401
from support.stores import flip

from csd_optim import CSDOSError, CSDStoreError, CSDTornError
from csd_optim.kernels import update
from csd_optim.store.format import read_contents

pytestmark = [pytest.mark.accelerator, pytest.mark.one_schedule]

ALL, SOME = "1GB", f"{12 * (3 * TILE + 5) + 12 * 40}"  # room for all, or for some, whose shared tiles are still read


def with_few_buffers(directory, room=ALL, **options):
    """Return a training with so few buffers that writes must end before the last tiles: errors are within the step."""
    update.LAUNCH_ELEMS = 1  # set in the child: each parameter takes a launch of its own
    return Trained([f"gpu:?room={room}", f"file:{directory}/csd1?cache=off&buffers=3"], **options)


@functools.cache
def never_failed(steps):
    alone = Trained(["ram:"], "cpu")
    for k in range(steps):
        alone.step(k)
    return alone.bits()


def fails(it, *arguments, k, **options):
    """Assert that step `k` raises and changes nothing, and that it and the next then succeed. Returns the error.

    If the device also fails when the step is undone, parameters have their old values once it works again.
    """
    before = it.bits()
    with fault(*arguments, **options), pytest.raises(CSDOSError) as caught:
        it.step(k)
    assert same(it.bits(), before)
    for again in (k, k + 1):
        it.step(again)
    assert same(it.bits(), never_failed(k + 2))
    return caught.value


@pytest.mark.parametrize(
    ("room", "calls", "nth", "code"),
    [
        (ALL, TILE_WRITE, 0, errno.EIO),
        (ALL, TILE_WRITE, 4, errno.ENOSPC),
        (SOME, TILE_WRITE, 0, errno.ENOSPC),
        (SOME, TILE_WRITE, 4, errno.EIO),
        (SOME, TILE_READ, 0, errno.EIO),
        (SOME, TILE_READ, 2, errno.EIO),
    ],
)
@pytest.mark.parametrize("k", [0, 2])
@in_child
def test_an_error_undoes_the_step(room, calls, nth, code, k, tmp_path):
    k += calls == TILE_READ  # the first step has nothing to read
    it = with_few_buffers(tmp_path, room)
    for earlier in range(k):
        it.step(earlier)
    error = fails(it, calls, tmp_path, code, skip=nth, k=k)
    assert error.errno == code
    undone = "mix of two steps" if isinstance(error, CSDTornError) else "undone"
    assert isinstance(error, CSDTornError) <= (calls == TILE_READ)
    for word in (str(tmp_path / "csd1"), os.strerror(code), undone):
        assert word in str(error)


@pytest.mark.parametrize("nth", range(3))
@in_child
def test_a_full_disk_in_the_first_step(nth, tmp_path):
    error = fails(with_few_buffers(tmp_path), ALLOCATE, tmp_path, errno.ENOSPC, skip=nth, k=0)
    assert "are free" in str(error)


@in_child
def test_short_transfers_are_finished(tmp_path):
    with fault(TILE_READ | TILE_WRITE | META_READ | META_WRITE, tmp_path, effect=SHORT):
        it = with_few_buffers(tmp_path, SOME).step(0).step(1)
        it.opt.close()
        it = with_few_buffers(tmp_path, ALL, seed=9, resume=True).step(2)  # this step loads the copies
        assert same(it.bits(), never_failed(3))


@pytest.mark.parametrize("nth", [0, 2])
@pytest.mark.parametrize("effect", [EOF, ERROR], ids=["ends early", "EIO"])
@pytest.mark.parametrize("resumed", [True, False])
@in_child
def test_an_error_while_copies_are_loaded(resumed, effect, nth, tmp_path):
    """The copies of a resumed store, and copies that are loaded again after an undone step."""
    it = with_few_buffers(tmp_path).step(0).step(1)
    if resumed:
        it.opt.close()
        it = with_few_buffers(tmp_path, seed=9, resume=True)
    else:
        it.bits()  # waits for all transfers, so that this step fails and not the previous one
        with fault(TILE_WRITE, tmp_path, errno.EIO), pytest.raises(CSDOSError, match="undone"):
            it.step(7)
    error = fails(it, TILE_READ, tmp_path, errno.EIO, effect=effect, skip=nth, k=2)
    assert error.errno == errno.EIO
    assert str(tmp_path / "csd1") in str(error)


@pytest.mark.parametrize("section", ["master", "exp_avg"])
@in_child
def test_a_damaged_tile_is_not_loaded(section, tmp_path):
    """After a damaged tile, copies loaded before it are discarded, too. After a repair they load."""
    with_few_buffers(tmp_path).step(0).step(1).opt.close()
    it = with_few_buffers(tmp_path, seed=9, resume=True)
    flip(tmp_path / "csd1", section, tile=2)
    before = [p.detach().cpu() for p in it.params]
    for _ in range(2):
        with pytest.raises(CSDStoreError, match=r"is not what was written there on device 0 .*csd1"):
            it.step(2)
        assert same([p.detach().cpu() for p in it.params], before)
    flip(tmp_path / "csd1", section, tile=2)
    assert same(it.step(2).bits(), never_failed(3))


@pytest.mark.parametrize("times", [1, FOREVER], ids=["once", "always"])
@pytest.mark.parametrize(("calls", "nth"), [(META_WRITE, 3), (SYNC, 0)])
@in_child
def test_a_commit_that_fails_is_tried_again(calls, nth, times, tmp_path):
    it = with_few_buffers(tmp_path).step(0).step(1)
    it.opt.synchronize()
    with fault(calls, tmp_path, errno.EIO, skip=nth, times=times):
        it.step(2)  # succeeds
        if times == 1:
            it.step(3)  # waits for the writes, and tries again
        else:
            with pytest.raises(CSDOSError, match="step 3 cannot be committed yet"):
                it.step(3)
            assert same(it.bits(), never_failed(3))
    if times == FOREVER:
        it.step(3)
    assert same(it.bits(), never_failed(4))
    it.opt.synchronize()
    assert read_contents(tmp_path / "csd1").superblock.step == 4


@in_child
def test_a_late_error_loses_nothing(tmp_path):
    """The step is complete although its last writes fail later: the host still has their data."""
    update.LAUNCH_ELEMS = 1
    it = Trained(["gpu:?room=1GB", f"file:{tmp_path}/csd1?cache=off"], tile_size=8192)
    it.step(0).step(1).bits()
    with fault(TILE_WRITE, tmp_path, errno.EIO, hold=True) as release:
        it.step(2)
        release()
        for _ in range(2):
            with pytest.raises(CSDOSError, match="csd1") as caught:
                it.step(3)
            assert "undone" not in str(caught.value)
    assert same(it.step(3).bits(), never_failed(4))
