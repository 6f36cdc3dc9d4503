"""Processes of a benchmark on this machine: ranks, each of which answers with one value, and objects in one each."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

processes = multiprocessing.get_context("fork")  # torch is imported once


def answers_of(size: int, function: Callable[..., Any], *arguments: Any) -> Callable[[], list[Any]]:
    """Start `function(rank, *arguments)` on each rank. Returns what returns all results, by rank.

    That raises SystemExit if a rank fails, and ends all of them.
    """
    pipes, ranks = [], []
    for rank in range(size):
        ours, theirs = processes.Pipe()
        ranks.append(processes.Process(target=_run, args=(theirs, function, rank, arguments), daemon=True))
        pipes.append(ours)
        ranks[-1].start()
        theirs.close()

    def results() -> list[Any]:
        try:
            return [pipe.recv() for pipe in pipes]
        except EOFError:
            raise SystemExit("a rank has ended early") from None
        finally:
            for process in ranks:
                process.join(10)
                process.kill()

    return results


class Distant:
    """An object in a process of its own. Its methods are called from here, one at a time."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what the method returns. Raises SystemExit if it raises, having printed why, or if it has ended."""
        try:
            self._pipe.send((method, arguments))
            return self._pipe.recv()
        except (EOFError, BrokenPipeError):
            raise SystemExit("a process has ended early") from None

    def end(self) -> None:
        """End the process. It must not have anything left to close."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        served = make(*arguments)
        while True:
            method, given = pipe.recv()
            pipe.send(getattr(served, method)(*given))
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _run(pipe: Connection, function: Callable[..., Any], rank: int, arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(function(rank, *arguments))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # other ranks may wait for this one, and this one for them
