"""The command line: every command, its output for people and for programs, and its error messages."""

import json
import os
import subprocess
import sys

import pytest
import torch

from csd_optim import CSDAdam
from csd_optim.cli import benchmark, facts
from csd_optim.cli import commands as cli
from csd_optim.store.file import FILE_NAME, lock_owner
from csd_optim.store.report import REPORT_NAME

STEPS = 3


@pytest.fixture
def quick(monkeypatch):
    """Make speed checks small: tests check that they work, not how fast the disk is."""
    monkeypatch.setattr(facts, "PROBE_BYTES", 16 << 20)
    monkeypatch.setattr(benchmark, "UPDATER_ELEMS", 1 << 16)
    monkeypatch.setattr(benchmark, "RAW_RUNS", 1)


@pytest.fixture
def stores(tmp_path):
    """The directories of two devices that hold a model of 20 parameters after STEPS steps."""
    places = [tmp_path / "a", tmp_path / "b"]
    named = [(f"layer{i}.weight", torch.nn.Parameter(torch.randn(3, 5).bfloat16())) for i in range(19)]
    named.append(("bias", torch.nn.Parameter(torch.randn(()))))
    with CSDAdam(named, lr=1e-4, devices=places) as opt:
        for _ in range(STEPS):
            for _, p in named:
                p.grad = torch.ones_like(p)
            opt.step()
    return places


def json_of(result, command):
    code, out, _ = result
    assert code == 0
    content = json.loads(out)
    assert content["schema"] == f"csd_optim.{command}/1"
    return content


# ---- devices ---------------------------------------------------------------------


def test_devices_describes_each(run, stores, tmp_path):
    code, out, err = run("devices", stores[0], tmp_path, "ram:", "null:")
    assert (code, err) == (0, "")
    assert "direct I/O" in out
    assert f"step {STEPS}, device 0 of 2" in out
    assert "closed cleanly" in out
    assert "room for" in out
    assert "share its room" in out  # both directories are on one file system


def test_devices_json(run, stores, tmp_path, quick):
    content = json_of(run("devices", stores[1], tmp_path, "ram:", "--probe", "--json"), "devices")
    held, empty, ram = content["devices"]
    assert held["store"]["step"] == STEPS
    assert held["store"]["device"] == 1
    assert held["store"]["clean"] is True
    assert held["store"]["owner"] is None
    assert held["room_for_params"] == held["storage"]["free_bytes"] // 24
    assert isinstance(held["direct_io"], bool)
    assert empty["store"] is None
    assert all(rate > 0 for rate in held["speed"].values())
    assert len(held["speed"]) == 3
    assert ram["room_for_params"] > 0
    assert "speed" not in ram
    assert content["updater"]["isa"] in content["updater"]["isas"]
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]  # nothing is left
    assert {*os.listdir(stores[1])} == {FILE_NAME, REPORT_NAME}


def test_devices_default_to_the_environment_then_to_here(run, tmp_path, monkeypatch):
    here = json_of(run("devices", "--json"), "devices")["devices"]
    assert [d["directory"] for d in here] == [str(tmp_path)]
    monkeypatch.setenv("CSD_OPTIM_DEVICES", f"{tmp_path},ram:")
    named = json_of(run("devices", "--json"), "devices")["devices"]
    assert [d["device"] for d in named] == [str(tmp_path), "ram:"]


def test_devices_names_the_owner_of_a_store(run, tmp_path):
    p = torch.nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    with CSDAdam([p], devices=[tmp_path / "csd"]) as opt:
        opt.step()
        if lock_owner((tmp_path / "csd" / FILE_NAME).stat()) is None:
            pytest.skip("/proc/locks does not show this process's locks here")
        _, out, _ = run("devices", tmp_path / "csd")
        assert f"in use by process {os.getpid()}" in out
        _, out, _ = run("inspect", tmp_path / "csd")
        assert f"in use by process {os.getpid()}" in out
        opt.step()  # the commands did not disturb it


