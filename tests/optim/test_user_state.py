"""`user_state` is committed to the store together with the step to which it belongs."""

import functools
import random
import re
import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch
from support.backends import named_devices
from support.comparing import assert_same
from support.inside import engine_of
from support.training import (
    bf16,
    c64,
    crashed,
    image,
    parameters,
    stored,
    train,
)

import csd_optim.step.prepare
from csd_optim import (
    CSDAdam,
    CSDTypeError,
    CSDValueError,
)
from csd_optim.store import user_state

pytestmark = pytest.mark.cards


def test_user_state_is_that_of_the_step(tmp_path):
    [device] = named_devices(tmp_path, 1)
    opt = CSDAdam(parameters((300,)), devices=device)
    state = {
        "epoch": 3,
        "nested": [1, (2.5, {"x": None}), "text", True],
        "tensor": torch.arange(5, dtype=bf16),
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
    }
    opt.user_state = state
    expected = torch.rand(3), random.random()
    train(opt)
    opt.user_state = {"not": "yet"}
    state["epoch"] = 99
    opt.synchronize()
    copies = crashed(device, tmp_path / "crash")
    opt.close()
    for where in (copies[0], device):
        with CSDAdam(parameters((300,)), devices=where, resume=True) as opt:
            found = opt.user_state
            assert found["epoch"] == 3
            assert found["nested"] == state["nested"]
            assert torch.equal(found["tensor"], state["tensor"])
            torch.set_rng_state(found["torch"])
            random.setstate(found["random"])
            assert torch.equal(torch.rand(3), expected[0])
            assert random.random() == expected[1]


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        (None, CSDTypeError, "user_state is a dict, got NoneType"),
        ([1], CSDTypeError, "user_state is a dict, got list"),
        ({"f": lambda: 0}, CSDTypeError, "user_state['f'], of type function, cannot be kept"),
        ({"a": 1, "array": np.ones(3)}, CSDTypeError, "user_state['array'], of type numpy.ndarray, cannot"),
        ({"object": threading.Lock()}, CSDTypeError, "user_state['object'], of type _thread.lock, cannot"),
        (
            {"x": [1, {"y": (2, np.float64(3))}]},
            CSDTypeError,
            "user_state['x'][1]['y'][1], of type numpy.float64, cannot",
        ),
        ({"x": OrderedDict(y=np.float64(3))}, CSDTypeError, "user_state['x']['y'], of type numpy.float64, cannot"),
        ({"x": {np.int64(3): 1}}, CSDTypeError, "a key of user_state['x'], of type numpy.int64, cannot"),
        ({"x": functools.reduce(lambda inner, _: [inner], range(5000), 1)}, CSDTypeError, "cannot be kept"),
        ({"large": torch.zeros(17 << 20, dtype=torch.uint8)}, CSDValueError, "user_state takes 178"),
    ],
    ids=range(10),
)
def test_user_state_that_cannot_be_kept(tmp_path, state, error, said):
    [device] = named_devices(tmp_path, 1)
    ps = parameters((3000,), (20,))
    with CSDAdam(ps, devices=device) as opt:
        opt.user_state = {"at": 1}
        train(opt)
        opt.synchronize()
        before, file = image(opt, dict(enumerate(ps))), stored(device)
        opt.user_state = state
        for _ in range(2):
            with pytest.raises(error, match=re.escape(said)) as caught:
                train(opt)
            assert len(str(caught.value)) < 200
        opt.synchronize()
        assert_same(image(opt, dict(enumerate(ps))), before)
        assert stored(device) == file
        opt.user_state = {"at": 2}
        train(opt)
    with CSDAdam(ps, devices=device, resume=True) as opt:
        assert opt.user_state == {"at": 2}
        assert opt.committed_step == 2


def test_user_state_is_kept_if_torch_reads_it_again():
    itself = ([],)
    itself[0].append(itself)
    marked = torch.ones(2)
    marked.mark = np.float64(1)
    integers = [sign * ((1 << bits) + more) for bits in (0, 63, 64, 2031, 3000) for sign in (1, -1) for more in (-1, 0)]
    tensors = [
        marked,
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=c64).conj().imag,
    ]
    others = [b"", b"x", bytearray(2), 1j, {1, 2}, itself, torch.Size([1]), bf16, OrderedDict(a=1), np.float64(1)]
    refused = 0
    for value in (*integers, *tensors, *others):
        state = {"x": value}
        try:
            user_state.unpack_user_state(user_state.pack_user_state(state))
        except Exception:
            refused += 1
            with pytest.raises(CSDTypeError, match=re.escape("user_state['x'], of type ")):
                user_state.checked_user_state(state, b"")
        else:
            user_state.checked_user_state(state, b"")
    assert 2 <= refused < len(integers)


@pytest.mark.parametrize("read", [False, True])
def test_plain_user_state_is_not_read_to_know_that_it_can_be(read, monkeypatch):
    state = {
        "scalars": [None, True, -(1 << 63), (1 << 63) - 1, 0.5, float("inf"), "text", "\ud800", ""],
        "containers": [{}, [], (), (1,), (1, (2, [3])), {(1, "x"): {2.5: None}}],
        "tensors": [torch.ones(2, 3).t()[1:], torch.ones((), dtype=bf16), torch.nn.Linear(2, 2)(torch.ones(2))],
        "many": {str(i): i for i in range(70000)},
    }
    if read:
        state["ordered"] = OrderedDict(a=1)
    asked = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: asked.append(1) or load(*a, **k))
    packed = user_state.checked_user_state(state, b"")
    assert len(asked) == read
    assert user_state.checked_user_state(state, packed) == packed
    assert len(asked) == read  # a value equal to the last one, which was readable, is not checked again
    found = user_state.unpack_user_state(packed)
    assert all(torch.equal(a, b) for a, b in zip(found.pop("tensors"), state.pop("tensors"), strict=True))
    assert found == state


class Stop(Exception):
    pass


@pytest.mark.parametrize("how", ["failed", "state assigned", "large edit"])
def test_record_of_a_step_that_never_was(tmp_path, monkeypatch, how):
    """A commit of step 1 during or after a step 2 that fails carries the record of step 1."""
    [device] = named_devices(tmp_path, 1)
    [p] = parameters((300,), dtype=bf16)
    opt = CSDAdam([p], lr=0.1, devices=device)
    opt.user_state = {"at": 1}
    train(opt)
    opt.synchronize()
    opt.user_state = {"at": 2}
    opt.param_groups[0]["lr"] = 0.05
    if how == "state assigned":
        opt.state[p]["exp_avg"] = torch.zeros(300)
    if how == "large edit":
        monkeypatch.setattr(csd_optim.step.prepare, "EDIT_BYTES", 16)
        with torch.no_grad():
            p.mul_(2)

    def begin(*_, **__):
        raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(engine_of(opt), "begin", begin)
        with pytest.raises(Stop):
            train(opt)
    copies = crashed(device, tmp_path / "crash")
    opt.close()
    for where in (copies[0], device):
        with CSDAdam([p], lr=0.1, devices=where, resume=True) as opt:
            assert opt.committed_step == 1
            assert opt.user_state == {"at": 1}
            assert opt.param_groups[0]["lr"] == 0.1
