"""The check that other tests rely on: any operation on a parameter that has not arrived raises an error."""

import threading

import pytest
import torch
import torch.nn.functional as F
from support.use_check import UseCheck, UsedTooEarly
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


class Logged(TorchDispatchMode):
    """A dispatch mode of the user."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def late():
    """A parameter under way, one that is not, and the check, which the fixture exits at the end."""
    late, there = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    check = UseCheck({late.untyped_storage().data_ptr(): "head.weight"})
    yield late, there, check
    check.exit()
    assert _get_current_dispatch_mode_stack() == []


USES = {
    "product": lambda p: F.linear(torch.ones(4), p),
    "view": lambda p: p[1:],
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data + 1,
    "in place": lambda p: p.data.clamp_(0, 1),
    "foreach": lambda p: torch._foreach_mul([torch.ones(1), p], 2.0),
    "numpy": lambda p: p.detach().numpy(),
    "item": lambda p: p[0, 0].item(),
    "copy": lambda p: torch.ones(4, 4).copy_(p),
    "out": lambda p: torch.add(torch.ones(4, 4), 1, out=p.data),
    "stack": lambda p: torch.stack([p, p]),
    "compiled": lambda p: torch.compile(lambda: p + 1, backend="eager")(),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_raises_with_the_name_of_the_parameter(late, use):
    p, there, check = late
    check.enter()
    with pytest.raises(UsedTooEarly, match=r"uses head\.weight, which the last step\(\) is still updating"):
        USES[use](p)
    check.names = {}
    USES[use](there)
    USES[use](p)


def test_a_view_made_before_is_seen_too(late):
    p, there, check = late
    view = p.detach()[2:]
    check.enter()
    with pytest.raises(UsedTooEarly, match=r"head\.weight"):
        view.sum()
    assert (there @ there).sum() == 64


def test_wrapped_tensors_are_looked_into(late):
    p, there, check = late
    wrapped, other = TwoTensor(there.detach(), p.detach()), TwoTensor(there.detach(), there.detach())
    check.enter()
    with pytest.raises(UsedTooEarly, match=r"head\.weight"):
        wrapped + 1
    other + 1


def test_tensors_without_memory_are_none_of_its_business(late):
    _, _, check = late
    check.names[0] = "empty"
    check.enter()
    assert torch.empty(3, device="meta").add(1).shape == (3,)
    assert torch.empty(0).sum() == 0
    assert torch.eye(2).to_sparse().sum() == 2


def test_backward_is_watched(late):
    p, there, check = late
    check.names = {}
    check.enter()
    out = (there * p).sum()
    check.names = {p.untyped_storage().data_ptr(): "head.weight"}
    with pytest.raises(UsedTooEarly, match=r"head\.weight"):
        out.backward()


@pytest.mark.parametrize("leave_first", ["check", "user"])
@pytest.mark.parametrize("enter_first", ["check", "user"])
def test_the_users_modes_are_entered_and_left_in_any_order(late, enter_first, leave_first):
    p, there, check = late
    user = Logged()
    if enter_first == "check":
        check.enter()
    user.__enter__()
    check.enter()  # for the first time, or a second time
    assert _get_current_dispatch_mode_stack() == [check, user]
    user.ops.clear()
    there + 1
    assert user.ops == [torch.ops.aten.add.Tensor]
    with pytest.raises(UsedTooEarly, match=r"head\.weight"):
        p + 1
    if leave_first == "check":
        check.exit()
        assert _get_current_dispatch_mode_stack() == [user]
        p + 1
        user.__exit__(None, None, None)
    else:
        user.__exit__(None, None, None)
        assert _get_current_dispatch_mode_stack() == [check]
        with pytest.raises(UsedTooEarly, match=r"head\.weight"):
            p + 1
        check.exit()
    check.exit()  # nothing to leave
    p + 1


def test_torchs_own_modes_stay_below(late):
    _, _, check = late
    with torch._subclasses.FakeTensorMode():
        check.enter()
        assert torch.ones(3).add(1).shape == (3,)
        check.exit()


def test_another_thread_neither_checks_nor_ends_it(late):
    p, _, check = late
    check.enter()
    sums = []

    def elsewhere():
        check.exit()
        sums.append(p.sum().item())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert sums == [16]
    with pytest.raises(UsedTooEarly, match=r"head\.weight"):
        p.sum()
