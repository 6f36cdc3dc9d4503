"""The benchmark of small models, with a few steps. It ends with an error if parameters are wrong."""

import json
from pathlib import Path

from support.forked import module

from bench.small import BEGIN, END, table

ROOT = Path(__file__).parents[2]
TORCH = ["AdamW, foreach", "AdamW, fused"]


def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    models = ["scalar", "GAN", "2 ranks"]
    done = module("bench.small", "--quick", "--json", f"--directory={tmp_path}", "--models", *models, seconds=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.small/1"
    assert {"cpu", "cores", "load", "storage", "steps", "date"} <= set(result["machine"])
    places = ["file:", "ram:", "directory"]
    on_ranks = [f"{place}, {how}" for place in places for how in ("sharded", "sharded=False")]
    assert [(row["model"], row["what"]) for row in result["rows"]] == [
        *((model, what) for model in ("scalar", "GAN") for what in (*TORCH, *places)),
        *(("2 ranks", what) for what in (*TORCH, *on_ranks, "one collective")),
    ]
    assert [row["tensors"] for row in result["rows"][:10:5]] == [1, 16]
    for row in result["rows"]:
        assert len(row["seconds"]) == len(row["cpu_seconds"]) == 5
        assert min(row["seconds"]) > 0
        beside = [] if row["what"] in (*TORCH, "one collective") else TORCH
        beside = beside + ["one collective"] * bool(beside and row["model"] == "2 ranks")
        assert {name: len(ratios) for name, ratios in row["ratio_to"].items()} == dict.fromkeys(beside, 5)
    assert done.stderr.count("the same bits everywhere") == 3
    assert not [*tmp_path.iterdir()]


def test_the_page_has_the_table_of_the_last_figures():
    figures = max((ROOT / "bench" / "results").glob("small-*.json"), key=lambda path: path.stem[-10:])  # the day
    page = (ROOT / "docs" / "performance.md").read_text()
    assert f"{BEGIN}{table(json.loads(figures.read_text())['rows'])}{END}" in page, "python -m bench.small --tell"
    assert figures.name in page
