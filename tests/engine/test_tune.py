"""Measuring drives when a large store is created: how it is done, which settings follow, and when it is skipped."""

import logging
import os

import numpy as np
import pytest
import torch
from support.forked import printed
from support.training import trained

from csd_optim import CSDAdam, CSDOSError, CSDValueError
from csd_optim.devices.spec import parse_device
from csd_optim.engine.placing import tuning as probe
from csd_optim.engine.placing.tuning import SETTINGS, Tuned, tune
from csd_optim.store.format import FILE_NAME, devices_of, read_contents
from csd_optim.store.report import REPORT_NAME

SLOW, FAST = Tuned(512 << 10, 8, 1e9), Tuned(4 << 20, 16, 2e9)


# ---- measuring -------------------------------------------------------------------------


@pytest.mark.serial("measures the drive: other tests would use it")
def test_on_a_real_drive(tmp_path):
    found = tune([tmp_path, tmp_path])
    assert len(found) == 2
    assert all((t.block_bytes, t.depth) in SETTINGS and t.bytes_per_second > 0 for t in found)
    rates = [t.bytes_per_second for t in found]
    assert max(rates) < 1.3 * min(rates)  # directories on one file system take turns
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ((1.0, 1.0, 1.0, 1.0), 0),
        ((0.96, 1.0, 0.97, 0.98), 0),  # as good as the best
        ((0.9, 0.96, 1.0, 1.0), 1),
        ((0.5, 0.6, 1.0, 0.9), 2),
        ((0.5, 0.6, 0.7, 1.0), 3),
    ],
)
def test_the_smallest_that_is_as_good_as_the_best(tmp_path, monkeypatch, rates, chosen):
    """With fake drives of known rates; in the first of two rounds, another program slows them down."""
    turns = {}

    def transfer(files, kind, seconds, depth=8, **_):
        moved = []
        for file, speed in zip(files, (1e9, 3e9), strict=True):
            turn = turns[file, file.block, depth] = turns.get((file, file.block, depth), 0) + 1
            disturbed = 0.3 if turn == 1 else 1.0
            moved.append(int(disturbed * seconds * speed * rates[SETTINGS.index((file.block, depth))]))
        return moved, seconds

    monkeypatch.setattr(probe, "_transfer", transfer)
    found = tune([tmp_path, tmp_path])
    assert [(t.block_bytes, t.depth) for t in found] == [SETTINGS[chosen]] * 2
    assert [t.bytes_per_second for t in found] == pytest.approx([1e9 * rates[chosen], 3e9 * rates[chosen]])


def test_depth_is_a_number_of_threads(tmp_path):
    program = """if True:
        import os, sys, torch
        from csd_optim import CSDAdam
        p = torch.nn.Parameter(torch.ones(5000))
        p.grad = torch.ones(5000)
        counts = []
        for device in sys.argv[1:]:
            with CSDAdam([p], devices=device) as opt:
                opt.step()
                counts.append(len(os.listdir("/proc/self/task")))
        print(*(n - counts[0] for n in counts))
    """
    devices = [f"file:{tmp_path}?scratch=1{option}" for option in ("", "&depth=32", "", "&depth=12")]
    assert printed(program, *devices).split() == ["0", "24", "24", "24"]  # threads stay


@pytest.mark.parametrize("depth", ["7", "257", "many"])
def test_bad_depth(depth):
    with pytest.raises(CSDValueError, match="depth is a number from 8 to 256"):
        parse_device(f"file:?depth={depth}")


# ---- the settings that follow ----------------------------------------------------------


@pytest.fixture
def tried(monkeypatch):
    """The directories measured so far. Every store is measured, however small; a 1 in its name makes a drive fast."""
    calls = []

    def fake(directories):
        calls.append(sorted(d.name for d in directories))
        return [FAST if "1" in d.name else SLOW for d in directories]

    monkeypatch.setattr(probe, "TUNE_BYTES", 1)
    monkeypatch.setattr(probe, "tune", fake)
    return calls


def tuned(devices, **options):
    p = torch.nn.Parameter(torch.arange(120_000.0))
    return p, trained([p], devices=devices, tile_size=4096, **options)


def settings(opt):
    return [(d["block_bytes"], d["depth"], d["share"]) for d in opt.stats()["devices"]]


