"""The benchmark of collectives, with a few steps. It ends with an error if parameters differ."""

import json
from pathlib import Path

from support.forked import module

ROOT = Path(__file__).parents[2]


def test_quick(monkeypatch):
    monkeypatch.chdir(ROOT)
    done = module("bench.collectives", "--quick", "--latency=1e-4", "--json", seconds=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.collectives/1"
    assert {"cpu", "cores", "load", "latency", "date"} <= set(result["machine"])
    rows = {(row["way"], row["ranks"]): row for row in result["rows"]}
    assert [*rows] == [(way, n) for way in ("step()", "max_grad_norm", "overlap()") for n in (2, 8, 64)]
    assert [rows[way, 8]["collectives"] for way in ("step()", "max_grad_norm", "overlap()")] == [2, 3, 1]
    assert all(len(row["seconds"]) == 5 for row in rows.values())
