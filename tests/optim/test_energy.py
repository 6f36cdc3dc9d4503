"""stats()["energy"] adds up what RAPL counts: each package and its memory once, over wraps, or says why it cannot."""

import functools

import pytest
import torch

from csd_optim import CSDAdam
from csd_optim.devices.energy import EnergyMeter
from csd_optim.optim import stats
from csd_optim.trainers import scalars

WRAPS_AT = 262_143_328_850  # microjoules, as on most Intel machines


class Tree:
    """A false /sys/class/powercap, of zones "intel-rapl:0" with their names."""

    def __init__(self, path, **zones):
        self.path = path
        for zone, name in zones.items():
            directory = path / zone.replace("_", ":").replace("rapl", "intel-rapl").replace("mmio", "intel-rapl-mmio")
            directory.mkdir(parents=True)
            (directory / "name").write_text(f"{name}\n")
            (directory / "max_energy_range_uj").write_text(f"{WRAPS_AT}\n")
            (directory / "energy_uj").write_text("1000000\n")

    def counter(self, zone):
        return self.path / f"intel-{zone}" / "energy_uj"

    def add(self, zone, joules):
        counter = self.counter(zone)
        counter.write_text(f"{(int(counter.read_text()) + round(1e6 * joules)) % WRAPS_AT}\n")


def server(path):
    """Return the tree of two packages with memory, and of what must not be added to them."""
    parts = {"rapl_0": "package-0", "rapl_0_0": "core", "rapl_0_1": "dram", "rapl_1": "package-1-die-0"}
    more = {"rapl_1_0": "uncore", "rapl_1_1": "dram", "rapl_2": "psys", "mmio_0": "package-0"}
    (path / "intel-rapl").mkdir()  # the control type itself, which counts nothing
    return Tree(path, **parts, **more)


def test_packages_and_their_memory_are_added_once(tmp_path):
    tree, meter = server(tmp_path), EnergyMeter(tmp_path)
    joules = {"rapl:0": 10, "rapl:0:0": 9, "rapl:0:1": 2, "rapl:1": 20, "rapl:1:0": 5, "rapl:1:1": 3, "rapl:2": 40}
    for _ in range(2):
        meter.begin()
        for zone, used in joules.items():
            tree.add(zone, used)
        meter.end()
        tree.add("rapl:1", 100)  # forward and backward
    found = meter.describe()
    assert found["domains"] == ["package-0", "dram", "package-1-die-0", "dram"]
    assert found["machine_joules"] == pytest.approx({"step": 35, "steps": 70, "training": 170})
    assert found["problem"] is None


def test_counters_wrap(tmp_path):
    tree, meter = Tree(tmp_path, rapl_0="package-0"), EnergyMeter(tmp_path)
    tree.counter("rapl:0").write_text(f"{WRAPS_AT - 1_000_000}")
    meter.begin()
    tree.add("rapl:0", 7)
    meter.end()
    assert int(tree.counter("rapl:0").read_text()) == 6_000_000
    assert meter.describe()["machine_joules"] == pytest.approx({"step": 7, "steps": 7, "training": 7})


def test_a_step_that_fails_counts_for_the_training_alone(tmp_path):
    tree, meter = Tree(tmp_path, rapl_0="package-0"), EnergyMeter(tmp_path)
    meter.begin()
    tree.add("rapl:0", 5)  # and no end()
    meter.begin()
    tree.add("rapl:0", 1)
    meter.end()
    assert meter.describe()["machine_joules"] == pytest.approx({"step": 1, "steps": 1, "training": 6})


@pytest.mark.parametrize("where", ["nowhere", "no zones", "no package"])
def test_machines_without_counters(tmp_path, where):
    if where == "no zones":
        (tmp_path / "intel-rapl").mkdir()
    elif where == "no package":
        Tree(tmp_path, rapl_0="psys", rapl_0_0="dram", mmio_0="package-0")
    meter = EnergyMeter(tmp_path / "none" if where == "nowhere" else tmp_path)
    assert meter.describe()["problem"] == "no step was made yet"
    meter.begin()
    meter.end()
    found = meter.describe()
    assert (found["machine_joules"], found["domains"]) == (None, [])
    assert found["problem"].startswith("no energy counter of a processor (RAPL) in ")


@pytest.mark.parametrize("zone", ["rapl:0", "rapl:0:0"])
@pytest.mark.parametrize("file", ["energy_uj", "max_energy_range_uj"])
@pytest.mark.parametrize("content", [None, "directory", "", "much"])
def test_counters_that_cannot_be_read(tmp_path, zone, file, content):
    """Without a package's counter there are none; memory is left out."""
    tree, meter = Tree(tmp_path, rapl_0="package-0", rapl_0_0="dram"), EnergyMeter(tmp_path)
    path = tree.counter(zone).with_name(file)
    path.unlink()
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    meter.begin()
    tree.add("rapl:0" if zone == "rapl:0:0" else "rapl:0:0", 4)
    meter.end()
    found = meter.describe()
    if zone == "rapl:0":
        assert (found["machine_joules"], found["domains"]) == (None, [])
        assert found["problem"].startswith(f"cannot read the counter of {tree.counter(zone).parent}: ")
    else:
        assert (found["machine_joules"]["step"], found["domains"]) == (4, ["package-0"])


def test_counters_that_vanish_during_training(tmp_path):
    tree, meter = Tree(tmp_path, rapl_0="package-0"), EnergyMeter(tmp_path)
    meter.begin()
    meter.end()
    assert meter.describe()["machine_joules"] == {"step": 0, "steps": 0, "training": 0}
    tree.counter("rapl:0").unlink()
    for _ in range(2):
        meter.begin()
        meter.end()
    found = meter.describe()
    assert (found["machine_joules"], found["domains"]) == (None, [])
    assert "No such file" in found["problem"]


def two_steps(opt, p, tree=None):
    for _ in range(2):
        p.grad = torch.ones_like(p)
        opt.step()
        if tree:
            tree.add("rapl:0", 50)


def test_stats_have_it(tmp_path, monkeypatch):
    tree = Tree(tmp_path, rapl_0="package-0")
    monkeypatch.setattr(stats, "EnergyMeter", functools.partial(EnergyMeter, tmp_path))
    p = torch.nn.Parameter(torch.ones(10))
    with CSDAdam([p], devices=["ram:"]) as opt:
        assert opt.stats()["energy"]["machine_joules"] is None
        two_steps(opt, p, tree)
        found = opt.stats()["energy"]
        assert found["machine_joules"] == {"step": 0, "steps": 0, "training": 50}
        assert found["domains"] == ["package-0"]
        assert scalars(opt.stats())["csd_optim/machine_training_joules"] == 50


def test_stats_say_why_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(stats, "EnergyMeter", functools.partial(EnergyMeter, tmp_path))
    p = torch.nn.Parameter(torch.ones(10))
    with CSDAdam([p], devices=["ram:"]) as opt:
        two_steps(opt, p)
        assert not any("joules" in name for name in scalars(opt.stats()))
        assert opt.stats()["energy"] == {
            "machine_joules": None,
            "domains": [],
            "problem": f"no energy counter of a processor (RAPL) in {tmp_path}",
        }
