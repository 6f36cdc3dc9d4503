"""Parameters on an accelerator are published exactly, and just what differs: with devices here, and with an owner."""

import contextlib

import pytest
import torch
from support.on_accelerator import BACKWARD, DEVICE
from support.owner_here import OwnerHere
from support.published import Published, bf16
from torch import nn

pytestmark = pytest.mark.accelerator


class Net(nn.Module):
    """Parameters on the accelerator, and one in host memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.big = nn.Parameter(torch.randn(70, 301).to(bf16).to(DEVICE))
        self.turned = nn.Parameter(torch.randn(60, 40).to(bf16).to(DEVICE).t())
        self.sliced = nn.Parameter(torch.randn(40, 60).to(bf16).to(DEVICE)[:, ::2])
        self.here = nn.Parameter(torch.randn(3000).to(bf16))
        self.odd = nn.Parameter(torch.randn(33).to(bf16).to(DEVICE))


@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit", "lr": 1e-4}], ids=["fp32", "8bit"])
@pytest.mark.parametrize("is_served", [False, True], ids=["here", "served"])
def test_published(is_served, options, tmp_path):
    with contextlib.ExitStack() as stack:
        devices = "file:"
        if is_served:
            devices = stack.enter_context(OwnerHere(tmp_path / "owner")).address
        t = stack.enter_context(Published(tmp_path / "policy", devices, model=Net(), **options))
        t.steps(2)
        t.step()
        changed, sent = t.check()
        for name in t.names():
            if name != "turned":  # not recorded by updates, but compared
                assert changed[name] <= sent[name] <= changed[name] * 16 / 15 + 1024, name
        with torch.no_grad():
            t.model.big[3] += 1
            t.model.here[5:9] = 2
        t.steps(2)
        t.steps(2, without=("odd",))
        with torch.no_grad():
            t.model.odd[4] = 7
        t.steps(1, without=("odd",))
        t.steps(2)


@pytest.mark.parametrize("mode", [{}, BACKWARD], ids=["plain", "backward"])
def test_overlap_with_an_owner(mode, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 301), nn.ReLU(), nn.Linear(301, 30)).bfloat16().to(DEVICE)
    with (
        OwnerHere(tmp_path / "owner") as owner,
        Published(tmp_path / "policy", owner.address, model=model, tile_size=4096) as t,
    ):
        t.opt.overlap(model, **mode)
        for i in range(7):
            if i == 4:
                t.opt.param_groups[0]["lr"] = 3e-4  # a wrong guess
            t.opt.zero_grad()
            model(torch.randn(8, 50).bfloat16().to(DEVICE)).square().sum().backward()
            t.opt.step()
            t.done += 1
            if i % 3 != 1:
                changed, sent = t.check()
                if i % 3 == 0 and i:
                    assert 0 < sum(sent.values()) <= sum(changed.values()) * 16 / 15 + 1024
