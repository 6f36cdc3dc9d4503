"""What the devices can read and write of a parameter, and what a write from outside changes of that."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from support.inside import state_map_of

from csd_optim import CSDAdam
from csd_optim.bindings import FROM_PARAM, IN_PARAM, IN_SECTION, UNLESS_SET
from csd_optim.distributed.sharding import UNSHARDED, Partition
from csd_optim.params.reach import Reach


class Uncounted(Partition):
    """A whole tensor to which torch does not count writes."""

    writes_uncounted = True


def place_of(param, *, part=UNSHARDED, in_place=False, **facts):
    """Return the facts about the place of a (6, 4) parameter whose states are contiguous in host memory."""
    reach = Reach.unexamined(torch.empty(6, 4), in_place=in_place)
    known = {"stride": (4, 1), "state_device": torch.device("cpu"), "reachable": True, "images_only": False}
    return SimpleNamespace(**known | {"is_coded": False} | facts, param=param, part=part, reach=reach)


def made(dtype, order="C"):
    return torch.zeros(6, 4, dtype=dtype) if order == "C" else torch.zeros(4, 6, dtype=dtype).t()


@pytest.mark.parametrize(
    ("param", "facts", "master_source", "is_direct"),
    [
        (made(torch.float32), {}, FROM_PARAM, True),
        (made(torch.float32, "F"), {}, IN_SECTION, False),
        (made(torch.float32), {"in_place": True}, IN_PARAM, True),
        (made(torch.float32), {"in_place": True, "reachable": False}, IN_PARAM, True),
        (made(torch.float32, "F"), {"in_place": True}, IN_SECTION, False),
        (made(torch.bfloat16), {"in_place": True}, IN_SECTION, True),
        (made(torch.float32), {"reachable": False, "images_only": True}, IN_SECTION, False),
        (made(torch.bfloat16), {}, IN_SECTION, True),
        (made(torch.float16), {"part": Uncounted()}, UNLESS_SET, True),
        (made(torch.float16, "F"), {"part": Uncounted()}, IN_SECTION, False),
        (made(torch.float16), {"part": Uncounted(), "reachable": False}, IN_SECTION, True),
        (made(torch.float32), {"part": Uncounted()}, FROM_PARAM, True),
        (made(torch.complex64), {}, IN_SECTION, False),
        (made(torch.float32, "F"), {"is_coded": True}, FROM_PARAM, False),
        (made(torch.complex64), {"is_coded": True}, FROM_PARAM, False),
        (made(torch.float16), {"is_coded": True, "part": Uncounted()}, IN_SECTION, True),
        (made(torch.float32), {"is_coded": True, "reachable": False}, IN_SECTION, True),
    ],
)
def test_what_a_parameter_lets_devices_do(param, facts, master_source, is_direct):
    reach = Reach.of(place_of(param, **facts), None)
    assert (reach.master_source, reach.in_place) == (master_source, master_source == IN_PARAM)
    assert reach.direct_dtype == (param.dtype if is_direct else None)
    assert (reach.pointer, reach.local.data_ptr()) == (param.data_ptr(), param.data_ptr())


def test_gradients_of_another_dtype_are_not_taken_in_place():
    place = place_of(made(torch.float32))
    assert Reach.of(place, torch.float32).direct_dtype is torch.float32
    assert Reach.of(place, torch.bfloat16).direct_dtype is None


def test_writes_to_an_inference_tensor_are_not_counted():
    with torch.inference_mode():
        param = made(torch.bfloat16)
    assert Reach.of(place_of(param), None).master_source == UNLESS_SET


def test_a_parameter_that_could_not_be_its_own_master_never_is_again():
    place = place_of(made(torch.float32, "F"), in_place=True)
    place.reach = Reach.of(place, None)
    place.param = made(torch.float32)
    assert Reach.of(place, None).master_source == FROM_PARAM


def test_it_is_replaced_as_a_whole():
    """A step leaves the object alone, a write from outside makes another, which nobody can change."""
    p = torch.nn.Parameter(torch.ones(6, 4))
    opt = CSDAdam([p])

    def step():
        p.grad = torch.ones_like(p)
        opt.step()
        return state_map_of(opt).param_states[id(p)].reach

    first = step()
    assert step() is first
    p.data = torch.ones(4, 6).t()
    moved = step()
    assert (first.direct_dtype, moved.direct_dtype) == (torch.float32, None)
    assert (first.local.is_contiguous(), moved.pointer) == (True, p.data_ptr())
    with pytest.raises(dataclasses.FrozenInstanceError):
        moved.pointer = 0
    opt.close()
