"""A device fails while a step or a guess is under way: one error, nothing is lost, and the next attempt works."""

import contextlib
import errno

import pytest
from faults import META_WRITE, SYNC, TILE_READ, TILE_WRITE
from support.faulty import child, fault, in_child  # noqa: F401
from support.ranks import on_ranks
from support.repeating import STEPS, Repeating, never_failed
from support.twins import checksum, sharded

from csd_optim import CSDOSError

MODES = pytest.mark.parametrize(
    "overlap", [{}, {"backward": True}, {"free_gradients": True}], ids=["forward", "backward", "free"]
)


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("calls", [TILE_READ, TILE_WRITE, META_WRITE | SYNC], ids=["read", "write", "commit"])
@MODES
@in_child
def test_one_call_fails(overlap, calls, state_dtype, tmp_path):
    failures = 0
    # Tiles of codes take no more than six calls, those of fp32 no more than thirty.
    skips = range(0, 40, 3) if calls == META_WRITE | SYNC else {"fp32": range(0, 30, 3), "8bit": range(6)}[state_dtype]
    for skip in skips:
        devices = [f"file:{tmp_path}/{skip}-{i}?cache=off" for i in range(2)]
        with fault(calls, tmp_path / f"{skip}-1", errno.EIO, skip=skip, times=1, must_strike=False):
            training = Repeating(devices, overlap, state_dtype=state_dtype, overwrite=True)
            training.train()
        assert training.image() == never_failed(state_dtype), skip
        assert training.failures <= 1, skip
        failures += training.failures
        training.opt.close()
    assert failures or calls == META_WRITE | SYNC  # the next attempt may repair a failed commit before it is reported


@MODES
@in_child
def test_a_device_that_fails_for_ever(overlap, tmp_path):
    training = Repeating([f"file:{tmp_path}/csd{i}?cache=off" for i in range(2)], overlap)
    training.step(0)
    training.step(1)
    training.opt.wait()
    before = [checksum(p) for p in training.model.parameters()]
    with fault(TILE_READ, tmp_path / "csd1", errno.EIO):
        for _ in range(3):
            with pytest.raises(CSDOSError, match="csd1"):
                training.whole_step(2)
            assert [checksum(p) for p in training.model.parameters()] == before
    training.opt.wait()
    for number in range(2, STEPS):
        training.step(number)
    assert training.image() == never_failed("fp32")
    training.opt.close()


@in_child
def test_a_step_that_fails_before_it_returns(tmp_path):
    # Without a cache: of tiles that are still in memory from step 0, which those are depends on how threads take turns.
    training = Repeating(f"file:{tmp_path}/csd0?cache=off", None)
    training.opt.overlap(training.model[:2])  # all other parameters arrive before step() returns
    training.whole_step(0)  # or the fault would strike what is left of it
    with fault(TILE_READ, tmp_path / "csd0", errno.EIO), pytest.raises(CSDOSError):
        training.step(1)
    training.opt.wait()  # raises only once
    for number in range(1, STEPS):
        training.step(number)
    assert training.image() == never_failed("fp32")
    training.opt.close()


def one_call_fails_on_a_rank(rank):
    """The number of failed steps, by kind of the failing call."""
    images, failures = {}, {}
    for state_dtype in "fp32", "8bit":
        never_failed = Repeating("ram:", None, wrap=sharded, rank=rank, state_dtype=state_dtype)
        never_failed.train()
        images[state_dtype] = never_failed.image()
    for calls, skips in (
        (TILE_READ, range(0, 9, 2)),
        (TILE_WRITE, range(8, 17, 2)),
        (META_WRITE | SYNC, range(12, 18, 2)),
    ):
        for skip in skips:
            name, state_dtype = f"{calls}-{skip}-{rank}", "8bit" if skip % 4 else "fp32"
            strikes = fault(calls, f"{name}-1", errno.EIO, skip=skip, times=1, must_strike=False)
            with strikes if rank == 1 else contextlib.nullcontext():
                devices = [f"file:{name}-{i}?cache=off" for i in range(2)]
                training = Repeating(devices, {}, wrap=sharded, rank=rank, state_dtype=state_dtype)
                training.train()
            assert training.image() == images[state_dtype], (calls, skip)
            assert training.failures <= 1, (calls, skip)
            failures[calls] = failures.get(calls, 0) + training.failures
            assert training.opt.committed_step == STEPS
            training.opt.close()
    return failures


@pytest.mark.ci
@in_child
def test_one_call_fails_on_a_rank(tmp_path):
    """The step is undone on both ranks, and both repeat it."""
    one, other = on_ranks(2, one_call_fails_on_a_rank, directory=tmp_path)
    assert one == other
    assert one[TILE_READ] >= 3  # other failures may be repaired before they are reported
