"""An undo that fails or is interrupted: no parameter is read before it has its old value, and nothing is lost."""

import contextlib
import errno
import gc
import itertools
import os
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from faults import META_READ, TILE_READ
from support.faulty import child, fault, in_child  # noqa: F401
from support.inside import mode_of, steps_of
from support.ranks import on_ranks
from support.repeating import MODES, STEPS, Repeating, never_failed
from support.replacing import class_with, replaced
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import csd_optim
from csd_optim import CSDOSError, CSDTornError
from csd_optim.bindings import Native
from csd_optim.engine.engine import Engine
from csd_optim.errors import CSDRankError
from csd_optim.finalize import wait_for_dropped
from csd_optim.step.steps import Steps
from csd_optim.step.undo import Undo
from csd_optim.store.format import FILE_NAME

PACKAGE = str(Path(csd_optim.__file__).parent)
DEVICES = {
    "file": ["file:{}/a?cache=off"],
    "ram: and file": ["ram:", "file:{}/a?cache=off"],
    "two files": ["file:{}/b?cache=off", "file:{}/a?cache=off"],
}
READ = TILE_READ | META_READ  # a section of these small tiles is a page, as metadata are
BEFORE = 2  # steps before the one that fails

every_mode = pytest.mark.parametrize("mode", MODES)
every_dtype = pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
every_device = pytest.mark.parametrize("devices", DEVICES)


def training_on(devices, directory, mode, state_dtype, **options):
    """A training that has made its first steps; drive `a` is the one to fail."""
    directory = Path(directory)
    directory.mkdir(exist_ok=True)
    names = [device.format(directory) for device in DEVICES[devices]]
    training = Repeating(names, MODES[mode], state_dtype=state_dtype, **options)
    for number in range(BEFORE):
        training.step(number)
    training.opt.synchronize()
    return training


def attempt(training):
    training.whole_step(BEFORE)


def step_and_wait(training):
    training.opt.step()
    training.opt.wait()


def ways_to_look(training, directory):
    x = torch.ones(1, 48, dtype=torch.bfloat16)
    saved = Path(directory) / "saved"
    opt, model = training.opt, training.model
    looks = [
        opt.step,
        opt.wait,
        lambda: opt.state,
        opt.state_dict,
        lambda: opt.save(saved),
        lambda: model(x),
        lambda: model[2](x),
        opt.synchronize,
        lambda: opt.load_state_dict({"state": {}, "param_groups": []}),
    ]
    if mode_of(opt).overlaps:  # parameters can be read only through the model or the optimizer then
        looks += [model.state_dict, lambda: model[2].weight, lambda: list(opt.param_groups[0]["params"])]
    return looks


def goes_on(training, state_dtype):
    """The training ends as if nothing had happened."""
    training.opt.zero_grad()
    for number in range(training.done(), STEPS):
        training.step(number)
    assert training.image() == never_failed(state_dtype)
    training.opt.close()


@contextlib.contextmanager
def failing_at_the_end(then=lambda: None, where="finish"):
    """Each step fails when all its parameters have new values, in a call of the engine; `then` is called first."""
    owner = class_with(where)
    begin, ready, call, tiles = Engine.begin, Native.params_ready, getattr(owner, where), []

    def begins(engine, *arguments, **options):
        tiles[:] = [begin(engine, *arguments, **options)]
        return tiles[0]

    def fails(engine, *arguments, keep=True, **options):
        if not keep:
            return call(engine, keep)
        ready(getattr(engine, "native", engine), tiles[0], wait=True)
        then()
        raise CSDOSError(errno.EIO, "stands for any failure")

    Engine.begin = begins
    setattr(owner, where, fails)
    try:
        yield
    finally:
        Engine.begin = begin
        setattr(owner, where, call)


@contextlib.contextmanager
def dying(path, training):
    """The drive dies when all parameters of the next step have new values, and is alive again at the end."""
    with contextlib.ExitStack() as stack:
        dies = failing_at_the_end(lambda: stack.enter_context(fault(READ, path, errno.EIO)))
        with dies, pytest.raises(CSDTornError) as caught:
            attempt(training)
        for part in "mix of two steps", "Input/output error", str(path):
            assert part in str(caught.value)
        yield


