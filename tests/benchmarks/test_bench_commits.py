"""The benchmark of commits, with a few steps. It ends with an error if parameters are wrong."""

import json
from pathlib import Path

import pytest
from support.forked import module

ROOT = Path(__file__).parents[2]


def test_quick(monkeypatch):
    monkeypatch.chdir(ROOT)
    done = module("bench.commits", "--quick", "--flush=0.01", "--json", seconds=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.commits/1"
    assert {"cpu", "cores", "load", "flush", "date"} <= set(result["machine"])
    in_a_row, of_ranks, undone, kept = result["rows"]
    for row in (in_a_row, of_ranks):  # tiles, copy 0, copy 1; those of the first and the last step count partly
        assert row["flushes"] == pytest.approx(3, abs=0.7)
    assert undone["flushes"] < 3  # it waits for no commit that replaces the withdrawn one
    assert len(undone["seconds"]) == len(kept["seconds"]) == 5
