"""Actions of commits, told to a listener right before they are done: tests check them against docs/commits.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

listener: Callable[..., None] | None = None  # called with an action and its fields, on any thread; None: nobody listens


def note(action: str, **fields: Any) -> None:
    """Tell the listener, if there is one, which objects take part in an action."""
    if listener:
        listener(action, **fields)
