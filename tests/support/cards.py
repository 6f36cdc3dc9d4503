"""Runs commands with emulated cards, and the tests of every back end on them.

These suites, each a pytest process, wait as much as they compute. So they run in the background, two at a time, as soon
as it is known that a test asks for them. That test waits for the result.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
from support.forked import python
from support.tiers import values

from csd_optim import CSDUnavailableError
from csd_optim.devices import emulation

TESTS = Path(__file__).resolve().parent.parent
SECONDS = 300  # for any command; none takes half of it
# Name: files of tests/, files that only `make soak` adds, and the cards of a daily run: one ("xrt"), two ("xrts"), or
# both. Opening two cards takes twice as long as one, and longer than most tests. So tests of what a card computes run
# on one; tests of what is spread over cards, or resumed, on two. The files for soak test what torch sees of an
# optimizer, which has little to do with cards. There are few suites, because a process takes as long to start as a
# dozen tests do; but one process for "adamw", "torch" and "topk" was seen to die in the middle, without a message.
TORCH = ["optim/test_state_dict.py", "optim/test_outside_writes.py"]
FAR = ["optim/test_constructor.py", "optim/test_training_loops.py", "optim/test_closing.py"]
RESUME = [f"optim/test_{name}.py" for name in ("resume", "user_state", "edited_states", "dropped")]
ENGINE = ["engine/test_engine.py", "optim/test_histories.py", "step/test_signals.py", "overlap/test_devices.py"]
SUITES = {
    "adamw": (["optim/test_adamw.py"], [], "xrt"),
    "torch": (TORCH, FAR, "xrt"),
    "topk": (["compression/test_topk.py"], ["optim/test_pytorch_suite.py"], "xrts"),
    "resume": (RESUME, ["optim/test_resume_refused.py"], "xrts"),
    "engine": (ENGINE, [], "xrt,xrts"),
}


def why_no_cards():
    try:
        emulation.find_xrt()
    except CSDUnavailableError as e:
        return str(e)


needs_xrt = pytest.mark.skipif(why_no_cards() is not None, reason=str(why_no_cards()))


def sample(items):
    """Return a sample of tests: at least a case of each test, and per file each value of each argument in some test.

    Values with the fewest cases so far are preferred. All combinations run on other back ends, with the kernel alone
    (test_kernels.py), and in `make soak`.
    """
    tests, chosen, taken = {}, set(), Counter()
    for item in items:
        in_file = {(item.path, *value) for value in values(item)}
        tests.setdefault((item.path, item.originalname), {})[item] = in_file
    for cases in tests.values():
        while not chosen & cases.keys() or any(not taken[value] for case in cases.values() for value in case):
            best = max(
                cases, key=lambda case: (sum(not taken[v] for v in cases[case]), -sum(taken[v] for v in cases[case]))
            )
            taken.update(cases[best])
            chosen.add(best)
    return [item for item in items if item in chosen]


def emulated(*command, cards=1, drives=None, fault="", seconds=SECONDS):
    """Run a command with emulated cards, one of which may fail, and kill whatever processes it leaves behind."""
    with tempfile.TemporaryDirectory() as directory:
        # Output goes to files: a pipe would stay open as long as any process that the command has started.
        out, err = Path(directory, "out"), Path(directory, "err")
        redirected = ["sh", "-c", 'exec >"$1" 2>"$2"; shift 2; exec "$@"', "sh", out, err]
        status = emulation.run(
            [*redirected, "env", f"CSD_OPTIM_EMULATOR_FAULT={fault}", *command], cards, drives, seconds
        )
        said = [file.read_text(errors="replace") for file in (out, err)]
    return subprocess.CompletedProcess(command, status, *said)


def emulated_python(program, *arguments, cards=1, drives=None, fault=""):
    """Run a Python program with emulated cards, in a forked process if possible."""
    with tempfile.TemporaryDirectory(prefix="csd_optim_emu_", ignore_cleanup_errors=True) as directory:
        prepared = emulation.prepare(Path(directory), cards, drives)
        if "LD_LIBRARY_PATH" in prepared:  # it is read only when an interpreter starts
            return emulated(
                sys.executable, "-c", program, *map(str, arguments), cards=cards, drives=drives, fault=fault
            )
        environment = os.environ | prepared | {"CSD_OPTIM_EMULATOR_FAULT": fault}
        return python(program, *arguments, environment=environment, seconds=SECONDS)


def script(text, *arguments, **options):
    """Runs a Python script with emulated cards, asserts that it succeeds, and returns what it prints."""
    done = emulated_python(PRELUDE + textwrap.dedent(text), *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Each script begins with this: a small model of mixed precision, and functions that train it.
PRELUDE = """
import sys, time, torch
from csd_optim import CSDAdam, CSDError, CSDOSError, CSDStoreError, CSDUnavailableError

