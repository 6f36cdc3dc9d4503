"""CSDAdam on SmartSSDs: the real XRT in software emulation, and the real kernels compiled by g++.

XRT may kill its whole process group, so everything here runs in separate sessions, as with `csd-optim emu`.
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from support.cards import PRELUDE, SUITES, emulated_python, needs_xrt, script
from support.forked import running

from csd_optim import CSDAdam, CSDUnavailableError
from csd_optim.checkpoint.verify import verify
from csd_optim.devices.xclbin import write_emulated

ROOT = Path(__file__).parents[2]


# ---- the whole optimizer suite ---------------------------------------------------------


@needs_xrt
@pytest.mark.parametrize(
    "suite", [pytest.param(suite, marks=[pytest.mark.ci] * (suite != "adamw")) for suite in SUITES]
)
def test_the_suite_on_cards(suites, suite):
    """All tests with the fixture `backend` of conftest.py pass on cards too."""
    out, status = suites.result(suite)
    print(out[-3000:])  # the summary, shown by -rP
    assert status == 0, out
    assert re.search(r"\d+ passed", out)


@needs_xrt
@pytest.mark.parametrize("cards", [1, 3])
def test_twenty_steps_give_the_bits_of_a_file(cards):
    script(
        """
        runs = []
        for devices in ["file:"] * int(sys.argv[1]), [f"xrt:{i}" for i in range(int(sys.argv[1]))]:
            net = model()
            with CSDAdam(net.parameters(), lr=1e-2, devices=devices, tile_size=1024) as opt:
                train(net, opt, range(20))
                runs.append(bits(net, opt))
        same(*runs)
        """,
        cards,
        cards=cards,
    )


@needs_xrt
def test_8_bit_states_have_the_bits_of_a_file():
    """Also after the user sets a parameter or edits a state, for which the card gets new codes."""
    script(
        """
        for options in {}, {"amsgrad": True}, {"topk": 0.05}:
            runs = []
            for devices in ["file:", "file:"], ["xrt:0?scratch=1", "xrt:1?scratch=1"]:
                net = model()
                with CSDAdam(net.parameters(), lr=1e-2, devices=devices, state_dtype="8bit", **options) as opt:
                    train(net, opt, range(3))
                    opt.state[net[0].weight]["exp_avg"].mul_(0.5)
                    with torch.no_grad():
                        net[2].weight[3:5].fill_(0.25)
                        net[0].weight[7].fill_(0.25)
                    train(net, opt, range(3, 6))
                    runs.append(bits(net, opt))
            same(*runs)
        """,
        cards=2,
    )


# ---- durable -----------------------------------------------------------------------------


@needs_xrt
def test_a_store_is_the_same_whoever_made_it(tmp_path):
    """Trained by a card, then by the CPU on the same file, then by the card again: the same bits as in a single run."""
    script(
        """
        places = [f"xrt:0?nvme={sys.argv[1]}", sys.argv[1], f"xrt:0?nvme={sys.argv[1]}"]
        for i, device in enumerate(places):
            net = model()
            with CSDAdam(net.parameters(), lr=1e-2, devices=[device], resume=i > 0) as opt:
                assert opt.committed_step == 5 * i
                train(net, opt, range(5 * i, 5 * i + 5))
                last = bits(net, opt)
        net = model()
        with CSDAdam(net.parameters(), lr=1e-2, devices=["file:"]) as opt:
            train(net, opt, range(15))
            same(last, bits(net, opt))
        """,
        tmp_path / "csd",
    )


@needs_xrt
def test_the_drive_of_a_card_is_found(tmp_path):
    """Without `nvme=` a store is durable, on the card's own drive."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    text = """
        net = model()
        with CSDAdam(net.parameters(), devices=["xrt:0", "xrt:1"]) as opt:
            train(net, opt, range(3))
        """
    script(text, cards=2, drives=[tmp_path / "a", tmp_path / "b"])
    state = CSDAdam.load([tmp_path / "a", tmp_path / "b"])
    assert [float(entry["step"]) for entry in state["state"].values()] == [3] * 4


@needs_xrt
def test_snapshots():
    script(
        """
        net = model()
        opt = CSDAdam(net.parameters(), lr=1e-2, devices=["xrt:0", "xrt:1"])
        train(net, opt, range(3))
        opt.save("snapshot", wait=False)
        train(net, opt, range(3, 6))
        last = bits(net, opt)
        opt.close()
        assert all(float(entry["step"]) == 3 for entry in CSDAdam.load("snapshot")["state"].values())
        again = model()
        places = [f"xrt:{i}?nvme=snapshot/device-{i}" for i in range(2)]
        with CSDAdam(again.parameters(), lr=1e-2, devices=places, resume=True) as opt:
            train(again, opt, range(3, 6))
            same(last, bits(again, opt))
        """,
        cards=2,
    )


@pytest.mark.ci
@needs_xrt
def test_the_demo(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the demo draws: pip install csd_optim[bench]")
    monkeypatch.chdir(ROOT)
    options = ["--quick", "--json", "--cards", "--devices=2", "--compute=float32", f"--out={tmp_path}"]
    done = emulated_python(running("bench.demo"), *options, cards=2)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "2 SmartSSDs, emulated by the Xilinx runtime" in done.stderr
    for name, away in (("csdadam", 1e-3), ("csdadam_8bit", 1e-2)):
        devices = report["optimizers"][name]["devices"]
        assert [d["device"] for d in devices] == ["xrt:0?scratch=1", "xrt:1?scratch=1"]
        for row in report["rows"]:
            assert abs(row["loss"][name] - row["loss"]["adamw"]) < away


# ---- failures: the step is undone, and the store is at the step before --------------------

FAULT = """
place, error, says = sys.argv[1:4]
net = model()
opt = CSDAdam(net.parameters(), lr=1e-2, devices=[f"xrt:0?nvme={place}&timeout=1.5"], tile_size=1024)
failed = None
for i in range(10):
    before = [p.detach().clone() for p in net.parameters()]
    try:
        train(net, opt, [i])
    except CSDError as e:
        failed = e
        break
