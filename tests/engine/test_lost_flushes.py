"""Failed flushes: nothing that a failed flush covers counts as durable until it has been read back from the disk.

If data are lost, the program gets an error, and the store stays at the step before. The store is never damaged, and no
step is reported as durable that is not.
"""

import contextlib
import errno
import functools
import os
import warnings
from unittest import mock

import pytest
import torch
from crash.training import StoppedTraining, Violation, reference
from faults.losing import LosingDisk
from support import far
from support.states import assumed

from csd_optim import CSDAdam, CSDError, CSDLostError, CSDOSError, CSDStoreError, CSDWarning
from csd_optim.store import format as store_format
from csd_optim.store.file import StoreFile

FP32, CODES, BOTH = 4, 5, 6  # seeds of trainings with fp32 states, with 8-bit states, and with both
SOME = 7  # fail every 7th flush: a commit on two devices has six, so that in time each of them fails
CLOSED, END = 10, 15  # event numbers; before: residuals, a late parameter, a loaded state dict; after: a group joins


@functools.cache
def expected(seed):
    return reference(seed)


def again(call):
    @functools.wraps(call)
    def tried(*arguments):
        for _ in range(2):
            with contextlib.suppress(CSDOSError):
                return call(*arguments)
        return call(*arguments)

    return tried


class Patient(StoppedTraining):
    """A training that repeats what failed, as a user would."""

    def _step(self, number):
        with mock.patch.object(self.opt, "step", again(self.opt.step)):
            super()._step(number)

    def _load(self):
        with mock.patch.object(self.opt, "load_state_dict", again(self.opt.load_state_dict)):
            super()._load()


def train_and_resume(devices, seed, *, patient):
    """Trains, closes, resumes. Returns the event that must survive, and whether there was no error."""
    durable, training = 0, None
    try:
        for until in (CLOSED, END):
            training = None
            training = (Patient if patient else StoppedTraining)(seed, devices)
            training.check(expected(seed), durable)
            while training.event < until:
                training.next_event()  # it may read `state` that is lost, before any error
                durable = max(durable, training.event if training.event % 2 else 2 * training.opt.committed_step)
            training.opt.close()
            durable = training.event
    except CSDOSError:
        if training:
            durable = max(durable, 2 * training.opt.committed_step)
            with contextlib.suppress(CSDError):
                training.opt.close()
        return durable, False
    return durable, True


@pytest.mark.ci
@pytest.mark.parametrize(
    ("devices", "at_once", "patient", "every", "seed"),
    [
        (1, True, True, 1, FP32),
        (2, False, False, SOME, FP32),
        (1, False, True, SOME, CODES),
        (2, True, False, SOME, BOTH),
        *(pytest.param(2, False, False, 1, seed, marks=pytest.mark.soak) for seed in (FP32, CODES, BOTH)),
    ],
)
def test_every_flush_fails_once(devices, at_once, patient, every, seed, tmp_path):
    """Each run lets one flush fail, the next run the next one, and drops the data that it should have covered."""
    torch.set_num_threads(1)
    expected(seed)  # called for its effect: it sets the seed
    nth, told, wrong = 0, 0, []
    while True:
        place = tmp_path / str(nth)
        place.mkdir()
        names = [str(place / f"csd{d}") for d in range(devices)]
        with LosingDisk(place, nth, at_once=at_once) as disk:
            try:
                durable, well = train_and_resume(names, seed, patient=patient)
            except (CSDError, Violation) as e:
                wrong.append(f"{disk.failed}: while training: {e}")
                durable, well = 0, False
        if not disk.failed:
            break
        told += not well
        try:
            found = StoppedTraining(seed, names)
            found.check(expected(seed), durable)
            found.check_next(expected(seed))
            found.opt.close()
        except (CSDError, Violation) as e:
            wrong.append(f"{disk.failed}: {'it was told' if not well else 'nobody was told'}: {e}")
        nth += every
    assert not wrong, f"{len(wrong)} of {nth}: " + "\n".join(wrong)
    assert nth >= 40 * devices
    assert 0 < told < nth / every  # not all: lost metadata are simply written again


# ---- errors that the program gets ----------------------------------------------------


class Small:
    def __init__(self, directory, **options):
        self.p = torch.nn.Parameter(torch.linspace(-1, 1, 5000))
        self.opt = CSDAdam([self.p], devices=[str(directory)], tile_size=1024, **options)

    def step(self):
        self.p.grad = torch.ones(5000)
        self.opt.step()

    def steps(self, n):
        for _ in range(n):
            self.step()
        self.opt.synchronize()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_lost_step_is_told_again_and_again(at_once, tmp_path):
    with LosingDisk(tmp_path, at_once=at_once) as disk:
        small = Small(tmp_path / "csd0")
        small.steps(2)
        disk.nth = disk.flushes  # the flush of the tiles
        small.step()
        before = small.p.detach().clone()
        for call in (small.step, small.opt.synchronize, small.step, small.opt.close):
            with pytest.raises(CSDLostError, match=r"step 3 is lost.*tile.*at step 2;.*resume=True"):
                call()
            assert small.opt.committed_step == 2
            assert torch.equal(small.p, before)
    small = Small(tmp_path / "csd0", resume=True)
    assert small.opt.committed_step == 2
    small.steps(1)
    assert torch.equal(small.p, before)
    small.opt.close()


