"""A drive, or a rank's directory, is missing at a resume: what was reported as durable is found, or refused by name."""

import contextlib
import functools
import itertools
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from support.replacing import replaced
from support.rounds import Rounds

from csd_optim import CSDAdam, CSDStoreError
from csd_optim.store.file import StoreFile
from csd_optim.store.format import FILE_NAME, read_contents
from csd_optim.store.recovery import RanksStore, common_commits, last_round

pytestmark = pytest.mark.at_hand("writes the stores of several ranks in this process")


@pytest.fixture(autouse=True)
def _nothing_is_flushed(monkeypatch):
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class Images:
    """Copies of all stores before and after each write of a copy of a commit, as a crash there would leave them."""

    def __init__(self, run):
        self.run, self.taken = run, []  # each with the last step that was reported then
        self.reported = lambda: 0
        self._lock = threading.Lock()  # the devices of a rank write at the same time

    def take(self):
        with self._lock:
            image = self.run.with_name(f"image-{len(self.taken)}")
            shutil.copytree(self.run, image)
            self.taken.append((image, self.reported()))

    def publish(self, publish, store, staged, copy):
        self.take()
        publish(store, staged, copy)
        self.take()

    def taking(self):
        return replaced(StoreFile, "publish", self.publish)


def found(image, ranks, devices):
    """Return the step that a resume finds; 0: nothing, so that a new training begins. Raises CSDStoreError."""
    with contextlib.ExitStack() as stack:
        summaries = []
        for rank in range(ranks):
            stores = []
            for device in range(devices):
                place = image / f"rank-{rank}" / f"device-{device}"
                place.mkdir(parents=True, exist_ok=True)
                stores.append(StoreFile(place, durable=True, mode="resume"))
                stack.callback(stores[-1].close)
            commits = common_commits(stores)
            if ranks == 1:
                return commits[0][0].superblock.step if commits else 0
            summaries.append(RanksStore.of(stores, commits))
        round = last_round(summaries)
        return 0 if round is None else summaries[0].steps[round]


def losses(ranks, devices):
    """All that may be missing, but not everything: directories below an image."""
    every = [f"rank-{rank}/device-{device}" for rank in range(ranks) for device in range(devices)]
    return [some for n in {1, len(every) - 1} for some in itertools.combinations(every, n)]


def left_out(image, gone):
    """For copytree(): leave out these directories below an image."""
    return lambda directory, names: [n for n in names if str((Path(directory) / n).relative_to(image)) in gone]


