"""Where the time of the tests goes, and whether a folder takes more than its budget.

`pytest --times` prints a table of folders and of the slowest files. CPU time is compared with the budgets, because wall
time says little where other programs run: it is that of a worker of xdist, and of all processes that it has started or
that these have started, whether they have ended or live on.
"""

import multiprocessing.popen_forkserver
import resource
import sys
import time
from collections import Counter
from contextlib import suppress

import psutil
import pytest
from support.backends import TESTS

COLUMNS = ("tests", "wall", "own CPU", "others' CPU", "started", "asleep")  # seconds, except for tests and processes
WHOLE = ("tests", "started")
SLOWEST = 25
STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"}  # events of Python's auditing

# CPU seconds of each folder in the tier `test`: about twice what a Xeon of 2023 takes, as room for slower processors.
BUDGETS = {
    "accelerator": 240,
    "checkpoint": 90,
    "cli": 20,
    "compression": 30,
    "distributed": 290,
    "engine": 60,
    "kernels": 15,
    "model": 15,
    "muon": 30,
    "optim": 190,
    "overlap": 85,
    "params": 10,
    "planning": 15,
    "publish": 110,
    "serve": 110,
    "smartssd": 80,
    "step": 35,
    "store": 80,
}


class Times:
    """A plugin that counts for each file: COLUMNS. `is_shown`: whether it prints them."""

    def __init__(self, *, tier, is_shown):
        self._tier, self._is_shown = tier, is_shown
        self._of_file = {}  # path below tests/: Counter of COLUMNS
        self._counted = Counter()  # processes started, and seconds asleep, in this process
        self._before = None  # the counts when the file began
        if is_shown:
            sys.addaudithook(self._audit)
            _watch(multiprocessing.popen_forkserver.Popen, "_launch", lambda *_: self._counted.update(started=1))
            _watch(time, "sleep", lambda seconds: self._counted.update(asleep=seconds))

    def _audit(self, event, _):
        if event in STARTS:
            self._counted["started"] += 1

    def _now(self):
        return Counter(
            {"wall": time.perf_counter(), "own CPU": time.process_time(), "others' CPU": others_cpu(), **self._counted}
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self._before = self._before or self._now()
        times = self._of_file.setdefault(str(item.path.resolve().relative_to(TESTS)), Counter())
        times["tests"] += 1
        try:
            return (yield)
        finally:
            if nextitem is None or nextitem.path != item.path:
                now = self._now()
                now.subtract(self._before)
                times.update(now)
                self._before = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        for name, times in getattr(node, "workeroutput", {}).get("times", {}).items():
            self._of_file.setdefault(name, Counter()).update(times)

    @pytest.hookimpl(trylast=True)  # after xdist, whose workers end here
    def pytest_sessionfinish(self, session):
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["times"] = {name: dict(times) for name, times in self._of_file.items()}
        elif session.exitstatus == pytest.ExitCode.OK and self._too_slow():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _too_slow(self):
        return over_budget(self._of_file) if self._tier in ("quick", "test") else []

    def pytest_terminal_summary(self, terminalreporter):
        if self._is_shown:
            terminalreporter.section("where the time went, in seconds")
            for line in table(self._of_file):
                terminalreporter.write_line(line)
        for line in self._too_slow():
            terminalreporter.write_line(line, red=True)


def _watch(owner, name, note):
    """Let `note` know of each call's arguments, from now on."""
    original = getattr(owner, name)

    def noting(*arguments):
        note(*arguments)
        return original(*arguments)

    setattr(owner, name, noting)


def others_cpu():
    """Return the CPU seconds of all processes that this one has started, directly or not."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])  # its own, and that of its children that have ended
    return total


def by_folder(of_file):
    folders = {}
    for name, times in sorted(of_file.items()):
        folders.setdefault(name.rpartition("/")[0] or name, Counter()).update(times)
    return folders


def over_budget(of_file):
    """Return a line for each folder that takes more CPU time than its budget."""
    taken = {folder: times["own CPU"] + times["others' CPU"] for folder, times in by_folder(of_file).items()}
    return [
        f"tests/{folder} took {seconds:.0f} s of CPU time, and may take {BUDGETS[folder]} s: see CONTRIBUTING.md"
        for folder, seconds in taken.items()
        if seconds > BUDGETS.get(folder, seconds)
    ]


def table(of_file):
    """Yield the lines of a table. `of_file`: a Counter of COLUMNS for each path below tests/."""
    slowest = sorted(of_file.items(), key=lambda item: -item[1]["wall"])[:SLOWEST]
    yield f"{'':48}" + "".join(f"{column:>13}" for column in COLUMNS)
    for name, times in [("all", sum(of_file.values(), Counter())), *by_folder(of_file).items(), *slowest]:
        numbers = (f"{times[column]:13.{0 if column in WHOLE else 1}f}" for column in COLUMNS)
        yield f"{name:48}" + "".join(numbers)
