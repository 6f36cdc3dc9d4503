"""Gradients that are used in backward: a step has the same bits as without, or raises an error and changes nothing."""

import gc
import random
import signal
import threading
import time
import weakref

import pytest
import torch
from support.between_steps import freezes, steps_in_closures
from support.inside import engine_of, mode_of
from support.replacing import class_with
from support.twins import Twin, assert_twins, checksum
from torch import nn

from csd_optim import CSDAdam, CSDError, CSDRuntimeError, CSDTypeError, CSDValueError
from csd_optim.engine.engine import Engine
from csd_optim.overlap.backward_run import BackwardRun
from csd_optim.step.live import LiveStep

FREE = {"free_gradients": True}
INPLACE = "modified by an inplace operation"  # torch raises it before we do
TIGHT = {"free_gradients": True, "hold": "10KB"}  # about one gradient


def ones(training):
    return torch.ones(2, training.width, dtype=training.dtype)


def steps(training):
    for _ in range(5):
        training.step()


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("overlap", [FREE, TIGHT], ids=["free", "tight"])
def test_training(tmp_path, overlap, dtype, state_dtype):
    options = {"devices": 1 if overlap is FREE else 3, "latency": "200us" if overlap is FREE else "2ms"}
    training = assert_twins(tmp_path, overlap, steps, dtype=dtype, state_dtype=state_dtype, **options)
    assert training.opt.stats()["overlap"]["early_params"] > 0
    stats = training.opt.stats()
    assert stats["overlap"]["waited"] > 0
    assert stats["params"] == sum(p.numel() for p in training.model.parameters() if p.requires_grad)
    assert min(stats["push_bytes"], stats["flash_write_bytes"], stats["seconds"]["write"]) > 0
    training.opt.close()


# ---- what a program may do, each with its twin -----------------------------------------------


def schedules(training):
    scheduler = torch.optim.lr_scheduler.StepLR(training.opt, 2, 0.5)
    for _ in range(5):
        training.step()
        scheduler.step()


def looks_between_steps(training):
    for k in range(5):
        training.step()
        with torch.no_grad():
            training.model(ones(training))
        training.log.append([checksum(t) for entry in training.opt.state.values() for t in entry.values()])
        if k % 2:
            training.opt.load_state_dict(training.opt.state_dict())


def writes_between_steps(training):
    for k in range(5):
        training.step()
        with torch.no_grad():
            for p in training.model.parameters():
                p.mul_(0.5) if k % 2 else p.data.clamp_(-0.1, 0.1)
        if k == 3:
            training.opt.state[p]["exp_avg"].mul_(0.5)


def skips_steps(training):
    """A forward after a skipped step uses the previous parameters."""
    for k in range(6):
        training.backward()
        if k not in (2, 3):
            training.opt.step()
        training.opt.zero_grad() if k % 2 else training.model.zero_grad()


def steps_without_gradients(training):
    for _ in range(3):
        training.backward()
        training.model.zero_grad()
        training.opt.step()
        training.step()


def sets_gradients_by_hand(training):
    for _ in range(2):
        for p in training.model.parameters():
            p.grad = torch.full_like(p, 0.1)
        training.opt.step()
        training.opt.zero_grad()
        training.step()


def checkpoints_activations(training):
    for _ in range(4):
        x = ones(training).requires_grad_()
        for part in training.model[:2], training.model[2:]:
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
        x.square().sum().backward()
        training.opt.step()
        training.opt.zero_grad()


def ties_weights(training):
    gone, training.model[3].inner.weight = training.model[3].inner.weight, training.model[0].inner.weight
    for group in training.opt.param_groups:
        group["params"] = [p for p in group["params"] if p is not gone]
    if training.overlap is not None:
        training.opt.overlap(training.model, **training.overlap)
    steps(training)


