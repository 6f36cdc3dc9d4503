"""Ranks of a benchmark: processes of this machine, each of which answers with one value."""

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


def _run(pipe: Connection, function: Callable[..., Any], rank: int, arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(function(rank, *arguments))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # other ranks may wait for this one, and this one for them
