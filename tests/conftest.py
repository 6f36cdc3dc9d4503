"""Fixtures: every back end, temporary directories, the command line."""

import gc
import os
import random
import shutil
import signal
import sys

import pytest
import torch
from model.automaton import Refused
from support import cards, commit_traces, emulated, far, phases, properties, served, times
from support.backends import BACKENDS, GPU, TESTS, XRT_BACKENDS, device_strings, on_cards
from support.states import assume, assumed
from support.tiers import TIERS, of_tier

from csd_optim import bindings
from csd_optim.cli import commands as cli
from csd_optim.devices.emulation import MEMORY_BYTES, PLATFORM
from csd_optim.devices.xclbin import KERNELS, kernel_for, write_emulated

# The oracle is torch's AdamW on tensors of a few thousand elements, for which intra-op threads only spin and wait for
# each other. CSDAdam has its own threads. The variable is for the interpreters that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


# ---- options, and what is run ------------------------------------------------------------


def pytest_configure(config):
    if config.getoption("--xrt"):
        os.environ["CSD_OPTIM_TEST_XRT"] = config.getoption("--xrt")
    assume(config.getoption("--state-dtype"))
    far.assume(config.getoption("--far"))
    served.assume(config.getoption("--served"))
    properties.assume(config.getoption("--tier"))
    if not config.getoption("--accelerator"):
        # A GPU changes defaults, such as where FSDP2's parameters are. In effect as CUDA is not initialized yet.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.accelerator.is_available() and not emulated.missing():
        emulated.load()
    # Tests send these signals. A shell ignores them in background processes, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.pluginmanager.register(cards.Suites(config), "suites")
    config.pluginmanager.register(
        times.Times(tier=config.getoption("--tier"), is_shown=config.getoption("--times")), "times"
    )


def pytest_addoption(parser):
    parser.addoption(
        "--xrt",
        nargs="?",
        const=",".join(XRT_BACKENDS),
        help="on cards, and only the tests that run on every back end; --xrt=xrts: on two cards alone",
    )
    parser.addoption(
        "--accelerator",
        nargs="?",
        const="late",
        metavar="SCHEDULES",
        help="only the tests on an accelerator: a real one if there is one, else an emulated one, under each of these "
        "schedules: late, side first, main first, at once, random=SEED",
    )
    parser.addoption("--state-dtype", default="fp32", help="CSDAdam's default in tests that do not set it")
    parser.addoption("--far", action="store_true", help="as if every device were on another machine: support/far.py")
    parser.addoption(
        "--served",
        type=int,
        default=0,
        metavar="N",
        help="named directories by N optimizer ranks of each trainer: support/served.py",
    )
    parser.addoption("--tier", default="ci", choices=TIERS, help="which tests: see tests/support/tiers.py")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the files in this random order")
    parser.addoption("--times", action="store_true", help="print where the time went: support/times.py")
    parser.addoption("--beyond", choices=TIERS, help="leave out what this tier runs")


def pytest_generate_tests(metafunc):
    """Parametrize `backend`: one file; three named files; memory; memory and a file; with an accelerator, its memory
    and a file. On cards: one card, and two.
    """
    if "backend" in metafunc.fixturenames:
        on = metafunc.config.getoption("--xrt")
        gpu = [GPU] if metafunc.config.getoption("--accelerator") else []
        metafunc.parametrize("backend", on.split(",") if on else [*BACKENDS, *gpu])