# ---- the device fails, too ---------------------------------------------------------


@every_mode
@every_dtype
@every_device
@pytest.mark.sampled(together=2)
@in_child
def test_a_drive_that_stays_dead(mode, state_dtype, devices, tmp_path):
    """The undo cannot read the masters either: all say so, and none takes new values for what the user has set."""
    training = training_on(devices, tmp_path, mode, state_dtype)
    before = training.values()
    with dying(tmp_path / "a", training):
        for look in ways_to_look(training, tmp_path):
            with pytest.raises(CSDTornError, match="mix of two steps"):
                look()
        assert training.values() != before
    assert not (tmp_path / "saved").exists()
    assert training.done() == BEFORE
    assert training.values() == before
    goes_on(training, state_dtype)


@every_mode
@every_dtype
@in_child
def test_reads_fail_from_any_moment_on(mode, state_dtype, tmp_path):
    for skip in range(10 if state_dtype == "fp32" else 3):
        training = training_on("file", tmp_path / str(skip), mode, state_dtype)
        before = training.values()
        with fault(READ, tmp_path / str(skip) / "a", errno.EIO, skip=skip):
            with pytest.raises(CSDOSError):
                attempt(training)
            if steps_of(training.opt).undoing is None:
                assert training.values() == before
        assert training.done() == BEFORE
        assert training.values() == before
        goes_on(training, state_dtype)


@every_mode
@every_dtype
@in_child
def test_each_read_of_an_undo_fails_once(mode, state_dtype, tmp_path):
    training = training_on("two files", tmp_path, mode, state_dtype)
    before, torn = training.values(), 0
    for skip in itertools.count():
        with contextlib.ExitStack() as stack:
            strikes = fault(READ, tmp_path / "a", errno.EIO, skip=skip, times=1, must_strike=False)
            fails = failing_at_the_end(lambda strikes=strikes: stack.enter_context(strikes))
            with fails, pytest.raises(CSDOSError) as caught:
                attempt(training)
        assert (steps_of(training.opt).undoing is not None) == isinstance(caught.value, CSDTornError)
        if steps_of(training.opt).undoing is None:
            break
        torn += 1
        training.opt.wait()
        assert training.values() == before
    assert torn == {"fp32": 5, "8bit": 1}[state_dtype]  # one for each tile on that drive
    goes_on(training, state_dtype)


@every_mode
@pytest.mark.parametrize("k", range(11))
@in_child
def test_whatever_comes_first_finishes_the_undo(mode, k, tmp_path):
    state_dtype = "8bit" if k % 2 else "fp32"
    training = training_on("two files", tmp_path, mode, state_dtype)
    before = training.values()
    with dying(tmp_path / "a", training):
        pass
    looks = ways_to_look(training, tmp_path)
    with contextlib.suppress(ValueError):  # what is loaded does not fit
        looks[k % len(looks)]()
    if looks[k % len(looks)] == training.opt.step and mode != "free":  # it still had its gradients
        training.opt.wait()
        assert training.done() == BEFORE + 1
    else:
        assert training.values() == before
    goes_on(training, state_dtype)


@in_child
def test_close_says_that_parameters_are_unknown(tmp_path):
    training = training_on("file", tmp_path, "in step", "8bit")
    with dying(tmp_path / "a", training), pytest.raises(CSDTornError, match="mix of two steps"):
        training.opt.close()
    training.opt.close()  # no-op
    with pytest.raises(CSDTornError, match="closed"):
        training.opt.state  # noqa: B018
    goes_on(Repeating(f"{tmp_path}/a", None, state_dtype="8bit", resume=True), "8bit")