def test_a_load_whose_flush_fails_is_undone(tmp_path):
    with LosingDisk(tmp_path) as disk:
        small = Small(tmp_path / "csd0")
        small.steps(2)
        kept = small.opt.state[small.p]["exp_avg"].clone()
        disk.nth = disk.flushes
        with pytest.raises(CSDOSError), small.opt.loading():
            small.opt.state[small.p]["exp_avg"].mul_(2)
        assert torch.equal(small.opt.state[small.p]["exp_avg"], kept)
        with small.opt.loading():
            small.opt.state[small.p]["exp_avg"].mul_(3)
        small.steps(1)
        loaded = small.opt.state[small.p]["exp_avg"].clone()
        small.opt.close()
    with contextlib.closing(Small(tmp_path / "csd0", resume=True).opt) as opt:
        assert opt.committed_step == 3
        assert torch.equal(opt.state[opt.param_groups[0]["params"][0]]["exp_avg"], loaded)


@pytest.mark.here("an owner goes back to its store, and the session goes on")
@pytest.mark.parametrize("looked_at", [False, True])
def test_without_direct_io_what_is_in_memory_proves_nothing(looked_at, tmp_path, monkeypatch):
    """Mapped pages stay in the page cache, whatever is on the disk. Codes are not mapped, nor what is far away."""
    lost = looked_at and assumed() == "fp32" and not far.assumed()
    really_open, really_flush, fails = os.open, os.fdatasync, []

    def without_direct(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, *mode)

    def flush(fd):
        really_flush(fd)
        if fails:
            raise OSError(errno.EIO, fails.pop())

    monkeypatch.setattr(os, "open", without_direct)
    monkeypatch.setattr(os, "fdatasync", flush)
    warnings.simplefilter("ignore", CSDWarning)  # of no direct I/O, again at the resume
    small = Small(tmp_path / "csd0")
    with pytest.warns(CSDWarning, match="no direct I/O"):
        small.steps(2)
    fails.append("Input/output error")
    small.step()
    if looked_at:
        assert small.opt.state[small.p]["exp_avg"].sum() > 0
    with pytest.raises(CSDLostError, match="mapped in memory") if lost else contextlib.nullcontext():
        small.opt.close()
    with contextlib.closing(Small(tmp_path / "csd0", resume=True).opt) as opt:
        assert opt.committed_step == (2 if lost else 3)


def test_copy_0_is_left_alone_while_copy_1_fails(tmp_path, monkeypatch):
    small = Small(tmp_path / "csd0")
    small.steps(2)
    really_publish, published = StoreFile.publish, []

    def publish(store, staged, copy):
        published.append(copy)
        if published.count(1) == 1 and copy == 1:
            raise CSDOSError(errno.EIO, "Input/output error")
        really_publish(store, staged, copy)

    monkeypatch.setattr(StoreFile, "publish", publish)
    small.steps(1)
    assert published == [0, 1, 1]
    small.opt.close()


@pytest.fixture
def in_doubt(tmp_path):
    """An optimizer whose next flush fails, so that its commit must be read back."""
    small = Small(tmp_path / "csd0")
    small.steps(2)
    fails, really_flush = ["Input/output error"], os.fdatasync

    def flush(fd):
        really_flush(fd)
        if fails:
            raise OSError(errno.EIO, fails.pop())

    with mock.patch.object(os, "fdatasync", flush):
        yield small


def test_what_this_process_says_of_itself_is_not_judged(in_doubt, tmp_path):
    refuses = mock.Mock(side_effect=CSDStoreError("not so"))
    with mock.patch.multiple(store_format, checked_manifest=refuses, check_record=refuses):
        in_doubt.step()
        in_doubt.opt.close()
    with contextlib.closing(Small(tmp_path / "csd0", resume=True).opt) as opt:
        assert opt.committed_step == 3


def test_a_directory_that_was_renamed_is_told_as_what_it_is(in_doubt, tmp_path):
    in_doubt.step()
    (tmp_path / "csd0").rename(tmp_path / "csd1")
    with pytest.raises(CSDOSError, match=r"csd0.*No such file.*the next call tries again"):
        in_doubt.opt.synchronize()
    (tmp_path / "csd1").rename(tmp_path / "csd0")
    in_doubt.opt.close()


@pytest.mark.parametrize("fails", ["open", "fsync"])
def test_a_parent_that_cannot_be_flushed(fails, tmp_path, monkeypatch):
    """If the parent cannot be opened, nothing is lost. If its fsync fails, the error tells that the store may be."""
    really = getattr(os, fails)

    def failing(what, *more, **options):
        directory = os.readlink(f"/proc/self/fd/{what}") if fails == "fsync" else str(what)
        if directory == str(tmp_path):
            raise OSError(errno.EIO if fails == "fsync" else errno.EACCES, "no")
        return really(what, *more, **options)

    small = Small(tmp_path / "csd0")
    monkeypatch.setattr(os, fails, failing)
    with pytest.raises(CSDOSError) as told:
        small.steps(1)
    assert isinstance(told.value, CSDLostError) == (fails == "fsync")
    assert ("begin anew" in str(told.value)) == (fails == "fsync")
    monkeypatch.undo()
    with pytest.raises(CSDLostError) if fails == "fsync" else contextlib.nullcontext():
        small.steps(1)
    with contextlib.suppress(CSDLostError):
        small.opt.close()