def grows(training):
    training.step()
    new, empty = (nn.Parameter(torch.ones(n, dtype=training.dtype)) for n in (3000, 0))
    training.model.register_parameter("new", new)
    training.model.register_parameter("empty", empty)
    training.opt.add_param_group({"params": [new, empty]})
    if training.overlap is not None:
        training.opt.overlap(training.model, **training.overlap)
    for _ in range(3):
        x = ones(training)
        (training.model(x).square().sum() + new.square().sum() + empty.sum()).backward()
        training.opt.step()
        training.opt.zero_grad()


def takes_turns(training):
    for k in range(6):
        if training.overlap is not None:
            training.opt.overlap(training.model, **[training.overlap, {}, {"backward": True}][k % 3])
        training.step()


@pytest.mark.parametrize(
    "script",
    [
        schedules,
        steps_in_closures,
        looks_between_steps,
        writes_between_steps,
        skips_steps,
        steps_without_gradients,
        sets_gradients_by_hand,
        checkpoints_activations,
        ties_weights,
        freezes,
        grows,
        takes_turns,
    ],
    ids=lambda script: script.__name__,
)
@pytest.mark.parametrize("coded", [False, True], ids=["fp32", "8bit"])
def test_twins(tmp_path, script, coded):
    options = {"groups": True, "named": True, "latency": "500us"} if not coded else {"latency": "100us"}
    options |= {"dtype": torch.bfloat16, "state_dtype": "8bit"} if coded else {"amsgrad": True}
    assert_twins(tmp_path, TIGHT, script, **options).opt.close()


def test_hooks_of_gradients_go_before(tmp_path):
    def halves(training):
        for p in training.model.parameters():
            p.register_hook(lambda g: g * 0.5)
        steps(training)

    assert_twins(tmp_path, FREE, halves).opt.close()


def test_a_parameter_without_a_gradient(tmp_path):
    """It gets states, zeros at step 0, in the first backward, when it is unknown that it will have no gradient."""
    models = []
    for name in ("free", "plain"):
        (tmp_path / name).mkdir()
        training = Twin(tmp_path / name, FREE if name == "free" else None, groups=True)
        first, last = training.model[0], training.model[3]
        for k in range(6):
            model = training.model if k in (2, 3) else training.model[:3] if k % 2 else training.model[1:]
            model(ones(training)).square().sum().backward()
            training.opt.step()
            training.opt.zero_grad()
            if name == "free" and k == 0:
                entry = training.opt.state[first.inner.weight]
                assert entry["step"] == 0
                assert not entry["exp_avg"].any()
                assert not entry["exp_avg_sq"].any()
                assert torch.equal(entry["master"], first.inner.weight)
        models.append(training)
    one, other = (t.seen() for t in models)
    assert one == other
    assert last is not first
    for training in models:
        training.opt.close()


def test_a_master_that_was_written_and_gets_no_gradient(tmp_path):
    """The parameter keeps its value, from which the master differs now; the next step starts from the master."""

    def script(training):
        training.step()
        training.opt.state[training.model[3].inner.weight]["master"].mul_(1.5)
        training.model[:3](ones(training)).square().sum().backward()
        training.opt.step()
        training.opt.zero_grad()
        training.step()
        training.step()

    assert_twins(tmp_path, FREE, script, dtype=torch.bfloat16, state_dtype="8bit").opt.close()


# ---- what a program may not do: an error, and everything is as before --------------------------


def accumulates(training):
    training.backward()
    training.backward()


def goes_back_twice(training):
    x = ones(training)
    losses = [part(x).square().sum() for part in (training.model[:2], training.model[2:])]
    for loss in losses:
        loss.backward()


def goes_back_over_the_graph(training):
    loss = training.model(ones(training)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def clips(training):
    training.backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)


def clips_kept_parameters(training):
    params = list(training.model.parameters())
    training.backward()
    nn.utils.clip_grad_norm_(params, 1.0)


def reads_a_gradient(training):
    bias = training.model[1].inner.bias
    training.backward()
    bias.grad.norm()


