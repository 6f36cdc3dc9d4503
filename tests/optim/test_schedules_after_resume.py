"""A schedule that is made anew after a resume gives the rates of a run that was never interrupted."""

import copy
import gc
import shutil
import warnings
import weakref

import pytest
import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

from csd_optim import CSDAdam, CSDWarning

STEPS = 8

SCHEDULES = {
    "LambdaLR": lambda opt: lrs.LambdaLR(opt, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda opt: lrs.MultiplicativeLR(opt, lambda epoch: 0.9),
    "StepLR": lambda opt: lrs.StepLR(opt, 3, gamma=0.5),
    "MultiStepLR": lambda opt: lrs.MultiStepLR(opt, [2, 6], gamma=0.5),
    "ConstantLR": lambda opt: lrs.ConstantLR(opt, 0.5, total_iters=4),
    "LinearLR": lambda opt: lrs.LinearLR(opt, 0.1, total_iters=6),
    "ExponentialLR": lambda opt: lrs.ExponentialLR(opt, 0.8),
    "PolynomialLR": lambda opt: lrs.PolynomialLR(opt, 10, power=2.0),
    "CosineAnnealingLR": lambda opt: lrs.CosineAnnealingLR(opt, 8),
    "CosineAnnealingWarmRestarts": lambda opt: lrs.CosineAnnealingWarmRestarts(opt, 4),
    "OneCycleLR": lambda opt: lrs.OneCycleLR(opt, 0.1, total_steps=STEPS + 1),
    "CyclicLR": lambda opt: lrs.CyclicLR(opt, 0.001, 0.1, step_size_up=4),
    "ReduceLROnPlateau": lambda opt: lrs.ReduceLROnPlateau(opt, patience=1, factor=0.5),
    "SWALR": lambda opt: SWALR(opt, 0.05, anneal_epochs=5),
    "SequentialLR": lambda opt: lrs.SequentialLR(
        opt, [lrs.LinearLR(opt, 0.1, total_iters=4), lrs.CosineAnnealingLR(opt, 8)], milestones=[4]
    ),
    "ChainedScheduler": lambda opt: lrs.ChainedScheduler(
        [lrs.ConstantLR(opt, 0.5, total_iters=4), lrs.ExponentialLR(opt, 0.9)]
    ),
    "Chained in Sequential": lambda opt: lrs.SequentialLR(
        opt,
        [
            lrs.ChainedScheduler([lrs.LinearLR(opt, 0.5, total_iters=3), lrs.ExponentialLR(opt, 0.9)]),
            lrs.LinearLR(opt, 1.0, 0.1, total_iters=6),
        ],
        milestones=[5],
    ),
}


def advance(schedule):
    schedule.step(*[1.0] * isinstance(schedule, lrs.ReduceLROnPlateau))


class Program:
    """A training script. `goes_on(opt, schedules, saved)`: how it resumes; `saved`: states after their step()."""

    def __init__(self, directory, *make, lr=0.01, every=1):
        self.directory, self.make, self.lr, self.every, self.saved = directory, make, lr, every, None

    def run(self, until, goes_on=None):
        """Return the rate and beta1 of each step of each group until this step."""
        lr = self.lr.clone() if isinstance(self.lr, torch.Tensor) else self.lr
        groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "lr": lr * scale} for scale in (1, 2)]
        with CSDAdam(groups, lr=lr, devices=self.directory, resume=goes_on is not None) as opt:
            schedules = goes_on(self, opt) if goes_on else [make(opt) for make in self.make]
            taken = []
            for step in range(opt.committed_step, until):
                for group in opt.param_groups:
                    group["params"][0].grad = torch.ones(3)
                opt.user_state = {"schedules": [schedule.state_dict() for schedule in schedules]}
                taken.append([(float(group["lr"]), group["betas"][0]) for group in opt.param_groups])
                opt.step()
                if (step + 1) % self.every == 0:
                    for schedule in schedules:
                        advance(schedule)
                self.saved = [schedule.state_dict() for schedule in schedules]
        return taken

    def loaded(self, opt, states):
        schedules = [make(opt) for make in self.make]
        for schedule, state in zip(schedules, states, strict=True):
            schedule.load_state_dict(state)
        return schedules


