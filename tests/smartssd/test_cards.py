"""Finding SmartSSDs, in sysfs trees that the tests build.

We never had a card: the trees follow published material and were not recorded. PCI functions, their order and the shell
are from a published listing of four SmartSSDs by `lspci` and `xrt-smi examine` (XRT 2.18); attributes and their formats
are from the xocl driver's source and from XRT's page on sysfs; nvme, md, dm and IOMMU groups are as the kernel
documents them.
"""

import os
import re
import time
from pathlib import Path

import pytest

from csd_optim.devices import smartssd as module
from csd_optim.devices.smartssd import ask_pyxrt, cards, find
from csd_optim.devices.sysfs import System
from csd_optim.errors import CSDUnavailableError, CSDValueError

GIB = 1 << 30
SHELL = "xilinx_u2_gen3x4_xdma_gc_base_2"
ROOT_PORT = "pci0000:d0/0000:d0:01.1"
EXPANSION = f"{ROOT_PORT}/0000:d1:00.0"  # a switch that several cards share
BUSES = (0xD5, 0xD9, 0xDD, 0xE1)  # bus numbers of the cards' own switches


class Machine:
    """A sysfs, /dev and mountinfo below a directory."""

    def __init__(self, root, xrt="2.18.179,3ade2e671e5ab463400813fc2846c57edf82bb10"):
        self.root = root
        self.system = System(root / "sys", root / "dev", root / "mountinfo")
        self.minor = 0
        (root / "dev/dri").mkdir(parents=True)
        self.system.mounts.write_text("22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw\n")
        (root / "sys/bus/pci/devices").mkdir(parents=True)
        if xrt:
            self.write(self.system.sysfs / "module/xocl/version", xrt)
            (self.system.sysfs / "bus/pci/drivers/xocl").mkdir(parents=True)
            (self.system.sysfs / "bus/pci/drivers/xocl/bind").touch()

    @staticmethod
    def write(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    @staticmethod
    def link(path, to):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(to, path.parent))

    def pci(self, path, kind, vendor=0x10EE, group=None):
        """Creates a PCI function at devices/`path`."""
        function = self.system.sysfs / "devices" / path
        if not function.exists():
            self.write(function / "class", f"0x{kind:06x}")
            self.write(function / "vendor", f"0x{vendor:04x}")
            self.link(self.system.sysfs / "bus/pci/devices" / function.name, function)
        if group is not None:
            self.link(function / "iommu_group", self.system.sysfs / f"kernel/iommu_groups/{group}")
        return function

    def bridges(self, path, vendor):
        parts = path.split("/")
        for i in range(2, len(parts) + 1):
            self.pci("/".join(parts[:i]), 0x060400, vendor)

    def block(self, at, name):
        """Creates a block device whose directory is `at`."""
        self.minor += 1
        self.write(at / "dev", f"259:{self.minor}")
        self.link(self.system.sysfs / "class/block" / name, at)
        return at

    def volume(self, name, *below, mapper=None):
        """Creates dm-0 or md0, which consists of other block devices."""
        at = self.block(self.system.sysfs / "devices/virtual/block" / name, name)
        if mapper:
            self.write(at / "dm/name", mapper)
        for part in below:
            part = self.system.sysfs / "class/block" / part
            self.link(at / "slaves" / part.name, part)
            self.link(part.resolve() / "holders" / name, at)

    def partition(self, disk, number):
        at = (self.system.sysfs / "class/block" / disk).resolve() / f"{disk}p{number}"
        self.write(at / "partition", number)
        return self.block(at, at.name).name

    def nvme(self, path, name, namespaces=("n1",), group=None, model="SAMSUNG MZWLJ3T8HBLS-00007"):
        function = self.pci(path, 0x010802, 0x144D, group)
        if name:
            controller = function / "nvme" / name
            self.write(controller / "model", f"{model:40}")
            self.write(controller / "serial", f"S4{name.upper():18}")
            for namespace in namespaces:
                self.block(controller / (name + namespace), name + namespace)

    def accelerator(self, path, render, *, ready=1, p2p="bar", groups=None, xclbin="", driver=True, serial=""):
        """Creates the two functions of an FPGA at `path` (without the function number), and its driver."""
        self.pci(f"{path}.0", 0x120000)
        function = self.pci(f"{path}.1", 0x120000, group=groups)
        if not driver:
            return function.name
        self.link(self.system.sysfs / "bus/pci/drivers/xocl" / function.name, function)
        self.write(function / "ready", f"0x{ready:x}")
        self.write(function / "xclbinuuid", xclbin)
        self.write(function / "rom.u.2097152/VBNV", SHELL)
        self.write(function / "xmc.u.10485760/serial_num", serial)
        (function / f"drm/renderD{render}").mkdir(parents=True)
        (self.system.dev / f"dri/renderD{render}").touch()
        sizes = {
            "bar": (4 * GIB, 4 * GIB, None),
            "disabled": (256 << 20, 4 * GIB, None),
            "no iomem": (256 << 20, 4 * GIB, 4 * GIB),
            "no bar": (None, 4 * GIB, None),
        }
        if p2p:
            bar, expected, resizable = sizes[p2p]
            rows = [("bar", bar), ("max_bar", 128 * GIB), ("exp_bar", expected), ("rbar", resizable), ("remap", 0)]
            text = "\n".join(f"{key}:{size}" for key, size in rows if size is not None) + "\n0:bank0:4294967296"
            self.write(function / "p2p.u.23068672/config", text)
        return function.name

    def smartssd(self, bus=0xD5, nvme="nvme4", above=ROOT_PORT, render=132, groups=(None, None), **options):
        """Creates a card whose switch is at `bus`, as lspci shows it: drive on the first port, FPGA on the second."""
        domain = above.split("/")[-1].split(":")[0]
        switch = f"{above}/{domain}:{bus:02x}:00.0"
        self.bridges(above, 0x10B5)
        for port in ("", f"/{domain}:{bus + 1:02x}:00.0", f"/{domain}:{bus + 1:02x}:01.0"):
            self.pci(switch + port, 0x060400)
        if nvme is not None:
            self.nvme(f"{switch}/{domain}:{bus + 1:02x}:00.0/{domain}:{bus + 2:02x}:00.0", nvme, group=groups[0])
        at = f"{switch}/{domain}:{bus + 1:02x}:01.0/{domain}:{bus + 3:02x}:00"
        return self.accelerator(at, render, groups=groups[1], **options)

    def mount(self, device, at, root="/", kind="ext4", source=None, number=None):
        self.minor += 1
        if number is None:
            number = (self.system.sysfs / "class/block" / device / "dev").read_text().strip()
        at.mkdir(parents=True, exist_ok=True)
        escaped = str(at).replace(" ", "\\040")
        with self.system.mounts.open("a") as file:
            file.write(
                f"{self.minor} 22 {number} {root} {escaped} rw shared:9 - {kind} {source or f'/dev/{device}'} rw\n"
            )
        return at

    def iommu(self, **types):
        for group, kind in types.items():
            self.write(self.system.sysfs / f"kernel/iommu_groups/{group.strip('g')}/type", kind)

    def cards(self, told=None):
        return cards(told, self.system)

    def find(self, name):
        return find(name, self.system)


