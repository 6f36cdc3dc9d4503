"""The benchmark of replaced parameters, with a tiny scene. It ends with an error if parameters are wrong."""

import json
from pathlib import Path

import pytest
from support.forked import module

ROOT = Path(__file__).parents[2]


def test_quick(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    small = ("--quick", "--runs=5", "--threads=1", "--devices=2", f"--directory={tmp_path}")
    done = module("bench.replacing", *small, "--json", seconds=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.replacing/1"
    assert {"cpu", "cores", "isa", "storage", "load", "date"} <= set(result["machine"])
    assert (result["gaussians"], result["grow"], result["prune"]) == (300, 0.1, 0.05)
    assert [row["what"].removeprefix("CSDAdam, ") for row in result["rows"]] == [
        "fp32 states, 2 file(s)",
        "8-bit states, 2 file(s)",
        "fp32 states, in memory",
    ]
    for row in result["rows"]:
        numbers = [r["gaussians"] for r in row["rounds"]]
        assert numbers == [r["gaussians"] for r in row["peer_rounds"]]
        assert len(numbers) == result["rounds"] == 8
        assert numbers[-1] == pytest.approx(300 * (1.1 * 0.95) ** 8, rel=0.02)
        assert {len(row[key]) for key in ("steps_afterwards", "fresh_steps", "peer_steps")} == {5}
    for row, each in zip(result["rows"], (12, 6), strict=False):  # bytes of a parameter's states, padded to whole tiles
        params = 59 * row["rounds"][-1]["gaussians"]
        assert row["rounds"][-1]["step"]["write_bytes"] == pytest.approx(each * params, rel=0.4)
        new, use = row["fresh_use"], row["use"]
        assert use["live_bytes"] == new["live_bytes"] <= new["allocated_bytes"] < 1.2 * new["live_bytes"]
        assert use["live_bytes"] <= use["allocated_bytes"]
        assert max(r["allocated_bytes"] / r["live_bytes"] for r in row["rounds"]) < 2  # what was replaced is freed
    assert "live_bytes" not in result["rows"][-1]["use"]
    assert "of one with a new store of this size" in done.stderr
    assert list(tmp_path.iterdir()) == []
