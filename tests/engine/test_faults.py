"""I/O errors and other disk failures: the preloaded library faults/faults.c makes system calls fail on command.

The bodies of all tests run in one child process, which has the library preloaded.
"""

import contextlib
import errno
import functools
import gc
import itertools
import os
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from faults import (
    ALLOCATE,
    DIRECT_IO,
    DIRECT_OPEN,
    EOF,
    FOREVER,
    META_READ,
    META_WRITE,
    SHORT,
    SYNC,
    TILE_READ,
    TILE_WRITE,
    TRUNCATE,
)
from support.comparing import assert_same
from support.faulty import child, fault, in_child  # noqa: F401
from support.optimizers import ADAMW, CODED, FULL

from csd_optim import CSDAdam, CSDOSError, CSDWarning
from csd_optim.store.format import CLEAN, read_contents

OF = {of.name: of for of in (ADAMW, *FULL, *CODED)}  # by name, as bodies run in another process
DEVICES = ["file", "files", "mixed", "scratch", "paced"]  # if there are several devices, csd1 fails
PACE = "read=20MB/s&write=10MB/s&latency=1ms&update=2M/s&link=10MB/s"  # a step of TiledTraining takes some 20 ms


def device_strings(kind, directory, options=""):
    files = [f"file:{directory}/csd{i}{options}" for i in range(3)]
    return {
        "file": [files[1]],
        "files": files,
        "mixed": ["ram:", *files[1:]],
        "scratch": [f"file:{options}"],
        "paced": [f"{device}{'&' if options else '?'}{PACE}" for device in files],
    }[kind]


def failing(kind, directory):
    """Return a part of the path of the file that fails: csd1, if there are several devices."""
    return directory if kind == "scratch" else Path(directory) / "csd1"


class TiledTraining:
    """A few parameters of every precision, in many tiles; gradients depend only on the number of the step."""

    SHAPES = (((20000,), torch.float32), ((60, 70), torch.bfloat16), ((3001,), torch.float16), ((7,), torch.float32))

    def __init__(self, devices, of=ADAMW, **options):
        generator = torch.Generator().manual_seed(1)
        self.params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, dtype in self.SHAPES
        ]
        self.opt = of.ours(self.params, lr=0.1, devices=devices, **{"tile_size": 1024, **of.kwargs, **options})
        self.of = of
        self.done = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.opt.close()

    def step(self):
        generator = torch.Generator().manual_seed(100 + self.done)
        for p in self.params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        self.opt.step()
        self.done += 1

    def steps(self, n):
        for _ in range(n):
            self.step()
        return self

    def image(self):
        """Return the bits of every parameter and every state."""
        state = self.opt.state
        zero = torch.zeros(())
        image = {}
        for i, p in enumerate(self.params):
            # Before the first step `state` may be empty, which stands for zero moments and a master as the parameter.
            zeros = dict.fromkeys(("step", *self.of.rule.sections_for(self.opt.param_groups[0])), zero)
            entry = {**zeros, "master": p.detach().float(), **state.get(p, {}), "param": p.detach()}
            for key, value in entry.items():
                bits = torch.int32 if value.element_size() == 4 else torch.int16
                image[i, key] = value.expand(() if key == "step" else p.shape).clone().view(bits)
        return image


@functools.cache
def never_failed(steps, name="CSDAdam"):
    with TiledTraining(["ram:"], OF[name]) as training:
        return training.steps(steps).image()


def fails_and_recovers(training, *fault_arguments, steps_before, **fault_options):
    """Asserts that a step under the fault raises and changes nothing, and the next succeeds. Returns the error."""
    training.steps(steps_before)
    before = training.image()
    with fault(*fault_arguments, **fault_options), pytest.raises(CSDOSError) as caught:
        training.step()
    assert_same(training.image(), before, "after the step that failed")
    training.steps(2)
    assert_same(training.image(), never_failed(training.done, training.of.name), "two steps later")
    return caught.value


# ---- short and interrupted transfers ---------------------------------------------


