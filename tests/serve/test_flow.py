"""Owners update tiles and send parameters back before all gradients have arrived; a step that fails leaves no trace."""

import contextlib
import itertools
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.exact import Linear
from support.owners import STARTS, Owners, UnderDDP, small_buckets
from support.ranks import on_living_ranks

from csd_optim import CSDAdam, CSDOSError, CSDRankError
from csd_optim.bindings import Native
from csd_optim.distributed.buckets import TARGET_BUCKETS
from csd_optim.serve.owner import Owner
from csd_optim.serve.wire import BULK, Session

LAYERS, ROWS = TARGET_BUCKETS, 32  # each fp32 layer is one bucket and one tile


class Layers:
    def __init__(self, devices, **options):
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(ROWS, 32, generator=generator)) for _ in range(LAYERS)]
        self.opt = CSDAdam(self.params, lr=0.1, devices=devices, tile_size=1024, **options)
        self.done = 0

    def step(self):
        generator = torch.Generator().manual_seed(self.done)
        for p in self.params:
            p.grad = torch.randn(p.shape, generator=generator)
        self.opt.step()
        self.done += 1

    def image(self):
        return [p.detach().clone() for p in self.params]


@contextlib.contextmanager
def last_gradient_waits(buckets, there):
    """Hold back the last of a step's `buckets` until `there()` is true."""
    send, left = Session.send, itertools.count(buckets - 1, -1)

    def sending(session, tensor, rank, tag=BULK):
        if tag == BULK and next(left) == 0:
            end = time.monotonic() + STARTS
            while not there():
                assert time.monotonic() < end, "nothing has come back"
                time.sleep(0.001)
        return send(session, tensor, rank, tag)

    with mock.patch.object(Session, "send", sending):
        yield


def bytes_of(store):
    return b"".join(path.read_bytes() for path in sorted(Path(store).rglob("*")) if path.is_file())


def assert_alike(a, b):
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("route", ["kept", "star"])
@small_buckets()
def test_states_are_written_and_parameters_are_back_before_the_last_gradient_leaves(tmp_path, route):
    alone = Layers("ram:")
    with Owners(tmp_path, small=True) as owners:
        training = Layers(f"{owners.address}&route={route}")
        for _ in range(3):
            training.step()
        training.opt.synchronize()
        before, stored = training.image(), bytes_of(owners.stores[0])

        def there():
            flows = [not torch.equal(p, q) for p, q in zip(training.params, before, strict=True)]
            return all(flows[1:]) and bytes_of(owners.stores[0]) != stored

        with last_gradient_waits(LAYERS, there):
            training.step()
        training.step()
        for _ in range(5):
            alone.step()
        assert_alike(training.image(), alone.image())
        training.opt.close()
        owners.stop()


def fails_if_told(rank):
    """Owner 1's devices fail at the second tile of a step while a file `fail` exists."""
    push, pushed = Native.push, itertools.count()

    def pusher(engine, tile, **how):
        if rank == 1 and Path("fail").exists() and next(pushed) == 1:
            raise CSDOSError(5, "a drive of owner 1")
        push(engine, tile, **how)

    Native.push = pusher


@small_buckets()
def test_a_step_that_fails_halfway_on_one_owner_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = Layers("ram:")
    with Owners(tmp_path, 2, small=True, before=fails_if_told) as owners:
        training = Layers(owners.address)
        for _ in range(3):
            training.step()
        before = training.image()
        Path("fail").touch()

        def there():  # rows of both owners are back; owner 1 fails after sending its rows
            return bool((training.params[-1] != before[-1]).any(1).all())

        with last_gradient_waits(2 * LAYERS, there), pytest.raises(CSDRankError, match="a drive of owner 1"):
            training.step()
        assert_alike(training.image(), before)
        Path("fail").unlink()
        for _ in range(2):
            training.step()
        for _ in range(5):
            alone.step()
        assert_alike(training.image(), alone.image())
        training.opt.close()
        resumed = Layers(owners.address, resume=True)
        assert resumed.opt.committed_step == 5
        assert_alike(resumed.image(), alone.image())
        owners.stop()


class Hooked(UnderDDP):
    """Small layers under DDP, in even smaller buckets and tiles."""

    def __init__(self, devices, route="slices"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Linear(32, 32) for _ in range(6)))
        address = f"{devices}&route={route}" if devices.startswith("serve:") else devices
        super().__init__(model, address, lr=0.1, tile_size=256, ddp={"bucket_cap_mb": 0.005})

    def backward(self, i, rank):
        torch.manual_seed(100 * i + rank)
        self.ddp(torch.randn(4, 32)).square().sum().backward()