def by_user_state(program, opt):
    schedules = program.loaded(opt, opt.user_state["schedules"])
    for schedule in schedules:
        if opt.committed_step % program.every == 0:
            advance(schedule)
    return schedules


def one_after_the_other(program, opt):
    schedules = [make(opt) for make in program.make]
    for schedule, state in zip(schedules, opt.user_state["schedules"], strict=True):
        schedule.load_state_dict(state)
        if opt.committed_step % program.every == 0:
            advance(schedule)
    return schedules


def by_a_file(program, opt):
    return program.loaded(opt, program.saved)


def restored_first(program, opt):
    schedules = [make(opt) for make in program.make]
    opt.restore()
    for schedule, state in zip(schedules, program.saved, strict=True):
        schedule.load_state_dict(state)
    return schedules


def restored_afterwards(program, opt):
    schedules = by_user_state(program, opt)
    opt.restore()
    return schedules


def replayed(program, opt):
    schedules = [make(opt) for make in program.make]
    for step in range(opt.committed_step):
        if (step + 1) % program.every == 0:
            for schedule in schedules:
                advance(schedule)
    return schedules


def with_a_look_in_between(program, opt):
    group = opt.param_groups[0]
    schedules = [make(opt) for make in program.make]
    assert group["lr"] == opt.param_groups[0]["lr"]
    for schedule, state in zip(schedules, program.saved, strict=True):
        schedule.load_state_dict(state)
    assert group is opt.param_groups[0]
    return schedules


WAYS = (by_user_state, by_a_file, restored_first, restored_afterwards, replayed, with_a_look_in_between)


def check(tmp_path, points, ways, *make, **how):
    """Compare runs that were closed after `points` steps and resumed in these ways with one that was not."""
    right = Program(str(tmp_path / "right"), *make, **how).run(STEPS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step")
        warnings.filterwarnings("ignore", message="The epoch parameter")
        warnings.filterwarnings("error", category=CSDWarning)
        for point in points:
            closed = Program(str(tmp_path / f"closed at {point}"), *make, **how)
            before = closed.run(point)
            for goes_on in ways:
                program = copy.copy(closed)
                program.saved = copy.deepcopy(closed.saved)  # CyclicLR takes entries out of what it loads
                program.directory = str(tmp_path / f"{goes_on.__name__} at {point}")
                shutil.copytree(closed.directory, program.directory)
                assert before + program.run(STEPS, goes_on) == right, program.directory


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_an_uninterrupted_run(tmp_path, name, way):
    if (name, way) != ("ReduceLROnPlateau", replayed):  # which would need the losses
        check(tmp_path, (1, 6), [way], SCHEDULES[name])


@pytest.mark.parametrize("name", ["LinearLR", "SequentialLR", "OneCycleLR", "CosineAnnealingLR"])
def test_rates_that_are_tensors(tmp_path, name):
    check(tmp_path, (3,), WAYS, SCHEDULES[name], lr=torch.tensor(0.01))


@pytest.mark.parametrize("name", ["LinearLR", "ConstantLR", "ChainedScheduler"])
def test_a_schedule_that_steps_once_in_three_steps(tmp_path, name):
    check(tmp_path, (2, 6), WAYS, SCHEDULES[name], every=3)


def test_two_schedules_beside_each_other(tmp_path):
    ways = [*(set(WAYS) - {restored_afterwards}), one_after_the_other]  # restore() does not know which one acts last
    check(tmp_path, (3,), ways, SCHEDULES["LinearLR"], SCHEDULES["ExponentialLR"])


def resumed(directory, make=SCHEDULES["LinearLR"], steps=3):
    """Return an optimizer that resumes a store of this many steps."""
    Program(directory, make).run(steps)
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.01 * scale} for scale in (1, 2)]
    return CSDAdam(groups, lr=0.01, devices=directory, resume=True)