def test_devices_says_what_is_wrong_and_fails(run, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    code, out, _ = run("devices", tmp_path, tmp_path / "no" / "where", file)
    assert code == 1
    assert out.count("no such directory") == 2
    assert out.count("direct I/O") == 1  # the good one is described nevertheless


def test_a_directory_that_csdadam_would_make(run, tmp_path):
    content = json_of(run("devices", tmp_path / "new", "--json"), "devices")
    assert content["devices"][0]["exists"] is False
    assert not (tmp_path / "new").exists()


# ---- inspect ---------------------------------------------------------------------


def test_inspect_shows_the_store(run, stores):
    code, out, err = run("inspect", stores[0])
    assert (code, err) == (0, "")
    assert "0 of 2" in out
    assert f"{STEPS}, closed cleanly" in out
    assert "lr 0.0001" in out
    assert "3 x 5" in out
    assert "scalar" in out
    assert "bfloat16" in out
    assert "more; --all lists them" in out
    assert "layer14" not in out
    assert "layer14" in run("inspect", stores[0], "--all")[1]


def test_inspect_json(run, stores):
    held = json_of(run("inspect", stores[1] / FILE_NAME, "--json"), "inspect")
    assert (held["device"], held["devices"], held["step"], held["clean"]) == (1, 2, STEPS, True)
    assert [p["name"] for p in held["params"]] == [*(f"layer{i}.weight" for i in range(19)), "bias"]
    assert held["params"][0] == {
        "name": "layer0.weight",
        "rule": "adamw",
        "shape": [3, 5],
        "dtype": "bfloat16",
        "group": 0,
        "numel": 15,
        "step": STEPS,
    }
    assert held["total_params"] == 19 * 15 + 1
    assert held["groups"][0]["weight_decay"] == 0.01
    assert sum(held["tiles"]["in_slot"]) == held["tiles"]["count"]
    assert held["file_bytes"] == (stores[1] / FILE_NAME).stat().st_size


@pytest.mark.parametrize("what", ["missing", "empty", "other", "superblocks", "manifest"])
def test_inspect_errors(run, stores, tmp_path, what):
    file = stores[0] / FILE_NAME
    data = bytearray(file.read_bytes())
    if what == "missing":
        file.unlink()
    elif what == "empty":
        file.write_bytes(b"")
    elif what == "other":
        file.write_bytes(b"something else" * 1000)
    elif what == "superblocks":
        data[100] ^= 1
        data[4096 + 100] ^= 1
        file.write_bytes(data)
    elif what == "manifest":
        file.write_bytes(data.replace(b"layer0.weight", b"layer0.weighs"))  # in both copies
    code, out, err = run("inspect", stores[0])
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert str(stores[0]) in err
    expected = {"missing": "there is no store", "manifest": "manifest is damaged"}
    assert expected.get(what, "is no csd_optim store") in err


# ---- bench -----------------------------------------------------------------------


def test_bench_measures_and_leaves_nothing(run, stores, quick):
    before = [(p / FILE_NAME).read_bytes() for p in stores]
    result = json_of(run("bench", *stores, "ram:", "--params", "300k", "--dtype", "fp16", "--json"), "bench")
    assert result["params"] == 300_000
    assert result["largest_relative_difference"] <= 1e-6
    first, second, ram = result["devices"]
    for kind in ("read", "write", "mixed"):
        rate = second[f"{kind}_bytes_per_second"]
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
        assert f"{kind}_bytes_per_second" not in ram
    assert first["params"] + second["params"] + ram["params"] == 300_000
    assert set(result["limits"]) == {"disk", "memory"}
    assert result["ratio_to_limit"]["median"] > 0
    assert result["bytes_per_param"]["push"] == 2
    assert [(p / FILE_NAME).read_bytes() for p in stores] == before
    assert [{*os.listdir(p)} for p in stores] == [{FILE_NAME, REPORT_NAME}] * 2


def test_bench_for_people(run, tmp_path, quick):
    code, out, _ = run("bench", "--params", "1e5")
    assert code == 0
    for word in ("verified against torch.optim.AdamW", "read alone", "both at once", "Mparam/s", "ratio", "push 2.00"):
        assert word in out
    assert os.listdir(tmp_path) == []


@pytest.mark.ci
@pytest.mark.parametrize(("device", "dtype"), [("ram:", "fp32"), ("null:", "bf16"), ("file:.?block=8192", "fp32")])
def test_bench_on_every_back_end(run, device, dtype, quick):
    result = json_of(run("bench", device, "--params", "1e5", "--dtype", dtype, "--json"), "bench")
    assert (result["ratio_to_limit"] is None) == (device == "null:")


def test_bench_refuses_a_wrong_result(run, monkeypatch, quick):
    monkeypatch.setattr(benchmark, "TOLERANCE", 0.0)
    code, out, err = run("bench", "ram:", "--params", "1e5")
    assert (code, out) == (1, "")
    assert "differs from AdamW's" in err


def test_bench_interrupted_leaves_nothing(run, tmp_path, monkeypatch, quick):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "_steps", interrupt)
    code, out, err = run("bench", "--params", "1e5")
    assert (code, out) == (130, "")
    assert "interrupted" in err
    assert os.listdir(tmp_path) == []