@pytest.fixture(autouse=True)
def no_emulation(monkeypatch):
    monkeypatch.delenv("XCL_EMULATION_MODE", raising=False)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


# ---- one card ------------------------------------------------------------------------


def test_one_card(machine, tmp_path):
    uuid = "0d9f2c11-7c3f-4d34-9b5e-0c9a5e5d2a11"
    machine.smartssd(xclbin=uuid)
    machine.mount("nvme4n1", tmp_path / "smart ssd")
    (card,) = machine.cards()
    assert (card.index, card.bdf, card.shell, card.xclbin_uuid) == (0, "0000:d8:00.1", SHELL, uuid)
    assert (card.ready, card.p2p, card.problems, card.warnings) == (True, "enabled", (), ())
    assert (card.nvme.name, card.nvme.bdf, card.nvme.blocks) == ("nvme4", "0000:d7:00.0", ("nvme4n1",))
    assert card.nvme.model == "SAMSUNG MZWLJ3T8HBLS-00007"
    assert card.serial == card.nvme.serial == "S4NVME4"
    assert card.directory == card.store_directory() == tmp_path / "smart ssd"
    assert card.store_directory(tmp_path / "elsewhere") == tmp_path / "elsewhere"


@pytest.mark.parametrize("name", ["0", "0000:d8:00.1", "d8:00.1", "D8:0.1"])
def test_names_of_a_card(machine, name):
    machine.smartssd()
    assert machine.find(name).name == "0000:d8:00.1"


