"""`csd-optim top`: what it says is what the training would say itself, which takes no notice."""

import json
import os
import time

import pytest
import torch

from csd_optim import CSDAdam
from csd_optim.cli import top
from csd_optim.cli.top import DriveCounts, Top
from csd_optim.store.report import REPORT_NAME, ReportFile, read_report


@pytest.fixture
def training(tmp_path):
    """On two devices, after three steps, the last of which is durable."""
    params = [torch.nn.Parameter(torch.randn(700, dtype=torch.bfloat16)) for _ in range(20)]
    devices = [f"file:{tmp_path}/a?tbw=600TB", tmp_path / "b"]
    with CSDAdam(params, devices=devices, tile_size=4096) as opt:
        train(opt, params, 3)
        yield opt, params, [tmp_path / "a", tmp_path / "b"]


def train(opt, params, steps):
    for _ in range(steps):
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
    opt.synchronize()


def test_a_training(run, training):
    opt, _, places = training
    code, out, _ = run("top", *places, "--json", "-n", 2, "--interval", 0.1)
    assert code == 0
    looks = [json.loads(line) for line in out.splitlines()]
    assert [look["schema"] for look in looks] == ["csd_optim.top/1"] * 2
    stats = opt.stats()
    for look in looks:
        for d, place, own in zip(look["devices"], places, stats["devices"], strict=True):
            assert d["directory"] == str(place)
            assert (d["step"], d["committed_step"], d["pid"]) == (3, 3, os.getpid())
            assert (d["rank"], d["world_size"]) == (0, 1)
            for key in ("params", "flash_read_bytes", "flash_write_bytes", "written_bytes"):
                assert d[key] == own[key] > 0 or key == "flash_read_bytes"  # which buffers may spare
            assert d["seconds"]["write"] == own["seconds"]["write"] > 0
            assert 0 < d["step_seconds"] < d["iteration_seconds"]
            assert d["at"] < look["time"] <= time.time()
    first, second = looks[1]["devices"]
    assert first["tbw_bytes"] == 600e12
    assert first["days_left"] > 0
    assert second["days_left"] is None
    code, out, _ = run("top", *places, "--interval", 0.1)
    assert code == 0
    assert f"process {os.getpid()}: step 3, committed 3; a step takes" in " ".join(out.split())


def test_who_has_ended_is_known_last(run, training):
    opt, _, places = training
    opt.close()
    code, out, _ = run("top", *places, "--interval", 0.1)
    assert code == 0
    assert "no process trains here now: step 3, committed 3; a step takes" in " ".join(out.split())
    assert all(d["waits_for"] is None and d["params"] for d in Top(places).look())


def test_what_is_told_counts_for_its_store_only(run, training):
    opt, params, places = training
    opt.close()
    with CSDAdam(params, devices=places, overwrite=True) as again:
        again.state  # noqa: B018, it has made no step
        assert all(d["step"] == 3 for d in Top(places).look())  # what is there is erased by the first step
        train(again, params, 1)
        assert [(d["step"], d["iteration_seconds"]) for d in Top(places).look()] == [(1, None)] * 2
    told = (places[0] / REPORT_NAME).read_bytes()
    (places[0] / REPORT_NAME).write_bytes(told.replace(b'"step": 1', b'"step": 2'))  # damaged
    (places[1] / REPORT_NAME).unlink()
    assert [(d["step"], d["committed_step"]) for d in Top(places).look()] == [(None, 1)] * 2
    code, out, _ = run("top", *places, "--interval", 0.1)
    assert code == 0
    assert "step 1, committed 1; it tells nothing" in " ".join(out.split())


def test_where_no_store_is(run, tmp_path):
    code, _, err = run("top", tmp_path)
    assert code == 1
    assert f"there is no store in {tmp_path}" in err


def test_what_cannot_be_told_fails_no_step(tmp_path):
    (tmp_path / "csd" / REPORT_NAME).mkdir(parents=True)
    p = torch.nn.Parameter(torch.ones(100))
    with CSDAdam([p], devices=tmp_path / "csd") as opt:
        train(opt, [p], 2)
        assert opt.committed_step == 2
    assert Top([tmp_path / "csd"]).look()[0]["step"] is None


def test_a_shorter_report_takes_the_place_of_a_longer_one(tmp_path):
    file = ReportFile(tmp_path)
    for told in ({"step": 10**9}, {"step": 1}):
        file.write(told)
        assert read_report(tmp_path) == told
    file.close()


@pytest.mark.parametrize(
    ("step", "seconds", "said"),
    [
        (2.0, (0.1, 0.1, 1.9), "model"),
        (9.0, (0.1, 1.0, 8.9), "write second"),
        (9.0, (8.5, 1.0, 2.0), "read second"),
        (9.0, (1.0, 7.0, 2.0), "update second"),
        (9.0, (1.0, 2.0, 3.0), "gradients"),
    ],
)
def test_what_a_step_waits_for(step, seconds, said):
    def device(name, seconds):
        parts = dict(zip(("read", "update", "write"), seconds, strict=True))
        return {"directory": name, "pid": 1, "step_seconds": step, "iteration_seconds": 10.0, "seconds": parts}

    assert top.waits_for([device("first", (0.1, 0.1, 0.1)), device("second", seconds)]) == said


def test_rates_are_those_between_two_looks():
    before, now = DriveCounts(10.0, 1000, 5000, 3), DriveCounts(12.0, 5000, 5500, 7)
    assert top.rates(before, now) == {"drive_read": 2000, "drive_written": 250, "queue": 7}
    assert top.rates(None, None) == {"drive_read": None, "drive_written": None, "queue": None}
