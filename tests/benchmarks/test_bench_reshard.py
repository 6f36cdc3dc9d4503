"""The benchmark of reshard at tiny size. It compares the states itself, and ends with an error if they differ."""

import json
from pathlib import Path

from support.forked import module

ROOT = Path(__file__).parents[2]


def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = module("bench.reshard", "--quick", f"--directory={tmp_path}", "--json", seconds=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.reshard/1"
    assert {"cpu", "cores", "load_average", "storage", "date"} <= set(result["machine"])
    assert [row["what"] for row in result["rows"]] == ["cp", "1 to 3", "3 to 2"]
    for row in result["rows"]:
        assert len(row["seconds"]) == len(row["ratio_to_cp"]) == 5
        assert row["bytes"] == 12 * row["params"] == 12 * 101_000
    assert not [*tmp_path.iterdir()]
