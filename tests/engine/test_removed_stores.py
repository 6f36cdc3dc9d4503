"""A store whose file is removed while it is open: the next commit says so, and the states in memory can be saved.

A file that still has a name somewhere keeps everything, so it goes on.
"""

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.comparing import assert_same

from csd_optim import CSDAdam, CSDLostError
from csd_optim.store import file as store_file
from csd_optim.store.file import FILE_NAME

MESSAGE = r"was removed while it was in use: nothing can be committed any more.*torch\.save"


class Small:
    def __init__(self, *places, **options):
        self.p = torch.nn.Parameter(torch.ones(5000))
        self.opt = CSDAdam([self.p], devices=[*places], tile_size=1024, **options)

    def step(self):
        self.p.grad = torch.full_like(self.p, 0.5)
        self.opt.step()

    def image(self):
        return {name: t.clone() for name, t in self.opt.state[self.p].items()}


def replaced(place):
    other = place.parent / "other"
    other.write_bytes(bytes(4096))
    other.rename(place / FILE_NAME)


def replaced_by_a_file(place):
    shutil.rmtree(place)
    place.touch()


REMOVED = {
    "its directory": shutil.rmtree,
    "its file": lambda place: (place / FILE_NAME).unlink(),
    "another file has its name": replaced,
    "a file is where its directory was": replaced_by_a_file,
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("how", REMOVED)
def test_training_stops(tmp_path, how, which):
    places = [tmp_path / "a", tmp_path / "b"]
    small = Small(*places)
    small.step()
    small.step()
    small.opt.synchronize()
    REMOVED[how](places[which])
    small.step()  # its commit is in the background of the next forward
    for call in (small.opt.synchronize, small.step, small.step, lambda: small.opt.save(tmp_path / "snapshot")):
        with pytest.raises(CSDLostError, match=f"{places[which]}.*{MESSAGE}"):
            call()
    assert small.opt.committed_step == 2
    saved, after = small.opt.state_dict(), small.image()
    torch.save(saved, tmp_path / "states.pt")
    with pytest.raises(CSDLostError, match=MESSAGE):
        small.opt.close()
    again = Small(tmp_path / "new")
    again.opt.load_state_dict(torch.load(tmp_path / "states.pt"))
    assert_same(again.image(), after)
    again.step()


def test_it_is_told_at_the_end_at_the_latest(tmp_path):
    small = Small(tmp_path / "a")
    small.step()
    small.opt.synchronize()
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(CSDLostError, match=MESSAGE):
        small.opt.close()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("how", ["moved", "linked"])
def test_a_store_with_another_name_goes_on(tmp_path, how):
    small, elsewhere = Small(tmp_path / "a"), tmp_path / "elsewhere"
    small.step()
    if how == "moved":
        (tmp_path / "a").rename(elsewhere)
    else:
        elsewhere.mkdir()
        os.link(tmp_path / "a" / FILE_NAME, elsewhere / FILE_NAME)
        shutil.rmtree(tmp_path / "a")
    small.step()
    small.opt.synchronize()
    image = small.image()
    small.opt.close()
    again = Small(elsewhere, resume=True)
    assert again.opt.committed_step == 2
    assert_same(again.image(), image)


def test_a_file_system_that_counts_no_names(tmp_path):
    small, fstat, counted = Small(tmp_path / "a", tmp_path / "b"), os.fstat, []

    def count(fd):
        counted.append(os.readlink(f"/proc/self/fd/{fd}"))
        found = fstat(fd)
        return os.stat_result((*found[:3], 0, *found[4:]))

    small.step()
    small.opt.synchronize()
    with mock.patch.object(store_file.os, "fstat", count):
        small.step()
        small.opt.synchronize()
    assert small.opt.committed_step == 2
    # A commit asks once for each device, and here once more to compare it with what has its name.
    assert sorted(Path(path).parent.name for path in counted if path.endswith(FILE_NAME)) == ["a", "a", "b", "b"]
