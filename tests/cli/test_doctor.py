"""`csd-optim doctor`: the findings of each check on good and bad facts, and the command as a whole."""

import json
import math
import os

import pytest

from csd_optim.accelerator import accelerator_type
from csd_optim.cli import doctor
from csd_optim.cli.doctor import BAD, OK, SLOW, UNKNOWN
from csd_optim.devices import health, machine
from csd_optim.devices.spec import parse_devices
from csd_optim.store.file import FILE_NAME
from csd_optim.store.sections import STATE_DTYPES

HEALTHY = {
    "passed": True, "percent_used": 3, "written_bytes": 5e12, "media_errors": 0, "critical_warning": 0,
    "hot_minutes": 0, "celsius": 41,
}  # fmt: skip
DISK = {
    "name": "nvme0n1", "model": "Some SSD", "rotational": False, "removable": False, "link": (16.0, 4),
    "best_link": (16.0, 4), "celsius": 41.0,
}  # fmt: skip
STORE = {"owner": None, "step": 7, "clean": True, "torn": False}


@pytest.mark.parametrize(
    ("finding", "status", "says"),
    [
        (doctor.check_updater({"isa": "avx2", "threads": 8}, None, "x86_64"), OK, "avx2, 8 threads"),
        (doctor.check_updater({"isa": "scalar", "threads": 8}, "scalar", "x86_64"), SLOW, "unset CSD_OPTIM_ISA"),
        (doctor.check_updater({"isa": "scalar", "threads": 8}, None, "x86_64"), SLOW, "neither AVX-512"),
        (doctor.check_updater({"isa": "scalar", "threads": 8}, None, "aarch64"), SLOW, "aarch64"),
        (doctor.check_memory(8 * 10**9, 25 * 10**9), OK, "8 GB of 25 GB: this cgroup's limit"),
        (doctor.check_huge_pages("never"), SLOW, "echo madvise"),
        (doctor.check_huge_pages("madvise"), OK, "madvise"),
        (doctor.check_mappings(65530 * 7 // 8), OK, "57338"),
        (doctor.check_mappings(7000), SLOW, "sysctl"),
        (doctor.check_file_system("xfs"), OK, "xfs"),
        (doctor.check_file_system("tmpfs"), BAD, "ram:"),
        (doctor.check_file_system("overlay"), SLOW, "volume"),
        (doctor.check_file_system("fuse.sshfs"), SLOW, "network"),
        (doctor.check_file_system("zfs"), SLOW, "ext4 or xfs"),
        (doctor.check_direct_io(False), SLOW, "page cache"),
        (doctor.check_room(100 * 10**9, None), OK, "100 GB"),
        (doctor.check_room(100 * 10**9, 100 * 10**9), OK, "take 100 GB"),
        (doctor.check_room(100 * 10**9, 101 * 10**9), BAD, "one more drive"),
        (doctor.check_store(STORE), OK, "step 7"),
        (doctor.check_store(STORE | {"owner": 12}), OK, "in use by process 12"),
        (doctor.check_store(STORE | {"torn": True}), BAD, "snapshot"),
        (doctor.check_store(STORE | {"problem": "no superblock"}), BAD, "no superblock"),
        (doctor.check_rates([2e9] * 10 + [1.6e9] * 10, 60, None), OK, "1.60 GB/s"),
        (doctor.check_rates([2e9] * 10 + [1.6e9] * 10, 60, (70.0, 83.0)), OK, "together, 70 °C of 83 at most"),
        (doctor.check_rates([2e9] * 10 + [1.6e9] * 10, 60, (83.0, 83.0)), SLOW, "it will slow down"),
        (doctor.check_rates([2e9] * 10 + [1.4e9] * 10, 60, None), SLOW, "falls from 2.00 to 1.40 GB/s"),
        (doctor.check_rates([2e9] * 10 + [1.4e9] * 10, 60, (99.0, math.inf)), SLOW, "or it is too hot, 99 °C ->"),
        (doctor.check_rates([2e9] * 10 + [1.4e9] * 10, 60, (84.0, 83.0)), SLOW, "GB/s: it is too hot, 84 °C of 83"),
        (doctor.check_rates([2e9] * 10 + [1.4e9] * 10, 60, (60.0, 83.0)), SLOW, "cache is full, 60 °C of 83"),
        *((found, OK, "2 CPUs: this") for found in doctor.check_quota(2.0, 2)),
        *(
            (found, SLOW, "1.5 CPUs: this cgroup's limit -> set CSD_OPTIM_THREADS=1")
            for found in doctor.check_quota(1.5, 2)
        ),
        *((found, SLOW, "write 0.10 GB/s: this") for found in doctor.check_limits("sda", {"write": 10**8})),
    ],
    ids=lambda value: value.what if isinstance(value, doctor.Finding) else None,
)
def test_checks(finding, status, says):
    assert finding.status == status
    assert says in f"{finding.found} -> {finding.remedy}"
    assert bool(finding.remedy) == (status != OK)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, [OK, OK]),
        ({"link": (8.0, 4)}, [OK, SLOW]),
        ({"link": (16.0, 2)}, [OK, SLOW]),
        ({"link": None, "best_link": None}, [OK]),
        ({"rotational": True, "link": None}, [SLOW]),
        ({"removable": True, "link": None}, [SLOW]),
        ({"name": "vda", "rotational": True, "link": None}, [UNKNOWN]),  # what virtio says means nothing
    ],
    ids=str,
)
def test_disks(changed, expected):
    assert [f.status for f in doctor.check_disk(DISK | changed)] == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, [OK]),
        ({"percent_used": 80}, [SLOW]),
        ({"percent_used": None, "written_bytes": None, "celsius": None}, [OK]),
        ({"media_errors": 1}, [SLOW]),
        ({"critical_warning": 4}, [BAD]),
        ({"passed": False}, [BAD]),
        ({"hot_minutes": 12}, [OK, SLOW]),
        ({"problem": "denied"}, [UNKNOWN]),
    ],
    ids=str,
)
def test_health(changed, expected):
    found = list(doctor.check_smart(DISK, HEALTHY | changed))
    assert [f.status for f in found] == expected
    if changed == {}:
        assert found[0].found == "3 % of its endurance used, 5 TB written, 41 °C"