assert type(failed).__name__ == error, failed
assert says in str(failed) and place in str(failed) and "The step was undone" in str(failed), failed
same(before, [p.detach() for p in net.parameters()])
print(i, flush=True)
try:
    opt.step()
    raise SystemExit("the card is well again")
except CSDError as e:
    assert says in str(e), e
opt.close()
"""


@pytest.mark.ci
@needs_xrt
@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("hang:14", "CSDUnavailableError", "has not come to an end"),
        ("lost:14", "CSDUnavailableError", "dropped off the bus"),
        ("kill:14", "CSDUnavailableError", "has not"),
    ],
)
def test_a_card_that_fails(tmp_path, fault, error, says):
    """A kernel that hangs, a card that drops off the bus, a device process that is killed."""
    place = tmp_path / "csd"
    whole = int(script(FAULT, place, error, says, fault=fault).split()[-1])
    assert 1 <= whole < 10
    # The store is at the last completed step, from which the CPU continues as if nothing had happened.
    script(
        """
        place, whole = sys.argv[1], int(sys.argv[2])
        runs = []
        for devices, first, options in ([place], whole, {"resume": True}), (["file:"], 0, {}):
            net = model()
            with CSDAdam(net.parameters(), lr=1e-2, devices=devices, **options) as opt:
                assert opt.committed_step == first
                train(net, opt, range(first, 12))
                runs.append(bits(net, opt))
        same(*runs)
        """,
        place,
        whole,
    )


@needs_xrt
def test_memory_that_loses_a_bit(tmp_path):
    """A flipped bit between kernel and drive: the next step finds it and is undone, and a resume is refused."""
    place = tmp_path / "csd"
    whole = int(script(FAULT, place, "CSDStoreError", "is not what was written there", fault="garble:14").split()[-1])
    assert whole >= 1
    (damage,) = verify([place])[0].damage
    assert re.search(r"of tile \d+ is damaged: elements \d+ to \d+ of ", str(damage)), damage
    script(
        """
        try:
            CSDAdam(model().parameters(), devices=[sys.argv[1]], resume=True)
            raise SystemExit("not refused")
        except CSDStoreError as e:
            assert sys.argv[2] in str(e), e
        """,
        place,
        damage,
    )


@needs_xrt
def test_parameters_that_lose_a_bit(tmp_path):
    """A flipped bit between kernel and host: the step is undone, and the next one succeeds."""
    out = script(
        """
        runs = []
        for devices in f"xrt:0?nvme={sys.argv[1]}", "file:":
            net = model()
            with CSDAdam(net.parameters(), lr=1e-2, devices=[devices]) as opt:
                for i in range(12):
                    before = [p.detach().clone() for p in net.parameters()]
                    try:
                        train(net, opt, [i])
                    except CSDError as e:
                        print(e)
                        same(before, [p.detach() for p in net.parameters()])
                        opt.step()  # with the gradients that there are
                        opt.zero_grad()
                runs.append(bits(net, opt))
        same(*runs)
        """,
        tmp_path / "csd",
        fault="params:14",
    )
    (said,) = out.splitlines()
    assert "the parameters that came from it are not those that its kernel wrote" in said
    assert "The step was undone" in said


@needs_xrt
def test_one_of_three_cards_fails(tmp_path):
    text = FAULT.replace(
        'devices=[f"xrt:0?nvme={place}&timeout=1.5"]',
        'devices=[f"xrt:{i}?nvme={place}{i}&timeout=1.5" for i in range(3)]',
    )
    script(text, tmp_path / "csd", "CSDUnavailableError", "has not come to an end", cards=3, fault="hang:7@1")


@needs_xrt
def test_without_p2p_the_state_bounces_through_the_host(tmp_path):
    """It also warns once. `p2p=1` raises instead, and `p2p=0` does not even try P2P."""
    text = """
        import warnings
        runs = []
        for devices in ["file:"], ["xrt:0"], ["xrt:0?p2p=0&scratch=1"]:
            net = model()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with CSDAdam(net.parameters(), lr=1e-2, devices=devices, tile_size=1024) as opt:
                    train(net, opt, range(5))
                    opt.state[net[2].bias]["exp_avg"].add_(1)  # a tile that begins with what the windows show
                    train(net, opt, range(5, 10))
                    runs.append(bits(net, opt))
            said = [str(w.message) for w in caught]
            assert len(said) == (devices == ["xrt:0"]), said
            assert all("its drive cannot reach its memory" in text for text in said), said
        same(runs[0], runs[1])
        same(runs[0], runs[2])
        try:
            CSDAdam(net.parameters(), devices=["xrt:0?p2p=1&scratch=1"])
            raise SystemExit("not refused")
        except CSDUnavailableError as e:
            assert "peer-to-peer" in str(e), e
        """
    script(text, fault="nop2p")


@needs_xrt
def test_p2p_that_is_there_but_fails(tmp_path):
    """If the drive's transfers to the card fail, the state goes through the host too."""
    script(
        """
        import os, warnings
        from csd_optim import bindings
        from csd_optim.devices.xclbin import find_kernels
        program = find_kernels()
        card = bindings.card_open("0", program.path, program.kernels, 30)
        assert bindings.card_has_p2p(card)
        fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)  # it cannot be read
        bindings.card_try_p2p(card, fd, 0, "0")
        assert not bindings.card_has_p2p(card)
        net = model()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with CSDAdam(net.parameters(), lr=1e-2, devices=["xrt:0"]) as opt:
                train(net, opt, range(3))
                assert opt.stats()["devices"][0]["p2p"] is False
        assert "its drive cannot reach its memory" in str(caught[0].message), caught
        bindings.card_close(card, "0")
        """,
        tmp_path / "file",
    )


