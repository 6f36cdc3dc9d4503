"""Benchmarks of accelerators at tiny size, and `make gpu-check`: they run; their speed is not tested."""

import json
import runpy
import sys
import tarfile

import pytest
from support import gpu_check
from support.backends import TESTS

pytestmark = [pytest.mark.accelerator, pytest.mark.one_schedule]


@pytest.mark.ci
def test_bench(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(TESTS.parent)
    monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--runs=5", f"--directory={tmp_path}", "--json"])
    runpy.run_module("bench.accelerator", run_name="__main__", alter_sys=True)
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["schema"] == "csd_optim.bench.accelerator/1"
    assert [row["part"] for row in result["rows"]] == ["link"] * 3 + ["selection"] * 2 + ["step"] * 5
    assert all(len(row["rates"]) == 5 for row in result["rows"])
    assert "have the bits of the CPU" in err


@pytest.mark.ci
def test_bench_of_overlap(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(TESTS.parent)
    options = ["--accelerator", "--quick", "--params=1e5", "--runs=5", f"--directory={tmp_path}", "--json"]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    runpy.run_module("bench.overlap", run_name="__main__", alter_sys=True)
    result = json.loads(capsys.readouterr().out)
    assert [row["mode"] for row in result["rows"]] == ["none", "forward", "backward"]
    assert all(len(row["seconds"]) == len(row["step_seconds"]) == 5 for row in result["rows"])


def test_all_results_are_in_one_archive(tmp_path):
    """The archive contains the output of failed steps, too."""
    steps = [
        gpu_check.Step("good", [sys.executable, "-c", "print('all is well')"]),
        gpu_check.Step("bad", [sys.executable, "-c", "raise SystemExit('it is broken')"]),
        gpu_check.Step("none", ["/no/such/program"], needs="no/such/program"),
    ]
    archive, failed = gpu_check.run(steps, tmp_path)
    assert failed == ["bad"]
    with tarfile.open(archive) as found:
        texts = {m.name.split("/")[-1]: found.extractfile(m).read().decode() for m in found.getmembers() if m.isfile()}
    assert texts["good.txt"].endswith("all is well\n")
    assert texts["bad.txt"].endswith("it is broken\n")
    good, bad, none = texts["summary.txt"].splitlines()
    assert good.startswith("good: exit=0,")
    assert bad.startswith("bad: exit=1,")
    assert none == "none: skipped, no/such/program is not there"
