"""With overlap a program reads the same values as without."""

import errno
import gc
import os
import re
import signal
import sys
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
from support.between_steps import (
    SCRIPTS,
    accumulates,
    accumulates_otherwise_each_time,
    changes_constants_after_backward,
    checkpoints_activations,
    clips,
    edits_states,
    evaluates,
    grows,
    looks_at_states,
    never_clears,
    scales_losses,
    schedules,
    skips_steps,
    steps_in_closures,
    ten_steps,
    writes_parameters,
    writes_past_torch,
)
from support.comparing import bits
from support.inside import engine_of, flight_of, guess_of, mode_of
from support.replacing import class_with
from support.twins import Twin, assert_twins, checksum
from support.use_check import UsedTooEarly, check_uses
from torch import nn

from csd_optim import CSDAdam, CSDError, CSDOSError, CSDRuntimeError, CSDValueError
from csd_optim.engine.engine import Engine
from csd_optim.overlap import flight as flight_module
from csd_optim.overlap import overlap as overlap_module
from csd_optim.overlap.guess import Guess
from csd_optim.step.steps import Steps

FORWARD, BACKWARD = {}, {"backward": True}
both = pytest.mark.parametrize("overlap", [FORWARD, BACKWARD], ids=["forward", "backward"])


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("devices", [1, 3])
def test_training(tmp_path, overlap, dtype, devices):
    training = assert_twins(tmp_path, overlap, ten_steps, dtype=dtype, devices=devices)
    training.opt.close()