@pytest.mark.parametrize("kind", DEVICES)
@in_child
def test_short_transfers_are_finished(kind, tmp_path):
    everything = TILE_READ | TILE_WRITE | META_READ | META_WRITE
    with fault(everything, tmp_path, effect=SHORT):
        with TiledTraining(device_strings(kind, tmp_path)) as training:
            assert_same(training.steps(3).image(), never_failed(3), "short transfers")
        for store in tmp_path.glob("csd*"):
            assert read_contents(store).superblock.step == 3


@in_child
def test_interrupted_transfers_are_repeated(tmp_path):
    with TiledTraining(device_strings("files", tmp_path)) as training:
        with fault(TILE_READ | TILE_WRITE, tmp_path, errno.EINTR, times=20):
            training.steps(2)
        assert_same(training.image(), never_failed(2), "EINTR")


# ---- a step that fails ---------------------------------------------------------------


# The first step reads nothing; it writes masters, then whole tiles.
@pytest.mark.parametrize(
    ("calls", "nth", "steps_before"),
    [*itertools.product([TILE_READ], [0, 2], [1, 4]), *itertools.product([TILE_WRITE], [0, 2, 5], [0, 1, 4])],
)
@pytest.mark.parametrize("kind", DEVICES)
@in_child
def test_io_error_undoes_the_step(kind, calls, nth, steps_before, tmp_path):
    # With three buffers for nine tiles or more, writes must end before the last tiles can be read, so that their errors
    # occur within the step.
    with TiledTraining(device_strings(kind, tmp_path, "?buffers=3")) as training:
        path = failing(kind, tmp_path)
        error = fails_and_recovers(training, calls, path, errno.EIO, skip=nth, steps_before=steps_before)
    assert error.errno == errno.EIO
    for word in ("device", str(path), os.strerror(errno.EIO), "undone"):
        assert word in str(error)


@pytest.mark.parametrize("calls", [TILE_READ, TILE_WRITE])
@pytest.mark.parametrize("name", [*OF])
@in_child
def test_io_error_undoes_the_step_of_any_rule(name, calls, tmp_path):
    with TiledTraining(device_strings("files", tmp_path, "?buffers=1"), OF[name]) as training:  # tiles of codes are few
        fails_and_recovers(training, calls, failing("files", tmp_path), errno.EIO, skip=1, steps_before=2)


@pytest.mark.parametrize("steps_before", [1, 2])
@in_child
def test_file_that_ends_early(steps_before, tmp_path):
    with TiledTraining(device_strings("files", tmp_path)) as training:
        error = fails_and_recovers(training, TILE_READ, tmp_path / "csd1", effect=EOF, steps_before=steps_before)
    assert error.errno == errno.EIO


@in_child
def test_full_disk_while_writing_says_what_to_do(tmp_path):
    with TiledTraining(device_strings("file", tmp_path, "?buffers=3")) as training:
        error = fails_and_recovers(training, TILE_WRITE, tmp_path, errno.ENOSPC, steps_before=1)
    assert error.errno == errno.ENOSPC
    assert "Free some space" in str(error)


# Space is allocated for tiles, tables and manifests; in a nameless file only for tiles.
@pytest.mark.parametrize("times", [1, FOREVER], ids=["once", "always"])
@pytest.mark.parametrize(("kind", "nth"), [("scratch", 0), *itertools.product(["file", "files", "mixed"], range(3))])
@in_child
def test_full_disk_in_the_first_step(kind, nth, times, tmp_path):
    path = failing(kind, tmp_path)
    with TiledTraining(device_strings(kind, tmp_path)) as training:
        error = fails_and_recovers(training, ALLOCATE, path, errno.ENOSPC, skip=nth, times=times, steps_before=0)
        assert error.errno == errno.ENOSPC
        assert str(path) in str(error)
        assert "are free" in str(error)
    for store in tmp_path.glob("csd*"):
        assert read_contents(store).superblock.step == 2