@every_mode
@pytest.mark.parametrize("drops", [False, True], ids=["closed", "dropped"])
@in_child
def test_a_new_optimizer_after_one_that_could_not_undo(mode, drops, tmp_path):
    """The old one no longer guards the model, and its groups can be read."""
    training = training_on("file", tmp_path, mode, "fp32")
    before = training.values()
    with dying(tmp_path / "a", training):
        if not drops:
            with pytest.raises(CSDTornError, match="mix of two steps"):
                training.opt.close()
            training.opt.close()  # no-op
            assert len(list(training.opt.param_groups[0]["params"])) == len(training.params)
        training.opt = None
        gc.collect()
        wait_for_dropped()
    training.opt = csd_optim.CSDAdam(
        training.model.parameters(), lr=1e-2, devices=f"file:{tmp_path}/a", tile_size=1024, resume=True
    )
    assert training.values() == before
    goes_on(training, "fp32")


@in_child
def test_what_is_written_to_an_unknown_parameter(tmp_path):
    """It is overwritten, and that is said: how much of the parameter was written is not known."""
    training = training_on("file", tmp_path, "in step", "fp32")
    with dying(tmp_path / "a", training), torch.no_grad():
        training.model[2].weight.zero_()
    with pytest.raises(CSDTornError, match=r"parameters 0\.4 have their values .* write it again"):
        training.opt.wait()
    training.opt.wait()
    goes_on(training, "fp32")


@every_dtype
@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("moves", [False, True], ids=["written", "moved"])
@in_child
def test_what_changes_while_a_parameter_is_unknown_in_part(state_dtype, skip, moves, tmp_path):
    """It is restored with the elements that were known already, and in the memory that it has now."""
    training = training_on("file", tmp_path, "in step", state_dtype)
    before = training.values()
    with failing_at_the_end(), pytest.MonkeyPatch.context() as monkeypatch:
        restore, calls = Undo._restore_tile, itertools.count()

        def dies(undo, tile, spans):
            if next(calls) >= skip:
                raise CSDOSError(errno.EIO, "injected")
            restore(undo, tile, spans)

        monkeypatch.setattr(Undo, "_restore_tile", dies)
        with pytest.raises(CSDTornError):
            attempt(training)
    unknown = [b.param for b in steps_of(training.opt).undoing.unknown]
    with torch.no_grad():
        for p in unknown:
            if moves:
                p.data = p.data.clone()
            else:
                p.mul_(0.5)
    with pytest.raises(CSDTornError, match="write it again"):
        training.opt.wait()
    assert training.values() == before
    goes_on(training, state_dtype)


@in_child
def test_a_backward_through_an_older_graph_is_refused(tmp_path):
    """Its gradients would be those of a mix. (After a step that succeeds, torch refuses as well.)"""
    training = training_on("file", tmp_path, "in step", "fp32")
    older = training.model(torch.ones(1, 48, dtype=torch.bfloat16)).square().sum()
    with dying(tmp_path / "a", training), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        older.backward()
    goes_on(training, "fp32")


@in_child
def test_a_thread_that_waits_for_the_failing_step(tmp_path):
    """It had found nothing to undo before it waited for the end of the step."""
    training = training_on("file", tmp_path, "in step", "fp32")
    said, waits = [], threading.Event()

    def looks():
        try:
            training.opt.state  # noqa: B018
        except CSDTornError as e:
            said.append(str(e))

    settle, reader = training.opt._settle, threading.Thread(target=looks)

    def settles(**options):
        settle(**options)
        waits.set()

    def dies(undo, tile, spans):
        raise CSDOSError(errno.EIO, "injected")

    undo = Steps.undo

    def undoes(*arguments):
        reader.start()
        assert waits.wait(10)
        undo(*arguments)

    with failing_at_the_end(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Undo, "_restore_tile", dies)
        monkeypatch.setattr(Steps, "undo", undoes)
        monkeypatch.setattr(training.opt, "_settle", settles)
        with pytest.raises(CSDTornError):
            attempt(training)
        reader.join()
    assert "mix of two steps" in said[0]
    goes_on(training, "fp32")


