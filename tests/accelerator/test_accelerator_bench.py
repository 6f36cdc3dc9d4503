"""Benchmarks of accelerators at tiny size, and `make gpu-check`: they run; their speed is not tested."""

import importlib
import json
import runpy
import subprocess
import sys
import tarfile

import pytest
from support import gpu_check
from support.backends import TESTS

from csd_optim.kernels.device_check import WAYS

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


@pytest.mark.ci
def test_questions_for_a_gpu():
    """Parts that need no GPU answer on the emulated accelerator, each in a process of its own."""
    asked = ["environment", "checks", "exact", "rates", "topk", "staging", "nccl"]
    options = ["--emulated", "--params=5e4", "--values=1", f"--only={','.join(asked)}"]
    command = [sys.executable, "-m", "bench.gpu_questions", *options]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    rows = {row["part"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert (done.returncode, [*rows]) == (0, asked), done.stdout + done.stderr
    assert rows["checks"].items() >= {"update": "exact", "codes": "same", "topk": True}.items()
    assert rows["exact"]["report"] == "exact"
    for way in WAYS:
        assert rows["exact"][way]["tensors that differ"] == {}
        assert {*rows["exact"][way]["wrong at the edge"].values()} == {0}
        assert rows["rates"][f"kernels, {way}"]["G/s"] > 0
    assert rows["rates"]["steps"]["gpu:"]["kernels"] == [{"emu:0": "exact"}]
    assert rows["nccl"]["same as plain"] == {"ram:": {"plain": True, "ddp": True, "fsdp2": True}}
    assert "error" not in done.stdout


def test_a_part_that_fails_or_takes_too_long(monkeypatch):
    """The error is in its line, and the next part is asked."""
    monkeypatch.syspath_prepend(TESTS.parent)
    asked = importlib.import_module("bench.gpu_questions")
    monkeypatch.setattr(asked, "this_program", lambda code, how: [sys.executable, "-c", code])
    broken = asked.in_own_process("raise SystemExit('it is broken')", None, 60)
    assert broken == {"error": "exit status 1", "said": "it is broken\n"}
    late = asked.in_own_process("print('{}', flush=True); import time; time.sleep(60)", None, 0.5)
    assert late == {"error": "not done in 0.5 s", "said": ""}
    assert asked.in_own_process("print('{}')", None, 60) == {}
