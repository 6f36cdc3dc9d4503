"""The benchmarks at tiny size: that they still run, verify and say what they promise. Never how fast."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments):
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def test_step(tmp_path):
    png = tmp_path / "step.png"
    done = run("bench.step", "--quick", "--runs=5", f"--directory={tmp_path}", "--json", f"--plot={png}")
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.step/1"
    assert {"cpu", "cores", "isa", "storage", "date"} <= set(result["machine"])
    file, commit, fp16, fp32, null = result["rows"]
    assert len(file["seconds"]) == len(commit["seconds"]) == len(fp16["seconds"]) == len(fp32["seconds"]) == 5
    assert len(null["seconds"]) == 50
    assert file["bytes_per_param"]["push"] == file["bytes_per_param"]["pull"] == 2
    assert file["bytes_per_param"]["flash_read"] == pytest.approx(12, rel=0.05)  # tiles are whole pages
    assert len(file["ratio_to"]["the same requests without the update"]) == 5
    assert len(commit["ratio_to"]["the same without commits"]) == 5
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "verified fp16" in done.stderr
    assert "Mparam/s" in done.stderr
    assert list(tmp_path.iterdir()) == [png]


def test_topk(tmp_path):
    png = tmp_path / "topk.png"
    done = run("bench.topk", "--quick", "--runs=5", f"--directory={tmp_path}", "--json", f"--plot={png}")
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.topk/1"
    parts = {part: [r for r in result["rows"] if r["part"] == part] for part in ("link", "selection", "step")}
    pushed = {(r["dtype"], r["topk"]): r["bytes_per_param"]["push"] for r in parts["link"]}
    assert (pushed["fp16", None], pushed["fp32", None]) == (2, 4)
    for dtype in ("fp16", "fp32"):
        for share in (0.1, 0.05, 0.02, 0.01):
            assert 4 * share <= pushed[dtype, share] <= 4 * share + 0.002
    assert len(parts["selection"]) >= 6
    assert len(parts["step"]) == 6
    assert all(len(v) == 5 for r in parts["step"] for v in (r["seconds"], r["dense_seconds"], *r["ratio_to"].values()))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "verified: the engine" in done.stderr
    assert list(tmp_path.iterdir()) == [png]


def test_peers(tmp_path):
    for name in ("torch-fp16", "torch-fp32"):
        done = run("bench.peers", name, "--params=100000", f"--directory={tmp_path}", "--json")
        result = json.loads(done.stdout)
        assert (result["name"], result["params"], len(result["seconds"])) == (name, 100000, 5)


def test_peer_that_is_not_installed_says_so(tmp_path):
    done = run("bench.peers", "tensornvme", "--params=100000", f"--directory={tmp_path}")
    assert "skipped" in done.stdout or "Mparam/s" in done.stdout