# The write tries out direct I/O; the flush is that of the initial states.
@pytest.mark.parametrize("calls", [META_WRITE, SYNC])
@in_child
def test_io_error_in_the_preparation_of_the_first_step(calls, tmp_path):
    path = tmp_path / "csd1"
    with TiledTraining(device_strings("files", tmp_path)) as training:
        error = fails_and_recovers(training, calls, path, errno.EIO, times=1, steps_before=0)
    assert error.errno == errno.EIO
    assert str(path) in str(error)
    assert read_contents(path).superblock.step == 2


# A commit writes table and superblock on each device, twice, and flushes three times.
@pytest.mark.parametrize("times", [1, FOREVER], ids=["once", "always"])
@pytest.mark.parametrize(("calls", "nth"), [*((META_WRITE, n) for n in range(4)), *((SYNC, n) for n in range(3))])
@pytest.mark.parametrize("kind", ["file", "files", "mixed"])
@in_child
def test_commit_that_fails_is_tried_again(kind, calls, nth, times, tmp_path):
    path = failing(kind, tmp_path)
    with TiledTraining(device_strings(kind, tmp_path)) as training:
        training.steps(2).opt.synchronize()
        with fault(calls, path, errno.EIO, skip=nth, times=times):
            training.step()  # succeeds; its commit fails
            if times == 1:
                training.step()  # waits for the commit and tries it again
            else:
                for call in (training.opt.step, training.opt.synchronize, training.opt.step):
                    with pytest.raises(CSDOSError, match="step 3 cannot be committed yet") as caught:
                        call()
                    assert caught.value.errno == errno.EIO
                    assert str(path) in str(caught.value)
                assert training.opt.committed_step == 2
                assert_same(training.image(), never_failed(3), "the step that is not committed")
        training.opt.synchronize()
        assert training.opt.committed_step == training.done
        training.steps(1)
        assert_same(training.image(), never_failed(training.done), "afterwards")
    for store in tmp_path.glob("csd*"):
        assert read_contents(store).superblock.step == training.done


@pytest.mark.parametrize(("calls", "nth"), [(ALLOCATE, 0), (ALLOCATE, 1), (ALLOCATE, 2), (META_WRITE, 0), (SYNC, 0)])
@in_child
def test_close_after_a_first_step_that_failed(calls, nth, tmp_path):
    code = errno.ENOSPC if calls == ALLOCATE else errno.EIO
    with TiledTraining([str(tmp_path)]) as training, fault(calls, tmp_path, code, skip=nth), pytest.raises(CSDOSError):
        training.step()
    with TiledTraining([str(tmp_path)], overwrite=True) as training:  # the directory is still usable
        assert_same(training.steps(1).image(), never_failed(1), "in the same directory")


@in_child
def test_a_store_whose_first_step_failed_is_none_yet(tmp_path):
    """A resume from such a store might lack states, so a restarted script begins anew."""
    failing = fault(TILE_WRITE, tmp_path, errno.EIO, skip=3)
    with TiledTraining([str(tmp_path)]) as training, failing, pytest.raises(CSDOSError):
        training.step()
    with pytest.warns(CSDWarning, match="no store"), TiledTraining([str(tmp_path)], resume=True) as training:
        assert_same(training.steps(2).image(), never_failed(2), "begun anew")


@in_child
def test_failure_when_parameters_join(tmp_path):
    """The second extent does not fit; the first and its store stay good."""
    p, q = (torch.nn.Parameter(torch.full((5000,), value)) for value in (1.0, 2.0))
    with CSDAdam([p], devices=[str(tmp_path)], tile_size=1024) as opt:
        p.grad = torch.ones(5000)
        opt.step()
        opt.add_param_group({"params": [q], "amsgrad": True})
        q.grad = torch.ones(5000)
        before = p.detach().clone(), opt.state[p]["exp_avg"].clone()
        with fault(ALLOCATE, tmp_path, errno.ENOSPC), pytest.raises(CSDOSError, match="no room"):
            opt.step()
        assert torch.equal(p, before[0])
        assert torch.equal(opt.state[p]["exp_avg"], before[1])
        opt.step()
        assert opt.state[p]["step"] == 2
        assert opt.state[q]["step"] == 1
    assert [len(e["sections"]) for e in read_contents(tmp_path).manifest["extents"]] == [3, 4]


