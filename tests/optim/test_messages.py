"""What csd_optim says where a script means something else than it does."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from support.forked import printed
from torch.nn import Parameter

from csd_optim import CSDAdam, CSDBusyError, CSDMuon, CSDOSError, CSDUnavailableError, CSDValueError, CSDWarning
from csd_optim.engine import open_devices
from csd_optim.optim.torch_version import check_torch

IN_MEMORY = Path("/dev/shm")


def take_step(opt):
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    opt.step()


def test_a_working_directory_that_cannot_be_written_names_the_ways_out(monkeypatch):
    monkeypatch.chdir("/proc")
    monkeypatch.delenv("CSD_OPTIM_DEVICES", raising=False)
    with pytest.raises(CSDOSError, match=r"/proc.*devices= or CSD_OPTIM_DEVICES"):
        CSDAdam([Parameter(torch.ones(3))])


@pytest.mark.skipif(not IN_MEMORY.is_dir(), reason="no tmpfs")
def test_scratch_states_in_memory_are_told_of_once(monkeypatch):
    monkeypatch.setattr(open_devices, "_in_memory", set())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            with CSDAdam([Parameter(torch.ones(3))], devices=f"file:{IN_MEMORY}?scratch=1") as opt:
                take_step(opt)
    assert [(warning.category, warning.filename) for warning in told] == [(CSDWarning, __file__)]
    assert "in memory, as /dev/shm is a tmpfs file system" in str(told[0].message)


def test_each_optimizer_of_a_process_gets_a_directory(tmp_path):
    """By CSD_OPTIM_DEVICES, in a process of its own: the number counts optimizers of the process."""
    script = """
import sys, torch
from csd_optim import CSDAdam
params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 4)]
optimizers = [CSDAdam([p], resume=True) for p in params]
assert [opt.committed_step for opt in optimizers] == [int(sys.argv[1])] * 2
for p, opt in zip(params, optimizers):
    p.grad = torch.ones_like(p)
    opt.step()
    opt.close()
"""
    environment = {**os.environ, "CSD_OPTIM_DEVICES": f"{tmp_path}/{{optimizer}}"}
    for done in ("0", "1"):
        printed(script, done, environment=environment)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_refused_directory_names_the_placeholder(tmp_path, monkeypatch):
    monkeypatch.setenv("CSD_OPTIM_DEVICES", str(tmp_path))
    with CSDAdam([Parameter(torch.ones(3))]), pytest.raises(CSDBusyError, match=r"/\{optimizer\}'"):
        CSDAdam([Parameter(torch.ones(4))])


def test_a_failed_constructor_takes_no_number(tmp_path):
    devices = f"{tmp_path}/{{optimizer}}"
    with CSDAdam([Parameter(torch.ones(3))], devices=devices) as first:
        with pytest.raises(ValueError, match="Invalid learning rate"):
            CSDAdam([Parameter(torch.ones(3))], lr=-1.0, devices=devices)
        with CSDAdam([Parameter(torch.ones(3))], devices=devices) as second:
            numbers = [int(repr(opt).removesuffix("]").rpartition("/")[-1]) for opt in (first, second)]
    assert numbers[1] == numbers[0] + 1


@pytest.mark.parametrize("device", ["{} ", " {}", "file:{} ", "{}\n"])
def test_a_path_with_a_blank_at_its_end_is_refused(tmp_path, device):
    """It was taken without the blank, so states went to another directory than that of this name."""
    with pytest.raises(CSDValueError, match="begins or ends with a blank"):
        CSDAdam([Parameter(torch.ones(3))], devices=device.format(tmp_path / "x"))
    assert not (tmp_path / "x").exists()
    with CSDAdam([Parameter(torch.ones(3))], devices=tmp_path / "x ") as opt:
        take_step(opt)
    assert [path.name for path in tmp_path.iterdir()] == ["x "]
    CSDAdam([Parameter(torch.ones(3))], devices=" ram: ").close()


OTHER_KEYS = [
    (CSDMuon, {"kind": "adamw"}, "adamw"),
    (CSDMuon, {"algorithm": "Lion"}, "lion"),
    (CSDMuon, {"use_adamw": True}, "adamw"),
    (CSDAdam, {"use_muon": True}, "muon"),
    (CSDMuon, {"kind": "muon"}, None),
    (CSDMuon, {"use_muon": True}, None),
    (CSDAdam, {"use_muon": False}, None),
    (CSDAdam, {"kind": "embedding", "name": "xyz"}, None),
    (CSDMuon, {"rule": "adamw", "kind": "adamw"}, None),
]


@pytest.mark.parametrize(("of", "keys", "named"), OTHER_KEYS, ids=str)
def test_a_group_that_names_its_rule_in_another_way(of, keys, named):
    groups = [{"params": [Parameter(torch.ones(4, 4))], **keys}]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        of(groups, devices="ram:").close()
    assert [f'write "rule": "{named}"' in str(warning.message) for warning in told] == [True] * (named is not None)


@pytest.mark.parametrize("version", ["2.6.0", "2.7.1+cu126", "2.8.0", "1.13.1"])
def test_a_torch_that_is_too_old_is_named_with_the_reason(version):
    with pytest.raises(CSDUnavailableError, match=rf"2\.9 or later, and this is {re.escape(version)}: .* a resume"):
        check_torch(version)


def test_other_versions_of_torch_are_taken():
    for version in ("2.9.0", "2.10.0a0+git1234", "2.15.0", "3.0.0", "main"):
        check_torch(version)


@pytest.mark.ci
def test_the_version_of_torch_is_checked_at_import():
    """In an interpreter of its own, as forked ones have imported csd_optim."""
    program = """if True:
        import torch
        torch.__version__ = "2.8.0"
        try:
            from csd_optim import CSDAdam
        except RuntimeError as e:
            print(type(e).__name__, e)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("CSDUnavailableError csd_optim needs torch 2.9 or later, and this is 2.8.0")