@needs_xrt
def test_programs_that_are_not_ours(tmp_path):
    """A missing xclbin, a file that is none, one without our kernel: refused before the optimizer creates anything."""
    (tmp_path / "none.xclbin").write_bytes(b"nothing" * 100)
    out = script(
        """
        from pathlib import Path
        from csd_optim.devices.xclbin import KERNELS, write_emulated
        here = Path(sys.argv[1])
        other = {"somebody_elses": KERNELS["csd_adamw_update"]}
        write_emulated(here / "other.xclbin", "xilinx_u2_gen3x4_xdma_emulated", 2 << 30, other)
        for name in "missing", "none", "other":
            try:
                CSDAdam(model().parameters(), devices=[f"xrt:0?nvme={here}/csd&xclbin={here}/{name}.xclbin"])
                raise SystemExit("not refused")
            except CSDUnavailableError as e:
                print(e)
        """,
        tmp_path,
    )
    missing, none, other = out.splitlines()
    assert "missing.xclbin: No such file" in missing
    assert "none.xclbin is no xclbin" in none
    assert "has no kernel of ours; it has somebody_elses" in other
    assert not (tmp_path / "csd").exists()


@needs_xrt
def test_wrong_names_of_cards():
    script(
        """
        for devices, says in (
            (["xrt:1"], "there is no such card"),
            (["xrt:0000:65:00.1"], "there is no such card"),
            (["xrt:0?scratch=1", "xrt:00?scratch=1"], "card 0 is named twice"),
        ):
            try:
                CSDAdam(model().parameters(), devices=devices)
                raise SystemExit("not refused")
            except ValueError as e:
                assert says in str(e), e
        """
    )