@pytest.mark.parametrize(("calls", "nth"), [(ALLOCATE, 0), (TILE_READ, 0), (TILE_WRITE, 0), (TILE_WRITE, 3)])
@in_child
def test_restart_after_the_step_failed_in_which_parameters_join(calls, nth, tmp_path):
    """A restarted script, which adds them in that step again, finds the store of the step before, without them."""

    def script(until, *, resume):
        p, q = (torch.nn.Parameter(torch.full((5000,), value)) for value in (1.0, 2.0))
        opt = CSDAdam([p], devices=[str(tmp_path)], tile_size=1024, resume=resume)
        try:
            while opt.committed_step < until:
                if opt.committed_step == 1:
                    opt.add_param_group({"params": [q], "amsgrad": True})
                p.grad, q.grad = torch.ones(5000), torch.full((5000,), 0.5)
                opt.step()
                opt.synchronize()
        finally:
            opt.close()
        return {"p": p.detach(), "q": q.detach()}

    script(1, resume=False)
    code = errno.ENOSPC if calls == ALLOCATE else errno.EIO
    with fault(calls, tmp_path, code, skip=nth, times=2), pytest.raises(CSDOSError):
        script(3, resume=True)
    found = script(3, resume=True)
    for store in tmp_path.iterdir():
        store.unlink()
    assert_same(found, script(3, resume=False), "trained on")


@in_child
def test_edits_that_are_lost_with_the_step_in_which_parameters_join_are_told(tmp_path):
    p, q = (torch.nn.Parameter(torch.ones(2048)) for _ in range(2))
    p.grad, q.grad = torch.ones(2048), torch.ones(2048)
    # Tiles have two pages per section, so that the first write of a new tile, its masters, counts as a tile's write and
    # fails the step.
    opt = CSDAdam([p], devices=[str(tmp_path)], tile_size=2048)
    opt.step()
    opt.state[p]["exp_avg"].fill_(5.0)
    opt.add_param_group({"params": [q]})
    with fault(TILE_WRITE, tmp_path, errno.EIO), pytest.raises(CSDOSError):
        opt.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.close()
    said = [str(w.message) for w in caught if issubclass(w.category, CSDWarning)]
    assert [text for text in said if "after step 1 is lost: the step failed in which parameters joined" in text], said


@pytest.mark.parametrize(("calls", "nth"), [(TILE_READ, 0), (TILE_READ, 2)])
@in_child
def test_restart_after_the_step_failed_before_which_a_parameter_was_set(calls, nth, tmp_path):
    """The commit of the step before lacks the set parameter, which a restarted script sets again."""

    def script(until, *, resume, failure=None):
        p, q = (torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in (1024, 4096))
        with CSDAdam([p, q], devices=[f"file:{tmp_path}?cache=off"], tile_size=1024, resume=resume) as opt:
            while opt.committed_step < until:
                if opt.committed_step == 2:
                    with torch.no_grad():
                        p.mul_(0.5)  # the step takes its tile from memory and reads the others
                p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
                with failure if failure and opt.committed_step == 2 else contextlib.nullcontext():
                    opt.step()
                opt.synchronize()
            return {"p": p.detach(), "master": opt.state[p]["master"].clone()}

    script(2, resume=False)
    with pytest.raises(CSDOSError):
        script(3, resume=True, failure=fault(calls, tmp_path, errno.EIO, skip=nth, times=1))
    found = script(3, resume=True)
    for store in tmp_path.iterdir():
        store.unlink()
    assert_same(found, script(3, resume=False), "trained on")


@in_child
def test_one_failure_does_not_disturb_another_optimizer(tmp_path):
    with TiledTraining([str(tmp_path / "csd1")]) as one, TiledTraining([str(tmp_path / "csd2")]) as other:
        with fault(TILE_WRITE, tmp_path / "csd1", errno.EIO):
            with pytest.raises(CSDOSError, match="csd1"):
                one.step()
            other.steps(2)
        assert_same(one.steps(2).image(), other.image(), "the one that failed")


