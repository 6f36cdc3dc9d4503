"""The emulated accelerator itself: it is useful only if it reveals what would be wrong on a GPU."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from support import emulated
from support.backends import TESTS
from torch import nn

pytestmark = [pytest.mark.accelerator, pytest.mark.one_schedule, pytest.mark.usefixtures("emulated_only")]


def read_early(order, *, waits):
    """What a side stream copies of a tensor that the default stream makes 7, and what the host sees too early."""
    x, host, side = torch.ones(1000, device="emu"), torch.zeros(1000, pin_memory=True), torch.Stream("emu")
    torch.accelerator.synchronize()
    with emulated.schedule(order):
        x.fill_(7)
        if waits:
            side.wait_stream(torch.accelerator.current_stream())
        with side:
            host.copy_(x, non_blocking=True)
        early = host[0].item()
        side.synchronize()
        return host[0].item(), early


def test_a_missing_wait_shows_under_some_schedule():
    found = {order: read_early(order, waits=False) for order in emulated.ORDERS[:4]}
    assert found == {"late": (1, 0), "at once": (7, 7), "side first": (1, 1), "main first": (7, 0)}
    assert {read_early(f"random={seed}", waits=False)[0] for seed in range(60)} == {1, 7}


@pytest.mark.parametrize("order", [*emulated.ORDERS[:4], "random=1", "random=2"])
def test_no_schedule_breaks_a_program_that_waits(order):
    assert read_early(order, waits=True)[0] == 7


@pytest.mark.ci
def test_the_host_faults_on_memory_of_the_device(tmp_path):
    script = tmp_path / "touches.py"
    script.write_text(
        "import ctypes, torch\nfrom support import emulated\nemulated.load()\n"
        "x = torch.ones(1000, device='emu')\nprint(x[3].item(), flush=True)\n"
        "print(ctypes.c_float.from_address(x.data_ptr()).value)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.returncode) == ("1.0\n", -signal.SIGSEGV), done.stderr


def test_freed_memory_is_poisoned():
    x = torch.ones(1000, device="emu")
    del x
    assert torch.empty(1000, device="emu").isnan().all()
    host = torch.ones(12_345, pin_memory=True)
    address = host.data_ptr()
    del host
    again = torch.empty(12_345, pin_memory=True)
    assert (again.data_ptr(), bool(again.isnan().all())) == (address, True)


def test_pinned_memory_is_kept_for_copies_under_way():
    with emulated.schedule("late"):
        host = torch.ones(1000, pin_memory=True)
        address = host.data_ptr()
        x = host.to("emu", non_blocking=True)
        del host
        assert torch.empty(1000, pin_memory=True).data_ptr() != address
        assert x.sum().item() == 1000


def test_arguments_on_the_wrong_device_are_refused():
    x = torch.ones(3, device="emu")
    for other in (torch.ones(3), torch.ones(3, device="emu:1")):
        for call in (torch.add, torch.Tensor.mul_, torch.dot, torch.Tensor.addcmul_):
            arguments = (x, other, other) if call is torch.Tensor.addcmul_ else (x, other)
            with pytest.raises(RuntimeError, match=r"on the same device|on the host and on a device|on two devices"):
                call(*arguments)


def test_launches_and_waits_are_counted():
    emulated.set_schedule("late")
    x = torch.ones(1000, device="emu")
    torch.accelerator.synchronize()
    launched, waited = emulated.counts()
    x.add_(1)
    x.mul_(2)
    event = torch.Event("emu")
    event.record(torch.accelerator.current_stream())
    assert (emulated.counts(), emulated.pending()) == ((launched + 2, waited), 2)
    while not event.query():  # polling counts as one wait
        pass
    assert emulated.counts() == (launched + 2, waited + 1)
    assert x.sum().item() == 4000
    assert emulated.counts() == (launched + 3, waited + 2)


def test_it_trains():
    def final_loss(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x, y = torch.randn(32, 8).to(device), torch.randint(0, 4, (32,)).to(device)
        for _ in range(5):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return loss.detach().cpu()

    for order in emulated.ORDERS:
        with emulated.schedule(order):
            assert torch.allclose(final_loss("emu"), final_loss("cpu"))