def test_no_card():
    with pytest.raises(CSDUnavailableError, match="there is no Xilinx card on the PCIe bus; without one, run it under"):
        CSDAdam([torch.nn.Parameter(torch.zeros(3))], devices=["xrt:0"])


# A fake XRT library that fails to load the xclbin, as a card's driver would, with a given errno.
REFUSES = """
#include <errno.h>
#include <stdlib.h>
void *xrtDeviceOpen(unsigned i) { return malloc(1); }
int xrtDeviceLoadXclbinFile(void *d, const char *p) { errno = atoi(getenv("REFUSES_WITH")); return -1; }
int xrtDeviceClose(void *d) { free(d); return 0; }
#define OTHER(name) void *name(void) { abort(); }
OTHER(xrtDeviceOpenByBDF) OTHER(xrtDeviceGetXclbinUUID) OTHER(xrtPLKernelOpen) OTHER(xrtKernelClose)
OTHER(xrtKernelArgGroupId) OTHER(xrtBOAlloc) OTHER(xrtBOFree) OTHER(xrtBOMap) OTHER(xrtBOSync) OTHER(xrtRunOpen)
OTHER(xrtRunClose) OTHER(xrtRunSetArg) OTHER(xrtRunStart) OTHER(xrtRunState)
"""


REFUSALS = {
    "no library": "the Xilinx runtime (XRT) was not found",
    "too old": "this XRT has no function xrtDeviceOpen",
    errno.EKEYREJECTED: "its shell takes signed files only",
    errno.EBUSY: "another process uses other kernels on it",
    errno.EINVAL: "it has to be built for the card's shell",
    errno.EACCES: "Permission denied",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """The errors for all REFUSALS: one interpreter, started with the library path, forks a child for each."""
    directory = tmp_path_factory.mktemp("refused")
    write_emulated(directory / "ours.xclbin", "a_platform", 1 << 30)
    library = directory / "lib/libxrt_coreutil.so.2"
    library.parent.mkdir()
    (directory / "none").write_bytes(b"no library")
    for name, source in ("old", "int nothing;"), ("refuses", REFUSES):
        (directory / f"{name}.c").write_text(source)
        command = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-o", directory / name, directory / f"{name}.c"]
        subprocess.run(command, check=True)
    text = """
        import os, torch._dynamo  # as the first optimizer does, for two seconds: once, not in each child
        from pathlib import Path
        library = Path(sys.argv[1])
        for refusal in sys.argv[2:]:
            child = os.fork()
            if child == 0:
                library.symlink_to({"no library": "../none", "too old": "../old"}.get(refusal, "../refuses"))
                os.environ["REFUSES_WITH"] = refusal
                try:
                    CSDAdam(model().parameters(), devices=["xrt:0"])
                except CSDUnavailableError as e:
                    print(f"{refusal}: {e}", flush=True)
                os._exit(0)
            os.waitpid(child, 0)
            library.unlink()
        """
    environment = os.environ | {
        "XCL_EMULATION_MODE": "sw_emu",
        "CSD_OPTIM_EMULATED_DRIVES": str(directory),
        "CSD_OPTIM_XCLBIN": str(directory / "ours.xclbin"),
        "XILINX_XRT": str(directory),
        "LD_LIBRARY_PATH": str(library.parent),
    }
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(text), library, *map(str, REFUSALS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(directory.glob("*.store"))
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.ci
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_runtime_that_refuses(refused, refusal):
    """No XRT, a version that is too old, an unsigned xclbin, other kernels, the wrong shell, no permission."""
    assert REFUSALS[refusal] in refused[str(refusal)]
    assert "card 0" in refused[str(refusal)]


@needs_xrt
def test_two_passes_over_a_tile_are_refused(tmp_path):
    """No xclbin has kernels for them. The states stay as they are, and steps of one pass go on."""
    script(
        """
        from support.two_passes import SHAPES, TwoPasses, gradients
        with TwoPasses(["xrt:0?scratch=1"]) as ours:
            before = ours.image()
            try:
                ours.begin(gradients(SHAPES, 0))
                raise SystemExit("not refused")
            except ValueError as e:
                assert "need kernels for CSD_MUON_MOMENTUM and CSD_MUON_APPLY, on device 0 (xrt:0" in str(e), e
            same(ours.image(), before)
        """
    )


@needs_xrt
def test_larger_tiles_that_do_not_fit_into_the_card(tmp_path):
    """A group that joins later is refused with the card's name and a remedy; the optimizer continues without it."""
    script(
        """
        first, second = torch.nn.Parameter(torch.ones(5000)), torch.nn.Parameter(torch.ones(16 << 20))
        opt = CSDAdam([first], devices=["xrt:0?scratch=1&buffers=180"])  # of 12 MiB: 2 GiB, all that it has
        first.grad = torch.ones_like(first)
        opt.step()
        opt.add_param_group({"params": [second]})
        second.grad = torch.zeros_like(second)
        for _ in range(2):
            try:
                opt.step()
                raise SystemExit("it fits")
            except CSDUnavailableError as e:
                assert "device 0 (xrt:0" in str(e) and "no room" in str(e) and "fewer buffers" in str(e), e
        second.grad = None
        opt.step()
        assert opt.state[first]["step"] == 2
        opt.close()
        """
    )


@needs_xrt
def test_forked(tmp_path):
    """XRT does not survive a fork: a child gets an error and can exit in any way; the parent continues."""
    script(
        """
        import os
        net = model()
        opt = CSDAdam(net.parameters(), lr=1e-2, devices=["xrt:0"])
        train(net, opt, range(3))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                CSDAdam(model().parameters(), devices=["xrt:0?scratch=1"])
            except CSDUnavailableError as e:
                code = 0 if "forked" in str(e) else 2
            sys.exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, status
        train(net, opt, range(3, 6))
        opt.close()
        """
    )


@needs_xrt
def test_several_optimizers_share_a_card():
    script(
        """
        nets = [model() for _ in range(3)]
        opts = [CSDAdam(net.parameters(), lr=1e-2, devices=["xrt:0?scratch=1"]) for net in nets]
        for i in range(5):
            for net, opt in zip(nets, opts):
                train(net, opt, [i])
        same(bits(nets[0], opts[0]), bits(nets[2], opts[2]))
        opts.pop(1).close()
        train(nets[0], opts[0], [5])
        train(nets[2], opts[1], [5])
        same(bits(nets[0], opts[0]), bits(nets[2], opts[1]))
        """
    )


@needs_xrt
def test_nonfinite_gradients_are_counted():
    script(
        """
        for device in "xrt:0?scratch=1", "file:", "ram:":
            p = torch.nn.Parameter(torch.zeros(5000, dtype=torch.float16))
            opt = CSDAdam([p], devices=[device], tile_size=1024)
            p.grad = torch.zeros_like(p)
            bad = [float("inf"), float("nan"), -float("inf"), 65504]
            p.grad[[0, 1023, 1024, 4999]] = torch.tensor(bad, dtype=p.dtype)
            opt.step()
            assert opt.stats()["nonfinite_grads"] == 3, (device, opt.stats())
            opt.close()
        """
    )


@pytest.mark.ci
@needs_xrt
@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_is_killed_goes_on(tmp_path, seed):
    """After SIGKILL at some moment of training on two cards, a resume gives the bits of an uninterrupted run."""
    text = """
        import os, random, signal, threading
        place, seed = sys.argv[1], int(sys.argv[2])
        devices = [f"xrt:{i}?nvme={place}{i}" for i in range(2)]
        net = model()
        opt = CSDAdam(net.parameters(), lr=1e-2, devices=devices, tile_size=1024)
        train(net, opt, range(2))
        threading.Timer(random.Random(seed).random(), os.kill, (os.getpid(), signal.SIGKILL)).start()
        train(net, opt, range(2, 100_000))
        """
    done = emulated_python(PRELUDE + textwrap.dedent(text), tmp_path / "csd", seed, cards=2)
    assert done.returncode == 128 + signal.SIGKILL
    script(
        """
        place, runs = sys.argv[1], []
        on_cards = [f"xrt:{i}?nvme={place}{i}" for i in range(2)]
        for devices, options in (on_cards, {"resume": True}), (["ram:"], {}):
            net = model()
            with CSDAdam(net.parameters(), lr=1e-2, devices=devices, **options) as opt:
                whole = opt.committed_step or whole
                train(net, opt, range(opt.committed_step, whole + 3))
                runs.append(bits(net, opt))
        assert whole >= 1
        same(*runs)
        """,
        tmp_path / "csd",
        cards=2,
    )


# ---- the command line ----------------------------------------------------------------------


def command_line(*arguments, **options):
    done = emulated_python("from csd_optim.cli.commands import main; main()", *arguments, "--json", **options)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@needs_xrt
def test_devices_are_all_cards_and_what_they_are():
    status, shown = command_line("devices", cards=2)
    assert (status, [d["device"] for d in shown["devices"]]) == (0, [".", "xrt:0", "xrt:1"])
    for i, device in enumerate(shown["devices"][1:]):
        assert (device["card"]["index"], device["card"]["emulated"], device["card"]["p2p"]) == (i, True, "enabled")
        assert device["xclbin"]["mode"] == "sw_emu"
        assert device["directory"] == device["card"]["directory"]
        assert device["store"] is None
        assert device["room_for_params"] > 0


@pytest.mark.ci
@needs_xrt
@pytest.mark.parametrize(
    ("device", "fault", "status", "said"),
    [
        ("xrt:0", "", 0, None),
        ("xrt:0?p2p=0", "", 0, None),
        ("xrt:0", "nop2p", 0, "warning"),
        ("xrt:0?p2p=0", "nop2p", 0, None),
        ("xrt:0?p2p=1", "nop2p", 1, "problem"),
    ],
)
def test_probe(device, fault, status, said):
    exit_status, shown = command_line("devices", "--probe", device, fault=fault)
    [entry] = shown["devices"]
    assert exit_status == status
    assert {"warning", "problem"} & set(entry) == ({said} if said else set())
    if said:
        assert "its drive cannot reach its memory" in entry[said]
    speed = entry["card_speed"]
    direct = ("drive_to_card", "card_to_drive")
    assert all((speed[name] > 0) == (device == "xrt:0" and not fault) for name in direct)
    assert all(speed[name] > 0 for name in ("to_card", "from_card", "kernel"))


@pytest.mark.ci
@needs_xrt
def test_bench():
    status, result = command_line("bench", "xrt:0", "file:", "--params", "200000")
    assert status == 0
    assert result["emulated"]
    assert result["largest_relative_difference"] < 1e-6
    assert [d["p2p"] for d in result["devices"]] == [True, None]
    assert sum(d["params"] for d in result["devices"]) == 200_000
