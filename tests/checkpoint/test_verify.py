"""Damage is detected and reported with device, section, tile and elements."""

import json
import os
import shutil

import pytest
from support.stores import (
    flip,
    in_snapshot,
    make,
    places,
    resumed,
    train_params,
    where,
)

from csd_optim import (
    CSDStoreError,
)
from csd_optim.store.format import (
    FILE_NAME,
    PAGE,
    read_contents,
)

GIB = 1 << 30


@pytest.fixture
def store(tmp_path):
    _, opt = make(tmp_path / "a", 1)
    opt.close()
    return tmp_path / "a" / "csd0"


def test_verify_says_what_is_whole(tmp_path, run, store):
    _, opt = make(tmp_path / "b", 2)
    opt.save(tmp_path / "snap")
    opt.close()
    code, out, err = run("verify", store, tmp_path / "snap", *places(tmp_path / "b", 2))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    tiles = len(read_contents(store).tiles)
    assert lines[0] == f"{store / FILE_NAME}: ok, step 3, {tiles} tiles"
    assert len(lines) == 5
    assert all("ok, step 3" in line for line in lines)
    assert "device 1 of 2" in lines[2]
    code, out, _ = run("verify", tmp_path / "b" / "csd1" / FILE_NAME, "--json")
    content = json.loads(out)
    assert content["schema"] == "csd_optim.verify/1"
    assert content["ok"] is True
    assert content["stores"][0]["device"] == 1
    assert content["stores"][0]["unchecked"] == 0


@pytest.mark.parametrize("section", ["master", "exp_avg", "exp_avg_sq"])
@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_verify_names_section_tile_and_parameters(run, store, section):
    flip(store, section, tile=4)
    named = f"{section} of tile 4 is damaged: elements 8192 to 8999 of weight, elements 0 to 207 of columns"
    code, out, _ = run("verify", store)
    assert code == 1
    assert out == f"{store / FILE_NAME}: {named}\n"
    code, out, _ = run("verify", store, "--json")
    assert code == 1
    assert json.loads(out)["stores"][0]["damage"] == [f"{store / FILE_NAME}: {named}"]
    with pytest.raises(CSDStoreError) as caught:
        resumed([store])
    assert named in str(caught.value)


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("what", ["superblock", "manifest", "slot table"])
def test_verify_sees_the_loss_of_one_copy_and_resume_repairs_it(run, store, what, copy):
    contents = read_contents(store)
    region = {"manifest": contents.superblock.manifest, "slot table": contents.superblock.table}.get(what)
    flip(store, None, at=copy * PAGE + 50 if region is None else region.offset(copy) + 7)
    code, out, _ = run("verify", store)
    assert code == 1
    assert f"copy {copy} of the {what} is damaged; the other copy is whole, and resume=True repairs this one" in out
    _, opt = resumed([store])
    opt.close()
    assert run("verify", store)[0] == 0


@pytest.mark.parametrize("what", ["superblock", "manifest", "slot table"])
def test_verify_when_both_copies_are_lost(run, store, what):
    contents = read_contents(store)
    region = {"manifest": contents.superblock.manifest, "slot table": contents.superblock.table}.get(what)
    for copy in range(2):
        flip(store, None, at=copy * PAGE + 50 if region is None else region.offset(copy) + 7)
    code, out, _ = run("verify", store)
    assert code == 1
    for copy in range(2):
        assert f"copy {copy} of the {what} is damaged\n" in out
    with pytest.raises(CSDStoreError, match="damaged"):
        resumed([store])


@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_verify_of_a_store_that_is_cut_off(run, store):
    file = store / FILE_NAME
    os.truncate(file, where(store, "exp_avg", tile=5) + 100)
    code, out, _ = run("verify", store)
    assert code == 1
    assert out


def test_verify_of_files_that_are_no_stores(tmp_path, run):
    code, _, err = run("verify", tmp_path)
    assert code == 1
    assert "there is no store" in err
    (tmp_path / FILE_NAME).write_bytes(b"mine" * 5000)
    code, out, _ = run("verify", tmp_path)
    assert code == 1
    assert "copy 0 of the superblock is damaged" in out
    (tmp_path / FILE_NAME).write_bytes(b"")
    code, out, _ = run("verify", tmp_path)
    assert code == 1
    assert (tmp_path / FILE_NAME).exists()


def test_verify_refuses_a_store_in_use(tmp_path, run):
    _, opt = make(tmp_path / "a", 1)
    code, _, err = run("verify", tmp_path / "a" / "csd0")
    assert code == 1
    assert "in use" in err
    assert "save()" in err
    opt.close()


def test_verify_sees_devices_that_do_not_belong_together(tmp_path, run, store):
    _, opt = make(tmp_path / "b", 3)
    opt.close()
    devices = places(tmp_path / "b", 3)
    assert run("verify", devices[1])[0] == 0  # a single device may be verified
    assert run("verify", *devices, store)[0] == 0
    code, out, _ = run("verify", *devices[:2])
    assert code == 1
    assert "name all 3" in out


def test_verify_sees_devices_without_a_common_step(tmp_path, run):
    _, opt = make(tmp_path / "a", 2)
    devices = places(tmp_path / "a", 2)
    opt.save(tmp_path / "snap")
    opt.close()
    made = in_snapshot(tmp_path / "snap")
    others, again = resumed(made)
    shutil.copy(made[0] / FILE_NAME, tmp_path / "old")
    train_params(again, others, 3, 6)
    again.close()
    shutil.copy(tmp_path / "old", made[0] / FILE_NAME)
    code, out, _ = run("verify", tmp_path / "snap")
    assert code == 1
    assert "no step in common" in out
    assert run("verify", *devices)[0] == 0