def scales(training):
    params = list(training.model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    training.backward(8.0)
    assert params
    scaler.scale(torch.tensor(1.0))
    scaler.step(training.opt)


def says_that_it_scaled(training):
    training.backward(8.0)
    training.opt.grad_scale = torch.tensor(8.0)
    try:
        training.opt.step()
    finally:
        del training.opt.grad_scale


def changes_lr(training):
    training.backward()
    lr = training.opt.param_groups[0]["lr"]
    training.opt.param_groups[0]["lr"] = 1.0
    try:
        training.opt.step()
    finally:
        training.opt.param_groups[0]["lr"] = lr


def reads_parameters(training):
    training.backward()
    training.model.state_dict()


def evaluates(training):
    training.backward()
    with torch.no_grad():
        training.model(ones(training))


def looks_at_states(training):
    training.backward()
    assert training.opt.state


def saves(training):
    training.backward()
    training.opt.state_dict()


def clears_some_gradients(training):
    bias = training.model[1].inner.bias
    training.backward()
    bias.grad = None
    training.opt.step()


def sets_a_gradient(training):
    bias = training.model[1].inner.bias
    training.backward()
    bias.grad = torch.ones_like(bias)
    training.opt.step()


def reenters(training):
    x = ones(training).requires_grad_()
    for part in training.model[:2], training.model[2:]:
        x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=True)
    x.square().sum().backward()


def reenters_beside_the_rest(training):
    """The first gradient is that of the outer backward, which is still running when the one of a segment comes."""
    x = ones(training).requires_grad_()
    x = torch.utils.checkpoint.checkpoint(training.model[:2], x, use_reentrant=True)
    training.model[2:](x).square().sum().backward()


def clips_by_itself(training):
    training.opt.max_grad_norm = 1.0
    try:
        training.backward()
    finally:
        training.opt.max_grad_norm = None


def steps_in_backward(training):
    handle = training.model[0].inner.bias.register_post_accumulate_grad_hook(lambda _: training.opt.step())
    try:
        training.backward()
    finally:
        handle.remove()


def recomputes_what_is_gone(training):
    """A segment that yields no gradient of the weight is recomputed after the weight has changed."""
    weight, x = training.model[0].inner, ones(training).requires_grad_()
    y = torch.utils.checkpoint.checkpoint(lambda x: (x @ weight.weight.detach()).square(), x, use_reentrant=False)
    (y @ weight.weight).sum().backward()


def goes_back_through_what_is_gone(training):
    weight, x = training.model[0].inner.weight, ones(training).requires_grad_()
    ((x * x) @ weight.detach() @ weight).sum().backward()


REFUSED = {
    accumulates: "has changed parameters already",
    goes_back_twice: "a second backward before step",
    goes_back_over_the_graph: INPLACE,
    clips: "has changed parameters already",
    clips_kept_parameters: "No clipping",
    reads_a_gradient: "norm on a gradient that a step has taken",
    scales: "has changed parameters already",
    says_that_it_scaled: "GradScaler",
    changes_lr: "learning rate",
    reads_parameters: "they and the states cannot be read",
    evaluates: "has changed parameters already",
    looks_at_states: "has changed parameters already",
    saves: "has changed parameters already",
    clears_some_gradients: "some gradients were set to None",
    sets_a_gradient: "0.3 has a gradient that this backward has not made",
    reenters: "use_reentrant=True",
    reenters_beside_the_rest: "use_reentrant=True",
    clips_by_itself: "max_grad_norm",
    steps_in_backward: "backward is still going on",
    recomputes_what_is_gone: "has changed parameters already",
    goes_back_through_what_is_gone: INPLACE,
}