# As smartctl 7 prints it, shortened.
NVME = {
    "smart_status": {"passed": True},
    "temperature": {"current": 41},
    "nvme_smart_health_information_log": {
        "critical_warning": 0, "percentage_used": 3, "data_units_written": 9765625, "media_errors": 0,
        "critical_comp_time": 0,
    },
}  # fmt: skip
SATA = {"smart_status": {"passed": False}, "endurance_used": {"current_percent": 70}}
DENIED = {"smartctl": {"messages": [{"string": "Smartctl open device: /dev/sda failed: Permission denied"}]}}


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (json.dumps(NVME), HEALTHY),
        (json.dumps(SATA), {"passed": False, "percent_used": 70, "written_bytes": None}),
        (json.dumps(DENIED), {"remedy": "run as root"}),
        ("{}", {"problem": "smartctl says nothing of its health"}),
        ("Segmentation fault", {}),
    ],
    ids=["nvme", "sata", "denied", "nothing", "no json"],
)
def test_smartctl(printed, expected, tmp_path, monkeypatch):
    program = tmp_path / "smartctl"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\nexit 4\n")  # the status is a bit mask of findings
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    said = health.smart("nvme0n1")
    assert expected.items() <= said.items()
    assert ("problem" in said) == ("passed" not in said)


