"""What a command prints: one JSON object, a bar while it works, errors as a line each."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import typer

from ..errors import CSDError, CSDWarning

Tick = Callable[[str], None]  # what is begun now


def print_json(command: str, **content: Any) -> None:
    print(json.dumps({"schema": f"csd_optim.{command}/1", **content}))


@contextlib.contextmanager
def progress(total: int) -> Iterator[Tick]:
    """A bar on stderr, gone when it is done; each call of what it yields begins one more of `total` parts."""
    from rich.console import Console  # which takes longer than `--version` by itself
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def tick(what: str) -> None:
            nonlocal begun
            bar.update(task, description=what, completed=begun)
            begun += 1

        yield tick


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Errors and warnings become one line each on stderr."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=CSDWarning)  # what they say is part of what is shown
        try:
            yield
        except BrokenPipeError:
            raise
        except (CSDError, OSError) as e:
            _say("error:", message(e))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            _say("interrupted; the scratch files are gone")
            raise typer.Exit(130) from None


def _say(what: str, text: str = "") -> None:
    """One line on stderr, `what` in red if anything follows."""
    from rich.console import Console
    from rich.markup import escape

    line = f"[red]{what}[/] {escape(text)}" if text else what
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def message(e: BaseException) -> str:
    """An error's text without the errno's number."""
    if isinstance(e, OSError) and e.strerror:
        return e.strerror if isinstance(e, CSDError) or not e.filename else f"{e.filename}: {e.strerror}"
    return str(e)
