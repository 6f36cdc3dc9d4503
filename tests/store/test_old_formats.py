"""Stores of every former format can be opened, read and trained on. samples/ has some, written by those versions."""

import json
import sys
import tarfile
from pathlib import Path

import pytest

from csd_optim.checkpoint.verify import verify
from csd_optim.store.format import read_contents

SAMPLES = Path(__file__).parent / "samples"
sys.path.insert(0, str(SAMPLES))
import make  # noqa: E402

VERSIONS = {"format-1": 1, "format-2": 2, "format-3": 3, "format-3-residuals": 3, "format-4": 4, "format-4-codes": 4}


@pytest.mark.parametrize("name", make.FEATURES)
def test_sample_opens_and_is_trained_on(name, tmp_path):
    with tarfile.open(SAMPLES / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    expected = json.loads((SAMPLES / f"{name}.json").read_text())
    places = [tmp_path / f"csd{d}" for d in range(2)]
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


def test_every_sample_is_tested():
    assert {f.name for f in SAMPLES.iterdir() if f.suffix == ".xz"} == {f"{name}.tar.xz" for name in VERSIONS}