@in_child
def test_many_failures_in_a_row(tmp_path):
    with TiledTraining(device_strings("files", tmp_path)) as training:
        for skip in range(0, 60, 10):
            # The faults strike at different times: before the step, in it, or after it.
            with fault(TILE_READ | TILE_WRITE, tmp_path, errno.EIO, skip=skip, times=1, must_strike=False):
                with contextlib.suppress(CSDOSError):
                    training.step()
                with contextlib.suppress(CSDOSError):
                    training.image()
        assert_same(training.image(), never_failed(training.done), f"{training.done} whole steps")


# ---- failures after step() has returned ----------------------------------------------
# Writes are held until the step has completed: with tiles this large there is a buffer for each tile.

LARGE = 8192


@pytest.mark.parametrize("kind", ["file", "files", "mixed", "paced"])
@pytest.mark.parametrize("call", ["step", "state", "state_dict", "stats"])
@in_child
def test_late_write_error_is_raised_and_nothing_is_lost(kind, call, tmp_path):
    with TiledTraining(device_strings(kind, tmp_path), tile_size=LARGE) as training:
        training.steps(2).image()  # completes all writes
        call = {
            "step": training.step,
            "state": lambda: training.opt.state,
            "state_dict": training.opt.state_dict,
            "stats": training.opt.stats,
        }[call]
        with fault(TILE_WRITE, tmp_path / "csd1", errno.EIO, hold=True) as release:
            training.step()  # returns without an error
            release()
            for _ in range(2):
                with pytest.raises(CSDOSError) as caught:
                    call()
                assert caught.value.errno == errno.EIO
                assert str(tmp_path / "csd1") in str(caught.value)
                assert "undone" not in str(caught.value)
        call()
        assert training.done == (4 if call == training.step else 3)
        assert_same(training.image(), never_failed(training.done), "once the writes went through")


@in_child
def test_late_write_error_for_a_moment_is_not_even_noticed(tmp_path):
    with TiledTraining([str(tmp_path)], tile_size=LARGE) as training:
        training.steps(1).image()  # as the first step waits for some of its writes
        with fault(TILE_WRITE, tmp_path, errno.ENOSPC, times=1, hold=True) as release:
            training.step()
            release()
            training.step()  # repeats the failed write
        assert_same(training.image(), never_failed(3), "after a full disk for a moment")


@pytest.mark.parametrize("kind", ["file", "files", "paced"])
@in_child
def test_close_raises_what_was_not_written(kind, tmp_path):
    training = TiledTraining(device_strings(kind, tmp_path), tile_size=LARGE).steps(1)
    training.image()
    with fault(TILE_WRITE, tmp_path / "csd1", errno.EIO, hold=True) as release:
        training.step()
        release()
        with pytest.raises(CSDOSError, match="csd1") as caught:
            training.opt.close()
    assert caught.value.errno == errno.EIO
    for store in tmp_path.glob("csd*"):
        assert not read_contents(store).superblock.flags & CLEAN
    training.opt.close()  # a no-op
    TiledTraining(device_strings(kind, tmp_path), overwrite=True).opt.close()  # the locks are released


@pytest.mark.parametrize("calls", [META_WRITE, SYNC])
@in_child
def test_close_raises_when_the_superblock_cannot_be_written(calls, tmp_path):
    training = TiledTraining([str(tmp_path)]).steps(1)
    with fault(calls, tmp_path, errno.EIO), pytest.raises(CSDOSError, match=str(tmp_path)):
        training.opt.close()
    TiledTraining([str(tmp_path)], overwrite=True).opt.close()


@in_child
def test_dropped_optimizer_says_nothing(tmp_path):
    training = TiledTraining([str(tmp_path)], tile_size=LARGE).steps(1)
    training.image()
    with fault(TILE_WRITE, tmp_path, errno.EIO, hold=True) as release, warnings.catch_warnings():
        warnings.simplefilter("error")
        training.step()
        release()
        del training
        gc.collect()
    TiledTraining([str(tmp_path)], overwrite=True).opt.close()