@both
@pytest.mark.parametrize(
    "options",
    [
        *({"amsgrad": True}, {"groups": True}, {"maximize": True}, {"max_grad_norm": 1.0}, {"state_dtype": "8bit"}),
        {"grad_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_options(tmp_path, overlap, options):
    dtype = torch.bfloat16 if "state_dtype" in options else torch.float32
    assert_twins(tmp_path, overlap, ten_steps, dtype=dtype, **options).opt.close()


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("patient", [False, True], ids=["", "patient"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_twins_with_matrices(tmp_path, patient, script):
    """Tiles of one pass begin in backward, those of two passes in step()."""
    latency = "100us" if patient else "2ms"
    assert_twins(tmp_path, BACKWARD, script, patient=patient, latency=latency, muon=True).opt.close()


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize(
    ("overlap", "patient"),
    [(FORWARD, False), (BACKWARD, False), (BACKWARD, True)],
    ids=["forward", "backward", "patient"],
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_twins(tmp_path, overlap, patient, script):
    latency = "100us" if patient else "2ms"
    assert_twins(tmp_path, overlap, script, patient=patient, latency=latency).opt.close()


def test_topk_with_gradients_that_are_never_cleared(tmp_path):
    assert_twins(tmp_path, FORWARD, never_clears, topk=0.05, width=80, latency="10ms").opt.close()


@both
def test_new_parameters(tmp_path, overlap):
    """No reader waits for parameters that joined after overlap(): they arrive within step()."""
    assert_twins(tmp_path, overlap, grows).opt.close()


@both
def test_a_model_that_was_changed(tmp_path, overlap):
    """Its guards are gone: everything arrives within step(), and one warning says so."""

    def loses_its_guards(training):
        training.step()
        first = training.model[0].inner
        first._parameters = dict(first._parameters)
        for _ in range(3):
            training.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_twins(tmp_path, overlap, loses_its_guards).opt.close()
    assert len([w for w in caught if "overlap(model) again" in str(w.message)]) == 1


def clips_past_torch(training):
    for k in range(6):
        training.backward()
        for p in training.model.parameters():
            p.grad.data.mul_(0.5 if k % 2 else 1.0)  # does not change the version counter
        training.opt.step()
        training.opt.zero_grad()


def test_gradients_written_past_torch(tmp_path):
    assert_twins(tmp_path, BACKWARD, clips_past_torch, latency="100us", patient=True).opt.close()


def loads_and_overlaps_again(training):
    training.step()
    training.opt.load_state_dict(training.opt.state_dict())
    if training.overlap is not None:
        training.opt.overlap(None)
        assert all(type(group["params"]) is list for group in training.opt.param_groups)
        training.opt.overlap(training.model, **training.overlap)
    for _ in range(3):
        training.step()
        training.log.append([checksum(p) for p in training.opt.param_groups[0]["params"]])


@both
def test_groups_that_were_loaded(tmp_path, overlap):
    assert_twins(tmp_path, overlap, loads_and_overlaps_again, latency="10ms").opt.close()


def adds_groups(training):
    for _ in range(3):
        training.step()
        params = [] + training.opt.param_groups[0]["params"] + training.opt.param_groups[1]["params"]
        training.log.append([checksum(p) for p in params])


def test_groups_added_to_a_list(tmp_path):
    assert_twins(tmp_path, FORWARD, adds_groups, latency="10ms", groups=True).opt.close()


@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_a_parameter_that_takes_no_part_is_there_at_once(tmp_path):
    training = Twin(tmp_path, FORWARD, latency="50ms", depth=8)
    for _ in range(2):
        training.step()
    training.opt.wait()
    frozen = training.model[0].inner.requires_grad_(False)
    training.step()
    frozen(torch.ones(1, training.width))
    flight = flight_of(training.opt)
    assert flight
    assert not flight.landed
    training.opt.close()


def test_a_forked_child_has_what_had_landed(tmp_path):
    training = Twin(tmp_path, FORWARD)
    training.step()
    flight_of(training.opt).live.travel.ended.wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            training.model(torch.ones(1, training.width))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    training.opt.close()


@pytest.mark.parametrize("name", ["begin", "push"])
def test_ctrl_c_in_a_hook_of_backward(tmp_path, monkeypatch, name):
    training = Twin(tmp_path, BACKWARD, latency="100us", patient=True)
    for _ in range(3):
        training.step()
    training.opt.wait()
    owner = class_with(name)
    method = getattr(owner, name)

    def interrupted(*arguments, **named):
        monkeypatch.undo()
        found = method(*arguments, **named)
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.backward()
    assert not engine_of(training.opt).stepping
    training.opt.zero_grad()
    training.step()
    training.opt.close()


def goes_backward_on_two_threads(training):
    for _ in range(30):
        halves = [training.model[:2], training.model[2:]]
        losses = [half(torch.full((2, training.width), 0.1)).square().sum() for half in halves]
        training.opt.wait()
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        training.opt.step()
        training.opt.zero_grad()


def test_two_threads_go_backward(tmp_path):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        training = assert_twins(tmp_path, BACKWARD, goes_backward_on_two_threads, latency="50us", depth=8)
    finally:
        sys.setswitchinterval(interval)
    assert not training.opt.stats()["overlap"]["redone"]
    training.opt.close()


def changes_grad_dtype_after_backward(training):
    for k in range(6):
        training.backward()
        training.opt.grad_dtype = torch.bfloat16 if k >= 3 else None
        training.opt.step()
        training.opt.zero_grad()


def test_grad_dtype_changed_after_backward(tmp_path):
    script = changes_grad_dtype_after_backward
    assert_twins(tmp_path, BACKWARD, script, latency="100us", patient=True).opt.close()


@pytest.mark.parametrize("ask", [lambda opt: opt.state, lambda opt: opt.stats(), lambda opt: opt.synchronize()])
def test_a_step_that_another_thread_launches_meanwhile(tmp_path, monkeypatch, ask):
    training = Twin(tmp_path, FORWARD, named=True)
    training.step()
    settle = CSDAdam._settle

    def settled(opt, **how):
        settle(opt, **how)
        monkeypatch.undo()
        training.step()  # as another thread might, now that nothing is under way

    monkeypatch.setattr(CSDAdam, "_settle", settled)
    ask(training.opt)
    assert flight_of(training.opt) is None or flight_of(training.opt).landed
    training.opt.close()


def test_a_guess_that_fails_as_it_begins(tmp_path, monkeypatch):
    """The devices have begun: whatever fails next, the guess is undone."""
    training = Twin(tmp_path, BACKWARD, latency="50us", patient=True)
    training.step()
    training.step()
    begin, begun = Engine.begin, []

    def fails(*arguments, **named):
        begun.append(begin(*arguments, **named))
        raise MemoryError("stands for any failure")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "begin", fails)
        with pytest.raises(MemoryError):
            training.backward()
    assert len(begun) == 1
    assert not engine_of(training.opt).stepping
    training.opt.zero_grad()
    training.step()
    assert training.opt.stats()["overlap"]["redone"] == {"failure": 1}
    training.opt.close()


@pytest.mark.at_hand("images are copied to parameters later")
def test_a_guess_that_fails_as_it_is_confirmed(tmp_path, monkeypatch):
    """Parameters that were held back may be written by then. They get their old values again."""
    training = Twin(tmp_path, BACKWARD, latency="50us", patient=True)
    training.step()
    training.step()
    training.backward()
    kept, pushed = [*training.model.parameters()], np.array(guess_of(training.opt).pushed, np.uint32)
    before, release = [checksum(p) for p in kept], Engine.release

    def fails(engine, *arguments):
        release(engine, *arguments)
        engine.native.params_ready(pushed, wait=True)
        assert [checksum(p) for p in kept] != before
        raise CSDOSError(errno.EIO, "stands for any failure")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "release", fails)
        with pytest.raises(CSDOSError, match="stands for"):
            training.opt.step()
    assert [checksum(p) for p in kept] == before
    training.opt.zero_grad()
    training.step()
    training.opt.close()


def test_what_cannot_begin_is_tried_once_a_step(tmp_path, monkeypatch):
    training = Twin(tmp_path, BACKWARD, latency="50us", patient=True)
    training.step()
    training.step()
    training.opt.wait()
    tried = []
    foresee = Steps.foresee
    monkeypatch.setattr(Steps, "foresee", lambda steps: (tried.append(1), foresee(steps))[1])
    training.opt.overlap(training.model, backward=True)
    for _ in range(4):
        with torch.no_grad():
            training.model[0].inner.bias.add_(1)
        training.step()
    assert 1 <= len(tried) <= 4
    training.opt.close()


@pytest.mark.parametrize(
    ("hold", "error", "says"), [("500TB", RuntimeError, "allocate memory"), ("a lot", CSDValueError, "Invalid size")]
)
def test_a_hold_that_cannot_be_changes_nothing(tmp_path, hold, error, says):
    training = Twin(tmp_path, FORWARD)
    with pytest.raises(error, match=says):
        training.opt.overlap(training.model, backward=True, hold=hold)
    training.step()
    training.opt.overlap(training.model, backward=True)
    training.step()
    training.opt.close()


def test_what_is_held_is_let_go_of(tmp_path):
    training = Twin(tmp_path, {"backward": True, "hold": "1MB"}, latency="100us", patient=True)
    for _ in range(4):
        training.step()
    hold = weakref.ref(mode_of(training.opt)._early._hold)
    assert hold() is not None
    training.opt.overlap(None)
    assert hold() is None
    training.opt.close()


@both
def test_another_optimizer_after_one_that_was_dropped(tmp_path, overlap):
    training = Twin(tmp_path, overlap, latency="1ms", patient=True)
    for _ in range(3):
        training.step()
    dropped = weakref.ref(training.opt)

    def drop(_):
        if hasattr(training, "opt"):
            del training.opt
            gc.collect()

    training.model[2].inner.weight.register_post_accumulate_grad_hook(drop)
    loss = training.model(torch.ones(1, training.width)).sum()
    training.opt.wait()
    loss.backward()  # its hook drops the optimizer while a guess is under way
    assert dropped() is None
    with CSDAdam(training.model.parameters(), devices="file:") as again:
        again.overlap(training.model, **overlap)
        again.step()


# ---- failures --------------------------------------------------------------------------------


def test_a_gradient_changed_after_step_is_an_error(tmp_path):
    training = Twin(tmp_path, FORWARD, latency="100ms")
    training.step()
    before = [checksum(p) for p in training.model.parameters()]
    training.backward()
    grad = training.model[0].inner.weight.grad
    training.opt.step()
    grad.mul_(2)
    with pytest.raises(CSDRuntimeError, match=r"gradient of .* was changed after step"):
        training.opt.wait()
    assert [checksum(p) for p in training.model.parameters()] == before
    training.opt.wait()  # raises only once
    training.opt.step()
    training.opt.close()


def test_no_overlap_leaves_no_trace(tmp_path):
    training = Twin(tmp_path, None)
    training.step()
    assert type(training.opt.param_groups[0]["params"]) is list
    training.opt.overlap(training.model, backward=True)
    training.step()
    training.opt.overlap(None)
    assert type(training.opt.param_groups[0]["params"]) is list
    for module in training.model.modules():
        assert type(module._parameters) is dict
        assert not module._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in training.model.parameters())
    training.opt.close()


@pytest.mark.at_hand("such devices keep two copies")
def test_backward_needs_two_copies():
    model = nn.Linear(4, 4)
    with CSDAdam(model.parameters(), devices="ram:") as opt:
        with pytest.raises(CSDValueError, match="second copy"):
            opt.overlap(model, backward=True)
        opt.overlap(model)
        model(torch.ones(4)).sum().backward()
        opt.step()


@both
def test_dropped_while_a_step_is_under_way(tmp_path, overlap):
    training = Twin(tmp_path, overlap)
    training.step()
    training.step()
    training.backward()
    if overlap is FORWARD:
        training.opt.step()
    opt = weakref.ref(training.opt)
    del training.opt
    gc.collect()
    assert opt() is None
    training.model(torch.ones(2, training.width))  # does not wait forever


def test_closed_while_a_step_is_under_way(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    model = nn.Linear(64, 64)
    opt = CSDAdam(model.parameters(), devices=[f"file:{store}?latency=5ms"], tile_size=1024)
    opt.overlap(model)
    for _ in range(3):
        model(torch.ones(64)).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    after = [bits(p.detach().clone()) for p in model.parameters()]
    with CSDAdam(model.parameters(), devices=[store], resume=True) as again:
        assert again.committed_step == 3
    assert all(torch.equal(a, bits(p.detach())) for a, p in zip(after, model.parameters(), strict=True))


def runs_the_model(training):
    training.model(torch.ones(1, training.width))


FREE = {"free_gradients": True}
OWNER, WAIT = "Construct the optimizer after forking", r"Call the optimizer's wait\(\) before the fork"


@pytest.mark.parametrize(
    ("overlap", "before", "act", "expected"),
    [
        (FORWARD, Twin.step, runs_the_model, WAIT),
        (FORWARD, Twin.step, lambda training: training.model.state_dict(), WAIT),
        (FORWARD, Twin.step, lambda training: training.opt.step(), OWNER),
        (FORWARD, Twin.step, lambda training: training.opt.state, OWNER),
        (BACKWARD, Twin.step, runs_the_model, WAIT),
        (BACKWARD, Twin.backward, runs_the_model, None),  # what has begun in backward changes no parameter
        (BACKWARD, Twin.backward, Twin.backward, None),
        (BACKWARD, Twin.backward, lambda training: training.opt.zero_grad(), None),
        (BACKWARD, Twin.backward, lambda training: training.opt.close(), None),
        (BACKWARD, Twin.backward, lambda training: training.opt.step(), OWNER),
        (FREE, Twin.backward, runs_the_model, r"Fork before backward or after step\(\)"),
        (FREE, Twin.backward, lambda training: training.opt.step(), OWNER),
        (FREE, Twin.step, runs_the_model, None),
    ],
)
def test_in_a_forked_child(tmp_path, overlap, before, act, expected):
    """What a child does that was forked while a step was under way: it is told what helps, and never waits for ever."""
    training = Twin(tmp_path, overlap, latency="20ms", patient=True)
    for _ in range(3):
        training.step()
    training.opt.wait()
    before(training)
    assert before is Twin.step or overlap is FREE or guess_of(training.opt)
    training.patient = False
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            act(training)
            code = 2 if expected else 0
        except CSDRuntimeError as e:
            code = 0 if expected and re.search(expected, str(e)) else 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    training.opt.step()
    training.opt.zero_grad()
    training.step()
    training.opt.close()


# ---- guesses ---------------------------------------------------------------------------------


def guessed(directory, script):
    """The outcome of the guesses of a run: whether each step kept one, and counts of why the others were wrong."""
    training = Twin(directory, BACKWARD, latency="100us", patient=True)
    early = []
    training.opt.register_step_post_hook(lambda *_: early.append(mode_of(training.opt).stats()["early_params"] > 0))
    script(training)
    redone = training.opt.stats()["overlap"]["redone"]
    training.opt.close()
    return early, redone


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (clips, "gradients"),
        (changes_constants_after_backward, "constants"),
        (skips_steps, "cleared gradients"),
        (accumulates_otherwise_each_time, "more backward passes"),
        (looks_at_states, "other calls"),
        (edits_states, "states"),
        (writes_parameters, "parameters"),
        pytest.param(
            *(writes_past_torch, "gradients"),
            marks=pytest.mark.at_hand("devices that do not reach parameters find only writes that torch counts"),
        ),
        (scales_losses, "overflow"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_wrong_guess_is_redone(tmp_path, script, why):
    assert why in guessed(tmp_path, script)[1]


@pytest.mark.parametrize("script", [ten_steps, schedules, evaluates, steps_in_closures, accumulates])
def test_a_right_guess_is_kept(tmp_path, script):
    early, redone = guessed(tmp_path, script)
    assert any(early)
    assert not redone


# ---- nothing uses a parameter that has not arrived --------------------------------------------


@both
@pytest.mark.parametrize("script", [ten_steps, evaluates, writes_parameters, looks_at_states, checkpoints_activations])
def test_everything_that_waits_passes_the_check(tmp_path, overlap, script, monkeypatch):
    check_uses(monkeypatch)
    assert_twins(tmp_path, overlap, script).opt.close()


def test_the_check_finds_who_does_not_wait(tmp_path, monkeypatch):
    check_uses(monkeypatch)
    training = Twin(tmp_path, FORWARD, latency="20ms")
    kept = list(training.model.parameters())
    training.step()
    with pytest.raises(UsedTooEarly, match=r"uses 0\.0, which the last step"):
        kept[0].sum()
    training.opt.wait()
    kept[0].sum()
    training.opt.close()


# ---- every wait is needed --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "name"),
    [(overlap_module.Overlap, "wait"), (flight_module.Flight, "wait")],
    ids=["Overlap.wait", "Flight.wait"],
)
def test_without_the_wait_twins_differ(tmp_path, monkeypatch, where, name):
    monkeypatch.setattr(where, name, lambda *_, **__: True)  # claims that all has arrived
    with pytest.raises(AssertionError, match="another parameter was used"):
        assert_twins(tmp_path, FORWARD, ten_steps, latency="10ms")


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("wrong_before", edits_states),
        ("wrong", clips),
    ],
)
def test_without_the_comparison_twins_differ(tmp_path, monkeypatch, name, script):
    monkeypatch.setattr(Guess, name, lambda *_: "")
    with pytest.raises((AssertionError, CSDError)):
        assert_twins(tmp_path, BACKWARD, script, latency="100us", patient=True)
