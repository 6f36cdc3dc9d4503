"""Error-feedback residuals in stores: every commit has the residuals of its step, despite failures and crashes.

The tests drive an engine directly, as the optimizer does. Each residual is a function of the previous one and the step
number. Oracle: the same training in memory.
"""

import contextlib
import errno
import fcntl
import functools
import itertools
import json
import math
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support.backends import named_devices, place
from support.comparing import assert_same
from support.tables import step_table

from csd_optim import CSDAdam, CSDOSError, CSDStoreError, CSDValueError
from csd_optim.bindings import DTYPE_CODES, HYPER, PARAM, RULES
from csd_optim.checkpoint import export as convert
from csd_optim.checkpoint import files
from csd_optim.checkpoint import snapshot as checkpoint
from csd_optim.checkpoint.verify import verify
from csd_optim.devices.spec import parse_devices
from csd_optim.engine.commit import residuals
from csd_optim.engine.open_engine import open_engine
from csd_optim.optim.rules import ADAMW
from csd_optim.store import reader as tiles
from csd_optim.store.format import CLEAN, FILE_NAME, PAGE, Record, read_contents

pytestmark = pytest.mark.at_hand("drives the engine, by windows and addresses")

ADAM = np.array([(RULES["adamw"], (1.0, 0.9, 0.1, 0.999, 0.001, 0.1, 1.0, 1e-8, 1.0))], HYPER)
STATES = ADAMW.sections[:3]
FP32 = DTYPE_CODES[torch.float32]
# Shape, stride, and the step in which the parameter gets a residual.
PARAMS = {
    "weight": ((30, 70), (70, 1), 1),
    "columns": ((50, 90), (1, 50), 1),
    "bias": ((33,), (1,), None),
    "empty": ((0, 3), (3, 1), 1),
    "late": ((5001,), (1,), 3),
}
NAMES = [*PARAMS]
GROUP = {"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
RECORD = Record(groups=[GROUP], given=[GROUP], seconds=1.0)


class EngineTraining:
    """An engine with these parameters, and a simple step."""

    def __init__(self, devices, *, mode="new", **options):
        self.engine = engine = open_engine(parse_devices(devices), mode=mode, tile_elems=1024, **options)
        if engine.recovered:
            try:
                engine.committer.check_recovered()
            except CSDStoreError:
                engine.close()
                raise
            engine.committer.discard_newer()
            self.extent = engine.tiles.extents[0]
        else:
            self.extent = engine.extend([math.prod(shape) for shape, _, _ in PARAMS.values()], STATES)
            engine.committer.describe(self.manifest())
            engine.states.sync()
        self.windows = [
            [engine.windows.window(self.extent, i, s, torch.float32) for s in range(3)] for i in range(len(PARAMS))
        ]
        self.params = [master.clone() for master, _, _ in self.windows]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    def manifest(self):
        params = [
            {"name": name, "group": 0, "position": i, "shape": [*shape], "dtype": "float32"}
            | {"stride": [*stride], "extent": 0, "start": self.extent.starts[i], "numel": math.prod(shape)}
            for i, (name, (shape, stride, _)) in enumerate(PARAMS.items())
        ]
        return {"params": params, "waiting": []}

    @property
    def done(self):
        return self.engine.states.step

    def keep(self, number, device="cpu"):
        for i, (_, _, first) in enumerate(PARAMS.values()):
            if first == number:
                residual = torch.zeros(self.extent.numels[i], dtype=torch.bfloat16, device=device)
                self.engine.committer.keep_residual(i, residual)

    def step(self, commit=True):
        engine, number = self.engine, self.done + 1
        self.keep(number)
        generator = torch.Generator().manual_seed(number)
        grads = [torch.randn(p.shape, generator=generator) for p in self.params]
        every = np.arange(len(engine.tiles), dtype=np.uint32)
        for tile in engine.begin(step_table(grads, self.params), ADAM, every, RECORD).tolist():
            engine.native.push(tile)
        engine.finish()
        engine.states.steps[0] += 1
        for i, residual in engine.states.residuals.items():
            noise = torch.randn(residual.shape, generator=generator.manual_seed(1000 * number + i))
            residual.copy_(0.5 * residual.cpu().float() + noise)
        if commit:
            engine.committer.commit(RECORD)
        return self

    def steps(self, n):
        for _ in range(n):
            self.step()
        return self

    def image(self):
        self.engine.states.remap()
        states = {(name, s): w.clone() for name, ws in zip(NAMES, self.windows, strict=True) for s, w in enumerate(ws)}
        kept = {(NAMES[i], "residual"): r.cpu().clone() for i, r in self.engine.states.residuals.items()}
        return states | kept | {"steps": torch.from_numpy(self.engine.states.steps[0].copy())}


@functools.cache
def never_stopped(steps):
    with EngineTraining(["ram:"]) as training:
        return training.steps(steps).image()


def resumed(devices):
    return EngineTraining(devices, mode="resume")


def crashed(devices, to):
    """Copies the devices as a process that is killed now would leave them."""
    copies = named_devices(to, len(devices))
    for device, copy in zip(devices, copies, strict=True):
        shutil.copytree(place(device), place(copy))
    return copies


def contents(devices):
    return [read_contents(place(d)) for d in devices]


def found_at(devices, name):
    """The file and the offset (bytes) of a committed residual."""
    for held in contents(devices):
        for row, offset, _ in held.residual_places():
            if NAMES[row] == name:
                return Path(held.path), offset
    raise AssertionError(f"{name} has no residual")


# ---- resume --------------------------------------------------------------------------


@pytest.mark.sampled(together=2)
@pytest.mark.cards
@pytest.mark.parametrize("end", ["close", "kill"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_goes_on_bit_for_bit(tmp_path, n, at, end):
    devices = named_devices(tmp_path / "a", n)
    (tmp_path / "a").mkdir()
    with EngineTraining(devices) as training:
        training.steps(at).engine.wait()
        killed = crashed(devices, tmp_path / "b")
    devices = killed if end == "kill" else devices
    for _ in range(2):
        with resumed(devices[::-1]) as training:  # named in any order
            assert_same(training.image(), never_stopped(at))
            assert all(r.device.type == "cpu" for r in training.engine.states.residuals.values())
            assert_same(training.steps(2).image(), never_stopped(at + 2))
        at += 2
    with resumed(devices) as training:
        assert_same(training.image(), never_stopped(at))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 4])  # another residual joins in step 3
def test_every_instant_of_a_commit_leaves_one_step(tmp_path, monkeypatch, n, steps):
    """The devices are copied before and after every write and every flush of a commit."""
    (tmp_path / "a").mkdir()
    devices, lock, copies = named_devices(tmp_path / "a", n), threading.RLock(), []
    with EngineTraining(devices) as training:
        training.steps(steps).engine.wait()
        training.step(commit=False)
        training.engine.states.remap()

        def copied(call):
            def instead(*arguments):
                with lock:
                    copies.append(crashed(devices, tmp_path / f"{len(copies)}"))
                    return call(*arguments)

            return instead

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", copied(os.pwrite))
            patched.setattr(os, "fdatasync", copied(os.fdatasync))
            training.engine.committer.commit(RECORD)
            training.engine.wait()
        copies.append(crashed(devices, tmp_path / f"{len(copies)}"))
    kept = [r for r in training.engine.states.residuals.values() if r.numel()]
    assert len(copies) > n * (2 + 2 + 3) + len(kept)  # tables, superblocks, flushes, residuals
    found = []
    for copy in copies:
        with resumed(copy) as training:
            found.append(training.done)
            if training.done:
                assert_same(training.image(), never_stopped(training.done))
            assert_same(training.step().image(), never_stopped(found[-1] + 1))
        shutil.rmtree(place(copy[0]).parent)
    assert found == sorted(found)
    assert {*found} == {steps, steps + 1}


@pytest.mark.parametrize("nth", range(1, 9))  # three residuals are written, then eight tables and superblocks
def test_a_commit_that_fails_is_tried_again(tmp_path, monkeypatch, nth):
    """Every nth write fails: each attempt gets to another point, and finished parts are not repeated."""
    devices, calls, pwrite = named_devices(tmp_path, 2), itertools.count(1), os.pwrite

    def fails(*arguments):
        if next(calls) % nth == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwrite(*arguments)

    with EngineTraining(devices) as training:
        training.steps(4).engine.wait()
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", fails)
            training.step()
            for _ in range(3):
                # Copy 1 takes four writes: from nth = 5 on the second attempt may complete it.
                with contextlib.suppress(CSDOSError) if nth > 4 else pytest.raises(CSDOSError, match="step 5 cannot"):
                    training.engine.wait()
            assert next(calls) > nth
            killed = crashed(devices, tmp_path / "b")
        with resumed(killed) as other:
            assert other.done in (4, 5)
            assert_same(other.image(), never_stopped(other.done))
        training.engine.wait()
        assert_same(training.step().image(), never_stopped(6))
    with resumed(devices) as training:
        assert_same(training.image(), never_stopped(6))


def test_undone_step_leaves_them(tmp_path):
    devices = named_devices(tmp_path, 2)
    with EngineTraining(devices) as training:
        training.steps(3)
        every = np.arange(len(training.engine.tiles), dtype=np.uint32)
        training.engine.begin(np.zeros(len(PARAMS), PARAM), ADAM, every, RECORD)
        training.engine.finish(keep=False)
    with resumed(devices) as training:
        assert_same(training.image(), never_stopped(3))


# ---- where they are --------------------------------------------------------------------


@pytest.mark.parametrize("sum_elems", [None, 1024])  # None: as before format 4
def test_store_without_residuals_does_not_ask_for_them(tmp_path, monkeypatch, sum_elems):
    monkeypatch.setattr("csd_optim.engine.open_devices.SUM_ELEMS", sum_elems)
    devices = named_devices(tmp_path, 2)

    def asks():
        """Format and features of the store, which are the same on both devices."""
        [said] = {(c.superblock.version, *c.manifest.get("features", ())) for c in contents(devices)}
        return said

    without, with_them = (
        ((4, "chunk_sums", "tile_numbers"), (4, "chunk_sums", "residuals", "tile_numbers"))
        if sum_elems
        else ((1,), (2,))
    )
    with EngineTraining(devices) as training:
        training.keep = lambda number: None
        training.steps(3)
    for held in contents(devices):
        assert not any("residual" in p for p in held.manifest["params"])
        assert "residual" not in json.dumps(held.record.groups)
    assert asks() == without
    with resumed(devices) as training:
        training.keep = lambda number: None
        assert training.engine.states.residuals == {}
        training.engine.committer.keep_residual(0, torch.ones(2100, dtype=torch.bfloat16))
        training.step().engine.wait()
        assert asks() == with_them
        training.engine.committer.drop_residual(0)
        training.step().engine.wait()
        assert asks() == without


def entry(position, extent, start, numel):
    """The manifest entry of a 1-D parameter."""
    about = {"name": f"{position}", "group": 0, "position": position, "shape": [numel], "stride": [1]}
    return about | {"dtype": "float32", "extent": extent, "start": start, "numel": numel}


def test_they_are_spread_over_the_durable_devices(tmp_path):
    numels = [9000, 100, 5000, 5000, 3000, 12000, 2048, 1]
    spread = []
    for run in range(2):
        devices = ["ram:", *named_devices(tmp_path / f"{run}", 3)]
        (tmp_path / f"{run}").mkdir()
        with contextlib.closing(open_engine(parse_devices(devices), tile_elems=1024)) as engine:
            extent = engine.extend(numels, STATES)
            params = [entry(i, 0, *place) for i, place in enumerate(zip(extent.starts, numels, strict=True))]
            engine.committer.describe({"params": params, "waiting": []})
            for i, n in enumerate(numels):
                engine.committer.keep_residual(i, torch.full((n,), i, dtype=torch.bfloat16))
            engine.committer.flush()
        held = contents(devices[1:])
        places = [p["residual"] for p in held[0].manifest["params"]]
        assert {p["device"] for p in places} == {1, 2, 3}
        assert all(p["base"] % PAGE == p["room"] % PAGE == 0 for p in places)
        assert [p["room"] for p in places] == [-(-2 * n // PAGE) * PAGE for n in numels]
        taken = [sum(p["room"] for p in places if p["device"] == d) for d in (1, 2, 3)]
        assert max(taken) - min(taken) <= max(p["room"] for p in places)
        for d in (1, 2, 3):  # nothing overlaps
            ranges = sorted((p["base"], p["base"] + 2 * p["room"]) for p in places if p["device"] == d)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
            assert ranges[-1][1] <= place(devices[d]).joinpath(FILE_NAME).stat().st_size
        spread.append([p["device"] for p in places])
    assert spread[0] == spread[1]


def test_what_has_not_changed_stays_where_it_is(tmp_path):
    [device] = devices = named_devices(tmp_path, 1)
    with EngineTraining(devices) as training:
        engine = training.steps(3).engine
        engine.wait()
        before = read_contents(place(device))
        engine.committer.flush()
        after = read_contents(place(device))
        assert after.superblock.sequence == before.superblock.sequence + 1
        assert after.residuals.tolist() == before.residuals.tolist()
        assert after.record.written_bytes == before.record.written_bytes
        # Writes to a residual are noticed, by torch or, if made without torch, through increment_version().
        engine.states.residuals[0][5] = 7
        engine.committer.flush()
        changed = read_contents(place(device)).residuals
        assert (changed != before.residuals).tolist() == [True, False, False, False]
        engine.states.residuals[1].view(torch.int16).numpy()[:] = 0
        torch.autograd.graph.increment_version([engine.states.residuals[1]])
    assert read_contents(place(device)).superblock.flags == CLEAN
    with resumed(devices) as training:
        training.engine.states.residuals[4][0] = 9
    with resumed(devices) as training:
        assert training.engine.states.residuals[4][0] == 9
        training.engine.states.residuals[4][0] = never_stopped(3)["late", "residual"][0]
    with resumed(devices) as training:
        assert training.engine.states.residuals[0][5] == 7
        assert not training.engine.states.residuals[1].any()
        assert torch.equal(training.engine.states.residuals[4], never_stopped(3)["late", "residual"])
        # Another tensor with the same version number replaces the content of the same place.
        size = (place(device) / FILE_NAME).stat().st_size
        other = torch.ones_like(training.engine.states.residuals[1])
        torch.autograd.graph.increment_version([other] * training.engine.states.residuals[1]._version)
        training.engine.committer.keep_residual(1, other)
        training.engine.committer.flush()
        assert (place(device) / FILE_NAME).stat().st_size == size
    with resumed(devices) as training:
        assert (training.engine.states.residuals[1] == 1).all()


def test_one_that_is_dropped_is_gone_and_its_room_is_used_again(tmp_path):
    [device] = devices = named_devices(tmp_path, 1)
    file = place(device) / FILE_NAME
    with EngineTraining(devices) as training:
        engine = training.steps(3).engine
        engine.wait()
        size = file.stat().st_size
        engine.committer.drop_residual(0)
        engine.committer.drop_residual(0)
        training.step().engine.wait()
        assert "residual" not in read_contents(file).manifest["params"][0]
        killed = crashed(devices, tmp_path / "b")
        engine.committer.keep_residual(0, torch.zeros(2100, dtype=torch.bfloat16))
        engine.committer.drop_residual(0)
        engine.committer.keep_residual(0, torch.full((2100,), 3.0, dtype=torch.bfloat16))
        engine.committer.flush()  # must write the new tensor, though its version is still 0
        assert file.stat().st_size == size
    with resumed(killed) as other:
        assert 0 not in other.engine.states.residuals
        assert torch.equal(other.engine.states.residuals[4], never_stopped(4)["late", "residual"])
    with resumed(devices) as training:
        assert (training.engine.states.residuals[0] == 3).all()


@pytest.mark.parametrize("how", ["at once", "after the tiles"])
def test_full_disk(tmp_path, monkeypatch, how):
    devices = named_devices(tmp_path, 2)
    fallocate = os.posix_fallocate

    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with EngineTraining(devices) as training:
        training.keep = lambda number: None
        if how == "after the tiles":
            training.steps(2).engine.wait()
        sizes = [(place(d) / FILE_NAME).stat().st_size for d in devices]
        monkeypatch.setattr(os, "posix_fallocate", full)
        for _ in range(2):
            with pytest.raises(CSDOSError, match=r"no room for 0\.00 GB of residuals") as caught:
                training.engine.committer.keep_residual(0, torch.zeros(2100, dtype=torch.bfloat16))
            assert caught.value.errno == errno.ENOSPC
            assert str(place(devices[0])) in str(caught.value)
        assert training.engine.states.residuals == {}
        assert [(place(d) / FILE_NAME).stat().st_size for d in devices] == sizes
        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        training.step().engine.wait()
        assert not any("residuals" in c.manifest["features"] for c in contents(devices))
        training.engine.committer.keep_residual(0, torch.ones(2100, dtype=torch.bfloat16))
    with resumed(devices) as training:
        assert (training.engine.states.residuals[0] == 1).all()


def test_a_commit_needs_no_more_room_than_the_step_has_found(tmp_path, monkeypatch):
    """Not even with hundreds of new residuals: a full disk raises an error before the step."""

    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with contextlib.closing(open_engine(parse_devices([tmp_path / "csd"]))) as engine:
        params = []
        for n in (300, 550):  # these nearly fill the room of the table
            starts = engine.extend([1] * n, STATES).starts
            params += [entry(len(params) + i, len(engine.tiles.extents) - 1, s, 1) for i, s in enumerate(starts)]
            engine.committer.describe({"params": params, "waiting": []})
            engine.committer.commit(RECORD)
            engine.wait()
        for i in range(850):
            engine.committer.keep_residual(i, torch.ones(1, dtype=torch.bfloat16))
        step = {"params": np.zeros(850, PARAM), "hypers": ADAM, "tiles": np.zeros(0, np.uint32), "record": RECORD}
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(CSDOSError, match="no room"):
                engine.begin(**step)
        engine.begin(**step)
        engine.finish()
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            engine.committer.commit(RECORD)
            engine.wait()
    assert len(read_contents(tmp_path / "csd").residuals) == 850


def test_what_is_no_residual_is_refused(tmp_path):
    with EngineTraining(named_devices(tmp_path, 1)) as training:
        for bad in (torch.zeros(2100), torch.zeros(30, 70).bfloat16(), torch.zeros(4200).bfloat16()[::2]):
            with pytest.raises(CSDValueError, match=r"not dense \(2100,\) bfloat16"):
                training.engine.committer.keep_residual(0, bad)
        assert training.engine.states.residuals == {}


def test_they_are_counted_where_they_are_written(tmp_path):
    devices = named_devices(tmp_path, 2)
    with EngineTraining(devices) as training:
        training.step().engine.wait()
        rooms = [0, 0]
        for p in contents(devices)[0].manifest["params"]:
            if "residual" in p:
                rooms[p["residual"]["device"]] += p["residual"]["room"]
        tile_bytes = [training.extent.slot_bytes * training.extent.tiles_of(d) for d in range(2)]
        for done in (1, 2):
            training.engine.states.remap()
            for d, count in enumerate(training.engine.committer.stats()):
                assert rooms[d] > 0
                assert count["write_bytes"] == tile_bytes[d] + rooms[d]
                assert count["total_write_bytes"] == done * (tile_bytes[d] + rooms[d])
            if done == 1:
                training.step()
    held = contents(devices)
    assert [c.record.written_bytes for c in held] == [2 * (t + r) for t, r in zip(tile_bytes, rooms, strict=True)]
    with resumed(devices) as training:
        assert [c["total_write_bytes"] for c in training.engine.committer.stats()] == [
            c.record.written_bytes for c in held
        ]


def test_nothing_but_an_empty_one(tmp_path):
    with contextlib.closing(open_engine(parse_devices([tmp_path / "csd"]))) as engine:
        starts = engine.extend([0], STATES).starts
        engine.committer.describe({"params": [entry(0, 0, starts[0], 0)], "waiting": []})
        engine.committer.keep_residual(0, torch.zeros(0, dtype=torch.bfloat16))
    assert not verify(tmp_path / "csd")[0].damage
    with contextlib.closing(open_engine(parse_devices([tmp_path / "csd"]), mode="resume")) as engine:
        engine.committer.check_recovered()
        assert engine.states.residuals[0].shape == (0,)


def test_large_ones_go_in_parts(tmp_path, monkeypatch):
    """The last part has a few elements, or fills its page."""
    for module in (residuals, tiles):
        monkeypatch.setattr(module, "CHUNK", PAGE)
    numels = [5 * PAGE // 2, 5 * PAGE // 2 + 1, 12 * PAGE // 2 - 1]
    kept = [torch.randn(n).bfloat16() for n in numels]
    with contextlib.closing(open_engine(parse_devices([tmp_path / "csd"]), tile_elems=1024)) as engine:
        extent = engine.extend(numels, STATES)
        params = [entry(i, 0, *place) for i, place in enumerate(zip(extent.starts, numels, strict=True))]
        engine.committer.describe({"params": params, "waiting": []})
        for i, residual in enumerate(kept):
            engine.committer.keep_residual(i, residual)
        with engine.writing([0, 1, 2]):  # fills states with zeros
            pass
    assert not verify(tmp_path / "csd")[0].damage
    with contextlib.closing(open_engine(parse_devices([tmp_path / "csd"]), mode="resume")) as engine:
        engine.committer.check_recovered()
        assert [*engine.states.residuals] == [0, 1, 2]
        assert all(torch.equal(engine.states.residuals[i], r) for i, r in enumerate(kept))


# ---- damage ----------------------------------------------------------------------------


@pytest.fixture
def devices(tmp_path):
    """The devices of a training that was closed after four steps."""
    found = named_devices(tmp_path, 2)
    with EngineTraining(found) as training:
        training.steps(4)
    return found


def spoil(file, at):
    data = np.memmap(file, np.uint8, "r+")
    data[at] ^= 1
    data.flush()


@pytest.mark.parametrize("at", [0, 4199])
def test_damage_is_found_and_named(devices, run, at):
    file, offset = found_at(devices, "weight")
    spoil(file, offset + at)
    said = f"{file}: residual is damaged: weight"
    with pytest.raises(CSDStoreError) as caught:
        resumed(devices)
    assert said in str(caught.value)
    with pytest.raises(CSDStoreError, match="residual is damaged: weight"):
        CSDAdam.load([place(d) for d in devices])
    code, out, _ = run("verify", *map(place, devices))
    assert code == 1
    assert said in out.splitlines()
    for make in (checkpoint.snapshot, convert.export_torch, convert.export_safetensors):
        with pytest.raises(CSDStoreError, match="residual is damaged: weight"):
            make([place(d) for d in devices], Path("out"))
        assert not Path("out").exists()
    spoil(file, offset + at)
    assert run("verify", *map(place, devices))[0] == 0


def test_what_no_commit_names_is_not_looked_at(devices):
    file, offset = found_at(devices, "weight")
    [p] = [p for p in read_contents(file).manifest["params"] if p["name"] == "weight"]
    base, room = p["residual"]["base"], p["residual"]["room"]
    spoil(file, 2 * base + room - offset)  # the other space
    spoil(file, offset + 4200)  # the rest of the page
    assert not any(v.damage for v in verify([place(d) for d in devices]))
    with resumed(devices) as training:
        assert_same(training.image(), never_stopped(4))


def test_store_that_is_cut_off(devices):
    file, offset = found_at(devices, "late")  # the last one in the file
    os.truncate(file, offset + 100)
    [said] = [d for v in verify(file.parent) for d in v.damage]
    assert said.startswith(f"{file}: ")
    assert said.endswith("the residual of late ends beyond the end of the file")


# ---- snapshots, state dicts, exports -----------------------------------------------------


def assert_state(held, steps):
    """A state dict is that of this step."""
    image = never_stopped(steps)
    for i, (name, (shape, stride, _)) in enumerate(PARAMS.items()):
        entry = held["state"][i]
        assert ("residual" in entry) == ((name, "residual") in image)
        for key, expected in (("residual", image.get((name, "residual"))), ("master", image[name, 0])):
            if expected is not None:
                value = entry[key]
                assert (value.dtype, value.shape, value.stride()) == (expected.dtype, shape, stride)
                assert torch.equal(value, expected.as_strided(shape, stride))


def reflink(fd, request, source):
    with open(f"/proc/self/fd/{source}", "rb") as there, open(f"/proc/self/fd/{fd}", "wb") as here:
        shutil.copyfileobj(there, here)


@pytest.mark.parametrize("how", ["copy", "reflink"])
def test_snapshot(tmp_path, monkeypatch, how):
    devices = named_devices(tmp_path, 2)
    with EngineTraining(devices) as training:
        training.steps(4)
        if how == "reflink":
            monkeypatch.setattr(fcntl, "ioctl", reflink)
        checkpoint.save(training.engine, tmp_path / "snap", files.no_progress, wait=True).wait()
        training.step()
    held = CSDAdam.load(tmp_path / "snap")
    assert_state(held, 4)
    assert held["csd_optim"]["format"] == 2
    del held  # its tensors keep the store locked
    made = sorted((tmp_path / "snap").iterdir())
    assert all("residuals" in read_contents(d).manifest["features"] for d in made)
    assert not any(v.damage for v in verify(made))
    with resumed(made) as training:
        assert_same(training.image(), never_stopped(4))
        assert_same(training.steps(2).image(), never_stopped(6))


@pytest.mark.parametrize("what", ["step", "flush"])
def test_what_is_copied_is_not_written_over(tmp_path, monkeypatch, what):
    """During a snapshot the second commit waits."""
    go, copying = threading.Event(), threading.Event()
    write = files.Output.write

    def slow(output, data, offset):
        copying.set()
        assert go.wait(60)
        write(output, data, offset)

    monkeypatch.setattr(files.Output, "write", slow)
    with EngineTraining(named_devices(tmp_path, 1)) as training:
        engine, done = training.steps(4).engine, []
        saving = checkpoint.save(engine, tmp_path / "snap", files.no_progress, wait=False)
        assert copying.wait(60)

        def go_on():
            for number in range(3):
                if what == "step":
                    training.step()
                else:
                    engine.states.residuals[0].fill_(number)
                    engine.committer.flush()
                done.append(number)

        other = threading.Thread(target=go_on)
        other.start()
        while not done:
            time.sleep(0.001)
        time.sleep(0.3)  # for a second one that does not wait
        assert done == [0]
        go.set()
        other.join(300)
        saving.wait()
    assert done == [0, 1, 2]
    assert_state(CSDAdam.load(tmp_path / "snap"), 4)


def test_loaded_residuals_are_the_file_and_keep_it_from_being_written(devices):
    [file, _] = [place(d) / FILE_NAME for d in devices]
    before = file.read_bytes()
    held = CSDAdam.load([place(d) for d in devices])
    residual = held["state"][0]["residual"]
    del held
    with pytest.raises(OSError, match="in use"):
        resumed(devices)
    residual.fill_(1)  # writes to a private copy
    assert file.read_bytes() == before
    del residual
    with resumed(devices) as training:
        assert_same(training.image(), never_stopped(4))


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_export_and_import(tmp_path, run, devices, form, m):
    """Residuals, also those whose elements have another order in the file, are imported to other devices."""
    out, new = tmp_path / "out", named_devices(tmp_path / "new", m)
    (tmp_path / "new").mkdir()
    code, _, err = run("export", *map(place, devices), out, "--format", form, "--shard-size", "20kB")
    assert (code, err) == (0, "")
    code, _, err = run("import", out, *map(place, new))
    assert (code, err) == (0, "")
    assert_state(CSDAdam.load([place(d) for d in new]), 4)
    assert all("residuals" in c.manifest["features"] for c in contents(new))
    with resumed(new) as training:
        assert {NAMES[i] for i in training.engine.states.residuals} == {"weight", "columns", "empty", "late"}
        for i, residual in training.engine.states.residuals.items():
            assert torch.equal(residual, never_stopped(4)[NAMES[i], "residual"])


def test_torch_export_is_what_torch_save_writes(tmp_path, run, devices):
    assert run("export", *map(place, devices), tmp_path / "ours.pt")[0] == 0
    torch.save(CSDAdam.load([place(d) for d in devices]), tmp_path / "torchs.pt")
    ours, torchs = (torch.load(tmp_path / name, weights_only=True) for name in ("ours.pt", "torchs.pt"))
    assert_state(ours, 4)
    assert_state(torchs, 4)
    assert ours["csd_optim"] == torchs["csd_optim"]


def test_safetensors_are_read_by_the_library(tmp_path, run, devices):
    safetensors = pytest.importorskip("safetensors.torch")
    assert run("export", *map(place, devices), tmp_path / "out", "--format", "safetensors")[0] == 0
    [shard] = (tmp_path / "out").glob("*.safetensors")
    found = safetensors.load_file(shard)
    for name, (shape, stride, _) in PARAMS.items():
        if (expected := never_stopped(4).get((name, "residual"))) is not None:
            assert torch.equal(found[f"{name}.residual"], expected.as_strided(shape, stride))
        assert torch.equal(found[f"{name}.master"], never_stopped(4)[name, 0].as_strided(shape, stride))


def test_import_refuses_another_residual(tmp_path, run, devices):
    held = CSDAdam.load([place(d) for d in devices])
    held["state"][0]["residual"] = held["state"][0]["residual"][:-1]
    torch.save(held, tmp_path / "bad.pt")
    code, _, err = run("import", tmp_path / "bad.pt", tmp_path / "b")
    assert code == 1
    assert "residual of weight does not fit" in err
    assert not (tmp_path / "b" / FILE_NAME).exists()


def test_inspect(devices, run):
    code, out, _ = run("inspect", place(devices[0]), "--json")
    said = json.loads(out)
    held = read_contents(place(devices[0]))
    sizes = [2 * math.prod(PARAMS[NAMES[row]][0]) for row, _, _ in held.residual_places()]
    assert (code, said["format"], said["residuals"]) == (0, 4, {"count": len(sizes), "bytes": sum(sizes)})
    tile_bytes = sum(4 * e["tile_elems"] * len(e["sections"]) * e["tiles"] for e in held.manifest["extents"])
    assert said["step_bytes"] == tile_bytes + sum(sizes)
    _, out, _ = run("inspect", place(devices[0]))
    assert f"{len(sizes)} here, " in out