def test_wrong_names(machine):
    machine.smartssd()
    with pytest.raises(CSDValueError, match=r"'xrt:1'; there is no such card; there are xrt:0 \(0000:d8:00\.1\)"):
        machine.find("1")
    with pytest.raises(CSDValueError, match=r"no such card; there are xrt:0"):
        machine.find("65:00.1")
    with pytest.raises(CSDValueError, match=r"no user function; that of the same card is 'xrt:0000:d8:00\.1'"):
        machine.find("d8:00.0")
    for name in ("", "-1", "d8:00", "card0", "0000:d8:00.9"):
        with pytest.raises(CSDValueError, match="write a number, xrt:0, or a PCIe address"):
            machine.find(name)


def test_the_cards_own_serial_comes_first(machine):
    machine.smartssd(serial="21770205K02Y")
    assert machine.cards()[0].serial == "21770205K02Y"


# ---- several cards -------------------------------------------------------------------


def four(machine, nvmes=("nvme7", "nvme5", "nvme4", "nvme6")):
    """Four cards and a plain drive behind an expansion switch; the kernel numbers drives in the order they answer."""
    names = [
        machine.smartssd(bus, nvme, f"{EXPANSION}/0000:d2:{i:02x}.0", 132 + i)
        for i, (bus, nvme) in enumerate(zip(BUSES, nvmes, strict=True))
    ]
    machine.bridges(f"{EXPANSION}/0000:d2:04.0", 0x10B5)
    machine.nvme(f"{EXPANSION}/0000:d2:04.0/0000:e5:00.0", "nvme0")
    return names


def test_four_cards_are_paired_by_their_switch(machine, tmp_path):
    names = four(machine)
    for i in range(8):
        if (machine.system.sysfs / f"class/block/nvme{i}n1").exists():
            machine.mount(f"nvme{i}n1", tmp_path / f"drive{i}")
    found = machine.cards()
    assert [c.bdf for c in found] == names == [f"0000:{bus:02x}:00.1" for bus in (0xD8, 0xDC, 0xE0, 0xE4)]
    assert [c.nvme.name for c in found] == ["nvme7", "nvme5", "nvme4", "nvme6"]
    assert [c.nvme.bdf for c in found] == [f"0000:{bus:02x}:00.0" for bus in (0xD7, 0xDB, 0xDF, 0xE3)]
    assert [c.directory.name for c in found] == ["drive7", "drive5", "drive4", "drive6"]


def test_a_card_without_its_drive_takes_nobody_elses(machine):
    four(machine, ("nvme7", None, "nvme4", "nvme6"))
    card = machine.find("1")
    assert card.nvme is None
    with pytest.raises(
        CSDUnavailableError, match=r"no NVMe drive is .* is only behind the same switch 0000:d1:00\.0; name"
    ):
        card.store_directory()


def test_a_driver_that_is_too_old(tmp_path):
    machine = Machine(tmp_path, "2.12.427,0000000")
    machine.smartssd()
    with pytest.raises(CSDUnavailableError, match=r"its driver is of XRT 2\.12; 2\.13 or later is needed"):
        machine.find("0").store_directory(tmp_path)


@pytest.mark.parametrize(("xrt", "order"), [("2.13.466,f5505e40", [3, 1, 0, 2]), ("2.14.354,43926231", [3, 1, 0, 2])])
def test_until_xrt_2_14_ready_cards_count_backwards(tmp_path, xrt, order):
    machine = Machine(tmp_path, xrt)
    names = four(machine)
    machine.write(machine.system.sysfs / "bus/pci/devices" / names[2] / "ready", "0x0")
    assert [c.bdf for c in machine.cards()] == [names[i] for i in order]