def gives_up(training, attempt, says=None):
    """`attempt` raises an error that says `says`; after zero_grad() everything is as before."""
    kept = list(training.model.parameters())
    before, logged = [checksum(p) for p in kept], [len(training.log), len(training.losses), training.steps]
    with pytest.raises((CSDError, RuntimeError) if says in (None, INPLACE) else CSDError, match=says):
        attempt(training)
    training.opt.zero_grad()
    assert [checksum(p) for p in kept] == before
    assert all(p.grad is None for p in kept)
    del training.log[logged[0] :], training.losses[logged[1] :]
    training.steps = logged[2]


@pytest.mark.parametrize("attempt", REFUSED, ids=lambda attempt: attempt.__name__)
def test_refused(tmp_path, attempt):
    def script(training):
        training.step()
        training.step()
        if training.overlap is not None:
            gives_up(training, attempt, REFUSED[attempt])
        training.step()
        training.step()

    assert_twins(tmp_path, FREE, script, latency="100us").opt.close()


def fails_in_backward(training):
    handle = training.model[1].inner.weight.register_hook(lambda _: 1 / 0)
    try:
        training.backward()
    except ZeroDivisionError as e:
        raise RuntimeError from e
    finally:
        handle.remove()


def looks(training):
    training.log.append([checksum(t) for entry in training.opt.state.values() for t in entry.values()])


def edits_a_state(training):
    if entry := training.opt.state.get(training.model[2].inner.weight):
        entry["exp_avg"].mul_(0.5)


def sets_parameters(training):
    with torch.no_grad():
        for p in list(training.model.parameters())[::3]:
            p.mul_(0.75)


def sets_lr(training):
    training.opt.param_groups[0]["lr"] *= 0.7


def loads(training):
    training.opt.load_state_dict(training.opt.state_dict())


def gives_a_step_up(training):
    training.backward()
    training.opt.zero_grad()


@pytest.mark.parametrize("seed", range(10))
def test_random_history(tmp_path, seed):
    choose = random.Random(-1 - seed)
    options = {"devices": choose.choice([1, 2]), "groups": choose.random() < 0.3, "named": choose.random() < 0.5}
    options |= {"dtype": choose.choice([torch.float32, torch.bfloat16, torch.float16])}
    options |= {"state_dtype": choose.choice(["fp32", "8bit"]), "latency": choose.choice(["20us", "1ms"])}

    def script(training):
        choose = random.Random(seed)
        for _ in range(10):
            attempt = choose.choice([None, fails_in_backward, *REFUSED])
            between = choose.choices([looks, edits_a_state, sets_parameters, sets_lr, loads, gives_a_step_up], k=2)
            if attempt and training.overlap is not None:
                gives_up(training, attempt)
            training.step()
            for happens in between:
                happens(training)
        training.step()  # masters of parameters that were set change only in a step, even in one that is undone

    assert_twins(tmp_path, choose.choice([FREE, TIGHT]), script, **options).opt.close()


def test_a_late_hook_of_a_backward_that_failed(tmp_path, monkeypatch):
    """A hook on another thread of autograd comes late: it raises, and the backward that has begun since goes on."""
    told = []

    def script(training):
        training.step()
        if training.overlap is not None:
            gives_up(training, fails_in_backward)
            mode, first = mode_of(training.opt), training.model[3].inner.bias

            def comes_late(_):
                assert id(first) in mode._run.taken
                with monkeypatch.context() as patch:
                    patch.setattr(torch._C, "_current_graph_task_id", lambda: mode._aborted_task)
                    with pytest.raises(CSDRuntimeError, match="a second backward before step"):
                        mode._on_grad(first)
                told.append(1)

            handle = training.model[0].inner.weight.register_hook(comes_late)
        training.step()
        if training.overlap is not None:
            handle.remove()
        training.step()

    assert_twins(tmp_path, FREE, script).opt.close()
    assert told


