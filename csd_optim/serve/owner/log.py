"""Escapes lines of an owner's log: text from outside must neither forge lines nor control a terminal."""

from __future__ import annotations

MAX_LINE = 1000  # characters


def printable(text: str, most: int = MAX_LINE) -> str:
    """Return `text` as one line of at most `most` characters, with unprintable characters escaped."""
    shown = "".join(map(_escaped, text[: most + 1]))
    return shown if len(shown) <= most else shown[: most - 3] + "..."


def _escaped(c: str) -> str:
    """Return a character; a backslash or an unprintable character escaped as in repr()."""
    return c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode()