def test_cards_that_are_not_ready_come_last(machine):
    names = four(machine)
    machine.write(machine.system.sysfs / "bus/pci/devices" / names[0] / "ready", "0x0")
    found = machine.cards()
    assert [c.bdf for c in found] == [names[i] for i in (1, 2, 3, 0)]
    assert [c.index for c in found] == [0, 1, 2, 3]
    with pytest.raises(CSDUnavailableError, match=r"card 0000:d8:00\.1: it is not ready: `xbmgmt examine`"):
        found[3].store_directory(Path("/mnt"))


def test_a_card_that_a_container_was_not_given_has_no_index(machine):
    names = four(machine)
    (machine.system.dev / "dri/renderD132").unlink()
    found = machine.cards()
    assert [(c.index, c.bdf) for c in found] == [(0, names[1]), (1, names[2]), (2, names[3]), (None, names[0])]
    with pytest.raises(CSDUnavailableError, match="renderD132 is missing: in a container, pass the device in"):
        machine.find("d8:00.1").store_directory(Path("/mnt"))


def test_no_permission(machine, monkeypatch):
    machine.smartssd()
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root, who has every permission
    with pytest.raises(CSDUnavailableError, match=r"no permission for .*renderD132: join the group"):
        machine.find("0").store_directory(Path("/mnt"))


def test_several_domains(machine, tmp_path):
    machine.smartssd(nvme="nvme0")
    machine.smartssd(nvme="nvme1", above="pci0001:d0/0001:d0:01.1", render=133)
    machine.mount("nvme1n1", tmp_path / "second")
    assert [c.bdf for c in machine.cards()] == ["0000:d8:00.1", "0001:d8:00.1"]
    assert machine.find("0001:d8:00.1").directory == tmp_path / "second"
    with pytest.raises(CSDValueError, match=r"write one of 0000:d8:00\.1, 0001:d8:00\.1"):
        machine.find("d8:00.1")


# ---- no card -------------------------------------------------------------------------


def test_no_card_no_driver(tmp_path):
    machine = Machine(tmp_path, xrt=None)
    machine.nvme(f"{ROOT_PORT}/0000:d7:00.0", "nvme0")
    assert machine.cards() == []
    with pytest.raises(CSDUnavailableError, match="there is no Xilinx card on the PCIe bus"):
        machine.find("0")


def test_a_card_without_driver(tmp_path):
    machine = Machine(tmp_path, xrt=None)
    machine.smartssd(driver=False)
    with pytest.raises(
        CSDUnavailableError, match=r"no XRT driver is loaded \(xocl\), but there is a card at 0000:d8:00\.0"
    ):
        machine.find("0")


def test_a_driver_that_took_no_card(machine):
    machine.smartssd(driver=False)
    with pytest.raises(CSDUnavailableError, match=r"XRT's driver has taken no card.*flash its shell"):
        machine.find("0")


def test_the_machine_that_runs_this_has_an_answer():
    assert isinstance(cards(), list)


# ---- the drive -----------------------------------------------------------------------


def test_not_mounted(machine):
    machine.smartssd()
    with pytest.raises(
        CSDUnavailableError, match=r"card 0000:d8:00\.1: its NVMe drive /dev/nvme4n1 is not .*mkfs\.ext4"
    ):
        machine.find("0").store_directory()
    machine.partition("nvme4n1", 1)  # the drive has been used before
    with pytest.raises(
        CSDUnavailableError, match=r"/dev/nvme4n1p1 is not mounted: `mount /dev/nvme4n1p1 /mnt/smartssd0`$"
    ):
        machine.find("0").store_directory()


def test_a_drive_elsewhere_is_not_taken(machine, tmp_path):
    machine.smartssd()
    machine.nvme("pci0000:00/0000:00:1d.0/0000:04:00.0", "nvme0")
    machine.mount("nvme0n1", tmp_path / "home")
    assert machine.cards()[0].nvme.name == "nvme4"
    assert machine.cards()[0].directory is None


