"""What every command prints alike: one JSON object, a progress bar while it works, one line per error."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import typer

from ..errors import CSDError, CSDWarning

Tick = Callable[[str], None]  # called with a description of the part that begins now


def print_json(command: str, **content: Any) -> None:
    print(json.dumps({"schema": f"csd_optim.{command}/1", **content}))


@contextlib.contextmanager
def progress(total: int) -> Iterator[Tick]:
    """Show a progress bar on stderr until the block ends. Yields a Tick: each call begins one more of `total` parts."""
    from rich.console import Console  # imported here because it takes longer than all of `--version`
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
    """Turn errors and Ctrl-C into one line on stderr and an exit code: raises typer.Exit."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=CSDWarning)  # the commands' output says the same
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
    """Print one line on stderr; `what` is red if `text` follows it."""
    from rich.console import Console
    from rich.markup import escape

    line = f"[red]{what}[/] {escape(text)}" if text else what
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def message(e: BaseException) -> str:
    """Return an error's text without its errno."""
    if isinstance(e, OSError) and e.strerror:
        return e.strerror if isinstance(e, CSDError) or not e.filename else f"{e.filename}: {e.strerror}"
    return str(e)
