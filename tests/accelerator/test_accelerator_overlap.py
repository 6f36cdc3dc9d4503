"""With overlap on an accelerator every value that a program reads is the one that it would be without.

What a program may do between two steps is that of tests/overlap/. What each layer computes with is copied when it is
used, on its own stream, and looked at in the end: looking at once would be a wait that a missing one hides behind.
"""

import gc
import random
import threading

import pytest
import torch
from support import emulated
from support.between_steps import (
    SCRIPTS,
    History,
    accumulates_otherwise_each_time,
    checkpoints_activations,
    clips,
    evaluates,
    looks_at_states,
    never_clears,
    scales_losses,
    skips_steps,
    takes_turns,
    ten_steps,
    writes_parameters,
    writes_past_torch,
)
from support.inside import flight_of, guess_of, images_back, mode_of, pusher_of, state_map_of
from support.on_accelerator import BACKWARD, DEVICE, DTYPES, keep_busy
from support.replacing import failing
from support.twins import Twin, assert_twins, checksum
from support.use_check import check_uses

from csd_optim import CSDOSError, CSDRuntimeError
from csd_optim.bindings import Native
from csd_optim.overlap.early_images import EarlyImages
from csd_optim.step import sparse
from csd_optim.step.live import LiveStep
from csd_optim.step.staging import StagingBuffer, StagingRing

pytestmark = pytest.mark.accelerator

EVERYWHERE = [*(f"{DEVICE}:{i}" for i in range(torch.accelerator.device_count())), "cpu"]
OFTEN = checkpoints_activations, never_clears, scales_losses, takes_turns, writes_parameters
LARGE = 80  # width of layers: then they are large enough for Top-K


def twins(directory, script, overlap=None, **options):
    return assert_twins(directory, overlap or {}, script, **{"place": [DEVICE], **options})


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_twins(tmp_path, script):
    twins(tmp_path, script).opt.close()


@pytest.mark.parametrize(
    "script",
    [script if script in OFTEN else pytest.param(script, marks=pytest.mark.soak) for script in SCRIPTS],
    ids=lambda script: script.__name__,
)
def test_twins_that_begin_in_backward(tmp_path, script):
    twins(tmp_path, script, BACKWARD, patient=True, latency="100us").opt.close()


@pytest.mark.parametrize("muon", [False, True], ids=["", "muon"])
def test_little_room_for_what_begins_in_backward(tmp_path, muon):
    """More tiles than a device has buffers are left to step(), which pushes a few at a time, and must not hang."""
    overlap = {**BACKWARD, "hold": "20kB"}
    twins(tmp_path, ten_steps, overlap, patient=True, latency="100us", width=LARGE, depth=8, muon=muon).opt.close()


def writes_states_before_each_step(training):
    for _ in range(5):
        training.step()
        training.opt.state[next(training.model.parameters())]["exp_avg"].mul_(0.5)
    ten_steps(training)


@pytest.mark.parametrize("overlap", [{}, BACKWARD], ids=["", "backward"])
def test_states_are_written_before_the_order_of_tiles_changes(tmp_path, overlap):
    """The second step with overlap is the first that begins with what forward uses first."""
    twins(tmp_path, writes_states_before_each_step, overlap, latency="100us", width=LARGE, depth=8).opt.close()


def steps_with_strided_gradients(training):
    """The gradients of the last layers have another order in memory than their parameters: step() pushes these."""
    for layer in training.model[-3:]:
        layer.inner.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.t().contiguous().t()))
    if training.overlap is not None:  # so that the hooks above come first
        training.opt.overlap(training.model, **training.overlap)
    ten_steps(training)


@pytest.mark.parametrize("muon", [False, True], ids=["", "muon"])
def test_gradients_that_cannot_be_pushed_in_backward(tmp_path, muon):
    script = steps_with_strided_gradients
    twins(tmp_path, script, BACKWARD, patient=True, latency="100us", width=LARGE, depth=6, muon=muon).opt.close()