# ---- file systems without direct I/O ---------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "code"),
    [(DIRECT_OPEN, errno.EINVAL), (DIRECT_IO, errno.EINVAL), (DIRECT_IO, errno.EOPNOTSUPP)],
    ids=["open", "transfer", "unsupported"],
)
@in_child
def test_no_direct_io(calls, code, tmp_path):
    with fault(calls, tmp_path, code):
        training = TiledTraining([str(tmp_path / "csd1")])
        with pytest.warns(CSDWarning, match="no direct I/O") as seen:
            training.steps(3)
        assert len([w for w in seen if w.category is CSDWarning]) == 1
        assert training.opt.stats()["devices"][0]["direct_io"] is False
        assert_same(training.image(), never_failed(3), "without direct I/O")
        training.opt.close()
    assert read_contents(tmp_path / "csd1").superblock.step == 3


@in_child
def test_no_direct_io_and_an_error(tmp_path):
    with (
        fault(DIRECT_OPEN, tmp_path, errno.EINVAL),
        TiledTraining(device_strings("file", tmp_path, "?buffers=3")) as training,
    ):
        with pytest.warns(CSDWarning):
            training.step()
        fails_and_recovers(training, TILE_WRITE, tmp_path, errno.EIO, skip=1, steps_before=1)


@in_child
def test_error_while_trying_direct_io_out(tmp_path):
    with TiledTraining([str(tmp_path / "csd1")]) as training:
        error = fails_and_recovers(training, DIRECT_IO, tmp_path, errno.EIO, times=1, steps_before=0)
        assert error.errno == errno.EIO
        assert str(tmp_path) in str(error)
        assert training.opt.stats()["devices"][0]["direct_io"] is True


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm here")
@in_child
def test_tmpfs(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        with TiledTraining(device_strings("file", directory, "?buffers=3")) as training:
            training.step()
            fails_and_recovers(training, TILE_WRITE, directory, errno.EIO, skip=1, steps_before=1)
        assert read_contents(Path(directory) / "csd1").superblock.flags & CLEAN


@in_child
def test_full_disk_is_no_matter_of_who_writes_to_windows(tmp_path):
    """A snapshot may share the blocks, so new ones are allocated before anybody can write through a mapping."""
    reached = False
    with TiledTraining(device_strings("file", tmp_path)) as training:
        training.steps(2).opt.synchronize()
        with fault(TILE_WRITE, tmp_path, errno.ENOSPC):
            with pytest.raises(CSDOSError), training.opt.loading():
                reached = True
            assert not reached


# ---- errors of the system are ours ----------------------------------------------------


@in_child
def test_a_full_disk_that_cannot_even_be_truncated(tmp_path):
    with TiledTraining(device_strings("files", tmp_path)) as training:
        with fault(ALLOCATE, tmp_path / "csd1", errno.ENOSPC), fault(TRUNCATE, tmp_path / "csd", errno.EIO):
            for _ in range(2):
                with pytest.raises(CSDOSError, match="no room for"):
                    training.step()
        assert_same(training.steps(2).image(), never_failed(2), "when there is room")


@pytest.mark.parametrize("calls", [DIRECT_IO, DIRECT_OPEN], ids=["io", "open"])
@in_child
def test_direct_io_that_fails_is_no_missing_feature(calls, tmp_path):
    devices = device_strings("files", tmp_path)
    with TiledTraining(devices) as training:
        with fault(calls, tmp_path / "csd1", errno.EIO), pytest.raises(CSDOSError, match="Input/output error"):
            training.step()
        training.steps(2)
    with fault(calls, tmp_path / "csd1", errno.ESTALE), pytest.raises(CSDOSError, match="Stale file handle"):
        TiledTraining(devices, resume=True)
    with TiledTraining(devices, resume=True) as training:
        assert_same(training.image(), never_failed(2), "resumed")


@in_child
def test_a_snapshot_of_a_store_that_cannot_be_read(tmp_path):
    with TiledTraining(device_strings("files", tmp_path)) as training:
        training.steps(1)
        training.opt.synchronize()
        with fault(META_READ, tmp_path / "csd1", errno.EIO), pytest.raises(CSDOSError, match="cannot read"):
            training.opt.save(tmp_path / "saved")
        training.opt.save(tmp_path / "saved")