@small_buckets()
def guessing(rank, address, store, route):
    """States are written in backward; a wrong guess is undone; and the results are those without guesses."""
    alone, served = Hooked("ram:"), Hooked(address, route)

    def both(call):
        call(alone)
        call(served)
        assert_alike(served.image(), alone.image())

    def backward(i):
        both(lambda training: training.backward(i, rank))

    def step():
        both(Hooked.step)

    for i in range(3):
        backward(i)
        step()
    served.opt.synchronize()
    torch.distributed.barrier()
    stored = bytes_of(store)
    backward(3)
    end = time.monotonic() + STARTS
    while bytes_of(store) == stored:
        assert time.monotonic() < end, "nothing was written in backward"
        time.sleep(0.001)
    step()

    def guessed():  # begins a guess; the caller then makes it wrong
        for _ in range(2):
            backward(4)
            step()
        assert served.opt._guessed_message
        backward(5)

    def set_lr(lr):
        both(lambda training: training.opt.param_groups[0].update(lr=lr))

    guessed()
    set_lr(0.05)
    step()
    guessed()
    both(lambda training: training.opt.zero_grad())
    backward(6)
    step()
    guessed()
    with torch.no_grad():
        both(lambda training: training.model[0].weight.mul_(0.5))
    step()
    guessed()
    step()
    set_lr(0.02)  # included in the guess
    backward(7)
    set_lr(0.05)
    step()
    guessed()
    served.opt.consolidate_state_dict(None)  # returns the states before the guessed step
    step()
    served.opt.synchronize()
    done = served.opt.committed_step
    served.opt.close()
    return done


@pytest.mark.parametrize(("route", "size"), [("slices", 1), ("slices", 2), ("star", 1)])
def test_owners_update_in_backward_and_undo_what_was_not_as_guessed(tmp_path, route, size):
    with Owners(tmp_path, size, small=True) as owners:
        stores = owners.stores[-1]
        done = on_living_ranks(2, guessing, owners.address, stores, route, directory=tmp_path)
        assert done == [20, 20]
        assert "failed" not in owners.said
        owners.stop()


def cannot_undo_if_told(_):
    """Owners cannot undo a step while a file `fail` exists."""
    undone = Native.undone

    def fails(engine):
        if Path("fail").exists():
            raise CSDOSError(5, "the drive is gone")
        return undone(engine)

    Native.undone = fails


@small_buckets()
def asks_for_states_in_a_guess(_, address):
    alone, served = Hooked("ram:"), Hooked(address)
    for i in range(3):
        for training in (alone, served):
            training.backward(i, 0)
            training.step()
    served.backward(3, 0)
    Path("fail").touch()
    with pytest.raises(CSDRankError, match="the drive is gone"):
        served.opt.synchronize()
    Path("fail").unlink()
    with pytest.raises(CSDRankError, match="is over"):
        served.opt.synchronize()
    with CSDAdam(served.model.parameters(), devices=address, resume=True) as resumed:
        assert resumed.committed_step == 3
        assert_alike(served.image(), alone.image())


def test_owners_outlive_a_step_that_they_cannot_undo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Owners(tmp_path, small=True, before=cannot_undo_if_told) as owners:
        on_living_ranks(1, asks_for_states_in_a_guess, owners.address, directory=tmp_path)
        owners.stop()


def fails_unforeseen_if_told(rank):
    """Owner 1 fails with an unforeseen error when asked for states, while a file `fail` exists."""
    states = Owner.states

    def failing(owner):
        if rank == 1 and Path("fail").exists():
            raise RuntimeError("nobody has thought of that")
        return states(owner)

    Owner.states = failing


@pytest.mark.ci
def test_owners_go_on_from_the_store_if_one_of_them_has_failed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Owners(tmp_path, 2, timeout=10, before=fails_unforeseen_if_told) as owners:
        training = Layers(owners.address)
        training.step()
        Path("fail").touch()
        with pytest.raises(CSDRankError, match="nobody has thought of that"):
            training.opt.consolidate_state_dict()
        Path("fail").unlink()
        with pytest.raises(CSDRankError, match="is over"):
            training.opt.synchronize()
        resumed = Layers(owners.address, resume=True)
        assert resumed.opt.committed_step == 1
        assert_alike(resumed.image(), training.image())
        resumed.step()
        resumed.opt.close()
        owners.stop()