def test_drives_of_unequal_speed(tmp_path, tried, caplog):
    devices = [str(tmp_path / f"csd{d}") for d in range(3)]
    with caplog.at_level(logging.INFO, "csd_optim"):
        p, opt = tuned(devices)
        with opt:
            assert settings(opt) == [(512 << 10, 8, 0.5), (4 << 20, 16, 1.0), (512 << 10, 8, 0.5)]
            opt.step()
            late = torch.nn.Parameter(torch.zeros(5000))
            late.grad = torch.ones(5000)
            opt.add_param_group({"params": [late]})
            opt.step()
            value = p.detach().clone()
    assert tried == [["csd0", "csd1", "csd2"]]  # once
    said = [r.getMessage() for r in caplog.records if "tried out" in r.getMessage()]
    assert len(said) == 3
    assert "2.00 GB/s when tried out; from now on in requests of 4096 KiB, 16 at once, share 1" in said[1]
    held = [read_contents(tmp_path / f"csd{d}" / FILE_NAME) for d in range(3)]
    tiles = [c.manifest["extents"][0]["tiles"] for c in held]
    assert tiles == np.bincount(devices_of((0.5, 1, 0.5), sum(tiles))).tolist()
    assert {tuple(e["shares"]) for c in held for e in c.manifest["extents"]} == {(0.5, 1.0, 0.5)}
    # A resume measures again, for request size and depth; the store determines the shares.
    q = torch.nn.Parameter(torch.zeros(120_000))
    with CSDAdam([{"params": [q]}, {"params": [torch.nn.Parameter(torch.zeros(5000))]}], devices=devices, resume=True):
        assert torch.equal(q, value)
    assert tried == [["csd0", "csd1", "csd2"]] * 2
    CSDAdam.load(devices)  # reading alone does not measure
    assert len(tried) == 2


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["file:csd1"], [(4 << 20, 16, 1.0)]),
        (["file:csd1?block=64KiB"], [(64 << 10, 16, 1.0)]),
        (["file:csd1?depth=9"], [(4 << 20, 9, 1.0)]),
        (["file:csd0", "file:csd1?share=1"], [(512 << 10, 8, 1.0), (4 << 20, 16, 1.0)]),
        (["file:csd0", "file:csd2"], [(512 << 10, 8, 1.0)] * 2),
        (["file:csd1", "ram:"], [(4 << 20, 16, 1.0), (1 << 20, 8, 1.0)]),
    ],
)
def test_what_was_said_counts(tried, devices, expected):
    with tuned(devices)[1] as opt:
        assert settings(opt) == expected
    assert len(tried) == 1


@pytest.mark.parametrize(
    "devices",
    [["file:csd1?block=1MiB&depth=8"], ["file:csd1?read=5GB/s"], ["ram:"], ["ram:", "null:"]],
)
def test_nothing_to_try_out(tried, devices):
    tuned(devices)[1].close()
    assert tried == []


def test_not_for_small_models(monkeypatch):
    monkeypatch.setattr(probe, "tune", None)
    with tuned("file:csd1")[1] as opt:
        assert settings(opt) == [(1 << 20, 8, 1.0)]


def test_it_can_be_turned_off(tried, monkeypatch):
    monkeypatch.setenv("CSD_OPTIM_PROBE", "0")
    tuned("file:csd1")[1].close()
    assert tried == []


@pytest.mark.parametrize("text", ["off", "2", "no"])
def test_turned_off_in_another_way(tried, monkeypatch, text):
    monkeypatch.setenv("CSD_OPTIM_PROBE", text)
    with pytest.raises(CSDValueError, match=f"Invalid CSD_OPTIM_PROBE: '{text}'; 1 tries drives out"):
        tuned("file:csd1")
    assert tried == []


def test_a_drive_that_cannot_be_tried_out(tried, monkeypatch, caplog):
    """A failed measurement is only logged; creating the store raises its own error if it fails."""

    def full(_):
        raise CSDOSError(28, "no room")

    monkeypatch.setattr(probe, "tune", full)
    with caplog.at_level(logging.INFO, "csd_optim"), tuned("file:csd1")[1] as opt:
        assert settings(opt) == [(1 << 20, 8, 1.0)]
    assert "no room" in caplog.text
    assert {*os.listdir("csd1")} == {FILE_NAME, REPORT_NAME}  # no scratch file