@in_child
def test_forwards_of_other_models_go_on(tmp_path):
    training = training_on("file", tmp_path, "in step", "8bit")
    other, x = nn.Linear(48, 1), torch.ones(48)
    hooks = {*nn.modules.module._global_forward_pre_hooks}
    with dying(tmp_path / "a", training):
        other(x)
    goes_on(training, "8bit")
    other(x)
    assert {*nn.modules.module._global_forward_pre_hooks} == hooks


@in_child
def test_a_drive_that_ends_is_no_signal(tmp_path):
    """Reading a mapping of a file that has lost its blocks would end the process with SIGBUS."""
    training = training_on("file", tmp_path, "in step", "fp32")
    store = tmp_path / "a" / FILE_NAME
    content = store.read_bytes()
    before = training.values()
    for edits in False, True:
        if edits:  # the step begins with what the windows show
            for entry in training.opt.state.values():
                entry["exp_avg"][0] += 0.0

        def ends_first(find, undo):
            os.truncate(store, 2 * 4096)  # not before all writes of the step are over, which would make it longer
            find(undo)

        with replaced(Undo, "_find", ends_first), failing_at_the_end(), pytest.raises(CSDTornError):
            attempt(training)
        store.write_bytes(b"")
        with pytest.raises(CSDTornError, match="mix of two steps"):
            training.opt.wait()
        with open(store, "r+b") as file:
            file.write(content)
        training.opt.wait()
        assert training.values() == before
        os.truncate(store, 2 * 4096)
        with pytest.raises(CSDOSError):  # reads what was edited
            attempt(training)
        with open(store, "r+b") as file:
            file.write(content)
    goes_on(training, "fp32")


@pytest.mark.at_hand("such devices keep two copies")
@pytest.mark.parametrize("overlap", [None, {}], ids=["in step", "forward"])
def test_memory_alone_says_that_it_is_torn(overlap, monkeypatch):
    """On ram: alone states are updated in place: a step that was cut short cannot be undone."""
    training = Repeating("ram:", overlap)
    training.step(0)
    training.opt.wait()
    real = Engine.finish
    monkeypatch.setattr(Engine, "finish", lambda engine, keep=True, **_: 1 / 0 if keep else real(engine, keep))
    with pytest.raises(CSDTornError, match="With ram: or gpu: without a drive"):
        training.whole_step(1)
    monkeypatch.undo()
    with pytest.raises(CSDTornError, match="cut short"):
        training.whole_step(1)
    training.opt.close()


