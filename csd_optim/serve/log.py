"""What an owner prints: much of it comes from outside, and must neither forge lines nor steer a terminal."""

from __future__ import annotations

MAX_LINE = 1000  # characters


def printable(text: str, most: int = MAX_LINE) -> str:
    """Return `text` as one line of at most `most` characters, in which all but printable ones are escaped."""
    shown = "".join(map(_escaped, text[: most + 1]))
    return shown if len(shown) <= most else shown[: most - 3] + "..."


def _escaped(c: str) -> str:
    """Return a character, or as in repr() the escape sequence for a backslash or what is not printable."""
    return c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode()