def test_no_smartctl(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "smartmontools" in health.smart("nvme0n1")["remedy"]


def test_disk_in_sysfs(tmp_path):
    """An NVMe drive in a slot that is too narrow, with a sensor; its partition is mounted."""
    function = tmp_path / "devices/pci0000:00/0000:01:00.0"
    block = function / "nvme/nvme0/nvme0n1"
    (block / "nvme0n1p1").mkdir(parents=True)
    (block / "queue").mkdir()
    (block / "device").symlink_to(block.parent)
    (block.parent / "device").symlink_to(function)
    (block.parent / "hwmon2").mkdir()
    for name, text in {
        "queue/rotational": "0", "../model": "Some SSD   ", "../hwmon2/temp1_input": "41850",
        "../hwmon2/temp1_max": "82850",
        "../device/current_link_speed": "8.0 GT/s PCIe", "../device/current_link_width": "4",
        "../device/max_link_speed": "16.0 GT/s PCIe", "../device/max_link_width": "4",
    }.items():  # fmt: skip
        (block / name).write_text(f"{text}\n")
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / "dev/block/259:1").symlink_to(block / "nvme0n1p1")
    [found] = health.disks_below(os.makedev(259, 1), tmp_path)
    assert found == block
    assert health.describe_disk(found) == DISK | {"link": (8.0, 4), "celsius": 41.85}
    assert health.temperature_of(found) == (41.85, 82.85)
    (block / "../hwmon2/temp1_max").unlink()
    assert health.temperature_of(found) == (41.85, math.inf)


GROUPS = {
    "version 2": {
        "/proc/self/cgroup": "0::/a/b",
        "/sys/fs/cgroup/a/b/cpu.max": "max 100000",
        "/sys/fs/cgroup/a/cpu.max": "150000 100000",
        "/sys/fs/cgroup/a/b/io.max": "8:0 rbps=5 wbps=6 riops=max wiops=max\n254:0 rbps=max wbps=100 riops=7 wiops=max",
        "/sys/fs/cgroup/a/io.max": "254:0 rbps=900 wbps=200 riops=max wiops=max",
    },
    "version 1": {
        "/proc/self/cgroup": "7:blkio:/x\n1:cpu,cpuacct:/x\n0::/",
        "/sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "150000",
        "/sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "/sys/fs/cgroup/blkio/x/blkio.throttle.read_bps_device": "8:0 5\n254:0 900",
        "/sys/fs/cgroup/blkio/x/blkio.throttle.write_bps_device": "254:0 100",
    },
}


@pytest.mark.parametrize("version", GROUPS)
def test_limits_of_control_groups(version, monkeypatch):
    monkeypatch.setattr(machine, "text_of", lambda path: GROUPS[version].get(str(path), ""))
    assert machine.cpu_quota() == 1.5
    assert machine.io_limits("254:0") == {"read": 900, "write": 100}
    assert machine.io_limits("254:1") == {}


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_room_is_shared_by_what_lies_on_one_file_system(tmp_path, state_dtype):
    each = {"fp32": 24, "8bit": 2 * 5.016}[state_dtype]
    specs = parse_devices([str(tmp_path / "a"), str(tmp_path / "b"), "null:"])
    found = doctor.shares(specs, 3 * 10**9, state_dtype)
    assert found[:2] == pytest.approx([2 * each * 1e9] * 2, rel=1e-3)


def test_command(run, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_BYTES", 16 << 20)
    code, out, _ = run("doctor", tmp_path, "--probe", "1", "--json")
    content = json.loads(out)
    assert content["schema"] == "csd_optim.doctor/1"
    here = {f["what"]: f for f in content["findings"][str(tmp_path)]}
    assert {"file system", "direct I/O", "room", "1 s of work"} <= here.keys()
    assert code == any(f["status"] == BAD for all in content["findings"].values() for f in all)
    assert os.listdir(tmp_path) == []

    code, out, _ = run("doctor", tmp_path, "ram:", tmp_path / "no/where", "--params", "1000B")
    assert code == 1
    assert "no such directory" in out
    assert "-> name a directory that you may write to" in out
    assert 'state_dtype="8bit"' in out
    assert FILE_NAME not in os.listdir(tmp_path)

    _, out, _ = run("doctor", "gpu:")
    assert ("has no accelerator here" in out) == (not accelerator_type())

    code, _, err = run("doctor", tmp_path, "--state-dtype", "fp8")
    assert code == 1
    assert "Invalid state_dtype" in err