def step(opt):
    for group in opt.param_groups:
        group["params"][0].grad = torch.ones(3)
    opt.step()


def test_a_schedule_that_begins_anew_is_reported(tmp_path):
    for name, make in SCHEDULES.items():
        if name in ("ReduceLROnPlateau", "StepLR", "MultiStepLR", "ConstantLR"):
            continue  # they have the same rate in the first step and the third
        with resumed(str(tmp_path / name), make, steps=3) as opt:
            schedule = make(opt)
            with pytest.warns(CSDWarning, match=f"{type(schedule).__name__} begins anew.*load_state_dict"):
                step(opt)
            with warnings.catch_warnings():
                warnings.simplefilter("error", CSDWarning)
                step(opt)  # told once


def test_restore_does_not_hide_that(tmp_path):
    with resumed(str(tmp_path / "store")) as opt:
        rate = opt.param_groups[0]["lr"]
        schedule = SCHEDULES["LinearLR"](opt)
        opt.restore()
        assert opt.param_groups[0]["lr"] == rate
        with pytest.warns(CSDWarning, match=f"is {rate} now, and was {rate}"):
            step(opt)
        assert schedule.last_epoch == 0


def test_a_rate_that_the_program_sets_stays(tmp_path):
    """Before a schedule is made, and after it was loaded; by the groups of now, or a group kept from before."""
    for when in ("before", "between", "after", "by a kept group"):
        with resumed(str(tmp_path / when)) as opt, warnings.catch_warnings():
            warnings.simplefilter("error", CSDWarning)
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step")
            kept = opt.param_groups[0]
            if when == "before":
                opt.param_groups[0]["lr"] = 0.5
                step(opt)
                assert opt.param_groups[0]["lr"] == 0.5
                continue
            schedule = SCHEDULES["LinearLR"](opt)
            if when == "between":  # what the schedule is loaded with is later
                opt.param_groups[0]["lr"] = 0.5
            schedule.load_state_dict(opt.user_state["schedules"][0])
            schedule.step()
            expected = schedule.get_last_lr()[0]
            if when == "after":
                opt.param_groups[0]["lr"] = expected = 0.5
            if when == "by a kept group":
                kept["lr"] = expected = 0.5
            step(opt)
            assert opt.param_groups[0]["lr"] == expected, when


TOLD = {
    "StepLR": lambda opt, epoch: lrs.StepLR(opt, 3, gamma=0.5, last_epoch=epoch),
    "LinearLR": lambda opt, epoch: lrs.LinearLR(opt, 0.1, total_iters=6, last_epoch=epoch),
    "ExponentialLR": lambda opt, epoch: lrs.ExponentialLR(opt, 0.8, last_epoch=epoch),
    "CosineAnnealingLR": lambda opt, epoch: lrs.CosineAnnealingLR(opt, 8, last_epoch=epoch),
    "OneCycleLR": lambda opt, epoch: lrs.OneCycleLR(opt, 0.1, total_steps=STEPS + 1, last_epoch=epoch),
    "LambdaLR": lambda opt, epoch: lrs.LambdaLR(opt, lambda e: 0.9**e, last_epoch=epoch),
}


@pytest.mark.parametrize("name", TOLD)
def test_one_that_is_told_its_epoch_goes_on_from_there(tmp_path, name):
    def told(program, opt):
        return [TOLD[name](opt, opt.committed_step - 1)]

    check(tmp_path, (2, 3), [told], SCHEDULES[name])


def test_schedules_keep_nothing_alive_and_groups_stay_plain(tmp_path):
    with resumed(str(tmp_path / "store")) as opt:
        groups = opt.param_groups
        schedule = weakref.ref(SCHEDULES["LinearLR"](opt))
        gc.collect()
        assert schedule() is None
        assert type(groups) is list
        assert all(type(group) is dict for group in groups)
        step(opt)
        assert opt.param_groups is groups
