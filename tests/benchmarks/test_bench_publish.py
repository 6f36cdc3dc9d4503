"""The benchmark of publish() at tiny size. It compares replicas itself, and ends with an error if they differ."""

import json
from pathlib import Path

import pytest
from support.forked import module

ROOT = Path(__file__).parents[2]


def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    places = f"--directory={tmp_path}", f"--plot={tmp_path}/plot.png"
    done = module("bench.publish", "--quick", *places, "--json", seconds=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.publish/1"
    costs = [row for row in result["rows"] if row["what"] == "cost"]
    assert [(row["where"], row["state_dtype"]) for row in costs] == [
        (where, states) for where in ("ram", "drive", "paced") for states in ("fp32", "8bit")
    ]
    assert all(len(row["ratio"]) == 3 and 0 < row["bytes_per_param"][-1] <= 2.2 for row in costs)
    sizes = [row for row in result["rows"] if row["what"] == "bytes"]
    assert [row["lr"] for row in sizes] == [1e-6, 3e-6, 1e-5]
    for row in sizes:
        assert [*row["steps"]] == ["1", "8"]
        assert 0 < row["steps"]["1"]["bytes_per_param"] < row["steps"]["8"]["bytes_per_param"] <= 2
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]


def test_zstd_quick(tmp_path, monkeypatch):
    pytest.importorskip("zstandard", reason="zstandard, which is optional, is not installed")
    monkeypatch.chdir(ROOT)
    done = module("bench.studies.zstd", "--quick", "--json", seconds=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.zstd/1"
    assert [row["folder"] for row in result["rows"]] == ["lr-1e-06", "lr-3e-06", "lr-1e-05"]
    for row in result["rows"]:
        forms = {(form["form"], form["level"]): form for form in row["forms"]}
        raw = forms["file", 0]
        assert raw["faster"] == 1
        assert [*forms] == [("file", 0), *((f, n) for f in ("file", "byte planes", "XOR planes") for n in (1, 3))]
        assert forms["XOR planes", 1]["bytes"] < forms["file", 1]["bytes"] < raw["bytes"]