@pytest.mark.parametrize("reads", [lambda t: [*t.model.parameters()], lambda t: t.opt.step()], ids=["reads", "steps"])
def test_who_comes_while_another_thread_undoes_a_step_waits(tmp_path, monkeypatch, reads):
    """A thread of autograd undoes the step of a backward that has failed on an accelerator."""
    training = Twin(tmp_path, FREE)
    training.step()
    undo, began, goes_on, order = LiveStep.undo, threading.Event(), threading.Event(), []

    def undoes(*arguments):
        began.set()
        assert goes_on.wait(60)
        undo(*arguments)
        order.append("undone")

    def comes():
        reads(training)
        order.append("read")

    def fails():
        with pytest.raises(RuntimeError):
            fails_in_backward(training)

    with monkeypatch.context() as patch:
        patch.setattr(LiveStep, "undo", undoes)
        failed = threading.Thread(target=fails)
        failed.start()
        assert began.wait(60)
        reader = threading.Thread(target=comes)
        reader.start()
        reader.join(0.2)
        goes_on.set()
        failed.join()
        reader.join()
    assert order == ["undone", "read"]
    training.opt.close()


def test_a_parameter_that_is_written_between_backward_and_step(tmp_path):
    """step() raises an error. The value of the parameter is then up to the program that wrote it."""

    def script(training):
        training.step()
        if training.overlap is not None:
            bias = training.model[1].inner.bias
            before, logged = bias.detach().clone(), [len(training.log), len(training.losses)]
            training.backward()
            with torch.no_grad():
                bias.add_(1)
                with pytest.raises(CSDRuntimeError, match="were written between"):
                    training.opt.step()
                bias.copy_(before)
            del training.log[logged[0] :], training.losses[logged[1] :]
            training.steps -= 1
        training.step()

    assert_twins(tmp_path, FREE, script).opt.close()


@pytest.mark.parametrize("again", ["backward", "step"])
def test_gradients_that_are_never_cleared(tmp_path, again):
    training = Twin(tmp_path, FREE)
    training.backward()
    training.opt.step()
    before = [checksum(p) for p in training.model.parameters()]
    with pytest.raises(CSDRuntimeError, match={"backward": "No clipping", "step": "zero_grad.* between steps"}[again]):
        training.backward() if again == "backward" else training.opt.step()
    with pytest.raises(CSDRuntimeError, match="must set to None"):
        training.opt.zero_grad(set_to_none=False)
    assert [checksum(p) for p in training.model.parameters()] == before
    training.opt.zero_grad()
    training.step()
    training.opt.close()


@pytest.mark.parametrize(
    ("options", "overlap", "says"),
    [
        ({"max_grad_norm": 1.0}, FREE, "max_grad_norm is set"),
        ({"topk": 0.1}, FREE, "compressed"),
        ({"grad_dtype": torch.bfloat16}, FREE, "grad_dtype is torch.bfloat16"),
        pytest.param(
            *({"devices": "ram:"}, FREE, "second copy"), marks=pytest.mark.at_hand("such devices keep two copies")
        ),
        ({}, {**FREE, "backward": True}, "leave out backward"),
        ({}, {**FREE, "hold": "a lot"}, "Invalid size"),
    ],
    ids=str,
)
def test_refused_at_once(options, overlap, says):
    model = nn.Linear(4, 4)
    with CSDAdam(model.parameters(), **{"devices": "file:", **options}) as opt:
        with pytest.raises(CSDValueError, match=says):
            opt.overlap(model, **overlap)
        assert type(opt.param_groups[0]["params"]) is list
        assert not model._forward_pre_hooks
        model(torch.ones(4)).sum().backward()
        opt.step()


@pytest.mark.parametrize(
    ("param", "says"),
    [
        (torch.ones(3, dtype=torch.complex64), "complex, or not contiguous"),
        (torch.ones(4, 3).t(), "complex, or not contiguous"),
        (torch.ones(3, device="meta"), "on meta"),  # as on a GPU
    ],
    ids=["complex", "transposed", "elsewhere"],
)
def test_parameters_that_it_does_not_take(param, says):
    model = nn.ParameterList([nn.Parameter(param)])
    with CSDAdam(model.parameters(), devices="file:") as opt, pytest.raises(CSDValueError, match=says):
        opt.overlap(model, **FREE)


