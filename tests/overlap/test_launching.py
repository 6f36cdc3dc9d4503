"""A step of `ram:` cannot be undone once it has begun: whatever can fail as it is launched comes before that."""

import contextlib
import gc
import itertools
import sys
import threading

import pytest
import torch
from support import far
from support.comparing import assert_same, params_of
from torch import nn

import csd_optim
from csd_optim import CSDAdam
from csd_optim.bindings import Native
from csd_optim.overlap.overlap import Overlap

HERE = csd_optim.__path__[0]
# Names of what runs between the begin of the devices and the thread that lands the step. It pushes tiles, which fails
# if a device does, and reads attributes; nothing of it can fail in Python.
MAY_RUN = {
    *("begin", "_array", "_call", "check", "step_begins", "push", "spec", "start", "pushed_by_run", "is_traced"),
    *("queue_accelerator", "queue_all", "release_scratch", "mark_synced", "version_now", "version", "version_of"),
}


class Failed(Exception):
    """Stands for any failure."""


def launched(state_dtype):
    """A training whose next step, the fourth, only has to be launched."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 8))
    opt = CSDAdam(model.parameters(), devices="ram:", tile_size=1024, state_dtype=state_dtype)
    opt.overlap(model)
    for number in range(3):
        give_gradients(opt, number)
        opt.step()
    opt.wait()
    give_gradients(opt, 3)
    return opt


def give_gradients(opt, number):
    generator = torch.Generator().manual_seed(number)
    for p in params_of(opt):
        p.grad = torch.randn(p.shape, generator=generator)


def image(opt):
    opt.wait()
    return [[p.detach().clone(), opt.state[p]["exp_avg"].clone()] for p in params_of(opt)]


@contextlib.contextmanager
def traced(function, on_call):
    """Tell `on_call` the code of each function of csd_optim that is called from the call of this one on."""
    began = False

    def tracer(frame, event, arg):
        nonlocal began
        if frame.f_code.co_filename.startswith(HERE):
            began = began or frame.f_code is function.__code__
            if began:
                on_call(frame.f_code)

    before = sys.gettrace()
    gc.disable()  # no finalizer of an earlier optimizer runs inside
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(before)
        gc.enable()


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_a_failure_in_any_call_before_the_devices_begin(state_dtype):
    opt, never_failed = launched(state_dtype), launched(state_dtype)
    for number in itertools.count():
        codes = []

        def fail(code, codes=codes, number=number):
            codes.append(code)
            if len(codes) > number:
                raise Failed

        with traced(Overlap._fly, fail), pytest.raises(Failed):
            opt.step()
        opt.step()
        never_failed.step()
        assert_same(image(opt), image(never_failed))
        if codes[-1] is Native.begin.__code__:
            break
        for each in opt, never_failed:
            give_gradients(each, 4 + number)
    assert number > 20
    opt.close()
    never_failed.close()


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_what_runs_between_the_begin_and_the_thread(state_dtype, monkeypatch):
    opt = launched(state_dtype)
    names = []
    start = threading.Thread.start

    def starts(thread):
        sys.settrace(None)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    with traced(Native.begin, lambda code: names.append(code.co_name)):
        opt.step()
    assert "push" in names or state_dtype == "8bit" or far.assumed()  # the thread pushes images
    assert {*names} <= MAY_RUN
    image(opt)
    opt.close()