def test_bench_refuses_what_has_no_room(run, tmp_path, quick):
    code, _, err = run("bench", tmp_path, "--params", "1e15")
    assert code == 1
    assert "try --params" in err
    code, _, err = run("bench", tmp_path / "nowhere")
    assert code == 1
    assert "no such directory" in err


# ---- all of them -------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "--dtype", "fp8"],
        ["bench", "--params", "many"],
        ["bench", "--params", "0"],
        ["bench", "--steps", "4"],
        ["inspect"],
        ["nothing"],
        ["devices", "--wrong"],
    ],
)
def test_wrong_commands_exit_with_2(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Usage" in err


@pytest.mark.parametrize("arguments", [["devices", "xyz:0"], ["bench", "xyz:0"], ["devices", ".", "."]])
def test_wrong_devices_are_one_line(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: Invalid device")


@pytest.mark.parametrize(
    ("text", "n"), [("100e6", 10**8), ("100M", 10**8), ("1.5B", 15 * 10**8), ("2k", 2000), ("7", 7)]
)
def test_numbers_of_parameters(text, n):
    assert cli.count(text) == n


@pytest.mark.ci
def test_python_m(stores):
    command = [sys.executable, "-m", "csd_optim", "inspect", str(stores[0]), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["step"] == STEPS


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
from csd_optim.cli.commands import app
names = [c.name or c.callback.__name__ for c in app.registered_commands]
for arguments in (["--version"], ["--help"], *([name, "--help"] for name in names)):
    try:
        app(arguments)
    except SystemExit as e:
        print(arguments[0], e.code, file=sys.stderr)
"""


def test_help_does_not_wait_for_torch():
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    commands = ["devices", "doctor", "inspect", "follow", "top", "verify", "export", "import", "reshard", "bench"]
    commands += ["plan", "serve", "emu"]
    assert done.stderr.splitlines() == [f"{name} 0" for name in ("--version", "--help", *commands)]
    assert done.stdout.count("Usage:") == 1 + len(commands)


def test_help_fits_a_terminal(run, monkeypatch):
    """On 80 columns no line is too long, and the list of commands has a whole sentence for each."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("--help")
    lines = out.splitlines()
    listed = lines[lines.index("Commands:") + 1 :]
    assert code == 0
    assert len(listed) == len([command for command in cli.app.registered_commands if not command.hidden])
    assert not [line for line in listed if line.endswith("...")]
    for command in listed:
        code, out, _ = run(command.split()[0], "--help")
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80


@pytest.mark.ci
def test_the_package_names_what_it_has():
    """CSDAdam is imported lazily, which is invisible to code that lists or imports the package's names."""
    script = (
        "import sys, csd_optim; assert 'torch' not in sys.modules; assert {*csd_optim.__all__} < {*dir(csd_optim)}; "
        "from csd_optim import *; assert CSDAdam.__name__ == 'CSDAdam'; assert csd_optim.__version__ in sys.argv[1]; "
        "errors = {n for n, v in vars(csd_optim.errors).items() if n.startswith('CSD')}; assert errors < {*globals()}; "
        "assert not hasattr(csd_optim, 'CSDAdadelta')"
    )
    version = subprocess.run(
        [sys.executable, "-m", "csd_optim", "--version"], capture_output=True, text=True, check=True
    )
    subprocess.run([sys.executable, "-c", script, version.stdout], check=True, timeout=120)