def test_a_sparse_gradient(tmp_path):
    model = nn.Embedding(5, 4, sparse=True)
    with CSDAdam(model.parameters(), devices="file:") as opt:
        opt.overlap(model, **FREE)
        before = model.weight.detach().clone()
        with pytest.raises(CSDTypeError, match="dense ones"):
            model(torch.tensor([1, 3])).sum().backward()
        assert torch.equal(model.weight, before)


# ---- what goes wrong in backward ---------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.at_hand("images are copied to parameters later")
def test_exceptions_leave_everything_as_it_was(tmp_path, state_dtype):
    """In the first step and later, at any parameter: parameters are restored in place before backward raises."""
    dtype = torch.bfloat16 if state_dtype == "8bit" else torch.float32
    (tmp_path / "twin").mkdir()
    twin = Twin(tmp_path / "twin", None, dtype=dtype, state_dtype=state_dtype)
    training = Twin(tmp_path, FREE, dtype=dtype, state_dtype=state_dtype, latency="20us")
    kept, changed = list(training.model.parameters()), 0

    def fails(_):
        nonlocal changed
        end = time.monotonic() + 60
        while follows and [checksum(p) for p in kept] == before and time.monotonic() < end:
            time.sleep(0.001)
        changed += [checksum(p) for p in kept] != before
        raise ValueError("in a hook")

    for k, param in enumerate(kept):
        follows = k < len(kept) - 2  # the last layer, whose backward comes first, and whose parameters then change
        before = [checksum(p) for p in kept]
        handle = param.register_hook(fails)
        with pytest.raises(ValueError, match="in a hook"):
            training.backward()
        handle.remove()
        assert [checksum(p) for p in kept] == before
        assert not engine_of(training.opt).stepping
        assert not engine_of(training.opt).decoded.in_memory  # 12 bytes per parameter
        training.steps = twin.steps
        training.opt.zero_grad()
        training.step()
        twin.step()
    assert changed >= len(kept) - 2
    assert training.seen()[1:] == twin.seen()[1:]
    training.opt.close()
    twin.opt.close()


def test_two_threads_go_backward(tmp_path):
    """One of them, or both, get an error; and one that goes on updates nothing."""
    training = Twin(tmp_path, FREE, latency="50us", depth=8)
    training.step()
    before, failures = [checksum(p) for p in training.model.parameters()], []

    def backward(loss):
        try:
            loss.backward()
        except CSDRuntimeError as e:
            failures.append(str(e))

    for _ in range(20):
        halves = [training.model[:4], training.model[4:]]
        losses = [half(torch.full((2, training.width), 0.1)).square().sum() for half in halves]
        threads = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures
        assert all("a second backward" in failure for failure in failures)
        training.opt.zero_grad()
        assert [checksum(p) for p in training.model.parameters()] == before
        failures.clear()
    training.step()
    training.opt.close()


def test_a_backward_goes_on_after_its_step_was_undone(tmp_path):
    training = Twin(tmp_path, FREE)
    training.step()
    before = [checksum(p) for p in training.model.parameters()]
    handle = training.model[2].inner.weight.register_hook(lambda _: training.opt.zero_grad())
    with pytest.raises(CSDRuntimeError, match="a second backward"):
        training.backward()
    handle.remove()
    assert [checksum(p) for p in training.model.parameters()] == before
    training.opt.zero_grad()
    training.step()
    training.opt.close()


@pytest.mark.parametrize("name", ["begin", "push", "params_ready"])
def test_ctrl_c(tmp_path, monkeypatch, name):
    training = Twin(tmp_path, FREE, latency="100us")
    training.step()
    before = [checksum(p) for p in training.model.parameters()]
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
    assert [checksum(p) for p in training.model.parameters()] == before
    training.opt.zero_grad()
    training.step()
    training.opt.close()