@pytest.mark.parametrize("script", OFTEN, ids=lambda script: script.__name__)
def test_twins_with_matrices(tmp_path, script):
    twins(tmp_path, script, BACKWARD, patient=True, latency="100us", muon=True).opt.close()


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ([DEVICE], {}),
        ([DEVICE], {"dtype": torch.bfloat16, "state_dtype": "8bit"}),
        (EVERYWHERE, {"groups": True}),
        (EVERYWHERE, {"dtype": torch.bfloat16, "devices": 3}),
    ],
    ids=str,
)
def test_a_guess_is_right(tmp_path, place, options):
    """The values copied in backward are the gradients of the step, and the step keeps what began with them."""
    early = []

    def script(training):
        mode = mode_of(training.opt)
        if training.overlap is not None:
            training.opt.register_step_post_hook(lambda *_: early.append(mode.stats()["early_params"]))
        ten_steps(training)

    training = twins(tmp_path, script, BACKWARD, patient=True, latency="100us", place=place, **options)
    assert training.opt.stats()["overlap"]["redone"] == {}
    assert sum(early) > 0
    training.opt.close()


def looks_at_codes(training):
    """Read 8-bit states before a backward, and after it."""
    for _ in range(4):
        for goes_back in False, True:
            if goes_back:
                training.backward()
            entries = training.opt.state.values()
            training.log.append([checksum(t) for entry in entries for t in entry.values()])
        training.opt.step()
        training.opt.zero_grad()