def test_a_plain_accelerator_has_no_drive(machine, tmp_path):
    machine.pci(ROOT_PORT, 0x060400, 0x8086)
    machine.accelerator(f"{ROOT_PORT}/0000:65:00", 128)
    card = machine.find("65:00.1")
    assert card.nvme is None
    with pytest.raises(
        CSDUnavailableError, match=r"no NVMe drive is behind the switch.*'xrt:0000:65:00\.1\?nvme=/mnt/"
    ):
        card.store_directory()
    assert card.store_directory(tmp_path) == tmp_path


def test_a_drive_without_driver(machine):
    machine.smartssd(nvme="")
    with pytest.raises(CSDUnavailableError, match=r"its NVMe drive 0000:d7:00\.0 has no driver"):
        machine.find("0").store_directory()


def test_a_drive_without_namespace(machine):
    name = machine.smartssd(nvme=None)
    switch = f"{ROOT_PORT}/0000:d5:00.0/0000:d6:00.0/0000:d7:00.0"
    machine.nvme(switch, "nvme4", namespaces=())
    with pytest.raises(CSDUnavailableError, match=f"card {name}: its NVMe drive nvme4 has no namespace"):
        machine.find("0").store_directory()


def test_two_drives_behind_a_card(machine):
    machine.smartssd()
    machine.nvme(f"{ROOT_PORT}/0000:d5:00.0/0000:d6:02.0/0000:f0:00.0", "nvme9")
    with pytest.raises(CSDUnavailableError, match=r"several NVMe drives are behind 0000:d5:00\.0"):
        machine.find("0").store_directory()


def test_multipath_names(machine, tmp_path):
    """The controller's directory has a hidden path device; the disk is under devices/virtual."""
    machine.smartssd(nvme=None)
    machine.nvme(f"{ROOT_PORT}/0000:d5:00.0/0000:d6:00.0/0000:d7:00.0", "nvme4", namespaces=())
    controller = machine.system.sysfs / "bus/pci/devices/0000:d7:00.0/nvme/nvme4"
    (controller / "nvme3c4n1").mkdir()
    machine.block(machine.system.sysfs / "devices/virtual/nvme-subsystem/nvme-subsys3/nvme3n1", "nvme3n1")
    machine.mount("nvme3n1", tmp_path / "data")
    assert machine.cards()[0].nvme.blocks == ("nvme3n1",)
    assert machine.cards()[0].directory == tmp_path / "data"


def test_a_partition(machine, tmp_path):
    machine.smartssd()
    machine.partition("nvme4n1", 1)
    machine.mount(machine.partition("nvme4n1", 2), tmp_path / "data", source="/dev/root")
    assert machine.cards()[0].directory == tmp_path / "data"


def test_two_mounted_partitions_must_be_named(machine, tmp_path):
    machine.smartssd()
    for i in (1, 2):
        machine.mount(machine.partition("nvme4n1", i), tmp_path / f"part{i}")
    card = machine.find("0")
    with pytest.raises(CSDUnavailableError, match=r"part1 \(nvme4n1p1\), .*part2 \(nvme4n1p2\); name a directory"):
        card.store_directory()
    assert card.drive_contains(tmp_path / "part1", machine.system)
    assert card.drive_contains(tmp_path / "part2", machine.system)


def test_lvm(machine, tmp_path):
    machine.smartssd()
    machine.volume("dm-3", machine.partition("nvme4n1", 1), mapper="smart-state")
    machine.mount("dm-3", tmp_path / "data", source="/dev/mapper/smart-state")
    assert machine.cards()[0].directory == tmp_path / "data"


def test_btrfs_is_known_by_its_source(machine, tmp_path):
    machine.smartssd()
    machine.mount("nvme4n1", tmp_path / "data", root="/@", kind="btrfs", number="0:51")
    assert machine.cards()[0].directory == tmp_path / "data"


def test_md_of_one_card(machine, tmp_path):
    machine.smartssd()
    machine.volume("md0", machine.partition("nvme4n1", 1), machine.partition("nvme4n1", 2))
    machine.mount("md0", tmp_path / "data")
    assert machine.cards()[0].directory == tmp_path / "data"