def check(images, ranks, devices):
    refused = 0
    for image, reported in images.taken:
        assert found(image, ranks, devices) >= reported
        for gone in losses(ranks, devices):
            crashed = image.with_name("crashed")
            shutil.copytree(image, crashed, ignore=left_out(image, gone))
            step, refusal = None, ""
            try:
                step = found(crashed, ranks, devices)
            except CSDStoreError as e:
                refusal = str(e)
            if refusal:
                refused += 1
                assert any(str(crashed / place) in refusal for place in gone), refusal
                assert "mount it" in refusal
            else:
                assert step == 0
                assert not reported, f"step {reported} was reported, and without {gone} it is forgotten"
            shutil.rmtree(crashed)
    assert refused


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("first", ["step", "load"])
def test_a_drive_is_missing_after_any_write_of_the_first_two_commits(first, devices, tmp_path):
    images = Images(tmp_path / "run")
    (tmp_path / "run/rank-0").mkdir(parents=True)
    p = torch.nn.Parameter(torch.ones(2000))
    places = [tmp_path / f"run/rank-0/device-{d}" for d in range(devices)]
    with images.taking(), CSDAdam([p], devices=places, tile_size=1024) as opt:
        images.reported = lambda: opt.committed_step
        if first == "load":
            adam = torch.optim.AdamW([p])
            p.grad = torch.ones_like(p)
            adam.step()
            opt.load_state_dict(adam.state_dict())
            images.take()
        for _ in range(2):
            p.grad = torch.ones_like(p)
            opt.step()
            opt.synchronize()
            images.take()
    check(images, 1, devices)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_rank_is_missing_after_any_write_of_the_first_two_commits(devices, tmp_path):
    images = Images(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with contextlib.ExitStack() as stack:
        stack.enter_context(images.taking())
        ranks = [
            stack.enter_context(Rounds(tmp_path / f"run/rank-{rank}", rank=rank, devices=devices)) for rank in range(2)
        ]
        ranks[1].committer.store_id = ranks[0].committer.store_id
        images.reported = lambda: max(rank.engine.states.committed_step for rank in ranks)
        for _ in range(2):
            for rank in ranks:
                rank.step(confirm=False)
            for rank in ranks:
                rank.committer.note_confirmed()
                images.take()
                rank.committer.background.wait()
    check(images, 2, devices)


def test_a_file_without_a_commit_is_not_a_missing_one(tmp_path):
    """A process that was killed before its first commit leaves such files: a new training begins."""

    p = torch.nn.Parameter(torch.ones(5000))
    places = [tmp_path / f"device-{d}" for d in range(2)]
    killed_in_its_first_commit(places, {0})
    assert (places[1] / FILE_NAME).exists()
    assert read_contents(places[0]).superblock.step == 1
    with pytest.warns(match="no store"):
        opt = CSDAdam([p], devices=places, tile_size=1024, resume=True)
    with opt:
        assert opt.committed_step == 0
        p.grad = torch.ones_like(p)
        opt.step()
    assert [read_contents(place).superblock.step for place in places] == [1, 1]


def killed_in_its_first_commit(places, has_copy_0):
    """Make stores of which some have copy 0 of a first commit, as one that was killed leaves them."""

    def publish(publish, store, staged, copy):
        if staged.superblock.device not in has_copy_0:
            raise OSError(5, "unplugged")
        publish(store, staged, copy)

    p = torch.nn.Parameter(torch.ones(5000))
    with replaced(StoreFile, "publish", publish), contextlib.suppress(OSError):
        opt = CSDAdam([p], devices=places, tile_size=1024)
        p.grad = torch.ones_like(p)
        opt.step()
        opt.close()


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("has_copy_0", [{0}, {1}, {0, 2}, {1, 2}])
def test_a_new_training_is_killed_as_it_replaces_the_files_of_one_that_was(has_copy_0, n, tmp_path):
    places = [tmp_path / f"device-{d}" for d in range(3)]
    killed_in_its_first_commit(places, has_copy_0)
    replace, left = StoreFile._replace, n

    def some(store):
        nonlocal left
        replace(store)
        left -= 1
        if left == 0:
            shutil.copytree(tmp_path, tmp_path.with_name("killed"))

    p = torch.nn.Parameter(torch.ones(5000))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StoreFile, "_replace", some)
        with pytest.warns(match="no store"):
            opt = CSDAdam([p], devices=places, tile_size=1024, resume=True)
        p.grad = torch.ones_like(p)
        opt.step()
        opt.close()
    killed = tmp_path.with_name("killed")
    with pytest.warns(match="no store"):
        opt = CSDAdam([p], devices=[killed / place.name for place in places], tile_size=1024, resume=True)
    opt.step()
    opt.close()
    shutil.rmtree(killed)


@pytest.mark.parametrize("gone", ["nothing", "file", "directory"])
def test_a_refused_resume_changes_nothing(gone, tmp_path):
    p = torch.nn.Parameter(torch.ones(5000))
    places = [tmp_path / f"device-{d}" for d in range(2)]
    make = functools.partial(CSDAdam, [p], devices=places, tile_size=1024)
    with make() as opt:
        p.grad = torch.ones_like(p)
        opt.step()
    if gone == "directory":
        places[1].rename(tmp_path / "unplugged")
    elif gone == "file":
        (places[1] / FILE_NAME).rename(tmp_path / "unplugged")
    if gone == "nothing":
        make(resume=True).close()
        return
    for _ in range(2):  # the first attempt leaves no file that the second one would take for a store without a commit
        with pytest.raises(CSDStoreError, match=r"device-1/.* holds no store"):
            make(resume=True)
    with make(overwrite=True) as opt:
        opt.step()