def test_a_step_that_fails_as_it_begins(tmp_path, monkeypatch):
    """The devices have begun: whatever fails next, their step is undone."""
    training = Twin(tmp_path, FREE, latency="100us")
    training.step()
    before = [checksum(p) for p in training.model.parameters()]
    begin = Engine.begin

    def fails(*arguments, **named):
        begin(*arguments, **named)
        raise MemoryError("stands for any failure")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "begin", fails)
        with pytest.raises(MemoryError):
            training.backward()
    assert not engine_of(training.opt).stepping
    assert [checksum(p) for p in training.model.parameters()] == before
    training.opt.zero_grad()
    training.step()
    training.opt.close()


@pytest.mark.parametrize("how", ["close", "drop", "end"])
def test_given_up_between_backward_and_step(tmp_path, how):
    training = Twin(tmp_path, FREE, latency="20us")
    training.step()
    before = [checksum(p) for p in training.model.parameters()]
    training.backward()
    time.sleep(0.05)
    opt = weakref.ref(training.opt)
    if how == "close":
        training.opt.close()
    elif how == "end":
        with pytest.raises(CSDRuntimeError, match="has changed parameters already"):
            training.opt.overlap(None)
        training.opt.zero_grad()
        training.opt.overlap(None)
    else:
        del training.opt
        gc.collect()
        assert opt() is None
    assert [checksum(p) for p in training.model.parameters()] == before
    if how == "end":
        training.step()
        training.opt.close()


def test_another_optimizer_after_one_that_was_dropped_in_backward(tmp_path):
    training = Twin(tmp_path, FREE, latency="1ms")
    training.step()
    before = [checksum(p) for p in training.model.parameters()]
    dropped = weakref.ref(training.opt)

    def drop(_):
        if hasattr(training, "opt"):
            del training.opt
            gc.collect()

    training.model[2].inner.weight.register_post_accumulate_grad_hook(drop)
    training.model(torch.ones(1, training.width)).sum().backward()
    assert dropped() is None
    assert [checksum(p) for p in training.model.parameters()] == before
    training.model.zero_grad()
    with CSDAdam(training.model.parameters(), devices="file:") as again:
        again.overlap(training.model, **FREE)
        training.model(torch.ones(1, training.width)).sum().backward()
        again.step()


# ---- memory ------------------------------------------------------------------------------------


def test_few_gradients_at_a_time(tmp_path, monkeypatch):
    """Backward waits. Of gradients whose tiles lack others, only parts are kept: here biases follow all weights."""
    training = Twin(tmp_path, {"free_gradients": True, "hold": 30_000}, groups=True, depth=12, state_dtype="fp32")
    most, take = [], BackwardRun.take

    def measured(run, p, grad):
        take(run, p, grad)
        parts = [part.grad for parts in run.lent._parts.values() for part in parts.values()]
        most.append((run.lent._bytes, sum(part.untyped_storage().nbytes() for part in parts)))

    monkeypatch.setattr(BackwardRun, "take", measured)
    for _ in range(3):
        training.step()
    gradient = training.model[0].inner.weight.nbytes
    assert max(lent for lent, _ in most) <= 30_000 + gradient + 4096
    assert max(parts for _, parts in most) <= 2 * 4096 + 12 * 4 * training.width  # of weights, and all biases
    assert training.opt.stats()["overlap"]["waited"] > 0
    training.opt.close()


def test_it_leaves_no_trace(tmp_path):
    training = Twin(tmp_path, FREE)
    training.step()
    training.opt.overlap(None)
    assert type(training.opt.param_groups[0]["params"]) is list
    for module in training.model.modules():
        assert type(module._parameters) is dict
        assert not module._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in training.model.parameters())
    assert engine_of(training.opt)._kept_alive is None
    training.step()
    assert training.model[0].inner.weight.grad is None
    training.opt.close()
