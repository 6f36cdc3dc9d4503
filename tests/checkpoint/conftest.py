"""Stores of 2 ranks, of which others are made."""

import shutil

import pytest
from support.divided import TILE, begins, inside, names, on, to

from csd_optim.checkpoint.reshard import reshard


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Stores of 2 ranks, and of a process alone. To be copied, not changed."""
    directory = tmp_path_factory.mktemp("two")
    on(1, begins, "any", "alone", "one", 3, 1, directory=directory)
    with inside(directory):
        reshard(names("one", 1), to("old"), 2, tile_elems=TILE)
    return directory


@pytest.fixture
def old(two, tmp_path, monkeypatch):
    """The names of 2 ranks' stores in the current directory."""
    for name in names("old", 2):
        shutil.copytree(two / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return names("old", 2)