def pytest_collection_modifyitems(config, items):
    def is_chosen(item):
        on_every_backend = "backend" in item.fixturenames or item.get_closest_marker("cards")
        right_machine = bool(config.getoption("--accelerator")) == bool(item.get_closest_marker("accelerator"))
        return right_machine and (on_every_backend or not on_cards())

    tier, beyond = config.getoption("--tier"), config.getoption("--beyond")
    candidates = [item for item in items if is_chosen(item)]
    those = of_tier(candidates, tier) - (of_tier(candidates, beyond) if beyond else set())
    chosen = [item for item in candidates if item in those]
    if on_cards() and tier != "soak":
        chosen = cards.sample(chosen)
    if len(chosen) < len(items):
        stay = {*chosen}
        config.hook.pytest_deselected(items=[item for item in items if item not in stay])
        items[:] = chosen
    if config.getoption("--accelerator") and not torch.accelerator.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=emulated.missing()))
    if (seed := config.getoption("--shuffle")) is not None:
        files = sorted({item.path for item in items})
        random.Random(seed).shuffle(files)
        items.sort(key=lambda item: files.index(item.path))
    for item in items:
        if assumed() != "fp32" and (marker := item.get_closest_marker("fp32_states")):
            item.add_marker(pytest.mark.skip(reason=marker.args[0]))
        if served.assumed() and (marker := item.get_closest_marker("here")):
            item.add_marker(pytest.mark.skip(reason=marker.args[0]))
        if (far.assumed() or served.assumed()) and (marker := item.get_closest_marker("at_hand")):
            item.add_marker(pytest.mark.skip(reason=marker.args[0]))


def pytest_collection_finish():
    """Exclude the million objects that exist now, and stay, from garbage collection."""
    gc.freeze()


# ---- fixtures -----------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def phases_of_steps():
    phases.watch()


LYING = "serve/test_request_sequences.py"  # its trainers say what is not so, such as that all ranks have a round
# Tests of these commit.
TRACED = ("distributed", "overlap", "publish", "serve", "store/test_crash.py", "store/test_left_parameters_crash.py")


@pytest.fixture(autouse=True)
def trace_of_commits(request, tmp_path_factory):
    """Have the commits of all processes of a test accepted by the reference automaton: see commit_traces.py."""
    if not any(request.path.is_relative_to(TESTS / place) for place in TRACED) or request.path == TESTS / LYING:
        yield
        return
    directory = tmp_path_factory.mktemp("trace")
    try:
        with commit_traces.accepted(directory):
            yield
    except Refused as e:
        pytest.fail(f"{e}\nThe traces are in {directory}", pytrace=False)
    shutil.rmtree(directory)


@pytest.fixture
def devices(backend, tmp_path):
    """Return the device strings of the test's back end."""
    return device_strings(backend, tmp_path)


@pytest.fixture(scope="session")
def few_kernels(tmp_path_factory):
    """Make an xclbin with AdamW's kernels only.

    XRT reads every kernel's metadata several times: with all kernels, that takes most of the time to open a card.
    """
    path = tmp_path_factory.mktemp("program") / "few.xclbin"
    few = [kernel_for("adamw", state_dtype) for state_dtype in ("fp32", "8bit")]
    write_emulated(path, PLATFORM, MEMORY_BYTES, {name: KERNELS[name] for name in few})
    return path


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch):
    """On cards, use an xclbin with AdamW's kernels only, except in tests marked `all_kernels`."""
    if on_cards() and not request.node.get_closest_marker("all_kernels"):
        monkeypatch.setenv("CSD_OPTIM_XCLBIN", str(request.getfixturevalue("few_kernels")))


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    """Make the current directory a temporary one, because scratch stores go below it."""
    monkeypatch.chdir(tmp_path)
    for variable in ("CSD_OPTIM_DEVICES", "CSD_OPTIM_OPTIONS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Make each checksum cover as little as possible, so that even the small tiles of tests have several."""
    monkeypatch.setattr("csd_optim.engine.open_devices.SUM_ELEMS", 1024)


@pytest.fixture(autouse=True, scope="module")
def no_living_ranks():
    yield
    if ranks := sys.modules.get("support.ranks"):
        ranks.end_living()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def restored():
    """Restores the process-wide instruction set, number of threads and size of a small step after a test."""
    isa, threads, elems = bindings.isa_used(), bindings.threads_used(), bindings.small_step_used()
    yield
    bindings.isa_use(isa)
    bindings.threads_use(threads)
    bindings.small_step_use(elems)


@pytest.fixture
def suites(request):
    """The suites that run on cards in the background."""
    return request.config.pluginmanager.get_plugin("suites")


@pytest.fixture
def run(capsys, monkeypatch):
    """A function that runs a csd-optim command in this process. It returns (exit code, stdout, stderr)."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.app([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert "\x1b" not in out + err  # no colours, since it is no terminal
        return exit_.value.code, out, err

    return run
