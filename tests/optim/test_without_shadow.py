"""With shadow=False there is one copy of the states: half the space, and torn steps are detected and reported."""

import errno
import gc
import time

import pytest
import torch
from support.backends import named_devices, on_cards, place, reading_all
from support.comparing import assert_same
from support.inside import engine_of, idle_engine_of
from support.training import (
    Training,
    crashed,
    flip,
    never_stopped,
    resumed,
)

import csd_optim.engine.engine
from csd_optim import (
    CSDAdam,
    CSDOSError,
    CSDStoreError,
)
from csd_optim.errors import CSDTornError
from csd_optim.store.file import StoreFile
from csd_optim.store.format import CLEAN, FILE_NAME, read_contents

pytestmark = pytest.mark.cards


def test_without_shadow_half_the_space_and_the_same_bits(tmp_path):
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    with_ = Training(named_devices(tmp_path / "with", 1)).steps(6)
    without = Training(named_devices(tmp_path / "without", 1), shadow=False).steps(6)
    without.opt.synchronize()
    copies = crashed(named_devices(tmp_path / "without", 1), tmp_path / "crash")
    assert_same(with_.close(), without.close())
    size = [(tmp_path / name / "csd0" / FILE_NAME).stat().st_blocks for name in ("with", "without")]
    assert size[1] < 0.62 * size[0]
    for devices in (copies, named_devices(tmp_path / "without", 1)):
        training = resumed(devices, 6)
        assert_same(training.image(), never_stopped(6))
        assert_same(training.steps(2).close(), never_stopped(8))


def test_without_shadow_a_step_cut_short_is_noticed(tmp_path, monkeypatch):
    devices, copies = named_devices(tmp_path, 2), []
    training = Training(devices, shadow=False).steps(3)
    finish = engine_of(training.opt).finish

    def copied(keep=True):
        copies.extend(crashed(devices, tmp_path / "crash"))
        finish(keep)

    monkeypatch.setattr(engine_of(training.opt), "finish", copied)
    training.steps(1)
    monkeypatch.undo()
    training.close()
    for _ in range(2):
        with pytest.raises(CSDStoreError, match="step 3 was cut short, and with shadow=False"):
            resumed(copies)
    assert_same(resumed(devices, 4).close(), never_stopped(4))


def test_without_shadow_a_step_that_cannot_be_announced_changes_nothing(tmp_path, monkeypatch):
    devices = named_devices(tmp_path, 2)
    training = Training(devices, shadow=False).steps(3)
    training.opt.synchronize()
    mark = StoreFile.mark

    def on_one_device(store, sequence, flags):
        if store.path.parent == place(devices[1]):
            raise CSDOSError(errno.EIO, f"{store.path}: cannot write the superblock")
        mark(store, sequence, flags)

    with monkeypatch.context() as patched:
        patched.setattr(StoreFile, "mark", on_one_device)
        for attempt in range(3):
            with pytest.raises(CSDOSError, match="cannot write the superblock"):
                training.step()
            copies = crashed(devices, tmp_path / f"crash{attempt}")
            assert_same(resumed(copies, 3).close(), never_stopped(3))
    copies = crashed(devices, tmp_path / "crash")
    assert_same(training.steps(1).close(), never_stopped(4))
    for left in (devices, copies):  # a mark that not all devices have does not count
        training = resumed(left)
        training.steps(4 - training.done)
        assert_same(training.close(), never_stopped(4))


@pytest.mark.parametrize("end", ["close", "drop"])
def test_without_shadow_a_torn_step_is_final(tmp_path, monkeypatch, end):
    devices = named_devices(tmp_path, 2)
    training = Training(devices, shadow=False).steps(3)
    training.opt.synchronize()
    real = csd_optim.engine.engine.bindings.engine_finish

    def torn(handle, keep, name):
        until = time.monotonic() + 10
        while (
            keep
            and time.monotonic() < until
            and not csd_optim.engine.engine.bindings.engine_stats(handle, 0)["write_bytes"]
        ):
            time.sleep(0.001)
        real(handle, False, name)

    with monkeypatch.context() as patched:
        patched.setattr(csd_optim.engine.engine.bindings, "engine_finish", torn)
        with pytest.raises(CSDTornError, match="shadow=False") as caught:
            training.step()
    assert isinstance(caught.value, CSDOSError)
    for _ in range(2):
        with pytest.raises(CSDTornError, match="cut short"):
            training.step()
    assert training.opt.committed_step == 3
    if end == "close":
        training.opt.close()
    del training, caught
    gc.collect()
    assert not read_contents(place(devices[0])).superblock.flags & CLEAN
    with pytest.raises(CSDStoreError, match="cut short"):
        resumed(devices)


@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_without_shadow_an_error_before_the_first_write_undoes_the_step(tmp_path):
    devices = reading_all(named_devices(tmp_path, 2))
    training = Training(devices, shadow=False).steps(3)
    training.opt.synchronize()
    before = training.image()
    every = [(device, tile) for device in devices for tile in range(len(read_contents(place(device)).tiles))]
    for device, tile in every:  # damage all tiles, so that the step writes none
        flip(device, 0, 0, tile=tile)
    with pytest.raises(CSDStoreError, match="is not what was written"):
        training.step()
    for device, tile in every:
        flip(device, 0, 0, tile=tile)
    assert_same(training.image(), before)
    assert_same(training.steps(1).close(), never_stopped(4))
    assert_same(resumed(devices, 4).close(), never_stopped(4))


@pytest.mark.cards
@pytest.mark.parametrize("section", range(3))
@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_damage_in_the_middle_of_a_tile_changes_no_parameter(tmp_path, section):
    """A tile is verified chunk by chunk: when damage is found, parameters of earlier chunks are already written."""
    devices = reading_all(named_devices(tmp_path, 1))

    def begun(devices):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(40, 100).bfloat16().t())
        return p, CSDAdam([p], devices=devices, tile_size=4096)

    def step(p, opt):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        opt.step()

    p, opt = begun(devices)
    step(p, opt)
    opt.synchronize()
    before = p.detach().clone()
    flip(devices[0], section, 2500)  # in the third chunk
    with pytest.raises(CSDStoreError, match="is not what was written there"):
        step(p, opt)
    assert [elems for _, elems in idle_engine_of(opt).undone()] == ([] if on_cards() else [2048])
    assert torch.equal(p, before)
    flip(devices[0], section, 2500)
    step(p, opt)
    opt.close()
    same, memory = begun("ram:")
    for _ in range(2):
        step(same, memory)
    assert torch.equal(p, same)