def test_md_of_several_cards_is_on_no_card(machine, tmp_path):
    four(machine)
    machine.volume("md0", "nvme7n1", "nvme5n1")
    machine.volume("dm-0", "md0", mapper="crypt")
    machine.mount("dm-0", tmp_path / "data")
    for name in ("0", "1"):
        with pytest.raises(CSDUnavailableError, match=r"md0 lies on other drives too, not only on nvme[57]n1; name a"):
            machine.find(name).store_directory()
        assert not machine.find(name).drive_contains(tmp_path / "data", machine.system)


def test_the_whole_before_a_bind_mount(machine, tmp_path):
    machine.smartssd()
    machine.mount("nvme4n1", tmp_path / "whole")
    part = machine.mount("nvme4n1", tmp_path / "part", root="/some/part")
    card = machine.cards()[0]
    assert card.directory == tmp_path / "whole"
    assert card.drive_contains(part, machine.system)


def test_which_directories_a_card_holds(machine, tmp_path):
    machine.smartssd()
    machine.nvme("pci0000:00/0000:00:1d.0/0000:04:00.0", "nvme0")
    machine.mount("nvme4n1", tmp_path / "data")
    machine.mount("nvme0n1", tmp_path / "data/other")
    card = machine.cards()[0]
    below = tmp_path / "data/below"
    below.mkdir()
    (tmp_path / "link").symlink_to(below)
    assert card.drive_contains(below, machine.system)
    assert card.drive_contains(tmp_path / "link", machine.system)
    assert not card.drive_contains(tmp_path / "data/other", machine.system)
    assert not card.drive_contains(tmp_path, machine.system)
    machine.mount("nvme0n1", tmp_path / "data")  # hides the earlier mount
    assert not card.drive_contains(below, machine.system)


# ---- peer to peer --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "state", "help"),
    [
        ("bar", "enabled", None),
        ("disabled", "disabled", "xbutil configure --p2p enable --device 0000:d8:00.1"),
        ("no iomem", "no iomem", "reboot warm"),
        ("no bar", "not supported", "flash one that has"),
        (None, "unknown", None),
    ],
)
def test_p2p_states(machine, tmp_path, window, state, help):
    machine.smartssd(p2p=window)
    machine.mount("nvme4n1", tmp_path / "data")
    (card,) = machine.cards()
    assert card.p2p == state
    assert [help in w for w in card.warnings] == ([True] if help else [])
    assert card.store_directory() == tmp_path / "data"  # still works, through the host


@pytest.mark.parametrize(
    ("groups", "types", "warning"),
    [
        ((None, None), {}, None),
        ((11, 11), {"g11": "identity"}, None),
        ((11, 11), {"g11": "DMA"}, r"the IOMMU translates \(group 11 is DMA\); boot with iommu=pt"),
        (
            (11, 12),
            {"g11": "DMA-FQ", "g12": "identity"},
            r"group 11 is DMA-FQ",
        ),  # only the drive's group matters: the drive does the transfers
        ((11, 12), {"g11": "identity", "g12": "identity"}, r"isolates its ports \(ACS; IOMMU groups 12, 11\)"),
    ],
)
def test_what_leads_p2p_through_the_host(machine, groups, types, warning):
    machine.iommu(**types)
    machine.smartssd(groups=groups)
    (card,) = machine.cards()
    if warning is None:
        assert card.warnings == ()
    else:
        assert len(card.warnings) == 1
        assert re.fullmatch(f"P2P goes through the host: .*{warning}.*", card.warnings[0])


# ---- pyxrt ---------------------------------------------------------------------------

PYXRT = '''
"""With the names and signatures of XRT's pybind11 module, as far as they are used."""
import enum, json
CARDS = {cards!r}
class xrt_info_device(enum.Enum):
    bdf, name, platform = range(3)
class uuid:
    def __init__(self, text): self._text = text
    def to_string(self): return self._text
class device:
    def __init__(self, index):
        if not 0 <= index < len(CARDS):
            raise RuntimeError(f"Could not open device with index '{{index}}'")
        self._bdf = CARDS[index]
    def get_info(self, key):
        print("[XRT] WARNING: something to say")
        if key is xrt_info_device.platform:
            {platform}
            controller = {{"card_mgmt_controller": {{"serial_number": "SN" + self._bdf}}}}
            return json.dumps({{"platforms": [{{"static_region": {{}}, "controller": controller}}]}})
        return self._bdf if key is xrt_info_device.bdf else "shell_of_" + self._bdf
    def get_xclbin_uuid(self): return uuid("0D9F2C11-7C3F-4D34-9B5E-0C9A5E5D2A11")
'''


