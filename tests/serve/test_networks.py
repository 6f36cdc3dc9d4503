"""Owners on networks that delay, lose and break: encrypted, on machines that are network namespaces.

Whatever happens to the cables, step() raises within the timeout, and the bits are those of directories afterwards.
"""

import contextlib
import errno
import os
import subprocess
import time
from unittest import mock

import faults
import pytest
import torch
from support.networks import ServedThere, on_machines
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from csd_optim import CSDAdam, CSDError, CSDOSError, CSDRankError
from csd_optim.serve.trainer.remote_native import RemoteNative

pytestmark = pytest.mark.ci
ALONE = pytest.param(1, marks=pytest.mark.soak)
TIMEOUT = 4  # seconds for which an owner may be silent
RAISES = 45  # seconds within which step() raises then, which includes attempts to connect again
NAMES = {1: ("owner", "trainer0"), 2: ("owner", "trainer0", "trainer1")}


class Net:
    """A model under DDP of some 80 tiles, and its optimizer. Inputs depend on the step and the rank."""

    def __init__(self, rank, devices, **options):
        torch.manual_seed(3)
        torch.set_num_threads(1)
        self.model = DDP(
            nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
        )
        self.opt = CSDAdam(self.model.parameters(), lr=0.01, devices=devices, tile_size=1024, **options)
        self.rank = rank
        self.done = self.opt.user_state.get("done", 0)

    def backward(self):
        generator = torch.Generator().manual_seed(100 * self.done + self.rank)
        self.opt.zero_grad()
        self.model(torch.randn(6, 64, generator=generator)).square().sum().backward()

    def step(self, **more):
        self.backward()
        self.opt.user_state = {"done": self.done + 1, **more}
        self.opt.step()
        self.done += 1

    def until(self, step):
        while self.done < step:
            self.step()
        return self

    def repeat(self):
        """Make the step that has failed, with its gradients: a forward may raise until all ranks have called step()."""
        end, said = time.monotonic() + RAISES, []
        while True:
            try:
                self.opt.step()
                self.done += 1
                return
            except CSDError as e:
                said.append(f"{type(e).__name__}: {e}")
            assert time.monotonic() < end, said

    def params(self):
        return [p.detach().clone() for p in self.model.parameters()]

    def image(self):
        self.opt.wait()
        return self.params() + [t.clone() for p in self.model.parameters() for t in self.opt.state[p].values()]


