"""XRT's software emulation: the real XRT, with our process in place of each card; and xclbin files.

The programs that drive XRT are in emulated.py; each runs in its own process.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from csd_optim import bindings
from csd_optim.devices import emulation
from csd_optim.devices.xclbin import KERNELS, Kernel, read_xclbin, write_emulated
from csd_optim.errors import CSDStoreError, CSDUnavailableError, CSDValueError

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("emulated.py")
LANES = 16  # fp32 values in a word

try:
    LIBRARIES = emulation.find_xrt()
except CSDUnavailableError as e:
    LIBRARIES = None
    NO_XRT = str(e)
needs_xrt = pytest.mark.skipif(LIBRARIES is None, reason=LIBRARIES is None and NO_XRT)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Gives the test its own temporary directory and sockets; asserts at the end that no file or process is left."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    user = f"csd_optim_test_{os.getpid()}"
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("USER", user)
    monkeypatch.delenv("CSD_OPTIM_EMULATOR_FAULT", raising=False)
    yield temporary
    sockets = Path("/tmp", user)
    left = list(sockets.glob("*"))
    if sockets.is_dir() and not left:
        sockets.rmdir()
    assert left == []
    assert list(temporary.iterdir()) == []
    assert processes_of(user) == []


def processes_of(user):
    """Return the processes with this USER that are left after some seconds; a card needs time to see its host end."""
    deadline = time.monotonic() + 5
    while True:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if int(process.name) != os.getpid() and f"USER={user}".encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_bytes())
            except OSError:
                continue  # it has ended, or belongs to another user
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def program(name, *arguments, devices=1, **options):
    """Runs a program of emulated.py; returns its exit status."""
    command = [sys.executable, str(PROGRAMS), name, *map(str, arguments)]
    return emulation.run(command, devices, timeout=120, **options)


# ---- XRT and the cards -----------------------------------------------------------------


@needs_xrt
@pytest.mark.parametrize("devices", [1, 3])
def test_a_tile_is_updated_beside_its_drive(devices, places, tmp_path, capfd):
    """From a file by direct I/O into P2P memory, through the kernel and back, with the same bits as on the CPU."""
    n_words, elems = 320, 5000
    drives = [tmp_path / f"drive{i}" for i in range(devices)]
    tiles, grads = [], []
    for i, drive in enumerate(drives):
        tile = torch.randn(3, n_words * LANES)
        tile[2].abs_()
        grads.append(torch.randn(elems).half())
        drive.mkdir()
        (drive / "tile").write_bytes(tile.numpy().tobytes())
        np.save(tmp_path / f"grad{i}.npy", grads[i].numpy())
        tiles.append(tile)
    assert program("update", tmp_path, n_words, elems, devices=devices, drives=drives) == 0
    out = capfd.readouterr().out
    assert out.count("direct I/O") == devices
    hyper = np.array((0, (0.999, 0.9, 0.1, 0.999, 0.001, 0.01, 3.0, 1e-8, 0.5)), bindings.HYPER)
    for i, (tile, grad) in enumerate(zip(tiles, grads, strict=True)):
        before = [bindings.crc32c(section.numpy().tobytes()) for section in tile]
        param = torch.empty(elems, dtype=torch.float16)
        bindings.update(hyper, bindings.isas()[-1], grad, [section[:elems] for section in tile], param)
        # The tile fills its pages, so the file has no padding.
        assert (drives[i] / "tile").read_bytes() == tile.numpy().tobytes()
        assert np.array_equal(np.load(tmp_path / f"param{i}.npy"), param.view(torch.int16).numpy().view("u2"))
        report = np.load(tmp_path / f"report{i}.npy")
        after = [bindings.crc32c(section.numpy().tobytes()) for section in tile]
        words = param.numpy().tobytes().ljust(-(-elems // 32) * 64, b"\0")
        assert report[:16].tolist() == [3, n_words, 0, 0, bindings.crc32c(words)] + [0] * 11
        assert report[16:].tolist() == [*before, 0, *after, 0] + [0] * 8


@pytest.mark.ci
@needs_xrt
@pytest.mark.parametrize(
    ("name", "devices"),
    [("sync", 1), ("queue", 1), ("out_of_range", 1), ("threads", 3), ("others", 2), ("again", 1), ("child", 1)],
)
def test_cards_do_what_cards_do(name, devices, places):
    assert program(name, devices=devices) == 0


@pytest.mark.ci
@needs_xrt
@pytest.mark.parametrize(
    ("name", "fault", "status", "said"),
    [
        ("hang", "hang:2", 0, ""),
        ("lost", "lost:2", 0, ""),
        ("garble", "garble:2", 0, ""),
        ("no_p2p", "nop2p", 0, ""),
        ("kill", "kill:2", 128 + signal.SIGTERM, "exited unexpectedly"),
        ("kill_kept", "kill:2", 0, ""),
        ("astray", "", 0, "csd_adamw_update went out of bounds"),
        ("sync", "hang:2@1", 0, ""),  # a fault of another card
        ("not_a_fault", "hang", 0, "CSD_OPTIM_EMULATOR_FAULT is hang:N"),
    ],
)
def test_faults(name, fault, status, said, places, monkeypatch, capfd):
    monkeypatch.setenv("CSD_OPTIM_EMULATOR_FAULT", fault)
    assert program(name) == status
    assert said in capfd.readouterr().err


@needs_xrt
def test_what_else_is_set_up_does_not_matter(places, tmp_path, monkeypatch, capfd):
    for name in ("XILINX_VITIS", "XILINX_HLS", "XILINX_VIVADO", "XILINX_OPENCL", "XILINX_SDX"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "lib/lnx64.o").mkdir(parents=True)
    (tmp_path / "lib/lnx64.o/libstdc++.so.6").write_text("an old one")  # comes first on XRT's library path
    (tmp_path / "xrt.ini").write_text("[Emulation]\nno_such_option=true\n")  # in the current directory
    assert program("sync") == 0
    assert capfd.readouterr() == ("", "")


@needs_xrt
def test_programs_that_are_not_ours(places, tmp_path, capfd):
    other = tmp_path / "other.xclbin"
    write_emulated(other, "somebody's", emulation.MEMORY_BYTES, {"somebody_elses": Kernel(("data",), ("n",))})
    assert program("other_program", other) == 0
    of_vitis = tmp_path / "vitis.xclbin"
    of_vitis.write_bytes(other.read_bytes().replace(b"somebody_elses 1800000", b"\x7fELF: a shared object."))
    assert program("not_a_program", of_vitis) == 0
    assert "was not made for this emulator" in capfd.readouterr().err


# ---- the command ---------------------------------------------------------------------


def python(code, **options):
    return emulation.run([sys.executable, "-c", code], **options)


@needs_xrt
def test_a_command_and_its_exit_status(places, capfd):
    assert python("print(input()); raise SystemExit(7)") == 1  # fails: stdin is passed on, and is empty here
    capfd.readouterr()
    assert python("import sys; print('out'); print('err', file=sys.stderr); raise SystemExit(7)") == 7
    assert capfd.readouterr() == ("out\n", "err\n")
    assert python("import os, signal; os.kill(os.getpid(), signal.SIGUSR2)") == 128 + signal.SIGUSR2
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        emulation.run(["no-such-command"])


@needs_xrt
def test_what_a_command_leaves_behind_is_killed(places, tmp_path, monkeypatch):
    monkeypatch.setattr(emulation, "TERM_SECONDS", 0.3)
    began = time.monotonic()
    assert python("import subprocess; subprocess.Popen(['sleep', '600']); raise SystemExit(3)") == 3
    assert python("import time; time.sleep(600)", timeout=0.2) == emulation.TIMED_OUT
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('there', 'w'); time.sleep(600)"
    assert python(stubborn, timeout=2) == emulation.TIMED_OUT
    assert (tmp_path / "there").exists()
    assert time.monotonic() - began < 300


@needs_xrt
def test_environment(places, tmp_path, capfd):
    drives = [tmp_path / "first", tmp_path / "second"]
    for drive in drives:
        drive.mkdir()
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    assert python(code, drives=drives) == 0
    environment = json.loads(capfd.readouterr().out)
    assert environment["CSD_OPTIM_EMULATED_DRIVES"] == f"{drives[0]}:{drives[1]}"
    assert Path(environment["CSD_OPTIM_XCLBIN"]).parent.parent == places
    assert environment["XCL_EMULATION_MODE"] == "sw_emu"
    assert python(f"{code}; import glob; print(glob.glob({str(places)!r} + '/*/drive*'))", devices=3) == 0
    environment, found = capfd.readouterr().out.splitlines()
    assert sorted(json.loads(environment)["CSD_OPTIM_EMULATED_DRIVES"].split(":")) == sorted(eval(found))


@needs_xrt
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(number, places, tmp_path):
    code = (
        "import signal, sys, time\n"
        f"signal.signal({number}, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    command = [sys.executable, "-m", "csd_optim", "emu", "--", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(30) == 5


@needs_xrt
def test_a_signal_that_comes_early_is_passed_on_later(places, monkeypatch):
    def prepare(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return prepared(*arguments)

    prepared = emulation.prepare
    monkeypatch.setattr(emulation, "prepare", prepare)
    assert emulation.run(["sleep", "60"]) == 128 + signal.SIGTERM


@needs_xrt
@pytest.mark.parametrize("separator", [["--"], []])
def test_options_of_the_command_are_its_own(separator, places, tmp_path):
    drives = [tmp_path / "first", tmp_path / "second"]
    for drive in drives:
        drive.mkdir()
    command = [*separator, "sh", "-c", "echo $CSD_OPTIM_EMULATED_DRIVES; exit 3"]
    done = subprocess.run(
        [sys.executable, "-m", "csd_optim", "emu", "--drive", drives[0], "--drive", drives[1], *command],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, f"{drives[0]}:{drives[1]}\n", "")


@needs_xrt
def test_command_line(places, run):
    assert run("emu", "--timeout", "0.1", "--", "sleep", "60")[0] == emulation.TIMED_OUT
    assert run("emu", "no-such-command") == (127, "", "error: no-such-command: No such file or directory\n")
    assert run("emu", str(places))[0] == 126
    assert run("emu", "--devices", "2", "--drive", places, "true")[0] == 1
    assert run("emu")[0] == run("emu", "--devices", "99", "--", "true")[0] == 2


def test_wrong_arguments(tmp_path):
    (tmp_path / "drive").mkdir()
    (tmp_path / "a:b").mkdir()
    for devices, drives, text in (
        (0, None, "Invalid number of devices: 0; it is from 1 to 16"),
        (17, None, "Invalid number of devices: 17"),
        (2, [tmp_path / "drive"], "Invalid drives: 1 for 2 devices"),
        (None, [tmp_path / "nowhere"], "is no directory"),
        (None, [tmp_path / "drive", tmp_path / "drive" / ".." / "drive"], "is named twice"),
        (None, [tmp_path / "a:b"], "no ':' may be in its name"),
    ):
        with pytest.raises(CSDValueError, match=re.escape(text)):
            emulation.run(["true"], devices, drives)
    with pytest.raises(CSDValueError, match=r"Invalid command: \[\]"):
        emulation.run([])


def test_a_place_that_xrt_cannot_use(tmp_path, monkeypatch):
    (tmp_path / "a place").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a place"))
    with pytest.raises(CSDUnavailableError, match=r"a place'.*set TMPDIR"):
        emulation.run(["true"])


def test_without_xrt(monkeypatch):
    monkeypatch.setattr(emulation, "DRIVER", "libxrt_swemu_of_nobody.so.2")
    with pytest.raises(CSDUnavailableError, match="apt install libxrt1"):
        emulation.run(["true"])


# ---- the repair -------------------------------------------------------------------------


@needs_xrt
def test_the_repair_is_one_byte_or_none():
    driver = (LIBRARIES / emulation.DRIVER).read_bytes()
    repaired = emulation.repaired(driver)
    assert sum(a != b for a, b in zip(driver, repaired, strict=True)) <= 1
    assert emulation.repaired(repaired) == repaired


def test_the_jump_goes_to_where_the_address_is_stored():
    store = bytes.fromhex("48 89 83 70 06 00 00")
    broken = (
        *(b"before", store, bytes.fromhex("48 89 e8 eb d6 0f 1f 40 00 48 8b bf 70 06 00 00 e8 11 22 33 44 48 85 c0")),
        *(b"\x75\xe6", b"behind"),
    )
    driver = b"".join(broken)
    repaired = emulation.repaired(driver)
    changed = [i for i in range(len(driver)) if driver[i] != repaired[i]]
    assert changed == [driver.index(b"\x75\xe6") + 1]
    target = changed[0] + 1 + int.from_bytes(repaired[changed[0] : changed[0] + 1], "little", signed=True)
    assert repaired[target:].startswith(store)
    with pytest.raises(CSDUnavailableError, match="2 times"):
        emulation.repaired(driver + driver)
    assert emulation.repaired(b"another library") == b"another library"


# ---- programs ------------------------------------------------------------------------------


def test_an_xclbin_comes_back(tmp_path):
    path = tmp_path / "a.xclbin"
    write_emulated(path, "a_platform", 1 << 30)
    read = read_xclbin(path)
    assert (read.path, read.platform, read.mode, read.kernels) == (path, "a_platform", "sw_emu", tuple(KERNELS))
    write_emulated(tmp_path / "same", "a_platform", 1 << 30)
    write_emulated(tmp_path / "other", "a_platform", 1 << 31)
    assert read_xclbin(tmp_path / "same").uuid == read.uuid
    assert read_xclbin(tmp_path / "other").uuid != read.uuid


def test_only_what_is_needed_is_read(tmp_path):
    path = tmp_path / "large.xclbin"
    write_emulated(path, "a_platform", 1 << 30)
    os.truncate(path, 1 << 40)  # appends a hole
    assert read_xclbin(path).kernels == tuple(KERNELS)


def test_files_that_are_no_xclbin(tmp_path):
    path = tmp_path / "a.xclbin"
    write_emulated(path, "a_platform", 1 << 30)
    whole = path.read_bytes()
    for size in [*range(0, 700, 7), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CSDStoreError, match=r"cut short|is no xclbin"):
            read_xclbin(path)
    for content in (b"\x7fELF" + whole[4:], b"xclbin0\0" + whole[8:], b"text" * 1000):
        path.write_bytes(content)
        with pytest.raises(CSDStoreError, match="is no xclbin"):
            read_xclbin(path)
    for at in range(304, 456 + 40 * 5):  # a changed header byte gives one of our errors, or has no effect
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with suppress(CSDStoreError):
            read_xclbin(path)
    with pytest.raises(FileNotFoundError):
        read_xclbin(tmp_path / "nowhere")