def without_landing_threads(monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "csd_optim lands a step":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


@every_dtype
@in_child
def test_a_value_that_the_program_has_set(state_dtype, tmp_path):
    """It counts in the step that succeeds, however often that failed, and whichever thread has undone it."""
    values = []
    for name, fails in ("a", True), ("b", False):
        training = training_on("file", tmp_path / name, "forward", state_dtype)
        with torch.no_grad():
            training.model[1].weight[:3] = 0.25
        training.gradients(BEFORE)
        with pytest.MonkeyPatch.context() as monkeypatch:
            without_landing_threads(monkeypatch)
            for skip in (0, 4 if state_dtype == "fp32" else 2) if fails else ():
                with fault(READ, tmp_path / name / "a", errno.EIO, skip=skip), pytest.raises(CSDOSError):
                    step_and_wait(training)
            training.opt.step()
        training.opt.wait()
        values.append(training.image())
        training.opt.close()
    assert values[0] == values[1]


# ---- several ranks -------------------------------------------------------------------


def dies_on_a_rank(rank, *, overlap, state_dtype):
    """Train on two ranks; the drive of one dies in a step, and in its undo, and is repaired."""
    wrap = DistributedDataParallel if overlap is None else sharded
    without = Repeating("ram:", None, wrap=wrap, rank=rank, state_dtype=state_dtype)
    for number in range(STEPS):
        without.step(number)
    name = f"drive-{rank}"
    training = Repeating(f"file:{name}?cache=off", overlap, wrap=wrap, rank=rank, state_dtype=state_dtype)
    for number in range(BEFORE):
        training.step(number)
    training.opt.synchronize()
    before, errors = training.values(), []

    def fails(call):
        with pytest.raises((CSDOSError, CSDRankError)) as caught:
            call()
        errors.append(caught.type.__name__)

    with contextlib.ExitStack() as stack:
        dies = failing_at_the_end(lambda: stack.enter_context(fault(READ, name, errno.EIO)), "params_ready")
        with dies if rank == 1 else contextlib.nullcontext():
            training.gradients(BEFORE)
            fails(lambda: (training.opt.step(), training.opt.synchronize()))
        fails(training.opt.step)
        fails(training.opt.synchronize)
    training.opt.synchronize()
    assert training.values() == before
    for number in range(BEFORE, STEPS):
        training.step(number)
    training.opt.synchronize()
    assert training.image() == without.image()
    training.opt.close()
    return errors


def sharded(model):
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.at_hand("its fault waits for tiles that images push later")
@pytest.mark.parametrize("overlap", [None, {}], ids=["DDP", "FSDP2 forward"])
@every_dtype
@in_child
def test_on_ranks(overlap, state_dtype, tmp_path):
    call = partial(dies_on_a_rank, overlap=overlap, state_dtype=state_dtype)
    whole, dead = on_ranks(2, call, directory=tmp_path)
    assert dead == ["CSDTornError"] * 3
    assert whole == ["CSDRankError"] * 3


# ---- a failure at every call of the undo ----------------------------------------------


class Strike:
    """Raises `error` at call `at` of a Python function of ours within the undo, on any thread; None only counts."""

    def __init__(self, at, error):
        self.at, self.error, self.calls, self.struck = at, error, 0, ""

    def __enter__(self):
        self._finish = Undo.finish
        strike = self

        def finish(undo):
            traced = strike.trace  # Python 3.11 may call it once more after it has dropped its own reference
            sys.settrace(traced)
            try:
                return strike._finish(undo)
            finally:
                sys.settrace(None)

        Undo.finish = finish
        return self

    def __exit__(self, *_):
        Undo.finish = self._finish

    def trace(self, frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or self.struck:
            return None
        self.calls += 1
        if self.at is not None and self.calls > self.at and code.co_name not in ("name", "params_in_tile"):
            self.struck = f"{code.co_name}, call {self.at}"
            raise self.error
        return None


ERRORS = [CSDOSError(errno.EIO, "injected"), MemoryError("injected"), RuntimeError("injected"), KeyboardInterrupt()]


def strikes(training, at, error):
    """A step that fails, and whose undo is struck at call `at`. Returns where; "" if the undo has fewer calls."""
    with failing_at_the_end(), Strike(at, error) as strike, pytest.raises((CSDOSError, *map(type, ERRORS))):
        attempt(training)
    return strike


@pytest.mark.here("counts the calls of the native engine")
@every_mode
@every_dtype
@every_device
@pytest.mark.sampled(together=2)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_call_of_an_undo(mode, state_dtype, devices, tmp_path, request):
    """Whatever fails in the undo, wherever: parameters are those of before, or all say that they are not."""
    training = training_on(devices, tmp_path, mode, state_dtype)
    before, image = training.values(), training.image()
    calls = strikes(training, None, None).calls
    assert training.image() == image
    assert calls > 20
    every = 1 if request.config.getoption("--tier") == "soak" else 5
    places, torn = set(), 0
    for k, error in zip(range(0, calls, every), itertools.cycle(ERRORS)):
        strike = strikes(training, k, error)
        places.add(strike.struck)
        if steps_of(training.opt).undoing:
            torn += 1
            if k % 2:  # the next reader fails as well
                with Strike(0, CSDOSError(errno.EIO, "still")), pytest.raises(CSDOSError):
                    training.opt.wait()
        training.opt.wait()
        assert training.values() == before, strike.struck
        assert steps_of(training.opt).undoing is None
        assert training.image() == image, strike.struck
    assert torn > len(places) // 2
    goes_on(training, state_dtype)
