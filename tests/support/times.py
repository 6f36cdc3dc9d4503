"""Where the time of the tests goes: `pytest --times` prints a table of the folders and of the slowest files.

What several tests of a file use, such as ranks that live on, counts for the file. CPU time is more telling than wall
time where other programs run: these are all of it in a worker of xdist, and in all processes that it has started or
these have, whether they live or not.
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
_STARTED = {"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"}  # events of Python's auditing


class Times:
    def __init__(self):
        self._of_file = {}  # path below tests/: Counter of COLUMNS
        self._counted = Counter()  # processes started, and seconds asleep, in this process
        self._since = None
        sys.addaudithook(self._audit)
        launch = multiprocessing.popen_forkserver.Popen._launch

        def counting(popen, process):
            self._counted["started"] += 1
            return launch(popen, process)

        multiprocessing.popen_forkserver.Popen._launch = counting

    def _audit(self, event, arguments):
        if event in _STARTED:
            self._counted["started"] += 1
        elif event == "time.sleep":  # from Python 3.11 on
            self._counted["asleep"] += arguments[0]

    def _now(self):
        return Counter(
            {"wall": time.perf_counter(), "own CPU": time.process_time(), "others' CPU": others_cpu(), **self._counted}
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self._since = self._since or self._now()
        name = str(item.path.relative_to(TESTS))
        times = self._of_file.setdefault(name, Counter())
        times["tests"] += 1
        try:
            return (yield)
        finally:
            if nextitem is None or nextitem.path != item.path:
                now = self._now()
                now.subtract(self._since)
                times.update(now)
                self._since = None

    def pytest_sessionfinish(self, session):
        if output := getattr(session.config, "workeroutput", None):
            output["times"] = {name: dict(times) for name, times in self._of_file.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        for name, times in getattr(node, "workeroutput", {}).get("times", {}).items():
            self._of_file.setdefault(name, Counter()).update(times)

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("where the time went, in seconds")
        for line in table(self._of_file):
            terminalreporter.write_line(line)


def others_cpu():
    """Return the CPU seconds of all processes that this one has started, directly or not, and has not lost."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])  # its own, and that of its children that have ended
    return total


def table(of_file):
    """Return the lines of a table. `of_file`: a Counter of COLUMNS for each path below tests/."""
    of_folder = {}
    for name, times in of_file.items():
        folder = name.rpartition("/")[0] or name
        of_folder.setdefault(folder, Counter()).update(times)
    slowest = sorted(of_file.items(), key=lambda item: -item[1]["wall"])[:SLOWEST]
    rows = [("all", sum(of_file.values(), Counter())), *sorted(of_folder.items()), *slowest]
    yield f"{'':48}" + "".join(f"{column:>13}" for column in COLUMNS)
    for name, times in rows:
        numbers = (f"{times[column]:13.{0 if column in WHOLE else 1}f}" for column in COLUMNS)
        yield f"{name:48}" + "".join(numbers)