@pytest.fixture
def pyxrt(tmp_path, monkeypatch):
    """Return a function that installs a module pyxrt with the given source."""

    def install(source):
        (tmp_path / "python").mkdir()
        (tmp_path / "python/pyxrt.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "python"))

    return install


def test_pyxrt_fills_in_what_sysfs_lacks(machine, pyxrt):
    name = machine.smartssd(nvme=None)
    (machine.system.sysfs / f"bus/pci/devices/{name}/rom.u.2097152/VBNV").unlink()
    pyxrt(PYXRT.format(cards=[name], platform=""))
    told = ask_pyxrt()
    (card,) = machine.cards(told)
    assert card.shell == f"shell_of_{name}"
    assert card.serial == f"SN{name}"
    assert card.xclbin_uuid == "0d9f2c11-7c3f-4d34-9b5e-0c9a5e5d2a11"
    assert card.warnings == ()


def test_pyxrt_of_another_version(machine, pyxrt):
    """It numbers cards in reverse, and lacks some facts: the others are used, and a warning tells the difference."""
    names = [machine.smartssd(bus, f"nvme{i}", render=132 + i) for i, bus in enumerate(BUSES[:2])]
    pyxrt(PYXRT.format(cards=names[::-1], platform="raise RuntimeError('no such query')"))
    found = machine.cards(ask_pyxrt())
    assert [c.bdf for c in found] == names
    assert found[0].warnings == (f"XRT itself counts this card as 1: name it xrt:{names[0]}",)
    assert found[0].serial == "S4NVME0"


@pytest.mark.parametrize(
    "source",
    [
        "raise ImportError('libxrt_coreutil.so.2: cannot open shared object file')",
        "import os; os.abort()",
        "import sys; sys.exit(0)",
        "print('not what was asked'); raise SystemExit",
        "device = None",
        "",
    ],
)
def test_a_broken_pyxrt_does_no_harm(machine, pyxrt, source):
    machine.smartssd()
    pyxrt(source)
    assert ask_pyxrt() == {}
    assert machine.cards(ask_pyxrt())[0].shell == SHELL


def test_a_pyxrt_that_hangs_is_not_waited_for(pyxrt):
    pyxrt("import time; time.sleep(300)")
    start = time.monotonic()
    assert ask_pyxrt(seconds=0.5) == {}
    assert time.monotonic() - start < 120


def test_training_never_asks_pyxrt(machine, monkeypatch):
    machine.smartssd()
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert machine.find("0").index == 0


# ---- emulation -----------------------------------------------------------------------


def test_emulated_cards(tmp_path, monkeypatch):
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        (drive / "below").mkdir(parents=True)
    monkeypatch.setenv("XCL_EMULATION_MODE", "sw_emu")
    monkeypatch.setenv("CSD_OPTIM_EMULATED_DRIVES", os.pathsep.join(map(str, drives)))
    assert [c.store_directory() for c in cards()] == drives
    card = find("1")
    assert (card.name, card.problems, card.warnings) == ("1", (), ())
    assert card.drive_contains(drives[1] / "below")
    assert card.drive_contains(tmp_path)  # any directory counts as on the drive
    for name in ("2", "0000:d8:00.1"):
        with pytest.raises(CSDValueError, match="the emulation has xrt:0, xrt:1"):
            find(name)


def test_an_emulation_without_drives(monkeypatch):
    monkeypatch.setenv("XCL_EMULATION_MODE", "sw_emu")
    monkeypatch.delenv("CSD_OPTIM_EMULATED_DRIVES", raising=False)
    with pytest.raises(CSDUnavailableError, match="run it under `csd-optim emu"):
        cards()
