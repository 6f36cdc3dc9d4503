"""State stays on the devices: which operations bring it into memory, and the warnings when that is much."""

import contextlib
import copy
import inspect
import io
import pickle
import warnings

import pytest
import torch
from support.backends import named_devices
from support.memory import LIMIT, memory_limit

from csd_optim import CSDAdam, CSDWarning
from csd_optim.params import memory_warnings as materialized

N = 8 << 20  # parameters; their state is 96 MiB


@pytest.fixture
def any_size(monkeypatch):
    """Lowers the threshold so that any state in memory causes a warning."""
    monkeypatch.setattr(materialized, "WORTH_A_WARNING", 1000)


def after_a_step(numel=1000, **options):
    # 16 bits, so that the state is much larger than the parameter.
    p = torch.ones(numel, dtype=torch.bfloat16, requires_grad=True)
    opt = CSDAdam([p], **options)
    step(opt)
    return opt


def step(opt):
    for p in opt.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    opt.step()


@contextlib.contextmanager
def warned(match):
    """Expects one warning, attributed to the line of this file after `with`."""
    line = inspect.stack()[2].lineno
    with pytest.warns(CSDWarning, match=match) as caught:
        yield
    [warning] = [w for w in caught if issubclass(w.category, CSDWarning)]
    assert (warning.filename, warning.lineno) == (__file__, line + 1)


def replaced(opt):
    """Replaces the state by copies in memory, as code does that moves it to another device and back."""
    for entry in opt.state.values():
        for key, value in entry.items():
            entry[key] = value.clone()


@pytest.mark.parametrize("device", ["file:", "named"])
def test_saving_takes_no_memory(tmp_path, device):
    opt = after_a_step(N, devices=named_devices(tmp_path, 1) if device == "named" else device)
    state = opt.state_dict()  # its mappings count towards the limit, too, although they take no memory
    with memory_limit(LIMIT):
        torch.save(state, "state.pt")
    with memory_limit(LIMIT), pytest.raises(RuntimeError, match="can't allocate memory"):
        [copy.deepcopy(state) for _ in range(4)]  # proves that the limit holds, even if other threads end meanwhile


# ---- warnings ------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_state_from_memory(any_size, state_dtype):
    opt = after_a_step(state_dtype=state_dtype)
    torch.save(opt.state_dict(), "state.pt")
    state = torch.load("state.pt")
    with warned("came from memory"):
        opt.load_state_dict(state)
    with warned("came from memory"):
        CSDAdam([torch.ones(1000, requires_grad=True)], state_dtype=state_dtype).load_state_dict(state)


@pytest.mark.fp32_states("only fp32 states are mapped")
@pytest.mark.at_hand("of states that are mapped")
def test_state_that_stays_in_files_or_is_small(any_size, tmp_path, monkeypatch):
    opt = after_a_step(devices=named_devices(tmp_path, 1))
    torch.save(opt.state_dict(), "state.pt")
    opt.save(tmp_path / "saved")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.load_state_dict(opt.state_dict())
        opt.load_state_dict(torch.load("state.pt", mmap=True))
        opt.load_state_dict(CSDAdam.load(tmp_path / "saved"))
        for entry in opt.state.values():
            entry.update({key: value.to("cpu") for key, value in entry.items()})  # they are on the CPU already
        step(opt)
        monkeypatch.setattr(materialized, "WORTH_A_WARNING", 12_005)  # 3 states of 1000 elements, and the step
        opt.load_state_dict(torch.load("state.pt"))


@pytest.mark.here("saves at a relative path")
@pytest.mark.parametrize("use", [step, lambda opt: opt.save("saved")], ids=["step", "save"])
def test_state_that_was_replaced(any_size, tmp_path, use):
    opt = after_a_step(devices=named_devices(tmp_path, 1))
    replaced(opt)
    with pytest.warns(CSDWarning, match="had been replaced") as caught:
        use(opt)
    assert {warning.filename for warning in caught} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(opt)


def test_each_line_is_named_once(any_size):
    opt = after_a_step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            replaced(opt)
            step(opt)
    assert len(caught) == 1


def test_copies_and_pickles(any_size):
    opt = after_a_step()
    with warned("a copy of the optimizer"):
        copy.deepcopy(opt)
    with warned("a copy of the optimizer"):
        pickle.dumps(opt)
    with warned("a copy of the optimizer"):
        torch.save(opt, io.BytesIO())


@pytest.mark.fp32_states("only fp32 states are mapped")
@pytest.mark.at_hand("of states that are mapped")
def test_what_is_in_memory(any_size):
    """Memory of other devices counts, too (meta stands for CUDA); so does shared memory, though mapped from a file."""
    opt = after_a_step()
    windows = [w for w in opt.state[opt.param_groups[0]["params"][0]].values() if w.dim()]
    copies = [w.clone() for w in windows]
    assert materialized.bytes_in_memory(windows) == 0
    assert materialized.bytes_in_memory([*windows, *copies]) == 12_000
    assert materialized.bytes_in_memory([torch.empty(1000, device="meta")]) == 4000
    assert materialized.bytes_in_memory([torch.ones(1000).share_memory_()]) == 4000


def test_a_gigabyte_is_worth_it():
    opt = after_a_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(opt).load_state_dict(copy.deepcopy(opt.state_dict()))
    assert materialized.WORTH_A_WARNING == 1 << 30
