"""Stores of every former format can be opened, read and trained on. samples/ has some, written by those versions."""

import json
import sys
import tarfile
from pathlib import Path

import pytest

from csd_optim import CSDAdam, CSDStoreError
from csd_optim.checkpoint.verify import verify
from csd_optim.store.format import read_contents

SAMPLES = Path(__file__).parent / "samples"
sys.path.insert(0, str(SAMPLES))
import make  # noqa: E402

VERSIONS = {name: int(name.split("-")[1]) for name in make.FEATURES}


def unpacked(name, directory):
    """Unpack a sample, and return the directories of its devices."""
    with tarfile.open(SAMPLES / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return [directory / f"csd{d}" for d in range(2)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.here("residuals are the trainer's")] * (topk is not None))
        for name, (_, topk, _) in make.FEATURES.items()
    ],
)
def test_sample_opens_and_is_trained_on(name, tmp_path):
    places = unpacked(name, tmp_path)
    expected = json.loads((SAMPLES / f"{name}.json").read_text())
    assert [read_contents(place).superblock.version for place in places] == [VERSIONS[name]] * 2
    assert [(v.step, v.damage) for v in verify(places)] == [(make.STEPS, [])] * 2
    params = make.model()
    with make.optimizer(params, tmp_path, name, resume=True) as opt:
        assert opt.user_state == {"made": make.STEPS}
        assert make.image(params, opt) == expected
        make.make_steps(params, opt, 2)
        found = make.image(params, opt)
    assert [read_contents(place).superblock.version for place in places] == [VERSIONS[name]] * 2

    (tmp_path / "again").mkdir()
    others = make.model()
    with make.optimizer(others, tmp_path / "again", name) as opt:
        make.make_steps(others, opt, make.STEPS + 2)
        assert make.image(others, opt) == found


# ---- one slot per tile: shadow=False, which earlier versions had -----------------------------


@pytest.mark.here("residuals are the trainer's")
@pytest.mark.parametrize("source", ["store", "export"])
def test_a_store_of_one_slot_is_read_and_imported(source, tmp_path, run):
    places = unpacked("one-slot", tmp_path)
    expected = json.loads((SAMPLES / "one-slot.json").read_text())
    assert [(v.step, v.damage) for v in verify(places)] == [(make.STEPS, [])] * 2
    code, out, _ = run("inspect", places[0])
    assert (code, "closed cleanly" in out) == (0, True)
    stores = ",".join(map(str, places))
    refusal = f"can only be read: a step cannot be undone there.*csd-optim import {stores} DIRECTORY"
    with pytest.raises(CSDStoreError, match=refusal):
        make.optimizer(make.model(), tmp_path, "format-4", resume=True)
    if source == "export":
        stores = tmp_path / "out.pt"
        assert run("export", *places, stores)[0] == 0
    (tmp_path / "new").mkdir()
    code, _, err = run("import", stores, *(tmp_path / f"new/csd{d}" for d in range(2)), "--tile-size", "1024")
    assert (code, err) == (0, "")
    params = make.model()
    with make.optimizer(params, tmp_path / "new", "format-4", resume=True) as opt:
        assert opt.user_state == {"made": make.STEPS}
        assert make.image(params, opt) == expected
        make.make_steps(params, opt, 2)


def test_a_store_of_one_slot_that_was_cut_short_says_so(tmp_path, run):
    places = unpacked("one-slot-torn", tmp_path)
    assert all("cut short" in damage for v in verify(places) for damage in v.damage)
    code, out, _ = run("inspect", places[0])
    assert (code, "cut short in the middle of a step" in out) == (0, True)
    for call in (lambda: make.optimizer(make.model(), tmp_path, "format-4", resume=True), lambda: CSDAdam.load(places)):
        with pytest.raises(CSDStoreError, match=r"cut short.*mix of two steps; go back to a snapshot"):
            call()


def test_every_sample_is_tested():
    names = {*VERSIONS, "one-slot", "one-slot-torn"}
    assert {f.name for f in SAMPLES.iterdir() if f.suffix == ".xz"} == {f"{name}.tar.xz" for name in names}