@pytest.mark.parametrize(
    ("script", "why", "options"),
    [
        (clips, "gradients", {}),
        (writes_past_torch, "gradients", {"dtype": torch.bfloat16, "state_dtype": "8bit"}),  # codes read parameters
        (skips_steps, "cleared gradients", {}),
        (accumulates_otherwise_each_time, "more backward passes", {}),
        (looks_at_states, "other calls", {}),
        (looks_at_codes, "other calls", {"dtype": torch.bfloat16, "state_dtype": "8bit"}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_guess_is_wrong(tmp_path, script, why, options):
    training = twins(tmp_path, script, BACKWARD, patient=True, latency="100us", **options)
    assert training.opt.stats()["overlap"]["redone"][why] > 0
    training.opt.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_history(tmp_path, seed):
    choose = random.Random(seed)
    options = {"dtype": choose.choice(DTYPES), "devices": choose.choice([1, 2]), "groups": choose.random() < 0.3}
    options |= {"max_grad_norm": choose.choice([None, 0.5]), "topk": choose.choice([None, None, 0.05])}
    options |= {"state_dtype": choose.choice(["fp32", "8bit"]), "latency": choose.choice(["50us", "1ms"])}
    options |= {"place": choose.choice([[DEVICE], EVERYWHERE]), "width": LARGE if options["topk"] else 48}
    overlap = BACKWARD if seed % 2 else {}
    twins(tmp_path, History(seed), overlap, patient=choose.random() < 0.5, **options).opt.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("devices", "overlap"), [(1, BACKWARD), (3, {})], ids=str)
def test_several_devices_and_the_host(tmp_path, dtype, devices, overlap):
    twins(tmp_path, ten_steps, overlap, place=EVERYWHERE, dtype=dtype, devices=devices).opt.close()


@pytest.mark.ci
@pytest.mark.parametrize("script", [never_clears, looks_at_states])
@pytest.mark.usefixtures("way")
def test_what_topk_owes(tmp_path, script, monkeypatch):
    """Residuals are stored before gradients are freed, also when several tiles are selected at once."""
    monkeypatch.setattr(sparse, "BATCH_BYTES", 40_000)  # four tiles
    twins(tmp_path, script, topk=0.05, width=LARGE).opt.close()


@pytest.mark.parametrize("script", [ten_steps, evaluates])
def test_what_waits_passes_the_check(tmp_path, script, monkeypatch):
    check_uses(monkeypatch)
    twins(tmp_path, script).opt.close()


def strided(training):
    """Use strided gradients, and a strided parameter, whose states have another order: it is there after step()."""
    for k in range(4):
        if k == 2:
            weight = training.model[1].inner.weight
            weight.data = weight.data.t().contiguous().t()
        training.backward()
        for p in training.model.parameters():
            p.grad = torch.stack([p.grad, p.grad], -1)[..., 0]
        training.opt.step()
        training.opt.zero_grad()


def test_layouts(tmp_path):
    twins(tmp_path, strided).opt.close()


def replaced_by_strided(training):
    """Replace gradients by equal ones at other addresses, with other strides, so that a guess must compare values."""
    for _ in range(4):
        training.backward()
        for p in training.model.parameters():
            p.grad = torch.stack([p.grad, p.grad], -1)[..., 0]
        training.opt.step()
        training.opt.zero_grad()


def test_strided_gradients_are_compared(tmp_path):
    """Strided gradients are compared with the guess's after they are brought into the states' order."""
    training = twins(tmp_path, replaced_by_strided, BACKWARD, patient=True, latency="100us")
    assert training.opt.stats()["overlap"]["redone"] == {}
    assert training.opt.stats()["overlap"]["early_params"] > 0
    training.opt.close()


# ---- streams ---------------------------------------------------------------------------------


def reads_on_other_streams(training):
    """Each stream must wait by itself, whatever others have waited for. After everything has landed, none must."""
    main, sides = torch.accelerator.current_stream(), [torch.Stream(DEVICE) for _ in range(2)]
    first = training.model[0].inner
    for k in range(4):
        training.backward()
        training.opt.step()
        for side in sides:
            side.wait_stream(main)
            with side:
                training.log.append([first.weight.detach().clone()])
                if k % 2:
                    training.opt.wait()
        training.log.append([first.weight.detach().clone()])
        for side in sides:
            main.wait_stream(side)
        training.opt.zero_grad()


def reads_here_and_uses_there(training):
    """Another stream waits for this one before the parameter is read here, and not again."""
    main, side = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    for k in range(4):
        training.backward()
        training.opt.step()
        side.wait_stream(main)
        weight = training.model[0].inner.weight if k % 2 else next(training.model.parameters())
        with side:
            training.log.append([weight.detach().clone()])
        side.synchronize()  # now, and not when somebody looks
        training.opt.zero_grad()


@pytest.mark.parametrize("script", [reads_on_other_streams, reads_here_and_uses_there])
def test_other_streams(tmp_path, script):
    twins(tmp_path, script).opt.close()


def steps_on_a_side_stream(training):
    side = torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        ten_steps(training)
    side.synchronize()


@pytest.mark.parametrize("overlap", [{}, BACKWARD], ids=str)
def test_a_side_stream(tmp_path, overlap):
    training = twins(tmp_path, steps_on_a_side_stream, overlap, patient=bool(overlap))
    assert training.opt.stats()["overlap"]["redone"] == {}
    training.opt.close()


def drops_gradients(training):
    """Drop gradients at once, and let other tensors reuse and overwrite their memory."""
    for _ in range(4):
        training.backward()
        keep_busy()
        training.opt.step()
        sizes = [p.numel() for p in list.copy(training.opt.param_groups[0]["params"])]
        training.opt.zero_grad()
        others = [torch.full((n,), torch.nan, dtype=training.dtype, device=DEVICE) for n in sizes for _ in range(2)]
    del others


@pytest.mark.parametrize("topk", [None, 0.05])
def test_gradients_are_dropped_at_once(tmp_path, topk):
    twins(tmp_path, drops_gradients, topk=topk, width=LARGE, latency="1ms").opt.close()


def test_gradients_live_until_they_are_used(tmp_path):
    training = Twin(tmp_path, {}, place=[DEVICE], width=80)
    training.step()
    training.opt.wait()
    without = torch.accelerator.memory_allocated()
    training.backward()
    training.losses.clear()
    gc.collect()
    with_gradients = torch.accelerator.memory_allocated()
    training.opt.step()
    training.opt.zero_grad()
    for layer in training.model:
        layer.inner.weight  # noqa: B018
        layer.inner.bias  # noqa: B018
    assert torch.accelerator.memory_allocated() <= without + (with_gradients - without) // 2
    training.opt.close()


# ---- what it is for --------------------------------------------------------------------------


def test_step_returns_before_parameters_arrive(tmp_path, monkeypatch):
    training = Twin(tmp_path, {}, place=[DEVICE])
    training.step()
    training.opt.wait()
    real, goes_on = Native.pull, threading.Event()
    monkeypatch.setattr(Native, "pull", lambda engine: goes_on.wait() and real(engine))
    try:
        training.step()
        assert not images_back(flight_of(training.opt))
    finally:
        goes_on.set()
    training.opt.close()


# ---- what does not go well -------------------------------------------------------------------


def test_a_gradient_changed_after_step_is_an_error(tmp_path):
    training = Twin(tmp_path, {}, place=[DEVICE], latency="50ms")
    training.step()
    before = training.parameters()
    training.backward()
    grad = training.model[0].inner.weight.grad
    training.opt.step()
    grad.mul_(2)
    with pytest.raises(CSDRuntimeError, match=r"gradient of .* was changed after step"):
        training.opt.wait()
    assert training.parameters() == before
    training.opt.wait()  # the error is raised only once
    training.step()
    training.opt.close()


@pytest.mark.parametrize("topk", [None, 0.1])
@pytest.mark.parametrize(("call", "number"), [("push", 1), ("push", 20), ("pull", 1), ("pull", 12), ("pull", 25)])
def test_a_step_that_fails_under_way(tmp_path, call, number, topk):
    """It is undone with copies in flight, its error is raised once, where it is awaited, and the next step is right."""

    def fails(training):
        training.step()
        training.opt.wait()
        before = training.parameters()
        if training.overlap is not None:
            with failing(Native, call, number, "broken"):
                training.backward()
                training.opt.step()
                training.opt.zero_grad()
                with pytest.raises(CSDOSError, match="broken"):
                    training.opt.wait()
            training.log.clear()
            training.losses.clear()
            training.steps -= 1
            assert training.parameters() == before
        else:
            training.log.clear()
            training.losses.clear()
        training.step()
        training.step()

    twins(tmp_path, fails, topk=topk, width=LARGE).opt.close()


@pytest.mark.parametrize("what", ["cleared", "dropped", "closed"])
def test_a_guess_that_is_given_up_pushes_nothing_more(tmp_path, what, monkeypatch):
    """Its copies complete only while the next step runs, or after the engine is closed."""
    arrives, pushed = threading.Event(), []
    wait, push = StagingBuffer.wait, Native.push
    training = Twin(tmp_path, BACKWARD, place=[DEVICE], patient=True, latency="100us")
    for _ in range(3):
        training.step()
    training.opt.synchronize()
    pusher = pusher_of(training.opt)
    with monkeypatch.context() as patch:
        patch.setattr(StagingBuffer, "wait", lambda slot: arrives.wait() and wait(slot))
        patch.setattr(Native, "push", lambda *args: pushed.append(args) or push(*args))
        training.patient = False
        try:
            training.backward()
            assert guess_of(training.opt)
            if what == "cleared":  # the next guess would use the same memory
                training.opt.zero_grad()
                training.backward()
                assert guess_of(training.opt) is None
            elif what == "closed":
                training.opt.close()
            else:
                del training.opt
                gc.collect()
        finally:
            arrives.set()
        if what == "cleared":
            training.opt.step()
            assert dict(training.opt.stats()["overlap"]["redone"]) == {"cleared gradients": 1}
            training.opt.close()
        else:
            pusher.shutdown()
            assert pushed == []


def test_a_guess_is_compared_when_all_of_it_was_pushed(tmp_path, monkeypatch):
    asked, whole = threading.Event(), []
    wait, push, equal = EarlyImages.wait, Native.push, StagingRing.equal
    training = Twin(tmp_path, BACKWARD, place=[DEVICE], patient=True, latency="100us")
    for _ in range(3):
        training.step()
    training.opt.synchronize()
    monkeypatch.setattr(Native, "push", lambda *args: asked.wait() and push(*args))
    monkeypatch.setattr(EarlyImages, "wait", lambda images: asked.set() or wait(images))

    def compares(ring, pairs):
        whole.append(all(future.done() for future in guess_of(training.opt)._images.push_futures))
        asked.set()
        return equal(ring, pairs)

    monkeypatch.setattr(StagingRing, "equal", compares)
    training.patient = False
    training.step()
    assert whole == [True]
    training.opt.close()


def test_a_guess_that_cannot_be_compared_is_none(tmp_path, monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("to compare in")

    monkeypatch.setattr(StagingRing, "equal", fails)
    training = twins(tmp_path, ten_steps, BACKWARD, patient=True, latency="100us")
    assert training.opt.stats()["overlap"]["redone"]["failure"] > 0
    training.opt.close()


def test_executors_that_take_nothing_more(tmp_path):
    """As on a thread that continues after the main thread has ended."""

    def script(training):
        if training.overlap is not None:
            pusher_of(training.opt).shutdown()
        ten_steps(training)

    training = twins(tmp_path, script, BACKWARD, patient=True, latency="100us")
    assert training.opt.stats()["overlap"]["redone"] == {}
    assert training.opt.stats()["overlap"]["early_params"] > 0
    training.opt.close()


def test_a_step_without_streams_is_undone(tmp_path, monkeypatch):
    training = Twin(tmp_path, {}, place=[DEVICE])
    training.step()
    training.opt.wait()
    before, states = training.parameters(), training.seen()[3]

    def fails(ring):
        raise RuntimeError("no more streams")

    with monkeypatch.context() as patch:
        patch.setattr(StagingRing, "on_separate_streams", fails)
        training.step()
        with pytest.raises(RuntimeError, match="no more streams"):
            training.opt.wait()
    assert (training.parameters(), training.seen()[3]) == (before, states)
    training.step()
    training.opt.wait()
    assert training.parameters() != before
    training.opt.close()


def test_dropped_or_closed_while_a_step_is_under_way(tmp_path):
    for k in range(2):
        training = Twin(tmp_path, {}, place=[DEVICE])
        training.step()
        training.step()
        if k:
            training.opt.close()
        del training.opt
        gc.collect()
        training.model(torch.ones(2, training.width))  # does not block for ever


@pytest.mark.one_schedule
def test_a_captured_forward_gets_its_parameters_within_step(tmp_path, emulated_only):
    """A replay of the graph could not wait for parameters."""
    training = Twin(tmp_path, {}, place=[DEVICE])
    training.step()
    training.opt.wait()
    x, (captured, *others) = torch.ones(1, training.width, device=DEVICE), [layer.inner for layer in training.model]
    with emulated.capturing():
        captured(x)
    training.step()
    guarded, flight = mode_of(training.opt)._guards.guarded, flight_of(training.opt)
    assert guarded == {id(p) for layer in others for p in layer.parameters()}
    rows = [b.index for b in state_map_of(training.opt).by_index if id(b.param) not in guarded]
    assert len(rows) == 2
    assert flight is None or images_back(flight).issuperset(flight._pieces.tiles_of(rows).tolist())
    training.opt.close()


@pytest.mark.one_schedule
def test_a_capture_does_not_wait_for_what_is_under_way(tmp_path, emulated_only, monkeypatch):
    training, goes_on, land = Twin(tmp_path, {}, place=[DEVICE]), threading.Event(), LiveStep.land

    def waits(*arguments):
        copied.set()
        goes_on.wait()
        land(*arguments)

    copied = threading.Event()
    monkeypatch.setattr(LiveStep, "land", waits)
    try:
        training.step()
        copied.wait()
        with emulated.capturing(), pytest.raises(CSDRuntimeError, match="before the capture"):
            training.model[0].inner.weight  # noqa: B018
    finally:
        goes_on.set()
    training.step()
    training.opt.close()
