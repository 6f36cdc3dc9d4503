"""`python -m bench.costs`: the figures that docs/plan.md shows are those of today's model, prices and watts."""

import json
import sys
from pathlib import Path

import pytest

from bench import costs

ROOT = Path(__file__).parents[2]


def main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["costs", *map(str, arguments)])
    costs.main()


def test_the_page_shows_what_it_prints(tmp_path, monkeypatch, capsys):
    png = tmp_path / "costs.png"
    main(monkeypatch, "--json", f"--plot={png}")
    found = json.loads(capsys.readouterr().out)
    (kept,) = (ROOT / "bench/results").glob("costs-*.json")
    old = json.loads(kept.read_text())
    assert (found["schema"], found["assumed"]) == (old["schema"], old["assumed"])
    assert found["rows"] == [pytest.approx(row) for row in old["rows"]]
    assert png.read_bytes().startswith(b"\x89PNG")
    page = (ROOT / "docs/plan.md").read_text()
    assert kept.name in page
    assert kept.with_suffix(".png").name in page


def test_places_differ_as_they_should(monkeypatch, capsys):
    """More drives are faster and cost more, 8-bit states wear them less, and DRAM costs what its bytes do."""
    found = costs.compare("1.4G/s", "gen4", "dram=10", "")
    of = {(r["params"], r["states"], r["drives"]): r for r in found["rows"]}
    assert len(of) == 12
    for params in costs.MODELS:
        for states in costs.STATES:
            dram, two, four = (of[params, states, n] for n in (0, 2, 4))
            assert four["dollars"] == 2 * two["dollars"]
            assert dram["step_seconds"] == pytest.approx(params / 1.4e9, rel=0.01)
            assert dram["step_seconds"] <= four["step_seconds"] < two["step_seconds"]
        assert of[params, "fp32", 0]["dollars"] == pytest.approx(12 * params / 1e8)
        assert of[params, "8bit", 2]["wear_of_1000_steps"] < of[params, "fp32", 2]["wear_of_1000_steps"] / 2
    assert "dram" not in {a["name"] for a in found["assumed"] if a["option"] == "prices"}
    main(monkeypatch)
    out = capsys.readouterr().out
    for words in ("70 B    2 drives, fp32      $1,560", "DRAM $32/GB (2026-Q2)"):
        assert words in out


def test_bad_prices_are_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main(monkeypatch, "--prices=gold=1")
    assert "Invalid --prices: 'gold=1'" in capsys.readouterr().err