def model():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 70), torch.nn.Tanh(), torch.nn.Linear(70, 30))
    net[0].to(torch.bfloat16)
    return net

def train(net, opt, steps):
    for i in steps:
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(i)).bfloat16()
        net[2](net[:2](x).float()).square().mean().backward()
        opt.step()
        opt.zero_grad()

def bits(net, opt):
    return [p.detach().clone() for p in net.parameters()] + [
        opt.state[p][key].clone() for p in net.parameters() for key in ("master", "exp_avg", "exp_avg_sq", "step")]

def same(a, b):
    assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))
"""


class Suites:
    """A plugin of pytest that starts the suites which tests ask for, as soon as all tests are collected.

    With pytest-xdist, the controller, which otherwise only waits for its workers, runs them; a worker asks for results.
    """

    def __init__(self, config):
        worker = getattr(config, "workerinput", None)
        self.runs = worker is None and not config.option.collectonly
        self.tier = config.option.tier
        self.directory = Path(worker["suites"] if worker else tempfile.mkdtemp(prefix="csd_optim_suites_"))
        self.processes = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["suites"] = str(self.directory)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self._start(ids)

    def pytest_collection_finish(self, session):
        self._start([item.nodeid for item in session.items])

    def _start(self, ids):
        asked = [suite for suite in SUITES if any(id.endswith(f"test_the_suite_on_cards[{suite}]") for id in ids)]
        if self.runs and not self.processes and asked and why_no_cards() is None:
            command = [sys.executable, "-m", "support.cards", self.directory, self.tier]
            turns = [turn for turn in (asked[::2], asked[1::2]) if turn]
            self.processes = [subprocess.Popen([*command, *turn], cwd=TESTS) for turn in turns]

    def result(self, suite):
        """Return what the suite's pytest printed, and its exit status."""
        deadline = time.monotonic() + len(SUITES) * SECONDS
        while not (done := self.directory / f"{suite}.status").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the suite {suite} on cards did not end in time")
            time.sleep(0.1)
        return (self.directory / f"{suite}.out").read_text(), int(done.read_text())

    def pytest_unconfigure(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        if self.runs:
            shutil.rmtree(self.directory)


def main(directory, tier, *asked):
    try:
        run(directory, tier, asked)
    finally:  # always leave a result, so that no test waits for ever
        for suite in asked:
            if not Path(directory, f"{suite}.status").exists():
                Path(directory, f"{suite}.out").write_text("the suite did not run to its end")
                Path(directory, f"{suite}.status").write_text("1")


def run(directory, tier, asked):
    for suite in asked:
        files, more, on = SUITES[suite]
        if tier == "soak":
            files, on = files + more, on if suite == "topk" else "xrt,xrts"
        command = [sys.executable, "-m", "pytest", "-v", "--durations=5", f"--xrt={on}", "-p", "no:cacheprovider"]
        command += ["--tier", tier, *(str(TESTS / file) for file in files)]
        done = emulated(*command, cards=3, seconds=4 * SECONDS)
        if done.returncode in (128 + signal.SIGTERM, 128 + signal.SIGINT):  # the run was interrupted
            break
        Path(directory, f"{suite}.out").write_text(done.stdout + done.stderr)
        status = Path(directory, f"{suite}.unfinished")
        status.write_text(str(done.returncode))
        status.rename(status.with_suffix(".status"))


if __name__ == "__main__":
    main(*sys.argv[1:])