def assert_equal(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def of_directories(rank, step):
    """Return what the model and its states are after so many steps with directories."""
    os.makedirs(f"own-{rank}", exist_ok=True)
    net = Net(rank, f"own-{rank}", overwrite=True).until(step)
    image = net.image()
    net.opt.close()
    return image


def resumes(machines, rank, address, step, wanted):
    """A new trainer resumes, and trains to `step`."""
    net = Net(rank, address, resume=True)
    assert net.done == net.opt.committed_step == wanted
    assert_equal(of_directories(rank, step), net.until(step).image())
    net.opt.close()


# ---- packets are late and lost ---------------------------------------------------------


def trains(machines, rank, address):
    net = Net(rank, address).until(6)
    assert_equal(of_directories(rank, 6), net.image())
    net.opt.close()


def lossy(machines, n):
    with ServedThere(machines, "store", 30) as owner:
        for name in NAMES[n]:
            machines.lose(name)
        machines.trainers(n, trains, owner.address)
        assert all(machines.dropped(name) for name in NAMES[n])


@pytest.mark.parametrize("n", [ALONE, 2])
def test_late_and_lost_packets_change_no_bit(tmp_path, n):
    on_machines(lossy, n, directory=tmp_path, names=NAMES[n])


# ---- cables are pulled -----------------------------------------------------------------


@contextlib.contextmanager
def pulled_at(machines, name, call):
    """Pull the cable of a machine at this call of push(), counted from 1; 0: never."""
    real, calls = RemoteNative.push, 0

    def push(native, *arguments):
        nonlocal calls
        calls += 1
        if calls == call:
            machines.plug(name, False)
        return real(native, *arguments)

    with mock.patch.object(RemoteNative, "push", push):
        yield


def raises(net, machines, name, call):
    """Make a step in which a cable is pulled, and which raises in time."""
    begun = time.monotonic()
    with pytest.raises(CSDError), pulled_at(machines, name, call):
        net.step()
    assert time.monotonic() - begun < RAISES


def loses_the_cable_for_a_while(machines, rank, address, call):
    net = Net(rank, address).until(3)
    net.opt.synchronize()
    raises(net, machines, "owner", call if rank == 0 else 0)
    torch.distributed.barrier()
    if rank == 0:
        machines.plug("owner", True)
    torch.distributed.barrier()
    net.repeat()
    assert_equal(of_directories(rank, 7), net.until(7).image())
    net.opt.close()


def unplugged(machines, n, call):
    with ServedThere(machines, "store", TIMEOUT) as owner:
        machines.trainers(n, loses_the_cable_for_a_while, owner.address, call)
        machines.trainers(n, resumes, owner.address, 9, 7)


@pytest.mark.parametrize(("n", "call"), [(1, 40), pytest.param(1, 1, marks=pytest.mark.soak), (2, 15)])
def test_a_cable_is_pulled_in_a_step_and_plugged_in_again(tmp_path, n, call):
    on_machines(unplugged, n, call, directory=tmp_path, names=NAMES[n])


def loses_its_owner(machines, rank, address):
    net = Net(rank, address).until(3)
    net.opt.synchronize()
    raises(net, machines, "owner", 10 if rank == 0 else 0)
    raises(net, machines, "owner", 0)  # and again, as nobody answers


def half_open(machines, n):
    with ServedThere(machines, "store", TIMEOUT) as owner:
        machines.trainers(n, loses_its_owner, owner.address)
        owner.until(r"session \d+ is over")
        machines.plug("owner", True)
        machines.trainers(n, resumes, owner.address, 6, 3)


@pytest.mark.parametrize("n", [ALONE, 2])
def test_an_owner_vanishes_without_a_word(tmp_path, n):
    """Neither side hears of the other one again: both notice it, and the owner serves the next trainers."""
    on_machines(half_open, n, directory=tmp_path, names=NAMES[n])


def vanishes(machines, rank, address):
    net = Net(rank, address).until(3)
    net.opt.synchronize()
    begun = time.monotonic()
    with pytest.raises((CSDError, RuntimeError)), pulled_at(machines, "trainer1", 10 if rank == 0 else 0):
        net.step()  # gloo, too, waits for its timeout
    return time.monotonic() - begun


def one_of_two(machines):
    with ServedThere(machines, "store", TIMEOUT) as owner:
        machines.trainers(2, vanishes, owner.address)
        machines.plug("trainer1", True)
        machines.trainers(2, resumes, owner.address, 6, 3)


@pytest.mark.soak
def test_a_trainer_vanishes_without_a_word(tmp_path):
    """The others cannot make the step without it, and all resume the one before."""
    on_machines(one_of_two, directory=tmp_path, names=NAMES[2])


# ---- drives of the owner ---------------------------------------------------------------


def has_no_room(machines, rank, address):
    net = Net(rank, address).until(3)
    net.opt.synchronize()
    before = net.params()
    filler = f"disk/filler-{rank}"
    if rank == 0:
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    torch.distributed.barrier()
    with pytest.raises(CSDError, match=r"[Nn]o space left") as failure:
        net.step(padding=bytes(1 << 20))  # a commit makes room for this beforehand
    assert isinstance(failure.value, CSDOSError | CSDRankError)
    assert_equal(before, net.params())
    net.opt.user_state = {"done": net.done + 1}
    torch.distributed.barrier()
    if rank == 0:
        os.unlink(filler)
    torch.distributed.barrier()
    net.repeat()
    assert_equal(of_directories(rank, 6), net.until(6).image())
    net.opt.close()


def full(machines, n):
    os.mkdir("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", "disk"], check=True)
    with ServedThere(machines, "disk/store", 20) as owner:
        machines.trainers(n, has_no_room, owner.address)
        machines.trainers(n, resumes, owner.address, 8, 6)


@pytest.mark.parametrize("n", [ALONE, 2])
def test_the_owners_disk_is_full(tmp_path, n):
    on_machines(full, n, directory=tmp_path, names=NAMES[n])


def has_a_dead_drive(machines, rank, address):
    net = Net(rank, address).until(3)
    net.opt.synchronize()
    before = net.params()
    torch.distributed.barrier()
    with contextlib.ExitStack() as stack:
        if rank == 0:
            stack.enter_context(faults.rule(faults.TILE_WRITE, "store", faults.ERROR, errno.EIO))
        torch.distributed.barrier()
        with pytest.raises(CSDError, match="Input/output error"):
            net.step()
        assert_equal(before, net.params())
        torch.distributed.barrier()
    torch.distributed.barrier()
    net.repeat()
    assert_equal(of_directories(rank, 6), net.until(6).image())
    net.opt.close()


def dead(machines, n, environment):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSD_FAULTS", environment["CSD_FAULTS"])
        with ServedThere(machines, "store", 20, environment) as owner:
            machines.trainers(n, has_a_dead_drive, owner.address)
            machines.trainers(n, resumes, owner.address, 8, 6)


@pytest.mark.parametrize("n", [ALONE, 2])
def test_the_owners_drive_fails(tmp_path, n):
    on_machines(dead, n, faults.preloaded(tmp_path, "faults"), directory=tmp_path, names=NAMES[n])
