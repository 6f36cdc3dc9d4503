"""A flush that has failed covers nothing: what it should have put on the disk is read back from there, or is lost.

Then the program is told, and the store stays at the step before. Never is it damaged, and never is a step called
durable that is not.
"""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from crash.training import Training, Violation, reference
from faults.losing import LosingDisk

from csd_optim import CSDError, CSDOSError

SEED = 5
CLOSED, END = 10, 15  # events: residuals, a late parameter and a loaded state dict before; a group joins after


@functools.cache
def expected():
    return reference(SEED)


def again(call):
    @functools.wraps(call)
    def tried(*arguments):
        for _ in range(2):
            with contextlib.suppress(CSDOSError):
                return call(*arguments)
        return call(*arguments)

    return tried


class Patient(Training):
    """Tries again what failed, as a user would."""

    def _step(self, number):
        with mock.patch.object(self.opt, "step", again(self.opt.step)):
            super()._step(number)

    def _load(self):
        with mock.patch.object(self.opt, "load_state_dict", again(self.opt.load_state_dict)):
            super()._load()


def train(devices, *, patient):
    """Trains, closes, goes on. Returns the event that must survive, and whether all went well."""
    durable, training = 0, None
    try:
        for until in (CLOSED, END):
            training = None
            training = (Patient if patient else Training)(SEED, devices)
            training.check(expected(), durable)
            while training.event < until:
                training.next_event()  # what it reads of `state` then may be gone: nobody has been told yet
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


@pytest.mark.parametrize(
    ("devices", "at_once", "patient"),
    [(1, True, True), (2, False, False)],
)
def test_every_flush_fails_once(devices, at_once, patient, tmp_path):
    """One after another, each in a run of its own, and what it should have covered is gone."""
    torch.set_num_threads(1)
    expected()  # which sets the seed
    nth, told, wrong = 0, 0, []
    while True:
        place = tmp_path / str(nth)
        place.mkdir()
        names = [str(place / f"csd{d}") for d in range(devices)]
        with LosingDisk(place, nth, at_once=at_once) as disk:
            try:
                durable, well = train(names, patient=patient)
            except (CSDError, Violation) as e:
                wrong.append(f"{disk.failed}: while training: {e}")
                durable, well = 0, False
        if not disk.failed:
            break
        told += not well
        try:
            found = Training(SEED, names)
            found.check(expected(), durable)
            found.check_next(expected())
            found.opt.close()
        except (CSDError, Violation) as e:
            wrong.append(f"{disk.failed}: {'it was told' if not well else 'nobody was told'}: {e}")
        nth += 1
    assert not wrong, f"{len(wrong)} of {nth}: " + "\n".join(wrong)
    assert nth > 40 * devices
    assert 0 < told < nth  # metadata are written again, and nothing is lost
