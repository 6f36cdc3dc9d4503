"""`csd-optim top`: it shows what the training's own statistics say, and does not disturb the training."""

import json
import os
import time

import pytest
import torch
import torch.distributed as dist
from support.owners import Owner
from support.ranks import on_living_ranks
from support.training import train
from torch.nn.parallel import DistributedDataParallel as DDP

from csd_optim import CSDAdam
from csd_optim.cli import top
from csd_optim.cli.top import DriveCounts, Top
from csd_optim.store.report import REPORT_NAME, ReportFile, read_report


@pytest.fixture
def training(tmp_path):
    """A training on two devices after three steps, the last of which is durable."""
    params = [torch.nn.Parameter(torch.randn(700, dtype=torch.bfloat16)) for _ in range(20)]
    devices = [f"file:{tmp_path}/a?tbw=600TB", tmp_path / "b"]
    with CSDAdam(params, devices=devices, tile_size=4096) as opt:
        train(opt, 3).synchronize()
        yield opt, params, [tmp_path / "a", tmp_path / "b"]


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
                assert d[key] == own[key] > 0 or key == "flash_read_bytes"  # buffers may save all reads
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
        assert all(d["step"] == 3 for d in Top(places).look())  # the first step erases the old report
        train(again, 1).synchronize()
        assert [(d["step"], d["iteration_seconds"]) for d in Top(places).look()] == [(1, None)] * 2
    told = (places[0] / REPORT_NAME).read_bytes()
    (places[0] / REPORT_NAME).write_bytes(told.replace(b'"step": 1', b'"step": 2'))  # damaged
    (places[1] / REPORT_NAME).unlink()
    assert [(d["step"], d["committed_step"]) for d in Top(places).look()] == [(None, 1)] * 2
    code, out, _ = run("top", *places, "--interval", 0.1)
    assert code == 0
    assert "step 1, committed 1; no report" in " ".join(out.split())


def under_ddp(rank, places):
    model = DDP(torch.nn.Linear(40, 50))
    with CSDAdam(model.parameters(), devices=places[rank], tile_size=4096) as opt:
        for _ in range(3):
            model(torch.ones(2, 40)).sum().backward()
            opt.step()
        opt.synchronize()
        dist.barrier()
        found = Top(places).look()
        dist.barrier()
        return os.getpid(), opt.stats()["params"], found


def test_ranks(run, tmp_path):
    places = [tmp_path / f"nvme{rank}" for rank in range(2)]
    ranks = on_living_ranks(2, under_ddp, places, directory=tmp_path)
    assert sum(params for _, params, _ in ranks) == 41 * 50
    for _, _, found in ranks:
        assert [(d["rank"], d["world_size"], d["step"], d["committed_step"]) for d in found] == [
            (0, 2, 3, 3),
            (1, 2, 3, 3),
        ]
        assert [(d["pid"], d["params"]) for d in found] == [(pid, params) for pid, params, _ in ranks]
        assert found[0]["store_id"] == found[1]["store_id"]
        assert found[0]["waits_for"] == found[1]["waits_for"] is not None
    code, out, _ = run("top", *places, "--interval", 0.1)
    assert code == 0
    for rank in range(2):
        assert f"no process trains here now, rank {rank} of 2: step 3, committed 3; a step" in " ".join(out.split())


def test_an_optimizer_rank(run, tmp_path):
    params = [torch.nn.Parameter(torch.randn(60, 70))]
    with Owner(tmp_path) as owner:
        with CSDAdam(params, devices=owner.address, tile_size=1024) as opt:
            train(opt, 3).synchronize()
            code, out, _ = run("top", owner.store, "--json", "-n", 1, "--interval", 0.1)
            assert code == 0
            (d,) = json.loads(out)["devices"]
            assert (d["rank"], d["world_size"], d["pid"]) == (0, 1, owner.pid)
            assert (d["step"], d["committed_step"], d["params"]) == (3, 3, 4200)
            assert d["waits_for"] is not None
        owner.stop()
    code, out, _ = run("top", owner.store, "--interval", 0.1)
    assert code == 0
    assert "no process trains here now: step 3, committed 3" in " ".join(out.split())


def test_where_no_store_is(run, tmp_path):
    code, _, err = run("top", tmp_path)
    assert code == 1
    assert f"there is no store in {tmp_path}" in err


def test_what_cannot_be_told_fails_no_step(tmp_path):
    (tmp_path / "csd" / REPORT_NAME).mkdir(parents=True)
    p = torch.nn.Parameter(torch.ones(100))
    with CSDAdam([p], devices=tmp_path / "csd") as opt:
        train(opt, 2).synchronize()
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
    assert top.waits_for([device("first", step, (0.1, 0.1, 0.1)), device("second", step, seconds)]) == said


@pytest.mark.parametrize(
    ("world_size", "steps", "slowest", "said"),
    [
        (2, (1.0, 9.0), 8.9, "write second"),  # the slow device is the other rank's
        (2, (9.0, 9.0), 8.9, "write second"),  # rank 0 waits for it within its step
        (2, (9.0, 9.0), 3.0, "gradients"),
        (2, (1.0, 2.0), 1.9, "model"),
        (3, (9.0, 9.0), 3.0, "ranks"),
        (3, (1.0, 2.0), 1.9, "ranks"),
        (3, (9.0, 9.0), 8.9, "write second"),
    ],
)
def test_what_ranks_wait_for(world_size, steps, slowest, said):
    first = device("first", steps[0], (0.1, 0.1, 0.1), world_size=world_size)
    second = device("second", steps[1], (0.1, 0.1, slowest), world_size=world_size, rank=1, pid=2)
    assert top.waits_for([first, second]) == said
    assert top.waits_for([first, second | {"pid": None}]) == "ranks"


def device(name, step, seconds, **other):
    parts = dict(zip(("read", "update", "write"), seconds, strict=True))
    told = {"directory": name, "step_seconds": step, "iteration_seconds": 10.0, "seconds": parts}
    return {**told, "pid": 1, "rank": 0, "world_size": 1, **other}


def test_rates_are_those_between_two_looks():
    before, now = DriveCounts(10.0, 1000, 5000, 3), DriveCounts(12.0, 5000, 5500, 7)
    assert top.rates(before, now) == {"drive_read": 2000, "drive_written": 250, "queue": 7}
    assert top.rates(None, None) == {"drive_read": None, "drive_written": None, "queue": None}
