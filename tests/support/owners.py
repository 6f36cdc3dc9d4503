"""An optimizer rank (`csd-optim serve`) in a process of its own."""

import os
import re
import signal
import time
from pathlib import Path

import torch
from support.forked import process

STARTS = 300  # seconds that it may take to start


class Owner:
    """An optimizer rank with the directory `store` below `directory`. The `with` block ends it.

    It listens on a free port of `host`, which it keeps when it is started again. `before` is called in its process,
    before it serves.
    """

    def __init__(self, directory, timeout=60, host="127.0.0.1", before=None):
        self.directory, self.timeout, self.host, self.before = Path(directory), timeout, host, before
        self.store = str(self.directory / "owner")
        self.runs, self.process, self.port = 0, None, 0
        self.start()

    def start(self):
        if self.process:
            self.kill()
        self.runs += 1
        self.log = self.directory / f"owner-{self.runs}.log"
        os.makedirs(self.store, exist_ok=True)
        address = f"{self.host}:{self.port}"
        self.process = process(_serve, self.store, str(self.log), self.timeout, address, self.before, daemon=True)
        self.port = int(self.until(r"optimizer rank with .* at \S+:(\d+)")[1])

    @property
    def address(self):
        return f"serve://{self.host}:{self.port}?timeout={self.timeout}"

    @property
    def said(self):
        return self.log.read_text() if self.log.exists() else ""

    def until(self, pattern):
        """Wait until its output matches `pattern`, and return the first match."""
        end = time.monotonic() + STARTS
        while not (found := re.search(pattern, self.said)):
            lives = time.monotonic() < end and self.process.is_alive()
            assert lives, f"{pattern} is not in {self.said}"
            time.sleep(0.01)
        return found

    @property
    def pid(self):
        assert self.process.is_alive(), self.said
        return self.process.pid

    def stop(self):
        """Stop it as `kill PID` does (SIGTERM), and assert that it exits with 0."""
        os.kill(self.process.pid, signal.SIGTERM)
        self.process.join(STARTS)
        assert self.process.exitcode == 0, self.said

    def kill(self):
        self.process.kill()
        self.process.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def _serve(store, log, timeout, address, before):
    for fd in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), fd)
    torch.set_num_threads(1)
    from csd_optim.cli.serving import serve

    if before:
        before()
    serve([store], address, timeout)
